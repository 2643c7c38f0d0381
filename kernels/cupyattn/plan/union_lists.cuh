// Makes unions of the lists of neighbouring tokens: the blocks that some token of an item names, in
// their order, and of each block which tokens name it. A block of threads makes one union. A block
// that a token names more than once is in the union as often.
#pragma once

#include "cupyattn/params/key_unions.cuh"
#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/plan/item_finder.cuh"
#include "cupyattn/ptx/memory.cuh"

namespace cupyattn {

template <typename Config>
struct UnionLists {
  static constexpr int kThreads = Config::kThreads, kEntries = Config::kEntries;
  static constexpr int kWarps = kThreads / kWarpSize;
  // An entry is the number of its block and, in the lowest bits, the token of the item.
  static constexpr int kTokenBits = 5;
  static constexpr uint32_t kNone = ~0u;

  struct SharedMemory {
    uint32_t entries[kEntries];
    uint32_t tokens[kEntries];  // of each block of the union
    uint32_t blocks[kEntries];
    uint32_t before[kEntries];  // blocks of the union ahead of those that an entry begins
    int warp_sum[kWarps];
    WorkItem found;
    uint32_t num_whole;  // blocks that all tokens see to their end
  };

  const UnionListsParams& params;
  SharedMemory& shared;
  const int thread = threadIdx.x;

  __device__ __forceinline__ void run() const {
    if (thread < kWarpSize) {
      const ItemFinder<false> finder{params.lengths, 1, params.group_tokens, thread};
      const WorkItem found = finder.find(blockIdx.x);
      if (thread == 0) shared.found = found, shared.num_whole = 0;
    }
    ptx::block_sync();
    const WorkItem& found = shared.found;
    const int num_tokens = max_of(min_of(params.group_tokens, found.qo_len - found.first_row), 0);
    const int place = blockIdx.x * gridDim.y + blockIdx.y;
    if (num_tokens == 0) {
      if (thread == 0) params.items[place] = WorkItem{};
      return;
    }
    const int count = load_entries(found, num_tokens);
    sort(count);
    const int num_blocks = find_blocks(count);
    write(found, place, num_blocks);
    ptx::block_sync();
    if (thread == 0) params.items[place] = item_of(found, place, num_tokens, num_blocks);
  }

 private:
  // The keys that token `token` of an item sees.
  __device__ __forceinline__ int seen_by(const WorkItem& found, int token) const {
    const int later = params.is_causal ? found.qo_len - 1 - found.first_row - token : 0;
    return max_of(found.kv_len - later, 0);
  }

  // An item of prefill_sm90: its tokens, and its union for keys. What it needs no field for:
  // first_state counts the keys of blocks that all tokens see to their end, mask_start is the place
  // of its tiles, and key_offset the keys that its first token sees.
  __device__ __forceinline__ WorkItem item_of(const WorkItem& found, int place, int num_tokens,
                                              int num_blocks) const {
    WorkItem item{};
    item.q_start = found.q_start + found.first_row;
    item.qo_len = num_tokens;
    item.kv_start = place * chunks_an_item();
    item.kv_len = num_blocks << params.block_shift;
    item.num_splits = 1;
    item.first_state = static_cast<int>(shared.num_whole) << params.block_shift;
    item.mask_start = static_cast<int64_t>(place) * params.num_tiles;
    // Negative where the first tokens see no key: each sees one more than the one before.
    item.key_offset = found.kv_len;
    if (params.is_causal) item.key_offset -= found.qo_len - 1 - found.first_row;
    return item;
  }
  __device__ __forceinline__ int chunks_an_item() const {
    return (params.group_tokens * params.length) << (params.block_shift - params.chunk_shift);
  }

  // Returns how many entries are sorted: a power of two.
  __device__ __forceinline__ int load_entries(const WorkItem& found, int num_tokens) const {
    const int total = num_tokens * params.length;
    int count = 2;
    while (count < total) count *= 2;
    for (int index = thread; index < count; index += kThreads) {
      uint32_t entry = kNone;
      if (index < total) {
        const int token = index / params.length;
        const int64_t row = found.q_start + found.first_row + token;
        const int block = params.entries[row * params.stride_n + blockIdx.y * params.stride_group +
                                         index - token * params.length];
        const int seen = seen_by(found, token), keys = 1 << params.block_shift;
        const uint32_t num_blocks = static_cast<uint32_t>(seen + keys - 1) >> params.block_shift;
        // mutate: unions-of-blocks-beyond
        if (static_cast<uint32_t>(block) < num_blocks) {
          entry = static_cast<uint32_t>(block) << kTokenBits | token;
        }
      }
      shared.entries[index] = entry;
      shared.tokens[index] = 0;
    }
    return count;
  }

  // Bitonic, in ascending order.
  __device__ __forceinline__ void sort(int count) const {
#pragma unroll 1
    for (int run = 2; run <= count; run *= 2) {
#pragma unroll 1
      for (int step = run / 2; step > 0; step /= 2) {
        ptx::block_sync();
        for (int pair = thread; pair < count / 2; pair += kThreads) {
          const int low = 2 * pair - (pair & (step - 1)), high = low + step;
          const uint32_t a = shared.entries[low], b = shared.entries[high];
          const bool is_ascending = (low & run) == 0;
          if ((a > b) == is_ascending) {
            shared.entries[low] = b;
            shared.entries[high] = a;
          }
        }
      }
    }
    ptx::block_sync();
  }

  // What an entry is among those of its block: where these begin, how many ahead of it are the same
  // token's, and whether no other token has named the block as often before.
  struct Rank {
    int begin, times;
    bool is_new;
  };
  __device__ __forceinline__ Rank rank_of(int index) const {
    const uint32_t own = shared.entries[index];
    Rank rank{index, 0, true};
    int of_another = 0;
    uint32_t another = own;
    while (rank.begin > 0 && (shared.entries[rank.begin - 1] ^ own) >> kTokenBits == 0) {
      const uint32_t entry = shared.entries[--rank.begin];
      if (entry == own) {
        ++rank.times;
      } else {
        of_another = entry == another ? of_another + 1 : 1;
        another = entry;
        if (of_another > rank.times) rank.is_new = false;
      }
    }
    return rank;
  }

  // Writes the union to shared memory; returns how many blocks it has.
  __device__ __forceinline__ int find_blocks(int count) const {
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += kThreads) {
      const int index = first + thread;
      const bool exists = index < count && shared.entries[index] != kNone;
      const bool is_new = exists && rank_of(index).is_new;
      int sum = 0;
      const int before =
          block_scan(shared.warp_sum, thread / kWarpSize, thread % kWarpSize, is_new, sum);
      if (index < count) shared.before[index] = total + before;
      total += sum;
      ptx::block_sync();
    }
#pragma unroll 1
    for (int index = thread; index < count; index += kThreads) {
      const uint32_t entry = shared.entries[index];
      if (entry == kNone) continue;
      const Rank rank = rank_of(index);
      const int at = shared.before[rank.begin] + rank.times;  // mutate: union-duplicates-once
      // mutate: union-tokens-shifted
      ptx::atomic_or_shared(&shared.tokens[at], 1u << (entry & ((1 << kTokenBits) - 1)));
      if (rank.is_new) shared.blocks[at] = entry >> kTokenBits;
    }
    ptx::block_sync();
    return total;
  }

  __device__ __forceinline__ void write(const WorkItem& found, int place, int num_blocks) const {
    const int halves_shift = params.block_shift - 6;  // of a block
    const int num_halves = num_blocks << halves_shift;
    UnionTile* tiles = params.tiles + static_cast<int64_t>(place) * params.num_tiles;
    const int least_seen = seen_by(found, 0);
#pragma unroll 1
    for (int half = thread; half < round_up(num_halves, 2); half += kThreads) {
      const int at = half >> halves_shift;
      const bool exists = half < num_halves;
      const int part = (half & ((1 << halves_shift) - 1)) * kUnionKeys;
      const int block = exists ? static_cast<int>(shared.blocks[at]) : 0;
      tiles[half / 2].tokens[half % 2] = exists ? shared.tokens[at] : 0;
      tiles[half / 2].first_key[half % 2] = (block << params.block_shift) + part;
    }
    const int32_t* pages = params.table + found.kv_start;
    int32_t* chunks = params.chunks + static_cast<int64_t>(place) * chunks_an_item();
    const int more_shift = params.block_shift - params.chunk_shift;
#pragma unroll 1
    for (int chunk = thread; chunk < num_blocks << more_shift; chunk += kThreads) {
      const int block = static_cast<int>(shared.blocks[chunk >> more_shift]);
      const int key = (block << params.block_shift) +
                      ((chunk & ((1 << more_shift) - 1)) << params.chunk_shift);
      // Keys past the last one may have no page.
      const int page = key / params.page_size, rest = key - page * params.page_size;
      const bool exists = key < found.kv_len;
      chunks[chunk] = exists ? pages[page] * params.page_step + (rest >> params.chunk_shift) : -1;
    }
#pragma unroll 1
    for (int at = thread; at < num_blocks; at += kThreads) {
      const int end = static_cast<int>(shared.blocks[at] + 1) << params.block_shift;
      if (end <= least_seen) ptx::atomic_add_shared(&shared.num_whole, 1);
    }
  }
};

}  // namespace cupyattn

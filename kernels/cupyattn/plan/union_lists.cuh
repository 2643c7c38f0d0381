// Makes unions of the lists of neighbouring tokens: the blocks that some token of an item names, in
// their order, and of each block which tokens name it. A block of threads makes one union. A block
// that a token names more than once is in the union as often.
#pragma once

#include "cupyattn/params/key_unions.cuh"
#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/plan/item_finder.cuh"
#include "cupyattn/ptx/memory.cuh"

namespace cupyattn {

// Lengths in steps of their own, where items are found.
struct SteppedIndices {
  const int32_t* at;
  int step;

  __device__ __forceinline__ int32_t operator[](int index) const { return at[index * step]; }
  __device__ __forceinline__ bool operator!=(decltype(nullptr)) const { return at != nullptr; }
};
struct SteppedLengths : DeviceLengths {
  SteppedIndices qo_offsets, kv_offsets, kv_lens;

  __device__ __forceinline__ SteppedLengths(const DeviceLengths& lengths, const LengthSteps& steps)
      : DeviceLengths(lengths),
        qo_offsets{lengths.qo_offsets, steps.qo_offsets},
        kv_offsets{lengths.kv_offsets, steps.kv_offsets},
        kv_lens{lengths.kv_lens, steps.kv_lens} {}
};

// kCuts: tiles have windows, or keys that are in no pages, and say from where on their keys count.
template <typename Config>
struct UnionLists {
  static constexpr int kThreads = Config::kThreads, kEntries = Config::kEntries;
  static constexpr bool kCuts = Config::kCuts;
  // Units of a tile of small blocks; 0: tiles have two halves.
  static constexpr int kUnits = Config::kUnits;
  using Tile = conditional<kUnits != 0, SmallUnionTile, conditional<kCuts, CutUnionTile, UnionTile>>;
  static constexpr int kWarps = kThreads / kWarpSize;
  // An entry is the number of its block, whether it is a window's, and the token of the item.
  static constexpr int kTokenBits = 5, kKindBits = kCuts ? 1 : 0;
  static constexpr uint32_t kNone = ~0u;
  static constexpr bool kMarks = kUnits != 0;  // of small blocks there are many

  struct SharedMemory {
    uint32_t entries[kEntries];
    uint32_t tokens[kEntries];  // of each block of the union
    uint32_t blocks[kEntries];  // their numbers, and whether they are windows'
    uint32_t before[kEntries];  // blocks of the union ahead of those that an entry begins
    uint32_t more_tokens[kEntries];
    int warp_sum[kWarps];
    WorkItem found;
    uint32_t num_whole;  // blocks that all tokens see to their end
    uint32_t num_listed;  // entries that name a block
    uint32_t repeats;     // whether a list names a block twice
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/attention/key_unions.py) must agree");

  const UnionListsParams& params;
  SharedMemory& shared;
  const int thread = threadIdx.x;

  __device__ __forceinline__ void run() const {
    if (thread < kWarpSize) {
      const SteppedLengths lengths(params.lengths, params.steps);
      const ItemFinder<false, SteppedLengths> finder{lengths, 1, params.group_tokens, thread};
      const WorkItem found = finder.find(blockIdx.x);
      if (thread == 0) {
        shared.found = found;
        shared.num_whole = shared.num_listed = shared.repeats = 0;
      }
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
    int num_blocks = kMarks && has_marks(found) ? mark_blocks(found, count) : -1;
    if (num_blocks < 0) {
      sort(count);
      num_blocks = find_blocks(count);
    }
    if (params.alone != nullptr && stand_alone(found, num_tokens, num_blocks)) {
      if (thread == 0) params.items[place] = WorkItem{};
      return;
    }
    count_whole(found, num_blocks);
    order_blocks(num_blocks);
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

  // The keys that a token's list may name.
  __device__ __forceinline__ int listed_end(int seen) const {
    return kCuts ? max_of(seen - params.window, 0) : seen;  // mutate: union-windows-twice
  }
  __device__ __forceinline__ int places_a_token() const {
    return params.length + (kCuts ? params.window_blocks : 0);
  }

  // Says of the tokens' lists whether each is read by itself, because that takes less than the union.
  __device__ __forceinline__ bool stand_alone(const WorkItem& found, int num_tokens,
                                              int num_blocks) const {
    const int of_union = num_blocks * params.block_cost;
    // A list takes a block as long as a union takes others, and comes behind them: it is not worth it
    // for the last few tokens of a request.
    const bool are_many = 2 * num_tokens >= params.group_tokens;
    const bool are_alone =
        are_many && of_union > static_cast<int>(shared.num_listed) * params.entry_cost;
    if (thread < num_tokens) {
      const int64_t token = found.q_start + found.first_row + thread;
      // mutate: lists-alone-left-out
      params.alone[token * gridDim.y + blockIdx.y] = are_alone;
    }
    return are_alone;
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
    return (params.group_tokens * places_a_token()) << (params.block_shift - params.chunk_shift);
  }

  // Returns how many entries are sorted: a power of two.
  __device__ __forceinline__ int load_entries(const WorkItem& found, int num_tokens) const {
    const int places = places_a_token(), total = num_tokens * places;
    int count = 2;
    while (count < total) count *= 2;
    uint32_t num_listed = 0;
    for (int index = thread; index < count; index += kThreads) {
      uint32_t entry = kNone;
      if (index < total) {
        const int token = index / places;
        entry = entry_of(found, token, index - token * places);
      }
      shared.entries[index] = entry;
      shared.tokens[index] = 0;
      if (entry != kNone) ++num_listed;
    }
    if (num_listed > 0) ptx::atomic_add_shared(&shared.num_listed, num_listed);
    return count;
  }

  // The entry of a place of a token's list, or of its window behind that.
  __device__ __forceinline__ uint32_t entry_of(const WorkItem& found, int token, int place) const {
    const int seen = seen_by(found, token), keys = 1 << params.block_shift;
    if (kCuts && place >= params.length) {
      const int block = (listed_end(seen) >> params.block_shift) + place - params.length;
      if (params.window == 0 || block << params.block_shift >= seen) return kNone;
      return static_cast<uint32_t>(2 * block + 1) << kTokenBits | token;
    }
    const int64_t row = found.q_start + found.first_row + token;
    const int block =
        params.entries[row * params.stride_n + blockIdx.y * params.stride_group + place];
    const uint32_t num_blocks =
        static_cast<uint32_t>(listed_end(seen) + keys - 1) >> params.block_shift;
    // mutate: unions-of-blocks-beyond
    if (static_cast<uint32_t>(block) >= num_blocks) return kNone;
    return static_cast<uint32_t>(block) << (kTokenBits + kKindBits) | token;
  }

  // Whether each block of a request may have a bit in shared memory.
  __device__ __forceinline__ int words_of_marks(const WorkItem& found) const {
    const int num_blocks = (found.kv_len + (1 << params.block_shift) - 1) >> params.block_shift;
    return ceil_div(num_blocks, 32);
  }
  __device__ __forceinline__ bool has_marks(const WorkItem& found) const {
    return words_of_marks(found) <= kEntries;
  }

  // Writes the union to shared memory by a bit for each block of the request, which is sooner than to
  // sort; returns how many blocks it has, -1 if some list names a block twice.
  __device__ __forceinline__ int mark_blocks(const WorkItem& found, int count) const {
    uint32_t *marks = shared.before, *ahead = shared.more_tokens;
    const int num_words = words_of_marks(found);
    for (int word = thread; word < num_words; word += kThreads) marks[word] = 0;
    ptx::block_sync();
    for (int index = thread; index < count; index += kThreads) {
      const uint32_t entry = shared.entries[index], block = entry >> kTokenBits;
      if (entry != kNone) ptx::atomic_or_shared(&marks[block / 32], 1u << (block % 32));
    }
    ptx::block_sync();
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < num_words; first += kThreads) {
      const int word = first + thread;
      const uint32_t own = word < num_words ? marks[word] : 0;
      int sum = 0;
      int at = total + block_scan(shared.warp_sum, thread / kWarpSize, thread % kWarpSize,
                                  __popc(own), sum);
      if (word < num_words) ahead[word] = at;
      for (uint32_t rest = own; rest != 0; rest &= rest - 1) {
        shared.blocks[at++] = 32 * word + __popc((rest & (0u - rest)) - 1);
      }
      total += sum;
      ptx::block_sync();
    }
    for (int index = thread; index < count; index += kThreads) {
      const uint32_t entry = shared.entries[index], block = entry >> kTokenBits;
      if (entry == kNone) continue;
      const uint32_t lower = marks[block / 32] & ((1u << (block % 32)) - 1);
      // mutate: marked-tokens-shifted
      const uint32_t token = 1u << (entry & ((1 << kTokenBits) - 1));
      const uint32_t others =
          ptx::atomic_or_shared(&shared.tokens[ahead[block / 32] + __popc(lower)], token);
      if ((others & token) != 0) ptx::atomic_or_shared(&shared.repeats, 1u);
    }
    ptx::block_sync();
    if (shared.repeats == 0) return total;
    for (int index = thread; index < count; index += kThreads) shared.tokens[index] = 0;
    return -1;
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

  // Counts the blocks that all tokens see to their end, which come first.
  __device__ __forceinline__ void count_whole(const WorkItem& found, int num_blocks) const {
    const int least_seen = listed_end(seen_by(found, 0));
#pragma unroll 1
    for (int at = thread; at < num_blocks; at += kThreads) {
      const uint32_t name = shared.blocks[at];
      const int end = static_cast<int>((name >> kKindBits) + 1) << params.block_shift;
      const bool is_window = kCuts && (name & 1) != 0;
      if (!is_window && end <= least_seen) ptx::atomic_add_shared(&shared.num_whole, 1);
    }
    ptx::block_sync();
  }

  // Puts tiles of blocks that the rows of one warpgroup alone want side by side, one for the first,
  // one for the second, and so on, and blocks that both want behind them: a warpgroup passes over
  // tiles that it does not want, while the other multiplies. Only whole blocks move: the others are
  // cut, which the last tiles are swept for.
  __device__ __forceinline__ void order_blocks(int num_blocks) const {
    const int a_tile = kUnits != 0 ? max_of(kUnits * kUnitKeys >> params.block_shift, 1)
                                   : 2 >> (params.block_shift - 6);  // blocks
    const int num_whole = static_cast<int>(shared.num_whole);
    int totals[3] = {};
#pragma unroll 1
    for (int first = 0; first < num_whole; first += kThreads) {
      const int at = first + thread;
      const int own = at < num_whole ? wanted_by(shared.tokens[at]) : -1;
      int rank = 0;
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) {
        int sum = 0;
        const int before =
            block_scan(shared.warp_sum, thread / kWarpSize, thread % kWarpSize, own == kind, sum);
        if (own == kind) rank = totals[kind] + before;
        totals[kind] += sum;
        ptx::block_sync();
      }
      if (own >= 0) shared.before[at] = static_cast<uint32_t>(4 * rank + own);
    }
    // Entries are not needed any more: their place has the order.
    uint32_t* blocks = shared.entries;
    uint32_t* tokens = shared.more_tokens;
#pragma unroll 1
    for (int at = thread; at < num_blocks; at += kThreads) {
      int to = at;
      if (at < num_whole) {
        const int own = static_cast<int>(shared.before[at]) & 3, rank = static_cast<int>(shared.before[at]) >> 2;
        const int ahead = rank - rank % a_tile;  // in tiles before its own
        to = own == 0   ? rank + min_of(totals[1], ahead)
             // mutate: union-pairs-of-others
             : own == 1 ? rank + min_of(totals[0], ahead + a_tile)
                        : totals[0] + totals[1] + rank;
      }
      blocks[to] = shared.blocks[at];
      tokens[to] = shared.tokens[at];
    }
    ptx::block_sync();
#pragma unroll 1
    for (int at = thread; at < num_blocks; at += kThreads) {
      shared.blocks[at] = blocks[at];
      shared.tokens[at] = tokens[at];
    }
    ptx::block_sync();
  }
  // Whose rows want a block: those of the first warpgroup alone, of the second alone, or both.
  __device__ __forceinline__ int wanted_by(uint32_t tokens) const {
    const bool first = (tokens & params.tokens_of[0]) != 0, second = (tokens & params.tokens_of[1]) != 0;
    return first && second ? 2 : second;
  }

  // A chunk of keys from `key` of the request on: where it is, and by how many keys it begins earlier
  // in memory.
  struct Chunk {
    int32_t place;
    int early;
  };
  __device__ __forceinline__ Chunk chunk_of(const WorkItem& found, int key) const {
    if (key >= found.kv_len) return Chunk{-1, 0};  // keys past the last one may have no page
    if (kCuts && params.num_rows > 0) {
      const int first = params.table == nullptr ? found.kv_start
                                                : params.table[found.kv_start] * params.page_step;
      // mutate: union-rows-past-the-last
      const int last = params.num_rows - (1 << params.chunk_shift);
      const int row = min_of(first + key, last);
      return Chunk{row, first + key - row};
    }
    const int page = key / params.page_size, rest = key - page * params.page_size;
    const int chunk = rest >> params.chunk_shift;
    const int entry = found.kv_start + page;
    // Without a table the pages of a request lie one behind the other.
    return Chunk{(params.table == nullptr ? entry : params.table[entry]) * params.page_step + chunk, 0};
  }

  __device__ __forceinline__ void write_half(const WorkItem& found, Tile& tile, int half,
                                             int at, int part, bool exists) const {
    const uint32_t name = exists ? shared.blocks[at] : 0;
    const int key = (static_cast<int>(name >> kKindBits) << params.block_shift) + part;
    tile.tokens[half] = exists ? shared.tokens[at] : 0;
    tile.first_key[half] = key;
    if constexpr (kCuts) {
      // Halves are chunks where chunks may begin earlier.
      tile.first_key[half] -= exists ? chunk_of(found, key).early : 0;
      tile.begin[half] = (name & 1) ? ~key : key;
    }
  }

  __device__ __forceinline__ void write_halves(const WorkItem& found, Tile* tiles,
                                               int num_blocks) const {
    const int halves_shift = params.block_shift - 6;  // of a block
    const int num_halves = num_blocks << halves_shift;
#pragma unroll 1
    for (int half = thread; half < round_up(num_halves, 2); half += kThreads) {
      const int part = (half & ((1 << halves_shift) - 1)) * kUnionKeys;
      write_half(found, tiles[half / 2], half % 2, half >> halves_shift, part, half < num_halves);
    }
  }

  // A warp writes a tile: a lane has a unit, whose bits of tokens become tokens' bits of units.
  __device__ __forceinline__ void write_units(Tile* tiles, int num_blocks) const {
    const int units_shift = params.block_shift - 2;  // of a block
    const int num_units = num_blocks << units_shift, lane = thread % kWarpSize;
#pragma unroll 1
    for (int tile = thread / kWarpSize; tile * kUnits < num_units; tile += kWarps) {
      const int unit = tile * kUnits + lane, at = unit >> units_shift;
      const bool exists = lane < kUnits && unit < num_units;
      const uint32_t tokens = exists ? shared.tokens[at] : 0;
      uint32_t own = 0;
#pragma unroll 1
      for (int token = 0; token < params.group_tokens; ++token) {
        const uint32_t units = ptx::warp_ballot((tokens >> token) & 1);
        if (lane == token) own = units;
      }
      tiles[tile].units[lane] = own;
      const int part = (unit & ((1 << units_shift) - 1)) * kUnitKeys;
      const int first = exists ? static_cast<int>(shared.blocks[at]) << params.block_shift : 0;
      tiles[tile].first_key[lane] = first + part;
    }
  }

  __device__ __forceinline__ void write(const WorkItem& found, int place, int num_blocks) const {
    Tile* tiles = static_cast<Tile*>(params.tiles) + static_cast<int64_t>(place) * params.num_tiles;
    if constexpr (kUnits != 0) {
      write_units(tiles, num_blocks);
    } else {
      write_halves(found, tiles, num_blocks);
    }
    int32_t* chunks = params.chunks + static_cast<int64_t>(place) * chunks_an_item();
    const int more_shift = params.block_shift - params.chunk_shift;
#pragma unroll 1
    for (int chunk = thread; chunk < num_blocks << more_shift; chunk += kThreads) {
      const int block = static_cast<int>(shared.blocks[chunk >> more_shift] >> kKindBits);
      const int key = (block << params.block_shift) +
                      ((chunk & ((1 << more_shift) - 1)) << params.chunk_shift);
      chunks[chunk] = chunk_of(found, key).place;
    }
  }
};

}  // namespace cupyattn

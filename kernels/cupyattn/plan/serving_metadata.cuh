// The metadata of a serving step: lengths, offsets and tables that attention reads, from what an
// engine keeps. A row of blocks serves one request; blockIdx.y shares the columns of its tables.
//
// Values are not trusted: rows of the pool and columns are cut to what the arrays hold.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/serving.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

template <typename Config>
struct ServingMetadata {
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kMaxRows = Config::kMaxRows;
  static constexpr int kMaxWords = kMaxRows / 32;
  // Attention reads whole tiles of keys, so tables begin this many keys early.
  static constexpr int kEarly = 256;

  struct SharedMemory {
    uint32_t seen[kMaxRows][kMaxWords];  // bits of the draft tokens that a row sees
    int num_seen[kMaxRows];
    uint32_t sums[2][kWarps];
  };

  const ServingMetadataParams& params;
  SharedMemory& shared;
  const int request, thread, column, num_columns;

  // Facts of the request.
  int64_t pool_row;     // of req_to_token, in entries
  int64_t first;        // column of the first key: those before are the encoder's
  int seq_len, q_len;   // keys before drafts; rows of q
  int rows_before;      // rows of q of earlier requests
  int keys_before;      // and their keys, modulo 2^32
  int words;            // of the bits of a draft row

  __device__ __forceinline__ ServingMetadata(const ServingMetadataParams& params,
                                             SharedMemory& shared)
      : params(params),
        shared(shared),
        request(blockIdx.x),
        thread(threadIdx.x),
        column(blockIdx.y * kThreads + threadIdx.x),
        num_columns(gridDim.y * kThreads),
        words(ceil_div(params.rows, 32)) {}

  __device__ __forceinline__ void run() {
    read_request();
    sum_earlier_requests();
    if (blockIdx.y == 0) {
      write_lengths();
      write_chunks();
    }
    write_pages();
    write_swa_pages();
    if (params.tree_form == TreeForm::kNone) return;
    read_drafts();
    if (blockIdx.y == 0) write_drafts();
    write_row_tables(params.window_rows, params.window, 0);
    write_row_tables(params.chunk_rows, -1, params.chunk_size);
  }

 private:
  __device__ __forceinline__ void read_request() {
    const int64_t row = params.req_pool_indices[request];
    pool_row = min_of(max_of<int64_t>(row, 0), params.num_pool_rows - 1) * params.pool_stride;
    first = 0;
    if (params.encoder_lens.data != nullptr) {
      first = min_of(max_of<int64_t>(params.encoder_lens[request], 0), params.room);
    }
    seq_len = cut(params.seq_lens[request]);
    q_len = params.rows;
    if (params.extend_seq_lens.data != nullptr) {
      q_len = static_cast<int>(max_of<int64_t>(params.extend_seq_lens[request], 0));
    }
  }

  // A number of keys within the columns of a request.
  __device__ __forceinline__ int cut(int64_t keys) const {
    return static_cast<int>(min_of(max_of<int64_t>(keys, 0), params.room - first));
  }

  __device__ __forceinline__ void sum_earlier_requests() {
    uint32_t rows = 0, keys = 0;
    const bool counts_rows = params.extend_seq_lens.data != nullptr;
    const bool counts_keys = params.tree_form == TreeForm::kFlat;
    for (int i = thread; i < request; i += kThreads) {
      if (counts_rows) {
        rows += static_cast<uint32_t>(max_of<int64_t>(params.extend_seq_lens[i], 0));
      }
      if (counts_keys) keys += static_cast<uint32_t>(params.seq_lens[i]);
    }
    rows = ptx::warp_sum(rows);
    keys = ptx::warp_sum(keys);
    if (thread % 32 == 0) {
      shared.sums[0][thread / 32] = rows;
      shared.sums[1][thread / 32] = keys;
    }
    ptx::block_sync();
    rows = keys = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      rows += shared.sums[0][warp];
      keys += shared.sums[1][warp];
    }
    rows_before = counts_rows ? static_cast<int>(rows) : request * params.rows;
    keys_before = static_cast<int>(keys);
  }

  __device__ __forceinline__ int kv_len(int step) const {
    return cut(static_cast<int64_t>(seq_len) + params.len_delta + step);
  }

  __device__ __forceinline__ void write_lengths() {
    if (thread < params.num_steps && params.kv_lens != nullptr) {
      params.kv_lens[thread * params.num_requests + request] = kv_len(thread);
    }
    if (thread != 0) return;
    if (params.cu_seqlens_q != nullptr) {
      params.cu_seqlens_q[request] = rows_before;
      // mutate: rows-end-with-the-last-request
      if (request == params.num_requests - 1) params.cu_seqlens_q[request + 1] = rows_before + q_len;
    }
    if (params.kv_offsets != nullptr) {
      params.kv_offsets[request] = static_cast<int32_t>(pool_row + first);
    }
    if (params.encoder_lens_out != nullptr) {
      params.encoder_lens_out[request] = static_cast<int32_t>(first);
      params.encoder_offsets[request] = static_cast<int32_t>(pool_row);
    }
  }

  static __device__ __forceinline__ int floor_div(int a, int b) {
    return a >= 0 ? a / b : -((-a + b - 1) / b);
  }

  // Each chunk that rows of the request lie in becomes a request of attention: its rows are the
  // last ones of that chunk's keys.
  __device__ __forceinline__ void write_chunks() {
    const ChunkArrays& to = params.chunks;
    if (to.kv_lens == nullptr) return;
    const int64_t base = params.chunks_are_slots ? pool_row + first : request * params.chunk_stride;
    for (int i = thread; i < params.num_steps * params.num_chunks; i += kThreads) {
      const int step = i / params.num_chunks, index = i - step * params.num_chunks;
      const int end = kv_len(step), first_position = end - q_len;
      const int begin = (floor_div(first_position, params.chunk_size) + index) * params.chunk_size;
      // Chunks behind the last row are empty, at its end.
      // mutate: chunk-rows-begin-with-the-chunk
      const int low = min_of(max_of(begin, first_position), end);
      const int high = min_of(begin + params.chunk_size, end);
      // mutate: chunk-keys-begin-with-the-row
      const int key = min_of(max_of(begin, 0), end);
      const int64_t place =
          (static_cast<int64_t>(step) * params.num_requests + request) * params.num_chunks + index;
      to.qo_lens[place] = max_of(high - low, 0);
      to.qo_offsets[place] = rows_before + low - first_position;
      to.kv_lens[place] = max_of(high - key, 0);
      to.kv_offsets[place] = static_cast<int32_t>(base + key / params.chunk_page);
    }
  }

  __device__ __forceinline__ int slot_at(int64_t position) const {
    return params.req_to_token[pool_row + first + position];
  }

  __device__ __forceinline__ int map_slot(int64_t slot) const {
    if (params.full_to_swa.data == nullptr) return static_cast<int>(slot);
    const bool is_known = slot >= 0 && slot < params.map_size;
    return is_known ? static_cast<int>(params.full_to_swa[slot]) : 0;
  }

  __device__ __forceinline__ int num_pages() const {
    // mutate: pages-of-the-first-step
    const int keys = kv_len(params.num_steps - 1);
    return (keys + params.page_size - 1) / params.page_size;
  }

  __device__ __forceinline__ void write_pages() {
    if (params.page_table == nullptr) return;
    int32_t* table = params.page_table + request * params.page_stride;
    for (int i = column; i < num_pages(); i += num_columns) {
      table[i] = slot_at(static_cast<int64_t>(i) * params.page_size) / params.page_size;
    }
  }

  // Pages of the other pool, from the first that a window or chunk reaches.
  __device__ __forceinline__ void write_swa_pages() {
    if (params.swa_table == nullptr) return;
    const int position = kv_len(0) - q_len;
    int low = 0;
    if (params.swa_window >= 0 || params.swa_chunk > 0) {
      low = position;
      // mutate: second-pool-begins-with-the-row
      if (params.swa_window >= 0) low = min_of(low, position - params.swa_window);
      if (params.swa_chunk > 0) {
        low = min_of(low, floor_div(position, params.swa_chunk) * params.swa_chunk);
      }
      low = max_of(low - kEarly, 0);
    }
    int32_t* table = params.swa_table + request * params.swa_stride;
    for (int i = low / params.page_size + column; i < num_pages(); i += num_columns) {
      table[i] = map_slot(slot_at(static_cast<int64_t>(i) * params.page_size)) / params.page_size;
    }
  }

  __device__ __forceinline__ bool reads_seen(int row, int token) const {
    const int rows = params.rows;
    const int64_t global_row = static_cast<int64_t>(request) * rows + row;
    int64_t index = 0;
    // Padded requests have no part of the mask: their rows see everything.
    if (request >= params.num_real) return true;
    if (params.tree_form == TreeForm::kWords) {
      const uint64_t word = static_cast<const uint64_t*>(params.tree)[global_row];
      return (word >> token) & 1;
    }
    if (params.tree_form == TreeForm::kSquare) {
      index = global_row * rows + token;
    } else {
      const int64_t earlier = static_cast<uint32_t>(keys_before) +
                              static_cast<int64_t>(request) * rows;
      const int64_t own = params.seq_lens[request];
      // mutate: mask-without-its-prefix
      index = earlier * rows + row * (own + rows) + own + token;
    }
    if (index < 0 || index >= params.tree_size) return true;
    return static_cast<const uint8_t*>(params.tree)[index] != 0;
  }

  // The bits of all draft rows, into shared memory: a warp for each word and a lane for each draft
  // token, so that no load of the mask waits for another.
  __device__ __forceinline__ void read_drafts() {
    const int lane = thread % 32;
    for (int i = thread / 32; i < params.rows * words; i += kWarps) {
      const int row = i / words, word = i - row * words, token = 32 * word + lane;
      bool is_seen = token == row;
      if (params.tree_form != TreeForm::kBeams) {
        is_seen = token < params.rows && reads_seen(row, token);
      }
      // Lanes have a bit each, so their sum is all of them.
      const uint32_t bits = ptx::warp_sum(static_cast<uint32_t>(is_seen) << lane);
      if (lane == 0) shared.seen[row][word] = bits;
    }
    ptx::block_sync();
    for (int row = thread; row < params.rows; row += kThreads) {
      int count = 0;
      for (int word = 0; word < words; ++word) count += __popc(shared.seen[row][word]);
      shared.num_seen[row] = count;
    }
    ptx::block_sync();
  }

  // The slot that beam `row` wrote, or took over, in a step of draft decode.
  __device__ __forceinline__ int beam_slot(int row, int step) const {
    const int64_t own = static_cast<int64_t>(request) * params.rows + row;
    if (request >= params.num_real) return 0;
    int64_t writer = own;
    if (params.beam_rows != nullptr) {
      const int beam = params.beam_rows[own * params.draft_steps + step];
      // mutate: beams-keep-their-parent
      writer += min_of(max_of(beam, 0), params.rows - 1) - row;
    }
    return static_cast<int>(params.out_cache_loc[writer * params.draft_steps + step]);
  }

  // The slot of draft token `token`, which may lie beyond the columns of the request.
  __device__ __forceinline__ int tree_slot(int token) const {
    const int64_t position = static_cast<int64_t>(seq_len) + token;
    return first + position < params.room ? slot_at(position) : 0;
  }

  // Bits for attention in one pass, and tables of draft tokens for attention in two.
  __device__ __forceinline__ void write_drafts() {
    const bool is_beams = params.tree_form == TreeForm::kBeams;
    for (int i = thread; i < params.rows * words && params.tree_bits != nullptr; i += kThreads) {
      params.tree_bits[static_cast<int64_t>(request) * params.rows * words + i] =
          shared.seen[i / words][i % words];
    }
    if (params.draft_table == nullptr) return;
    for (int row = thread; row < params.rows; row += kThreads) {
      const int64_t global_row = static_cast<int64_t>(request) * params.rows + row;
      int32_t* table = params.draft_table + global_row * params.draft_width;
      if (is_beams) {
        for (int step = 0; step < params.draft_width; ++step) table[step] = beam_slot(row, step);
        continue;
      }
      int num_seen = 0, num_hidden = shared.num_seen[row];
      for (int token = 0; token < params.rows; ++token) {
        const bool is_seen = shared.seen[row][token / 32] >> (token % 32) & 1;
        // mutate: hidden-drafts-first
        table[is_seen ? num_seen++ : num_hidden++] = tree_slot(token);
      }
      params.draft_lens[global_row] = num_seen;
    }
  }

  // The n-th draft token that a row sees.
  __device__ __forceinline__ int nth_seen(int row, int n) const {
    for (int word = 0; word < words; ++word) {
      uint32_t bits = shared.seen[row][word];
      const int count = __popc(bits);
      if (n < count) {
        // mutate: path-skips-nothing
        for (; n > 0; --n) bits &= bits - 1;
        return 32 * word + __ffs(static_cast<int>(bits)) - 1;
      }
      n -= count;
    }
    return 0;
  }

  // The keys that a draft row sees within a window or a chunk, along its own path of the tree.
  __device__ __forceinline__ void write_row_tables(const RowTables& to, int window, int chunk) {
    if (to.slots == nullptr) return;
    const bool is_beams = params.tree_form == TreeForm::kBeams;
    const int width = to.width;
    for (int i = column; i < params.num_steps * params.rows * width; i += num_columns) {
      const int index = i / width, key = i - index * width;
      const int step = index / params.rows, row = index - step * params.rows;
      const int num_seen = is_beams ? params.first_step + step + 1 : shared.num_seen[row];
      const int position = seq_len + num_seen - 1;
      int low = 0;
      // mutate: window-without-its-row
      if (window >= 0) low = max_of(position - window, 0);
      if (chunk > 0) low = max_of(position, 0) / chunk * chunk;
      const int count = min_of(position + 1 - low, width);
      const int64_t place =
          (static_cast<int64_t>(step) * params.num_requests + request) * params.rows + row;
      if (key == 0) to.lens[place] = count;
      if (key >= count) continue;
      // mutate: prefix-of-whole-request
      const int num_prefix = max_of(seq_len - low, 0);
      int slot = 0;
      if (key < num_prefix) {
        slot = slot_at(low + key);
      } else {
        // mutate: window-inside-the-drafts
        const int n = key - num_prefix + max_of(low - seq_len, 0);
        slot = is_beams ? beam_slot(row, n) : tree_slot(nth_seen(row, n));
      }
      to.slots[place * width + key] = map_slot(slot);
    }
  }
};

}  // namespace cupyattn

// Rows of queries, keys and values become rows of eight bits with scales, or rows of 16 bits, in
// arrays or in the pages of a cache. A block reads each element once. Where it finds a scale, it has
// some tokens of one head, and holds what it read in registers until the scale is known.
#pragma once

#include "cupyattn/ptx/warpgroup.cuh"
#include "cupyattn/quantize/rows.cuh"
#include "cupyattn/quantize/scales.cuh"
#include "cupyattn/shared/state.cuh"

namespace cupyattn {

// Tokens of one head that share what is done to them.
struct TokenRun {
  int64_t first;    // of the part's rows
  int32_t count;    // 0: none
  int32_t request;  // of all of them, -1: look for that of each
  float* scale;     // where a scale that is found lies; nullptr: none is found
  Slot slot;        // of the first one
  int32_t before;   // tokens of its block of a page that lie ahead of it
};

template <typename Config>
class Quantizer {
  using DType = typename Config::DType;
  static constexpr int kThreads = Config::kThreads, kLanes = Config::kLanes;
  static constexpr int kPasses = Config::kPasses;
  static constexpr int kRows = kThreads / kLanes;  // of one pass
  static constexpr int kTile = kRows * kPasses;    // tokens of a block at a time
  static constexpr bool kChanges = Config::kNorm || Config::kHadamard || Config::kMean ||
                                   Config::kRotary != Rotary::kNone;
  static constexpr bool kKeepsWeights = Config::kNorm && kPasses <= 4;  // registers are few
  using Turn = typename RowLanes<Config>::Turn;
  // Runs of so few tokens, as decode and drafts have, are a row's lanes' work: all of a tile at a
  // time. Longer ones are the block's, one after another. Their rows are held in registers, of which
  // a thread of 512 has 128.
  static constexpr int kShortRun = kThreads > 256 ? 2 : 4;
  // The tokens that a block looks at, those of the last run, and the one ahead.
  static constexpr int kMaxLooked = 2 * kTile + 1;

 public:
  struct Shared {
    uint32_t amax[2][kThreads / kWarpSize];
    int64_t block[Config::kFindsRuns ? kMaxLooked : 1];
    uint32_t is_last;
  };

  __device__ __forceinline__ Quantizer(const QuantizeParams& params, Shared& shared)
      : params_(params), shared_(shared), lanes_(params), row_(threadIdx.x / kLanes) {}

  // Blocks of the grid for the heads of some tokens: each has a head whose scale it finds, or as
  // many heads as it has passes, whose rotation is the same.
  static __device__ __forceinline__ int32_t blocks_per_tile(const QuantizedPart& part) {
    return finds(part) ? part.num_heads : ceil_div(part.num_heads, kPasses);
  }

  template <typename Target, bool kIsKey>
  __device__ __forceinline__ void run(const QuantizedPart& part, int32_t index) {
    const int32_t heads = blocks_per_tile(part);
    const int32_t tile = index / heads;
    head_ = index - tile * heads;
    if constexpr (kKeepsWeights && kIsKey) {
      if (part.weight != nullptr) load_weights(part, weight_);
    }
    if constexpr (Stored<Target>::kIsScaled && Config::kFinds) {
      if constexpr (Config::kFindsRuns) {
        if (part.form == ScaleForm::kOfPageBlocks) return write_runs<Target, kIsKey>(part, tile);
      }
      if (part.form == ScaleForm::kOfBlocks) {
        const TokenRun run = block_of(part, tile);
        if (run.count > 0) write_block<Target, kIsKey>(part, run, 0);
        return;
      }
    }
    head_ *= kPasses;
    write_rows<Target, kIsKey>(part, static_cast<int64_t>(tile) * kRows + row_);
  }

  // Each block finds the largest magnitude of a tile's rows of a head, as they are stored. The last
  // one to arrive makes the scales of heads, or of a tensor, of these. Grid: tiles × heads, of q,
  // then of k, then of v.
  template <typename TargetQ, typename TargetK, typename TargetV>
  __device__ __forceinline__ void find_scales() {
    const QuantizedPart(&parts)[3] = params_.parts;
    const int32_t of_q = parts[0].num_tiles * parts[0].num_heads;
    const int32_t of_k = parts[1].num_tiles * parts[1].num_heads;
    const int32_t index = blockIdx.x;
    float amax;
    if (index < of_q) {
      amax = largest_of_tile<true>(parts[0], index);
    } else if (index < of_q + of_k) {
      amax = largest_of_tile<true>(parts[1], index - of_q);
    } else {
      amax = largest_of_tile<false>(parts[2], index - of_q - of_k);
    }
    amax = block_max<kThreads>(amax, shared_.amax[0]);
    if (threadIdx.x == 0) params_.amax[index] = amax;
    if (!arrive_last(params_.arrivals, gridDim.x, threadIdx.x, &shared_.is_last)) return;
    write_scales<TargetQ>(parts[0], params_.amax);
    write_scales<TargetK>(parts[1], params_.amax + of_q);
    write_scales<TargetV>(parts[2], params_.amax + of_q + of_k);
  }

 private:
  template <bool kIsKey>
  __device__ __forceinline__ float largest_of_tile(const QuantizedPart& part, int32_t index) {
    const int32_t tile = index / part.num_heads;
    head_ = index - tile * part.num_heads;
    if constexpr (kKeepsWeights && kIsKey) {
      if (part.weight != nullptr) load_weights(part, weight_);
    }
    int64_t end = part.num_rows;
    // Rows past the last request are nobody's.
    if (part.offsets != nullptr) end = min_of<int64_t>(part.offsets[part.batch_size], end);
    const int64_t first = static_cast<int64_t>(tile) * part.tile_rows;
    end = min_of(first + part.tile_rows, end);
    const DType* source = static_cast<const DType*>(part.source) + head_ * part.source_stride_h;
    float amax = 0.0f;
    for (int64_t start = first; start < end; start += kTile) {
      Vector16 raw[kPasses];
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int64_t token = start + i * kRows + row_;
        raw[i] = lanes_.load(source + token * part.source_stride_n, part.head_dim, token < end);
      }
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int64_t token = min_of<int64_t>(start + i * kRows + row_, end - 1);
        float x[kChunk];
        to_floats<DType>(raw[i], x);
        const int32_t request = part.mean == nullptr ? 0 : request_of(part, token);
        change<kIsKey>(part, request, head_, Turn(), x);
        if (start + i * kRows + row_ < end) amax = raise_amax(amax, x);
      }
    }
    return amax;
  }

  // `amax` of tiles and heads.
  template <typename Target>
  __device__ __forceinline__ void write_scales(const QuantizedPart& part, const float* amax) const {
    if (part.num_tiles == 0) return;
    float of_all = 0.0f;
    for (int32_t head = threadIdx.x; head < part.num_heads; head += kThreads) {
      float of_head = 0.0f;
      // mutate: scales-of-the-first-tile
      for (int32_t tile = 0; tile < part.num_tiles; ++tile) {
        of_head = fmaxf(of_head, amax[tile * part.num_heads + head]);
      }
      of_all = fmaxf(of_all, of_head);
      if (part.form == ScaleForm::kOfHeads) {
        part.scales[head * part.scale_stride_h] = scale_for(of_head, Stored<Target>::kLargest);
      }
    }
    if (part.form != ScaleForm::kOfTensor) return;
    ptx::block_sync();  // shared_.amax is free
    of_all = block_max<kThreads>(of_all, shared_.amax[0]);
    if (threadIdx.x == 0) part.scales[0] = scale_for(of_all, Stored<Target>::kLargest);
  }

  static __device__ __forceinline__ bool finds(const QuantizedPart& part) {
    return Config::kFinds &&
           (part.form == ScaleForm::kOfBlocks || part.form == ScaleForm::kOfPageBlocks);
  }

  // The place of a request's first block: nothing tells but where its rows begin.
  __device__ __forceinline__ static int64_t first_block(const QuantizedPart& part, int32_t request) {
    return (part.offsets[request] >> part.block_bits) + request;
  }

  // Block `tile` of all requests. A place that is none has the scale 1.
  __device__ __forceinline__ TokenRun block_of(const QuantizedPart& part, int32_t tile) const {
    int64_t begin = 0, end = 0;
    int32_t request = 0, block = 0;
    if (part.offsets == nullptr) {
      const int32_t blocks = part.num_tiles / part.batch_size;
      request = tile / blocks;
      block = tile - request * blocks;
      begin = static_cast<int64_t>(request) * part.rows_per_request;
      end = begin + part.rows_per_request;
    } else {
      int32_t low = 0, high = part.batch_size;
      while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (first_block(part, middle) <= tile ? low : high) = middle;
      }
      request = low;
      block = tile - static_cast<int32_t>(first_block(part, request));
      begin = part.offsets[request];
      // Offsets that leave the rows, or fall, name none.
      end = min_of<int64_t>(part.offsets[request + 1], part.num_rows);  // mutate: rows-past-the-end
      if (begin < 0) end = begin;
    }
    float* scale = part.scales + tile * part.scale_stride_n + head_ * part.scale_stride_h;
    const int64_t first = begin + (static_cast<int64_t>(block) << part.block_bits);
    const int64_t rest = block < 0 ? 0 : end - first;
    if (rest <= 0) {
      if (threadIdx.x == 0) *scale = 1.0f;
      return TokenRun{0, 0, 0, nullptr, {-1, 0}, 0};
    }
    const int32_t count = static_cast<int32_t>(min_of<int64_t>(rest, 1ll << part.block_bits));
    return TokenRun{first, count, request, scale, {-1, 0}, 0};
  }

  // Runs of neighbouring tokens whose slots are of one block of a page: those that begin among this
  // block's tokens. All threads look at the same blocks, so all find the same runs.
  template <typename Target, bool kIsKey>
  __device__ __forceinline__ void write_runs(const QuantizedPart& part, int32_t tile) {
    const int64_t first = static_cast<int64_t>(tile) * part.tile_rows;
    const int32_t looked = part.tile_rows + (1 << part.block_bits);
    for (int32_t i = threadIdx.x; i < looked; i += kThreads) {
      const int64_t token = first - 1 + i;
      int64_t block = -1;
      if (token >= 0 && token < part.num_rows) {
        const Slot slot = slot_of(token);
        if (slot.page >= 0) {
          block = (slot.page * params_.table.page_size + slot.offset) >> part.block_bits;
        }
      }
      shared_.block[i] = block;
    }
    ptx::block_sync();
    for (int32_t start = 1; start <= part.tile_rows; start += kRows) {
      const int32_t i = start + row_;
      TokenRun run = {first, 0, -1, nullptr, {-1, 0}, 0};
      if (i <= part.tile_rows) {
        const int32_t count = run_length(i, looked, kShortRun + 1);
        if (count <= kShortRun && count > 0) run = run_at(part, first - 1 + i, count);
      }
      write_short_runs<Target, kIsKey>(part, run);
    }
    int parity = 0;
    for (int32_t i = 1; i <= part.tile_rows; ++i) {
      const int32_t count = run_length(i, looked, 1 << part.block_bits);
      if (count <= kShortRun) continue;
      write_block<Target, kIsKey>(part, run_at(part, first - 1 + i, count), parity);
      parity ^= 1;
    }
  }

  // Tokens of the run that begins at a place of shared_.block, up to `most`; 0: none does.
  __device__ __forceinline__ int32_t run_length(int32_t place, int32_t looked, int32_t most) const {
    const int64_t block = shared_.block[place];
    if (block < 0 || block == shared_.block[place - 1]) return 0;
    int32_t end = place + 1;
    while (end < looked && end - place < most && shared_.block[end] == block) ++end;
    return end - place;
  }

  __device__ __forceinline__ TokenRun run_at(const QuantizedPart& part, int64_t token,
                                             int32_t count) const {
    const Slot slot = slot_of(token);
    const int32_t before = slot.offset & ((1 << part.block_bits) - 1);
    float* scale = part.scales + slot.page * part.scale_stride_n +
                   (slot.offset >> part.block_bits) * part.scale_stride_block +
                   head_ * part.scale_stride_h;
    return TokenRun{token, count, -1, scale, slot, before};
  }

  // Each row's lanes have a run of their own, or one of no tokens.
  template <typename Target, bool kIsKey>
  __device__ __forceinline__ void write_short_runs(const QuantizedPart& part, const TokenRun& run) {
    const int longest = ptx::warp_max(run.count);
    if (longest == 0) return;
    const DType* source = static_cast<const DType*>(part.source) + head_ * part.source_stride_h;
    Vector16 raw[kShortRun];
#pragma unroll
    for (int i = 0; i < kShortRun; ++i) {
      raw[i] = lanes_.load(source + (run.first + i) * part.source_stride_n, part.head_dim,
                           i < run.count);
    }
    const float old = run.before > 0 ? *run.scale : 0.0f;
    float held[kShortRun][kChunk], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kShortRun; ++i) {
      if (i >= longest) break;
      to_floats<DType>(raw[i], held[i]);
      const int64_t token = min_of(run.first + i, part.num_rows - 1);
      Turn turn;
      if constexpr (kIsKey && Config::kRotary != Rotary::kNone) {
        turn = lanes_.turn_to(params_.positions[token]);
      }
      const int32_t request = part.mean == nullptr ? 0 : request_of(part, token);
      change<kIsKey>(part, request, head_, turn, held[i]);
      if (i < run.count) amax = raise_amax(amax, held[i]);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      amax = fmaxf(amax, ptx::shuffle_xor(amax, mask));
    }
    ptx::warp_sync();  // all lanes have read the old scale
    if (run.count == 0) return;
    const float scale = new_scale<Target>(part, run, amax, old, 0, 1);
    if (lanes_.lane == 0) *run.scale = scale;
    const float inverse = ptx::divide_rn(1.0f, scale);
#pragma unroll
    for (int i = 0; i < kShortRun; ++i) {
      if (i >= run.count) break;
      const Slot place = slot_of(run.first + i);
      const int64_t at = place.page * part.target_stride_page + place.offset * part.target_stride_n;
      store<Target, kIsKey>(part.target, at + head_ * part.target_stride_h, part.head_dim,
                            Stored<Target>::pack(held[i], inverse));
    }
  }

  __device__ __forceinline__ Slot slot_of(int64_t token) const {
    constexpr Slot kNone = {-1, 0};
    if (params_.slots.data == nullptr) {
      const int64_t position = params_.positions[token];
      if (position < 0 || position > 0x7fffffff) return kNone;
      return find_slot(params_.table, params_.batch_indices[token],
                       static_cast<int32_t>(position));
    }
    const int64_t slot = params_.slots[token];
    if (slot < 0) return kNone;
    const int64_t page = divide(slot, params_.table.page_size);
    if (page >= params_.table.num_pages) return kNone;  // mutate: slot-past-the-pages
    return {page, static_cast<int32_t>(slot - page * params_.table.page_size)};
  }

  __device__ __forceinline__ int32_t request_of(const QuantizedPart& part, int64_t token) const {
    if (part.batch_size == 1) return 0;
    int32_t request = 0;
    if (params_.batch_indices != nullptr) {
      request = params_.batch_indices[token];
    } else if (part.offsets == nullptr) {
      request = static_cast<int32_t>(divide(token, part.rows_per_request));
    } else {
      int32_t high = part.batch_size;
      while (high - request > 1) {
        const int32_t middle = (request + high) / 2;
        (part.offsets[middle] <= token ? request : high) = middle;
      }
    }
    return max_of(min_of(request, part.batch_size - 1), 0);
  }

  // A token's rows of some heads, by scales that are known.
  template <typename Target, bool kIsKey>
  __device__ __forceinline__ void write_rows(const QuantizedPart& part, int64_t token) const {
    const bool is_row = token < part.num_rows;
    if (!is_row) token = part.num_rows - 1;
    // Ask for all rows before the first is used.
    Vector16 raw[kPasses];
    const DType* source = static_cast<const DType*>(part.source) + token * part.source_stride_n;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t head = head_ + i;
      raw[i] = lanes_.load(source + head * part.source_stride_h, part.head_dim,
                           is_row && head < part.num_heads);
    }
    Turn turn;
    if constexpr (kIsKey && Config::kRotary != Rotary::kNone) {
      turn = lanes_.turn_to(params_.positions[token]);
    }
    Slot place = {0, static_cast<int32_t>(0)};
    if (part.is_paged) place = slot_of(token);
    const int64_t at = part.is_paged ? place.page * part.target_stride_page +
                                           place.offset * part.target_stride_n
                                     : token * part.target_stride_n;
    const bool has_requests = part.mean != nullptr || part.scale_stride_n != 0;
    const int32_t request = has_requests ? request_of(part, token) : 0;
    float inverse = ptx::divide_rn(1.0f, part.scale);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t head = head_ + i;
      if (head >= part.num_heads) break;
      float x[kChunk];
      to_floats<DType>(raw[i], x);
      change<kIsKey>(part, request, head, turn, x);
      if (!is_row) continue;
      if constexpr (Config::kCopies) {
        if (part.copy != nullptr) {
          store<DType, false>(part.copy, token * part.copy_stride_n + head * part.copy_stride_h,
                       part.head_dim, Stored<DType>::pack(x, 1.0f));
        }
      }
      if (part.is_paged && place.page < 0) continue;
      if (Stored<Target>::kIsScaled && part.form == ScaleForm::kGiven) {
        inverse = ptx::divide_rn(
            1.0f, part.scales[request * part.scale_stride_n + head * part.scale_stride_h]);
      }
      store<Target, kIsKey>(part.target, at + head * part.target_stride_h, part.head_dim,
                            Stored<Target>::pack(x, inverse));
    }
  }

  // Rows of one head, by a scale that is found of them all.
  template <typename Target, bool kIsKey>
  __device__ __forceinline__ void write_block(const QuantizedPart& part, const TokenRun& run,
                                              int parity) {
    using Format = Stored<Target>;
    // Rows that are changed are held as floats, and few are under way; others as they were read.
    constexpr bool kHolds = kIsKey && kChanges;
    constexpr int kAhead = !kHolds ? kPasses : kPasses > 4 ? 1 : kPasses;
    const DType* source = static_cast<const DType*>(part.source) + head_ * part.source_stride_h;
    Vector16 raw[kHolds ? kAhead : kPasses];
    float held[kHolds ? kPasses : 1][kChunk], amax = 0.0f;
#pragma unroll
    for (int group = 0; group < kPasses; group += kAhead) {
      if (group * kRows >= run.count) break;
      // Ask for some rows before the first is used.
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t row = (group + i) * kRows + row_;
        raw[i] = lanes_.load(source + (run.first + row) * part.source_stride_n, part.head_dim,
                             row < run.count);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t row = (group + i) * kRows + row_;
        float(&x)[kChunk] = held[kHolds ? group + i : 0];
        to_floats<DType>(raw[i], x);
        if constexpr (kHolds) {
          const int64_t token = run.first + min_of(row, run.count - 1);
          Turn turn;
          if constexpr (Config::kRotary != Rotary::kNone) {
            turn = lanes_.turn_to(params_.positions[token]);
          }
          int32_t request = run.request;
          if (request < 0 && part.mean != nullptr) request = request_of(part, token);
          change<kIsKey>(part, request, head_, turn, x);
        }
        if (row < run.count) amax = raise_amax(amax, x);
      }
    }
    const float old = run.before > 0 ? *run.scale : 0.0f;
    amax = block_max<kThreads>(amax, shared_.amax[parity]);
    const float scale = new_scale<Target>(part, run, amax, old, row_, kRows);
    if (threadIdx.x == 0) *run.scale = scale;
    const float inverse = ptx::divide_rn(1.0f, scale);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int32_t row = pass * kRows + row_;
      if (row >= run.count) break;
      int64_t at = (run.first + row) * part.target_stride_n;
      if (Config::kFindsRuns && part.is_paged) {
        const Slot place = slot_of(run.first + row);
        at = place.page * part.target_stride_page + place.offset * part.target_stride_n;
      }
      float(&x)[kChunk] = held[kHolds ? pass : 0];
      if constexpr (!kHolds) {
        // Else the compiler would keep the floats of before, which are twice as many words.
#pragma unroll
        for (uint32_t& word : raw[pass].word) word = ptx::opaque_copy(word);
        to_floats<DType>(raw[pass], x);
      }
      store<Target, kIsKey>(part.target, at + head_ * part.target_stride_h, part.head_dim,
                            Format::pack(x, inverse));
    }
  }

  __device__ __forceinline__ void load_weights(const QuantizedPart& part,
                                               float (&weight)[kChunk]) const {
    if constexpr (Config::kNorm) {
      lanes_.load_weights(static_cast<const typename Config::DTypeWeight*>(part.weight),
                          part.head_dim, weight);
    }
  }

  // What is done to a row before it is stored.
  template <bool kIsKey>
  __device__ __forceinline__ void change(const QuantizedPart& part, int32_t request, int32_t head,
                                         const Turn& turn, float (&x)[kChunk]) const {
    if constexpr (!kIsKey) return;
    if constexpr (Config::kNorm) {
      if (part.weight != nullptr) {
        if constexpr (kKeepsWeights) {
          lanes_.normalise(x, weight_, part.head_dim);
        } else {
          float weight[kChunk];
          load_weights(part, weight);
          lanes_.normalise(x, weight, part.head_dim);
        }
      }
    }
    if constexpr (Config::kRotary != Rotary::kNone) lanes_.rotate(x, turn);
    if constexpr (Config::kHadamard) lanes_.transform(x, part.head_dim);
    if constexpr (Config::kMean) {
      if (part.mean != nullptr) {
        const float* mean = part.mean + request * part.mean_stride_n + head * part.head_dim;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const int column = Config::kSwaps ? lanes_.column_across(e) : lanes_.column + e;
          if (column < part.head_dim) x[e] -= mean[column];
        }
      }
    }
  }

  // The scale of a block that has tokens already grows by a power of two, which their values are
  // divided by: rows `row`, `row + step`, ... of it here.
  template <typename Target>
  __device__ __forceinline__ float new_scale(const QuantizedPart& part, const TokenRun& run,
                                             float amax, float old, int32_t row,
                                             int32_t step) const {
    const float needed = scale_for(amax, Stored<Target>::kLargest);
    if constexpr (!Config::kFindsRuns) {
      return needed;
    } else {
      // Slots that were never written have no scale.
      if (!(old > 0.0f && old < ptx::infinity())) return needed;
      if (amax == 0.0f || needed <= old) return old;
      const float factor = growth(old, needed);
      using Format = Stored<Target>;
      const int64_t first = run.slot.page * part.target_stride_page +
                            (run.slot.offset - run.before) * part.target_stride_n +
                            head_ * part.target_stride_h;
      // mutate: stored-rows-keep-their-scale
      for (; row < run.before; row += step) {
        const int64_t at = first + row * part.target_stride_n;
        typename Format::Packed packed;
        if (!load_stored<Target>(part, at, packed)) continue;
        float x[kChunk];
        Format::unpack(packed, x);
        store<Target, false>(part.target, at, part.head_dim,
                             Format::pack(x, ptx::divide_rn(1.0f, factor)));
      }
      return old * factor;
    }
  }

  template <typename Target>
  __device__ __forceinline__ bool load_stored(const QuantizedPart& part, int64_t at,
                                              typename Stored<Target>::Packed& packed) const {
    if (lanes_.column >= part.head_dim) return false;
    const Target* place = static_cast<const Target*>(part.target) + at + lanes_.column;
    if constexpr (Config::kAligned) {
      packed = *reinterpret_cast<const typename Stored<Target>::Packed*>(place);
    } else {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(place);
      packed = {};
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const uint32_t byte = lanes_.column + e < part.head_dim ? bytes[e] : 0u;
        packed.word[e / 4] |= byte << (e % 4 * 8);
      }
    }
    return true;
  }

  // kIsRotated: elements are in the columns where a rotation left them.
  template <typename Target, bool kIsRotated>
  __device__ __forceinline__ void store(void* target, int64_t at, int32_t head_dim,
                                        const typename Stored<Target>::Packed& packed) const {
    if constexpr (kIsRotated && Config::kSwaps) return store_across<Target>(target, at, packed);
    if (lanes_.column >= head_dim) return;
    Target* place = static_cast<Target*>(target) + at + lanes_.column;
    if constexpr (Config::kAligned) {
      *reinterpret_cast<typename Stored<Target>::Packed*>(place) = packed;
    } else {
      constexpr int kPerWord = 4 / static_cast<int>(sizeof(Target));
      using Bits = conditional<sizeof(Target) == 1, uint8_t, uint16_t>;
      Bits* bits = reinterpret_cast<Bits*>(place);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (lanes_.column + e < head_dim) {
          bits[e] = static_cast<Bits>(packed.word[e / kPerWord] >>
                                      (e % kPerWord * 8 * static_cast<int>(sizeof(Target))));
        }
      }
    }
  }

  // Each half of a row's elements lies beside those of the other lanes.
  template <typename Target>
  __device__ __forceinline__ void store_across(void* target, int64_t at,
                                               const typename Stored<Target>::Packed& packed) const {
    constexpr int kWords = kChunk / 2 * static_cast<int>(sizeof(Target)) / 4;
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Target));
    using Bits = conditional<sizeof(Target) == 1, uint8_t, uint16_t>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t place = at + lanes_.column_across(kChunk / 2 * half);
      Words<kWords> words;
#pragma unroll
      for (int w = 0; w < kWords; ++w) words.word[w] = packed.word[kWords * half + w];
      if constexpr (Config::kAligned) {
        *reinterpret_cast<Words<kWords>*>(static_cast<Target*>(target) + place) = words;
      } else {
#pragma unroll
        for (int e = 0; e < kChunk / 2; ++e) {
          static_cast<Bits*>(target)[place + e] = static_cast<Bits>(
              words.word[e / kPerWord] >> (e % kPerWord * 8 * static_cast<int>(sizeof(Target))));
        }
      }
    }
  }

  const QuantizeParams& params_;
  Shared& shared_;
  RowLanes<Config> lanes_;
  int row_;  // of a pass
  int32_t head_ = 0;
  float weight_[kKeepsWeights ? kChunk : 1];
};

}  // namespace cupyattn

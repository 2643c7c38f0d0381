// A row of scores, of which the greatest are chosen: its scores as numbers without a sign that have
// their order, and its list.
#pragma once

#include "cupyattn/params/select_topk.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/select/tokens.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// What stands for a score. Blocks that do not compete have the least one, forced ones the greatest.
constexpr uint32_t kAbsentKey = 0u, kForcedKey = 0xffffffffu;

// +0 and -0 are equal. kHasAbsent: NaN is the score of what does not compete, else it is -inf.
template <bool kHasAbsent>
__device__ __forceinline__ uint32_t sortable(float score) {
  if (kHasAbsent && score != score) return kAbsentKey;
  // The greater one of NaN and a number is the number; the sum of zeros is +0.
  const float number = fmaxf(score, -ptx::infinity()) + 0.0f;  // mutate: zeros-have-signs
  const uint32_t bits = __float_as_uint(number);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

template <typename Config>
struct TopkRow {
  using DType = typename Config::DType;

  const SelectTopkParams& params;
  const DType* scores;
  int32_t* out;
  float* values;
  int num_blocks = 0;
  int last_begin = 0;  // blocks from here on are forced
  bool has_tail = false;
  // Of given rows: where what is chosen goes as it is, and its pages, or what is added to it.
  int32_t* columns = nullptr;
  const int32_t* pages = nullptr;
  int offset = 0, num_pages = 0;

  // Behind the wait for the launch ahead. A whole warp calls this; rows beyond the last have nothing.
  static __device__ __forceinline__ TopkRow after_launch(const SelectTopkParams& params, int row,
                                                         int lane) {
    // That launch is of scores, and has begun when what tokens see was there; a caller's rows may
    // come from any launch.
    if constexpr (Config::kGiven) ptx::grid_dependency_wait();
    const TopkRow at = of(params, min_of(row, params.num_rows - 1), lane);
    if constexpr (!Config::kGiven) ptx::grid_dependency_wait();
    return at;
  }

  static __device__ __forceinline__ TopkRow of(const SelectTopkParams& params, int row, int lane) {
    const int token = row / params.num_groups, group = row - token * params.num_groups;
    const int64_t values = token * params.values_stride_n + group * params.values_stride_group;
    TopkRow at = {params, static_cast<const DType*>(params.scores),
                  params.out + token * params.out_stride_n + group * params.out_stride_group,
                  params.values == nullptr ? nullptr : params.values + values};
    if constexpr (Config::kGiven) {
      at.find_columns(token, group);
    } else {
      const SelectedToken seen = SelectedToken::of(params.tokens, token, lane);
      at.scores += row * params.row_stride;
      at.num_blocks = seen.blocks;
      at.has_tail =
          params.has_tail && (seen.rows << params.tokens.ratio_shift) != seen.seen;
    }
    at.last_begin = at.num_blocks - params.last;
    return at;
  }

  // Of a given row. What leaves the row or the table does not count.
  __device__ __forceinline__ void find_columns(int token, int group) {
    const GivenRows& given = params.given;
    const int begin = given.begins == nullptr ? 0 : given.begins[token];
    const int count = given.counts == nullptr ? given.num_columns : given.counts[token];
    const bool is_inside = begin >= 0 && begin < given.num_columns;
    num_blocks = is_inside ? max_of(min_of(count, given.num_columns - begin), 0) : 0;
    scores += token * params.row_stride + group * given.stride_group +
              (is_inside ? begin * given.stride_column : 0);
    offset = given.offsets == nullptr ? 0 : given.offsets[token];
    if (given.columns != nullptr) columns = given.columns + (out - params.out);
    if (given.table == nullptr) return;
    const int owner = given.owners == nullptr ? token : given.owners[token];
    const bool has_pages = owner >= 0 && owner < given.num_tables;
    pages = given.table + (has_pages ? owner * given.table_stride : 0);
    offset = given.page_begins == nullptr ? 0 : given.page_begins[token];
    num_pages = has_pages ? given.table_width : 0;
  }

  // What the list of a given row says of a column.
  __device__ __forceinline__ int slot(int column) const {
    if (pages == nullptr) return column + offset;
    const GivenRows& given = params.given;
    const int64_t entry = static_cast<int64_t>(offset) + (column >> given.page_shift);
    if (entry < 0 || entry >= num_pages) return -1;
    const int page = pages[entry];
    const int rest = column & ((1 << given.page_shift) - 1);
    return page < 0 ? -1 : (page << given.page_shift) + rest;
  }

  __device__ __forceinline__ float score(int block) const {
    if constexpr (Config::kGiven) {
      return ptx::to_float(scores[block * params.given.stride_column]);
    } else {
      return ptx::to_float(scores[block]);
    }
  }

  // The scores of four blocks that follow one another; those at the end and beyond are NaN.
  __device__ __forceinline__ void load(int block, int end, float (&score)[4]) const {
    if (Config::kAligned && block + 4 <= end) {
      if constexpr (sizeof(DType) == 4) {
        to_floats<float>(*reinterpret_cast<const Vector16*>(scores + block), score);
      } else {
        const auto pairs = *reinterpret_cast<const Words<2>*>(scores + block);
        ptx::unpack_pair<DType>(pairs.word[0], score[0], score[1]);
        ptx::unpack_pair<DType>(pairs.word[1], score[2], score[3]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] = block + i < end ? this->score(block + i) : ptx::nan();
    }
  }

  // Whether blocks from `block` to `end` are all there, and none of them is forced.
  __device__ __forceinline__ bool are_plain(int block, int end) const {
    return block >= params.first && end <= min_of(last_begin, num_blocks);
  }

  // What stands for a block that may be forced or beyond the row, where `key` would if it were not.
  __device__ __forceinline__ uint32_t key_of_any(int block, uint32_t key) const {
    if (block >= num_blocks) return kAbsentKey;
    if (Config::kCandidates && key == kAbsentKey) return key;
    // mutate: last-block-not-forced
    return block < params.first || block >= last_begin ? kForcedKey : key;
  }

  __device__ __forceinline__ uint32_t key(int block, float score) const {
    return key_of_any(block, sortable<Config::kCandidates>(score));
  }

  __device__ __forceinline__ void put(int place, int block) const {
    if constexpr (Config::kGiven) {
      out[place] = slot(block);
      if (columns != nullptr) columns[place] = block;
    } else {
      out[place] = block;
    }
    if (values == nullptr) return;
    const float own = score(block);
    values[place] = own == own ? own : -ptx::infinity();
  }

  // Entries behind those of the chosen blocks, by some threads of which this is one.
  __device__ __forceinline__ void finish(int count, int thread, int num_threads) const {
    const int length = params.topk + params.has_tail;
    for (int place = count + thread; place < length; place += num_threads) {
      out[place] = has_tail && place == count ? num_blocks : -1;
      if (columns != nullptr) columns[place] = -1;
      if (values != nullptr) values[place] = -ptx::infinity();
    }
  }
};

}  // namespace cupyattn

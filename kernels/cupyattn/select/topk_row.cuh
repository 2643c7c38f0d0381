// A row of scores, of which the greatest are chosen: its scores as numbers without a sign that have
// their order, and its list.
#pragma once

#include "cupyattn/params/select_topk.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/select/tokens.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// What stands for a score. Blocks that do not compete have the least one, forced ones the greatest.
constexpr uint32_t kAbsentKey = 0u, kForcedKey = 0xffffffffu, kLeastKey = 0x007fffffu;  // of -inf

// +0 and -0 are equal. kHasAbsent: NaN is the score of what does not compete, else it is -inf.
template <bool kHasAbsent>
__device__ __forceinline__ uint32_t sortable(float score) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kHasAbsent ? kAbsentKey : kLeastKey;
  if (magnitude == 0u) return 0x80000000u;  // mutate: zeros-have-signs
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <typename Config>
struct TopkRow {
  using DType = typename Config::DType;

  const SelectTopkParams& params;
  const DType* scores;
  int32_t* out;
  float* values;
  int num_blocks;
  int first_end, last_begin;  // between these nothing is forced
  bool has_tail;

  // A whole warp calls this.
  static __device__ __forceinline__ TopkRow of(const SelectTopkParams& params, int row, int lane) {
    const int token = row / params.num_groups, group = row - token * params.num_groups;
    const SelectedToken seen = SelectedToken::of(params.tokens, token, lane);
    const int64_t values = token * params.values_stride_n + group * params.values_stride_group;
    const bool has_tail =
        params.has_tail && (seen.rows << params.tokens.ratio_shift) != seen.seen;
    return TopkRow{params,
                   static_cast<const DType*>(params.scores) + row * params.row_stride,
                   params.out + token * params.out_stride_n + group * params.out_stride_group,
                   params.values == nullptr ? nullptr : params.values + values,
                   seen.blocks,
                   params.first,
                   seen.blocks - params.last,
                   has_tail};
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
      score[i] = block + i < end ? ptx::to_float(scores[block + i]) : ptx::nan();
    }
  }

  // What stands for the score of a block, which lies before `end`.
  __device__ __forceinline__ uint32_t key(int block, int end, float score) const {
    const uint32_t key = sortable<Config::kCandidates>(score);
    if (block >= end) return kAbsentKey;
    if (Config::kCandidates && key == kAbsentKey) return key;
    // mutate: last-block-not-forced
    return block < first_end || block >= last_begin ? kForcedKey : key;
  }

  __device__ __forceinline__ Vector16 keys(int block, int end, const float (&score)[4]) const {
    Vector16 keys;
#pragma unroll
    for (int i = 0; i < 4; ++i) keys.word[i] = key(block + i, end, score[i]);
    return keys;
  }

  __device__ __forceinline__ void put(int place, int block) const {
    out[place] = block;
    if (values == nullptr) return;
    const float score = ptx::to_float(scores[block]);
    values[place] = score == score ? score : -ptx::infinity();
  }

  // Entries behind those of the chosen blocks, by some threads of which this is one.
  __device__ __forceinline__ void finish(int count, int thread, int num_threads) const {
    const int length = params.topk + params.has_tail;
    for (int place = count + thread; place < length; place += num_threads) {
      out[place] = has_tail && place == count ? num_blocks : -1;
      if (values != nullptr) values[place] = -ptx::infinity();
    }
  }
};

}  // namespace cupyattn

// A row of one head, eight neighbouring elements to a lane: loads, and what is done to a row before
// it is stored (RMS norm, rotary positions, Hadamard rotation).
#pragma once

#include "cupyattn/params/quantize.cuh"
#include "cupyattn/page/append.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/shared/rope.cuh"

namespace cupyattn {

// How rows are rotated to their positions.
enum class Rotary { kNone, kTable, kSteps };

constexpr int kChunk = 8;

template <typename T, int kCount>
__device__ __forceinline__ void load_neighbours(const T* source, float (&value)[kCount]) {
  constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  constexpr int kStep = kWords < 4 ? kWords : 4;
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int first = 0; first < kWords; first += kStep) {
    const auto words = *reinterpret_cast<const Words<kStep>*>(source + first * kPerWord);
#pragma unroll
    for (int w = 0; w < kStep; ++w) {
      const int at = (first + w) * kPerWord;
      if constexpr (kPerWord == 1) {
        value[at] = __uint_as_float(words.word[w]);
      } else {
        ptx::unpack_pair<T>(words.word[w], value[at], value[at + 1]);
      }
    }
  }
}

// The lanes of a row are neighbours, kLanes of them.
template <typename Config, typename Params = QuantizeParams>
struct RowLanes {
  using DType = typename Config::DType;
  static constexpr int kLanes = Config::kLanes;

  const Params& params;
  int lane;  // of the row
  int column;

  __device__ __forceinline__ explicit RowLanes(const Params& params)
      : params(params), lane(threadIdx.x % kLanes), column(kChunk * lane) {}

  // Elements past the head dim, and rows that are none, are zeros.
  __device__ __forceinline__ Vector16 load(const DType* row, int head_dim, bool is_row) const {
    Vector16 raw = {{0u, 0u, 0u, 0u}};
    if (!is_row || column >= head_dim) return raw;
    if constexpr (Config::kAligned) {
      return ptx::load_no_allocate(reinterpret_cast<const Vector16*>(row + column));
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const uint32_t bits = column + e < head_dim ? row[column + e].bits : 0u;
        raw.word[e / 2] |= bits << (e % 2 * 16);
      }
      return raw;
    }
  }

  template <typename T>
  __device__ __forceinline__ void load_weights(const T* weights, int head_dim,
                                               float (&value)[kChunk]) const {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      value[e] = column + e < head_dim ? ptx::to_float(weights[column + e]) + params.weight_bias
                                       : 0.0f;
    }
  }

  __device__ __forceinline__ void normalise(float (&x)[kChunk], const float (&weight)[kChunk],
                                            int head_dim) const {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) sum = ptx::fma_rn(x[e], x[e], sum);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
    const float mean = sum / static_cast<float>(head_dim);
    // mutate: norm-without-epsilon
    const float factor = ptx::rcp_approx(ptx::sqrt_approx(mean + params.epsilon));
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = x[e] * factor * weight[e];
  }

  // What the elements of a lane are rotated by.
  struct Turn {
    float cosine[kChunk], sine[kChunk];
    bool is_known;
  };

  // Positions beyond the table are not known.
  __device__ __forceinline__ Turn turn_to(int64_t position) const {
    Turn turn;
    const int half = params.rotary_dim / 2;
    // Lanes that do not turn look where others do.
    const int within = column < params.rotary_dim ? column : 0;
    const int first_pair = params.is_interleaved ? within / 2 : within - (within < half ? 0 : half);
    if constexpr (Config::kRotary == Rotary::kSteps) {
      turn.is_known = true;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int pair = first_pair + (params.is_interleaved ? e / 2 : e);
        rotation(params.rope_step[pair], static_cast<uint32_t>(position), turn.cosine[e],
                 turn.sine[e]);
      }
    } else {
      using Table = typename Config::DTypeTable;
      turn.is_known = static_cast<uint64_t>(position) < static_cast<uint64_t>(params.num_positions);
      const int64_t row = turn.is_known ? position : 0;
      const Table* cosines =
          static_cast<const Table*>(params.cos_sin) + row * params.cos_sin_stride + first_pair;
      const Table* sines = cosines + half;
      if (!turn.is_known) {
#pragma unroll
        for (int e = 0; e < kChunk; ++e) turn.cosine[e] = turn.sine[e] = 0.0f;
      } else if (params.is_interleaved) {
        float c[kChunk / 2], s[kChunk / 2];
        load_neighbours(cosines, c);
        load_neighbours(sines, s);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          turn.cosine[e] = c[e / 2];
          turn.sine[e] = s[e / 2];
        }
      } else {
        load_neighbours(cosines, turn.cosine);
        load_neighbours(sines, turn.sine);
      }
    }
    return turn;
  }

  // Rotates the first rotary_dim elements; to positions that are not known they are NaN.
  __device__ __forceinline__ void rotate(float (&x)[kChunk], const Turn& turn) const {
    const int half = params.rotary_dim / 2;
    const bool is_low = column < half;
    const bool turns = column < params.rotary_dim;
    float other[kChunk];
    if (params.is_interleaved) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) other[e] = x[e ^ 1];
    } else {
      const int steps = half / kChunk;
      const int source = threadIdx.x % kWarpSize + (turns ? (is_low ? steps : -steps) : 0);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) other[e] = ptx::shuffle(x[e], source);
    }
    if (!turns) return;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const bool subtracts = params.is_interleaved ? e % 2 == 0 : is_low;
      const float product = other[e] * turn.sine[e];
      // mutate: rotated-backwards
      x[e] = ptx::fma_rn(x[e], turn.cosine[e], subtracts ? -product : product);
      if (!turn.is_known) x[e] = ptx::nan();  // mutate: rotation-past-the-table
    }
  }

  // x H / sqrt(head_dim), H the Hadamard matrix of Sylvester; head_dim is a power of two. With
  // Config::kSwaps, of rows as wide as their lanes, elements then are in columns `column_across`.
  __device__ __forceinline__ void transform(float (&x)[kChunk], int head_dim) const {
#pragma unroll
    for (int step = 1; step < kChunk; step *= 2) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (e & step) continue;
        const float a = x[e], b = x[e + step];
        x[e] = a + b;
        x[e + step] = a - b;
      }
    }
    if constexpr (Config::kSwaps) {
      transform_across(x);
    } else {
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
        const bool is_upper = (lane & mask) != 0;
        const bool takes_part = kChunk * mask < head_dim;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const float other = ptx::shuffle_xor(x[e], mask);
          // mutate: hadamard-sign
          if (takes_part) x[e] = is_upper ? other - x[e] : x[e] + other;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] *= params.hadamard;
  }

  // The column of an element behind transform_across: 4 neighbours of each half of the row.
  __device__ __forceinline__ int column_across(int element) const {
    return kChunk / 2 * (lane + kLanes * (element / (kChunk / 2))) + element % (kChunk / 2);
  }

 private:
  // The steps between the lanes of a whole row, by half as many shuffles: of a pair of lanes, one
  // adds and subtracts their lower elements, the other the upper ones. So elements change places.
  __device__ __forceinline__ void transform_across(float (&x)[kChunk]) const {
    constexpr int kHalf = kChunk / 2;
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      const bool is_upper = (lane & mask) != 0;
#pragma unroll
      for (int e = 0; e < kHalf; ++e) {
        const float sent = is_upper ? x[e] : x[e + kHalf];
        const float other = ptx::shuffle_xor(sent, mask);
        const float low = is_upper ? other : x[e];
        const float high = is_upper ? x[e + kHalf] : other;
        x[e] = low + high;
        x[e + kHalf] = low - high;  // mutate: hadamard-across-sign
      }
    }
  }
};

}  // namespace cupyattn

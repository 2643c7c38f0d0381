// Writes new keys and values to a cache, behind the keys that each request has, and rotates keys and
// queries (arXiv 2104.09864) by tables of cosines and sines. A group of threads takes one head of
// one token.
#pragma once

#include "cupyattn/page/append.cuh"
#include "cupyattn/params/append_new_kv.cuh"
#include "cupyattn/plan/planned_request.cuh"

namespace cupyattn {

// An element that is rotated, as a float and back. fp8 saturates.
template <typename T>
__device__ __forceinline__ float element_to_float(const T& element) {
  if constexpr (is_fp8<T>) {
    float low, high;
    ptx::unpack_pair<half_t>(ptx::fp8_to_pair<half_t, T, 0, 1>(element.bits), low, high);
    return low;
  } else {
    return ptx::to_float(element);
  }
}

template <typename Config>
struct AppendNewKv {
  using DType = typename Config::DType;
  using DTypeQ = typename Config::DTypeQ;
  using DTypeTable = typename Config::DTypeTable;
  template <typename T>
  static constexpr int kCount = Config::kAligned ? 16 / static_cast<int>(sizeof(T)) : 1;
  static_assert(!Config::kRotary || !is_fp8<DType> || !Config::kAligned,
                "16 fp8 elements may lie in both halves of what rotates");
  static constexpr int kKeys = 0, kValues = 1;

  const AppendNewKvParams& params;  // rows are counted in 32 bits, rows times heads in 64

  // Which request a row belongs to, and which of its rows it is.
  struct Token {
    int32_t request, index;  // request -1: none
  };

  __device__ __forceinline__ void append(int part) const {
    if (part == kKeys && blockIdx.x == 0) write_lengths();
    const AppendedRows& rows = params.rows[part];
    const DType* source = static_cast<const DType*>(rows.source);
    for_each_row(params.k_rows, params.num_kv_heads, [&](int64_t row, int64_t head) {
      const Token token = find_token(params.k_offsets, params.k_offsets_format, params.k_len, row);
      if (token.request < 0) return;
      const Slot slot = find_slot_behind(token);
      if (slot.page < 0) return;
      DType* target = static_cast<DType*>(rows.cache) + slot.page * rows.cache_stride_page +
                      slot.offset * rows.cache_stride_n + head * rows.cache_stride_h;
      const int64_t position = part == kKeys ? rotary_position(token, true) : -1;
      write_row(source + row * rows.source_stride_n + head * rows.source_stride_h, target,
                rows.head_dim, position);
    });
  }

  __device__ __forceinline__ void rotate_queries() const {
    const int head_dim = params.rows[kKeys].head_dim;
    const DTypeQ* source = static_cast<const DTypeQ*>(params.q);
    for_each_row(params.q_rows, params.num_qo_heads, [&](int64_t row, int64_t head) {
      const Token token = find_token(params.q_offsets, params.q_offsets_format, params.q_len, row);
      const int64_t position =
          token.request < 0 ? -1 : rotary_position(token, params.q_moves != 0);
      DTypeQ* target = static_cast<DTypeQ*>(params.rotated_q) +
                      (row * params.num_qo_heads + head) * static_cast<int64_t>(head_dim);
      write_row(source + row * params.q_stride_n + head * params.q_stride_h, target, head_dim,
                position);
    });
  }

 private:
  template <typename Function>
  __device__ __forceinline__ void for_each_row(int64_t num_tokens, int32_t num_heads,
                                               Function&& function) const {
    const int64_t rows_per_block = Config::kThreads >> params.lane_bits;
    const int64_t num_rows = num_tokens * num_heads;
    int64_t row = blockIdx.x * rows_per_block + (threadIdx.x >> params.lane_bits);
    for (; row < num_rows; row += gridDim.x * rows_per_block) {
      const int64_t token = divide(row, num_heads);
      function(token, row - token * num_heads);
    }
  }

  __device__ __forceinline__ Token find_token(const void* offsets, const IndexFormat& format,
                                              int32_t length, int64_t row) const {
    if (offsets == nullptr) {
      const int32_t request = static_cast<int32_t>(row) / length;
      return Token{request, static_cast<int32_t>(row) - request * length};
    }
    // Find the last request that starts at or before the row. An empty request starts where its
    // successor does, so the search skips it.
    int32_t low = 0, high = params.batch_size;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (load_index(offsets, format, middle) <= row ? low : high) = middle;
    }
    const int64_t first = load_index(offsets, format, low);
    // mutate: spare-row-of-last-request
    if (row < first || row >= load_index(offsets, format, low + 1)) return Token{-1, 0};
    return Token{low, static_cast<int32_t>(row - first)};
  }

  // Keys beyond the request's pages have no slot, whatever values come.
  __device__ __forceinline__ Slot find_slot_behind(const Token& token) const {
    constexpr Slot kNone = {-1, 0};
    const int64_t begin = load_index(params.lens, params.lens_format, token.request);
    if (begin < 0 || begin > 0x7fffffff) return kNone;  // mutate: absent-request-written
    const uint32_t position = static_cast<uint32_t>(begin) + static_cast<uint32_t>(token.index);
    const uint32_t page_size = static_cast<uint32_t>(params.page_size);
    const uint32_t index = position / page_size;
    // mutate: key-past-the-table
    if (index >= static_cast<uint32_t>(params.max_pages)) return kNone;
    const int64_t page = params.table[token.request * params.table_stride + index];
    if (page < 0 || page >= params.num_pages) return kNone;
    return {page, static_cast<int32_t>(position - index * page_size)};
  }

  // Where a row is rotated to; negative: nowhere.
  __device__ __forceinline__ int64_t rotary_position(const Token& token, bool moves) const {
    if constexpr (!Config::kRotary) return -1;
    const int64_t begin = load_index(params.rotary_lens, params.rotary_format, token.request);
    // mutate: queries-rotated-alike
    return begin < 0 ? -1 : begin + (moves ? token.index : 0);
  }

  template <typename T>
  __device__ __forceinline__ void write_row(const T* source, T* target, int32_t head_dim,
                                            int64_t position) const {
    const int lane = threadIdx.x & ((1 << params.lane_bits) - 1);
    const int32_t stride = kCount<T> << params.lane_bits;
    for (int32_t i = kCount<T> * lane; i < head_dim; i += stride) {
      if constexpr (Config::kRotary) {
        if (position >= 0 && i < params.rotary_dim) {
          rotate(source, target, i, position);
          continue;
        }
      }
      store_elements<kCount<T>>(target + i, source + i, Quotients(1.0f));
    }
  }

  template <typename T, int kSize>
  __device__ __forceinline__ static void load(const T* source, float (&value)[kSize]) {
    if constexpr (kSize == 1) {
      value[0] = element_to_float(*source);
    } else {
      load_floats(source, value);
    }
  }

  // Rotates the elements from i on that one instruction stores. Positions beyond the tables give
  // NaN.
  template <typename T>
  __device__ __forceinline__ void rotate(const T* source, T* target, int32_t i,
                                         int64_t position) const {
    constexpr int kSize = kCount<T>;
    const int32_t half = params.rotary_dim / 2;
    const bool is_interleaved = params.is_interleaved != 0;
    float x[kSize], y[kSize], rotated[kSize];
    load(source + i, x);
    if (!is_interleaved) {
      load(source + (i < half ? i + half : i - half), y);
    } else if constexpr (kSize == 1) {
      load(source + (i ^ 1), y);
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) y[e] = x[e ^ 1];
    }
    const bool is_known = position < params.num_positions;
    const int64_t row = is_known ? position : 0;
    const DTypeTable* cosines =
        static_cast<const DTypeTable*>(params.cosines) + row * params.cosine_stride;
    const DTypeTable* sines =
        static_cast<const DTypeTable*>(params.sines) + row * params.sine_stride;
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const int32_t element = i + e;
      const bool is_low = is_interleaved ? element % 2 == 0 : element < half;
      const int32_t pair = is_interleaved ? element / 2 : element - (is_low ? 0 : half);
      float cosine[1], sine[1];
      to_floats<DTypeTable>(cosines[pair], cosine);
      to_floats<DTypeTable>(sines[pair], sine);
      // mutate: keys-rotated-backwards
      rotated[e] = x[e] * cosine[0] + (is_low ? -y[e] : y[e]) * sine[0];
      if (!is_known) rotated[e] = __uint_as_float(0x7fffffffu);
    }
    if constexpr (is_fp8<T>) {
      target[i].bits = static_cast<uint8_t>(ptx::floats_to_fp8_pair<T>(rotated[0], 0.0f));
    } else {
      store_floats<T, kSize>(target + i, rotated);
    }
  }

  __device__ __forceinline__ void write_lengths() const {
    for (int32_t i = threadIdx.x; i < params.batch_size; i += Config::kThreads) {
      const int64_t begin = load_index(params.lens, params.lens_format, i);
      int64_t count = params.k_len;
      if (params.k_offsets != nullptr) {
        count = load_index(params.k_offsets, params.k_offsets_format, i + 1) -
                load_index(params.k_offsets, params.k_offsets_format, i);
      }
      // mutate: lengths-before-the-append
      const int64_t after = begin + max_of<int64_t>(count, 0);
      params.lens_after[i] = begin < 0 ? 0 : clamp(after, 0x7fffffff);
    }
  }
};

}  // namespace cupyattn

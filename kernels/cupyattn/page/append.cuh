// Copies rows into a paged cache: a group of threads takes one head of one token.
#pragma once

#include "cupyattn/params/page.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// Where a position of a request lies in the pool of pages.
struct Slot {
  int64_t page;    // -1: nowhere
  int32_t offset;  // in the page
};

// Positions outside the table, the request's pages or the pool have no slot, whatever values come.
__device__ __forceinline__ Slot find_slot(const PageTable& table, int32_t request,
                                          int32_t position) {
  constexpr Slot kNone = {-1, 0};
  if (request < 0 || request >= table.batch_size || position < 0) return kNone;
  const int64_t first = table.kv_indptr[request];
  const int64_t end = table.kv_indptr[request + 1];
  const int64_t index = first + position / table.page_size;
  if (first < 0 || index >= end || index >= table.num_indices) return kNone;
  const int64_t page = table.kv_indices[index];
  if (page < 0 || page >= table.num_pages) return kNone;  // mutate: page-past-the-pool
  return {page, position % table.page_size};              // mutate: page-offset-of-next-position
}

// Elements that one instruction stores.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Elements {
  T x[kCount];
};

// Loads all 16 bytes at once, because the compiler does not join loads of single elements.
template <typename T, int kCount>
__device__ __forceinline__ void load_floats(const T* source, float (&value)[kCount]) {
  if constexpr (kCount == 1) {
    to_floats<T>(*source, value);
  } else {
    to_floats<T>(*reinterpret_cast<const Vector16*>(source), value);
  }
}

// Quotients by one number, rounded as divisions are. A division takes ten instructions; a product
// with the reciprocal, and its remainder times the reciprocal again, take three and round alike
// (Markstein 1990) while all of them are normal numbers.
struct Quotients {
  float divisor, reciprocal;
  bool is_plain;  // by a number so far from 1 that remainders could leave the normal range

  __device__ __forceinline__ explicit Quotients(float divisor)
      : divisor(divisor),
        reciprocal(ptx::divide_rn(1.0f, divisor)),
        is_plain(!(divisor >= 0x1p-60f && divisor <= 0x1p60f)) {}

  __device__ __forceinline__ float operator()(float x) const {
    if (is_plain) return ptx::divide_rn(x, divisor);
    const float q = x * reciprocal;
    const float rest = ptx::fma_rn(-q, divisor, x);
    const float corrected = copysignf(ptx::fma_rn(rest, reciprocal, q), q);
    // Infinities and NaNs have no remainder; fp8 saturates before it matters.
    return fabsf(q) < 0x1p100f ? corrected : q;  // mutate: quotients-of-infinities
  }
};

// Stores kCount elements from `source` at `target`, x / scale if they become fp8.
template <int kCount, typename To, typename From>
__device__ __forceinline__ void store_elements(To* target, const From* source,
                                               const Quotients& by_scale) {
  using Stored = Elements<To, kCount>;
  if constexpr (is_same<To, From>) {
    *reinterpret_cast<Stored*>(target) = *reinterpret_cast<const Stored*>(source);
  } else {
    static_assert(is_fp8<To> && !is_fp8<From>, "only wider types become fp8");
    float value[kCount];
    load_floats(source, value);
    if (by_scale.divisor != 1.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = by_scale(value[i]);
    }
    Stored stored;
    if constexpr (kCount == 1) {
      stored.x[0].bits = static_cast<uint8_t>(ptx::floats_to_fp8_pair<To>(value[0], 0.0f));
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint32_t pair = ptx::floats_to_fp8_pair<To>(value[i], value[i + 1]);
        stored.x[i].bits = static_cast<uint8_t>(pair);
        stored.x[i + 1].bits = static_cast<uint8_t>(pair >> 8);
      }
    }
    *reinterpret_cast<Stored*>(target) = stored;
  }
}

// Divides in 32 bits where it can: 64-bit divisions take several times as long.
__device__ __forceinline__ int64_t divide(int64_t a, int32_t b) {
  if (a >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// One head of one token.
struct SourceRow {
  int64_t token, head;
};

// Copies a row to its slot: 2^lane_bits threads take part, x / scale if it becomes fp8.
template <typename Config>
__device__ __forceinline__ void copy_row(const AppendedRows& rows, const SourceRow& row,
                                         const Slot& slot, int lane, int lane_bits,
                                         const Quotients& by_scale) {
  using DType = typename Config::DType;
  using DTypeCache = typename Config::DTypeCache;
  constexpr int kCount = Config::kAligned ? 16 / static_cast<int>(sizeof(DType)) : 1;
  const DType* source = static_cast<const DType*>(rows.source) + row.token * rows.source_stride_n +
                        row.head * rows.source_stride_h;
  DTypeCache* target = static_cast<DTypeCache*>(rows.cache) + slot.page * rows.cache_stride_page +
                       slot.offset * rows.cache_stride_n + row.head * rows.cache_stride_h;
  const int64_t stride = kCount << lane_bits;
  for (int64_t i = kCount * lane; i < rows.head_dim; i += stride) {
    store_elements<kCount>(target + i, source + i, by_scale);
  }
}

template <typename Config>
__device__ __forceinline__ void append_rows(const AppendPagedKvCacheParams& params,
                                            const AppendedRows& rows) {
  const int lane = threadIdx.x & ((1 << params.lane_bits) - 1);
  const int64_t rows_per_block = Config::kThreads >> params.lane_bits;
  const int64_t num_rows = params.nnz * params.num_kv_heads;
  const Quotients by_scale(rows.scale);
  int64_t row = blockIdx.x * rows_per_block + (threadIdx.x >> params.lane_bits);
  for (; row < num_rows; row += gridDim.x * rows_per_block) {
    const int64_t token = divide(row, params.num_kv_heads);
    const int64_t head = row - token * params.num_kv_heads;

    // Find the slot; a token without one is left out.
    const int32_t request = params.batch_indices[token];
    const Slot slot = find_slot(params.table, request, params.positions[token]);
    if (slot.page < 0) {
      const bool is_first = head == 0 && lane == 0 && blockIdx.y == 0;
      if (params.num_refused != nullptr && request >= 0 && is_first) {
        ptx::atomic_add(params.num_refused, 1u);
      }
      continue;
    }

    copy_row<Config>(rows, {token, head}, slot, lane, params.lane_bits, by_scale);
  }
}

}  // namespace cupyattn

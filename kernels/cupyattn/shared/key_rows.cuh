// Where the rows of keys and values lie. Rows of a ragged tensor are a stride apart. A paged cache
// has a table of pages: one thread looks up a key's page for all threads that copy its row, and
// hands them the row's offset through shared memory.
#pragma once

#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/shared/work.cuh"

namespace cupyattn {

// The keys and the values of one head.
template <typename T>
__device__ __forceinline__ const T* keys_of(const AttentionParams& params, int kv_head) {
  return static_cast<const T*>(params.k) + kv_head * params.k_stride_h;
}
template <typename T>
__device__ __forceinline__ const T* values_of(const AttentionParams& params, int kv_head) {
  return static_cast<const T*>(params.v) + kv_head * params.v_stride_h;
}

// Where a key's page is in the table of its request, and where the key is in the page.
struct PageSlot {
  int page, slot;

  static __device__ __forceinline__ PageSlot of(const AttentionParams& params, int key) {
    const int page = divide(key, params.page_magic, params.page_shift);
    return PageSlot{page, key - page * params.page_size};
  }
};

// Elements from a head of the cache to the row of a key.
__device__ __forceinline__ int64_t paged_row(int page, int slot, int64_t stride_page,
                                             int64_t stride_n) {
  return page * stride_page + slot * stride_n;
}

// Elements from a head of K to the row of one key of a request.
template <bool kPaged>
__device__ __forceinline__ int64_t key_row(const AttentionParams& params, const Request& request,
                                           int key) {
  if constexpr (kPaged) {
    const PageSlot at = PageSlot::of(params, key);
    const int page = params.kv_indices[request.kv_start + at.page];
    return paged_row(page, at.slot, params.k_stride_page, params.k_stride_n);
  } else {
    return (static_cast<int64_t>(request.kv_start) + key) * params.k_stride_n;
  }
}

// Elements from a head of V to the row of one key of a request. kOwnValuePages: values have pages
// of their own, whose ids lie `value_pages` entries behind those of the keys.
template <bool kPaged, bool kOwnValuePages = false>
__device__ __forceinline__ int64_t value_row(const AttentionParams& params, const Request& request,
                                             int key) {
  if constexpr (kPaged) {
    const PageSlot at = PageSlot::of(params, key);
    const int behind = kOwnValuePages ? params.value_pages : 0;
    const int page = params.kv_indices[request.kv_start + behind + at.page];
    return paged_row(page, at.slot, params.v_stride_page, params.v_stride_n);
  } else {
    return (static_cast<int64_t>(request.kv_start) + key) * params.v_stride_n;
  }
}

// Offsets of the rows of one tile of keys.
template <int kTileKV, bool kOwnValuePages>
struct RowOffsets {
  int64_t k[kTileKV], v[kTileKV];

  __device__ __forceinline__ void set(const AttentionParams& params, const Request& request,
                                      int row, int key, int end_key, int page) {
    const int slot = PageSlot::of(params, key).slot;  // mutate: page-slot-of-next-key
    k[row] = paged_row(page, slot, params.k_stride_page, params.k_stride_n);
    if constexpr (kOwnValuePages) {
      // Looked up when it is needed: such tables are rare, and not worth registers.
      v[row] = key < end_key ? value_row<true, true>(params, request, key) : 0;
    } else {
      v[row] = paged_row(page, slot, params.v_stride_page, params.v_stride_n);
    }
  }
};

// The row offsets of a block's tiles, which take turns in two places. Pages of a tile are fetched
// asynchronously beside earlier tiles, and become offsets one step before the copy needs them.
template <int kTileKV, bool kOwnValuePages>
struct PagedTiles {
  RowOffsets<kTileKV, kOwnValuePages> rows[2];
  int32_t page[2][kTileKV];

  // Thread r serves row r in each step, so no thread waits for another's fetch.
  __device__ __forceinline__ void fetch(const AttentionParams& params, const Request& request,
                                        int first_key, int end_key, int place, int thread) {
    if (thread >= kTileKV) return;
    const int key = first_key + thread;
    ptx::cp_async_4(ptx::shared_address(&page[place][thread]),
                    params.kv_indices + request.kv_start + PageSlot::of(params, key).page,
                    key < end_key);
  }
  __device__ __forceinline__ void publish(const AttentionParams& params, const Request& request,
                                          int first_key, int end_key, int place, int thread) {
    if (thread >= kTileKV) return;
    const int found = page[place][thread];
    rows[place].set(params, request, thread, first_key + thread, end_key, found);
  }
  // Fetches and publishes at once, for the first tiles.
  __device__ __forceinline__ void look_up(const AttentionParams& params, const Request& request,
                                          int first_key, int end_key, int place, int thread) {
    if (thread >= kTileKV) return;
    const int key = first_key + thread;
    const int found =
        // mutate: next-page
        key < end_key ? params.kv_indices[request.kv_start + PageSlot::of(params, key).page] : 0;
    rows[place].set(params, request, thread, key, end_key, found);
  }
};

}  // namespace cupyattn

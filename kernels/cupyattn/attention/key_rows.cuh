// Where the rows of keys and values are. Rows of a ragged tensor are a stride apart; a paged cache
// has a table of pages, and offsets of rows go through shared memory: one thread looks up a key's
// page for all that copy its row.
#pragma once

#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/cp_async.cuh"

namespace cupyattn {

// Where in its request's table a key's page is, and where in the page the key.
struct PageSlot {
  int page, slot;

  static __device__ __forceinline__ PageSlot of(const AttentionParams& params, int key) {
    const int page = divide(key, params.page_magic, params.page_shift);
    return PageSlot{page, key - page * params.page_size};
  }
};

// Elements from the start of the cache to the row of a key, head aside.
__device__ __forceinline__ int64_t paged_row(int page, int slot, int64_t stride_page,
                                             int64_t stride_n) {
  return page * stride_page + slot * stride_n;
}

// The same for one key of a request, V's row, looked up in global memory.
template <bool kPaged>
__device__ __forceinline__ int64_t value_row(const AttentionParams& params, const Request& request,
                                             int key) {
  if constexpr (kPaged) {
    const PageSlot at = PageSlot::of(params, key);
    const int page = params.kv_indices[request.kv_start + at.page];
    return paged_row(page, at.slot, params.v_stride_page, params.v_stride_n);
  } else {
    return (static_cast<int64_t>(request.kv_start) + key) * params.v_stride_n;
  }
}

// Offsets of the rows of one tile of keys.
template <int kTileKV>
struct RowOffsets {
  int64_t k[kTileKV], v[kTileKV];

  __device__ __forceinline__ void set(const AttentionParams& params, int row, int key, int page) {
    const int slot = PageSlot::of(params, key).slot;  // mutate: page-slot-of-next-key
    k[row] = paged_row(page, slot, params.k_stride_page, params.k_stride_n);
    v[row] = paged_row(page, slot, params.v_stride_page, params.v_stride_n);
  }
};

// For a block: tiles take turns in two places. Pages of a tile are fetched asynchronously while
// earlier tiles are worked on, and turned into offsets one step before the copy that needs them.
template <int kTileKV>
struct PagedTiles {
  RowOffsets<kTileKV> rows[2];
  int32_t page[2][kTileKV];

  // Thread r serves row r in each step, so none needs to wait for another's fetch.
  __device__ __forceinline__ void fetch(const AttentionParams& params, const Request& request,
                                        int first_key, int end_key, int place, int thread) {
    if (thread >= kTileKV) return;
    const int key = first_key + thread;
    ptx::cp_async_4(ptx::shared_address(&page[place][thread]),
                    params.kv_indices + request.kv_start + PageSlot::of(params, key).page,
                    key < end_key);
  }
  __device__ __forceinline__ void publish(const AttentionParams& params, int first_key, int place,
                                          int thread) {
    if (thread >= kTileKV) return;
    rows[place].set(params, thread, first_key + thread, page[place][thread]);
  }
  // Both at once, for the first tiles.
  __device__ __forceinline__ void look_up(const AttentionParams& params, const Request& request,
                                          int first_key, int end_key, int place, int thread) {
    if (thread >= kTileKV) return;
    const int key = first_key + thread;
    const int found =
        // mutate: next-page
        key < end_key ? params.kv_indices[request.kv_start + PageSlot::of(params, key).page] : 0;
    rows[place].set(params, thread, key, found);
  }
};

struct NoPagedTiles {
  int64_t unused;
};

}  // namespace cupyattn

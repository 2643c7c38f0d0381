// Where the keys of a tile lie for kernels of wide heads, and their way to shared memory. Every row
// is found through an offset in shared memory, whether keys are in pages, in rows, or in a list.
//
// Latent keys (kLatent) have one head and two parts, of which the first is the value too. A list of
// keys (kSparse) has one entry of kv_indices for each key: the number of a row among the rows of
// all pages, or a negative number for no key.
#pragma once

#include "cupyattn/params/latent.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

template <typename Config>
using WideParams = conditional<Config::kLatent, LatentParams,
                               conditional<Config::kRope, WideRopeParams, AttentionParams>>;

__device__ __forceinline__ const AttentionParams& attention_of(const AttentionParams& params) {
  return params;
}
__device__ __forceinline__ const AttentionParams& attention_of(const LatentParams& params) {
  return params.attention;
}
__device__ __forceinline__ const AttentionParams& attention_of(const WideRopeParams& params) {
  return params.attention;
}

// The offset of a row that does not exist. Its place in shared memory is filled with zeros.
constexpr int64_t kNoRow = -0x7fffffffffffffffll - 1;

// Elements from the first key to each key of a tile, and from the first value, or the first rope
// part, to each. One thread finds the row of one key.
template <typename Config, int kTileKV>
struct WideRows {
  int64_t k[kTileKV], second[kTileKV];

  // The entry of kv_indices that says where a key is.
  static __device__ __forceinline__ int look_up(const WideParams<Config>& all,
                                                const Request& request, int key, int end_key) {
    const AttentionParams& params = attention_of(all);
    if constexpr (!Config::kPaged) return 0;
    if (key >= end_key) return -1;
    const int entry = Config::kSparse ? key : PageSlot::of(params, key).page;
    // mutate: wide-page-of-another-request
    const int found = params.kv_indices[request.kv_start + entry];
    if constexpr (Config::kSparse) return all.slot(found);
    return found;
  }

  // Sets the offsets of a key; `found` is from look_up.
  __device__ __forceinline__ void set(const WideParams<Config>& all, const Request& request,
                                      int row, int key, int end_key, int found) {
    const AttentionParams& params = attention_of(all);
    if (key >= end_key || (Config::kSparse && found < 0)) {  // mutate: wide-absent-key-read
      k[row] = second[row] = kNoRow;
      return;
    }
    if constexpr (!Config::kPaged) {
      const int64_t at = static_cast<int64_t>(request.kv_start) + key;
      k[row] = at * params.k_stride_n;
      second[row] = at * params.v_stride_n;
      return;
    }
    PageSlot at = PageSlot::of(params, Config::kSparse ? found : key);
    if constexpr (!Config::kSparse) at.page = found;
    k[row] = paged_row(at.page, at.slot, params.k_stride_page, params.k_stride_n);
    if constexpr (Config::kLatent) {
      second[row] =  // mutate: rope-part-of-another-key
          paged_row(at.page, at.slot, all.k_rope_stride_page, all.k_rope_stride_n);
    } else if constexpr (Config::kOwnValuePages) {
      second[row] = value_row<true, true>(params, request, key);
    } else {
      second[row] = paged_row(at.page, at.slot, params.v_stride_page, params.v_stride_n);
    }
  }
};

// Starts the copy of columns of each row of a tile: `kCount` of them, which become those from
// kFirst on. `offsets` are elements from `source` to the first of each row.
template <typename Tile, int kFirst, int kCount, bool kAligned, int kThreads>
__device__ __forceinline__ void copy_columns(uint32_t tile, const typename Tile::T* source,
                                             const int64_t* offsets, int thread) {
  constexpr int kPerChunk = Tile::kElementsPerChunk, kChunks = kCount / kPerChunk;
  static_assert(kCount % kPerChunk == 0 && kFirst % kPerChunk == 0, "parts are whole chunks");
  static_assert(kThreads % kChunks == 0, "a thread keeps its column");
  constexpr int kStep = kThreads / kChunks, kBatch = kAligned ? min_of(4, ceil_div(Tile::kRows, kStep)) : 1;
  const int chunk = thread % kChunks;
  const typename Tile::T* column = source + chunk * kPerChunk;
  // Offsets are read some at a time, because ptxas puts idle loads between a load from shared
  // memory and a copy into it.
#pragma unroll(kAligned ? 4 : 1)
  for (int first = thread / kChunks; first < Tile::kRows; first += kBatch * kStep) {
    int64_t at[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      at[i] = row < Tile::kRows ? offsets[row] : kNoRow;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      if (Tile::kRows % (kBatch * kStep) != 0 && row >= Tile::kRows) break;
      const bool exists = at[i] != kNoRow;
      copy_chunk<Tile, Tile::kColumns, kAligned>(
          Tile::address(tile, row, kFirst / kPerChunk + chunk), kFirst / kPerChunk + chunk,
          column + (exists ? at[i] : 0), exists);
    }
  }
}

// The same of all columns of rows, of which threads need not be a multiple: parts of as many chunks
// as a power of two, the largest first.
template <typename Tile, int kFirst, int kCount, bool kAligned, int kThreads>
__device__ __forceinline__ void copy_all_columns(uint32_t tile, const typename Tile::T* source,
                                                 const int64_t* offsets, int thread) {
  constexpr int kPerChunk = Tile::kElementsPerChunk, kChunks = kCount / kPerChunk;
  constexpr int kPart = kPerChunk * (kThreads % kChunks == 0 ? kChunks
                                     : kChunks >= 32         ? 32
                                     : kChunks >= 16         ? 16
                                     : kChunks >= 8          ? 8
                                                             : 4);
  copy_columns<Tile, kFirst, kPart, kAligned, kThreads>(tile, source, offsets, thread);
  if constexpr (kPart < kCount) {
    copy_all_columns<Tile, kFirst + kPart, kCount - kPart, kAligned, kThreads>(
        tile, source + kPart, offsets, thread);
  }
}

}  // namespace cupyattn

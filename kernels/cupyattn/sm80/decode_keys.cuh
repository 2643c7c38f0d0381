// The keys of a warp of decode_sm80, tile after tile: where they lie, and their way to the stages of
// the warp's ring. They are a range of the request's keys, or what a list names.
#pragma once

#include "cupyattn/shared/key_lists.cuh"
#include "cupyattn/shared/mask.cuh"
#include "cupyattn/sm80/traits.cuh"

namespace cupyattn {

// Keys one after another; the other warps' keys lie before those of the warp's next tile. Of paged
// keys each lane looks up the page of one key of the tile that is loaded next.
template <typename Kernel>
struct RangeKeys {
  using Place = int;  // a page
  using Rows = RowOffsets<Kernel::kKeys, Kernel::kOwnValuePages>;
  static constexpr int kKeys = Kernel::kKeys, kTileKV = Kernel::kTileKV;
  static constexpr bool kPaged = Kernel::kPaged;

  const Kernel& kernel;
  const int warp_origin, end;
  typename Kernel::Traits::KCopier k_copier;
  typename Kernel::Traits::VCopier v_copier;

  __device__ __forceinline__ RangeKeys(const Kernel& kernel, const KeyRange& range,
                                       const TileSpan& tiles)
      : RangeKeys(kernel, range, tiles.origin + kernel.warp * kKeys,
                  static_cast<int64_t>(kernel.request.kv_start) + tiles.origin +
                      kernel.warp * kKeys + tiles.begin * kTileKV) {}
  __device__ __forceinline__ RangeKeys(const Kernel& kernel, const KeyRange& range, int warp_origin,
                                       int64_t first_row)
      : kernel(kernel),
        warp_origin(warp_origin),
        end(range.end),
        k_copier(kernel.k_copier(kernel.work.kv_head, first_row)),
        v_copier(kernel.v_copier(kernel.work.kv_head, first_row)) {}

  static __device__ __forceinline__ KeyRange range_of(const Kernel& kernel) {
    return KeyRange::of<Kernel::Traits::Mask::kKeyShare>(kernel.params,
                                                         BlockWork{kernel.request, kernel.work});
  }

  __device__ __forceinline__ int first_key(int tile) const { return warp_origin + tile * kTileKV; }

  __device__ __forceinline__ int find(int tile) const {
    const int key = first_key(tile) + kernel.lane;
    return kernel.lane < kKeys && key < end
               ? kernel.params.kv_indices[kernel.request.kv_start +
                                          PageSlot::of(kernel.params, key).page]
               : 0;
  }
  template <int kCount>
  __device__ __forceinline__ void find_all(int tile, int (&pages)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) pages[i] = find(tile + i);
  }

  __device__ __forceinline__ void load(int stage, int tile, [[maybe_unused]] int page) {
    const int first = first_key(tile);
    const int64_t *k_rows = nullptr, *v_rows = nullptr;
    if constexpr (kPaged) {
      Rows& rows = kernel.shared.pages[kernel.warp];
      if (kernel.lane < kKeys) {
        rows.set(kernel.params, kernel.request, kernel.lane, first + kernel.lane, end, page);
      }
      ptx::warp_sync();  // mutate: page-offsets-read-early
      k_rows = rows.k;
      v_rows = rows.v;
    }
    k_copier.copy(first, end, stage * sizeof(typename Kernel::Stage), k_rows);
    k_copier.skip(kTileKV - kKeys);
    v_copier.copy(first, end, stage * sizeof(typename Kernel::Stage), v_rows);
    v_copier.skip(kTileKV - kKeys);
  }

  // All keys of a range are there, or a mask hides them.
  static constexpr __device__ __forceinline__ uint32_t present(int) { return ~0u; }
};

// A lane's key of a tile: its place in the request, negative for none, and its page.
struct ListedKey {
  int key, page;
};

// The offsets of the rows of a tile, and which keys of each stage there are.
template <int kKeys, int kStages, bool kOwnValuePages>
struct ListedRows : RowOffsets<kKeys, kOwnValuePages> {
  uint32_t present[round_up(kStages, 2)];
};

// Keys of a list. Each lane looks up one key of each tile: an entry of the list a tile before the
// page that it leads to.
template <typename Kernel>
struct ListedKeys {
  using Place = ListedKey;
  using Rows = ListedRows<Kernel::kKeys, Kernel::kStages, Kernel::kOwnValuePages>;
  static constexpr int kKeys = Kernel::kKeys;

  const Kernel& kernel;
  const TokenList list;
  const int first;  // the lane's key of tile 0
  int entry;        // of the tile after the last that was asked for
  uint32_t loading = 0;  // which keys there are of the tile that was loaded last
  typename Kernel::Traits::KCopier k_copier;
  typename Kernel::Traits::VCopier v_copier;

  __device__ __forceinline__ ListedKeys(const Kernel& kernel, const KeyRange&, const TileSpan&)
      : ListedKeys(kernel, divide(kernel.work.kv_head, kernel.lists->heads_magic,
                                  kernel.lists->heads_shift)) {}
  __device__ __forceinline__ ListedKeys(const Kernel& kernel, int key_head)
      : kernel(kernel),
        list(TokenList::of(*kernel.lists, kernel.request, kernel.work.kv_head)),
        first(kernel.warp * kKeys + kernel.lane),
        entry(-1),
        k_copier(kernel.k_copier(key_head, 0)),
        v_copier(kernel.v_copier(key_head, 0)) {}

  // All keys of the list and the window, whichever there are of them.
  static __device__ __forceinline__ KeyRange range_of(const Kernel& kernel) {
    const int count = kernel.params.kv_len;
    return KeyRange{0, count, 0, count, 0, 0};
  }

  __device__ __forceinline__ int first_key(int) const { return 0; }

  __device__ __forceinline__ ListedKey find(int tile) {
    const ListedKey result = find_page(tile, entry);
    entry = find_entry(tile + 1);
    return result;
  }
  // The entries of tiles from this one on, and then the pages, each all at once.
  template <int kCount>
  __device__ __forceinline__ void find_all(int tile, ListedKey (&keys)[kCount]) {
    int entries[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) entries[i] = find_entry(tile + i);
    entry = find_entry(tile + kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) keys[i] = find_page(tile + i, entries[i]);
  }

  __device__ __forceinline__ void load(int stage, int, ListedKey found) {
    load_keys(stage, found);
    load_values(stage);
  }
  // The keys of a tile, and behind them its values, which may have another stage.
  __device__ __forceinline__ void load_keys(int stage, ListedKey found) {
    Rows& rows = kernel.shared.pages[kernel.warp];
    loading = ptx::warp_ballot(found.key >= 0);
    if (kernel.lane == 0) rows.present[stage] = loading;
    if (kernel.lane < kKeys) {
      rows.set(kernel.params, kernel.request, kernel.lane, max_of(found.key, 0), list.end,
               found.page);
    }
    ptx::warp_sync();  // mutate: listed-offsets-read-early
    if (loading == 0) return;
    copy(k_copier, stage, rows.k);
  }
  __device__ __forceinline__ void load_values(int stage) {
    if (loading == 0) return;
    const Rows& rows = kernel.shared.pages[kernel.warp];
    copy(v_copier, stage, rows.v);
  }

  // A bit for each key of a stage that there is.
  __device__ __forceinline__ uint32_t present(int stage) const {
    return kernel.shared.pages[kernel.warp].present[stage];
  }

 private:
  template <typename Copier>
  __device__ __forceinline__ void copy(Copier& copier, int stage, const int64_t* rows) {
    const uint32_t to = stage * sizeof(typename Kernel::Stage);
    if constexpr (Kernel::kRunsOnce) {
      copier.copy_present_in_loop(loading, to, rows);
    } else {
      copier.copy_present(loading, to, rows);
    }
  }
  __device__ __forceinline__ int index(int tile) const { return first + tile * Kernel::kTileKV; }
  __device__ __forceinline__ int find_entry(int tile) const {
    return kernel.lane < kKeys ? list.entry(index(tile)) : -1;
  }
  __device__ __forceinline__ ListedKey find_page(int tile, int entry) const {
    const AttentionParams& params = kernel.params;
    const int key = kernel.lane < kKeys ? list.key(index(tile), entry) : -1;
    const int begin = kernel.request.kv_start;
    // Without pages the first row of the request takes their place.
    if (params.kv_indices == nullptr) return ListedKey{key, begin};
    const int page = PageSlot::of(params, max_of(key, 0)).page;
    return ListedKey{key, key < 0 ? 0 : params.kv_indices[begin + page]};
  }
};

// Hides the logits of keys whose bits are missing, as hide_logits.
template <typename Form, int kMmaQ, int kTilesS>
__device__ __forceinline__ void hide_absent_keys(float (&s)[kMmaQ][kTilesS][4], uint32_t present,
                                                 int lane) {
  const uint32_t own = present >> (2 * (lane & 3));
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // mutate: absent-listed-keys-attend
        if (!((own >> (8 * n + (e & 1))) & 1)) s[m][n][e] = Form::hidden();
      }
    }
  }
}

}  // namespace cupyattn

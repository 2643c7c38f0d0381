// Rows of a union's item whose O is not finite. A tile has blocks that some tokens name and others do
// not: these multiply values that are not theirs by zero, which is NaN where such a value is not
// finite. Values are not swept for that, which would cost each tile; such rows are made again.
#pragma once

#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/sm90/roles/mask.cuh"
#include "cupyattn/shared/output_gate.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/roles/rows.cuh"

namespace cupyattn {

template <typename Traits>
struct UnionRows {
  using Rows = PrefillSm90Rows<Traits>;
  using Item = typename Traits::Item;
  using QTile = typename Traits::QTile;
  using T = typename Traits::DTypeQ;
  static constexpr int kHeadDimVO = Traits::kHeadDimVO;
  // n-tiles of O that are made at a time: logits are made again for each, but registers are scarce.
  static constexpr int kTogether = 2;

  const PrefillSm90Block<Traits>& block;
  const Rows& rows;
  const AttentionParams& params = block.params;

  static __device__ __forceinline__ bool is_finite(const float (&o)[1][kHeadDimVO / 8][4]) {
    float zero = 0.0f;
#pragma unroll
    for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = fmaf(o[0][n][e], 0.0f, zero);
    }
    return zero == 0.0f;
  }

  // Writes a warp's rows again where they have been written, key by key from global memory.
  __device__ __forceinline__ void write_again(const typename Rows::Output& output) const {
    const Item& item = block.shared.items[output.place];
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
      for (int n = 0; n < kHeadDimVO / 8; n += kTogether) {
        float o[kTogether][2] = {};
        add_keys(o, item, h, n);
        const float factor = h == 0 ? output.factors[0] : output.factors[1];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (n + i >= kHeadDimVO / 8) continue;
          gate(o[i], item, h, n + i);
          const uint32_t pair =
              ptx::pack_pair<typename Traits::DTypeO>(o[i][0] * factor, o[i][1] * factor);
          store(output, item, h, n + i, pair);
        }
      }
    }
    ptx::fence_proxy_async();
  }

 private:
  __device__ __forceinline__ void gate(float (&pair)[2], const Item& item, int h, int n) const {
    if constexpr (has_output_gate<Traits>) {
      const auto row = rows.row_place(item, h);
      if (!row.exists) return;
      float factors[2];
      GateRow<Traits, true>::of(params, row.token, row.head).factors(8 * n + 2 * (rows.lane & 3), factors);
      pair[0] *= factors[0];
      pair[1] *= factors[1];
    }
  }

  __device__ __forceinline__ void store(const typename Rows::Output& output, const Item& item,
                                        int h, int n, uint32_t pair) const {
    const int in_chunk = 4 * (rows.lane & 3);
    if (item.boxed_rows > 64 * rows.group) {
      unsigned char* tile = block.shared.q[output.slot];
      *reinterpret_cast<uint32_t*>(tile + QTile::offset(rows.own_row(h), n) + in_chunk) = pair;
      return;
    }
    const auto row = rows.row_place(item, h);
    if (!row.exists) return;
    auto* out = static_cast<typename Traits::DTypeO*>(params.o) + row.token * params.o_stride_n +
                row.head * params.o_stride_h + 8 * n;
    *reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(out) + in_chunk) = pair;
  }

  // Whether a row of a token that sees so many keys of its request sees key `key` of a tile.
  template <typename Tile>
  static __device__ __forceinline__ bool sees(const Tile& tile, int key, int token, int seen,
                                              int window) {
    if constexpr (Traits::kSmallUnions) {
      const int unit = key / kUnitKeys;
      return ((tile.units[token] >> unit) & 1) && tile.first_key[unit] + key % kUnitKeys < seen;
    } else {
      const int half = key / kUnionKeys;
      const SeenOfHalf part = SeenOfHalf::of(tile, half, seen, window);
      const int position = tile.first_key[half] + key % kUnionKeys;
      return ((tile.tokens[half] >> token) & 1) && position >= part.begin && position < part.end;
    }
  }

  // Adds the values of all keys that a row sees to its columns from n-tile `first` on.
  __device__ __forceinline__ void add_keys(float (&o)[kTogether][2], const Item& item, int h,
                                           int first) const {
    const Request& request = item.work.request;
    using Tile = typename Traits::TileOfUnion;
    const KeyUnions& unions = block.all_params.unions();
    const Tile* tiles = static_cast<const Tile*>(unions.tiles) + request.mask_start;
    const int lane = rows.lane, kv_head = item.work.tile.kv_head;
    const PackGqaRow row = rows.token_of(item, rows.own_row(h));
    const int seen = request.key_offset + (params.window_right >= 0 ? row.token : 0);
    const float row_max = block.shared.unions.row_max[rows.own_row(h)];
    const T* query = static_cast<const T*>(params.q) +
                     static_cast<int64_t>(request.q_start + row.token) * params.q_stride_n +
                     (kv_head * params.group_size + row.group_head) * params.q_stride_h;
#pragma unroll 1
    for (int key = 0; key < request.kv_len; ++key) {
      const bool sees = this->sees(tiles[key / Traits::kTileKV], key % Traits::kTileKV, row.token,
                                   seen, unions.window);
      if (!ptx::warp_any(sees)) continue;
      const T* keys = keys_of<T>(params, kv_head) + key_row<true>(params, request, key);
      float sum = 0.0f;
#pragma unroll 1
      for (int column = lane & 3; column < Traits::kHeadDimQK; column += 4) {
        sum = fmaf(element_to_float(query[column]), element_to_float(keys[column]), sum);
      }
      const float p = ptx::ex2_approx((quad_sum(sum) - row_max) * params.softmax_scale);
      if (!sees) continue;  // mutate: values-of-others-reach-rows
      const T* values = values_of<T>(params, kv_head) + value_row<true>(params, request, key);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= kHeadDimVO / 8) continue;
        float pair[2];
        load_pair(values + 8 * (first + i) + 2 * (lane & 3), pair);
        o[i][0] = fmaf(p, pair[0], o[i][0]);
        o[i][1] = fmaf(p, pair[1], o[i][1]);
      }
    }
  }
};

}  // namespace cupyattn

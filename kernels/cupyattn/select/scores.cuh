// Scores of blocks of index rows. Rows of keys are those of the products' first operand, so that few
// queries fill a tile: columns are the heads of a tile's tokens, eight to a product.
//
// A warp reads 32 rows straight into registers, and needs no other warp for them: a lane has 16 bytes
// of a row at a time, wherever the row lies, and which columns of the row these are does not matter
// as long as the queries' fragments have the same ones. Products of a warpgroup (kWarpgroup), for many
// columns, take 16 rows of each of four warps, which need not follow one another either.
#pragma once

#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/mma.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/select/score_totals.cuh"
#include "cupyattn/select/tokens.cuh"
#include "cupyattn/shared/work.cuh"
#include "cupyattn/tile/elements.cuh"
#include "cupyattn/tile/warpgroup_tile.cuh"

namespace cupyattn {

// What a tile of tokens is, by the Config of a kernel.
template <typename Config>
struct SelectShape {
  using Query = typename Config::DTypeQ;
  using Key = typename Config::DTypeK;
  // e4m3 values are f16 values.
  using T = conditional<is_fp8<Query>, half_t, Query>;
  static constexpr int kHeads = Config::kHeads, kGroups = Config::kGroups;
  static constexpr int kShare = kHeads / kGroups;  // heads of a group
  static constexpr int kTiles = Config::kTiles;    // of eight columns
  // Candidates are a token's own.
  static constexpr int kTokens = Config::kCandidates ? 1 : 8 * kTiles / kHeads;
  static constexpr int kWarps = Config::kWarps, kThreads = kWarps * kWarpSize;
  static constexpr bool kIsSum = Config::kSum, kIsSoftmax = Config::kSoftmax;
  static constexpr int kBlockRows = Config::kBlockRows;
  // Eights of rows of a warp's step, and steps whose rows are on their way at a time; warps that
  // share a block; rows that those have before they move on.
  static constexpr bool kWarpgroup = Config::kWarpgroup;
  static constexpr int kEights = Config::kEights, kStep = 8 * kEights, kAhead = Config::kAhead;
  static constexpr int kSharing = Config::kSharing;
  static constexpr int kUnit = max_of(kBlockRows, kStep * kSharing);
  static constexpr int kStepsAUnit = kUnit / (kStep * kSharing);
  static constexpr int kLists = kWarps / kSharing;  // warps, or those that share, in their turn
  // 32 columns of a row are a vector of each lane of a quad, as 16-bit elements.
  static constexpr int kVectors = Config::kHeadDim / 32;
  static constexpr int kRaw = Config::kHeadDim * static_cast<int>(sizeof(Key)) / 64;
  // Scores that a lane has of a tile's columns: of both, or of both together.
  static constexpr int kColumns = kShare == 1 ? 2 : 1;
  static constexpr int kTilesAGroup = max_of(kShare / 8, 1);
  static constexpr int kGroupsOfTiles = kTiles / kTilesAGroup;
  static constexpr int kSharedColumns = kSharing > 1 ? 8 * kTiles : 1;

  static_assert(kShare == 1 || kShare == 2 || kShare == 4 || kShare % 8 == 0, "heads of a group");
  static_assert(kTokens > 0, "a tile has whole tokens");
  static_assert(!kWarpgroup || kEights == 2, "a warp has 16 rows of a product");
  static_assert(!kWarpgroup || (kWarps == 4 && Config::kHeadDim % 64 == 0), "whole panels");
  static_assert(!kIsSoftmax || (kShare == 1 && !Config::kCandidates), "a head's rows are all of them");
  static_assert(kSharing == 1 || kBlockRows % (kStep * kSharing) == 0, "warps share whole steps");
};

template <typename Config>
struct SelectShared {
  using Shape = SelectShape<Config>;
  // Fragments, as lanes read them; or, of warpgroups, a tile of panels.
  alignas(Shape::kWarpgroup ? 1024 : 16) Vector16 q[Shape::kTiles][Shape::kVectors][kWarpSize];
  float weights[Shape::kIsSum ? 8 * Shape::kTiles : 1];
  float best[2][Shape::kWarps][Shape::kSharedColumns];
};

// The tokens of a block of the grid, and the index rows that they see.
struct SelectTile {
  int request, first, count;  // tokens, from the launch's first one on
  int first_seen;             // keys that the first token sees; below 0 if there are fewer than tokens
  int step;                   // that each token sees more than the one before it
  int end;                    // rows that the last token sees; with candidates, those that they name
  int common;                 // rows that all tokens see

  // The first token of a request, or the one behind its last, within the launch.
  static __device__ __forceinline__ int begin_of(const SelectScoresParams& params, int request) {
    const SelectTokens& tokens = params.tokens;
    const int begin = tokens.qo_offsets == nullptr ? request * tokens.request_tokens
                                                   : tokens.qo_offsets[request];
    return min_of(max_of(begin - params.tokens.first_token, 0), params.num_tokens);
  }

  // Request and tile of a place of the grid; a whole warp calls this. Places of a request begin at
  // its first token over the tokens of a tile, and its number.
  template <int kTokens>
  static __device__ __forceinline__ SelectTile of(const SelectScoresParams& params, int place,
                                                  int lane) {
    const SelectTokens& tokens = params.tokens;
    int request = 0, tile = 0;
    if (params.request_tiles > 0) {
      request = params.request_tiles == 1 ? place : place / params.request_tiles;
      tile = place - request * params.request_tiles;
    } else {
      int step = tokens.num_requests;
#pragma unroll 1
      while (step > 1) {
        step = ceil_div(step, kWarpSize);
        const int index = request + lane * step;
        const bool begins = index < tokens.num_requests &&
                            begin_of(params, index) / kTokens + index <= place;
        request += step * (max_of(__popc(ptx::warp_ballot(begins)), 1) - 1);
      }
      tile = place - request - begin_of(params, request) / kTokens;
    }
    SelectTile at;
    at.request = request;
    const int end = begin_of(params, request + 1);
    at.first = begin_of(params, request) + tile * kTokens;
    at.count = min_of(end - at.first, kTokens);
    const int kv_len = select_kv_len(tokens, request);
    at.step = tokens.is_causal ? 1 : 0;
    int behind = 0;  // tokens of the request behind the first one
    if (tokens.is_causal) {
      const int last = tokens.qo_offsets == nullptr ? (request + 1) * tokens.request_tokens
                                                    : tokens.qo_offsets[request + 1];
      behind = last - params.tokens.first_token - 1 - at.first;
    }
    at.first_seen = kv_len - behind;
    at.end = at.rows_of(max_of(at.count - 1, 0), tokens);
    at.common = at.rows_of(0, tokens);
    return at;
  }

  __device__ __forceinline__ int rows_of(int token, const SelectTokens& tokens) const {
    return max_of(first_seen + token * step, 0) >> tokens.ratio_shift;
  }
};

template <typename Config>
struct SelectScores {
  using Shape = SelectShape<Config>;
  using T = typename Shape::T;
  using Key = typename Shape::Key;
  using Query = typename Shape::Query;
  static constexpr int kVectors = Shape::kVectors, kRaw = Shape::kRaw, kTiles = Shape::kTiles;
  static constexpr int kColumns = Shape::kColumns, kStep = Shape::kStep;
  static constexpr int kBlockRows = Shape::kBlockRows, kShare = Shape::kShare;

  static constexpr int kEights = Shape::kEights, kAhead = Shape::kAhead;
  static constexpr bool kIsLarge = kBlockRows > kStep;
  // Rows g, g + 8 and so on of a step, as they are in memory. scale, row: of the row that this lane
  // looked up for its warp; the number is negative where there is none.
  struct Raw {
    Vector16 vectors[kEights][kRaw];
    float scale;
    int row;
  };
  using Total = conditional<Shape::kIsSoftmax, ScoreExponentials, LargestScore>;
  using QueryTile = PanelTile<T, 8 * kTiles, Config::kHeadDim>;

  const SelectScoresParams& params;
  SelectShared<Config>& shared;
  SelectTile tile;
  float scale;  // of all products
  int lane, warp;

  // Where each group has candidates of its own, each has blocks of the grid.
  __device__ __forceinline__ int first_head() const {
    return Config::kCandidates ? static_cast<int>(blockIdx.z) * Shape::kHeads : 0;
  }

  // --- queries ---

  // What a lane reads of a column: eight elements of a row of queries, zeros beyond the last token.
  using QueryWords = cupyattn::Words<2 * static_cast<int>(sizeof(Query))>;

  __device__ __forceinline__ QueryWords query_words(int column, int vector, int thread) const {
    const int token = column / Shape::kHeads, head = column % Shape::kHeads;
    if (token >= tile.count || column >= Shape::kTokens * Shape::kHeads) return QueryWords{};
    const int64_t row =
        static_cast<int64_t>(params.tokens.first_token + tile.first + token) * params.q_stride_n +
        (head + first_head()) * params.q_stride_h;
    const Vector16* source = static_cast<const Vector16*>(params.q) + row;
    // 16 elements of keys of 8 bits are two vectors here.
    const int element = is_fp8<Key> ? 64 * (vector / 2) + 16 * thread + 8 * (vector % 2)
                                    : 32 * vector + 8 * thread;
    return reinterpret_cast<const QueryWords*>(source)[element / 8];
  }

  // The same as 16-bit elements.
  __device__ __forceinline__ Vector16 query_vector(const QueryWords& words) const {
    Vector16 result;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      if constexpr (is_fp8<Query>) {
        result.word[2 * w] = ptx::fp8_to_pair<T, Query, 0, 1>(words.word[w]);
        result.word[2 * w + 1] = ptx::fp8_to_pair<T, Query, 2, 3>(words.word[w]);
      } else {
        result.word[2 * w] = words.word[2 * w];
        result.word[2 * w + 1] = words.word[2 * w + 1];
      }
    }
    // What is left of the scale is positive, so that the largest stays the largest.
    if (scale < 0.0f) {
#pragma unroll
      for (int w = 0; w < 4; ++w) result.word[w] ^= 0x80008000u;
    }
    return result;
  }

  __device__ __forceinline__ float weight_of(int column) const {
    const int token = column / Shape::kHeads, head = column % Shape::kHeads;
    if (token >= tile.count || column >= Shape::kTokens * Shape::kHeads) return 0.0f;
    float weight = 1.0f;
    if (params.weights != nullptr) {
      using Weight = typename Config::DTypeW;
      const int64_t at =
          static_cast<int64_t>(params.tokens.first_token + tile.first + token) * params.weight_stride +
          head + first_head();
      if constexpr (sizeof(Weight) == 4) {
        weight = static_cast<const float*>(params.weights)[at];
      } else {
        weight = ptx::to_float(static_cast<const Weight*>(params.weights)[at]);
      }
    }
    return weight * fabsf(scale);
  }

  // A vector of a column: number n of this thread, of a warp's own if a warp has whole columns.
  struct QueryPlace {
    int tile, vector;
  };

  __device__ __forceinline__ QueryPlace query_place(int n) const {
    if constexpr (Shape::kWarps % kVectors == 0) {
      return {n * (Shape::kWarps / kVectors) + warp / kVectors, warp % kVectors};
    } else {
      const int index = n * Shape::kWarps + warp;
      return {index / kVectors, index % kVectors};
    }
  }

  __device__ __forceinline__ void store_query(const QueryPlace& place, const QueryWords& words) const {
    const Vector16 loaded = query_vector(words);
    if constexpr (Shape::kWarpgroup) {
      // Words of a step's columns lie side by side, thread after thread.
      unsigned char* tile = reinterpret_cast<unsigned char*>(&shared.q);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int at = QueryTile::offset(8 * place.tile + lane / 4, 4 * place.vector + w);
        *reinterpret_cast<uint32_t*>(tile + at + 4 * (lane % 4)) = loaded.word[w];
      }
    } else {
      shared.q[place.tile][place.vector][lane] = loaded;
    }
  }

  // Some vectors are on their way at a time: a block of few rows has little else to do.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kWeights = Shape::kIsSum ? ceil_div(8 * kTiles, Shape::kThreads) : 0;
    float weights[max_of(kWeights, 1)];
#pragma unroll
    for (int n = 0; n < kWeights; ++n) weights[n] = weight_of(n * Shape::kThreads + threadIdx.x);
    constexpr int kEach = ceil_div(kTiles * kVectors, Shape::kWarps);  // of a thread
    constexpr int kAtOnce = min_of(kEach, is_fp8<Query> ? 8 : 4);
#pragma unroll 1
    for (int first = 0; first < kEach; first += kAtOnce) {
      QueryWords words[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const QueryPlace place = query_place(first + n);
        words[n] = query_words(8 * place.tile + lane / 4, place.vector, lane % 4);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const QueryPlace place = query_place(first + n);
        if (place.tile < kTiles) store_query(place, words[n]);
      }
    }
    if constexpr (Shape::kWarpgroup) ptx::fence_proxy_async();
    if constexpr (Shape::kIsSum) {
#pragma unroll
      for (int n = 0; n < kWeights; ++n) {
        const int column = n * Shape::kThreads + threadIdx.x;
        if (column < 8 * kTiles) shared.weights[column] = weights[n];
      }
    }
  }

  // --- index rows ---

  // Row number `index` of those that candidates name.
  __device__ __forceinline__ int candidate_row(int index) const {
    const int entry = divide(min_of(index, tile.end - 1), params.candidate_magic,
                             params.candidate_shift);
    const int64_t token = params.tokens.first_token + tile.first;
    const int block = params.candidates[token * params.candidate_stride +
                                        blockIdx.z * params.candidate_stride_group + entry];
    if (block < 0 || block > tile.common / params.candidate_rows) return -1;
    const int row = block * params.candidate_rows + index - entry * params.candidate_rows;
    return index < tile.end && row < tile.common ? row : -1;
  }

  // Where the row is that this lane looks up for its warp: in a page, whose number may be on its way.
  // Rows behind the last one are that one again.
  struct Place {
    int row, at, page;
  };

  __device__ __forceinline__ Place find(int index) const {
    Place place;
    if constexpr (Config::kCandidates) {
      place.row = candidate_row(index);
      place.at = max_of(place.row, 0);
    } else {
      place.row = index;
      place.at = min_of(index, tile.end - 1);
    }
    place.page = tile.request;
    if (params.table != nullptr) {
      const int number = divide(place.at, params.page_magic, params.page_shift);
      place.page = params.table[tile.request * params.table_stride + number];
      place.at -= number * params.page_size;
    } else if (params.kv_offsets != nullptr) {
      place.page = 0;
      place.at += params.kv_offsets[tile.request];
    }
    return place;
  }

  // A scale comes with its row: whoever kept it elsewhere would wait for it to copy it.
  __device__ __forceinline__ void load(Raw& raw, const Place& place) const {
    const uint32_t begin = static_cast<uint32_t>(place.page) * params.k_stride_page +
                           static_cast<uint32_t>(place.at) * params.k_stride_n;
    const Vector16* keys = static_cast<const Vector16*>(params.k) + lane % 4;
#pragma unroll
    for (int r = 0; r < kEights; ++r) {
      const uint32_t offset =
          static_cast<uint32_t>(ptx::shuffle(static_cast<int>(begin), 8 * r + lane / 4));
#pragma unroll
      for (int v = 0; v < kRaw; ++v) {
        raw.vectors[r][v] = ptx::load_no_allocate_256(keys + offset + 4 * v);
      }
    }
    if constexpr (Config::kRowScales) {
      raw.scale = params.k_scales[place.page * params.scale_stride_page + place.at];
    }
    raw.row = place.row;
  }

  // --- products ---

  // The words of 32 columns of a row, as the products want them.
  static __device__ __forceinline__ void to_words(const Vector16 (&raw)[kRaw],
                                                  uint32_t (&words)[kVectors][4]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (is_fp8<Key>) {
          const uint32_t four = raw[v / 2].word[v % 2 * 2 + w / 2];
          words[v][w] = w % 2 == 0 ? ptx::fp8_to_pair<T, Key, 0, 1>(four)
                                   : ptx::fp8_to_pair<T, Key, 2, 3>(four);
        } else {
          // A product's registers follow one another, of two rows in turn. The compiler would copy
          // to them, and so wait, right behind the load.
          words[v][w] = ptx::opaque_copy(raw[v].word[w]);
        }
      }
    }
  }

  using Words = uint32_t[kEights][kVectors][4];
  // Row 8 r + g of column 2 t + e of a tile of columns is acc[r / 2][2 (r % 2) + e].
  using Sums = float[kEights / 2][4];

  // The rows 16 m + g and 16 m + g + 8 of a step of 16 columns.
  static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Words& words, int m,
                                                  int step) {
    const int v = step / 2, half = step % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = words[2 * m + i % 2][v][2 * half + i / 2];
  }

  // Products of the step's rows with the columns of a tile.
  __device__ __forceinline__ void multiply(Sums& acc, const Words& words, int n) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Vector16 b = shared.q[n][v][lane];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kEights / 2; ++m) {
          uint32_t a[4];
          fragment(a, words, m, 2 * v + half);
          ptx::mma_m16n8k16<T>(acc[m], a, b.word[2 * half], b.word[2 * half + 1],
                               v == 0 && half == 0);
        }
      }
    }
  }

  // Those with all columns, by a warpgroup.
  __device__ __forceinline__ void multiply_all(Sums (&acc)[kTiles], const Words& words,
                                               uint64_t queries) const {
    float (&d)[4 * kTiles] = reinterpret_cast<float (&)[4 * kTiles]>(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kVectors; ++step) {
      uint32_t a[4];
      fragment(a, words, 0, step);
      const uint64_t b = operand_behind<QueryTile>(
          queries, step / 4 * (QueryTile::kPanelBytes / 16) + step % 4 * 2);
      ptx::Wgmma<8 * kTiles>::template multiply_rs_k_major<T>(d, a, b, step != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(d);
  }

  // Scores of the step's rows: value[e][r] is that of row 8 r + g.
  using Values = float[kColumns][kEights];

  // What the columns of tile n add to the scores of their group.
  __device__ __forceinline__ void add_tile(Values& value, const Sums& acc,
                                           const float (&factor)[kEights], int n,
                                           bool is_first) const {
    float weight[2];
    if constexpr (Shape::kIsSum) {
#pragma unroll
      for (int e = 0; e < 2; ++e) weight[e] = shared.weights[8 * n + 2 * (lane % 4) + e];
    }
#pragma unroll
    for (int r = 0; r < kEights; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = acc[r / 2][2 * (r % 2) + e];
        if constexpr (Shape::kIsSum) {
          x = ptx::max_nan(x, 0.0f);  // mutate: relu-of-scores-lost
        } else if constexpr (Config::kRowScales) {
          x *= factor[r];
        }
        if constexpr (Shape::kIsSoftmax) x *= fabsf(scale) * kLog2e;
        float& sum = value[kColumns == 2 ? e : 0][r];
        if (kColumns == 2 || (is_first && e == 0)) {
          sum = Shape::kIsSum ? x * weight[e] : x;
        } else {
          sum = Shape::kIsSum ? sum + x * weight[e] : ptx::max_nan(sum, x);
        }
      }
    }
    if constexpr (kColumns == 2 && Shape::kIsSum && Config::kRowScales) {
#pragma unroll
      for (int r = 0; r < kEights; ++r) {
        value[0][r] *= factor[r];
        value[1][r] *= factor[r];
      }
    }
  }

  // The score of two heads of a group.
  static __device__ __forceinline__ float join(float a, float b) {
    return Shape::kIsSum ? a + b : ptx::max_nan(a, b);
  }

  // The heads of a group that other lanes of the quad have; then what no sum may have before.
  __device__ __forceinline__ void finish_heads(Values& value, const float (&factor)[kEights]) const {
#pragma unroll
    for (int r = 0; r < kEights; ++r) {
      if constexpr (kShare >= 4) value[0][r] = join(value[0][r], ptx::shuffle_xor(value[0][r], 1));
      if constexpr (kShare >= 8) value[0][r] = join(value[0][r], ptx::shuffle_xor(value[0][r], 2));
      if constexpr (Shape::kIsSum && Config::kRowScales && kColumns == 1) value[0][r] *= factor[r];
    }
  }

  // The group of a column, counted from the tile's first token on.
  __device__ __forceinline__ int group_of(int group_tile, int e) const {
    if constexpr (kShare >= 8) return group_tile;
    return (8 * group_tile + 2 * (lane % 4) + e) / kShare;
  }

  // Rows that a token does not see are no part of its blocks. rows: the numbers of 8 r + g.
  __device__ __forceinline__ void hide(Values& value, int group_tile, const int (&rows)[kEights]) const {
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      const int token = group_of(group_tile, e) / Shape::kGroups;
      const int end = tile.rows_of(token, params.tokens);
#pragma unroll
      for (int r = 0; r < kEights; ++r) {
        // mutate: scores-of-hidden-rows
        const bool is_hidden = rows[r] >= end;
        if (is_hidden || rows[r] < 0) value[e][r] = -ptx::infinity();
      }
    }
  }

  // Of the rows of a block that the lanes of a column have.
  static __device__ __forceinline__ float across_rows(Total total) {
    if constexpr (kBlockRows >= 2) total.join_lane(4);
    if constexpr (kBlockRows >= 4) total.join_lane(8);
    if constexpr (kBlockRows >= 8) total.join_lane(16);
    return total.result();
  }

  __device__ __forceinline__ void write(float x, int group, int block) const {
    int64_t row = static_cast<int64_t>(tile.first) * Shape::kGroups + group;
    if constexpr (Config::kCandidates) {
      row = static_cast<int64_t>(tile.first) * params.token_rows + blockIdx.z * Shape::kGroups + group;
    }
    if constexpr (!Shape::kIsSum && !Shape::kIsSoftmax) x *= fabsf(scale);
    // A NaN counts as no score at all; a head's shares have all of its rows to count with.
    params.scores[row * params.score_stride + block] =
        Shape::kIsSoftmax || x == x ? x : -ptx::infinity();
  }

  // Scores of a group are the same in so many lanes of a quad.
  static constexpr int kSame = kColumns == 2 ? 1 : min_of(kShare, 8) / 2;

  // Blocks of at most a step's rows are whole now. Lanes that have the same share the writing.
  __device__ __forceinline__ void write_small(const Values& value, int group_tile,
                                              const int (&rows)[kEights]) const {
    constexpr int kRowsAPart = min_of(kBlockRows, 8), kParts = max_of(kBlockRows / 8, 1);
    constexpr int kBlocks = kEights / kParts;
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      const int group = group_of(group_tile, e);
      const bool is_here = group < tile.count * Shape::kGroups && lane / 4 % kRowsAPart == 0;
      float x[kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float own[kParts];
#pragma unroll
        for (int p = 0; p < kParts; ++p) own[p] = value[e][i * kParts + p];
        x[i] = kBlockRows > 1 ? across_rows(Total::of(own)) : own[0];
      }
#pragma unroll
      for (int first = 0; first < kBlocks; first += kSame) {
        float mine = x[first];
        int row = rows[first * kParts];
#pragma unroll
        for (int i = 1; i < min_of(kSame, kBlocks - first); ++i) {
          // Else these would lie in local memory, to be taken by the lane's number.
          const uint32_t other = ptx::opaque_copy(__float_as_uint(x[first + i]));
          const uint32_t other_row = ptx::opaque_copy(static_cast<uint32_t>(rows[(first + i) * kParts]));
          mine = lane % kSame == i ? __uint_as_float(other) : mine;
          row = lane % kSame == i ? static_cast<int>(other_row) : row;
        }
        const bool exists = Config::kCandidates ? row >= 0 : row < tile.end;
        const bool is_mine = lane % kSame < kBlocks - first;
        if (is_here && is_mine && exists) write(mine, group, row / kBlockRows);
      }
    }
  }

  // --- blocks of more rows than a step ---

  using Best = Total[Shape::kGroupsOfTiles][kColumns];

  static __device__ __forceinline__ void clear(Best& best) {
#pragma unroll
    for (int n = 0; n < Shape::kGroupsOfTiles; ++n) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) best[n][e] = Total::none();
    }
  }

  // index: of the block's first row.
  __device__ __forceinline__ void write_large(Best& best, int index, int turn) const {
    // mutate: scores-of-other-candidates
    const int row = Config::kCandidates ? candidate_row(index) : index < tile.end ? index : -1;
#pragma unroll
    for (int n = 0; n < Shape::kGroupsOfTiles; ++n) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        const float x = across_rows(best[n][e]);
        const int group = group_of(n, e);
        if (lane / 4 != 0 || lane % kSame != 0) continue;
        if constexpr (Shape::kSharing > 1) {
          shared.best[turn][warp][group] = x;
        } else if (group < tile.count * Shape::kGroups && row >= 0) {
          write(x, group, row / kBlockRows);
        }
      }
    }
    if constexpr (Shape::kSharing > 1) {
      ptx::block_sync();
      const int num_groups = tile.count * Shape::kGroups;
      const int first = warp / Shape::kSharing * Shape::kSharing;
      for (int group = threadIdx.x % (Shape::kSharing * kWarpSize); group < num_groups;
           group += Shape::kSharing * kWarpSize) {
        float parts[Shape::kSharing];
#pragma unroll
        for (int w = 0; w < Shape::kSharing; ++w) {
          parts[w] = shared.best[turn][first + w][group];  // mutate: warps-not-joined
        }
        if (row >= 0) write(Total::of(parts).result(), group, row / kBlockRows);
      }
    }
  }

  // --- a warp's part of the rows ---

  // The first row of this warp's step number `index`, of the stretch that begins at `unit`.
  __device__ __forceinline__ int row_of(int unit, int index) const {
    const int own = unit + warp / Shape::kSharing + index / Shape::kStepsAUnit * Shape::kLists;
    constexpr int kPart = Shape::kUnit / Shape::kSharing;
    return own * Shape::kUnit + warp % Shape::kSharing * kPart + index % Shape::kStepsAUnit * kStep;
  }

  __device__ __forceinline__ void run(int first_unit, int end_unit) const {
    // All warps go the same way round, so that they meet at barriers.
    const int num_steps = ceil_div(end_unit - first_unit, Shape::kLists) * Shape::kStepsAUnit;
    // Rows of this step and of those behind it; where the rows behind these are.
    Raw raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(raw[i], find(row_of(first_unit, i) + lane));
    Place next = find(row_of(first_unit, kAhead) + lane);
    load_queries();
    ptx::block_sync();
    const uint64_t queries = operand_at<QueryTile>(ptx::shared_address(&shared.q));
    Best best;
    if constexpr (kIsLarge) clear(best);
#pragma unroll 1
    for (int start = 0; start < num_steps; start += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i > 0 && start + i == num_steps) break;
        step(raw[i], next, best, first_unit, start + i, num_steps, queries);
      }
    }
  }

  // A step, and the load of the one whose rows come where its own have been.
  __device__ __forceinline__ void step(Raw& raw, Place& next, Best& best, int first_unit, int index,
                                       int num_steps, uint64_t queries) const {
    const int row = row_of(first_unit, index);
    int rows[kEights];
    float factor[kEights];
#pragma unroll
    for (int r = 0; r < kEights; ++r) {
      rows[r] = Config::kCandidates ? ptx::shuffle(raw.row, 8 * r + lane / 4)
                                    : row + 8 * r + lane / 4;
      factor[r] = Config::kRowScales ? ptx::shuffle(raw.scale, 8 * r + lane / 4) : 1.0f;
    }
    Words words;
#pragma unroll
    for (int r = 0; r < kEights; ++r) to_words(raw.vectors[r], words[r]);
    const bool has_next = index + kAhead < num_steps;
    if (has_next) load(raw, next);
    next = find(row_of(first_unit, index + kAhead + 1) + lane);
    Sums sums[Shape::kWarpgroup ? kTiles : 1];
    if constexpr (Shape::kWarpgroup) multiply_all(sums, words, queries);
    const bool hides = Config::kCandidates || row + kStep > tile.common;
#pragma unroll
    for (int n = 0; n < Shape::kGroupsOfTiles; ++n) {
      Values value;
#pragma unroll
      for (int part = 0; part < Shape::kTilesAGroup; ++part) {
        const int tile_index = n * Shape::kTilesAGroup + part;
        if constexpr (!Shape::kWarpgroup) multiply(sums[0], words, tile_index);
        add_tile(value, sums[Shape::kWarpgroup ? tile_index : 0], factor, tile_index, part == 0);
      }
      // Products of the next tile would be begun ahead of these scores, in registers of their own.
      if constexpr (!Shape::kWarpgroup && Shape::kGroupsOfTiles > 2) ptx::end_basic_block(tile.end);
      if constexpr (Shape::kIsSum || !kIsLarge) finish_heads(value, factor);
      if (hides) hide(value, n, rows);
      if constexpr (kIsLarge) {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) best[n][e].add(value[e]);
      } else if (row < tile.end) {
        write_small(value, n, rows);
      }
    }
    if constexpr (kIsLarge) {
      if (index % Shape::kStepsAUnit == Shape::kStepsAUnit - 1) {
        if constexpr (!Shape::kIsSum) finish_best(best);
        write_large(best, row / kBlockRows * kBlockRows, index / Shape::kStepsAUnit % 2);
        clear(best);
      }
    }
  }

  // Heads of a group that other lanes have, of the largest scores.
  __device__ __forceinline__ void finish_best(Best& best) const {
#pragma unroll
    for (int n = 0; n < Shape::kGroupsOfTiles; ++n) {
      if constexpr (kShare >= 4) best[n][0].join_lane(1);
      if constexpr (kShare >= 8) best[n][0].join_lane(2);
    }
  }
};

// Grid: tiles of tokens × parts of the rows.
template <typename Config>
__device__ __forceinline__ void select_scores(const SelectScoresParams& params) {
  using Shape = SelectShape<Config>;
  __shared__ SelectShared<Config> shared;
  ptx::grid_dependency_wait();
  // What comes next reads lengths before it waits for this launch, so that these must be there.
  ptx::launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  // The last tokens of a prompt see the most keys, and come first.
  const int place = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  SelectTile tile = SelectTile::of<Shape::kTokens>(params, place, lane);
  if (tile.count <= 0 || tile.end == 0) return;
  if constexpr (Config::kCandidates) tile.end = params.num_candidates * params.candidate_rows;
  const int64_t units = ceil_div(tile.end, Shape::kUnit);
  const int first = static_cast<int>(units * blockIdx.y / gridDim.y);
  const int end = static_cast<int>(units * (blockIdx.y + 1) / gridDim.y);
  if (first == end) return;
  const float scale = params.sm_scale * (params.k_scale == nullptr ? 1.0f : *params.k_scale);
  const SelectScores<Config> scores = {
      params, shared, tile, scale, lane,
      ptx::warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize)};
  scores.run(first, end);
}

}  // namespace cupyattn

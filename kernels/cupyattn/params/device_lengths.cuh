// What launches know of lengths whose items their blocks find. launch/attention/find_items.py packs it.
#pragma once

#include "cupyattn/params/attention.cuh"

namespace cupyattn {

// Lengths in device memory, by which blocks find their items where the host has planned nothing
// (plan/item_finder.cuh). All indices are int32, one after another.
struct DeviceLengths {
  const int32_t* qo_offsets;  // [num_requests], and the end where lengths are steps; nullptr: steps
                              // of qo_len
  const int32_t* qo_lens;     // [num_requests]; nullptr: all are `qo_len`, or steps of qo_offsets
  const int32_t* kv_offsets;  // [num_requests]; nullptr: steps of kv_step
  const int32_t* kv_lens;     // [num_requests], or offsets [num_requests + 1] whose steps they are
  int32_t num_requests;
  int32_t qo_len;             // of every request; negative: steps of qo_offsets
  int32_t num_rows;           // rows of q, which bound every request
  int32_t kv_step;            // from a request's kv_start to the next one's
  int32_t max_kv_len;         // keys a request has room for
  int32_t kv_room;            // what kv_offsets may name: rows of k, or keys of a table
  int32_t kv_lens_are_steps;  // 1: of offsets
  int32_t tile_shift;         // divides rows by those of a tile, see shared/work.cuh
  uint32_t tile_magic;
  int32_t is_causal;  // 1: rows see the keys before them alone. 0: all see alike
  float tiles_a_key;  // one by the tokens of a tile
  int32_t level_step;  // a power of two: levels are below twice as many, and no fewer than tiles
};

// How blocks that find their items split keys (plan/split_finder.cuh).
struct FoundSplits {
  int32_t tile_kv, tile_kv_shift;  // for divisions, see shared/work.cuh
  uint32_t tile_kv_magic;
  int32_t items_per_wave;  // items that run at a time
  int32_t may_split;       // 0: all keys stay whole
  int32_t lists;           // 1: items are listed for a launch that merges their states
  float least_part_cost;   // as in schedule/tile_shape.py, cost_of_part
  float block, merge, state, part, least_share;  // as in schedule/balance.py, Costs
  float a_wave;                                  // 1 / items_per_wave
  int32_t unused[3];
};

// By what blocks find their items: behind all else that a kernel is told.
struct FoundItems {
  DeviceLengths lengths;
  FoundSplits splits;
};

static_assert(sizeof(DeviceLengths) == 80 && sizeof(FoundSplits) == 64,
              "the structs and their mirrors in launch/driver/params.py must agree");

// The argument of decode_sm80.
struct FoundAttentionParams {
  AttentionParams attention;
  FoundItems found;
};

static_assert(sizeof(FoundAttentionParams) == sizeof(AttentionParams) + sizeof(FoundItems),
              "lengths lie behind what all launches have");

}  // namespace cupyattn

// The arguments of the read_tables kernel. launch/attention/read_tables.py packs them.
#pragma once

#include "cupyattn/params/attention.cuh"
#include "cupyattn/params/page.cuh"

namespace cupyattn {

// What `lengths` hold.
enum class LengthKind : int32_t {
  kNone = 0,  // nothing: steps of kv_indptr are keys
  kLastPage = 1,
  kKeys = 2,
};

struct ReadTablesParams {
  IndexArray qo_indptr;  // [num_requests + 1]; nullptr: each request has qo_len rows
  IndexArray kv_indptr;  // [num_requests + 1], in pages, or in keys
  IndexArray lengths;    // [num_requests]
  int64_t* landing;      // in memory of the host: TablesHead, then 5 * num_requests + 2 numbers
  WorkItem* items;       // [max_items] and counters or merges behind them; nullptr: no list is planned
  int64_t ticket;        // for the host to see that all has landed
  int32_t num_requests;
  int32_t qo_len;
  int32_t page_size;  // 1 for keys in rows
  LengthKind kind;
  // What a list depends on, named as in params/plan_batch.cuh.
  int32_t tile_kv, tile_kv_shift;
  uint32_t tile_kv_magic;
  int32_t items_per_wave, max_items;
  int32_t counters_a_tile;  // of each tile whose keys are split
  int32_t most_fused;       // parts of a tile that its last block merges; more are left to a launch
  int32_t unused;
  double part_cost, block, merge, state, part, least_share, least_time;  // as in schedule/balance.py
};

// What the host reads first. Everything behind it was written before `ticket`.
struct TablesHead {
  int64_t ticket;
  int64_t is_bad;  // a table is not what its checks ask for
  int64_t least_rows, most_rows;  // of a request by qo_indptr
  int64_t num_items;  // of the planned list; 0: there is none
  int64_t num_split_tiles, num_states, most_parts;
};

static_assert(sizeof(ReadTablesParams) == 176 && sizeof(TablesHead) == 64,
              "the structs and their mirrors in launch/attention/read_tables.py must agree");

}  // namespace cupyattn

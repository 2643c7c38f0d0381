// The arguments of the serving_metadata kernel. launch/ops/serving_metadata.py mirrors them.
#pragma once

#include "cupyattn/params/page.cuh"

namespace cupyattn {

// How visible draft tokens are given.
enum class TreeForm : int32_t {
  kNone,
  kFlat,     // bools: request by request [rows, seq_len + rows], the prefix first
  kSquare,   // bools [num_requests, rows, rows]
  kWords,    // uint64 [num_requests, rows], the lowest bit for the first draft token
  kBeams,    // draft decode: row i sees the tokens that beam i has drafted
};

// Rows and keys of one request of attention over one chunk of keys.
struct ChunkArrays {
  int32_t* qo_lens;     // [num_steps, num_requests, num_chunks], as all of them; may be nullptr
  int32_t* qo_offsets;
  int32_t* kv_lens;
  int32_t* kv_offsets;  // entries of the table that the chunks lie in
};

// A table of slots for each draft row: its keys within a window or a chunk, in order of position.
struct RowTables {
  int32_t* slots;  // [num_steps, num_requests * rows, width]; may be nullptr
  int32_t* lens;   // [num_steps, num_requests * rows]
  int32_t width;
  int32_t unused;
};

struct ServingMetadataParams {
  // What the engine gives; [num_requests] unless said otherwise.
  IndexArray seq_lens;
  IndexArray req_pool_indices;
  IndexArray extend_seq_lens;       // rows of q of each request; nullptr: `rows` of each
  IndexArray encoder_lens;          // may be nullptr
  IndexArray out_cache_loc;         // [num_requests * rows, draft_steps] of draft decode
  IndexArray full_to_swa;           // [map_size]; may be nullptr
  const int32_t* req_to_token;      // [num_pool_rows, >= room]
  const void* tree;                 // see TreeForm
  const int32_t* beam_rows;         // [num_requests * rows, draft_steps]; may be nullptr
  int64_t tree_size;                // elements of `tree`
  int64_t num_real;                 // requests before the padding of a graph

  // What the kernel writes; nullptr where nobody needs it.
  int32_t* kv_lens;          // [num_steps, num_requests]
  int32_t* cu_seqlens_q;     // [num_requests + 1]
  int32_t* kv_offsets;       // entry of req_to_token that each request begins at
  int32_t* page_table;       // [num_requests, page_stride]
  int32_t* swa_table;        // [num_requests, swa_stride], of pages of the other pool
  int32_t* encoder_lens_out;
  int32_t* encoder_offsets;
  int32_t* draft_table;      // [num_requests * rows, draft_width] slots, visible ones first
  int32_t* draft_lens;       // [num_requests * rows]
  uint32_t* tree_bits;       // [num_requests * rows, ceil(rows / 32)]
  ChunkArrays chunks;
  RowTables window_rows;
  RowTables chunk_rows;

  int64_t pool_stride;   // entries between rows of req_to_token
  int64_t num_pool_rows;
  int64_t room;          // columns of req_to_token that a request may use
  int64_t map_size;
  int64_t page_stride;
  int64_t swa_stride;
  int64_t chunk_stride;  // entries between rows of the table that chunks lie in

  int32_t num_requests;
  int32_t rows;          // draft rows of each request, or rows of q where all have as many
  int32_t num_steps;     // of draft decode, whose metadata is written at once
  int32_t len_delta;     // kv_lens of the first step is seq_lens + len_delta
  int32_t page_size;
  int32_t chunk_size;    // 0: none
  int32_t num_chunks;    // of each request
  int32_t chunk_page;    // keys of an entry of the table that chunks lie in
  int32_t chunks_are_slots;  // that table is req_to_token
  int32_t window;        // keys before a row's own that layers with a window see; -1: none
  int32_t swa_window;    // the same of layers on the other pool; -1: all keys, or those of a chunk
  int32_t swa_chunk;     // the chunk of such layers; 0: none
  int32_t first_step;
  int32_t draft_steps;   // columns of out_cache_loc
  int32_t draft_width;
  TreeForm tree_form;
};

static_assert(sizeof(ServingMetadataParams) == 416,
              "the struct and its mirror in launch/ops/serving_metadata.py must agree");

}  // namespace cupyattn

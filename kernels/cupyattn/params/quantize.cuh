// The arguments of the kernels of quantize/. launch/ops/quantize.py mirrors them.
#pragma once

#include "cupyattn/params/attention.cuh"
#include "cupyattn/params/page.cuh"

namespace cupyattn {

// Where the scale of a value comes from: real = stored * scale.
enum class ScaleForm : int32_t {
  kNumber,        // one number, in the struct
  kGiven,         // an array that is read
  kOfBlocks,      // found of each block of tokens of a request, and written
  kOfPageBlocks,  // found of what a block of a page gets, which keeps what it has
  kOfHeads,       // found of all rows of a head by a launch ahead, for which it is kGiven then
  kOfTensor,      // likewise, of all heads together
};

// The queries, the keys or the values of a call; strides in elements.
struct QuantizedPart {
  const void* source;      // [num_rows, num_heads, head_dim] of Config::DType
  void* target;            // rows like those, or pages
  void* copy;              // rows like those of the source, rotated; may be nullptr
  float* scales;           // [requests, heads], [blocks, heads] or [pages, blocks, heads]
  const float* mean;       // [requests, num_heads, head_dim] to be subtracted; may be nullptr
  const void* weight;      // [head_dim] of an RMS norm, of Config::DTypeWeight; may be nullptr
  const int32_t* offsets;  // [batch_size + 1] rows of requests; nullptr: rows_per_request each
  int64_t num_rows;
  int64_t source_stride_n;
  int64_t source_stride_h;
  int64_t target_stride_page;
  int64_t target_stride_n;
  int64_t target_stride_h;
  int64_t copy_stride_n;
  int64_t copy_stride_h;
  int64_t scale_stride_n;  // of a request, a row of blocks or a page
  int64_t scale_stride_block;
  int64_t scale_stride_h;
  int64_t mean_stride_n;
  int32_t num_heads;
  int32_t head_dim;
  int32_t num_tiles;  // blocks of the grid for each head
  int32_t tile_rows;  // tokens that each of them looks at
  int32_t batch_size;
  int32_t rows_per_request;
  int32_t block_bits;  // a block has 2^block_bits tokens
  int32_t is_paged;
  float scale;
  ScaleForm form;
};

// What all parts share.
struct QuantizeParams {
  QuantizedPart parts[3];        // of q, k, v
  IndexArray slots;              // [n] page * page_size + offset; data nullptr: by the table
  const int32_t* batch_indices;  // [n] the request of each token; may be nullptr
  PageTable table;
  IndexArray positions;  // [n]
  const void* cos_sin;   // [num_positions, rotary_dim] of Config::DTypeTable: cosines, then sines
  int64_t cos_sin_stride;
  int64_t num_positions;
  float* amax;         // [blocks of the grid] of a launch that finds scales of all rows
  uint32_t* arrivals;  // of its blocks
  int32_t rotary_dim;
  int32_t is_interleaved;
  float epsilon;       // of the RMS norm
  float weight_bias;   // added to its weights
  float hadamard;      // 1 / sqrt(head_dim)
  int32_t unused;
  uint32_t rope_step[kMaxRopePairs];  // turns per position / 2^32, where there is no table
};

static_assert(sizeof(QuantizedPart) == 192 && sizeof(QuantizeParams) == 1232,
              "the structs and their mirrors in launch/ops/quantize.py must agree");

// The means of a request's rows: sums of blocks of rows, then a mean of these.
struct FindMeanParams {
  const void* source;      // [num_rows, num_heads, head_dim] of Config::DType
  double* sums;            // [places of blocks, num_heads, head_dim]
  float* mean;             // [batch_size, num_heads, head_dim]
  const int32_t* offsets;  // [batch_size + 1]; nullptr: rows_per_request each
  int64_t num_rows;
  int64_t source_stride_n;
  int64_t source_stride_h;
  int32_t num_heads;
  int32_t head_dim;
  int32_t num_tiles;  // places of blocks
  int32_t batch_size;
  int32_t rows_per_request;
  float hadamard;  // 1 / sqrt(head_dim)
};

static_assert(sizeof(FindMeanParams) == 80,
              "the struct and its mirror in launch/ops/find_mean.py must agree");

}  // namespace cupyattn

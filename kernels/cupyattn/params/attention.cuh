// The one argument of the attention kernels, passed by value. launch/driver/params.py mirrors it
// field by field. Strides are in elements and 64-bit: a cache may hold more than 2^31 elements.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

constexpr int kMaxRopePairs = 128;

// A row's entry in a multi-item mask (AttentionParams::mask): the keys [begin, end) between the
// prefix and the row's own item, which the row does not see.
struct KeyInterval {
  int32_t begin, end;
};

// One block's share of a batch, for every KV head: a tile of packed query rows of one request, and
// one of the parts that its keys are split into. schedule/batch.py lays it out. An item of zeros
// has no work.
struct alignas(16) WorkItem {
  int32_t q_start;      // the request's first row of q, o and lse
  int32_t qo_len;       // its query tokens
  int32_t kv_start;     // paged: its first entry of kv_indices; else its first row of k and v
  int32_t kv_len;       // its keys
  int32_t first_row;    // of the tile, in packed rows
  int32_t split;        // 0 .. num_splits - 1
  int32_t num_splits;   // 1: the block writes the result itself
  int32_t first_state;  // partial states of the split tiles before this one, of one KV head
  int64_t mask_start;   // the request's first byte of `mask`, or its place in the batch, where that
                        // has effect: of user-written logits, slopes and scales. In kernels that
                        // have none of these it may say more of a part (ListedPart)
  int32_t split_tile;   // index of this tile among the split tiles; -1 in a cascade, whose states a
                        // later launch merges
  int32_t key_offset;   // the first key's position, if there are `positions`; where ranks share
                        // the keys, how many the others hold; else the first key that rows see
};

static_assert(sizeof(WorkItem) == 48, "schedule/batch.py lays out 12 words an item");

// What a row's LSE is, where it is not the plain one of its keys and its sink, -inf for no keys.
enum LseForm : int32_t {
  kLseWithoutSinks = 1,  // of the keys alone, though the output is divided by the sink too
  kLseOfNoKeysIsInfinite = 2,  // +inf for a row that sees no key
};

// What user-written logits may read beside the logit and its place (core/expression.py).
constexpr int kMaxLogitsArrays = 4, kMaxLogitsNumbers = 8, kMaxLogitsAxes = 4;

// An array without gaps, the last axis fastest.
struct LogitsArray {
  const void* data;
  int32_t extent[kMaxLogitsAxes];
};

// The gates of the output, in steps of a token and of a head; those of elements lie one after
// another. They take the place of the last of the arrays, in kernels that have them.
struct OutputGate {
  const void* data;
  int64_t stride_n, stride_h;
};

static_assert(sizeof(OutputGate) == sizeof(LogitsArray), "it takes the place of an array");

// Elements from what one request has to what the next one has (WorkItem::mask_start counts them);
// 0: all have the same.
struct RequestSteps {
  int32_t slopes, scale_q, scale_k, scale_v;
};

struct AttentionParams {
  const void* q;          // [qo_len, num_qo_heads, head_dim_qk]
  const void* k;          // [kv_len, num_kv_heads, head_dim_qk], or pages of page_size such rows
  const void* v;          // [kv_len, num_kv_heads, head_dim_vo], likewise
  void* o;                // [qo_len, num_qo_heads, head_dim_vo]
  float* lse;             // [qo_len, num_qo_heads], base 2 times lse_scale; may be nullptr
  const uint8_t* mask;    // see mask.cuh; read only by custom-mask kernels
  const float* sinks;     // [num_qo_heads], natural-log logits; may be nullptr
  const float* scale_q;   // [num_qo_heads]; may be nullptr, as may the next two
  const float* scale_k;   // [num_kv_heads]
  const float* scale_v;   // [num_kv_heads]
  const float* alibi_slopes;  // [num_qo_heads]; may be nullptr
  RequestSteps steps;         // of the four above; other scales than of the values are read by
                              // kernels whose rows have scales of their own
  LogitsArray logits_arrays[kMaxLogitsArrays];  // read by user-written logits
  float* partial_o;       // [split tiles, num_kv_heads, num_splits, rows of a tile, head_dim_vo]
  float* partial_lse;     // [split tiles, num_kv_heads, num_splits, rows of a tile]
  uint32_t* counters;     // [split tiles, num_kv_heads, blocks of a cluster], zero before and after
                          // the launch; nullptr: a later launch merges
  const WorkItem* work;   // [num_work]; nullptr: one request, and the grid says who does what
  const int32_t* merges;  // [split tiles], an item of each in `work`; a cascade's: see levels.cuh
  const int32_t* kv_indices;  // pages of all requests, one after another; read by paged kernels
  const int32_t* positions;   // [rows of q]; nullptr: the rows are the last tokens of the request
  int64_t q_stride_n, q_stride_h;
  int64_t k_stride_n, k_stride_h;
  int64_t v_stride_n, v_stride_h;
  int64_t o_stride_n, o_stride_h;
  int64_t lse_stride_n, lse_stride_h;
  int64_t k_stride_page, v_stride_page;
  int64_t mask_bytes;      // length of `mask`
  int64_t mask_row_bytes;  // length of one row of a RowMask
  int32_t qo_len, kv_len;  // of the one request, if there is no work list
  int32_t num_kv_heads, group_size;
  int32_t num_q_tiles, num_splits;
  int32_t window_left;    // how many keys before its own a row sees; negative: all
  int32_t window_right;   // how many keys after its own a row sees; 0 is causality; negative: all
  float sm_scale;         // the logit scale without scale_q and scale_k
  float logits_soft_cap;  // read only by soft-cap kernels
  float output_scale;     // multiplies the output
  float softmax_scale;    // sm_scale to base 2; read only if it is positive and the whole scale
  float softmax_slack;    // 8 / softmax_scale
  float lse_scale;        // multiplies the LSE: 1, or ln 2 for natural logarithms
  int32_t first_q_tile;   // first tile, or item, of this launch: grids are limited, requests not
  int32_t page_size;      // read by paged kernels, as are the next two
  uint32_t page_magic;    // n / page_size is the high half of 2 n * page_magic, >> page_shift
  int32_t page_shift;
  uint32_t group_magic;  // the same for n / group_size
  int32_t group_shift;
  int32_t value_pages;  // entries of kv_indices from a key's page to its value's, if they differ
  int32_t lse_form;     // flags of LseForm; read by kernels that serve latent attention
  uint32_t logits_numbers[kMaxLogitsNumbers];  // the bits of a float or of an int32_t each; of
                                               // kernels with a share of keys, see key_share.cuh
  uint32_t rope_step[kMaxRopePairs];  // turns per position of each rotated pair, times 2^32
};

static_assert(sizeof(AttentionParams) == 160 + 96 + 104 + 96 + 32 + 4 * kMaxRopePairs,
              "AttentionParams and its mirror in launch/driver/params.py must agree");

// The argument of kernels that rotate heads of up to twice as many pairs.
struct WideRopeParams {
  AttentionParams attention;
  uint32_t more_rope_steps[kMaxRopePairs];  // those of the pairs that follow
};

static_assert(sizeof(WideRopeParams) == sizeof(AttentionParams) + 4 * kMaxRopePairs,
              "the steps that follow must lie behind the others, where the host puts them");

}  // namespace cupyattn

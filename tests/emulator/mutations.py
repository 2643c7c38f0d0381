"""Mistakes to sow in the kernels, as data: each must be caught by the small case named beside it.

`old` must be in the file exactly once; when the kernels change, so must the list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """In kernels/<file>, `old` becomes `new`; `catcher` is a name of test_mutations.CATCHERS."""

    name: str
    file: str
    old: str
    new: str
    catcher: str


_MASK = "cupyattn/attention/mask.cuh"
_PREFILL = "cupyattn/attention/prefill_sm80.cuh"
_DECODE = "cupyattn/attention/decode_sm80.cuh"
_FRAGMENTS = "cupyattn/tile/fragments.cuh"
_SOFTMAX = "cupyattn/attention/softmax.cuh"
_STATE = "cupyattn/attention/state.cuh"
_VARIANTS = "cupyattn/attention/variants.cuh"
_ROPE = "cupyattn/attention/rope.cuh"
_BAD = "cupyattn/attention/hidden_values.cuh"
_TILE = "cupyattn/tile/shared_tile.cuh"
_WORK = "cupyattn/attention/work.cuh"
_PAGES = "cupyattn/attention/key_rows.cuh"
_SYNC = "ptx::block_sync();\n"

MUTATIONS = (
    # --- which keys a row sees ---
    Mutation(
        "causality off by one",
        _MASK,
        "min_of(request.kv_len, position + 1)",
        "min_of(request.kv_len, position)",
        "causal",
    ),
    Mutation(
        "causality aligned to the top left",
        _MASK,
        "token + request.kv_len - request.qo_len",
        "token",
        "causal",
    ),
    Mutation(
        "window off by one",
        _MASK,
        "position - params.window_left)",
        "position - params.window_left + 1)",
        "window",
    ),
    Mutation(
        "a tile one key past the last full one is not masked",
        _MASK,
        "key + count > full_end",
        "key + count > full_end + 1",
        "causal edges",
    ),
    Mutation(
        "a tile one key before the first full one is not masked",
        _MASK,
        "key < full_begin",
        "key + 1 < full_begin",
        "window edges",
    ),
    Mutation(
        "the union of limits for their intersection",
        _MASK,
        "KeyRange{a.begin, b.end, b.begin, a.end",
        "KeyRange{a.begin, b.end, a.begin, b.end",
        "causal",
    ),
    Mutation(
        "the last tiles of a split are lost",
        _MASK,
        "(product + count) / work.num_splits",
        "product / work.num_splits + count / work.num_splits",
        "split decode",
    ),
    Mutation(
        "mask bits of another key",
        _MASK,
        ">> (2 * (lane & 3));\n      return [=](int offset)",
        ">> (lane & 3);\n      return [=](int offset)",
        "mask",
    ),
    Mutation(
        "mask rows start on bytes",
        _MASK,
        "+ static_cast<uint32_t>(bit & 7)",
        "",
        "mask",
    ),
    Mutation(
        "tiles that hide some keys count as full",
        _MASK,
        "if (visible != kAll)",
        "if (visible == 0)",
        "mask",
    ),
    Mutation(
        "the walk over empty tiles leaves some out",
        _MASK,
        "tile += 32 - index % 32;",
        "tile += 33 - index % 32;",
        "sparse mask",
    ),
    # --- barriers ---
    Mutation(
        "no barrier before a tile's keys are used",
        _PREFILL,
        f"ptx::cp_async_wait_group<0>();\n    {_SYNC}    if constexpr (kPaged) advance_pages",
        "ptx::cp_async_wait_group<0>();\n    if constexpr (kPaged) advance_pages",
        "prefill",
    ),
    Mutation(
        "no barrier before a tile's values are used",
        _PREFILL,
        f"ptx::cp_async_wait_group<0>();\n      {_SYNC}      next = advance(loop);",
        "ptx::cp_async_wait_group<0>();\n      next = advance(loop);",
        "prefill",
    ),
    Mutation(
        "no barrier between the row table and the copy of Q",
        _PREFILL,
        f"{_SYNC}    copy_query_rows",
        "copy_query_rows",
        "prefill",
    ),
    Mutation(
        "Q is overwritten by the output while it is read",
        _PREFILL,
        "if constexpr (kStagesOutput) ptx::warp_sync();",
        "",
        "few rows of 128",
    ),
    Mutation(
        "staged output is read before it is written",
        _PREFILL,
        "ptx::warp_sync();\n    constexpr int kChunks",
        "constexpr int kChunks",
        "prefill",
    ),
    Mutation(
        "no barrier after keys are rotated",
        _PREFILL,
        f"[&](int row) {{ return first_key + row; }});\n      {_SYNC}",
        "[&](int row) { return first_key + row; });\n",
        "rope in the block",
    ),
    Mutation(
        "no barrier after Q is permuted",
        _PREFILL,
        f"permute_for_fp8_keys<QTile, kThreads>(shared.q, thread);\n      {_SYNC}",
        "permute_for_fp8_keys<QTile, kThreads>(shared.q, thread);\n",
        "fp8",
    ),
    Mutation(
        "bad keys are read while they are found",
        _PREFILL,
        f"shared.bad_keys, thread);\n    {_SYNC}",
        "shared.bad_keys, thread);\n",
        "bad values",
    ),
    Mutation(
        "a warp does not wait for all its lanes' copies",
        _DECODE,
        "ptx::cp_async_wait_group<kStages - 2>();\n      ptx::warp_sync();",
        "ptx::cp_async_wait_group<kStages - 2>();",
        "decode",
    ),
    Mutation(
        "states take the ring's place while others read it",
        _DECODE,
        f"ptx::cp_async_wait_group<0>();\n    {_SYNC}    WarpStates& states",
        "ptx::cp_async_wait_group<0>();\n    WarpStates& states",
        "decode",
    ),
    Mutation(
        "warps' states are merged before they are there",
        _DECODE,
        f"{_SYNC}\n    const bool is_split",
        "const bool is_split",
        "decode",
    ),
    Mutation(
        "the row offsets of pages are used before they are there",
        _DECODE,
        "ptx::warp_sync();\n        k_rows",
        "k_rows",
        "paged decode",
    ),
    Mutation(
        "the flag of the last block is read while it is written",
        _STATE,
        f"{_SYNC}  const bool is_last",
        "const bool is_last",
        "split decode",
    ),
    Mutation(
        "half of a warp skips a barrier",
        _PREFILL,
        f"ptx::cp_async_wait_group<0>();\n    {_SYNC}    prepare_q();",
        "ptx::cp_async_wait_group<0>();\n    if (lane < 16) ptx::block_sync();\n    prepare_q();",
        "prefill",
    ),
    # --- waits for copies ---
    Mutation(
        "decode waits for one stage too few",
        _DECODE,
        "ptx::cp_async_wait_group<kStages - 2>();\n      ptx::warp_sync();",
        "ptx::cp_async_wait_group<kStages - 1>();\n      ptx::warp_sync();",
        "decode",
    ),
    Mutation(
        "a stage is not committed",
        _DECODE,
        "ptx::cp_async_commit();\n      if constexpr (kPaged) next_page",
        "if constexpr (kPaged) next_page",
        "decode",
    ),
    Mutation(
        "prefill does not wait for V",
        _PREFILL,
        f"ptx::cp_async_wait_group<0>();\n      {_SYNC}      next = advance(loop);",
        f"ptx::cp_async_wait_group<1>();\n      {_SYNC}      next = advance(loop);",
        "prefill",
    ),
    # --- fragments ---
    Mutation(
        "halves of a K fragment swapped",
        _FRAGMENTS,
        "multiply_add<T>(s[m][2 * n], a[m], b[0], b[1], step == 0);",
        "multiply_add<T>(s[m][2 * n], a[m], b[1], b[0], step == 0);",
        "prefill",
    ),
    Mutation(
        "V is not transposed",
        _FRAGMENTS,
        "ptx::ldmatrix_x4_trans(b, v",
        "ptx::ldmatrix_x4(b, v",
        "prefill",
    ),
    Mutation(
        "fp8 V columns in the wrong tile",
        _FRAGMENTS,
        "ptx::fp8_to_pair<T, Fp8, 0, 2>(word)",
        "ptx::fp8_to_pair<T, Fp8, 0, 1>(word)",
        "fp8",
    ),
    Mutation(
        "Q's columns do not match fp8 keys",
        "cupyattn/attention/fp8_query.cuh",
        "Vector16{{a.word[0], a.word[2], b.word[0], b.word[2]}}",
        "Vector16{{a.word[0], b.word[0], a.word[2], b.word[2]}}",
        "fp8",
    ),
    Mutation(
        "the power of two of a row is not taken back",
        "cupyattn/attention/fp8_query.cuh",
        "static_cast<uint32_t>(127 - shift) << 23",
        "static_cast<uint32_t>(127) << 23",
        "fp8",
    ),
    Mutation(
        "e4m3 by shifts loses a power of two",
        "cupyattn/ptx/fp8.cuh",
        "0x5c005c00u",
        "0x58005800u",
        "fp8 by shifts",
    ),
    Mutation(
        "halves of P swapped",
        _SOFTMAX,
        "p[m][2 * half + h] =",
        "p[m][2 * h + half] =",
        "prefill",
    ),
    Mutation(
        "K addresses of the wrong lanes",
        _FRAGMENTS,
        "(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1",
        "(lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4",
        "prefill",
    ),
    # --- softmax and states ---
    Mutation(
        "O is not rescaled",
        _SOFTMAX,
        "o[m][n][2 * h + 1] *= factor;",
        "",
        "steep",
    ),
    Mutation(
        "the sum is not rescaled",
        _SOFTMAX,
        "row_sum[m][h] *= factor;",
        "",
        "steep",
    ),
    Mutation(
        "the maximum of half a quad",
        _SOFTMAX,
        "return fmaxf(x, ptx::shuffle_xor(x, 2));",
        "return x;",
        "steep",
    ),
    Mutation(
        "the sum of half a quad",
        _SOFTMAX,
        "return x + ptx::shuffle_xor(x, 2);",
        "return x;",
        "prefill",
    ),
    Mutation(
        "warps' sums are merged without weights",
        _DECODE,
        "state.sum += weight * states.row_sum[w][row];",
        "state.sum += states.row_sum[w][row];",
        "steep decode",
    ),
    Mutation(
        "splits are merged by the wrong weights",
        _STATE,
        "ptx::ex2_approx(part_lse[i] - max)",
        "ptx::ex2_approx(max - part_lse[i])",
        "split prefill",
    ),
    Mutation(
        "states of one head in another's place",
        _WORK,
        "* params.num_kv_heads + kv_head * num_splits",
        "* params.num_kv_heads",
        "split prefill",
    ),
    Mutation(
        "a sink does not weigh on the sum",
        _STATE,
        "sum = sum * ptx::ex2_approx(max - new_max) + ptx::ex2_approx(sink_base2 - new_max);",
        "sum = sum * ptx::ex2_approx(max - new_max);",
        "sinks",
    ),
    Mutation(
        "a row without keys divides by zero",
        _STATE,
        "if (sum == 0.0f || (old_max",
        "if (false && (old_max",
        "no keys",
    ),
    # --- values that are no numbers ---
    Mutation(
        "bad values stay in the tile",
        _BAD,
        "chunk->word[w] = values.word[w] & ~holes.word[w];",
        "chunk->word[w] = values.word[w];",
        "bad values",
    ),
    Mutation(
        "bad values reach rows that do not see them",
        _BAD,
        "if (p[m][h] != 0.0f) o",
        "o",
        "bad values",
    ),
    Mutation(
        "the probability of another key",
        _BAD,
        "(lane & ~3) | ((key & 7) >> 1)",
        "(lane & ~3) | (key & 3)",
        "bad values",
    ),
    # --- what a logit goes through ---
    Mutation(
        "RoPE turns the wrong way",
        _ROPE,
        "x[0] * cosine[0] - y[0] * sine[0]",
        "x[0] * cosine[0] + y[0] * sine[0]",
        "rope in the block",
    ),
    Mutation(
        "queries at the position of their token",
        _PREFILL,
        "return shared.rows[row].token + offset;",
        "return shared.rows[row].token + 0 * offset;",
        "rope in the block",
    ),
    Mutation(
        "keys are rotated one position too far",
        "entry/rotate_keys.cu",
        "static_cast<uint32_t>(token));",
        "static_cast<uint32_t>(token) + 1);",
        "rope ahead",
    ),
    Mutation(
        "ALiBi ignores the key's place in the tile",
        _VARIANTS,
        "fmaf(slope, 8 * n + e, bias)",
        "fmaf(slope, 8 * n, bias)",
        "alibi",
    ),
    Mutation(
        "the soft cap's polynomial past its range",
        _VARIANTS,
        "constexpr uint32_t kTwoOrMore = 0x40000000u;",
        "constexpr uint32_t kTwoOrMore = 0x80000000u & 0x7fffffffu;",
        "soft cap",
    ),
    # --- addresses ---
    Mutation(
        "rows that do not exist are read",
        _TILE,
        "ptx::cp_async_16(destination, source, row_exists && exists);",
        "ptx::cp_async_16(destination, source, exists);",
        "prefill",
    ),
    Mutation(
        "one row too many is read",
        _TILE,
        "return first_row + row < end_row;",
        "return first_row + row <= end_row;",
        "prefill",
    ),
    Mutation(
        "rows past the last are written",
        _PREFILL,
        "if (row >= work.num_rows) break;",
        "if (row > work.num_rows) break;",
        "prefill",
    ),
    Mutation(
        "the slot of another page",
        _PAGES,
        "const int slot = key % params.page_size;",
        "const int slot = (key + 1) % params.page_size;",
        "paged prefill",
    ),
    Mutation(
        "the page after the right one",
        _PAGES,
        "request.kv_start + key / params.page_size] : 0;",
        "request.kv_start + key / params.page_size + 1] : 0;",
        "paged prefill",
    ),
    Mutation(
        "pages of the tile before",
        _PREFILL,
        "const int place = (loop.place + kBuffers) & 1;",
        "const int place = (loop.place + kBuffers + 1) & 1;",
        "paged prefill",
    ),
    Mutation(
        "requests write over each other",
        _DECODE,
        "const int token = request.q_start + shared.rows[row].token;",
        "const int token = shared.rows[row].token;",
        "paged decode",
    ),
    # --- packbits ---
    Mutation(
        "bits in the other order",
        "entry/packbits.cu",
        "params.little_endian ? bit : 7 - bit",
        "params.little_endian ? 7 - bit : bit",
        "packbits",
    ),
    Mutation(
        "a byte of the segment before",
        "entry/packbits.cu",
        "(params.packed_indptr[middle] <= index ? low : high)",
        "(params.packed_indptr[middle] < index ? low : high)",
        "packbits",
    ),
)

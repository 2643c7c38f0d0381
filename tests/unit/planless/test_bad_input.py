"""Bad input of the entry points without a plan: a typed error, and nothing is written.

Each row changes arguments of a good call. What only a GPU can have is in test_launch.py
and tests/gpu/test_planless_gpu.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.bad_input import Row, by_row, ints, misaligned, of, read_only, refuse, rows_of
from helpers.batches import WORKSPACE

import cupyattn
from cupyattn.errors import ArgumentError, UnsupportedError, WorkspaceError

B, HQ, HKV, D, PAGES, PAGE, WIDTH = 3, 4, 2, 16, 8, 4, 5
DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
XQA_BATCH, XQA = "xqa_batch_decode_with_kv_cache", "xqa"
CUDNN_DECODE = "cudnn_batch_decode_with_kv_cache"
CUDNN_PREFILL = "cudnn_batch_prefill_with_kv_cache"


decode, context, xqa_batch, xqa, cudnn_decode, cudnn = map(
    rows_of, (DECODE, CONTEXT, XQA_BATCH, XQA, CUDNN_DECODE, CUDNN_PREFILL)
)


def strided(x: np.ndarray) -> np.ndarray:
    return np.repeat(x, 2, axis=-1)[..., ::2]


POOL = of("float32", PAGES, 2, HKV, PAGE, D)
HALF = of("float32", PAGES, HKV, PAGE, D)
TABLE = np.arange(B * WIDTH, dtype=np.int32).reshape(B, WIDTH) % PAGES
LENS = ints(9, 0, 20)


def good(entry: str) -> dict[str, Any]:
    trtllm = {
        "query": of("float32", B, HQ, D),
        "kv_cache": POOL,
        "workspace_buffer": WORKSPACE,
        "block_tables": TABLE,
        "seq_lens": LENS,
        "bmm1_scale": 0.25,
        "bmm2_scale": 1.0,
        "out": of("float32", B, HQ, D),
    }
    if entry in (DECODE, XQA_BATCH):
        return {**trtllm, "max_seq_len": 20, "kv_layout": "HND"}
    if entry == CONTEXT:
        return {
            **trtllm,
            "max_q_len": 2,
            "max_kv_len": 20,
            "batch_size": B,
            "cum_seq_lens_q": ints(0, 2, 2, 3),
            "cum_seq_lens_kv": ints(0, 9, 9, 29),
        }
    if entry == XQA:
        return {
            "q": of("float32", B, 1, HQ, D),
            "k_cache": HALF,
            "v_cache": HALF.copy(),
            "page_table": TABLE,
            "seq_lens": LENS.reshape(B, 1),
            "output": of("float32", B, 1, HQ, D),
            "workspace_buffer": WORKSPACE,
            "semaphores": of("uint32", 8),
            "num_kv_heads": HKV,
            "page_size": PAGE,
            "kv_layout": "HND",
        }
    named = {
        "q": of("float32", B, HQ, D),
        "k_cache": HALF,
        "v_cache": HALF.copy(),
        "scale": 0.25,
        "workspace_buffer": WORKSPACE,
        "max_sequence_kv": 20,
        "actual_seq_lens_kv": LENS.reshape(B, 1, 1, 1),
        "block_tables": TABLE,
        "out": of("float32", B, HQ, D),
    }
    if entry == CUDNN_DECODE:
        return named
    return {
        **named,
        "max_token_per_sequence": 2,
        "actual_seq_lens_q": ints(2, 0, 1).reshape(B, 1, 1, 1),
        "batch_offsets_q": ints(0, 2, 2, 3) * HQ * D,
        "causal": True,
        "return_lse": True,
    }


ROWS = [
    decode("rank of q", "query: | 2 dimensions; wanted 3", query=of("float32", B, D)),
    decode("rows of q", "query: holds 4 rows; wanted 3, 1 for each", query=of("float32", 4, HQ, D),
           out=None),
    decode("strided q", "query: the last dimension has stride",
           query=strided(of("float32", B, HQ, D))),
    decode("heads", "3 query heads over 2 KV heads", query=of("float32", B, 3, D), out=None),
    decode("head dim", "kv_cache: dimension 3 | wanted 16, the head_dim_qk of query",
           kv_cache=of("float32", PAGES, 2, HKV, PAGE, 8)),
    decode("one page axis", "kv_cache: shape is | [num_pages, 2", kv_cache=HALF),
    decode("three arrays", "kv_cache: got 3 arrays", kv_cache=(HALF, HALF, HALF)),
    decode("pair of pairs", "kv_cache[0]: shape", kv_cache=(POOL, HALF)),
    decode("pages of V", "kv_cache[1]: dimension 0", kv_cache=(HALF, HALF[1:])),
    decode("dtype of V", "kv_cache[1]: dtype is float8_e5m2 but kv_cache[0] is float32",
           kv_cache=(HALF, of("float8_e5m2", *HALF.shape))),
    decode("dtype of the cache", "dtype float16 with q of dtype float32",
           kv_cache=of("float16", *POOL.shape)),
    decode("no cache", "kv_cache: got NoneType", kv_cache=None),
    decode("layout", "kv_layout: got 'DHN'", kv_layout="DHN"),
    decode("slots ahead of heads", "query, kv_cache: 4 query heads over 8 KV heads | With "
           "kv_layout='NHD' they would be 2", kv_cache=of("float32", PAGES, 2, 8, HKV, D)),
    decode("keys beyond half of the pages", "seq_lens: request 2 has 20 | With kv_layout='NHD' "
           "they would hold as many", kv_cache=of("float32", PAGES, 2, 4, 2, D),
           block_tables=TABLE[:, :5]),
    decode("dtype of the table", "block_tables: dtype is uint32; wanted int32 or int64",
           block_tables=TABLE.astype(np.uint32)),
    decode("two tables", "a table each for K and V | uses_shared_paged_kv_idx=False",
           block_tables=np.stack([TABLE, TABLE], axis=1)),
    decode("one table of two", "block_tables: | 2 dimensions", uses_shared_paged_kv_idx=False),
    decode("a page of V beyond the pool", "block_tables: request 0 has page 99",
           uses_shared_paged_kv_idx=False, block_tables=np.stack([TABLE, TABLE * 0 + 99], axis=1)),
    decode("V's table first", "block_tables: rows are", UnsupportedError,
           uses_shared_paged_kv_idx=False, block_tables=np.stack([TABLE, TABLE], axis=1)[:, ::-1]),
    decode("rank of the table", "block_tables: | wanted 2", block_tables=TABLE[0]),
    decode("strided table", "block_tables: the last dimension", block_tables=strided(TABLE)),
    decode("negative rows", "block_tables: rows are -5 entries apart", UnsupportedError,
           block_tables=TABLE[::-1]),
    decode("page", "block_tables: request 0 has page 8 | holds 8 pages",
           block_tables=np.where(TABLE == 1, 8, TABLE).astype(np.int32)),
    decode("negative page", "has page -1",
           block_tables=np.where(TABLE == 1, -1, TABLE).astype(np.int32)),
    decode("no lengths", "seq_lens: got None", seq_lens=None),
    decode("lengths of floats", "seq_lens: dtype is float32", seq_lens=of("float32", B)),
    decode("fewer lengths", "seq_lens: shape is [2]; wanted [3]", seq_lens=ints(1, 2)),
    decode("lengths in a square", "seq_lens: shape is [3, 3]", seq_lens=TABLE[:, :3]),
    decode("length of the table", "seq_lens: request 2 has 21, and block_tables has pages for 20",
           seq_lens=ints(1, 2, 21)),
    decode("negative length", "seq_lens: request 1 has -1", seq_lens=ints(1, -1, 2)),
    decode("most as an array", "max_seq_len: got an array, ndarray", max_seq_len=LENS),
    decode("most as a fraction", "max_seq_len: got 20.5; wanted an integer", max_seq_len=20.5),
    decode("no rows each", "q_len_per_req: got 0; wanted an integer, 1 or more", q_len_per_req=0),
    decode("rows as a bool", "q_len_per_req: got True", q_len_per_req=True),
    decode("window", "window_left: got -2", window_left=-2),
    decode("scale", "bmm1_scale: got nan", bmm1_scale=float("nan")),
    decode("scale as text", "bmm1_scale: got 'one'", bmm1_scale="one"),
    decode("scales by head", "bmm1_scale: shape is [4]; wanted a number",
           bmm1_scale=of("float32", 4)),
    decode("dtype of a scale", "bmm2_scale: dtype is float16", bmm2_scale=of("float16", 1)),
    decode("output scale", "bmm2_scale: got inf", bmm2_scale=float("inf")),
    decode("o_scale", "o_scale: got 'x'", o_scale="x"),
    decode("backend", "backend: got 'cutlass'", backend="cutlass"),
    decode("shape of a mask", "mask: uint8 of shape [3, 2, 4]; wanted [3, 1]",
           mask=of("uint8", B, 2, 4)),
    decode("dtype of a mask", "mask: dtype is float32", mask=of("float32", B, 1, 1)),
    decode("strided mask", "mask: shape [3, 1, 2] has strides",
           mask=of("uint8", B, 1, 4)[..., ::2]),
    decode("mask with offsets alone", "max_q_len: got None", mask=of("uint8", B, 1),
           cum_seq_lens_q=ints(0, 1, 2, 3)),
    decode("narrow rows of a mask", "mask: uint8 of shape [3]; wanted [3, 2], 9 bits a row",
           mask=of("uint8", B), cum_seq_lens_q=ints(0, 1, 2, 3), max_q_len=9),
    decode("bools of a mask by requests", "mask: bool of shape [3, 1, 2]; wanted [3, 2]",
           mask=of("bool", B, 1, 2), cum_seq_lens_q=ints(0, 1, 2, 3), q_len_per_req=2),
    decode("rows beyond the mask", "mask: a request has 3 rows | of 2 bits; wanted max_q_len",
           mask=of("uint8", B), cum_seq_lens_q=ints(0, 3, 3, 3), max_q_len=2),
    decode("4-bit answers", "o_sf_scale: is not supported", UnsupportedError, o_sf_scale=1.0),
    decode("4-bit caches", "kv_cache_sf: is not supported", UnsupportedError, kv_cache_sf=LENS),
    decode("skipping", "skip_softmax_threshold_scale_factor: got inf",
           skip_softmax_threshold_scale_factor=float("inf")),
    decode("skipping less than nothing", "skip_softmax_threshold_scale_factor: got -1; wanted",
           skip_softmax_threshold_scale_factor=-1.0),
    decode("no flag", "uses_shared_paged_kv_idx: got 'no'", uses_shared_paged_kv_idx="no"),
    decode("block sparse", "enable_block_sparse_attention", UnsupportedError,
           enable_block_sparse_attention=True),
    decode("dtype of the answer", "out_dtype: unknown dtype 'f7'", out_dtype="f7"),
    decode("integer answer", "int8 is not a supported output | float8_e5m2", 
           out_dtype="int8", out=None),
    decode("another dtype", "out: dtype is float32; wanted float16", out_dtype="float16"),
    decode("shape of out", "out: shape is [3, 4, 8]", out=of("float32", B, HQ, 8)),
    decode("read-only out", "out: a read-only array", out=read_only(of("float32", B, HQ, D))),
    decode("shape of lse", "lse: shape is [3]; wanted [3, 4]", lse=of("float32", B),
           return_lse=True),
    decode("dtype of lse", "lse: dtype is float16", lse=of("float16", B, HQ), return_lse=True),
    decode("return_lse", "return_lse: got 'yes'", return_lse="yes"),
    decode("sinks", "sinks: shape is [3]", sinks=of("float32", 3)),
    decode("dtype of sinks", "sinks: dtype is float16", sinks=of("float16", HQ)),
    decode("strided sinks", "sinks: is not contiguous", sinks=of("float32", 2 * HQ)[::2]),
    decode("a size", "workspace_buffer: got int", workspace_buffer=128 << 20),
    decode("small space", "workspace_buffer: this call needs | and it has 64", WorkspaceError,
           workspace_buffer=of("uint8", 64), block_tables=of("int32", 3, 640), max_seq_len=9999),
    decode("space within q", "workspace_buffer: overlaps query",
           workspace_buffer=lambda a: a["query"]),
    decode("strided space", "not contiguous", WorkspaceError,
           workspace_buffer=of("uint8", 64)[::2]),
    decode("space off 16", "workspace_buffer: its address is 8 bytes", WorkspaceError,
           workspace_buffer=misaligned(64)),
    decode("read-only space", "cannot be written", WorkspaceError,
           workspace_buffer=read_only(of("uint8", 64))),
    decode("offsets", "cum_seq_lens_q: shape is [3]; wanted [4]", cum_seq_lens_q=ints(0, 1, 2)),
    decode("falling offsets", "cum_seq_lens_q: request 1 has -1", cum_seq_lens_q=ints(0, 2, 1, 3)),
    decode("offsets beyond q", "cum_seq_lens_q: request 2 has 2 from 2 on, and",
           cum_seq_lens_q=ints(0, 1, 2, 4)),
    decode("most rows", "max_q_len: got 0", cum_seq_lens_q=ints(0, 1, 2, 3), max_q_len=0),
    xqa_batch("bools of a mask", "mask: bool of shape [3, 1, 2]; wanted [3, 1, 1]",
              mask=of("bool", B, 1, 2)),
    xqa_batch("4-bit caches", "kv_cache_sf: is not supported", UnsupportedError, kv_cache_sf=LENS),
    xqa_batch("rows of q", "query: holds 3 rows; wanted 6", q_len_per_req=2),
    xqa_batch("layout", "kv_layout", kv_layout=None),
    xqa_batch("offsets", "cum_seq_lens_q: dtype is float32", q_cu_seq_lens=of("float32", 4)),
    context("batch size", "batch_size: got 2; block_tables has 3 rows", batch_size=2),
    context("no offsets", "cum_seq_lens_q: got None for 3 requests", cum_seq_lens_q=None),
    context("causal", "causal: got 'no'", causal="no"),
    context("most keys", "max_kv_len: got -1", max_kv_len=-1),
    context("most rows", "max_q_len: got 1.5", max_q_len=1.5),
    context("4-bit answers", "o_sf_vec_size: is not supported", UnsupportedError, o_sf_vec_size=16),
    xqa("rank of q", "q: | wanted 3 or 4 or 5", q=of("float32", HQ, D), output=None),
    xqa("rank of output", "output: | wanted 4", output=of("float32", B, HQ, D)),
    xqa("rows of q", "q: holds 3 rows; wanted 6", q_seq_len=2),
    xqa("spread rows", "not equally far apart", q=of("float32", B, 1, 3, HQ, D)[:, :, :2],
        q_seq_len=2, output=None),
    xqa("heads", "num_kv_heads: got 3, but the arrays have 2", num_kv_heads=3),
    xqa("layout", f"num_kv_heads: got {HKV}, but the arrays have {PAGE}; kv_layout='HND' would",
        kv_layout="NHD", q=of("float32", B, 1, PAGE, D), output=None),
    xqa("page size", "page_size: got 16, but the arrays have 4", page_size=16),
    xqa("head dim", "head_dim: got 128, but the arrays have 16", head_dim=128),
    xqa("window", "sliding_win_size: got -1", sliding_win_size=-1),
    xqa("mask of fewer", "mask: uint16 of shape [2, 1, 2]; wanted [3, 1]",
        mask=of("uint16", 2, 1, 2)),
    xqa("4-bit caches", "k_sf_cache: is not supported", UnsupportedError, k_sf_cache=LENS),
    xqa("scale", "q_scale: got 'x'", q_scale="x"),
    xqa("scale of values", "kv_scale: shape is [2]", kv_scale=of("float32", 2)),
    xqa("output scale", "rcp_out_scale: got nan", rcp_out_scale=float("nan")),
    xqa("table", "page_table: dtype is uint32", page_table=TABLE.astype(np.uint32)),
    cudnn_decode("no pages", "block_tables: got None", block_tables=None),
    cudnn_decode("no lengths", "actual_seq_lens_kv: got None", actual_seq_lens_kv=None),
    cudnn_decode("offsets of keys", "batch_offsets_k", UnsupportedError, batch_offsets_k=LENS),
    cudnn_decode("offsets of the answer", "batch_offsets_o: given without batch_offsets_q",
                 batch_offsets_o=ints(0, 1, 2, 3)),
    cudnn_decode("other offsets", "batch_offsets_o: it names other rows",
                 batch_offsets_q=ints(0, 64, 128), batch_offsets_o=ints(64, 0, 128)),
    cudnn_decode("offsets inside a row", "batch_offsets_q: | multiples of a token's 64",
                 batch_offsets_q=ints(0, 65, 128)),
    cudnn_decode("most keys", "max_sequence_kv: got 'many'", max_sequence_kv="many"),
    cudnn("units", "batch_offsets_units: got 'bytes'", batch_offsets_units="bytes"),
    cudnn("no lengths of q, nor its end", "batch_offsets_q: shape is [3]; wanted [4]",
          actual_seq_lens_q=None, batch_offsets_q=ints(0, 8, 16)),
    cudnn("no lengths", "actual_seq_lens_kv: got None", actual_seq_lens_kv=None),
    cudnn("no offsets", "batch_offsets_q: got None for 3 requests", batch_offsets_q=None),
    cudnn("offsets of pages", "batch_offsets_k", UnsupportedError, batch_offsets_k=LENS),
    cudnn("stats", "batch_offsets_stats", UnsupportedError, batch_offsets_stats=LENS),
    cudnn("no offsets of keys", "batch_offsets_k: got None for 3 requests without block_tables",
          block_tables=None, k_cache=of("float32", 29, HKV, D), v_cache=of("float32", 29, HKV, D)),
    cudnn("keys of pages without a table", "k_cache: | wanted 3", block_tables=None),
    cudnn("shape of lse", "lse: shape is [3, 4]; wanted [3, 2, 4]", lse=of("float32", B, HQ)),
    cudnn("most rows", "max_token_per_sequence: got 0", max_token_per_sequence=0),
    cudnn("two arrays", "scale, q_scale: one of them", UnsupportedError, scale=of("float32", 1),
          q_scale=of("float32", 1)),
    cudnn("dtype of the answer", "o_data_type: unknown dtype", o_data_type="f7", out=None),
    cudnn("a row beyond q", "batch_offsets_q: request 0 has 4, and",
          actual_seq_lens_q=ints(4, 0, 1)),
]  # fmt: skip


@by_row(ROWS)
def test_bad_input_is_refused(row: Row) -> None:
    refuse(row, getattr(cupyattn, row.call), good(row.call))


@pytest.mark.parametrize("entry", [DECODE, CONTEXT, XQA_BATCH, XQA, CUDNN_DECODE, CUDNN_PREFILL])
def test_the_good_calls_are_good(entry: str) -> None:
    getattr(cupyattn, entry)(**good(entry))


@pytest.mark.parametrize("name", ["query", "kv_cache", "block_tables", "seq_lens", "lse"])
def test_answers_overlap_nothing(name: str) -> None:
    arguments = good(DECODE)
    memory = np.zeros(4096, np.float32)
    arguments["lse"], arguments["return_lse"] = of("float32", B, HQ), True
    held = arguments[name]
    own = memory[: held.size].view(held.dtype)[: held.size].reshape(held.shape)
    own[...] = held
    arguments[name] = own
    arguments["out"] = memory[2 : 2 + B * HQ * D].reshape(B, HQ, D)
    with pytest.raises(ArgumentError, match="out: overlaps"):
        cupyattn.trtllm_batch_decode_with_kv_cache(**arguments)

"""Bad input of the batch wrappers: a typed error with a useful sentence, and nothing is written.

Each row changes arguments of a good call of one of three steps: making the wrapper, plan(), run().
What only a GPU can have is in test_launch.py and tests/gpu/test_batch_gpu.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.bad_input import (
    Row,
    by_row,
    check_good_steps,
    ints,
    misaligned,
    of,
    read_only,
    refuse,
    rows_of,
    step_before,
)
from helpers.batches import HKV, HQ, WORKSPACE, D

import cupyattn
from cupyattn.errors import PlanError, UnsupportedError, WorkspaceError

PAGE = 4
QO_LEN, KV_LEN = [3, 0, 2], [9, 4, 0]


made, planned, ran = (rows_of("paged", step) for step in ("make", "plan", "run"))
ragged_planned, ragged_ran = (rows_of("ragged", step) for step in ("plan", "run"))
decode_made, decode_planned, decode_ran = (rows_of("decode", s) for s in ("make", "plan", "run"))


def items(**changes: Any) -> dict[str, Any]:
    """Multi-item scoring of the good call: prefixes of 3, 4 and 0 keys, 10 places each."""
    named = {"prefix_len_ptr": ints(3, 4, 0), "token_pos_in_items_ptr": of("int32", 30)}
    return named | {"token_pos_in_items_len": 10} | changes


POOL = (8, 2, PAGE, HKV, D)

MAKE = [
    made("layout", "kv_layout: got 'HDN' | 'NHD', 'HND'", kv_layout="HDN"),
    made("backend", "backend: got 'fa9' | 'auto'", backend="fa9"),
    made("own kernels", "jit_args | pass None", UnsupportedError, jit_args=["x"]),
    made("no device", "float_workspace_buffer: got 'gpu'", float_workspace_buffer="gpu"),
    made("a size", "float_workspace_buffer: got int", float_workspace_buffer=128 << 20),
    made("strided", "not contiguous", WorkspaceError, float_workspace_buffer=of("uint8", 64)[::2]),
    made("off 16", "8 bytes past a 16-byte boundary; float_workspace_buffer must be 16-byte "
         "aligned", WorkspaceError, float_workspace_buffer=misaligned(64)),
    made("no writing", "cannot be written", WorkspaceError,
         float_workspace_buffer=read_only(of("uint8", 64))),
    made("graph without buffers", "qo_indptr_buf: use_cuda_graph=True", use_cuda_graph=True),
    made("graph flag", "use_cuda_graph: got 2 | True or False", use_cuda_graph=2),
    decode_made("tensor cores", "use_tensor_cores: got 'no'", use_tensor_cores="no"),
    decode_made("graph without indices", "paged_kv_indices_buffer: use_cuda_graph=True",
                use_cuda_graph=True, paged_kv_indptr_buffer=ints(0, 0)),
    decode_made("wide buffers", "paged_kv_indptr_buffer: dtype is int64 | wanted int32",
                use_cuda_graph=True, paged_kv_indptr_buffer=ints(0, 0, dtype="int64")),
    decode_made("buffers of two sizes", "different numbers of requests | buffer 3 | buffer 2",
                use_cuda_graph=True, paged_kv_indptr_buffer=of("int32", 4),
                paged_kv_indices_buffer=of("int32", 9), paged_kv_last_page_len_buffer=ints(0, 0)),
]  # fmt: skip

PLAN = [
    planned("falling rows", "qo_indptr: falls from 3 to 2 after request 1",
            qo_indptr=ints(0, 3, 2, 5)),
    planned("rows from 1 on", "qo_indptr: the first offset is 1; wanted 0",
            qo_indptr=ints(1, 3, 3, 5)),
    planned("negative rows", "qo_indptr: the first offset is -1", qo_indptr=ints(-1, 3, 3, 5)),
    planned("no offsets", "qo_indptr: holds 0 offsets", qo_indptr=ints()),
    planned("float offsets", "qo_indptr: got float32 | int32 or int64", qo_indptr=of("float", 4)),
    planned("small offsets", "qo_indptr: got int8 | int32 or int64",
            qo_indptr=ints(0, 3, 3, 5, dtype="int8")),
    planned("a list", "qo_indptr: got list, which is not an array", qo_indptr=[0, 3, 3, 5]),
    planned("a table", "qo_indptr: got int32 [2, 2]", qo_indptr=of("int32", 2, 2)),
    planned("falling pages", "paged_kv_indptr: falls from 4 to 3",
            paged_kv_indptr=ints(0, 4, 3, 3)),
    planned("negative pages", "paged_kv_indptr: the first offset is -3",
            paged_kv_indptr=ints(-3, 3, 4, 4)),
    planned("fewer requests", "paged_kv_indptr: holds 3 offsets; wanted 4",
            paged_kv_indptr=ints(0, 3, 4)),
    planned("fewer last pages", "paged_kv_last_page_len: shape is [2]; wanted [3]",
            paged_kv_last_page_len=ints(1, 4)),
    planned("last page of 0", "paged_kv_last_page_len: request 0 has 0 tokens | 1 to 4",
            paged_kv_last_page_len=ints(0, 4, 0)),
    planned("last page too long", "paged_kv_last_page_len: request 1 has 5 tokens",
            paged_kv_last_page_len=ints(1, 5, 0)),
    planned("last page negative", "paged_kv_last_page_len: request 0 has -1 tokens",
            paged_kv_last_page_len=ints(-1, 4, 0)),
    planned("negative id", "paged_kv_indices: entry 2 is page -1",
            paged_kv_indices=ints(0, 1, -1, 3)),
    planned("huge id", f"paged_kv_indices: entry 1 is page {2**31}",
            paged_kv_indices=ints(0, 2**31, 1, 3, dtype="int64")),
    planned("fewer ids", "paged_kv_indices: shape is [3] | at least 4",
            paged_kv_indices=ints(0, 1, 2)),
    planned("ids by request", "paged_kv_indices: shape is [2, 2]",
            paged_kv_indices=of("int32", 2, 2)),
    planned("float ids", "paged_kv_indices: dtype is float16", paged_kv_indices=of("half", 4)),
    planned("keys beyond 32 bits", "paged_kv_indptr: a request has | 2147483", UnsupportedError,
            page_size=2**30, paged_kv_last_page_len=ints(1, 1, 1)),
    planned("heads", "num_qo_heads, num_kv_heads: 5 query heads over 2", num_qo_heads=5),
    planned("no heads", "num_kv_heads: got 0", num_kv_heads=0),
    planned("half a head", "num_qo_heads: got 4.5", num_qo_heads=4.5),
    planned("no head dim", "head_dim_qk: got 0", head_dim_qk=0),
    planned("a negative head dim", "head_dim_vo: got -8", head_dim_vo=-8),
    planned("pages of nothing", "page_size: got 0", page_size=0),
    planned("q's dtype", "q: dtype uint8 is not supported", q_data_type="uint8"),
    planned(
        "keys of int8",
        "k, v: dtype int8 with q of dtype int8; wanted k of int8 and v of float8_e4m3fn",
        q_data_type="int8",
        kv_data_type="int8",
    ),
    planned("no dtype", "q_data_type: unknown dtype 'float15'", q_data_type="float15"),
    planned("other keys", "k, v: dtype bfloat16 with q of dtype float16", kv_data_type="bfloat16"),
    planned("integer output", "o_dtype: int8", o_data_type="int8"),
    planned("encoding", "pos_encoding_mode: got 'ROPE' | 'ROPE_LLAMA'", pos_encoding_mode="ROPE"),
    planned("window", "window_left: got -2", window_left=-2),
    planned("soft cap", "logits_soft_cap: got -1.0", logits_soft_cap=-1.0),
    planned("scale", "sm_scale: got nan", sm_scale=float("nan")),
    planned("theta", "rope_theta: got 0.0", rope_theta=0.0),
    planned("causal", "causal: got 'yes'", causal="yes"),
    planned("split size", "fixed_split_size: got 0", fixed_split_size=0),
    planned("no split", "disable_split_kv: got 'x'", disable_split_kv="x"),
    planned("mask too short", "custom_mask: holds 26; wanted 27", custom_mask=of("bool", 26)),
    planned("mask too long", "custom_mask: holds 28; wanted 27", custom_mask=of("bool", 28)),
    planned("mask of bytes", "custom_mask: dtype is uint8 | wanted bool",
            custom_mask=of("uint8", 27)),
    planned("mask not flat", "custom_mask: | 2 dimensions", custom_mask=of("bool", 3, 9)),
    planned("packed too short", "packed_custom_mask: holds 3; wanted 4 bytes",
            packed_custom_mask=of("uint8", 3)),
    planned("packed of bools", "packed_custom_mask: dtype is bool | wanted uint8",
            packed_custom_mask=of("bool", 4)),
    planned("items without places", "token_pos_in_items_ptr: None, but prefix_len_ptr is given",
            prefix_len_ptr=ints(1, 1, 1)),
    planned("places without a prefix", "prefix_len_ptr: None, but token_pos_in_items_ptr is given",
            token_pos_in_items_ptr=ints(0)),
    planned("only their number", "prefix_len_ptr: None, but token_pos_in_items_len is given",
            token_pos_in_items_len=3),
    planned("two prefixes", "prefix_len_ptr: shape is [2]; wanted [3]",
            **items(prefix_len_ptr=ints(1, 1))),
    planned("a float prefix", "prefix_len_ptr: got float32 [3]; wanted integers",
            **items(prefix_len_ptr=of("float", 3))),
    planned("a negative prefix", "prefix_len_ptr: holds -1 to 4; wanted 0 to 2147483647",
            **items(prefix_len_ptr=ints(4, -1, 0))),
    planned("a table of prefixes", "prefix_len_ptr: got int32 [3, 1]",
            **items(prefix_len_ptr=of("int32", 3, 1))),
    planned("a negative place", "token_pos_in_items_ptr: holds -7 to 0",
            **items(token_pos_in_items_ptr=ints(*[0] * 29, -7))),
    planned("too few places", "token_pos_in_items_len: 5 entries a request, of 30 in all, but "
            "request 0 has 6 keys | prefix of 3", **items(token_pos_in_items_len=5)),
    planned("entries end",
             "token_pos_in_items_len: 10 entries a request, of 5 in all, but request 0",
            **items(token_pos_in_items_ptr=of("int32", 5))),
    planned("no number of places", "token_pos_in_items_len: got 0, for 30 entries",
            **items(token_pos_in_items_len=0)),
    planned("half a place", "token_pos_in_items_len: got 9.5", **items(token_pos_in_items_len=9.5)),
    planned("longest items of two", "max_item_len_ptr: shape is [2]; wanted [3]",
            **items(max_item_len_ptr=ints(1, 1))),
    planned("items and a mask", "custom_mask, prefix_len_ptr: both",
            **items(custom_mask=of("bool", 27))),
    ragged_planned("falling keys", "kv_indptr: falls from 9 to 8", kv_indptr=ints(0, 9, 8, 8)),
    ragged_planned("fewer keys", "kv_indptr: holds 3 offsets; wanted 4", kv_indptr=ints(0, 9, 13)),
    ragged_planned("values elsewhere", "v_indptr: names other rows than kv_indptr",
                   v_indptr=ints(0, 9, 13, 14)),
    ragged_planned("answers elsewhere", "o_indptr: names other rows than qo_indptr",
                   o_indptr=ints(0, 3, 5, 5)),
    ragged_planned("longest item", "prefix_len_ptr: None, but max_item_len_ptr is given",
                   max_item_len_ptr=ints(0)),
    ragged_planned("too few places", "token_pos_in_items_len: 4 entries a request",
                   **items(token_pos_in_items_len=4)),
    decode_planned("falling", "indptr: falls from 3 to 2", indptr=ints(0, 3, 2, 4)),
    decode_planned("fewer", "last_page_len: shape is [2]; wanted [3]", last_page_len=ints(1, 1)),
    decode_planned("no rows", "q_len_per_req: got 0", q_len_per_req=0),
    decode_planned("window to the right", "window_right: got -2", window_right=-2),
    planned("window to the right", "window_right: got 1.5", window_right=1.5),
]  # fmt: skip

RUN = [
    ran("pages heads first", "wanted 4, the page_size of the plan | is that of kv_layout='HND'",
        paged_kv_cache=of("half", 8, 2, HKV, PAGE, D)),
    ragged_ran("keys heads first", "k: dimension 1 | Its shape is that of kv_layout='HND'",
               k=of("half", HKV, 13, D), v=of("half", HKV, 13, D)),
    ran("rows", "q: holds 4 rows; the plan has 5", q=of("half", 4, HQ, D)),
    ran("heads", "q: dimension 1 | is 8; wanted 4 | the plan", q=of("half", 5, 8, D)),
    ran("head dim", "q: dimension 2 | is 8 | the plan", q=of("half", 5, HQ, 8)),
    ran("flat q", "q: shape | 2 dimensions", q=of("half", 5, HQ * D)),
    ran("dtype", "q: dtype is bfloat16, but the plan says float16 | q_data_type",
        q=of("bfloat16", 5, HQ, D)),
    ran("strided q", "q: the last dimension has stride 2", q=of("half", 5, HQ, 2 * D)[..., ::2]),
    ran("q a list", "q: got list, which is not an array", q=[0.0]),
    ran("cache heads", "paged_kv_cache: dimension 2 | is 4; wanted 2",
        paged_kv_cache=of("half", 8, 2, PAGE, 4, D)),
    ran("page size", "paged_kv_cache: dimension 1 | is 5; wanted 4, the page_size of the plan",
        paged_kv_cache=of("half", 8, 2, 5, HKV, D)),
    ran("cache dtype", "paged_kv_cache: dtype is float32 | kv_data_type",
        paged_kv_cache=of("float", *POOL)),
    ran("pages", "paged_kv_cache: holds 2 pages, but kv_indices | page",
        paged_kv_cache=of("half", 2, *POOL[1:])),
    ran("one of two", "paged_kv_cache: shape is | [num_pages, 2,",
        paged_kv_cache=of("half", 8, 1, PAGE, HKV, D)),
    ran("three", "paged_kv_cache: got 3 arrays; wanted one, or a pair",
        paged_kv_cache=(of("half", 1),) * 3),
    ran("fewer V", "paged_kv_cache[1]: dimension 0 | is 7; wanted 8",
        paged_kv_cache=(of("half", 8, PAGE, HKV, D), of("half", 7, PAGE, HKV, D))),
    ran("strided cache", "paged_kv_cache: the last dimension has stride 2",
        paged_kv_cache=of("half", 8, 2, PAGE, HKV, 2 * D)[..., ::2]),
    ran("no axis", "paged_kv_cache: | wanted 4", paged_kv_cache=of("half", 8, 2, HKV, D)),
    ran("out rows", "out: shape is [4, 4, 16]; wanted [5, 4, 16]", out=of("half", 4, HQ, D)),
    ran("out dtype", "out: dtype is float32; wanted float16", out=of("float", 5, HQ, D)),
    ran("out no writing", "out: a read-only array", out=read_only(of("half", 5, HQ, D))),
    ran("lse heads", "lse: shape is [5, 2]; wanted [5, 4]", lse=of("float", 5, 2)),
    ran("lse dtype", "lse: dtype is float16; wanted float32", lse=of("half", 5, 4)),
    ran("out is q", "out: overlaps q", out=lambda a: a["q"]),
    ran("out in the cache", "out: overlaps paged_kv_cache",
        out=lambda a: a["paged_kv_cache"].reshape(-1)[: 5 * HQ * D].reshape(5, HQ, D)),
    ran("lse in out", "out: overlaps lse",
        lse=lambda a: a["out"].reshape(-1)[:40].view(np.float32).reshape(5, 4)),
    ran("sinks of KV heads", "sinks: dimension 0 | the num_qo_heads", sinks=of("float", 2)),
    ran("half sinks", "sinks: dtype is float16", sinks=of("half", 4)),
    ran("k_scale of q heads", "k_scale: dimension 0 | the num_kv_heads", k_scale=of("float", 4)),
    ran("half v_scale", "v_scale: dtype is float16", v_scale=of("half", 2)),
    ran("infinite scale", "q_scale: got inf", q_scale=float("inf")),
    ran("scale a word", "k_scale: got 'big'", k_scale="big"),
    ran("window", "window_left: run() got 3 and the plan says -1", PlanError, window_left=3),
    ran("4-bit", "kv_cache_sf: 4-bit", UnsupportedError, kv_cache_sf=of("uint8", 4)),
    ran("skipping", "skip_softmax_threshold_scale_factor: got inf",
        skip_softmax_threshold_scale_factor=float("inf")),
    ran("skipping less than nothing", "skip_softmax_threshold_scale_factor: got -1; wanted",
        skip_softmax_threshold_scale_factor=-1.0),
    ragged_ran("fewer keys", "k: holds 12 rows; the plan has 13", k=of("half", 12, HKV, D),
               v=of("half", 12, HKV, D)),
    ragged_ran("fewer values", "v: dimension 0 | is 12; wanted 13", v=of("half", 12, HKV, D)),
    ragged_ran("heads first", "k: dimension 1 | num_kv_heads", k=of("half", HKV, 13, D)),
    ragged_ran("o_scale", "o_scale: not supported", UnsupportedError, o_scale=2.0),
    decode_ran("rows", "q: holds 5 rows; the plan has 3", q=of("half", 5, HQ, D)),
    decode_ran("a mask of another q", "mask: bool of shape [3, 2, 2]; wanted [3, 1, 1] or [3, 1]",
               mask=of("bool", 3, 2, 2)),
    decode_ran("a mask of fewer requests", "mask: bool of shape [2, 1, 1]; wanted [3, 1, 1]",
               mask=of("bool", 2, 1, 1)),
    decode_ran("fewer words", "mask: uint32 of shape [2]; wanted [3, 1], 1 bits a row",
               mask=of("uint32", 2)),
    decode_ran("no words", "mask: int64 of shape [3, 1, 0]", mask=of("int64", 3, 1, 0)),
    decode_ran("a flat mask of bools", "mask: bool of shape [3]; wanted", mask=of("bool", 3)),
    decode_ran("a mask of numbers", "mask: dtype is float16; wanted bool or uint8 or uint16",
               mask=of("half", 3)),
    decode_ran("a strided mask", "mask: shape [3] has strides [2], in elements; wanted rows one",
               mask=of("int32", 6)[::2]),
    decode_ran("a list for a mask", "mask: got list, which is not an array", mask=[1, 1, 1]),
    decode_ran("out is the mask", "out: overlaps mask",
               mask=lambda a: a["out"].reshape(-1)[:6].view(np.uint32)),
    decode_ran("q_len", "q_len_per_req: run() got 2 and the plan says 1, but q of shape [3, 4, 16] "
               "does not have 2 rows for each of the 3 requests", PlanError, q_len_per_req=2),
    decode_ran("half a row", "q_len_per_req: got 0.5", q_len_per_req=0.5),
]  # fmt: skip

ROWS = [*MAKE, *PLAN, *RUN]
CLASSES: dict[str, Any] = {
    "paged": cupyattn.BatchPrefillWithPagedKVCacheWrapper,
    "ragged": cupyattn.BatchPrefillWithRaggedKVCacheWrapper,
    "decode": cupyattn.BatchDecodeWithPagedKVCacheWrapper,
}


def good(wrapper: str, step: str) -> dict[str, Any]:
    """The arguments of a step that succeeds; `out` and `lse` hold a sentinel."""
    b = batches.make(QO_LEN if wrapper != "decode" else [1, 1, 1], KV_LEN, PAGE)
    if step == "make":
        return {"float_workspace_buffer": WORKSPACE}
    if step == "plan":
        sizes = {"num_qo_heads": HQ, "num_kv_heads": HKV}
        table = dict(zip(("indptr", "indices", "last_page_len"), b.table, strict=True))
        if wrapper == "decode":
            return table | sizes | {"head_dim": D, "page_size": PAGE}
        sizes |= {"qo_indptr": b.qo_indptr, "head_dim_qk": D}
        if wrapper == "ragged":
            return sizes | {"kv_indptr": b.kv_indptr}
        return sizes | {f"paged_kv_{n}": x for n, x in table.items()} | {"page_size": PAGE}
    outputs = {"out": b.q * 0 + 7, "lse": np.full(b.q.shape[:2], 7, np.float32)}
    if wrapper == "ragged":
        return {"q": b.q, **dict(zip("kv", b.ragged(), strict=True)), **outputs}
    return {"q": b.q, "paged_kv_cache": b.one_tensor(), **outputs}


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    call = step_before(row, CLASSES[row.call], good)
    refuse(row, call, good(row.call, row.step))
    call(**good(row.call, row.step))


def test_the_table_is_large_and_its_good_calls_are_good() -> None:
    assert len(ROWS) >= 100
    check_good_steps(CLASSES, good)


def test_bad_positional_calls() -> None:
    w = CLASSES["paged"](**good("paged", "make"))
    arguments = good("paged", "plan")
    w.plan(**arguments)
    q, cache = (good("paged", "run")[n] for n in ("q", "paged_kv_cache"))
    with pytest.raises(TypeError, match="multiple values for 'k_scale'"):
        w.run(q, cache, 0.5, k_scale=0.5)
    with pytest.raises(TypeError, match="at most 3 positional"):
        w.run(q, cache, 0.5, 0.5, True, 1)
    with pytest.raises(TypeError, match="both 'head_dim' and 'head_dim_qk'"):
        w.plan(**arguments, head_dim=D)

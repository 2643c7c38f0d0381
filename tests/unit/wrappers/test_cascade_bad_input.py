"""Bad input of cascades and of BatchAttention: typed errors that say what is wrong, and no writes.

Each row changes arguments of a good call of one of three steps: making the wrapper, plan(), run().
What only a GPU can have is in test_cascade_graph.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import batches, cascade_calls
from helpers.bad_input import (
    Row,
    by_row,
    check_good_steps,
    ints,
    of,
    read_only,
    refuse,
    rows_of,
    step_before,
)
from helpers.batches import HKV, HQ, WORKSPACE, D

import cupyattn
from cupyattn.errors import UnsupportedError, WorkspaceError

PAGE = 4


made, planned, ran = (rows_of("cascade", step) for step in ("make", "plan", "run"))
mixed_made, mixed_planned, mixed_ran = (rows_of("mixed", step) for step in ("make", "plan", "run"))


def level(name: str, index: int, x: Any) -> dict[str, Any]:
    """A change of one level's array."""

    def change(arguments: dict[str, Any]) -> list[Any]:
        changed = list(arguments[name])
        changed[index] = x
        return changed

    return {name: change}


QO, KV = "qo_indptr_arr", "paged_kv_indptr_arr"
IDS, LAST = "paged_kv_indices_arr", "paged_kv_last_page_len"
BUFFERS = {
    f"{name}_buf_arr": [of("int32", n) for n in (a, b)]
    for name, a, b in (
        ("qo_indptr", 2, 4),
        ("paged_kv_indptr", 2, 4),
        ("paged_kv_indices", 9, 9),
        ("paged_kv_last_page_len", 1, 3),
    )
}

MAKE = [
    made("no levels", "num_levels: got 0 | 1 or more", num_levels=0),
    made("half a level", "num_levels: got 1.5", num_levels=1.5),
    made("many levels", "num_levels: got 33; at most 32", UnsupportedError, num_levels=33),
    made("layout", "kv_layout: got 'HDN'", kv_layout="HDN"),
    made("no device", "float_workspace_buffer: got 'gpu'", float_workspace_buffer="gpu"),
    made("strided", "not contiguous", WorkspaceError, float_workspace_buffer=of("uint8", 64)[::2]),
    made("no writing", "cannot be written", WorkspaceError,
         float_workspace_buffer=read_only(of("uint8", 64))),
    made("graph flag", "use_cuda_graph: got 2", use_cuda_graph=2),
    made("no buffers", "qo_indptr_buf_arr: use_cuda_graph=True needs a list of 2 | got None",
         use_cuda_graph=True),
    made("one buffer", "paged_kv_indices_buf_arr: | list of 2 | got 1", use_cuda_graph=True,
         **BUFFERS | {"paged_kv_indices_buf_arr": [of("int32", 9)]}),
    made("a missing buffer", "paged_kv_indptr_buf: use_cuda_graph=True needs this buffer",
         use_cuda_graph=True, **BUFFERS | {"paged_kv_indptr_buf_arr": [None, of("int32", 4)]}),
    made("wide buffers", "qo_indptr_buf: dtype is int64", use_cuda_graph=True,
         **BUFFERS | {"qo_indptr_buf_arr": [of("int64", 2), of("int64", 4)]}),
    made("buffers of two sizes", "different numbers of requests", use_cuda_graph=True,
         **BUFFERS | {"qo_indptr_buf_arr": [of("int32", 2), of("int32", 5)]}),
    mixed_made("layout", "kv_layout: got 'HDN'", kv_layout="HDN"),
    mixed_made("device", "device: got 'gpu' | 'cuda:<index>' or 'cpu'", device="gpu"),
    mixed_made("index", "device: got 'cuda:x'", device="cuda:x"),
    mixed_made("no device", "device: got None", device=None),
]  # fmt: skip

PLAN = [
    planned("not a list", f"{QO}: got ndarray; wanted a list of 2", **{QO: ints(0, 5)}),
    planned("one level", f"{KV}: got 1; wanted a list of 2", **{KV: [ints(0, 2)]}),
    planned("three levels", f"{LAST}: got 3; wanted a list of 2", **{LAST: [ints(1)] * 3}),
    planned("falling rows", f"{QO}[1]: falls from 3 to 2 after request 1",
            **level(QO, 1, ints(0, 3, 2, 5))),
    planned("rows from 1 on", f"{QO}[0]: the first offset is 1", **level(QO, 0, ints(1, 5))),
    planned("float rows", f"{QO}[0]: got float32", **level(QO, 0, of("float", 2))),
    planned("other rows", f"{QO}[1]: ends at row 6 of q, and that of level 0 at 5",
            **level(QO, 1, ints(0, 3, 3, 6))),
    planned("fewer requests", f"{KV}[1]: holds 3 offsets; wanted 4",
            **level(KV, 1, ints(0, 1, 2))),
    planned("falling pages", f"{KV}[1]: falls from 4 to 3", **level(KV, 1, ints(0, 4, 3, 3))),
    planned("negative id", f"{IDS}[0]: entry 1 is page -1",
            **level(IDS, 0, ints(0, -1, 2))),
    planned("huge id", f"{IDS}[1]: entry 0 is page {2**31}",
            **level(IDS, 1, ints(2**31, *range(9), dtype="int64"))),
    planned("fewer ids", f"{IDS}[0]: shape is [1]", **level(IDS, 0, ints(0))),
    planned("float ids", f"{IDS}[0]: dtype is float16", **level(IDS, 0, of("half", 9))),
    planned("last page too long", f"{LAST}[0]: request 0 has 5 tokens",
            **level(LAST, 0, ints(5))),
    planned("fewer last pages", f"{LAST}[1]: shape is [2]; wanted [3]",
            **level(LAST, 1, ints(1, 1))),
    planned("heads", "num_qo_heads, num_kv_heads: 5 query heads over 2", num_qo_heads=5),
    planned("no head dim", "head_dim_qk: got 0", head_dim=0),
    planned("pages of nothing", "page_size: got 0", page_size=0),
    planned("q's dtype", "q: dtype uint8", q_data_type="uint8"),
    planned("other keys", "k, v: dtype bfloat16 with q of dtype float16", kv_data_type="bfloat16"),
    planned("encoding", "pos_encoding_mode: got 'ROPE'", pos_encoding_mode="ROPE"),
    planned("window", "window_left: got -2", window_left=-2),
    planned("soft cap", "logits_soft_cap: got -1.0", logits_soft_cap=-1.0),
    planned("scale", "sm_scale: got nan", sm_scale=float("nan")),
    planned("causal", "causal: got 'yes'", causal="yes"),
    planned("rows beyond their keys", f"{QO}[1]: request 2 has 2 rows and 0 keys", UnsupportedError,
            causal=True, window_left=3, **level(KV, 1, ints(0, 3, 4, 4))),
    planned("levels that do not refine", f"{QO}[1]: rows of one request have different numbers",
            window_left=3, **{QO: [ints(0, 1, 5), ints(0, 3, 3, 5)], KV: [ints(0, 1, 1),
            ints(0, 3, 4, 6)], LAST: [ints(1, 1), ints(1, 4, 4)]}),
    planned("more keys than 32 bits", "requests of two levels have", UnsupportedError,
            causal=True, page_size=2**29, **{LAST: [ints(2**29), ints(1, 1, 1)],
            KV: [ints(0, 3), ints(0, 2, 3, 5)]}),
    mixed_planned("falling rows", "qo_indptr: falls from 3 to 2", qo_indptr=ints(0, 3, 2, 5)),
    mixed_planned("fewer requests", "kv_indptr: holds 3 offsets; wanted 4",
                  kv_indptr=ints(0, 1, 2)),
    mixed_planned("fewer lengths", "kv_len_arr: shape is [2]; wanted [3]", kv_len_arr=ints(1, 1)),
    mixed_planned("more keys than pages", "kv_len_arr: request 0 has 13 keys in 3 pages of 4",
                  kv_len_arr=ints(13, 4, 8)),
    mixed_planned("negative length", "kv_len_arr: request 1 has -1 keys",
                  kv_len_arr=ints(9, -1, 8)),
    mixed_planned("negative id", "kv_indices: entry 0 is page -4",
                  kv_indices=ints(-4, 1, 2, 3, 4, 5)),
    mixed_planned("fewer ids", "kv_indices: shape is [2]", kv_indices=ints(0, 1)),
    mixed_planned("a list", "kv_len_arr: got list, which is not an array", kv_len_arr=[9, 4, 8]),
    mixed_planned("heads", "num_qo_heads, num_kv_heads: 5 query heads", num_qo_heads=5),
    mixed_planned("no head dim", "head_dim_vo: got 0", head_dim_vo=0),
    mixed_planned("pages of nothing", "page_size: got 0", page_size=0),
    mixed_planned("profiler", "use_profiler", UnsupportedError, use_profiler=True),
    mixed_planned("soft cap", "logits_soft_cap: got inf", logits_soft_cap=float("inf")),
    mixed_planned("dtype", "q_data_type: unknown dtype 'float15'", q_data_type="float15"),
]  # fmt: skip

POOL = (8, 2, PAGE, HKV, D)
RUN = [
    ran("rows", "q: holds 4 rows; the plan has 5", q=of("half", 4, HQ, D)),
    ran("heads", "q: dimension 1 | is 8; wanted 4", q=of("half", 5, 8, D)),
    ran("dtype", "q: dtype is bfloat16, but the plan says float16", q=of("bfloat16", 5, HQ, D)),
    ran("page size", "paged_kv_cache: dimension 1 | is 5; wanted 4",
        paged_kv_cache=of("half", 8, 2, 5, HKV, D)),
    ran("pages", "paged_kv_cache: holds 2 pages, but kv_indices | page",
        paged_kv_cache=of("half", 2, *POOL[1:])),
    ran("three", "paged_kv_cache: got 3 arrays", paged_kv_cache=(of("half", 1),) * 3),
    ran("out rows", "out: shape is [4, 4, 16]; wanted [5, 4, 16]", out=of("half", 4, HQ, D)),
    ran("out no writing", "out: a read-only array", out=read_only(of("half", 5, HQ, D))),
    ran("lse dtype", "lse: dtype is float16", lse=of("half", 5, 4)),
    ran("out is q", "out: overlaps q", out=lambda a: a["q"]),
    ran("sinks of KV heads", "sinks: dimension 0 | the num_qo_heads", sinks=of("float", 2)),
    ran("half v_scale", "v_scale: dtype is float16", v_scale=of("half", 2)),
    ran("infinite scale", "k_scale: got inf", k_scale=float("inf")),
    mixed_ran("rows", "q: holds 4 rows; the plan has 5", q=of("half", 4, HQ, D)),
    mixed_ran("a flat cache", "paged_kv_cache: shape is", kv_cache=of("half", 8, HKV, D)),
    mixed_ran("pages", "paged_kv_cache: holds 2 pages", kv_cache=of("half", 2, *POOL[1:])),
    mixed_ran("a cap that was not planned", "logits_soft_cap: run() got 5.0 and the plan has none",
              logits_soft_cap=5.0),
    mixed_ran("4-bit", "kv_cache_sf", UnsupportedError, kv_cache_sf=of("uint8", 4)),
    mixed_ran("profiler", "profiler_buffer", UnsupportedError, profiler_buffer=of("uint8", 4)),
    mixed_ran("out dtype", "out: dtype is float32", out=of("float", 5, HQ, D)),
    mixed_ran("lse in out", "out: overlaps lse",
              lse=lambda a: a["out"].reshape(-1)[:40].view(np.float32).reshape(5, 4)),
    mixed_ran("sinks", "sinks: dimension 0", sinks=of("float", 2)),
]  # fmt: skip

ROWS = [*MAKE, *PLAN, *RUN]
CLASSES: dict[str, Any] = {
    "cascade": cupyattn.MultiLevelCascadeAttentionWrapper,
    "mixed": cupyattn.BatchAttention,
}


def good(wrapper: str, step: str) -> dict[str, Any]:
    """The arguments of a step that succeeds; `out` and `lse` hold a sentinel."""
    b = batches.make([3, 0, 2], [9, 4, 8], PAGE)
    if step == "make":
        if wrapper == "mixed":
            return {"kv_layout": "NHD", "device": "cpu"}
        return {"num_levels": 2, "float_workspace_buffer": WORKSPACE}
    if step == "run":
        outputs = {"out": b.q * 0 + 7, "lse": np.full(b.q.shape[:2], 7, np.float32)}
        name = "kv_cache" if wrapper == "mixed" else "paged_kv_cache"
        return {"q": b.q, name: b.one_tensor(), **outputs}
    sizes = {"num_qo_heads": HQ, "num_kv_heads": HKV, "page_size": PAGE}
    ids = b.indices[: b.indptr[-1]]
    if wrapper == "mixed":
        tables = {"qo_indptr": b.qo_indptr, "kv_indptr": b.indptr, "kv_indices": ids}
        types = {"q_data_type": "float16", "kv_data_type": "float16"}
        more = {"kv_len_arr": ints(*b.kv_len), "head_dim_qk": D, "head_dim_vo": D}
        return {**tables, **more, **sizes, **types}
    # All share the first three pages, too.
    first = {QO: ints(0, 5), KV: ints(0, 3), IDS: ids[:3], LAST: ints(1)}
    second = {QO: b.qo_indptr, KV: b.indptr, IDS: ids, LAST: b.last_page_len}
    levels = {name: [x, second[name]] for name, x in first.items()}
    return {**levels, **sizes, "head_dim": D}


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    call = step_before(row, CLASSES[row.call], good)
    refuse(row, call, good(row.call, row.step))
    call(**good(row.call, row.step))


def test_good_calls_are_good() -> None:
    check_good_steps(CLASSES, good)


def test_a_cap_at_the_run_replaces_the_plans() -> None:
    w = cupyattn.BatchAttention(device="cpu")
    w.plan(**good("mixed", "plan"), logits_soft_cap=9.0)
    arguments = good("mixed", "run")
    out, _ = w.run(**arguments, logits_soft_cap=2.0)
    b = batches.make([3, 0, 2], [9, 4, 8], PAGE)
    np.testing.assert_array_equal(out, b.expected(logits_soft_cap=2.0)[0].astype(np.float16))


def test_the_old_names_of_a_cascade() -> None:
    call = cascade_calls.Call(cascade_calls.random_case(4), np)
    w = cupyattn.MultiLevelCascadeAttentionWrapper(
        len(call.case.levels), workspace_buffer=WORKSPACE, kv_layout=call.case.kv_layout
    )
    arguments, options = call.plan_arguments()
    w.begin_forward(*arguments, **options, allow_fp16_qk_reduction=True)
    call.check(*w.run_return_lse(call.device_q, call.cache, **call.given))
    out = w.forward(call.device_q, call.cache, **call.given)
    assert out.shape == call.q.shape
    w.end_forward()
    w.reset_workspace_buffer(of("uint8", 32), [of("uint8", 8)] * 2)

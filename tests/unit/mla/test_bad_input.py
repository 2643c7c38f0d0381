"""Bad input of latent attention: a typed error, and nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.bad_input import Row, by_row, ints, misaligned, of, read_only, refuse, rows_of
from helpers.batches import WORKSPACE

from cupyattn import mla
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError, WorkspaceError

B, H, PAGES, PAGE, WIDTH = 3, 4, 8, 4, 5
SCALE = 0.07
make, plan, run = (rows_of("wrapper", step) for step in ("make", "plan", "run"))
trtllm, xqa_batch, xqa, append = map(rows_of, ("trtllm", "xqa batch", "xqa", "append"))
Q, POOL = of("float32", B, H, 576), of("float32", PAGES, PAGE, 576)
TABLE = np.arange(B * WIDTH, dtype=np.int32).reshape(B, WIDTH) % PAGES


def good(call: str, step: str = "") -> dict[str, Any]:
    if step == "make":
        return {"float_workspace_buffer": WORKSPACE}
    if step == "plan":
        return {
            "qo_indptr": ints(0, 1, 2, 3),
            "kv_indptr": ints(0, 3, 3, 8),
            "kv_indices": ints(*range(8)),
            "kv_len_arr": ints(9, 0, 20),
            "num_heads": H,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": PAGE,
            "causal": True,
            "sm_scale": SCALE,
            "q_data_type": "float32",
            "kv_data_type": "float32",
        }
    if step == "run":
        return {
            "q_nope": of("float32", B, H, 512),
            "q_pe": of("float32", B, H, 64),
            "ckv_cache": of("float32", PAGES, PAGE, 512),
            "kpe_cache": of("float32", PAGES, PAGE, 64),
            "out": of("float32", B, H, 512),
            "lse": of("float32", B, H),
        }
    tables = {"seq_lens": ints(9, 0, 20), "workspace_buffer": WORKSPACE}
    of_calls = {
        "query": Q[:, None],
        "kv_cache": POOL,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": TABLE,
        "max_seq_len": 20,
        "bmm1_scale": SCALE,
        **tables,
    }
    if call == "xqa batch":
        return {**of_calls, "out": of("float32", B, 1, H, 512)}
    if call == "trtllm":
        return {**of_calls, "out": of("float32", B, 1, H, 512), "lse": of("float32", B, 1, H)}
    if call == "xqa":
        cache = POOL[:, :, None]
        arrays = {"q": Q[:, None], "k_cache": cache, "v_cache": cache, "page_table": TABLE}
        return {**arrays, **tables, "output": of("float32", B, 1, H, 512), "page_size": PAGE}
    return {
        "append_ckv": of("float32", 2, 512),
        "append_kpe": of("float32", 2, 64),
        "batch_indices": ints(0, 2),
        "positions": ints(8, 19),
        "ckv_cache": of("float32", PAGES, PAGE, 512),
        "kpe_cache": of("float32", PAGES, PAGE, 64),
        "kv_indices": ints(*range(8)),
        "kv_indptr": ints(0, 3, 3, 8),
        "kv_last_page_len": ints(1, 0, 4),
    }


FP8 = of("float8_e4m3fn", PAGES, PAGE, 512)
NONE = {"q_nope": None, "q_pe": None}
ROWS = [
    make("workspace of 4 bytes off", "16-byte", WorkspaceError,
         float_workspace_buffer=misaligned(64)),
    make("graph without buffers", "qo_indptr: use_cuda_graph", use_cuda_graph=True),
    make("layout", "kv_layout", kv_layout="NDH"),
    make("backend", "backend", backend="best"),
    plan("no scale", "sm_scale: got None", sm_scale=None),
    plan("nan scale", "sm_scale", sm_scale=float("nan")),
    plan("heads", "num_heads", num_heads=0),
    plan("no heads", "num_heads", num_heads=None),
    plan("odd latent", "head_dim_ckv, head_dim_kpe: 128 and 64", UnsupportedError,
         head_dim_ckv=128),
    plan("odd rope", "512 and 32", UnsupportedError, head_dim_kpe=32),
    plan("negative rope", "head_dim_kpe", head_dim_kpe=-64),
    plan("page size", "page_size", page_size=0),
    plan("falling rows", "qo_indptr: falls", qo_indptr=ints(0, 2, 1, 3)),
    plan("rows from 1", "qo_indptr: the first offset is 1", qo_indptr=ints(1, 1, 2, 3)),
    plan("falling pages", "kv_indptr: falls", kv_indptr=ints(0, 3, 2, 8)),
    plan("offsets of other requests", "kv_indptr: holds 3", kv_indptr=ints(0, 3, 8)),
    plan("too many keys", "kv_len_arr: request 0 has 13 keys in 3 pages",
         kv_len_arr=ints(13, 0, 20)),
    plan("negative length", "kv_len_arr: request 1", kv_len_arr=ints(9, -1, 20)),
    plan("lengths of other requests", "kv_len_arr: shape", kv_len_arr=ints(9, 0)),
    plan("few ids", "kv_indices: shape is [5]", kv_indices=ints(*range(5))),
    plan("negative id", "kv_indices: entry 1 is page -1", kv_indices=ints(0, -1, *range(6))),
    plan("no lengths", "kv_len_arr: got None", kv_len_arr=None),
    plan("dtype", "q_data_type", q_data_type="float12"),
    plan("fp8 q", "q: dtype float8_e4m3fn", UnsupportedError, q_data_type="float8_e4m3fn"),
    plan("mixed", "k, v: dtype float16 with q", kv_data_type="float16"),
    plan("profiler", "use_profiler", UnsupportedError, use_profiler=True),
    plan("output scale", "output_scale", output_scale="per-tensor"),
    plan("scale mode", "scale_mode", scale_mode="bmm-tensor"),
    plan("lse mode", "lse_mode", lse_mode="base10"),
    plan("layout of q", "query_layout", query_layout="flat"),
    plan("metadata", "metadata: got", metadata=3),
    plan("table and no lengths", "cum_seq_lens_q: got None", block_tables=TABLE),
    plan("table too short", "do not fit the 5 pages", block_tables=TABLE,
         cum_seq_lens_q=ints(0, 1, 2, 3), seq_lens=ints(9, 0, 21)),
    run("rows", "q_nope: shape is [2, 4, 512]", q_nope=of("float32", 2, H, 512),
        q_pe=of("float32", 2, H, 64)),
    run("heads", "q_nope: shape is [3, 5, 512]", q_nope=of("float32", B, 5, 512),
        q_pe=of("float32", B, 5, 64)),
    run("rope of other rows", "q_pe: shape is [3, 5, 64]", q_pe=of("float32", B, 5, 64)),
    run("packed q of latent columns", "rows have 512 columns; wanted 576", q_pe=None),
    run("no q", "q_nope: got None", **NONE),
    run("q twice", "query: given beside q_nope", query=Q),
    run("three parts", "query: got 3 arrays", **NONE, query=(Q, Q, Q)),
    run("q dtype", "q_nope: dtype is float16, but the plan says float32",
        q_nope=of("float16", B, H, 512), q_pe=of("float16", B, H, 64)),
    run("q_nope's dtype", "q_nope: dtype is float16, but the plan says float32; cast it, or plan "
        "with q_data_type=q_nope.dtype", q_nope=of("float16", B, H, 512)),
    run("q_pe's dtype", "q_pe: dtype is float16, but the plan says float32; cast it, or plan "
        "with q_data_type=q_pe.dtype", q_pe=of("float16", B, H, 64)),
    run("kpe_cache's dtype", "kv_data_type=kpe_cache.dtype",
        kpe_cache=of("float16", PAGES, PAGE, 64)),
    run("cache dtype", "ckv_cache: dtype is", ckv_cache=FP8,
        kpe_cache=of("float8_e4m3fn", PAGES, PAGE, 64)),
    run("page size", "ckv_cache: pages hold 5 tokens", ckv_cache=of("float32", 8, 5, 512),
        kpe_cache=of("float32", 8, 5, 64)),
    run("few pages", "kv_indices of the plan name page 7", ckv_cache=of("float32", 7, PAGE, 512),
        kpe_cache=of("float32", 7, PAGE, 64)),
    run("two heads", "ckv_cache: shape is", ckv_cache=of("float32", PAGES, PAGE, 2, 512),
        kpe_cache=of("float32", PAGES, PAGE, 2, 64)),
    run("strided columns", "q_nope", q_nope=of("float32", B, H, 1024)[..., ::2]),
    run("out shape", "out: shape is", out=of("float32", B, H, 576)),
    run("out dtype", "out: dtype is float16 | wanted float32 | plan with output_dtype=out.dtype",
        out=of("float16", B, H, 512)),
    run("out read-only", "out: a read-only array", out=read_only(of("float32", B, H, 512))),
    run("out is q", "out: overlaps q_nope", out=lambda given: given["q_nope"]),
    run("lse shape", "lse: shape is", lse=of("float32", H, B)),
    run("sinks", "sinks", sinks=of("float32", H + 1)),
    run("scale of 16 bits", "only one of fp8 has", ckv_scale=0.5),
    run("scale of no fp8", "out must be an FP8 tensor", o_scale=0.5),
    run("scale without out", "out tensor must be provided", o_scale=0.5, out=None),
    run("scale of 0", "o_scale must be a finite positive value", o_scale=0.0),
    run("lengths", "page_table, kv_len: got one", kv_len=ints(1, 2, 3)),
    run("flag", "return_lse_base_on_e", return_lse_base_on_e=2),
    run("bmm1", "bmm1_scale", bmm1_scale=float("inf")),
    trtllm("q of 3 axes", "query: shape is [3, 4, 576]", query=Q),
    trtllm("q columns", "rows have 500 columns", query=of("float32", B, 1, H, 500)),
    trtllm("requests", "query: holds 2 rows; wanted 3", query=Q[:2, None],
           out=None, lse=None),
    trtllm("rank", "512 and 32", UnsupportedError, qk_rope_head_dim=32,
           query=of("float32", B, 1, H, 544), kv_cache=of("float32", PAGES, PAGE, 544)),
    trtllm("scale", "bmm1_scale", bmm1_scale=of("float16", 1)),
    trtllm("table", "block_tables", block_tables=TABLE.astype(np.int16)),
    trtllm("page that is not there", "request 0 has page 9", block_tables=TABLE + 9),
    trtllm("length", "seq_lens: request 2 has 21", seq_lens=ints(9, 0, 21)),
    trtllm("no lengths", "seq_lens: got None", seq_lens=None),
    trtllm("lengths of floats", "seq_lens", seq_lens=of("float32", B)),
    trtllm("flag", "enable_dcp: got 2", enable_dcp=2),
    trtllm("world alone", "cp_world: given without enable_dcp=True", cp_world=2),
    trtllm("whole lengths alone", "causal_seqlens_kv_global: given without enable_dcp",
           causal_seqlens_kv_global=ints(9, 0, 20)),
    trtllm("no such rank", "cp_rank: got 2 with cp_world=2", enable_dcp=True, cp_world=2,
           cp_rank=2),
    trtllm("no ranks", "cp_world: got 0", enable_dcp=True, cp_world=0),
    trtllm("no run", "cp_kv_cache_interleave_size: got 0", enable_dcp=True, cp_world=2,
           cp_kv_cache_interleave_size=0),
    trtllm("base", "return_lse_base: got 'e'", return_lse_base="e"),
    trtllm("one table of two", "block_tables: shape is [3, 5]; with uses_shared",
           uses_shared_paged_kv_idx=False),
    trtllm("tables apart", "K and V have different pages", UnsupportedError,
           block_tables=np.stack([TABLE, TABLE[::-1]], 1), uses_shared_paged_kv_idx=False),
    trtllm("list of another length", "sparse_mla_top_k slots", sparse_mla_top_k=7),
    trtllm("workspace", "workspace_buffer", WorkspaceError, workspace_buffer=misaligned(64)),
    trtllm("falling offsets", "cum_seq_lens_q", query=Q, cum_seq_lens_q=ints(0, 2, 1, 3),
           out=None, lse=None),
    xqa_batch("two rows", "query: shape is", query=of("float32", B, 2, H, 576)),
    xqa_batch("five axes", "query: shape is", query=Q[:, None, None], out=None),
    xqa_batch("out", "out: shape is", out=of("float32", B, 1, H, 500)),
    xqa("value elsewhere", "v_cache: is not at", v_cache=POOL[:, :, None].copy()),
    xqa("page size", "page_size: got 8", page_size=8),
    xqa("output", "output: shape is", output=of("float32", B, 1, H, 500)),
    append("rows", "append_ckv, append_kpe: shapes", append_ckv=of("float32", 2, 1, 512)),
    append("cache", "ckv_cache: shape is", ckv_cache=of("float32", PAGES, 512)),
    append("columns", "ckv_cache: rows have 512 columns; wanted 576", kpe_cache=None),
    append("no slot", "positions", positions=ints(8, 20)),
    append("scale of 32 bits", "ckv_scale", ckv_scale=0.5),
    append("other scale of 32 bits", "kpe_scale", kpe_scale=0.5),
    append("read-only", "ckv_cache: a read-only",
           ckv_cache=read_only(of("float32", PAGES, PAGE, 512))),
    append("read-only rope", "kpe_cache: a read-only",
           kpe_cache=read_only(of("float32", PAGES, PAGE, 64))),
    append("read-only rows of both", "ckv_cache: a read-only",
           ckv_cache=read_only(of("float32", PAGES, PAGE, 576)), kpe_cache=None),
    append("pages apart", "kpe_cache: ", kpe_cache=of("float32", PAGES - 1, PAGE, 64)),
    append("dtypes apart", "append_kpe: ", append_kpe=of("float16", 2, 64)),
]  # fmt: skip


NAMES = {
    "trtllm": "trtllm_batch_decode_with_kv_cache_mla",
    "xqa batch": "xqa_batch_decode_with_kv_cache_mla",
    "xqa": "xqa_mla",
    "append": "append_paged_mla_kv_cache",
}


def call(row: Row, **arguments: Any) -> Any:
    if row.call != "wrapper":
        name = NAMES[row.call]
        return getattr(mla, name)(**arguments)
    if row.step == "make":
        return mla.BatchMLAPagedAttentionWrapper(**arguments)
    wrapper = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    if row.step == "plan":
        return wrapper.plan(**arguments)
    wrapper.plan(**good("wrapper", "plan"))
    return wrapper.run(**arguments)


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    refuse(row, lambda **arguments: call(row, **arguments), good(row.call, row.step))


def test_what_is_good_is_accepted() -> None:
    assert len(ROWS) >= 40
    for row in {(row.call, row.step): row for row in ROWS}.values():
        call(row, **good(row.call, row.step))


def test_a_run_needs_a_plan() -> None:
    wrapper = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    with pytest.raises(PlanError, match="before plan"):
        wrapper.run(**good("wrapper", "run"))
    with pytest.raises(ArgumentError, match="wanted both, or none"):
        wrapper.forward(Q, POOL, TABLE)

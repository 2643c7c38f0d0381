"""Entries of latent attention, and of what appends to a latent cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import cupyattn

from . import plain_answers as plain
from .batches import SMALL_WORKSPACE as WORKSPACE
from .plain_answers import Logits, attend, by_offsets
from .wrong_calls import Arguments, Entry, function, step, wrapper
from .wrong_entries import (
    HQ,
    IDS,
    INDPTR,
    LAST,
    OF_HEADS,
    PAGE,
    ROWS,
    answers,
    ints,
    values,
)
from .wrong_rules import HALF, one, or_default, workspace
from .wrong_tables import LENS, TABLE
from .wrong_values import above, dtype, flag, ignored, nothing, number, one_of, whole

RANK, ROPE = 512, 64
POOL = values(8, PAGE, RANK + ROPE)


_ROOM = {"float_workspace_buffer": or_default(workspace)}


def _pages(cache: np.ndarray) -> np.ndarray:
    """[pages, page_size, columns]."""
    if cache.ndim == 2:
        return cache[:, None]
    if cache.ndim == 4:
        return cache[:, :, 0] if cache.shape[2] == 1 else cache[:, 0]
    return cache


def _parts(c: Arguments, both: str, apart: tuple[str, str]) -> np.ndarray:
    """Rows of both parts."""
    if c[f"run.{both}"] is not None:
        assert all(c[f"run.{name}"] is None for name in apart)
        found = c[f"run.{both}"]
        if isinstance(found, (tuple, list)):
            assert len(found) == 2
            return np.concatenate(found, -1)
        return found
    if c[f"run.{apart[1]}"] is None:
        return c[f"run.{apart[0]}"]
    first, second = (c[f"run.{name}"] for name in apart)
    assert first.dtype == second.dtype
    return np.concatenate([first, second], -1)


def _attend(
    q: np.ndarray, pool: np.ndarray, tables: Any, lens: Any, rows: Any, how: Logits, **given: Any
) -> plain.Pair:
    pairs = []
    for ids, n in zip(tables, lens, strict=True):
        k = plain.gather(pool, ids[: -(-int(n) // pool.shape[1])], int(n))[:, None]
        pairs.append((k, k[..., :RANK]))
    assert q.shape[-1] == pool.shape[-1] == RANK + ROPE
    return attend(q, by_offsets(np.asarray(rows), pairs), how, **given)


def batch(c: Arguments) -> list[np.ndarray]:
    q = _parts(c, "query", ("q_nope", "q_pe"))
    pool = _pages(_parts(c, "kv_cache", ("ckv_cache", "kpe_cache")))
    indptr, lens, rows = c["plan.kv_indptr"], c["plan.kv_len_arr"], c["plan.qo_indptr"]
    of_q = HALF if c["plan.q_data_type"] is None else c["plan.q_data_type"]
    of_kv = of_q if c["plan.kv_data_type"] is None else c["plan.kv_data_type"]
    assert q.dtype == of_q and pool.dtype == of_kv and q.shape[1] == c["plan.num_heads"]
    assert pool.shape[1] == c["plan.page_size"] and len(q) == rows[-1] and rows[0] == 0
    # Entries of kv_indptr past the last request say nothing.
    tables = [c["plan.kv_indices"][a:b] for a, b in pairwise(indptr[: len(rows)])]
    assert (c["plan.head_dim_ckv"], c["plan.head_dim_kpe"]) == (RANK, ROPE)
    scale = c["plan.sm_scale"] if c["run.bmm1_scale"] is None else c["run.bmm1_scale"]
    how = Logits(scale, causal=bool(c["plan.causal"]), window_left=c["plan.window_left"])
    out, lse = _attend(
        q, pool, tables, lens, rows, how, sinks=c["run.sinks"],
        scales=(None, None, c["run.bmm2_scale"]),
    )  # fmt: skip
    is_natural = c["run.return_lse_base_on_e"] or c["plan.lse_mode"] == "basee"
    return answers((out, lse / (plain.LOG2_E if is_natural else 1.0)), c)


def _table(c: Arguments, q: np.ndarray, cache: np.ndarray, rows: Any, scales: Any) -> plain.Pair:
    tables, lens = c.get("run.block_tables", c.get("run.page_table")), c["run.seq_lens"]
    lens, causal = lens.reshape(-1), len(q) > len(tables)
    sm_scale, output = scales
    how = Logits(sm_scale, causal=causal, window_left=c.get("run.window_left", -1))
    assert len(tables) == len(lens) == len(rows) - 1 and rows[-1] <= len(q)
    return _attend(
        q, _pages(cache), tables, lens, rows, how, sinks=c.get("run.sinks"),
        scales=(None, None, output),
    )  # fmt: skip


def trtllm(c: Arguments) -> list[np.ndarray]:
    q, count = c["run.query"], len(c["run.block_tables"])
    if top_k := c["run.sparse_mla_top_k"]:
        return _list(c, top_k)
    rows = c["run.cum_seq_lens_q"]
    is_ragged = rows is not None
    flat = q if is_ragged else q.reshape(-1, *q.shape[2:])
    rows = rows if is_ragged else np.arange(count + 1) * q.shape[1]
    assert is_ragged or len(q) == count
    out, lse = _table(c, flat, c["run.kv_cache"], rows, (c["run.bmm1_scale"], c["run.bmm2_scale"]))
    shape = q.shape[:-1]
    return answers((out.reshape(*shape, RANK), lse.reshape(shape)), c)


def _list(c: Arguments, top_k: int) -> list[np.ndarray]:
    """Each token has a list of slots."""
    q, pool = c["run.query"], _pages(c["run.kv_cache"])
    assert c["run.window_left"] == -1
    lists = c["run.block_tables"].reshape(-1, top_k)
    flat, slots = q.reshape(-1, *q.shape[2:]), pool.reshape(-1, 1, pool.shape[-1])
    assert len(lists) == len(flat) and lists.max() < len(slots)
    pairs = [(slots[row[row >= 0]], slots[row[row >= 0]][..., :RANK]) for row in lists]
    rows, how = np.arange(len(flat) + 1), Logits(c["run.bmm1_scale"])
    scales = None, None, c["run.bmm2_scale"]
    found = attend(flat, by_offsets(rows, pairs), how, sinks=c["run.sinks"], scales=scales)
    shape = q.shape[:-1]
    return answers((found[0].reshape(*shape, RANK), found[1].reshape(shape)), c)


def xqa_batch(c: Arguments) -> list[np.ndarray]:
    q = c["run.query"]
    flat = q if q.ndim == 3 else q[:, 0]
    scales = c["run.bmm1_scale"], c["run.bmm2_scale"]
    out = _table(c, flat, c["run.kv_cache"], np.arange(len(q) + 1), scales)[0]
    mine = c.get("run.out")
    return [out.reshape((*q.shape[:-1], RANK) if mine is None else mine.shape)]


def xqa(c: Arguments) -> list[np.ndarray]:
    q = c["run.q"][:, 0]
    out = _table(c, q, c["run.k_cache"], np.arange(len(q) + 1), (c["run.q_scale"], 1.0))[0]
    return [out[:, None]]


def append(c: Arguments) -> list[np.ndarray]:
    ckv, kpe = (c[f"run.{n}_cache"].copy() for n in ("ckv", "kpe"))
    indptr = c["run.kv_indptr"]
    assert len(c["run.kv_last_page_len"]) == len(indptr) - 1
    rows = c["run.append_ckv"], c["run.append_kpe"]
    for i, (b, at) in enumerate(zip(c["run.batch_indices"], c["run.positions"], strict=True)):
        if b < 0:
            continue
        assert b < len(indptr) - 1 and at >= 0
        entry = int(indptr[b]) + int(at) // ckv.shape[1]
        assert entry < indptr[b + 1]
        page = int(c["run.kv_indices"][entry])
        for pages, new, name in zip((ckv, kpe), rows, ("ckv", "kpe"), strict=True):
            pages[page, at % ckv.shape[1]] = new[i] / (c[f"run.{name}_scale"] or 1.0)
    return [ckv, kpe]


def _caches(result: Any, arguments: Arguments) -> Any:
    return arguments["run.ckv_cache"], arguments["run.kpe_cache"]


def _older_wrapper() -> Entry:
    """FlashInfer's, for decode."""
    rules = dict.fromkeys(("q_scale", "k_scale", "v_scale"), one) | {"q_data_type": dtype}
    rules |= {"logits_soft_cap": or_default(number, 0.0)}
    rules |= dict.fromkeys(("rope_scale", "rope_theta"), ignored) | _ROOM
    cls: Any = cupyattn.BatchDecodeMlaWithPagedKVCacheWrapper
    base = step("make", float_workspace_buffer=WORKSPACE)
    base |= step("plan", indptr=INDPTR, indices=IDS, last_page_len=LAST, num_qo_heads=HQ)
    base |= step("plan", head_dim_compressed_kv=RANK, page_size=PAGE, sm_scale=0.07)
    base |= step("run", q_nope=values(3, HQ, RANK), q_pe=values(3, HQ, ROPE), return_lse=True)
    base |= step("run", paged_ckv_cache=POOL[..., :RANK].copy())
    base |= step("run", paged_kpe_cache=POOL[..., RANK:].copy())
    samples = {"out": values(3, HQ, RANK) * 0, "lse": np.zeros((3, HQ), np.float32)}
    return Entry("latent decode", wrapper(cls), base, samples, rules=rules)


def latent_entries() -> list[Entry]:
    rules = _ROOM | {"causal": or_default(flag, False), "bmm1_scale": number}
    rules |= {"plan.block_tables": nothing, "page_table": nothing, "q_data_type": dtype}
    rules |= {"output_scale": one_of("none"), "skip_softmax_threshold_scale_factor": ignored}
    q = values(5, HQ, RANK + ROPE)
    base = step("make", float_workspace_buffer=WORKSPACE)
    base |= step("plan", qo_indptr=ROWS, kv_indptr=INDPTR, kv_indices=IDS, kv_len_arr=LENS)
    base |= step("plan", num_heads=HQ, head_dim_ckv=RANK, head_dim_kpe=ROPE, page_size=PAGE)
    base |= step("plan", causal=True, sm_scale=0.07, q_data_type="float16")
    base |= step("run", query=q, kv_cache=POOL, return_lse=True)
    out, lse = values(5, HQ, RANK) * 0, np.zeros((5, HQ), np.float32)
    samples = {"sinks": OF_HEADS, "out": out, "lse": lse, "ckv_scale_arr": np.ones((8, PAGE))}
    cls: Any = cupyattn.BatchMLAPagedAttentionWrapper
    found = [Entry("latent batch", wrapper(cls), base, samples, batch, rules), _older_wrapper()]

    rules = {"skip_softmax_threshold_scale_factor": ignored, "q_scale": one}
    rules |= {"backend": one_of("auto", "trtllm-gen", "xqa", "cute-dsl")}
    rules |= {"max_q_len": or_default(whole(1))}
    q = values(3, 1, HQ, RANK + ROPE)
    table = {"workspace_buffer": WORKSPACE, "block_tables": TABLE, "seq_lens": LENS}
    base = step("run", query=q, kv_cache=POOL, **table, qk_nope_head_dim=128, kv_lora_rank=RANK)
    base |= step("run", qk_rope_head_dim=ROPE, max_seq_len=12, bmm1_scale=0.07)
    samples = {"sinks": OF_HEADS, "out": values(3, 1, HQ, RANK), "cum_seq_lens_q": ints(0, 1, 1, 3)}
    samples |= {"lse": np.zeros((3, 1, HQ), np.float32)}
    call: Any = cupyattn.trtllm_batch_decode_with_kv_cache_mla
    more = step("run", return_lse=True)
    found.append(Entry("latent trtllm", function(call), base | more, samples, trtllm, rules))
    call = cupyattn.xqa_batch_decode_with_kv_cache_mla
    samples = {"sinks": OF_HEADS, "out": values(3, 1, HQ, RANK)}
    found.append(Entry("latent xqa batch", function(call), base, samples, xqa_batch, rules))
    pages = POOL[:, :, None]
    base = step("run", q=q, k_cache=pages, page_table=TABLE, seq_lens=LENS)
    base |= step("run", workspace_buffer=WORKSPACE, q_scale=0.07, page_size=PAGE)
    call = _xqa_of_one_cache
    samples = {"output": values(3, 1, HQ, RANK)}
    entry = Entry("latent xqa", function(call), base, samples, xqa, rules)
    found.append(entry._replace(written=("output",), gather=_output))
    base = step("run", append_ckv=values(4, RANK), append_kpe=values(4, ROPE))
    base |= step("run", batch_indices=ints(0, 2, 2, -1), positions=ints(8, 3, 4, 0))
    base |= step("run", ckv_cache=POOL[..., :RANK].copy(), kpe_cache=POOL[..., RANK:].copy())
    base |= step("run", kv_indices=IDS, kv_indptr=INDPTR, kv_last_page_len=ints(1, 4, 1))
    positive = dict.fromkeys(("ckv_scale", "kpe_scale"), above(0.0))
    entry = Entry(
        "latent append", function(cupyattn.append_paged_mla_kv_cache), base, {}, append, positive
    )
    return [*found, entry._replace(written=("ckv_cache", "kpe_cache"), gather=_caches)]


def _output(result: Any, arguments: Arguments) -> Any:
    return arguments.get("run.output") if result is None else result


def _xqa_of_one_cache(
    q: Any, k_cache: Any, page_table: Any, seq_lens: Any, output: Any = None,
    workspace_buffer: Any = None, page_size: Any = None, q_scale: Any = 1.0, kv_scale: Any = 1.0,
) -> Any:  # fmt: skip
    return cupyattn.xqa_mla(
        q, k_cache, k_cache, page_table, seq_lens, output, workspace_buffer, None, page_size,
        q_scale, kv_scale,
    )  # fmt: skip

"""Entries of calls over page tables, of operations on pages, masks and states."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

import cupyattn

from . import plain_answers as plain
from .batches import SMALL_WORKSPACE as WORKSPACE
from .plain_answers import Logits, attend, by_offsets
from .wrong_calls import Arguments, Entry, function, step
from .wrong_entries import (
    HKV,
    HQ,
    IDS,
    INDPTR,
    LAST,
    OF_HEADS,
    PAGE,
    POOL,
    D,
    answers,
    bools,
    ints,
    product,
    values,
)
from .wrong_rules import float32s, floats, indices, one, or_default
from .wrong_values import above, array, ignored, one_of, whole

TABLE = np.array([[7, 0, 5], [3, 4, 4], [1, 2, 6]], np.int32)
LENS = ints(9, 4, 5)
LSE = np.zeros((3, HQ), np.float32)
SAMPLES = {"sinks": OF_HEADS, "out": values(3, HQ, D) * 0, "lse": LSE, "output": values(3, HQ, D)}


def over_table(
    q: np.ndarray, pages: plain.Pair, table: np.ndarray, lens: np.ndarray, rows: np.ndarray,
    how: Logits, scales: tuple[Any, Any, Any], sinks: Any = None, masks: Any = None,
) -> plain.Pair:  # fmt: skip
    """rows: where the rows of each request begin, and the last one's end."""
    size = pages[0].shape[1]
    lens, rows, pairs = lens.reshape(-1), rows.reshape(-1), []
    assert len(table) == len(lens) == len(rows) - 1
    assert (np.diff(rows) >= 0).all() and rows[0] >= 0 and rows[-1] <= len(q)
    for ids, length in zip(table, lens, strict=True):
        used = ids[: -(-int(length) // size)]
        assert 0 <= length <= table.shape[1] * size
        pairs.append(tuple(plain.gather(x, used, int(length)) for x in pages))
    return attend(q, by_offsets(rows, pairs, masks), how, sinks=sinks, scales=scales)


def halves(cache: Any, layout: str) -> plain.Pair:
    """A cache, also one whose keys are values too."""
    if not isinstance(cache, (tuple, list)) and cache.shape[1] == 1:
        cache = cache[:, 0], cache[:, 0]
    return plain.halves(cache, layout)


def _decode(c: Arguments, offsets: str) -> list[np.ndarray]:
    q, lens = c["run.query"], c["run.seq_lens"]
    count, rows = len(c["run.block_tables"]), c[f"run.{offsets}"]
    q_len = 0 if rows is not None else c["run.q_len_per_req"]
    if rows is None:
        rows = np.arange(count + 1) * q_len
        assert len(q) == rows[-1]
    log2_scale = c.get("run.bmm1_scale_log2")
    sm_scale = c["run.bmm1_scale"] if log2_scale is None else math.log(2.0) * log2_scale
    how = Logits(sm_scale, causal=q_len != 1, window_left=c["run.window_left"])
    masks = plain.row_masks(c["run.mask"], count, q_len, lens.reshape(-1).tolist())
    pages = halves(c["run.kv_cache"], c["run.kv_layout"])
    scales = None, None, c["run.bmm2_scale"]
    tables = c["run.block_tables"], lens, rows
    return answers(over_table(q, pages, *tables, how, scales, c["run.sinks"], masks), c)


def trtllm_decode(c: Arguments) -> list[np.ndarray]:
    return _decode(c, "cum_seq_lens_q")


def xqa_decode(c: Arguments) -> list[np.ndarray]:
    return _decode(c, "q_cu_seq_lens")


def trtllm_context(c: Arguments) -> list[np.ndarray]:
    how = Logits(c["run.bmm1_scale"], causal=c["run.causal"], window_left=c["run.window_left"])
    pages = halves(c["run.kv_cache"], c["run.kv_layout"])
    tables = c["run.block_tables"], c["run.seq_lens"], c["run.cum_seq_lens_q"]
    assert c["run.batch_size"] == len(c["run.block_tables"])
    scales = None, None, c["run.bmm2_scale"]
    return answers(over_table(c["run.query"], pages, *tables, how, scales, c["run.sinks"]), c)


def xqa(c: Arguments) -> list[np.ndarray]:
    q, count = c["run.q"], len(c["run.page_table"])
    flat, q_len = q.reshape(-1, *q.shape[-2:]), c["run.q_seq_len"]
    rows = c["run.q_cu_seq_lens"]
    k, v = c["run.k_cache"], c["run.v_cache"]
    if k.ndim == 5:
        k, v = k[:, 0], v[:, 1]
    pages = plain.halves((k, v), c["run.kv_layout"])
    of_arrays = pages[0].shape[2], pages[0].shape[1], q.shape[-1]
    for name, extent in zip(("num_kv_heads", "page_size", "head_dim"), of_arrays, strict=True):
        assert c[f"run.{name}"] in (None, extent)
    of_cache = c["run.kv_scale"] if pages[0].dtype.itemsize == 1 else 1.0
    scale = c["run.q_scale"] * of_cache / math.sqrt(q.shape[-1])
    window = c["run.sliding_win_size"] - 1
    how = Logits(scale, causal=q_len != 1, window_left=window)
    lens = c["run.seq_lens"].reshape(-1)
    masks = plain.row_masks(c["run.mask"], count, q_len, lens.tolist())
    if rows is None:
        rows = np.arange(count + 1) * q_len
        assert len(flat) == rows[-1]
    scales = None, None, c["run.rcp_out_scale"] * of_cache
    pair = over_table(
        flat, pages, c["run.page_table"], lens, rows, how, scales, c["run.sinks"], masks
    )
    return answers((pair[0].reshape(*q.shape[:-1], -1), pair[1].reshape(q.shape[:-1])), c)


def cudnn_decode(c: Arguments) -> list[np.ndarray]:
    q, table = c["run.q"], c["run.block_tables"]
    starts, unit = c["run.batch_offsets_q"], math.prod(q.shape[1:])
    found = np.arange(len(table)) if starts is None else starts.reshape(-1)[: len(table)] // unit
    how, lens = Logits(c["run.scale"]), c["run.actual_seq_lens_kv"].reshape(-1)
    pages = plain.halves((c["run.k_cache"], c["run.v_cache"]), "HND")
    assert len(q) == len(table) == len(set(found.tolist()))
    rows = np.arange(len(table) + 1)
    out, lse = over_table(q[found], pages, table, lens, rows, how, (None, None, None))
    placed = np.zeros_like(out), np.zeros_like(lse)
    placed[0][found], placed[1][found] = out, lse
    return answers(placed, c)


def cudnn_prefill(c: Arguments) -> list[np.ndarray]:
    q, table = c["run.q"], c["run.block_tables"]
    of_rows, lens = c["run.actual_seq_lens_q"], c["run.actual_seq_lens_kv"].reshape(-1)
    unit = math.prod(q.shape[1:]) if c["run.batch_offsets_units"] == "elements" else 1
    starts = c["run.batch_offsets_q"].reshape(-1) // unit
    of_rows = np.diff(starts) if of_rows is None else of_rows.reshape(-1)
    starts = starts[: len(of_rows)]
    scale = product(*(c[f"run.{n}"] for n in ("scale", "q_scale", "k_scale")))
    pages = plain.halves((c["run.k_cache"], c["run.v_cache"]), "HND")
    how, size, requests = Logits(scale, causal=c["run.causal"]), pages[0].shape[1], []
    for b, (start, count, length) in enumerate(zip(starts, of_rows, lens, strict=True)):
        assert start >= 0 and start + count <= len(q) and 0 <= length <= table.shape[1] * size
        own = tuple(plain.gather(x, table[b, : -(-length // size)], length) for x in pages)
        requests.append(plain.Request(slice(int(start), int(start + count)), *own))
    o, lse = attend(q, requests, how, scales=(None, None, c["run.v_scale"]))
    if not c["run.return_lse"]:
        return [o]
    most = c["run.max_token_per_sequence"]
    padded = np.full((len(lens), most, q.shape[1]), -np.inf)
    for b, request in enumerate(requests):
        own = lse[request.rows]
        assert len(own) <= most
        padded[b, : len(own)] = own
    return [o, padded / (plain.LOG2_E if c["run.lse_base"] == "ln" else 1.0)]


def table_entries() -> list[Entry]:
    rules: dict[str, Any] = {"o_scale": one}
    rules |= {"q_len_per_req": or_default(whole(1), 1)}
    rules |= {"backend": one_of("auto", "xqa", "trtllm-gen")}
    q, two = values(3, HQ, D), values(6, HQ, D)
    table = {"workspace_buffer": WORKSPACE, "block_tables": TABLE, "seq_lens": LENS}
    decode = step("run", kv_cache=POOL, **table, max_seq_len=12, bmm1_scale=0.25, kv_layout="NHD")
    scaled = step("run", bmm2_scale=0.5, return_lse=True)
    samples = SAMPLES | {"mask": bools(3, 2, 2), "cum_seq_lens_q": ints(0, 2, 2, 6)}
    samples |= {"q_cu_seq_lens": ints(0, 2, 2, 6), "out": two, "lse": np.zeros((6, HQ), np.float32)}
    q_two = step("run", query=two, q_len_per_req=2)
    calls = cupyattn
    found = [
        Entry(name, function(call), base, samples, answer, rules)
        for name, call, base, answer in (
            (
                "trtllm decode",
                calls.trtllm_batch_decode_with_kv_cache,
                decode | scaled | q_two,
                trtllm_decode,
            ),
            (
                "xqa_batch_decode",
                calls.xqa_batch_decode_with_kv_cache,
                decode | scaled | step("run", query=q),
                xqa_decode,
            ),
        )
    ]
    context = {n: x for n, x in decode.items() if n != "run.max_seq_len"} | scaled
    context |= step("run", query=two, max_q_len=4, max_kv_len=12, batch_size=3)
    context |= step("run", cum_seq_lens_q=ints(0, 2, 2, 6), cum_seq_lens_kv=ints(0, 9, 13, 18))
    call: Any = calls.trtllm_batch_context_with_kv_cache
    rules = rules | {"cum_seq_lens_kv": ignored}
    entry = Entry("trtllm context", function(call), context, samples, trtllm_context, rules)
    found.append(entry)
    base = step("run", q=q[:, None], k_cache=POOL[:, 0].copy(), v_cache=POOL[:, 1].copy())
    base |= step(
        "run", page_table=TABLE, seq_lens=LENS, workspace_buffer=WORKSPACE, return_lse=True
    )
    call = calls.xqa.xqa if hasattr(calls.xqa, "xqa") else calls.xqa
    samples = SAMPLES | {"mask": bools(3, 1, 1), "q_cu_seq_lens": ints(0, 1, 2, 3)}
    entry = Entry("xqa", function(call), base, samples, xqa, {"q_scale": one})
    found.append(entry._replace(written=("output", "lse")))
    heads_first = (POOL[:, i].swapaxes(1, 2).copy() for i in (0, 1))
    base = step("run", **dict(zip(("k_cache", "v_cache"), heads_first, strict=True)), scale=0.25)
    base |= step("run", workspace_buffer=WORKSPACE, max_sequence_kv=12, block_tables=TABLE)
    base |= step("run", actual_seq_lens_kv=LENS.reshape(3, 1, 1, 1), return_lse=True)
    call = calls.cudnn_batch_decode_with_kv_cache
    samples = SAMPLES | {"batch_offsets_q": ints(64, 0, 128)}
    entry = Entry("cudnn decode", function(call), base, samples, cudnn_decode)
    found.append(entry._replace(base=base | step("run", q=q)))
    base = base | step("run", q=two, max_token_per_sequence=4, actual_seq_lens_q=ints(2, 0, 4))
    base |= step("run", batch_offsets_q=ints(0, 2, 2, 6), batch_offsets_units="tokens", causal=True)
    call = calls.cudnn_batch_prefill_with_kv_cache
    rules = dict.fromkeys(("q_scale", "k_scale", "v_scale"), one) | {"backend": ignored}
    samples = {"out": two, "lse": np.zeros((3, 4, HQ), np.float32)}
    entry = Entry("cudnn prefill", function(call), base, samples, cudnn_prefill, rules)
    return [*found, entry]


# --- pages, masks, states ---


def append(c: Arguments) -> list[np.ndarray]:
    cache, layout = c["run.paged_kv_cache"], c["run.kv_layout"]
    k, v = (x.copy() for x in plain.halves(cache, layout))
    batch, positions, indptr = (c[f"run.{n}"] for n in ("batch_indices", "positions", "kv_indptr"))
    assert len(c["run.kv_last_page_len"]) == len(indptr) - 1
    scales = (product(c[f"run.{n}_scale"]) for n in "kv")
    for pages, name, by in zip((k, v), ("key", "value"), scales, strict=True):
        rows = c[f"run.append_{name}"]
        assert len(rows) == len(batch) == len(positions)
        for row, b, position in zip(rows, batch.tolist(), positions.tolist(), strict=True):
            if b < 0:
                continue
            assert b < len(indptr) - 1 and position >= 0
            entry = int(indptr[b]) + position // pages.shape[1]
            assert entry < indptr[b + 1]
            page = int(c["run.kv_indices"][entry])
            assert 0 <= page < len(pages)
            pages[page, position % pages.shape[1]] = row / by
    return [k, v]


def _of_share(c: Arguments, tokens: list[int]) -> list[int]:
    """Which of the rank's keys tokens are; -1 for others'."""
    names = "cp_world_size", "cp_rank", "cp_kv_cache_interleave_size"
    world, rank, run = (int(c[f"run.{name}"]) for name in names)
    assert rank < world
    is_own = [x >= 0 and x // run % world == rank for x in tokens]
    return [
        x // (run * world) * run + x % run if own else -1
        for x, own in zip(tokens, is_own, strict=True)
    ]


def share_lens(c: Arguments) -> list[np.ndarray]:
    lens = c["run.seq_lens"]
    # Lengths may be of any size: tokens of the last round are looked at, whole ones before counted.
    world, run = (int(c[f"run.{x}"]) for x in ("cp_world_size", "cp_kv_cache_interleave_size"))
    counts = []
    for n in lens.ravel().tolist():
        rounds, rest = divmod(max(n, 0), world * run)
        counts.append(rounds * run + sum(x >= 0 for x in _of_share(c, list(range(rest)))))
    return [np.array(counts).reshape(lens.shape)]


def share_slots(c: Arguments) -> list[np.ndarray]:
    slots = c["run.slots"]
    return [np.array(_of_share(c, slots.ravel().tolist())).reshape(slots.shape)]


def share_lists(c: Arguments) -> list[np.ndarray]:
    lists, lens, tables = (c.get(f"run.{x}") for x in ("lists", "lens", "block_tables"))
    assert lists.ndim and (tables is None) == (c.get("run.page_size") is None)
    *lead, width = lists.shape
    rows = lists.reshape(-1, width) if width else lists.reshape(math.prod(lead), 0)
    assert lens is None or lens.shape in (tuple(lead), (len(rows),))
    assert tables is None or (tables.ndim == 2 and (not len(rows) or len(rows) % len(tables) == 0))
    found, counts = np.full(rows.shape, -1), []
    for i, row in enumerate(rows.tolist()):
        count = width if lens is None else max(0, int(lens.ravel()[i]))
        own = [x for x in _of_share(c, row[:count]) if x >= 0]
        if tables is not None:
            page, table = c["run.page_size"], tables[i // (len(rows) // len(tables))].tolist()
            held = [x for x in own if x // page < len(table) and table[x // page] >= 0]
            own = [table[x // page] * page + x % page for x in held]
        found[i, : len(own)] = own
        counts.append(len(own))
    return [found.reshape(lists.shape), np.array(counts).reshape(lead)]


def positions(c: Arguments) -> list[np.ndarray]:
    indptr, lens, nnz = c["run.append_indptr"], c["run.seq_lens"], c["run.nnz"]
    batch, found = [-1] * nnz, [0] * nnz
    assert len(lens) == len(indptr) - 1
    for b, length in enumerate(lens.tolist()):
        begin, end = indptr[b : b + 2].tolist()
        assert 0 <= begin <= end and end - begin <= length
        for row in range(begin, end):
            own = _of_share(c, [length - end + row])[0]
            batch[row], found[row] = (b, own) if own >= 0 else (-1, 0)
    return [np.array(batch), np.array(found)]


def seq_lens(c: Arguments) -> list[np.ndarray]:
    pages = np.diff(c["run.kv_indptr"].astype(np.int64))
    assert c["run.kv_indptr"][0] >= 0 and (pages >= 0).all()
    assert (c["run.kv_last_page_len"] >= 0).all()
    return [np.maximum(pages - 1, 0) * c["run.page_size"] + c["run.kv_last_page_len"]]


def _bits(x: np.ndarray, order: str) -> np.ndarray:
    assert x.ndim == 1
    found = np.zeros(-(-len(x) // 8), int)
    for i, bit in enumerate(x.tolist()):
        found[i // 8] |= bit << (i % 8 if order == "little" else 7 - i % 8)
    return found


def packbits(c: Arguments) -> list[np.ndarray]:
    return [_bits(c["run.x"], c["run.bitorder"])]


def segment_packbits(c: Arguments) -> list[np.ndarray]:
    x, indptr = c["run.x"], c["run.indptr"]
    assert indptr[0] >= 0 and (np.diff(indptr) >= 0).all() and indptr[-1] <= len(x)
    parts = [_bits(x[a:b], c["run.bitorder"]) for a, b in pairwise(indptr)]
    sizes = [len(part) for part in parts]
    return [np.concatenate([*parts, np.zeros(0, int)]), np.cumsum([0, *sizes])]


def _base(c: Arguments) -> float:
    return math.e if c["run.lse_base_on_e"] else 2.0


def merge_pair(c: Arguments) -> list[np.ndarray]:
    names = ("v_a", "s_a", "v_b", "s_b") if "run.v_a" in c else ("v", "s", "v_other", "s_other")
    v_a, s_a, v_b, s_b = (c[f"run.{n}"].astype(float) for n in names)
    assert v_a.shape == v_b.shape and s_a.shape == s_b.shape == v_a.shape[:2]
    with np.errstate(all="ignore"):
        v, s = plain.merged(np.stack([v_a, v_b]), np.stack([s_a, s_b]), _base(c))
    if c.get("run.mask") is not None:
        kept = c["run.mask"].astype(bool)
        v, s = np.where(kept[:, None, None], v, v_a), np.where(kept[:, None], s, s_a)
    return [v, s]


def merge_many(c: Arguments) -> list[np.ndarray]:
    v, s = c["run.v"].astype(float), c["run.s"].astype(float)
    assert s.shape == v.shape[:-1]
    if "run.indptr" in c:
        ends = c["run.indptr"]
        assert ends[0] >= 0 and (np.diff(ends) >= 0).all() and ends[-1] <= len(v)
        parts = [(v[a:b], s[a:b]) for a, b in pairwise(ends)]
    else:
        parts = list(zip(v, s, strict=True))
    found = [plain.merged(*part, _base(c)) for part in parts]
    return [np.array([x[i] for x in found]).reshape(-1, *v.shape[-2:][: 2 - i]) for i in (0, 1)]


SHARE_RULES: dict[str, Any] = {
    "cp_world_size": whole(1),
    "cp_rank": whole(0),
    "cp_kv_cache_interleave_size": whole(1),
}


def _share_entries() -> list[Entry]:
    calls, share = cupyattn, {"cp_world_size": 2, "cp_rank": 1, "cp_kv_cache_interleave_size": 2}
    rules: dict[str, Any] = SHARE_RULES | dict.fromkeys(("out", "counts"))
    rules |= {"seq_lens": indices, "slots": indices, "lists": indices, "lens": indices}
    rules |= {"page_size": or_default(whole(1)), "block_tables": indices}
    lens, slots = ints(5, 0, 9), ints(7, -1, 2)
    lists = ints(7, -1, 2, 3, 0, 9).reshape(2, 3)
    found = []
    for name, call, base, oracle in (
        ("share lens", calls.get_share_seq_lens, {"seq_lens": lens}, share_lens),
        ("share slots", calls.get_share_slots, {"slots": slots}, share_slots),
        ("share lists", calls.get_share_lists, {"lists": lists}, share_lists),
    ):
        samples: dict[str, Any] = {"out": ints(9, 9, 9)}
        if name == "share lists":
            samples = {"out": ints(*[9] * 6).reshape(2, 3), "counts": ints(9, 9)}
            samples |= {"lens": ints(1, 3)}
        entry = Entry(name, function(call), step("run", **base, **share), samples, oracle, rules)
        found.append(entry._replace(written=tuple(x for x in ("out", "counts") if x in samples)))
    return found


def op_entries() -> list[Entry]:
    base = step("run", append_key=values(4, HKV, D), append_value=values(4, HKV, D))
    base |= step("run", batch_indices=ints(0, 2, 2, -1), positions=ints(8, 3, 4, 0))
    base |= step(
        "run", paged_kv_cache=POOL, kv_indices=IDS, kv_indptr=INDPTR, kv_last_page_len=LAST
    )

    def cache(result: Any, arguments: Arguments) -> Any:
        given, layout = arguments["run.paged_kv_cache"], arguments.get("run.kv_layout", "NHD")
        return plain.halves(given, str(layout))

    def states(result: Any, arguments: Arguments) -> Any:
        return arguments["run.v"], arguments["run.s"]

    calls, positive = cupyattn, {"k_scale": above(0.0), "v_scale": above(0.0)}
    entry = Entry("append", function(calls.append_paged_kv_cache), base, {}, append, positive)
    found = [entry._replace(written=("paged_kv_cache",), gather=cache)]
    base = step("run", append_indptr=ints(0, 2, 2, 4), seq_lens=LENS, nnz=5)
    samples = {"batch_indices": ints(9, 9, 9, 9, 9), "positions": ints(9, 9, 9, 9, 9)}
    call: Any = calls.get_batch_indices_positions
    of_outputs = "batch_indices", "positions"
    rules: dict[str, Any] = dict.fromkeys(of_outputs) | {"seq_lens": indices}
    rules |= SHARE_RULES
    entry = Entry("positions", function(call), base, samples, positions, rules)
    found.append(entry._replace(written=of_outputs))
    found += _share_entries()
    base = step("run", kv_indptr=INDPTR, kv_last_page_len=LAST, page_size=PAGE)
    found.append(Entry("seq_lens", function(calls.get_seq_lens), base, {}, seq_lens, written=()))
    base = step("run", x=bools(21))
    found.append(Entry("packbits", function(calls.packbits), base, {}, packbits, written=()))
    base = base | step("run", indptr=ints(0, 3, 3, 20), bitorder="little")
    call = calls.segment_packbits
    found.append(Entry("segment_packbits", function(call), base, {}, segment_packbits, written=()))
    n, s = 5, values(5, HQ, dtype=np.float32)
    pair = step("run", v_a=values(n, HQ, D), s_a=s, v_b=values(n, HQ, D), s_b=s[::-1].copy())
    samples = {"out": values(n, HQ, D), "lse": s * 0, "mask": bools(n)}
    found.append(Entry("merge_state", function(calls.merge_state), pair, samples, merge_pair))
    names = {"v_a": "v", "s_a": "s", "v_b": "v_other", "s_b": "s_other"}
    base = {f"run.{names[name.split('.')[1]]}": x for name, x in pair.items()}
    call = calls.merge_state_in_place
    of_states = {"v": floats}
    rules = of_states | {"s": float32s, "mask": array(bool, np.uint8)}
    entry = Entry("in place", function(call), base, samples, merge_pair, rules)
    found.append(entry._replace(written=("v", "s"), gather=states))
    base = step("run", v=values(n, 3, HQ, D), s=values(n, 3, HQ, dtype=np.float32))
    call = calls.merge_states
    found.append(Entry("merge_states", function(call), base, samples, merge_many, of_states))
    base = step("run", v=values(7, HQ, D), s=values(7, HQ, dtype=np.float32))
    base |= step("run", indptr=ints(0, 3, 3, 4, 7, 7))
    call = calls.variable_length_merge_states
    found.append(Entry("segments", function(call), base, samples, merge_many, of_states))
    return found

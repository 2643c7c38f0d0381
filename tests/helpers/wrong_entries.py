"""Every public call as an Entry: good arguments, what values of them mean, and a second oracle."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import numpy as np

import cupyattn

from . import plain_answers as plain
from .batches import SMALL_WORKSPACE as WORKSPACE
from .plain_answers import LOG2_E, Logits, attend, by_offsets
from .wrong_calls import Arguments, Entry, function, step, wrapper
from .wrong_rules import FP32, HALF, flag_off, or_default
from .wrong_values import above, dtype, flag, ignored, nothing, number, one_of, whole

HQ, HKV, D, PAGE = 4, 2, 16, 4
RNG = np.random.default_rng(0)


def values(*shape: int, dtype: Any = HALF) -> np.ndarray:
    return RNG.standard_normal(shape).astype(FP32).astype(dtype)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def bools(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.7


def little(mask: np.ndarray) -> np.ndarray:
    return np.packbits(mask.reshape(-1), bitorder="little")


def logits(c: Arguments, step: str = "", **changes: Any) -> Logits:
    found = {name: c.get(f"{step}.{name}") for name in Logits._fields}
    return Logits(**{n: x for n, x in found.items() if x is not None} | changes)


def product(*factors: float | None) -> float:
    return math.prod(1.0 if x is None else x for x in factors)


def answers(pair: plain.Pair, c: Arguments, step: str = "run") -> list[np.ndarray]:
    """What a run gives of (out, lse), the output behind its gates of heads or of elements."""
    gate = c.get(f"{step}.output_gate")
    if gate is not None:
        assert gate.shape in (pair[0].shape, pair[0].shape[:-1])
        with np.errstate(over="ignore"):
            factors = 1.0 / (1.0 + np.exp(-gate.astype(float)))
        pair = pair[0] * factors.reshape(*gate.shape[: pair[1].ndim], -1), pair[1]
    if not c.get(f"{step}.return_lse"):
        return [pair[0]]
    lse = pair[1] / (LOG2_E if c.get(f"{step}.lse_base") == "ln" else 1.0)
    return [pair[0], lse.T if c.get(f"{step}.lse_layout") == "HN" else lse]


# --- single calls ---


def single(c: Arguments) -> list[np.ndarray]:
    q, k, v, layout = c["run.q"], c["run.k"], c["run.v"], c["run.kv_layout"]
    k, v = plain.tokens_first(k, layout), plain.tokens_first(v, layout)
    assert k.shape[:2] == v.shape[:2]
    is_decode = q.ndim == 2
    q = q[None] if is_decode else q
    mask, bits = c.get("run.custom_mask"), c.get("run.packed_custom_mask")
    shape = len(q), len(k)
    if bits is not None:
        mask = np.unpackbits(bits, bitorder="little")[: math.prod(shape)].astype(bool)
        mask = mask.reshape(shape)
    if mask is not None:
        mask = mask.reshape(shape)
    scales = tuple(
        np.multiply(*(1.0 if x is None else x for x in pair))
        for pair in ((c.get(f"run.scale_{n}"), c[f"run.{n}_scale"]) for n in "qkv")
    )
    request = plain.Request(slice(0, len(q)), k, v, mask)
    found = attend(q, [request], logits(c, "run"), sinks=c["run.sinks"], scales=scales)
    return answers((found[0][0], found[1][0]) if is_decode else found, c)


Q, K, V = values(5, HQ, D), values(9, HKV, D), values(9, HKV, D)
MASK = bools(5, 9)
OF_HEADS = np.array([0.5, 1.0, 2.0, 1.5], FP32)
SINGLE_SAMPLES = {
    "sinks": OF_HEADS,
    "custom_mask": MASK,
    "packed_custom_mask": little(MASK),
    "scale_q": OF_HEADS,
    "scale_k": OF_HEADS[:2],
    "scale_v": OF_HEADS[:2],
    "lse": np.zeros((5, HQ), FP32),
    "out": Q * 0,
}


def singles() -> list[Entry]:
    one, many = {"run.q": Q[0], "run.k": K, "run.v": V}, {"run.q": Q, "run.k": K, "run.v": V}
    decode = {"lse": np.zeros(HQ, FP32), "out": Q[0] * 0}
    rules = dict.fromkeys(("q_scale", "k_scale", "v_scale"), number) | {
        "use_fp16_qk_reduction": flag
    }
    found = [
        Entry(name, function(call), base, SINGLE_SAMPLES | more, single, rules)
        for name, call, base, more in (
            ("single_decode", cupyattn.single_decode_with_kv_cache, one, decode),
            ("single_prefill", cupyattn.single_prefill_with_kv_cache, many, {}),
            ("with lse", cupyattn.single_prefill_with_kv_cache_return_lse, many, {}),
        )
    ]
    rope = {"run.pos_encoding_mode": "ROPE_LLAMA", "run.causal": True, "run.return_lse": True}
    alibi = {"run.pos_encoding_mode": "ALIBI", "run.kv_layout": "HND", "run.logits_soft_cap": 5.0}
    heads_first = {"run.k": K.swapaxes(0, 1).copy(), "run.v": V.swapaxes(0, 1).copy()}
    found.append(found[1]._replace(name="single_prefill, rope", base=many | rope))
    found.append(found[1]._replace(name="single_prefill, alibi", base=many | alibi | heads_first))
    return found


# --- batches with a plan ---

QO_LEN, KV_LEN = (3, 0, 2), (9, 4, 5)
INDPTR, LAST = ints(0, 3, 4, 6), ints(1, 4, 1)
IDS = ints(7, 0, 5, 3, 1, 2)
POOL = values(8, 2, PAGE, HKV, D)
ROWS = ints(0, 3, 3, 5)
SIZES = {"num_qo_heads": HQ, "num_kv_heads": HKV}
PLAN_MASK = bools(3 * 9 + 2 * 5)
PLAN_BITS = np.concatenate([little(PLAN_MASK[:27]), little(PLAN_MASK[27:])])


def run_scales(c: Arguments) -> tuple[Any, Any, Any]:
    return tuple(c.get(f"run.{n}_scale") for n in "qkv")  # type: ignore[return-value]


def planned_dtypes(c: Arguments, q: np.ndarray, k: Any, q_default: Any = HALF) -> np.dtype:
    """The dtype of the answer; arrays are of the dtypes that the plan says."""
    both = c.get("plan.data_type")
    of_q = next((x for x in (c.get("plan.q_data_type"), both) if x is not None), q_default)
    of_kv = next((x for x in (c.get("plan.kv_data_type"), both) if x is not None), of_q)
    first = k[0] if isinstance(k, (tuple, list)) else k
    assert q.dtype == of_q and first.dtype == of_kv
    found = c.get("plan.o_data_type")
    return np.dtype(of_q if found is None else found)


def check_dims(c: Arguments, q: np.ndarray, pair: plain.Pair, dims: tuple[str, str]) -> None:
    assert q.shape[1:] == (c["plan.num_qo_heads"], c[f"plan.{dims[0]}"])
    k, v = pair
    assert k.shape[1:] == (c["plan.num_kv_heads"], c[f"plan.{dims[0]}"])
    of_v = c.get(f"plan.{dims[1]}") or c[f"plan.{dims[0]}"]
    assert v.shape[1:] == (c["plan.num_kv_heads"], of_v)


def decode(c: Arguments, layout: str = "make.kv_layout") -> list[np.ndarray]:
    q, cache, size = c["run.q"], c["run.paged_kv_cache"], c["plan.page_size"]
    indptr, count = c["plan.indptr"], len(c["plan.indptr"]) - 1
    of_keys = plain.lengths_of(indptr, c["plan.last_page_len"], size)
    pairs = plain.paged(cache, c[layout], indptr, c["plan.indices"], of_keys)
    assert plain.halves(cache, c[layout])[0].shape[1] == size
    planned_dtypes(c, q, cache)
    q_len = c["run.q_len_per_req"] or c["plan.q_len_per_req"]
    assert len(q) == count * q_len
    check_dims(c, q, pairs[0], ("head_dim", "head_dim"))
    masks = plain.row_masks(c["run.mask"], count, q_len, of_keys)
    window = c["run.window_left"]
    assert window is None or window == c["plan.window_left"]
    requests = by_offsets(np.arange(count + 1) * q_len, pairs, masks)
    how = logits(c, "plan", window_right=c["plan.window_right"])
    how = how._replace(window_right=-1, causal=True) if how.window_right == 0 else how
    return answers(attend(q, requests, how, sinks=c["run.sinks"], scales=run_scales(c)), c)


def prefill(c: Arguments) -> list[np.ndarray]:
    rows, ragged = c["plan.qo_indptr"], "plan.kv_indptr" in c
    q, layout = c["run.q"], c["make.kv_layout"]
    if ragged:
        k, v = (plain.tokens_first(c[f"run.{n}"], layout) for n in "kv")
        ends = c["plan.kv_indptr"]
        assert len(k) == len(v) >= ends[-1]
        pairs = [(k[a:b], v[a:b]) for a, b in pairwise(ends)]
        planned_dtypes(c, q, c["run.k"])
    else:
        size, indptr = c["plan.page_size"], c["plan.paged_kv_indptr"]
        of_keys = plain.lengths_of(indptr, c["plan.paged_kv_last_page_len"], size)
        ids = c["plan.paged_kv_indices"]
        pairs = plain.paged(c["run.paged_kv_cache"], layout, indptr, ids, of_keys)
        assert plain.halves(c["run.paged_kv_cache"], layout)[0].shape[1] == size
        planned_dtypes(c, q, c["run.paged_kv_cache"])
    check_dims(c, q, pairs[0], ("head_dim_qk", "head_dim_vo"))
    assert rows[0] == 0 and rows[-1] == len(q)
    masks = plain.flat_masks(c["plan.custom_mask"], c["plan.packed_custom_mask"], rows, pairs)
    sinks, how = c.get("run.sinks"), logits(c, "plan")
    if "run.sink" in c:
        for name in {"pos_encoding_mode", "window_left"} - c["given"]:
            how = how._replace(**{name: c[f"make.{name}"]})
        sinks, how = c["run.sink"], how._replace(sm_scale=c["run.sm_scale"])
    assert c.get("run.window_left") in (None, how.window_left)
    requests = by_offsets(rows, pairs, masks)
    return answers(attend(q, requests, how, sinks=sinks, scales=run_scales(c)), c)


def mixed(c: Arguments) -> list[np.ndarray]:
    q, cache, layout = c["run.q"], c["run.kv_cache"], c["make.kv_layout"]
    rows, indptr = c["plan.qo_indptr"], c["plan.kv_indptr"]
    pairs = plain.paged(cache, layout, indptr, c["plan.kv_indices"], c["plan.kv_len_arr"])
    assert plain.halves(cache, layout)[0].shape[1] == c["plan.page_size"]
    planned_dtypes(c, q, cache)
    check_dims(c, q, pairs[0], ("head_dim_qk", "head_dim_vo"))
    how = logits(c, "plan")
    if c["run.logits_soft_cap"]:
        assert how.logits_soft_cap
        how = how._replace(logits_soft_cap=c["run.logits_soft_cap"])
    requests = by_offsets(rows, pairs)
    assert rows[0] == 0 and rows[-1] == len(q)
    return [*attend(q, requests, how, sinks=c["run.sinks"], scales=run_scales(c))]


def ranges(c: Arguments) -> list[np.ndarray]:
    """Rows see keys behind their own, and a range."""
    q, rows, size = c["run.q"], c["plan.qo_indptr"], c["plan.page_size"]
    indptr, layout = c["plan.paged_kv_indptr"], c["make.kv_layout"]
    of_keys = plain.lengths_of(indptr, c["plan.paged_kv_last_page_len"], size)
    pairs = plain.paged(
        c["run.paged_kv_cache"], layout, indptr, c["plan.paged_kv_indices"], of_keys
    )
    assert plain.halves(c["run.paged_kv_cache"], layout)[0].shape[1] == size
    check_dims(c, q, pairs[0], ("head_dim_qk", "head_dim_vo"))
    assert q.dtype == c["make.q_data_type"] and rows[0] == 0 and rows[-1] == len(q)
    names = ("bidirectional_ranges", "causal_window_left", "range_window_left")
    shown, near, reach = (c[f"plan.{n}"] if c[f"run.{n}"] is None else c[f"run.{n}"] for n in names)
    masks: list[np.ndarray] = []
    for begin, end, (k, _) in zip(rows[:-1], rows[1:], pairs, strict=True):
        masks.append(np.zeros((end - begin, len(k)), bool))
        for i in range(end - begin):
            position = i + len(k) - (end - begin)
            first, last = (-1, -1) if shown is None else shown[begin + i].tolist()
            for j in range(len(k)):
                is_behind = j <= position and (near < 0 or j >= position - near)
                is_reached = first >= 0 and first <= j <= last
                is_reached &= reach <= 0 or j > position - reach
                masks[-1][i, j] = is_behind or is_reached
    requests = by_offsets(rows, pairs, masks)
    how = Logits(c["plan.sm_scale"], logits_soft_cap=c["plan.logits_soft_cap"])
    return answers(attend(q, requests, how, scales=run_scales(c)), c)


def planned_entries() -> list[Entry]:
    make = step("make", float_workspace_buffer=WORKSPACE)
    table = {"indptr": INDPTR, "indices": IDS, "last_page_len": LAST}
    sizes = {**SIZES, "page_size": PAGE}
    samples = {"sinks": OF_HEADS, "run.q_scale": OF_HEADS, "run.k_scale": OF_HEADS[:2]}
    samples |= {"run.v_scale": OF_HEADS[:2], "mask": bools(3, 2, 2), "out": values(6, HQ, D) * 0}
    samples |= {"lse": np.zeros((6, HQ), FP32)}
    q = values(6, HQ, D)
    base = make | step("plan", **table, **sizes, head_dim=D, q_len_per_req=2)
    base |= step("run", q=q, paged_kv_cache=POOL, return_lse=True)
    cls: Any = cupyattn.BatchDecodeWithPagedKVCacheWrapper
    found = [Entry("decode", wrapper(cls), base, samples, decode)]
    graph: Any = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
    buffers = {"indptr_buffer": INDPTR * 0, "indices_buffer": np.zeros(9, np.int32)}
    buffers |= {"last_page_len_buffer": LAST * 0}
    given = {n: x for n, x in base.items() if not n.startswith("make.")}
    given |= step("make", workspace_buffer=WORKSPACE, **buffers)
    entry = Entry("graph decode", wrapper(graph), given, samples, decode)
    found.append(entry._replace(written=("out", "lse", *buffers), filled=tuple(buffers)))
    table = {f"paged_kv_{n}": x for n, x in table.items()}
    samples |= {"custom_mask": PLAN_MASK, "packed_custom_mask": PLAN_BITS}
    samples |= {"out": values(5, HQ, D) * 0, "lse": np.zeros((5, HQ), FP32)}
    cls = cupyattn.BatchPrefillWithPagedKVCacheWrapper
    base = make | step("plan", qo_indptr=ROWS, **table, **sizes, head_dim_qk=D, causal=True)
    run = step("run", q=Q, paged_kv_cache=POOL, return_lse=True)
    found.append(Entry("paged", wrapper(cls), base | run, samples, prefill))
    cls = cupyattn.BatchAttentionWithAttentionSinkWrapper
    sunk = base | run | step("run", sink=OF_HEADS, sm_scale=0.3)
    sunk |= step("make", q_data_type="float16", kv_data_type="float16", head_dim_qk=D)
    sunk |= step("make", head_dim_vo=D) | step("plan", q_data_type="float16")
    sunk["plan.kv_data_type"] = "float16"
    no_scale = {"plan.sm_scale": ignored}  # the run says it
    found.append(Entry("sinks", _sinks(wrapper(cls)), sunk, samples, prefill, no_scale))
    cls = cupyattn.BatchPrefillWithCausalBidirectionalRangesWrapper
    base = make | step("plan", qo_indptr=ROWS, **table, **sizes, head_dim_qk=D) | run
    base |= step("make", q_data_type="float16", kv_data_type="float16", head_dim_qk=D)
    base |= step("make", head_dim_vo=D)
    base["run.bidirectional_ranges"] = np.array(
        [[2, 8], [2, 8], [-1, -1], [0, 4], [4, 4]], np.int32
    )
    refused = "custom_mask packed_custom_mask prefix_len_ptr token_pos_in_items_ptr"
    of_ranges: dict[str, Any] = dict.fromkeys((*refused.split(), "max_item_len_ptr"), nothing)
    of_ranges |= {"causal": flag_off, "pos_encoding_mode": one_of("NONE")}
    of_ranges |= {"plan.window_left": whole(-1, -1), "token_pos_in_items_len": whole(0, 0)}
    found.append(Entry("ranges", wrapper(cls), base, samples, ranges, of_ranges))
    cls = cupyattn.BatchPrefillWithRaggedKVCacheWrapper
    base = make | step("plan", qo_indptr=ROWS, kv_indptr=ints(0, 9, 13, 18), **SIZES)
    base |= step("plan", head_dim_qk=D, causal=True, pos_encoding_mode="ROPE_LLAMA")
    base |= step("run", q=Q, k=values(18, HKV, D), v=values(18, HKV, D), return_lse=True)
    found.append(Entry("ragged", wrapper(cls), base, samples, prefill))
    cls = cupyattn.BatchAttention
    base = step("make", device="cpu") | step("plan", qo_indptr=ROWS, kv_indptr=INDPTR, **sizes)
    base |= step("plan", kv_indices=IDS, kv_len_arr=ints(*KV_LEN), head_dim_qk=D, head_dim_vo=D)
    base |= step("plan", q_data_type="float16", kv_data_type="float16", logits_soft_cap=4.0)
    base |= step("run", q=Q, kv_cache=POOL)
    unset = {
        "plan.head_dim_vo": or_default(whole(1)),
        "plan.kv_data_type": or_default(dtype),
        "run.logits_soft_cap": or_default(above(0.0, is_open=False), 0),
    }
    return [*found, Entry("mixed", wrapper(cls), base, samples, mixed, unset)]


def _sinks(steps: Any) -> Any:
    """The plan of the wrapper with sinks shows no names; they are those of the paged wrapper."""
    (make, cls), (plan, call), run = steps

    @functools.wraps(cupyattn.BatchPrefillWithPagedKVCacheWrapper.plan)
    def named(wrapper: Any, **arguments: Any) -> Any:
        return call(wrapper, **arguments)

    return (make, cls), (plan, named), run

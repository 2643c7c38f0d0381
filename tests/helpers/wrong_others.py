"""Entries of wrappers that share keys, skip blocks, or serve prompts and decodes in one launch, and
of older forms of runs. `entries` are those of all public calls."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import cupyattn

from . import plain_answers as plain
from . import wrong_entries
from .batches import SMALL_WORKSPACE as WORKSPACE
from .plain_answers import Logits, attend, by_offsets
from .wrong_calls import Arguments, Entry, function, step, wrapper
from .wrong_entries import (
    HKV,
    HQ,
    IDS,
    INDPTR,
    LAST,
    OF_HEADS,
    PAGE,
    POOL,
    ROWS,
    SIZES,
    D,
    Q,
    answers,
    bools,
    check_dims,
    ints,
    little,
    logits,
    planned_dtypes,
    planned_entries,
    run_scales,
    singles,
    values,
)
from .wrong_latent import latent_entries
from .wrong_rules import HALF, flag_off, floats, indices, keys, lengths, or_default, several
from .wrong_tables import LENS, op_entries, table_entries
from .wrong_values import above, array, dtype, ignored, nothing, one_of, whole

MAKE = step("make", float_workspace_buffer=WORKSPACE)
PREFIX = values(2, 7, HKV, D)


def cascade(c: Arguments) -> list[np.ndarray]:
    q, layout, size = c["run.q"], c["make.kv_layout"], c["plan.page_size"]
    cache, found = c["run.paged_kv_cache"], []
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr")
    levels = [c[f"plan.{name}"] for name in (*names, "paged_kv_last_page_len")]
    assert all(len(x) == c["make.num_levels"] for x in levels)
    for rows, indptr, ids, last in zip(*levels, strict=True):
        of_keys = plain.lengths_of(indptr, last, size)
        assert rows[0] == 0 and (np.diff(rows) >= 0).all() and rows[-1] == len(q)
        found.append((rows, plain.paged(cache, layout, indptr, ids, of_keys)))
    assert plain.halves(cache, layout)[0].shape[1] == size
    planned_dtypes(c, q, cache)
    check_dims(c, q, found[0][1][0], ("head_dim", "head_dim"))
    how, (last_rows, _) = logits(c, "plan"), found[-1]
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    for row in range(len(q)):
        owners = [int(np.searchsorted(rows, row, side="right")) - 1 for rows, _ in found]
        pairs = [pairs[owner] for owner, (_, pairs) in zip(owners, found, strict=True)]
        k, v = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        begin, end = last_rows[owners[-1] : owners[-1] + 2].tolist()
        own, mask = len(pairs[-1][0]), None
        if c["plan.causal"]:
            limit = np.maximum(np.arange(end - begin) + own - (end - begin), -1)
            mask = np.arange(len(k)) <= (limit + len(k) - own)[:, None]
        request = plain.Request(slice(0, end - begin), k, v, mask)
        given = {"sinks": c["run.sinks"], "scales": run_scales(c)}
        pair = attend(q[begin:end], [request], how._replace(causal=False), **given)
        out[row], lse[row] = (x[row - begin] for x in pair)
    return answers((out, lse), c)


def shared(c: Arguments) -> list[np.ndarray]:
    """All rows see the prefix, and then their own keys, which alone causality hides."""
    q, layout = c["run.q"], c.get("make.kv_layout") or c["run.kv_layout"]
    k, v = (plain.tokens_first(c[f"run.{n}_shared"], layout) for n in "kv")
    how = Logits(c["run.sm_scale"])
    if "run.k_unique" in c:
        own_k, own_v = (plain.tokens_first(c[f"run.{n}_unique"], layout) for n in "kv")
        pairs, rows = list(zip(own_k, own_v, strict=True)), np.arange(len(q) + 1)
    else:
        cache = c["run.unique_kv_cache"]
        cache = c["run.unique_kv_data"] if cache is None else cache
        prefix = "paged_kv" if "plan.qo_indptr" in c else "unique_kv"
        indptr, ids, last = (
            c[f"plan.{prefix}_{n}"] for n in ("indptr", "indices", "last_page_len")
        )
        size = plain.halves(cache, layout)[0].shape[1]
        assert c["plan.page_size"] in (None, size)
        pairs = plain.paged(cache, layout, indptr, ids, plain.lengths_of(indptr, last, size))
        rows = c.get("plan.qo_indptr")
        rows = np.arange(len(indptr)) if rows is None else rows
        check_dims(c, q, pairs[0], ("head_dim", "head_dim"))
    assert rows[0] == 0 and rows[-1] == len(q) and (np.diff(rows) >= 0).all()
    joined, masks = [], []
    for count, (own_k, own_v) in zip(np.diff(rows).tolist(), pairs, strict=True):
        joined.append((np.concatenate([k, own_k]), np.concatenate([v, own_v])))
        mask = np.ones((count, len(k) + len(own_k)), bool)
        if c.get("run.causal"):
            limit = np.arange(count)[:, None] + len(own_k) - count
            mask[:, len(k) :] = np.arange(len(own_k)) <= limit
        masks.append(mask)
    return [attend(q, by_offsets(rows, joined, masks), how)[0]]


def sharing_entries() -> list[Entry]:
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr")
    rules = {"use_cuda_graph": flag_off, "paged_kv_last_page_len": several(indices)}
    levels = [[ints(0, 5), ROWS], [ints(0, 2), INDPTR], [ints(6, 4), IDS], [ints(3), LAST]]
    base = MAKE | step("make", num_levels=2) | step("plan", **SIZES, head_dim=D, page_size=PAGE)
    base |= {
        f"plan.{n}": x for n, x in zip((*names, "paged_kv_last_page_len"), levels, strict=True)
    }
    base |= step("plan", causal=True) | step("run", q=Q, paged_kv_cache=POOL, return_lse=True)
    samples = {"sinks": OF_HEADS, "out": Q * 0, "lse": np.zeros((5, HQ), np.float32)}
    samples |= {"run.k_scale": OF_HEADS[:2], "run.v_scale": OF_HEADS[:2]}
    cls: Any = cupyattn.MultiLevelCascadeAttentionWrapper
    found = [Entry("cascade", wrapper(cls), base, samples, cascade, rules)]
    rules = dict.fromkeys(("rope_scale", "rope_theta"), ignored)
    rules |= {"page_size": or_default(whole(1))}
    table = {"indptr": INDPTR, "indices": IDS, "last_page_len": LAST}
    run = step("run", k_shared=PREFIX[0], v_shared=PREFIX[1], unique_kv_cache=POOL)
    sizes = {**SIZES, "head_dim": D, "page_size": PAGE}
    base = MAKE | step("plan", **{f"unique_kv_{n}": x for n, x in table.items()}, **sizes)
    cls = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
    decode = base | run | step("run", q=values(3, HQ, D))
    found.append(Entry("shared decode", wrapper(cls), decode, {}, shared, rules))
    base = MAKE | step("plan", qo_indptr=ROWS, **{f"paged_kv_{n}": x for n, x in table.items()})
    base |= step("plan", **sizes) | run | step("run", q=Q, causal=True)
    cls = cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper
    found.append(Entry("shared prefill", wrapper(cls), base, {}, shared, rules))
    base = step("run", q=values(3, HQ, D), k_shared=PREFIX[0], v_shared=PREFIX[1])
    base |= step("run", k_unique=values(3, 4, HKV, D), v_unique=values(3, 4, HKV, D))
    call = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache
    found.append(Entry("padded", function(call), base, {}, shared, rules))
    return found


# --- those that are compared with plain calls of their own ---


def sparse_entries() -> list[Entry]:
    rules: dict[str, Any] = dict.fromkeys(("backend", "rope_scale", "rope_theta"), ignored)
    rules |= dict.fromkeys(("plan.q_scale", "plan.k_scale", "plan.v_scale"), nothing)
    rules |= {"mask": array(bool), "pos_encoding_mode": or_default(one_of("NONE"), "NONE")}
    rules |= {"o_data_type": or_default(dtype, HALF)}
    rows, columns = values(8, HQ, D), values(2, 12, HKV, D)
    base = MAKE | step("plan", indptr=ints(0, 2, 3), indices=ints(0, 2, 1), M=8, N=12, R=4, C=4)
    base |= step("plan", **SIZES, head_dim=D)
    base |= step("run", q=rows, k=columns[0], v=columns[1], return_lse=True)
    samples = {"mask": bools(3, 4, 4), "packed_mask": little(bools(48)), "out": rows * 0}
    samples |= {"lse": np.zeros((8, HQ), np.float32), "scale_q": OF_HEADS, "scale_k": OF_HEADS[:2]}
    samples |= {"scale_v": OF_HEADS[:2], "block_mask": bools(HKV, 2, 3)}
    cls: Any = cupyattn.BlockSparseAttentionWrapper
    found = [Entry("block sparse", wrapper(cls), base, samples, rules=rules)]
    base = MAKE | step("plan", block_mask_map=bools(HKV, 2, 3), **SIZES, head_dim=D)
    base |= step("plan", block_row_sz=np.array([[3, 5], [4, 4]]), q_data_type="float16")
    base |= step("plan", block_col_sz=np.array([[4, 4, 4], [6, 1, 5]]))
    q, k, v = (x.swapaxes(0, 1).copy() for x in (rows, *columns))
    base |= step("run", q=q, k=k, v=v, return_lse=True)
    cls = cupyattn.VariableBlockSparseAttentionWrapper
    samples = {"out": q * 0, "lse": np.zeros((HQ, 8), np.float32)}
    return [*found, Entry("variable block sparse", wrapper(cls), base, samples, rules=rules)]


def pod_entries() -> list[Entry]:
    rules = {"use_cuda_graph": flag_off, "q_data_type": dtype}
    sizes = {**SIZES, "head_dim": D, "page_size": PAGE}
    table = {"indptr": INDPTR, "indices": IDS, "last_page_len": LAST}
    base = MAKE | step("plan", **table, **sizes)
    base |= step("run", q_p=Q, k_p=values(9, HKV, D), v_p=values(9, HKV, D), q_d=values(3, HQ, D))
    base |= step("run", paged_kv_cache_d=POOL, causal_p=True, return_lse_p=True, return_lse_d=True)
    mask = bools(5, 9)
    samples = {"custom_mask_p": mask, "packed_custom_mask_p": little(mask), "q_scale": OF_HEADS}
    samples |= {"lse_p": np.zeros((5, HQ), np.float32), "lse_d": np.zeros((3, HQ), np.float32)}
    cls: Any = cupyattn.PODWithPagedKVCacheWrapper
    outputs: Any = {"rules": rules, "written": ("lse_p", "lse_d")}
    found = [Entry("pod", wrapper(cls), base, samples, **outputs)]
    base = MAKE | step("plan", qo_indptr_p=ROWS, qo_indptr_d=ints(0, 1, 2, 3), **sizes)
    base |= step(
        "plan", **{f"kv_{n}_{p}": x for n, x in table.items() if "kv" not in n for p in "pd"}
    )
    base = {n: x for n, x in base.items() if "last_page_len" not in n}
    base |= step("plan", last_page_len_p=LAST, last_page_len_d=LAST)
    base |= step("run", q_p=Q, paged_kv_cache_p=POOL, q_d=values(3, HQ, D), paged_kv_cache_d=POOL)
    base |= step("run", causal_p=True, return_lse=True)
    cls = cupyattn.BatchPODWithPagedKVCacheWrapper
    return [*found, Entry("batch pod", wrapper(cls), base, samples, **outputs)]


def row_entries() -> list[Entry]:
    """TensorRT-LLM's calls over rows."""
    names = "backend", "o_sf_scale"
    rules: dict[str, Any] = dict.fromkeys(names, ignored)
    rules |= dict.fromkeys(("seq_lens", "cum_seq_lens_q"), or_default(lengths))
    rules |= {"pos_encoding_mode": or_default(one_of("NONE", "alibi", "ALIBI"))}
    table = {"workspace_buffer": WORKSPACE, "seq_lens": LENS, "max_q_len": 4, "max_kv_len": 9}
    table |= {"bmm1_scale": 0.25, "bmm2_scale": 0.5, "batch_size": 3}
    table |= {"cum_seq_lens_q": ints(0, 2, 2, 5), "cum_seq_lens_kv": ints(0, 9, 13, 18)}
    k, v = values(18, HKV, D), values(18, HKV, D)
    samples = {"attention_sinks": OF_HEADS, "sinks": OF_HEADS, "out": Q * 0}
    samples |= {"lse": np.zeros((5, HQ), np.float32)}
    call: Any = cupyattn.trtllm_ragged_attention_deepseek
    base = step("run", query=Q, key=k, value=v, **table, o_sf_scale=1.0, window_left=-1)
    base |= step("run", enable_pdl=None, is_causal=True, return_lse=True)
    found = [Entry("deepseek", function(call), base, samples, rules=rules)]
    base = step("run", qkv=(Q, k, v), input_layout="SEPARATE_Q_K_V", **table, return_lse=True)
    call = cupyattn.trtllm_fmha_v2_prefill
    threshold = or_default(above(0.0, is_open=False), 0)
    rules = rules | {"skip_softmax_threshold_scale_factor": threshold}
    return [*found, Entry("fmha", function(call), base, samples, rules=rules)]


def flash_entries() -> list[Entry]:
    """FA3's calls."""
    from cupyattn import flash_attn as flash

    rules = {"q": keys, "sinks": floats, "output_scale": nothing}
    q, k, v = values(2, 3, HQ, D), values(2, 7, HKV, D), values(2, 7, HKV, D)
    lse = step("run", return_softmax_lse=True)
    samples = {"sinks": OF_HEADS, "s_aux": OF_HEADS, "alibi_slopes": OF_HEADS, "out": q * 0}
    samples |= {"k_descale": OF_HEADS[:2], "q_descale": OF_HEADS[:2], "v_descale": OF_HEADS[:2]}
    written: Any = {"rules": rules, "written": ("out",)}
    base = step("run", q=q, k=k, v=v, causal=True) | lse
    calls: Any = flash
    found = [Entry("flash", function(calls.flash_attn_func), base, samples, **written)]
    base = step("run", q=Q, k=values(18, HKV, D), v=values(18, HKV, D), causal=True) | lse
    base |= step("run", cu_seqlens_q=ROWS, cu_seqlens_k=ints(0, 9, 13, 18))
    base |= step("run", max_seqlen_q=3, max_seqlen_k=9, window_size=(4, 0))
    call = calls.flash_attn_varlen_func
    samples |= {"seqused_q": ints(2, 0, 2), "seqused_k": ints(8, 4, 5), "out": Q * 0}
    found.append(Entry("flash varlen", function(call), base, samples, **written))
    base = step("run", q=q, k_cache=k, v_cache=v, cache_seqlens=ints(4, 0), causal=True) | lse
    base |= step("run", k=values(2, 3, HKV, D), v=values(2, 3, HKV, D))
    samples |= {"cache_batch_idx": ints(1, 0), "cache_leftpad": ints(1, 0), "out": q * 0}
    samples |= {n: values(7, D // 2, dtype=np.float32) for n in ("rotary_cos", "rotary_sin")}
    entry = Entry("flash kvcache", function(calls.flash_attn_with_kvcache), base, samples)
    found.append(entry._replace(rules=rules, written=("out", "k_cache", "v_cache")))
    states = step("run", v_a=Q, s_a=values(5, HQ, dtype=np.float32), v_b=Q[::-1].copy())
    states |= step("run", s_b=values(5, HQ, dtype=np.float32))
    samples = {"v_merged": Q * 0, "s_merged": np.zeros((5, HQ), np.float32)}
    entry = Entry("merge_state_v2", function(calls.merge_state_v2), states, samples)
    found.append(entry._replace(written=("v_merged", "s_merged"), filled=("s_merged",)))
    states = step("run", output=Q * 0, prefix_output=Q, suffix_output=Q[::-1].copy())
    states |= step("run", prefix_lse=values(HQ, 5, dtype=np.float32))
    states |= step("run", suffix_lse=values(HQ, 5, dtype=np.float32))
    samples = {"output_lse": np.zeros((HQ, 5), np.float32)}
    entry = Entry("merge_attn_states", function(calls.merge_attn_states), states, samples)
    entry = entry._replace(rules={"output": floats, "output_scale": nothing})
    found.append(entry._replace(written=("output", "output_lse"), filled=("output_lse",)))
    base = step("run", out_partial=values(3, 5, HQ, D, dtype=np.float32))
    base |= step("run", lse_partial=values(3, 5, HQ, dtype=np.float32))
    call = function(calls.flash_attn_combine)
    return [*found, Entry("combine", call, base, {"out": Q * 0}, written=("out",))]


def older_entries(planned: list[Entry]) -> list[Entry]:
    """forward(), which changes the plan, and plans by fast_decode_plan."""
    found = []
    for entry in planned:
        if entry.name in ("decode", "paged", "ragged"):
            (make, cls), plan, _ = entry.steps
            base = {n: x for n, x in entry.base.items() if n != "plan.q_len_per_req"}
            if entry.name == "decode":
                base["run.q"] = values(3, HQ, D)
            old: Any = (make, cls), plan, ("run", cls.forward)  # type: ignore[attr-defined]
            share = {"plan.cp_world_size": whole(1)}  # a row without a window sees its share's keys
            rules = {**entry.rules, **(share if entry.name == "decode" else {})}
            found.append(Entry(f"{entry.name}, forward", old, base, rules=rules))
    decode = planned[0]
    make, (_, plan), run = decode.steps

    @functools.wraps(plan)
    def fast(wrapper: Any, **arguments: Any) -> Any:
        return cupyattn.fast_decode_plan(wrapper, **arguments)

    found.append(decode._replace(name="fast decode plan", steps=(make, ("plan", fast), run)))
    return found


# Entries have the same numbers whoever has drawn before.
_STATE = wrong_entries.RNG.bit_generator.state


def entries() -> list[Entry]:
    wrong_entries.RNG.bit_generator.state = _STATE
    planned = planned_entries()
    return [
        *(*singles(), *planned, *table_entries(), *op_entries(), *sharing_entries()),
        *(*sparse_entries(), *pod_entries(), *row_entries(), *older_entries(planned)),
        *flash_entries(),
        *latent_entries(),
    ]

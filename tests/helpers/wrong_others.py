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
from .wrong_calls import Arguments, Entry
from .wrong_entries import (
    HALF,
    HKV,
    HQ,
    IDS,
    INDPTR,
    LAST,
    OF_HEADS,
    PAGE,
    POOL,
    ROWS,
    RULES,
    SIZES,
    D,
    Q,
    a_dtype,
    answers,
    bools,
    check_dims,
    flag_off,
    floats,
    indices,
    ints,
    keys,
    lengths,
    little,
    logits,
    or_default,
    pages,
    planned_dtypes,
    planned_entries,
    run_scales,
    several,
    singles,
    step,
    values,
    workspace,
)
from .wrong_latent import latent_entries
from .wrong_tables import LENS, bound, op_entries, table_entries
from .wrong_values import Rejected, array, flag, ignored, nothing, number, one_of, scale, whole

MAKE = step("make", float_workspace_buffer=WORKSPACE)
PREFIX = values(2, 7, HKV, D)


def steps(cls: Any, run: str = "run") -> Any:
    return (("make", cls), ("plan", cls.plan), ("run", getattr(cls, run)))


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
    rules = RULES | dict.fromkeys((*names, "paged_kv_last_page_len"), several(indices))
    rules |= {f"run.{n}_scale": scale for n in "kv"} | {"make.workspace_buffer": ignored}
    rules |= {"plan.use_fp16_qk_reduction": ignored, "num_levels": whole(1, 32)}
    rules |= {f"make.{n}_buf_arr": ignored for n in ("qo_indptr", "paged_kv_indptr")}
    rules |= {f"make.paged_kv_{n}_buf_arr": ignored for n in ("indices", "last_page_len")}
    rules |= {"run.kv_layout": one_of("NHD", "HND"), "make.use_cuda_graph": flag_off}
    rules |= {"plan.q_data_type": or_default(a_dtype, HALF)}
    levels = [[ints(0, 5), ROWS], [ints(0, 2), INDPTR], [ints(6, 4), IDS], [ints(3), LAST]]
    base = MAKE | step("make", num_levels=2) | step("plan", **SIZES, head_dim=D, page_size=PAGE)
    base |= {
        f"plan.{n}": x for n, x in zip((*names, "paged_kv_last_page_len"), levels, strict=True)
    }
    base |= step("plan", causal=True) | step("run", q=Q, paged_kv_cache=POOL, return_lse=True)
    samples = {"sinks": OF_HEADS, "out": Q * 0, "lse": np.zeros((5, HQ), np.float32)}
    samples |= {"run.k_scale": OF_HEADS[:2], "run.v_scale": OF_HEADS[:2]}
    cls: Any = cupyattn.MultiLevelCascadeAttentionWrapper
    found = [Entry("cascade", steps(cls), base, rules, samples, cascade)]
    of_tables = ("unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len", "qo_indptr")
    of_pages = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    rules = rules | dict.fromkeys((*of_tables, *of_pages), indices)
    rules |= dict.fromkeys(("use_fp16_qk_reduction", "rope_scale", "rope_theta"), ignored)
    table = {"indptr": INDPTR, "indices": IDS, "last_page_len": LAST}
    run = step("run", k_shared=PREFIX[0], v_shared=PREFIX[1], unique_kv_cache=POOL)
    sizes = {**SIZES, "head_dim": D, "page_size": PAGE}
    base = MAKE | step("plan", **{f"unique_kv_{n}": x for n, x in table.items()}, **sizes)
    cls = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
    decode = base | run | step("run", q=values(3, HQ, D))
    ahead = rules | {"unique_kv_data": or_ignored(pages), "page_size": or_default(whole(1), None)}
    found.append(Entry("shared decode", steps(cls), decode, ahead, {}, shared))
    base = MAKE | step("plan", qo_indptr=ROWS, **{f"paged_kv_{n}": x for n, x in table.items()})
    base |= step("plan", **sizes) | run | step("run", q=Q, causal=True)
    cls = cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper
    found.append(Entry("shared prefill", steps(cls), base, ahead, {}, shared))
    base = step("run", q=values(3, HQ, D), k_shared=PREFIX[0], v_shared=PREFIX[1])
    base |= step("run", k_unique=values(3, 4, HKV, D), v_unique=values(3, 4, HKV, D))
    call = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache
    found.append(Entry("padded", (("run", call),), base, rules, {}, shared))
    return found


def or_ignored(rule: Any) -> Any:
    """An older name, which is not read where the newer one is given."""

    def meant(value: Any) -> Any:
        try:
            return rule(value)
        except Exception:  # values raise what they like
            return None

    return meant


# --- those that are compared with plain calls of their own ---


def _without(rules: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: rule for name, rule in rules.items() if name not in names}


def sparse_entries() -> list[Entry]:
    rules = RULES | dict.fromkeys(("indptr", "indices", "block_row_sz", "block_col_sz"), indices)
    rules |= {"mask": array(bool), "packed_mask": array(np.uint8), "block_mask": array(bool)}
    rules |= {
        "block_mask_map": array(bool),
        "pos_encoding_mode": or_default(one_of("NONE"), "NONE"),
    }
    refused = ("kv_block_lens", "q2k_indices", "q2k_num", "plan.q_scale", "plan.k_scale")
    rules |= dict.fromkeys((*refused, "plan.v_scale"), nothing)
    rules |= dict.fromkeys(("use_clc", "kv_splits", "rope_scale", "rope_theta"), ignored)
    rules |= dict.fromkeys(("backend", "use_fp16_qk_reduction"), ignored)
    rules |= dict.fromkeys(("o_data_type", "q_data_type"), or_default(a_dtype, HALF))
    rows, columns = values(8, HQ, D), values(2, 12, HKV, D)
    base = MAKE | step("plan", indptr=ints(0, 2, 3), indices=ints(0, 2, 1), M=8, N=12, R=4, C=4)
    base |= step("plan", **SIZES, head_dim=D)
    base |= step("run", q=rows, k=columns[0], v=columns[1], return_lse=True)
    samples = {"mask": bools(3, 4, 4), "packed_mask": little(bools(48)), "out": rows * 0}
    samples |= {"lse": np.zeros((8, HQ), np.float32), "scale_q": OF_HEADS, "scale_k": OF_HEADS[:2]}
    samples |= {"scale_v": OF_HEADS[:2], "block_mask": bools(HKV, 2, 3)}
    cls: Any = cupyattn.BlockSparseAttentionWrapper
    found = [Entry("block sparse", steps(cls), base, rules, samples)]
    base = MAKE | step("plan", block_mask_map=bools(HKV, 2, 3), **SIZES, head_dim=D)
    base |= step("plan", block_row_sz=np.array([[3, 5], [4, 4]]), q_data_type="float16")
    base |= step("plan", block_col_sz=np.array([[4, 4, 4], [6, 1, 5]]))
    q, k, v = (x.swapaxes(0, 1).copy() for x in (rows, *columns))
    base |= step("run", q=q, k=k, v=v, return_lse=True)
    cls = cupyattn.VariableBlockSparseAttentionWrapper
    samples = {"out": q * 0, "lse": np.zeros((HQ, 8), np.float32)}
    return [*found, Entry("variable block sparse", steps(cls), base, rules, samples)]


def pod_entries() -> list[Entry]:
    parts = {"indptr": indices, "indices": indices, "last_page_len": indices}
    rules = RULES | parts | {f"{n}_{part}": rule for n, rule in parts.items() for part in "pd"}
    rules |= {f"kv_{n}_{part}": rule for n, rule in parts.items() for part in "pd"}
    rules |= {f"qo_indptr_{part}": indices for part in "pd"}
    for part in "pd":
        for name in ("causal", "kv_layout", "sm_scale", "window_left", "return_lse", "rope_scale"):
            rules[f"{name}_{part}"] = RULES[name]
        for name in ("rope_theta", "pos_encoding_mode", "custom_mask", "packed_custom_mask"):
            rules[f"{name}_{part}"] = RULES[name]
        rules[f"return_lse_{part}"] = ignored
        rules |= {f"q_{part}": floats, f"paged_kv_cache_{part}": pages}
    rules |= {"k_p": keys, "v_p": keys, "use_fp16_qk_reduction": ignored, "causal_d": ignored}
    rules |= {"kv_layout_d": ignored, "custom_mask_d": nothing, "packed_custom_mask_d": nothing}
    rules |= {"pos_encoding_mode_d": or_default(RULES["pos_encoding_mode"], None)}
    rules |= {f"run.{n}_scale": scale for n in "qkv"}
    rules |= {f"make.paged_kv_{n}_buffer": ignored for n in parts} | {"use_cuda_graph": flag_off}
    sizes = {**SIZES, "head_dim": D, "page_size": PAGE}
    table = {"indptr": INDPTR, "indices": IDS, "last_page_len": LAST}
    base = MAKE | step("plan", **table, **sizes)
    base |= step("run", q_p=Q, k_p=values(9, HKV, D), v_p=values(9, HKV, D), q_d=values(3, HQ, D))
    base |= step("run", paged_kv_cache_d=POOL, causal_p=True, return_lse_p=True, return_lse_d=True)
    mask = bools(5, 9)
    samples = {"custom_mask_p": mask, "packed_custom_mask_p": little(mask), "q_scale": OF_HEADS}
    samples |= {"lse_p": np.zeros((5, HQ), np.float32), "lse_d": np.zeros((3, HQ), np.float32)}
    cls: Any = cupyattn.PODWithPagedKVCacheWrapper
    written = "lse_p", "lse_d"
    found = [Entry("pod", steps(cls), base, rules, samples, None, written)]
    base = MAKE | step("plan", qo_indptr_p=ROWS, qo_indptr_d=ints(0, 1, 2, 3), **sizes)
    base |= step(
        "plan", **{f"kv_{n}_{p}": x for n, x in table.items() if "kv" not in n for p in "pd"}
    )
    base = {n: x for n, x in base.items() if "last_page_len" not in n}
    base |= step("plan", last_page_len_p=LAST, last_page_len_d=LAST)
    base |= step("run", q_p=Q, paged_kv_cache_p=POOL, q_d=values(3, HQ, D), paged_kv_cache_d=POOL)
    base |= step("run", causal_p=True, return_lse=True)
    cls = cupyattn.BatchPODWithPagedKVCacheWrapper
    return [*found, Entry("batch pod", steps(cls), base, rules, samples, None, written)]


def row_entries() -> list[Entry]:
    """TensorRT-LLM's calls over rows."""
    names = ("seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")
    rules = (
        RULES
        | dict.fromkeys(names, or_default(lengths, None))
        | {"batch_size": whole(0), "block_tables": indices}
    )
    rules |= dict.fromkeys(("max_q_len", "max_kv_len"), bound) | {
        "chunked_attention_size": whole(0)
    }
    rules |= dict.fromkeys(("num_elts_per_sage_attn_blk", "q_seq_lens_cpu"), ignored)
    rules |= dict.fromkeys(("kv_seq_lens_cpu", "use_fp16_softmax", "uses_spcompress"), ignored)
    rules |= {"o_sf_scale": ignored, "backend": ignored, "sage_attn_sfs": _nones}
    rules |= dict.fromkeys(("bmm1_scale", "bmm2_scale"), or_default(number, 1.0))
    rules |= {"skip_softmax_threshold_scale_factor": ignored, "qkv": several(floats)}
    rules |= {"workspace_buffer": or_default(workspace, None)}
    rules |= {"input_layout": one_of("SEPARATE_Q_K_V"), "save_softmax_stats": flag_off}
    rules |= {"mask_mode": one_of("causal", "sliding_window", "padding")}
    rules |= {"pos_encoding_mode": or_default(one_of("NONE", "alibi", "ALIBI"), None)}
    rules |= {"is_causal": flag}
    table = {"workspace_buffer": WORKSPACE, "seq_lens": LENS, "max_q_len": 4, "max_kv_len": 9}
    table |= {"bmm1_scale": 0.25, "bmm2_scale": 0.5, "batch_size": 3}
    table |= {"cum_seq_lens_q": ints(0, 2, 2, 5), "cum_seq_lens_kv": ints(0, 9, 13, 18)}
    k, v = values(18, HKV, D), values(18, HKV, D)
    samples = {"attention_sinks": OF_HEADS, "sinks": OF_HEADS, "out": Q * 0}
    samples |= {"lse": np.zeros((5, HQ), np.float32)}
    call: Any = cupyattn.trtllm_ragged_attention_deepseek
    base = step("run", query=Q, key=k, value=v, **table, o_sf_scale=1.0, window_left=-1)
    base |= step("run", enable_pdl=None, is_causal=True, return_lse=True)
    found = [Entry("deepseek", (("run", call),), base, rules, samples)]
    base = step("run", qkv=(Q, k, v), input_layout="SEPARATE_Q_K_V", **table, return_lse=True)
    call = cupyattn.trtllm_fmha_v2_prefill
    return [*found, Entry("fmha", (("run", call),), base, rules, samples)]


def flash_entries() -> list[Entry]:
    """FA3's calls."""
    from cupyattn import flash_attn as flash

    of_indices = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    of_cache = ("cache_batch_idx", "cache_leftpad", "cu_seqlens_k_new", "rotary_seqlens")
    rules = RULES | dict.fromkeys((*of_indices, *of_cache, "block_table"), indices)
    rules |= dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), keys)
    rules |= {"cache_seqlens": _lengths_or_one, "softmax_scale": number, "window_size": _sides}
    rules |= {"softcap": or_default(RULES["logits_soft_cap"], 0.0)}
    rules |= dict.fromkeys(("sinks", "s_aux", "v_a", "v_b", "s_a", "s_b"), floats)
    rules |= dict.fromkeys(("out_partial", "lse_partial"), floats)
    rules |= dict.fromkeys(("output", "prefix_output", "suffix_output"), floats)
    rules |= dict.fromkeys(("prefix_lse", "suffix_lse", "output_lse"), floats)
    rules |= {"prefill_tokens_with_context": or_default(whole(0), None), "output_scale": nothing}
    rules |= dict.fromkeys(("rotary_cos", "rotary_sin"), floats)
    rules |= dict.fromkeys(("return_attn_probs", "return_softmax_lse", "rotary_interleaved"), flag)
    rules |= {
        "attention_chunk": whole(0),
        "dropout_p": or_default(_zero, 0.0),
        "cp_world_size": whole(1, 1),
    }
    refused = ("qv", "q_v", "output_scale", "score_mod", "mask_mod", "block_sparse_tensors")
    rules |= dict.fromkeys((*refused, "aux_tensors", "aux_tensor_leading_dims"), nothing)
    rules |= {"dynamic_causal": or_default(indices, None), "cp_tot_seqused_k": nothing}
    taken = ("scheduler_metadata", "fa_version", "ver", "cp_rank", "pack_gqa", "deterministic")
    rules |= dict.fromkeys((*taken, "sm_margin"), ignored) | {"num_splits": whole(-(2**31))}
    rules |= {"alibi_slopes": array(np.float32)}
    # They scale fp8 values alone, and positions those that are rotated.
    rules |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), ignored)
    rules |= {"rotary_seqlens": or_ignored(indices)}
    rules |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), _most)
    q, k, v = values(2, 3, HQ, D), values(2, 7, HKV, D), values(2, 7, HKV, D)
    lse = step("run", return_softmax_lse=True)
    samples = {"sinks": OF_HEADS, "s_aux": OF_HEADS, "alibi_slopes": OF_HEADS, "out": q * 0}
    samples |= {"k_descale": OF_HEADS[:2], "q_descale": OF_HEADS[:2], "v_descale": OF_HEADS[:2]}
    written = ("out",)
    base = step("run", q=q, k=k, v=v, causal=True) | lse
    calls: Any = flash
    found = [Entry("flash", (("run", calls.flash_attn_func),), base, rules, samples, None, written)]
    base = step("run", q=Q, k=values(18, HKV, D), v=values(18, HKV, D), causal=True) | lse
    base |= step("run", cu_seqlens_q=ROWS, cu_seqlens_k=ints(0, 9, 13, 18))
    base |= step("run", max_seqlen_q=3, max_seqlen_k=9, window_size=(4, 0))
    call = calls.flash_attn_varlen_func
    samples |= {"seqused_q": ints(2, 0, 2), "seqused_k": ints(8, 4, 5), "out": Q * 0}
    found.append(Entry("flash varlen", (("run", call),), base, rules, samples, None, written))
    base = step("run", q=q, k_cache=k, v_cache=v, cache_seqlens=ints(4, 0), causal=True) | lse
    base |= step("run", k=values(2, 3, HKV, D), v=values(2, 3, HKV, D))
    samples |= {"cache_batch_idx": ints(1, 0), "cache_leftpad": ints(1, 0), "out": q * 0}
    samples |= {n: values(7, D // 2, dtype=np.float32) for n in ("rotary_cos", "rotary_sin")}
    call, of_caches = calls.flash_attn_with_kvcache, ("out", "k_cache", "v_cache")
    entry = Entry("flash kvcache", (("run", call),), base, rules, samples, None, of_caches)
    found.append(entry)
    states = step("run", v_a=Q, s_a=values(5, HQ, dtype=np.float32), v_b=Q[::-1].copy())
    states |= step("run", s_b=values(5, HQ, dtype=np.float32))
    samples = {"v_merged": Q * 0, "s_merged": np.zeros((5, HQ), np.float32)}
    written = ("v_merged", "s_merged")
    call = calls.merge_state_v2
    entry = Entry("merge_state_v2", (("run", call),), states, rules, samples, None, written)
    found.append(entry._replace(filled=("s_merged",)))
    states = step("run", output=Q * 0, prefix_output=Q, suffix_output=Q[::-1].copy())
    states |= step("run", prefix_lse=values(HQ, 5, dtype=np.float32))
    states |= step("run", suffix_lse=values(HQ, 5, dtype=np.float32))
    samples = {"output_lse": np.zeros((HQ, 5), np.float32)}
    written = ("output", "output_lse")
    call = calls.merge_attn_states
    entry = Entry("merge_attn_states", (("run", call),), states, rules, samples, None, written)
    found.append(entry._replace(filled=("output_lse",)))
    base = step("run", out_partial=values(3, 5, HQ, D, dtype=np.float32))
    base |= step("run", lse_partial=values(3, 5, HQ, dtype=np.float32))
    call, samples = calls.flash_attn_combine, {"out": Q * 0}
    return [*found, Entry("combine", (("run", call),), base, rules, samples, None, ("out",))]


def _lengths_or_one(value: Any) -> Any:
    return indices(value) if isinstance(value, np.ndarray) and value.ndim else whole(0)(value)


def _zero(value: Any) -> float:
    if number(value):
        raise Rejected
    return 0.0


def _sides(value: Any) -> Any:
    if value is None:
        return -1, -1
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise Rejected
    return tuple(-1 if x is None else whole(-1)(x) for x in value)


def _most(value: Any) -> Any:
    """An integer, or an array of one."""
    is_one = isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu"
    return None if value is None else bound(value.reshape(-1)[0].item() if is_one else value)


def _nones(value: Any) -> None:
    if any(x is not None for x in value):
        raise Rejected


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
            rules = entry.rules | {"run.use_fp16_qk_reduction": ignored}
            found.append(Entry(f"{entry.name}, forward", old, base, rules, {}))
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

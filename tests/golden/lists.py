"""Calls of sparse attention of the sizes that models have, by the means of large.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.cases import pick

from cupyattn import flash_mla, sparse

from .cards import Card
from .large import Batch, offsets
from .small import Drawn

# (query heads, KV heads, columns), keys of a block, entries of a list: MiniMax-M3, QSA, others
_ATTENDED = (
    *(((64, 4, 128), 128, 16), ((16, 1, 128), 128, 16), ((24, 2, 256), 4, 512)),
    *(((32, 8, 128), 64, 16), ((16, 16, 64), 8, 64), ((12, 1, 256), 1, 2051)),
)
# (index heads, columns), score, keys of a block and of an index row, entries of a list
_SELECTED: tuple[tuple[tuple[int, int], str, int, int, int], ...] = (
    *(((4, 128), "max", 128, 1, 16), ((64, 128), "relu_sum", 1, 1, 2048)),
    *(((4, 128), "relu_sum", 4, 4, 512), ((1, 128), "max", 128, 1, 16)),
    *(((64, 128), "relu_sum", 1, 1, 512), ((8, 64), "max", 64, 1, 32)),
)


def _kind(rng: np.random.Generator) -> str:
    return pick(rng, ("decode", "decode", "verify", "chunks", "prompts"))


def _tokens(b: Batch) -> dict[str, Any]:
    """Offsets of tokens where requests have different numbers of them, or keys of several rows."""
    if (b.rows == b.rows[0]).all():
        return {}
    return {"indptr": b.ints("indptr", offsets(b.rows), "int32")}


def attend(seed: int, card: Card) -> Drawn:
    """sparse.attend over pages or rows of all requests."""
    rng = np.random.default_rng((seed, 113))
    b = Batch(rng, card, _kind(rng), pick(rng, (16, 16, 64, 128)))
    heads, block, width = pick(rng, _ATTENDED)
    (b.heads, b.kv_heads, b.dim), b.dtype = heads, pick(rng, ("bfloat16", "bfloat16", "float16"))
    b.dim_v, b.kv_dtype = b.dim, pick(rng, (b.dtype, b.dtype, "float8_e4m3fn"))
    groups, tokens = pick(rng, (1, b.kv_heads, b.kv_heads)), int(b.rows.sum())
    lists = b.ints("lists", np.zeros((tokens, groups, width)), "int32")
    given = b.choose(
        window=lambda: pick(rng, (64, 128)),
        sinks=b.sinks,
        output_gate=lambda: b.array("gate", tokens, b.heads, b.dim),
        logits_soft_cap=lambda: 30.0,
        return_lse=lambda: True,
    )
    if b.kv_dtype != b.dtype:
        given |= {"k_scale": 0.5, "v_scale": 0.5}
    given |= _tokens(b)
    q, text = b.q(tokens), f"{b} by {groups} lists of {width} x {block}"
    if rng.random() < 0.3:
        b.page_size = 0
        k, v = b.flat()
        given["kv_indptr"] = b.ints("kv_indptr", offsets(b.keys), "int32")
        return f"{text} in rows", lambda: sparse.attend(
            q, (k, v), lists, granularity=block, **given
        )
    cache, table, lens = b.cache(), b.block_tables(), b.ints("lengths", b.keys, "int32")
    given["kv_layout"] = b.layout
    return text, lambda: sparse.attend(q, cache, lists, table, lens, granularity=block, **given)


def select(seed: int, card: Card) -> Drawn:
    """sparse.select over pages of 16 or 8 bits, with and without the scales of rows."""
    rng = np.random.default_rng((seed, 114))
    b = Batch(rng, card, _kind(rng), pick(rng, (16, 64, 64, 128)))
    (heads, dim), score, block, ratio, topk = pick(rng, _SELECTED)
    form = pick(rng, ("bfloat16", "bfloat16", "float8_e4m3fn", "fused"))
    tokens, size = int(b.rows.sum()), b.page_size
    q = b.array(
        "q_index", tokens, heads, dim, dtype="bfloat16" if form != "fused" else "float8_e4m3fn"
    )
    if form == "fused":
        cache = b.array("index_cache", b.num_pages, size, 1, dim + 4, dtype="uint8")
    else:
        cache = b.array("index_cache", b.num_pages, size, dim, dtype=form)
    given: dict[str, Any] = {"topk": topk, "block": block, "ratio": ratio, "score": score}
    if score == "relu_sum" and rng.random() < 0.7:
        given["weights"] = b.array("weights", tokens, heads, dtype="float32")
    given |= b.choose(
        first=lambda: 1,
        last=lambda: pick(rng, (1, 2)),
        return_values=lambda: True,
        sm_scale=lambda: 0.11,
    )
    if ratio > 1 and rng.random() < 0.5:
        given["tail"] = True
    given |= _tokens(b)
    table, lens = b.block_tables(), b.ints("lengths", b.keys, "int32")
    text = (
        f"{b.kind} {b.count} x {b.rows.max()} of {b.keys.max()}, {heads} of {dim}, {score} {form}"
    )
    return f"{text}, {topk} x {block}", lambda: sparse.select(q, cache, table, lens, **given)


def latent(seed: int, card: Card) -> Drawn:
    """Lists of two latent caches, and of DeepSeek-V4's pages of 584 bytes."""
    rng = np.random.default_rng((seed, 115))
    b = Batch(rng, card, pick(rng, ("decode", "decode", "verify")), 64)
    b.heads, b.dtype = pick(rng, (16, 64, 128)), "bfloat16"
    width, form = pick(rng, (512, 576)), pick(rng, ("plain", "scaled", "scaled"))
    rows, window, topk = int(b.rows.max()), 128, pick(rng, (512, 1024))
    has_second = width == 576 or rng.random() < 0.8
    columns = width if form == "plain" else {512: 584, 576: 656}[width]
    kind = "bfloat16" if form == "plain" else "uint8"
    b.dim = width
    q, caches, lists = b.q(b.count, rows), [], []
    for name, length in (("", window), ("extra ", topk)):
        caches.append(b.array(f"{name}cache", 256, 64, 1, columns, dtype=kind))
        zeros = np.zeros((b.count, rows, length))
        lists.append(b.ints(f"{name}indices", zeros, "int32"))
    given: dict[str, Any] = {"is_fp8_kvcache": form != "plain", "indices": lists[0]}
    if has_second:
        given |= {"extra_k_cache": caches[1], "extra_indices_in_kvcache": lists[1]}
    if rng.random() < 0.5:
        given["topk_length"] = b.ints("topk_length", np.zeros(b.count), "int32")
    if rng.random() < 0.5:
        given["attn_sink"] = b.sinks()
    text = f"{b.kind} {b.count} x {rows}, {b.heads} heads, {form} {columns}, {window} + {topk}"
    return f"{text}{'' if has_second else ' alone'}", lambda: flash_mla.flash_mla_with_kvcache(
        q, caches[0], None, None, 512, None, **given
    )

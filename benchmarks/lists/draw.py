"""Draws of calls by lists: the models of 2026 as decode, verification of drafts and prompts."""

from __future__ import annotations

import random
from typing import Any

from .case import ListCase

_MAX_BYTES = 3 << 30  # of keys and values in pages
_KEPT = (0.0, 0.7, 0.8, 0.9)
# What is drawn, by weights: family and phase.
_WEIGHTS = {
    ("m3", "decode"): 16,
    ("m3", "verify"): 8,
    ("m3", "prompt"): 14,
    ("qsa", "decode"): 10,
    ("qsa", "prompt"): 4,
    ("nsa", "decode"): 5,
    ("nsa", "prompt"): 5,
    ("dsa", "decode"): 14,
    ("dsa", "prompt"): 8,
    ("v4", "decode"): 6,
    ("blocks", "prompt"): 12,
}


def _log_uniform(generator: random.Random, minimum: int, maximum: int) -> int:
    return round(minimum * (maximum / minimum) ** generator.random())


def draw(generator: random.Random) -> ListCase:
    """One case; its name is to be replaced by one that has its label."""
    family, phase = generator.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if family == "blocks":
        return _blocks(generator)
    options = _FAMILIES[family](generator, phase)
    if phase == "decode":
        options["kept"] = 0.0  # neighbours are of other requests
    return _case(family, _requests(generator, phase, options), **options)


def _case(family: str, requests: tuple[tuple[int, int, int], ...], **options: Any) -> ListCase:
    return ListCase(
        "drawn",
        "lists",
        "lists",
        requests,
        causal=True,
        checked=4,
        has_nan=False,
        family=family,
        **options,
    )


def _requests(
    generator: random.Random, phase: str, options: dict[str, Any]
) -> tuple[tuple[int, int, int], ...]:
    """Requests of one length of tokens, and keys of one length or of several."""
    width = options["head_dim_qk"] + (0 if options["granularity"] == 1 else options["head_dim_vo"])
    row = options["num_kv_heads"] * width * (1 if options["kv_dtype"] != "bfloat16" else 2)
    if phase == "prompt":
        keys = _log_uniform(generator, 4096, 131072)
        most = 4096 if options["granularity"] < 64 else 8192
        return ((1, min(keys, generator.choice((1024, 2048, most))), keys),)
    q_len = generator.randint(2, 8) if phase == "verify" else 1
    count = _log_uniform(generator, 1, 64 if phase == "verify" else 128)
    median = min(_log_uniform(generator, 4096, 131072), max(2048, _MAX_BYTES // (row * count)))
    if count == 1 or generator.random() < 0.5:
        return ((count, q_len, median),)
    lengths = (round(median * generator.uniform(0.5, 1.0)) for _ in range(count))
    return tuple((1, q_len, length) for length in lengths)


def _m3(generator: random.Random, phase: str) -> dict[str, Any]:
    """MiniMax-M3: 16 blocks of 128 keys for each KV head."""
    shards = generator.choice((1, 1, 1, 2, 4))
    kv_dtype = "float8_e4m3fn" if generator.random() < 0.25 else "bfloat16"
    heads = {"num_qo_heads": 64 // shards, "num_kv_heads": 4 // shards, "lists": 4 // shards}
    dims = {"head_dim_qk": 128, "head_dim_vo": 128, "page_size": 128, "granularity": 128}
    return {**heads, **dims, "entries": 16, "kv_dtype": kv_dtype, "kept": generator.choice(_KEPT)}


def _nsa(generator: random.Random, phase: str) -> dict[str, Any]:
    """NSA's chosen blocks: 16 of 64 keys for each KV head."""
    shards = generator.choice((1, 2))
    heads = {"num_qo_heads": 64 // shards, "num_kv_heads": 4 // shards, "lists": 4 // shards}
    dims = {"head_dim_qk": 128, "head_dim_vo": 128, "page_size": 64, "granularity": 64}
    return {**heads, **dims, "entries": 16, "kv_dtype": "bfloat16", "kept": generator.choice(_KEPT)}


def _qsa(generator: random.Random, phase: str) -> dict[str, Any]:
    """QSA: 512 blocks of 4 keys and the last one, for all heads."""
    heads, kv_heads = generator.choice(((24, 2), (24, 2), (12, 1)))
    kv_dtype = "float8_e4m3fn" if generator.random() < 0.2 else "bfloat16"
    dims = {"head_dim_qk": 256, "head_dim_vo": 256, "page_size": 64, "granularity": 4}
    counts = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "entries": 513, "lists": 1}
    return {**dims, **counts, "kv_dtype": kv_dtype, "kept": generator.choice(_KEPT)}


def _dsa(generator: random.Random, phase: str) -> dict[str, Any]:
    """DSA: single keys of latent rows, 16-bit ones or of 656 bytes."""
    row_bytes = 656 if phase == "decode" and generator.random() < 0.5 else 0
    kv_dtype = "float8_e4m3fn" if row_bytes else "bfloat16"
    heads = generator.choice((16, 32, 64, 64, 128, 128))
    dims = {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "page_size": 64}
    lists = {"granularity": 1, "entries": generator.choice((512, 1024, 2048, 2048)), "lists": 1}
    bits = {"row_bytes": row_bytes, "kv_dtype": kv_dtype}
    return {"num_qo_heads": heads, **dims, **lists, **bits, "kept": generator.choice(_KEPT)}


def _v4(generator: random.Random, phase: str) -> dict[str, Any]:
    """DeepSeek-V4: 128 keys of a window, and a list over a cache of compressed ones."""
    dims = {"num_kv_heads": 1, "head_dim_qk": 512, "head_dim_vo": 512, "page_size": 64}
    lists = {"granularity": 1, "entries": generator.choice((512, 1024)), "lists": 1, "second": 128}
    bits = {"row_bytes": 584, "kv_dtype": "float8_e4m3fn"}
    return {"num_qo_heads": generator.choice((64, 128)), **dims, **lists, **bits}


def _blocks(generator: random.Random) -> ListCase:
    """A prompt whose causal mask has 10 to 50 % of its blocks."""
    heads, kv_heads = generator.choice(((32, 8), (32, 8), (16, 16), (64, 8)))
    rows, columns = generator.choice(((64, 64), (64, 64), (128, 128), (128, 64)))
    length = 128 * round(_log_uniform(generator, 4096, 32768 if heads < 64 else 16384) / 128)
    return _case(
        "blocks",
        ((1, length, length),),
        page_size=0,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        granularity=columns,
        block_rows=rows,
        entries=0,
        density=generator.choice((0.1, 0.25, 0.5)),
    )


_FAMILIES = {"m3": _m3, "nsa": _nsa, "qsa": _qsa, "dsa": _dsa, "v4": _v4}

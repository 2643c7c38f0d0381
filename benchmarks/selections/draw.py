"""Draws of selections: decode, two drafts, prompts and parts of prompts."""

from __future__ import annotations

import random

from .case import SelectionCase

_PHASES = {"decode": 8, "verify": 4, "prompt": 4}
_MOST_KEYS = 1 << 23  # of all requests
_MOST_PAIRS = 1 << 28
_LEAST = 4096


def draw(generator: random.Random) -> SelectionCase:
    """One case; its name is to be replaced by one that has its label."""
    phase = generator.choices(list(_PHASES), list(_PHASES.values()))[0]
    if phase == "prompt":
        tokens = _log_uniform(generator, 512, 8192)
        keys = max(tokens, _LEAST)
        if generator.random() < 0.5:
            keys = max(keys, _log_uniform(generator, _LEAST, 65536))
        return _case((1, min(tokens, _MOST_PAIRS // keys), keys), 0)
    drafts = 1 if phase == "decode" else 2
    keys = _log_uniform(generator, _LEAST, 131072)
    count = _log_uniform(generator, 1, 128 // drafts)
    return _case((min(count, _MOST_KEYS // keys), drafts, keys), 64)


def _log_uniform(generator: random.Random, minimum: int, maximum: int) -> int:
    return round(minimum * (maximum / minimum) ** generator.random())


def _case(requests: tuple[int, int, int], page_size: int) -> SelectionCase:
    return SelectionCase(
        "drawn",
        "select",
        "lists",
        (requests,),
        page_size,
        num_qo_heads=64,
        num_kv_heads=1,
        causal=True,
        dtype="float8_e4m3fn",
        kv_dtype="float8_e4m3fn",
        checked=4,
        has_nan=False,
    )

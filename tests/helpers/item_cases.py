"""Seeded random batches of multi-item scoring, through both prefill wrappers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from . import batch_cases
from .batch_cases import Case
from .cases import pick

NUM_CASES = 360


def random_case(seed: int) -> Case:
    """The same case for the same seed: one of batch_cases, without its mask."""
    rng = np.random.default_rng((seed, 82))
    case = batch_cases.random_case(int(rng.integers(1 << 30)))
    wrapper = pick(rng, ("paged", "ragged")) if case.page_size else "ragged"
    if wrapper == "ragged" and case.problem.o_dtype:
        wrapper = "paged"
    return replace(
        case,
        wrapper=wrapper,
        page_size=(case.page_size or 16) if wrapper == "paged" else 0,
        problem=replace(case.problem, is_masked=False),
        window_left=case.window_left if rng.random() < 0.3 else -1,
        split=case.split if case.split[0] is None else (pick(rng, (64, 128)) // 16, False),
        has_items=True,
    )


def with_lengths(case: Case, seed: int, qo_len: tuple[int, ...], kv_len: tuple[int, ...]) -> Case:
    return replace(case, seed=seed, qo_len=qo_len, kv_len=kv_len)


def random_items(case: Case) -> tuple[Iterable[tuple[str, Any]], list[np.ndarray]]:
    """What plan() is told, and the bool [qo_len, kv_len] masks that it stands for."""
    rng = np.random.default_rng((case.seed, 83))
    prefixes, rows, masks, longest = [], [], [], []
    for qo_len, kv_len in zip(case.qo_len, case.kv_len, strict=True):
        prefix = int(rng.integers(kv_len + 1)) if rng.random() < 0.9 else kv_len + 3
        # item 0 is the prefix, -1 a delimiter
        item, place = [0] * min(prefix, kv_len), []
        while len(item) < kv_len:
            size = int(rng.integers(0, pick(rng, (4, 40, 300))))
            item += [-1] + [len(item) + 1] * size
            place += range(size + 1)
        prefixes.append(prefix)
        rows.append(place[: max(0, kv_len - prefix)])
        longest.append(max(rows[-1], default=0))
        masks.append(_mask(np.array(item[:kv_len], int), qo_len))
    count = max((len(row) for row in rows), default=0) + int(rng.integers(1, 4))
    places = np.full((len(rows), count), 65535, np.uint16)
    for row, own in zip(places, rows, strict=True):
        row[: len(own)] = own
    wide = rng.random() < 0.3
    arguments = {
        "prefix_len_ptr": np.array(prefixes, np.int32 if wide else np.uint32),
        "token_pos_in_items_ptr": places.reshape(-1).astype(np.int64 if wide else np.uint16),
        "token_pos_in_items_len": count,
        "max_item_len_ptr": np.array(longest, np.uint16),
    }
    return arguments.items(), masks


def _mask(item: np.ndarray, qo_len: int) -> np.ndarray:
    """Row by row, from which item each key is of."""
    kv_len = item.size
    mask = np.zeros((qo_len, kv_len), bool)
    for row in range(qo_len):
        position = row + kv_len - qo_len
        if position < 0:
            continue
        own = item[position]
        mask[row, : position + 1] = (item == 0)[: position + 1]
        if own > 0:
            mask[row, : position + 1] |= (item == own)[: position + 1]
    return mask

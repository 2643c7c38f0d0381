"""What is chosen of tiles that were timed side by side: how much longer it takes than the best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.choose import card, old_names, tile_times
from cupyattn.choose.candidates import Batch, best_of
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU, DeviceProps
from cupyattn.core.problem import AttentionProblem
from cupyattn.schedule.batch import BatchRequests, TileWork
from cupyattn.schedule.masking import Masking

ROWS = Path(__file__).parents[3] / "benchmarks/results/2026-11-27-h100-tiles/head_dims.jsonl"
NUM_SMS = 132


def props_of(name: str) -> DeviceProps:
    found = next(x for x in card.shipped() if name in x.match)
    return replace(NO_GPU, name=name, arch=found.arch, num_sms=NUM_SMS)


def lengths(text: str | list[int]) -> np.ndarray:
    if isinstance(text, str):
        count, length = map(int, text.split("x"))
        return np.full(count, length, np.int64)
    return np.array(text, np.int64)


def chosen(row: dict[str, Any], props: DeviceProps) -> tuple[str, float]:
    """The tile of a plan of these requests, and its estimate."""
    kind = dtypes.bfloat16
    made = tile_times.large_tiles(AttentionProblem(kind, kind, kind, *row["dims"]), props, 0)
    heads, kv_heads = row["heads"]
    group = heads // kv_heads
    facts = group, kv_heads, NUM_SMS
    shapes = {name: tile_times.shape_of(*timed, *facts) for name, timed in made.items()}
    queries, keys = lengths(row["queries"]), lengths(row["keys"])
    requests = BatchRequests(queries, keys, queries.cumsum() - queries, keys.cumsum() - keys)
    works = TileWork(requests, group, Masking(-1, 0 if row["causal"] else -1))
    choice = best_of(Batch([("large", works)], works, kv_heads, group, 0, 0, None, None), shapes)
    return choice.name, choice.time


@pytest.mark.parametrize("rows", [ROWS], ids=lambda path: path.stem)
def test_chosen_tiles_take_hardly_longer_than_the_best(rows: Path) -> None:
    head, *timed = map(json.loads, rows.read_text().splitlines())
    props, regrets, errors = props_of(head["card"]), [], []
    for row in timed:
        name, estimate = chosen(row, props)
        dims = tuple(row["dims"])
        row["us"] = {old_names.tile(x, "ragged", dims): us for x, us in row["us"].items()}
        regrets.append(row["us"][name] / min(*row["us"].values(), *row["others"].values()))
        errors.append(abs(np.log(estimate / row["us"][name])))
    assert np.mean(regrets) <= 1.02
    assert np.quantile(regrets, 0.95) <= 1.10
    assert np.median(errors) <= 0.08

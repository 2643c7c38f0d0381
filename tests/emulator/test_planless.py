"""The entry points without a plan, kernels and all, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.planless_calls import ENTRIES, PROBLEMS, Call, Case, Problem, random_case
from helpers.share import one_of

from cupyattn.launch.attention import find_items, plan_batch

from . import gpu
from .run import emulate

COUNT = len(PROBLEMS)
BASE = Case(
    seed=1,
    entry="trtllm_batch_decode_with_kv_cache",
    problem=Problem("float16", "float16", (64, 64)),
    qo_len=(1, 1, 1),
    kv_len=(600, 0, 33),
    page_size=16,
    num_kv_heads=2,
    group=4,
    form="uniform",
)


def run(case: Case, **facts: Any) -> gpu.EmulatedGpu:
    return emulate(lambda workspace: Call(case, np, workspace), **facts)


@pytest.mark.parametrize("index", one_of(4, range(COUNT)))
def test_random_calls(index: int) -> None:
    for seed in range(index, index + 4 * COUNT, COUNT):
        run(random_case(seed), seed=seed % 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4 * COUNT, 60 * COUNT, COUNT))
def test_many_random_calls(first: int) -> None:
    for seed in range(first, first + COUNT):
        run(random_case(seed), seed=seed % 3, num_sms=8 + seed % 30)


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_point(entry: str) -> None:
    form = {"trtllm_batch_context_with_kv_cache": "steps"}.get(entry, "uniform")
    case = replace(BASE, entry=entry, form=form)
    if entry.startswith("cudnn"):
        case = replace(case, kv_layout="HND")
    if entry == "cudnn_batch_prefill_with_kv_cache":
        case = replace(case, form="lens", qo_len=(3, 0, 40))
    run(case, begins_early=True)


@pytest.mark.parametrize("dim", one_of(2, [80, 112]))
def test_many_rows_of_other_head_dims(dim: int) -> None:
    problem = Problem("bfloat16", "bfloat16", (dim, dim))
    case = replace(BASE, entry="trtllm_batch_context_with_kv_cache", problem=problem, form="steps")
    emulated = run(replace(case, qo_len=(70, 0, 90), kv_len=(300, 40, 95)))
    assert emulated.has_launched("prefill_sm90")


@pytest.mark.parametrize("index", one_of(4, range(COUNT)))
def test_random_calls_in_parts(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more requests than a block plans, of which there are two here."""
    monkeypatch.setattr(plan_batch, "max_requests", lambda device: 2)
    most = 0
    for seed in range(index, index + 6 * COUNT, COUNT):
        case = random_case(seed)
        if len(case.qo_len) > 2:
            names = [launch.name for launch in run(case, seed=seed % 3).launches]
            most = max(most, names.count("plan_batch"))
    assert most > 2


@pytest.mark.parametrize("form", ["uniform", "steps"])
@pytest.mark.parametrize("is_bool", [False, True])
def test_masks_in_parts(form: str, is_bool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_batch, "max_requests", lambda device: 2)
    count = 0
    for seed in range(4000):
        case = random_case(seed)
        if not case.tree or case.form != form or ("bool" in case.tree) != is_bool:
            continue
        if len(case.qo_len) > 2 and max(case.kv_len) < 300:
            names = [launch.name for launch in run(case, seed=seed % 3).launches]
            assert names.count("plan_batch") > 2
            count += 1
        if count == 2:
            break
    assert count == 2


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_point_in_parts(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_batch, "max_requests", lambda device: 2)
    monkeypatch.setattr(find_items, "prepare", lambda *_: None)
    form = "steps" if "context" in entry else "uniform"
    case = replace(BASE, entry=entry, form=form, qo_len=(1,) * 5, kv_len=(600, 0, 33, 7, 90))
    if entry.startswith("cudnn"):
        case = replace(case, kv_layout="HND")
    if entry == "cudnn_batch_prefill_with_kv_cache":
        case = replace(case, form="lens", qo_len=(3, 0, 40, 2, 9))
    names = [launch.name for launch in run(case).launches]
    # The calls are made twice, the second time from the cache.
    assert names.count("plan_batch") == 6


def test_a_decode_is_one_launch() -> None:
    assert [launch.name for launch in run(BASE).launches] == ["decode_sm80"] * 2


def test_a_decode_of_many_is_two_launches() -> None:
    case = replace(BASE, qo_len=(1,) * 40, kv_len=(70,) * 40)
    assert [launch.name for launch in run(case).launches] == ["plan_batch", "decode_sm80"] * 2

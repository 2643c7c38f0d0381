"""Cascades and mixed batches through the public wrappers on the host: one launch, and its merge."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import cascade_calls, compare, mixed_calls
from helpers.batch_cases import Problem
from helpers.cascade_calls import Case
from helpers.share import one_of

import cupyattn
from cupyattn.launch.attention.batch import BatchLauncher

from . import gpu
from .run import emulate

BASE = Case(
    seed=1,
    problem=Problem("bfloat16", "bfloat16", (64, 64)),
    levels=(((9, 33), (300, 64)), ((1, 3, 5, 33), (20, 7, 5, 40))),
    page_size=16,
    num_kv_heads=2,
    group=4,
    kv_layout="NHD",
    causal=True,
    window_left=-1,
    has_sinks=True,
    has_scales=False,
    is_pair=True,
    ids_on_device=False,
    with_out=True,
)


def run_case(case: Case, is_shared: bool | None = True, seed: int = 0, **facts: Any) -> list[str]:
    """Names of the kernels that ran. is_shared None: the gate decides."""
    with pytest.MonkeyPatch.context() as patch:
        if is_shared is not None:
            patch.setattr(BatchLauncher, "gains_by_levels", lambda *_: is_shared)
        make = partial(cascade_calls.planned, case, np)
        emulated = emulate(make, workspace_bytes=64 << 20, seed=seed, **facts)
    return [launch.name for launch in emulated.launches]


@pytest.mark.parametrize("first", one_of(12, range(0, 48, 4)))
def test_random_cascades(first: int) -> None:
    for seed in range(first, first + 4):
        is_shared = (True, True, None, False)[seed % 4]
        case = cascade_calls.random_case(seed)
        run_case(case, is_shared, seed=seed % 3, num_sms=8 + seed % 9)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(48, 400, 16))
def test_many_random_cascades(first: int) -> None:
    for seed in range(first, first + 16):
        is_shared = (True, True, None, False)[seed % 4]
        case = cascade_calls.random_case(seed)
        run_case(case, is_shared, seed=seed % 3, num_sms=8 + seed % 30)


def test_levels_are_one_launch_of_both_kinds_and_a_merge() -> None:
    assert run_case(BASE, is_portable=True) == ["mixed_sm80", "merge_levels"] * 2
    assert run_case(BASE) == ["prefill_sm90", "mixed_sm80", "merge_levels"] * 2


def test_states_of_tiles_that_hold_whole_tokens() -> None:
    """189 of 192 rows, by which the states of a tile still lie apart."""
    levels = (((30, 33), (300, 64)), ((1, 3, 26, 33), (20, 7, 26, 40)))
    names = run_case(replace(BASE, group=7, levels=levels))
    assert names[0] == "prefill_sm90" and names[-1] == "merge_levels"


@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_keys(causal: bool) -> None:
    """Everywhere, at one level, and at the last."""
    for shared, own in ((0, 0), (20, 0), (0, 3)):
        case = replace(BASE, causal=causal, has_sinks=False)
        run_case(replace(case, levels=(((4,), (shared,)), ((1, 3), (own, 0)))), None)


@pytest.mark.parametrize("causal", [True, False])
def test_levels_that_do_not_nest(causal: bool) -> None:
    levels = (((5, 7), (30, 16)), ((0, 7, 5), (9, 0, 40)), ((4, 4, 4), (1, 7, 20)))
    run_case(replace(BASE, levels=levels, causal=causal))


def test_the_order_of_threads_changes_no_bit() -> None:
    answers = []
    for seed in range(3):
        with gpu.plugged_in(num_sms=16, seed=seed) as emulated:
            answers.append(plan(BASE, emulated).run())
    for answer in answers[1:]:
        for a, b in zip(answers[0], answer, strict=True):
            compare.assert_bitwise_equal(a, b, "threads in another order")


def plan(case: Case, emulated: gpu.EmulatedGpu, **made: Any) -> cascade_calls.Call:
    call = cascade_calls.Call(case, np)
    call.plan(emulated.empty((64 << 20,), np.dtype(np.uint8)), **made)
    return call


@pytest.mark.parametrize("seed", one_of(2, [5, 13, 28, 26]))
def test_four_ways_to_the_same_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade by levels, without levels, the paged wrapper and BatchAttention."""
    problem = replace(BASE.problem, is_capped=seed % 2 == 1)
    drawn = cascade_calls.random_case(seed)
    levels = (((7, 33), (320, 64)), ((1, 1, 5, 33), (20, 1, seed, 40)))
    case = replace(drawn, problem=problem, levels=levels, page_size=16, window_left=-1)
    answers = []
    with gpu.plugged_in(num_sms=16) as emulated:
        for is_shared in (True, False):
            monkeypatch.setattr(BatchLauncher, "gains_by_levels", lambda *_, x=is_shared: x)
            call = plan(case, emulated)
            assert (call.wrapper._current.batch.levels is not None) == is_shared
            answers.append(call.run())
            is_hoppers = emulated.has_launched("prefill_sm90")
            call.check(*answers[-1], may_be_hoppers=is_hoppers)
        table = call.flat_table()
        assert table is not None
        arguments, options = call.plan_arguments()
        workspace = emulated.empty((64 << 20,), np.dtype(np.uint8))
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace, case.kv_layout)
        paged.plan(*table[:4], *arguments[4:], **options)
        answers.append(call.run_on(paged))
        mixed = cupyattn.BatchAttention(case.kv_layout)
        del options["window_left"], options["pos_encoding_mode"]
        dim, page_size = arguments[6:]
        mixed.plan(*table[:3], table[4], *arguments[4:6], dim, dim, page_size, **options)
        answers.append(call.run_on(mixed))
    for answer in answers[2:]:
        for a, b in zip(answers[1], answer, strict=True):
            compare.assert_bitwise_equal(a, b, "ways without levels")


def test_a_wrapper_for_graphs() -> None:
    run_graph()


def run_graph(**facts: Any) -> None:
    """Its tables have room for batches that need more: what is spare does nothing."""
    sizes = [(n + 1, n + 1, 80, n) for n in (2, 4)]
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    buffers = {
        f"{name}_buf_arr": [np.full(size[i], -7, np.int32) for size in sizes]
        for i, name in enumerate(names)
    }
    plans = [
        BASE.levels,
        (((9, 33), (0, 900)), ((1, 3, 5, 33), (20, 7, 5, 40))),
        (((0, 12), (50, 70)), ((0, 0, 12, 0), (3, 4, 50, 6))),
        (((20, 0), (0, 70)), ((5, 5, 5, 5), (5, 5, 5, 6))),
    ]
    with gpu.plugged_in(num_sms=16, **facts) as emulated:
        wrapper = plan(BASE, emulated, use_cuda_graph=True, **buffers).wrapper
        address = wrapper._words.address
        grids = []
        for seed, levels in enumerate(plans):
            call = cascade_calls.Call(replace(BASE, seed=seed, levels=levels), np)
            arguments, options = call.plan_arguments()
            wrapper.plan(*arguments, **options)
            before = len(emulated.launches)
            call.check(*call.run_on(wrapper))
            grids.append([(x.name, x.grid) for x in emulated.launches[before:]])
            assert wrapper._words.address == address
            tables = [list(x) for x in zip(*call.tables, strict=True)]
            for name, given in zip(names, (arguments[0], *tables), strict=True):
                for buffer, x in zip(buffers[f"{name}_buf_arr"], given, strict=True):
                    used = len(x) - 2 * (name == "paged_kv_indices")
                    np.testing.assert_array_equal(buffer[:used], x[:used])
    assert all(grid == grids[0] for grid in grids)


def run_mixed(first: int, count: int) -> None:
    for seed in range(first, first + count):
        make = lambda _, x=seed: mixed_calls.planned(x, np)  # noqa: E731
        emulate(make, num_sms=8 + seed % 9, seed=seed % 3)


@pytest.mark.parametrize("first", one_of(4, range(0, 16, 4)))
def test_random_mixed_batches(first: int) -> None:
    run_mixed(first, 4)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(16, 160, 16))
def test_many_random_mixed_batches(first: int) -> None:
    run_mixed(first, 16)

"""The exchange kernel on the host: ranks are threads, whose launches write each other's windows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import exchange_calls
from helpers.exchange_calls import LATE, SMALL, ExchangeCase, RankRun, random_case
from helpers.parallel_attention import Batch, own_part
from helpers.share import one_of

import cupyattn
from cupyattn import DeviceError, array, reference
from cupyattn.distributed import ContextParallelWrapper, Group, StateExchange
from cupyattn.distributed.gather import HeadGather

from . import ranks


def check_small(**facts: Any) -> None:
    with ranks.plugged_in(**facts) as found:
        run_and_check(SMALL, found)


def check_late(**facts: Any) -> None:
    with ranks.plugged_in(**facts) as found:
        check_late_peer(found, 1)


def check_halves(**facts: Any) -> None:
    with ranks.plugged_in(**facts) as found:
        check_two_halves(found)


def check_heads(**facts: Any) -> None:
    with ranks.plugged_in(**facts) as found:
        check_late_heads(found)


@pytest.fixture
def emulated() -> Iterator[ranks.RankedGpu]:
    with ranks.plugged_in() as found:
        yield found


def run_and_check(case: ExchangeCase, emulated: ranks.RankedGpu) -> None:
    emulated.forget()
    case = replace(case, uses_windows=True)
    found = ranks.on_ranks(
        emulated, case.size, lambda group: exchange_calls.run_and_check(case, group)
    )
    exchange_calls.check(case, found)


@pytest.mark.parametrize("first", one_of(5, range(0, 50, 10)))
def test_random_exchanges(emulated: ranks.RankedGpu, first: int) -> None:
    emulated.mode = "plain" if first else "checked"
    for seed in range(first, first + 10):
        emulated.seed, emulated.arch = seed % 3, (900, 800)[seed % 2]
        run_and_check(random_case(seed), emulated)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_every_number_of_ranks(emulated: ranks.RankedGpu, size: int) -> None:
    run_and_check(replace(SMALL, size=size), emulated)


def test_blocks_take_several_groups(emulated: ranks.RankedGpu) -> None:
    emulated.num_sms, emulated.mode = 1, "plain"  # two blocks
    run_and_check(replace(SMALL, rows=(40, 3, 40), own_heads=2, head_dim=128), emulated)


def test_a_rank_without_keys_and_rows_without_keys(emulated: ranks.RankedGpu) -> None:
    run_and_check(replace(SMALL, absent=0), emulated)
    run_and_check(replace(SMALL, size=3, absent=2, empty=0.6), emulated)
    run_and_check(replace(SMALL, empty=1.0), emulated)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_windows_inside_hosts_and_all_to_all_between_them(
    emulated: ranks.RankedGpu, hosts: list[int]
) -> None:
    emulated.mode = "plain"
    case = replace(SMALL, size=4, rows=(5, 1, 5), own_heads=2)

    def work(group: Group) -> Any:
        levels = case.make(group)._levels
        assert levels is not None and levels.inside._windows is not None
        assert levels.between._windows is None
        return exchange_calls.run_and_check(case, group)

    found = ranks.on_ranks(emulated, 4, work, hosts=hosts)
    exchange_calls.check(case, found)
    assert emulated.has_launched("exchange_states") and emulated.has_launched("merge_states")


def test_no_rows_are_no_exchange(emulated: ranks.RankedGpu) -> None:
    run_and_check(replace(SMALL, rows=(0, 3, 0)), emulated)
    assert len([x for x in emulated.launches if x.name == "exchange_states"]) == 2 * 2


def test_nan_stays_in_its_row(emulated: ranks.RankedGpu) -> None:
    case = replace(SMALL, rows=(3,), empty=0.0, uses_windows=True, out_dtype="float32")

    def work(group: Group) -> Any:
        run = RankRun(case, group, np)
        v, s = case.states(0, group.rank)
        if group.rank == 1:
            v[1, 0, 3] = np.nan
            s[2, 3] = np.nan
        return run.exchange.run(v, s, return_lse=True)

    (first, _), (second, lse) = ranks.on_ranks(emulated, 2, work)
    is_nan = np.isnan(first)
    assert is_nan[1, 0, 3] and is_nan.sum() == 1
    is_nan = np.isnan(second).all(-1)
    assert is_nan[2, 1] and np.isnan(second).sum() == case.head_dim
    assert np.isnan(lse)[2, 1] and np.isnan(lse).sum() == 1


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_peer_is_nan_and_then_an_error(emulated: ranks.RankedGpu, late: int) -> None:
    check_late_peer(emulated, late)


def check_late_peer(emulated: ranks.RankedGpu, late: int) -> None:
    case, waited = replace(LATE, uses_windows=True), threading.Event()

    def work(group: Group) -> list[Any]:
        run = RankRun(case, group, np)
        group.share_bytes(b"")
        answers = [run.step(0)]
        if group.rank == late:
            waited.wait()
        reason = ""
        try:
            for index in (1, 2, 3):
                answers.append(run.step(index))
                waited.set()
        except DeviceError as error:
            reason = str(error)
        assert "did not deliver" in reason
        return [(x.out, x.lse) for x in answers]

    found = ranks.on_ranks(emulated, 2, work)
    is_nan = np.isnan(found[1 - late][1][0].astype(np.float32))
    assert is_nan.any() and len(found[1 - late]) == 2
    # What came in time is right, whatever else did not, on the late rank too.
    for rank in range(2):
        wanted = exchange_calls.wanted(case, rank)
        for (out, lse), (right, right_lse) in zip(found[rank], wanted, strict=False):
            is_here, has_lse = ~np.isnan(out.astype(np.float32)), ~np.isnan(lse)
            np.testing.assert_allclose(out[is_here].astype(np.float64), right[is_here], 0.01, 0.01)
            np.testing.assert_allclose(lse[has_lse], right_lse[has_lse], 1e-5, 1e-5)


def test_even_and_odd_exchanges_have_halves_of_a_window(emulated: ranks.RankedGpu) -> None:
    check_two_halves(emulated)


def check_two_halves(emulated: ranks.RankedGpu) -> None:
    """What a peer may still be reading is not written by the next exchange."""
    case = replace(SMALL, rows=(5, 5), uses_windows=True)

    def work(group: Group) -> list[int]:
        run = RankRun(case, group, np)
        run.step(0), run.step(1)
        group.share_bytes(b"")
        memory = run.exchange._windows
        assert memory is not None
        return [int(x) for x in np.unique(memory._window.local.view(np.uint32)[3::4])]

    assert ranks.on_ranks(emulated, 2, work) == [[0, 1, 2], [0, 1, 2]]


def test_epochs_pass_zero(emulated: ranks.RankedGpu) -> None:
    """The epoch that windows hold at first is skipped."""
    case = replace(SMALL, rows=(4,) * 3, uses_windows=True)

    def work(group: Group) -> Any:
        run = RankRun(case, group, np)
        memory = run.exchange._windows
        assert memory is not None
        control = np.frombuffer(memory._control.memory, np.uint32)
        place = (memory.windows.control - control.ctypes.data) // 4
        control = np.ndarray(4, np.uint32, memory._control.memory, 4 * place)
        control[0] = 0xFFFFFFFE
        group.barrier = lambda *_: None  # type: ignore[method-assign]
        group.share_bytes(b"")
        answers = [run.step(index) for index in range(3)]
        assert control.tolist()[:3] == [3, 0, 0]
        return [(x.out, x.lse) for x in answers]

    exchange_calls.check(case, ranks.on_ranks(emulated, 2, work))


@pytest.mark.parametrize("columns", [(64,), (8,), (512, 64)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_heads_of_all_ranks(emulated: ranks.RankedGpu, size: int, columns: tuple[int, ...]) -> None:
    check_gather(emulated, size, columns)


def check_gather(emulated: ranks.RankedGpu, size: int, columns: tuple[int, ...]) -> None:
    """Several times, of rows with gaps, and of lead dimensions."""
    rng = np.random.default_rng(size)
    shapes = ((5, 2), (3, 2, 2), (1, 2), (5, 2))
    whole = [
        rng.standard_normal((*lead, size * own, sum(columns) + 8)).astype(np.float16)
        for *lead, own in shapes
    ]

    def work(group: Group) -> None:
        exchange = StateExchange(group, 6, 2 * size, 64, timeout=60.0, uses_windows=True)
        gather = HeadGather(exchange)
        for x in whole:
            own = np.ascontiguousarray(x[..., group.rank * 2 : group.rank * 2 + 2, :])
            begin, parts = 0, []
            for count in columns:
                parts.append(array.view(own[..., begin : begin + count], "q"))
                begin += count
            begin = 0
            for found, count in zip(gather(parts), columns, strict=True):
                np.testing.assert_array_equal(found, x[..., begin : begin + count])
                begin += count

    ranks.on_ranks(emulated, size, work)
    assert emulated.has_launched("gather_heads")


def test_heads_of_a_late_peer_are_nan(emulated: ranks.RankedGpu) -> None:
    check_late_heads(emulated)


def check_late_heads(emulated: ranks.RankedGpu) -> None:
    def work(group: Group) -> None:
        exchange = StateExchange(group, 4, 4, 64, timeout=2.0, uses_windows=True)
        gather = HeadGather(exchange)
        x = np.ones((4, 2, 64), np.float16)
        assert (gather([array.view(x, "q")])[0] == 1).all()
        group.share_bytes(b"")
        if group.rank == 1:
            return
        late = gather([array.view(x, "q")])[0]
        assert (late[:, :2] == 1).all() and np.isnan(late[:, 2:]).all()
        reason = ""
        try:
            group.check()
        except DeviceError as error:
            reason = str(error)
        assert "rank 1 did not deliver its heads" in reason

    ranks.on_ranks(emulated, 2, work)


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("run", [1, 3])
def test_decode_over_ranks(emulated: ranks.RankedGpu, run: int, is_replicated: bool) -> None:
    """The gather of queries, local attention and the exchange, kernels of all."""
    batch = Batch(size=2, run=run, kv_lens=(21, 1, 40), head_dim=64)
    emulated.mode, emulated.num_sms = "plain", 1  # keys are not split: ranks share counters here
    q, keys, values = batch.draw()

    def work(group: Group) -> Any:
        share = batch.share(group.rank)
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 20, np.uint8), "NHD")
        parallel = ContextParallelWrapper(
            group,
            wrapper,
            max_rows=3,
            num_qo_heads=batch.heads,
            head_dim=64,
            cp_kv_cache_interleave_size=run,
            q_is_replicated=is_replicated,
            out_dtype="float16",
            timeout=60.0,
            uses_windows=True,
        )
        indptr = batch.indptr(share)
        parallel.plan(
            indptr,
            np.arange(indptr[-1], dtype=np.int32),
            batch.last_page_len(share),
            batch.heads,
            batch.kv_heads,
            64,
            batch.page_size,
            q_data_type="float16",
        )
        cache = batch.cache(keys, share), batch.cache(values, share)
        given = q[:, 0] if is_replicated else own_part(q[:, 0], group)
        first, again = (parallel.run(given, cache) for _ in "ab")
        np.testing.assert_array_equal(first.view(np.uint16), again.view(np.uint16))
        return first

    out = np.concatenate(ranks.on_ranks(emulated, 2, work), axis=1)
    for i in range(3):
        wanted, _ = reference.attention(q[i], keys[i], values[i])
        np.testing.assert_allclose(out[i][None].astype(np.float64), wanted, 4e-3, 4e-3)
    assert {"decode_sm80", "exchange_states"} <= {x.name for x in emulated.launches}


def test_a_closed_exchange_is_asked_no_more(emulated: ranks.RankedGpu) -> None:
    def work(group: Group) -> list[int]:
        made = StateExchange(group, 1, 2, 64, uses_windows=True)
        open_checks = len(group._checks)
        group.share_bytes(b"")
        made.close()
        return [open_checks, len(group._checks)]

    assert ranks.on_ranks(emulated, 2, work) == [[1, 0]] * 2

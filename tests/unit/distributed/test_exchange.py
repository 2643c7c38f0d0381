"""Exchanges of states among simulated ranks in NumPy: answers, outputs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import exchange_calls
from helpers.exchange_calls import SMALL, ExchangeCase, RankRun, random_case

from cupyattn import ArgumentError, DistributedError, UnsupportedError
from cupyattn.distributed import Group, StateExchange, simulate
from cupyattn.launch.ops import exchange_states


def run_and_check(case: ExchangeCase) -> None:
    found = simulate(case.size, lambda group: exchange_calls.run_and_check(case, group))
    exchange_calls.check(case, found)


@pytest.mark.parametrize("seed", range(40))
def test_random_exchanges(seed: int) -> None:
    run_and_check(random_case(seed, (1, 2, 3, 4, 5, 8)))


def test_ranks_without_keys() -> None:
    run_and_check(replace(SMALL, absent=1))
    run_and_check(replace(SMALL, empty=1.0))


def test_odd_head_dims() -> None:
    run_and_check(replace(SMALL, size=3, head_dim=33, dtype="float16"))


def test_the_answer_alone_is_returned_unless_lse_is_asked_for() -> None:
    def work(group: Group) -> None:
        run = RankRun(SMALL, group, np)
        v, s = SMALL.states(0, group.rank)
        out = run.exchange.run(v, s)
        lse_out = np.empty((5, 2), np.float32)
        both = run.exchange.run(v, s, None, lse_out, return_lse=True)
        assert both[1] is lse_out
        np.testing.assert_array_equal(out, both[0])

    simulate(2, work)


def test_arrays_of_torch_come_back_as_such() -> None:
    torch = pytest.importorskip("torch")

    def work(group: Group) -> None:
        run = RankRun(SMALL, group, np)
        v, s = SMALL.states(0, group.rank)
        out, lse = run.exchange.run(torch.from_numpy(v), torch.from_numpy(s), return_lse=True)
        assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
        want = run.exchange.run(v, s)
        np.testing.assert_array_equal(out.view(torch.int16).numpy(), want.view(np.int16))

    simulate(2, work)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_heads": 5}, "num_heads: got 5 heads for a group of 2"),
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"max_rows": 0}, "max_rows: got 0"),
        ({"head_dim": -1}, "head_dim: got -1"),
        ({"dtype": "int8"}, "dtype: got int8; wanted float32"),
        ({"out_dtype": "float8_e4m3fn"}, "out_dtype: got float8_e4m3fn"),
        ({"timeout": 0.0}, "timeout: got 0.0"),
        ({"lse_base_on_e": 2}, "lse_base_on_e"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], words: str) -> None:
    def work(group: Group) -> None:
        options: dict[str, Any] = {"max_rows": 4, "num_heads": 4, "head_dim": 8, **given}
        with pytest.raises(ArgumentError, match=words):
            StateExchange(group, **options)

    simulate(2, work)


def test_windows_that_are_asked_for_and_absent_are_refused() -> None:
    def work(group: Group) -> None:
        with pytest.raises(UnsupportedError, match="no memory that peers can write"):
            StateExchange(group, 4, 4, 8, uses_windows=True)

    simulate(2, work)


_ARRAYS = {
    "o": np.zeros((3, 4, 8), np.float32),
    "lse": np.zeros((3, 4), np.float32),
}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"o": np.zeros((3, 6, 8), np.float32)}, r"o: .*4"),
        ({"o": np.zeros((3, 4, 16), np.float32)}, r"o: .*8"),
        ({"o": np.zeros((3, 4, 8), np.float16)}, "o: .*float16.*float32"),
        ({"o": np.zeros((12, 8), np.float32)}, "o: shape"),
        ({"o": np.zeros((3, 4, 16), np.float32)[..., ::2]}, "o: the last dimension"),
        ({"lse": np.zeros((2, 4), np.float32)}, "lse: "),
        ({"lse": np.zeros((3, 4), np.float64)}, "lse: .*float64"),
        ({"out": np.zeros((3, 4, 8), np.float32)}, "out: shape"),
        ({"out": np.zeros((3, 2, 8), np.float16)}, "out: .*float16"),
        ({"lse_out": np.zeros((3, 4), np.float32)}, "lse_out: shape"),
        ({"return_lse": 3}, "return_lse"),
        ({"o": np.zeros((9, 4, 8), np.float32)}, "o: has 9 rows"),
    ],
)
def test_bad_arrays_are_refused(given: dict[str, Any], words: str) -> None:
    def work(group: Group) -> None:
        exchange = StateExchange(group, 4, 4, 8, out_dtype="float32")
        call = _ARRAYS | given
        if call["o"].shape[0] == 9:
            call["lse"] = np.zeros((9, 4), np.float32)
        with pytest.raises(ArgumentError, match=words):
            exchange.run(**call)

    simulate(2, work)


def test_outputs_that_overlap_inputs_are_refused() -> None:
    def work(group: Group) -> None:
        exchange = StateExchange(group, 4, 4, 8, out_dtype="float32")
        o = _ARRAYS["o"].copy()
        with pytest.raises(ArgumentError, match="out: overlaps o"):
            exchange.run(o, _ARRAYS["lse"], o[:, :2])

    simulate(2, work)


def test_a_rank_that_differs_is_named() -> None:
    def make(group: Group) -> None:
        with pytest.raises(DistributedError, match="rank 1 has head_dim 16, rank 0 has head_dim 8"):
            StateExchange(group, 4, 4, 8 * (1 + group.rank))

    simulate(2, make)

    def run(group: Group) -> None:
        exchange = StateExchange(group, 4, 4, 8)
        rows = 2 + group.rank
        with pytest.raises(
            DistributedError, match="rank 1 has rows of o 3, rank 0 has rows of o 2"
        ):
            exchange.run(_ARRAYS["o"][:rows], _ARRAYS["lse"][:rows])

    simulate(2, run)


def test_a_closed_exchange_says_so() -> None:
    def work(group: Group) -> None:
        exchange = StateExchange(group, 4, 4, 8)
        exchange.close()
        with pytest.raises(DistributedError, match="closed; make a new one"):
            exchange.run(_ARRAYS["o"], _ARRAYS["lse"])
        exchange = StateExchange(group, 4, 4, 8)
        exchange.run(_ARRAYS["o"], _ARRAYS["lse"])

    simulate(2, work)


@pytest.mark.parametrize(("version", "has"), [("12.2", False), ("12.3", True), ("13.0", True)])
def test_whole_words_need_cuda_12_3(
    version: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_states.jit, "nvrtc_version", lambda: version)
    assert exchange_states.has_whole_words() is has

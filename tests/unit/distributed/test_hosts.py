"""Ranks that seem to be on several hosts, and parts of groups."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import exchange_calls
from helpers.exchange_calls import SMALL, ExchangeCase

from cupyattn import ArgumentError, DeviceError, DistributedError
from cupyattn.distributed import Group, StateExchange, simulate


def test_two_levels_are_windows_in_a_host_and_peers_between_hosts() -> None:
    hosts = [0, 1, 0, 1, 2, 2]

    def work(group: Group) -> tuple[list[int], list[int]]:
        assert group.hosts == tuple(hosts) and group.window(64) is None
        inside, across = group.two_levels()
        assert set(inside.hosts) == {hosts[group.rank]} and inside.size == 2
        window = inside.window(64)
        assert window is not None and window.memories is not None
        assert across.window(64) is None and across.size == 3
        given = np.full(1, group.rank, np.int64)
        found = [np.empty(part.size, np.int64) for part in (inside, across)]
        inside.all_gather(found[0], given)
        across.all_gather(found[1], given)
        inside.close()
        across.close()
        group.barrier()
        return found[0].tolist(), found[1].tolist()

    answers = simulate(6, work, hosts=hosts)
    assert [inside for inside, _ in answers] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 5], [4, 5]]
    assert [across for _, across in answers] == [
        [0, 1, 4],
        [0, 1, 4],
        *[[2, 3, 5]] * 2,
        [0, 1, 4],
        [2, 3, 5],
    ]


def test_an_exchange_in_two_levels_is_that_of_one() -> None:
    """Within hosts first, for the hosts' ranks of one place; then between hosts."""

    def work(group: Group) -> None:
        ranks = np.arange(group.size, dtype=np.float32)
        given = 10 * group.rank + ranks
        wanted = np.empty_like(given)
        group.all_to_all(wanted, given)
        inside, across = group.two_levels()
        first, second = np.empty_like(given), np.empty_like(given)
        # By place: what every rank of this host has for the ranks of a place goes to it.
        inside.all_to_all(first, given.reshape(across.size, inside.size).T.copy())
        across.all_to_all(second, first.reshape(inside.size, across.size).T.copy())
        assert (second == wanted).all()

    simulate(6, work, hosts=[0, 0, 1, 1, 2, 2])


def test_a_part_has_its_ranks_in_order_and_a_failure_of_its_own() -> None:
    def work(group: Group) -> list[int]:
        part = group.split(group.rank % 2)
        members = [data[0] for data in part.share_bytes(bytes([group.rank]))]
        if group.rank % 2:
            part.fail("enough")
            assert part.transport.failure() == "enough"
        group.barrier()
        return members

    assert simulate(5, work) == [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3], [0, 2, 4]]


def test_hosts_of_different_sizes_have_no_levels() -> None:
    def work(group: Group) -> None:
        with pytest.raises(DistributedError, match="2 on host 0, 1 on host 1; wanted as many"):
            group.two_levels()

    simulate(3, work, hosts=[0, 0, 1])


def test_every_rank_has_a_host() -> None:
    with pytest.raises(ArgumentError, match="hosts: got 1 of them for 2 ranks"):
        Group.simulated(2, hosts=[0])


# --- exchanges of states ---

_HOSTS = {
    "2x2": [0, 0, 1, 1],
    "2x3": [0, 0, 0, 1, 1, 1],
    "3x2": [0, 0, 1, 1, 2, 2],
    "1x4": [0, 0, 0, 0],
    "4x1": [0, 1, 2, 3],
    "2x2 in turns": [5, 2, 5, 2],
    "3x2 in turns": [0, 1, 2, 0, 1, 2],
    "no order": [0, 1, 1, 0],
    "unequal": [0, 0, 1],
}
_HAVE_LEVELS = {"2x2", "2x3", "3x2", "2x2 in turns", "3x2 in turns"}


def _exchanged(case: ExchangeCase, hosts: list[int]) -> list[list[tuple[Any, Any]]]:
    def work(group: Group) -> list[tuple[Any, Any]]:
        return exchange_calls.run_and_check(case, group)

    return simulate(case.size, work, hosts=hosts)


@pytest.mark.parametrize("name", _HOSTS)
@pytest.mark.parametrize("strides", ["packed", "gaps", "heads first"])
def test_exchanges_among_hosts_are_right_and_repeat_to_the_bit(name: str, strides: str) -> None:
    hosts = _HOSTS[name]
    for seed, (dtype, out_dtype) in enumerate(
        (("float32", "bfloat16"), ("float32", "float32"), ("float32", "float16"))
    ):
        case = replace(
            SMALL, size=len(hosts), strides=strides, dtype=dtype, out_dtype=out_dtype, seed=seed
        )
        case = replace(case, rows=(5, 0, 1, 4), base_on_e=seed == 1, gives_outputs=seed == 2)
        found = _exchanged(case, hosts)
        exchange_calls.check(case, found)  # as near to the exact answer as one level
        for first, again in zip(found, _exchanged(case, hosts), strict=True):
            for one, other in zip(first, again, strict=True):
                for a, b in zip(one, other, strict=True):
                    np.testing.assert_array_equal(exchange_calls.bits(a), exchange_calls.bits(b))


def test_ranks_and_hosts_without_keys() -> None:
    for case in (replace(SMALL, absent=2), replace(SMALL, empty=1.0), replace(SMALL, empty=0.9)):
        case = replace(case, size=6)
        exchange_calls.check(case, _exchanged(case, _HOSTS["3x2"]))


@pytest.mark.parametrize("name", _HOSTS)
def test_states_cross_the_network_merged(name: str) -> None:
    """Ranks of a host meet in a group that has windows; what is left goes between hosts."""
    hosts = _HOSTS[name]

    def work(group: Group) -> StateExchange:
        case = replace(SMALL, size=len(hosts))
        whole = case.make(group)
        plain = replace(case, uses_windows=False).make(group)
        assert plain._levels is None
        states = case.states(0, group.rank)
        one, two = (x.run(*states, return_lse=True) for x in (plain, whole))
        np.testing.assert_allclose(*(x[0].astype(np.float32) for x in (one, two)), 2e-2, 1e-6)
        np.testing.assert_allclose(one[1], two[1], 1e-6, 1e-5)
        return whole

    for exchange in simulate(len(hosts), work, hosts=hosts):
        levels = exchange._levels
        assert (levels is not None) is (name in _HAVE_LEVELS)
        if levels is not None:
            inside, between = levels.inside.group, levels.between.group
            assert len(set(inside.hosts)) == 1 and len(set(between.hosts)) == between.size
            assert levels.between.num_heads == exchange.num_heads // inside.size


def test_a_rank_that_fails_ends_the_calls_of_all_hosts() -> None:
    reasons: dict[int, str] = {}

    def work(group: Group) -> None:
        case = replace(SMALL, size=4)
        exchange = case.make(group)
        exchange.run(*case.states(0, group.rank))
        group.barrier()
        if group.rank == 3:
            raise KeyError("it broke")
        with pytest.raises(DeviceError):
            exchange.run(*case.states(0, group.rank))
        with pytest.raises(DeviceError) as caught:
            group.check()
        reasons[group.rank] = str(caught.value)

    start = time.monotonic()
    with pytest.raises(KeyError, match="it broke"):
        simulate(4, work, hosts=_HOSTS["2x2"])
    assert time.monotonic() - start < 2
    assert sorted(reasons) == [0, 1, 2]
    for reason in reasons.values():
        assert reason.count("KeyError") == reason.count("make a new one") == 1, reason


def test_levels_are_made_once_and_closed_with_their_group() -> None:
    def work(group: Group) -> None:
        inside, between = group.two_levels()
        case = replace(SMALL, size=4)
        for _ in range(2):
            levels = case.make(group)._levels
            assert levels is not None and levels.inside.group is inside
        group.barrier()
        group.close()
        for part in (inside, between):
            with pytest.raises(DistributedError, match="closed"):
                part.check()

    simulate(4, work, hosts=_HOSTS["2x2"])


def test_a_part_s_failure_is_one_of_the_levels_group() -> None:
    def work(group: Group) -> None:
        _, between = group.two_levels()
        group.barrier()
        if group.rank == 0:
            between.fail("late")
        if group.rank in (0, 2):
            with pytest.raises(DeviceError, match="late"):
                group.barrier()
        else:
            with pytest.raises(DeviceError):
                group.barrier()

    simulate(4, work, hosts=_HOSTS["2x2"])

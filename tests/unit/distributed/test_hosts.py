"""Ranks that seem to be on several hosts, and parts of groups."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn import ArgumentError, DistributedError
from cupyattn.distributed import Group, simulate


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

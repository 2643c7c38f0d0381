"""Groups of simulated ranks: what arrives where, and what happens when a rank does not come."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from cupyattn import ArgumentError, DeviceError, DistributedError
from cupyattn.distributed import Group, simulate
from cupyattn.distributed.handshake import differences


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_go_to_their_ranks(size: int) -> None:
    def work(group: Group) -> None:
        ranks = np.arange(size, dtype=np.float32)
        out = np.empty((size, 3), np.float32)
        group.all_to_all(out, np.repeat(100 * group.rank + ranks, 3).reshape(size, 3))
        assert (out == (100 * ranks + group.rank)[:, None]).all()

        all_ranks = np.empty(size, np.int16)
        group.all_gather(all_ranks, np.array([group.rank], np.int16))
        assert all_ranks.tolist() == list(range(size))

        total = np.empty(2, np.float32)
        group.reduce_scatter(total, np.arange(2 * size, dtype=np.float32) * (group.rank + 1))
        weight = size * (size + 1) / 2
        assert total.tolist() == [2 * group.rank * weight, (2 * group.rank + 1) * weight]

        group.barrier()
        assert group.share_bytes(bytes([group.rank])) == [bytes([i]) for i in range(size)]

    simulate(size, work)


def test_peers_write_windows_and_know_their_addresses() -> None:
    def work(group: Group) -> None:
        window = group.window(1000)
        assert window is not None and window.memories is not None
        assert window.nbytes == 1000 and window.source == "simulated"
        assert not window.local.any() and window.peers.dtype == np.uint64
        assert [x.ctypes.data for x in window.memories] == window.peers.tolist()
        assert not (window.peers % 256).any() and window.memories[group.rank] is window.local
        group.barrier()
        for memory in window.memories:
            memory[group.rank] = group.rank + 1
        group.barrier()
        assert window.local[:3].tolist() == [1, 2, 3]
        group.barrier()
        window.close()
        window.close()

    simulate(3, work)


def test_answers_are_in_rank_order() -> None:
    assert simulate(4, lambda group: group.rank**2) == [0, 1, 4, 9]


def test_a_rank_that_raises_lets_the_others_raise_soon() -> None:
    raised: dict[int, Exception] = {}

    def work(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            raise KeyError("lost")
        try:
            group.barrier()
        except DeviceError as error:
            raised[group.rank] = error
            with pytest.raises(DeviceError, match="rank 1 ended with KeyError"):
                group.check()
            raise

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        simulate(3, work)
    assert time.monotonic() - start < 2
    assert sorted(raised) == [0, 2]


def test_a_rank_that_leaves_its_block_with_an_error_lets_the_others_raise() -> None:
    groups = Group.simulated(2)

    def end() -> None:
        with pytest.raises(ZeroDivisionError), groups[1]:
            _ = 1 // 0

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(DeviceError, match="rank 1 ended with ZeroDivisionError"):
        groups[0].barrier()
    thread.join()


def test_a_rank_that_does_not_come_is_named() -> None:
    groups = Group.simulated(2, timeout=0.1)
    with pytest.raises(DeviceError, match=r"rank 1 did not come within 0\.1 s"):
        groups[0].barrier()
    with pytest.raises(DeviceError, match=r"rank 1 did not come within 0\.1 s"):
        groups[1].barrier()


def test_a_rank_may_close_while_the_others_still_leave_the_last_call() -> None:
    for _ in range(50):

        def work(group: Group) -> None:
            with group:
                group.barrier()

        simulate(4, work)


def test_a_closed_group_says_so_and_a_new_one_works() -> None:
    for _ in range(2):
        groups = Group.simulated(2)
        groups[0].close()
        groups[0].close()
        with pytest.raises(DistributedError, match="closed; make a new one"):
            groups[0].barrier()
        with pytest.raises(DeviceError, match="rank 0 closed its group"):
            groups[1].barrier()
    simulate(2, lambda group: group.barrier())


def test_ranks_in_different_calls_hear_of_it() -> None:
    def work(group: Group) -> None:
        given = np.zeros(4 + 4 * (group.rank == 2), np.uint8)
        with pytest.raises(DistributedError, match="same calls in the same order"):
            group.all_to_all(np.empty_like(given), given)
        group.barrier()  # the group can be used on

    simulate(3, lambda group: None)
    simulate(4, work)


def test_a_check_of_a_kernel_fails_the_group() -> None:
    def work(group: Group) -> None:
        late: list[str | None] = [None]
        group.add_check(lambda: late[0])
        group.check()
        group.barrier()
        if group.rank == 0:
            late[0] = "rank 1 was late by 2 s"
        with pytest.raises(DeviceError, match="rank 1 was late by 2 s; close this group"):
            while True:
                group.barrier()

    simulate(2, work)


def test_a_handshake_names_the_rank_that_differs() -> None:
    def work(group: Group) -> None:
        group.handshake({"head_dim": 128, "dtype": np.dtype(np.float16), "window": (1, 2)})
        wrong = {"head_dim": 64 if group.rank == 1 else 128, "heads": 8}
        if group.rank == 2:
            wrong["drafts"] = 1
        with pytest.raises(DistributedError) as caught:
            group.handshake(wrong)
        assert str(caught.value) == (
            "rank 1 has head_dim 64, rank 0 has head_dim 128; "
            "rank 2 has drafts 1, rank 0 has no drafts; give all 3 ranks the same"
        )

    simulate(3, work)


@pytest.mark.parametrize(
    ("of_ranks", "sentence"),
    [
        ([{"a": 1}, {"a": 1}], None),
        ([{}], None),
        ([{"a": 1}, {"a": 2}, {"a": 2}], "each of ranks 1 and 2 has a 2, rank 0 has a 1"),
        ([{"a": 1}, {}], "rank 1 has no a, rank 0 has a 1"),
        ([{"a": 1}, {"a": 2}, {"a": 3}], "rank 1 has a 2, rank 2 has a 3, rank 0 has a 1"),
        ([{"a": [1]}, {"a": [2]}], "rank 1 has a [2], rank 0 has a [1]"),
        ([{"a": 0}] + 7 * [{"a": 1}], "each of 7 ranks (1, 2, ..., 7) has a 1, rank 0 has a 0"),
    ],
)
def test_differences_in_words(of_ranks: list[dict[str, Any]], sentence: str | None) -> None:
    assert differences(of_ranks) == sentence


def _bytes(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.all_to_all(_bytes(4), _bytes(6)), "got 6 bytes to give and 4 to take"),
        (lambda g: g.all_to_all(_bytes(3), _bytes(3)), "a part of equal size for every rank"),
        (lambda g: g.all_to_all(_bytes(4, 4)[:, ::2], _bytes(8)), "out: got strides"),
        (lambda g: g.all_to_all(_bytes(4), [1, 2, 3, 4]), "given: got list; wanted a NumPy array"),
        (lambda g: g.all_gather(_bytes(4), _bytes(4)), "wanted 8 bytes of `out`"),
        (lambda g: g.reduce_scatter(_bytes(4), _bytes(8)), "out: got dtype uint8; wanted float32"),
        (
            lambda g: g.reduce_scatter(np.zeros(4, np.float32), np.zeros(4, np.float32)),
            "wanted 2 times as many to give",
        ),
        (lambda g: g.window(0), "nbytes: got 0"),
        (lambda g: g.window(-8), "nbytes: got -8"),
        (lambda g: g.check_heads(33), "num_qo_heads: got 33 heads for a group of 2 ranks"),
        (lambda g: g.check_heads(1, "num_kv_heads"), "or a group of fewer ranks"),
        (lambda g: Group.simulated(0), "size: got 0"),
        (lambda g: Group.simulated(2, devices=[0]), "devices: got 1 of them for 2 ranks"),
    ],
)
def test_wrong_calls_say_what_is_wanted(call: Any, message: str) -> None:
    group = Group.simulated(2)[0]
    with pytest.raises(ArgumentError) as caught:
        call(group)
    assert message in str(caught.value)
    assert group.check_heads(32) == 16


def test_describe() -> None:
    group = Group.simulated(2)[1]
    assert group.describe() == "rank 1 of 2: threads of one process, in NumPy"
    assert repr(group) == f"<cupyattn.distributed.Group, {group.describe()}>"

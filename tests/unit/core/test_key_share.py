"""A rank's share of keys, against a list of all tokens."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn.core.key_share import WHOLE, KeyShare
from cupyattn.errors import ArgumentError

SHARES = [(1, 1), (1, 16), (2, 1), (2, 16), (3, 1), (3, 5), (4, 64), (5, 2), (7, 3)]


def _held(share: KeyShare, tokens: int) -> list[int]:
    """The places of the rank's keys, one after another, as the rule says them."""
    size, run = share.cp_world_size, share.cp_kv_cache_interleave_size
    return [t for t in range(tokens) if t // run % size == share.cp_rank]


@pytest.mark.parametrize(("world", "run"), SHARES)
def test_counts_positions_and_indices_are_those_of_the_rule(world: int, run: int) -> None:
    most = 3 * world * run + 2
    for share in KeyShare(world, 0, run).all_ranks():
        held = _held(share, most)
        for tokens in range(most + 1):
            assert share.count(tokens) == sum(t < tokens for t in held)
        assert [share.position(i) for i in range(len(held))] == held
        indices = [share.index(t) for t in range(most)]
        assert indices == [held.index(t) if t in held else -1 for t in range(most)]
        assert [t for t in range(most) if share.holds(t)] == held


@pytest.mark.parametrize(("world", "run"), SHARES)
def test_arrays_are_what_numbers_are(world: int, run: int) -> None:
    values = np.arange(4 * world * run, dtype=np.int32)
    for share in KeyShare(world, 0, run).all_ranks():
        for function in (share.count, share.position, share.index, share.holds):
            found = function(values)
            assert found.tolist() == [function(int(v)) for v in values]
            if function != share.holds:
                assert found.dtype == np.int64


def test_no_rank_holds_a_token_before_the_first() -> None:
    before = np.array([-1, -2, -64])
    for world, run in SHARES:
        for share in KeyShare(world, 0, run).all_ranks():
            assert not share.holds(before).any() and (share.index(before) == -1).all()
            assert not share.holds(-1) and share.index(-1) == -1


def test_ranks_hold_every_token_once() -> None:
    lengths = np.random.default_rng(0).integers(0, 2**31 - 65, 200)
    for world, run in SHARES:
        counts = [share.count(lengths) for share in KeyShare(world, 0, run).all_ranks()]
        assert (np.sum(counts, axis=0) == lengths).all()
        owners = [share.holds(lengths) for share in KeyShare(world, 0, run).all_ranks()]
        assert (np.sum(owners, axis=0) == 1).all()


def test_counts_never_fall() -> None:
    for world, run in SHARES:
        for share in KeyShare(world, 0, run).all_ranks():
            counts = share.count(np.arange(-5, 5 * world * run))
            steps = np.diff(counts)
            assert counts[0] == 0 and steps.min() >= 0 and steps.max() <= 1


def test_long_sequences_do_not_overflow() -> None:
    share = KeyShare(2, 1, 1)
    longest = np.array([2**31 - 65], np.int32)
    assert share.count(longest).tolist() == [2**30 - 33]
    assert share.position(np.array([2**30], np.int32)).tolist() == [2**31 + 1]


def test_a_share_of_all_keys_changes_nothing() -> None:
    assert WHOLE.is_whole and not KeyShare(2).is_whole
    for tokens in range(70):
        assert WHOLE.count(tokens) == WHOLE.position(tokens) == WHOLE.index(tokens) == tokens


def test_shares_are_keys_of_caches() -> None:
    given = KeyShare(np.int64(4), np.int32(1), 16)
    assert given == KeyShare(4, 1, 16) and hash(given) == hash(KeyShare(4, 1, 16))
    assert type(given.cp_world_size) is int


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ((0, 0, 1), "cp_world_size: got 0"),
        ((-2, 0, 1), "cp_world_size: got -2"),
        ((2.5, 0, 1), "cp_world_size: got 2.5"),
        ((True, 0, 1), "cp_world_size: got True"),
        (("2", 0, 1), "cp_world_size: got '2'"),
        ((2**40, 0, 1), "cp_world_size: got"),
        ((2, 2, 1), "cp_rank: got 2 with cp_world_size=2; wanted 0 to 1"),
        ((1, 1, 1), "cp_rank: got 1"),
        ((2, -1, 1), "cp_rank: got -1"),
        ((2, None, 1), "cp_rank: got None"),
        ((2, 0, 0), "cp_kv_cache_interleave_size: got 0"),
        ((2, 0, 1.5), "cp_kv_cache_interleave_size: got 1.5"),
        ((4, 0, 2**30), "cp_kv_cache_interleave_size: 1073741824 tokens on each of 4 ranks"),
    ],
)
def test_bad_shares_are_refused(given: tuple, names: str) -> None:
    with pytest.raises(ArgumentError, match="^" + names.replace("[", r"\[")):
        KeyShare(*given)

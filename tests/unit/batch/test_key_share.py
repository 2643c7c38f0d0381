"""Batches whose keys several ranks share: ranks' states merge to the whole answer; bad input."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from helpers import key_shares
from helpers.batches import SMALL_WORKSPACE
from helpers.fake_batch import Device

import cupyattn
from cupyattn.core.key_share import KeyShare
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError
from cupyattn.launch.driver import params
from cupyattn.schedule.masking import Masking


@pytest.mark.parametrize("kind", key_shares.KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_states_of_all_ranks_merge_to_the_whole_answer(kind: str, seed: int) -> None:
    case = key_shares.random_case(seed, kind)
    got = key_shares.merged(case, np.asarray, np.asarray, SMALL_WORKSPACE)
    assert key_shares.error(got, key_shares.Whole.of(case).expected()) < 1e-6


@pytest.mark.parametrize("kind", key_shares.KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_launches_are_told_places_in_the_whole_sequence(
    device: Device, kind: str, seed: int
) -> None:
    """The fake GPU computes from the lists and masks that it is given."""
    case = key_shares.random_case(seed, kind)
    got = key_shares.merged(case, device.put, device.get, device.workspace())
    assert key_shares.error(got, key_shares.Whole.of(case).expected()) < 1e-6


def test_every_interleave_of_a_page_merges_to_the_whole_answer() -> None:
    base = key_shares.Case(0, "verify", 3, 1, (70, 5, 33), (4, 4, 4), window_left=9)
    wanted = key_shares.Whole.of(base).expected()
    for run in range(1, base.page_size + 1):
        case = key_shares.replace(base, run=run)
        got = key_shares.merged(case, np.asarray, np.asarray, SMALL_WORKSPACE)
        assert key_shares.error(got, wanted) < 1e-6


def test_kernels_get_numbers_that_count_as_the_host_does() -> None:
    def divide(n: int, magic: int, shift: int) -> int:
        return (2 * n * magic >> 32) >> shift  # shared/work.cuh

    lengths = [0, 1, 5, 63, 64, 65, 1000, 2**20 + 7, 2**31 - 65]
    for world, run in ((2, 1), (3, 16), (5, 7), (8, 64)):
        for share in KeyShare(world, 0, run).all_ranks():
            each, period, first, *magics = struct.unpack("<7I", params.pack_key_share(share))
            assert (each, period, first) == (run, share.period, share.first)
            for tokens in lengths:
                periods = divide(tokens, *magics[:2])
                rest = tokens - periods * period
                found = periods * each + min(max(rest - first, 0), each)
                assert found == share.count(tokens)
            for index in lengths[:-1]:
                place = index + divide(index, *magics[2:]) * (period - each) + first
                assert place == share.position(index)


def test_plans_know_which_keys_a_tile_sees() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        world, run = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        share = KeyShare(world, int(rng.integers(world)), run)
        whole, qo_len = int(rng.integers(1, 120)), int(rng.integers(1, 30))
        left, right = (int(x) for x in rng.integers(-1, 20, 2))
        masking = Masking(left, right, share=share)
        own = np.array([share.count(whole)])
        first = int(rng.integers(qo_len))
        last = int(rng.integers(first, qo_len))
        found = masking.span_lengths(
            np.array([first]), np.array([last]), np.array([qo_len]), own, None, 16, whole - own
        )
        places = share.position(np.arange(int(own[0])))
        rows = np.array([first, last]) + whole - qo_len
        seen = np.ones(places.size, bool)
        if right >= 0:
            seen &= places <= rows[1] + right
        if left >= 0:
            seen &= places >= rows[0] - left
        assert found.tolist() == [seen.sum()]
        tokens = int(rng.integers(0, 60))
        starts = np.arange(5 * share.period)
        held = share.count(starts + tokens) - share.count(starts)
        assert masking.keys_among(tokens) == held.max()


def _planned(**changes: Any) -> Any:
    """A decode wrapper of three requests with 3 rows each, of rank 1 of 2."""
    whole, share = np.array([20, 1, 9]), KeyShare(2, 1, 4)
    own = share.count(whole)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(SMALL_WORKSPACE)
    pages = -(-own // 4)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    given = {
        "indptr": indptr,
        "indices": np.arange(indptr[-1], dtype=np.int32),
        "last_page_len": np.where(own > 0, (own - 1) % 4 + 1, 0).astype(np.int32),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 4,
        "q_len_per_req": 3,
        "cp_world_size": 2,
        "cp_rank": 1,
        "cp_kv_cache_interleave_size": 4,
        "cp_tot_seqused_k": whole,
    }
    w.plan(**given | changes)
    return w


BAD_PLANS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("no ranks", ArgumentError, "cp_world_size: got 0", {"cp_world_size": 0}),
    ("half a rank", ArgumentError, "cp_world_size: got 1.5", {"cp_world_size": 1.5}),
    ("a flag", ArgumentError, "cp_world_size: got True", {"cp_world_size": True}),
    ("rank behind the last", ArgumentError, "cp_rank: got 2 with cp_world_size=2", {"cp_rank": 2}),
    ("rank below the first", ArgumentError, "cp_rank: got -1", {"cp_rank": -1}),
    ("a rank alone", ArgumentError, "cp_rank: got 1 with cp_world_size=1", {"cp_world_size": 1}),
    (
        "runs of no tokens",
        ArgumentError,
        "cp_kv_cache_interleave_size: got 0",
        {"cp_kv_cache_interleave_size": 0},
    ),
    (
        "runs beyond 32 bits",
        ArgumentError,
        "cp_kv_cache_interleave_size: 2000000000 tokens on each of 2 ranks",
        {"cp_kv_cache_interleave_size": 2_000_000_000},
    ),
    (
        "no whole lengths for rows",
        ArgumentError,
        "cp_tot_seqused_k: got None with cp_world_size=2",
        {"cp_tot_seqused_k": None},
    ),
    (
        "no whole lengths for a window",
        ArgumentError,
        "cp_tot_seqused_k: got None",
        {"cp_tot_seqused_k": None, "q_len_per_req": 1, "window_left": 3},
    ),
    (
        "too few whole lengths",
        ArgumentError,
        r"cp_tot_seqused_k: shape is \[2\]; wanted \[3\]",
        {"cp_tot_seqused_k": np.array([20, 1])},
    ),
    (
        "whole lengths of floats",
        ArgumentError,
        "cp_tot_seqused_k: got float64",
        {"cp_tot_seqused_k": np.array([20.0, 1.0, 9.0])},
    ),
    (
        "whole lengths of another sequence",
        ArgumentError,
        "cp_tot_seqused_k: request 0 has 8 keys here and 28 in all, of which rank 1 of 2 holds 12",
        {"cp_tot_seqused_k": np.array([28, 1, 9])},
    ),
    (
        "other whole lengths of one rank",
        ArgumentError,
        "cp_tot_seqused_k: request 0 has 8 keys here and 20 in all, of which rank 0 of 1 holds 20",
        {"cp_world_size": 1, "cp_rank": 0},
    ),
    (
        "negative whole lengths",
        ArgumentError,
        "cp_tot_seqused_k: request 1 has 0 keys here and -1 in all",
        {"cp_tot_seqused_k": np.array([20, -1, 9])},
    ),
    (
        "whole lengths beyond 32 bits",
        UnsupportedError,
        "cp_tot_seqused_k: a request has 4294967296 keys",
        {"cp_tot_seqused_k": np.array([20, 2**32, 9])},
    ),
    (
        "rotated keys",
        UnsupportedError,
        "pos_encoding_mode: 'ROPE_LLAMA' is not supported with cp_world_size=2",
        {"pos_encoding_mode": "ROPE_LLAMA"},
    ),
    (
        "ALiBi",
        UnsupportedError,
        "pos_encoding_mode: 'ALIBI' is not supported with cp_world_size=2",
        {"pos_encoding_mode": "ALIBI"},
    ),
    (
        "user-written logits",
        UnsupportedError,
        "logits_transform: is not supported with cp_world_size=2",
        {"logits_transform": "logit + kv_idx"},
    ),
    (
        "user-written mask",
        UnsupportedError,
        "mask_fn: is not supported with cp_world_size=2",
        {"mask_fn": "kv_idx % 2 == 0"},
    ),
]


@pytest.mark.parametrize("row", BAD_PLANS, ids=[row[0] for row in BAD_PLANS])
def test_bad_plans_are_refused(row: tuple[str, type[Exception], str, dict[str, Any]]) -> None:
    _, error, message, changes = row
    _planned()
    with pytest.raises(error, match="^" + message):
        _planned(**changes)


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((9, 4, 16), np.float16), np.zeros((8, 2, 4, 2, 16), np.float16)


def test_sinks_count_on_one_rank() -> None:
    q, cache = _arrays()
    with pytest.raises(UnsupportedError, match=r"^sinks: given on rank 1 of 2"):
        _planned().run(q, cache, sinks=np.zeros(4, np.float32))
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(SMALL_WORKSPACE)
    table = np.array([0, 1], np.int32), np.zeros(1, np.int32), np.array([2], np.int32)
    w.plan(*table, 4, 2, 16, 4, cp_world_size=2, cp_rank=0)
    w.run(q[:1], cache, sinks=np.zeros(4, np.float32))


def test_masks_of_runs_need_whole_lengths() -> None:
    q, cache = _arrays()
    w = _planned(q_len_per_req=1, cp_tot_seqused_k=None)
    w.run(q[:3], cache)
    with pytest.raises(ArgumentError, match=r"^cp_tot_seqused_k: got None"):
        w.run(q[:3], cache, mask=np.ones((3, 1), bool))
    with pytest.raises(ArgumentError, match=r"^cp_tot_seqused_k: got None"):
        w.run(q, cache, q_len_per_req=3)


def test_multi_item_scoring_is_refused() -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(SMALL_WORKSPACE)
    table = np.array([0, 1], np.int32), np.zeros(1, np.int32), np.array([4], np.int32)
    items = {"prefix_len_ptr": np.array([2]), "token_pos_in_items_ptr": np.array([0, 1])}
    with pytest.raises(UnsupportedError, match=r"^prefix_len_ptr, token_pos_in_items_ptr: multi"):
        w.plan(
            np.array([0, 2], np.int32), *table, 4, 2, 16, 4, cp_world_size=2, **items,
            token_pos_in_items_len=2,
        )  # fmt: skip


def test_another_number_of_rows_goes_by_the_same_lengths() -> None:
    q, cache = _arrays()
    rng = np.random.default_rng(1)
    cache = rng.standard_normal(cache.shape).astype(np.float16)
    q = rng.standard_normal(q.shape).astype(np.float16)
    got = _planned(q_len_per_req=1).run(q, cache, q_len_per_req=3)
    np.testing.assert_array_equal(got, _planned().run(q, cache))


def test_a_captured_graph_keeps_its_share(device: Device) -> None:
    table = np.array([0, 1], np.int32), np.zeros(1, np.int32), np.array([2], np.int32)
    buffers = [device.put(x) for x in (*table[:1], np.zeros(4, np.int32), *table[2:])]
    w = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(device.workspace(), *buffers)
    given = {"cp_world_size": 2, "cp_tot_seqused_k": np.array([4]), "q_len_per_req": 2}
    w.plan(*table, 4, 2, 64, 4, **given)
    with pytest.raises(PlanError, match=r"^cp_world_size, cp_rank, cp_kv_cache_interleave_size: "):
        w.plan(*table, 4, 2, 64, 4, **given, cp_rank=1)


def test_whole_lengths_and_tables_may_be_on_the_device(device: Device) -> None:
    whole = key_shares.Whole.of(key_shares.random_case(2, "verify"))
    case = whole.case
    wanted = whole.expected()
    states = []
    for share in case.shares:
        rank = key_shares.Rank.of(whole, share)
        w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace(), case.layout)
        for _ in range(2):  # the second would be made from the first, but for the share
            w.plan(
                *map(device.put, (rank.indptr, rank.indices, rank.last_page_len)),
                *case.heads,
                case.dim,
                case.page_size,
                q_len_per_req=case.qo_len[0],
                window_left=case.window_left,
                logits_soft_cap=case.soft_cap,
                kv_data_type=case.kv_dtype,
                o_data_type="float32",
                cp_tot_seqused_k=device.put(np.array(case.kv_len)),
                **rank.arguments,
            )
            cache = device.put(rank.k), device.put(rank.v)
            found = w.run(device.put(whole.q), cache, return_lse=True)
        states.append(tuple(device.get(x) for x in found))
    o, lse = (np.stack([state[i] for state in states], axis=1) for i in (0, 1))
    assert key_shares.error(cupyattn.reference.merge_states(o, lse), wanted) < 1e-6

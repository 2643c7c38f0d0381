"""Calls whose blocks find their items by lengths in device memory, kernels and all, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.plain_answers import dense

from cupyattn.choose import candidates
from cupyattn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from . import gpu

RAGGED = (33, 0, 129, 64, 17, 300, 1, 70)
# More than lanes hold, and two a lane.
MANY = tuple((7 * i) % 61 for i in range(70))
TWO = tuple((11 * i) % 67 for i in range(45))
ONESHOT = "q64_oneshot"
TILES = ("persistent", ONESHOT, "lean_persistent", "lean80")


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def check(
    rows: tuple[int, ...],
    keys: tuple[int, ...],
    tiles: str,
    *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    spare: int = 0,
    seed: int = 0,
    **facts: Any,
) -> list[str]:
    """Answers of ragged requests, `spare` rows behind them; the names of what was launched."""
    rng = np.random.default_rng(seed)
    q_begin, k_begin = offsets(rows), offsets(keys)
    q = rng.normal(0, 1, (q_begin[-1] + spare, heads[0], dim)).astype(np.float16)
    k, v = rng.normal(0, 1, (2, k_begin[-1] + spare, heads[1], dim)).astype(np.float16)
    out = np.full(q.shape, 7.0, np.float16)
    with (
        gpu.plugged_in(**{"seed": seed % 3, "num_sms": 4} | facts) as emulated,
        candidates.only(tiles),
    ):
        bounds = max(rows), max(keys)
        options: dict[str, Any] = {"causal": causal, "window_size": window, "out": out}
        for _ in range(2):  # the second finds its counter as the first left it
            out[:] = 7.0
            flash_attn_varlen_func(q, k, v, q_begin, k_begin, *bounds, **options)
        names = [launch.name for launch in emulated.launches]
    for i in range(len(rows)):
        own, its = slice(q_begin[i], q_begin[i + 1]), slice(k_begin[i], k_begin[i + 1])
        masks = {"scale": dim**-0.5, "chunk": 0, "causal": causal, "window": window}
        want, _ = dense(q[own], k[its], v[its], **masks)
        np.testing.assert_allclose(out[own], want, 2e-2, 2e-2, err_msg=f"request {i}")
    assert (out[q_begin[-1] :] == 7.0).all()  # rows of nobody
    return names


@pytest.mark.parametrize("tiles", TILES)
def test_prompts_are_one_launch(tiles: str) -> None:
    assert check(RAGGED, RAGGED, tiles) == 2 * ["prefill_sm90"]


@pytest.mark.parametrize("tiles", [ONESHOT, "lean_persistent"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [TWO, MANY], ids=["two", "many"])
def test_more_requests_than_lanes(tiles: str, causal: bool, rows: tuple[int, ...]) -> None:
    assert check(rows, rows, tiles, causal=causal, spare=9) == 2 * ["prefill_sm90"]


def test_as_many_requests_as_lanes_hold() -> None:
    """Some longer than a tile, and rows of nobody."""
    lengths = (300, *TWO, 129, 0, *MANY[:16])
    assert len(lengths) == 64
    check(lengths, lengths, ONESHOT, spare=9)


@pytest.mark.parametrize("tiles", [ONESHOT, "persistent"])
@pytest.mark.parametrize("window", [(-1, -1), (40, 0), (30, 20)])
def test_other_lengths_of_keys(tiles: str, window: tuple[int, int]) -> None:
    """More keys, none, and fewer than rows."""
    rows, keys = (70, 40, 90, 33, 5), (300, 0, 20, 33, 900)
    for causal in (False, True) if window == (-1, -1) else (False,):
        check(rows, keys, tiles, causal=causal, window=window)


@pytest.mark.parametrize("heads", [(3, 1), (5, 5), (14, 2)])
def test_one_request(heads: tuple[int, int]) -> None:
    """And rows behind it that nobody has, as where a graph has room for more."""
    for tiles in (ONESHOT, "lean_persistent"):
        check((133,), (133,), tiles, heads=heads, spare=70)


def check_appends(
    rows: int,
    lengths: tuple[int, ...],
    *,
    heads: tuple[int, int] = (4, 1),
    window: tuple[int, int] = (-1, -1),
    num_sms: int = 32,
    room: int = 0,
    tiles: str = "",
    seed: int = 0,
    **facts: Any,
) -> list[str]:
    """Answers of as many new rows of each request over pages; the names of what was launched."""
    rng = np.random.default_rng(seed)
    page, dim, count = 16, 64, len(lengths)
    width = -(-max(*lengths, room) // page)
    table = rng.permutation(count * width).reshape(count, width).astype(np.int32)
    q = rng.normal(0, 1, (count, rows, heads[0], dim)).astype(np.float16)
    keys = rng.normal(0, 1, (2, count * width, page, heads[1], dim)).astype(np.float16)
    used = np.array(lengths, np.int32)
    with (
        gpu.plugged_in(**{"seed": seed % 3, "num_sms": num_sms} | facts) as emulated,
        candidates.only(tiles),
    ):
        options = {"cache_seqlens": used, "page_table": table, "window_size": window}
        for _ in range(2):
            out = flash_attn_with_kvcache(q, *keys, causal=True, **options)
        names = [launch.name for launch in emulated.launches]
    for i, length in enumerate(lengths):
        k, v = (x[table[i]].reshape(-1, heads[1], dim)[:length] for x in keys)
        masks = {"scale": dim**-0.5, "chunk": 0, "causal": True, "window": window}
        want, _ = dense(q[i], k, v, **masks)
        np.testing.assert_allclose(out[i], want, 2e-2, 2e-2, err_msg=f"request {i}")
    return names


LENGTHS = (2600, 0, 33, 6000, 7)
APPENDED = (5000, 900, 40, 8000, 70)
OF_MANY = tuple((37 * i) % 400 for i in range(70))
DECODE, APPEND = ["decode_sm80"], ["prefill_sm90", "merge_splits"]


@pytest.mark.parametrize("window", [(-1, -1), (200, 0)])
@pytest.mark.parametrize("rows", [1, 4])
def test_decode_is_one_launch(rows: int, window: tuple[int, int]) -> None:
    names = check_appends(rows, LENGTHS, window=window)
    # A launch merges so many rows.
    assert names == 2 * (DECODE if rows == 1 else [*DECODE, "merge_splits"])


@pytest.mark.parametrize("heads", [(4, 1), (4, 2)])
def test_decode_of_as_many_requests_as_lanes_hold(heads: tuple[int, int]) -> None:
    lengths = (*OF_MANY[:31], 9000)
    assert check_appends(2, lengths, heads=heads, num_sms=160) == 2 * DECODE
    assert check_appends(2, (*lengths, 9), heads=heads, num_sms=160) == 2 * DECODE
    lengths = (*OF_MANY[:63], 9000)
    assert check_appends(2, lengths, heads=heads, num_sms=160) == 2 * DECODE
    assert check_appends(2, (*lengths, 9), heads=heads, num_sms=160)[0] == "plan_batch"


def test_appends_are_a_launch_and_a_merge() -> None:
    lengths = APPENDED
    assert check_appends(40, lengths, num_sms=64) == 2 * APPEND
    assert "plan_batch" not in check_appends(40, lengths, window=(700, 0), num_sms=64)


@pytest.mark.parametrize("count", [32, 33, 64])
def test_appends_of_as_many_requests_as_lanes_hold(count: int) -> None:
    lengths = (*(x + 20 for x in OF_MANY[: count - 1]), 5000)
    assert check_appends(20, lengths, num_sms=4 * count, room=6000) == 2 * APPEND
    if count == 64:
        check_appends(20, (*lengths, 99), num_sms=128, room=6000)


@pytest.mark.parametrize("rows", [4, 40])
def test_merges_wait_for_what_blocks_list(rows: int) -> None:
    """A merge begins before blocks have listed their items."""
    lengths = LENGTHS if rows == 4 else APPENDED
    names = check_appends(rows, lengths, num_sms=32 if rows == 4 else 64, begins_early=True)
    assert names[1::2] == 2 * ["merge_splits"]


def check_absurd(seed: int, tiles: str, **facts: Any) -> None:
    """Offsets of rows and keys that are not there: nothing is read or written beside arrays."""
    rng = np.random.default_rng(seed)
    count, rows, dim = (5, 40, 70)[seed % 3], 90, 64
    q, k, v = rng.normal(0, 1, (3, rows, 2, dim)).astype(np.float16)
    absurd = rng.integers(-(2**31), 2**31 - 1, (2, count + 1))
    likely = rng.integers(-9, 2 * rows, (2, count + 1))
    offsets = np.where(rng.random((2, count + 1)) < 0.3, absurd, likely).astype(np.int32)
    with gpu.plugged_in(**{"seed": seed % 3, "num_sms": 4} | facts), candidates.only(tiles):
        flash_attn_varlen_func(q, k, v, *offsets, rows, rows, causal=True)


@pytest.mark.parametrize("seed", range(8))
def test_absurd_offsets_stay_in_bounds(seed: int) -> None:
    check_absurd(seed, (ONESHOT, "lean_persistent")[seed // 4])

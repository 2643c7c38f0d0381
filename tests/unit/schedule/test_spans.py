"""The tiles and splits of one request: every visible key of every row is somebody's work, and once
only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers.level_plans import maskings
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.reference import Visibility
from cupyattn.schedule import Masking, tile_span
from cupyattn.schedule.balance import MAX_WAVES, Work
from cupyattn.schedule.batch import BatchRequests, Splitting, TileWork, alike_splits
from cupyattn.schedule.tile_shape import TileShape


@dataclass(frozen=True)
class Request:
    qo_len: int
    kv_len: int
    group_size: int
    num_kv_heads: int
    tile_q: int
    tile_kv: int
    num_slots: int
    masking: Masking

    @property
    def shape(self) -> TileShape:
        return TileShape(self.tile_q, self.tile_kv, self.num_slots)

    def work(self) -> Work:
        zero = np.zeros(1, np.int64)
        one = BatchRequests(zero + self.qo_len, zero + self.kv_len, zero, zero, uniform=self.qo_len)
        return TileWork(one, self.group_size, self.masking, splits_alike=True).of(self.shape)

    def num_splits(self) -> int:
        """As a launch of this request alone has them."""
        rows = self.qo_len * self.group_size
        return alike_splits(self.work(), self.num_kv_heads, rows, self.shape, Splitting())

    def row_tiles(self) -> Iterator[tuple[int, int]]:
        """(first, last) query token of each tile of packed rows."""
        rows = self.qo_len * self.group_size
        for begin in range(0, rows, self.tile_q):
            end = min(begin + self.tile_q, rows)
            yield begin // self.group_size, (end - 1) // self.group_size

    def span(self, first: int, last: int) -> tuple[int, int]:
        return self.masking.key_span(first, last, self.qo_len, self.kv_len)

    def seen(self) -> np.ndarray:
        windows = self.masking.window_left, self.masking.window_right
        return Visibility(self.qo_len, self.kv_len, False, *windows).dense()


def requests(longest_q: int = 70, longest_kv: int = 400) -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        qo_len=st.integers(1, longest_q),
        kv_len=st.integers(0, longest_kv),
        group_size=st.integers(1, 17),
        num_kv_heads=st.integers(1, 8),
        tile_q=st.sampled_from((16, 64, 128)),
        tile_kv=st.sampled_from((16, 32, 64, 128)),
        num_slots=st.integers(1, 600),
        masking=maskings(longest_kv + 10),
    )


@given(requests())
def test_every_visible_pair_is_covered_exactly_once(request: Request) -> None:
    num_splits, seen = request.num_splits(), request.seen()
    tiles = list(request.row_tiles())
    assert request.work().num_tiles == len(tiles)
    for first, last in tiles:
        begin, end = request.span(first, last)
        times = np.zeros(request.kv_len + request.tile_kv, int)
        for split in range(num_splits):
            a, b = tile_span(begin, end, request.tile_kv, split, num_splits)
            times[begin + a * request.tile_kv : begin + b * request.tile_kv] += 1
        assert times.max(initial=0) <= 1
        wanted = seen[first : last + 1].any(axis=0)
        assert times[: request.kv_len][wanted].all()
        # Nor does anybody touch a tile without a key in the span.
        assert not times[:begin].any()
        assert not times[begin + -(-(end - begin) // request.tile_kv) * request.tile_kv :].any()


@given(requests(longest_q=40, longest_kv=60), st.data())
def test_key_span_is_the_hull_of_what_is_seen(request: Request, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, request.qo_len - 1))
    last = data.draw(st.integers(first, request.qo_len - 1))
    begin, end = request.span(first, last)
    keys = np.flatnonzero(request.seen()[first : last + 1].any(axis=0))
    if keys.size:
        assert (begin, end) == (keys[0], keys[-1] + 1)
    else:
        assert begin == end


@given(
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.sampled_from((16, 32, 64, 128)),
    st.integers(1, 300),
)
def test_splits_are_contiguous_and_balanced(
    begin: int, length: int, tile_kv: int, num_splits: int
) -> None:
    end = begin + length
    spans = [tile_span(begin, end, tile_kv, split, num_splits) for split in range(num_splits)]
    sizes = [b - a for a, b in spans]
    assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]]
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1
    assert spans[0][0] == 0
    assert sum(sizes) == -(-length // tile_kv)


@given(requests(longest_q=5000, longest_kv=200_000))
def test_blocks_are_as_promised(request: Request) -> None:
    num_splits, work = request.num_splits(), request.work()
    assert work.num_tiles == -(-request.qo_len * request.group_size // request.tile_q)
    if num_splits > 1:
        # Parts of all key tiles are few waves, and none of the longest tile is idle.
        per_wave = max(1, request.num_slots // request.num_kv_heads)
        assert (num_splits - 1) * work.total <= work.longest * MAX_WAVES * per_wave
        # Under a window the last tile need not be the longest.
        spans = [request.span(*tile) for tile in request.row_tiles()]
        longest = max(-(-(end - begin) // request.tile_kv) for begin, end in spans)
        assert num_splits <= longest
        assert -(-longest // num_splits) < longest


@given(requests(longest_q=200, longest_kv=3000), st.integers(0, 200))
def test_windows_shorten_the_work(request: Request, window: int) -> None:
    def work(window_left: int) -> list[int]:
        spans = [
            replace(request.masking, window_left=window_left).key_span(
                a, b, request.qo_len, request.kv_len
            )
            for a, b in request.row_tiles()
        ]
        return [b - a for a, b in (tile_span(*span, request.tile_kv, 0, 1) for span in spans)]

    full, windowed = work(-1), work(window)
    assert all(w <= f for w, f in zip(windowed, full, strict=True))
    right = request.masking.window_right
    if right >= 0:
        tokens = -(-request.tile_q // request.group_size) + 1 + right
        assert max(windowed) <= (tokens + window) // request.tile_kv + 2
    assert work(request.kv_len + request.qo_len) == full


@given(requests(longest_q=3000, longest_kv=20_000))
def test_causality_shortens_the_work(request: Request) -> None:
    first, last = next(request.row_tiles())
    args = (first, last, request.qo_len, request.kv_len)
    begin, end = Masking(-1, 0).key_span(*args)
    assert begin == 0 and end == min(request.kv_len, max(0, last + 1 + args[3] - args[2]))
    assert Masking().key_span(*args) == (0, request.kv_len)


def test_a_long_decode_fills_the_slots() -> None:
    one = Request(1, 2048 * 64, 4, 8, 16, 64, 264, Masking())
    assert one.num_splits() == 33
    sizes = {b - a for a, b in (tile_span(0, 2048 * 64, 64, s, 33) for s in range(33))}
    assert sizes == {62, 63}


@pytest.mark.parametrize("num_slots", [1, 132, 264, 528])
@pytest.mark.parametrize("kv_len", [1000, 4096, 32_768, 131_072, 1_000_000])
def test_a_decode_fills_the_gpu(kv_len: int, num_slots: int) -> None:
    """At least half of the slots of the waves it takes do work."""
    num_blocks = 8 * Request(1, kv_len, 4, 8, 16, 64, num_slots, Masking()).num_splits()
    waves = -(-num_blocks // num_slots)
    most = 8 * -(-kv_len // 64)
    assert num_blocks >= min(most, waves * num_slots) // 2

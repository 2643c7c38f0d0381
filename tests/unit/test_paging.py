"""Page arithmetic against loops over requests, and there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import paging
from cupyattn.errors import ArgumentError

LENGTHS = st.lists(st.integers(0, 70), max_size=12)
PAGE_SIZES = st.integers(1, 20)


def ints(*x: int) -> np.ndarray:
    return np.array(x, np.int32)


def pool(lengths: list[int], page_size: int, seed: int) -> tuple[np.ndarray, ...]:
    """(kv_indptr, kv_indices, kv_last_page_len) with pages in any order, some not used."""
    indptr, last = paging.lengths_to_pages(ints(*lengths), page_size)
    pages = np.random.default_rng(seed).permutation(int(indptr[-1]) + 5).astype(np.int32)
    return indptr, pages, last


@given(LENGTHS, PAGE_SIZES)
def test_lengths_and_pages(lengths: list[int], page_size: int) -> None:
    indptr, last = paging.lengths_to_pages(ints(*lengths), page_size)
    assert indptr[0] == 0 and indptr.size == len(lengths) + 1
    for b, length in enumerate(lengths):
        pages = indptr[b + 1] - indptr[b]
        assert pages == len(range(0, length, page_size))
        assert last[b] == (0 if not length else length - (pages - 1) * page_size)
        assert (1 <= last[b] <= page_size) == (length > 0)
    assert paging.pages_to_lengths(indptr, last, page_size).tolist() == lengths


def test_a_request_without_pages_has_its_last_length() -> None:
    assert paging.pages_to_lengths(ints(0, 0, 2), ints(3, 1), 4).tolist() == [3, 5]


def test_lengths_beyond_32_bits() -> None:
    lengths = np.array([2**33 + 1, 2**33], np.int64)
    indptr, last = paging.lengths_to_pages(lengths, 2**20)
    assert indptr.tolist() == [0, 2**13 + 1, 2**14 + 1] and last.tolist() == [1, 2**20]
    back = paging.pages_to_lengths(indptr.astype(np.int32), last.astype(np.int32), 2**20)
    assert back.tolist() == lengths.tolist()


@given(LENGTHS, PAGE_SIZES, st.integers(0, 99), st.integers(0, 3))
def test_tables_and_csr(lengths: list[int], page_size: int, seed: int, spare: int) -> None:
    indptr, indices, _ = pool(lengths, page_size, seed)
    counts = np.diff(indptr)
    width = int(counts.max(initial=0)) + spare
    table = paging.csr_to_table(indptr, indices, width if spare else None, fill=-7)
    assert table.shape == (len(lengths), width)
    for b, row in enumerate(table):
        mine = indices[indptr[b] : indptr[b + 1]].tolist()
        assert row.tolist() == mine + [-7] * (width - len(mine))
    new_indptr, new_indices = paging.table_to_csr(table, counts)
    assert new_indptr.tolist() == indptr.tolist()
    assert new_indices.tolist() == indices[: indptr[-1]].tolist()


@given(LENGTHS, PAGE_SIZES, st.integers(0, 99))
def test_slots_are_one_for_each_key(lengths: list[int], page_size: int, seed: int) -> None:
    indptr, indices, _ = pool(lengths, page_size, seed)
    batch = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths] or [ints()]).astype(np.int32)
    order = np.random.default_rng(seed).permutation(batch.size)
    batch, position = batch[order], position[order]
    batch[::3] = -1
    position[::3] = 10**6
    rows, page, offset = paging.slots(batch, position, indptr, indices, page_size, indices.size)
    assert rows.tolist() == [i for i in range(batch.size) if i % 3]
    for row, p, o in zip(rows, page, offset, strict=True):
        assert p == indices[indptr[batch[row]] + position[row] // page_size]
        assert o == position[row] % page_size
    assert len(set(zip(page.tolist(), offset.tolist(), strict=True))) == rows.size


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=9), st.integers(0, 5))
def test_positions_of_new_tokens(requests: list[tuple[int, int]], spare: int) -> None:
    new, before = ints(*(n for n, _ in requests)), ints(*(p for _, p in requests))
    indptr = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    batch, positions = paging.positions_of(indptr, before + new, int(indptr[-1]) + spare)
    expected = [(b, p + i) for b, (n, p) in enumerate(requests) for i in range(n)]
    assert list(zip(batch, positions, strict=True)) == expected + [(-1, 0)] * spare


def test_rows_ahead_of_the_first_request_belong_to_none() -> None:
    batch, positions = paging.positions_of(ints(2, 3), ints(5), 4)
    assert (batch.tolist(), positions.tolist()) == ([-1, -1, 0, -1], [0, 0, 4, 0])


SLOTS = (ints(0), ints(0), ints(0, 1), ints(0))
BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "negative length": ("seq_lens: -1", lambda: paging.lengths_to_pages(ints(3, -1), 2)),
    "float lengths": ("seq_lens: got float64", lambda: paging.num_pages(np.zeros(2), 2)),
    "no page size": ("page_size: got 0", lambda: paging.num_pages(ints(2), 0)),
    "offsets fall": (
        "kv_indptr: | fall",
        lambda: paging.pages_to_lengths(ints(0, 2, 1), ints(1, 1), 4),
    ),
    "one offset too few": (
        "kv_indptr: has 2",
        lambda: paging.pages_to_lengths(ints(0, 2), ints(1, 1), 4),
    ),
    "negative offset": ("kv_indptr:", lambda: paging.csr_to_table(ints(-1, 1), ints(1, 2))),
    "short indices": ("kv_indices: has 1", lambda: paging.csr_to_table(ints(0, 2), ints(1))),
    "narrow table": ("max_pages: got 1", lambda: paging.csr_to_table(ints(0, 2), ints(1, 2), 1)),
    "flat table": ("table: shape [3]", lambda: paging.table_to_csr(ints(1, 2, 3), ints(3))),
    "long row": ("counts: | 2 pages", lambda: paging.table_to_csr(np.zeros((1, 2), int), ints(3))),
    "lost tokens": ("seq_lens: | fewer", lambda: paging.positions_of(ints(0, 3), ints(2), 3)),
    "few rows": ("nnz: got 2 | ends at 3", lambda: paging.positions_of(ints(0, 3), ints(3), 2)),
    "no such request": ("batch_indices: 1 | 1 req", lambda: paging.slots(ints(1), *SLOTS[1:], 4)),
    "past the pages": (
        "positions: row 0 is at 4",
        lambda: paging.slots(ints(0), ints(4), *SLOTS[2:], 4),
    ),
    "negative position": (
        "positions: | -1",
        lambda: paging.slots(ints(0), ints(-1), *SLOTS[2:], 4),
    ),
    "past the pool": ("page 0 | of the 0", lambda: paging.slots(*SLOTS, 4, 0)),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_tables(what: str) -> None:
    words, call = BAD[what]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert not [word for word in words.split(" | ") if word not in str(caught.value)], caught.value

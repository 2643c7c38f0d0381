"""Offsets of query rows, which are read once for plans that have the same."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn.engine import requests
from cupyattn.engine.requests import read_rows
from cupyattn.errors import ArgumentError


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_equal_offsets_are_read_once(dtype: type) -> None:
    offsets = np.array([0, 3, 6, 9], dtype)
    rows = read_rows(offsets)
    assert read_rows(offsets.copy()) is rows and rows.uniform == 3
    assert rows.indptr.tolist() == [0, 3, 6, 9] and rows.lengths.tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="read-only"):
        rows.lengths[0] = 5
    offsets[1] = 4  # the caller's own array, written again
    assert read_rows(offsets).lengths.tolist() == [4, 2, 3]
    assert read_rows(np.repeat(offsets, 2)[::2]).lengths.tolist() == [4, 2, 3]


def test_bytes_of_other_types_are_other_offsets() -> None:
    short = np.array([0, 0, 2, 0], np.int32)  # [0, 2] in 64 bits
    assert read_rows(short.view(np.int64)).lengths.tolist() == [2]
    with pytest.raises(ArgumentError, match="falls from 2 to 0"):
        read_rows(short)
    for wrong in (short.astype(np.float32), short.astype(">i4"), short.reshape(2, 2)):
        with pytest.raises(ArgumentError, match="wanted int32 or int64 with one dimension"):
            read_rows(wrong)


def test_wrong_offsets_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match="wanted 0"):
            read_rows(np.array([1, 2]))
        with pytest.raises(ArgumentError, match="at least 1"):
            read_rows(np.zeros(0, np.int32))


def test_few_offsets_are_kept() -> None:
    before = requests._known_rows.cache_info().misses
    many = np.arange(requests._MAX_KNOWN + 1)
    assert read_rows(many).uniform == 1
    assert requests._known_rows.cache_info().misses == before
    assert requests._known_rows.cache_info().maxsize == 64


@pytest.mark.parametrize("wrong", [-1, 33, -(2**31), 2**40])
def test_lengths_fit_their_pages(wrong: int) -> None:
    lengths = np.array([32, 0, wrong])
    with pytest.raises(ArgumentError, match=r"request 2 has .* wanted 0 to 32"):
        requests._read_lengths(lengths, np.array([2, 0, 2]), 16, "kv_len_arr")
    lengths[2] = 32
    assert requests._read_lengths(lengths, np.array([2, 0, 2]), 16, "kv_len_arr")[2] == 32

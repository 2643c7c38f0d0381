"""Page operations on CPU arrays: against loops, in every layout, form and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.page_cases import DTYPES, Append, AppendCase
from helpers.poison import download

import cupyattn
from cupyattn import array, page, paging
from cupyattn.array import as_numpy, view
from cupyattn.errors import ArgumentError

PLAIN = AppendCase()


def module(name: str) -> Any:
    return pytest.importorskip(name)


def make(framework: str, a: np.ndarray) -> Any:
    if framework == "torch":
        return array.from_numpy(a.copy(), view(module("torch").zeros(1), "like"))
    return module("jax").numpy.asarray(a) if framework == "jax" else a.copy()


def ints(*x: int) -> np.ndarray:
    return np.array(x, np.int32)


# --- append ---


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_every_dtype(framework: str, dtype: str, cache_dtype: str) -> None:
    scales = (0.3, 17.0) if dtype != cache_dtype else (None, None)
    case = replace(PLAIN, dtype=dtype, cache_dtype=cache_dtype, scales=scales)
    Append(case, module(framework), device="cpu").run_and_check()


@pytest.mark.parametrize("strides", ["packed", "gaps", "unaligned"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["array", "pair", "no page axis"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_form(page_size: int, form: str, kv_layout: str, strides: str) -> None:
    if form == "no page axis" and page_size != 1:
        return
    dims = (64, 64) if form == "array" else (40, 72)
    case = replace(PLAIN, page_size=page_size, form=form, kv_layout=kv_layout, head_dims=dims)
    Append(replace(case, strides=strides, num_kv_heads=3), np).run_and_check()


def test_one_array_without_a_page_axis() -> None:
    cache = np.zeros((5, 2, 3, 8), np.float16)
    k, v = (np.full((1, 3, 8), x, np.float16) for x in (1, 2))
    cupyattn.append_paged_kv_cache(
        k, v, ints(0), ints(1), cache, ints(4, 2), ints(0, 2), ints(1), "HND"
    )
    assert (cache[2, 0] == 1).all() and (cache[2, 1] == 2).all() and np.count_nonzero(cache) == 48


def test_long_indices_and_lists_are_taken() -> None:
    append = Append(replace(PLAIN, form="pair"), np)
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
    pair = list(append.arguments["paged_kv_cache"])
    append.run(
        **{name: append.arguments[name].astype(np.int64) for name in names}, paged_kv_cache=pair
    )
    append.check()


def test_keys_and_cache_of_different_frameworks() -> None:
    append = Append(PLAIN, module("torch"), device="cpu")
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
    given = {name: make("jax", append.arguments[name].numpy()) for name in names}
    k, v = (make("jax", x) for x in append.new)
    append.run_and_check(append_key=k, append_value=v, **given)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("form", ["array", "pair"])
def test_a_cache_of_jax_arrays_comes_back_new(form: str, dtype: str, cache_dtype: str) -> None:
    case = replace(PLAIN, form=form, dtype=dtype, cache_dtype=cache_dtype)
    arguments = Append(case, np).arguments
    pages = arguments["paged_kv_cache"]
    given = [make("jax", x.copy()) for x in (pages if form == "pair" else [pages])]
    cache = tuple(given) if form == "pair" else given[0]
    got = cupyattn.append_paged_kv_cache(**arguments | {"paged_kv_cache": cache})
    assert cupyattn.append_paged_kv_cache(**arguments) is None
    made, written = ([*x] if form == "pair" else [x] for x in (got, pages))
    for new, old, wanted in zip(made, given, written, strict=True):
        assert type(new) is type(old)
        np.testing.assert_array_equal(download(new).view(np.uint8), wanted.copy().view(np.uint8))
        assert (download(old).view(np.uint8) != download(new).view(np.uint8)).any()


def test_no_work() -> None:
    for lengths in ((), ((3, 0),)):
        Append(replace(PLAIN, lengths=lengths), np).run_and_check()
    for heads, dims in ((0, (64, 64)), (2, (0, 0))):
        append = Append(replace(PLAIN, num_kv_heads=heads, head_dims=dims), np)
        append.run()


def test_a_prefill_then_a_decode_loop() -> None:
    """Index arrays from lengths, appends, and the pages read back in order."""
    rng = np.random.default_rng(0)
    pg, lengths, heads, dim, steps = 4, np.array([5, 1, 8]), 2, 8, 6
    cache = np.full((16, 2, pg, heads, dim), np.nan, np.float32)
    free = rng.permutation(16).astype(np.int32)
    keys: list[list[np.ndarray]] = [[] for _ in lengths]
    table = np.full((3, 6), -1, np.int32)
    for step in range(steps):
        new = lengths if step == 0 else np.ones(3, np.int64)
        if step:
            lengths = lengths + 1
        counts = paging.num_pages(lengths, pg)
        for b in range(3):
            for i in range(counts[b]):
                if table[b, i] < 0:
                    table[b, i], free = free[0], free[1:]
        indptr, indices = paging.table_to_csr(table, counts)
        last = paging.lengths_to_pages(lengths, pg)[1]
        seq_lens = page.get_seq_lens(indptr, last, pg)
        np.testing.assert_array_equal(seq_lens, lengths)
        append_indptr = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        nnz = int(append_indptr[-1])
        where = page.get_batch_indices_positions(append_indptr, seq_lens, nnz + 2)
        k = rng.standard_normal((nnz + 2, heads, dim)).astype(np.float32)
        page.append_paged_kv_cache(k, -k, *where, cache, indices, indptr, last)
        for b in range(3):
            keys[b] += list(k[append_indptr[b] : append_indptr[b + 1]])
    for b, mine in enumerate(keys):
        stored = cache[indices[indptr[b] : indptr[b + 1]]]
        flat = stored.swapaxes(1, 2).reshape(-1, 2, heads, dim)[: lengths[b]]
        np.testing.assert_array_equal(flat[:, 0], np.stack(mine))
        np.testing.assert_array_equal(flat[:, 1], -np.stack(mine))


# --- batch indices, positions, lengths ---


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_batch_indices_and_positions(framework: str) -> None:
    indptr, lengths = make(framework, ints(0, 2, 2, 5)), make(framework, ints(2, 9, 7))
    found = cupyattn.get_batch_indices_positions(indptr, lengths, 7)
    assert [type(x) for x in found] == [type(indptr)] * 2
    batch, positions = (as_numpy(view(x, "x")) for x in found)
    assert batch.dtype == positions.dtype == np.int32
    assert batch.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert positions.tolist() == [0, 1, 4, 5, 6, 0, 0]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_given_outputs_are_written(framework: str) -> None:
    indptr, lengths = make(framework, ints(0, 2)), make(framework, ints(5))
    b, p = make(framework, ints(7, 7, 7)), make(framework, ints(7, 7, 7))
    got = cupyattn.get_batch_indices_positions(indptr, lengths, 3, b, p)
    assert got[0] is b and got[1] is p
    assert [x.tolist() for x in got] == [[0, 0, -1], [3, 4, 0]]
    b[:] = 7
    got = cupyattn.get_batch_indices_positions(indptr, lengths, np.int64(3), batch_indices=b)
    assert got[0] is b and got[1] is not p and got[1].tolist() == [3, 4, 0]
    assert b.tolist() == [0, 0, -1]


def test_no_requests_and_no_rows() -> None:
    batch, positions = cupyattn.get_batch_indices_positions(ints(0), ints(), 2)
    assert (batch.tolist(), positions.tolist()) == ([-1, -1], [0, 0])
    batch, positions = cupyattn.get_batch_indices_positions(ints(0, 0), ints(4), 0)
    assert batch.shape == positions.shape == (0,)
    assert cupyattn.get_seq_lens(ints(0), ints(), 4).shape == (0,)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_lengths(framework: str) -> None:
    indptr, last = make(framework, ints(0, 2, 2, 3)), make(framework, ints(3, 0, 16))
    lens = cupyattn.get_seq_lens(indptr, last, 16)
    assert type(lens) is type(indptr) and as_numpy(view(lens, "x")).dtype == np.int32
    assert lens.tolist() == [19, 0, 16]


@pytest.mark.parametrize("last", [17, 20, 2**31 - 1])
def test_a_last_page_holds_a_page(last: int) -> None:
    indptr, lengths = np.array([0, 2, 3], np.int32), np.array([16, last], np.int32)
    with pytest.raises(ArgumentError, match=f"request 1 has {last} keys in its last page, which"):
        cupyattn.get_seq_lens(indptr, lengths, 16)

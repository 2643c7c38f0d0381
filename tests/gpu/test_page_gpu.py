"""Page operations on a GPU, bit for bit: every form of cache, stray indices, streams, graphs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import page_cases, poison, share_cases
from helpers.on_gpu import capture
from helpers.page_cases import DTYPES, STRAY, Append, AppendCase, random_case, spoil
from helpers.poison import download, raw, upload
from helpers.share import some

import cupyattn
from cupyattn import paging
from cupyattn.core import dtypes
from cupyattn.engine import call_cache
from cupyattn.errors import ArgumentError
from cupyattn.launch.driver import enqueue

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

PLAIN = AppendCase()
NUM_RANDOM, PER_TEST = 240, 20
# Cycles of a kernel that only waits: tens of milliseconds, far longer than the host needs.
_LONG = 100_000_000


def ints(*x: int) -> np.ndarray:
    return np.array(x, np.int32)


def run_and_check(case: AppendCase, xp: ModuleType) -> None:
    Append(case, xp).run_and_check()


# --- append: every kernel, every form ---


@pytest.mark.parametrize("strides", ["packed", "gaps", "unaligned"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_every_dtype(xp: ModuleType, dtype: str, cache_dtype: str, strides: str) -> None:
    scales = (0.3, 17.0) if dtype != cache_dtype else (None, None)
    case = replace(PLAIN, dtype=dtype, cache_dtype=cache_dtype, scales=scales, strides=strides)
    run_and_check(case, xp)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["array", "pair", "no page axis"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_form(xp: ModuleType, page_size: int, form: str, kv_layout: str) -> None:
    if form == "no page axis" and page_size != 1:
        pytest.skip("pages of one slot only")
    dims = (64, 64) if form == "array" else (40, 72)
    case = replace(PLAIN, page_size=page_size, form=form, kv_layout=kv_layout, head_dims=dims)
    for strides in ("packed", "gaps", "unaligned"):
        run_and_check(replace(case, strides=strides, num_kv_heads=3), xp)


@pytest.mark.parametrize("first", range(0, NUM_RANDOM, PER_TEST))
def test_random_appends(torch: Any, first: int) -> None:
    for seed in range(first, first + some(PER_TEST)):
        run_and_check(random_case(seed), (cupy, torch)[seed % 2])


def test_more_heads_than_a_block_has_threads(xp: ModuleType) -> None:
    run_and_check(replace(PLAIN, num_kv_heads=1500, lengths=((2, 3),)), xp)


@pytest.mark.parametrize("cache_dtype", page_cases.FP8)
@pytest.mark.parametrize("dtype", page_cases.WIDE)
@pytest.mark.parametrize("dim", [64, 1])
def test_every_rounding(dtype: str, cache_dtype: str, dim: int) -> None:
    """All 16-bit values, or floats around every boundary, against ml_dtypes; dim 1 is scalar."""
    kind, fp8 = dtypes.parse(dtype).numpy, dtypes.parse(cache_dtype).numpy
    if dtype == "float32":
        x = page_cases.all_roundings()
    else:
        x = np.arange(2**16, dtype=np.uint16).view(kind)
    x = x.reshape(-1, 1, dim)
    nnz = len(x)
    where = upload(np.zeros(nnz, np.int32), cupy), upload(np.arange(nnz, dtype=np.int32), cupy)
    table = (upload(a, cupy) for a in (ints(0), ints(0, 1), ints(nnz)))
    cache = upload(np.zeros((1, 2, nnz, 1, dim), fp8), cupy)
    new = upload(x, cupy)
    cupyattn.append_paged_kv_cache(new, new, *where, cache, *table, v_scale=0.7)
    for part, scale in zip(download(cache)[0], (1.0, 0.7), strict=True):
        wanted = page_cases.rounded(x, scale, fp8).view(np.uint8)
        wrong = np.flatnonzero(part.view(np.uint8) != wanted)
        assert not wrong.size, (
            f"{x.flat[wrong[0]]!r} / {scale} became {part.view(np.uint8).flat[wrong[0]]:#x}, "
            f"wanted {wanted.flat[wrong[0]]:#x}; {wrong.size} differ"
        )


# --- stray indices write nothing ---


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["array", "pair"])
def test_stray_indices_write_nothing(xp: ModuleType, form: str, cache_dtype: str) -> None:
    append = Append(replace(STRAY, form=form, cache_dtype=cache_dtype), xp)
    assert spoil(append) >= 10
    append.run_and_check()


def test_a_page_table_that_is_cut_short(xp: ModuleType) -> None:
    """kv_indptr reaches beyond kv_indices: what lies behind is not read."""
    append = Append(STRAY, xp)
    keep = 5
    indices = download(append.arguments["kv_indices"])
    kept = poison.embed(indices[:keep], xp=xp)
    append.slots = [s for s in append.slots if s[1] in indices[:keep]]
    append.run_and_check(kv_indices=kept.array)


def test_offsets_that_fall(xp: ModuleType) -> None:
    append = Append(STRAY, xp)
    append.slots = []
    append.run_and_check(kv_indptr=upload(ints(2**31 - 1, -5, -(2**31), 3, -7), xp))


def test_debug_counts_what_is_left_out(xp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Append(STRAY, xp)
    call_cache.clear_all()  # of calls before debugging, which a process begins with
    monkeypatch.setattr(enqueue.cuda(), "is_debugging", True)
    append.run_and_check()
    count = spoil(append)
    with pytest.raises(ArgumentError, match=f"positions: {count} of "):
        append.run()


def test_int64_indices_are_converted_on_the_device(xp: ModuleType) -> None:
    append = Append(PLAIN, xp)
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
    long = {name: upload(download(append.arguments[name]).astype(np.int64), xp) for name in names}
    append.run_and_check(**long)


# --- far offsets ---


@pytest.mark.large(gib=8)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_cache_of_more_elements_than_31_bits_count(dtype: str) -> None:
    page_size, heads, dim = 16, 8, 128
    num_pages = 2**31 // (2 * page_size * heads * dim) + 9
    fp8, bits = dtypes.parse(dtype).numpy, np.dtype(f"u{dtypes.parse(dtype).itemsize}")
    pool = cupy.zeros((num_pages, 2, page_size, heads, dim), bits)
    rng = np.random.default_rng(0)
    bf16 = dtypes.bfloat16.numpy
    k, v = ((1 + rng.random((4, heads, dim), np.float32)).astype(bf16) for _ in range(2))
    indices = ints(num_pages - 1, 0, num_pages - 2)
    cupyattn.append_paged_kv_cache(
        *(upload(x, cupy) for x in (k, v, ints(0, 0, 1, 1), ints(0, 17, 3, 15))),
        pool.view(fp8),
        *(upload(x, cupy) for x in (indices, ints(0, 2, 3), ints(2, 16))),
    )
    slots = ((num_pages - 1, 0), (0, 1), (num_pages - 2, 3), (num_pages - 2, 15))
    for row, (page, offset) in enumerate(slots):
        for part, x in enumerate((k, v)):
            wanted = x[row] if dtype == "bfloat16" else page_cases.rounded(x[row], 1.0, fp8)
            got = pool[page, part, offset].get()
            np.testing.assert_array_equal(got, wanted.view(bits))
            pool[page, part, offset] = 0
    # A page at a time is slow, all at once needs as much memory again.
    assert not any(bool(pool[i : i + 4096].any()) for i in range(0, num_pages, 4096))


@pytest.mark.large(gib=8)
def test_more_rows_than_32_bits_count() -> None:
    heads = 2**20
    nnz = 2**32 // heads + 3
    new = cupy.zeros((nnz, heads, 1), np.uint8)
    new[-1, :, 0] = cupy.arange(heads) % 120 + 1
    batch = np.full(nnz, -1, np.int32)
    batch[-1] = 0
    cache = cupy.zeros((2, 2, 1, heads, 1), np.uint8)
    e4m3 = dtypes.float8_e4m3fn.numpy
    index = [upload(x, cupy) for x in (batch, np.zeros(nnz, np.int32))]
    table = [upload(x, cupy) for x in (ints(1), ints(0, 1), ints(1))]
    rows = new.view(e4m3)
    cupyattn.append_paged_kv_cache(rows, rows, *index, cache.view(e4m3), *table)
    assert bool((cache[1, :, 0] == new[-1]).all()) and not bool(cache[0].any())


# --- batch indices, positions, lengths ---


@pytest.mark.parametrize("seed", range(8))
def test_index_arrays(xp: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests, page_size = (0, 1, 2, 7, 300, 1000, 5000, 4)[seed], int(rng.integers(1, 70))
    new = rng.integers(0, 5, requests) * (rng.random(requests) < 0.7)
    lengths = new + rng.integers(0, 3000, requests)
    append_indptr = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    kv_indptr, last = paging.lengths_to_pages(lengths, page_size)
    inputs = [poison.embed(x.astype(np.int32), xp=xp) for x in (append_indptr, kv_indptr, last)]
    indptr, pages, last_page = (p.array for p in inputs)
    seq_lens = cupyattn.get_seq_lens(pages, last_page, page_size)
    assert type(seq_lens) is type(pages)
    np.testing.assert_array_equal(download(seq_lens), lengths.astype(np.int32))
    for spare in (0, 1, 700):
        nnz = int(append_indptr[-1]) + spare
        wanted = [x.astype(np.int32) for x in paging.positions_of(append_indptr, lengths, nnz)]
        made = cupyattn.get_batch_indices_positions(indptr, seq_lens, nnz)
        outs = [poison.blank((nnz,), np.dtype(np.int32), xp=xp) for _ in range(2)]
        given = cupyattn.get_batch_indices_positions(
            indptr, seq_lens, nnz, *(p.array for p in outs)
        )
        assert all(x is p.array for x, p in zip(given, outs, strict=True))
        for got, p, expected in zip(made, outs, wanted, strict=True):
            assert type(got) is type(indptr)
            np.testing.assert_array_equal(download(got), expected)
            np.testing.assert_array_equal(p.values(), expected)
            p.assert_intact("output")


def test_fewer_rows_than_tokens(xp: ModuleType) -> None:
    """Outputs have nnz rows, whatever the offsets say."""
    outs = [poison.blank((3,), np.dtype(np.int32), xp=xp) for _ in range(2)]
    given = (upload(x, xp) for x in (ints(0, 2, 900), ints(5, 1000)))
    cupyattn.get_batch_indices_positions(*given, 3, *(p.array for p in outs))
    assert [p.values().tolist() for p in outs] == [[0, 0, 1], [3, 4, 102]]
    for p in outs:
        p.assert_intact("output")


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_shares_of_keys(torch: Any, first: int) -> None:
    for seed in range(first, first + some(20)):
        share_cases.Case(seed, (cupy, torch)[seed % 2]).run()


def test_a_share_of_a_step_in_a_graph(torch: Any, xp: ModuleType) -> None:
    """Lengths and lists of a rank follow the whole ones from replay to replay."""
    lens = upload(ints(3, 700, 0), xp)
    lists = upload(np.zeros((3, 600), np.int32), xp)
    own_lens, own = upload(ints(0, 0, 0), xp), upload(np.zeros((3, 600), np.int32), xp)
    counts = upload(ints(0, 0, 0), xp)

    def step() -> None:
        cupyattn.get_share_seq_lens(lens, 4, 2, 3, out=own_lens)
        cupyattn.get_share_lists(lists, 4, 2, 3, lens=lens, out=own, counts=counts)

    step()
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    replay = capture(torch, xp, step)
    rng = np.random.default_rng(3)
    for _ in range(4):
        whole, indices = rng.integers(0, 700, 3), rng.integers(-9, 5000, (3, 600))
        lens[...] = upload(whole.astype(np.int32), xp)
        lists[...] = upload(indices.astype(np.int32), xp)
        replay()
        wanted = cupyattn.get_share_lists(indices, 4, 2, 3, lens=whole)
        assert (download(own_lens) == cupyattn.get_share_seq_lens(whole, 4, 2, 3)).all()
        assert (download(own) == wanted[0]).all() and (download(counts) == wanted[1]).all()


# --- frameworks, streams, graphs ---


def test_jax_arrays_go_into_a_cupy_cache() -> None:
    jax = pytest.importorskip("jax")
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("JAX is here without CUDA")
    append = Append(replace(PLAIN, dtype="float32", cache_dtype="float32"), cupy)
    names = [name for name in append.arguments if name not in ("paged_kv_cache", "kv_layout")]
    values = {name: jax.numpy.asarray(download(append.arguments[name])) for name in names}
    append.run_and_check(**values)
    indptr, lengths = (jax.numpy.asarray(x) for x in (ints(0, 2), ints(5)))
    batch, positions = cupyattn.get_batch_indices_positions(indptr, lengths, 3)
    assert isinstance(batch, jax.Array) and isinstance(positions, jax.Array)
    assert (batch.tolist(), positions.tolist()) == ([0, 0, -1], [3, 4, 0])
    assert cupyattn.get_seq_lens(indptr, lengths, 8).tolist() == [13]


def test_the_callers_stream(torch: Any) -> None:
    """On a side stream, behind a kernel that waits and the write of what is appended."""
    append = Append(PLAIN, torch)
    append.run()  # compiled and loaded
    append = Append(PLAIN, torch)
    key = append.arguments["append_key"]
    right = raw(key).clone()
    raw(key).zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_LONG)
        raw(key).copy_(right)
        append.run()
    torch.cuda.synchronize()
    append.check()


def test_a_torch_cache_and_cupy_keys(torch: Any) -> None:
    append, other = Append(PLAIN, torch), Append(PLAIN, cupy)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    other.run(paged_kv_cache=append.arguments["paged_kv_cache"])
    torch.cuda.synchronize()
    append.check()


def test_a_graph_of_a_step(torch: Any, xp: ModuleType) -> None:
    """Lengths, positions and the append, captured once and replayed as the lengths grow."""
    requests, page_size, heads, dim, steps = 3, 4, 2, 64, 9
    num_pages, lengths = 16, np.array([3, 0, 6])
    bf16 = dtypes.bfloat16.numpy
    pool = np.random.default_rng(0).permutation(num_pages)[:12].reshape(requests, 4)
    fp8 = dtypes.float8_e4m3fn.numpy
    cache = upload(np.zeros((num_pages, 2, page_size, heads, dim), fp8), xp)
    new = upload(np.zeros((requests, heads, dim), bf16), xp)
    batch, positions = (upload(np.zeros(requests, np.int32), xp) for _ in range(2))
    append_indptr = upload(np.arange(requests + 1, dtype=np.int32), xp)
    indices = upload(np.zeros(requests * 4, np.int32), xp)
    indptr, last = upload(ints(0, 1, 2, 3), xp), upload(ints(1, 1, 1), xp)

    def step() -> None:
        seq_lens = cupyattn.get_seq_lens(indptr, last, page_size)
        where = batch, positions
        cupyattn.get_batch_indices_positions(append_indptr, seq_lens, requests, *where)
        cupyattn.append_paged_kv_cache(
            new, new, *where, cache, indices, indptr, last, k_scale=0.5, v_scale=2.0
        )

    step()
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    replay = capture(torch, xp, step)
    raw(cache)[...] = 0
    wanted = np.zeros((num_pages, 2, page_size, heads, dim), fp8)
    rng = np.random.default_rng(1)
    for _ in range(steps):
        x = rng.standard_normal((requests, heads, dim)).astype(bf16)
        for b, n in enumerate(lengths):
            slot = pool[b, n // page_size], slice(None), n % page_size
            parts = [page_cases.rounded(x[b], scale, fp8) for scale in (0.5, 2.0)]
            wanted.view(np.uint8)[slot] = np.stack(parts).view(np.uint8)
        lengths = lengths + 1
        new_indptr, new_last = paging.lengths_to_pages(lengths, page_size)
        _, pages = paging.table_to_csr(pool, np.diff(new_indptr))
        padded = np.resize(pages, requests * 4)
        for target, value in ((indptr, new_indptr), (last, new_last), (indices, padded)):
            target[...] = upload(value.astype(np.int32), xp)
        raw(new)[...] = raw(upload(x, xp))
        torch.cuda.synchronize()
        cupy.cuda.Device().synchronize()
        replay()
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(download(cache).view(np.uint8), wanted.view(np.uint8))

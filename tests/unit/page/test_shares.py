"""Lengths, slots and lists of a rank's share of the keys: answers on the CPU, errors, launches."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import fake_gpu
from helpers.bad_input import Row, by_row, ints, of, read_only, refuse, rows_of
from helpers.fake_gpu import Gpu, pointer
from helpers.share_cases import Case

import cupyattn
from cupyattn import shares
from cupyattn.core.key_share import KeyShare
from cupyattn.errors import ArgumentError
from cupyattn.slots import reshape_and_cache

SHARE = {"cp_world_size": 2, "cp_rank": 1, "cp_kv_cache_interleave_size": 2}


def test_random_calls() -> None:
    for seed in range(150):
        Case(seed).run()


def test_random_calls_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for seed in range(200, 230):
        Case(seed, torch, "cpu").run()


def test_arrays_of_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    lens = cupyattn.get_share_seq_lens(jnp.array([5, 0, 9]), **SHARE)
    lists, counts = cupyattn.get_share_lists(jnp.array([[3, 2, 0, 6]]), **SHARE)
    assert [x.tolist() for x in (lens, lists, counts)] == [[2, 0, 4], [[1, 0, 2, -1]], [3]]
    assert {type(x) for x in (lens, lists, counts)} == {type(jnp.array(1))}


def test_one_rank_holds_all() -> None:
    x = np.array([4, -1, 7])
    assert cupyattn.get_share_slots(x, 1, 0).tolist() == [4, -1, 7]
    assert cupyattn.get_share_seq_lens(x, 1, 0).tolist() == [4, 0, 7]


def test_ranks_write_their_tokens_into_equal_tables() -> None:
    """Every rank has the same page table, and a token's slot in the whole cache becomes its own."""
    rng, page, run, world, tokens = np.random.default_rng(0), 4, 2, 3, 40
    table = rng.permutation(8)[:4]
    position = np.arange(tokens)
    whole = table[position // (page * world)] * page * world + position % (page * world)
    k = rng.standard_normal((tokens, 1, 8)).astype(np.float32)
    held = []
    for rank in range(world):
        share = KeyShare(world, rank, run)
        caches = [np.zeros((8, page, 1, 8), np.float32) for _ in "kv"]
        slots = cupyattn.get_share_slots(whole, world, rank, run)
        reshape_and_cache(k, k, *caches, slots)
        count = int(cupyattn.get_share_seq_lens(np.array([tokens]), world, rank, run)[0])
        own = caches[0][table].reshape(-1, 1, 8)[:count]
        np.testing.assert_array_equal(own, k[share.position(np.arange(count))])
        held.append(count)
    assert sum(held) == tokens


# --- bad input ---

lens, slots, lists, find = (
    rows_of(f"get_{x}")
    for x in ("share_seq_lens", "share_slots", "share_lists", "batch_indices_positions")
)


def good(call: str) -> dict[str, Any]:
    if call == "get_share_seq_lens":
        return {"seq_lens": ints(5, 9), "out": ints(7, 7)} | SHARE
    if call == "get_share_slots":
        return {"slots": ints(5, -1), "out": ints(7, 7)} | SHARE
    if call == "get_batch_indices_positions":
        return {"append_indptr": ints(0, 3), "seq_lens": ints(5), "nnz": 3} | SHARE
    given = {"lists": np.array([[5, 2, -1], [0, 9, 6]], np.int32), "lens": ints(2, 3)}
    given |= {"block_tables": np.array([[3, 1]], np.int32), "page_size": 2}
    return given | {"out": of("int32", 2, 3) + 7, "counts": ints(7, 7)} | SHARE


ROWS = [
    *(
        row
        for call in (lens, slots, lists, find)
        for row in (
            call("no rank of that number", "cp_rank: got 2 with cp_world_size=2", cp_rank=2),
            call("a negative rank", "cp_rank: got -1", cp_rank=-1),
            call("no ranks", "cp_world_size: got 0", cp_world_size=0),
            call("half a rank", "cp_world_size: got 1.5 | integer", cp_world_size=1.5),
            call("no run", "cp_kv_cache_interleave_size: got 0", cp_kv_cache_interleave_size=0),
            call("a bool for a rank", "cp_rank: got True", cp_rank=True),
        )
    ),
    lens("floats", "seq_lens: dtype is float32 | wanted int32", seq_lens=of("float", 2)),
    lens("not an array", "seq_lens: got int", seq_lens=3),
    lens("short output", "out: | wanted 2", out=ints(7)),
    lens("wide output", "out: dtype is int64 | wanted int32", out=of("int64", 2)),
    lens("read-only output", "out: a read-only array", out=read_only(ints(7, 7))),
    lens("input as output", "out: overlaps seq_lens", out=lambda a: a["seq_lens"]),
    slots("floats", "slots: dtype is float16", slots=of("half", 2)),
    slots("wide output", "out: dtype is int64", out=of("int64", 2)),
    slots("input as output", "out: overlaps slots", out=lambda a: a["slots"]),
    lists("no list", "lists: has no dimension", lists=np.array(3)),
    lists("floats", "lists: dtype is float32", lists=of("float", 2, 3)),
    lists("lens of other rows", "lens: shape is [3] | wanted [2]", lens=ints(1, 1, 1)),
    lists("lens of floats", "lens: dtype is float32", lens=of("float", 2)),
    lists("a table alone", "block_tables, page_size: got one", page_size=None),
    lists("pages of nothing", "page_size: got 0 | 1 or more", page_size=0),
    lists("more requests", "block_tables: shape is [3, 2] for 2", block_tables=of("int32", 3, 2)),
    lists("flat tables", "block_tables: shape is [2] for 2", block_tables=ints(1, 2)),
    lists("output of other lists", "out: | wanted 3", out=of("int32", 2, 2)),
    lists("counts of other lists", "counts: | wanted 2", counts=ints(7)),
    lists("one output", "counts: overlaps out", counts=lambda a: a["out"].ravel()[:2]),
    lists("lens as counts", "counts: overlaps lens", counts=lambda a: a["lens"]),
]  # fmt: skip


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    refuse(row, getattr(cupyattn, row.call), good(row.call))


def test_the_good_calls_are_good() -> None:
    for call in dict.fromkeys(row.call for row in ROWS):
        getattr(cupyattn, call)(**good(call))


def test_answers_beyond_32_bits() -> None:
    with pytest.raises(ArgumentError, match="gives 1000"):
        cupyattn.get_share_slots(np.array([10**12]), 1, 0)


# --- on a GPU that is not there ---


def struct_of(launch: Any) -> tuple[Any, ...]:
    return struct.unpack_from("<13q 2i 3i", launch.params)


def test_what_is_launched(gpu: Gpu, make: Callable) -> None:
    given, out = make(1000, dtype="int64"), make(1000, dtype="int32")
    assert cupyattn.get_share_seq_lens(given, **SHARE, out=out) is out
    assert cupyattn.get_share_slots(given, **SHARE, out=out) is out
    for launch in gpu.launches:
        assert (launch.kernel, launch.grid) == ("share_indices", (4, 1, 1))
        plain = (pointer(given), 1, 0, 0, 0, 0, pointer(out), 0, 1000, 1, 0, 0, 1000, 0, 1)
        assert struct_of(launch) == (*plain, 2, 1, 2)
    gpu.launches.clear()
    indices, lens, tables = (
        make(6, 300, dtype="int32"),
        make(6, dtype="int64"),
        make(3, 9, dtype="int32"),
    )
    lists, counts = cupyattn.get_share_lists(
        indices, **SHARE, lens=lens, block_tables=tables, page_size=16
    )
    assert (lists.shape, counts.shape) == ((6, 300), (6,))
    (launch,) = gpu.launches
    assert launch.grid == (6, 1, 1)
    addresses = (
        pointer(indices),
        0,
        pointer(lens),
        1,
        pointer(tables),
        0,
        pointer(lists),
        pointer(counts),
    )
    assert struct_of(launch) == (*addresses, 6, 300, 1, 9, 2, 9, 16, 2, 1, 2)


def test_repeated_calls_are_cached(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(rows: int, has_outputs: bool) -> None:
        lens, top = make(rows, dtype="int32"), make(rows, 64, dtype="int32")
        out = {"out": make(rows, dtype="int32")} if has_outputs else {}
        cupyattn.get_share_seq_lens(lens, **SHARE, **out)
        cupyattn.get_share_slots(lens, **SHARE, **out)
        out = {}
        if has_outputs:
            out = {"out": make(rows, 64, dtype="int32"), "counts": make(rows, dtype="int32")}
        cupyattn.get_share_lists(top, **SHARE, **out)
        tables = make(2, 5, dtype="int32")
        cupyattn.get_share_lists(top, **SHARE, **out, lens=lens, block_tables=tables, page_size=8)

    for has_outputs in (False, True):
        calls(4, has_outputs)
    assert len(gpu.launches) == len(shares._CALLS) == 8
    checked = [x.params[:128] for x in gpu.launches]
    gpu.launches.clear()
    monkeypatch.setattr(shares, "_prepare", None)
    for rows in (4, 12):
        for has_outputs in (False, True):
            calls(rows, has_outputs)
    again = [x.params[:128] for x in gpu.launches]
    constants = slice(13 * 8, 128)
    assert [x[constants] for x in again] == 2 * [x[constants] for x in checked]
    assert [x.grid for x in gpu.launches] == 2 * [
        (1, 1, 1),
        (1, 1, 1),
        (4, 1, 1),
        (4, 1, 1),
    ] + 2 * [(1, 1, 1), (1, 1, 1), (12, 1, 1), (12, 1, 1)]
    monkeypatch.undo()
    top, tables = make(5, 64, dtype="int32"), make(2, 5, dtype="int32")
    with pytest.raises(ArgumentError, match="block_tables: shape"):
        cupyattn.get_share_lists(
            top, **SHARE, lens=make(5, dtype="int32"), block_tables=tables, page_size=8
        )


def test_copies_are_not_cached(gpu: Gpu, make: Callable) -> None:
    if not hasattr(make(1), "untyped_storage"):
        pytest.skip("the fake GPU copies torch's arrays alone")
    given = make(8, dtype="int32")[::2]
    for _ in range(2):
        cupyattn.get_share_seq_lens(given, **SHARE)
        cupyattn.get_share_lists(make(4, 9, dtype="int32")[:, ::2], **SHARE)
    assert not len(shares._CALLS)
    assert pointer(given) not in {struct_of(x)[0] for x in gpu.launches}
    with pytest.raises(ArgumentError, match="out: the last dimension has stride 2"):
        cupyattn.get_share_seq_lens(make(4, dtype="int32"), **SHARE, out=given)


def test_positions_of_a_share(gpu: Gpu, make: Callable) -> None:
    indptr, lengths = make(4, dtype="int32"), make(3, dtype="int32")
    for _ in range(2):
        cupyattn.get_batch_indices_positions(indptr, lengths, 10, **SHARE)
        cupyattn.get_batch_indices_positions(indptr, lengths, 10)
    shares_of = [struct.unpack_from("<3i", x.params, 48) for x in gpu.launches]
    assert shares_of == [(2, 1, 2), (1, 0, 1)] * 2


def test_nothing_to_do(gpu: Gpu, make: Callable) -> None:
    fake_gpu.forget()
    assert cupyattn.get_share_seq_lens(make(0, dtype="int32"), **SHARE).shape == (0,)
    lists, counts = cupyattn.get_share_lists(make(0, 4, dtype="int32"), **SHARE)
    assert (lists.shape, counts.shape) == ((0, 4), (0,))
    assert not gpu.launches
    # Lists of no entries have counts all the same.
    assert cupyattn.get_share_lists(make(2, 0, dtype="int32"), **SHARE)[1].shape == (2,)
    assert [x.grid for x in gpu.launches] == [(2, 1, 1)]

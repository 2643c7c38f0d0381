"""Bad input of the page operations: a typed error with a useful sentence, and nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.bad_input import Row, by_row, ints, of, read_only, refuse, rows_of

import cupyattn

CACHE, NEW = (3, 2, 4, 2, 8), (3, 2, 8)


append, find, lens = map(
    rows_of, ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens")
)


def cache(what: str, words: str, x: Any) -> Row:
    return append(what, words, paged_kv_cache=x)


def half(*shape: int) -> np.ndarray:
    return of("half", *shape)


def good(call: str) -> dict[str, Any]:
    if call == "get_seq_lens":
        return {"kv_indptr": ints(0, 2), "kv_last_page_len": ints(1), "page_size": 4}
    if call == "get_batch_indices_positions":
        given = {"append_indptr": ints(0, 3), "seq_lens": ints(5), "nnz": 3}
        return given | {"batch_indices": ints(7, 7, 7), "positions": ints(7, 7, 7)}
    return {
        "append_key": of("half", *NEW) + 1,
        "append_value": of("half", *NEW) + 1,
        "batch_indices": ints(0, -1, 0),
        "positions": ints(3, 99, 4),
        "paged_kv_cache": of("half", *CACHE) + 7,
        "kv_indices": ints(2, 0),
        "kv_indptr": ints(0, 2),
        "kv_last_page_len": ints(1),
    }


def pair(k: np.ndarray, v: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    return k, k.copy() if v is None else v


def twice(a: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    return (a["paged_kv_cache"][:, 0],) * 2


def overlaid() -> np.ndarray:
    return np.lib.stride_tricks.as_strided(of("half", 400), CACHE, (32, 128, 32, 16, 2))


def part(a: dict[str, Any]) -> np.ndarray:
    return a["paged_kv_cache"][1, 0, :3]


def outputs(a: dict[str, Any]) -> np.ndarray:
    return a["positions"][:2]


HALF4 = of("half", 3, 4, 2, 8)
E4M3 = of("e4m3", *CACHE)
ROWS = [
    append("layout", "kv_layout: got 'DHN' | 'NHD', 'HND'", kv_layout="DHN"),
    append(
        "flat key",
        "append_key: | 2 dimensions | [nnz, num_kv_heads, head_dim_qk]",
        append_key=half(3, 16),
    ),
    append("fewer values", "append_value: | 2 | append_key", append_value=half(2, 2, 8)),
    append("value heads", "append_value: | wanted 2, the num_kv_heads", append_value=half(3, 1, 8)),
    append("value dtype", "append_value: dtype is float32", append_value=of("float", *NEW)),
    append("integer key", "append_key: dtype is int8 | float8_e5m2", append_key=of("int8", *NEW)),
    append("strided key", "append_key: the last | ascontig", append_key=half(3, 2, 16)[..., ::2]),
    append("one index too few", "batch_indices: | wanted 3", batch_indices=ints(0, 0)),
    append("positions of two", "positions: | wanted 3", positions=ints(3, 4)),
    append("float indices", "batch_indices: dtype is float32", batch_indices=of("float", 3)),
    append("byte positions", "positions: dtype is uint8 | int32 or", positions=of("uint8", 3)),
    append("offsets", "kv_indptr: has 3 offsets for the 1 | 2", kv_indptr=ints(0, 2, 2)),
    append("last lengths", "kv_indptr: has 2 | the 2 requests", kv_last_page_len=ints(1, 1)),
    append("table of pages", "kv_indices: | 2 dimensions", kv_indices=of("int32", 1, 2)),
    cache("three axes", "paged_kv_cache: | [3, 2, 8]; wanted [num_pages, 2,", half(3, 2, 8)),
    cache(
        "heads of the cache", "paged_kv_cache: | num_kv_heads of append_key", half(3, 2, 4, 3, 8)
    ),
    append(
        "other layout",
        "paged_kv_cache: | wanted 2, the num_kv_heads | Its shape is that of kv_layout='NHD'",
        kv_layout="HND",
    ),
    cache("no axis of two", "paged_kv_cache: | wanted [num_pages, 2", half(3, 1, 4, 2, 8)),
    cache("head dim", "paged_kv_cache: | wanted 8, the head_dim_qk", half(3, 2, 4, 2, 16)),
    append(
        "two head dims",
        "paged_kv_cache[:, 1]: | wanted 4, the head_dim_vo",
        append_value=half(3, 2, 4),
    ),
    cache("a triple", "paged_kv_cache: got 3 arrays", (HALF4,) * 3),
    cache("pools differ", "paged_kv_cache[1]: | wanted 3, the num_pages", pair(HALF4, HALF4[:2])),
    cache("page sizes differ", "paged_kv_cache[1]: | page_size", pair(HALF4, half(3, 5, 2, 8))),
    cache("axes differ", "only one of K and V has a page axis", pair(HALF4, half(3, 2, 8))),
    cache("axes of a pair", "paged_kv_cache[0]: | 5 dim", pair(half(*CACHE))),
    cache("dtypes of a pair", "[1]: dtype is float32", pair(HALF4, of("float", 3, 4, 2, 8))),
    cache("one memory", "K and V are at the same address", twice),
    cache("strided cache", "paged_kv_cache: the last", half(3, 2, 4, 2, 16)[..., ::2]),
    cache("read-only cache", "paged_kv_cache: a read-only", read_only(half(*CACHE))),
    cache("overlaid cache", "paged_kv_cache: | more than once", overlaid()),
    append("overlap", "paged_kv_cache: overlaps append_key", append_key=part),
    cache("wider cache", "paged_kv_cache: dtype is float32 but", of("float", *CACHE)),
    cache("not an array", "paged_kv_cache: got int", 3),
    append("scale of a copy", "k_scale: got 2.0 | copies", k_scale=2.0),
    append("no scale", "v_scale: got 0.0 | above 0", v_scale=0.0, paged_kv_cache=E4M3),
    append("negative scale", "k_scale: got -1 | above 0", k_scale=-1, paged_kv_cache=E4M3),
    append("NaN scale", "k_scale: got nan", k_scale=float("nan"), paged_kv_cache=E4M3),
    append("tiny scale", "k_scale: got 1e-60 | 0 in float32", k_scale=1e-60, paged_kv_cache=E4M3),
    append("text for a scale", "v_scale: got 'one'", v_scale="one", paged_kv_cache=E4M3),
    append("no such request", "batch_indices: 1 is not one of the 1", batch_indices=ints(0, 0, 1)),
    append("past the pages", "positions: row 2 is at 8 | 2 pages of 4", positions=ints(3, 0, 8)),
    append("negative position", "positions: row 0 is at -1", positions=ints(-1, 0, 0)),
    append("past the pool", "kv_indices: page 3 | the 3 of", kv_indices=ints(2, 3)),
    append("negative page", "kv_indices: page -1 ", kv_indices=ints(-1, 2)),
    append("pages missing", "kv_indices: has 1", kv_indices=ints(2)),
    append("offsets fall", "kv_indptr: | never fall", kv_indptr=ints(2, 0)),
    find("no offsets", "append_indptr: has 0 offsets", append_indptr=ints(), seq_lens=ints(1)),
    find("requests differ", "append_indptr: has 2 offsets for the 2", seq_lens=ints(5, 5)),
    find("float offsets", "append_indptr: dtype is float32", append_indptr=of("float", 2)),
    find("negative nnz", "nnz: got -1 | 0 or more", nnz=-1),
    find("nnz of a fraction", "nnz: got 3.5 | integer", nnz=3.5),
    find("nnz of a bool", "nnz: got True", nnz=True),
    find("few rows", "nnz: got 2 | ends at 3", nnz=2, batch_indices=None, positions=None),
    find("lost tokens", "seq_lens: | fewer keys", seq_lens=ints(2)),
    find("offsets fall", "append_indptr: | never fall", append_indptr=ints(3, 0)),
    find("short output", "batch_indices: | wanted nnz = 3", batch_indices=ints(7, 7)),
    find("long output", "positions: dtype is int64 | wanted int32", positions=of("int64", 3)),
    find("read-only output", "positions: a read-only array", positions=read_only(ints(7, 7, 7))),
    find("one output", "positions: overlaps batch_indices", positions=lambda a: a["batch_indices"]),
    find("input as output", "positions: overlaps append_indptr", append_indptr=outputs),
    lens("page size", "page_size: got 0 | 1 or more", page_size=0),
    lens("page size of text", "page_size: got '4'", page_size="4"),
    lens("requests differ", "kv_indptr: has 2 offsets for the 3", kv_last_page_len=ints(1, 1, 1)),
    lens("offsets fall", "kv_indptr: | never fall", kv_indptr=ints(2, 1)),
    lens("matrix", "kv_indptr: | 2 dimensions", kv_indptr=of("int32", 1, 2)),
]


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    refuse(row, getattr(cupyattn, row.call), good(row.call))


def test_the_good_calls_are_good() -> None:
    for call in ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"):
        arguments = good(call)
        getattr(cupyattn, call)(**arguments)
        if "paged_kv_cache" in arguments:
            cache = arguments["paged_kv_cache"]
            assert (cache[2, :, 3] == 1).all() and (cache[0, :, 0] == 1).all()
            assert (cache == 1).sum() == 2 * 2 * 2 * 8

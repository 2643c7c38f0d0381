"""What reaches the launch calls of the page operations, on a GPU that is not there."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import precompile
from helpers.fake_gpu import STREAM, Gpu, maker, pointer

import cupyattn
from cupyattn import array, jit
from cupyattn.core import dtypes
from cupyattn.engine.workspace import int32_on_device
from cupyattn.errors import ArgumentError
from cupyattn.launch.ops.rows import Rows
from cupyattn.slots import reshape_and_cache

PARAMS = Path(__file__).parents[3] / "kernels/cupyattn/params"
_FORMATS = {"int64_t": "q", "int32_t": "i", "float": "f"}


def fields(header: str, name: str) -> list[tuple[str, str]]:
    """(format, name) of a struct's fields, as its header has them; structs inside are opened."""
    body = (PARAMS / header).read_text().split(f"struct {name} {{")[1].split("};")[0]
    found = []
    for kind, field in re.findall(r"^\s*(?:const )?(\w+\*?) ([^;/]*);", body, re.MULTILINE):
        if kind == "AppendedRows":
            inner = fields(header, kind)
            found += [(code, f"{part}.{x}") for part in "kv" for code, x in inner]
        elif kind in ("PageTable", "KeyShareNumbers"):
            found += fields(header, kind)
        else:
            found.append(("Q" if kind.endswith("*") else _FORMATS[kind], field))
    return found


def unpack(raw: bytes, header: str, name: str) -> dict[str, Any]:
    known = fields(header, name)
    values = struct.unpack_from("<" + "".join(code for code, _ in known), raw)
    return dict(zip((field for _, field in known), values, strict=True))


def append_arguments(make: Callable, nnz: int, heads: int, *dims: int, **dtype: str) -> dict:
    k, v = (make(nnz, heads, dim, **dtype) for dim in (dims * 2)[:2])
    table = {"kv_indices": 7, "kv_indptr": 3, "kv_last_page_len": 2}
    lengths = {"batch_indices": nnz, "positions": nnz, **table}
    index = {name: make(n, dtype="int32") for name, n in lengths.items()}
    return {"append_key": k, "append_value": v, **index}


def unpack_append(launch: Any) -> dict[str, Any]:
    return unpack(launch.params, "page.cuh", "AppendPagedKvCacheParams")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_an_append_to_one_array(gpu: Gpu, make: Callable, layout: str) -> None:
    inner = (5, 3) if layout == "NHD" else (3, 5)
    cache = make(11, 2, *inner, 64)
    given = append_arguments(make, 100, 3, 64)
    assert cupyattn.append_paged_kv_cache(**given, paged_kv_cache=cache, kv_layout=layout) is None
    (launch,) = gpu.launches
    # 8 threads of 16 bytes a row, 32 rows a block.
    assert (launch.kernel, launch.grid) == ("append_paged_kv_cache", (10, 2, 1))
    assert (launch.block, launch.shared_bytes, launch.stream) == ((256, 1, 1), 0, STREAM)
    strides = {"source_stride_n": 192, "source_stride_h": 64, "cache_stride_page": 2 * 15 * 64}
    steps = (192, 64) if layout == "NHD" else (64, 320)
    strides |= dict(zip(("cache_stride_n", "cache_stride_h"), steps, strict=True))
    expected: dict[str, Any] = {"num_indices": 7, "num_pages": 11, "batch_size": 2}
    expected |= {"page_size": 5, "nnz": 100, "num_kv_heads": 3, "lane_bits": 3, "num_refused": 0}
    for part, name, offset in (("k", "append_key", 0), ("v", "append_value", 15 * 64 * 2)):
        row = {"source": pointer(given[name]), "cache": pointer(cache) + offset, **strides}
        row |= {"head_dim": 64, "scale": 1.0}
        expected |= {f"{part}.{key}": x for key, x in row.items()}
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr")
    expected |= {name: pointer(given[name]) for name in names}
    assert unpack_append(launch) == expected


def test_an_append_that_converts_to_a_pair(gpu: Gpu, make: Callable) -> None:
    given = append_arguments(make, 4, 2, 40, 200, dtype="float32")
    caches = (
        make(9, 2, 40, dtype="float8_e5m2"),
        make(9, 3, 208, dtype="float8_e5m2")[:, :2, :200],
    )
    cupyattn.append_paged_kv_cache(**given, paged_kv_cache=caches, k_scale=0.5, v_scale=3)
    (launch,) = gpu.launches
    got = unpack_append(launch)
    assert (got["k.scale"], got["v.scale"], got["page_size"]) == (0.5, 3.0, 1)
    assert (got["k.head_dim"], got["v.head_dim"], got["lane_bits"]) == (40, 200, 5)
    assert [got[f"k.cache_stride_{x}"] for x in ("page", "n", "h")] == [80, 0, 40]
    assert [got[f"v.cache_stride_{x}"] for x in ("page", "n", "h")] == [624, 0, 208]
    assert [got[f"{part}.cache"] for part in "kv"] == [pointer(x) for x in caches]
    assert launch.grid == (1, 2, 1)


def rows(**changes: Any) -> Rows:
    plain = Rows(1 << 20, 1 << 21, (128, 64), (512, 128, 64), 64, 1.0)
    return plain._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "dtype", "dtype_cache", "expected"),
    [
        ({}, "bfloat16", "bfloat16", True),
        ({}, "float32", "float8_e4m3fn", True),
        ({"source": (1 << 20) + 8}, "bfloat16", "bfloat16", False),
        ({"cache": (1 << 21) + 8}, "bfloat16", "bfloat16", False),
        # 8 elements of a byte each are stored at a time, or 4.
        ({"cache": (1 << 21) + 8}, "bfloat16", "float8_e4m3fn", True),
        ({"cache": (1 << 21) + 4}, "bfloat16", "float8_e4m3fn", False),
        ({"cache": (1 << 21) + 4}, "float32", "float8_e4m3fn", True),
        ({"head_dim": 60}, "bfloat16", "bfloat16", False),
        ({"head_dim": 60}, "float32", "float32", True),
        ({"source_strides": (132, 64)}, "bfloat16", "bfloat16", False),
        ({"cache_strides": (513, 128, 64)}, "float8_e5m2", "float8_e5m2", False),
        ({"cache_strides": (-512, 0, 64)}, "bfloat16", "bfloat16", True),
    ],
)
def test_alignment(changes: dict, dtype: str, dtype_cache: str, expected: bool) -> None:
    kinds = dtypes.parse(dtype), dtypes.parse(dtype_cache)
    assert rows(**changes).is_aligned(*kinds) is expected


def test_every_config_is_listed(gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, jit.Config]] = []

    def load(name: str, config: jit.Config, *_: Any) -> SimpleNamespace:
        asked.append((name, config))
        return SimpleNamespace(function=name)

    monkeypatch.setattr(jit, "load", load)
    wide, fp8 = ("float16", "bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2")
    for dtype in (*wide, *fp8):
        for dtype_cache in (dtype, *(fp8 if dtype in wide else ())):
            for dim in (64, 63):
                given = append_arguments(make, 4, 2, dim, dtype=dtype)
                cache = make(9, 2, 5, 2, dim, dtype=dtype_cache)
                cupyattn.append_paged_kv_cache(**given, paged_kv_cache=cache)
                new = given["append_key"], given["append_value"]
                slots = make(new[0].shape[0], dtype="int32")
                reshape_and_cache(*new, cache[:, 0], cache[:, 1], slots)
    indptr, lengths = make(3, dtype="int32"), make(2, dtype="int32")
    cupyattn.get_batch_indices_positions(indptr, lengths, 5)
    cupyattn.get_seq_lens(indptr, lengths, 4)
    cupyattn.get_share_seq_lens(lengths, 2, 0)
    cupyattn.get_share_slots(lengths, 2, 0)
    cupyattn.get_share_lists(make(2, 3, dtype="int32"), 2, 0)
    # The functions of flash_attn and the backends of serving launch these.
    others = "append_new_kv", "copy_rows", "serving_metadata"
    assert set(asked) == {x for x in precompile.page_instances() if x[0] not in others}


def test_more_rows_than_a_grid_takes(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    if not isinstance(make(1), torch.Tensor):
        pytest.skip("one framework is enough")
    nnz, heads = 2**20, 2**14
    rows = torch.as_strided(torch.zeros(256).bfloat16(), (nnz, heads, 256), (0, 0, 1))
    given = append_arguments(make, nnz, 1, 1) | {"append_key": rows, "append_value": rows}
    cupyattn.append_paged_kv_cache(**given, paged_kv_cache=make(2, 2, 1, heads, 256))
    assert gpu.launches[0].grid == (2**31 - 1, 2, 1)


def test_nothing_to_append(gpu: Gpu, make: Callable) -> None:
    for nnz, heads, dim in ((0, 2, 64), (4, 0, 64), (4, 2, 0)):
        given = append_arguments(make, nnz, heads, dim)
        cupyattn.append_paged_kv_cache(**given, paged_kv_cache=make(9, 2, 5, heads, dim))
    indptr, lengths = make(1, dtype="int32"), make(0, dtype="int32")
    assert [x.shape for x in cupyattn.get_batch_indices_positions(indptr, lengths, 0)] == [(0,)] * 2
    assert cupyattn.get_seq_lens(indptr, lengths, 4).shape == (0,)
    assert not gpu.launches


def test_tokens_left_out_are_counted_under_debug(gpu: Gpu, make: Callable) -> None:
    given = append_arguments(make, 4, 2, 64) | {"paged_kv_cache": make(9, 2, 5, 2, 64)}
    gpu.api.is_debugging = True
    gpu.api.runtime.streamSynchronize = lambda stream: None
    for count in (0, 3):

        def memcpy(host: int, device: int, size: int, kind: int, count: int = count) -> None:
            assert (device, size, kind) == (gpu.scratch[-1][0], 4, 2)
            ctypes.c_uint32.from_address(host).value = count

        gpu.api.runtime.memcpy = memcpy
        if count:
            with pytest.raises(ArgumentError, match="3 of 4 tokens have no slot"):
                cupyattn.append_paged_kv_cache(**given)
        else:
            cupyattn.append_paged_kv_cache(**given)
    counters = [address for address, num_bytes in gpu.scratch if num_bytes == 4]
    assert [unpack_append(launch)["num_refused"] for launch in gpu.launches] == counters
    assert [row[1:] for row in gpu.log if row[0] == "memset"] == [
        (x, 0, 4, STREAM) for x in counters
    ]


def test_batch_indices_and_positions(gpu: Gpu, make: Callable) -> None:
    indptr, lengths, given = (make(n, dtype="int32") for n in (4, 3, 1000))
    b, p = cupyattn.get_batch_indices_positions(indptr, lengths, 1000, positions=given)
    assert p is given and type(b) is type(given) and b.shape == (1000,) and b.dtype == p.dtype
    (launch,) = gpu.launches
    assert (launch.kernel, launch.grid) == ("get_batch_indices_positions", (4, 1, 1))
    expected = {"append_indptr": indptr, "seq_lens": lengths, "batch_indices": b, "positions": p}
    expected = {name: pointer(x) for name, x in expected.items()} | {"nnz": 1000, "batch_size": 3}
    expected |= {"world": 1, "rank": 0, "run": 1, "unused": 0}
    got = unpack(launch.params, "page.cuh", "GetBatchIndicesPositionsParams")
    assert got == expected


def test_lengths(gpu: Gpu, make: Callable) -> None:
    indptr, last = make(301, dtype="int32"), make(300, dtype="int32")
    lens = cupyattn.get_seq_lens(indptr, last, 16)
    assert type(lens) is type(last) and lens.shape == (300,) and lens.dtype == last.dtype
    (launch,) = gpu.launches
    assert (launch.kernel, launch.grid, launch.stream) == ("get_seq_lens", (2, 1, 1), STREAM)
    expected = {"kv_indptr": indptr, "kv_last_page_len": last, "seq_lens": lens}
    expected = {n: pointer(x) for n, x in expected.items()} | {"batch_size": 300, "page_size": 16}
    assert unpack(launch.params, "page.cuh", "GetSeqLensParams") == expected


def test_indices_are_converted_on_the_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    make = maker("torch", monkeypatch)
    ready = torch.tensor([3, -1, 5], dtype=torch.int32)
    assert int32_on_device(array.view(ready, "x"), "x").ptr == pointer(ready)
    # A number beyond 32 bits must not become another that is valid.
    long = torch.tensor([3, -1, 2**32 + 1, -(2**40)])
    strided = torch.arange(8, dtype=torch.int32)[::2]
    for x, wanted in ((long, [3, -1, 2**31 - 1, -(2**31)]), (strided, [0, 2, 4, 6])):
        v = int32_on_device(array.view(x, "x"), "x")
        assert (v.owner.tolist(), v.strides, v.dtype) == (wanted, (1,), dtypes.int32)

    given = append_arguments(make, 4, 2, 64) | {"paged_kv_cache": make(9, 2, 5, 2, 64)}
    changes = {"positions": strided, "batch_indices": make(4, dtype="int64")}
    cupyattn.append_paged_kv_cache(**given | changes)
    indptr, lengths = make(4, dtype="int64"), make(3, dtype="int32")
    answers = [*cupyattn.get_batch_indices_positions(indptr, lengths, 5)]
    answers.append(cupyattn.get_seq_lens(indptr, lengths, 4))
    assert all(x.dtype is torch.int32 for x in answers)
    append, find, lens = gpu.launches
    got = unpack_append(append)
    assert got["kv_indptr"] == pointer(given["kv_indptr"])
    assert not {got[name] for name in changes} & {pointer(x) for x in changes.values()}
    for launch in (find, lens):
        offsets, second = struct.unpack_from("<2Q", launch.params)
        assert offsets != pointer(indptr) and second == pointer(lengths)

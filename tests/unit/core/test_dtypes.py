"""The dtype table against NumPy, against the DLPack codes torch and JAX export, and its names."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from cupyattn.array import dlpack
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError

ROWS = pytest.mark.parametrize("row", dtypes.ALL, ids=repr)


@ROWS
def test_rows_are_consistent(row: dtypes.DType) -> None:
    assert row.itemsize == row.numpy.itemsize
    assert dtypes.BY_NAME[row.name] is row
    assert dtypes.BY_DLPACK[row.code, row.bits] is row
    assert dtypes.BY_NUMPY[row.numpy] is row
    assert row.numpy.name == row.name


def test_keys_are_unique() -> None:
    for table in (dtypes.BY_NAME, dtypes.BY_DLPACK, dtypes.BY_NUMPY):
        assert len(table) == len(dtypes.ALL)
    assert len({row.cpp for row in dtypes.ALL}) == len(dtypes.ALL)


@ROWS
def test_dlpack_codes_are_those_torch_exports(row: dtypes.DType) -> None:
    torch = pytest.importorskip("torch")
    memory = dlpack.export(torch.empty(2, dtype=getattr(torch, row.name)), None)
    assert (memory.code, memory.bits, memory.lanes) == (row.code, row.bits, 1)


@ROWS
def test_dlpack_codes_are_those_jax_exports(row: dtypes.DType) -> None:
    jax = pytest.importorskip("jax")
    # Without it JAX makes int32 of int64. It has moved since the JAX of Python 3.10.
    experimental = pytest.importorskip("jax.experimental")
    home = jax if callable(getattr(jax, "enable_x64", None)) else experimental
    with home.enable_x64(True):
        memory = dlpack.export(jax.numpy.zeros(2, row.numpy), None)
    assert (memory.code, memory.bits, memory.lanes) == (row.code, row.bits, 1)


@ROWS
def test_every_spelling(row: dtypes.DType) -> None:
    scalar_type = row.numpy.type
    for spelling in (row, row.name, f"torch.{row.name}", f"jnp.{row.name}", row.numpy, scalar_type):
        assert dtypes.parse(spelling) is row


@ROWS
def test_torch_and_jax_objects(row: dtypes.DType) -> None:
    torch = pytest.importorskip("torch")
    assert dtypes.parse(getattr(torch, row.name)) is row
    jnp = pytest.importorskip("jax.numpy")
    assert dtypes.parse(getattr(jnp, row.name)) is row
    assert dtypes.parse(jnp.dtype(row.name)) is row


@pytest.mark.parametrize(
    ("alias", "row"),
    [
        ("half", dtypes.float16),
        ("fp16", dtypes.float16),
        ("bf16", dtypes.bfloat16),
        ("float", dtypes.float32),
        ("fp32", dtypes.float32),
        ("e4m3", dtypes.float8_e4m3fn),
        ("fp8_e5m2", dtypes.float8_e5m2),
        ("bool_", dtypes.bool_),
        (bool, dtypes.bool_),
        (int, dtypes.int64),
        (ml_dtypes.bfloat16, dtypes.bfloat16),
    ],
)
def test_aliases(alias: object, row: dtypes.DType) -> None:
    assert dtypes.parse(alias) is row


@pytest.mark.parametrize(
    "wrong",
    [
        "float64",
        "f2",
        "torch.",
        "",
        float,
        None,
        np.float64,
        np.dtype(">f4"),
        np.dtype([("a", np.float32)]),
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e4m3,
        complex,
        3,
        object(),
        [np.float16],
    ],
    # A repr with an address differs from process to process, and xdist then collects nothing.
    ids=lambda x: "an object" if type(x) is object else repr(x),
)
def test_unknown_dtypes_are_named_with_the_argument(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=r"o_dtype: unknown dtype .* known dtypes are float16"):
        dtypes.parse(wrong, "o_dtype")


def test_unknown_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match=r"dtype: unknown dtype torch\.float64"):
        dtypes.parse(torch.float64)


def test_kinds() -> None:
    assert [row.name for row in dtypes.ALL if row.is_fp8] == ["float8_e4m3fn", "float8_e5m2"]
    assert [row.name for row in dtypes.ALL if row.is_float16] == ["float16", "bfloat16"]


def test_the_ctypes_structures_have_the_sizes_of_dlpack_h() -> None:
    assert ctypes.sizeof(dlpack._Tensor) == 48
    assert ctypes.sizeof(dlpack._Unversioned) == 64
    assert ctypes.sizeof(dlpack._Versioned) == 80

"""Symbolic shapes: what binds, what is refused, and what the sentence says."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupyattn.array import ArrayView, view
from cupyattn.array.match import Dims, match, require_contiguous_last, require_dtype, require_output
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError


def _view(*shape: int, dtype: str = "float32") -> ArrayView:
    return view(np.zeros(shape, dtypes.parse(dtype).numpy), "x")


def test_symbols_bind_once_and_are_shared() -> None:
    dims = Dims()
    match(_view(5, 8, 64), "Lq Hq D", dims, "q")
    match(_view(9, 2, 64), "Lkv Hkv D", dims, "k")
    assert dims == {"Lq": 5, "Hq": 8, "D": 64, "Lkv": 9, "Hkv": 2}
    assert dims.source == {"Lq": "q", "Hq": "q", "D": "q", "Lkv": "k", "Hkv": "k"}


def test_known_extents_numbers_and_wildcards() -> None:
    dims = Dims(N=3)
    match(_view(3, 7, 2), "N _ 2", dims, "kv")
    assert dims == {"N": 3}
    match(_view(), "", dims, "scale")
    match(_view(0, 0), "A A", dims, "empty")
    assert dims["A"] == 0


def test_a_symbol_may_repeat_within_one_shape() -> None:
    match(_view(4, 4), "N N", Dims(), "mask")
    with pytest.raises(ArgumentError, match="dimension 1 of shape"):
        match(_view(4, 5), "N N", Dims(), "mask")


@pytest.mark.parametrize(
    ("shape", "spec", "sentence"),
    [
        ((5, 8), "Lq Hq D", "x: shape [5, 8] has 2 dimensions; wanted 3: [Lq, Hq, D]"),
        ((5,), "Lq Hq", "x: shape [5] has 1 dimension; wanted 2: [Lq, Hq]"),
        ((5, 8, 65), "_ Hq D", "x: dimension 2 of shape [5, 8, 65] is 65; wanted 64, the D of q"),
        ((5, 3), "_ 2", "x: dimension 1 of shape [5, 3] is 3; wanted 2 (x is [_, 2])"),
        ((5,), "M", "x: dimension 0 of shape [5] is 5; wanted M = 6"),
    ],
)
def test_the_sentence(shape: tuple[int, ...], spec: str, sentence: str) -> None:
    dims = Dims(M=6)
    match(_view(1, 8, 64), "Lq Hq D", dims, "q")
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        match(_view(*shape), spec, dims, "x")


def test_a_plain_dict_will_do() -> None:
    dims: dict[str, int] = {}
    match(_view(5, 8), "Lq Hq", dims, "q")
    assert dims == {"Lq": 5, "Hq": 8}
    with pytest.raises(ArgumentError, match=re.escape("is 9; wanted Hq = 8 (o is [_, Hq])")):
        match(_view(5, 9), "_ Hq", dims, "o")


def test_torch_shapes_read_like_any_other() -> None:
    torch = pytest.importorskip("torch")
    v = view(torch.zeros(5, 8), "q")
    with pytest.raises(ArgumentError, match=re.escape("shape [5, 8] has 2 dimensions")):
        match(v, "Lq Hq D", Dims(), "q")


def test_require_dtype() -> None:
    v = _view(2, dtype="bfloat16")
    require_dtype(v, dtypes.bfloat16, "q")
    require_dtype(v, (dtypes.float16, dtypes.bfloat16), "q")
    with pytest.raises(ArgumentError, match="q: dtype is bfloat16; wanted float16 or float32"):
        require_dtype(v, (dtypes.float16, dtypes.float32), "q")
    with pytest.raises(ArgumentError, match="indptr: dtype is bfloat16; wanted int32, cast it"):
        require_dtype(v, dtypes.int32, "indptr")


@pytest.mark.parametrize(
    ("make", "contiguous"),
    [
        (lambda a: a, True),
        (lambda a: a[::2, ::-1], True),
        (lambda a: a.transpose(1, 0, 2), True),
        (lambda a: a[..., :3], True),
        (lambda a: a.transpose(0, 2, 1), False),
        (lambda a: a[..., ::2], False),
        (lambda a: a[..., ::-1], False),
        (lambda a: a[..., ::8], True),  # one element: its stride is never used
        (lambda a: a[:0].transpose(0, 2, 1), True),
        (lambda a: np.broadcast_to(a[..., :1], a.shape), False),
        (lambda a: a[0, 0, 0, None][0], True),  # no dimension at all
    ],
)
def test_require_contiguous_last(make, contiguous: bool) -> None:
    v = view(np.asarray(make(np.zeros((4, 6, 8), np.float32))), "k")
    if contiguous:
        require_contiguous_last(v, "k")
    else:
        with pytest.raises(ArgumentError, match=r"k: .*pass numpy.ascontiguousarray\(k\)"):
            require_contiguous_last(v, "k")


def test_outputs_are_writable_distinct_memory() -> None:
    a = np.zeros((8, 4), np.float32)
    x = view(a, "x")
    out = view(a[4:], "out")
    require_output(out, "out", q=view(a[:4], "q"), k=None)
    require_output(view(a.T, "out"), "out")
    require_output(view(a[::2, ::-1], "out"), "out")
    require_output(view(np.broadcast_to(a[:0], (0, 4)).copy(), "out"), "out", q=x)
    with pytest.raises(ArgumentError, match="out: overlaps q in memory"):
        require_output(out, "out", k=view(a[:4], "k"), q=x)


def test_outputs_that_cannot_be_written() -> None:
    a = np.zeros((8, 4), np.float32)
    a.flags.writeable = False
    with pytest.raises(ArgumentError, match="out: a read-only array cannot be written"):
        require_output(view(a, "out"), "out")
    jax = pytest.importorskip("jax")
    with pytest.raises(ArgumentError, match="out: a JAX array cannot be written"):
        require_output(view(jax.numpy.zeros(3), "out"), "out")


def test_outputs_that_address_an_element_twice() -> None:
    torch = pytest.importorskip("torch")
    base = torch.zeros(64)
    for twice in (base[:4].expand(3, 4), base.as_strided((4, 4), (2, 1))):
        with pytest.raises(ArgumentError, match="more than once"):
            require_output(view(twice, "out"), "out")
    for once in (base.as_strided((4, 4), (5, 1)), base.as_strided((1, 4), (0, 1))):
        require_output(view(once, "out"), "out")

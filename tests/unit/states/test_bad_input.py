"""Bad input of the merge functions: a typed error with a useful sentence, and nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.bad_input import Row, by_row, ints, read_only, refuse, rows_of

import cupyattn
from cupyattn.core import dtypes

N, M, H, D = 3, 2, 4, 8
FUNCTIONS = {
    "pair": cupyattn.merge_state,
    "in place": cupyattn.merge_state_in_place,
    "states": cupyattn.merge_states,
    "segments": cupyattn.variable_length_merge_states,
}


pair, in_place, states, segments = (rows_of(call) for call in FUNCTIONS)


def of(dtype: str, *shape: int) -> np.ndarray:
    return np.ones(shape, dtypes.parse(dtype).numpy)


def half(*shape: int) -> np.ndarray:
    return of("half", *shape)


def floats(*shape: int) -> np.ndarray:
    return of("float", *shape)


def good(call: str) -> dict[str, Any]:
    if call == "pair":
        given = {"v_a": half(N, H, D), "s_a": floats(N, H), "v_b": half(N, H, D)}
        return given | {"s_b": floats(N, H), "out": half(N, H, D), "lse": floats(N, H)}
    if call == "in place":
        given = {"v": half(N, H, D), "s": floats(N, H), "v_other": half(N, H, D)}
        return given | {"s_other": floats(N, H), "mask": of("bool", N)}
    if call == "states":
        return {"v": half(N, M, H, D), "s": floats(N, M, H)}
    return {"v": half(N * M, H, D), "s": floats(N * M, H), "indptr": ints(0, 1, 1, 5)}


def jax(a: dict[str, Any]) -> Any:
    return pytest.importorskip("jax").numpy.asarray(a["v_a"])


def overlaid(x: np.ndarray, shape: tuple[int, ...], *strides: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(x, shape, strides)


ROWS = [
    pair("flat values", "v_a: | 2 dimensions | [n, H, D]", v_a=half(N, H)),
    pair("rows differ", "v_b: dimension 0 | is 2 | wanted 3, the n of v_a", v_b=half(2, H, D)),
    pair("heads differ", "v_b: dimension 1 | wanted 4, the H", v_b=half(N, 2, D)),
    pair("dims differ", "v_b: dimension 2 | wanted 8, the D", v_b=half(N, H, 16)),
    pair("LSE heads first", "s_a: dimension 0 | is 4 | wanted 3", s_a=floats(H, N)),
    pair("LSE of one head", "s_b: | 1 dimension | [n, H]", s_b=floats(N)),
    pair("LSE with a last axis", "s_b: | 3 dimensions", s_b=floats(N, H, 1)),
    pair("fp8 values", "v_a: dtype is float8_e4m3fn | bfloat16", v_a=of("e4m3", N, H, D)),
    pair("integers", "v_b: dtype is int32 | cast it", v_b=of("int32", N, H, D)),
    pair("value dtypes differ", "v_b: dtype is float32 but v_a is float16", v_b=floats(N, H, D)),
    pair("LSE dtypes differ", "s_b: dtype is float16 but s_a is float32", s_b=half(N, H)),
    pair("integer LSE", "s_a: dtype is int32 | float32 or float16", s_a=of("int32", N, H)),
    pair("double LSE", "s_a: dtype float64 is not supported | cast", s_a=np.zeros((N, H))),
    pair("strided values", "v_a: the last | ascontiguous", v_a=half(N, H, 2 * D)[..., ::2]),
    pair("no array", "v_a: got list", v_a=[1.0]),
    pair("None", "s_b: got NoneType", s_b=None),
    pair("no head dim", "v_a: the head dim is 0", v_a=half(N, H, 0), v_b=half(N, H, 0)),
    pair("base", "lse_base_on_e: got 'e' | True or False", lse_base_on_e="e"),
    pair("short out", "out: shape is [2, 4, 8]; wanted [3, 4, 8]", out=half(2, H, D)),
    pair("integer out", "out: dtype is int8", out=of("int8", N, H, D)),
    pair("strided out", "out: the last", out=half(N, H, 2 * D)[..., ::2]),
    pair("read-only out", "out: a read-only", out=read_only(half(N, H, D))),
    pair("overlaid out", "out: | more than once", out=overlaid(half(99), (N, H, D), 16, 8, 2)),
    pair("out over v_a", "out: overlaps v_a", out=lambda a: a["v_a"]),
    pair("out over v_b", "out: overlaps v_b", out=lambda a: a["v_b"]),
    pair("lse over s_a", "lse: overlaps s_a", lse=lambda a: a["s_a"]),
    pair("lse over s_b", "lse: overlaps s_b", lse=lambda a: a["s_b"]),
    pair("half lse", "lse: dtype is float16; wanted float32", lse=half(N, H)),
    pair("lse shape", "lse: shape is [4, 3]", lse=floats(H, N)),
    in_place("half LSE", "s: dtype is float16; wanted float32", s=half(N, H), s_other=half(N, H)),
    in_place("half other LSE", "s_other: dtype is float16; wanted float32", s_other=half(N, H)),
    in_place("read-only v", "v: a read-only", v=read_only(half(N, H, D))),
    in_place("read-only s", "s: a read-only", s=read_only(floats(N, H))),
    pair("JAX out", "out: a JAX array | cannot be written", out=jax),
    in_place("itself", "v: overlaps v_other", v_other=lambda a: a["v"]),
    in_place("its LSE", "s: overlaps s_other", s_other=lambda a: a["s"]),
    in_place("broadcast s", "s: | more than once", s=overlaid(floats(9), (N, H), 4, 0)),
    in_place("mask of heads", "mask: | 2 dimensions", mask=of("bool", N, H)),
    in_place("short mask", "mask: dimension 0 | is 2 | wanted 3", mask=of("bool", 2)),
    in_place("integer mask", "mask: dtype is int32 | bool or uint8", mask=ints(1, 1, 1)),
    in_place("strided mask", "mask: the last", mask=of("bool", 2 * N)[::2]),
    in_place("other dtype", "v_other: dtype is float32 but v is", v_other=floats(N, H, D)),
    states("three axes", "v: | 3 dimensions | [n, m, H, D]", v=half(N, H, D)),
    states("LSE of one state", "s: | 2 dimensions | [n, m, H]", s=floats(N, H)),
    states("states differ", "s: dimension 1 | wanted 2, the m of v", s=floats(N, 3, H)),
    segments("four axes", "v: | 4 dimensions | [num_states, H, D]", v=half(N, M, H, D)),
    segments("LSE of fewer", "s: dimension 0 | the num_states of v", s=floats(2, H)),
    segments("no offsets", "indptr: has no offsets", indptr=ints()),
    segments("matrix", "indptr: | 2 dimensions", indptr=ints(0, 1)[None]),
    segments("float offsets", "indptr: dtype is float32 | int32", indptr=floats(4)),
    segments("offsets fall", "indptr: | never fall, within the 6", indptr=ints(0, 3, 2)),
    segments("offsets leave", "indptr: | within the 6 states", indptr=ints(0, 3, 7)),
    segments("negative offset", "indptr: | never fall", indptr=ints(-1, 3)),
    segments("None", "indptr: got NoneType", indptr=None),
]


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    refuse(row, FUNCTIONS[row.call], good(row.call))


def test_the_good_calls_are_good() -> None:
    for call, function in FUNCTIONS.items():
        function(**good(call))

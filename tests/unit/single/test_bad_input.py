"""Bad input: a typed error with a useful sentence, before anything is written; one table of all.

Every row is tried on a library that has never seen a call, and again after a good call is cached.
A GPU's own rows are in tests/gpu/test_bad_input_gpu.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.bad_input import Row, by_row, of, read_only, refuse, rows_of

import cupyattn
from cupyattn.core import dtypes
from cupyattn.engine import run_single as run
from cupyattn.errors import UnsupportedError

Q, KV = (4, 4, 16), (6, 2, 16)
LONG = 2**31
UNSUPPORTED = UnsupportedError


def good(call: str) -> dict[str, Any]:
    """The arguments of a call that succeeds; `out` and `lse` hold a sentinel."""
    if call == "packbits":
        return {"x": of("bool", 20)}
    if call == "segment_packbits":
        return {"x": of("bool", 20), "indptr": np.array([0, 3, 20], np.int32)}
    shape = Q[1:] if call == "decode" else Q
    arrays = {"q": of("half", *shape), "k": of("half", *KV), "v": of("half", *KV)}
    return arrays | {"out": of("half", *shape) + 7, "lse": of("float", *shape[:-1]) + 7}


CALLS: dict[str, Callable[..., Any]] = {
    "prefill": cupyattn.single_prefill_with_kv_cache,
    "decode": cupyattn.single_decode_with_kv_cache,
    "packbits": cupyattn.packbits,
    "segment_packbits": cupyattn.segment_packbits,
}


# A tuple among the changes is the shape of a float16 array (of KV if short; of float32 for lse).
prefill, decode, bits, segments = map(rows_of, CALLS)


def positional(what: str, words: str, *args: Any, **changes: Any) -> Row:
    return prefill(what, words, TypeError, **changes)._replace(args=args)


def cache(what: str, words: str, dtype_k: str, dtype_v: str) -> Row:
    return prefill(what, words, k=of(dtype_k, *KV), v=of(dtype_v, *KV))


def packed(what: str, words: str, mask: np.ndarray) -> Row:
    return prefill(f"packed mask {what}", f"packed_custom_mask: | {words}", packed_custom_mask=mask)


def long(*shape: int) -> np.ndarray:
    """Any extents in the memory of one row."""
    return np.broadcast_to(of("half", shape[-1]), shape)


def overlaid(x: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(x, Q, (0, 32, 2))


def part(name: str, dtype: str, *shape: int) -> Callable[[dict[str, Any]], np.ndarray]:
    """An array in the memory of another argument."""

    def reuse(arguments: dict[str, Any]) -> np.ndarray:
        flat = arguments[name].reshape(-1).view(dtypes.parse(dtype).numpy)
        return flat[: math.prod(shape)].reshape(shape)

    return reuse


LONG_CACHE = {"k": long(LONG, 2, 16), "v": long(LONG, 2, 16)}
MASK = of("bool", 4, 6)


def needs_grad(a: dict[str, Any]) -> Any:
    return pytest.importorskip("torch").from_numpy(a["q"]).requires_grad_()


def freed(a: dict[str, Any]) -> Any:
    x = pytest.importorskip("torch").from_numpy(a["k"]).clone()
    x.untyped_storage().resize_(0)
    return x


def on_meta(a: dict[str, Any]) -> Any:
    return pytest.importorskip("torch").from_numpy(a["q"]).to("meta")


def sparse(a: dict[str, Any]) -> Any:
    return pytest.importorskip("torch").from_numpy(a["v"]).to_sparse()


def deleted(a: dict[str, Any]) -> Any:
    x = pytest.importorskip("jax").numpy.asarray(a["v"])
    x.delete()
    return x


def as_jax(a: dict[str, Any]) -> Any:
    return pytest.importorskip("jax").numpy.asarray(a["out"])


SHAPES = [
    prefill(
        "q a vector of heads", "q: shape [4, 16] | 2 dimensions | wanted 3", q=of("half", 4, 16)
    ),
    prefill(
        "q a batch",
        "q: | 4 dimensions | wanted 3: [qo_len, num_qo_heads, head_dim_qk]",
        q=of("half", 1, *Q),
    ),
    prefill("q a scalar", "q: shape [] | 0 dimensions | wanted 3", q=of("half")),
    prefill(
        "k without heads",
        "k: shape [6, 16] | [kv_len, num_kv_heads, head_dim_qk]",
        k=of("half", 6, 16),
    ),
    prefill("v a batch", "v: | 4 dimensions | wanted 3", v=of("half", 1, *KV)),
    prefill("heads do not divide", "q, k: 4 query heads over 3 KV | multiple", k=(6, 3), v=(6, 3)),
    prefill("no query heads", "q, k: 0 query heads | positive multiple", q=of("half", 4, 0, 16)),
    prefill("no KV heads", "0 KV heads", k=(6, 0), v=(6, 0)),
    prefill(
        "head dim of k", "k: dimension 2 | is 24 | wanted 16, the head_dim_qk of q", k=(6, 2, 24)
    ),
    prefill("heads of v", "v: dimension 1 | is 1 | wanted 2, the num_kv_heads of k", v=(6, 1)),
    prefill("length of v", "v: | 5 | 6 | wanted", v=(5, 2)),
    prefill("layout not as said", "v: dimension 0 | is 2; wanted 6 | of kv_layout='HND'", v=(2, 6)),
    prefill(
        "keys heads first",
        "q, k: 4 query heads over 6 KV heads | With kv_layout='HND' they would be 2",
        k=(2, 6),
        v=(2, 6),
    ),
    decode("keys tokens first", "6 KV heads | With kv_layout='NHD' they", kv_layout="HND"),
    prefill(
        "no head dim", "head_dim_qk: 0 is not supported", UNSUPPORTED, q=(4, 4, 0), k=(6, 2, 0)
    ),
    prefill(
        "strided q", "q: the last dimension has stride 2 | 1", q=of("half", 4, 4, 32)[..., ::2]
    ),
    prefill("strided k", "k: | numpy.ascontiguousarray(k)", k=of("half", 6, 2, 32)[..., ::2]),
    prefill("reversed v", "v: | stride -1 | wanted 1", v=of("half", *KV)[..., ::-1]),
    prefill("too many keys", f"{LONG} keys | at most 2147483583", UNSUPPORTED, **LONG_CACHE),
    prefill("too many rows", f"{LONG} query tokens", UNSUPPORTED, q=long(LONG, 4, 16)),
    prefill("long groups", "rows of one KV head", UNSUPPORTED, q=long(LONG // 2, 4, 16)),
    decode(
        "q a sequence",
        "q: | 3 dimensions | wanted 2: [num_qo_heads, head_dim_qk]",
        q=of("half", 1, 4, 16),
    ),
    decode("heads do not divide", "3 query heads over 2 KV heads", q=of("half", 3, 16)),
    decode("head dim of q", "k: dimension 2 | wanted 8, the head_dim_qk of q", q=of("half", 4, 8)),
    decode("HND with NHD arrays", "v: | 3 | 2 | wanted", kv_layout="HND", v=(6, 3)),
    decode("too many keys", f"{LONG} keys | at most", UNSUPPORTED, **LONG_CACHE),
]

DTYPES = [
    prefill("integer q", "q: dtype int32 is not supported | cast", q=of("int32", *Q)),
    prefill("boolean q", "q: dtype bool | cast q", q=of("bool", *Q)),
    prefill("fp8 q", "k, v: dtype float16 with q of dtype float8_e4m3fn", q=of("e4m3", *Q)),
    prefill("e5m2 q", "q: dtype float8_e5m2 | bfloat16", UNSUPPORTED, q=of("e5m2", *Q)),
    prefill("int8 q", "k: dtype is float16 with q of dtype int8; wanted int8", q=of("int8", *Q)),
    cache("int8 k", "k: dtype is int8 with q of dtype float16 | only there", "int8", "e4m3"),
    prefill("double q", "q: dtype float64 is not supported | cast", q=np.zeros(Q)),
    prefill("complex k", "k: dtype complex64 is not supported", k=np.zeros(KV, np.complex64)),
    prefill("v unlike k", "v: dtype is bfloat16 but k is float16 | same", v=of("bf16", *KV)),
    cache("two kinds of fp8", "v: dtype is float8_e5m2 but k is float8_e4m3fn", "e4m3", "e5m2"),
    cache("float cache", "k, v: dtype float32 with q of dtype float16 | float8", "float", "float"),
    cache("bfloat16 cache", "k, v: dtype bfloat16 with q of dtype float16", "bf16", "bf16"),
    cache("integer cache", "k, v: dtype int8 with q | wanted", "int8", "int8"),
    prefill("unknown o_dtype", "o_dtype: unknown dtype 'int4' | known dtypes are", o_dtype="int4"),
    prefill("double o_dtype", "o_dtype: unknown dtype", o_dtype=np.float64),
    prefill("unhashable o_dtype", "o_dtype: unknown dtype {}", o_dtype={}),
    prefill("integer o_dtype", "o_dtype: int8 is not | use float16", o_dtype=np.int8),
    prefill("bool o_dtype", "o_dtype: bool is not a", o_dtype="bool"),
]

ARRAYS = [
    prefill("a list", "q: got list, which is not an array | __dlpack__", q=[[0.0]]),
    prefill("nothing", "k: got NoneType, which is not an array", k=None),
    prefill("requires grad", "q: requires grad | q.detach() | no_grad", q=needs_grad),
    prefill("freed storage", "k: | storage was freed", k=freed),
    prefill("meta tensor", "q: | meta", q=on_meta),
    prefill("sparse tensor", "v: its layout is sparse_coo | to_dense", v=sparse),
    prefill("deleted array", "v: the JAX array was deleted", v=deleted),
]

SCALARS = [
    prefill("layout", "kv_layout: got 'nhd' | wanted one of 'NHD', 'HND'", kv_layout="nhd"),
    prefill("no layout", "kv_layout: got None", kv_layout=None),
    prefill("unhashable layout", "kv_layout: got ['NHD']", kv_layout=["NHD"]),
    decode("layout", "kv_layout: got 'DHN' | 'HND'", kv_layout="DHN"),
    prefill("mode", "pos_encoding_mode: got 'ROPE' | 'ROPE_LLAMA'", pos_encoding_mode="ROPE"),
    decode("no mode", "pos_encoding_mode: got None | 'NONE'", pos_encoding_mode=None),
    prefill("causal a word", "causal: got 'yes' | True or False", causal="yes"),
    prefill("causal a number", "causal: got 2 | True or False", causal=2),
    prefill("negative window", "window_left: got -2 | -1 for no window", window_left=-2),
    prefill("absurd window", f"window_left: got {LONG} | 2147483647", window_left=LONG),
    prefill("fractional window", "window_left: got 1.5 | wanted an integer", window_left=1.5),
    prefill("window a flag", "window_left: got True | wanted an integer", window_left=True),
    decode("no window", "window_left: got None | -1 for no window", window_left=None),
    decode("unhashable window", "window_left: got [3] | wanted an integer", window_left=[3]),
    prefill("NaN scale", "sm_scale: got nan | finite", sm_scale=math.nan),
    prefill("infinite scale", "sm_scale: got inf | finite", sm_scale=math.inf),
    prefill("scale beyond float32", "sm_scale: got 1e+39 | fits float32", sm_scale=1e39),
    prefill("scale beyond float", "sm_scale: got 1000 | finite", sm_scale=10**400),
    prefill("scale a word", "sm_scale: got '0.1' | wanted a number", sm_scale="0.1"),
    prefill("unhashable scale", "sm_scale: got [0.1] | wanted a number", sm_scale=[0.1]),
    prefill("complex scale", "sm_scale: got 1j | wanted a number", sm_scale=1j),
    prefill("scale a flag", "sm_scale: got True | wanted a number", sm_scale=True),
    prefill("two scales", "sm_scale: | wanted a number", sm_scale=np.ones(2)),
    prefill("NaN q_scale", "scale_q: got nan | finite", scale_q=2.0, q_scale=math.nan),
    decode("NaN q_scale", "q_scale: got nan | finite", q_scale=math.nan),
    decode("infinite k_scale", "k_scale: got -inf | finite", k_scale=-math.inf),
    decode("NaN v_scale", "v_scale: got nan | finite", v_scale=math.nan),
    decode("overflowing scales", "sm_scale: got 2.5 | e+59 | finite", q_scale=1e30, k_scale=1e30),
    prefill("NaN scale_v", "scale_v: got nan | finite", scale_v=math.nan),
    prefill("scale_k a word", "scale_k: got 'x' | wanted a number", scale_k="x"),
    prefill("negative cap", "logits_soft_cap: got -1.0 | 0 (off)", logits_soft_cap=-1.0),
    prefill("NaN cap", "logits_soft_cap: got nan | finite", logits_soft_cap=math.nan),
    decode("infinite cap", "logits_soft_cap: got inf | finite", logits_soft_cap=math.inf),
    prefill("theta 0", "rope_theta: got 0 | above 0", rope_theta=0),
    prefill("negative theta", "rope_theta: got -1.0 | above 0", rope_theta=-1.0),
    decode("NaN theta", "rope_theta: got nan | finite", rope_theta=math.nan),
    prefill("rope_scale 0", "rope_scale: got 0.0 | above 0", rope_scale=0.0),
    decode("infinite rope_scale", "rope_scale: got inf | finite", rope_scale=math.inf),
    prefill("4-bit cache", "kv_cache_sf: 4-bit caches are not supported | None", kv_cache_sf=1),
    positional("old order, too long", "at most 14 positional", None, None, True, *range(9)),
    positional("old order, twice", "multiple values for 'causal'", None, None, True, causal=True),
]

EXTRAS = [
    prefill(
        "mask of other keys",
        "custom_mask: dimension 1 | is 5 | kv_len = 6",
        custom_mask=MASK[:, 1:],
    ),
    prefill(
        "mask transposed", "custom_mask: dimension 0 | qo_len = 4", custom_mask=of("bool", 6, 4)
    ),
    prefill(
        "flat mask", "custom_mask: | 1 dimension; | [qo_len, kv_len]", custom_mask=of("bool", 23)
    ),
    prefill("mask of bytes", "custom_mask: dtype is uint8 | bool", custom_mask=of("uint8", 4, 6)),
    prefill(
        "half mask", "custom_mask: dtype is float16 | wanted bool", custom_mask=of("half", 4, 6)
    ),
    prefill("strided mask", "custom_mask: the last | stride 4", custom_mask=of("bool", 6, 4).T),
    packed("too short", "holds 2 bytes | wanted 3 | packbits", of("uint8", 2)),
    packed("not packed", "dtype is bool | wanted uint8", of("bool", 24)),
    packed("packed by rows", "2 dimensions | wanted 1", of("uint8", 4, 1)),
    packed("strided", "stride 2 | wanted 1", of("uint8", 6)[::2]),
    prefill(
        "sinks of KV heads", "sinks: dimension 0 | is 2 | num_qo_heads = 4", sinks=of("float", 2)
    ),
    prefill("half sinks", "sinks: dtype is float16 | wanted float32", sinks=of("half", 4)),
    decode("sinks by groups", "sinks: | 2 dimensions | wanted 1", sinks=of("float", 2, 2)),
    decode("sinks a list", "sinks: got list, which is not an array", sinks=[0.0] * 4),
    prefill(
        "scale_q of KV heads", "scale_q: dimension 0 | num_qo_heads = 4", scale_q=of("float", 2)
    ),
    prefill(
        "scale_k of query heads", "scale_k: dimension 0 | num_kv_heads = 2", scale_k=of("float", 4)
    ),
    prefill("half scale_v", "scale_v: dtype is float16 | wanted float32", scale_v=of("half", 2)),
    prefill("NaN in scale_q", "scale_q: wanted finite", scale_q=np.full(4, np.nan, np.float32)),
    prefill("inf in scale_v", "scale_v: wanted finite", scale_v=np.full(2, np.inf, np.float32)),
]

OUTPUTS = [
    prefill("out of other rows", "out: shape is [5, 4, 16] | [4, 4, 16]", out=of("half", 5, 4, 16)),
    prefill("out of k's head dim", "out: shape is [4, 4, 16] | [4, 4, 8]", v=of("half", 6, 2, 8)),
    prefill("out flat", "out: shape is [4, 64] | wanted [4, 4, 16]", out=of("half", 4, 64)),
    prefill("out of float32", "out: dtype is float32 | wanted float16", out=of("float", *Q)),
    prefill("out not as o_dtype", "out: dtype is float16 | wanted bfloat16", o_dtype="bfloat16"),
    prefill("out read-only", "out: a read-only array cannot be", out=read_only(of("half", *Q))),
    prefill("out of JAX", "out: a JAX array cannot be written", out=as_jax),
    prefill("out a list", "out: got list, which is not an array", out=[]),
    prefill("out broadcast", "out: | more than once", out=overlaid(of("half", 64))),
    prefill(
        "out strided", "out: the last dimension has stride 2", out=of("half", 4, 4, 32)[..., ::2]
    ),
    prefill("out is q", "out: overlaps q in memory | of its own", out=lambda a: a["q"]),
    prefill(
        "out within k",
        "out: overlaps k in memory",
        q=(4, 2),
        lse=(4, 2),
        out=part("k", "half", 4, 2, 16),
    ),
    prefill("out is v", "out: overlaps v", out=lambda a: a["v"], q=(6, 2, 16), lse=(6, 2)),
    prefill("out over lse", "out: overlaps lse", lse=part("out", "float", 4, 4)),
    prefill("out over sinks", "out: overlaps sinks", sinks=part("out", "float", 4)),
    prefill("out over a mask", "out: overlaps custom_mask", custom_mask=part("out", "bool", 4, 6)),
    prefill("lse over scale_k", "lse: overlaps scale_k", scale_k=part("lse", "float", 2)),
    prefill("lse over q", "lse: overlaps q", lse=part("q", "float", 4, 4)),
    prefill("lse of KV heads", "lse: shape is [4, 2] | wanted [4, 4]", lse=of("float", 4, 2)),
    prefill("lse of other rows", "lse: shape is [3, 4] | wanted [4, 4]", lse=of("float", 3, 4)),
    prefill("half lse", "lse: dtype is float16 | wanted float32", lse=of("half", 4, 4)),
    prefill("double lse", "lse: dtype float64 is not supported", lse=np.zeros((4, 4))),
    prefill("lse read-only", "lse: a read-only array", lse=read_only(of("float", 4, 4))),
    decode("out with rows", "out: shape is [1, 4, 16] | wanted [4, 16]", out=of("half", 1, 4, 16)),
    decode("out is q", "out: overlaps q", out=lambda a: a["q"]),
    decode("lse with rows", "lse: shape is [1, 4] | wanted [4]", lse=of("float", 1, 4)),
    decode("out read-only", "out: a read-only array", out=read_only(of("half", 4, 16))),
]

BITS = [
    bits("bytes", "x: dtype is uint8 | wanted bool", x=of("uint8", 8)),
    bits("a matrix", "x: | 2 dimensions | wanted 1", x=of("bool", 2, 8)),
    bits("strided", "x: the last dimension has stride 2", x=of("bool", 8)[::2]),
    bits("a list", "x: got list, which is not an array", x=[True]),
    bits("order", "bitorder: got 'middle' | wanted one of 'big', 'little'", bitorder="middle"),
    segments("order", "bitorder: got None", bitorder=None),
    segments("falling", "indptr: | never fall", indptr=np.array([0, 9, 3, 20])),
    segments("negative", "indptr: | never fall", indptr=np.array([-1, 20])),
    segments("past the end", "indptr: | 20 elements of x", indptr=np.array([0, 21])),
    segments("no offsets", "indptr: | wanted", indptr=of("int64", 0)),
    segments("float offsets", "indptr: dtype is float32 | int32 or int64", indptr=of("float", 2)),
    segments("narrow offsets", "indptr: dtype is int8 | int32 or int64", indptr=of("int8", 2)),
    segments("a matrix of offsets", "indptr: | 2 dimensions", indptr=of("int32", 2, 2)),
    segments("bytes", "x: dtype is uint8 | wanted bool", x=of("uint8", 20)),
]

ROWS = [*SHAPES, *DTYPES, *ARRAYS, *SCALARS, *EXTRAS, *OUTPUTS, *BITS]


def _value(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return of("float", *value) if name == "lse" else of("half", *value, *KV[len(value) :])
    return value


def _refuse(row: Row) -> None:
    def call(**arguments: Any) -> None:
        in_order = [arguments.pop(name) for name in ("q", "k", "v") if row.args]
        CALLS[row.call](*in_order, *row.args, **arguments)

    changes = {name: _value(name, value) for name, value in row.changes.items()}
    refuse(row._replace(changes=changes), call, good(row.call))


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    run._entries.clear()
    _refuse(row)
    CALLS[row.call](**good(row.call))
    _refuse(row)


def test_the_good_calls_are_good_and_the_table_is_large() -> None:
    """Else a row could fail for a reason of its own."""
    for name, call in CALLS.items():
        arguments = good(name)
        call(**arguments)
        if "out" in arguments:
            assert (arguments["out"] == 0).all() and np.isfinite(arguments["lse"]).all()
            assert (arguments["lse"] != 7).all()
    assert len(ROWS) >= 120

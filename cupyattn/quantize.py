"""Queries, keys and values in eight bits, with their scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array
from .array import ArrayView
from .array.match import Dims, is_contiguous, match, match_array, require_dtype
from .core import dtypes, parse
from .core.dtypes import DType
from .core.names import refuse_names
from .core.tracing import untraced
from .engine.views import merge_leading
from .engine.workspace import int32_on_device
from .errors import ArgumentError, UnsupportedError
from .launch.ops import find_mean
from .launch.ops import quantize as launcher
from .launch.ops.quantize import BLOCK_SIZES, MAX_HEAD_DIM, Part, ScaleForm, Shared
from .page import view_index
from .reference import quantize as in_numpy
from .typing import Array, Scale

__all__ = ["QuantizedQKV", "quantize_qkv"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

SOURCE_DTYPES = (dtypes.float16, dtypes.bfloat16)
Q_DTYPES = (dtypes.float8_e4m3fn, dtypes.int8)
_FORMS = {
    "block": ScaleForm.OF_BLOCKS,
    "head": ScaleForm.OF_HEADS,
    "tensor": ScaleForm.OF_TENSOR,
}


class QuantizedQKV(NamedTuple):
    """What `quantize_qkv` returns; None for what there is not. real = stored * scale.

    Parameters
    ----------
    q, k, v
        In eight bits, of the shapes given.
    scale_q, scale_k, scale_v
        Numbers or arrays as they were given, or as they were found: float32 [heads] of
        scales="head", [1] of scales="tensor", which calls without a plan take as it is.
        single_prefill_with_kv_cache and run() want one for each head: in torch,
        scale.expand(heads).contiguous().
    q_block_scales, k_block_scales, v_block_scales
        float32: the scale of each block of tokens and head. Ragged [ceil(n / block_size) +
        requests, heads]: block b of a request whose rows begin at `start` is row start //
        block_size + request + b, and rows of no block are 1. Dense [batch, ceil(tokens /
        block_size), heads].
    k_mean
        float32 [requests, kv heads, head_dim], what was subtracted from k.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> x = cupyattn.quantize_qkv(k=np.ones((100, 2, 64), np.float16))
    >>> x.k.dtype, x.k_block_scales.shape, x.q
    (dtype(float8_e4m3fn), (3, 2), None)
    """

    q: Any = None
    k: Any = None
    v: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None
    q_block_scales: Any = None
    k_block_scales: Any = None
    v_block_scales: Any = None
    k_mean: Any = None


@untraced
def quantize_qkv(
    q: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    *,
    qo_indptr: Array | None = None,
    kv_indptr: Array | None = None,
    dtype: Any = "float8_e4m3fn",
    block_size: int = 64,
    scales: str = "block",
    scale_q: Scale = None,
    scale_k: Scale = None,
    scale_v: Scale = None,
    k_mean: Array | None = None,
    smooth_k: bool = False,
    hadamard: bool = False,
) -> QuantizedQKV:
    """Queries, keys and values of 16 bits to eight bits with their scales, in one launch; in two
    where scales are of all rows.

    Parameters
    ----------
    q, k, v
        float16 or bfloat16 [n, heads, head_dim], ragged, or [batch, tokens, heads, head_dim], any
        of them or all; head dims to 256, a contiguous last dimension.
    qo_indptr, kv_indptr
        int32 or int64 [requests + 1] rows of q, and of k and v, where they are ragged (default: one
        request). On a GPU their values are not known to the host: rows of offsets that fall, or
        leave the array, are not written.
    dtype
        Of q and k: "float8_e4m3fn" or "int8"; v is float8_e4m3fn.
    scales
        What shares a scale that is not given: "block", tokens of a request, for each head; "head",
        all rows of a head; "tensor", all of q, of k or of v.
    block_size
        The tokens of a block, 64 or 128.
    scale_q, scale_k, scale_v
        Scales that are given: numbers above 0, or float32 arrays of one element, [heads] or
        [requests, heads].
    k_mean
        float32 [requests, kv heads, head_dim], subtracted from k (where `hadamard` rotates keys,
        the mean of rotated ones). Logits of a row change by a constant, which attention does not
        see but in its LSE.
    smooth_k
        Find k_mean, the mean of each request and head, by two launches ahead.
    hadamard
        Rotate q and k by a Hadamard matrix over sqrt(head_dim), which spreads outliers over a head
        and leaves their products; head dims that are powers of two.

    Returns
    -------
    result
        A QuantizedQKV, whose fields are named as the arguments of attention.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes and devices.

    Notes
    -----
    Stored is x times 1 / scale, rounded to nearest, ties to even; beyond the largest value it is
    that value. A scale that is found is the largest finite magnitude of what shares it over 448
    (int8: 127), 1 for zeros. A NaN stays one, but is 0 in int8.

    Semantics: SageAttention's smoothing and scales of blocks (arXiv 2410.02367), FlashAttention-3's
    rotation (arXiv 2407.08608).

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q, k = np.ones((100, 8, 64), np.float16), np.ones((100, 2, 64), np.float16)
    >>> x = cupyattn.quantize_qkv(q, k, k, hadamard=True)
    >>> x.q.dtype, x.q_block_scales.shape  # blocks of 64 tokens
    (dtype(float8_e4m3fn), (3, 8))
    """
    rows = {
        name: _Rows.of(x, indptr, scale, name)
        for name, x, indptr, scale in (
            ("q", q, qo_indptr, scale_q),
            ("k", k, kv_indptr, scale_k),
            ("v", v, kv_indptr, scale_v),
        )
        if x is not None or scale is not None
    }
    call = _Call(
        rows,
        _parse_dtype(dtype),
        parse.require_int(block_size, "block_size"),
        parse.flag(hadamard, "hadamard"),
        parse.choice(scales, (*_FORMS,), "scales"),
    )
    # --- 1. Validate ---
    call.smooth(k_mean, parse.flag(smooth_k, "smooth_k"))
    used = call.validate()
    # --- 2. Make what is returned ---
    like = used[0]
    results: dict[str, Any] = {}
    parts = [call.part(name, results) for name in "qkv"]
    mean = call.new_mean()
    # --- 3. On the CPU, or one launch on the caller's stream ---
    if like.device.kind == "cpu":
        for name, part in zip("qkv", parts, strict=True):
            if part is not None:
                is_smoothed = mean is not None and name == "k"
                _quantize_on_cpu(part, call.hadamard and name != "v", is_smoothed)
    else:
        array.acquire(like, *used)
        stream = array.current_stream(like)
        if mean is not None and parts[1] is not None:
            find_mean.launch(parts[1], mean, call.hadamard, stream)
        launcher.launch(parts, Shared(uses_hadamard=call.hadamard), stream)
        array.release(like, *used)
    delivered = {name: array.deliver(x, like) for name, x in results.items()}
    if mean is not None:
        k_mean = array.deliver(mean.owner, like)
    requested = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v, "k_mean": k_mean}
    return QuantizedQKV(**requested | delivered)


def _parse_dtype(dtype: Any) -> DType:
    parsed = dtypes.parse(dtype)
    if parsed not in Q_DTYPES:
        raise ArgumentError(f"dtype: got {parsed}; wanted float8_e4m3fn or int8")
    return parsed


@dataclass
class _Call:
    """A call in the order of its checks. dtype: of q and k."""

    rows: dict[str, _Rows]
    dtype: DType
    block_size: int
    hadamard: bool
    scales: str
    finds_mean: bool = False

    def smooth(self, mean: Any, finds_mean: bool) -> None:
        self.finds_mean = finds_mean
        if mean is None and not finds_mean:
            return
        if "k" not in self.rows:
            raise ArgumentError("k_mean, smooth_k: given without k")
        if mean is not None and finds_mean:
            raise ArgumentError("k_mean: given with smooth_k, which finds it; wanted one of them")
        rows = self.rows["k"]
        if finds_mean:
            shape = rows.batch_size, *rows.view.shape[1:]
            mean = array.empty(shape, dtypes.float32, rows.original)
        self.rows["k"] = rows.smoothed(mean)

    def new_mean(self) -> ArrayView | None:
        """What is to be found of k."""
        return self.rows["k"].mean if self.finds_mean else None

    def validate(self) -> list[ArrayView]:
        """All arrays, on one device."""
        if self.block_size not in BLOCK_SIZES:
            raise ArgumentError(
                f"block_size: got {parse.shown(self.block_size)}; wanted {BLOCK_SIZES[0]} or "
                f"{BLOCK_SIZES[1]}"
            )
        if not self.rows:
            raise ArgumentError("q, k, v: all are None; wanted one at least")
        require_alike({name: x.view for name, x in self.rows.items()})
        if self.hadamard:
            for name in {"q", "k"} & {*self.rows}:
                require_power_of_two(self.rows[name].view, name)
        used = {
            f"{name}{field}": v for name, x in self.rows.items() for field, v in x.arrays().items()
        }
        array.same_device(**used)
        return [*used.values()]

    def part(self, name: str, results: dict[str, Any]) -> Part | None:
        """What is launched for q, k or v, and what is returned of it, new, in `results`."""
        x = self.rows.get(name)
        if x is None:
            return None
        stored = dtypes.float8_e4m3fn if name == "v" else self.dtype
        results[name] = empty_rows(tuple(x.original.shape), stored, x.original)
        measured, form = None, ScaleForm.NUMBER
        if x.finds:
            form = _FORMS[self.scales]
            shape = x.scales_shape(form, self.block_size)
            label = f"{name}_block_scales" if form is ScaleForm.OF_BLOCKS else f"scale_{name}"
            results[label] = array.empty(shape, dtypes.float32, x.original)
            measured = array.view(results[label], label)
        return x.part(array.view(results[name], name), form, measured, self.block_size)


@dataclass(frozen=True)
class _Rows:
    """Queries, keys or values as they were given, and as rows [n, heads, head_dim].

    number, scales  a scale that is given, [heads] or [requests, heads]
    """

    name: str
    original: ArrayView
    view: ArrayView
    offsets: ArrayView | None
    batch_size: int
    rows_per_request: int
    number: float | None
    scales: ArrayView | None
    mean: ArrayView | None = None

    @classmethod
    def of(cls, x: Any, indptr: Any, scale: Any, name: str) -> _Rows:
        if x is None:
            raise ArgumentError(f"scale_{name}: given without {name}")
        original = array.view(x, name)
        is_dense = len(original.shape) == 4
        match_array(original, "b n h d" if is_dense else "n h d", SOURCE_DTYPES, name)
        offsets, batch, per_request = None, 1, original.shape[0]
        if is_dense:
            batch, per_request = original.shape[:2]
        if indptr is not None:
            offsets_name = "qo_indptr" if name == "q" else "kv_indptr"
            if is_dense:
                raise ArgumentError(f"{offsets_name}: given with {name} of 4 dimensions; wanted 3")
            offsets = view_index(indptr, "num_offsets", Dims(), offsets_name)
            batch, per_request = offsets.shape[0] - 1, 0
            if batch < 1:
                raise ArgumentError(f"{offsets_name}: has no requests; wanted [requests + 1]")
            if offsets.device.kind != "cpu":
                offsets = int32_on_device(offsets, offsets_name)
            else:
                _require_offsets(array.as_numpy(offsets), original.shape[0], offsets_name)
        require_head_dim(original.shape[-1], name)
        rows = merge_leading(original, name, 2) if is_dense else original
        heads = rows.shape[1]
        number, scales = given_scale(scale, f"scale_{name}", (heads,), (batch, heads))
        return cls(name, original, rows, offsets, batch, per_request, number, scales)

    def smoothed(self, mean: Any) -> _Rows:
        view = array.view(mean, f"{self.name}_mean")
        match(view, f"{self.batch_size} {self.view.shape[1]} {self.view.shape[2]}", {}, "k_mean")
        return replace(self, mean=contiguous_float32(view, "k_mean"))

    def arrays(self) -> dict[str, ArrayView]:
        named = {"rows": self.original, "indptr": self.offsets, "scale": self.scales}
        return {name: v for name, v in (named | {"mean": self.mean}).items() if v is not None}

    @property
    def finds(self) -> bool:
        """Whether no scale is given."""
        return self.number is None and self.scales is None

    def scales_shape(self, form: ScaleForm, block_size: int) -> tuple[int, ...]:
        n, heads = self.view.shape[:2]
        if form is not ScaleForm.OF_BLOCKS:
            return (heads if form is ScaleForm.OF_HEADS else 1,)
        if len(self.original.shape) == 4:
            return self.batch_size, -(-self.rows_per_request // block_size), heads
        return -(-n // block_size) + self.batch_size, heads

    def part(
        self, out: ArrayView, form: ScaleForm, measured: ArrayView | None, block_size: int
    ) -> Part:
        rows = merge_leading(out, self.name, 2)
        scales, strides = self.scales, (0, 0, 0)
        if measured is not None:
            scales = measured
            if form is ScaleForm.OF_BLOCKS:
                scales = merge_leading(measured, self.name, 1)
                strides = scales.strides[0], 0, scales.strides[1]
            elif form is ScaleForm.OF_HEADS:
                strides = 0, 0, 1
        elif scales is not None:
            form, strides = ScaleForm.GIVEN, given_strides(scales)
        return Part(
            self.view,
            out.dtype,
            rows,
            (0, *rows.strides[:2]),
            form=form,
            scale=1.0 if self.number is None else self.number,
            scales=scales,
            scale_strides=strides,
            block_size=block_size,
            mean=self.mean,
            offsets=self.offsets,
            batch_size=self.batch_size,
            # One request of ragged rows has the scales of ragged ones.
            rows_per_request=self.rows_per_request,
        )


def _quantize_on_cpu(part: Part, hadamard: bool, finds_mean: bool) -> None:
    x = array.as_numpy(part.source).astype(np.float32)
    out = array.as_numpy(part.target)
    lengths = _lengths_of(part)
    requests = np.repeat(np.arange(lengths.size), lengths)
    n = requests.size
    x, out = x[:n], out[:n]  # rows of no request stay as they are
    if hadamard:
        x = in_numpy.hadamard(x)
    if part.mean is not None:
        mean = array.as_numpy(part.mean)
        if finds_mean:
            mean[...] = in_numpy.means_of(x, lengths)
        x = x - mean[requests]
    if part.form is ScaleForm.OF_BLOCKS:
        assert part.scales is not None
        scales = array.as_numpy(part.scales)
        if part.offsets is not None or part.batch_size == 1:
            in_numpy.quantize_blocks(x, out, scales, lengths, part.block_size)
            return
        per_request = scales.shape[0] // part.batch_size
        for r in range(part.batch_size):
            rows = slice(r * part.rows_per_request, (r + 1) * part.rows_per_request)
            own = scales[r * per_request : (r + 1) * per_request]
            in_numpy.quantize_blocks(x[rows], out[rows], own, lengths[:1], part.block_size)
        return
    if part.form >= ScaleForm.OF_HEADS:
        assert part.scales is not None
        scales = array.as_numpy(part.scales)
        kinds = np.split(x, x.shape[1], axis=1) if part.form is ScaleForm.OF_HEADS else [x]
        scales[...] = [in_numpy.scale_for(own, out.dtype) for own in kinds] if x.shape[1] else 1
    out[...] = in_numpy.stored(x, _scales_of_rows(part, requests), out.dtype)


def _lengths_of(part: Part) -> np.ndarray:
    if part.offsets is None:
        return np.full(part.batch_size, part.rows_per_request)
    return np.diff(array.as_numpy(part.offsets).astype(np.int64))


def _scales_of_rows(part: Part, requests: np.ndarray) -> Any:
    """What broadcasts with rows [n, heads, head_dim]."""
    if part.scales is None:
        return np.float32(part.scale)
    scales = array.as_numpy(part.scales)
    of_rows = scales[requests] if scales.ndim == 2 else np.broadcast_to(scales, (1, scales.size))
    return of_rows[..., None]


def given_scale(
    scale: Any, name: str, *shapes: tuple[int, ...]
) -> tuple[float | None, ArrayView | None]:
    """A scale that is given, as a number or as an array of one of these shapes."""
    if scale is None:
        return None, None
    if not hasattr(scale, "shape") or isinstance(scale, np.generic):
        number = float(np.float32(parse.positive(scale, name, 1.0)))
        if number == 0.0:
            raise ArgumentError(f"{name}: got {scale!r}, which is 0 in float32; wanted more")
        return number, None
    v = array.view(scale, name)
    require_dtype(v, dtypes.float32, name)
    if math.prod(v.shape) == 1:
        return None, array.as_strided(v, shapes[0], (0,))
    if tuple(v.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted a number, or {wanted}")
    return None, v


def given_strides(scales: ArrayView) -> tuple[int, int, int]:
    request = scales.strides[0] if len(scales.shape) == 2 else 0
    return request, 0, scales.strides[-1]


def _require_offsets(offsets: np.ndarray, num_rows: int, name: str) -> None:
    if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] > num_rows:
        raise ArgumentError(f"{name}: wanted offsets from 0 that never fall, up to {num_rows}")


def require_alike(views: dict[str, ArrayView]) -> None:
    """One dtype for all; as many rows and heads of k as of v."""
    first = next(iter(views))
    for name, v in views.items():
        if v.dtype is not views[first].dtype:
            raise ArgumentError(f"{name}: dtype is {v.dtype}, of {first} {views[first].dtype}")
    if {"k", "v"} <= {*views} and views["k"].shape[:2] != views["v"].shape[:2]:
        raise ArgumentError(
            f"v: has rows and heads {list(views['v'].shape[:2])}; wanted k's, "
            f"{list(views['k'].shape[:2])}"
        )


def require_head_dim(head_dim: int, name: str) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"{name}: head_dim is {head_dim}; wanted {MAX_HEAD_DIM} at most")


def require_power_of_two(v: ArrayView, name: str) -> None:
    head_dim = v.shape[-1]
    if head_dim < 8 or head_dim & (head_dim - 1):
        raise ArgumentError(
            f"hadamard: {name} has head_dim {head_dim}; wanted a power of two from 8 on"
        )


def contiguous_float32(v: ArrayView, name: str) -> ArrayView:
    require_dtype(v, dtypes.float32, name)
    return v if is_contiguous(v) else array.row_major_view(v)


def empty_rows(shape: tuple[int, ...], dtype: DType, like: ArrayView) -> Any:
    """`array.empty`, of fp8 too, which CuPy makes no arrays of: they lie in an array of bytes."""
    if like.framework in ("torch", "numpy") or like.device.kind == "cpu" or not dtype.is_fp8:
        return array.empty(shape, dtype, like)
    return array.empty(shape, dtypes.uint8, like).view(dtype.numpy)

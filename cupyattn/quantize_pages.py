"""From a layer's projections to its cache: RMS norm, rotary positions and eight bits at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array, paging
from .array import ArrayView
from .array.match import Dims, is_contiguous, match, match_array, require_dtype, require_output
from .core import dtypes, parse
from .core.names import refuse_names
from .core.tracing import untraced
from .engine.cpu import tokens_first
from .engine.kv_cache import match_keys, with_slots
from .engine.workspace import int32_on_device
from .errors import ArgumentError, UnsupportedError
from .launch.driver import params
from .launch.ops import quantize as launcher
from .launch.ops.quantize import BLOCK_SIZES, Part, ScaleForm, Shared
from .page import view_index
from .quantize import (
    Q_DTYPES,
    SOURCE_DTYPES,
    contiguous_float32,
    empty_rows,
    given_scale,
    given_strides,
    require_alike,
    require_head_dim,
    require_power_of_two,
)
from .reference import quantize as in_numpy
from .typing import Array, Scale

__all__ = ["rope_and_cache"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_CACHE_DTYPES = (*Q_DTYPES, dtypes.float8_e5m2)
_FLOATS = (dtypes.float32, *SOURCE_DTYPES)


@untraced
def rope_and_cache(
    q: Array | None,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array | None = None,
    positions: Array | None = None,
    *,
    kv_layout: str = "NHD",
    cos_sin_cache: Array | None = None,
    rope_theta: float | None = None,
    rope_scale: float = 1.0,
    rotary_dim: int | None = None,
    interleave: bool = False,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    hadamard: bool = False,
    scale_q: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_block_scales: Array | None = None,
    v_block_scales: Array | None = None,
    k_mean: Array | None = None,
    batch_indices: Array | None = None,
    kv_indices: Array | None = None,
    kv_indptr: Array | None = None,
    q_dtype: Any = None,
    q_out: Array | None = None,
    k_out: Array | None = None,
) -> Any:
    """What comes between a layer's projections and its attention, in one launch: RMS norm and
    rotary positions of q and k, and keys and values into the slots of a cache.

    Parameters
    ----------
    q, k, v
        [n, heads, head_dim] of one dtype, float16 or bfloat16; q may be None. Head dims to 256, any
        strides but a contiguous last dimension, as slices of a packed qkv.
    k_cache, v_cache
        As in `reshape_and_cache`: [slots, kv heads, head_dim] or pages, of k's dtype,
        float8_e4m3fn, float8_e5m2 or int8 (v then of float8_e4m3fn).
    slot_mapping
        int32 or int64 [n]: page * page_size + offset; a negative one writes no key. Or
        batch_indices, kv_indices, kv_indptr and positions, as in `append_paged_kv_cache`.
    positions
        int32 or int64 [n] of what rotates q and k.
    kv_layout
        "NHD" or "HND", of pages.
    cos_sin_cache
        [positions, rotary_dim] float32 or 16 bits: cosines of the pairs, then their sines; a
        position that it does not have gives NaN. Or.
    rope_theta, rope_scale, rotary_dim
        Angles position / rope_scale * theta^(-2 i / rotary_dim) (rotary_dim: multiples of 16,
        default head_dim). With neither nothing rotates.
    interleave
        Pairs are neighbours; else element i and i + rotary_dim / 2.
    q_weight, k_weight
        [head_dim] of an RMS norm of each head, ahead of the rotation: x / sqrt(mean of squares +
        eps) * (weight + weight_bias). None: none.
    hadamard
        Rotate q and k by a Hadamard matrix over sqrt(head_dim), behind all that.
    scale_q, k_scale, v_scale
        What values of eight bits are to be multiplied by later: numbers, or float32 arrays of one
        element or of one for each head (default 1).
    k_block_scales, v_block_scales
        float32 [num_pages, page_size / size, kv heads], size 64, or 128 up to head_dim 128: the
        scale of each block of a page, written. A block that is written from its first slot on has
        the scale of its largest value. Tokens behind others keep theirs, or let it grow by a power
        of two, which what is there is divided by. Tokens of one block must be neighbours in a call,
        in the order of their slots.
    k_mean
        float32 [requests, kv heads, head_dim], subtracted from k at last; batch_indices say which
        request a token is of, where there are several.
    q_dtype, q_out
        What q becomes: "float8_e4m3fn", "int8" or its own dtype (default); or an array to write,
        which may be q itself.
    k_out
        [n, kv heads, head_dim] of k's dtype, which may be k itself: the rotated keys.
    other arguments
        The work is float32's inside: what separate kernels round between them is not rounded here.
        Values of eight bits are rounded as in `quantize_qkv`.

    Returns
    -------
    result
        q as [n, heads, head_dim], None without q.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes and devices, and a cache that cannot be written; on
        the CPU for slots beyond the cache, which a GPU leaves out.

    Notes
    -----
    Semantics: vLLM's rms_norm, rotary_embedding and reshape_and_cache_flash.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q, k = np.ones((3, 8, 64), np.float16), np.ones((3, 2, 64), np.float16)
    >>> k_cache, v_cache = np.zeros((2, 128, 2, 64), np.float16)  # 128 slots
    >>> slots, positions = np.array([40, 41, 42]), np.array([8, 9, 10])
    >>> rotated = cupyattn.rope_and_cache(
    ...     q, k, k, k_cache, v_cache, slots, positions, rope_theta=1e4
    ... )
    >>> rotated.shape, v_cache[41].min()
    ((3, 8, 64), np.float16(1.0))
    """
    call = _Call.of(
        views=_view_sources(q, k, v),
        caches=(k_cache, v_cache),
        layout=parse.kv_layout(kv_layout),
        targets=_Targets.of(slot_mapping, batch_indices, kv_indices, kv_indptr, positions),
        options=_Options(
            parse.flag(interleave, "interleave"),
            parse.flag(hadamard, "hadamard"),
            parse.positive(eps, "eps", 1e-6),
            parse.finite(weight_bias, "weight_bias", 0.0),
        ),
    )
    # --- 1. Validate ---
    call.view_rotation(cos_sin_cache, rope_theta, rope_scale, rotary_dim)
    call.view_weights(q_weight, k_weight)
    call.view_outputs(q_out, q_dtype, k_out)
    parts = [
        call.query_part(scale_q),
        call.cache_part("k", k_scale, k_block_scales, k_mean),
        call.cache_part("v", v_scale, v_block_scales, None),
    ]
    used = call.require_outputs(parts)
    # --- 2. Do nothing for no tokens; on the CPU in NumPy; or one launch ---
    like = call.views["k"]
    if not like.shape[0]:
        pass
    elif like.device.kind == "cpu":
        call.run_on_cpu(parts)
    else:
        array.acquire(like, *used)
        launcher.launch(parts, call.shared(), array.current_stream(like))
        array.release(like, *used)
    if call.q_out is None:
        return None
    return q_out if q_out is not None else array.deliver(call.q_out.owner, like)


class _Options(NamedTuple):
    interleave: bool
    hadamard: bool
    eps: float
    weight_bias: float


def _view_sources(q: Any, k: Any, v: Any) -> dict[str, ArrayView]:
    """q, if there is one, k and v, checked against each other."""
    sources = {"k": k, "v": v} if q is None else {"q": q, "k": k, "v": v}
    views = {name: array.view(x, name) for name, x in sources.items()}
    for name, view in views.items():
        match_array(view, "n h d", SOURCE_DTYPES, name)
        require_head_dim(view.shape[2], name)
    require_alike(views)
    n, _, head_dim = views["k"].shape
    if "q" in views and tuple(views["q"].shape[::2]) != (n, head_dim):
        raise ArgumentError(
            f"q: shape is {list(views['q'].shape)}; wanted [{n}, heads, {head_dim}], as of k"
        )
    return views


@dataclass(frozen=True)
class _Targets:
    """Where tokens go, and their positions."""

    slots: ArrayView | None
    batch_indices: ArrayView | None
    kv_indices: ArrayView | None
    kv_indptr: ArrayView | None
    positions: ArrayView | None

    @classmethod
    def of(cls, slots: Any, requests: Any, indices: Any, indptr: Any, positions: Any) -> _Targets:
        has_table = indices is not None or indptr is not None
        if (slots is None) != has_table:
            raise ArgumentError(
                "slot_mapping: wanted slots, or kv_indices and kv_indptr with batch_indices and "
                "positions, and not both"
            )
        if has_table and any(x is None for x in (indices, indptr, requests, positions)):
            raise ArgumentError("kv_indices: wanted kv_indptr, batch_indices and positions with it")
        return cls(
            _view_index(slots, "slot_mapping", False),
            _view_index(requests, "batch_indices", True),
            _view_index(indices, "kv_indices", True),
            _view_index(indptr, "kv_indptr", True),
            _view_index(positions, "positions", False),
        )

    def arrays(self) -> dict[str, ArrayView]:
        named = {
            "slot_mapping": self.slots,
            "batch_indices": self.batch_indices,
            "kv_indices": self.kv_indices,
            "kv_indptr": self.kv_indptr,
            "positions": self.positions,
        }
        return {name: v for name, v in named.items() if v is not None}

    def require_rows(self, n: int) -> None:
        for name in {"slot_mapping", "batch_indices", "positions"} & {*self.arrays()}:
            match(self.arrays()[name], f"{n}", {}, name)

    def slots_on_cpu(
        self, num_pages: int, page_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, page, offset) of tokens that have a slot."""
        if self.slots is None:
            tables = {name: array.as_numpy(v) for name, v in self.arrays().items()}
            return paging.slots(**tables, page_size=page_size, pool_size=num_pages)
        slots = array.as_numpy(self.slots).astype(np.int64)
        if (slots >= num_pages * page_size).any():
            raise ArgumentError(
                f"slot_mapping: has slot {slots.max()}; the cache holds {num_pages * page_size}"
            )
        rows = np.flatnonzero(slots >= 0)
        return rows, slots[rows] // page_size, slots[rows] % page_size


def _view_index(x: Any, name: str, is_narrow: bool) -> ArrayView | None:
    """A contiguous index array; is_narrow: of int32 on a GPU."""
    if x is None:
        return None
    v = view_index(x, "n", Dims(), name)
    if is_narrow and v.device.kind != "cpu":
        return int32_on_device(v, name)
    return v if is_contiguous(v) else array.row_major_view(v)


class _Rope(NamedTuple):
    """What rows are rotated by; rotary_dim 0: nothing."""

    table: ArrayView | None = None
    rotary_dim: int = 0
    scale: float = 1.0
    theta: float = 1.0

    def steps(self) -> bytes:
        if self.table is not None or not self.rotary_dim:
            return b""
        return params.rope_steps(self.rotary_dim, self.scale, self.theta)

    def on_cpu(self, positions: np.ndarray, is_interleaved: bool) -> in_numpy.Rotation:
        if self.table is not None:
            table = array.as_numpy(self.table)
            return in_numpy.Rotation.of_table(table, positions, is_interleaved)
        return in_numpy.Rotation.of_theta(
            positions, self.rotary_dim, self.scale, self.theta, is_interleaved
        )


_NO_ROPE = _Rope()


@dataclass
class _Call:
    """A call in the order of its checks."""

    views: dict[str, ArrayView]
    caches: dict[str, ArrayView]
    strides: dict[str, tuple[int, int, int]]
    num_pages: int
    page_size: int
    layout: str
    targets: _Targets
    options: _Options
    rope: _Rope = _NO_ROPE
    weights: dict[str, ArrayView] = field(default_factory=dict)
    q_out: ArrayView | None = None
    k_out: ArrayView | None = None

    @classmethod
    def of(
        cls,
        views: dict[str, ArrayView],
        caches: tuple[Any, Any],
        layout: str,
        targets: _Targets,
        options: _Options,
    ) -> _Call:
        if options.hadamard:
            require_power_of_two(views["k"], "k")
        targets.require_rows(views["k"].shape[0])
        dims = Dims(num_kv_heads=views["k"].shape[1])
        dims.source["num_kv_heads"] = "k"
        viewed: dict[str, ArrayView] = {}
        strides: dict[str, tuple[int, int, int]] = {}
        slot, head = (1, 2) if layout == "NHD" else (2, 1)
        for name, x in zip("kv", caches, strict=True):
            pages = with_slots(array.view(x, f"{name}_cache"), layout)
            dims[f"head_dim_{name}"] = views[name].shape[2]
            match_keys(
                pages, "num_pages page_size", f"head_dim_{name}", layout, dims, f"{name}_cache"
            )
            viewed[name] = pages
            strides[name] = pages.strides[0], pages.strides[slot], pages.strides[head]
        require_dtype(viewed["k"], (views["k"].dtype, *_CACHE_DTYPES), "k_cache")
        is_int8 = viewed["k"].dtype is dtypes.int8
        of_values = dtypes.float8_e4m3fn if is_int8 else viewed["k"].dtype
        require_dtype(viewed["v"], of_values, "v_cache")
        num_pages, page_size = dims["num_pages"], dims["page_size"]
        return cls(views, viewed, strides, num_pages, page_size, layout, targets, options)

    def view_rotation(self, table: Any, theta: Any, scale: Any, rotary_dim: Any) -> None:
        if table is None and theta is None:
            return
        head_dim = self.views["k"].shape[2]
        if self.targets.positions is None:
            raise ArgumentError("positions: got None; wanted those that q and k are rotated to")
        if table is not None and theta is not None:
            raise ArgumentError("cos_sin_cache, rope_theta: got both; wanted one")
        view, turned = None, head_dim
        if table is not None:
            view = array.view(table, "cos_sin_cache")
            match_array(view, "positions rotary_dim", _FLOATS, "cos_sin_cache")
            turned = view.shape[1]
            if view.ptr % 16 or view.strides[0] * view.dtype.itemsize % 16:
                view = array.row_major_view(view)
        if rotary_dim is not None:
            asked = parse.require_int(rotary_dim, "rotary_dim")
            if view is not None and asked != turned:
                raise ArgumentError(f"rotary_dim: got {asked}; cos_sin_cache has {turned}")
            turned = asked
        if turned % 16 or not 0 < turned <= head_dim:
            raise ArgumentError(
                f"rotary_dim: got {turned}; wanted a multiple of 16, up to the head_dim, {head_dim}"
            )
        self.rope = _Rope(
            view,
            turned,
            parse.positive(scale, "rope_scale", 1.0),
            parse.positive(theta, "rope_theta", 1.0),
        )

    def view_weights(self, q_weight: Any, k_weight: Any) -> None:
        head_dim = self.views["k"].shape[2]
        for name, x in (("q", q_weight), ("k", k_weight)):
            if x is not None and name in self.views:
                v = array.view(x, f"{name}_weight")
                match_array(v, f"{head_dim}", _FLOATS, f"{name}_weight")
                self.weights[name] = v
        if len({w.dtype for w in self.weights.values()}) > 1:
            raise ArgumentError("q_weight, k_weight: have two dtypes; wanted one")

    def view_outputs(self, q_out: Any, q_dtype: Any, k_out: Any) -> None:
        k = self.views["k"]
        if "q" in self.views:
            q = self.views["q"]
            dtype = q.dtype if q_dtype is None else dtypes.parse(q_dtype, "q_dtype")
            if q_out is None:
                q_out = empty_rows(tuple(q.shape), dtype, q)
            self.q_out = array.view(q_out, "q_out")
            wanted = (q.dtype, *Q_DTYPES) if q_dtype is None else (dtype,)
            match_array(self.q_out, "n h d", wanted, "q_out")
            _require_shape(self.q_out, q, "q_out", "q")
            if self.q_out.dtype not in (q.dtype, *Q_DTYPES):
                raise ArgumentError(
                    f"q_dtype: got {dtype}; wanted {q.dtype}, float8_e4m3fn or int8"
                )
        elif q_out is not None:
            raise ArgumentError("q_out: given without q")
        if k_out is not None:
            self.k_out = array.view(k_out, "k_out")
            match_array(self.k_out, "n h d", k.dtype, "k_out")
            _require_shape(self.k_out, k, "k_out", "k")

    def query_part(self, scale: Any) -> Part | None:
        if self.q_out is None:
            return None
        q, out = self.views["q"], self.q_out
        one = given_scale(scale, "scale_q", (q.shape[1],))
        return Part(
            source=q,
            dtype=out.dtype,
            target=out,
            target_strides=(0, *out.strides[:2]),
            weight=self.weights.get("q"),
            **_scales(one),
        )

    def cache_part(self, name: str, scale: Any, block_scales: Any, mean: Any) -> Part:
        view, cache = self.views[name], self.caches[name]
        one = given_scale(scale, f"{name}_scale", (view.shape[1],))
        scales = _scales(one)
        if block_scales is not None:
            if one != (None, None):
                raise ArgumentError(f"{name}_scale: given with {name}_block_scales; wanted one")
            scales = self._block_scales(name, block_scales)
        requests = 1
        if mean is not None:
            mean = array.view(mean, f"{name}_mean")
            match(mean, f"_ {view.shape[1]} {view.shape[2]}", {}, f"{name}_mean")
            requests = mean.shape[0]
            if requests != 1 and self.targets.batch_indices is None:
                raise ArgumentError(
                    f"{name}_mean: is of {requests} requests; wanted batch_indices with it"
                )
            mean = contiguous_float32(mean, f"{name}_mean")
        copy = self.k_out if name == "k" else None
        changes = block_scales is not None or mean is not None or self.options.hadamard
        if copy is not None and changes:
            raise ArgumentError("k_out: given with k_block_scales, k_mean or hadamard; wanted none")
        return Part(
            source=view,
            dtype=cache.dtype,
            target=cache,
            target_strides=self.strides[name],
            is_paged=True,
            copy=copy,
            mean=mean,
            weight=self.weights.get(name),
            batch_size=requests,
            **scales,
        )

    def _block_scales(self, name: str, block_scales: Any) -> dict[str, Any]:
        label, cache = f"{name}_block_scales", self.caches[name]
        if cache.dtype.itemsize > 1:
            raise ArgumentError(f"{label}: given for a cache of {cache.dtype}; wanted 8 bits")
        v = array.view(block_scales, label)
        heads = self.views[name].shape[1]
        match(v, f"{self.num_pages} blocks {heads}", {}, label)
        require_dtype(v, dtypes.float32, label)
        blocks = v.shape[1]
        size = self.page_size // blocks if blocks else 0
        if size not in BLOCK_SIZES or size * blocks != self.page_size:
            raise ArgumentError(
                f"{label}: has {blocks} blocks for pages of {self.page_size}; wanted blocks of 64 "
                "or 128 tokens"
            )
        if size == 128 and max(x.shape[2] for x in self.views.values()) > 128:
            raise UnsupportedError(
                f"{label}: has blocks of 128 tokens for a head_dim above 128; wanted blocks of 64"
            )
        return {
            "form": ScaleForm.OF_PAGE_BLOCKS,
            "scales": v,
            "scale_strides": tuple(v.strides),
            "block_size": size,
        }

    def require_outputs(self, parts: Sequence[Part | None]) -> list[ArrayView]:
        """All arrays, on one device, of which those that are written are apart."""
        inputs = {**self.views, **self.targets.arrays()}
        inputs |= {f"{name}_weight": v for name, v in self.weights.items()}
        if self.rope.table is not None:
            inputs["cos_sin_cache"] = self.rope.table
        outputs = {f"{name}_cache": v for name, v in self.caches.items()}
        for name, part in zip("qkv", parts, strict=True):
            if part is None or part.scales is None:
                continue
            is_written = part.form is ScaleForm.OF_PAGE_BLOCKS
            (outputs if is_written else inputs)[f"{name} scales"] = part.scales
            if part.mean is not None:
                inputs[f"{name}_mean"] = part.mean
        for name, x in (("q", self.q_out), ("k", self.k_out)):
            if x is not None:
                outputs[f"{name}_out"] = x
        array.same_device(**inputs, **outputs)
        written: dict[str, ArrayView] = {}
        for name, x in outputs.items():
            others = {**inputs, **written}
            source = self.views.get(name.removesuffix("_out"))
            if source is not None and _are_same(x, source):
                # A lane writes what it alone has read, and nobody else reads it.
                others.pop(name.removesuffix("_out"))
                others = {n: v for n, v in others.items() if not _share_rows(source, v)}
            if name == "v_cache":  # may lie between the keys, but not on them
                others.pop("k_cache")
                if x.ptr == self.caches["k"].ptr and 0 not in x.shape:
                    raise ArgumentError("v_cache: is at k_cache's address; wanted its own memory")
            require_output(x, name, **others)
            written[name] = x
        return [*inputs.values(), *outputs.values()]

    def shared(self) -> Shared:
        targets, options = self.targets, self.options
        return Shared(
            slots=targets.slots,
            batch_indices=targets.batch_indices,
            kv_indices=targets.kv_indices,
            kv_indptr=targets.kv_indptr,
            num_pages=self.num_pages,
            page_size=self.page_size,
            positions=targets.positions,
            cos_sin=self.rope.table,
            rotary_dim=self.rope.rotary_dim,
            rope_steps=self.rope.steps(),
            is_interleaved=options.interleave,
            epsilon=options.eps,
            weight_bias=options.weight_bias,
            uses_hadamard=options.hadamard,
        )

    def run_on_cpu(self, parts: Sequence[Part | None]) -> None:
        slots = self.targets.slots_on_cpu(self.num_pages, self.page_size)
        ready = [
            None if part is None else self._changed(part, name != "v")
            for name, part in zip("qkv", parts, strict=True)
        ]
        for part, x in zip(parts, ready, strict=True):
            if part is None or x is None:
                continue
            if part.copy is not None:
                array.as_numpy(part.copy)[...] = x.astype(part.copy.dtype.numpy)
            if not part.is_paged:
                out = array.as_numpy(part.target)
                out[...] = in_numpy.stored(x, _broadcast(part), out.dtype)
                continue
            cache = tokens_first(part.target, self.layout)
            if part.form is ScaleForm.OF_PAGE_BLOCKS:
                assert part.scales is not None
                scales = array.as_numpy(part.scales)
                in_numpy.quantize_to_pages(x, cache, scales, slots, part.block_size)
                continue
            rows, page, offset = slots
            cache[page, offset] = in_numpy.stored(x, _broadcast(part), cache.dtype)[rows]

    def _changed(self, part: Part, is_key: bool) -> np.ndarray:
        """What is done to rows before they are stored."""
        x = array.as_numpy(part.source).astype(np.float32)
        if not is_key:
            return x
        if part.weight is not None:
            weight = array.as_numpy(part.weight)
            x = in_numpy.normalise(x, weight, self.options.eps, self.options.weight_bias)
        if self.rope.rotary_dim:
            assert self.targets.positions is not None
            positions = array.as_numpy(self.targets.positions).astype(np.int64)
            x = self.rope.on_cpu(positions, self.options.interleave).rotate(x)
        if self.options.hadamard:
            x = in_numpy.hadamard(x)
        if part.mean is not None:
            mean = array.as_numpy(part.mean)
            requests = 0
            if part.batch_size > 1:
                assert self.targets.batch_indices is not None
                indices = array.as_numpy(self.targets.batch_indices)
                requests = np.clip(indices, 0, part.batch_size - 1)
            x = x - mean[requests]
        return x


def _scales(one: tuple[float | None, ArrayView | None]) -> dict[str, Any]:
    """The fields of a Part for a scale that is given."""
    number, scales = one
    if scales is None:
        return {"scale": 1.0 if number is None else number}
    return {"form": ScaleForm.GIVEN, "scales": scales, "scale_strides": given_strides(scales)}


def _broadcast(part: Part) -> Any:
    if part.scales is None:
        return np.float32(part.scale)
    return array.as_numpy(part.scales)[None, :, None]


def _require_shape(v: ArrayView, other: ArrayView, name: str, other_name: str) -> None:
    if tuple(v.shape) != tuple(other.shape):
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted {other_name}'s, {list(other.shape)}"
        )


def _are_same(a: ArrayView, b: ArrayView) -> bool:
    return a.ptr == b.ptr and tuple(a.strides) == tuple(b.strides) and a.dtype is b.dtype


def _share_rows(a: ArrayView, b: ArrayView) -> bool:
    """Whether these are neighbouring columns of rows of one array, as q, k and v of a packed qkv
    are: with the same rows, and no column of both."""
    if a.strides[0] != b.strides[0] or len(b.shape) != 3 or a.dtype is not b.dtype:
        return False
    begin, end = sorted((a, b), key=lambda v: v.ptr)
    reach = (begin.shape[1] - 1) * begin.strides[1] + begin.shape[2]
    return 0 <= begin.strides[1] and begin.ptr + reach * begin.dtype.itemsize <= end.ptr

"""Rotary position embedding of queries and new keys (arXiv 2104.09864), by the caller's tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous_last, require_dtype
from ..core import dtypes
from ..engine.views import merge_leading
from ..engine.widening import widened_pair
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.append_new_kv import ROTATED_DTYPES, TABLE_DTYPES, Rotation
from ..launch.attention.plan_batch import INDEX_DTYPES
from .caches import offsets_of, vector, with_even_rows


class Rotary(NamedTuple):
    """The arguments of flash_attn_with_kvcache.

    begin     [b] where each request begins to count; negative: it is not rotated
    q_moves   row i of q is i positions on; else all rows are where rotation begins
    """

    cos: Any
    sin: Any
    begin: Any
    is_interleaved: bool
    q_moves: bool

    def on_gpu(self, q: Any, k: Any, cu_seqlens_q: Any) -> tuple[Any, Rotation]:
        """An array for the rotated q, and the rotation, which the append of k and v makes."""
        start = self._start(k)
        vq, vk = array.view(q, "q"), array.view(k, "k")
        if vq.dtype not in ROTATED_DTYPES or not (vk.dtype is vq.dtype or vk.dtype.is_fp8):
            raise UnsupportedError(
                f"rotary_cos: has no GPU kernel for q of {vq.dtype} and k of {vk.dtype}; wanted "
                "float16 or bfloat16 of both, or fp8, or rotate q and k before"
            )
        vc, vs = _view_tables(self.cos, self.sin, vk, "k")
        if vc.dtype.is_fp8 and vs.dtype is vc.dtype:
            tables = widened_pair((vc, vs), dtypes.float16, "rotary_cos")
            vc, vs = (array.view(x, "rotary_cos") for x in tables)
        require_dtype(vc, TABLE_DTYPES, "rotary_cos")
        require_dtype(start, INDEX_DTYPES, "rotary_seqlens")
        for v, name in ((vq, "q"), (vc, "rotary_cos"), (vs, "rotary_sin")):
            require_contiguous_last(v, name)
        if vs.dtype is not vc.dtype:
            raise ArgumentError(f"rotary_sin: dtype is {vs.dtype} with rotary_cos of {vc.dtype}")
        if vq.shape[-1] != vk.shape[-1]:
            raise ArgumentError(f"k: head_dim is {vk.shape[-1]} and q's {vq.shape[-1]}")
        array.same_device(q=vq, k=vk, rotary_cos=vc, rotary_sin=vs, rotary_seqlens=start)
        offsets, q_len = None, 0
        if cu_seqlens_q is None:
            _require_rows(vq, start.shape[0], "q")
            q_len = vq.shape[1]
            vq = with_even_rows(q, vq)[1]
        else:
            offsets = offsets_of(cu_seqlens_q, "cu_seqlens_q")
            if offsets.shape[0] != start.shape[0] + 1 or len(vq.shape) != 3:
                raise ArgumentError(
                    f"cu_seqlens_q: shape is {list(offsets.shape)} with q of {list(vq.shape)}; "
                    f"wanted [{start.shape[0] + 1}] and [rows, heads, head_dim]"
                )
        rotated = array.empty(tuple(vq.shape), vq.dtype, vq)
        rows, out = (merge_leading(v, "q", 2) for v in (vq, array.view(rotated, "q")))
        rotation = Rotation(
            cosines=vc,
            sines=vs,
            begin=start,
            q=rows,
            rotated_q=out,
            q_offsets=offsets,
            q_len=q_len,
            q_moves=self.q_moves,
            is_interleaved=self.is_interleaved,
        )
        return rotated, rotation

    def on_cpu(self, q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
        """q and k at their positions."""
        from_ = array.as_numpy(self._start(k)).astype(np.int64)
        turned = []
        for x, offsets, name, is_moving in (
            (q, cu_seqlens_q, "q", self.q_moves),
            (k, cu_seqlens_k, "k", True),
        ):
            v = array.view(x, name)
            if offsets is None:
                _require_rows(v, from_.size, name)
                counts, spare = np.full(v.shape[0], v.shape[1]), 0
            else:
                counts = np.diff(array.as_numpy(offsets_of(offsets, f"offsets of {name}")))
                spare = v.shape[0] - int(counts.sum())
                if counts.size != from_.size or (counts < 0).any() or spare < 0:
                    raise ArgumentError(
                        f"cu_seqlens of {name}: wanted {from_.size + 1} offsets that never fall, "
                        f"up to {v.shape[0]}"
                    )
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            base = np.repeat(from_, counts)
            at = np.where(base < 0, -1, base + within * is_moving)
            at = np.pad(at, (0, spare), constant_values=-1)
            rows = x.reshape(-1, *v.shape[2:]) if offsets is None else x
            rotated = _rotate(
                rows, at, self.cos, self.sin, is_interleaved=self.is_interleaved, name=name
            )
            turned.append(rotated.reshape(v.shape))
        return turned[0], turned[1]

    def _start(self, k: Any) -> ArrayView:
        if self.cos is None or self.sin is None:
            raise ArgumentError("rotary_cos, rotary_sin: got one of the two; wanted both, or none")
        if k is None:
            raise ArgumentError("rotary_cos: given without k and v, which are what is rotated")
        return array.view(vector(self.begin, "rotary_seqlens"), "rotary_seqlens")


def _require_rows(v: ArrayView, count: int, name: str) -> None:
    if len(v.shape) != 4 or v.shape[0] != count:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted [{count}, tokens, heads, head_dim]"
        )


def _view_tables(cos: Any, sin: Any, v: ArrayView, name: str) -> tuple[ArrayView, ArrayView]:
    """cos and sin [positions, rotary_dim / 2] for rows like those of v."""
    vc, vs = array.view(cos, "rotary_cos"), array.view(sin, "rotary_sin")
    if len(vc.shape) != 2 or vc.shape != vs.shape or vc.shape[1] % 8:
        raise ArgumentError(
            f"rotary_cos, rotary_sin: shapes are {list(vc.shape)} and {list(vs.shape)}; wanted "
            "[positions, rotary_dim / 2] of both, rotary_dim a multiple of 16"
        )
    if 2 * vc.shape[1] > v.shape[-1]:
        raise ArgumentError(
            f"rotary_cos: turns {2 * vc.shape[1]} elements, but {name} has head_dim {v.shape[-1]}"
        )
    return vc, vs


def _rotate(
    x: Any, positions: np.ndarray, cos: Any, sin: Any, *, is_interleaved: bool, name: str
) -> Any:
    """x [tokens, heads, head_dim] on the CPU, its first elements rotated to positions [tokens].

    cos, sin [n, rotated / 2]. Tokens at negative positions stay as they are.
    """
    vx = array.view(x, name)
    vc, vs = _view_tables(cos, sin, vx, name)
    turned = 2 * vc.shape[1]
    if positions.size and positions.max() >= vc.shape[0]:
        raise ArgumentError(
            f"rotary_cos: has {vc.shape[0]} positions; {name} needs position {positions.max()}"
        )
    values = array.as_numpy(vx).astype(np.float64)
    at = np.maximum(positions, 0)
    c, s = (array.as_numpy(a)[at].astype(np.float64)[:, None] for a in (vc, vs))
    half = turned // 2
    if is_interleaved:
        low, high = slice(0, turned, 2), slice(1, turned, 2)
    else:
        low, high = slice(0, half), slice(half, turned)
    a, b = values[..., low].copy(), values[..., high].copy()
    values[..., low], values[..., high] = a * c - b * s, a * s + b * c
    rotated = values.astype(vx.dtype.numpy)
    rotated[positions < 0] = array.as_numpy(vx)[positions < 0]
    return array.from_numpy(rotated, vx)

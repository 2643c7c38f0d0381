"""Requests that share a prefix, and then have equally many keys each, in padded arrays."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last
from ..core import dtypes
from ..errors import ArgumentError
from ..inputs import parse
from ..inputs.workspace import refuse_capture
from ..single.run import run_unmasked
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .mixed import OwnWorkspace
from .shared_prefix import merge

_MAX_PADDED = 16


class _Decode(OwnWorkspace, BatchDecodeWithPagedKVCacheWrapper):
    """A page of it holds all keys of a request."""


class _Padded:
    """What plans on one stream.

    key     what the current plan is for
    lock    held from a plan to its run
    """

    def __init__(self, like: ArrayView, kv_layout: str) -> None:
        self._wrapper = _Decode(array.empty((16,), dtypes.uint8, like), kv_layout)
        self._key: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def run(self, q: Any, keys: tuple[Any, Any], count: int, sizes: Any, **options: Any) -> Any:
        """(out, lse) of `count` requests. sizes, options: those of plan()."""
        key = count, *sizes, *options.values()
        with self._lock:
            if key != self._key:
                pages = np.arange(count + 1, dtype=np.int32)
                lengths = np.full(count, sizes[-1], np.int64)
                self._wrapper.plan(pages, pages[:-1], lengths, *sizes, **options)
                self._key = key
            return self._wrapper.run(q, keys, return_lse=True)


_padded: dict[tuple[Any, ...], _Padded] = {}


def batch_decode_with_shared_prefix_padded_kv_cache(
    q: Any,
    k_shared: Any,
    v_shared: Any,
    k_unique: Any,
    v_unique: Any,
    kv_layout: str = "NHD",
    allow_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> Any:
    """Decode attention of requests that share a prefix, and then have equally many keys each.

    q       [B, num_qo_heads, head_dim], float16 or bfloat16 (float32 on the CPU too).
    k_shared, v_shared  [shared_len, num_kv_heads, head_dim] ("NHD") or [num_kv_heads, shared_len,
            head_dim] ("HND"): the prefix.
    k_unique, v_unique  [B, unique_len, num_kv_heads, head_dim] or [B, num_kv_heads, unique_len,
            head_dim]: each request's own keys, all of which count. Both lengths may be 0.
    sm_scale            default 1 / sqrt(head_dim).
    allow_fp16_qk_reduction, rope_scale, rope_theta  accepted for compatibility, and change nothing.

    Returns [B, num_qo_heads, head_dim] in q's framework, dtype and device. A call of other lengths
    than the last one plans anew. Raises ArgumentError for arguments that do not fit each other,
    UnsupportedError for dtypes and head dims without a kernel, PlanError inside a graph capture.
    Semantics: FlashInfer's function of the same name, which it had until June 2024.
    """
    given = {"q": q, "k_shared": k_shared, "v_shared": v_shared}
    given |= {"k_unique": k_unique, "v_unique": v_unique}
    views = {name: array.view(x, name) for name, x in given.items()}
    layout, dims = parse.kv_layout(kv_layout), Dims()
    words = "{0} num_kv_heads head_dim" if layout == "NHD" else "num_kv_heads {0} head_dim"
    shared, unique = words.format("shared_len"), "B " + words.format("unique_len")
    specs = ("B num_qo_heads head_dim", shared, shared, unique, unique)
    for (name, v), spec in zip(views.items(), specs, strict=True):
        match(v, spec, dims, name)
        require_contiguous_last(v, name)
        # Attention to the prefix says which dtypes go together.
        if name.endswith("unique") and v.dtype is not views["k_shared"].dtype:
            raise ArgumentError(
                f"{name}: dtype is {v.dtype} but k_shared is {views['k_shared'].dtype}; wanted the "
                "same"
            )
    array.same_device(**views)
    like = views["q"]
    stream = 0
    if like.device.kind == "cuda":
        stream = array.current_stream(like)
        what = "batch_decode_with_shared_prefix_padded_kv_cache()"
        refuse_capture(stream, what, "capture a wrapper's run() instead")
    scale = parse.finite(sm_scale, "sm_scale", 1.0 / math.sqrt(max(1, dims["head_dim"])))
    of_prefix = run_unmasked(q, k_shared, v_shared, layout, scale)
    if not dims["B"] or not dims["unique_len"]:
        return of_prefix[0]
    place = like.framework, like.device, stream, layout
    padded = _padded.get(place)
    if padded is None:
        if len(_padded) >= _MAX_PADDED:
            _padded.clear()
        padded = _padded[place] = _Padded(like, layout)
    of_own = padded.run(
        q,
        (k_unique, v_unique),
        dims["B"],
        [dims[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim", "unique_len")],
        sm_scale=scale,
        q_data_type=like.dtype.name,
        kv_data_type=views["k_unique"].dtype.name,
    )
    return merge(of_prefix, of_own)

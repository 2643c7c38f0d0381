"""Requests that share the keys of one prefix, which lies in arrays of its own.

All rows attend to the prefix as one request and to their own pages as a batch, and the states
merge.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match_contiguous, require_same_dtype
from ..core import dtypes, parse
from ..core.tracing import Untraced, untraced
from ..engine import geometry as batch_geometry
from ..engine import merge_states as module_merge
from ..engine.kv_cache import is_pair, match_keys, planned
from ..engine.plan_words import wrapper_words
from ..engine.requests import host_integers
from ..engine.run_single import run_unmasked
from ..engine.workspace import refuse_capture, require_apart, same_device
from ..errors import ArgumentError
from ..launch.driver import scratch
from ..typing import Array, ArrayT, Pages
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper

_MAX_PADDED = 16


class _SharedPrefixWrapper(Untraced):
    """What both wrappers are: one for the requests' own keys, and what it is planned for."""

    _class: Any

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        *,
        workspace_buffer: Any = None,
    ) -> None:
        """Make a wrapper; the class says what the arguments are."""
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        self._unique: Any = self._class(workspace, kv_layout)
        # Tables and sizes of a plan that waits for a cache to tell the page size, and the thread's
        # sign.
        self._waiting: tuple[list[Any], list[int], object] | None = None
        # Options of the last run: the next one is expected to have them too.
        self._options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return wrapper_words(type(self).__name__, getattr(self, "_unique", None))

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """As BatchWrapper.reset_workspace_buffer."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """As BatchWrapper.end_forward."""
        self._unique.end_forward()

    def _attend(self, q: Any, k_shared: Any, v_shared: Any, cache: Any, **options: Any) -> Any:
        with self._unique._turns.planning:
            return self._attend_alone(q, k_shared, v_shared, cache, options)

    def _plan_what_waits(self, page_size: int, options: dict[str, Any]) -> None:
        assert self._waiting is not None
        tables, sizes, owner = self._waiting
        turns = self._unique._turns
        turns.check(owner)
        # The plan stays that of the thread that brought the tables.
        own = turns.own
        qo_indptr, kv_indptr, kv_indices, last_page_len = tables
        num_qo_heads, num_kv_heads, head_dim = sizes
        self._unique.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **options,
        )
        self._unique._current.owner, turns.own = owner, own
        self._waiting = None

    def _attend_alone(
        self, q: Any, k_shared: Any, v_shared: Any, cache: Any, options: dict[str, Any]
    ) -> Any:
        # --- 1. Validate, and make the plan fit what came ---
        vq = array.view(q, "q")
        shared = {"k_shared": array.view(k_shared, "k_shared")}
        shared["v_shared"] = array.view(v_shared, "v_shared")
        pages = array.view(cache[0] if is_pair(cache) and cache else cache, "unique_kv_cache")
        options |= {"q_data_type": vq.dtype.name, "kv_data_type": pages.dtype.name}
        if self._waiting is not None:
            size = _page_size(pages, is_pair(cache), self._unique._kv_layout)
            self._plan_what_waits(size, options)
        self._unique._follow(q)
        geometry = self._unique._require_plan().geometry
        default = 1.0 / math.sqrt(geometry.spec.head_dim_qk)
        scale = parse.finite(options["sm_scale"], "sm_scale", default)
        is_new = scale != geometry.spec.sm_scale
        self._unique._change(**{**options, "sm_scale": scale if is_new else None})
        self._options = options
        same_device(self._unique._workspace, q=vq, **shared)
        require_apart(self._unique._workspace, q=vq, **shared)
        dims, layout = planned(geometry), geometry.spec.kv_layout
        match_keys(shared["k_shared"], "shared_len", "head_dim_qk", layout, dims, "k_shared")
        match_keys(shared["v_shared"], "shared_len", "head_dim_vo", layout, dims, "v_shared")
        # --- 2. Attend to both, and merge ---
        return merge(
            run_unmasked(q, k_shared, v_shared, layout, scale),
            self._unique.run(q, cache, return_lse=True),
        )


def merge(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    """The output of two states (out, lse)."""
    return module_merge.run(
        module_merge.PAIR,
        module_merge.make_arrays(v_a=a[0], v_b=b[0], s_a=a[1], s_b=b[1]),
        False,
    )[0]


def _page_size(pages: ArrayView, is_one_of_two: bool, kv_layout: str) -> int:
    """The page size of a cache, or of K of a pair; without a page axis it is 1."""
    shape = pages.shape if is_one_of_two else (pages.shape[:1] + pages.shape[2:])
    if len(shape) == 3:
        return 1
    if len(shape) != 4:
        raise ArgumentError(
            f"unique_kv_cache: shape is {list(pages.shape)}; wanted [num_pages, 2, page_size, "
            "num_kv_heads, head_dim], heads before page_size if HND, or a pair without the 2"
        )
    return int(shape[1 if kv_layout == "NHD" else 2])


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention of requests that share a prefix and have pages of their own.

    Parameters
    ----------
    float_workspace_buffer, workspace_buffer, kv_layout
        As in BatchDecodeWithPagedKVCacheWrapper; the layout is that of the prefix too.

    Raises
    ------
    CupyAttnError
        WorkspaceError for a bad workspace, ArgumentError for the rest.

    Notes
    -----
    A prefix in pages of the same cache takes one launch in MultiLevelCascadeAttentionWrapper.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> indptr, indices, last = np.array([0, 1, 2]), np.array([2, 0]), np.array([5, 16])
    >>> pages = np.ones((3, 2, 16, 2, 64), np.float16)  # what the two requests do not share
    >>> prefix = np.ones((40, 2, 64), np.float16)  # keys, and here values, that they share
    >>> wrapper = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16)
    >>> wrapper.run(np.ones((2, 8, 64), np.float16), prefix, prefix, pages).shape
    (2, 8, 64)
    """

    _class = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr: Array,
        unique_kv_indices: Array,
        unique_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
            The pages of each request without the prefix, as in
            BatchDecodeWithPagedKVCacheWrapper.plan. A request may have none.
        num_qo_heads, num_kv_heads, head_dim, page_size
            Of the arrays to come.
        data_type
            Expected of them; arrays of another dtype schedule the batch anew.

        Raises
        ------
        CupyAttnError
            As that plan(); the last plan then stays in force.
        """
        expected = dtypes.parse(data_type, "data_type").name
        options = self._options or {"q_data_type": expected, "kv_data_type": expected}
        self._unique.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **options,
        )

    plan = begin_forward

    def forward(
        self,
        q: ArrayT,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Pages | None = None,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        unique_kv_data: Pages | None = None,
    ) -> ArrayT:
        """Attention of one row a request over the prefix and the request's own keys.

        Parameters
        ----------
        q
            [B, num_qo_heads, head_dim].
        k_shared, v_shared
            [shared_len, num_kv_heads, head_dim] ("NHD") or [num_kv_heads, shared_len, head_dim]
            ("HND"): the prefix; it may be empty.
        unique_kv_cache
            The pages, as in BatchDecodeWithPagedKVCacheWrapper.run (once called unique_kv_data).
        sm_scale
            Default 1 / sqrt(head_dim).
        other arguments
            The rest is accepted for compatibility: products accumulate in float32, and nothing is.
        rotated
            Here, nor in FlashInfer.

        Returns
        -------
        array
            [B, num_qo_heads, head_dim] in q's framework, dtype and device. It never waits for the
            device.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, PlanError without one.
        """
        cache = unique_kv_data if unique_kv_cache is None else unique_kv_cache
        return self._attend(q, k_shared, v_shared, cache, sm_scale=sm_scale)

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill or append attention of requests that share a prefix and have pages of their own.

    Arguments and errors as in BatchDecodeWithSharedPrefixPagedKVCacheWrapper.

    Notes
    -----
    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> indptr, indices, last = np.array([0, 1, 2]), np.array([2, 0]), np.array([5, 16])
    >>> pages = np.ones((3, 2, 16, 2, 64), np.float16)  # what the two requests do not share
    >>> prefix = np.ones((40, 2, 64), np.float16)  # keys, and here values, that they share
    >>> wrapper = cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.plan(np.array([0, 3, 5]), indptr, indices, last, 8, 2, 64, 16)
    >>> wrapper.run(np.ones((5, 8, 64), np.float16), prefix, prefix, pages, causal=True).shape
    (5, 8, 64)
    """

    _class = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int | None = None,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        qo_indptr
            int32 or int64 [B + 1]: rows of q of each request, its last tokens.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            The pages of each request without the prefix, as in
            BatchPrefillWithPagedKVCacheWrapper.plan. A request may have none.
        num_qo_heads, num_kv_heads, head_dim, page_size
            Of the arrays to come. Without a page size the next run() reads it off its cache, and
            schedules the batch.

        Raises
        ------
        CupyAttnError
            As that plan(), or run() does; the last plan then stays in force.
        """
        with self._unique._turns.planning:
            if page_size is None:
                tables = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
                self._wait(tables, (num_qo_heads, num_kv_heads, head_dim))
            else:
                self._unique.plan(
                    qo_indptr,
                    paged_kv_indptr,
                    paged_kv_indices,
                    paged_kv_last_page_len,
                    num_qo_heads,
                    num_kv_heads,
                    head_dim,
                    page_size,
                    **self._options,
                )
                self._waiting = None

    def _wait(self, tables: list[Any], sizes: tuple[Any, ...]) -> None:
        self._unique._require_workspace(tables)
        # As they are now; ids on a device stay the caller's, as after every plan.
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        for index, name in enumerate(names):
            if name != "paged_kv_indices" or array.view(tables[index], name).device.kind == "cpu":
                tables[index] = host_integers(tables[index], name)
        named = zip(sizes, ("num_qo_heads", "num_kv_heads", "head_dim"), strict=True)
        counts = [batch_geometry.count(n, name) for n, name in named]
        self._waiting = tables, counts, self._unique._turns.begin()

    plan = begin_forward

    def forward(
        self,
        q: ArrayT,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Pages | None = None,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        unique_kv_data: Pages | None = None,
    ) -> ArrayT:
        """Attention of the planned rows over the prefix and their requests' own keys.

        Parameters
        ----------
        q
            [qo_indptr[B], num_qo_heads, head_dim].
        k_shared, v_shared, unique_kv_cache, sm_scale
            As in BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward. All rows see all of the
            prefix.
        causal
            Row i of a request sees of its own keys those up to i + kv_len - qo_len. (Early releases
            had True as the default.).
        other arguments
            The rest is accepted for compatibility, as there.

        Returns
        -------
        array
            [qo_indptr[B], num_qo_heads, head_dim] in q's framework, dtype and device. It never
            waits for the device. A `causal`, `sm_scale` or dtype that is not the last run's
            schedules the batch anew.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, PlanError without one.
        """
        cache = unique_kv_data if unique_kv_cache is None else unique_kv_cache
        causal = parse.flag(causal, "causal")
        return self._attend(q, k_shared, v_shared, cache, sm_scale=sm_scale, causal=causal)

    run = forward


class _Padded:
    """What plans on one stream.

    key     what the current plan is for
    lock    held from a plan to its run
    """

    def __init__(self, like: ArrayView, kv_layout: str) -> None:
        # A page of it holds all keys of a request.
        workspace = array.empty((16,), dtypes.uint8, like)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout)
        self._wrapper._owns_workspace = True
        self._key: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def run(self, q: Any, keys: tuple[Any, Any], count: int, page_size: int, **options: Any) -> Any:
        """(out, lse) of `count` requests. page_size, options: those of plan()."""
        key = count, page_size, *options.values()
        with self._lock:
            if key != self._key:
                pages = np.arange(count + 1, dtype=np.int32)
                lengths = np.full(count, page_size, np.int64)
                self._wrapper.plan(pages, pages[:-1], lengths, page_size=page_size, **options)
                self._key = key
            result = self._wrapper.run(q, keys, return_lse=True)
            self._wrapper.end_forward()
            return result


_padded: dict[tuple[Any, ...], _Padded] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_padded.clear)  # a thread that is gone may hold a lock


@untraced
def batch_decode_with_shared_prefix_padded_kv_cache(
    q: ArrayT,
    k_shared: Array,
    v_shared: Array,
    k_unique: Array,
    v_unique: Array,
    kv_layout: str = "NHD",
    allow_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> ArrayT:
    """Decode attention of requests that share a prefix, and then have equally many keys each.

    Parameters
    ----------
    q, k_shared, v_shared, sm_scale
        As in BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward.
    k_unique, v_unique
        [B, unique_len, num_kv_heads, head_dim] or [B, num_kv_heads, unique_len, head_dim]: each
        request's own keys, all of which count. Both lengths may be 0.
    kv_layout
        "NHD" or "HND", of all four.
    allow_fp16_qk_reduction, rope_scale, rope_theta
        Accepted for compatibility, and change nothing.

    Returns
    -------
    array
        [B, num_qo_heads, head_dim] in q's framework, dtype and device. A call of other lengths than
        the last one plans anew.

    Raises
    ------
    CupyAttnError
        ArgumentError for arguments that do not fit each other, UnsupportedError for dtypes and head
        dims without a kernel, PlanError inside a graph capture.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which it had until June 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q = np.ones((2, 8, 64), np.float16)
    >>> prefix, own = np.ones((40, 2, 64), np.float16), np.ones((2, 7, 2, 64), np.float16)
    >>> cupyattn.batch_decode_with_shared_prefix_padded_kv_cache(q, prefix, prefix, own, own).shape
    (2, 8, 64)
    """
    arrays = {"q": q, "k_shared": k_shared, "v_shared": v_shared}
    arrays |= {"k_unique": k_unique, "v_unique": v_unique}
    views = {name: array.view(x, name) for name, x in arrays.items()}
    layout, dims = parse.kv_layout(kv_layout), Dims()
    match_contiguous(views["q"], "B num_qo_heads head_dim", dims, "q")
    for name in list(views)[1:]:
        v, axes = views[name], "shared_len" if name.endswith("shared") else "B unique_len"
        match_keys(v, axes, "head_dim", layout, dims, name)
        # Attention to the prefix says which dtypes go together.
        if name.endswith("unique"):
            require_same_dtype(v, name, views["k_shared"], "k_shared")
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
    key = like.framework, like.device, scratch.identity(stream), layout
    padded = _padded.get(key)
    if padded is None:
        if len(_padded) >= _MAX_PADDED:
            _padded.clear()
        padded = _padded[key] = _Padded(like, layout)
    of_own = padded.run(
        q,
        (k_unique, v_unique),
        dims["B"],
        num_qo_heads=dims["num_qo_heads"],
        num_kv_heads=dims["num_kv_heads"],
        head_dim=dims["head_dim"],
        page_size=dims["unique_len"],
        sm_scale=scale,
        q_data_type=like.dtype.name,
        kv_data_type=views["k_unique"].dtype.name,
    )
    return merge(of_prefix, of_own)

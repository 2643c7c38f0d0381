"""Requests that share the keys of one prefix, which lies in arrays of its own.

All rows attend to the prefix as one request and to their own pages as a batch, and the states
merge.
"""

from __future__ import annotations

import math
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import match, require_contiguous_last
from ..batch.requests import host_integers
from ..core import dtypes
from ..errors import ArgumentError
from ..inputs import geometry as batch_geometry
from ..inputs import parse
from ..inputs.geometry import Geometry
from ..inputs.kv_cache import is_pair, planned
from ..inputs.workspace import same_device
from ..single.run import run_unmasked
from ..states import merge as module_merge
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper


class _SharedPrefixWrapper:
    """What both wrappers are: one for the requests' own keys, and what it is planned for."""

    _class: Any

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        *,
        workspace_buffer: Any = None,
    ) -> None:
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        self._unique: Any = self._class(workspace, kv_layout)
        # Tables of a plan that waits for a cache to tell the page size.
        self._waiting: tuple[Any, ...] | None = None
        # Options of the last run: the next one is expected to have them too.
        self._options: dict[str, Any] = {}

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Use another float workspace, on the same device; the plan stays.

        int_workspace_buffer is accepted for compatibility: the wrapper's own grows as it must.
        Raises WorkspaceError if the new one is misaligned, or too small for the plan.
        """
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Does nothing; kept for compatibility."""

    def _attend(
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
            self._unique.plan(*self._waiting, size, **options)
            self._waiting = None
        geometry = self._unique._require_plan().geometry
        default = 1.0 / math.sqrt(geometry.problem.head_dim_qk)
        scale = parse.finite(options["sm_scale"], "sm_scale", default)
        is_new = scale != geometry.options.sm_scale
        self._unique._change(**{**options, "sm_scale": scale if is_new else None})
        self._options = options
        same_device(self._unique._workspace, q=vq, **shared)
        _check_shared(shared, geometry)
        # --- 2. Attend to both, and merge ---
        layout = geometry.given.kv_layout
        return merge(
            run_unmasked(q, k_shared, v_shared, layout, scale),
            self._unique.run(q, cache, return_lse=True),
        )


def merge(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    """The output of two states (out, lse)."""
    arrays = a[0], b[0], a[1], b[1], None, None, None, None
    return module_merge.run(module_merge.PAIR, arrays, False)[0]


def _check_shared(views: dict[str, ArrayView], geometry: Geometry) -> None:
    """ArgumentError unless k_shared and v_shared go with the plan."""
    dims = planned(geometry)
    rows = "shared_len num_kv_heads"
    if geometry.given.kv_layout == "HND":
        rows = "num_kv_heads shared_len"
    for (name, v), dim in zip(views.items(), ("head_dim_qk", "head_dim_vo"), strict=True):
        match(v, f"{rows} {dim}", dims, name)
        require_contiguous_last(v, name)


def _page_size(pages: ArrayView, is_one_of_two: bool, kv_layout: str) -> int:
    """That of a cache, or of K of a pair, with an axis for it or without."""
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

    float_workspace_buffer, kv_layout   as in BatchDecodeWithPagedKVCacheWrapper; the layout is that
            of the prefix too.

    A prefix in pages of the same cache takes one launch in MultiLevelCascadeAttentionWrapper.
    Raises WorkspaceError for a bad workspace, ArgumentError for the rest. Semantics: FlashInfer's
    class of the same name.
    """

    _class = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr: Any,
        unique_kv_indices: Any,
        unique_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        """Schedule the batch that the next runs are for.

        unique_kv_indptr int32 or int64 [B + 1], unique_kv_indices [>= indptr[B]],
        unique_kv_last_page_len [B]: the pages of each request without the prefix, as plan() of
        BatchDecodeWithPagedKVCacheWrapper has them. A request may have none.
        num_qo_heads, num_kv_heads, head_dim, page_size  of the arrays to come.
        data_type       expected of them; arrays of another dtype schedule the batch anew.

        Raises as that plan(); the last plan then stays in force.
        """
        expected = dtypes.parse(data_type, "data_type").name
        options = self._options or {"q_data_type": expected, "kv_data_type": expected}
        tables = unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
        self._unique.plan(*tables, num_qo_heads, num_kv_heads, head_dim, page_size, **options)

    plan = begin_forward

    def forward(
        self,
        q: Any,
        k_shared: Any,
        v_shared: Any,
        unique_kv_cache: Any = None,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        unique_kv_data: Any = None,
    ) -> Any:
        """Attention of one row a request over the prefix and the request's own keys.

        q       [B, num_qo_heads, head_dim].
        k_shared, v_shared  [shared_len, num_kv_heads, head_dim] ("NHD") or [num_kv_heads,
                shared_len, head_dim] ("HND"): the prefix; it may be empty.
        unique_kv_cache     the pages, as in BatchDecodeWithPagedKVCacheWrapper.run (once called
                unique_kv_data).
        sm_scale            default 1 / sqrt(head_dim).
        The rest is accepted for compatibility: products accumulate in float32, and nothing is
        rotated here, nor in FlashInfer.

        Returns [B, num_qo_heads, head_dim] in q's framework, dtype and device. It never waits for
        the device. Raises ArgumentError for arrays that do not fit the plan, PlanError without one.
        """
        cache = unique_kv_data if unique_kv_cache is None else unique_kv_cache
        return self._attend(q, k_shared, v_shared, cache, {"sm_scale": sm_scale})

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill or append attention of requests that share a prefix and have pages of their own.

    float_workspace_buffer, kv_layout   as in BatchPrefillWithPagedKVCacheWrapper; the layout is
            that of the prefix too.

    A prefix in pages of the same cache takes one launch in MultiLevelCascadeAttentionWrapper.
    Raises WorkspaceError for a bad workspace, ArgumentError for the rest. Semantics: FlashInfer's
    class of the same name.
    """

    _class = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int | None = None,
    ) -> None:
        """Schedule the batch that the next runs are for.

        qo_indptr       int32 or int64 [B + 1]: rows of q of each request, its last tokens.
        paged_kv_indptr int32 or int64 [B + 1], paged_kv_indices [>= indptr[B]],
        paged_kv_last_page_len [B]: the pages of each request without the prefix, as plan() of
        BatchPrefillWithPagedKVCacheWrapper has them. A request may have none.
        num_qo_heads, num_kv_heads, head_dim, page_size  of the arrays to come. Without a page size
        the next run() reads it off its cache, and schedules the batch.

        Raises as that plan(), or run() does; the last plan then stays in force.
        """
        tables = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        sizes = num_qo_heads, num_kv_heads, head_dim
        if page_size is not None:
            self._unique.plan(*tables, *sizes, page_size, **self._options)
            self._waiting = None
            return
        # As they are now; ids on a device stay the caller's, as after every plan.
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        for index, name in enumerate(names):
            if name != "paged_kv_indices" or array.view(tables[index], name).device.kind == "cpu":
                tables[index] = host_integers(tables[index], name)
        named = zip(sizes, ("num_qo_heads", "num_kv_heads", "head_dim"), strict=True)
        self._waiting = *tables, *(batch_geometry.count(n, name) for n, name in named)

    plan = begin_forward

    def forward(
        self,
        q: Any,
        k_shared: Any,
        v_shared: Any,
        unique_kv_cache: Any = None,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        unique_kv_data: Any = None,
    ) -> Any:
        """Attention of the planned rows over the prefix and their requests' own keys.

        q       [qo_indptr[B], num_qo_heads, head_dim].
        k_shared, v_shared  [shared_len, num_kv_heads, head_dim] ("NHD") or [num_kv_heads,
                shared_len, head_dim] ("HND"): the prefix, of which all rows see all; it may be
                empty.
        unique_kv_cache     the pages, as in BatchPrefillWithPagedKVCacheWrapper.run (once called
                unique_kv_data).
        causal  row i of a request sees of its own keys those up to i + kv_len - qo_len. (Early
                releases had True as the default.)
        sm_scale            default 1 / sqrt(head_dim).
        The rest is accepted for compatibility: products accumulate in float32, and nothing is
        rotated here, nor in FlashInfer.

        Returns [qo_indptr[B], num_qo_heads, head_dim] in q's framework, dtype and device. It never
        waits for the device. A `causal`, `sm_scale` or dtype that is not the last run's schedules
        the batch anew. Raises ArgumentError for arrays that do not fit the plan, PlanError without
        one.
        """
        cache = unique_kv_data if unique_kv_cache is None else unique_kv_cache
        options = {"sm_scale": sm_scale, "causal": causal}
        return self._attend(q, k_shared, v_shared, cache, options)

    run = forward

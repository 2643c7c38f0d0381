"""Prefill in which tokens of a range, such as an image, see each other in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array.match import match, require_dtype
from ..core import dtypes, overloads, parse
from ..engine import geometry
from ..engine.ranges import read_ranges
from ..engine.requests import Batch, PageNames, read_paged, read_rows, with_mask
from ..engine.run_batch import make_options, run
from ..engine.workspace import refuse_capture
from ..engine.wrapper import exclusive, planning
from ..errors import ArgumentError, PlanError, UnsupportedError
from ..typing import Array, Pages, Scale
from .prefill import BatchPrefillWithPagedKVCacheWrapper

_NAMES = PageNames("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class _Windows(NamedTuple):
    """The windows to the left, in keys, of causality and of a row's range; -1 for none."""

    causal: int = -1
    ranges: int = -1


class _Asked(NamedTuple):
    """What the last plan() was told, and whose plan it is."""

    batch: Batch
    ranges: np.ndarray
    windows: _Windows
    heads_and_dims: tuple[Any, Any, Any, Any]
    page_size: int
    data_types: tuple[Any, Any]
    split: tuple[int, bool]
    plan_options: dict[str, Any]
    owner: object = None


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill or append attention of a batch over pages, in which each row sees, besides what
    causality and a window let it, a range of keys before and behind it: plan() once, run() per
    layer.

    Parameters
    ----------
    float_workspace_buffer to paged_kv_last_page_len_buf
        As in BatchPrefillWithPagedKVCacheWrapper.
    pos_encoding_mode
        Must be "NONE".
    q_data_type, kv_data_type, o_data_type, head_dim_qk, head_dim_vo
        What plan() takes if it is not told; if it is, it must be told the same.

    Raises
    ------
    CupyAttnError
        As BatchPrefillWithPagedKVCacheWrapper.

    Notes
    -----
    Ranges of rows that hold the row itself and begin within its window cost no bits: rows see one
    interval of keys each. Other ranges take a packed mask, made on the host.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchPrefillWithCausalBidirectionalRangesWrapper(
    ...     q_data_type="float16", kv_data_type="float16", head_dim_qk=64, head_dim_vo=64
    ... )
    >>> wrapper.plan(np.array([0, 4, 20]), indptr, indices, last, 8, 2, 64, 16)
    >>> ranges = np.full((20, 2), -1, np.int32)
    >>> ranges[8:12] = 4, 7  # tokens 4 to 7 of the second request are an image: they see each other
    >>> wrapper.run(np.ones((20, 8, 64), np.float16), pool, ranges).shape
    (20, 8, 64)
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Array | None = None,
        paged_kv_indptr_buf: Array | None = None,
        paged_kv_indices_buf: Array | None = None,
        paged_kv_last_page_len_buf: Array | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = "bfloat16",
        o_data_type: Any = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        if parse.pos_encoding_mode(pos_encoding_mode) != "NONE":
            raise UnsupportedError(
                f"pos_encoding_mode: got {pos_encoding_mode!r}; encode positions into q and k "
                "before the call, and pass 'NONE'"
            )
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        self._own: dict[str, Any] = {
            "q_data_type": dtypes.parse(q_data_type, "q_data_type"),
            "kv_data_type": dtypes.parse(kv_data_type, "kv_data_type"),
            "o_data_type": dtypes.parse(
                q_data_type if o_data_type is None else o_data_type, "o_data_type"
            ),
            "head_dim_qk": geometry.count(head_dim_qk, "head_dim_qk"),
            "head_dim_vo": geometry.count(head_dim_vo, "head_dim_vo"),
        }
        self._asked: _Asked | None = None
        self._planned: tuple[np.ndarray, _Windows] | None = None

    @planning
    def plan(  # type: ignore[override]
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: None = None,
        packed_custom_mask: None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: None = None,
        token_pos_in_items_ptr: None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        bidirectional_ranges: Array | None = None,
        causal_window_left: int = -1,
        range_window_left: int = -1,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        qo_indptr to page_size, sm_scale, logits_soft_cap, fixed_split_size, disable_split_kv
            As in BatchPrefillWithPagedKVCacheWrapper.plan.
        head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type
            The constructor's.
        custom_mask, packed_custom_mask, causal, window_left, the
            Arguments of multi-item scoring must be left out: the ranges say which keys rows see.
        bidirectional_ranges, causal_window_left, range_window_left
            As in run(), which may then leave them out: it neither reads them from the GPU nor
            schedules. A CUDA graph needs them here.
        other arguments
            The rest is accepted for compatibility.

        Raises
        ------
        CupyAttnError
            As BatchPrefillWithPagedKVCacheWrapper.plan.
        """
        items_len = parse.require_int(token_pos_in_items_len, "token_pos_in_items_len", 0)
        for name, value, wanted in (
            ("custom_mask", custom_mask, None),
            ("packed_custom_mask", packed_custom_mask, None),
            ("causal", parse.flag(causal, "causal"), False),
            ("pos_encoding_mode", parse.pos_encoding_mode(pos_encoding_mode), "NONE"),
            ("window_left", parse.window(window_left, "window_left"), -1),
            ("prefix_len_ptr", prefix_len_ptr, None),
            ("token_pos_in_items_ptr", token_pos_in_items_ptr, None),
            ("token_pos_in_items_len", items_len, 0),
            ("max_item_len_ptr", max_item_len_ptr, None),
        ):
            if value is not wanted and (wanted is None or value != wanted):
                raise ArgumentError(
                    f"{name}: given, but the ranges say which keys rows see; pass {wanted!r}, and "
                    "windows as causal_window_left and range_window_left"
                )
        self._require_own(
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )
        page_size = geometry.count(page_size, "page_size")
        batch = read_paged(
            read_rows(qo_indptr),
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            page_size,
            _NAMES,
            self._is_debugging(),
        )
        ranges = np.full((batch.num_rows, 2), -1)
        if bidirectional_ranges is not None:
            ranges = self._read(bidirectional_ranges, batch)
        own = self._own
        asked = _Asked(
            batch,
            ranges,
            _Windows(
                _window(causal_window_left, "causal_window_left"),
                _window(range_window_left, "range_window_left"),
            ),
            (num_qo_heads, num_kv_heads, own["head_dim_qk"], own["head_dim_vo"]),
            page_size,
            (own["q_data_type"].name, own["kv_data_type"].name),
            geometry.split_size(fixed_split_size, disable_split_kv, page_size),
            {
                "sm_scale": sm_scale,
                "logits_soft_cap": logits_soft_cap,
                "o_dtype": own["o_data_type"].name,
            },
        )
        self._install_ranges(asked, asked.ranges, asked.windows)
        self._asked = asked._replace(owner=self._turns.own)

    begin_forward = plan  # type: ignore[assignment]

    def _require_own(self, **told: Any) -> None:
        """ArgumentError for head dims and dtypes that are not those of the constructor."""
        for name, value in told.items():
            own, read = self._own[name], dtypes.parse if "type" in name else geometry.count
            if (value is not None or name == "head_dim_qk") and read(value, name) != own:
                raise ArgumentError(
                    f"{name}: got {value!r}, but the wrapper was made for {own}; make another one"
                )

    @overloads.ranges_run
    @exclusive
    def run(  # type: ignore[override]
        self,
        q: Array,
        paged_kv_cache: Pages,
        bidirectional_ranges: Array | None = None,
        causal_window_left: int | None = None,
        range_window_left: int | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> Any:
        """Attention of the planned batch.

        Parameters
        ----------
        bidirectional_ranges
            int32 [qo_indptr[B], 2]: the first and the last key, by index in its request, of the
            range that each row sees; (-1, -1) for none. On the host, or on the GPU, where each run
            waits for it. Ranges other than the last run's schedule the batch anew. Default:
            plan()'s.
        causal_window_left
            Besides its range, row i sees keys from i + kv_len - qo_len - causal_window_left up to i
            + kv_len - qo_len. A negative number: from 0 on. Default: plan()'s, -1 if it was not
            told.
        range_window_left
            Of its range, a row sees the keys less than so many before it, and all behind it. 0 or a
            negative number: all. Default: likewise.
        enable_pdl
            Accepted for compatibility.
        kv_cache_sf
            Must be None.
        q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse
            As in BatchPrefillWithPagedKVCacheWrapper.run.

        Raises
        ------
        CupyAttnError
            Returns and raises as that function.
        """
        geometry.refuse("4-bit caches are not supported", kv_cache_sf=kv_cache_sf)
        asked = self._asked
        if asked is None:
            raise PlanError("run() was called before plan(); call plan() first")
        self._turns.check(asked.owner)
        if self._follow(q):
            assert self._asked is not None
            self._asked = asked = self._asked._replace(owner=asked.owner)
        ranges, windows = asked.ranges, asked.windows
        if bidirectional_ranges is not None:
            ranges = self._read(bidirectional_ranges, asked.batch)
        if causal_window_left is not None:
            windows = windows._replace(causal=_window(causal_window_left, "causal_window_left"))
        if range_window_left is not None:
            windows = windows._replace(ranges=_window(range_window_left, "range_window_left"))
        assert self._planned is not None
        if windows != self._planned[1] or not np.array_equal(ranges, self._planned[0]):
            # The plan stays that of the thread that brought the tables.
            own = self._turns.own
            self._install_ranges(asked, ranges, windows)
            self._turns.own = own
            assert self._current is not None
            self._current.owner = asked.owner
        options = make_options(
            return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        )
        return run(self, q=q, k=paged_kv_cache, out=out, lse=lse, options=options)

    @overloads.ranges_forward
    def forward(  # type: ignore[override]
        self,
        q: Array,
        paged_kv_cache: Pages,
        bidirectional_ranges: Array | None = None,
        causal_window_left: int | None = None,
        range_window_left: int | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """run() in its older form."""
        geometry.refuse("4-bit caches are not supported", kv_cache_sf=kv_cache_sf)
        return self.run(
            q,
            paged_kv_cache,
            bidirectional_ranges,
            causal_window_left,
            range_window_left,
            q_scale,
            k_scale,
            v_scale,
            return_lse=return_lse,
        )

    def _install_ranges(self, asked: _Asked, ranges: np.ndarray, windows: _Windows) -> None:
        parsed = read_ranges(asked.batch, ranges, windows.causal, windows.ranges)
        batch = asked.batch
        if parsed.mask.intervals is None:
            batch = with_mask(replace(batch))
        options = self._options(
            asked.heads_and_dims,
            asked.page_size,
            asked.data_types,
            parsed.mask.form,
            window_left=parsed.window_left,
            # A captured graph keeps its windows, but not what its rows see.
            window_right=-1 if self._is_graph else parsed.reach,
            **asked.plan_options,
        )
        self._install(options, batch, parsed.mask, asked.split)
        self._planned = ranges, windows

    def _read(self, bidirectional_ranges: Any, batch: Batch) -> np.ndarray:
        """int64 [rows of q, 2] on the host; an array on a GPU is waited for."""
        name = "bidirectional_ranges"
        v = array.view(bidirectional_ranges, name)
        require_dtype(v, (dtypes.int32, dtypes.int64), name)
        match(v, f"{batch.num_rows} 2", {}, name)
        if v.device.kind == "cuda":
            remedy = "give the ranges to plan() before the capture"
            refuse_capture(self._current_stream(), f"reading {name} on the GPU", remedy)
        return array.to_host(v).astype(np.int64)


def _window(value: Any, name: str) -> int:
    """An integer, of which all that mean no window are -1."""
    return max(parse.require_int(value, name, -(2**31)), -1)

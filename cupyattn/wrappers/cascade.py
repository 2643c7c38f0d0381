"""Cascade attention: requests that share keys with others, level by level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes, overloads
from ..engine import geometry as batch_geometry
from ..engine.geometry import Geometry, Variant
from ..engine.graph_buffers import GraphBuffers
from ..engine.levels import (
    flatten,
    join_ids_on_device,
    join_ids_on_host,
    join_levels,
    read_levels,
)
from ..engine.mask import NO_MASK, Mask
from ..engine.requests import Batch
from ..engine.run_batch import make_options, run
from ..engine.workspace import copy_on_device, num_bytes, same_device
from ..engine.wrapper import BatchWrapper, Plan, planning
from ..errors import ArgumentError, UnsupportedError, WorkspaceError
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule, Capacity
from ..schedule.levels import MAX_LEVELS
from ..schedule.mixed import CASCADE_SPLITTINGS
from ..typing import Array, Pages, Scale
from .legacy import OlderCalls


class MultiLevelCascadeAttentionWrapper(BatchWrapper, OlderCalls):
    """Attention of a batch whose requests share keys, level by level: plan() once, run() per layer.

    Level 0 is shared most widely, the last level is each request's own; a row sees the keys of its
    request at level 0, then those at level 1, and so on, as if they were one sequence. All levels
    are one launch, in which tiles of shared keys serve the rows of all requests that share them; a
    second one merges the states of the levels. Where that would take longer than attending to the
    same keys request by request, by an estimate, plan() chooses the latter.

    Parameters
    ----------
    num_levels
        1 to 32.
    float_workspace_buffer, workspace_buffer, kv_layout
        As in BatchDecodeWithPagedKVCacheWrapper.
    use_cuda_graph
        As there. The first plan must have the most query rows; sharing is then not weighed.
    qo_indptr_buf_arr to paged_kv_last_page_len_buf_arr
        Needed in graph mode: lists of int32 arrays on the device, one a level, of the sizes [B +
        1], [B + 1], [most pages] and [B] of that level.

    Raises
    ------
    CupyAttnError
        WorkspaceError for a bad workspace, UnsupportedError for more levels, ArgumentError for the
        rest.

    Notes
    -----
    Semantics: FlashInfer's class of the same name, but for RoPE, ALiBi and windows: there each
    level counts positions from 0, here they count through all levels.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((5, 2, 16, 2, 64), np.float16)
    >>> rows = [np.array([0, 2]), np.array([0, 1, 2])]  # both rows share level 0
    >>> indptr = [np.array([0, 2]), np.array([0, 1, 2])]
    >>> indices, last = [np.array([4, 0]), np.array([1, 3])], [np.array([16]), np.array([5, 9])]
    >>> wrapper = cupyattn.MultiLevelCascadeAttentionWrapper(2)
    >>> wrapper.plan(rows, indptr, indices, last, 8, 2, 64, 16)
    >>> wrapper.run(np.ones((2, 8, 64), np.float16), pool).shape
    (2, 8, 64)
    """

    _rows_name = "qo_indptr_arr"

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indices_buf_arr: Sequence[Any] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Any] | None = None,
        *,
        workspace_buffer: Any = None,
    ) -> None:
        self._num_levels = batch_geometry.count(num_levels, "num_levels")
        if self._num_levels > MAX_LEVELS:
            raise UnsupportedError(
                f"num_levels: got {num_levels}; at most {MAX_LEVELS} are supported"
            )
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        super().__init__(workspace, kv_layout, use_cuda_graph, {}, "auto", None)
        self._level_buffers: list[GraphBuffers] = []
        self._splittings = CASCADE_SPLITTINGS  # to try; graphs keep that of the first plan
        if self._is_graph:
            self._keep_buffers(
                {
                    "qo_indptr_buf": qo_indptr_buf_arr,
                    "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
                    "paged_kv_indices_buf": paged_kv_indices_buf_arr,
                    "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
                }
            )

    def _keep_buffers(self, arrays: dict[str, Sequence[Any] | None]) -> None:
        self._require_workspace(arrays.values())
        for name, levels in arrays.items():
            if not isinstance(levels, (list, tuple)) or len(levels) != self._num_levels:
                raise ArgumentError(
                    f"{name}_arr: use_cuda_graph=True needs a list of {self._num_levels} int32 "
                    f"arrays, one a level, got {levels if levels is None else len(levels)}"
                )
        for level in zip(*arrays.values(), strict=True):  # type: ignore[arg-type]
            buffers = dict(zip(arrays, level, strict=True))
            self._level_buffers.append(GraphBuffers(self._workspace, buffers))
        # The kernels read the ids of all levels in one piece.
        sizes = [x.kv_indices.shape[0] for x in self._level_buffers if x.kv_indices is not None]
        joined = array.empty((max(1, sum(sizes)),), dtypes.int32, self._workspace)
        self._buffers = GraphBuffers(self._workspace, {"paged_kv_indices_buf": joined})

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffers: Any = None
    ) -> None:
        """As BatchWrapper.reset_workspace_buffer; int_workspace_buffers is not used."""
        super().reset_workspace_buffer(float_workspace_buffer)

    @planning
    def plan(
        self,
        qo_indptr_arr: Sequence[Any],
        paged_kv_indptr_arr: Sequence[Any],
        paged_kv_indices_arr: Sequence[Any],
        paged_kv_last_page_len: Sequence[Any],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        disable_split_kv: bool = False,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Lists of one array a level, int32 or int64, on the host or on the device:

        Parameters
        ----------
        qo_indptr_arr
            [B + 1] from 0 on: request b of the level has rows indptr[b] to indptr[b + 1] of q. All
            levels end at the same row.
        paged_kv_indptr_arr
            [B + 1], paged_kv_indices_arr [>= indptr[B]] and.
        paged_kv_last_page_len
            [B]: the pages of each request of the level, as in
            BatchPrefillWithPagedKVCacheWrapper.plan. Ids on a device are copied there, and waited
            for only where the levels are not kept.
        num_qo_heads, num_kv_heads, head_dim, page_size
            Of the arrays that run() is going to get.
        causal
            Rows of a request of the last level see of its keys those up to i + kv_len - qo_len;
            keys that are shared are seen by all.
        other arguments
            Other options as in single_prefill_with_kv_cache; window_left, RoPE and ALiBi go by the
            positions of keys through all levels, and then every level must refine the one before.
        disable_split_kv
            Never split keys, which leaves fewer states in the workspace. plan() splits less, or
            does without sharing, where the workspace does not hold more.

        Raises
        ------
        CupyAttnError
            As BatchDecodeWithPagedKVCacheWrapper.plan.
        """
        if self._workspace.device.kind == "cuda" and not self._is_probe:
            self._refuse_capture(self._current_stream())
        page_size = batch_geometry.count(page_size, "page_size")
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        parts = read_levels(arrays, self._num_levels, page_size, self._is_debugging())
        options = self._options(
            (num_qo_heads, num_kv_heads, head_dim, None),
            page_size,
            (q_data_type, kv_data_type),
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        geometry = batch_geometry.find_geometry(options)
        spec = geometry.spec
        is_relative = spec.window_left >= 0 or spec.pos_encoding != "NONE"
        own = parts[-1].requests
        if spec.causal and is_relative and (own.qo_len > own.kv_len)[own.qo_len > 0].any():
            at = int(np.argmax((own.qo_len > own.kv_len) & (own.qo_len > 0)))
            raise UnsupportedError(
                f"qo_indptr_arr[{self._num_levels - 1}]: request {at} has {own.qo_len[at]} rows "
                f"and {own.kv_len[at]} keys of its own; where positions count (window_left, RoPE, "
                "ALiBi), a causal request needs at least as many keys as rows in the last level"
            )
        for level, part in enumerate(parts):
            name = f"paged_kv_indices_arr[{level}]"
            same_device(self._workspace, **{name: part.page_ids_device})
        batch = join_levels(parts, spec.causal, is_relative)
        split = batch_geometry.split_size(None, disable_split_kv, 1)
        for candidate, may_split in self._candidates(geometry, batch):
            try:
                self._install(options, candidate, NO_MASK, (0, split[1] and may_split))
                return
            except WorkspaceError as error:
                too_small = error
        raise too_small

    begin_forward = plan

    def _candidates(self, geometry: Geometry, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """The batch with its page ids, and whether keys may be split: as it is, unless it is done
        sooner without sharing; then, for less workspace, without sharing and without splits."""
        parts = batch.parts
        without_levels = None
        if batch.num_rows and not self._is_graph and batch.levels is not None:
            without_levels = flatten(parts, geometry.spec.page_size, geometry.spec.causal)
        launcher = geometry.launcher(geometry.default_variant)
        if without_levels is None or launcher.gains_by_levels(batch.requests, without_levels[0]):
            if self._is_probe or any(part.page_ids is not None for part in parts):
                batch.page_ids = join_ids_on_host(parts)
            else:
                stream = self._current_stream()
                batch.page_ids_device = join_ids_on_device(parts, self._workspace, stream)
            yield batch, True
        if without_levels is not None:
            requests, pages = without_levels
            ids = join_ids_on_host(parts)[pages]
            indptr = np.array([0, len(ids)])
            for may_split in (True, False):
                alone = replace(batch, requests=requests, kv_indptr=indptr, levels=None)
                alone.page_ids, alone.page_ids_device = ids, None
                yield alone, may_split

    def _schedule_variant(
        self, plan: Plan, variant: Variant
    ) -> tuple[BatchLauncher, BatchSchedule]:
        """With as many splits as the workspace holds."""
        batch = plan.batch
        if batch.levels is None:
            return super()._schedule_variant(plan, variant)
        launcher = plan.geometry.launcher(variant)
        for splitting in self._splittings:
            if splitting.may_split and not plan.split[1]:
                continue
            schedule = launcher.schedule_levels(
                batch.requests, batch.levels, plan.capacity, splitting
            )
            self._enlarge_workspace(schedule.workspace_bytes)
            if schedule.workspace_bytes <= num_bytes(self._workspace):
                if self._is_graph:
                    self._splittings = (splitting,)
                break
            if self._is_probe:
                break
        return launcher, schedule

    def _replace_workspace(self, v: ArrayView, int_workspace_buffer: Any) -> None:
        for buffers in self._level_buffers:
            buffers.require_apart(v)
        super()._replace_workspace(v, int_workspace_buffer)

    def _check_buffers(self, batch: Batch, mask: Mask) -> None:
        for buffers, part in zip(self._level_buffers, batch.parts, strict=True):
            buffers.check(part, mask)

    def _capacity(self, batch: Batch, page_size: int) -> Capacity:
        levels = tuple(
            (part.num_requests, int(part.requests.qo_len.max(initial=1))) for part in batch.parts
        )
        ids = self._buffers.kv_indices
        return Capacity(
            num_requests=sum(count for count, _ in levels),
            num_rows=batch.num_rows,
            max_qo_len=max(longest for _, longest in levels),
            num_tokens=0 if ids is None else ids.shape[0] * page_size,
            levels=levels,
        )

    def _host_parts(self, plan: Plan) -> list[tuple[np.ndarray, int]]:
        parts, ids, end = [], plan.batch.page_ids, 0
        for buffers, part in zip(self._level_buffers, plan.batch.parts, strict=False):
            parts += buffers.host_parts(part)
            begin, end = end, end + part.num_page_ids
            if ids is not None and buffers.kv_indices is not None:
                parts.append((ids[begin:end], buffers.kv_indices.ptr))
        return parts

    def _upload(
        self, plan: Plan, schedules: dict[Variant, tuple[BatchLauncher, BatchSchedule]]
    ) -> None:
        super()._upload(plan, schedules)
        # What came from the device goes to the caller's buffers from there.
        joined, stream, before = plan.batch.page_ids_device, self._current_stream(), 0
        for buffers, part in zip(self._level_buffers, plan.batch.parts, strict=False):
            if joined is not None and buffers.kv_indices is not None:
                target, size = buffers.kv_indices.ptr, 4 * part.num_page_ids
                copy_on_device(target, joined.ptr + before, size, joined.device.index, stream)
                before += size
            buffers.copy_last_page_len(part, stream)

    def _keep_on_cpu(self, plan: Plan) -> None:
        super()._keep_on_cpu(plan)
        for part in plan.batch.parts:
            assert part.page_ids is not None
            part.page_ids = part.page_ids.astype(np.int64)
        for buffers, part in zip(self._level_buffers, plan.batch.parts, strict=False):
            buffers.fill_on_cpu(part)

    @overloads.cascade_run
    def run(
        self,
        q: Array,
        paged_kv_cache: Pages,
        *,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        sinks: Array | None = None,
        output_gate: Array | None = None,
    ) -> Any:
        """Attention of the planned batch.

        Parameters
        ----------
        q
            [rows, num_qo_heads, head_dim], as every qo_indptr deals them out.
        paged_kv_cache
            The pages of all levels.
        k_scale, v_scale, out, lse, return_lse, sinks, output_gate
            As in BatchDecodeWithPagedKVCacheWrapper.run; a sink counts once, not in every level,
            and so do gates.

        Returns
        -------
        out
            [rows, num_qo_heads, head_dim] in q's framework and device, or (out, lse [rows,
            num_qo_heads], base 2) if `return_lse`. It never waits for the device.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, PlanError without a plan, before
            anything is written.
        """
        return run(
            self,
            q=q,
            k=paged_kv_cache,
            out=out,
            lse=lse,
            sinks=sinks,
            output_gate=output_gate,
            options=make_options(return_lse=return_lse, k_scale=k_scale, v_scale=v_scale),
        )

    forward = run

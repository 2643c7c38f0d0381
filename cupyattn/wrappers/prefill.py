"""Batch prefill and append, over pages of keys and values or over rows of one array each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..core import overloads
from ..engine import geometry
from ..engine.block_scales import BlockScales
from ..engine.key_share import read_share, with_whole_lengths
from ..engine.logits import read as read_logits
from ..engine.mask import read_intervals, read_mask
from ..engine.plan_again import repeated
from ..engine.requests import (
    Batch,
    PageNames,
    on_host,
    read_paged,
    read_ragged,
    read_rows,
    require_same_lengths,
    require_same_offsets,
    with_mask,
)
from ..engine.run_batch import NO_OPTIONS, RunOptions, make_options, run
from ..engine.wrapper import BatchWrapper, planning
from ..typing import Array, Pages, Scale
from .legacy import (
    OlderCalls,
    accepts_old_plans,
    as_older_run,
    check_run,
    read_options,
    read_sink,
    takes_sinks,
)
from .lse_form import run_in_form

# Compared as objects, which takes any value; what is equal but not the same takes the longer way.
_LOG2, _NH = "log2", "NH"
_NAMES = PageNames("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def _count_token(num_heads: Any, name: str, head_dim: Any) -> int:
    """The elements of a token, which offsets of rows count with backend="cudnn"."""
    return geometry.count(num_heads, name) * geometry.count(head_dim, "head_dim_qk")


class _BatchPrefill(BatchWrapper, OlderCalls):
    """What both wrappers share: a plan may bring a mask, or multi-item scoring."""

    _in_elements = False  # offsets of rows count elements
    _takes_sinks = False  # run() takes sink and sm_scale after its arrays

    def _read_positional(
        self, args: tuple[Any, ...], sinks: Any, options: RunOptions, old_order: tuple[str, ...]
    ) -> tuple[Any, RunOptions]:
        """(sinks, options) of a run with these positional arguments after its arrays."""
        if not self._takes_sinks:
            return sinks, read_options(args, options, old_order)
        num_heads = self._require_plan().geometry.spec.num_qo_heads
        sinks, q_scale = read_sink(args, options.q_scale, num_heads)
        return sinks, options._replace(q_scale=q_scale)

    def _plan(
        self,
        batch: Batch,
        heads_and_dims: tuple[Any, Any, Any, Any],
        page_size: int,
        data_types: tuple[Any, Any],
        *,
        lens: tuple[Any, Any],
        logits: tuple[Any, Any, Any, Any],
        masks: tuple[Any, Any],
        items: tuple[Any, Any, Any, Any],
        split: tuple[Any, Any],
        share: tuple[Any, Any, Any, Any],
        **plan_options: Any,
    ) -> None:
        """Install a batch; the rest are arguments of plan().

        lens: of q and of keys. items: of multi-item scoring.
        """
        if self._in_elements:
            for x, name, own in zip(
                lens,
                ("seq_lens_q", "seq_lens"),
                (batch.requests.qo_len, batch.requests.kv_len),
                strict=True,
            ):
                require_same_lengths(x, name, own)
        transform, mask_fn, params, rel_logits = logits
        expression, arrays = read_logits(transform, mask_fn, params, rel_logits)
        prefix, token_pos, token_pos_len, longest = items
        intervals = read_intervals(batch, prefix, token_pos, token_pos_len, longest)
        bools, bits = masks
        mask = read_mask(bools, bits, intervals)
        if self._takes_sinks:
            plan_options["sm_scale"] = 1.0
        world_size, rank, interleave_size, whole_lens = share
        plan_options["key_share"] = key_share = read_share(world_size, rank, interleave_size)
        batch = with_whole_lengths(batch, key_share, whole_lens)
        if mask.view is not None:
            batch = with_mask(batch)
        options = self._options(
            heads_and_dims, page_size, data_types, mask.form, logits=expression, **plan_options
        )
        size, is_disabled = split
        split = geometry.split_size(size, is_disabled, page_size or 1)
        self._install(options, batch, mask, split, arrays)


class BatchPrefillWithPagedKVCacheWrapper(_BatchPrefill):
    """Prefill or append attention of a batch over a paged KV cache: plan() once, run() per layer.

    Parameters
    ----------
    float_workspace_buffer, workspace_buffer, kv_layout, use_cuda_graph, backend
        As in BatchDecodeWithPagedKVCacheWrapper. In graph mode the first plan must have the most
        query rows, and a plan between replays may have another mask. With backend="cudnn" qo_indptr
        counts elements of q, and pages are "HND".
    jit_args, jit_kwargs
        None, or FlashInfer's for its variant AttentionSink: run() then takes sink and sm_scale
        after its arrays, as BatchAttentionWithAttentionSinkWrapper.run. Other variants are written
        as logits_transform and mask_fn of plan().
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        int32 [B + 1], [B + 1], [most pages of a batch] and [B] on the device: what graph mode
        needs, filled by plan().
    custom_mask_buf, mask_indptr_buf
        uint8 [most bytes of a packed mask] and int32 [B + 1]: given if and only if the graph is to
        read a mask.
    qk_indptr_buf
        An older name of mask_indptr_buf.

    Raises
    ------
    CupyAttnError
        As BatchDecodeWithPagedKVCacheWrapper.

    Notes
    -----
    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper()
    >>> qo_indptr = np.array([0, 4, 20])  # 4 new tokens of the first request, 16 of the second
    >>> wrapper.plan(qo_indptr, indptr, indices, last, 8, 2, 64, 16, causal=True)
    >>> q = np.ones((20, 8, 64), np.float16)
    >>> wrapper.run(q, pool).shape
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
        custom_mask_buf: Array | None = None,
        mask_indptr_buf: Array | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        qk_indptr_buf: Array | None = None,
        workspace_buffer: Any = None,
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            "custom_mask_buf": custom_mask_buf,
            "mask_indptr_buf": qk_indptr_buf if mask_indptr_buf is None else mask_indptr_buf,
        }
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        super().__init__(workspace, kv_layout, use_cuda_graph, buffers, backend, None)
        self._takes_sinks = takes_sinks(jit_args, jit_kwargs)
        self._in_elements = backend == "cudnn"
        if self._in_elements:
            self._kv_layout = "HND"

    @planning
    @repeated("qo_indptr", *_NAMES)
    @accepts_old_plans(slot=8)
    def plan(
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
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
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
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Array | None = None,
        token_pos_in_items_ptr: Array | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Array | None = None,
        seq_lens: Array | None = None,
        seq_lens_q: Array | None = None,
        block_tables: Array | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        window_right: int = -1,
        logits_transform: str | None = None,
        mask_fn: str | None = None,
        logits_params: Mapping[str, Any] | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_kv_cache_interleave_size: int = 1,
        cp_tot_seqused_k: Array | None = None,
        rel_logits: Array | None = None,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        qo_indptr
            int32 or int64 [B + 1] from 0 on: rows of q of each request, its last tokens.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            The pages of each request, as indptr, indices and last_page_len in
            BatchDecodeWithPagedKVCacheWrapper.plan. Like them, qo_indptr is needed on the host.
        num_qo_heads to head_dim_vo
            Of the arrays that run() is going to get; head_dim_vo defaults to head_dim_qk.
        custom_mask
            bool [sum of qo_len * kv_len]: the [qo_len, kv_len] masks of all requests, flattened;
            True where a row sees a key. causal is then ignored.
        packed_custom_mask
            uint8: the same as little-endian bits, each request from a byte on
            (`segment_packbits(mask, indptr, bitorder="little")`); it wins over custom_mask.
        causal
            Row i of a request sees keys up to i + kv_len - qo_len.
        q_data_type, kv_data_type, o_data_type
            Default float16, that of q, that of q.
        fixed_split_size, disable_split_kv
            As in BatchDecodeWithPagedKVCacheWrapper.plan.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
            Multi-item scoring: a request's keys are a prefix, then items with a delimiter ahead of
            each (and often one at the end). Rows of an item see the prefix and their item up to
            themselves; delimiters see the prefix and no row sees them; the prefix is causal.
            Integers [B], the length of the prefix; [B * token_pos_in_items_len], the index of each
            key behind it in its item, from 1 on, 0 for delimiters (what the last request needs no
            index for may be left out); and [B], the longest item, which is not needed. One
            request's may be without an axis. The first two are needed on the host; causal is
            implied, a mask is refused.
        logits_transform, mask_fn, logits_params
            As in single_prefill_with_kv_cache. Numbers stay as they are; run(logits_params=) may
            replace arrays. Indices count from the first query token and key of each request, which
            `batch` tells apart.
        rel_logits
            As there, [qo_indptr[B], num_qo_heads, distances]; run(rel_logits=) may replace it by
            another of its dtype.
        cp_world_size, cp_rank, cp_kv_cache_interleave_size, cp_tot_seqused_k
            As in BatchDecodeWithPagedKVCacheWrapper.plan: this rank's share of the keys. Causality
            and windows need the last of them; a custom_mask is of this rank's own keys.
        other arguments
            Other options as in single_prefill_with_kv_cache; the rest is accepted for
            compatibility. Older names and the older order without head_dim_vo are understood;
            data_type sets q's and the cache's.

        Raises
        ------
        CupyAttnError
            As BatchDecodeWithPagedKVCacheWrapper.plan.
        """
        page_size = geometry.count(page_size, "page_size")
        unit = 1
        if self._in_elements:
            unit = _count_token(num_qo_heads, "num_qo_heads", head_dim_qk)
        last = None if page_size == 1 else paged_kv_last_page_len
        qo_indptr, paged_kv_indptr, last = on_host(qo_indptr, paged_kv_indptr, last)
        batch = read_paged(
            read_rows(qo_indptr, unit=unit),
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len if last is None else last,
            page_size,
            _NAMES,
            self._is_debugging(),
        )
        self._plan(
            batch,
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            page_size,
            (q_data_type, kv_data_type),
            lens=(seq_lens_q, seq_lens),
            logits=(logits_transform, mask_fn, logits_params, rel_logits),
            masks=(custom_mask, packed_custom_mask),
            items=(
                prefix_len_ptr,
                token_pos_in_items_ptr,
                token_pos_in_items_len,
                max_item_len_ptr,
            ),
            split=(fixed_split_size, disable_split_kv),
            share=(cp_world_size, cp_rank, cp_kv_cache_interleave_size, cp_tot_seqused_k),
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            window_right=window_right,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_dtype=o_data_type,
        )

    begin_forward = plan

    @overloads.paged_prefill_run
    def run(
        self,
        q: Array,
        paged_kv_cache: Pages,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Array | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        logits_params: Mapping[str, Any] | None = None,
        output_gate: Array | None = None,
        q_block_scales: Array | None = None,
        k_block_scales: Array | None = None,
        v_block_scales: Array | None = None,
        k_mean: Array | None = None,
        block_size: int = 64,
        rel_logits: Array | None = None,
    ) -> Any:
        """Attention of the planned batch.

        Parameters
        ----------
        q
            [qo_indptr[B], num_qo_heads, head_dim_qk].
        paged_kv_cache
            As in BatchDecodeWithPagedKVCacheWrapper.run; K and V of a pair may have different head
            dims.
        q_scale, k_scale, v_scale, out, lse, return_lse, sinks
            As there. By position: all three scales, or the older k_scale, v_scale and return_lse.
        window_left
            If given, must be the plan's.
        kv_cache_sf
            Must be None.
        lse_base
            Of the LSE, given and returned: "log2", or "ln" for natural logarithms.
        lse_layout
            Likewise: "NH" for [rows, num_qo_heads], or "HN" for [num_qo_heads, rows].
        logits_params
            Arrays in place of those of the plan that have these names.
        rel_logits
            In place of the plan's.
        output_gate
            [rows, num_qo_heads] or [rows, num_qo_heads, head_dim_vo], as there.
        q_block_scales, k_block_scales, v_block_scales, k_mean, block_size
            As there.
        skip_softmax_threshold_scale_factor
            As in `single_prefill_with_kv_cache`, of each request's keys.
        enable_pdl
            Accepted for compatibility.
        use_fp16_softmax, uses_spcompress
            Accepted for compatibility: they allow less exact outputs.

        Returns
        -------
        out
            [qo_indptr[B], num_qo_heads, head_dim_vo] in q's framework and device, or (out, lse
            [qo_indptr[B], num_qo_heads]) if `return_lse`. It never waits for the device; it
            allocates its outputs only. The first run with scales by head, or with arrays off
            16-byte boundaries, schedules the batch anew.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, PlanError without a plan, before
            anything is written.
        """
        options = NO_OPTIONS
        if return_lse is not False or not (q_scale is k_scale is v_scale is None):
            options = make_options(
                return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
            )
        if args or self._takes_sinks:
            order = "k_scale", "v_scale", "return_lse"
            sinks, options = self._read_positional(args, sinks, options, order)
        if not (q_block_scales is k_block_scales is v_block_scales is k_mean is None):
            blocks = q_block_scales, k_block_scales, v_block_scales, k_mean, block_size
            options = options._replace(blocks=BlockScales._make(blocks))
        if skip_softmax_threshold_scale_factor is not None:
            options = options._replace(skip_softmax=skip_softmax_threshold_scale_factor)
        if not (window_left is kv_cache_sf is None):
            planned = self._require_plan().geometry.spec.window_left
            check_run(window_left, planned, kv_cache_sf)
        function: Any = run
        if not (lse_base is _LOG2 and lse_layout is _NH):
            function = functools.partial(run_in_form, lse_base=lse_base, lse_layout=lse_layout)
        return function(
            self,
            q=q,
            k=paged_kv_cache,
            out=out,
            lse=lse,
            sinks=sinks,
            output_gate=output_gate,
            options=options,
            logits_params=logits_params,
            rel_logits=rel_logits,
        )

    @overloads.paged_prefill_forward
    @as_older_run
    def forward(
        self,
        q: Array,
        paged_kv_cache: Pages,
        causal: bool | None = None,
        pos_encoding_mode: str | None = None,
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """run() in its older form, as BatchDecodeWithPagedKVCacheWrapper.forward."""
        raise NotImplementedError


class BatchPrefillWithRaggedKVCacheWrapper(_BatchPrefill):
    """Prefill or append attention of a batch over ragged keys: plan() once, run() for every layer.

    Parameters
    ----------
    float_workspace_buffer, workspace_buffer, use_cuda_graph, backend, jit_args, jit_kwargs
        As in BatchPrefillWithPagedKVCacheWrapper. In graph mode the first plan must also have the
        most keys if it has a fixed_split_size, and k and v of the captured run must have room for
        the most keys. With backend="cudnn" offsets count elements of their arrays.
    kv_layout
        "NHD" or "HND": rows [n, num_kv_heads, head_dim], or heads first.
    qo_indptr_buf, kv_indptr_buf
        int32 [B + 1] on the device: what graph mode needs, filled by plan().
    custom_mask_buf, mask_indptr_buf, qk_indptr_buf
        As there.

    Raises
    ------
    CupyAttnError
        As BatchDecodeWithPagedKVCacheWrapper.

    Notes
    -----
    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> indptr = np.array([0, 4, 20])  # two prompts, of 4 and of 16 tokens
    >>> wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper()
    >>> wrapper.plan(indptr, indptr, 8, 2, 64, causal=True)
    >>> q, k = np.ones((20, 8, 64), np.float16), np.ones((20, 2, 64), np.float16)
    >>> wrapper.run(q, k, k).shape
    (20, 8, 64)
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Array | None = None,
        kv_indptr_buf: Array | None = None,
        custom_mask_buf: Array | None = None,
        mask_indptr_buf: Array | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        qk_indptr_buf: Array | None = None,
        workspace_buffer: Any = None,
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "kv_indptr_buf": kv_indptr_buf,
            "custom_mask_buf": custom_mask_buf,
            "mask_indptr_buf": qk_indptr_buf if mask_indptr_buf is None else mask_indptr_buf,
        }
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        super().__init__(workspace, kv_layout, use_cuda_graph, buffers, backend, None)
        self._takes_sinks = takes_sinks(jit_args, jit_kwargs)
        self._in_elements = backend == "cudnn"

    @planning
    @repeated("qo_indptr", "kv_indptr")
    @accepts_old_plans(slot=5)
    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Array | None = None,
        token_pos_in_items_ptr: Array | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Array | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Array | None = None,
        seq_lens_q: Array | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Array | None = None,
        o_indptr: Array | None = None,
        *,
        window_right: int = -1,
        logits_transform: str | None = None,
        mask_fn: str | None = None,
        logits_params: Mapping[str, Any] | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_kv_cache_interleave_size: int = 1,
        cp_tot_seqused_k: Array | None = None,
        rel_logits: Array | None = None,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        qo_indptr
            int32 or int64 [B + 1] from 0 on: rows of q of each request, its last tokens.
        kv_indptr
            int32 or int64 [B + 1]: rows of k and v of each request. Both may be on the host or on
            the device, from where plan() waits for them.
        num_qo_heads to head_dim_vo
            Of the arrays that run() is going to get; head_dim_vo defaults to head_dim_qk.
        fixed_split_size
            Keys after which a request is split; the rest as in
            BatchDecodeWithPagedKVCacheWrapper.plan.
        v_indptr, o_indptr
            None, or offsets of the same rows as kv_indptr and qo_indptr.
        other arguments
            All other arguments as in BatchPrefillWithPagedKVCacheWrapper.plan.

        Raises
        ------
        CupyAttnError
            As BatchDecodeWithPagedKVCacheWrapper.plan.
        """
        units = [1] * 4
        if self._in_elements:
            units = [
                _count_token(heads, name, dim)
                for dim in (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)
                for heads, name in ((num_qo_heads, "num_qo_heads"), (num_kv_heads, "num_kv_heads"))
            ]
        qo_indptr, kv_indptr = on_host(qo_indptr, kv_indptr)
        batch = read_ragged(read_rows(qo_indptr, unit=units[0]), kv_indptr, units[1])
        if not o_indptr is v_indptr is None:
            require_same_offsets(o_indptr, "o_indptr", batch.qo_indptr, units[2])
            require_same_offsets(v_indptr, "v_indptr", batch.kv_indptr, units[3])
        self._plan(
            batch,
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            0,
            (q_data_type, kv_data_type),
            lens=(seq_lens_q, seq_lens),
            logits=(logits_transform, mask_fn, logits_params, rel_logits),
            masks=(custom_mask, packed_custom_mask),
            items=(
                prefix_len_ptr,
                token_pos_in_items_ptr,
                token_pos_in_items_len,
                max_item_len_ptr,
            ),
            split=(fixed_split_size, disable_split_kv),
            share=(cp_world_size, cp_rank, cp_kv_cache_interleave_size, cp_tot_seqused_k),
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            window_right=window_right,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_dtype=o_data_type,
        )

    begin_forward = plan

    @overloads.ragged_prefill_run
    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: float | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Array | None = None,
        kv_cache_sf: Any = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        logits_params: Mapping[str, Any] | None = None,
        output_gate: Array | None = None,
        q_block_scales: Array | None = None,
        k_block_scales: Array | None = None,
        v_block_scales: Array | None = None,
        k_mean: Array | None = None,
        block_size: int = 64,
        skip_softmax_threshold_scale_factor: float | None = None,
        rel_logits: Array | None = None,
    ) -> Any:
        """Attention of the planned batch.

        Parameters
        ----------
        q
            [qo_indptr[B], num_qo_heads, head_dim_qk].
        k, v
            [>= kv_indptr[B], num_kv_heads, head_dim] ("NHD") or [num_kv_heads, >= kv_indptr[B],
            head_dim] ("HND").
        q_scale, k_scale, v_scale, out, lse, return_lse, sinks, logits_params
            As in BatchDecodeWithPagedKVCacheWrapper.run. By position: all three scales, or the
            older return_lse.
        window_left
            If given, must be the plan's.
        o_scale, kv_cache_sf
            Must be None.
        enable_pdl
            Accepted for compatibility.
        lse_base, lse_layout, output_gate, skip_softmax_threshold_scale_factor, rel_logits
            As in BatchPrefillWithPagedKVCacheWrapper.run.
        q_block_scales, k_block_scales, v_block_scales, k_mean, block_size
            As there, but scales of rows of k and v are [ceil(rows / block_size) + B, num_kv_heads],
            placed as q's.

        Raises
        ------
        CupyAttnError
            Returns and raises as BatchPrefillWithPagedKVCacheWrapper.run.
        """
        options = NO_OPTIONS
        if return_lse is not False or not (q_scale is k_scale is v_scale is None):
            options = make_options(
                return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
            )
        if args or self._takes_sinks:
            sinks, options = self._read_positional(args, sinks, options, ("return_lse",))
        if not (q_block_scales is k_block_scales is v_block_scales is k_mean is None):
            blocks = q_block_scales, k_block_scales, v_block_scales, k_mean, block_size
            options = options._replace(blocks=BlockScales._make(blocks))
        if skip_softmax_threshold_scale_factor is not None:
            options = options._replace(skip_softmax=skip_softmax_threshold_scale_factor)
        if not (window_left is o_scale is kv_cache_sf is None):
            planned = self._require_plan().geometry.spec.window_left
            check_run(window_left, planned, kv_cache_sf)
            geometry.refuse("not supported", o_scale=o_scale)
        function: Any = run
        if not (lse_base is _LOG2 and lse_layout is _NH):
            function = functools.partial(run_in_form, lse_base=lse_base, lse_layout=lse_layout)
        return function(
            self,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            sinks=sinks,
            output_gate=output_gate,
            options=options,
            logits_params=logits_params,
            rel_logits=rel_logits,
        )

    @overloads.ragged_prefill_forward
    @as_older_run
    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        causal: bool | None = None,
        pos_encoding_mode: str | None = None,
        use_fp16_qk_reduction: bool = False,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        allow_fp16_qk_reduction: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """run() in its older form, as BatchDecodeWithPagedKVCacheWrapper.forward."""
        raise NotImplementedError

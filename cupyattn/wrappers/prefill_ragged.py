"""Batch prefill and append over keys and values that are rows of one array each."""

from __future__ import annotations

from typing import Any

from ..batch.mask import NO_MASK, read_mask
from ..batch.multi_item import read_runs
from ..batch.requests import read_ragged, read_rows, with_mask
from ..batch.run import NO_SCALES, Scales, run
from ..batch.wrapper import BatchWrapper
from ..inputs import geometry
from ..inputs.geometry import PlanOptions
from .legacy import OlderCalls, accepts_old_plans, check_run, read_scales

_OLD_RUN = ("return_lse",)


class BatchPrefillWithRaggedKVCacheWrapper(OlderCalls, BatchWrapper):
    """Prefill or append attention of a batch over ragged keys: plan() once, run() for every layer.

    float_workspace_buffer  contiguous bytes of any dtype on the device of the arrays to come, from
            a 16-byte boundary on; 128 MB serve any batch. It decides the device: on the CPU, the
            reference answers.
    kv_layout   "NHD" or "HND": rows [n, num_kv_heads, head_dim], or heads first.
    use_cuda_graph  runs are going to be captured. The next two are needed then, on the device,
            int32; plan() fills them, and may be called between replays with other lengths and
            masks. The number of requests, heads, dims, dtypes and options are those of the first
            plan, which must have the most query rows (under fixed_split_size the most keys too); k
            and v of the captured run must have room for the most keys.
    qo_indptr_buf [B + 1], kv_indptr_buf [B + 1].
    custom_mask_buf, mask_indptr_buf  uint8 [max bytes of a packed mask] and int32 [B + 1]: given if
            and only if the graph is to read a mask. (qk_indptr_buf is the second's older name.)
    backend     accepted for compatibility: the kernel is chosen by the device. jit_args and
            jit_kwargs must be None.

    Raises WorkspaceError for a bad workspace, ArgumentError for the rest. Semantics: FlashInfer's
    class of the same name.
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        qk_indptr_buf: Any = None,
        workspace_buffer: Any = None,
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "kv_indptr_buf": kv_indptr_buf,
            "custom_mask_buf": custom_mask_buf,
            "mask_indptr_buf": qk_indptr_buf if mask_indptr_buf is None else mask_indptr_buf,
        }
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        jit_args = jit_args or jit_kwargs
        super().__init__(workspace, kv_layout, use_cuda_graph, buffers, backend, jit_args)

    @accepts_old_plans(slot=5)
    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
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
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
    ) -> None:
        """Schedule the batch that the next runs are for.

        qo_indptr   int32 or int64 [B + 1] from 0 on: rows of q of each request, its last tokens.
        kv_indptr   int32 or int64 [B + 1]: rows of k and v of each request. Both may be on the host
                or on the device, where they cost a copy that waits for it each.
        num_qo_heads to head_dim_vo   of the arrays that run() is going to get; head_dim_vo defaults
                to head_dim_qk.
        custom_mask             bool [sum of qo_len * kv_len]: the [qo_len, kv_len] masks of all
                requests, flattened; True where a row sees a key. causal is then ignored.
        packed_custom_mask      uint8: the same as little-endian bits, each request from a byte on
                (`segment_packbits(mask, indptr, bitorder="little")`); it wins over custom_mask.
        causal                  row i of a request sees keys up to i + kv_len - qo_len.
        q_data_type, kv_data_type, o_data_type  default float16, that of q, that of q.
        fixed_split_size        keys after which a request is split, whatever else is in the batch:
                its answer is then the same, bit for bit, in every batch. Default: as many splits as
                keep the device busy. disable_split_kv: never split; it wins.
        prefix_len_ptr to max_item_len_ptr  multi-item scoring, as in
                BatchPrefillWithPagedKVCacheWrapper.plan.
        Other options as in single_prefill_with_kv_cache. v_indptr and o_indptr must be left alone;
        the rest is accepted for compatibility. Older names and the older order without head_dim_vo
        are understood; data_type sets q's and the cache's.

        Raises ArgumentError, UnsupportedError, WorkspaceError (naming the bytes it needs) or
        PlanError (naming what a captured graph keeps); the last plan then stays in force.
        """
        geometry.refuse(
            "values and answers are where keys and queries are",
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        batch = read_ragged(read_rows(qo_indptr), kv_indptr)
        runs = read_runs(
            batch, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        mask = read_mask(custom_mask, packed_custom_mask, runs)
        if mask.view is not None:
            batch = with_mask(batch)
        given = PlanOptions(
            self._kv_layout,
            self._workspace.device,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            0,
            q_data_type,
            kv_data_type,
            o_data_type,
            mask is not NO_MASK,
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
            runs is not None,
        )
        split = geometry.split_size(fixed_split_size, disable_split_kv, 1)
        self._install(given, batch, mask, split)

    begin_forward = plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the planned batch.

        q       [qo_indptr[B], num_qo_heads, head_dim_qk].
        k, v    [>= kv_indptr[B], num_kv_heads, head_dim] ("NHD") or [num_kv_heads, >= kv_indptr[B],
                head_dim] ("HND").
        q_scale, k_scale, v_scale  numbers, or float32 arrays [num_qo_heads], [num_kv_heads],
                [num_kv_heads]; the first two multiply the logits, the last the output. A number in
                an array on a GPU is waited for. Also by position: all three, or as once return_lse.
        out, lse   arrays to write instead of new ones; lse float32, base 2.
        sinks   float32 [num_qo_heads]: extra natural-log logits in the denominator.
        window_left  if given, must be the plan's. enable_pdl is accepted for compatibility; o_scale
                and kv_cache_sf must be None.

        Returns and raises as BatchPrefillWithPagedKVCacheWrapper.run.
        """
        scales = NO_SCALES
        if args:
            named = q_scale, k_scale, v_scale
            scales, return_lse = read_scales(args, named, return_lse, _OLD_RUN)
        elif not (q_scale is k_scale is v_scale is None):
            scales = Scales(q_scale, k_scale, v_scale)
        if not (window_left is o_scale is kv_cache_sf is None):
            planned = self._require_plan().geometry.options.window_left
            check_run(window_left, planned, kv_cache_sf, o_scale, "o_scale")
        return run(self, q, k, v, out, lse, sinks, scales, return_lse)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
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
        """run() in its older form: options that are given replace the plan's from here on.

        The next run then schedules anew. In graph mode they must be the plan's.
        """
        self._change(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, k, v, return_lse=return_lse)

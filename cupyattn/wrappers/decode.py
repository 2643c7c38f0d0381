"""Batch decode: a few query rows for each request, against pages of keys and values."""

from __future__ import annotations

from typing import Any

from ..batch.mask import NO_MASK
from ..batch.requests import Batch, PageNames, read_paged
from ..batch.run import NO_SCALES, Scales, run
from ..batch.wrapper import BatchWrapper
from ..errors import PlanError, UnsupportedError
from ..inputs import geometry, parse
from ..inputs.geometry import PlanOptions
from .legacy import OlderCalls, check_run, read_scales

_NAMES = PageNames("indptr", "indices", "last_page_len")
_OLD_RUN = ("q_scale", "k_scale", "v_scale", "return_lse")


class BatchDecodeWithPagedKVCacheWrapper(OlderCalls, BatchWrapper):
    """Decode attention of a batch over a paged KV cache: plan() once, run() for every layer.

    float_workspace_buffer  contiguous bytes of any dtype on the device of the arrays to come, from
            a 16-byte boundary on; 128 MB serve any batch. It decides the device: on the CPU, the
            reference answers.
    kv_layout   "NHD" or "HND": pages [page_size, num_kv_heads, head_dim], or heads first.
    use_cuda_graph  runs are going to be captured. The next three are needed then, on the device,
            int32; plan() fills them, and may be called between replays with other lengths and page
            tables: what a captured run reads stays where it is. The number of requests, heads,
            dims, dtypes and options are those of the first plan.
    paged_kv_indptr_buffer [B + 1], paged_kv_indices_buffer [max pages of a batch],
    paged_kv_last_page_len_buffer [B].
    use_tensor_cores, backend  accepted for compatibility: tensor cores are always used, the kernel
            is chosen by the device. jit_args must be None.

    Raises WorkspaceError for a bad workspace, ArgumentError for the rest. Semantics: FlashInfer's
    class of the same name.
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        workspace_buffer: Any = None,
    ) -> None:
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        workspace = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        super().__init__(workspace, kv_layout, use_cuda_graph, buffers, backend, jit_args)
        self._use_tensor_cores = parse.flag(use_tensor_cores, "use_tensor_cores")
        self._q_len = 0

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        window_right: int = 0,
        o_data_type: Any = None,
        q_len_per_req: int = 1,
    ) -> None:
        """Schedule the batch that the next runs are for.

        indptr          int32 or int64 [B + 1]: request b has the pages
                indices[indptr[b]:indptr[b + 1]].
        indices         int32 or int64 [>= indptr[B]]: ids of pages.
        last_page_len   int32 or int64 [B], 1 to page_size: tokens in the last page of each request.
                A request without pages has no keys, and its rows answer 0.
        All three may be on the host or on the device. indptr and last_page_len are needed on the
        host: on a device they cost a copy that waits for it each (last_page_len not, if page_size
        is 1). indices on a device are read in place by the kernels (in graph mode they are copied
        into the buffer), so they must not change before the runs are over; on the host they are
        checked, and copied with the schedule.
        num_qo_heads, num_kv_heads, head_dim, page_size  of the arrays that run() is going to get.
        q_data_type, kv_data_type, o_data_type  default float16, that of q, that of q; data_type
                sets the first two.
        q_len_per_req   query rows of each request, the last tokens of it; causal among themselves,
                unless a run brings a mask.
        fixed_split_size  pages after which keys are split, whatever else is in the batch: a
                request's answer is then the same, bit for bit, in every batch. Default: as many
                splits as keep the device busy. disable_split_kv: never split; it wins.
        Other options as in single_decode_with_kv_cache. non_blocking, block_tables and seq_lens are
        accepted for compatibility: copies never block, the arrays above say it all.

        Raises ArgumentError, UnsupportedError, WorkspaceError (naming the bytes it needs) or
        PlanError (naming what a captured graph keeps); the last plan then stays in force.
        """
        if data_type is not None:
            q_data_type = data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        if window_right != 0:
            raise UnsupportedError(f"window_right: got {window_right!r}; only 0 is supported")
        given, batch, split = self._read(
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type, o_data_type),
            (pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            (fixed_split_size, disable_split_kv),
            q_len_per_req,
        )
        if self._frozen is not None and q_len_per_req != self._q_len:
            raise PlanError(
                f"q_len_per_req: the first plan of this wrapper said {self._q_len} and this one "
                f"says {q_len_per_req}, but a captured graph keeps it; use a separate wrapper"
            )
        self._install(given, batch, NO_MASK, split)
        self._q_len = q_len_per_req

    begin_forward = plan

    def _read(
        self,
        arrays: tuple[Any, Any, Any],
        sizes: tuple[Any, Any, Any, Any],
        data_types: tuple[Any, Any, Any],
        options: tuple[Any, ...],
        split: tuple[Any, Any],
        q_len_per_req: int,
    ) -> tuple[PlanOptions, Batch, tuple[int, bool]]:
        q_len = geometry.count(q_len_per_req, "q_len_per_req")
        page_size = geometry.count(sizes[3], "page_size")
        batch = read_paged(q_len, *arrays, page_size, _NAMES, self._is_debugging())
        given = PlanOptions(
            self._kv_layout,
            self._workspace.device,
            *sizes[:3],
            None,
            page_size,
            *data_types,
            False,
            q_len > 1,
            *options,
        )
        return given, batch, geometry.split_size(*split, page_size)

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
        mask: Any = None,
    ) -> Any:
        """Attention of the planned batch.

        q       [B * q_len_per_req, num_qo_heads, head_dim], request by request.
        paged_kv_cache  [num_pages, 2, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, 2,
                num_kv_heads, page_size, head_dim] ("HND"), or a pair (K, V) without the 2, each
                with strides of its own; without the axis of size page_size if that is 1.
        q_scale, k_scale, v_scale  numbers, or float32 arrays [num_qo_heads], [num_kv_heads],
                [num_kv_heads]; the first two multiply the logits, the last the output. A number in
                an array on a GPU is waited for. Also by position, followed by return_lse.
        out, lse   arrays to write instead of new ones; lse float32, base 2.
        sinks   float32 [num_qo_heads]: extra natural-log logits in the denominator.
        mask    which of a request's q = q_len_per_req own tokens each of them sees (a tree of draft
                tokens, say), in place of causality; all earlier keys are visible, and a window
                holds besides. Bools [B, q, q] or [B * q, q], or bits, the first token's the lowest,
                1 where it is seen: integers [B * q] or [B, q] of 32 or 64 bits, or words of any
                size behind such axes: uint16 [B, q, 2 * ceil(q / 32)] (xqa's), uint8 [B * q,
                ceil(q / 8)]. Bits past q mean nothing. A captured run reads it where it is; bools
                are first packed into memory of the wrapper's own.
        window_left, q_len_per_req  if given, must be the plan's. enable_pdl is accepted for
                compatibility; skip_softmax_threshold_scale_factor and kv_cache_sf must be None.

        Returns out [rows, num_qo_heads, head_dim] in q's framework and device, or (out, lse [rows,
        num_qo_heads]) if `return_lse`. It never waits for the device; it allocates its answers
        only. The first run with a mask, scales by head, or arrays off 16-byte boundaries schedules
        the batch anew. Raises ArgumentError for arrays that do not fit the plan, PlanError without
        a plan, before anything is written.
        """
        scales = NO_SCALES
        if args:
            named = q_scale, k_scale, v_scale
            scales, return_lse = read_scales(args, named, return_lse, _OLD_RUN)
        elif not (q_scale is k_scale is v_scale is None):
            scales = Scales(q_scale, k_scale, v_scale)
        if not (
            window_left
            is q_len_per_req
            is skip_softmax_threshold_scale_factor
            is kv_cache_sf
            is None
        ):
            planned = self._require_plan().geometry.options.window_left
            factor = skip_softmax_threshold_scale_factor
            name = "skip_softmax_threshold_scale_factor"
            check_run(window_left, planned, kv_cache_sf, factor, name)
            if q_len_per_req is not None and q_len_per_req != self._q_len:
                raise PlanError(
                    f"q_len_per_req: run() got {q_len_per_req} and the plan says {self._q_len}; "
                    "pass it to plan()"
                )
        k, v = paged_kv_cache, None
        if isinstance(paged_kv_cache, (tuple, list)) and len(paged_kv_cache) == 2:
            k, v = paged_kv_cache
        return run(self, q, k, v, out, lse, sinks, scales, return_lse, mask)

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """run() in its older form: options that are given replace the plan's from here on.

        The next run then schedules anew. In graph mode they must be the plan's.
        """
        self._change(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True, for batches of B requests.

    workspace_buffer    as float_workspace_buffer there.
    indptr_buffer [B + 1], indices_buffer [max pages of a batch], last_page_len_buffer [B]: int32 on
            the device, filled by plan().
    """

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Any,
    *args: Any,
    global_override_indptr_cpu: Any = None,
    **kwargs: Any,
) -> None:
    """wrapper.plan(), with `indptr` read from `global_override_indptr_cpu` if that is given.

    Meant for an indptr on the device whose values the caller has on the host too: then nothing is
    waited for.
    """
    if global_override_indptr_cpu is not None:
        indptr = global_override_indptr_cpu
    wrapper.plan(indptr, *args, **kwargs)

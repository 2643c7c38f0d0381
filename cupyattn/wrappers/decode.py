"""Batch decode: a few query rows for each request, against pages of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import array
from ..core import overloads, parse
from ..core.tracing import untraced
from ..engine import geometry
from ..engine.batch_logits import check as check_logits
from ..engine.batch_logits import with_request_indices
from ..engine.block_scales import BlockScales
from ..engine.key_share import read_share, with_whole_lengths
from ..engine.logits import read as read_logits
from ..engine.mask import NO_MASK
from ..engine.plan_again import repeated
from ..engine.requests import PageNames, read_paged, require_row_limit, with_q_len
from ..engine.run_batch import NO_OPTIONS, make_options, run
from ..engine.wrapper import BatchWrapper, Plan, planning
from ..errors import PlanError
from ..typing import Array, Pages, Scale
from .legacy import OlderCalls, as_older_run, check_run, read_options

_NAMES = PageNames("indptr", "indices", "last_page_len")


class BatchDecodeWithPagedKVCacheWrapper(BatchWrapper, OlderCalls):
    """Decode attention of a batch over a paged KV cache: plan() once, run() for every layer.

    Parameters
    ----------
    float_workspace_buffer, workspace_buffer
        Two names of contiguous bytes of any dtype that begin at a 16-byte boundary, on the device
        of the arrays to come; 128 MB serve any batch. On the CPU the reference runs. A device
        instead ("cuda:1", "cpu", a torch.device, or a JAX array on it) makes the wrapper own memory
        there, which grows as plans need it. So does None: the device is then that of the first
        plan's arrays, a GPU if one of them is on it. Where all of them are on the host, the wrapper
        goes to a GPU with the first run whose arrays are there.
    kv_layout
        "NHD" or "HND": pages [page_size, num_kv_heads, head_dim], or heads first.
    use_cuda_graph
        Runs are going to be captured. The next three are needed then, on the device, int32; plan()
        fills them, and may be called between replays with other lengths and page tables: what a
        captured run reads stays where it is. The number of requests, heads, dims, dtypes and
        options are those of the first plan.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        Of these sizes: [B + 1], [most pages of a batch] and [B].
    use_tensor_cores, backend
        Accepted for compatibility: tensor cores are always used, the kernel is chosen by the
        device.
    jit_args
        Must be None: FlashInfer's variants are written as logits_transform and mask_fn of plan().

    Raises
    ------
    CupyAttnError
        WorkspaceError for a bad workspace, ArgumentError for the rest.

    Notes
    -----
    Threads may share a wrapper: its calls wait for each other. A thread that has planned runs its
    own plan only, and PlanError tells it if another thread has planned since (until end_forward());
    a thread that never planned runs any. All runs of a wrapper go to one stream.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16)  # once a step: 8 query heads, 2 key heads
    >>> q = np.ones((2, 8, 64), np.float16)  # a token of each request
    >>> wrapper.run(q, pool).shape  # in every layer
    (2, 8, 64)
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Array | None = None,
        paged_kv_indices_buffer: Array | None = None,
        paged_kv_last_page_len_buffer: Array | None = None,
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
        self._q_len, self._is_causal = 0, True

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with."""
        return self._use_tensor_cores

    @planning
    @repeated("indptr", "indices", "last_page_len", state=("_q_len", "_is_causal"))
    def plan(
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Array | None = None,
        seq_lens: Array | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        window_right: int = 0,
        o_data_type: Any = None,
        q_len_per_req: int = 1,
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
        indptr
            int32 or int64 [B + 1]: request b has the pages indices[indptr[b]:indptr[b + 1]].
        indices
            int32 or int64 [>= indptr[B]]: ids of pages.
        last_page_len
            int32 or int64 [B], 1 to page_size: tokens in the last page of each request. A request
            without pages has no keys, and its rows give 0.
        num_qo_heads, num_kv_heads, head_dim, page_size
            Of the arrays that run() is going to get.
        q_data_type, kv_data_type, o_data_type
            Default float16, that of q, that of q; data_type is the default of the first two.
        q_len_per_req
            Query rows of each request, the last tokens of it; causal among themselves, unless a run
            brings a mask.
        window_right
            Keys to the right of a row's own that it sees; 0: none (causality), -1: all.
        fixed_split_size
            Pages after which keys are split, whatever else is in the batch: a request's output is
            then the same, bit for bit, in every batch. Default: as many splits as keep the device
            busy.
        disable_split_kv
            Never split; it wins.
        logits_transform, mask_fn, logits_params
            As in single_prefill_with_kv_cache. Numbers stay as they are; run(logits_params=) may
            replace arrays. Indices count from the first query token and key of each request, which
            `batch` tells apart.
        rel_logits
            As there, [B * q_len_per_req, num_qo_heads, distances]; run(rel_logits=) may replace it
            by another of its dtype.
        cp_world_size, cp_rank, cp_kv_cache_interleave_size
            The keys of every request are spread over this many ranks (GPUs); the rank of this
            wrapper; the number of consecutive tokens that go to one rank before the next takes
            over. Token t is on rank t // interleave_size % world_size. The arrays above describe
            this rank's own keys. Merge its outputs and LSEs with those of the other ranks
            (cascade.merge_states).
        cp_tot_seqused_k
            int32 or int64 [B], on the host or the device: keys of each request on all ranks
            together. Needed for several rows of a request, a window or a run's mask, which go by
            places in the whole sequence; its last tokens are the rows.
        other arguments
            Other options as in single_decode_with_kv_cache. non_blocking, block_tables and seq_lens
            are accepted for compatibility: copies never block, the arrays above say it all.

        Raises
        ------
        CupyAttnError
            ArgumentError, UnsupportedError, WorkspaceError (naming the bytes it needs) or PlanError
            (naming what a captured graph keeps); the last plan then stays in force.

        Notes
        -----
        All three may be on the host or on the device. indptr and last_page_len are needed on the
        host: plan() waits for what brings them from a device, and in later plans also checks them
        there and makes the list of work. Of those on the host an idle GPU makes the list too, and a
        busy one is not waited for. indices on a device are read in place by the kernels (in graph
        mode they are copied into the buffer), so they must not change before the runs are over; on
        the host they are checked, and copied with the schedule.
        """
        q_data_type = data_type if q_data_type is None else q_data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        # A right window of 0 is causality, which a mask of a run may replace.
        is_causal = parse.window(window_right, "window_right") == 0
        q_len = geometry.count(q_len_per_req, "q_len_per_req")
        page_size = geometry.count(page_size, "page_size")
        expression, arrays = read_logits(logits_transform, mask_fn, logits_params, rel_logits)
        share = read_share(cp_world_size, cp_rank, cp_kv_cache_interleave_size)
        batch = read_paged(
            q_len, indptr, indices, last_page_len, page_size, _NAMES, self._is_debugging()
        )
        options = self._options(
            (num_qo_heads, num_kv_heads, head_dim, None),
            page_size,
            (q_data_type, kv_data_type),
            causal=is_causal and q_len > 1,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            window_right=-1 if is_causal else window_right,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_dtype=o_data_type,
            logits=expression,
            key_share=share,
        )
        batch = with_whole_lengths(batch, share, cp_tot_seqused_k)
        split = geometry.split_size(fixed_split_size, disable_split_kv, page_size)
        if self._frozen is not None and q_len != self._q_len:
            raise PlanError(
                f"q_len_per_req: the first plan of this wrapper said {self._q_len} and this one "
                f"says {q_len}, but a captured graph keeps it; use a separate wrapper"
            )
        self._install(options, batch, NO_MASK, split, arrays)
        self._q_len, self._is_causal = q_len, is_causal

    begin_forward = plan

    @overloads.decode_run
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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
        mask: Array | None = None,
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
            [B * q_len_per_req, num_qo_heads, head_dim], request by request.
        paged_kv_cache
            [num_pages, 2, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, 2,
            num_kv_heads, page_size, head_dim] ("HND"), or a pair (K, V) without the 2, each with
            strides of its own; without the axis of size page_size if that is 1.
        q_scale, k_scale, v_scale
            Numbers, or float32 arrays [num_qo_heads], [num_kv_heads], [num_kv_heads], or with an
            axis of requests ahead [B, heads]; the first two multiply the logits, the last the
            output. A number in an array on a GPU is waited for. Also by position, followed by
            return_lse.
        out, lse
            Arrays to write instead of new ones; lse float32, base 2.
        return_lse
            Return the LSE too.
        sinks
            float32 [num_qo_heads]: extra natural-log logits in the denominator.
        mask
            Which of a request's q = q_len_per_req own tokens each of them sees (a tree of draft
            tokens, say), in place of causality; all earlier keys are visible, and a window holds
            besides. Bools [B, q, q] or [B * q, q], or bits, the first token's the lowest, 1 where
            it is seen: integers [B * q] or [B, q] of 32 or 64 bits, or words of any size behind
            such axes: uint16 [B, q, 2 * ceil(q / 32)] (xqa's), uint8 [B * q, ceil(q / 8)]. Bits
            past q mean nothing. A captured run reads it where it is; bools are first packed into
            memory of the wrapper's own.
        q_len_per_req
            As in plan(), for this run; default the plan's. The first run with another schedules the
            batch anew, and in graph mode it must be the plan's.
        logits_params
            Arrays in place of those of the plan that have these names.
        rel_logits
            In place of the plan's.
        output_gate
            [rows, num_qo_heads] or [rows, num_qo_heads, head_dim], dtype of q or float32: the
            output is multiplied by its sigmoid before it is rounded.
        q_block_scales, k_block_scales, v_block_scales
            float32, beside q, k and v of 8 bits: what each block of tokens of a request is
            multiplied by, for each head, as `quantize_qkv` gives them. Rows of q: [ceil(rows /
            block_size) + B, num_qo_heads], where block b of a request whose rows begin at `start`
            is row start // block_size + request + b; pages: [num_pages, page_size / block_size,
            num_kv_heads]. They multiply with the scales above. On GPUs: Hopper, where products with
            those of k and v are rounded to float16.
        block_size
            Tokens of such a block, 64 or 128.
        k_mean
            float32 [B, num_kv_heads, head_dim], what was subtracted from keys before they were
            quantized: the LSE, soft caps and sinks are of whole keys again. A GPU takes it where
            there are none of these. Default 0.
        window_left
            If given, must be the plan's.
        kv_cache_sf
            Must be None.
        enable_pdl
            Accepted for compatibility.
        skip_softmax_threshold_scale_factor
            As in `single_prefill_with_kv_cache`, of each request's keys. Few rows of a request are
            exact.

        Returns
        -------
        out
            [rows, num_qo_heads, head_dim] in q's framework and device, or (out, lse [rows,
            num_qo_heads]) if `return_lse`. It never waits for the device; it allocates its outputs
            only. The first run with a mask, gates, scales by head, or arrays off 16-byte boundaries
            schedules the batch anew.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, PlanError without a plan, before
            anything is written.
        """
        options, plan_of = NO_OPTIONS, None
        if return_lse is not False or not (q_scale is k_scale is v_scale is None):
            options = make_options(
                return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
            )
        if args:
            order = "q_scale", "k_scale", "v_scale", "return_lse"
            options = read_options(args, options, order)
        if not (q_block_scales is k_block_scales is v_block_scales is k_mean is None):
            blocks = q_block_scales, k_block_scales, v_block_scales, k_mean, block_size
            options = options._replace(blocks=BlockScales._make(blocks))
        if skip_softmax_threshold_scale_factor is not None:
            options = options._replace(skip_softmax=skip_softmax_threshold_scale_factor)
        if not (window_left is q_len_per_req is kv_cache_sf is None):
            planned = self._require_plan().geometry.spec.window_left
            check_run(window_left, planned, kv_cache_sf)
            if q_len_per_req is not None:
                q_len_per_req = geometry.count(q_len_per_req, "q_len_per_req")
            if q_len_per_req not in (None, self._q_len):
                plan_of = functools.partial(self._plan_for, q_len_per_req, q)
        return run(
            self,
            q=q,
            k=paged_kv_cache,
            out=out,
            lse=lse,
            sinks=sinks,
            mask=mask,
            output_gate=output_gate,
            options=options,
            plan_of=plan_of,
            logits_params=logits_params,
            rel_logits=rel_logits,
        )

    def _plan_for(self, q_len: int, q: Any) -> Plan:
        """The plan with another number of query rows of each request, as q has them."""
        with self._turns.planning:
            self._follow(q)
            plan, shape = self._require_plan(), array.view(q, "q").shape
            num_requests = plan.batch.num_requests
            if self._is_graph or not shape or shape[0] != num_requests * q_len:
                why = (
                    "a captured graph keeps it"
                    if self._is_graph
                    else f"q of shape {list(shape)} does not have {q_len} rows for each of the "
                    f"{num_requests} requests"
                )
                raise PlanError(
                    f"q_len_per_req: run() got {q_len} and the plan says {self._q_len}, but {why}; "
                    "pass it to plan()"
                )
            if q_len not in plan.by_q_len:
                options = plan.geometry.options.changed(causal=self._is_causal and q_len > 1)
                batch = with_q_len(plan.batch, q_len)
                changed = geometry.find_geometry(options)
                require_row_limit(batch, changed.spec.group_size)
                if changed.spec.logits is not None:
                    check_logits(changed.spec, batch, plan.logits)
                    batch = with_request_indices(changed.spec, batch)
                plan.by_q_len[q_len] = replace(plan, geometry=changed, batch=batch, prepared={})
            return plan.by_q_len[q_len]

    @overloads.decode_forward
    @as_older_run
    def forward(
        self,
        q: Array,
        paged_kv_cache: Pages,
        pos_encoding_mode: str | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
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
        raise NotImplementedError


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True, for batches of B requests.

    Parameters
    ----------
    workspace_buffer
        As float_workspace_buffer there.
    indptr_buffer, indices_buffer, last_page_len_buffer
        [B + 1], [most pages of a batch] and [B]: int32 on the device, filled by plan().
    kv_layout, use_tensor_cores
        As there.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> workspace = np.zeros(1 << 20, np.uint8)
    >>> buffers = [np.zeros(n, np.int32) for n in (3, 4, 2)]  # for graphs, on the GPU
    >>> wrapper = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16)
    >>> wrapper.run(np.ones((2, 8, 64), np.float16), pool).shape
    (2, 8, 64)
    """

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Array,
        indices_buffer: Array,
        last_page_len_buffer: Array,
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


@untraced
def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Array,
    *args: Any,
    global_override_indptr_cpu: Array | None = None,
    **kwargs: Any,
) -> None:
    """wrapper.plan(), with `indptr` read from `global_override_indptr_cpu` if that is given.

    Meant for an indptr on the device whose values the caller has on the host too: then nothing is
    waited for. It may replace plan() in a wrapper: `wrapper.plan =
    functools.partial(fast_decode_plan, wrapper)`.

    Raises
    ------
    CupyAttnError
        Returns and raises as BatchDecodeWithPagedKVCacheWrapper.plan.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    >>> cupyattn.fast_decode_plan(wrapper, indptr, indices, last, 8, 2, 64, 16)
    >>> wrapper.run(np.ones((2, 8, 64), np.float16), pool).shape
    (2, 8, 64)
    """
    if global_override_indptr_cpu is not None:
        indptr = global_override_indptr_cpu
    BatchDecodeWithPagedKVCacheWrapper.plan(wrapper, indptr, *args, **kwargs)

"""Batches of very different requests, of many query rows and of few, in one plan and one launch."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import overloads, parse
from ..engine import geometry
from ..engine.mask import NO_MASK
from ..engine.own_workspace import parse_device
from ..engine.requests import PageNames, on_host, read_paged, read_rows
from ..engine.run_batch import make_options, run
from ..engine.wrapper import BatchWrapper, planning
from ..errors import ArgumentError, UnsupportedError
from ..typing import Array, ArrayT, Pages, Scale

_NAMES = PageNames("kv_indptr", "kv_indices", "kv_len_arr")


class BatchAttention(BatchWrapper):
    """Attention of a batch in which some requests bring long chunks and others one token.

    Parameters
    ----------
    kv_layout
        "NHD" or "HND": pages [page_size, num_kv_heads, head_dim], or heads first.
    device
        "cuda", "cuda:1", "cpu", or a torch.device: where the arrays are going to be.

    Raises
    ------
    CupyAttnError
        ArgumentError for a device of another name.

    Notes
    -----
    One launch serves all requests: blocks of prefill, bound by the matrix units, run together with
    blocks of decode, bound by memory. The workspace is the wrapper's own: made by the first plan()
    in the framework of plan()'s arrays (CuPy, where they are NumPy's), and larger as plans need it.
    Of threads the same is true as of BatchDecodeWithPagedKVCacheWrapper.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchAttention(device="cpu")
    >>> qo_indptr, lengths = np.array([0, 1, 17]), np.array([21, 16])  # a decode beside a prompt
    >>> sizes = 8, 2, 64, 64, 16  # heads, key heads, head dims of keys and of values, page size
    >>> wrapper.plan(
    ...     qo_indptr, indptr, indices, lengths, *sizes, causal=True,
    ...     q_data_type="float16", kv_data_type="float16",
    ... )
    >>> o, lse = wrapper.run(np.ones((17, 8, 64), np.float16), pool)
    >>> o.shape, lse.shape
    ((17, 8, 64), (17, 8))
    """

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        super().__init__(None, kv_layout, False, {}, "auto", None)
        self._device = parse_device(device, "device")

    @planning
    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        kv_indices: Array,
        kv_len_arr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        qo_indptr
            int32 or int64 [B + 1] from 0 on: rows of q of each request, its last tokens.
        kv_indptr, kv_indices
            The pages of each request, as indptr and indices in
            BatchDecodeWithPagedKVCacheWrapper.plan.
        kv_len_arr
            int32 or int64 [B]: keys of each request, at most page_size for each of its pages. Like
            the offsets, it is needed on the host.
        num_qo_heads to page_size
            Those of the arrays that run() is going to get.
        causal
            Row i of a request sees keys up to i + kv_len - qo_len.
        sm_scale
            Default 1 / sqrt(head_dim_qk).
        q_data_type, kv_data_type
            Of q, and of keys and values.
        logits_soft_cap
            Default none.
        use_profiler
            Must be False.

        Raises
        ------
        CupyAttnError
            ArgumentError or UnsupportedError, and the first plan DeviceError without a GPU; the
            last plan then stays in force.
        """
        if parse.flag(use_profiler, "use_profiler"):
            raise UnsupportedError("use_profiler: kernels are not instrumented; pass False")
        page_size = geometry.count(page_size, "page_size")
        qo_indptr, kv_indptr, kv_len_arr = on_host(qo_indptr, kv_indptr, kv_len_arr)
        batch = read_paged(
            read_rows(qo_indptr),
            kv_indptr,
            kv_indices,
            kv_len_arr,
            page_size,
            _NAMES,
            self._is_debugging(),
            has_lengths=True,
        )
        options = self._options(
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            page_size,
            (q_data_type, kv_data_type),
            causal=causal,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        self._install(options, batch, NO_MASK, (0, True))

    @overloads.mixed_run
    def run(
        self,
        q: ArrayT,
        kv_cache: Pages,
        out: Array | None = None,
        lse: Array | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Any = None,
        kv_cache_sf: Any = None,
        *,
        sinks: Array | None = None,
    ) -> tuple[ArrayT, ArrayT]:
        """Attention of the planned batch: always (out, lse).

        Parameters
        ----------
        q
            [qo_indptr[B], num_qo_heads, head_dim_qk].
        kv_cache, out, lse, k_scale, v_scale, sinks
            As in BatchDecodeWithPagedKVCacheWrapper.run.
        logits_soft_cap
            0, or a cap that replaces the plan's; the next run schedules anew.
        profiler_buffer, kv_cache_sf
            Must be None.

        Returns
        -------
        out
            [qo_indptr[B], num_qo_heads, head_dim_vo] and lse [qo_indptr[B], num_qo_heads]. It never
            waits for the device.

        Raises
        ------
        CupyAttnError
            ArgumentError for arrays that do not fit the plan, or a cap where the plan has none;
            PlanError without a plan.
        """
        geometry.refuse("not supported", profiler_buffer=profiler_buffer)
        geometry.refuse("4-bit caches are not supported", kv_cache_sf=kv_cache_sf)
        options = make_options(return_lse=True, k_scale=k_scale, v_scale=v_scale)
        if type(logits_soft_cap) is not float:
            logits_soft_cap = parse.soft_cap(logits_soft_cap)
        with self._turns.planning if logits_soft_cap else contextlib.nullcontext():
            if logits_soft_cap:
                self._change_cap(logits_soft_cap)
            return run(self, q=q, k=kv_cache, out=out, lse=lse, sinks=sinks, options=options)

    def _change_cap(self, logits_soft_cap: float) -> None:
        if not self._require_plan().geometry.spec.logits_soft_cap:
            raise ArgumentError(
                f"logits_soft_cap: run() got {logits_soft_cap} and the plan has none; pass it to "
                "plan()"
            )
        self._change(logits_soft_cap=logits_soft_cap)

    def forward(self, q: ArrayT, k: Array, v: Array | None = None) -> ArrayT:
        """run() in its older form, which returns out alone.

        Parameters
        ----------
        q
            [qo_indptr[B], num_qo_heads, head_dim_qk].
        k, v
            [n, num_kv_heads, head_dim]: pages of one token. The plan's kv_indptr then counts tokens
            and its kv_indices are rows of k and v, whatever its page_size is. q, k and v may have
            other dtypes than the plan says; the next run schedules anew. Or pages as the plan has
            them: k and v apart, or the kv_cache of run() without v. Raises as run().
        """
        vk = None if v is None else array.view(k, "k")
        is_of_tokens = vk is not None and len(vk.shape) == 3
        with self._turns.planning if is_of_tokens else contextlib.nullcontext():
            if vk is not None and is_of_tokens:
                self._count_tokens(array.view(q, "q"), vk)
            return run(self, q=q, k=k, v=v)

    def _count_tokens(self, q: ArrayView, k: ArrayView) -> None:
        """Read the page table of the current plan as one of tokens."""
        batch = self._require_plan().batch
        excess = batch.requests.kv_len - np.diff(batch.kv_indptr)
        if excess.size and excess.max() > 0:
            at = int(excess.argmax())
            raise ArgumentError(
                f"kv_len_arr: request {at} has {batch.requests.kv_len[at]} keys, but with "
                "three-dimensional k and v kv_indptr counts tokens, and gives it "
                f"{batch.kv_indptr[at + 1] - batch.kv_indptr[at]}"
            )
        self._change(page_size=1, q_data_type=q.dtype.name, kv_data_type=k.dtype.name)

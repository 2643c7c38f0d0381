"""Batches of any kind over pages, with a sink for each head."""

from __future__ import annotations

import inspect
from typing import Any

from ..core import dtypes, overloads, parse
from ..core.problem import AttentionProblem
from ..engine import geometry
from ..engine.wrapper import planning
from ..errors import UnsupportedError
from ..typing import Array, Pages, Scale
from .legacy import accepts_old_plans, read_sink
from .prefill import BatchPrefillWithPagedKVCacheWrapper

_PLAN = inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Attention of a batch over a paged KV cache, decode and prefill, with a sink for each head.

    A sink is one more logit in the denominator of each row of its head, without a value (arXiv
    2309.17453): o = sum(exp(l) v) / (sum(exp(l)) + exp(sink)). The LSE has it too, and sm_scale
    does not scale it. However keys are split, it counts once.

    Arguments up to backend as in BatchPrefillWithPagedKVCacheWrapper.

    Parameters
    ----------
    float_workspace_buffer to mask_indptr_buf
        As in BatchPrefillWithPagedKVCacheWrapper.
    backend
        "auto", "fa2" or "fa3".
    pos_encoding_mode, q_data_type, kv_data_type, window_left
        What plan() takes if it is not told.
    head_dim_qk, head_dim_vo
        If plan() is given the same head_dim_qk and no head_dim_vo, then it takes this one.
    use_fp16_qk_reduction
        Accepted for compatibility.

    Raises
    ------
    CupyAttnError
        And means what FlashInfer's class of the same name does; there, plan() must repeat what the
        constructor was told.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchAttentionWithAttentionSinkWrapper(
    ...     q_data_type="float16", kv_data_type="float16", head_dim_qk=64, head_dim_vo=64
    ... )
    >>> wrapper.plan(np.array([0, 4, 20]), indptr, indices, last, 8, 2, 64, 16, causal=True)
    >>> sink = np.zeros(8, np.float32)
    >>> wrapper.run(np.ones((20, 8, 64), np.float16), pool, sink, 64**-0.5).shape
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = "bfloat16",
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        parse.choice(backend, ("auto", "fa2", "fa3"), "backend")
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._defaults = {
            "pos_encoding_mode": parse.pos_encoding_mode(pos_encoding_mode),
            "window_left": parse.window(window_left, "window_left"),
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        dim_qk = geometry.count(head_dim_qk, "head_dim_qk")
        dim_vo = geometry.count(head_dim_vo, "head_dim_vo")
        self._head_dims = dim_qk, dim_vo
        q, kv = dtypes.parse(q_data_type, "q_data_type"), dtypes.parse(kv_data_type, "kv_data_type")
        # plan() refuses float32 on a GPU, which is not known yet where the workspace is our own.
        AttentionProblem(q, kv, q, dim_qk, dim_vo).check_supported(on_cpu=True)

    @planning
    @accepts_old_plans(slot=8)
    def plan(self, *args: Any, **kwargs: Any) -> None:
        """As BatchPrefillWithPagedKVCacheWrapper.plan; what it leaves out is the constructor's.

        sm_scale is accepted and means nothing: run() says it.
        """
        arguments = _PLAN.bind(None, *args, **kwargs).arguments
        del arguments["self"]
        defaults = dict(self._defaults)
        if arguments.get("head_dim_vo") is None and "head_dim_qk" in arguments:
            if geometry.count(arguments["head_dim_qk"], "head_dim_qk") == self._head_dims[0]:
                defaults["head_dim_vo"] = self._head_dims[1]
        super().plan(**defaults | arguments | {"sm_scale": 1.0})

    plan.__signature__ = _PLAN  # type: ignore[attr-defined]
    begin_forward = plan

    @overloads.sinks_run
    def run(  # type: ignore[override]
        self,
        q: Array,
        paged_kv_cache: Pages,
        sink: Array,
        sm_scale: float,
        *,
        q_scale: Scale = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of the planned batch.

        Parameters
        ----------
        q, paged_kv_cache
            As in BatchPrefillWithPagedKVCacheWrapper.run.
        sink
            float32 [num_qo_heads]: natural-log logits.
        sm_scale
            A number that multiplies the logits of keys, 1 / sqrt(head_dim_qk) as a rule.
        q_scale, return_lse, options
            As there, whose other arguments are the options; q_scale and k_scale multiply the logits
            as well.
        """
        sinks, scale = read_sink(
            (sink, sm_scale), q_scale, self._require_plan().geometry.spec.num_qo_heads
        )
        options |= {"q_scale": scale, "sinks": sinks, "return_lse": return_lse}
        return super().run(q, paged_kv_cache, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not there: the older form of run() has no sinks.

        Raises
        ------
        CupyAttnError
            UnsupportedError.
        """
        raise UnsupportedError(
            "forward: its arguments have no sinks; call run(q, paged_kv_cache, sink, sm_scale)"
        )

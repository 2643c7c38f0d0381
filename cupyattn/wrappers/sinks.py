"""Batches of any kind over pages, with a sink for each head."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from ..inputs import parse
from .legacy import accepts_old_plans
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper

_PLAN = inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Attention of a batch over a paged KV cache, decode and prefill, with a sink for each head.

    A sink is one more logit in the denominator of each row of its head, without a value
    (arXiv 2309.17453): o = sum(exp(l) v) / (sum(exp(l)) + exp(sink)). The LSE has it too, and
    sm_scale does not scale it. However keys are split, it counts once.

    The arguments up to backend are those of BatchPrefillWithPagedKVCacheWrapper; backend is "auto",
    "fa2" or "fa3".
    pos_encoding_mode, q_data_type, kv_data_type, window_left  what plan() takes if it is not told.
    head_dim_qk, head_dim_vo   if plan() is given the same head_dim_qk and no head_dim_vo, then it
            takes this one.
    use_fp16_qk_reduction   accepted for compatibility.

    Raises and means what FlashInfer's class of the same name does; there, plan() must repeat what
    the constructor was told.
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
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
            "window_left": parse.window_left(window_left),
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        self._head_dims = head_dim_qk, head_dim_vo

    @accepts_old_plans(slot=8)
    def plan(self, *args: Any, **kwargs: Any) -> None:
        """As BatchPrefillWithPagedKVCacheWrapper.plan; what it leaves out is the constructor's.

        sm_scale is accepted and means nothing: run() says it.
        """
        given = _PLAN.bind(None, *args, **kwargs).arguments
        del given["self"]
        defaults = dict(self._defaults)
        if given.get("head_dim_vo") is None and given.get("head_dim_qk") == self._head_dims[0]:
            defaults["head_dim_vo"] = self._head_dims[1]
        super().plan(**defaults | given | {"sm_scale": 1.0})

    begin_forward = plan

    def run(  # type: ignore[override]
        self,
        q: Any,
        paged_kv_cache: Any,
        sink: Any,
        sm_scale: float,
        *,
        q_scale: Any = None,
        **options: Any,
    ) -> Any:
        """Attention of the planned batch.

        sink        float32 [num_qo_heads]: natural-log logits.
        sm_scale    a number that multiplies the logits of keys, 1 / sqrt(head_dim_qk) as a rule.
        Everything else as in BatchPrefillWithPagedKVCacheWrapper.run, whose other arguments are
        `options`; q_scale and k_scale multiply the logits as well.
        """
        if sink is None or sm_scale is None:
            name = "sink" if sink is None else "sm_scale"
            raise ArgumentError(
                f"{name}: got None; wanted both sink, float32 [num_qo_heads], and sm_scale. "
                "BatchPrefillWithPagedKVCacheWrapper takes none"
            )
        scale: Any = parse.finite(sm_scale, "sm_scale", 1.0)
        if len(getattr(q_scale, "shape", ())) == 1:
            scale = q_scale * scale
        else:
            scale *= parse.finite(q_scale, "q_scale", 1.0)
        return super().run(q, paged_kv_cache, q_scale=scale, sinks=sink, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not there: the older form of run() has no sinks. Raises UnsupportedError."""
        raise UnsupportedError(
            "forward: its arguments have no place for sinks; call run(q, paged_kv_cache, sink, "
            "sm_scale)"
        )

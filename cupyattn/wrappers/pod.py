"""A prompt and a batch of decodes in one call: the prompt over arrays, the decodes over pages."""

from __future__ import annotations

from typing import Any

from ..core import parse
from ..core.problem import POS_ENCODING_MODES
from ..core.tracing import Untraced
from ..engine import geometry
from ..engine import run_single as single
from ..engine.plan_words import wrapper_words
from ..errors import PlanError
from ..typing import Array, Pages, Scale
from .decode import BatchDecodeWithPagedKVCacheWrapper


class PODWithPagedKVCacheWrapper(Untraced):
    """Attention of a prompt and of a batch of decodes: plan() once for the decodes, run() for every
    layer.

    float_workspace_buffer, kv_layout, use_cuda_graph, jit_args and the buffers  as in
    BatchDecodeWithPagedKVCacheWrapper; all are of the decodes.

    The prompt's keys are not in the decodes' pages, so it takes a launch for each, one after the
    other. Prompts in the same pages take one launch with the decodes in BatchAttention and
    BatchPODWithPagedKVCacheWrapper.

    Notes
    -----
    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.PODWithPagedKVCacheWrapper()
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16)  # the decodes
    >>> prompt, keys = np.ones((30, 8, 64), np.float16), np.ones((30, 2, 64), np.float16)
    >>> decodes = np.ones((2, 8, 64), np.float16)
    >>> o_p, o_d = wrapper.run(prompt, keys, keys, decodes, pool, causal_p=True)
    >>> o_p.shape, o_d.shape
    ((30, 8, 64), (2, 8, 64))
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Array | None = None,
        paged_kv_indices_buffer: Array | None = None,
        paged_kv_last_page_len_buffer: Array | None = None,
        jit_args: Any = None,
    ) -> None:
        """Arguments and errors as in BatchDecodeWithPagedKVCacheWrapper."""
        self._decodes = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            True,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
            jit_args=jit_args,
        )

    def __repr__(self) -> str:
        return wrapper_words(type(self).__name__, getattr(self, "_decodes", None))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._decodes.is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """As BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer."""
        self._decodes.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """As BatchDecodeWithPagedKVCacheWrapper.end_forward."""
        self._decodes.end_forward()

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As BatchDecodeWithPagedKVCacheWrapper.workspace_size, of the decodes."""
        return self._decodes.workspace_size(*args, **kwargs)

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
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Schedule the decodes, as BatchDecodeWithPagedKVCacheWrapper.plan does.

        Arguments and errors are those of that function.
        """
        self._decodes.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(
        self,
        q_p: Array,
        k_p: Array,
        v_p: Array,
        q_d: Array,
        paged_kv_cache_d: Pages,
        custom_mask_p: Array | None = None,
        packed_custom_mask_p: Array | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Array | None = None,
        packed_custom_mask_d: Array | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *,
        lse_p: Array | None = None,
        lse_d: Array | None = None,
    ) -> tuple[Any, Any]:
        """Attention of the prompt and of the planned decodes.

        Parameters
        ----------
        q_p
            [qo_len, num_qo_heads, head_dim]: the rows of the prompt.
        k_p, v_p
            Its keys and values.
        custom_mask_p to rope_theta_p
            Of the prompt, as in single_prefill_with_kv_cache without the ending.
        q_d
            [B, num_qo_heads, head_dim]: the rows of the decodes.
        paged_kv_cache_d, q_scale, k_scale, v_scale
            As in BatchDecodeWithPagedKVCacheWrapper.run.
        pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
            If given, must be the plan's.
        custom_mask_d, packed_custom_mask_d
            Must be None: a decode has one row.
        kv_layout_d
            The wrapper's counts, whatever is said here.
        lse_p, lse_d
            float32 [qo_len, num_qo_heads] and [B, num_qo_heads], to be written.
        return_lse_p, return_lse_d
            Accepted for compatibility: FlashInfer returns no LSE here either.
        causal_d, use_fp16_qk_reduction, enable_pdl
            Accepted for compatibility.

        Returns
        -------
        tuple of arrays
            (out_p, out_d).

        Raises
        ------
        CupyAttnError
            As the functions named; nothing is launched then.
        """
        what = "a decode has one row and no mask"
        geometry.refuse(what, custom_mask_d=custom_mask_d)
        geometry.refuse(what, packed_custom_mask_d=packed_custom_mask_d)
        spec = self._decodes._require_plan().geometry.spec
        if pos_encoding_mode_d is not None:
            parse.choice(pos_encoding_mode_d, POS_ENCODING_MODES, "pos_encoding_mode_d")
        for name, value, default, planned in (
            ("pos_encoding_mode_d", pos_encoding_mode_d, "NONE", spec.pos_encoding),
            ("sm_scale_d", _number(sm_scale_d, "sm_scale_d"), None, spec.sm_scale),
            ("window_left_d", parse.window(window_left_d, "window_left_d"), -1, spec.window_left),
            ("rope_scale_d", _number(rope_scale_d, "rope_scale_d"), None, spec.rope_scale),
            ("rope_theta_d", _number(rope_theta_d, "rope_theta_d"), None, spec.rope_theta),
        ):
            if value not in (None, default, planned):
                raise PlanError(
                    f"{name}: run() got {value!r} and the plan says {planned!r}; pass it to plan()"
                )
        options = single.RawOptions(
            kv_layout=kv_layout_p,
            causal=causal_p,
            pos_encoding_mode=pos_encoding_mode_p,
            window_left=window_left_p,
            sm_scale=sm_scale_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        arrays = single.Arrays(
            q_p,
            k_p,
            v_p,
            lse=lse_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
        )
        out_p = single.run(
            arrays,
            options,
            return_lse=False,
            is_decode=False,
            workspace=self._decodes._workspace,
        )
        out_d = self._decodes.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, lse=lse_d
        )
        return out_p, out_d


def _number(value: Any, name: str) -> float | None:
    return None if value is None else parse.finite(value, name, 1.0)

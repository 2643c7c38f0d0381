"""The older wrapper of FlashInfer for decode over a latent cache, by the newer one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import array
from ..core import dtypes, parse
from ..engine import geometry
from ..engine.requests import host_integers, on_host, read_indptr
from ..engine.wrapper import planning
from ..errors import ArgumentError, UnsupportedError
from ..typing import Array
from .mla import BatchMLAPagedAttentionWrapper


class BatchDecodeMlaWithPagedKVCacheWrapper(BatchMLAPagedAttentionWrapper):
    """`BatchMLAPagedAttentionWrapper` for the last token of each request, in FlashInfer's older
    arguments.

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph
        As there.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        Needed for captured runs: int32 [B + 1], [most pages of a batch] and [B] on the device:
        plan() fills the first two; the third says how many requests there are.
    use_tensor_cores
        Accepted for compatibility.

    Raises
    ------
    CupyAttnError
        As BatchDecodeWithPagedKVCacheWrapper.

    Notes
    -----
    Semantics: FlashInfer's class of the same name, which runs on sm_80 alone.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([36, 20])
    >>> wrapper = cupyattn.BatchDecodeMlaWithPagedKVCacheWrapper(None)
    >>> wrapper.plan(indptr, indices, last, 16, 512, 64, sm_scale=192**-0.5)
    >>> q_nope, q_pe = np.ones((2, 16, 512), np.float16), np.ones((2, 16, 64), np.float16)
    >>> ckv, kpe = np.ones((4, 64, 512), np.float16), np.ones((4, 64, 64), np.float16)
    >>> wrapper.run(q_nope, q_pe, ckv, kpe).shape
    (2, 16, 512)
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Array | None = None,
        paged_kv_indices_buffer: Array | None = None,
        paged_kv_last_page_len_buffer: Array | None = None,
    ) -> None:
        rows = lengths = None
        if parse.flag(use_cuda_graph, "use_cuda_graph"):
            held = array.view(paged_kv_last_page_len_buffer, "paged_kv_last_page_len_buffer")
            count = held.shape[0] if len(held.shape) == 1 else 0
            rows, lengths = (
                array.empty((n,), dtypes.int32, held) for n in (count + 1, max(count, 0))
            )
        self._use_tensor_cores = parse.flag(use_tensor_cores, "use_tensor_cores")
        super().__init__(
            float_workspace_buffer,
            use_cuda_graph,
            rows,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            lengths,
        )
        self._sm_scale = 1.0

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given."""
        return self._use_tensor_cores

    @planning
    def plan(  # type: ignore[override]
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: Any = "float16",
        q_data_type: Any = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Schedule the batch that the next runs are for.

        Parameters
        ----------
        indptr, indices, last_page_len
            The pages of each request, as in BatchDecodeWithPagedKVCacheWrapper.plan.
        num_qo_heads, page_size
            Of the arrays to come.
        head_dim_compressed_kv
            Columns of the latent part, 512 or 256; the other part has 64.
        sm_scale
            The scale of the logits: 1 / sqrt(128 + 64) in DeepSeek's models.
        data_type, q_data_type
            Of the cache, and of queries, default the same.
        window_left
            As in BatchMLAPagedAttentionWrapper.plan.
        logits_soft_cap
            Must be None or 0.
        rope_scale, rope_theta
            Accepted for compatibility: queries and cache come rotated.

        Raises
        ------
        CupyAttnError
            As BatchMLAPagedAttentionWrapper.plan.
        """
        if parse.soft_cap(logits_soft_cap):
            raise UnsupportedError("logits_soft_cap: latent attention has no cap; pass None")
        scale = parse.finite(sm_scale, "sm_scale", 1.0)
        size = geometry.count(page_size, "page_size")
        offsets, last = on_host(indptr, last_page_len)
        offsets, pages, _ = read_indptr(offsets, "indptr")
        last = host_integers(last, "last_page_len")
        if last.size != pages.size:
            raise ArgumentError(
                f"last_page_len: shape is {list(last.shape)}; wanted [{pages.size}], one for each "
                "request"
            )
        is_wrong = (pages > 0) & ((last < 1) | (last > size))
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            raise ArgumentError(
                f"last_page_len: request {at} has {last[at]} tokens in its last page; wanted 1 to "
                f"{size}, the page size"
            )
        super().plan(
            np.arange(pages.size + 1),
            offsets,
            indices,
            np.where(pages > 0, (pages - 1) * size + last, 0),
            num_heads=num_qo_heads,
            head_dim_ckv=head_dim_compressed_kv,
            head_dim_kpe=64,
            page_size=page_size,
            sm_scale=sm_scale,
            q_data_type=data_type if q_data_type is None else q_data_type,
            kv_data_type=data_type,
            window_left=window_left,
        )
        if not self._is_probe:
            self._sm_scale = scale

    def run(  # type: ignore[override]
        self,
        q_nope: Array,
        q_pe: Array,
        paged_ckv_cache: Array,
        paged_kpe_cache: Array,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> Any:
        """Latent attention of the planned batch.

        Parameters
        ----------
        q_nope, q_pe
            [B, num_qo_heads, head_dim_compressed_kv] and [B, num_qo_heads, 64].
        paged_ckv_cache, paged_kpe_cache
            [num_pages, page_size, columns] of each part.
        q_scale, k_scale
            Numbers that multiply the logits.
        v_scale
            A number that multiplies the output.
        out, lse, return_lse
            As in BatchMLAPagedAttentionWrapper.run.
        enable_pdl
            Accepted for compatibility.

        Returns
        -------
        result
            out, like q_nope, or (out, lse [B, num_qo_heads], base 2) if `return_lse`.
        """
        logits = parse.finite(q_scale, "q_scale", 1.0) * parse.finite(k_scale, "k_scale", 1.0)
        return super().run(
            q_nope,
            q_pe,
            paged_ckv_cache,
            paged_kpe_cache,
            out,
            lse,
            return_lse,
            bmm1_scale=None if logits == 1.0 else logits * self._sm_scale,
            bmm2_scale=v_scale,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """run()."""
        return self.run(*args, **kwargs)

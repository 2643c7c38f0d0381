"""Attention with block-sparse masks: only the blocks of keys that rows see are read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, match_contiguous, require_dtype
from ..core import dtypes, overloads, parse
from ..engine import blocks as sparse
from ..engine import geometry
from ..engine.blocks import Blocks
from ..engine.kv_cache import planned
from ..engine.mask import NO_MASK, Mask, of_bits, read_mask
from ..engine.requests import Batch, host_integers, read_indptr, with_mask
from ..engine.run_batch import make_options, run
from ..engine.wrapper import BatchWrapper, exclusive, planning
from ..errors import ArgumentError, UnsupportedError
from ..typing import Array, ArrayT, Scale

# FlashInfer's kernels for block-sparse masks; here they choose nothing.
_BACKENDS = (
    *("cake", "cake_cute", "cutile", "vsa_blackwell", "vsa_blackwell_blk64"),
    *("vsa_sm100_blk128", "vsa_sm100_blk64", "vsa_sm120_blk64"),
)


class BlockSparseBase(BatchWrapper):
    """What both wrappers share: keys and values of a run are rows, which become pages."""

    def __init__(self, float_workspace_buffer: Any = None, backend: str = "auto") -> None:
        is_known = isinstance(backend, str) and backend in _BACKENDS
        backend = "auto" if is_known else backend
        super().__init__(float_workspace_buffer, "NHD", False, {}, backend, None)

    def _plan_batch(
        self,
        batch: Batch,
        heads: tuple[Any, Any],
        head_dim: Any,
        page_size: int,
        data_types: tuple[Any, Any],
        mask: Mask,
        matrix: tuple[int, ...],
        shared_keys: int,
        turn: np.ndarray | None = None,
        **plan_options: Any,
    ) -> None:
        batch.matrix = matrix
        if mask.form is not None:
            batch = with_mask(batch)
        batch.requests.shared_keys, batch.requests.turn = shared_keys, turn
        dims = *heads, head_dim, head_dim
        options = self._options(dims, page_size, data_types, mask.form, **plan_options)
        self._install(options, batch, mask, (0, True))


def refuse_positions(pos_encoding_mode: Any) -> None:
    """The keys of a block of rows are gathered, so kernels know no positions of them."""
    if pos_encoding_mode is None:
        return
    if parse.pos_encoding_mode(pos_encoding_mode) != "NONE":
        raise UnsupportedError(
            f"pos_encoding_mode: {pos_encoding_mode!r} is not supported with block-sparse masks; "
            "encode positions into q and k before the call, and pass 'NONE'"
        )


class BlockSparseAttentionWrapper(BlockSparseBase):
    """Attention of M rows over N columns of keys, masked by blocks of R rows and C columns that are
    the same for all heads: plan() once, run() for every layer.

    Parameters
    ----------
    float_workspace_buffer
        As in BatchPrefillWithPagedKVCacheWrapper.
    backend
        Accepted for compatibility.

    Raises
    ------
    CupyAttnError
        As BatchDecodeWithPagedKVCacheWrapper.

    Notes
    -----
    A block of rows is a request, and its blocks of columns are its pages. So blocks that are not in
    the mask cost nothing, and any R and C serve; rows of blocks of 8 columns and more are copied
    fastest.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> indptr, indices = np.array([0, 1, 3]), np.array([0, 0, 1])  # of 2 blocks of rows
    >>> wrapper = cupyattn.BlockSparseAttentionWrapper()
    >>> wrapper.plan(indptr, indices, 32, 32, 16, 16, 8, 2, 64)  # 32 x 32 in blocks of 16 x 16
    >>> q, k = np.ones((32, 8, 64), np.float16), np.ones((32, 2, 64), np.float16)
    >>> wrapper.run(q, k, k).shape
    (32, 8, 64)
    """

    @planning
    def plan(
        self,
        indptr: Array | None,
        indices: Array | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Array | None = None,
        packed_mask: Array | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = "float16",
        non_blocking: bool = True,
        block_mask: Array | None = None,
        kv_block_lens: Any = None,
        q2k_indices: Any = None,
        q2k_num: Any = None,
        kv_splits: Any = None,
        use_clc: bool | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """Schedule the mask that the next runs are for.

        Parameters
        ----------
        indptr, indices
            int32 or int64 [ceil(M / R) + 1] and [indptr[-1]]: the blocks of columns of each block
            of rows, as in scipy.sparse.bsr_matrix. Both are needed on the host.
        M, N
            Rows and columns; C divides N. The last block of rows may be cut off.
        R, C
            Rows and columns of a block.
        num_qo_heads, num_kv_heads
            Query heads, a multiple of the KV heads, whose neighbours share one.
        head_dim
            Columns of q, k and v.
        mask
            bool [indptr[-1], R, C]: which elements of each block are seen; default: all. Needed on
            the host.
        packed_mask
            uint8: the same of each block of rows, [rows, its columns], as little-endian bits from a
            byte on; it wins over mask.
        causal
            Row i sees columns up to i + N - M. Without effect if there is a mask.
        q_data_type, kv_data_type, o_data_type
            Default float16, that of q, float16.
        block_mask
            bool [num_qo_heads or num_kv_heads, ceil(M / R), N / C], in place of indptr and indices:
            which blocks are seen, the same for all heads.
        logits_soft_cap, sm_scale
            As in BatchPrefillWithPagedKVCacheWrapper.plan.
        pos_encoding_mode
            Must be "NONE".
        kv_block_lens, q2k_indices, q2k_num
            Must be None.
        q_scale, k_scale, v_scale
            Must be None: run() takes scales.
        use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking, kv_splits, use_clc
            Accepted for compatibility.

        Raises
        ------
        CupyAttnError
            ArgumentError or UnsupportedError; the last plan then stays in force.
        """
        refuse_positions(pos_encoding_mode)
        geometry.refuse("not supported", kv_block_lens=kv_block_lens, q2k_indices=q2k_indices)
        geometry.refuse("not supported", q2k_num=q2k_num)
        geometry.refuse("FP8 scales are arguments of run()", q_scale=q_scale, k_scale=k_scale)
        geometry.refuse("FP8 scales are arguments of run()", v_scale=v_scale)
        sizes = {
            name: geometry.count(x, name) for name, x in zip("MNRC", (M, N, R, C), strict=True)
        }
        M, N, R, C = sizes.values()
        if N % C:
            raise ArgumentError(f"N: got {N} columns, in blocks of {C}; wanted a multiple of C")
        if block_mask is None:
            blocks = _read_bsr(indptr, indices, M, N, R, C)
        else:
            blocks = _read_block_mask(block_mask, num_qo_heads, num_kv_heads, M, N, R, C)
        is_causal, seen = False, read_mask(None, packed_mask)
        if seen is NO_MASK and mask is not None:
            seen = of_bits(_pack_elements(mask, blocks, R, C))
        elif seen is NO_MASK and parse.flag(causal, "causal"):
            blocks, is_causal, bits = sparse.with_causality(blocks, N - M)
            seen = of_bits(bits)
        self._plan_batch(
            sparse.to_batch(blocks, C, 0),
            (num_qo_heads, num_kv_heads),
            head_dim,
            C,
            (q_data_type, kv_data_type),
            seen,
            (N,),
            shared_keys=N,
            causal=is_causal,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            o_dtype=o_data_type,
        )

    begin_forward = plan

    @overloads.block_sparse_run
    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention with the planned mask.

        Parameters
        ----------
        q
            [M, num_qo_heads, head_dim].
        k, v
            [N, num_kv_heads, head_dim].
        scale_q, scale_k, scale_v
            Numbers, or float32 arrays with one for each head.
        out, lse, return_lse
            As in BatchPrefillWithPagedKVCacheWrapper.run.
        enable_pdl
            Accepted for compatibility.

        Returns
        -------
        out
            [M, num_qo_heads, head_dim], or (out, lse [M, num_qo_heads]) if `return_lse`: 0 and -inf
            where a row sees no key.

        Raises
        ------
        CupyAttnError
            As that function.
        """
        plan = self._require_plan()
        dims = planned(plan.geometry)
        dims["N"], dims.source["N"] = plan.batch.matrix[0], "the plan"
        k, v = (_as_pages(x, name, dims) for x, name in ((k, "k"), (v, "v")))
        options = make_options(
            return_lse=return_lse, q_scale=scale_q, k_scale=scale_k, v_scale=scale_v
        )
        return run(self, q=q, k=k, v=v, out=out, lse=lse, options=options)

    @exclusive
    def forward(
        self,
        q: ArrayT,
        k: Array,
        v: Array,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> ArrayT:
        """run() in its older form; the options that are not None replace the plan's."""
        refuse_positions(pos_encoding_mode)
        self._change(logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


def _as_pages(x: Any, name: str, dims: Dims) -> Any:
    """k or v [N, num_kv_heads, head_dim] as pages, of the same memory."""
    v, size = array.view(x, name), dims["page_size"]
    match_contiguous(v, "N num_kv_heads head_dim_qk", dims, name)
    shape = v.shape[0] // size, size, *v.shape[1:]
    return array.restride(x, name, shape, (size * v.strides[0], *v.strides))


def _read_bsr(indptr: Any, indices: Any, M: int, N: int, R: int, C: int) -> Blocks:
    for name, x in (("indptr", indptr), ("indices", indices)):
        if x is None:
            raise ArgumentError(f"{name}: got None; wanted it, or block_mask")
    offsets, counts, _ = read_indptr(indptr, "indptr")
    if counts.size != -(-M // R):
        raise ArgumentError(
            f"indptr: holds {offsets.size} offsets; wanted {-(-M // R) + 1}, for {M} rows in "
            f"blocks of {R}"
        )
    columns = host_integers(indices, "indices")
    if columns.size < offsets[-1]:
        raise ArgumentError(
            f"indices: holds {columns.size}; wanted {offsets[-1]}, the last offset of indptr"
        )
    columns = columns[offsets[0] : offsets[-1]]
    if columns.size and not 0 <= columns.min() <= columns.max() < N // C:
        at = int(np.argmax((columns < 0) | (columns >= N // C)))
        raise ArgumentError(
            f"indices: entry {offsets[0] + at} is {columns[at]}; wanted 0 to {N // C - 1}, for {N} "
            f"columns in blocks of {C}"
        )
    begin = np.arange(counts.size) * R
    request = np.repeat(np.arange(counts.size), counts)
    length = np.full(columns.size, C)
    return Blocks(begin, np.minimum(begin + R, M), request, columns * C, length)


def _read_block_mask(
    block_mask: Any, num_qo_heads: Any, num_kv_heads: Any, M: int, N: int, R: int, C: int
) -> Blocks:
    v = array.view(block_mask, "block_mask")
    require_dtype(v, dtypes.bool_, "block_mask")
    match(v, "heads rows columns", Dims(rows=-(-M // R), columns=N // C), "block_mask")
    if v.shape[0] not in (num_qo_heads, num_kv_heads):
        raise ArgumentError(
            f"block_mask: is of {v.shape[0]} heads; wanted {num_qo_heads} or {num_kv_heads}"
        )
    shown = array.to_host(v)
    if (shown != shown[:1]).any():
        raise UnsupportedError(
            "block_mask: heads see different blocks; use VariableBlockSparseAttentionWrapper"
        )
    indptr = np.append(0, np.cumsum(shown[0].sum(1)))
    return _read_bsr(indptr, np.nonzero(shown[0])[1], M, N, R, C)


def _pack_elements(mask: Any, blocks: Blocks, R: int, C: int) -> np.ndarray:
    """The bits of each block of rows, [rows, its columns], of a mask [blocks, R, C]."""
    v: ArrayView = array.view(mask, "mask")
    require_dtype(v, dtypes.bool_, "mask")
    match(v, f"blocks {R} {C}", Dims(blocks=blocks.request.size), "mask")
    elements = array.to_host(v)
    ends = np.cumsum(np.bincount(blocks.request, minlength=blocks.row_begin.size))
    packed = [np.zeros(0, np.uint8)]
    for own, rows in zip(
        np.split(elements, ends[:-1]), (blocks.row_end - blocks.row_begin).tolist(), strict=True
    ):
        packed.append(sparse.pack_rows(own.swapaxes(0, 1)[:rows]))
    return np.concatenate(packed)

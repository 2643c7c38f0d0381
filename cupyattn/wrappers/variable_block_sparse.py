"""Attention with block-sparse masks of each KV head's own, with blocks of any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, match_contiguous, match_output, require_dtype
from ..core import dtypes, overloads, parse
from ..core.dtypes import DType
from ..core.problem import MAX_LENGTH
from ..engine import blocks as sparse
from ..engine import geometry
from ..engine.mask import of_bits
from ..engine.requests import with_mask
from ..engine.run_batch import run
from ..engine.wrapper import exclusive, planning
from ..errors import ArgumentError, UnsupportedError
from ..typing import Array, ArrayT
from .block_sparse import BlockSparseBase, refuse_positions


class VariableBlockSparseAttentionWrapper(BlockSparseBase):
    """Attention in which each KV head has a block-sparse mask, with blocks of any sizes: plan()
    once, run() for every layer.

    Parameters
    ----------
    float_workspace_buffer, backend
        As in BlockSparseAttentionWrapper.

    Raises
    ------
    CupyAttnError
        As BatchDecodeWithPagedKVCacheWrapper.

    Notes
    -----
    A block of rows of a query head is a request, and its columns are pages, as large as what
    divides all blocks of columns. So blocks that are not in the mask cost nothing; sizes that are
    multiples of 8 are copied fastest. Query heads that share a KV head are requests of their own.

    Semantics: FlashInfer's class of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> seen = np.array([[[True, False], [True, True]]] * 2)  # of each key head
    >>> rows, columns = np.array([[12, 20]] * 2), np.array([[24, 8]] * 2)
    >>> wrapper = cupyattn.VariableBlockSparseAttentionWrapper()
    >>> wrapper.plan(seen, rows, columns, 8, 2, 64)
    >>> q, k = np.ones((8, 32, 64), np.float16), np.ones((2, 32, 64), np.float16)  # heads first
    >>> wrapper.run(q, k, k).shape
    (8, 32, 64)
    """

    @planning
    def plan(
        self,
        block_mask_map: Array,
        block_row_sz: Array,
        block_col_sz: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Schedule the masks that the next runs are for.

        Parameters
        ----------
        block_mask_map
            bool [num_kv_heads, MB, NB]: the blocks of columns that blocks of rows see.
        block_row_sz, block_col_sz
            int32 or int64 [num_kv_heads, MB] and [num_kv_heads, NB]: rows and columns of each
            block; every head has as many rows, M, and columns, N. They and block_mask_map are
            needed on the host.
        num_qo_heads, num_kv_heads, head_dim, logits_soft_cap, sm_scale
            As in BlockSparseAttentionWrapper.plan.
        causal
            Row i sees columns up to i + N - M.
        q_data_type, kv_data_type
            Default float16, that of q; the output has q's.
        pos_encoding_mode
            Must be "NONE".
        use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking
            Accepted for compatibility.

        Raises
        ------
        CupyAttnError
            ArgumentError or UnsupportedError; the last plan then stays in force.
        """
        refuse_positions(pos_encoding_mode)
        heads = geometry.count(num_qo_heads, "num_qo_heads")
        kv_heads = geometry.count(num_kv_heads, "num_kv_heads")
        if heads % kv_heads:
            raise ArgumentError(
                f"num_qo_heads, num_kv_heads: {heads} query heads over {kv_heads} KV heads; wanted "
                "a positive multiple"
            )
        dims = Dims(num_kv_heads=kv_heads)
        shown = _read(block_mask_map, "num_kv_heads MB NB", dims, dtypes.bool_, "block_mask_map")
        rows = _read_sizes(block_row_sz, "num_kv_heads MB", dims, "block_row_sz")
        columns = _read_sizes(block_col_sz, "num_kv_heads NB", dims, "block_col_sz")
        num_rows, num_columns = int(rows[0].sum()), int(columns[0].sum())
        blocks = sparse.of_map(shown, rows, columns)
        is_causal, bits = False, None
        if parse.flag(causal, "causal"):
            blocks, is_causal, bits = sparse.with_causality(blocks, num_columns - num_rows)
        page_size = int(np.gcd.reduce(columns, axis=None)) or 1
        pages_before = np.arange(kv_heads) * (num_columns // page_size)
        batch = sparse.to_batch(blocks, page_size, np.repeat(pages_before, rows.shape[1]))
        # Heads that share keys have the same bits, one after another.
        group = heads // kv_heads
        if bits is not None:
            begins = with_mask(batch).mask_indptr
            assert begins is not None
            parts = np.split(bits, begins[:: rows.shape[1]][1:-1])
            bits = np.concatenate([np.tile(part, group) for part in parts])
        self._plan_batch(
            sparse.repeat_heads(batch, kv_heads, group),
            (1, 1),
            head_dim,
            page_size,
            (q_data_type, kv_data_type),
            of_bits(bits),
            (heads, kv_heads, num_rows, num_columns),
            shared_keys=kv_heads * num_columns,
            turn=np.arange(kv_heads).repeat(group * rows.shape[1]),
            causal=is_causal,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    begin_forward = plan

    @overloads.variable_blocks_run
    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention with the planned masks.

        Parameters
        ----------
        q
            [num_qo_heads, M, head_dim].
        k, v
            [num_kv_heads, N, head_dim]. One whose heads do not follow one another in memory is
            copied.
        out
            [num_qo_heads, M, head_dim] to write the output to.
        lse
            float32 [num_qo_heads, M] to write.
        return_lse
            Return the LSE too.
        enable_pdl
            Accepted for compatibility.

        Returns
        -------
        out
            [num_qo_heads, M, head_dim], or (out, lse [num_qo_heads, M]) if `return_lse`: 0 and -inf
            where a row sees no key.

        Raises
        ------
        CupyAttnError
            As BatchPrefillWithPagedKVCacheWrapper.run.
        """
        plan = self._require_plan()
        spec = plan.geometry.spec
        heads, kv_heads, num_rows, num_columns = plan.batch.matrix
        rows = _as_rows(q, "q", (heads, num_rows, spec.head_dim_qk), 1)
        keys = kv_heads, num_columns, spec.head_dim_qk
        k, v = (_as_rows(x, name, keys, spec.page_size) for x, name in ((k, "k"), (v, "v")))
        vq = array.view(q, "q")
        shape = heads, num_rows, spec.head_dim_vo
        if out is None:
            out = array.empty(shape, spec.dtype_o, vq)
        return_lse = parse.flag(return_lse, "return_lse")  # type: ignore[assignment]
        if lse is None and return_lse:
            lse = array.empty(shape[:-1], dtypes.float32, vq)
        target = _as_rows_of_one_head(out, "out", shape, spec.dtype_o)
        sums = None if lse is None else _as_rows_of_one_head(lse, "lse", shape[:-1], dtypes.float32)
        run(self, q=rows, k=k, v=v, out=target, lse=sums)
        out = array.deliver(out, vq)
        return (out, array.deliver(lse, vq)) if return_lse else out

    @exclusive
    def forward(
        self,
        q: ArrayT,
        k: Array,
        v: Array,
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
        return self.run(q, k, v)


def _read(x: Any, spec: str, dims: Dims, wanted: DType | Sequence[DType], name: str) -> np.ndarray:
    v = array.view(x, name)
    match(v, spec, dims, name)
    require_dtype(v, wanted, name)
    return array.to_host(v)


def _read_sizes(x: Any, spec: str, dims: Dims, name: str) -> np.ndarray:
    """int64 [heads, blocks], whose sums are the same for all heads."""
    sizes = _read(x, spec, dims, (dtypes.int32, dtypes.int64), name).astype(np.int64)
    if sizes.size and not 0 <= sizes.min() <= sizes.max() <= MAX_LENGTH:
        raise ArgumentError(
            f"{name}: holds {sizes.min()} to {sizes.max()}; wanted sizes of blocks, from 0 on"
        )
    sums = sizes.sum(1)
    if sums.max(initial=0) > MAX_LENGTH:
        raise UnsupportedError(f"{name}: sums to {sums.max()}; at most {MAX_LENGTH} is supported")
    if (sums != sums[0]).any():
        at = int(np.argmax(sums != sums[0]))
        raise ArgumentError(
            f"{name}: sums to {sums[0]} for head 0 and to {sums[at]} for head {at}; wanted the same"
        )
    return sizes


def _as_rows(x: Any, name: str, shape: tuple[int, int, int], size: int) -> Any:
    """q, k or v [heads, n, head_dim] as rows of one head (size 1) or pages of one head, of the same
    memory or of a copy."""
    dims = Dims(**dict(zip(("heads", "n", "head_dim"), shape, strict=True)))
    dims.source = dict.fromkeys(dims, "the plan")
    match_contiguous(array.view(x, name), "heads n head_dim", dims, name)
    step = _row_step(array.view(x, name))
    if step is None:
        x, step = array.row_major(x, name), shape[-1]
    count = shape[0] * shape[1] // size
    slots = (size,) if name != "q" else ()
    steps = (step,) if name != "q" else ()
    return array.restride(x, name, (count, *slots, 1, shape[-1]), (size * step, *steps, step, 1))


def _row_step(v: ArrayView) -> int | None:
    """Elements from a row of [heads, n, ...] to the next; None where heads are not in a row."""
    heads, n = v.shape[:2]
    if n == 1:
        return v.strides[0]
    return v.strides[1] if heads == 1 or v.strides[0] == n * v.strides[1] else None


def _as_rows_of_one_head(x: Any, name: str, shape: tuple[int, ...], dtype: DType) -> Any:
    """out [heads, n, head_dim] or lse [heads, n] as rows of one head."""
    v = array.view(x, name)
    match_output(v, shape, dtype, name)
    step = _row_step(v)
    if step is None:
        raise ArgumentError(
            f"{name}: strides are {list(v.strides)}; wanted heads one after another, pass a "
            "row-major array"
        )
    rest = v.strides[2:]
    return array.restride(x, name, (shape[0] * shape[1], 1, *shape[2:]), (step, step, *rest))

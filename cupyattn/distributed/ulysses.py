"""Ulysses: ranks exchange tokens for heads, attend as one GPU would, and exchange them back.

Each rank comes with its tokens of all heads. An all-to-all gives it all tokens of its own heads
(heads.py), over which ordinary prefill runs; a second one brings the answers back. Two copies go
with each exchange: one that lays rows out for their ranks, one that puts them in their places.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..schedule.batch import BatchRequests
from ..slots import reshape_and_cache
from .exchanged_rows import ExchangedRows, copy
from .group import Group
from .heads import head_range
from .pieces import ZigZag
from .prefill_stage import PrefillOptions, StageWrapper

_ALIGNMENT = 16


class Ulysses:
    """Prefill of one planned batch by exchanging tokens for heads.

    Rows that ranks exchange hold q, k and v of one rank's heads; on the way back they hold its
    answers, and behind them, from a 16-byte boundary on, its LSE.
    """

    def __init__(self, group: Group, share: ZigZag, options: PrefillOptions) -> None:
        num_qo_heads, num_kv_heads, dim_qk, dim_vo = options.heads_and_dims
        self._group, self._options = group, options
        self._heads = head_range(num_qo_heads, num_kv_heads, group.size, group.rank)
        own = self._heads.num_qo_heads, self._heads.num_kv_heads
        self._query_columns = own[0] * dim_qk
        self._key_columns = own[1] * (dim_qk + dim_vo)
        self._num_rows = int(share.counts(group.rank).sum())
        self._num_tokens = share.num_tokens
        self._part = max(int(share.counts(rank).sum()) for rank in range(group.size))
        self._places = np.full(group.size * self._part, -1, np.int32)  # of rows that come
        for rank in range(group.size):
            rows = share.rows(rank)
            self._places[rank * self._part : rank * self._part + rows.size] = rows
        has_row = np.flatnonzero(self._places >= 0)
        self._origins = np.empty(self._num_tokens, np.int32)  # of the whole batch's rows
        self._origins[self._places[has_row]] = has_row
        requests = BatchRequests(
            share.lengths, share.lengths, share.qo_indptr[:-1], share.qo_indptr[:-1]
        )
        self._stage = StageWrapper(group.on_gpu)
        self._stage.plan(
            requests,
            self._num_tokens,
            self._num_tokens,
            (*own, dim_qk, dim_vo),
            options.dtype,
            options.raw,
        )
        self._memory: _Memory | None = None

    def run(self, q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView, lse: Any) -> None:
        """Write the answer of this rank's tokens, and their LSE where an array is given."""
        if not self._num_tokens:
            return
        if self._memory is None or not self._memory.fits(q):
            self._memory = self._make_memory(q)
        memory = self._memory
        stream = array.current_stream(q) if q.device.kind == "cuda" else None
        # --- 1. Tokens of all heads become all tokens of own heads ---
        self._lay_out(q, k, v, memory.send, stream)
        self._exchange(memory.taken, memory.send, stream)
        columns, keys = self._query_columns, self._key_columns
        reshape_and_cache(
            memory.taken.heads(0, 1, columns),
            memory.taken.heads(columns, 1, keys),
            memory.queries.heads(0, 1, columns),
            memory.keys.heads(0, 1, keys),
            memory.slots,
        )
        # --- 2. Attend ---
        heads, (_, _, dim_qk, dim_vo) = self._heads, self._options.heads_and_dims
        self._stage.attend(
            memory.queries.heads(0, heads.num_qo_heads, dim_qk),
            memory.keys.heads(0, heads.num_kv_heads, dim_qk),
            memory.keys.heads(heads.num_kv_heads * dim_qk, heads.num_kv_heads, dim_vo),
            memory.outputs.heads(0, heads.num_qo_heads, dim_vo),
            memory.lse.whole,
        )
        # --- 3. And back ---
        columns_out = heads.num_qo_heads * dim_vo
        numbers = heads.num_qo_heads * 4 // self._options.spec.dtype_o.itemsize
        reshape_and_cache(
            memory.outputs.heads(0, 1, columns_out),
            memory.lse_as_outputs,
            memory.send_back.heads(0, 1, columns_out),
            memory.send_back.heads(memory.lse_column, 1, numbers),
            memory.origins,
        )
        self._exchange(memory.taken_back, memory.send_back, stream)
        self._collect(memory, out, lse, stream)

    def _exchange(self, taken: ExchangedRows, send: ExchangedRows, stream: int | None) -> None:
        num_rows = self._group.size * self._part
        self._group.all_to_all(taken.bytes(0, num_rows), send.bytes(0, num_rows), stream)

    def _lay_out(
        self, q: ArrayView, k: ArrayView, v: ArrayView, send: ExchangedRows, stream: int | None
    ) -> None:
        """Give every rank its heads of this rank's tokens. KV heads with replicas are copied."""
        if not self._num_rows:
            return
        size, part, row = self._group.size, self._part, send.columns
        heads, (_, _, dim_qk, dim_vo) = self._heads, self._options.heads_and_dims
        copies, replicas = heads.num_replicas, size // heads.num_replicas
        pairs = []
        column = 0
        for x, own, dim, times in (
            (q, heads.num_qo_heads, dim_qk, 1),
            (k, heads.num_kv_heads, dim_qk, copies),
            (v, heads.num_kv_heads, dim_vo, copies),
        ):
            token, head, _ = x.strides
            if times == 1:
                shape = size, self._num_rows, own, dim
                source = array.as_strided(x, shape, (own * head, token, head, 1))
                target = send.strided(column, shape, (part * row, row, dim, 1))
            else:
                shape = replicas, times, self._num_rows, dim
                source = array.as_strided(x, shape, (head, 0, token, 1))
                target = send.strided(column, shape, (times * part * row, part * row, row, 1))
            pairs.append((source, target))
            column += own * dim
        copy(pairs[:1], stream)
        copy(pairs[1:], stream)

    def _collect(self, memory: _Memory, out: ArrayView, lse: Any, stream: int | None) -> None:
        """Put the answers of all ranks' heads side by side."""
        if not self._num_rows:
            return
        size, part, own = self._group.size, self._part, self._heads.num_qo_heads
        dim, row = self._options.heads_and_dims[3], memory.taken_back.columns
        token, head, _ = out.strides
        shape: tuple[int, ...] = (size, self._num_rows, own, dim)
        source = memory.taken_back.strided(0, shape, (part * row, row, dim, 1))
        copy([(source, array.as_strided(out, shape, (own * head, token, head, 1)))], stream)
        if lse is None:
            return
        row = row * self._options.spec.dtype_o.itemsize // 4
        token, head = lse.strides
        shape = size, self._num_rows, own
        source = memory.taken_back.strided(
            memory.lse_column, shape, (part * row, row, 1), dtypes.float32
        )
        copy([(source, array.as_strided(lse, shape, (own * head, token, head)))], stream)

    def _make_memory(self, like: ArrayView) -> _Memory:
        return _Memory(
            like,
            num_exchanged=self._group.size * self._part,
            num_tokens=self._num_tokens,
            columns=(self._query_columns, self._key_columns),
            heads_and_dim=(self._heads.num_qo_heads, self._options.heads_and_dims[3]),
            options=self._options,
            slots=array.constant(self._places, like),
            origins=array.constant(self._origins, like),
        )


class _Memory:
    """What runs of a plan write in between, on the device and of the framework of their arrays."""

    def __init__(
        self,
        like: ArrayView,
        *,
        num_exchanged: int,
        num_tokens: int,
        columns: tuple[int, int],
        heads_and_dim: tuple[int, int],
        options: PrefillOptions,
        slots: Any,
        origins: Any,
    ) -> None:
        self._place = like.device, like.framework
        dtype, dtype_o = options.dtype, options.spec.dtype_o
        row = _rounded(sum(columns), dtype.itemsize)
        self.send = ExchangedRows(num_exchanged, row, dtype, like)
        self.taken = ExchangedRows(num_exchanged, row, dtype, like)
        self.queries = ExchangedRows(num_tokens, columns[0], dtype, like)
        self.keys = ExchangedRows(num_tokens, columns[1], dtype, like)
        num_heads, dim = heads_and_dim
        self.outputs = ExchangedRows(num_tokens, num_heads * dim, dtype_o, like)
        self.lse = ExchangedRows(num_tokens, num_heads, dtypes.float32, like)
        self.lse_column = _rounded(num_heads * dim, dtype_o.itemsize)
        numbers = num_heads * 4 // dtype_o.itemsize
        row = _rounded(self.lse_column + numbers, dtype_o.itemsize)
        self.send_back = ExchangedRows(num_exchanged, row, dtype_o, like)
        self.taken_back = ExchangedRows(num_exchanged, row, dtype_o, like)
        # The numbers of the LSE, as a copy of elements of the answer's dtype takes them.
        self.lse_as_outputs = self.lse.seen_as(dtype_o)
        self.slots, self.origins = slots, origins

    def fits(self, like: ArrayView) -> bool:
        return self._place == (like.device, like.framework)


def _rounded(columns: int, itemsize: int) -> int:
    """So many columns that rows begin on 16-byte boundaries."""
    step = max(1, _ALIGNMENT // itemsize)
    return -(-columns // step) * step

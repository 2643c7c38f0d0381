"""A step's metadata under the field names of SGLang's backend, computed when it is read.

Reading waits for the device. Nothing here is on the way of a step: kernels read the arrays of
`ForwardMetadata`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import array
from .metadata import AttentionMetadata, ForwardMetadata
from .store import Tables


@dataclass(frozen=True)
class LocalAttentionMetadata:
    """Parts of requests, one for each chunk that rows of a request lie in."""

    local_query_start_loc: Any
    local_seqused_k: Any
    local_block_table: Any
    local_max_query_len: int
    local_max_seq_len: int


class FlashAttentionMetadata:
    """`forward_metadata` of FlashAttentionBackend: int32 arrays and numbers of the host."""

    window_size = (-1, -1)

    def __init__(self, meta: ForwardMetadata, tables: Tables, page_size: int, chunk: int) -> None:
        self.neutral = meta
        self._tables, self._page_size, self._chunk = tables, page_size, chunk

    # --- host copies ---

    def _made(self, x: Any) -> Any:
        return array.from_numpy(np.asarray(x, np.int32), self._tables.req_to_token)

    def _pool(self) -> np.ndarray:
        return array.to_host(self._tables.req_to_token)

    def _rows(self) -> np.ndarray:
        """Rows of the pool, of the requests."""
        batch = self.neutral.batch
        if batch is None:
            return np.zeros(self.neutral.batch_size, np.int64)
        return _host(batch.req_pool_indices)[: self.neutral.batch_size]

    def _lens(self) -> np.ndarray:
        """Keys of each request's first pass."""
        lens = _host(self.neutral.main.cache_seqlens)
        mask = self.neutral.main.tree_mask
        return lens if mask is None else lens - self.neutral.main.q_len

    def _encoder_lens(self) -> np.ndarray:
        encoder = self.neutral.encoder
        if encoder is None:
            return np.zeros(self.neutral.batch_size, np.int64)
        return _host(encoder.cache_seqlens)

    def _offsets_q(self) -> np.ndarray:
        main = self.neutral.main
        if main.cu_seqlens_q is not None:
            return _host(main.cu_seqlens_q)
        return np.arange(self.neutral.batch_size + 1) * main.q_len

    def _columns(self, first: np.ndarray, width: int, step: int = 1) -> np.ndarray:
        """Columns of the requests' rows of the pool: every step-th of `width` from `first` on."""
        pool = self._pool()
        at = first[:, None] + np.arange(0, width, step)
        return pool[self._rows()[:, None], np.minimum(at, pool.shape[1] - 1)] // step

    # --- the document's fields ---

    @property
    def cache_seqlens_int32(self) -> Any:
        return self._made(self._lens())

    @property
    def max_seq_len_q(self) -> int:
        main, batch = self.neutral.main, self.neutral.batch
        if main.q_len or batch is None or batch.extend_seq_lens_host is None:
            return main.max_seqlen_q
        return int(np.max(batch.extend_seq_lens_host, initial=0))

    @property
    def max_seq_len_k(self) -> int:
        """The most keys of the requests, without the room that graphs have for more."""
        meta = self.neutral
        if meta.batch is None or meta.batch.seq_lens_host is None:
            return int(self._lens().max(initial=0))
        drafts = meta.main.q_len if meta.main.tree_mask is not None else 0
        return meta.max_seq_len - drafts

    @property
    def cu_seqlens_q(self) -> Any:
        return self._made(self._offsets_q())

    @property
    def cu_seqlens_k(self) -> Any:
        return self._made(_cumulative(self._lens()))

    @property
    def page_table(self) -> Any:
        step = 1 if self.neutral.encoder is not None else self._page_size
        return self._made(self._columns(self._encoder_lens(), self.max_seq_len_k, step))

    @property
    def encoder_lens_int32(self) -> Any:
        return None if self.neutral.encoder is None else self._made(self._encoder_lens())

    @property
    def encoder_cu_seqlens_k(self) -> Any:
        if self.neutral.encoder is None:
            return None
        return self._made(_cumulative(self._encoder_lens()))

    @property
    def encoder_max_seq_len_k(self) -> int:
        return int(self._encoder_lens().max(initial=0))

    @property
    def encoder_page_table(self) -> Any:
        if self.neutral.encoder is None:
            return None
        first = np.zeros(self.neutral.batch_size, np.int64)
        return self._made(self._columns(first, self.encoder_max_seq_len_k))

    @property
    def local_attn_metadata(self) -> LocalAttentionMetadata | None:
        """None where no layer has chunks. Parts that have no rows are left out."""
        local = self.neutral.local
        if local is None:
            return None
        count = _host(local.cache_seqlens).size
        q_lens = np.ones(count, np.int64) if local.qo_lens is None else _host(local.qo_lens)
        k_lens, offsets = _host(local.cache_seqlens), _host(local.kv_offsets)
        used = np.flatnonzero(q_lens > 0)
        q_lens, k_lens = q_lens[used], k_lens[used]
        return LocalAttentionMetadata(
            self._made(_cumulative(q_lens)),
            self._made(k_lens),
            self._made(self._local_table(local, used, count, offsets)),
            int(q_lens.max(initial=0)),
            int(k_lens.max(initial=0)),
        )

    def _local_table(
        self, local: AttentionMetadata, used: np.ndarray, count: int, offsets: np.ndarray
    ) -> np.ndarray:
        """Entries of each part's chunk; those past a request's last one repeat it."""
        meta, size = self.neutral, local.page_size
        width = -(-self._chunk // size)
        requests = used // max(1, count // max(1, meta.batch_size))
        lens = _host(meta.main.cache_seqlens)
        entries = _host(local.page_table).reshape(-1)
        if meta.main.kv_offsets is not None and not local.uses_swa_pool:
            begin = _host(meta.main.kv_offsets)
        elif local.page_size == self._page_size:
            rows = meta.main if meta.swa is None else meta.swa
            begin = np.arange(meta.batch_size) * rows.page_table.shape[1]
        else:
            begin = self._rows() * self._tables.req_to_token.strides[0]
        last = begin + np.maximum(-(-lens // size) - 1, 0)
        at = np.minimum(offsets[used][:, None] + np.arange(width), last[requests][:, None])
        return entries[at]

    # --- drafts that branch ---

    def _seen(self) -> list[np.ndarray]:
        """The draft tokens that each row sees, of a verification."""
        mask = self.neutral.main.tree_mask
        assert mask is not None
        words = _host(mask).astype(np.int32).view(np.uint32)
        bits = words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
        return [np.flatnonzero(row) for row in bits.reshape(len(words), -1)]

    @property
    def expand(self) -> FlashAttentionExpandMetadata | None:
        """The second pass over drafts, one row a request: `forward_metadata_spec_decode_expand`."""
        meta = self.neutral
        if not meta.branches:
            return None
        if meta.expand is not None:
            lens, table = _host(meta.expand.cache_seqlens), _host(meta.expand.page_table)
            if meta.mode.name == "DRAFT_DECODE":
                table = table[:, : meta.step + 1]
            return FlashAttentionExpandMetadata(self._made, lens, table)
        drafts = meta.main.q_len
        own = self._columns(self._lens(), drafts)
        seen = self._seen()
        table = np.zeros((len(seen), drafts), np.int64)
        for index, tokens in enumerate(seen):
            hidden = np.setdiff1d(np.arange(drafts), tokens)
            table[index] = own[index // drafts][np.concatenate([tokens, hidden])]
        lens = np.array([tokens.size for tokens in seen], np.int64)
        return FlashAttentionExpandMetadata(self._made, lens, table)

    @property
    def swa_spec_metadata(self) -> FlashAttentionExpandMetadata | None:
        """Rows with all their keys, prefix and path, where layers have a window."""
        expand = self.expand
        if expand is None or self.neutral.window_rows is None:
            return None
        rows = expand.lens.size // max(1, self.neutral.batch_size)
        prefix, lens = _host(self.page_table), self._lens()
        if self._page_size > 1:
            prefix = self._columns(np.zeros_like(lens), self.max_seq_len_k)
        width = prefix.shape[1] + expand.table.shape[1]
        table = np.zeros((expand.lens.size, width), np.int64)
        for row in range(len(table)):
            own = int(lens[row // rows])
            path = [*prefix[row // rows, :own], *expand.table[row, : expand.lens[row]]]
            table[row, : len(path)] = path
        return FlashAttentionExpandMetadata(self._made, np.repeat(lens, rows) + expand.lens, table)


class FlashAttentionExpandMetadata:
    """Requests of one row each."""

    window_size = (-1, -1)
    max_seq_len_q = 1
    local_attn_metadata = None

    def __init__(self, make: Any, lens: np.ndarray, table: np.ndarray) -> None:
        self.lens, self.table, self._made = lens, table, make

    @property
    def cache_seqlens_int32(self) -> Any:
        return self._made(self.lens)

    @property
    def max_seq_len_k(self) -> int:
        return int(self.lens.max(initial=0))

    @property
    def cu_seqlens_q(self) -> Any:
        return self._made(np.arange(self.lens.size + 1))

    @property
    def cu_seqlens_k(self) -> Any:
        return self._made(_cumulative(self.lens))

    @property
    def page_table(self) -> Any:
        return self._made(self.table)


def _host(x: Any) -> np.ndarray:
    v = array.view(x, "metadata")
    return array.to_host(v).astype(np.int64)


def _cumulative(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)])

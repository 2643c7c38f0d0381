"""The metadata of a step: what each kind of layer passes to attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.key_share import KeyShare
from .modes import BatchInfo, ForwardMode


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Requests of one attention call, in device arrays.

    Parameters
    ----------
    cache_seqlens
        int32 [n]: keys of each.
    page_table
        int32 [n, width] pages; with kv_offsets any array of entries, [1, entries].
    page_size
        Tokens of an entry of this table; 1: slots of the same memory.
    kv_offsets
        int32 [n]: the entry where each request's keys begin; None: its row of the table.
    q_len
        Rows of each request; 0: by cu_seqlens_q, or by qo_offsets and qo_lens.
    cu_seqlens_q
        int32 [n + 1].
    qo_offsets, qo_lens
        int32 [n]: rows of requests that share them.
    max_seqlen_q, max_seqlen_k
        Bounds that the host knows; they affect speed only.
    tree_mask
        uint32 [rows, words]: bits of what each row sees of the last q_len keys.
    uses_swa_pool
        The table is of the second pool.
    key_share
        Whose keys these are, where ranks share them; None: all of them.
    whole_lens
        int32 [n]: with key_share, keys of each request on all ranks together.
    """

    cache_seqlens: Any
    page_table: Any
    page_size: int
    kv_offsets: Any = None
    q_len: int = 1
    cu_seqlens_q: Any = None
    qo_offsets: Any = None
    qo_lens: Any = None
    max_seqlen_q: int = 1
    max_seqlen_k: int = 0
    tree_mask: Any = None
    uses_swa_pool: bool = False
    key_share: KeyShare | None = None
    whole_lens: Any = None


@dataclass(slots=True)
class ForwardMetadata:
    """The metadata of a step, by kinds of layers; None where the mode or the engine has none.

    Parameters
    ----------
    mode, batch_size, step
        What the step does, its requests, and its number among the steps of a draft.
    max_context_len
        The bound of lengths that the host does not know.
    main
        Layers that see all keys, or a window behind a causal row.
    swa
        The same over the second pool.
    local
        Layers that see chunks: requests are parts of those of the batch.
    encoder
        Cross attention.
    expand
        The second pass over drafts, one row a request; `main` is the first, over the prefix.
    window_rows, chunk_rows
        Layers with a window or chunks where drafts branch: each row is a request, with its own keys
        along its path.
    len_offset
        Keys of main beyond seq_lens.
    batch
        What it was made of last.
    calls
        By the identity of a layer: what `attend` made of both.

    Notes
    -----
    It holds until the next step of its backend is prepared, which writes the same memory.
    """

    mode: ForwardMode
    batch_size: int
    main: AttentionMetadata
    swa: AttentionMetadata | None = None
    local: AttentionMetadata | None = None
    encoder: AttentionMetadata | None = None
    expand: AttentionMetadata | None = None
    window_rows: AttentionMetadata | None = None
    chunk_rows: AttentionMetadata | None = None
    len_offset: int = 0
    step: int = 0
    max_context_len: int = 0
    batch: BatchInfo | None = None
    calls: dict[int, Any] = field(default_factory=dict)

    @property
    def max_seq_len(self) -> int:
        """Keys of one request in main at most, as far as the host knows."""
        lens = None if self.batch is None else self.batch.seq_lens_host
        if lens is None or not len(lens):
            return self.max_context_len
        return int(np.max(lens)) + self.len_offset

    @property
    def branches(self) -> bool:
        """Whether rows of a request see different drafts."""
        return self.expand is not None or self.main.tree_mask is not None

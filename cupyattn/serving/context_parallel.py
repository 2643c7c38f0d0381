"""A serving backend whose requests' keys are spread over several GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .. import array
from ..core import dtypes
from ..core.key_share import KeyShare
from ..core.tracing import untraced
from ..distributed import Group, StateExchange
from ..distributed.gather import HeadGather
from ..errors import UnsupportedError
from ..shares import get_share_seq_lens
from .attend import Cache, Call, Workspace
from .backend import AttentionBackend
from .metadata import AttentionMetadata, ForwardMetadata
from .modes import BackendConfig, BatchInfo, ForwardMode, LayerSpec
from .store import Store

_MODES = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE


class ContextParallelBackend(AttentionBackend):
    """`AttentionBackend` of one of several GPUs that hold the keys of every request together.

    Parameters
    ----------
    group
        The ranks, all of which make this backend and call it alike, in one order.
    config
        As there; num_q_heads are those of all ranks, of which each has as many.
    pool
        Keys and values of this rank's tokens.
    req_to_token
        int32 [max_reqs, columns]: the slots of this rank's tokens of a request, one behind the
        other.
    max_num_tokens
        Query tokens of a step at most.
    cp_kv_cache_interleave_size
        Tokens that go to a rank in a run, see `cupyattn.shares`.
    q_is_replicated
        Whether `forward` is given the queries of all heads; else they are gathered.
    timeout, uses_windows
        As in `distributed.StateExchange`.

    Raises
    ------
    CupyAttnError
        UnsupportedError for other modes, and for configurations with drafts, chunks, encoders, or a
        second pool.

    Notes
    -----
    Batches have whole lengths: `seq_lens` counts the keys of all ranks. The slots that a step
    writes to are this rank's, -1 for tokens of other ranks (`shares.get_share_slots`). Modes are
    DECODE, EXTEND and MIXED, by which drafts that do not branch are verified too.
    """

    def __init__(
        self,
        group: Group,
        config: BackendConfig,
        pool: Any,
        req_to_token: Any,
        *,
        max_num_tokens: int,
        cp_kv_cache_interleave_size: int = 1,
        q_is_replicated: bool = False,
        timeout: float = 1.0,
        uses_windows: bool | None = None,
    ) -> None:
        _refuse(config)
        super().__init__(config, pool, req_to_token)
        self.group, self.q_is_replicated = group, q_is_replicated
        self.share = KeyShare(group.size, group.rank, cp_kv_cache_interleave_size)
        group.handshake(
            {
                "cp_kv_cache_interleave_size": self.share.cp_kv_cache_interleave_size,
                "q_is_replicated": q_is_replicated,
                "page_size": config.page_size,
                "num_kv_heads": config.num_kv_heads,
            }
        )
        _, _, _, dim_v = config.shape_of(LayerSpec())
        self.exchange = StateExchange(
            group,
            max_num_tokens,
            config.num_q_heads,
            dim_v,
            out_dtype="bfloat16" if config.q_dtype is None else config.q_dtype,
            timeout=timeout,
            uses_windows=uses_windows,
        )
        self.gather = HeadGather(self.exchange)
        self.can_capture = self.exchange.can_capture
        # By the number of requests: this rank's lengths, and whole ones, where graphs find them.
        self._lens: dict[int, tuple[Any, Any]] = {}

    # --- metadata ---

    @untraced
    def init_forward_metadata(self, batch: BatchInfo) -> ForwardMetadata:
        """As in AttentionBackend, of whole lengths; three launches."""
        return super().init_forward_metadata(self._of_share(batch))

    def init_forward_metadata_capture(
        self, bs: int, num_tokens: int, mode: ForwardMode, batch: BatchInfo | None = None
    ) -> ForwardMetadata:
        """As in AttentionBackend."""
        meta = super().init_forward_metadata_capture(bs, num_tokens, mode, batch)
        return self._with_whole_lens(meta)

    @untraced
    def init_forward_metadata_replay(self, bs: int, batch: BatchInfo) -> ForwardMetadata:
        """As in AttentionBackend, of whole lengths; three launches."""
        return super().init_forward_metadata_replay(bs, self._of_share(batch))

    def _of_share(self, batch: BatchInfo) -> BatchInfo:
        """The batch with this rank's lengths, in memory that stays."""
        if batch.mode not in _MODES:
            raise UnsupportedError(
                f"mode: got {batch.mode!r} where {self.group.size} ranks share the keys; wanted "
                "DECODE, EXTEND or MIXED"
            )
        share, whole = self.share, batch.seq_lens
        own, kept = self._buffers(whole.shape[0])
        get_share_seq_lens(
            whole, share.cp_world_size, share.cp_rank, share.cp_kv_cache_interleave_size, out=own
        )
        get_share_seq_lens(whole, 1, 0, out=kept)
        of_host = batch.seq_lens_host
        if of_host is not None:
            of_host = share.count(np.asarray(of_host))
        return replace(batch, seq_lens=own, seq_lens_host=of_host)

    def _buffers(self, bs: int) -> tuple[Any, Any]:
        buffers = self._lens.get(bs)
        if buffers is None:
            like = self._tables.req_to_token
            own, whole = (array.from_numpy(np.ones(bs, np.int32), like) for _ in "ab")
            buffers = self._lens[bs] = own, whole
        return buffers

    def _use(self, store: Store, bs: int, step: int, batch: BatchInfo) -> ForwardMetadata:
        return self._with_whole_lens(super()._use(store, bs, step, batch))

    def _with_whole_lens(self, meta: ForwardMetadata) -> ForwardMetadata:
        main: AttentionMetadata = meta.main
        if main.key_share is None and not self.share.is_whole:
            whole = self._buffers(meta.batch_size)[1]
            meta.main = replace(main, key_share=self.share, whole_lens=whole)
        return meta

    # --- layers ---

    @untraced
    def forward(
        self,
        q: Any,
        layer: LayerSpec,
        meta: ForwardMetadata | None = None,
        out: Any = None,
        *,
        q_rope: Any = None,
        return_lse: bool = False,
        lse_layout: str = "ht",
    ) -> Any:
        """Attention of a layer over the keys of all ranks.

        Parameters
        ----------
        q, q_rope
            Of this rank's heads, [tokens, num_q_heads / ranks, columns], or of all heads with
            q_is_replicated.
        out
            [tokens, num_q_heads / ranks, v_head_dim] to write.
        return_lse
            Also give the LSE of this rank's heads, in base 2.
        layer, meta, lse_layout
            As in `AttentionBackend.forward`.

        Returns
        -------
        result
            out of this rank's heads, or (out, lse). `gather_output` has those of all ranks.
        """
        group, exchange = self.group, self.exchange
        group.check()
        views = [array.view(x, "q") for x in (q, q_rope) if x is not None]
        rows = views[0].shape[0]
        if rows:
            exchange.meet(rows, views[0])
        if rows and not self.q_is_replicated and group.size > 1:
            gathered = self.gather(views)
            q, q_rope = gathered[0], gathered[1] if len(gathered) > 1 else None
        shape = rows, exchange.num_heads, exchange.head_dim
        o = array.empty(shape, dtypes.float32, views[0])
        _, lse = super().forward(q, layer, meta, o, q_rope=q_rope, return_lse=True, lse_layout="th")
        out, lse = exchange.run(o, lse, out, return_lse=True)
        if not return_lse:
            return out
        return out, lse.swapaxes(0, 1) if lse_layout == "ht" else lse

    def gather_output(self, out: Any) -> Any:
        """[tokens, num_q_heads, v_head_dim] of the outputs of all ranks."""
        v = array.view(out, "out")
        if self.group.size == 1 or not v.shape[0]:
            return out
        return self.gather([v])[0]

    @staticmethod
    def _attend_to_share(
        calls: list[Call],
        q: Any,
        q_rope: Any,
        caches: list[Cache],
        out: Any,
        return_lse: bool,
        lse_layout: str,
        workspace: Workspace,
    ) -> Any:
        """(out, lse [rows, heads]) in base 2, as they are exchanged."""
        return calls[0].run(q, q_rope, caches[0], out, None, True, workspace.memory)

    _attend: ClassVar[Callable[..., Any]] = _attend_to_share


def _refuse(config: BackendConfig) -> None:
    refused = {
        "topk": config.has_beams,
        "num_draft_tokens": config.num_draft_tokens > 0,
        "num_draft_steps": config.num_draft_steps > 0,
        "attention_chunk_size": config.attention_chunk_size is not None,
        "has_encoder": config.has_encoder,
        "is_hybrid": config.is_hybrid,
    }
    for name, is_set in refused.items():
        if is_set:
            raise UnsupportedError(
                f"{name}: got {getattr(config, name)} where ranks share the keys; leave it out"
            )

"""mini-sglang: `register()` adds attention_backend="cupyattn".

In a program::

    import cupyattn.integrations.minisgl

    cupyattn.integrations.minisgl.register()
    llm = LLM(path, attention_backend="cupyattn")

Examples: :doc:`/docs/integrations/minisgl`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.packages import needs
from ..serving import AttentionBackend, BackendConfig, BatchInfo, ForwardMode, LayerSpec
from ..serving.pools import write_slots
from .engines import joined

NAME = "cupyattn"


@needs("minisgl")
def register(name: str = NAME) -> None:
    """Make attention_backend="cupyattn" known to mini-sglang, in this process, before its engine is
    made. A second call changes nothing.

    "cupyattn" serves prompts and decoding. In a pair of names ("fa,cupyattn") it serves one.
    """
    from minisgl.attention import SUPPORTED_ATTENTION_BACKENDS

    if name not in SUPPORTED_ATTENTION_BACKENDS.supported_names():
        SUPPORTED_ATTENTION_BACKENDS.register(name)(create)


def create(config: Any) -> Any:
    """The backend of an engine, for a model's config."""
    from minisgl.attention import BaseAttnBackend

    return joined("CupyAttnBackend", Backend, BaseAttnBackend)(config)


class Metadata:
    """A batch as `prepare_metadata` found it.

    Parameters
    ----------
    batch
        What the serving backend is told.
    cu_seqlens_q
        int32 [requests + 1], on the device.
    is_written
        Whether the metadata of its launches is in place.
    """

    def __init__(self, batch: BatchInfo, cu_seqlens_q: Any) -> None:
        self.batch, self.cu_seqlens_q = batch, cu_seqlens_q
        self.is_written = False

    def get_last_indices(self, bs: int) -> Any:
        """[bs] the row of the last token of each request."""
        return self.cu_seqlens_q[1 : 1 + bs] - 1


class Backend:
    """mini-sglang's five verbs over cupyattn.serving.

    The scheduler prepares a batch on its own stream while the engine still runs the one before.
    Metadata lies in memory that all batches share, so it is written by the engine's stream: by the
    first layer of a batch, or before a graph is replayed.
    """

    def __init__(self, config: Any) -> None:
        from minisgl.core import get_global_ctx
        from minisgl.distributed import get_tp_info

        context = get_global_ctx()
        self.pool = Pool(context.kv_cache)
        self.device = context.kv_cache.device
        self.core = AttentionBackend(
            BackendConfig(
                config.num_qo_heads // get_tp_info().size,
                context.kv_cache.k_cache(0).shape[-2],
                config.head_dim,
                page_size=context.page_size,
                max_context_len=context.page_table.shape[1],
            ),
            self.pool,
            context.page_table,
        )
        self.layers: dict[int, LayerSpec] = {}

    def prepare_metadata(self, batch: Any) -> None:
        """Send the lengths of a batch to the device, in one copy."""
        from minisgl.attention import BaseAttnMetadata

        cls = joined("CupyAttnMetadata", Metadata, BaseAttnMetadata)
        batch.attn_metadata = cls(*self._send(batch.padded_reqs, batch.is_decode))

    def _send(self, requests: list[Any], is_decode: bool) -> tuple[BatchInfo, Any]:
        count = len(requests)
        numbers = np.empty(4 * count + 1, np.int32)
        rows, lens, new, offsets = np.split(numbers, (count, 2 * count, 3 * count))
        rows[:] = [request.table_idx for request in requests]
        lens[:] = [request.device_len for request in requests]
        new[:] = [request.extend_len for request in requests]
        offsets[0], offsets[1:] = 0, new.cumsum()
        sent = _to_device(numbers, self.device)
        batch = BatchInfo(
            ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            sent[:count],
            sent[count : 2 * count],
            seq_lens_host=lens,
        )
        if not is_decode:
            batch.extend_seq_lens = sent[2 * count : 3 * count]
            batch.extend_seq_lens_host = new
        return batch, sent[3 * count :]

    def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
        """Write k and v, [rows, kv_heads * head_dim], and attend. q is [rows, heads, head_dim]."""
        metadata = batch.attn_metadata
        if not metadata.is_written:
            self.core.init_forward_metadata(metadata.batch)
            metadata.is_written = True
        layer = self.layers.get(layer_id)
        if layer is None:
            layer = self.layers[layer_id] = LayerSpec(layer_id)
        self.core.write_kv(layer, batch.out_loc, k, v)
        return self.core.forward(q, layer)

    # --- graphs ---

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        """Memory for graphs of decoding."""
        self.core.init_graph_state(max(bs_list), max(bs_list), (ForwardMode.DECODE,))

    def prepare_for_capture(self, batch: Any) -> None:
        self.prepare_metadata(batch)
        info = batch.attn_metadata.batch
        self.core.init_forward_metadata_capture(batch.size, batch.size, info.mode, info)
        batch.attn_metadata.is_written = True

    def prepare_for_replay(self, batch: Any) -> None:
        metadata = batch.attn_metadata
        self.core.init_forward_metadata_replay(batch.padded_size, metadata.batch)
        metadata.is_written = True


class Pool:
    """mini-sglang's KV cache as cupyattn.serving asks for one."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """K and V of a layer, [pages, page_size, kv_heads, head_dim]."""
        return self.cache.k_cache(layer_id), self.cache.v_cache(layer_id)

    def set_kv_buffer(
        self, layer: Any, loc: Any, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        buffers = self.get_kv_buffer(layer.layer_id)
        heads, dim = buffers[0].shape[-2:]
        write_slots(buffers, loc, k.view(-1, heads, dim), v.view(-1, heads, dim))


def _to_device(numbers: np.ndarray, device: Any) -> Any:
    """Numbers of the host as a tensor on the device, without waiting."""
    import torch

    sent = torch.from_numpy(numbers)
    if device.type == "cuda":
        sent = sent.pin_memory()
    return sent.to(device, non_blocking=True)

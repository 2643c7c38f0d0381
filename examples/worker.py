"""A model with its keys in pages, and CUDA graphs of what it does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    ForwardMode,
    LayerSpec,
    MHATokenToKVPool,
)

from .model import Llama


class Worker:
    """Prepares attention once a step, then runs all layers: each writes its keys and attends.

    step_backends   with drafts: of each level but the last, whose tokens no model needs to read
    """

    def __init__(
        self, model: Llama, num_pages: int, page_size: int, req_to_token: Tensor, **drafts: int
    ) -> None:
        shape, dtype = model.shape, str(model.weights["embed"].dtype).removeprefix("torch.")
        self.model, self.req_to_token = model, req_to_token
        self.pool = MHATokenToKVPool(
            *(num_pages * page_size, shape.kv_heads, shape.head_dim, shape.layers, req_to_token),
            dtype=dtype,
        )
        config = BackendConfig(
            *(shape.heads, shape.kv_heads, shape.head_dim),
            page_size=page_size,
            max_context_len=req_to_token.shape[1],
            q_dtype=dtype,
            **drafts,
        )
        self.layers = [LayerSpec(layer) for layer in range(shape.layers)]
        self.backend, *self.step_backends = (
            AttentionBackend(config, self.pool, req_to_token, step=max(0, step))
            for step in range(-1, config.num_draft_steps)
        )

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """Hidden states [n, width] of tokens [n] whose keys go to slots [n]. The metadata of the
        backend says which keys they see."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.write_kv(self.layers[layer], slots, k, v)
            return backend.forward(q, self.layers[layer])

        return self.model.hidden(tokens, positions, attend)

    def extend(
        self, mode: ForwardMode, tokens: Tensor, requests: Tensor, host_counts: np.ndarray
    ) -> Tensor:
        """Logits [bs, vocab] of the last token of each request.

        tokens       [3, n]: tokens, positions, rows of req_to_token
        requests     [3, bs]: rows, keys with these tokens, and how many tokens there are of each
        host_counts  the latter, or in a graph the most that they can be
        """
        (words, positions, owners), (rows, lens, counts) = tokens, requests
        info = BatchInfo(mode, rows, lens, extend_seq_lens=counts, extend_seq_lens_host=host_counts)
        if mode is ForwardMode.DRAFT_EXTEND:
            self.backend.init_forward_metadata_replay(len(rows), info)
        else:
            self.backend.init_forward_metadata(info)
        hidden = self.run(words, positions, self.req_to_token[owners, positions], self.backend)
        return self.model.logits(hidden[counts.cumsum(0) - 1])


class Replayed:
    """A step of fixed shapes. With has_graphs it is captured once for each shape, then replayed."""

    def __init__(self, step: Callable[..., Tensor], has_graphs: bool) -> None:
        self.step, self.has_graphs, self.graphs = step, has_graphs, {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.has_graphs:
            return self.step(*inputs)
        key = tuple(x.shape for x in inputs)
        if key not in self.graphs:
            own, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            self.step(*own)  # compiles kernels, which a capture cannot
            with torch.cuda.graph(graph):
                output = self.step(*own)
            self.graphs[key] = graph, own, output
        graph, own, output = self.graphs[key]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return output

"""A model with its keys in pages, and CUDA graphs of what it does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyattn import serving
from cupyattn.distributed import Group
from cupyattn.serving import BatchInfo, ForwardMode
from cupyattn.shares import get_share_slots

from .model import Llama


class Limits(NamedTuple):
    """max_batch requests run at a time; a prefill step computes at most `chunk` tokens."""

    max_batch: int
    max_context: int
    chunk: int
    num_pages: int
    page_size: int


class TreeShape(NamedTuple):
    """topk beams grow for `depth` levels. The likeliest num_tokens are verified, of which the
    first is the request's last token."""

    topk: int
    depth: int
    num_tokens: int


NO_DRAFTS = TreeShape(topk=1, depth=1, num_tokens=0)


class Worker:
    """Prepares attention once a step, then runs all layers: each writes its keys and attends.

    step_backends   of each level of drafts but the last, whose tokens nobody needs to read
    group           ranks that share the keys of all requests; None: all are here
    """

    def __init__(
        self, model: Llama, limits: Limits, tree: TreeShape, req_to_token: Tensor,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        self.model, self.req_to_token, self.group, shape = model, req_to_token, group, model.shape
        dtype = model.weights["embed"].dtype
        slots, heads = limits.num_pages * limits.page_size, (shape.kv_heads, shape.head_dim)
        pool = slots, *heads, shape.layers, req_to_token
        self.pool = serving.MHATokenToKVPool(*pool, dtype=dtype)
        for layer in range(shape.layers):  # padding reads page 0 before it has written all of it
            for x in self.pool.get_kv_buffer(layer):
                x[: limits.page_size].zero_()
        # Specs are made once: a backend knows a layer by its spec's identity.
        self.layers = [serving.LayerSpec(layer) for layer in range(shape.layers)]
        config = serving.BackendConfig(
            *(shape.heads, *heads), page_size=limits.page_size, q_dtype=dtype,
            max_context_len=limits.max_context, topk=tree.topk, num_draft_steps=tree.depth - 1,
            num_draft_tokens=tree.num_tokens,
        )  # fmt: skip
        # Decode steps use the memory of graphs, eager ones too: they are the same code.
        over = config, self.pool, req_to_token
        if group is None:
            self.backend = serving.AttentionBackend(*over)
        else:  # every rank has the whole model, so the queries of all heads
            most = max(limits.chunk, limits.max_batch)
            self.backend = serving.ContextParallelBackend(
                group, *over, max_num_tokens=most, q_is_replicated=True
            )
        steps = range(tree.depth - 1)
        self.step_backends = [serving.AttentionBackend(*over, step=step) for step in steps]
        most = limits.max_batch * max(tree.num_tokens, tree.topk, tree.depth + 1)
        for backend in (self.backend, *self.step_backends):
            backend.init_graph_state(limits.max_batch, most)

    def run(self, tokens: Tensor, positions: Tensor, slots: Tensor, backend: Any) -> Tensor:
        """Hidden states [n, width] of tokens [n] whose keys go to slots [n]. The metadata of the
        backend says which keys they see."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.write_kv(self.layers[layer], slots, k, v)
            out = backend.forward(q, self.layers[layer])
            return out if self.group is None else backend.gather_output(out)

        return self.model.hidden(tokens, positions, attend)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where keys of tokens at positions of requests go: -1 for what other ranks hold."""
        if self.group is None:
            return self.req_to_token[rows, positions]
        index = get_share_slots(positions, self.group.size, self.group.rank)
        return self.req_to_token[rows, index.clamp(min=0)].where(index >= 0, -1)

    def extend(self, mode: ForwardMode, tokens: Tensor, requests: Tensor, bounds: Any) -> Tensor:
        """Logits [bs, vocab] of the last token of each request.

        tokens    [3, n]: tokens, positions, rows of req_to_token
        requests  [3, bs]: rows, keys with these tokens, and how many tokens there are of each
        bounds    the latter in NumPy, or in a graph the most that they can be
        """
        (words, positions, owners), (rows, lens, counts) = tokens, requests
        info = BatchInfo(mode, rows, lens, extend_seq_lens=counts, extend_seq_lens_host=bounds)
        if mode is ForwardMode.DRAFT_EXTEND:
            self.backend.init_forward_metadata_replay(len(rows), info)
        else:
            self.backend.init_forward_metadata(info)
        hidden = self.run(words, positions, self.slots(owners, positions), self.backend)
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
            gc.collect()  # what is freed while a graph is captured may end the capture
            with torch.cuda.graph(graph):
                output = self.step(*own)
            self.graphs[key] = graph, own, output
        graph, own, output = self.graphs[key]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return output

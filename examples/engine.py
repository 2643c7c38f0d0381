"""A serving engine in one file: continuous batching over pages, chunked prefill, graphs, drafts.

A step prepares the attention of a batch once (`init_forward_metadata...`) and then runs all layers,
each of which writes its keys (`write_kv`) and attends (`forward`). Nothing in a step waits for the
GPU but the copy of the new tokens to the host at its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    DraftInfo,
    ForwardMode,
    LayerSpec,
    MHATokenToKVPool,
)

from . import drafts
from .model import Llama
from .pages import Pages, Request

Span = tuple[Request, int, int]  # tokens of a request from a start to an end


@dataclass(frozen=True)
class Limits:
    """max_batch requests at a time; chunk: tokens of a prefill step at most."""

    max_batch: int
    max_context: int
    chunk: int
    num_pages: int
    page_size: int = 16


@dataclass
class Stats:
    """Tokens and seconds of steps with prompts in them, and of the others."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decoded_requests: int = 0  # summed over decode steps
    num_reused: int = 0


class Worker:
    """A model and its keys."""

    def __init__(
        self, model: Llama, limits: Limits, req_to_token: torch.Tensor, **drafts: int
    ) -> None:
        shape, dtype = model.shape, str(model.weights["embed"].dtype).removeprefix("torch.")
        heads = shape.kv_heads, shape.head_dim
        self.model, self.req_to_token = model, req_to_token
        self.config = BackendConfig(
            *(shape.heads, *heads),
            page_size=limits.page_size,
            max_context_len=limits.max_context,
            q_dtype=dtype,
            **drafts,
        )
        num_slots = limits.num_pages * limits.page_size
        self.pool = MHATokenToKVPool(num_slots, *heads, shape.layers, req_to_token, dtype=dtype)
        self.layers = [LayerSpec(layer) for layer in range(shape.layers)]
        self.backend = self.make_backend()

    def make_backend(self, step: int = 0) -> AttentionBackend:
        return AttentionBackend(self.config, self.pool, self.req_to_token, step=step)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        backend: AttentionBackend | None = None,
    ) -> torch.Tensor:
        """Hidden states [n, width] of tokens whose keys go to `slots`, all [n]. The backend's
        metadata says which keys they see."""
        backend = backend or self.backend

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            backend.write_kv(self.layers[layer], slots, k, v)
            return backend.forward(q, self.layers[layer])

        return self.model.hidden(tokens, positions, attend)

    def extend(
        self, mode: ForwardMode, tokens: torch.Tensor, requests: torch.Tensor, host_lens: np.ndarray
    ) -> torch.Tensor:
        """Logits [bs, vocab] of the last token of each request's span.

        tokens     [3, n]: tokens, positions and rows of req_to_token
        requests   [3, bs]: rows, keys with these tokens, and how many tokens are of a request
        host_lens  the latter, or what bounds it in a graph
        """
        (words, positions, owners), (rows, lens, counts) = tokens, requests
        info = BatchInfo(
            mode, rows, lens, extend_seq_lens=counts, extend_seq_lens_host=host_lens
        )
        if mode is ForwardMode.DRAFT_EXTEND:
            self.backend.init_forward_metadata_replay(len(rows), info)
        else:
            self.backend.init_forward_metadata(info)
        hidden = self.run(words, positions, self.req_to_token[owners, positions])
        return self.model.logits(hidden[counts.cumsum(0) - 1])


class Replayed:
    """A step of fixed shapes. On a GPU it is captured once for each shape, then replayed."""

    def __init__(self, step: Callable[..., torch.Tensor], is_captured: bool) -> None:
        self._step, self._is_captured = step, is_captured
        self._graphs: dict[tuple[torch.Size, ...], tuple] = {}

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not self._is_captured:
            return self._step(*inputs)
        key = tuple(x.shape for x in inputs)
        if key not in self._graphs:
            own = [x.clone() for x in inputs]
            self._step(*own)  # compiles what a capture cannot
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self._step(*own)
            self._graphs[key] = graph, own, output
        graph, own, output = self._graphs[key]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return output


class Engine:
    """Serves requests with a model, greedily.

    draft        a model that guesses, and the shape of its trees; None: a token a step
    has_graphs   whether decode steps are CUDA graphs
    """

    def __init__(
        self,
        model: Llama,
        limits: Limits,
        draft: tuple[Llama, drafts.TreeShape] | None = None,
        has_graphs: bool = False,
    ) -> None:
        self.limits, self.stats = limits, Stats()
        self.device = model.weights["embed"].device
        # Row 0 is of requests that pad a batch; its columns are all slot 0, in a page of nobody.
        table = (1 + limits.max_batch, limits.max_context)
        self.req_to_token = torch.zeros(table, dtype=torch.int32, device=self.device)
        self.padding = Request([0], 1, tokens=[0, 0], num_keys=1, num_draft_keys=1)
        self.pages = Pages(limits.num_pages, limits.page_size)
        self.free_rows = list(range(1, 1 + limits.max_batch))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

        size = limits.max_batch
        self.tree, self.draft = None, None
        modes = (ForwardMode.DECODE,)
        options = {}
        if draft is not None:
            draft_model, self.tree = draft
            modes = (ForwardMode.TARGET_VERIFY,)
            options = {"topk": self.tree.topk, "num_draft_tokens": self.tree.num_tokens}
            steps = self.tree.depth - 1
            self.draft = Worker(
                *(draft_model, limits, self.req_to_token),
                topk=self.tree.topk,
                num_draft_steps=steps,
            )
            most = size * (self.tree.depth + 1)
            self.draft.backend.init_graph_state(size, most, (ForwardMode.DRAFT_EXTEND,))
            self.draft_backends = [self.draft.make_backend(step) for step in range(steps)]
            for backend in self.draft_backends:
                backend.init_graph_state(size, size * self.tree.topk, (ForwardMode.DRAFT_DECODE,))
        self.target = Worker(model, limits, self.req_to_token, **options)
        self.target.backend.init_graph_state(size, size * options.get("num_draft_tokens", 1), modes)
        self.decode = Replayed(self._decode, has_graphs)
        self.speculate = Replayed(self._speculate, has_graphs)

    # --- the scheduler ---

    def serve(self, requests: list[Request], progress: Callable[[int], None]) -> None:
        """Answer all requests. progress: is told the tokens of each step."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            before = sum(len(request.tokens) for request in self.running)
            self._admit()
            self._step()
            progress(sum(len(request.answer) for request in self.running) - before)
            self._retire()

    def _admit(self) -> None:
        """Let waiting requests in, as long as there are rows, and pages for their longest answer."""
        slack = self.tree.num_columns if self.tree else 0
        size = self.limits.page_size
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            num_tokens = len(request.prompt) + request.max_new_tokens + slack
            if not self.pages.admit(request, num_tokens):
                if not self.running:
                    raise MemoryError(f"a request of {num_tokens} tokens has no room")
                return
            self.running.append(self.waiting.popleft())
            request.row = self.free_rows.pop()
            self.stats.num_reused += request.num_reused
            pages = torch.tensor(request.pages, dtype=torch.int32, device=self.device)
            slots = pages[:, None] * size + torch.arange(size, device=self.device)
            self.req_to_token[request.row, : slots.numel()] = slots.flatten()

    def _retire(self) -> None:
        for request in [request for request in self.running if request.is_done]:
            del request.tokens[len(request.prompt) + request.max_new_tokens :]
            request.num_keys = min(request.num_keys, len(request.tokens) - 1)
            self.running.remove(request)
            self.pages.release(request)
            self.free_rows.append(request.row)

    def _step(self) -> None:
        is_prefill = any(request.is_prefilling for request in self.running)
        begin = time.perf_counter()
        stats = self.stats
        if is_prefill:
            stats.prefill_tokens += self._extend_step()
            stats.prefill_seconds += time.perf_counter() - begin
        else:
            stats.decoded_requests += len(self.running)
            stats.decode_tokens += self._speculate_step() if self.tree else self._decode_step()
            stats.decode_seconds += time.perf_counter() - begin

    def _extend_step(self) -> int:
        """One token of each request that decodes, and as much of prompts as the chunk has room for.
        Returns how many tokens were computed."""
        room, spans = self.limits.chunk, []
        for request in sorted(self.running, key=lambda request: request.is_prefilling):
            end = min(len(request.tokens), request.num_keys + room)
            if end > request.num_keys:
                spans.append((request, request.num_keys, end))
                room -= end - request.num_keys
        is_mixed = any(not request.is_prefilling for request, _, _ in spans)
        mode = ForwardMode.MIXED if is_mixed else ForwardMode.EXTEND
        words = self._extend(self.target, mode, spans).argmax(-1).tolist()
        if self.draft is not None:
            drafted = [(request, request.num_draft_keys, end) for request, _, end in spans]
            self._extend(self.draft, mode, drafted)
        for (request, _, end), word in zip(spans, words, strict=True):
            request.num_keys = request.num_draft_keys = end
            if end == len(request.tokens):
                request.tokens.append(word)
                self.pages.share(request)
        return self.limits.chunk - room

    def _decode_step(self) -> int:
        requests = self._padded()
        batch = [[r.tokens[-1], r.row, len(r.tokens)] for r in requests]
        words = self.decode(self._put(batch).T.contiguous()).tolist()
        for request, word in zip(self.running, words, strict=False):
            request.num_keys = request.num_draft_keys = len(request.tokens)
            request.tokens.append(word)
        return len(self.running)

    def _speculate_step(self) -> int:
        """The draft model reads what is new to it, drafts a tree, and the target model verifies."""
        assert self.tree is not None
        requests = self._padded()
        spans = [(r, r.num_draft_keys, len(r.tokens)) for r in requests]
        tokens, batch = self._inputs(spans, len(requests) * (self.tree.depth + 1))
        found = self.speculate(tokens, batch).tolist()
        num_tokens = 0
        for request, (count, *words) in zip(self.running, found, strict=False):
            request.num_draft_keys = len(request.tokens)
            request.num_keys += count
            request.tokens += words[:count]
            num_tokens += count
        return num_tokens

    # --- steps on the device ---

    def _decode(self, batch: torch.Tensor) -> torch.Tensor:
        """The next words [bs]. batch [3, bs]: last tokens, rows, and lengths with them."""
        tokens, rows, lens = batch
        info = BatchInfo(ForwardMode.DECODE, rows, lens)
        self.target.backend.init_forward_metadata_replay(len(rows), info)
        hidden = self.target.run(tokens, lens - 1, self.req_to_token[rows, lens - 1])
        return self.target.model.logits(hidden).argmax(-1)

    def _speculate(self, tokens: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """[bs, 1 + depth + 1]: how many words a request gets, and the words. The arguments are
        those of Worker.extend, for the tokens that the draft model has not read."""
        assert self.tree is not None and self.draft is not None
        shape, target, (rows, lens, _) = self.tree, self.target, batch
        bs = len(rows)
        # Draft.
        most = np.full(bs, shape.depth + 1)
        logits = self.draft.extend(ForwardMode.DRAFT_EXTEND, tokens, batch, most)
        last_tokens = tokens[0][batch[2].cumsum(0) - 1]
        beams = self.draft_backends
        tree = drafts.grow(self.draft, beams, shape, (rows, lens), last_tokens, logits)
        # Verify: the root is the last token, whose keys the target model does not have yet.
        lens = lens - 1
        columns = lens[:, None] + torch.arange(shape.num_tokens, device=self.device)
        slots = self.req_to_token[rows[:, None], columns]
        draft = DraftInfo(tree_mask=tree.seen)
        info = BatchInfo(ForwardMode.TARGET_VERIFY, rows, lens, draft=draft)
        target.backend.init_forward_metadata_replay(bs, info)
        positions = lens[:, None] + tree.depths
        hidden = target.run(tree.tokens.flatten(), positions.flatten(), slots.flatten())
        words = target.model.logits(hidden).argmax(-1).view(bs, -1)
        # Accept, and move the accepted keys to the columns that they have from now on.
        path, counts = drafts.accept(tree, words, shape.depth)
        places = torch.arange(path.shape[1], device=self.device)
        source = torch.where(places < counts[:, None], path, places)
        old, new = slots.gather(1, source).flatten(), slots[:, : len(places)].flatten()
        for layer in range(target.model.shape.layers):
            for keys_or_values in target.pool.get_kv_buffer(layer):
                keys_or_values[new] = keys_or_values[old]
        return torch.cat((counts[:, None], words.gather(1, path)), 1)

    def _extend(self, worker: Worker, mode: ForwardMode, spans: list[Span]) -> torch.Tensor:
        counts = np.array([end - start for _, start, end in spans])
        return worker.extend(mode, *self._inputs(spans, int(counts.sum())), counts)

    # --- from the host to the device ---

    def _padded(self) -> list[Request]:
        """The running requests, padded to a power of two so that few graphs serve all batches."""
        size = min(1 << (len(self.running) - 1).bit_length(), self.limits.max_batch)
        return self.running + [self.padding] * (size - len(self.running))

    def _inputs(self, spans: list[Span], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What Worker.extend takes, padded to num_tokens with tokens of nobody."""
        tokens = [
            (r.tokens[position], position, r.row) for r, start, end in spans
            for position in range(start, end)
        ]  # fmt: skip
        tokens += [(0, 0, 0)] * (num_tokens - len(tokens))
        requests = [(r.row, end, end - start) for r, start, end in spans]
        return self._put(tokens).T.contiguous(), self._put(requests).T.contiguous()

    def _put(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

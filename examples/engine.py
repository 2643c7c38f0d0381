"""An engine: continuous batching over pages, chunked prefill, and decode steps as CUDA graphs.

Nothing in a step waits for the GPU but the copy of new words to the host at its end.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cupyattn.distributed import Group
from cupyattn.serving import BatchInfo, DraftInfo, ForwardMode

from . import drafts
from .model import Llama
from .pages import Pages, Request
from .worker import NO_DRAFTS, Limits, Replayed, TreeShape, Worker

Span = tuple[Request, int, int]  # tokens of a request from a start to an end


class Engine:
    """Serves requests with a model, greedily.

    draft_model  guesses trees of words; None: a word a step
    has_graphs   whether steps without prompts are CUDA graphs
    group        ranks that share the keys of all requests, each with an engine like this one. A
                 page then stands for as many tokens on each of them
    stats        tokens, seconds and requests, summed over "prefill" steps, which have prompts in
                 them, and over "decode" steps; "reused tokens" of prompts
    """

    def __init__(
        self, model: Llama, limits: Limits, draft_model: Llama | None = None,
        tree: TreeShape = NO_DRAFTS, has_graphs: bool = False, group: Group | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.tree, self.device, self.stats = limits, tree, model.device, Counter()
        self.waiting, self.running = deque[Request](), list[Request]()
        num_ranks = 1 if group is None else group.size
        self.pages = Pages(limits.num_pages, limits.page_size * num_ranks)
        self.free_rows = list(range(1, 1 + limits.max_batch))
        # Row 0 is that of a request that pads batches. All its columns are slot 0, in page 0.
        table = torch.zeros(1 + limits.max_batch, limits.max_context, dtype=torch.int32)
        self.req_to_token = table.to(self.device)
        self.padding = Request([0, 0], 1, 2, num_keys=1, num_draft_keys=1)
        self.target = Worker(model, limits, tree, self.req_to_token, group)
        self.draft = draft_model and Worker(draft_model, limits, tree, self.req_to_token)
        self.step = Replayed(self._speculate if draft_model else self._decode, has_graphs)

    # --- the scheduler ---

    def serve(self, requests: list[Request], progress: Callable[[int, int], None]) -> None:
        """Answer all requests. progress is told how many are done, and of how many."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self._admit()
            begin = time.perf_counter()
            kind, step = "decode", self._draft_step if self.draft else self._decode_step
            if any(r.num_keys < r.prompt_len for r in self.running):
                kind, step = "prefill", self._prefill_step
            self.stats[f"{kind} requests"] += len(self.running)
            self.stats[f"{kind} tokens"] += step()
            self.stats[f"{kind} seconds"] += time.perf_counter() - begin
            self._retire()
            progress(len(requests) - len(self.waiting) - len(self.running), len(requests))

    def _admit(self) -> None:
        """Let requests in while there are rows, and pages for the longest that they can become."""
        size, tree = self.limits.page_size, self.tree
        num_draft_slots = max(tree.num_tokens, 1 + tree.topk * (tree.depth - 1))
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            if not self.pages.admit(request, request.max_len + num_draft_slots):
                if not self.running:
                    raise MemoryError(f"a request of {request.max_len} tokens has no room")
                return
            self.running.append(self.waiting.popleft())
            self.stats["reused tokens"] += request.num_keys
            request.row = self.free_rows.pop()
            pages = torch.tensor(request.pages, device=self.device)
            slots = pages[:, None] * size + torch.arange(size, device=self.device)
            self.req_to_token[request.row, : slots.numel()] = slots.flatten()

    def _retire(self) -> None:
        for request in self.running[:]:
            if len(request.tokens) >= request.max_len:
                del request.tokens[request.max_len :]
                request.num_keys = min(request.num_keys, request.max_len - 1)
                self.running.remove(request)
                self.pages.release(request)
                self.free_rows.append(request.row)

    # Each step returns how many tokens it has computed that count.

    def _prefill_step(self) -> int:
        """A word of each request that decodes, and as much of prompts as the chunk has room for."""
        room, spans = self.limits.chunk, []
        for request in sorted(self.running, key=lambda r: r.num_keys < r.prompt_len):
            if count := min(len(request.tokens) - request.num_keys, room):
                spans.append((request, request.num_keys, request.num_keys + count))
                room -= count
        is_mixed = spans[0][1] >= spans[0][0].prompt_len
        mode = ForwardMode.MIXED if is_mixed else ForwardMode.EXTEND
        words = self._extend(self.target, mode, spans).argmax(-1)
        if self.draft:
            self._extend(self.draft, mode, [(r, r.num_draft_keys, end) for r, _, end in spans])
        for (request, _, end), word in zip(spans, words.tolist(), strict=True):
            request.num_keys = request.num_draft_keys = end
            if end == len(request.tokens):
                request.tokens.append(word)
                self.pages.share(request)
        return self.limits.chunk - room

    def _decode_step(self) -> int:
        batch = [[r.tokens[-1], r.row, len(r.tokens)] for r in self._padded()]
        words = self.step(self._put(batch)).tolist()
        for request, word in zip(self.running, words, strict=False):
            request.num_keys = request.num_draft_keys = len(request.tokens)
            request.tokens.append(word)
        return len(self.running)

    def _draft_step(self) -> int:
        requests = self._padded()
        spans = [(r, r.num_draft_keys, len(r.tokens)) for r in requests]
        found = self.step(*self._inputs(spans, len(requests) * (self.tree.depth + 1))).tolist()
        for request, (count, *words) in zip(self.running, found, strict=False):
            request.num_draft_keys = len(request.tokens)
            request.num_keys += count
            request.tokens += words[:count]
        return sum(count for count, *_ in found[: len(self.running)])

    # --- steps on the device ---

    def _decode(self, batch: Tensor) -> Tensor:
        """The next words [bs]. batch [3, bs]: last tokens, rows, and lengths with these tokens."""
        tokens, rows, lens = batch
        backend = self.target.backend
        backend.init_forward_metadata_replay(len(rows), BatchInfo(ForwardMode.DECODE, rows, lens))
        slots = self.target.slots(rows, lens - 1)
        hidden = self.target.run(tokens, lens - 1, slots, backend)
        return self.target.model.logits(hidden).argmax(-1)

    def _speculate(self, tokens: Tensor, requests: Tensor) -> Tensor:
        """[bs, 1 + depth + 1]: how many words each request gets, and the words.

        The arguments are those of Worker.extend: tokens that the draft model has not read yet.
        """
        shape, target, (rows, lens, counts) = self.tree, self.target, requests
        # Draft: read what is new, and grow a tree behind it.
        most = np.full(len(rows), shape.depth + 1)
        logits = self.draft.extend(ForwardMode.DRAFT_EXTEND, tokens, requests, most)
        last = tokens[0][counts.cumsum(0) - 1]
        tree = drafts.grow(self.draft, shape, rows, lens, last, logits)
        # Verify: the tree stands behind the target model's keys, in one pass with a mask.
        columns = (lens - 1)[:, None] + torch.arange(shape.num_tokens, device=self.device)
        slots = self.req_to_token[rows[:, None], columns]
        draft = DraftInfo(tree_mask=tree.seen)
        info = BatchInfo(ForwardMode.TARGET_VERIFY, rows, lens - 1, draft=draft)
        target.backend.init_forward_metadata_replay(len(rows), info)
        positions = (lens - 2)[:, None] + tree.seen.sum(-1)
        batch = (x.flatten() for x in (tree.tokens, positions, slots))
        words = target.model.logits(target.run(*batch, target.backend)).argmax(-1)
        words = words.view(len(rows), -1)
        # Accept: keys of the right path move up to the columns that they have from now on.
        path, counts = drafts.accept(tree, words, shape.depth)
        places = torch.arange(path.shape[1], device=self.device)
        source = torch.where(places < counts[:, None], path, places)
        old, new = slots.gather(1, source).flatten(), slots[:, : len(places)].flatten()
        for layer in target.layers:
            for x in target.pool.get_kv_buffer(layer.layer_id):
                x[new] = x[old]
        return torch.cat((counts[:, None], words.gather(1, path)), 1)

    # --- from the host to the device ---

    def _padded(self) -> list[Request]:
        """The running requests and padding, a power of two: few graphs serve all batches."""
        size = min(1 << (len(self.running) - 1).bit_length(), self.limits.max_batch)
        return self.running + [self.padding] * (size - len(self.running))

    def _extend(self, worker: Worker, mode: ForwardMode, spans: list[Span]) -> Tensor:
        counts = np.array([end - start for _, start, end in spans])
        return worker.extend(mode, *self._inputs(spans, counts.sum()), counts)

    def _inputs(self, spans: list[Span], num_tokens: int) -> tuple[Tensor, Tensor]:
        """What Worker.extend takes, its tokens padded to num_tokens."""
        places = [(r, i) for r, start, end in spans for i in range(start, end)]
        places += [(self.padding, 0)] * (num_tokens - len(places))
        tokens = [[r.tokens[i], i, r.row] for r, i in places]
        requests = [[r.row, end, end - start] for r, start, end in spans]
        return self._put(tokens), self._put(requests)

    def _put(self, rows: list[list[int]]) -> Tensor:
        """The columns of a list of rows, each contiguous."""
        return torch.from_numpy(np.array(rows).T.copy()).to(self.device)

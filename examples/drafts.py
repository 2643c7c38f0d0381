"""EAGLE-style drafts: a tree of likely continuations, and the path through it that is right.

All functions work on fixed shapes and read nothing back, so that they can be in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from cupyattn.serving import AttentionBackend, BatchInfo, DraftInfo, ForwardMode

if TYPE_CHECKING:
    from .engine import Worker


@dataclass(frozen=True)
class TreeShape:
    """topk beams are grown for `depth` levels; the likeliest num_tokens are verified, of which the
    first is the request's last token."""

    topk: int
    depth: int
    num_tokens: int

    @property
    def num_columns(self) -> int:
        """Columns of req_to_token that drafts need behind a request's tokens."""
        return max(self.num_tokens, 1 + self.topk * (self.depth - 1))


class Tree(NamedTuple):
    """Drafts of each request, parents before children; the root is its own parent.

    tokens, parents   [bs, num_tokens]
    seen              bools [bs, num_tokens, num_tokens]: a token sees its ancestors and itself
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    seen: torch.Tensor

    @property
    def depths(self) -> torch.Tensor:
        return self.seen.sum(-1) - 1


def grow(
    worker: Worker,
    backends: list[AttentionBackend],
    shape: TreeShape,
    batch: tuple[torch.Tensor, torch.Tensor],
    last_tokens: torch.Tensor,
    logits: torch.Tensor,
) -> Tree:
    """Draft behind requests whose keys, the last token's included, the draft model has.

    backends   of each level but the last one, whose tokens the draft model need not read
    batch      rows and lens [bs]
    logits     [bs, vocab], what the draft model says of the last tokens
    """
    rows, lens = batch
    bs, topk, steps = len(rows), shape.topk, shape.depth - 1
    columns = lens[:, None] + torch.arange(topk * steps, device=lens.device)
    slots = worker.req_to_token[rows[:, None], columns].view(bs, topk, steps)
    beams = torch.arange(topk, device=lens.device)

    scores, tokens = logits.log_softmax(-1).topk(topk)
    # Each candidate has a number: those of the first level, then topk * topk of each level.
    numbers = beams.expand(bs, topk)
    candidates = [(scores, tokens, torch.full_like(tokens, -1))]
    # Beams change parents: the keys of a beam's path lie where earlier beams have written them.
    writers = torch.zeros(bs, topk, steps, dtype=torch.int32, device=lens.device)
    for step, backend in enumerate(backends):
        writers[:, :, step] = beams
        draft = DraftInfo(step, beam_rows=writers.view(bs * topk, steps))
        info = BatchInfo(ForwardMode.DRAFT_DECODE, rows, lens, out_cache_loc=slots, draft=draft)
        backend.init_forward_metadata_replay(bs, info)
        positions = (lens + step).repeat_interleave(topk)
        hidden = worker.run(tokens.flatten(), positions, slots[:, :, step].flatten(), backend)
        found = worker.model.logits(hidden).log_softmax(-1).topk(topk)
        # A path is as likely as all its tokens together.
        next_scores = (scores[:, :, None] + found.values.view(bs, topk, topk)).flatten(1)
        next_tokens = found.indices.view(bs, topk * topk)
        candidates.append((next_scores, next_tokens, numbers.repeat_interleave(topk, 1)))
        scores, best = next_scores.topk(topk)
        tokens = next_tokens.gather(1, best)
        numbers = topk + step * topk * topk + best
        writers = writers.gather(1, (best // topk)[..., None].expand_as(writers))
    return _likeliest(candidates, shape, last_tokens)


def _likeliest(
    candidates: list[tuple[torch.Tensor, ...]], shape: TreeShape, last_tokens: torch.Tensor
) -> Tree:
    scores, tokens, parents = (torch.cat(x, 1) for x in zip(*candidates, strict=True))
    # No child is likelier than its parent, and a stable sort keeps the parent first where they tie.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.num_tokens - 1]
    order = order.sort(dim=1).values
    parents = parents.gather(1, order)
    parents = torch.where(parents < 0, 0, torch.searchsorted(order, parents) + 1)
    tokens = torch.cat((last_tokens[:, None], tokens.gather(1, order)), 1)
    parents = torch.cat((torch.zeros_like(last_tokens)[:, None], parents), 1)

    count = shape.num_tokens
    seen = torch.eye(count, dtype=torch.bool, device=tokens.device).repeat(len(tokens), 1, 1)
    for _ in range(shape.depth):
        seen = seen | seen.gather(1, parents[:, :, None].expand(-1, -1, count))
    return Tree(tokens, parents, seen)


def accept(tree: Tree, words: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts that greedy decoding would have said.

    words   [bs, num_tokens]: what the target model says after each token of the tree

    Returns path [bs, depth + 1], tokens of the tree from the root on, and how many of them count.
    """
    is_right = tree.tokens == words.gather(1, tree.parents)
    is_right[:, 0] = True
    # Siblings differ, so that the tokens on whose way everything is right are one path.
    on_path = (is_right[:, None, :] | ~tree.seen).all(-1)
    path = on_path.int().sort(dim=1, descending=True, stable=True).indices
    return path[:, : depth + 1], on_path.sum(1)

"""EAGLE-style drafts: a tree of likely continuations, and the path through it that is right.

Shapes are fixed and nothing is read back, so that all of it can be in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cupyattn.serving import BatchInfo, DraftInfo, ForwardMode

from .worker import TreeShape, Worker


class Tree(NamedTuple):
    """Drafts of each request, parents first. The root is its own parent.

    tokens, parents   [bs, num_tokens]
    seen              bools [bs, num_tokens, num_tokens]: a token sees its ancestors and itself
    """

    tokens: Tensor
    parents: Tensor
    seen: Tensor


def grow(
    worker: Worker, shape: TreeShape, rows: Tensor, lens: Tensor, last: Tensor, logits: Tensor
) -> Tree:
    """Draft behind requests.

    rows, lens   [bs] rows of req_to_token, and keys with those of the last tokens
    last         [bs] the last tokens
    logits       [bs, vocab]: what the draft model says after them
    """
    bs, topk, steps = len(rows), shape.topk, shape.depth - 1
    columns = lens[:, None] + torch.arange(topk * steps, device=lens.device)
    slots = worker.req_to_token[rows[:, None], columns].view(bs, topk, steps)
    beams = torch.arange(topk, device=lens.device).expand(bs, topk)
    # The first level. Candidates are numbered from here on, and know the number of their parent.
    scores, tokens = logits.log_softmax(-1).topk(topk)
    numbers, candidates = beams, [(scores, tokens, torch.full_like(tokens, -1))]
    # Beams change parents, and keys stay: which beam has written the key of each step of a path.
    writers = torch.zeros(bs, topk, steps, dtype=torch.int32, device=lens.device)
    for step in range(steps):
        # Each beam reads its last token and proposes topk behind it.
        writers[:, :, step] = beams
        draft = DraftInfo(step, beam_rows=writers.view(bs * topk, steps))
        info = BatchInfo(ForwardMode.DRAFT_DECODE, rows, lens, out_cache_loc=slots, draft=draft)
        backend = worker.step_backends[step]
        backend.init_forward_metadata_replay(bs, info)
        positions = (lens + step).repeat_interleave(topk)
        hidden = worker.run(tokens.flatten(), positions, slots[:, :, step].flatten(), backend)
        found = worker.model.logits(hidden).log_softmax(-1).topk(topk)
        # All proposals are candidates. A path is as likely as all its tokens together.
        next_scores = (scores[:, :, None] + found.values.view(bs, topk, topk)).flatten(1)
        next_tokens = found.indices.view(bs, topk * topk)
        candidates.append((next_scores, next_tokens, numbers.repeat_interleave(topk, 1)))
        # The best of all beams' proposals are the next beams.
        scores, best = next_scores.topk(topk)
        tokens, numbers = next_tokens.gather(1, best), topk + step * topk * topk + best
        writers = writers.gather(1, (best // topk)[..., None].expand_as(writers))
    return _likeliest(candidates, last, shape)


def _likeliest(candidates: list[tuple[Tensor, ...]], last: Tensor, shape: TreeShape) -> Tree:
    """The tree of the best candidates. A child is never likelier than its parent, and a stable sort
    puts the parent first where they tie, so that no parent is missing."""
    scores, tokens, parents = (torch.cat(x, 1) for x in zip(*candidates, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.num_tokens - 1]
    order = order.sort(dim=1).values  # level by level, parents first
    parents = parents.gather(1, order)
    parents = torch.where(parents < 0, 0, torch.searchsorted(order, parents) + 1)
    # The root goes before them.
    tokens = torch.cat((last[:, None], tokens.gather(1, order)), 1)
    parents = torch.cat((torch.zeros_like(last)[:, None], parents), 1)
    seen = torch.eye(shape.num_tokens, dtype=torch.bool, device=tokens.device)
    seen = seen.repeat(len(tokens), 1, 1)
    for _ in range(shape.depth):
        seen = seen | seen.gather(1, parents[:, :, None].expand_as(seen))
    return Tree(tokens, parents, seen)


def accept(tree: Tree, words: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The drafts that greedy decoding would have said, from what the target model says after each
    token of the tree: words [bs, num_tokens].

    Returns path [bs, depth + 1], tokens of the tree from the root on, and how many of it count.
    """
    is_right = tree.tokens == words.gather(1, tree.parents)
    is_right[:, 0].fill_(True)
    # Siblings differ. So the tokens that see nothing wrong are one path.
    is_accepted = (is_right[:, None, :] | ~tree.seen).all(-1)
    path = is_accepted.int().sort(dim=1, descending=True, stable=True).indices
    return path[:, : depth + 1], is_accepted.sum(1)

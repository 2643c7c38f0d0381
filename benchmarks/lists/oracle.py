"""float64 answers of sampled tokens: plain attention over the keys that their lists name."""

from __future__ import annotations

import math
from typing import Any

from ..oracle import Expected, sample_rows
from .case import ListCase, pattern
from .inputs import ListInputs

_TOKENS = 8


def expect_lists(case: ListCase, inputs: ListInputs) -> list[Expected]:
    """Answers of the first token, the last and random ones, numbered as in an answer [1, tokens,
    heads, D]."""
    import torch

    tokens = sample_rows(case.q_offsets[-1], _TOKENS)
    answers = [_attend(inputs.q[token], *_keys(case, inputs, token)) for token in tokens]
    return [Expected(0, tokens, torch.stack(answers))]


def _attend(q: Any, k: Any, v: Any) -> Any:
    """q [heads, D] over k and v [KV heads, keys, D]."""
    import torch

    heads = q.double().view(k.shape[0], -1, q.shape[-1])
    logits = heads @ k.double().transpose(1, 2) / math.sqrt(q.shape[-1])
    return (torch.softmax(logits, -1) @ v.double()).reshape(q.shape[0], -1)


def _keys(case: ListCase, inputs: ListInputs, token: int) -> tuple[Any, Any]:
    """Keys and values [KV heads, keys, D] of one token."""
    import torch

    if case.family == "blocks":
        indptr, blocks = pattern(case)
        row = token // case.block_rows
        own = torch.from_numpy(blocks[indptr[row] : indptr[row + 1]]).to(inputs.q.device)
        inside = torch.arange(case.granularity, device=own.device)
        at = (own.long()[:, None] * case.granularity + inside).flatten()
        return inputs.k[at].transpose(0, 1), inputs.v[at].transpose(0, 1)
    if case.is_latent:
        rows = _named(inputs.pages, inputs.slots[token])
        if case.second:
            rows = torch.cat((rows, _named(inputs.second, inputs.second_slots[token])))
        return rows[None], rows[None, :, : case.head_dim_vo]
    parts = [_keys_of_head(case, inputs, token, head) for head in range(case.num_kv_heads)]
    rows = torch.stack(parts).double()
    return rows[..., : case.head_dim_qk], rows[..., case.head_dim_qk :]


def _named(pages: Any, slots: Any) -> Any:
    return pages.flatten(0, 1)[slots[slots >= 0].long()]


def _keys_of_head(case: ListCase, inputs: ListInputs, token: int, head: int) -> Any:
    import torch

    own = inputs.lists[token, head if case.lists > 1 else 0].long()
    inside = torch.arange(case.granularity, device=own.device)
    position = (own[own >= 0][:, None] * case.granularity + inside).flatten()
    position = position[position < case.seen[token]]
    request = next(b for b in range(case.batch) if token < case.q_offsets[b + 1])
    page = inputs.table[request].long()[position // case.page_size]
    return inputs.pages[page, head, position % case.page_size].float()

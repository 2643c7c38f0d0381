"""FlashAttention-3: each list as the page table of a sequence of one row, pages of one block; of
latent rows the rope columns as q and k, the latent ones as q_v and v."""

from __future__ import annotations

import functools
from typing import Any

from ..candidate import Candidate, Unsupported
from ..peers.fa3 import NAME, forward
from .case import ListCase
from .inputs import ListInputs
from .peer_flashinfer import block_pages, latent_lists, tables_of


def candidates(case: ListCase, inputs: ListInputs) -> list[Candidate]:
    """It chooses the number of splits, and it does not split."""
    if not case.is_latent and case.kv_dtype != case.dtype:
        raise Unsupported("FlashAttention-3 takes no fp8 KV with a 16-bit q")
    arrays, options = (_latent if case.is_latent else _pages)(case, inputs)
    call = functools.partial(forward(), *arrays, **options)
    shape = (1, *inputs.q.shape[:2], case.head_dim_vo)
    return [
        Candidate(
            NAME, name, functools.partial(call, num_splits=n), lambda answer: answer[0].view(shape)
        )
        for name, n in (("pages", 0), ("unsplit", 1))
    ]


def _pages(case: ListCase, inputs: ListInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    indptr, pages, last = tables_of(case, inputs)
    counts = indptr.diff()
    table = torch.zeros((len(counts), case.entries), dtype=torch.int32, device=pages.device)
    table[torch.arange(case.entries, device=pages.device) < counts[:, None]] = pages
    heads = case.num_qo_heads // case.num_kv_heads
    k, v = block_pages(case, inputs)
    return (inputs.q.view(-1, 1, heads, case.head_dim_qk), k, v), {
        "page_table": table,
        "seqused_k": (counts - 1) * case.granularity + last,
        "softmax_scale": case.head_dim_qk**-0.5,
        "is_causal": False,
    }


def _latent(case: ListCase, inputs: ListInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    parts, slots = latent_lists(case, inputs)
    q_latent, q_rope, latent, rope = parts
    is_key = slots >= 0
    # Entries of keys first: the others are behind the length.
    order = torch.argsort((~is_key).to(torch.int8), dim=1, stable=True)
    return (q_rope[:, None], rope[:, None], latent[:, None]), {
        "q_v": q_latent[:, None],
        "page_table": slots.gather(1, order).clamp(min=0),
        "seqused_k": is_key.sum(1).to(torch.int32),
        "softmax_scale": case.head_dim_qk**-0.5,
        "is_causal": False,
    }

"""Gather and attend, as SGLang serves QSA on Hopper: listed keys are copied side by side, then
FlashAttention-2 reads them. Places in the cache are found beforehand."""

from __future__ import annotations

import math
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import ListCase
from .inputs import ListInputs
from .peer_flashinfer import tables_of

NAME = "gather"
_MAX_BYTES = 2 << 30


def candidates(case: ListCase, inputs: ListInputs) -> list[Candidate]:
    """Sequences of any lengths, and where all lists have as many keys a dense batch, whose keys
    FlashAttention-2 splits."""
    import torch

    width = inputs.pages.shape[-1]
    most = case.q_offsets[-1] * case.num_kv_heads * case.listed * width * 2
    if most > _MAX_BYTES:
        raise Unsupported("more than 2 GiB of listed keys")
    at, offsets = _places(case, inputs)
    rows = inputs.pages.reshape(-1, width)
    half, heads = width // 2, case.num_qo_heads // case.num_kv_heads
    count = len(offsets) - 1
    starts = torch.arange(count + 1, dtype=torch.int32, device=at.device) * heads
    lengths = offsets.diff()
    longest = int(lengths.max())
    q = inputs.q.view(-1, 1, case.head_dim_qk)

    def gathered() -> tuple[Any, Any]:
        if rows.element_size() > 1:
            taken = rows.index_select(0, at)
        else:
            taken = rows.view(torch.uint8).index_select(0, at).view(rows.dtype).to(q.dtype)
        return taken[:, :half], taken[:, half:]

    def varlen() -> Any:
        k, v = (x[:, None] for x in gathered())
        return attend_varlen(q, k, v, starts, offsets, heads, longest)

    def dense() -> Any:
        k, v = (x.view(count, 1, longest, half) for x in gathered())
        return attend_dense(q.view(count, 1, heads, half), k, v)

    def output(answer: Any) -> Any:
        return answer.view(1, *inputs.q.shape)

    result = [Candidate(NAME, "varlen", varlen, output)]
    if bool((lengths == longest).all()):
        result.append(Candidate(NAME, "dense", dense, output))
    return result


def _places(case: ListCase, inputs: ListInputs) -> tuple[Any, Any]:
    """Rows of all listed keys, list after list, and the first of each list."""
    import torch

    indptr, pages, last = tables_of(case, inputs)
    inside = torch.arange(case.granularity, device=pages.device)
    counts = torch.full_like(pages, case.granularity)
    counts[indptr[1:].long() - 1] = last
    at = pages.long()[:, None] * case.granularity + inside
    sums = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return at[inside < counts[:, None]], sums[indptr.long()].to(torch.int32)


def attend_varlen(
    q: Any, k: Any, v: Any, starts: Any, offsets: Any, rows: int, longest: int
) -> Any:
    """FlashAttention-2 of torch over sequences, without a mask."""
    import torch

    scale = 1.0 / math.sqrt(q.shape[-1])
    call = torch.ops.aten._flash_attention_forward
    return call(q, k, v, starts, offsets, rows, longest, 0.0, False, False, scale=scale)[0]


def attend_dense(q: Any, k: Any, v: Any) -> Any:
    """FlashAttention-2 of torch, which may split keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v)

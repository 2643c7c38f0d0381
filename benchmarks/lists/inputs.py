"""Inputs of a case by lists, as torch tensors: pages, tables, and lists that change from token to
token as much as the case says."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from ..batch.tables import PageTables, page_tables
from .case import ListCase, pattern

_SCORES_AT_ONCE = 1 << 24
_LATENT, _GROUPS, _ROPE = 512, 4, 64  # of rows of 656 bytes
_PAGED_LATENT, _PAGED_GROUPS = 448, 7  # of rows of 584


@dataclass
class ListInputs:
    """Where a case is in pages: `pages` is [pages, heads, page_size, 2 * head_dim], keys beside
    values, as vLLM has it; of latent rows [pages, page_size, columns] of 16 bits, with `packed`,
    uint8 [pages, page_size, 1, bytes], the rows that these values are of. `second` and
    `second_packed` are another such cache.

    lists  int32 [tokens, lists, entries], blocks of each token's request, ascending, then -1
    slots  of latent rows: int32 [tokens, entries], the places in `pages` that lists name
    """

    q: Any
    pages: Any = None
    packed: Any = None
    second: Any = None
    second_packed: Any = None
    second_slots: Any = None
    tables: PageTables | None = None
    table: Any = None
    lengths: Any = None
    lists: Any = None
    slots: Any = None
    k: Any = None
    v: Any = None

    @property
    def keys(self) -> tuple[Any, Any]:
        """K and V as [pages, heads, page_size, head_dim]."""
        half = self.pages.shape[-1] // 2
        return self.pages[..., :half], self.pages[..., half:]


def make_list_inputs(case: ListCase, device: str = "cuda") -> ListInputs:
    """Random normal values, the same in every run."""
    import torch

    generator = torch.Generator(device=device)
    seed = zlib.crc32(case.name.encode())
    generator.manual_seed(seed)
    dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = normal(case.q_offsets[-1], case.num_qo_heads, case.head_dim_qk)
    if case.family == "blocks":
        shape = (case.kv_offsets[-1], case.num_kv_heads)
        k, v = normal(*shape, case.head_dim_qk), normal(*shape, case.head_dim_vo)
        return ListInputs(q, k=k, v=v)
    tables = page_tables(case.kv_lens, case.page_size, seed)
    inputs = ListInputs(q, tables=tables)
    inputs.table = torch.from_numpy(tables.block_table()).to(device)
    inputs.lengths = torch.from_numpy(tables.kv_lens).to(device)
    inputs.lists = make_lists(case, seed, device)
    if not case.is_latent:
        shape = (tables.num_pages, case.num_kv_heads, case.page_size, 2 * case.head_dim_qk)
        inputs.pages = normal(*shape).to(kv_dtype)
        return inputs
    inputs.slots = _slots(case, inputs, inputs.lists[:, 0])
    inputs.pages, inputs.packed = _rows(case, generator, tables.num_pages, device)
    if case.second:
        pages = 4 * case.batch
        inputs.second, inputs.second_packed = _rows(case, generator, pages, device)
        shape = (case.q_offsets[-1], case.second)
        own = torch.rand((shape[0], pages * case.page_size), generator=generator, device=device)
        inputs.second_slots = own.topk(case.second, dim=1).indices.to(torch.int32)
    return inputs


def make_lists(case: ListCase, seed: int, device: str) -> Any:
    """int32 [tokens, lists, entries]. A token lists the blocks of the greatest scores, its last one
    among them. A block's score is drawn anew every 1 / (1 - kept) tokens, each block at others."""
    import torch

    seen = torch.tensor(case.seen, device=device)
    blocks = -(-seen // case.granularity)
    width = int(blocks.max())
    tokens, request = len(seen), _requests(case, device)
    period = 1.0 / (1.0 - case.kept)
    result = torch.empty((tokens, case.lists, case.entries), dtype=torch.int32, device=device)
    block = torch.arange(width, device=device)[None, None]
    group = torch.arange(case.lists, device=device)[None, :, None]
    step = max(1, _SCORES_AT_ONCE // (width * case.lists))
    for first in range(0, tokens, step):
        rows = torch.arange(first, min(tokens, first + step), device=device)
        key = block + (width + 1) * (group + case.lists * request[rows][:, None, None])
        phase = _mixed(key + seed) / 2.0**32 * period
        drawn = ((rows[:, None, None] + phase) / period).floor().long()
        score = _mixed(key * 7919 + drawn * 104729 + seed)
        last = blocks[rows][:, None, None] - 1
        score = torch.where(block == last, 1 << 33, torch.where(block > last, -1, score))
        if width < case.entries:
            score = torch.nn.functional.pad(score, (0, case.entries - width), value=-1)
        best = score.topk(case.entries, dim=-1)
        chosen = torch.where(best.values < 0, 1 << 30, best.indices).sort(dim=-1).values
        result[first : first + len(rows)] = torch.where(chosen == 1 << 30, -1, chosen)
    return result


def _mixed(x: Any) -> Any:
    """int64 numbers, of which 32 bits are as good as random."""
    mask = (1 << 32) - 1
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = x & mask
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> 15)


def _requests(case: ListCase, device: str) -> Any:
    """The request of each token."""
    import torch

    lengths = torch.tensor(case.q_lens, device=device)
    return torch.repeat_interleave(torch.arange(case.batch, device=device), lengths)


def _slots(case: ListCase, inputs: ListInputs, lists: Any) -> Any:
    """Places of single keys in the pages, -1 where a list names none."""
    import torch

    table = inputs.table.long()[_requests(case, str(lists.device))]
    at = lists.long().clamp(min=0)
    slots = table.gather(1, at // case.page_size) * case.page_size + at % case.page_size
    return torch.where(lists < 0, -1, slots).to(torch.int32)


def _rows(case: ListCase, generator: Any, pages: int, device: str) -> tuple[Any, Any]:
    """Latent rows of 16 bits, and packed with scales of their own if the case has such."""
    import torch

    shape = (pages, case.page_size)

    def normal(columns: int) -> Any:
        x = torch.randn((*shape, columns), generator=generator, device=device)
        return x.to(torch.bfloat16)

    if not case.row_bytes:
        return normal(case.head_dim_qk), None
    is_paged = case.row_bytes == 584
    latent, groups = (_PAGED_LATENT, _PAGED_GROUPS) if is_paged else (_LATENT, _GROUPS)
    low = normal(latent).to(torch.float8_e4m3fn)
    powers = torch.randint(-2, 2, (*shape, groups), generator=generator, device=device)
    rope = normal(_ROPE)
    scales = torch.exp2(powers.float())
    values = low.to(torch.bfloat16) * scales.repeat_interleave(latent // groups, -1)
    values = torch.cat((values.to(torch.bfloat16), rope), -1)
    parts = [low.view(torch.uint8), rope.view(torch.uint8)]
    if not is_paged:
        parts.insert(1, scales.view(torch.uint8))
        return values, torch.cat(parts, -1)[:, :, None].contiguous()
    exponents = torch.zeros((*shape, 8), dtype=torch.uint8, device=device)
    exponents[..., :groups] = (powers + 127).to(torch.uint8)
    whole = torch.cat((torch.cat(parts, -1).flatten(1), exponents.flatten(1)), -1)
    return values, whole.view(pages, case.page_size, 1, case.row_bytes)


def mask_of(case: ListCase, device: str) -> tuple[Any, Any]:
    """Offsets and blocks of a block-sparse mask on the device."""
    import torch

    indptr, blocks = (torch.from_numpy(x).to(device) for x in pattern(case))
    return indptr, blocks

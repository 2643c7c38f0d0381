"""Inputs of a selection, as torch tensors, and the float64 scores of sampled tokens."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from ..batch.tables import page_tables
from ..oracle import Expected, sample_rows
from .case import ROW_BYTES, SelectionCase

_TOKENS = 6
_ROWS_AT_ONCE = 1 << 18
# ‖error‖ / ‖reference‖ of the scores of what is listed, from the greatest on. One key of 2,048
# whose score is half a percent too small is an error of 1e-4.
TOLERANCE = 1e-4


@dataclass
class SelectionInputs:
    """q e4m3 [tokens, heads, 128], weights float32 [tokens, heads]. Of pages: cache uint8 [pages,
    page_size, 1, 132], where the e4m3 rows of a page are followed by their float32 scales, table
    and lengths. Of a prompt: k e4m3 [keys, 128], k_scales float32 [keys], and the offsets of its
    tokens and keys.

    sampled  tokens whose answers are checked
    scores   float64 [sampled, keys], -inf where a token sees no key
    """

    q: Any
    weights: Any
    sampled: list[int]
    scores: Any = None
    cache: Any = None
    table: Any = None
    lengths: Any = None
    k: Any = None
    k_scales: Any = None
    offsets: Any = None
    key_offsets: Any = None


def make_selection_inputs(case: SelectionCase, device: str = "cuda") -> SelectionInputs:
    """Random values, the same in every run."""
    import torch

    generator = torch.Generator(device=device)
    seed = zlib.crc32(case.name.encode())
    generator.manual_seed(seed)

    def rows(*shape: int) -> Any:
        x = torch.randn(shape, generator=generator, device=device)
        return x.to(torch.float8_e4m3fn)

    def positive(*shape: int) -> Any:
        return torch.rand(shape, generator=generator, device=device) + 0.5

    tokens, heads, dim = case.q_offsets[-1], case.num_qo_heads, case.head_dim_qk
    sampled = sample_rows(tokens, _TOKENS)
    inputs = SelectionInputs(rows(tokens, heads, dim), positive(tokens, heads), sampled)
    if not case.page_size:
        keys = case.kv_lens[0]
        inputs.k, inputs.k_scales = rows(keys, dim), positive(keys)
        inputs.offsets, inputs.key_offsets = (
            torch.tensor([0, count], dtype=torch.int32, device=device) for count in (tokens, keys)
        )
    else:
        tables = page_tables(case.kv_lens, case.page_size, seed)
        inputs.table = torch.from_numpy(tables.block_table()).to(device)
        inputs.lengths = torch.from_numpy(tables.kv_lens).to(device)
        size = case.page_size * dim
        cache = torch.empty(
            (tables.num_pages, case.page_size * ROW_BYTES), dtype=torch.uint8, device=device
        )
        step = _ROWS_AT_ONCE // case.page_size
        for pages in cache.split(step):
            pages[:, :size] = rows(len(pages), size).view(torch.uint8)
            pages[:, size:] = positive(len(pages), case.page_size).view(torch.uint8)
        inputs.cache = cache.view(-1, case.page_size, 1, ROW_BYTES)
    inputs.scores = torch.stack([_scores(case, inputs, token) for token in sampled])
    return inputs


def _scores(case: SelectionCase, inputs: SelectionInputs, token: int) -> Any:
    """float64 [keys]: what a token's index says of each key."""
    import torch

    k, scales = inputs.k, inputs.k_scales
    if case.page_size:
        size = case.page_size * case.head_dim_qk
        pages = inputs.cache.flatten(1)[inputs.table[token // case.q_lens[0]].long()]
        k = pages[:, :size].contiguous().view(torch.float8_e4m3fn).view(-1, case.head_dim_qk)
        scales = pages[:, size:].contiguous().view(torch.float32).flatten()
    k, scales = (x[: case.kv_lens[0]] for x in (k, scales))
    products = inputs.q[token].double() @ k.double().T
    found = (products.relu() * inputs.weights[token].double()[:, None]).sum(0) * scales.double()
    found[case.seen[token] :] = -torch.inf
    return found


def expect_selection(case: SelectionCase, inputs: SelectionInputs) -> list[Expected]:
    """The greatest scores of the sampled tokens, numbered as in an answer [1, tokens, 1, entries];
    0 where a token sees fewer keys."""
    import torch

    best = inputs.scores.topk(min(case.entries, inputs.scores.shape[1]), dim=1).values
    best = torch.nn.functional.pad(best, (0, case.entries - best.shape[1]), value=-torch.inf)
    best = torch.where(best == -torch.inf, 0.0, best)
    return [Expected(0, inputs.sampled, best[:, None])]


def scores_of(case: SelectionCase, inputs: SelectionInputs, lists: Any) -> Any:
    """What lists [tokens, 1, entries] come to: the float64 scores of the sampled tokens' keys in
    descending order, NaN for a key that is listed twice. -1 and keys that a token does not see
    count 0."""
    import torch

    listed = lists[inputs.sampled, 0].long().sort(dim=1).values
    found = inputs.scores.gather(1, listed.clamp(min=0))
    found = torch.where((listed < 0) | (found == -torch.inf), 0.0, found)
    found[:, 1:][(listed[:, 1:] == listed[:, :-1]) & (listed[:, 1:] >= 0)] = torch.nan
    answer = torch.zeros((1, lists.shape[0], 1, case.entries), dtype=torch.float64, device="cpu")
    answer = answer.to(lists.device)
    answer[0, inputs.sampled, 0] = found.sort(dim=1, descending=True).values
    return answer

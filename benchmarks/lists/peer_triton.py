"""vLLM's Triton kernels of MiniMax-M3 and QSA: modules m3.py and qsa.py in a folder that
CUPYATTN_BENCH_TRITON names. They are not in this repository."""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import ListCase
from .inputs import ListInputs

NAME = "triton"
FOLDER_VARIABLE = "CUPYATTN_BENCH_TRITON"
_OPEN = 40.0  # a gate whose sigmoid is 1


def candidates(case: ListCase, inputs: ListInputs) -> list[Candidate]:
    """M3's kernels (NSA's lists are M3's with blocks of 64), or QSA's."""
    if case.family == "qsa":
        return [_qsa(_module("qsa"), case, inputs)]
    if case.kv_dtype != case.dtype:
        raise Unsupported("measured over 16-bit keys only")
    return [_m3(_module("m3"), case, inputs)]


def _module(name: str) -> Any:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder or not (Path(folder) / f"{name}.py").exists():
        raise Unsupported(f"{FOLDER_VARIABLE} does not name a folder with {name}.py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(name)


def _m3(module: Any, case: ListCase, inputs: ListInputs) -> Candidate:
    """decode(q, pages, lists, table, lengths, KV heads, scale, out, tokens a request, block) and
    prefill(q, pages, lists, table, offsets, lengths, keys before, tokens, KV heads, scale, out,
    block); lists as [KV heads, tokens, entries]."""
    import torch

    out = torch.empty_like(inputs.q)
    lists = inputs.lists.transpose(0, 1).contiguous()
    scale, tokens = case.head_dim_qk**-0.5, case.q_lens[0]
    arrays = inputs.q, inputs.pages, lists, inputs.table
    if tokens <= 8:
        rest = inputs.lengths, case.num_kv_heads, scale, out, tokens, case.granularity
        call = functools.partial(module.decode, *arrays, *rest)
        return Candidate(NAME, "decode", call, lambda _: out[None], out)
    offsets = torch.tensor(case.q_offsets, dtype=torch.int32, device=out.device)
    before = inputs.lengths - tokens
    rest = offsets, inputs.lengths, before, tokens, case.num_kv_heads, scale, out, case.granularity
    call = functools.partial(module.prefill, *arrays, *rest)
    return Candidate(NAME, "prefill", call, lambda _: out[None], out)


def _qsa(module: Any, case: ListCase, inputs: ListInputs) -> Candidate:
    """attend(q, k, v, keys and their count [tokens, keys + 1], table, request of each token,
    whether this is a prompt, out, gate). Lists name single keys, found beforehand."""
    import torch

    device = inputs.q.device
    keys = keys_and_count(case, inputs)
    lengths = torch.tensor(case.q_lens, device=device)
    request = torch.repeat_interleave(torch.arange(case.batch, device=device), lengths)
    k, v = (x.transpose(1, 2) for x in inputs.keys)
    out, gate = torch.empty_like(inputs.q), torch.full_like(inputs.q, _OPEN)
    call = functools.partial(
        module.attend,
        inputs.q,
        k,
        v,
        keys,
        inputs.table,
        request.to(torch.int32),
        case.q_lens[0] > 8,
        out,
        gate,
    )
    return Candidate(NAME, "attend", call, lambda _: out[None], out)


def keys_and_count(case: ListCase, inputs: ListInputs) -> Any:
    """int32 [tokens, entries * granularity + 1]: keys of each list, side by side, and their number
    in the last column."""
    import torch

    lists = inputs.lists[:, 0].long()
    inside = torch.arange(case.granularity, device=lists.device)
    keys = (lists[:, :, None] * case.granularity + inside).flatten(1)
    seen = torch.tensor(case.seen, device=lists.device)[:, None]
    keys = torch.where((keys >= 0) & (keys < seen), keys, 1 << 30).sort(1).values
    is_key = keys < 1 << 30
    keys = torch.where(is_key, keys, -1)
    return torch.cat((keys, is_key.sum(1, keepdim=True)), 1).to(torch.int32)

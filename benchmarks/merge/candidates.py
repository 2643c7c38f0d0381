"""Merges by cupyattn and by FlashInfer, called alike, and the float64 answer they are held to."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..candidate import Candidate, Unsupported
from ..oracle import ROWS_A_CASE, Expected, sample_rows
from ..ours import NAME, wrap_for
from .case import MergeCase

_LIBRARIES = {NAME: "cupyattn", "flashinfer_fa2": "flashinfer"}


@dataclass
class MergeInputs:
    """v bfloat16 [num_rows, num_states, num_heads, head_dim], s float32 [.., num_heads]."""

    v: Any
    s: Any


def make_merge_inputs(case: MergeCase, device: str = "cuda") -> MergeInputs:
    """Random normal values; LSE as of some hundred keys, a few units apart."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(case.name.encode()))
    shape = (case.num_rows, case.num_states, case.num_heads, case.head_dim)
    v = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    s = torch.randn(shape[:-1], generator=generator, device=device) * 2 + 8
    return MergeInputs(v, s)


def expect_merge(case: MergeCase, inputs: MergeInputs) -> list[Expected]:
    """v and, as one more column, s of sampled rows: what `_joined` makes of an answer."""
    import torch

    rows = sample_rows(case.num_rows, ROWS_A_CASE)
    index = torch.tensor(rows, device=inputs.v.device)
    v, s = inputs.v[index].double(), inputs.s[index].double()
    lse = torch.logsumexp(s * _LN_2, dim=1) / _LN_2
    merged = (v * torch.exp2(s - lse[:, None])[..., None]).sum(dim=1)
    return [Expected(0, rows, torch.cat((merged, lse[..., None]), dim=-1))]


_LN_2 = 0.6931471805599453


def candidates(name: str, case: MergeCase, inputs: MergeInputs) -> list[Candidate]:
    """One candidate: the library's function, by its public name."""
    if name != NAME and (case.framework != "torch" or case.out):
        raise Unsupported("takes torch tensors only, and allocates its answers")
    library: Any = import_module(_LIBRARIES[name])
    wrap = wrap_for(case.framework)
    if case.api == "pair":
        serve = library.merge_state
        parts = [x[:, i].contiguous() for i in (0, 1) for x in (inputs.v, inputs.s)]
    else:
        serve, parts = library.merge_states, [inputs.v, inputs.s]
    named = {}
    if case.out:
        shape = (case.num_rows, case.num_heads, case.head_dim)
        outputs = inputs.v.new_empty(shape), inputs.s.new_empty(shape[:-1])
        named = dict(zip(("out", "lse"), map(wrap, outputs), strict=True))
    call = functools.partial(serve, *map(wrap, parts), **named)
    return [Candidate(name, case.api, call, functools.partial(_joined, case.framework))]


def _joined(framework: str, answer: Any) -> Any:
    """(v, s) as torch [1, num_rows, num_heads, head_dim + 1], float32."""
    import torch

    v, s = answer
    if framework != "torch":
        v = torch.from_dlpack(v.view("int16")).view(torch.bfloat16)
        s = torch.from_dlpack(s)
    return torch.cat((v.float(), s[..., None]), dim=-1)[None]

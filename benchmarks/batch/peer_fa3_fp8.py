"""FlashAttention-3 in e4m3: the op `sgl_kernel::fwd` of the library that CUPYATTN_BENCH_FA3_FP8
names, a build of its e4m3 kernels alone."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs

NAME = "fa3_fp8"
LIBRARY_VARIABLE = "CUPYATTN_BENCH_FA3_FP8"
# What a later schema may call an argument, by what it is.
_NAMES = {"causal": "is_causal", "rotary_interleaved": "is_rotary_interleaved"}


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """Ragged by cumulative lengths, paged by a padded page table, descales of 1."""
    import torch

    op = forward()
    device = inputs.q.device

    def on_device(table: Any) -> Any:
        return torch.from_numpy(table).to(device)

    ones = torch.ones(case.batch, case.num_kv_heads, device=device)
    given: dict[str, Any] = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "cu_seqlens_q": on_device(inputs.qo_indptr),
        "max_seqlen_q": max(case.q_lens),
        "q_descale": ones,
        "k_descale": ones,
        "v_descale": ones,
        "softmax_scale": 1.0 / math.sqrt(case.head_dim_qk),
        "is_causal": case.causal,
        "window_size_left": case.window_left,
        "window_size_right": 0 if case.window_left >= 0 else -1,
        "attention_chunk": 0,
        "softcap": 0.0,
        "is_rotary_interleaved": False,
        "num_splits": 0,
        "sm_margin": 0,
    }
    if inputs.tables is None:
        given |= {"cu_seqlens_k": on_device(inputs.kv_indptr), "max_seqlen_k": max(case.kv_lens)}
    else:
        table, lengths = inputs.tables.block_table(), inputs.tables.kv_lens
        given |= {"page_table": on_device(table), "seqused_k": on_device(lengths)}
    call = functools.partial(op, *arguments(op._schema, given))
    shape = (1, -1, case.num_qo_heads, case.head_dim_vo)
    return [Candidate(NAME, "fwd", call, lambda answer: _first(answer).view(shape))]


def arguments(schema: Any, given: dict[str, Any]) -> list[Any]:
    """What an op is called with, in its order: what is given by name, its defaults, else None."""
    result = []
    for argument in schema.arguments:
        name = _NAMES.get(argument.name, argument.name)
        value = argument.default_value if argument.has_default_value() else None
        result.append(given.get(name, value))
    return result


def _first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, (list, tuple)) else answer


@functools.cache
def forward() -> Any:
    """The op, loaded once. Raises Unsupported with what the loader said where it cannot be."""
    import torch

    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        raise Unsupported(f"{LIBRARY_VARIABLE} does not name FlashAttention-3's e4m3 library")
    try:
        ctypes.CDLL(path)  # its error has the missing symbol or library, torch's has not
        torch.ops.load_library(path)
        return torch.ops.sgl_kernel.fwd.default
    except (OSError, AttributeError, RuntimeError) as error:
        raise Unsupported(f"{path} cannot be loaded: {error}") from error

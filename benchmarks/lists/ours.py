"""Ours: `sparse.attend`, FlashMLA's functions over lists, and the block-sparse wrapper."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from ..batch.wrappers import workspace
from ..candidate import Candidate
from .case import ListCase
from .inputs import ListInputs, mask_of

NAME = "ours"


def candidates(case: ListCase, inputs: ListInputs) -> list[Candidate]:
    """One candidate: the public call."""
    if case.family == "blocks":
        return [blocks(NAME, import_module("cupyattn"), case, inputs)]
    if case.is_latent:
        return [_latent(case, inputs)]
    out = inputs.q.new_empty((*inputs.q.shape[:2], case.head_dim_vo))
    call = functools.partial(
        import_module("cupyattn").sparse.attend,
        inputs.q,
        inputs.keys,
        inputs.lists,
        inputs.table,
        inputs.lengths,
        granularity=case.granularity,
        kv_layout="HND",
        out=out,
    )
    return [Candidate(NAME, "attend", call, lambda answer: answer[None], out)]


def _latent(case: ListCase, inputs: ListInputs) -> Candidate:
    """FlashMLA's functions: over pages, and over rows for prompts."""
    library = import_module("cupyattn.flash_mla")
    scale = case.head_dim_qk**-0.5
    if not case.row_bytes:
        rows = inputs.pages.view(-1, 1, case.head_dim_qk)
        arguments = inputs.q, rows, inputs.slots[:, None], scale
        call = functools.partial(library.flash_mla_sparse_fwd, *arguments)
        return Candidate(NAME, "sparse_fwd", call, lambda answer: answer[0][None])
    second = {}
    if case.second:
        second = {
            "extra_k_cache": inputs.packed,
            "extra_indices_in_kvcache": inputs.slots[:, None],
        }
    first, slots = (inputs.packed, inputs.slots)
    if case.second:
        first, slots = inputs.second_packed, inputs.second_slots
    call = functools.partial(
        library.flash_mla_with_kvcache,
        inputs.q[:, None],
        first,
        None,
        None,
        case.head_dim_vo,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots[:, None],
        **second,
    )
    return Candidate(NAME, "with_kvcache", call, lambda answer: answer[0][:, 0][None])


def blocks(
    name: str, library: Any, case: ListCase, inputs: ListInputs, **constructor: Any
) -> Candidate:
    """A library's wrapper of block-sparse masks, planned here."""
    wrapper = library.BlockSparseAttentionWrapper(
        workspace(f"{name} blocks", str(inputs.q.device)), **constructor
    )
    rows = case.q_offsets[-1]
    wrapper.plan(
        *mask_of(case, str(inputs.q.device)),
        M=rows,
        N=rows,
        R=case.block_rows,
        C=case.granularity,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim_qk,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
        o_data_type=inputs.q.dtype,
    )
    call = functools.partial(wrapper.run, inputs.q, inputs.k, inputs.v)
    return Candidate(name, "blocks", call, lambda answer: answer[None])

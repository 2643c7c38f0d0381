"""FlashInfer: each list of a token is the page table of a request of its own, whose pages are
blocks. plan() is outside of what is timed, though a model would plan anew for each layer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from ..batch.wrappers import workspace
from ..candidate import Candidate, Unsupported
from ..peers.prebuild import Module, is_built
from .case import ListCase, pattern
from .inputs import ListInputs
from .ours import blocks

_ROPE = 64
_MAX_PAGES = 1 << 25  # of all page tables
# Its generated kernel of Hopper: keys and rows of a block, and the most blocks of a row of blocks.
_CAKE_BLOCK, _CAKE_BLOCKS = 64, 64
_CAKE_STAGES = "attention", "attention_queue"


def module_of(case: ListCase, backend: str) -> Module:
    """What FlashInfer compiles for a case. Unsupported where it is not measured."""
    if case.is_latent:
        if backend != "fa3":
            raise Unsupported("latent attention is measured with fa3")
        return Module("batch_mla", backend, "bfloat16", 512 + _ROPE, 512)
    if backend == "fa3" and case.kv_dtype != case.dtype:
        raise Unsupported("FlashInfer's fa3 has no 8-bit keys beside a 16-bit q")
    return Module("batch_prefill", backend, case.kv_dtype, case.head_dim_qk, case.head_dim_vo)


def candidates(backend: str, case: ListCase, inputs: ListInputs, build: bool) -> list[Candidate]:
    """One candidate. Without `build` Unsupported where its module is not there."""
    name, module = f"flashinfer_{backend}", module_of(case, backend)
    is_ready = build or is_built(module)
    has_other = case.family == "blocks" and backend == "fa3" and has_cake(case, build)
    if not is_ready and not has_other:
        raise Unsupported("its module is not built, and none is built here")
    import flashinfer  # type: ignore[import-not-found]

    if case.family == "blocks":
        result = [blocks(name, flashinfer, case, inputs, backend=backend)] if is_ready else []
        return [*result, _cake(name, flashinfer, case, inputs)] if has_other else result
    serve = _latent if case.is_latent else _paged
    return [serve(name, backend, flashinfer, case, inputs)]


def tables_of(case: ListCase, inputs: ListInputs) -> tuple[Any, Any, Any]:
    """Page tables of all lists, those of a token's heads in turn: (offsets, pages, keys of the last
    page), where a page is a block of one head in `block_pages`."""
    import torch

    lists = inputs.lists.long().expand(-1, case.num_kv_heads, -1)
    at = lists.clamp(min=0) * case.granularity
    lengths = torch.tensor(case.q_lens, device=lists.device)
    request = torch.repeat_interleave(torch.arange(case.batch, device=lists.device), lengths)
    table = inputs.table.long()[request][:, None].expand(-1, case.num_kv_heads, -1)
    head = torch.arange(case.num_kv_heads, device=lists.device)[None, :, None]
    page = table.gather(2, at // case.page_size) * case.num_kv_heads + head
    blocks_a_page = case.page_size // case.granularity
    page = page * blocks_a_page + at % case.page_size // case.granularity
    is_listed = lists >= 0
    counts = is_listed.sum(-1).flatten()
    seen = torch.tensor(case.seen, device=lists.device)[:, None]
    last = torch.minimum(seen - at.amax(-1), torch.tensor(case.granularity, device=lists.device))
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return tuple(x.flatten().to(torch.int32) for x in (indptr, page[is_listed], last))  # type: ignore[return-value]


def block_pages(case: ListCase, inputs: ListInputs) -> tuple[Any, Any]:
    """K and V as [pages, granularity, 1, head_dim]."""
    columns = inputs.pages.shape[-1]
    pages = inputs.pages.view(-1, case.granularity, 1, columns)
    return pages[..., : case.head_dim_qk], pages[..., case.head_dim_qk :]


def _paged(name: str, backend: str, library: Any, case: ListCase, inputs: ListInputs) -> Candidate:
    import torch

    tokens = case.q_offsets[-1] * case.num_kv_heads
    if tokens * case.entries > _MAX_PAGES:
        raise Unsupported("page tables of more than 128 MiB are not planned")
    device = inputs.q.device
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        workspace(f"{name} lists", str(device)), kv_layout="NHD", backend=backend
    )
    rows = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    heads = case.num_qo_heads // case.num_kv_heads
    wrapper.plan(
        rows,
        *tables_of(case, inputs),
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim_qk=case.head_dim_qk,
        page_size=case.granularity,
        causal=False,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.pages.dtype,
    )
    q = inputs.q.view(tokens, heads, case.head_dim_qk)
    out = torch.empty_like(q)
    call = functools.partial(wrapper.run, q, block_pages(case, inputs), out=out)
    return Candidate(name, "pages", call, lambda answer: answer.view(1, *inputs.q.shape), out)


def has_cake(case: ListCase, build: bool) -> bool:
    """Whether its kernel of Hopper for blocks of 64 serves a mask, and is built or may be."""
    indptr, _ = pattern(case)
    is_square = case.block_rows == case.granularity == _CAKE_BLOCK
    has_equal_heads = case.num_qo_heads == case.num_kv_heads
    if not (is_square and has_equal_heads and max(np.diff(indptr)) <= _CAKE_BLOCKS):
        return False
    from flashinfer.jit import cake_vsa_sm90  # type: ignore[import-not-found]

    specs = [cake_vsa_sm90.gen_cake_vsa_sm90_module(stage) for stage in _CAKE_STAGES]
    return build or all(Path(spec.get_library_path()).exists() for spec in specs)


def _cake(name: str, library: Any, case: ListCase, inputs: ListInputs) -> Candidate:
    """The same by its wrapper of blocks of any size, heads before rows."""
    import torch

    device = inputs.q.device
    indptr, columns = pattern(case)
    count = len(indptr) - 1
    mask = np.zeros((count, count), bool)
    mask[np.repeat(np.arange(count), np.diff(indptr)), columns] = True
    sizes = torch.full((case.num_qo_heads, count), _CAKE_BLOCK, dtype=torch.int32, device=device)
    wrapper = library.VariableBlockSparseAttentionWrapper(
        workspace(f"{name} cake", str(device)), backend="cake"
    )
    masks = torch.from_numpy(mask).to(device).expand(case.num_qo_heads, -1, -1).contiguous()
    heads = case.num_qo_heads, case.num_kv_heads, case.head_dim_qk
    wrapper.plan(masks, sizes, sizes, *heads, q_data_type=inputs.q.dtype)
    arrays = (x.transpose(0, 1).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    call = functools.partial(wrapper.run, *arrays)
    return Candidate(name, "cake", call, lambda answer: answer.transpose(0, 1)[None])


def latent_lists(case: ListCase, inputs: ListInputs) -> tuple[tuple[Any, ...], Any]:
    """The latent and rope columns of q and of rows [slots, 1, columns], and slots of each token.

    Rows have 16 bits: of packed ones a copy, and of two caches one with both."""
    import torch

    rows, slots = inputs.pages.flatten(0, 1), inputs.slots
    if case.second:
        slots = torch.cat((slots, inputs.second_slots + rows.shape[0]), 1)
        rows = torch.cat((rows, inputs.second.flatten(0, 1)))
    latent = case.head_dim_vo
    rope, q_rope = rows[:, latent:], inputs.q[..., latent:]
    if case.head_dim_qk == latent:
        rope = rows.new_zeros((len(rows), _ROPE))
        q_rope = inputs.q.new_zeros((*inputs.q.shape[:2], _ROPE))
    return (inputs.q[..., :latent], q_rope, rows[:, None, :latent], rope[:, None]), slots


def _latent(name: str, backend: str, library: Any, case: ListCase, inputs: ListInputs) -> Candidate:
    import torch

    device, latent = inputs.q.device, case.head_dim_vo
    parts, slots = latent_lists(case, inputs)
    counts = (slots >= 0).sum(1)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(
        workspace(f"{name} latent", str(device)), backend=backend
    )
    wrapper.plan(
        torch.arange(len(slots) + 1, dtype=torch.int32, device=device),
        indptr,
        slots[slots >= 0],
        counts.to(torch.int32),
        num_heads=case.num_qo_heads,
        head_dim_ckv=latent,
        head_dim_kpe=_ROPE,
        page_size=1,
        causal=False,
        sm_scale=case.head_dim_qk**-0.5,
        q_data_type=inputs.q.dtype,
        kv_data_type=parts[2].dtype,
    )
    out = inputs.q.new_empty((*inputs.q.shape[:2], latent))
    call = functools.partial(wrapper.run, *parts, out=out)
    return Candidate(name, "mla", call, lambda answer: answer[None], out)

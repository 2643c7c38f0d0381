"""Latent attention (MLA): ours, planned and not, FlashInfer's wrapper, FlashAttention-3 with q_v,
FlashMLA.

Inputs are those of a batch whose values are the first 512 columns of its keys. The scale is that of
all cases, 1 / sqrt of the columns. Sparse attention is ours by lists; the peers on this device have
none, and get each list as the page table of a request, pages of one slot.
"""

from __future__ import annotations

import functools
import math
from importlib import import_module
from typing import Any

from ..candidate import Candidate, Unsupported
from ..peers.fa3 import NAME as FA3
from ..peers.fa3 import forward
from ..peers.flashmla import dense
from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import Calls, as_array, empty_output, next_plan, workspace


def candidates(name: str, case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """What one implementation offers; Unsupported with the reason if it has none."""
    if name == "ours":
        if case.is_portable and not import_module("cupyattn.core.env").PORTABLE.flag():
            raise Unsupported("CUPYATTN_PORTABLE is not 1")
        if case.pool:
            return _lists(name, case, inputs)
        if case.op == "flash_mla":
            return [_with_kvcache(name, case, inputs)]
        return [_wrapper(name, import_module("cupyattn.mla"), {}, case, inputs)]
    if name == "ours_trtllm":
        return [_planless(name, case, inputs)]
    if name == "flashmla":
        return [_flash_mla(case, inputs)]
    if name == FA3:
        return [_fa3(case, inputs)]
    library = import_module("flashinfer.mla")
    return [_wrapper(name, library, {"backend": name.partition("_")[2]}, case, inputs)]


def _parts(case: BatchCase, inputs: BatchInputs) -> tuple[Any, Any, Any, Any]:
    """q_nope, q_pe, and the two parts of the pool without its axis of one head."""
    latent = case.head_dim_vo
    q, k = inputs.q, inputs.k[:, :, 0]
    return q[..., :latent], q[..., latent:], k[..., :latent], k[..., latent:]


def _scale(case: BatchCase) -> float:
    return 1.0 / math.sqrt(case.head_dim_qk)


def _wrapper(
    name: str, library: Any, constructor: dict[str, Any], case: BatchCase, inputs: BatchInputs
) -> Candidate:
    """BatchMLAPagedAttentionWrapper, ours or FlashInfer's: both are called alike."""
    import torch

    assert inputs.tables is not None
    device, tables = inputs.q.device, inputs.tables
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace(name, str(device)), **constructor)
    out = empty_output(case, inputs)
    arrays = [
        as_array(x, case, inputs, lambda x: x)
        for x in (inputs.qo_indptr, tables.indptr, tables.indices, tables.kv_lens)
    ]
    sizes = case.num_qo_heads, case.head_dim_vo, case.head_dim_qk - case.head_dim_vo
    kv_dtype = getattr(torch, case.kv_dtype)

    def make_plan(*tables: Any) -> Any:
        options = case.causal, _scale(case), torch.bfloat16, kv_dtype
        return wrapper.plan(*tables, *sizes, case.page_size, *options)

    plan = functools.partial(make_plan, *arrays)
    steps = next_plan(make_plan, case, inputs, lambda x: x) if case.timed == "plan" else None
    scales = {} if case.kv_dtype == "bfloat16" else {"ckv_scale": 1.0, "kpe_scale": 1.0}
    run = functools.partial(wrapper.run, *_parts(case, inputs), out=out, **scales)
    return Calls(plan, run, steps).candidate(name, "mla", case, lambda answer: answer[None], out)


def _planless(name: str, case: BatchCase, inputs: BatchInputs) -> Candidate:
    """One call, its plan on the device included."""
    import torch

    assert inputs.tables is not None
    if len(set(case.q_lens)) != 1:
        raise Unsupported("has equally many rows a request")
    device, tables, out = inputs.q.device, inputs.tables, empty_output(case, inputs)
    shape = (case.batch, case.q_lens[0], case.num_qo_heads)
    table = torch.from_numpy(tables.block_table()).to(device)
    lists = {}
    if case.pool:
        table, lists = table[:, None], {"sparse_mla_top_k": max(case.kv_lens)}
    call = functools.partial(
        import_module("cupyattn.mla").trtllm_batch_decode_with_kv_cache_mla,
        inputs.q.view(*shape, -1),
        inputs.k[:, :, 0],
        workspace(name, str(device)),
        128,
        case.head_dim_vo,
        case.head_dim_qk - case.head_dim_vo,
        table,
        torch.from_numpy(tables.kv_lens).to(device),
        max(case.kv_lens),
        bmm1_scale=_scale(case),
        out=out.view(*shape, -1),
        **lists,
    )
    return Candidate(name, "trtllm", call, lambda answer: answer.view(1, *out.shape), out)


def _lists(name: str, case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """FlashMLA's function over lists of slots, which plans on the device; a token a request. And
    the same as an engine runs it, in a graph."""
    import torch

    assert inputs.tables is not None and set(case.q_lens) == {1} and case.page_size == 1
    lists = torch.from_numpy(inputs.tables.block_table()).to(inputs.q.device)
    call = functools.partial(
        import_module("cupyattn.flash_mla").flash_mla_with_kvcache,
        inputs.q[:, None],
        inputs.k,
        None,
        None,
        case.head_dim_vo,
        softmax_scale=_scale(case),
        indices=lists[:, None],
    )

    def rows(answer: Any) -> Any:
        return answer[0][None, :, 0]

    result = [Candidate(name, "list", call, rows)]
    if lists.is_cuda:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = call()

        def replay() -> Any:
            graph.replay()
            return answer

        result.append(Candidate(name, "list in a graph", replay, rows))
    return result


def _cache(case: BatchCase, inputs: BatchInputs) -> tuple[Any, Any, Any]:
    """q [b, rows, heads, 576], the page table and the lengths, as FlashMLA takes them."""
    import torch

    assert inputs.tables is not None
    if len(set(case.q_lens)) != 1:
        raise Unsupported("has equally many rows a request")
    tables = (inputs.tables.block_table(), inputs.tables.kv_lens)
    table, kv_lens = (torch.from_numpy(x).to(inputs.q.device) for x in tables)
    return inputs.q.view(case.batch, -1, *inputs.q.shape[1:]), table, kv_lens


def _with_kvcache(name: str, case: BatchCase, inputs: BatchInputs) -> Candidate:
    """FlashMLA's function of ours, which plans on the device."""
    q, table, kv_lens = _cache(case, inputs)
    library = import_module("cupyattn.flash_mla")
    meta = library.get_mla_metadata()
    call = functools.partial(
        library.flash_mla_with_kvcache,
        q,
        inputs.k,
        table,
        kv_lens,
        case.head_dim_vo,
        *meta,
        softmax_scale=_scale(case),
        causal=case.causal,
    )
    shape = (1, -1, case.num_qo_heads, case.head_dim_vo)
    return Candidate(name, "flash_mla", call, lambda answer: answer[0].view(shape))


def _flash_mla(case: BatchCase, inputs: BatchInputs) -> Candidate:
    """FlashMLA itself; its schedule is made beforehand, once for these lengths."""
    if case.page_size != 64:
        raise Unsupported("FlashMLA takes pages of 64")
    if case.kv_dtype != "bfloat16" or case.pool:
        raise Unsupported("measured over pages of bfloat16 only")
    q, table, kv_lens = _cache(case, inputs)
    call = dense(q, inputs.k, table, kv_lens, case.head_dim_vo, _scale(case), case.causal)
    shape = (1, -1, case.num_qo_heads, case.head_dim_vo)
    return Candidate("flashmla", "dense", call, lambda answer: answer[0].view(shape))


def _fa3(case: BatchCase, inputs: BatchInputs) -> Candidate:
    """The rope parts as q and k, the latent parts as q_v and v."""
    import torch

    assert inputs.tables is not None
    if case.kv_dtype != "bfloat16":
        raise Unsupported("FlashAttention-3 takes no fp8 KV with a 16-bit q")
    fwd, device = forward(), inputs.q.device
    q_nope, q_pe, ckv, kpe = _parts(case, inputs)
    on_device = [
        torch.from_numpy(x).to(device)
        for x in (inputs.tables.block_table(), inputs.tables.kv_lens, inputs.qo_indptr)
    ]
    options = {
        "q_v": q_nope,
        "softmax_scale": _scale(case),
        "is_causal": case.causal,
        "num_splits": 0,
        "page_table": on_device[0],
        "seqused_k": on_device[1],
        "cu_seqlens_q": on_device[2],
        "max_seqlen_q": max(case.q_lens),
    }
    keys = kpe[:, :, None], ckv[:, :, None]
    shape = (1, -1, case.num_qo_heads, case.head_dim_vo)
    call = functools.partial(fwd, q_pe, *keys, **options)
    return Candidate(FA3, "qv", call, lambda answer: answer[0].view(shape))

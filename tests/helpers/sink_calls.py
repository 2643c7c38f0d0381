"""Every wrapper that takes sinks, planned for one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cupyattn

from .batches import Batch

_F16 = {"q_data_type": "float16", "kv_data_type": "float16"}


def every_wrapper(
    b: Batch,
    sinks: np.ndarray,
    sm_scale: float,
    workspace: Any,
    split: int | None = None,
    put: Callable[[np.ndarray], Any] = lambda x: x,
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, run) of each wrapper, causal, that serves a batch of float16, with `split` keys to a
    split (a multiple of its page size) or as many as the plan likes. run() gives (out, lse).

    Decode wrappers, eager and in graph mode, serve batches of equal q lengths.
    """
    heads, dim = (b.q.shape[1], b.cache[0].shape[2]), b.q.shape[2]
    sizes, table = (*heads, dim, b.page_size), [put(x) for x in b.table]
    pages = {} if split is None else {"fixed_split_size": split // b.page_size}
    scale = {"sm_scale": sm_scale, **_F16}
    q, cache, sink = put(b.q), put(b.one_tensor()), put(sinks)

    def runs(wrapper: Any, *keys: Any) -> Callable[[], Any]:
        return functools.partial(wrapper.run, q, *keys, sinks=sink, return_lse=True)

    paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
    paged.plan(b.qo_indptr, *table, *sizes, causal=True, **scale, **pages)
    yield "paged", runs(paged, cache)

    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    tokens = {} if split is None else {"fixed_split_size": split}
    ragged.plan(b.qo_indptr, b.kv_indptr, *heads, dim, causal=True, **scale, **tokens)
    k, v = (put(x.reshape(-1, *b.cache[0].shape[2:])) for x in b.ragged())
    yield "ragged", runs(ragged, k, v)

    own = cupyattn.BatchAttentionWithAttentionSinkWrapper(workspace, **_F16)
    own.plan(b.qo_indptr, *table, *sizes, causal=True, **pages)
    yield "sinks", functools.partial(own.run, q, cache, sink, sm_scale, return_lse=True)

    if len(set(b.qo_len)) == 1:
        options = {"q_len_per_req": b.qo_len[0], **scale, **pages}
        eager = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
        eager.plan(*table, *sizes, **options)
        yield "decode", runs(eager, cache)
        buffers = [put(np.zeros(len(x), np.int32)) for x in b.table]
        graph = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
        graph.plan(*table, *sizes, **options)
        yield "decode, graph", runs(graph, cache)

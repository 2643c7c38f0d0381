"""FlashMLA: the ops of sglang-kernel's flashmla_ops, which CUPYATTN_BENCH_FLASHMLA names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from ..candidate import Unsupported

LIBRARY_VARIABLE = "CUPYATTN_BENCH_FLASHMLA"


def dense(
    q: Any, cache: Any, table: Any, kv_lens: Any, head_dim_vo: int, scale: float, causal: bool
) -> Callable[[], Any]:
    """Attention over pages of 16 bits, its schedule made now: [out, LSE] of each call."""
    ops = library()
    rows_a_head = q.shape[1] * q.shape[2] // cache.shape[2]
    schedule = ops.get_mla_decoding_metadata(
        kv_lens, rows_a_head, cache.shape[2], None, False, None
    )
    return functools.partial(
        ops.fwd_kvcache_mla,
        q,
        cache,
        head_dim_vo,
        kv_lens,
        table,
        scale,
        causal,
        *schedule,
        False,
        None,
    )


@functools.cache
def library() -> Any:
    """The ops, loaded once. Raises Unsupported where no library is named."""
    import torch

    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        raise Unsupported(f"{LIBRARY_VARIABLE} does not name FlashMLA's library")
    torch.ops.load_library(path)
    return torch.ops.sgl_kernel

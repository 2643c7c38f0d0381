"""Fresh random normal inputs of a batch, as torch tensors on one device."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..inputs import Inputs, causal_mask, pack_little, take
from .case import BatchCase
from .tables import PageTables, page_tables

# What a slot of nobody holds that may not be NaN, by the bytes of an element.
_LARGE = {1: 448.0, 2: 1e4}


@dataclass
class BatchInputs:
    """q [rows, Hq, Dqk], request after request. k and v in the KV dtype: the pools
    [pages, page_size, Hkv, D] where `tables` are given, else [keys, Hkv, D].

    Offsets are int32 NumPy arrays. `masks` are bool [q_len, kv_len] of each request; `packed` are
    their bits, every request padded to a byte, with `packed_offsets` in bytes, or `tree` those of
    the last q_len keys, int32 [rows]. `sinks` are float32 [Hq], natural-log logits.
    """

    q: Any
    k: Any
    v: Any
    qo_indptr: Any
    kv_indptr: Any
    tables: PageTables | None = None
    masks: list[Any] | None = None
    packed: Any = None
    packed_offsets: list[int] | None = None
    tree: Any = None
    sinks: Any = None

    def request(self, b: int) -> Inputs:
        """One request on its own, with a batch axis of 1; paged keys are gathered."""
        rows = slice(int(self.qo_indptr[b]), int(self.qo_indptr[b + 1]))
        inputs = Inputs(self.q[None, rows], *self._keys(b), sinks=self.sinks)
        if self.masks is not None:
            inputs = replace(inputs, mask=self.masks[b][None])
        if self.packed_offsets is not None:
            bits = slice(self.packed_offsets[b], self.packed_offsets[b + 1])
            inputs = replace(inputs, packed=self.packed[None, bits])
        return inputs

    def _keys(self, b: int) -> list[Any]:
        if self.tables is None:
            keys = slice(int(self.kv_indptr[b]), int(self.kv_indptr[b + 1]))
            return [self.k[None, keys], self.v[None, keys]]
        import torch

        pages = torch.from_numpy(self.tables.pages(b).astype(np.int64)).to(self.k.device)
        stop = int(self.tables.kv_lens[b])
        return [take(pool, pages).flatten(0, 1)[None, :stop] for pool in (self.k, self.v)]


def make_batch_inputs(case: BatchCase, device: str = "cuda") -> BatchInputs:
    """Random normal q, k, v, the same in every run; slots of a pool that no key owns hold NaN or
    large numbers."""
    import torch

    seed = zlib.crc32(case.name.encode())
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype)
    wide = torch.bfloat16 if case.is_8bit else dtype
    tables = None
    if case.is_paged:
        tables = page_tables(case.kv_lens, case.page_size, seed, case.shared, case.pool)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=wide)

    def keys(dim: int) -> Any:
        if tables is None:
            return normal(case.kv_offsets[-1], case.num_kv_heads, dim).to(kv_dtype)
        pool = normal(tables.num_pages, case.page_size, case.num_kv_heads, dim)
        _poison(pool, tables, math.nan if case.has_nan else _LARGE[kv_dtype.itemsize])
        return pool.to(kv_dtype)

    q = normal(case.q_offsets[-1], case.num_qo_heads, case.head_dim_qk).to(dtype)
    k = keys(case.head_dim_qk)
    inputs = BatchInputs(
        q,
        k,
        k[..., : case.head_dim_vo] if case.api == "mla" else keys(case.head_dim_vo),
        np.array(case.q_offsets, np.int32),
        np.array(case.kv_offsets, np.int32),
        tables,
    )
    if case.sinks:
        inputs.sinks = normal(case.num_qo_heads).float()
    if case.mask == "tree":
        trees = [binary_tree(rows, device) for rows in case.q_lens]
        inputs.masks = [_with_earlier(x, n) for x, n in zip(trees, case.kv_lens, strict=True)]
        inputs.tree = torch.cat([_words(tree) for tree in trees])
    elif case.mask != "none":
        inputs.masks = [causal_mask(case.request(b), device)[0] for b in range(case.batch)]
        packed = [pack_little(mask.reshape(1, -1))[0] for mask in inputs.masks]
        inputs.packed = torch.cat(packed)
        inputs.packed_offsets = [0, *np.cumsum([len(bits) for bits in packed]).tolist()]
    return inputs


def binary_tree(rows: int, device: str) -> Any:
    """bool [rows, rows]: row i sees itself and what row (i - 1) // 2 sees."""
    import torch

    tree = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        tree[row] |= tree[(row - 1) // 2]
    return tree.to(device)


def _with_earlier(tree: Any, kv_len: int) -> Any:
    """bool [rows, kv_len] with all earlier keys."""
    import torch

    return torch.cat([tree.new_ones((len(tree), kv_len - len(tree))), tree], dim=1)


def _words(tree: Any) -> Any:
    """int32 [rows] from bool [rows, rows], up to 31 of them."""
    import torch

    bits = 2 ** torch.arange(tree.shape[1], device=tree.device)
    return (tree * bits).sum(1).to(torch.int32)


def _poison(pool: Any, tables: PageTables, value: float) -> None:
    """The value in pages of nobody, and in the slots of a last page beyond its length."""
    import torch

    pool[torch.from_numpy(tables.unowned).to(pool.device)] = value
    for b in np.flatnonzero(tables.last_page_len < tables.page_size):
        pool[int(tables.pages(b)[-1]), int(tables.last_page_len[b]) :] = value

"""Fresh random normal inputs of a batch, as torch tensors on one device."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..inputs import Inputs, causal_mask, pack_little
from .case import BatchCase
from .tables import PageTables, page_tables


@dataclass
class BatchInputs:
    """q [rows, Hq, Dqk] bfloat16, request after request. k and v in the KV dtype: the pools
    [pages, page_size, Hkv, D] where `tables` are given, else [keys, Hkv, D].

    Offsets are int32 NumPy arrays. `masks` are bool [q_len, kv_len] of each request; `packed` are
    their bits, every request padded to a byte, with `packed_offsets` in bytes.
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

    def request(self, b: int) -> Inputs:
        """One request on its own, with a batch axis of 1; paged keys are gathered."""
        rows = slice(int(self.qo_indptr[b]), int(self.qo_indptr[b + 1]))
        inputs = Inputs(self.q[None, rows], *self._keys(b))
        if self.masks is not None and self.packed_offsets is not None:
            bits = slice(self.packed_offsets[b], self.packed_offsets[b + 1])
            inputs = replace(inputs, mask=self.masks[b][None], packed=self.packed[None, bits])
        return inputs

    def _keys(self, b: int) -> list[Any]:
        if self.tables is None:
            keys = slice(int(self.kv_indptr[b]), int(self.kv_indptr[b + 1]))
            return [self.k[None, keys], self.v[None, keys]]
        import torch

        pages = torch.from_numpy(self.tables.pages(b).astype(np.int64)).to(self.k.device)
        stop = int(self.tables.kv_lens[b])
        return [_take(pool, pages).flatten(0, 1)[None, :stop] for pool in (self.k, self.v)]


def make_batch_inputs(case: BatchCase, device: str = "cuda") -> BatchInputs:
    """Random normal q, k, v, the same in every run; slots of a pool that no key owns hold NaN."""
    import torch

    seed = zlib.crc32(case.name.encode())
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    kv_dtype = getattr(torch, case.kv_dtype)
    tables = page_tables(case.kv_lens, case.page_size, seed, case.shared) if case.is_paged else None

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def keys(dim: int) -> Any:
        if tables is None:
            return normal(case.kv_offsets[-1], case.num_kv_heads, dim).to(kv_dtype)
        pool = normal(tables.num_pages, case.page_size, case.num_kv_heads, dim)
        _poison(pool, tables)
        return pool.to(kv_dtype)

    inputs = BatchInputs(
        normal(case.q_offsets[-1], case.num_qo_heads, case.head_dim_qk),
        keys(case.head_dim_qk),
        keys(case.head_dim_vo),
        np.array(case.q_offsets, np.int32),
        np.array(case.kv_offsets, np.int32),
        tables,
    )
    if case.mask != "none":
        inputs.masks = [causal_mask(case.request(b), device)[0] for b in range(case.batch)]
        packed = [pack_little(mask.reshape(1, -1))[0] for mask in inputs.masks]
        inputs.packed = torch.cat(packed)
        inputs.packed_offsets = [0, *np.cumsum([len(bits) for bits in packed]).tolist()]
    return inputs


def _poison(pool: Any, tables: PageTables) -> None:
    """NaN in pages of nobody, and in the slots of a last page beyond its length."""
    import torch

    pool[torch.from_numpy(tables.unowned).to(pool.device)] = float("nan")
    for b in np.flatnonzero(tables.last_page_len < tables.page_size):
        pool[int(tables.pages(b)[-1]), int(tables.last_page_len[b]) :] = float("nan")


def _take(pool: Any, pages: Any) -> Any:
    """pool[pages]; one-byte floats travel as integers, which every torch can index."""
    import torch

    if pool.element_size() > 1:
        return pool[pages]
    return pool.view(torch.uint8)[pages].view(pool.dtype)

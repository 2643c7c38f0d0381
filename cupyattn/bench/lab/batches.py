"""Batches of the notebooks: on this GPU if there is one, otherwise on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupyattn

from ... import array
from ...array import CPU, Device
from ...core.device import DeviceProps, device_props
from ...errors import CupyAttnError
from ..inputs import Arrays, as_bits

BYTES = 2  # of a bfloat16


def _gpu() -> DeviceProps | None:
    try:
        return device_props(0)
    except CupyAttnError:
        return None


GPU = _gpu()
DEVICE = "cuda" if GPU else "cpu"
arrays = Arrays("cupy" if GPU else "numpy", Device("cuda", 0) if GPU else CPU, seed=0)


@dataclass(frozen=True)
class Paged:
    """A batch over a paged cache: q [rows, Hq, D], a pool of pages, and the three tables."""

    q: Any
    k: Any
    v: Any
    indptr: np.ndarray
    indices: Any
    last_page_len: np.ndarray
    page_size: int

    @property
    def tables(self) -> tuple[np.ndarray, Any, np.ndarray]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def cache(self) -> tuple[Any, Any]:
        return self.k, self.v


def paged(
    lengths: Sequence[int],
    rows: int = 1,
    page_size: int = 16,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
) -> Paged:
    """Requests of these lengths in scattered pages, with `rows` query tokens each, in bfloat16."""
    counts = [-(-n // page_size) for n in lengths]
    last = [n - (count - 1) * page_size for n, count in zip(lengths, counts, strict=True)]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    pool = sum(counts), page_size, heads[1], head_dim
    return Paged(
        arrays.normal(rows * len(lengths), heads[0], head_dim),
        arrays.normal(*pool),
        arrays.normal(*pool),
        np.append(0, np.cumsum(counts)).astype(np.int32),
        arrays.int32(order),
        np.array(last, np.int32),
        page_size,
    )


def decode(batch: Paged, **options: Any) -> Callable[[], Any]:
    """A decode of the batch that is planned: what one layer of a model then calls."""
    heads, head_dim = (batch.q.shape[1], batch.k.shape[2]), batch.q.shape[2]
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(DEVICE)
    settings: dict[str, Any] = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16", **options}
    settings |= {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    settings["page_size"] = batch.page_size
    wrapper.plan(batch.indptr, batch.indices, batch.last_page_len, **settings)
    out = arrays.normal(*batch.q.shape)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def put(x: np.ndarray) -> Any:
    """A NumPy array on the device that is here."""
    return array.from_numpy(x, array.view(arrays.int32(np.zeros(1, np.int32)), "device"))


def mask_bits(masks: np.ndarray) -> Any:
    """Masks of drafts, bool [requests, n, n] with n up to 32, as a word of bits for each row."""
    bits = (masks * 2 ** np.arange(masks.shape[2])).sum(2)
    return put(bits.astype(np.int32).reshape(-1))


def alone_and_with(count: int, length: int, **options: Any) -> Any:
    """The answer of one request of `length` keys in a batch of `count`: its inputs never change."""
    lengths = [length, *([512] * (count - 1))]
    batch = paged(lengths)
    own = -(-length // batch.page_size)
    generator = Arrays(arrays.framework, arrays.device, seed=1)
    same = generator.normal(own, *batch.k.shape[1:]), generator.normal(own, *batch.v.shape[1:])
    row = generator.normal(1, *batch.q.shape[1:])
    order = np.arange(int(batch.indptr[-1]), dtype=np.int32)
    batch = replace(batch, indices=arrays.int32(order))
    for whole, part in zip((batch.q, batch.k, batch.v), (row, *same), strict=True):
        as_bits(whole)[: len(part)] = as_bits(part)
    return decode(batch, **options)()[:1]


def host(x: Any) -> np.ndarray:
    """An array of any framework on any device as float32 on the host."""
    return array.to_host(array.view(x, "array")).astype(np.float32)


def decode_bytes(tokens: int, kv_heads: int = 8, head_dim: int = 128) -> int:
    """Bytes of the keys and values of so many tokens: what decode must read."""
    return 2 * tokens * kv_heads * head_dim * BYTES

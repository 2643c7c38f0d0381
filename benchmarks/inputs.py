"""Fresh random normal inputs of a case, as torch tensors on one device."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from .case import Case


@dataclass
class Inputs:
    """q [B, q_len, Hq, Dqk] bfloat16; k [B, kv_len, Hkv, Dqk] and v [B, kv_len, Hkv, Dvo] in the KV
    dtype; mask bool [B, q_len, kv_len], packed uint8 [B, ceil(q_len * kv_len / 8)] and sinks
    float32 [Hq] (natural-log logits), or None.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    packed: Any = None
    sinks: Any = None


def make_inputs(case: Case, device: str = "cuda") -> Inputs:
    """Random normal q, k, v (zeros would run faster than real data), the same in every run."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(case.name.encode()))

    def normal(length: int, heads: int, dim: int) -> Any:
        shape = (case.batch, length, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    kv_dtype = getattr(torch, case.kv_dtype)
    q = normal(case.q_len, case.num_qo_heads, case.head_dim_qk)
    k = normal(case.kv_len, case.num_kv_heads, case.head_dim_qk).to(kv_dtype)
    v = normal(case.kv_len, case.num_kv_heads, case.head_dim_vo).to(kv_dtype)
    if case.mask == "none":
        return Inputs(q, k, v)
    mask = causal_mask(case, device)
    return Inputs(q, k, v, mask, pack_little(mask.reshape(case.batch, -1)))


def take(rows: Any, index: Any) -> Any:
    """rows[index]; one-byte floats travel as integers, which every torch can index."""
    import torch

    if rows.element_size() > 1:
        return rows[index]
    return rows.view(torch.uint8)[index].view(rows.dtype)


def causal_mask(case: Case, device: str) -> Any:
    """bool [batch, q_len, kv_len], bottom-right aligned."""
    import torch

    rows = torch.arange(case.q_len, device=device)[:, None] + (case.kv_len - case.q_len)
    keys = torch.arange(case.kv_len, device=device)[None, :]
    return (keys <= rows).expand(case.batch, -1, -1).contiguous()


def pack_little(bits: Any) -> Any:
    """bool [B, n] -> uint8 [B, ceil(n / 8)], bit i of a byte being element i of its eight."""
    import torch

    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).to(torch.uint8)
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=bits.device)
    return (padded.view(bits.shape[0], -1, 8) * weights).sum(-1, dtype=torch.uint8)

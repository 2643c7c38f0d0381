"""Decode steps: on one GPU, on the share that a rank has of them, and on the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cupyattn
from cupyattn.distributed import StateExchange

from .cases import PAGE_SIZE, Decode
from .exchange import PATHS, make_exchange
from .machine import Machine
from .rank import Rank

_WORKSPACE_BYTES = 64 << 20


class DecodeArrays:
    """Queries and pages of a case, the same on every rank."""

    def __init__(self, case: Decode, machine: Machine) -> None:
        self.case, self.machine = case, machine
        pages = case.batch * case.keys // PAGE_SIZE
        columns = case.head_dim + case.rope_dim
        self.q = machine.randn(case.batch, case.num_qo_heads, columns, seed=case.batch)
        shape = (
            (pages, PAGE_SIZE, columns)
            if case.is_latent
            else (pages, 2, PAGE_SIZE, case.num_kv_heads, case.head_dim)
        )
        self.pages = machine.randn(*shape, seed=case.keys)
        order = np.random.default_rng(case.keys).permutation(pages).astype(np.int32)
        self.table = order.reshape(case.batch, -1)
        size = _WORKSPACE_BYTES if machine.on_gpu else 1 << 24
        self.workspace_bytes = size

    def step(self, part: int, parts: int, o_dtype: torch.dtype) -> Callable[[], Any]:
        """A step over every `parts`-th page of each request, from page `part` on."""
        case, machine = self.case, self.machine
        table = self.table[:, part::parts]
        indptr = np.arange(case.batch + 1, dtype=np.int32) * table.shape[1]
        indices = torch.from_numpy(np.ascontiguousarray(table.reshape(-1))).to(machine.device)
        workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=machine.device)
        out = machine.empty(case.batch, case.num_qo_heads, case.head_dim, dtype=o_dtype)
        lse = machine.empty(case.batch, case.num_qo_heads, dtype=torch.float32)
        if case.is_latent:
            return self._latent_step(workspace, indptr, indices, out, lse)
        decode = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        decode.plan(
            indptr,
            indices,
            np.full(case.batch, PAGE_SIZE, np.int32),
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            PAGE_SIZE,
            q_data_type=machine.dtype,
            kv_data_type=machine.dtype,
            o_data_type=o_dtype,
        )
        return lambda: decode.run(self.q, self.pages, out=out, lse=lse, return_lse=True)

    def _latent_step(
        self,
        workspace: torch.Tensor,
        indptr: np.ndarray,
        indices: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Callable[[], Any]:
        case, dtype = self.case, self.machine.dtype
        latent = cupyattn.BatchMLAPagedAttentionWrapper(workspace)
        latent.plan(
            np.arange(case.batch + 1, dtype=np.int32),
            indptr,
            indices,
            np.diff(indptr) * np.int32(PAGE_SIZE),
            case.num_qo_heads,
            case.head_dim,
            case.rope_dim,
            PAGE_SIZE,
            False,
            192.0**-0.5,
            dtype,
            dtype,
            output_dtype=out.dtype,
        )
        queries = self.q.split((case.head_dim, case.rope_dim), -1)
        caches = self.pages.split((case.head_dim, case.rope_dim), -1)
        return lambda: latent.run(*queries, *caches, out=out, lse=lse, return_lse=True)


def run_decode(rank: Rank, case: Decode) -> None:
    """A case on one GPU, on parts of one, and on the group, whose answer is checked."""
    group, machine = rank.group, rank.machine
    arrays = DecodeArrays(case, machine)
    alone = arrays.step(0, 1, machine.dtype)
    whole = alone()[0].float()
    if rank.parts:
        rank.add_alone("decode", case.name, alone, machine.layers)
        for parts in rank.parts[1:]:
            if arrays.table.shape[1] % parts == 0 and rank.has_time(15):
                # Layers have keys of their own, which L2 does not hold from one visit to the next.
                count = min(machine.layers, parts)
                steps = [arrays.step(part, parts, torch.float32) for part in range(count)]
                rank.add_share(case.name, steps, machine.layers, parts=parts)
    if group.size == 1:
        return
    attend = arrays.step(group.rank, group.size, torch.float32)
    own = case.num_qo_heads // group.size
    expected = whole[:, group.rank * own : (group.rank + 1) * own]
    out = machine.empty(case.batch, own, case.head_dim)
    for path in PATHS:
        exchange = make_exchange(rank, path, case.batch, case.num_qo_heads, case.head_dim)

        def step(exchange: StateExchange = exchange) -> None:
            exchange.run(*attend(), out)

        us = rank.time_step(step, machine.layers)
        off = rank.greatest(float((out.float() - expected).abs().max() / expected.abs().max()))
        group.check()
        exchange.close()
        rank.add("decode", case.name, us, world=group.size, path=path, off=off)

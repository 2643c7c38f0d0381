"""Prompts: on one GPU, on the share that a rank has of them, and on the group by every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import cupyattn
from cupyattn import array
from cupyattn.distributed import ContextParallelPrefill, Group, ZigZag
from cupyattn.distributed.exchanged_rows import ExchangedRows
from cupyattn.distributed.peer_memory import PeerMemory

from .cases import SHARE_METHODS, Prompt
from .lone import lone_group
from .rank import Rank

_WORKSPACE_BYTES = 256 << 20
_METHODS = "auto", "gather", "overlap", "ulysses"


def run_prompt(rank: Rank, case: Prompt) -> None:
    """A case on one GPU, on parts of one, and on the group, whose answers are checked."""
    group, machine = rank.group, rank.machine
    q = machine.randn(case.tokens, case.num_qo_heads, case.head_dim, seed=case.tokens)
    k, v = (
        machine.randn(case.tokens, case.num_kv_heads, case.head_dim, seed=case.tokens + n)
        for n in (1, 2)
    )
    alone = _prompt_alone(rank, case, q, k, v)
    whole = alone()
    if rank.parts:
        rank.add_alone("prompt", case.name, alone, 1)
        for parts in rank.parts[1:]:
            for method in SHARE_METHODS:
                if rank.has_time(15):
                    # One chunk, as where copies bring keys to the peers' memory.
                    lone = lone_group(parts, machine.on_gpu)
                    _, step = _prompt_step(lone, case, (q, k, v), method, num_chunks=1)
                    rank.add_share(case.name, [step], 1, parts=parts, method=method)
    if group.size == 1:
        return
    share = ZigZag(np.array([0, case.tokens], np.int32), group.size)
    expected = share.cut(whole, group.rank).float()
    _run_gather(rank, case, [share.cut(x, group.rank) for x in (k, v)])
    for method in _METHODS:
        prefill, step = _prompt_step(group, case, (q, k, v), method)
        us = rank.time_step(step, 1)
        off = rank.greatest(float((step().float() - expected).abs().max()))
        facts = {"world": group.size, "path": method, "off": off, "chosen": prefill.describe()}
        rank.add("prompt", case.name, us, **facts)
        prefill.close()


def _prompt_alone(
    rank: Rank, case: Prompt, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Any]:
    """The causal attention of one GPU to its prompt."""
    size = _WORKSPACE_BYTES if rank.machine.on_gpu else 1 << 24
    workspace = torch.zeros(size, dtype=torch.uint8, device=q.device)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    indptr = np.array([0, case.tokens], np.int32)
    ragged.plan(
        indptr,
        indptr,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        causal=True,
        q_data_type=q.dtype,
    )
    return lambda: ragged.run(q, k, v)


def _prompt_step(
    group: Group,
    case: Prompt,
    whole: Sequence[torch.Tensor],
    method: str,
    num_chunks: int | None = None,
) -> tuple[ContextParallelPrefill, Callable[[], Any]]:
    """A rank's attention by a method, and the call that makes it."""
    indptr = np.array([0, case.tokens], np.int32)
    share = ZigZag(indptr, group.size)
    own = [share.cut(x, group.rank) for x in whole]
    prefill = ContextParallelPrefill(group, method=method)
    prefill.plan(
        indptr,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        q_data_type=whole[0].dtype,
        num_chunks=num_chunks,
    )
    return prefill, lambda: prefill.run(*own)


def _run_gather(rank: Rank, case: Prompt, own: Sequence[torch.Tensor]) -> None:
    """The gather of keys alone: by copies into the peers' memory, and by the group's all_gather."""
    group, machine = rank.group, rank.machine
    given = torch.cat([x.reshape(x.shape[0], -1) for x in own], 1)
    like = array.view(given, "keys")
    rows = ExchangedRows(given.shape[0], given.shape[1], like.dtype, like)
    rows.whole.copy_(given)
    nbytes = given.numel() * given.element_size()
    facts = {"world": group.size, "sent_bytes": nbytes * (group.size - 1)}
    taken = ExchangedRows(group.size * given.shape[0], given.shape[1], like.dtype, like)
    out = taken.bytes(0, group.size * given.shape[0])

    def by_collective() -> None:
        group.all_gather(out, rows.bytes(0, given.shape[0]), machine.stream())

    us = rank.time_step(by_collective, 2)
    rank.add("gather_packed", case.name, us, path="packed", **facts)
    peers = PeerMemory(group)
    if not peers.reserve(group.size * nbytes):
        rank.add("gather", case.name, us, path="packed", **facts)
        return

    def by_copies() -> None:
        peers.begin(machine.stream())
        peers.send(rows, 0, given.shape[0], 0, machine.stream())

    us = rank.time_step(by_copies, 2)
    rank.add("gather", case.name, us, path="windows", **facts)
    peers.close()

"""Exchanges of states alone: by windows, by the group's all_to_all, and as engines make them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import cupyattn
from cupyattn.distributed import StateExchange

from .rank import Rank

# What carries states, and the kind of its rows.
PATHS = {"windows": "exchange", "packed": "exchange_packed"}


_SETTLED = 0.02  # seconds: copies do not come near the limit of a GPU's power


def make_exchange(rank: Rank, path: str, rows: int, heads: int, head_dim: int) -> StateExchange:
    """An exchange by a path of `PATHS`. On the CPU there are no windows, and both are one."""
    uses_windows = path == "windows" if rank.machine.on_gpu else None
    return StateExchange(
        rank.group,
        rows,
        heads,
        head_dim,
        out_dtype=rank.machine.dtype,
        uses_windows=uses_windows,
    )


def run_exchange(rank: Rank, rows: int, heads: int, head_dim: int) -> None:
    """The exchange of states of one shape, by every path."""
    group, machine = rank.group, rank.machine
    o = machine.randn(rows, heads, head_dim, seed=rows).float()
    lse = machine.randn(rows, heads, seed=heads).float()
    out = machine.empty(rows, heads // group.size, head_dim)
    facts = {"rows": rows, "heads": heads, "head_dim": head_dim, "world": group.size}
    facts["sent_bytes"] = rows * heads * (head_dim + 1) * 4 * (group.size - 1) // group.size
    name = f"exchange_{rows}x{heads}x{head_dim}"
    layers = 2 * machine.layers
    for path, kind in PATHS.items():
        exchange = make_exchange(rank, path, rows, heads, head_dim)
        us = rank.time_step(lambda exchange=exchange: exchange.run(o, lse, out), layers, _SETTLED)
        rank.add(kind, name, us, path=path, **facts)
        exchange.close()
    if dist.is_initialized():
        by_torch = TorchExchange(o, lse)
        us = rank.time_step(by_torch.run, layers, _SETTLED)
        rank.add("exchange_torch", name, us, path="torch", **facts)


class TorchExchange:
    """The exchange as engines make it: two all-to-alls of torch.distributed, then a merge."""

    def __init__(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        self.size = dist.get_world_size()
        rows, heads, head_dim = o.shape
        self.o, self.lse = o, lse
        shape = self.size, rows, heads // self.size
        self.sent_o, self.got_o = (torch.empty(*shape, head_dim, device=o.device) for _ in range(2))
        self.sent_lse, self.got_lse = (torch.empty(*shape, device=o.device) for _ in range(2))

    def run(self) -> None:
        """Exchange and merge."""
        rows, heads, head_dim = self.o.shape
        parts = self.o.view(rows, self.size, heads // self.size, head_dim)
        self.sent_o.copy_(parts.transpose(0, 1))
        self.sent_lse.copy_(self.lse.view(rows, self.size, -1).transpose(0, 1))
        dist.all_to_all_single(self.got_o, self.sent_o)
        dist.all_to_all_single(self.got_lse, self.sent_lse)
        cupyattn.merge_states(self.got_o.transpose(0, 1), self.got_lse.transpose(0, 1))

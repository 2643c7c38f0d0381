"""What one rank measures: its kernels alone, exchanges alone, decode steps and prompts.

Every rank makes the same keys of a case by a seed, and uses its own pages of them, so that rank 0
can also answer alone. Steps are timed as CUDA graphs of several layers; of the ranks' times the
longest counts. Rows go to the file that is named in the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cupyattn
from cupyattn.distributed import ContextParallelPrefill, Group, StateExchange, ZigZag

from .cases import DECODES, EXCHANGES, PAGE_SIZE, PARTS, PROMPTS, Decode, Prompt

_LAYERS = 10  # of a graph
_VISITS = 12
_WORKSPACE_BYTES = 256 << 20


class Rank:
    """This process among the others, and the rows that it has measured."""

    def __init__(self, group: Group, out: Path, deadline: float, alone: bool) -> None:
        self.group, self.out, self.deadline = group, out, deadline
        self.alone = alone  # whether kernels on one GPU are measured too
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, case: str, us: float, **facts: Any) -> None:
        """Keep a row, and write all."""
        self.rows.append({"kind": kind, "case": case, "us": round(us, 2), **facts})
        if self.group.rank == 0:
            print(json.dumps(self.rows[-1]), flush=True)
            self.out.write_text(json.dumps(self.rows), "utf-8")

    def has_time(self, seconds: float) -> bool:
        """Whether all ranks have so many seconds left: rank 0 says."""
        left = self.deadline - time.time()
        return float(self.group.share_bytes(repr(left).encode())[0]) > seconds

    def longest(self, times: Sequence[float]) -> float:
        """The median over visits of the longest time of all ranks."""
        shared = self.group.share_bytes(json.dumps(list(times)).encode())
        return float(np.median(np.max([json.loads(x) for x in shared], axis=0)))

    def time_step(self, step: Callable[[], Any], layers: int = _LAYERS) -> float:
        """µs of a step that all ranks make, in a graph of several."""
        graph = captured(step, layers)
        times = []
        for _ in range(_VISITS):
            # Hosts come here at times that differ by more than a step takes. The first replay ends
            # on all ranks at one time, and is not counted.
            self.group.share_bytes(b"")
            graph.replay()
            times.append(time_of(graph.replay) / layers)
        return self.longest(times[2:])


def captured(step: Callable[[], Any], layers: int) -> torch.cuda.CUDAGraph:
    """A graph of so many steps."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(layers):
                step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_of(call: Callable[[], Any]) -> float:
    """µs of a call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def time_alone(step: Callable[[], Any], layers: int = _LAYERS) -> float:
    """µs of a step of this GPU alone, in a graph of several."""
    graph = captured(step, layers)
    return float(np.median([time_of(graph.replay) / layers for _ in range(_VISITS)][2:]))


class DecodeArrays:
    """Queries and pages of a case, the same on every rank."""

    def __init__(self, case: Decode) -> None:
        self.case = case
        torch.manual_seed(case.keys + case.batch)
        pages = case.batch * case.keys // PAGE_SIZE
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        columns = case.head_dim + case.rope_dim
        self.q = torch.randn(case.batch, case.num_qo_heads, columns, **options)
        shape = (
            (pages, PAGE_SIZE, columns)
            if case.is_latent
            else (pages, 2, PAGE_SIZE, case.num_kv_heads, case.head_dim)
        )
        self.pages = torch.empty(shape, **options)
        for part in self.pages.split(max(1, pages // 16)):
            part.normal_()
        order = np.random.default_rng(case.keys).permutation(pages).astype(np.int32)
        self.table = order.reshape(case.batch, -1)

    def step(self, part: int, parts: int, o_dtype: torch.dtype) -> Callable[[], Any]:
        """A step over every `parts`-th page of each request, from page `part` on."""
        case = self.case
        table = self.table[:, part::parts]
        indptr = np.arange(case.batch + 1, dtype=np.int32) * table.shape[1]
        lens = np.full(case.batch, table.shape[1] * PAGE_SIZE, np.int32)
        last = np.full(case.batch, PAGE_SIZE, np.int32)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        indices = torch.from_numpy(np.ascontiguousarray(table.reshape(-1))).cuda()
        out = torch.empty(
            case.batch, case.num_qo_heads, case.head_dim, dtype=o_dtype, device="cuda"
        )
        lse = torch.empty(case.batch, case.num_qo_heads, dtype=torch.float32, device="cuda")
        if case.is_latent:
            latent = cupyattn.BatchMLAPagedAttentionWrapper(workspace)
            rows = np.arange(case.batch + 1, dtype=np.int32)
            latent.plan(
                rows,
                indptr,
                indices,
                lens,
                case.num_qo_heads,
                case.head_dim,
                case.rope_dim,
                PAGE_SIZE,
                False,
                192.0**-0.5,
                torch.bfloat16,
                torch.bfloat16,
                output_dtype=o_dtype,
            )
            split = self.q.split((case.head_dim, case.rope_dim), -1)
            caches = self.pages.split((case.head_dim, case.rope_dim), -1)
            return lambda: latent.run(*split, *caches, out=out, lse=lse, return_lse=True)
        decode = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        decode.plan(
            indptr,
            indices,
            last,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            PAGE_SIZE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            o_data_type=o_dtype,
        )
        return lambda: decode.run(self.q, self.pages, out=out, lse=lse, return_lse=True)


def run_decode(rank: Rank, case: Decode) -> None:
    """A case on one GPU, on parts of one, and on the group, whose answer is checked."""
    group, arrays = rank.group, DecodeArrays(case)
    alone = arrays.step(0, 1, torch.bfloat16)
    whole = alone()[0].float()
    if rank.alone:
        rank.add("decode", case.name, time_alone(alone), world=1, path="one")
        rank.add("share", case.name, rank.rows[-1]["us"], parts=1)
        for parts in PARTS[1:]:
            if arrays.table.shape[1] % parts == 0 and rank.has_time(30):
                step = arrays.step(0, parts, torch.float32)
                rank.add("share", case.name, time_alone(step), parts=parts)
    attend = arrays.step(group.rank, group.size, torch.float32)
    own = case.num_qo_heads // group.size
    expected = whole[:, group.rank * own : (group.rank + 1) * own]
    for path in ("windows", "packed"):
        exchange = StateExchange(
            group, case.batch, case.num_qo_heads, case.head_dim, uses_windows=path == "windows"
        )
        out = torch.empty(case.batch, own, case.head_dim, dtype=torch.bfloat16, device="cuda")

        def step(exchange: StateExchange = exchange, out: torch.Tensor = out) -> None:
            exchange.run(*attend(), out)

        us = rank.time_step(step)
        off = (out.float() - expected).abs().max() / expected.abs().max()
        group.check()
        rank.add("decode", case.name, us, world=group.size, path=path, off=float(off))


def run_prompt(rank: Rank, case: Prompt) -> None:
    """A prompt on one GPU, on parts of one, and on the group by every method."""
    group = rank.group
    torch.manual_seed(case.tokens)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(case.tokens, case.num_qo_heads, case.head_dim, **options)
    k, v = (torch.randn(case.tokens, case.num_kv_heads, case.head_dim, **options) for _ in "kv")
    indptr = np.array([0, case.tokens], np.int32)
    alone = prompt_alone(case, q, k, v)
    whole = alone()
    if rank.alone:
        rank.add("prompt", case.name, time_alone(alone, 1), world=1, path="one")
        rank.add("share", case.name, rank.rows[-1]["us"], parts=1)
        for parts in PARTS[1:]:
            if rank.has_time(30):
                step = prompt_share(case, q, k, v, parts)
                rank.add("share", case.name, time_alone(step, 1), parts=parts)
    share = ZigZag(indptr, group.size)
    own = [share.cut(x, group.rank) for x in (q, k, v)]
    expected = share.cut(whole, group.rank).float()
    run_gather(rank, case, own[1:])
    for method in ("auto", "gather", "overlap", "ulysses"):
        prefill = ContextParallelPrefill(group, method=method)
        prefill.plan(
            indptr, case.num_qo_heads, case.num_kv_heads, case.head_dim, q_data_type=torch.bfloat16
        )
        us = rank.time_step(lambda prefill=prefill: prefill.run(*own), 1)
        off = (prefill.run(*own).float() - expected).abs().max()
        rank.add(
            "prompt",
            case.name,
            us,
            world=group.size,
            path=method,
            off=float(off),
            chosen=prefill.describe(),
        )


def prompt_alone(
    case: Prompt, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Any]:
    """The causal attention of one GPU to its prompt."""
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    indptr = np.array([0, case.tokens], np.int32)
    ragged.plan(
        indptr,
        indptr,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    return lambda: ragged.run(q, k, v)


def prompt_share(
    case: Prompt, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: int
) -> Callable[[], Any]:
    """The attention of a rank of so many: two pieces of rows over the keys up to each."""
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    pages = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    rows = case.tokens // (2 * parts)
    ends = np.array([rows, case.tokens])
    starts = np.arange(len(ends) + 1, dtype=np.int32) * rows
    counts = ends // PAGE_SIZE
    indices = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
    pages.plan(
        starts,
        np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        indices,
        np.full(len(ends), PAGE_SIZE, np.int32),
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        PAGE_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    own = torch.cat([q[end - rows : end] for end in ends])
    paged = [x.view(-1, PAGE_SIZE, case.num_kv_heads, case.head_dim) for x in (k, v)]
    return lambda: pages.run(own, tuple(paged))


def run_gather(rank: Rank, case: Prompt, own: Sequence[torch.Tensor]) -> None:
    """The gather of keys alone."""
    group = rank.group
    given = torch.stack(tuple(own)).contiguous().view(torch.uint8).view(-1)
    out = torch.empty(group.size * given.numel(), dtype=torch.uint8, device="cuda")
    us = rank.time_step(lambda: dist.all_gather_into_tensor(out, given), 2)
    sent = given.numel() * (group.size - 1)
    rank.add("gather", case.name, us, world=group.size, sent_bytes=sent)


def run_exchange(rank: Rank, rows: int, heads: int, head_dim: int) -> None:
    """Exchanges alone: by windows, by the group's all_to_all, and the like of torch.distributed."""
    group = rank.group
    o = torch.randn(rows, heads, head_dim, device="cuda")
    lse = torch.randn(rows, heads, device="cuda")
    out = torch.empty(rows, heads // group.size, head_dim, dtype=torch.bfloat16, device="cuda")
    facts = {"rows": rows, "heads": heads, "head_dim": head_dim, "world": group.size}
    sent = rows * heads * (head_dim + 1) * 4 * (group.size - 1) // group.size
    name = f"exchange_{rows}x{heads}x{head_dim}"
    for path in ("windows", "packed"):
        exchange = StateExchange(group, rows, heads, head_dim, uses_windows=path == "windows")
        us = rank.time_step(lambda exchange=exchange: exchange.run(o, lse, out), 2 * _LAYERS)
        kind = "exchange" if path == "windows" else "exchange_packed"
        rank.add(kind, name, us, path=path, sent_bytes=sent, **facts)
    by_torch = TorchExchange(o, lse, out)
    rank.add(
        "exchange_torch",
        name,
        rank.time_step(by_torch.run, 2 * _LAYERS),
        path="torch",
        sent_bytes=sent,
        **facts,
    )


class TorchExchange:
    """The exchange as engines make it: two all-to-alls of torch.distributed, then a merge."""

    def __init__(self, o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
        self.size, self.out = dist.get_world_size(), out
        rows, heads, head_dim = o.shape
        self.o, self.lse = o, lse
        shape = self.size, rows, heads // self.size
        self.sent_o, self.got_o = (torch.empty(*shape, head_dim, device="cuda") for _ in range(2))
        self.sent_lse, self.got_lse = (torch.empty(*shape, device="cuda") for _ in range(2))

    def run(self) -> None:
        """Exchange and merge."""
        rows, heads, head_dim = self.o.shape
        parts = self.o.view(rows, self.size, heads // self.size, head_dim)
        self.sent_o.copy_(parts.transpose(0, 1))
        self.sent_lse.copy_(self.lse.view(rows, self.size, -1).transpose(0, 1))
        dist.all_to_all_single(self.got_o, self.sent_o)
        dist.all_to_all_single(self.got_lse, self.sent_lse)
        cupyattn.merge_states(self.got_o.transpose(0, 1), self.got_lse.transpose(0, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as one of the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.rank")
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--case", default="", help="names that start so")
    parser.add_argument("--alone", action="store_true", help="measure one GPU's kernels too")
    args = parser.parse_args(argv)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    group = Group.from_torch(device=device.index)
    print(group.describe(), flush=True)
    rank = Rank(group, args.out, time.time() + args.seconds, args.alone)
    for shape in EXCHANGES:
        if rank.has_time(20) and "exchange".startswith(args.case):
            run_exchange(rank, *shape)
    for decode in DECODES:
        if rank.has_time(40) and decode.name.startswith(args.case):
            run_decode(rank, decode)
            torch.cuda.empty_cache()
    for prompt in PROMPTS:
        if rank.has_time(40) and prompt.name.startswith(args.case):
            run_prompt(rank, prompt)
    group.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

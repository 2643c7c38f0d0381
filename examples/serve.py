"""Serve requests with a toy engine, check every token against a dense model, and time it.

    python -m examples.serve        (or make serve-demo)
    torchrun --nproc-per-node 2 -m examples.serve --cp 2     keys of all requests over two GPUs
    python -m examples.serve --device cpu --cp 2             the same by threads, without a GPU

Read on in engine.py, then worker.py, drafts.py, pages.py and model.py.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cupyattn.distributed import Group, simulate

from .engine import Engine
from .model import Llama, Shape, dense_attention
from .pages import Request
from .worker import NO_DRAFTS, Limits, TreeShape


class Job(NamedTuple):
    """Requests whose prompts begin with one of two system prompts. user_len and answer_len are the
    most; the least are half of them."""

    shape: Shape
    limits: Limits
    tree: TreeShape
    num_requests: int
    system_len: int
    user_len: int
    answer_len: int

    def requests(self, seed: int) -> list[Request]:
        rng = random.Random(seed)

        def text(least: int, most: int) -> list[int]:
            return [rng.randrange(self.shape.vocab) for _ in range(rng.randint(least, most))]

        systems = [text(self.system_len, self.system_len) for _ in range(2)]
        user = self.user_len // 2, self.user_len
        prompts = [systems[i % 2] + text(*user) for i in range(self.num_requests)]
        lens = [rng.randint(self.answer_len // 2, self.answer_len) for _ in prompts]
        return [Request(x, len(x), len(x) + n) for x, n in zip(prompts, lens, strict=True)]


GPU_JOB = Job(
    Shape(32000, 2048, 16, heads=16, kv_heads=4, head_dim=128, hidden=5632, early_layers=2),
    Limits(max_batch=16, max_context=2048, chunk=2048, num_pages=1536, page_size=16),
    TreeShape(topk=4, depth=4, num_tokens=16),
    *(64, 512, 512, 128),
)
CPU_JOB = Job(
    Shape(128, 64, 3, heads=4, kv_heads=2, head_dim=16, hidden=128, early_layers=1),
    Limits(max_batch=4, max_context=128, chunk=40, num_pages=36, page_size=8),
    TreeShape(topk=2, depth=3, num_tokens=6),
    *(8, 20, 20, 12),
)


def check(model: Llama, requests: list[Request]) -> tuple[Tensor, Tensor]:
    """Hold every token against the float32 logits of a dense model that has read all before it.

    Where two words are nearly tied the engine may say the second, and goes on from there: each of
    the two logits may be off by twice what the dense model itself is off in the engine's dtype.

    Returns for each token how far its logit is from the dense model's first, and how far it may be.
    """
    models, gaps, allowed = (model.to(torch.float32), model), [], []
    for request in requests:
        first = request.prompt_len
        assert len(request.tokens) == request.max_len
        tokens = torch.tensor(request.tokens, device=model.device)
        positions = torch.arange(len(tokens) - 1, device=model.device)
        hidden = [x.hidden(tokens[:-1], positions, dense_attention) for x in models]
        exact, rounded = (x.logits(y[first - 1 :]) for x, y in zip(models, hidden, strict=True))
        gaps.append(exact.amax(1) - exact.gather(1, tokens[first:, None])[:, 0])
        allowed.append(4 * (rounded - exact).abs().amax(1) + 1e-5 * exact.abs().amax(1))
    return torch.cat(gaps), torch.cat(allowed)


def show(label: str, done: int, total: int) -> None:
    """A progress bar on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        bar, end = "#" * (40 * done // total), "\r\033[K" if done == total else ""
        print(f"\r{label:22} [{bar:40}] {done}/{total} {end}", end="", file=sys.stderr)


HEAD = "run", "prefill tok/s", "decode tok/s", "tokens a step", "reused", "check", "second choices"
ROW = "{:22}  {:>13}  {:>12}  {:>13}  {:>6}  {:15}  {}"


def run(
    job: Job, model: Llama, label: str, has_drafts: bool, has_graphs: bool,
    group: Group | None = None,
) -> bool:  # fmt: skip
    """Serve and check the job's requests, and print a row of the table. True: all is right."""
    draft = (model.draft_model(), job.tree) if has_drafts else (None, NO_DRAFTS)
    engine = Engine(model, job.limits, *draft, has_graphs, group)
    if model.device.type == "cuda":  # others go first: kernels compile, and graphs are captured
        engine.serve(job.requests(seed=1), functools.partial(show, "warming up"))
        engine.stats.clear()
    requests = job.requests(seed=0)
    engine.serve(requests, functools.partial(show, label))
    gaps, allowed = check(model, requests)
    num_wrong, stats = int((~(gaps <= allowed)).sum()), engine.stats
    cells = (
        f"{stats['prefill tokens'] / stats['prefill seconds']:,.0f}",
        f"{stats['decode tokens'] / stats['decode seconds']:,.0f}",
        f"{stats['decode tokens'] / stats['decode requests']:.2f}",
        f"{100 * stats['reused tokens'] / sum(r.prompt_len for r in requests):.0f}%",
        f"{num_wrong} WRONG" if num_wrong else f"ok, {len(gaps)} tokens",
        f"{int((gaps > 0).sum())}, at most {100 * (gaps / allowed).max():.0f}% of allowed",
    )
    if group is None or group.rank == 0:
        print(ROW.format(label, *cells), flush=True)
    return not num_wrong


def run_ranks(job: Job, model: Llama, size: int) -> list[bool]:
    """Runs of ranks that share the keys: this one's of a launcher, else all of them by threads."""

    def serve(group: Group) -> bool:
        if group.size != size:
            raise SystemExit(f"--cp {size}: the launcher has started {group.size} ranks")
        label = f"{size} ranks"
        has_graphs = model.device.type == "cuda" and group.can_capture
        passed = run(job, model, label, False, False, group)
        return passed and (
            not has_graphs or run(job, model, f"{label}, graphs", False, True, group)
        )

    if "WORLD_SIZE" in os.environ:
        with Group.from_environment(on_gpu=model.device.type == "cuda") as group:
            return [serve(group)]
    if model.device.type == "cuda":
        raise SystemExit(
            f"--cp {size}: each rank wants a GPU and a process of its own; start "
            f"torchrun --nproc-per-node {size} -m examples.serve --cp {size}"
        )
    return simulate(size, serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve all runs; 0 if every token was right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch has it")
    parser.add_argument("--dtype", default="bfloat16", help="or float16; on the CPU float32 too")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share the keys; default: 1")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    job, where = CPU_JOB, "the CPU: a small job, times say nothing"
    if device == "cuda":
        job, where = GPU_JOB, torch.cuda.get_device_name()
    model = Llama.random(job.shape, getattr(torch, args.dtype), device)
    print(f"{sum(w.numel() for w in model.weights.values()):,} weights, {args.dtype}, on {where}")
    print(ROW.format(*HEAD))
    if args.cp > 1:
        return 0 if all(run_ranks(job, model, args.cp)) else 1
    runs = [("no drafts", False, False), ("drafts", True, False)]
    if device == "cuda":
        runs += [("no drafts, CUDA graphs", False, True), ("drafts, CUDA graphs", True, True)]
    return 0 if all([run(job, model, *each) for each in runs]) else 1


if __name__ == "__main__":
    sys.exit(main())

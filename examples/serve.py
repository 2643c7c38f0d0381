"""Serve requests with a toy engine, check every token against a dense model, and time it.

    python -m examples.serve        (or make serve-demo)

Read on in engine.py, then worker.py, drafts.py, pages.py and model.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .drafts import TreeShape
from .engine import Engine, Limits
from .model import Llama, Shape, dense_attention
from .pages import Request


class Job(NamedTuple):
    """Requests whose prompts begin with one of num_systems texts that many of them share.

    early_layers   of the model, which are the draft model too, with `noise` in their weights
    user_len, answer_len   the most; at least half of it
    """

    shape: Shape
    limits: Limits
    tree: TreeShape
    early_layers: int
    noise: float
    num_requests: int
    num_systems: int
    system_len: int
    user_len: int
    answer_len: int

    def requests(self, seed: int) -> list[Request]:
        random = torch.Generator().manual_seed(seed)

        def text(most: int, least: int) -> list[int]:
            size = int(torch.randint(least, most + 1, (), generator=random))
            return torch.randint(self.shape.vocab, (size,), generator=random).tolist()

        systems = [text(self.system_len, self.system_len) for _ in range(self.num_systems)]
        return [
            Request(
                systems[i % self.num_systems] + text(self.user_len, self.user_len // 2),
                len(text(self.answer_len, self.answer_len // 2)),
            )
            for i in range(self.num_requests)
        ]


GPU_JOB = Job(
    Shape(vocab=32000, width=2048, layers=16, heads=16, kv_heads=4, head_dim=128, hidden=5632),
    Limits(max_batch=16, max_context=2048, chunk=2048, num_pages=1536, page_size=16),
    TreeShape(topk=4, depth=4, num_tokens=16),
    *(2, 0.02, 64, 4, 512, 512, 128),
)
CPU_JOB = Job(
    Shape(vocab=128, width=64, layers=3, heads=4, kv_heads=2, head_dim=16, hidden=128),
    Limits(max_batch=4, max_context=128, chunk=40, num_pages=36, page_size=8),
    TreeShape(topk=2, depth=3, num_tokens=6),
    *(1, 0.02, 8, 2, 20, 20, 12),
)


class Check(NamedTuple):
    """Tokens of answers; those that the dense model would say first; those that are wrong.

    worst   the largest gap to the dense model's first choice, as a share of what is allowed
    """

    num_tokens: int
    num_first: int
    num_wrong: int
    worst: float


def check(model: Llama, requests: list[Request]) -> Check:
    """Hold every token against the float32 logits of a dense model that has read all before it.

    Where two words are nearly tied the engine may say the second, and goes on from there. Each of
    the two logits may be off by twice what the dense model itself is off in the engine's dtype.
    """
    exact_model, gaps, shares = model.to(torch.float32), [], []
    for request in requests:
        first = len(request.prompt)
        assert len(request.tokens) == first + request.max_new_tokens
        tokens = torch.tensor(request.tokens, device=model.device)
        positions = torch.arange(len(tokens) - 1, device=model.device)
        exact, rounded = (
            x.logits(x.hidden(tokens[:-1], positions, dense_attention)[first - 1 :])
            for x in (exact_model, model)
        )
        gap = exact.amax(1) - exact.gather(1, tokens[first:, None])[:, 0]
        error = (rounded - exact).abs().amax(1) + 1e-6 * exact.abs().amax(1)
        gaps.append(gap)
        shares.append(gap / (4 * error))
    gap, share = torch.cat(gaps), torch.cat(shares)
    return Check(len(gap), int((gap == 0).sum()), int((~(share <= 1)).sum()), float(share.max()))


class Bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty():
            bar = "#" * (40 * done // self.total)
            end = "\r\033[K" if done == self.total else ""
            print(f"\r{self.label:22} [{bar:40}] {done}/{self.total}{end}", end="", file=sys.stderr)


HEAD = "run", "prefill tokens/s", "decode tokens/s", "tokens a step", "prompts reused", "check"
ROW = "{:22}  {:>16}  {:>15}  {:>13}  {:>14}  {}"


def run(job: Job, model: Llama, label: str, has_drafts: bool, has_graphs: bool) -> Check:
    """Serve and check the job's requests, and print a row of the table."""
    draft = (model.draft_model(job.early_layers, job.noise), job.tree) if has_drafts else None
    engine = Engine(model, job.limits, draft, has_graphs)
    if model.device.type == "cuda":  # others go first: kernels compile, and graphs are captured
        others = job.requests(seed=1)
        engine.serve(others, Bar(f"{label}, warming", len(others)))
        engine.stats.clear()
    requests = job.requests(seed=0)
    engine.serve(requests, Bar(label, len(requests)))
    found, stats = check(model, requests), engine.stats
    print(
        ROW.format(
            label,
            f"{stats['prefill tokens'] / stats['prefill seconds']:,.0f}",
            f"{stats['decode tokens'] / stats['decode seconds']:,.0f}",
            f"{stats['decode tokens'] / stats['requests']:.2f}",
            f"{100 * stats['reused'] / sum(len(r.prompt) for r in requests):.0f}%",
            f"{f'{found.num_wrong} WRONG' if found.num_wrong else 'ok'} of {found.num_tokens}, "
            f"{found.num_tokens - found.num_first} ties, worst {100 * found.worst:.0f}% of allowed",
        ),
        flush=True,
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Serve all runs; 0 if every token was right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch has it")
    parser.add_argument("--dtype", default="bfloat16", help="or float16; on the CPU float32 too")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device == "cuda"
    job = GPU_JOB if is_cuda else CPU_JOB
    model = Llama.random(job.shape, getattr(torch, args.dtype), device, job.early_layers)
    where = torch.cuda.get_device_name() if is_cuda else "the CPU: a small job, times say nothing"
    print(f"{sum(w.numel() for w in model.weights.values()):,} weights, {args.dtype}, on {where}")
    print(ROW.format(*HEAD))
    runs = [("no drafts", False, False), ("drafts", True, False)]
    if is_cuda:
        runs += [("no drafts, CUDA graphs", False, True), ("drafts, CUDA graphs", True, True)]
    return int(any([run(job, model, *each).num_wrong for each in runs]))


if __name__ == "__main__":
    sys.exit(main())

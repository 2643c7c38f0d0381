"""Serve requests with a toy engine, check every token against a dense model, and time it.

    python -m examples.serve        (or make serve-demo)

Requests share system prompts, so that their first pages are found in a radix tree. Each run serves
the same requests: a token a step or a tree of drafts a step, with CUDA graphs or without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .drafts import TreeShape
from .engine import Engine, Limits, Stats
from .model import Llama, Shape, dense_attention
from .pages import Request


@dataclass(frozen=True)
class Job:
    """What is served: requests with prompts of two parts, of which the first is shared by many.

    early_layers   of the model, which are also the draft model, with `noise` in its weights
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

        def text(size: int) -> list[int]:
            return torch.randint(self.shape.vocab, (size,), generator=random).tolist()

        def about(size: int) -> int:
            return int(torch.randint(size // 2, size + 1, (), generator=random))

        systems = [text(self.system_len) for _ in range(self.num_systems)]
        return [
            Request(
                systems[i % self.num_systems] + text(about(self.user_len)), about(self.answer_len)
            )
            for i in range(self.num_requests)
        ]


# 0.9 billion parameters.
GPU_JOB = Job(
    Shape(vocab=32000, width=2048, layers=16, heads=16, kv_heads=4, head_dim=128, hidden=5632),
    Limits(max_batch=16, max_context=2048, chunk=2048, num_pages=1536),
    TreeShape(topk=4, depth=4, num_tokens=16),
    *(2, 0.02),
    *(64, 4, 512, 512, 128),
)
CPU_JOB = Job(
    Shape(vocab=128, width=64, layers=3, heads=4, kv_heads=2, head_dim=16, hidden=128),
    Limits(max_batch=3, max_context=128, chunk=40, num_pages=25, page_size=8),
    TreeShape(topk=2, depth=3, num_tokens=6),
    *(1, 0.02),
    *(8, 2, 20, 20, 12),
)


@dataclass
class Check:
    """Tokens of all answers: how many a dense model would say first, and how many are wrong.

    worst   the largest gap to the dense model's first choice, as a share of what is allowed
    """

    num_tokens: int = 0
    num_first: int = 0
    num_wrong: int = 0
    worst: float = 0.0


def check(model: Llama, requests: list[Request]) -> Check:
    """Hold every token against the float32 logits of a dense model that has read all before it.

    A token may be the second choice where two are nearly tied: each logit may be off by twice the
    error that the dense model itself makes in the engine's dtype. The next token is then checked
    behind the engine's choice.
    """
    result, exact_model = Check(), model.to(torch.float32)
    device = model.weights["embed"].device
    for request in requests:
        assert len(request.answer) == request.max_new_tokens
        tokens = torch.tensor(request.tokens, device=device)
        positions = torch.arange(len(tokens) - 1, device=device)
        exact, rounded = (
            each.logits(each.hidden(tokens[:-1], positions, dense_attention)[len(request.prompt) - 1 :])
            for each in (exact_model, model)
        )
        said = exact.gather(1, tokens[len(request.prompt) :, None])[:, 0]
        gap = exact.amax(1) - said
        error = (rounded - exact).abs().amax(1) + 1e-5 * exact.abs().amax(1)
        allowed = 4 * error
        result.num_tokens += len(gap)
        result.num_first += int((gap == 0).sum())
        result.num_wrong += int((~(gap <= allowed)).sum())
        result.worst = max(result.worst, float((gap / allowed).max()))
    return result


class Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0

    def __call__(self, num_tokens: int) -> None:
        self.done += num_tokens
        if sys.stderr.isatty():
            filled = "█" * min(40, 40 * self.done // self.total)
            end = "\n" if self.done >= self.total else ""
            print(f"\r{self.label:22} {filled:░<40} {self.done} tokens", end=end, file=sys.stderr)


def run(job: Job, model: Llama, label: str, has_drafts: bool, has_graphs: bool) -> bool:
    """Serve, check, and print a row of the table. Returns whether all tokens are right."""
    draft = None
    if has_drafts:
        draft = model.first_layers(job.early_layers, job.noise), job.tree
    engine = Engine(model, job.limits, draft, has_graphs)
    if model.weights["embed"].is_cuda:  # other requests first: kernels compile, graphs are captured
        engine.serve(job.requests(seed=1), lambda _: None)
        engine.stats = Stats()
    requests = job.requests(seed=0)
    engine.serve(requests, Bar(label, sum(r.max_new_tokens for r in requests)))
    result, stats = check(model, requests), engine.stats
    verdict = f"{result.num_wrong} WRONG" if result.num_wrong else "ok"
    prompt_tokens = sum(len(r.prompt) for r in requests)
    print(
        ROW.format(
            label,
            f"{stats.prefill_tokens / stats.prefill_seconds:,.0f}",
            f"{stats.decode_tokens / stats.decode_seconds:,.0f}",
            f"{stats.decode_tokens / stats.decoded_requests:.2f}",
            f"{100 * stats.num_reused / prompt_tokens:.0f}%",
            f"{verdict}: {result.num_tokens} tokens, {result.num_first} the dense model's first, "
            f"worst gap {100 * result.worst:.0f}% of allowed",
        )
    )
    return not result.num_wrong


ROW = "{:22} {:>15} {:>14} {:>14} {:>7}  {}"
HEAD = "run", "prefill tokens/s", "decode tokens/s", "tokens a step", "reused", "check"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve all runs; 0 if every token was right, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="default: bfloat16; float32 on the CPU only")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch has it")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    job = GPU_JOB if device == "cuda" else CPU_JOB
    model = Llama.random(job.shape, getattr(torch, args.dtype), device, job.early_layers)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU (a small job; times say nothing)"
    print(f"{sum(w.numel() for w in model.weights.values()):,} parameters in {args.dtype} on {name}")
    print(ROW.format(*HEAD))
    runs = [("a token a step", False, False), ("drafts", True, False)]
    if device == "cuda":
        runs += [("a token a step, graphs", False, True), ("drafts, graphs", True, True)]
    results = [run(job, model, *each) for each in runs]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

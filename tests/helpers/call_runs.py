"""Runs of calls without a plan: one after another in random order, with nothing between them but
other kernels. Each answers the bits that it gives alone, whatever the calls before it have left in
the workspace.

    python tests/helpers/call_runs.py --seconds 200 --part 3/14    # runs of new seeds until then
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

from cupyattn import flash_attn, flash_mla
from helpers import batches, compare, flash_cases, mla_calls, planless_calls, poison
from helpers.cases import pick

WAYS = tuple(way for way in mla_calls.WAYS if way not in ("wrapper", "metadata"))
SPACE = 64 << 20
# What a workspace may hold when a run begins: ids of nothing, small ids, large ones.
PATTERNS = (0xFF, 0x00, 0x01, 0x7F, 0x13)
_LONGEST = 9000
Answers = list[Any]


@dataclass
class Small:
    """A call of planless_calls or mla_calls on poisoned arrays.

    uploads: what its first start has uploaded; later ones copy nothing, so that they do not wait
    """

    call: Any
    uploads: list[poison.Poisoned] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.call.case)

    def start(self, workspace: Any) -> Answers:
        if self.call.workspace is not None:
            self.call.workspace = workspace
        with _kept(self.uploads):
            self.call.start()
        return [x for x in self.call.returned if x is not None]

    def check(self) -> None:
        self.call.check(*self.call.answers())

    def clear(self) -> None:
        for placed in self.call.outputs:
            placed.clear()


@contextmanager
def _kept(uploads: list[poison.Poisoned]) -> Iterator[None]:
    """Uploads are those in the list, in turn, or are added to it where it is empty."""
    embed, given = poison.embed, iter([*uploads])

    def first(*args: Any, **named: Any) -> poison.Poisoned:
        uploads.append(embed(*args, **named))
        return uploads[-1]

    def again(*args: Any, **named: Any) -> poison.Poisoned:
        return next(given)

    poison.embed = again if uploads else first
    try:
        yield
    finally:
        poison.embed = embed


@dataclass
class Flash:
    """A call of flash_cases."""

    case: flash_cases.Case

    @property
    def name(self) -> str:
        return repr(self.case)

    def start(self, workspace: Any) -> Answers:
        got = self.case.function(*self.case.args, **self.case.named)
        return [*got] if self.case.with_lse else [got]

    def check(self) -> None:
        self.case.run()

    def clear(self) -> None:
        if self.case.with_out:
            self.case.out.clear()


@dataclass
class Long:
    """A call of torch arrays whose keys are enough for all SMs; `requests` are (q, k, v) of each.

    rows: where the rows of each request begin, in the answer as rows of all requests
    """

    name: str
    function: Callable[[], Any]
    requests: Sequence[tuple[Any, Any, Any]]
    causal: bool
    scale: float
    got: Any = None

    def start(self, workspace: Any) -> Answers:
        self.got = self.function()
        return [*self.got] if isinstance(self.got, tuple) else [self.got]

    def check(self) -> None:
        out = self.got[0] if isinstance(self.got, tuple) else self.got
        rows, begin = out.reshape(-1, *out.shape[-2:]), 0
        for index, (q, k, v) in enumerate(self.requests):
            want = attend(q, k, v, self.causal, self.scale)
            own = rows[begin : begin + len(q)].double()
            error = (own - want).abs().max().item() if len(q) else 0.0
            assert error < 2e-2, f"{self.name}: request {index} is off by {error:.3g}"
            begin += len(q)

    def clear(self) -> None:
        pass


def attend(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    """In float64 on the GPU. q [rows, heads, d], k and v [keys, KV heads, d]."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    logits = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    if causal:
        rows, keys = logits.shape[1:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        logits = logits.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1)


# --- draws ---


def small(seed: int, xp: ModuleType, workspace: Any) -> Small:
    """Of FlashInfer's and cuDNN's functions. Outputs are given: of new ones, rows of no request
    hold whatever was there."""
    case = planless_calls.random_case(seed % planless_calls.NUM_CASES)
    return Small(planless_calls.Call(replace(case, with_out=True), xp, workspace))


def latent(seed: int, xp: ModuleType, workspace: Any) -> Small:
    case = mla_calls.random_case(seed % mla_calls.NUM_CASES, WAYS)
    return Small(mla_calls.Call(case, xp, workspace))


def flash(seed: int, xp: ModuleType, workspace: Any) -> Flash:
    """Another call where not all rows count: the others hold whatever was there."""
    while True:
        case = flash_cases.Case(seed % 420, xp, "cuda", is_gpu=True)
        # Where an output is given it is compared too, but an LSE is always new.
        if (case.with_out and not case.with_lse) or (case._used() == case.q_lens).all():
            return Flash(case)
        seed += 1


def long(seed: int, xp: ModuleType, workspace: Any) -> Long:
    """Prompts, appends, verification and decode of long keys, dense ones and latent ones."""
    rng = np.random.default_rng((seed, 97))
    return (_varlen, _with_cache, _with_cache, _with_latent)[seed % 4](rng, f"long {seed}")


def _lengths(rng: np.random.Generator, count: int, most: int) -> list[int]:
    """Log-uniform, some of them 0, one of them perhaps the longest of all."""
    found = [int(np.exp(rng.uniform(0, np.log(most)))) * (rng.random() < 0.9) for _ in range(count)]
    if rng.random() < 0.5:
        found[int(rng.integers(count))] = most
    return found


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(int(rng.integers(1 << 40)))
    kind = getattr(torch, dtype)
    return torch.randn(shape, device="cuda", generator=generator, dtype=kind)


def _ints(values: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")


def _heads(rng: np.random.Generator) -> tuple[int, int, int, str]:
    heads = pick(rng, ((8, 2), (8, 1), (16, 2), (6, 6), (40, 8)))
    return (*heads, pick(rng, (64, 128, 128)), pick(rng, ("float16", "bfloat16")))


def _varlen(rng: np.random.Generator, name: str) -> Long:
    """Prompts of their own keys, or rows at the end of more keys."""
    heads, kv_heads, dim, dtype = _heads(rng)
    count, causal = pick(rng, (1, 2, 5, 8, 33, 70)), bool(rng.random() < 0.6)
    rows = _lengths(rng, count, pick(rng, (130, 700, 2500)) if count < 30 else 200)
    keys = rows
    if rng.random() < 0.5:
        rows = [min(n, 64) for n in rows]
        keys = [n + m for n, m in zip(rows, _lengths(rng, count, 3000), strict=True)]
    total, ends = max(1, sum(rows)), [batches.offsets(x) for x in (rows, keys)]
    q = _normal(rng, dtype, total, heads, dim)[: sum(rows)]
    k, v = (_normal(rng, dtype, max(1, sum(keys)), kv_heads, dim)[: sum(keys)] for _ in "kv")
    held, bounds = [_ints(x) for x in ends], (max(1, *rows), max(1, *keys))

    def call() -> Any:
        return flash_attn.flash_attn_varlen_func(q, k, v, *held, *bounds, causal=causal)

    requests = [
        (q[ends[0][i] : ends[0][i + 1]], *(x[ends[1][i] : ends[1][i + 1]] for x in (k, v)))
        for i in range(count)
    ]
    return Long(f"{name}: varlen, rows {rows}, keys {keys}", call, requests, causal, dim**-0.5)


def _tables(rng: np.random.Generator, lengths: list[int], size: int) -> np.ndarray:
    """Pages of each request in random order; beyond its own, any page."""
    width = -(-max(1, *lengths) // size) + int(rng.integers(0, 40))
    order: np.ndarray = rng.permutation(len(lengths) * width)
    return order.reshape(len(lengths), width)


def _with_cache(rng: np.random.Generator, name: str) -> Long:
    heads, kv_heads, dim, dtype = _heads(rng)
    count, rows = pick(rng, (1, 2, 5, 9, 40)), pick(rng, (1, 1, 2, 4, 8, 17, 40))
    lengths, size = _lengths(rng, count, _LONGEST if count < 20 else 1500), pick(rng, (16, 64))
    table = _tables(rng, lengths, size)
    q = _normal(rng, dtype, count, rows, heads, dim)
    k, v = (_normal(rng, dtype, table.size, size, kv_heads, dim) for _ in "kv")
    used, pages, causal = _ints(lengths), _ints(table), bool(rng.random() < 0.8)
    named = {"cache_seqlens": used, "page_table": pages, "causal": causal}

    def call() -> Any:
        return flash_attn.flash_attn_with_kvcache(q, k, v, **named)

    own = [[x[pages[i].long()].flatten(0, 1)[:n] for x in (k, v)] for i, n in enumerate(lengths)]
    requests = [(q[i], *pair) for i, pair in enumerate(own)]
    what = f"{name}: {rows} rows over pages of {size}, keys {lengths}, {heads}/{kv_heads} of {dim}"
    return Long(what, call, requests, causal, dim**-0.5)


def _with_latent(rng: np.random.Generator, name: str) -> Long:
    count, rows = pick(rng, (1, 2, 5, 24)), pick(rng, (1, 1, 2, 3))
    heads, size = pick(rng, (16, 64, 128)), 64
    lengths = _lengths(rng, count, 6000 if count < 20 else 1500)
    table = _tables(rng, lengths, size)
    q = _normal(rng, "bfloat16", count, rows, heads, 576)
    pool = _normal(rng, "bfloat16", table.size, size, 1, 576)
    used, pages, causal = _ints(lengths), _ints(table), bool(rng.random() < 0.6)
    metadata, scale = flash_mla.get_mla_metadata(), 192**-0.5

    def call() -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, pool, pages, used, 512, *metadata, softmax_scale=scale, causal=causal
        )

    own = [pool[pages[i].long()].flatten(0, 1)[:n] for i, n in enumerate(lengths)]
    requests = [(q[i], keys, keys[..., :512]) for i, keys in enumerate(own)]
    what = f"{name}: latent, {rows} rows of {heads} heads, keys {lengths}"
    return Long(what, call, requests, causal, scale)


KINDS = {"small": small, "latent": latent, "flash": flash, "long": long}


# --- runs ---


def copied(x: Any) -> Any:
    bits = poison.raw(x)
    return bits.clone() if hasattr(bits, "clone") else bits.copy()


def on_host(bits: Any) -> np.ndarray:
    """A NumPy copy of integers, of which torch has fewer kinds than `poison.download` takes."""
    held = bits.cpu() if hasattr(bits, "cpu") else bits.get() if hasattr(bits, "get") else bits
    return np.asarray(held)


@dataclass
class Run:
    """Calls that follow each other on the current stream, and share a workspace.

    alone: the answers that each gave by itself, copied
    """

    xp: ModuleType
    items: list[Any]
    workspace: Any
    rng: np.random.Generator
    alone: list[Answers] = field(default_factory=list)

    def try_alone(self) -> None:
        for index, item in enumerate(self.items):
            self._fill(PATTERNS[index % len(PATTERNS)])
            item.start(self.workspace)  # as it is checked, compiled, and kept
            item.clear()
            answers = item.start(self.workspace)
            self.alone.append([copied(x) for x in answers])
            item.check()

    def order(self, repeats: int) -> list[int]:
        return [int(i) for _ in range(repeats) for i in self.rng.permutation(len(self.items))]

    def enqueue(self, order: Sequence[int]) -> list[Answers]:
        """Start calls in this order; copies of what each answers."""
        found = []
        for place, index in enumerate(order):
            if place % 7 == 3:
                self._fill(PATTERNS[place % len(PATTERNS)])
            found.append([copied(x) for x in self.items[index].start(self.workspace)])
        return found

    def compare(self, order: Sequence[int], found: Sequence[Answers], what: str) -> None:
        for place, (index, answers) in enumerate(zip(order, found, strict=True)):
            before = self.items[order[place - 1]].name if place else "nothing"
            for got, want in zip(answers, self.alone[index], strict=True):
                if not bool((got == want).all()):
                    name = f"{what}, call {place}: {self.items[index].name}; behind {before}"
                    compare.assert_bitwise_equal(on_host(got), on_host(want), name)

    def _fill(self, value: int) -> None:
        self.workspace[...] = value

    def replay(self, torch: Any, order: Sequence[int]) -> Callable[[], list[Answers]]:
        """The calls as a graph of torch's; what a replay gives."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.enqueue(order)

        def again() -> list[Answers]:
            graph.replay()
            return found

        return again


def drawn(seed: int, xp: ModuleType, kinds: Sequence[str], count: int) -> Run:
    """A run of `count` calls. Some have a workspace of the library's own."""
    rng = np.random.default_rng((seed, 96))
    where = {"device": "cuda"} if xp.__name__ == "torch" else {}
    workspace = xp.zeros((SPACE,), dtype=xp.uint8, **where)
    items = []
    for _ in range(count):
        kind = kinds[int(rng.integers(len(kinds)))]
        items.append(KINDS[kind](int(rng.integers(1 << 20)), xp, workspace))
    return Run(xp, items, workspace, rng)


def check(run: Run, repeats: int, *, has_graph: bool) -> int:
    """Try a run alone, in random orders, and in a graph. How many calls followed others."""
    run.try_alone()
    order = run.order(repeats)
    run.compare(order, run.enqueue(order), "in a row")
    if not has_graph or run.xp.__name__ != "torch":
        return len(order)
    order = run.order(1)
    again = run.replay(run.xp, order)
    for pattern in PATTERNS[:3]:
        run._fill(pattern)
        run.compare(order, again(), "replayed")
    return len(order) * (repeats + 3)


def on_two_streams(runs: Sequence[Run], repeats: int) -> None:
    """Torch's runs beside each other, their calls enqueued in turn; each has a workspace."""
    torch = runs[0].xp
    for run in runs:
        run.try_alone()
    torch.cuda.synchronize()
    orders = [run.order(repeats) for run in runs]
    found: list[list[Answers]] = [[] for _ in runs]
    streams = [torch.cuda.Stream() for _ in runs]
    for places in zip(*orders, strict=True):
        for run, stream, index, answers in zip(runs, streams, places, found, strict=True):
            with torch.cuda.stream(stream):
                answers += run.enqueue([index])
    torch.cuda.synchronize()
    for run, order, answers in zip(runs, orders, found, strict=True):
        run.compare(order, answers, "beside another stream")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--part", default="0/1", help="of so many processes, this one")
    args = parser.parse_args()
    import cupy
    import torch

    part, parts = map(int, args.part.split("/"))
    end, seed, calls, failures = time.monotonic() + args.seconds, part, 0, 0
    while time.monotonic() < end:
        xp = cupy if seed % 4 == 3 else torch
        kinds = [name for name in KINDS if xp is torch or name != "long"]
        try:
            with nullcontext() if xp is torch else cupy.cuda.Stream.null:
                calls += check(drawn(seed, xp, kinds, 40), 6, has_graph=True)
            if xp is torch:
                runs = [drawn(seed + parts * k, xp, kinds, 10) for k in (100_000, 200_000)]
                on_two_streams(runs, 5)
                calls += 100
        except Exception as error:
            failures += 1
            where = [
                f"{Path(x.filename).name}:{x.lineno}"
                for x in traceback.extract_tb(error.__traceback__)
            ]
            print(
                f"seed {seed}: {where[-6:]} {type(error).__name__}: {str(error)[:1500]}", flush=True
            )
            torch.cuda.synchronize()  # a context that is lost ends the process
        seed += parts
        print(f"part {part}: to seed {seed}, {calls} calls, {failures} failures", flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

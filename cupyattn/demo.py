"""The main job: Llama-3-8B-shaped attention, a causal prefill, then decode steps growing a cache.

The library is called as a program would call it. Every output is then held against
`cupyattn.reference`, within a tolerance earned from the same data (see `_check`).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn

from . import array, reference
from .core import dtypes
from .core.device import device_props
from .errors import CupyAttnError, DeviceError, UnsupportedError

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
# (prefill tokens, decode steps): a CPU gets a job that its reference finishes in seconds.
GPU_SIZE, CPU_SIZE = (2048, 64), (256, 8)

FRAMEWORKS = ("cupy", "torch", "jax", "numpy")


class Framework:
    """The arrays of one framework, on its GPU where it has one; `device` is the GPU's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            module = np if name == "numpy" else importlib.import_module(name)
        except ImportError as error:
            raise DeviceError(
                f"--framework: {name} cannot be imported ({error}); install it or choose another "
                f"of {', '.join(FRAMEWORKS)}"
            ) from error
        try:
            if name == "torch":
                empty = module.empty(0, device="cuda" if module.cuda.is_available() else "cpu")
            else:
                empty = (module.numpy if name == "jax" else module).zeros(1, np.float32)
        except RuntimeError as error:
            raise DeviceError(
                f"--framework: {name} needs a CUDA device, and it says {error}; use --framework "
                "numpy on a machine without one"
            ) from error
        self._like = array.view(empty, name)
        index = self._like.device.index
        self.device = device_props(index).name if self._like.device.kind == "cuda" else None

    def put(self, a: np.ndarray) -> Any:
        return array.from_numpy(a, self._like)

    def get(self, x: Any) -> np.ndarray:
        return array.to_host(array.view(x, "output"))

    def store(self, cache: Any, start: int, rows: Any) -> Any:
        """The cache with `rows` written from row `start` on; in place where arrays are mutable."""
        span = slice(start, start + len(rows))
        if self.name == "jax":
            return cache.at[span].set(rows)
        cache[span] = rows
        return cache

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of `call`, finished, and the seconds it took, on a GPU by its own clock."""
        if self.device is None:
            begin = time.perf_counter()
            return call(), time.perf_counter() - begin
        from cupy.cuda import Event, get_elapsed_time, runtime

        start, stop, stream = Event(), Event(), array.current_stream(self._like)
        runtime.eventRecord(start.ptr, stream)
        result = call()
        runtime.eventRecord(stop.ptr, stream)
        stop.synchronize()
        return result, 1e-3 * get_elapsed_time(start, stop)


def _choose(name: str | None) -> tuple[Framework, str]:
    """The framework asked for, else CuPy if it has a GPU, else NumPy; and why, in a few words."""
    if name:
        return Framework(name), "as asked"
    try:
        return Framework("cupy"), "CuPy found a GPU"
    except DeviceError as error:
        return Framework("numpy"), f"no GPU for CuPy: {error.__cause__}"


@dataclass
class Phase:
    """One kind of call: seconds and rate (FLOP/s or B/s) of each, and how the check went."""

    name: str
    unit: str
    unit_size: float
    tokens: str
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    worst_error: float = 0.0
    worst_share: float = 0.0  # of the tolerance; above 1 is a failure
    noise: float = 0.0
    failures: list[str] = field(default_factory=list)

    def time(self, framework: Framework, call: Callable[[], Any], work: int) -> Any:
        """The output of one timed call, which is `work` operations or bytes."""
        result, seconds = framework.timed(call)
        self.seconds.append(seconds)
        self.rates.append(work / seconds)
        return result


def prefill_flops(tokens: int) -> int:
    """Multiplications and additions of Q·Kᵀ and P·V over the pairs that causality leaves."""
    return 4 * NUM_QO_HEADS * HEAD_DIM * (tokens * (tokens + 1) // 2)


def decode_bytes(kv_len: int, itemsize: int) -> int:
    """Bytes that one decode step must move: K and V once, q in, o out."""
    return 2 * (kv_len * NUM_KV_HEADS + NUM_QO_HEADS) * HEAD_DIM * itemsize


def _low_precision(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention as a kernel does it: float32, with probabilities in q's dtype before P·V."""
    group = q.shape[1] // k.shape[1]
    hidden = ~np.tri(len(q), len(k), len(k) - len(q), dtype=np.bool_)
    scale = np.float32(1 / math.sqrt(q.shape[2]))
    out = np.empty(q.shape, np.float32)
    for head in range(q.shape[1]):
        keys, values = (x[:, head // group].astype(np.float32) for x in (k, v))
        p = (q[:, head].astype(np.float32) * scale) @ keys.T
        p[hidden] = -np.inf
        p = np.exp(p - p.max(axis=1, keepdims=True))
        out[:, head] = p.astype(q.dtype).astype(np.float32) @ values
        out[:, head] /= p.sum(axis=1, keepdims=True)
    return out


def _check(phase: Phase, label: str, out: np.ndarray, q: Any, k: Any, v: Any) -> None:
    """Hold `out` [Lq, Hq, D] against the float64 reference and note the result in `phase`.

    Each element may be off by half an ulp of itself, since the output is stored in q's dtype, plus
    twice the worst error that `_low_precision` makes on the same data. Errors shrink as rows see
    more keys, so that worst is taken over groups of rows: the first 64, then doubling.
    """
    exact, _ = reference.attention(q, k, v, causal=True)
    noise = np.abs(_low_precision(q, k, v) - exact).max(axis=(1, 2))
    eps = float(ml_dtypes.finfo(q.dtype).eps)
    # Rounded probabilities cannot move a weighted mean of v by more: the two references disagree.
    if not noise.max() <= (eps + 1e-4) * np.abs(v.astype(np.float32)).max():
        phase.failures.append(f"{label}: the reference and its low-precision twin disagree")
    groups = np.frexp(np.maximum(np.arange(len(k) - len(q), len(k)), 63))[1]
    for group in np.unique(groups):
        noise[groups == group] = noise[groups == group].max()

    error = np.abs(out.astype(np.float64) - exact)
    allowed = eps / 2 * np.abs(exact) + 2 * noise[:, None, None]
    share = error / np.maximum(allowed, np.finfo(np.float64).tiny)
    if not (error <= allowed).all():
        share = np.where(np.isnan(share), np.inf, share)
        where = tuple(int(i) for i in np.unravel_index(share.argmax(), share.shape))
        phase.failures.append(
            f"{label}: o{list(where)} is {float(out[where]):.6g}, the reference says "
            f"{exact[where]:.6g}, allowed error {allowed[where]:.2g}"
        )
    phase.worst_error = float(np.maximum(phase.worst_error, error.max()))
    phase.worst_share = float(np.maximum(phase.worst_share, share.max()))
    phase.noise = max(phase.noise, float(noise.max()))


def _require_memory(prefill_len: int, steps: int) -> None:
    """Raise UnsupportedError if the check of so many tokens needs more memory than there is."""
    if not hasattr(os, "sysconf"):  # a system that does not tell
        return
    # `_low_precision` keeps a logit, two probabilities and a mask value for each pair of tokens.
    pair_bytes = 4 + 4 + 2 + 1
    row_bytes = 3 * 8 * (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    needed = pair_bytes * prefill_len**2 + row_bytes * (prefill_len + steps)
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        raise UnsupportedError(
            f"--prefill-len, --decode-steps: {prefill_len} + {steps} tokens need about "
            f"{needed / 2**30:,.0f} GiB on the host, where every output is checked, and this "
            f"machine has {has / 2**30:,.0f}; ask for fewer"
        )


def run(framework: Framework, prefill_len: int, steps: int, seed: int, dtype: str) -> list[Phase]:
    """Run, time and check the two phases: one prefill, then `steps` decodes growing the cache.

    Raises UnsupportedError if they do not fit into the host's memory.
    """
    _require_memory(prefill_len, steps)
    total, rng = prefill_len + steps, np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((total, heads, HEAD_DIM), np.float32).astype(dtypes.parse(dtype).numpy)
        for heads in (NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    prefill = Phase("prefill", "TFLOP/s", 1e12, str(prefill_len))
    decode = Phase("decode", "GB/s", 1e9, f"{prefill_len + 1}..{total}")

    q_all, k_all, v_all = (framework.put(x) for x in (q, k, v))
    k_cache = framework.store(framework.put(np.zeros_like(k)), 0, k_all[:prefill_len])
    v_cache = framework.store(framework.put(np.zeros_like(v)), 0, v_all[:prefill_len])
    call = functools.partial(
        cupyattn.single_prefill_with_kv_cache,
        q_all[:prefill_len],
        k_cache[:prefill_len],
        v_cache[:prefill_len],
        causal=True,
        kv_layout="NHD",
    )
    out = call()  # compiles the kernel, which is not what is timed
    for _ in range(10 if framework.device else 1):
        out = prefill.time(framework, call, prefill_flops(prefill_len))

    outputs: list[Any] = []
    for n in range(prefill_len + 1, total + 1):
        k_cache = framework.store(k_cache, n - 1, k_all[n - 1 : n])
        v_cache = framework.store(v_cache, n - 1, v_all[n - 1 : n])
        call = functools.partial(
            cupyattn.single_decode_with_kv_cache, q_all[n - 1], k_cache[:n], v_cache[:n]
        )
        if not outputs:
            call()
        outputs.append(decode.time(framework, call, decode_bytes(n, q.itemsize)))

    print(f"checking {prefill_len} prefill rows and {steps} decode steps ...", flush=True)
    n = prefill_len
    _check(prefill, "prefill", framework.get(out), q[:n], k[:n], v[:n])
    for n, output in enumerate(outputs, prefill_len + 1):
        row = framework.get(output)[None]
        _check(decode, f"decode step at {n} tokens", row, q[n - 1 : n], k[:n], v[:n])
    return [prefill, decode]


def _report(phases: list[Phase], dtype: str, has_rates: bool) -> None:
    rate_column = "  {:>12}" if has_rates else ""
    row = "{:8} {:>5}  {:10}  {:>11}" + rate_column + "  {:>11}  {:>10}  {}"
    head = ["phase", "calls", "tokens", "median time", "worst error", "of allowed", "check"]
    if has_rates:
        head.insert(4, "rate")
    print("\n" + row.format(*head))
    for phase in phases:
        rate = f"{statistics.median(phase.rates) / phase.unit_size:.3g} {phase.unit}"
        cells = (
            f"{1e3 * statistics.median(phase.seconds):.3g} ms",
            *([rate] if has_rates else []),
            f"{phase.worst_error:.1e}",
            f"{100 * phase.worst_share:.0f}%",
            "FAILED" if phase.failures else "ok",
        )
        print(row.format(phase.name, len(phase.seconds), phase.tokens, *cells))
    noise = ", ".join(f"{phase.name} {phase.noise:.1e}" for phase in phases)
    print(
        f"\nallowed error: half an ulp of the output in {dtype}, plus twice what float32 attention "
        f"with {dtype}\nprobabilities gets wrong on the same data (at most: {noise})"
    )
    for failure in (text for phase in phases for text in phase.failures):
        print(f"FAILED: {failure}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and print its table; 0 if every check passed, else 1."""
    parser = argparse.ArgumentParser(
        prog="cupyattn demo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, help="default: cupy with a GPU, else numpy"
    )
    size = "default: {} on a GPU, {} without"
    for flag, gpu, cpu in zip(("--prefill-len", "--decode-steps"), GPU_SIZE, CPU_SIZE, strict=True):
        parser.add_argument(flag, type=_positive, metavar="N", help=size.format(gpu, cpu))
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="default: bfloat16; float32 on the CPU only",
    )
    args = parser.parse_args(argv)

    try:
        framework, why = _choose(args.framework)
        default_len, default_steps = GPU_SIZE if framework.device else CPU_SIZE
        prefill_len = args.prefill_len or default_len
        steps = args.decode_steps or default_steps
        print(
            f"Llama-3-8B attention: {NUM_QO_HEADS} query heads, {NUM_KV_HEADS} KV heads, head dim "
            f"{HEAD_DIM}, {args.dtype}; {prefill_len}-token prefill, {steps} decode steps\n"
            f"arrays: {framework.name} on {framework.device or 'the CPU'} ({why})"
        )
        if framework.device is None:
            print(
                f"NOTE: without a GPU the float64 reference runs, on a smaller job (a GPU gets "
                f"{GPU_SIZE[0]} + {GPU_SIZE[1]} tokens).\nThis shows the calls at work; its times "
                "say nothing about the kernels."
            )
        phases = run(framework, prefill_len, steps, args.seed, args.dtype)
    except CupyAttnError as error:
        print(f"cupyattn demo: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"cupyattn demo: out of memory ({error}); ask for fewer tokens", file=sys.stderr)
        return 1
    _report(phases, args.dtype, has_rates=framework.device is not None)
    return 1 if any(phase.failures for phase in phases) else 0

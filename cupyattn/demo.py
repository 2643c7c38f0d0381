"""The main job: Llama-3-8B-shaped attention, a causal prefill, then decode steps growing a cache.

The library is called as a program would call it. Every answer is then held against
`cupyattn.reference`, within a tolerance earned from the same data (see `_check`).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn

from . import reference
from .core import dtypes
from .errors import CupyAttnError, DeviceError

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
# (prefill tokens, decode steps): a CPU gets a job that its reference finishes in seconds.
GPU_SIZE, CPU_SIZE = (2048, 64), (256, 8)


class _NumPy:
    """What the demo needs of an array framework; this one is NumPy on the CPU."""

    name = "numpy"
    device: str | None = None  # the GPU's name, None on the CPU

    def put(self, a: np.ndarray) -> Any:
        return a

    def get(self, x: Any) -> np.ndarray:
        return x

    def store(self, cache: Any, start: int, rows: Any) -> Any:
        """The cache with `rows` written from row `start` on; in place where arrays are mutable."""
        cache[start : start + len(rows)] = rows
        return cache

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The answer of `call`, finished, and the seconds it took."""
        start = time.perf_counter()
        return call(), time.perf_counter() - start


class _Torch(_NumPy):
    name = "torch"

    def __init__(self) -> None:
        self.torch = _import("torch")
        has_gpu = self.torch.cuda.is_available()
        self.device = self.torch.cuda.get_device_name() if has_gpu else None

    def put(self, a: np.ndarray) -> Any:
        # torch.from_numpy knows no ml_dtypes, so 16-bit types travel as integers.
        bits = self.torch.from_numpy(a.view(f"int{8 * a.itemsize}"))
        return bits.view(getattr(self.torch, a.dtype.name)).to("cuda" if self.device else "cpu")

    def get(self, x: Any) -> np.ndarray:
        bits = x.cpu().view(getattr(self.torch, f"int{8 * x.element_size()}")).numpy()
        return bits.view(dtypes.parse(x.dtype).numpy)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        if not self.device:
            return super().timed(call)
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = call()
        stop.record()
        stop.synchronize()
        return out, 1e-3 * start.elapsed_time(stop)


class _CuPy(_NumPy):
    name = "cupy"

    def __init__(self) -> None:
        self.cupy = _import("cupy")
        try:
            index = self.cupy.cuda.runtime.getDevice()
            properties = self.cupy.cuda.runtime.getDeviceProperties(index)
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"--framework: cupy needs a CUDA device, and CuPy says {error}; "
                "use --framework numpy on a machine without one"
            ) from error
        self.device = properties["name"].decode()

    def put(self, a: np.ndarray) -> Any:
        return self.cupy.asarray(a.view(f"uint{8 * a.itemsize}")).view(a.dtype)

    def get(self, x: Any) -> np.ndarray:
        return self.cupy.asnumpy(x.view(f"uint{8 * x.itemsize}")).view(x.dtype)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record()
        out = call()
        stop.record()
        stop.synchronize()
        return out, 1e-3 * self.cupy.cuda.get_elapsed_time(start, stop)


class _Jax(_NumPy):
    name = "jax"

    def __init__(self) -> None:
        self.jax = _import("jax")
        device = self.jax.devices()[0]
        self.device = device.device_kind if device.platform == "gpu" else None

    def put(self, a: np.ndarray) -> Any:
        return self.jax.numpy.asarray(a)

    def get(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def store(self, cache: Any, start: int, rows: Any) -> Any:
        return cache.at[start : start + len(rows)].set(rows)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        return super().timed(lambda: self.jax.block_until_ready(call()))


FRAMEWORKS: dict[str, Callable[[], _NumPy]] = {f.name: f for f in (_CuPy, _Torch, _Jax, _NumPy)}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DeviceError(
            f"--framework: {name} cannot be imported ({error}); install it or choose another of "
            + ", ".join(FRAMEWORKS)
        ) from error


def _choose(name: str | None) -> tuple[_NumPy, str]:
    """The framework asked for, else CuPy if it has a GPU, else NumPy; and why, in a few words."""
    if name is not None:
        return FRAMEWORKS[name](), "as asked"
    try:
        return _CuPy(), "CuPy found a GPU"
    except DeviceError as error:
        return _NumPy(), f"no GPU for CuPy: {error.__cause__}"


@dataclass
class Phase:
    """One kind of call: seconds and work (FLOP or bytes) of each, and how the check went."""

    name: str
    unit: str
    tokens: str
    seconds: list[float] = field(default_factory=list)
    work: list[int] = field(default_factory=list)
    worst_error: float = 0.0
    worst_share: float = 0.0  # of the tolerance; above 1 is a failure
    noise: float = 0.0
    failures: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        rate = statistics.median(w / s for w, s in zip(self.work, self.seconds, strict=True))
        return (
            self.name,
            str(len(self.seconds)),
            self.tokens,
            _duration(statistics.median(self.seconds)),
            f"{rate / (1e12 if self.unit == 'TFLOP/s' else 1e9):.3g} {self.unit}",
            f"{self.worst_error:.1e}",
            f"{100 * self.worst_share:.0f}%",
            "FAILED" if self.failures else "ok",
        )


def _duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def prefill_flops(tokens: int) -> int:
    """Multiplications and additions of Q·Kᵀ and P·V over the pairs that causality leaves."""
    return 4 * NUM_QO_HEADS * HEAD_DIM * (tokens * (tokens + 1) // 2)


def decode_bytes(kv_len: int, itemsize: int) -> int:
    """Bytes that one decode step must move: K and V once, q in, o out."""
    return 2 * (kv_len * NUM_KV_HEADS + NUM_QO_HEADS) * HEAD_DIM * itemsize


def _low_precision(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention as a kernel does it: float32, with probabilities in q's dtype before P·V."""
    group = q.shape[1] // k.shape[1]
    hidden = np.tri(len(q), len(k), len(k) - len(q), dtype=np.bool_)
    np.logical_not(hidden, out=hidden)
    scale = np.float32(1 / math.sqrt(q.shape[2]))
    out = np.empty(q.shape, np.float32)
    for head in range(q.shape[1]):
        if head % group == 0:
            keys, values = (x[:, head // group].astype(np.float32) for x in (k, v))
        p = (q[:, head].astype(np.float32) * scale) @ keys.T
        p[hidden] = -np.inf
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        out[:, head] = p.astype(q.dtype).astype(np.float32) @ values
        out[:, head] /= p.sum(axis=1, keepdims=True)
    return out


def _check(phase: Phase, label: str, out: np.ndarray, q: Any, k: Any, v: Any) -> None:
    """Hold `out` [Lq, Hq, D] against the float64 reference and note the result in `phase`.

    Each element may be off by half an ulp of itself, since the answer is stored in q's dtype, plus
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


def _tokens(rng: np.random.Generator, count: int, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """q, k, v of `count` tokens, standard normal: [count, heads, HEAD_DIM] each."""
    heads = (NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    shapes = [(count, h, HEAD_DIM) for h in heads]
    return tuple(rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)


def run(framework: _NumPy, prefill_len: int, steps: int, seed: int, dtype: str) -> list[Phase]:
    """Run, time and check the two phases: one prefill, then `steps` decodes growing the cache."""
    total = prefill_len + steps
    q, k, v = _tokens(np.random.default_rng(seed), total, dtypes.parse(dtype).numpy)
    prefill = Phase("prefill", "TFLOP/s", str(prefill_len))
    decode = Phase("decode", "GB/s", f"{prefill_len + 1}..{total}")

    blank = np.zeros_like(k)
    q_all, k_all, v_all = (framework.put(x) for x in (q, k, v))
    k_cache = framework.store(framework.put(blank), 0, k_all[:prefill_len])
    v_cache = framework.store(framework.put(blank.copy()), 0, v_all[:prefill_len])
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
        out, seconds = framework.timed(call)
        prefill.seconds.append(seconds)
        prefill.work.append(prefill_flops(prefill_len))

    answers: list[Any] = []
    for n in range(prefill_len + 1, total + 1):
        k_cache = framework.store(k_cache, n - 1, k_all[n - 1 : n])
        v_cache = framework.store(v_cache, n - 1, v_all[n - 1 : n])
        call = functools.partial(
            cupyattn.single_decode_with_kv_cache, q_all[n - 1], k_cache[:n], v_cache[:n]
        )
        if not answers:
            call()
        answer, seconds = framework.timed(call)
        answers.append(answer)
        decode.seconds.append(seconds)
        decode.work.append(decode_bytes(n, q.itemsize))

    print(f"checking {prefill_len} prefill rows and {steps} decode steps ...", flush=True)
    n = prefill_len
    _check(prefill, "prefill", framework.get(out), q[:n], k[:n], v[:n])
    for n, answer in enumerate(answers, prefill_len + 1):
        row = framework.get(answer)[None]
        _check(decode, f"decode step at {n} tokens", row, q[n - 1 : n], k[:n], v[:n])
    return [prefill, decode]


def _report(phases: list[Phase], dtype: str) -> None:
    head = ("phase", "calls", "tokens", "median time", "rate", "worst error", "of allowed", "check")
    rows = [head, *(phase.row() for phase in phases)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    print()
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    noise = ", ".join(f"{phase.name} {phase.noise:.1e}" for phase in phases)
    print(
        f"\nallowed error: half an ulp of the answer in {dtype}, plus twice what float32 attention "
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
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="default: bfloat16; float32 on the CPU only",
    )  # fmt: skip
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
                f"NOTE: without a GPU the float64 reference answers, on a smaller job (a GPU gets "
                f"{GPU_SIZE[0]} + {GPU_SIZE[1]} tokens).\nThis shows the calls at work; its times "
                "and rates say nothing about the kernels."
            )
        phases = run(framework, prefill_len, steps, args.seed, args.dtype)
    except CupyAttnError as error:
        print(f"cupyattn demo: {error}", file=sys.stderr)
        return 1
    _report(phases, args.dtype)
    return 1 if any(phase.failures for phase in phases) else 0

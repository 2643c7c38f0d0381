"""The quick start as one program: what was found, a first call, a paged batch of your own, a chart.

    python -m examples.ten_minutes --out chart.svg       # on a GPU with torch, or on the CPU

Every answer is compared with the reference. On the CPU times mean nothing, and the chart says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn
from cupyattn import cli

PAGE_SIZE, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 2, 64


class Device:
    """Arrays on the GPU by torch, where it has one, or NumPy's."""

    def __init__(self) -> None:
        try:
            import torch

            self._torch: Any = torch if torch.cuda.is_available() else None
        except ImportError:
            self._torch = None
        self.name = "the CPU" if self._torch is None else self._torch.cuda.get_device_name()

    def put(self, x: np.ndarray) -> Any:
        """The array where calls are made."""
        return x if self._torch is None else self._torch.from_numpy(x).cuda()

    def get(self, x: Any) -> np.ndarray:
        """The array on the host."""
        return x if isinstance(x, np.ndarray) else x.cpu().numpy()

    def seconds(self, call: Callable[[], Any]) -> float:
        """The time of a call, the least of three."""
        return min(self._once(call) for _ in range(3))

    def _once(self, call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        if self._torch is not None:
            self._torch.cuda.synchronize()
        return time.perf_counter() - begin


def first_call(device: Device) -> None:
    """Dense attention, compared with the reference on the CPU."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 16, NUM_QO_HEADS, HEAD_DIM)).astype(np.float16)
    k, v = rng.standard_normal((2, 2, 48, NUM_KV_HEADS, HEAD_DIM)).astype(np.float16)
    o = cupyattn.dot_product_attention(*map(device.put, (q, k, v)), is_causal=True)
    expected = cupyattn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(device.get(o), expected, atol=4e-3)


def paged_batch(device: Device, lengths: Sequence[int]) -> float:
    """A decode of requests of these lengths over a paged cache; returns its seconds."""
    rng = np.random.default_rng(1)
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    indices = rng.permutation(indptr[-1]).astype(np.int32)
    last = np.array([(length - 1) % PAGE_SIZE + 1 for length in lengths], np.int32)
    pool = rng.standard_normal((indptr[-1], 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM))
    q = rng.standard_normal((len(lengths), NUM_QO_HEADS, HEAD_DIM)).astype(np.float16)
    on_device = [device.put(x) for x in (q, pool.astype(np.float16))]

    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    sizes = NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE
    wrapper.plan(indptr, device.put(indices), last, *sizes)
    answer = device.get(wrapper.run(*on_device))
    for b, length in enumerate(lengths):
        keys = pool.astype(np.float16)[indices[indptr[b] : indptr[b + 1]]]
        k, v = (keys[:, i].reshape(-1, NUM_KV_HEADS, HEAD_DIM)[:length] for i in (0, 1))
        expected = cupyattn.single_decode_with_kv_cache(q[b], k, v)
        np.testing.assert_allclose(answer[b], expected, atol=4e-3)
    return device.seconds(lambda: wrapper.run(*on_device))


def chart(device: Device, seconds: dict[int, float]) -> str:
    """Bars of the times by numbers of requests, as SVG."""
    longest = max(seconds.values())
    title = f"Decode over a paged cache on {device.name}, µs"
    note = "" if device.name != "the CPU" else ": the reference, whose times mean nothing"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" font-family="sans-serif"'
        f' font-size="12" height="{50 + 26 * len(seconds)}">',
        f'<text x="10" y="22" font-weight="bold">{title}{note}</text>',
    ]
    for row, (requests, taken) in enumerate(seconds.items()):
        y = 40 + 26 * row
        width = round(400 * taken / longest)
        parts.append(f'<text x="100" y="{y + 14}" text-anchor="end">{requests} requests</text>')
        parts.append(f'<rect x="110" y="{y}" width="{width}" height="18" fill="#1f77b4"/>')
        parts.append(f'<text x="{116 + width}" y="{y + 14}">{taken * 1e6:,.1f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all of it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.ten_minutes", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("ten_minutes.svg"), help="the chart")
    args = parser.parse_args(argv)
    cli.main(["info"])
    device = Device()
    first_call(device)
    print(f"first call on {device.name}: right")
    seconds = {}
    for requests in (1, 2, 4, 8):
        seconds[requests] = paged_batch(device, [37 + 100 * b for b in range(requests)])
        print(f"{requests} requests over a paged cache: right")
    args.out.write_text(chart(device, seconds), "utf-8")
    print(f"chart: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Calls of a program whose environment may ask for a log and for calls in files, on one device.

    CUPYATTN_LOG=3 CUPYATTN_DUMP=calls python tests/helpers/observed_calls.py cuda

It needs torch, and CuPy on a GPU, and prints the name of each part behind it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

import cupyattn
from cupyattn import flash_attn, flash_mla, sparse
from helpers import poison

HEADS, KV_HEADS, DIM, PAGE, REQUESTS, WIDTH = 8, 2, 128, 16, 3, 5


class Program:
    """Arrays of one device, and the calls by name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rng = np.random.default_rng(11)
        self.lengths = self.ints([70, 1, 33])
        pages = self.rng.permutation(REQUESTS * WIDTH + 2)[: REQUESTS * WIDTH]
        self.table = self.ints(pages.reshape(REQUESTS, WIDTH))
        self.cache = self.normal(REQUESTS * WIDTH + 2, 2, PAGE, KV_HEADS, DIM)
        self.q = self.normal(REQUESTS, HEADS, DIM)

    def normal(self, *shape: int, dtype: Any = torch.bfloat16) -> torch.Tensor:
        values = self.rng.standard_normal(shape).astype(np.float32)
        return torch.from_numpy(values).to(dtype).to(self.device)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(self.device)

    def space(self, xp: Any = torch) -> Any:
        where = {"device": self.device} if xp is torch else {}
        return xp.zeros((16 << 20,), dtype=xp.uint8, **where)

    def planned(self, xp: Any = torch, dtype_kv: str = "bfloat16") -> Any:
        """A wrapper of decoding over the table's pages."""
        lengths = self.lengths.cpu().numpy()
        used = -(-lengths // PAGE)
        pages = np.concatenate(
            [row[:n] for row, n in zip(self.table.cpu().numpy(), used, strict=True)]
        )
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(self.space(xp))
        offsets, last = np.append(0, used.cumsum()), (lengths - 1) % PAGE + 1
        tables = [x.astype(np.int32) for x in (offsets, pages, last)]
        kinds = {
            "q_data_type": "float16" if xp is not torch else "bfloat16",
            "kv_data_type": dtype_kv,
        }
        wrapper.plan(*map(xp.asarray, tables), HEADS, KV_HEADS, DIM, PAGE, **kinds)
        return wrapper

    def sequence(self) -> None:
        """One request without a plan, whose keys lie among others."""
        k = self.normal(90, 2 * KV_HEADS, DIM)
        q = self.normal(40, HEADS, DIM)
        cupyattn.single_prefill_with_kv_cache(q, k[:, ::2], k[:, 1::2], causal=True)

    def pages(self) -> None:
        """Pages without a plan."""
        flash_attn.flash_attn_with_kvcache(
            self.q[:, None],
            self.cache[:, 0],
            self.cache[:, 1],
            cache_seqlens=self.lengths,
            block_table=self.table,
            causal=True,
        )

    def wrapper(self) -> None:
        self.planned().run(self.q, self.cache, return_lse=True)

    def own_workspace(self) -> None:
        """A wrapper that has made its workspace."""
        where = "cuda:0" if self.device == "cuda" else "cpu"
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(where)
        offsets = self.ints([0, 40, 90])
        wrapper.plan(offsets, offsets, HEADS, KV_HEADS, DIM, causal=True, q_data_type="bfloat16")
        k = self.normal(90, KV_HEADS, DIM)
        wrapper.run(self.normal(90, HEADS, DIM), k, k)

    def pages_of_8_bits(self) -> None:
        wrapper = self.planned(dtype_kv="float8_e4m3fn")
        wrapper.run(self.q, self.cache.to(torch.float8_e4m3fn), k_scale=0.5, v_scale=2.0)

    def cupy_pages_of_8_bits(self) -> None:
        xp: Any = np
        if self.device == "cuda":
            import cupy as xp
        wrapper = self.planned(xp, "float8_e4m3fn")
        numbers = self.cache.to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
        cache = poison.upload(numbers.view(ml_dtypes.float8_e4m3fn), xp)
        wrapper.run(xp.asarray(self.q.half().cpu().numpy()), cache, k_scale=0.5)

    def lists(self) -> None:
        """Blocks that the index of each key chooses."""
        index = self.normal(REQUESTS * WIDTH + 2, PAGE, DIM)
        chosen = sparse.select(
            self.q[:, :KV_HEADS], index, self.table, self.lengths, topk=3, block=PAGE
        )
        sparse.attend(
            self.q, self.cache, chosen, self.table, self.lengths, granularity=PAGE, return_lse=True
        )

    def latent(self) -> None:
        """Latent rows of pages, of 16 bits, and lists of keys."""
        rows = self.normal(REQUESTS * WIDTH + 2, 64, 1, 576)
        q = self.normal(REQUESTS, 1, 16, 576)
        metadata, parts = flash_mla.get_mla_metadata()
        flash_mla.flash_mla_with_kvcache(q, rows, self.table, self.lengths, 512, metadata, parts)
        listed = self.ints(self.rng.integers(-1, REQUESTS * WIDTH * 64, (REQUESTS, 1, 64)))
        flash_mla.flash_mla_with_kvcache(q, rows, None, None, 512, indices=listed)

    def latent_wrapper(self) -> None:
        rows = self.normal(REQUESTS * WIDTH + 2, 64, 576)
        wrapper = cupyattn.BatchMLAPagedAttentionWrapper(self.space())
        starts, used = self.ints([0, 1, 2, 3]), self.ints([0, 2, 3, 4])
        pages = self.ints([3, 7, 0, 9])
        kinds = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
        wrapper.plan(starts, used, pages, self.lengths, 16, 512, 64, 64, False, 576**-0.5, **kinds)
        q = self.normal(REQUESTS, 16, 576)
        wrapper.run(q[..., :512], q[..., 512:], rows[..., :512], rows[..., 512:])

    def error(self) -> None:
        """A call that is refused."""
        try:
            cupyattn.single_prefill_with_kv_cache(self.q, self.q[:, :3], self.q[:, :3])
        except cupyattn.ArgumentError:
            return
        raise AssertionError("it was not refused")

    def graph(self) -> None:
        """Calls that a graph holds, which can neither wait nor read."""
        wrapper, index = self.planned(), self.normal(REQUESTS * WIDTH + 2, PAGE, DIM)

        def calls() -> list[torch.Tensor]:
            args = self.table, self.lengths
            chosen = sparse.select(self.q[:, :KV_HEADS], index, *args, topk=3, block=PAGE)
            paged = flash_attn.flash_attn_with_kvcache(
                self.q[:, None],
                self.cache[:, 0],
                self.cache[:, 1],
                cache_seqlens=self.lengths,
                block_table=self.table,
            )
            listed = sparse.attend(self.q, self.cache, chosen, *args, granularity=PAGE)
            return [paged, listed, wrapper.run(self.q, self.cache)]

        with _quiet():
            calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = calls()
        self.q.mul_(0.5)
        graph.replay()
        with _quiet():
            wanted = calls()
        assert all(torch.equal(x, y) for x, y in zip(captured, wanted, strict=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """No call is observed meanwhile."""
    from cupyattn.observation import calls

    before, calls._thread.is_inside = calls._thread.is_inside, True
    try:
        yield
    finally:
        calls._thread.is_inside = before


def parts(device: str) -> dict[str, Callable[[Program], None]]:
    """The parts by name, in the order in which they are run."""
    names = [
        "sequence",
        "pages",
        "wrapper",
        "own_workspace",
        "pages_of_8_bits",
        "cupy_pages_of_8_bits",
    ]
    names += ["lists", "latent", "latent_wrapper", "error"]
    names += ["graph"] if device == "cuda" else []
    return {name: getattr(Program, name) for name in names}


def main() -> None:
    device = sys.argv[1]
    program = Program(device)
    for name, part in parts(device).items():
        part(program)
        print(name, flush=True)
    assert math.isfinite(float(program.q.float().sum()))


if __name__ == "__main__":
    main()

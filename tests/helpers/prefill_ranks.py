"""Distributed prefill on GPUs: every way of one rank, against one GPU and the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn import array, reference
from cupyattn.distributed import ContextParallelPrefill, Group, ZigZag

WAYS = (("gather", 1), ("gather", 2), ("overlap", 1), ("overlap", 4), ("ulysses", None))


class Prompts(NamedTuple):
    """Lengths, heads and head dims of prompts, and options of plan()."""

    lengths: tuple[int, ...] = (1200, 0, 1, 333)
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(sum(self.lengths))
        n, (heads, kv_heads), (dim_qk, dim_vo) = sum(self.lengths), self.heads, self.dims
        shapes = (n, heads, dim_qk), (n, kv_heads, dim_qk), (n, kv_heads, dim_vo)
        return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        for begin, end in pairwise(self.offsets):
            own = (x[begin:end].astype(np.float64) for x in self.arrays())
            parts.append(reference.attention(*own, **{"causal": True, **dict(self.options)}))
        out, lse = (np.concatenate(x) for x in zip(*parts, strict=True))
        return out, lse


def on_gpu(x: np.ndarray, framework: str) -> Any:
    if framework == "torch":
        import torch

        return torch.from_numpy(x).cuda()
    import cupy

    return cupy.asarray(x)


def to_host(x: Any) -> np.ndarray:
    return np.array(array.to_host(array.view(x, "x")))


def check(group: Group, framework: str, prompts: Prompts) -> None:
    """Every way that serves: as exact as one GPU, and the same bits at every call."""
    options = {"causal": True, **dict(prompts.options)}
    whole = [on_gpu(x, framework) for x in prompts.arrays()]
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper("cuda")
    indptr = prompts.offsets
    wrapper.plan(indptr, indptr, *prompts.heads, *prompts.dims, **options)
    alone = to_host(wrapper.run(*whole)).astype(np.float64)
    wanted, wanted_lse = prompts.expected()
    # A few rows may be rounded otherwise by another kernel.
    limit = 1.02 * np.abs(alone - wanted).max() + 2e-4
    share = ZigZag(indptr, group.size)
    own = [share.cut(x, group.rank) for x in whole]
    rows = share.rows(group.rank)
    for method, num_chunks in WAYS:
        prefill = ContextParallelPrefill(group, method=method)
        try:
            prefill.plan(indptr, *prompts.heads, *prompts.dims, num_chunks=num_chunks, **options)
        except cupyattn.UnsupportedError:
            continue
        answers = [prefill.run(*own, return_lse=True) for _ in range(4)]
        out, lse = (to_host(x) for x in answers[0])
        case = f"rank {group.rank}, {framework}, {method} in {num_chunks}, {prompts}"
        off = np.abs(out.astype(np.float64) - wanted[rows]).max(initial=0)
        assert off <= limit, f"{case}: off by {off}, wanted {limit} at most"
        np.testing.assert_allclose(lse, wanted_lse[rows], atol=2e-3, err_msg=case)
        prefill.close()
        for again in answers[1:]:
            for x, y in zip(again, (out, lse), strict=True):
                assert to_host(x).tobytes() == y.tobytes(), f"{case}: other bits"


CASES = (
    Prompts(),
    Prompts(lengths=(2048,), options=(("causal", False),)),
    Prompts(options=(("window_left", 100),)),
    Prompts(lengths=(900, 77), heads=(8, 8), dims=(192, 128)),
    Prompts(lengths=(3,)),
)


def check_all(group: Group, framework: str) -> None:
    for prompts in CASES:
        check(group, framework, prompts)


def check_graph(group: Group, method: str) -> None:
    """A CUDA graph of torch's holds a call, and its replays follow what is in q, k and v."""
    import torch

    prompts = Prompts(lengths=(1500, 212))
    share = ZigZag(prompts.offsets, group.size)
    whole = [on_gpu(x, "torch") for x in prompts.arrays()]
    own = [share.cut(x, group.rank) for x in whole]
    prefill = ContextParallelPrefill(group, method=method)
    prefill.plan(prompts.offsets, *prompts.heads, *prompts.dims)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            prefill.run(*own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        out = prefill.run(*own)
    for factor in (1.0, 0.5, -1.0):
        for x, y in zip(own, whole, strict=True):
            x.copy_(factor * share.cut(y, group.rank))
        torch.cuda.synchronize()
        group.share_bytes(b"")
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        group.share_bytes(b"")
        assert torch.equal(got, prefill.run(*own)), f"{method}: a replay differs from a call"
        torch.cuda.synchronize()
    wanted = factor * prompts.expected()[0][share.rows(group.rank)]
    assert wanted.shape == tuple(got.shape) and bool(torch.isfinite(got).all())

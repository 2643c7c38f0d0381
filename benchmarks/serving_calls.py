"""Device and host time of single calls of serving, each beside what it must not lose to.

    CUPYATTN_BENCH_FA3=fa3.so python -m benchmarks.serving_calls --out results/serving

Each row has a time of ours and of what it is held to, and their ratio (`than` / `ours`: above 1 is
faster). Device times are those of graphs, as all benchmarks time them; host times are those of
asynchronous calls. A case that fails says why and leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .serving import cold, graphed

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
# "device" or "host", the case, what it must reach, calls of ours and of what it is held to.
Case = tuple[str, str, str, dict[str, Callable[[], Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose names hold one of these words")
    parser.add_argument("--warm", action="store_true", help="compile what is needed, time nothing")
    options = parser.parse_args()
    words = [x for x in options.only.split(",") if x]
    rows: list[dict[str, Any]] = []
    for maker in MAKERS:
        if words and not any(word in maker.__name__ for word in words):
            continue
        try:
            for kind, name, must, calls in maker():
                if options.warm:
                    for call in calls.values():
                        call()
                    continue
                times = on_host(calls) if kind == "host" else on_device(calls)
                row: dict[str, Any] = {"case": name, "must": must, "kind": kind}
                row |= {who: round(us, 2) for who, us in times.items()}
                than = [who for who in times if who != "ours"]
                if than:
                    row["ratio"] = round(times[than[0]] / times["ours"], 3)
                rows.append(row)
                print(row, flush=True)
        except Exception as error:
            rows.append({"case": maker.__name__, "error": f"{type(error).__name__}: {error}"})
            print(maker.__name__, traceback.format_exc(limit=4), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "calls.json").write_text(json.dumps(rows, indent=1) + "\n")


def on_device(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    return cold({name: graphed(call) for name, call in calls.items()})


def on_host(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median µs of calls that are made one by one, the device idle before each.

    A processor that has just waited takes a third longer than in a row of calls.
    """
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(70):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            if turn >= 20:
                times[name].append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(x) for name, x in times.items()}


def fa3() -> Callable[..., Any]:
    """FlashAttention-3's op."""
    import torch

    torch.ops.load_library(os.environ["CUPYATTN_BENCH_FA3"])
    return torch.ops.flash_attn_3.fwd


def randn(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.randn(shape, dtype=torch.float32, device="cuda").to(getattr(torch, dtype))


class Pages:
    """A paged cache of requests of these lengths, pages in random order."""

    def __init__(self, lens: list[int], page_size: int, dtype: str = "bfloat16") -> None:
        import torch

        counts = [-(-n // page_size) for n in lens]
        total, maximum = sum(counts), max(counts)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).int()
        table = torch.zeros(len(lens), maximum, dtype=torch.int32)
        self.indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for row, count in enumerate(counts):
            table[row, :count] = order[self.indptr[row] : self.indptr[row] + count]
        self.table, self.indices = table.cuda(), order.cuda()
        self.last = np.array([(n - 1) % page_size + 1 for n in lens], np.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        shape = total, page_size, KV_HEADS, DIM
        self.k, self.v = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
        self.page_size, self.most = page_size, max(lens)


def offsets(counts: list[int]) -> Any:
    import torch

    host = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return torch.from_numpy(host).cuda(), host


def workspace() -> Any:
    import torch

    return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")


# --- Calls without a plan beside planned ones ---


def prompts() -> Iterator[Case]:
    """Prompts over pages: lengths on the device beside a plan of the host."""
    import cupyattn

    generator = np.random.default_rng(25)
    for name, lens in (
        ("4x2k", [2048] * 4),
        ("16x1k", [1024] * 16),
        ("32 of 100 to 2k", generator.integers(100, 2048, 32).tolist()),
        ("1x8k", [8192]),
    ):
        pages, (cu, host) = Pages(lens, 64), offsets(lens)
        q = randn(sum(lens), HEADS, DIM)
        wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
        wrapper.plan(
            host, pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, 64,
            causal=True, q_data_type=q.dtype,
        )  # fmt: skip
        memory, out, planned = workspace(), q.clone(), q.clone()

        def planless(q=q, pages=pages, cu=cu, memory=memory, lens=lens, out=out) -> Any:
            return cupyattn.trtllm_batch_context_with_kv_cache(
                q, (pages.k, pages.v), memory, pages.table, pages.lens, max(lens), max(lens),
                SCALE, 1.0, len(lens), cu, cu, out=out, kv_layout="NHD",
            )  # fmt: skip

        def run(wrapper=wrapper, q=q, pages=pages, out=planned) -> Any:
            return wrapper.run(q, (pages.k, pages.v), out=out)

        yield "device", f"prompts {name}, planless", "0.99", {"ours": planless, "planned": run}


def decodes() -> Iterator[Case]:
    """flash_attn_with_kvcache of one token, beside FlashAttention-3's op and the planned run."""
    import torch

    import cupyattn
    from cupyattn import flash_attn

    forward = fa3()
    for name, must, lens in (("64x8k", "1.0", [8192] * 64), ("1x4k", "1.2", [4096])):
        pages, count = Pages(lens, 64), len(lens)
        q = randn(count, 1, HEADS, DIM)
        cu = torch.arange(count + 1, dtype=torch.int32, device="cuda")

        def ours(q=q, pages=pages) -> Any:
            return flash_attn.flash_attn_with_kvcache(
                q, pages.k, pages.v, cache_seqlens=pages.lens, page_table=pages.table, causal=True
            )

        def peer(q=q, pages=pages, cu=cu) -> Any:
            return forward(
                q[:, 0], pages.k, pages.v, page_table=pages.table, seqused_k=pages.lens,
                cu_seqlens_q=cu, max_seqlen_q=1, softmax_scale=SCALE, is_causal=True, num_splits=0,
            )  # fmt: skip

        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD")
        wrapper.plan(
            pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, 64,
            q_data_type=q.dtype,
        )  # fmt: skip
        row = q[:, 0]

        def run(wrapper=wrapper, row=row, pages=pages) -> Any:
            return wrapper.run(row, (pages.k, pages.v))

        calls = {"ours": ours, "fa3": peer, "planned": run}
        yield "device", f"decode {name}, flash_attn", must, calls
        yield "host", f"decode {name}, flash_attn", "20 us", {"ours": ours, "fa3": peer}


def quantised() -> Iterator[Case]:
    """Decode of 16-bit queries over fp8 keys, beside FlashAttention-3 over 16-bit ones."""
    import torch

    from cupyattn import flash_attn

    forward, lens = fa3(), [8192] * 64
    pages, q = Pages(lens, 64), randn(64, 1, HEADS, DIM)
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (pages.k, pages.v))
    cu = torch.arange(65, dtype=torch.int32, device="cuda")

    def ours() -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, k8, v8, cache_seqlens=pages.lens, page_table=pages.table, causal=True
        )

    def peer() -> Any:
        return forward(
            q[:, 0], pages.k, pages.v, page_table=pages.table, seqused_k=pages.lens,
            cu_seqlens_q=cu, max_seqlen_q=1, softmax_scale=SCALE, is_causal=True, num_splits=0,
        )  # fmt: skip

    yield "device", "decode 64x8k, fp8 keys", "1.5", {"ours": ours, "fa3": peer}


def appends() -> Iterator[Case]:
    """Eight requests of 512 new tokens over 8k keys."""
    from cupyattn import flash_attn

    forward, rows, count = fa3(), 512, 8
    pages = Pages([8192] * count, 64)
    (cu, _), q = offsets([rows] * count), randn(rows * count, HEADS, DIM)
    by_request = q.view(count, rows, HEADS, DIM)

    def ours() -> Any:
        return flash_attn.flash_attn_with_kvcache(
            by_request, pages.k, pages.v, cache_seqlens=pages.lens, page_table=pages.table,
            causal=True,
        )  # fmt: skip

    def peer() -> Any:
        return forward(
            q, pages.k, pages.v, page_table=pages.table, seqused_k=pages.lens, cu_seqlens_q=cu,
            max_seqlen_q=rows, softmax_scale=SCALE, is_causal=True, num_splits=0,
        )  # fmt: skip

    def unsplit() -> Any:
        return forward(
            by_request, pages.k, pages.v, page_table=pages.table, seqused_k=pages.lens,
            softmax_scale=SCALE, is_causal=True, num_splits=1,
        )  # fmt: skip

    calls = {"ours": ours, "fa3": peer, "fa3 unsplit": unsplit}
    yield "device", "append 8x512 at 8k, flash_attn", "1.0", calls


# --- The host's part ---


def new_shapes() -> Iterator[Case]:
    """Calls of shapes that were never seen: every prefill step of a server is one."""
    import torch

    from cupyattn import flash_attn
    from cupyattn.serving import (
        AttentionBackend,
        BackendConfig,
        BatchInfo,
        ForwardMode,
        LayerSpec,
        MHATokenToKVPool,
    )

    # What an engine's allocator has by then; else calls would wait for the driver's memory.
    reserve = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del reserve
    pages, built = Pages([128] * 24, 16), []
    for index in range(80):
        count = 1 + index % 24
        rows = count * 5 + index
        steps = np.minimum(np.arange(count + 1) * (rows // count), rows).astype(np.int32)
        steps[-1] = rows
        table = pages.table[:count, : 4 + index % 5].contiguous()
        lens = torch.full((count,), 60, dtype=torch.int32, device="cuda")
        built.append((randn(rows, HEADS, DIM), table, lens, torch.from_numpy(steps).cuda()))
    given = iter(built)

    def call() -> Any:
        q, table, lens, cu = next(given)
        return flash_attn.flash_attn_with_kvcache(
            q, pages.k, pages.v, cache_seqlens=lens, page_table=table, cu_seqlens_q=cu,
            max_seqlen_q=64, causal=True,
        )  # fmt: skip

    yield "host", "first call of a shape, flash_attn", "100 us", {"ours": call}
    req_to_token = torch.randperm(32 * 512, device="cuda").int().view(32, 512)
    pool = MHATokenToKVPool(32 * 512, KV_HEADS, DIM, 1, req_to_token, dtype="bfloat16")
    config = BackendConfig(HEADS, KV_HEADS, DIM, max_context_len=512)
    backend, layer, steps = AttentionBackend(config, pool, req_to_token), LayerSpec(), []
    for index in range(80):
        count = 1 + index % 24
        host = np.full(count, 5 + index)
        lens = torch.full((count,), 300, device="cuda")
        new = torch.from_numpy(host).cuda()
        rows = torch.arange(count, device="cuda")
        batch = BatchInfo(
            ForwardMode.EXTEND, rows, lens, np.full(count, 300), new, host
        )  # fmt: skip
        steps.append((batch, randn(int(host.sum()), HEADS, DIM)))
    at = iter(steps)

    def metadata_and_layer() -> Any:
        batch, q = next(at)
        backend.init_forward_metadata(batch)
        return backend.forward(q, layer)

    def step_of_metadata() -> Any:
        return backend.init_forward_metadata(next(again)[0])

    yield "host", "first step of a shape and its first layer", "", {"ours": metadata_and_layer}
    again = iter(steps)
    yield "host", "metadata of EXTEND, another size each time", "25 us", {"ours": step_of_metadata}


def graph_plans() -> Iterator[Case]:
    """plan() of a wrapper for graphs, page ids on the device."""
    import torch

    import cupyattn

    for count in (64, 256):
        pages = Pages([1024] * count, 16)
        total = len(pages.indices)
        ints = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (count + 1, total, count)]
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_cuda_graph=True, paged_kv_indptr_buffer=ints[0],
            paged_kv_indices_buffer=ints[1], paged_kv_last_page_len_buffer=ints[2],
        )  # fmt: skip

        def plan(wrapper=wrapper, pages=pages) -> None:
            wrapper.plan(
                pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, 16,
                q_data_type=torch.bfloat16,
            )  # fmt: skip

        yield "host", f"plan() for graphs, {count} requests", "90 us", {"ours": plan}


def writes() -> Iterator[Case]:
    """Keys and values to their slots: quantised on the way, copied, and torch's own copies."""
    import torch

    from cupyattn import page
    from cupyattn.slots import reshape_and_cache

    count, slots = 8192, 1 << 17
    k, v = randn(count, KV_HEADS, DIM), randn(count, KV_HEADS, DIM)
    loc = torch.randperm(slots, device="cuda")[:count]
    wide = [torch.zeros(slots, KV_HEADS, DIM, dtype=k.dtype, device="cuda") for _ in "kv"]
    narrow = [x.to(torch.float8_e4m3fn) for x in wide]
    scale = torch.full((1,), 0.5, device="cuda")

    def quantise() -> None:
        reshape_and_cache(k, v, *narrow, loc, k_scale=scale, v_scale=scale)

    def copy() -> None:
        reshape_and_cache(k, v, *wide, loc)

    def copy_of_torch() -> None:
        wide[0][loc], wide[1][loc] = k, v

    calls = {"ours": quantise, "copy": copy, "copy of torch": copy_of_torch}
    yield "device", "quantise and write 8k tokens", "0.87", calls
    n = 64
    few, at = (k[:n], v[:n]), loc[:n]
    pages = torch.zeros(256, 2, 16, KV_HEADS, DIM, dtype=k.dtype, device="cuda")
    zeros = [torch.zeros(m, dtype=torch.int32, device="cuda") for m in (n, n, 64, n + 1, n)]
    yield (
        "host",
        "append_paged_kv_cache of 64 tokens",
        "12 us",
        {
            "ours": lambda: page.append_paged_kv_cache(*few, *zeros[:2], pages, *zeros[2:]),
            "copy of torch": lambda: wide[0].index_copy_(0, at, few[0]),
        },
    )
    yield (
        "host",
        "reshape_and_cache of 64 tokens",
        "12 us",
        {"ours": lambda: reshape_and_cache(*few, *wide, at)},
    )


# --- Layers of an engine ---


def chunks() -> Iterator[Case]:
    """Decode of chunks of 8k keys in contexts of 128k, beside requests of 8k."""
    import torch

    from cupyattn.serving import (
        AttentionBackend,
        BackendConfig,
        BatchInfo,
        ForwardMode,
        LayerSpec,
    )

    count, context, chunk = 16, 1 << 17, 8192
    slots = count * context
    k, v = randn(slots, KV_HEADS, DIM), randn(slots, KV_HEADS, DIM)

    class Pool:
        def get_kv_buffer(self, layer_id: int) -> Any:
            return k, v

    rows = torch.arange(count, device="cuda")
    q = randn(count, HEADS, DIM)
    table = torch.randperm(slots, device="cuda").int().view(count, context)
    calls = {}
    for who, keys, layer in (
        ("ours", context, LayerSpec(attention_chunk=chunk)), ("short", chunk, LayerSpec()),
    ):  # fmt: skip
        config = BackendConfig(
            HEADS, KV_HEADS, DIM, max_context_len=context,
            attention_chunk_size=chunk if who == "ours" else None,
        )  # fmt: skip
        if who == "short":
            table = table[:, -chunk:].contiguous()
            config = BackendConfig(HEADS, KV_HEADS, DIM, max_context_len=chunk)
        backend = AttentionBackend(config, Pool(), table)
        lens = torch.full((count,), keys, device="cuda")
        backend.init_forward_metadata(BatchInfo(ForwardMode.DECODE, rows, lens))
        calls[who] = lambda b=backend, x=layer: b.forward(q, x)
    yield "device", "decode of 8k chunks, 16 x 128k", "0.91", calls


MAKERS = (
    prompts, decodes, quantised, appends, new_shapes, graph_plans, writes, chunks,
)  # fmt: skip

if __name__ == "__main__":
    main()

"""The serving backend beside the file that it is modelled on, in one process.

    CUPYATTN_BENCH_FA3=fa3.so CUPYATTN_BENCH_SGLANG=flashattention_backend.py \\
        python -m benchmarks.serving --out results/serving

The peer is SGLang's flashattention_backend.py over FlashAttention-3's op: the file of the package
index, loaded with stand-ins for the engine's modules. Both get the same batches, slots and pools.

- metadata: one `init_forward_metadata_replay_cuda_graph`; host time of an asynchronous call, and
  the time that the device takes for what it enqueues.
- attention: one layer's `forward_decode` or `forward_extend` under replay of a graph, cold L2;
  planned: a wrapper's run over the same keys, planned on the host, in a graph too.
- buffers: bytes that `init_cuda_graph_state` takes.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from . import timing

HEADS, KV_HEADS, DIM = 32, 8, 128
CONTEXT = 32768
TOPK, DRAFT_TOKENS = 4, 8


class Mode(enum.Enum):
    """The engine's ForwardMode, as far as both backends ask."""

    DECODE = 1
    TARGET_VERIFY = 2

    def is_decode_or_idle(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend(self) -> bool:
        return False

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_extend(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return False


class Arch(enum.Enum):
    MHA = 1
    MLA = 2


def load_peer(path: str, library: str) -> Any:
    """SGLang's FlashAttentionBackend, over FlashAttention-3's op."""
    import torch

    torch.ops.load_library(library)
    attend = torch.ops.flash_attn_3.fwd

    def with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, page_table: Any, cache_seqlens: Any,
        cu_seqlens_q: Any, max_seqlen_q: int, softmax_scale: float, causal: bool = False,
        return_softmax_lse: bool = False, num_splits: int = 0,
        window_size: tuple[int, int] = (-1, -1), **rest: Any,
    ) -> Any:  # fmt: skip
        out, lse, *_ = attend(
            q, k_cache, v_cache, page_table=page_table, seqused_k=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale,
            is_causal=causal, num_splits=num_splits, window_size_left=window_size[0],
            window_size_right=window_size[1],
        )  # fmt: skip
        return (out, lse, None, None) if return_softmax_lse else out

    def merge(o_a: Any, s_a: Any, o_b: Any, s_b: Any) -> Any:
        import cupyattn.flash_attn

        # The engine's own merge is a compiled extension. Ours takes its place: it is no slower.
        return cupyattn.flash_attn.merge_state_v2(o_a, s_a, o_b, s_b)

    stand_ins = {
        "sglang.srt.configs.model_config": {"AttentionArch": Arch},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": object},
        "sglang.srt.managers.schedule_batch": {"global_server_args_dict": {}},
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardBatch": object, "ForwardMode": Mode,
        },
        "sglang.srt.speculative.spec_info": {"SpecInput": object},
        "sgl_kernel": {"merge_state_v2": merge},
        "sgl_kernel.flash_attn": {
            "flash_attn_varlen_func": None, "flash_attn_with_kvcache": with_kvcache,
        },
    }  # fmt: skip
    for name, members in stand_ins.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
        vars(sys.modules[name]).update(members)
    spec = importlib.util.spec_from_file_location("benchmarks_sglang", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module.FlashAttentionBackend


def load_ours() -> Any:
    from cupyattn.serving import FlashAttentionBackend

    return FlashAttentionBackend


class Engine:
    """Pools, slots and one batch of `bs` requests of `keys` keys, the same for both backends."""

    def __init__(
        self, bs: int, keys: int, mode: Mode, pool: tuple[Any, Any], window: int | None = None
    ) -> None:
        import torch

        self.bs, self.mode, self.window = bs, mode, window
        generator = torch.Generator().manual_seed(bs)
        self.k, self.v = pool
        slots = torch.randperm(bs * (keys + DRAFT_TOKENS), generator=generator) % len(self.k)
        table = torch.zeros(bs, CONTEXT, dtype=torch.int32)
        table[:, : keys + DRAFT_TOKENS] = slots.view(bs, -1).int()
        self.table, self.slots = table.cuda(), slots.view(bs, -1)[:, :keys]
        self.requests = torch.randperm(bs, generator=generator).cuda()
        self.lens = torch.full((bs,), keys, device="cuda")
        self.lens_cpu = torch.full((bs,), keys)
        rows = bs * (DRAFT_TOKENS if mode is Mode.TARGET_VERIFY else 1)
        self.q = torch.randn(rows, HEADS * DIM, dtype=torch.bfloat16, device="cuda")
        self.spec = None
        if mode is Mode.TARGET_VERIFY:
            tree = torch.rand(bs, DRAFT_TOKENS, DRAFT_TOKENS, generator=generator) < 0.5
            tree = torch.tril(tree) | torch.eye(DRAFT_TOKENS, dtype=torch.bool)
            prefix = torch.ones(bs, DRAFT_TOKENS, keys, dtype=torch.bool)
            mask = torch.cat([prefix, tree], -1).flatten().cuda()
            self.spec = SimpleNamespace(
                custom_mask=mask, positions=torch.zeros(rows, device="cuda"), accept_length=None
            )
        self.pool = SimpleNamespace(
            get_kv_buffer=lambda layer_id: (self.k, self.v),
            get_key_buffer=lambda layer_id: self.k,
            get_value_buffer=lambda layer_id: self.v,
        )
        self.layer = SimpleNamespace(
            layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, tp_v_head_num=KV_HEADS,
            head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5, logit_cap=0.0, k_scale=None,
            v_scale=None, sliding_window_size=window, is_cross_attention=False,
        )  # fmt: skip

    def runner(self) -> SimpleNamespace:
        is_tree = self.mode is Mode.TARGET_VERIFY
        return SimpleNamespace(
            server_args=SimpleNamespace(
                speculative_eagle_topk=TOPK if is_tree else None,
                speculative_num_draft_tokens=DRAFT_TOKENS if is_tree else None,
                enable_deterministic_inference=False, kv_cache_dtype="auto",
            ),
            model_config=SimpleNamespace(
                context_len=CONTEXT, attention_arch=Arch.MHA, is_encoder_decoder=False
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool, page_size=1, sliding_window_size=self.window,
            attention_chunk_size=None, is_hybrid=False, device="cuda", kv_cache_dtype=None,
        )  # fmt: skip

    def captured(self, backend: Any) -> tuple[Callable[[], None], Callable[[], Any]]:
        """(a replay's metadata, a layer's attention) of a backend with graph buffers."""
        rows = len(self.q)
        backend.init_forward_metadata_capture_cuda_graph(
            self.bs, rows, self.requests, self.lens, None, self.mode, self.spec
        )
        total = int(self.lens_cpu.sum())
        arguments = (
            *(self.bs, self.requests, self.lens, total, None, self.mode, self.spec, self.lens_cpu),
            None,
        )

        def metadata() -> None:
            backend.init_forward_metadata_replay_cuda_graph(*arguments)

        batch = SimpleNamespace(
            forward_mode=self.mode, token_to_kv_pool=self.pool, out_cache_loc=None,
            spec_info=self.spec, batch_size=self.bs, seq_lens=self.lens, encoder_lens=None,
            req_pool_indices=self.requests, attn_attend_prefix_cache=None,
        )  # fmt: skip
        is_decode = self.mode is Mode.DECODE
        forward = backend.forward_decode if is_decode else backend.forward_extend

        def attention() -> Any:
            return forward(self.q, None, None, self.layer, batch, save_kv_cache=False)

        return metadata, attention

    def planned(self) -> Callable[[], Any]:
        """Decode by a wrapper that plans on the host, over the same slots as pages of a token."""
        import torch

        import cupyattn

        bs, keys = self.slots.shape
        order = self.requests.cpu()
        memory = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD")
        wrapper.plan(
            torch.arange(0, bs * keys + 1, keys, dtype=torch.int32),
            self.slots[order].reshape(-1).int().cuda(),
            torch.ones(bs, dtype=torch.int32), HEADS, KV_HEADS, DIM, 1, q_data_type=self.q.dtype,
        )  # fmt: skip
        q, pages = self.q.view(bs, HEADS, DIM), (self.k[:, None], self.v[:, None])
        return lambda: wrapper.run(q, pages)


def host_and_device(call: Callable[[], Any], count: int = 60) -> tuple[float, float]:
    """Median µs of the host's part of a call, and of the device's, of many in a row."""
    import torch

    for _ in range(5):
        call()
    torch.cuda.synchronize()
    host = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        host.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
    # A long fill hides the host's part: what follows it runs back to back.
    fill = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    device = []
    for _ in range(count // 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):
            fill.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(host), statistics.median(device)


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def cold(calls: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
    """Median µs of each call on the device, visited in random order, as benchmarks time it: a cold
    L2, and other code before each."""
    clock = timing.Clock()
    order = timing.random_order(0)
    found = timing.measure([*calls.values()], clock, rounds, math.inf, order=order)
    for name, samples in zip(calls, found, strict=True):
        if samples.error:
            raise RuntimeError(f"{name}: {samples.error}")
    return {name: samples.percentile(50) for name, samples in zip(calls, found, strict=True)}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    makers = {"ours": load_ours()}
    peer = os.environ.get("CUPYATTN_BENCH_SGLANG")
    if peer:
        makers["sglang"] = load_peer(peer, os.environ["CUPYATTN_BENCH_FA3"])
    slots = 256 * (8192 + DRAFT_TOKENS)
    pool = tuple(
        torch.randn(slots, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv"
    )
    rows = []
    for mode, bs, window in (
        (Mode.DECODE, 64, None), (Mode.DECODE, 256, None), (Mode.TARGET_VERIFY, 32, None),
        (Mode.TARGET_VERIFY, 32, 1023),
    ):  # fmt: skip
        engine = Engine(bs, 8192, mode, (pool[0], pool[1]), window)
        suffix = "" if window is None else f" window {window}"
        answers, calls, backends = {}, {}, []
        for name, make in makers.items():
            before = torch.cuda.memory_allocated()
            backend = make(engine.runner())
            backends.append(backend)  # graphs read its buffers
            backend.init_cuda_graph_state(bs, len(engine.q))
            taken = torch.cuda.memory_allocated() - before
            metadata, attention = engine.captured(backend)
            host, device = host_and_device(metadata)
            answers[name] = attention().float().reshape(len(engine.q), -1)
            calls[name] = graphed(attention)
            rows.append(
                {"case": f"{mode.name} {bs}x8k{suffix}", "who": name, "host_us": host,
                 "device_us": device, "buffers": taken}
            )  # fmt: skip
        if mode is Mode.DECODE:
            calls["planned"] = graphed(engine.planned())
        times = cold(calls)
        for name, us in times.items():
            for row in rows[-len(makers) :]:
                if row["who"] == name:
                    row["attention_us"] = us
        if "planned" in times:
            rows[-len(makers)]["planned_us"] = times["planned"]
        if "sglang" in answers:
            difference = (answers["ours"] - answers["sglang"]).norm() / answers["sglang"].norm()
            rows[-1]["difference"] = float(difference)
        for row in rows[-len(makers) :]:
            print(row, flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "serving.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Engines of other people with small random models: the tokens they give, by an attention of theirs
or ours, or by a dense reference.

Sources of the engines are not here: they are found as modules, or the tests that want them skip.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import engine_stubs

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
NUM_TOKENS = 24


def prompts() -> list[list[int]]:
    """Of several lengths; some begin alike."""
    import torch

    generator = torch.Generator().manual_seed(3)
    make = lambda n: torch.randint(3, 512, (n,), generator=generator).tolist()  # noqa: E731
    shared = make(300)
    return [make(5), make(1), shared + make(40), make(130), shared + make(3), make(17), make(280),
            shared[:64] + make(9)]  # fmt: skip


def folder(path: Path, kind: str) -> str:
    """A folder with the config of a model."""
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    config = CONFIG | {"architectures": [name], "model_type": kind}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


class Tokenizer:
    eos_token_id = -1

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def decode(self, ids: Any) -> str:
        return ""


def margins(logits: Any) -> list[float]:
    """How far the greedy token of each row is ahead of the next one, in standard deviations."""
    x = logits.float()
    best = x.topk(2, -1).values
    return ((best[:, 0] - best[:, 1]) / x.std(-1)).tolist()


def random_weights(named: Any) -> dict[str, Any]:
    """Weights by name, the same for every run: norms near 1, the rest small."""
    import torch

    generator = torch.Generator().manual_seed(7)
    made = {}
    for name, x in sorted(named):
        y = torch.randn(x.shape, generator=generator, device="cpu")
        made[name] = 1 + 0.1 * y if "norm" in name else y * 1.5 * x.shape[-1] ** -0.5
    return made


def missing(name: str) -> bool:
    """Whether a package, or transformers, which all of them read configs with, is not there."""
    return any(importlib.util.find_spec(x) is None for x in ("torch", "transformers", name))


def meeting_place(path: Path) -> str:
    """Where the processes of torch.distributed meet: a file. The engines' own places are ports with
    fixed numbers, which one process of a machine has at a time."""
    path.mkdir(parents=True, exist_ok=True)
    return f"file://{tempfile.mkdtemp(dir=path)}/meeting"


def check(tokens: list[Any], want: list[Any], ahead: list[Any]) -> None:
    compared, count = agree(tokens, want, ahead)
    assert compared > count * 0.6, (compared, count)


# --- mini-sglang ---


def import_minisgl(patch: pytest.MonkeyPatch) -> None:
    """Put stubs where mini-sglang looks, and our backends among its own."""
    engine_stubs.flashinfer(patch)
    engine_stubs.minisgl_kernels(patch)
    engine_stubs.absent(patch, "zmq", "zmq.asyncio", "msgpack", "tvm_ffi")
    from minisgl.attention import SUPPORTED_ATTENTION_BACKENDS as backends

    import cupyattn.integrations.minisgl as door

    door.register()
    if "dense" not in backends.supported_names():
        backends.register("dense")(lambda config: dense_backend()(config))


@contextlib.contextmanager
def minisgl(
    patch: pytest.MonkeyPatch, path: Path, backend: str, *, graphs: list[int], **named: Any
) -> Iterator[Any]:
    """An LLM of mini-sglang; `patch` must be undone before the next one."""
    import torch

    import_minisgl(patch)
    import minisgl.core
    import minisgl.distributed.info
    import minisgl.engine.config
    import minisgl.engine.engine
    import minisgl.layers.rotary
    import minisgl.scheduler.scheduler
    from minisgl.llm import LLM

    minisgl.layers.rotary.get_rope.cache_clear()
    patch.setattr(minisgl.core, "_GLOBAL_CTX", None)
    patch.setattr(minisgl.distributed.info, "_TP_INFO", None)
    patch.setattr(torch.cuda, "is_initialized", lambda: False)
    patch.setattr(minisgl.scheduler.scheduler, "load_tokenizer", lambda _: Tokenizer())

    def weights(self: Any, config: Any) -> Any:
        found = random_weights(self.model.state_dict().items())
        return {name: x.to(self.device, self.dtype) for name, x in found.items()}

    address = meeting_place(path)
    patch.setattr(
        minisgl.engine.config.EngineConfig, "distributed_addr", property(lambda _: address)
    )
    patch.setattr(minisgl.engine.engine.Engine, "_load_weight_state_dict", weights)
    if not torch.cuda.is_available():
        _play_graphs(patch)
    llm = LLM(
        folder(path, "llama"),
        attention_backend=backend,
        cuda_graph_bs=graphs,
        max_running_req=8,
        num_page_override=4096 // named.get("page_size", 1),
        max_extend_tokens=256,
        **named,
    )
    yield llm
    llm.shutdown()


def _play_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let replays of a graph on the CPU run the model on the batch that was captured."""
    from minisgl.core import get_global_ctx
    from minisgl.engine.graph import GraphRunner
    from minisgl.models.llama import LlamaForCausalLM

    real, replay = LlamaForCausalLM.forward, GraphRunner.replay
    runners: list[Any] = []

    def forward(model: Any) -> Any:
        graph, batch = engine_stubs.Graph.capturing, get_global_ctx().batch

        def play() -> None:
            context = get_global_ctx()
            before, context._batch = context._batch, batch
            runners[0].buffer.logits[: batch.size] = real(model)
            context._batch = before

        if graph is not None:
            graph.replay = play
        return real(model)

    def remember(runner: Any, batch: Any) -> Any:
        runners[:] = [runner]
        return replay(runner, batch)

    patch.setattr(LlamaForCausalLM, "forward", forward)
    patch.setattr(GraphRunner, "replay", remember)


def minisgl_tokens(patch: pytest.MonkeyPatch, llm: Any) -> tuple[list[Any], list[Any]]:
    """(greedy tokens, their margins) of each prompt; prompts are cut to chunks, and their common
    parts are cached."""
    from minisgl.core import SamplingParams
    from minisgl.engine.engine import Engine

    ahead: dict[int, list[float]] = {}
    forward, sample = Engine.forward_batch, llm.engine.sampler.sample
    requests: list[Any] = []

    def forward_batch(self: Any, batch: Any, args: Any) -> Any:
        requests[:] = batch.reqs
        return forward(self, batch, args)

    def record(logits: Any, args: Any) -> Any:
        for request, margin in zip(requests, margins(logits), strict=True):
            if type(request).__name__ != "ChunkedReq":
                ahead.setdefault(request.uid, []).append(margin)
        return sample(logits, args)

    patch.setattr(Engine, "forward_batch", forward_batch)
    patch.setattr(llm.engine.sampler, "sample", record)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = [x["token_ids"] for x in llm.generate(prompts(), params)]
    return tokens, [ahead[n][:NUM_TOKENS] for n in range(len(tokens))]


def dense_backend() -> type:
    """mini-sglang's verbs by plain float32 attention, a request at a time."""
    import torch
    from minisgl.attention import BaseAttnBackend, BaseAttnMetadata
    from minisgl.core import get_global_ctx

    class Metadata(BaseAttnMetadata):
        def __init__(self, requests: Any) -> None:
            self.requests = [(x.table_idx, x.extend_len, x.device_len) for x in requests]

        def get_last_indices(self, bs: int) -> Any:
            lens = torch.tensor([x[1] for x in self.requests])
            return (lens.cumsum(0) - 1)[:bs]

    class Dense(BaseAttnBackend):
        def __init__(self, config: Any) -> None:
            self.heads = config.num_qo_heads

        def prepare_metadata(self, batch: Any) -> None:
            batch.attn_metadata = Metadata(batch.padded_reqs)

        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            context = get_global_ctx()
            context.kv_cache.store_kv(k, v, batch.out_loc, layer_id)
            caches = [f(layer_id).flatten(0, 1) for f in (context.kv_cache.k_cache,
                                                          context.kv_cache.v_cache)]  # fmt: skip
            out, at = torch.empty_like(q), 0
            for row, new, length in batch.attn_metadata.requests:
                slots = context.page_table[row, :length].long()
                keys, values = (x[slots] for x in caches)
                out[at : at + new] = dense_attention(q[at : at + new], keys, values)
                at += new
            return out

        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            raise NotImplementedError

        prepare_for_capture = prepare_for_replay = init_capture_graph  # type: ignore[assignment]

    return Dense


def dense_attention(q: Any, k: Any, v: Any) -> Any:
    """[rows, heads, d] over [keys, kv_heads, d], causal, the last row at the last key."""
    import torch

    group, dtype = q.shape[1] // k.shape[1], q.dtype
    q, k, v = (
        q.float(),
        k.float().repeat_interleave(group, 1),
        v.float().repeat_interleave(group, 1),
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    hidden = ~hidden.tril(k.shape[0] - q.shape[0])
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(dtype)


def agree(
    got: list[list[int]], want: list[list[int]], margins: list[list[float]]
) -> tuple[int, int]:
    """(tokens compared, tokens in all). A request is compared up to where the reference's token is
    ahead of its next one by less than rounding moves logits; AssertionError where tokens differ
    before that."""
    compared = 0
    for x, y, ahead in zip(got, want, margins, strict=True):
        assert len(x) == len(y) == len(ahead)
        for at, (a, b, margin) in enumerate(zip(x, y, ahead, strict=True)):
            if a != b:
                assert margin < 0.1, (at, a, b, margin)
                break
            compared += 1
    return compared, sum(map(len, want))


# --- nano-vllm ---


def dense_flash_attn(patch: pytest.MonkeyPatch) -> Any:
    """The two functions that nano-vllm takes of flash_attn, by plain attention."""
    import torch

    def rows(cache: Any, table: Any, length: int) -> Any:
        return cache[table.clamp(min=0).long()].flatten(0, 1)[:length]

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any,
               block_table: Any = None, **_: Any) -> Any:  # fmt: skip
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        out = torch.empty_like(q)
        for n in range(len(starts) - 1):
            length = ends[n + 1] - ends[n]
            keys, values = (
                x[ends[n] : ends[n + 1]] if block_table is None else rows(x, block_table[n], length)
                for x in (k, v)
            )
            at = slice(starts[n], starts[n + 1])
            out[at] = dense_attention(q[at], keys, values)
        return out

    def kvcache(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any,
                **_: Any) -> Any:  # fmt: skip
        lens = cache_seqlens.tolist()
        made = [
            dense_attention(q[n], *(rows(x, block_table[n], length) for x in (k_cache, v_cache)))
            for n, length in enumerate(lens)
        ]
        return torch.stack(made)

    return engine_stubs.module(
        patch, "flash_attn", flash_attn_varlen_func=varlen, flash_attn_with_kvcache=kvcache
    )


def nanovllm_tokens(
    patch: pytest.MonkeyPatch, path: Path, flash_attn: Any, *, eager: bool
) -> tuple[list[Any], list[Any]]:
    """(greedy tokens, their margins) of each prompt, by nano-vllm over a module as flash_attn."""
    import torch
    import torch.distributed
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    if torch.cuda.is_available():
        torch.cuda.init()  # ahead of all that is replaced: it imports triton

    patch.setitem(sys.modules, "flash_attn", flash_attn)
    for name in [x for x in sys.modules if x.partition(".")[0] == "nanovllm"]:
        patch.delitem(sys.modules, name)
    engine_stubs.absent(patch, "triton", "triton.language")
    if importlib.util.find_spec("xxhash") is None:
        engine_stubs.module(patch, "xxhash", xxh64=engine_stubs.Hash)
    patch.setattr(torch, "compile", lambda function, **_: function)
    init = torch.distributed.init_process_group

    def init_process_group(backend: str, address: str, **named: Any) -> None:
        init("gloo", meeting_place(path), **named)

    patch.setattr(torch.distributed, "init_process_group", init_process_group)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 29, 1 << 29))
    from nanovllm.engine import llm_engine, model_runner
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.layers import attention
    from nanovllm.sampling_params import SamplingParams

    def load(model: Any, _: Any) -> None:
        found = random_weights(model.named_parameters())
        with torch.no_grad():
            for name, x in model.named_parameters():
                x.copy_(found[name])

    latest: list[float] = []
    ahead: dict[int, list[float]] = {}
    postprocess = Scheduler.postprocess

    def sample(self: Any, logits: Any, _: Any) -> Any:
        latest[:] = margins(logits)
        return logits.float().argmax(-1)

    def record(self: Any, seqs: Any, ids: Any, is_prefill: bool) -> None:
        before = [x.num_completion_tokens for x in seqs]
        postprocess(self, seqs, ids, is_prefill)
        for seq, count, margin in zip(seqs, before, latest, strict=True):
            if seq.num_completion_tokens > count:
                ahead.setdefault(seq.seq_id, []).append(margin)

    if not torch.cuda.is_available():
        patch.setattr(attention, "store_kvcache", engine_stubs.store_kvcache)
    patch.setattr(model_runner, "load_model", load)
    patch.setattr(model_runner.Sampler, "forward", sample)
    patch.setattr(Scheduler, "postprocess", record)
    patch.setattr(llm_engine, "AutoTokenizer", SimpleNamespace(from_pretrained=Tokenizer))
    llm = llm_engine.LLMEngine(
        folder(path, "qwen3"),
        max_num_batched_tokens=512,
        max_num_seqs=8,
        max_model_len=512,
        enforce_eager=eager,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = [x["token_ids"] for x in llm.generate(prompts(), params, use_tqdm=False)]
    atexit.unregister(llm.exit)
    llm.exit()
    return tokens, [ahead[n] for n in sorted(ahead)]

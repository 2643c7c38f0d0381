"""SGLang with random weights: `python -m helpers.engines.sglang_program '{"model": FOLDER, ...}'`.

Its ModelRunner, its batches and its pools, without the processes of a server, as its own benchmark
of one batch has them. The last line that is printed is JSON: the tokens and the backend's class.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from typing import Any

ABSENT = (
    "IPython PIL aiohttp anthropic blake3 compressed_tensors cv2 deep_gemm fastapi flashinfer "
    "gguf httpcore httpcore2 httpx httpx2 lark llguidance mistral_common numba openai "
    "openai_harmony orjson outlines partial_json_parser prometheus_client pybase64 "
    "sentencepiece setproctitle sgl_kernel starlette tiktoken torchaudio torchvision triton "
    "tvm_ffi uvicorn uvloop xgrammar"
).split()
_DEFAULTS = {
    "backend": "cupyattn",
    "dtype": "float32",
    "cache": "auto",
    "device": "cpu",
    "page_size": 1,
    "cut": 20,
    "max_tokens": 12,
    "graphs": False,
    "memory": 0.5,
    "length": 512,
    "room": 4096,
}


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Tokens of prompts. Prompts longer than `cut` are read in two parts, the second after what
    the first left in the cache; the last prompt is read beside a step of the others."""
    from helpers.engines import absent
    from helpers.engines.measured import measured

    options: Any = _DEFAULTS | given
    os.environ.update(HF_HUB_OFFLINE="1", SGLANG_USE_CPU_ENGINE="0")
    absent.install(*ABSENT)
    stand_in(options["device"])
    natively()
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    one_batch.get_tokenizer = lambda *_, **__: None
    args = ServerArgs(
        model_path=options["model"],
        skip_tokenizer_init=True,
        attention_backend=options["backend"],
        device=options["device"],
        dtype=options["dtype"],
        kv_cache_dtype=options["cache"],
        page_size=options["page_size"],
        disable_cuda_graph=not options["graphs"],
        max_total_tokens=options["room"],
        max_running_requests=16,
        context_length=options["length"],
        mem_fraction_static=options["memory"],
        sampling_backend="pytorch",
        **options.get("more", {}),
    )
    args.resolve_once()
    ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    tokens, said = measured(lambda: _generate(one_batch, runner, options), options)
    backend = runner.torch_runner.attn_backend
    return {"tokens": tokens, "backends": [type(backend).__name__], **said}


def _generate(one_batch: Any, runner: Any, options: Any) -> list[list[int]]:
    runner.clear()
    prompts, cut, count = options["prompts"], options["cut"], options["max_tokens"]
    requests = [_request(n, x[:cut]) for n, x in enumerate(prompts[:-1])]
    runner.extend([x for x, prompt in zip(requests, prompts, strict=False) if len(prompt) > cut])
    for request, prompt in zip(requests, prompts, strict=False):
        if len(prompt) > cut:
            request.full_untruncated_fill_ids.extend(prompt[cut:])
            request.prefix_len = cut
            request.extend_end = len(prompt)
    ids, _, batch = runner.extend(requests)

    def keep(ids: Any) -> Any:
        for request, x in zip(batch.reqs, ids.tolist(), strict=True):
            request.output_ids.append(x)
        return ids

    keep(ids)
    for _ in range(count // 2):
        ids = keep(runner.decode(ids, batch)[0])
    ids, batch = _mixed(one_batch, runner.torch_runner, prompts[-1], ids, batch)
    keep(ids)
    for _ in range(count - 1):
        ids = keep(runner.decode(ids, batch)[0])
    made = sorted(batch.reqs, key=lambda x: int(x.rid))
    return [list(x.output_ids[:count]) for x in made]


def _mixed(one_batch: Any, runner: Any, prompt: list[int], ids: Any, batch: Any) -> tuple[Any, Any]:
    """(next tokens, batch): a prompt beside the next step of a batch, in one."""
    import torch

    made = one_batch.ScheduleBatch.init_new(
        reqs=[_request(batch.batch_size(), prompt)],
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=batch.tree_cache,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=batch.spec_algorithm,
    )
    made.prepare_for_extend()
    first = made.input_ids if made.input_ids is not None else made.prefill_input_ids_cpu
    batch.input_ids = ids.to(torch.int64)
    batch.prepare_for_decode()
    made.mix_with_running(batch)
    made.input_ids = torch.cat([first.to(ids.device), ids.to(first.dtype)])
    made.prefill_input_ids_cpu = None
    with torch.no_grad():
        forward = one_batch.ForwardBatch.init_new(
            made, runner, return_hidden_states_before_norm=False
        )
        assert forward.forward_mode.name == "MIXED"
        logits = runner.forward(forward).logits_output
        return runner.sample(logits, forward), made


def _request(number: int, prompt: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", prompt),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True),
    )
    made.full_untruncated_fill_ids = made.origin_input_ids
    made.logprob_start_len, made.extend_end = -1, len(prompt)
    return made


def stand_in(device: str) -> None:
    """What modules ask of absent ones as they are imported."""
    _in_python()
    import triton.runtime

    if triton.__file__ == "absent":
        target = triton.runtime.driver.active.get_current_target.return_value
        target.backend = device
    import sgl_kernel.utils

    from helpers.engines import fa3

    if sgl_kernel.__file__ == "absent":
        # Graphs keep what they hand on, instead of a view that does not.
        sgl_kernel.weak_ref_tensor = lambda x: x
        sgl_kernel.utils.is_arch_support_pdl = lambda: device != "cpu"
    if fa3.is_there():
        import sgl_kernel.flash_attn

        sgl_kernel.flash_attn.flash_attn_with_kvcache = fa3.with_kvcache
        sgl_kernel.flash_attn.get_scheduler_metadata = lambda *_, **__: None


def natively() -> None:
    """Operators and writes to pools by torch, for lack of SGLang's compiled kernels; ahead of the
    modules that ask for either."""
    import sglang.kernels.jit.utils as jit
    from sglang.kernels.fused_op import BaseFusedOp

    def compile_nothing(*names: Any, **_: Any) -> Any:
        raise NotImplementedError(f"{names}: a kernel of SGLang's that is compiled as it runs")

    jit.load_jit = compile_nothing
    BaseFusedOp._resolve_forward_method = lambda self: self.forward_native
    from sglang.srt.layers.dual_gemm import DualGemm
    from sglang.srt.mem_cache import memory_pool

    DualGemm._select_mode = lambda *_: None
    memory_pool.can_use_store_cache = lambda *_: False


def _in_python() -> None:
    """What is asked of two packages, by Python's own."""
    import asyncio

    import orjson
    import uvloop

    if uvloop.__file__ == "absent":
        uvloop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy
    if orjson.__file__ == "absent":
        orjson.loads, orjson.dumps = json.loads, lambda x, **_: json.dumps(x).encode()


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))

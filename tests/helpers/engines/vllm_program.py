"""vLLM with random weights: `python -m helpers.engines.vllm_program '{"model": FOLDER, ...}'`.

Of vLLM's packages only Python files are needed. On the CPU a platform chooses attention backends as
vLLM's own one for CUDA does, and what compiled extensions would do is done by torch. The last line
that is printed is JSON: the tokens, the backend's class, and how many rows each step had.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

_ABSENT = (
    "PIL aiohttp anthropic blake3 compressed_tensors cpuinfo cv2 depyf fastapi gguf httpcore "
    "httpcore2 httpx httpx2 lark llguidance mcp mistral_common numba openai openai_harmony orjson "
    "outlines_core partial_json_parser prometheus_client pybase64 sentencepiece "
    "setproctitle starlette tiktoken torchaudio torchvision uvicorn uvloop xgrammar"
).split()
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": "cupyattn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
# Norms by torch, where a GPU would have compiled ones.
_NATIVE = {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}}
_DEFAULTS = {
    "backend": "CUSTOM",
    "by_name": False,
    "dtype": "float32",
    "cache": "auto",
    "device": "cpu",
    "eager": True,
    "block_size": 16,
    "chunk": 64,
    "length": 512,
    "seats": 4,
    "bytes": 1 << 26,
    "prefixes": True,
    "memory": 0.9,
    "runner": 1,
    "max_tokens": 12,
}


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Tokens of prompts. `by_name` passes the backend by attention_backend=, a word that vLLM reads
    after it has loaded its plug-ins; else it is in attention_config, which it reads before."""
    from helpers.engines import absent
    from helpers.engines.measured import measured

    options: Any = _DEFAULTS | given
    os.environ.update(_ENVIRONMENT)
    absent.install(*_ABSENT)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(options["runner"] - 1)
    if options["device"] == "cpu":
        os.environ["VLLM_CPU_CI_ENV"] = "1"
    # The kernels' stand-ins are made after the module that decides on extensions was imported.
    _platform(options["device"])
    _operators(options["device"])
    import vllm.model_executor.models.registry
    from vllm import LLM, SamplingParams

    vllm.model_executor.models.registry._run_in_subprocess = lambda function: function()
    steps = _recorded_steps()
    name = options["backend"]
    # vLLM's own kernels for prompts of latent attention are compiled ones.
    is_own = options["device"] != "cpu" and "MLA" in name
    prompts = {"mla_prefill_backend": "CPU"} if is_own else {}
    llm = LLM(
        options["model"],
        skip_tokenizer_init=True,
        dtype=options["dtype"],
        enforce_eager=options["eager"],
        kv_cache_dtype=options["cache"],
        block_size=options["block_size"],
        max_model_len=options["length"],
        max_num_batched_tokens=options["chunk"],
        max_num_seqs=options["seats"],
        kv_cache_memory_bytes=options["bytes"],
        gpu_memory_utilization=options["memory"],
        enable_prefix_caching=options["prefixes"],
        compilation_config={"custom_ops": ["none"], **options.get("compilation", {})},
        **({"attention_backend": name} if options["by_name"] else {}),
        attention_config={**({} if options["by_name"] else {"backend": name}), **prompts},
        **{**(_NATIVE if options["device"] != "cpu" else {}), **options.get("more", {})},
    )
    asked = [{"prompt_token_ids": x} for x in options["prompts"]]
    params = SamplingParams(
        temperature=0, max_tokens=options["max_tokens"], ignore_eos=True, detokenize=False
    )
    answers, said = measured(lambda: llm.generate(asked, params, use_tqdm=False), options)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {
        "tokens": [list(x.outputs[0].token_ids) for x in answers],
        "cached": [x.num_cached_tokens for x in answers],
        "backends": sorted({x.attn_backend.__name__ for x in layers.values()}),
        "steps": steps,
        **said,
    }


def _platform(device: str) -> None:
    """A platform of the CPU that takes the attention backend it is told, as that of CUDA does."""
    if device != "cpu":
        _extensions()
        return
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability

    class Host(CpuPlatform):  # type: ignore[misc]
        @classmethod
        def get_attn_backend_cls(
            cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
        ) -> str:
            found = selected_backend.get_class()
            asked = attn_selector_config._asdict() | {"device_capability": DeviceCapability(9, 0)}
            if reasons := set(found.validate_configuration(**asked)) - {"dtype not supported"}:
                raise ValueError(f"{selected_backend} is not valid: {reasons}")
            return f"{found.__module__}.{found.__qualname__}"

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
            before = scheduler.max_num_batched_tokens, cache.block_size, cache.enable_prefix_caching
            super().check_and_update_config(vllm_config)
            scheduler.max_num_batched_tokens, cache.block_size, cache.enable_prefix_caching = before
            scheduler.enable_chunked_prefill = True

        @classmethod
        def import_kernels(cls) -> None:
            pass

    # Ahead of the first question for it: plug-ins for platforms are loaded by that question.
    vllm.platforms.resolve_current_platform_cls_qualname()
    vllm.platforms._current_platform = Host()


def _extensions() -> None:
    """Modules of compiled extensions that are imported as a GPU is met. What is asked of the first
    is defined below; FlashAttention's functions, which only FLASH_ATTN calls, are ours where it is
    not there."""
    from cupyattn import flash_attn
    from helpers.engines import fa3

    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    made: Any = types.ModuleType("vllm.vllm_flash_attn")
    theirs = fa3.varlen if fa3.is_there() else flash_attn.flash_attn_varlen_func
    made.flash_attn_varlen_func = theirs
    made.get_scheduler_metadata = lambda *_, **__: None
    made.compile_flash_attn_varlen_func_from_specs = lambda *_, **__: None
    made.is_fa_version_supported = lambda version, *_: version == 3
    made.fa_version_unsupported_reason = lambda *_: None
    made.FA2_AVAILABLE, made.FA3_AVAILABLE, made.__path__ = False, True, []
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        sys.modules[name] = made


def _operators(device: str) -> None:
    """What compiled extensions and Triton kernels do, by torch."""
    import torch
    import vllm._custom_ops  # noqa: F401
    import vllm.v1.worker.block_table as block_table

    def define(name: str, signature: str, function: Any) -> None:
        space, _, title = name.partition("::")
        if hasattr(getattr(torch.ops, space), title):
            return
        library = torch.library.Library(space, "FRAGMENT")
        library.define(title + signature)
        library.impl(title, function, "CompositeExplicitAutograd")
        _kept.append(library)

    def write_latent(
        kv_c: Any,
        k_pe: Any,
        cache: Any,
        slots: Any,
        kind: str,
        scale: Any,
        skip_scale: bool = False,
    ) -> None:
        rows = torch.cat([kv_c, k_pe], -1)[: slots.shape[0]]
        if kind.startswith("fp8"):
            limited = (rows.float() / scale).clamp(-448, 448)
            rows = limited.to(torch.float8_e4m3fn).view(torch.uint8)
            cache = cache.view(torch.uint8)
        where = torch.where(slots >= 0, slots, 0)
        flat = cache.view(-1, cache.shape[-1])
        flat[where] = torch.where((slots >= 0)[:, None], rows.to(flat.dtype), flat[where])

    for kind in ("fp4", "fp8", "block_fp8"):
        define(f"_C::cutlass_scaled_mm_supports_{kind}", "(int x) -> bool", lambda x: False)
    define("_C::init_cpu_memory_env", "(int[] ids) -> ()", lambda ids: None)
    define("_C::greedy_argmax", "(Tensor x) -> Tensor", lambda x: x.argmax(-1))
    define(
        "_C_cache_ops::concat_and_cache_mla",
        "(Tensor a, Tensor b, Tensor(a!) c, Tensor s, str t, Tensor x, bool y=False) -> ()",
        write_latent,
    )
    if device != "cpu":
        _operators_of_cuda(define)
        return

    def slots(self: Any, count: int, starts: Any, positions: Any) -> None:
        table, made, size = self.block_table.gpu, self.slot_mapping.gpu, self.block_size
        made.fill_(-1)
        bounds = starts[: count + 1].tolist()
        for n in range(count):
            at = positions[bounds[n] : bounds[n + 1]].long()
            made[bounds[n] : bounds[n + 1]] = table[n, at // size].long() * size + at % size

    block_table.BlockTable.compute_slot_mapping = slots


_kept: list[Any] = []


def _operators_of_cuda(define: Any) -> None:
    """What a GPU's prompts of latent attention need besides."""
    import torch
    import vllm._custom_ops as operators
    import vllm.utils.torch_utils
    from vllm.v1.attention.ops import merge_attn_states
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash,
    )

    def gather(
        src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, token_to_seq: Any,
        num_tokens: int, kv_cache_dtype: str, scale: Any, seq_starts: Any = None,
    ) -> None:  # fmt: skip
        made = src_cache
        if kv_cache_dtype.startswith("fp8"):
            eight = src_cache.view(torch.uint8).view(torch.float8_e4m3fn)
            made = (eight.float() * scale).to(dst.dtype)
        operators.gather_mla_context_cache_cpu(
            src_cache=made, dst=dst[:num_tokens], block_table=block_table, starts=seq_starts,
            cu_seq_lens=cu_seq_lens,
        )  # fmt: skip

    def merge(
        output: Any, prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any, lse: Any = None,
        count: Any = None, scale: Any = None,
    ) -> None:  # fmt: skip
        plain = merge_attn_states._merge_attn_states_torch
        plain(output, prefix, prefix_lse, suffix, suffix_lse, lse, count, scale)

    def view(x: Any) -> Any:
        """Pinned memory as the GPU sees it."""
        if not x.numel():
            return torch.empty(x.shape, dtype=x.dtype, device="cuda")
        facts = dict(x.numpy().__array_interface__, version=2)
        shown = types.SimpleNamespace(__cuda_array_interface__=facts)
        return torch.as_tensor(shown, device="cuda")

    def silu_and_mul(out: Any, x: Any) -> None:
        a, b = x.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(a) * b)

    define("_C::get_cuda_view_from_cpu_tensor", "(Tensor x) -> Tensor", view)
    # Kept by name as layers are made; by custom_ops they run what torch has in its place.
    define("_C::silu_and_mul", "(Tensor(a!) out, Tensor x) -> ()", silu_and_mul)
    operators.reshape_and_cache_flash = triton_reshape_and_cache_flash
    # Graphs keep what they return, instead of a view that does not.
    vllm.utils.torch_utils.weak_ref_tensor = lambda x: x
    operators.gather_and_maybe_dequant_cache = gather
    operators.merge_attn_states = merge


def _recorded_steps() -> list[list[int]]:
    """A list that gets the rows of each request of each step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, found = Scheduler.schedule, []

    def recorded(self: Any, *args: Any, **named: Any) -> Any:
        made = schedule(self, *args, **named)
        found.append(sorted(made.num_scheduled_tokens.values()))
        return made

    Scheduler.schedule = recorded
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))

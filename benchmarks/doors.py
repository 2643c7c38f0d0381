"""What the doors cost: torch's operators, XLA's calls, transformers' models.

    python -m benchmarks.doors --out results/doors
    python -m benchmarks.doors --only jax --small        # also on a CPU, to see that it runs

- torch: host time of an asynchronous call, through torch.ops.cupyattn and directly.
- jax: time of one of many calls in a compiled function, and of the same call outside of jit.
- prefill, decode: tokens/s of a random Llama of transformers, by attn_implementation; decode steps
  follow a prompt, in a dynamic cache. Padded prompts are of four lengths, in one batch.
- continuous: tokens/s of `generate_batch`, by attn_implementation; the alias takes transformers'
  own path of flash-attn.

Implementations take turns in one process. An implementation that cannot run has its error instead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import machine
from .timing import describe, measure_host

# name: (hidden size, layers, query heads, KV heads, head dim, MLP)
LLAMA, LLAMA_SMALL = (1024, 8, 16, 8, 128, 3072), (64, 2, 4, 2, 16, 96)
VOCABULARY = 2048
OURS, ALIAS = "cupyattn", "cupyattn_flash_attention_3"
IMPLEMENTATIONS = OURS, "sdpa", "flash_attention_3"
PAGED = ALIAS, OURS, "sdpa"
CHAIN = 64


def torch_overhead(device: str, small: bool) -> dict[str, Any]:
    """Host µs of each call by its operator and directly."""
    import torch

    import cupyattn.integrations.torch  # noqa: F401
    from cupyattn import flash_attn, single_decode_with_kv_cache

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    make = lambda *shape: torch.randn(shape, dtype=dtype, device=device)  # noqa: E731
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    q, k, v = make(1, 16, 128), make(64, 8, 128), make(64, 8, 128)
    pages, batch = (make(8, 16, 8, 128), make(8, 16, 8, 128)), make(4, 1, 16, 128)
    table, lens = ints(*range(8)).view(4, 2), ints(20, 32, 7, 1)
    ops, rounds = torch.ops.cupyattn, 2 if small else 9
    kvcache = {"cache_seqlens": lens, "block_table": table, "causal": True}
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "single_decode_with_kv_cache": (
            lambda: single_decode_with_kv_cache(q[0], k, v),
            lambda: ops.single_decode_with_kv_cache.default(q[0], k, v),
        ),
        "flash_attn_func": (
            lambda: flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True),
            lambda: ops.flash_attn_func.default(q[None], k[None], v[None], causal=True),
        ),
        "flash_attn_with_kvcache": (
            lambda: flash_attn.flash_attn_with_kvcache(batch, *pages, **kvcache),
            lambda: ops.flash_attn_with_kvcache.default(batch, *pages, **kvcache),
        ),
    }
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    result: dict[str, Any] = {}
    with torch.no_grad():
        for name, calls in pairs.items():
            timings = measure_host(calls, wait, wait, rounds)
            errors = [x.error for x in timings if x.error]
            if errors:
                result[name] = {"error": errors[0]}
                continue
            direct, operator = (x.percentile(50) for x in timings)
            result[name] = {
                "direct_us": direct,
                "op_us": operator,
                "overhead_us": operator - direct,
            }
    return result


def jax_overhead(device: str, small: bool) -> dict[str, Any]:
    """µs of a call inside of jit, of as many calls as a model has layers, and outside."""
    import jax

    import cupyattn
    import cupyattn.integrations.jax as door

    count = 4 if small else CHAIN
    dtype = "float32" if device == "cpu" else "bfloat16"
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 1, 16, 128), dtype)
    k, v = (jax.random.normal(key, (1, 64, 8, 128), dtype) for key in keys[1:])

    def chain(q: Any) -> Any:
        for _ in range(count):
            q = door.dot_product_attention(q, k, v)
        return q

    def plain(q: Any) -> Any:
        for _ in range(count):
            q = q * 1.0001 + k[:, :1, :1]
        return q

    def eager() -> None:
        for _ in range(count):
            built = cupyattn.dot_product_attention(q, k, v)
        jax.block_until_ready(built)

    ours, empty = jax.jit(chain), jax.jit(plain)
    calls = {
        "jit_us": lambda: jax.block_until_ready(ours(q)),
        "without_us": lambda: jax.block_until_ready(empty(q)),
        "eager_us": eager,
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(3 if small else 30):
        for name in random.sample([*calls], len(calls)):
            begin = time.perf_counter()
            calls[name]()
            if turn > 1:
                samples[name].append((time.perf_counter() - begin) * 1e6 / count)
    return {name: statistics.median(x) for name, x in samples.items()} | {"calls": count}


# --- transformers ---


def llama(name: str, device: str, small: bool) -> Any:
    """A Llama with random weights, the same for each name."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import cupyattn.integrations.transformers as door

    door.register()
    size, layers, heads, kv_heads, dim, mlp = LLAMA_SMALL if small else LLAMA
    config = LlamaConfig(
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        intermediate_size=mlp,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        attn_implementation=name,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return LlamaForCausalLM(config).to(device, dtype).eval()


def in_turns(
    makers: dict[str, Callable[[], Callable[[], None]]], tokens: int, rounds: int
) -> dict[str, Any]:
    """tokens/s of each call, and its ratio to sdpa's; calls are visited in random order."""
    result: dict[str, Any] = {}
    calls: dict[str, Callable[[], None]] = {}
    for name, make in makers.items():
        try:
            calls[name] = make()
            calls[name]()
            calls[name]()
        except Exception as error:
            calls.pop(name, None)
            result[name] = {"error": describe(error)}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample([*calls], len(calls)):
            begin = time.perf_counter()
            calls[name]()
            samples[name].append(time.perf_counter() - begin)
    for name, x in samples.items():
        result[name] = {"tokens_per_s": tokens / statistics.median(x), "seconds": sorted(x)}
    if "sdpa" in samples:
        for name in samples:
            result[name]["to_sdpa"] = result[name]["tokens_per_s"] / result["sdpa"]["tokens_per_s"]
    return result


def prefill(device: str, small: bool) -> dict[str, Any]:
    """Prompts of 4k tokens: one, four, and four that are padded on their left."""
    import torch

    length = 32 if small else 4096
    result = {}
    for count, is_padded in ((1, False), (4, False), (4, True)):
        ids = torch.randint(0, VOCABULARY, (count, length), device=device)
        mask, tokens = None, count * length
        if is_padded:
            lens = length * torch.arange(4, 8, device=device) // 7
            mask = torch.arange(length, device=device)[None] >= length - lens[:, None]
            mask, tokens = mask.long(), int(lens.sum())

        def make(name: str, ids: Any = ids, mask: Any = mask) -> Callable[[], None]:
            model = llama(name, device, small).model

            def call() -> None:
                with torch.no_grad():
                    built = model(input_ids=ids, attention_mask=mask, use_cache=False)
                    built.last_hidden_state[0, -1, 0].item()

            return call

        makers = {name: lambda name=name: make(name) for name in IMPLEMENTATIONS}
        case = f"{count}x{length}{' padded' if is_padded else ''}"
        result[case] = in_turns(makers, tokens, 2 if small else 9)
    return result


def decode(device: str, small: bool) -> dict[str, Any]:
    """Steps of decoding behind a prompt, in a dynamic cache."""
    import torch
    from transformers import DynamicCache

    result = {}
    for count, length in ((1, 1024), (32, 1024)):
        length, steps = (8, 2) if small else (length, 32)
        ids = torch.randint(0, VOCABULARY, (count, length), device=device)

        def make(name: str, ids: Any = ids, steps: int = steps) -> Callable[[], None]:
            model = llama(name, device, small)
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

            def call() -> None:
                with torch.no_grad():
                    token = ids[:, :1]
                    for _ in range(steps):
                        built = model(input_ids=token, past_key_values=cache)
                        token = built.logits[:, -1].argmax(-1, keepdim=True)
                    token[0, 0].item()
                cache.crop(-steps)

            return call

        makers = {name: lambda name=name: make(name) for name in IMPLEMENTATIONS}
        result[f"{count}x{length}"] = in_turns(makers, count * steps, 2 if small else 5)
    return result


def continuous(device: str, small: bool) -> dict[str, Any]:
    """Continuous batching of requests that are mostly decoded."""
    import torch
    from transformers import GenerationConfig

    count, length, new = (2, 8, 3) if small else (32, 256, 64)
    prompts = torch.randint(3, VOCABULARY, (count, length)).tolist()
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def make(name: str) -> Callable[[], None]:
        model = llama(name, device, small)

        def call() -> None:
            built = model.generate_batch(prompts, generation_config=config, progress_bar=False)
            got = [len(x.generated_tokens) for x in built.values()]
            if got != [new] * count:
                raise RuntimeError(f"{name}: {got} tokens instead of {new} each")

        return call

    makers = {name: lambda name=name: make(name) for name in PAGED}
    return in_turns(makers, count * new, 1 if small else 2)


PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "torch": torch_overhead,
    "jax": jax_overhead,
    "prefill": prefill,
    "decode": decode,
    "continuous": continuous,
}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of doors.json")
    parser.add_argument("--only", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="tiny shapes, few repeats")
    parser.add_argument("--seconds", type=float, default=300, help="no part begins later")
    parser.add_argument("--commit", help="written into the result")
    args = parser.parse_args()
    device, begin = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    result: dict[str, Any] = {"machine": machine.header(args.commit)}
    for name in args.only.split(","):
        if time.perf_counter() - begin > args.seconds:
            result[name] = {"skipped": f"{args.seconds} s are over"}
            continue
        try:
            result[name] = PARTS[name](device, args.small)
        except Exception as error:
            result[name] = {"error": describe(error)}
        print(name, json.dumps(result[name], indent=1), flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "doors.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a batch asks for, in words for people."""

from __future__ import annotations

from collections import Counter

from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ...schedule.batch import BatchRequests

# More kinds of lengths than this are not listed one by one.
_MAX_KINDS = 4
_OPTIONS = {"ROPE_LLAMA": "RoPE inside", "ALIBI": "ALiBi"}


def count(number: int, what: str) -> str:
    """Example: "1 request", "1,024 requests"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def problem_words(spec: AttentionSpec, problem: AttentionProblem) -> str:
    """What kernels are chosen for, besides lengths."""
    q, kv = spec.dtype_q, spec.dtype_kv
    dims = spec.head_dim_qk, spec.head_dim_vo
    result = [str(q) if q is kv else f"{q} over keys of {kv}"]
    if spec.dtype_o is not q:
        result.append(f"{spec.dtype_o} out")
    if problem.latent:
        rope = dims[0] - dims[1]
        result += [count(spec.num_qo_heads, "head"), f"latent keys of {dims[1]} and {rope} columns"]
    else:
        heads = count(spec.num_qo_heads, "query head")
        result.append(f"{heads} over {count(spec.num_kv_heads, 'key head')}")
        of_dims = str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
        result.append(f"head dim {of_dims}")
    size = spec.page_size
    result.append(f"pages of {count(size, 'token')}" if size else "ragged keys")
    if problem.sparse:
        result.append("a list of keys for each row")
    return ", ".join([*result, *_options(spec, problem)])


def _options(spec: AttentionSpec, problem: AttentionProblem) -> list[str]:
    """What changes which keys are seen, or their logits."""
    result = ["causal"] if spec.causal else []
    if spec.window_left >= 0:
        result.append(f"a window of {spec.window_left:,} keys to the left")
    if spec.right_limit > 0:
        result.append(f"a window of {spec.right_limit:,} keys to the right")
    if problem.custom_mask:
        result.append("a mask")
    if problem.soft_cap:
        result.append("a soft cap")
    if problem.pos_encoding in _OPTIONS:
        result.append(_OPTIONS[problem.pos_encoding])
    if problem.transforms_logits:
        own = "biases of near keys" if problem.adds_near_biases else "logits of the caller's own"
        result.append(own)
    if problem.prescale_logits:
        result.append("scales by head")
    if problem.skips_tiles:
        result.append("leave to skip tiles that weigh next to nothing")
    if problem.key_scales:
        result.append(f"scales of keys by {problem.key_scales}")
    if not problem.aligned:
        result.append("rows off 16-byte boundaries")
    return result


def batch_words(requests: BatchRequests) -> str:
    """How many requests there are, and their lengths."""
    kinds = Counter(zip(requests.qo_len.tolist(), requests.kv_len.tolist(), strict=True))
    total = count(requests.qo_len.size, "request")
    if len(kinds) > _MAX_KINDS:
        rows, keys = (_range(sorted({kind[i] for kind in kinds})) for i in (0, 1))
        return f"{total} of {rows} rows over {keys} keys"
    listed = [
        f"{number:,} x {count(rows, 'row')} over {count(keys, 'key')}"
        for (rows, keys), number in kinds.items()
    ]
    return f"{total}: {'; '.join(listed)}" if len(listed) > 1 else listed[0] if listed else total


def _range(numbers: list[int]) -> str:
    minimum, maximum = numbers[0], numbers[-1]
    return f"{minimum:,}" if minimum == maximum else f"{minimum:,} to {maximum:,}"

"""What is measured: the list of all cases, and how to choose from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from .batch.case import BatchCase
from .batch.cases import BATCH_CASES
from .case import Case
from .merge.case import MERGE_CASES, MergeCase

AnyCase = Case | BatchCase | MergeCase

OPS = (
    *("prefill", "decode", "host", "batch_decode", "append", "verify", "ragged", "cascade"),
    *("mixed", "mla", "host_batch", "merge", "host_merge"),
)

_FA2 = "flashinfer_fa2"
_FA3 = "fa3"


def _prefill(name: str, batch: int, length: int, **more: object) -> Case:
    options: dict[str, object] = {"causal": True, "goals": ((_FA2, 1.0),)}
    return Case(name, "prefill", "prefill", length, length, batch, **(options | more))  # type: ignore[arg-type]


def _option(name: str, factor: float, **more: object) -> Case:
    return _prefill(f"4x4k_{name}", 4, 4096, goals=((_FA2, factor),) if factor else (), **more)


def _decode(label: str, kv_len: int) -> tuple[Case, Case]:
    fp8_goals = ((_FA2, 1.3),)
    bf16 = Case(f"kv{label}", "decode", "decode", 1, kv_len, goals=((_FA2, 1.0), (_FA3, 0.95)))
    fp8 = replace(bf16, name=f"kv{label}_fp8", kv_dtype="float8_e4m3fn", goals=fp8_goals)
    return bf16, fp8


def _append(q_len: int, label: str, kv_len: int) -> Case:
    return Case(f"append_q{q_len}_kv{label}", "decode", "prefill", q_len, kv_len, causal=True)


def _host(api: str, framework: str, out: bool) -> Case:
    goal = {"torch": 12.0, "cupy": 10.0}[framework] if out else None
    q_len = 1 if api == "decode" else 128
    name = f"host_{api}_{framework}_{'out' if out else 'alloc'}"
    return Case(
        name, "host", api, q_len, 128, causal=api == "prefill", framework=framework, out=out,
        host_goal_us=goal,
    )  # fmt: skip


_DECODE_LENGTHS = (("4k", 4096), ("32k", 32768), ("128k", 131072))

# Most wanted first: a run that spends its budget loses the end of this list.
CASES: tuple[AnyCase, ...] = (
    _prefill("4x4k", 4, 4096, goals=((_FA2, 1.0), (_FA3, 0.97))),
    _prefill("1x16k", 1, 16384, goals=((_FA2, 1.0), (_FA3, 0.97))),
    _prefill("16x1k", 16, 1024, goals=((_FA3, 1.0),)),
    _prefill("32x512", 32, 512, goals=((_FA3, 1.05),)),
    *(_decode(label, n)[0] for label, n in _DECODE_LENGTHS),
    *(_decode(label, n)[1] for label, n in _DECODE_LENGTHS),
    _option("mask_bits", 4.0, causal=False, mask="packed"),
    _option("alibi", 2.0, pos_encoding_mode="ALIBI"),
    _option("rope", 1.0, pos_encoding_mode="ROPE_LLAMA"),
    _option("softcap", 1.0, logits_soft_cap=30.0),
    _option("window1023", 1.0, window_left=1023),
    _host("decode", "torch", True),
    _host("decode", "cupy", True),
    _host("prefill", "torch", True),
    _host("prefill", "cupy", True),
    _prefill("1x16k_d64", 1, 16384, head_dim_qk=64, head_dim_vo=64, goals=((_FA2, 0.95),)),
    _prefill(
        "4x4k_d256", 4, 4096, num_qo_heads=16, num_kv_heads=4, head_dim_qk=256, head_dim_vo=256,
        goals=((_FA2, 0.95), (_FA3, 0.93)),
    ),
    _prefill(
        "1x16k_d64_mha", 1, 16384, num_kv_heads=32, head_dim_qk=64, head_dim_vo=64,
        goals=((_FA2, 0.95), (_FA3, 0.95)),
    ),
    *(_append(q, label, n) for q in (16, 64, 128) for label, n in (("8k", 8192), ("32k", 32768))),
    _prefill("1x16k_full", 1, 16384, causal=False, goals=((_FA3, 0.98),)),
    _prefill(
        "1x4k_192_128", 1, 4096, num_qo_heads=128, num_kv_heads=128, head_dim_qk=192,
        goals=((_FA3, 0.93),),
    ),
    _option("mask_bool", 0.0, causal=False, mask="bool"),
    _host("decode", "torch", False),
    _host("decode", "cupy", False),
    _host("prefill", "torch", False),
    _host("prefill", "cupy", False),
    *BATCH_CASES,
    *MERGE_CASES,
)  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def select(ops: Sequence[str] = OPS, patterns: Sequence[str] = ("*",)) -> list[AnyCase]:
    """Cases of the given ops whose name matches any of the globs, in the order of CASES."""
    return [
        case
        for case in CASES
        if case.op in ops and any(fnmatchcase(case.name, pattern) for pattern in patterns)
    ]

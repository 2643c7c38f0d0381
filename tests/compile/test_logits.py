"""Compile gates of user-written logits: kernels of both tiers build, and none touches local memory.

Which expressions a kernel gets is the caller's choice, so these are samples: one that every logit
pays for, one of many operations, and masks. The slow ones are all architectures and head dims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from cupyattn import jit
from cupyattn.core import dtypes, logits
from cupyattn.core.device import ARCHS
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.attention import scan_mask
from cupyattn.launch.instances import SHARED_BYTES
from cupyattn.launch.tiles.mixed_sm80 import mixed_config
from cupyattn.launch.tiles.row_classes import DECODE, LARGE, SMALL
from cupyattn.launch.tiles.select import tile_config

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

_ALIBI = "logit + slopes[head] * (kv_idx - q_idx)"
_LONG = (
    "where(kv_idx % 16 == 0, c * tanh((logit + rel[head, kv_idx // 4]) / c), "
    "max(logit, -5) - abs(kv_idx - q_idx) * 0.1) + exp2(-logit) * slopes[head]"
)
_DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] || kv_idx < w"
_BY_HEAD = "kv_idx > q_idx - w * (head + 1)"


def _make(transform: str | None, mask: str | None) -> logits.LogitsExpression:
    named = re.findall(r"[a-z_]+", f"{transform} {mask}")
    arrays = (("slopes", dtypes.float32, 1), ("rel", dtypes.bfloat16, 2), ("doc", dtypes.int32, 2))
    numbers = (("c", dtypes.float32, 30.0), ("w", dtypes.int32, 4))
    return logits.make(
        transform,
        mask,
        tuple(x for x in arrays if x[0] in named),
        tuple(x for x in numbers if x[0] in named),
    )


EXPRESSIONS = {
    "alibi": _make(_ALIBI, None),
    "long": _make(_LONG, None),
    "documents": _make(None, _DOCUMENTS),
    "by head": _make(None, _BY_HEAD),
    "both": _make(_LONG, _DOCUMENTS),
}


def _problem(name: str, dim: int, **facts: Any) -> AttentionProblem:
    expression = EXPRESSIONS[name]
    form = {"custom_mask": True, "mask_form": "expression"} if expression.mask else {}
    bf16 = dtypes.bfloat16
    return AttentionProblem(
        *(bf16, facts.pop("dtype_kv", bf16), bf16, dim, dim), logits=expression.compiled,
        **form, **facts,
    )  # fmt: skip


def _instances(
    problem: AttentionProblem, rows: str, arch: str, page_size: int = 0
) -> Iterator[tuple[str, jit.Config]]:
    """The kernel that serves a row class, and the scan ahead of it."""
    shared = SHARED_BYTES[arch]
    tiles = tile_config(problem, rows, shared, page_size > 0, arch, page_size)
    yield tiles.name, tiles.config
    scan = scan_mask.config(tiles)
    if scan is not None:
        yield "scan_mask", scan


def _check(instances: Iterator[tuple[str, jit.Config]], arch: str) -> None:
    for name, config in instances:
        built = jit.build(name, config, arch)
        ptxas = built.info.ptxas
        assert not ptxas.spill_store_bytes + ptxas.spill_load_bytes + ptxas.stack_bytes, config
        assert not ptxas.warnings, (config, ptxas.warnings)


@pytest.mark.parametrize(
    ("name", "rows", "arch"),
    [
        ("alibi", LARGE, "sm_90a"),
        ("by head", LARGE, "sm_90a"),
        ("both", DECODE, "sm_80"),
    ],
)
def test_kernels_of_the_common_head_dim(name: str, rows: str, arch: str) -> None:
    _check(_instances(_problem(name, 128), rows, arch), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_architecture_and_head_dim(name: str, dim: int, arch: str) -> None:
    for page_size in (0, 16):
        problem = _problem(name, dim, paged=page_size > 0)
        for rows in (LARGE, SMALL, DECODE):
            _check(_instances(problem, rows, arch, page_size), arch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "long"])
def test_mixed_kernels_and_fp8_keys(name: str) -> None:
    arch = "sm_90a"
    for dim in (64, 128):
        mixed = mixed_config(_problem(name, dim, paged=True), SMALL, DECODE, SHARED_BYTES[arch])
        assert mixed is not None
        _check(iter([(mixed.name, mixed.config)]), arch)
        problem = _problem(name, dim, dtype_kv=dtypes.float8_e4m3fn, paged=True)
        for rows in (LARGE, DECODE):
            _check(_instances(problem, rows, arch, 16), arch)

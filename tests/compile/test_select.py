"""Kernels of selections stay in registers, on every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.core.selection import SelectProblem
from cupyattn.launch.ops import select

_E4M3, _BF16 = dtypes.float8_e4m3fn, dtypes.bfloat16

M3 = SelectProblem(_BF16, _BF16, 128, 4, num_groups=4, block=128, topk=16, last=1)
DSA = replace(
    M3,
    dtype_q=_E4M3,
    dtype_k=_E4M3,
    row_scales="pages",
    num_heads=64,
    num_groups=1,
    score="relu_sum",
    dtype_w=dtypes.float32,
    block=1,
    topk=2048,
)
PROBLEMS = (
    M3,
    replace(M3, dtype_k=_E4M3, row_scales="rows"),
    replace(M3, head_dim=256, num_heads=16, num_groups=1),
    replace(M3, num_heads=24, num_groups=3, block=8),
    DSA,
    replace(DSA, num_heads=32, dtype_q=dtypes.float16, dtype_w=dtypes.float16),
    replace(M3, num_groups=1, score="relu_sum", block=4, ratio=4, tail=True),
)


def _configs(arch: str) -> Iterator[jit.Config]:
    for problem in PROBLEMS:
        assert select.refusal(problem) is None
        for tokens in (1, 4, 100):
            for shares in (False, True):
                yield select.choose_tiles(problem, tokens, shares, arch).config


@pytest.mark.parametrize(
    "arch",
    ["sm_90a", "sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_86", "sm_120a"))],
)
def test_no_spills(arch: str) -> None:
    for config in dict.fromkeys(_configs(arch)):
        report = jit.build("select_scores", config, arch).info.ptxas
        assert not report.stack_bytes and not report.spill_store_bytes, (config, report)
        assert not report.warnings and report.smem_bytes <= 48 << 10

"""Kernels of selections stay in registers, on every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.core.selection import SelectProblem
from cupyattn.launch.ops import select, select_softmax

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
    replace(M3, num_heads=16, num_groups=16, block=8),
    replace(M3, num_heads=16, score="softmax", block=64),
    replace(DSA, num_heads=48, score="softmax", block=4),
    replace(M3, num_heads=32, num_groups=4, candidate_block=128, group_candidates=True),
)


def _configs(arch: str) -> Iterator[jit.Config]:
    for problem in PROBLEMS:
        assert select.refusal(problem) is None
        # Every number of tiles that a call may have.
        for tokens, shares in product((1, 2, 4, 8, 16, 100), (False, True)):
            yield select.choose_tiles(select.scored(problem), tokens, shares, arch).config


@pytest.mark.parametrize(
    "arch",
    ["sm_90a", "sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_86", "sm_120a"))],
)
def test_no_spills(arch: str) -> None:
    for config in dict.fromkeys(_configs(arch)):
        report = jit.build("select_scores", config, arch).info.ptxas
        assert not report.stack_bytes and not report.spill_store_bytes, (config, report)
        assert not report.warnings and report.smem_bytes <= 48 << 10


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_shares_have_registers(arch: str) -> None:
    for dtype in (None, dtypes.bfloat16):
        report = jit.build("select_softmax", select_softmax.config(dtype), arch).info.ptxas
        assert not report.stack_bytes and not report.warnings, report

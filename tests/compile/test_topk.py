"""Choices of the greatest scores stay in registers, on every architecture."""

from __future__ import annotations

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.launch.ops import select_topk


@pytest.mark.parametrize(
    "arch",
    ["sm_90a", "sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_86", "sm_120a"))],
)
def test_no_spills(arch: str) -> None:
    for keys, threads in ((0, 512), (0, 1024), (8, 512), (32, 512)):
        for kind in ({}, {"has_candidates": True}, {"is_given": True, "is_aligned": False}):
            config = select_topk.config(dtypes.float32, keys=keys, threads=threads, **kind)
            report = jit.build("select_topk", config, arch).info.ptxas
            assert not report.stack_bytes and not report.spill_store_bytes, (config, report)
            assert not report.warnings

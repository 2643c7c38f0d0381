"""Kernels of eight bits stay in registers, on every architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.jit import compiler
from cupyattn.launch.ops import find_mean, quantize

_E4M3, _BF16 = dtypes.float8_e4m3fn, dtypes.bfloat16


def _configs() -> Iterator[jit.Config]:
    yield from quantize.configs(_BF16, _E4M3, 128)
    for head_dim, block_size, is_aligned in ((128, 128, True), (64, 64, True), (256, 64, False)):
        tile = quantize.choose_tile(quantize.lanes_of(head_dim), block_size, 0)
        for first in (dtypes.int8, _E4M3):
            yield quantize.config(
                dtypes.float16,
                (first, first, _E4M3),
                is_aligned=is_aligned,
                tile=tile,
                dtype_weight=dtypes.float32,
                dtype_table=dtypes.float32 if is_aligned else None,
                has_steps=not is_aligned,
                hadamard=True,
                has_mean=True,
                finds=True,
                finds_runs=True,
                copies=is_aligned,
            )
            yield quantize.config(
                dtypes.float16,
                (first, first, _E4M3),
                is_aligned=is_aligned,
                tile=(256, quantize.lanes_of(head_dim), 4),
                hadamard=True,
                has_mean=True,
                measures=True,
            )


@pytest.mark.parametrize(
    "arch",
    ["sm_90a", "sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_86", "sm_120a"))],
)
def test_no_spills(arch: str) -> None:
    means = (
        find_mean.config(_BF16, lanes, is_aligned=a, hadamard=True, divides=divides)
        for lanes, a, divides in ((8, True, False), (32, False, False), (16, True, True))
    )
    every = [("quantize", x) for x in _configs()] + [("find_mean", x) for x in means]
    for name, config in every:
        report: compiler.PtxasReport = jit.build(name, config, arch).info.ptxas
        assert not report.stack_bytes and not report.spill_store_bytes, (config, report)
        assert not report.warnings

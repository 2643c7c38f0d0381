"""Compile gate of wide_sm90: no spills, no serialised wgmma, in either order of its products."""

from __future__ import annotations

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.launch.tiles import wide_sm90

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


@pytest.mark.parametrize(
    ("dtype", "dtype_o", "overlaps"),
    [
        (dtypes.bfloat16, dtypes.bfloat16, True),
        (dtypes.float16, dtypes.float16, False),
        pytest.param(dtypes.bfloat16, dtypes.float32, False, marks=pytest.mark.slow),
        pytest.param(dtypes.float16, dtypes.float32, True, marks=pytest.mark.slow),
    ],
)
def test_registers_suffice(dtype: dtypes.DType, dtype_o: dtypes.DType, overlaps: bool) -> None:
    tiles = wide_sm90.config(dtype, dtype_o, overlaps=overlaps)
    report = jit.build("wide_sm90", tiles.config, "sm_90a").info.ptxas
    assert not report.spills and not report.stack_bytes
    assert report.warnings == ()
    assert tiles.shared_bytes <= 227 * 1024

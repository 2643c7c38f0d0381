"""Compile gate of wide_sm90: no spills, no serialised wgmma, in either order of its products."""

from __future__ import annotations

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.launch.tiles import wide_sm90

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


LATENT, BF16, FP16 = wide_sm90.LATENT, dtypes.bfloat16, dtypes.float16
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "dtype_o", "head_dims", "options"),
    [
        (BF16, BF16, LATENT, {"overlaps": True}),
        (FP16, FP16, LATENT, {"overlaps": False}),
        (BF16, BF16, LATENT, {"overlaps": True, "sparse": True}),
        (BF16, BF16, (512, 512), {"overlaps": True}),
        (BF16, BF16, (256, 512), {"overlaps": False, "paged": False}),
        pytest.param(BF16, dtypes.float32, LATENT, {"overlaps": False}, marks=SLOW),
        pytest.param(FP16, dtypes.float32, LATENT, {"overlaps": True}, marks=SLOW),
        pytest.param(FP16, BF16, LATENT, {"overlaps": False, "sparse": True}, marks=SLOW),
        pytest.param(FP16, FP16, (512, 512), {"overlaps": False, "paged": False}, marks=SLOW),
        pytest.param(FP16, FP16, (256, 512), {"overlaps": True}, marks=SLOW),
    ],
)
def test_registers_suffice(
    dtype: dtypes.DType,
    dtype_o: dtypes.DType,
    head_dims: tuple[int, int],
    options: dict[str, bool],
) -> None:
    tiles = wide_sm90.config(dtype, dtype_o, head_dims, **options)
    report = jit.build("wide_sm90", tiles.config, "sm_90a").info.ptxas
    assert not report.spills and not report.stack_bytes
    assert report.warnings == ()
    assert tiles.shared_bytes <= 227 * 1024

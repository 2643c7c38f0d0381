"""trtllm_fmha_v2_prefill over chunks and over pages of K and V apart: kernels on the host."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.batches import WORKSPACE
from helpers.fmha_calls import LAYOUTS, Chunked

from . import gpu


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [0, 24, 64])
def test_chunks_and_pages_apart(layout: str, chunk: int) -> None:
    case = Chunked(chunk, layout, chunk)
    with gpu.plugged_in(seed=chunk % 3) as emulated:
        got, lse = case(WORKSPACE.copy(), return_lse=True)
        out, stats = case(WORKSPACE.copy(), save_softmax_stats=True)
    assert chunk or emulated.has_launched("prefill_sm90")
    o, want = case.expected()
    np.testing.assert_allclose(got, o, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse, want, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(out, got)
    found = stats[..., 0] + np.log(stats[..., 1])
    np.testing.assert_allclose(found, lse * np.log(2.0), rtol=1e-5, atol=1e-5)

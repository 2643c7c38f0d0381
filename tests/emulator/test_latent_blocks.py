"""list_slots, and latent attention over what it finds, on the host's kernels."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import latent_blocks
from helpers.share import one_of

from cupyattn import sparse

from . import gpu


def check(seed: int, **facts: object) -> None:
    case = latent_blocks.Case(seed)
    want, want_lse = case.expected()
    with gpu.plugged_in(**{"num_sms": 8, "seed": seed, **facts}) as emulated:
        out, lse = sparse.attend(**case.arguments)
        again, _ = sparse.attend(**case.arguments)
        assert emulated.has_launched("list_slots") or not len(out)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1.6e-2, atol=1.6e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert np.array_equal(out.view(np.uint16), again.view(np.uint16))


@pytest.mark.parametrize("seed", one_of(3, range(18)))
def test_random_calls(seed: int) -> None:
    check(seed, arch=(900, 800)[seed % 4 == 3])

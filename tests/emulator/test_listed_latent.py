"""gather_keys, and attention over what it puts side by side, on the host's kernels."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import listed_latent
from helpers.share import one_of

from cupyattn import flash_mla

from . import gpu


def check(seed: int, form: str = "", **facts: object) -> set[str]:
    """A random call, twice, beside the reference; the names of what it launched."""
    case = listed_latent.draw(seed, form=form)
    want, want_lse = case.expected()
    with gpu.plugged_in(**{"num_sms": 8, "seed": seed, **facts}) as emulated:
        out, lse = flash_mla.flash_mla_with_kvcache(**case.arguments)
        again, _ = flash_mla.flash_mla_with_kvcache(**case.arguments)
        names = {launch.name for launch in emulated.launches}
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1.6e-2, atol=1.6e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert np.array_equal(out.view(np.uint16), again.view(np.uint16))
    return names


@pytest.mark.parametrize("seed", one_of(3, range(12)))
def test_random_calls(seed: int) -> None:
    is_hopper = seed % 4 != 3
    names = check(seed, arch=900 if is_hopper else 800, is_portable=not is_hopper)
    # Hopper's kernel reads rows of 584 bytes as they lie.
    assert ("gather_keys" in names) == (
        listed_latent.FORMS[seed % 3] != "584 bytes" or not is_hopper
    )
    assert "plan_batch" not in names or not is_hopper


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token at a time, in arrays of all."""
    monkeypatch.setattr(flash_mla, "MAX_BYTES", 1)
    check(4)
    check(8, arch=800, is_portable=True)

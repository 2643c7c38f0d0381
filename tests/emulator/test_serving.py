"""The serving kernels on the host: metadata equal to its NumPy twin, and whole steps."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.serving_cases import KINDS, Case

from . import gpu


def metadata(case: Case) -> dict[str, np.ndarray]:
    """All arrays that a step's metadata is in."""
    backend = case.backend()
    backend.init_forward_metadata(case.batch())
    (store,) = backend._stores.values()
    return {name: np.array(x) for name, x in store._arrays.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_is_its_twin(kind: str) -> None:
    for seed in range(30):
        wanted = metadata(Case(seed, kind=kind, is_gpu=True))
        with gpu.plugged_in(seed=seed % 3) as emulated:
            found = metadata(Case(seed, kind=kind, is_gpu=True))
            assert len(emulated.launches) == int(Case(seed, kind=kind, is_gpu=True).bs > 0)
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            np.testing.assert_array_equal(found[name], x, err_msg=f"{name} of seed {seed}")


@pytest.mark.parametrize("kind", KINDS)
def test_whole_steps(kind: str) -> None:
    for seed in range(3):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, kind=kind, is_gpu=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_whole_steps(kind: str) -> None:
    for seed in range(100, 130):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, kind=kind, is_gpu=True).run()

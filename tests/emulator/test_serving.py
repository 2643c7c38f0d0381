"""The serving kernels on the host: metadata equal to its NumPy twin, and whole steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.serving_cases import KINDS, Case, LatentCase
from helpers.share import one_of

from . import gpu


def metadata(case: Case, is_together: bool) -> dict[str, np.ndarray]:
    """All arrays that a step's metadata is in; is_together: those of all steps of a draft."""
    if is_together:
        drafts = case.multi_step()
        drafts.init_forward_metadata(case.batch())
        store = drafts._store
    else:
        backend = case.backend()
        backend.init_forward_metadata(case.batch())
        (store,) = backend._stores.values()
    assert store is not None
    return {name: np.array(x) for name, x in store._arrays.items()}


def compare_metadata(
    seed: int,
    kind: str,
    is_together: bool = False,
    is_long: bool = False,
    *,
    order: int = 0,
    **facts: Any,
) -> None:
    def make() -> Case:
        return Case(seed, kind=kind, is_gpu=True, is_long=is_long)

    wanted = metadata(make(), is_together)
    with gpu.plugged_in(seed=order, **facts) as emulated:
        case = make()
        found = metadata(case, is_together)
        names = [launch.name for launch in emulated.launches]
        assert names == ["serving_metadata"] * int(case.bs > 0)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x, err_msg=f"{name} of seed {seed}, {kind}")


# (seed, kind, all steps of a draft, long): what mutations of the kernel are caught by.
STEPS_OF_MUTATIONS = (
    *((6, "extend", False, False), (12, "extend", False, False), (16, "extend", False, False)),
    *((0, "decode", False, True), (13, "decode", False, True), (5, "draft chain", True, False)),
    *((16, "draft beams", False, False), (7, "draft beams", True, False)),
    *((16, "verify tree", False, False), (19, "verify tree", False, False)),
    *((6, "verify tree", False, False), (3, "verify tree", False, False)),
)


# The first seeds in the ordinary suite, the rest in the slow one.
@pytest.mark.parametrize("seeds", one_of(2, [range(7), range(7, 20)]), ids=["few", "rest"])
@pytest.mark.parametrize("kind", KINDS)
def test_metadata_is_its_twin(kind: str, seeds: range) -> None:
    for seed in seeds:
        compare_metadata(seed, kind, order=seed % 3)


@pytest.mark.parametrize("seeds", one_of(2, [range(6), range(6, 15)]), ids=["few", "rest"])
@pytest.mark.parametrize("kind", ["draft chain", "draft beams"])
def test_metadata_of_all_steps_is_its_twin(kind: str, seeds: range) -> None:
    for seed in seeds:
        compare_metadata(seed, kind, is_together=True)


def test_metadata_of_long_requests_is_its_twin() -> None:
    """Tables of the second pool begin where a window does."""
    for seed in (0, 13, 3, 16, 6):
        for kind in ("decode", "mixed", "draft extend"):
            compare_metadata(seed, kind, is_long=True)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_steps(kind: str) -> None:
    for seed in range(3):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, kind=kind, is_gpu=True).run()


@pytest.mark.parametrize(("kind", "seed"), [("decode", 2), ("draft beams", 4), ("extend", 2)])
def test_whole_steps_over_latent_pools(kind: str, seed: int) -> None:
    """Pages of one token begin at any entry of req_to_token; beams take two passes and a merge."""
    with gpu.plugged_in(seed=seed % 3):
        LatentCase(seed, kind=kind, is_gpu=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_whole_steps(kind: str) -> None:
    for seed in range(100, 130):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, kind=kind, is_gpu=True).run()

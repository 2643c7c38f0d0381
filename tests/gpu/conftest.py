"""What the GPU suite needs of its frameworks before they start, and its parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import card_memory

# JAX would otherwise take three quarters of the memory for itself, and keeps what it has had.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")


@pytest.fixture(autouse=True)
def _memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Many processes share a card: one large test at a time, and pools that keep little."""
    large = request.node.get_closest_marker("large")
    if large is None:
        yield
        card_memory.give_back(above=card_memory.KEPT)
        return
    with card_memory.one_at_a_time():
        card_memory.give_back()
        if card_memory.free() < large.kwargs["gib"] << 30:
            pytest.skip(f"needs {large.kwargs['gib']} GiB of free memory")
        yield
        card_memory.give_back()


@pytest.fixture
def torch() -> Any:
    """torch with CUDA."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is here without CUDA")
    return torch


@pytest.fixture(params=["cupy", "torch"])
def xp(request: pytest.FixtureRequest) -> Any:
    """Both frameworks in turn."""
    if request.param == "torch":
        return request.getfixturevalue("torch")
    return pytest.importorskip("cupy")


@pytest.hookimpl(trylast=True)  # after marks and -k have had their say
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """CUPYATTN_TEST_PART=1/4 keeps the second quarter of the tests, dealt out in turn."""
    index, _, count = os.environ.get("CUPYATTN_TEST_PART", "0/1").partition("/")
    kept = items[int(index) :: int(count)]
    left = [item for item in items if item not in set(kept)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept

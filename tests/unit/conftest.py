"""What tests of the launch path share: see helpers/fake_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU that is not there, on a library that has never seen a call."""
    from helpers import fake_batch, fake_gpu

    fake_gpu.forget()
    yield fake_gpu.pretend(monkeypatch)
    fake_gpu.forget()
    fake_batch.forget()


@pytest.fixture(params=["torch", "cupy"])
def make(
    request: pytest.FixtureRequest, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """make(*shape, dtype="bfloat16"): an array on the GPU."""
    from helpers import fake_gpu

    return fake_gpu.maker(request.param, monkeypatch)


@pytest.fixture
def stream(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPU's stream: it computes batches, but only once it is waited for."""
    from helpers import fake_batch

    return fake_batch.pretend(gpu, monkeypatch)


@pytest.fixture
def device(make: Callable[..., Any], stream: Any) -> Any:
    """Batches' arrays on the GPU."""
    from helpers import fake_batch

    return fake_batch.Device(make, stream)


@pytest.fixture
def only_cached_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: from here on, runs of batch wrappers have to be cached calls."""
    from cupyattn.engine import run_batch as run

    def refuse(*_: object) -> None:
        raise AssertionError("a checked call where a cached one was expected")

    return lambda: monkeypatch.setattr(run, "_run_checked", refuse)


@pytest.fixture
def own_workspaces(device: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the workspaces that wrappers make on the GPU."""
    from helpers import fake_gpu

    from cupyattn import array
    from cupyattn.engine import own_workspace

    makers = {name: fake_gpu.maker(name, monkeypatch) for name in ("torch", "cupy")}
    sizes: list[int] = []
    real = array.empty_on

    def empty_on(framework: str, where: Any, shape: Any, dtype: Any) -> Any:
        if where.kind == "cpu":
            return real(framework, where, shape, dtype)
        sizes.append(shape[0])
        return makers[framework](*shape, dtype=dtype.name)

    monkeypatch.setattr(array, "empty_on", empty_on)
    monkeypatch.setattr(own_workspace, "device_props", lambda index: None)
    monkeypatch.setattr(own_workspace, "cuda", lambda: gpu.api)
    return sizes

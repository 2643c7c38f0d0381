"""What every test shares: the `gpu` marker, a header of versions, one hypothesis profile."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

# CuPy keeps what it compiles under the home folder, which a machine of tests may not let write.
_CUPY_CACHE = Path(tempfile.gettempdir(), f"cupyattn-tests-{os.getuid()}", "cupy")
os.environ.setdefault("CUPY_CACHE_DIR", str(_CUPY_CACHE))

# What somebody measured of his card is no part of what is tested.
os.environ["CUPYATTN_TUNED"] = "0"

# The same examples on every run: a failure in CI is the failure on a desk. A GPU machine that runs
# only the GPU suite need not have hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    hypothesis.settings.register_profile("cupyattn", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("cupyattn")


@functools.cache
def _missing_device() -> str | None:
    """Why no CUDA device can be used, or None if one answers."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    # A driver that is there and broken raises its own kinds of error: any of them means no device.
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.runtime.deviceSynchronize()
    except Exception as error:
        return f"no usable CUDA device: {error}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _missing_device()):
        pytest.skip(reason)


def pytest_collection_finish() -> None:
    """Modules and tests stay: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Which frameworks this run has, so that skipped tests explain themselves."""
    found = []
    for name in ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "torch", "jax"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)

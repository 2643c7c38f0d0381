"""CuPy, imported in a way that works where the home folder cannot be written."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import DeviceError
from .folders import is_writable, temporary_folder


@functools.cache
def cupy_module() -> Any:
    """CuPy. Raises DeviceError, with the cause, if it cannot be imported."""
    if "cupy" not in sys.modules:
        _give_cache_folder()
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"CuPy cannot be imported ({error}); install cupyattn[cuda12x] or cupyattn[cuda13x], "
            "whichever CUDA version the driver supports"
        ) from error
    except OSError as error:
        raise DeviceError(
            f"CuPy cannot be imported ({error}); set CUPY_CACHE_DIR to a folder that can be written"
        ) from error
    return cupy


class _RawStream:
    """What CuPy takes a stream of another library from."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@functools.lru_cache(maxsize=64)
def as_stream(pointer: int) -> Any:
    """A raw stream, for a `with` statement: kernels run on it, and memory is in its order."""
    cuda = cupy_module().cuda
    if pointer == 0:
        return cuda.Stream.null
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_RawStream(pointer))
    return cuda.ExternalStream(pointer)


def _give_cache_folder() -> None:
    """CuPy makes a cache folder while it is imported, and fails where the home is read-only."""
    folder = Path(os.path.expanduser("~/.cupy/kernel_cache"))
    if "CUPY_CACHE_DIR" in os.environ or (folder.is_absolute() and is_writable(folder)):
        return
    with contextlib.suppress(OSError):
        private = temporary_folder()
        private.mkdir(mode=0o700, exist_ok=True)
        os.environ["CUPY_CACHE_DIR"] = str(private / "cupy")

"""Launches from threads while another thread loads libraries: a process of its own for
test_library.py, for it ends with thousands of them.

    python -m emulator.loads FOLDER COUNT
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from . import build, library, test_mistakes

_SMALL = "thread_local int word; int read() { return word; }"
_RTLD_NOW = 2


class _Loads(threading.Thread):
    """Loads small libraries until it is stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._stops = folder, False
        self._made = folder / "small.so"
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(self._made)]
        subprocess.run(command, input=_SMALL, text=True, check=True)

    def run(self) -> None:
        load = ctypes.CDLL(None).dlopen  # called without the GIL, as CDLL(path) is not
        load.argtypes, load.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        count = 0
        while not self._stops:
            path = self._folder / f"small.{count}.so"
            shutil.copy(self._made, path)
            assert load(bytes(path), _RTLD_NOW)
            path.unlink()
            count += 1

    def stop(self) -> None:
        self._stops = True
        self.join()


def main(folder: Path, count: int) -> None:
    whole = build.build(build.Source.of_file(test_mistakes.SOURCE), "plain")
    loads = _Loads(folder)
    loads.start()
    num_right = 0

    def launch(kernel: library.Library) -> None:
        nonlocal num_right
        values, out = test_mistakes.run("fine_exchange", kernel=kernel)
        num_right += np.array_equal(out[:128], values[(np.arange(128) + 32) % 128])

    for index in range(count):
        path = folder / f"{index}.so"
        shutil.copy(whole, path)
        kernel = library.Library(path, "mistakes")
        path.unlink()
        thread = threading.Thread(target=launch, args=(kernel,))
        thread.start()
        thread.join()
    loads.stop()
    assert num_right == count
    os._exit(0)  # nothing of the libraries needs to be undone, which takes long


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Replacing what the library calls, wherever it holds it."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import pytest

import cupyattn

# A module imported while something is replaced would keep the replacement.
for _module in pkgutil.walk_packages(cupyattn.__path__, "cupyattn."):
    if not _module.name.endswith("__main__"):
        try:
            importlib.import_module(_module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "jax"):
                raise


def replace(patch: pytest.MonkeyPatch, original: Any, replacement: Any) -> None:
    """Put `replacement` wherever a module of the library holds `original`, by whatever name."""
    found = 0
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "cupyattn":
            for name, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, name, replacement)
                    found += 1
    assert found, f"{original} is nowhere in the library"

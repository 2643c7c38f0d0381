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
    replace_all(patch, (original, replacement))


def replace_all(patch: pytest.MonkeyPatch, *pairs: tuple[Any, Any]) -> None:
    """`replace` of each (original, replacement), in one look through the library."""
    replacements = {id(original): replacement for original, replacement in pairs}
    found = set()
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("cupyattn"):
            continue
        if replacements.keys().isdisjoint(map(id, vars(module).values())):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                patch.setattr(module, name, replacements[id(value)])
                found.add(id(value))
    for original, _ in pairs:
        assert id(original) in found, f"{original} is nowhere in the library"

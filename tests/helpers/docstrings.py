"""Public functions and classes whose docstrings are read, and the examples in these."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import cupyattn
from cupyattn import errors

# Modules of functions and classes that users call.
_MODULES = (
    *("flash_attn", "flash_attn.bert_padding", "flash_attn_interface", "flash_mla", "serving"),
    *("distributed", "dsa_indexer", "msa_ops", "paged_mqa", "sparse"),
)


def documented() -> dict[str, Callable[..., Any]]:
    """Public functions and classes by name, each once."""
    names = [x for x in cupyattn.__all__ if x != "__version__" and not hasattr(errors, x)]
    for module in _MODULES:
        names += [f"{module}.{x}" for x in importlib.import_module(f"cupyattn.{module}").__all__]
    found: dict[int, tuple[str, Callable[..., Any]]] = {}
    for name in names:
        value = functools.reduce(getattr, name.split("."), cupyattn)
        if inspect.ismodule(value):  # xqa, if the module of that name has been imported first
            value = getattr(value, name)
        if callable(value):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def programs() -> list[tuple[str, str]]:
    """(name, source) of the examples, without what they print."""
    found = []
    for name, value in documented().items():
        examples = doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")
        if examples:
            found.append((f"cupyattn.{name}", "".join(x.source for x in examples)))
    return found

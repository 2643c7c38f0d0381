"""Docstrings of public names: sections as numpydoc has them, and an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers import docstrings

# What other entries' examples show: fields of a step, interfaces, objects of engines.
_SHOWN_ELSEWHERE = {
    *("serving.AttentionMetadata", "serving.ContextParallelBackend", "serving.DraftInfo"),
    *("serving.FlashAttentionBackend", "serving.FlashAttentionMultiStepBackend"),
    *("serving.ForwardMetadata", "serving.ForwardMode", "serving.KVPool", "serving.MLAPool"),
    *("serving.MultiStepDraftBackend", "distributed.HeadRange", "distributed.Rates"),
    *("distributed.Transport", "distributed.Window", "distributed.new_unique_id"),
}
_SECTION = re.compile(r"^(\w+)\n-+$", re.M)
_ORDER = ["Parameters", "Attributes", "Returns", "Raises", "Notes", "Examples"]


DOCUMENTED = docstrings.documented()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_example_of_a_docstring_runs(name: str) -> None:
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    if name in _SHOWN_ELSEWHERE:
        assert ">>> " not in text, "it has an example now"
        return
    assert ">>> " in text
    module = inspect.getmodule(inspect.unwrap(DOCUMENTED[name]))
    test = doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, None, None)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_sections_of_a_docstring_are_numpydoc_s(name: str) -> None:
    value = DOCUMENTED[name]
    methods = [x for x in vars(value) if x[0] != "_"] if inspect.isclass(value) else []
    for documented in [value, *(getattr(value, x) for x in methods)]:
        found = _SECTION.findall(inspect.getdoc(documented) or "")
        assert found == [x for x in _ORDER if x in found]


def test_parameters_that_are_described_exist() -> None:
    unknown = []
    for name, value in DOCUMENTED.items():
        text = inspect.getdoc(value) or ""
        section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", text, re.M | re.S)
        listed = re.findall(r"^(\w[\w, ]*)$", section[1] if section else "", re.M)
        known = {*_parameters(value), "other arguments"}
        for entry in listed:
            words = [x for x in re.split(r", | to ", entry) if x]
            unknown += [f"{name}: {x}" for x in words if x not in known and entry not in known]
    assert unknown == []


def _described() -> list[tuple[str, Callable[..., Any]]]:
    """Functions, classes, and the methods of these."""
    found = []
    for name, value in DOCUMENTED.items():
        found.append((name, value))
        if inspect.isclass(value):
            methods = [(x, y) for x, y in vars(value).items() if x[0] != "_" and callable(y)]
            found += [(f"{name}.{x}", y) for x, y in methods]
    return found


def test_every_parameter_has_an_entry() -> None:
    """Of its own, not within another's: the page's list of parameters is read by their names."""
    absent = []
    for name, value in _described():
        text = inspect.getdoc(value) or ""
        section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", text, re.M | re.S)
        if section is None or "\nother arguments\n" in f"\n{section[1]}\n":
            continue
        entries = re.findall(r"^(\w[\w, ]*)$", section[1], re.M)
        signature = list(inspect.signature(value).parameters)
        has = set()
        for first, _, last in (x.partition(" to ") for e in entries for x in e.split(", ")):
            if first in signature and (last or first) in signature:
                has |= set(signature[signature.index(first) : signature.index(last or first) + 1])
        absent += [f"{name}: {x}" for x in signature if x not in has and x not in ("self", "args")]
    assert absent == []


def _parameters(value: Callable[..., Any]) -> set[str]:
    fields = set(getattr(value, "__dataclass_fields__", ()))
    try:
        return set(inspect.signature(value).parameters) | fields
    except (TypeError, ValueError):
        return fields

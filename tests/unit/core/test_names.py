"""FlashInfer's names: those said to be here are, the others say what to use, a page lists all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import documents
from cupyattn.core import names

LISTED = names.names()
HERE = [(place, name) for place, found in LISTED["here"].items() for name in found]
ABSENT = [
    (place, name, group)
    for group in LISTED["absent"]
    for place, found in group["names"].items()
    for name in found
]


def module(place: str) -> Any:
    return importlib.import_module(place.replace("flashinfer", "cupyattn", 1))


def test_every_name_that_is_said_to_be_here_exists() -> None:
    assert {place for place, _ in HERE} >= {"flashinfer", "flashinfer.decode", "flashinfer.prefill"}
    for place, name in HERE:
        assert callable(getattr(module(place), name)) or name in sys.modules["cupyattn"]._MODULES


def test_no_name_is_listed_twice() -> None:
    for place in {place for place, *_ in (*HERE, *ABSENT)}:
        found = [name for other, name, *_ in (*HERE, *ABSENT) if other == place]
        assert len(found) == len(set(found)), place


def test_an_absent_name_says_what_to_use() -> None:
    for place, name, group in ABSENT:
        own = place.replace("flashinfer", "cupyattn", 1)
        if importlib.util.find_spec(own) is None:
            assert place.partition(".")[2] in {name for _, name, _ in ABSENT}
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(module(place), name)
        text = str(caught.value)
        assert text.startswith(f"module {own!r} has no attribute {name!r}: ")
        if name not in {known for _, known in HERE}:
            assert group["what"] in text and group["instead"] in text


def test_an_absent_module_does_too() -> None:
    with pytest.raises(AttributeError, match="has no norms; keep it from flashinfer"):
        importlib.import_module("cupyattn").norm.rmsnorm  # noqa: B018


def test_what_is_used_instead_exists() -> None:
    known = {name for _, name in HERE}
    for group in LISTED["absent"]:
        for word in group["instead"].replace(",", " ").split():
            if any(x.isupper() for x in word[1:]) and word.isidentifier() and word != "NCCL":
                assert word in known, group["instead"]


def test_a_name_that_is_elsewhere_is_found() -> None:
    with pytest.raises(AttributeError, match=r"it is cupyattn\.packbits$"):
        module("flashinfer.decode").packbits  # noqa: B018


@pytest.mark.parametrize("place", ["cupyattn", "cupyattn.cascade", "cupyattn.xqa"])
def test_a_name_of_nobodys_is_a_plain_error(place: str) -> None:
    target = importlib.import_module(place)
    with pytest.raises(AttributeError) as caught:
        target.merge_stat  # noqa: B018
    assert str(caught.value) == f"module {place!r} has no attribute 'merge_stat'"
    assert (caught.value.name, caught.value.obj) == ("merge_stat", target)
    assert not hasattr(target, "__wrapped__")


def test_python_adds_the_most_similar_name() -> None:
    code = "import cupyattn.cascade; cupyattn.cascade.merge_stat"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Did you mean: 'merge_state'?" in child.stderr


def test_the_page_is_that_of_the_list() -> None:
    """documents.rendered() makes it, and test_documents compares all that it makes."""
    pages = [text for path, text in documents.rendered() if path.name == "flashinfer-names.md"]
    assert len(set(pages)) == 1
    for _, name in HERE:
        assert f"`{name}`" in pages[0]
    for _, name, group in ABSENT:
        assert f"`{name}`" in pages[0] and group["instead"] in pages[0]

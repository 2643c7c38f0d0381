"""What tests of observed calls share: a process whose environment asks about them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cupyattn.observation import calls, dump

VARIABLES = "LOG", "DUMP", "DUMP_CALLS", "DUMP_NAMES", "DUMP_LIMIT_MIB"


def _forget() -> None:
    calls.level.cache_clear()
    dump.folder.cache_clear()
    dump._say_once.cache_clear()
    dump._counter = itertools.count(1)


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """asks(LOG="3", ...): the environment says so, as if the process had begun with it."""

    def asks(**values: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(f"CUPYATTN_{name}", raising=False)
        for name, value in values.items():
            monkeypatch.setenv(f"CUPYATTN_{name}", value)
        _forget()

    yield asks
    _forget()


@pytest.fixture
def folder(asks: Callable[..., None], tmp_path: Path) -> Path:
    """Where calls are saved."""
    asks(DUMP=str(tmp_path / "dump"))
    return tmp_path / "dump"

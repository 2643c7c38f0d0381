"""Calls that a GPU made, saved and run again on the CPU: those of wrappers and without plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import sparse
from cupyattn.core import observed
from cupyattn.observation import calls, dump, replay

from . import gpu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUPYATTN_DUMP", str(tmp_path))
    _forget()
    yield tmp_path
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    dump.folder.cache_clear()
    calls.level.cache_clear()


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float16)


def test_calls_run_again_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, wrapper = np.random.default_rng(3), cupyattn.BatchPrefillWithRaggedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        monkeypatch.setattr(wrapper, name, observed.watched(getattr(wrapper, name)))
    attend = observed.watched(sparse.attend)
    q, k, v = normal(rng, 9, 4, 64), normal(rng, 9, 2, 64), normal(rng, 9, 2, 64)
    lists = rng.integers(-1, 9, (9, 2, 4)).astype(np.int32)
    with gpu.plugged_in(num_sms=8):
        planned = wrapper("cuda:0")  # which has a workspace of its own there
        offsets = np.array([0, 4, 9], np.int32)
        planned.plan(offsets, offsets, 4, 2, 64, causal=True, q_data_type="float16")
        planned.run(q, k, v, return_lse=True)
        attend(q, (k, v), lists)
    files = sorted(x for x in folder.glob("*.json") if not x.name.endswith(".result.json"))
    assert len(files) == 2
    for path in files:
        result = replay.replay(path, "cpu")
        assert not result.reference.error
        (recorded,) = result.runs
        assert recorded.launches
        differences = result.differences[recorded.where]
        assert len(differences) == len(recorded.arrays) > 0
        assert all(x.relative < 1e-3 and not x.unlike for x in differences)

"""CUPYATTN_LOG, CUPYATTN_DUMP and `cupyattn replay` on a GPU: calls of torch and CuPy, of wrappers
and without plans, by lists, of latent rows, and in a graph."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import observed_calls
from helpers.on_gpu import leaves_running

import cupyattn
from cupyattn.core import observed
from cupyattn.observation import calls, replay

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

ROOT = Path(__file__).resolve().parents[2]
# bfloat16's rounding of an output and, of queries of CuPy, float16's; the LSE is of float32.
ERROR = 0.004
PARTS = observed_calls.parts("cuda")


def program(**asked: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **{f"CUPYATTN_{name}": value for name, value in asked.items()}}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "tests/helpers/observed_calls.py", "cuda"]
    made = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert made.returncode == 0, made.stderr[-3000:]
    assert made.stdout.split() == [*PARTS]
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    """The files of all calls, and the log with statistics."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("calls")
    made = program(LOG="5", DUMP=str(folder), DUMP_CALLS="99")
    files = [x for x in folder.glob("*.json") if not x.name.endswith(".result.json")]
    return sorted(files, key=lambda x: int(x.stem.rpartition("-")[2])), made.stderr


def test_saved_calls_run_again(saved: tuple[list[Path], str]) -> None:
    """The GPU's answers, then and now, are the reference's but for their rounding."""
    for path in saved[0]:
        result, name = replay.replay(path, "cuda"), path.name
        before, now = result.runs
        assert before.where.startswith("recorded on ") and not before.where.endswith("CPU"), name
        if result.reference.error:
            assert result.reference.error == before.error == now.error, name
            continue
        assert not before.error and not now.error, (name, before.error, now.error)
        assert before.launches == now.launches and now.launches, name
        for run in result.runs:
            differences = result.differences[run.where]
            assert len(differences) == len(result.reference.arrays) > 0, name
            for each in differences:
                assert each.relative < ERROR and not each.unlike, (name, run.where, str(each))


def test_which_calls_are_saved(saved: tuple[list[Path], str]) -> None:
    """All but those that a graph holds."""
    names = [path.name.rpartition("-")[0].rpartition("-")[0] for path in saved[0]]
    wrapper = "BatchDecodeWithPagedKVCacheWrapper.run"
    assert names == [
        "single_prefill_with_kv_cache",
        "flash_attn.flash_attn_with_kvcache",
        wrapper,
        "BatchPrefillWithRaggedKVCacheWrapper.run",
        wrapper,
        wrapper,
        "sparse.select",
        "sparse.attend",
        "flash_mla.flash_mla_with_kvcache",
        "flash_mla.flash_mla_with_kvcache",
        "BatchMLAPagedAttentionWrapper.run",
        "single_prefill_with_kv_cache",
    ]


def test_lines_with_statistics(saved: tuple[list[Path], str]) -> None:
    log = saved[1]
    assert "cannot be told of or saved" not in log
    assert "launched" in log and re.search(r"  q: -\d.* to \d.*, mean ", log)
    captured = log[log.rindex("cupyattn.sparse.select") :]
    assert captured.count("no statistics while a graph is captured") > 10
    assert " mean " not in captured


@pytest.mark.parametrize("level", ["1", "3"])
def test_lines(torch: Any, level: str) -> None:
    log = program(LOG=level).stderr
    names = re.findall(r"^cupyattn: call \d+: (cupyattn\.\S+)$", log, re.M)
    assert names.count("cupyattn.sparse.attend") == 2
    assert names.count("cupyattn.BatchDecodeWithPagedKVCacheWrapper.plan") == 4
    assert ("launched " in log) is (level == "3")
    assert "ArgumentError: q, k: " in log and " mean " not in log
    assert "cannot be told of" not in log


def test_lines_do_not_wait(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 3 the host goes on while a kernel ahead is running."""
    monkeypatch.setenv("CUPYATTN_LOG", "3")
    calls.level.cache_clear()
    q = torch.randn(64, 8, 128, device="cuda", dtype=torch.float16)
    prefill = observed.watched(cupyattn.single_prefill_with_kv_cache)
    try:
        prefill(q, q, q)
        assert leaves_running(torch, lambda: prefill(q, q, q))
    finally:
        monkeypatch.undo()
        calls.level.cache_clear()


def test_the_command(saved: tuple[list[Path], str]) -> None:
    command = [sys.executable, "-m", "cupyattn", "replay", "--json", str(saved[0][0])]
    answer = json.loads(subprocess.check_output(command, cwd=ROOT))
    recorded, here = answer["runs"]
    assert recorded["where"].startswith("recorded on ") and here["where"].startswith("here on ")
    assert here["launches"] == recorded["launches"]
    assert 0 < here["differences"][0]["relative"] < ERROR

"""CUPYATTN_LOG=choices."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import sparse
from cupyattn.engine import geometry
from cupyattn.launch.attention import log_choices
from cupyattn.launch.attention.batch import BatchLauncher
from cupyattn.launch.attention.single import AttentionLauncher

from .test_candidates import requests_of
from .test_mixed_launches import planned


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUPYATTN_LOG", "choices")
    log_choices._logger.cache_clear()
    log_choices.log_of_selection.cache_clear()
    yield
    log_choices._logger.cache_clear()
    log_choices.log_of_selection.cache_clear()


def launcher_of() -> BatchLauncher:
    launcher, _ = planned([(1, 100)], (32, 8))
    return BatchLauncher(launcher.spec, launcher.problem, launcher.device_index)


def test_a_line_for_each_new_choice(caplog: pytest.LogCaptureFixture) -> None:
    launcher = launcher_of()
    caplog.clear()
    for lengths in ([(1, 4096)] * 64, [(1, 4100)] * 64, [(1, 4000)] * 40 + [(1, 90)]):
        launcher.schedule(requests_of(lengths))
    (line,) = caplog.messages
    assert line.startswith("cupyattn: bfloat16, 32 query heads over 8 key heads, head dim 128")
    assert "; 64 x 1 row over 4,096 keys -> decode, " in line and " us estimated: " in line
    assert line.endswith("decode_sm80 (decode), 512 blocks")
    launcher.schedule(requests_of([(1, 4096)] * 64 + [(512, 2048)] * 2))
    assert len(caplog.messages) == 2 and "prefill_sm90 (" in caplog.messages[1]


def test_one_request_and_lengths_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    launcher = launcher_of()
    single = AttentionLauncher(launcher.spec, launcher.problem, launcher.device_index)
    caplog.clear()
    for _ in range(2):
        single.plan(2000, 2000)
        single.plan(2000, 2500)
    (line,) = caplog.messages
    assert "one request of 2,000 x 2,000 -> " in line and "prefill_sm90, " in line


def test_levels_of_a_cascade(caplog: pytest.LogCaptureFixture) -> None:
    w = cupyattn.MultiLevelCascadeAttentionWrapper(2, np.zeros(64 << 20, np.uint8))
    ends = np.arange(65, dtype=np.int32)
    pages = np.arange(512 + 64 * 4, dtype=np.int32)
    w.plan(
        [np.array([0, 64], np.int32), ends],
        [np.array([0, 512], np.int32), 4 * ends],
        [pages[:512], pages[512:]],
        [np.array([16], np.int32), np.full(64, 16, np.int32)],
        *(16, 8, 256, 16),
    )
    (line,) = caplog.messages
    assert (
        "; 65 requests: 1 x 64 rows over 8,192 keys; 64 x 1 row over 64 keys -> by row class: "
        in line
    )
    assert line.endswith("; a merge")
    assert line.startswith("cupyattn: float16, 16 query heads over 8 key heads, head dim 256")


def test_a_selection(gpu: Any, make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    call = make(4, 4, 128), make(64, 128, 128), make(4, 16, dtype="int32"), make(4, dtype="int32")
    for _ in range(2):
        sparse.select(*call, topk=16)
    (line,) = caplog.messages
    assert line.startswith("cupyattn: 16 blocks of 128 keys by max of 4 index heads in 4 groups")
    assert "; 4 tokens -> scores of 4 tiles of 8 columns in " in line
    assert line.endswith(" blocks, then 4 blocks") and "; lists by warps: " in line


def test_nobody_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUPYATTN_LOG", "0")
    log_choices._logger.cache_clear()
    launcher = launcher_of()
    assert launcher._log is None
    launcher.schedule(requests_of([(1, 4096)] * 64))
    assert not caplog.messages


PROGRAM = """
import logging, sys
{set_up}
import numpy as np
import cupyattn
w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 20, np.uint8))
one, two = np.array([0, 1], np.int32), np.array([2], np.int32)
w.plan(one, one[:1], two, 2, 2, 64, 16)
"""


@pytest.mark.parametrize("has_handlers", [False, True])
def test_lines_go_to_stderr_once(has_handlers: bool) -> None:
    set_up = "logging.basicConfig(level=logging.INFO, format='mine: %(message)s')"
    program = PROGRAM.format(set_up=set_up if has_handlers else "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if "decode" in line]
    assert done.returncode == 0 and len(lines) == 1
    assert lines[0].startswith("mine: cupyattn: " if has_handlers else "cupyattn: float16, ")
    assert logging.getLogger("cupyattn").level == logging.NOTSET


def test_lists_of_keys(
    gpu: Any, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    geometry.forget()
    cache = make(40, 64, 2, 64), make(40, 64, 2, 64)
    table = make(1, 40, dtype="int32")
    for tokens in (1, 1, 4):
        lists = make(tokens, 2, 4, dtype="int32")
        lengths = make(1, dtype="int32")
        sparse.attend(make(tokens, 32, 64), cache, lists, table, lengths, granularity=64)
    one, more = caplog.messages
    assert "; 1 tokens with 4 blocks of 64 -> each list by a block: 2 blocks" in one
    assert "; 4 tokens with 4 blocks of 64 -> each list by a block: 8 blocks" in more
    geometry.forget()

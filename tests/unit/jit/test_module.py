"""What a compile says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from helpers import tiny_kernels

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


def test_only_the_call_that_compiles_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_kernels.sandbox(tmp_path, monkeypatch)
    tiny_kernels.build()
    (said,) = caplog.records
    # Python shows warnings where nothing is configured, and nothing below.
    assert (said.name, said.levelno) == ("cupyattn", logging.WARNING)
    assert said.getMessage().startswith("cupyattn: kernel tiny compiled for sm_80 in ")
    tiny_kernels.build()
    assert len(caplog.records) == 1

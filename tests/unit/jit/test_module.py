"""What a compile says."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn.errors import CompileError

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


def test_a_path_that_cannot_be_encoded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any name that is not ASCII, where the locale is C; bytes that are no UTF-8 elsewhere."""
    place = tiny_kernels.sandbox(tmp_path, monkeypatch)
    odd = (place / "kernels").rename(place / os.fsdecode(b"k\xff"))
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(odd))
    with pytest.raises(CompileError, match=r"k\\udcff' has characters .* to a path in ASCII"):
        tiny_kernels.build()

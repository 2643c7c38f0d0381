"""The `cupyattn` command itself: how it is started, and what ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

import cupyattn
from cupyattn import cli


@pytest.mark.parametrize("status", [0, 1])
def test_demo_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    seen: list[list[str]] = []

    def main(args: list[str]) -> int:
        seen.append(args)
        return status

    fake = types.ModuleType("cupyattn.demo")
    fake.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupyattn.demo", fake)
    assert cli.main(["demo", "--framework", "numpy"]) == status
    assert seen == [["--framework", "numpy"]]


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cupyattn", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and all(
        f"\n    {command} " in done.stdout for command in ("info", "compile", "demo")
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cupyattn {cupyattn.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "stream"),
    [(["info"], "stdout"), (["compile", "--arch", "sm_80", "--op", "page"], "stderr")],
)
def test_a_reader_that_has_enough_is_no_error(arguments: list[str], stream: str) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cupyattn", *arguments]
    other = "stderr" if stream == "stdout" else "stdout"
    streams = {stream: writer, other: subprocess.PIPE}
    done = subprocess.run(command, **streams, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, getattr(done, other)) == (141, "")


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.info, "run", interrupted)
    assert cli.main(["info"]) == 130

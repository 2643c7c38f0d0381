"""The `cupyattn` command without a GPU: info, compile in processes, demo handed on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn import cli, jit
from cupyattn.core import env
from cupyattn.errors import CompileError
from cupyattn.jit import cache


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_kernels.write(tmp_path / "kernels")
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "default-cache"))
    return tmp_path


@pytest.fixture
def instances(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """What `cupyattn.launch.instances.instances(level, arch)` answers during a test."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    levels: dict[str, list] = {
        "standard": [("tiny", {"kScale": 1}), ("tiny", {"kScale": 2}), ("tiny", {"kScale": 1})],
        "full": [("spilling", {})],
    }
    fake = types.ModuleType("cupyattn.launch.instances")
    fake.instances = lambda level, arch: levels[level]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupyattn.launch.instances", fake)
    return levels


# --- info ---


def test_info_names_everything(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    labels = [line.split(" ")[0] for line in out.splitlines()]
    for label in ("cupyattn", "Python", "CuPy", "NVRTC", "kernels", "cache", "environment"):
        assert label in labels
    assert any(label.startswith("GPU") for label in labels)
    assert f"{place / 'default-cache'} (writable): 0 kernels" in out
    for variable in env.ALL:
        assert variable.name in out and variable.doc in out
    assert f"CUPYATTN_KERNELS_DIR = {place / 'kernels'}" in out
    assert not (place / "default-cache").exists()


def test_info_counts_kernels_and_says_read_only(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = place / "default-cache/some.sm_80.0"
    entry.mkdir(parents=True)
    (entry / "kernel.cubin").write_bytes(b"x" * 3 * 2**20)
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    cli.main(["info"])
    assert "(read-only): 1 kernels, 3.0 MiB" in capsys.readouterr().out


def test_info_without_cupy_and_without_kernels(place: Path) -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
from cupyattn.cli import main
sys.exit(main(["info"]))
"""
    changed = {**os.environ, "CUPYATTN_KERNELS_DIR": str(place / "nowhere")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=changed, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "CuPy         cannot be imported" in done.stdout
    assert "CPU arrays run on the reference" in done.stdout
    assert str(place / "nowhere") in done.stdout


# --- compile ---


def test_compile_fills_a_folder_to_ship(
    place: Path,
    instances: dict[str, list],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUPYATTN_NO_COMPILE", "1")
    shipped = place / "shipped"
    command = ["compile", "--arch", "sm_80,sm_90a", "--cache-dir", str(shipped), "--jobs", "2"]
    assert cli.main(command) == 0
    first = capsys.readouterr()
    assert first.out.startswith("4 kernels for sm_80, sm_90a in ")
    assert "4 compiled, 0 already there" in first.out and str(shipped) in first.out
    assert "spills: none" in first.out
    assert first.err.splitlines()[-1] == "4/4 kernels"
    assert cache.contents(shipped)[0] == 4
    assert cache.contents(place / "default-cache") == (0, 0)

    assert cli.main(command) == 0
    assert "0 compiled, 4 already there" in capsys.readouterr().out

    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(shipped))
    assert jit.build("tiny", {"kScale": 2}, "sm_90a").info.cached
    with pytest.raises(CompileError, match="cupyattn compile --arch sm_90a"):
        jit.build("tiny", {"kScale": 3}, "sm_90a")


def test_compile_reports_spills_and_failures(
    place: Path, instances: dict[str, list], capsys: pytest.CaptureFixture[str]
) -> None:
    instances["full"].append(("broken", {}))
    assert cli.main(["compile", "--arch", "sm_86", "--level", "full", "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("1 kernels for sm_86") and "spills: 1\n" in out
    assert "FAILED broken sm_86" in err and 'identifier "undeclared" is undefined' in err
    assert cache.contents(place / "default-cache")[0] == 1


class _Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple:
        return os._exit, (3,)


def test_a_dead_worker_is_a_failure_not_a_hang(place: Path) -> None:
    outcomes = cli._run([("tiny", _Deadly(), "sm_80")], place / "cache", 1)
    assert len(outcomes) == 1 and "BrokenProcessPool" in outcomes[0].error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_75"], "no kernels are built for 'sm_75'"),
        (["--arch", "sm_80,sm_90"], "did you mean sm_90a"),
        (["--arch", "sm_80", "--cache-dir", "{place}/kernels/entry/tiny.cu"], "cannot be written"),
        ([], "name --arch"),
    ],
)
def test_compile_refuses(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(cli, "_archs_here", list)
    arguments = [argument.format(place=place) for argument in arguments]
    assert cli.main(["compile", *arguments]) == 2
    assert said in capsys.readouterr().err


# --- progress, demo, entry point ---


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line() -> None:
    stream = _Terminal()
    progress = cli._Progress(4, stream)
    for index in range(4):
        progress.step(f"kernel{index}")
    progress.close()
    shown = stream.getvalue()
    assert shown.count("\n") == 1 and shown.count("\r") == 4
    assert f"[{'#' * 10}{'.' * 30}] 1/4 kernel0" in shown
    assert f"[{'#' * 40}] 4/4 kernel3" in shown


def test_progress_elsewhere_is_at_most_ten_lines() -> None:
    stream = io.StringIO()
    progress = cli._Progress(95, stream)
    for _ in range(95):
        progress.step("kernel")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[-1] == "95/95 kernels"


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
    assert done.returncode == 0 and "{info,compile,demo}" in done.stdout

"""`cupyattn cache` on folders of small kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn import cli

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


@pytest.fixture
def folder(place: Path) -> Path:
    """The cache with two kernels, beside files of somebody else's."""
    for scale in (1, 2):
        tiny_kernels.build(scale)
    folder = place / "default-cache"
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("precious")
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines of a command, on this folder."""
    status = cli.main(["cache", *arguments])
    return status, capsys.readouterr().out.splitlines()


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (head, *rows) = said(capsys, "list", "--cache-dir", str(folder))
    assert status == 0 and head.startswith(f"{folder}: 2 kernels, 0.")
    assert len(rows) == 2 and all(" KiB  tiny.sm_80.Scale" in row for row in rows)


def test_list_without_a_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (line, *_) = said(capsys, "list")
    assert (status, line) == (0, f"{place / 'default-cache'}: 0 kernels, 0.0 MiB")
    assert not (place / "default-cache").exists()


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (line,) = said(capsys, "verify", "--cache-dir", str(folder))
    assert (status, line) == (0, f"{folder}: 2 of 2 kernels are as they were written")
    damaged = next(folder.glob("tiny.*/kernel.cubin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    status, (line, fault) = said(capsys, "verify")[0], said(capsys, "verify")[1][:2]
    assert (status, line) == (1, f"{folder}: 1 of 2 kernels are as they were written")
    assert fault.startswith(f"  {damaged.parent.name}: ")


def test_clear_leaves_what_is_not_the_caches(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (line,) = said(capsys, "clear", "--cache-dir", str(folder))
    assert status == 0 and line.startswith(f"{folder}: removed 2 kernels, ")
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert (folder / "mine/thesis.txt").read_text() == "precious"


def test_path(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "path") == (0, [str(place / "default-cache")])
    file = place / "kernels/entry/tiny.cu"
    assert said(capsys, "path", "--cache-dir", str(file)) == (2, [])


def test_a_folder_that_cannot_be_used_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "kernels/entry/tiny.cu"
    assert cli.main(["cache", "list", "--cache-dir", str(file)]) == 2
    assert capsys.readouterr().err == f"cupyattn cache: {file}: Not a directory\n"
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", "somewhere")
    assert cli.main(["cache", "verify"]) == 2
    assert "wanted an absolute path" in capsys.readouterr().err

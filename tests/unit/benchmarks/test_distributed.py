"""The benchmark of several GPUs, on ranks that are threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import scale
from benchmarks.distributed import cli
from benchmarks.distributed.cases import DECODES, EXCHANGES, PROMPTS, SHARE_METHODS
from benchmarks.distributed.lone import lone_group

_SIZES = 1, 2, 4, 8
_OFF = 1e-5  # of float32, over the few keys of simulated cases


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all sizes, which is one command."""
    folder = tmp_path_factory.mktemp("several")
    ranks = ",".join(map(str, _SIZES))
    assert cli.main(["--simulated", "--ranks", ranks, "--out", str(folder)]) == 0
    return folder


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "results.json").read_text("utf-8"))["rows"]
    return rows


def test_every_case_stands_beside_one_two_and_four(found: Path) -> None:
    rows = _rows(found)
    for case in (*DECODES, *PROMPTS):
        own = [row for row in rows if row["case"] == case.name and "world" in row]
        own = [row for row in own if row["kind"] in ("decode", "prompt")]
        assert sorted({row["world"] for row in own}) == [*_SIZES]
        assert max(row["off"] for row in own if row["world"] > 1) < _OFF
        alone = next(row for row in own if row["world"] == 1)
        assert len(alone["ranks"]) == max(_SIZES)


def test_every_exchange_is_measured_by_windows_and_by_collectives(found: Path) -> None:
    rows = _rows(found)
    for kind in ("exchange", "exchange_packed"):
        shapes = [(row["rows"], row["heads"], row["world"]) for row in rows if row["kind"] == kind]
        assert len(shapes) == len(EXCHANGES) * (len(_SIZES) - 1)
    gathers = [(row["kind"], row["world"]) for row in rows if row["kind"].startswith("gather")]
    assert len(set(gathers)) == 2 * (len(_SIZES) - 1)


def test_the_picture_takes_the_rows(found: Path) -> None:
    points = [*scale.points(scale.Figures.of(_rows(found)))]
    measured = {(point.case, point.world) for point in points if point.measured is not None}
    assert measured == {(case.name, n) for case in (*DECODES, *PROMPTS) for n in _SIZES}
    assert (found / "table.txt").read_text("utf-8") == scale.table(points) + "\n"
    shares = {(x["case"], x.get("method")) for x in _rows(found) if x["kind"] == "share"}
    assert {(case.name, method) for case in PROMPTS for method in SHARE_METHODS} <= shares


def test_nothing_else_is_left_in_the_folder(found: Path) -> None:
    assert sorted(path.name for path in found.iterdir()) == ["results.json", "table.txt"]


@pytest.mark.parametrize("ranks", ["", "0", "2,", "two", "2,-4"])
def test_numbers_of_ranks_are_checked(ranks: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--ranks", ranks, "--out", str(tmp_path)])


def test_ranks_need_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "num_gpus", lambda: 2)
    with pytest.raises(SystemExit):
        cli.main(["--ranks", "2,4", "--out", str(tmp_path / "out")])
    assert "got 2,4, and this machine has 2 GPUs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_budget_is_divided_among_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(args: Any, size: int, rows: Path, seconds: float, *, alone: bool) -> int:
        calls.append((size, alone, round(seconds)))
        return 0

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(cli, "num_gpus", lambda: 8)
    ranks = ["--ranks", "1,2,8,4,2", "--seconds", "500", "--out", str(tmp_path)]
    assert cli.main(ranks) == 0
    # What a group leaves is for the later ones.
    assert calls == [(8, True, 250), (4, False, 250), (2, False, 500)]
    calls.clear()
    assert cli.main(["--ranks", "1", "--seconds", "60", "--out", str(tmp_path)]) == 0
    assert calls == [(1, True, 60)]


def test_a_lone_rank_takes_its_own_rows_for_those_of_others() -> None:
    group = lone_group(4, on_gpu=False)
    given = np.arange(8, dtype=np.uint8)
    out = np.zeros(32, np.uint8)
    group.all_gather(out, given)
    assert (out.reshape(4, 8) == given).all()
    group.all_gather(out, given + 1)  # memory that is filled stays so: nothing is timed but kernels
    assert (out.reshape(4, 8) == given).all()
    assert group.share_bytes(b"x") == [b"x"] * 4 and group.window(16) is None

"""The quick start's program runs to its end on the CPU, and draws its chart."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples import ten_minutes


def test_the_quick_start_runs_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ten_minutes.main(["--out", str(tmp_path / "chart.svg")]) == 0
    said = capsys.readouterr().out
    assert said.count(": right") == 5
    drawn = ElementTree.parse(tmp_path / "chart.svg").getroot()
    assert len([x for x in drawn if x.tag.endswith("rect")]) == 4

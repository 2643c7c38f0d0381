"""The notebooks: made from their scripts, executed, small, and able to run without a GPU."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.share import slow_unless

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

from benchmarks.notebooks import __main__ as building  # noqa: E402
from cupyattn.bench.lab import batches, runs, work_list  # noqa: E402

SCRIPTS = building.scripts()
by_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def code(made: Any) -> list[Any]:
    return [cell for cell in made.cells if cell.cell_type == "code"]


def outputs(made: Any) -> list[Any]:
    return [output for cell in code(made) for output in cell.outputs]


def text(made: Any) -> str:
    return "".join(output.get("text", "") for output in outputs(made))


def test_there_are_eleven() -> None:
    assert sorted(int(path.name.split("_")[0]) for path in SCRIPTS) == list(range(1, 12))
    page = (building.HERE / "README.md").read_text("utf-8")
    assert all(f"({path.stem}.ipynb)" in page for path in SCRIPTS)


@by_script
def test_a_committed_notebook_is_its_script_executed(script: Path) -> None:
    target = script.with_suffix(".ipynb")
    have = nbformat.read(target, as_version=4)
    nbformat.validate(have)
    cells = [(cell.cell_type, cell.source) for cell in have.cells]
    assert cells == building.cells(script.read_text("utf-8")), "run python -m benchmarks.notebooks"
    assert have.cells[0].cell_type == "markdown" and have.cells[0].source.startswith("# ")
    counts = [cell.execution_count for cell in code(have)]
    assert counts == list(range(1, len(counts) + 1)), "not executed in order"
    assert not [output for output in outputs(have) if output.output_type == "error"]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs(have))
    assert target.stat().st_size <= building.MOST_BYTES


# Each starts a process of its own; those of one request, of plans and of latent keys are ordinary.
@pytest.mark.parametrize(
    "script", slow_unless(lambda path: path.name[0] in "147", SCRIPTS), ids=lambda path: path.stem
)
def test_it_runs_without_a_gpu(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUPYATTN_NOTEBOOKS_SAVE", raising=False)
    made = building.execute(building.notebook(script))
    assert "No GPU here" in text(made)
    stray = [output.text for output in outputs(made) if output.get("name") == "stderr"]
    assert not stray, stray


def test_each_run_says_what_it_ran_on() -> None:
    used = "".join(path.read_text("utf-8") for path in SCRIPTS)
    for path in runs.KEPT.glob("*.json"):
        name = path.stem.removeprefix("rows_")
        assert json.loads(path.read_text("utf-8"))["on"].startswith("NVIDIA ")
        calls = "measured", "measured_before", "peers"
        assert any(f'lab.{call}("{name}"' in used for call in calls), (
            f"no notebook shows {path.name}"
        )


@by_script
def test_it_stands_alone(script: Path) -> None:
    """It imports the package's public modules, and reads no file."""
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cupyattn."):
            assert (node.module or "").split(".")[1] == "bench", node.module
    assert "Path(" not in script.read_text("utf-8") and "open(" not in script.read_text("utf-8")


def test_one_file_runs_elsewhere(tmp_path: Path) -> None:
    """The first notebook, copied where nothing else is."""
    script = tmp_path / "7_mla.py"
    script.write_text((building.HERE / script.name).read_text("utf-8"), "utf-8")
    made = building.execute(building.notebook(script), place=tmp_path)
    assert "No GPU here" in text(made)


def test_outputs_stay_where_no_code_changed(tmp_path: Path) -> None:
    script = tmp_path / "1_it.py"
    script.write_text("# %% [markdown]\n# # It\n#\n# says\n\n# %%\nprint(1)\n\n\n# %%\nx = 2\n")
    kinds = ["markdown", "code", "code"]
    made = building.notebook(script)
    assert [cell.cell_type for cell in made.cells] == kinds
    assert [cell.source for cell in made.cells] == ["# It\n\nsays", "print(1)", "x = 2"]
    made.cells[1].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    building.write(made, script.with_suffix(".ipynb"))
    script.write_text(script.read_text().replace("# says", "# tells"))
    again = building.notebook(script)
    assert again.cells[0].source.endswith("tells") and text(again) == "1\n"
    script.write_text(script.read_text().replace("x = 2", "x = 3"))
    assert text(building.notebook(script)) == ""


def test_a_large_notebook_is_refused(tmp_path: Path) -> None:
    made = nbformat.v4.new_notebook()
    made.cells.append(nbformat.v4.new_markdown_cell("x" * building.MOST_BYTES))
    with pytest.raises(ValueError, match="wanted 300000 at most"):
        building.write(made, tmp_path / "large.ipynb")
    assert not (tmp_path / "large.ipynb").exists()


def test_a_run_is_kept_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyattn.core.device import NO_GPU

    monkeypatch.setattr(runs, "KEPT", tmp_path)
    monkeypatch.setattr(batches, "GPU", NO_GPU)
    monkeypatch.delenv(runs.SAVE, raising=False)
    found = runs.measured("it", lambda: {"us": {8: 1.5}})
    assert found["us"] == {"8": 1.5}, "keys are what another run will read"
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(runs.SAVE, str(tmp_path))
    runs.measured("it", lambda: {"us": {8: 2.5}})
    monkeypatch.setattr(batches, "GPU", None)
    again = runs.measured("it", lambda: pytest.fail("there is no GPU"))
    assert again["us"] == {"8": 2.5} and again["on"].startswith("no GPU, 20")
    assert runs.measured("other", dict) == {}


def test_rows_that_are_kept_are_the_fastest_right_ones() -> None:
    row = {"case": "it", "status": "timed", "us": 2.0, "tflops": 3.04, "gbps": 4.0}
    rows = [
        row | {"peer": "ours"},
        row | {"peer": "ours_trtllm", "us": 1.0},
        row | {"peer": "ours_apart", "us": 9.0},
        row | {"peer": "flashinfer_fa2"},
        row | {"peer": "flashinfer_fa3", "us": 1.5},
        row | {"peer": "fa3", "status": "wrong"},
        row | {"peer": "sdpa_flash"},
    ]
    header = {"device": {"name": "NVIDIA X"}, "date": "2026-11-28T12:00", "commit": "0123456789"}
    data = {"rows": rows, "header": header, "ceilings": {"tflops": 700.0, "gbps": 3000.04}}
    kept = building.kept_rows(data)
    assert kept["on"] == "NVIDIA X, 2026-11-28, commit 01234567"
    assert kept["ceilings"] == {"tflops": 700.0, "gbps": 3000.0}
    ours = {"us": 2.0, "tflops": 3.0, "gbps": 4.0}
    assert kept["rows"]["it"] == {
        "cupyattn": ours,
        "cupyattn, apart": ours | {"us": 9.0},
        "FlashInfer": ours | {"us": 1.5},
    }


def test_a_work_list_needs_no_gpu() -> None:
    lengths = np.array([65536, *[256] * 40])
    whole, dealt = (work_list(lengths, may_split=may) for may in (False, True))
    assert whole.num_split_requests == 0 and dealt.num_split_requests == 1
    ends = [max(block.begin + block.time for block in made.play()) for made in (whole, dealt)]
    assert ends[0] == 2 + 512 and ends[1] < ends[0] / 8
    keys = [block.time - 2 for block in dealt.play() if block.request == 0]
    assert sum(keys) == 8 * 512, "every key tile once for each key head"

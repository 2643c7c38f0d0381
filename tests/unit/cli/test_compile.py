"""`cupyattn compile` without a GPU."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cupyattn import cli, jit
from cupyattn.cli import compile as compiling
from cupyattn.errors import CompileError
from cupyattn.jit import cache, compiler
from cupyattn.launch.instances import LEVELS


@pytest.fixture
def instances(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """The kernels that each level has during a test."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    levels: dict[str, list] = {
        "standard": [("tiny", {"kScale": 1}), ("tiny", {"kScale": 2})],
        "full": [("spilling", {})],
    }
    known = {tuple(LEVELS[name]): levels[name] for name in levels}
    monkeypatch.setattr(
        compiling,
        "instances",
        lambda chosen, arch: [(x, jit.Config(c)) for x, c in known[tuple(chosen)]],
    )
    return levels


def test_it_fills_a_folder_to_ship(
    place: Path,
    instances: dict[str, list],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUPYATTN_NO_COMPILE", "1")
    shipped = place / "shipped"
    command = ["compile", "--arch", "sm_80,sm_90a", "--cache-dir", str(shipped), "--jobs", "2"]
    assert cli.main(command) == 0
    first = capfd.readouterr()
    assert first.out.startswith("4 kernels for sm_80, sm_90a in ")
    assert "4 compiled, 0 already there" in first.out and str(shipped) in first.out
    assert "spills: none" in first.out
    lines = first.err.splitlines()
    assert lines[0].startswith("sm_80, sm_90a: about 4 kernels, ")
    assert lines[0].endswith(f"in 2 processes, to {shipped}")
    assert lines[-1].startswith("4/4 kernels, 0.0 MiB, in ") and len(lines) == 5
    assert cache.contents(cache.CacheFolder(shipped))[0] == 4
    assert cache.contents(cache.CacheFolder(place / "default-cache")) == (0, 0)

    assert cli.main(command) == 0
    assert "0 compiled, 4 already there" in capfd.readouterr().out

    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(shipped))
    assert jit.build("tiny", {"kScale": 2}, "sm_90a").info.cached
    with pytest.raises(CompileError, match="cupyattn compile --arch sm_90a"):
        jit.build("tiny", {"kScale": 3}, "sm_90a")


def test_it_reports_spills_and_failures(
    place: Path, instances: dict[str, list], capsys: pytest.CaptureFixture[str]
) -> None:
    instances["full"].append(("broken", {}))
    assert cli.main(["compile", "--arch", "sm_86", "--level", "full", "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("1 kernels for sm_86") and "spills: 1\n" in out
    assert "FAILED broken sm_86" in err and 'identifier "undeclared" is undefined' in err
    assert cache.contents(cache.CacheFolder(place / "default-cache"))[0] == 1


def test_what_fails_many_kernels_is_said_once(
    instances: dict[str, list], capsys: pytest.CaptureFixture[str]
) -> None:
    instances["full"][:] = [("broken", {"kScale": n}) for n in range(4)] + [("missing", {})]
    assert cli.main(["compile", "--arch", "sm_86", "--level", "full", "--jobs", "1"]) == 1
    err = capsys.readouterr().err
    assert err.count("FAILED") == 2 and err.count("is undefined") == 1
    assert "and 3 more like it" in err and "no file entry/missing.cu" in err


def test_ctrl_c_keeps_what_is_done(place: Path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    code = """
import sys
from cupyattn import cli, jit
from cupyattn.cli import compile as compiling, pool
work = pool.work
def telling(*args):
    for done in work(*args):
        yield done
        if done is not None:
            print("told", flush=True)  # the one before has been counted
pool.work = telling
kernels = [("slow", jit.Config({})), ("tiny", jit.Config({"kScale": 1}))]
compiling.instances = lambda chosen, arch: kernels
sys.exit(cli.main(["compile", "--arch", "sm_80", "--jobs", "2"]))
"""
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert started.stdout is not None
    while (line := started.stdout.readline()) != "told\n":
        assert line, "it has ended"
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=600)
    assert started.returncode == 130
    assert out.splitlines()[-1] == (
        f"cupyattn compile: SIGINT after 1 of 2 kernels, which are in {place / 'default-cache'}; "
        "the same command does the rest"
    )
    assert cache.contents(cache.CacheFolder(place / "default-cache"))[0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_75"], "no kernels are built for 'sm_75'"),
        (["--arch", "sm_80,sm_90"], "did you mean sm_90a"),
        (["--arch", "sm_80", "--cache-dir", "{place}/kernels/entry/tiny.cu"], "cannot be written"),
        ([], "name --arch"),
        (["--arch", "sm_80", "--option", "rope", "--head-dim", "72"], "no call has all of these"),
        (["--arch", "sm_80", "--head-dim", "264"], "multiples of 8 from 8 to 256"),
        (["--arch", "sm_80", "--model", "{place}/none.json"], "none.json cannot be read"),
    ],
)
def test_it_refuses(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(compiling, "_archs_here", list)
    arguments = [argument.format(place=place) for argument in arguments]
    assert cli.main(["compile", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cupyattn compile: ") and said in line


def test_without_a_compiler_it_says_so_once() -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
from cupyattn.cli import main
sys.exit(main(["compile", "--arch", "sm_80"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "CuPy cannot be imported" in line


def test_an_architecture_that_the_compiler_does_not_know_is_found_first(
    instances: dict[str, list],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Old:
        @staticmethod
        def getSupportedArchs() -> list[int]:
            return [80, 90]

    monkeypatch.setattr(compiler, "_nvrtc", Old)
    assert cli.main(["compile", "--arch", "sm_80,sm_100a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not know sm_100a; install a newer CUDA" in line


def test_a_dry_run_adds_up_and_compiles_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", "--arch", "sm_80,sm_90a", "--op", "decode", "--dtype", "float16"]
    assert cli.main([*command, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    _, *rows, last = out.splitlines()
    table = {tuple(row.split()[:2]): row.split()[2:] for row in rows}
    # Four head dims, a soft cap or none, in rows or pages, and some for few requests too, whose
    # blocks are larger; slots of plan_batch and pad_lse beside.
    assert table["sm_90a", "decode_sm80"][0] == "39"
    assert last.startswith(f"all: {sum(int(row[0]) for row in table.values())} kernels, ")
    assert err == "" and not (place / "default-cache").exists()


@pytest.mark.parametrize(
    ("what", "row"),
    [
        ("--model", "a model "),
        ("standard", "`--level standard`"),
        pytest.param("full", "`--level full`", marks=pytest.mark.slow),
    ],
)
def test_the_setup_page_says_what_compiling_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, row: str
) -> None:
    """To a tenth, or half of the last unit that the page has."""
    llama = tmp_path / "config.json"
    llama.write_text(
        '{"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, '
        '"num_key_value_heads": 8, "torch_dtype": "bfloat16"}'
    )
    choice = ["--model", str(llama)] if what == "--model" else ["--level", what]
    assert cli.main(["compile", "--arch", "sm_90a", *choice, "--dry-run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    kernels, nbytes = (int(re.findall(p, last)[0]) for p in (r"(\d+) kernels", r"(\d+) MiB"))
    seconds = _seconds(last.split(", ")[1])

    page = (Path(__file__).parents[3] / "docs" / "setup.md").read_text("utf-8")
    (cells,) = (x.split(" | ") for x in page.splitlines() if x.startswith(f"| {row}"))
    assert float(cells[1].removeprefix("about ").replace(",", "")) == pytest.approx(kernels, 0.1)
    unit = 1 if cells[2].endswith(" s") else 60 if cells[2].endswith(" min") else 3600
    assert _seconds(cells[2]) == pytest.approx(seconds, 0.1, unit / 2)
    assert float(cells[3].rstrip(" |").replace(",", "")) == pytest.approx(nbytes, 0.1, 0.5)


def _seconds(text: str) -> float:
    """The seconds that "7 min 46 s of CPU time" or "4 hours" name."""
    units = {"s": 1, "min": 60, "h": 3600, "hours": 3600}
    found = re.findall(r"([\d.]+) (s|min|hours|h)\b", text)
    return sum(float(number) * units[unit] for number, unit in found)

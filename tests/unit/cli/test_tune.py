"""`cupyattn tune` on a GPU that is not there: it takes twice as long as its card says."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_clock import FakeClock
from helpers.patching import replace_all

from cupyattn import array, cli
from cupyattn.bench.inputs import Arrays
from cupyattn.bench.tiles import judge, measure, plans
from cupyattn.bench.tiles.fit import Check
from cupyattn.bench.timing import ContextLost
from cupyattn.choose import card, tuned
from cupyattn.cli import compile as compiling
from cupyattn.cli import pool, tune
from cupyattn.core import device
from cupyattn.core.device import NO_GPU, DeviceProps
from cupyattn.errors import DeviceError
from cupyattn.launch.attention import load_kernels
from cupyattn.launch.driver import enqueue

PROPS = dataclasses.replace(NO_GPU, index=0, name="A GPU of mine")
CASES = 200


class Slow(FakeClock):
    """Says twice of each call what its candidate should take."""

    slower = 2.0

    def preheat(self, seconds: float = 0.0) -> None: ...

    def visit(self, call: Any, calls: int) -> list[float]:
        made = plans.planned(call.func.__self__)
        assert made is not None
        name = made.schedule.candidate
        times = {x.name: x.time for x in made.launcher.candidates(made.requests)}
        time = times[name] if math.isfinite(times[name]) else 300.0
        return [self.slower * time] * calls


def built(tasks: Sequence[Any], *_: Any) -> Any:
    """All kernels are there at once."""
    return ((task, SimpleNamespace(), "") for task in tasks)


@pytest.fixture(autouse=True)
def gpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device 0 on which nothing is loaded, and arrays on the CPU. The folder of cards."""
    real_props, real_blocks = device.device_props, load_kernels._blocks_per_sm

    def props(index: int) -> DeviceProps:
        return PROPS if index >= 0 else real_props(index)

    real_wrapper = plans.wrapper_of

    def wrapper_of(case: Any, *_: Any) -> Any:
        return real_wrapper(case, np.zeros(1 << 30, np.uint8))

    replace_all(
        monkeypatch,
        (real_props, props),
        (enqueue.load_function, lambda *_: 0),
        (real_blocks, lambda function, tiles, _: real_blocks(function, tiles, NO_GPU)),
        (real_wrapper, wrapper_of),
        (compiling.compiled, built),
        (tune.Clock, Slow),
    )
    monkeypatch.setattr(
        load_kernels.LoadedKernel, "max_clusters", lambda self, cluster: self.num_slots // cluster
    )
    monkeypatch.setattr(tune, "Arrays", lambda *_: Arrays("numpy", array.CPU, 1))
    monkeypatch.setattr(Arrays, "normal", lambda self, *shape, **dtype: None)
    monkeypatch.setattr(Arrays, "empty", lambda self, shape, dtype: None)
    monkeypatch.setattr(Arrays, "int32", lambda self, values: values)
    monkeypatch.setattr(Arrays, "uint8", lambda self, values: np.frombuffer(values, np.uint8))
    monkeypatch.setattr(measure, "_answer", lambda *_: np.ones(3))
    monkeypatch.setattr(tune, "_CASES_A_SECOND", CASES / 50)
    monkeypatch.setenv("CUPYATTN_TUNED", "1")
    forget()
    return place / "default-cache" / "cards"


def forget() -> None:
    for loader in (load_kernels.load_kernel, load_kernels.load_mixed, tuned._find, card.known):
        loader.cache_clear()


def tuned_with(*arguments: str) -> int:
    return cli.main(["tune", "--seconds", "50", "--seed", "3", *arguments])


def test_its_own_times_are_kept_and_used(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not card.known(PROPS).file
    assert tuned_with() == 0
    said = capsys.readouterr().out
    path = gpu / "a-gpu-of-mine.json"
    assert "A GPU of mine: plans choose by the times of H100, scaled; seed 3" in said
    assert f"{path}: written, and used from now on" in said
    before, after = (float(x) for x in _figures(said, "estimates are off by").split("%")[:2])
    assert before > 45 and after < 10
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known, file = card.known(PROPS)
    assert file == path and not known.scaled_from and "batches of seed 3" in known.source
    assert known.tiles.keys() >= card.packaged(PROPS).tiles.keys()


def _figures(said: str, name: str) -> str:
    (line,) = (line for line in said.splitlines() if name in line)
    return line.rpartition("median")[2]


def test_times_that_are_no_better_are_not_kept(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = Check({("decode", "x"): [0.01]}, {"decode": [1.01]})
    made = judge.Verdict(card.packaged(PROPS), same, same, 10)
    monkeypatch.setattr(tune, "judge", lambda *_: made)
    assert tuned_with() == 0
    assert "Nothing is written: the times by which plans choose now are as good" in (
        capsys.readouterr().out
    )
    assert not gpu.exists()


def test_it_says_if_what_it_keeps_is_left_out_here(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPYATTN_TUNED", "0")
    assert tuned_with() == 0
    assert "written, and not used where CUPYATTN_TUNED is 0, as here" in capsys.readouterr().out


def test_a_gain_within_what_chance_makes_of_it_is_none() -> None:
    """Choices of two batches in 20 differ, one for the better and one for the worse."""
    regrets = [[1.3, 1.0, *[1.0] * 18], [1.0, 1.15, *[1.0] * 18]]
    checks = [Check({("x", "y"): [0.1 - i / 100]}, {"x": x}) for i, x in enumerate(regrets)]
    assert checks[0].regret - checks[1].regret > 0.007
    packaged = card.packaged(PROPS)
    assert judge.Verdict(packaged, *checks, 20).is_better  # by its estimates
    assert not judge.Verdict(packaged, checks[0], checks[1]._replace(errors={}), 20)._chance() == 0
    worse = checks[1]._replace(errors={("x", "y"): [0.2]})
    assert not judge.Verdict(packaged, checks[0], worse, 20).is_better


@pytest.mark.parametrize(
    ("before", "after", "is_better"),
    [
        ((0.10, 1.010), (0.05, 1.012), True),
        ((0.10, 1.010), (0.05, 1.020), False),
        ((0.05, 1.020), (0.10, 1.010), True),
        ((0.05, 1.010), (0.05, 1.010), False),
    ],
)
def test_choices_count_first_and_then_estimates(
    before: tuple[float, float], after: tuple[float, float], is_better: bool
) -> None:
    checks = [Check({("x", "y"): [error]}, {"x": [regret]}) for error, regret in (before, after)]
    assert judge.Verdict(card.packaged(PROPS), *checks, 1).is_better is is_better


def test_a_file_of_the_users_own(
    gpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert tuned_with("--out", str(path)) == 0
    assert f"{path}: written\n" in capsys.readouterr().out
    assert card.read(path.read_text("utf-8"), "it").name == PROPS.name and not gpu.exists()


@pytest.mark.parametrize("where", ["HOME", "CUPYATTN_CACHE_DIR"])
def test_without_write_access_it_says_so_and_where(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is where the folder would be: not even root could write there."""
    blocked = tmp_path / "home"
    blocked.write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if where == "HOME":
        monkeypatch.delenv("CUPYATTN_CACHE_DIR")
        monkeypatch.setenv("HOME", str(blocked))
        path = blocked / ".cache/cupyattn/cards/a-gpu-of-mine.json"
    else:
        monkeypatch.setenv(where, str(blocked))
        path = blocked / "cards/a-gpu-of-mine.json"
    assert tuned_with() == 1
    said = capsys.readouterr()
    remedy = "give --out FILE, or set CUPYATTN_CACHE_DIR to a folder that can be written"
    assert f"Its times will not be kept: {path} cannot be written; {remedy}" in said.out
    assert f"the times are better, and are not kept: {path} cannot be written (" in said.err
    assert said.err.strip().endswith(remedy)
    out = tmp_path / "out.json"
    assert tuned_with("--out", str(out)) == 0 and out.exists()


def test_kernels_that_are_not_compiled_in_time_leave_their_batches_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first: list[Any] = []

    def some(tasks: Sequence[Any], *_: Any) -> Any:
        first.extend(tasks)
        return ((task, SimpleNamespace(), "") for task in tasks[:1])

    monkeypatch.setattr(compiling, "compiled", some)
    assert tuned_with() == 1
    assert "0 batches were measured, which are too few; wanted 40" in capsys.readouterr().err
    assert len(first) == len(set(first)) > 100


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (pool.Stopped(15), 143, "SIGTERM: nothing is changed"),
        (ContextLost("illegal access"), 1, "the GPU stopped answering: illegal access"),
    ],
)
def test_what_ends_it_early(
    error: Exception,
    status: int,
    text: str,
    gpu: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(tune, "_measure", fail)
    assert tuned_with() == status
    assert text in capsys.readouterr().err and not gpu.exists()


def test_without_a_gpu_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(index: int) -> Any:
        raise DeviceError("device: the CUDA driver reports no usable GPU (none)")

    monkeypatch.setattr(tune, "device_props", none)
    assert tuned_with() == 2
    assert "no usable GPU (none); `cupyattn info` says what is here" in capsys.readouterr().err


def test_candidates_that_differ_are_no_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(range(10**6))
    monkeypatch.setattr(measure, "_answer", lambda *_: np.full(3, (-1.0) ** next(answers)))
    assert tuned_with() == 1
    said = capsys.readouterr()
    assert " differs by 2 " in said.out and "which are too few" in said.err


def test_info_says_that_a_card_was_tuned(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupyattn.cli import info

    assert tuned_with() == 0
    forget()
    found = info._gpu(0)
    assert found["times"]["from"] == "tuned"
    assert found["times"]["file"] == str(gpu / "a-gpu-of-mine.json")
    assert info._times_line(json.loads(json.dumps(found["times"]))).startswith(
        "measured on this machine: "
    )

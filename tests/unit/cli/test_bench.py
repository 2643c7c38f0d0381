"""`cupyattn bench` on the CPU: NumPy's arrays, and a clock that is told the time."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_clock import FakeClock

from cupyattn import array, cli
from cupyattn.bench import between, clock, machine, peers, report, trial, wrappers
from cupyattn.bench import run as running
from cupyattn.bench.candidate import Candidate, Unsupported
from cupyattn.bench.cases import CASES, Case
from cupyattn.bench.check import expect, relative_error
from cupyattn.bench.event_clock import BETWEEN
from cupyattn.bench.inputs import NAN_BITS, Arrays, as_bits, make_inputs
from cupyattn.bench.run import Settings
from cupyattn.bench.timing import ContextLost
from cupyattn.cli import bench

SMALL = Case("small", "decode", "", 3, 1, 37, 4, 2, 16, 16, 4)
LATENT = Case("latent", "mla", "", 2, 1, 21, 8, 1, 576, 512, 4)
KINDS = (
    SMALL,
    replace(SMALL, name="chunks", kind="append", q_len=7),
    replace(SMALL, name="prompts", kind="prefill", q_len=37, page_size=0),
    LATENT,
)
by_name = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


def arrays(seed: int = 1) -> Arrays:
    return Arrays("numpy", array.CPU, seed)


def settings(*cases: Case, **others: Any) -> Settings:
    return replace(Settings(cases, (), 5, float("inf"), rounds=2), **others)


def measured(*cases: Case, clock: Any = None, **others: Any) -> list[list[dict[str, Any]]]:
    return list(running.rows(settings(*cases, **others), arrays(), clock or FakeClock()))


@by_name
def test_each_kind_is_answered_checked_and_timed(case: Case) -> None:
    ((row,),) = measured(case)
    assert row["status"] == "timed", row
    assert 0 < row["error"] < 4e-3 and row["us"] == row["p10"] == row["p90"] == 100
    assert (row["rate"], row["unit"]) == case.rate(100)


@by_name
def test_the_check_sees_what_is_wrong(case: Case) -> None:
    inputs = make_inputs(case, arrays())
    expected = expect(case, inputs, np.random.default_rng(0))
    assert {0, case.requests * case.q_len - 1} <= {item.row for item in expected}
    candidate = wrappers.ours(case, inputs)
    answer = np.array(candidate.output(candidate.call())).astype(np.float32)
    assert relative_error(expected, answer) < 4e-3
    assert relative_error(expected, answer * np.float32(1.01)) > 4e-3
    answer[0, -1, 0, 0] = np.nan
    assert not relative_error(expected, answer) <= 4e-3


def test_inputs_are_fresh_normal_and_scattered() -> None:
    one, same, other = (make_inputs(SMALL, arrays(seed)) for seed in (1, 1, 2))
    assert (as_bits(one.k) == as_bits(same.k)).all() and (as_bits(one.k) != as_bits(other.k)).any()
    assert (as_bits(one.k)[-1] == NAN_BITS).all() and np.isnan(one.v[-1].astype(np.float32)).all()
    owned = one.k[:-1].astype(np.float32)
    assert abs(owned.mean()) < 0.1 and 0.9 < owned.std() < 1.1
    assert one.tables is not None
    assert sorted(one.tables.reshape(-1)) == list(range(one.tables.size))
    assert list(one.indices) == list(one.tables.reshape(-1)) != sorted(one.indices)


def test_long_noise_repeats_after_a_prime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyattn.bench.inputs._PERIOD", 101)
    flat = as_bits(arrays().normal(31, 16)).reshape(-1)
    assert (flat[101:] == flat[:-101]).all() and len(np.unique(flat[:101])) > 90
    assert (flat[16:] != flat[:-16]).any()


def test_work_and_traffic_are_those_of_the_shape() -> None:
    assert SMALL.bytes == 2 * 3 * (2 * 4 * 16 + 2 * 37 * 2 * 16)
    assert LATENT.bytes == 2 * 2 * (8 * (576 + 512) + 21 * 576)  # values are columns of the keys
    chunk = KINDS[1]
    pairs = sum(37 - 7 + row + 1 for row in range(7))
    assert chunk.flops == 3 * pairs * 4 * 2 * (16 + 16)
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.kind for case in CASES} == {"decode", "prefill", "append", "mla"}
    # The widest case fits a GPU of 8 GB, with dense copies for peers.
    assert max(case.bytes for case in CASES) < 2 << 30


class ByName(FakeClock):
    """200 µs for a peer's call, 100 for ours."""

    def visit(self, call: Any, calls: int) -> list[float]:
        call()
        return [200.0 if getattr(call, "is_peer", False) else 100.0] * calls


def offer(error: Exception | None = None, answer: Any = None) -> Any:
    """A peer that answers so, or fails at the call."""

    def candidates(name: str, case: Case, inputs: Any, tried: Any = None) -> list[Candidate]:
        mine = wrappers.ours(case, replace(inputs, out=np.empty_like(inputs.out)))

        def call() -> Any:
            if error:
                raise error
            return mine.call()

        call.is_peer = True  # type: ignore[attr-defined]
        output = mine.output if answer is None else lambda _: answer(mine.output(None))
        return [Candidate(name, "it", call, output)]

    return candidates


def test_a_peer_stands_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "candidates", offer())
    ((mine, peer),) = measured(SMALL, peer_names=("sdpa",), clock=ByName())
    assert (mine["name"], peer["name"]) == ("cupyattn", "sdpa")
    assert peer["us"] == 200 and peer["speedup"] == 2 and "speedup" not in mine
    assert "2.00" in report.table([mine, peer]).splitlines()[-1]


def test_a_wrong_peer_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "candidates", offer(answer=lambda x: x.astype(np.float32) * 2))
    ((_, peer),) = measured(SMALL, peer_names=("sdpa",), clock=ByName())
    assert peer["status"] == "wrong" and "speedup" not in peer and peer["us"] == 200
    assert "WRONG" in report.table([peer])


def test_a_failing_peer_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "candidates", offer(error=RuntimeError("no kernel\nimage")))
    ((mine, peer),) = measured(SMALL, peer_names=("sdpa",))
    assert mine["status"] == "timed"
    assert (peer["status"], peer["note"]) == ("failed", "RuntimeError: no kernel | image")
    assert "failed: RuntimeError" in report.table([mine, peer])


def test_an_absent_peer_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    found = measured(SMALL, peer_names=peers.NAMES)[0]
    assert [row["status"] for row in found] == ["timed", *["unsupported"] * 3]


@pytest.mark.parametrize(
    ("name", "installed", "reason"),
    [
        ("flashinfer", ("torch",), "FlashInfer is not installed"),
        ("flash_attn", ("torch",), "flash-attn is not installed"),
        ("flash_attn", ("torch", "flash_attn"), "576 columns"),
        ("sdpa", ("torch",), "576 columns"),
    ],
)
def test_peers_say_what_they_cannot(
    monkeypatch: pytest.MonkeyPatch, name: str, installed: tuple[str, ...], reason: str
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv(peers.FA3_LIBRARY, raising=False)
    monkeypatch.setattr(peers, "find_spec", lambda asked: asked if asked in installed else None)
    peers._fa3_forward.cache_clear()
    with pytest.raises(Unsupported, match=reason):
        peers.candidates(name, LATENT, make_inputs(LATENT, arrays()))


@pytest.mark.parametrize("case", KINDS[:3], ids=lambda case: case.name)
def test_torch_answers_on_the_cpu(case: Case) -> None:
    pytest.importorskip("torch")
    inputs = make_inputs(case, arrays())
    expected = expect(case, inputs, np.random.default_rng(0))
    candidate = peers.candidates("sdpa", case, inputs)[0]
    assert relative_error(expected, candidate.output(candidate.call())) < 6e-3


@by_name
def test_flash_attention_3_is_given_the_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    seen: dict[str, Any] = {}

    def forward(q: Any, k: Any, v: Any, **named: Any) -> Any:
        seen.update(named, q=q, k=k, v=v)
        return (torch.zeros(case.requests, case.q_len, case.num_qo_heads, case.head_dim_vo),)

    monkeypatch.setattr(peers, "_fa3_forward", lambda: forward)
    monkeypatch.setattr(peers, "absence", lambda name: "")
    inputs = make_inputs(case, arrays())
    (one,) = peers.candidates("flash_attn", case, inputs)
    shape = 1, case.requests * case.q_len, case.num_qo_heads, case.head_dim_vo
    assert one.output(one.call()).shape == shape
    assert seen["softmax_scale"] == case.sm_scale and seen["is_causal"]
    assert ("page_table" in seen) == case.is_paged
    rope = 64 if case.is_latent else case.head_dim_qk
    assert seen["q"].shape[-1] == seen["k"].shape[-1] == rope
    assert seen["v"].shape[-1] == case.head_dim_vo and ("q_v" in seen) == case.is_latent


def test_no_case_begins_after_the_deadline() -> None:
    times = iter([9.0, *[11.0] * 50])
    found = measured(SMALL, LATENT, deadline=10.0, now=lambda: next(times))
    assert [rows[0]["case"] for rows in found] == ["small"]


def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(FakeClock):
        def wait(self) -> None:
            raise ContextLost("illegal address")

    with pytest.raises(ContextLost):
        measured(SMALL, clock=Lost())


class Driver:
    """CuPy's part of the clock: events take the time of a counter, which each launch moves on."""

    def __init__(self, us_of_a_copy: float = 500.0) -> None:
        self.log: list[str] = []
        self.now, self.is_lost = 0.0, False
        driver = self

        class Event:
            def record(self, stream: Any) -> None:
                self.at = driver.now
                driver.log.append("event")

            @property
            def done(self) -> bool:
                return bool(driver.is_late and driver.is_late.pop())

        class Module:
            def __init__(self, code: str) -> None:
                assert all(f"({name}, " in code for name in driver.kernels)

            def get_function(self, name: str) -> Any:
                return lambda grid, block, args: driver.launch(name, grid, args)

        class Memory:
            def memset_async(self, value: int, size: int, stream: Any) -> None:
                driver.log.append(f"flush {size >> 20}")
                driver.now += 90.0

            def copy_from_device_async(self, source: Any, size: int, stream: Any) -> None:
                driver.now += us_of_a_copy

        def synchronize() -> None:
            driver.log.append("wait")
            if driver.is_lost:
                raise RuntimeError("cudaErrorIllegalAddress: an illegal\nmemory access")

        self.kernels = [f"code_{n}" for n in range(between.NUM_KERNELS)]
        self.is_late: list[bool] = []  # whether the GPU has passed an event, the last one first
        self.RawModule = Module
        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=SimpleNamespace(null=contextlib.nullcontext()),
            alloc=lambda size: Memory(),
            get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1e3,
            runtime=SimpleNamespace(
                deviceSynchronize=synchronize,
                getDevice=lambda: 0,
                getDeviceProperties=lambda index: {"multiProcessorCount": 132},
            ),
        )

    def launch(self, name: str, grid: tuple[int], args: tuple[Any, ...]) -> None:
        if name == "hold":
            assert grid == (1,)
            self.log.append(f"hold {int(args[0]) // 1000}")
        else:
            assert grid == (132,)
            self.log.append(name)
        self.now += 5.0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    result = Driver()
    for module in (clock, between):
        monkeypatch.setattr(module, "cupy_module", lambda: result)
    return result


def test_other_code_lies_between_two_calls_and_only_the_call_is_timed(driver: Driver) -> None:
    watch = clock.Clock()

    def call() -> None:
        driver.log.append("call")
        driver.now += 40.0

    visit = watch.visit(call, 2)
    before = ["flush 256", *driver.kernels, "hold 100"]
    assert driver.log == [*before, "event", "call", "event"] * 2
    watch.wait()
    assert watch.read(visit) == pytest.approx([40.0, 40.0])
    # 1 GiB is read and written in 500 µs.
    assert watch.copy_gbps() == pytest.approx(2 * 2**30 / 500e-6 / 1e9)
    driver.is_lost = True
    for ask in (watch.wait, watch.check_alive):
        with pytest.raises(ContextLost, match=r"illegal \| memory access"):
            ask()


def test_a_call_that_the_gpu_waited_for_is_taken_again_behind_a_longer_hold(
    driver: Driver,
) -> None:
    watch = clock.Clock()
    times = iter([900.0, 700.0, 40.0])

    def call() -> None:
        driver.now += next(times)

    driver.is_late = [False, True, True]
    assert watch.read(watch.visit(call, 1)) == pytest.approx([40.0])
    assert [x for x in driver.log if x.startswith("hold")] == ["hold 100", "hold 200", "hold 400"]
    # A call that waits for the GPU itself is always late: it is not asked for ever.
    driver.is_late, driver.log = [True] * 9, []
    watch.visit(lambda: None, 1)
    assert driver.log.count("flush 256") == 5 and "hold 1600" in driver.log


def test_other_code_is_straight_and_as_large_as_is_said() -> None:
    text = between.source()
    assert "for (" not in text and between.CODE_BYTES == pytest.approx(230e3, rel=0.05)
    assert BETWEEN["other_code_bytes"] == between.CODE_BYTES and BETWEEN["calls_a_visit"] == 1


class Gpu(FakeClock):
    """Stands in for the clock of the command."""

    def copy_gbps(self) -> float:
        return 4000.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that finds a GPU, whose arrays are NumPy's, and small cases."""
    monkeypatch.setattr(bench, "Clock", Gpu)
    monkeypatch.setattr(bench, "device_props", lambda index: machine.device_props(-1))
    monkeypatch.setattr(bench, "Arrays", lambda framework, device, seed: arrays(seed))
    monkeypatch.setattr(bench, "CASES", KINDS)


def test_the_command_writes_what_can_be_pasted(
    gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--case", "small,lat*", "--peers", "", "--seed", "3", "--out"]
    assert cli.main([*command, str(tmp_path / "new")]) == 0
    data = json.loads((tmp_path / "new" / report.JSON_NAME).read_text())
    assert [row["case"] for row in data["rows"]] == ["small", "latent"]
    assert {"date", "cupyattn", "commit", "device", "versions", "nvrtc", "copy_gbps"} <= set(data)
    assert data["between"] == BETWEEN
    assert data["seed"] == 3
    out = capsys.readouterr().out
    assert "4,000 GB/s" in out and "small" in out and "latent" in out
    pytest.importorskip("matplotlib")
    assert (tmp_path / "new" / report.PICTURE_NAME).read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_it_says_so(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: Any) -> None:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(report, "draw", absent)
    assert cli.main(["bench", "--case", "small", "--peers", "", "--out", str(tmp_path)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_ours_comes_first_and_then_stands_beside_peers(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "candidates", offer())
    missing = {"flash_attn": "flash-attn is not installed"}
    monkeypatch.setattr(peers, "absence", lambda name: missing.get(name, ""))
    written: list[list[str]] = []

    def tried(name: str, kinds: Any, seconds: float) -> dict[str, dict[str, str]]:
        data = json.loads((tmp_path / report.JSON_NAME).read_text())
        written.append([row["name"] for row in data["rows"]])
        assert (name, list(kinds), seconds) == ("flashinfer", ["decode", "mla"], 4.0)
        return {"decode": {"fa2": "", "": "was not compiled"}, "mla": {"": "was not compiled"}}

    monkeypatch.setattr(bench.trial, "run", tried)
    command = ["bench", "--case", "small,latent", "--compile-seconds", "4", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert written == [["cupyattn", "cupyattn"]]  # before any peer was called
    rows = json.loads((tmp_path / report.JSON_NAME).read_text())["rows"]
    assert [row["name"] for row in rows] == ["cupyattn", "sdpa", "flashinfer"] * 2
    out = capsys.readouterr().out
    assert "flash-attn is not installed" in out
    assert "FlashInfer has not answered for all cases; --compile-seconds 600" in out
    assert "FlashInfer has 4 s to compile what is not prebuilt" in out
    first, second = out.split("beside peers:")
    assert "sdpa it" not in first
    for part in (first, second):
        lines = [line.split() for line in part.splitlines()]
        assert [x[0] for x in lines if "cupyattn" in x[1:2]] == ["small", "latent"]


def test_cases_that_no_peer_came_to_are_named(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "candidates", offer())
    monkeypatch.setattr(peers, "absence", lambda name: "")
    command = ["bench", "--case", "small,latent", "--peers", "torch", "--seconds", "-1", "--out"]
    assert cli.main([*command, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "without peers: latent; give more --seconds" in out
    assert "not measured: latent; give more --seconds" in out


def test_a_case_of_ours_that_fails_beside_peers_keeps_its_figures(tmp_path: Path) -> None:
    record = report.Record(tmp_path, {})
    ((mine,),) = measured(SMALL)
    record.add([mine])
    record.add([mine | {"status": "failed", "note": "out of memory"}])
    assert [row["status"] for row in record.rows] == ["timed", "failed"]
    record.add([mine])
    assert record.rows == [mine]


def test_ctrl_c_leaves_what_was_measured(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.rows

    def rows(*given: Any) -> Any:
        yield next(real(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "rows", rows)
    assert cli.main(["bench", "--case", "small,latent", "--peers", "", "--out", str(tmp_path)]) == 1
    data = json.loads((tmp_path / report.JSON_NAME).read_text())
    assert [row["case"] for row in data["rows"]] == ["small"] and data["stopped"] == "interrupted"


def peer_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program in place of the one that calls a peer for the first time."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport json, os, subprocess, sys, time\n{body}")
    program.chmod(0o755)
    monkeypatch.setattr(trial.sys, "executable", str(program))


def ends(pid: int) -> bool:
    """Whether a process ends. The limit is for one that never does."""
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are seen in /proc")
def test_a_peer_that_compiles_for_too_long_is_ended_with_its_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    body = (
        'print(json.dumps(["decode", "fa2", ""]), flush=True)\n'
        'compiler = subprocess.Popen(["sleep", "3600"])\n'
        f'with open({str(note)!r}, "w") as file: print(compiler.pid, file=file)\n'
        "time.sleep(3600)\n"
    )
    peer_process(tmp_path, monkeypatch, body)
    found = trial.run("flashinfer", ["decode", "mla"], 2.0)
    left = "was not compiled in 2 s"
    assert found == {"decode": {"": left, "fa2": ""}, "mla": {"": left}}
    assert ends(int(note.read_text()))


def test_a_peer_that_crashes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        'print(json.dumps(["decode", "fa2", "RuntimeError: no nvcc"]))\n'
        'print("[half a line")\n'
        "sys.exit(3)\n"
    )
    peer_process(tmp_path, monkeypatch, body)
    left = "its process ended with status 3"
    assert trial.run("flashinfer", ["decode", "mla"], 60.0) == {
        "decode": {"": left, "fa2": "RuntimeError: no nvcc"},
        "mla": {"": left},
    }


def test_the_process_of_a_peer_answers_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(name: str, case: Case, inputs: Any) -> list[Candidate]:
        assert case.requests == 1 and case.kv_len <= 64
        if case.kind == "append":
            raise RuntimeError("no module")
        return offer(ValueError("no kernel") if case.kind == "mla" else None)(name, case, inputs)

    monkeypatch.setattr(peers, "candidates", candidates)
    assert list(trial.outcomes("flashinfer", ["prefill", "append", "mla"], arrays())) == [
        ("prefill", "it", ""),
        ("append", "", "RuntimeError: no module"),
        ("mla", "it", "ValueError: no kernel"),
    ]


def test_what_a_trial_did_not_answer_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "absence", lambda name: "")
    monkeypatch.setattr(peers, "import_module", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chunks = KINDS[1]
    tried = {"flashinfer": {"append": {"fa2": "RuntimeError: no nvcc", "": "was not compiled"}}}
    (rows,) = measured(chunks, peer_names=("flashinfer",), tried=tried)
    assert [(row["status"], row["variant"], row["note"]) for row in rows[1:]] == [
        ("skipped", "fa2", "RuntimeError: no nvcc"),
        ("skipped", "fa3", "was not compiled"),
    ]


def test_a_wrong_answer_of_ours_fails(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "relative_error", lambda *_: float("nan"))
    assert cli.main(["bench", "--case", "small", "--peers", "", "--out", str(tmp_path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    row = json.loads((tmp_path / report.JSON_NAME).read_text())["rows"][0]
    assert (row["status"], row["error"]) == ("wrong", "NaN")


def test_cases_without_time_are_named(
    gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--case", "small,latent", "--peers", "", "--seconds", "-1", "--out"]
    assert cli.main([*command, str(tmp_path)]) == 0
    assert "not measured: latent; give more --seconds" in capsys.readouterr().out


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--case", ""]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        case.name for case in CASES
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fa9"], "--peers: got 'fa9'; wanted some of sdpa, flash_attn, flashinfer"),
        (["--case", "nope*"], "--case: nothing is called 'nope*'; wanted some of decode_64x4k"),
    ],
)
def test_wrong_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cupyattn.errors import DeviceError

    def none(index: int) -> Any:
        raise DeviceError("device: the CUDA driver reports no usable GPU (none)")

    monkeypatch.setattr(bench, "device_props", none)
    assert cli.main(["bench", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "no usable GPU" in err and "`cupyattn demo` runs without a GPU" in err
    assert not (tmp_path / "out").exists()


def test_the_commit_is_that_of_the_checkout_alone(tmp_path: Path) -> None:
    assert machine.git_commit(tmp_path) == "unknown"
    commit = machine.git_commit(Path(machine.__file__).parent)
    assert commit == "unknown" or len(commit.partition("+")[0]) == 40

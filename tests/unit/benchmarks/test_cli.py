"""The benchmark CLI without a GPU: counts, method, bookkeeping, reports, and a whole tiny run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import cli, machine, report, worker
from benchmarks.cases import BY_NAME, CASES, OPS, Case, select
from benchmarks.merge.case import MergeCase
from benchmarks.peers import IMPLEMENTATIONS, prebuild
from benchmarks.results import FILE_NAME, Results, bare_row, summarise, timed_row
from benchmarks.timing import (
    ContextLost,
    Timing,
    describe,
    measure,
    measure_host,
    round_order,
)
from cupyattn.bench import machine as facts

CEILINGS = {"tflops": 800.0, "gbps": 4000.0}
SMALL = Case("small", "prefill", "prefill", 9, 9, 2, num_qo_heads=4, num_kv_heads=2, head_dim_qk=16)
SMALL = replace(SMALL, head_dim_vo=16, causal=True)
VARIETY = [
    SMALL,
    replace(SMALL, causal=False),
    replace(SMALL, q_len=3, kv_len=11),
    replace(SMALL, q_len=5, kv_len=2),
    replace(SMALL, window_left=2),
    replace(SMALL, window_left=0, q_len=2, kv_len=13),
    replace(SMALL, causal=False, window_left=3, q_len=4),
    replace(SMALL, causal=False, mask="packed", q_len=5, kv_len=7),
    replace(SMALL, causal=False, mask="bool", head_dim_vo=8),
    replace(SMALL, api="decode", q_len=1, causal=False, kv_dtype="float8_e4m3fn", batch=1),
]


def _ids(case: Case) -> str:
    shape = f"q{case.q_len}k{case.kv_len}c{case.causal}w{case.window_left}"
    return f"{shape}{case.mask}{case.pos_encoding_mode}{case.kv_dtype}"


def _sees(case: Case, row: int, key: int) -> bool:
    diagonal = row + case.kv_len - case.q_len
    causal = case.causal or case.mask != "none"
    late = causal and key > diagonal
    early = case.window_left >= 0 and key < diagonal - case.window_left
    return not late and not early


@pytest.mark.parametrize("case", VARIETY, ids=_ids)
def test_counts_are_those_of_naive_loops(case: Case) -> None:
    flops = seen_bytes = 0
    width = {"bfloat16": 2, "float8_e4m3fn": 1}[case.kv_dtype]
    for _ in range(case.batch):
        for _ in range(case.num_qo_heads):
            for row in range(case.q_len):
                keys = sum(_sees(case, row, key) for key in range(case.kv_len))
                flops += 2 * case.head_dim_qk * keys + 2 * case.head_dim_vo * keys
        for _ in range(case.num_kv_heads):
            for key in range(case.kv_len):
                if any(_sees(case, row, key) for row in range(case.q_len)):
                    seen_bytes += width * (case.head_dim_qk + case.head_dim_vo)
        seen_bytes += 2 * case.q_len * case.num_qo_heads * (case.head_dim_qk + case.head_dim_vo)
        bits = np.zeros(case.q_len * case.kv_len, bool)
        seen_bytes += {"none": 0, "bool": bits.size, "packed": np.packbits(bits).size}[case.mask]
    assert case.flops == flops
    assert case.bytes == seen_bytes


def test_rates_follow_the_convention_of_published_figures() -> None:
    # Figures of another script: 4x4k causal in 1493.76 µs is 368.125 TFLOP/s by exact pairs, and a
    # decode over 131072 bfloat16 keys in 141.024 µs is 3806.95 GB/s.
    assert BY_NAME["4x4k"].flops / 1493.7599897 / 1e6 == pytest.approx(368.1247559, rel=1e-6)
    assert BY_NAME["4x4k"].quoted_flops == 4 * 4 * 4096**2 * 128 * 32 // 2
    assert BY_NAME["kv128k"].bytes / 141.02399 / 1e3 == pytest.approx(3806.95, rel=1e-4)
    assert BY_NAME["1x16k_full"].quoted_flops == 4 * 16384**2 * 128 * 32
    assert BY_NAME["4x4k_window1023"].quoted_flops == BY_NAME["4x4k_window1023"].flops


def test_floor_is_the_larger_of_work_and_traffic() -> None:
    prefill, decode = BY_NAME["1x16k"], BY_NAME["kv32k"]
    assert prefill.floor_us(800, 4000) == pytest.approx(prefill.flops / 800e12 * 1e6)
    assert decode.floor_us(800, 4000) == pytest.approx(decode.bytes / 4000e9 * 1e6)


def test_the_table_of_cases_is_sound() -> None:
    assert len(BY_NAME) == len(CASES)
    for case in CASES:
        assert case.op in OPS
        if not isinstance(case, MergeCase):
            assert case.num_qo_heads % case.num_kv_heads == 0
        peers = {peer.partition(":")[0] for peer, _ in case.goals}
        assert peers <= {"best", *IMPLEMENTATIONS}
        if isinstance(case, Case):
            assert case.api == "prefill" or (case.q_len == 1 and not case.causal)
        assert case.pairs > 0


def test_select_takes_ops_and_globs_in_table_order() -> None:
    assert {case.op for case in select(["host"])} == {"host"}
    assert [case.name for case in select(["decode"], ["kv*k"])] == ["kv4k", "kv32k", "kv128k"]
    assert len(select(["decode"], ["append_*"])) == 6
    assert select(["prefill"], ["kv*"]) == []


def test_parse_splits_lists_and_keeps_defaults(tmp_path: Any) -> None:
    before = time.time()
    args = cli.parse(
        ["--op", "prefill,decode", "--case", "4x4k*, kv*", "--peers", "ours,fa3", "--out",
         str(tmp_path), "--seconds", "100", "--rounds", "7"]
    )  # fmt: skip
    assert args.op == ["prefill", "decode"] and args.case == ["4x4k*", "kv*"]
    assert args.peers == ["ours", "fa3"] and args.rounds == 7
    assert before + 100 <= args.deadline <= time.time() + 100
    plain = cli.parse(["--out", str(tmp_path)])
    assert plain.op == list(OPS) and plain.peers == list(IMPLEMENTATIONS) and plain.rounds == 5


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--op", "prefil", "--out", "x"], "unknown op"),
        (["--peers", "ours,fa5", "--out", "x"], "fa5"),
        (["--peers", "", "--out", "x"], "unknown implementation"),
        (["--case", "nothing*", "--out", "x"], "no case"),
        (["--rounds", "0", "--out", "x"], "wanted 1 or more"),
        (["--op", "host"], "--out"),
    ],
)
def test_parse_refuses(argv: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.parse(argv)
    assert said in capsys.readouterr().err


def test_list_prints_cases_without_running(capsys: Any) -> None:
    assert cli.main(["--list", "--op", "decode", "--case", "kv4k"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["decode", "kv4k"]


class FakeWatch:
    """A stopwatch whose every call takes the µs that the call returns; it keeps the order."""

    def __init__(self) -> None:
        self.order: list[float] = []
        self.alive = True

    def visit(self, call: Any, calls: int) -> list[float]:
        visit = [call() for _ in range(calls)]
        self.order.append(visit[0])
        return visit

    def read(self, visit: list[float]) -> list[float]:
        return visit

    def wait(self) -> None:
        pass

    def check_alive(self) -> None:
        if not self.alive:
            raise ContextLost("gone")

    def preheat(self) -> None:
        pass


def test_rounds_are_interleaved_there_and_back() -> None:
    watch = FakeWatch()
    timings = measure([lambda: 5000.0, lambda: 400.0], watch, rounds=2, deadline=float("inf"))
    assert round_order(3) == [0, 1, 2, 2, 1, 0]
    assert watch.order == [5000.0, 400.0, *[5000.0, 400.0, 400.0, 5000.0] * 2]
    # A visit is one call, however short: no sample follows another of its own code.
    assert [len(t.samples) for t in timings] == [4, 4]


def test_deadline_ends_the_rounds_after_the_first() -> None:
    timings = measure([lambda: 5000.0], FakeWatch(), rounds=50, deadline=1.0, now=lambda: 2.0)
    assert len(timings[0].samples) == 2


def test_a_failing_call_drops_out_and_the_others_go_on() -> None:
    def fail() -> float:
        raise ValueError("no kernel\nfor this")

    timings = measure([fail, lambda: 3000.0], FakeWatch(), rounds=3, deadline=float("inf"))
    assert timings[0].error == "ValueError: no kernel | for this" and not timings[0].samples
    assert timings[1].error is None and len(timings[1].samples) == 6
    hosts = measure_host([fail, lambda: None], lambda: None, lambda: None, rounds=2)
    assert hosts[0].error and len(hosts[1].samples) == 4 and min(hosts[1].samples) > 0


def test_a_lost_context_leaves_the_loop() -> None:
    def fail() -> float:
        raise RuntimeError("illegal memory access")

    watch = FakeWatch()
    watch.alive = False
    with pytest.raises(ContextLost):
        measure([fail], watch, rounds=1, deadline=float("inf"))


def test_describe_keeps_one_bounded_line() -> None:
    assert describe(ValueError("a\n\n b\nc\nd")) == "ValueError: a | b | c"
    assert len(describe(ValueError("x" * 9999))) == 400


def _row(case: Case, peer: str, us: float, relative: float = 1e-3) -> dict[str, Any]:
    from benchmarks.oracle import Verdict

    timing = Timing([us * 0.9, us, us * 1.2])
    return timed_row(case, peer, "single", timing, Verdict(relative, 0.01), True, CEILINGS)


def test_summary_counts_only_correct_rows() -> None:
    case = BY_NAME["kv4k"]
    rows = [
        _row(case, "ours", 10.0),
        _row(case, "fa3", 9.0),
        _row(case, "flashinfer_fa2", 5.0, relative=float("nan")),
        _row(case, "flashinfer_fa2", 12.0),
        bare_row(case, "sdpa_flash", "", "failed", "broken"),
    ]
    assert [row["status"] for row in rows] == ["timed", "timed", "wrong", "timed", "failed"]
    summary = summarise(case, rows)
    assert summary["best_peer"] == "fa3:single"
    assert summary["best_peer_over_ours"] == pytest.approx(0.9)
    goals = {goal["peer"]: (goal["ratio"], goal["met"]) for goal in summary["goals"]}
    assert goals["flashinfer_fa2"] == (pytest.approx(1.2), True)
    assert goals["fa3"] == (pytest.approx(0.9), False)


def test_summary_without_ours_is_no_claim() -> None:
    summary = summarise(BY_NAME["kv4k"], [_row(BY_NAME["kv4k"], "fa3", 9.0)])
    assert summary["best_peer_over_ours"] is None
    assert [goal["met"] for goal in summary["goals"]] == [None, None]


def test_result_file_survives_a_second_process(tmp_path: Any) -> None:
    results = Results(tmp_path / FILE_NAME)
    results.add_case(SMALL, [_row(SMALL, "ours", 3.0, relative=float("inf"))], seconds=1.0)
    results.data["lost"].append({"case": "*", "label": "fa3", "stage": "build", "reason": "-11"})
    results.save()
    assert json.loads((tmp_path / FILE_NAME).read_text())["rows"][0]["relative_error"] == "inf"
    again = Results(tmp_path / FILE_NAME)
    assert again.finished(SMALL) and not again.finished(BY_NAME["kv4k"])
    assert "-11" in (again.why_lost(BY_NAME["kv4k"], "fa3") or "")
    assert again.why_lost(SMALL, "fa3:fwd") is None


def _fake_results(folder: Any) -> Results:
    results = Results(folder / FILE_NAME)
    smi = {"name": "A GPU", "driver_version": "1.2"}
    results.data |= {"header": {"smi": smi, "versions": {"torch": "2"}}, "ceilings": CEILINGS}
    prefill, host = BY_NAME["4x4k"], BY_NAME["host_decode_torch_out"]
    results.add_case(
        prefill,
        [
            _row(prefill, "ours", 1000.0),
            _row(prefill, "flashinfer_fa2", 1500.0),
            _row(prefill, "flashinfer_fa2", 1400.0),
            _row(prefill, "sdpa_flash", 100.0, relative=1.0),
            bare_row(prefill, "fa3", "", "failed", "no library"),
        ],
    )
    results.add_case(host, [_row(host, "ours", 14.0)])
    results.data["lost"].append({"case": "kv4k", "label": "x:y", "stage": "check", "reason": "z"})
    results.save()
    return results


def test_table_of_a_fake_result(tmp_path: Any, capsys: Any) -> None:
    _fake_results(tmp_path)
    text = report.write(tmp_path / FILE_NAME, tmp_path)
    assert (tmp_path / report.TABLE_NAME).read_text() == text and text in capsys.readouterr().out
    lines = {" ".join(line.split()[:2]): line for line in text.splitlines() if line}
    assert "A GPU, driver 1.2" in text and "800 TFLOP/s" in text
    assert "1.40x the best peer" in lines["4x4k ours:single"]
    assert "WRONG" in lines["4x4k sdpa_flash:single"]
    assert lines["4x4k fa3"].endswith("failed: no library")
    (met,) = (line for line in text.splitlines() if ">= 1.00x flashinfer_fa2" in line)
    assert "1.40x" in met and lines["4x4k >="].split()[3:] == ["fa3", "-", "-"]
    assert lines["host_decode_torch_out host"].endswith("NO")
    assert "lost: kv4k x:y in check: z" in text


def test_chart_shows_the_fastest_correct_variant(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    rows = _fake_results(tmp_path).rows
    case = BY_NAME["4x4k"]
    bars = report._bars(rows, "prefill", "tflops")
    fa2 = case.quoted_flops / 1400 / 1e6
    assert bars == {
        "4x4k": {
            "ours": pytest.approx(case.quoted_flops / 1000 / 1e6),
            "flashinfer_fa2": pytest.approx(fa2),
        }
    }
    assert report.main([str(tmp_path / FILE_NAME)]) == 0
    assert (tmp_path / report.CHART_NAME).read_bytes().startswith(b"\x89PNG")


def test_report_of_nothing_is_a_report(tmp_path: Any) -> None:
    assert "case" in report.write(tmp_path / FILE_NAME, tmp_path)
    assert not (tmp_path / report.CHART_NAME).exists()


def _watched(tmp_path: Any, code: str, until: float, last: float) -> str | None:
    progress = tmp_path / worker.PROGRESS_NAME
    progress.write_text(json.dumps({"until": until, "case": "kv4k", "label": "fa3:fwd"}))
    return cli._watch([sys.executable, "-S", "-c", code], tmp_path, progress, last)


def test_supervisor_sees_how_a_worker_ends(tmp_path: Any) -> None:
    later = time.time() + 60
    assert _watched(tmp_path, "pass", later, later) is None
    assert _watched(tmp_path, "import os; os._exit(75)", later, later) == "exit status 75"
    killed = _watched(tmp_path, "import os; os.kill(os.getpid(), 11)", later, later)
    assert killed == "exit status -11"
    hang = "import time; time.sleep(60)"
    assert "no progress" in (_watched(tmp_path, hang, time.time() - 1, later) or "")
    assert "budget" in (_watched(tmp_path, hang, later, time.time() - 1) or "")


def test_supervisor_starts_again_without_the_culprit(tmp_path: Any, monkeypatch: Any) -> None:
    ends = ["exit status -11", "exit status 75", None]
    stages = [("build", "fa3"), ("check", "ours:single"), None]

    def watch(command: list[str], root: Any, progress: Any, last: float) -> str | None:
        stage = stages.pop(0)
        if stage:
            entry = {"stage": stage[0], "case": "kv4k", "label": stage[1]}
            progress.write_text(json.dumps(entry))
        return ends.pop(0)

    monkeypatch.setattr(cli, "_watch", watch)
    args = cli.parse(["--out", str(tmp_path)])
    assert cli.supervise(args, []) == 0
    results = Results(tmp_path / FILE_NAME)
    other = BY_NAME["kv32k"]
    assert results.why_lost(other, "fa3") and not results.why_lost(other, "ours:single")
    assert results.why_lost(BY_NAME["kv4k"], "ours:single")


def test_supervisor_gives_up_on_a_worker_that_never_starts(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cli, "_watch", lambda *_: "exit status 1")
    assert cli.supervise(cli.parse(["--out", str(tmp_path)]), []) == 1


def test_prebuild_needs_each_module_once() -> None:
    modules = prebuild.modules(CASES, ["fa2", "fa3"])
    assert len(modules) == len(set(modules))
    plain = prebuild.Module("single_prefill")
    assert prebuild.modules([BY_NAME["kv4k"]], ["fa2"])[0] == plain
    assert prebuild.modules([BY_NAME["append_q16_kv8k"]], ["fa2"]) == [plain]
    assert replace(plain, position_mode=2) in modules
    assert prebuild.modules([BY_NAME["4x4k_alibi"], BY_NAME["kv4k"]], ["fa3"]) == []
    assert prebuild.Module("quantization") in prebuild.modules([BY_NAME["4x4k_mask_bits"]], ["fa2"])


def test_header_records_what_it_can_and_why_not(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no such tool")

    for module in (machine, facts):
        monkeypatch.setattr(module, "run", refuse)
    found = machine.header(None)
    assert found["commit"] == "unknown" and found["smi"] == {"error": "OSError: no such tool"}
    assert found["versions"]["numpy"] == np.__version__
    assert machine.header("abc")["commit"] == "abc"

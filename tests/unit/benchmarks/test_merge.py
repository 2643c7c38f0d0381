"""Benchmarks of merges without a GPU: traffic, the oracle, and a whole run of each case."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn
from benchmarks import cases, cli, oracle, peers, timing, worker
from benchmarks.merge import candidates
from benchmarks.merge.case import MERGE_CASES, MergeCase
from benchmarks.peers import prebuild
from benchmarks.results import FILE_NAME, Results
from cupyattn import reference

torch = pytest.importorskip("torch")

PAIR = MergeCase("small", "merge", "pair", 40, 2, num_heads=3, head_dim=8)
STATES = replace(PAIR, name="small states", api="states", num_states=5)


def test_traffic_is_each_state_once() -> None:
    inputs = candidates.make_merge_inputs(STATES, "cpu")
    answer = cupyattn.merge_states(inputs.v, inputs.s)
    arrays = (inputs.v, inputs.s, *answer)
    assert STATES.bytes == sum(x.numel() * x.element_size() for x in arrays)
    assert STATES.flops == 2 * inputs.v.numel()
    # The figures of other scripts: 30.6 µs are 3294 GB/s... of 100.8 MB, without the LSE.
    assert cases.BY_NAME["merge_n4096_pair"].bytes == pytest.approx(3294e9 * 30.6e-6, rel=0.02)
    assert cases.BY_NAME["merge_n512_states16"].floor_us(800, 4000) == pytest.approx(18.1, rel=0.01)


def test_cases_are_in_the_table() -> None:
    assert set(MERGE_CASES) <= set(cases.CASES)
    for case in MERGE_CASES:
        assert case.is_host == (case.op == "host_merge") and case.pairs > 0
        assert peers.offering(case) == ("ours", "flashinfer_fa2")
    built = prebuild.modules(MERGE_CASES, ("fa2", "fa3", "xqa"))
    assert built == [prebuild.Module("cascade")]


@pytest.mark.parametrize("case", [PAIR, STATES], ids=lambda case: case.api)
def test_the_oracle_is_the_reference(case: MergeCase) -> None:
    inputs = candidates.make_merge_inputs(case, "cpu")
    v, s = reference.merge_states(inputs.v.double().numpy(), inputs.s.double().numpy())
    wanted = torch.from_numpy(np.concatenate((v, s[..., None]), -1))[None]
    expected = candidates.expect_merge(case, inputs)
    for item in expected:
        np.testing.assert_allclose(item.answer, wanted[0, item.rows], rtol=1e-9)
    assert oracle.judge(expected, wanted).ok
    assert not oracle.judge(expected, wanted * 1.01).ok
    assert not oracle.judge(expected, wanted.roll(1, dims=1)).ok
    for column in (0, -1):  # v alone, s alone
        wrong = wanted.clone()
        wrong[..., column] += 1
        assert not oracle.judge(expected, wrong).ok


@pytest.fixture
def on_cpu(tmp_path: Any, monkeypatch: Any) -> Any:
    """A runner of one case, with FlashInfer served by our own functions: rows by label."""
    names = ("merge_state", "merge_states")
    flashinfer = SimpleNamespace(**{name: getattr(cupyattn, name) for name in names})
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(timing, "HOST_CALLS", 2)
    make = worker.make_merge_inputs
    monkeypatch.setattr(worker, "make_merge_inputs", lambda case: make(case, "cpu"))
    monkeypatch.setattr(worker.machine, "gpu_state", dict)
    results = Results(tmp_path / FILE_NAME)
    results.data["ceilings"] = {"tflops": 800.0, "gbps": 4000.0}
    args = cli.parse(["--out", str(tmp_path), "--rounds", "1", "--seconds", "60"])
    clock: Any = SimpleNamespace(
        visit=lambda call, calls: [float(call() is not None) * 100 for _ in range(calls)],
        read=list,
        preheat=lambda seconds: None,
        **dict.fromkeys(("wait", "check_alive"), lambda: None),
    )

    def run(case: MergeCase) -> dict[str, Any]:
        worker._one_case(case, args, results, clock, worker.Progress(tmp_path))
        results.save()
        return {row["peer"]: row for row in results.rows if row["case"] == case.name}

    return run


@pytest.mark.parametrize("case", [PAIR, STATES], ids=lambda case: case.api)
def test_a_whole_run(case: MergeCase, on_cpu: Any, monkeypatch: Any) -> None:
    rows = on_cpu(case)
    assert {peer: row["status"] for peer, row in rows.items()} == {
        "ours": "timed",
        "flashinfer_fa2": "timed",
    }
    assert rows["ours"]["best_peer_over_ours"] == 1.0 and rows["ours"]["repeatable"]
    rows = on_cpu(replace(case, name="host", op="host_merge", out=True, host_goal_us=1e9))
    assert (rows["ours"]["status"], rows["flashinfer_fa2"]["status"]) == ("timed", "unsupported")
    assert "gbps" not in rows["ours"]
    name = "merge_state" if case.api == "pair" else "merge_states"
    monkeypatch.setattr(
        cupyattn, name, lambda v, s, *_: (v * 0, s) if v.ndim == 3 else (v[:, 0], s[:, 0])
    )
    assert on_cpu(replace(case, name="wrong"))["ours"]["status"] == "wrong"

"""A whole tiny benchmark run on the CPU, and the float64 oracle that it is checked by."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.fake_clock import FakeClock
from helpers.share import slow_unless

import cupyattn
from benchmarks import cli, worker
from benchmarks.cases import Case
from benchmarks.results import FILE_NAME, Results
from cupyattn.reference import attention

CEILINGS = {"tflops": 800.0, "gbps": 4000.0}
SMALL = Case("small", "prefill", "prefill", 9, 9, 2, num_qo_heads=4, num_kv_heads=2, head_dim_qk=16)
SMALL = replace(SMALL, head_dim_vo=16, causal=True)


def _ids(case: Case) -> str:
    shape = f"q{case.q_len}k{case.kv_len}w{case.window_left}"
    return f"{shape}{case.mask}{case.pos_encoding_mode}{case.kv_dtype}"


def _numpy(x: Any) -> np.ndarray:
    return x.float().numpy().astype(np.float64)


def _reference(case: Case, inputs: Any, b: int) -> np.ndarray:
    mask = None if inputs.mask is None else inputs.mask[b].numpy()
    out, _ = attention(
        _numpy(inputs.q[b]),
        _numpy(inputs.k[b]),
        _numpy(inputs.v[b]),
        causal=case.causal,
        window_left=case.window_left,
        mask=mask,
        logits_soft_cap=case.logits_soft_cap,
        pos_encoding_mode=case.pos_encoding_mode,
    )
    return np.asarray(out)


ORACLE_CASES = [
    replace(SMALL, q_len=37, kv_len=37),
    replace(SMALL, q_len=5, kv_len=40),
    replace(SMALL, q_len=33, kv_len=33, window_left=6),
    replace(SMALL, q_len=20, kv_len=33, pos_encoding_mode="ROPE_LLAMA"),
    replace(SMALL, q_len=20, kv_len=33, pos_encoding_mode="ALIBI", num_qo_heads=6),
    replace(SMALL, q_len=20, kv_len=20, logits_soft_cap=0.7, head_dim_vo=8),
    replace(SMALL, q_len=20, kv_len=21, causal=False, mask="packed"),
    replace(SMALL, q_len=1, kv_len=50, causal=False, kv_dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize(
    "case", ORACLE_CASES, ids=lambda case: f"{case.pos_encoding_mode}{_ids(case)}"
)
def test_oracle_agrees_with_the_reference(case: Case) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import oracle
    from benchmarks.inputs import make_inputs

    inputs = make_inputs(case, "cpu")
    expected = oracle.expect(case, inputs)
    assert sorted(item.request for item in expected) == list(range(case.batch))
    wanted = np.stack([_reference(case, inputs, b) for b in range(case.batch)])
    for item in expected:
        np.testing.assert_allclose(item.answer.numpy(), wanted[item.request][item.rows], rtol=1e-9)
    answer = torch.from_numpy(wanted)
    assert oracle.judge(expected, answer).ok
    assert not oracle.judge(expected, answer * 1.01).ok
    answer[-1, -1, 0, 0] = float("nan")
    assert not oracle.judge(expected, answer).ok


def test_sampled_rows_hold_both_ends() -> None:
    pytest.importorskip("torch")
    from benchmarks.oracle import sample_rows

    assert sample_rows(5, 16) == [0, 1, 2, 3, 4]
    rows = sample_rows(4096, 16, seed=3)
    assert len(rows) == 16 and rows[0] == 0 and rows[-1] == 4095 and rows == sorted(set(rows))


def test_packed_masks_are_little_endian_bits() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.inputs import pack_little

    bits = np.random.default_rng(0).random((3, 77)) < 0.5
    wanted = np.packbits(bits, axis=1, bitorder="little")
    np.testing.assert_array_equal(pack_little(torch.from_numpy(bits)).numpy(), wanted)


def _serve(q: Any, k: Any, v: Any, *, out: Any = None, **named: Any) -> Any:
    """What cupyattn's single-request functions mean, on CPU torch tensors."""
    import torch

    rows = q if q.ndim == 3 else q[None]
    mask = named.pop("custom_mask", None)
    packed = named.pop("packed_custom_mask", None)
    if mask is not None:
        named["mask"] = mask.numpy()
    if packed is not None:
        shape = rows.shape[0], k.shape[0]
        bits = np.unpackbits(packed.numpy(), count=shape[0] * shape[1], bitorder="little")
        named["mask"] = bits.astype(bool).reshape(shape)
    scales = {"scale_k": named.pop("k_scale", None), "scale_v": named.pop("v_scale", None)}
    answer, _ = attention(_numpy(rows), _numpy(k), _numpy(v), **named, **scales)
    result = torch.from_numpy(np.asarray(answer)).to(torch.bfloat16).view(*q.shape[:-1], -1)
    return result if out is None else out.copy_(result)


# Each case once, with or without an output; the rest is slow.
@pytest.mark.parametrize(
    ("case", "out"),
    slow_unless(
        lambda x: x[1] == (ORACLE_CASES.index(x[0]) % 2 == 0),
        product(ORACLE_CASES, [True, False]),
        is_several=True,
    ),
    ids=lambda x: str(x) if isinstance(x, bool) else f"{x.pos_encoding_mode}{_ids(x)}",
)
def test_a_whole_run_of_one_case(case: Case, out: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """Ours, here served by the reference, is given all that the case asks for, checked, timed."""
    pytest.importorskip("torch")
    from benchmarks.inputs import make_inputs

    decode = case.q_len == 1
    case = replace(case, out=out, batch=1 if decode else case.batch)
    case = replace(case, api="decode" if decode else "prefill")
    for name in ("single_prefill_with_kv_cache", "single_decode_with_kv_cache"):
        monkeypatch.setattr(cupyattn, name, _serve, raising=False)
    monkeypatch.setattr(worker, "make_inputs", lambda asked: make_inputs(asked, "cpu"))
    monkeypatch.setattr(worker.machine, "gpu_state", dict)
    monkeypatch.delenv("CUPYATTN_BENCH_FA3", raising=False)
    clock: Any = FakeClock()
    results = Results(tmp_path / FILE_NAME)
    results.data["ceilings"] = CEILINGS
    args = cli.parse(["--peers", "ours,fa3,sdpa_flash", "--rounds", "2", "--out", str(tmp_path)])
    worker._one_case(case, args, results, clock, worker.Progress(tmp_path))

    by_peer = {row["peer"]: row for row in results.rows}
    assert set(by_peer) == {"ours", "fa3", "sdpa_flash"}
    ours = by_peer["ours"]
    assert ours["status"] == "timed", ours
    assert ours["us"] == 100 and ours["repeatable"] and 0 < ours["relative_error"] < 4e-3
    assert by_peer["fa3"]["status"] == "unsupported"
    served = case.is_plain and case.q_len == case.kv_len
    if served:
        assert by_peer["sdpa_flash"]["status"] == "timed", by_peer["sdpa_flash"]
        assert ours["best_peer_over_ours"] == 1.0
    else:
        assert by_peer["sdpa_flash"]["status"] == "unsupported"


def test_a_wrong_answer_and_a_spent_budget_are_recorded(tmp_path: Any, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    from benchmarks.inputs import make_inputs

    def forget_to_write(q: Any, k: Any, v: Any, *, out: Any, **_: Any) -> Any:
        return out

    monkeypatch.setattr(cupyattn, "single_prefill_with_kv_cache", forget_to_write, raising=False)
    monkeypatch.setattr(worker, "make_inputs", lambda asked: make_inputs(asked, "cpu"))
    monkeypatch.setattr(worker.machine, "gpu_state", dict)
    clock: Any = FakeClock()
    results = Results(tmp_path / FILE_NAME)
    results.data["ceilings"] = CEILINGS
    args = cli.parse(["--peers", "ours", "--rounds", "1", "--out", str(tmp_path)])
    progress = worker.Progress(tmp_path)
    worker._one_case(SMALL, args, results, clock, progress)
    late = replace(SMALL, name="late")
    args.deadline = 0.0
    worker._one_case(late, args, results, clock, progress)
    variants = [(row.get("variant"), row["status"]) for row in results.rows]
    assert variants == [("single_x2", "wrong"), ("ragged", "timed"), ("", "skipped")]
    results.save()  # NaN errors must not break the file
    assert json.loads((tmp_path / FILE_NAME).read_text())["rows"][0]["relative_error"] == "nan"

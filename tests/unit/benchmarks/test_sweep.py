"""The sweep without a GPU: draws, the order of visits, figures, and its command line."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import cli, peers
from benchmarks.batch.case import BatchCase
from benchmarks.batch.oracle import checked_requests
from benchmarks.peers import flashmla as flashmla_library
from benchmarks.peers import prebuild
from benchmarks.results import FILE_NAME, Results
from benchmarks.sweep import cli as sweep
from benchmarks.sweep import profiles
from benchmarks.sweep.draw import _MAX_FLOPS, _MAX_KV_BYTES, draw_case, draw_cases, schedule_of
from benchmarks.sweep.groups import BY_NAME, GROUPS, judge
from benchmarks.sweep.models import MODELS, Model
from benchmarks.sweep.plans import instances, plan_of, text_bytes
from benchmarks.sweep.predict import as_on, predict
from benchmarks.sweep.summary import figures, prediction_errors, summarise_sweep, table
from benchmarks.timing import random_order
from benchmarks.worker import PROGRESS_NAME

# The groups that are drawn where none is named.
IN_TURN = [name for name in GROUPS if name not in BY_NAME]


def test_draws_are_functions_of_seed_and_number() -> None:
    cases = draw_cases(3, 30)
    assert cases == draw_cases(3, 40)[:30] and cases[7] == draw_case(3, 7)
    assert len({case.name for case in cases}) == 30
    other = draw_cases(4, 30)
    assert sum(a.requests == b.requests for a, b in zip(cases, other, strict=True)) < 3


def test_drawn_cases_are_valid_and_bounded() -> None:
    cases = draw_cases(0, 300)
    for case in cases:
        assert case.op in peers._BATCH and case.is_paged == (case.page_size > 0)
        assert case.num_qo_heads % case.num_kv_heads == 0
        assert all(0 < q <= kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True)) or (
            not case.causal and case.op == "ragged"
        ), case.name
        assert case.api != "decode" or set(case.q_lens) == {1}
        assert case.api != "verify" or (len({*case.q_lens}) == 1 and 2 <= case.q_lens[0] <= 8)
        assert case.api not in ("ragged", "mixed") or not case.sinks
        assert case.op not in ("kvcache", "flash_mla") or len({*case.q_lens}) == 1
        width = case.num_kv_heads * (case.head_dim_qk + case.head_dim_vo)
        kv_bytes = case.kv_offsets[-1] * width * case.groups[0].kv_itemsize
        assert case.batch == 1 or kv_bytes <= _MAX_KV_BYTES
        assert case.batch == 1 or case.flops <= _MAX_FLOPS
        # FlashInfer's wrappers of mixed batches take the chunks first.
        if case.op == "mixed":
            assert case.q_lens == sorted(case.q_lens, key=lambda q_len: q_len == 1)
    drawn = Counter(map(schedule_of, cases))
    assert set(drawn) == {"decode", "verify", "prompt", "append", "mixed", *IN_TURN}
    assert min(drawn.values()) > 4
    assert {case.kv_dtype for case in cases} == {"bfloat16", "float16", "float8_e4m3fn"}
    assert {1, 16, 32, 64, 128} <= {case.page_size for case in cases}
    assert any(case.sinks for case in cases) and any(case.logits_soft_cap for case in cases)
    assert any(case.window_left >= 0 for case in cases)
    assert max(case.batch for case in cases) > 200 and max(map(max, map(_kv_lens, cases))) > 60000


def _kv_lens(case: BatchCase) -> list[int]:
    return case.kv_lens


def test_shards_divide_query_heads_and_repeat_key_heads() -> None:
    model = Model("m", 28, 4)
    assert model.shard(2) == Model("m", 14, 2)
    assert model.shard(4) == Model("m", 7, 1)
    assert model.shard(8) is None  # 28 heads on 8 GPUs
    assert Model("m", 16, 2).shard(8) == Model("m", 2, 1)
    assert Model("m", 96, 6).shard(4) is None  # 6 heads on 4 GPUs
    assert all(model.shard(1) == model for model in MODELS)


def test_random_order_visits_each_twice_and_differs() -> None:
    order = random_order(1)
    rounds = [order(5) for _ in range(20)]
    assert all(Counter(found) == Counter({i: 2 for i in range(5)}) for found in rounds)
    assert len({tuple(found) for found in rounds}) > 15
    assert [random_order(1)(5)] == [rounds[0]] and random_order(2)(5) != rounds[0]


def test_checked_requests_hold_the_extremes() -> None:
    lengths = (5, 9, 2, 7, 30, 4, 4, 4)
    case = BatchCase("c", "append", "paged", tuple((1, 2, n) for n in lengths), 4)
    assert checked_requests(case) == list(range(8))
    found = checked_requests(replace(case, checked=5))
    assert {0, 2, 4, 7} <= set(found) and len(found) == 5 and found == sorted(found)
    assert checked_requests(replace(case, checked=20)) == list(range(8))


def test_oracle_knows_sinks_and_float16() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.batch.oracle import expect_batch
    from cupyattn.reference import attention

    case = BatchCase(
        "sinks", "append", "paged", ((2, 3, 9),), 4, 4, 2, 16, 16, causal=True, dtype="float16",
        kv_dtype="float16", sinks=True,
    )  # fmt: skip
    inputs = make_batch_inputs(case, "cpu")
    assert inputs.q.dtype == inputs.k.dtype == torch.float16
    for b, item in enumerate(expect_batch(case, inputs)):
        one = inputs.request(b)
        q, k, v = (x[0].double().numpy() for x in (one.q, one.k, one.v))
        wanted, _ = attention(q, k, v, causal=True, sinks=inputs.sinks.double().numpy())
        rows = [row - case.q_offsets[b] for row in item.rows]
        np.testing.assert_allclose(item.answer, wanted[rows], rtol=1e-9)


def test_groups_are_drawn_in_turn_and_alike() -> None:
    """A name gives its case again, whatever groups it was drawn among."""
    names = IN_TURN
    cases = draw_cases(46, 12 * len(names), names)
    assert [schedule_of(case) for case in cases] == names * 12
    assert cases[8] == draw_case(46, 8, schedule_of(cases[8])) != draw_case(46, 8, "latent")
    assert draw_cases(46, 3, ["latent"])[1] == draw_case(46, 1, "latent")
    for case in cases:
        assert case.head_dim_qk in {"latent": (576,), "flashmla": (576,)}.get(
            schedule_of(case), (64, 72, 80, 96, 128, 192)
        )
    drawn = {name: [x for x in cases if schedule_of(x) == name] for name in names}
    for case in drawn["prompts"]:
        ((_, rows, keys),) = case.requests
        assert 128 <= rows == keys <= 4096 and case.num_qo_heads <= 32
    assert {case.head_dim_qk for case in drawn["encoders"]} == {64, 72, 80}
    assert not any(case.causal for case in drawn["encoders"])
    assert any(x.kv_lens[0] == 1500 != x.q_lens[0] for x in draw_cases(0, 40, ["encoders"]))
    assert {case.num_qo_heads for case in drawn["latent"]} == {64, 128}
    assert {case.page_size for case in drawn["latent"]} == {16, 64}
    assert {max(case.q_lens) > 8 for case in drawn["kvcache"]} == {True, False}
    for case in drawn["longdecode"]:
        assert case.num_kv_heads == 1 or case.batch == 1
        assert 150e6 < case.bytes < 800e6


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("sparse", "select")])
def test_ours_serves_each_group_rightly(group: str) -> None:
    """The calls of each group, on a small shape of it, here served on the CPU."""
    pytest.importorskip("torch")
    from benchmarks import oracle
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.batch.oracle import expect_batch

    case = draw_case(3, 5, group)
    q_len = min(case.q_lens[0], 5)
    kv_lens = (q_len + 4, q_len + 65) if case.is_paged else (q_len, q_len)
    requests = tuple((1, q_len, kv_len) for kv_len in kv_lens)
    heads = 8 if case.num_kv_heads == 1 else case.num_kv_heads
    case = replace(case, requests=requests, num_qo_heads=heads)
    inputs = make_batch_inputs(case, "cpu")
    (offered,) = peers.candidates("ours", case, inputs)
    if offered.buffer is not None:
        offered.buffer.fill_(float("nan"))
    tolerance = oracle.TOLERANCE_8BIT if case.is_8bit else oracle.TOLERANCE
    assert oracle.judge(expect_batch(case, inputs), offered.output(offered.call()), tolerance).ok
    if inputs.tables is not None:
        # Peers that multiply what nobody owns by 0 have an answer too.
        unowned = inputs.k.float()[inputs.tables.unowned.tolist()]
        large = 448 if case.is_8bit else 1e4
        assert ((unowned - large).abs() < 100).all()


def test_shapes_of_eight_bits_are_of_all_kinds() -> None:
    cases = draw_cases(47, 120, ["fp8"])
    assert {case.dtype for case in cases} == {case.kv_dtype for case in cases} == {"float8_e4m3fn"}
    assert {case.head_dim_qk for case in cases} == {64, 128, 192, 256}
    assert {case.causal for case in cases} == {True, False}
    assert any(case.window_left > 0 for case in cases)
    assert any(max(case.q_lens) <= 8 and case.is_paged for case in cases)
    assert any(len({*case.q_lens}) > 1 and not case.is_paged for case in cases)
    assert max(max(case.q_lens) for case in cases) > 20000
    # A row of q has half the bytes of one of 16 bits; outputs have not.
    case = replace(cases[0], requests=((1, 4, 4),), num_qo_heads=2, num_kv_heads=1)
    case = replace(case, head_dim_qk=64, head_dim_vo=64, causal=False)
    assert case.bytes == 4 * (2 * 64 * 3 + 2 * 64)


def test_eight_bits_are_compared_on_the_same_bytes() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import oracle
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.batch.oracle import expect_batch

    drawn = next(x for x in draw_cases(47, 40, ["fp8"]) if x.api == "ragged" and x.causal)
    case = replace(drawn, requests=((2, 9, 9),), num_qo_heads=4, num_kv_heads=2, window_left=-1)
    inputs = make_batch_inputs(case, "cpu")
    assert inputs.q.dtype == inputs.k.dtype == torch.float8_e4m3fn
    expected = expect_batch(case, inputs)
    for name, tolerance in (("ours", oracle.TOLERANCE_8BIT), ("ours_16bit", oracle.TOLERANCE)):
        (offered,) = peers.candidates(name, case, inputs)
        assert offered.peer == name
        verdict = oracle.judge(expected, offered.output(offered.call()), tolerance)
        assert verdict.ok, (name, verdict)


def test_peers_of_eight_bits_say_why_they_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pytest.importorskip("torch")
    from benchmarks.batch import peer_fa3_fp8, peer_flashinfer
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.candidate import Unsupported

    case = next(x for x in draw_cases(47, 40, ["fp8"]) if x.api == "ragged" and x.causal)
    case = replace(case, requests=((1, 5, 5),), num_qo_heads=2, num_kv_heads=1)
    inputs = make_batch_inputs(case, "cpu")
    library = tmp_path / "fa3.so"
    library.write_bytes(b"no library")
    for path, message in (("", "does not name"), (str(library), "cannot be loaded: .*too short")):
        monkeypatch.setenv(peer_fa3_fp8.LIBRARY_VARIABLE, path)
        peer_fa3_fp8.forward.cache_clear()
        with pytest.raises(Unsupported, match=message):
            peers.candidates("fa3_fp8", case, inputs)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(Unsupported, match="front end cannot be loaded"):
        peers.candidates("cudnn_fp8", case, inputs)
    lengths = replace(case, requests=((1, 5, 5), (1, 6, 6)))
    with pytest.raises(Unsupported, match="one length"):
        peers.candidates("cudnn_fp8", lengths, make_batch_inputs(lengths, "cpu"))
    with pytest.raises(Unsupported, match="64, 128 and 256"):
        peer_flashinfer.variants(replace(case, head_dim_qk=192, head_dim_vo=128), "fa3")


def test_ops_are_called_in_the_order_of_their_schema() -> None:
    from benchmarks.batch.peer_fa3_fp8 import arguments

    def argument(name: str, *default: Any) -> Any:
        value = default[0] if default else None
        return SimpleNamespace(
            name=name, default_value=value, has_default_value=lambda: bool(default)
        )

    schema = SimpleNamespace(arguments=[argument("k"), argument("causal"), argument("x", 3),
                                        argument("out")])  # fmt: skip
    assert arguments(schema, {"is_causal": True, "k": 1}) == [1, True, 3, None]


def test_implementations_of_a_group_are_listed(tmp_path: Any) -> None:
    cases = draw_cases(7, 2, ["fp8"])
    results = Results(tmp_path / FILE_NAME)
    for case in cases:
        rows = [
            {"peer": peer, "variant": "x", "us": us, "status": "timed", "relative_error": error}
            for peer, us, error in (("ours", 10.0, 0.02), ("cudnn_fp8", 12.0, 0.04))
        ]
        results.add_case(case, [{"case": case.name, "op": case.op} | row for row in rows])
    results.save()
    options = ["--seed", "7", "--count", "2", "--groups", "fp8", "--out", str(tmp_path)]
    found = sweep.write(sweep.parse(options))["groups"]["fp8"]
    assert found["met"] and found["peers"]["cudnn_fp8"]["ratio"] == pytest.approx(1.2)
    text = (tmp_path / sweep.TABLE_NAME).read_text()
    assert "1.15, 0.97  met" in text and "1.200   error 4.00%" in text


def test_groups_are_judged_by_ratios_and_by_shares_of_a_copy(tmp_path: Any) -> None:
    cases = draw_cases(7, 6, ["kvcache", "longdecode"])
    results = Results(tmp_path / FILE_NAME)
    results.data["ceilings"] = {"tflops": 800.0, "gbps": 1000.0}
    for case, ratio in zip(cases, (1.2, 0.9, 0.96, 0.8, 1.1, 0.95), strict=True):
        us = case.bytes / 1e6 / ratio if schedule_of(case) == "longdecode" else 10.0
        ours = {"peer": "ours", "variant": "x", "us": us, "status": "timed", "repeatable": True}
        peer = {"peer": "fa3", "variant": "fwd", "us": 10.0 * ratio, "status": "timed"}
        rows = [{"case": case.name, "op": case.op} | row for row in (ours, peer)]
        results.add_case(case, rows)
    results.save()
    options = ["--seed", "7", "--count", "6", "--groups", "kvcache,longdecode"]
    found = sweep.write(sweep.parse([*options, "--out", str(tmp_path)]))
    verify, decode = (found["groups"][name] for name in ("kvcache", "longdecode"))
    assert list(found["groups"]) == ["kvcache", "longdecode"]
    assert verify["count"] == decode["count"] == 3
    # The mean is what is wanted, and one shape is not.
    assert verify["geometric_mean"] > GROUPS["kvcache"].mean and not verify["met"]
    assert verify["least"] == pytest.approx(0.96) and verify["worst"] == cases[2].name
    assert decode["met"] and decode["least"] == pytest.approx(0.8)
    assert decode["geometric_mean"] == pytest.approx((0.9 * 0.8 * 0.95) ** (1 / 3))
    text = (tmp_path / sweep.TABLE_NAME).read_text()
    assert "1.05, 0.97  NOT MET" in text and "0.88  met" in text
    assert f"worst: {cases[2].name} (fa3:fwd)" in text
    assert judge([], 1000.0) == {}


def test_code_is_the_bytes_of_sections_that_hold_instructions(tmp_path: Any) -> None:
    def section(flags: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", 0, 1, flags, 0, 0, size, 0, 0, 0, 0)

    sections = [section(6, 4096), section(2, 999), section(6, 128), section(0, 7)]
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3A, 64, len(sections))
    assert text_bytes(bytes(header) + b"".join(sections)) == 4224

    args = sweep.parse(["--groups", "all", "--out", str(tmp_path)])
    assert args.groups == IN_TURN and schedule_of(args.cases[9]) == IN_TURN[9 % 7]
    _results(args.cases[:4], tmp_path)
    args.code_bytes = 100 << 10
    assert sweep.write(args)["code"] == {"bytes": 102400, "wanted": 61440, "met": False}
    assert "100.0 KiB   60  NOT MET" in (tmp_path / sweep.TABLE_NAME).read_text()


def test_peers_that_are_not_here_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.candidate import Unsupported

    monkeypatch.delenv("CUPYATTN_BENCH_FLASHMLA", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    prompts, latent = (replace(draw_case(3, 0, x), requests=((2, 4, 4),)) for x in (
        "prompts", "flashmla",
    ))  # fmt: skip
    flashmla_library.library.cache_clear()
    for name, case, message in (
        ("fa4", prompts, "flash-attn-4"),
        ("flashmla", latent, "CUPYATTN_BENCH_FLASHMLA"),
        ("flashmla", replace(latent, page_size=16), "pages of 64"),
    ):
        with pytest.raises(Unsupported, match=message):
            peers.candidates(name, case, make_batch_inputs(case, "cpu"))


def test_flashmla_is_given_its_schedule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import oracle
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.batch.oracle import expect_batch
    from cupyattn.flash_mla import flash_mla_with_kvcache

    asked: list[Any] = []

    class Ops:
        """FlashMLA's ops, as cupyattn serves them on a CPU."""

        @staticmethod
        def get_mla_decoding_metadata(*args: Any) -> Any:
            asked.append(args[1:])
            return "metadata", "splits"

        @staticmethod
        def fwd_kvcache_mla(
            q: Any, cache: Any, dim: int, lengths: Any, table: Any, scale: float, causal: bool,
            metadata: str, splits: str, is_fp8: bool, indices: None,
        ) -> Any:  # fmt: skip
            assert (metadata, splits, is_fp8, indices) == ("metadata", "splits", False, None)
            return flash_mla_with_kvcache(
                q, cache, table, lengths, dim, softmax_scale=scale, causal=causal
            )

    monkeypatch.setattr(flashmla_library, "library", lambda: Ops)
    case = replace(draw_case(3, 0, "flashmla"), requests=((1, 2, 9), (2, 2, 70)), num_qo_heads=16)
    inputs = make_batch_inputs(case, "cpu")
    (offered,) = peers.candidates("flashmla", case, inputs)
    expected = expect_batch(case, inputs)
    assert all(oracle.judge(expected, offered.output(offered.call())).ok for _ in range(2))
    assert asked == [(32, 1, None, False, None)] and torch.is_tensor(inputs.q)


def test_fa4_is_called_dense_where_lengths_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchmarks import oracle
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.batch.oracle import expect_batch
    from cupyattn import flash_attn

    served = SimpleNamespace(
        flash_attn_func=flash_attn.flash_attn_func,
        flash_attn_varlen_func=flash_attn.flash_attn_varlen_func,
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute", served)
    case = draw_case(3, 0, "varlen")
    for requests, variant in ((((3, 5, 5),), "dense"), (((1, 5, 5), (2, 3, 3)), "varlen")):
        case = replace(case, requests=requests)
        inputs = make_batch_inputs(case, "cpu")
        (offered,) = peers.candidates("fa4", case, inputs)
        assert offered.label == f"fa4:{variant}"
        assert oracle.judge(expect_batch(case, inputs), offered.output(offered.call())).ok


def test_figures_of_known_ratios() -> None:
    found = figures([0.5, 1.0, 2.0])
    assert found["geometric_mean"] == pytest.approx(1.0) and found["least"] == 0.5
    assert found["percentile_5"] == pytest.approx(0.55) and found["below_1"] == pytest.approx(1 / 3)
    ratios = np.random.default_rng(0).uniform(0.5, 2, 101).tolist()
    assert figures(ratios)["percentile_5"] == pytest.approx(np.percentile(ratios, 5))
    assert figures([]) == {"count": 0}


def _results(cases: list[BatchCase], path: Any) -> None:
    results = Results(path / FILE_NAME)
    for number, case in enumerate(cases):
        ours = {"peer": "ours", "variant": "x", "us": 10.0, "status": "timed", "repeatable": True}
        peer = {"peer": "fa3", "variant": "fwd", "us": 10.0 + number, "status": "timed"}
        rows: list[dict[str, Any]] = [ours, peer]
        if number == 1:
            peer["status"] = "wrong"  # and so in no ratio
        if number == 2:
            ours |= {"status": "failed"}
        results.add_case(case, [{"case": case.name, "op": case.op} | row for row in rows])
    results.save()


def test_summary_of_a_run(tmp_path: Any) -> None:
    cases = draw_cases(5, 16)
    _results(cases[:14], tmp_path)
    args = sweep.parse(["--seed", "5", "--count", "16", "--out", str(tmp_path)])
    found = sweep.write(args)
    assert json.loads((tmp_path / sweep.SUMMARY_NAME).read_text())["rated"] == found["rated"] == 12
    assert found["drawn"] == 16 and found["all"]["count"] == 12
    assert found["without_peer"] == [cases[1].name]
    assert found["ours_not_timed"] == [cases[2].name]
    assert found["wrong"] == [f"{cases[1].name} fa3:fwd"]
    ratios = [1.0] + [1 + number / 10 for number in range(3, 14)]
    mean = math.exp(sum(map(math.log, ratios)) / 12)
    assert found["all"]["geometric_mean"] == pytest.approx(mean)
    assert [entry["case"] for entry in found["worst"]][:2] == [cases[0].name, cases[3].name]
    assert len(found["worst"]) == 10
    for group in ("by_schedule", "by_model", "by_kv_heads", "by_batch"):
        assert sum(x["count"] for x in found[group].values()) == 12
    by_kernels = found["prediction_by_kernels"]
    planned = [case for case in cases[:14] if case.name != cases[2].name and plan_of(case)]
    assert 8 < len(planned) < 13
    assert sum(x["count"] for x in by_kernels.values()) == found["prediction"]["count"]
    assert found["prediction"]["count"] == len(planned)
    assert all(found["bias"] > 0 for found in by_kernels.values())
    text = (tmp_path / sweep.TABLE_NAME).read_text()
    assert "told / taken" in text
    assert "12 of 16 shapes" in text and cases[0].name in text and "wrong:" in text


def test_profiles_of_the_worst(tmp_path: Any, monkeypatch: Any) -> None:
    """Kernels by name and size, in the order of launches; what empties L2 is none of a call's."""

    def event(name: str, ts: float, dur: float, grid: list[int]) -> dict[str, Any]:
        return {
            "cat": "kernel", "name": name, "ts": ts, "dur": dur,
            "args": {"grid": grid, "block": [128, 1, 1]},
        }  # fmt: skip

    events = [event("void merge", 5.0, 2.0, [8, 1, 1]), event("void decode", 1.0, 10.0, [4, 3, 1])]
    events += [event("void decode", 11.0, 12.0, [4, 3, 1]), event("merge", 15.0, 2.0, [8, 1, 1])]
    events += [event("FillFunctor<char>", 0.0, 80.0, [9, 1, 1]), {"cat": "cpu_op", "name": "x"}]
    found = profiles.kernels_of({"traceEvents": events}, 2)
    assert found == [("decode", 11.0, 1.0, 12, 128), ("merge", 2.0, 1.0, 8, 128)]

    cases = draw_cases(5, 16)
    _results(cases, tmp_path)
    arguments = ["sweep", "--seed", "5", "--count", "16", "--jobs", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sweep, "supervise", lambda args, given: _results(cases, tmp_path) or 0)

    def run(command: list[str], **_: Any) -> None:
        assert command[2:] == ["benchmarks.sweep.profiles", str(tmp_path), "--most", "10"]
        monkeypatch.setattr(profiles, "Clock", lambda: None)
        monkeypatch.setattr(profiles, "profile_shape", shape)
        assert profiles.main(command[3:]) == 0

    def shape(entry: dict[str, Any], seed: int, clock: Any) -> dict[str, Any]:
        assert seed == 5 and draw_case(seed, int(entry["case"].split("_")[1])).name == entry["case"]
        if entry["case"] == cases[3].name:
            raise RuntimeError("no counters")
        return {"ours": [kernel._asdict() for kernel in found]}

    monkeypatch.setattr(sweep.subprocess, "run", run)
    assert cli.main(arguments) == 0
    text = (tmp_path / sweep.TABLE_NAME).read_text()
    assert "11.0 us    12 x  128  decode\n" in text
    assert "not profiled: RuntimeError: no counters" in text
    assert json.loads((tmp_path / sweep.SUMMARY_NAME).read_text())["profiles"][cases[0].name]


def told(case: BatchCase) -> float:
    found = predict(case)
    assert found is not None and found.us is not None
    return found.us


def test_predictions_grow_with_the_work() -> None:
    case = next(x for x in draw_cases(0, 50) if x.api == "decode" and not x.sinks)
    case = replace(case, requests=((1, 1, 4096),), page_size=16, window_left=-1)
    times = [told(replace(case, requests=((n, 1, 4096),))) for n in (1, 16, 64, 256)]
    assert times == sorted(times) and times[0] < 30 < times[-1]


def test_launches_behind_prompts_stream_beside_them() -> None:
    """The launches of a mixed batch take less than one after another, and more than the prompts."""
    case = next(x for x in draw_cases(0, 200) if x.op == "mixed" and x.head_dim_qk == 128)
    case = replace(
        case, num_qo_heads=32, num_kv_heads=8, page_size=16, kv_dtype="bfloat16", dtype="bfloat16",
        window_left=-1,
    )  # fmt: skip
    chunk, decodes = ((1, 2048, 8192),), ((63, 1, 8192),)
    of_both = predict(replace(case, requests=chunk + decodes))
    assert of_both is not None and of_both.us is not None and "others" in of_both.candidate
    apart = [told(replace(case, requests=requests)) for requests in (chunk, decodes)]
    assert apart[0] < of_both.us < 1.05 * sum(apart)


def test_predictions_are_those_of_the_card_that_was_timed() -> None:
    """Decode takes as long as memory needs for its keys."""
    case = next(x for x in draw_cases(0, 50) if x.api == "decode" and not x.sinks)
    case = replace(case, requests=((256, 1, 8192),), page_size=16, window_left=-1)
    before = told(case)
    with as_on("NVIDIA H200"):
        assert 0.65 < told(case) / before < 0.8
    with as_on("a card that nobody knows"):
        assert told(case) == before
    assert told(case) == before


def test_every_drawn_case_has_a_plan_and_kernels() -> None:
    cases = draw_cases(1, 12)
    is_unplanned = [case.op in ("varlen", "kvcache") or case.api == "mla" for case in cases]
    assert [predict(case) is None for case in cases] == is_unplanned and not all(is_unplanned)
    found = instances(cases)
    assert len(found) == len(set(found)) and "decode_sm80" in {name for name, _ in found}


def test_errors_of_predictions() -> None:
    entries = [
        {"ours_us": us, "predicted_us": told}
        for us, told in ((10.0, 11.0), (10.0, 5.0), (10.0, 10.0), (None, 3.0), (8.0, None))
    ]
    found = prediction_errors(entries)
    assert found["count"] == 3 and found["median"] == pytest.approx(0.1)
    assert found["within_20_percent"] == pytest.approx(2 / 3)
    assert prediction_errors([]) == {"count": 0}


def test_summary_of_nothing() -> None:
    found = summarise_sweep(draw_cases(1, 2), {"cases": {}, "rows": []})
    assert found["rated"] == 0 and "0 of 2 shapes" in table(found)


def test_parse_and_list(capsys: Any) -> None:
    args = sweep.parse(["--seed", "7", "--count", "5", "--skip", "2", "--peers", "fa3"])
    assert args.cases == draw_cases(7, 7)[2:] and args.peers == ["ours", "fa3"] and args.build
    assert args.order("a")(3) == args.order("a")(3)
    assert not sweep.parse(["--no-build"]).build
    assert cli.main(["sweep", "--seed", "7", "--count", "5", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        case.name for case in draw_cases(7, 5)
    ]
    with pytest.raises(SystemExit):
        sweep.parse(["--count", "0"])


def test_a_sweep_whose_worker_dies_goes_on(tmp_path: Any, monkeypatch: Any) -> None:
    cases = draw_cases(2, 4)
    ends = ["exit status -11", None]

    def watch(command: list[str], root: Any, progress: Any, last: float) -> str | None:
        assert command[3:6] == ["sweep", "--seed", "2"] and command[-4:-2][0] == "--deadline"
        if len(ends) == 2:
            entry = {"stage": "check", "case": cases[0].name, "label": "fa3:fwd"}
            progress.write_text(json.dumps(entry))
        else:
            _results(cases, tmp_path)
        return ends.pop(0)

    monkeypatch.setattr(cli, "_watch", watch)
    arguments = ["sweep", "--seed", "2", "--count", "4", "--jobs", "0", "--out", str(tmp_path)]
    arguments += ["--profiles", "0"]
    assert cli.main(arguments) == 0
    assert Results(tmp_path / FILE_NAME).why_lost(cases[0], "fa3:fwd")
    assert not (tmp_path / PROGRESS_NAME).exists()
    assert (tmp_path / sweep.TABLE_NAME).exists()


def test_modules_that_are_not_built_are_left_out(monkeypatch: Any) -> None:
    case = next(case for case in draw_cases(0, 50) if case.api == "decode" and not case.sinks)
    ready = {"cc"}
    monkeypatch.setattr(prebuild, "is_ready", lambda case, backend, variant: variant in ready)
    monkeypatch.setattr(
        "benchmarks.batch.peer_flashinfer._candidate", lambda backend, variant, *_: variant
    )
    found = peers.candidates("flashinfer_fa2", case, None, build=False)
    assert found == ["cc"]
    assert peers.candidates("flashinfer_fa2", case, None) == ["tc", "cc"]
    ready.clear()
    with pytest.raises(peers.Unsupported, match="not built"):
        peers.candidates("flashinfer_fa2", case, None, build=False)
    xqa = replace(case, page_size=16, kv_dtype=case.dtype)
    with pytest.raises(peers.Unsupported, match="not built"):
        peers.candidates("flashinfer_xqa", xqa, None, build=False)


def test_modules_follow_the_dtype_of_a_case() -> None:
    case = next(case for case in draw_cases(0, 50) if case.dtype == "float16")
    (module, *_) = prebuild.modules([replace(case, sinks=False)], ["fa2"])
    assert module.dtype == "float16" and module.kv_dtype == case.kv_dtype

"""Batch cases of the benchmark CLI without a GPU: counts, tables, inputs, oracle, a whole run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_batches import LIBRARY, FakeDecode, as_float64, fa3, single_prefill, xqa
from helpers.fake_clock import FakeClock
from helpers.share import one_of

import cupyattn
from benchmarks import candidate as candidate_module
from benchmarks import cli, musts, peers, report, timing, worker
from benchmarks.batch import latent, wrappers
from benchmarks.batch.case import BatchCase
from benchmarks.batch.cases import BATCH_CASES, zipf_lengths
from benchmarks.batch.inputs import make_batch_inputs
from benchmarks.batch.oracle import expect_batch
from benchmarks.batch.tables import page_tables
from benchmarks.cases import BY_NAME, select
from benchmarks.peers import prebuild
from benchmarks.results import FILE_NAME, Results
from cupyattn.reference import attention

CEILINGS = {"tflops": 800.0, "gbps": 4000.0}
PAGED = BatchCase(
    "paged", "append", "paged", ((2, 3, 9), (1, 5, 21)), 4, 4, 2, 16, 16, causal=True
)  # fmt: skip
DECODE = replace(
    PAGED, name="decode", op="batch_decode", api="decode", causal=False,
    requests=((1, 1, 40), (3, 1, 7)),
)  # fmt: skip
RAGGED = replace(
    PAGED, name="ragged", op="ragged", api="ragged", requests=((1, 20, 20), (2, 7, 7)), page_size=0
)
EQUAL = replace(RAGGED, name="equal", requests=((3, 7, 7),))
VERIFY = replace(PAGED, name="verify", op="verify", api="verify", requests=((3, 5, 20),))
VARIETY = [
    PAGED,
    replace(PAGED, page_size=1, window_left=4),
    DECODE,
    replace(DECODE, page_size=1, window_left=5),
    replace(DECODE, page_size=16, kv_dtype="float8_e4m3fn"),
    RAGGED,
    replace(RAGGED, pos_encoding_mode="ROPE_LLAMA", logits_soft_cap=3.0),
    replace(RAGGED, pos_encoding_mode="ALIBI", window_left=6),
    replace(RAGGED, causal=False, mask="packed"),
    EQUAL,
    VERIFY,
    replace(VERIFY, causal=False, mask="tree"),
]


@pytest.fixture(autouse=True)
def own_workspaces() -> Iterator[None]:
    """Tests say how large workspaces are, and these are kept."""
    yield
    wrappers.workspace.cache_clear()


def _ids(case: BatchCase) -> str:
    options = f"{case.mask}{case.pos_encoding_mode}w{case.window_left}{case.kv_dtype}"
    return f"{case.api}_p{case.page_size}{options}"


@pytest.mark.parametrize("case", VARIETY, ids=_ids)
def test_counts_are_sums_over_requests(case: BatchCase) -> None:
    assert case.batch == len(case.q_lens) == len(case.kv_lens)
    assert (case.q_offsets[-1], case.kv_offsets[-1]) == (sum(case.q_lens), sum(case.kv_lens))
    alone = [case.request(b) for b in range(case.batch)]
    for count in ("pairs", "flops", "quoted_flops", "bytes"):
        assert getattr(case, count) == sum(getattr(one, count) for one in alone), count
    floors = case.flops / 800e12 * 1e6, case.bytes / 4000e9 * 1e6
    assert case.floor_us(800, 4000) == pytest.approx(max(floors))


def test_a_latent_row_is_read_once() -> None:
    case = BY_NAME["mla_32x8k_h16"]
    assert case.bytes == 2 * (32 * 16 * (576 + 512) + 32 * 8192 * 576)
    assert case.flops == 2 * (576 + 512) * 32 * 8192 * 16
    inputs = make_batch_inputs(replace(case, requests=((2, 1, 70),)), "cpu")
    assert inputs.v.shape[-1] == 512 and inputs.v.data_ptr() == inputs.k.data_ptr()
    parts = latent._parts(case, inputs)
    assert [x.shape[-1] for x in parts] == [512, 64, 512, 64]


def test_latent_candidates_answer_alike(monkeypatch: Any) -> None:
    case = replace(BY_NAME["mla_32x8k_h16"], requests=((2, 2, 70),), num_qo_heads=4)
    inputs = make_batch_inputs(case, "cpu")
    monkeypatch.setattr(wrappers, "_WORKSPACE_BYTES", 32 << 20)
    expected = expect_batch(case, inputs)
    for name in ("ours", "ours_trtllm"):
        (candidate,) = peers.candidates(name, case, inputs)
        got = candidate.output(candidate.call()).float().numpy()
        for one in expected:
            np.testing.assert_allclose(got[0, one.rows], np.asarray(one.answer), atol=0.02)


@pytest.mark.parametrize("name", ["ours", "ours_trtllm", "fa3", "flashinfer_fa2"])
def test_lists_are_attended_as_requests_of_one_token(name: str, monkeypatch: Any) -> None:
    """Ours by lists; what a peer is given as pages is the same attention."""
    torch = pytest.importorskip("torch")
    case = replace(
        BY_NAME["mla_sparse_8_h16"], requests=((5, 1, 60),), pool=200, num_qo_heads=4
    )  # fmt: skip
    inputs = make_batch_inputs(case, "cpu")
    tables = inputs.tables
    assert tables is not None and tables.num_pages == 200
    assert all(len(set(tables.pages(b))) == 60 for b in range(5))
    assert len(np.union1d(tables.unowned, tables.indices)) == 200
    assert inputs.k.isnan().all(-1).sum() == len(tables.unowned)
    monkeypatch.setattr(wrappers, "_WORKSPACE_BYTES", 32 << 20)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", cupyattn.mla)
    made = cupyattn.mla.BatchMLAPagedAttentionWrapper
    monkeypatch.setattr(
        cupyattn.mla, "BatchMLAPagedAttentionWrapper", lambda space, backend="": made(space)
    )

    def qv(q_pe: Any, kpe: Any, ckv: Any, q_v: Any, page_table: Any, **options: Any) -> Any:
        assert options["seqused_k"].tolist() == [60] * 5
        keys = torch.cat([ckv, kpe], -1)[:, 0][page_table.long()].float()
        logits = torch.einsum("bhd,bngd->bhn", torch.cat([q_v, q_pe], -1).float(), keys)
        weights = torch.softmax(logits * options["softmax_scale"], -1)
        return (torch.einsum("bhn,bngd->bhd", weights, keys[..., :512]),)

    monkeypatch.setattr(latent, "forward", lambda: qv)
    (candidate,) = peers.candidates(name, case, inputs)
    got = candidate.output(candidate.call()).float().numpy()
    for one in expect_batch(case, inputs):
        np.testing.assert_allclose(got[0, one.rows], np.asarray(one.answer), atol=0.02)


def test_bytes_of_lists_count_distinct_slots() -> None:
    case = BY_NAME["mla_sparse_256_h128"]
    slots = np.unique(page_tables(case.kv_lens, 1, 3, pool=case.pool).indices).size
    rows = 2 * 256 * 128 * (576 + 512)
    assert case.bytes - rows == pytest.approx(slots * 576 * 2, rel=2e-3)


def test_portable_kernels_are_timed_in_a_process_of_their_own(monkeypatch: Any) -> None:
    case = replace(BY_NAME["mla_32x8k_h16_portable"], requests=((2, 1, 70),))
    inputs = make_batch_inputs(case, "cpu")
    assert peers.offering(case) == ("ours", "flashinfer_fa2")
    with pytest.raises(candidate_module.Unsupported, match="CUPYATTN_PORTABLE"):
        peers.candidates("ours", case, inputs)
    monkeypatch.setenv("CUPYATTN_PORTABLE", "1")
    monkeypatch.setattr(wrappers, "_WORKSPACE_BYTES", 32 << 20)
    assert peers.candidates("ours", case, inputs)


@pytest.mark.parametrize("name", ["decode_64x4k_d512", "ragged_4x4k_d512"])
def test_sdpa_serves_wide_heads(name: str, monkeypatch: Any) -> None:
    attention_of_torch = pytest.importorskip("torch.nn.attention")
    monkeypatch.setattr(attention_of_torch, "sdpa_kernel", lambda kernel: nullcontext())
    length = 1 if name.startswith("decode") else 40
    case = replace(BY_NAME[name], requests=((2, length, 40),), head_dim_qk=32, head_dim_vo=32)
    assert "sdpa_efficient" in peers.offering(BY_NAME[name])
    inputs = make_batch_inputs(case, "cpu")
    (candidate,) = peers.candidates("sdpa_efficient", case, inputs)
    got = candidate.output(candidate.call()).float().numpy()
    for one in expect_batch(case, inputs):
        np.testing.assert_allclose(got[0, one.rows], np.asarray(one.answer), atol=0.02)
    with pytest.raises(candidate_module.Unsupported, match="one length"):
        mixed = replace(case, requests=((1, length, 40), (1, length, 41)))
        peers.candidates("sdpa_efficient", mixed, inputs)


def test_counts_follow_published_figures() -> None:
    # Figures of another script, from times and rates: bytes of decodes, FLOP of prefills.
    assert BY_NAME["decode_64x8k"].bytes / 489.3 / 1e3 == pytest.approx(4391, rel=1e-3)
    assert BY_NAME["decode_skew"].bytes / 182.5 / 1e3 == pytest.approx(3666, rel=4e-3)
    assert BY_NAME["ragged_zipf_16k"].flops / 559.8 / 1e6 == pytest.approx(545, rel=1e-3)
    assert BY_NAME["append_8x512_8k"].quoted_flops / 844.7 / 1e6 == pytest.approx(631, rel=1e-3)
    window, short = BY_NAME["decode_64x32k_w1023"], BY_NAME["decode_64x1k"]
    assert (window.bytes, window.flops) == (short.bytes, short.flops)


def test_the_list_of_batches_is_sound() -> None:
    for case in BATCH_CASES:
        assert case.op in peers._BATCH and case.api in (
            *("decode", "paged", "ragged", "cascade", "mixed", "verify", "mla"),
        )
        assert case.is_host == (case.op == "host_batch") and case.timed in ("run", "plan")
        assert case.is_paged == (case.page_size > 0)
        assert not case.against or BY_NAME[case.against].op == case.op
        assert case.api != "decode" or set(case.q_lens) == {1}
        assert all(q <= kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    assert {case.name for case in select(["ragged"], ["*_rope"])} == {"ragged_4x4k_rope"}


def test_zipf_lengths_add_up() -> None:
    lengths = zipf_lengths(16, 16384)
    assert sum(lengths) == 16384 and len(lengths) == 16 and lengths[0] == 4846
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kv_lens", [[1], [5, 16, 33, 1], [64] * 40])
def test_page_tables_are_valid_and_scattered(kv_lens: list[int], page_size: int) -> None:
    tables = page_tables(kv_lens, page_size, seed=1)
    counts = np.diff(tables.indptr)
    np.testing.assert_array_equal((counts - 1) * page_size + tables.last_page_len, kv_lens)
    assert tables.last_page_len.min() >= 1 and tables.last_page_len.max() <= page_size
    for table in (tables.indptr, tables.indices, tables.last_page_len, tables.kv_lens):
        assert table.dtype == np.int32
    every = np.concatenate([tables.indices, tables.unowned])
    np.testing.assert_array_equal(np.sort(every), np.arange(tables.num_pages))
    assert len(tables.unowned) >= 8 and not np.any(np.diff(tables.indices) == 1)
    block_table = tables.block_table()
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(block_table[b, :count], tables.pages(b))
        assert set(block_table[b]) <= set(tables.pages(b))
    again = page_tables(kv_lens, page_size, seed=1)
    np.testing.assert_array_equal(again.indices, tables.indices)


def _reference(case: BatchCase, inputs: Any) -> Any:
    """[1, rows, Hq, D] by `cupyattn.reference`; keys are gathered token by token."""
    import torch

    answers = []
    for b in range(case.batch):
        rows = slice(case.q_offsets[b], case.q_offsets[b + 1])
        if inputs.tables is None:
            keys = slice(case.kv_offsets[b], case.kv_offsets[b + 1])
            k, v = as_float64(inputs.k[keys]), as_float64(inputs.v[keys])
        else:
            pages = inputs.tables.pages(b)
            places = [(pages[n // case.page_size], n % case.page_size)
                      for n in range(case.kv_lens[b])]  # fmt: skip
            k, v = (np.stack([as_float64(pool[place]) for place in places])
                    for pool in (inputs.k, inputs.v))  # fmt: skip
        mask = None if inputs.masks is None else inputs.masks[b].numpy()
        answer, _ = attention(
            as_float64(inputs.q[rows]), k, v, causal=case.causal, window_left=case.window_left,
            mask=mask, logits_soft_cap=case.logits_soft_cap,
            pos_encoding_mode=case.pos_encoding_mode,
        )  # fmt: skip
        answers.append(answer)
    return torch.from_numpy(np.concatenate(answers))[None]


@pytest.mark.parametrize("case", VARIETY, ids=_ids)
def test_inputs_and_oracle_agree_with_the_reference(case: BatchCase) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import oracle
    from benchmarks.batch.inputs import make_batch_inputs
    from benchmarks.batch.oracle import expect_batch

    inputs = make_batch_inputs(case, "cpu")
    if inputs.tables is not None:
        assert inputs.k.float()[torch.from_numpy(inputs.tables.unowned)].isnan().all()
        owned = case.kv_offsets[-1] * case.num_kv_heads * case.head_dim_qk
        assert int((~inputs.k.float().isnan()).sum()) == owned
    wanted = _reference(case, inputs)
    expected = expect_batch(case, inputs)
    assert len(expected) == case.batch
    for item in expected:
        np.testing.assert_allclose(item.answer, wanted[0, item.rows], rtol=1e-9)
    assert oracle.judge(expected, wanted).ok
    assert not oracle.judge(expected, wanted * 1.01).ok
    assert not oracle.judge(expected, wanted.roll(1, dims=1)).ok


@pytest.fixture
def on_cpu(tmp_path: Any, monkeypatch: Any) -> Any:
    """A runner of one case with every implementation served by the reference: rows by label."""
    pytest.importorskip("torch")
    from benchmarks.batch import peer_fa3, wrappers
    from benchmarks.batch.inputs import make_batch_inputs

    decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache=xqa)
    flashinfer = SimpleNamespace(**LIBRARY, decode=decode)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    for name, fake in LIBRARY.items():
        monkeypatch.setattr(cupyattn, name, fake, raising=False)
    monkeypatch.setattr(cupyattn, "single_prefill_with_kv_cache", single_prefill, raising=False)
    monkeypatch.setattr(peer_fa3, "forward", lambda: fa3)
    monkeypatch.setattr(timing, "HOST_CALLS", 2)
    monkeypatch.setattr(wrappers, "_WORKSPACE_BYTES", 1 << 16)
    monkeypatch.setattr(worker, "make_batch_inputs", lambda case: make_batch_inputs(case, "cpu"))
    monkeypatch.setattr(worker.machine, "gpu_state", dict)
    results = Results(tmp_path / FILE_NAME)
    results.data["ceilings"] = CEILINGS
    args = cli.parse(["--out", str(tmp_path), "--rounds", "1", "--seconds", "60"])
    clock: Any = FakeClock()

    def run(case: BatchCase) -> dict[str, Any]:
        worker._one_case(case, args, results, clock, worker.Progress(tmp_path))
        results.save()
        return {
            f"{row['peer']}:{row['variant']}": row
            for row in results.rows
            if row["case"] == case.name
        }

    return run


@pytest.mark.parametrize("case", VARIETY, ids=_ids)
def test_a_whole_run_of_one_batch(case: BatchCase, on_cpu: Any) -> None:
    """Every implementation is given all that the case asks for, checked and timed."""
    rows = on_cpu(case)
    serving = {f"ours:{case.api}"}
    serving |= {"flashinfer_fa2:tc", "flashinfer_fa2:cc"} if case.api == "decode" else {
        f"flashinfer_fa2:{'paged' if case.api == 'verify' else case.api}"
    }  # fmt: skip
    if case.api == "ragged":
        serving.add("ours_single:x3")
    if case.api == "decode":
        serving.add("ours_trtllm:trtllm")
    if case.op not in ("batch_decode", "verify") and case.is_plain:
        serving.add(f"flashinfer_fa3:{case.api}")
    simple = case.pos_encoding_mode == "NONE" and case.mask == "none" and not case.logits_soft_cap
    if simple and case.kv_dtype == "bfloat16":
        serving |= {"fa3:fwd", "fa3:unsplit"}
        serving |= {"fa3:dense", "fa3:dense_unsplit"} if case is EQUAL else set()
    assert {label for label, row in rows.items() if row["status"] == "timed"} == serving, rows
    missing = {"sdpa_cudnn:sdpa"} if case is EQUAL else set()  # cuDNN has no CPU
    others = [row for label, row in rows.items() if label not in serving | missing]
    assert {row["status"] for row in others} <= {"unsupported"}
    assert all(row["repeatable"] and row["relative_error"] < 4e-3 for label, row in rows.items()
               if label in serving)  # fmt: skip
    assert rows[f"ours:{case.api}"]["best_peer_over_ours"] == 1.0


def test_xqa_is_given_scattered_pages_and_a_window(on_cpu: Any) -> None:
    rows = on_cpu(replace(DECODE, page_size=16, window_left=5))
    assert rows["flashinfer_xqa:xqa"]["status"] == "timed", rows["flashinfer_xqa:xqa"]


# Each case and each kind of arrays once; the rest is slow.
@pytest.mark.parametrize("timed", ["plan", "run"])
@pytest.mark.parametrize(
    ("arrays", "case"),
    one_of(4, product(["numpy", "torch_cpu", "device"], [DECODE, PAGED, RAGGED]), is_several=True),
    ids=lambda x: x if isinstance(x, str) else _ids(x),
)
def test_host_times_of_plan_and_run(case: BatchCase, arrays: str, timed: str, on_cpu: Any) -> None:
    rows = on_cpu(replace(case, op="host_batch", arrays=arrays, timed=timed, out=timed == "plan"))
    assert rows[f"ours:{case.api}"]["status"] == "timed", rows
    assert "gbps" not in rows[f"ours:{case.api}"]
    peer = [row["status"] for label, row in rows.items() if label.startswith("flashinfer_fa2")]
    assert set(peer) == ({"unsupported"} if arrays == "numpy" else {"timed"})


def test_missing_wrappers_and_wrong_answers_are_rows(on_cpu: Any, monkeypatch: Any) -> None:
    name = "BatchPrefillWithRaggedKVCacheWrapper"
    monkeypatch.delattr(cupyattn, name)
    monkeypatch.delitem(cupyattn._EXPORTS, name)
    rows = on_cpu(RAGGED)
    assert rows["ours:"]["status"] == "failed"
    assert rows["ours_single:x3"]["status"] == "timed"
    monkeypatch.setattr(FakeDecode, "run", lambda self, q, cache, out: out, raising=False)
    assert on_cpu(DECODE)["ours:decode"]["status"] == "wrong"


def test_report_divides_a_case_by_the_one_it_is_held_against(on_cpu: Any, tmp_path: Any) -> None:
    on_cpu(replace(DECODE, name="short"))
    on_cpu(replace(DECODE, name="long", window_left=3, against="short"))
    text = report.write(tmp_path / FILE_NAME, tmp_path)
    lines = [line.split() for line in text.splitlines()]
    assert ["long", "ours:decode", "short", "1.00"] in lines


def test_musts_say_what_was_met(on_cpu: Any, tmp_path: Any, capsys: Any) -> None:
    goals = {"goals": (("best", 0.9),)}
    on_cpu(replace(DECODE, name="level", **goals))
    on_cpu(replace(DECODE, name="missed", goals=(("best", 1.1),)))
    on_cpu(replace(DECODE, name="half", **goals, against="level", against_goal=1.5))
    path = tmp_path / FILE_NAME
    data = json.loads(path.read_text())
    timed = [row for row in data["rows"] if row["status"] == "timed"]
    for row in timed:
        row["us"] *= 0.5 if row["case"] == "half" and row["peer"] == "ours" else 1.0
    path.write_text(json.dumps(data))
    found = [(must.case, must.of, must.is_met) for must in musts.musts(data)]
    assert found == [
        ("level", "best peer", True),
        ("missed", "best peer", False),
        ("half", "best peer", True),
        ("half", "level", True),
    ]
    assert musts.main([str(tmp_path)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missed")]
    assert lines[-1].endswith(">= 1.10 of best peer  MISSED")
    for row in timed:  # a larger error than the fastest peer's is no success
        row["relative_error"] = 2e-3 if row["peer"] == "ours" else 1e-3
    assert {must.is_met for must in musts.musts(data) if must.best} == {False}


def test_a_plan_that_ends_the_process_is_lost_in_its_case_alone(tmp_path: Any) -> None:
    progress = {"stage": "build", "case": "decode_skew", "label": "ours"}
    (tmp_path / worker.PROGRESS_NAME).write_text(json.dumps(progress))
    cli._record_loss(tmp_path, "exit status 75", BATCH_CASES)
    results = Results(tmp_path / FILE_NAME)
    assert results.why_lost(BY_NAME["decode_skew"], "ours")
    assert not results.why_lost(BY_NAME["decode_64x8k"], "ours")


def test_prebuild_knows_the_modules_of_batches() -> None:
    def of(pattern: str, *backends: str) -> list[prebuild.Module]:
        ops = ["batch_decode", "append", "ragged", "host_batch"]
        return prebuild.modules(select(ops, [pattern]), backends)

    prefill, decode = prebuild.Module("batch_prefill"), prebuild.Module("batch_decode")
    assert of("decode_64x8k", "fa2", "fa3") == [prefill, decode]
    fp8 = {"kv_dtype": "float8_e4m3fn"}
    assert of("decode_64x8k_fp8", "fa2", "xqa") == [replace(prefill, **fp8), replace(decode, **fp8)]
    window = {"window": True}
    assert of("decode_*_w1023", "fa2") == [replace(prefill, **window), replace(decode, **window)]
    assert of("append_*", "fa2") == [prefill]
    fa3 = replace(prefill, backend="fa3")
    eight_bits = replace(fa3, **fp8, dtype="float8_e4m3fn")
    assert of("append_*", "fa2", "fa3") == [prefill, fa3, eight_bits]
    assert of("ragged_4x4k_alibi", "fa2", "fa3") == [replace(prefill, position_mode=2)]
    assert set(of("ragged_4x4k_mask_bits", "fa2")) == {prefill, prebuild.Module("quantization")}
    xqa = of("decode_64x8k*", "xqa")
    assert [(m.page_size, m.head_dim_qk, m.group) for m in xqa] == [
        (16, 128, 4), (64, 128, 4), (16, 64, 8),
    ]  # fmt: skip
    host_latent = prebuild.Module("batch_mla", head_dim_qk=576, head_dim_vo=512)
    assert of("run_*_torch_out", "fa2") == [prefill, decode, host_latent]
    wide = {"head_dim_qk": 512, "head_dim_vo": 512}
    assert of("*_d512", "fa2", "fa3", "xqa") == [replace(prefill, **wide), replace(decode, **wide)]
    latent_cases = select(["mla"], ["*"])
    latent = {
        (m.kind, m.backend, m.kv_dtype) for m in prebuild.modules(latent_cases, ["fa2", "fa3"])
    }
    dtypes = ("bfloat16", "float8_e4m3fn")
    assert latent == {("batch_mla", backend, x) for backend in ("fa2", "fa3") for x in dtypes}

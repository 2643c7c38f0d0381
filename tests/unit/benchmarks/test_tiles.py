"""Batches for timing tiles, and their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import fake_batch, fake_gpu

from benchmarks.tiles import cli
from cupyattn.array import CPU
from cupyattn.bench.inputs import Arrays, as_bits
from cupyattn.bench.tiles import measure, plans, rows
from cupyattn.bench.tiles.draw import PROBLEMS, draw_cases
from cupyattn.bench.tiles.rows import Row
from cupyattn.choose import old_names
from cupyattn.choose.card import FOLDER, read
from cupyattn.core import dtypes


def test_draws_are_those_of_a_seed_and_of_every_problem() -> None:
    drawn = draw_cases(3, 400)
    assert drawn[:50] == draw_cases(3, 50) and drawn[0] != draw_cases(4, 1)[0]
    kinds = {(x.api, x.head_dim_qk, x.head_dim_vo, x.kv_dtype, x.page_size) for x in drawn}
    assert len(kinds) >= len({x[:2] + x[3:5] for x in PROBLEMS})
    forms = {"prompt", "short", "append", "decode", "verify", "mixed", "encoder", "cross"}
    assert {x.kind for x in drawn} == forms
    whole = [x for x in drawn if x.kind in ("encoder", "cross")]
    assert {x.api for x in whole} == {"ragged"} and not any(x.causal for x in whole)
    assert any(x.q_lens[0] > x.kv_lens[0] for x in whole)
    assert {x.pos_encoding_mode for x in drawn} == {"NONE", "ROPE_LLAMA", "ALIBI"}
    short = [x for x in drawn if x.kind == "short" and x.api == "ragged"]
    assert any(len(set(x.requests)) == 1 and len(x.requests) > 8 for x in short)


def test_kernels_of_all_candidates_are_known_without_a_gpu() -> None:
    case = next(x for x in draw_cases(3, 100) if x.name.endswith("mixed") and x.head_dim_qk == 128)
    found = [*measure.instances([case])[case.name]]
    names = {name for name, _ in found}
    assert {"prefill_sm90", "decode_sm80"} <= names and len(found) == len(set(found)) > 5


def test_runs_take_arrays_of_cupy_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there: plans with tables on the host and page numbers on the device."""
    stream = fake_batch.pretend(fake_gpu.pretend(monkeypatch), monkeypatch)
    make = fake_gpu.maker("cupy", monkeypatch)
    small = [case for case in draw_cases(3, 100) if sum(case.kv_lens) < 5000]
    assert {"bfloat16", "float8_e4m3fn"} == {case.kv_dtype for case in small}
    assert any(case.has_mask for case in small[:24])
    for case in small[:24]:
        places, indices = (case.kv_offsets[-1],), None
        if case.api == "paged":
            indices = make(int(plans.page_counts(case).sum()), dtype="int32")
            places = (indices.size, case.page_size)
        q, out = (
            make(case.q_offsets[-1], case.num_qo_heads, dim)
            for dim in (case.head_dim_qk, case.head_dim_vo)
        )
        k, v = (
            make(*places, case.num_kv_heads, dim, dtype=case.kv_dtype)
            for dim in (case.head_dim_qk, case.head_dim_vo)
        )
        mask = make(plans.mask_bytes(case), dtype="uint8") if case.has_mask else None
        wrapper = plans.wrapper_of(case, "cuda:0", indices, mask)
        made = plans.planned(wrapper)
        assert made is not None and made.requests.kv_len.tolist() == case.kv_lens
        wrapper.run(q, *(((k, v),) if case.api == "paged" else (k, v)), out=out)
        assert stream.jobs and as_bits(k).dtype.itemsize == (1 if "float8" in case.kv_dtype else 2)
        stream.jobs.clear()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_of_both_frameworks_hold_what_they_are_told(framework: str) -> None:
    pytest.importorskip(framework)
    made = Arrays(framework, CPU, 3)
    assert made.int32(np.array([2, 5])).tolist() == [2, 5]
    assert made.uint8(b"\x02\xff").tolist() == [2, 255]
    keys = as_bits(made.normal(3, 16, dtype=dtypes.float8_e4m3fn))
    assert keys.dtype == np.int8 and len(set(keys.reshape(-1).tolist())) > 10


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    case = draw_cases(3, 1)[0]
    made = [Row("a card", 1980.0, "c0ffee", case, x, 12.5, told, True)
            for x, told in (("q64_oneshot", 11.0), ("by row class", None))]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    rows.write(made, path)
    assert rows.read(path) == made
    path.write_text(path.read_text("utf-8") + '{"card": 1}\n', "utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: this is no row"):
        rows.read(path)


def test_old_rows_have_todays_names(tmp_path: Path) -> None:
    """As many names as candidates, and all that a plan offered such a batch then."""
    path = tmp_path / "rows.jsonl"
    case = next(
        x for x in draw_cases(3, 400) if (x.api, x.kind, x.head_dim_qk) == ("ragged", "short", 64)
    )
    then = ["large", "tall", "short", "queue", "lean", "flat"]
    rows.write([Row("a card", 1980.0, "c0ffee", case, x, 12.5, None, True) for x in then], path)
    found = plans.plan_of(case)
    assert found is not None and not case.logits_soft_cap
    later = {"q256_persistent", "q64_persistent"}
    today = {x.name for x in found.launcher.candidates(found.requests)} - later
    assert {row.candidate for row in rows.read(path)} == today


@pytest.mark.parametrize(
    ("then", "today"),
    [
        ("by rows", "by row class"),
        ("decode", "decode"),
        ("decode alone", "decode one_an_sm"),
        ("verify x8", "verify cluster8"),
        ("decode merged apart", "decode merge_launch"),
        ("middle + others", "q128_oneshot + others"),
        ("small", "small"),
        ("lean64", "lean64"),
    ],
)
def test_old_names_of_candidates(then: str, today: str) -> None:
    assert old_names.candidate(then, "paged", (128, 128)) == today
    assert old_names.candidate(today, "paged", (128, 128)) == today


ROWS = Path(__file__).parents[3] / "benchmarks/results/2026-11-27-h100-tiles/rows-3.jsonl.gz"


@pytest.mark.parametrize("does", ["--check", "--write"])
def test_a_card_is_checked_and_fitted_by_the_command(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    rows.write(rows.read(ROWS)[:400], few)
    (tmp_path / "h100.json").write_bytes((FOLDER / "h100.json").read_bytes())
    monkeypatch.setattr(cli, "FOLDER", tmp_path)
    assert cli.fitting([str(few), "--card", "H100", does]) == 0
    said = capsys.readouterr().out
    assert "regret" in said and ("fitted:" in said) == (does == "--write")
    made = read((tmp_path / "h100.json").read_text("utf-8"), "it")
    assert made.source == ("few.jsonl at fb8bbed" if does == "--write" else shipped_source())


def shipped_source() -> str:
    return read((FOLDER / "h100.json").read_text("utf-8"), "it").source

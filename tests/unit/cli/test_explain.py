"""`cupyattn explain`, without a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cupyattn import cli
from cupyattn.choose.card import shipped
from cupyattn.cli import explain
from cupyattn.core import device
from cupyattn.errors import DeviceError

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    **LLAMA,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def props(index: int) -> device.DeviceProps:
        raise DeviceError("no GPU")

    monkeypatch.setattr(explain, "device_props", props)


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """ask(*options, **fields of the model): (status, what it printed)."""

    def call(*options: str, model: dict[str, Any] = LLAMA, **fields: Any) -> tuple[int, str]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**model, **fields}))
        status = cli.main(["explain", "--model", str(path), *options])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return call


def test_decodes_beside_chunks(ask: Any) -> None:
    status, text = ask("--batch", "64x1:4096,2x512:2048")
    assert status == 0 and text.startswith("card       NVIDIA H100 80GB HBM3: sm_90a, 132 SMs")
    assert "66 requests: 64 x 1 row over 4,096 keys; 2 x 512 rows over 2,048 keys" in text
    assert "32 query heads over 8 key heads, head dim 128, pages of 16 tokens, causal" in text
    assert "prefill_sm90 (" in text and "+ decode_sm80 (decode)" in text and "taken" in text


@pytest.mark.parametrize("card", [card.name.lower() for card in shipped()])
def test_each_shipped_card_has_its_own_times(ask: Any, card: str) -> None:
    status, text = ask("--batch", "8x1:9000", "--card", card)
    own = next(x for x in shipped() if x.name.lower() == card)
    assert status == 0 and f"times      of {own.name}, " in text and "not measured" not in text
    assert f"{own.memory_rate:,.0f} GB/s" in text


def test_options_of_the_command(ask: Any) -> None:
    _, text = ask("--batch", "4x2000:2000", "--page-size", "0", "--window", "100")
    assert "ragged keys, causal, a window of 100 keys" in text
    status, text = ask("--batch", "900:90", "--no-causal")
    assert status == 0 and "pages of 16 tokens\n" in text and "1 x 900 rows over 90 keys" in text
    _, text = ask("--batch", "1:9", "--kv-dtype", "float8_e4m3fn", "--dtype", "float16")
    assert "float16 over keys of float8_e4m3fn" in text
    _, text = ask("--batch", "1:9", "--tensor-parallel", "4")
    assert "8 query heads over 2 key heads" in text
    _, text = ask("--batch", "1:9", "--tensor-parallel", "16")
    assert "2 query heads over 1 key head," in text
    _, text = ask("--batch", "1:9", attn_logit_softcapping=30.0)
    assert "a soft cap" in text


def test_latent_attention_in_absorbed_form(ask: Any) -> None:
    status, text = ask("--batch", "128x1:4096", model=DEEPSEEK)
    assert status == 0 and "128 heads, latent keys of 512 and 64 columns" in text
    assert "wide_decode_sm90" in text or "wide_sm90" in text


def test_the_picture(ask: Any, tmp_path: Path) -> None:
    path = tmp_path / "sms.svg"
    status, text = ask("--batch", "64x1:4096", "--plot", str(path))
    assert status == 0 and f"picture: {path}" in text
    assert path.read_text("utf-8").startswith("<svg")
    status, text = ask("--batch", "64x1:4096", "--plot", str(tmp_path / "none" / "x.svg"))
    assert status == 2 and "--plot: " in text and "cannot be written" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "64x1"], "--batch: got '64x1'; wanted COUNTxROWS:KEYS"),
        (["--batch", ""], "--batch: got ''"),
        (["--batch", "0:5"], "--batch: got '0:5'"),
        (["--batch", "0x1:5"], "no requests"),
        (["--batch", "9:5"], "9 query tokens and 5 keys"),
        (["--batch", f"1:{2**40}"], "of lengths up to"),
        (["--batch", "99999x1:5"], "more than 65536 requests"),
        (["--batch", "1:5", "--page-size", "-1"], "--page-size"),
        (["--batch", "1:5", "--window", "-2"], "--window"),
        (["--batch", "1:5", "--kv-dtype", "int99"], "--kv-dtype"),
        (["--batch", "1:5", "--tensor-parallel", "3"], "--tensor-parallel: got 3"),
    ],
)
def test_mistakes_are_named(ask: Any, options: list[str], words: str) -> None:
    status, text = ask(*options)
    assert status == 2 and text.startswith("cupyattn explain: ") and words in text


def test_models_that_cannot_be_explained(ask: Any) -> None:
    status, text = ask("--batch", "1:5", head_dim=100)
    assert status == 2 and "head_dim_qk: 100 is not supported" in text
    status, text = ask("--batch", "1:5", model={})
    assert status == 2 and "--model: the file has" in text


def test_the_gpu_that_is_here(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its properties count, and no kernel is compiled for it."""
    here = dataclasses.replace(device.NO_GPU, index=0, name="NVIDIA H200", memory_rate=4800.0)
    monkeypatch.setattr(explain, "device_props", lambda index: here)
    status, text = ask("--batch", "64x1:4096")
    assert status == 0 and text.startswith("card       NVIDIA H200: ")
    other = dataclasses.replace(here, name="some Ampere", arch="sm_80", num_sms=108)
    monkeypatch.setattr(explain, "device_props", lambda index: other)
    status, text = ask("--batch", "2x512:2048,8x1:4096")
    assert status == 0 and "it is made for sm_90a, and the card is sm_80" in text
    assert "scaled by memory's rate and clock; this card is not measured" in text


M3 = {**LLAMA, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
LISTS = ("--page-size", "128", "--card", "h200", "--lists", "16x128")


def taken_of(text: str) -> str:
    (taken,) = [line for line in text.splitlines() if line.endswith("taken")]
    return taken


def test_few_lists_are_shared_by_clusters(ask: Any) -> None:
    status, text = ask("--batch", "8x1:32768", *LISTS, "--list-window", "64", model=M3)
    assert status == 0
    assert "lists of 16 blocks of 128 keys and the last 64 keys" in text
    assert taken_of(text).startswith("each list by a cluster of 4")
    assert "each list in 4 parts, which a launch merges" in text
    assert "unions of neighbours' lists  too few neighbours" in text
    assert "decode_sm80 (decode)" in text and "128 in clusters of 4" in text


def test_many_lists_are_read_by_blocks(ask: Any) -> None:
    status, text = ask("--batch", "64x1:32768", *LISTS, model=M3)
    assert status == 0 and taken_of(text).split() == "each list by a block — taken".split()


def test_prompts_have_unions(ask: Any, tmp_path: Path) -> None:
    picture = tmp_path / "sms.svg"
    status, text = ask("--batch", "1x4096:32768", *LISTS, "--plot", str(picture), model=M3)
    assert status == 0 and picture.read_text().startswith("<svg")
    assert taken_of(text).startswith("unions of neighbours' lists")
    assert "union_lists" in text and "prefill_sm90" in text


def test_selections(ask: Any) -> None:
    status, text = ask("--batch", "8x1:32768", *LISTS, "--select", "4x128", model=M3)
    assert status == 0
    assert "16 blocks of 128 keys by max of 4 index heads in 4 groups" in text
    assert "select_scores (max)" in text and "select_topk (max)" in text
    assert "lists by warps" in text
    options = ("--select", "64x128", "--shared-lists", "--score", "relu_sum")
    status, text = ask("--batch", "1x4096:32768", *LISTS, *options, model=M3)
    assert status == 0 and "by relu_sum of 64 index heads in 1 group" in text
    status, text = ask("--batch", "8x1:32768", *LISTS, "--select", "4x100", model=M3)
    assert status == 0 and "head_dim 100 has no GPU kernel" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lists", "16"), "--lists: got '16'; wanted two numbers, such as 16x128"),
        (("--lists", "16x100"), "--lists: got 100; wanted the keys of a block"),
        (("--lists", "16x128", "--page-size", "0"), "--page-size: got 0 with --lists"),
        (("--lists", "16x128", "--window", "9"), "--window: given with --lists"),
        (("--lists", "16x128", "--select", "4"), "--select: got '4'"),
        (("--lists", "16x128", "--select", "6x128"), "--select: got 6 index heads"),
        (("--select", "4x128"), "--select: given without --lists"),
    ],
)
def test_lists_that_mean_nothing(ask: Any, options: tuple[str, ...], message: str) -> None:
    status, text = ask("--batch", "8x1:32768", *options, model=M3)
    assert status == 2 and message in text


def test_lists_of_latent_models_are_refused(ask: Any) -> None:
    status, text = ask("--batch", "8x1:32768", "--lists", "16x64", model=DEEPSEEK)
    assert status == 2 and "--lists: are explained of keys and values" in text

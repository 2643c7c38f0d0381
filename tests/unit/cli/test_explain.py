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

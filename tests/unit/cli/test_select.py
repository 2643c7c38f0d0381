"""Which kernels options of `cupyattn compile` and config.json files select."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupyattn.cli import model, select
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError
from cupyattn.launch.instances import LEVELS, OPTIONS, Selection, instances

BF16, FP16, E4M3 = dtypes.bfloat16, dtypes.float16, dtypes.float8_e4m3fn
LLAMA: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "rope_theta": 5e5,
}
DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# What LLAMA needs.
ORDINARY = Selection(
    operations=tuple(name for name in Selection.operations if name != "mla"),
    dtypes=((BF16, BF16),),
    head_dims=((128, 128),),
    groups=(4,),
)


def chosen(*arguments: str) -> list[Selection]:
    parser = argparse.ArgumentParser()
    select.add_arguments(parser)
    return select.selections(parser.parse_args(arguments))


def config(place: Path, **changes: Any) -> Path:
    path = place / "config.json"
    known = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
    path.write_text(json.dumps(known))
    return path


def test_a_level_is_taken_as_it_is() -> None:
    assert chosen() == list(LEVELS["standard"])
    assert chosen("--level", "full") == list(LEVELS["full"])


@pytest.mark.parametrize(
    ("arguments", "field", "values"),
    [
        (["--op", "decode,page", "--op", "merge"], "operations", ("decode", "page", "merge")),
        (
            ["--dtype", "bf16, float16/float8_e4m3fn"],
            "dtypes",
            ((BF16, BF16), (FP16, E4M3)),
        ),
        (["--head-dim", "80", "--head-dim", "192/128"], "head_dims", ((80, 80), (192, 128))),
        (["--group", "4,4,48"], "groups", (4, 48)),
        (["--page-size", "0,64"], "page_sizes", (0, 64)),
        (
            ["--option", "alibi+soft_cap,none"],
            "options",
            (frozenset({"alibi", "soft_cap"}), frozenset({"none"})),
        ),
    ],
)
def test_an_option_replaces_one_choice(arguments: list[str], field: str, values: tuple) -> None:
    found = chosen(*arguments)
    assert len(found) == len(LEVELS["standard"])
    for one, before in zip(found, LEVELS["standard"], strict=True):
        assert getattr(one, field) == values
        others = (set(Selection.__dataclass_fields__)) - {field}
        assert all(getattr(one, x) == getattr(before, x) for x in others)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_selects_kernels(name: str) -> None:
    found = chosen("--option", name, "--head-dim", "128", "--dtype", "bf16")
    names = {name for name, _ in instances(found, "sm_90a")}
    assert {"decode_sm80", "prefill_sm80"} <= names


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "decoding"], "operation: got 'decoding'; wanted one of 'decode'"),
        (["--dtype", "float33"], "unknown dtype 'float33'"),
        (["--head-dim", "128/x"], "head dim: got 'x'; wanted an integer"),
        (["--group", "0"], "group: got 0; wanted an integer, 1 or more"),
        (["--page-size", "-1"], "page size: got -1"),
        (["--option", "alibi+rope"], "alibi and rope exclude each other"),
        (["--level", "full", "--model", "config.json"], "not allowed with"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        chosen(*arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["--dtype", "float32"], UnsupportedError),
        (["--dtype", "float16/bfloat16"], ArgumentError),
        (["--head-dim", "300"], UnsupportedError),
        (["--option", "rope", "--head-dim", "72"], ArgumentError),
        (["--option", "draft_mask", "--page-size", "0"], ArgumentError),
    ],
)
def test_a_selection_without_kernels_is_refused(
    arguments: list[str], kind: type[CupyAttnError]
) -> None:
    with pytest.raises(kind):
        chosen(*arguments)


# --- config.json ---


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ORDINARY),
        (
            {"num_key_value_heads": ..., "dtype": "float16", "head_dim": None},
            replace(ORDINARY, dtypes=((FP16, FP16),), groups=(1,)),
        ),
        (
            {"head_dim": 256, "attn_logit_softcapping": 50.0, "sliding_window": 4096},
            replace(ORDINARY, head_dims=((256, 256),), options=(frozenset({"soft_cap"}),)),
        ),
        (
            {"head_dim": 192, "v_head_dim": 128, "linear_key_head_dim": 96, "alibi": True},
            replace(ORDINARY, head_dims=((192, 128),), options=(frozenset({"alibi"}),)),
        ),
    ],
)
def test_a_model(tmp_path: Path, changes: dict[str, Any], wanted: Selection) -> None:
    assert model.read(config(tmp_path, **changes)) == wanted


def test_a_model_of_latent_attention(tmp_path: Path) -> None:
    found = model.read(config(tmp_path, **DEEPSEEK))
    assert found.head_dims == ((192, 128),) and found.groups == (1,) and found.page_sizes == (0,)
    names = {name for name, _ in instances([found], "sm_90a")}
    assert {"wide_sm90", "prefill_sm90", "append_paged_kv_cache"} <= names
    names = {name for name, _ in instances([model.read(config(tmp_path))], "sm_90a")}
    assert {"decode_sm80", "merge_levels"} <= names and "wide_sm90" not in names
    path = config(tmp_path, **DEEPSEEK)
    (found,) = chosen("--model", str(path), "--head-dim", "128")
    assert found.head_dims == ((128, 128),)


def test_a_model_inside_another(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    inner = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    path.write_text(json.dumps({"text_config": inner, "dtype": "bfloat16", "vision_config": {}}))
    assert model.read(path) == model.read(config(tmp_path))


def test_options_replace_what_a_model_says_or_lacks(tmp_path: Path) -> None:
    path = config(tmp_path, torch_dtype=..., swa_head_dim=192)
    given = ["--dtype", "bfloat16/float8_e4m3fn", "--head-dim", "128,192", "--op", "decode"]
    (found,) = chosen("--model", str(path), *given)
    assert found.dtypes == ((BF16, E4M3),) and found.head_dims == ((128, 128), (192, 192))
    assert found.operations == ("decode",) and found.groups == (4,)
    path.write_text("{}")
    (found,) = chosen("--model", str(path), *given, "--group", "2")
    assert found.groups == (2,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": ...}, "the file has no num_attention_heads"),
        ({"num_attention_heads": "32"}, "num_attention_heads: got '32'"),
        ({"num_key_value_heads": 5}, "32 is no multiple of num_key_value_heads, 5"),
        ({"hidden_size": 4100}, "4100 is no multiple"),
        ({"hidden_size": ...}, "the file has no hidden_size"),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"swa_head_dim": 64}, "swa_head_dim is not known"),
        ({"torch_dtype": ...}, "neither dtype nor torch_dtype; give --dtype"),
        ({"torch_dtype": "float32"}, "no kernels for float32"),
        ({"torch_dtype": "auto"}, "unknown dtype 'auto'"),
        ({"attn_logit_softcapping": "50"}, "got '50'; wanted a number"),
        (DEEPSEEK | {"kv_lora_rank": 384}, "no kernels for 384 and 64"),
        (DEEPSEEK | {"v_head_dim": ...}, "the file has no v_head_dim"),
    ],
)
def test_a_model_that_is_not_understood(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CupyAttnError, match=said) as raised:
        model.read(config(tmp_path, **changes))
    assert "--model: " in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        (100_000 * "[", "is no JSON"),
        ("[]", "holds list"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        model.read(path)

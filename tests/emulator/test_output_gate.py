"""Gates of the output on the host: every kernel that writes one, with and without splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batch_calls, batch_cases, cascade_calls, gates, gpu_cases, single_calls
from helpers.batch_cases import Problem
from helpers.cases import Case
from helpers.flash_cases import FORMS
from helpers.flash_cases import Case as FlashCase
from helpers.gates import KINDS, gated
from helpers.share import one_of

import cupyattn
from cupyattn.launch.attention.batch import BatchLauncher

from . import gpu, run, test_batch, test_cascade

SMALL = replace(gpu_cases.PLAIN, qo_len=70, kv_len=150, head_dim_qk=64, head_dim_vo=64, seed=4)
# (what of the call, facts of the GPU, the kernels that run)
SINGLE: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "decode": ({"qo_len": 1}, {}, {"decode_sm80"}),
    "decode that merges": (
        {"qo_len": 2, "num_kv_heads": 1, "kv_len": 1900},
        {"is_portable": True},
        {"decode_sm80"},
    ),
    "decode in clusters": (
        {"qo_len": 1, "num_kv_heads": 1, "kv_len": 1900},
        {"has_clusters": True},
        {"decode_sm80"},
    ),
    "prefill": ({}, {"is_portable": True}, {"prefill_sm80"}),
    "prefill that splits": (
        {"qo_len": 20, "num_kv_heads": 1, "kv_len": 1600},
        {"is_portable": True},
        {"prefill_sm80", "merge_splits"},
    ),
    "prefill of odd columns": (
        {"head_dim_qk": 72, "head_dim_vo": 72},
        {"is_portable": True},
        {"prefill_sm80"},
    ),
    "prefill over fp8": (
        {"kv_dtype": "float8_e4m3fn", "has_sinks": True, "scale_v": "per_head"},
        {"is_portable": True},
        {"prefill_sm80"},
    ),
    "fp8 output": ({"o_dtype": "float8_e4m3fn"}, {}, {"prefill_sm90"}),
    "prefill on Hopper": ({}, {}, {"prefill_sm90"}),
    "prefill on Hopper over fp8": ({"kv_dtype": "float8_e4m3fn"}, {}, {"prefill_sm90"}),
    "prefill on Hopper that splits": (
        {"num_kv_heads": 1, "kv_len": 1900, "has_sinks": True},
        {},
        {"prefill_sm90", "merge_splits"},
    ),
    "wide heads": (
        {"qo_len": 9, "head_dim_qk": 512, "head_dim_vo": 512},
        {"is_portable": True},
        {"wide_sm80"},
    ),
    "wide heads that merge": (
        {"qo_len": 1, "num_kv_heads": 1, "kv_len": 900, "head_dim_qk": 512, "head_dim_vo": 512},
        {"is_portable": True},
        {"wide_sm80"},
    ),
    "wide heads on Hopper": (
        {"qo_len": 9, "head_dim_qk": 512, "head_dim_vo": 512},
        {},
        {"wide_sm90"},
    ),
    "wide heads on Hopper that split": (
        {"qo_len": 5, "num_kv_heads": 1, "kv_len": 900, "head_dim_qk": 512, "head_dim_vo": 512},
        {},
        {"wide_sm90", "merge_splits"},
    ),
}


def answer(case: Case, kind: str, *, strides: str = "", **facts: Any) -> set[str]:
    """The kernels that ran, once the answer is right."""
    facts.setdefault("num_sms", 12)
    with gpu.plugged_in(**facts) as emulated:
        call = gated(single_calls.Call(case, np), kind, strides=strides)
        call.check(*call.run(), may_be_hoppers=emulated.has_launched("prefill_sm90"))
    return {launch.name for launch in emulated.launches}


@pytest.mark.parametrize("name", SINGLE)
def test_every_kernel(name: str) -> None:
    changes, facts, kernels = SINGLE[name]
    case = replace(SMALL, **changes)
    for kind in KINDS[:2]:
        assert answer(case, kind, strides="packed", **facts) == kernels


@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind: str) -> None:
    """Rows of gates off 16-byte boundaries go to kernels for such rows; those of heads do not."""
    for strides in ("packed", "padded", "unaligned", "swapped"):
        kernels = answer(SMALL, kind, strides=strides)
        is_off = strides == "unaligned" and kind.endswith("elements")
        assert kernels == {"prefill_sm80" if is_off else "prefill_sm90"}


@pytest.mark.parametrize("index", one_of(6, range(24)))
def test_crossed_with_random_options(index: int) -> None:
    for seed in range(index, index + 48, 24):
        case = run.small(gpu_cases.classed(seed), 40, 120)
        answer(case, gates.of_kind(seed // 3), seed=seed % 4)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_decode_of_one_row(kind: str) -> None:
    with gpu.plugged_in():
        call = single_calls.Call(gpu_cases.decode(3), np, is_decode=True)
        gated(call, kind, is_row=True)
        call.check(*call.run())


def test_rows_that_see_no_key_stay_zero() -> None:
    case = replace(SMALL, kv_len=3, causal=True)
    with gpu.plugged_in():
        call = gated(single_calls.Call(case, np), "elements", strides="packed")
        out, _ = call.run()
    assert not out[: case.qo_len - case.kv_len].astype(np.float32).any()


@pytest.mark.parametrize("seed", one_of(3, range(4 * len(FORMS))))
def test_calls_of_flash_attn(seed: int) -> None:
    with gpu.plugged_in(seed=seed % 3):
        FlashCase(seed, is_gpu=True, gate=gates.of_kind(seed // len(FORMS))).run()


# --- batches ---


def in_batch(case: batch_cases.Case, kind: str, **facts: Any) -> list[str]:
    """The kernels that ran, once the answer is right."""

    def make(workspace: Any) -> Any:
        return gated(batch_calls.planned(case, np, workspace), kind)

    return [launch.name for launch in run.emulate(make, **facts).launches]


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("keys", test_batch.KINDS)
def test_batches(keys: str, kind: str) -> None:
    case = replace(test_batch.BASE, **test_batch.KINDS[keys])
    assert "prefill_sm90" in in_batch(case, kind)
    assert "mixed_sm80" in in_batch(case, kind, is_portable=True)
    split = replace(case, qo_len=(40, 33), split=(130 if keys == "ragged" else 8, False))
    assert "merge_splits" in in_batch(split, kind)
    merged = replace(case, qo_len=(1, 2), split=split.split)
    assert set(in_batch(merged, kind)) == {"decode_sm80"}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_wide_heads_that_the_last_block_merges(kind: str) -> None:
    wide = Problem("bfloat16", "bfloat16", (512, 512))
    case = replace(test_batch.BASE, problem=wide, qo_len=(1, 2), num_kv_heads=1)
    assert set(in_batch(case, kind, num_sms=16)) == {"wide_sm90"}


@pytest.mark.parametrize("index", one_of(8, range(24)))
def test_random_batches(index: int) -> None:
    in_batch(batch_cases.random_case(index), gates.of_kind(index), num_sms=8 + index)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_levels_of_a_cascade(kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchLauncher, "gains_by_levels", lambda *_: True)

        def make(workspace: Any) -> Any:
            return gated(cascade_calls.planned(test_cascade.BASE, np, workspace), kind)

        emulated = run.emulate(make, workspace_bytes=64 << 20)
    assert emulated.launches[-1].name == "merge_levels"


def test_a_gate_replaces_no_array_of_expressions() -> None:
    """It takes the place of the fourth, and a call has three."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((n, 2, 64)).astype(np.float16) for n in (9, 40, 40))
    a, b, c = (rng.standard_normal(2).astype(np.float32) for _ in "abc")
    gate = rng.standard_normal((9, 2)).astype(np.float32)
    given = {
        "logits_transform": "logit + a[head] * b[head] - c[head]",
        "logits_params": {"a": a, "b": b, "c": c},
        "output_gate": gate,
    }
    with gpu.plugged_in():
        got = cupyattn.single_prefill_with_kv_cache(q, k, v, **given)
    wanted = cupyattn.single_prefill_with_kv_cache(q, k, v, **given)
    np.testing.assert_allclose(got.astype(float), wanted.astype(float), atol=2e-3)
    more = {"logits_transform": given["logits_transform"] + " * d[head]"}
    more["logits_params"] = {**given["logits_params"], "d": c}
    with pytest.raises(cupyattn.UnsupportedError, match=r"output_gate: .*at most 3"):
        cupyattn.single_prefill_with_kv_cache(q, k, v, **given | more)

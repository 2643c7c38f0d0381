"""The cases of the GPU suite: deterministic, within their classes, and cheap to compile for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import gpu_cases, precompile, prefill_sm90_calls
from helpers.calls import run_and_check
from helpers.single_calls import Call

from cupyattn import jit
from cupyattn.launch.ops.packbits import CONFIG as PACKBITS_CONFIG


@pytest.mark.slow
def test_there_are_enough_and_few_kernels_serve_them() -> None:
    calls = list(gpu_cases.all_cases())
    assert len(calls) >= 1200
    assert [case for case, _ in gpu_cases.all_cases()] == [case for case, _ in calls]
    runs = (partial(precompile.single, *call) for call in calls)
    needed = [set(kernels) for kernels in precompile.recorded(runs, "sm_90a")]
    classed = {gpu_cases.classed(seed) for seed in range(gpu_cases.NUM_CLASSED)}
    for_classed = [
        kernels for (case, _), kernels in zip(calls, needed, strict=True) if case in classed
    ]
    assert len(for_classed) >= len(classed)
    assert len(set().union(*for_classed)) <= 4 * len(gpu_cases.CLASSES) + 40
    assert len(set().union(*needed)) <= 520


def test_cases_belong_to_their_class() -> None:
    """Alignment apart: rows that are padded or alone may be aligned by chance."""
    for seed in range(3 * len(gpu_cases.CLASSES)):
        case, wanted = gpu_cases.classed(seed), gpu_cases.CLASSES[seed % len(gpu_cases.CLASSES)]
        assert (case.dtype, case.kv_dtype, case.o_dtype) == (
            wanted.dtype,
            wanted.kv_dtype,
            wanted.o_dtype,
        )
        assert (case.head_dim_qk, case.head_dim_vo) == wanted.dims
        assert case.pos_encoding_mode == wanted.pos_encoding_mode
        assert bool(case.logits_soft_cap) == wanted.is_capped
        assert (case.mask_kind != "none") == wanted.is_masked
        assert ("per_head" in (case.scale_q, case.scale_k)) == wanted.prescale_logits
        assert ("unaligned" in case.strides) != wanted.is_aligned


def test_run_time_options_vary_within_a_class() -> None:
    made = [gpu_cases.classed(seed) for seed in range(gpu_cases.NUM_CLASSED)]
    for name in ("causal", "kv_layout", "has_sinks", "return_lse", "scale_v", "qo_len", "group"):
        assert len({getattr(case, name) for case in made}) > 1, name
    assert {case.window_left for case in made} >= {-1, 0, 1, 63, 64}
    assert any(case.kv_len < case.qo_len for case in made)
    assert any(case.kv_len == 0 for case in made) and any(case.qo_len == 0 for case in made)


def test_decode_and_split_cases_are_what_they_say() -> None:
    for seed in range(gpu_cases.NUM_DECODE):
        case = gpu_cases.decode(seed)
        assert case.qo_len == 1 and case.mask_kind == "none" and case.o_dtype is None
        assert "per_head" not in (case.scale_q, case.scale_k, case.scale_v)
    for seed in range(gpu_cases.NUM_SPLIT):
        case = gpu_cases.split(seed)
        assert case.qo_len <= 16 and case.kv_len >= 2000 and case.num_kv_heads <= 2


@pytest.mark.parametrize("is_decode", [False, True])
def test_cases_run_on_the_cpu_too(is_decode: bool) -> None:
    """The calls and checks of the GPU suite themselves, with NumPy in CuPy's place."""
    make = gpu_cases.decode if is_decode else gpu_cases.classed
    for seed in range(0, 120, 5):
        run_and_check(Call(make(seed), np, is_decode=is_decode))


def test_a_wrong_answer_or_a_stray_write_fails() -> None:
    case = gpu_cases.ALONE["causal, prefill"]
    call = Call(case, np)
    call.check(*call.run())
    call.out.array[5, 1, 7] *= -1
    with pytest.raises(AssertionError, match=r"o: .*\n.*at \(5, 1, 7\)"):
        call.check(*call.answers())
    call.start()
    call.out.buffer.view(np.uint16)[3] = 0
    with pytest.raises(AssertionError, match="out: 1 elements outside the array were written"):
        call.check(*call.answers())


def _kernels(run: Any, case: Any) -> list[precompile.Instance]:
    return precompile.instances([partial(run, case)], "sm_90a")


def test_recorded_kernels_build(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path))
    found = _kernels(precompile.single, gpu_cases.ALONE["bool mask, one row"])
    assert {name for name, _ in found} == {"decode_sm80", "packbits"}
    assert ("packbits", PACKBITS_CONFIG) in found
    assert jit.build(*found[0], "sm_90a").path.is_relative_to(tmp_path)
    assert _kernels(precompile.single, gpu_cases.ALONE["no rows, prefill"]) == []
    found = _kernels(precompile.single, gpu_cases.STEADY["rope"])
    assert {name for name, _ in found} == {"prefill_sm90", "rotate_keys"}


@pytest.mark.parametrize("name", prefill_sm90_calls.CASES)
def test_kernels_that_run_many_times_are_recorded(name: str) -> None:
    case = prefill_sm90_calls.CASES[name]
    found = dict(_kernels(precompile.prompts, case))
    assert found["prefill_sm90"]["kHeadDimQK"] == case.dim
    assert found["prefill_sm90"]["kPaged"] == (case.page_size > 0)
    assert found["prefill_sm90"]["kSoftCap"] == ("logits_soft_cap" in case.options)
    assert ("rotate_keys" in found) == (case.options.get("pos_encoding_mode") == "ROPE_LLAMA")

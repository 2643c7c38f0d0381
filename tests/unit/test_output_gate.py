"""Gates of the output: by hand on the CPU, what is refused, and what a stand-in GPU is told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import batch_cases, batches, cascade_calls, flash_cases, gpu_cases, single_calls
from helpers.batch_calls import planned
from helpers.batches import HKV, HQ, D
from helpers.calls import run_and_check
from helpers.fake_batch import Device
from helpers.fake_gpu import Gpu, pointer, unpack
from helpers.flash_cases import FORMS
from helpers.gates import KINDS, gated, of_kind, sigmoid

import cupyattn
from cupyattn import reference
from cupyattn.engine import check_planless
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError
from cupyattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from cupyattn.launch.driver import params

prefill, decode = cupyattn.single_prefill_with_kv_cache, cupyattn.single_decode_with_kv_cache


def arrays(rows: int = 7, keys: int = 9, dim: int = 16) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    q, gate = rng.standard_normal((2, rows, 4, dim)).astype(np.float16)
    k, v = rng.standard_normal((2, keys, 2, dim)).astype(np.float16)
    return q, k, v, gate


def test_the_reference_multiplies_by_the_sigmoid() -> None:
    q, k, v, gate = arrays()
    plain, plain_lse = reference.attention(q, k, v)
    for chosen, factor in ((gate, sigmoid(gate)), (gate[..., 0], sigmoid(gate[..., 0]))):
        out, lse = reference.attention(q, k, v, output_gate=chosen)
        np.testing.assert_allclose(out, plain * factor, rtol=1e-12)
        np.testing.assert_array_equal(lse, plain_lse)
    by_hand = plain[2, 1, 3] / (1.0 + np.exp(-float(gate[2, 1, 3])))
    assert reference.attention(q, k, v, output_gate=gate)[0][2, 1, 3] == pytest.approx(by_hand)
    with pytest.raises(ArgumentError, match=r"output_gate: got shape \[7, 16\]"):
        reference.attention(q, k, v, output_gate=gate[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_one_request(kind: str) -> None:
    case = replace(gpu_cases.PLAIN, qo_len=9, kv_len=20, dtype="float16", kv_dtype="float16")
    run_and_check(gated(single_calls.Call(case, np), kind))
    one = gpu_cases.decode(1)
    run_and_check(gated(single_calls.Call(one, np, is_decode=True), kind, is_row=True))


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    case = batch_cases.random_case(seed)
    run_and_check(gated(planned(case, np, np.zeros(16 << 20, np.uint8)), of_kind(seed)))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_cascades(kind: str) -> None:
    call = cascade_calls.planned(cascade_calls.random_case(4), np, np.zeros(16 << 20, np.uint8))
    run_and_check(gated(call, kind))


@pytest.mark.parametrize("seed", range(2 * len(FORMS)))
def test_calls_of_flash_attn(seed: int) -> None:
    flash_cases.Case(seed, gate=of_kind(seed)).run()


DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "from the first": {"is_causal": True, "causal_alignment": "first"},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "mask": {"mask": np.tri(7, 9, 1, dtype=bool)},
    "bias": {"bias": np.linspace(0, 3, 4 * 7 * 9, dtype=np.float32).reshape(4, 7, 9)},
    "keys": {"key_value_seq_lengths": np.array([5, 9], np.int32)},
    "rows and keys": {
        "query_seq_lengths": np.array([5, 7], np.int32),
        "key_value_seq_lengths": np.array([5, 9], np.int32),
    },
    "expression": {"logits_transform": "2.0 * logit"},
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("columns", [1, 2], ids=["heads", "elements"])
def test_dot_product_attention(name: str, columns: int) -> None:
    rng = np.random.default_rng(5)
    q, gate = rng.standard_normal((2, 2, 7, 4, 16)).astype(np.float16)
    k, v = rng.standard_normal((2, 2, 9, 2, 16)).astype(np.float16)
    gate = gate if columns == 2 else gate[..., 3]
    factors = sigmoid(gate.reshape(14, *gate.shape[2:])).reshape(2, 7, 4, -1)
    attend = functools.partial(cupyattn.dot_product_attention, **DENSE[name])
    plain, plain_lse = attend(q, k, v, return_lse=True)
    out, lse = attend(q, k, v, output_gate=gate, return_lse=True)
    np.testing.assert_allclose(out, plain * factors, atol=1e-3)
    np.testing.assert_array_equal(lse, plain_lse)
    with pytest.raises(ArgumentError, match=r"output_gate: shape is \[2, 6, 4"):
        attend(q, k, v, output_gate=gate[:, :6])
    if name not in ("keys", "rows and keys"):
        one = cupyattn.dot_product_attention(q[0], k[0], v[0], output_gate=gate[0], **DENSE[name])
        np.testing.assert_array_equal(one, out[0])


def test_head_dims_that_are_copied() -> None:
    rng = np.random.default_rng(6)
    q, gate = rng.standard_normal((2, 1, 7, 4, 15)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 9, 2, 15)).astype(np.float16)
    plain = flash_attn_func(q, k, v)
    out = flash_attn_func(q, k, v, output_gate=gate[..., 0])
    np.testing.assert_allclose(out, plain * sigmoid(gate[0, ..., 0]), atol=1e-3)
    with pytest.raises(UnsupportedError, match=r"output_gate: .* head_dim of 15"):
        flash_attn_func(q, k, v, output_gate=gate)


def test_rows_without_keys_stay_zero_and_a_gate_touches_its_row_alone() -> None:
    q, k, v, gate = arrays(keys=3)
    gate[5, 2] = np.nan
    plain = prefill(q, k, v, causal=True)
    out = prefill(q, k, v, causal=True, output_gate=gate)
    assert not out[:4].any()
    assert np.isnan(out[5, 2]).all()
    others = np.ones(out.shape[:2], bool)
    others[5, 2] = False
    assert np.isfinite(out[others]).all() and (abs(out[others]) <= abs(plain[others])).all()


def test_fp8_outputs_are_rounded_behind_the_gate() -> None:
    q, k, v, gate = arrays()
    gate[...] = -8.0  # the gated values are below the least fp8 number but for the scale
    given = {"o_dtype": "float8_e4m3fn", "v_scale": 1000.0}
    out = prefill(q, k, v, output_gate=gate, **given).astype(np.float32)
    exact = reference.attention(q, k, v)[0] * 1000.0 * sigmoid(gate)
    np.testing.assert_array_equal(out, exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert abs(exact).max() < 448 < abs(reference.attention(q, k, v)[0] * 1000.0).max()


# --- what is refused ---

WRONG: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "fewer rows": (lambda g: g[1:], r"shape is \[6, 4, 16\]; wanted \[7, 4\], .* \[7, 4, 16\]"),
    "KV heads": (lambda g: g[:, :2], r"shape is \[7, 2, 16\]"),
    "no heads": (lambda g: g[:, 0, 0], r"shape is \[7\]"),
    "other columns": (lambda g: g[..., :8], r"shape is \[7, 4, 8\]"),
    "float64": (lambda g: g.astype(np.float64), "dtype float64 is not supported"),
    "bfloat16": (lambda g: g.astype(ml_dtypes.bfloat16), "dtype is bfloat16"),
    "columns apart": (
        lambda g: np.repeat(g, 2, axis=-1)[..., ::2],
        "the last dimension has stride 2",
    ),
    "a number": (lambda g: 0.5, "output_gate"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    q, k, v, gate = arrays()
    make, said = WRONG[name]
    with pytest.raises(CupyAttnError, match=said):
        prefill(q, k, v, output_gate=make(gate))
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 20, np.uint8))
    wrapper.plan(np.array([0, 7], np.int32), np.array([0, 9], np.int32), 4, 2, 16)
    with pytest.raises(CupyAttnError, match=said):
        wrapper.run(q, k, v, output_gate=make(gate))


def test_an_output_may_not_lie_in_its_gates() -> None:
    q, k, v, gate = arrays()
    with pytest.raises(ArgumentError, match=r"out: .*output_gate"):
        prefill(q, k, v, output_gate=gate, out=gate)


def test_nothing_is_launched_for_gates_that_are_refused(gpu: Gpu, make: Callable) -> None:
    q, k, v = make(7, 4, 64), make(9, 2, 64), make(9, 2, 64)
    for gate in (make(7, 4, 32), make(7, 4, 64, dtype="float16"), np.zeros((7, 4), np.float32)):
        with pytest.raises(ArgumentError):
            prefill(q, k, v, output_gate=gate)
    assert not gpu.launches


def test_four_arrays_leave_no_room() -> None:
    q, k, v, gate = arrays()
    names = "abcd"
    given = {name: np.zeros(4, np.float32) for name in names}
    text = "logit + " + " + ".join(f"{name}[head]" for name in names)
    with pytest.raises(UnsupportedError, match=r"output_gate: .* 4 arrays .* at most 3"):
        prefill(q, k, v, output_gate=gate, logits_transform=text, logits_params=given)


# --- launches ---


def _gate_of(launch: Any) -> tuple[int, ...]:
    raw = unpack(launch.params)["logits_arrays"]
    if not raw:
        return (0, 0, 0)
    return params.OUTPUT_GATE.unpack_from(raw, len(raw) - params.OUTPUT_GATE.size)


def test_what_a_launch_is_told(gpu: Gpu, make: Callable) -> None:
    q, k, v = make(300, 4, 64), make(500, 2, 64), make(500, 2, 64)
    elements, heads = make(300, 4, 96)[..., 32:], make(300, 8, dtype="float32")[:, ::2]
    for gate, strides in ((elements, (384, 96)), (heads, (8, 2))):
        gpu.launches.clear()
        prefill(q, k, v, output_gate=gate)
        attention, merge = gpu.launches
        assert merge.kernel == "merge_splits" and merge.params == attention.params
        assert _gate_of(attention) == (pointer(gate), *strides)
        config = attention.kernel.config
        assert config["DTypeGate"].name == str(gate.dtype).removeprefix("torch.")
        assert config["kGatesElements"] == (gate is elements)
    gpu.launches.clear()
    prefill(q, k, v)
    assert _gate_of(gpu.launches[0]) == (0, 0, 0)
    assert "DTypeGate" not in gpu.launches[0].kernel.config


@pytest.mark.parametrize("kind", KINDS)
def test_known_runs_of_a_batch(device: Device, kind: str, only_cached_runs: Any) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace())
    rng = np.random.default_rng(7)
    for seed in range(3):
        b = batches.make([3, 0, 5, 1], [17, 4, 11, 0], 16, seed=seed)
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 16, causal=True)
        q, cache = device.put(b.q), device.put(b.one_tensor())
        shape = b.q.shape if kind.endswith("elements") else b.q.shape[:2]
        wanted, _ = b.expected(causal=True)
        for _ in range(2):
            gate = rng.standard_normal(shape).astype(
                np.float32 if kind.startswith("float32") else b.q.dtype
            )
            out = w.run(q, cache, output_gate=device.put(gate))
            exact = (wanted * sigmoid(gate)).astype(b.q.dtype)
            np.testing.assert_array_equal(device.get(out), exact)
            if seed:
                only_cached_runs()


def test_known_runs_of_other_rows_are_checked(device: Device) -> None:
    """A gate of a plan before."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    for count in (3, 2):
        b = batches.make([1] * count, [9, 20, 30][:count], 16)
        w.plan(*b.table, HQ, HKV, D, 16)
        q, cache = device.put(b.q), device.put(b.one_tensor())
        w.run(q, cache, output_gate=device.put(np.zeros((count, HQ), np.float32)))
        w.run(q, cache, output_gate=device.put(np.zeros((count, HQ), np.float32)))
    with pytest.raises(ArgumentError, match=r"output_gate: shape is \[3, "):
        w.run(q, cache, output_gate=device.put(np.zeros((3, HQ), np.float32)))


@pytest.mark.parametrize("name", ["rows", "pages"])
def test_known_calls_without_a_plan(
    gpu: Gpu, make: Callable, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of other lengths are launched with gates of theirs, and without the checks."""
    index = {"dtype": "int32"}

    def attend(count: int, gate: Any) -> None:
        if name == "rows":
            k, v = make(90, 2, 64), make(90, 2, 64)
            offsets = make(count + 1, **index), make(count + 1, **index)
            flash_attn_varlen_func(make(3 * count, 8, 64), k, v, *offsets, 4, 50, output_gate=gate)
        else:
            pools, table = (make(20, 16, 2, 64), make(20, 16, 2, 64)), make(count, 5, **index)
            flash_attn_with_kvcache(
                make(count, 3, 8, 64),
                *pools,
                cache_seqlens=make(count, **index),
                block_table=table,
                output_gate=gate,
            )

    def of_elements(count: int) -> Any:
        rows = (3 * count,) if name == "rows" else (count, 3)
        return make(*rows, 8, 128)[..., 64:]

    def of_heads(count: int) -> Any:
        rows = (3 * count,) if name == "rows" else (count, 3)
        return make(*rows, 16, dtype="float32")[..., ::2]

    for make_gate, strides in ((of_elements, (1024, 128)), (of_heads, (16, 2))):
        with monkeypatch.context() as patch:
            for count in (4, 5, 7):
                gpu.launches.clear()
                gate = make_gate(count)
                attend(count, gate)
                attention = gpu.attentions()
                assert [_gate_of(x) for x in attention] == [(pointer(gate), *strides)]
                assert attention[0].kernel.config["kGatesElements"] == (make_gate is of_elements)
                patch.setattr(check_planless, "view_rows", None)
        with pytest.raises(ArgumentError, match="output_gate"):
            attend(6, make_gate(7))


# --- graphs ---


def test_a_gate_is_an_array_of_graphs() -> None:
    """To torch.compile, and to a function that JAX traces."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    import cupyattn.integrations.jax
    import cupyattn.integrations.torch

    values = arrays()
    wanted = prefill(*values[:3], output_gate=values[3])

    def attend(q: Any, k: Any, v: Any, gate: Any) -> Any:
        return cupyattn.dot_product_attention(q, k, v, output_gate=gate)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    np.testing.assert_array_equal(compiled(*map(torch.tensor, values)).numpy(), wanted)
    traced = jax.jit(attend)(*map(jax.numpy.asarray, values))
    np.testing.assert_array_equal(np.asarray(traced), wanted)

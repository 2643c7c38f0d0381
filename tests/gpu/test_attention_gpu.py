"""Attention on the GPU against the float64 answer: random calls, options alone, special values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import cases, compare, gpu_cases, kernel_caches, poison
from helpers.calls import run_and_check
from helpers.cases import Case
from helpers.on_gpu import try_random
from helpers.poison import download, raw, upload
from helpers.share import some
from helpers.single_calls import Call

import cupyattn
from cupyattn.choose import candidates

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 50
# Cases that each have a kernel of their own, which one process compiles one after another.
BLOCK_OF_KERNELS = 10


def blocks(count: int, size: int = BLOCK) -> Any:
    """Coarse tests: a thousand small ones would take longer to report than to run."""
    return pytest.mark.parametrize("first", range(0, count, size))


def try_all(
    first: int,
    count: int,
    make: Callable[[int], Case],
    is_decode: bool = False,
    size: int = BLOCK,
) -> None:
    def prepare(seed: int, xp: ModuleType) -> Call:
        return Call(make(seed), xp, is_decode=is_decode)

    try_random(first, min(size, count - first), prepare)


# --- random calls, poisoned, twice each ---


@blocks(gpu_cases.NUM_CLASSED)
def test_random_options_of_few_kernels(first: int) -> None:
    try_all(first, gpu_cases.NUM_CLASSED, gpu_cases.classed)


@blocks(gpu_cases.NUM_FREE, BLOCK_OF_KERNELS)
def test_random_everything(first: int) -> None:
    try_all(first, gpu_cases.NUM_FREE, gpu_cases.free, size=BLOCK_OF_KERNELS)


@blocks(gpu_cases.NUM_DECODE)
def test_random_decode(first: int) -> None:
    try_all(first, gpu_cases.NUM_DECODE, gpu_cases.decode, is_decode=True)


@blocks(gpu_cases.NUM_SPLIT)
def test_random_splits(first: int) -> None:
    try_all(first, gpu_cases.NUM_SPLIT, gpu_cases.split)


WAYS = {
    1: ("decode", "decode one_an_sm", "decode cluster4", "decode cluster8"),
    6: ("verify merge_launch", "verify cluster4", "verify cluster8", "small", "q64_oneshot"),
}


@pytest.mark.parametrize(("qo_len", "name"), [(n, name) for n in WAYS for name in WAYS[n]])
def test_every_way_to_serve_few_rows(qo_len: int, name: str) -> None:
    """Without splits, with some, and with so many that a launch merges them."""
    kernel_caches.forget()
    with candidates.only(name):
        for kv_len, num_kv_heads in ((200, 2), (3000, 2), (70_000, 1)):
            case = Case(7, qo_len, kv_len, num_kv_heads, 4, 128, 128, causal=True, has_sinks=True)
            run_and_check(Call(case, cupy))
    kernel_caches.forget()


@pytest.mark.parametrize("case", gpu_cases.ALONE.values(), ids=gpu_cases.ALONE)
def test_every_option_alone(case: Case) -> None:
    run_and_check(Call(case, cupy))


# --- frameworks ---


@pytest.mark.parametrize("name", ["prefill", "masked", "decode"])
def test_jax_arrays(name: str) -> None:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX is here without CUDA")
    case = gpu_cases.STEADY[name]
    inputs = cases.make_inputs(case)
    q, k, v = (jax.device_put(inputs[name], device) for name in ("q", "k", "v"))
    packed = inputs["packed_mask"]
    o, lse = cupyattn.single_prefill_with_kv_cache(
        q,
        k,
        v,
        causal=case.causal,
        packed_custom_mask=None if packed is None else jax.device_put(packed, device),
        return_lse=True,
    )
    assert isinstance(o, jax.Array) and o.devices() == lse.devices() == {device}
    assert (o.dtype, lse.dtype) == (q.dtype, np.float32)
    check(case, inputs, np.asarray(o), np.asarray(lse))


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_new_outputs_are_the_callers_own_kind(name: str) -> None:
    xp = pytest.importorskip(name)
    call = Call(gpu_cases.STEADY["prefill"], xp)
    q, k, v = (call.arrays[n] for n in "qkv")
    o, lse = cupyattn.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    assert type(o) is type(lse) is type(q)
    call.check(download(o), download(lse))


def check(case: Case, inputs: dict[str, Any], o: np.ndarray, lse: np.ndarray | None) -> None:
    ref, low = cases.reference(case, inputs), cases.low_precision(case, inputs)
    compare.assert_close(
        o,
        lse,
        *ref,
        *low,
        what=case,
        p_dtype=inputs["q"].dtype,
        logit_magnitude=cases.logit_magnitude(case),
        has_coarse_cap=cases.has_coarse_cap(case),
    )


def test_any_dlpack_producer_is_an_input() -> None:
    class Wrapped:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

        def __dlpack__(self, **request: Any) -> Any:
            return self.x.__dlpack__(**request)

    call = Call(replace(gpu_cases.PLAIN, dtype="float16", kv_dtype="float16"), cupy)
    q, k, v = (Wrapped(call.arrays[name]) for name in "qkv")
    out, lse = (placed.array for placed in call.outputs)
    got = cupyattn.single_prefill_with_kv_cache(q, k, v, out=out, lse=lse)
    assert got is out
    call.check(download(out), download(lse))


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_packbits(name: str, bitorder: str) -> None:
    xp = pytest.importorskip(name)
    rng = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 9, 255, 2049, 100_003):
        bits = rng.random(count) < 0.5
        x = poison.embed(bits, offset=count % 3, xp=xp)
        packed = download(cupyattn.packbits(x.array, bitorder))
        np.testing.assert_array_equal(packed, np.packbits(bits, bitorder=bitorder))
        cuts = np.sort(rng.integers(0, count + 1, 9)).astype(np.int32)
        parts, new = cupyattn.segment_packbits(x.array, upload(cuts, xp), bitorder)
        expected = [np.packbits(bits[a:b], bitorder=bitorder) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(download(parts), np.concatenate(expected))
        assert download(new).tolist() == [0, *np.cumsum([len(part) for part in expected])]


# --- NaN and infinity: where a row sees them, and nowhere else ---

# Options that hide keys, and the keys to spoil: each is seen by some row of a case, not by all.
_HIDDEN: dict[str, tuple[dict[str, Any], Callable[[Case], set[int]]]] = {
    "causal": (
        {"causal": True},
        lambda c: {c.kv_len - 1, c.kv_len - c.qo_len // 2},
    ),
    "window": (
        {"window_left": 20},
        lambda c: {0, 64, c.kv_len - c.qo_len - 20},
    ),
    "causal window": (
        {"causal": True, "window_left": 64},
        lambda c: {0, c.kv_len - 1},
    ),
    "bool mask": ({"mask_kind": "bool"}, lambda c: {c.kv_len // 2}),
    "packed mask": ({"mask_kind": "packed"}, lambda c: {c.kv_len // 2}),
}
_FAMILIES = {
    "prefill": {},
    "few rows": {"qo_len": 14, "group": 2},
    "decode": {"qo_len": 3, "group": 4},
    "split decode": {"qo_len": 2, "group": 4, "kv_len": 3000},
}
# With logits this small no probability underflows, so an infinity that is seen stays one.
_GENTLE = replace(gpu_cases.PLAIN, sm_scale=0.05)


@pytest.mark.parametrize(("which", "value"), [("v", np.nan), ("v", np.inf), ("k", np.nan)])
@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("hidden", _HIDDEN)
def test_hidden_values_do_not_contaminate(
    hidden: str, family: str, which: str, value: float
) -> None:
    """Rows that see such a value show it, and no other row does."""
    options, keys = _HIDDEN[hidden]
    case = replace(_GENTLE, **{**options, **_FAMILIES[family]})
    call = Call(case, cupy)
    spoil(call, which, sorted(keys(case)), value)
    assert np.isfinite(cases.reference(case, call.inputs)[0]).any()
    call.check(*call.run())


def spoil(call: Call, which: str, where: Any, value: float) -> None:
    x = call.inputs[which].copy()
    x[where] = value
    call.inputs[which] = x
    raw(call.arrays[which])[...] = raw(upload(x, cupy))


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_visible_nan_shows(which: str, family: str) -> None:
    case = replace(gpu_cases.PLAIN, **_FAMILIES[family])
    call = Call(case, cupy)
    spoil(call, which, (1, 1, 3), np.nan)
    assert np.isnan(cases.reference(case, call.inputs)[0]).any()
    call.check(*call.run())


def test_a_decode_loop_reads_no_further_than_the_cache_is_filled() -> None:
    """The cache grows by a token a step, through tile edges; what is not yet written is NaN."""
    heads, kv_heads, dim, steps = 8, 2, 128, some(300)
    rng = np.random.default_rng(0)
    bf16 = np.dtype(gpu_cases.PLAIN.out_dtype)
    tokens = rng.standard_normal((2, steps, kv_heads, dim)).astype(bf16)
    queries = rng.standard_normal((steps, heads, dim)).astype(bf16)
    cache = upload(np.full((2, 1024, kv_heads, dim), np.nan, bf16), cupy)
    out = upload(np.zeros((steps, heads, dim), bf16), cupy)
    new_tokens, new_queries = upload(tokens, cupy), upload(queries, cupy)
    for step in range(steps):
        raw(cache)[:, step] = raw(new_tokens)[:, step]
        k, v = cache[0, : step + 1], cache[1, : step + 1]
        cupyattn.single_decode_with_kv_cache(new_queries[step], k, v, out=out[step])
    case = replace(gpu_cases.PLAIN, qo_len=steps, kv_len=steps, causal=True)
    inputs = {**dict.fromkeys(("sinks", "scale_q", "scale_k", "scale_v", "mask")), "q": queries}
    inputs |= {"k": tokens[0], "v": tokens[1]}
    check(case, inputs, download(out), None)

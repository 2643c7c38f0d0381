"""Merging states on a GPU: random ones among poison, far offsets, frameworks, streams, graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import compare
from helpers.calls import run_and_check
from helpers.merge_calls import (
    FORMS,
    FP8,
    WIDE,
    Call,
    MergeCase,
    check_bad_offsets,
    fp8_cases,
    random_case,
)
from helpers.on_gpu import capture, try_random
from helpers.poison import download, raw, upload

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

NUM_RANDOM, PER_TEST = 1200, 100
# Cycles of a kernel that only waits: tens of milliseconds.
_WAIT = 100_000_000


@pytest.mark.parametrize("first", range(0, NUM_RANDOM, PER_TEST))
def test_random_merges(torch: Any, first: int) -> None:
    try_random(first, PER_TEST, lambda seed, xp: Call(random_case(seed), xp), turn=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", WIDE)
def test_large_merges(xp: ModuleType, dtype: str, form: str) -> None:
    """Many blocks, each several times what runs at once."""
    case = MergeCase(form=form, dtype=dtype, num_rows=3000, num_states=5, num_heads=32)
    run_and_check(Call(replace(case, head_dim=128, seed=3), xp))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_heads", [1, 300])
def test_any_number_of_heads(xp: ModuleType, num_heads: int, form: str) -> None:
    for head_dim in (33, 512):
        case = MergeCase(form=form, num_rows=7, num_heads=num_heads, head_dim=head_dim)
        run_and_check(Call(replace(case, has_mask=form == "in place"), xp))


@pytest.mark.parametrize("dtype", WIDE)
def test_one_state_is_copied_bit_for_bit(xp: ModuleType, dtype: str) -> None:
    rng = np.random.default_rng(0)
    kind = Call(MergeCase(dtype=dtype), np).v.dtype
    v = (rng.standard_normal((40, 1, 3, 40)) * 2.0 ** rng.integers(-9, 9, (40, 1, 3, 40))).astype(
        kind
    )
    s = rng.normal(0, 50, (40, 1, 3)).astype(np.float32)
    for base_on_e in (False, True):
        got = cupyattn.merge_states(upload(v, xp), upload(s, xp), lse_base_on_e=base_on_e)
        compare.assert_bitwise_equal(download(got[0]), v[:, 0], dtype)
        compare.assert_bitwise_equal(download(got[1]), s[:, 0], dtype)


def test_rows_with_bad_offsets_are_nan(xp: ModuleType) -> None:
    check_bad_offsets(xp)


@pytest.mark.large(gib=20)
@pytest.mark.parametrize("form", FORMS)
def test_offsets_beyond_31_bits(form: str) -> None:
    """Rows, states or heads as far apart as 2^31 elements and more."""
    rng = np.random.default_rng(0)
    far, n, m, h, d = 2**31 + 16, 2, 2, 2, 8
    axis = {"pair": 0, "in place": 1, "states": 1, "segments": 0}[form]
    shape = {"states": (n, m, h, d), "segments": (n, h, d)}.get(form, (n, h, d))
    v = rng.standard_normal((2, *shape)).astype(np.float16)
    s = rng.standard_normal((2, *shape[:-1])).astype(np.float32)
    strides = [32 * 2 ** (2 * (len(shape) - i)) for i in range(len(shape) - 1)]
    strides[axis] = far
    views = []
    for i in range(2):
        steps = (*(2 * x for x in strides), 2)
        buffer = cupy.empty(far * 2, np.float16)
        place = cupy.ndarray(shape, np.float16, buffer.data, strides=steps)
        place[...] = cupy.asarray(v[i])
        views.append(place)
    lse = [cupy.asarray(x) for x in s]
    if form == "pair":
        got = cupyattn.merge_state(views[0], lse[0], views[1], lse[1])
        wanted = cupyattn.merge_state(v[0], s[0], v[1], s[1])
    elif form == "in place":
        cupyattn.merge_state_in_place(views[0], lse[0], views[1], lse[1])
        got, wanted = (views[0], lse[0]), cupyattn.merge_state(v[0], s[0], v[1], s[1])
    elif form == "states":
        got, wanted = cupyattn.merge_states(views[0], lse[0]), cupyattn.merge_states(v[0], s[0])
    else:
        indptr = np.array([0, 2], np.int32)
        got = cupyattn.variable_length_merge_states(views[0], lse[0], cupy.asarray(indptr))
        wanted = cupyattn.variable_length_merge_states(v[0], s[0], indptr)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x.get(), y, rtol=2e-3, atol=2e-3)


def test_merged_splits_are_one_attention(xp: ModuleType) -> None:
    """States of this library's own attention over parts of the keys, through every function."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((x, 8, 128)).astype(np.float16) for x in (50, 900, 900))
    on = [upload(x, xp) for x in (q, k, v)]
    whole = [
        download(x)
        for x in cupyattn.single_prefill_with_kv_cache(*on, causal=True, return_lse=True)
    ]
    cuts = (0, 100, 100, 640, 900)
    parts = []
    for a, b in itertools.pairwise(cuts):
        keys = (upload(x[a:b], xp) for x in (k, v))
        is_last = b == 900
        parts.append(
            cupyattn.single_prefill_with_kv_cache(on[0], *keys, causal=is_last, return_lse=True)
        )
    folded = parts[0]
    for part in parts[1:]:
        folded = cupyattn.merge_state(*folded, *part)
    running = [upload(download(x), xp) for x in parts[-1]]
    for part in parts[:-1]:
        cupyattn.merge_state_in_place(*running, *part)
    stacked = [xp.stack([p[i] for p in parts], 1) for i in (0, 1)]
    at_once = cupyattn.merge_states(*stacked)
    for got in (folded, running, at_once):
        np.testing.assert_allclose(download(got[0]).astype("f4"), whole[0].astype("f4"), atol=4e-3)
        np.testing.assert_allclose(download(got[1]), whole[1], atol=1e-4)


# --- frameworks, streams, graphs ---


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("JAX is here without CUDA")
    case = MergeCase(form="states", num_states=5, gives_outputs=False, strides="packed")
    call = Call(case, cupy)
    got = cupyattn.merge_states(jax.numpy.asarray(call.v), jax.numpy.asarray(call.s))
    assert all(isinstance(x, jax.Array) for x in got)
    call.check(*(np.asarray(x) for x in got))
    v, s = jax.numpy.asarray(call.v[:, 0]), jax.numpy.asarray(call.s[:, 0])
    made = cupyattn.merge_state_in_place(v, s, v, s)  # JAX arrays are read-only: new ones come back
    for got, wanted in zip(made, cupyattn.merge_state(v, s, v, s), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_torch_and_cupy_in_one_call(torch: Any) -> None:
    case = MergeCase(gives_outputs=False)
    call, other = Call(case, torch), Call(case, cupy)
    for name in ("v_b", "s_b"):
        call.owned[name] = call.inputs[name] = other.inputs[name]
    assert {type(p.array) for p in call.owned.values()} == {torch.Tensor, cupy.ndarray}
    call.check(*call.run())


def test_the_callers_stream(torch: Any) -> None:
    """On a side stream, behind a kernel that waits and the write of what is merged."""
    case = MergeCase(num_rows=64, num_heads=32, head_dim=128, empty=0.0)
    call = Call(case, torch)
    v = call.inputs["v_a"].array
    kept = v.clone()
    for _ in range(2):
        v.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(_WAIT)
            v.copy_(kept)
            call.start()
            torch.cuda.current_stream().synchronize()
        call.check(*call.answers())


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_merges_what_is_there_when_it_is_replayed(
    torch: Any, xp: ModuleType, form: str
) -> None:
    base = MergeCase(form=form, num_rows=20, num_states=4, num_heads=5, has_mask=form == "in place")
    first = Call(base, xp)
    first.run()
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    replay = capture(torch, xp, first.start)
    for seed in range(2, 22, 2):  # whose offsets begin alike, modulo 3, and have no spare state
        call = Call(replace(base, seed=seed * 3), xp)
        for name, p in call.inputs.items():
            raw(first.inputs[name].array)[...] = raw(p.array)
        torch.cuda.synchronize()
        cupy.cuda.Device().synchronize()
        replay()
        cupy.cuda.Device().synchronize()
        call.inputs, call.owned = first.inputs, first.owned
        call.check(*first.answers())


def test_answers_made_inside_a_capture(torch: Any) -> None:
    """They are memory of the graph, by torch's own allocator."""
    call = Call(MergeCase(gives_outputs=False), torch)
    call.run()
    torch.cuda.synchronize()
    arrays = {name: p.array for name, p in call.inputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = cupyattn.merge_state(**arrays)
    for x in answer:
        x.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    call.check(*map(download, answer))


@pytest.mark.parametrize("narrow", FP8)
def test_merges_into_fp8(torch: Any, narrow: str) -> None:
    for head_dim, dtype in ((64, "float16"), (40, "bfloat16"), (33, "float32")):
        for case in fp8_cases(dtype, narrow, head_dim):
            run_and_check(Call(case, torch))

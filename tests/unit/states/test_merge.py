"""Merging attention states on the CPU: its algebra, every form, every framework."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.calls import run_and_check
from helpers.merge_calls import Call, random_case
from hypothesis import given
from hypothesis import strategies as st

import cupyattn
from cupyattn import array, reference
from cupyattn.array import as_numpy, view
from cupyattn.core import dtypes

merge_state, merge_states = cupyattn.merge_state, cupyattn.merge_states
State = tuple[np.ndarray, np.ndarray]
N, H, D = 3, 2, 4


@st.composite
def states(draw: st.DrawFn, count: int) -> list[State]:
    """States of N rows of H heads, some empty, with weights up to 2^60 apart."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.5, 5.0, 60.0]))
    empty = draw(st.sampled_from([0.0, 0.3, 1.0]))
    found = []
    for _ in range(count):
        v = rng.standard_normal((N, H, D)).astype(np.float32)
        s = rng.uniform(-spread, spread, (N, H)).astype(np.float32)
        is_empty = rng.random((N, H)) < empty
        v[is_empty], s[is_empty] = np.nan, -np.inf
        found.append((v, s))
    return found


def same(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a[0], b[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-6, atol=4e-6)


def cleared(a: State) -> State:
    """What a state is worth: nothing where it is empty."""
    return np.where(a[1][..., None] == -np.inf, np.float32(0), a[0]), a[1]


@given(states(2))
def test_merging_commutes(ab: list[State]) -> None:
    a, b = ab
    for x, y in zip(merge_state(*a, *b), merge_state(*b, *a), strict=True):
        np.testing.assert_array_equal(x, y)


@given(states(3))
def test_merging_is_associative(abc: list[State]) -> None:
    a, b, c = abc
    left = merge_state(*merge_state(*a, *b), *c)
    same(left, merge_state(*a, *merge_state(*b, *c)))
    same(left, merge_states(np.stack([x[0] for x in abc], 1), np.stack([x[1] for x in abc], 1)))


@given(states(1))
def test_the_empty_state_is_the_identity(one: list[State]) -> None:
    (a,) = one
    empty = np.full((N, H, D), np.inf, np.float32), np.full((N, H), -np.inf, np.float32)
    for merged in (merge_state(*a, *empty), merge_state(*empty, *a)):
        for x, y in zip(merged, cleared(a), strict=True):
            np.testing.assert_array_equal(x, y)
    once = merge_states(a[0][:, None], a[1][:, None])
    for x, y in zip(once, cleared(a), strict=True):
        np.testing.assert_array_equal(x, y)


@given(states(5), st.data())
def test_all_functions_agree(parts: list[State], data: st.DataObject) -> None:
    v, s = (np.stack([x[i] for x in parts], 1) for i in (0, 1))
    whole = merge_states(v, s)
    cuts = sorted(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    pieces = [merge_states(v[:, a:b], s[:, a:b]) for a, b in itertools.pairwise([0, *cuts, 5])]
    folded = pieces[0]
    for piece in pieces[1:]:
        folded = merge_state(*folded, *piece)
    same(folded, whole)
    # The same states one row after another.
    flat = v.reshape(-1, H, D), s.reshape(-1, H)
    indptr = np.arange(N + 1, dtype=np.int32) * 5
    for x, y in zip(cupyattn.variable_length_merge_states(*flat, indptr), whole, strict=True):
        np.testing.assert_array_equal(x, y)
    # In place, one after another.
    running = parts[0][0].copy(), parts[0][1].copy()
    for other in parts[1:]:
        cupyattn.merge_state_in_place(*running, *other)
    same(cleared(running), whole)
    natural = merge_states(v, s * np.float32(np.log(2)), lse_base_on_e=True)
    np.testing.assert_allclose(natural[0], whole[0], atol=2e-5)
    np.testing.assert_allclose(natural[1], whole[1] * np.log(2), rtol=1e-6, atol=4e-6)


@given(
    cuts=st.lists(st.integers(0, 20), max_size=4).map(sorted),
    seed=st.integers(0, 1000),
    causal=st.booleans(),
)
def test_states_over_disjoint_keys_are_one_attention(
    cuts: list[int], seed: int, causal: bool
) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, H, 8)).astype(np.float32) for n in (N, 20, 20))
    # What is left of the diagonal is seen by all rows, so causality is the last part's.
    bounds = [0, *(min(cut, 17) for cut in cuts), 20]
    parts = [
        reference.attention(q, k[a:b], v[a:b], causal=causal and b == 20)
        for a, b in itertools.pairwise(bounds)
    ]
    v_parts, s_parts = (np.stack([x[i] for x in parts], 1).astype(np.float32) for i in (0, 1))
    whole = reference.attention(q, k, v, causal=causal)
    same(merge_states(v_parts, s_parts), whole)


def test_random_cases() -> None:
    for seed in range(400):
        run_and_check(Call(random_case(seed), np))


def test_by_hand() -> None:
    v = np.array([[[1.0]], [[5.0]], [[3.0]], [[7.0]]], np.float32)
    s = np.array([[0.0], [0.0], [3.0], [-np.inf]], np.float32)
    got = cupyattn.variable_length_merge_states(v, s, np.array([0, 0, 2, 3, 3, 4]))
    assert got[0].ravel().tolist() == [0, 3, 3, 0, 0]
    assert got[1].ravel().tolist() == [-np.inf, 1, 3, -np.inf, -np.inf]
    got = merge_state(v[:1], s[:1], v[1:2], s[1:2] + np.float32(np.log(3)), lse_base_on_e=True)
    np.testing.assert_allclose((got[0].item(), got[1].item()), (4.0, np.log(4)), rtol=1e-6)


@pytest.mark.parametrize("lse", [np.inf, np.nan])
def test_states_that_are_no_states_show(lse: float) -> None:
    """A NaN or +inf among the LSE is a mistake of the caller's: the row says so."""
    v, s = np.ones((1, 3, 2, 4), np.float32), np.zeros((1, 3, 2), np.float32)
    s[0, 1, 0] = lse
    got_v, got_s = merge_states(v, s)
    assert np.isnan(got_v[0, 0]).all() and np.isnan(got_s[0, 0])
    assert (got_v[0, 1] == 1).all() and got_s[0, 1] == pytest.approx(np.log2(3))


@pytest.mark.parametrize("kind", ["bool", "uint8"])
def test_a_mask_leaves_rows_alone(kind: str) -> None:
    rng = np.random.default_rng(0)
    v, other = rng.standard_normal((2, 4, H, D)).astype(np.float16)
    s, s_other = rng.standard_normal((2, 4, H)).astype(np.float32)
    wanted = merge_state(v, s, other, s_other)
    before, mask = (v.copy(), s.copy()), np.array([0, 1, 0, 200]).astype(kind)
    assert cupyattn.merge_state_in_place(v, s, other, s_other, mask) is None
    for got, new, old in zip((v, s), wanted, before, strict=True):
        np.testing.assert_array_equal(got[[1, 3]], new[[1, 3]])
        np.testing.assert_array_equal(got[[0, 2]], old[[0, 2]])


def test_nothing_to_merge() -> None:
    for n, h in ((0, 2), (3, 0)):
        v, s = np.zeros((n, h, D), np.float32), np.zeros((n, h), np.float32)
        assert [x.shape for x in merge_state(v, s, v.copy(), s.copy())] == [(n, h, D), (n, h)]
        cupyattn.merge_state_in_place(v, s, v.copy(), s.copy())
    got = cupyattn.variable_length_merge_states(v, s, np.array([0]))
    assert got[0].shape == (0, 0, D)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_in_place_gives_new_jax_arrays(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    v, v_other = rng.standard_normal((2, N, H, D)).astype(dtypes.parse(dtype).numpy)
    s, s_other = rng.standard_normal((2, N, H), "f4")
    mask = np.arange(N) % 2 == 0
    given = jax.numpy.asarray(v.copy()), jax.numpy.asarray(s.copy())
    got = cupyattn.merge_state_in_place(*given, v_other, s_other, mask)
    before = [np.asarray(x) for x in given]
    assert cupyattn.merge_state_in_place(v, s, v_other, s_other, mask) is None
    for new, written, old in zip(got, (v, s), before, strict=True):
        assert isinstance(new, jax.Array)
        np.testing.assert_array_equal(np.asarray(new), written)
        assert (old[mask] != written[mask]).any()
        np.testing.assert_array_equal(old[~mask], written[~mask])


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frameworks_get_their_own_arrays(framework: str, dtype: str) -> None:
    module = pytest.importorskip(framework)
    rng = np.random.default_rng(0)
    kind = dtypes.parse(dtype).numpy
    v, s = rng.standard_normal((N, 3, H, D)).astype(kind), rng.standard_normal((N, 3, H), "f4")

    def own(x: np.ndarray) -> Any:
        if framework == "jax":
            return module.numpy.asarray(x)
        return array.from_numpy(x.copy(), view(module.zeros(1), "like"))

    got = merge_states(own(v), own(s))
    for x, wanted in zip(got, merge_states(v, s), strict=True):
        assert type(x) is type(own(v)) and str(x.dtype).endswith(str(wanted.dtype))
        np.testing.assert_array_equal(as_numpy(view(x, "x")), wanted)

"""Merging attention states, and masks as bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.errors import ArgumentError
from cupyattn.reference import (
    attention,
    merge_state,
    merge_states,
    packbits,
    segment_packbits,
    unpack_mask,
)


def parts(cuts, sinks=None):
    """The whole attention, and the states of its keys cut at `cuts`; sinks enter the first only."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 3, 8)) for n in (5, 20, 20))
    bounds = [0, *cuts, 20]
    states = [
        attention(q, k[a:b], v[a:b], sinks=sinks if i == 0 else None)
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    return attention(q, k, v, sinks=sinks), states


@pytest.mark.parametrize("cuts", [(), (7,), (0, 7, 7, 19), (1, 2, 3, 20)])
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0, 4.0])])
def test_merging_parts_gives_the_whole(cuts, sinks):
    (o, lse), states = parts(cuts, sinks)
    merged = merge_states(np.stack([s[0] for s in states], 1), np.stack([s[1] for s in states], 1))
    np.testing.assert_allclose(merged[0], o, atol=1e-14)
    np.testing.assert_allclose(merged[1], lse, atol=1e-14)


def test_merging_is_associative_and_commutative():
    _, (a, b, c) = parts((6, 15))
    left = merge_state(*merge_state(*a, *b), *c)
    for other in (merge_state(*a, *merge_state(*b, *c)), merge_state(*merge_state(*c, *a), *b)):
        np.testing.assert_allclose(other[0], left[0], atol=1e-14)
        np.testing.assert_allclose(other[1], left[1], atol=1e-14)


def test_two_states_by_hand():
    s_a = s_b = np.zeros((1, 1))
    v, s = merge_state(np.full((1, 1, 1), 1.0), s_a, np.full((1, 1, 1), 5.0), s_b)
    assert (v.item(), s.item()) == (3.0, 1.0)


@pytest.mark.parametrize("garbage", [0.0, 7.0, np.nan, np.inf])
def test_empty_states_weigh_nothing(garbage):
    v, s = np.array([[[1.25, -3.0]]]), np.array([[2.5]])
    empty = np.full((1, 1, 2), garbage), np.full((1, 1), -np.inf)
    for merged in (merge_state(v, s, *empty), merge_state(*empty, v, s)):
        np.testing.assert_array_equal(merged[0], v)
        np.testing.assert_array_equal(merged[1], s)
    merged = merge_state(*empty, *empty)
    np.testing.assert_array_equal(merged[0], np.zeros((1, 1, 2)))
    np.testing.assert_array_equal(merged[1], [[-np.inf]])


def test_no_states_and_one_state():
    v, s = merge_states(np.zeros((3, 0, 2, 4)), np.zeros((3, 0, 2)))
    assert v.shape == (3, 2, 4) and (v == 0).all() and s.shape == (3, 2) and (s == -np.inf).all()
    _, [(o, lse)] = parts(())
    merged = merge_states(o[:, None], lse[:, None])
    np.testing.assert_array_equal(merged[0], o)
    np.testing.assert_array_equal(merged[1], lse)


def test_far_apart_states_do_not_overflow():
    v_a, v_b = np.full((1, 1, 1), 2.0), np.full((1, 1, 1), 9.0)
    v, s = merge_state(v_a, np.full((1, 1), 5000.0), v_b, np.full((1, 1), -5000.0))
    assert (v.item(), s.item()) == (2.0, 5000.0)


def test_merge_shapes_are_checked():
    v, s = np.zeros((2, 3, 4)), np.zeros((2, 3))
    with pytest.raises(ArgumentError, match="one shape"):
        merge_state(v, s, v[:1], s)
    with pytest.raises(ArgumentError, match=r"\[n, m, H, D\]"):
        merge_states(v, s)


def naive_bits(bits, bitorder):
    """Byte by byte, bit by bit."""
    packed = [0] * ((len(bits) + 7) // 8)
    for i, bit in enumerate(bits):
        place = i % 8 if bitorder == "little" else 7 - i % 8
        packed[i // 8] |= int(bit) << place
    return packed


bits = st.lists(st.booleans(), max_size=70)
orders = st.sampled_from(["big", "little"])


@given(bits, orders)
def test_packbits(x, bitorder):
    packed = packbits(np.array(x, np.bool_), bitorder)
    assert packed.dtype == np.uint8 and packed.tolist() == naive_bits(x, bitorder)
    np.testing.assert_array_equal(packed, np.packbits(np.array(x, np.bool_), bitorder=bitorder))


@given(st.lists(bits, max_size=6), orders, st.sampled_from([np.int32, np.int64]))
def test_segment_packbits(segments, bitorder, index_dtype):
    indptr = np.cumsum([0, *map(len, segments)]).astype(index_dtype)
    x = np.array([bit for segment in segments for bit in segment], np.bool_)
    packed, new_indptr = segment_packbits(x, indptr, bitorder)
    expected = [naive_bits(segment, bitorder) for segment in segments]
    assert packed.dtype == np.uint8 and packed.tolist() == list(itertools.chain(*expected))
    assert new_indptr.dtype == np.int32
    assert new_indptr.tolist() == np.cumsum([0, *map(len, expected)]).tolist()


def test_segments_may_skip_the_ends_of_x():
    x = np.array([0, 1, 1, 0, 1, 1], np.bool_)
    packed, new_indptr = segment_packbits(x, np.array([1, 3, 5]), "little")
    assert packed.tolist() == [0b11, 0b10] and new_indptr.tolist() == [0, 1, 2]


@given(st.integers(0, 9), st.integers(0, 21), st.integers(0, 2**32))
def test_unpack_mask_undoes_packbits(qo_len, kv_len, seed):
    mask = np.random.default_rng(seed).random((qo_len, kv_len)) < 0.5
    packed = packbits(mask.reshape(-1), "little")
    np.testing.assert_array_equal(unpack_mask(packed, qo_len, kv_len), mask)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: packbits(np.zeros(3, np.bool_), "middle"), "bitorder"),
        (lambda: packbits(np.zeros(3, np.float32)), "x: got float32"),
        (lambda: packbits(np.zeros((2, 2), np.bool_)), "x: got bool"),
        (lambda: segment_packbits(np.zeros(3, np.bool_), np.array([0, 4])), "last 4"),
        (lambda: segment_packbits(np.zeros(3, np.bool_), np.array([0, 2, 1, 3])), "never fall"),
        (lambda: segment_packbits(np.zeros(3, np.bool_), np.array([-1, 3])), "first -1"),
        (lambda: segment_packbits(np.zeros(3, np.bool_), np.array([0.0, 3.0])), "float64"),
        (lambda: segment_packbits(np.zeros(3, np.bool_), np.zeros(0, np.int32)), "indptr"),
        (lambda: unpack_mask(np.zeros(1, np.uint8), 3, 3), r"uint8 \[2\]"),
        (lambda: unpack_mask(np.zeros(9, np.bool_), 3, 3), "got bool"),
    ],
)
def test_bad_bits_are_named(call, said):
    with pytest.raises(ArgumentError, match=said):
        call()

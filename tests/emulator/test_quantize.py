"""The kernel of eight bits on the host: every access checked, every bit compared."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import quantize_cases
from helpers.share import one_of

from cupyattn.quantize import quantize_qkv
from cupyattn.quantize_pages import rope_and_cache

from . import gpu


@pytest.mark.parametrize("first", one_of(5, range(0, 100, 10)))
@pytest.mark.parametrize("kind", [quantize_cases.OfArrays, quantize_cases.OfPages])
def test_random_calls(kind: type, first: int) -> None:
    for seed in range(first, first + 10):
        case = kind(seed).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3, arch=(900, 800)[seed % 2]):
            case.run()


def test_means_are_found_by_launches_ahead(emulated: gpu.EmulatedGpu) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((70, 2, 64)).astype(np.float16) + 1 for _ in "kv")
    result = quantize_qkv(None, k, v, smooth_k=True)
    assert {"find_mean", "quantize"} <= {launch.name for launch in emulated.launches}
    assert result.k_mean is not None
    np.testing.assert_allclose(result.k_mean[0], k.astype(np.float64).mean(0), atol=1e-5)


@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_scales_of_all_rows_are_found_by_one_launch_ahead(
    emulated: gpu.EmulatedGpu, scales: str
) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((700, 3, 64)).astype(np.float16)
    q[650, 2, 5] = 40
    result = quantize_qkv(q, scales=scales)
    assert [launch.name for launch in emulated.launches] == ["quantize"] * 2
    largest = np.abs(q.astype(np.float32)).max((0, 2)) / np.float32(448)
    wanted = largest if scales == "head" else largest[2:]
    np.testing.assert_array_equal(result.scale_q, wanted)
    assert result.q_block_scales is None


def test_stray_offsets_write_nothing(emulated: gpu.EmulatedGpu) -> None:
    """Offsets that fall or leave the rows are known to the GPU alone."""
    q = np.ones((70, 1, 64), np.float16)
    indptr = np.array([-5, 40, 30, 2**31 - 1], np.int32)
    result = quantize_qkv(q, qo_indptr=indptr)
    assert np.isin(result.q_block_scales, [1.0, np.float32(1) / np.float32(448)]).all()


def test_stray_slots_and_positions_touch_nothing(emulated: gpu.EmulatedGpu) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 2, 64)).astype(np.float16) for _ in "qkv")
    caches = [np.zeros((3, 16, 2, 64), np.float16) for _ in "kv"]
    slots = np.array([0, 48, 2**40, -(2**40), -1, 47])
    positions = np.array([0, 5, -7, 2**40, 8, 7])
    table = rng.uniform(-1, 1, (8, 64)).astype(np.float32)
    out = rope_and_cache(q, k, v, *caches, slots, positions, cos_sin_cache=table)
    assert np.isnan(out).any(axis=(1, 2)).tolist() == [False, False, True, True, True, False]
    written = caches[1].reshape(48, -1).any(axis=1)
    assert np.flatnonzero(written).tolist() == [0, 47]
    np.testing.assert_array_equal(caches[1][2, 15], v[5])


def test_a_table_of_pages_with_stray_entries(emulated: gpu.EmulatedGpu) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((5, 1, 64)).astype(np.float16) for _ in "kv")
    caches = [np.zeros((4, 1, 8, 64), np.float16) for _ in "kv"]
    index = {
        "batch_indices": np.array([0, 1, 9, -1, 1], np.int32),
        "positions": np.array([9, 0, 0, 0, 99]),
        "kv_indices": np.array([3, 2, 77], np.int32),
        "kv_indptr": np.array([0, 2, 3], np.int32),
    }
    rope_and_cache(None, k, v, *caches, kv_layout="HND", **index)
    written = np.argwhere(caches[1].any(axis=-1))
    assert written.tolist() == [[2, 0, 1]]


def test_a_grown_scale_divides_what_is_there(emulated: gpu.EmulatedGpu) -> None:
    caches = [np.zeros((1, 64, 1, 64), np.int8) for _ in "k"]
    caches.append(caches[0].astype(quantize_cases.E4M3))
    scales = [np.full((1, 1, 1), np.nan, np.float32) for _ in "kv"]
    for token, value in enumerate([1.0, 0.5, 100.0, 3.0]):
        x = np.full((1, 1, 64), value, np.float16)
        named = {"k_block_scales": scales[0], "v_block_scales": scales[1]}
        rope_and_cache(None, x, x, *caches, np.array([token]), **named)
    for cache, scale in zip(caches, scales, strict=True):
        real = cache[0, :4, 0, 0].astype(np.float32) * scale.item()
        bound = scale.item() if cache.dtype == np.int8 else 0.07 * real
        assert (np.abs(real - [1.0, 0.5, 100.0, 3.0]) <= bound + 1e-6).all()

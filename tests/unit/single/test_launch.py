"""What reaches the launch call, on a GPU that is not there.

Each call is made twice. The first is a checked call, the second a cached one.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fake_gpu import COUNTERS, STREAM, Gpu, fields, pointer, unpack
from hypothesis import given
from hypothesis import strategies as st

import cupyattn
from cupyattn.launch.driver import params
from cupyattn.launch.driver.enqueue import MAX_GRID_YZ

prefill, decode = cupyattn.single_prefill_with_kv_cache, cupyattn.single_decode_with_kv_cache


def test_the_struct_of_a_decode_call(gpu: Gpu, make: Callable) -> None:
    q, k, v, out = make(8, 64), make(2048, 2, 64), make(2048, 2, 128)[..., :32], make(8, 32)
    for _ in range(2):
        assert decode(q, k, v, sm_scale=0.5, v_scale=2.0, window_left=1500, out=out) is out
    tiles = gpu.launches[0].kernel
    splits = gpu.launches[0].grid[2]
    assert tiles.name.startswith("decode") and splits > 1
    rows = 2 * splits * tiles.tile_q
    ((partials, num_bytes),) = gpu.scratch  # launches on a stream are ordered, so they share it
    assert len(gpu.launches) == 2
    for launch in gpu.launches:
        assert (launch.grid, launch.block) == ((2, 1, splits), (tiles.threads, 1, 1))
        assert (launch.shared_bytes, launch.stream) == (tiles.shared_bytes, STREAM)
        assert num_bytes == rows * (32 + 1) * 4
        expected = dict.fromkeys((name for _, name in fields()), 0)
        expected |= {"q": pointer(q), "k": pointer(k), "v": pointer(v), "o": pointer(out)}
        expected |= {"partial_o": partials, "partial_lse": partials + rows * 32 * 4}
        expected |= {"counters": COUNTERS, "q_stride_h": 64, "o_stride_h": 32}
        expected |= {"k_stride_n": 128, "k_stride_h": 64, "v_stride_n": 256, "v_stride_h": 128}
        expected |= {"qo_len": 1, "kv_len": 2048, "num_kv_heads": 2, "group_size": 4}
        expected |= {"num_q_tiles": 1, "num_splits": splits, "window_left": 1500}
        expected |= {"window_right": -1}
        expected |= {"group_magic": 2**31 + 1, "group_shift": 2}  # n // 4
        expected |= {
            "sm_scale": 0.5,
            "output_scale": 2.0,
            "lse_scale": 1.0,
            "rope_step": (0,) * 128,
        }
        got = unpack(launch.params)
        assert got.pop("softmax_scale") == pytest.approx(0.5 * np.log2(np.e))
        assert got.pop("softmax_slack") == pytest.approx(8.0 / (0.5 * np.log2(np.e)))
        assert got == {n: x for n, x in expected.items() if n in got}


def test_the_struct_of_a_prefill_call_with_everything(gpu: Gpu, make: Callable) -> None:
    q, k, v = make(300, 4, 64), make(2, 500, 64), make(2, 500, 64)
    out, lse = make(300, 4, 64), make(300, 4, dtype="float32")
    per_head = {n: make(h, dtype="float32") for n, h in (("sinks", 4), ("scale_q", 4))}
    per_head |= {n: make(2, dtype="float32") for n in ("scale_k", "scale_v")}
    mask = make(18751, dtype="uint8")
    options: dict[str, Any] = {"kv_layout": "HND", "causal": True, "logits_soft_cap": 3.0}
    answer = prefill(
        q, k, v, **options, **per_head, packed_custom_mask=mask, out=out, lse=lse, return_lse=True
    )
    assert answer[0] is out and answer[1] is lse
    launch, merge = gpu.launches
    got = unpack(launch.params)
    assert got["num_splits"] > 1 and merge.kernel == "merge_splits"
    rows = got["num_q_tiles"] * launch.kernel.tile_q
    assert (merge.params, merge.stream, merge.grid) == (launch.params, STREAM, (rows // 4, 2, 1))
    assert launch.grid == (2, got["num_q_tiles"], got["num_splits"])
    assert got["num_q_tiles"] == -(-600 // launch.kernel.tile_q)
    names = {"lse": lse, "mask": mask, **per_head}
    assert {n: got[n] for n in names} == {n: pointer(x) for n, x in names.items()}
    strides = {"q_stride_n": 256, "q_stride_h": 64, "o_stride_n": 256, "o_stride_h": 64}
    strides |= {"k_stride_n": 64, "k_stride_h": 32000, "v_stride_n": 64, "v_stride_h": 32000}
    strides |= {"lse_stride_n": 4, "lse_stride_h": 1}
    assert {n: got[n] for n in strides} == strides
    facts = {
        "mask_bytes": 18751,
        "qo_len": 300,
        "kv_len": 500,
        "window_left": -1,
        "window_right": -1,
    }
    facts |= {"logits_soft_cap": 3.0, "sm_scale": 0.125}
    assert {n: got[n] for n in facts} == facts


def test_rotated_keys_take_the_place_of_the_keys(gpu: Gpu, make: Callable) -> None:
    q, k, v = make(1000, 4, 64), make(2, 1000, 64), make(2, 1000, 64)
    for _ in range(2):
        prefill(q, k, v, kv_layout="HND", pos_encoding_mode="ROPE_LLAMA", out=make(1000, 4, 64))
    layout = struct.Struct("<4Q 3q 5i I 2i 128I")
    # The other half of the scratch memory is for partial answers.
    kernels = gpu.launches[::3], gpu.launches[1::3], gpu.launches[2::3]
    for rotate, attend, merge, memory in zip(*kernels, gpu.scratch[::2], strict=True):
        assert (rotate.kernel, merge.kernel) == ("rotate_keys", "merge_splits")
        assert merge.params == attend.params
        given = layout.unpack_from(rotate.params)
        assert given[:9] == (pointer(k), 0, 0, memory[0], 64, 64000, 0, 1000, 2)
        assert memory[1] == 1000 * 2 * 64 * 2
        got = unpack(attend.params)
        assert (got["k"], got["k_stride_n"], got["k_stride_h"]) == (memory[0], 128, 64)
        assert (got["v"], got["v_stride_n"], got["q_stride_n"]) == (pointer(v), 64, 256)
        assert got["rope_step"][0] == given[15] == round(2**32 / (2 * np.pi))
        assert got["rope_step"] == given[15:]


def test_more_tiles_than_a_grid_takes(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    if not isinstance(make(1), torch.Tensor):
        pytest.skip("one framework is enough")
    rows = 65_535 * 128 // 4 + 1
    q, k = torch.zeros(1, 4, 8, dtype=torch.float16).expand(rows, 4, 8), make(9, 1, 8).half()
    out = torch.empty(rows, 4, 8, dtype=torch.float16)
    for _ in range(2):
        prefill(q, k, k, out=out)
    limit = MAX_GRID_YZ
    num_tiles = -(-rows * 4 // gpu.launches[0].kernel.tile_q)
    firsts = [*range(0, num_tiles, limit)]
    assert len(firsts) > 1
    assert [launch.grid[1] for launch in gpu.launches] == [
        min(limit, num_tiles - first) for first in firsts
    ] * 2
    assert [unpack(launch.params)["first_q_tile"] for launch in gpu.launches] == firsts * 2


# --- devices, captures, threads ---


def test_a_graph_gets_counters_of_its_own(gpu: Gpu, make: Callable) -> None:
    q, k = make(4, 64), make(2048, 2, 64)
    for gpu.is_capturing in (False, True, False):
        for _ in range(2):
            decode(q, k, k, out=make(4, 64))
    counters = [unpack(launch.params)["counters"] for launch in gpu.launches]
    own = [address for address, num_bytes in gpu.scratch if num_bytes == 2 * 4]
    assert len(own) == 2 and counters == [COUNTERS] * 2 + own + [COUNTERS] * 2
    assert [row for row in gpu.log if row[0] == "memset"] == [
        ("memset", address, 0, 8, STREAM) for address in own
    ]


def test_another_current_device_is_left_as_it_was(gpu: Gpu, make: Callable) -> None:
    q, k = make(4, 64), make(2048, 2, 64)
    gpu.current = 1
    for _ in range(2):
        decode(q, k, k, out=make(4, 64))
    assert [launch.device for launch in gpu.launches] == [0, 0] and gpu.current == 1


def test_threads_have_buffers_and_contexts_of_their_own(gpu: Gpu, make: Callable) -> None:
    q, k, out = make(4, 64), make(64, 2, 64), make(4, 64)
    buffers = []
    everyone = threading.Barrier(2)

    def work() -> None:
        for _ in range(2):
            decode(q, k, k, out=out)
        buffers.append(params.this_thread.launch_buffer.address)
        everyone.wait(timeout=20)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gpu.log == [("setDevice", 0)] * 2
    assert len(set(buffers)) == 2 and len(gpu.launches) == 4


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_divisions_by_multiplication_are_exact(divisor: int, n: int) -> None:
    magic, shift = params.divisor(divisor)
    assert magic < 2**32
    for x in (n, n // divisor * divisor, max(0, n // divisor * divisor - 1)):
        assert (2 * x * magic >> 32) >> shift == x // divisor

"""Attention by lists of keys on the GPU, each by itself and by unions of neighbours' lists: random
launches beside the oracle, each of them twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import list_cases
from helpers.list_cases import ListCase
from helpers.share import some

from cupyattn import sparse

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
# Each case has a kernel of its own, which one process compiles one after another.
BLOCK = 8


def upload(x: np.ndarray) -> Any:
    raw = np.frombuffer(x.tobytes() or b"\0", np.uint8)
    return cupy.asarray(raw)


def allocate(num_bytes: int) -> tuple[int, object]:
    memory = cupy.full(num_bytes, 255, dtype=cupy.uint8)
    return memory.data.ptr, memory


def check(case: ListCase, by_unions: bool = False) -> None:
    arrays = list_cases.make(case)
    known = {id(x): upload(x) for x in list_cases.arrays_of(arrays)}
    run, answers = list_cases.launcher(case), []
    if by_unions and run.unions is None:
        pytest.skip("no kernel here multiplies unions")
    if run.unions is not None:
        run.unions._is_worth_it = lambda *_: by_unions  # type: ignore[method-assign]
    for _ in range(2):
        stream = cupy.cuda.get_current_stream().ptr
        list_cases.launch(case, arrays, lambda x: known[id(x)].data.ptr, run, stream, allocate)
        answers.append([known[id(x)].get().tobytes() for x in (arrays.o, arrays.lse)])
    assert answers[0] == answers[1], case
    o, lse = list_cases.expected(case, arrays)
    found = np.frombuffer(answers[0][0], arrays.o.dtype, arrays.o.size).reshape(o.shape)
    found_lse = np.frombuffer(answers[0][1], np.float32, arrays.lse.size).reshape(lse.shape)
    # Scales of up to 1.5 multiply the rounding of values too.
    atol = TOLERANCE[case.dtype] * (4 if case.dtype_kv else 1) * (1.6 if case.scales else 1)
    np.testing.assert_allclose(found.astype(np.float64), o, atol, atol, err_msg=str(case))
    np.testing.assert_allclose(found_lse * np.log(2.0), lse, 1e-3, 1e-3 + atol / 4)


@pytest.mark.parametrize("first", range(0, 64, BLOCK))
def test_random_cases(first: int) -> None:
    for seed in range(first, first + some(BLOCK)):
        check(list_cases.draw(seed))


@pytest.mark.parametrize("first", range(0, 96, BLOCK))
def test_random_unions(first: int) -> None:
    for seed in range(first, first + some(BLOCK)):
        check(list_cases.draw_unions(seed), by_unions=True)


@pytest.mark.parametrize("first", range(0, 48, BLOCK))
def test_random_unions_of_small_blocks(first: int) -> None:
    """Some lists are read by themselves, as the GPU decides."""
    for seed in range(first, first + some(BLOCK)):
        check(list_cases.draw_small_unions(seed), by_unions=True)


def test_unions_are_of_calls_with_many_tokens() -> None:
    """What the public call takes by itself, of pages, rows and requests of one size."""
    tokens, rng = 600, np.random.default_rng(3)
    keys = [rng.standard_normal((640, 2, 64)).astype(np.float16) for _ in range(2)]
    lists = np.sort(rng.random((tokens, 2, 10)).argsort(-1)[..., :4], -1).astype(np.int32)
    q = rng.standard_normal((tokens, 32, 64)).astype(np.float16)
    want, want_lse = sparse.attend(
        q, (keys[0], keys[1]), lists, granularity=64, window=70, return_lse=True
    )
    on_gpu = [cupy.asarray(x) for x in keys]
    offsets = cupy.asarray(np.array([0, 640], np.int64))
    in_pages = [x.reshape(10, 64, 2, 64) for x in on_gpu]
    table, lengths = cupy.arange(10, dtype=np.int32)[None], cupy.array([640], dtype=np.int32)
    for arguments in (
        {"cache": tuple(on_gpu)},
        {"cache": tuple(on_gpu), "kv_indptr": offsets},
        {"cache": tuple(in_pages), "table": table, "lengths": lengths},
    ):
        out, lse = sparse.attend(
            cupy.asarray(q),
            **arguments,
            lists=cupy.asarray(lists),
            granularity=64,
            window=70,
            return_lse=True,
        )
        np.testing.assert_allclose(out.get(), want, 2e-3, 2e-3)
        np.testing.assert_allclose(lse.get(), want_lse, 1e-3, 2e-3)

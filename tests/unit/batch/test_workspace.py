"""A workspace of 128 MB serves any batch: plans that would take more split keys in fewer parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.batches import WORKSPACE, offsets

import cupyattn
from cupyattn.engine import prepared
from cupyattn.engine.geometry import Variant
from cupyattn.engine.workspace import num_bytes
from cupyattn.errors import WorkspaceError
from cupyattn.launch.attention import find_items
from cupyattn.launch.attention.layout import ANY_BATCH_BYTES

_DIMS = (64, 96, 128, 192, 256, 512)
_HEADS = ((1, 1), (8, 1), (16, 1), (128, 1), (32, 8), (64, 8), (16, 16), (5, 5))


def planned(
    workspace: Any,
    heads: tuple[int, int],
    dim: int,
    qo_len: np.ndarray,
    kv_len: np.ndarray,
    page_size: int = 16,
    is_graph: bool = False,
    **options: Any,
) -> Any:
    """A wrapper with the plan of requests of these lengths, on pages that all share."""
    pages = -(-kv_len // page_size)
    indptr, last = offsets(pages), (kv_len - 1) % page_size + 1
    indices = np.zeros(indptr[-1], np.int32)
    is_decode = (qo_len == 1).all()
    buffers: list[Any] = [offsets(qo_len)] * (not is_decode)
    buffers += [indptr.copy(), np.zeros(max(1, indices.size), np.int32), last.astype(np.int32)]
    kind = cupyattn.BatchPrefillWithPagedKVCacheWrapper
    if is_decode:
        kind = cupyattn.BatchDecodeWithPagedKVCacheWrapper
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf")
    names = (*names, "paged_kv_last_page_len_buf")
    if is_decode:
        names = tuple(name + "fer" for name in names[1:])
    given = dict(zip(names, buffers, strict=True)) if is_graph else {}
    wrapper = kind(workspace, use_cuda_graph=is_graph, **given)
    rows = () if is_decode else (offsets(qo_len),)
    wrapper.plan(*rows, indptr, indices, last, *heads, dim, page_size, **options)
    return wrapper


def taken(wrapper: Any, variant: Variant | None = None) -> int:
    plan = wrapper._current
    prepared = wrapper._prepare(plan, variant or plan.geometry.default_variant)
    return prepared.schedule.workspace_bytes


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("seed", range(20))
def test_128_mb_serve_drawn_batches(seed: int, is_graph: bool) -> None:
    rng = np.random.default_rng(seed)
    count, dim = int(2 ** rng.uniform(0, 9)), int(rng.choice(_DIMS))
    longest = int(2 ** rng.uniform(4, 17))
    kv_len = rng.integers(1, longest + 1, count)
    qo_len = np.ones(count, np.int64)
    if rng.random() < 0.5:
        qo_len = np.minimum(rng.integers(1, int(2 ** rng.uniform(1, 11)) + 1, count), kv_len)
    heads = _HEADS[rng.integers(len(_HEADS))]
    options: dict[str, Any] = {"window_left": int(longest // 2)} if rng.random() < 0.2 else {}
    if not (qo_len == 1).all():
        options["causal"] = bool(rng.random() < 0.7)
    wrapper = planned(WORKSPACE, heads, dim, qo_len, kv_len, is_graph=is_graph, **options)
    assert taken(wrapper) <= ANY_BATCH_BYTES
    for variant in (Variant(False, True), Variant(True, False)):
        assert taken(wrapper, variant) <= ANY_BATCH_BYTES


@pytest.mark.parametrize(
    ("count", "rows", "heads", "dim"), [(200, 1, (128, 1), 512), (200, 500, (16, 1), 256)]
)
def test_graphs_that_would_take_more_than_128_mb(
    count: int, rows: int, heads: tuple[int, int], dim: int
) -> None:
    lengths = np.full(count, rows), np.full(count, 1000)
    wrapper = planned(WORKSPACE, heads, dim, *lengths, is_graph=True)
    assert taken(wrapper) <= ANY_BATCH_BYTES
    before = taken(wrapper), wrapper._current.prepared[Variant(True, False)].schedule.words.size
    # Later plans are laid out as the first, whatever the workspace is by then.
    wrapper.reset_workspace_buffer(np.zeros(1 << 29, np.uint8))
    pages = np.full(count, 63)
    indptr, tables = offsets(pages), (np.zeros(63 * count, np.int32), np.full(count, 3))
    given = () if rows == 1 else (offsets([rows] * count),)
    wrapper.plan(*given, indptr, *tables, *heads, dim, 16)
    again = taken(wrapper), wrapper._current.prepared[Variant(True, False)].schedule.words.size
    assert again == before


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_a_run_of_other_kernels_makes_do_with_the_workspace_of_the_plan(is_graph: bool) -> None:
    """Kernels for arrays off 16-byte boundaries have other tiles, of which nobody knew."""
    lengths, heads = (np.array([300, 300]), np.array([40_000, 30_000])), (8, 1)
    need = taken(planned(WORKSPACE, heads, 128, *lengths, is_graph=is_graph))
    space = np.zeros(max(need, 16), np.uint8)
    wrapper = planned(space, heads, 128, *lengths, is_graph=is_graph)
    for variant in (Variant(False, True), Variant(False, False), Variant(True, True)):
        assert taken(wrapper, variant) <= num_bytes(wrapper._workspace)


def test_keys_are_split_less_where_the_workspace_is_smaller() -> None:
    lengths = np.ones(30, np.int64), np.array([100_000] * 2 + [9_000] * 28)
    best = taken(planned(WORKSPACE, (32, 8), 128, *lengths))
    least, sizes = 0, []
    for size in range(best // 16 * 16, 0, -(best // 320 * 16)):
        try:
            sizes.append(taken(planned(np.zeros(size, np.uint8), (32, 8), 128, *lengths)))
        except WorkspaceError as error:
            assert f"needs {best} bytes and it has {size}" in str(error)
            least = size
            break
        assert sizes[-1] <= size
    assert least and len(set(sizes)) > 1


@pytest.mark.parametrize("seed", range(20))
def test_128_mb_serve_drawn_calls_without_a_plan(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    count, dim = int(2 ** rng.uniform(0, 9)), int(rng.choice(_DIMS[:5]))
    heads = _HEADS[rng.integers(len(_HEADS))]
    width, rows = int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 3))
    q = np.ones((count * rows, heads[0], dim), np.float16)
    cache = np.ones((1, 2, heads[1], 16, dim), np.float16)
    out = cupyattn.trtllm_batch_decode_with_kv_cache(
        q,
        cache,
        WORKSPACE,
        np.zeros((count, width), np.int32),
        np.zeros(count, np.int32),
        16 * width,
        q_len_per_req=rows,
    )
    assert not out.any()


def test_calls_without_a_plan_split_less_where_the_workspace_is_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(size: int) -> None:
        cupyattn.trtllm_batch_decode_with_kv_cache(
            np.ones((30, 32, 128), np.float16),
            np.ones((1, 2, 8, 16, 128), np.float16),
            WORKSPACE[:size],
            np.zeros((30, 4096), np.int32),
            np.zeros(30, np.int32),
            65_536,
        )

    def size_of_all() -> int:
        with pytest.raises(WorkspaceError, match=r"needs \d+ bytes and it has 16") as caught:
            call(16)
        return int(str(caught.value).split(" needs ")[1].split()[0])

    found = size_of_all()
    call(found)
    with monkeypatch.context() as patch:
        patch.setattr(find_items, "prepare", lambda *_: None)
        prepared.plan_of.cache_clear()
        need = size_of_all()
        call(need)
        call(need * 3 // 4 // 16 * 16)
        call(need * 2 // 5 // 16 * 16)
        with pytest.raises(WorkspaceError, match=f"needs {need} bytes"):
            call(need // 8 // 16 * 16)
    # Parts of one wave have fewer states.
    assert found < need * 2 // 5
    prepared.plan_of.cache_clear()

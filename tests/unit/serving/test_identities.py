"""What must be equal: two ways to the same answer, each with arithmetic of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.serving_cases import Case

from cupyattn.flash_attn import flash_attn_with_kvcache
from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    DraftInfo,
    ForwardMode,
    LayerSpec,
)

H, HK, D, COLUMNS, REQUESTS = 4, 2, 16, 64, 4
LENS, ROWS, EXTEND = np.array([23, 9, 40]), np.array([2, 0, 3]), np.array([5, 9, 11])


class World:
    """A pool in which pages of 8 tokens are runs of slots, so that any smaller page fits too."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = rng = np.random.default_rng(seed)
        pages = rng.permutation(REQUESTS * COLUMNS // 8)
        slots = pages.reshape(REQUESTS, -1, 1) * 8 + np.arange(8)
        self.table = slots.reshape(REQUESTS, COLUMNS).astype(np.int32)
        shape = REQUESTS * COLUMNS, HK, D
        self.k, self.v = (rng.standard_normal(shape).astype(np.float32) for _ in "kv")

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.k, self.v

    def queries(self, rows: int) -> np.ndarray:
        return self.rng.standard_normal((rows, H, D)).astype(np.float32)

    def backend(self, **changes: Any) -> AttentionBackend:
        named = {"max_context_len": COLUMNS, "q_dtype": "float32", **changes}
        return AttentionBackend(BackendConfig(H, HK, D, **named), self, self.table)

    def answer(self, batch: BatchInfo, q: np.ndarray, layer: LayerSpec, **changes: Any) -> Any:
        backend = self.backend(**changes)
        backend.init_forward_metadata(batch)
        return backend.forward(q, layer, return_lse=True)

    def with_cache(self, q: np.ndarray, offsets: np.ndarray, **options: Any) -> Any:
        """By flash_attn's function, with a table that is gathered."""
        pages = [x.reshape(-1, 1, HK, D) for x in (self.k, self.v)]
        return flash_attn_with_kvcache(
            q,
            *pages,
            page_table=self.table[ROWS],
            cache_seqlens=LENS.astype(np.int32),
            cu_seqlens_q=offsets,
            max_seqlen_q=int(np.diff(offsets).max()),
            causal=True,
            return_softmax_lse=True,
            **options,
        )


def extend() -> tuple[BatchInfo, np.ndarray]:
    batch = BatchInfo(ForwardMode.EXTEND, ROWS, LENS, LENS, extend_seq_lens_host=EXTEND)
    return batch, np.concatenate([[0], np.cumsum(EXTEND)]).astype(np.int32)


def close(found: Any, wanted: Any, bound: float = 1e-6) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 100])
def test_parts_of_chunks_are_the_mask_of_chunks(chunk: int) -> None:
    world = World(chunk)
    batch, offsets = extend()
    q = world.queries(int(EXTEND.sum()))
    found = world.answer(batch, q, LayerSpec(attention_chunk=chunk), attention_chunk_size=chunk)
    close(found, world.with_cache(q, offsets, attention_chunk=chunk))


@pytest.mark.parametrize("window", [0, 3, 30])
def test_rows_of_the_pool_are_a_gathered_table(window: int) -> None:
    world = World(window)
    batch, offsets = extend()
    q = world.queries(int(EXTEND.sum()))
    found = world.answer(batch, q, LayerSpec(window_size=(window, 0)))
    wanted = world.with_cache(q, offsets, window_size=(window, 0))
    assert found[0].tobytes() == wanted[0].tobytes()
    assert np.array_equal(found[1], wanted[1])


@pytest.mark.parametrize("mode", ["extend", "tree", "beams", "chunks"])
def test_pages_of_any_size_are_slots(mode: str) -> None:
    world = World(7)
    batch, _ = extend()
    rows, layer, options = int(EXTEND.sum()), LayerSpec(), dict[str, Any]()
    if mode == "chunks":
        layer, options = LayerSpec(attention_chunk=8), {"attention_chunk_size": 8}
    elif mode != "extend":
        batch, rows, options = drafts(world, mode)
    q = world.queries(rows)
    wanted = world.answer(batch, q, layer, **options)
    for page_size in (2, 4, 8):
        found = world.answer(batch, q, layer, page_size=page_size, **options)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


def drafts(world: World, mode: str) -> tuple[BatchInfo, int, dict[str, Any]]:
    if mode == "beams":
        loc = world.rng.permutation(world.table[1])[:24]
        batch = BatchInfo(ForwardMode.DRAFT_DECODE, ROWS, LENS, LENS, out_cache_loc=loc)
        batch.draft = DraftInfo(step=2)
        return batch, 6, {"topk": 2, "num_draft_steps": 4}
    tree = np.stack([np.eye(5, dtype=bool)] * 3)
    tree[:, :, 0] = tree[:, 4, 2] = tree[1:, 3, 1] = True
    batch = BatchInfo(ForwardMode.TARGET_VERIFY, ROWS, LENS, LENS, draft=DraftInfo(tree_mask=tree))
    return batch, 15, {"topk": 2, "num_draft_tokens": 5}


def test_one_pass_is_two_and_a_merge() -> None:
    world = World(1)
    batch, rows, options = drafts(world, "tree")
    q = world.queries(rows)
    sinks = world.rng.standard_normal(H).astype(np.float32)
    for layer in (LayerSpec(), LayerSpec(softcap=2.0), LayerSpec(sinks=sinks)):
        one = world.answer(batch, q, layer, **options)
        two = world.answer(batch, q, layer, tree_form="expand", **options)
        close(two, one)


def test_a_wide_window_over_a_tree_is_none() -> None:
    world = World(2)
    for mode in ("tree", "beams"):
        batch, rows, options = drafts(world, mode)
        q = world.queries(rows)
        wanted = world.answer(batch, q, LayerSpec(), **options)
        layer = LayerSpec(window_size=(COLUMNS, 0))
        close(world.answer(batch, q, layer, sliding_window_size=COLUMNS, **options), wanted)


def test_a_chain_is_a_tree_without_branches() -> None:
    world = World(3)
    chain = BatchInfo(ForwardMode.TARGET_VERIFY, ROWS, LENS, LENS)
    tree = replace(chain, draft=DraftInfo(tree_mask=np.stack([np.tri(5, dtype=bool)] * 3)))
    q = world.queries(15)
    wanted = world.answer(chain, q, LayerSpec(), num_draft_tokens=5)
    close(world.answer(tree, q, LayerSpec(), num_draft_tokens=5, topk=2), wanted)


def test_one_beam_is_a_chain() -> None:
    world = World(4)
    # Drafts of step s are in the columns behind seq_lens, as a chain has them.
    columns = LENS[:, None] + np.arange(4)
    loc = world.table[ROWS[:, None], columns]
    batch = BatchInfo(ForwardMode.DRAFT_DECODE, ROWS, LENS, LENS, draft=DraftInfo(step=2))
    q = world.queries(3)
    wanted = world.answer(batch, q, LayerSpec(), num_draft_steps=4)
    batch.out_cache_loc = np.repeat(loc[:, None], 2, axis=1)
    found = world.answer(batch, q.repeat(2, 0), LayerSpec(), num_draft_steps=4, topk=2)
    close((found[0][::2], found[1][:, ::2]), wanted)
    close((found[0][1::2], found[1][:, 1::2]), wanted)


def test_scales_are_those_of_a_scaled_cache() -> None:
    """Of every kind of step: what an fp8 cache holds times its scales."""
    tried = 0
    for seed in range(400):
        case = Case(seed)
        if case.has_scales and case.bs:
            case.run()
            tried += 1
    assert tried >= 15

"""What is said about plans: of CPU arrays, and of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batches, sparse_calls
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device

import cupyattn
from cupyattn.choose import candidates
from cupyattn.core.device import NO_GPU
from cupyattn.errors import ArgumentError, PlanError

Lengths = list[tuple[int, int]]
MIB = 1 << 20


def offsets(lengths: Any) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def tables(lengths: Lengths, page_size: int) -> list[np.ndarray]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len."""
    rows, keys = np.array(lengths).T
    pages = -(-keys // page_size)
    last = (keys - (pages - 1) * page_size).astype(np.int32)
    return [offsets(rows), offsets(pages), np.arange(pages.sum(), dtype=np.int32), last]


def paged(
    lengths: Lengths,
    heads: tuple[int, int] = (32, 8),
    page_size: int = 16,
    dim: int = 128,
    **options: Any,
) -> Any:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(np.zeros(256 * MIB, np.uint8))
    given = {"causal": True, "q_data_type": "bfloat16", **options}
    w.plan(*tables(lengths, page_size), *heads, dim, page_size, **given)
    return w


def test_decodes_beside_chunks() -> None:
    found = cupyattn.explain(paged([(1, 4096)] * 64 + [(512, 2048)] * 2))
    assert found.card.startswith("H100: sm_90a, 132 SMs, 3,352 GB/s") and found.times == "of H100"
    assert found.problem == (
        "bfloat16, 32 query heads over 8 key heads, head dim 128, pages of 16 tokens, causal"
    )
    assert found.batch == ("66 requests: 64 x 1 row over 4,096 keys; 2 x 512 rows over 2,048 keys")
    keys = 64 * 4096 + 2 * 2048
    assert found.key_bytes == keys * 8 * 2 * 2 * 128
    assert found.key_time == pytest.approx(found.key_bytes / NO_GPU.memory_rate / 1e3)
    times = [x.time for x in found.candidates if x.time is not None]
    assert times == sorted(times)
    assert found.taken is not None and found.taken.time is not None
    assert found.taken.time <= 1.1 * times[0]
    chunks, decodes = found.launches
    assert (chunks.kernel, chunks.is_persistent, chunks.is_beside) == ("prefill_sm90", True, False)
    assert (decodes.kernel, decodes.tiles, decodes.is_beside) == ("decode_sm80", "decode", True)
    assert decodes.grid == (8, 64, 1) and decodes.blocks == 512 == decodes.items
    assert decodes.waves == 512 / decodes.blocks_at_a_time
    assert decodes.read_bytes == 64 * 4096 * 8 * 2 * 2 * 128 and decodes.key_tiles == (64, 64)
    assert "reference answers" in found.notes[0]


def test_splits_states_and_who_merges() -> None:
    one = cupyattn.explain(paged([(1, 40000)], fixed_split_size=250))
    (launch,) = one.launches
    tiles = 4000 // launch.tile_keys[0]  # of 250 pages
    parts = -(-(40000 // launch.tile_keys[0]) // tiles)
    assert launch.splits == (parts, parts) and launch.key_tiles[1] <= tiles
    assert launch.states == launch.blocks == 8 * parts
    assert launch.state_bytes == 4 * launch.states * 16 * 129 == one.workspace_bytes
    assert launch.merge == "the last block of a tile"
    assert launch.read_bytes == one.key_bytes
    chunk = cupyattn.explain(paged([(64, 60000)], (8, 8)))
    (launch,) = chunk.launches
    assert launch.states and "a launch of " in launch.merge


def test_what_blocks_read_is_what_rows_see() -> None:
    """The keys of all items, beside a count row by row."""
    lengths, group, dim = [(700, 900), (300, 300), (65, 2000)], 4, 128
    for options in ({}, {"window_left": 100}, {"causal": False}):
        (launch,) = cupyattn.explain(paged(lengths, **options)).launches
        (rows,) = launch.tile_rows
        total = 0
        for qo_len, kv_len in lengths:
            for first in range(0, qo_len * group, rows):
                tokens = first // group, min(qo_len - 1, (first + rows - 1) // group)
                begin, end = 0, kv_len
                if "causal" not in options:
                    end = min(kv_len, tokens[1] + kv_len - qo_len + 1)
                if "window_left" in options:
                    begin = max(0, tokens[0] + kv_len - qo_len - 100)
                total += end - begin
        assert launch.read_bytes == total * 8 * 2 * 2 * dim


def test_blocks_of_a_cluster_share_an_item() -> None:
    with candidates.only("decode cluster4"):
        found = cupyattn.explain(paged([(1, 4096)] * 2))
    (launch,) = found.launches
    assert found.taken is not None and found.taken.name == f"decode cluster{launch.cluster}"
    assert launch.blocks == launch.items * launch.cluster == 2 * 8 * launch.cluster
    tiles = 4096 // (launch.tile_keys[0] * launch.cluster)
    assert launch.key_tiles == (tiles, tiles) and launch.read_bytes == found.key_bytes
    assert f"in clusters of {launch.cluster}" in str(found)


def test_the_text_has_everything() -> None:
    found = cupyattn.explain(paged([(1, 4096)] * 64 + [(512, 2048)] * 2))
    text = str(found)
    for part in (found.card, found.problem, found.batch, *found.notes):
        assert part in text
    for candidate in found.candidates:
        assert f"\n{candidate.name} " in text
    assert " us " in text and " taken\n" in text
    for refusal in found.refusals:
        assert refusal.reason in text
    for launch in found.launches:
        assert launch.kernel in text and str(launch.blocks) in text
    assert found._repr_html_().startswith("<pre>card ") and "<svg" in found.picture()


def refused(*args: Any, **options: Any) -> dict[str, str]:
    return {x.name: x.reason for x in cupyattn.explain(paged(*args, **options)).refusals}


def test_refusals_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    found = refused([(700, 900)])
    assert "it has no tile for paged keys of such head dims" in found.values()
    assert all(name.startswith("prefill_sm90 (") for name in found)
    found = refused([(1, 900)] * 64)
    assert "512 blocks are more than 132 SMs" in found["decode in clusters"]
    assert "decode in clusters" not in refused([(1, 900)] * 2)
    masked = refused([(64, 90)], custom_mask=np.ones(64 * 90, bool))
    assert "plain logits" in str(masked)
    monkeypatch.setenv("CUPYATTN_PORTABLE", "1")
    assert "CUPYATTN_PORTABLE" in refused([(700, 900)])["prefill_sm90"]


def test_options_in_words() -> None:
    found = cupyattn.explain(
        paged([(3, 900)], window_left=5, logits_soft_cap=3.0, pos_encoding_mode="ROPE_LLAMA")
    )
    words = "a window of 5 keys to the left, a soft cap, RoPE inside"
    assert found.problem.endswith(f"causal, {words}")
    found = cupyattn.explain(paged([(3, 900)], kv_data_type="float8_e4m3fn"))
    assert found.problem.startswith("bfloat16 over keys of float8_e4m3fn, ")
    found = cupyattn.explain(paged([(n, 100 * n) for n in range(1, 9)]))
    assert found.batch == "8 requests of 1 to 8 rows over 100 to 800 keys"


def test_float32_and_estimates_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(MIB, np.uint8))
    w.plan(offsets([3]), offsets([9]), 8, 8, 64, q_data_type="float32")
    assert "no kernels for float32: this is the plan of float16" in str(cupyattn.explain(w))
    w = paged([(1, 4096)] * 64)
    (launcher,) = (x.launcher for x in w._current.prepared.values())
    real = launcher.candidates
    for factor in (0.1, 10.0):

        def scaled(requests: Any, factor: float = factor) -> Any:
            return [replace(x, time=factor * x.time) for x in real(requests)]

        monkeypatch.setattr(launcher, "candidates", scaled)
        is_low = "less than memory takes" in str(cupyattn.explain(w))
        assert is_low == (factor < 1)


def test_other_wrappers() -> None:
    sparse = cupyattn.BlockSparseAttentionWrapper(np.zeros(64 * MIB, np.uint8))
    sparse.plan(offsets([2, 1]), np.array([0, 1, 1], np.int32), 64, 64, 32, 32, 8, 8, 64)
    assert cupyattn.explain(sparse).launches
    sinks = cupyattn.BatchAttentionWithAttentionSinkWrapper(np.zeros(64 * MIB, np.uint8))
    sinks.plan(*tables([(9, 90)] * 3, 16), 8, 8, 64, 16, causal=True)
    assert cupyattn.explain(sinks).taken is not None


def test_given_splits_choose_by_rows() -> None:
    found = cupyattn.explain(paged([(1, 4096)] * 3, disable_split_kv=True))
    assert found.candidates == () and found.taken is None
    assert "says how keys are split" in str(found)
    (launch,) = found.launches
    assert launch.splits == (1, 1) and "nothing is estimated" in found.picture()


def test_ragged_latent_and_mixed() -> None:
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(8 * MIB, np.uint8))
    ragged.plan(offsets([2000] * 4), offsets([2000] * 4), 32, 8, 128, causal=True)
    found = cupyattn.explain(ragged)
    assert "ragged keys" in found.problem and found.taken is not None
    latent = cupyattn.BatchMLAPagedAttentionWrapper(np.zeros(64 * MIB, np.uint8))
    rows, pages, ids, _ = tables([(1, 4096)] * 8, 64)
    lengths = np.full(8, 4096, np.int32)
    latent.plan(rows, pages, ids, lengths, 128, 512, 64, 64, True, 0.1, "bfloat16", "bfloat16")
    found = cupyattn.explain(latent)
    assert "128 heads, latent keys of 512 and 64 columns" in found.problem
    assert found.launches[0].kernel.startswith("wide_") and found.refusals == ()
    assert found.key_bytes == 8 * 4096 * 576 * 2
    latent.plan(rows, pages, ids, lengths, 128, 256, 64, 64, True, 0.1, "bfloat16", "bfloat16")
    (refusal,) = cupyattn.explain(latent).refusals
    words = "it does not serve latent heads of 256 and 64 columns"
    assert (refusal.name, refusal.reason) == ("wide_sm90", words)
    mixed = cupyattn.BatchAttention(device="cpu")
    rows, pages, ids, _ = tables([(1, 100), (300, 500)], 16)
    mixed.plan(rows, pages, ids, np.array([100, 500], np.int32), 8, 8, 64, 64, 16, causal=True)
    assert cupyattn.explain(mixed).launches


def test_pod_shared_prefixes_and_cascades() -> None:
    table = tables([(1, 100)] * 3, 16)
    pod = cupyattn.PODWithPagedKVCacheWrapper(np.zeros(8 * MIB, np.uint8))
    pod.plan(*table[1:], 8, 8, 64, 16)
    assert "run() plans the prompt" in str(cupyattn.explain(pod))
    both = cupyattn.BatchPODWithPagedKVCacheWrapper(np.zeros(8 * MIB, np.uint8))
    both.plan(*tables([(200, 300)], 16), *table, 8, 8, 64, 16)
    assert cupyattn.explain(both).batch.startswith("4 requests: ")
    shared = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(np.zeros(8 * MIB, np.uint8))
    with pytest.raises(PlanError, match="before plan"):
        cupyattn.explain(shared)
    shared.begin_forward(*table[1:], 8, 8, 64, 16)
    assert "run() plans the shared prefix" in str(cupyattn.explain(shared))
    cascade = cupyattn.MultiLevelCascadeAttentionWrapper(2, np.zeros(64 * MIB, np.uint8))
    prefix = tables([(64, 8192)], 16)
    own = tables([(1, 64)] * 64, 16)
    own[2] += 512
    cascade.plan(*([a, b] for a, b in zip(prefix, own, strict=True)), 8, 8, 64, 16)
    found = cupyattn.explain(cascade)
    assert "levels of a cascade" in str(found) and all(x.states for x in found.launches)
    assert "nobody timed" not in str(found)
    merges = [x.merge for x in found.launches]
    assert "a launch of " in merges[-1] and set(merges[:-1]) <= {"the merge of all levels"}


def test_nothing_planned_and_nothing_to_launch() -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(MIB, np.uint8))
    with pytest.raises(PlanError, match=r"explain\(\) was called before plan\(\)"):
        cupyattn.explain(w)
    for wrong in (None, np.zeros(3), cupyattn.BatchAttention):
        with pytest.raises(ArgumentError, match=r"wrapper: got .*; wanted a batch wrapper"):
            cupyattn.explain(wrong)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(MIB, np.uint8))
    ragged.plan(offsets([0, 0]), offsets([5, 5]), 8, 8, 64)
    found = cupyattn.explain(ragged)
    assert found.launches == () and "nothing is launched" in str(found)
    assert "nothing is launched" in found.picture()


def test_a_captured_graph_keeps_its_tiles() -> None:
    (_, *table), buffers = tables([(1, 900)] * 4, 16), []
    buffers = [np.zeros(n, np.int32) for n in (5, 1000, 4)]
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
        np.zeros(64 * MIB, np.uint8), "NHD", True, True, *buffers
    )
    w.plan(*table, 32, 8, 128, 16)
    found = cupyattn.explain(w)
    (launch,) = found.launches
    assert "captured graph" in str(found) and launch.items == launch.splits[1] * 4 * 8


def test_the_last_run_decides_which_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    w = paged([(8, 90)], (4, 4), 16, 64, q_data_type="float16")
    assert "off 16-byte" not in cupyattn.explain(w).problem
    pages = np.zeros((6, 2, 16, 4, 64), np.float16)
    q = np.zeros(8 * 4 * 64 + 1, np.float16)[1:].reshape(8, 4, 64)
    w.run(q, pages)
    assert "rows off 16-byte boundaries" in cupyattn.explain(w).problem


# --- on a GPU ---


def test_a_list_that_the_gpu_has_made(device: Device) -> None:
    """The host plans it again, with the same splits, and leaves the wrapper as it was."""
    for seed in range(2):
        b = batches.make([1] * 3, [9, 44 + seed, 30], 4, seed=seed)
        w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
        w.plan(*[device.put(x) for x in b.table], HQ, HKV, D, 4)
    assert device.stream.readings == [True]
    (prepared,) = w._current.prepared.values()
    assert not prepared.schedule.words.size
    before = {name: x for name, x in vars(w).items() if name != "_turns"}
    (launch,) = cupyattn.explain(w).launches
    assert launch.items == 3 * HKV and launch.read_bytes == (9 + 45 + 30) * HKV * 4 * D
    assert {name: x for name, x in vars(w).items() if name != "_turns"} == before


def test_a_plan_on_a_gpu(make: Callable[..., Any], gpu: Any, stream: Any) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(make(64 * MIB, dtype="uint8"))
    w.plan(*tables([(1, 900)] * 40, 16)[1:], 32, 8, 128, 16, q_data_type="bfloat16")
    before = w._current.prepared.copy()
    found = cupyattn.explain(w)
    assert w._current.prepared == before and not gpu.launches
    (launch,) = found.launches
    assert (launch.kernel, launch.blocks_at_a_time) == ("decode_sm80", 264)
    assert found.notes == () and found.taken is not None
    assert (
        found.word_bytes
        == w._current.prepared[w._variants(w._current.geometry)[0]].schedule.words.nbytes
    )


def masked(heads: int, length: int, size: int) -> Any:
    """Of a causal mask of blocks of which a quarter is seen."""
    count = length // size
    seen = sparse_calls.causal_blocks(np.random.default_rng(3), count, count, 0.25, 0.0)
    wrapper = cupyattn.BlockSparseAttentionWrapper(np.zeros(16 << 20, np.uint8))
    sizes = length, length, size, size, heads, heads, 128
    wrapper.plan(offsets(seen.sum(1)), np.nonzero(seen)[1], *sizes, q_data_type="bfloat16")
    return cupyattn.explain(wrapper)


def test_heads_of_masks_take_turns_where_l2_does_not_hold_their_keys() -> None:
    for heads, length, size, name in ((16, 8192, 64, "q64"), (16, 8192, 128, "")):
        (launch,) = masked(heads, length, size).launches
        assert launch.is_persistent and launch.tiles.startswith(name)
    (launch,) = masked(16, 4096, 64).launches  # whose keys are 32 MiB
    assert not launch.is_persistent

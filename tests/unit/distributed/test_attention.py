"""Attention over keys that simulated ranks share: as good as one rank's, and always the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.parallel_attention import Batch, own_part

import cupyattn
from cupyattn import BatchDecodeWithPagedKVCacheWrapper, explain, reference
from cupyattn.core.key_share import KeyShare
from cupyattn.distributed import ContextParallelCall, ContextParallelWrapper, Group, simulate
from cupyattn.errors import ArgumentError, DistributedError, UnsupportedError
from cupyattn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from cupyattn.mla import trtllm_batch_decode_with_kv_cache_mla
from cupyattn.trtllm import trtllm_batch_decode_with_kv_cache

BATCH = Batch()
# Every interleave that splits pages, fills them, and is longer; sizes; a request of few tokens.
SPREADS = [
    replace(BATCH, size=size, run=run, kv_lens=lens, seed=size + run)
    for size in (1, 2, 3, 4)
    for run, lens in ((1, (37, 5, 64)), (2, (1, 40, 2)), (4, (37, 5, 64)), (7, (3, 70, 9)))
]
DRAFTS = [replace(batch, q_len=3, kv_lens=tuple(n + 3 for n in batch.kv_lens)) for batch in SPREADS]


def oracle(batch: Batch, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """out [B, q_len, heads, columns of v] and its LSE in base 2, in float64."""
    q, keys, values = batch.draw()
    found = [
        reference.attention(q[i], keys[i], values[i], causal=batch.q_len > 1, **options)
        for i in range(len(keys))
    ]
    return tuple(np.stack(x) for x in zip(*found, strict=True))


def options_of(batch: Batch, group: Group) -> dict[str, Any]:
    return {
        "max_rows": len(batch.kv_lens) * batch.q_len,
        "num_qo_heads": batch.heads,
        "head_dim": 512 if batch.latent else batch.head_dim,
        "cp_kv_cache_interleave_size": batch.run,
        "out_dtype": "float16",
    }


def check(batch: Batch, work: Any, base_on_e: bool = False, **options: Any) -> None:
    """work(group): out [.., own heads, columns] and its LSE, twice, of a rank."""
    ranks = simulate(batch.size, work)
    for (out, lse), (again, lse_again) in ranks:
        np.testing.assert_array_equal(out.view(np.uint16), again.view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), lse_again.view(np.uint32))
    shape = len(batch.kv_lens), batch.q_len
    out = np.concatenate([x[0][0].reshape(*shape, batch.own_heads, -1) for x in ranks], axis=2)
    lse = np.concatenate([x[0][1].reshape(*shape, batch.own_heads) for x in ranks], axis=2)
    wanted, wanted_lse = oracle(batch, **options)
    # One rank rounds the exact output once.
    error = np.abs(out.astype(np.float64) - wanted).max()
    one_rank = np.abs(wanted.astype(np.float16).astype(np.float64) - wanted).max()
    assert error <= 1.02 * one_rank + 1e-6
    np.testing.assert_allclose(lse * (np.log2(np.e) if base_on_e else 1.0), wanted_lse, 1e-5, 1e-5)


@pytest.mark.parametrize("batch", SPREADS)
def test_decode_wrapper(batch: Batch) -> None:
    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
        parallel = ContextParallelWrapper(group, wrapper, **options_of(batch, group))
        parallel.plan(
            batch.indptr(share),
            np.arange(batch.indptr(share)[-1], dtype=np.int32),
            batch.last_page_len(share),
            batch.heads,
            batch.kv_heads,
            batch.head_dim,
            batch.page_size,
            q_data_type="float16",
        )
        cache = batch.cache(keys, share), batch.cache(values, share)
        own = own_part(q[:, 0], group)
        return [parallel.run(own, cache, return_lse=True) for _ in "ab"]

    check(batch, work)


@pytest.mark.parametrize("window", [-1, 11])
@pytest.mark.parametrize("batch", DRAFTS)
def test_verification_of_drafts_by_a_prefill_wrapper(batch: Batch, window: int) -> None:
    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(None, "NHD")
        parallel = ContextParallelWrapper(group, wrapper, **options_of(batch, group))
        rows = np.arange(len(batch.kv_lens) + 1, dtype=np.int32) * batch.q_len
        parallel.plan(
            rows,
            batch.indptr(share),
            np.arange(batch.indptr(share)[-1], dtype=np.int32),
            batch.last_page_len(share),
            batch.heads,
            batch.kv_heads,
            batch.head_dim,
            batch.page_size,
            causal=True,
            window_left=window,
            q_data_type="float16",
            cp_tot_seqused_k=np.array(batch.kv_lens, np.int32),
        )
        cache = batch.cache(keys, share), batch.cache(values, share)
        own = own_part(q.reshape(-1, *q.shape[2:]), group)
        return [parallel.run(own, cache, return_lse=True) for _ in "ab"]

    check(batch, work, window_left=window)


@pytest.mark.parametrize("batch", SPREADS[::3] + DRAFTS[::3])
def test_flash_attn_with_kvcache(batch: Batch) -> None:
    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        call = ContextParallelCall(group, flash_attn_with_kvcache, **options_of(batch, group))
        given = {"causal": True, "cp_tot_seqused_k": np.array(batch.kv_lens, np.int32)}
        if group.size == 1:
            del given["cp_tot_seqused_k"]
        return [
            call(
                own_part(q, group),
                batch.cache(keys, share),
                batch.cache(values, share),
                cache_seqlens=batch.lengths(share),
                block_table=batch.tables(share),
                return_lse=True,
                **given,
            )
            for _ in "ab"
        ]

    check(batch, work, base_on_e=True)


@pytest.mark.parametrize("batch", SPREADS[1::3] + DRAFTS[1::3])
def test_flash_attn_varlen_func(batch: Batch) -> None:
    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        call = ContextParallelCall(group, flash_attn_varlen_func, **options_of(batch, group))
        rows = np.arange(len(batch.kv_lens) + 1, dtype=np.int32) * batch.q_len
        return [
            call(
                own_part(q.reshape(-1, *q.shape[2:]), group),
                batch.cache(keys, share),
                batch.cache(values, share),
                rows,
                None,
                batch.q_len,
                int(batch.lengths(share).max()),
                seqused_k=batch.lengths(share),
                block_table=batch.tables(share),
                causal=True,
                return_lse=True,
                cp_tot_seqused_k=np.array(batch.kv_lens, np.int32),
            )
            for _ in "ab"
        ]

    check(batch, work, base_on_e=True)


@pytest.mark.parametrize("batch", SPREADS[2::3] + DRAFTS[2::3])
def test_trtllm_decode(batch: Batch) -> None:
    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        call = ContextParallelCall(
            group, trtllm_batch_decode_with_kv_cache, **options_of(batch, group)
        )
        given = {}
        if group.size > 1 and batch.q_len > 1:
            ahead = np.array(batch.kv_lens, np.int32) - batch.q_len
            given["causal_seqlens_kv_global"] = ahead
        return [
            call(
                own_part(q.reshape(-1, *q.shape[2:]), group),
                (batch.cache(keys, share), batch.cache(values, share)),
                None,
                batch.tables(share),
                batch.lengths(share),
                int(batch.lengths(share).max()),
                bmm1_scale=batch.head_dim**-0.5,
                kv_layout="NHD",
                q_len_per_req=batch.q_len,
                return_lse=True,
                **given,
            )
            for _ in "ab"
        ]

    check(batch, work)


LATENT = [
    replace(batch, latent=True, page_size=16, run=run)
    for batch, run in zip((*SPREADS[::5], *DRAFTS[::5]), (1, 16, 3, 1, 2, 16, 1, 5), strict=True)
]


@pytest.mark.parametrize("batch", LATENT)
def test_mla_wrapper(batch: Batch) -> None:
    def work(group: Group) -> Any:
        q, keys, _ = batch.draw()
        share = batch.share(group.rank)
        wrapper = cupyattn.BatchMLAPagedAttentionWrapper(None)
        parallel = ContextParallelWrapper(group, wrapper, **options_of(batch, group))
        rows = np.arange(len(batch.kv_lens) + 1, dtype=np.int32) * batch.q_len
        parallel.plan(
            rows,
            batch.indptr(share),
            np.arange(batch.indptr(share)[-1], dtype=np.int32),
            batch.lengths(share),
            batch.heads,
            512,
            64,
            batch.page_size,
            batch.q_len > 1,
            576**-0.5,
            "float16",
            "float16",
            cp_tot_seqused_k=np.array(batch.kv_lens, np.int32),
        )
        cache = batch.cache(keys, share)[:, :, 0]
        own = own_part(q.reshape(-1, *q.shape[2:]), group)
        given = own[..., :512], own[..., 512:], cache[..., :512], cache[..., 512:]
        return [parallel.run(*given, return_lse=True) for _ in "ab"]

    check(batch, work)


@pytest.mark.parametrize("batch", LATENT)
def test_trtllm_mla(batch: Batch) -> None:
    def work(group: Group) -> Any:
        q, keys, _ = batch.draw()
        share = batch.share(group.rank)
        call = ContextParallelCall(
            group, trtllm_batch_decode_with_kv_cache_mla, **options_of(batch, group)
        )
        given = {}
        if group.size > 1 and batch.q_len > 1:
            given["causal_seqlens_kv_global"] = np.array(batch.kv_lens, np.int32)
        return [
            call(
                own_part(q, group),
                batch.cache(keys, share)[:, :, 0],
                None,
                128,
                512,
                64,
                batch.tables(share),
                batch.lengths(share),
                int(batch.lengths(share).max()),
                bmm1_scale=576**-0.5,
                return_lse=True,
                **given,
            )
            for _ in "ab"
        ]

    check(batch, work)


def test_lists_of_keys() -> None:
    """Rows attend to keys by lists, of which each rank reads its own."""
    batch = replace(BATCH, latent=True, size=3, page_size=16, kv_lens=(60, 33), run=2)
    rng = np.random.default_rng(3)
    chosen = [np.sort(rng.permutation(n)[:20]) for n in batch.kv_lens]

    def work(group: Group) -> Any:
        q, keys, _ = batch.draw()
        share = batch.share(group.rank)
        lists = np.full((2, 1, 32), -1, np.int32)
        counts = np.zeros(2, np.int32)
        first_page = batch.indptr(share)
        for i, positions in enumerate(chosen):
            own = share.index(positions)
            own = own[own >= 0] + first_page[i] * batch.page_size
            lists[i, 0, : len(own)], counts[i] = own, len(own)
        call = ContextParallelCall(
            group, trtllm_batch_decode_with_kv_cache_mla, **options_of(batch, group)
        )
        return [
            call(
                own_part(q, group),
                batch.cache(keys, share)[:, :, 0],
                None,
                128,
                512,
                64,
                lists,
                batch.lengths(share),
                64,
                sparse_mla_top_k=32,
                sparse_mla_top_k_lens=counts,
                bmm1_scale=576**-0.5,
                return_lse=True,
            )
            for _ in "ab"
        ]

    ranks = simulate(batch.size, work)
    q, keys, values = batch.draw()
    for i, positions in enumerate(chosen):
        wanted, _ = reference.attention(q[i], keys[i][positions], values[i][positions])
        out = np.concatenate([x[0][0][i] for x in ranks], axis=1)
        np.testing.assert_allclose(out.astype(np.float64), wanted, 2e-3, 2e-3)


def test_queries_may_be_replicated() -> None:
    batch = replace(BATCH, size=3)

    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        options = options_of(batch, group)
        found = []
        for is_replicated in (False, True):
            call = ContextParallelCall(
                group, flash_attn_with_kvcache, q_is_replicated=is_replicated, **options
            )
            found.append(
                call(
                    q if is_replicated else own_part(q, group),
                    batch.cache(keys, share),
                    batch.cache(values, share),
                    cache_seqlens=batch.lengths(share),
                    block_table=batch.tables(share),
                    return_lse=True,
                )
            )
        return found

    check(batch, work, base_on_e=True)


def test_sinks_count_once_and_out_is_written() -> None:
    batch = replace(BATCH, size=2)
    sinks = np.linspace(-2, 2, batch.heads).astype(np.float32)

    def work(group: Group) -> Any:
        q, keys, values = batch.draw()
        share = batch.share(group.rank)
        call = ContextParallelCall(group, flash_attn_with_kvcache, **options_of(batch, group))
        out = np.zeros((3, 1, batch.own_heads, batch.head_dim), np.float16)
        found = call(
            own_part(q, group),
            batch.cache(keys, share),
            batch.cache(values, share),
            cache_seqlens=batch.lengths(share),
            block_table=batch.tables(share),
            sinks=sinks,
            out=out,
        )
        assert found is out
        return out

    out = np.concatenate(simulate(2, work), axis=2)
    wanted, _ = oracle(batch, sinks=sinks)
    np.testing.assert_allclose(out.astype(np.float64), wanted, 2e-3, 2e-3)


def test_what_is_refused() -> None:
    def work(group: Group) -> None:
        options = {"max_rows": 4, "num_qo_heads": 4, "head_dim": 64}
        with pytest.raises(UnsupportedError, match="function: got print"):
            ContextParallelCall(group, print, **options)
        with pytest.raises(ArgumentError, match="wrapper: got int"):
            ContextParallelWrapper(group, 3, **options)
        with pytest.raises(ArgumentError, match="cp_kv_cache_interleave_size"):
            ContextParallelCall(
                group, flash_attn_with_kvcache, cp_kv_cache_interleave_size=0, **options
            )
        call = ContextParallelCall(group, flash_attn_with_kvcache, **options)
        with pytest.raises(ArgumentError, match=r"q: shape is \[1, 1, 4, 64\]; wanted .*2"):
            call(np.zeros((1, 1, 4, 64), np.float16), None, None)
        with pytest.raises(ArgumentError, match="out: shape"):
            q = np.zeros((1, 1, 2, 64), np.float16)
            call(q, None, None, out=np.zeros((1, 1, 4, 64), np.float16))
        run = 1 + group.rank
        with pytest.raises(DistributedError, match="rank 1 has cp_kv_cache_interleave_size 2"):
            ContextParallelCall(
                group, flash_attn_with_kvcache, cp_kv_cache_interleave_size=run, **options
            )

    simulate(2, work)


def test_the_share_is_the_groups() -> None:
    def work(group: Group) -> None:
        call = ContextParallelCall(
            group,
            flash_attn_with_kvcache,
            max_rows=1,
            num_qo_heads=3,
            head_dim=8,
            cp_kv_cache_interleave_size=5,
        )
        assert call.share == KeyShare(3, group.rank, 5)
        call.close()

    simulate(3, work)


def test_wrappers_say_what_they_are_and_are_explained() -> None:
    def work(group: Group) -> tuple[str, str, str]:
        shared = ContextParallelWrapper(
            group, BatchDecodeWithPagedKVCacheWrapper(), max_rows=1, num_qo_heads=8, head_dim=64
        )
        shared.plan(np.array([0, 2]), np.array([3, 0]), np.array([4]), 8, 2, 64, 16)
        words = repr(shared), str(explain(shared))
        shared.close()
        return *words, repr(shared.exchange)

    planned, explained, closed = simulate(2, work)[1]
    assert planned.startswith("<ContextParallelWrapper: rank 1 of 2: threads of one process")
    assert "up to 1 rows of 8 heads of 64 columns, float32, by all_to_all; <BatchDec" in planned
    assert "this is what rank 1 of 2 attends to" in explained
    assert closed.endswith("float32, closed>")

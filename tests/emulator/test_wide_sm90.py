"""wide_sm90 and wide_decode_sm90 on the host, by hand-made Params: latent attention, and ordinary
wide heads."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.share import one_of, slow_unless

from cupyattn import flash_mla, mla
from cupyattn.launch.attention import batch
from cupyattn.launch.tiles import wide_sm90
from cupyattn.schedule.batch import listed_parts

from . import gpu, wide
from .wide import Case

BASE = Case()
# Of 32 rows there are fewer tests, because each instance takes seconds to build.
TILES = pytest.mark.parametrize("tile_q", [16, 64])
ALL_TILES = pytest.mark.parametrize("tile_q", [16, 32, 64])
E4M3 = "float8_e4m3fn"


def check(case: Case, **facts: object) -> wide.Answer:
    answer = wide.run(case, **facts)  # type: ignore[arg-type]
    answer.check()
    return answer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("o_dtype", ["", "float32"])
@TILES
def test_dtypes(dtype: str, o_dtype: str, tile_q: int) -> None:
    check(replace(BASE, dtype=dtype, o_dtype=o_dtype, tile_q=tile_q))


@pytest.mark.parametrize("num_heads", [1, 5, 16, 40, 64, 128])
@ALL_TILES
def test_heads(num_heads: int, tile_q: int) -> None:
    check(replace(BASE, num_heads=num_heads, qo_len=(3, 1), kv_len=(70, 3), tile_q=tile_q))


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 128, 129, 300])
@TILES
def test_lengths(kv_len: int, tile_q: int) -> None:
    check(replace(BASE, kv_len=(kv_len,), qo_len=(2,), tile_q=tile_q))


@pytest.mark.parametrize("page_size", [1, 2, 7, 64, 100])
@TILES
def test_pages(page_size: int, tile_q: int) -> None:
    case = replace(BASE, kv_len=(150, 30), qo_len=(1, 2), page_size=page_size, tile_q=tile_q)
    check(replace(case, packed=page_size % 2 == 0))


@pytest.mark.parametrize(
    ("page_size", "tile_q"),
    one_of(2, product((8, 16, 48, 64, 128), (16, 32, 64)), is_several=True),
)
def test_boxes_of_pages(page_size: int, tile_q: int) -> None:
    """Boxes bring rows past the last key, which nobody owns."""
    case = replace(BASE, tma=True, page_size=page_size, tile_q=tile_q)
    check(replace(case, kv_len=(150, 30, 0, 200), qo_len=(1, 2, 1, 0)), seed=page_size)
    check(replace(case, qo_len=(30,), kv_len=(290,), num_heads=8, packed=False, splits=2))
    check(replace(case, qo_len=(30,), kv_len=(290,), num_heads=3, window_left=70, splits=2))


@pytest.mark.parametrize("causal", [True, False])
def test_empty_requests_and_fewer_keys_than_queries(causal: bool) -> None:
    case = replace(BASE, causal=causal, qo_len=(0, 6, 4, 1, 2), kv_len=(80, 3, 0, 0, 200), spare=2)
    check(case)
    check(replace(case, has_sinks=True))


def test_keys_of_many_tokens() -> None:
    check(replace(BASE, qo_len=(70,), kv_len=(130,), num_heads=8))


@pytest.mark.parametrize("splits", [2, 3, 5, 9])
@ALL_TILES
def test_splits(splits: int, tile_q: int) -> None:
    """A split may have no tile of keys. The last block of a tile merges few splits, or a launch."""
    case = replace(BASE, qo_len=(2, 1), kv_len=(330, 100), num_heads=24, splits=splits)
    case = replace(case, has_sinks=splits in (2, 9), tile_q=tile_q)
    check(case)
    if splits == 3:
        check(replace(case, counts=False))


@ALL_TILES
def test_unequal_parts(tile_q: int) -> None:
    """Items say which key tiles they have; the rows of the first token see one fewer."""
    case = replace(BASE, kv_len=(330,), num_heads=40, tma=True, tile_q=tile_q)
    check(replace(case, splits=2, cuts=(0, 4)))
    check(replace(case, splits=3, cuts=(0, 1, 3), has_sinks=True))
    # The first of two tokens sees no key of the last part.
    check(replace(case, splits=2, cuts=(0, 2), qo_len=(2,), kv_len=(129,)))
    check(replace(case, splits=2, cuts=(0, 3), tma=False, packed=False))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_blocks_take_several_items(blocks: int) -> None:
    """Items have many tiles of keys, one or none; the last item has no other behind it."""
    case = replace(BASE, tma=True, tile_q=64, num_heads=72, blocks=blocks, sharpness=3.0)
    check(replace(case, qo_len=(1, 2, 1, 1), kv_len=(200, 330, 40, 500)), seed=blocks)
    check(replace(case, qo_len=(1, 1, 1, 1, 1), kv_len=(60, 0, 30, 0, 10), has_sinks=True))
    check(replace(case, qo_len=(1, 1), kv_len=(330, 300), splits=3, cuts=(0, 1, 3)), seed=blocks)
    check(replace(case, qo_len=(30, 2), kv_len=(290, 70), num_heads=8, o_dtype="float32"))


@pytest.mark.parametrize("heads", [40, 72])
def test_equal_shares_of_a_batch(heads: int) -> None:
    """Requests are cut where the share of a block ends; the last block of each merges."""
    rng = np.random.default_rng(heads)
    kv_len = np.array([3900, 3800, 3700], np.int32)
    counts = -(-kv_len // 64)
    pages = int(counts.sum())
    cache = rng.standard_normal((pages, 64, 576)).astype(np.float16)
    q = rng.standard_normal((3, heads, 576)).astype(np.float16)
    indptr = np.concatenate([[0], counts.cumsum()]).astype(np.int32)

    def answer(workspace: Any) -> Any:
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace)
        wrapper.plan(
            np.arange(4, dtype=np.int32), indptr, rng.permutation(pages).astype(np.int32), kv_len,
            heads, 512, 64, 64, True, 0.07, "float16", "float16",
        )  # fmt: skip
        return wrapper, wrapper.run(query=q, kv_cache=cache, return_lse=True)

    rng = np.random.default_rng(1)
    _, wanted = answer(None)
    rng = np.random.default_rng(1)
    with gpu.plugged_in(num_sms=4 if heads == 40 else 8, seed=heads) as emulated:
        wrapper, got = answer(emulated.empty((32 << 20,), np.dtype(np.uint8)))
        names = [launch.name for launch in emulated.launches]
    assert names == ["wide_sm90"]
    (prepared,) = wrapper._current.prepared.values()
    words = prepared.schedule.words
    items = words[: 12 * (words.size // 12)].reshape(-1, 12)
    assert listed_parts(items[:4])[1].any()
    np.testing.assert_allclose(got[0].astype(np.float32), wanted[0], atol=2e-3)
    np.testing.assert_allclose(got[1], wanted[1], atol=2e-3)


@pytest.mark.parametrize(("heads", "q_len"), [(40, 1), (72, 2)])
def test_equal_shares_that_the_device_makes(heads: int, q_len: int) -> None:
    """A long request has more parts than a block merges: those a launch merges, and no others."""
    rng = np.random.default_rng(heads)
    kv_len = np.array([4300, 900, 1000, 700, 0, 120], np.int32)
    counts = -(-kv_len // 64)
    cache = rng.standard_normal((int(counts.sum()), 64, 1, 576)).astype(np.float16)
    q = rng.standard_normal((6, q_len, heads, 576)).astype(np.float16)
    table = np.zeros((6, int(counts.max())), np.int32)
    pages = rng.permutation(int(counts.sum())).astype(np.int32)
    for index, (first, count) in enumerate(zip(counts.cumsum() - counts, counts, strict=True)):
        table[index, :count] = pages[first : first + count]
    wanted = flash_mla.flash_mla_with_kvcache(q, cache, table, kv_len, 512, causal=True)
    with gpu.plugged_in(num_sms=8 if heads == 40 else 30, seed=heads) as emulated:
        got = flash_mla.flash_mla_with_kvcache(q, cache, table, kv_len, 512, causal=True)
        assert emulated.has_launched("wide_sm90")
    np.testing.assert_allclose(got[0].astype(np.float32), wanted[0], atol=2e-3)
    np.testing.assert_allclose(got[1], wanted[1], atol=2e-3)


@pytest.mark.parametrize("window_left", [0, 20, 64, 100])
@TILES
def test_windows(window_left: int, tile_q: int) -> None:
    case = replace(BASE, qo_len=(40,), kv_len=(200,), num_heads=3, window_left=window_left)
    check(replace(case, tile_q=tile_q))


@TILES
def test_rising_maxima(tile_q: int) -> None:
    """Both warpgroups rescale their columns."""
    steep = replace(BASE, kv_len=(300,), num_heads=64, sharpness=6.0, rising=2.0, tile_q=tile_q)
    check(steep)
    check(replace(steep, dtype="float16"))


@pytest.mark.parametrize("page_size", [1, 64])
@TILES
def test_sparse_lists(page_size: int, tile_q: int) -> None:
    case = replace(BASE, sparse=True, page_size=page_size, tile_q=tile_q)
    check(replace(case, qo_len=(1, 1, 1), kv_len=(200, 0, 67), num_heads=2 * tile_q))
    check(replace(case, kv_len=(300,), splits=3, packed=False))


@TILES
def test_lists_of_one_length(tile_q: int) -> None:
    """Without a work list the grid says who does what: tiles of tokens, and their splits."""
    case = replace(BASE, sparse=True, uniform=True, tile_q=tile_q, qo_len=(1, 1, 1))
    check(replace(case, kv_len=(200,) * 3, num_heads=2 * tile_q), seed=3)
    check(replace(case, kv_len=(300,) * 3, num_heads=tile_q + 8, splits=2, has_sinks=True))


@pytest.mark.parametrize(("heads", "tokens", "width"), [(16, 3, 700), (24, 2, 130), (128, 2, 1100)])
def test_lists_of_one_length_need_no_plan(heads: int, tokens: int, width: int) -> None:
    rng = np.random.default_rng(heads)
    q = rng.standard_normal((tokens, heads, 576)).astype(np.float16)
    kv = rng.standard_normal((500, 1, 576)).astype(np.float16)
    lists = rng.integers(-100, 500, (tokens, 1, width)).astype(np.int32)
    lengths = np.full(tokens, width, np.int32)
    wanted = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 192**-0.5)
    with gpu.plugged_in(num_sms=40, seed=heads) as emulated:
        for given in (None, lengths, None):
            emulated.launches.clear()
            got = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 192**-0.5, topk_length=given)
            names = [launch.name for launch in emulated.launches]
            assert ("plan_batch" in names) == (given is not None), names
            is_split = given is not None or width > 130
            assert ("merge_splits" in names) == is_split
            np.testing.assert_allclose(got[0].astype(np.float64), wanted[0], atol=4e-3)
            np.testing.assert_allclose(got[2], wanted[2], atol=1e-4)


@pytest.mark.parametrize("width", [130, 700])
def test_lists_of_more_tiles_than_a_grid_has(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take several launches, and one merge."""
    rng = np.random.default_rng(width)
    q = rng.standard_normal((5, 24, 576)).astype(np.float16)
    kv = rng.standard_normal((500, 1, 576)).astype(np.float16)
    lists = rng.integers(-100, 500, (5, 1, width)).astype(np.int32)
    wanted = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 192**-0.5)
    monkeypatch.setattr(batch, "MAX_GRID_YZ", 2)
    with gpu.plugged_in(num_sms=40, seed=width) as emulated:
        got = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 192**-0.5)
    names = [launch.name for launch in emulated.launches]
    assert names.count("plan_batch") == 0 and names.count("merge_splits") == (width > 130)
    assert len(names) - names.count("merge_splits") >= 3
    np.testing.assert_allclose(got[0].astype(np.float64), wanted[0], atol=4e-3)
    np.testing.assert_allclose(got[2], wanted[2], atol=1e-4)


ORDINARY = Case(qo_len=(9, 40), kv_len=(70, 130), num_heads=4, kv_heads=2, head_dims=(512, 512))


@pytest.mark.parametrize("is_portable", [False, True], ids=["hopper", "portable"])
@pytest.mark.parametrize(("heads", "width"), [(16, 100), (40, 150)])
def test_lists_of_requests(heads: int, width: int, is_portable: bool) -> None:
    check_lists_of_requests(heads, width, is_portable)


def check_lists_of_requests(heads: int, width: int, is_portable: bool) -> None:
    """A token's list ends where its request does, less the tokens behind it; entries that are no
    slots are no keys; and requests lie further apart than their tokens."""
    rng = np.random.default_rng(heads)
    pool = rng.standard_normal((6, 64, 576)).astype(np.float16)
    lists = rng.integers(0, 384, (2, 3, width)).astype(np.int32)
    is_none = rng.random(lists.shape) < 0.2
    lists[is_none] = rng.choice(np.array([-1, 384, 2**31 - 1], np.int32), is_none.sum())
    q = rng.standard_normal((2, 3, heads, 576)).astype(np.float16)
    apart_q = np.full((2, 4, heads, 576), np.nan, np.float16)
    apart = np.full((2, 5, width), 7, np.int32)
    apart_q[:, :3], apart[:, :3] = q, lists
    arrays = (q, lists), (apart_q[:, :3], apart[:, :3])
    for dtype in (np.int32, np.int64):
        lens = np.array([width + 90, width // 2], dtype)
        call = functools.partial(
            mla.trtllm_batch_decode_with_kv_cache_mla, kv_cache=pool, workspace_buffer=None,
            qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, seq_lens=lens,
            max_seq_len=500, sparse_mla_top_k=width, bmm1_scale=192**-0.5, return_lse=True,
        )  # fmt: skip
        wanted = call(q, block_tables=lists)
        for queries, tables in arrays:
            with gpu.plugged_in(num_sms=20, is_portable=is_portable) as emulated:
                got = call(queries, block_tables=tables)
                names = [launch.name for launch in emulated.launches]
            assert ("plan_batch" in names) == is_portable
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(
                    one.astype(np.float32), other.astype(np.float32), atol=5e-3, rtol=2e-3
                )


@pytest.mark.parametrize("head_dims", [(512, 512), (256, 512)])
@pytest.mark.parametrize("is_paged", [True, False])
def test_ordinary_heads(head_dims: tuple[int, int], is_paged: bool) -> None:
    assert head_dims in wide_sm90.ORDINARY
    case = replace(ORDINARY, head_dims=head_dims, is_paged=is_paged, page_size=5)
    check(case, seed=3)
    check(replace(case, qo_len=(1, 0, 3), kv_len=(200, 30, 0), splits=2, has_sinks=True))


@pytest.mark.parametrize("splits", [2, 5, 9])
def test_last_blocks_merge_few_ordinary_rows(splits: int) -> None:
    few = replace(ORDINARY, qo_len=(1, 0, 3, 2), kv_len=(200, 30, 0, 330), fused=True)
    check(replace(few, splits=splits, has_sinks=splits == 5))
    if splits == 2:
        check(replace(few, splits=splits, counts=False))


def test_maxima_of_ordinary_heads() -> None:
    check(replace(ORDINARY, sharpness=6.0, rising=2.0, causal=False, window_left=90))


@pytest.mark.parametrize(
    ("tile_q", "tma", "head_dims"),
    [
        (64, False, wide_sm90.LATENT),
        (64, True, wide_sm90.LATENT),
        (64, False, (512, 512)),
        (16, False, wide_sm90.LATENT),
        (32, True, wide_sm90.LATENT),
    ],
)
def test_hidden_values_do_not_contaminate(
    tile_q: int, tma: bool, head_dims: tuple[int, int]
) -> None:
    """Values of keys that causality hides from some rows, in both warpgroups' columns."""
    case = Case(qo_len=(70,), kv_len=(200,), num_heads=2, head_dims=head_dims)
    case = replace(case, tile_q=tile_q, tma=tma)
    # An infinite key has infinite logits besides.
    second = np.nan if head_dims == wide_sm90.LATENT else np.inf
    spoiled = (0, 190, 3, np.nan), (0, 170, 400, second), (0, 150, 511, np.nan)
    check(replace(case, spoiled=spoiled[:2]))
    check(replace(case, spoiled=spoiled[2:], window_left=40, splits=2))
    # Seen by some rows of a tile in which nothing is hidden.
    check(replace(case, spoiled=((0, 100, 100, np.nan),), kv_len=(500,)))


# Every kind of scale, and both tiles; the rest is slow.
@pytest.mark.parametrize(
    ("key_scales", "tile_q"),
    slow_unless(
        (("", 16), ("tokens", 32), ("rows", 16), ("tokens", 64)).__contains__,
        product(("", "tokens", "rows"), (16, 32, 64)),
        is_several=True,
    ),
)
def test_fp8_keys(tile_q: int, key_scales: str) -> None:
    """Pages of any size, splits, lists, masks, steep logits, values that are not finite."""
    case = replace(BASE, kv_dtype=E4M3, key_scales=key_scales, tile_q=tile_q, page_size=5)
    lengths = {"qo_len": (2, 1, 0, 1), "kv_len": (500, 164, 5, 0), "num_heads": 13}
    check(replace(case, **lengths, splits=2, sharpness=4.0, rising=2.0, has_sinks=True))
    check(replace(case, qo_len=(30,), kv_len=(130,), num_heads=3, window_left=70))
    if not key_scales:
        check(replace(case, **lengths, tma=True, page_size=16, packed=False))
        # Rows of queries that float16 takes by a factor.
        check(replace(case, sharpness=2e-3, rope_scale=0.75))
    if tile_q != 32:
        check(replace(case, qo_len=(1, 1), kv_len=(300, 20), sparse=True))
        spoiled = replace(case, qo_len=(30,), kv_len=(130,), spoiled=((0, 120, 400, np.nan),))
        check(spoiled)
        if key_scales != "rows":
            check(replace(case, rope_scale=0.75))
        if not key_scales:
            check(replace(spoiled, tma=True, page_size=64))


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 128, 129, 300])
@TILES
def test_lengths_of_fp8_keys(kv_len: int, tile_q: int) -> None:
    """Two consumers of 16 rows have every other tile each, or the second has none."""
    check(replace(BASE, kv_len=(kv_len,), qo_len=(2,), tile_q=tile_q, kv_dtype=E4M3))
    check(replace(BASE, kv_len=(kv_len,), qo_len=(2,), tile_q=tile_q, kv_dtype=E4M3, tma=True))
    check(replace(BASE, kv_len=(kv_len,), tile_q=tile_q, kv_dtype=E4M3, packed=False, splits=2))


@pytest.mark.parametrize("heads", [5, 40], ids=["few rows", "many rows"])
def test_outputs_of_fp8(heads: int) -> None:
    """Written by the block, or merged of splits."""
    rng = np.random.default_rng(heads)
    q = rng.standard_normal((1, heads, 576)).astype(np.float16)
    pool = rng.standard_normal((20, 16, 576)).astype(np.float16)
    table, lens = np.arange(20, dtype=np.int32)[None], np.array([310], np.int32)
    for num_sms in (1, 8):
        found = []
        for workspace in (None, (16 << 20,)):
            out = np.zeros((1, heads, 512), np.dtype(ml_dtypes.float8_e4m3fn))

            def run(made: Any, out: np.ndarray = out) -> None:
                wrapper = mla.BatchMLAPagedAttentionWrapper(made)
                tables = {"page_table": table, "kv_len": lens}
                wrapper.run(query=q, kv_cache=pool, out=out, o_scale=0.02, **tables)

            if workspace is None:
                run(None)
            else:
                with gpu.plugged_in(num_sms=num_sms) as emulated:
                    run(emulated.empty(workspace, np.dtype(np.uint8)))
            found.append(out.astype(np.float32))
        np.testing.assert_allclose(*found, rtol=0.13, atol=0.01)


def test_queries_of_fp8() -> None:
    """A launch turns them into 16 bits."""
    rng = np.random.default_rng(1)
    kind = np.dtype(ml_dtypes.float8_e4m3fn)
    q = rng.standard_normal((2, 1, 16, 576)).astype(kind)
    pool = rng.standard_normal((9, 16, 576)).astype(kind)
    table, lens = np.arange(8, dtype=np.int32).reshape(2, 4), np.array([61, 20], np.int32)
    given = pool, None, 128, 512, 64, table, lens, 64
    wanted = mla.trtllm_batch_decode_with_kv_cache_mla(q, *given, bmm1_scale=0.07)
    with gpu.plugged_in(num_sms=4) as emulated:
        got = mla.trtllm_batch_decode_with_kv_cache_mla(q, *given, bmm1_scale=0.07)
        assert next(x.name for x in emulated.launches) == "copy_rows"
    got, wanted = (x.astype(np.float32) for x in (got, wanted))
    np.testing.assert_allclose(got, wanted, atol=6e-3, rtol=8e-3)


@pytest.mark.parametrize("kinds", [(0, 1), (1, 1)], ids=["one", "both"])
def test_scales_of_xqa_on_the_device(kinds: tuple[int, int]) -> None:
    """That of keys multiplies logits and values."""
    rng = np.random.default_rng(2)
    pool = rng.standard_normal((9, 16, 576)).astype(np.dtype(ml_dtypes.float8_e4m3fn))
    q = rng.standard_normal((2, 1, 5, 576)).astype(np.float16)
    table, lens = np.arange(8, dtype=np.int32).reshape(2, 4), np.array([61, 20], np.int32)
    given = q, pool, pool, table, lens
    wanted = mla.xqa_mla(*given, q_scale=0.1, kv_scale=0.6)
    with gpu.plugged_in(num_sms=4):
        of_q, of_kv = (
            np.full(1, x, np.float32) if is_array else x
            for x, is_array in zip((0.1, 0.6), kinds, strict=True)
        )
        got = mla.xqa_mla(*given, q_scale=of_q, kv_scale=of_kv)
    np.testing.assert_allclose(
        got.astype(np.float32), wanted.astype(np.float32), atol=4e-3, rtol=4e-3
    )


def test_without_lse() -> None:
    check(replace(BASE, has_lse=False))


@pytest.mark.parametrize("splits", [1, 2])
def test_bits_do_not_depend_on_the_order(splits: int) -> None:
    case = replace(BASE, qo_len=(3, 1), kv_len=(200, 260), num_heads=32, splits=splits)
    answers = [check(case, seed=seed) for seed in (0, 5, 6)]
    for other in answers[1:]:
        for first, second in zip(answers[0].o, other.o, strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("first", one_of(3, range(0, 24, 8)))
def test_random_cases(first: int) -> None:
    for seed in range(first, first + 8):
        check(random_case(seed), seed=seed % 4)


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    num_requests = int(rng.integers(1, 4))
    return Case(
        qo_len=tuple(int(x) for x in rng.choice([0, 1, 1, 1, 2, 5], num_requests)),
        kv_len=tuple(int(x) for x in rng.choice([0, 1, 9, 64, 100, 200], num_requests)),
        num_heads=int(rng.choice([1, 3, 8, 16, 20, 64, 128])),
        page_size=int(rng.choice([1, 4, 16, 64, 65])),
        causal=bool(rng.random() < 0.7),
        dtype=str(rng.choice(["float16", "bfloat16"])),
        splits=int(rng.choice([1, 1, 2, 4])),
        packed=bool(rng.random() < 0.5),
        has_sinks=bool(rng.random() < 0.3),
        has_lse=bool(rng.random() < 0.8),
        window_left=int(rng.choice([-1, -1, -1, 0, 40])),
        spare=int(rng.integers(0, 2)),
        sharpness=float(rng.choice([0.3, 1.0, 4.0])),
        rising=float(rng.choice([0.0, 0.0, 2.0])),
        tile_q=int(rng.choice([16, 32, 64])),
        seed=seed,
    )

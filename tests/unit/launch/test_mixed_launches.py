"""Which launches a plan of prompts, drafts and decodes has."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.launch.attention import kernels as launch_kernels
from cupyattn.launch.attention import merge_splits
from cupyattn.launch.attention.kernels import UNKNOWN_LENGTH, Keys
from cupyattn.schedule.batch import WORK_FIELDS, Splitting

Lengths = list[tuple[int, int]]


def planned(
    lengths: Lengths,
    heads: tuple[int, int],
    page_size: int = 16,
    head_dim: int = 128,
    **options: Any,
) -> Any:
    """(launcher, schedule) of requests of (rows, keys), as on an H200."""
    rows, keys = np.array(lengths).T
    pages = -(-keys // page_size)
    table = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(np.zeros(1 << 28, np.uint8))
    wrapper.plan(
        np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        table,
        np.arange(table[-1], dtype=np.int32),
        (keys - (pages - 1) * page_size).astype(np.int32),
        *heads,
        head_dim,
        page_size,
        causal=True,
        q_data_type="bfloat16",
        **options,
    )
    (prepared,) = wrapper._current.prepared.values()
    return prepared.launcher, prepared.schedule


def launches(lengths: Lengths, *args: Any, **options: Any) -> list[tuple[str, bool, int]]:
    """(kernel, whether its blocks are persistent, blocks) of each launch."""
    launcher, schedule = planned(lengths, *args, **options)
    kernels = {
        (x.loaded.tiles.threads, x.loaded.tiles.shared_bytes): x.kinds[0]
        for x in launcher.kernels()
    }
    found = []
    for part in schedule.parts:
        ((launch, _),) = part.launches
        kind = kernels[launch.threads, launch.shared_bytes]
        found.append((kind.name, kind.is_persistent, int(np.prod(launch.grid))))
    return found


def rows_served(schedule: Any) -> list[tuple[int, int]]:
    """The first query row and the rows of each request that has an item."""
    fields = len(WORK_FIELDS)
    items = [
        schedule.words[part.items // 4 : part.merges // 4].reshape(-1, fields)
        for part in schedule.parts
    ]
    return sorted({(int(x[0]), int(x[1])) for of in items for x in of})


CHUNK_AND_DECODES = [(2048, 8192)] + [(1, 4096)] * 63
CHUNKS_AND_FEW = [(512, 3072), (512, 512), (512, 2560), (512, 1536)] + [(1, 470)] * 6


def test_a_chunk_leaves_sms_to_many_decodes() -> None:
    (of_chunk, of_decodes) = launches(CHUNK_AND_DECODES, (32, 8))
    assert of_chunk[:2] == ("prefill_sm90", True)
    assert 88 <= of_chunk[2] <= 112
    assert of_decodes[0] == "decode_sm80"


def test_one_launch_serves_chunks_and_a_few_short_decodes() -> None:
    found = launches(CHUNKS_AND_FEW, (20, 5), 16)
    assert [name for name, *_ in found] == ["prefill_sm90"]


def test_options_have_the_choice_that_plain_logits_have() -> None:
    """Their key tiles take so many times as long."""
    found = launches(CHUNKS_AND_FEW, (20, 5), 16, pos_encoding_mode="ALIBI")
    assert [name for name, *_ in found] == ["prefill_sm90"]


@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    [([(512, 1536)] + [(1, 1400)] * 8, 256), ([(286, 786)] + [(1, 1300)] * 40, 128)],
)
def test_one_launch_serves_capped_chunks_and_decodes(lengths: Lengths, head_dim: int) -> None:
    """Measured, like these: 50 and 43 us by two launches, 32 and 31 by one."""
    found = launches(lengths, (4, 2), head_dim=head_dim, logits_soft_cap=50.0)
    assert [name for name, *_ in found] == ["prefill_sm90"]


def test_capped_rows_over_pages() -> None:
    """Measured with 256 columns: 20.4 us by prefill_sm80, and 23.4 by the large tiles."""
    launcher, schedule = planned([(6, 7600)], (8, 1), head_dim=256, logits_soft_cap=50.0)
    times = {x.name: x.time for x in launcher.candidates(schedule.requests)}
    assert times["by row class"] < times["persistent"] and schedule.candidate != "persistent"


def test_one_launch_serves_chunks_and_a_few_decodes_over_gathered_pages() -> None:
    """Measured: 41 us by two launches, whose prompts were merged besides."""
    lengths = [(256, 1280), (256, 1792), (256, 256), (256, 512)] + [(1, 1800)] * 12
    assert [name for name, *_ in launches(lengths, (4, 2), 1)] == ["prefill_sm90"]


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([(128, 384), (128, 768), (128, 384), (128, 384)] + [(1, 4400)] * 4, (32, 4)),
        ([(512, 1024)] + [(1, 1600)] * 21, (64, 4)),
    ],
)
def test_decodes_over_gathered_pages_gain_little_beside_chunks(
    lengths: Lengths, heads: tuple[int, int]
) -> None:
    """Measured: 42 and 68 us in two launches side by side, 37 and 52 in one."""
    assert [name for name, *_ in launches(lengths, heads, 1)] == ["prefill_sm90"]


def test_few_items_over_gathered_pages_leave_sms_to_decodes() -> None:
    """Measured: 103 us on 64 of the SMs, 114 in one launch."""
    lengths = [(1024, 6144)] + [(1, 4200)] * 9
    found = launches(lengths, (8, 8), 1)
    assert [name for name, *_ in found] == ["prefill_sm90", "decode_sm80"]
    assert found[0][2] == 64


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        ([(7, 17000), (7, 600), (7, 900)], 0),
        ([(400, 5000), (7, 17000), (7, 600)], 5000),
        ([(400, 5000), (300, 300), (7, 17000)], 5000),
    ],
)
def test_heads_take_turns_where_tiles_share_keys(lengths: Lengths, longest: int) -> None:
    """Elsewhere the longest items of the last heads would begin late."""
    _, schedule = planned(lengths, (96, 8), 1)
    assert schedule.longest == longest


def test_chunks_before_decodes_have_a_block_for_each_item() -> None:
    found = launches([(1024, 6144)] * 4 + [(1, 3317)] * 20, (4, 1))
    assert (found[0][0], found[0][2]) == ("prefill_sm90", 128)
    assert found[1][0] == "decode_sm80"


def test_requests_of_some_rows_share_the_launch_of_many() -> None:
    """Rows for which another kernel has tiles of 64 would be a launch more."""
    lengths = [(512, 2048), (12, 700), (12, 600)] + [(1, 4096)] * 60
    assert [name for name, *_ in launches(lengths, (32, 8))] == ["prefill_sm90", "decode_sm80"]


def test_a_given_split_keeps_each_kind_in_its_launch() -> None:
    found = launches(CHUNKS_AND_FEW, (20, 5), disable_split_kv=True)
    assert [name for name, *_ in found] == ["prefill_sm90", "decode_sm80"]


@pytest.mark.parametrize("lengths", [CHUNK_AND_DECODES, CHUNKS_AND_FEW])
def test_every_request_is_served_once(lengths: Lengths) -> None:
    _, schedule = planned(lengths, (20, 5))
    starts = np.cumsum([0, *(rows for rows, _ in lengths)])
    served = rows_served(schedule)
    expected = [(int(a), int(b - a)) for a, b in pairwise(starts)]
    assert served == expected


def test_a_plan_of_the_same_lengths_is_the_same() -> None:
    launcher, first = planned(CHUNK_AND_DECODES, (32, 8))
    again = planned(CHUNK_AND_DECODES, (32, 8))[1]
    assert launcher.kernels()
    assert (first.words == again.words).all()


@pytest.mark.parametrize(("rows", "name"), [(4, "decode_sm80"), (12, "prefill_sm90")])
def test_memory_decides_for_drafts_of_many_requests(rows: int, name: str) -> None:
    assert [x for x, *_ in launches([(rows, 8192)] * 48, (32, 8))] == [name]


@pytest.mark.parametrize(
    ("lengths", "heads", "cluster"),
    [
        ([(1, 1024)], (8, 1), 8),
        ([(2, 1024)], (8, 1), 8),
        ([(4, 2048)], (32, 8), 8),
        ([(1, 1024)] * 12, (5, 1), 8),
        ([(1, 460)] * 80, (5, 1), 1),
    ],
)
def test_few_requests_of_up_to_16_rows_have_an_sm_a_block(
    lengths: Lengths, heads: tuple[int, int], cluster: int
) -> None:
    launcher, schedule = planned(lengths, heads)
    ((launch, _),) = schedule.parts[0].launches
    assert (launch.threads, launch.cluster) == (256, cluster)
    # One wave, whose blocks merge what they have split.
    assert np.prod(launch.grid) <= launcher.kernels()[-1].loaded.num_sms
    assert schedule.parts[0].merge is None


@pytest.mark.parametrize("lengths", [[(1, 9000)] * 200])
def test_many_requests_have_two_blocks_an_sm(lengths: Lengths) -> None:
    _, schedule = planned(lengths, (5, 1))
    ((launch, _),) = schedule.parts[0].launches
    assert (launch.threads, launch.cluster) == (128, 1)


def test_requests_of_one_length_are_served_alike_wherever_they_are_planned() -> None:
    """Plans of the GPU know a likely length, those of the host all of them."""
    assert Keys.of(np.full(7, 300)) == Keys.equal(7, 300)
    launcher, _ = planned([(1, 4096)], (8, 1))
    for count, length in ((1, 700), (3, 20_000), (16, 4096), (90, 460)):
        _, schedule = planned([(1, length)] * count, (8, 1))
        ((launch, _),) = schedule.parts[0].launches
        name, shape = launcher.choose(Keys.equal(count, length), 1, Splitting())
        assert (launch.cluster, launch.threads) == (shape.cluster, launcher.tiles(name).threads)


def test_a_window_bounds_the_keys_that_decide() -> None:
    launchers = [planned([(1, 4096)], (8, 1), window_left=x)[0] for x in (1023, -1)]
    by_window, by_length = (
        launcher.choose(Keys.equal(1, length), 1, Splitting())
        for launcher, length in zip(launchers, (30_000, 1024), strict=True)
    )
    assert by_window[0] == by_length[0]
    assert asdict(by_window[1]) == asdict(by_length[1])


def test_a_plan_of_a_captured_graph_has_the_same_kernel_for_drafts() -> None:
    launcher, _ = planned([(4, 4096)], (8, 1))
    for num_requests, longest in ((1, 4096), (4, UNKNOWN_LENGTH), (16, 8192)):
        name, shape = launcher.choose(Keys.equal(num_requests, longest), 4, Splitting())
        assert (name, shape.cluster, shape.is_fused) == ("small", 1, True)
    keys = Keys.equal(1, UNKNOWN_LENGTH)
    assert launcher.choose(keys, 2, Splitting())[0] == "decode_one_an_sm"


def test_a_given_split_merges_a_request_alike_in_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows are merged by more warps, each some of the states: in another order."""
    monkeypatch.setattr(merge_splits, "load_function", lambda name, config, index: config)

    def merges(heads: tuple[int, int], **options: Any) -> set[Any]:
        schedules = [planned([(70, 3000)] * n, heads, **options)[1] for n in (1, 2, 9)]
        return {part.merge.function for made in schedules for part in made.parts if part.merge}

    assert len(merges((8, 1), fixed_split_size=8)) == 1


def kernels_of_ragged(lengths: Lengths, heads: tuple[int, int], head_dim: int = 128) -> set[str]:
    """The kernels of so many rows and ragged keys."""
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 28, np.uint8))
    qo_indptr, kv_indptr = np.pad(np.cumsum(lengths, axis=0), ((1, 0), (0, 0))).astype(np.int32).T
    wrapper.plan(qo_indptr, kv_indptr, *heads, head_dim, causal=True, q_data_type="bfloat16")
    (prepared,) = wrapper._current.prepared.values()
    return {part.tiles.name if part.tiles else "" for part in prepared.schedule.parts}


@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim"),
    [
        ([7, 21, 12], (8, 8), 128),
        ([10] * 5, (32, 32), 128),
        ([12] * 200, (32, 32), 128),
    ],
)
def test_prompts_of_few_rows_have_the_tiles_of_others(
    lengths: list[int], heads: tuple[int, int], head_dim: int
) -> None:
    """Measured, 128 of 64 tokens and 128 of 16, 16 and 12 heads: 43 and 59 us by tiles of few rows,
    34 and 24 by these."""
    prompts = [(length, length) for length in lengths]
    assert kernels_of_ragged(prompts, heads, head_dim) == {"prefill_sm90"}


@pytest.mark.parametrize(("rows", "kv_len"), [(6, 300), (16, 300)])
def test_few_rows_of_many_ragged_keys_have_tiles_of_prefill(rows: int, kv_len: int) -> None:
    """Memory decides then, and blocks of decode wait for it with fewer rows that have no work."""
    assert kernels_of_ragged([(rows, kv_len)] * 64, (32, 8)) == {"prefill_sm90"}


def test_ragged_decodes_beside_two_rows_have_tiles_of_prefill() -> None:
    assert kernels_of_ragged([(1, 500), (2, 30)], (8, 1)) == {"prefill_sm90"}


def test_rows_of_no_page_are_not_tiny_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged keys lie one after another, so nobody looks them up one by one."""
    seen = []
    real = launch_kernels.decode_load_of
    monkeypatch.setattr(
        launch_kernels, "decode_load_of", lambda *given: (seen.append(given[5]), real(*given))[1]
    )
    kernels_of_ragged([(700, 700), (700, 700), (9, 9), (9, 9)], (8, 8))
    planned([(700, 700), (9, 900)], (8, 8), page_size=1)
    planned([(700, 700), (9, 900)], (8, 8), page_size=16)
    assert seen == [False, True, False]

"""prefill_sm90 on the host: what it serves, and what stays with the portable kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from helpers import batch_calls, gpu_cases
from helpers.batch_cases import Case as BatchCase
from helpers.batch_cases import Problem
from helpers.cases import Case
from helpers.share import one_of, slow_unless
from helpers.verify_cases import FORMS

import cupyattn
from cupyattn.choose.candidates import only_form
from cupyattn.choose.tile_times import large_tiles
from cupyattn.launch.attention import kernels as launch_kernels
from cupyattn.launch.attention import merge_splits
from cupyattn.launch.tiles import prefill_sm90
from cupyattn.launch.tiles.config import TileConfig
from cupyattn.launch.tiles.forms import AS_THEY_ARE
from cupyattn.schedule.makespan import TileTimes

from . import gpu, run, test_attention, test_batch, test_planless

BASE = replace(
    gpu_cases.PLAIN, qo_len=80, kv_len=300, num_kv_heads=2, group=2, head_dim_qk=64, head_dim_vo=64
)
CAUSAL = replace(BASE, causal=True)


def check(case: Case, name: str = "prefill_sm90", **facts: object) -> run.Answer:
    answer = run.single(case, **facts)
    assert kernels(answer)[0] == name
    answer.check()
    return answer


def kernels(answer: run.Answer | run.BatchAnswer) -> list[str]:
    """All but the one that looks through a mask, which comes ahead of prefill_sm90."""
    names = [launch.name for launch in answer.launches]
    for name, behind in pairwise(names):
        assert name != "scan_mask" or behind == "prefill_sm90"
    return [name for name in names if name != "scan_mask"]


_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


# Every head dim and both dtypes; the rest is slow.
@pytest.mark.parametrize(
    ("dtype", "dims"), one_of(2, product(("float16", "bfloat16"), _DIMS), is_several=True)
)
def test_head_dims(dims: tuple[int, int], dtype: str) -> None:
    case = replace(CAUSAL, dtype=dtype, kv_dtype=dtype, head_dim_qk=dims[0], head_dim_vo=dims[1])
    check(case)


# Columns that a tile has and the head dims lack: in strided rows they are NaN, and behind the rows
# of the answer they must stay.
@pytest.mark.parametrize("gap", ["packed", "padded"])
@pytest.mark.parametrize(
    "dims",
    one_of(
        4, [(72, 72), (80, 80), (8, 16), (104, 40), (40, 104), (112, 176), (200, 8), (248, 256)]
    ),
)
def test_columns_of_other_head_dims(dims: tuple[int, int], gap: str) -> None:
    case = replace(CAUSAL, head_dim_qk=dims[0], head_dim_vo=dims[1], strides=(gap,) * 4)
    check(case)
    # Rows of Q in boxes, and one by one; of O as vectors.
    check(replace(case, group=5, has_sinks=True, kv_len=90))
    if gap == "packed":
        check(replace(case, o_dtype="float32", window_left=40))


@pytest.mark.parametrize(
    ("dims", "options"),
    one_of(
        3,
        [
            ((72, 72), {"logits_soft_cap": 5.0}),
            ((104, 104), {"logits_soft_cap": 30.0, "dtype": "bfloat16", "kv_dtype": "bfloat16"}),
            ((80, 80), {"pos_encoding_mode": "ROPE_LLAMA"}),
            ((72, 72), {"pos_encoding_mode": "ALIBI"}),
            ((160, 160), {"pos_encoding_mode": "ROPE_LLAMA"}),
            ((120, 120), {"mask_kind": "packed"}),
            ((256, 128), {"logits_soft_cap": 5.0}),
            ((224, 144), {"scale_q": "vector", "scale_k": "vector"}),
            ((136, 72), {"mask_kind": "packed", "mask_pattern": "sparse"}),
        ],
        is_several=True,
    ),
)
def test_options_of_other_head_dims(dims: tuple[int, int], options: dict[str, Any]) -> None:
    case = replace(CAUSAL, head_dim_qk=dims[0], head_dim_vo=dims[1], strides=("padded",) * 4)
    answer = run.single(replace(case, **options))
    assert "prefill_sm90" in kernels(answer)
    answer.check()


@pytest.mark.parametrize("page_size", one_of(2, [16, 3]))
@pytest.mark.parametrize("dims", one_of(3, [(72, 72), (104, 80), (160, 96), (80, 192)]))
def test_pages_of_other_head_dims(dims: tuple[int, int], page_size: int) -> None:
    for is_padded in (False, True):
        problem = Problem("bfloat16", "bfloat16", dims)
        case = replace(PAGED, problem=problem, page_size=page_size, is_padded=is_padded)
        check_batch(replace(case, window_left=150))


# Rows of a warpgroup that pass the range of the fast path, beside others that do not.
@pytest.mark.parametrize("dim", one_of(2, [64, 96, 128]))
def test_warps_wait_at_one_place_whatever_their_logits(dim: int) -> None:
    check_parted_warps(dim)


def check_parted_warps(dim: int, **facts: object) -> None:
    """In tiles without overlap of softmax and products, and with it."""
    case = replace(BASE, head_dim_qk=dim, head_dim_vo=dim, kv_len=600, logits_soft_cap=30.0)
    for name, dtype in product(("persistent", "q64_oneshot"), ("bfloat16", "float16")):
        case = replace(case, dtype=dtype, kv_dtype=dtype)
        with pytest.MonkeyPatch.context() as patch:
            force_tiles(name, patch)
            check(case, spoil={"q": [((slice(0, 8), ...), 20.0)]}, **facts)


@pytest.mark.parametrize("dims", one_of(3, [(64, 64), (96, 96), (128, 128)]))
def test_a_dominating_probability_is_not_rounded(dims: tuple[int, int]) -> None:
    check_dominating_probability(dims)


def check_dominating_probability(dims: tuple[int, int], **facts: object) -> None:
    """One key of an item's second tile outweighs the keys before it, by less than 2^8."""
    case = replace(BASE, head_dim_qk=dims[0], head_dim_vo=dims[1], num_kv_heads=1, kv_len=200)
    case = replace(case, dtype="bfloat16", kv_dtype="bfloat16")
    test_attention.check_largest_probability(case, key=100, logits=(3.7, 5.3), **facts)


# A warp repeats a tile if one of its rows asks for a larger maximum.
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_rows_do_not_depend_on_those_beside_them(dims: tuple[int, int]) -> None:
    case = replace(CAUSAL, head_dim_qk=dims[0], head_dim_vo=dims[1], kv_len=500, return_lse=True)
    keys = {"k": [((100, ..., 0), 4.0)]}
    answers = [check(case, spoil=keys), check(case, spoil={**keys, "q": [((40, ..., 0), 20.0)]})]
    for first, second in zip(*(answer.bits() for answer in answers), strict=True):
        others = np.arange(case.qo_len) != 40
        np.testing.assert_array_equal(first[others], second[others])
    lse = [answer.call.answers()[1][40] for answer in answers]
    assert (lse[1] > lse[0] + 1).all()


# Keys of two heads fit the share of L2: they come two at a time, but for the shortest tile of rows.
MANY_HEADS = dict(head_dim_qk=128, head_dim_vo=128, qo_len=250, kv_len=600, group=4, num_kv_heads=4)


@pytest.mark.parametrize("causal", one_of(2, [False, True], 1))
def test_swizzles_of_heads(causal: bool) -> None:
    check(replace(BASE, **MANY_HEADS, causal=causal))


# A block takes its next item before the last four key tiles of an item are copied, or after the
# first tile of a short item. A sparse mask hides whole tiles there.
@pytest.mark.parametrize("mask", [{}, {"mask_kind": "packed", "mask_pattern": "sparse"}])
@pytest.mark.parametrize("kv_len", [100, 1500])
def test_blocks_take_items_one_after_another(kv_len: int, mask: dict[str, str]) -> None:
    answer = check(replace(BASE, qo_len=400, kv_len=kv_len, **mask), num_sms=2)
    assert [x.grid for x in answer.launches if x.name == "prefill_sm90"] == [(2, 1, 1)]


# Whole tiles of rows come in boxes where they are whole tokens, and are gathered elsewhere: of 192
# rows 190 are used by groups of 5 and 189 by those of 7, all by those of 40.
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 40])
def test_groups(group: int) -> None:
    check(replace(CAUSAL, group=group, qo_len=400 // group + 3))
    # A last tile of which two warpgroups have rows.
    check(replace(CAUSAL, group=group, qo_len=500 // group))


# PackGQA rows of one KV head lie one after another, so boxes copy any 64 of them. Rows of other
# strides are gathered.
@pytest.mark.parametrize("gap", ["", "q", "o"])
@pytest.mark.parametrize("group", [7, 71])
def test_rows_of_one_kv_head(group: int, gap: str) -> None:
    strides = tuple("padded" if x == gap else "packed" for x in "qkvo")
    case = replace(CAUSAL, group=group, num_kv_heads=1, strides=strides)
    for qo_len in (400 // group + 3, 500 // group):
        check(replace(case, qo_len=qo_len))


@pytest.mark.parametrize("group", [7, 71])
def test_batches_of_one_kv_head(group: int) -> None:
    lengths = (300 // group, 70 // group + 1, 450 // group)
    case = replace(PAGED, group=group, num_kv_heads=1, qo_len=lengths, kv_len=(300, 80, 450))
    for kind in ("ragged", "paged"):
        answer = run.batch(replace(case, **test_batch.KINDS[kind], causal=True), num_sms=3)
        assert "prefill_sm90" in kernels(answer)
        answer.check()


def force_tiles(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let plans choose these tiles wherever they have the choice."""

    def only(*arguments: object) -> dict[str, tuple[TileConfig, TileTimes]]:
        return {name: large_tiles(*arguments)[name]}  # type: ignore[arg-type]

    for module in (launch_kernels,):
        patch.setattr(module, "large_tiles", only)


OF_128 = [name for name, *key in prefill_sm90._NAMED if key == ["ragged", 128, 128]]


# With no keys, one tile of them, and many; rows of a part of a tile, of a warpgroup and of none.
# Each of three tiles once in the ordinary suite, with another group each.
@pytest.mark.parametrize(("group", "name"), one_of(4, product((1, 4, 7), OF_128), is_several=True))
def test_other_tiles(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tiles(name, monkeypatch)
    case = replace(CAUSAL, head_dim_qk=128, head_dim_vo=128, group=group, return_lse=group == 4)
    lean = {"lean32": 128, "lean64": 128, "lean_persistent": 160}
    threads = {"q192": 512, "q128": 384, "q64": 256}
    num_threads = lean.get(name) or threads[name.partition("_")[0]]
    for qo_len, kv_len in ((300 // group + 1, 400 // group + 9), (80, 0), (70, 50)):
        answer = check(replace(case, qo_len=qo_len, kv_len=kv_len))
        assert answer.launches[0].block[0] == num_threads
    check(replace(case, causal=False, window_left=60, has_sinks=True))


@pytest.mark.parametrize(
    ("name", "dims"),
    one_of(
        2,
        [
            *(
                (name, (64, 64))
                for name in (
                    "q256_persistent",
                    "q64_persistent",
                    "q192_oneshot",
                    "q64_oneshot",
                    *("lean80", "lean64", "lean_persistent"),
                )
            ),
            *(("q128_oneshot", (96, 96)), ("lean32", (96, 96))),
            *(
                (name, (192, 128))
                for name in ("q192_persistent", "q64_persistent", "q64_oneshot", "lean64")
            ),
            *(("q64_oneshot", (256, 256)), ("lean64", (256, 256))),
            *((name, (72, 72)) for name in ("q128_oneshot", "q64_oneshot", "lean32", "lean64")),
            *(
                (name, (112, 104))
                for name in (
                    "q128_persistent",
                    "q64_persistent",
                    "q192_oneshot",
                    "lean_persistent",
                    "lean32",
                )
            ),
            *(("q64_persistent", (176, 80)), ("lean64", (176, 40)), ("lean64", (200, 208))),
            *(("q64_oneshot", (160, 136)), ("q64_oneshot", (232, 112))),
            *(
                ("q192_persistent", (72, 80)),
                ("q192_oneshot", (96, 88)),
                ("q192_oneshot", (160, 152)),
                ("q128_oneshot", (136, 160)),
            ),
            *(
                ("q128_persistent", (184, 192)),
                ("q128_oneshot", (192, 176)),
                ("q128_persistent", (256, 120)),
            ),
            ("q128_oneshot", (248, 128)),
        ],
        is_several=True,
    ),
)
def test_other_tiles_of_other_dims(
    name: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_tiles(name, monkeypatch)
    case = replace(CAUSAL, head_dim_qk=dims[0], head_dim_vo=dims[1], group=3, return_lse=True)
    check(case)
    if name in ("q128_oneshot", "q64_oneshot", "lean32", "lean80", "lean64") and (
        dims[0] <= 128 or dims[1] > 192
    ):
        for dtype in ("bfloat16", "float16"):
            check(replace(case, logits_soft_cap=5.0, dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_unless(
        (
            ("q128_oneshot", "ragged"),
            ("q64_oneshot", "paged"),
            ("q64_persistent", "paged"),
            ("q128_persistent", "ragged"),
            ("lean32", "ragged"),
            ("lean32", "paged"),
            ("lean_persistent", "ragged"),
            ("lean_persistent", "paged"),
            ("lean64", "ragged"),
        ).__contains__,
        [
            *product(
                ("q64_persistent", "q128_oneshot", "q64_oneshot", "lean32", "lean_persistent"),
                test_batch.KINDS,
            ),
            ("q128_persistent", "ragged"),
            ("q192_oneshot", "ragged"),
            ("lean64", "ragged"),
        ],
        is_several=True,
    ),
)
def test_other_tiles_of_batches(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of few rows, one of none, and one whose values are not all finite."""
    force_tiles(name, monkeypatch)
    problem = Problem("bfloat16", "bfloat16", (128, 128))
    lengths = {"qo_len": (90, 3, 0, 33), "kv_len": (300, 60, 7, 33)}
    case = replace(PAGED, problem=problem, **lengths, **test_batch.KINDS[kind])
    answer = run.batch(case, num_sms=3)
    assert kernels(answer)[0] == "prefill_sm90"
    answer.check()


@pytest.mark.parametrize(
    ("name", "dim"),
    one_of(
        3,
        [
            *((name, 128) for name in ("q128_oneshot", "q64_oneshot", "lean32", "lean_persistent")),
            *(("q64_oneshot", 64), ("lean64", 64), ("q64_oneshot", 256)),
        ],
        is_several=True,
    ),
)
def test_other_tiles_of_capped_pages(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tiles(name, monkeypatch)
    problem = Problem("bfloat16", "bfloat16", (dim, dim), is_capped=True)
    lengths = {"qo_len": (90, 3, 0, 33), "kv_len": (300, 60, 7, 33)}
    case = replace(PAGED, problem=problem, **lengths, **test_batch.KINDS["paged"])
    answer = run.batch(case, num_sms=3)
    assert kernels(answer)[0] == "prefill_sm90"
    answer.check()


def test_many_lean_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp copies where there are more blocks than two on each SM."""
    force_tiles("lean80", monkeypatch)
    answer = check(replace(CAUSAL, group=1, num_kv_heads=90, qo_len=129, kv_len=129))
    assert answer.launches[0].grid == (90, 3, 1)


# Tokens of three heads do not fill a small box of Q; one block has several items at a time.
@pytest.mark.parametrize("group", [1, 3, 4])
def test_small_boxes(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tiles("q64_persistent", monkeypatch)
    check_small_boxes(group)


def check_small_boxes(group: int = 1, **facts: object) -> None:
    problem = Problem("bfloat16", "bfloat16", (192, 128))
    lengths = {"qo_len": (90, 3, 0, 33, 64), "kv_len": (300, 60, 7, 33, 65), "group": group}
    answer = run.batch(
        replace(PAGED, problem=problem, **lengths, **test_batch.RAGGED), num_sms=1, **facts
    )
    assert kernels(answer)[0] == "prefill_sm90"
    answer.check()


# A box of Q may bring rows of the next request, whose logits decide nothing of those beside them.
@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("name", ["persistent", "q64_oneshot", "lean80", "lean64"])
def test_rows_do_not_depend_on_other_requests(
    name: str, is_capped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_tiles(name, monkeypatch)
    check_beside_other_requests(is_capped)


def check_beside_other_requests(is_capped: bool, **facts: object) -> None:
    problem = Problem("float16", "float16", (64, 64), is_capped=is_capped)
    lengths = {"qo_len": (20, 80), "kv_len": (60, 80), "group": 2}
    case = replace(PAGED, problem=problem, **lengths, **test_batch.RAGGED)
    answers = []
    for factor in (1, 100):
        with gpu.plugged_in(num_sms=3, **facts) as emulated:
            call = batch_calls.Call(case, np, emulated.empty((16 << 20,), np.dtype(np.uint8)))
            call.device_q[20:] *= factor
            call.plan()
            answers.append(call.run()[0].copy())
            assert {launch.name for launch in emulated.launches} == {"prefill_sm90"}
    np.testing.assert_array_equal(answers[0][:20].view("u2"), answers[1][:20].view("u2"))
    assert not np.array_equal(answers[0][20:], answers[1][20:])


@pytest.mark.parametrize("name", OF_128)
def test_hidden_values_of_other_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tiles(name, monkeypatch)
    case = replace(CAUSAL, head_dim_qk=128, head_dim_vo=128)
    for value in (np.nan, np.inf):
        check(case, spoil={"v": [((290, 1, 3), value), ((40, 0, 60), value)]})


@pytest.mark.parametrize(
    "changes",
    one_of(
        2,
        [
            {"qo_len": 20, "kv_len": 3000, "num_kv_heads": 1, "return_lse": True},
            {"pos_encoding_mode": "ROPE_LLAMA"},
            {"mask_kind": "packed", "mask_pattern": "tiles", "kv_len": 400},
            {"pos_encoding_mode": "ALIBI", "kv_dtype": "float8_e4m3fn"},
        ],
    ),
    ids=str,
)
def test_tiles_of_whole_tokens(changes: dict[str, object]) -> None:
    """Partial states and what launches ahead leave have as many tiles."""
    answer = run.single(replace(CAUSAL, group=7, **{"qo_len": 60, **changes}))  # type: ignore[arg-type]
    assert "prefill_sm90" in {launch.name for launch in answer.launches}
    assert ("merge_splits" in kernels(answer)) == (changes.get("kv_len") == 3000)
    answer.check()


@pytest.mark.parametrize(
    ("group", "kind"),
    slow_unless(
        ((5, "ragged"), (8, "paged")).__contains__,
        product((5, 8), test_batch.KINDS),
        is_several=True,
    ),
)
def test_batches_of_one_request(kind: str, group: int) -> None:
    """They have no work list, unless keys are split."""
    case = replace(PAGED, qo_len=(90,), kv_len=(700,), group=group, **test_batch.KINDS[kind])
    for split in ((None, True), (20 if kind == "paged" else 300, False)):
        answer = run.batch(replace(case, split=split, has_sinks=True), num_sms=3)
        assert kernels(answer) == ["prefill_sm90", "merge_splits"][: 1 + (split[0] is not None)]
        answer.check()


# A warpgroup has 64 rows of a tile's 192: of the last tile some have all, some a part, some none.
@pytest.mark.parametrize("num_rows", [1, 64, 65, 128, 129])
def test_rows_of_the_last_tile(num_rows: int) -> None:
    check(replace(CAUSAL, group=1, qo_len=192 + num_rows, return_lse=num_rows % 2 == 0))


@pytest.mark.parametrize("kv_len", [0, 1, 127, 128, 129, 256, 385])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(kv_len: int, causal: bool) -> None:
    check(replace(BASE, kv_len=kv_len, causal=causal))


@pytest.mark.parametrize("window_left", [0, 20, 127, 128, 200])
def test_windows(window_left: int) -> None:
    check(replace(BASE, window_left=window_left))
    check(replace(CAUSAL, window_left=window_left, qo_len=200, kv_len=500))


@pytest.mark.parametrize("window_right", [1, 20, 127, 128, 200])
def test_windows_to_the_right(window_right: int) -> None:
    case = replace(BASE, window_right=window_right)
    check(case)
    check(replace(case, window_left=60, qo_len=200, kv_len=500))


# Tiles of keys may start before the window does, to have what causality cuts in one of them.
@pytest.mark.parametrize("window_left", [90, 100, 110, 126, 127, 230])
def test_keys_before_a_window_are_nobodys(window_left: int) -> None:
    case = replace(CAUSAL, window_left=window_left, qo_len=200, kv_len=500)
    unseen = range(case.kv_len - case.qo_len - window_left)
    for which in "kv":
        check(case, spoil={which: [((key, slice(None), slice(None)), np.nan) for key in unseen]})


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 5.0},
        {"pos_encoding_mode": "ALIBI"},
        {"has_sinks": True},
        {"scale_q": "vector", "scale_k": "vector", "scale_v": "vector"},
        {"sm_scale": 3.0},
        {"o_dtype": "float32"},
        {"o_dtype": "float8_e4m3fn"},
        {"kv_layout": "HND"},
    ],
    ids=str,
)
def test_options(options: dict[str, object]) -> None:
    check(replace(CAUSAL, **options))  # type: ignore[arg-type]


# Of logits beside the cap: rows whose sums tell of those past the polynomial's range, and others.
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16", "kv_dtype": "float16"},
        {"logits_soft_cap": 50.0, "logit_shift": 20.0, "causal": False},
        {"logit_shift": -20.0},
        {"logit_shift": 20.0},
        # Rows near the end of the polynomial's range.
        {"logit_shift": 7.0, "qo_len": 40},
        {"logit_shift": 11.0, "qo_len": 40},
        {"logit_shift": 11.0, "kv_dtype": "float8_e4m3fn"},
        {"logits_soft_cap": 2.5, "qo_len": 40},
        # So large that rows take the maxima of their first tiles.
        {"logits_soft_cap": 100.0},
        {"logits_soft_cap": 100.0, "outliers": 8.0, "causal": False},
        {"outliers": 5.0, "causal": False},
        {"outliers": 5.0, "window_left": 150},
        {"mask_kind": "packed", "mask_pattern": "causal"},
    ],
    ids=str,
)
def test_soft_caps(changes: dict[str, object]) -> None:
    capped = replace(
        CAUSAL, logits_soft_cap=30.0, dtype="bfloat16", kv_dtype="bfloat16", kv_len=700
    )
    check(replace(capped, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("cap", "size"), [(30.0, 40.0), (100.0, 130.0)])
def test_a_key_past_the_cap(cap: float, size: float) -> None:
    check_a_large_key(cap=cap, size=size)


def check_a_large_key(*, cap: float = 30.0, size: float = 40.0, **facts: object) -> None:
    """Rows in reach see one key, of the last tile that is visited, at up to 5 times the cap."""
    case = replace(
        BASE, logits_soft_cap=cap, dtype="bfloat16", kv_dtype="bfloat16", logit_shift=0.5
    )
    run.single(replace(case, kv_len=700), spoil={"k": [(5, size)]}, **facts).check()


@pytest.mark.parametrize("few_rows", [0, 1024])
def test_splits(few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp merges a row, or where there are few a block."""
    monkeypatch.setattr(merge_splits, "_FEW_ROWS", few_rows)
    force_tiles("q192_oneshot", monkeypatch)
    answer = check(replace(BASE, kv_len=3000, group=1), num_sms=20)
    launch = answer.launches[-1]
    assert launch.name == "merge_splits" and launch.grid[0] == (192 if few_rows else 48)


@pytest.mark.parametrize("num_sms", [1, 3, 50])
def test_bits_do_not_depend_on_the_order(num_sms: int) -> None:
    bits = [
        check(replace(CAUSAL, qo_len=200), seed=seed, num_sms=num_sms).bits() for seed in (0, 5)
    ]
    for first, second in zip(*bits, strict=True):
        np.testing.assert_array_equal(first, second)


PAGED = replace(test_batch.BASE, qo_len=(70, 90), kv_len=(300, 95), causal=True)


def check_batch(case: BatchCase) -> None:
    answer = run.batch(case, num_sms=3)
    assert kernels(answer)[0] == "prefill_sm90"
    answer.check()


# 400 keys: four tiles of 112, some of which a mask of tiles hides.
@pytest.mark.parametrize("pattern", ["random", "tiles", "causal", "sparse"])
def test_masks(pattern: str) -> None:
    masked = replace(BASE, mask_kind="packed", mask_pattern=pattern, kv_len=400)
    assert check(masked).launches[0].name == "scan_mask"
    check(replace(masked, causal=True, window_left=150, qo_len=130, group=1))
    check(replace(masked, logits_soft_cap=5.0, kv_len=161))


@pytest.mark.parametrize(
    ("dim", "kv_dtype"), [(256, "bfloat16"), (64, "float8_e4m3fn"), (128, "float8_e5m2")]
)
def test_masks_of_wide_rows_and_fp8(dim: int, kv_dtype: str) -> None:
    masked = replace(BASE, mask_kind="packed", mask_pattern="tiles", kv_len=400)
    check(replace(masked, head_dim_qk=dim, head_dim_vo=dim, kv_dtype=kv_dtype))


def test_keys_hidden_by_a_mask_do_not_contaminate() -> None:
    case = replace(BASE, mask_kind="packed", mask_pattern="causal", kv_len=300)
    answer = run.single(case, spoil={"v": [((290, 1, 3), np.inf), ((40, 0, 60), np.nan)]})
    answer.check()


@pytest.mark.parametrize("tree", FORMS[::3])
def test_masks_of_rows(tree: str) -> None:
    case = replace(test_planless.BASE, qo_len=(20, 20), kv_len=(500, 90), tree=tree)
    emulated = test_planless.run(case)
    assert "prefill_sm90" in {launch.name for launch in emulated.launches}


@pytest.mark.parametrize("page_size", [0, 16])
def test_masks_of_items(page_size: int) -> None:
    wrapper = "paged" if page_size else "ragged"
    case = replace(test_batch.BASE, wrapper=wrapper, page_size=page_size, has_items=True)
    answer = run.batch(replace(case, qo_len=(200, 90), kv_len=(600, 95)), num_sms=3)
    assert kernels(answer)[0] == "prefill_sm90"
    answer.check()


# Boxes bring pages that hold whole patterns of eight rows; others are gathered.
@pytest.mark.parametrize("page_size", [1, 3, 8, 20, 48, 256])
def test_pages(page_size: int) -> None:
    check_batch(replace(PAGED, page_size=page_size))


@pytest.mark.parametrize(
    ("dims", "page_size"),
    one_of(
        2,
        [((96, 96), 16), ((128, 128), 16), ((128, 128), 1), ((192, 128), 2), ((256, 256), 4)],
        is_several=True,
    ),
)
def test_dims_over_pages(dims: tuple[int, int], page_size: int) -> None:
    problem = Problem("float16", "float16", dims)
    check_batch(replace(PAGED, problem=problem, page_size=page_size, window_left=150))


@pytest.mark.parametrize("kv_dtype", one_of(2, ["bfloat16", "float8_e4m3fn"]))
def test_masks_over_small_pages(kv_dtype: str) -> None:
    problem = Problem("bfloat16", kv_dtype, (64, 64))
    case = replace(test_batch.BASE, qo_len=(200, 90), kv_len=(600, 95), page_size=2)
    check_batch(replace(case, problem=problem, has_items=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True, "group": 3, "num_kv_heads": 5},
        {"head_dim_qk": 192, "head_dim_vo": 128, "window_left": 100, "rope_scale": 8.0},
        {"mask_kind": "packed", "mask_pattern": "tiles", "rope_theta": 5e5},
    ],
    ids=str,
)
def test_rope(changes: dict[str, object]) -> None:
    answer = run.single(replace(BASE, pos_encoding_mode="ROPE_LLAMA", **changes))  # type: ignore[arg-type]
    assert kernels(answer) == ["rotate_keys", "prefill_sm90"]
    answer.check()


# Keys of requests of few rows, and of none, are not rotated ahead.
@pytest.mark.parametrize(
    ("split", "kind"),
    one_of(3, product([(None, False), (8, False)], test_batch.KINDS), is_several=True),
)
def test_rope_of_batches(kind: str, split: tuple[int | None, bool]) -> None:
    problem = Problem("float16", "float16", (64, 64), pos_encoding_mode="ROPE_LLAMA")
    lengths = {"qo_len": (200, 3, 0, 90), "kv_len": (500, 300, 7, 95)}
    case = replace(test_batch.BASE, problem=problem, **lengths, **test_batch.KINDS[kind])  # type: ignore[arg-type]
    size = split[0] and (128 if kind == "ragged" else split[0])
    answer = run.batch(replace(case, split=(size, False)), num_sms=3)
    assert [launch.name for launch in answer.launches[:2]] == ["rotate_keys", "prefill_sm90"]
    answer.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"strides": ("unaligned",) * 4},
        {
            "mask_kind": "packed",
            "kv_dtype": "float8_e4m3fn",
            "head_dim_qk": 256,
            "head_dim_vo": 256,
        },
        {"pos_encoding_mode": "ROPE_LLAMA", "kv_dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_the_portable_kernel_serves_the_rest(changes: dict[str, object]) -> None:
    case = replace(BASE, **changes)  # type: ignore[arg-type]
    with only_form(AS_THEY_ARE):  # not keys that are widened ahead
        answer = run.single(case)
    assert "prefill_sm90" not in {launch.name for launch in answer.launches}
    answer.check()


def test_heads_that_share_their_keys() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((80, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((300, 1, 64)).astype(np.float16) for _ in "kv")
    shared = [np.broadcast_to(x, (300, 2, 64)) for x in (k, v)]
    with gpu.plugged_in() as emulated:
        got = cupyattn.single_prefill_with_kv_cache(q, *shared, causal=True)
        copied = (np.ascontiguousarray(x) for x in shared)
        wanted = cupyattn.single_prefill_with_kv_cache(q, *copied, causal=True)
    assert {launch.name for launch in emulated.launches} == {"prefill_sm90"}
    np.testing.assert_array_equal(got, wanted)


def test_rows_that_are_all_the_same_one() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 4, 64)).astype(np.float16) for _ in "qk")
    with gpu.plugged_in() as emulated:
        got = cupyattn.single_prefill_with_kv_cache(
            np.broadcast_to(q, (80, 4, 64)), *[np.broadcast_to(k[:, :2], (300, 2, 64))] * 2
        )
    assert {launch.name for launch in emulated.launches} == {"prefill_sm90"}
    np.testing.assert_allclose(got, np.broadcast_to(k[:, [0, 0, 1, 1]], got.shape), rtol=1e-3)

"""Which problems prefill_sm90 serves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from helpers.fake_gpu import MAX_SHARED

from cupyattn.choose.card import card_of
from cupyattn.choose.tile_times import times_of
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU
from cupyattn.core.dtypes import DType
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.tiles import prefill_sm90
from cupyattn.launch.tiles.config import HOPPER, Target, TileConfig

CARD = card_of(NO_GPU)


def tiles_of(problem: AttentionProblem, page_size: int) -> TileConfig | None:
    asked = problem, "persistent", Target(HOPPER, MAX_SHARED, page_size)
    return prefill_sm90.tiles(*asked) if prefill_sm90.refusal(*asked) is None else None


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("page_size", [1, 3])
def test_gathered_rows_are_served_under_all_options(dim: int, page_size: int) -> None:
    for custom_mask, prescale_logits in product((False, True), repeat=2):
        problem = AttentionProblem(
            *[dtypes.bfloat16] * 3,
            dim,
            dim,
            paged=True,
            custom_mask=custom_mask,
            prescale_logits=prescale_logits,
        )
        assert tiles_of(problem, page_size) is not None


_ALL_DIMS = range(8, 257, 8)
_OPTIONS = (
    {},
    {"soft_cap": True},
    {"pos_encoding": "ALIBI"},
    {"pos_encoding": "ROPE_LLAMA"},
    {"custom_mask": True},
    {"prescale_logits": True},
    {"custom_mask": True, "pos_encoding": "ALIBI"},
    {"soft_cap": True, "prescale_logits": True},
)


@pytest.mark.parametrize("page_size", [0, 16, 1])
@pytest.mark.parametrize("kv", [dtypes.bfloat16, dtypes.float8_e4m3fn])
def test_every_pair_of_head_dims_is_served_under_all_options(kv: DType, page_size: int) -> None:
    """But for rotated keys of fp8 or in gathered pages, and fp8 that is gathered, or masked, at
    the widest values."""
    q, is_fp8, is_paged = dtypes.bfloat16, kv.is_fp8, page_size > 0
    for qk, vo, options in product(_ALL_DIMS, _ALL_DIMS, _OPTIONS):
        problem = AttentionProblem(q, kv, q, qk, vo, paged=is_paged, **options)  # type: ignore[arg-type]
        tiles = tiles_of(problem, page_size)
        is_rotated = options.get("pos_encoding") == "ROPE_LLAMA"
        is_masked, is_gathered = "custom_mask" in options, page_size == 1
        caps_rows = {"soft_cap", "prescale_logits"} <= {*options}
        is_portable = is_rotated and (is_fp8 or is_gathered)
        if prefill_sm90.tile_dims(problem) == (256, 256):
            is_portable |= is_gathered and (is_fp8 or is_masked)
            is_portable |= is_fp8 and caps_rows
            if is_fp8 and is_masked and tiles is None:
                continue  # shared memory is full
        assert (tiles is None) == is_portable, (qk, vo, options)
        assert tiles is None or tiles.shared_bytes <= MAX_SHARED


def test_tiles_are_those_of_the_least_dims_that_hold_a_problems() -> None:
    kind = dtypes.bfloat16
    for (qk, vo), dims in {
        (16, 16): (64, 64),
        (64, 96): (96, 96),
        (112, 48): (128, 128),
        (176, 128): (192, 128),
        (128, 176): (192, 192),
        (256, 64): (256, 128),
        (208, 208): (256, 256),
    }.items():
        problem = AttentionProblem(kind, kind, kind, qk, vo)
        assert prefill_sm90.tile_dims(problem) == dims
        # A key tile of fewer columns takes less time, not in proportion to them. (Of 112 columns
        # tiles have times of their own.)
        timed = (112, 112) if dims == (128, 128) else dims
        times = times_of(CARD, problem, 0, "persistent")
        of_dims = times_of(CARD, AttentionProblem(kind, kind, kind, *timed), 0, "persistent")
        assert times and of_dims
        ratio = times.key_tile / of_dims.key_tile
        assert ratio == pytest.approx((1 + (qk + vo) / sum(timed)) / 2)


def test_times_of_pages_are_those_of_their_own_tiles() -> None:
    """Not those of ragged keys that were timed with fewer columns."""
    kind = dtypes.bfloat16
    own, wide = (
        times_of(CARD, AttentionProblem(kind, kind, kind, dim, dim, paged=True), 16, "q128_oneshot")
        for dim in (112, 128)
    )
    assert own and wide
    assert own.launch == wide.launch and own.key_tile < wide.key_tile


def test_plain_ragged_keys_have_tiles_of_their_own() -> None:
    kind = dtypes.bfloat16
    for dims, area in {
        **dict.fromkeys(((72, 72), (80, 80), (64, 72), (80, 16)), (192, 112)),
        **dict.fromkeys(((88, 88), (96, 88), (96, 96)), (192, 96)),
        **dict.fromkeys(((136, 136), (152, 128), (144, 144), (160, 160)), (192, 64)),
        (176, 176): (128, 96),
    }.items():
        problem = AttentionProblem(kind, kind, kind, *dims)
        tiles = tiles_of(problem, 0)
        assert tiles and (tiles.tile_q, tiles.tile_kv) == area
        assert times_of(CARD, problem, 0, "persistent")
        masked = tiles_of(replace(problem, custom_mask=True), 0)
        assert masked and masked.tile_q == 128

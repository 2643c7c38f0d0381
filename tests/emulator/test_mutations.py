"""Mistakes sown in a copy of the kernels (mutations*.py): the emulator must catch every one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import device_plans, gpu_cases, page_cases, quantize_cases, share_cases
from helpers.flash_cases import Case
from helpers.key_shares import Case as Shared
from helpers.logits_calls import Single
from helpers.new_keys import random_new_keys
from helpers.page_cases import STRAY, Append
from helpers.share import slow_unless

import cupyattn
from cupyattn.core import env
from cupyattn.jit import kernels_dir
from cupyattn.launch.attention import find_items

from . import (
    build,
    gpu,
    run,
    test_8bit_doors,
    test_attention,
    test_batch,
    test_block_scales,
    test_cascade,
    test_exchange,
    test_flash_attn,
    test_found_items,
    test_key_lists,
    test_key_share,
    test_key_unions,
    test_latent_blocks,
    test_listed_latent,
    test_logits,
    test_merge,
    test_output_gate,
    test_page,
    test_plan_batch,
    test_planless,
    test_prefill_sm90,
    test_prefill_sm90_8bit,
    test_prefill_sm90_fp8,
    test_quantize,
    test_read_tables,
    test_select,
    test_serving,
    test_skipped_tiles,
    test_topk,
    test_wide,
    test_wide_sm90,
    test_widened_queries,
    wide,
)
from .library import EmulatorError
from .mutation import Mutation, kernel_files
from .mutations import PORTABLE
from .mutations_of_8_bits import EIGHT_BITS
from .mutations_of_hopper import HOPPER
from .mutations_of_lists import LISTS
from .mutations_of_logits import LOGITS
from .mutations_of_select import SELECT
from .mutations_of_topk import TOPK
from .mutations_of_wide import WIDE
from .mutations_of_wide_sm90 import WIDE_SM90

MUTATIONS = (*PORTABLE, *HOPPER, *EIGHT_BITS, *LOGITS, *WIDE, *WIDE_SM90, *LISTS, *SELECT, *TOPK)

_PREFILL = replace(
    gpu_cases.PLAIN, qo_len=70, kv_len=150, num_kv_heads=2, group=2, head_dim_qk=64, head_dim_vo=64
)
_BFLOAT16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
_DECODE = replace(_PREFILL, qo_len=2, kv_len=700)
_SPLIT = {"num_kv_heads": 2, "group": 2}
_FP8 = {"kv_dtype": "float8_e4m3fn"}
_ROPE = {"pos_encoding_mode": "ROPE_LLAMA"}
_STEEP = {"sm_scale": 2.0}
_WIDE = {"head_dim_qk": 128, "head_dim_vo": 128}


def _wide(changes: dict) -> Callable:
    case = replace(wide.Case(kv_len=(300,)), **changes)
    return lambda **facts: wide.run(case, **facts).check()


def _links(**facts: Any) -> None:
    linked = {"tma": True, "num_heads": 64, "blocks": 1, "qo_len": (1,) * 6}
    lengths = {"kv_len": (70, 300, 20, 0, 10, 10)}
    for changes in (lengths, {"kv_len": (290,) * 6, "splits": 2, "cuts": (0, 1)}):
        for seed in range(3):
            _wide(linked | changes)(**facts, seed=seed)


def _lists_in_turn(**facts: Any) -> None:
    lists = {"sparse": True, "uniform": True, "num_heads": 64, "blocks": 2, "qo_len": (1,) * 5}
    for kv_len in (150, 250):
        for seed in range(3):
            _wide(lists | {"kv_len": (kv_len,) * 5})(**facts, seed=seed)


_WIDER = {"strides": ("padded",) * 4}


def _single(*changes: dict, facts: dict | None = None, base: object = _PREFILL) -> Callable:
    def catch(**more: object) -> None:
        for change in changes or ({},):
            chosen = {**(facts or {}), **more}
            run.single(replace(base, **change), **chosen).check()  # type: ignore[type-var]

    return catch


def _batch(
    qo_len: tuple[int, ...],
    kv_len: tuple[int, ...],
    page_size: int = 16,
    num_sms: int = 16,
    dim: int = 64,
    **changes: object,
) -> Callable:
    problem = replace(test_batch.BASE.problem, dims=(dim, dim))
    lengths = {"qo_len": qo_len, "kv_len": kv_len, "page_size": page_size}
    case = replace(test_batch.BASE, problem=problem, **lengths, **changes)  # type: ignore[arg-type]
    return lambda **facts: run.batch(case, num_sms=num_sms, **facts).check()


def _clusters(**facts: object) -> None:
    case = replace(
        test_batch.BASE, qo_len=(1,), kv_len=(900,), num_kv_heads=1, group=3, sm_scale=1.0
    )
    run.batch(case, num_sms=32, has_clusters=True, **facts).check()


def _verify(q_len: int, kv_len: tuple[int, ...], **facts: object) -> None:
    case = replace(
        test_batch.BASE,
        wrapper="decode",
        qo_len=(q_len,) * len(kv_len),
        kv_len=kv_len,
        tree="bool3",
    )
    run.batch(case, num_sms=1, **facts).check()


def _key_share(kind: str) -> Callable:
    case = Shared(0, kind, 3, 2, (90, 41), (3, 3))
    return lambda **facts: test_key_share.check(case, **facts)


def _items(**facts: object) -> None:
    case = replace(test_batch.BASE, qo_len=(3, 70), kv_len=(90, 150), has_items=True)
    run.batch(case, **facts).check()


def _cascade(num_sms: int = 16, **changes: object) -> Callable:
    case = replace(test_cascade.BASE, **changes)  # type: ignore[arg-type]
    return lambda **facts: test_cascade.run_case(case, num_sms=num_sms, **facts)


def _append(**facts: object) -> None:
    with gpu.plugged_in(**facts):
        append = Append(STRAY, np)
        page_cases.spoil(append)
        append.run()
        append.check()


def _merge(*changes: dict) -> Callable:
    def catch(**facts: object) -> None:
        with gpu.plugged_in(**facts) as emulated:
            for change in changes:
                test_merge.run_and_check(replace(test_merge.PLAIN, **change), emulated)

    return catch


def _merge_bad_offsets(**facts: object) -> None:
    with gpu.plugged_in(**facts) as emulated:
        test_merge.test_rows_with_bad_offsets_are_nan(emulated)


def _bad_values(**facts: object) -> None:
    for base in (_PREFILL, replace(_DECODE, qo_len=5)):
        case = replace(base, causal=True, sm_scale=0.05)
        spoil = {"v": [((case.kv_len - 2, 0, 5), np.inf), ((case.kv_len - 3, 1, 6), np.nan)]}
        run.single(case, spoil=spoil, **facts).check()


def _bad_values_of_large_tiles(**facts: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_prefill_sm90.force_tiles("persistent", patch)
        _bad_values(**facts)


def _capped_of_large_tiles(**facts: object) -> None:
    changes: tuple[dict[str, object], ...] = (
        {},
        {"logit_shift": -20.0},
        {"logit_shift": 20.0},
        {"logit_shift": 20.0, "dtype": "float16", "kv_dtype": "float16"},
        {"outliers": 5.0},
    )
    with pytest.MonkeyPatch.context() as patch:
        test_prefill_sm90.force_tiles("persistent", patch)
        _single(*({"logits_soft_cap": 30.0, "kv_len": 400, **_BFLOAT16, **x} for x in changes))(
            **facts
        )


def _lean(**facts: object) -> None:
    """Keys come by two rounds of the ring, a partial tile leaves warps without rows, and a hidden
    value is not finite."""
    with pytest.MonkeyPatch.context() as patch:
        test_prefill_sm90.force_tiles("lean32", patch)
        case = replace(_PREFILL, causal=True, qo_len=60, kv_len=400, **_WIDE, **_BFLOAT16)
        run.single(case, spoil={"v": [((390, 0, 5), np.inf)]}, num_sms=1, **facts).check()


def _skipped_tiles(**_: object) -> None:
    for name in ("dims 64", "few rows of a tile"):
        test_skipped_tiles.test_light_tiles_are_left_out(name)


def _skipping_warps(**_: object) -> None:
    """Warps of a warpgroup differ in what weighs nothing in their rows."""
    test_skipped_tiles.check_warps_that_differ()


def _small_boxes(**facts: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_prefill_sm90.force_tiles("q64_persistent", patch)
        test_prefill_sm90.check_small_boxes(**facts)


def _lean_beside(**facts: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_prefill_sm90.force_tiles("lean80", patch)
        test_prefill_sm90.check_beside_other_requests(True, **facts)


def _persistent_lean(**facts: object) -> None:
    """Several items a block, each with a store of O."""
    with pytest.MonkeyPatch.context() as patch:
        test_prefill_sm90.force_tiles("lean_persistent", patch)
        case = replace(_PREFILL, causal=True, qo_len=300, kv_len=320, **_WIDE, **_BFLOAT16)
        run.single(case, num_sms=1, **facts).check()


def _packbits(**facts: object) -> None:
    bits = np.random.default_rng(0).random(999) < 0.5
    cuts = np.array([0, 3, 100, 108, 999])
    with gpu.plugged_in(**facts):
        got = cupyattn.packbits(bits, "little")
        np.testing.assert_array_equal(got, np.packbits(bits, bitorder="little"))
        parts, _ = cupyattn.segment_packbits(bits, cuts)
        pieces = [np.packbits(bits[a:b]) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(parts, np.concatenate(pieces))


def _new_keys(**facts: object) -> None:
    for seed in range(8):
        with gpu.plugged_in(**facts):
            random_new_keys(seed).run()


def _slopes(**facts: object) -> None:
    for seed in (20, 27):  # of requests that differ
        with gpu.plugged_in(**facts):
            Case(seed, is_gpu=True).run()


def _plans(*batches: test_plan_batch.Batch) -> Callable:
    def catch(**facts: object) -> None:
        with gpu.plugged_in(**facts) as emulated:
            for batch in batches:
                test_plan_batch.check(emulated, batch)

    return catch


def _cuts(**facts: object) -> None:
    with gpu.plugged_in(**facts) as emulated:
        batches = [test_plan_batch.cut_batch(seed) for seed in range(30)]
        for batch in (*batches, test_plan_batch.MANY_CUT):
            test_plan_batch.check_cuts(emulated, batch)


def _hopper_rope(**facts: object) -> None:
    problem = replace(test_batch.BASE.problem, pos_encoding_mode="ROPE_LLAMA")
    case = replace(test_batch.BASE, problem=problem, qo_len=(60, 70), kv_len=(300, 90))
    run.batch(case, num_sms=3, **facts).check()


def _absurd_offsets(**facts: object) -> None:
    with gpu.plugged_in(**facts) as emulated:
        for seed in range(8):
            for form in ("steps", "lens"):
                test_plan_batch.test_absurd_offsets_stay_in_bounds(emulated, seed, form)


def _pad_lse(**facts: object) -> None:
    case = replace(
        test_planless.BASE,
        entry="cudnn_batch_prefill_with_kv_cache",
        form="lens",
        qo_len=(3, 0, 40),
        kv_layout="HND",
    )
    test_planless.run(case, **facts)


def _latent(**changes: object) -> Callable:
    lengths = {"qo_len": (1, 3), "kv_len": (70, 200)} | changes
    case = replace(test_wide.BASE, **lengths)  # type: ignore[arg-type]
    return lambda **facts: test_wide.emulate(case, **facts)


def _requests_of_lists(is_portable: bool) -> Callable:
    return lambda **facts: test_wide_sm90.check_lists_of_requests(16, 100, is_portable)


def _lists(**changes: Any) -> Callable[..., None]:
    def check(**facts: object) -> None:
        test_key_lists.run(replace(test_key_lists.SMALL, **changes))

    return check


def _unions(**changes: Any) -> Callable[..., None]:
    def check(**facts: object) -> None:
        test_key_unions.run(replace(test_key_unions.SMALL, **changes))

    return check


def _bad_latent_values(**facts: object) -> None:
    test_wide.check_hidden_value(np.nan, **facts)


def _hopper_plans(**facts: object) -> None:
    entry = "trtllm_batch_context_with_kv_cache"
    case = replace(test_planless.BASE, entry=entry, form="steps", qo_len=(90, 0, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_items, "prepare", lambda *_: None)
        test_planless.run(case, **facts)


def _found(**facts: object) -> None:
    test_found_items.check(test_found_items.RAGGED, test_found_items.RAGGED, "q64_oneshot", **facts)


def _found_by_offsets(**facts: object) -> None:
    many = test_found_items.MANY
    test_found_items.check(many, many, "q64_oneshot", spare=9, **facts)


def _found_two_a_lane(**facts: object) -> None:
    two = test_found_items.TWO
    test_found_items.check(two, two, "q64_oneshot", **facts)
    test_found_items.check_appends(2, (*two[:39], 9000), num_sms=160, **facts)


def _found_parts(**facts: object) -> None:
    test_found_items.check_appends(1, test_found_items.LENGTHS, **facts)
    test_found_items.check_appends(40, test_found_items.APPENDED, num_sms=64, **facts)


def _found_absurd(**facts: object) -> None:
    for seed in range(8):
        test_found_items.check_absurd(seed, "q64_oneshot", **facts)


_SPLIT_PLAN = test_plan_batch.Batch((1,) * 5, (300, 5, 0, 7000, 90))
_RAGGED_PLAN = test_plan_batch.Batch(
    (3, 0, 70, 1), (300, 7, 3000, 1), "lens", is_ragged=True, unit=100
)


def _wide_values(**facts: object) -> None:
    with gpu.plugged_in(**facts):
        test_page.write_wide_values()


def _slots(**facts: object) -> None:
    with gpu.plugged_in(**facts):
        test_page.write_stray_slots()


def _eight_bits(kind: type, seeds: Iterable[int]) -> Callable:
    def run(**facts: object) -> None:
        for seed in seeds:
            case = kind(seed).expect()
            with gpu.plugged_in(**facts):
                case.run()

    return run


def _stray_eight_bits(**facts: object) -> None:
    with gpu.plugged_in(**facts) as emulated:
        test_quantize.test_stray_offsets_write_nothing(emulated)
        test_quantize.test_stray_slots_and_positions_touch_nothing(emulated)


def _shares(**facts: object) -> None:
    for seed in range(24):
        with gpu.plugged_in(**facts):
            share_cases.Case(seed).run()


def _latent_blocks(**facts: object) -> None:
    for seed in range(6):
        test_latent_blocks.check(seed, **facts)


def _listed_keys(**facts: object) -> None:
    for seed in range(4):
        test_listed_latent.check(seed, "656 bytes", **facts)


def _listed_rows(**facts: object) -> None:
    for seed in (2, 8):
        test_listed_latent.check(seed, "584 bytes", **facts | {"is_portable": False})


def _expression(name: str, qo_len: int, kv_len: int) -> Callable:
    return lambda **facts: test_logits.check_single(Single(name, qo_len, kv_len), **facts)


def _serving(**facts: object) -> None:
    for step in test_serving.STEPS_OF_MUTATIONS:
        test_serving.compare_metadata(*step, **facts)


def _tables(check: Callable[[gpu.EmulatedGpu], None]) -> Callable[..., None]:
    def catch(**facts: object) -> None:
        with gpu.plugged_in(**facts) as emulated:
            check(emulated)

    return catch


def _gates(name: str) -> Callable:
    changes, _, _ = test_output_gate.SINGLE[name]
    case = replace(test_output_gate.SMALL, **changes)

    def catch(**facts: Any) -> None:
        test_output_gate.answer(case, "elements", strides="packed", **facts)

    return catch


CATCHERS: dict[str, Callable[..., None]] = {
    "exchange": test_exchange.check_small,
    "hopper found items": _found,
    "hopper found by offsets": _found_by_offsets,
    "hopper found two a lane": _found_two_a_lane,
    "hopper found parts": _found_parts,
    "hopper found absurd offsets": _found_absurd,
    "hopper found 8-bit": test_8bit_doors.check_one_launch,
    "halves of a window": test_exchange.check_halves,
    "late heads": test_exchange.check_heads,
    "late peer": test_exchange.check_late,
    "gates": _gates("prefill"),
    "gates of wide heads": _gates("wide heads"),
    "hopper gates of splits": _gates("prefill on Hopper that splits"),
    "prefill": _single(),
    "largest probability": lambda **facts: test_attention.check_largest_probability(
        test_attention.decode_of("bfloat16"), **facts
    ),
    "causal": _single({"causal": True}),
    # The first token's last key lies beside the end of a tile of 64 keys.
    "causal edges": _single(*({"causal": True, "qo_len": n, "kv_len": 81} for n in (18, 19, 20))),
    "window": _single({"window_left": 20}),
    "right window": _single({"window_right": 20}),
    # The last token's first key lies beside the start of a tile.
    "window edges": _single(*({"window_left": 20, "qo_len": n} for n in (1, 2, 3, 65, 66, 67))),
    "mask": _single({"mask_kind": "packed", "kv_len": 149}),
    # Some of the seeds hide tile 31, the last of a word, and show tile 32.
    "sparse mask": _single(
        *({"mask_kind": "packed", "mask_pattern": "tiles", "seed": n} for n in range(6)),
        base=replace(_PREFILL, qo_len=9, kv_len=2900, group=4),
        facts={"num_sms": 1},
    ),
    # Two buffers, no tile cut: no barrier stands between the last read of Q and the output.
    "few rows of 128": _single(
        {"head_dim_qk": 128, "head_dim_vo": 128, "qo_len": 20, "kv_len": 128}
    ),
    "rope in the block": _single(_ROPE, base=replace(_PREFILL, qo_len=20)),
    "rope ahead": _single(_ROPE),
    "fp8": _single(_FP8),
    "fp8 by shifts": _single(_FP8, facts={"arch": 800}),
    "steep": _single(_STEEP),
    "steep decode": _single(_STEEP, base=_DECODE),
    "decode": _single(base=_DECODE),
    # 8 tiles in 3 parts.
    "split decode": _single({"kv_len": 1900}, facts={"num_sms": 6}, base=_DECODE),
    "clusters": _clusters,
    "split prefill": _single({"kv_len": 700, "qo_len": 20}, facts={"num_sms": 20}),
    "sinks": _single({"has_sinks": True}),
    "no keys": _single({"kv_len": 0}),
    "bad values": _bad_values,
    "alibi": _single({"pos_encoding_mode": "ALIBI"}),
    # Logits that the polynomial would still take, were its range four times what it is.
    "soft cap": _single({"logits_soft_cap": 4.5, "kv_len": 192}),
    # Logits that grow from tile to tile by more than a float16 holds.
    "large soft cap": _single(
        {"logits_soft_cap": 500.0, "sm_scale": 3.0, "kv_len": 192},
        base=replace(_PREFILL, dtype="float16", kv_dtype="float16"),
    ),
    "soft cap of alibi": _single(
        {"logits_soft_cap": 1.0, "kv_len": 192, "pos_encoding_mode": "ALIBI"}
    ),
    "packbits": _packbits,
    "expression": _expression("transform", 5, 300),
    "expression mask": _expression("mask", 5, 300),
    "expression tokens": lambda **facts: test_logits.check_batch(
        test_logits.Batch("near keys", "ragged", *test_logits.LENGTHS["ragged"]), **facts
    ),
    "near biases": _expression("rel_logits", 18, 300),
    "near biases, batch": lambda **facts: test_logits.check_batch(
        test_logits.Batch("rel_logits", "ragged", *test_logits.LENGTHS["ragged"]), **facts
    ),
    "far biases": lambda **facts: test_logits.check_far_biases(5, **facts),
    "expression by head": _expression("mask by head", 18, 300),
    "paged prefill": _batch((40, 70), (150, 90)),
    "paged decode": _batch((1, 3), (600, 150), num_sms=1),
    "odd pages": _batch((40, 1), (150, 90), page_size=3),
    "verify": lambda **facts: _verify(3, (600, 150), **facts),
    "verify many": lambda **facts: _verify(30, (150, 401), **facts),
    "key share": _key_share("verify"),
    "key share of drafts": _key_share("tree"),
    "items": _items,
    "append": _append,
    "new keys": _new_keys,
    "slopes": _slopes,
    "padded prefill": lambda **facts: test_flash_attn.run_padded(16, {}, num_sms=4, **facts),
    "hopper padded prefill": lambda **facts: test_flash_attn.run_padded(
        16, {"window_size": (90, 0)}, num_sms=4, **facts
    ),
    "slots": _slots,
    "eight bits": _eight_bits(quantize_cases.OfArrays, range(30)),
    "eight bits in pages": _eight_bits(quantize_cases.OfPages, range(20)),
    "stray rows of eight bits": _stray_eight_bits,
    "shares": _shares,
    "listed keys": _listed_keys,
    "listed rows": _listed_rows,
    "latent blocks": _latent_blocks,
    "descales": lambda **facts: test_flash_attn.run_of_requests(3, **facts),
    "copied rows": lambda **facts: test_flash_attn.check_copies(**facts),
    "wide values": _wide_values,
    "serving": _serving,
    "tables": _tables(test_read_tables.check_random),
    "bad tables": _tables(test_read_tables.check_bad),
    "longest tables": _tables(test_read_tables.check_longest),
    "list without room": _tables(test_read_tables.check_list_without_room),
    "device plans": _plans(
        _SPLIT_PLAN,
        replace(_SPLIT_PLAN, shape=replace(_SPLIT_PLAN.shape, tile_q=64, state_cost=4.0)),
        # A whole tile that is longer than the parts of others.
        test_plan_batch.Batch((1,) * 6, (323, 142, 1081, 165, 5397, 4252)),
        _RAGGED_PLAN,
        replace(_RAGGED_PLAN, has_kv_steps=True),
        replace(_RAGGED_PLAN, shape=replace(_RAGGED_PLAN.shape, tile_q=192, state_cost=4.0)),
    ),
    "shared plans": _plans(*(device_plans.shared_batch(seed) for seed in (0, 1, 2, 3))),
    # More than a block has threads, some of them split.
    "device cuts": _cuts,
    "many requests": _plans(
        replace(_SPLIT_PLAN, qo_len=(1,) * 600, kv_len=(100_000,) + (300,) * 599)
    ),
    "absurd offsets": _absurd_offsets,
    "padded lse": _pad_lse,
    # Rows of a group that lie in two tiles; heads that do not fill a block.
    "cascade": _cascade(group=5),
    "split cascade": _cascade(64, levels=(((3,), (900,)), ((1, 2), (500, 7)))),
    "cascade of three levels": _cascade(
        levels=(((5,), (70,)), ((2, 3), (150, 0)), ((1, 1, 3), (20, 5, 40)))
    ),
    # Rows whose own keys are of very different numbers: places in no order.
    "cascade of few rows": _cascade(
        levels=(((3,), (90,)), ((1, 1, 1), (40, 200, 7))), window_left=50
    ),
    "cascade in a graph": test_cascade.run_graph,
    # The kernels of Hopper; all others above are the portable ones.
    "hopper expression by head": _expression("mask by head", 90, 300),
    "hopper linear expression": _expression("alibi", 90, 500),
    # On one SM no keys are split.
    "hopper far biases": lambda **facts: test_logits.check_far_biases(
        90, is_by_row=True, num_sms=1, **facts
    ),
    # More keys than lean blocks are looked at for.
    "hopper causal": _single({"causal": True, "qo_len": 80, "kv_len": 600, "group": 4}),
    # The last tile of a token's rows ends within a box.
    "hopper partial rows": _single({"causal": True, "qo_len": 350, "kv_len": 600, "group": 2}),
    "hopper alibi causal": _single(
        {"causal": True, "qo_len": 80, "kv_len": 300, "group": 4, "pos_encoding_mode": "ALIBI"}
    ),
    # Two heads at a time, of five of six tiles of rows.
    "hopper swizzle": _single({**test_prefill_sm90.MANY_HEADS, "causal": True}),
    # The second tile of keys of the first 96 tokens would begin 27 keys into what causality cuts.
    # Of fewer keys lean blocks would take them.
    "hopper window": _single(
        {"causal": True, "qo_len": 200, "kv_len": 1652, "group": 2, "window_left": 100}
    ),
    "hopper odd groups": _single({"group": 3, "kv_len": 300}),
    # Rows of 72 columns in wider ones of NaN, in boxes and one by one.
    "hopper odd dims": _single(
        *(
            {"head_dim_qk": 72, "head_dim_vo": 72, "group": n, "qo_len": 60, **_WIDER}
            for n in (4, 40)
        )
    ),
    "hopper odd dims of fp8 in pages": lambda **facts: run.batch(
        test_prefill_sm90_fp8.ODD_PAGES, **facts
    ).check(),
    # Rows of some warps of a warpgroup pass the range of the fast path.
    "hopper parted warps": lambda **facts: test_prefill_sm90.check_parted_warps(64, **facts),
    "hopper whole tokens": _single({"group": 7, "qo_len": 60}),
    "hopper rows of one head": _single({"group": 7, "qo_len": 60, "num_kv_heads": 1}),
    # Tokens fill neither a warpgroup's rows nor a tile's, so rows of Q are copied one by one.
    "hopper broken tokens": _single({"group": 40, "qo_len": 21, "kv_len": 300}),
    # So steep that even bfloat16 has no room for what passes the first tile's maximum.
    "hopper steep": _single({"sm_scale": 16.0, "kv_len": 700}),
    "hopper steep alibi": _single({"sm_scale": 16.0, "kv_len": 700, "pos_encoding_mode": "ALIBI"}),
    "hopper dominating probability": lambda **facts: test_prefill_sm90.check_dominating_probability(
        (128, 128), **facts
    ),
    # Rows of more than one panel; a block has several whole tiles, one after another: where splits
    # are given, no tiles of one block each are chosen.
    "hopper wide pages": _batch((40, 130), (300, 150), num_sms=1, dim=128, split=(None, True)),
    "hopper small pages": _batch((40, 70), (300, 90), page_size=3, num_sms=3),
    "hopper fp8": _single({"kv_dtype": "float8_e4m3fn", "kv_len": 500}),
    "hopper fp8 of bfloat16": _single(
        {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_len": 500}
    ),
    "rows of any size": lambda **facts: test_prefill_sm90_fp8.check_rows_of_any_size(
        15, (64, 64), "prefill_sm80", **{"is_portable": True, **facts}
    ),
    "hopper rows of any size": lambda **facts: test_prefill_sm90_fp8.check_rows_of_any_size(
        15, (64, 64), **facts
    ),
    "hopper bad values": _bad_values_of_large_tiles,
    "hopper lean": _lean,
    "hopper skipped tiles": _skipped_tiles,
    "hopper skipping warps": _skipping_warps,
    "hopper small boxes": _small_boxes,
    "hopper lean, capped": _lean_beside,
    "hopper lean, persistent": _persistent_lean,
    "hopper capped": _capped_of_large_tiles,
    "hopper capped key": test_prefill_sm90.check_a_large_key,
    "hopper alibi": _single({"pos_encoding_mode": "ALIBI", "kv_len": 500}),
    "hopper rope": _hopper_rope,
    "hopper mask": _single(
        {"mask_kind": "packed", "kv_len": 700},
        *({"mask_kind": "packed", "mask_pattern": x, "kv_len": 900} for x in ("tiles", "causal")),
    ),
    "hopper 8-bit prompt": lambda **facts: test_prefill_sm90_8bit.check(
        test_prefill_sm90_8bit.CAUSAL, **facts
    ),
    # Rows of Q are copied one by one.
    "hopper 8-bit broken tokens": lambda **facts: test_prefill_sm90_8bit.check(
        replace(test_prefill_sm90_8bit.BASE, group=72, qo_len=8, kv_len=100), **facts
    ),
    "hopper block scales of rows": test_block_scales.check,
    "hopper block scales of pages": lambda **facts: test_block_scales.check(page_size=128, **facts),
    "widened": lambda **facts: test_widened_queries.check_small("float8_e4m3fn", **facts),
    "widened on arrival": lambda **facts: test_widened_queries.check_small_arrival(
        "float8_e4m3fn", **facts
    ),
    "widened int8": lambda **facts: test_widened_queries.check_small("int8", **facts),
    "hopper 8-bit sums": test_prefill_sm90_8bit.check_sums_are_emptied,
    "hopper 8-bit rising": test_prefill_sm90_8bit.check_rising_logits,
    "hopper 8-bit far": test_prefill_sm90_8bit.check_far_logits,
    "hopper 8-bit signed scales": test_prefill_sm90_8bit.check_signed_scales,
    "hopper 8-bit new rows": test_prefill_sm90_8bit.check_new_rows,
    "hopper 8-bit boxes": test_prefill_sm90_8bit.check_boxes,
    "hopper 8-bit peak": test_prefill_sm90_8bit.check_small_probabilities,
    "hopper 8-bit rows alone": test_prefill_sm90_8bit.check_rows_alone,
    "hopper 8-bit hidden values": lambda **facts: [
        test_prefill_sm90_8bit.check_hidden_values(290, **facts),
        test_prefill_sm90_8bit.check_a_seen_nan(**facts),
    ],
    "merge pairs": _merge({}, {"strides": "unaligned", "empty": 0.9}),
    "merge long rows": _merge({"head_dim": 264}),
    "merge two states": _merge({"form": "states", "num_states": 2}),
    "merge states": _merge({"form": "states", "num_states": 9}),
    "merge natural logarithms": _merge({"base_on_e": True}),
    "merge in place": _merge({"form": "in place", "has_mask": True}),
    "merge segments": _merge({"form": "segments", "num_states": (2, 0, 5, 1, 3)}),
    "merge bad offsets": _merge_bad_offsets,
    "hopper device plans": _hopper_plans,
    "hopper wide": _wide({"page_size": 7}),
    "hopper wide apart": _wide({"packed": False, "qo_len": (2,)}),
    "hopper wide boxes": _wide({"tma": True, "page_size": 16}),
    "hopper wide hidden": _wide(
        {
            "head_dims": (512, 512),
            "qo_len": (20,),
            "num_heads": 3,
            "kv_len": (80,),
            "spoiled": ((0, 75, 3, np.nan), (0, 70, 400, np.inf)),
        }
    ),
    "hopper wide ordinary": _wide({"head_dims": (512, 512), "kv_heads": 2, "kv_len": (120,)}),
    "hopper wide ordinary steep": _wide(
        {"head_dims": (512, 512), "kv_heads": 1, "sharpness": 6.0, "rising": 2.0, "num_heads": 64}
    ),
    "hopper wide sparse": _wide({"sparse": True}),
    "hopper wide sparse steep": _wide(
        {"sparse": True, "sharpness": 6.0, "rising": 2.0, "num_heads": 64}
    ),
    "hopper wide lists in turn": _lists_in_turn,
    "hopper wide splits": _wide({"splits": 2}),
    "hopper wide cuts": _wide({"splits": 2, "cuts": (0, 1)}),
    "hopper wide links": _links,
    "hopper wide launched merge": _wide({"splits": 2, "counts": False}),
    "hopper wide lists": _wide(
        {"sparse": True, "uniform": True, "qo_len": (1, 1), "kv_len": (150, 150)}
    ),
    "hopper wide steep": _wide({"sharpness": 6.0, "rising": 2.0, "num_heads": 64}),
    "hopper few rows": _wide({"tile_q": 16}),
    "hopper few rows fp8": _wide({"tile_q": 16, "kv_dtype": "float8_e4m3fn", "kv_len": (100,)}),
    "hopper few rows scales": _wide(
        {"tile_q": 16, "kv_dtype": "float8_e4m3fn", "key_scales": "rows", "kv_len": (70,)}
    ),
    "hopper few rows token scales": _wide(
        {"tile_q": 16, "kv_dtype": "float8_e4m3fn", "key_scales": "tokens", "kv_len": (70,)}
    ),
    "hopper few rows hidden": _wide(
        {
            "tile_q": 16,
            "qo_len": (20,),
            "num_heads": 3,
            "kv_len": (80,),
            "spoiled": ((0, 75, 3, np.nan),),
        }
    ),
    "hopper few rows sparse": _wide({"tile_q": 16, "sparse": True}),
    "hopper wide fp8": _wide(
        {"kv_dtype": "float8_e4m3fn", "kv_len": (400,), "num_heads": 40, "page_size": 24}
    ),
    "hopper wide fp8 boxes": _wide(
        {
            "kv_dtype": "float8_e4m3fn",
            "kv_len": (400,),
            "num_heads": 40,
            "page_size": 64,
            "tma": True,
            "rope_scale": 2.0,
        }
    ),
    "hopper wide fp8 small queries": _wide({"kv_dtype": "float8_e4m3fn", "sharpness": 2e-3}),
    "hopper wide fp8 sparse": _wide({"kv_dtype": "float8_e4m3fn", "sparse": True}),
    "hopper wide fp8 scales": _wide({"kv_dtype": "float8_e4m3fn", "key_scales": "rows"}),
    "hopper wide fp8 token scales": _wide({"kv_dtype": "float8_e4m3fn", "key_scales": "tokens"}),
    "hopper few rows splits": _wide({"tile_q": 16, "splits": 5}),
    "hopper few rows steep": _wide(
        {"tile_q": 16, "sharpness": 20.0, "rising": 4.0, "dtype": "float16"}
    ),
    "latent": _latent(),
    # Splits of several tiles of keys.
    "long latent": _latent(split=13),
    "steep latent": _latent(split=13, sm_scale=3.0),
    "latent natural": _latent(is_natural=True),
    "latent list": _latent(way="list", qo_len=(1, 1), absent=0.3),
    "largest logits": _latent(way="flat list", qo_len=(1, 1), absent=0.3, page_size=1),
    "hopper largest logits": _latent(
        way="flat list", qo_len=(1, 1), kv_len=(200, 200), heads=40, absent=0.3, page_size=1
    ),
    "requests of lists": _requests_of_lists(False),
    "portable requests of lists": _requests_of_lists(True),
    "bad latent values": _bad_latent_values,
    "lists of blocks": _lists(),
    "unions": _unions(length=8, kept=0.3),
    "unions, window": _unions(window=70),
    "unions, 8 bits": _unions(dtype_kv="float8_e4m3fn", length=8),
    "unions, scales of heads": _unions(
        dtype="bfloat16", dtype_kv="float8_e4m3fn", length=8, scales="heads"
    ),
    "unions of rows": _unions(page_size=0, spare_rows=0, kv_lens=(300, 709)),
    "unions, repeated": _unions(length=6, repeated=0.5),
    "unions, bad values": _unions(
        length=6, kept=0.3, bad_values=0.002, num_qo_heads=10, qo_lens=(30, 28)
    ),
    "unions, skipped tiles": _unions(kv_lens=(4000, 300), length=3, kept=0.0),
    "unions of small blocks": lambda **facts: test_key_unions.check_small(),
    "unions of small blocks, cut": lambda **facts: test_key_unions.check_small(
        kv_lens=(103, 61), length=20, fill=1.0
    ),
    "unions, some alone": lambda **facts: test_key_unions.check_who_is_alone(),
    "lists, window": _lists(window=20),
    "lists of wide heads": _lists(head_dim=256, granularity=4, length=60),
    "lists, scales": _lists(scales="requests"),
    "lists of nobody": lambda **facts: test_key_lists.check_tokens_of_nobody(),
    "scores of blocks": lambda **facts: test_select.check_model("max", False, 1),
    "scores by warps": lambda **facts: test_select.check_model("max", False, 64),
    "scores of candidates": lambda **facts: test_select.check_candidates(),
    "scores of softmax": lambda **facts: test_select.check_softmax(),
    "candidates of groups": lambda **facts: test_select.check_candidates_of_groups("softmax"),
    "scores of sums": lambda **facts: test_select.check_model("relu_sum", True, 1),
    "topk of clusters": lambda **facts: test_topk.check_zeros_of_clusters(),
    "topk of warps": lambda **facts: test_topk.check_zeros_of_warps(),
}


def _catch(name: str) -> None:
    CATCHERS[name](is_portable=not name.startswith("hopper"))


def mutant(mutation: Mutation) -> Path:
    """A copy of the kernels with the mistake in, in a folder of its own."""
    files = kernel_files(kernels_dir())
    mutated, text = mutation.apply(files)
    texts = {file.path: "".join(file.lines) for file in files} | {mutated: text}
    place = build.folder() / f"mutant.{build.digest_of(x for pair in texts.items() for x in pair)}"

    def make(scratch: Path) -> None:
        for path, content in texts.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_text(content, encoding="utf-8")
        (scratch / "mutant").write_text(mutation.slug, encoding="utf-8")

    build.once(place / "mutant", make)
    return place


def _one_of_some_files() -> set[str]:
    """Names of mutations: the first in the list of those that change a kernel file, of every other
    file."""
    where = {slug: file.path for file in kernel_files(kernels_dir()) for slug in file.marked}
    first: dict[str, str] = {}
    for mutation in MUTATIONS:
        if mutation.slug in where:
            first.setdefault(where[mutation.slug], mutation.slug)
    return {first[path] for path in sorted(first)[::2]}


# Every mistake is a kernel to compile: the ordinary suite sows one in every other kernel file, and
# tries what catches these; the others are slow.
ORDINARY = _one_of_some_files()
_SOWN = [
    pytest.param(m, id=m.slug, marks=() if m.slug in ORDINARY else pytest.mark.slow)
    for m in MUTATIONS
]
_ORDINARY_CATCHERS = {m.catcher for m in MUTATIONS if m.slug in ORDINARY}


@pytest.mark.parametrize("mutation", _SOWN)
def test_a_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.KERNELS_DIR.name, str(mutant(mutation)))
    with pytest.raises((AssertionError, EmulatorError)):
        _catch(mutation.catcher)


@pytest.mark.parametrize("name", slow_unless(_ORDINARY_CATCHERS.__contains__, CATCHERS))
def test_the_kernels_as_they_are_pass(name: str) -> None:
    """What catches a mistake must pass without it."""
    _catch(name)


def test_markers_and_mutations_match() -> None:
    files = kernel_files(kernels_dir())
    markers = [slug for file in files for slug in file.marked]
    assert sorted(markers) == sorted(m.slug for m in MUTATIONS)
    assert len({m.slug for m in MUTATIONS}) == len(MUTATIONS) >= 20
    assert {m.catcher for m in MUTATIONS} == set(CATCHERS)
    assert "// mutate" not in "".join(line for file in files for line in file.lines)
    for mutation in MUTATIONS:
        mutation.apply(files)
    assert len([x for x in files if x.marked]) >= 50
    changed = [x.path for x in files for slug in x.marked if slug in ORDINARY]
    assert len(changed) == len(set(changed)) >= 25

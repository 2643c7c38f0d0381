"""Tile configurations of prefill_sm80: many query rows, on every architecture."""

from __future__ import annotations

from typing import NamedTuple

from ... import jit
from ...core.dtypes import bfloat16
from ...core.problem import AttentionProblem
from .common import (
    NONFINITE_BYTES,
    common_constants,
    is_transformed,
    rope_steps,
    row_fields,
    tile_field,
    widened_keys,
)
from .config import Field, Target, TileConfig, struct_of
from .row_classes import LARGE, ONE_AN_SM

_MASK_MAP_BYTES = 4 + 2 * 4096 // 8
_WORK_BYTES = 64
_RANGE_BYTES = (6 + 3 + 1) * 4


def refusal(problem: AttentionProblem, row_class: str, target: Target) -> str | None:
    """Why it does not serve requests of a row class; None if it does."""
    if row_class in ONE_AN_SM.values():
        return "no blocks of it are for few requests of few rows"
    return "its heads have up to 256 columns" if problem.is_wide else None


def tiles(
    problem: AttentionProblem, row_class: str, target: Target, max_warps: int = 8
) -> TileConfig:
    """The tiles for requests of a row class."""
    arch, max_shared_bytes, _, is_batch = target
    # Every tile of query rows rotates the keys again, unless a pass of its own has done it; that
    # pass takes the keys of one request, as the 16-bit rows that it leaves.
    is_rotated_ahead = row_class == LARGE and problem.aligned and problem.dtype_kv.is_float16
    rotates_keys = problem.pos_encoding == "ROPE_LLAMA" and (is_batch or not is_rotated_ahead)
    # What was tuned on sm_90, to the last register; elsewhere, and with pages, it would spill.
    is_measured = arch == "sm_90a" and not problem.paged and problem.dtype_kv.is_float16
    # 32 rows a warp halve the shared-memory traffic of K and V, but O takes 32 x dim_vo registers
    # a warp, and fp8 fragments need registers of their own: then a warp takes 16.
    wide = row_class == LARGE and problem.head_dim_vo <= 128 and not problem.dtype_kv.is_fp8
    mma_q = 2 if wide else 1
    q_in_registers = max(problem.head_dim_qk, problem.head_dim_vo) <= 64
    # Warps of 16 rows, and the long way of a capped logit, gain from loading a whole tile ahead;
    # other warps of 32 want the registers and the power that a second buffer costs.
    loads_ahead = not wide or (problem.soft_cap and is_measured)
    layouts = _layouts(
        max_shared_bytes,
        loads_ahead=loads_ahead and not (problem.dtype_kv.is_fp8 and rotates_keys),
        may_have_eight_warps=(
            not wide and row_class == LARGE and problem.head_dim_vo > 128 and max_warps >= 8
        ),
    )
    shapes = _key_shapes(problem, wide, arch, is_mixed=max_warps < 8)
    is_plain = not (is_transformed(problem) or problem.custom_mask)
    is_square = problem.head_dim_qk == problem.head_dim_vo
    has_eight_warps = layouts[0].warps == 8
    if has_eight_warps and is_measured and is_plain and is_square and not rotates_keys:
        # Warps of 16 rows are bound by what they read of shared memory. Q stays in registers where
        # fewer keys make room for it without spills.
        q_in_registers, shapes = True, [(48, 16)]
    for warps, blocks, buffers, budget in layouts:
        for tile_kv, keys_per_exp in shapes[:1] if budget < max_shared_bytes else shapes:
            result = prefill_tiles(
                problem,
                mma_q,
                warps,
                tile_kv,
                blocks,
                q_in_registers,
                keys_per_exp,
                buffers,
                rotates_keys,
            )
            if result.shared_bytes <= budget:
                return result
    raise AssertionError(f"no prefill tile fits {max_shared_bytes} bytes of shared memory")


class _Layout(NamedTuple):
    """Warps of a block, blocks an SM that registers leave room for, and buffers of keys; they are
    taken if the block has no more shared memory than the budget."""

    warps: int
    blocks: int
    buffers: int
    budget: int


def _layouts(max_shared_bytes: int, loads_ahead: bool, may_have_eight_warps: bool) -> list[_Layout]:
    """Best first: two blocks an SM, if they fit; past 128 columns one block of eight warps, which
    halves what comes from L2. A block takes 1 KB more than it asks for."""
    two_blocks = (max_shared_bytes + 1024) // 2 - 1024
    result = [_Layout(4, 2, 1, two_blocks), _Layout(4, 2, 1, max_shared_bytes)]
    if loads_ahead:
        result.insert(0, _Layout(4, 2, 2, two_blocks))
        if may_have_eight_warps:
            result.insert(0, _Layout(8, 1, 2, max_shared_bytes))
    return result


def _key_shapes(
    problem: AttentionProblem, wide: bool, arch: str, is_mixed: bool
) -> list[tuple[int, int]]:
    """(tile_kv, keys_per_exp), best first: measured on sm_90a, and without spills everywhere.

    What a logit goes through takes registers from the keys, and which schedules fit into 255 of
    them differs by architecture; tests/compile allows no spills.
    """
    dim = max(problem.head_dim_qk, problem.head_dim_vo)
    if problem.has_long_transform:
        first = (32, 16) if dim <= 128 else (16, 16)
        return [first, (16, 16)]
    is_blackwell = arch in ("sm_100a", "sm_120a")
    if not wide:
        first = (16, 16) if is_blackwell and problem.custom_mask and dim > 128 else (64, 16)
        if problem.dtype_kv.is_fp8 and dim > 128 and arch != "sm_90a":
            # Slopes beside scales of rows, which bfloat16 has over fp8, take two registers more.
            has_both = problem.biases_logits and problem.dtype_q is bfloat16
            first = (16, 16) if has_both and arch == "sm_80" else (32, 16)
        if problem.adds_near_biases and dim > 128:
            first = (32, 16)
    elif dim <= 64:
        first = (64, 16)
    elif dim > 128:
        first = (16, 16) if is_blackwell and is_transformed(problem) else (32, 16)
    elif (
        is_blackwell
        or (problem.soft_cap and (problem.paged or arch != "sm_90a"))
        or (is_mixed and (is_transformed(problem) or not problem.aligned))
        or (is_mixed and problem.pos_encoding == "ROPE_LLAMA" and arch == "sm_90a")
        or (problem.custom_mask and problem.head_dim_qk < problem.head_dim_vo)
        or (problem.biases_logits and problem.paged and arch == "sm_90a")
    ):
        first = (32, 32)
    else:
        first = (48, 16) if problem.soft_cap else (48, 48)
    return [first, (32, 16), (16, 16)]


def prefill_tiles(
    problem: AttentionProblem,
    mma_q: int,
    warps: int,
    tile_kv: int,
    min_blocks: int,
    q_in_registers: bool,
    keys_per_exp: int,
    buffers: int = 1,
    rotates_keys: bool = False,
) -> TileConfig:
    """A prefill instance: `warps` warps of 16 * mma_q query rows, tile_kv keys at a time.

    Under RoPE, keys are rotated in the kernel (`rotates_keys`) or come rotated.
    """
    dim_qk, dim_vo = problem.head_dim_qk, problem.head_dim_vo
    tile_q = 16 * mma_q * warps
    itemsize = problem.dtype_kv.itemsize
    no_pages, no_mask = Field(8, 8), Field(4)
    shared = struct_of(
        *row_fields(tile_q),
        Field(_WORK_BYTES, 16),
        Field(_RANGE_BYTES),
        Field(NONFINITE_BYTES),
        tile_field(tile_q, dim_qk, 2),
        tile_field(tile_kv, dim_qk, itemsize, buffers),
        tile_field(tile_kv, dim_vo, itemsize, buffers),
        widened_keys(problem, tile_kv, rotates_keys, 1),
        Field(2 * (2 * 8 + 4) * tile_kv, 8) if problem.paged else no_pages,
        Field(_MASK_MAP_BYTES) if problem.custom_mask else no_mask,
        rope_steps(problem),
    ).size
    config = common_constants(problem, rotates_keys) | {
        "kMmaQ": mma_q,
        "kWarps": warps,
        "kTileKV": tile_kv,
        "kMinBlocks": min_blocks,
        "kQInRegisters": q_in_registers,
        "kKeysPerExp": keys_per_exp,
        "kBuffers": buffers,
        "kSharedBytes": shared,
    }
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    return TileConfig(
        "prefill_sm80",
        jit.Config(config),
        tile_q,
        tile_kv,
        warps * 32,
        shared,
        wants_rotated_keys=is_rotated and not rotates_keys,
    )

"""Tile configurations of decode_sm80: few query rows, whose keys the warps of a block share."""

from __future__ import annotations

from ... import jit
from ...core.problem import AttentionProblem
from .common import (
    NONFINITE_BYTES,
    common_constants,
    rope_steps,
    row_fields,
    tile_field,
    widened_keys,
)
from .config import Field, Target, TileConfig, round_up, struct_of, union_of
from .row_classes import DECODE, ONE_AN_SM, VERIFY

# Tiles of 32 wider rows do not fit the registers of blocks that have an SM of their own.
_MAX_DIM_OF_VERIFY = 128
_Shape = tuple[int, int, int, int]
# Of lists, by head dims up to so many: warps, keys of a warp, stages of keys or values, and blocks
# of an SM; then of blocks that have an SM of their own, if these are sooner than whole stages.
_OF_LISTS: tuple[tuple[int, tuple[_Shape, _Shape | None]], ...] = (
    (64, ((4, 32, 3, 3), None)),
    (128, ((4, 32, 3, 2), (8, 32, 3, 1))),
    (256, ((4, 16, 3, 2), (8, 16, 3, 1))),
)


def refusal(problem: AttentionProblem, row_class: str, target: Target) -> str | None:
    """Why it does not serve requests of a row class; None if it does."""
    if reason := _refusal_of_rows(problem, row_class):
        return reason
    if row_class == VERIFY and of_verify(problem, target.max_shared_bytes) is None:
        return "the output of 32 rows of such heads does not fit the registers of a warp"
    return None


def _refusal_of_rows(problem: AttentionProblem, row_class: str) -> str | None:
    if problem.is_wide:
        return "its heads have up to 256 columns"
    if row_class not in (DECODE, VERIFY, *ONE_AN_SM.values()):
        return "it serves up to 32 rows"
    if row_class == ONE_AN_SM[VERIFY] and problem.head_dim_vo > _MAX_DIM_OF_VERIFY:
        return "32 rows of such heads do not fit the registers of blocks that have an SM each"
    return None


def tiles(problem: AttentionProblem, row_class: str, target: Target) -> TileConfig:
    """The tiles for requests of a row class that it does not refuse."""
    maximum = target.max_shared_bytes
    if (of_lists := _of_lists(problem, row_class, maximum)) is not None:
        return of_lists
    if row_class in ONE_AN_SM.values():
        return _of_few(problem, maximum, 2 if row_class == ONE_AN_SM[VERIFY] else 1)
    result = of_verify(problem, maximum) if row_class == VERIFY else of_decode(problem, maximum)
    assert result is not None, "refused"
    return result


def one_an_sm_rows(problem: AttentionProblem, row_class: str) -> str | None:
    """The class of the same rows where a batch has few blocks; None if there is none."""
    name = ONE_AN_SM.get(row_class)
    return name if name and _refusal_of_rows(problem, name) is None else None


def of_verify(problem: AttentionProblem, max_shared_bytes: int) -> TileConfig | None:
    """Twice the rows of decode, where O of 32 rows fits a warp's registers."""
    dim = max(problem.head_dim_qk, problem.head_dim_vo)
    # Q is read again for each tile: twice the bytes of 16 keys, if they have so few (measured).
    is_short = dim <= 64 or (problem.dtype_kv.is_fp8 and problem.paged)
    for keys, stages, blocks in ((32, 3, 2), (32, 2, 2), (16, 3, 2), (16, 2, 2), (16, 2, 1)):
        if dim > 128 or (keys == 32 and not is_short):
            continue
        tiles = decode_tiles(problem, 4, keys, stages, blocks, dim <= 64 and keys == 32, mma_q=2)
        if tiles.shared_bytes <= (max_shared_bytes + 1024) // blocks - 1024:
            return tiles
    return None


def of_decode(
    problem: AttentionProblem, max_shared_bytes: int, is_mixed: bool = False
) -> TileConfig:
    row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.dtype_kv.itemsize
    q_in_registers = problem.head_dim_qk <= 192
    # One request has few blocks, so one that fills an SM leaves the fewest partial states to merge:
    # three stages of 8 to 16 KB a warp. A batch has many, and two an SM fill each other's starts
    # and ends. Where shared memory is short, fewer warps do.
    shares_sm = problem.paged or is_mixed
    if row_bytes > 768:
        shapes = [(4, 16, 1)]
    elif row_bytes >= 512:
        shapes = [(4, 16, 2)] if shares_sm else [(4, 32, 1), (4, 16, 1)]
    else:
        shapes = [(4, 32, 2)] if shares_sm else [(8, 32, 1), (4, 32, 1)]
    for warps, keys, blocks in (*shapes, (4, 16, 1), (2, 16, 1), (1, 16, 1)):
        # A block takes 1 KB more than it asks for.
        budget = (max_shared_bytes + 1024) // blocks - 1024
        fitting = [
            tiles
            for stages in range(2, 5)
            if (tiles := decode_tiles(problem, warps, keys, stages, blocks, q_in_registers))
            and tiles.shared_bytes <= budget
        ]
        if fitting:
            return fitting[-1]
    raise AssertionError(f"no decode tile fits {max_shared_bytes} bytes of shared memory")


def _of_lists(
    problem: AttentionProblem, row_class: str, max_shared_bytes: int
) -> TileConfig | None:
    """Tiles of lists of 16-bit keys, which take turns with their values; None for others.

    Lists are read out of L2, where a byte comes as late from any place: what counts is that many
    are asked for by many warps. Whole stages would leave room for half of either.
    """
    is_alone = row_class == ONE_AN_SM[DECODE]
    if not problem.sparse or problem.dtype_kv.itemsize != 2 or not problem.aligned:
        return None
    if not is_alone and row_class != DECODE:
        return None
    dim = max(problem.head_dim_qk, problem.head_dim_vo)
    of_dim = next(shapes for maximum, shapes in _OF_LISTS if dim <= maximum)
    if (shape := of_dim[is_alone]) is None:
        return None
    warps, keys, stages, blocks = shape
    q_in_registers = problem.head_dim_qk <= 192
    tiles = decode_tiles(
        problem,
        warps,
        keys,
        stages,
        blocks,
        q_in_registers,
        takes_turns=True,
        runs_once=is_alone,
    )
    return tiles if tiles.shared_bytes <= (max_shared_bytes + 1024) // blocks - 1024 else None


def _of_few(problem: AttentionProblem, max_shared_bytes: int, mma_q: int) -> TileConfig:
    """Twice the warps of other blocks, and the shared memory of a whole SM for their stages."""
    row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.dtype_kv.itemsize
    q_in_registers = problem.head_dim_qk <= 192 and (mma_q == 1 or problem.head_dim_qk <= 64)
    keys = 16 if row_bytes >= 512 or mma_q == 2 else 32
    for warps in (8, 4, 2, 1):
        for stages in (4, 3, 2):
            tiles = decode_tiles(problem, warps, keys, stages, 1, q_in_registers, mma_q)
            if tiles.shared_bytes <= max_shared_bytes:
                return tiles
    raise AssertionError(f"no decode tile fits {max_shared_bytes} bytes of shared memory")


def decode_tiles(
    problem: AttentionProblem,
    warps: int,
    keys_per_warp: int,
    stages: int,
    min_blocks: int,
    q_in_registers: bool,
    mma_q: int = 1,
    takes_turns: bool = False,
    runs_once: bool = False,
) -> TileConfig:
    """A decode instance: 16 * mma_q query rows; each warp streams keys_per_warp keys a stage.

    takes_turns: a stage has keys or their values, which take turns, and stages are odd in number.
    runs_once: warps have few tiles, for which code is short.
    """
    tile_q = 16 * mma_q
    dim_qk, dim_vo = problem.head_dim_qk, problem.head_dim_vo
    itemsize = problem.dtype_kv.itemsize
    halves = (
        tile_field(keys_per_warp, dim_qk, itemsize),
        tile_field(keys_per_warp, dim_vo, itemsize),
    )
    stage = union_of(*halves) if takes_turns else struct_of(*halves)
    states = warps * tile_q * (dim_vo + 8 + 2) * 4
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    shared = struct_of(
        *row_fields(tile_q),
        Field(warps * NONFINITE_BYTES),
        _row_offsets(problem, warps, keys_per_warp, stages),
        tile_field(tile_q, dim_qk, 2),
        widened_keys(problem, keys_per_warp, is_rotated, warps),
        Field(max(warps * stages * stage.size, states), stage.align),
        rope_steps(problem),
        Field(4),
    ).size
    config = common_constants(problem, is_rotated) | {
        "kMmaQ": mma_q,
        "kWarps": warps,
        "kKeysPerWarp": keys_per_warp,
        "kStages": stages,
        "kMinBlocks": min_blocks,
        "kQInRegisters": q_in_registers,
        "kSharedBytes": shared,
        **({"kSparse": True} if problem.sparse else {}),
        **({"kTakesTurns": True} if takes_turns else {}),
        **({"kRunsOnce": True} if runs_once else {}),
    }
    tile_kv = warps * keys_per_warp
    return TileConfig("decode_sm80", jit.Config(config), tile_q, tile_kv, warps * 32, shared)


def _row_offsets(problem: AttentionProblem, warps: int, keys: int, stages: int) -> Field:
    """Where the rows of each warp's keys lie, and which keys of each stage a list has."""
    if not problem.paged:
        return Field(8, 8)
    present = round_up(stages, 2) * 4 if problem.sparse else 0
    return Field(warps * (keys * 2 * 8 + present), 8)

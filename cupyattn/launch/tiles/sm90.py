"""Tile configurations of prefill_sm90, and what it serves."""

from __future__ import annotations

from typing import NamedTuple

from ... import jit
from ...core import dtypes, env
from ...core.dtypes import DType
from ...core.problem import MASK_FORMS, AttentionProblem
from ..driver import tensor_map
from .config import Field, TileConfig, round_up, struct_of

_PATTERN_BYTES = 1024
_ITEM_BYTES = 112
# With what fills it up to a multiple of 8.
_MASK_MAP_BYTES = 8 + 2 * 2048 // 8
_ROW_BYTES = 20
_ITEMS = 2
# The rest is left to q, o, and what comes next.
_SHARE_OF_L2 = 0.6
# One in so many is enough for blocks to end together, by a simulation; they read keys anew.
_LAST_ITEMS = 5


class _Shape(NamedTuple):
    """Warpgroups that multiply, keys of a tile, stages of K and V, tiles of Q in shared memory,
    whether the warpgroups take turns, the registers of a thread that loads and of one that
    multiplies, whether they have room for the probabilities of two tiles where maxima are lazy,
    places where tiles of fp8 land, the warps that convert them (a warpgroup, or two of those that
    load), and those that gather rows of pages that no box fits (a warpgroup, or three of those that
    load). early_steps: where rows take every maximum, so that their largest probability is 1,
    unrounded, the steps of 16 keys whose probabilities are made beside the last values' products
    (measured: what ptxas makes of each differs by 5 %)."""

    consumers: int
    tile_kv: int
    stages: int = 2
    query_slots: int = 2
    takes_turns: bool = True
    registers: tuple[int, int] = (40, 232)
    overlaps: bool = True
    landings: int = 0
    converters: int = 0
    gatherers: int = 0
    early_steps: int = 2


# What there is for four warpgroups.
_OF_THREE = 32, 160
# By head dims of q, k and of v, o. Registers hold O, the logits of a tile and its probabilities;
# shared memory holds the rest.
_SHAPES = {
    (64, 64): _Shape(3, 128, registers=_OF_THREE, overlaps=False, early_steps=6),
    (96, 96): _Shape(2, 128, early_steps=4),
    (128, 128): _Shape(2, 128),
    (192, 128): _Shape(2, 128, query_slots=1, early_steps=5),
    (256, 256): _Shape(2, 80, query_slots=1, early_steps=5),
}
# A third warpgroup takes fewer keys a tile and reads each for half as many rows again. Over pages
# two are faster (measured).
_RAGGED_SHAPES = {
    **_SHAPES,
    (128, 128): _Shape(3, 80, stages=3, registers=_OF_THREE, overlaps=False),
}
# The soft cap is bound by what is done to logits, which three do beside more products than two.
_RAGGED_CAPPED_SHAPES = {
    **_RAGGED_SHAPES,
    (96, 96): _Shape(3, 96, registers=_OF_THREE, overlaps=False),
}
# Beside what is known of rows it takes registers from the keys.
_CAPPED_SHAPES = {
    (64, 64): _Shape(3, 80, registers=_OF_THREE, overlaps=False),
    (96, 96): _Shape(2, 96),
    (128, 128): _Shape(2, 96),
    (192, 128): _Shape(2, 96, query_slots=1),
    (256, 256): _Shape(2, 64, query_slots=1, overlaps=False),
}
# With a warpgroup that turns fp8 into the type of q, and room where it lands.
_CONVERTING = _Shape(2, 128, registers=(40, 216), overlaps=False, landings=1, converters=4)
_FP8_SHAPES = {
    (64, 64): _CONVERTING,
    (96, 96): _CONVERTING,
    (128, 128): _CONVERTING,
    (192, 128): _CONVERTING._replace(tile_kv=96, query_slots=1, registers=(48, 208)),
    (256, 256): _Shape(
        2, 64, query_slots=1, registers=(56, 224), overlaps=False, landings=1, converters=2
    ),
}
# There are no registers for wide rows.
_CAPPED_FP8_SHAPES = {
    dims: shape._replace(tile_kv=96) for dims, shape in _FP8_SHAPES.items() if max(dims) < 256
}


def choose(problem: AttentionProblem, max_shared_bytes: int, page_size: int) -> TileConfig | None:
    """The instance for a problem, or None: the portable kernel serves it."""
    shape = _shape(problem)
    if shape is None or not problem.aligned:
        return None
    # A box has whole panels.
    has_boxes = tensor_map.box_rows(page_size, shape.tile_kv) and (
        shape.landings or not (problem.head_dim_qk % 64 or problem.head_dim_vo % 64)
    )
    gathers = problem.paged and not has_boxes
    # Rotated keys are elsewhere, and known by their map. Warps that convert do not gather.
    if gathers and (problem.pos_encoding == "ROPE_LLAMA" or shape.converters == 2):
        return None
    # Nor do those that look after a mask.
    if gathers and problem.custom_mask and problem.head_dim_vo > 128 and not shape.landings:
        return None
    if gathers and shape.landings:
        # Rows that are gathered take longer to land: more is under way, in a place of Q if need be.
        shape = shape._replace(
            query_slots=1, registers=(48, 208), landings=shape.query_slots, gatherers=3
        )
    elif gathers and problem.head_dim_vo > 128:
        # A product of so many columns has no registers in a launch of four warpgroups.
        shape = shape._replace(gatherers=3)
    elif gathers:
        shape = shape._replace(consumers=2, registers=(40, 216), overlaps=False, gatherers=4)
        if problem.pos_encoding == "ALIBI" and problem.head_dim_qk > 128:
            # Positions take the registers of some keys.
            shape = shape._replace(tile_kv=min(shape.tile_kv, 112))
        if _takes_maxima(problem, shape):
            shape = shape._replace(early_steps=4 if problem.head_dim_vo == 128 else 2)
            # More rows are on their way, where Q has one place.
            deeper = shape._replace(stages=3, query_slots=1)
            if make(problem, deeper).shared_bytes <= max_shared_bytes:
                shape = deeper
    tiles = make(problem, shape)
    return tiles if tiles.shared_bytes <= max_shared_bytes else None


def _shape(problem: AttentionProblem) -> _Shape | None:
    if problem.dtype_kv.is_fp8:
        if problem.pos_encoding == "ROPE_LLAMA":
            return None
        takes_rows = problem.soft_cap and problem.reads_rows
        shapes = _CAPPED_FP8_SHAPES if takes_rows else _FP8_SHAPES
    else:
        # What is known of rows leaves no room for the bits of so many, nor rotations for a cap's
        # coefficients.
        has_two = problem.paged or (problem.custom_mask and problem.reads_rows)
        has_two |= problem.soft_cap and problem.pos_encoding == "ROPE_LLAMA"
        if problem.soft_cap and problem.reads_rows:
            shapes = _CAPPED_SHAPES
        elif has_two:
            shapes = _SHAPES
        else:
            shapes = _RAGGED_CAPPED_SHAPES if problem.soft_cap else _RAGGED_SHAPES
    shape = shapes.get((problem.head_dim_qk, problem.head_dim_vo))
    if shape and problem.soft_cap and problem.head_dim_qk > 192:
        shape = shape._replace(overlaps=False)
    if shape and problem.soft_cap and _lacks_registers_for_guesses(problem, shape):
        shape = shape._replace(tile_kv=min(shape.tile_kv, 112))
    if shape and problem.pos_encoding != "NONE":
        # Angles take the shared memory of some keys; they and biases take registers, which wide
        # rows and three warpgroups of 64 columns need.
        if problem.head_dim_qk > 192:
            return shape._replace(tile_kv=64)
        if problem.head_dim_qk == 64 and shape.consumers == 3:
            most = 96 if problem.prescale_logits else 112
            return shape._replace(tile_kv=min(shape.tile_kv, most))
    if shape and problem.custom_mask and shape.landings:
        # The bits of rows take shared memory from keys, and registers for those who leave them.
        return shape._replace(tile_kv=min(shape.tile_kv, 96), registers=(48, 208))
    if shape and problem.custom_mask and problem.head_dim_qk > 192:
        return shape._replace(tile_kv=64)
    return shape


def _lacks_registers_for_guesses(problem: AttentionProblem, shape: _Shape) -> bool:
    """Whether the coefficients of a cap spill beside 128 keys."""
    if shape.landings:
        return False
    if problem.dtype_q is dtypes.bfloat16:
        return problem.head_dim_qk == 64
    return problem.head_dim_qk == 128 and shape.overlaps


def summary() -> str:
    """What runs on Hopper's own units, in a line."""
    dims = ", ".join(f"{qk}" if qk == vo else f"{qk}/{vo}" for qk, vo in _SHAPES)
    return (
        f"on sm_90 by wgmma for head dims {dims}; not for RoPE over fp8 keys, or in pages of other "
        "than multiples of 8 keys, nor at head dim 256 for a custom mask over fp8 keys or such "
        "pages, which the portable kernel serves"
    )


class Sections(NamedTuple):
    """In what order the items of heads come: those of num_heads KV heads one after another, so that
    their keys and values stay in L2. ends_short: the last items of all heads, the shortest, then
    follow all others."""

    num_heads: int
    ends_short: bool

    def num_last(self, num_items: int) -> int:
        return num_items // _LAST_ITEMS if self.ends_short else 0


ONE_HEAD = Sections(1, False)


def sections(
    problem: AttentionProblem, num_kv_heads: int, kv_len: int, causal: bool, l2_bytes: int
) -> Sections:
    """Those of requests of up to `kv_len` keys."""
    row_bytes = problem.dtype_kv.itemsize * (problem.head_dim_qk + problem.head_dim_vo)
    head_bytes = kv_len * row_bytes
    fitting = int(_SHARE_OF_L2 * l2_bytes) // max(1, head_bytes)
    num_heads = max(1, min(num_kv_heads, 1 << max(0, fitting.bit_length() - 1)))
    return Sections(num_heads, causal and num_heads < num_kv_heads)


def make(problem: AttentionProblem, shape: _Shape) -> TileConfig:
    consumers, tile_kv, stages, slots, _, (load, multiply), _, places, converters, *_ = shape
    tile_q = 64 * consumers
    takes_maxima = _takes_maxima(problem, shape)
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    scales_queries = (
        problem.soft_cap and not problem.reads_rows and problem.dtype_q is dtypes.bfloat16
    )
    dims = (problem.head_dim_qk, problem.head_dim_vo) if places else ()
    landings = [Field(places * tile_kv * dim, 128) for dim in dims]
    shared = struct_of(
        *landings,
        _panels(tile_q, problem.head_dim_qk, slots),
        _panels(tile_kv, problem.head_dim_qk, stages),
        _panels(tile_kv, problem.head_dim_vo, stages),
        Field(_ROW_BYTES * (tile_q if problem.reads_rows else 1), 16),
        Field(64 if scales_queries else 32, 16),
        Field(_ITEMS * (_ITEM_BYTES + _MASK_MAP_BYTES * problem.custom_mask), 8),
        Field(stages * 16, 16),
        _row_bits(problem, tile_q, tile_kv, stages),
        Field(2 * problem.head_dim_qk if is_rotated else 4),
        Field(8 * (2 * _ITEMS + 2 * slots + 5 * stages + 4 * (places or stages)), 8),
    ).size
    config: dict[str, int | bool | DType] = {
        "DTypeQ": problem.dtype_q,
        "DTypeKV": problem.dtype_kv,
        "DTypeO": problem.dtype_o,
        "kHeadDimQK": problem.head_dim_qk,
        "kHeadDimVO": problem.head_dim_vo,
        "kConsumers": consumers,
        "kTileKV": tile_kv,
        "kStages": stages,
        "kQuerySlots": slots,
        "kLandings": places,
        "kConverters": converters,
        "kLoadRegisters": load,
        "kMultiplyRegisters": multiply,
        "kTakesTurns": shape.takes_turns,
        "kOverlaps": shape.overlaps or takes_maxima,
        "kTakesMaxima": takes_maxima,
        "kEarlySteps": min(shape.early_steps, tile_kv // 16) if takes_maxima else 0,
        "kRope": is_rotated,
        "kAlibi": problem.pos_encoding == "ALIBI",
        "kSoftCap": problem.soft_cap,
        "kRowScales": problem.prescale_logits,
        "kCustomMask": problem.custom_mask,
        "kMaskForm": MASK_FORMS.index(problem.mask_form),
        "kPaged": problem.paged,
        "kGatherers": shape.gatherers,
        "kSharedBytes": shared,
    }
    threads = 128 * (1 + consumers + converters // 4 + shape.gatherers // 4)
    return TileConfig(
        "prefill_sm90", jit.Config(config), tile_q, tile_kv, threads, shared, is_rotated
    )


def _takes_maxima(problem: AttentionProblem, shape: _Shape) -> bool:
    """A cap's and ALiBi's guesses look at no maximum, and the error of fp8 is that of its keys and
    values."""
    if problem.soft_cap or problem.pos_encoding == "ALIBI" or shape.landings:
        return False
    return not env.LAZY_MAXIMA.flag()


def _row_bits(problem: AttentionProblem, tile_q: int, tile_kv: int, stages: int) -> Field:
    """Of a mask: a bit a row and key of each stage, and a tile and a barrier a stage."""
    if not problem.custom_mask:
        return Field(4)
    words = -(-tile_kv // 32)
    return struct_of(Field(stages * 4 * words * tile_q), Field(8 * stages), Field(8 * stages, 8))


def _panels(rows: int, head_dim: int, count: int) -> Field:
    """`count` tiles (PanelTile) of 16-bit elements."""
    return Field(count * rows * 2 * round_up(head_dim, 64), _PATTERN_BYTES)

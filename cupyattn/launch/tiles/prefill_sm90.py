"""Tile configurations of prefill_sm90, and what it serves."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ... import jit
from ...core import dtypes
from ...core.problem import AttentionProblem
from ..driver import tensor_map
from .common import panels, problem_constants
from .config import (
    Field,
    Target,
    TileConfig,
    refusal_by_room,
    refusal_of_hopper,
    round_up,
    struct_of,
)
from .row_classes import LARGE, LARGE_TILES, PERSISTENT

# kernels/cupyattn/params/key_unions.cuh: SmallUnionTile.
_SMALL_UNION_BYTES = 256
_ITEM_BYTES = 112
# With what fills it up to a multiple of 8.
_MASK_MAP_BYTES = 8 + 2 * 2048 // 8
_ROW_BYTES = 20
_BYTES_OF_SCALED_ROW = 8
_ITEMS = 2
# The other tiles are slower under a cap than one of these wherever they were timed.
_CAPPED_TILES = ("q128_oneshot", "q64_oneshot", "lean_persistent", "lean80", "lean32", "lean64")
# Blocks for short items multiply more slowly than others, and win by what they do besides.
MAX_KEYS_OF_SHORT_ITEMS = 1024


class _Shape(NamedTuple):
    """One row of the table of tiles.

    consumers: warpgroups that multiply, each for 64 rows of Q. stages: of K and V. query_slots:
    tiles of Q in shared memory. registers: of a thread of the producer's warpgroup and of a
    consumer. overlaps: whether registers hold the probabilities of two tiles, so that softmax runs
    beside the same warpgroup's products. fp8_stages: tiles of fp8 in shared memory. converters:
    warps that convert them, a warpgroup of their own or two of the producer's. gatherers: warps
    that copy rows of pages that no TMA box fits, a warpgroup of their own or three of the
    producer's. min_blocks: that run on an SM at a time. persistent: blocks take items until none is
    left; else each has one. lean: a block is a consumer alone, which copies its own keys, or
    beside a warp that copies if it is persistent; each of its stages has K or V. items: that a
    persistent block holds. box_rows: of Q and of ragged keys that one copy brings, so that items
    read no more than they have; 0: the rows of a warpgroup, the keys of a tile. skips: whether
    tiles of keys that weigh next to nothing are left out. follows: of 8 bits, whether an item's
    first product runs beside the last one of the item before, as registers allow. cuts: of unions,
    whether tiles say from where on their keys count, as windows and keys in no pages want.
    """

    consumers: int
    tile_kv: int
    stages: int = 2
    query_slots: int = 2
    registers: tuple[int, int] = (40, 232)
    overlaps: bool = True
    fp8_stages: int = 0
    converters: int = 0
    gatherers: int = 0
    min_blocks: int = 1
    persistent: bool = True
    lean: bool = False
    items: int = _ITEMS
    box_rows: int = 0
    skips: bool = False
    follows: bool = False
    cuts: bool = False
    small_unions: bool = False


_THREE = _Shape(3, 128, registers=(32, 160), overlaps=False)
_TWO = _Shape(2, 128)
# Keys are what such blocks wait for.
_OF_UNIONS = _TWO._replace(stages=3, query_slots=1)
# Rows of small blocks are gathered by the warps that copy.
_OF_SMALL_UNIONS = _OF_UNIONS._replace(tile_kv=96, gatherers=3, small_unions=True)
# Three panels of K and V, four of K and two of V, and four of each.
_TALL = _Shape(2, 96, query_slots=1)
_DEEP = _Shape(2, 96, query_slots=1)
_WIDE = _Shape(2, 80, query_slots=1)
_WIDE_OF_SMALL_UNIONS = _Shape(2, 64, query_slots=1, gatherers=3, small_unions=True)
_GATHERED = _Shape(2, 128, registers=(40, 216), overlaps=False, gatherers=4)
_FP8 = _Shape(2, 128, registers=(40, 216), overlaps=False, fp8_stages=1, converters=4)
# Gathered rows take longer to land: more of them are under way, in a slot of Q if need be.
_FP8_GATHERED = _FP8._replace(query_slots=1, registers=(48, 208), fp8_stages=2, gatherers=3)

# Queries of 8 bits, which registers keep. fp8_stages: of V, which converters transpose.
_8BIT = _Shape(2, 160, stages=3, query_slots=1, fp8_stages=4, converters=2)
# Where registers have room besides, items follow each other.
_8BIT_FOLLOWS = _8BIT._replace(follows=True)

# By the kind of keys and the head dims of q, k and of v, o; ragged keys that are not there have the
# tiles of pages. Registers hold O, the logits of a tile
# and its probabilities; shared memory holds the rest. In a third warpgroup's kernels a tile has
# fewer keys, and each key is read for half as many rows again: that is faster for ragged keys and
# slower for pages (measured). A soft cap is bound by work on logits, which three warpgroups do
# beside more products than two.
_TILES = {
    ("ragged", 128, 128): _THREE._replace(tile_kv=80, stages=3),
    ("ragged capped", 96, 96): _THREE._replace(tile_kv=96),
    ("ragged capped", 128, 128): _THREE._replace(tile_kv=80, stages=3),
    ("paged", 64, 64): _THREE,
    ("paged", 96, 96): _TWO,
    ("paged", 128, 128): _TWO,
    ("paged", 192, 128): _TWO._replace(query_slots=1),
    ("paged", 192, 192): _TALL,
    ("paged", 256, 128): _DEEP,
    ("paged", 256, 256): _WIDE,
    ("gathered", 64, 64): _GATHERED,
    ("gathered", 96, 96): _GATHERED,
    ("gathered", 128, 128): _GATHERED,
    ("gathered", 192, 128): _GATHERED._replace(query_slots=1),
    ("gathered", 192, 192): _GATHERED._replace(tile_kv=96, query_slots=1),
    ("gathered", 256, 128): _GATHERED._replace(tile_kv=96, query_slots=1),
    # A product of so many columns has no registers in a launch of four warpgroups.
    ("gathered", 256, 256): _WIDE._replace(gatherers=3),
    ("fp8", 64, 64): _FP8,
    ("fp8", 96, 96): _FP8,
    ("fp8", 128, 128): _FP8,
    ("fp8", 192, 128): _FP8._replace(tile_kv=96, query_slots=1, registers=(48, 208)),
    ("fp8", 192, 192): _FP8._replace(tile_kv=64, query_slots=1, registers=(48, 208)),
    ("fp8", 256, 128): _FP8._replace(tile_kv=64, query_slots=1, registers=(48, 208)),
    ("fp8", 256, 256): _FP8._replace(tile_kv=64, query_slots=1, registers=(56, 224), converters=2),
    ("fp8 gathered", 64, 64): _FP8_GATHERED,
    ("fp8 gathered", 96, 96): _FP8_GATHERED,
    ("fp8 gathered", 128, 128): _FP8_GATHERED,
    ("fp8 gathered", 192, 128): _FP8_GATHERED._replace(tile_kv=96, fp8_stages=1),
    ("fp8 gathered", 192, 192): _FP8_GATHERED._replace(tile_kv=64),
    ("fp8 gathered", 256, 128): _FP8_GATHERED._replace(tile_kv=64),
    ("8 bits", 64, 64): _8BIT_FOLLOWS._replace(tile_kv=192, stages=2),
    ("8 bits", 96, 96): _8BIT_FOLLOWS,
    ("8 bits", 128, 128): _8BIT,
    ("8 bits", 192, 128): _8BIT_FOLLOWS._replace(tile_kv=128, stages=2),
}

# Tiles that leave out keys, by the same: those of plain attention, or as many keys as registers
# allow.
_SKIPPING_TILES = {
    ("ragged", 128, 128): _THREE._replace(tile_kv=64, stages=3, skips=True),
    ("paged", 64, 64): _THREE._replace(tile_kv=112, skips=True),
    ("paged", 96, 96): _TWO._replace(skips=True),
    ("paged", 128, 128): _TWO._replace(tile_kv=112, skips=True),
    ("paged", 192, 128): _TWO._replace(query_slots=1, skips=True),
    ("paged", 256, 128): _DEEP._replace(skips=True),
}

# The head dims of the tables, the least first.
_DIMS = tuple((qk, vo) for kind, qk, vo in _TILES if kind == "paged")

# With more keys registers spill at 80 columns.
_SLIM = _THREE._replace(tile_kv=112)
_PLAIN_96 = _THREE._replace(tile_kv=96)
_PLAIN_160 = _THREE._replace(tile_kv=64, stages=3, query_slots=1)
# Tiles of plain attention over ragged keys that differ from those above (measured), by the larger
# head dim: up to the second number and beyond the first. Rows of heads of an odd multiple of 8
# columns begin off 32 bytes, and TMA copies fewer bytes of them a cycle: 192 rows take what it
# brings where 128 would wait.
_PLAIN = {(64, 80): _SLIM, (80, 96): _PLAIN_96, (128, 160): _PLAIN_160}

# Four warpgroups read the keys of a short request once for 256 rows. More keys would spill.
_FOUR = _Shape(4, 48, 6, registers=(32, 112), overlaps=False)
_Q64 = _Shape(1, 64, query_slots=1, registers=(40, 216), min_blocks=2, persistent=False)
_Q64_PERSISTENT = _Q64._replace(query_slots=2, persistent=True)
_LEAN32 = _Shape(1, 32, 4, 1, (24, 24), overlaps=False, min_blocks=4, persistent=False, lean=True)
_LEAN64 = _LEAN32._replace(tile_kv=64, stages=3, min_blocks=3)
_LEAN_PERSISTENT = _LEAN32._replace(stages=5, query_slots=2, min_blocks=3, persistent=True)
# Registers are too few for overlap, and for two blocks an SM.
_Q64_OF_256 = _Q64._replace(registers=(96, 248), overlaps=False, min_blocks=1)


def _oneshot(shape: _Shape) -> _Shape:
    """Blocks of one item each, for work lists of few waves."""
    return shape._replace(persistent=False)


# Alternative tiles of the problems that most prompts are, by the kind of keys and the head dims. A
# plan picks one a launch, by name (_name). Persistent ones are for items that are many and short.
_ALTERNATIVES: dict[tuple[str, int, int], tuple[_Shape, ...]] = {
    ("ragged", 64, 64): (
        _FOUR,
        _Q64_PERSISTENT._replace(tile_kv=128),
        _oneshot(_THREE),
        _Q64._replace(tile_kv=128),
        _LEAN_PERSISTENT._replace(tile_kv=80),
        _LEAN32._replace(tile_kv=80),
        _LEAN32._replace(tile_kv=64),
    ),
    ("ragged", 80, 80): (
        _PLAIN_96,
        _oneshot(_SLIM),
        _oneshot(_TWO._replace(query_slots=1)),
        _Q64,
        _LEAN32,
        _LEAN64,
    ),
    ("ragged", 96, 96): (
        _oneshot(_PLAIN_96),
        _oneshot(_TWO._replace(query_slots=1)),
        _Q64,
        _LEAN32,
        _LEAN64,
    ),
    ("ragged", 128, 128): (
        _TWO,
        _Q64_PERSISTENT,
        _oneshot(_THREE._replace(tile_kv=80, stages=3)),
        _oneshot(_TWO),
        _Q64._replace(query_slots=2),
        _LEAN_PERSISTENT,
        _LEAN32,
        _LEAN64,
    ),
    ("ragged", 160, 160): (_oneshot(_PLAIN_160), _oneshot(_TALL), _Q64._replace(tile_kv=48)),
    ("ragged", 192, 128): (
        _PLAIN_160,
        _Q64_PERSISTENT._replace(query_slots=1, items=3, box_rows=16),
        _Q64,
        _LEAN64._replace(stages=2),
    ),
    ("ragged", 192, 192): (
        _TALL._replace(tile_kv=64, stages=3),
        _oneshot(_TALL),
        _Q64._replace(tile_kv=48),
    ),
    ("ragged", 256, 128): (
        _DEEP._replace(tile_kv=80),
        _oneshot(_DEEP),
        _Q64._replace(tile_kv=48),
    ),
    ("ragged", 256, 256): (_Q64_OF_256, _LEAN32._replace(tile_kv=64, stages=2, min_blocks=2)),
    ("paged", 64, 64): (
        _oneshot(_THREE),
        _Q64._replace(tile_kv=128),
        _LEAN32._replace(tile_kv=64),
    ),
    ("paged", 128, 128): (
        _Q64_PERSISTENT,
        _oneshot(_TWO),
        _Q64,
        _LEAN_PERSISTENT,
        _LEAN32,
    ),
    ("paged", 256, 256): (_Q64_OF_256,),
}


def _name(shape: _Shape) -> str:
    """What a tile is: q<its rows of Q>_<persistent blocks, or of one item each>; lean blocks of one
    item are lean<keys of a tile>."""
    if shape.lean:
        return "lean_persistent" if shape.persistent else f"lean{shape.tile_kv}"
    return f"q{64 * shape.consumers}_{'persistent' if shape.persistent else 'oneshot'}"


_NAMED = {(_name(x), *key): x for key, shapes in _ALTERNATIVES.items() for x in shapes}


class Tile(NamedTuple):
    """A tile that serves a problem.

    name  one of row_classes.LARGE_TILES
    keys  how they come: "ragged", "paged", "gathered", "fp8" or "fp8 gathered"
    dims  the head dims of q, k and of v, o for which it is made
    """

    name: str
    keys: str
    dims: tuple[int, int]
    shape: _Shape

    @property
    def num_rows(self) -> int:
        """Its rows of Q."""
        return 64 * self.shape.consumers

    @property
    def num_keys(self) -> int:
        return self.shape.tile_kv

    @property
    def area(self) -> int:
        return self.num_rows * self.num_keys


def refusal(problem: AttentionProblem, row_class: str, target: Target) -> str | None:
    """Why a tile, LARGE or one of LARGE_TILES, does not serve a problem; None if it does."""
    if row_class not in (LARGE, *LARGE_TILES):
        return "its tiles are for more rows"
    if problem.is_wide:
        return "its heads have up to 256 columns"
    if (reason := refusal_of_hopper(target)) is not None:
        return reason
    tile = find(problem, target.page_size, row_class)
    return tile if isinstance(tile, str) else refusal_by_room(make(problem, tile.shape), target)


def tiles(problem: AttentionProblem, row_class: str, target: Target) -> TileConfig:
    """The tile of this name, which it does not refuse."""
    tile = find(problem, target.page_size, row_class)
    assert not isinstance(tile, str), tile
    return make(problem, tile.shape)


def tiles_of_unions(problem: AttentionProblem, has_cuts: bool) -> TileConfig:
    """The tile of unions of lists that serves a problem, which it does not refuse."""
    return make(problem, _OF_UNIONS._replace(cuts=has_cuts))


def tiles_of_small_unions(problem: AttentionProblem, target: Target) -> TileConfig | None:
    """The tile of unions of lists of small blocks that serves a problem; None if none does."""
    if refusal_of_hopper(target) is not None or _refusal_of_unions(problem) is not None:
        return None
    dims = tile_dims(problem)
    if max(dims) > 128 and dims != (256, 256):
        return None
    shape = _WIDE_OF_SMALL_UNIONS if max(dims) > 128 else _OF_SMALL_UNIONS
    tile = make(problem, shape)
    return tile if refusal_by_room(tile, target) is None else None


def find(problem: AttentionProblem, page_size: int, name: str = PERSISTENT) -> Tile | str:
    """The tile of this name for a problem, or a sentence that says why there is none."""
    if not problem.aligned:
        return "tensor maps need rows that begin on 16-byte boundaries"
    if problem.dtype_rows is not None:
        return "it copies rows of q as they are multiplied"
    if problem.block_scales and problem.logits is not None:
        return "scales of blocks are read where expressions read their arrays"
    if problem.is_8bit and (reason := _refusal_of_8_bits(problem, name)) is not None:
        return reason
    if problem.sparse:
        return _find_of_unions(problem, page_size, name)
    if name in (LARGE, PERSISTENT):
        return _find_persistent(problem, page_size)
    return _find_other(problem, page_size, name)


def _refusal_of_8_bits(problem: AttentionProblem, name: str) -> str | None:
    """Why queries of 8 bits have no tile: what was not compiled without spills, or not tried."""
    dims = problem.head_dim_qk, problem.head_dim_vo
    if name not in (LARGE, PERSISTENT):
        return "queries of 8 bits have one tile"
    if problem.dtype_q is not dtypes.float8_e4m3fn:
        return f"of 8 bits it multiplies float8_e4m3fn, not {problem.dtype_q}"
    if ("8 bits", *dims) not in _TILES:
        return f"it has no tile for queries of 8 bits with head dims {dims[0]} and {dims[1]}"
    if problem.block_scales:
        return "queries of 8 bits have no scales of blocks"
    if problem.custom_mask or problem.transforms_logits:
        return "queries of 8 bits have no mask or logits expression"
    if problem.pos_encoding == "ROPE_LLAMA" or problem.key_share:
        return "queries of 8 bits have no rotation and share no keys"
    if problem.soft_cap and problem.biases_logits:
        return "a soft cap and a bias of queries of 8 bits would spill"
    if (problem.soft_cap or problem.biases_logits) and not problem.dtype_o.is_float16:
        return "a soft cap or a bias of queries of 8 bits would spill with such outputs"
    return None


def _find_of_unions(problem: AttentionProblem, page_size: int, name: str) -> Tile | str:
    """The tile of unions of lists, whose keys are pages of halves of it or less."""
    if name not in (LARGE, PERSISTENT):
        return "unions of lists have one tile"
    if (reason := _refusal_of_unions(problem)) is not None:
        return reason
    dims = tile_dims(problem)
    if max(dims) > 128:
        return "tiles of unions have 128 keys, for which such head dims leave no room"
    if not tensor_map.box_rows(page_size, _OF_UNIONS.tile_kv):
        return "no box of a tensor map fits the pages"
    return Tile(PERSISTENT, "paged", dims, _OF_UNIONS)


def _refusal_of_unions(problem: AttentionProblem) -> str | None:
    if not problem.aligned or problem.dtype_rows is not None:
        return "rows of unions are copied as they are multiplied"
    if not _is_plain(problem) or problem.soft_cap or problem.key_share:
        return "unions of lists are attended to by plain logits of 16-bit keys"
    if not problem.dtype_o.is_float16 or not problem.paged:
        return "unions of lists are of pages, and have outputs of 16 bits"
    return None


def _find_other(problem: AttentionProblem, page_size: int, name: str) -> Tile | str:
    """A tile that is not for long launches: those of plain attention, and some under a cap."""
    if _find_skipping(problem, page_size) is not None:
        return "another tile leaves out keys that weigh next to nothing"
    dims, keys = tile_dims(problem), _kind(problem).removesuffix(" capped")
    if keys == "ragged" and not problem.soft_cap:
        dims, _ = _plain_shape(problem, dims, None)
    shape = _NAMED.get((name, keys, *dims))
    if shape is None:
        return f"it has no tile for {keys} keys of such head dims"
    if not _is_plain(problem):
        return "its tile is compiled for plain logits of 16-bit keys, or under a cap"
    if problem.paged and not tensor_map.box_rows(page_size, shape.tile_kv):
        return "no box of a tensor map fits the pages"
    if name == "lean_persistent" and (problem.key_share or not problem.dtype_o.is_float16):
        # As under a cap at head dim 64.
        return "it would spill with float32 outputs, or where ranks share keys"
    own_dims = problem.head_dim_qk, problem.head_dim_vo
    if name == "q256_persistent" and (problem.output_gate or own_dims != dims):
        return "it would spill with gates of the output, or other head dims"
    # Capped tiles of 192 columns were not timed, and lean ones would spill.
    would_spill = name == "lean_persistent" and dims[0] == 64
    would_spill |= problem.key_share and name.startswith("lean")
    is_deep = dims[0] >= 192 and dims != (256, 256)
    if problem.soft_cap and (name not in _CAPPED_TILES or is_deep or would_spill):
        return "another tile is faster under a cap"
    return Tile(name, keys, dims, shape)


def tile_dims(problem: AttentionProblem) -> tuple[int, int]:
    """The head dims whose tiles a problem has: the least of the tables that hold its own. Columns
    that it lacks are not multiplied, but for a few zeros (tile/warpgroup_tile.cuh)."""
    own = problem.head_dim_qk, problem.head_dim_vo
    return next(dims for dims in _DIMS if own[0] <= dims[0] and own[1] <= dims[1])


def _is_plain(problem: AttentionProblem) -> bool:
    """Whether keys have 16 bits and nothing but a scale and a cap changes their logits."""
    has_option = problem.custom_mask or problem.reads_rows
    return not has_option and problem.pos_encoding == "NONE" and problem.dtype_kv.is_float16


def _find_persistent(problem: AttentionProblem, page_size: int) -> Tile | str:
    """The tile of long launches, which serves all options."""
    if (tile := _find_skipping(problem, page_size)) is not None:
        return tile
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    is_wide, is_fp8 = tile_dims(problem)[1] > 192, problem.dtype_kv.is_fp8
    if is_rotated and (is_fp8 or problem.own_value_pages):
        return "it does not rotate fp8 keys, nor keys beside values with pages of their own"
    keys, dims = _kind(problem), tile_dims(problem)
    shape = _shape(problem, keys)
    if keys == "ragged" and _is_plain(problem):
        dims, shape = _plain_shape(problem, dims, shape)
    if shape and problem.paged and not tensor_map.box_rows(page_size, shape.tile_kv):
        if problem.is_8bit:
            return "no box of a tensor map fits the pages, and rows of 8 bits are not gathered"
        # Rotated keys are elsewhere, and known by their map. Warps that look after a mask do not
        # gather besides; those that gather look up one page for a key and its value.
        has_wide_mask = problem.custom_mask and is_wide and not is_fp8
        if is_rotated or problem.own_value_pages or has_wide_mask:
            return "no box of a tensor map fits the pages, and these options gather no rows"
        keys = "fp8 gathered" if is_fp8 else "gathered"
        shape = _shape(problem, keys)
    if shape is None:
        return f"it has no tile for {keys} keys of such head dims with these options"
    return Tile(PERSISTENT, keys.removesuffix(" capped"), dims, shape)


def _find_skipping(problem: AttentionProblem, page_size: int) -> Tile | None:
    """The tile that leaves out keys which weigh next to nothing, where the call lets it."""
    is_simple = _is_plain(problem) and not problem.soft_cap and not problem.key_share
    if not (problem.skips_tiles and is_simple):
        return None
    dims, keys = tile_dims(problem), "paged" if problem.paged else "ragged"
    shape = _SKIPPING_TILES.get((keys, *dims), _SKIPPING_TILES.get(("paged", *dims)))
    if shape is None or (problem.paged and not tensor_map.box_rows(page_size, shape.tile_kv)):
        return None
    return Tile(PERSISTENT, keys, dims, shape)


def _plain_shape(
    problem: AttentionProblem, dims: tuple[int, int], shape: _Shape | None
) -> tuple[tuple[int, int], _Shape | None]:
    """The dims and the tile of plain attention over ragged keys; `dims`, `shape`: with options."""
    for (beyond, maximum), plain in _PLAIN.items():
        if beyond < max(problem.head_dim_qk, problem.head_dim_vo) <= maximum:
            return (maximum, maximum), plain
    return dims, shape


def _kind(problem: AttentionProblem) -> str:
    if problem.is_8bit:
        return "8 bits"
    if problem.dtype_kv.is_fp8:
        return "fp8"
    # Facts of rows leave three warpgroups no room for mask bits; neither they nor rotations leave
    # room for the coefficients of a cap.
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    lacks_room = problem.reads_rows and (problem.soft_cap or problem.custom_mask)
    lacks_room = lacks_room or problem.has_long_transform
    if problem.paged or lacks_room or (problem.soft_cap and is_rotated):
        return "paged"
    return "ragged capped" if problem.soft_cap else "ragged"


def _shape(problem: AttentionProblem, kind: str) -> _Shape | None:
    dims = tile_dims(problem)
    shape, is_wide = _TILES.get((kind, *dims)), dims[1] > 192
    if shape is None and kind.startswith("ragged"):
        shape = _TILES[("paged", *dims)]
    if kind == "8 bits" and dims == (128, 128) and folds_row_scales(problem):
        shape = _8BIT_FOLLOWS._replace(tile_kv=128)  # scales would spill beside 160 keys
    if shape is None or (shape.fp8_stages and _caps_rows(problem) and is_wide):
        return None
    if shape.fp8_stages and problem.has_long_transform:
        return None  # no tile leaves it registers
    if problem.block_scales and dims == (192, 192):
        return None  # nor the factors of rows that three chunks have
    if shape.fp8_stages and (problem.custom_mask or problem.block_scales):
        # Warps that write mask bits, or scale what they convert, take more registers.
        shape = shape._replace(registers=(48, 208) if shape.converters == 4 else (72, 216))
    if problem.has_large_mask:
        # So do those that evaluate an expression, at the cost of consumers, or of a third consumer.
        if shape.consumers == 3:
            shape = _TWO
        registers = (48, 208) if shape.gatherers == 4 or shape.converters == 4 else (56, 224)
        shape = shape._replace(registers=registers)
    if (problem.soft_cap and is_wide) or problem.has_long_transform:
        # Without overlap the kernel also has half as many copies of a transform to compile.
        shape = shape._replace(overlaps=False)
    return shape._replace(tile_kv=min(shape.tile_kv, _max_keys(problem, kind)))


def _max_keys(problem: AttentionProblem, kind: str) -> int:
    """The keys of a tile for which a problem's options leave registers and shared memory: facts of
    rows, mask bits, rotations, biases and the coefficients of a cap."""
    dim, dim_vo = tile_dims(problem)
    if problem.is_8bit:
        return _keys_of_8_bits(problem)
    has_positions = problem.pos_encoding != "NONE" or problem.transforms_logits
    if kind.startswith("fp8"):
        # A cap of float16 rows takes a few registers more than one of bfloat16 rows.
        spills = (
            problem.soft_cap and problem.dtype_q is dtypes.float16 and (dim, dim_vo) == (128, 128)
        )
        spills |= problem.custom_mask or problem.block_scales or _caps_rows(problem)
        if problem.block_scales and dim == 192:
            return 64
        return 96 if spills else 128
    if dim <= 128 and problem.logits is not None and problem.logits.loads_for_keys:
        return 64 if dim == 64 else 80  # 80 and 96 keys take a register too many
    if dim_vo > 192:
        return 64 if problem.custom_mask or has_positions or _caps_rows(problem) else 80
    if _caps_rows(problem) or (dim_vo > 128 and (problem.custom_mask or has_positions)):
        return 80 if dim == 64 else 96
    if dim == 64 and has_positions:
        return 96 if problem.prescale_logits or problem.biases_logits else 112
    if problem.soft_cap and problem.dtype_q is dtypes.bfloat16 and dim == 64:
        return 112
    if problem.soft_cap and problem.dtype_q is dtypes.float16 and dim == 128:
        return 112
    if problem.adds_near_biases and dim >= 128:
        return 96 if kind == "paged" and dim == 128 else 112
    if problem.biases_logits and (problem.prescale_logits or (dim > 128 and kind == "gathered")):
        return 112
    return 128


def _keys_of_8_bits(problem: AttentionProblem) -> int:
    """The same of queries of 8 bits: a cap, a bias and outputs that are not of 16 bits take
    registers."""
    dims = problem.head_dim_qk, problem.head_dim_vo
    if problem.soft_cap or problem.pos_encoding == "ALIBI":
        return {64: 192, 96: 128, 128: 96, 192: 96}[dims[0]]
    if problem.reads_rows and dims[0] == 192 and not folds_row_scales(problem):
        return 96  # facts of rows take shared memory
    if problem.dtype_o is dtypes.float32 and dims[0] == 192:
        return 96
    return 256 if problem.dtype_o.is_float16 or dims != (128, 128) else 128


def _caps_rows(problem: AttentionProblem) -> bool:
    """Whether logits take as many registers as a cap of logits that know their rows."""
    masks_transformed = problem.transforms_logits and problem.custom_mask
    is_long = problem.has_long_transform or masks_transformed
    return is_long or (problem.soft_cap and problem.reads_rows)


HEAD_DIMS = ("multiples of 8 up to 256",)
"""What `cupyattn info` says of them. docs/support.md has the options with each."""

HEAD_DIMS_OF_8_BITS = tuple((qk, vo) for kind, qk, vo in _TILES if kind == "8 bits")
"""Head dims of q, k and of v, o that have tiles which multiply queries of 8 bits as they are."""


def make(problem: AttentionProblem, shape: _Shape) -> TileConfig:
    if problem.is_8bit and problem.soft_cap:
        # Capped in place, as logits of rows with scales are.
        problem = replace(problem, prescale_logits=True)
    consumers, tile_kv, stages, slots, registers, _, fp8_stages, converters, *_ = shape
    itemsize, landing = (1 if problem.is_8bit else 2), 4 * (fp8_stages or stages)
    tile_q = 64 * consumers
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    has_fast_cap = problem.soft_cap and not (problem.reads_rows or shape.lean)
    # Rows of fp8 are filled up to whole 16 bytes.
    dims = (problem.head_dim_qk, problem.head_dim_vo)
    items = shape.items if shape.persistent else 1
    fp8_tiles = _fp8_tiles(problem, shape, dims)
    if shape.lean:
        keys = [panels(tile_kv, max(problem.head_dim_qk, problem.head_dim_vo), stages)]
        rest = [Field(8 * (2 * items + 2 * slots + 2 * stages), 8)]
    else:
        value_stages = fp8_stages if problem.is_8bit else stages
        counts = stages, value_stages
        keys = [panels(tile_kv, dim, n, itemsize) for dim, n in zip(dims, counts, strict=True)]
        rest = [
            Field(value_stages * 16 * -(-tile_kv // 128), 16),
            _row_bits(problem, shape),
            Field(2 * problem.head_dim_qk if is_rotated else 4),
            Field(8 * (1 + 2 * (items + slots + stages) + 3 * value_stages + landing), 8),
        ]
    shared = struct_of(
        *fp8_tiles,
        panels(tile_q, problem.head_dim_qk, slots, itemsize),
        *keys,
        Field(_row_bytes(problem, items) * (tile_q if problem.reads_rows else 1), 16),
        Field(64 if has_fast_cap else 32, 16),
        Field(items * (_ITEM_BYTES + _MASK_MAP_BYTES * problem.custom_mask), 8),
        *rest,
    ).size
    config = problem_constants(problem) | {
        "kConsumers": consumers,
        "kTileKV": tile_kv,
        "kStages": stages,
        "kQuerySlots": slots,
        "kFp8Stages": fp8_stages,
        "kConverters": converters,
        "kProducerRegisters": registers[0],
        "kConsumerRegisters": registers[1],
        "kIntraWarpgroupOverlap": shape.overlaps,
        "kGatherers": shape.gatherers,
        "kMinBlocks": shape.min_blocks,
        "kPersistent": shape.persistent,
        "kItems": items,
        "kBoxRows": shape.box_rows or tile_kv,
        "kLean": shape.lean,
        "kSharedBytes": shared,
        **_flags(problem, shape),
    }
    # The warps that only copy: a warpgroup, or one warp of a persistent lean block, or none.
    copying = 32 * shape.persistent if shape.lean else 128
    threads = copying + 128 * (consumers + converters // 4 + shape.gatherers // 4)
    return TileConfig(
        "prefill_sm90", jit.Config(config), tile_q, tile_kv, threads, shared, is_rotated
    )


def _flags(problem: AttentionProblem, shape: _Shape) -> dict[str, bool]:
    """What few kernels are told."""
    flags = {
        "kSkipsTiles": shape.skips,
        "kUnions": problem.sparse,
        "kUnionCuts": shape.cuts,
        "kSmallUnions": shape.small_unions,
        "kFollows": shape.follows,
    }
    return {name: True for name, is_set in flags.items() if is_set}


def _row_bytes(problem: AttentionProblem, items: int) -> int:
    """What shared memory has of a row (RowInfo, or RowScaledLogits::Row of each item)."""
    return _BYTES_OF_SCALED_ROW * items if folds_row_scales(problem) else _ROW_BYTES


def folds_row_scales(problem: AttentionProblem) -> bool:
    """Whether nothing but a scale changes the logits of a row of 8 bits."""
    if not problem.is_8bit or problem.soft_cap or problem.biases_logits:
        return False
    return problem.prescale_logits


def _fp8_tiles(problem: AttentionProblem, shape: _Shape, dims: tuple[int, int]) -> list[Field]:
    """The sums of O of queries of 8 bits, landed keys and values of fp8, or what is known of a
    union's tiles and of rows that are made again."""
    if problem.sparse:
        of_tile = _SMALL_UNION_BYTES if shape.small_unions else 32 if shape.cuts else 16
        return [Field(of_tile * shape.stages + 4 * 64 * shape.consumers, 16)]
    if problem.is_8bit:
        return [Field(4 * 64 * shape.consumers * dims[1], 16)]
    return [
        Field(shape.fp8_stages * shape.tile_kv * round_up(dim, 16), 128) for dim in dims
    ] * bool(shape.fp8_stages)


def _row_bits(problem: AttentionProblem, shape: _Shape) -> Field:
    """The bits of a mask: one for each row and key of a stage, and a tile and a barrier a stage. Or
    what warps find of tiles that may be left out."""
    if shape.skips:
        return Field(16 * shape.consumers, 16)
    if not problem.custom_mask:
        return Field(4)
    words, stages = -(-shape.tile_kv // 32), shape.stages
    bits = stages * 4 * words * 64 * shape.consumers
    return struct_of(Field(bits), Field(8 * stages), Field(8 * stages, 8))

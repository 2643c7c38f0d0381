"""What the tiles of prefill_sm90 take for a problem on a card."""

from __future__ import annotations

from ..core.device import DeviceProps
from ..core.problem import AttentionProblem
from ..launch.tiles import prefill_sm90
from ..launch.tiles.config import Target, TileConfig, min_blocks
from ..launch.tiles.row_classes import LARGE_TILES, PERSISTENT
from ..schedule.makespan import TileTimes
from ..schedule.tile_shape import TileShape
from .card import Card, TileKey, TimedTile, card_of

_KERNEL = "prefill_sm90"
PORTABLE_KERNEL = "prefill_sm80"
_LIKE_PORTABLE_KEYS = {
    "ragged": ("ragged", "paged"),
    "paged": ("paged", "ragged"),
    "fp8": ("fp8", "paged"),
}
# By the kind of keys, those whose times stand in for its own, the best first.
_LIKE_KEYS = {
    "ragged": ("ragged",),
    "paged": ("paged", "ragged"),
    "gathered": ("gathered",),
    "fp8": ("fp8", "gathered"),
    "fp8 gathered": ("fp8 gathered", "fp8", "gathered"),
    "8 bits": ("8 bits", "paged", "ragged"),
}


def large_tiles(
    problem: AttentionProblem, props: DeviceProps, page_size: int
) -> dict[str, tuple[TileConfig, TileTimes]]:
    """The tiles that a plan of requests of the last class may choose from, by name, and their
    times, the one for long launches first. Empty for a problem whose kernels were not timed."""
    card, result = card_of(props), {}
    target = Target(props.arch, props.max_smem_per_block, page_size)
    for name in LARGE_TILES:
        if prefill_sm90.refusal(problem, name, target) is None:
            times = times_of(card, problem, page_size, name)
            if times is not None:
                result[name] = prefill_sm90.tiles(problem, name, target), times
    return result if PERSISTENT in result else {}


def times_of(card: Card, problem: AttentionProblem, page_size: int, name: str) -> TileTimes | None:
    """The times of a tile of prefill_sm90; None if it does not serve the problem, or no like tile
    was timed."""
    tile = prefill_sm90.find(problem, page_size, name)
    if isinstance(tile, str):
        return None
    key = nearest(card, problem, tile)
    return key and scaled(card, problem, tile, key, card.tiles[key])


def nearest(card: Card, problem: AttentionProblem, tile: prefill_sm90.Tile) -> TileKey | None:
    """The timed tile of the least head dims that hold those of a problem, its own first. Those of
    ragged keys stand in for pages that were not timed, and those of gathered rows for fp8."""
    like = _LIKE_KEYS[tile.keys]
    fitting = [
        key
        for key in card.tiles
        if key[:2] == (_KERNEL, tile.name)
        and key.keys in like
        and key.head_dim_qk >= problem.head_dim_qk
        and key.head_dim_vo >= problem.head_dim_vo
    ]
    return min(fitting, key=lambda x: (like.index(x.keys), sum(x[-2:])), default=None)


def scaled(
    card: Card, problem: AttentionProblem, tile: prefill_sm90.Tile, key: TileKey, timed: TimedTile
) -> TileTimes:
    """The times of a tile by those of a like one, which is `key`."""
    return _scaled(card, problem, (tile.num_rows, tile.num_keys), key, timed)


def _scaled(
    card: Card, problem: AttentionProblem, area: tuple[int, int], key: TileKey, timed: TimedTile
) -> TileTimes:
    """Half of what a key tile takes is in proportion to its columns, and all to its area."""
    num_rows, num_keys = area
    columns = (problem.head_dim_qk + problem.head_dim_vo) / (key.head_dim_qk + key.head_dim_vo)
    key_tile = (1 + columns) / 2 * num_rows * num_keys / timed.area * timed.times.key_tile
    launch = timed.times.launch
    if problem.soft_cap:
        launch += timed.capped[0]
        key_tile *= timed.capped[1]
    added, factor = _of_options(card, problem)
    row_bytes = problem.dtype_kv.itemsize * (problem.head_dim_qk + problem.head_dim_vo)
    return timed.times._replace(
        launch=launch + added,
        key_tile=factor * key_tile,
        # A state is written and read, in float32.
        state=2 * 4 * num_rows * problem.head_dim_vo / card.state_rate,
        read=num_keys * row_bytes / card.key_rate,
        row=2 * (problem.head_dim_qk + problem.head_dim_vo) / card.row_rate,
    )


def _of_options(card: Card, problem: AttentionProblem) -> tuple[float, float]:
    """What is done to keys and logits besides a cap: what that adds to a launch, and times as long
    a key tile takes."""
    added, factor = 0.0, 1.0
    for name in option_names(problem):
        option = card.options[name]
        added, factor = added + option[0], factor * option[1]
    return added, factor


def option_names(problem: AttentionProblem) -> list[str]:
    """The keys of card.options that a problem has."""
    result = [] if problem.pos_encoding == "NONE" else [problem.pos_encoding.lower()]
    if problem.custom_mask:
        result.append("mask")
    # Tiles of 8 bits fold scales of rows into their exponents.
    is_folded = prefill_sm90.folds_row_scales(problem)
    if problem.reads_rows and problem.pos_encoding != "ALIBI" and not is_folded:
        result.append("rows")
    return result


def portable_keys(problem: AttentionProblem) -> str:
    """The kind of keys, by which the times of prefill_sm80 are found."""
    return "fp8" if problem.dtype_kv.is_fp8 else "paged" if problem.paged else "ragged"


def nearest_portable(card: Card, problem: AttentionProblem, row_class: str) -> TileKey | None:
    """The tile of prefill_sm80 of a row class that was timed with the likest keys and dims."""
    like = _LIKE_PORTABLE_KEYS[portable_keys(problem)]
    own = problem.head_dim_qk + problem.head_dim_vo
    fitting = [x for x in card.tiles if x[:2] == (PORTABLE_KERNEL, row_class) and x.keys in like]
    return min(fitting, key=lambda x: (like.index(x.keys), abs(sum(x[-2:]) - own)), default=None)


def portable_times_of(
    card: Card, problem: AttentionProblem, row_class: str, area: tuple[int, int]
) -> TileTimes | None:
    """The times of prefill_sm80 for a row class, whose tiles have so many rows and keys; None if no
    like tile was timed."""
    key = nearest_portable(card, problem, row_class)
    return key and _scaled(card, problem, area, key, card.tiles[key])


def shape_of(
    tiles: TileConfig, times: TileTimes, group_size: int, num_kv_heads: int, num_sms: int
) -> TileShape:
    """What a plan must know of timed tiles, whose kernel need not be loaded."""
    return TileShape(
        tiles.used_rows(group_size, num_kv_heads),
        tiles.tile_kv,
        min_blocks(tiles.config) * num_sms,
        times=times.of_group(group_size),
        num_sms=num_sms,
        is_persistent=tiles.is_persistent,
        max_keys=prefill_sm90.MAX_KEYS_OF_SHORT_ITEMS if tiles.is_for_short_items else 0,
    )

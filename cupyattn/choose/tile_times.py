"""What the tiles of prefill_sm90 take for a problem on a card."""

from __future__ import annotations

from ..core.device import DeviceProps
from ..core.env import PORTABLE
from ..core.problem import AttentionProblem
from ..launch.tiles import sm90
from ..launch.tiles.config import TileConfig
from ..launch.tiles.select import LARGE, LARGE_TILES, min_blocks
from ..schedule.makespan import TileTimes
from ..schedule.tile_shape import TileShape
from .card import Card, TileKey, TimedTile, card_of

_KERNEL = "prefill_sm90"


def large_tiles(
    problem: AttentionProblem, props: DeviceProps, page_size: int
) -> dict[str, tuple[TileConfig, TileTimes]]:
    """The tiles that a plan of requests of the last class may choose from, by name, and their
    times, the one for long launches first. Empty for a problem whose kernels were not timed."""
    if props.arch != "sm_90a" or problem.is_wide or PORTABLE.flag():
        return {}
    card, found = card_of(props), {}
    for name in LARGE_TILES:
        tiles = sm90.choose(problem, props.max_smem_per_block, page_size, name)
        times = times_of(card, problem, page_size, name)
        if tiles is not None and times is not None:
            found[name] = tiles, times
    return found if LARGE in found else {}


def times_of(card: Card, problem: AttentionProblem, page_size: int, name: str) -> TileTimes | None:
    """The times of a tile of prefill_sm90; None if it does not serve the problem, or was not timed
    with such keys and options."""
    tile = sm90.find(problem, page_size, name)
    if isinstance(tile, str) or not sm90.is_plain(problem):
        return None
    found = _nearest(card, tile, (problem.head_dim_qk, problem.head_dim_vo))
    if found is None:
        return None
    key, timed = found
    # Half of what a key tile takes is in proportion to its columns, and all of it to its area.
    columns = (problem.head_dim_qk + problem.head_dim_vo) / (key.head_dim_qk + key.head_dim_vo)
    key_tile = (1 + columns) / 2 * timed.times.key_tile
    if key[-2:] != tile.dims:
        key_tile *= tile.area / timed.area
    launch = timed.times.launch
    if problem.soft_cap:
        launch += timed.capped[0]
        key_tile *= timed.capped[1]
    row_bytes = problem.dtype_kv.itemsize * (problem.head_dim_qk + problem.head_dim_vo)
    return timed.times._replace(
        launch=launch,
        key_tile=key_tile,
        # A state is written and read, in float32.
        state=2 * 4 * tile.num_rows * problem.head_dim_vo / card.state_rate,
        read=tile.num_keys * row_bytes / card.key_rate,
    )


def _nearest(card: Card, tile: sm90.Tile, own: tuple[int, int]) -> tuple[TileKey, TimedTile] | None:
    """The timed tile of the least dims that hold a problem's own, or else those of its tile. Those
    of ragged keys stand in for pages that were not timed."""
    names = _KERNEL, tile.name, tile.keys
    timed = sorted(key[-2:] for key in card.tiles if key[:3] == names)
    within = [(tile.keys, x) for x in timed if _holds(x, own) and _holds(tile.dims, x)]
    kinds = ("paged", "ragged") if tile.keys == "paged" else (tile.keys,)
    others = ((keys, x) for x in (tile.dims, *sm90.dims_that_hold(tile.dims)) for keys in kinds)
    for keys, dims in (*within, *others):
        key = TileKey(_KERNEL, tile.name, keys, *dims)
        if key in card.tiles:
            return key, card.tiles[key]
    return None


def _holds(dims: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return own[0] <= dims[0] and own[1] <= dims[1]


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
        most_keys=sm90.MOST_KEYS_OF_SHORT_ITEMS if tiles.is_for_short_items else 0,
    )

"""What prefill_sm90 is told besides the struct of all attention kernels: mostly tensor maps."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...errors import UnsupportedError
from ..driver import params, tensor_map
from ..tiles.config import TileConfig
from .swizzle import L2Swizzle

# params/prefill_sm90.cuh, PageUnits.
PageUnits = tuple[int, int, int, int]

_MAX_CACHED = 256
# Rows of o are stored in boxes only where all of a box are the tile's own, so no bound is needed.
_NO_BOUND = 2**31 - 1
_MAX_BOX = 256
_WARPGROUP_ROWS = 64
_WARP_ROWS = 16
_MAX_UNIT = 1 << 24
# Lean blocks of one item that are no more than so many on each SM have memory to themselves: each
# warp then copies a tile. Of more, one warp copies in the order in which tiles are multiplied.
_FEW_BLOCKS_AN_SM = 2


class Heads(NamedTuple):
    """What a launcher knows of its arrays. page_size: tokens of a page, or 0 for ragged rows."""

    problem: AttentionProblem
    num_kv_heads: int
    group_size: int
    page_size: int
    device_index: int


class Maps:
    """The maps of q, k, v and o of some strides and sizes, remembered by their addresses."""

    __slots__ = (
        "_head",
        "_heads",
        "_keys",
        "_known",
        "_mask_maps",
        "_num_rows",
        "_num_tail_items",
        "_outputs",
        "_queries",
        "_tiles",
        "_values",
    )

    def __init__(
        self,
        heads: Heads,
        tiles: TileConfig,
        num_items: int,
        swizzle: L2Swizzle,
        strides: bytes,
        num_rows: int,
        size: int,
        rotated: tuple[tuple[int, int, int], int] | None = None,
        mask_maps: int = 0,
    ) -> None:
        """strides: params.STRIDES, packed. num_rows: of q, or 0 where more may come. size: rows of
        k and v, or pages, that may be read. rotated: the (token, head, page) strides and the size
        of k, if they are others. mask_maps: the address of what scan_mask leaves, if it is
        launched.
        """
        self._heads = heads
        self._tiles = tiles
        self._head = num_items, swizzle.heads_per_swizzle
        self._num_tail_items = swizzle.num_tail_items(num_items)
        self._mask_maps = mask_maps
        self._num_rows = num_rows
        q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, *_ = params.STRIDES.unpack(
            strides
        )
        k_page, v_page = params.STRIDES.unpack(strides)[-2:]
        self._queries = q_head, q_row
        self._keys = rotated or ((k_row, k_head, k_page), size)
        self._values = (v_row, v_head, v_page), size
        self._outputs = o_head, o_row
        self._known: dict[tuple[int, int, int, int], bytes] = {}

    def pack(self, arguments: params.LaunchBuffer, q: int, k: int, v: int, o: int) -> None:
        """Write what follows params.ATTENTION for arrays at these addresses."""
        key = q, k, v, o
        cached = self._known.get(key)
        if cached is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            cached = self._known[key] = self._make(q, k, v, o)
        begin = arguments.offset + params.ATTENTION.size
        arguments.buffer[begin : begin + len(cached)] = cached

    def _make(self, q: int, k: int, v: int, o: int) -> bytes:
        problem, page_size = self._heads.problem, self._heads.page_size
        small = self._tiles.small_box_rows
        query_boxes, query_map = self._row_boxes(
            q, problem.head_dim_qk, self._queries, self._num_rows, problem.dtype_q.itemsize, small
        )
        # Rows of other sizes are not stored in boxes.
        of_warps = _WARP_ROWS if problem.is_8bit else 0
        output_boxes, output_map = self._row_boxes(
            o, problem.head_dim_vo, self._outputs, _NO_BOUND, 2, of_warps
        )
        maps, tails = [query_map], []
        gathers = self._tiles.config["kGatherers"]
        maximum = small or self._tiles.tile_kv
        rows = 0 if gathers else tensor_map.box_rows(page_size, maximum)
        units: list[int] = []
        for address, dim, (strides, size) in (
            (k, problem.head_dim_qk, self._keys),
            (v, problem.head_dim_vo, self._values),
        ):
            if rows:
                built, where = self._in_boxes(
                    address, dim, strides, size, rows, self._panel_columns()
                )
                columns = self._tail_columns(dim)
                tail = (
                    self._in_boxes(address, dim, strides, size, rows, columns)[0]
                    if columns
                    else built
                )
            else:
                tail, where = self._gathered(strides, size)
                built = tail
            maps.append(built)
            tails.append(tail)
            units += where
        maps.append(output_map)
        (query_rows, query_step), (output_rows, output_step) = query_boxes, output_boxes
        head = *self._head, rows, query_rows, *units, output_rows, self._num_tail_items
        return params.PREFILL_SM90.pack(
            *head,
            self._mask_maps,
            query_step,
            output_step,
            self._many_blocks(),
            b"".join(maps + tails),
        )

    def _panel_columns(self) -> int:
        """The columns of a box of k and v: a panel's, or 0 for whole rows, which are converted."""
        problem = self._heads.problem
        if problem.dtype_kv.itemsize < problem.dtype_q.itemsize:
            return 0
        return tensor_map.PANEL_BYTES // problem.dtype_kv.itemsize

    def _tail_columns(self, dim: int) -> int:
        """The columns of a box of the last panel of k or v, if it is a part; else 0."""
        itemsize = self._heads.problem.dtype_kv.itemsize
        return tensor_map.tail_columns(dim, itemsize) if self._panel_columns() else 0

    def _many_blocks(self) -> int:
        """How many lean blocks of one item are many; 0 for other tiles, which do not ask."""
        config = self._tiles.config
        if not config["kLean"] or config["kPersistent"]:
            return 0
        return _FEW_BLOCKS_AN_SM * device_props(self._heads.device_index).num_sms + 1

    def _in_boxes(
        self,
        address: int,
        dim: int,
        strides: tuple[int, int, int],
        size: int,
        rows: int,
        columns: int,
    ) -> tuple[bytes, PageUnits]:
        """The map of k or v, copied in boxes of rows and of panels, or of some of their columns."""
        problem, num_kv_heads, _, page_size, _ = self._heads
        itemsize = problem.dtype_kv.itemsize
        if page_size:
            sizes = page_size, num_kv_heads, size
            built, (page, head) = tensor_map.of_pages(
                address, dim, sizes, strides, rows, itemsize, columns
            )
            return built, (page, head, 0, 0)
        dims = dim, size, num_kv_heads, 1
        built = tensor_map.of_rows(address, dims, strides, (rows, 1, 1), itemsize, columns)
        return built, (0, 1, 0, 0)

    def _gathered(self, strides: tuple[int, int, int], size: int) -> tuple[bytes, PageUnits]:
        """No map, but where the rows of pages are."""
        page_size, (row, _, page) = self._heads.page_size, strides
        page, row = page if size > 1 else 0, row if page_size > 1 else 0
        unit = math.gcd(page, row, _MAX_UNIT)
        last = max(0, size - 1) * page + (page_size - 1) * row
        if last // unit > _NO_BOUND:
            raise UnsupportedError(
                f"paged_kv_cache: strides of {page} elements a page and {row} a row, over {size} "
                f"pages, are more units of {unit} than 32 bits count; use a contiguous cache"
            )
        in_bytes = unit * self._heads.problem.dtype_kv.itemsize
        return bytes(tensor_map.BYTES), (page // unit, 0, row // unit, in_bytes)

    def _row_boxes(
        self,
        address: int,
        dim: int,
        strides: tuple[int, int],
        num_rows: int,
        itemsize: int,
        small: int = 0,
    ) -> tuple[tuple[int, int], bytes]:
        """How many packed rows of q or o are one box, and how many steps of their map; and the map.

        strides   of a head, a row
        num_rows  of q or o, in tokens; 0: nobody knows, so there are no boxes
        small     the rows of a box, if they are whole tokens
        """
        _, num_kv_heads, group, _, _ = self._heads
        head, row = strides
        if num_kv_heads == 1 and row == group * head:
            # PackGQA rows lie one after another.
            num_rows, group, row = min(num_rows * group, _NO_BOUND), 1, head
        # A map has no strides of 0, of which arrays that repeat themselves are made.
        rows = self._box_rows(group, small) if min(head, row) > 0 and num_rows else 0
        dims = (num_kv_heads * group, num_rows, 1) if rows else (1, 1, 1)
        box = (group, rows // group, 1) if rows else (1, 1, 1)
        columns = tensor_map.PANEL_BYTES // itemsize
        built = tensor_map.of_rows(address, (dim, *dims), (head, row, 0), box, itemsize, columns)
        return (rows, rows // group), built

    def _box_rows(self, group: int, small: int) -> int:
        """`small`, else those of a warpgroup, else of a tile, if they are whole tokens; or 0."""
        for rows in (
            small,
            _WARPGROUP_ROWS,
            self._tiles.used_rows(group, self._heads.num_kv_heads),
        ):
            if rows and rows % group == 0 and max(group, rows // group) <= _MAX_BOX:
                return rows
        return 0

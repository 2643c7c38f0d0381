"""What a kernel instance is to a launch, and the arithmetic of its shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ... import jit
from ...core import env

# Whole tokens may leave over one in so many of a tile's rows.
_MAX_LEFT_OVER = 16


class Target(NamedTuple):
    """What a kernel is compiled for besides its problem and its rows.

    max_shared_bytes  of a block
    page_size         of keys; looked at where it decides how they are copied
    is_batch          the keys are of a batch, which no pass of its own rotates
    """

    arch: str
    max_shared_bytes: int
    page_size: int = 0
    is_batch: bool = True


HOPPER = "sm_90a"
# What blocks find by lengths in device memory: whole tiles, or parts of the keys of each too.
FOUND_ITEMS, FOUND_PARTS = "items", "parts"


def refusal_of_hopper(target: Target) -> str | None:
    """Why there are none of Hopper's own kernels; None if there are."""
    if target.arch != HOPPER:
        return f"it is made for {HOPPER}, and the card is {target.arch}"
    if env.PORTABLE.flag():
        return f"{env.PORTABLE.name} leaves out Hopper's own kernels"
    return None


def refusal_by_room(tiles: TileConfig, target: Target) -> str | None:
    """Why tiles have no room; None if they have."""
    if tiles.shared_bytes <= target.max_shared_bytes:
        return None
    return f"it takes {tiles.shared_bytes:,} bytes of shared memory, which a block has not"


@dataclass(frozen=True)
class TileConfig:
    """One kernel instance: entry name, its Config, and what a launch needs to know."""

    name: str
    config: jit.Config
    tile_q: int
    tile_kv: int
    threads: int
    shared_bytes: int
    wants_rotated_keys: bool = False

    def finding(self, what: str) -> TileConfig:
        """The same where blocks find their items, or parts of them (FOUND), of kernels that do."""
        added: dict[str, bool] = {}
        if self.name == "decode_sm80" and what == FOUND_PARTS:
            added = {"kFindsItems": True}
        elif self.is_sm90 and what:
            # Parts fill one wave of blocks, which then take no further items.
            if what == FOUND_ITEMS or not self.is_persistent:
                added = {"kFindsItems": True, "kFindsParts": what == FOUND_PARTS}
        return replace(self, config=jit.Config({**self.config, **added})) if added else self

    @property
    def finds_items(self) -> bool:
        """Whether blocks find their items by lengths in device memory."""
        return self.config.get("kFindsItems") is True

    @cached_property
    def is_sm90(self) -> bool:
        """Blocks that find keys by tensor maps."""
        return self.name == "prefill_sm90"

    @cached_property
    def takes_cuts(self) -> bool:
        """Items may say which key tiles they have, and what follows them (schedule/cuts.py)."""
        is_of_boxes = self.config.get("kTma") is True and "kKeyShare" not in self.config
        dtypes = self.config.get("DTypeQ"), self.config.get("DTypeKV")
        return self.name == "wide_sm90" and is_of_boxes and dtypes[0] is dtypes[1]

    @cached_property
    def is_persistent(self) -> bool:
        """Blocks take items until none is left, so as many as run at a time are launched."""
        return self.config.get("kPersistent") is True

    @property
    def is_for_short_items(self) -> bool:
        """Blocks of prefill_sm90 that are a consumer alone, or hold more than the next item."""
        return self.config.get("kLean") is True or self.config.get("kItems") == 3

    @property
    def small_box_rows(self) -> int:
        """Rows of Q and of ragged keys of one copy, where keys of a tile have several; else 0."""
        rows = self.config["kBoxRows"]
        assert isinstance(rows, int)
        return rows if rows < self.tile_kv else 0

    def used_rows(self, group_size: int, num_kv_heads: int) -> int:
        """The rows of a tile that have work. Those of prefill_sm90 are whole tokens, which boxes
        copy, unless too many would be left over. Boxes copy any rows of one KV head, because they
        lie one after another (kernels/cupyattn/shared/work.cuh)."""
        rows = self.tile_q // group_size * group_size
        is_whole = self.tile_q - rows <= self.tile_q // _MAX_LEFT_OVER
        return rows if self.is_sm90 and num_kv_heads > 1 and is_whole else self.tile_q

    def grid(self, num_items: int, num_kv_heads: int, num_slots: int) -> tuple[int, int, int]:
        """The blocks of a launch of prefill_sm90: as many as run at a time, or one an item."""
        if not self.is_persistent:
            return num_kv_heads, num_items, 1
        return min(num_items * num_kv_heads, num_slots), 1, 1

    @property
    def num_counters(self) -> int:
        """Counters by which blocks share out their work."""
        return 1 if self.is_persistent else 0

    @cached_property
    def fused_merge(self) -> bool:
        """The last block of a tile whose keys are split merges its partial states."""
        return self.name == "decode_sm80" or self.config.get("kFusedMerge") is True

    @property
    def reads_uniform(self) -> bool:
        """Blocks of lists of keys find their work by the grid where all lists are equally long."""
        return self.name in ("wide_sm90", "wide_decode_sm90") and self.config.get("kSparse") is True

    @property
    def walks_lists(self) -> bool:
        """Blocks take the lists of several tokens, one after another, where no list is split."""
        return self.config.get("kAlternates") is True

    @cached_property
    def fused_splits(self) -> int:
        """Where a launch merges: up to so many splits of a tile are merged by its last block."""
        maximum = self.config.get("kFusedSplits", 0)
        assert isinstance(maximum, int)
        return maximum


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Field:
    """Bytes of a struct's member and its alignment."""

    size: int
    align: int = 4


def struct_of(*fields: Field) -> Field:
    """A C++ struct of these members."""
    offset = 0
    for field in fields:
        offset = round_up(offset, field.align) + field.size
    align = max(field.align for field in fields)
    return Field(round_up(offset, align), align)


def union_of(*fields: Field) -> Field:
    """A C++ union of these members."""
    align = max(field.align for field in fields)
    return Field(round_up(max(field.size for field in fields), align), align)


def min_blocks(config: jit.Config) -> int:
    """How many blocks an SM has registers for, by what the kernel is compiled with."""
    blocks = config["kMinBlocks"]
    assert isinstance(blocks, int)
    return blocks

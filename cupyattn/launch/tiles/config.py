"""What a kernel instance is to a launch, and the arithmetic of its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ... import jit


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

    @cached_property
    def is_sm90(self) -> bool:
        """Persistent blocks, which find keys by tensor maps."""
        return self.name == "prefill_sm90"

    @property
    def num_counters(self) -> int:
        """Counters by which blocks share out their work."""
        return 1 if self.is_sm90 else 0

    @cached_property
    def fused_merge(self) -> bool:
        """The last block of a tile whose keys are split merges its partial states."""
        return self.name == "decode_sm80" or self.config.get("kFusedMerge") is True

    @property
    def fused_splits(self) -> int:
        """Where a launch merges: up to so many splits of a tile are merged by its last block."""
        most = self.config.get("kFusedSplits", 0)
        assert isinstance(most, int)
        return most


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

"""Kernels on a device: compiled on first use, with how many of their blocks run at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, TypeVar

from ...core.device import DeviceProps, device_props, is_here, overlaps_launches
from ...core.problem import AttentionProblem
from ..driver.enqueue import load_function
from ..driver.pdl import max_clusters
from ..tiles.config import TileConfig, min_blocks
from ..tiles.mixed_sm80 import MixedConfig, mixed_config
from ..tiles.select import tile_config

# Shared memory of a block that is not the kernel's.
_RESERVED_BYTES = 1 << 10

_Tiles = TypeVar("_Tiles", TileConfig, MixedConfig)


class LoadedKernel(Generic[_Tiles]):
    """A kernel on a device of so many SMs, with the number of its blocks that run at a time, and
    whether these can form clusters."""

    __slots__ = (
        "_device_index",
        "_max_clusters",
        "function",
        "has_clusters",
        "num_slots",
        "num_sms",
        "tiles",
    )

    def __init__(self, tiles: _Tiles, device_index: int) -> None:
        props = device_props(device_index)
        self.function = load_function(tiles.name, tiles.config, device_index, tiles.shared_bytes)
        blocks = _blocks_per_sm(self.function, tiles, props)
        self.num_slots = max(1, blocks) * props.num_sms
        self.num_sms = props.num_sms
        self.tiles: _Tiles = tiles
        self.has_clusters = tiles.name == "decode_sm80" and overlaps_launches(props.arch)
        self._device_index = device_index
        self._max_clusters: dict[int, int] = {}

    def max_clusters(self, cluster: int) -> int:
        """How many clusters of so many blocks run at a time."""
        if cluster not in self._max_clusters:
            result = self.num_slots // cluster
            if is_here(self._device_index):
                from cupy.cuda import Device

                with Device(self._device_index):
                    result = max_clusters(
                        self.function, self.tiles.threads, self.tiles.shared_bytes, cluster
                    )
            self._max_clusters[cluster] = result
        return self._max_clusters[cluster]


def _blocks_per_sm(function: int, tiles: TileConfig | MixedConfig, props: DeviceProps) -> int:
    """How many blocks run on an SM at a time; without a GPU as many as fit its shared memory, or as
    the registers of prefill_sm90 are dealt out for."""
    if not is_here(props.index):
        fitting = props.smem_per_sm // (tiles.shared_bytes + _RESERVED_BYTES)
        return min(fitting, min_blocks(tiles.config)) if tiles.name == "prefill_sm90" else fitting
    from cupy.cuda import Device, driver

    with Device(props.index):
        blocks: int = driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function, tiles.threads, tiles.shared_bytes
        )
    return blocks


@lru_cache(maxsize=4096)
def load_kernel(
    problem: AttentionProblem,
    row_class: str,
    device_index: int,
    is_batch: bool = False,
    page_size: int = 0,
    finds: str = "",
) -> LoadedKernel[TileConfig]:
    """The kernel for a problem and a row class on a device, compiled on first use. finds: see
    TileConfig.finding."""
    props = device_props(device_index)
    tiles = tile_config(
        problem, row_class, props.max_smem_per_block, is_batch, props.arch, page_size
    )
    return LoadedKernel(tiles.finding(finds), device_index)


@lru_cache(maxsize=1024)
def load_mixed(
    problem: AttentionProblem, large: str, small: str, device_index: int
) -> LoadedKernel[MixedConfig] | None:
    """The kernel for two row classes at once, compiled on first use; None if there is none."""
    props = device_props(device_index)
    tiles = mixed_config(problem, large, small, props.max_smem_per_block, props.arch)
    return None if tiles is None else LoadedKernel(tiles, device_index)

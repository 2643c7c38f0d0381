"""Launches the scan_mask kernel, which looks through a custom mask ahead of prefill_sm90.

It is told the same as the kernel behind it, and does for all KV heads what each would do again.
"""

from __future__ import annotations

from ... import jit
from ..driver.enqueue import Launch, load_function
from ..tiles.config import TileConfig

_THREADS = 512
# kernels/cupyattn/params/prefill_sm90.cuh, MaskMap.
MAP_BYTES = 2 * 2048 // 8


def config(tiles: TileConfig) -> jit.Config | None:
    """The kernel's Config ahead of these tiles; None if they have no mask to be looked through."""
    if not (tiles.is_sm90 and tiles.config["kCustomMask"]):
        return None
    return jit.Config(
        {
            "kTileQ": tiles.tile_q,
            "kTileKV": tiles.tile_kv,
            "kMaskForm": tiles.config["kMaskForm"],
            "LogitsExpression": tiles.config["LogitsExpression"],
            "kThreads": _THREADS,
            **({"kKeyShare": True} if tiles.config.get("kKeyShare") else {}),
        }
    )


def prologue(tiles: TileConfig, num_items: int, device_index: int) -> Launch | None:
    """The launch, if there is one. It leaves MAP_BYTES of each item."""
    kernel_config = config(tiles)
    if kernel_config is None or not num_items:
        return None
    function = load_function("scan_mask", kernel_config, device_index)
    return Launch(function, (num_items, 1, 1), _THREADS, 0)

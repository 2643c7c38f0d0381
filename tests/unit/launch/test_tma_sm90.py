"""What prefill_sm90 is told beside the struct of all attention kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.fake_gpu import MAX_SHARED

from cupyattn.core import dtypes
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.attention import tma_sm90
from cupyattn.launch.attention.swizzle import L2Swizzle
from cupyattn.launch.driver import params, tensor_map
from cupyattn.launch.tiles import prefill_sm90
from cupyattn.launch.tiles.config import HOPPER, Target

PROBLEM = AttentionProblem(*[dtypes.bfloat16] * 3, 128, 128)
# Words ahead of `many_blocks`: fourteen, an address, and the steps of boxes of Q and O.
MANY_BLOCKS = 14 + 2 + 2


@pytest.mark.parametrize("num_sms", [114, 132])
@pytest.mark.parametrize(
    ("name", "asks"), [("lean32", True), ("lean_persistent", False), ("persistent", False)]
)
def test_lean_blocks_are_many_by_the_card(
    num_sms: int, name: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on each SM are few. Other tiles do not ask."""
    monkeypatch.setattr(tma_sm90, "device_props", lambda index: SimpleNamespace(num_sms=num_sms))
    monkeypatch.setattr(tensor_map, "encode", lambda *args: bytes(tensor_map.BYTES))
    tiles = prefill_sm90.tiles(PROBLEM, name, Target(HOPPER, MAX_SHARED))
    heads = tma_sm90.Heads(PROBLEM, 2, 4, 0, device_index=0)
    strides = params.STRIDES.pack(1024, 128, 256, 128, 256, 128, 1024, 128, 8, 1, 0, 0)
    arguments = params.LaunchBuffer()
    maps = tma_sm90.Maps(heads, tiles, 12, L2Swizzle(2, False), strides, 100, 100)
    maps.pack(arguments, 4096, 8192, 12288, 16384)
    words = memoryview(arguments.struct()[params.ATTENTION.size :]).cast("I")
    assert words[0] == 12 and words[MANY_BLOCKS] == (2 * num_sms + 1 if asks else 0)

"""Constants of the estimate, which the GPU's planner has too."""

from __future__ import annotations

import re

from cupyattn.jit.source import kernels_dir
from cupyattn.schedule import balance


def test_constants_are_those_of_the_kernels() -> None:
    text = (kernels_dir() / "cupyattn/plan/balance.cuh").read_text(encoding="utf-8")
    found = {name: float(x) for name, x in re.findall(r"constexpr \w+ (\w+) = ([\d.]+)f?;", text)}
    assert found == {
        "kMaxWaves": balance.MAX_WAVES,
        "kMinGain": balance.MIN_GAIN,
        "kEven": balance._EVEN,
    }

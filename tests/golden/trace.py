"""The launches of a call in full, line by line, for people and for diff."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from helpers import fake_gpu

from cupyattn.launch.driver import params

from .cards import Launch
from .doors import Call
from .record import kernel_name, shape_text

_ATTENTION = ("decode_", "prefill_", "mixed_", "wide_", "merge_splits", "merge_levels", "scan_mask")
_WORDS_A_LINE = 12


def lines(call: Call) -> Iterator[str]:
    yield f"{call.door} {call.seed} on {call.card}: {call.text}"
    if call.error:
        yield f"  refused by {call.error}"
    for title, launches in (("", call.launches), ("again ", call.again)):
        for index, launch in enumerate(launches):
            yield f"  {title}{index}. {kernel_name(launch.kernel)}: {shape_text(launch)}"
            config = launch.kernel.config.replace("\n", " ").replace("static constexpr ", "")
            yield f"     {' '.join(config.split())}"
            yield from (f"     {line}" for line in _params(launch))
            words = np.frombuffer(launch.words[: len(launch.words) // 4 * 4], np.int32).tolist()
            for begin in range(0, len(words), _WORDS_A_LINE):
                yield f"     words {begin}: {words[begin : begin + _WORDS_A_LINE]}"


def _params(launch: Launch) -> Iterator[str]:
    """Fields of the struct that all kernels of attention share by name, the rest as words."""
    yield "at " + ", ".join(f"{offset}: {place}" for offset, place in launch.places)
    rest = launch.params
    if launch.kernel.name.startswith(_ATTENTION):
        size = params.ATTENTION.size
        named = fake_gpu.unpack(rest[:size])
        yield ", ".join(f"{n} {x}" for n, x in named.items() if n != "rope_step" and x)
        steps = np.array(named["rope_step"])
        if steps.any():
            yield f"rope_step {steps.tolist()}"
        rest = bytes(size) + rest[size:]
    numbers = np.frombuffer(rest, np.uint32)
    found = [f"{4 * i}: {int(numbers[i]):#x}" for i in np.flatnonzero(numbers)]
    if found:
        yield "bytes " + ", ".join(found)

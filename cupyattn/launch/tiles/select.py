"""Which kernel serves a problem: the first of a list that does not refuse it.

The kernels assert that `kSharedBytes` equals the size of their own shared-memory struct, so the
arithmetic of their files here cannot drift.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from ...core.problem import AttentionProblem
from ...errors import UnsupportedError
from . import decode_sm80, prefill_sm80, prefill_sm90, wide_decode_sm90, wide_sm80, wide_sm90
from .config import HOPPER, Target, TileConfig


class Kernel(Protocol):
    """The file of a kernel."""

    def refusal(self, problem: AttentionProblem, row_class: str, target: Target) -> str | None:
        """Why it does not serve requests of a row class; None if it does."""

    def tiles(self, problem: AttentionProblem, row_class: str, target: Target) -> TileConfig:
        """The tiles for requests of a row class that it does not refuse."""


# Those that run on every architecture come last.
KERNELS: tuple[Kernel, ...] = (
    prefill_sm90,
    wide_decode_sm90,
    wide_sm90,
    decode_sm80,
    prefill_sm80,
    wide_sm80,
)


@lru_cache(maxsize=4096)
def tile_config(
    problem: AttentionProblem,
    row_class: str,
    max_shared_bytes: int,
    is_batch: bool = False,
    arch: str = HOPPER,
    page_size: int = 0,
) -> TileConfig:
    """The tile configuration for a problem and a row class on a device of an architecture, with so
    much shared memory per block. UnsupportedError if no kernel serves it."""
    target, reason = Target(arch, max_shared_bytes, page_size, is_batch), None
    for kernel in (prefill_sm90,) if problem.has_tiles_of_prompts else KERNELS:
        reason = kernel.refusal(problem, row_class, target)
        if reason is None:
            return kernel.tiles(problem, row_class, target)
    if problem.block_scales:
        raise UnsupportedError(
            "q_block_scales, k_block_scales, v_block_scales: have one kernel, prefill_sm90 on "
            f"Hopper, which does not serve this call: {reason}; give each head one scale"
        )
    if problem.is_8bit:
        raise UnsupportedError(
            f"q: dtype {problem.dtype_q} has one kernel, prefill_sm90 on Hopper, which does not "
            f"serve this call: {reason}; cast q to float16 or bfloat16"
        )
    raise UnsupportedError(str(reason))

"""The merge_levels kernel, launched after the attention of a cascade."""

from __future__ import annotations

from functools import lru_cache

from ... import jit
from ...core.device import device_props, overlaps_launches
from ...core.problem import AttentionProblem
from ..driver.enqueue import Launch, load_function
from ..tiles.common import gate_constants

_WARPS = 4


@lru_cache(maxsize=1024)
def config(problem: AttentionProblem) -> jit.Config:
    """The kernel's Config."""
    return jit.Config(
        {
            "DTypeO": problem.dtype_o,
            "kHeadDimVO": problem.head_dim_vo,
            "kWarps": _WARPS,
            "kAligned": problem.aligned,
            **gate_constants(problem),
        }
    )


def prepare(
    problem: AttentionProblem, num_tokens: int, num_qo_heads: int, device_index: int
) -> Launch:
    """The merge of `num_tokens` query tokens; its arguments are those of the attention."""
    function = load_function("merge_levels", config(problem), device_index)
    grid = (num_tokens, -(-num_qo_heads // _WARPS), 1)
    early = overlaps_launches(device_props(device_index).arch)
    return Launch(function, grid, _WARPS * 32, 0, is_dependent=early)

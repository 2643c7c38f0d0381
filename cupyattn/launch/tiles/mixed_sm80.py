"""Configurations of mixed_sm80: one launch whose blocks are of prefill or of decode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ... import jit
from ...core.problem import AttentionProblem
from . import decode_sm80, prefill_sm80
from .common import common_constants, is_transformed
from .config import HOPPER, Target, TileConfig, min_blocks
from .row_classes import DECODE, LARGE, VERIFY

# Both kinds of a mixed kernel have these, on every architecture.
_MIXED_WARPS = 4


@dataclass(frozen=True)
class MixedConfig:
    """An instance whose blocks are of prefill or of decode, by the rows of their request."""

    name: str
    config: jit.Config
    prefill: TileConfig
    decode: TileConfig
    threads: int
    shared_bytes: int


@lru_cache(maxsize=1024)
def mixed_config(
    problem: AttentionProblem, large: str, small: str, max_shared_bytes: int, arch: str = HOPPER
) -> MixedConfig | None:
    """One kernel for the row classes `large` (of prefill) and `small` (of decode) of a batch.

    None if there is none: blocks must have as many warps, and a mask is not shared out. Twice the
    rows of decode would spill on old chips, beside what more than one scale does to a logit, and
    beside large tiles of more than 64 columns whose keys are in rows. Beside keys that ranks share
    they would too, and so would fp8 keys under a cap.
    """
    if problem.custom_mask or problem.is_wide:
        return None
    if problem.key_share and problem.soft_cap and problem.dtype_kv.is_fp8:
        return None
    is_wide = large == LARGE and problem.head_dim_vo > 64 and problem.dtype_kv.is_float16
    if small == VERIFY and (is_transformed(problem) or (is_wide and not problem.paged)):
        return None
    if small == VERIFY and problem.key_share:
        return None
    prefill = prefill_sm80.tiles(problem, large, Target(arch, max_shared_bytes), _MIXED_WARPS)
    decode = decode_sm80.of_verify(problem, max_shared_bytes) if small == VERIFY else None
    if small == DECODE:
        decode = decode_sm80.of_decode(problem, max_shared_bytes, is_mixed=True)
    warps = _MIXED_WARPS
    if decode is None or {prefill.threads, decode.threads} != {32 * warps}:
        return None
    both = prefill.config, decode.config
    config = {name: both[0][name] for name in common_constants(problem, False)}
    config["kRotateKeys"] = both[0]["kRotateKeys"] or both[1]["kRotateKeys"]
    config |= {"kWarps": warps, "kMinBlocks": min(min_blocks(x) for x in both)}
    for kind, own in zip(("Prefill", "Decode"), both, strict=True):
        config |= {f"k{kind}{name[1:]}": own[name] for name in own if name not in config}
    shared_bytes = max(prefill.shared_bytes, decode.shared_bytes)
    return MixedConfig("mixed_sm80", jit.Config(config), prefill, decode, 32 * warps, shared_bytes)

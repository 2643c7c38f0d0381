"""Seeded random calls whose queries, keys and values have 8 bits.

Single requests are `cases.Case`s, batches `batch_cases.Case`s: options come from their generators,
and what no kernel multiplies in 8 bits is left out. `Served` says what a kernel serves so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from . import batch_cases, cases
from .cases import pick

E4M3, INT8 = "float8_e4m3fn", "int8"


@dataclass(frozen=True)
class Served:
    """What cases are drawn from: all that the reference serves, unless less is named."""

    dtypes: tuple[str, ...] = (E4M3, INT8)
    dims: tuple[tuple[int, int], ...] = (
        *((128, 128), (64, 64), (96, 96), (256, 256), (192, 128)),
        (48, 40),
    )
    o_dtypes: tuple[str | None, ...] = (None, None, "float16", "float32", E4M3)
    has_caps: bool = True
    has_masks: bool = True
    has_alibi: bool = True
    has_rope: bool = True
    has_unaligned: bool = True
    most_keys: int = 4000
    page_sizes: tuple[int, ...] = ()  # others become the first; any if empty


EVERYTHING = Served()
# What prefill_sm90 multiplies.
PREFILL_SM90 = Served(
    dtypes=(E4M3,),
    dims=((128, 128), (64, 64), (96, 96), (192, 128)),
    o_dtypes=(None, None, "float16", "float32", E4M3),
    has_masks=False,
    has_rope=False,
    has_unaligned=False,
    page_sizes=(16, 8, 32, 64),
)


def _encoding(rng: np.random.Generator, served: Served) -> str:
    draw = rng.random()
    if served.has_alibi and draw < 0.1:
        return "ALIBI"
    return "ROPE_LLAMA" if served.has_rope and draw > 0.95 else "NONE"


def single(seed: int, served: Served = EVERYTHING) -> cases.Case:
    """One request; the same for the same seed."""
    rng = np.random.default_rng((seed, 471))
    case = cases.random_case(seed)
    dtype, dims = pick(rng, served.dtypes), pick(rng, served.dims)
    case = replace(
        case,
        dtype=dtype,
        kv_dtype=E4M3,
        o_dtype=pick(rng, served.o_dtypes),
        head_dim_qk=dims[0],
        head_dim_vo=dims[1],
    )
    if not served.has_unaligned:
        strides = tuple("padded" if x == "unaligned" else x for x in case.strides)
        case = replace(case, strides=strides)
    encoding = case.pos_encoding_mode
    is_served = {"ALIBI": served.has_alibi, "ROPE_LLAMA": served.has_rope}
    case = replace(case, pos_encoding_mode=encoding if is_served.get(encoding, True) else "NONE")
    if not served.has_caps:
        case = replace(case, logits_soft_cap=None)
    if not served.has_masks:
        case = replace(case, mask_kind="none")
    if dtype == INT8:  # its numbers mean nothing without their units
        kinds = [x if x != "none" else "float" for x in (case.scale_q, case.scale_k)]
        case = replace(case, scale_q=kinds[0], scale_k=kinds[1])
    return cases.bounded(replace(case, kv_len=min(case.kv_len, served.most_keys)), rng)


def batch(seed: int, served: Served = EVERYTHING) -> batch_cases.Case:
    """A batch of a prefill wrapper; the same for the same seed."""
    rng = np.random.default_rng((seed, 472))
    case = batch_cases.random_case(seed)
    wrapper = "ragged" if case.page_size == 0 else "paged"
    problem = batch_cases.Problem(
        pick(rng, served.dtypes),
        E4M3,
        pick(rng, served.dims),
        o_dtype=None if wrapper == "ragged" else pick(rng, served.o_dtypes),
        pos_encoding_mode=_encoding(rng, served),
        is_capped=served.has_caps and bool(rng.random() < 0.2),
        is_masked=served.has_masks and bool(rng.random() < 0.15),
    )
    # One tensor holds keys and values of one dtype and head dim.
    is_pair = case.is_pair or problem.dims[0] != problem.dims[1] or problem.dtype == INT8
    lengths = tuple(min(n, served.most_keys) for n in case.kv_len)
    case = replace(case, wrapper=wrapper, problem=problem, is_pair=is_pair, kv_len=lengths)
    if wrapper == "paged" and served.page_sizes and case.page_size not in served.page_sizes:
        case = replace(case, page_size=served.page_sizes[0])
    return case

"""Tile configurations of wide_sm90: heads of 512 columns on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ... import jit
from ...core.dtypes import DType, float8_e4m3fn
from ...core.problem import KEY_SCALES, AttentionProblem
from ..driver import tensor_map
from .common import PATTERN_BYTES, gate_constants, panels, share_constants
from .config import (
    Field,
    Target,
    TileConfig,
    refusal_by_room,
    refusal_of_hopper,
    struct_of,
)
from .row_classes import DECODE, VERIFY

# Head dims of q, k and of v, o. The first are those of latent attention, 512 and 64 rotated ones:
# values are the first columns of keys. Others have values of their own, and as many stages of keys
# as shared memory has room for.
LATENT = (576, 512)
LISTED_PAGES = (512, 512)  # of rows whose scales lie behind all rows of a page
ORDINARY = {(512, 512): 2, (256, 512): 3}
TILE_Q = 64
# A producer and two consumer warpgroups, and the registers of a thread of each kind; those of a
# producer that also converts what boxes bring; and with two producers, which gather and convert.
_THREADS, _REGISTERS = 3 * 128, (40, 232)
_REGISTERS_CONVERTED = 56, 224
_THREADS_GATHERED, _REGISTERS_GATHERED = 4 * 128, (48, 208)
_REGISTERS_OF_HALVES = 72, 216  # two consumers that both make scores, of lists
_REGISTERS_OF_LISTS = 40, 216  # consumers of lists that hide keys, without scales
# So many splits of a tile of so many rows of latent attention are merged by the last of its blocks,
# and so many of few rows of other wide heads.
FUSED_SPLITS, FUSED_SPLITS_OF_FEW = {16: 8, 32: 8, 64: 4}, 8
ITEM_BYTES = 104
# What is known of rows in a merge, and what two consumers tell each other that both make scores.
_BYTES_OF_HALVES = 64 * 24 + 2 * 528 + 256 + 24


def refusal(problem: AttentionProblem, row_class: str, target: Target) -> str | None:
    """Why it does not serve requests of a row class; None if it does."""
    result = refusal_of_problem(problem, target)
    return result or refusal_by_room(tiles(problem, row_class, target), target)


def refusal_of_problem(problem: AttentionProblem, target: Target) -> str | None:
    """Why neither of Hopper's kernels of wide heads serves a problem; None if one does."""
    if not problem.is_wide:
        return "heads of up to 256 columns have kernels of their own"
    unserved = _unserved(problem)
    return refusal_of_hopper(target) or (f"it does not serve {unserved}" if unserved else None)


def tiles(problem: AttentionProblem, row_class: str, target: Target) -> TileConfig:
    """The tiles for requests of a row class. Pages without a factor 8 are gathered row by row."""
    return config(
        problem.dtype_q,
        problem.dtype_o,
        (problem.head_dim_qk, problem.head_dim_vo),
        dtype_kv=problem.dtype_kv,
        key_scales=problem.key_scales,
        paged=problem.paged,
        sparse=problem.sparse,
        tma=has_latent_boxes(problem, target.page_size),
        fused_splits=FUSED_SPLITS_OF_FEW if row_class in (DECODE, VERIFY) else 0,
        more={**gate_constants(problem), **share_constants(problem)},
    )


def _unserved(problem: AttentionProblem) -> str:
    """What of a problem of wide heads these kernels do not serve; "" if they serve all."""
    head_dims = problem.head_dim_qk, problem.head_dim_vo
    if problem.latent:
        if head_dims != (LISTED_PAGES if problem.key_scales == "pages" else LATENT):
            return f"latent heads of {head_dims[1]} and {head_dims[0] - head_dims[1]} columns"
        if not problem.paged:
            return "latent keys without pages"
    elif head_dims not in ORDINARY:
        return f"head dims {head_dims[0]}/{head_dims[1]}"
    has_fp8 = problem.latent and problem.dtype_kv is float8_e4m3fn
    if not (has_fp8 or problem.dtype_kv is problem.dtype_q):
        return f"keys of {problem.dtype_kv}"
    if not problem.aligned:
        return "rows off 16-byte boundaries"
    options = {
        "a soft cap": problem.soft_cap,
        "a mask": problem.custom_mask,
        "scales by head": problem.prescale_logits,
        problem.pos_encoding: problem.pos_encoding != "NONE",
        "values with pages of their own": problem.own_value_pages,
    }
    return next((name for name, has in options.items() if has), "")


def has_boxes(page_size: int) -> bool:
    """Whether the copy engine brings keys of such pages."""
    return tensor_map.box_rows(page_size, 64) > 0


def has_latent_boxes(problem: AttentionProblem, page_size: int) -> bool:
    """Whether it brings those of this problem."""
    has_rows = problem.sparse or bool(problem.key_scales)
    return problem.latent and not has_rows and has_boxes(page_size)


def config(
    dtype: DType,
    dtype_o: DType,
    head_dims: tuple[int, int] = LATENT,
    *,
    dtype_kv: DType | None = None,
    key_scales: str = "",
    paged: bool = True,
    sparse: bool = False,
    tma: bool = False,
    fused_splits: int = 0,
    more: Mapping[str, jit.Constant] = MappingProxyType({}),
) -> TileConfig:
    """The instance for queries and keys of one type, or for latent keys of e4m3.

    dtype_kv: e4m3, which is converted in shared memory, or as `dtype`, that of queries.
    key_scales: of e4m3 keys (core.problem.KEY_SCALES).
    sparse: kv_indices has an entry for each key, its slot, or a negative number for none.
    tma: boxes of pages bring latent keys, by maps of launch/attention/tma_wide.py.
    fused_splits: so many splits of a tile of ordinary heads are merged by its last block.
    more: constants of options (common.gate_constants, share_constants).
    """
    dtype_kv = dtype_kv or dtype
    head_dim_qk, head_dim_vo = head_dims
    is_latent = head_dims == LATENT or key_scales == "pages"
    # Lists of 16-bit keys: both consumers make scores, and blocks take several tokens.
    alternates = sparse and not dtype_kv.is_fp8
    threads, registers = _threads_and_registers(dtype_kv.is_fp8, sparse, tma, bool(key_scales))
    # Queries become float16 beside e4m3 keys that have no scales of their own.
    scales_rows = dtype_kv.is_fp8 and not key_scales
    # Where values are not keys too, twice 64 keys do not fit.
    tile_kv, stages = (64, 2) if is_latent else (32, ORDINARY[head_dims])
    num_pieces = 2 if is_latent else 3
    # Blocks take several items where 16-bit keys come in boxes, or by lists.
    of_boxes = tma and not dtype_kv.is_fp8 and "kKeyShare" not in more
    num_items = 2 if of_boxes or alternates else 1
    values = [] if is_latent else [panels(tile_kv, head_dim_vo, stages)]
    shared = struct_of(
        *values,
        panels(TILE_Q, head_dim_qk, 1),
        panels(tile_kv, head_dim_qk, stages),
        Field(_BYTES_OF_HALVES, PATTERN_BYTES) if alternates else panels(TILE_Q, tile_kv, 1),
        Field(4 * (1 + num_items) * TILE_Q),  # factors and normalisers
        Field(4 * 4),  # raised
        Field(4),  # is_last
        Field(4 * (TILE_Q if scales_rows else 1)),  # row_scales
        Field(32, 16),  # constants of logits
        Field(20),  # facts of a row, which no logit here takes
        Field(2 * stages * 8),  # nonfinite keys
        Field(stages * tile_kv if sparse else 1),
        Field(num_items * ITEM_BYTES, 8),
        Field(8 * (4 + 3 * num_items + 2 * num_pieces * stages), 8),
        Field(8 * num_pieces * (stages if dtype_kv.is_fp8 and tma else 1)),  # landed
    ).size
    constants: dict[str, jit.Constant] = {
        "DTypeQ": dtype,
        "DTypeKV": dtype_kv,
        "DTypeO": dtype_o,
        "kHeadDimQK": head_dim_qk,
        "kHeadDimVO": head_dim_vo,
        "kHeadDimRope": head_dim_qk - head_dim_vo if is_latent else 0,
        "kKeyScales": KEY_SCALES.index(key_scales),
        "kLatent": is_latent,
        "kSparse": sparse,
        "kTma": tma,
        "kPaged": paged,
        "kFusedSplits": FUSED_SPLITS[TILE_Q] if is_latent else fused_splits,
        "kTileQ": TILE_Q,
        "kTileKV": tile_kv,
        "kStages": stages,
        "kProducerRegisters": registers[0],
        "kConsumerRegisters": registers[1],
        "kSharedBytes": shared,
    }
    if alternates:
        constants["kAlternates"] = True
    return TileConfig(
        "wide_sm90", jit.Config({**constants, **more}), TILE_Q, tile_kv, threads, shared
    )


def _threads_and_registers(
    is_fp8: bool, sparse: bool, tma: bool, has_scales: bool
) -> tuple[int, tuple[int, int]]:
    """Of a block, and of a thread of its producers and of its consumers."""
    if not is_fp8:
        return _THREADS, _REGISTERS_OF_HALVES if sparse else _REGISTERS
    if tma:
        return _THREADS, _REGISTERS_CONVERTED
    hides_keys = sparse and not has_scales
    return _THREADS_GATHERED, _REGISTERS_OF_LISTS if hides_keys else _REGISTERS_GATHERED

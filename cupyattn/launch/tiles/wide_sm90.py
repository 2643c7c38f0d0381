"""Tile configurations of wide_sm90 (multi-head latent attention on Hopper), and what it serves."""

from __future__ import annotations

from ... import jit
from ...core.dtypes import DType
from ...core.problem import AttentionProblem
from .config import Field, TileConfig, struct_of

LATENT_DIM, ROPE_DIM = 512, 64
TILE_Q, TILE_KV, STAGES = 64, 64, 2
# A producer and two consumer warpgroups, and the registers of a thread of each kind.
THREADS = 3 * 128
_REGISTERS = (40, 232)
# The row class of requests of more than one tile (select.ROW_CLASSES).
_LARGE = "large"
_PATTERN_BYTES = 1024
_ITEM_BYTES = 104


def choose(
    problem: AttentionProblem, rows: str, max_shared_bytes: int, page_size: int
) -> TileConfig | None:
    """The instance for a problem, or None: the portable kernel serves it.

    rows, the row class, decides by what a tile of keys is bound: requests of one tile of rows wait
    for memory, others for products. page_size decides nothing.
    """
    is_latent, is_sparse = (getattr(problem, name, False) for name in ("latent", "sparse"))
    has_dims = (problem.head_dim_qk, problem.head_dim_vo) == (LATENT_DIM + ROPE_DIM, LATENT_DIM)
    has_option = (
        problem.soft_cap
        or problem.custom_mask
        or problem.prescale_logits
        or problem.pos_encoding != "NONE"
        or problem.own_value_pages
    )
    is_served = problem.paged and problem.aligned and problem.dtype_kv is problem.dtype_q
    if not (is_latent and has_dims and is_served) or has_option:
        return None
    tiles = config(problem.dtype_q, problem.dtype_o, overlaps=rows == _LARGE, sparse=is_sparse)
    return tiles if tiles.shared_bytes <= max_shared_bytes else None


def config(
    dtype: DType, dtype_o: DType, *, overlaps: bool = True, sparse: bool = False
) -> TileConfig:
    """The instance for queries and keys of one type.

    overlaps: O += P V of a tile runs beside the softmax of the next, which must have landed.
    sparse: kv_indices has an entry for each key, its slot, or a negative number for none.
    """
    row_bytes = 2 * (LATENT_DIM + ROPE_DIM)
    shared = struct_of(
        Field(TILE_Q * row_bytes, _PATTERN_BYTES),
        Field(STAGES * TILE_KV * row_bytes, _PATTERN_BYTES),
        Field(2 * TILE_Q * TILE_KV, _PATTERN_BYTES),
        Field(4 * 2 * TILE_Q),  # factors and normalisers
        Field(4 * 4),  # raised
        Field(32, 16),  # constants of logits
        Field(20),  # facts of a row, which no logit here takes
        Field(STAGES * TILE_KV if sparse else 1),
        Field(_ITEM_BYTES, 8),
        Field(8 * (4 + 4 * STAGES), 8),
    ).size
    constants: dict[str, int | bool | DType] = {
        "DTypeQ": dtype,
        "DTypeKV": dtype,
        "DTypeO": dtype_o,
        "kHeadDimQK": LATENT_DIM + ROPE_DIM,
        "kHeadDimVO": LATENT_DIM,
        "kHeadDimRope": ROPE_DIM,
        "kLatent": True,
        "kSparse": sparse,
        "kPaged": True,
        "kIntraWarpgroupOverlap": overlaps,
        "kTileQ": TILE_Q,
        "kTileKV": TILE_KV,
        "kStages": STAGES,
        "kProducerRegisters": _REGISTERS[0],
        "kConsumerRegisters": _REGISTERS[1],
        "kSharedBytes": shared,
    }
    return TileConfig("wide_sm90", jit.Config(constants), TILE_Q, TILE_KV, THREADS, shared)

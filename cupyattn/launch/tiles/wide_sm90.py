"""Tile configurations of wide_sm90 and wide_decode_sm90 (heads of 512 columns on Hopper), and
which problems they serve."""

from __future__ import annotations

from ... import jit
from ...core.dtypes import DType, float8_e4m3fn
from ...core.problem import KEY_SCALES, AttentionProblem
from ..driver import tensor_map
from .config import Field, TileConfig, round_up, struct_of

# Head dims of q, k and of v, o. The first are those of latent attention, 512 and 64 rotated ones:
# values are the first columns of keys. Others have values of their own, and as many stages of keys
# as shared memory has room for.
LATENT = (576, 512)
ORDINARY = {(512, 512): 2, (256, 512): 3}
TILE_Q = 64
# A producer and two consumer warpgroups, and the registers of a thread of each kind; those of a
# producer that also converts what boxes bring; and with two producers, which gather and convert.
_THREADS, _REGISTERS = 3 * 128, (40, 232)
_REGISTERS_CONVERTED = 56, 224
_THREADS_GATHERED, _REGISTERS_GATHERED = 4 * 128, (48, 208)
# The packed rows of wide_decode_sm90, by the row class (select.ROW_CLASSES).
_DECODE_ROWS = {"decode": 16, "verify": 32}
# So many splits of a tile of so many rows of latent attention are merged by the last of its blocks,
# and so many of few rows of other wide heads.
FUSED_SPLITS, FUSED_SPLITS_OF_FEW = {16: 8, 32: 8, 64: 4}, 8
_PATTERN_BYTES = 1024
_ITEM_BYTES = 104


def choose(
    problem: AttentionProblem, rows: str, max_shared_bytes: int, page_size: int
) -> TileConfig | None:
    """The instance for a problem, or None: the portable kernel serves it.

    Latent attention of few rows has a kernel of its own. Pages without a factor 8 are gathered row
    by row.
    """
    if refusal(problem):
        return None
    is_latent, is_sparse = problem.latent, problem.sparse
    head_dims = problem.head_dim_qk, problem.head_dim_vo
    has_few_rows = is_latent and rows in _DECODE_ROWS
    tma = is_latent and not (is_sparse or problem.key_scales) and has_boxes(page_size)
    if has_few_rows:
        tiles = decode_config(
            problem.dtype_q,
            problem.dtype_o,
            _DECODE_ROWS[rows],
            dtype_kv=problem.dtype_kv,
            key_scales=problem.key_scales,
            sparse=is_sparse,
            tma=tma,
        )
    else:
        tiles = config(
            problem.dtype_q,
            problem.dtype_o,
            head_dims,
            dtype_kv=problem.dtype_kv,
            key_scales=problem.key_scales,
            paged=problem.paged,
            sparse=is_sparse,
            tma=tma,
            fused_splits=FUSED_SPLITS_OF_FEW if rows in _DECODE_ROWS else 0,
        )
    return tiles if tiles.shared_bytes <= max_shared_bytes else None


def refusal(problem: AttentionProblem) -> str:
    """Why these kernels do not serve a problem of wide heads; "" if they do."""
    head_dims = problem.head_dim_qk, problem.head_dim_vo
    if problem.latent:
        if head_dims != LATENT:
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
) -> TileConfig:
    """The instance for queries and keys of one type, or for latent keys of e4m3.

    dtype_kv: e4m3, which is converted in shared memory, or as `dtype`, that of queries.
    key_scales: of e4m3 keys (core.problem.KEY_SCALES).
    sparse: kv_indices has an entry for each key, its slot, or a negative number for none.
    tma: boxes of pages bring latent keys, by maps of launch/attention/tma_wide.py.
    fused_splits: so many splits of a tile of ordinary heads are merged by its last block.
    """
    dtype_kv = dtype_kv or dtype
    head_dim_qk, head_dim_vo = head_dims
    is_latent = head_dims == LATENT
    threads, registers = _THREADS, _REGISTERS
    if dtype_kv.is_fp8 and tma:
        registers = _REGISTERS_CONVERTED
    elif dtype_kv.is_fp8:
        threads, registers = _THREADS_GATHERED, _REGISTERS_GATHERED
    # Queries become float16 beside e4m3 keys that have no scales of their own.
    scales_rows = dtype_kv.is_fp8 and not key_scales
    # Where values are not keys too, twice 64 keys do not fit.
    tile_kv, stages = (64, 2) if is_latent else (32, ORDINARY[head_dims])
    num_pieces = 2 if is_latent else 3
    values = [] if is_latent else [_panels(tile_kv, head_dim_vo, stages)]
    shared = struct_of(
        *values,
        _panels(TILE_Q, head_dim_qk, 1),
        _panels(tile_kv, head_dim_qk, stages),
        _panels(TILE_Q, tile_kv, 1),
        Field(4 * 2 * TILE_Q),  # factors and normalisers
        Field(4 * 4),  # raised
        Field(4),  # is_last
        Field(4 * (TILE_Q if scales_rows else 1)),  # row_scales
        Field(32, 16),  # constants of logits
        Field(20),  # facts of a row, which no logit here takes
        Field(2 * stages * 8),  # nonfinite keys
        Field(stages * tile_kv if sparse else 1),
        Field(_ITEM_BYTES, 8),
        Field(8 * (4 + 2 * num_pieces * stages), 8),
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
    return TileConfig("wide_sm90", jit.Config(constants), TILE_Q, tile_kv, threads, shared)


def decode_config(
    dtype: DType,
    dtype_o: DType,
    tile_q: int,
    *,
    dtype_kv: DType | None = None,
    key_scales: str = "",
    sparse: bool = False,
    tma: bool = False,
) -> TileConfig:
    """The instance of wide_decode_sm90 for up to `tile_q` packed rows, 16 or 32.

    dtype_kv: e4m3, or as `dtype`, that of queries.
    key_scales: of e4m3 keys (core.problem.KEY_SCALES).
    """
    dtype_kv = dtype_kv or dtype
    head_dim_qk, head_dim_vo = LATENT
    tile_kv, num_pieces = 64, 2
    stages, keys, consumers = 2, _panels(tile_kv, head_dim_qk, 2), 1
    if dtype_kv.is_fp8:
        # One that converts keys would wait for its own results for longer than memory takes. Of 32
        # rows there are not the registers for two.
        consumers = 2 if tile_q == 16 else 1
        row_bytes = head_dim_qk
        if key_scales == "rows":
            row_bytes = head_dim_vo + 16 + 2 * (head_dim_qk - head_dim_vo)
        stages = 4 if key_scales == "rows" else 5
        keys = Field(stages * tile_kv * row_bytes, _PATTERN_BYTES)
    shared = struct_of(
        _panels(tile_q, head_dim_qk, 1),
        keys,
        _panels(tile_q, tile_kv, consumers),
        Field(4 * 4 * tile_q * consumers, 16),  # of_warps
        Field(4 * tile_q * consumers),  # factors
        Field(4 * (tile_q if dtype_kv.is_fp8 else 1)),  # row_scales
        Field(8 * consumers),  # nonfinite keys
        Field(4),  # is_last
        Field(4 * tile_kv * (stages if key_scales == "tokens" else 1)),
        Field(stages * tile_kv if sparse else 1),
        Field(_ITEM_BYTES, 8),
        Field(8 * (1 + 2 * num_pieces * stages), 8),
    ).size
    constants: dict[str, int | bool | DType] = {
        "DTypeQ": dtype,
        "DTypeKV": dtype_kv,
        "DTypeO": dtype_o,
        "kHeadDimQK": head_dim_qk,
        "kHeadDimVO": head_dim_vo,
        "kHeadDimRope": head_dim_qk - head_dim_vo,
        "kKeyScales": KEY_SCALES.index(key_scales),
        "kLatent": True,
        "kSparse": sparse,
        "kTma": tma,
        "kPaged": True,
        "kConsumers": consumers,
        "kFusedSplits": FUSED_SPLITS[tile_q],
        "kTileQ": tile_q,
        "kTileKV": tile_kv,
        "kStages": stages,
        "kSharedBytes": shared,
    }
    name, threads = "wide_decode_sm90", 128 * (1 + consumers)
    return TileConfig(name, jit.Config(constants), tile_q, tile_kv, threads, shared)


def _panels(rows: int, columns: int, count: int) -> Field:
    """`count` tiles (PanelTile) of 16-bit elements."""
    return Field(count * rows * 2 * round_up(columns, 64), _PATTERN_BYTES)

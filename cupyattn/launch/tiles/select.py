"""Tile configurations of the attention kernels, and the shared memory they need.

`tile_config` is the one place that knows which tile serves which problem. The kernels assert that
`kSharedBytes` equals the size of their own shared-memory struct, so this arithmetic cannot drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ... import jit
from ...core import env
from ...core.dtypes import bfloat16
from ...core.problem import AttentionProblem
from . import sm90, wide, wide_sm90
from .common import LOGIT_BYTES, NONFINITE_BYTES, ROW_BYTES, common_constants, tile_field
from .config import Field as _Field
from .config import TileConfig
from .config import struct_of as _struct

# Row classes, and the most packed query rows of each but the last.
DECODE, VERIFY, SMALL, LARGE = ROW_CLASSES = "decode", "verify", "small", "large"
MOST_ROWS = {DECODE: 16, VERIFY: 32, SMALL: 64}
# Tiles of the last class: the one for long launches, and others for work lists that fill the card
# badly with it.
LARGE_TILES = (LARGE, "broad", "twin", "tall", "middle", "short", "queue", "lean", "flat")
# The classes of such rows in batches of so few blocks that each may have an SM of its own.
FEW = {DECODE: "few decode", VERIFY: "few verify"}
# Tiles of 32 wider rows do not fit the registers of such blocks.
_MOST_DIM_OF_FEW_VERIFY = 128

_MASK_MAP_BYTES = 4 + 2 * 4096 // 8
_PLACEHOLDER = 16
_WORK_BYTES = 64
_RANGE_BYTES = (6 + 3 + 1) * 4
# Both kinds of a mixed kernel have these, on every architecture.
_MIXED_WARPS = 4


def few_rows(problem: AttentionProblem, rows: str) -> str | None:
    """The class of the same rows where a batch has few blocks; None if there is none."""
    if problem.is_wide or rows not in FEW:
        return None
    if rows == VERIFY and problem.head_dim_vo > _MOST_DIM_OF_FEW_VERIFY:
        return None
    return FEW[rows]


def row_class(rows: int) -> str:
    """The kernel family for this many packed query rows (query tokens times group size)."""
    for name, most in MOST_ROWS.items():
        if rows <= most:
            return name
    return LARGE


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
    problem: AttentionProblem, large: str, small: str, max_shared_bytes: int, arch: str = "sm_90a"
) -> MixedConfig | None:
    """One kernel for the row classes `large` (of prefill) and `small` (of decode) of a batch.

    None if there is none: blocks must have as many warps, and a mask is not shared out. Twice the
    rows of decode would spill on old chips, beside what more than one scale does to a logit, and
    beside large tiles of more than 64 columns whose keys are in rows.
    """
    if problem.custom_mask or problem.is_wide:
        return None
    is_wide = large == LARGE and problem.head_dim_vo > 64 and problem.dtype_kv.is_float16
    if small == VERIFY and (_is_transformed(problem) or (is_wide and not problem.paged)):
        return None
    prefill = _choose_prefill(problem, large, max_shared_bytes, True, arch, most_warps=_MIXED_WARPS)
    decode = _choose_verify(problem, max_shared_bytes) if small == VERIFY else None
    if small == DECODE:
        decode = _choose_decode(problem, max_shared_bytes, is_mixed=True)
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


def min_blocks(config: jit.Config) -> int:
    """How many blocks an SM has registers for, by what the kernel is compiled with."""
    blocks = config["kMinBlocks"]
    assert isinstance(blocks, int)
    return blocks


@lru_cache(maxsize=4096)
def tile_config(
    problem: AttentionProblem,
    rows: str,
    max_shared_bytes: int,
    is_batch: bool = False,
    arch: str = "sm_90a",
    page_size: int = 0,
) -> TileConfig:
    """The tile configuration for a problem and a row class on a device of an architecture, with so
    much shared memory per block. The page size is looked at where it decides how keys are copied.
    """
    if problem.is_wide:
        if arch == "sm_90a" and not env.PORTABLE.flag():
            chosen = wide_sm90.choose(problem, rows, max_shared_bytes, page_size)
            if chosen is not None:
                return chosen
        return wide.choose(problem, MOST_ROWS.get(rows, MOST_ROWS[SMALL]), max_shared_bytes)
    if arch == "sm_90a" and rows in LARGE_TILES and not env.PORTABLE.flag():
        chosen = sm90.choose(problem, max_shared_bytes, page_size, rows)
        if chosen is not None:
            return chosen
    return portable_config(problem, rows, max_shared_bytes, is_batch, arch)


def portable_config(
    problem: AttentionProblem,
    rows: str,
    max_shared_bytes: int,
    is_batch: bool = False,
    arch: str = "sm_90a",
) -> TileConfig:
    """`tile_config` of the kernels that run on every architecture."""
    if rows in FEW.values():
        return _choose_few(problem, max_shared_bytes, 2 if rows == FEW[VERIFY] else 1)
    if rows == DECODE:
        return _choose_decode(problem, max_shared_bytes)
    if rows == VERIFY and (tiles := _choose_verify(problem, max_shared_bytes)):
        return tiles
    return _choose_prefill(problem, rows, max_shared_bytes, is_batch, arch)


def _choose_prefill(
    problem: AttentionProblem,
    rows: str,
    max_shared_bytes: int,
    is_batch: bool,
    arch: str,
    most_warps: int = 8,
) -> TileConfig:
    # Every tile of query rows rotates the keys again, unless a pass of its own has done it; that
    # pass takes the keys of one request, as the 16-bit rows that it leaves.
    is_rotated_ahead = rows == LARGE and problem.aligned and problem.dtype_kv.is_float16
    rotates_keys = problem.pos_encoding == "ROPE_LLAMA" and (is_batch or not is_rotated_ahead)
    # What was tuned on sm_90, to the last register; elsewhere, and with pages, it would spill.
    is_measured = arch == "sm_90a" and not problem.paged and problem.dtype_kv.is_float16
    # 32 rows a warp halve the shared-memory traffic of K and V, but O takes 32 x dim_vo registers
    # a warp, and fp8 fragments need registers of their own: then a warp takes 16.
    wide = rows == LARGE and problem.head_dim_vo <= 128 and not problem.dtype_kv.is_fp8
    mma_q = 2 if wide else 1
    q_in_registers = max(problem.head_dim_qk, problem.head_dim_vo) <= 64
    # Two blocks an SM, if they fit; past 128 columns one block of eight warps, which halves what
    # comes from L2. A block takes 1 KB more than it asks for. Warps of 16 rows, and the long way of
    # a capped logit, gain from loading a whole tile ahead; other warps of 32 want the registers and
    # the power that a second buffer costs.
    two_blocks = (max_shared_bytes + 1024) // 2 - 1024
    layouts = [(4, 2, 1, two_blocks), (4, 2, 1, max_shared_bytes)]
    loads_ahead = not wide or (problem.soft_cap and is_measured)
    if loads_ahead and not (problem.dtype_kv.is_fp8 and rotates_keys):
        layouts.insert(0, (4, 2, 2, two_blocks))
        if not wide and rows == LARGE and problem.head_dim_vo > 128 and most_warps >= 8:
            layouts.insert(0, (8, 1, 2, max_shared_bytes))
    shapes = _key_shapes(problem, wide, arch, is_mixed=most_warps < 8)
    is_plain = not (_is_transformed(problem) or problem.custom_mask)
    is_square = problem.head_dim_qk == problem.head_dim_vo
    if layouts[0][0] == 8 and is_measured and is_plain and is_square and not rotates_keys:
        # Warps of 16 rows are bound by what they read of shared memory. Q stays in registers where
        # fewer keys make room for it without spills.
        q_in_registers, shapes = True, [(48, 16)]
    for warps, blocks, buffers, budget in layouts:
        for tile_kv, keys_per_exp in shapes[:1] if budget == two_blocks else shapes:
            tiles = prefill_tiles(
                problem,
                mma_q,
                warps,
                tile_kv,
                blocks,
                q_in_registers,
                keys_per_exp,
                buffers,
                rotates_keys,
            )
            if tiles.shared_bytes <= budget:
                return tiles
    raise AssertionError(f"no prefill tile fits {max_shared_bytes} bytes of shared memory")


def _is_transformed(problem: AttentionProblem) -> bool:
    """True if more than one scale stands between the product and the softmax."""
    return problem.soft_cap or problem.prescale_logits or problem.biases_logits


def _key_shapes(
    problem: AttentionProblem, wide: bool, arch: str, is_mixed: bool
) -> list[tuple[int, int]]:
    """(tile_kv, keys_per_exp), best first: measured on sm_90a, and without spills everywhere.

    What a logit goes through takes registers from the keys, and which schedules fit into 255 of
    them differs by architecture; tests/compile allows no spills.
    """
    dim = max(problem.head_dim_qk, problem.head_dim_vo)
    if problem.has_long_transform:
        first = (32, 16) if dim <= 128 else (16, 16)
        return [first, (16, 16)]
    is_blackwell = arch in ("sm_100a", "sm_120a")
    if not wide:
        first = (16, 16) if is_blackwell and problem.custom_mask and dim > 128 else (64, 16)
        if problem.dtype_kv.is_fp8 and dim > 128 and arch != "sm_90a":
            # Slopes beside scales of rows, which bfloat16 has over fp8, take two registers more.
            has_both = problem.biases_logits and problem.dtype_q is bfloat16
            first = (16, 16) if has_both and arch == "sm_80" else (32, 16)
    elif dim <= 64:
        first = (64, 16)
    elif dim > 128:
        first = (16, 16) if is_blackwell and _is_transformed(problem) else (32, 16)
    elif (
        is_blackwell
        or (problem.soft_cap and (problem.paged or arch != "sm_90a"))
        or (is_mixed and (_is_transformed(problem) or not problem.aligned))
        or (is_mixed and problem.pos_encoding == "ROPE_LLAMA" and arch == "sm_90a")
        or (problem.custom_mask and problem.head_dim_qk < problem.head_dim_vo)
        or (problem.biases_logits and problem.paged and arch == "sm_90a")
    ):
        first = (32, 32)
    else:
        first = (48, 16) if problem.soft_cap else (48, 48)
    return [first, (32, 16), (16, 16)]


def _choose_verify(problem: AttentionProblem, max_shared_bytes: int) -> TileConfig | None:
    """Twice the rows of decode, where O of 32 rows fits a warp's registers."""
    dim = max(problem.head_dim_qk, problem.head_dim_vo)
    # Q is read again for each tile: twice the bytes of 16 keys, if they have so few (measured).
    is_short = dim <= 64 or (problem.dtype_kv.is_fp8 and problem.paged)
    for keys, stages, blocks in ((32, 3, 2), (32, 2, 2), (16, 3, 2), (16, 2, 2), (16, 2, 1)):
        if dim > 128 or (keys == 32 and not is_short):
            continue
        tiles = decode_tiles(problem, 4, keys, stages, blocks, dim <= 64 and keys == 32, mma_q=2)
        if tiles.shared_bytes <= (max_shared_bytes + 1024) // blocks - 1024:
            return tiles
    return None


def _choose_decode(
    problem: AttentionProblem, max_shared_bytes: int, is_mixed: bool = False
) -> TileConfig:
    row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.dtype_kv.itemsize
    q_in_registers = problem.head_dim_qk <= 192
    # One request has few blocks, so one that fills an SM leaves the fewest partial states to merge:
    # three stages of 8 to 16 KB a warp. A batch has many, and two an SM fill each other's starts
    # and ends. Where shared memory is short, fewer warps do.
    shares_sm = problem.paged or is_mixed
    if row_bytes > 768:
        shapes = [(4, 16, 1)]
    elif row_bytes >= 512:
        shapes = [(4, 16, 2)] if shares_sm else [(4, 32, 1), (4, 16, 1)]
    else:
        shapes = [(4, 32, 2)] if shares_sm else [(8, 32, 1), (4, 32, 1)]
    for warps, keys, blocks in (*shapes, (4, 16, 1), (2, 16, 1), (1, 16, 1)):
        # A block takes 1 KB more than it asks for.
        budget = (max_shared_bytes + 1024) // blocks - 1024
        fitting = [
            tiles
            for stages in range(2, 5)
            if (tiles := decode_tiles(problem, warps, keys, stages, blocks, q_in_registers))
            and tiles.shared_bytes <= budget
        ]
        if fitting:
            return fitting[-1]
    raise AssertionError(f"no decode tile fits {max_shared_bytes} bytes of shared memory")


def _choose_few(problem: AttentionProblem, max_shared_bytes: int, mma_q: int) -> TileConfig:
    """Twice the warps of other blocks, and the shared memory of a whole SM for their stages."""
    assert mma_q == 1 or problem.head_dim_vo <= _MOST_DIM_OF_FEW_VERIFY, "tiles that would spill"
    row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.dtype_kv.itemsize
    q_in_registers = problem.head_dim_qk <= 192 and (mma_q == 1 or problem.head_dim_qk <= 64)
    keys = 16 if row_bytes >= 512 or mma_q == 2 else 32
    for warps in (8, 4, 2, 1):
        for stages in (4, 3, 2):
            tiles = decode_tiles(problem, warps, keys, stages, 1, q_in_registers, mma_q)
            if tiles.shared_bytes <= max_shared_bytes:
                return tiles
    raise AssertionError(f"no decode tile fits {max_shared_bytes} bytes of shared memory")


def _rows(tile_q: int) -> tuple[_Field, ...]:
    """What is known of the rows of Q and their logits."""
    return _Field(ROW_BYTES * tile_q, 16), _Field(LOGIT_BYTES, 16), _Field(8 * tile_q, 8)


def _rope_steps(problem: AttentionProblem) -> _Field:
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    return _Field(4 * (problem.head_dim_qk // 2) if is_rotated else 4)


def _widened_keys(problem: AttentionProblem, rows: int, rotates_keys: bool, count: int) -> _Field:
    """fp8 keys that are rotated get a 16-bit copy; otherwise the kernels keep a placeholder."""
    if problem.dtype_kv.is_fp8 and rotates_keys:
        return tile_field(rows, problem.head_dim_qk, 2, count)
    itemsize = problem.dtype_kv.itemsize
    return _Field(_PLACEHOLDER, tile_field(rows, problem.head_dim_qk, itemsize).align)


def prefill_tiles(
    problem: AttentionProblem,
    mma_q: int,
    warps: int,
    tile_kv: int,
    min_blocks: int,
    q_in_registers: bool,
    keys_per_exp: int,
    buffers: int = 1,
    rotates_keys: bool = False,
) -> TileConfig:
    """A prefill instance: `warps` warps of 16 * mma_q query rows, tile_kv keys at a time.

    Under RoPE, keys are rotated in the kernel (`rotates_keys`) or come rotated.
    """
    dim_qk, dim_vo = problem.head_dim_qk, problem.head_dim_vo
    tile_q = 16 * mma_q * warps
    itemsize = problem.dtype_kv.itemsize
    no_pages, no_mask = _Field(8, 8), _Field(4)
    shared = _struct(
        *_rows(tile_q),
        _Field(_WORK_BYTES, 16),
        _Field(_RANGE_BYTES),
        _Field(NONFINITE_BYTES),
        tile_field(tile_q, dim_qk, 2),
        tile_field(tile_kv, dim_qk, itemsize, buffers),
        tile_field(tile_kv, dim_vo, itemsize, buffers),
        _widened_keys(problem, tile_kv, rotates_keys, 1),
        _Field(2 * (2 * 8 + 4) * tile_kv, 8) if problem.paged else no_pages,
        _Field(_MASK_MAP_BYTES) if problem.custom_mask else no_mask,
        _rope_steps(problem),
    ).size
    config = common_constants(problem, rotates_keys) | {
        "kMmaQ": mma_q,
        "kWarps": warps,
        "kTileKV": tile_kv,
        "kMinBlocks": min_blocks,
        "kQInRegisters": q_in_registers,
        "kKeysPerExp": keys_per_exp,
        "kBuffers": buffers,
        "kSharedBytes": shared,
    }
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    return TileConfig(
        "prefill_sm80",
        jit.Config(config),
        tile_q,
        tile_kv,
        warps * 32,
        shared,
        wants_rotated_keys=is_rotated and not rotates_keys,
    )


def decode_tiles(
    problem: AttentionProblem,
    warps: int,
    keys_per_warp: int,
    stages: int,
    min_blocks: int,
    q_in_registers: bool,
    mma_q: int = 1,
) -> TileConfig:
    """A decode instance: 16 * mma_q query rows; each warp streams keys_per_warp keys a stage."""
    tile_q = 16 * mma_q
    dim_qk, dim_vo = problem.head_dim_qk, problem.head_dim_vo
    itemsize = problem.dtype_kv.itemsize
    stage = _struct(
        tile_field(keys_per_warp, dim_qk, itemsize), tile_field(keys_per_warp, dim_vo, itemsize)
    )
    states = warps * tile_q * (dim_vo + 8 + 2) * 4
    is_rotated = problem.pos_encoding == "ROPE_LLAMA"
    no_pages = _Field(8, 8)
    shared = _struct(
        *_rows(tile_q),
        _Field(warps * NONFINITE_BYTES),
        _Field(warps * keys_per_warp * 2 * 8, 8) if problem.paged else no_pages,
        tile_field(tile_q, dim_qk, 2),
        _widened_keys(problem, keys_per_warp, is_rotated, warps),
        _Field(max(warps * stages * stage.size, states), stage.align),
        _rope_steps(problem),
        _Field(4),
    ).size
    config = common_constants(problem, is_rotated) | {
        "kMmaQ": mma_q,
        "kWarps": warps,
        "kKeysPerWarp": keys_per_warp,
        "kStages": stages,
        "kMinBlocks": min_blocks,
        "kQInRegisters": q_in_registers,
        "kSharedBytes": shared,
    }
    tile_kv = warps * keys_per_warp
    return TileConfig("decode_sm80", jit.Config(config), tile_q, tile_kv, warps * 32, shared)

"""Launches the plan_batch kernel: the work list of a batch whose lengths are in device memory."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

from ... import jit
from ...core import dtypes
from ...core.device import device_props
from ...core.dtypes import DType
from ...core.key_share import KeyShare
from ...errors import UnsupportedError
from ...schedule.balance import MAX_WAVES
from ...schedule.batch import Splitting, shares_of
from ...schedule.capacity import PlanCapacity, plan_capacity
from ...schedule.cuts import Shares
from ...schedule.limits import Limits
from ...schedule.mixed import SPLITTINGS
from ...schedule.tile_shape import TileShape
from ..driver import params
from ..driver.enqueue import Launch, enqueue, load_function
from .batch import BatchLauncher, BatchSchedule
from .kernels import Keys
from .layout import ANY_BATCH_BYTES, STATES_ALIGN, round_up

THREADS = 512
_SHARED_BYTES = 29_264
_BYTES_A_REQUEST = 16
# Rows and pages by steps, or by lengths and offsets too; by steps, where nothing but int32 lengths
# of keys decides; by lengths and offsets, where ranks share the keys; by steps, where requests may
# be cut, and of those where nothing but lengths decides.
UNIFORM, RAGGED, PLAIN, SHARED, CUT, PLAIN_CUT = CONFIGS = tuple(
    jit.Config(
        {
            "kRagged": is_ragged,
            "kPlain": is_plain,
            "kThreads": THREADS,
            "kSharedBytes": _SHARED_BYTES,
            **({option: True} if option else {}),
        }
    )
    for is_ragged, is_plain, option in (
        (False, False, ""),
        (True, False, ""),
        (False, True, ""),
        (True, False, "kKeyShare"),
        (False, False, "kCuts"),
        (False, True, "kCuts"),
    )
)

# kernels/cupyattn/params/plan_batch.cuh, in the parts that change together.
_FORMAT = struct.Struct("<q 2i")
_TILES = struct.Struct("<6i 3I i")  # group_size to group_shift
_CONSTANTS = struct.Struct(f"<{5 * _FORMAT.size}s 5i {_TILES.size}s 8i 6f 2i 2f 7i")
_PLANNED = struct.Struct(f"<4Q {_CONSTANTS.size}s")
PARAMS = struct.Struct(f"<8Q {_PLANNED.size}s")
_KINDS = {dtypes.int32: 0, dtypes.uint32: 1, dtypes.int64: 2}
INDEX_DTYPES: tuple[DType, ...] = tuple(_KINDS)


class IndexFormat(NamedTuple):
    """How lengths or offsets lie in device memory: elements between two of them, their dtype, and
    what one token counts; of lengths that are steps of offsets, minus that."""

    stride: int = 1
    dtype: DType = dtypes.int32
    unit: int = 1

    def pack(self) -> bytes:
        return _FORMAT.pack(self.stride, _KINDS[self.dtype], self.unit)


class Lengths(NamedTuple):
    """What the host knows of a batch's lengths.

    num_requests, num_rows  requests, and rows of q
    qo_len         query tokens of every request; -1: they are given, or steps of the offsets
    max_qo_len     the most of one, which chooses the kernel; larger ones are served too
    kv_step        from a request's kv_start to the next one's: entries of a row of the page table
    max_kv_len     keys that a request has room for
    likely_kv_len  the most keys of one, as the caller says: it bounds splits
    formats        of qo_lens, kv_lens, qo_offsets, kv_offsets and kv_begin, which are whole lengths
                   where ranks share the keys; with a negative unit those ahead of a request's rows
    is_ragged      there are others of those than kv_lens
    sharers        requests, one after another, that are one of the caller's and share its slopes
                   and scales
    kv_room        what offsets of keys may name: rows of k, or keys of a table; 0: max_kv_len
    request_tokens of lists of keys, whose tokens are requests here: how many of them are one
                   request of the caller, and have one length
    list_gap       entries by which the lists of two such requests are further apart than kv_step
    counts_later   a token sees one key less for each token of its request behind it
    has_first_keys kv_begin is given
    """

    num_requests: int
    num_rows: int
    qo_len: int
    max_qo_len: int
    kv_step: int
    max_kv_len: int
    likely_kv_len: int
    formats: tuple[IndexFormat, IndexFormat, IndexFormat, IndexFormat, IndexFormat]
    is_ragged: bool = True
    sharers: int = 1
    kv_room: int = 0
    request_tokens: int = 1
    list_gap: int = 0
    counts_later: bool = False
    has_first_keys: bool = False


@dataclass(slots=True, eq=False)
class DevicePlan:
    """All that launches of one geometry and batch size share; nobody changes it. Positions are
    bytes.

    planner    the launch that writes the work list; None where blocks find their items themselves
               (find_items.py)
    schedule   the launches behind it; its words are on the device only
    scales     where scales of the device are repeated for each head, in the workspace
    partials   where partial states begin
    num_bytes  of the workspace
    num_counters  of zeros that launches find and leave, where there is no planner
    """

    planner: Launch | None
    schedule: BatchSchedule
    items: int
    merges: int
    counters: int
    scales: tuple[int, int, int]
    partials: int
    num_bytes: int
    constants: bytes
    num_counters: int = 0


def max_requests(device_index: int) -> int:
    """The most requests that a block of this device plans."""
    shared_bytes = device_props(device_index).max_smem_per_block
    return int((shared_bytes - _SHARED_BYTES) // _BYTES_A_REQUEST)


@functools.lru_cache(maxsize=1024)
def _packed_tiles(group_size: int, num_kv_heads: int, tile_q: int, tile_kv: int) -> bytes:
    """How rows and keys are counted in tiles, and rows in tokens."""
    tile_q_magic, tile_q_shift = params.divisor(tile_q)
    tile_kv_magic, tile_kv_shift = params.divisor(tile_kv)
    magics = tile_q_magic, tile_kv_magic, *params.divisor(group_size)
    sizes = group_size, num_kv_heads, tile_q, tile_q_shift, tile_kv, tile_kv_shift
    return _TILES.pack(*sizes, *magics)


@functools.lru_cache(maxsize=1024)
def _packed(formats: tuple[IndexFormat, ...]) -> bytes:
    return b"".join(layout.pack() for layout in formats)


def prepare(
    launcher: BatchLauncher, lengths: Lengths, max_bytes: int = ANY_BATCH_BYTES
) -> DevicePlan:
    """Make ready for launches; UnsupportedError if a block cannot plan so many requests.

    Keys are split in fewer parts where the workspace would else take more than `max_bytes`; if it
    still does, this is the best plan without a limit.
    """
    best = _prepare(launcher, lengths, MAX_WAVES)
    if best.num_bytes <= max_bytes:
        return best
    fewer = [splitting.waves for splitting in SPLITTINGS[1:]]
    if max_bytes >= ANY_BATCH_BYTES:
        fewer.append(0.0)
    for waves in fewer:
        plan = _prepare(launcher, lengths, waves)
        if plan.num_bytes <= max_bytes:
            return plan
    return best


def _prepare(launcher: BatchLauncher, lengths: Lengths, waves: float) -> DevicePlan:
    """The plan whose splits add at most so many waves of items."""
    max_rows = lengths.max_qo_len * launcher.group_size
    keys = Keys.equal(lengths.num_requests, lengths.likely_kv_len)
    rows, shape = launcher.choose(keys, lengths.max_qo_len, Splitting())
    share = launcher.masking.share
    left, right = windows(launcher, lengths)
    sees_all = left < 0 and (right < 0 or lengths.qo_len == 1)
    tiles = launcher.tiles(rows)
    is_fused = tiles.fused_merge and shape.is_fused
    capacity = capacity_of(launcher, lengths, shape, waves, not is_fused)
    shares = _shares(launcher, lengths, shape, capacity)
    capacity, limits, num_blocks = _room(capacity, shares, shape)
    config = SHARED if share is not None else _config(lengths, sees_all, shares is not None)
    # Blocks that take their SMs before the plan is there were slower where each SM has several.
    is_one_wave = capacity.num_tiles <= capacity.items_per_wave
    schedule, words_bytes = launcher.reserve(
        rows, shape, limits, lengths.likely_kv_len, is_one_wave, num_blocks
    )
    part = schedule.parts[0]
    num_kv_heads = launcher.num_kv_heads
    scale_k = words_bytes + 4 * num_kv_heads * launcher.group_size
    scale_v = scale_k + 4 * num_kv_heads
    partials = round_up(scale_v + 4 * num_kv_heads, STATES_ALIGN)
    constants = _CONSTANTS.pack(
        _packed(lengths.formats),
        lengths.num_requests,
        lengths.qo_len,
        lengths.num_rows,
        lengths.kv_step,
        lengths.max_kv_len,
        _packed_tiles(launcher.group_size, launcher.num_kv_heads, shape.tile_q, shape.tile_kv),
        left,
        right,
        capacity.items_per_wave,
        capacity.num_tiles,
        capacity.num_more,
        limits.num_items,
        (part.counters - part.merges) // 4,
        (words_bytes - part.counters) // 4,
        shape.cost_of_part(max_rows),
        *shape.costs(max_rows),
        lengths.sharers,
        lengths.kv_room or lengths.max_kv_len,
        1.0 / capacity.items_per_wave,
        1.0 / max(1, capacity.num_more),
        *(shares or (0, 0)),
        tiles.fused_splits,
        num_blocks,
        *_lists_or_share(lengths, share),
    )
    return DevicePlan(
        _planner(launcher.device_index, config, lengths.num_requests),
        schedule,
        part.items,
        part.merges,
        part.counters,
        (words_bytes, scale_k, scale_v),
        partials,
        partials + schedule.workspace_bytes,
        constants,
    )


def _planner(device_index: int, config: jit.Config, num_requests: int) -> Launch:
    """The launch of a planner of so many requests."""
    room = device_props(device_index).max_smem_per_block
    function = load_function("plan_batch", config, device_index, room)
    _require_at_most(max_requests(device_index), num_requests)
    shared_bytes = _SHARED_BYTES + _BYTES_A_REQUEST * num_requests
    return Launch(function, (1, 1, 1), THREADS, shared_bytes)


def _room(
    capacity: PlanCapacity, shares: Shares | None, shape: TileShape
) -> tuple[PlanCapacity, Limits, int]:
    """The capacity of parts that are equal, the most that any list has, and how many blocks begin
    with its first items (0: all do)."""
    if shares is None:
        # Parts of few tiles that cost as much as these fill one wave. More room would be blocks
        # that find nothing to do, each of which takes an SM for a while.
        free = capacity.items_per_wave - capacity.num_tiles
        if shape.takes_cuts and free > 0:
            capacity = capacity._replace(num_more=min(capacity.num_more, free))
        return capacity, capacity.limits(), 0
    # Items that follow others in their shares lie behind those of all blocks. Shares add no more
    # than a wave of parts; equal parts are as many as there are blocks.
    num_blocks = max(capacity.num_tiles, capacity.items_per_wave)
    limits = capacity._replace(num_more=capacity.items_per_wave).limits()
    limits = limits._replace(num_items=num_blocks + capacity.num_tiles)
    return capacity._replace(num_more=num_blocks - capacity.num_tiles), limits, num_blocks


def _lists_or_share(lengths: Lengths, share: KeyShare | None) -> tuple[int, int, int]:
    """How tokens of lists belong together, or how ranks share keys, of which lists know nothing."""
    if share is None:
        return lengths.request_tokens, lengths.list_gap, lengths.counts_later
    return share.cp_kv_cache_interleave_size, share.period, share.first


def _shares(
    launcher: BatchLauncher, lengths: Lengths, shape: TileShape, capacity: PlanCapacity
) -> Shares | None:
    """The shares into which all keys may be divided; None if requests may not be cut."""
    left, _ = windows(launcher, lengths)
    is_plain = not lengths.is_ragged and launcher.masking.share is None and left < 0
    if not (shape.takes_cuts and is_plain and 0 < lengths.qo_len <= shape.tile_kv):
        return None
    max_rows = lengths.qo_len * launcher.group_size
    num_tiles, per_wave = -(-max_rows // shape.tile_q), capacity.items_per_wave
    shares = shares_of(lengths.num_requests, num_tiles, per_wave, capacity.num_more / per_wave)
    return shares if shares is not None and shares.number <= THREADS else None


def _require_at_most(maximum: int, num_requests: int) -> None:
    if num_requests > maximum:
        raise UnsupportedError(
            f"seq_lens: {num_requests} requests; at most {maximum} in one call are supported, "
            "pass the batch in parts"
        )


def windows(launcher: BatchLauncher, lengths: Lengths) -> tuple[int, int]:
    """Those to the left and to the right. One that no request outgrows is none."""
    left, right = launcher.masking.window_left, launcher.masking.window_right
    if launcher.masking.share is not None:
        return left, right  # whole requests may outgrow them
    return (
        left if left < lengths.max_kv_len else -1,
        right if right < lengths.max_kv_len else -1,
    )


def _config(lengths: Lengths, sees_all: bool, may_cut: bool) -> jit.Config:
    """The planner for such lengths; sees_all: each row sees all keys. may_cut: requests."""
    if lengths.is_ragged:
        return RAGGED
    has_lists_of_requests = lengths.request_tokens > 1 or lengths.list_gap
    is_plain = lengths.formats[1] == IndexFormat() and not has_lists_of_requests
    if sees_all and is_plain:
        return PLAIN_CUT if may_cut else PLAIN
    return CUT if may_cut else UNIFORM


def capacity_of(
    launcher: BatchLauncher,
    lengths: Lengths,
    shape: TileShape,
    waves: float,
    last_block_merges: bool,
) -> PlanCapacity:
    """The room that a plan needs whatever the lengths are."""
    return plan_capacity(
        lengths.num_requests,
        lengths.num_rows,
        lengths.qo_len,
        lengths.max_kv_len,
        lengths.likely_kv_len,
        launcher.group_size,
        launcher.num_kv_heads,
        shape,
        launcher.masking,
        last_block_merges=last_block_merges,
        waves=waves,
    )


def bind(plan: DevicePlan, workspace: int) -> bytes:
    """The kernel's struct from `items` on, packed: all that a workspace at this address decides."""
    return _PLANNED.pack(
        workspace + plan.items,
        workspace + plan.merges,
        workspace + plan.counters,
        workspace + plan.scales[0],
        plan.constants,
    )


def launch(
    plan: DevicePlan,
    planned: bytes,
    addresses: tuple[int, ...],
    device: int,
    stream: int,
) -> None:
    """Enqueue the planner; `planned` is from `bind`.

    addresses: of qo_lens, kv_lens, qo_offsets and kv_offsets, of the scales of q, k and v, and of
    kv_begin; 0 for none
    """
    assert plan.planner is not None
    arguments = params.this_thread.launch_buffer
    PARAMS.pack_into(arguments.buffer, arguments.offset, *addresses, planned)
    enqueue(plan.planner, arguments, device, stream)

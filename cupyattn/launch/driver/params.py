"""Mirrors of the kernels' Params structs, and the buffers they are launched from."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from ...core.expression import FLOAT, MAX_ARRAYS, MAX_AXES, MAX_NUMBERS
from ...core.key_share import KeyShare
from ...core.logits import LogitsExpression
from ...core.spec import AttentionSpec

MAX_ROPE_PAIRS = 128
LOG2_E = math.log2(math.e)
# kSlack of kernels/cupyattn/shared/softmax.cuh.
SLACK = 8.0

# kernels/cupyattn/params/attention.cuh, field by field, in the parts that change together: what is
# the same for many calls is packed once, and copied by each.
# An array of user-written logits: its address and its extents.
_LOGITS_ARRAY = "Q 4i"
LOGITS_ARRAYS = struct.Struct("<" + MAX_ARRAYS * _LOGITS_ARRAY)
# The gates of the output, in the place of the last of them: address, strides of a token and a head.
OUTPUT_GATE = struct.Struct("<Q 2q")
LOGITS_NUMBERS = struct.Struct(f"<{MAX_NUMBERS * 4}s")
# From a request's own slopes, scale_q, scale_k and scale_v to the next one's.
STEPS = struct.Struct("<4i")
# lse, mask, sinks, scale_q, scale_k, scale_v, alibi_slopes, STEPS, logits_arrays
OPTIONAL = struct.Struct(f"<7Q {STEPS.size}s {LOGITS_ARRAYS.size}s")
STRIDES = struct.Struct("<12q")  # (token, head) of q, k, v, o, lse; page of k, v
# num_kv_heads to lse_form, logits_numbers; RoPE follows
CONSTANTS = struct.Struct(f"<6i 6f 2i I i I 3i {LOGITS_NUMBERS.size}s")
# q, k, v, o; OPTIONAL; partial_o, partial_lse, counters; work, merges, kv_indices, positions;
# STRIDES; mask_bytes, mask_row_bytes; lengths; the rest.
ATTENTION = struct.Struct(
    f"<4Q {OPTIONAL.size}s 7Q {STRIDES.size}s 2q 2i {CONSTANTS.size + 4 * MAX_ROPE_PAIRS}s"
)
NO_OPTIONAL, NO_STEPS, NO_LOGITS_ARRAYS = bytes(OPTIONAL.size), b"", b""
NOTHING_MORE = NO_STEPS, NO_LOGITS_ARRAYS
# The same struct where a run fills in what its plan does not decide: q, k, v, o; OPTIONAL; PLANNED.
PLANNED = struct.Struct(
    f"<7Q {STRIDES.size}s 2q 2i {CONSTANTS.size + 4 * MAX_ROPE_PAIRS}s"  # from partial_o on
)
RUN = struct.Struct(f"<4Q {OPTIONAL.size}s {PLANNED.size}s")

# LseForm of kernels/cupyattn/params/attention.cuh.
LSE_WITHOUT_SINKS, LSE_OF_NO_KEYS_IS_INFINITE = 1, 2

# kernels/cupyattn/params/latent.cuh: what follows ATTENTION. q_rope, k_rope; strides of a token and
# a head of q_rope, of a token and a page of k_rope; rope_scale, list_step; gaps of q and q_rope;
# max_logits, list_lens; list_lens_stride, request_tokens, list_gap, num_slots.
LATENT_PLACES, LATENT_REST = struct.Struct("<2Q"), struct.Struct("<4q f i 2q")
LATENT_OF_LISTS, LATENT_COUNTS = struct.Struct("<2Q"), struct.Struct("<4i")
LATENT = struct.Struct(
    "<"
    + "".join(
        x.format.lstrip("<") for x in (LATENT_PLACES, LATENT_REST, LATENT_OF_LISTS, LATENT_COUNTS)
    )
)

# kernels/cupyattn/params/key_lists.cuh: what follows ATTENTION. entries, kv_lens, qo_offsets,
# kv_offsets; strides of a token and a group; length, block_shift, window, num_requests,
# request_tokens, kv_step, max_kv_len, is_causal, heads_a_key; heads_magic, heads_shift;
# kv_lens_are_steps; words from one to the next of kv_lens, qo_offsets, kv_offsets; k_scale_step,
# v_scale_step, v_scale_request_step; value_scales, alone; alone_groups, and 0.
KEY_LISTS = struct.Struct("<4Q 2q 9i I 2i 6i 2Q 2i")

# kernels/cupyattn/params/prefill_sm90.cuh: what follows ATTENTION. num_items, heads_per_swizzle,
# box_rows, query_box_rows; PageUnits of k and v; output_box_rows, num_tail_items; mask_maps;
# query_box_step, output_box_step, many_blocks; maps of q, k, v, o, and of the last panels of k, v;
# DEVICE_LENGTHS follow where blocks find their items.
PREFILL_SM90 = struct.Struct(f"<14i Q 2i I {-(ATTENTION.size + 76) % 64}x 768s")

# kernels/cupyattn/params/device_lengths.cuh, behind all else that a kernel is told: the addresses
# of qo_offsets, qo_lens, kv_offsets, kv_lens; num_requests, qo_len, num_rows, kv_step, max_kv_len,
# kv_room, kv_lens_are_steps, tile_shift, tile_magic, is_causal, tiles_a_key, level_step.
DEVICE_LENGTHS, FINDER = struct.Struct("<4Q"), struct.Struct("<8i I i f i")
# FoundSplits: tile_kv, tile_kv_shift, tile_kv_magic; items_per_wave, may_split, lists;
# least_part_cost, block, merge, state, part, least_share, a_wave.
SPLIT_FINDER = struct.Struct("<2i I 3i 7f 12x")
NO_LENGTHS = b""

# kernels/cupyattn/params/key_unions.cuh: entries, table, items, chunks, tiles; the rest;
# DEVICE_LENGTHS, FINDER. And what prefill_sm90 is told of unions, in the place of found items:
# tiles, groups and window.
UNION_LISTS_REST = struct.Struct("<2q 14i 2I 2i")
UNION_LISTS = struct.Struct(f"<5Q {UNION_LISTS_REST.size}s Q {DEVICE_LENGTHS.size}s {FINDER.size}s")
KEY_UNIONS = struct.Struct("<Q 2i")

# kernels/cupyattn/params/rotate_keys.cuh: k, and the rest, with the table of RoPE steps.
ROTATION = struct.Struct(f"<3Q 3q 5i I 2i {4 * MAX_ROPE_PAIRS}s")
ROTATE_KEYS = struct.Struct(f"<Q {ROTATION.size}s")

# kernels/cupyattn/params/packbits.cuh
PACKBITS = struct.Struct("<4Q 4q 2i")

_MAX_PARAMS_BYTES = 2048
# Tensor maps lie on multiples of this within a struct, and the struct likewise.
_ALIGN = 64


class LaunchBuffer:
    """One thread's launch arguments: the array of argument pointers (of one), then the struct.

    The driver copies the struct during the launch call, so a thread can reuse its buffer at once.
    """

    __slots__ = ("_pinned", "address", "buffer", "has_context", "offset")

    def __init__(self) -> None:
        self.buffer = bytearray(2 * _ALIGN + _MAX_PARAMS_BYTES)
        self._pinned = (ctypes.c_char * len(self.buffer)).from_buffer(self.buffer)
        self.address = ctypes.addressof(self._pinned)
        self.offset = _ALIGN + -self.address % _ALIGN
        struct.pack_into("<Q", self.buffer, 0, self.address + self.offset)
        self.has_context = False

    def struct(self) -> bytes:
        """A copy of the struct, with whatever is behind it."""
        return bytes(self.buffer[self.offset :][:_MAX_PARAMS_BYTES])

    def clear(self) -> None:
        """Leave nothing of earlier structs behind the next ones."""
        self.buffer[self.offset :] = bytes(len(self.buffer) - self.offset)

    def write(self, struct: bytes) -> None:
        """Put a struct that another buffer had where the driver reads it."""
        self.buffer[self.offset : self.offset + len(struct)] = struct


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.launch_buffer = LaunchBuffer()


this_thread = _ThisThread()


def divisor(d: int) -> tuple[int, int]:
    """(magic, shift) with n // d == (2 * n * magic >> 32) >> shift for 0 <= n < 2^31.

    Granlund and Montgomery 1994, "Division by invariant integers using multiplication".
    """
    shift = (d - 1).bit_length()
    return 2 ** (31 + shift) // d + 1, shift


@lru_cache(maxsize=256)
def rope_steps(head_dim: int, rope_scale: float, rope_theta: float) -> bytes:
    """Turns per position of each rotated pair, as 32-bit fractions (arXiv 2104.09864)."""
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    radians = rope_theta ** (-2.0 * pairs / head_dim) / rope_scale
    fraction = np.mod(radians / (2.0 * np.pi), 1.0)
    steps = np.round(fraction * 2.0**32).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    return steps.astype("<u4").tobytes()


def pack_constants(
    spec: AttentionSpec,
    *,
    sm_scale: float,
    output_scale: float,
    first: int = 0,
    num_q_tiles: int = 0,
    num_splits: int = 1,
    lse_scale: float = 1.0,
    lse_form: int = 0,
) -> bytes:
    """CONSTANTS and the table of RoPE steps: what all launches of a plan and these scales share.

    first: the first tile of q, or item, of the launch. The scales are those of the spec times what
    a run adds to them. lse_scale multiplies the LSE, which is in base 2; lse_form: flags
    of LseForm.
    """
    # Read by the kernels only if the scale is positive and shared by all heads.
    softmax_scale = sm_scale * LOG2_E
    packed = CONSTANTS.pack(
        spec.num_kv_heads,
        spec.group_size,
        num_q_tiles,
        num_splits,
        spec.window_left,
        spec.right_limit,
        sm_scale,
        spec.logits_soft_cap,
        output_scale,
        softmax_scale,
        SLACK / softmax_scale if softmax_scale else 0.0,
        lse_scale,
        first,
        spec.page_size,
        *(divisor(spec.page_size) if spec.page_size else (0, 0)),
        *divisor(spec.group_size),
        spec.value_pages,
        lse_form,
        _pack_numbers(spec),
    )
    return packed + rope_table(spec)


def _pack_numbers(spec: AttentionSpec) -> bytes:
    """The numbers of user-written logits, or those of a share of keys, which takes their place."""
    if spec.key_share is not None:
        return pack_key_share(spec.key_share)
    if spec.skip_softmax and spec.logits is None:
        # The last of them, of kernels that leave out tiles (sm90/roles/skipped_tiles.cuh).
        return struct.pack(f"<{4 * (MAX_NUMBERS - 1)}x f", math.log2(spec.skip_softmax))
    return pack_logits_numbers(spec.logits)


def pack_key_share(share: KeyShare) -> bytes:
    """The numbers of kernels/cupyattn/shared/key_share.cuh."""
    run = share.cp_kv_cache_interleave_size
    numbers = run, share.period, share.first, *divisor(share.period), *divisor(run)
    return struct.pack("<7I", *numbers)


def pack_logits_numbers(logits: LogitsExpression | None) -> bytes:
    """The numbers that user-written logits read: a float32 or an int32 each."""
    if logits is None:
        return b""
    kinds = "".join("f" if x.type == FLOAT else "i" for x in logits.numbers)
    return struct.pack(f"<{kinds}", *logits.values)


def pack_logits_arrays(arrays: Iterable[tuple[int, Sequence[int]]]) -> bytes:
    """LOGITS_ARRAYS of the arrays that user-written logits read: (address, shape) of each."""
    return b"".join(
        struct.pack(f"<{_LOGITS_ARRAY}", address, *shape, *[1] * (MAX_AXES - len(shape)))
        for address, shape in arrays
    )


def with_output_gate(arrays: bytes, address: int, strides: Sequence[int]) -> bytes:
    """LOGITS_ARRAYS with gates, of arrays that are fewer by one than there is room for.

    strides: of the gates' tokens, heads and maybe elements.
    """
    packed = arrays.ljust(LOGITS_ARRAYS.size - OUTPUT_GATE.size, b"\0")
    return packed + OUTPUT_GATE.pack(address, strides[0], strides[1])


def more_rope_steps(spec: AttentionSpec) -> bytes:
    """Those steps of RoPE that ATTENTION has no room for, which follow it."""
    return rope_table(spec)[4 * MAX_ROPE_PAIRS :]


def rope_table(spec: AttentionSpec) -> bytes:
    """The steps of RoPE, empty without it."""
    if spec.pos_encoding != "ROPE_LLAMA":
        return b""
    return rope_steps(spec.head_dim_qk, spec.rope_scale, spec.rope_theta)


# kernels/cupyattn/params/page.cuh: append has the addresses and the rows of K, then of V, then the
# rest.
APPENDED_ROWS = struct.Struct("<5q i f")  # strides, head_dim, scale
APPEND_PAGED_KV_CACHE = struct.Struct(
    f"<2Q {APPENDED_ROWS.size}s 2Q {APPENDED_ROWS.size}s 4Q 2q 2i Q q 2i"
)

KEY_SHARE = struct.Struct("<3i 4x")  # world, rank, run
GET_BATCH_INDICES_POSITIONS = struct.Struct(f"<4Q 2q {KEY_SHARE.size}s")
GET_SEQ_LENS = struct.Struct("<3Q 2q")


def share_numbers(share: KeyShare) -> bytes:
    """KeyShareNumbers of kernels/cupyattn/params/page.cuh."""
    return KEY_SHARE.pack(share.cp_world_size, share.cp_rank, share.cp_kv_cache_interleave_size)


# kernels/cupyattn/params/merge_states.cuh: the addresses, then what arrays of one look share.
MERGE_LOOK = struct.Struct("<3i 2f i I i f 4x q 12q 4q")
MERGE_STATES = struct.Struct(f"<9Q {MERGE_LOOK.size}s")

# kernels/cupyattn/params/peer_windows.cuh, and what has it behind the addresses of a call and what
# calls of one look share: exchange_states.cuh and gather_heads.cuh.
MAX_RANKS = 32
PEER_WINDOWS = struct.Struct(f"<2Q 2q 2i {MAX_RANKS}Q")
EXCHANGE_LOOK = struct.Struct(f"<9q 2i I i 2f {PEER_WINDOWS.size}s")
EXCHANGE_STATES = struct.Struct(f"<4Q {EXCHANGE_LOOK.size}s")
GATHER_LOOK = struct.Struct(f"<4q 2i I i {PEER_WINDOWS.size}s")
GATHER_HEADS = struct.Struct(f"<2Q {GATHER_LOOK.size}s")

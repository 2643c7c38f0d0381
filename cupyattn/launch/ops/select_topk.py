"""Launches the select_topk kernel: the blocks of the greatest scores of each row."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...core import dtypes
from ...core.device import DeviceProps, device_props, overlaps_launches
from ...core.dtypes import DType
from ...core.selection import SelectProblem
from ..driver import params
from ..driver.enqueue import Launch, enqueue, load_function

_THREADS = 512
_WARPS = _THREADS // 32
# Where a warp has a row: warps of a block, the longest list, and keys that a lane may have.
_ROWS = 4
_LONGEST_LIST = 32
_KEYS = (8, 32)
# kernels/cupyattn/select/topk_cluster.cuh: keys that a warp looks at at a time, and the bytes that
# a block has besides keys; the bytes of topk_warp.cuh.
_STEP = 128
_SHARED_BYTES = 37_456
_LIST_BYTES = _ROWS * 32 * 8
_MAX_CLUSTER = 8
# A block of a cluster has this many scores at least: fewer are sooner done than shared out.
_MIN_SCORES = 4096
# kernels/cupyattn/params/select.cuh
TOKENS = struct.Struct("<2Q 8i")
# kernels/cupyattn/params/select_topk.cuh
SELECT_TOPK = struct.Struct(f"<3Q {TOKENS.size}s 5q 8i")


class Strides(NamedTuple):
    """Of a token and of a group, in elements."""

    token: int = 0
    group: int = 0


class Shape(NamedTuple):
    """How rows are shared out.

    cluster     blocks that have one row together
    warp_room   keys that each of their warps keeps in shared memory
    keys        of a lane of the one warp that has a row; 0: clusters have rows
    """

    cluster: int = 1
    warp_room: int = 0
    keys: int = 0

    @property
    def shared_bytes(self) -> int:
        return _LIST_BYTES if self.keys else _SHARED_BYTES + 4 * _WARPS * self.warp_room

    @property
    def threads(self) -> int:
        return 32 * _ROWS if self.keys else _THREADS

    def num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // _ROWS) if self.keys else num_rows * self.cluster


@lru_cache(maxsize=64)
def config(
    dtype: DType, *, is_aligned: bool = True, has_candidates: bool = False, keys: int = 0
) -> jit.Config:
    """The kernel's Config."""
    values: dict[str, jit.Constant] = {
        "DType": dtype,
        "kAligned": is_aligned,
        "kCandidates": has_candidates,
        "kKeys": keys,
        "kThreads": Shape(keys=keys).threads,
        "kSharedBytes": Shape(keys=keys).shared_bytes,
    }
    return jit.Config(values)


def choose_shape(num_rows: int, max_blocks: int, topk: int, props: DeviceProps) -> Shape:
    """A warp for short rows of which few are chosen; for others as many blocks of a cluster as the
    GPU has SMs for, or as it takes to keep a row's keys."""
    if topk <= _LONGEST_LIST and max_blocks <= 32 * _KEYS[-1]:
        return Shape(keys=next(keys for keys in _KEYS if max_blocks <= 32 * keys))
    cluster = 1
    max_run = (props.max_smem_per_block - _SHARED_BYTES) // (4 * _WARPS * _STEP) * _STEP
    while overlaps_launches(props.arch) and cluster < _MAX_CLUSTER:
        is_kept = max_blocks <= cluster * max_run * _WARPS
        is_full = 2 * num_rows * cluster > props.num_sms or max_blocks <= cluster * _MIN_SCORES
        if is_kept and is_full:
            break
        cluster *= 2
    room = -(-max_blocks // (cluster * _WARPS * _STEP)) * _STEP
    return Shape(cluster, min(room, max_run))


def launch(
    problem: SelectProblem,
    scores: int,
    row_stride: int,
    max_blocks: int,
    tokens: bytes,
    num_tokens: int,
    out: int,
    out_strides: tuple[int, int],
    values: int,
    values_strides: tuple[int, int],
    device_index: int,
    stream: int,
) -> None:
    """Choose from float32 [num_tokens * groups, row_stride], a row a token and group, at the
    address `scores`.

    row_stride   a multiple of 4, and the address one of 16
    max_blocks   that a row may have; what lies behind those it has is not used
    tokens       SelectTokens of kernels/cupyattn/params/select.cuh
    out, values  addresses of [num_tokens, groups, problem.list_len]; values may be 0. Strides are
                 of a token and of a group
    """
    num_rows = num_tokens * problem.num_groups
    if num_rows == 0:
        return
    props = device_props(device_index)
    shape = choose_shape(num_rows, max_blocks, problem.topk, props)
    has_candidates = problem.candidate_block > 0
    chosen = config(dtypes.float32, has_candidates=has_candidates, keys=shape.keys)
    function = load_function("select_topk", chosen, device_index, shape.shared_bytes)
    arguments = params.this_thread.launch_buffer
    SELECT_TOPK.pack_into(
        arguments.buffer,
        arguments.offset,
        scores,
        out,
        values,
        tokens,
        row_stride,
        *out_strides,
        *values_strides,
        num_rows,
        problem.num_groups,
        problem.topk,
        problem.first,
        problem.last,
        problem.tail,
        shape.warp_room,
        0,
    )
    shaped = Launch(
        function,
        (shape.num_blocks(num_rows), 1, 1),
        shape.threads,
        shape.shared_bytes,
        is_dependent=overlaps_launches(props.arch),
        cluster=shape.cluster,
    )
    enqueue(shaped, arguments, device_index, stream)

"""Launches the select_softmax kernel: scores of softmax, of what heads have of blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...core import dtypes
from ...core.device import device_props, overlaps_launches
from ...core.dtypes import DType
from ..driver import params
from ..driver.enqueue import Launch, enqueue, load_function

MAX_HEADS = 64
_THREADS = 256
# kernels/cupyattn/params/select.cuh, whose SelectTokens are packed already.
_PARAMS = struct.Struct("<4Q 4q 48s 4i")


class Shares(NamedTuple):
    """Heads' parts of blocks, of which scores are made.

    logs, scores, weights, candidates  addresses; 0 for no weights, and where all blocks compete
    score_stride      of a row of logs, and of scores
    candidate_strides  of a token and a group
    tokens            SelectTokens of kernels/cupyattn/params/select.cuh, of `num_tokens`
    candidate_blocks  blocks that each of num_candidates names
    """

    logs: int
    scores: int
    weights: int
    candidates: int
    score_stride: int
    weight_stride: int
    candidate_strides: tuple[int, int]
    tokens: bytes
    num_tokens: int
    num_heads: int
    num_groups: int
    num_candidates: int
    candidate_blocks: int


@lru_cache(maxsize=8)
def config(dtype_w: DType | None) -> jit.Config:
    """The kernel's Config, by the dtype of weights."""
    return jit.Config(
        {"DTypeW": dtype_w or dtypes.float32, "kThreads": _THREADS, "kMaxHeads": MAX_HEADS}
    )


def configs() -> Iterator[jit.Config]:
    """The Configs of weights of 32 bits."""
    yield config(None)


def launch(shares: Shares, dtype_w: DType | None, device_index: int, stream: int) -> None:
    """Enqueue scores, float32 [num_tokens * num_groups, score_stride], behind those of heads."""
    function = load_function("select_softmax", config(dtype_w), device_index)
    arguments = params.this_thread.launch_buffer
    _PARAMS.pack_into(
        arguments.buffer,
        arguments.offset,
        shares.logs,
        shares.scores,
        shares.weights,
        shares.candidates,
        shares.score_stride,
        shares.weight_stride,
        *shares.candidate_strides,
        shares.tokens,
        shares.num_heads,
        shares.num_groups,
        shares.num_candidates,
        shares.candidate_blocks,
    )
    grid = shares.num_tokens * shares.num_groups, 1, 1
    is_dependent = overlaps_launches(device_props(device_index).arch)
    shaped = Launch(function, grid, _THREADS, 0, is_dependent=is_dependent)
    enqueue(shaped, arguments, device_index, stream)

"""A rank's share of keys, as callers name it: checked, and what a batch needs of it.

Lengths and tables of a call are the rank's own. What rows see goes by places in the whole sequence,
whose lengths a caller gives where that matters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..core.key_share import WHOLE, KeyShare
from ..core.problem import MAX_LENGTH
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from ..schedule.batch import BatchRequests
from .requests import Batch, host_integers

WHOLE_LENGTHS = "cp_tot_seqused_k"


def read_share(cp_world_size: Any, cp_rank: Any, interleave_size: Any) -> KeyShare | None:
    """The share of these arguments; None of one rank, which holds all keys."""
    numbers = cp_world_size, cp_rank, interleave_size
    if all(type(x) is int for x in numbers) and numbers == (1, 0, 1):
        return None
    share = KeyShare(cp_world_size, cp_rank, interleave_size)
    return None if share.is_whole else share


def with_whole_lengths(batch: Batch, share: KeyShare | None, whole_lengths: Any) -> Batch:
    """The batch that knows how many keys of each request other ranks hold, if lengths are given.

    whole_lengths: int32 or int64 [B], of the sequences that ranks share, on the host or the device.
    Raises ArgumentError unless this rank's lengths are what it holds of them; of one rank, they are
    the same.
    """
    if whole_lengths is None:
        return batch
    is_whole, share = share is None, share or WHOLE
    whole, own = host_integers(whole_lengths, WHOLE_LENGTHS), batch.requests.kv_len
    if whole.size != own.size:
        raise ArgumentError(
            f"{WHOLE_LENGTHS}: shape is {list(whole.shape)}; wanted [{own.size}], one for each "
            "request"
        )
    if whole.max(initial=0) > MAX_LENGTH:
        raise UnsupportedError(
            f"{WHOLE_LENGTHS}: a request has {whole.max()} keys; at most {MAX_LENGTH} are supported"
        )
    is_wrong = (share.count(whole) != own) | (whole < 0)
    if np.count_nonzero(is_wrong):
        at = int(np.argmax(is_wrong))
        raise ArgumentError(
            f"{WHOLE_LENGTHS}: request {at} has {own[at]} keys here and {whole[at]} in all, of "
            f"which rank {share.cp_rank} of {share.cp_world_size} holds "
            f"{share.count(whole)[at]} in runs of {share.cp_kv_cache_interleave_size}; wanted this "
            "rank's own lengths and page tables beside the whole lengths"
        )
    return batch if is_whole else replace(batch, others=whole - own)


def requests_of_share(batch: Batch, share: KeyShare) -> BatchRequests:
    """The requests as kernels take them that see keys by their places."""
    if batch.others is None:
        raise ArgumentError(
            f"{WHOLE_LENGTHS}: got None with cp_world_size={share.cp_world_size}, and causality "
            "over several rows, a window or a mask of drafts goes by places in the whole "
            "sequence; pass its lengths [B] to plan()"
        )
    return replace(batch.requests, key_offset=batch.others)


def reference_places(batch: Batch, spec: AttentionSpec, index: int) -> dict[str, Any]:
    """Options of reference.attention for a request of a batch."""
    share = spec.key_share
    if share is None or batch.others is None:
        return {}
    kv_len = int(batch.requests.kv_len[index])
    return {
        "key_positions": share.position(np.arange(kv_len)),
        "whole_len": kv_len + int(batch.others[index]),
    }


def require_sinks_once(spec: AttentionSpec, sinks: object) -> None:
    """UnsupportedError where several ranks would count the same sinks."""
    share = spec.key_share
    if sinks is not None and share is not None and share.cp_rank > 0:
        raise UnsupportedError(
            f"sinks: given on rank {share.cp_rank} of {share.cp_world_size}; ranks merge their "
            "states, in which sinks count once: pass them on rank 0 alone"
        )

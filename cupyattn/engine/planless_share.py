"""Calls without a plan over a rank's share of the keys: what of it decides, and whole lengths.

Lengths and tables are the rank's own. What rows see goes by places in whole requests, whose lengths
a call gives in the place of `kv_begin` where that matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import parse
from ..core.key_share import KeyShare
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from .arrays import Arrays
from .key_share import read_share

if TYPE_CHECKING:
    from .check_planless import Options


def share_of_world(cp_world: Any, cp_rank: Any, interleave_size: Any) -> KeyShare | None:
    """The share of FlashInfer's arguments; None of one rank, which holds all keys."""
    try:
        return read_share(cp_world, cp_rank, interleave_size)
    except ArgumentError as error:
        raise ArgumentError(str(error).replace("cp_world_size", "cp_world")) from None


def settle(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
    """The call without causality and whole lengths that decide nothing. Raises ArgumentError where
    whole lengths are missing, and UnsupportedError for what would have to know more of other ranks'
    keys."""
    share = options.key_share
    assert share is not None
    if options.is_list:  # which names this rank's keys
        return arrays._replace(kv_begin=None), options._replace(key_share=None)
    _refuse(arrays, options, share)
    left = parse.window(options.window_left, "window_left")
    right = parse.window(options.window_right, "window_right")
    is_causal = parse.flag(options.causal, "causal")
    has_one_row = type(options.q_len) is int and options.q_len == 1
    if has_one_row and arrays.mask is arrays.qo_offsets is arrays.qo_lens is None:
        # It is the request's last token, which sees all keys.
        is_causal, right = False, -1
    options = options._replace(causal=is_causal, window_right=right)
    if arrays.mask is None and not is_causal and left < 0 and right < 0:
        return arrays._replace(kv_begin=None), options
    if arrays.kv_begin is None:
        raise ArgumentError(
            f"{options.names.kv_begin}: got None where {share.cp_world_size} ranks share the keys, "
            "and causality over several rows, a window or a mask goes by places in whole requests; "
            "pass whole lengths, [B]"
        )
    return arrays, options


def _refuse(arrays: Arrays, options: Options, share: KeyShare) -> None:
    refused = {
        "alibi_slopes": arrays.alibi_slopes is not None,
        "attention_chunk": options.attention_chunk > 0,
    }
    for name, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"{name}: is not supported where {share.cp_world_size} ranks share the keys; leave "
                "it out"
            )
    if arrays.block_tables is None:
        raise UnsupportedError(
            f"{options.names.block_tables}: got None where {share.cp_world_size} ranks share the "
            "keys; pass this rank's page table"
        )


def whole_lengths(
    share: KeyShare, lengths: np.ndarray, rows: np.ndarray, own: np.ndarray, name: str
) -> np.ndarray:
    """Whole lengths of requests; rows: those of q that `lengths` does not count.

    Raises ArgumentError unless the rank's own lengths are what it holds of them.
    """
    whole = lengths + rows
    wrong = np.flatnonzero((share.count(whole) != own) | (whole < 0))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(
            f"{name}: request {at} has {own[at]} keys here and {whole[at]} in all, of which rank "
            f"{share.cp_rank} of {share.cp_world_size} holds {share.count(int(whole[at]))} in runs "
            f"of {share.cp_kv_cache_interleave_size}; wanted this rank's own lengths beside whole "
            "ones"
        )
    return whole


def key_positions(spec: AttentionSpec, kv_len: int, whole_len: int) -> dict[str, Any]:
    """Options of reference.attention for a request; whole_len negative: they decide nothing."""
    if spec.key_share is None or whole_len < 0:
        return {}
    return {"key_positions": spec.key_share.position(np.arange(kv_len)), "whole_len": whole_len}

"""Scales of blocks of tokens beside 8-bit queries, keys and values, as a call brings them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_array
from ..core import dtypes, parse
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError

SIZES = 64, 128


class BlockScales(NamedTuple):
    """As given. q, k, v: float32, what the numbers of a block of `size` tokens of a request are
    multiplied by, for each head; k_mean: what was subtracted from keys."""

    q: Any
    k: Any
    v: Any
    k_mean: Any
    size: Any


@dataclass(frozen=True, slots=True)
class CheckedBlocks:
    """Views by name (`q_block_scales` to `k_mean`), and the tokens of a block."""

    views: dict[str, ArrayView]
    size: int

    def of_request(
        self,
        index: int,
        q_rows: tuple[int, int],
        k_rows: tuple[int, int],
        page_ids: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """What reference.attention takes for a request: (first row, length) of its queries and
        keys, and the pages of its keys if they are in pages."""
        result: dict[str, Any] = {"block_size": self.size} if self.views else {}
        for name, v in self.views.items():
            x = array.as_numpy(v)
            if name == "k_mean":
                result[name] = x[index]
            elif name != "q_block_scales" and page_ids is not None:
                blocks = x[page_ids].reshape(-1, x.shape[-1])
                result[name] = blocks[: -(-k_rows[1] // self.size)]
            else:
                start, length = q_rows if name == "q_block_scales" else k_rows
                first = start // self.size + index
                result[name] = x[first : first - (-length // self.size)]
        return result


NO_BLOCKS = CheckedBlocks({}, SIZES[0])


def check(
    blocks: BlockScales | None,
    spec: AttentionSpec,
    counts: Sequence[int],
    num_requests: int,
    device_kind: str,
) -> CheckedBlocks:
    """The arrays of a call checked against its heads and sizes.

    counts: rows of q, and rows or pages of k and v. Raises ArgumentError for shapes, dtypes and
    sizes that do not fit, UnsupportedError where no kernel reads them.
    """
    if blocks is None:
        return NO_BLOCKS
    names = "q_block_scales", "k_block_scales", "v_block_scales", "k_mean"
    present = {n: x for n, x in zip(names, blocks, strict=False) if x is not None}
    first = next(iter(present))
    size = parse.require_int(blocks.size, "block_size", 0)
    if size not in SIZES:
        raise ArgumentError(f"block_size: got {size}; wanted 64 or 128 tokens of a scale")
    if not spec.problem().is_8bit:
        raise ArgumentError(
            f"{first}: given with q of dtype {spec.dtype_q}; blocks have scales where q, k and v "
            "are of 8 bits, as quantize_qkv makes them"
        )
    if spec.page_size % size:
        raise ArgumentError(
            f"block_size: got {size} with pages of {spec.page_size} tokens; wanted pages of whole "
            "blocks"
        )
    num_rows, num_keys = counts
    views = {name: array.view(x, name) for name, x in present.items()}
    for name, v in views.items():
        if name == "k_mean":
            dims = {"batch": num_requests, "heads": spec.num_kv_heads, "dim": spec.head_dim_qk}
            match_array(v, "batch heads dim", dtypes.float32, name, dims)
            continue
        is_q = name == "q_block_scales"
        heads = spec.num_qo_heads if is_q else spec.num_kv_heads
        if spec.page_size and not is_q:
            dims = {"num_pages": num_keys, "blocks": spec.page_size // size, "heads": heads}
            match_array(v, "num_pages blocks heads", dtypes.float32, name, dims)
        else:
            match_array(v, "num_blocks heads", dtypes.float32, name, {"heads": heads})
            _require_rows(v, name, num_rows if is_q else num_keys, size, num_requests)
    if device_kind != "cpu":
        raise UnsupportedError(
            f"{first}: has no GPU kernel yet; give each head one scale, which quantize_qkv takes "
            "as scale_q, scale_k and scale_v"
        )
    return CheckedBlocks(views, size)


def _require_rows(v: ArrayView, name: str, tokens: int, size: int, num_requests: int) -> None:
    """ArgumentError unless the blocks of all requests have places: a request's begin at its first
    row // size + its index. One request has no row for others."""
    wanted = -(-tokens // size) + (num_requests if num_requests > 1 else 0)
    if v.shape[0] < wanted:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted at least {wanted} rows, for {tokens} tokens "
            f"in blocks of {size} of {num_requests} requests"
        )

"""Scales of blocks of tokens beside 8-bit queries, keys and values, as a call brings them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_array
from ..core import dtypes, parse
from ..core.problem import AttentionProblem
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from ..launch.driver import params

SIZES = 64, 128
_SCALES = "q_block_scales", "k_block_scales", "v_block_scales"


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

    def pack(self) -> bytes:
        """params.LOGITS_ARRAYS of the scales, which a kernel reads in the place of arrays of an
        expression: strides of a block, a head and a page, and the tokens of a block as a power of
        two (kernels/cupyattn/shared/block_scales.cuh)."""
        arrays = []
        for name in _SCALES:
            v = self.views.get(name)
            page, block, head = (0, 0, 0) if v is None else (0, *v.strides)[-3:]
            shift = self.size.bit_length() - 1
            arrays.append((0 if v is None else v.ptr, (block, head, page, shift)))
        return params.pack_logits_arrays(arrays)

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
    wants_logits: str = "",
) -> CheckedBlocks:
    """The arrays of a call checked against its heads and sizes.

    counts: rows of q, and rows or pages of k and v. wants_logits: what of a call depends on logits
    themselves, and not on their differences within a row. Raises ArgumentError for shapes, dtypes
    and sizes that do not fit, UnsupportedError where no kernel reads them.
    """
    if blocks is None:
        return NO_BLOCKS
    names = *_SCALES, "k_mean"
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
    if device_kind != "cpu" and views.pop("k_mean", None) is not None and wants_logits:
        # The rest sees differences of a row's logits, which all have the same product of the mean.
        raise UnsupportedError(
            f"k_mean: has no GPU kernel beside {wants_logits}; pass None, or keys that are stored "
            "with their mean"
        )
    return CheckedBlocks(views, size) if views else NO_BLOCKS


def wants_logits(spec: AttentionSpec, has_lse: bool, sinks: Any) -> str:
    """What of a call depends on logits themselves; see `check`."""
    wanted = {
        "a log-sum-exp": has_lse,
        "sinks": sinks is not None,
        "a soft cap": spec.logits_soft_cap > 0.0,
        "rotations inside attention": spec.pos_encoding == "ROPE_LLAMA",
    }
    if spec.logits is not None and spec.logits.transform is not None:
        wanted[spec.logits.name] = True
    return next((name for name, is_wanted in wanted.items() if is_wanted), "")


def scaled(problem: AttentionProblem) -> AttentionProblem:
    """The problem of a call with scales of blocks, of which rows have a part."""
    return replace(problem, block_scales=True, prescale_logits=True)


def _require_rows(v: ArrayView, name: str, tokens: int, size: int, num_requests: int) -> None:
    """ArgumentError unless the blocks of all requests have places: a request's begin at its first
    row // size + its index. One request has no row for others."""
    wanted = -(-tokens // size) + (num_requests if num_requests > 1 else 0)
    if v.shape[0] < wanted:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted at least {wanted} rows, for {tokens} tokens "
            f"in blocks of {size} of {num_requests} requests"
        )

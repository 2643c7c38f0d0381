"""Custom masks of a batch: bools or bits of all requests, or intervals of keys for each row."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..array.match import match_array
from ..core import dtypes, parse
from ..errors import ArgumentError
from .requests import Batch
from .row_mask import MaskBits, flat_view
from .workspace import copy_on_device, require_apart, same_device


@dataclass(frozen=True, slots=True)
class Mask:
    """view: the caller's mask, then the packed bits on the device; None without a mask.

    bits: the packed mask on the CPU; without a view, one that a plan has made on the host.
    intervals: what `read_intervals` gives, instead of all these. They hold besides causality, but
    where `is_causal` is False.
    """

    view: ArrayView | None = None
    is_packed: bool = False
    bits: np.ndarray | None = None
    intervals: np.ndarray | None = None
    is_causal: bool = True

    @property
    def form(self) -> str | None:
        """As PlanOptions.mask_form."""
        if self.intervals is not None:
            return "runs" if self.is_causal else "ranges"
        return None if self.view is None and self.bits is None else "whole"

    def check(self, batch: Batch, workspace: ArrayView) -> None:
        """ArgumentError unless the mask has a bit for every row and key of the batch."""
        v = self.view
        if v is None or batch.mask_indptr is None:
            return
        if self.is_packed:
            name, dtype = "packed_custom_mask", dtypes.uint8
            wanted, unit = int(batch.mask_indptr[-1]), "bytes, each request from a byte on"
        else:
            name, dtype = "custom_mask", dtypes.bool_
            lengths = batch.requests
            wanted, unit = int((lengths.qo_len * lengths.kv_len).sum()), "bools"
        match_array(v, "n", dtype, name)
        if v.shape[0] < wanted or (v.shape[0] > wanted and not self.is_packed):
            raise ArgumentError(
                f"{name}: holds {v.shape[0]}; wanted {wanted} {unit}: qo_len x kv_len of every "
                "request, flattened"
            )
        same_device(workspace, **{name: v})
        require_apart(workspace, **{name: v})

    def copied(self) -> Mask:
        """On the CPU: the same, in memory of its own."""
        if self.view is None:
            return self
        return replace(self, bits=array.as_numpy(self.view).copy())

    def of_request(self, batch: Batch, index: int) -> np.ndarray | None:
        """On the CPU: bool [qo_len, kv_len] of one request."""
        if self.intervals is not None:
            begin, qo_len = int(batch.qo_indptr[index]), int(batch.requests.qo_len[index])
            own = self.intervals[begin : begin + qo_len]
            return _outside(own, qo_len, int(batch.requests.kv_len[index]), self.is_causal)
        if self.bits is None or batch.mask_indptr is None:
            return None
        lengths = batch.requests
        qo_len, kv_len = int(lengths.qo_len[index]), int(lengths.kv_len[index])
        if self.is_packed:
            return reference.unpack_mask(self.bits[batch.mask_indptr[index] :], qo_len, kv_len)
        begin = int((lengths.qo_len[:index] * lengths.kv_len[:index]).sum())
        return self.bits[begin : begin + qo_len * kv_len].reshape(qo_len, kv_len)

    def device_parts(self, batch: Batch) -> dict[str, np.ndarray]:
        """What a plan copies to the device, as int32 words: the mask, or offsets of each request's
        in bools and in bytes, which packing needs there."""
        if self.intervals is not None:
            return {"mask": self.intervals.reshape(-1)}
        if self.view is None and self.bits is not None:
            return {"mask": np.pad(self.bits, (0, -self.bits.size % 4)).view(np.int32)}
        if self.view is None or self.is_packed or batch.mask_indptr is None:
            return {}
        lengths = batch.requests
        begins = np.zeros(batch.num_requests + 1, np.int64)
        np.cumsum(lengths.qo_len * lengths.kv_len, out=begins[1:])
        bytes_begin = batch.mask_indptr.view(np.int32)
        return {"bools_begin": begins.view(np.int32), "bytes_begin": bytes_begin}

    def on_device(
        self,
        batch: Batch,
        workspace: ArrayView,
        buffer: ArrayView | None,
        addresses: Mapping[str, int],
        stream: int,
    ) -> tuple[Mask, MaskBits]:
        """The mask as kernels read it: intervals, or bits in `buffer`, in new memory, or in the
        caller's own if they are packed. addresses: of `device_parts`, among others.
        """
        if self.intervals is not None:
            return self, MaskBits(addresses["mask"], 0, self.intervals.nbytes)
        if self.view is None and self.bits is not None:
            return self, MaskBits(addresses["mask"], 0, self.bits.nbytes)
        packed = self._packed_on_device(batch, workspace, buffer, addresses, stream)
        return Mask(packed, is_packed=True), MaskBits(packed.ptr, 0, packed.shape[0])

    def _packed_on_device(
        self,
        batch: Batch,
        workspace: ArrayView,
        buffer: ArrayView | None,
        addresses: Mapping[str, int],
        stream: int,
    ) -> ArrayView:
        v = self.view
        assert v is not None and batch.mask_indptr is not None
        num_bytes = int(batch.mask_indptr[-1])
        array.acquire(workspace, v)
        if self.is_packed:
            if buffer is None:
                return v
            copy_on_device(buffer.ptr, v.ptr, num_bytes, v.device.index, stream)
            return buffer
        from ..launch.ops import packbits

        packed = buffer
        if packed is None:
            packed = array.view(array.empty((num_bytes,), dtypes.uint8, workspace), "mask")
        target = flat_view(packed, packed.ptr, num_bytes, dtypes.uint8)
        begins, starts = (
            flat_view(workspace, addresses[name], batch.num_requests + 1, dtypes.int64)
            for name in ("bools_begin", "bytes_begin")
        )
        packbits.launch(v, target, begins, starts, True, stream)
        array.release(workspace, v)
        return packed


NO_MASK = Mask()


def of_bits(bits: np.ndarray | None) -> Mask:
    """A packed mask made on the host, which a plan copies to the device; None for no mask."""
    return NO_MASK if bits is None else Mask(bits=bits, is_packed=True)


def read_mask(
    custom_mask: Any, packed_custom_mask: Any, intervals: np.ndarray | None = None
) -> Mask:
    """The mask of a plan, of which the packed one wins."""
    if intervals is not None:
        if custom_mask is packed_custom_mask is None:
            return Mask(intervals=intervals)
        raise ArgumentError(
            "custom_mask, prefix_len_ptr: both a mask and multi-item scoring, which says what rows "
            "see; pass one of them"
        )
    if packed_custom_mask is not None:
        return Mask(array.view(packed_custom_mask, "packed_custom_mask"), is_packed=True)
    if custom_mask is not None:
        return Mask(array.view(custom_mask, "custom_mask"))
    return NO_MASK


# --- multi-item scoring ---
#
# A sequence is prefix, delimiter, item, delimiter, item, ..., delimiter. A token of an item sees
# the prefix and its item up to itself. A delimiter sees the prefix, and no other token sees it.
# Attention within the prefix is causal. So a row sees two intervals of keys, and needs no bits.
# Semantics: FlashInfer's mask mode of the same name (flashinfer-ai/flashinfer pull request 1015).


def read_intervals(
    batch: Batch,
    prefix_len_ptr: Any,
    token_pos_in_items_ptr: Any,
    token_pos_in_items_len: Any,
    max_item_len_ptr: Any,
) -> np.ndarray | None:
    """int32 [rows of q, 2], the KeyInterval of each row (params/attention.cuh); None without items.

    Arguments as in BatchPrefillWithPagedKVCacheWrapper.plan. Raises ArgumentError.
    """
    if type(token_pos_in_items_len) is int and token_pos_in_items_len == 0:
        if prefix_len_ptr is token_pos_in_items_ptr is max_item_len_ptr is None:
            return None
    arguments = {
        "prefix_len_ptr": prefix_len_ptr,
        "token_pos_in_items_ptr": token_pos_in_items_ptr,
        "token_pos_in_items_len": _item_length(token_pos_in_items_len) or None,
        "max_item_len_ptr": max_item_len_ptr,
    }
    named = [name for name, x in arguments.items() if x is not None]
    if not named:
        return None
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr"):
        if arguments[name] is None:
            raise ArgumentError(
                f"{name}: None, but {named[0]} is given; multi-item scoring needs both "
                "prefix_len_ptr and token_pos_in_items_ptr"
            )
    count = batch.num_requests
    if max_item_len_ptr is not None:
        _check_per_request(
            array.view(max_item_len_ptr, "max_item_len_ptr").shape, count, "max_item_len_ptr"
        )
    prefix = _read_integers(prefix_len_ptr, "prefix_len_ptr")
    _check_per_request(prefix.shape, count, "prefix_len_ptr")
    positions = _read_integers(token_pos_in_items_ptr, "token_pos_in_items_ptr")
    stride = _item_stride(_item_length(token_pos_in_items_len), positions, count)
    lengths = batch.requests
    behind = lengths.kv_len - prefix
    # The last request's may end with the last one that is needed.
    have = np.minimum(stride, positions.size - stride * np.arange(count))
    if (behind > np.maximum(have, 0)).any():
        at = int(np.argmax(behind - np.maximum(have, 0)))
        raise ArgumentError(
            f"token_pos_in_items_len: {stride} entries a request, of {positions.size} in all, but "
            f"request {at} has {behind[at]} keys behind its prefix of {prefix[at]}; wanted an "
            "entry for each"
        )
    request = np.repeat(np.arange(count), lengths.qo_len)
    token = np.arange(batch.num_rows) - lengths.q_start[request]
    position = token + (lengths.kv_len - lengths.qo_len)[request]
    index = position - prefix[request]
    # Rows of the prefix, and those ahead of all keys, see what causality lets them.
    intervals = np.stack([position + 1, position + 1], axis=1)
    inside = np.flatnonzero(index >= 0)
    own = positions[request[inside] * stride + index[inside]]
    intervals[inside, 0] = prefix[request[inside]]
    intervals[inside, 1] -= own
    return np.ascontiguousarray(intervals, np.int32)


def _outside(intervals: np.ndarray, qo_len: int, kv_len: int, is_causal: bool) -> np.ndarray:
    """On the CPU: bool [qo_len, kv_len], the keys outside the intervals of one request's rows."""
    keys = np.arange(kv_len)
    seen: np.ndarray = (keys < intervals[:, :1]) | (keys >= intervals[:, 1:])
    if is_causal:
        seen &= keys <= np.arange(qo_len)[:, None] + kv_len - qo_len
    return seen


def _read_integers(x: Any, name: str) -> np.ndarray:
    """int64 [n] of numbers that are not negative; an array on a GPU is waited for."""
    a = np.atleast_1d(array.to_host(array.view(x, name)))
    if a.ndim != 1 or a.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name}: got {a.dtype} {list(a.shape)}; wanted integers with one dimension"
        )
    if a.size and ((a.dtype.kind == "i" and a.min() < 0) or a.max() >= 1 << 31):
        raise ArgumentError(f"{name}: holds {a.min()} to {a.max()}; wanted 0 to {2**31 - 1}")
    return a.astype(np.int64)


def _check_per_request(shape: Any, count: int, name: str) -> None:
    if tuple(shape) != (count,) and (count != 1 or shape):
        raise ArgumentError(f"{name}: shape is {list(shape)}; wanted [{count}], one a request")


def _item_length(value: Any) -> int:
    """An integer, or an array without axes that holds one."""
    if getattr(value, "shape", None) == ():
        with contextlib.suppress(TypeError):
            value = operator.index(value)
    return parse.require_int(value, "token_pos_in_items_len", 0)


def _item_stride(stride: int, positions: np.ndarray, count: int) -> int:
    """Entries of a request in token_pos_in_items_ptr; 0 stands for all, if there is one request."""
    if stride == 0 and count > 1:
        raise ArgumentError(
            f"token_pos_in_items_len: got 0, for {positions.size} entries and {count} requests; "
            "wanted how many entries each request has in token_pos_in_items_ptr"
        )
    return stride or int(positions.size)

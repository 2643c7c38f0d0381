"""Custom masks of a batch: bools or bits of all requests, one after another; or runs of keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last, require_dtype
from ..core import dtypes
from ..errors import ArgumentError
from ..inputs.row_mask import MaskBits
from ..inputs.workspace import copy_on_device, same_device
from . import multi_item
from .requests import Batch


@dataclass(frozen=True, slots=True)
class Mask:
    """view: the caller's mask, then the packed bits on the device; None without a mask.

    bits: the packed mask on the CPU. runs: instead of all these, _item_runs.read_runs.
    """

    view: ArrayView | None = None
    is_packed: bool = False
    bits: np.ndarray | None = None
    runs: np.ndarray | None = None

    def check(self, batch: Batch, workspace: ArrayView) -> None:
        """ArgumentError unless the mask has a bit for every row and key of the batch."""
        v = self.view
        if v is None or batch.mask_indptr is None:
            return
        if self.is_packed:
            name = "packed_custom_mask"
            require_dtype(v, dtypes.uint8, name)
            wanted, unit = int(batch.mask_indptr[-1]), "bytes, each request from a byte on"
        else:
            name = "custom_mask"
            require_dtype(v, dtypes.bool_, name)
            lengths = batch.requests
            wanted, unit = int((lengths.qo_len * lengths.kv_len).sum()), "bools"
        match(v, "n", Dims(), name)
        require_contiguous_last(v, name)
        if v.shape[0] < wanted or (v.shape[0] > wanted and not self.is_packed):
            raise ArgumentError(
                f"{name}: holds {v.shape[0]}; wanted {wanted} {unit}: qo_len x kv_len of every "
                "request, flattened"
            )
        same_device(workspace, **{name: v})

    def copied(self) -> Mask:
        """On the CPU: the same, in memory of its own."""
        if self.view is None:
            return self
        return replace(self, bits=array.as_numpy(self.view).copy())

    def of_request(self, batch: Batch, index: int) -> np.ndarray | None:
        """On the CPU: bool [qo_len, kv_len] of one request."""
        if self.runs is not None:
            begin, qo_len = int(batch.qo_indptr[index]), int(batch.requests.qo_len[index])
            own = self.runs[begin : begin + qo_len]
            return multi_item.visible(own, qo_len, int(batch.requests.kv_len[index]))
        if self.bits is None or batch.mask_indptr is None:
            return None
        lengths = batch.requests
        qo_len, kv_len = int(lengths.qo_len[index]), int(lengths.kv_len[index])
        if self.is_packed:
            return reference.unpack_mask(self.bits[batch.mask_indptr[index] :], qo_len, kv_len)
        begin = int((lengths.qo_len[:index] * lengths.kv_len[:index]).sum())
        return self.bits[begin : begin + qo_len * kv_len].reshape(qo_len, kv_len)

    def device_parts(self, batch: Batch) -> list[np.ndarray]:
        """What a plan brings to the device, as int32 words: the runs, or what packing needs there,
        offsets in bools and in bytes."""
        if self.runs is not None:
            return [self.runs.reshape(-1)]
        if self.view is None or self.is_packed or batch.mask_indptr is None:
            return []
        lengths = batch.requests
        begins = np.zeros(batch.num_requests + 1, np.int64)
        np.cumsum(lengths.qo_len * lengths.kv_len, out=begins[1:])
        return [begins.view(np.int32), batch.mask_indptr.view(np.int32)]

    def on_device(
        self,
        batch: Batch,
        workspace: ArrayView,
        buffer: ArrayView | None,
        parts: list[int],
        stream: int,
    ) -> tuple[Mask, MaskBits]:
        """The mask as kernels read it: runs, or bits in `buffer`, or the caller's own if they are
        packed, or new memory. `parts` ends with the addresses of `device_parts`.
        """
        if self.runs is not None:
            return self, MaskBits(parts[-1], 0, self.runs.nbytes)
        packed = self._packed_on_device(batch, workspace, buffer, parts, stream)
        return Mask(packed, is_packed=True), MaskBits(packed.ptr, 0, packed.shape[0])

    def _packed_on_device(
        self,
        batch: Batch,
        workspace: ArrayView,
        buffer: ArrayView | None,
        indptrs: list[int],
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
        target = _flat(packed.ptr, num_bytes, dtypes.uint8, packed)
        begins, starts = (
            _flat(address, batch.num_requests + 1, dtypes.int64, workspace) for address in indptrs
        )
        packbits.launch(v, target, begins, starts, True, stream)
        array.release(workspace, v)
        return packed


NO_MASK = Mask()


def read_mask(custom_mask: Any, packed_custom_mask: Any, runs: np.ndarray | None = None) -> Mask:
    """The mask of a plan, of which the packed one wins."""
    if runs is not None:
        if custom_mask is packed_custom_mask is None:
            return Mask(runs=runs)
        raise ArgumentError(
            "custom_mask, prefix_len_ptr: both a mask and multi-item scoring, which says what rows "
            "see; pass one of them"
        )
    if packed_custom_mask is not None:
        return Mask(array.view(packed_custom_mask, "packed_custom_mask"), is_packed=True)
    if custom_mask is not None:
        return Mask(array.view(custom_mask, "custom_mask"))
    return NO_MASK


def _flat(address: int, size: int, dtype: dtypes.DType, like: ArrayView) -> ArrayView:
    return ArrayView(address, (size,), (1,), dtype, like.device, like.framework, False, like.owner)

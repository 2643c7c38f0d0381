"""The caller's buffers of a wrapper in graph mode: captured kernels read them, plans fill them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous_last, require_dtype
from ..core import dtypes
from ..errors import ArgumentError, PlanError
from .mask import Mask
from .requests import Batch
from .workspace import copy_on_device, int32_on_device, require_apart, same_device


def _holds(name: str) -> str:
    """What a buffer of this name holds, in the terms of Batch; the name is a wrapper's argument."""
    return name.removesuffix("fer").removesuffix("_buf").removeprefix("paged_")


class GraphBuffers:
    """Views of the buffers by what they hold; all None without graph mode.

    The wrapper reads page ids and masks from them. Offsets and lengths are written for the
    caller's own kernels: the wrapper's read a work list instead.
    """

    def __init__(self, workspace: ArrayView, buffers: dict[str, Any]) -> None:
        self.num_requests = -1
        self._views: dict[str, ArrayView] = {}
        self._names: dict[str, str] = {}
        for name, x in buffers.items():
            holds = _holds(name)
            if x is None:
                if "mask" not in holds:
                    raise ArgumentError(
                        f"{name}: use_cuda_graph=True needs this buffer, for the captured graph to "
                        "read from; pass an int32 array"
                    )
                continue
            v = array.view(x, name)
            require_dtype(v, dtypes.uint8 if holds == "custom_mask" else dtypes.int32, name)
            if len(v.shape) != 1 or v.readonly:
                raise ArgumentError(
                    f"{name}: wanted a writable array with one dimension, got {v!r}"
                )
            require_contiguous_last(v, name)
            same_device(workspace, **{name: v})
            require_apart(workspace, **{name: v})
            self._views[holds], self._names[holds] = v, name
        self._check_sizes()

    def _check_sizes(self) -> None:
        counts = {}
        for holds, extra in (
            ("qo_indptr", 1),
            ("kv_indptr", 1),
            ("kv_last_page_len", 0),
            ("kv_len_arr", 0),
        ):
            if holds in self._views:
                counts[self._names[holds]] = self._views[holds].shape[0] - extra
        if not counts:
            return
        self.num_requests = min(counts.values())
        if len(set(counts.values())) > 1 or self.num_requests < 0:
            sizes = ", ".join(f"{name} {size}" for name, size in counts.items())
            raise ArgumentError(
                f"{', '.join(counts)}: they are for different numbers of requests: {sizes}; wanted "
                "requests + 1 offsets, and one last page for each request"
            )
        if ("custom_mask" in self._views) != ("mask_indptr" in self._views):
            have, lack = sorted(("custom_mask", "mask_indptr"), key=lambda x: x not in self._views)
            raise ArgumentError(
                f"{lack}_buf: missing, but {have}_buf is there; masks need both buffers"
            )

    def require_apart(self, workspace: ArrayView) -> None:
        """ArgumentError if a buffer has memory in this float workspace."""
        require_apart(workspace, **{self._names[holds]: v for holds, v in self._views.items()})

    @property
    def kv_indices(self) -> ArrayView | None:
        return self._views.get("kv_indices")

    @property
    def mask(self) -> ArrayView | None:
        return self._views.get("custom_mask")

    def check(self, batch: Batch, mask: Mask) -> None:
        """PlanError or ArgumentError if the buffers cannot hold this batch."""
        if batch.num_requests != self.num_requests:
            raise PlanError(
                f"indptr: {batch.num_requests} requests, but the buffers of this wrapper are for "
                f"{self.num_requests}, and a captured graph keeps their number; pad the batch with "
                "empty requests, or use a wrapper for each number"
            )
        if self.kv_indices is not None and batch.num_page_ids > self.kv_indices.shape[0]:
            raise ArgumentError(
                f"{self._names['kv_indices']}: holds {self.kv_indices.shape[0]} page ids and this "
                f"plan has {batch.num_page_ids}; make the wrapper with a larger buffer"
            )
        if (mask.view is None) != (self.mask is None):
            raise PlanError(
                "custom_mask: given, but the wrapper was made without custom_mask_buf and "
                "mask_indptr_buf; make it with both"
                if self.mask is None
                else "custom_mask: none was given, but the wrapper was made with custom_mask_buf, "
                "so that its graphs read a mask; pass one, or make a wrapper without"
            )
        if self.mask is not None and batch.mask_indptr is not None:
            need = int(batch.mask_indptr[-1])
            if need > self.mask.shape[0]:
                raise ArgumentError(
                    f"custom_mask_buf: holds {self.mask.shape[0]} bytes and this plan's mask takes "
                    f"{need}; make the wrapper with a larger buffer"
                )
            if self._views["mask_indptr"].shape[0] < batch.num_requests + 1:
                raise ArgumentError(
                    f"mask_indptr_buf: holds {self._views['mask_indptr'].shape[0]} offsets; wanted "
                    f"{batch.num_requests + 1}"
                )

    def host_parts(self, batch: Batch) -> list[tuple[np.ndarray, int]]:
        """(values, address) of what plan() writes into the buffers from the host."""
        if not self._views:
            return []
        return [(value, v.ptr) for v, value in self._values(batch)]

    def _values(self, batch: Batch) -> list[tuple[ArrayView, np.ndarray]]:
        values = (
            ("qo_indptr", batch.qo_indptr),
            ("kv_indptr", batch.kv_indptr),
            ("kv_last_page_len", batch.last_page_len),
            ("kv_len_arr", batch.requests.kv_len),
            ("mask_indptr", batch.mask_indptr),
        )
        pairs = [(self._views.get(holds), value) for holds, value in values]
        return [(v, value) for v, value in pairs if v is not None and value is not None]

    def copy_page_ids(self, ids: ArrayView, count: int, stream: int) -> None:
        assert self.kv_indices is not None
        copy_on_device(self.kv_indices.ptr, ids.ptr, 4 * count, ids.device.index, stream)

    def copy_last_page_len(self, batch: Batch, stream: int) -> None:
        v, target = batch.last_page_len_device, self._views.get("kv_last_page_len")
        if v is not None and target is not None:
            held = int32_on_device(v, self._names["kv_last_page_len"])
            array.acquire(target, held)
            copy_on_device(target.ptr, held.ptr, 4 * batch.num_requests, v.device.index, stream)
            array.release(target, held)

    def fill_on_cpu(self, batch: Batch) -> None:
        values = self._values(batch)
        if self.kv_indices is not None and batch.page_ids is not None:
            values.append((self.kv_indices, batch.page_ids[: batch.num_page_ids]))
        for v, value in values:
            array.as_numpy(v)[: value.size] = value

"""Fresh inputs of a case: random normal arrays, and page tables whose pages are scattered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import array
from ..array import Device
from ..core import dtypes
from ..core.cupy_module import cupy_module
from ..core.dtypes import DType
from .cases import DTYPE, Case

# The noise repeats after so many elements. A prime keeps rows, heads and pages different.
_PERIOD = 4_194_301
_STARTS = 4096  # places in the noise where an array's may begin
NAN_BITS = 0x7FC0  # of bfloat16


@dataclass(frozen=True)
class Inputs:
    """Arrays of a case in bfloat16, tables in int32.

    q        [rows, Hq, Dqk], the requests' rows one after another
    k, v     ragged [keys, Hkv, D], or paged [pages, page_size, Hkv, D]; of a latent case k is all
             and v the first columns of it
    indices  [requests * pages of one], on the arrays' device; None if ragged
    tables   the same on the host, [requests, pages of one]
    out      [rows, Hq, Dvo], to be written
    """

    q: Any
    k: Any
    v: Any
    out: Any
    indices: Any = None
    tables: np.ndarray | None = None


class Arrays:
    """Makes arrays of one framework on one device: CuPy's on a GPU, or NumPy's."""

    def __init__(self, framework: str, device: Device, seed: int) -> None:
        self.framework, self.device = framework, device
        self.random = np.random.default_rng(seed)
        self._noise: dict[DType, Any] = {}

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return array.empty_on(self.framework, self.device, shape, dtype)

    def normal(self, *shape: int, dtype: DType = dtypes.bfloat16) -> Any:
        """Standard normal numbers (zeros would run faster than real data)."""
        built = self.empty(shape, dtype)
        bits = as_bits(built).reshape(-1)
        start = min(_PERIOD, bits.size)
        bits[:start] = self._noise_of(dtype, start)
        while start < bits.size:
            stop = min(2 * start, bits.size)
            bits[start:stop] = bits[: stop - start]
            start = stop
        return built

    def _noise_of(self, dtype: DType, count: int) -> Any:
        """So many elements of noise as bits, which is made once and begins anywhere."""
        known = self._noise.get(dtype)
        if known is None or known.size < count:
            noise = self.random.standard_normal(count + _STARTS, np.float32).astype(dtype.numpy)
            known = as_bits(self.empty(noise.shape, dtype))
            _write(known, noise.view(known.dtype))
            self._noise[dtype] = known
        start = int(self.random.integers(known.size - count + 1))
        return known[start : start + count]

    def wait(self) -> None:
        """Until the device has done what it was told. Raises what went wrong there."""
        if self.device.kind == "cuda":
            cupy_module().cuda.runtime.deviceSynchronize()

    def int32(self, values: np.ndarray) -> Any:
        return self._with(values.astype(np.int32), dtypes.int32)

    def uint8(self, values: bytes) -> Any:
        return self._with(np.frombuffer(values, np.uint8), dtypes.uint8)

    def _with(self, values: np.ndarray, dtype: DType) -> Any:
        built = self.empty(values.shape, dtype)
        view = array.view(built, "array")
        on_cpu = view.device.kind == "cpu"
        _write(array.as_numpy(view) if on_cpu else array.as_cupy(view), values)
        return built


def as_bits(x: Any) -> Any:
    """An array of bfloat16 as int16, of fp8 as int8, which every library can copy and hand over."""
    result = array.view(x, "array")
    bits = np.dtype(np.int16 if result.dtype.itemsize == 2 else np.int8)
    if result.device.kind == "cpu":
        return array.as_numpy(result).view(bits)
    return array.as_cupy(result, bits)


def to_host(x: Any) -> np.ndarray:
    """Bits as a NumPy array."""
    return x if isinstance(x, np.ndarray) else np.asarray(x.get())


def _write(target: Any, values: np.ndarray) -> None:
    if isinstance(target, np.ndarray):
        target[...] = values
    else:
        target.set(values)


def make_inputs(case: Case, arrays: Arrays) -> Inputs:
    """Inputs of one case. The pool has one page more than is needed, which holds NaN."""
    rows = case.requests * case.q_len
    q = arrays.normal(rows, case.num_qo_heads, case.head_dim_qk)
    out = arrays.empty((rows, case.num_qo_heads, case.head_dim_vo), dtypes.parse(DTYPE))
    if not case.is_paged:
        keys = case.requests * case.kv_len, case.num_kv_heads
        k, v = (arrays.normal(*keys, dim) for dim in (case.head_dim_qk, case.head_dim_vo))
        return Inputs(q, k, v, out)
    pages = -(-case.kv_len // case.page_size)
    tables = arrays.random.permutation(case.requests * pages).reshape(case.requests, pages)
    pool = tables.size + 1, case.page_size, case.num_kv_heads
    k = arrays.normal(*pool, case.head_dim_qk)
    v = k[..., : case.head_dim_vo] if case.is_latent else arrays.normal(*pool, case.head_dim_vo)
    for x in (k,) if case.is_latent else (k, v):
        as_bits(x)[-1] = NAN_BITS
    return Inputs(q, k, v, out, arrays.int32(tables.reshape(-1)), tables)

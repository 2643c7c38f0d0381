"""An ordinary launch of prefill over the requests that a distributed plan names."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import array
from ..core import dtypes, parse
from ..core.dtypes import DType
from ..core.spec import AttentionSpec
from ..engine.mask import NO_MASK
from ..engine.requests import Batch
from ..engine.run_batch import NO_OPTIONS, run
from ..engine.spec import RawOptions, make_spec
from ..engine.wrapper import BatchWrapper, planning
from ..errors import UnsupportedError
from ..schedule.batch import BatchRequests
from ..wrappers.prefill import BatchPrefillWithRaggedKVCacheWrapper


@functools.cache
def _names() -> frozenset[str]:
    """The options that plan() of ragged prefill takes as they come."""
    known = inspect.signature(BatchPrefillWithRaggedKVCacheWrapper.plan).parameters
    return frozenset(known) & frozenset(RawOptions._fields)


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """What a distributed prefill is told besides lengths, checked.

    spec   of the whole model, as one GPU would have it
    raw    the options as they came, for plans of launches
    """

    spec: AttentionSpec
    raw: dict[str, Any]

    @property
    def heads_and_dims(self) -> tuple[int, int, int, int]:
        """Heads of q, KV heads, head dims of k and of v."""
        spec = self.spec
        return spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.head_dim_vo

    @property
    def dtype(self) -> DType:
        """The dtype of q, k and v."""
        return self.spec.dtype_q

    def facts(self) -> dict[str, Any]:
        """What all ranks must share, by name."""
        return {field.name: getattr(self.spec, field.name) for field in fields(self.spec)}


def read_options(
    heads_and_dims: tuple[Any, Any, Any, Any], q_data_type: Any, on_gpu: bool, raw: dict[str, Any]
) -> PrefillOptions:
    """The options, of which everything is refused here that one GPU would refuse too."""
    for name in raw:
        if name not in (*_names(), "o_dtype"):
            raise UnsupportedError(
                f"{name}: is no option of prefill over several GPUs; wanted one of "
                f"{', '.join(sorted(_names()))}"
            )
    names = "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"
    *first, dim_vo = heads_and_dims
    dim_vo = first[2] if dim_vo is None else dim_vo
    heads = tuple(map(parse.require_int, (*first, dim_vo), names))
    dtype = dtypes.parse(q_data_type, "q_data_type")
    spec = make_spec(RawOptions(**raw), heads, dtype, dtype)  # type: ignore[arg-type]
    spec.problem().check_supported(on_cpu=not on_gpu)
    return PrefillOptions(spec, raw)


class StageWrapper(BatchWrapper):
    """Prefill of ragged requests whose keys may overlap, as those of two pieces of a request do."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__("cuda" if on_gpu else "cpu", "NHD", False, {}, "auto", None)

    @planning
    def plan(
        self,
        requests: BatchRequests,
        num_rows: int,
        num_keys: int,
        heads_and_dims: tuple[int, int, int, int],
        dtype: DType,
        raw: dict[str, Any],
    ) -> None:
        """Schedule these requests, of `num_rows` rows of q, some of which may be of none."""
        options = self._options(heads_and_dims, 0, (dtype.name, dtype.name), None, **raw)
        batch = Batch(
            requests,
            num_rows,
            num_keys,
            np.append(requests.q_start, num_rows),
            np.append(requests.kv_start, num_keys),
        )
        self._install(options, batch, NO_MASK, (0, True))

    def attend(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        """Write the rows of the requests to `out`, and their LSE where an array is given."""
        batch = self._require_plan().batch
        is_whole = int(batch.requests.qo_len.sum()) == batch.num_rows
        if is_whole or array.view(q, "q").device.kind == "cuda":
            run(self, q=q, k=k, v=v, out=out, lse=lse, options=NO_OPTIONS)
            return
        # The reference writes all rows.
        whole, whole_lse = run(self, q=q, k=k, v=v, options=NO_OPTIONS._replace(return_lse=True))
        for target, source in ((out, whole), (lse, whole_lse)):
            if target is not None:
                written, values = _numbers(target), _numbers(source)
                for begin, count in zip(batch.requests.q_start, batch.requests.qo_len, strict=True):
                    written[begin : begin + count] = values[begin : begin + count]


def _numbers(x: Any) -> np.ndarray:
    return array.as_numpy(array.view(x, "an answer"))

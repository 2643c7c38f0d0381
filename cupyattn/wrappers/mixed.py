"""Batches of very different requests, of many query rows and of few, in one plan and one launch."""

from __future__ import annotations

from typing import Any

from .. import array
from ..array import ArrayView, Device
from ..batch.mask import NO_MASK
from ..batch.requests import PageNames, read_paged_lengths, read_rows
from ..batch.run import NO_SCALES, Scales, run
from ..batch.wrapper import BatchWrapper, Plan
from ..core import dtypes
from ..core.device import device_props
from ..errors import ArgumentError, PlanError, UnsupportedError
from ..inputs import geometry, parse
from ..inputs.geometry import PlanOptions, Variant
from ..inputs.workspace import view_workspace
from ..launch.attention.batch import BatchLauncher, BatchSchedule
from ..launch.driver.enqueue import cuda

_NAMES = PageNames("kv_indptr", "kv_indices", "kv_len_arr")
_FIRST_WORKSPACE_BYTES = 32 << 20


class OwnWorkspace(BatchWrapper):
    """A batch wrapper whose float workspace is its own, and becomes larger as plans need it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outgrown: list[ArrayView] = []

    def _schedule_variant(
        self, plan: Plan, variant: Variant
    ) -> tuple[BatchLauncher, BatchSchedule]:
        launcher, schedule = super()._schedule_variant(plan, variant)
        need, have = schedule.workspace_bytes, self._workspace.shape[0]
        if need > have and not self._is_probe:
            # Launches on any stream may still use what was outgrown; sizes double, so it is little.
            self._outgrown.append(self._workspace)
            larger = array.empty((max(need, 2 * have),), dtypes.uint8, self._workspace)
            self._workspace = view_workspace(larger)
        return launcher, schedule


class BatchAttention(OwnWorkspace):
    """Attention of a batch in which some requests bring long chunks and others one token.

    kv_layout   "NHD" or "HND": pages [page_size, num_kv_heads, head_dim], or heads first.
    device      "cuda", "cuda:1", "cpu", or a torch.device: where the arrays are going to be.

    One launch serves all requests: blocks of prefill, bound by the matrix units, run beside blocks
    of decode, bound by memory. The workspace is the wrapper's own: made by the first plan() in the
    framework of plan()'s arrays (CuPy, where they are NumPy's), and larger as plans need it.

    Raises ArgumentError for a device of another name. Semantics: FlashInfer's class of the same
    name.
    """

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        self._kv_layout = parse.kv_layout(kv_layout)
        self._device = _parse_device(device)
        self._current: Plan | None = None
        self._is_graph = self._is_probe = False

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        """Schedule the batch that the next runs are for.

        qo_indptr   int32 or int64 [B + 1] from 0 on: rows of q of each request, its last tokens.
        kv_indptr   int32 or int64 [B + 1], in pages: request b has the pages
                kv_indices[kv_indptr[b]:kv_indptr[b + 1]].
        kv_indices  int32 or int64 [>= kv_indptr[B]]: ids of pages.
        kv_len_arr  int32 or int64 [B]: keys of each request, at most page_size for each of its
                pages.
        They may be on the host or on the device, where all but the ids cost a copy that waits for
        it each. num_qo_heads to page_size are those of the arrays that run() is going to get.
        causal      row i of a request sees keys up to i + kv_len - qo_len.
        sm_scale    default 1 / sqrt(head_dim_qk). logits_soft_cap: default none.
        use_profiler must be False.

        Raises ArgumentError or UnsupportedError, and the first plan DeviceError without a GPU; the
        last plan then stays in force.
        """
        if use_profiler:
            raise UnsupportedError("use_profiler: kernels are not instrumented; pass False")
        page_size = geometry.count(page_size, "page_size")
        if not hasattr(self, "_workspace"):
            is_probe = self._is_probe
            tables = (kv_indices, kv_indptr, qo_indptr, kv_len_arr)
            workspace = _make_workspace(self._device, tables)
            super().__init__(workspace, self._kv_layout, False, {}, "auto", None)
            self._is_probe = is_probe
        arrays = kv_indptr, kv_indices, kv_len_arr
        is_debugging = self._is_debugging()
        batch = read_paged_lengths(read_rows(qo_indptr), *arrays, page_size, _NAMES, is_debugging)
        given = PlanOptions(
            self._kv_layout,
            self._workspace.device,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            page_size,
            q_data_type,
            kv_data_type,
            None,
            False,
            causal,
            "NONE",
            -1,
            logits_soft_cap,
            sm_scale,
            None,
            None,
        )
        self._install(given, batch, NO_MASK, (0, True))

    def run(
        self,
        q: Any,
        kv_cache: Any,
        out: Any = None,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Any = None,
        kv_cache_sf: Any = None,
        *,
        sinks: Any = None,
    ) -> tuple[Any, Any]:
        """Attention of the planned batch: always (out, lse).

        q       [qo_indptr[B], num_qo_heads, head_dim_qk].
        kv_cache    [num_pages, 2, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, 2,
                num_kv_heads, page_size, head_dim] ("HND"), or a pair (K, V) without the 2.
        out, lse    arrays to write instead of new ones; lse float32, base 2.
        k_scale, v_scale    numbers, or float32 arrays [num_kv_heads].
        logits_soft_cap     0, or a cap that replaces the plan's; the next run schedules anew.
        sinks   float32 [num_qo_heads]: extra natural-log logits in the denominator.
        profiler_buffer and kv_cache_sf must be None.

        Returns out [qo_indptr[B], num_qo_heads, head_dim_vo] and lse [qo_indptr[B], num_qo_heads].
        It never waits for the device. Raises ArgumentError for arrays that do not fit the plan, or
        a cap where the plan has none; PlanError without a plan.
        """
        geometry.refuse("not supported", profiler_buffer=profiler_buffer)
        geometry.refuse("4-bit caches are not supported", kv_cache_sf=kv_cache_sf)
        if self._current is None:
            raise PlanError("run() was called before plan(); call plan() first")
        if logits_soft_cap:
            if not self._current.geometry.problem.soft_cap:
                raise ArgumentError(
                    f"logits_soft_cap: run() got {logits_soft_cap} and the plan has none; pass it "
                    "to plan()"
                )
            self._change(logits_soft_cap=logits_soft_cap)
        scales = NO_SCALES
        if k_scale is not None or v_scale is not None:
            scales = Scales(None, k_scale, v_scale)
        k, v = kv_cache, None
        if isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
            k, v = kv_cache
        answer: tuple[Any, Any] = run(self, q, k, v, out, lse, sinks, scales, True)
        return answer


def _parse_device(device: Any) -> Device:
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "cpu") or not (index or "0").isdigit():
        raise ArgumentError(f"device: got {device!r}; wanted 'cuda', 'cuda:<index>' or 'cpu'")
    if kind == "cpu":
        return Device("cpu", 0)
    return Device("cuda", int(index) if index else -1)


def _make_workspace(device: Device, tables: tuple[Any, ...]) -> Any:
    """On the device, in the framework of the tables: torch's if one is, else CuPy's or NumPy's."""
    names = ("kv_indices", "kv_indptr", "qo_indptr", "kv_len_arr")
    views = [array.view(x, name) for x, name in zip(tables, names, strict=True)]
    if device.kind == "cuda":
        device_props(max(0, device.index))  # or it says what is missing
    if device.kind == "cuda" and device.index < 0:
        on_gpu = [v.device for v in views if v.device.kind == "cuda"]
        device = on_gpu[0] if on_gpu else Device("cuda", cuda().get_device())
    is_torch = any(v.framework == "torch" for v in views)
    framework = "torch" if is_torch else "cupy"
    return array.empty_on(framework, device, (_FIRST_WORKSPACE_BYTES,), dtypes.uint8)

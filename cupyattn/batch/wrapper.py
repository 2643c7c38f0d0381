"""The base of the batch wrappers: what plan() leaves behind, and how it gets to the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from .. import array
from ..errors import ArgumentError, PlanError
from ..inputs import geometry as batch_geometry
from ..inputs import parse
from ..inputs.geometry import Geometry, PlanOptions, Variant, find_geometry
from ..inputs.workspace import (
    int32_on_device,
    refuse_capture,
    require_workspace,
    same_device,
    view_workspace,
)
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule, Capacity
from ..launch.driver.enqueue import cuda
from .graph_buffers import GraphBuffers
from .mask import NO_MASK, Mask
from .plan import Plan, Prepared
from .requests import Batch, require_row_limit
from .staging import Copy, DeviceBuffer, Staging


class BatchWrapper:
    """Shared by all batch wrappers; see there for arguments."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: dict[str, Any],
        backend: str,
        jit_args: Any,
    ) -> None:
        self._kv_layout = parse.kv_layout(kv_layout)
        self._is_graph = parse.flag(use_cuda_graph, "use_cuda_graph")
        batch_geometry.backend(backend, jit_args)
        self._workspace = view_workspace(float_workspace_buffer)
        self._buffers = GraphBuffers(self._workspace, buffers if self._is_graph else {})
        self._current_stream = (
            array.stream_reader(self._workspace) if self._workspace.device.kind == "cuda" else int
        )
        self._current: Plan | None = None
        self._frozen: tuple[PlanOptions, Capacity, tuple[int, bool]] | None = None
        # The variant of the last run that needed another than was planned, and of which geometry.
        self._preferred: tuple[Geometry, Variant] | None = None
        self._words = DeviceBuffer(self._workspace)
        self._rotated = DeviceBuffer(self._workspace)  # keys, where a plan rotates them ahead
        self._mask_words = DeviceBuffer(self._workspace)  # packed masks of bools, of runs
        # Graph mode: words of the other variants that were ever run, which stay where they are.
        self._variant_words: dict[Variant, DeviceBuffer] = {}
        self._staging: Staging | None = None
        self._is_probe, self._measured = False, (0, 0)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._is_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Use another float workspace, on the same device; the plan stays.

        int_workspace_buffer is accepted for compatibility: the wrapper's own grows as it must.
        Raises WorkspaceError if the new one is misaligned, or too small for the plan.
        """
        v = view_workspace(float_workspace_buffer)
        if v.device != self._workspace.device or v.framework != self._workspace.framework:
            raise ArgumentError(
                f"float_workspace_buffer: is {v.framework}'s on {v.device}, and the wrapper was "
                f"made for {self._workspace.framework}'s on {self._workspace.device}; make a new "
                "wrapper"
            )
        if int_workspace_buffer is not None:
            same_device(v, int_workspace_buffer=array.view(int_workspace_buffer, "int"))
        plan = self._current
        for prepared in plan.prepared.values() if plan else ():
            require_workspace(v, prepared.schedule.workspace_bytes, "the current plan")
        self._workspace = v

    def end_forward(self) -> None:
        """Does nothing; kept for compatibility."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(float bytes, int bytes) that plan() with these arguments takes; nothing is planned.

        The first must fit float_workspace_buffer; the second are memory of the wrapper's own. A
        wrapper in graph mode answers as for its first plan.
        """
        probe = copy.copy(self)
        probe._is_probe = True
        probe.plan(*args, **kwargs)
        return probe._measured

    # --- planning ---

    def _change(self, **changes: Any) -> None:
        """Change options of the current plan, of which None stay; its next run schedules anew."""
        plan = self._require_plan()
        before = plan.geometry.given
        given = before._replace(**{n: x for n, x in changes.items() if x is not None})
        if given == before:
            return
        if self._is_graph:
            batch_geometry.require_frozen(before, given)
        self._current = replace(plan, geometry=find_geometry(given), prepared={})

    def _require_plan(self) -> Plan:
        if self._current is None:
            raise PlanError("run() was called before plan(); call plan() first")
        return self._current

    def _install(
        self, given: PlanOptions, batch: Batch, mask: Mask, split: tuple[int, bool]
    ) -> None:
        """Make a batch the current plan; nothing changes if anything is wrong with it."""
        if self._is_probe:
            self._measured = self._sizes(given, batch, mask, split)
            return
        # --- 1. Validate ---
        geometry = find_geometry(given)
        require_row_limit(batch, geometry.group_size)
        mask.check(batch, self._workspace)
        capacity = self._freeze(given, batch, mask, split) if self._is_graph else None
        plan = Plan(geometry, batch, split, capacity, mask, self._workspace.framework)
        # --- 2. Schedule on the host ---
        if given.device.kind == "cpu":
            self._keep_on_cpu(plan)
        else:
            self._upload(plan, self._schedule(plan))
        if capacity is not None and self._frozen is None:
            self._frozen = given, capacity, split
        self._current = plan

    def _freeze(
        self, given: PlanOptions, batch: Batch, mask: Mask, split: tuple[int, bool]
    ) -> Capacity:
        """What all plans of a wrapper in graph mode share; PlanError where this one does not."""
        self._buffers.check(batch, mask)
        if self._frozen is None:
            return self._capacity(batch, given.page_size)
        before, capacity, split_before = self._frozen
        batch_geometry.require_frozen(before, given)
        if split != split_before:
            raise PlanError(
                "fixed_split_size, disable_split_kv: they differ from those of the first plan of "
                "this wrapper, but a captured graph keeps them; use a separate wrapper for each"
            )
        if batch.num_rows > capacity.num_rows:
            raise PlanError(
                f"qo_indptr: {batch.num_rows} query rows, but the first plan of this wrapper had "
                f"{capacity.num_rows}, and a captured graph has room for no more; plan the largest "
                "batch first"
            )
        return capacity

    def _capacity(self, batch: Batch, page_size: int) -> Capacity:
        ids = self._buffers.kv_indices
        return Capacity(
            num_requests=batch.num_requests,
            num_rows=batch.num_rows,
            max_qo_len=int(batch.requests.qo_len.max(initial=1)),
            num_tokens=batch.num_keys if ids is None else ids.shape[0] * page_size,
        )

    def _keep_on_cpu(self, plan: Plan) -> None:
        batch = plan.batch
        if batch.page_ids_device is not None:
            same_device(self._workspace, kv_indices=batch.page_ids_device)
        if batch.page_ids is not None:
            batch.page_ids = batch.page_ids.astype(np.int64)
        plan.mask = plan.mask.copied()
        self._buffers.fill_on_cpu(batch, plan.mask)

    def _variants(self, geometry: Geometry) -> list[Variant]:
        """The variants to plan for: the one that runs are expected to need comes first."""
        if self._is_graph:
            return [geometry.default_variant, *self._variant_words]
        if self._preferred is not None and self._preferred[0] is geometry:
            return [self._preferred[1]]
        return [geometry.default_variant]

    def _schedule(self, plan: Plan) -> dict[Variant, tuple[BatchLauncher, BatchSchedule]]:
        # An eager run without rows launches nothing, but a graph is replayed.
        if plan.batch.num_rows == 0 and plan.capacity is None:
            return {}
        made = {v: self._schedule_variant(plan, v) for v in self._variants(plan.geometry)}
        for _, schedule in made.values():
            if schedule.workspace_bytes:
                require_workspace(self._workspace, schedule.workspace_bytes, "this plan")
        return made

    def _schedule_variant(
        self, plan: Plan, variant: Variant
    ) -> tuple[BatchLauncher, BatchSchedule]:
        launcher = plan.geometry.launcher(variant)
        batch = plan.batch
        if batch.levels is not None:
            schedule = launcher.schedule_levels(batch.requests, batch.levels, plan.capacity)
            return launcher, schedule
        split_tokens, may_split = plan.split
        schedule = launcher.schedule(
            batch.requests,
            split_tokens=split_tokens,
            may_split=may_split,
            capacity=plan.capacity,
        )
        return launcher, schedule

    def _upload(self, plan: Plan, made: dict[Variant, tuple[BatchLauncher, BatchSchedule]]) -> None:
        """Bring schedules, page table and mask to the device: one copy, and what a graph reads."""
        batch, buffers = plan.batch, self._buffers
        on_device = batch.page_ids_device
        if on_device is not None:
            same_device(self._workspace, kv_indices=on_device)
        stream = self._current_stream()
        refuse_capture(stream, "plan()", "call it before the capture, and between replays")
        # --- where things go: `inner` parts into memory of the wrapper's own, one after another ---
        usual = next(iter(made), None)
        inner: list[np.ndarray] = [] if usual is None else [made[usual][1].words]
        outer = [(made[v][1].words, self._variant_words[v].address) for v in made if v != usual]
        outer += self._host_parts(plan)
        ids = None if batch.page_ids is None else batch.page_ids[: batch.num_page_ids]
        if ids is not None and ids.size:
            if buffers.kv_indices is not None:
                outer.append((ids, buffers.kv_indices.ptr))
            else:
                inner.append(ids)
        inner += plan.mask.device_parts(batch)
        block, copies, places = self._write(inner, outer)
        base = self._reserve(block, batch)
        if block:
            copies.insert(0, (0, block, base))
        if copies:
            assert self._staging is not None
            self._staging.send(copies, stream)
        # --- what a launch is told ---
        for variant, (launcher, schedule) in made.items():
            words = base if variant == usual else self._variant_words[variant].address
            rotated = self._reserve_rotated(schedule)
            owner = self._words.view, self._rotated.view
            plan.prepared[variant] = Prepared(launcher, schedule, words, owner, rotated)
        views = []
        if on_device is not None:
            held = int32_on_device(on_device, "kv_indices")
            array.acquire(self._workspace, held)
            if buffers.kv_indices is not None:
                buffers.copy_page_ids(held, batch.num_page_ids, stream)
                array.release(self._workspace, held)
            else:
                plan.page_ids = held.ptr
                views.append(held)
        elif ids is not None and ids.size and buffers.kv_indices is None:
            plan.page_ids = base + 4 * places[0 if usual is None else 1]
        if buffers.kv_indices is not None:
            plan.page_ids = buffers.kv_indices.ptr
        buffers.copy_last_page_len(batch, stream)
        if plan.mask is not NO_MASK:
            parts = [base + 4 * place for place in places[-2:]]
            plan.mask, plan.bits = plan.mask.on_device(
                batch, self._workspace, buffers.mask, parts, stream
            )
            if plan.mask.view is not None:
                views.append(plan.mask.view)
        plan.is_uniform = plan.framework in ("torch", "cupy")
        if views:
            plan.views = tuple(views)
            plan.is_uniform &= all(v.framework == plan.framework for v in views)

    def _host_parts(self, plan: Plan) -> list[tuple[np.ndarray, int]]:
        """(values, address) of what plan() writes from the host into the caller's buffers."""
        return self._buffers.host_parts(plan.batch, plan.mask)

    def _reserve(self, num_words: int, batch: Batch) -> int:
        """The address of the wrapper's own words, which in graph mode never moves."""
        if not self._is_graph:
            return self._words.reserve(num_words)
        if self._words.size:
            if num_words > self._words.size:
                raise PlanError(
                    f"plan: it takes {4 * num_words} bytes and the first plan of this wrapper had "
                    f"{4 * self._words.size}, where a captured graph reads; use another wrapper"
                )
            return self._words.address
        # A mask may come packed now, and as bools later.
        spare = 8 * (batch.num_requests + 3) if self._buffers.mask is not None else 0
        return self._words.reserve(num_words + spare, exactly=True)

    def _write(
        self, inner: list[np.ndarray], outer: list[tuple[np.ndarray, int]]
    ) -> tuple[int, list[Copy], list[int]]:
        """Write parts into a staging block, each from a 16-byte boundary on.

        Returns the words that all inner parts take, the copies of the outer ones, and the places
        (in words) of the inner ones.
        """
        places, total = [], 0
        parts = [*inner, *(part for part, _ in outer)]
        for part in parts:
            places.append(total)
            total += -(-part.size // 4) * 4
        if total:
            if self._staging is None:
                self._staging = Staging(self._workspace.device.index)
            block = self._staging.block(total)
            for part, place in zip(parts, places, strict=True):
                block[place : place + part.size] = part
        end = places[len(inner)] if outer else total
        copies = [
            (place, part.size, target)
            for (part, target), place in zip(outer, places[len(inner) :], strict=True)
        ]
        return end, copies, places[: len(inner)]

    def _prepare(self, plan: Plan, variant: Variant) -> Prepared:
        """The plan for a variant that nobody foresaw; slow the first time."""
        found = plan.prepared.get(variant)
        if found is not None:
            return found
        stream = self._current_stream()
        refuse_capture(
            stream,
            "the first run with a mask, scales by head, or arrays off 16-byte boundaries,",
            "make one such run before the capture",
        )
        launcher, schedule = self._schedule_variant(plan, variant)
        require_workspace(self._workspace, schedule.workspace_bytes, "this run")
        words = DeviceBuffer(self._workspace)
        address = words.reserve(schedule.words.size, exactly=True)
        _, copies, _ = self._write([], [(schedule.words, address)])
        if copies:
            assert self._staging is not None
            self._staging.send(copies, stream)
        if self._is_graph:
            self._variant_words[variant] = words
        self._preferred = plan.geometry, variant
        rotated = self._reserve_rotated(schedule)
        owner = words.view, self._rotated.view
        found = plan.prepared[variant] = Prepared(launcher, schedule, address, owner, rotated)
        return found

    def _reserve_rotated(self, schedule: BatchSchedule) -> int:
        """The address of memory for the keys that a schedule rotates ahead, 0 for none."""
        num_words = -(-schedule.rotated_bytes // 4)
        return self._rotated.reserve(num_words, exactly=True) if num_words else 0

    def _sizes(
        self, given: PlanOptions, batch: Batch, mask: Mask, split: tuple[int, bool]
    ) -> tuple[int, int]:
        """(float bytes, int bytes) that planning this would take; nothing changes."""
        geometry = find_geometry(given)
        require_row_limit(batch, geometry.group_size)
        if given.device.kind == "cpu":
            return 0, 0
        capacity = self._capacity(batch, given.page_size) if self._is_graph else None
        plan = Plan(geometry, batch, split, capacity, mask, self._workspace.framework)
        if batch.num_rows == 0 and capacity is None:
            return 0, 0
        _, schedule = self._schedule_variant(plan, self._variants(geometry)[0])
        parts = [schedule.words.size, *(part.size for part in mask.device_parts(batch))]
        if batch.page_ids is not None and self._buffers.kv_indices is None:
            parts.append(batch.num_page_ids)
        num_bytes = schedule.rotated_bytes + sum(-(-size // 4) * 16 for size in parts)
        return schedule.workspace_bytes, num_bytes

    def _is_debugging(self) -> bool:
        """CUPYATTN_DEBUG=1: ids of pages on the GPU are read and checked too."""
        return self._workspace.device.kind == "cuda" and cuda().is_debugging

"""The base of the batch wrappers: what plan() leaves behind, and how it gets to the device."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..core.tracing import Untraced
from ..errors import ArgumentError, PlanError
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule, Capacity
from ..launch.driver import params
from ..launch.driver.enqueue import cuda
from . import batch_logits as logits
from . import geometry as batch_geometry
from .geometry import Geometry, PlanOptions, Variant, find_geometry, find_known
from .graph_buffers import GraphBuffers
from .key_share import requests_of_share
from .mask import NO_MASK, Mask
from .own_workspace import enlarge, make_workspace, read_workspace
from .plan_words import wrapper_words
from .requests import Batch, require_row_limit, with_indices
from .row_mask import NO_BITS, MaskBits
from .spec import RawOptions
from .staging import DeviceBuffer, Staging, Upload
from .threads import Turns
from .workspace import (
    int32_on_device,
    num_bytes,
    refuse_capture,
    require_alignment,
    require_apart,
    require_workspace,
    same_device,
    view_workspace,
)

_F = TypeVar("_F", bound=Callable[..., Any])
# What workspace_size() says at least: an array without elements is no buffer everywhere.
_MIN_BYTES = 16
_NO_WORDS = np.zeros(0, np.int32)


@dataclass(slots=True)
class Prepared:
    """One variant of a plan on the device: the addresses of its schedule (`words`) and of keys that
    are rotated, or queries that are widened, before the run (`staged`, 0 for none). `owner` keeps
    that memory. On the CPU,
    which schedules to refuse what a GPU refuses, there is none."""

    launcher: BatchLauncher
    schedule: BatchSchedule
    words: int = 0
    owner: object = None
    staged: int = 0


@dataclass(slots=True)
class Plan:
    """What a run needs of the last plan().

    split       (keys of a split or 0, whether keys may be split)
    page_ids    address of the page table on the device, 0 for ragged keys and on the CPU
    views       arrays of the caller that launches read besides those of the run
    framework   of the workspace
    is_uniform  whether the workspace and all views are of one framework, torch or CuPy
    owner       of the thread that planned, see threads.py
    bits        the mask on the device
    logits      what the expressions of the plan read; `packed_logits` for launches
    bound       launches of the last run that was in the call cache, see run.py
    bounds      by (cached call, workspace, lengths)
    by_q_len    the plan for other numbers of query rows, of which a run of decode may have any
    """

    geometry: Geometry
    batch: Batch
    split: tuple[int, bool]
    capacity: Capacity | None
    mask: Mask
    framework: str
    page_ids: int = 0
    views: tuple[ArrayView, ...] = ()
    bits: MaskBits = NO_BITS
    logits: tuple[ArrayView, ...] = ()
    packed_logits: bytes = params.NO_LOGITS_ARRAYS
    is_uniform: bool = False
    owner: object = None
    prepared: dict[Variant, Prepared] = field(default_factory=dict)
    bound: Any = field(default=None, init=False)
    bounds: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False)
    by_q_len: dict[int, Plan] = field(default_factory=dict, init=False)


class _Known(NamedTuple):
    """The options of the last plan(), none of them an array, whose values may change: as given,
    their types, and what was made of them."""

    asked: tuple[object, ...]
    types: tuple[type, ...]
    options: PlanOptions
    geometry: Geometry


def planning(plan: _F) -> _F:
    """Let a plan() alone change its wrapper meanwhile, which has a workspace to plan for."""

    @functools.wraps(plan)
    def locked(wrapper: BatchWrapper, *args: Any, **kwargs: Any) -> Any:
        with wrapper._turns.planning:
            wrapper._require_workspace((*args, *kwargs.values()))
            if not wrapper._may_follow or wrapper._is_probe:
                return plan(wrapper, *args, **kwargs)
            # For the place where the first run's arrays turn out to be.
            asked = locked, _copied(args), _copied(kwargs)
            wrapper._may_follow = False  # of a plan() inside this one, this one is enough
            try:
                result = plan(wrapper, *args, **kwargs)
            finally:
                wrapper._may_follow = True
            wrapper._host_plan = asked
            return result

    return locked  # type: ignore[return-value]


def _copied(x: Any) -> Any:
    """What plan() was given, in memory that the caller does not write."""
    if isinstance(x, (list, tuple)):
        make = getattr(type(x), "_make", type(x))  # records take their fields one by one
        return make([_copied(part) for part in x])
    if isinstance(x, dict):
        return {name: _copied(part) for name, part in x.items()}
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.clone() if type(x).__module__ == "torch" and hasattr(x, "clone") else x


def exclusive(method: _F) -> _F:
    """Let a method that plans, and then runs, alone use its wrapper meanwhile."""

    @functools.wraps(method)
    def locked(wrapper: BatchWrapper, *args: Any, **kwargs: Any) -> Any:
        with wrapper._turns.planning:
            return method(wrapper, *args, **kwargs)

    return locked  # type: ignore[return-value]


class BatchWrapper(Untraced):
    """What all batch wrappers share; their own documentation says what the arguments are."""

    _rows_name = "qo_indptr"  # the argument of plan() that says how many rows there are
    # FlashInfer's users read and set these. They change nothing here.
    _int_workspace_buffer: Any = None
    _backend = "auto"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: dict[str, Any],
        backend: str,
        jit_args: Any,
    ) -> None:
        """Make a wrapper; the class says what the arguments are."""
        self._kv_layout = parse.kv_layout(kv_layout)
        self._is_graph = parse.flag(use_cuda_graph, "use_cuda_graph")
        batch_geometry.backend(backend, jit_args)
        self._backend = backend
        self._turns = Turns(is_on_gpu=False)
        self._current: Plan | None = None
        self._frozen: tuple[PlanOptions, Capacity, tuple[int, bool]] | None = None
        self._frozen_logits = params.NO_LOGITS_ARRAYS
        # Graph mode: bytes that the first plan of each variant might take, see _room.
        self._rooms: dict[Variant, int | None] = {}
        # The last run that needed another variant than the planned one: its geometry, its variant.
        self._preferred: tuple[Geometry, Variant] | None = None
        self._known: _Known | None = None
        self._on_host: Any = None  # the last plan() with tables on the host (plan_again.py)
        # Graph mode: words of the other variants that were ever run, which stay where they are.
        self._variant_words: dict[Variant, DeviceBuffer] = {}
        self._staging: Staging | None = None
        self._is_probe, self._measured, self._facts = False, (0, 0), -1
        self._caller_buffers = buffers if self._is_graph else {}
        workspace, self._device = read_workspace(float_workspace_buffer)
        # A workspace of the wrapper's own becomes larger as plans need it.
        self._owns_workspace = workspace is None
        self._outgrown: list[ArrayView] = []
        self._has_workspace = False
        # Whether nobody has said where the wrapper works, or in whose memory, and its tables, all
        # on the host, do not say; then the last plan(): what plans, its arguments.
        self._may_follow = False
        self._host_plan: tuple[Any, Any, Any] | None = None
        if workspace is not None:
            self._open(workspace)
        elif self._caller_buffers:
            self._require_workspace(self._caller_buffers.values())

    def _open(self, workspace: ArrayView, may_follow: bool = False) -> None:
        """Settle where the wrapper works. may_follow: until a run's arrays say it better."""
        self._workspace = workspace
        self._buffers = GraphBuffers(workspace, self._caller_buffers)
        is_on_gpu = workspace.device.kind == "cuda"
        self._current_stream = array.stream_reader(workspace) if is_on_gpu else int
        self._words = DeviceBuffer(workspace)
        self._next_words = DeviceBuffer(workspace)  # of a list that the GPU makes (plan_again.py)
        # Keys, where a plan rotates them ahead, or queries, where it widens them.
        self._staged = DeviceBuffer(workspace)
        self._mask_words = DeviceBuffer(workspace)  # packed masks of bools, of runs
        self._turns.open(is_on_gpu)
        self._has_workspace = True
        self._may_follow, self._host_plan = may_follow and not self._is_graph, None

    def _require_workspace(self, arguments: Iterable[Any]) -> None:
        """Make the wrapper's own workspace, if it is to have one, where these arguments are."""
        if not self._has_workspace:
            workspace, may_follow = make_workspace(self._device, arguments)
            self._open(workspace, may_follow)

    def _parts(self) -> Iterable[BatchWrapper]:
        """Wrappers that this one plans, where it is itself."""
        return ()

    def _follow(self, x: Any) -> bool:
        """Go to the GPU that an array of a run is on, or into its framework's memory there, and
        plan there, where only host tables have said where the wrapper works; whether it did."""
        if self._host_plan is None:
            return False
        with self._turns.planning:
            v = array.view(x, "q")
            plan = self._current
            if self._host_plan is None or not self._has_to_follow(v):
                return False
            make_plan, args, kwargs = self._host_plan
            before, own = dict(self.__dict__), self._turns.own
            try:
                for part in self._parts():
                    part._has_workspace = False
                self._open(make_workspace(v.device, (x,))[0])
                self._known, self._preferred, self._facts, self._staging = None, None, -1, None
                self._on_host = None
                make_plan(self, *args, **kwargs)
            except BaseException:
                self.__dict__.update(before)
                self._turns.open(self._workspace.device.kind == "cuda")
                raise
            # The plan stays that of the thread that brought the tables.
            self._turns.own = own
            if self._current is not None and plan is not None:
                self._current.owner = plan.owner
        return True

    def _has_to_follow(self, q: ArrayView) -> bool:
        """Whether the wrapper's own workspace is not where the arrays of a run are. On their GPU,
        in memory of another framework, each run would wait for events, and none would be known."""
        here = self._workspace
        if q.device.kind == "cpu" or here.device.kind == "cpu":
            return q.device.kind != "cpu"
        if q.device != here.device:
            return False
        if q.framework != "torch":
            self._may_follow, self._host_plan = False, None
            return False
        return not cuda().is_capturing(array.current_stream(q))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_turns": copy.copy(self._turns)}

    @property
    def _plan_info(self) -> list[int] | None:
        """None before a plan, as FlashInfer's users look whether there is one: its requests and
        rows."""
        plan = self._current
        return None if plan is None else [plan.batch.num_requests, plan.batch.num_rows]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._is_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Use another float workspace, on the same device; the plan stays.

        int_workspace_buffer is checked and kept for compatibility: the wrapper's own memory for
        integers grows as it must.

        Raises
        ------
        CupyAttnError
            WorkspaceError if the new one is misaligned, or too small for the plan.
        """
        v = view_workspace(float_workspace_buffer)
        with self._turns.planning:
            self._replace_workspace(v, int_workspace_buffer)

    def _replace_workspace(self, v: ArrayView, int_workspace_buffer: Any) -> None:
        if not self._has_workspace:
            self._open(v)
        if v.device != self._workspace.device or v.framework != self._workspace.framework:
            raise ArgumentError(
                f"float_workspace_buffer: is {v.framework}'s on {v.device}, and the wrapper was "
                f"made for {self._workspace.framework}'s on {self._workspace.device}; make a new "
                "wrapper"
            )
        if int_workspace_buffer is not None:
            held = array.view(int_workspace_buffer, "int_workspace_buffer")
            same_device(v, int_workspace_buffer=held)
            require_alignment(held, "int_workspace_buffer")
        plan = self._current
        self._buffers.require_apart(v)
        for prepared in plan.prepared.values() if plan else ():
            require_workspace(v, prepared.schedule.workspace_bytes, "the current plan")
        if plan:
            for kept in plan.views:
                require_apart(v, **{"an array that the plan reads": kept})
            plan.by_q_len.clear()
            # They hold the workspace before.
            plan.bound = None
            plan.bounds.clear()
        self._workspace, self._owns_workspace = v, False
        if int_workspace_buffer is not None:
            self._int_workspace_buffer = int_workspace_buffer

    def end_forward(self) -> None:
        """Give up this thread's plan: its runs take the plan of any thread from now on.

        Only wrappers that several threads plan need it.
        """
        self._turns.end()

    def plan(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(float bytes, int bytes) that plan() with these arguments takes; nothing is planned.

        The first are those of float_workspace_buffer for the fastest plan: one of less splits keys
        in fewer parts; 16 at least. The second are memory of the wrapper's own. A wrapper in graph
        mode answers as for its first plan.
        """
        probe = copy.copy(self)
        probe._is_probe = True
        try:
            inspect.signature(self.plan).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"workspace_size() takes the arguments of plan(): {error}") from None
        probe.plan(*args, **kwargs)
        return probe._measured

    # --- planning ---

    def _options(
        self,
        heads_and_dims: tuple[Any, Any, Any, Any],
        page_size: int,
        data_types: tuple[Any, Any],
        mask_form: str | None = None,
        **plan_options: Any,
    ) -> PlanOptions:
        """PlanOptions of a plan(): heads of q and k, head dims of k and v, dtypes of q and k."""
        asked = (
            *heads_and_dims,
            page_size,
            *data_types,
            mask_form,
            *plan_options,
            *plan_options.values(),
        )
        types, known = tuple(map(type, asked)), self._known
        # With types that are the same too, True is not 1, and no array is compared.
        if known is not None and types == known.types and asked == known.asked:
            return known.options
        raw_options = RawOptions(kv_layout=self._kv_layout, **plan_options)
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = heads_and_dims
        q_data_type, kv_data_type = data_types
        options = PlanOptions(
            self._workspace.device,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            page_size,
            q_data_type,
            kv_data_type,
            mask_form,
            raw_options,
        )
        if not any(hasattr(x, "__dlpack__") for x in asked):
            self._known = _Known(asked, types, options, find_geometry(options))
        return options

    def _geometry(self, options: PlanOptions) -> Geometry:
        known = self._known
        if known is not None and known.options is options:
            return known.geometry
        return find_geometry(options)

    def _change(self, **changes: Any) -> None:
        """Change options of the current plan, of which None stay; its next run schedules anew."""
        plan = self._require_plan()
        if self._turns.is_shared:
            self._turns.check(plan.owner)
        before = plan.geometry.options
        options = before.changed(**changes)
        if find_known(options) is plan.geometry:
            return
        geometry = find_geometry(options)
        if self._is_graph:
            batch_geometry.require_frozen(before, options)
        self._current = replace(plan, geometry=geometry, prepared={})

    def __repr__(self) -> str:
        return wrapper_words(type(self).__name__, self)

    def _require_plan(self) -> Plan:
        if self._current is None:
            raise PlanError("run() was called before plan(); call plan() first")
        return self._current

    def _install(
        self,
        options: PlanOptions,
        batch: Batch,
        mask: Mask,
        split: tuple[int, bool],
        arrays: tuple[ArrayView, ...] = (),
    ) -> None:
        """Make a batch the current plan; nothing changes if anything is wrong with it.

        arrays: what the expressions of `options` read.
        """
        if self._is_probe:
            self._measured = self._sizes(options, batch, mask, split)
            return
        # --- 1. Validate ---
        geometry = self._geometry(options)
        require_row_limit(batch, geometry.spec.group_size)
        if mask is not NO_MASK:
            mask.check(batch, self._workspace)
        require_apart(self._workspace, kv_indices=batch.page_ids_device)
        if geometry.spec.logits is not None:
            read = logits.check(geometry.spec, batch, arrays)
            same_device(self._workspace, **read)
            require_apart(self._workspace, **read)
            batch = logits.with_request_indices(geometry.spec, batch)
        capacity = self._freeze(options, batch, mask, split) if self._is_graph else None
        plan = Plan(geometry, batch, split, capacity, mask, self._workspace.framework)
        if arrays and geometry.spec.logits is not None:
            plan.logits = plan.views = arrays
            plan.packed_logits = params.pack_logits_arrays((v.ptr, v.shape) for v in arrays)
        if self._frozen is not None and plan.packed_logits != self._frozen_logits:
            raise PlanError(
                "logits_params: has other arrays than the first plan of this wrapper, which a "
                "captured graph reads; write into those, or use a separate wrapper"
            )
        # --- 2. Schedule on the host ---
        self._take(plan)
        if capacity is not None and self._frozen is None:
            self._frozen = options, capacity, split
            self._frozen_logits = plan.packed_logits
            self._rooms = {variant: self._room(variant) for variant in plan.prepared}

    def _take(self, plan: Plan) -> None:
        """Schedule a plan, and make it the current one."""
        schedules = self._schedule(plan)
        if self._workspace.device.kind == "cpu":
            self._keep_on_cpu(plan)
            plan.prepared = {
                variant: Prepared(launcher, schedule)
                for variant, (launcher, schedule) in schedules.items()
            }
        elif plan.mask is NO_MASK and not self._is_graph and plan.batch.page_ids_device is None:
            self._upload_plain(plan, schedules)
        else:
            self._upload(plan, schedules)
        plan.owner = self._turns.begin()
        self._current = plan

    def _freeze(
        self, options: PlanOptions, batch: Batch, mask: Mask, split: tuple[int, bool]
    ) -> Capacity:
        """What all plans of a wrapper in graph mode share; PlanError where this one does not."""
        self._check_buffers(batch, mask)
        if self._frozen is None:
            return self._capacity(batch, options.page_size)
        before, capacity, split_before = self._frozen
        if options is not before:
            batch_geometry.require_frozen(before, options)
        if split != split_before:
            raise PlanError(
                "fixed_split_size, disable_split_kv: they differ from those of the first plan of "
                "this wrapper, but a captured graph keeps them; use a separate wrapper for each"
            )
        if batch.num_rows > capacity.num_rows:
            raise PlanError(
                f"{self._rows_name}: {batch.num_rows} query rows, but the first plan of this "
                f"wrapper had {capacity.num_rows}, and a captured graph has room for no more; plan "
                "the largest batch first"
            )
        return capacity

    def _check_buffers(self, batch: Batch, mask: Mask) -> None:
        self._buffers.check(batch, mask)

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
        self._buffers.fill_on_cpu(batch)

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
        schedules = {}
        for variant in self._variants(plan.geometry):
            schedules[variant] = _, schedule = self._schedule_variant(plan, variant)
            if schedule.workspace_bytes:
                require_workspace(self._workspace, schedule.workspace_bytes, "this plan")
        return schedules

    def _schedule_variant(
        self, plan: Plan, variant: Variant
    ) -> tuple[BatchLauncher, BatchSchedule]:
        launcher = plan.geometry.launcher(variant)
        batch = with_indices(plan.batch) if variant.scales_requests else plan.batch
        requests = batch.requests
        if launcher.masking.share is not None:
            requests = requests_of_share(batch, launcher.masking.share)
        split_tokens, may_split = plan.split
        launcher = launcher.serving(
            requests, split_tokens=split_tokens, may_split=may_split, capacity=plan.capacity
        )
        room = self._room(variant)
        schedule = launcher.schedule(
            requests,
            split_tokens=split_tokens,
            may_split=may_split,
            capacity=plan.capacity,
            max_bytes=room,
        )
        is_planned = variant == plan.geometry.default_variant
        if not is_planned and room is not None and schedule.workspace_bytes > room:
            # What nobody could foresee when the workspace was made does without splits.
            if may_split and not split_tokens:
                schedule = launcher.schedule(requests, may_split=False, capacity=plan.capacity)
        self._enlarge_workspace(schedule.workspace_bytes)
        return launcher, schedule

    def _room(self, variant: Variant) -> int | None:
        """Bytes that a plan may take of the workspace, for which keys are split in fewer parts;
        None: the workspace grows. A captured graph keeps that of its first plan."""
        if variant in self._rooms:
            return self._rooms[variant]
        if self._is_probe or (self._owns_workspace and self._frozen is None):
            return None
        return num_bytes(self._workspace)

    def _enlarge_workspace(self, need: int) -> None:
        """Where it is the wrapper's own, and no captured graph keeps it."""
        is_fixed = not self._owns_workspace or self._is_probe or self._frozen is not None
        if not is_fixed and need > num_bytes(self._workspace):
            # Launches on any stream may still use outgrown memory. Sizes double, so it stays small.
            self._outgrown.append(self._workspace)
            self._workspace = enlarge(self._workspace, need)

    def _upload(
        self, plan: Plan, schedules: dict[Variant, tuple[BatchLauncher, BatchSchedule]]
    ) -> None:
        """Bring schedules, page table and mask to the device: one copy, and what a graph reads."""
        batch, buffers = plan.batch, self._buffers
        on_device, target = batch.page_ids_device, buffers.kv_indices
        if on_device is not None:
            same_device(self._workspace, kv_indices=on_device)
        stream = self._current_stream()
        self._refuse_capture(stream)
        upload = self._parts_to_upload(plan, schedules)
        base = self._reserve(upload.num_own_words, batch)
        addresses = self._send_parts(upload, base, stream)
        self._keep_prepared(plan, schedules, base)
        views = list(plan.logits)
        if on_device is not None:
            held = int32_on_device(on_device, "kv_indices")
            array.acquire(self._workspace, held)
            if target is not None:
                buffers.copy_page_ids(held, batch.num_page_ids, stream)
                array.release(self._workspace, held)
            else:
                plan.page_ids = held.ptr
                views.append(held)
        else:
            plan.page_ids = addresses.get("page_ids", 0)
        if target is not None:
            plan.page_ids = target.ptr
        if batch.last_page_len_device is not None:
            buffers.copy_last_page_len(batch, stream)
        if plan.mask is not NO_MASK:
            plan.mask, plan.bits = plan.mask.on_device(
                batch, self._workspace, buffers.mask, addresses, stream
            )
            if plan.mask.view is not None:
                views.append(plan.mask.view)
        self._keep_views(plan, tuple(views))

    def _parts_to_upload(
        self, plan: Plan, schedules: dict[Variant, tuple[BatchLauncher, BatchSchedule]]
    ) -> Upload:
        """What a plan copies from the host: the words of the variant that comes first, its page
        table and mask into memory of the wrapper's own, unless a graph has buffers for them."""
        upload, target, batch = Upload(), self._buffers.kv_indices, plan.batch
        for variant, (_, schedule) in schedules.items():
            if not upload.own:
                upload.own["words"] = schedule.words
            else:
                address = self._variant_words[variant].address
                upload.others.append((schedule.words, address))
        upload.others += self._host_parts(plan)
        ids = None if batch.page_ids is None else batch.page_ids[: batch.num_page_ids]
        if ids is not None and ids.size:
            if target is not None:
                upload.others.append((ids, target.ptr))
            else:
                upload.own["page_ids"] = ids
        if plan.mask is not NO_MASK:
            upload.own |= plan.mask.device_parts(batch)
        return upload

    def _upload_plain(
        self, plan: Plan, schedules: dict[Variant, tuple[BatchLauncher, BatchSchedule]]
    ) -> None:
        """The same where all there is are a schedule, if there are rows, and a page table of the
        host's, if keys are in pages: in half of the time."""
        stream = self._current_stream()
        self._refuse_capture(stream)
        words, ids = _NO_WORDS, plan.batch.page_ids
        for _, schedule in schedules.values():
            words = schedule.words
        if ids is not None:
            ids = ids[: plan.batch.num_page_ids]
        base = self._send(words, ids, stream)
        self._keep_prepared(plan, schedules, base)
        if ids is not None and ids.size:
            plan.page_ids = base + 4 * (-(-words.size // 4) * 4)
        self._keep_views(plan, plan.logits)

    def _keep_prepared(
        self, plan: Plan, schedules: dict[Variant, tuple[BatchLauncher, BatchSchedule]], base: int
    ) -> None:
        """base: of the words of the variant that comes first."""
        words = base
        for variant, (launcher, schedule) in schedules.items():
            if plan.prepared:
                words = self._variant_words[variant].address
            staged = self._reserve_staged(launcher, schedule, plan.batch)
            owner = self._words.view, self._staged.view
            plan.prepared[variant] = Prepared(launcher, schedule, words, owner, staged)

    @staticmethod
    def _keep_views(plan: Plan, views: tuple[ArrayView, ...]) -> None:
        plan.views = views
        is_of_one = all(v.framework == plan.framework for v in views)
        plan.is_uniform = is_of_one and plan.framework in ("torch", "cupy")

    def _send_parts(self, upload: Upload, base: int, stream: int) -> dict[str, int]:
        if self._staging is None:
            self._staging = Staging(self._workspace.device.index)
        return upload.send(self._staging, base, stream)

    def _send(self, words: np.ndarray, ids: np.ndarray | None, stream: int) -> int:
        """Bring words, and ids of pages behind them from a 16-byte boundary on, to memory of the
        wrapper's own; its address."""
        begin = size = -(-words.size // 4) * 4
        if ids is not None:
            size += -(-ids.size // 4) * 4
        if not size:
            return self._words.address
        if self._staging is None:
            self._staging = Staging(self._workspace.device.index)
        block = self._staging.block(size)
        block[: words.size] = words
        if ids is not None:
            block[begin : begin + ids.size] = ids
        base = self._words.reserve(size)
        self._staging.send([(0, size, base)], stream)
        return base

    def _refuse_capture(self, stream: int) -> None:
        refuse_capture(stream, "plan()", "call it before the capture, and between replays")

    def _host_parts(self, plan: Plan) -> list[tuple[np.ndarray, int]]:
        """(values, address) of what plan() writes from the host into the caller's buffers."""
        return self._buffers.host_parts(plan.batch)

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

    def _prepare(self, plan: Plan, variant: Variant) -> Prepared:
        """The plan for a variant, scheduled now if plan() did not do so."""
        prepared = plan.prepared.get(variant)
        if prepared is not None:
            return prepared
        if self._workspace.device.kind == "cpu":
            launcher, schedule = self._schedule_variant(plan, variant)
            require_workspace(self._workspace, schedule.workspace_bytes, "this run")
            self._preferred = plan.geometry, variant
            prepared = plan.prepared[variant] = Prepared(launcher, schedule)
            return prepared
        stream = self._current_stream()
        refuse_capture(
            stream,
            "the first run with a mask, gates, scales by head, or arrays off 16-byte boundaries,",
            "make one such run before the capture",
        )
        launcher, schedule = self._schedule_variant(plan, variant)
        require_workspace(self._workspace, schedule.workspace_bytes, "this run")
        words = DeviceBuffer(self._workspace)
        address = words.reserve(schedule.words.size, exactly=True)
        self._send_parts(Upload(others=[(schedule.words, address)]), 0, stream)
        if self._is_graph:
            self._variant_words[variant] = words
            self._rooms[variant] = self._room(variant)
        self._preferred = plan.geometry, variant
        staged = self._reserve_staged(launcher, schedule, plan.batch)
        owner = words.view, self._staged.view
        prepared = plan.prepared[variant] = Prepared(launcher, schedule, address, owner, staged)
        return prepared

    def _reserve_staged(
        self, launcher: BatchLauncher, schedule: BatchSchedule, batch: Batch
    ) -> int:
        """The address of memory for keys that a schedule rotates ahead, or queries that it widens;
        0 for none."""
        num_words = -(-launcher.staged_bytes(schedule, batch.num_rows) // 4)
        return self._staged.reserve(num_words, exactly=True) if num_words else 0

    def _sizes(
        self, options: PlanOptions, batch: Batch, mask: Mask, split: tuple[int, bool]
    ) -> tuple[int, int]:
        """(float bytes, int bytes) that planning this would take; nothing changes."""
        geometry = self._geometry(options)
        require_row_limit(batch, geometry.spec.group_size)
        capacity = self._capacity(batch, options.page_size) if self._is_graph else None
        plan = Plan(geometry, batch, split, capacity, mask, self._workspace.framework)
        if batch.num_rows == 0 and capacity is None:
            return 0, 0
        launcher, schedule = self._schedule_variant(plan, self._variants(geometry)[0])
        parts = [schedule.words.size]
        parts += [part.size for part in mask.device_parts(batch).values()]
        if batch.page_ids is not None and self._buffers.kv_indices is None:
            parts.append(batch.num_page_ids)
        own_bytes = launcher.staged_bytes(schedule, batch.num_rows)
        own_bytes += sum(-(-size // 4) * 16 for size in parts)
        return max(_MIN_BYTES, schedule.workspace_bytes), own_bytes

    def _is_debugging(self) -> bool:
        """CUPYATTN_DEBUG=1: ids of pages on the GPU are read and checked too."""
        return self._workspace.device.kind == "cuda" and cuda().is_debugging

"""Binds a plan of a batch to the strides of its arrays: what a run enqueues."""

from __future__ import annotations

from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ..driver import params
from ..driver.enqueue import Launch
from ..tiles.config import Target, TileConfig
from ..tiles.forms import forms_within
from . import rotate_batch, rotate_keys, tma_sm90, widen_rows
from .bound_run import BoundRun, Step, in_order
from .layout import BatchSchedule
from .swizzle import swizzle_of

_MAX_CACHED = 1024
# A cascade without keys is nothing but its merge.
_NO_LAUNCHES: tuple[tuple[Launch | None, int], ...] = ((None, 0),)


class Binder:
    """Binds every plan of one problem, device and geometry."""

    def __init__(self, spec: AttentionSpec, problem: AttentionProblem, device_index: int) -> None:
        props = device_props(device_index)
        target = Target(props.arch, props.max_smem_per_block, spec.page_size)
        # The problem of one form of the queries' (launch/tiles/forms.py).
        self.spec, self.problem = spec, (problem := forms_within(spec, problem, target)[0].problem)
        self.device_index = device_index
        self.widened = self.widens_queries, self.widens_keys = widen_rows.widened_of(spec, problem)
        self.group_size = spec.group_size
        self._keys = rotate_keys.Keys(
            spec.dtype_kv,
            spec.num_kv_heads,
            spec.head_dim_qk,
            spec.page_size,
            params.rope_table(spec),
            device_index,
        )
        self._behind = params.more_rope_steps(spec)
        self._packed: dict[tuple[int, float, float, int, int, float, int], bytes] = {}
        self._heads = tma_sm90.Heads(
            problem, spec.num_kv_heads, spec.group_size, spec.page_size, device_index
        )

    def bind(
        self,
        schedule: BatchSchedule,
        words: int,
        workspace: int,
        strides: bytes,
        num_keys: int,
        kv_indices: int,
        mask_bytes: int,
        mask_row_bytes: int,
        output_scale: float,
        sm_scale: float,
        staged: int = 0,
        lse_scale: float = 1.0,
        num_rows: int = 0,
        lse_form: int = 0,
    ) -> BoundRun:
        """What runs on arrays of these strides enqueue, as long as nothing else moves either.

        `strides` are params.STRIDES, packed. num_keys: rows that k and v hold, or pages. The mask
        has mask_bytes bytes, in rows of mask_row_bytes (mask.cuh). The scales are those of the
        options times what the run adds to them. staged: room for staged_bytes(). lse_scale
        multiplies the LSE. num_rows: of q; 0: not known, or heads are latent. lse_form: flags of
        params.LSE_WITHOUT_SINKS and others.
        """
        steps: list[Step] = []
        merges: list[Step] = []
        rotation = widening = None
        if any(self.widened):
            num_keys = self._widened_keys(schedule, num_keys)
            widening = self._widening(schedule, words, strides, (num_rows, num_keys), staged)
            strides = widen_rows.widened_strides(self.spec, strides, self.widened)
        positions = 0 if schedule.positions < 0 else words + schedule.positions
        for part in schedule.parts:
            for launch, first_item in part.launches or _NO_LAUNCHES:
                qo_len, kv_len = part.merge_sizes
                num_q_tiles, num_splits, items = 0, 1, words + part.items
                if schedule.uniform is not None:
                    qo_len, kv_len, num_q_tiles, num_splits = schedule.uniform
                    items = 0
                constants = self._constants(
                    first_item,
                    sm_scale,
                    output_scale,
                    num_q_tiles,
                    num_splits,
                    lse_scale,
                    lse_form,
                )
                planned = params.PLANNED.pack(
                    workspace + part.partial_o,
                    workspace + part.partial_lse,
                    words + part.counters if part.has_counters else 0,
                    items,
                    words + part.merges,
                    kv_indices,
                    positions,
                    strides,
                    mask_bytes,
                    mask_row_bytes,
                    qo_len,
                    kv_len,
                    constants,
                )
                if launch is not None:
                    maps = None
                    if part.tiles is not None:
                        if part.tiles.wants_rotated_keys:
                            to = rotate_keys.Where(staged, schedule.rotated)
                            rotation = rotate_batch.of_part(
                                part, words, self._keys, strides, kv_indices, self.group_size, to
                            )
                        mask_maps = workspace + part.mask_maps
                        maps = self._maps(
                            schedule, part.tiles, launch, strides, num_rows, num_keys, mask_maps
                        )
                    steps.append((launch, planned, maps))
            if part.merge is not None:
                merges.append((part.merge, planned, None))
        return BoundRun(
            in_order(steps, merges), self.device_index, rotation, self._behind, widening
        )

    def _widening(
        self, schedule: BatchSchedule, words: int, strides: bytes, counts: tuple[int, int], to: int
    ) -> widen_rows.Widening:
        """counts: rows of q, and of k and v."""
        num_rows, num_keys = schedule.row_room or counts[0], counts[1]
        rows = widen_rows.rows_of(self.spec, strides, num_rows, num_keys, self.widened)
        count = 0 if schedule.row_count < 0 else words + schedule.row_count
        return widen_rows.prepare(
            self.spec, self.problem.aligned, rows, to, self.device_index, count
        )

    def _widened_keys(self, schedule: BatchSchedule, num_keys: int) -> int:
        """The rows of k and v that kernels read, of so many in their arrays."""
        return schedule.key_rows if self.widens_keys and schedule.key_rows else num_keys

    def staged_bytes(self, schedule: BatchSchedule, num_rows: int, num_keys: int = 0) -> int:
        """Memory for what is launched ahead to leave: rotated keys, or num_rows wide queries, and
        as many keys and values as the schedule says, or num_keys."""
        if not any(self.widened):
            return schedule.rotated_bytes
        num_rows, num_keys = schedule.row_room or num_rows, self._widened_keys(schedule, num_keys)
        return widen_rows.num_bytes(self.spec, num_rows, num_keys, self.widened)

    def _maps(
        self,
        schedule: BatchSchedule,
        tiles: TileConfig,
        launch: Launch,
        strides: bytes,
        num_rows: int,
        num_keys: int,
        mask_maps: int,
    ) -> tma_sm90.Maps:
        """The tensor maps of a launch of prefill_sm90."""
        return tma_sm90.Maps(
            self._heads,
            tiles,
            launch.num_items,
            swizzle_of(
                self.spec, self.problem, self._kept_keys(schedule, num_keys), self.device_index
            ),
            strides,
            num_rows,
            num_keys,
            rotated=(self._keys.strides, schedule.rotated) if tiles.wants_rotated_keys else None,
            mask_maps=mask_maps,
        )

    def _kept_keys(self, schedule: BatchSchedule, num_keys: int) -> int:
        """The keys that are best kept in L2 while a head is served: those of the longest request,
        or all there are where requests read the same pages, as blocks of rows of a mask do."""
        room = num_keys * max(self.spec.page_size, 1)
        return max(schedule.longest, room if schedule.all_keys >= 2 * room else 0)

    def _constants(
        self,
        first_item: int,
        sm_scale: float,
        output_scale: float,
        num_q_tiles: int,
        num_splits: int,
        lse_scale: float,
        lse_form: int,
    ) -> bytes:
        """What is the same for all runs with these scales."""
        key = first_item, sm_scale, output_scale, num_q_tiles, num_splits, lse_scale, lse_form
        cached = self._packed.get(key)
        if cached is not None:
            return cached
        packed = params.pack_constants(
            self.spec,
            sm_scale=sm_scale,
            output_scale=output_scale,
            first=first_item,
            num_q_tiles=num_q_tiles,
            num_splits=num_splits,
            lse_scale=lse_scale,
            lse_form=lse_form,
        )
        if len(self._packed) >= _MAX_CACHED:
            self._packed.clear()
        self._packed[key] = packed
        return packed

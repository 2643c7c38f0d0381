"""What the wrappers of prefill share: plan() with masks, or with tables that are on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..batch.mask import NO_MASK, has_items, read_intervals, read_mask
from ..batch.plan_again import plan_again, remember
from ..batch.plan_again import read as read_tables
from ..batch.requests import Batch, with_mask
from ..batch.tables import NO_READING, Tables
from ..batch.wrapper import BatchWrapper
from ..inputs import geometry
from ..inputs.logits import read as read_logits
from .legacy import OlderCalls


class BatchPrefill(BatchWrapper, OlderCalls):
    """What both wrappers share: a plan may bring a mask, or multi-item scoring."""

    _in_elements = False  # offsets of rows count elements

    def _num_qo_heads(self) -> int:
        return self._require_plan().geometry.spec.num_qo_heads

    def _plan(
        self,
        tables: Tables | None,
        kv_indices: Any,
        read: Callable[[Batch | None], Batch],
        heads_and_dims: tuple[Any, Any, Any, Any],
        data_types: tuple[Any, Any],
        masks: tuple[Any, Any],
        items: tuple[Any, Any, Any, Any],
        split: tuple[Any, Any],
        logits: tuple[Any, Any, Any],
        page_size: int = 0,
        **given: Any,
    ) -> None:
        """Install a batch; the tuples hold arguments of plan() in its order.

        tables: those that the GPU may read. read: makes the batch of what it has read, if anything.
        """
        is_plain = masks[0] is masks[1] is None and not has_items(*items)
        arrays = None
        scalars: tuple[Any, ...] = (*heads_and_dims, page_size, *data_types, *split, *logits)
        if tables is not None and is_plain:
            arrays = tables.kv_indptr, kv_indices, tables.lengths, tables.rows
            scalars += (*given.values(),)
            if plan_again(self, arrays, scalars):
                return
        expression, logits_arrays = read_logits(*logits)
        if self._takes_sinks:
            given["sm_scale"] = 1.0
        splits = geometry.split_size(*split, page_size or 1)
        asked = heads_and_dims, page_size, data_types
        mask = NO_MASK
        with NO_READING if tables is None else read_tables(self, tables) as reading:
            if is_plain:  # while the tables are on their way
                options = self._options(*asked, None, logits=expression, **given)
            batch = read(reading.wait())
        if not is_plain:
            mask = read_mask(*masks, read_intervals(batch, *items))
            if mask.view is not None:
                batch = with_mask(batch)
            options = self._options(*asked, mask.form, logits=expression, **given)
        self._install(options, batch, mask, splits, logits_arrays)
        if tables is not None and arrays is not None:
            remember(self, arrays, scalars, tables)

"""Work lists that come with the Params struct: blocks wait for an item that is in memory."""

from __future__ import annotations

import numpy as np

from ...schedule.batch import WORK_FIELDS
from ..driver.enqueue import Launch
from .layout import BatchSchedule, LaunchPart

# kernels/cupyattn/params/attention.cuh: four words each, where the steps of RoPE would be.
_MAX_ITEMS, _MAX_LENGTH = 32, 2**15
_QO_LEN, _NUM_SPLITS = map(WORK_FIELDS.index, ("qo_len", "num_splits"))
_FIELDS = [WORK_FIELDS.index(name) for name in ("q_start", "kv_start", "first_row", "kv_len")]
# From num_splits on, of a tile that is not split and whose rows see the request's first key.
_ALONE = np.array([1, *[0] * (len(WORK_FIELDS) - _NUM_SPLITS - 1)], np.int32).tobytes()


def short_list(schedule: BatchSchedule, part: LaunchPart, launch: Launch | None) -> bytes:
    """The items of a launch whose blocks have one each, packed; b"" for any other launch, and where
    a list is longer or says more."""
    if launch is None or not schedule.is_final or schedule.uniform is not None:
        return b""
    count = launch.num_items
    if part.tiles is None or part.tiles.is_persistent or not 0 < count <= _MAX_ITEMS:
        return b""
    items = schedule.words[part.items // 4 :][: count * len(WORK_FIELDS)]
    items = items.reshape(count, len(WORK_FIELDS))
    if items[:, _NUM_SPLITS:].tobytes() != count * _ALONE:
        return b""
    qo_len, packed = items[:, _QO_LEN], items[:, _FIELDS]
    if max(schedule.longest, np.maximum.reduce(qo_len)) >= _MAX_LENGTH:
        return b""
    packed[:, 3] = packed[:, 3] << 16 | qo_len
    return packed.tobytes()

"""Explanations of plans on a GPU: what is said is what runs, and the next run is as before."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import batches, compare
from helpers.on_gpu import scratch
from helpers.poison import download, upload

import cupyattn
from cupyattn.core.device import device_props

pytestmark = pytest.mark.gpu

HEADS, DIM, PAGE = (32, 8), 128, 16
BATCHES = {
    "decodes": ([1] * 40, [900] * 39 + [7]),
    "one long decode": ([1], [20000]),
    "chunks and decodes": ([300, 200, *[1] * 20], [500, 900, *[1000] * 20]),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("where", ["host", "device"])
def test_what_is_said_is_what_is_planned(xp: Any, name: str, where: str) -> None:
    b = batches.make(*BATCHES[name], PAGE, heads=HEADS, dims=(DIM, DIM))
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(scratch(xp))
    tables = [b.qo_indptr, *b.table]
    for _ in range(2):
        given = [upload(x, xp) for x in tables] if where == "device" else tables
        w.plan(*given, *HEADS, DIM, PAGE, causal=True)
    q, pages = upload(b.q, xp), upload(b.one_tensor(), xp)
    before = download(w.run(q, pages))
    found = cupyattn.explain(w)
    props = device_props(0)
    assert found.card.startswith(f"{props.name}: {props.arch}, {props.num_sms} SMs")
    assert all(x.blocks_at_a_time >= props.num_sms // 8 for x in found.launches)
    assert sum(x.items for x in found.launches) >= len(BATCHES[name][0]) * HEADS[1]
    (prepared,) = w._current.prepared.values()  # type: ignore[union-attr]
    grids = [part.launches[0][0].grid for part in prepared.schedule.parts]
    assert [x.grid for x in found.launches] == grids
    assert found.taken is not None and found.picture().startswith("<svg")
    compare.assert_bitwise_equal(download(w.run(q, pages)), before, name)

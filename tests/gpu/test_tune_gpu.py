"""What `cupyattn tune` times on a GPU: every candidate of batches of each kind, without torch."""

from __future__ import annotations

import pytest

from cupyattn.array import Device
from cupyattn.bench.clock import Clock
from cupyattn.bench.inputs import Arrays
from cupyattn.bench.tiles.case import TileCase
from cupyattn.bench.tiles.draw import draw_cases
from cupyattn.bench.tiles.measure import rows_of

pytestmark = pytest.mark.gpu

pytest.importorskip("cupy")


def of_each_kind() -> list[TileCase]:
    """A batch of each kind that is drawn for heads of 128 columns. (CuPy has no fp8.)"""
    found: dict[tuple[str, ...], TileCase] = {}
    for case in draw_cases(3, 300):
        is_plain = case.pos_encoding_mode == "NONE" and not case.logits_soft_cap
        is_plain = is_plain and case.kv_dtype == "bfloat16"
        if case.head_dim_qk == case.head_dim_vo == 128 and is_plain:
            found.setdefault((case.api, case.kind, case.kv_dtype), case)
    return [*found.values()]


@pytest.mark.parametrize("case", of_each_kind(), ids=lambda case: f"{case.name}-{case.kv_dtype}")
def test_every_candidate_answers_alike_and_is_timed(case: TileCase) -> None:
    ((*rows,),) = rows_of(
        [case], Arrays("cupy", Device("cuda", 0), 1), Clock(), "now", float("inf")
    )
    assert rows and all(row.us > 1 for row in rows)
    assert sum(row.is_chosen for row in rows) == 1

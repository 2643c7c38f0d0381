"""Block-sparse patterns as requests: causality by kernels where they can, else by a mask."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn import reference
from cupyattn.engine import blocks as sparse
from cupyattn.engine.blocks import Blocks

# Rows [begin, end) and columns (begin, length) of each request; whether kernels can do it.
PATTERNS = {
    "aligned": ([(0, 4, [(0, 4)]), (4, 8, [(0, 4), (4, 4)])], True),
    "blocks out of order": ([(0, 4, [(0, 4)]), (4, 8, [(4, 4), (0, 4)])], True),
    "a request without blocks": ([(0, 4, []), (4, 8, [(4, 4)])], True),
    "blocks beyond all rows": ([(0, 4, [(0, 4), (4, 4), (8, 4)])], True),
    "the last block is whole": ([(0, 4, [(0, 4)]), (4, 8, [(0, 4)])], False),
    "the last block ends later": ([(0, 3, [(0, 4)])], False),
    "the last block is shorter than the rows": ([(0, 8, [(0, 1), (7, 1)])], False),
    "a block twice": ([(0, 4, [(0, 4), (0, 4)])], False),
    "nothing is cut": ([(4, 6, [(0, 4)])], None),
}


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("name", PATTERNS)
def test_causality(name: str, offset: int) -> None:
    pattern, can = PATTERNS[name]
    rows = np.array([(begin, end) for begin, end, _ in pattern])
    columns = np.array(
        [(i, b + offset, n) for i, (_, _, own) in enumerate(pattern) for b, n in own]
    ).reshape(-1, 3)
    before = Blocks(rows[:, 0], rows[:, 1], *columns.T)
    blocks, is_causal, mask = sparse.with_causality(before, offset)
    assert (is_causal, mask is not None) == (bool(can), can is False)
    place = 0
    for index, (begin, end) in enumerate(rows.tolist()):
        seen = []
        for found in (before, blocks):
            own = found.request == index
            seen.append(sparse.ranges(found.begin[own], found.length[own]))
        truth = np.arange(begin, end)[:, None] + offset
        count = (end - begin), seen[1].size
        shown = np.ones(count, bool)
        if is_causal:
            shown = np.tri(*count, count[1] - count[0], dtype=bool)
        elif mask is not None:
            shown = reference.unpack_mask(mask[place:], *count)
            place += -(-count[0] * count[1] // 8)
        np.testing.assert_array_equal(shown, seen[1] <= truth)
        # What is gone is what no row sees.
        gone = np.setdiff1d(seen[0], seen[1])
        assert not (gone <= truth).any()
    assert mask is None or place == mask.size


def test_a_map_of_blocks() -> None:
    shown = np.array([[[1, 0, 1], [0, 1, 1]], [[0, 0, 0], [1, 1, 0]]], bool)
    sizes = np.array([[2, 1], [3, 0]]), np.array([[1, 0, 4], [2, 2, 1]])
    found = sparse.of_map(shown, *sizes)
    assert found.row_begin.tolist() == [0, 2, 0, 3] and found.row_end.tolist() == [2, 3, 3, 3]
    blocks = zip(found.request.tolist(), found.begin.tolist(), found.length.tolist(), strict=True)
    assert list(blocks) == [(0, 0, 1), (0, 1, 4), (1, 1, 4), (3, 0, 2), (3, 2, 2)]
    batch = sparse.to_batch(found, 1, np.repeat([0, 5], 2))
    assert batch.requests.kv_len.tolist() == [5, 4, 0, 4]
    assert batch.page_ids is not None
    assert batch.page_ids.tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8]
    many = sparse.repeat_heads(batch, 2, 3).requests
    assert many.kv_start.tolist() == [0, 5, 0, 5, 0, 5, 9, 9, 9, 9, 9, 9]
    assert many.kv_len.tolist() == [5, 4] * 3 + [0, 4] * 3
    assert many.q_start.tolist() == [0, 2, 3, 5, 6, 8, 9, 12, 12, 15, 15, 18]

"""What ranks send and which keys rows attend to: each row sees each key that it should, once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cupyattn.distributed import ZigZag
from cupyattn.distributed.prefill_cost import Prompt, Rates, choose
from cupyattn.distributed.prefill_plan import PrefillPlan, make_plan

WAYS = [("gather", 1), ("gather", 2), ("overlap", 1), ("overlap", 2), ("overlap", 4)]


def sent_rows(share: ZigZag, plans: list[PrefillPlan]) -> list[np.ndarray]:
    """Of each rank, the row of the batch that it sends in each row that it gives; -1 for none."""
    found = []
    for rank, plan in enumerate(plans):
        given = np.full(plan.num_sent, -1)
        used = plan.send_slots >= 0
        assert np.unique(plan.send_slots[used]).size == used.sum()
        given[plan.send_slots[used]] = share.rows(rank)[used]
        found.append(given)
    return found


def seen_by(share: ZigZag, plans: list[PrefillPlan], rank: int, window_left: int) -> Counter:
    """(row, key) of the whole batch, and how often a rank's stages attend to them."""
    plan, sent = plans[rank], sent_rows(share, plans)
    rows, seen = share.rows(rank), Counter()
    keys = np.full(plan.num_gathered, -1)
    come = 0
    if plan.own_slots is not None:
        used = plan.own_slots >= 0
        keys[plan.own_slots[used]] = rows[used]
    written = Counter()
    for stage in plan.stages:
        for chunk in plan.chunks[come : stage.chunks]:
            taken = np.concatenate([x[chunk.first : chunk.first + chunk.num_rows] for x in sent])
            used = chunk.slots >= 0
            assert (taken[used] >= 0).all(), "a row that nobody sent"
            keys[chunk.slots[used]] = taken[used]
        come = max(come, stage.chunks)
        source = rows if stage.is_own else keys
        requests = stage.requests
        fields = requests.qo_len, requests.kv_len, requests.q_start, requests.kv_start
        for qo_len, kv_len, q_start, kv_start in zip(*(x.tolist() for x in fields), strict=True):
            assert kv_start + kv_len <= stage.num_keys
            of_request = source[kv_start : kv_start + kv_len]
            for token in range(qo_len):
                row = int(rows[q_start + token])
                written[row] += 1
                last = token + kv_len - qo_len if stage.causal else kv_len - 1
                first = 0 if window_left < 0 else max(0, last - window_left)
                seen.update((row, int(key)) for key in of_request[first : last + 1])
    times = len(plan.stages) if plan.method == "overlap" else 1
    assert written == dict.fromkeys(rows.tolist(), times)
    return seen


@pytest.mark.parametrize("lengths", [[37], [0, 5, 1, 30, 3, 0], [2], [8, 16], []], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("method", "num_chunks"), WAYS)
@pytest.mark.parametrize(("causal", "window_left"), [(True, -1), (False, -1), (True, 6), (True, 0)])
def test_rows_see_their_keys_once(
    lengths: list[int], size: int, method: str, num_chunks: int, causal: bool, window_left: int
) -> None:
    if window_left >= 0 and (method == "overlap" or size == 1):
        return
    share = ZigZag(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), size)
    plans = [
        make_plan(share, rank, method, num_chunks, causal, window_left) for rank in range(size)
    ]
    assert len({tuple((x.num_rows, x.first) for x in plan.chunks) for plan in plans}) == 1
    seen = Counter()
    for rank in range(size):
        seen += seen_by(share, plans, rank, window_left)
    wanted = Counter()
    for begin, length in zip(share.qo_indptr[:-1].tolist(), lengths, strict=True):
        for row in range(length):
            first = 0 if window_left < 0 else max(0, row - window_left)
            last = row if causal else length - 1
            wanted.update((begin + row, begin + key) for key in range(first, last + 1))
    assert seen == wanted


def test_windows_send_ends_of_pieces_alone() -> None:
    share = ZigZag(np.array([0, 4000]), 4)
    plan = make_plan(share, 1, "gather", 1, True, 10)
    assert plan.num_sent == 20 and plan.num_gathered == 2 * 10 + 1000
    assert make_plan(share, 1, "gather", 1, True).num_sent == 1000


def test_few_launches_and_whole_rows() -> None:
    """A prompt is one launch of both pieces, or one of each; states are of all rows."""
    share = ZigZag(np.array([0, 1 << 17]), 2)
    for rank in (0, 1):
        (stage,) = make_plan(share, rank, "gather", 1, True).stages
        assert stage.requests.qo_len.tolist() == [1 << 15] * 2
        early, late = make_plan(share, rank, "gather", 2, True).stages
        assert (early.chunks, late.chunks) == (1, 2)
        own, others = make_plan(share, rank, "overlap", 1, True).stages
        assert own.is_own and own.causal and not others.causal and others.chunks == 1


def prompt(length: int, size: int, num_kv_heads: int, **options: int) -> Prompt:
    return Prompt(np.array([length]), size, 32, num_kv_heads, 128, 128, **options)


EVERY = ("gather", "overlap", "ulysses")


def test_the_model_of_cost() -> None:
    """What its words promise: gathering where links are fast and KV heads few, Ulysses where there
    are many ranks or KV heads, overlap where links are slow and prompts long."""
    assert choose(prompt(1 << 17, 2, 8), Rates(), EVERY, True).method == "gather"
    assert choose(prompt(1 << 15, 8, 32), Rates(), EVERY).method == "ulysses"
    slow = choose(prompt(1 << 19, 16, 8), Rates(link=4e10), EVERY)
    assert slow.method == "overlap" and slow.num_chunks > 1
    assert len(choose(prompt(1 << 17, 2, 8), Rates(), EVERY).others) == 5
    best = choose(prompt(1 << 17, 2, 8), Rates(), EVERY, True)
    assert best.num_chunks == 1 and len(best.others) == 4
    assert all(best.seconds <= other.seconds for other in best.others)
    one = prompt(1 << 17, 1, 8)
    alone = choose(one, Rates(), ("gather",)).attention
    assert alone / best.seconds > 1.9
    assert best.describe().startswith("gather in ") and "ulysses" in best.describe()


def test_windows_and_masks_change_the_work() -> None:
    causal = choose(prompt(1 << 17, 2, 8), Rates(), EVERY).attention
    whole = choose(prompt(1 << 17, 2, 8, causal=False), Rates(), EVERY).attention
    window = choose(prompt(1 << 17, 2, 8, window_left=1023), Rates(), EVERY).attention
    assert abs(whole / causal - 2) < 1e-3 and causal / window > 60
    assert prompt(1 << 17, 2, 8, window_left=1023).num_sent == 4 * 1023

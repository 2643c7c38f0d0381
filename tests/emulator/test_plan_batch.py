"""The planner on the host: its lists cover every row and key once, balance, and stay in bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import device_plans
from helpers.device_plans import Batch, Made
from helpers.share import one_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyattn.errors import UnsupportedError
from cupyattn.launch.attention import plan_batch
from cupyattn.schedule import Masking
from cupyattn.schedule.balance import Work, _time_of_even
from cupyattn.schedule.batch import WORK_FIELDS, Splitting, listed_parts
from cupyattn.schedule.batch import plan_batch as plan_batch_on_host
from cupyattn.schedule.tile_shape import TileShape
from cupyattn.schedule.validate import validate_plan

from . import gpu

_FILL = 0x5A5A5A5A
_fixture = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def emulated() -> Iterator[gpu.EmulatedGpu]:
    with gpu.plugged_in() as found:
        yield found


def run_on(emulated: gpu.EmulatedGpu, batch: Batch, scales: list[Any] | None = None) -> Made:
    """The plan, made among memory that the kernel may not touch."""

    def run(prepared: plan_batch.DevicePlan, arrays: list[Any]) -> np.ndarray:
        emulated.forget()
        address, owner = emulated.allocate(prepared.partials)
        words = np.ndarray(prepared.partials // 4, np.int32, owner, address - owner.ctypes.data)
        words[...] = _FILL
        pointers = []
        for x in (*arrays, *(scales or [None] * 3)):
            if x is not None and x.size:
                emulated.register(x.ctypes.data, x.nbytes, x, False)
            pointers.append(0 if x is None else x.ctypes.data)
        planned = plan_batch.bind(prepared, address)
        *lengths, kv_begin = pointers[:5]
        addresses = (*lengths, *pointers[5:], kv_begin)
        plan_batch.launch(prepared, planned, addresses, 0, gpu.STREAM)
        return words

    return device_plans.make(batch, run)


def check(emulated: gpu.EmulatedGpu, batch: Batch) -> Made:
    made = run_on(emulated, batch)
    device_plans.check(batch, made)
    return made


shapes = st.builds(
    TileShape,
    st.sampled_from((16, 32, 64, 128, 192)),
    st.sampled_from((16, 48, 64)),
    st.integers(1, 300),
    st.sampled_from((0.0, 0.25, 4.0)),
)


maskings = st.builds(
    Masking,
    st.sampled_from((-1, -1, 0, 100, 3000)),
    st.sampled_from((-1, 0, 0, 100, 3000)),
)


@st.composite
def decodes(draw: st.DrawFn) -> Batch:
    """Requests of one length of q each: many lengths of keys, a few of them long."""
    length = st.one_of(st.integers(0, 4000), st.sampled_from((0, 1, 64, 4096, 100_000)))
    kv_len = draw(st.lists(length, max_size=70))
    qo_len = draw(st.sampled_from((1, 1, 1, 2, 4, 40)))
    return Batch(
        (qo_len,) * len(kv_len),
        tuple(kv_len),
        "uniform",
        draw(st.integers(1, 9)),
        draw(st.sampled_from((1, 2, 8, 32))),
        draw(shapes),
        draw(maskings),
        likely_kv_len=draw(st.sampled_from((0, 0, 100, 10**6))),
        dtype=draw(st.sampled_from(("int32", "uint32", "int64"))),
    )


@st.composite
def prefills(draw: st.DrawFn) -> Batch:
    """Requests of any lengths, given in every form."""
    pair = st.tuples(
        st.one_of(st.integers(0, 40), st.integers(0, 400)),
        st.one_of(st.integers(0, 600), st.just(20_000)),
    )
    lengths = draw(st.lists(pair, max_size=20))
    return Batch(
        tuple(q for q, _ in lengths),
        tuple(kv for _, kv in lengths),
        draw(st.sampled_from(("steps", "lens", "lens"))),
        draw(st.integers(1, 9)),
        draw(st.sampled_from((1, 2, 8))),
        draw(shapes),
        draw(maskings),
        is_ragged=draw(st.booleans()),
        dtype=draw(st.sampled_from(("int32", "uint32", "int64"))),
        unit=draw(st.sampled_from((1, 1, 96, 1024))),
    )


@_fixture
@given(st.one_of(decodes(), prefills()))
def test_work_is_covered_once_and_balanced(emulated: gpu.EmulatedGpu, batch: Batch) -> None:
    emulated.seed = len(batch.kv_len) % 3
    check(emulated, batch)
    emulated.seed = 0


@pytest.mark.parametrize("seed", range(12))
def test_plain_requests_have_the_plan_of_any_others(
    emulated: gpu.EmulatedGpu, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a planner writes that looks for more."""
    rng = np.random.default_rng((seed, 5))
    count = (3, 40, 64, 65, 300, 700)[seed % 6]
    kv_len = rng.integers(0, 4000, count) if seed % 3 else np.full(count, 2000)
    kv_len[rng.integers(count)] = 50_000
    batch = Batch(
        (int(rng.integers(1, 4)),) * count,
        tuple(kv_len.tolist()),
        group=int(rng.integers(1, 40)),
        kv_heads=1,
        shape=TileShape(16, 64, 132, 4.0 * (seed % 2)),
        masking=Masking(-1, -1),
        max_kv_len=40_000,
    )
    made = check(emulated, batch)
    assert "Plain" in plan_batch.PLAIN.tag
    monkeypatch.setattr(plan_batch, "PLAIN", plan_batch.UNIFORM)
    other = run_on(emulated, batch)
    # Atomics place requests of one bucket, in any order.
    places = [WORK_FIELDS.index(x) for x in ("split_tile", "first_state")] if count > 64 else []
    got, wanted = (np.delete(x.plan().items, places, axis=1).tolist() for x in (made, other))
    assert sorted(got) == sorted(wanted)
    assert got == wanted or count > 64


@pytest.mark.parametrize("first", one_of(3, range(0, 60, 10)))
def test_shares_of_keys(emulated: gpu.EmulatedGpu, first: int) -> None:
    for seed in range(first, first + 10):
        check(emulated, device_plans.shared_batch(seed))


def test_more_requests_than_threads(emulated: gpu.EmulatedGpu) -> None:
    rng = np.random.default_rng(0)
    count = 1300
    kv_len = rng.integers(0, 3000, count)
    kv_len[700] = 1_000_000
    shape = TileShape(16, 64, 264, 0.25)
    batch = Batch((1,) * count, tuple(kv_len.tolist()), kv_heads=8, shape=shape)
    made = check(emulated, batch)
    assert made.plan().num_states > 5
    qo_len = tuple(rng.integers(0, 30, count).tolist())
    check(emulated, replace(batch, qo_len=qo_len, form="steps"))


def test_lists_are_longest_first(emulated: gpu.EmulatedGpu) -> None:
    """Within a 64th of the longest part."""
    rng = np.random.default_rng(1)
    kv_len = tuple(rng.integers(0, 30_000, 200).tolist())
    batch = Batch((1,) * 200, kv_len, kv_heads=8, shape=TileShape(16, 64, 264, 0.25))
    items = check(emulated, batch).plan().items
    parts = -(-items[:, 3] // 64) / items[:, 6]
    assert (parts[1:] <= parts[:-1] + parts.max() / 60 + 1).all()


def test_alike_requests_keep_their_order(emulated: gpu.EmulatedGpu) -> None:
    batch = Batch((1,) * 300, (500,) * 300, kv_heads=8, shape=TileShape(16, 64, 264, 0.25))
    items = check(emulated, batch).plan().items
    assert items[:, 0].tolist() == list(range(300)) and (items[:, 6] == 1).all()


def test_one_long_request_is_spread(emulated: gpu.EmulatedGpu) -> None:
    shape = TileShape(16, 64, 264, 0.25)
    batch = Batch((1,) * 64, (131_072,) + (512,) * 63, kv_heads=8, shape=shape)
    items = check(emulated, batch).plan().items
    assert items[items[:, 0] == 0, 6].min() >= 20


def test_what_one_block_merges_has_few_parts(emulated: gpu.EmulatedGpu) -> None:
    shape = TileShape(16, 64, 264, 0.25, part_cost=0.5, rows_at_a_time=8)
    items = check(emulated, Batch((1,), (8192,), kv_heads=1, shape=shape)).plan().items
    assert len(items) == 16


_OF_DECODE = [
    # requests, keys, group, KV heads, query tokens
    *((1, kv_len, 8, 1, 1) for kv_len in (512, 1024, 4096, 16_384, 32_768)),
    *((b, 4096, 8, 1, 1) for b in (4, 16, 48, 64, 300)),
    *((1, kv_len, 4, 8, 4) for kv_len in (1024, 4096, 16_384)),
    *((1, kv_len, 4, 8, 8) for kv_len in (1024, 4096, 16_384)),
    *((b, kv_len, 4, 8, 1) for b in (1, 2, 8) for kv_len in (512, 2048, 8192)),
    *((b, kv_len, 4, 8, 1) for b in (16, 48, 64) for kv_len in (512, 8192)),
    *((b, 4096, 7, 4, 1) for b in (1, 4, 12)),
]


@pytest.mark.parametrize("rows", [16, 32])
def test_even_decodes_are_split_as_on_the_host(emulated: gpu.EmulatedGpu, rows: int) -> None:
    """By the host's estimate no plan of the device takes 6 % longer, or half a key tile."""
    shape = TileShape(rows, 64, 264, 0.25, 0.03, rows_at_a_time=4, min_share=0.52)
    for count, kv_len, group, heads, qo_len in _OF_DECODE:
        if (qo_len * group <= 16) != (rows == 16):
            continue
        given = (qo_len,) * count, (kv_len,) * count
        batch = Batch(*given, group=group, kv_heads=heads, shape=shape, masking=Masking(-1, 0))
        requests = batch.requests()
        requests.uniform = qo_len
        host = plan_batch_on_host(requests, group, heads, shape, batch.masking, Splitting())
        device = check(emulated, batch).plan()
        work = Work(None, -(-kv_len // 64), count * -(-kv_len // 64), count)
        times = [_time(work, max(plan.items[:, 6]), heads, shape, qo_len * group)
                 for plan in (host, device)]  # fmt: skip
        assert times[1] <= max(1.06 * times[0], times[0] + 0.5), (count, kv_len, group, heads)


def _time(work: Work, parts: int, heads: int, shape: TileShape, rows: int) -> float:
    costs, per_wave = shape.costs(rows), shape.num_slots // heads
    done, items = _time_of_even(work, -(-work.longest // int(parts)), per_wave, costs)
    if parts == 1:
        return done
    return done + costs.merge + costs.state * items / per_wave + costs.part * parts


# --- what is not lengths ---


def cut_batch(seed: int) -> Batch:
    """Requests of one or several tiles of rows that may be cut."""
    rng = np.random.default_rng((seed, 95))
    count, q_len = int(rng.integers(1, (6, 40, 300)[seed % 3])), int(rng.integers(1, 4))
    kv_len = rng.integers(0, rng.integers(1, 9000), count, endpoint=True)
    if rng.random() < 0.3:
        kv_len[:] = kv_len[0]
    shape = TileShape(64, 64, int(rng.integers(3, 133)), 0.25, takes_cuts=True)
    return Batch(
        (q_len,) * count,
        tuple(kv_len.tolist()),
        group=int(rng.choice([64, 72, 128])),
        kv_heads=1,
        shape=shape,
        masking=Masking(-1, (-1, 0)[int(rng.integers(2))]),
        dtype=("int32", "int64")[int(rng.integers(2))],
    )


# More items than threads.
MANY_CUT = Batch(
    (3,) * 70,
    (2000,) * 70,
    group=128,
    kv_heads=1,
    shape=TileShape(64, 64, 132, 0.25, takes_cuts=True),
)


@pytest.mark.parametrize("first", one_of(2, range(0, 160, 40)))
def test_requests_are_cut_as_on_the_host(emulated: gpu.EmulatedGpu, first: int) -> None:
    """The same parts in the same order, and the same links."""
    assert sum(check_cuts(emulated, cut_batch(seed)) for seed in range(first, first + 40)) > 2
    assert check_cuts(emulated, MANY_CUT)


def check_cuts(emulated: gpu.EmulatedGpu, batch: Batch) -> bool:
    """Whether the host and the device cut these requests, which they then do alike."""
    requests = batch.requests()
    requests.uniform = batch.qo_len[0]
    wanted = plan_batch_on_host(requests, batch.group, 1, batch.shape, batch.masking, Splitting())
    made = run_on(emulated, batch)
    if not (wanted.num_blocks and listed_parts(made.items)[1].any()):
        return False  # other equal parts are tried here and there, and may be done sooner
    plan, room = made.cut_plan(wanted.num_blocks)
    np.testing.assert_array_equal(plan.items[:, :8], wanted.items[:, :8])
    np.testing.assert_array_equal(plan.items[:, 10:], wanted.items[:, 10:])
    for own, expected in zip(listed_parts(plan.items), listed_parts(wanted.items), strict=True):
        np.testing.assert_array_equal(own, expected)
    tiles = -(-batch.qo_len[0] * batch.group // 64) * len(batch.kv_len)
    validate_plan(plan, requests, batch.group, 64)
    assert room in (-1, max(tiles, batch.shape.num_slots))
    return plan.num_states == wanted.num_states


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_absurd_lengths_are_cut(emulated: gpu.EmulatedGpu, dtype: str) -> None:
    kind = np.iinfo(dtype)
    kv_len = (kind.max, kind.min, 900, 0, kind.max - 5, 901)
    batch = Batch((1,) * 6, kv_len, max_kv_len=900, dtype=dtype)
    items = check(emulated, batch).plan().items
    wanted = [900, 0, 900, 0, 900, 900]
    assert [int(items[items[:, 0] == i, 3][0]) for i in range(6)] == wanted


@pytest.mark.parametrize("form", ["steps", "lens"])
@pytest.mark.parametrize("seed", range(8))
def test_absurd_offsets_stay_in_bounds(emulated: gpu.EmulatedGpu, seed: int, form: str) -> None:
    """Rows of q, keys and the list itself: nothing outside, whatever is in device memory."""
    rng = np.random.default_rng(seed)
    count, dtype = 40, ("int32", "int64")[seed % 2]
    batch = Batch(
        (9,) * count, (700,) * count, form, is_ragged=True, dtype=dtype, has_kv_begin=True
    )
    arrays, lengths = batch.arrays()
    kind = np.iinfo(dtype)
    for x in arrays:
        if x is not None:
            x[...] = rng.integers(kind.min, kind.max, x.shape, dtype, endpoint=True)
            near = rng.random(x.shape) < 0.7
            x[near] = rng.integers(-5, lengths.max_kv_len + 5, int(near.sum()))
    wrong = replace(batch)
    object.__setattr__(wrong, "arrays", lambda: (arrays, lengths))
    made = run_on(emulated, wrong)
    used = made.items[made.items[:, 6] > 0]
    q_start, qo_len, kv_start, kv_len = used[:, :4].T.astype(np.int64)
    assert (used[:, :8] >= 0).all()
    assert (q_start + qo_len <= lengths.num_rows).all()
    assert (kv_start + kv_len <= lengths.max_kv_len).all()
    assert ((used[:, 11] >= 0) & (used[:, 11] <= kv_len)).all()
    assert (used[:, 5] < used[:, 6]).all()
    limit = made.prepared.schedule.workspace_bytes // (4 * 65 * 16 * batch.kv_heads)
    split = used[used[:, 6] > 1]
    assert (split[:, 7] + split[:, 6] <= limit).all()
    assert (split[:, 10] < max(len(made.merges), len(made.counters) // batch.kv_heads)).all()


def test_too_many_requests(emulated: gpu.EmulatedGpu) -> None:
    batch = Batch((1,) * 13_000, (1,) * 13_000)
    with pytest.raises(UnsupportedError, match="at most 12699 in one call"):
        plan_batch.prepare(batch.launcher(), batch.arrays()[1])


def test_scales_are_repeated_for_each_head(emulated: gpu.EmulatedGpu) -> None:
    batch = Batch((1,) * 3, (5, 6, 7), group=3, kv_heads=2)
    found = []

    for given_scales in ((0.5, None, 2.0), (None, 3.0, None)):
        scales = [None if x is None else np.array([x], np.float32) for x in given_scales]

        def run(prepared: Any, arrays: list[Any], scales: list[Any] = scales) -> np.ndarray:
            emulated.forget()
            address, owner = emulated.allocate(prepared.partials)
            words = np.ndarray(prepared.partials // 4, np.int32, owner, address - owner.ctypes.data)
            words[...] = _FILL
            emulated.register(arrays[1].ctypes.data, arrays[1].nbytes, arrays[1], False)
            for x in scales:
                if x is not None:
                    emulated.register(x.ctypes.data, x.nbytes, x, False)
            pointers = tuple(0 if x is None else x.ctypes.data for x in scales)
            lengths = arrays[1].ctypes.data
            planned = plan_batch.bind(prepared, address)
            addresses = (0, lengths, 0, 0, *pointers, 0)
            plan_batch.launch(prepared, planned, addresses, 0, gpu.STREAM)
            pairs = zip(prepared.scales, (6, 2, 2), strict=True)
            found.append([words[at // 4 :][:n] for at, n in pairs])
            return words

        device_plans.make(batch, run)
    fill = np.int32(_FILL)
    (q, k, v), (q2, k2, v2) = found
    assert (q.view("f4") == 0.5).all() and (k == fill).all() and (v.view("f4") == 2.0).all()
    assert (q2 == fill).all() and (k2.view("f4") == 3.0).all() and (v2 == fill).all()

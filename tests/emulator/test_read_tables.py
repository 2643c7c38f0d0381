"""Tables that the GPU reads, on the host: what lands there, and lists that are made of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import device_plans
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyattn.launch.attention import read_tables
from cupyattn.launch.attention.kernels import MAX_PARTS
from cupyattn.launch.attention.read_tables import KEYS, LAST_PAGE, NO_LENGTHS, DeviceTables
from cupyattn.schedule import Masking
from cupyattn.schedule.batch import (
    NUM_SPLITS,
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    Splitting,
    plan_batch,
)
from cupyattn.schedule.tile_shape import TileShape
from cupyattn.schedule.validate import validate_plan

from . import gpu

_FILL = 0x5A5A5A5A
_MAX_ITEMS = 4  # its place in ReadTablesParams
_FIXTURE = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def emulated() -> Iterator[gpu.EmulatedGpu]:
    with gpu.plugged_in() as found:
        yield found


class Launcher(device_plans.Launcher):
    """A launcher whose decode has one tile shape."""

    def choose_for_any_length(self, *_: Any) -> tuple[str, TileShape]:
        return "", self._shape


@dataclass(frozen=True)
class Given:
    """Tables as they are on the GPU. kv_steps: pages of each request, or keys."""

    kv_steps: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    kind: int = NO_LENGTHS
    page_size: int = 1
    first: int = 0
    rows: tuple[int, ...] | None = None
    q_len: int = 1
    dtype: str = "int32"

    def arrays(self) -> list[np.ndarray | None]:
        kv_indptr = np.cumsum([self.first, *self.kv_steps])
        qo_indptr = None if self.rows is None else np.cumsum([0, *self.rows])
        lengths = None if self.lengths is None else np.array(self.lengths)
        return [
            None if x is None else x.astype(self.dtype) for x in (qo_indptr, kv_indptr, lengths)
        ]


def read(
    emulated: gpu.EmulatedGpu, of: Given, planner: Any = None, arrays: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(what lands on the host, the words of the list), among memory that is not the kernel's."""
    emulated.forget()
    tables: list[Any] = []
    words = np.zeros(0, np.int32)
    for x in of.arrays() if arrays is None else arrays:
        if x is not None:
            emulated.register(x.ctypes.data, x.nbytes, x, False)
        tables += (0, False) if x is None else (x.ctypes.data, x.itemsize == 8)
    address = 0
    if planner is not None:
        address, owner = emulated.allocate(4 * planner.num_words)
        words = np.ndarray(planner.num_words, np.int32, owner, address - owner.ctypes.data)
        words[...] = _FILL
    sizes = of.kind, len(of.kv_steps), 0 if of.rows is not None else of.q_len, of.page_size
    asked = DeviceTables(tuple(tables), *sizes)
    numbers = read_tables.read(asked, planner, address, 0, gpu.STREAM)
    assert numbers[0] > 0, "no ticket"
    return numbers, words


def split(numbers: np.ndarray, of: Given) -> list[list[int]]:
    """kv_indptr, keys, lengths, qo_indptr and rows, those that are there."""
    count, begin = len(of.kv_steps), read_tables.HEAD
    found = []
    for size in (count + 1, count, count, count + 1, count):
        found.append(numbers[begin : begin + size].tolist())
        begin += size
    return found


def test_all_forms_of_tables(emulated: gpu.EmulatedGpu) -> None:
    for dtype in ("int32", "int64"):
        ragged = Given((3, 0, 5), first=2, rows=(2, 4, 1), dtype=dtype)
        numbers, _ = read(emulated, ragged)
        kv_indptr, keys, _, qo_indptr, rows = split(numbers, ragged)
        assert (kv_indptr, keys) == ([2, 5, 5, 10], [3, 0, 5])
        assert (qo_indptr, rows) == ([0, 2, 6, 7], [2, 4, 1])
        assert numbers[1:4].tolist() == [0, 1, 4]
        last = Given((3, 0, 1), (16, 99, 1), LAST_PAGE, 16, dtype=dtype)
        numbers, _ = read(emulated, last)
        assert split(numbers, last)[:3] == [[0, 3, 3, 4], [48, 0, 1], [16, 99, 1]]
        given = Given((3, 2, 1), (40, 0, 16), KEYS, 16, dtype=dtype)
        assert split(read(emulated, given)[0], given)[1] == [40, 0, 16]


BAD = {
    "an offset falls": Given((3, -1, 2)),
    "offsets begin below 0": Given((3, 1), first=-1),
    "offsets end too high": Given((3, 2**31 - 60), dtype="int64"),
    "a step beyond 64 bits": Given((2**62, 2**62, 2**62), dtype="int64"),
    "a last page too full": Given((1, 1), (16, 17), LAST_PAGE, 16),
    "an empty last page": Given((1, 1), (0, 16), LAST_PAGE, 16),
    "more keys than pages": Given((1, 1), (16, 17), KEYS, 16),
    "fewer keys than none": Given((1, 1), (-1, 16), KEYS, 16),
    "too many keys": Given((2**28,), (16,), LAST_PAGE, 16),
    "rows begin late": Given((1, 1), rows=(2, 2)),
    "rows fall": Given((1, 1), rows=(2, -1)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables(emulated: gpu.EmulatedGpu, name: str) -> None:
    check_bad(emulated, name)


def check_bad(emulated: gpu.EmulatedGpu, name: str = "too many keys") -> None:
    of = BAD[name]
    arrays = of.arrays()
    if name == "rows begin late":
        assert arrays[0] is not None
        arrays[0] += 1
    planner = read_tables.planner(Launcher(SHAPES[0], 4, 2, Masking()), len(of.kv_steps), 1)
    numbers, words = read(emulated, of, planner, arrays)
    assert numbers[1] == 1 and numbers[4] == 0 and (words == _FILL).all()


def test_thousands_of_requests(emulated: gpu.EmulatedGpu) -> None:
    steps = tuple(np.random.default_rng(1).integers(0, 9, 3000).tolist())
    of = Given(steps, (7,) * 3000, LAST_PAGE, 8)
    keys = split(read(emulated, of)[0], of)[1]
    assert keys == [8 * n - 1 if n else 0 for n in steps]


SHAPES = (
    TileShape(16, 64, 264, 0.25, 0.35, 8, 0.52),
    TileShape(16, 64, 264, 0.25, 0.35, 8, 0.52).merged_apart(),
    TileShape(32, 48, 132, 0.25),
    TileShape(16, 32, 7, 0.25, 0.5, 4, 1.0),
)


def check_list(
    emulated: gpu.EmulatedGpu,
    keys: list[int],
    shape: TileShape,
    group: int,
    heads: int,
    q_len: int,
    fused_splits: int = 0,
) -> None:
    """The list has every key of every request once, split as the host splits them, so that answers
    have the same bits.

    fused_splits: of a kernel whose blocks merge so many parts at most, if that is the most that any
    tile has.
    """
    launcher = Launcher(shape, group, heads, Masking(-1, 0))
    if fused_splits:
        launcher._tiles = SimpleNamespace(fused_merge=False, fused_splits=fused_splits)
    planner = read_tables.planner(launcher, len(keys), q_len)
    assert planner is not None
    of = Given(tuple(keys), q_len=q_len, first=5)
    numbers, words = read(emulated, of, planner)
    num_items, num_split_tiles, num_states, most_parts = numbers[4:8].tolist()
    # --- the items ---
    size = num_items * len(WORK_FIELDS)
    items = words[:size].reshape(num_items, -1)
    column = dict(zip(WORK_FIELDS, items.T.astype(np.int64), strict=True))
    merges = np.flatnonzero((column["num_splits"] > 1) & (column["split"] == 0))
    plan = BatchPlan(items, merges, num_states)
    starts, count = np.cumsum([5, *keys])[:-1], len(keys)
    requests = BatchRequests(
        np.full(count, q_len), np.array(keys), np.arange(count) * q_len, starts, None, q_len
    )
    validate_plan(plan, requests, group, shape.tile_q)
    index = column["q_start"] // q_len
    assert (column["q_start"] == index * q_len).all() and (column["qo_len"] == q_len).all()
    assert (column["kv_start"] == starts[index]).all()
    assert (column["kv_len"] == np.array(keys)[index]).all()
    others = ("first_row", "mask_start_low", "mask_start_high", "key_offset")
    assert not any(column[name].any() for name in others)
    assert num_split_tiles == len(merges) and most_parts == column["num_splits"].max()
    assert num_states == column["num_splits"][merges].sum()
    # --- what is behind them ---
    is_apart = not shape.is_fused or (shape.part_cost > 0 and most_parts > MAX_PARTS)
    if fused_splits:
        is_apart = most_parts > fused_splits
    rest = merges.tolist() if is_apart else [0] * (heads * len(merges))
    assert words[size:][: len(rest)].tolist() == rest
    assert (words[size + len(rest) :] == _FILL).all()
    # --- where it splits keys ---
    host = plan_batch(requests, group, heads, shape, launcher.masking, Splitting())
    assert splits_of(items) == splits_of(host.items)
    # --- its order: the longest parts first, but for a bucket's width ---
    parts = -(-column["kv_len"] // shape.tile_kv) / column["num_splits"]
    assert (parts[1:] <= parts[:-1] + parts.max() / 31).all()


def splits_of(items: np.ndarray) -> dict[int, int]:
    """In how many parts the keys of each request are split."""
    return dict(items[:, [0, NUM_SPLITS]].tolist())


length = st.one_of(st.integers(0, 4000), st.sampled_from((0, 1, 64, 4096, 100_000)))


@_FIXTURE
@given(
    st.one_of(
        st.lists(length, min_size=1, max_size=70),
        st.builds(lambda n, x: [x] * n, st.integers(1, 40), length),
        st.builds(lambda n, x: [x + i % 3 for i in range(n)], st.integers(1, 40), length),
    ),
    st.sampled_from(SHAPES),
    st.sampled_from((1, 2, 8, 32)),
    st.sampled_from((1, 3)),
)
def test_lists_are_whole_and_split_as_on_the_host(
    emulated: gpu.EmulatedGpu, keys: list[int], shape: TileShape, heads: int, q_len: int
) -> None:
    check_list(emulated, keys, shape, 4, heads, q_len)


@_FIXTURE
@given(
    st.lists(length, min_size=1, max_size=70),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 4)),
)
def test_lists_of_wide_heads(
    emulated: gpu.EmulatedGpu, keys: list[int], heads: int, fused_splits: int
) -> None:
    shape = TileShape(64, 64, 132, 4.0)
    check_list(emulated, keys, shape, 16, heads, 1, fused_splits)


def check_random(emulated: gpu.EmulatedGpu) -> None:
    """Batches with long requests, short ones and empty ones."""
    keys = np.random.default_rng(3).integers(0, 3000, 90)
    check_list(emulated, [*keys.tolist(), 50_000], SHAPES[0], 4, 8, 1)
    keys = np.random.default_rng(4).integers(1, 2000, 33)
    check_list(emulated, [30_000, *keys.tolist()], SHAPES[2], 4, 2, 1)


@pytest.mark.parametrize("count", [33, 256, 511, 512])
def test_lists_of_many_requests(emulated: gpu.EmulatedGpu, count: int) -> None:
    random = np.random.default_rng(count)
    keys = random.integers(1, 9000, count)
    keys[random.integers(count)] = 131_072
    for seed in (0, 1, 2):
        emulated.seed = seed
        check_list(emulated, keys.tolist(), SHAPES[seed], 4, 8, 1)
    emulated.seed = 0


def test_longest_requests_are_not_planned(emulated: gpu.EmulatedGpu) -> None:
    """Sums of key tiles would not fit; the host plans them."""
    check_longest(emulated)


def check_longest(emulated: gpu.EmulatedGpu) -> None:
    planner = read_tables.planner(Launcher(SHAPES[0], 4, 8, Masking()), 3, 1)
    for most in (2**25 + 1, 2**31 - 2**21):
        numbers, words = read(emulated, Given((5, most, 2**20), dtype="int64"), planner)
        assert numbers[1] == 0 and numbers[4] == 0 and (words == _FILL).all()
    assert read(emulated, Given((5, 2**25, 2**20), dtype="int64"), planner)[0][4] > 3


def test_a_list_that_outgrows_its_room_is_none(emulated: gpu.EmulatedGpu) -> None:
    check_list_without_room(emulated)


def check_list_without_room(emulated: gpu.EmulatedGpu) -> None:
    planner = read_tables.planner(Launcher(SHAPES[0], 4, 8, Masking()), 4, 1)
    assert planner is not None
    sizes = list(read_tables._PLANNED.unpack(planner.packed))
    sizes[_MAX_ITEMS] = room = 5
    small = copy.copy(planner)
    small.packed, small.num_words = read_tables._PLANNED.pack(*sizes), len(WORK_FIELDS) * room
    numbers, _ = read(emulated, Given((50_000,) * 4), small)
    assert numbers[1] == 0 and numbers[4] == 0

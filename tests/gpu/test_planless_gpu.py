"""Entry points without a plan on the GPU: random calls, graphs, and nothing that waits."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import compare, device_plans, key_shares, planless_shares
from helpers.device_plans import Batch
from helpers.on_gpu import capture, leaves_running, try_random, workspace
from helpers.planless_calls import ENTRIES, NUM_CASES, PROBLEMS, Call, random_case
from helpers.poison import download, raw, upload
from helpers.share import some

import cupyattn
from cupyattn.engine import call_cache
from cupyattn.errors import ArgumentError, WorkspaceError
from cupyattn.launch.attention import plan_batch
from cupyattn.launch.driver import enqueue
from cupyattn.schedule.tile_shape import TileShape

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 100
HEADS, KV_HEADS, DIM, PAGE, POOL, WIDTH = 8, 2, 64, 16, 400, 130


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_calls(first: int) -> None:
    make = lambda seed, xp: Call(random_case(seed), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make, turn=len(PROBLEMS))


# --- the planner alone ---


def run_planner(prepared: plan_batch.DevicePlan, arrays: list[Any]) -> np.ndarray:
    words = cupy.full(prepared.partials // 4, 0x5A5A5A5A, np.int32)
    held = [None if x is None else cupy.asarray(x) for x in arrays]
    pointers = [0 if x is None else x.data.ptr for x in held]
    stream = cupy.cuda.get_current_stream().ptr
    planned = plan_batch.bind(prepared, words.data.ptr)
    *lengths, kv_begin = pointers
    plan_batch.launch(prepared, planned, (*lengths, 0, 0, 0, kv_begin), 0, stream)
    return words.get()


@pytest.mark.parametrize("seed", range(60))
def test_plans_cover_all_work_once_and_balance_it(seed: int) -> None:
    batch = device_plans.random_batch(seed)
    device_plans.check(batch, device_plans.make(batch, run_planner))


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_shares_of_keys(seed: int) -> None:
    batch = device_plans.shared_batch(seed)
    device_plans.check(batch, device_plans.make(batch, run_planner))


@pytest.mark.parametrize("door", planless_shares.DOORS)
def test_states_of_ranks_merge_to_the_whole_answer(xp: ModuleType, door: str) -> None:
    """Every rank's call on this GPU, by every door."""

    def error(case: key_shares.Case) -> float:
        got = planless_shares.merged(
            door,
            case,
            lambda x: upload(x, xp),
            download,
            lambda shape: upload(np.zeros(shape, np.float32), xp),
        )
        return key_shares.error(got, planless_shares.expected(door, key_shares.Whole.of(case)))

    for seed in range(some(12)):
        case = planless_shares.random_case(seed, door)
        assert error(case) <= 1.02 * error(case.alone()) + 2e-4, case


def test_plans_of_thousands() -> None:
    rng = np.random.default_rng(3)
    for count in (1024, 3000, 12_000):
        kv_len = rng.integers(0, 5000, count)
        kv_len[count // 2] = 1_000_000
        batch = Batch(
            (1,) * count, tuple(kv_len.tolist()), kv_heads=8, shape=TileShape(16, 64, 264, 0.25)
        )
        device_plans.check(batch, device_plans.make(batch, run_planner))


# --- graphs ---


class Model:
    """One layer: arrays whose addresses stay, and lengths and pages that change."""

    def __init__(self, xp: ModuleType, entry: str, count: int = 5, seed: int = 0) -> None:
        self.xp, self.entry, self.count = xp, entry, count
        self.rng = np.random.default_rng(seed)
        self.is_ragged = "context" in entry or "prefill" in entry
        self.rows = 40 if self.is_ragged else count
        values = self.rng.standard_normal((POOL, 2, KV_HEADS, PAGE, DIM)).astype(np.float16)
        self.cache = upload(values, xp)
        self.q = upload(self._queries(), xp)
        self.out, self.lse = upload(self._queries(), xp), self._blank_lse()
        self.table = upload(np.zeros((count, WIDTH), np.int32), xp)
        self.lens = upload(np.zeros(count, np.int32), xp)
        self.q_lens = upload(np.zeros(count, np.int32), xp)
        self.offsets = upload(np.zeros(count + 1, np.int32), xp)
        self.scale = upload(np.ones(1, np.float32), xp)
        self.change()

    def _queries(self) -> np.ndarray:
        return self.rng.standard_normal((self.rows, HEADS, DIM)).astype(np.float16)

    def _blank_lse(self) -> Any:
        is_padded = self.entry.startswith("cudnn_batch_prefill")
        shape = (self.count, self.rows, HEADS) if is_padded else (self.rows, HEADS)
        return upload(np.zeros(shape, np.float32), self.xp)

    def change(self) -> None:
        """Other lengths, pages and scales, in place; what is unused is absurd."""
        rng = self.rng
        lens = rng.integers(0, WIDTH * PAGE, self.count) * (rng.random(self.count) < 0.9)
        table = rng.integers(0, POOL, (self.count, WIDTH))
        for row, n in zip(table, lens, strict=True):
            row[-(-int(n) // PAGE) :] = 2**31 - 1
        spare, count = int(rng.integers(0, 5)), self.count
        q_lens = rng.multinomial(self.rows - spare, np.ones(count) / count)
        ends = np.concatenate([[0], np.cumsum(q_lens)])
        for target, values in (
            (self.table, table),
            (self.lens, lens),
            (self.q_lens, q_lens),
            (self.offsets, ends),
            (self.scale, rng.uniform(0.05, 0.3, 1).astype(np.float32)),
        ):
            kind = np.float32 if target is self.scale else np.int32
            target[...] = upload(np.asarray(values, kind), self.xp)

    def call(self, out: Any, lse: Any) -> Any:
        function: Any = getattr(cupyattn, self.entry)
        named: dict[str, Any] = {"out": out, "lse": lse, "return_lse": True}
        k, v = self.cache[:, 0], self.cache[:, 1]
        space, longest = workspace(self.xp), WIDTH * PAGE
        if self.entry == "xqa":
            named["output"] = named.pop("out")[:, None]
            named |= {"workspace_buffer": space, "kv_layout": "HND", "q_scale": self.scale}
            named["lse"] = named["lse"][:, None]
            return function(self.q[:, None], k, v, self.table, self.lens, **named)
        if self.entry.startswith("cudnn"):
            named |= {"max_sequence_kv": longest, "actual_seq_lens_kv": self.lens}
            named["block_tables"] = self.table
            if self.is_ragged:
                named |= {"actual_seq_lens_q": self.q_lens, "batch_offsets_q": self.offsets}
                named |= {"batch_offsets_units": "tokens", "causal": True}
                named["max_token_per_sequence"] = self.rows
            return function(self.q, k, v, self.scale, space, **named)
        head = self.q, self.cache, space, self.table, self.lens
        if self.is_ragged:
            rest = 40, longest, self.scale, 1.0, self.count, self.offsets, None
            return function(*head, *rest, **named)
        return function(*head, longest, self.scale, **named | {"kv_layout": "HND"})


@pytest.mark.parametrize("entry", ENTRIES)
def test_replays_follow_lengths_and_pages(torch: Any, xp: ModuleType, entry: str) -> None:
    """Each replay as an eager call on new arrays answers, bit for bit."""
    model = Model(xp, entry)
    model.call(model.out, model.lse)
    replay = capture(torch, xp, lambda: model.call(model.out, model.lse))
    for step in range(30):
        model.change()
        raw(model.out)[...] = 0
        raw(model.lse)[...] = 0
        replay()
        wanted = upload(np.zeros((model.rows, HEADS, DIM), np.float16), xp), model._blank_lse()
        model.call(*wanted)
        for got, want in zip((model.out, model.lse), wanted, strict=True):
            compare.assert_bitwise_equal(download(got), download(want), (entry, step))


@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_waits(torch: Any, entry: str) -> None:
    """torch raises at the first call that synchronises, in checked calls and in cached ones."""
    model = Model(torch, entry)
    model.call(model.out, model.lse)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model.call(model.out, model.lse)
        model.call(torch.empty_like(model.out), torch.empty_like(model.lse))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(
    "CUPYATTN_TEST_SANITIZER" in os.environ,
    reason="compute-sanitizer's own part in each launch may outlast the kernel that spins",
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_calls_return_before_what_they_follow(torch: Any, entry: str) -> None:
    """A kernel that spins holds the stream: calls return all the same."""
    model = Model(torch, entry)

    def calls() -> None:
        for _ in range(20):
            model.call(model.out, model.lse)

    calls()
    assert leaves_running(torch, calls)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_scale_may_have_no_axis(xp: ModuleType, entry: str) -> None:
    """As one of one element, in checked calls and in cached ones."""
    model = Model(xp, entry)
    raw(model.out)[...] = 0
    wanted = [download(x) for x in model.call(model.out, model.lse)]
    model.scale = model.scale.reshape(())
    for _ in range(3):
        raw(model.out)[...] = 0
        for got, want in zip(model.call(model.out, model.lse), wanted, strict=True):
            compare.assert_bitwise_equal(download(got), want, entry)


@pytest.mark.parametrize("entry", ["trtllm_batch_decode_with_kv_cache", "xqa"])
def test_more_requests_than_a_block_plans(xp: ModuleType, entry: str) -> None:
    """They are served in parts, checked and from the cache, as calls of fewer are."""
    model = Model(xp, entry, count=30_000)
    for seed in range(2):
        model.change()
        raw(model.out)[...] = 0
        raw(model.lse)[...] = 0
        model.call(model.out, model.lse)
        got = [download(x) for x in (model.out, model.lse)]
        few = Model(xp, entry, count=5_000, seed=seed)
        few.cache, few.scale = model.cache, model.scale
        for begin in range(0, 30_000, 5_000):
            rows = slice(begin, begin + 5_000)
            few.q, few.table, few.lens = model.q[rows], model.table[rows], model.lens[rows]
            few.call(few.out, few.lse)
            for x, y in zip(got, (few.out, few.lse), strict=True):
                np.testing.assert_allclose(x[rows].astype(float), download(y), atol=4e-3)


@pytest.mark.parametrize("is_bool", [False, True])
def test_masks_of_more_requests_than_a_block_plans(torch: Any, is_bool: bool) -> None:
    model = Model(torch, ENTRIES[0], count=26_001)
    q = torch.randn(26_001, 2, HEADS, DIM, dtype=torch.float16, device="cuda")
    bits = torch.randint(0, 2, (26_001, 2, 2), device="cuda", dtype=torch.uint8)
    bits[:, :, 0] = 1
    mask = bits.bool() if is_bool else bits[..., 0] | bits[..., 1] << 1

    def call(rows: slice) -> Any:
        return cupyattn.trtllm_batch_decode_with_kv_cache(
            q[rows].flatten(0, 1),
            model.cache,
            workspace(torch),
            model.table[rows],
            model.lens[rows],
            WIDTH * PAGE,
            bmm1_scale=0.1,
            kv_layout="HND",
            q_len_per_req=2,
            mask=mask[rows],
        )

    for _ in range(2):
        got = call(slice(None)).unflatten(0, (-1, 2))
        for begin in range(0, 26_001, 9_000):
            rows = slice(begin, begin + 9_000)
            wanted = call(rows).unflatten(0, (-1, 2))
            torch.testing.assert_close(got[rows], wanted, atol=4e-3, rtol=1e-2)


def test_lengths_on_the_host(torch: Any) -> None:
    """cuDNN's calls take them there, but not into a graph."""
    model = Model(torch, "cudnn_batch_prefill_with_kv_cache")
    wanted = [download(x) for x in model.call(model.out, model.lse)]
    for name in ("lens", "q_lens", "offsets"):
        setattr(model, name, getattr(model, name).cpu())
    for got, want in zip(model.call(model.out, model.lse), wanted, strict=True):
        compare.assert_bitwise_equal(download(got), want, "lengths on the host")


def test_layers_that_share_a_workspace(torch: Any) -> None:
    """Launches of one stream follow each other: the next plan does not overtake this one's."""
    models = [Model(torch, ENTRIES[0], seed=seed) for seed in range(4)]
    wanted = []
    for model in models:
        model.call(model.out, model.lse)
        wanted.append(download(model.out))
    for model in models:
        raw(model.out)[...] = 0
    for _ in range(50):
        for model in models:
            model.call(model.out, model.lse)
    for model, want in zip(models, wanted, strict=True):
        compare.assert_bitwise_equal(download(model.out), want, "layers")


def test_too_small_a_workspace_says_what_it_needs() -> None:
    model = Model(cupy, ENTRIES[0])
    model.call(model.out, model.lse)
    for size in (0, 64):
        space = cupy.zeros(size, np.uint8)
        with pytest.raises(WorkspaceError, match=f"needs .* bytes and it has {size}"):
            cupyattn.trtllm_batch_decode_with_kv_cache(
                # So many keys are split; fewer need no memory between blocks.
                model.q,
                model.cache,
                space,
                model.table,
                model.lens,
                WIDTH * PAGE,
            )


def test_debug_reads_what_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue.cuda(), "is_debugging", True)
    call_cache.clear_all()
    model = Model(cupy, ENTRIES[0])
    model.call(model.out, model.lse)
    model.lens[1] = WIDTH * PAGE + 1
    with pytest.raises(ArgumentError, match="seq_lens: request 1"):
        model.call(model.out, model.lse)
    model.lens[1] = 20
    model.table[1, 1] = POOL
    with pytest.raises(ArgumentError, match=f"block_tables: request 1 has page {POOL}"):
        model.call(model.out, model.lse)


def test_absurd_lengths_read_nothing_outside(torch: Any) -> None:
    """They are cut to the table; run under compute-sanitizer this would show."""
    model = Model(torch, ENTRIES[0])
    model.table[...] = torch.arange(WIDTH, device="cuda", dtype=torch.int32)
    model.lens[...] = upload(np.array([2**31 - 1, -(2**31), 5, -1, WIDTH * PAGE], np.int32), torch)
    out, _ = (download(x) for x in model.call(model.out, model.lse))
    model.lens[...] = upload(np.array([WIDTH * PAGE, 0, 5, 0, WIDTH * PAGE], np.int32), torch)
    wanted, _ = (download(x) for x in model.call(model.out, model.lse))
    compare.assert_bitwise_equal(out, wanted, "absurd lengths")


def test_jax_arrays() -> None:
    """They cannot be written, so the workspace is CuPy's, or none."""
    jax = pytest.importorskip("jax")
    model = Model(cupy, ENTRIES[0])
    wanted = download(model.call(model.out, model.lse)[0])
    arrays = [jax.dlpack.from_dlpack(x) for x in (model.q, model.cache, model.table, model.lens)]
    q, cache, table, lens = arrays
    scale = float(model.scale[0])
    for space in (workspace(cupy), None):
        out = cupyattn.trtllm_batch_decode_with_kv_cache(
            q, cache, space, table, lens, 2000, bmm1_scale=scale
        )
        assert isinstance(out, jax.Array)
        error = np.abs(np.asarray(out).astype(np.float32) - wanted.astype(np.float32)).max()
        assert error < 2e-3

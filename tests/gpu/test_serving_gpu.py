"""cupyattn.serving on the GPU: random steps, graphs and their replays, and nothing that waits."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import poison, serving_engine, slot_cases
from helpers.on_gpu import capture, framework, same
from helpers.serving_cases import KINDS, Case, LatentCase
from helpers.share import some

from cupyattn.serving import LayerSpec, MHATokenToKVPool, MLATokenToKVPool
from cupyattn.slots import reshape_and_cache

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

GRAPHS = "decode", "draft chain", "draft beams", "verify chain", "verify tree", "draft extend"
REPLAYS = 10_000


def case_of(seed: int, xp: ModuleType, kind: str, **options: Any) -> Case:
    return Case(seed, xp, kind=kind, is_gpu=True, device="cuda", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps(kind: str) -> None:
    failures = []
    for seed in range(some(60)):
        try:
            case_of(seed, framework(seed), kind).run()
        except AssertionError as error:
            failures.append(f"seed {seed}: {error}")
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures[:5])


@pytest.mark.parametrize("kind", ["decode", "mixed", "verify tree", "draft beams"])
def test_long_requests(kind: str) -> None:
    for seed in range(some(12)):
        case_of(seed, framework(seed), kind, is_long=True).run()


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_over_latent_pools(kind: str) -> None:
    failures = []
    for seed in range(some(12)):
        try:
            LatentCase(seed, framework(seed), kind=kind, is_gpu=True, device="cuda").run()
        except AssertionError as error:
            failures.append(f"seed {seed}: {error}")
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures[:5])


@pytest.mark.parametrize("kind", GRAPHS)
def test_replays_are_eager_steps(torch: Any, xp: ModuleType, kind: str) -> None:
    """Bit by bit, with padded requests, changing lengths and pages."""
    for seed in range(some(8)):
        replays_are_eager_steps(torch, xp, case_of(seed, xp, kind), (kind, seed))


@pytest.mark.parametrize("kind", ["decode", "draft beams", "verify chain", "verify tree"])
def test_replays_over_latent_pools_are_eager_steps(torch: Any, xp: ModuleType, kind: str) -> None:
    for seed in range(some(3)):
        case = LatentCase(seed, xp, kind=kind, is_gpu=True, device="cuda")
        replays_are_eager_steps(torch, xp, case, (kind, seed))


def replays_are_eager_steps(torch: Any, xp: ModuleType, case: Case, label: tuple[Any, ...]) -> None:
    if not case.bs:
        return
    case.pad(case.seed % 3)
    backend, meta = case.capture()
    # The oracle knows the batch that is made last.
    batches = [case.batch_of_one_key(), case.batch()][::-1]
    q, layer = case.queries(), case.layer()
    given = case.put(q)
    shape = (len(q), case.heads, case.dim_v)
    out, again = (poison.upload(np.zeros(shape, case.dtype), xp) for _ in "ab")
    backend.init_forward_metadata_replay(case.bs, batches[0])
    backend.forward(given, layer, meta, out)
    replay = capture(torch, xp, lambda: backend.forward(given, layer, meta, out))
    eager = case.backend()
    for step in range(6):
        batch = batches[step % 2]
        backend.init_forward_metadata_replay(case.bs, batch)
        replay()
        eager.pool = backend.pool
        eager.init_forward_metadata(batch)
        eager.forward(given, layer, None, again)
        rows = len(case.paths()) if step % 2 == 0 else 0
        same(out[:rows], again[:rows], (*label, step))
    backend.init_forward_metadata_replay(case.bs, batches[0])
    replay()
    _, lse = eager.forward(given, layer, meta, return_lse=True, lse_layout="th")
    case.check(q, poison.download(out), poison.download(lse))


def test_many_replays(torch: Any, xp: ModuleType) -> None:
    """The metadata's launch is part of the graph: a replay reads what the engine's arrays hold."""
    rng = np.random.default_rng(1)
    heads, kv_heads, dim, page, bs = 8, 2, 64, 16, 4
    table = poison.upload(serving_engine.slots(page), xp)
    pool = MHATokenToKVPool(2048, kv_heads, dim, 1, table, dtype="float16")
    slots = poison.upload(np.arange(2048), xp)
    values = rng.standard_normal((2048, kv_heads, dim)).astype(np.float16)
    layer = serving_engine.layer(0, heads, kv_heads, dim, scaling=0.125)
    pool.set_kv_buffer(layer, slots, *(poison.upload(values, xp) for _ in "kv"))
    runner = serving_engine.runner(page, table, token_to_kv_pool=pool)
    backend, eager = (serving_engine.FlashAttentionBackend(runner) for _ in "ab")
    backend.init_cuda_graph_state(bs, bs)
    req, lens = (poison.upload(np.ones(bs, np.int64), xp) for _ in "rl")
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="DECODE"), req_pool_indices=req, seq_lens=lens,
        spec_info=None, token_to_kv_pool=pool,
    )  # fmt: skip
    q = poison.upload(rng.standard_normal((bs, heads * dim)).astype(np.float16), xp)
    found: list[Any] = []

    def step() -> None:
        backend.init_forward_metadata_in_graph(batch)
        found.append(backend.forward_decode(q, None, None, layer, batch))

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    step()
    replay = capture(torch, xp, step)
    for turn in range(some(REPLAYS)):
        if turn % 100 == 0:
            lens[...] = poison.upload(rng.integers(1, 60, bs), xp)
            req[...] = poison.upload(rng.permutation(8)[:bs], xp)
        replay()
        if turn % 100 == 99:
            eager.init_forward_metadata(batch)
            same(found[-1], eager.forward_decode(q, None, None, layer, batch), turn)


def test_nothing_waits(torch: Any) -> None:
    """torch raises at the first call that synchronises, in checked steps and in cached ones."""
    for kind in KINDS:
        case = case_of(6, torch, kind)
        backend, layer, batch = case.backend(), case.layer(), case.batch()
        q = case.put(case.queries())
        backend.init_forward_metadata(batch)
        backend.forward(q, layer)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                backend.init_forward_metadata(batch)
                backend.forward(q, layer)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_random_writes_to_slots() -> None:
    for seed in range(some(300)):
        slot_cases.Case(seed, framework(seed)).run()


def test_writes_of_a_graph(torch: Any, xp: ModuleType) -> None:
    rng = np.random.default_rng(2)
    k, v = (poison.upload(rng.standard_normal((4, 2, 64)).astype(np.float16), xp) for _ in "kv")
    caches = [poison.upload(np.zeros((32, 2, 64), np.float16), xp) for _ in "kv"]
    slots = poison.upload(np.arange(4), xp)
    reshape_and_cache(k, v, *caches, slots)
    replay = capture(torch, xp, lambda: reshape_and_cache(k, v, *caches, slots))
    slots[...] = poison.upload(np.array([30, -1, 9, 31]), xp)
    replay()
    for new, cache in ((k, caches[0]), (v, caches[1])):
        wanted, new = np.zeros((32, 2, 64), np.float16), poison.download(new)
        wanted[:4] = new
        wanted[[30, 9, 31]] = new[[0, 2, 3]]
        np.testing.assert_array_equal(poison.download(cache), wanted)


def test_strided_slots_are_copied(xp: ModuleType) -> None:
    """A column of a table of slots, again and again. A copy is not the next call's, and
    one slot, which is contiguous whatever its stride, says nothing about several."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((2, 6, 2, 64)).astype(np.float16)
    caches = [poison.upload(np.zeros((40, 2, 64), np.float16), xp) for _ in "kv"]
    k, v = (poison.upload(x, xp) for x in values)
    slots = rng.permutation(40)[:18].reshape(6, 3)
    table = poison.upload(slots.astype(np.int32), xp)
    for column in range(3):
        reshape_and_cache(k[:1], v[:1], *caches, table[:1, column])
        reshape_and_cache(k, v, *caches, table[:, column])
    for cache, x in zip(caches, values, strict=True):
        for column in range(3):
            np.testing.assert_array_equal(poison.download(cache)[slots[:, column]], x)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_latent_rows_are_written_and_moved(dtype: str) -> None:
    """As the pool of CPU arrays has them, bit for bit."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((7, 1, 576)).astype(np.float16)
    loc, layer = np.array([3, 9, -1, 0, 30, 31, 12]), LayerSpec(0, softmax_scale=1.0, k_scale=0.3)
    for is_split in (False, True):
        found = []
        for xp in (np, framework(1)):
            like = poison.upload(np.zeros(1, np.int32), xp)
            pool = MLATokenToKVPool(32, 512, 64, 1, like, dtype=dtype, is_split=is_split)
            parts = [x for x in pool.get_latent_buffers(0) if x is not None]
            given = [poison.upload(x, xp) for x in (rows[..., :512], rows[..., 512:])]
            pool.set_mla_kv_buffer(layer, poison.upload(loc, xp), *given)
            pool.move(*(poison.upload(np.array(x), xp) for x in ([1, 2, -1], [3, 9, 9])))
            written = [0, 1, 2, 3, 9, 12, 30, 31]
            found.append([poison.download(x)[written].view(np.uint8) for x in parts])
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)

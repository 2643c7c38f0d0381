"""Exchanges of states on GPUs: ranks as streams of one process, and as processes of two GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import exchange_calls, exchange_ranks
from helpers.exchange_calls import LATE, SMALL, ExchangeCase, RankRun, random_case, to_host
from helpers.share import some

from cupyattn import DeviceError, array
from cupyattn.distributed import Group, StateExchange, simulate
from cupyattn.distributed.gather import HeadGather

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")


def run_and_check(case: ExchangeCase) -> None:
    """Ranks are streams of one GPU, whose grids are small enough to run at the same time."""
    # Memory for outputs would be asked for while another rank waits on the GPU.
    case = replace(case, timeout=10.0, gives_outputs=True)

    def work(group: Group) -> Any:
        with cupy.cuda.Stream(non_blocking=True):
            return exchange_calls.run_and_check(case, group, cupy)

    exchange_calls.check(case, simulate(case.size, work, devices=[0] * case.size))


@pytest.mark.parametrize("seed", range(some(40)))
def test_random_exchanges(seed: int) -> None:
    run_and_check(replace(random_case(seed, (1, 2, 3, 4)), uses_windows=True))


@pytest.mark.parametrize("seed", range(some(10)))
def test_random_exchanges_by_all_to_all(seed: int) -> None:
    run_and_check(replace(random_case(seed, (1, 2, 3, 4)), uses_windows=False))


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_many_rows(out_dtype: str) -> None:
    case = ExchangeCase(
        rows=(64, 1, 64), own_heads=16, head_dim=128, out_dtype=out_dtype, uses_windows=True
    )
    run_and_check(case)


def test_a_late_peer_is_nan_and_then_an_error() -> None:
    case = replace(LATE, uses_windows=True, timeout=0.3)

    def work(group: Group) -> Any:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            run = RankRun(case, group, cupy)
            steps = [run.step(0)]
            stream.synchronize()
            group.share_bytes(b"")
            if group.rank == 0:
                steps.append(run.step(1))
                stream.synchronize()
                with pytest.raises(DeviceError, match="rank 1 did not deliver"):
                    run.step(2)
            return [tuple(map(to_host, (x.out, x.lse))) for x in steps]

    first, second = simulate(2, work, devices=[0, 0])
    assert np.isnan(first[1][0].astype(np.float32)).all() and np.isnan(first[1][1]).all()
    exchange_calls.check(replace(case, rows=(2,)), [first[:1], second[:1]])


@pytest.mark.parametrize("size", [2, 3])
def test_heads_of_all_ranks(size: int) -> None:
    rng = np.random.default_rng(size)
    whole = rng.standard_normal((70, size * 4, 192)).astype(np.float16)

    def work(group: Group) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            exchange = StateExchange(group, 70, 4 * size, 64, timeout=10.0, uses_windows=True)
            gather = HeadGather(exchange)
            own = cupy.asarray(whole[:, group.rank * 4 : group.rank * 4 + 4])
            parts = [array.view(own[..., :128], "q"), array.view(own[..., 128:], "q")]
            for _ in range(3):
                cupy.empty(whole.shape, np.float16)  # the pool has it from now on
                group.share_bytes(b"")
                found = gather(parts)
                group.share_bytes(b"")
                for x, columns in zip(found, (slice(0, 128), slice(128, 192)), strict=True):
                    np.testing.assert_array_equal(x.get(), whole[..., columns])

    simulate(size, work, devices=[0] * size)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_other_frameworks(framework: str) -> None:
    xp = pytest.importorskip("torch" if framework == "torch" else "jax.numpy")
    case = replace(SMALL, rows=(5,), uses_windows=True, timeout=10.0)

    def work(group: Group) -> Any:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            run = RankRun(case, group, cupy)
            v, s = case.states(0, group.rank)
            if framework == "jax":
                given = xp.asarray(v), xp.asarray(s)
                given[1].block_until_ready()
                group.share_bytes(b"")
                out, lse = run.exchange.run(*given, return_lse=True)
                return [(np.asarray(out).astype(np.float32), np.asarray(lse))]
        with xp.cuda.stream(xp.cuda.ExternalStream(stream.ptr)):
            given = (xp.from_numpy(x).cuda() for x in (v, s))
            group.share_bytes(b"")
            out, lse = run.exchange.run(*given, return_lse=True)
            assert out.dtype is xp.bfloat16
            return [(out.float().cpu().numpy(), lse.cpu().numpy())]

    exchange_calls.check(case, simulate(2, work, devices=[0, 0]))


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1, 2, 2]])
def test_windows_inside_hosts_and_all_to_all_between_them(hosts: list[int]) -> None:
    case = replace(SMALL, size=len(hosts), timeout=10.0, gives_outputs=True, own_heads=2)

    def work(group: Group) -> Any:
        with cupy.cuda.Stream(non_blocking=True):
            run = RankRun(case, group, cupy)
            levels = run.exchange._levels
            assert levels is not None and levels.inside._windows is not None
            assert levels.between._windows is None
            # What a first call of so many rows loads and allocates would wait for the GPU, on which
            # kernels of other ranks wait for this one. This level has none that wait.
            for rows in {*case.rows}:
                states = cupy.zeros((rows, levels.between.num_heads, case.head_dim), case.dtype)
                lse = cupy.zeros(states.shape[:2], np.float32)
                levels.between.run(states, lse, return_lse=True)
            cupy.empty(1 << 24, np.uint8)  # the stream's pool has it from now on
            return exchange_calls.run_and_check(case, group, cupy)

    found = simulate(case.size, work, devices=[0] * case.size, hosts=hosts)
    exchange_calls.check(case, found)


@pytest.mark.parametrize("size", [2, 3])
def test_graphs_replay_while_ranks_stall(size: int) -> None:
    number = some(2000)
    found = simulate(
        size, lambda group: exchange_ranks.replay(group, number, 20), devices=[0] * size
    )
    assert found == [{"steps": number + 1, "errors": 0}] * size


# --- two GPUs ---


@pytest.fixture
def two_gpus() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.usefixtures("two_gpus")
def test_two_gpus_of_one_process() -> None:
    number = some(2000)
    found = simulate(2, lambda group: exchange_ranks.replay(group, number, 20), devices=[0, 1])
    assert found == [{"steps": number + 1, "errors": 0}] * 2


def start(mode: str, folder: Path, number: int | None = None) -> list[dict[str, Any]]:
    return exchange_ranks.finish(exchange_ranks.start(mode, folder, 2, number), 120.0)


@pytest.mark.usefixtures("two_gpus")
def test_processes_replay_while_ranks_stall(tmp_path: Path) -> None:
    number = some(10_000)
    for found in start("replay", tmp_path, number):
        assert (found.get("steps"), found.get("errors")) == (number + 1, 0), found


@pytest.mark.usefixtures("two_gpus")
def test_a_killed_rank_is_an_error_within_two_seconds(tmp_path: Path) -> None:
    first, second = start("kill", tmp_path)
    assert second["code"] == -9 and first["code"] == 0, (first, second)
    assert first["kind"] == "DeviceError" and "rank 1" in first["error"], first
    assert first["noticed"] - second["died"] < 2.0


@pytest.mark.usefixtures("two_gpus")
def test_a_late_process_is_an_error_within_two_seconds(tmp_path: Path) -> None:
    for found in start("late", tmp_path):
        assert found["code"] == 0 and found["error"], found
        assert found["seconds"] < 2.0

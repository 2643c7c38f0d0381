"""Groups of GPUs: collectives, windows and graphs in fresh processes, and killed ranks."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import Ranks, run_ranks

from cupyattn.distributed import Group, new_unique_id, simulate

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

_FOLDER = """
import cupy as cp
from cupyattn.distributed import Group
cp.cuda.Device(rank).use()
group = Group.from_folder(folder, rank, size)
"""
_UNIQUE_ID = """
import time
from pathlib import Path
import cupy as cp
from cupyattn.distributed import Group, new_unique_id
path, part = Path(folder, "id"), Path(folder, "part")
if rank == 0:
    part.write_bytes(new_unique_id())
    part.rename(path)
while not path.exists():
    time.sleep(0.01)
group = Group.from_unique_id(path.read_bytes(), rank, size, device=rank)
"""
_TORCH = """
import torch
import torch.distributed as dist
torch.cuda.set_device(rank)
place = f"file://{folder}/torch"
dist.init_process_group("nccl", init_method=place, rank=rank, world_size=size)
import cupy as cp
from cupyattn.distributed import Group
group = Group.from_torch()
"""
_JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import socket, time
from pathlib import Path
port = Path(folder, "port")
if rank == 0:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        Path(folder, "part").write_text(str(free.getsockname()[1]))
    Path(folder, "part").rename(port)
while not port.exists():
    time.sleep(0.01)
import jax
address = f"127.0.0.1:{port.read_text()}"
jax.distributed.initialize(address, size, rank, local_device_ids=[rank])
import cupy as cp
from cupyattn.distributed import Group
group = Group.from_jax()
"""
_CUPYX = """
import cupy as cp
import cupyx.distributed
cp.cuda.Device(rank).use()
import os
from pathlib import Path
import socket, time
port = Path(folder, "port")
if rank == 0:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        Path(folder, "part").write_text(str(free.getsockname()[1]))
    Path(folder, "part").rename(port)
while not port.exists():
    time.sleep(0.01)
backend = cupyx.distributed.init_process_group(size, rank, port=int(port.read_text()))
import atexit
atexit.register(backend.stop)  # its store is a process that Python waits for
from cupyattn.distributed import Group
group = Group.from_cupyx(backend)
"""
# What every group must do: each line of it is on a stream of its own, and then in a graph.
_CALLS = """
import numpy as np
from cupyattn import DistributedError
assert group.on_gpu and group.can_capture and set(group.hosts) == {0}
group.handshake({"head_dim": 128})
try:
    group.handshake({"head_dim": 64 + rank})
except DistributedError as error:
    assert "rank 1 has head_dim 65, rank 0 has head_dim 64" in str(error), error
else:
    raise AssertionError("no error")
ranks = cp.arange(size, dtype=np.float32)
given = cp.repeat(100 * rank + ranks, 1000).reshape(size, 1000)
wanted = cp.repeat(100 * ranks + rank, 1000).reshape(size, 1000)
out, everyone, total = cp.zeros_like(given), cp.zeros((size, 3)), cp.zeros(1, np.float32)
own = cp.full(3, rank, np.float64)
weights = ranks * (rank + 1)
cp.cuda.Device().synchronize()
stream = cp.cuda.Stream(non_blocking=True)

def calls():
    group.all_to_all(out, given, stream.ptr)
    group.all_gather(everyone, own, stream.ptr)
    group.reduce_scatter(total, weights, stream.ptr)
    group.barrier(stream.ptr)

def check():
    stream.synchronize()
    assert (out == wanted).all()
    assert (everyone == cp.arange(size)[:, None]).all()
    assert float(total[0]) == rank * size * (size + 1) / 2
    out[...] = everyone[...] = total[...] = 0
    cp.cuda.Device().synchronize()

with stream:
    calls()
check()
with stream:
    stream.begin_capture()
    calls()
    calls()
    graph = stream.end_capture()
for _ in range(10):
    graph.launch(stream)
check()
print("graph")

window = group.window(4096)
print(group.describe())
assert window is not None, group.describe()
assert not window.local.any() and window.table.get().tolist() == window.peers.tolist()
code = cp.RawKernel('''extern "C" __global__ void put(size_t* peers, int rank, int size) {
    for (int peer = 0; peer < size; ++peer)
        reinterpret_cast<int*>(peers[peer])[rank * 32 + threadIdx.x] = 1000 * rank + threadIdx.x;
}''', "put")
with stream:
    code((1,), (32,), (window.table, np.int32(rank), np.int32(size)))
    group.barrier(stream.ptr)
stream.synchronize()
got = window.local[: size * 128].view(np.int32).reshape(size, 32).get()
assert (got == 1000 * np.arange(size)[:, None] + np.arange(32)).all(), got
group.share_bytes(b"")
window.close()
second = group.window(100)  # a window can be had again
assert second is not None and not second.local.any()
part = group.split(rank)
assert part.size == 1 and part.rank == 0
part.barrier(stream.ptr)
stream.synchronize()
part.close()
group.close()
print("closed")
"""
_NEEDS_JAX = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed")
_NEEDS_TORCH = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason="torch is not installed"
)
_STARTS = [
    pytest.param(_FOLDER, id="folder"),
    pytest.param(_UNIQUE_ID, id="unique_id"),
    pytest.param(_CUPYX, id="cupyx"),
    pytest.param(_TORCH, id="torch", marks=_NEEDS_TORCH),
    pytest.param(_JAX, id="jax", marks=_NEEDS_JAX),
]


@pytest.fixture
def two_gpus() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("start", _STARTS)
def test_two_processes(start: str, tmp_path: Path) -> None:
    for text in run_ranks(2, start + _CALLS, tmp_path, 90):
        assert "windows: CUDA IPC" in text and "closed" in text


_WAITS = """
import time
import numpy as np
from cupyattn import DeviceError
given, out = cp.zeros(1 << 20, np.uint8), cp.zeros(1 << 20, np.uint8)
cp.cuda.Device().synchronize()
stream = cp.cuda.Stream(non_blocking=True)
group.all_to_all(out, given, stream.ptr)
stream.synchronize()
group.window(4096)
print("ready", flush=True)
if rank == 1:
    time.sleep(60)
try:
    while True:  # the first is enqueued and waits on the GPU, where it must be let go
        group.all_to_all(out, given, stream.ptr)
        stream.synchronize()
        group.check()
except DeviceError as error:
    print("raised", error, time.monotonic(), flush=True)
except Exception as error:
    print("stream:", repr(error))
    group.check()
start = time.monotonic()
group.close()
print("closed", time.monotonic() - start, flush=True)
# The process goes on: its GPU works, and a group can be made anew.
assert float(cp.ones(5).sum()) == 5
with Group.from_folder(f"{folder}/anew", 0, 1) as anew:
    anew.all_to_all(out, given, stream.ptr)
    stream.synchronize()
print("anew", flush=True)
"""


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("start", _STARTS[:2] + _STARTS[3:4])
def test_a_killed_rank_is_an_error_within_two_seconds(start: str, tmp_path: Path) -> None:
    ranks = Ranks(2, start + _WAITS, tmp_path)
    for rank in range(2):
        ranks.wait_for(rank, "ready", 60)
    time.sleep(0.5)  # rank 0 waits on its GPU
    killed = time.monotonic()
    ranks.kill(1)
    ended = ranks.ended(20)
    assert (ended[0].code, ended[1].code) == (0, -9), ranks.all_text()
    raised = next(x for x in ended[0].text.splitlines() if x.startswith("raised"))
    assert "ended; close this group and make a new one" in raised, raised
    assert float(raised.split()[-1]) - killed < 2, raised
    assert "anew" in ended[0].text


@pytest.mark.usefixtures("two_gpus")
def test_two_ranks_may_not_take_one_gpu(tmp_path: Path) -> None:
    source = """
import cupy as cp
from cupyattn import DistributedError
from cupyattn.distributed import Group
try:
    Group.from_folder(folder, rank, size, device=0)
except DistributedError as error:
    print(error)
"""
    for text in run_ranks(2, source, tmp_path, 60):
        assert "ranks 0 and 1 have the same GPU" in text


def _simulated(group: Group) -> None:
    ranks = cupy.arange(group.size, dtype=np.float32)
    given = cupy.repeat(10 * group.rank + ranks, 50)
    out, total = cupy.empty_like(given), cupy.empty(1, np.float32)
    group.all_to_all(out, given)
    assert (out == cupy.repeat(10 * ranks + group.rank, 50)).all()
    group.reduce_scatter(total, ranks + 1)
    assert float(total[0]) == group.size * (group.rank + 1)
    window = group.window(1024)
    assert window is not None and window.memories is not None and not window.local.any()
    cupy.cuda.get_current_stream().synchronize()
    group.barrier()
    kernel = cupy.RawKernel(
        """extern "C" __global__ void put(unsigned long long* peers, int rank) {
            reinterpret_cast<int*>(peers[threadIdx.x])[rank] = rank + 1;
        }""",
        "put",
    )
    kernel((1,), (group.size,), (window.table, np.int32(group.rank)))
    group.barrier()
    got = window.local[: 4 * group.size].view(np.int32).get()
    assert got.tolist() == list(range(1, group.size + 1))
    group.barrier()


def test_ranks_that_are_streams_of_one_gpu() -> None:
    simulate(3, _simulated, devices=[0, 0, 0])


@pytest.mark.usefixtures("two_gpus")
def test_ranks_that_are_two_gpus_of_one_process() -> None:
    simulate(2, _simulated, devices=[0, 1])


def test_a_group_of_one_rank(tmp_path: Path) -> None:
    groups = (
        Group.from_folder(tmp_path / "new", 0, 1),
        Group.from_unique_id(new_unique_id(), 0, 1),
    )
    for group in groups:
        given = cupy.arange(8, dtype=np.uint8)
        out = cupy.zeros_like(given)
        group.all_to_all(out, given)
        assert (out == given).all()
        assert group.share_bytes(b"alone") == [b"alone"]
        window = group.window(64)
        assert window is not None and window.peers.tolist() == [window.local.data.ptr]
        group.close()

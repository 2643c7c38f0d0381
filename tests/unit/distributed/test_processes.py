"""Groups of fresh processes on the CPU: over a folder, torch's gloo and JAX; and their deaths."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import Ranks, run_ranks

_FOLDER = """
from cupyattn.distributed import Group
group = Group.from_folder(folder, rank, size, on_gpu=False, timeout=60)
"""
_GLOO = """
import torch.distributed as dist
from cupyattn.distributed import Group
dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=size)
group = Group.from_torch()
"""
_JAX = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
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
jax.distributed.initialize(f"127.0.0.1:{port.read_text()}", size, rank)
from cupyattn.distributed import Group
group = Group.from_jax(on_gpu=False)
"""
_CALLS = """
import numpy as np
from cupyattn import DistributedError
ranks = np.arange(size, dtype=np.float32)
out = np.empty((size, 3), np.float32)
group.all_to_all(out, np.repeat(100 * rank + ranks, 3).reshape(size, 3))
assert (out == (100 * ranks + rank)[:, None]).all(), out
given = np.array([rank], np.int16)
given.flags.writeable = False
everyone = np.empty(size, np.int16)
group.all_gather(everyone, given)
assert everyone.tolist() == list(range(size))
total = np.empty(1, np.float32)
group.reduce_scatter(total, ranks * (rank + 1))
assert total.tolist() == [rank * size * (size + 1) / 2], total
assert group.window(64) is None and not group.on_gpu and set(group.hosts) == {0}
group.handshake({"head_dim": 128})
try:
    group.handshake({"head_dim": 64 if rank == 1 else 128})
except DistributedError as error:
    assert "rank 1 has head_dim 64, rank 0 has head_dim 128" in str(error), error
else:
    raise AssertionError("no error")
part = group.split(rank % 2)
members = part.share_bytes(bytes([rank]))
assert [x[0] for x in members] == [i for i in range(size) if i % 2 == rank % 2], members
part.barrier()
part.close()
print(group)
group.close()
"""
_TORCH = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
_HAS_JAX = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (_FOLDER, "a folder"),
        pytest.param(_GLOO, "gloo by torch", marks=[_TORCH, pytest.mark.slow]),
        pytest.param(_JAX, "JAX", marks=[_HAS_JAX, pytest.mark.slow]),
    ],
    ids=["folder", "gloo", "jax"],
)
def test_processes_share_what_they_are_told(start: str, words: str, tmp_path: Path) -> None:
    texts = run_ranks(3, start + _CALLS, tmp_path, 120)
    assert f"rank 2 of 3: {words}" in texts[2]


_WAITS = """
import time
import numpy as np
from cupyattn import DeviceError
group.barrier()
print("ready", flush=True)
if rank == 1:
    time.sleep(60)
start = time.monotonic()
try:
    group.all_to_all(np.empty(4 * size, np.uint8), np.zeros(4 * size, np.uint8))
except DeviceError as error:
    print("raised", error, time.monotonic())
    assert "close this group and make a new one" in str(error)
try:
    group.barrier()
except DeviceError as error:
    print("again", error)
start = time.monotonic()
group.close()
print("closed", time.monotonic() - start)
"""


@pytest.mark.parametrize(
    "start",
    [_FOLDER, pytest.param(_GLOO, marks=[_TORCH, pytest.mark.slow])],
    ids=["folder", "gloo"],
)
def test_a_killed_rank_is_an_error_on_the_others_within_two_seconds(
    start: str, tmp_path: Path
) -> None:
    ranks = Ranks(3, start + _WAITS, tmp_path)
    for rank in range(3):
        ranks.wait_for(rank, "ready", 120)
    time.sleep(0.2)  # the others wait for it now
    killed = time.monotonic()
    ranks.kill(1)
    ended = ranks.ended(10)
    assert [x.code for x in ended] == [0, -9, 0], ranks.all_text()
    for rank in (0, 2):
        raised = next(x for x in ended[rank].text.splitlines() if x.startswith("raised"))
        assert "rank 1 (process " in raised and ") ended" in raised
        assert float(raised.split()[-1]) - killed < 2
        assert "again rank 1" in ended[rank].text
        assert float(ended[rank].text.split()[-1]) < 2  # closing waits for nobody


def test_a_rank_that_raises_and_lives_on_is_heard_of(tmp_path: Path) -> None:
    source = """
import time
from cupyattn import DeviceError
from cupyattn.distributed import Group
made = 0
for attempt in range(2):  # a group is made anew in the same processes
    group = Group.from_folder(f"{folder}/{attempt}", rank, size, on_gpu=False)
    try:
        with group:
            group.barrier()
            if rank == 1:
                raise KeyError("lost")
            start = time.monotonic()
            group.barrier()
    except KeyError:
        pass
    except DeviceError as error:
        assert "rank 1 ended with KeyError: 'lost'" in str(error), error
        assert time.monotonic() - start < 2
    made += 1
with Group.from_folder(f"{folder}/end", rank, size, on_gpu=False) as group:
    group.barrier()
print("made", made)
"""
    assert all("made 2" in text for text in run_ranks(2, source, tmp_path, 60))


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    source = """
from cupyattn import DeviceError
from cupyattn.distributed import Group
try:
    if rank == 0:
        Group.from_folder(folder, rank, size, on_gpu=False, timeout=0.3)
except DeviceError as error:
    print(error)
"""
    texts = run_ranks(2, source, tmp_path, 60)
    assert texts[0].strip() == "rank 1 did not come within 0.3 s"


def test_ranks_in_different_calls_hear_of_it(tmp_path: Path) -> None:
    source = """
import numpy as np
from cupyattn import DistributedError
from cupyattn.distributed import Group
with Group.from_folder(folder, rank, size, on_gpu=False) as group:
    given = np.zeros(2 + 2 * rank, np.uint8)
    try:
        group.all_to_all(np.empty_like(given), given)
    except DistributedError as error:
        print(error)
    group.barrier()
"""
    texts = run_ranks(2, source, tmp_path, 60)
    assert "rank 1 is in all_to_all of 4 bytes, and rank 0 is in all_to_all of 2" in texts[0]


_RENDEZVOUS = """
import os
from cupyattn.distributed import Group
group = Group.from_environment(on_gpu=False)
assert (group.rank, group.size) == (int(os.environ["RANK"]), 2), group
group.barrier()
print(group)
group.close()
"""


@_TORCH
@pytest.mark.slow
def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_RENDEZVOUS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = Path(__file__).parents[3]
    child = subprocess.run(
        [*command, str(program)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "rank 0 of 2: torchrun" in child.stdout and "rank 1 of 2: torchrun" in child.stdout

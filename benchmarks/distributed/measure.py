"""All that ranks measure, in order; and the process that is one rank of several GPUs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from cupyattn.distributed import Group

from .cases import DECODES, EXCHANGES, PARTS, PROMPTS, Decode, Prompt
from .decode import run_decode
from .exchange import run_exchange
from .machine import GPU
from .prompt import run_prompt
from .rank import Rank


def measure(
    rank: Rank,
    prefix: str = "",
    decodes: Sequence[Decode] = DECODES,
    prompts: Sequence[Prompt] = PROMPTS,
    exchanges: Sequence[tuple[int, int, int]] = EXCHANGES,
) -> None:
    """Exchanges, decode steps and prompts whose names start so, while time is left."""
    for shape in exchanges:
        if rank.group.size > 1 and rank.has_time(15) and "exchange".startswith(prefix):
            run_exchange(rank, *shape)
    for case in (*decodes, *prompts):
        if rank.has_time(15) and case.name.startswith(prefix):
            if isinstance(case, Decode):
                run_decode(rank, case)
            else:
                run_prompt(rank, case)
            if rank.machine.on_gpu:
                torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as one of the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.measure")
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--case", default="", help="names that start so")
    parser.add_argument("--alone", action="store_true", help="measure one GPU's kernels too")
    args = parser.parse_args(argv)
    deadline = time.time() + args.seconds
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    group = Group.from_torch(device=device.index)
    print(group.describe(), flush=True)
    parts = PARTS if args.alone else ()
    measure(Rank(group, GPU, args.out, deadline, parts), args.case)
    group.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

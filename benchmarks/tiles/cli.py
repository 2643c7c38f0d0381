"""`python -m benchmarks tiles` times candidates; `... fit` makes the data of a card of them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cupyattn.array import Device
from cupyattn.bench.clock import Clock
from cupyattn.bench.inputs import Arrays
from cupyattn.bench.machine import git_commit
from cupyattn.bench.tiles import rows
from cupyattn.bench.tiles.draw import draw_cases
from cupyattn.bench.tiles.fit import check, fit, split, table
from cupyattn.bench.tiles.measure import instances, rows_of
from cupyattn.choose.card import FOLDER, read
from cupyattn.choose.fit import text_of
from cupyattn.cli.compile import compiled
from cupyattn.core.device import device_props, imagine


def tiles(given: Sequence[str]) -> int:
    """Time every candidate of drawn batches; one JSON line a row."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tiles",
        description="Time every way to serve drawn batches, by force: one JSON line a row.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="batches, if there is time")
    parser.add_argument("--seconds", type=float, default=300.0, help="budget after compiling")
    parser.add_argument("--kv-dtype", help="only batches of these keys, as float8_e4m3fn")
    parser.add_argument("--dims", type=int, nargs="+", help="only these head dims of q and k")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    parser.add_argument("--out", type=Path, default=Path("tiles.jsonl"))
    args = parser.parse_args(given)
    start, cases = time.time(), draw_cases(args.seed, args.count)
    cases = [
        case
        for case in cases
        if args.kv_dtype in (None, case.kv_dtype)
        and (args.dims is None or case.head_dim_qk in args.dims)
    ]
    if args.jobs:
        needed = set().union(*instances(cases, imagine(device_props(0))).values())
        tasks = [(name, config, device_props(0).arch) for name, config in needed]
        count = sum(build is not None for _, build, _ in compiled(tasks, args.jobs, None))
        print(f"{count} kernels compiled in {time.time() - start:.0f} s", flush=True)
    commit = args.commit or git_commit(Path(__file__).parent)
    import torch  # CuPy has no arrays of fp8

    clock, arrays = Clock(), Arrays("torch", Device("cuda", torch.cuda.current_device()), args.seed)
    clock.preheat()
    num_rows = 0
    with args.out.open("w", encoding="utf-8") as file:
        for built in rows_of(cases, arrays, clock, commit, time.time() + args.seconds):
            file.writelines(rows.line(row) + "\n" for row in built)
            num_rows += len(built)
    print(f"{num_rows} rows in {args.out}")
    return 0


def fitting(given: Sequence[str]) -> int:
    """Fit the data of a card to rows, or check it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fit",
        description="Fit the data of a card to rows of `python -m benchmarks tiles`; errors and "
        "regrets are those of batches that were held out.",
    )
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows")
    parser.add_argument(
        "--card",
        required=True,
        type=str.lower,
        choices=sorted(x.stem for x in FOLDER.glob("h*.json")),
    )
    parser.add_argument(
        "--check", action="store_true", help="only say how good the card is, on all rows"
    )
    parser.add_argument("--write", action="store_true", help="write what was fitted")
    parser.add_argument("--source", default="", help="what the file says of the rows")
    args = parser.parse_args(given)
    path = FOLDER / f"{args.card}.json"
    card = read(path.read_text("utf-8"), path.name)
    result = [row for file in args.rows for row in rows.read(file)]
    if args.check:
        print(table(check(card, result)))
        return 0
    fitted, held_out = split(result)
    print(f"{path.name}:\n{table(check(card, held_out))}")
    built = replace(fit(card, fitted), source=args.source or _source(args.rows, result))
    print(f"fitted:\n{table(check(built, held_out))}")
    if args.write:
        path.write_text(text_of(built), "utf-8")
        print(f"{path}: written")
    return 0


def _source(files: Sequence[Path], result: Sequence[rows.Row]) -> str:
    commits = ", ".join(dict.fromkeys(row.commit for row in result))
    return f"{', '.join(file.name for file in files)} at {commits}"

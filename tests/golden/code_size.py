"""Bytes of instructions of the kernels that prompts run, and what they are made of.

    python -m tests.golden.code_size                          every prefill_sm90 of head dim 128
    python -m tests.golden.code_size --phases q128_persistent  by function, inlined as they are

A launch that other kernels have run before waits for its instructions, and a large one for more
(docs/prefill_sm90.md). Phases need nvdisasm, which a CUDA toolkit has; their cubins have line
information, which changes no instruction.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cupyattn import jit  # noqa: E402
from cupyattn.core import dtypes  # noqa: E402
from cupyattn.jit import compiler  # noqa: E402
from cupyattn.jit.source import Program  # noqa: E402
from golden.machine_code import sections, standard  # noqa: E402

_AT = re.compile(r'//## File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?')
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s")
_FUNCTION = re.compile(r"(\w+)\(")
_BYTES_OF_INSTRUCTION = 16


def code_bytes(cubin: bytes) -> int:
    """The bytes of all instructions of a cubin."""
    return sum(header[5] for label, header in sections(cubin) if label.startswith(".text."))


def tile_name(config: jit.Config) -> str:
    """As launch/tiles/prefill_sm90.py names tiles, but persistent ones by their rows too."""
    if config["kLean"]:
        return "lean_persistent" if config["kPersistent"] else f"lean{config['kTileKV']}"
    kind = "persistent" if config["kPersistent"] else "oneshot"
    return f"q{64 * config['kConsumers']}_{kind}"


def prompts(head_dim: int = 128) -> Iterator[tuple[str, jit.Config]]:
    """Kernels of prompts of bfloat16 and no options, by tile and kind of keys."""
    for entry, config in standard("sm_90a").values():
        if entry != "prefill_sm90" or config["kSoftCap"]:
            continue
        types = {config["DTypeQ"], config["DTypeKV"], config["DTypeO"]}
        dims = {config["kHeadDimQK"], config["kHeadDimVO"]}
        if dims != {head_dim} or types != {dtypes.bfloat16}:
            continue
        keys = "gathered" if config["kGatherers"] else "paged" if config["kPaged"] else "ragged"
        yield f"{keys} {tile_name(config)}", config


# --- Phases ---


@cache
def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@cache
def _function(path: str, line: int) -> str:
    """The function that holds a line: the last one that is declared ahead of it."""
    lines = _lines(path)
    for i in range(min(line, len(lines)) - 1, -1, -1):
        if "__device__" in lines[i] or "__global__" in lines[i]:
            found = _FUNCTION.search(" ".join(lines[i : i + 3]).replace("__launch_bounds__(", ""))
            if found:
                return found[1]
    return "?"


def _stacks(listing: str) -> Iterator[tuple[tuple[str, int], ...]]:
    """For each instruction the lines that it is made from, the outermost first."""
    stack: list[tuple[str, int]] = []
    is_complete = True
    for line in listing.splitlines():
        if at := _AT.search(line):
            stack = [] if is_complete else stack
            stack.append((at[1], int(at[2])))
            is_complete = False
        elif _INSTRUCTION.match(line):
            is_complete = True
            yield tuple(reversed(stack))


def phases(config: jit.Config, nvdisasm: str = "nvdisasm") -> dict[tuple[str, ...], int]:
    """Bytes of instructions by the functions that stand within each other, with those within."""
    program = Program.read("prefill_sm90", config)
    cubin = compiler.compile_cubin(program, "sm_90a", ("-lineinfo",)).cubin
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm, "-gi", "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[tuple[str, ...], int] = defaultdict(int)
    for stack in _stacks(listing):
        names: tuple[str, ...] = ()
        caller = 0
        for path, line in stack:
            # The line of the call tells copies of a function apart.
            names = (*names, f"{_function(path, line)}:{caller}")
            found[names] += _BYTES_OF_INSTRUCTION
            caller = line
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phases", metavar="TILE", help="such as q128_persistent, of ragged keys")
    parser.add_argument("--keys", default="ragged", choices=("ragged", "paged", "gathered"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--least", type=float, default=0.7, help="KB that a line is worth")
    parser.add_argument("--nvdisasm", default=os.environ.get("NVDISASM", "nvdisasm"))
    args = parser.parse_args()
    for name, config in prompts(args.head_dim):
        if not args.phases:
            cubin = jit.build("prefill_sm90", config, "sm_90a").path.read_bytes()
            print(f"{name:28} {code_bytes(cubin) / 1024:6.1f} KB", flush=True)
        elif name == f"{args.keys} {args.phases}":
            for names, count in sorted(phases(config, args.nvdisasm).items()):
                if count >= 1024 * args.least:
                    print(f"{count / 1024:6.1f} KB {'  ' * len(names)}{names[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

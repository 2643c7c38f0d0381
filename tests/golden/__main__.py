"""Writes the record of what calls launch, and says what has changed.

python -m tests.golden            compares, as the tests do
python -m tests.golden --write    records, and sums up by door and part what has changed
python -m tests.golden --show DOOR [SEED ...]    prints the launches of calls byte by byte
python -m tests.golden --against REF DOOR [SEED ...]    and how those of another commit differ
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from golden import record, trace  # noqa: E402
from golden.doors import DOORS, make  # noqa: E402


def compare(writes: bool) -> int:
    """Compare all doors with the record, and write it if told to."""
    known, made, is_equal = record.load(), {}, True
    for door in DOORS:
        calls = make(door)
        made[door] = {str(call.seed): record.entries_of(call) for call in calls}
        found = record.differences(known.get(door, {}), calls)
        gone = len(known.get(door, {}).keys() - made[door].keys())
        is_equal &= not found and not gone
        if writes and (found or gone):
            counts = Counter(part for x in found for part in x.parts)
            parts = ", ".join(f"{part} of {counts[part]}" for part in record.PARTS if counts[part])
            print(f"{door}: {len(found)} of {len(calls)} calls: {parts}; {gone} gone", flush=True)
        elif found:
            print(record.told(found, len(calls)), flush=True)
    gone_doors = known.keys() - DOORS.keys()
    if gone_doors:
        print(f"no such doors any more: {', '.join(sorted(gone_doors))}")
    if writes:
        record.save(made)
        print(f"{sum(map(len, made.values()))} calls of {len(made)} doors are in {record.PATH}")
    elif is_equal and not gone_doors:
        print(f"{sum(map(len, made.values()))} calls are as recorded")
    return int(not writes and not (is_equal and not gone_doors))


def show(door: str, seeds: Sequence[int]) -> list[str]:
    return [line for call in make(door, seeds or None) for line in trace.lines(call)]


def against(ref: str, door: str, seeds: Sequence[int]) -> None:
    """Print how the launches of these calls differ from those of the library at another commit,
    with the calls as they are drawn here."""
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "other")
        run = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*run, "add", "-q", "--detach", str(other), ref], check=True)
        try:
            for part in ("tests/golden", "tests/helpers", "tests/emulator"):
                subprocess.run(["rm", "-rf", str(other / part)], check=True)
                subprocess.run(["cp", "-r", str(ROOT / part), str(other / part)], check=True)
            command = [sys.executable, "-m", "tests.golden", "--show", door, *map(str, seeds)]
            made = subprocess.run(command, cwd=other, check=True, capture_output=True, text=True)
        finally:
            subprocess.run([*run, "remove", "--force", str(other)], check=True)
    lines = difflib.unified_diff(
        made.stdout.splitlines(), show(door, seeds), ref, "here", lineterm="", n=2
    )
    print("\n".join(lines) or "no difference")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record what is launched now")
    parser.add_argument("--show", nargs="+", metavar="DOOR SEED", help="print launches in full")
    parser.add_argument("--against", nargs="+", metavar="REF DOOR SEED", help="beside a commit")
    chosen = parser.parse_args()
    if chosen.show:
        door, *seeds = chosen.show
        print("\n".join(show(door, [*map(int, seeds)])))
        return 0
    if chosen.against:
        ref, door, *seeds = chosen.against
        against(ref, door, [*map(int, seeds)])
        return 0
    return compare(chosen.write)


if __name__ == "__main__":
    sys.exit(main())

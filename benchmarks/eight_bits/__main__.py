"""Entry point of `python -m benchmarks.eight_bits`."""

from __future__ import annotations

import json
import sys

from . import errors


def main(arguments: list[str]) -> int:
    """Computes the errors, 1 to 2 minutes; prints them, and writes them with --write."""
    found = errors.all_errors()
    print(errors.table(found))
    if "--write" in arguments:
        errors.FIGURES.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

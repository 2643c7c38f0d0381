"""The rows of the README: measured by one command, shown by another.

    python -m benchmarks.readme --out benchmarks/results/DATE-CARD-readme    # on a GPU, a minute
    python -m benchmarks.readme --show DATE-CARD-readme                      # anywhere

The first writes a result folder of CASES beside PEERS, as `python -m benchmarks` does, whose other
options it takes. The second puts the folder's name in the place of the one that documents show, and
writes their tables and charts. A test fails where the folder's commit is too old (`age`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Prompts, an encoder, chunks, decodes, drafts and latent attention; peers lead in some of them.
CASES = {
    "1x16k": "one prompt of 16k tokens",
    "1x16k_full": "the same, not causal",
    "ragged_4x4k": "4 prompts of 4k",
    "ragged_16x1k": "16 prompts of 1k",
    "ragged_10x384_encoder": "encoder, 10 inputs of 384, 12 heads of 64",
    "append_8x512_8k": "8 chunks of 512 after 8k, paged",
    "decode_64x8k": "decode, 64 requests of 8k, paged",
    "decode_8x8k": "decode, 8 requests of 8k, paged",
    "decode_1x128k": "decode, one request of 128k, paged",
    "verify_32x8k_q4": "4 draft tokens, 32 requests of 8k, paged",
    "mla_128x4k_h128": "MLA decode, 128 requests of 4k, 128 heads",
    "mla_64x8k_h8": "MLA decode, 64 requests of 8k, 8 heads",
    "mla_32x8k_h16_q4": "MLA, 4 draft tokens, 32 requests of 8k, 16 heads",
}
CHART = {name: CASES[name] for name in CASES if not name.startswith("1x16k_full")}
OPS = ("prefill", "ragged", "append", "batch_decode", "verify", "mla")
PEERS = ("ours", "fa3", "flashinfer_fa2", "flashinfer_fa3", "sdpa_cudnn", "flashmla")
MOST_COMMITS = 50  # that touched kernels/ since the rows were measured


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or show the rows; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--show"]:
        return show(given[1])
    from . import cli

    chosen = ["--op", ",".join(OPS), "--case", ",".join(CASES), "--peers", ",".join(PEERS)]
    return cli.main([*chosen, *given])


def show(folder: str) -> int:
    """Let every document show the rows of `folder` where it shows another of its kind, which is
    the last word of a folder's name."""
    from . import documents

    if not (documents.RESULTS / folder / "results.json").is_file():
        raise SystemExit(f"{folder}: benchmarks/results has no such run")
    of_its_kind = re.compile(rf"\b20\d\d-\d\d-\d\d-\w+-{folder.rpartition('-')[2]}\b")
    for path in documents.documents():
        text = path.read_text("utf-8")
        path.write_text(of_its_kind.sub(folder, text), "utf-8")
    return documents.main()


def age(commit: str) -> int | None:
    """Commits that touched kernels/ since `commit`; None where this checkout cannot tell."""
    kernels = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "kernels"]
    shallow = _git(["git", "rev-parse", "--is-shallow-repository"])
    counted = _git(kernels) if shallow == "false" else None
    return None if counted is None else int(counted)


def _git(command: list[str]) -> str | None:
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())

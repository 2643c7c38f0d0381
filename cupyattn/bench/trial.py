"""A first call of a peer that compiles, in a process of its own that is killed when its time is up.

The process group goes with it, so no compiler is left. What it built stays in the peer's own cache:
the next run goes on from there.

`python -m cupyattn.bench.trial PEER KIND ...` is that process: it prints a line of JSON for each
backend that has worked or failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..array import Device
from . import peers
from .cases import CASES, Case
from .inputs import Arrays, make_inputs
from .timing import describe

# kind of a case -> backend -> "" or what went wrong. The backend "" stands for all that did not
# come to a first call.
Outcomes = dict[str, dict[str, str]]

_TOKENS = 64


def run(name: str, kinds: Sequence[str], seconds: float) -> Outcomes:
    """How the peer `name` fared on each kind of case within so many seconds."""
    command = [sys.executable, "-m", "cupyattn.bench.trial", name, *kinds]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            left = f"its process ended with status {process.wait(max(0.0, seconds))}"
        except subprocess.TimeoutExpired:
            left = f"was not compiled in {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    result: Outcomes = {kind: {"": left} for kind in kinds}
    for line in said.decode().splitlines():
        with contextlib.suppress(ValueError):  # the last line may be half a line
            kind, backend, fault = json.loads(line)
            result[kind][backend] = fault
    return result


def outcomes(name: str, kinds: Sequence[str], arrays: Arrays) -> Iterator[tuple[str, str, str]]:
    """(kind, backend, "" or what went wrong) of each backend, after its first call."""
    for kind in kinds:
        case = _small(next(case for case in CASES if case.kind == kind))
        try:
            offered = peers.candidates(name, case, make_inputs(case, arrays))
        except Exception as error:
            yield kind, "", describe(error)
            continue
        for candidate in offered:
            fault = ""
            try:
                candidate.output(candidate.call())
                arrays.wait()
            except Exception as error:
                fault = describe(error)
            yield kind, candidate.variant, fault


def _small(case: Case) -> Case:
    """A case that compiles the same and takes little memory."""
    q_len = _TOKENS if case.kind == "prefill" else min(case.q_len, _TOKENS)
    return replace(case, requests=1, q_len=q_len, kv_len=_TOKENS)


def main(argv: Sequence[str]) -> int:
    """The process. Compilers may print, so what was stdout is kept for the outcomes alone."""
    name, *kinds = argv
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for outcome in outcomes(name, kinds, Arrays("cupy", Device("cuda", 0), seed=0)):
        print(json.dumps(outcome), file=pipe, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

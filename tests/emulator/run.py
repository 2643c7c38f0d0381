"""Runs calls on the emulated GPU: a case in, NumPy answers out, compared with the reference.

    run.single(case).check()    # through cupyattn's functions of one request
    run.batch(case).check()     # through its wrappers

Inputs are read-only and set into poison (helpers/poison.py); a failure prints the first wrong
coordinate. By hand, for one case of the GPU suite:

    PYTHONPATH=.:tests python -m emulator.run "causal, prefill"
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers import batch_calls, batch_cases, gpu_cases, single_calls
from helpers.calls import Call, run_and_check
from helpers.cases import Case

from . import gpu as gpus
from .gpu import EmulatedGpu, Launched


@dataclass
class Answer:
    """A call that has run, what it answered, and the launches it took."""

    call: Call
    out: np.ndarray
    lse: np.ndarray | None
    launches: list[Launched]
    seconds: float

    def check(self) -> None:
        """Fail unless the output is as good as the low-precision model, and nothing else moved."""
        is_hoppers = any(launch.name == "prefill_sm90" for launch in self.launches)
        self.call.check(self.out, self.lse, may_be_hoppers=is_hoppers)

    def bits(self) -> list[np.ndarray]:
        """out, and lse if there is one, as integers."""
        return [x.view(f"u{x.dtype.itemsize}") for x in (self.out, self.lse) if x is not None]


def _run(call: Call, arrays: Iterable[Any], gpu: EmulatedGpu) -> Answer:
    """Make the call on inputs that it may only read."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    start = time.perf_counter()
    answer = call.run()
    return Answer(call, *answer, gpu.launches, time.perf_counter() - start)


def single(
    case: Case, *, is_decode: bool = False, spoil: dict[str, Any] | None = None, **facts: Any
) -> Answer:
    """One request through `single_prefill_with_kv_cache`, or `single_decode_with_kv_cache`.

    spoil: input -> [(index, value)] to set first. facts: of the EmulatedGpu.
    """
    with gpus.plugged_in(**facts) as gpu:
        call = single_calls.Call(case, np, is_decode=is_decode)
        for name, changes in (spoil or {}).items():
            for index, value in changes:
                call.inputs[name][index] = value
                call.arrays[name][index] = value
        return _run(call, call.arrays.values(), gpu)


def small(case: Case, qo_len: int = 70, kv_len: int = 150) -> Case:
    """The case with lengths that take well under a second."""
    shorter = replace(case, qo_len=min(case.qo_len, qo_len), kv_len=min(case.kv_len, kv_len))
    return replace(shorter, num_kv_heads=min(case.num_kv_heads, 2))


def batch(case: batch_cases.Case, spoil: Sequence[batch_calls.Spoilt] = (), **facts: Any) -> Answer:
    """A batch through its wrapper, with these values in its keys."""
    facts.setdefault("num_sms", 16)
    with gpus.plugged_in(**facts) as gpu:
        workspace = gpu.empty((16 << 20,), np.dtype(np.uint8))
        call = batch_calls.Call(case, np, workspace, spoil)
        call.plan()
        cache = call.cache if type(call.cache) is tuple else [call.cache]
        return _run(call, (call.device_q, *cache), gpu)


def emulate(
    make: Callable[[Any], Any], workspace_bytes: int = 16 << 20, **facts: Any
) -> EmulatedGpu:
    """Run and check make(workspace) on an EmulatedGpu of these facts."""
    facts.setdefault("num_sms", 16)
    with gpus.plugged_in(**facts) as gpu:
        call = make(gpu.empty((workspace_bytes,), np.dtype(np.uint8)))
        run_and_check(call, lambda: gpu.has_launched("prefill_sm90"))
    return gpu


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one case of the GPU suite on the host.")
    parser.add_argument(
        "name", choices=[*gpu_cases.ALONE], metavar="name", help="of gpu_cases.ALONE"
    )
    parser.add_argument("--mode", default="checked", help="of build.MODES; debug for gdb")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    answer = single(small(gpu_cases.ALONE[chosen.name]), mode=chosen.mode, seed=chosen.seed)
    print(f"{answer.seconds:.2f} s", *answer.launches, sep="\n")
    answer.check()
    print("as good as the low-precision model")


if __name__ == "__main__":
    main()

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers import batch_calls, batch_cases, gpu_cases
from helpers.cases import Case
from helpers.gpu_calls import Call

from . import gpu as gpus
from .gpu import Launched

# (request, "k" or "v", index, value)
Spoilt = tuple[int, str, Any, float]


@dataclass
class Answer:
    """A call that has run, and the launches it took."""

    call: Call
    launches: list[Launched]
    seconds: float

    def check(self) -> None:
        """Fail unless the output is as good as the low-precision model, and nothing else moved."""
        self.call.check(may_be_hoppers=_is_hoppers(self.launches))

    def bits(self) -> list[np.ndarray]:
        """out, and lse if there is one, as integers."""
        return [x.view(f"u{x.dtype.itemsize}") for x in self.call.answers()]


def single(
    case: Case, *, is_decode: bool = False, spoil: dict[str, Any] | None = None, **facts: Any
) -> Answer:
    """One request through `single_prefill_with_kv_cache`, or `single_decode_with_kv_cache`.

    spoil: input -> [(index, value)] to set first. facts: of the EmulatedGpu.
    """
    with gpus.plugged_in(**facts) as gpu:
        call = Call.prepare(case, np)
        for name, changes in (spoil or {}).items():
            for index, value in changes:
                call.inputs[name][index] = value
                call.arrays[name][index] = value
        for array in call.arrays.values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        start = time.perf_counter()
        call.run(is_decode=is_decode)
        return Answer(call, gpu.launches, time.perf_counter() - start)


def _is_hoppers(launches: Sequence[Launched]) -> bool:
    return any(launch.name == "prefill_sm90" for launch in launches)


def small(case: Case, qo_len: int = 70, kv_len: int = 150) -> Case:
    """The case with lengths that take well under a second."""
    shorter = replace(case, qo_len=min(case.qo_len, qo_len), kv_len=min(case.kv_len, kv_len))
    return replace(shorter, num_kv_heads=min(case.num_kv_heads, 2))


class _BatchCall(batch_calls.Call):
    """A batch with some values of its keys changed before they are placed."""

    def __init__(self, case: batch_cases.Case, spoil: Sequence[Spoilt], workspace: Any) -> None:
        self._spoil = spoil
        super().__init__(case, np, workspace)

    def _place_keys(self) -> None:
        for request, name, index, value in self._spoil:
            self.keys[request]["kv".index(name)][index] = value
        super()._place_keys()


@dataclass
class BatchAnswer:
    """A batch that has run, and the launches it took."""

    call: batch_calls.Call
    out: np.ndarray
    lse: np.ndarray
    launches: list[Launched]

    def check(self) -> None:
        """As Answer.check."""
        self.call.check(self.out, self.lse, may_be_hoppers=_is_hoppers(self.launches))


def batch(case: batch_cases.Case, spoil: Sequence[Spoilt] = (), **facts: Any) -> BatchAnswer:
    """A batch through its wrapper. spoil: (request, "k" or "v", index, value)."""
    facts.setdefault("num_sms", 16)
    with gpus.plugged_in(**facts) as gpu:
        workspace = gpu.empty((16 << 20,), np.dtype(np.uint8))
        call = _BatchCall(case, spoil, workspace)
        for array in (call.device_q, *(call.cache if type(call.cache) is tuple else [call.cache])):
            array.flags.writeable = False
        call.plan()
        out, lse = call.run()
        return BatchAnswer(call, out, lse, gpu.launches)


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

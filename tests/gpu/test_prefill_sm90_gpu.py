"""prefill_sm90 a thousand times over, while other work keeps the GPU's timing moving: whoever
reads too early, or writes too late, does so once in a while."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.prefill_sm90_calls import batch_of, bind, check
from helpers.prefill_sm90_cases import CASES
from helpers.share import some

from cupyattn.core.device import device_props
from cupyattn.launch.driver import enqueue

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

_TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_runs_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("a kernel of sm_90a")
    case = CASES[name]
    b = batch_of(case)
    run = bind(case, b)
    launched: list[int] = []
    real = enqueue.enqueue
    monkeypatch.setattr(
        "cupyattn.launch.attention.bound_run.enqueue",
        lambda launch, *rest: (launched.append(launch.num_items), real(launch, *rest)),
    )
    first = run()
    assert any(launched), "no launch of persistent blocks"
    monkeypatch.undo()
    check(first, b, case.options)
    noise, other = torch.randn(1 << 22, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in range(some(1000)):
        if index % 3 == 0:
            with torch.cuda.stream(other):
                noise[: 1 << (10 + index % 13)].mul_(1.0)
        for x, wanted in zip(run(), first, strict=True):
            bits = torch.int16 if x.element_size() == 2 else torch.int32
            wrong += (x.view(bits) != wanted.view(bits)).any()
    assert int(wrong) == 0


@pytest.mark.parametrize("is_lazy", [False, True])
def test_maxima_are_lazy_on_demand(is_lazy: bool) -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("a kernel of sm_90a")
    names = "ragged", "dim 64", "all keys", "pages of 16", "pages of 1"
    path = os.pathsep.join([str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-m", "helpers.prefill_sm90_calls", *names],
        env=os.environ | {"CUPYATTN_LAZY_MAXIMA": str(int(is_lazy)), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert set(found.stdout.split()) == {str(not is_lazy)}

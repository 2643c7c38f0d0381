"""prefill_sm90 a thousand times over, while other work keeps the GPU's timing moving: whoever
reads too early, or writes too late, does so once in a while."""

from __future__ import annotations

import pytest
from helpers.on_gpu import workspace
from helpers.prefill_sm90_calls import CASES, Call
from helpers.share import some

from cupyattn.core.device import device_props
from cupyattn.launch.driver import enqueue

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_runs_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("a kernel of sm_90a")
    call = Call(CASES[name], torch, workspace(torch))
    launched: list[int] = []
    real = enqueue.enqueue
    monkeypatch.setattr(
        "cupyattn.launch.attention.bound_run.enqueue",
        lambda launch, *rest: (launched.append(launch.num_items), real(launch, *rest)),
    )
    call.start()
    first = call.returned
    assert any(launched), "no launch of persistent blocks"
    monkeypatch.undo()
    call.check(*call.answers())
    noise, other = torch.randn(1 << 22, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in range(some(1000)):
        if index % 3 == 0:
            with torch.cuda.stream(other):
                noise[: 1 << (10 + index % 13)].mul_(1.0)
        call.start()
        for x, wanted in zip(call.returned, first, strict=True):
            bits = torch.int16 if x.element_size() == 2 else torch.int32
            wrong += (x.view(bits) != wanted.view(bits)).any()
    assert int(wrong) == 0

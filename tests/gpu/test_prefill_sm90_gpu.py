"""prefill_sm90 a thousand times over, while other work keeps the GPU's timing moving: whoever
reads too early, or writes too late, does so once in a while."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.on_gpu import workspace
from helpers.prefill_sm90_calls import CASES, SHORT, Call, Case
from helpers.share import some

from cupyattn.bench.tiles.plans import planned
from cupyattn.choose import candidates
from cupyattn.core.device import device_props
from cupyattn.launch.driver import enqueue
from cupyattn.launch.tiles import prefill_sm90

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


# Causal prompts, encoders, and rows of one sequence over the keys of another; the second of more
# items than blocks that run at a time.
TILED = {
    "prompts": Case(SHORT, SHORT, options={"causal": True}),
    "encoders": Case((197,) * 40, (197,) * 40, num_kv_heads=8),
    "cross": Case((224,) * 6, (900,) * 6, num_kv_heads=8),
    "few keys": Case((700, 64), (77, 33)),
}


@pytest.mark.parametrize("case", TILED.values(), ids=TILED)
@pytest.mark.parametrize(
    ("name", "dims"),
    [(name, dims) for name, keys, *dims in prefill_sm90._NAMED if keys == "ragged"],
)
def test_every_tile_by_force(name: str, dims: list[int], case: Case) -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("a kernel of sm_90a")
    with candidates.only(name):
        call = Call(replace(case, dim=dims[0], dim_vo=dims[1]), torch, workspace(torch))
        call.start()
        built = planned(call.wrapper)
    assert built is not None and built.schedule.candidate == name
    call.check(*call.answers())

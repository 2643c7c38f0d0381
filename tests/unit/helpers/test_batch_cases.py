"""The generator of random batches, tried on the CPU: what it poisons stays, what it covers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers import fake_batch, fake_gpu
from helpers.batch_calls import Call, planned
from helpers.batch_cases import NUM_CASES, PROBLEMS, random_case
from helpers.batches import WORKSPACE
from helpers.calls import run_and_check
from helpers.share import one_of

from cupyattn.choose.candidates import only_form
from cupyattn.launch.tiles.forms import AS_THEY_ARE


@pytest.mark.parametrize("first", one_of(2, range(0, 80, 20)))
def test_random_batches_on_the_cpu(first: int) -> None:
    for seed in range(first, first + 20):
        run_and_check(planned(random_case(seed), np, WORKSPACE))


def test_a_wrong_page_is_found() -> None:
    case = next(
        c
        for c in map(random_case, range(NUM_CASES))
        if c.wrapper == "decode" and len(c.kv_len) > 2 and min(c.kv_len) > 64 and c.window_left < 0
    )
    call = Call(case, np, WORKSPACE)
    call.table[1] = call.table[2] if case.page_size < 65 else call.table[0]
    call.plan()
    with pytest.raises(AssertionError):
        call.check(*call.run())


def test_cases_repeat_and_cover() -> None:
    assert NUM_CASES >= 2000
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    assert cases[7] == random_case(7)
    for field, least in {
        "wrapper": 3, "page_size": 10, "kv_layout": 2, "causal": 2, "window_left": 5,
        "has_sinks": 2, "is_pair": 2, "is_packed": 2, "ids_on_device": 2, "table_dtype": 2,
        "split": 6, "group": 6, "scale_v": 3, "with_out": 2,
    }.items():  # fmt: skip
        counts = Counter(getattr(case, field) for case in cases)
        assert len(counts) >= least and min(counts.values()) >= 20, (field, counts)
    assert {case.problem for case in cases} == set(PROBLEMS)
    assert sum(not case.qo_len for case in cases) > 20  # no requests
    assert sum(bool(case.kv_len) and not any(case.kv_len) for case in cases) > 20
    assert sum(max(case.kv_len, default=0) > 1000 for case in cases) > 200


@pytest.mark.parametrize("first", one_of(5, range(100, 500, 40)))
def test_random_batches_through_the_launcher(
    first: int, stream: fake_batch.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU that is not there: what launches are told is what the kernels would compute."""
    torch = pytest.importorskip("torch")
    make = fake_gpu.maker("torch", monkeypatch)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    monkeypatch.setattr(stream, "add", lambda job: job() or 0)
    workspace = make(64 << 20, dtype="uint8")
    with only_form(AS_THEY_ARE):  # keys that are widened ahead are a kernel's work
        for seed in range(first, first + 40):
            run_and_check(planned(random_case(seed), torch, workspace))
    assert stream.launches > 20

"""Every field of AttentionSpec is set by a shared test case, so a new option needs a case."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import (
    batch_calls,
    batch_cases,
    fake_batch,
    fake_gpu,
    gpu_cases,
    item_cases,
    key_shares,
    logits_calls,
    mla_calls,
    planless_calls,
    precompile,
    skip_cases,
)
from helpers.batches import WORKSPACE
from helpers.patching import replace

import cupyattn
from cupyattn.core.spec import AttentionSpec
from cupyattn.engine.spec import make_spec

FIELDS = dataclasses.fields(AttentionSpec)


@pytest.fixture(scope="module")
def specs() -> list[AttentionSpec]:
    """The specs of the listed single requests, and of some random batches."""
    found = []

    def recorder(*args: Any, **named: Any) -> AttentionSpec:
        found.append(make_spec(*args, **named))
        return found[-1]

    fake_gpu.forget()
    fake_batch.forget()
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, make_spec, recorder)
        precompile.instances(
            [partial(precompile.single, x) for x in gpu_cases.ALONE.values()], "sm_90a"
        )
        logits_calls.Single("everything", 3, 5).run()
        for cases in (batch_cases, item_cases):
            for seed in range(40):
                batch_calls.Call(cases.random_case(seed), np, WORKSPACE).plan()
        for seed in range(96, 100):
            planless_calls.Call(planless_calls.random_case(seed), np, WORKSPACE).run()
        for seed in range(22):
            mla_calls.Call(mla_calls.random_case(seed), np, WORKSPACE).run()
        x = np.ones((2, 1, 8), np.float16)
        cupyattn.single_prefill_with_kv_cache(x, x, x, **{skip_cases.NAME: 1.0})
        key_shares.merged(key_shares.random_case(0), np.asarray, np.asarray, WORKSPACE)
    return found


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_case_sets_the_field(field: Any, specs: list[AttentionSpec]) -> None:
    values = {getattr(spec, field.name) for spec in specs}
    least = 2 if field.default is dataclasses.MISSING else 1
    assert len(values - {field.default}) >= least, (
        f"{field.name} is {values} in all cases: add one to tests/helpers/cases.py"
    )

"""Products of 8 bits compile without spills, whatever their tile serves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.tiles import prefill_sm90

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

E4M3 = dtypes.float8_e4m3fn
PLAIN = AttentionProblem(E4M3, E4M3, dtypes.bfloat16, 128, 128)
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
# Head dims, where keys are, row scales, and what is stored.
SERVED = [
    replace(AttentionProblem(E4M3, E4M3, dtype, *dims), **where, prescale_logits=scales)
    for dims, where, scales, dtype in product(
        DIMS,
        ({}, {"paged": True}, {"paged": True, "own_value_pages": True}),
        (False, True),
        (dtypes.bfloat16, dtypes.float16, dtypes.float32),
    )
]


@pytest.mark.parametrize(
    "problem",
    SERVED,
    ids=lambda x: f"{x.head_dim_qk}-{x.head_dim_vo}-{x.paged}-{x.prescale_logits}-{x.dtype_o}",
)
def test_registers_hold_all(problem: AttentionProblem) -> None:
    tile = prefill_sm90.find(problem, 16 if problem.paged else 0)
    assert not isinstance(tile, str), tile
    built = jit.build("prefill_sm90", prefill_sm90.make(problem, tile.shape).config, "sm_90a")
    report = built.info.ptxas
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (0, 0, 0)
    assert not report.warnings


REFUSED = {
    "int8": replace(PLAIN, dtype_q=dtypes.int8),
    "head dims 80": replace(PLAIN, head_dim_qk=80, head_dim_vo=80),
    "mask": replace(PLAIN, custom_mask=True, mask_form="whole"),
    "16-byte": replace(PLAIN, aligned=False),
    "share": replace(PLAIN, key_share=True),
    "box": replace(PLAIN, paged=True),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_was_not_compiled_is_refused(word: str) -> None:
    problem = REFUSED[word]
    refusal = prefill_sm90.find(problem, 3 if problem.paged else 0)
    assert isinstance(refusal, str) and word in refusal

"""cuDNN through torch SDPA over ragged batches of equal requests, which are one dense batch."""

from __future__ import annotations

from dataclasses import replace

from ..candidate import Candidate, Unsupported
from ..inputs import Inputs
from ..peers import _sdpa
from .case import BatchCase
from .inputs import BatchInputs


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One batched call."""
    if len({(q_len, kv_len) for _, q_len, kv_len in case.requests}) > 1:
        raise Unsupported("SDPA's cuDNN backend takes requests of one length")
    one = replace(case.request(0), batch=case.batch)
    dense = Inputs(*(x.view(case.batch, -1, *x.shape[1:]) for x in (inputs.q, inputs.k, inputs.v)))
    result = _sdpa.candidates("sdpa_cudnn", "CUDNN_ATTENTION", one, dense)
    for candidate in result:
        rows = candidate.output
        candidate.output = lambda answer, rows=rows: rows(answer).flatten(0, 1)[None]  # type: ignore[misc]
    return result

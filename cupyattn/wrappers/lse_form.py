"""The LSE of a run in another form than kernels write, which is [rows, heads] in base 2."""

from __future__ import annotations

import math
from typing import Any

from .. import array
from ..array.match import Dims, match
from ..core import dtypes, parse
from ..engine.run_batch import Scales, run
from ..engine.wrapper import BatchWrapper


def run_in_form(
    form: tuple[Any, Any],
    wrapper: BatchWrapper,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sinks: Any,
    scales: Scales,
    return_lse: bool,
    gate: Any,
) -> Any:
    """batch.run.run with an LSE, given and returned, in the form (lse_base, lse_layout).

    lse_base: "log2" or "ln". lse_layout: "NH" is [rows, num_qo_heads], "HN" [num_qo_heads, rows].
    Kernels write either layout; natural logarithms take one more pass over the LSE.
    """
    base = parse.choice(form[0], ("log2", "ln"), "lse_base")
    layout = parse.choice(form[1], ("NH", "HN"), "lse_layout")
    return_lse = parse.flag(return_lse, "return_lse")
    if lse is None and not return_lse:
        return run(wrapper, q, k, v, out, None, sinks, scales, False, gate=gate)
    plan, vq = wrapper._require_plan(), array.view(q, "q")
    rows, heads = plan.batch.num_rows, plan.geometry.spec.num_qo_heads
    if lse is None:
        shape = (rows, heads) if layout == "NH" else (heads, rows)
        lse = array.empty(shape, dtypes.float32, vq)
    view, written = array.view(lse, "lse"), lse
    if layout == "HN":
        match(view, "num_qo_heads rows", Dims(num_qo_heads=heads, rows=rows), "lse")
        written = array.restride(lse, "lse", (rows, heads), tuple(view.strides[::-1]))
    out = run(wrapper, q, k, v, out, written, sinks, scales, False, gate=gate)
    if base == "ln":
        array.scaled(lse, math.log(2.0))
    return (out, array.deliver(lse, vq)) if return_lse else out

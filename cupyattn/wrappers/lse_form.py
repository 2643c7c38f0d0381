"""The LSE of a run in another form than kernels write, which is [rows, heads] in base 2."""

from __future__ import annotations

import math
from typing import Any

from .. import array
from ..array.match import Dims, match
from ..core import dtypes, parse
from ..engine.run_batch import RunOptions, run
from ..engine.wrapper import BatchWrapper
from ..errors import UnsupportedError


def run_in_form(
    wrapper: BatchWrapper,
    *,
    q: Any,
    lse: Any,
    options: RunOptions,
    logits_params: Any,
    rel_logits: Any,
    lse_base: Any,
    lse_layout: Any,
    **arrays: Any,
) -> Any:
    """engine.run_batch.run with an LSE, given and returned, in this form.

    lse_base: "log2" or "ln". lse_layout: "NH" is [rows, num_qo_heads], "HN" [num_qo_heads, rows].
    Kernels write either layout; natural logarithms take one more pass over the LSE.
    """
    for name, x in (("logits_params", logits_params), ("rel_logits", rel_logits)):
        if x is not None:
            raise UnsupportedError(
                f"{name}: is not supported beside lse_base and lse_layout; pass it to plan()"
            )
    base = parse.choice(lse_base, ("log2", "ln"), "lse_base")
    layout = parse.choice(lse_layout, ("NH", "HN"), "lse_layout")
    return_lse = parse.flag(options.return_lse, "return_lse")
    options = options._replace(return_lse=False)
    if lse is None and not return_lse:
        return run(wrapper, q=q, options=options, **arrays)
    plan, vq = wrapper._require_plan(), array.view(q, "q")
    rows, heads = plan.batch.num_rows, plan.geometry.spec.num_qo_heads
    if lse is None:
        shape = (rows, heads) if layout == "NH" else (heads, rows)
        lse = array.empty(shape, dtypes.float32, vq)
    view, written = array.view(lse, "lse"), lse
    if layout == "HN":
        match(view, "num_qo_heads rows", Dims(num_qo_heads=heads, rows=rows), "lse")
        written = array.restride(lse, "lse", (rows, heads), tuple(view.strides[::-1]))
    out = run(wrapper, q=q, lse=written, options=options, **arrays)
    if base == "ln":
        array.scaled(lse, math.log(2.0))
    return (out, array.deliver(lse, vq)) if return_lse else out

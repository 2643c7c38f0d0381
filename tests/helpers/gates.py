"""Gates of the output on top of calls of any kind: drawn with the call, and asked of its answer."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from . import batch_calls, batch_cases, cascade_calls, gpu_cases, single_calls
from .calls import Call, States
from .cases import element_strides, pick
from .plain_answers import sigmoid as sigmoid

SomeCall = TypeVar("SomeCall", bound=Call)
# A gate for each head, or for each element; in the type of q, or in float32.
KINDS = ("heads", "elements", "float32 heads", "float32 elements")
# The ways in which random calls are made, and how many calls there are.
WAYS, NUM_CASES = ("classed", "batch", "split", "cascade", "decode", "batch", "classed"), 84
_STRIDES = ("packed", "packed", "padded", "unaligned", "swapped")


def drawn(call: Call, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Gates [rows, heads] or [rows, heads, head_dim], a few of them closed or open."""
    shape = call.owned["out"].array.shape
    shape = shape if kind.endswith("elements") else shape[:-1]
    gate = (3.0 * rng.standard_normal(shape)).astype(np.float32)
    gate[rng.random(shape) < 0.02] = -np.inf
    gate[rng.random(shape) < 0.02] = np.inf
    return gate if kind.startswith("float32") else gate.astype(call.q.dtype)


def gated(call: SomeCall, kind: str, *, is_row: bool = False, strides: str = "") -> SomeCall:
    """The call with gates, among poison, of any strides.

    is_row: the call is of one row, and its gates have no axis of rows.
    """
    rng = np.random.default_rng((call.case.seed, 91))
    gate = drawn(call, kind, rng)
    way = strides or pick(rng, _STRIDES)
    steps = element_strides(way, (*gate.shape, 1)[:3])[: gate.ndim]
    if gate.ndim == 2 and way == "packed":
        steps = None
    placed = call.embed("output_gate", gate, steps)
    names = "given", "extras", "arrays"
    arrays = next(getattr(call, name) for name in names if hasattr(call, name))
    arrays["output_gate"] = placed[0] if is_row else placed
    plain = call.expected

    def expected() -> tuple[States, States]:
        (ref, *ref_lse), (low, *low_lse) = plain()
        with np.errstate(invalid="ignore"):
            factors = sigmoid(gate)
            exact = ref * factors
            rounded = (low.astype(np.float32) * factors.astype(np.float32)).astype(low.dtype)
        return [exact, *ref_lse], [rounded, *low_lse]

    call.expected = expected  # type: ignore[method-assign]
    return call


def random_call(seed: int, xp: ModuleType, workspace: Any) -> Call:
    """A random call, with gates: of one request, of few rows, of a planned batch or a cascade."""
    way, kind = seed % len(WAYS), of_kind(seed // len(WAYS))
    call: Call
    if WAYS[way] == "batch":
        call = batch_calls.planned(batch_cases.random_case(seed), xp, workspace)
    elif WAYS[way] == "cascade":
        call = cascade_calls.planned(cascade_calls.random_case(seed), xp, workspace)
    else:
        case = getattr(gpu_cases, WAYS[way])(seed)
        is_decode = WAYS[way] == "decode"
        call = single_calls.Call(case, xp, is_decode=is_decode)
        return gated(call, kind, is_row=is_decode)
    return gated(call, kind)


def of_kind(seed: int) -> str:
    return KINDS[seed % len(KINDS)]

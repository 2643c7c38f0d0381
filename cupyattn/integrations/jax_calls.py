"""Public calls as functions of JAX's tracers, made from the table of torch's operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..core.recording import spoil
from ..errors import UnsupportedError
from .torch_calls import CALLS, Call

# XLA's answer to (name, arrays, constants, outputs).
Made = Callable[[str, dict[str, Any], dict[str, Any], list[tuple[Any, Any]]], Any]
TABLE = {call.name: call for call in CALLS if call.name != "dot_product_attention"}
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_TEXT = """`cupyattn.{path}` of JAX arrays or tracers.

    Arrays may be traced; everything else is a constant of the compiled function. out, lse and
    workspaces must be None: JAX arrays cannot be written, and workspaces are memory of the call.
    Returns as that function does. Errors and vmap as in `dot_product_attention` here.
    """


def function(name: str, make: Made) -> Any:
    """The function of a public call of TABLE."""
    call = TABLE[name]
    signature = inspect.signature(call.function)
    kinds, aliases, shown = _kinds(call), dict(call.aliases), signature.parameters

    def traced(*args: Any, **kwargs: Any) -> Any:
        # A signature need not show all synonyms.
        named = {n if n in shown else aliases.get(n, n): x for n, x in kwargs.items()}
        bound = signature.bind(*args, **named)
        given, wants_lse = _arguments(call, bound.arguments)
        arrays: dict[str, Any] = {}
        constants = {}
        for argument, x in given.items():
            if not kinds[argument].startswith("Tensor"):
                constants[argument] = x
            elif isinstance(x, (tuple, list)):
                arrays.update({f"{argument} {place}": part for place, part in enumerate(x)})
            else:
                arrays[argument] = x
        shape, lse_shape = call.shapes(given)
        dtype = next(iter(given.values())).dtype
        outputs = [(shape, "bfloat16" if str(dtype) in _FP8 else dtype)]
        if wants_lse:
            outputs.append((lse_shape, "float32"))
        made = make(name, arrays, constants, outputs)
        return (made[0], made[1]) if wants_lse else made[0]

    traced.__name__ = traced.__qualname__ = name
    traced.__doc__ = _TEXT.format(path=f"{call.module}.{name}")
    vars(traced)["__signature__"] = signature
    return traced


def _kinds(call: Call) -> dict[str, str]:
    """Argument -> its type in the schema."""
    found = (x.partition("=")[0].rpartition(" ") for x in call.schema.split(", "))
    return {name: kind for kind, _, name in found}


def _arguments(call: Call, bound: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """What the call is made with, and whether it returns the LSE."""
    parameters, names, aliases = call.parameters, call.arguments, dict(call.aliases)
    given = {name: parameters.get(name) for name in names}
    wants_lse = False
    for name, x in bound.items():
        own = aliases.get(name, name)
        if own == call.flag:
            wants_lse = wants_lse or bool(x)
        elif x is None or own in call.ignored:
            continue
        elif own in ("out", "lse", "workspace_buffer"):
            raise UnsupportedError(f"{own}: JAX arrays cannot be written; pass None")
        elif own in names:
            given[own] = x
        elif x != parameters.get(name):
            raise UnsupportedError(
                f"{name}: {call.name} does not take it inside jax.jit; leave it out, or make the "
                "call outside"
            )
    if call.appends and given[call.appends] is not None:
        raise UnsupportedError(
            f"{call.appends}: JAX arrays cannot be written; append by append_paged_kv_cache first"
        )
    return {name: x for name, x in given.items() if name != "workspace_buffer"}, wants_lse


def run(name: str, arrays: dict[str, Any], constants: dict[str, Any], outputs: list[Any]) -> None:
    """The call, when XLA runs it."""
    call = TABLE[name]
    out, *more = outputs
    named: dict[str, Any] = {}
    for argument, x in arrays.items():
        name, _, place = argument.partition(" ")
        named[name] = (*named.get(name, ()), x) if place else x
    if "workspace_buffer" in call.parameters:
        named["workspace_buffer"] = None
    if more and "lse" in call.parameters:
        named["lse"] = more[0]
    elif more:
        spoil()
    answer = call.function(**named, **constants, out=out, **{call.flag: bool(more)})
    if more and "lse" not in named:
        more[0][...] = answer[1]

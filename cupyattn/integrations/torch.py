"""torch: importing this module makes torch.ops.cupyattn.*, and torch.compile put our calls into its
graphs as such operators, where it would break the graph at each of them.

Operators work on CPU and CUDA tensors, FakeTensors and dynamic shapes; CUDA graphs can capture
them. There is no backward pass: tensors that require grad are refused where grad is enabled.

Many calls have an operator of their own, with the call's arguments in its order. It has four forms,
by what it returns and writes: `default` returns the output, `lse` the output and its LSE, `out`
writes its last argument, and `out_lse` does so and returns the LSE. A call that appends to a cache
has each form once more, behind `append`, which writes the cache. All other calls, and arguments
that those operators do not take, share

    torch.ops.cupyattn.call(function, wrapper, names, read, written, ints, floats, words)

which names the call and its arguments, so that a graph needs nothing else. What the call
returns is made by the graph and written by the operator.

Examples: :doc:`/docs/integrations/torch`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from ..core import tracing
from ..core.packages import needs
from ..errors import ArgumentError, PlanError, UnsupportedError
from .calls import (
    CALLS,
    FLAGS,
    IGNORED,
    OUTPUTS,
    Call,
    NewArray,
    is_default,
    joined,
    leaves,
    positional,
)

# Wrappers whose runs are in a graph, by id. A graph is guarded by that id, and dropped with them.
wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Older Dynamo keeps no object of a user with its graph, which run() needs for its wrapper.
RUNS_SINCE = (2, 13)
# `names` are those of `read`, `written`, `ints`, `floats` and `words`, see calls.leaves; those of
# results begin with _RETURN. A word is a string, None or a bool in Python's spelling, or a dtype.
_RETURN = "return"
_CALL = (
    "call(str function, int wrapper, str[] names, Tensor[] read, Tensor(a!)[] written, SymInt[] "
    "ints, float[] floats, str[] words) -> ()"
)
_BY_PATH = {call.path: call for call in CALLS}
_libraries: list[Any] = []


@needs("torch")
def register() -> None:
    """Make the operators. Importing the module does it; a second time changes nothing."""
    import torch

    if _libraries:
        return
    library = torch.library.Library("cupyattn", "FRAGMENT")
    _libraries.append(library)
    _define(library, "call", _CALL.removeprefix("call"), _run, _fake_run)
    for call in CALLS:
        for form, schema in call.forms.items():
            name = f"{call.operator}.{form}" if form else call.operator
            _define(library, name, schema, _operator(call, form), _fake(call, form))
        if call.owner is not None:
            _open_method(call)
            continue
        traced = _traced(call)
        _substitute(call.function, _by_position(traced, call.name, call.positional))
        if call.also:
            other = getattr(importlib.import_module(f"cupyattn.{call.also}"), call.name)
            _substitute(other, _without_third(traced, call.name, positional(other)))


def _define(library: Any, name: str, schema: str, function: Any, fake: Any) -> None:
    import torch

    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        library.impl(name, function, device)
    torch.library.register_fake(f"cupyattn::{name}", fake, lib=library)


def _substitute(function: Any, traced: Any) -> None:
    """Let Dynamo trace `traced` where it meets a public call, and export it."""
    import torch

    tracing.TORCH_CALLS[function] = traced
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)


# --- operators of one call ---


def _operator(call: Call, form: str) -> Any:
    """What an operator runs: the public call, by position as far as that has the same order."""
    function, names, flag = call.function, [*call.kinds], call.flag
    is_method = call.owner is not None
    writes_out, wants_lse = "out" in form, form.endswith("lse")
    if writes_out:
        names.append("out")
    returns_many = wants_lse or call.results == 2
    returns_nothing = call.results == 0
    order = call.positional
    if is_method:
        names, order = ["wrapper", *names], ("wrapper", *order)
    count = _count_common(names, order)
    rest = names[count:]
    # A cache comes as a list: of one tensor, or of K and V.
    caches = [at for at, name in enumerate(names) if call.kinds.get(name) == "Tensor[]"]

    def operator(*args: Any, **named: Any) -> Any:
        for at in caches:
            cache = args[at][0] if len(args[at]) == 1 else tuple(args[at])
            args = *args[:at], cache, *args[at + 1 :]
        if len(args) > count:
            named.update(zip(rest, args[count:], strict=False))
            args = args[:count]
        if is_method:
            args = wrappers[args[0]], *args[1:]
        if wants_lse:
            named[flag] = True
        result = function(*args, **named)
        if writes_out:
            return result[1].contiguous() if wants_lse else None
        if returns_nothing:
            return None
        # What a compiled graph was told: rows one after another.
        return tuple(x.contiguous() for x in result) if returns_many else result.contiguous()

    return operator


def _count_common(names: list[str], parameters: tuple[str, ...]) -> int:
    """How many arguments a call takes by position as an operator does."""
    count = 0
    for name, parameter in zip(names, parameters, strict=False):
        if name != parameter:
            break
        count += 1
    return count


def _fake(call: Call, form: str) -> Any:
    names = (*call.kinds, "out") if "out" in form else tuple(call.kinds)
    is_method, flag = call.owner is not None, call.flag
    if is_method:
        names = "wrapper", *names

    def fake(*args: Any, **named: Any) -> Any:
        named.update(zip(names, args, strict=False))
        refuse_grad(named.items())
        arguments = {**call.defaults, **named}
        if form.endswith("lse"):
            arguments[flag] = True
        if is_method:
            arguments["planned"] = planned(wrappers[arguments.pop("wrapper")])
        outputs = [x for _, x in leaves(_RETURN, _filled(call.outputs(arguments), arguments))]
        if "out" in form:
            outputs = outputs[1:]
        return tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None

    return fake


def _filled(outputs: Any, arguments: dict[str, Any]) -> Any:
    """The outputs of a call, with tensors for arrays that it makes."""
    if isinstance(outputs, tuple):
        return tuple(_filled(x, arguments) for x in outputs)
    if not isinstance(outputs, NewArray):
        return outputs
    import torch

    dtype = outputs.dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for x in arguments.values():
        x = x[0] if isinstance(x, (list, tuple)) and len(x) else x
        if isinstance(x, torch.Tensor):
            return x.new_empty(outputs.shape, dtype=dtype)
    raise ArgumentError("got no tensor")


def planned(wrapper: Any) -> tuple[int, str] | None:
    """(columns, dtype) of what a wrapper is planned for; None if it has no plan of this kind."""
    spec = getattr(getattr(getattr(wrapper, "_current", None), "geometry", None), "spec", None)
    if spec is None and hasattr(wrapper, "_current"):
        raise PlanError("run: nothing is planned; call plan() before the compiled function")
    return None if spec is None else (spec.head_dim_vo, spec.dtype_o.name)


# --- what Dynamo traces ---


def _traced(call: Call) -> Callable[..., Any]:
    """The call as Dynamo is to trace it: of its arguments by name, with the id of its wrapper and
    what that is planned for."""
    import torch

    packet = getattr(torch.ops.cupyattn, call.operator) if call.is_operator else None
    operators = {form: getattr(packet, form or "default") for form in call.forms}
    kinds, defaults, appends = call.kinds, call.defaults, call.appends
    own_names = {x: call.own_name(x) for x in (*call.parameters, "page_table", "s_aux")}
    is_method, third = call.owner is not None, "return_attn_probs" in call.parameters
    with_all = _with_all(call)
    # What is enclosed is not guarded by graphs, as globals are at each of their calls.
    flags, ignored, fits, plain, is_same = FLAGS, IGNORED, _fits, _plain, is_default

    def traced(named: dict[str, Any], wrapper: int = 0, planned: Any = None) -> Any:
        if packet is None:
            return with_all(named, wrapper, planned)
        arguments = {name: defaults[name] for name in kinds}
        wants_lse, out = False, None
        for name, x in named.items():
            own = own_names.get(name, name)
            if name in flags:
                wants_lse = wants_lse or bool(x)
            elif name == "out":
                out = x
            elif own in kinds and fits(kinds[own], x):
                # A synonym that is not given leaves the other one.
                if x is not None or own == name:
                    arguments[own] = plain(kinds[own], x)
            elif name not in ignored and not is_same(x, defaults.get(name)):
                return with_all(named, wrapper, planned)
        form = "append" if appends and arguments[appends] is not None else ""
        if out is not None:
            form = form + "_out" if form else "out"
        if wants_lse:
            form = form + "_lse" if form else "lse"
        if form not in operators:
            return with_all(named, wrapper, planned)
        values = [wrapper, *arguments.values()] if is_method else [*arguments.values()]
        if out is not None:
            lse = operators[form](*values, out)
            result = (out, lse) if wants_lse else out
        else:
            result = operators[form](*values)
        if third and named.get("return_attn_probs"):
            return result[0], result[1], result[0].new_empty(0)
        return result

    return traced


def _fits(kind: str, x: Any) -> bool:
    """Whether an operator's argument may be x: arrays are no numbers, and the other way round."""
    import torch

    if x is None or kind == "SymInt":
        return True
    parts = x if isinstance(x, (list, tuple)) and len(x) else [x]
    return isinstance(parts[0], torch.Tensor) == kind.startswith("Tensor")


def _plain(kind: str, x: Any) -> Any:
    """An argument as a schema has it."""
    import torch

    if kind == "SymInt[]" and x is not None:
        sides = [x, x] if isinstance(x, int) else x
        return [-1 if side is None else side for side in sides]
    if kind == "Tensor[]":
        return list(x) if isinstance(x, (list, tuple)) else [x]
    if kind == "SymInt" and isinstance(x, torch.Tensor):
        return None  # a bound in memory, which only speeds up
    return x


def _by_position(traced: Any, name: str, order: tuple[str, ...]) -> Any:
    bind = _named

    def by_position(*args: Any, **kwargs: Any) -> Any:
        return traced(bind(name, order, args, kwargs))

    return by_position


def _without_third(traced: Any, name: str, order: tuple[str, ...]) -> Any:
    """As FlashAttention-3's calls, which return_attn_probs asks for the LSE and no more."""

    bind = _named

    def without_third(*args: Any, **kwargs: Any) -> Any:
        named = bind(name, order, args, kwargs)
        if named.pop("return_attn_probs", False):
            named["return_softmax_lse"] = True
        return traced(named)

    return without_third


def _named(name: str, order: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) > len(order):
        raise unknown(name, "arguments by position")
    return {**dict(zip(order, args)), **kwargs}  # noqa: B905


def _has_runs(run: Any) -> bool:
    """Whether this torch can have runs of wrappers in a graph; where not, run() says so."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) >= RUNS_SINCE:
        return True
    needed = ".".join(map(str, RUNS_SINCE))
    run._torchdynamo_disable_msg = (
        f"run() of a planned wrapper is in graphs from torch {needed} on, and this is torch "
        f"{torch.__version__}; leave fullgraph=True out, update torch, or use a call without a plan"
    )
    return False


def _open_method(call: Call) -> None:
    """Let Dynamo trace a method of a class of wrappers: methods have no substitutes, so the method
    itself asks whether it is traced."""
    import torch

    function = call.function
    if not _has_runs(function):
        return
    traced, name, order = _traced(call), call.name, call.positional
    is_compiling, bind = torch.compiler.is_compiling, _named

    @torch._dynamo.assume_constant_result
    def keep(wrapper: Any) -> Any:
        wrappers[id(wrapper)] = wrapper
        return planned(wrapper)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            # Dynamo guards the graph by this id.
            return traced(bind(name, order, args, kwargs), id(self), keep(self))
        return function(self, *args, **kwargs)

    tracing.traced(method)
    method.outside_of_graphs = function  # type: ignore[attr-defined]
    setattr(call.owner, call.name.rpartition(".")[2], method)


# --- the operator of all calls ---


def _with_all(call: Call) -> Callable[..., Any]:
    """The call with any arguments, as Dynamo is to trace it."""
    import torch

    operator = torch.ops.cupyattn.call.default
    path, name, defaults, outputs = call.path, call.name, call.defaults, call.outputs
    writes, appends = call.writes, call.appends

    def with_all(named: dict[str, Any], wrapper: int, planned: Any) -> Any:
        arguments = {**defaults, **named}
        if planned is not None:
            arguments["planned"] = planned
        result = _filled(outputs(arguments), arguments)
        new = [(at, x) for at, x in leaves(_RETURN, result) if x is not None]
        new = [(at, x) for at, x in new if not any(x is y for y in named.values())]
        written = OUTPUTS if appends and arguments[appends] is None else (*OUTPUTS, *writes)
        groups: dict[str, list[Any]] = {
            x: [] for x in ("read", "written", "ints", "floats", "words")
        }
        for argument, x in named.items():
            for at, leaf in leaves(argument, x):
                group, value = _spelled(name, at, leaf, argument in written)
                groups[group].append((at, value))
        groups["written"] += new
        operator(
            function=path,
            wrapper=wrapper,
            names=[at for group in groups.values() for at, _ in group],
            **{name: [x for _, x in group] for name, group in groups.items()},
        )
        return result

    return with_all


def _spelled(name: str, at: str, x: Any, is_written: bool) -> tuple[str, Any]:
    """The group of the operator's arguments that x belongs to, and x as it stands there."""
    import torch

    if isinstance(x, torch.Tensor):
        return ("written" if is_written else "read"), x
    if x is None or isinstance(x, (bool, str)):
        return "words", repr(x)
    if isinstance(x, (int, torch.SymInt)):
        return "ints", x
    if isinstance(x, float):
        return "floats", x
    if isinstance(x, torch.dtype):
        return "words", str(x)
    raise unknown(f"{name}()", at)


def _run(
    function: str,
    wrapper: int,
    names: list[str],
    read: list[Any],
    written: list[Any],
    ints: list[int],
    floats: list[float],
    words: list[str],
) -> None:
    """Make the call that the arguments spell, and write its results."""
    call = _BY_PATH[function]
    parts = dict(zip(names, [*read, *written, *ints, *floats, *map(_read, words)], strict=True))
    to = {at: parts.pop(at) for at in names if at.partition(".")[0] == _RETURN}
    called = call.function
    if call.owner is not None:
        called = functools.partial(called, wrappers[wrapper])
    result = called(**joined(parts.items()))
    for at, x in leaves(_RETURN, result):
        if at in to:
            to[at].copy_(x)


def _read(word: str) -> Any:
    import torch

    if word.startswith("torch."):
        return getattr(torch, word.removeprefix("torch."))
    return ast.literal_eval(word)


def _fake_run(
    function: str, wrapper: int, names: list[str], read: list[Any], written: list[Any], *_: Any
) -> None:
    refuse_grad(zip(names, [*read, *written], strict=False))


# --- errors ---


def refuse_grad(arguments: Any) -> None:
    """ArgumentError for tensors that ask for a gradient; torch is imported."""
    import torch

    if not torch.is_grad_enabled():
        return
    for name, x in arguments:
        parts = x if isinstance(x, (list, tuple)) else (x,)
        if any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts):
            raise ArgumentError(
                f"{name}: requires grad, and cupyattn has no backward pass; pass {name}.detach() "
                "or call inside torch.no_grad()"
            )


def unknown(call: str, name: str) -> Exception:
    return UnsupportedError(
        f"{name}: {call} does not take it inside torch.compile; leave it out, or make the call "
        "outside of the graph (torch.compiler.disable)"
    )


register()

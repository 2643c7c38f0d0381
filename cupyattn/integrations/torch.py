"""torch: importing this module makes torch.ops.cupyattn.*, and torch.compile put our calls into its
graphs as such operators, where it would break the graph at each of them.

Operators work on CPU and CUDA tensors, FakeTensors and dynamic shapes; CUDA graphs can capture
them. There is no backward pass: tensors that require grad are refused where grad is enabled.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from typing import Any

from .. import decode, page, prefill
from ..core import tracing
from ..core.packages import needs
from . import torch_others
from .torch_calls import (
    APPEND,
    CALLS,
    ONE_FORM,
    RUN,
    Call,
    answer_dtype,
    forms,
    merged_shapes,
    planned_spec,
    refuse_grad,
    unknown,
)

# Wrappers whose runs are in a graph, by id. A graph is guarded by that id, and dropped with them.
wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Older Dynamo keeps no object of a user beside its graph, which run() needs for its wrapper.
RUNS_SINCE = (2, 13)
_libraries: list[Any] = []
_WRAPPERS = (
    decode.BatchDecodeWithPagedKVCacheWrapper,
    prefill.BatchPrefillWithPagedKVCacheWrapper,
    prefill.BatchPrefillWithRaggedKVCacheWrapper,
)


@needs("torch")
def register() -> None:
    """Make the operators. Importing the module does it; a second time changes nothing."""
    import torch

    if _libraries:
        return
    library = torch.library.Library("cupyattn", "FRAGMENT")
    _libraries.append(library)
    library.define(torch_others.SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    _implement(library, "call", functools.partial(torch_others.run, wrappers), torch_others.fake)
    for call in CALLS:
        for form, schema in call.forms.items():
            name = f"{call.name}.{form}" if form else call.name
            library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
            _implement(library, name, _operator(call, form), _fake(call, form))
        _substitute(call.function, _traced(call))
        if call.also:
            other = getattr(importlib.import_module(f"cupyattn.{call.also}"), call.name)
            _substitute(other, _by_name(_traced(call), other))
    for module, schema in ONE_FORM:
        _open_one_form(library, module, schema)
    library.define(APPEND, tags=(torch.Tag.pt2_compliant_tag,))
    _implement(library, "append_paged_kv_cache", _append, _fake_append)
    _substitute(page.append_paged_kv_cache, _traced_append)
    for form, schema in forms(RUN).items():
        name = f"run.{form}" if form else "run"
        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _implement(library, name, _run(form), _fake_run(form))
    for kind in _WRAPPERS:
        _open_run(kind)
    for other in torch_others.OTHERS:
        _open_other(other)


def _implement(library: Any, name: str, function: Any, fake: Any) -> None:
    import torch

    for device in ("CPU", "CUDA"):
        library.impl(name, function, device)
    torch.library.register_fake(f"cupyattn::{name}", fake, lib=library)


def _substitute(function: Any, traced: Any) -> None:
    """Let Dynamo trace `traced` where it meets a public call, and export it."""
    import torch

    tracing.TORCH_CALLS[function] = traced
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)


# --- calls ---


def _operator(call: Call, form: str) -> Any:
    """What an operator runs: the public call, by position as far as that has the same order."""
    function, names = call.function, call.arguments
    writes_out, wants_lse = "out" in form, form.endswith("lse")
    if writes_out:
        names = *names, "out"
    count = _count_common(names, tuple(call.parameters))
    rest, flag = names[count:], call.flag
    # A cache comes as a list: of one tensor, or of K and V.
    at = names.index("kv_cache") if "kv_cache" in names else None

    def operator(*args: Any, **named: Any) -> Any:
        if at is not None:
            cache = args[at]
            args = *args[:at], cache[0] if len(cache) == 1 else tuple(cache), *args[at + 1 :]
        if len(args) > count:
            named.update(zip(rest, args[count:], strict=False))
            args = args[:count]
        if wants_lse:
            named[flag] = True
        answer = function(*args, **named)
        if writes_out:
            return answer[1].contiguous() if wants_lse else None
        # What a compiled graph was told: rows one after another.
        return tuple(x.contiguous() for x in answer) if wants_lse else answer.contiguous()

    return operator


def _count_common(names: tuple[str, ...], parameters: tuple[str, ...]) -> int:
    """How many arguments a call takes by position as an operator does."""
    count = 0
    for name, parameter in zip(names, parameters, strict=False):
        if name != parameter:
            break
        count += 1
    return count


def _fake(call: Call, form: str) -> Any:
    names = call.arguments
    writes_out, wants_lse = "out" in form, form.endswith("lse")
    key = next(name for name in ("key", "k_cache", "k", "kv_cache") if name in names)

    def fake(*args: Any, **named: Any) -> Any:
        import torch

        named.update(zip(names, args, strict=False))
        refuse_grad(named.items())
        shape, lse_shape = call.shapes(named)
        query, cache = named[names[0]], named[key]
        cache = cache[0] if isinstance(cache, (list, tuple)) else cache
        lse = query.new_empty(lse_shape, dtype=torch.float32) if wants_lse else None
        if writes_out:
            return lse
        out = query.new_empty(shape, dtype=answer_dtype(query, cache))
        return (out, lse) if wants_lse else out

    return fake


def _traced(call: Call) -> Any:
    """The public call as Dynamo is to trace it: arguments by name, then the operator."""
    import torch

    packet = getattr(torch.ops.cupyattn, call.name)
    operators = {form: getattr(packet, form or "default") for form in call.forms}
    parameters, names = call.parameters, call.arguments
    order, aliases = tuple(parameters), dict(call.aliases)
    ignored, flag, appends, third = call.ignored, call.flag, call.appends, call.third
    with_all = torch_others.traced(torch_others.of_call(call), call.function, False)
    defaults = {name: parameters.get(name) for name in names}
    if "block_table" in names:
        defaults["block_table"] = None

    def with_third(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(order, args)), **kwargs}  # noqa: B905
        if not named.pop(third, False):
            return traced(**named)
        named[flag] = True
        made, lse = traced(**named)
        return made, lse, made.new_empty(0)

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = dict(defaults)
        wants_lse, out = False, None
        for name, x in [*zip(order, args), *kwargs.items()]:  # noqa: B905
            name = aliases.get(name, name)
            if name == flag:
                wants_lse = wants_lse or x
            elif name == "out":
                out = x
            elif name in defaults:
                # A synonym that is not given leaves the other one.
                if x is not None or name not in given:
                    given[name] = _plain(name, x)
            elif name not in ignored and x is not None and x != parameters.get(name):
                return with_all(*args, **kwargs)
        form = "append" if appends and given[appends] is not None else ""
        if out is not None:
            form = form + "_out" if form else "out"
        if wants_lse:
            form = form + "_lse" if form else "lse"
        values = [given[name] for name in names]
        if out is None:
            return operators[form](*values)
        lse = operators[form](*values, out)
        return (out, lse) if wants_lse else out

    return with_third if third else traced


def _by_name(traced: Any, function: Any) -> Any:
    """What Dynamo is to trace for a function that has another order of arguments."""
    order = tuple(inspect.signature(function).parameters)

    def named(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(order, args)), **kwargs}  # noqa: B905
        if given.pop("return_attn_probs", False):
            given["return_softmax_lse"] = True
        return traced(**given)

    return named


def _plain(name: str, x: Any) -> Any:
    """An argument as a schema has it."""
    if name in ("local_window_size", "window_size") and x is not None:
        if isinstance(x, int):
            return [x, x]
        return [-1 if side is None else side for side in x]
    if name == "kv_cache":
        return list(x) if isinstance(x, (list, tuple)) else [x]
    if name.startswith("max_") and hasattr(x, "shape"):
        return None  # a bound in memory, which only speeds up
    return x


# --- calls with one form ---


def _open_one_form(library: Any, module: str, schema: str) -> None:
    import torch

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    function = getattr(importlib.import_module(f"cupyattn.{module}"), name)

    def fake(*args: Any, **named: Any) -> Any:
        first = args[0] if args else next(iter(named.values()))
        refuse_grad([*enumerate(args), *named.items()])
        shapes = merged_shapes(name, first)
        if shapes is None:
            return None
        return first.new_empty(shapes[0]), first.new_empty(shapes[1], dtype=torch.float32)

    _implement(library, name, function, fake)
    operator = getattr(torch.ops.cupyattn, name).default
    known = {x.name for x in operator._schema.arguments}

    def traced(*args: Any, **named: Any) -> Any:
        for other, x in named.items():
            if other not in known and x is not None:
                raise unknown(name, other)
        return operator(*args, **{n: x for n, x in named.items() if n in known})

    _substitute(function, traced)


# --- pages ---


def _traced_append(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    import torch

    pages = paged_kv_cache if isinstance(paged_kv_cache, (list, tuple)) else [paged_kv_cache]
    torch.ops.cupyattn.append_paged_kv_cache.default(
        append_key,
        append_value,
        batch_indices,
        positions,
        list(pages),
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout,
        k_scale,
        v_scale,
    )


def _append(*args: Any, **named: Any) -> None:
    names = inspect.signature(page.append_paged_kv_cache).parameters
    named.update(zip(names, args, strict=False))
    pages = named["paged_kv_cache"]
    named["paged_kv_cache"] = pages[0] if len(pages) == 1 else tuple(pages)
    page.append_paged_kv_cache(**named)


def _fake_append(append_key: Any, append_value: Any, *args: Any, **named: Any) -> None:
    refuse_grad((("append_key", append_key), ("append_value", append_value)))


# --- runs of wrappers ---

_NAMED = tuple(x.partition("=")[0].rpartition(" ")[2] for x in RUN.split(", "))


def _run(form: str) -> Any:
    writes_out, wants_lse = "out" in form, form.endswith("lse")
    names = (*_NAMED, "out") if writes_out else _NAMED

    def run(*args: Any, **named: Any) -> Any:
        named.update(zip(names, args, strict=False))
        given = {name: x for name, x in named.items() if x is not None}
        wrapper, q, pages = wrappers[given.pop("wrapper")], given.pop("q"), given.pop("kv_cache")
        arrays = pages
        if not isinstance(wrapper, prefill.BatchPrefillWithRaggedKVCacheWrapper):
            arrays = pages[:1] if len(pages) == 1 else [tuple(pages)]
        answer = _eager_run(wrapper)(q, *arrays, return_lse=wants_lse, **given)
        if writes_out:
            return answer[1] if wants_lse else None
        return answer

    return run


def _fake_run(form: str) -> Any:
    writes_out, wants_lse = "out" in form, form.endswith("lse")

    def fake(wrapper: int, q: Any, kv_cache: list[Any], *args: Any, **named: Any) -> Any:
        import torch

        refuse_grad((("q", q), ("k, v", kv_cache)))
        spec = planned_spec(wrappers[wrapper])
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32) if wants_lse else None
        if writes_out:
            return lse
        dtype = getattr(torch, spec.dtype_o.name)
        out = q.new_empty((*q.shape[:-1], spec.head_dim_vo), dtype=dtype)
        return (out, lse) if wants_lse else out

    return fake


def _eager_run(wrapper: Any) -> Any:
    run = type(wrapper).run
    return functools.partial(getattr(run, "__wrapped__", run), wrapper)


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


def _open_run(kind: Any) -> None:
    """Let Dynamo trace run() of a class of wrappers: methods have no substitutes, so the method
    itself asks whether it is traced."""
    import torch

    run = kind.run
    if not _has_runs(run):
        return
    packet = torch.ops.cupyattn.run
    operators = {form: getattr(packet, form or "default") for form in forms(RUN)}
    is_compiling = torch.compiler.is_compiling
    is_ragged = kind is prefill.BatchPrefillWithRaggedKVCacheWrapper
    keys = ("k", "v") if is_ragged else ("paged_kv_cache",)
    count = len(keys)
    named = _NAMED[3:]
    ignored = "enable_pdl", "window_left", "skip_softmax_threshold_scale_factor"

    @torch._dynamo.assume_constant_result
    def keep(wrapper: Any) -> int:
        wrappers[id(wrapper)] = wrapper
        return 0

    def traced(self: Any, q: Any, *arrays: Any, **kwargs: Any) -> Any:
        arrays = (*arrays, *(kwargs.pop(x) for x in keys[len(arrays) :] if x in kwargs))
        if len(arrays) != count:
            raise unknown("run()", "scales by position")
        keep(self)
        pages = list(arrays)
        if count == 1:
            pages = list(arrays[0]) if isinstance(arrays[0], (list, tuple)) else pages
        given = dict.fromkeys(named)
        wants_lse, out = False, None
        for name, x in kwargs.items():
            if name == "return_lse":
                wants_lse = x
            elif name == "out":
                out = x
            elif name in given:
                given[name] = x
            elif name not in ignored and x is not None:
                raise unknown("run()", name)
        form = "out" if out is not None else ""
        if wants_lse:
            form = form + "_lse" if form else "lse"
        # Dynamo guards the graph by this id.
        values = [id(self), q, pages, *given.values()]
        if out is None:
            return operators[form](*values)
        lse = operators[form](*values, out)
        return (out, lse) if wants_lse else out

    @functools.wraps(run)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return traced(self, *args, **kwargs)
        return run(self, *args, **kwargs)

    tracing.traced(method)
    kind.run = method


def _open_other(other: torch_others.Other) -> None:
    """Let Dynamo trace a call that has no operator of its own."""
    import torch

    owner, function = torch_others.public(other.path)
    call = torch_others.traced(other, function, owner is not None)
    if owner is None:
        _substitute(function, call)
        return
    if not _has_runs(function):
        return
    is_compiling = torch.compiler.is_compiling

    @torch._dynamo.assume_constant_result
    def keep(wrapper: Any) -> int:
        wrappers[id(wrapper)] = wrapper
        return 0

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            keep(self)
            return call(id(self), *args, **kwargs)
        return function(self, *args, **kwargs)

    tracing.traced(method)
    method.outside_of_graphs = function  # type: ignore[attr-defined]
    setattr(owner, other.path.rpartition(".")[2], method)


register()

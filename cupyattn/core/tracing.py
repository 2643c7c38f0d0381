"""What torch.compile does with our calls: it ends a graph before each, makes the call as it is, and
begins another graph behind it. And what torch.export and JAX's tracing do with them.

Dynamo looks for a mark at every function that it meets, the one that torch.compiler.disable leaves.
Ours is there without torch, which only Dynamo itself knows to be imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .observed import Observed, observed

_PACKAGE = __name__.partition(".")[0]
_REASON = (
    f"{_PACKAGE} launches its kernels itself: torch.compile breaks its graph at the call, which "
    f"fullgraph=True and torch.export do not allow; import {_PACKAGE}.integrations.torch before, "
    "which makes such calls operators of a graph"
)
_T = TypeVar("_T")
# Marked functions of which Dynamo has not been told yet.
_untold: list[Any] = []


class _Mark:
    """True. The mark keeps Dynamo out of the function that it meets, but not out of the frames of
    the call itself, so when it asks it is told to skip those and all below."""

    def __bool__(self) -> bool:
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames.FrameAction.SKIP
            while _untold:
                code = _untold.pop().__code__
                frames.set_code_exec_strategy(code, frames.FrameExecStrategy(skip, skip))
        return True


_MARK = _Mark()


def untraced(function: _T) -> _T:
    """Mark a function that users call. Returns the function itself, or with CUPYATTN_LOG and
    CUPYATTN_DUMP what observes its calls."""
    return mark(observed(function))


def mark(function: _T) -> _T:
    """Tell Dynamo of a function that users call. Returns the function itself."""
    marked: Any = function
    marked._torchdynamo_disable = _MARK
    marked._torchdynamo_disable_msg = _REASON
    _untold.append(marked)
    return function


def traced(function: _T) -> _T:
    """Take the mark from a function that Dynamo may trace. Returns the function itself."""
    for name in ("_torchdynamo_disable", "_torchdynamo_disable_msg"):
        vars(function).pop(name, None)
    return function


class Untraced(Observed):
    """Marks the methods of its subclasses that users call."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            if callable(member) and (name == "__init__" or not name.startswith("_")):
                mark(member)


# --- torch.export ---

# What stands for public functions where torch traces them: integrations.torch, once it is imported.
TORCH_CALLS: dict[Any, Callable[..., Any]] = {}


def is_exporting() -> bool:
    """Whether torch.export runs calls themselves, on arrays without memory: with strict=False, its
    default, nothing is put in their place before."""
    torch = sys.modules.get("torch")
    asks = getattr(getattr(torch, "compiler", None), "is_exporting", None)
    return asks is not None and bool(asks())


def exported(function: Any, arguments: dict[str, Any]) -> Any:
    """The result of a public function while torch exports: that of its operator. `arguments` are by
    name, and may be more than its own."""
    importlib.import_module(f"{_PACKAGE}.integrations.torch")
    parameters = inspect.signature(function).parameters
    own = {
        name: arguments[name] for name, x in parameters.items() if arguments[name] is not x.default
    }
    return TORCH_CALLS[function](**own)


# --- JAX ---

# What takes public calls of JAX's tracers, by name: integrations.jax, once it is imported.
JAX_CALLS: dict[str, Callable[..., Any]] = {}


def of_jax(name: str, arguments: dict[str, Any]) -> Callable[[], Any] | None:
    """The call of this name by JAX_CALLS if an argument is traced by JAX, else None."""
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    if tracer is None or not any(isinstance(x, tracer) for x in arguments.values()):
        return None
    return functools.partial(JAX_CALLS[name], **arguments)

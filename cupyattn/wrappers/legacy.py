"""Older spellings of the batch wrappers' calls, and the order of their positional arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from .. import array
from ..array.match import match_array
from ..core import dtypes, overloads, parse
from ..core.tracing import Untraced
from ..engine import geometry
from ..engine.run_batch import RunOptions
from ..errors import ArgumentError, PlanError, UnsupportedError
from ..typing import ArrayT

_F = TypeVar("_F", bound=Callable[..., Any])

_RENAMED = {"head_dim": "head_dim_qk", "allow_fp16_qk_reduction": "use_fp16_qk_reduction"}
_MASKS = ("bool", "torch.bool", "uint8", "torch.uint8")


class OlderCalls(Untraced):
    """The spellings of run() and forward() that return (out, lse)."""

    run: Callable[..., Any]
    forward: Callable[..., Any]

    @overloads.run_return_lse
    def run_return_lse(self, q: ArrayT, *args: Any, **kwargs: Any) -> tuple[ArrayT, ArrayT]:
        """run() that returns (out, lse)."""
        result: tuple[ArrayT, ArrayT] = self.run(q, *args, **{**kwargs, "return_lse": True})
        return result

    @overloads.forward_return_lse
    def forward_return_lse(self, q: ArrayT, *args: Any, **kwargs: Any) -> tuple[ArrayT, ArrayT]:
        """forward() that returns (out, lse)."""
        result: tuple[ArrayT, ArrayT] = self.forward(q, *args, **{**kwargs, "return_lse": True})
        return result


# Options of plan() that forward() takes, and such of its arguments as mean nothing.
_PLANNED = frozenset(
    (
        *("causal", "pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale"),
        *("rope_scale", "rope_theta"),
    )
)
_MEANINGLESS = frozenset(_RENAMED) | frozenset(_RENAMED.values())


def as_older_run(forward: _F) -> _F:
    """Make a forward() that has only a signature: options of plan() that it is given replace the
    plan's from then on, and all else goes to run(). The next run then schedules anew; in graph mode
    they must be the plan's."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        changes = {name: x for name, x in arguments.items() if name in _PLANNED}
        others = arguments.keys() - _PLANNED - _MEANINGLESS
        with self._turns.planning:
            self._change(**changes)
            return self.run(**{name: arguments[name] for name in others})

    return wrapper  # type: ignore[return-value]


def accepts_old_plans(slot: int) -> Callable[[_F], _F]:
    """Let a prefill plan() be called with old names, and in the order without head_dim_vo.

    `slot` is head_dim_vo's among the positional arguments; the next are the two masks and causal.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old, new in _RENAMED.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"plan() got both {old!r} and {new!r}; they are the same")
                    kwargs[new] = kwargs.pop(old)
            data_type = kwargs.pop("data_type", None)
            if data_type is not None:
                for name in ("q_data_type", "kv_data_type"):
                    kwargs[name] = data_type if kwargs.get(name) is None else kwargs[name]
            rest = args[slot + 1 :]  # args[0] is the wrapper
            if rest and _is_old_order(rest):
                args = (*args[: slot + 1], None, *rest)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def _is_old_order(rest: tuple[Any, ...]) -> bool:
    """True if what stands where head_dim_vo and the masks do can only be two masks and causal."""
    first, second, third = (*rest, None, None)[:3]
    first_dtype, second_dtype = (str(getattr(x, "dtype", "")) for x in (first, second))
    return (
        first_dtype in _MASKS
        or (first is None and second_dtype in ("uint8", "torch.uint8"))
        or isinstance(third, bool)
    )


def read_options(
    args: tuple[Any, ...], named: RunOptions, old_order: tuple[str, ...]
) -> RunOptions:
    """The options of a run whose positional arguments after the arrays are `args`.

    They are `old_order`, up to return_lse, or the three scales of q, k and v.
    """
    count = len(args)
    order: tuple[str, ...] = old_order
    if count == 3 and not isinstance(args[2], bool):
        order = ("q_scale", "k_scale", "v_scale")
    if count > len(order):
        raise TypeError(
            f"run() takes at most {len(order)} positional arguments after its arrays "
            f"({', '.join(order)}), got {count}"
        )
    options = dict(zip(order, args, strict=False))
    for name in ("q_scale", "k_scale", "v_scale"):
        value = getattr(named, name)
        if value is not None and options.get(name) is not None:
            raise TypeError(f"run() got multiple values for {name!r}")
        if value is not None:
            options[name] = value
    return named._replace(**options)


def takes_sinks(jit_args: Any, jit_kwargs: Any) -> bool:
    """Whether FlashInfer's arguments for kernels of the caller's own ask for its variant with
    sinks, which the kernels here have anyway. UnsupportedError for any other."""
    if jit_args is None and jit_kwargs is None:
        return False
    # Names and types of its tensors, of its scalars, and the variant.
    declared = [*jit_args[7:12]] if isinstance(jit_args, (list, tuple)) else []
    if declared[::2] == [["sink"], ["sm_scale"], "AttentionSink"]:
        return True
    raise UnsupportedError(
        f"jit_args: {geometry.REFUSED_SOURCE}. FlashInfer's AttentionSink is recognised; for "
        "others pass None"
    )


def read_sink(args: tuple[Any, ...], q_scale: Any, num_heads: int) -> tuple[Any, Any]:
    """(sinks, scale of the queries) of a run whose positional arguments after the arrays are sink
    and sm_scale, for a plan whose own sm_scale is 1."""
    if len(args) > 2:
        raise TypeError(f"run() takes sink and sm_scale after arrays, got {len(args)}")
    sink, sm_scale = (*args, None, None)[:2]
    if sink is None or sm_scale is None:
        raise ArgumentError(
            f"{'sink' if sink is None else 'sm_scale'}: got None; wanted both sink, float32 "
            "[num_qo_heads], and sm_scale after the arrays; a wrapper without sinks takes none"
        )
    scale = parse.finite(sm_scale, "sm_scale", 1.0)
    shape = getattr(q_scale, "shape", ())
    if isinstance(shape, tuple) and len(shape) == 1 and (shape[0] != 1 or num_heads == 1):
        view = array.view(q_scale, "q_scale")
        match_array(view, "num_qo_heads", dtypes.float32, "q_scale", {"num_qo_heads": num_heads})
        return sink, q_scale * scale
    return sink, scale * parse.finite(q_scale, "q_scale", 1.0)


def check_run(window_left: Any, planned: int, kv_cache_sf: Any) -> None:
    """Check the uncommon arguments of a run."""
    if window_left is not None and parse.window(window_left, "window_left") != planned:
        raise PlanError(
            f"window_left: run() got {window_left} and the plan says {planned}; plan again with "
            "the new window"
        )
    geometry.refuse("4-bit caches are not supported", kv_cache_sf=kv_cache_sf)

"""Older spellings of the batch wrappers' calls, and the order of their positional arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..batch.run import Scales
from ..errors import PlanError, UnsupportedError

_RENAMED = {"head_dim": "head_dim_qk", "allow_fp16_qk_reduction": "use_fp16_qk_reduction"}
_MASKS = ("bool", "torch.bool", "uint8", "torch.uint8")


class OlderCalls:
    """The spellings of run() and forward() that return (out, lse)."""

    run: Callable[..., Any]
    forward: Callable[..., Any]

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """run() that returns (out, lse)."""
        return self.run(*args, **{**kwargs, "return_lse": True})

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """forward() that returns (out, lse)."""
        return self.forward(*args, **{**kwargs, "return_lse": True})


def accepts_old_plans(slot: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a prefill plan() be called with old names, and in the order without head_dim_vo.

    `slot` is head_dim_vo's among the positional arguments; the next are the two masks and causal.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old, new in _RENAMED.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"plan() got both {old!r} and {new!r}; they are the same")
                    kwargs[new] = kwargs.pop(old)
            data_type = kwargs.pop("data_type", None)
            if data_type is not None:
                kwargs.setdefault("q_data_type", data_type)
                kwargs.setdefault("kv_data_type", data_type)
            rest = args[slot + 1 :]  # args[0] is the wrapper
            if rest and _is_old_order(rest):
                args = (*args[: slot + 1], None, *rest)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def _is_old_order(rest: tuple[Any, ...]) -> bool:
    """True if what stands where head_dim_vo and the masks do can only be two masks and causal."""
    first, second, third = (*rest, None, None)[:3]
    return (
        str(getattr(first, "dtype", "")) in _MASKS
        or (first is None and _is_packed(second))
        or isinstance(third, bool)
    )


def _is_packed(x: Any) -> bool:
    return str(getattr(x, "dtype", "")) in ("uint8", "torch.uint8")


def read_scales(
    args: tuple[Any, ...],
    named: tuple[Any, Any, Any],
    return_lse: bool,
    old_order: tuple[str, ...],
) -> tuple[Scales, bool]:
    """The scales and return_lse of a run whose positional arguments after the arrays are `args`.

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
    given = dict(zip(order, args, strict=False))
    names = ("q_scale", "k_scale", "v_scale")
    for name, value in zip(names, named, strict=True):
        if value is not None and given.get(name) is not None:
            raise TypeError(f"run() got multiple values for {name!r}")
    scales = Scales(*(given.get(n) if x is None else x for n, x in zip(names, named, strict=True)))
    return scales, bool(given.get("return_lse", return_lse))


def check_run(
    window_left: Any,
    planned: int,
    kv_cache_sf: Any,
    unsupported: Any,
    name: str,
) -> None:
    """Check the uncommon arguments of a run."""
    if window_left is not None and window_left != planned:
        raise PlanError(
            f"window_left: run() got {window_left} and the plan says {planned}; plan again with "
            "the new window"
        )
    if kv_cache_sf is not None:
        raise UnsupportedError("kv_cache_sf: 4-bit caches are not supported; pass None")
    if unsupported is not None:
        raise UnsupportedError(f"{name}: not supported; pass None")

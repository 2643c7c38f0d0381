"""User-written logits in NumPy: real numbers are float64, integers wrap at 32 bits as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.expression import Node

_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor": np.floor,
    "log": np.log,
    "log2": np.log2,
    "log_sigmoid": lambda x: -np.logaddexp(0.0, -x),
    "negate": np.negative,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0.0, -x)),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "!": np.logical_not,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "//": np.floor_divide,
    "%": np.mod,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "&&": np.logical_and,
    "||": np.logical_or,
    # The GPU's result where one of two is no number: the other.
    "max": np.fmax,
    "min": np.fmin,
}
_TYPES = {"int": np.int32, "float": np.float64, "bool": np.bool_}


def evaluate(
    node: Node,
    variables: Mapping[str, Any],
    arrays: Sequence[np.ndarray],
    numbers: Sequence[int | float],
) -> np.ndarray:
    """The value of an expression where its variables are arrays that broadcast.

    arrays, numbers: the parameters by slot. An index beyond an array reads the element at its end.
    """
    with np.errstate(all="ignore"):
        return np.asarray(_value(node, variables, arrays, numbers))


def _value(
    node: Node,
    variables: Mapping[str, Any],
    arrays: Sequence[np.ndarray],
    numbers: Sequence[int | float],
) -> Any:
    dtype = _TYPES[node.type]
    if node.op == "value":
        return np.asarray(node.value, dtype)
    if node.op == "variable":
        return np.asarray(variables[str(node.value)], dtype)
    if node.op == "number":
        assert isinstance(node.value, int)
        number = numbers[node.value]
        return np.asarray(np.float32(number) if node.type == "float" else number, dtype)
    args = [_value(x, variables, arrays, numbers) for x in node.args]
    if node.op == "element":
        assert isinstance(node.value, int)
        of = arrays[node.value]
        indices = (np.clip(i, 0, n - 1) for i, n in zip(args, of.shape, strict=True))
        return np.asarray(of[tuple(indices)]).astype(dtype)
    if node.op == "near":
        assert isinstance(node.value, int)
        of, (token, head, distance) = arrays[node.value], args
        is_near = (distance >= 0) & (distance < of.shape[2])
        indices = (
            np.clip(i, 0, n - 1) for i, n in zip((token, head, distance), of.shape, strict=True)
        )
        return np.where(is_near, of[tuple(indices)].astype(dtype), 0.0)
    if node.op == "where":
        return np.where(args[0], args[1], args[2]).astype(dtype)
    if node.type == "float" or any(x.dtype == np.float64 for x in args):
        args = [x.astype(np.float64) for x in args]
    operation = _UNARY[node.op](*args) if len(args) == 1 else _BINARY[node.op](*args)
    return np.asarray(operation).astype(dtype)

"""User-written logits as given: texts and parameters, checked, as an expression and its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import is_contiguous
from ..core import dtypes, logits, parse
from ..core.dtypes import DType
from ..core.expression import MAX_AXES
from ..core.logits import REL_LOGITS, LogitsExpression
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, ExpressionError, UnsupportedError
from ..launch.driver import params

_ELEMENT_TYPES = {
    x.name: x
    for x in (
        *(dtypes.float32, dtypes.float16, dtypes.bfloat16),
        *(dtypes.int32, dtypes.uint8, dtypes.bool_),
    )
}
# Indices that are a variable alone, and the extent that an axis must have for each.
_EXTENTS = {"head": "num_qo_heads", "kv_head": "num_kv_heads", "batch": "batch size"}
_LENGTHS = {
    name: f"the {what} of the longest request"
    for name, what in (("q_row", "query tokens"), ("q_idx", "keys"), ("kv_idx", "keys"))
} | {"q_token": "the rows of q"}


def read(
    logits_transform: Any, mask_fn: Any, logits_params: Any, rel_logits: Any = None
) -> tuple[LogitsExpression | None, tuple[ArrayView, ...]]:
    """The expressions of a call, and views of the arrays among its parameters in their order.

    logits_params: numbers and arrays by name, or None. rel_logits: biases of near keys, or None.
    Raises ExpressionError for the texts and for parameters that they do not read, ArgumentError for
    what is no parameter.
    """
    for text, name in ((logits_transform, "logits_transform"), (mask_fn, "mask_fn")):
        if text is not None and not isinstance(text, str):
            raise ExpressionError(
                f"{name}: got {parse.shown(text)}; wanted an expression as a string, such as "
                f"{'kv_idx <= q_idx' if name == 'mask_fn' else '30 * tanh(logit / 30)'!r}"
            )
    if rel_logits is not None and logits_transform is not None:
        raise UnsupportedError(
            f"{REL_LOGITS}: is not supported beside logits_transform; write it there, as near["
            "q_token, head, q_idx - kv_idx] where 0 <= q_idx - kv_idx and that is in the array"
        )
    if logits_transform is mask_fn is rel_logits is None:
        if logits_params is not None:
            raise ArgumentError(
                "logits_params: got parameters without an expression; pass logits_transform or "
                "mask_fn too"
            )
        return None, ()
    arrays, numbers = _sort(logits_params)
    if rel_logits is not None:
        if REL_LOGITS in arrays:
            raise ArgumentError(
                f"{_label(REL_LOGITS)}: is an argument of its own; wanted another name"
            )
        arrays = {REL_LOGITS: _rel_logits(rel_logits), **arrays}
    declared = tuple((name, v.dtype, len(v.shape)) for name, v in arrays.items())
    expression = logits.make(logits_transform, mask_fn, declared, numbers, rel_logits is not None)
    return expression, tuple(arrays.values())


def _rel_logits(x: Any) -> ArrayView:
    """Biases of near keys of a call, in floats [rows, num_qo_heads, distances]."""
    view = array.view(x, REL_LOGITS)
    floats = dtypes.float32, dtypes.float16, dtypes.bfloat16
    if len(view.shape) != 3:
        raise ArgumentError(
            f"{REL_LOGITS}: shape is {list(view.shape)}; wanted [rows, num_qo_heads, distances]"
        )
    if view.dtype not in floats:
        raise ArgumentError(
            f"{REL_LOGITS}: dtype is {view.dtype}; wanted {', '.join(str(x) for x in floats)}"
        )
    return view


def replaced(
    expression: LogitsExpression | None,
    views: tuple[ArrayView, ...],
    logits_params: Any,
    rel_logits: Any = None,
) -> tuple[ArrayView, ...]:
    """The arrays of a run, in which rel_logits and some of logits_params replace the plan's."""
    if rel_logits is not None:
        views = (_replacing(expression, rel_logits), *views[1:])
    if logits_params is None:
        return views
    if expression is None:
        raise ArgumentError(
            "logits_params: the plan has no expression; pass logits_transform or mask_fn to plan()"
        )
    arrays, numbers = _sort(logits_params)
    if numbers:
        raise ArgumentError(
            f"logits_params: {numbers[0][0]!r} is a number, which plan() fixes; pass it to plan(), "
            "or as an array of one element"
        )
    replacements, is_relative = list(views), expression.is_relative
    slots = {x.name: i for i, x in enumerate(expression.arrays)}
    for name, view in arrays.items():
        if name not in slots or (is_relative and name == REL_LOGITS):
            have = ", ".join(list(slots)[is_relative:]) or "none"
            raise ArgumentError(f"logits_params: the plan has no array {name!r}; it has {have}")
        wanted = expression.arrays[slots[name]]
        if (view.dtype, len(view.shape)) != (wanted.dtype, wanted.ndim):
            raise ArgumentError(
                f"logits_params: {name!r} is {view.dtype} with {len(view.shape)} axes; the plan "
                f"said {wanted.dtype} with {wanted.ndim}"
            )
        replacements[slots[name]] = view
    return tuple(replacements)


def _replacing(expression: LogitsExpression | None, rel_logits: Any) -> ArrayView:
    """The biases of a run, for a plan that has others of the same dtype."""
    if expression is None or not expression.is_relative:
        raise ArgumentError(f"{REL_LOGITS}: the plan has none; pass {REL_LOGITS} to plan() too")
    view, wanted = _rel_logits(rel_logits), expression.arrays[0].dtype
    if view.dtype is not wanted:
        raise ArgumentError(f"{REL_LOGITS}: dtype is {view.dtype}; the plan said {wanted}")
    return view


def _sort(
    parameters: Any,
) -> tuple[dict[str, ArrayView], tuple[tuple[str, DType, int | float], ...]]:
    """The arrays and the numbers of logits_params, by name."""
    if parameters is None:
        return {}, ()
    if not isinstance(parameters, Mapping):
        raise ArgumentError(
            f"logits_params: got {parse.shown(parameters)}; wanted a dict of names and values"
        )
    arrays: dict[str, ArrayView] = {}
    numbers: list[tuple[str, DType, int | float]] = []
    for name, value in parameters.items():
        _check_name(name)
        label = _label(name)
        if isinstance(value, (bool, np.bool_)):
            raise ArgumentError(f"{label}: got {value}; wanted a number or an array, as 1 or 0")
        if isinstance(value, (int, np.integer)):
            number = parse.require_int(value, label, minimum=-(2**31))
            numbers.append((name, dtypes.int32, number))
        elif isinstance(value, (float, np.floating)):
            numbers.append((name, dtypes.float32, parse.finite(value, label, 0.0)))
        else:
            arrays[name] = _view(value, label)
    return arrays, tuple(numbers)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not (name.isidentifier() and name.isascii()):
        raise ArgumentError(
            f"logits_params: got the name {parse.shown(name)}; wanted letters, digits and "
            "underscores, such as 'bias'"
        )
    if name in logits.RESERVED:
        raise ArgumentError(
            f"logits_params: {name!r} is a word of the expressions; wanted another name"
        )


def _view(value: Any, label: str) -> ArrayView:
    if isinstance(value, (list, tuple, str)) or value is None:
        raise ArgumentError(f"{label}: got {parse.shown(value)}; wanted a number or an array")
    view = array.view(value, label)
    if view.dtype.name not in _ELEMENT_TYPES:
        raise UnsupportedError(
            f"{label}: dtype {view.dtype} is not supported; wanted {', '.join(_ELEMENT_TYPES)}"
        )
    if not 1 <= len(view.shape) <= MAX_AXES:
        raise ArgumentError(
            f"{label}: shape is {list(view.shape)}; wanted a number or 1 to {MAX_AXES} axes"
        )
    return view


def _label(name: str) -> str:
    return f"logits_params[{name!r}]"


def check_arrays(
    expression: LogitsExpression,
    views: Sequence[ArrayView],
    spec: AttentionSpec,
    num_requests: int,
    qo_len: int,
    kv_len: int,
    num_rows: int,
) -> dict[str, ArrayView]:
    """The arrays by what messages call them; ArgumentError unless each covers what a variable alone
    indexes.

    qo_len, kv_len: the most of one request. num_rows: of q, of all requests. Other indices are cut
    to the array when they are read.
    """
    extents = {
        "head": spec.num_qo_heads,
        "kv_head": spec.num_kv_heads,
        "batch": num_requests,
        "q_row": qo_len,
        "q_token": num_rows,
        "q_idx": kv_len,
        "kv_idx": kv_len,
    }
    labels = _labels(expression)
    for label, view in zip(labels, views, strict=True):
        if not is_contiguous(view):
            raise ArgumentError(
                f"{label}: has strides {list(view.strides)}; wanted a contiguous array"
            )
    for node in (node for part in expression.parts for node in part.walk()):
        if node.op not in ("element", "near"):
            continue
        assert isinstance(node.value, int)
        view, label = views[node.value], labels[node.value]
        for axis, index in enumerate(node.args):
            name = str(index.value) if index.op == "variable" else ""
            wanted, extent = extents.get(name, 1), view.shape[axis]
            if name in _EXTENTS and extent != wanted:
                raise ArgumentError(
                    f"{label}: axis {axis}, indexed by {name}, has {extent} elements; wanted "
                    f"{wanted}, the {_EXTENTS[name]}"
                )
            if extent < wanted:
                of = f", {_LENGTHS[name]}" if name in _LENGTHS else ""
                raise ArgumentError(
                    f"{label}: axis {axis} has {extent} elements; wanted at least {wanted}{of}"
                )
    return dict(zip(labels, views, strict=True))


def _labels(expression: LogitsExpression) -> list[str]:
    """What messages call the arrays of a call, in the order of their slots."""
    result = [_label(x.name) for x in expression.arrays]
    return [REL_LOGITS, *result[1:]] if expression.is_relative else result


def of_request(
    expression: LogitsExpression, views: Sequence[ArrayView], index: int, num_requests: int
) -> LogitsExpression:
    """The expressions of one request of a batch that is computed request by request.

    Raises ArgumentError unless arrays that `batch` indexes have an element for each request, and
    UnsupportedError for `q_token`, which counts rows of all requests.
    """
    if num_requests > 1 and expression.reads("q_token"):
        raise UnsupportedError(
            f"{expression.name}: reads q_token, which is not supported where requests are computed "
            "one by one; index arrays by batch and q_row"
        )
    for node in (node for part in expression.parts for node in part.walk()):
        if node.op != "element":
            continue
        assert isinstance(node.value, int)
        for axis, index_node in enumerate(node.args):
            extent = views[node.value].shape[axis]
            if (
                index_node.op == "variable"
                and index_node.value == "batch"
                and extent != num_requests
            ):
                raise ArgumentError(
                    f"{_label(expression.arrays[node.value].name)}: axis {axis}, indexed by batch, "
                    f"has {extent} elements; wanted {num_requests}, the batch size"
                )
    return expression.of_request(index)


def pop_arrays(spec: AttentionSpec, views: dict[str, ArrayView]) -> list[ArrayView]:
    """Take the arrays of check_arrays out of others, in the order of their slots."""
    if spec.logits is None:
        return []
    return [views.pop(label) for label in _labels(spec.logits)]


def pack(spec: AttentionSpec, views: Mapping[str, ArrayView]) -> bytes:
    """params.LOGITS_ARRAYS of the arrays of check_arrays, which may be among others."""
    if spec.logits is None:
        return params.NO_LOGITS_ARRAYS
    arrays = (views[label] for label in _labels(spec.logits))
    return params.pack_logits_arrays((v.ptr, v.shape) for v in arrays)


# --- arrays over all logits ---


def differs_by_head(mask: Any) -> bool:
    """Whether a mask over all logits may be another one for another head."""
    v = array.view(mask, "mask")
    return len(v.shape) > 2 and v.shape[-3] > 1 and v.strides[-3] != 0


def of_arrays(
    bias: Any, mask: Any, query: Any, key: Any, soft_cap: float
) -> tuple[str | None, str | None, dict[str, Any]]:
    """Arrays over all logits as (logits_transform, mask_fn, logits_params).

    The bias comes behind the cap, which has no effect here without a bias.
    """
    q, k = array.view(query, "query"), array.view(key, "key")
    if len(q.shape) not in (3, 4) or len(k.shape) != len(q.shape):
        raise ArgumentError(
            f"query, key: shapes are {list(q.shape)} and {list(k.shape)}; wanted [batch, tokens, "
            "heads, head_dim], or both without batch"
        )
    wanted = q.shape[0] if len(q.shape) == 4 else 1, q.shape[-2], q.shape[-3], k.shape[-3]
    texts: dict[str, str] = {}
    arrays = {}
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            arrays[name], indices = _over_logits(x, name, wanted)
            texts[name] = f"{name}[{', '.join(indices)}]"
    if "bias" not in texts:
        return None, texts.get("mask"), arrays
    logit = f"{soft_cap!r} * tanh(logit / {soft_cap!r})" if soft_cap else "logit"
    return f"{logit} + {texts['bias']}", texts.get("mask"), arrays


def _over_logits(x: Any, name: str, wanted: tuple[int, ...]) -> tuple[Any, list[str]]:
    """An array that broadcasts to [b, num_heads, t, s], with four axes, and what indexes each."""
    v, is_bias = array.view(x, name), name == "bias"
    full = x.reshape((1,) * (4 - len(v.shape)) + tuple(v.shape)) if len(v.shape) < 4 else x
    shape = full.shape
    if len(shape) != 4 or any(n not in (1, size) for n, size in zip(shape, wanted, strict=True)):
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted one that broadcasts to {list(wanted)}"
        )
    floats = dtypes.float32, dtypes.float16, dtypes.bfloat16
    if v.dtype not in (floats if is_bias else (dtypes.bool_,)):
        want = "float32, float16 or bfloat16" if is_bias else "bool, True where a row sees a key"
        raise ArgumentError(f"{name}: dtype is {v.dtype}; wanted {want}")
    if not is_contiguous(array.view(full, name)):
        raise ArgumentError(f"{name}: has strides {list(v.strides)}; wanted a contiguous array")
    indices = zip(("batch", "head", "q_row", "kv_idx"), shape, strict=True)
    return full, [index if n > 1 else "0" for index, n in indices]

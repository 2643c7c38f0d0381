"""User-written logits as CUDA: the member functions of a kernel's `Config::LogitsExpression`.

The text is written from checked nodes alone. All that it names are literals and members of `at`
(kernels/cupyattn/shared/logits_expression.cuh), which says what each means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from .expression import COMPARISONS, FLOAT, INT, Node, Parameter
from .logits import LogitsExpression

_FUNCTIONS = {
    "abs": "absolute",
    "exp": "exp",
    "exp2": "exp2",
    "floor": "floor",
    "log": "log",
    "log2": "log2",
    "log_sigmoid": "log_sigmoid",
    "max": "greatest",
    "min": "least",
    "sigmoid": "sigmoid",
    "sqrt": "sqrt",
    "tanh": "tanh",
}
_INTEGERS = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "//": "floor_divide",
    "%": "floor_modulo",
}
# Indices that the host has checked: their axis has as many elements as they have values.
_CHECKED = "head", "kv_head", "batch", "q_row"
_ROW_VALUE = Node("row value", FLOAT)


@lru_cache(maxsize=1024)
def members(logits: LogitsExpression | None) -> str:
    """The members of the type, empty without expressions."""
    if logits is None:
        return ""
    writer, text = _Writer(logits.arrays), ""
    if logits.transform is not None:
        rest, row_value = _split_row_value(logits.transform)
        text += _function("float", "row_value", writer.real(row_value))
        text += _function("float", "transform", writer.real(rest))
        # A second way through a long transform would cost registers and time to compile.
        exponent = "" if logits.is_long else writer.exponent(rest)
        text += f"    static constexpr bool kIsLinear = {'true' if exponent else 'false'};\n"
        if logits.is_relative:
            text += f"    using NearBias = {writer.element_type(0)};\n"
        if exponent:
            text += _function("float", "exponent", exponent, ", float shift")
    if logits.mask is not None:
        heads = "true" if logits.mask_reads_heads else "false"
        text += f"    static constexpr bool kReadsHeads = {heads};\n"
        text += _function("bool", "sees", writer.write(logits.mask))
    return text


def _function(type: str, name: str, body: str, more: str = "") -> str:
    parameters = f"[[maybe_unused]] const At& at{more}"
    return (
        "    template <typename At>\n"
        f"    static __device__ __forceinline__ {type} {name}({parameters}) {{\n"
        f"      return {body};\n"
        "    }\n"
    )


def _split_row_value(node: Node) -> tuple[Node, Node]:
    """(the transform that reads the row value, the row value).

    The row value is the largest real part that no key changes and that costs a load or a function.
    It is computed once a row, not once a logit.
    """
    candidates = [x for x in node.walk() if x.type == FLOAT and not x.reads("logit", "kv_idx")]
    # Parts follow the parts that they belong to, so that the first is the largest.
    costly = [x for x in candidates if any(_is_costly(y) for y in x.walk())]
    if not costly:
        return node, Node("value", FLOAT, (), 0.0)
    return _replaced(node, costly[0]), costly[0]


def _is_costly(node: Node) -> bool:
    return node.op == "element" or (node.op in _FUNCTIONS and node.type == FLOAT)


def _replaced(node: Node, old: Node) -> Node:
    if node == old:
        return _ROW_VALUE
    return replace(node, args=tuple(_replaced(x, old) for x in node.args))


class _Linear(NamedTuple):
    """The terms of a sum, as C++.

    factors  what multiplies the logit
    fixed    terms that no key changes
    slopes   factors that no key changes, with the first key's integer and what it grows by a key
    others   all else
    """

    factors: list[str]
    fixed: list[str]
    slopes: list[tuple[str, str, int]]
    others: list[str]


@dataclass(frozen=True)
class _Writer:
    arrays: Sequence[Parameter]

    def write(self, node: Node) -> str:
        """C++ of the node's own type."""
        if node.op in ("value", "variable", "number", "row value", "element", "near"):
            return self._operand(node)
        if node.op == "where":
            first, second = (self._as(x, node.type) for x in node.args[1:])
            return f"({self.write(node.args[0])} ? {first} : {second})"
        if node.op in ("&&", "||", *COMPARISONS):
            kind = FLOAT if any(x.type == FLOAT for x in node.args) else node.args[0].type
            first, second = (self._as(x, kind) for x in node.args)
            return f"({first} {node.op} {second})"
        if node.op == "!":
            return f"!{self.write(node.args[0])}"
        if node.op == "*" and node.type == FLOAT:
            for factor, position in (node.args, node.args[::-1]):
                if _factor_of_key(position) and not factor.reads("logit", "kv_idx"):
                    return self._slope(factor, position)
        args = [self._as(x, node.type) for x in node.args]
        if node.op == "negate":
            return f"at.subtract(0, {args[0]})" if node.type == INT else f"(-{args[0]})"
        if node.op in _FUNCTIONS:
            return f"at.{_FUNCTIONS[node.op]}({', '.join(args)})"
        if node.op in _INTEGERS and node.type == INT:
            return f"at.{_INTEGERS[node.op]}({', '.join(args)})"
        if node.op == "/":
            return f"at.divide_reals({args[0]}, {args[1]})"
        return f"({args[0]} {node.op} {args[1]})"

    def real(self, node: Node) -> str:
        """C++ of type float.

        Converting an integer costs as much as an exponential. A sum with the key's index is
        converted without the key's place in its tile, which the compiler knows.
        """
        if node.type == FLOAT:
            return self.write(node)
        if node.op == "value":
            assert isinstance(node.value, int)
            return _real_literal(float(node.value))
        if node.op == "abs" or node.op in ("min", "max"):
            args = ", ".join(self.real(x) for x in node.args)
            return f"at.{_FUNCTIONS[node.op]}({args})"
        if node.op == "where":
            first, second = (self.real(x) for x in node.args[1:])
            return f"({self.write(node.args[0])} ? {first} : {second})"
        factor = _factor_of_key(node)
        if factor:
            first = self.write(_with_first_key(node))
            step = _real_literal(float(factor))
            return f"(static_cast<float>({first}) + {step} * static_cast<float>(at.kv_step))"
        return f"static_cast<float>({self.write(node)})"

    def _slope(self, factor: Node, position: Node) -> str:
        """factor * position, as a product for all keys of a thread, and a constant step times it.

        One FFMA then adds both to a logit.
        """
        slope, step = self.real(factor), _real_literal(float(_factor_of_key(position) or 0))
        first = self.write(_with_first_key(position))
        steps = f"{step} * static_cast<float>(at.kv_step)"
        return f"({slope} * static_cast<float>({first}) + {slope} * ({steps}))"

    def exponent(self, node: Node) -> str:
        """The transform to base 2 plus `shift`, if it is linear in the logit; else empty.

        What no key changes joins the shift, and slopes are steps from a thread's first key: a
        logit then takes one FFMA, and one more for all slopes.
        """
        parts = _Linear([], [], [], [])
        self._flatten(node, "", parts)
        if not parts.factors:
            return ""
        to_base_2 = "cupyattn::kLog2e"
        fixed = " + ".join([*parts.fixed, *(f"{x} * {first}" for x, first, _ in parts.slopes)])
        text = f"({to_base_2} * ({fixed}) + shift)" if fixed else "shift"
        if parts.slopes:
            steps = " + ".join(f"{x} * {_real_literal(float(k))}" for x, _, k in parts.slopes)
            text = f"fmaf({to_base_2} * ({steps}), static_cast<float>(at.kv_step), {text})"
        for x in parts.others:
            text = f"fmaf({to_base_2}, {x}, {text})"
        scale = "at.base2_scale"
        if parts.factors != ["1.0f"]:
            scale += f" * ({' + '.join(parts.factors)})"
        return f"fmaf(at.product, {scale}, {text})"

    def _flatten(self, node: Node, factor: str, parts: _Linear) -> None:
        """Sort the terms of factor * node; the factor, which no key changes, may be empty for 1."""
        times = f"{factor} * " if factor else ""
        if node.op == "variable" and node.value == "logit":
            parts.factors.append(factor or "1.0f")
        elif not node.reads("logit", "kv_idx"):
            parts.fixed.append(times + self.real(node))
        elif node.type == INT and _factor_of_key(node):
            first = f"static_cast<float>({self.write(_with_first_key(node))})"
            parts.slopes.append((factor or "1.0f", first, _factor_of_key(node) or 0))
        elif node.op == "negate":
            self._flatten(node.args[0], f"{times}-1.0f", parts)
        elif node.op in ("+", "-") and node.type == FLOAT:
            self._flatten(node.args[0], factor, parts)
            self._flatten(node.args[1], factor if node.op == "+" else f"{times}-1.0f", parts)
        elif node.op == "*" and not all(x.reads("logit", "kv_idx") for x in node.args):
            a, b = node.args if node.args[1].reads("logit", "kv_idx") else node.args[::-1]
            self._flatten(b, times + self.real(a), parts)
        elif node.op == "/" and not node.args[1].reads("logit", "kv_idx"):
            inverse = f"at.divide_reals(1.0f, {self.real(node.args[1])})"
            self._flatten(node.args[0], times + inverse, parts)
        else:
            parts.others.append(times + self.real(node))

    def _as(self, node: Node, type: str) -> str:
        return self.real(node) if type == FLOAT else self.write(node)

    def _operand(self, node: Node) -> str:
        if node.op == "value":
            if node.type == FLOAT:
                assert isinstance(node.value, float)
                return _real_literal(node.value)
            if node.type == INT:
                return f"({node.value})" if str(node.value).startswith("-") else str(node.value)
            return "true" if node.value else "false"
        if node.op == "variable":
            return "at.kv_idx()" if node.value == "kv_idx" else f"at.{node.value}"
        if node.op == "number":
            return f"at.{'real' if node.type == FLOAT else 'integer'}({node.value})"
        if node.op == "row value":
            return "at.row_value"
        assert isinstance(node.value, int)
        indices = [self._index(x, node.value, axis) for axis, x in enumerate(node.args)]
        if node.op == "near":
            indices[-1] = self.write(node.args[-1])
        type = self.element_type(node.value)
        return f"at.template {node.op}<{type}>({node.value}, {', '.join(indices)})"

    def element_type(self, slot: int) -> str:
        """C++ of an array's elements."""
        name = self.arrays[slot].dtype.cpp
        return name if name in ("float", "bool") else f"cupyattn::{name}"

    def _index(self, node: Node, slot: int, axis: int) -> str:
        text = self.write(node)
        if node.op == "variable" and node.value in _CHECKED:
            return text
        return f"at.inside({slot}, {axis}, {text})"


def _real_literal(value: float) -> str:
    return f"({value!r}f)" if value < 0 else f"{value!r}f"


def _factor_of_key(node: Node) -> int | None:
    """k if the integer is k * kv_idx plus what no key changes; None if it is no such sum."""
    if not node.reads("kv_idx"):
        return 0
    if node.op == "variable":
        return 1
    factors = [_factor_of_key(x) for x in node.args]
    if node.op == "negate" and factors[0] is not None:
        return -factors[0]
    if node.op in ("+", "-") and None not in factors:
        a, b = factors
        assert a is not None and b is not None
        return a + b if node.op == "+" else a - b
    if node.op == "*":
        for factor, other in zip(factors, node.args[::-1], strict=True):
            if other.op == "value" and isinstance(other.value, int) and factor is not None:
                return factor * other.value
    return None


def _with_first_key(node: Node) -> Node:
    """The node for the first of a thread's keys."""
    if node.op == "variable" and node.value == "kv_idx":
        return replace(node, value="kv_first")
    return replace(node, args=tuple(_with_first_key(x) for x in node.args))

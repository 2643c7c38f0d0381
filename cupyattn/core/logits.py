"""The value object of user-written logits: two checked expressions and what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..errors import ExpressionError
from . import expression
from .dtypes import DType, int32
from .expression import (
    BOOL,
    FLOAT,
    FUNCTIONS,
    INT,
    MAX_ARRAYS,
    MAX_NUMBERS,
    VARIABLES,
    Node,
    Parameter,
)

# Operations of an expression that takes few registers. ALiBi has seven, a window of each head nine.
_SHORT = 12
REL_LOGITS = "rel_logits"
RESERVED = frozenset((*VARIABLES, *FUNCTIONS, "true", "false"))


@dataclass(frozen=True, slots=True, eq=False)
class LogitsExpression:
    """What happens to the logits of a call beside its built-in options.

    transform   a real number in place of each scaled logit; None: the logit itself
    mask        a condition, False where a row does not see a key; None: no mask
    arrays, numbers  the parameters, in the order of their slots
    values      of the numbers; the kernel is the same for all values

    Expressions are equal if they compute the same from parameters of the same names, however their
    texts were spaced.
    """

    transform: Node | None
    mask: Node | None
    arrays: tuple[Parameter, ...] = ()
    numbers: tuple[Parameter, ...] = ()
    values: tuple[int | float, ...] = ()
    # Comparing and hashing trees would cost each call microseconds.
    _key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        content = self.transform, self.mask, self.arrays, self.numbers, self.values
        object.__setattr__(self, "_key", repr(content))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, LogitsExpression) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def compiled(self) -> LogitsExpression:
        """What a kernel is compiled for: the expressions without the values of numbers."""
        return LogitsExpression(self.transform, self.mask, self.arrays, self.numbers)

    @property
    def parts(self) -> tuple[Node, ...]:
        """The expressions that there are."""
        return tuple(x for x in (self.transform, self.mask) if x is not None)

    def reads(self, *names: str) -> bool:
        """Whether an expression depends on one of these variables."""
        return any(part.reads(*names) for part in self.parts)

    @property
    def mask_reads_heads(self) -> bool:
        """Whether heads of a row may see different keys."""
        return self.mask is not None and self.mask.reads("head", "kv_head")

    @property
    def is_relative(self) -> bool:
        """Whether the transform adds the biases of near keys, rel_logits, and nothing else."""
        return self.transform is not None and any(x.op == "near" for x in self.transform.args)

    @property
    def name(self) -> str:
        """The argument that says what happens to logits, or else to keys."""
        if self.is_relative:
            return REL_LOGITS
        return "mask_fn" if self.transform is None else "logits_transform"

    @property
    def is_long(self) -> bool:
        """Whether the transform takes more registers than a slope does, or loads for each key."""
        if self.transform is None:
            return False
        return len([*self.transform.walk()]) > _SHORT or self.loads_for_keys

    @property
    def loads_for_keys(self) -> bool:
        """Whether the transform loads an element for each key."""
        nodes = () if self.transform is None else self.transform.walk()
        return any(node.op == "element" and node.reads("kv_idx") for node in nodes)

    @property
    def has_large_mask(self) -> bool:
        """Whether the mask takes more registers than bits of a mask in memory do."""
        nodes = [] if self.mask is None else [*self.mask.walk()]
        return len(nodes) > _SHORT or any(node.op == "element" for node in nodes)

    @property
    def soft_cap(self) -> tuple[float, float]:
        """(c, factor) if the transform is c * tanh(factor * logit / c), both positive; else (0, 0).

        The kernels have that as an option, with a faster tanh for small logits. However it is
        written: a * tanh(b * logit) is the cap |a| of logits times a * b.
        """
        outer, function = self._factor(self.transform, "tanh")
        if function is None:
            return 0.0, 0.0
        inner, logit = self._factor(function.args[0], "variable")
        if logit is None or logit.value != "logit" or not outer * inner > 0.0:
            return 0.0, 0.0
        return abs(outer), outer * inner

    def _factor(self, node: Node | None, op: str) -> tuple[float, Node | None]:
        """(a, x) if the node is a number a times x, a node of this operation; else (0, None)."""
        if node is None or node.op == op:
            return 1.0, node
        if node.op == "negate":
            factor, inner = self._factor(node.args[0], op)
            return -factor, inner
        if node.op not in ("*", "/"):
            return 0.0, None
        for constant, other in (node.args, node.args[::-1]):
            by = self._constant(constant)
            if by == 0.0 or (node.op == "/" and other is not node.args[0]):
                continue
            factor, inner = self._factor(other, op)
            return (factor * by if node.op == "*" else factor / by), inner
        return 0.0, None

    def _constant(self, node: Node) -> float:
        """The value of a product of numbers that the call knows, 0 for all else."""
        if node.op == "number" and isinstance(node.value, int):
            return float(self.values[node.value])
        if node.op == "negate":
            return -self._constant(node.args[0])
        if node.op in ("*", "/"):
            first, second = (self._constant(x) for x in node.args)
            if second == 0.0:
                return 0.0
            return first * second if node.op == "*" else first / second
        is_value = node.op == "value" and isinstance(node.value, (int, float))
        return float(node.value) if is_value else 0.0  # type: ignore[arg-type]

    def of_request(self, index: int) -> LogitsExpression:
        """The expressions of one request of a batch, which read its index as a number.

        Raises ExpressionError where there is no slot for it.
        """
        if not self.reads("batch"):
            return self
        slot = len(self.numbers)
        if slot == MAX_NUMBERS:
            raise ExpressionError(
                f"logits_params: has {slot} numbers; wanted at most {slot - 1} beside batch: put "
                "several into one array, as rows of it"
            )
        request = Node("number", INT, (), slot)
        numbers = (*self.numbers, Parameter("batch", int32, 0))
        return LogitsExpression(
            _with_request(self.transform, request),
            _with_request(self.mask, request),
            self.arrays,
            numbers,
            (*self.values, index),
        )

    def split_windows(self) -> tuple[int, int, Node | None]:
        """(left, right, rest): the conditions of the mask that are a window, and all others.

        left, right  keys beside the row's own that it sees to a side; -1: the mask does not say
        A window is kv_idx <= q_idx + n or kv_idx >= q_idx - n with n >= 0, however it is written,
        or both at once, abs(kv_idx - q_idx) <= n.
        The kernels know windows: they visit no tile outside and look at few inside.
        """
        left = right = -1
        rest: list[Node] = []
        for part in _joined(self.mask):
            windows = [self._window(x) for x in _without_abs(part)]
            if "" in (side for side, _ in windows):
                rest.append(part)
                continue
            for side, keys in windows:
                if side == "right":
                    right = keys if right < 0 else min(right, keys)
                else:
                    left = keys if left < 0 else min(left, keys)
        node = rest[0] if rest else None
        for part in rest[1:]:
            assert node is not None
            node = Node("&&", BOOL, (node, part))
        return left, right, node

    def _window(self, part: Node) -> tuple[str, int]:
        """(side, keys) of a condition that is a window; ("", 0) for all others."""
        if part.op not in ("<", "<=", ">", ">=") or any(x.type != INT for x in part.args):
            return "", 0
        first, second = (self._linear_in_indices(x) for x in part.args)
        if first is None or second is None:
            return "", 0
        key, row, more = (a - b for a, b in zip(first, second, strict=True))
        if (key, row) not in ((1, -1), (-1, 1)):
            return "", 0
        # Now key - row + more stands against 0.
        more *= key
        is_upper = part.op.startswith("<") == (key > 0)
        keys = (-more if is_upper else more) - int("=" not in part.op)
        if not 0 <= keys < 2**31 - 1:
            return "", 0
        return "right" if is_upper else "left", keys

    def _linear_in_indices(self, node: Node) -> tuple[int, int, int] | None:
        """(a, b, c) of an integer a * kv_idx + b * q_idx + c; None for all others."""
        if node.op == "value" and isinstance(node.value, int):
            return 0, 0, node.value
        if node.op == "number" and isinstance(node.value, int):
            return 0, 0, int(self.values[node.value])
        if node.op == "variable" and node.value in ("kv_idx", "q_idx"):
            return int(node.value == "kv_idx"), int(node.value == "q_idx"), 0
        if node.op == "negate":
            inner = self._linear_in_indices(node.args[0])
            return None if inner is None else (-inner[0], -inner[1], -inner[2])
        if node.op not in ("+", "-"):
            return None
        first, second = (self._linear_in_indices(x) for x in node.args)
        if first is None or second is None:
            return None
        sign = 1 if node.op == "+" else -1
        a, b, c = (x + sign * y for x, y in zip(first, second, strict=True))
        return a, b, c

    def with_mask(self, mask: Node | None) -> LogitsExpression | None:
        """The expressions with this mask; None if none is left."""
        if mask is None and self.transform is None:
            return None
        return LogitsExpression(self.transform, mask, self.arrays, self.numbers, self.values)

    def without_transform(self) -> LogitsExpression | None:
        """The mask alone; None if there is none."""
        if self.mask is None:
            return None
        return LogitsExpression(None, self.mask, self.arrays, self.numbers, self.values)


def _joined(node: Node | None) -> list[Node]:
    """The conditions that && joins."""
    if node is None:
        return []
    if node.op != "&&":
        return [node]
    return [part for x in node.args for part in _joined(x)]


def _without_abs(node: Node) -> list[Node]:
    """The conditions of x and of -x that a condition abs(x) <= n is; the node alone otherwise."""
    for op, small in (("<", 0), (">", 1)):
        if node.op.startswith(op) and node.args[small].op == "abs":
            x = node.args[small].args[0]
            signs = x, Node("negate", x.type, (x,))
            return [
                replace(node, args=(y, node.args[1]) if small == 0 else (node.args[0], y))
                for y in signs
            ]
    return [node]


def _with_request(node: Node | None, request: Node) -> Node | None:
    """The tree with `request` where it reads batch."""
    if node is None or (node.op == "variable" and node.value == "batch"):
        return node and request
    args = (_with_request(x, request) for x in node.args)
    return replace(node, args=tuple(x for x in args if x is not None))


@lru_cache(maxsize=1024)
def make(
    transform: str | None,
    mask: str | None,
    arrays: tuple[tuple[str, DType, int], ...] = (),
    numbers: tuple[tuple[str, DType, int | float], ...] = (),
    is_relative: bool = False,
) -> LogitsExpression:
    """The expressions of these texts; None stands for no expression.

    arrays: name, dtype and number of axes of each; numbers: name, dtype (int32 or float32) and
    value. is_relative: whether the first array is rel_logits, which are then the transform. Raises
    ExpressionError.
    """
    of_arrays = tuple(Parameter(name, dtype, ndim) for name, dtype, ndim in arrays)
    of_numbers = tuple(Parameter(name, dtype, 0) for name, dtype, _ in numbers)
    for kind, group, limit in (
        ("arrays", of_arrays, MAX_ARRAYS),
        ("numbers", of_numbers, MAX_NUMBERS),
    ):
        if len(group) > limit:
            names = ", ".join(x.name for x in group)
            raise ExpressionError(
                f"logits_params: has {len(group)} {kind} ({names}); wanted at most {limit}: put "
                "several into one array, as rows of it"
            )
    parameters = {x.name: x for x in (*of_arrays, *of_numbers)}
    slots = {x.name: i for group in (of_arrays, of_numbers) for i, x in enumerate(group)}
    values = tuple(value for *_, value in numbers)
    logits = LogitsExpression(
        _NEAR if is_relative else _transform(transform, parameters, slots),
        _mask(mask, parameters, slots),
        of_arrays,
        of_numbers,
        values,
    )
    _check_parameters(logits)
    return logits


def near_biases(dtype: DType) -> LogitsExpression:
    """rel_logits of this dtype, and nothing else."""
    return make(None, None, ((REL_LOGITS, dtype, 3),), (), True)


def _transform(
    text: str | None, parameters: Mapping[str, Parameter], slots: Mapping[str, int]
) -> Node | None:
    if text is None:
        return None
    node = expression.parse(text, "logits_transform", parameters, slots)
    if node.type == BOOL:
        raise ExpressionError(
            f"logits_transform: {text!r} is a condition; wanted a number, or pass it as mask_fn",
            node.column,
        )
    # The logit itself is no transform.
    return None if node == Node("variable", FLOAT, (), "logit") else node


def _near() -> Node:
    """logit + rel_logits[q_token, head, q_idx - kv_idx], where there is such a distance."""
    token, head, row, key = (
        Node("variable", INT, (), name) for name in ("q_token", "head", "q_idx", "kv_idx")
    )
    bias = Node("near", FLOAT, (token, head, Node("-", INT, (row, key))), 0)
    return Node("+", FLOAT, (Node("variable", FLOAT, (), "logit"), bias))


_NEAR = _near()


def _mask(
    text: str | None, parameters: Mapping[str, Parameter], slots: Mapping[str, int]
) -> Node | None:
    if text is None:
        return None
    node = expression.parse(text, "mask_fn", parameters, slots)
    if node.type != BOOL:
        raise ExpressionError(
            f"mask_fn: {text!r} is a number; wanted a condition, such as kv_idx <= q_idx",
            node.column,
        )
    for part in node.walk():
        if part.op == "variable" and part.value == "logit":
            raise ExpressionError(
                f"mask_fn: reads the logit at column {part.column} of {text!r}; a mask is known "
                'before the logits. Write logits_transform="where(condition, logit, -1e30)"',
                part.column,
            )
    return node


def _check_parameters(logits: LogitsExpression) -> None:
    """ExpressionError for parameters that nothing reads, and divisors that are not positive."""
    nodes = [node for part in logits.parts for node in part.walk()]
    for op, group in (("element", logits.arrays), ("number", logits.numbers)):
        read = {node.value for node in nodes if node.op in (op, "near" if op == "element" else op)}
        for slot, parameter in enumerate(group):
            if slot not in read:
                raise ExpressionError(
                    f"logits_params: no expression reads {parameter.name!r}; leave it out"
                )
    for node in nodes:
        if node.op in ("//", "%") and node.args[1].op == "number":
            by = node.args[1].value
            assert isinstance(by, int)
            if logits.values[by] <= 0:
                raise ExpressionError(
                    f"logits_params: {logits.numbers[by].name!r} is {logits.values[by]} and a "
                    f"divisor of {node.op}; wanted a positive integer",
                    node.column,
                )

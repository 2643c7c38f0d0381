"""The language of user-written logits: its grammar, its types, and the tree that a text becomes.

A text is never evaluated or pasted anywhere. It becomes a tree of checked nodes, which
`expression_cuda` writes as CUDA and `reference.expression` evaluates with NumPy.

    expression = or [ "?" expression ":" expression | "if" or "else" expression ]
    or         = and { "||" and }
    and        = condition { "&&" condition }
    condition  = "not" condition | comparison
    comparison = sum [ ("<" | "<=" | ">" | ">=" | "==" | "!=") sum ]
    sum        = product { ("+" | "-") product }
    product    = unary { ("*" | "/" | "//" | "%") unary }
    unary      = ("-" | "+" | "!") unary | primary
    primary    = number | "true" | "false" | name | name "(" arguments ")"
               | name "[" arguments "]" | "(" expression ")"

Python's "and", "or", "True" and "False" are other spellings of "&&", "||", "true" and "false".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np

from ..errors import ExpressionError
from .dtypes import DType

INT, FLOAT, BOOL = "int", "float", "bool"
# What an expression may read, and the type of each.
VARIABLES = {
    "logit": FLOAT,
    "q_idx": INT,
    "q_row": INT,
    "q_token": INT,
    "kv_idx": INT,
    "head": INT,
    "kv_head": INT,
    "batch": INT,
    "q_len": INT,
    "kv_len": INT,
}
# Functions and the number of their arguments.
FUNCTIONS = {
    "abs": 1,
    "exp": 1,
    "exp2": 1,
    "floor": 1,
    "log": 1,
    "log2": 1,
    "log_sigmoid": 1,
    "max": 2,
    "min": 2,
    "sigmoid": 1,
    "sqrt": 1,
    "tanh": 1,
    "where": 3,
}
# Functions that keep integers.
_KEEP_INTEGERS = "abs", "max", "min"
COMPARISONS = "<", "<=", ">", ">=", "==", "!="
_TYPE_NAMES = {INT: "an integer", FLOAT: "a real number", BOOL: "a condition"}
_ELEMENT_TYPES = {
    "float16": FLOAT,
    "bfloat16": FLOAT,
    "float32": FLOAT,
    "int32": INT,
    "uint8": INT,
    "bool": BOOL,
}
MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 1000, 200, 40
MAX_ARRAYS, MAX_NUMBERS, MAX_AXES = 4, 8, 4
_INT32_MAX = 2**31 - 1

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?f?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<mark>//|<=|>=|==|!=|&&|\|\||[-+*/%<>!?:()\[\],])",
    re.ASCII,
)
# Words of Python that are marks here, or that have another spelling.
_WORDS = {"and": "&&", "or": "||", "not": "not", "if": "if", "else": "else"}
_VALUES = {"True": "true", "False": "false"}
# What people write out of habit, and what is written here.
_HABITS = {
    "fabs": "abs",
    "fabsf": "abs",
    "tanhf": "tanh",
    "expf": "exp",
    "exp2f": "exp2",
    "logf": "log",
    "log2f": "log2",
    "sqrtf": "sqrt",
    "fminf": "min",
    "fmaxf": "max",
    "fmin": "min",
    "fmax": "max",
    "logits": "logit",
    "score": "logit",
    "qo_idx": "q_row",
    "q_index": "q_idx",
    "kv_index": "kv_idx",
    "qo_head_idx": "head",
    "kv_head_idx": "kv_head",
    "head_idx": "head",
    "h": "head",
    "b": "batch",
    "batch_idx": "batch",
}
_MARK_HABITS = {
    "&": "&&",
    "|": "||",
    "=": "==",
    "^": "!= between conditions written out, or a product for a power",
    "~": "!",
    ".": "a plain name of logits_params",
    "{": "one expression",
    "}": "one expression",
    ";": "one expression",
    "'": "numbers only",
    '"': "numbers only",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named operand of a call: a number (ndim 0, int32 or float32) or an array of 1 to 4 axes."""

    name: str
    dtype: DType
    ndim: int

    @property
    def type(self) -> str:
        return _ELEMENT_TYPES[self.dtype.name]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. Nodes are equal if they compute the same, wherever they stand.

    op     "value", "variable", "number" (a scalar parameter), "element" (of an array parameter),
           "near" (an element at a token, a head and a distance, 0 where the last axis has none;
           no text says it), "negate",
           "!", "&&", "||", a comparison, "+", "-", "*", "/", "//", "%", or a function
    value  the value, the variable's name, or the parameter's slot
    """

    op: str
    type: str
    args: tuple[Node, ...] = ()
    value: int | float | bool | str | None = None
    column: int = field(default=0, compare=False, repr=False)

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.args:
            yield from child.walk()

    def reads(self, *names: str) -> bool:
        """Whether it depends on one of these variables."""
        return any(node.op == "variable" and node.value in names for node in self.walk())


class _Token(NamedTuple):
    kind: str  # "number", "name", "mark" or "end"
    text: str
    column: int


def parse(
    text: object, argument: str, parameters: Mapping[str, Parameter], slots: Mapping[str, int]
) -> Node:
    """The tree of a text.

    argument: what the caller calls it. slots: the place of each parameter among the arrays, or
    among the numbers. Raises ExpressionError with the column and a remedy.
    """
    if not isinstance(text, str):
        raise ExpressionError(
            f"{argument}: got a {type(text).__name__}; wanted an expression as a string, such as "
            "'30 * tanh(logit / 30)'"
        )
    return _Parser(text, argument, parameters, slots).parse()


class _Parser:
    def __init__(
        self,
        text: str,
        argument: str,
        parameters: Mapping[str, Parameter],
        slots: Mapping[str, int],
    ) -> None:
        self._text, self._argument = text, argument
        self._parameters, self._slots = parameters, slots
        self._place = self._nodes = self._depth = 0
        if len(text) > MAX_CHARACTERS:
            raise ExpressionError(
                f"{argument}: has {len(text)} characters; wanted at most {MAX_CHARACTERS}: compute "
                "what no key changes ahead, and pass it as an array in logits_params",
                MAX_CHARACTERS,
            )
        self._tokens = self._split()

    def parse(self) -> Node:
        if self._tokens[0].kind == "end":
            self._fail(self._tokens[0], "is empty", "wanted an expression, or None for none")
        node = self._expression()
        if self._next.kind != "end":
            self._unexpected(self._next)
        return node

    # --- Tokens ---

    def _split(self) -> list[_Token]:
        tokens, offset = [], 0
        while offset < len(self._text):
            match = _TOKEN.match(self._text, offset)
            if match is None:
                character = self._text[offset]
                habit = _MARK_HABITS.get(character)
                remedy = f"write {habit}" if habit else "the language has numbers, names, + - * / "
                remedy += "" if habit else "// % < <= > >= == != && || ! ? : ( ) [ ] and commas"
                self._fail(_Token("mark", character, offset + 1), f"has {character!r}", remedy)
            kind, text = str(match.lastgroup), match[0]
            if kind == "name" and text in _WORDS:
                kind, text = "mark", _WORDS[text]
            if kind != "space":
                tokens.append(_Token(kind, _VALUES.get(text, text), offset + 1))
            offset = match.end()
        tokens.append(_Token("end", "", len(self._text) + 1))
        return tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _take(self, *marks: str) -> _Token | None:
        """The next token if it is one of these marks, which is then behind."""
        token = self._next
        if token.kind == "mark" and token.text in marks:
            self._place += 1
            return token
        return None

    def _require(self, mark: str, opened: _Token) -> None:
        if self._take(mark) is None:
            what = "the end" if self._next.kind == "end" else repr(self._next.text)
            self._fail(
                self._next,
                f"has {what}",
                f"wanted {mark!r} for the {opened.text!r} at column {opened.column}",
            )

    def _fail(self, at: _Token | Node, what: str, remedy: str) -> NoReturn:
        where = f"at column {at.column} of {self._text!r}" if self._text.strip() else ""
        sentence = " ".join(filter(None, (what, where)))
        raise ExpressionError(f"{self._argument}: {sentence}; {remedy}", at.column)

    def _unexpected(self, token: _Token) -> NoReturn:
        if token.kind == "end":
            self._fail(token, "ends", "wanted a number, a name or '(' there")
        habit = _HABITS.get(token.text) if token.kind == "name" else None
        if token.text in COMPARISONS:
            self._fail(
                token,
                f"compares a comparison ({token.text!r})",
                "write both and join them by &&, as in 0 <= a && a < b",
            )
        if token.text == "?":
            self._fail(token, "has '?'", "put the condition and its two values into parentheses")
        remedy = f"write {habit}" if habit else "wanted an operator, or the end"
        self._fail(token, f"has {token.text!r}", remedy)

    # --- The grammar ---

    def _expression(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(
                self._next,
                f"is more than {MAX_DEPTH} parentheses deep",
                "compute a part of it ahead and pass it as an array in logits_params",
            )
        node = self._joined("||")
        mark = self._take("?")
        if mark is not None:
            first = self._expression()
            self._require(":", mark)
            node = self._choice(mark, node, first, self._expression())
        elif (word := self._take("if")) is not None:
            condition = self._joined("||")
            self._require("else", word)
            node = self._choice(word, condition, node, self._expression())
        self._depth -= 1
        return node

    def _joined(self, mark: str) -> Node:
        """Conditions joined by || or &&."""
        parse_part = self._condition if mark == "&&" else lambda: self._joined("&&")
        node = parse_part()
        while (token := self._take(mark)) is not None:
            other = parse_part()
            for x in (node, other):
                self._require_condition(x, f"{mark} joins conditions")
            node = self._node(mark, BOOL, (node, other), token)
        return node

    def _condition(self) -> Node:
        token = self._take("not")
        if token is None:
            return self._comparison()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(token, f"has more than {MAX_DEPTH} nots", "leave out those that cancel")
        node = self._condition()
        self._depth -= 1
        self._require_condition(node, "not negates a condition")
        return self._node("!", BOOL, (node,), token)

    def _comparison(self) -> Node:
        node = self._sum()
        token = self._take(*COMPARISONS)
        if token is None:
            return node
        other = self._sum()
        for x in (node, other):
            self._require_number(x, f"{token.text} compares numbers")
        return self._node(token.text, BOOL, (node, other), token)

    def _sum(self) -> Node:
        node = self._product()
        while (token := self._take("+", "-")) is not None:
            node = self._arithmetic(token, node, self._product())
        return node

    def _product(self) -> Node:
        node = self._unary()
        while (token := self._take("*", "/", "//", "%")) is not None:
            other = self._unary()
            node = (self._arithmetic if token.text in "*/" else self._whole)(token, node, other)
        return node

    def _unary(self) -> Node:
        token = self._take("-", "+", "!")
        if token is None:
            return self._primary()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(token, f"has more than {MAX_DEPTH} signs", "leave out those that cancel")
        node = self._unary()
        self._depth -= 1
        if token.text == "!":
            self._require_condition(node, "! negates a condition")
            return self._node("!", BOOL, (node,), token)
        self._require_number(node, f"{token.text} takes a number")
        if token.text == "+":
            return node
        if node.op == "value" and not isinstance(node.value, (str, type(None))):
            return self._node("value", node.type, (), token, -node.value)
        return self._node("negate", node.type, (node,), token)

    def _primary(self) -> Node:
        token = self._next
        if token.kind == "number":
            self._place += 1
            return self._number(token)
        if token.kind == "name":
            self._place += 1
            return self._named(token)
        opened = self._take("(")
        if opened is None:
            if token.kind == "mark" and token.text != "?":
                self._fail(token, f"has {token.text!r}", "wanted a number, a name or '(' there")
            self._unexpected(token)
        node = self._expression()
        self._require(")", opened)
        return node

    def _number(self, token: _Token) -> Node:
        text = token.text
        if text.isdigit():
            if int(text) > _INT32_MAX:
                self._fail(token, f"has {text}", f"wanted at most {_INT32_MAX}, or {text}.0")
            return self._node("value", INT, (), token, int(text))
        with np.errstate(over="ignore"):
            number = float(np.float32(float(text.removesuffix("f"))))
        if not np.isfinite(number):
            self._fail(token, f"has {text}", "wanted a number that float32 holds")
        return self._node("value", FLOAT, (), token, number)

    def _named(self, token: _Token) -> Node:
        name = token.text
        if name in ("true", "false"):
            return self._node("value", BOOL, (), token, name == "true")
        opened = self._take("(")
        if opened is not None:
            return self._call(token, self._arguments(")", opened))
        opened = self._take("[")
        if opened is not None:
            return self._element(token, self._arguments("]", opened))
        if name in VARIABLES:
            return self._node("variable", VARIABLES[name], (), token, name)
        if name in FUNCTIONS:
            self._fail(token, f"names the function {name!r}", f"call it: {name}(...)")
        parameter = self._parameter(token)
        if parameter.ndim:
            axes = ", ".join(("kv_idx", "kv_idx", "q_row", "kv_idx")[: parameter.ndim])
            self._fail(
                token,
                f"reads the array {name!r} of {parameter.ndim} axes without an index",
                f"write {name}[...] with an index for each axis, such as {name}[{axes}]",
            )
        return self._node("number", parameter.type, (), token, self._slots[name])

    def _arguments(self, closing: str, opened: _Token) -> tuple[Node, ...]:
        args: list[Node] = []
        if self._take(closing) is not None:
            return ()
        args.append(self._expression())
        while self._take(",") is not None:
            args.append(self._expression())
        self._require(closing, opened)
        return tuple(args)

    def _parameter(self, token: _Token) -> Parameter:
        name = token.text
        if name not in self._parameters:
            habit = _HABITS.get(name)
            have = ", ".join([*VARIABLES, *self._parameters])
            remedy = f"wanted one of {have}, or a number or array of that name in logits_params"
            self._fail(token, f"has no {name!r}", f"write {habit}" if habit else remedy)
        return self._parameters[name]

    # --- Operations and their types ---

    def _node(
        self,
        op: str,
        type: str,
        args: tuple[Node, ...],
        token: _Token,
        value: int | float | bool | str | None = None,
    ) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fail(
                token,
                f"has more than {MAX_NODES} operations",
                "compute a part of it ahead and pass it as an array in logits_params",
            )
        return Node(op, type, args, value, token.column)

    def _require_condition(self, node: Node, why: str) -> None:
        if node.type != BOOL:
            self._fail(
                node, f"has {_TYPE_NAMES[node.type]}", f"{why}; compare it, as in x != 0 or x > 0"
            )

    def _require_number(self, node: Node, why: str) -> None:
        if node.type == BOOL:
            self._fail(node, "has a condition", f"{why}; write where(condition, 1, 0)")

    def _arithmetic(self, token: _Token, a: Node, b: Node) -> Node:
        for x in (a, b):
            self._require_number(x, f"{token.text} takes numbers")
        if token.text == "/":
            if a.type == b.type == INT:
                self._fail(
                    token,
                    "divides integers by '/'",
                    "write // for the whole part, or make one of them real (2 as 2.0, x as 1.0 * x)"
                    " for a fraction",
                )
            return self._node("/", FLOAT, (a, b), token)
        return self._node(token.text, self._common(a, b), (a, b), token)

    def _whole(self, token: _Token, a: Node, b: Node) -> Node:
        """// and %, of integers by a positive number that the call knows."""
        for x in (a, b):
            if x.type != INT:
                self._fail(
                    x,
                    f"has {_TYPE_NAMES[x.type]}",
                    f"{token.text} takes integers; pass an int in logits_params, or write floor(x)",
                )
        is_known = (b.op == "value" and isinstance(b.value, int) and b.value > 0) or (
            b.op == "number"
        )
        if not is_known:
            self._fail(
                b,
                f"has a divisor of {token.text} that may be 0 or negative",
                "wanted a positive integer, or the name of one in logits_params",
            )
        return self._node(token.text, INT, (a, b), token)

    @staticmethod
    def _common(a: Node, b: Node) -> str:
        return FLOAT if FLOAT in (a.type, b.type) else INT

    def _choice(self, token: _Token, condition: Node, a: Node, b: Node) -> Node:
        self._require_condition(condition, "a choice asks a condition")
        if (a.type == BOOL) != (b.type == BOOL):
            self._fail(
                b if a.type != BOOL else a,
                "chooses between a number and a condition",
                "wanted two numbers or two conditions",
            )
        type = BOOL if a.type == BOOL else self._common(a, b)
        return self._node("where", type, (condition, a, b), token)

    def _call(self, token: _Token, args: tuple[Node, ...]) -> Node:
        name = token.text
        if name not in FUNCTIONS:
            habit = _HABITS.get(name)
            wanted = (
                f"write {habit}" if habit in FUNCTIONS else f"wanted one of {', '.join(FUNCTIONS)}"
            )
            self._fail(token, f"calls {name!r}, which is no function", wanted)
        if len(args) != FUNCTIONS[name]:
            count = f"{len(args)} argument{'' if len(args) == 1 else 's'}"
            remedy = f"wanted {FUNCTIONS[name]}"
            if name in ("min", "max") and len(args) > 2:
                remedy = f"nest them: {name}({name}(a, b), c)"
            self._fail(token, f"calls {name} with {count}", remedy)
        if name == "where":
            condition, a, b = args
            return self._choice(token, condition, a, b)
        for x in args:
            self._require_number(x, f"{name} takes numbers")
        type = FLOAT
        if name in _KEEP_INTEGERS and all(x.type == INT for x in args):
            type = INT
        return self._node(name, type, args, token)

    def _element(self, token: _Token, indices: tuple[Node, ...]) -> Node:
        name = token.text
        if name in VARIABLES or name in FUNCTIONS:
            self._fail(token, f"indexes {name!r}, which is no array", "name an array of yours")
        parameter = self._parameter(token)
        if not parameter.ndim:
            self._fail(token, f"indexes the number {name!r}", f"write {name} without [...]")
        if len(indices) != parameter.ndim:
            self._fail(
                token,
                f"gives {name!r} {len(indices)} indices",
                f"it has {parameter.ndim} axes; wanted an index for each, as {name}[i, j]",
            )
        for index in indices:
            if index.type != INT:
                self._fail(index, f"has {_TYPE_NAMES[index.type]}", "an index is an integer")
        if self._next.text == "[":
            self._fail(self._next, "has '['", f"write {name}[i, j] for more axes")
        return self._node("element", parameter.type, indices, token, self._slots[name])

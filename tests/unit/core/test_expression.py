"""The language of user-written logits: what it takes, what it refuses and where it points."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cupyattn.core import dtypes, logits
from cupyattn.core.expression import MAX_CHARACTERS, MAX_NODES
from cupyattn.errors import ArgumentError, ExpressionError
from cupyattn.reference.expression import evaluate

ARRAYS = (
    ("bias", dtypes.float32, 1),
    ("rel", dtypes.float16, 2),
    ("doc", dtypes.int32, 1),
    ("seen", dtypes.bool_, 2),
)
NUMBERS = (("cap", dtypes.float32, 30.0), ("size", dtypes.int32, 4), ("zero", dtypes.int32, 0))
RNG = np.random.default_rng(0)
VALUES = {
    "bias": RNG.standard_normal(4).astype(np.float32),
    "rel": RNG.standard_normal((5, 9)).astype(np.float16),
    "doc": RNG.integers(0, 3, 9).astype(np.int32),
    "seen": RNG.random((5, 9)) < 0.5,
}


def make(transform=None, mask=None):
    """The expressions, with those parameters that the texts name."""
    text = f"{transform} {mask}"
    return logits.make(
        transform,
        mask,
        tuple(x for x in ARRAYS if x[0] in text),
        tuple(x for x in NUMBERS if x[0] in text),
    )


def variables():
    """q of 5 rows over 9 keys, 4 heads of 2 KV heads, in request 2."""
    row = np.arange(5)[:, None]
    return {
        "logit": RNG.standard_normal((4, 5, 9)) * 3,
        "q_row": row,
        "q_token": row + 7,
        "q_idx": row + 4,
        "kv_idx": np.arange(9),
        "head": np.arange(4)[:, None, None],
        "kv_head": np.arange(4)[:, None, None] // 2,
        "batch": 2,
        "q_len": 5,
        "kv_len": 9,
    }


def value(made, node, given):
    return evaluate(node, given, [VALUES[x.name] for x in made.arrays], made.values)


# --- values ---

# A text, and the same in Python over the variables and parameters by name.
GOOD = [
    ("logit", None),
    ("2 * logit - 1", lambda v: 2 * v.logit - 1),
    ("-logit", lambda v: -v.logit),
    ("+logit*2.5f", lambda v: 2.5 * v.logit),
    ("cap * tanh(logit / cap)", lambda v: 30 * np.tanh(v.logit / 30)),
    ("logit + bias[head]", lambda v: v.logit + v.bias[v.head]),
    ("logit + bias[head] * (kv_idx - q_idx)",
     lambda v: v.logit + v.bias[v.head] * (v.kv_idx - v.q_idx)),
    ("logit + rel[q_row, kv_idx]", lambda v: v.logit + v.rel[v.q_row, v.kv_idx]),
    ("where(doc[q_idx] == doc[kv_idx], logit, -1e4)",
     lambda v: np.where(v.doc[v.q_idx] == v.doc[v.kv_idx], v.logit, -1e4)),
    ("kv_idx % size == 0 ? logit : logit - 1",
     lambda v: np.where(v.kv_idx % 4 == 0, v.logit, v.logit - 1)),
    ("1 < 2 ? 3 : 4 < 5 ? logit : 6", lambda v: 3 + 0 * v.logit),
    ("logit if kv_idx % size == 0 else logit - 1",
     lambda v: np.where(v.kv_idx % 4 == 0, v.logit, v.logit - 1)),
    ("1 if kv_idx < 1 else 2 if kv_idx < 2 or kv_idx == 5 else logit",
     lambda v: np.where(v.kv_idx < 1, 1,
                        np.where((v.kv_idx < 2) | (v.kv_idx == 5), 2, v.logit))),
    ("logit if not kv_idx == 3 and not (True and False) else 2.0",
     lambda v: np.where(v.kv_idx != 3, v.logit, 2.0)),
    ("(q_idx - kv_idx) // 3 * 0.5 + logit", lambda v: v.logit + (v.q_idx - v.kv_idx) // 3 * 0.5),
    ("(kv_idx - q_idx) % 3 + logit", lambda v: v.logit + (v.kv_idx - v.q_idx) % 3),
    ("max(min(logit, 1), -1)", lambda v: np.clip(v.logit, -1, 1)),
    ("abs(kv_idx - q_idx) * -0.5 + logit", lambda v: v.logit - 0.5 * abs(v.kv_idx - v.q_idx)),
    ("log(1 + exp(logit))", lambda v: np.log1p(np.exp(v.logit))),
    ("log2(exp2(logit))", lambda v: v.logit),
    ("sqrt(abs(logit)) + floor(logit)", lambda v: np.sqrt(abs(v.logit)) + np.floor(v.logit)),
    ("sigmoid(logit)", lambda v: 1 / (1 + np.exp(-v.logit))),
    ("log_sigmoid(logit)", lambda v: -np.log1p(np.exp(-v.logit))),
    ("logit * (1 + head) / (kv_head + 2.0)", lambda v: v.logit * (1 + v.head) / (v.kv_head + 2)),
    ("logit + batch * 10 + q_len + kv_len", lambda v: v.logit + 20 + 5 + 9),
    ("10 - 4 - 3 + logit * 0", lambda v: 3 + 0 * v.logit),
    ("2 * 3.0 / 4 * 2 + logit * 0", lambda v: 3 + 0 * v.logit),
    ("- - logit", lambda v: v.logit),
    ("where(seen[q_row, kv_idx], logit, 0)",
     lambda v: np.where(v.seen[v.q_row, v.kv_idx], v.logit, 0)),
    # An index beyond an array reads the element at its end.
    ("logit + doc[kv_idx + 1000]", lambda v: v.logit + v.doc[8]),
    ("logit + doc[kv_idx - 1000]", lambda v: v.logit + v.doc[0]),
    # Integers wrap at 32 bits.
    ("logit * 0 + (2147483647 + kv_len)", lambda v: 0 * v.logit - 2147483640),
]  # fmt: skip


class Names:
    def __init__(self, given):
        self.__dict__.update({k: np.asarray(x) for k, x in given.items()}, **VALUES)
        self.bias, self.rel = (VALUES[name].astype(np.float64) for name in ("bias", "rel"))


@pytest.mark.parametrize(("text", "same"), GOOD, ids=[text for text, _ in GOOD])
def test_a_transform_is_what_python_says(text, same):
    made, given = make(text), variables()
    if same is None:
        assert made.transform is None  # the logit itself
        return
    assert made.transform.type in ("float", "int")
    found = np.broadcast_to(value(made, made.transform, given), given["logit"].shape)
    wanted = np.broadcast_to(same(Names(given)), found.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


MASKS = [
    ("kv_idx <= q_idx", lambda v: v.kv_idx <= v.q_idx),
    ("kv_idx <= q_idx && kv_idx > q_idx - size",
     lambda v: (v.kv_idx <= v.q_idx) & (v.kv_idx > v.q_idx - 4)),
    ("!(kv_idx == 3) || q_row != 1", lambda v: (v.kv_idx != 3) | (v.q_row != 1)),
    ("doc[q_idx] == doc[kv_idx]", lambda v: v.doc[v.q_idx] == v.doc[v.kv_idx]),
    ("seen[q_row, kv_idx]", lambda v: v.seen[v.q_row, v.kv_idx]),
    ("kv_idx < 2 || kv_idx >= 4 && kv_idx < 6",
     lambda v: (v.kv_idx < 2) | (v.kv_idx >= 4) & (v.kv_idx < 6)),
    ("kv_idx == 0 ? true : kv_idx + head > 3", lambda v: (v.kv_idx == 0) | (v.kv_idx + v.head > 3)),
    ("bias[kv_idx % 4] > 0.1", lambda v: v.bias[v.kv_idx % 4] > np.float32(0.1)),
    ("q_idx // 2 == kv_idx // 2", lambda v: v.q_idx // 2 == v.kv_idx // 2),
    ("false", lambda v: v.kv_idx < 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "same"), MASKS, ids=[text for text, _ in MASKS])
def test_a_mask_is_what_python_says(text, same):
    made, given = make(None, text), variables()
    found = np.broadcast_to(value(made, made.mask, given), (4, 5, 9))
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, np.broadcast_to(same(Names(given)), (4, 5, 9)))


def random_text(draw: random.Random, kind: str, depth: int) -> tuple[str, str]:
    """An expression of our language, fully in parentheses, and the same for Python."""
    if kind == "bool":
        if depth == 0:
            return draw.choice([("true", "True"), ("(kv_idx < q_idx)", "(kv_idx < q_idx)")])
        if draw.random() < 0.5:
            a, b = (random_text(draw, draw.choice(["int", "float"]), depth - 1) for _ in range(2))
            op = draw.choice(["<", "<=", ">", ">=", "!=", "=="])
            return f"({a[0]} {op} {b[0]})", f"({a[1]} {op} {b[1]})"
        a, b = (random_text(draw, "bool", depth - 1) for _ in range(2))
        ours, theirs = draw.choice([("&&", "&"), ("||", "|")])
        return f"({a[0]} {ours} !{b[0]})", f"({a[1]} {theirs} np.logical_not({b[1]}))"
    if depth == 0:
        if kind == "int":
            text = draw.choice(["q_idx", "kv_idx", "head", "batch", str(draw.randrange(9))])
            return text, text
        return draw.choice([("logit", "logit"), ("bias[head]", "bias[head]"), ("0.5", "0.5")])
    pick = draw.randrange(4)
    if pick == 0:
        c = random_text(draw, "bool", depth - 1)
        a, b = (random_text(draw, kind, depth - 1) for _ in range(2))
        return f"({c[0]} ? {a[0]} : {b[0]})", f"np.where({c[1]}, {a[1]}, {b[1]})"
    if pick == 1 and kind == "float":
        a = random_text(draw, "float", depth - 1)
        name = draw.choice(["tanh", "abs", "floor"])
        return f"{name}({a[0]})", f"np.{name}({a[1]})"
    if pick == 1:
        a = random_text(draw, "int", depth - 1)
        op, by = draw.choice(["//", "%"]), draw.randrange(1, 7)
        return f"({a[0]} {op} {by})", f"({a[1]} {op} {by})"
    if pick == 2:
        a, b = (random_text(draw, kind, depth - 1) for _ in range(2))
        name = draw.choice(["min", "max"])
        return f"{name}({a[0]}, {b[0]})", f"np.{name}imum({a[1]}, {b[1]})"
    a, b = (random_text(draw, kind, depth - 1) for _ in range(2))
    op = draw.choice("+-*")
    return f"({a[0]} {op} {b[0]})", f"({a[1]} {op} {b[1]})"


@pytest.mark.parametrize("seed", range(60))
def test_random_expressions_are_what_python_says(seed):
    draw = random.Random(seed)
    kind = draw.choice(["bool", "float"])
    ours, theirs = random_text(draw, kind, 4)
    try:
        made = make(mask=ours) if kind == "bool" and "logit" not in ours else None
        made = made or make(f"where({ours}, logit, 1)" if kind == "bool" else ours)
    except ExpressionError as error:
        assert f"more than {MAX_NODES}" in str(error) or f"at most {MAX_CHARACTERS}" in str(error)
        return
    node = made.mask or made.transform
    if node is None:
        return
    if made.mask is None and kind == "bool":
        theirs = f"np.where({theirs}, logit, 1)"
    given = variables()
    with np.errstate(all="ignore"):
        wanted = eval(theirs, {"np": np, **vars(Names(given))})
    found = value(made, node, given)
    np.testing.assert_allclose(
        *np.broadcast_arrays(found, np.asarray(wanted)), rtol=1e-9, atol=1e-9
    )


def test_spaces_and_names_of_the_text_do_not_tell_expressions_apart():
    a, b = make("cap*tanh(logit/cap)"), make(" cap * tanh( logit / (cap) ) ")
    assert a == b and hash(a) == hash(b)
    assert a != make("cap * tanh(logit / cap) + 1")
    assert len({a, b, a.compiled}) == 2
    other = logits.make("c + logit", None, (), (("c", dtypes.float32, 1.0),))
    same_kernel = logits.make("c + logit", None, (), (("c", dtypes.float32, 2.0),))
    assert other != same_kernel and other.compiled == same_kernel.compiled
    as_int = logits.make("c + logit", None, (), (("c", dtypes.int32, 1),))
    assert other != as_int and other.compiled != as_int.compiled


@pytest.mark.parametrize(
    ("text", "cap", "factor"),
    [
        ("cap * tanh(logit / cap)", 30.0, 1.0),
        ("tanh(logit / cap) * cap", 30.0, 1.0),
        ("20 * tanh(logit / 20)", 20.0, 1.0),
        ("-2.5 * tanh(logit / -2.5)", 2.5, 1.0),
        ("20 * tanh(logit / 25)", 20.0, 0.8),
        ("20 * tanh(2 * logit / 20)", 20.0, 2.0),
        ("20 * tanh(logit * 0.5)", 20.0, 10.0),
        ("tanh(logit)", 1.0, 1.0),
        ("-tanh(-logit)", 1.0, 1.0),
        ("2 * cap * tanh(logit * (0.5 / cap))", 60.0, 1.0),
        ("20 * tanh(-logit / 20)", 0.0, 0.0),
        ("20 * tanh(20 / logit)", 0.0, 0.0),
        ("0 * tanh(logit)", 0.0, 0.0),
        ("tanh(logit + 1)", 0.0, 0.0),
        ("tanh(kv_idx * logit)", 0.0, 0.0),
        ("cap * tanh(logit / cap) + 1", 0.0, 0.0),
        ("bias[head] * tanh(logit / bias[head])", 0.0, 0.0),
        ("2 * logit", 0.0, 0.0),
    ],
)
def test_the_soft_cap_is_recognised(text, cap, factor):
    assert make(text).soft_cap == pytest.approx((cap, factor))


def test_facts_that_kernels_are_chosen_by():
    made = make("logit + bias[head]", "doc[q_idx] == doc[kv_idx]")
    assert not made.mask_reads_heads
    assert make(mask="kv_idx >= q_idx - head").mask_reads_heads
    assert made.reads("kv_idx") and not made.reads("batch")


# --- what is refused ---

# A text, the column that the error points at, and what it says. With "mask:" it is a mask.
BAD = [
    ("", 1, "is empty"),
    ("   ", 4, "is empty"),
    ("logit +", 8, "wanted a number, a name or '('"),
    ("* logit", 1, "wanted a number, a name or '('"),
    ("logit logit", 7, "wanted an operator, or the end"),
    ("tanh(logit", 11, "wanted ')' for the '(' at column 5"),
    ("(logit", 7, "wanted ')'"),
    ("logit)", 6, "has ')'"),
    ("bias[head", 10, "wanted ']' for the '['"),
    ("logit ? 1", 10, "wanted ':' for the '?'"),
    ("logit ? 1 : 2", 1, "a choice asks a condition"),
    ("bias", 1, "without an index"),
    ("bias[head, kv_idx]", 1, "it has 1 axes"),
    ("rel[q_row]", 1, "it has 2 axes"),
    ("rel[q_row][kv_idx]", 1, "it has 2 axes"),
    ("bias[head][1]", 11, "for more axes"),
    ("bias[logit]", 6, "an index is an integer"),
    ("bias[1.0]", 6, "an index is an integer"),
    ("bias[]", 1, "0 indices"),
    ("cap[head]", 1, "write cap without"),
    ("logit[0]", 1, "is no array"),
    ("tanh", 1, "call it: tanh(...)"),
    ("tanh()", 1, "wanted 1"),
    ("tanh(logit, 1)", 1, "wanted 1"),
    ("max(logit, 1, 2)", 1, "nest them"),
    ("where(logit, 1, 2)", 7, "a choice asks a condition"),
    ("where(true, logit)", 1, "wanted 3"),
    ("where(true, logit, kv_idx < 1)", 27, "two numbers or two conditions"),
    ("sin(logit)", 1, "wanted one of abs"),
    ("tanhf(logit)", 1, "write tanh"),
    ("logit.real", 6, "plain name"),
    ("logits", 1, "write logit"),
    ("qo_idx + logit", 1, "write q_row"),
    ("alpha * logit", 1, "in logits_params"),
    ("kv_idx / 2", 8, "write //"),
    ("kv_idx // 0", 11, "may be 0 or negative"),
    ("kv_idx // -2", 11, "may be 0 or negative"),
    ("kv_idx % head", 10, "may be 0 or negative"),
    ("kv_idx // 2.0", 11, "takes integers"),
    ("logit // 2", 1, "takes integers"),
    ("kv_idx % zero", 8, "wanted a positive integer"),
    ("logit + (kv_idx < 3)", 17, "write where(condition, 1, 0)"),
    ("-(kv_idx < 3)", 10, "takes a number"),
    ("!logit", 2, "compare it"),
    ("kv_idx < 3", 8, "is a condition"),
    ("1 < kv_idx < 3", 12, "join them by &&"),
    ("(1 < 2) == (2 < 3) ? 1 : 2", 4, "compares numbers"),
    ("logit & 1", 7, "write &&"),
    ("logit ^ 2", 7, "a product for a power"),
    ("logit ** 2", 8, "wanted a number, a name or '('"),
    ("logit = 1", 7, "write =="),
    ("logit; 1", 6, "one expression"),
    ("'logit'", 1, "numbers only"),
    ("logit # no comments", 7, "the language has numbers"),
    ("λ * logit", 1, "the language has numbers"),
    ("lambda: 1", 1, "in logits_params"),
    ("__import__(0)", 1, "is no function"),
    ("1e99 + logit", 1, "float32"),
    ("3000000000 + logit", 1, "or 3000000000.0"),
    ("logit 1 if true else 2", 7, "wanted an operator"),
    ("logit if true", 14, "wanted 'else' for the 'if' at column 7"),
    ("logit if kv_idx else 2", 10, "compare it"),
    ("if true: 1", 1, "wanted a number"),
    ("logit or 1", 1, "compare it"),
    ("not logit", 5, "compare it"),
    ("1 + not true", 5, "wanted a number"),
    ("else", 1, "wanted a number"),
    ("logit\n+", 8, "wanted a number"),
    ("mask: kv_idx", 1, "wanted a condition"),
    ("mask: kv_idx + q_idx", 8, "wanted a condition"),
    ("mask: logit > 0", 1, "known before the logits"),
    ("mask: kv_idx < 3 && q_idx", 15, "compare it"),
    ("mask: kv_idx and q_idx", 1, "compare it"),
    ("mask: bias[head] && true", 1, "compare it"),
]


@pytest.mark.parametrize(
    ("text", "column", "says"), BAD, ids=[f"{i} {x[0]!r}" for i, x in enumerate(BAD)]
)
def test_a_bad_expression_says_where_and_what_to_write(text, column, says):
    is_mask = text.startswith("mask: ")
    text = text.removeprefix("mask: ")
    with pytest.raises(ExpressionError) as caught:
        make(*((None, text) if is_mask else (text, None)))
    error = caught.value
    assert isinstance(error, ArgumentError) and isinstance(error, ValueError)
    assert says in str(error), str(error)
    assert error.column == column, str(error)
    if text.strip():
        assert ("logits_params" in str(error)) or (
            "mask_fn" if is_mask else "logits_transform"
        ) in str(error)


def test_long_and_deep_expressions_are_refused_without_a_crash():
    for text, says in (
        ("1 + " * 400 + "logit", str(MAX_CHARACTERS)),
        ("+".join(["logit"] * (MAX_NODES // 2 + 1)), str(MAX_NODES)),
        ("(" * 100 + "logit" + ")" * 100, "parentheses deep"),
        ("-" * 200 + "logit", "signs"),
        ("true?" * 90 + "1" + ":1" * 90, "parentheses deep"),
    ):
        with pytest.raises(ExpressionError, match=says):
            make(text)


def test_parameters_must_be_read_and_be_few():
    with pytest.raises(ExpressionError, match="no expression reads 'cap'"):
        logits.make("logit * 2", None, (), NUMBERS[:1])
    many = tuple((f"n{i}", dtypes.float32, 1.0) for i in range(9))
    with pytest.raises(ExpressionError, match="at most 8"):
        logits.make(" + ".join(["logit", *(x[0] for x in many)]), None, (), many)


@pytest.mark.parametrize("text", [3, b"logit", ["logit"], lambda: 1])
def test_a_text_is_a_string(text):
    from cupyattn.core import expression

    with pytest.raises(ExpressionError, match="wanted an expression as a string"):
        expression.parse(text, "mask_fn", {}, {})


WINDOWS = [
    ("kv_idx <= q_idx", (-1, 0), None),
    ("q_idx >= kv_idx", (-1, 0), None),
    ("kv_idx < q_idx + 1", (-1, 0), None),
    ("kv_idx - q_idx <= 7", (-1, 7), None),
    ("0 <= 7 + q_idx - kv_idx", (-1, 7), None),
    ("kv_idx >= q_idx - size", (4, -1), None),
    ("q_idx - kv_idx < size", (3, -1), None),
    ("-kv_idx + q_idx <= 2 + size", (6, -1), None),
    ("kv_idx <= q_idx && kv_idx > q_idx - size", (3, 0), None),
    ("kv_idx <= q_idx + 5 && (kv_idx <= q_idx + 2 && kv_idx >= q_idx - 9)", (9, 2), None),
    ("kv_idx <= q_idx && doc[q_idx] == doc[kv_idx]", (-1, 0), "doc[q_idx] == doc[kv_idx]"),
    ("seen[q_row, kv_idx] && kv_idx <= q_idx && head < 2", (-1, 0),
     "seen[q_row, kv_idx] && head < 2"),
    ("abs(kv_idx - q_idx) <= 3", (3, 3), None),
    ("size > abs(q_idx - kv_idx) && kv_idx <= q_idx", (3, 0), None),
    ("abs(kv_idx - q_idx - 1) < size", (2, 4), None),
    ("abs(kv_idx - q_idx) <= head", (-1, -1), "abs(kv_idx - q_idx) <= head"),
    ("abs(kv_idx - q_idx) >= 2", (-1, -1), "abs(kv_idx - q_idx) >= 2"),
    ("abs(kv_idx - q_idx - 9) <= 2", (-1, -1), "abs(kv_idx - q_idx - 9) <= 2"),
    # These are no windows: keys ahead of a row's own alone, other places, other conditions.
    ("kv_idx < q_idx", (-1, -1), "kv_idx < q_idx"),
    ("kv_idx >= q_idx + 1", (-1, -1), "kv_idx >= q_idx + 1"),
    ("kv_idx <= q_row", (-1, -1), "kv_idx <= q_row"),
    ("kv_idx <= 2 * q_idx", (-1, -1), "kv_idx <= 2 * q_idx"),
    ("kv_idx <= q_idx || kv_idx < 3", (-1, -1), "kv_idx <= q_idx || kv_idx < 3"),
    ("kv_idx == q_idx", (-1, -1), "kv_idx == q_idx"),
    ("kv_idx * 1.0 <= q_idx", (-1, -1), "kv_idx * 1.0 <= q_idx"),
    ("kv_idx <= q_idx + head", (-1, -1), "kv_idx <= q_idx + head"),
    ("kv_idx <= 4", (-1, -1), "kv_idx <= 4"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "window", "rest"), WINDOWS, ids=[x[0] for x in WINDOWS])
def test_windows_are_recognised(text, window, rest):
    left, right, node = make(None, text).split_windows()
    assert (left, right) == window
    if rest is None:
        assert node is None
    else:
        # Numbers that the rest does not read stay among the parameters.
        names = [x for x in NUMBERS if x[0] in text]
        arrays = [x for x in ARRAYS if x[0] in text]
        spelled = logits.make(None, text, tuple(arrays), tuple(names)).mask
        assert node == (spelled if rest == text else make(None, rest).mask)
    given = variables()
    made = make(None, text)
    whole = np.broadcast_to(value(made, made.mask, given), (4, 5, 9))
    again = np.ones((4, 5, 9), bool) if node is None else value(made, node, given)
    distance = given["kv_idx"] - given["q_idx"]
    again = again & ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    np.testing.assert_array_equal(whole, np.broadcast_to(again, whole.shape))

"""The CUDA text of user-written logits: what a kernel's Config holds."""

from __future__ import annotations

import math
import operator
import re

import numpy as np
import pytest

from cupyattn import jit
from cupyattn.core import dtypes, logits
from cupyattn.core.expression_cuda import members
from cupyattn.jit.source import Members
from cupyattn.reference.expression import evaluate

LOG2_E = math.log2(math.e)
ARRAYS = (("s", dtypes.float32, 1), ("rel", dtypes.bfloat16, 2), ("seen", dtypes.bool_, 2))
NUMBERS = (("c", dtypes.float32, 3.0), ("w", dtypes.int32, 8))


def make(transform=None, mask=None):
    named = re.findall(r"\w+", f"{transform} {mask}")
    return logits.make(
        transform,
        mask,
        tuple(x for x in ARRAYS if x[0] in named),
        tuple(x for x in NUMBERS if x[0] in named),
    )


def body(name, transform=None, mask=None):
    """What the function `name` returns."""
    text = members(make(transform, mask))
    return re.search(rf"{name}\(.*?return (.*?);\n", text, re.S)[1]


def test_no_expression_is_no_member():
    assert members(None) == ""
    assert members(make("logit")) == ""


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("2 * logit", "(2.0f * at.logit)"),
        ("-logit - 1.5", "((-at.logit) - 1.5f)"),
        ("logit / c", "at.divide_reals(at.logit, at.real(0))"),
        ("tanh(logit)", "at.tanh(at.logit)"),
        ("logit * w", "(at.logit * static_cast<float>(at.integer(0)))"),
        ("max(logit, kv_idx)", "at.greatest(at.logit, (static_cast<float>(at.kv_first) + 1.0f * "
         "static_cast<float>(at.kv_step)))"),
        ("logit + (q_idx - 2 * kv_idx)", "(at.logit + (static_cast<float>(at.subtract(at.q_idx, "
         "at.multiply(2, at.kv_first))) + (-2.0f) * static_cast<float>(at.kv_step)))"),
        ("logit + kv_idx * q_idx", "(at.logit + static_cast<float>(at.multiply(at.kv_idx(), "
         "at.q_idx)))"),
        ("logit + c * (kv_idx - q_idx)", "(at.logit + (at.real(0) * static_cast<float>("
         "at.subtract(at.kv_first, at.q_idx)) + at.real(0) * (1.0f * "
         "static_cast<float>(at.kv_step))))"),
        ("where(kv_idx == w, logit, 3)", "((at.kv_idx() == at.integer(0)) ? at.logit : 3.0f)"),
        ("logit + kv_idx // w", "(at.logit + static_cast<float>(at.floor_divide(at.kv_idx(), "
         "at.integer(0))))"),
    ],
)  # fmt: skip
def test_transforms(text, cuda):
    assert body("transform", text) == cuda


def test_what_no_key_changes_is_a_row_value():
    assert body("row_value", "logit + s[head] * exp(c)") == (
        "(at.template element<float>(0, at.head) * at.exp(at.real(0)))"
    )
    assert body("transform", "logit + s[head] * exp(c)") == "(at.logit + at.row_value)"
    assert body("row_value", "logit * 2 + c") == "0.0f"
    # An array of integers or conditions is no real part.
    assert body("row_value", "where(seen[q_row, 0], logit, 1)") == "0.0f"


def test_masks_and_indices():
    assert body("sees", None, "seen[q_row, kv_idx] || kv_idx <= q_idx") == (
        "(at.template element<bool>(0, at.q_row, at.inside(0, 1, at.kv_idx())) || "
        "(at.kv_idx() <= at.q_idx))"
    )
    assert "kReadsHeads = false" in members(make(None, "kv_idx <= q_idx"))
    assert "kReadsHeads = true" in members(make(None, "kv_idx <= head"))
    assert "element<cupyattn::bfloat16_t>(0, at.head, at.inside(0, 1, " in members(
        make("logit + rel[head, kv_idx - q_idx]")
    )


def test_text_of_the_caller_is_nowhere():
    secret = logits.make(
        "logit * xyzzy_1 + xyzzy_2[head]", "kv_idx < xyzzy_3",
        (("xyzzy_2", dtypes.float32, 1),),
        (("xyzzy_1", dtypes.float32, 1.0), ("xyzzy_3", dtypes.int32, 5)),
    )  # fmt: skip
    text = members(secret)
    assert "xyzzy" not in text
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    assert not re.search(r"[#\"'\\;]{2}|#|\"|'|\\", text) and "asm" not in words


def test_a_config_holds_the_members():
    text = members(make("2 * logit"))
    config = jit.Config({"kTransform": True, "LogitsExpression": Members(text)})
    assert "struct LogitsExpression {\n    template" in config.text and text in config.text
    assert config != jit.Config({"kTransform": True, "LogitsExpression": Members()})
    assert "struct LogitsExpression {};" in jit.Config({"LogitsExpression": Members()}).text
    assert config.tag == "LogitsExpression_Transform"
    assert config.as_json() == {"LogitsExpression": text, "kTransform": True}


def test_equal_expressions_are_one_kernel():
    a = members(make("s[head]+ logit").compiled)
    assert a == members(make("(s[head]) + logit").compiled)
    other = logits.make("bias[head] + logit", None, (("bias", dtypes.float32, 1),))
    assert members(other) == a


# --- the functions, as Python ---


class At:
    """kernels/cupyattn/shared/logits_expression.cuh for one logit, in float64."""

    s, rel = np.array([0.5, -2.0, 3.0]), np.arange(12.0).reshape(3, 4) - 5

    def __init__(self, draw, made):
        self.q_idx, self.q_row, self.kv_first, self.kv_step = draw.integers(0, 50, 4).tolist()
        self.head = int(draw.integers(0, 3))
        self.product, self.scale, self.shift = draw.standard_normal(3).tolist()
        self.base2_scale = self.scale * LOG2_E
        self.logit = self.product * self.scale
        self.arrays = [getattr(self, x.name) for x in made.arrays]
        self.values = made.values

    def kv_idx(self):
        return self.kv_first + self.kv_step

    def real(self, slot):
        return self.values[slot]

    integer = real

    def inside(self, slot, axis, index):
        return min(max(index, 0), self.arrays[slot].shape[axis] - 1)

    def element(self, slot, *indices):
        return float(self.arrays[slot][indices])

    add, subtract, multiply = map(staticmethod, (operator.add, operator.sub, operator.mul))
    divide_reals = staticmethod(operator.truediv)
    least, greatest, absolute = map(staticmethod, (min, max, abs))
    tanh, exp = map(staticmethod, (math.tanh, math.exp))


def called(name, text, at):
    """The C++ function's value, by Python's rules."""
    body = re.search(rf"{name}\(.*?return (.*?);\n", text, re.S)[1]
    body = re.sub(r"(\d\.\d+(?:e[+-]\d+)?)f\b", r"\1", body)
    body = re.sub(r"at\.template element<[\w:]+>", "at.element", body)
    body = body.replace("static_cast<float>", "float").replace("cupyattn::kLog2e", str(LOG2_E))
    names = {"at": at, "shift": at.shift, "fmaf": lambda a, b, c: a * b + c, "float": float}
    return eval(body, {"__builtins__": {}}, names)


LINEAR = [
    "2 * logit",
    "-logit",
    "logit / c - 1",
    "logit + s[head] * (kv_idx - q_idx)",
    "(logit - (kv_idx - q_idx) * 2) / c * s[head] + exp(c - kv_idx)",
    "logit - 3 * kv_idx + (q_idx - 2 * kv_idx) * c",
    "-(logit - s[head]) * (c - 0.5 * kv_idx * 2) + logit * c",
    "w * (logit + kv_idx) - -kv_idx",
    "logit + rel[head, kv_idx - q_idx] + abs(kv_idx - q_idx) * 0.1",
    "s[head] * (c * (logit + kv_idx) + tanh(logit)) + q_row",
    "logit + logit * 2 + kv_idx * kv_idx * 0.1",
    "tanh(logit) + max(logit, kv_idx) + logit / (1 + kv_idx)",
]


@pytest.mark.parametrize("source", LINEAR)
def test_the_functions_compute_what_numpy_does(source, monkeypatch):
    monkeypatch.setattr(logits, "_SHORT", 100)  # longer ones have no exponent
    made, draw = make(source), np.random.default_rng(0)
    text = members.__wrapped__(made)
    is_linear = "kIsLinear = true" in text
    # Not where logits are in other functions, or over what keys change, nor beside loads.
    assert is_linear == (source != LINEAR[-1] and "rel[" not in source)
    for _ in range(20):
        at = At(draw, made)
        at.row_value = called("row_value", text, at)
        variables = {
            "logit": at.logit, "q_idx": at.q_idx, "q_row": at.q_row, "kv_idx": at.kv_idx(),
            "head": at.head,
        }  # fmt: skip
        wanted = float(evaluate(made.transform, variables, at.arrays, at.values))
        assert called("transform", text, at) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        if is_linear:
            to_base_2 = wanted * LOG2_E + at.shift
            assert called("exponent", text, at) == pytest.approx(to_base_2, rel=1e-6, abs=1e-6)

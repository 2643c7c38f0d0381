"""The CUDA text of user-written logits: what a kernel's Config holds."""

from __future__ import annotations

import re

import pytest

from cupyattn import jit
from cupyattn.core import dtypes, logits
from cupyattn.core.expression_cuda import members
from cupyattn.jit.source import Members

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

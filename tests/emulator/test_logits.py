"""User-written logits on the kernels, on the host, against the same expressions in NumPy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.reference import alibi_slopes

from . import gpu

HEADS, KV_HEADS = 6, 2
TRANSFORM = (
    "where(kv_idx % 5 == 4, logit - rel[head, min(max(q_idx - kv_idx, 0), 40)], "
    "c * tanh(logit / c) + 0.01 * abs(kv_idx - q_idx))"
)
MASK = "doc[q_idx] == doc[kv_idx] && kv_idx > q_idx - w || q_row == 3"
BY_HEAD = "kv_idx <= q_idx && kv_idx > q_idx - 3 * (head + 1)"
ALIBI = "logit + slopes[head] * (kv_idx - q_idx)"


def params(qo_len: int, kv_len: int, *texts: str | None) -> dict[str, Any]:
    """The parameters that the texts name. Arrays end where the call's indices do."""
    rng = np.random.default_rng(1)
    everything = {
        "rel": rng.standard_normal((HEADS, 41)).astype(np.float16),
        "doc": (np.arange(kv_len) // 50).astype(np.int32),
        "slopes": alibi_slopes(HEADS).astype(np.float32),
        "seen": rng.random((qo_len, kv_len)) < 0.7,
        "c": 3.0,
        "w": 60,
    }
    named = re.findall(r"[a-z_]+", " ".join(filter(None, texts)))
    return {name: x for name, x in everything.items() if name in named}


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def compare(got: Any, wanted: Any) -> None:
    (out, lse), (exact, exact_lse) = got, wanted
    np.testing.assert_allclose(
        out.astype(np.float32), exact.astype(np.float32), rtol=4e-3, atol=4e-3
    )
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-4, atol=4e-3)


def check_single(
    qo_len: int,
    kv_len: int,
    dim: int = 64,
    transform: str | None = None,
    mask: str | None = None,
    seed: int = 0,
    is_portable: bool = False,
    **options: Any,
) -> list[str]:
    """The names of the kernels that answered."""
    rng = np.random.default_rng(0)
    q, k, v = (
        normal(rng, *s, dim) for s in ((qo_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    )
    given = {
        "logits_transform": transform,
        "mask_fn": mask,
        "logits_params": params(qo_len, kv_len, transform, mask),
        "return_lse": True,
        **options,
    }
    with gpu.plugged_in(num_sms=6, seed=seed, is_portable=is_portable) as emulated:
        got = cupyattn.single_prefill_with_kv_cache(q, k, v, **given)
    compare(got, cupyattn.single_prefill_with_kv_cache(q, k, v, **given))
    return [launch.name for launch in emulated.launches]


EXPRESSIONS = {
    "transform": (TRANSFORM, None),
    "mask": (None, MASK),
    "mask by head": (None, BY_HEAD),
    "both": (ALIBI, "seen[q_row, kv_idx]"),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_prefill_of_hopper(name: str) -> None:
    names = check_single(90, 300, 64, *EXPRESSIONS[name], seed=1)
    assert "cupyattn_prefill_sm90" in names or "prefill_sm90" in names


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_portable_prefill(name: str) -> None:
    names = check_single(90, 300, 64, *EXPRESSIONS[name], is_portable=True, seed=2)
    assert any("prefill_sm80" in x for x in names)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_few_rows(name: str) -> None:
    names = check_single(5, 700, 64, *EXPRESSIONS[name], seed=3)
    assert any("decode_sm80" in x for x in names)

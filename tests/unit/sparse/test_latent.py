"""sparse.attend over pages of latent rows: the CPU, launches, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import fake_gpu, latent_blocks

from cupyattn import sparse
from cupyattn.engine import latent_rows, listed_latent
from cupyattn.errors import ArgumentError, UnsupportedError

ATOL = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed: int) -> None:
    case = latent_blocks.Case(seed, ml_dtypes.bfloat16 if seed % 2 else np.float32)
    out, lse = sparse.attend(**case.arguments)
    want, want_lse = case.expected()
    atol = ATOL[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=atol, atol=atol)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"head_dim_v": 600}, ArgumentError, "head_dim_v: got 600, but q has 576"),
        ({"head_dim_v": 500}, UnsupportedError, "500 and 76 are not supported"),
        ({"table": None}, ArgumentError, "head_dim_v: given without one array"),
        ({"lengths": None}, ArgumentError, "lengths: got None"),
        ({"logits_soft_cap": 3.0}, UnsupportedError, "logits_soft_cap"),
        ({"output_gate": np.zeros((2, 3), np.float32)}, UnsupportedError, "output_gate"),
        ({"k_scale": np.ones(1, np.float32)}, UnsupportedError, "k_scale: an array"),
        ({"lists": np.zeros((2, 3, 4), np.int32)}, ArgumentError, "lists: shape"),
        ({"lists": np.zeros((2, 4), np.int64)}, ArgumentError, "lists: dtype"),
        ({"lengths": np.array([99], np.int32)}, ArgumentError, "lengths: holds"),
        ({"table": np.full((1, 3), 9, np.int32)}, ArgumentError, "table: lists name keys"),
        ({"indptr": np.array([0, 5], np.int32)}, ArgumentError, "indptr: holds"),
        ({"q": np.zeros((2, 576), np.float32)}, ArgumentError, "q: shape"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {
        "q": np.zeros((2, 3, 576), np.float32),
        "cache": np.zeros((4, 8, 576), np.float32),
        "lists": np.zeros((2, 4), np.int32),
        "table": np.zeros((1, 3), np.int32),
        "lengths": np.array([9], np.int32),
        "head_dim_v": 512,
    }
    with pytest.raises(error, match=words):
        sparse.attend(**{**given, **changes})


@pytest.fixture
def make(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    # Tensor maps are made by libcuda, which need not be here.
    monkeypatch.setattr(latent_rows, "_boxes", lambda pages: None)
    return fake_gpu.maker("torch", monkeypatch)


def test_launches(
    gpu: fake_gpu.Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated call launches the same without a look at its arrays."""
    lists, table = make(4, 1, 300, dtype="int32"), make(2, 9, dtype="int32")
    lengths = make(2, dtype="int32")
    for _ in range(2):
        gpu.launches.clear()
        out = sparse.attend(
            make(4, 16, 576), make(9, 64, 576), lists, table, lengths, head_dim_v=512
        )
        assert tuple(out.shape) == (4, 16, 512)
        assert gpu.launches[0].kernel == "list_slots" and gpu.launches[0].grid == (2, 4, 1)
        assert len(gpu.attentions()) == 1
        monkeypatch.setattr(listed_latent, "_check", None)

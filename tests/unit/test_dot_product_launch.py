"""What dot_product_attention launches, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import fake_gpu
from helpers.fake_gpu import Gpu

from cupyattn import dot_product_attention
from cupyattn.engine import index_arrays

torch = pytest.importorskip("torch")
B, T, S, H, HK, D, PAGE = 3, 4, 32, 8, 2, 64, 16


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    fake_gpu.forget()
    index_arrays._kept.clear()
    yield fake_gpu.pretend(monkeypatch)
    fake_gpu.forget()
    index_arrays._kept.clear()


@pytest.fixture
def make(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return fake_gpu.maker("torch", monkeypatch)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


PROMPT = ["prefill_sm80", "merge_splits"]
LENS, OFFSETS = ints(32, 7, 0), ints(0, 4, 8, 12)
TABLE = ints(*range(6)).reshape(B, 2)
# By what they are: shapes of q and of k, options, and the launches.
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], list[str]]] = {
    "dense": ((B, T, H, D), (B, S, HK, D), {"is_causal": True}, ["decode_sm80"]),
    # Small tiles of prefill, for which this GPU has the portable kernel.
    "one": ((1, T, H, D), (1, S, HK, D), {"is_causal": True}, ["prefill_sm80"]),
    "one without a batch": ((T, H, D), (S, HK, D), {}, ["prefill_sm80"]),
    "one token": ((1, 1, H, D), (1, S, HK, D), {}, ["decode_sm80"]),
    "one long prompt": ((1, 512, H, D), (1, 512, HK, D), {"is_causal": True}, PROMPT),
    "lengths": (
        (B, 1, H, D),
        (B, S, HK, D),
        {"key_value_seq_lengths": LENS},
        ["decode_sm80"],
    ),
    "lengths of both": (
        (B, T, H, D),
        (B, S, HK, D),
        {"key_value_seq_lengths": LENS, "query_seq_lengths": LENS},
        ["plan_batch", "decode_sm80"],
    ),
    "first at first": (
        (B, T, H, D),
        (B, S, HK, D),
        {"is_causal": True, "causal_alignment": "first"},
        ["decode_sm80"],
    ),
    "first at first, more rows": (
        (1, S, H, D),
        (1, T, HK, D),
        {"is_causal": True, "causal_alignment": "first"},
        ["prefill_sm80"],
    ),
    "first at first, lengths": (
        (B, T, H, D),
        (B, S, HK, D),
        {"is_causal": True, "causal_alignment": "first", "key_value_seq_lengths": LENS},
        ["packbits", "decode_sm80"] * B,
    ),
    "a mask and lengths of both": (
        (B, T, H, D),
        (B, S, HK, D),
        {
            "mask": torch.ones(T, S, dtype=torch.bool),
            "key_value_seq_lengths": LENS,
            "query_seq_lengths": LENS,
        },
        ["packbits", "decode_sm80"] * B,
    ),
    "pages": (
        (B, 1, H, D),
        (20, PAGE, HK, D),
        {"block_table": TABLE, "kv_lens": LENS},
        ["decode_sm80"],
    ),
    "ragged": (
        (12, H, D),
        (96, HK, D),
        {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": ints(0, 32, 64, 96), "max_seqlen_q": 4},
        ["decode_sm80"],
    ),
}


def names_of(gpu: Gpu) -> list[str]:
    return [x.kernel if isinstance(x.kernel, str) else x.kernel.name for x in gpu.launches]


@pytest.mark.parametrize("name", FORMS)
def test_launches(name: str, gpu: Gpu, make: Callable[..., Any]) -> None:
    shape_q, shape_k, options, launches = FORMS[name]
    q, k, v = make(*shape_q), make(*shape_k), make(*shape_k)
    out = dot_product_attention(q, k, v, **options)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert names_of(gpu) == launches


def test_a_mask_is_a_launch_for_each_request(gpu: Gpu, make: Callable[..., Any]) -> None:
    q, k, v = make(B, T, H, D), make(B, S, HK, D), make(B, S, HK, D)
    mask = torch.ones(B, 1, T, S, dtype=torch.bool)
    out, lse = dot_product_attention(q, k, v, mask=mask, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    assert names_of(gpu) == ["packbits", "decode_sm80"] * B

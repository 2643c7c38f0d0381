"""flash_attn's functions on a GPU: random calls with their options crossed, new keys and copies of
rows alone, and calls whose arrays are copied first."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import row_copies
from helpers.flash_cases import Case
from helpers.new_keys import random_new_keys

from cupyattn import flash_attn
from cupyattn.core import dtypes
from cupyattn.flash_attn import attend

pytestmark = pytest.mark.gpu

NUM_CASES, BLOCK = 420, 70


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_calls(xp: ModuleType, first: int) -> None:
    for seed in range(first, first + BLOCK):
        Case(seed, xp, "cuda", is_gpu=True).run()


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_new_keys(xp: ModuleType, first: int) -> None:
    for seed in range(first, first + 40):
        random_new_keys(seed).run(xp, "cuda")


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_copies_of_rows(xp: ModuleType, first: int) -> None:
    if xp.__name__ == "torch":
        pytest.skip("the kernel sees addresses alone: once is enough")
    for seed in range(first, first + 40):
        row_copies.check(seed, xp, "cuda")


def _on_gpu(x: Any) -> Any:
    torch = pytest.importorskip("torch")
    if not isinstance(x, np.ndarray):
        return x
    bits = torch.from_numpy(np.ascontiguousarray(x).view(f"u{x.itemsize}" if x.itemsize == 1 else
                                                         f"i{x.itemsize}"))  # fmt: skip
    return bits.cuda().view(getattr(torch, dtypes.BY_NUMPY[x.dtype].name))


# By what is copied: (rows, head dims, KV heads), and what else the call has.
COPIED: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "odd": ((3, 57, 57, 2), {"causal": True}),
    "odd, of two dims, many rows": ((300, 111, 35, 2), {"window_size": (90, 20)}),
    "qv of 512": ((3, 64, 512, 2), {"has_qv": True, "softcap": 9.0}),
    "qv of 256, many rows": ((200, 64, 256, 1), {"has_qv": True, "causal": True}),
    "fp8 keys of many rows": ((1100, 128, 128, 2), {"is_fp8": True, "causal": True}),
    "fp8 keys of few rows": ((9, 128, 128, 2), {"is_fp8": True, "causal": True}),
    "slopes": ((70, 64, 64, 2), {"has_slopes": True}),
    "slopes behind a cap": ((9, 64, 64, 2), {"has_slopes": True, "causal": True, "softcap": 5.0}),
    "chunks": ((150, 64, 64, 2), {"has_slopes": True, "is_fp8": True, "attention_chunk": 40}),
}


@pytest.mark.parametrize("name", COPIED)
def test_calls_as_the_reference_answers_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an LSE, and scales and slopes of each request."""
    monkeypatch.setattr(attend, "WIDENING_ROWS", 2048)
    monkeypatch.setattr(attend, "WIDENING_LOGITS", 0)
    (rows, dim_qk, dim_vo, kv_heads), options = COPIED[name]
    options = dict(options)
    rng = np.random.default_rng(rows)
    heads, count, keys = 4, 2, rows + 150
    wide = dtypes.bfloat16.numpy
    kind = dtypes.float8_e4m3fn.numpy if options.pop("is_fp8", False) else wide
    named: dict[str, Any] = {"return_softmax_lse": True}
    if options.pop("has_qv", False):
        named["qv"] = rng.normal(0, 1, (count, rows, heads, dim_vo)).astype(wide)
    if options.pop("has_slopes", False):
        named["alibi_slopes"] = rng.random((count, heads)).astype(np.float32) * 0.3
    if kind is not wide:
        for scale in ("k_descale", "v_descale"):
            named[scale] = rng.uniform(0.5, 2, (count, kv_heads)).astype(np.float32)
    q = rng.normal(0, 1, (count, rows, heads, dim_qk)).astype(wide)
    k, v = (rng.normal(0, 1, (count, keys, kv_heads, d)).astype(kind) for d in (dim_qk, dim_vo))
    want, want_lse = flash_attn.flash_attn_func(q, k, v, **named, **options)
    given = {name: _on_gpu(x) for name, x in named.items()}
    for _ in range(2):  # the second from the cache of calls
        out, lse = flash_attn.flash_attn_func(*map(_on_gpu, (q, k, v)), **given, **options)
        np.testing.assert_allclose(out.float().cpu().numpy(), want.astype(np.float32), 3e-2, 3e-2)
        np.testing.assert_allclose(lse.cpu().numpy(), want_lse, 1e-2, 1e-2)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("is_paged", [False, True])
def test_steps_that_append_keys_are_those_of_the_reference(
    is_paged: bool, is_rotated: bool
) -> None:
    """From the second step on a call is found again, and only addresses are new."""
    torch = pytest.importorskip("torch")
    count, heads, kv_heads, dim, room, page_size = 3, 8, 2, 64, 48, 16
    rng = np.random.default_rng(3)
    caches = [rng.normal(0, 1, (count, room, kv_heads, dim)).astype(np.float16) for _ in "kv"]
    named: dict[str, Any] = {"causal": True}
    if is_paged:
        caches = [x.reshape(-1, page_size, kv_heads, dim) for x in caches]
        table = np.arange(count * room // page_size, dtype=np.int32).reshape(count, -1)
        named["block_table"] = table
    if is_rotated:
        angles = rng.normal(0, 1, (room, dim // 2))
        named |= {f"rotary_{x}": f(angles).astype(np.float16) for x, f in
                  (("cos", np.cos), ("sin", np.sin))}  # fmt: skip
    on_gpu = [torch.from_numpy(x.copy()).cuda() for x in caches]
    fixed = {name: _on_gpu(x) for name, x in named.items()}
    for step in range(6):
        q = rng.normal(0, 1, (count, 1, heads, dim)).astype(np.float16)
        k, v = rng.normal(0, 1, (2, count, 1, kv_heads, dim)).astype(np.float16)
        lens = np.array([step, 20 + step, 40], np.int32)
        want = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lens, **named)
        new = (torch.from_numpy(x).cuda() for x in (k, v))
        got = flash_attn.flash_attn_with_kvcache(
            torch.from_numpy(q).cuda(), *on_gpu, *new, cache_seqlens=_on_gpu(lens), **fixed
        )
        np.testing.assert_allclose(got.cpu().numpy(), want, 1e-2, 1e-2)
        for cache, wanted in zip(on_gpu, caches, strict=True):
            np.testing.assert_allclose(cache.cpu().numpy(), wanted, 2e-3, 2e-3)

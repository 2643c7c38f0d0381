"""Calls with user-written logits, for the emulated GPU and for a real one.

`single`, `ragged`, `paged` and `decode` make the call on arrays of `xp`, and return its answer and
the one of the same call on the CPU. `compare` holds them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn.core import dtypes
from cupyattn.reference import alibi_slopes

from . import batches
from .poison import download, upload

HEADS = 6, 2
ALIBI = "logit + slopes[head] * (kv_idx - q_idx)"
LONG = (
    "where(kv_idx % 5 == 4, logit - rel[head, min(max(q_idx - kv_idx, 0), 40)], "
    "c * tanh(logit / c) + 0.01 * abs(kv_idx - q_idx))"
)
# Transforms and masks by what they do that others do not.
EXPRESSIONS: dict[str, tuple[str | None, str | None]] = {
    "transform": (LONG, None),
    "alibi": (ALIBI, None),
    "cap": ("c * tanh(logit / c)", None),
    "mask": (None, "doc[batch, q_idx] == doc[batch, kv_idx] && kv_idx > q_idx - w || q_row == 3"),
    "mask by head": (None, "kv_idx <= q_idx && kv_idx > q_idx - 3 * (head + 1)"),
    "both": (ALIBI, "seen[q_row, kv_idx] || kv_idx == 0"),
    "requests": ("logit * t[batch] - q_len + exp2(-abs(logit))", "kv_idx // 3 % 2 == batch % 2"),
}
# Of the two answers, of 16 bits and of 32.
_TOLERANCES = {"float16": 4e-3, "bfloat16": 2.5e-2}


def params(
    num_requests: int, qo_len: int, kv_len: int, transform: str | None, mask: str | None
) -> dict[str, Any]:
    """The parameters that the texts name. Arrays end where the call's indices do."""
    rng = np.random.default_rng(1)
    documents = np.arange(kv_len) // 50 + np.arange(num_requests)[:, None]
    everything = {
        "rel": rng.standard_normal((HEADS[0], 41)).astype(np.float16),
        "doc": (documents // 2).astype(np.int32),
        "slopes": alibi_slopes(HEADS[0]).astype(np.float32),
        "seen": rng.random((qo_len, kv_len)) < 0.7,
        "t": np.linspace(0.5, 1.5, num_requests).astype(dtypes.bfloat16.numpy),
        "c": 3.0,
        "w": 60,
    }
    named = re.findall(r"[a-z_]+", f"{transform} {mask}")
    return {name: x for name, x in everything.items() if name in named}


def compare(got: Any, wanted: Any, dtype: str = "float16") -> None:
    """Two answers (out, lse)."""
    (out, lse), (exact, exact_lse) = got, wanted
    out, lse = (download(x).astype(np.float32) for x in (out, lse))
    tolerance = _TOLERANCES[dtype]
    # Rows that see nothing are exact.
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact_lse))
    np.testing.assert_allclose(out, exact.astype(np.float32), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-4, atol=tolerance)


def _values(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(dtypes.parse(dtype).numpy)


def _given(name: str, *sizes: int) -> dict[str, Any]:
    transform, mask = EXPRESSIONS[name]
    found: dict[str, Any] = {"logits_params": params(*sizes, transform, mask)}
    if transform is not None:
        found["logits_transform"] = transform
    if mask is not None:
        found["mask_fn"] = mask
    return found


def _on(xp: ModuleType, options: dict[str, Any]) -> dict[str, Any]:
    """The options with their arrays on the device of `xp`."""
    put = lambda x: upload(x, xp) if isinstance(x, np.ndarray) else x  # noqa: E731
    own = {name: put(x) for name, x in options["logits_params"].items()}
    return {name: put(x) for name, x in options.items()} | {"logits_params": own}


def single(
    name: str,
    xp: ModuleType,
    qo_len: int,
    kv_len: int,
    dims: tuple[int, int] = (64, 64),
    dtype: str = "float16",
    kv_dtype: str | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """One request: the device's answer and the CPU's. One row without a batch is a decode."""
    rng = np.random.default_rng(0)
    q = _values(rng, qo_len, HEADS[0], dims[0], dtype=dtype)
    k, v = (_values(rng, kv_len, HEADS[1], d, dtype=kv_dtype or dtype) for d in dims)
    given = _given(name, 1, qo_len, kv_len) | {"return_lse": True} | options
    call: Callable[..., Any] = cupyattn.single_prefill_with_kv_cache
    if qo_len == 1:
        q, call = q[0], cupyattn.single_decode_with_kv_cache
    wanted = call(q, k, v, **given)
    return call(*(upload(x, xp) for x in (q, k, v)), **_on(xp, given)), wanted


class BatchCall:
    """A planned wrapper on the device of `xp`, and the same on the CPU.

    kind: "ragged", "paged" or "decode", whose requests have one row.
    """

    def __init__(
        self,
        name: str,
        xp: ModuleType,
        kind: str,
        qo_len: list[int],
        kv_len: list[int],
        workspace: Any,
        *,
        dims: tuple[int, int] = (64, 64),
        dtype: str = "float16",
        kv_dtype: str | None = None,
        page_size: int = 16,
        **options: Any,
    ) -> None:
        b = batches.make(
            qo_len, kv_len, page_size, heads=HEADS, dims=dims, dtype=dtype, kv_dtype=kv_dtype
        )
        sizes = len(kv_len), max(qo_len), max(kv_len)
        self.options = _given(name, *sizes) | options
        self.arrays = (b.q, *b.ragged()) if kind == "ragged" else (b.q, b.cache)
        types = {"q_data_type": dtype, "kv_data_type": kv_dtype or dtype}
        makers: dict[str, Any] = {
            "ragged": cupyattn.BatchPrefillWithRaggedKVCacheWrapper,
            "paged": cupyattn.BatchPrefillWithPagedKVCacheWrapper,
            "decode": cupyattn.BatchDecodeWithPagedKVCacheWrapper,
        }
        tables: tuple[Any, ...] = b.qo_indptr, b.kv_indptr
        if kind != "ragged":
            tables = (*(() if kind == "decode" else (b.qo_indptr,)), *b.table, page_size)
        heads = *HEADS, dims[0]
        rows = (*tables, *heads) if kind == "ragged" else (*tables[:-1], *heads, tables[-1])
        self.xp = xp
        self.wrappers = []
        for put, space in ((lambda x: x, batches.WORKSPACE), (None, workspace)):
            w = makers[kind](space)
            given = self.options if put else _on(xp, self.options)
            w.plan(*rows, **given, **types)
            self.wrappers.append(w)

    def run(self, **params: np.ndarray) -> tuple[Any, Any]:
        """(the device's answer, the CPU's); params replace those of the plan."""
        on_cpu, on_device = self.wrappers
        put = lambda x: (  # noqa: E731
            tuple(upload(y, self.xp) for y in x) if isinstance(x, tuple) else upload(x, self.xp)
        )
        replaced: list[dict[str, Any]] = [{}, {}]
        if params:
            replaced = [{"logits_params": params}]
            replaced.append({"logits_params": {n: upload(x, self.xp) for n, x in params.items()}})
        wanted = on_cpu.run(*self.arrays, return_lse=True, **replaced[0])
        got = on_device.run(*map(put, self.arrays), return_lse=True, **replaced[1])
        return got, wanted

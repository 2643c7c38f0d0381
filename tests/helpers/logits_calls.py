"""Calls with user-written logits, for the emulated GPU and for a real one.

`Single` and `Batch` make the same call on arrays of a device and on the CPU's; `compare` holds the
answers together.
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
from .batches import normal
from .poison import download, upload

HEADS = 6, 2
ALIBI = "logit + slopes[head] * (kv_idx - q_idx)"
LONG = (
    "where((kv_idx - q_idx) % 5 == 4, logit - rel[head, min(max(q_idx - kv_idx, 0), 40)], "
    "c * tanh(logit / c) + 0.05 * ((kv_idx - q_idx) // 7))"
)
DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] && kv_idx > q_idx - w || q_row == 3"
# Transforms and masks by what they do that others do not.
EXPRESSIONS: dict[str, tuple[str | None, str | None]] = {
    "transform": (LONG, None),
    "alibi": (ALIBI, None),
    "cap": ("c * tanh(logit / c)", None),
    "mask": (None, DOCUMENTS),
    "everything": (LONG, DOCUMENTS),
    "mask by head": (None, "kv_idx <= q_idx && kv_idx > q_idx - 50 * (head + 1)"),
    "both": (ALIBI, "seen[q_row, kv_idx] || kv_idx == 0"),
    "mask by parity": (None, "kv_idx // 3 % 2 == 0"),
    "near keys": (
        "logit + (kv_idx <= q_idx && kv_idx > q_idx - 23 ? near[q_token, head, q_idx-kv_idx] : 0)",
        None,
    ),
    "rel_logits": (None, None),  # which are near keys' biases without a text
    "rel_logits, masked": (None, "kv_idx // 3 % 2 == 0"),
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
        "near": rng.standard_normal((num_requests * qo_len, HEADS[0], 23)).astype(np.float16),
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


def _given(name: str, *sizes: int) -> dict[str, Any]:
    transform, mask = EXPRESSIONS[name]
    if name.startswith("rel_logits"):
        own = {} if mask is None else {"mask_fn": mask}
        return own | {"rel_logits": params(*sizes, "near", None)["near"]}
    found: dict[str, Any] = {"logits_params": params(*sizes, transform, mask)}
    if transform is not None:
        found["logits_transform"] = transform
    if mask is not None:
        found["mask_fn"] = mask
    return found


def _on(xp: ModuleType, options: dict[str, Any]) -> dict[str, Any]:
    """The options with their arrays on the device of `xp`."""
    put = lambda x: upload(x, xp) if isinstance(x, np.ndarray) else x  # noqa: E731
    placed = {name: put(x) for name, x in options.items()}
    if "logits_params" in options:
        placed["logits_params"] = {name: put(x) for name, x in options["logits_params"].items()}
    return placed


class Single:
    """One request. One row without a batch is a decode."""

    def __init__(
        self,
        name: str,
        qo_len: int,
        kv_len: int,
        dims: tuple[int, int] = (64, 64),
        dtype: str = "float16",
        kv_dtype: str | None = None,
        **options: Any,
    ) -> None:
        rng = np.random.default_rng(0)
        q = normal(rng, dtype, qo_len, HEADS[0], dims[0])
        self.arrays = (
            q[0] if qo_len == 1 else q,
            *(normal(rng, kv_dtype or dtype, kv_len, HEADS[1], d) for d in dims),
        )
        self.options = _given(name, 1, qo_len, kv_len) | {"return_lse": True} | options

    def run(self, xp: ModuleType | None = None) -> Any:
        """The answer where the arrays of xp are; on the CPU without it."""
        call: Callable[..., Any] = cupyattn.single_prefill_with_kv_cache
        if self.arrays[0].ndim == 2:
            call = cupyattn.single_decode_with_kv_cache
        if xp is None:
            return call(*self.arrays, **self.options)
        return call(*(upload(x, xp) for x in self.arrays), **_on(xp, self.options))


def requests() -> dict[str, dict[str, Any]]:
    """Arguments of Single by name: the single requests of the GPU suite."""
    found: dict[str, dict[str, Any]] = {}
    shapes = {"prompt": (200, 900), "append": (17, 1500), "draft": (4, 3000), "row": (1, 2000)}
    for index, name in enumerate(EXPRESSIONS):
        dtype = ("float16", "bfloat16")[index % 2]
        for shape, (qo_len, kv_len) in shapes.items():
            found[f"{name}, {shape}"] = {
                "name": name, "qo_len": qo_len, "kv_len": kv_len, "dims": (128, 128),
                "dtype": dtype,
            }  # fmt: skip
    for dims in ((64, 64), (96, 96), (256, 256), (192, 128)):
        for qo_len in (200, 3):
            found[f"{qo_len} rows of {dims}"] = {
                "name": "everything", "qo_len": qo_len, "kv_len": 700, "dims": dims,
            }  # fmt: skip
    heads = np.linspace(0.5, 1.5, HEADS[0]).astype(np.float32)
    options: dict[str, dict[str, Any]] = {
        "window": {"causal": True, "window_left": 100},
        "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
        "sinks": {"sinks": heads - 1},
        "scales by head": {"scale_q": heads},
        "negative scale": {"sm_scale": -0.1},
        "float32 output": {"o_dtype": "float32"},
        "fp8 keys": {"kv_dtype": "float8_e4m3fn"},
    }
    for what, more in options.items():
        for qo_len in (150, 2):
            found[f"{qo_len} rows, {what}"] = {
                "name": "everything", "qo_len": qo_len, "kv_len": 600, "dims": (128, 128), **more,
            }  # fmt: skip
    return found


class Batch:
    """A batch of a kind: "ragged", "paged", or "decode", whose requests have one row each."""

    def __init__(
        self,
        name: str,
        kind: str,
        qo_len: list[int],
        kv_len: list[int],
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
        self.options = _given(name, len(kv_len), max(qo_len), max(kv_len)) | options
        self.arrays: tuple[Any, ...] = (b.q, *b.ragged()) if kind == "ragged" else (b.q, b.cache)
        self.types = {"q_data_type": dtype, "kv_data_type": kv_dtype or dtype}
        self.wrapper: Any = {
            "ragged": cupyattn.BatchPrefillWithRaggedKVCacheWrapper,
            "paged": cupyattn.BatchPrefillWithPagedKVCacheWrapper,
            "decode": cupyattn.BatchDecodeWithPagedKVCacheWrapper,
        }[kind]
        heads = *HEADS, dims[0]
        if kind == "ragged":
            self.planned: tuple[Any, ...] = b.qo_indptr, b.kv_indptr, *heads
        else:
            rows = () if kind == "decode" else (b.qo_indptr,)
            self.planned = *rows, *b.table, *heads, page_size

    def plan(self, xp: ModuleType | None = None, workspace: Any = batches.WORKSPACE) -> Any:
        """A planned wrapper, on the CPU without xp."""
        wrapper = self.wrapper(workspace)
        options = self.options if xp is None else _on(xp, self.options)
        wrapper.plan(*self.planned, **options, **self.types)
        return wrapper

    def run(self, wrapper: Any, xp: ModuleType | None = None, **params: np.ndarray) -> Any:
        """The answer of a wrapper; params replace those of its plan."""
        put: Callable[[Any], Any] = lambda x: x if xp is None else upload(x, xp)  # noqa: E731
        arrays = [tuple(map(put, x)) if isinstance(x, tuple) else put(x) for x in self.arrays]
        given = {"logits_params": {n: put(x) for n, x in params.items()}} if params else {}
        return wrapper.run(*arrays, return_lse=True, **given)


# --- biases of any finite size ---

# What a row has for all its keys; None: one key has 0.5 and all others -1e30.
_FAR = float(np.finfo(np.float32).min), -1e30, 1e30, -1e9, None, 0.0


class FarBiases:
    """A call whose biases are large: rows whose keys all share one have the mean of V, as eager
    float32 has it, because no logit beside such a bias counts. `is_by_row`: no key has its own."""

    def __init__(
        self, qo_len: int, kv_len: int, dim: int = 64, *, dtype: str = "float16",
        is_by_row: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        self.q = normal(rng, dtype, qo_len, HEADS[0], dim)
        self.k, self.v = (normal(rng, dtype, kv_len, HEADS[1], dim) for _ in range(2))
        self.bias = rng.standard_normal((HEADS[0], qo_len, 1 if is_by_row else kv_len))
        kinds = [x for x in _FAR if not is_by_row or x is not None]
        for row in range(qo_len):
            for head in range(HEADS[0]):
                far = kinds[(row + head) % len(kinds)]
                self.bias[head, row] = -1e30 if far is None else far or self.bias[head, row]
                if far is None:
                    self.bias[head, row, (7 * row + head) % kv_len] = 0.5
        self.bias = self.bias.astype(np.float32)

    def run(self, xp: ModuleType) -> Any:
        q, k, v, bias = (upload(x, xp) for x in (self.q, self.k, self.v, self.bias))
        return cupyattn.dot_product_attention(q, k, v, bias, return_lse=True)

    def compare(self, got: Any, tolerance: float = 4e-3) -> None:
        out, lse = (download(x).astype(np.float32) for x in got)
        q, k, v = (x.astype(np.float32) for x in (self.q, self.k, self.v))
        k, v = (np.repeat(x, HEADS[0] // HEADS[1], 1) for x in (k, v))
        logits = np.einsum("thd,shd->hts", q, k) * np.float32(q.shape[-1] ** -0.5) + self.bias
        largest = logits.max(-1, keepdims=True)
        weights = np.exp(logits - largest)
        total = weights.sum(-1, keepdims=True)
        wanted = np.einsum("hts,shd->thd", weights / total, v)
        np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance)
        # The least numbers are none in base 2.
        wanted_lse = (largest + np.log(total))[..., 0].T.astype(np.float64)
        most = np.finfo(np.float32).max * np.log(2.0)
        np.testing.assert_allclose(lse, wanted_lse.clip(-most, most), rtol=1e-4, atol=tolerance)

"""dot_product_attention: every form against a dense oracle, answers of jax.nn, errors by name."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
from helpers.plain_answers import dense

import cupyattn
from cupyattn import array
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError

B, T, S, H, HK, D, DV = 3, 5, 9, 4, 2, 16, 24
NAN = float("nan")


def arrays(framework: str, *values: Any) -> Any:
    """Arrays of a framework, none of none."""
    if framework == "numpy":
        made = list(values)
    else:
        module = pytest.importorskip(framework)
        like = array.view((module.numpy if framework == "jax" else module).zeros(1), "like")
        made = [None if x is None else array.from_numpy(x.copy(), like) for x in values]
    return made[0] if len(made) == 1 else made


def numbers(x: Any) -> np.ndarray:
    return np.asarray(x)


def make(rng: np.random.Generator, t: int = T, s: int = S) -> tuple[np.ndarray, ...]:
    shapes = (B, t, H, D), (B, s, HK, D), (B, s, HK, DV)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def check(answer: Any, q: list, k: list, v: list, **options: Any) -> None:
    """answer: (out, lse), each a list of the rows of a request."""
    options = {"scale": D**-0.5} | options
    for index, (out, lse) in enumerate(zip(*answer, strict=True)):
        if not len(q[index]):
            continue
        want, want_lse = dense(q[index], k[index], v[index], **options)
        np.testing.assert_allclose(numbers(out), want, atol=2e-6)
        np.testing.assert_allclose(numbers(lse), want_lse.T, atol=2e-6)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"is_causal": True}, {"causal": True}),
    ({"local_window_size": 2}, {"window": (2, 2)}),
    ({"local_window_size": (3, 0), "is_causal": True}, {"window": (3, 0), "causal": True}),
    ({"logits_soft_cap": 0.7, "scale": 0.4}, {"softcap": 0.7, "scale": 0.4}),
    ({"sinks": True, "is_causal": True}, {"sinks": True, "causal": True}),
]


@pytest.fixture(params=CASES, ids=lambda case: ",".join(case[0]) or "plain")
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    named, options = (dict(x) for x in request.param)
    if "sinks" in named:
        named["sinks"] = options["sinks"] = np.linspace(-1, 1, H).astype(np.float32)
    return named, options


@pytest.fixture(params=["numpy", "torch", "jax"])
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


def call(framework: str, q: Any, k: Any, v: Any, named: dict[str, Any]) -> Any:
    """(out, lse) of the call in a framework, whose arrays the answers are."""
    q, k, v = arrays(framework, q, k, v)
    named = {n: arrays(framework, x) if isinstance(x, np.ndarray) else x for n, x in named.items()}
    alone = cupyattn.dot_product_attention(q, k, v, **named)
    out, lse = cupyattn.dot_product_attention(q, k, v, return_lse=True, **named)
    assert type(alone) is type(out) is type(q)
    np.testing.assert_array_equal(numbers(alone), numbers(out))
    return out, lse


@pytest.mark.parametrize("t", [1, T])
@pytest.mark.parametrize("batch", [1, B])
def test_dense(case: Any, framework: str, batch: int, t: int) -> None:
    named, options = case
    q, k, v = (x[:batch] for x in make(np.random.default_rng(1), t))
    check(call(framework, q, k, v, named), q, k, v, **options)


def test_a_request_without_a_batch(case: Any, framework: str) -> None:
    named, options = case
    q, k, v = (x[0] for x in make(np.random.default_rng(2)))
    out, lse = call(framework, q, k, v, named)
    assert out.shape == (T, H, DV) and lse.shape == (T, H)
    check(([out], [lse]), [q], [k], [v], **options)


def test_lengths_of_keys(case: Any, framework: str) -> None:
    named, options = case
    q, k, v = make(np.random.default_rng(3))
    lens = np.array([9, 5, 0], np.int32)
    for index, n in enumerate(lens):
        k[index, n:], v[index, n:] = NAN, NAN
    out, lse = call(framework, q, k, v, named | {"key_value_seq_lengths": lens})
    few = [[x[i, :n] for i, n in enumerate(lens)] for x in (k, v)]
    check((out, lse), q, *few, **options)


@pytest.mark.parametrize("is_paged", [False, True])
def test_lengths_of_both(case: Any, framework: str, is_paged: bool) -> None:
    """Rows that do not count are 0, and what they hold is not read."""
    named, options = case
    q, k, v = make(np.random.default_rng(4))
    q_lens, lens = np.array([5, 2, 0], np.int32), np.array([9, 4, 3], np.int32)
    for index, (m, n) in enumerate(zip(q_lens, lens, strict=True)):
        q[index, m:], k[index, n:], v[index, n:] = NAN, NAN, NAN
    few = [[x[i, :n] for i, n in enumerate(lens)] for x in (k, v)]
    named["query_seq_lengths"], named["key_value_seq_lengths"] = q_lens, lens
    if is_paged:
        k, v, named["block_table"] = pages(k, v)
    out, lse = call(framework, q, k, v, named)
    for index, m in enumerate(q_lens):
        assert not numbers(out)[index, m:].any()
    rows = [[x[i, :m] for i, m in enumerate(q_lens)] for x in (out, lse, q)]
    check((rows[0], rows[1]), rows[2], *few, **options)


def pages(k: np.ndarray, v: np.ndarray, size: int = 3) -> tuple[np.ndarray, ...]:
    """(pages of k, pages of v, table [B, 4]), pages in any order among poisoned ones."""
    order = np.random.default_rng(0).permutation(12)[:9].reshape(B, 3)
    made = []
    for x in (k, v):
        pool = np.full((12, size, *x.shape[2:]), NAN, np.float32)
        pool[order] = x.reshape(B, 3, size, *x.shape[2:])
        made.append(pool)
    table = np.concatenate([order, np.full((B, 1), 10**8)], axis=1).astype(np.int32)
    return *made, table


@pytest.mark.parametrize("t", [1, T])
def test_pages(case: Any, framework: str, t: int) -> None:
    named, options = case
    q, k, v = make(np.random.default_rng(5), t)
    lens = np.array([9, 0, 7], np.int32)
    few = [[x[i, :n] for i, n in enumerate(lens)] for x in (k, v)]
    pool_k, pool_v, table = pages(k, v)
    out, lse = call(framework, q, pool_k, pool_v, named | {"block_table": table, "kv_lens": lens})
    check((out, lse), q, *few, **options)


@pytest.mark.parametrize("is_paged", [False, True])
def test_ragged(case: Any, framework: str, is_paged: bool) -> None:
    named, options = case
    q, k, v = make(np.random.default_rng(6))
    q_lens, lens = np.array([2, 0, 5]), np.array([9, 3, 6])
    few_q = [x[:n] for x, n in zip(q, q_lens, strict=True)]
    few = [[x[i, :n] for i, n in enumerate(lens)] for x in (k, v)]
    cu_q, cu_k = (np.cumsum([0, *x]).astype(np.int32) for x in (q_lens, lens))
    named |= {"cu_seqlens_q": cu_q, "max_seqlen_q": 5}
    if is_paged:
        k, v, named["block_table"] = pages(k, v)
        named["kv_lens"] = lens.astype(np.int32)
    else:
        k, v = (np.concatenate(x) for x in few)
        named |= {"cu_seqlens_k": cu_k, "max_seqlen_k": 9}
    out, lse = call(framework, np.concatenate(few_q), k, v, named)
    rows = [[x[a:b] for a, b in itertools.pairwise(cu_q)] for x in (out, lse)]
    check(rows, few_q, *few, **options)


@pytest.mark.parametrize("form", ["all", "one", "keys", "no batch"])
@pytest.mark.parametrize("has_lens", [False, True])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_masks(case: Any, framework: str, form: str, has_lens: bool) -> None:
    """Whatever extents a mask repeats; causality, windows and lengths hold besides."""
    named, options = case
    rng = np.random.default_rng(7)
    q, k, v = make(rng)
    shapes = {"all": (B, 1, T, S), "one": (1, 1, T, S), "keys": (B, 1, 1, S), "no batch": (T, S)}
    mask = rng.random(shapes[form]) < 0.6
    named = dict(named) | {"mask": mask}
    lens = np.array([9, 6, 8], np.int32) if has_lens else np.full(B, S, np.int32)
    if has_lens:
        named["key_value_seq_lengths"] = lens
    if form == "no batch":
        q, k, v, named["key_value_seq_lengths"] = q[:1], k[:1], v[:1], lens[:1]
        out, lse = call(framework, q[0], k[0], v[0], named)
        out, lse = out[None], lse[None]
    else:
        out, lse = call(framework, q, k, v, named)
    full = np.broadcast_to(mask if mask.ndim == 4 else mask[None, None], (len(q), 1, T, S))[:, 0]
    for index, n in enumerate(lens[: len(q)]):
        for i in range(T):
            # A row alone, at the end of the keys up to its place, and behind as many as it sees.
            place = i + n - T
            left, right = options.get("window", (-1, -1))
            right = 0 if options.get("causal") else right
            low = 0 if left < 0 else max(0, place - left)
            high = n if right < 0 else min(n, max(0, place + right + 1))
            seen = np.flatnonzero(full[index, i, :high])
            seen = seen[seen >= low]
            rest = {m: options[m] for m in ("softcap", "sinks") if m in options}
            rows = [x[index][seen] for x in (k, v)]
            want, want_lse = dense(
                q[index, i : i + 1], *rows, scale=options.get("scale", D**-0.5), **rest
            )
            np.testing.assert_allclose(numbers(out)[index, i], want[0], atol=2e-6)
            np.testing.assert_allclose(numbers(lse)[index, i], want_lse[:, 0], atol=2e-6)


def test_as_jax() -> None:
    """Where both mean the same: as many queries as keys, or no causality."""
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(8)
    q, k, v = (jax.numpy.asarray(rng.standard_normal((B, S, n, D)), "float32") for n in (H, HK, HK))
    lens = jax.numpy.asarray([9, 5, 1], "int32")
    mask = jax.numpy.asarray(rng.random((B, 1, S, S)) < 0.8).at[..., 0].set(True)
    for named in (
        {},
        {"is_causal": True, "scale": 0.3},
        {"local_window_size": 3},
        {"local_window_size": (2, 1), "is_causal": True},
        {"key_value_seq_lengths": lens},
        {"key_value_seq_lengths": lens, "query_seq_lengths": lens, "is_causal": True},
        {"mask": mask, "is_causal": True},
        {"implementation": "xla"},
    ):
        want, want_lse = jax.nn.dot_product_attention(q, k, v, return_residual=True, **named)
        got, lse = cupyattn.dot_product_attention(q, k, v, return_residual=True, **named)
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert lse.shape == want_lse.shape
        if "query_seq_lengths" not in named:
            np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("bias", [None, (B, H, S, S), (1, H, 1, S), (S, S), (B, 1, S, 1)])
@pytest.mark.parametrize("mask", [None, (B, H, S, S), (H, S, S), (B, 1, 1, S)])
def test_biases_and_masks_of_heads_as_jax(bias: Any, mask: Any) -> None:
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(11)
    q, k, v = (jax.numpy.asarray(rng.standard_normal((B, S, n, D)), "float32") for n in (H, HK, HK))
    named: dict[str, Any] = {"is_causal": True, "scale": 0.3}
    if bias is not None:
        named["bias"] = jax.numpy.asarray(rng.standard_normal(bias), "float32")
    if mask is not None:
        named["mask"] = jax.numpy.asarray(rng.random(mask) < 0.7).at[..., 0].set(True)
    # JAX wants all four axes.
    given = [n for n in ("bias", "mask") if n in named]
    whole = {n: named[n].reshape((1,) * (4 - named[n].ndim) + named[n].shape) for n in given}
    want = jax.nn.dot_product_attention(q, k, v, **(named | whole))
    got, lse = cupyattn.dot_product_attention(q, k, v, return_lse=True, **named)
    assert type(got) is type(q) and lse.shape == (B, S, H)
    np.testing.assert_allclose(got, want, atol=1e-5)
    one = {n: x if n not in whole or whole[n].shape[0] == 1 else x[0] for n, x in named.items()}
    alone = cupyattn.dot_product_attention(q[0], k[0], v[0], **one)
    np.testing.assert_allclose(alone, want[0], atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_rows_whose_biases_all_are_the_least_number() -> None:
    q, k, v = make(np.random.default_rng(13))
    bias = np.full((H, T, S), np.finfo(np.float32).min)
    out, lse = cupyattn.dot_product_attention(q, k, v, bias, return_lse=True)
    mean = np.repeat(v.mean(1, keepdims=True), H // HK, 2)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-6)
    assert np.isfinite(lse).all() and (lse < -2e38).all()


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"key_value_seq_lengths": True},
                                   {"key_value_seq_lengths": True, "query_seq_lengths": True},
                                   {"mask": True}])  # fmt: skip
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("t", [1, T])
def test_out(named: dict[str, Any], batch: int, t: int) -> None:
    q, k, v = (x[:batch] for x in make(np.random.default_rng(9), t))
    given = dict(named)
    for name, n in (("key_value_seq_lengths", 6), ("query_seq_lengths", t)):
        if name in given:
            given[name] = np.full(batch, n, np.int32)
    if "mask" in given:
        given["mask"] = np.ones((t, S), np.bool_)
    out = np.full((batch, t, H, DV), NAN, np.float32)
    made = cupyattn.dot_product_attention(q, k, v, out=out, **given)
    assert made is out
    np.testing.assert_array_equal(out, cupyattn.dot_product_attention(q, k, v, **given))


# --- alignment ---


def _seen_first(t: int, s: int, named: dict[str, Any], lens: Any, q_lens: Any) -> np.ndarray:
    """[b, t, s] of the first row at the first key."""
    row, column = np.arange(t)[:, None], np.arange(s)
    left, right = named.get("local_window_size", (-1, -1))
    right = 0 if named.get("is_causal") else right
    seen = np.ones((B, t, s), np.bool_)
    if left >= 0:
        seen &= column >= row - left
    if right >= 0:
        seen &= column <= row + right
    seen &= column < (np.full(B, s) if lens is None else lens)[:, None, None]
    return seen & (row < (np.full(B, t) if q_lens is None else q_lens)[:, None, None])


@pytest.mark.parametrize("t, s", [(4, 9), (9, 4), (6, 6), (1, 5), (5, 1)])
@pytest.mark.parametrize(
    "named",
    [
        {"is_causal": True},
        {"local_window_size": (2, 1)},
        {"local_window_size": (1, -1)},
        {"local_window_size": (-1, 2)},
        {"is_causal": True, "local_window_size": (3, 2)},
        {"is_causal": True, "logits_soft_cap": 2.0, "sinks": np.zeros(H, np.float32)},
    ],
)
@pytest.mark.parametrize(
    "form", ["dense", "one", "no batch", "keys", "both", "mask", "mask, both", "bias", "bias, both",
             "mask of heads", "expression"],
)  # fmt: skip
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_first_query_at_the_first_key(
    framework: str, form: str, named: dict[str, Any], t: int, s: int
) -> None:
    rng = np.random.default_rng(14)
    q = rng.standard_normal((B, t, H, D)).astype(np.float32)
    k, v = rng.standard_normal((2, B, s, HK, D)).astype(np.float32)
    given: dict[str, Any] = dict(named) | {"causal_alignment": "first"}
    lens = q_lens = None
    if form.endswith(("keys", "both")):
        lens = given["key_value_seq_lengths"] = np.array([s, max(1, s - 2), 1], np.int32)
    if form.endswith("both"):
        q_lens = given["query_seq_lengths"] = np.array([max(1, t - 1), t, 1], np.int64)
    seen = np.broadcast_to(_seen_first(t, s, named, lens, q_lens)[:, None], (B, H, t, s)).copy()
    bias = np.zeros((H, t, s), np.float32)
    if form.startswith("mask"):
        mask = rng.random((B, H if form == "mask of heads" else 1, t, s)) < 0.7
        given["mask"], seen = mask, seen & mask
    if form.startswith("bias"):
        given["bias"] = bias = rng.standard_normal((H, t, s)).astype(np.float32)
    if form == "expression":
        given |= {"mask_fn": "kv_idx != 2"}
        seen[..., 2:3] = False
    count = B
    if form == "one":
        q, k, v, seen, count = q[:1], k[:1], v[:1], seen[:1], 1
    if form == "no batch":
        out, lse = (x[None] for x in call(framework, q[0], k[0], v[0], given))
        count = 1
    else:
        out, lse = call(framework, q, k, v, given)
    for b in range(count):
        logits = np.einsum("thd,shd->hts", q[b], np.repeat(k[b], H // HK, 1)) * D**-0.5
        if "logits_soft_cap" in named:
            logits = 2.0 * np.tanh(logits / 2.0)
        logits = np.where(seen[b], logits + bias, -np.inf)
        total = np.exp(logits).sum(-1) + ("sinks" in named)
        weights = np.exp(logits) / np.where(total > 0, total, 1)[..., None]
        want = np.einsum("hts,shd->thd", weights, np.repeat(v[b], H // HK, 1))
        np.testing.assert_allclose(numbers(out)[b], want, atol=3e-6)
        rows = np.s_[: t if q_lens is None else q_lens[b]]
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(numbers(lse)[b][rows], np.log(total).T[rows], atol=3e-6)


@pytest.mark.parametrize("t, s", [(4, 7), (7, 4), (6, 6)])
@pytest.mark.parametrize("has_lens", [False, True])
def test_alignment_as_jax(t: int, s: int, has_lens: bool) -> None:
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(15)
    q = jax.numpy.asarray(rng.standard_normal((B, t, H, D)), "float32")
    k, v = jax.numpy.asarray(rng.standard_normal((2, B, s, HK, D)), "float32")
    lens: dict[str, Any] = {}
    if has_lens:
        lens["query_seq_lengths"] = jax.numpy.asarray([t, 2, 1], "int32")
        lens["key_value_seq_lengths"] = jax.numpy.asarray([2, s, 1], "int32")
    for named in ({"is_causal": True}, {"local_window_size": (5, 2)}):
        want = jax.nn.dot_product_attention(q, k, v, **named, **lens)
        got = cupyattn.dot_product_attention(q, k, v, causal_alignment="first", **named, **lens)
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_heads", [False, True])
def test_masks_with_lengths_of_both(has_bias: bool, has_heads: bool) -> None:
    """The last row that counts is at the last key that does."""
    rng = np.random.default_rng(16)
    q, k, v = make(rng)
    lens, q_lens = np.array([9, 5, 7], np.int32), np.array([5, 2, 0], np.int32)
    mask = rng.random((B, H if has_heads else 1, T, S)) < 0.7
    bias = rng.standard_normal((1, H, T, S)).astype(np.float32) if has_bias else None
    named = {"is_causal": True, "local_window_size": (6, 0)}
    out = cupyattn.dot_product_attention(
        q, k, v, bias, mask, query_seq_lengths=q_lens, key_value_seq_lengths=lens, **named
    )
    for b in range(B):
        t, s = q_lens[b], lens[b]
        assert not out[b, t:].any()
        if t:
            cut = None if bias is None else np.ascontiguousarray(bias[..., :t, :s])
            want = cupyattn.dot_product_attention(
                *(q[b : b + 1, :t], k[b : b + 1, :s], v[b : b + 1, :s], cut),
                np.ascontiguousarray(mask[b : b + 1, :, :t, :s]),
                **named,
            )
            np.testing.assert_allclose(out[b, :t], want[0], atol=2e-6)


def wrong(**change: Any) -> dict[str, Any]:
    q, k, v = make(np.random.default_rng(0))
    return {"query": q, "key": k, "value": v} | change


_OFFSETS = np.array([0, 2, 5], np.int32)
WRONG = [
    (wrong(bias=np.zeros(1)), ArgumentError, "^bias: dtype float64"),
    (wrong(bias=np.zeros((T, S), np.bool_)), ArgumentError, "^bias: dtype is bool"),
    (wrong(bias=np.zeros((2, 1, 1, 1), np.float32)), ArgumentError, "^bias: shape is"),
    (wrong(bias=np.zeros((1, 1, 1, 1, 1), np.float32)), ArgumentError, "^bias: shape is"),
    (wrong(bias=np.zeros((S, T), np.float32).T), ArgumentError, "^bias: has strides"),
    (wrong(bias=np.zeros((T, S), np.float32), mask_fn="kv_idx > 0"), ArgumentError,
     "^bias: got an array beside"),
    (wrong(bias=np.zeros((T, S), np.float32), kv_lens=_OFFSETS[:2]), ArgumentError, "^kv_lens"),
    (wrong(bias=np.zeros((T, S), np.float32), block_table=1), UnsupportedError,
     "^bias: got one beside cu_seqlens or block_table"),
    (wrong(key=np.zeros((2, S, HK, D), np.float32)), ArgumentError, r"^key: shape is \[2, 9"),
    (wrong(value=np.zeros((B, 4, HK, D), np.float32)), ArgumentError, "^value"),
    (wrong(key=np.zeros((B, S, 3, D), np.float32), value=np.zeros((B, S, 3, D), np.float32)),
     ArgumentError, "^query, key"),
    (wrong(query=np.zeros((2, 2), np.float32)), ArgumentError, "^query: shape"),
    (wrong(local_window_size=(1, 2, 3)), ArgumentError, "^local_window_size"),
    (wrong(local_window_size=-7), ArgumentError, "^local_window_size"),
    (wrong(scale="x"), ArgumentError, "^scale"),
    (wrong(logits_soft_cap=-1.0), ArgumentError, "^logits_soft_cap"),
    (wrong(is_causal="yes"), ArgumentError, "^is_causal"),
    (wrong(return_lse=3), ArgumentError, "^return_lse"),
    (wrong(mask=np.ones((T, 4), np.bool_)), ArgumentError, "^mask: shape"),
    (wrong(mask=np.ones((T, S), np.float32)), ArgumentError, "^mask: dtype is float32"),
    (wrong(mask=np.ones((B, H, T, S), np.bool_), cu_seqlens_q=_OFFSETS), UnsupportedError,
     "^mask: got a mask for each head"),
    (wrong(is_causal=True, causal_alignment="middle"), ArgumentError, "^causal_alignment: got"),
    (wrong(is_causal=True, causal_alignment="first", block_table=1), UnsupportedError,
     "^causal_alignment: 'first' is for dense"),
    (wrong(mask=np.ones((T, S), np.bool_), block_table=1), UnsupportedError, "^mask: is for dense"),
    (wrong(kv_lens=_OFFSETS, key_value_seq_lengths=_OFFSETS), ArgumentError, "two names"),
    (wrong(kv_lens=_OFFSETS[:2]), ArgumentError, "^kv_lens"),
    (wrong(key_value_seq_lengths=_OFFSETS[:2]), ArgumentError, "^key_value_seq_lengths"),
    (wrong(block_table=np.zeros((B, 2), np.int32)), ArgumentError, "^kv_lens: got None"),
    (wrong(cu_seqlens_k=_OFFSETS), ArgumentError, "^cu_seqlens_q: got None"),
    (wrong(cu_seqlens_q=_OFFSETS), ArgumentError, "^cu_seqlens_k: got None"),
    (wrong(cu_seqlens_q=_OFFSETS, cu_seqlens_k=_OFFSETS), ArgumentError, "^query: shape"),
    (wrong(query=np.zeros((B, S, H, D), np.float32), key_value_seq_lengths=np.ones(B, np.int32),
           is_causal=True), ArgumentError, "^query_seq_lengths: got None"),
    (wrong(out=np.zeros((B, T, H, D), np.float32)), ArgumentError, "^out"),
    (wrong(sinks=np.zeros(3, np.float32)), ArgumentError, "^sinks"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "kind", "message"), WRONG, ids=[x[2] for x in WRONG])
def test_wrong(named: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cupyattn.dot_product_attention(**named)


_JUNK: list[Any] = [
    *(
        None,
        "x",
        b"x",
        3,
        -1,
        0,
        2.5,
        NAN,
        10**30,
        True,
        object(),
        [],
        [1.0],
        {},
        (1, 2),
        np.int8(3),
    ),
    *(np.zeros(n, kind) for n in (0, 3, (3, 1), (2, 2, 2, 2)) for kind in (np.int32, np.float32)),
    *(np.full(3, n, np.int32) for n in (-1, 10**8)),
    *(np.zeros((B, T, H, D), kind) for kind in (np.float64, np.int32, np.bool_, np.complex64)),
    *(np.zeros((T, S), np.bool_), np.zeros((B, T, H, DV), np.float32)),
]
_BASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "lengths": {"key_value_seq_lengths": np.full(B, 5, np.int32)},
    "both": {
        "query_seq_lengths": np.full(B, 2, np.int32),
        "key_value_seq_lengths": np.full(B, 5, np.int32),
    },
    "mask": {"mask": np.ones((T, S), np.bool_)},
    "ragged": {
        "query": np.zeros((6, H, D), np.float32),
        "key": np.zeros((9, HK, D), np.float32),
        "value": np.zeros((9, HK, DV), np.float32),
        "cu_seqlens_q": np.array([0, 2, 6], np.int32),
        "cu_seqlens_k": np.array([0, 3, 9], np.int32),
    },
}
_ARGUMENTS = [*inspect.signature(cupyattn.dot_product_attention).parameters]


@pytest.mark.parametrize("base", _BASES)
def test_every_wrong_value_is_answered_or_a_typed_error(base: str) -> None:
    outcomes = set()
    for name in _ARGUMENTS:
        for junk in _JUNK:
            try:
                cupyattn.dot_product_attention(**(wrong(**_BASES[base]) | {name: junk}))
                outcomes.add("answered")
            except CupyAttnError as error:
                outcomes.add("refused")
                assert str(error).strip()
            except Exception as error:
                pytest.fail(f"{base}, {name} = {junk!r}: {type(error).__name__}: {error}")
    assert outcomes == {"answered", "refused"}


def test_axes_in_the_order_of_torch() -> None:
    q, k = np.zeros((2, 8, 5, 64), np.float16), np.zeros((2, 2, 7, 64), np.float16)
    with pytest.raises(ArgumentError, match=r"5 query heads over 7 KV heads.*x.swapaxes\(1, 2\)"):
        cupyattn.dot_product_attention(q, k, k)
    q, k = (x.swapaxes(1, 2) for x in (q, k))
    assert cupyattn.dot_product_attention(q, k, k).shape == (2, 5, 8, 64)
    with pytest.raises(ArgumentError, match="7 query heads over 2 KV heads; wanted a positive mul"):
        cupyattn.dot_product_attention(q[:, :, :7], k, k)

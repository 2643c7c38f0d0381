"""flash_attn's functions as other programs call them: their forms of arguments, and imports."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import flash_attn, flash_attn_interface
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.flash_attn import bert_padding

torch = pytest.importorskip("torch")
B, H, HK, D, PAGE = 3, 4, 2, 16, 4


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def pool() -> tuple[Any, Any]:
    torch.manual_seed(3)
    return torch.randn(10, PAGE, HK, D), torch.randn(10, PAGE, HK, D)


TABLE = torch.tensor([[3, 1, -1], [7, 2, 5], [4, -1, -1]], dtype=torch.int32)


def test_nano_vllm(pool: tuple[Any, Any]) -> None:
    """Prompts with and without cached keys, then a decode whose graph has rows of no request."""
    k_cache, v_cache = pool
    q = torch.randn(9, H, D)
    named = {"softmax_scale": D**-0.5, "causal": True}
    cu, fresh = ints(0, 4, 9), torch.randn(9, HK, D)
    out = flash_attn.flash_attn_varlen_func(
        q, fresh, fresh, max_seqlen_q=5, cu_seqlens_q=cu, max_seqlen_k=5, cu_seqlens_k=cu, **named
    )
    assert out.shape == q.shape and out.dtype == torch.float32
    cached = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, max_seqlen_q=5, cu_seqlens_q=cu, max_seqlen_k=9,
        cu_seqlens_k=ints(0, 7, 16), block_table=TABLE[:2], **named,
    )  # fmt: skip
    used = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, cu, None, seqused_k=ints(7, 9), page_table=TABLE[:2], **named
    )
    assert torch.equal(cached, used)
    decoded = flash_attn.flash_attn_with_kvcache(
        q[:B].unsqueeze(1), k_cache, v_cache, cache_seqlens=ints(7, 9, 0), block_table=TABLE,
        **named,
    )  # fmt: skip
    assert decoded.shape == (B, 1, H, D) and not decoded[2].any()
    last = flash_attn.flash_attn_with_kvcache(
        q[3:4][None], k_cache, v_cache, cache_seqlens=7, page_table=TABLE[:1], **named
    )
    assert torch.allclose(cached[3], last[0, 0], atol=1e-6)


def test_mini_sglang(pool: tuple[Any, Any]) -> None:
    out = flash_attn.flash_attn_with_kvcache(
        q=torch.randn(5, H, D), k_cache=pool[0], v_cache=pool[1], page_table=TABLE,
        cache_seqlens=ints(7, 9, 2), cu_seqlens_q=ints(0, 2, 4, 5),
        cu_seqlens_k_new=ints(0, 7, 16, 18), max_seqlen_q=2, softmax_scale=0.25, sm_margin=0,
        window_size=(-1, -1), softcap=0.0, num_splits=0, pack_gqa=None, causal=True, ver=3,
    )  # fmt: skip
    assert out.shape == (5, H, D)


def test_sglang(pool: tuple[Any, Any]) -> None:
    """Descales as one number expanded, sinks in bfloat16, an LSE with more behind it."""
    k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in pool)
    q = torch.randn(B, H, D, dtype=torch.bfloat16)
    scale = torch.tensor(0.5).expand(B, HK)
    out, lse, *_ = flash_attn.flash_attn_with_kvcache(
        q=q.to(torch.float8_e4m3fn), k_cache=k_cache, v_cache=v_cache, page_table=TABLE,
        cache_seqlens=ints(7, 9, 2), cu_seqlens_q=torch.arange(B + 1, dtype=torch.int32),
        max_seqlen_q=1, causal=False, k_descale=scale, v_descale=scale, return_softmax_lse=True,
        num_splits=1, sinks=torch.zeros(H, dtype=torch.bfloat16),
    )  # fmt: skip
    assert out.dtype == torch.bfloat16 and lse.shape == (H, B) and lse.dtype == torch.float32
    merged, s = flash_attn.merge_state_v2(out, lse.T.contiguous(), out, lse.T.contiguous())
    assert torch.allclose(merged, out) and torch.allclose(s, lse.T + np.log(2), atol=1e-5)


def test_vllm() -> None:
    """Everything by name, an output of the caller's, keys and values side by side in one array."""
    blocks = torch.randn(10, HK, PAGE, 2 * D)
    k_cache, v_cache = blocks.transpose(1, 2).split(D, dim=-1)
    q, out = torch.randn(6, H, D), torch.zeros(6, H, D)
    cu, lens = ints(0, 2, 5, 6), ints(7, 9, 2)
    one = torch.ones(()).expand(B, HK)
    named = dict(
        q=q, k=k_cache, v=v_cache, cu_seqlens_q=cu, max_seqlen_q=torch.tensor(3),
        seqused_k=lens, max_seqlen_k=torch.tensor(9), softmax_scale=0.25, causal=True,
        alibi_slopes=None, window_size=[-1, -1], block_table=TABLE, softcap=0.0,
        scheduler_metadata=None, fa_version=3, q_descale=one, k_descale=one, v_descale=one,
        num_splits=0, s_aux=None, dropout_p=0.0, q_v=None, cp_world_size=1, cp_rank=0,
    )  # fmt: skip
    got = flash_attn.flash_attn_varlen_func(out=out, return_softmax_lse=True, **named)
    assert got[0] is out and got[1].shape == (H, 6)
    packed = flash_attn.flash_attn_varlen_func(
        **(named | {"k": k_cache.contiguous(), "v": v_cache.contiguous()})
    )
    assert torch.equal(packed, out)


def test_transformers(pool: tuple[Any, Any]) -> None:
    """It takes what the signature has; a decode appends, with requests that are none."""
    varlen = inspect.signature(flash_attn.flash_attn_varlen_func).parameters
    names = ("window_size", "softcap", "s_aux", "deterministic", "dropout_p", "block_table")
    assert {*names} <= {*varlen}
    with_cache = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters
    assert ("page_table" in with_cache) + ("block_table" in with_cache) == 1
    q, cu = torch.randn(9, H, D), ints(0, 4, 9, 9)
    k = torch.randn(9, HK, D)
    flash_attn.flash_attn_varlen_func(
        q, k, k, cu, cu, torch.tensor(5), torch.tensor(5), softmax_scale=0.25, causal=True,
        window_size=(2, 0), s_aux=torch.nn.Parameter(torch.zeros(H)),
    )  # fmt: skip
    before = [x.clone() for x in pool]
    new = torch.randn(2, B, 1, HK, D)
    out = flash_attn.flash_attn_with_kvcache(
        torch.randn(B, 1, H, D), *pool, k=new[0], v=new[1], cache_seqlens=ints(5, 9, -1),
        softmax_scale=0.25, causal=True, window_size=(-1, -1), page_table=TABLE,
    )  # fmt: skip
    assert not out[2].any()
    for cache, old, x in zip(pool, before, new, strict=True):
        assert torch.equal(cache[1, 1], x[0, 0]) and torch.equal(cache[5, 1], x[1, 0])
        old[1, 1], old[5, 1] = x[0, 0], x[1, 0]
        assert torch.equal(cache, old)


def test_queries_of_any_strides() -> None:
    """Heads before tokens, as a projection leaves them, and parts of one array."""
    q, k = torch.randn(2, H, 3, D), torch.randn(2, HK, 5, D)
    want = flash_attn.flash_attn_func(
        *(x.transpose(1, 2).contiguous() for x in (q, k, k)), causal=True
    )
    got = flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, k)), causal=True)
    assert torch.equal(got, want)
    qkv = torch.randn(2, 3, 3, H, D)
    parts = qkv.unbind(2)
    got = flash_attn.flash_attn_func(*parts)
    assert torch.equal(got, flash_attn.flash_attn_func(*(x.contiguous() for x in parts)))


def test_other_frameworks() -> None:
    jax = pytest.importorskip("jax")
    q, k = (np.ones((1, 2, H, D), np.float32), np.ones((1, 3, HK, D), np.float32))
    out, lse = flash_attn.flash_attn_func(
        *(jax.numpy.asarray(x) for x in (q, k, k)), return_softmax_lse=True
    )
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    assert np.allclose(lse, np.log(3) + 4, atol=1e-5)


# --- imports ---


def test_it_stands_for_flash_attn() -> None:
    """By both names, with what programs ask to know what they have."""
    code = """
import sys
import cupyattn.flash_attn, cupyattn.flash_attn_interface
sys.modules["flash_attn"] = cupyattn.flash_attn
sys.modules["flash_attn_interface"] = cupyattn.flash_attn_interface
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_kvpacked_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func as same
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn_interface import flash_attn_combine, get_scheduler_metadata
from flash_attn_interface import flash_attn_func as other
assert same is flash_attn_varlen_func and other is not flash_attn_func
assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 8, 0)
assert not {"torch", "cupy", "jax"} & {*sys.modules}
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


FA2_LAST = (
    *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
    *("deterministic", "return_attn_probs"),
)
FA2_ORDERS = {
    "flash_attn_func": ("q", "k", "v", *FA2_LAST),
    "flash_attn_qkvpacked_func": ("qkv", *FA2_LAST),
    "flash_attn_kvpacked_func": ("q", "kv", *FA2_LAST),
    "flash_attn_varlen_func": (
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *(*FA2_LAST, "block_table"),
    ),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *FA2_LAST),
    "flash_attn_varlen_kvpacked_func": (
        *("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *FA2_LAST,
    ),
    "flash_attn_with_kvcache": (
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal"),
        *("window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits"),
        "return_softmax_lse",
    ),
}
FA3_ORDERS = {
    "flash_attn_func": (
        *("q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale"),
        *("window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic"),
        *("sm_margin", "return_attn_probs"),
    ),
    "flash_attn_qkvpacked_func": (
        *("qkv", "softmax_scale", "causal", "q_descale", "k_descale", "v_descale", "window_size"),
        *("attention_chunk", "softcap", "deterministic", "num_heads_q", "sm_margin"),
        "return_attn_probs",
    ),
    "flash_attn_varlen_func": (
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("seqused_q", "seqused_k", "softmax_scale", "causal", "qv", "q_descale", "k_descale"),
        *("v_descale", "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa"),
        *("deterministic", "sm_margin", "return_attn_probs"),
    ),
    "flash_attn_with_kvcache": (
        *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"),
        *("max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "causal", "window_size", "attention_chunk", "softcap"),
        *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
        "return_softmax_lse",
    ),
    "get_scheduler_metadata": (
        *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"),
        "cache_seqlens",
    ),
}


@pytest.mark.parametrize(
    ("module", "name", "order"),
    [
        *((flash_attn, name, order) for name, order in FA2_ORDERS.items()),
        *((flash_attn_interface, name, order) for name, order in FA3_ORDERS.items()),
    ],
)
def test_arguments_are_in_the_order_of_the_library(
    module: Any, name: str, order: tuple[str, ...]
) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    by_place = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert tuple(by_place[: len(order)]) == order
    # Nothing more may come by position: another argument of the library's may follow some day.
    assert len(by_place) == len(order) or name == "get_scheduler_metadata"


def test_modules_have_the_names_of_the_library() -> None:
    fa2 = importlib.import_module("cupyattn.flash_attn.flash_attn_interface")
    for name in FA2_ORDERS:
        assert getattr(fa2, name) is getattr(flash_attn, name)
    assert {*FA3_ORDERS, "flash_attn_combine"} == {*flash_attn_interface.__all__}
    for name in ("flash_attn_func", "flash_attn_varlen_kvpacked_func", "merge_state_v2"):
        with pytest.raises(AttributeError, match=rf"it is cupyattn\.flash_attn\.{name}"):
            getattr(cupyattn, name)
    with pytest.raises(AttributeError, match=r"it is cupyattn\.dot_product_attention"):
        _ = cupyattn.scaled_dot_product_attention


# --- FA2's order ---


def dense(q: Any, k: Any, v: Any, scale: float, *, causal: bool) -> tuple[Any, Any]:
    """(out, lse) of [b, s, heads, d], in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        logits = logits.masked_fill(torch.arange(k.shape[1])[None] > rows, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v), logits.logsumexp(-1)


@pytest.mark.parametrize("dims", [(16, 16), (57, 57), (59, 24), (32, 111), (1, 3)])
def test_dropout_comes_fourth_and_probabilities_make_three(dims: tuple[int, int]) -> None:
    q, k = torch.randn(2, 3, H, dims[0]), torch.randn(2, 5, HK, dims[0])
    v = torch.randn(2, 5, HK, dims[1])
    want, want_lse = dense(q, k, v, dims[0] ** -0.5, causal=True)
    out, lse, mask = flash_attn.flash_attn_func(q, k, v, 0.0, None, True, return_attn_probs=True)
    assert torch.allclose(out.double(), want, atol=1e-5) and mask.shape == (0,)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5) and mask.dtype == q.dtype
    given = torch.zeros(2, 3, H, dims[1])
    assert flash_attn.flash_attn_func(q, k, v, 0.0, None, True, out=given) is given
    assert torch.equal(given, out)
    other, lse = flash_attn_interface.flash_attn_func(q, k, v, None, True, return_attn_probs=True)
    assert torch.equal(other, out)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    offsets = ints(0, 3, 6), ints(0, 5, 10)
    rows, lse, mask = flash_attn.flash_attn_varlen_func(
        *flat, *offsets, 3, 5, 0.0, None, True, return_attn_probs=True
    )
    assert torch.allclose(rows.reshape(out.shape), out, atol=1e-6) and lse.shape == (H, 6)
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, cache_seqlens=ints(5, 5))
    assert torch.allclose(cached, out, atol=1e-6)


@pytest.mark.parametrize("dim", [16, 57])
def test_packed_arrays(dim: int) -> None:
    qkv = torch.randn(2, 4, 3, HK, dim)
    parts, options = qkv.unbind(2), (0.0, 0.3, True, (2, 0), 5.0)
    want = flash_attn.flash_attn_func(*parts, *options, return_attn_probs=True)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    rows, cu = qkv.reshape(8, 3, HK, dim), ints(0, 4, 8)
    for got in (
        flash_attn.flash_attn_qkvpacked_func(qkv, *options, return_attn_probs=True),
        flash_attn.flash_attn_kvpacked_func(q, kv, *options, return_attn_probs=True),
    ):
        assert all(map(torch.equal, got, want))
    for got in (
        flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, 4, *options),
        flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], cu, cu, 4, 4, *options),
    ):
        assert torch.allclose(got.reshape(want[0].shape), want[0], atol=1e-6)
    got = flash_attn_interface.flash_attn_qkvpacked_func(qkv, 0.3, True, None, None, None, (2, 0))
    assert torch.equal(got, flash_attn.flash_attn_func(*parts, 0.0, 0.3, True, (2, 0)))
    heads = torch.cat([torch.randn(2, 4, H - HK, dim), qkv.flatten(2, 3)], 2)
    q, k, v = heads.split([H, HK, HK], 2)
    got = flash_attn_interface.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=H)
    assert torch.equal(got, flash_attn.flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: flash_attn.flash_attn_qkvpacked_func(x), r"qkv: shape is \[2, 4, 2, 2, 16\]"),
        (lambda x: flash_attn.flash_attn_kvpacked_func(x[:, :, 0], x[0]), "kv: shape is"),
        (
            lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x[0], ints(0, 4), 4),
            r"qkv: shape is \[4, 2, 2, 16\]; wanted \[rows, 3, heads, head_dim\]",
        ),
        (
            lambda x: flash_attn_interface.flash_attn_qkvpacked_func(x[:, :, 0]),
            "num_heads_q: got None",
        ),
        (
            lambda x: flash_attn_interface.flash_attn_qkvpacked_func(x[:, :, 0], num_heads_q=1),
            "num_heads_q: got 1 of 2 heads",
        ),
    ],
)
def test_packed_arrays_of_other_shapes(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(torch.zeros(2, 4, 2, HK, D))


def test_forward_passes_that_return_the_lse() -> None:
    """Ring attention takes these."""
    raw = importlib.import_module("cupyattn.flash_attn.flash_attn_interface")
    q, k = torch.randn(2, 3, H, D), torch.randn(2, 5, HK, D)
    want, want_lse = flash_attn.flash_attn_func(
        q, k, k, causal=True, window_size=(2, 0), return_softmax_lse=True
    )
    out, lse, _, state = raw._flash_attn_forward(q, k, k, 0.0, None, True, 2, 0)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and state is None
    given = q.reshape(-1, H, D), k.reshape(-1, HK, D), k.reshape(-1, HK, D)
    given += (ints(0, 3, 6), ints(0, 5, 10), 3, 5, 0.0, None, True, 2, 0)
    out, lse, *_ = raw._flash_attn_varlen_forward(*given)
    assert torch.allclose(out.reshape(want.shape), want, atol=1e-6) and lse.shape == (H, 6)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        raw._flash_attn_varlen_forward(*given, num_splits=2)
    with pytest.raises(UnsupportedError, match="leftpad_k"):
        raw._flash_attn_varlen_forward(*given, leftpad_k=ints(0, 0))


def test_a_positional_zero_is_no_scale() -> None:
    """FA2's dropout_p in the place of FA3's softmax_scale: the mean of v, once."""
    q, k = torch.randn(1, 2, H, D), torch.randn(1, 3, HK, D)
    with pytest.raises(ArgumentError, match=r"softmax_scale: got 0\.0, with which all keys"):
        flash_attn_interface.flash_attn_func(q, k, k, 0.0, causal=True)
    with pytest.raises(ArgumentError, match="softmax_scale: got 0"):
        flash_attn.flash_attn_func(q, k, k, softmax_scale=0)
    with pytest.raises(UnsupportedError, match=r"dropout_p: got 0\.125.*flash_attn_interface"):
        flash_attn.flash_attn_func(q, k, k, 0.125, True)


def test_a_window_may_be_an_array() -> None:
    """Which is read at each call: it may change in place."""
    q, k = torch.randn(1, 4, H, D), torch.randn(1, 6, HK, D)
    window = torch.tensor([1, 0])
    for _ in range(2):
        for sides in ((1, 0), (3, 1), (-1, -1)):
            window[:] = torch.tensor(sides)
            want = flash_attn.flash_attn_func(q, k, k, window_size=sides)
            for given in (window, window.numpy(), list(sides)):
                got = flash_attn.flash_attn_func(q, k, k, window_size=given)
                assert torch.equal(got, want)
            assert torch.equal(
                flash_attn.flash_attn_with_kvcache(q, k, k, window_size=window),
                flash_attn.flash_attn_with_kvcache(q, k, k, window_size=sides),
            )


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("is_number", [False, True])
def test_keys_past_the_page_table_are_an_error(new: int, is_number: bool) -> None:
    """RuntimeError as FA2 raises it, and nothing is written."""
    q, pages = torch.randn(1, 1, H, D), torch.randn(3, PAGE, HK, D)
    table, fresh = ints(2, 0)[None], torch.randn(1, new, HK, D)
    named = {"k": fresh, "v": fresh} if new else {}
    before, room = pages.clone(), 2 * PAGE
    values = pages.clone()

    def call(length: int) -> Any:
        lens = length if is_number else ints(length)
        return flash_attn.flash_attn_with_kvcache(
            q, pages, values, cache_seqlens=lens, block_table=table, **named
        )

    with pytest.raises(RuntimeError, match=r"cache_seqlens: .* block_table has pages") as e:
        call(room - new + 1)
    assert isinstance(e.value, ArgumentError) and torch.equal(pages, before)
    assert call(room - new).isfinite().all()
    with pytest.raises(RuntimeError, match=r"cache_seqlens: .* and (k_cache|the cache) holds"):
        flash_attn.flash_attn_with_kvcache(
            q, pages[:1], values[:1], cache_seqlens=PAGE + 1 if is_number else ints(PAGE + 1)
        )


def test_caches_of_an_odd_head_dim() -> None:
    """New keys go to the caller's caches, rotated."""
    dim, count = 57, 2
    rng = torch.Generator().manual_seed(0)
    caches = [torch.randn(4, PAGE, HK, dim, generator=rng) for _ in "kv"]
    wide = [torch.nn.functional.pad(x, (0, 7)) for x in caches]
    q = torch.randn(count, 2, H, dim, generator=rng)
    new = [torch.randn(count, 2, HK, dim, generator=rng) for _ in "kv"]
    turns = [torch.randn(12, 8, generator=rng) for _ in "cs"]
    named = {
        "rotary_cos": turns[0], "rotary_sin": turns[1], "cache_seqlens": ints(1, 5),
        "block_table": ints(3, 1, 0, 2).reshape(2, 2), "causal": True,
        "return_softmax_lse": True, "softmax_scale": dim**-0.5,
    }  # fmt: skip
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, *new, **named)
    pad = [torch.nn.functional.pad(x, (0, 7)) for x in (q, *new)]
    want, want_lse = flash_attn.flash_attn_with_kvcache(pad[0], *wide, *pad[1:], **named)
    assert torch.equal(out, want[..., :dim]) and torch.equal(lse, want_lse)
    assert all(torch.equal(x, y[..., :dim]) for x, y in zip(caches, wide, strict=True))


# --- padding ---


def frameworks() -> list[tuple[str, Any, Any]]:
    found = [("numpy", np.asarray, np.asarray), ("torch", torch.from_numpy, lambda x: x.numpy())]
    try:
        import jax
    except ImportError:
        return found
    return [*found, ("jax", jax.numpy.asarray, np.asarray)]


@pytest.mark.parametrize(("name", "make", "read"), frameworks())
def test_padded_batches_become_rows_and_back(name: str, make: Any, read: Any) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 2, 5)).astype(np.float32)
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
    unused = np.array([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    rows, indices, offsets, most, used = bert_padding.unpad_input(make(x), make(mask))
    assert type(rows) is type(make(x)) and type(offsets) is type(rows)
    np.testing.assert_array_equal(read(rows), x[mask])
    assert read(offsets).tolist() == [0, 2, 2, 5] and most == 3
    assert read(used).tolist() == [2, 0, 3] and str(offsets.dtype).endswith("int32")
    back = bert_padding.pad_input(rows, indices, 3, 4)
    np.testing.assert_array_equal(read(back), x * mask[..., None, None])
    rows, indices, offsets, most, used = bert_padding.unpad_input(make(x), make(mask), make(unused))
    np.testing.assert_array_equal(read(rows), x[mask | unused])
    assert read(offsets).tolist() == [0, 3, 3, 7] and read(used).tolist() == [2, 0, 3]
    lengths = np.array([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 0]], np.int32)
    rows, indices, offsets, most = bert_padding.unpad_input_for_concatenated_sequences(
        make(x), make(lengths)
    )
    np.testing.assert_array_equal(read(rows), x[[[True] * 3 + [False], [True] * 4,
                                                 [True] * 3 + [False]]])  # fmt: skip
    assert read(offsets).tolist() == [0, 2, 3, 7, 8, 9, 10] and most == 4
    flat = bert_padding.index_first_axis(make(x[0]), make(np.array([3, 1])))
    np.testing.assert_array_equal(read(flat), x[0][[3, 1]])


def test_bad_padding() -> None:
    x, mask = np.zeros((2, 3, 4), np.float32), np.ones((2, 4), bool)
    with pytest.raises(ArgumentError, match=r"attention_mask: shape is \[2, 4\]"):
        bert_padding.unpad_input(x, mask)
    with pytest.raises(ArgumentError, match="values, indices: shapes are"):
        bert_padding.pad_input(x, np.zeros(3, np.int32), 2, 3)
    with pytest.raises(ArgumentError, match="seqlen: got -1"):
        bert_padding.pad_input(x, np.zeros(2, np.int32), 2, -1)


def test_gradients_pass_through_padding() -> None:
    """It is the framework's own indexing."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    rows, indices, *_ = bert_padding.unpad_input(x, mask)
    bert_padding.pad_input(rows, indices, 2, 3).sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand(2, 3, 4).float())


def test_gradients_are_refused() -> None:
    q = torch.randn(1, 2, H, D, requires_grad=True)
    with pytest.raises(ArgumentError, match="q: requires grad"):
        flash_attn.flash_attn_func(q, q.detach(), q.detach())
    with torch.no_grad():
        flash_attn.flash_attn_func(q, q, q)
    with pytest.raises(UnsupportedError, match="dropout_p"):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.1)

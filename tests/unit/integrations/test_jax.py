"""Calls inside jax.jit, on the CPU: XLA calls the handlers as it does on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi")

from helpers import framework_calls  # noqa: E402
from helpers.framework_calls import HK, Arrays  # noqa: E402

import cupyattn  # noqa: E402
import cupyattn.integrations.jax as door  # noqa: E402
from cupyattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from cupyattn.integrations import xla_ffi  # noqa: E402


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def x(request: pytest.FixtureRequest) -> Arrays:
    return Arrays(jax, request.param)


@pytest.mark.parametrize("name", framework_calls.JAX)
def test_a_compiled_call_answers_as_an_eager_one(name: str, x: Arrays) -> None:
    framework_calls.check_jit(jax, name, x)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("donates", [False, True])
def test_appending(is_pair: bool, donates: bool, x: Arrays) -> None:
    framework_calls.check_append(jax, x, is_pair, donates=donates)


def test_arrays_outside_of_jit(x: Arrays) -> None:
    want = cupyattn.dot_product_attention(x.q, x.k, x.v)
    np.testing.assert_array_equal(door.dot_product_attention(x.q, x.k, x.v), want)


def test_a_decoding_loop_in_scan(x: Arrays) -> None:
    """A token a step is written and attended to; the cache is carried along."""
    index = x.table.flatten()

    def step(carry: Any, token: Any) -> Any:
        pages, lens = carry
        new = token[:, :HK]
        pages = door.append_paged_kv_cache(new, new, index[:2], lens, pages, index, x.indptr, x.few)
        out = door.dot_product_attention(
            token[:, None], *pages, block_table=x.table, kv_lens=lens + 1
        )
        return (pages, lens + 1), out[:, 0]

    tokens = jax.numpy.swapaxes(x.q, 0, 1)
    (pages, lens), out = jax.jit(lambda c, t: jax.lax.scan(step, c, t))((x.pages, x.few), tokens)
    np.testing.assert_array_equal(lens, x.few + 3)
    carry: Any = (tuple(np.array(y) for y in x.pages), np.array(x.few))
    for at, token in enumerate(np.asarray(tokens)):
        new, lens = token[:, :HK], carry[1]
        cupyattn.append_paged_kv_cache(
            new, new, np.array(index[:2]), lens, carry[0], *map(np.array, (index, x.indptr, x.few))
        )
        carry = carry[0], lens + 1
        want = cupyattn.dot_product_attention(
            token[:, None], *carry[0], block_table=np.array(x.table), kv_lens=carry[1]
        )
        np.testing.assert_array_equal(out[at], want[:, 0])
    np.testing.assert_array_equal(pages[0], carry[0][0])


def test_vmap_is_one_request_after_another(x: Arrays) -> None:
    inside = jax.jit(jax.vmap(lambda q, k, v: door.dot_product_attention(q, k, v, is_causal=True)))
    want = cupyattn.dot_product_attention(x.q, x.k, x.v, is_causal=True)
    np.testing.assert_allclose(np.asarray(inside(x.q, x.k, x.v), np.float32),
                               np.asarray(want, np.float32), atol=1e-6)  # fmt: skip


def test_shard_map(x: Arrays) -> None:
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has no jax.shard_map")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("heads",))
    spec = jax.sharding.PartitionSpec(None, None, "heads")
    sharded = jax.shard_map(
        lambda q, k, v: door.dot_product_attention(q, k, v),
        mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False,
    )  # fmt: skip
    want = cupyattn.dot_product_attention(x.q, x.k, x.v)
    np.testing.assert_array_equal(jax.jit(sharded)(x.q, x.k, x.v), want)


def test_gradients_are_refused(x: Arrays) -> None:
    def loss(q: Any) -> Any:
        return door.dot_product_attention(q, x.k, x.v).astype("float32").sum()

    with pytest.raises(UnsupportedError, match=r"^dot_product_attention: cupyattn has no gradient"):
        jax.grad(loss)(x.q)


def test_constants_are_not_traced(x: Arrays) -> None:
    compiled = jax.jit(lambda q, scale: door.dot_product_attention(q, x.k, x.v, scale=scale))
    with pytest.raises(ArgumentError, match=r"^scale: is traced, but is a constant"):
        compiled(x.q, 0.5)
    with pytest.raises(UnsupportedError, match=r"^out: JAX arrays"):
        door.dot_product_attention(x.q, x.k, x.v, out=x.q)
    with pytest.raises(UnsupportedError, match=r"^workspace_buffer"):
        door.trtllm_batch_decode_with_kv_cache_mla(
            x.wide, x.latents, x.q, 128, 512, 64, x.table, x.lens, 8
        )


def test_what_is_refused_while_jax_traces(x: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(**named: Any) -> Any:
        return jax.eval_shape(lambda q: door.dot_product_attention(q, x.k, x.v, **named), x.q)

    with pytest.raises(ArgumentError, match=r"^mask: dtype is float32; wanted bool.*as bias"):
        traced(mask=x.mask.astype("float32"))
    with pytest.raises(UnsupportedError, match=r"^k: JAX arrays cannot be written; append by"):
        door.flash_attn_with_kvcache(x.q, x.k, x.v, x.new, x.new, cache_seqlens=x.lens)
    with pytest.raises(UnsupportedError, match=r"^out: JAX arrays cannot be written"):
        door.single_prefill_with_kv_cache(x.q[0], x.k[0], x.v[0], out=x.q[0])
    with pytest.raises(UnsupportedError, match=r"^o_dtype: single_prefill_with_kv_cache does not"):
        door.single_prefill_with_kv_cache(x.q[0], x.k[0], x.v[0], o_dtype="float32")
    with pytest.raises(TypeError, match="nonsense"):
        door.single_prefill_with_kv_cache(x.q[0], x.k[0], x.v[0], nonsense=1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x.q, x.k, x.v)]
    if x.q.dtype == "float32":
        with pytest.raises(UnsupportedError, match=r"^query: float32 has no kernel on a GPU; cast"):
            jax.eval_shape(door.dot_product_attention, *shapes)
        with jax.default_device("cpu"):
            jax.eval_shape(door.dot_product_attention, *shapes)
    else:
        jax.eval_shape(door.dot_product_attention, *shapes)
    traced()  # keys that are on a CPU


def test_the_eager_name_takes_tracers(x: Arrays) -> None:
    """Once the door is imported: inside of jit and vmap, with JAX's names and its LSE."""
    want, want_lse = cupyattn.dot_product_attention(x.q, x.k, x.v, return_residual=True)
    assert want_lse.dtype == x.q.dtype
    for f in (jax.jit, jax.vmap):
        out, lse = f(lambda q, k, v: cupyattn.dot_product_attention(q, k, v, return_residual=True))(
            x.q, x.k, x.v
        )
        assert lse.dtype == x.q.dtype
        for a, b in ((out, want), (lse, want_lse)):
            np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (a, b)), atol=1e-6)
    lens = cupyattn.dot_product_attention(x.q, x.k, x.v, key_value_seq_lengths=x.lens)
    got = jax.jit(lambda n: cupyattn.dot_product_attention(x.q, x.k, x.v, key_value_seq_lengths=n))(
        x.lens
    )
    np.testing.assert_array_equal(got, lens)


def test_as_jax_nn(x: Arrays) -> None:
    """With its alignment, lengths of both and biases under jit."""
    tolerance = 1e-5 if x.q.dtype == "float32" else 2e-2
    for named in (
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (2, 1)},
        {"bias": x.bias, "is_causal": True},
        {"is_causal": True, "query_seq_lengths": x.few, "key_value_seq_lengths": x.lens},
    ):
        got = jax.jit(
            lambda q, named=named: door.dot_product_attention(
                q, x.k, x.v, causal_alignment="first", **named
            )
        )(x.q)
        want = jax.nn.dot_product_attention(x.q, x.k, x.v, **named)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance
        )


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_attention_of_flax(lead: tuple[int, ...], x: Arrays) -> None:
    """Its arguments and shapes; masks of numbers, biases that differ by head alone or by all."""
    jnp, rng = jax.numpy, np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.standard_normal((*lead, 6, 4, 16)), x.q.dtype) for _ in "qkv")
    causal = jnp.tril(jnp.ones((*lead, 1, 6, 6), "float32"))
    bias = jnp.asarray(rng.standard_normal((*lead, 4, 6, 6)), x.q.dtype)
    tolerance = 1e-5 if x.q.dtype == "float32" else 4e-2
    for named in (
        {},
        {"mask": causal},
        {"mask": causal > 0, "bias": bias},
        {"bias": bias[(0,) * len(lead)]},
        {"is_causal": True},
    ):
        got = jax.jit(
            lambda q, named=named: door.attention_fn(
                q, k, v, dropout_rng=None, dropout_rate=0.5, broadcast_dropout=False,
                deterministic=True, dtype=q.dtype, precision=None, module=None, **named,
            )
        )(q)  # fmt: skip
        logits = jnp.einsum("...thd,...shd->...hts", q, k).astype("float32") / 4
        if "bias" in named:
            logits = logits + named["bias"]
        if "mask" in named or "is_causal" in named:
            logits = jnp.where(causal > 0, logits, -jnp.inf)
        want = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(logits).astype(v.dtype), v)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance
        )
    with pytest.raises(UnsupportedError, match=r"^dropout_rate: got 0.1 with"):
        door.attention_fn(q, k, v, dropout_rate=0.1)
    with pytest.raises(UnsupportedError, match=r"^module"):
        door.attention_fn(q, k, v, module=object())


def test_flax_layers() -> None:
    flax = pytest.importorskip("flax.linen")
    jnp = jax.numpy
    x = jax.random.normal(jax.random.key(0), (2, 7, 24))
    mask = flax.make_causal_mask(x[..., 0])
    plain = flax.MultiHeadDotProductAttention(num_heads=3, dropout_rate=0.1, deterministic=True)
    ours = plain.clone(attention_fn=door.attention_fn)
    parameters = plain.init(jax.random.key(1), x)  # heads of 8 columns
    want = plain.apply(parameters, x, mask=mask)
    got = jax.jit(lambda x: ours.apply(parameters, x, mask=mask))(x)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert jnp.isfinite(got).all()


def test_errors_come_through_xla(x: Arrays) -> None:
    compiled = jax.jit(lambda q, k: door.dot_product_attention(q, k, k))
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*ArgumentError: key: shape is \[1, 8"):
        jax.block_until_ready(compiled(x.q, x.k[:1]))
    # The next call is as before.
    assert compiled(x.q, x.k).shape == x.q.shape


def test_calls_that_may_be_recorded_run_on_the_cpu_too(
    x: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_RECORDS_SINCE", (0,))
    monkeypatch.delenv("CUPYATTN_XLA_GRAPHS", raising=False)
    compiled = jax.jit(lambda q: door.dot_product_attention(q * 2, x.k, x.v))
    assert door._RECORDED_TARGET in compiled.lower(x.q).as_text()
    want = door.dot_product_attention(x.q * 2, x.k, x.v)
    np.testing.assert_allclose(compiled(x.q), want, atol=1e-6)
    # XLA refuses graphs in which nothing is launched.
    assert door._RECORDED_TARGET not in compiled.lower(x.q[:, :0]).as_text()
    monkeypatch.setenv("CUPYATTN_XLA_GRAPHS", "0")
    launched = jax.jit(lambda q: door.dot_product_attention(q * 2, x.k, x.v))
    assert door._RECORDED_TARGET not in launched.lower(x.q).as_text()


def test_structures_have_the_sizes_of_the_header() -> None:
    """Compiled from XLA's own header, which jaxlib carries."""
    import ctypes
    import shutil
    import subprocess
    import tempfile
    from pathlib import Path

    compiler = shutil.which("g++") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler")
    offsets = {
        "XLA_FFI_Metadata, traits": xla_ffi._Metadata.traits.offset,
        "XLA_FFI_Buffer, dims": xla_ffi._Buffer.dims.offset,
        "XLA_FFI_CallFrame, args": xla_ffi._CallFrame.args.offset,
        "XLA_FFI_CallFrame, rets": xla_ffi._CallFrame.rets.offset,
        "XLA_FFI_CallFrame, attrs": xla_ffi._CallFrame.attributes.offset,
        "XLA_FFI_CallFrame, stage": xla_ffi._CallFrame.stage.offset,
        "XLA_FFI_Attrs, attrs": xla_ffi._Attributes.attributes.offset,
        "XLA_FFI_Api, XLA_FFI_Error_Create": xla_ffi._Api.error_create.offset,
        "XLA_FFI_Api, XLA_FFI_Stream_Get": xla_ffi._Api.stream_get.offset,
        "XLA_FFI_Stream_Get_Args, stream": xla_ffi._StreamGet.stream.offset,
        "XLA_FFI_Error_Create_Args, errc": xla_ffi._ErrorCreate.code.offset,
        "XLA_FFI_Metadata_Extension, metadata": xla_ffi._MetadataExtension.metadata.offset,
    }
    sizes = {
        "XLA_FFI_Error_Create_Args_STRUCT_SIZE": xla_ffi._ERROR_CREATE_SIZE,
        "XLA_FFI_Stream_Get_Args_STRUCT_SIZE": ctypes.sizeof(xla_ffi._StreamGet),
        "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE": xla_ffi._MAY_BE_RECORDED,
    }
    lines = [f"static_assert(offsetof({at}) == {want});" for at, want in offsets.items()]
    lines += [f"static_assert({name} == {want});" for name, want in sizes.items()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "sizes.cpp"
        source.write_text('#include "xla/ffi/api/c_api.h"\n' + "\n".join(lines))
        done = subprocess.run(
            [compiler, "-std=c++17", "-fsyntax-only", "-I", jax.ffi.include_dir(), str(source)],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr

"""The doors on a GPU: dot_product_attention, torch's operators, jax.jit, transformers' models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import framework_calls, model_families
from helpers.framework_calls import EAGER, JAX, TORCH, Arrays

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")


# --- dot_product_attention: a GPU's answers beside the CPU's ---

B, T, S, H, HK, D, PAGE = 3, 5, 48, 8, 2, 64, 16
LENS, Q_LENS = np.array([48, 19, 7], np.int32), np.array([5, 2, 0], np.int32)
TABLE = np.array([[4, 0, 7], [2, 5, 99], [8, 99, 99]], np.int32)
OFFSETS = {"cu_seqlens_q": np.array([0, 5, 5, 9], np.int32)}
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "dense": ((B, T, H, D), (B, S, HK, D), {}),
    "one": ((1, T, H, D), (1, S, HK, D), {}),
    "token": ((1, 1, H, D), (1, S, HK, D), {}),
    "no batch": ((T, H, D), (S, HK, D), {}),
    "lengths": ((B, T, H, D), (B, S, HK, D), {"key_value_seq_lengths": LENS}),
    "both": (
        (B, T, H, D),
        (B, S, HK, D),
        {"key_value_seq_lengths": LENS, "query_seq_lengths": Q_LENS},
    ),
    "pages": ((B, 1, H, D), (9, PAGE, HK, D), {"block_table": TABLE, "kv_lens": LENS}),
    "paged rows": (
        (9, H, D),
        (9, PAGE, HK, D),
        {"block_table": TABLE, "kv_lens": LENS, "max_seqlen_q": 5, **OFFSETS},
    ),
    "ragged": (
        (9, H, D),
        (74, HK, D),
        {"cu_seqlens_k": np.array([0, 48, 67, 74], np.int32), "max_seqlen_q": 5, **OFFSETS},
    ),
    "mask": ((B, T, H, D), (B, S, HK, D), {"mask": True}),
    "mask, lengths": (
        (B, T, H, D),
        (B, S, HK, D),
        {"mask": True, "key_value_seq_lengths": LENS, "local_window_size": (9, 4)},
    ),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "local_window_size": (7, 0)},
    {"logits_soft_cap": 2.0, "scale": 0.2, "sinks": np.linspace(-1, 1, H).astype(np.float32)},
]


@pytest.mark.parametrize("framework", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "cap"])
@pytest.mark.parametrize("form", FORMS)
def test_dot_product_attention(
    form: str, options: dict[str, Any], framework: str, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    shape_q, shape_k, more = FORMS[form]
    named = more | options
    if "mask" in named:
        named["mask"] = rng.random((B, 1, T, S)) < 0.7
    q, k, v = (
        rng.standard_normal(shape).astype(np.float16) for shape in (shape_q, shape_k, shape_k)
    )
    want, want_lse = cupyattn.dot_product_attention(q, k, v, return_lse=True, **named)
    if framework == "torch":
        torch = request.getfixturevalue("torch")
        put = lambda x: torch.from_numpy(x).cuda()  # noqa: E731
        take = lambda x: x.cpu().numpy()  # noqa: E731
    elif framework == "jax":
        jax = _jax_on_gpu()
        put, take = jax.numpy.asarray, np.asarray
    else:
        put, take = cupy.asarray, cupy.asnumpy
    named = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in named.items()}
    for _ in range(2):  # checked, then cached
        out, lse = cupyattn.dot_product_attention(put(q), put(k), put(v), return_lse=True, **named)
        out, lse = take(out), take(lse)
        rows = np.s_[:]
        if "query_seq_lengths" in named:
            rows = np.arange(T)[None] < Q_LENS[:, None]
            assert not out[~rows].any()
        np.testing.assert_allclose(out[rows], want[rows], atol=4e-3, rtol=4e-3)
        np.testing.assert_allclose(lse[rows], want_lse[rows], atol=2e-3, rtol=1e-3)
    out = cupyattn.dot_product_attention(put(q), put(k), put(v), **named)
    np.testing.assert_allclose(take(out)[rows], want[rows], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("t, s", [(T, S), (S, T), (T, T), (1, S), (200, 70)])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"local_window_size": (9, 4)},
        {"local_window_size": (-1, 3), "logits_soft_cap": 2.0},
        {"is_causal": True, "local_window_size": (4, -1)},
    ],
    ids=["causal", "window", "right", "left"],
)
@pytest.mark.parametrize(
    "form", ["dense", "one", "no batch", "lengths", "both", "mask", "mask, both", "bias, both"]
)
def test_the_first_query_at_the_first_key(
    form: str, options: dict[str, Any], t: int, s: int, torch: Any
) -> None:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((B, t, H, D)).astype(np.float16)
    k, v = rng.standard_normal((2, B, s, HK, D)).astype(np.float16)
    named: dict[str, Any] = options | {"causal_alignment": "first"}
    if form.endswith(("lengths", "both")):
        named["key_value_seq_lengths"] = np.array([s, max(1, s - 3), 1], np.int32)
    if form.endswith("both"):
        named["query_seq_lengths"] = np.array([max(1, t - 1), t, 1], np.int64)
    if form.startswith("mask"):
        named["mask"] = rng.random((B, 1, t, s)) < 0.7
    if form.startswith("bias"):
        named["bias"] = rng.standard_normal((1, H, t, s)).astype(np.float16)
    if form == "one":
        q, k, v = q[:1], k[:1], v[:1]
    if form == "no batch":
        q, k, v = q[0], k[0], v[0]
    want, want_lse = cupyattn.dot_product_attention(q, k, v, return_lse=True, **named)
    put = lambda x: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x  # noqa: E731
    on_gpu = {name: put(x) for name, x in named.items()}
    for _ in range(2):  # checked, then cached
        out, lse = cupyattn.dot_product_attention(*map(put, (q, k, v)), return_lse=True, **on_gpu)
        np.testing.assert_allclose(out.cpu().numpy(), want, atol=4e-3, rtol=4e-3)
        rows = np.s_[:]
        if "query_seq_lengths" in named:
            rows = np.arange(t)[None] < named["query_seq_lengths"][:, None]
        np.testing.assert_allclose(lse.cpu().numpy()[rows], want_lse[rows], atol=2e-3, rtol=1e-3)


def test_a_graph_captures_dot_product_attention(torch: Any) -> None:
    """Its replays follow lengths that change."""
    q, k, v = (
        torch.randn(B, n, h, D, dtype=torch.float16, device="cuda")
        for n, h in ((1, H), (S, HK), (S, HK))
    )
    lens = torch.tensor(LENS, device="cuda")

    def call() -> Any:
        return cupyattn.dot_product_attention(q, k, v, key_value_seq_lengths=lens)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for step in range(3):
        lens.copy_(torch.tensor(LENS - step))
        graph.replay()
        torch.testing.assert_close(out, call(), rtol=0, atol=0)


# --- torch ---


@pytest.fixture
def tensors(torch: Any) -> Any:
    import cupyattn.integrations.torch  # noqa: F401

    torch._dynamo.reset()
    return Arrays(torch, "float16", "cuda")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", TORCH)
def test_calls_in_a_compiled_graph(name: str, backend: str, tensors: Any) -> None:
    _check_compiled(lambda q: TORCH[name](EAGER, tensors, q), tensors, backend)


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_runs_in_a_compiled_graph(kind: str, tensors: Any) -> None:
    from cupyattn.integrations.torch import RUNS_SINCE

    if tuple(map(int, tensors.xp.__version__.split(".")[:2])) < RUNS_SINCE:
        pytest.skip("this torch keeps no wrapper beside a graph")
    _check_compiled(framework_calls.wrapper(tensors, kind), tensors, "inductor")


def _check_compiled(function: Any, x: Any, backend: str) -> None:
    torch = x.xp

    def whole(q: Any) -> Any:
        made = function(q * 2)
        return [y * 2 for y in made] if isinstance(made, (tuple, list)) else made * 2

    compiled = torch.compile(whole, backend=backend, fullgraph=True)
    for scale in (1, 0.5):
        torch.testing.assert_close(compiled(x.q * scale), whole(x.q * scale), rtol=0, atol=0)


def test_reduce_overhead_captures_a_call(tensors: Any) -> None:
    """Inductor's own CUDA graphs; the third call on replays one."""
    torch, x = tensors.xp, tensors

    def step(q: Any, lens: Any) -> Any:
        return (
            cupyattn.dot_product_attention(q * 2, *x.pages, block_table=x.table, kv_lens=lens) * 2
        )

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for n in range(5):
        lens = x.lens - n % 2
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x.q, lens).clone(), step(x.q, lens), rtol=0, atol=0)


# --- JAX ---


def _jax_on_gpu() -> Any:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX is here without CUDA")
    return jax


@pytest.mark.parametrize("name", JAX)
def test_calls_inside_jit(name: str) -> None:
    jax = _jax_on_gpu()
    framework_calls.check_jit(jax, name, Arrays(jax, "bfloat16"))


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("donates", [False, True])
def test_appending_inside_jit(is_pair: bool, donates: bool) -> None:
    jax = _jax_on_gpu()
    framework_calls.check_append(jax, Arrays(jax, "float16"), is_pair, donates=donates)


def test_as_jax_nn() -> None:
    """With its alignment, lengths of both, biases and its LSE, by one name inside and outside."""
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door

    x = Arrays(jax, "float16")
    for named in (
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (2, 1)},
        {"bias": x.bias, "is_causal": True},
        {"is_causal": True, "query_seq_lengths": x.few, "key_value_seq_lengths": x.lens},
    ):
        want = jax.nn.dot_product_attention(x.q, x.k, x.v, **named)
        for call in (cupyattn.dot_product_attention, door.dot_product_attention):
            ours = lambda q, call=call, named=named: call(  # noqa: E731
                q, x.k, x.v, causal_alignment="first", **named
            )
            for answer in (ours(x.q), jax.jit(ours)(x.q)):
                np.testing.assert_allclose(answer, want, atol=4e-3, rtol=4e-3)
    mapped = jax.vmap(lambda q, k, v: cupyattn.dot_product_attention(q, k, v))(x.q, x.k, x.v)
    np.testing.assert_allclose(
        mapped, jax.nn.dot_product_attention(x.q, x.k, x.v), atol=4e-3, rtol=4e-3
    )


def test_attention_of_flax() -> None:
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door

    x = Arrays(jax, "bfloat16")
    k, v = (jax.numpy.repeat(y, 2, axis=2) for y in (x.k, x.v))
    mask = x.mask.astype("float32")
    got = jax.jit(lambda q: door.attention_fn(q, k, v, mask=mask, deterministic=True))(x.q)
    want = jax.nn.dot_product_attention(x.q, k, v, mask=x.mask)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-2, rtol=3e-2
    )


def test_float32_is_refused_while_jax_traces() -> None:
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door

    x = Arrays(jax, "float32")
    with pytest.raises(cupyattn.UnsupportedError, match=r"^query: float32 has no kernel on a GPU"):
        jax.jit(door.dot_product_attention).lower(x.q, x.k, x.v)


def test_programs_end_during_a_call() -> None:
    import os
    import subprocess
    import sys

    _jax_on_gpu()
    begin = (
        "import jax, jax.numpy as jnp\n"
        "from cupyattn.integrations.jax import dot_product_attention\n"
        "layer = jax.jit(lambda q: dot_product_attention(q * 2, q, q, is_causal=True) + 1)\n"
        "x = jnp.ones((2, 8, 4, 64), jnp.float16)\n"
    )
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for end in (
        "layer(x)",
        "kept = [layer(x) for _ in range(8)]",
        "y = layer(x); raise ValueError",
    ):
        done = subprocess.run([sys.executable, "-c", begin + end], env=environment, timeout=90,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == ("raise" in end), done.stderr[-500:]


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("kind", ["prompts", "one prompt", "decode", "pages", "split", "fp8 pages"])
def test_memory_that_moves(kind: str, head_dim: int) -> None:
    """XLA places arrays anew; what was launched on other memory is launched there."""
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door

    jnp = jax.numpy
    shapes = {
        "prompts": ((2, 200, 8, head_dim), (2, 200, 2, head_dim)),
        "one prompt": ((1, 700, 8, head_dim), (1, 700, 2, head_dim)),
        "decode": ((3, 1, 8, head_dim), (3, 96, 2, head_dim)),
        "split": ((1, 1, 8, head_dim), (1, 9000, 2, head_dim)),
    }
    q_shape, k_shape = shapes.get(kind, ((3, 1, 8, head_dim), (18, 16, 2, head_dim)))
    table = jnp.arange(18, dtype="int32").reshape(3, 6)
    lens = jnp.asarray([96, 40, 7], "int32")
    pages = {"block_table": table, "kv_lens": lens} if "pages" in kind else {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        first = door.dot_product_attention(q, k, v, is_causal=True, **pages)
        return first, door.dot_product_attention(first * 2, v, k, is_causal=True, **pages)

    compiled, kept = jax.jit(attend), []
    for step in range(8):
        keys = jax.random.split(jax.random.key(step), 3)
        kept.append(jnp.zeros(1000 * step + 300, "float16"))
        q = jax.random.normal(keys[0], q_shape, "float16")
        dtype = "float8_e4m3fn" if "fp8" in kind else "float16"
        k, v = (jax.random.normal(key, k_shape, "float16").astype(dtype) for key in keys[1:])
        kept.append((q, k, v))
        got = compiled(q, k, v)
        first = cupyattn.dot_product_attention(q, k, v, is_causal=True, **pages)
        second = cupyattn.dot_product_attention(first * 2, v, k, is_causal=True, **pages)
        for a, b in zip(got, (first, second), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_loop_on_xlas_stream() -> None:
    """Each step reads what the one before has written, with XLA's own kernels between."""
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door

    x = Arrays(jax, "float16")

    def step(q: Any, _: Any) -> Any:
        out = door.dot_product_attention(q, x.k, x.v, is_causal=True)
        return out * 2 + q, out

    last, all_ = jax.jit(lambda q: jax.lax.scan(step, q, None, length=50))(x.q)
    q = x.q
    for at in range(50):
        out = cupyattn.dot_product_attention(q, x.k, x.v, is_causal=True)
        np.testing.assert_allclose(all_[at], out, rtol=2e-2, atol=2e-2)
        q = out * 2 + q
    assert last.shape == q.shape


@pytest.mark.parametrize("kind", ["dense", "pages", "split", "latent"])
def test_steps_that_xla_records(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decoding, whose tables and lengths change: XLA asks us no more after some, whatever
    is in the arrays, and records anew where memory moves. Graphs that are gone give memory back."""
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door
    from cupyattn.integrations import xla_graphs

    monkeypatch.delenv("CUPYATTN_XLA_GRAPHS", raising=False)
    jnp, layers = jax.numpy, 6
    asked: list[str] = []
    for name in ("_on_gpu", "_record"):
        real = getattr(door, name)
        monkeypatch.setattr(
            door, name, lambda *x, real=real, name=name: (asked.append(name), real(*x))
        )
    keys = jax.random.split(jax.random.key(3), 2 * layers + 1)
    rows = {"split": 9000, "dense": 96}.get(kind, 0)
    batch = 1 if kind == "split" else 3
    width = 576 if kind == "latent" else 128
    shape = (batch, rows, 2, width) if rows else (24, 16, 2, width)
    shape = (24, 16, 576) if kind == "latent" else shape
    caches = [jax.random.normal(key, shape, "bfloat16") for key in keys[1:]]
    heads = 16 if kind == "latent" else 8
    q = jax.random.normal(keys[0], (batch, 1, heads, width), "bfloat16")

    def attend(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
        calls: Any = door if isinstance(q, jax.core.Tracer) else cupyattn
        if kind == "latent":
            return calls.trtllm_batch_decode_with_kv_cache_mla(
                q, k, None, 128, 512, 64, table, lens, 96, bmm1_scale=0.05
            )
        pages = {"block_table": table, "kv_lens": lens} if kind == "pages" else {}
        return calls.dot_product_attention(q, k, v, **pages)

    def step(q: Any, caches: Any, table: Any, lens: Any) -> Any:
        for at in range(layers):
            out = attend(q, caches[2 * at], caches[2 * at + 1], table, lens)
            q = q.at[..., : out.shape[-1]].add(out)
        return q

    def check(compiled: Any, at: int, caches: Any) -> None:
        table = (jnp.arange(18, dtype="int32").reshape(3, 6) + at) % 24
        lens = jnp.asarray([96, 40 + at, 7 + at], "int32")
        got, want = compiled(q, caches, table, lens), step(q, caches, table, lens)
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=3e-2, atol=3e-2)

    compiled = jax.jit(step)
    check(compiled, 0, caches)
    table, lens = jnp.zeros((3, 6), "int32"), jnp.full(3, 50, "int32")
    for _ in range(8):
        asked.clear()
        jax.block_until_ready(compiled(q, caches, table, lens))
    is_recorded = jax.__version_info__ >= door._RECORDS_SINCE
    assert asked == ([] if is_recorded else ["_on_gpu"] * layers)
    kept = []
    for at in range(40):
        kept.append(jnp.zeros(1000 * at + 300, "float16"))
        caches = [x + 0 for x in caches]
        check(compiled, at % 12, caches)
    if is_recorded:
        # Another program puts an end to the graphs of those before it.
        other = jax.jit(lambda *x: step(*x) + 1)
        for _ in range(3):
            jax.block_until_ready(other(q, caches, table, lens))
        assert len(xla_graphs._held) <= 8 * layers


def test_an_error_inside_jit() -> None:
    jax = _jax_on_gpu()
    import cupyattn.integrations.jax as door

    x = Arrays(jax, "float16")
    with pytest.raises(Exception, match=r"ArgumentError: key: shape is"):
        jax.block_until_ready(jax.jit(lambda q: door.dot_product_attention(q, x.k[:1], x.v))(x.q))


# --- transformers ---


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_models_of_transformers(kind: str, padding: int, cache: str, torch: Any) -> None:
    """Logits of prompts and of generated tokens beside eager attention's, in bfloat16; decoding of
    static caches is compiled by transformers itself."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from helpers import tiny_models

    import cupyattn.integrations.transformers as door

    door.register()
    models = [m.to("cuda", torch.bfloat16) for m in tiny_models.pair(transformers, torch, kind)]
    ids = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    ids[1, :padding], mask[1, :padding] = 0, 0
    with torch.no_grad():
        eager, ours = (m(input_ids=ids, attention_mask=mask).logits[mask > 0] for m in models)
        exact = models[0].float()(input_ids=ids, attention_mask=mask).logits[mask > 0]
        models[0].bfloat16()
    error = (ours - exact).norm() / exact.norm()
    allowed = (eager - exact).norm() / exact.norm()
    assert error <= 1.5 * allowed + 1e-3, (error, allowed)
    named: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    tokens = [
        m.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **named)
        for m in models
    ]
    assert tokens[0].shape == tokens[1].shape


def test_continuous_batching(torch: Any) -> None:
    """generate_batch by the flash-named alias: block tables, and transformers' CUDA graphs."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from helpers import tiny_models

    import cupyattn.integrations.transformers as door

    door.register()
    _, ours = tiny_models.pair(transformers, torch, "llama")
    ours = ours.to("cuda", torch.bfloat16)
    prompts = [[5, 9, 13, 40, 7], [6, 3], list(range(2, 40))]
    config = transformers.GenerationConfig(
        max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    named = tiny_models.little_memory(transformers)
    answers = []
    for name in (door.NAME, door.FLASH_NAME):
        ours.set_attn_implementation(f"paged|{name}")
        made = ours.generate_batch(prompts, generation_config=config, **named)
        answers.append([list(x.generated_tokens) for x in made.values()])
    assert all(len(x) == 5 for tokens in answers for x in tokens)
    assert sorted(answers[0]) == sorted(answers[1])


@pytest.mark.parametrize("name", model_families.FAMILIES)
def test_families_of_transformers(name: str, torch: Any) -> None:
    """Answers in bfloat16, of padded requests too, are as near to float32's as eager attention's;
    tokens of both caches are made; and under autocast."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import cupyattn.integrations.transformers as door

    door.register()
    family = model_families.FAMILIES[name]
    eager, ours = (
        m.to("cuda", torch.bfloat16) for m in model_families.pair(family, transformers, torch)
    )
    for padding, is_left in ((0, True), (4, True), (4, False)):
        given = {n: x.cuda() for n, x in family.inputs(torch, padding, is_left).items()}
        small = {n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()}
        want, got = (model_families.answers(m, torch, small).float() for m in (eager, ours))
        exact = model_families.answers(eager.float(), torch, given)
        eager.bfloat16()
        error, allowed = ((x - exact).norm() / exact.norm() for x in (got, want))
        assert error <= 1.5 * allowed + 2e-3, (padding, is_left, error, allowed)
        with torch.autocast("cuda", torch.bfloat16):
            assert model_families.answers(ours.float(), torch, given).isfinite().all()
        ours.bfloat16()
    for named in ({}, {"cache_implementation": "static"}) if family.writes else ():
        given = {n: x.cuda() for n, x in family.inputs(torch, 4).items()}
        given.pop("decoder_input_ids", None)
        named["disable_compile"] = True  # which takes long; tiny_models' are compiled
        made = ours.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False, **named)
        assert made.shape[0] == 2


def test_continuous_batching_with_sinks(torch: Any) -> None:
    """gpt-oss: the tokens of each request alone, where bfloat16 leaves no doubt."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from helpers import tiny_models

    import cupyattn.integrations.transformers as door

    door.register()
    _, ours = tiny_models.pair(transformers, torch, "gpt_oss")
    ours = ours.to("cuda", torch.bfloat16)
    prompts = [[5, 9, 13, 40, 7], [6, 3], list(range(2, 40))]
    named = {"max_new_tokens": 5, "do_sample": False}
    want = [
        ours.generate(torch.tensor([p], device="cuda"), **named)[0, len(p) :].tolist()
        for p in prompts
    ]
    config = transformers.GenerationConfig(eos_token_id=-1, pad_token_id=0, **named)
    small = tiny_models.little_memory(transformers)
    made = ours.generate_batch(prompts, generation_config=config, **small)
    got = [list(x.generated_tokens) for x in made.values()]
    assert sum(a == b for a, b in zip(sorted(got), sorted(want), strict=True)) >= 2


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("window, cap, has_sinks", [(None, None, False), (50, 5.0, True)])
def test_steps_over_growing_caches(
    count: int, is_padded: bool, window: Any, cap: Any, has_sinks: bool, torch: Any
) -> None:
    """What layers of transformers ask for in steps of generate(), one key more at each."""
    if is_padded:
        pytest.importorskip("transformers", minversion="5.0")
    import types

    import cupyattn.integrations.transformers as door

    torch.manual_seed(0)
    named = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(count, 1, 8, 64, **named).transpose(1, 2)
    sinks = torch.randn(8, **named) if has_sinks else None
    layer = types.SimpleNamespace(is_causal=True)
    for length in (97, 98, 99, 1111):
        k, v = (torch.randn(count, 2, length, 64, **named) for _ in "kv")
        seen = torch.ones(count, length, dtype=torch.bool, device="cuda")
        if is_padded:
            seen[-1, : length - 30] = False
        mask = None
        if is_padded:
            mask = door.attention_mask(
                count, 1, length, length - 1, attention_mask=seen, device="cuda"
            )
        scores = (q.float() @ k.float().repeat_interleave(4, 1).transpose(2, 3)) / 8
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        if window is not None:
            scores[..., : max(0, length - window)] = -torch.inf
        if has_sinks:
            ends = sinks.float().view(1, 8, 1, 1).expand(count, -1, -1, -1)
            scores = torch.cat([scores, ends], -1)
        weights = torch.softmax(scores, -1)[..., :length]
        want = (weights @ v.float().repeat_interleave(4, 1)).transpose(1, 2)
        for _ in range(3):
            got, _ = door.attention(
                layer, q, k, v, mask, scaling=0.125, sliding_window=window, softcap=cap,
                s_aux=sinks,
            )  # fmt: skip
            assert (got.float() - want).norm() <= 6e-3 * want.norm(), length

"""Adapters of engines over stubs of their interfaces, and the stubs beside real packages."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import engine_interfaces

from cupyattn import reference
from cupyattn.core import env
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.integrations import minisgl, sglang, vllm
from cupyattn.integrations.engines import joined

torch = pytest.importorskip("torch")

BASES = {
    "sglang": {"CupyAttnBackend": ("layers.attention.base_attn_backend", "AttentionBackend")},
    "vllm": {
        "CupyAttnBackend": ("v1.attention.backend", "AttentionBackend"),
        "CupyAttnBuilder": ("v1.attention.backend", "AttentionMetadataBuilder"),
        "CupyAttnImpl": ("v1.attention.backend", "AttentionImpl"),
        "CupyAttnMLABackend": ("model_executor.layers.attention.mla_attention", "MLACommonBackend"),
        "CupyAttnMLABuilder": (
            "model_executor.layers.attention.mla_attention",
            "MLACommonMetadataBuilder",
        ),
        "CupyAttnMLAImpl": ("model_executor.layers.attention.mla_attention", "MLACommonImpl"),
    },
    "minisgl": {
        "CupyAttnBackend": ("attention.base", "BaseAttnBackend"),
        "CupyAttnMetadata": ("attention.base", "BaseAttnMetadata"),
    },
}


@pytest.mark.parametrize("package", engine_interfaces.packages())
def test_interfaces_are_those_of_the_package(package: str) -> None:
    """Parsed from the sources of an installed one: nothing of it is imported."""
    try:
        assert engine_interfaces.differences(package) == []
    except LookupError:
        pytest.skip(f"{package} is not installed")


def test_a_difference_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/base.py").write_text(
        "class A(ABC):\n    x: int\n    def f(self, a: int = 1): self.y = a\n"
        "    @abstractmethod\n    def g(self): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make = engine_interfaces.Interface
    right = make({"f": "self, a=1", "g": "abstract self"}, ("x", "y"))
    for wanted, number in (
        (right, 0),
        (make({"f": "self, a", "g": "self"}, ("z",)), 3),
        (make({"h": "self"}), 2),
    ):
        modules = {"engine.base": {"A": wanted}, "engine.gone": {}}
        monkeypatch.setattr(engine_interfaces, "MODULES", modules)
        assert len(engine_interfaces.differences("engine")) == number + 1
    with pytest.raises(LookupError):
        engine_interfaces.differences("no_such_engine")


@pytest.fixture(
    params=[(p, c, s) for p, classes in BASES.items() for c in classes for s in ("stub", "real")],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """(our class, the engine's, what its interface says)."""
    package, name, source = request.param
    if source == "stub":
        engine_interfaces.stub(monkeypatch, package)
    else:
        try:
            engine_interfaces.real_classes(monkeypatch, package)
        except LookupError:
            pytest.skip(f"{package} is not installed")
    module, title = BASES[package][name]
    module = f"{package}.{'srt.' if package == 'sglang' else ''}{module}"
    base = getattr(sys.modules[module], title)
    if package == "vllm":
        made = getattr(vllm, name)
    else:
        own = {"sglang": sglang.Backend, "minisgl": minisgl.Backend}[package]
        if name == "CupyAttnMetadata":
            own = minisgl.Metadata
        made = joined(name, own, base)
    return made, base, engine_interfaces.MODULES[module][title]


def test_classes_are_the_engines_own(pair: tuple[Any, Any, Any]) -> None:
    made, base, interface = pair
    assert issubclass(made, base) and not inspect.isabstract(made)
    for name, text in interface.methods.items():
        method = inspect.getattr_static(made, name)
        is_bound = not isinstance(method, staticmethod)
        if name not in vars(base) or inspect.getattr_static(base, name) is not method:
            engine_interfaces.accepts(getattr(made, name), text,
                                      is_bound=is_bound and name != "__init__"
                                      and isinstance(method, classmethod))  # fmt: skip


# --- SGLang ---


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's lists of backends."""
    engine_interfaces.stub(monkeypatch, "sglang")
    found: dict[str, Any] = {}
    lists: dict[str, list[str]] = {"choices": [], "deterministic": []}
    package = sys.modules["sglang.srt"]
    attention = engine_interfaces.module(
        monkeypatch, "sglang.srt.layers.attention.attention_registry"
    )
    attention.ATTENTION_BACKENDS = found
    attention.register_attention_backend = lambda name: lambda f: found.setdefault(name, f)
    args = engine_interfaces.module(monkeypatch, "sglang.srt.server_args")
    args.add_attention_backend_choices = lists["choices"].extend
    args.add_deterministic_attention_backend_choices = lists["deterministic"].extend
    package.server_args = args
    return {"backends": found, **lists}


def runner(**changes: Any) -> SimpleNamespace:
    torch.manual_seed(0)
    buffers = [torch.randn(64, 2, 16), torch.randn(64, 2, 16)]

    def write(layer: Any, loc: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> None:
        for buffer, x in zip(buffers, (k, v), strict=True):
            buffer[loc] = x.view(-1, 2, 16)

    made = {
        "server_args": SimpleNamespace(),
        "model_config": SimpleNamespace(context_len=16, is_encoder_decoder=False),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.randperm(64).int().reshape(4, 16)),
        "token_to_kv_pool": SimpleNamespace(
            get_kv_buffer=lambda layer_id: tuple(buffers), set_kv_buffer=write
        ),
        "page_size": 1,
    }
    return SimpleNamespace(**(made | changes))


class Mode(SimpleNamespace):
    """SGLang's ForwardMode, as far as it is asked."""

    def is_idle(self) -> bool:
        return bool(self.name == "IDLE")


def radix(**changes: Any) -> SimpleNamespace:
    made = {"layer_id": 0, "tp_q_head_num": 4, "tp_k_head_num": 2, "head_dim": 16, "v_head_dim": 16,
            "scaling": 0.25, "logit_cap": 0.0, "sliding_window_size": -1, "k_scale": None,
            "is_cross_attention": False, "v_scale": None, "use_irope": False,
            "attn_type": SimpleNamespace(value="decoder"), "pos_encoding_mode": "NONE",
            "logit_capping_method": "tanh", "xai_temperature_len": -1}  # fmt: skip
    return SimpleNamespace(**(made | changes))


def batch(mode: str, lens: list[int], new: list[int], table: Any) -> SimpleNamespace:
    slots = [table[n, length - k : length] for n, (length, k) in enumerate(zip(lens, new))]  # noqa: B905
    return SimpleNamespace(
        forward_mode=Mode(name=mode),
        req_pool_indices=torch.arange(len(lens)),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
        out_cache_loc=torch.cat(slots).long(),
        spec_info=None,
        encoder_lens=None,
    )


def dense(q: Any, k: Any, v: Any, scale: float, window: int = -1) -> np.ndarray:
    """The reference, [rows, heads, dim]."""
    named = {"sm_scale": scale, "causal": True, "window_left": window}
    return reference.attention(*(x.numpy() for x in (q, k, v)), **named)[0]


def test_sglang_serves_prompts_and_decoding(registry: dict[str, Any]) -> None:
    sglang.register()
    sglang.register()
    assert registry["choices"] == registry["deterministic"] == ["cupyattn"]
    given = runner()
    backend = registry["backends"]["cupyattn"](given)
    table = given.req_to_token_pool.req_to_token
    keys, values = given.token_to_kv_pool.get_kv_buffer(0)
    for mode, lens, new in (("EXTEND", [7, 3], [4, 3]), ("MIXED", [8, 4], [1, 4]),
                            ("DECODE", [9, 5], [1, 1])):  # fmt: skip
        fb = batch(mode, lens, new, table)
        q = torch.randn(sum(new), 64)
        k, v = torch.randn(sum(new), 32), torch.randn(sum(new), 32)
        backend.init_forward_metadata_out_graph(fb)
        backend.init_forward_metadata_in_graph(fb)
        kept = backend.forward_metadata
        backend.forward_metadata = None
        backend.forward_metadata = kept
        out = backend.forward(q, k, v, radix(sliding_window_size=4), fb)
        at = 0
        for n, (length, count) in enumerate(zip(lens, new, strict=True)):
            slots = table[n, :length].long()
            want = dense(q[at : at + count].view(-1, 4, 16), keys[slots], values[slots], 0.25, 4)
            np.testing.assert_allclose(out[at : at + count].view(-1, 4, 16), want, atol=1e-5)
            at += count


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
@pytest.mark.parametrize("scale", [None, 0.25, torch.tensor([0.25])])
def test_sglang_quantises_queries_where_it_is_asked_to(
    scale: Any, mode: str, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a layer's scale, and saturated: what comes is attention of the rounded queries."""
    monkeypatch.setenv(env.EIGHT_BIT_QUERIES.name, "1")
    given, eight = runner(), torch.float8_e4m3fn
    backend = sglang.create(given)
    buffers = tuple(torch.randn(64, 2, 16).to(eight) for _ in "kv")
    backend.core.pool = SimpleNamespace(get_kv_buffer=lambda layer_id: buffers)
    table, new = given.req_to_token_pool.req_to_token, [4, 3] if mode == "EXTEND" else [1, 1]
    fb = batch(mode, [7, 3], new, table)
    q = torch.randn(sum(new), 64).half()
    q[0, 5] = 500 * (scale or 1)
    backend.init_forward_metadata(fb)
    layer = radix(q_scale=scale, k_scale=torch.tensor([0.5]), v_scale=2.0)
    out = backend.forward(q, None, None, layer, fb)
    assert out.dtype == torch.float16
    factor = 1.0 if scale is None else 0.25
    stored = ((q.float() / factor).clamp(-448, 448).to(eight).float() * factor).view(-1, 4, 16)
    keys, values = (x.float() * number for x, number in zip(buffers, (0.5, 2.0), strict=True))
    at = 0
    for n, (length, count) in enumerate(zip([7, 3], new, strict=True)):
        slots = table[n, :length].long()
        want = dense(stored[at : at + count], keys[slots], values[slots], 0.25)
        got = out[at : at + count].view(-1, 4, 16)
        np.testing.assert_allclose(got.float(), want, rtol=2e-3, atol=1e-3)
        at += count
    monkeypatch.delenv(env.EIGHT_BIT_QUERIES.name)
    assert not sglang.create(given).quantises_queries


def test_sglang_has_buffers_for_kernels_that_write(registry: dict[str, Any]) -> None:
    sglang.register()
    wide = runner()
    backend = registry["backends"]["cupyattn"](wide)
    fb = batch("TARGET_VERIFY", [7, 3], [4, 3], wide.req_to_token_pool.req_to_token)
    assert backend.get_fused_kv_write_buffers(radix(), fb) is None  # of float32
    buffers = tuple(torch.zeros(64, 2, 16, dtype=torch.bfloat16) for _ in "kv")
    backend.core.pool = SimpleNamespace(get_kv_buffer=lambda layer_id: buffers)
    keys, values, slots = backend.get_fused_kv_write_buffers(radix(), fb)
    assert keys is buffers[0] and values is buffers[1] and slots is fb.out_cache_loc
    assert backend.get_fused_kv_write_buffers(radix(is_cross_attention=True), fb) is None
    assert backend.get_fused_kv_write_buffers(radix(head_dim=8), fb) is None


def test_sglang_idles(registry: dict[str, Any]) -> None:
    backend = sglang.create(runner())
    idle = SimpleNamespace(forward_mode=Mode(name="IDLE"))
    out = backend.forward(torch.zeros(3, 64), None, None, radix(), idle)
    assert out.shape == (3, 64)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_mla_backend": True}, "use_mla_backend"),
        ({"server_args": SimpleNamespace(speculative_algorithm="EAGLE")}, "EAGLE"),
        ({"is_hybrid_swa": True}, "--disable-hybrid-swa-memory"),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "dcp_size: got 2"),
    ],
)
def test_sglang_refuses(changes: dict[str, Any], match: str, registry: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=match):
        sglang.create(runner(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [("attn_type", "encoder_only"), ("pos_encoding_mode", "ALIBI"), ("xai_temperature_len", 8)],
)
def test_sglang_refuses_layers(name: str, value: Any, registry: dict[str, Any]) -> None:
    backend = sglang.create(runner())
    with pytest.raises(UnsupportedError, match=f"{name}: layer 0 has {value}"):
        backend.forward(torch.zeros(1, 64), None, None, radix(**{name: value}),
                        SimpleNamespace(forward_mode=Mode(name="DECODE")))  # fmt: skip


# --- vLLM ---

BLOCKS, SIZE, HEADS, KV_HEADS, DIM = 8, 16, 4, 2, 32


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    engine_interfaces.stub(monkeypatch, "vllm")
    return monkeypatch


def test_vllm_is_told_of_both_backends(engine: Any) -> None:
    registered: dict[Any, str] = {}
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    members = registry.AttentionBackendEnum.__members__ = {}

    def register_backend(backend: Any, path: str) -> None:
        registered[backend] = path
        if isinstance(backend, str):
            members[backend] = path

    registry.register_backend = register_backend

    class Custom:
        def is_overridden(self) -> bool:
            return self in registered

    registry.AttentionBackendEnum.CUSTOM = custom = Custom()
    registered[custom] = "another.plugin"
    vllm.register()
    assert registered.pop(custom) == "another.plugin"
    vllm.register()
    assert sorted(registered.values()) == [
        "cupyattn.integrations.vllm.CupyAttnBackend",
        "cupyattn.integrations.vllm.CupyAttnMLABackend",
    ]
    for path in registered.values():
        module, _, name = path.rpartition(".")
        made = getattr(sys.modules[module], name)
        assert f"{made.__module__}.{made.__qualname__}" == path
        assert made.get_impl_cls() is getattr(vllm, made.get_impl_cls().__name__)
        assert made.get_builder_cls() is getattr(vllm, made.get_builder_cls().__name__)
    assert vllm.CupyAttnBackend.get_name() == "CUSTOM"
    assert vllm.CupyAttnMLABackend.get_name() == "CUPYATTN_MLA"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = vllm.Nothing


def combination(backend: Any, **changes: Any) -> str | None:
    """What a backend has against a model, in words."""
    given: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
    }  # fmt: skip
    found: str | None = backend.supports_combination(**(given | changes))
    return found


def test_vllm_is_told_what_is_true(engine: Any) -> None:
    """Names of dtypes and GPUs that are refused have a sentence; those that are not, none."""
    for backend in (vllm.CupyAttnBackend, vllm.CupyAttnMLABackend):
        assert combination(backend) is None and not backend.supports_batch_invariance()
        for name in ("fp8", "fp8_e4m3", "bfloat16", None):
            assert combination(backend, kv_cache_dtype=name) is None
        for name in ("nvfp4", "int8_per_token_head", "fp8_ds_mla"):
            said = combination(backend, kv_cache_dtype=name)
            assert said is not None and said.startswith(f"kv_cache_dtype: {name} is not read")
            assert "fp8_e4m3" in said
        for major, minor in ((7, 5), (8, 7), (10, 3), (12, 1)):
            gpu = SimpleNamespace(major=major, minor=minor)
            assert not backend.supports_compute_capability(gpu)
            said = combination(backend, device_capability=gpu)
            assert said is not None and f"no kernels for {major}.{minor}" in said
        for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
            assert backend.supports_compute_capability(SimpleNamespace(major=major, minor=minor))
    assert combination(vllm.CupyAttnBackend, kv_cache_dtype="fp8_e5m2") is None
    assert combination(vllm.CupyAttnMLABackend, kv_cache_dtype="fp8_e5m2") is not None
    sizes = {n for n in range(1, 600) if vllm.CupyAttnBackend.supports_head_size(n)}
    assert sizes == {*range(8, 257, 8), 512}
    assert set(vllm.CupyAttnMLABackend.get_supported_head_sizes()) == {576, 512, 320, 256}
    dense, latent = vllm.CupyAttnImpl, vllm.CupyAttnMLAImpl
    for impl in (dense, latent):
        assert impl.can_return_lse_for_decode and impl.supports_dcp and impl.lse_base_on_e
        assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not dense.supports_pcp


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_vllm_dense(layout: str, kv_dtype: str, engine: Any) -> None:
    torch.manual_seed(0)
    shape = vllm.CupyAttnBackend.get_kv_cache_shape(BLOCKS, SIZE, KV_HEADS, DIM)
    dtype = torch.float32 if kv_dtype == "auto" else torch.uint8
    cache = torch.zeros(shape, dtype=dtype)
    if layout == "tokens first":
        cache = torch.zeros(BLOCKS, SIZE, KV_HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)
    impl = vllm.CupyAttnImpl(HEADS, DIM, 0.2, KV_HEADS, None, 6, kv_dtype, 1.5)
    scales = [torch.tensor(x) for x in (0.5, 2.0)]
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    lens = [20, 5]
    table = torch.tensor([[5, 2], [7, 0]], dtype=torch.int32)
    history = [[torch.randn(n, KV_HEADS, DIM) for n in lens] for _ in "kv"]
    for n, length in enumerate(lens):
        slots = (table[n, :, None] * SIZE + torch.arange(SIZE)).flatten()[:length].long()
        impl.do_kv_cache_update(layer, history[0][n], history[1][n], cache, slots)
    common = SimpleNamespace(
        num_actual_tokens=4, max_query_len=3, max_seq_len=20, causal=True,
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32), block_table_tensor=table,
        slot_mapping=torch.tensor([0]),
    )  # fmt: skip
    builder = vllm.CupyAttnBuilder(None, ["layer"], None, "cpu")
    metadata = builder.build(0, common)
    q, out = torch.randn(6, HEADS, DIM), torch.full((6, HEADS, DIM), torch.nan)
    assert impl.forward(layer, q, None, None, cache, metadata, out) is out
    assert out[4:].isnan().all()
    if kv_dtype != "auto":
        eight = torch.float8_e5m2 if kv_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        history = [
            [(y / s).to(eight).float() * s for y in x] for x, s in zip(history, scales, strict=True)
        ]
    for n, rows in enumerate((slice(0, 3), slice(3, 4))):
        want = reference.attention(
            q[rows].numpy(), *(x[n].numpy() for x in history), sm_scale=0.2, causal=True,
            window_left=5, logits_soft_cap=1.5,
        )[0]  # fmt: skip
        np.testing.assert_allclose(out[rows], want, atol=2e-5)
    assert not impl.forward(layer, q, None, None, cache, None, out).any()


def test_vllm_queries_of_fp8_have_their_scale(engine: Any) -> None:
    torch.manual_seed(0)
    eight, scales = torch.float8_e4m3fn, (0.25, 0.5, 2.0)
    shape = vllm.CupyAttnBackend.get_kv_cache_shape(BLOCKS, SIZE, KV_HEADS, 16)
    cache = torch.randn(shape).to(eight).view(torch.uint8)
    impl = vllm.CupyAttnImpl(HEADS, 16, 0.2, KV_HEADS, kv_cache_dtype="fp8")
    layer = SimpleNamespace(
        **{f"_{name}_scale": torch.tensor(x) for name, x in zip("qkv", scales, strict=True)}
    )
    common = SimpleNamespace(
        num_actual_tokens=3, max_query_len=3, max_seq_len=SIZE, causal=True,
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([SIZE], dtype=torch.int32),
        block_table_tensor=torch.tensor([[5]], dtype=torch.int32), slot_mapping=torch.tensor([0]),
    )  # fmt: skip
    metadata = vllm.CupyAttnBuilder(None, ["layer"], None, "cpu").build(0, common)
    q, out = torch.randn(3, HEADS, 16).to(eight), torch.empty(3, HEADS, 16, dtype=torch.bfloat16)
    impl.forward(layer, q, None, None, cache, metadata, out)
    k, v = (x.transpose(0, 1).float().numpy() for x in cache.view(eight)[5].split(16, dim=-1))
    want, _ = reference.attention(
        q.float().numpy() * scales[0], k * scales[1], v * scales[2], sm_scale=0.2, causal=True
    )
    np.testing.assert_allclose(out.float(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "kv_dtype", "wanted"),
    [
        ("0", "fp8", False),
        ("1", "fp8", True),
        ("1", "fp8_e4m3", True),
        ("1", "fp8_e5m2", False),
        ("1", "auto", False),
    ],
)
def test_vllm_quantises_queries_where_it_is_asked_to(
    asked: str, kv_dtype: str, wanted: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.EIGHT_BIT_QUERIES.name, asked)
    impl = vllm.CupyAttnImpl(HEADS, 16, 0.2, KV_HEADS, kv_cache_dtype=kv_dtype)
    assert impl.supports_quant_query_input is wanted


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("is_neox", [False, True])
def test_vllm_rotates_as_it_writes(kv_dtype: str, is_neox: bool, engine: Any) -> None:
    """What its two hooks leave is what the norm, the rotation and the write leave one by one."""
    torch.manual_seed(0)
    impl = vllm.CupyAttnImpl(HEADS, DIM, 0.2, KV_HEADS, None, None, kv_dtype)
    assert impl.fused_rope_kvcache_supported() and impl.fused_qk_norm_rope_kvcache_supported()
    dtype = torch.bfloat16 if kv_dtype == "auto" else torch.uint8
    shape = vllm.CupyAttnBackend.get_kv_cache_shape(BLOCKS, SIZE, KV_HEADS, DIM)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()
    table, positions = torch.randn(30, DIM // 2), torch.tensor([3, 29, 0, 7, 11])
    slots = torch.tensor([4, -1, 40, 17])
    weight = torch.rand(1, DIM).bfloat16()
    rest = positions, table, is_neox
    q_out, k_out = (torch.zeros(5, n, DIM, dtype=torch.bfloat16) for n in (HEADS, KV_HEADS))
    cache = torch.zeros(shape, dtype=dtype)
    impl.do_qk_norm_rope_kvcache_update(
        layer, qkv, q_out, k_out, positions, weight, weight, 1e-5, *rest[1:], cache, slots
    )
    q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
    for x, out in ((q, q_out), (k, k_out)):
        y = torch.nn.functional.rms_norm(
            x.float().reshape(5, -1, DIM), (DIM,), weight[0].float(), 1e-5
        )
        cosine, sine = (a[:, None] for a in table[positions].chunk(2, dim=-1))
        half = DIM // 2
        pair = (y[..., : half // 2], y[..., half // 2 : half])
        if not is_neox:
            pair = y[..., 0:half:2], y[..., 1:half:2]
        turned = pair[0] * cosine - pair[1] * sine, pair[1] * cosine + pair[0] * sine
        want = y.clone()
        if is_neox:
            want[..., :half] = torch.cat(turned, dim=-1)
        else:
            want[..., :half] = torch.stack(turned, dim=-1).flatten(-2)
        torch.testing.assert_close(out[:4].float(), want[:4], atol=0.03, rtol=0.01)
        assert not out[4:].any()  # of no slot
    plain = torch.zeros(shape, dtype=dtype)
    impl.do_kv_cache_update(layer, k_out[:4], v.view(5, -1, DIM)[:4], plain, slots)
    written = (cache != 0).flatten(1).any(dim=1)
    assert written.tolist() == (plain != 0).flatten(1).any(dim=1).tolist()
    # In place, without a norm.
    q, k, v = (x.reshape(5, -1, DIM).clone() for x in (q, k, v))
    copies = [x.clone() for x in (q, k)]
    one, two = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    impl.do_rope_and_kv_cache_update(layer, q, k, v, *rest, one, slots)
    assert (q[:4] != copies[0][:4]).any() and torch.equal(q[4:], copies[0][4:])
    impl.do_kv_cache_update(layer, k[:4], v[:4], two, slots)
    if kv_dtype == "auto":
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"attn_type": "encoder_only"}, "attn_type: got encoder_only"),
    ],
)
def test_vllm_refuses_layers(changes: dict[str, Any], match: str, engine: Any) -> None:
    with pytest.raises(UnsupportedError, match=match):
        vllm.CupyAttnImpl(HEADS, DIM, 0.2, KV_HEADS, **changes)


def test_vllm_refuses_calls(engine: Any) -> None:
    impl = vllm.CupyAttnImpl(HEADS, DIM, 0.2, KV_HEADS)
    with pytest.raises(UnsupportedError, match="output_scale"):
        impl.forward(None, None, None, None, None, None, None, output_scale=1)
    with pytest.raises(ArgumentError, match=r"kv_cache: shape is \[2, 8, 16, 2, 32\]"):
        impl.do_kv_cache_update(None, None, None, torch.zeros(2, 8, 16, 2, 32), None)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_vllm_requests_that_are_not_causal(window: int | None, dtype: Any, engine: Any) -> None:
    """Beside others that are: a window has two sides for the first, and one for the second."""
    torch.manual_seed(0)
    cache = torch.randn(vllm.CupyAttnBackend.get_kv_cache_shape(BLOCKS, SIZE, KV_HEADS, DIM))
    impl = vllm.CupyAttnImpl(HEADS, DIM, 0.2, KV_HEADS, None, window)
    table = torch.tensor([[5, 2], [7, 0], [1, 3]], dtype=torch.int32)
    lens, rows = [20, 9, 12], [slice(0, 8), slice(8, 15), slice(15, 17)]
    flags = torch.tensor([0, 1, 0]).to(dtype)
    common = SimpleNamespace(
        num_actual_tokens=17, max_query_len=8, max_seq_len=20, causal=flags,
        query_start_loc=torch.tensor([0, 8, 15, 17], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32), block_table_tensor=table,
        slot_mapping=None,
    )  # fmt: skip
    metadata = vllm.CupyAttnBuilder(None, ["layer"], None, "cpu").build(0, common)
    q = torch.randn(17, HEADS, DIM)
    out = impl.forward(None, q, None, None, cache, metadata, torch.zeros(17, HEADS, DIM))
    for n, length in enumerate(lens):
        k, v = cache[table[n].long()].transpose(1, 2).flatten(0, 1)[:length].split(DIM, -1)
        at = torch.arange(length)
        row = torch.arange(length - (rows[n].stop - rows[n].start), length)[:, None]
        seen = (at <= row) if flags[n] else torch.ones_like(at <= row)
        if window is not None:
            seen &= (row - at).abs() < window
        want = reference.attention(
            q[rows[n]].numpy(), k.numpy(), v.numpy(), sm_scale=0.2, mask=seen.numpy()
        )[0]
        np.testing.assert_allclose(out[rows[n]], want, atol=2e-5)


def latent_impl(engine: Any, kv_dtype: str) -> Any:
    """An implementation for HEADS heads, without vLLM's own part."""
    base = sys.modules["vllm.model_executor.layers.attention.mla_attention"].MLACommonImpl

    def init(self: Any, num_heads: int, head_size: int, scale: float, *rest: Any, **latent: Any):
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, rest[3]
        vars(self).update(latent)

    engine.setattr(base, "__init__", init)
    return vllm.CupyAttnMLAImpl(
        *(HEADS, 576, 0.1, 1, None, None, kv_dtype, None, "decoder", None),
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize("is_pair", [False, True])
def test_vllm_latent_attention(wants_lse: bool, is_pair: bool, kv_dtype: str, engine: Any) -> None:
    impl = latent_impl(engine, kv_dtype)
    impl.need_to_return_lse_for_decode = wants_lse
    torch.manual_seed(0)
    q, cache = torch.randn(4, HEADS, 576), torch.randn(6, SIZE, 576)
    given_cache, layer = cache, SimpleNamespace(_k_scale_float=2.0)
    if kv_dtype == "fp8":
        eight = (cache / 2).to(torch.float8_e4m3fn)
        given_cache, cache = eight.view(torch.uint8), eight.float() * 2
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    lens = torch.tensor([19, 7], dtype=torch.int32)
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=lens),
                               max_seq_len=19)  # fmt: skip
    given = q.split([512, 64], -1) if is_pair else q
    out, lse = impl.forward_mqa(given, given_cache, metadata, layer)
    assert out.shape == (4, HEADS, 512) and (lse is not None) is wants_lse
    for n in range(2):
        keys = cache[table[n].long()].reshape(-1, 1, 576)[: lens[n]]
        want, want_lse = reference.attention(
            q[2 * n : 2 * n + 2].numpy(), keys.numpy(), keys[..., :512].numpy(), sm_scale=0.1,
            causal=True,
        )  # fmt: skip
        np.testing.assert_allclose(out[2 * n : 2 * n + 2], want, atol=2e-5)
        if wants_lse:  # natural, as the class says
            assert impl.lse_base_on_e
            np.testing.assert_allclose(lse[2 * n : 2 * n + 2], want_lse * np.log(2), atol=2e-4)
    with pytest.raises(ArgumentError, match="q: has 3 rows for 2 requests"):
        impl.forward_mqa(q[:3], given_cache, metadata, layer)


WORLD, RUN = 2, 4


@pytest.fixture
def ranks(engine: Any) -> list[dict[str, int]]:
    """What vLLM sets of implementations on two GPUs, whose runs of keys have four tokens."""
    config = SimpleNamespace(cp_kv_cache_interleave_size=RUN, dcp_comm_backend="ag_rs")
    module = engine_interfaces.module(engine, "vllm.config")
    module.get_current_vllm_config = lambda: SimpleNamespace(parallel_config=config)
    return [{"dcp_world_size": WORLD, "dcp_rank": rank} for rank in range(WORLD)]


def spread(keys: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, rank: int) -> int:
    """Write a rank's keys [n, ...] of a request to its pages [blocks, SIZE, ...]; how many."""
    own = keys[torch.arange(len(keys)) // RUN % WORLD == rank]
    slots = (pages[:, None].long() * SIZE + torch.arange(SIZE)).flatten()[: len(own)]
    cache.flatten(0, 1)[slots] = own
    return len(own)


@pytest.mark.parametrize("says_lens", [True, False])
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 6])
def test_vllm_shares_keys(
    window: int | None, has_sinks: bool, says_lens: bool, engine: Any, ranks: list[dict[str, int]]
) -> None:
    """Prompts in chunks, drafts and decoding by the keys of two GPUs: every rank has two of four
    heads, one GPU has no key of the last request, and vLLM merges the states."""
    torch.manual_seed(0)
    lens, rows = [20, 9, 3], [3, 1, 2]
    table = torch.tensor([[5, 2], [7, 0], [1, 3]], dtype=torch.int32)
    keys, values = ([torch.randn(n, 1, DIM) for n in lens] for _ in "kv")
    q = torch.randn(sum(rows), HEADS, DIM)
    sinks = torch.tensor([0.5, 3.0, -1.0, 1.5]) if has_sinks else None
    states: list[Any] = []
    group = SimpleNamespace(all_gather=lambda x, dim: q)
    engine_interfaces.module(engine, "vllm.distributed.parallel_state").get_dcp_group = lambda: (
        group
    )
    exchange = engine_interfaces.module(engine, "vllm.v1.attention.ops.dcp")
    engine.setattr(vllm.Impl, "dcp_world_size", WORLD, raising=False)

    def forward(rank: int) -> torch.Tensor:
        engine.setattr(vllm.Impl, "dcp_rank", ranks[rank]["dcp_rank"], raising=False)
        heads = slice(2 * rank, 2 * rank + 2)
        own_sinks = None if sinks is None else sinks[heads]
        impl = vllm.CupyAttnImpl(2, DIM, 0.2, 1, None, window, sinks=own_sinks)
        cache = torch.zeros(BLOCKS, 1, SIZE, 2 * DIM)
        by_token = cache.transpose(1, 2)
        both = [torch.cat(x, -1) for x in zip(keys, values, strict=True)]
        own = [spread(x, by_token, table[n], rank) for n, x in enumerate(both)]
        common = SimpleNamespace(
            num_actual_tokens=6, max_query_len=3, max_seq_len=20, causal=True,
            query_start_loc=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32), block_table_tensor=table,
            slot_mapping=None,
            dcp_local_seq_lens=torch.tensor(own, dtype=torch.int32) if says_lens else None,
        )  # fmt: skip
        metadata = vllm.CupyAttnBuilder(None, ["layer"], None, "cpu").build(0, common)
        out = torch.full((8, 2, DIM), torch.nan)
        assert impl.forward(None, q[:, heads], None, None, cache, metadata, out) is out
        assert out[6:].isnan().all()
        return out[:6]

    def record(out: Any, lse: Any, group: Any, return_lse: bool) -> Any:
        assert return_lse
        states.append((out, lse))
        return out[:, :2], lse[:, :2]

    exchange.cp_lse_ag_out_rs = record
    for rank in range(WORLD):
        forward(rank)
    lse = torch.stack([x[1] for x in states])
    assert lse[1, 4:].isneginf().all()
    total = lse.logsumexp(0)
    merged = (torch.stack([x[0] for x in states]) * (lse - total).exp()[..., None]).sum(0)
    for rank in range(WORLD):
        heads = slice(2 * rank, 2 * rank + 2)
        exchange.cp_lse_ag_out_rs = lambda *_, heads=heads, **__: (
            merged[:, heads],
            total[:, heads],
        )
        out = forward(rank)
        for n, (begin, end) in enumerate(((0, 3), (3, 4), (4, 6))):
            want = reference.attention(
                q[begin:end, heads].numpy(), keys[n].numpy(), values[n].numpy(), sm_scale=0.2,
                causal=True, window_left=-1 if window is None else window - 1,
                sinks=None if sinks is None else sinks[heads].numpy(),
            )[0]  # fmt: skip
            np.testing.assert_allclose(out[begin:end], want, atol=2e-5)


def test_vllm_merges_states_of_several_gpus(engine: Any, ranks: list[dict[str, int]]) -> None:
    """Tokens of a request lie on GPUs in turn, two rows of each are causal, and one GPU may have
    none: vLLM merges the states of natural LSEs."""
    engine.setattr(vllm.MLAImpl, "dcp_world_size", WORLD, raising=False)
    torch.manual_seed(0)
    q, lens = torch.randn(4, HEADS, 576), [19, 3]
    keys = [torch.randn(n, 1, 576) for n in lens]
    whole = torch.tensor(lens, dtype=torch.int32)
    outs, sums = [], []
    for rank in range(WORLD):
        engine.setattr(vllm.MLAImpl, "dcp_rank", ranks[rank]["dcp_rank"], raising=False)
        impl = latent_impl(engine, "auto")
        impl.need_to_return_lse_for_decode = True
        cache = torch.randn(6, SIZE, 576)
        table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
        own = [spread(x[:, 0], cache, table[n], rank) for n, x in enumerate(keys)]
        decode = SimpleNamespace(
            block_table=table, seq_lens=torch.tensor(own, dtype=torch.int32), dcp_tot_seq_lens=whole
        )
        metadata = SimpleNamespace(decode=decode, max_seq_len=19)
        out, lse = impl.forward_mqa(q, cache, metadata, SimpleNamespace(_k_scale_float=1.0))
        outs.append(out)
        sums.append(lse.exp())
    assert sums[1][2:].eq(0).all() and outs[1][2:].eq(0).all()
    weights = torch.stack(sums) / sum(sums)
    merged = (torch.stack(outs) * weights[..., None]).sum(0)
    for n, x in enumerate(keys):
        want = reference.attention(
            q[2 * n : 2 * n + 2].numpy(), x.numpy(), x[..., :512].numpy(), sm_scale=0.1, causal=True
        )[0]
        np.testing.assert_allclose(merged[2 * n : 2 * n + 2], want, atol=2e-5)

"""torch.ops.cupyattn, and our calls inside torch.compile's graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cupyattn
from cupyattn import flash_attn, flash_attn_interface

torch = pytest.importorskip("torch")

from helpers import framework_calls  # noqa: E402
from helpers.framework_calls import EAGER, HK, TORCH, Arrays, B, D, H, S, T  # noqa: E402

import cupyattn.integrations.torch  # noqa: E402
from cupyattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from cupyattn.integrations.calls import CALLS  # noqa: E402


@pytest.fixture(scope="module")
def x() -> Arrays:
    return Arrays(torch, "float32")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def check(function: Callable[[Any], Any], q: Any, backend: str, **named: Any) -> None:
    """A compiled function of one graph gives the eager answers, with torch's work around it."""

    def whole(q: Any) -> Any:
        made = function(q * 2)
        return [y + 1 for y in made] if isinstance(made, (tuple, list)) else made + 1

    compiled = torch.compile(whole, backend=backend, fullgraph=True, **named)
    for scale in (1, 0.5):
        torch.testing.assert_close(compiled(q * scale), whole(q * scale), rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TORCH)
def test_calls_are_in_one_graph(name: str, backend: str, x: Arrays) -> None:
    check(lambda q: TORCH[name](EAGER, x, q), x.q, backend)


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_runs_of_a_planned_wrapper_are_in_one_graph(kind: str, x: Arrays) -> None:
    check(framework_calls.wrapper(x, kind), x.q, "aot_eager")


def test_a_graph_knows_its_wrapper(x: Arrays) -> None:
    def run(wrapper: Any, q: Any) -> Any:
        return wrapper.run(q[:, 0], x.pair) * 2

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    answers = []
    for window in (-1, 1):
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20).byte())
        indptr, last = torch.tensor([0, 2, 4]), torch.tensor([4, 1])
        wrapper.plan(indptr, x.table.flatten(), last, H, HK, D, 4, q_data_type="float32",
                     window_left=window)  # fmt: skip
        answers.append(compiled(wrapper, x.q))
        torch.testing.assert_close(answers[-1], run(wrapper, x.q), rtol=0, atol=0)
    assert not torch.equal(*answers)


def test_dynamic_shapes_are_compiled_once(x: Arrays) -> None:
    def function(q: Any, k: Any) -> Any:
        return cupyattn.dot_product_attention(q * 2, k, k, is_causal=True) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for b, t, s in ((2, 3, 8), (3, 4, 9), (5, 2, 17), (4, 7, 7)):
        q, k = torch.randn(b, t, H, D), torch.randn(b, s, HK, D)
        torch.testing.assert_close(compiled(q, k), function(q, k), rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_fake_tensors(x: Arrays) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    ops = torch.ops.cupyattn
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(y) for y in (x.q, x.k, x.v))
        v = v[..., :32]
        out, lse = ops.flash_attn_func.lse(q, k, v, causal=True)
        assert out.shape == (B, T, H, 32) and lse.shape == (B, H, T)
        assert out.dtype == q.dtype and lse.dtype == torch.float32
        half = q.to(torch.float8_e4m3fn)
        assert ops.flash_attn_func(half, k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


class Exported(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Any) -> Any:
        return self.call(q, q, q) * 2


def test_modules_are_exported() -> None:
    q = torch.randn(T, H, D)
    public = cupyattn.single_prefill_with_kv_cache
    operator = torch.ops.cupyattn.single_prefill_with_kv_cache
    cases = (public, True), (public, False), (operator, True), (operator, False)
    for call, strict in cases:
        program = torch.export.export(Exported(call), (q,), strict=strict)
        assert str(program.graph).count("torch.ops.cupyattn.single_prefill_with_kv_cache") == 1
        assert torch.equal(program.module()(q), public(q, q, q) * 2)


EXPORTED = {
    "dot_product_attention": lambda x, q: cupyattn.dot_product_attention(
        q, x.k, x.v, is_causal=True, return_residual=True
    ),
    "flash_attn_func": lambda x, q: flash_attn.flash_attn_func(
        q, x.k, x.v, 0.0, 0.3, True, return_attn_probs=True
    )[:2],
    "flash_attn_func of FlashAttention-3": lambda x, q: flash_attn_interface.flash_attn_func(
        q, x.k, x.v, 0.3, window_size=(2, 1), return_attn_probs=True
    ),
    "flash_attn_varlen_func": lambda x, q: flash_attn.flash_attn_varlen_func(
        q[0], x.k[0], x.v[0], x.offsets, x.offsets, T, T
    ),
    "flash_attn_varlen_func of FlashAttention-3": lambda x, q: (
        flash_attn_interface.flash_attn_varlen_func(
            q[0], x.k[0], x.v[0], x.offsets, x.offsets, T, T, causal=True
        )
    ),
    "flash_attn_with_kvcache": lambda x, q: flash_attn.flash_attn_with_kvcache(
        q, x.k, x.v, cache_seqlens=torch.full((B,), T, dtype=torch.int32), softcap=3.0
    ),
    "flash_attn_with_kvcache of FlashAttention-3": lambda x, q: (
        flash_attn_interface.flash_attn_with_kvcache(
            q,
            x.k,
            x.v,
            cache_seqlens=torch.full((B,), S, dtype=torch.int32),
            return_softmax_lse=True,
        )
    ),
    "single_prefill_with_kv_cache": lambda x, q: cupyattn.single_prefill_with_kv_cache(
        q[0], x.k[0], x.v[0], causal=True, sm_scale=0.2
    ),
    "single_decode_with_kv_cache": lambda x, q: cupyattn.single_decode_with_kv_cache(
        q[0, 0], x.k[0], x.v[0], return_lse=True
    ),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_public_calls_are_exported_as_operators(x: Arrays, name: str) -> None:
    """With strict=False, torch's default, Python runs the public call itself, on fake tensors."""
    x.offsets = torch.tensor([0, T // 2, T], dtype=torch.int32)

    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any) -> Any:
            return EXPORTED[name](x, q * 2)

    program = torch.export.export(Module(), (x.q,), strict=False)
    operator = "torch.ops.cupyattn." + name.partition(" ")[0]
    assert str(program.graph).count(operator) == 1
    got, wanted = program.module()(x.q), Module()(x.q)
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_cannot_be_exported_says_why(x: Arrays) -> None:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any) -> Any:
            return flash_attn.flash_attn_func(q, x.k, x.v, softmax_scale="large")

    with pytest.raises(Exception, match="softmax_scale"):
        torch.export.export(Module(), (x.q,), strict=False)


def test_an_export_without_the_import() -> None:
    """The operators are made then."""
    program = """
import sys, torch
from cupyattn.flash_attn_interface import flash_attn_func
class Module(torch.nn.Module):
    def forward(self, q):
        return flash_attn_func(q, q, q) + 1
assert "cupyattn.integrations.torch" not in sys.modules
q = torch.randn(2, 3, 4, 32)
with torch.no_grad():
    made = torch.export.export(Module(), (q,))
    assert torch.equal(made.module()(q), Module()(q))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


NAMES = [f"{call.operator}.{form or 'default'}" for call in CALLS for form in call.forms]


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("dot", "flash"))])
def test_operators_keep_to_their_schemas(name: str, x: Arrays) -> None:
    """What they say they write and return is what they do, with real and fake tensors."""
    call, _, form = name.partition(".")
    operator = getattr(getattr(torch.ops.cupyattn, call), form)
    keys = x.k, x.v
    args: tuple[Any, ...] = x.q, *keys
    if call == "flash_attn_varlen_func":
        args = framework_calls.rows(x.q), *x.flat, x.cu_q, x.cu_k, T, S
    if "kvcache" in call:
        new = (x.new, x.new) if form.startswith("append") else (None, None)
        args = x.q, *(y.clone() for y in keys), *new, x.few
    if "out" in form:
        schema = operator._schema.arguments
        fill = {"window_size": [-1, -1], "causal": False, "is_causal": False, "attention_chunk": 0,
                "softcap": 0.0, "num_splits": 0, "causal_alignment": "last", "cp_world_size": 1,
                "cp_rank": 0, "cp_kv_cache_interleave_size": 1}  # fmt: skip
        rest = [fill.get(a.name) for a in schema[len(args) : -1]]
        args = *args, *rest, torch.zeros(*args[0].shape)
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_appending_is_checked_too(x: Arrays) -> None:
    ints = x.table.flatten()
    args = x.new[:, 0], x.new[:, 0], ints[:2], x.few, [x.pair.clone()], ints, x.indptr, x.few
    torch.library.opcheck(torch.ops.cupyattn.append_paged_kv_cache.default, args,
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip


def test_merges_and_stores_are_checked_too(x: Arrays) -> None:
    ops, v, s = torch.ops.cupyattn, x.q[0], x.q[0, ..., 0].clone()
    keys, values = (pages.clone() for pages in x.pages)
    for operator, args in (
        (ops.merge_state, (v, s, v.clone(), s.clone())),
        (ops.merge_states, (x.q, x.q[..., 0].clone())),
        (ops.reshape_and_cache, (x.new[:, 0], x.new[:, 0], keys, values, x.few)),
    ):
        torch.library.opcheck(operator.default, args, test_utils=("test_schema", "test_faketensor"))
    q = v.clone().requires_grad_()
    compiled = torch.compile(lambda q: cupyattn.merge_state(q, s, v, s)[0], backend="aot_eager")
    with pytest.raises(Exception, match="requires grad, and cupyattn has no backward"):
        compiled(q)


def test_grad_is_refused_with_a_sentence(x: Arrays) -> None:
    q = x.q.clone().requires_grad_()

    def function(q: Any) -> Any:
        return cupyattn.dot_product_attention(q, x.k, x.v)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="query: requires grad, and cupyattn has no backward"):
        compiled(q)
    with pytest.raises(ArgumentError, match="requires grad"):
        torch.ops.cupyattn.dot_product_attention(q, x.k, x.v)
    with torch.no_grad():
        assert torch.equal(compiled(q), function(q))


def test_what_a_graph_cannot_have_is_named(x: Arrays) -> None:
    def function(q: Any) -> Any:
        return flash_attn.flash_attn_func(q, x.k, x.v, dropout_p=0.5)

    with pytest.raises(UnsupportedError, match=r"^dropout_p"):
        torch.compile(function, backend="eager", fullgraph=True)(x.q)

    def other(q: Any) -> Any:
        return flash_attn.flash_attn_func(q, x.k, x.v, qv={1})

    compiled = torch.compile(other, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"qv: flash_attn_func\(\) does not take it inside torch"):
        compiled(x.q)


def test_errors_of_a_call_come_through(x: Arrays) -> None:
    compiled = torch.compile(
        lambda q, k: cupyattn.dot_product_attention(q, k, k), backend="eager", fullgraph=True
    )
    with pytest.raises(ArgumentError, match=r"^key: shape is"):
        compiled(x.q, x.k[:1])


class Block(torch.nn.Module):  # type: ignore[misc]
    """A layer of Llama: norms, rotary embedding, attention with a cache of pages, a gated MLP."""

    def __init__(self, heads: int = H, kv_heads: int = HK, dim: int = 16) -> None:
        super().__init__()
        size = heads * dim
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(size) for _ in range(2)])
        self.qkv = torch.nn.Linear(size, (heads + 2 * kv_heads) * dim, bias=False)
        self.o = torch.nn.Linear(size, size, bias=False)
        self.up, self.gate = (torch.nn.Linear(size, 3 * size, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(3 * size, size, bias=False)

    def _rotated(self, x: Any, angles: Any) -> Any:
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x: Any, k_cache: Any, v_cache: Any, lens: Any, table: Any) -> Any:
        b, t, size = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, -1, self.dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        angles = (lens[:, None] + torch.arange(t))[..., None, None] / torch.arange(1, 9)
        q, k = self._rotated(q, angles), self._rotated(k, angles)
        o = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, page_table=table, causal=True
        )
        x = x + self.o(o.reshape(b, t, size))
        y = self.norms[1](x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_block_of_llama(backend: str) -> None:
    """A prompt, then tokens one by one, over a cache that the graph writes."""
    torch.manual_seed(0)
    block = Block().eval()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    caches = [[torch.zeros(6, 4, HK, 16) for _ in range(2)] for _ in range(2)]
    table = torch.tensor([[5, 1, 0], [2, 4, 3]], dtype=torch.int32)
    lens = torch.zeros(2, dtype=torch.int32)
    with torch.no_grad():
        for t in (4, 1, 1, 1):
            x = torch.randn(2, t, H * 16)
            answers = [
                f(x, *c, lens, table) for f, c in zip((block, compiled), caches, strict=True)
            ]
            torch.testing.assert_close(*answers, rtol=0, atol=0)
            lens = lens + t
    torch.testing.assert_close(*caches, rtol=0, atol=0)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_python_calls_of_an_operator_are_few(x: Arrays) -> None:
    """Its cost over the direct call, in Python functions entered; time is measured on a GPU."""
    q = x.q[0, 0]
    operator, counts = torch.ops.cupyattn.single_decode_with_kv_cache.default, []
    direct = cupyattn.single_decode_with_kv_cache
    for call in (direct, operator):
        entered = [0]

        def profile(frame: Any, event: str, argument: Any, entered: list[int] = entered) -> None:
            entered[0] += event == "call"

        call(q, x.k[0], x.v[0])
        sys.setprofile(profile)
        call(q, x.k[0], x.v[0])
        sys.setprofile(None)
        counts.append(entered[0])
    assert counts[1] - counts[0] <= 4, counts


def test_importing_cupyattn_makes_no_operator() -> None:
    code = (
        "import torch, cupyattn, cupyattn.flash_attn\n"
        "assert not hasattr(torch.ops.cupyattn, 'flash_attn_func')\n"
        "import cupyattn.integrations.torch as door\n"
        "door.register(); door.register()\n"
        "assert torch.ops.cupyattn.flash_attn_func.default"
    )
    root = Path(__file__).parents[3]
    child = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr

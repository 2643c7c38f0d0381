"""torch.compile breaks its graph at our calls, and what comes back is what eager calls give."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from helpers import without_operators

import cupyattn
from cupyattn.xqa import xqa

torch = pytest.importorskip("torch")

PAGES, SIZE, HEADS, DIM = 4, 2, 2, 16


def decode_wrapper() -> Any:
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8))
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 3])
    wrapper.plan(indptr, indices, torch.tensor([1, 2]), HEADS, HEADS, DIM, SIZE)
    return wrapper


class Layer(torch.nn.Module):  # type: ignore[misc]
    """As in a model: the wrapper is an attribute, and torch's own work stands around the call."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapper = decode_wrapper()

    def forward(self, x: Any) -> Any:
        pages = x[:1].half().repeat(PAGES * 2 * SIZE, 1, 1).view(PAGES, 2, SIZE, HEADS, DIM)
        o, lse = self.wrapper.run(x[:2].half() * 2, pages + 1, return_lse=True)
        return o.float().sum(-1) + lse


def prefill(x: Any) -> Any:
    return cupyattn.single_prefill_with_kv_cache(x * 2, x + 1, x, causal=True) * 3


def decode(x: Any) -> Any:
    return cupyattn.single_decode_with_kv_cache(x[0] * 2, x + 1, x, sm_scale=0.5) * 3


def merge(x: Any) -> Any:
    v, s = cupyattn.merge_state(x * 2, x[..., 0] + 1, x, x[..., 1])
    return v.sum(-1) + s


def without_plan(x: Any) -> Any:
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    cache = x.half()
    return xqa(cache[:1, None] * 2, cache[:, None], cache[:, None], table[:, :1], lengths[:1] - 2)


def plan_and_run(x: Any) -> Any:
    """Dynamo would trace what a call runs outside of our files: dataclasses, NumPy."""
    return decode_wrapper().run(x.half() * 2, x.half().repeat(8, 1, 1).view(4, 2, 2, 2, 16)) + 1


@pytest.fixture(autouse=True)
def no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    without_operators.forget(monkeypatch)


@pytest.fixture
def x() -> Any:
    return torch.randn(SIZE, HEADS, DIM, generator=torch.Generator().manual_seed(0))


CALLS: list[Callable[[Any], Any]] = [prefill, decode, merge, Layer(), plan_and_run, without_plan]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call, "__name__", "Layer"))
def test_a_compiled_call_answers_as_an_eager_one(call: Callable[[Any], Any], backend: str, x: Any):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(call, backend=backend)
    for scale in (1, 2):
        torch.testing.assert_close(compiled(x * scale), call(x * scale), rtol=0, atol=0)
    # One graph before the call and one behind it, and none of what is inside.
    assert counters["stats"]["unique_graphs"] == {plan_and_run: 4, without_plan: 1}.get(call, 2)
    for reason in counters["graph_break"]:
        assert "cupyattn launches its kernels itself" in reason


@pytest.mark.parametrize("call", CALLS[:2])
def test_a_whole_graph_is_refused_with_the_reason(call: Callable[[Any], Any], x: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cupyattn launches its kernels itself"):
        torch.compile(call, backend="eager", fullgraph=True)(x)


def test_every_public_call_is_marked() -> None:
    for name in cupyattn.__all__:
        value = getattr(cupyattn, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            methods = inspect.getmembers(value, inspect.isfunction)
            calls = [f for n, f in methods if n == "__init__" or not n.startswith("_")]
        else:
            calls = [value.xqa if inspect.ismodule(value) else value]
        for call in calls:
            if inspect.isroutine(call):
                assert call._torchdynamo_disable, f"{name}: {call}"

"""Calls of plain arrays while their framework is in some mode: what they keep serves later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import framework_calls
from helpers.framework_calls import EAGER, HK, PAGE, TORCH, Arrays, D, H

import cupyattn
from cupyattn.engine import index_arrays
from cupyattn.errors import ArgumentError


def _fake(torch: Any, call: Callable[[], Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        call()


def _inference(torch: Any, call: Callable[[], Any]) -> None:
    with torch.inference_mode():
        call()


def _vmap(torch: Any, call: Callable[[], Any]) -> None:
    torch.func.vmap(lambda x: (call(), x)[1])(torch.ones(2))


def _compile(torch: Any, call: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    torch.compile(call, backend="aot_eager")()


def _export(torch: Any, call: Callable[[], Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: (call(), x)[1])(torch.ones(2))


TORCH_MODES = {
    "fake": _fake, "inference": _inference, "vmap": _vmap, "compile": _compile, "make_fx": _export,
}  # fmt: skip
JAX_CALLS = framework_calls.DOT_PRODUCT | framework_calls.OF_JAX


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_arrays, "_kept", {})


@pytest.mark.parametrize("mode", TORCH_MODES)
@pytest.mark.parametrize("name", TORCH)
def test_torch(name: str, mode: str, torch: Any) -> None:
    x = Arrays(torch, "float32")

    def call() -> Any:
        return TORCH[name](EAGER, x, x.q)

    try:
        TORCH_MODES[mode](torch, call)
    except ArgumentError as error:
        assert mode == "fake" and "FakeTensor" in str(error)
    leaves = torch.utils._pytree.tree_leaves
    got = leaves(call())
    index_arrays._kept.clear()
    torch.testing.assert_close(got, leaves(call()), rtol=0, atol=0)
    assert not any(y.is_inference() for y in got)


def test_a_wrapper_that_was_planned_in_inference_mode(torch: Any) -> None:
    x = Arrays(torch, "float32")
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()

    def call() -> Any:
        wrapper.plan(x.indptr, x.table.flatten(), x.few, H, HK, D, PAGE, q_data_type=torch.float32)
        return wrapper.run(x.q[:, 0], x.pair)

    with torch.inference_mode():
        want = call().clone()
    torch.testing.assert_close(call(), want, rtol=0, atol=0)


JAX_MODES: dict[str, Callable[[Any, Any, Callable[[], Any]], Any]] = {
    "eval_shape": lambda jax, x, call: jax.eval_shape(lambda y: (call(), y), x),
    "jit": lambda jax, x, call: jax.jit(lambda y: (call(), y))(x),
    "vmap": lambda jax, x, call: jax.vmap(lambda y: (call(), y))(x),
    "grad": lambda jax, x, call: jax.grad(lambda y: (call(), y.sum())[1])(x),
    "scan": lambda jax, x, call: jax.lax.scan(lambda c, y: (c, (call(), y)), 0, x),
}


@pytest.mark.parametrize("mode", JAX_MODES)
@pytest.mark.parametrize("name", JAX_CALLS)
def test_jax(name: str, mode: str) -> None:
    jax = pytest.importorskip("jax")
    x = Arrays(jax, "float32")

    def call() -> Any:
        return JAX_CALLS[name](EAGER, x, x.q)

    try:
        JAX_MODES[mode](jax, x.q, call)
    except ArgumentError as error:  # of an array that the call itself has cut out of another
        assert "tracer" in str(error)
    got = jax.tree.leaves(call())
    index_arrays._kept.clear()
    for a, b in zip(got, jax.tree.leaves(call()), strict=True):
        np.testing.assert_array_equal(a, b)

"""CUPYATTN_LOG=1, 3, 5: lines about calls."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.core import env, log, observed
from cupyattn.core.tracing import untraced
from cupyattn.errors import ArgumentError

Q = np.linspace(-1, 1, 4 * 8 * 64, dtype=np.float16).reshape(4, 8, 64)
K = Q[:, :2]

DOORS = """
import importlib, inspect, sys
import cupyattn
assert "cupyattn.observation.calls" not in sys.modules
modules = ["dsa_indexer", "flash_attn", "flash_attn_interface", "flash_mla", "msa_ops"]
modules += ["paged_mqa", "slots", "sparse", "serving", "topk"]
public = [("cupyattn", name) for name in cupyattn.__all__ if name != "xqa"]
for module in modules:
    loaded = importlib.import_module(f"cupyattn.{module}")
    public += [(f"cupyattn.{module}", name) for name in loaded.__all__]
for module, name in public:
    x = getattr(importlib.import_module(module), name)
    if inspect.isfunction(x) and not hasattr(x, "is_observed"):
        print(module, name)
    if inspect.isclass(x) and hasattr(x, "run") or name.endswith("Backend"):
        for method in ("__init__", "plan", "run", "forward", "begin_forward"):
            if not hasattr(getattr(x, method, observed := None) or x.__init__, "is_observed"):
                print(module, name, method)
"""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    full = {**os.environ, **{f"CUPYATTN_{name}": x for name, x in environment.items()}}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=full)
    assert done.returncode == 0, done.stderr
    return done


def test_nobody_asks() -> None:
    """Then functions are what they are without it, and a call has no step more."""

    def function() -> None: ...

    assert untraced(function) is function and not observed.IS_ON
    every = [getattr(cupyattn, name) for name in cupyattn.__all__]
    methods = [x for cls in filter(inspect.isclass, every) for x in vars(cls).values()]
    assert not any(hasattr(x, "is_observed") for x in (*every, *methods))
    program = "import sys, numpy as np, cupyattn; x = np.ones((1, 2, 64), 'float16')\n"
    program += "cupyattn.single_prefill_with_kv_cache(x, x, x)\n"
    program += "print([x for x in sys.modules if 'observation' in x])"
    assert python(program, LOG="choices", DUMP="").stdout.strip() == "[]"


def test_every_public_call_is_observed() -> None:
    lines = python(DOORS, LOG="1").stdout.splitlines()
    assert lines == ["cupyattn.flash_mla get_mla_metadata"]  # which looks at nothing


def test_names(asks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    asks(LOG="choices,1")
    observed.watched(cupyattn.single_prefill_with_kv_cache)(Q, K, K)
    (line,) = caplog.messages
    assert line.startswith("cupyattn: call ") and line.endswith(
        ": cupyattn.single_prefill_with_kv_cache"
    )


def test_arguments(asks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    asks(LOG="3")
    attention = observed.watched(cupyattn.dot_product_attention)
    attention(Q[None], K[None], K[None], is_causal=True, scale=None, local_window_size=(3, 0))
    before, behind = caplog.messages
    name, *arguments = before.splitlines()
    assert name.endswith("cupyattn.dot_product_attention")
    query, key, _, causal, window = arguments  # scale is its default
    assert query.split(maxsplit=1) == [
        "query",
        f"numpy float16 [1, 4, 8, 64] on cpu, strides {[0, 512, 64, 1]}",
    ]
    assert "strides [0, 512, 64, 1]" in key
    assert causal.split() == ["is_causal", "True"] and window.split()[1:] == ["(3,", "0)"]
    assert "gives numpy float16 [1, 4, 8, 64] on cpu" in behind and "launched nothing" in behind


def test_statistics(asks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    asks(LOG="5")
    k = K.copy()
    k[1, 0, 3], k[2, 0, 3], k[3, 1, 0] = np.nan, np.inf, -np.inf
    observed.watched(cupyattn.append_paged_kv_cache)(
        *(k, k, np.array([0, 0, 0, 0], np.int32), np.arange(4, dtype=np.int32)),
        *(np.zeros((3, 2, 16, 2, 64), np.float16), np.array([2], np.int32)),
        *(np.array([0, 1], np.int32), np.array([4], np.int32)),
    )
    text = caplog.messages[0]
    assert "for which the device was waited for" in text
    assert "positions: 0 to 3\n" in text and "1 NaN, 2 infinite" in text
    assert "paged_kv_cache: 0 to 0, mean 0" in text


def test_of_a_large_array_a_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyattn import array
    from cupyattn.observation import statistics

    monkeypatch.setattr(statistics, "_MAX_ELEMENTS", 20)
    words = statistics.statistics(array.view(np.arange(100, dtype=np.int32).reshape(10, 10), "x"))
    assert words == "0 to 19, of the first 2 of 10 along the first axis"


def test_errors_are_lines(asks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    asks(LOG="1")
    with pytest.raises(ArgumentError):
        observed.watched(cupyattn.single_prefill_with_kv_cache)(Q, K, K[:2])
    assert "ArgumentError: " in caplog.messages[1]
    with pytest.raises(TypeError):
        observed.watched(cupyattn.dot_product_attention)(Q, K, K, casual=True)
    assert "TypeError: " in caplog.messages[3]


def test_a_word_that_asks_for_nothing(asks: Callable[..., None]) -> None:
    asks(LOG="verbose")
    with pytest.raises(ArgumentError, match="CUPYATTN_LOG: got 'verbose'; wanted 1, 3 or 5"):
        observed.watched(cupyattn.single_prefill_with_kv_cache)(Q, K, K)


@pytest.mark.parametrize("text, level", [("", 0), ("0", 0), ("choices", 0), ("1 3", 3), ("4", 4)])
def test_levels(asks: Callable[..., None], text: str, level: int) -> None:
    asks(LOG=text)
    assert log.level() == level
    assert observed.is_asked() == (level > 0)


def test_lines_that_cannot_be_written_harm_nothing(
    asks: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    asks(LOG="3")

    def function(x: Any) -> int:
        return 7

    function.__module__ = "cupyattn.odd"
    function.__qualname__ = "function"
    assert observed.watched(function)(Odd()) == 7
    assert "cannot be told of or saved: RuntimeError('no')" in caplog.messages[0]


SERVING = """
import numpy as np
from cupyattn.serving import AttentionBackend, BackendConfig, BatchInfo, ForwardMode, LayerSpec
from cupyattn.serving import MHATokenToKVPool
table = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
pool = MHATokenToKVPool(4 * 64, 2, 64, layer_num=1, like=table, dtype="float16")
backend = AttentionBackend(BackendConfig(8, 2, 64, page_size=16, max_context_len=64), pool, table)
lens = np.array([7, 3])
batch = BatchInfo(ForwardMode.EXTEND, np.array([3, 0]), lens, extend_seq_lens_host=lens)
slots = np.concatenate([table[row, :n] for row, n in zip([3, 0], lens)])
q, k = np.ones((10, 8, 64), np.float16), np.ones((10, 2, 64), np.float16)
backend.init_forward_metadata(batch)
backend.write_kv(LayerSpec(layer_id=0), slots, k, k)
backend.forward_extend(q, LayerSpec(layer_id=0))
"""


def test_backends_of_engines_and_what_they_call() -> None:
    lines = python(SERVING, LOG="1").stderr.splitlines()
    matches = [re.fullmatch(r"cupyattn:( *)call \d+: (.*)", line) for line in lines]
    assert [(x and x[2], x and len(x[1])) for x in matches] == [
        ("cupyattn.serving.AttentionBackend.__init__", 1),
        ("cupyattn.serving.AttentionBackend.init_forward_metadata", 1),
        ("cupyattn.serving.AttentionBackend.write_kv", 1),
        ("cupyattn.slots.reshape_and_cache", 3),
        ("cupyattn.serving.AttentionBackend.forward_extend", 1),
        ("cupyattn.serving.AttentionBackend.forward", 3),
    ]


def test_kernels(
    asks: Callable[..., None],
    gpu: Any,
    make: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a stand-in GPU."""
    asks(LOG="3")
    q, k = make(8, 64), make(4096, 2, 64)
    decode = observed.watched(cupyattn.single_decode_with_kv_cache)
    for _ in range(2):  # checked, then in the call cache
        caplog.clear()
        gpu.launches.clear()
        decode(q, k, k)
        (launch,) = gpu.launches
        grid = " x ".join(map(str, launch.grid))
        blocks = f"{grid} blocks of {launch.block[0]} threads"
        assert f"launched {launch.kernel.name}, {blocks}" in caplog.messages[-1]
        assert "bfloat16 [8, 64] on cuda:0" in caplog.messages[0]


def test_every_variable_is_in_the_list() -> None:
    assert {env.DUMP, env.DUMP_CALLS, env.DUMP_NAMES, env.DUMP_LIMIT} <= set(env.ALL)


def test_a_call_that_nobody_observes_runs_nothing_of_this(
    gpu: Any, make: Callable[..., Any]
) -> None:
    """A warm call, by the functions that it runs."""
    q, k = make(8, 64), make(4096, 2, 64)

    def call() -> None:
        cupyattn.single_decode_with_kv_cache(q, k, k)

    for _ in range(2):
        call()
    files: list[str] = []
    sys.setprofile(lambda frame, *_: files.append(frame.f_code.co_filename))
    try:
        call()
    finally:
        sys.setprofile(None)
    package = str(Path(cupyattn.__file__).parent)
    own = [name.removeprefix(package) for name in files if name.startswith(package)]
    assert "/decode.py" in own and not any("observ" in name for name in own)


TORCH = """
import torch, cupyattn.integrations.torch
q, k = torch.ones(1, 4, 8, 64, dtype=torch.float16), torch.ones(1, 4, 2, 64, dtype=torch.float16)
torch.ops.cupyattn.dot_product_attention(q, k, k)
"""

JAX = """
import jax, jax.numpy as jnp
from cupyattn.integrations.jax import dot_product_attention
layer = jax.jit(lambda q, k: dot_product_attention(q, k, k, is_causal=True))
q, k = jnp.ones((2, 4, 8, 64), "float16"), jnp.ones((2, 4, 2, 64), "float16")
for _ in range(2):
    layer(q, k).block_until_ready()
"""


def test_operators_of_torch_are_observed() -> None:
    pytest.importorskip("torch")
    (line,) = python(TORCH, LOG="1").stderr.splitlines()
    assert line.endswith("call 1: cupyattn.dot_product_attention")


def test_calls_inside_of_jit_are_observed_each_time() -> None:
    pytest.importorskip("jax")
    lines = python(JAX, LOG="1", DUMP="").stderr.splitlines()
    assert len([x for x in lines if x.endswith(": cupyattn.dot_product_attention")]) == 2

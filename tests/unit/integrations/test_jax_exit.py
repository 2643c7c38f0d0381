"""Programs that end while XLA still runs calls of ours: each ends, with its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

pytest.importorskip("jax")
pytest.importorskip("jax.ffi")

_LIMIT = 120.0  # seconds, on a machine that is busy; a program takes some 3 of them
# Large enough that XLA does not run it at once, in the thread that calls it.
_BEGIN = """
    import os, sys, threading
    import jax, jax.numpy as jnp
    from cupyattn.integrations.jax import dot_product_attention

    layer = jax.jit(lambda q, k, v: dot_product_attention(q * 2, k, v, is_causal=True) + 1)
    x = jnp.ones((2, 8, 4, 64))

    def call(count=1):
        for _ in range(count):
            layer(x, x, x)
"""
PROGRAMS = {
    "documented": ("assert layer(x, x, x).shape == x.shape", 0),
    "unread": ("kept = layer(x, x, x)", 0),
    "a chain": ("kept = x\nfor _ in range(5): kept = layer(kept, x, x)", 0),
    "many": ("kept = [layer(x, x, x) for _ in range(8)]", 0),
    "dropped": ("call(4)", 0),
    "an exception": ("kept = layer(x, x, x)\nraise ValueError('mine')", 1),
    "sys.exit": ("kept = layer(x, x, x)\nsys.exit(3)", 3),
    "os._exit": ("kept = layer(x, x, x)\nos._exit(4)", 4),
    "threads": (
        "threads = [threading.Thread(target=call, args=(3,)) for _ in range(3)]\n"
        "for thread in threads: thread.start()",
        0,
    ),
    "sys.exit in a thread": (
        "def end():\n    call(2)\n    sys.exit(5)\nthreading.Thread(target=end).start()",
        0,
    ),
    "a refused call": ("kept = layer(x, x[:1], x)", 0),
    "a fork": (
        "kept = layer(x, x, x)\nchild = os.fork()\nif child == 0: sys.exit(6)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        6,
    ),
    "a late call": ("import atexit\natexit.register(call, 2)", 0),
    "no call": ("jax.eval_shape(layer, x, x, x)", 0),
}


def _check(names: list[str]) -> None:
    """All at the same time: a program that hangs costs the limit once."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    began = time.monotonic()
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_BEGIN) + PROGRAMS[name][0]],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    wrong = []
    for name, process in running.items():
        try:
            _, text = process.communicate(timeout=max(1.0, _LIMIT + began - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            wrong.append(f"{name}: did not end")
            continue
        if process.returncode != PROGRAMS[name][1]:
            wrong.append(f"{name}: ended with {process.returncode}: {text[-500:]}")
    assert not wrong, wrong


def test_programs_end() -> None:
    _check(["documented", "dropped", "an exception", "threads"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_each_time(name: str) -> None:
    for _ in range(20):
        _check([name])

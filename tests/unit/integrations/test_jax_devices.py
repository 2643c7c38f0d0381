"""Attention over the keys of several devices in jax.shard_map: CPU devices of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi")

import cupyattn.integrations.jax as door  # noqa: E402
from cupyattn.errors import ArgumentError  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="no jax.shard_map")

_MERGED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from cupyattn.integrations.jax import exchange_states
from cupyattn.reference import merge_states

size, base_on_e = int(sys.argv[1]), sys.argv[2] == "e"
mesh = Mesh(jax.devices()[:size], ("keys",))
rng = np.random.default_rng(size)
o = rng.standard_normal((size, 5, 12, 64)).astype(np.float32)
lse = (8 * rng.standard_normal((size, 5, 12))).astype(np.float32)
lse[0, 1] = lse[:, 2] = -np.inf  # a device without keys of a row, and a row without keys
o[0, 1] = np.nan
o[:, 2] = 0
def step(o, lse):
    return exchange_states(o[0], lse[0], "keys", lse_base_on_e=base_on_e)
heads = P(None, "keys")
inside = jax.shard_map(step, mesh=mesh, in_specs=(P("keys"), P("keys")), out_specs=(heads, heads))
out, merged = (np.asarray(x) for x in jax.jit(inside)(o, lse))
to_base2 = np.log2(np.e) if base_on_e else 1.0
want, want_lse = merge_states(o.swapaxes(0, 1), lse.swapaxes(0, 1) * to_base2)
np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(merged * to_base2, want_lse, rtol=1e-5, atol=1e-5)
again = [np.asarray(x) for x in jax.jit(inside)(o, lse)]
assert all(np.array_equal(x, y) for x, y in zip((out, merged), again)), "other bits"
"""


def _run(*arguments: str) -> str:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("base", ["2", "e"])
def test_states_merge_over_devices(size: int, base: str) -> None:
    _run("-c", _MERGED, str(size), base)


def test_the_example() -> None:
    assert "4 devices: answers (4, 32, 128)" in _run("examples/context_parallel_jax.py")


@pytest.mark.parametrize(
    ("o", "lse", "message"),
    [
        ((4, 6, 8), (4, 5), r"^o, lse: shapes are \[4, 6, 8\] and \[4, 5\]"),
        ((4, 6), (4, 6), r"^o, lse: shapes are \[4, 6\]"),
    ],
)
def test_shapes_are_checked(o: tuple[int, ...], lse: tuple[int, ...], message: str) -> None:
    numpy = jax.numpy
    with pytest.raises(ArgumentError, match=message):
        jax.vmap(lambda a, b: door.exchange_states(a, b, "x"), axis_name="x")(
            numpy.zeros((1, *o)), numpy.zeros((1, *lse))
        )


def test_heads_that_devices_do_not_divide() -> None:
    numpy = jax.numpy
    with pytest.raises(ArgumentError, match=r"^o: 6 heads for 4 devices along 'x'"):
        jax.vmap(lambda a, b: door.exchange_states(a, b, "x"), axis_name="x")(
            numpy.zeros((4, 2, 6, 8)), numpy.zeros((4, 2, 6))
        )

"""Kernels of prompts stay small: a launch that other kernels have run before waits for the
instructions of a large one (docs/prefill_sm90.md, "Instructions")."""

from __future__ import annotations

import pytest
from golden.code_size import code_bytes, prompts

from cupyattn import jit

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

_MOST = 80 * 1024
# Persistent kernels have the most: the others are compiled in the slow suite.
_USUAL = ("ragged q128_persistent", "ragged q192_persistent", "paged q128_persistent")
# Its softmax stands behind the products, so that corrections of O stand in the loop of tiles.
_LARGER = {"gathered q128_persistent": 88 * 1024}


@pytest.mark.parametrize(
    "name", [x if x in _USUAL else pytest.param(x, marks=pytest.mark.slow) for x, _ in prompts()]
)
def test_a_kernel_of_prompts_is_small(name: str) -> None:
    """`python -m tests.golden.code_size --phases TILE` says what it is made of."""
    built = jit.build("prefill_sm90", dict(prompts())[name], "sm_90a")
    assert code_bytes(built.path.read_bytes()) <= _LARGER.get(name, _MOST)

"""Scales of blocks of tokens, which prefill_sm90 multiplies with keys and values as it converts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.token_blocks import Blocks

import cupyattn

from . import gpu

# Keys and values are rounded to float16 once they are scaled, and probabilities.
LIMIT = 0.01


def check(
    kind: str = "int8",
    size: int = 64,
    page_size: int = 0,
    has_lse: bool = True,
    options: dict[str, Any] | None = None,
    **facts: Any,
) -> None:
    drawn, options = Blocks(6, kind, size, has_mean=False), options or {}
    sinks = options.pop("sinks", None)
    with gpu.plugged_in(**facts) as emulated:
        changes: dict[str, Any] = {"return_lse": has_lse, "sinks": sinks}
        if page_size:
            wrapper, pages, scales = drawn.paged(page_size, **options)
            answer = wrapper.run(
                drawn.q, pages, **drawn.arguments(**scales, k_mean=None), **changes
            )
        else:
            wrapper = drawn.ragged(**options)
            changes |= drawn.arguments(k_mean=None)
            answer = wrapper.run(drawn.q, drawn.k, drawn.v, **changes)
        assert {"widen_rows", "prefill_sm90"} <= {launch.name for launch in emulated.launches}
    out, lse = answer if has_lse else (answer, None)
    drawn.check(out, lse, LIMIT, **options, **({} if sinks is None else {"sinks": sinks}))


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("size", "page_size"), [(64, 0), (128, 0), (64, 64), (128, 128), (64, 128)]
)
def test_blocks(kind: str, size: int, page_size: int) -> None:
    check(kind, size, page_size)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 2.0},
        {"pos_encoding_mode": "ALIBI"},
        {"window_left": 60},
        {"sinks": np.array([0.5, -1, 2, 0], np.float32)},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    check(options=dict(options))


def test_the_mean_of_keys_changes_no_output() -> None:
    drawn = Blocks(6, "int8", 64)
    run = lambda **more: drawn.ragged().run(drawn.q, drawn.k, drawn.v, **drawn.arguments(), **more)  # noqa: E731
    with gpu.plugged_in():
        drawn.check(run(), None, LIMIT)
        with pytest.raises(cupyattn.UnsupportedError, match=r"k_mean: .* a log-sum-exp"):
            run(return_lse=True)


def test_one_request() -> None:
    drawn = Blocks(9, "int8", 64, has_mean=False)
    arrays = drawn.q[:70], drawn.k[:200], drawn.v[:200]
    scales = {"q": drawn.of_q[:2], "k": drawn.of_k[:4], "v": drawn.of_v[:4]}
    arguments: dict[str, Any] = {f"{name}_block_scales": x for name, x in scales.items()}
    arguments |= {"causal": True, "o_dtype": "float32"}
    with gpu.plugged_in():
        out = cupyattn.single_prefill_with_kv_cache(*arrays, **arguments)
    exact = cupyattn.single_prefill_with_kv_cache(*arrays, **arguments)
    assert np.abs(out - exact).max() < LIMIT


def test_other_cards_refuse_them() -> None:
    with pytest.raises(cupyattn.UnsupportedError, match=r"q_block_scales.*have one kernel"):
        check(is_portable=True)

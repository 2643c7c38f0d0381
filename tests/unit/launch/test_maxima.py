"""Which kernels of Hopper take every maximum of a row."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from helpers.fake_gpu import MAX_SHARED

from cupyattn.core import dtypes
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.tiles import sm90


def takes_maxima(
    dims: tuple[int, int] = (128, 128), kv: str = "bfloat16", page_size: int = 16, **facts: Any
) -> bool:
    problem = AttentionProblem(
        dtype_q=dtypes.bfloat16,
        dtype_kv=dtypes.parse(kv),
        dtype_o=dtypes.bfloat16,
        head_dim_qk=dims[0],
        head_dim_vo=dims[1],
        **{"paged": False, **facts},
    )
    tiles = sm90.choose(problem, MAX_SHARED, page_size)
    assert tiles is not None
    return bool(dict(tiles.config)["kTakesMaxima"])


@pytest.mark.parametrize(
    "facts",
    [
        *({"dims": dims} for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))),
        {"paged": True},
        # Gathered, since no box fits.
        {"paged": True, "page_size": 1},
        {"paged": True, "dims": (96, 96)},
        {"custom_mask": True},
        {"pos_encoding": "ROPE_LLAMA"},
    ],
)
def test_rows_take_every_maximum(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> None:
    monkeypatch.delenv("CUPYATTN_LAZY_MAXIMA", raising=False)
    assert takes_maxima(**facts)
    monkeypatch.setenv("CUPYATTN_LAZY_MAXIMA", "1")
    assert not takes_maxima(**facts)


@pytest.mark.parametrize(
    "facts",
    [
        {"kv": "float8_e4m3fn"},
        {"pos_encoding": "ALIBI"},
        {"soft_cap": True},
    ],
)
def test_rows_take_maxima_where_they_must(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    monkeypatch.delenv("CUPYATTN_LAZY_MAXIMA", raising=False)
    assert not takes_maxima(**facts)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("page_size", [1, 3])
def test_gathered_rows_are_served_under_all_options(dim: int, page_size: int) -> None:
    for custom_mask, prescale_logits in product((False, True), repeat=2):
        facts = {"paged": True, "custom_mask": custom_mask, "prescale_logits": prescale_logits}
        assert takes_maxima((dim, dim), page_size=page_size, **facts)

"""Engines with our attention in place of theirs: the tokens of a dense reference.

The engines' sources must be importable (PYTHONPATH); what they compile themselves is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import small_engines

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def dense_tokens(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if small_engines.missing("minisgl"):
        pytest.skip("mini-sglang is not importable")
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("model")
        with small_engines.minisgl(patch, path, "dense", graphs=[]) as llm:
            return small_engines.minisgl_tokens(patch, llm)


@pytest.mark.parametrize("page_size", [1, 16])
def test_minisgl(page_size: int, dense_tokens: Any, tmp_path: Path) -> None:
    """Chunks of prompts, cached prefixes, and graphs of decoding, padded."""
    with pytest.MonkeyPatch.context() as patch:
        with small_engines.minisgl(
            patch, tmp_path, "cupyattn", graphs=[1, 2, 4, 8], page_size=page_size
        ) as llm:
            tokens, _ = small_engines.minisgl_tokens(patch, llm)
    small_engines.check(tokens, *dense_tokens)


def test_nanovllm(tmp_path: Path) -> None:
    """nano-vllm over cupyattn.flash_attn, with its CUDA graphs and cached prefixes."""
    if small_engines.missing("nanovllm"):
        pytest.skip("nano-vllm is not importable")
    from cupyattn import flash_attn

    answers = []
    for eager, make in ((True, small_engines.dense_flash_attn), (False, lambda _: flash_attn)):
        with pytest.MonkeyPatch.context() as patch:
            made = make(patch)
            answers.append(small_engines.nanovllm_tokens(patch, tmp_path, made, eager=eager))
    small_engines.check(answers[1][0], *answers[0])

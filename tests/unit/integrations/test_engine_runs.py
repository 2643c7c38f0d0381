"""Engines of other people over our attention, on the CPU: what tests/gpu/test_engines_gpu.py runs.

Their sources must be importable; torch.cuda is replaced, graphs of mini-sglang are played by hand.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import engine_stubs, small_engines

from cupyattn import flash_attn


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4}
    monkeypatch.setattr(small_engines, "CONFIG", small_engines.CONFIG | changes)
    monkeypatch.setattr(small_engines, "NUM_TOKENS", 6)


@pytest.fixture(autouse=True)
def busy_port() -> Iterator[None]:
    """The port that both engines meet at is taken, as when tests run beside each other."""
    with socket.socket() as held:
        with contextlib.suppress(OSError):  # somebody else holds it
            held.bind(("127.0.0.1", 2333))
            held.listen()
        yield


def minisgl_tokens(path: Path, backend: str, graphs: list[int], **named: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        engine_stubs.torch_cuda(patch)
        with small_engines.minisgl(patch, path, backend, graphs=graphs, **named) as llm:
            return small_engines.minisgl_tokens(patch, llm)


@pytest.mark.skipif(small_engines.missing("minisgl"), reason="mini-sglang is not importable")
def test_minisgl(tmp_path: Path) -> None:
    want = minisgl_tokens(tmp_path, "dense", [])
    for page_size, graphs in ((1, []), (16, []), (1, [2, 8]), (16, [1, 2, 4, 8])):
        tokens, _ = minisgl_tokens(tmp_path, "cupyattn", graphs, page_size=page_size)
        small_engines.check(tokens, *want)


@pytest.mark.skipif(small_engines.missing("nanovllm"), reason="nano-vllm is not importable")
def test_nanovllm(tmp_path: Path) -> None:
    answers = []
    for make in (small_engines.dense_flash_attn, lambda _: flash_attn):
        with pytest.MonkeyPatch.context() as patch:
            engine_stubs.torch_cuda(patch)
            made = make(patch)
            answers.append(small_engines.nanovllm_tokens(patch, tmp_path, made, eager=True))
    small_engines.check(answers[1][0], *answers[0])

"""The examples of FlashInfer's documentation, as they stand there but for the import, on the CPU.

Layers, head dims and lengths are less than there, for the time that the reference takes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = sorted((Path(__file__).parent / "seeds").glob("*.txt"))
_CHANGES = {
    "import flashinfer": "import cupyattn as flashinfer",
    "cuda:0": "cpu",
    "num_layers = 32": "num_layers = 1",
    "_len = 2048": "_len = 256",
    "head_dim = 128": "head_dim = 16",
    ", 128])": ", 16])",
    # The document prints the first of a list that it never fills.
    "outputs_custom_mask = []": "outputs_custom_mask = outputs",
}
_PRINTED = re.compile(r"torch\.Size\(\[[\d, ]+\]\)|^True$", re.MULTILINE)


def code_of(text: str) -> str:
    """The statements of an example, which may have prompts and what was printed after them."""
    if ">>> " not in text:
        return text
    lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        if line.startswith((">>>", "...")) or depth:
            lines.append(line[4:] if line.startswith((">>>", "...")) else line)
            depth += sum(line.count(x) for x in "([") - sum(line.count(x) for x in ")]")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text("utf-8")
    for old, new in _CHANGES.items():
        text = text.replace(old, new)
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for statement in ast.parse(code_of(text)).body:
        # As at a prompt, which prints what an expression gives.
        code = compile(ast.Interactive([statement]), path.name, "single")
        exec(code, namespace)
    printed = capsys.readouterr().out
    assert _PRINTED.findall(printed) == _PRINTED.findall(text)


def test_there_is_an_example_of_each_face() -> None:
    text = "".join(path.read_text("utf-8") for path in EXAMPLES)
    for name in (
        "BatchAttention(",
        "BatchDecodeWithPagedKVCacheWrapper(",
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper(",
        "BatchPrefillWithPagedKVCacheWrapper(",
        "BatchPrefillWithRaggedKVCacheWrapper(",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper(",
        "single_decode_with_kv_cache(",
        "single_prefill_with_kv_cache(",
        "single_prefill_with_kv_cache_return_lse(",
        "xqa(",
    ):
        assert f"flashinfer.{name}" in text

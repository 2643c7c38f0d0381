"""The examples of the documents that choose their device themselves, on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import documents

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def examples() -> list[tuple[str, str]]:
    """(name, source) of the blocks that run on the GPU where there is one."""
    found = []
    for path in documents.documents():
        blocks = _BLOCK.findall(path.read_text("utf-8"))
        name = path.relative_to(ROOT).as_posix()
        found += [(f"{name}, example {n}", text) for n, text in enumerate(blocks, 1)]
    return [x for x in found if "torch.cuda.is_available()" in x[1]]


@pytest.mark.parametrize(("name", "source"), examples(), ids=[name for name, _ in examples()])
def test_examples_run_on_a_gpu(name: str, source: str) -> None:
    exec(compile(source, name, "exec"), {})
    torch.cuda.synchronize()

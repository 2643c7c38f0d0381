"""Every example of the documents and of docstrings, on a machine with a GPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from helpers import docstrings, translated

from benchmarks import documents

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
_LIBRARIES = {"torch": "import torch", "jax": "import jax", "transformers": "from transformers"}


def examples() -> list[tuple[str, str]]:
    """(name, source) of all Python blocks."""
    found = []
    for path in documents.documents():
        blocks = _BLOCK.findall(path.read_text("utf-8"))
        name = path.relative_to(ROOT).as_posix()
        found += [(f"{name}, example {n}", text) for n, text in enumerate(blocks, 1)]
    return found


def calls() -> list[tuple[str, str]]:
    """Those that call the library with arrays of a framework that another can stand in for."""
    own = (
        *("from cupyattn", "import jax", 'device="cpu"', "quantize_qkv"),
        *("cupyattn.explain(", "fast_decode_plan("),  # they take a wrapper itself
    )
    found = [x for x in [*examples(), *docstrings.programs()] if "import cupyattn\n" in x[1]]
    return [x for x in found if not any(words in x[1] for words in own)]


@pytest.mark.parametrize(("name", "source"), examples(), ids=[name for name, _ in examples()])
def test_examples_run_on_a_gpu(name: str, source: str) -> None:
    """As they stand: JAX puts its arrays on the GPU, and many blocks choose it themselves."""
    for library, needed in _LIBRARIES.items():
        if needed in source and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    exec(compile(source, name, "exec"), {})
    _wait()


@pytest.mark.parametrize(("name", "source"), calls(), ids=[name for name, _ in calls()])
def test_examples_of_cpu_arrays_run_with_those_of_a_gpu(
    name: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever framework a block names, the calls get CuPy's arrays."""
    if "float8" in source:
        pytest.skip("CuPy has no arrays of 8-bit floating point numbers")
    if "import torch" in source:
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = translated.Translated("cupy")
    monkeypatch.setitem(sys.modules, "cupyattn", module)
    exec(compile(source, name, "exec"), {})
    assert module.num_calls
    _wait()


def _wait() -> None:
    import cupy

    cupy.cuda.Device().synchronize()

"""vLLM and SGLang as they are published, with random weights, on the CPU: every token is the one
that transformers' float32 model of the same weights puts first.

CUPYATTN_ENGINES names the folder that `tests/helpers/engines/packages.py` has filled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import models

ROOT = Path(__file__).parents[3]
FOLDER = os.environ.get("CUPYATTN_ENGINES", "")
BACKENDS = {
    "llama": ("CUSTOM", "CupyAttnBackend"),
    "latent": ("CUPYATTN_MLA", "CupyAttnMLABackend"),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def missing(engine: str) -> bool:
    there = FOLDER and (Path(FOLDER) / engine).is_dir()
    return not there and importlib.util.find_spec(engine) is None


needs_vllm = pytest.mark.skipif(missing("vllm"), reason="vLLM is not there")
needs_sglang = pytest.mark.skipif(missing("sglang"), reason="SGLang is not there")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says which entry points this package has, as an installed one does."""
    path = tmp_path_factory.mktemp("site")
    info = path / "cupyattn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupyattn\nVersion: 0\n")
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def run(found: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function: what a program of helpers.engines says, and a model's kind to ask it for."""
    folders: dict[str, str] = {}
    paths = [found, ROOT, ROOT / "tests", *([FOLDER] if FOLDER else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}

    def call(*words: str) -> Any:
        made = subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
        return json.loads(made.stdout.strip().splitlines()[-1])

    def answer(engine: str, kind: str, *, as_cached: bool = False, **given: Any) -> Any:
        if kind not in folders:
            folders[kind] = str(tmp_path_factory.mktemp(kind))
            call("helpers.engines.models", "write", folders[kind], kind)
        asked = {"model": folders[kind], "prompts": models.prompts(), **given}
        got = call(f"helpers.engines.{engine}_program", json.dumps(asked))
        tokens = json.dumps([asked["prompts"], got["tokens"]])
        got["behind"] = call(
            "helpers.engines.models",
            "compare",
            folders[kind],
            tokens,
            *(["fp8"] if as_cached else []),
        )
        return got

    answer.call = call  # type: ignore[attr-defined]
    return answer


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "backend", "by_name"),
    [
        ("llama", "CUSTOM", False),
        ("latent", "CUPYATTN_MLA", False),
        ("latent", "CUPYATTN_MLA", True),
    ],
)
def test_vllm(run: Any, kind: str, backend: str, by_name: bool) -> None:
    """Its scheduler cuts prompts to chunks, finds prefixes in its cache, and mixes steps."""
    got = run("vllm", kind, backend=backend, by_name=by_name)
    assert got["backends"] == [{"CUSTOM": "CupyAttnBackend"}.get(backend, "CupyAttnMLABackend")]
    assert sum(map(len, got["tokens"])) == 72 and got["behind"] == []
    assert max(got["cached"]) == 80, "no prefix was found"
    assert any(x[0] == 1 and x[-1] > 16 for x in got["steps"]), "no step is mixed"
    assert max(map(sum, got["steps"])) <= 64, "prompts are whole"


@needs_vllm
def test_vllm_fp8_cache(run: Any) -> None:
    got = run("vllm", "llama", cache="fp8", as_cached=True)
    assert sum(map(len, got["tokens"])) == 72 and got["behind"] == []


@needs_vllm
def test_vllm_fp8_cache_of_latent_attention(run: Any) -> None:
    """Prompts are whole, since vLLM reads no such cache for them on the CPU, and not rounded: which
    tokens differ is not known, only that they are few and nearly as likely."""
    given = {"backend": "CUPYATTN_MLA", "cache": "fp8", "chunk": 512, "prefixes": False}
    got = run("vllm", "latent", by_name=True, **given)
    assert len(got["behind"]) < 24 and max(got["behind"], default=0) < 1, got["behind"]


@needs_sglang
@pytest.mark.parametrize("page_size", [1, 16])
def test_sglang(run: Any, page_size: int) -> None:
    got = run("sglang", "llama", page_size=page_size)
    assert got["backends"] == ["CupyAttnBackend"]
    assert sum(map(len, got["tokens"])) == 72 and got["behind"] == []


@needs_sglang
def test_sglang_by_its_own_tests(run: Any) -> None:
    found = run.call("helpers.engines.sglang_kit", "{}")
    refused = {name: x for name, x in found.items() if name.endswith("refused")}
    assert len(found) == 58 and len(refused) == 2
    for said in refused.values():
        assert said.startswith("UnsupportedError: is_hybrid_swa") and "--disable-hybrid" in said
    assert {name: x for name, x in found.items() if x != "passed"} == refused

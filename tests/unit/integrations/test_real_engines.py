"""vLLM and SGLang as they are published, with random weights, on the CPU: every token is the one
that transformers' float32 model of the same weights puts first.

CUPYATTN_ENGINES names the folder that `tests/helpers/engines/packages.py` has filled.
"""

from __future__ import annotations

import pytest
from helpers.engines.runs import Runs, needs_sglang, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory, "cpu")


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "backend", "by_name"),
    [
        ("llama", "CUSTOM", False),
        ("latent", "CUPYATTN_MLA", False),
        ("latent", "CUPYATTN_MLA", True),
    ],
)
def test_vllm(run: Runs, kind: str, backend: str, by_name: bool) -> None:
    """Its scheduler cuts prompts to chunks, finds prefixes in its cache, and mixes steps."""
    got = run("vllm", kind, backend=backend, by_name=by_name)
    assert got["backends"] == [{"CUSTOM": "CupyAttnBackend"}.get(backend, "CupyAttnMLABackend")]
    assert sum(map(len, got["tokens"])) == 72 and got["behind"] == []
    assert max(got["cached"]) == 80, "no prefix was found"
    assert any(x[0] == 1 and x[-1] > 16 for x in got["steps"]), "no step is mixed"
    assert max(map(sum, got["steps"])) <= 64, "prompts are whole"


@needs_vllm
def test_vllm_fp8_cache(run: Runs) -> None:
    got = run("vllm", "llama", cache="fp8", as_cached=True)
    assert sum(map(len, got["tokens"])) == 72 and got["behind"] == []


@needs_vllm
def test_vllm_fp8_cache_of_latent_attention(run: Runs) -> None:
    """Prompts are whole, since vLLM reads no such cache for them on the CPU, and not rounded: which
    tokens differ is not known, only that they are few and nearly as likely."""
    given = {"backend": "CUPYATTN_MLA", "cache": "fp8", "chunk": 512, "prefixes": False}
    got = run("vllm", "latent", by_name=True, **given)
    assert len(got["behind"]) < 24 and max(got["behind"], default=0) < 1, got["behind"]


@needs_sglang
@pytest.mark.parametrize("page_size", [1, 16])
def test_sglang(run: Runs, page_size: int) -> None:
    got = run("sglang", "llama", page_size=page_size)
    assert got["backends"] == ["CupyAttnBackend"]
    assert sum(map(len, got["tokens"])) == 72 and got["behind"] == []


@needs_sglang
def test_sglang_by_its_own_tests(run: Runs) -> None:
    found = run.call("helpers.engines.sglang_kit", "{}")
    refused = {name: x for name, x in found.items() if name.endswith("refused")}
    assert len(found) == 58 and len(refused) == 2
    for said in refused.values():
        assert said.startswith("UnsupportedError: is_hybrid_swa") and "--disable-hybrid" in said
    assert {name: x for name, x in found.items() if x != "passed"} == refused

"""vLLM and SGLang as they are published, with random weights, on a GPU: CUDA graphs, fp8 caches,
and their own Triton backends beside ours. CUPYATTN_ENGINES as in tests/unit/integrations.

Weights are bfloat16's: where two tokens are about as likely, an engine may give either.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.engines.runs import Runs, needs_sglang, needs_vllm

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
SIZES = [1, 2, 4]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
VLLM: dict[str, Any] = {"eager": False, "compilation": GRAPHS, "memory": 0.05}
CAPTURED = {"cuda_graph_bs_decode": [1, 2, 4, 6, 8], "cuda_graph_bs_prefill": [64, 256]}
SGLANG: dict[str, Any] = {"graphs": True, "more": CAPTURED, "memory": 0.9}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory, "cuda")


def check(got: Any, backend: str, *, ours: bool = True) -> None:
    assert got["backends"] == [backend]
    assert sum(map(len, got["tokens"])) == 72
    assert len(got["behind"]) < 24 and max(got["behind"], default=0) < 0.5, got["behind"]
    launched = [x for x in got["kernels"] if x.startswith("cupyattn_")]
    assert bool(launched) == ours, got["kernels"]


@needs_vllm
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("kind", "backend", "name"),
    [("llama", "CUSTOM", "CupyAttnBackend"), ("latent", "CUPYATTN_MLA", "CupyAttnMLABackend")],
)
def test_vllm(run: Runs, kind: str, backend: str, name: str, cache: str) -> None:
    as_cached = kind == "llama" and cache == "fp8"
    given = {"backend": backend, "cache": cache, "dtype": "bfloat16"}
    check(run("vllm", kind, as_cached=as_cached, **given, **VLLM), name)


@needs_vllm
def test_vllm_newer_runner(run: Runs) -> None:
    check(run("vllm", "llama", dtype="bfloat16", runner=2, **VLLM), "CupyAttnBackend")


@needs_vllm
def test_vllm_on_its_own_backend(run: Runs) -> None:
    """The comparison holds what it holds of ours."""
    got = run("vllm", "llama", dtype="bfloat16", backend="TRITON_ATTN", **VLLM)
    check(got, "TritonAttentionBackend", ours=False)


@needs_sglang
@pytest.mark.parametrize(("page_size", "cache"), [(1, "auto"), (16, "auto"), (16, "fp8_e4m3")])
def test_sglang(run: Runs, page_size: int, cache: str) -> None:
    given = {"page_size": page_size, "cache": cache, "as_cached": cache != "auto"}
    check(run("sglang", "llama", dtype="bfloat16", **given, **SGLANG), "CupyAttnBackend")


@needs_sglang
def test_sglang_on_its_own_backend(run: Runs) -> None:
    got = run("sglang", "llama", dtype="bfloat16", backend="triton", **SGLANG)
    check(got, "TritonAttnBackend", ours=False)


@needs_sglang
def test_sglang_by_its_own_tests(run: Runs) -> None:
    """In CUDA graphs too, captured for more requests than are replayed."""
    found = run.call("helpers.engines.sglang_kit", '{"device": "cuda"}')
    refused = {name for name in found if name.endswith("refused")}
    assert len(found) == 64 and {x for x in found if found[x] != "passed"} == refused

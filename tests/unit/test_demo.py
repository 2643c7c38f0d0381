"""The demo: what it prints and returns, and that its check catches answers a little wrong."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from helpers import lowprec

import cupyattn
from cupyattn import cli, demo

SMALL = ["--framework", "numpy", "--prefill-len", "64", "--decode-steps", "3"]
Attention = Callable[..., np.ndarray]


def like_a_kernel(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: object) -> np.ndarray:
    """What a GPU would answer: tiles of 16 keys, last first, rounded probabilities."""
    return lowprec.attention(q, k, v, kv_tile=16, is_reversed=True, **options)[0]


def prefill(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, kv_layout: str
) -> np.ndarray:
    return like_a_kernel(q, k, v, causal=causal, kv_layout=kv_layout)


def decode(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return like_a_kernel(q[None], k, v)[0]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Attention, Attention], None]:
    """Put functions of the test in the place of the library's two."""

    def put(prefill: Attention, decode: Attention) -> None:
        monkeypatch.setattr(cupyattn, "single_prefill_with_kv_cache", prefill, raising=False)
        monkeypatch.setattr(cupyattn, "single_decode_with_kv_cache", decode, raising=False)

    return put


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_the_library_passes_on_the_cpu(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(framework)
    assert cli.main(["demo", *SMALL, "--framework", framework]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["prefill"][1:3] == ["1", "64"] and rows["prefill"][-1] == "ok"
    assert rows["decode"][1:3] == ["3", "65..67"] and rows["decode"][-1] == "ok"
    assert f"arrays: {framework} on " in out
    if "on the CPU" in out:
        assert not re.search(r"\brates?\b|FLOP/s|GB/s", out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(3))
def test_the_rounding_of_a_kernel_passes(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str], dtype: str, seed: int
) -> None:
    serve(prefill, decode)
    assert demo.main([*SMALL, "--dtype", dtype, "--seed", str(seed)]) == 0, capsys.readouterr().out


def nudged(x: np.ndarray, factor: float) -> np.ndarray:
    """x with one element multiplied."""
    x = x.copy()
    x.flat[x.size // 2] *= factor
    return x


PREFILL_FAULTS: dict[str, Attention] = {
    "not causal": lambda q, k, v, **_: like_a_kernel(q, k, v),
    "sees one key too few": lambda q, k, v, **_: like_a_kernel(
        q, k, v, mask=np.tri(len(q), len(k), -1, bool)
    ),
    "last row sees one key too few": lambda q, k, v, **_: like_a_kernel(
        q, k, v, causal=True, window_left=len(k) - 2
    ),
    "scale off by 1%": lambda q, k, v, **_: like_a_kernel(
        q * q.dtype.type(1.01), k, v, causal=True
    ),
    "heads swapped": lambda q, k, v, **o: prefill(q, k[:, ::-1], v[:, ::-1], **o),
    "one element off by 10%": lambda q, k, v, **o: nudged(prefill(q, k, v, **o), 1.1),
    "one NaN": lambda q, k, v, **o: nudged(prefill(q, k, v, **o), np.nan),
    "all zero": lambda q, k, v, **_: np.zeros_like(q),
}
DECODE_FAULTS: dict[str, Attention] = {
    "newest token missing": lambda q, k, v: decode(q, k[:-1], v[:-1]),
    "oldest token missing": lambda q, k, v: decode(q, k[1:], v[1:]),
    "keys shifted against values": lambda q, k, v: decode(q, np.roll(k, 1, axis=0), v),
    "fp8 query and probabilities": lambda q, k, v: lowprec.attention(
        q.astype(ml_dtypes.float8_e4m3fn)[None], k, v
    )[0][0].astype(q.dtype),
    "one NaN": lambda q, k, v: nudged(decode(q, k, v), np.nan),
    "one infinity": lambda q, k, v: nudged(decode(q, k, v), np.inf),
}


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_a_wrong_prefill_fails(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    serve(PREFILL_FAULTS[fault], decode)
    assert demo.main(SMALL) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if "FAILED:" in line]
    assert len(failures) == 1 and "FAILED: prefill: o[" in failures[0]


@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_a_wrong_decode_fails(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    serve(prefill, DECODE_FAULTS[fault])
    assert demo.main(SMALL) == 1
    out = capsys.readouterr().out
    assert "FAILED: decode step at 65 tokens: o[0, " in out and "FAILED: prefill" not in out


def test_a_reference_that_is_wrong_does_not_widen_the_tolerance(
    serve: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = demo.reference.attention

    def not_causal(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> object:
        return right(q, k, v)

    serve(prefill, decode)
    monkeypatch.setattr(demo.reference, "attention", not_causal)
    assert demo.main(SMALL) == 1
    assert "the reference and its low-precision twin disagree" in capsys.readouterr().out


def test_without_a_gpu_the_job_is_smaller_and_says_so(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(prefill, decode)
    assert demo.main(["--framework", "numpy"]) == 0
    out = capsys.readouterr().out
    assert "256-token prefill, 8 decode steps" in out
    assert "without a GPU" in out and "2048 + 64 tokens" in out


def test_a_framework_that_is_missing_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert demo.main(["--framework", "torch"]) == 1
    assert "--framework: torch cannot be imported" in capsys.readouterr().err
    assert demo._choose(None)[0].name == "numpy"


@pytest.mark.parametrize(
    "bad", [["--prefill-len", "0"], ["--decode-steps", "-1"], ["--dtype", "x"]]
)
def test_bad_options_are_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(bad)
    assert stop.value.code == 2


def test_the_work_that_rates_are_made_of() -> None:
    # Three tokens see 1 + 2 + 3 keys; a pair costs 128 multiply-adds in Q·Kᵀ and 128 in P·V a head.
    assert demo.prefill_flops(3) == 6 * 32 * 2 * (128 + 128)
    # K and V: 10 tokens of 8 heads; q and o: 32 heads; 128 elements of 2 bytes each.
    assert demo.decode_bytes(10, 2) == (10 * 8 + 10 * 8 + 32 + 32) * 128 * 2


@pytest.mark.parametrize("size", [["--prefill-len", "10000000"], ["--decode-steps", str(10**12)]])
def test_more_tokens_than_fit_are_refused(
    size: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--framework", "numpy", *size]) == 1
    err = capsys.readouterr().err
    assert err.startswith("cupyattn demo: --prefill-len, --decode-steps: ") and "GiB" in err

"""flash_mla over lists of two caches, and of rows of 584 bytes, on the CPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import fake_gpu, listed_latent

from cupyattn import flash_mla
from cupyattn.engine import latent_rows
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.launch.driver import params
from cupyattn.reference.latent_rows import pack_pages, unpack_pages

ATOL = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed: int) -> None:
    case = listed_latent.draw(seed, ml_dtypes.bfloat16 if seed % 2 else np.float32)
    want, want_lse = case.expected()
    out, lse = flash_mla.flash_mla_with_kvcache(**case.arguments)
    atol = ATOL[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=atol, atol=atol)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)
    given = np.empty_like(out)
    again, _ = flash_mla.flash_mla_with_kvcache(**case.arguments, out=given)
    assert again is given and np.array_equal(given, out)


def test_pages_of_584_bytes() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 4, 512)).astype(np.float32)
    pages = pack_pages(values)
    assert pages.shape == (3, 4, 584) and pages.dtype == np.uint8
    found = unpack_pages(pages)
    groups = np.abs(values[..., :448]).reshape(3, 4, 7, 64).max(-1)
    step = np.exp2(np.ceil(np.log2(groups / 448))) * 16  # half of e4m3's last place below 448
    error = np.abs(found - values)[..., :448].reshape(3, 4, 7, 64)
    assert (error <= step[..., None]).all()
    rope = values[..., 448:].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found[..., 448:], rope)
    # By hand: the second token's third group begins at byte 576 + 128, its exponent lies at
    # 4 * 576 + 8 + 2.
    pages[0].reshape(-1)[[704, 2314]] = 0x38, 130  # 1.0, and 2^3
    assert unpack_pages(pages)[0, 1, 128] == 8.0
    with pytest.raises(ArgumentError, match="pages: got"):
        unpack_pages(pages[..., :580])


def two(**changes: Any) -> Any:
    case = listed_latent.draw(0, np.float32, "plain")
    names = "extra_k_cache", "extra_indices_in_kvcache"
    given = {name: x for name, x in case.arguments.items() if name != "extra_topk_length"}
    assert all(name in given for name in names)
    return flash_mla.flash_mla_with_kvcache(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"extra_indices_in_kvcache": None}, ArgumentError, "got some of them"),
        ({"extra_k_cache": None}, ArgumentError, "got some of them"),
        ({"causal": True}, ArgumentError, "causal: got True"),
        ({"window_left": 3}, ArgumentError, "window_left: got 3 with indices"),
        ({"softmax_scale": "x"}, ArgumentError, "softmax_scale"),
        ({"indices": None}, ArgumentError, "extra_k_cache: is read by lists alone"),
        ({"extra_k_cache": np.zeros((2, 2, 1, 500), np.float32)}, ArgumentError, "extra_k_cache"),
        ({"extra_k_cache": np.zeros((2, 2, 2, 512), np.float32)}, ArgumentError, "extra_k_cache"),
        ({"extra_topk_length": np.zeros(9, np.int32)}, ArgumentError, "extra_topk_length"),
        ({"indices": np.zeros((3, 1, 4), np.int64)}, ArgumentError, "indices: dtype is int64"),
        ({"out": np.zeros((3, 1, 6, 511), np.float32)}, ArgumentError, "out: shape is"),
        ({"q": np.zeros((3, 6, 512), np.float32)}, ArgumentError, "q: shape is"),
        ({"k_cache": np.zeros((2, 2, 1, 512), np.float16)}, ArgumentError, "k_cache: rows are"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        two(**changes)


def test_rows_of_584_bytes_are_listed() -> None:
    pages = np.zeros((2, 4, 1, 584), np.uint8)
    q, lists = np.zeros((1, 1, 2, 512), np.float32), np.zeros((1, 1, 3), np.int32)
    named: dict[str, Any] = {"head_dim_v": 512, "is_fp8_kvcache": True}
    call = flash_mla.flash_mla_with_kvcache
    with pytest.raises(ArgumentError, match="k_cache: is read by lists alone"):
        call(q, pages, np.zeros((1, 1), np.int32), np.ones(1, np.int32), **named)
    with pytest.raises(ArgumentError, match="584 bytes have 512 columns, and q has 576"):
        call(np.zeros((1, 1, 2, 576), np.float32), pages, None, None, indices=lists, **named)
    apart = np.zeros((2, 5, 1, 600), np.uint8)[:, :4, :, :584]
    with pytest.raises(ArgumentError, match="without gaps"):
        call(q, apart, None, None, indices=lists, **named)
    with pytest.raises(ArgumentError, match="lists of 0 entries"):
        call(q, pages, None, None, indices=lists[..., :0], **named)


@pytest.fixture
def make(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    # Tensor maps are made by libcuda, which need not be here.
    monkeypatch.setattr(latent_rows, "_boxes", lambda pages: None)
    return fake_gpu.maker("torch", monkeypatch)


def test_launches(gpu: fake_gpu.Gpu, make: Callable[..., Any]) -> None:
    """A gather, then attention over 576 columns; cached calls do the same."""
    pages, lists = make(2, 4, 1, 512), make(2, 3, 5, dtype="int32")
    named: dict[str, Any] = {"head_dim_v": 512, "indices": lists}
    named |= {"extra_k_cache": make(3, 2, 1, 512), "extra_indices_in_kvcache": lists}
    for _ in range(3):
        gpu.launches.clear()
        out, lse = flash_mla.flash_mla_with_kvcache(make(2, 3, 16, 512), pages, None, None, **named)
        assert tuple(out.shape) == (2, 3, 16, 512) and tuple(lse.shape) == (2, 16, 3)
        assert gpu.launches[0].kernel == "gather_keys" and gpu.launches[0].grid == (2, 6, 1)
        # Tokens, those of a request, and vectors of 16 bytes: 512 columns become 576 on Hopper.
        assert struct.unpack("<4i", gpu.launches[0].params[160:176]) == (6, 3, 64, 72)


_LISTED = struct.Struct("<3Q 4q 4i")  # kernels/cupyattn/params/listed_keys.cuh


@pytest.mark.parametrize("has_second", [False, True])
def test_rows_of_584_bytes_are_read_as_they_lie(
    gpu: fake_gpu.Gpu, make: Callable[..., Any], has_second: bool
) -> None:
    """One launch, which is told of both caches; cached calls do the same."""
    pages, more = make(5, 4, 1, 584, dtype="uint8"), make(3, 2, 1, 584, dtype="uint8")
    lists, others, lens = (make(*shape, dtype="int32") for shape in ((2, 3, 70), (2, 3, 5), (2,)))
    named: dict[str, Any] = {"head_dim_v": 512, "is_fp8_kvcache": True, "indices": lists}
    if has_second:
        named |= {"extra_k_cache": more, "extra_indices_in_kvcache": others}
        named |= {"extra_topk_length": lens}
    for _ in range(3):
        gpu.launches.clear()
        out, lse = flash_mla.flash_mla_with_kvcache(make(2, 3, 40, 512), pages, None, None, **named)
        assert tuple(out.shape) == (2, 3, 40, 512) and tuple(lse.shape) == (2, 40, 3)
        first, *merges = gpu.launches
        assert first.kernel.name == "wide_sm90" and first.grid[:2] == (1, 6)
        assert [x.kernel for x in merges] == ["merge_splits"] * (first.grid[2] > 1)
        behind = first.behind
        told = [_LISTED.unpack_from(behind, params.LATENT.size + n * _LISTED.size) for n in (0, 1)]
        pointer = fake_gpu.pointer
        want = (pointer(pages), pointer(lists), 0, 4 * 584, 576, 210, 70, 70, 20, 4, 0)
        assert told[0] == want
        assert told[1][7] == (5 if has_second else 0)
        if has_second:
            want = (pointer(more), pointer(others), pointer(lens), 1168, 576, 15, 5, 5, 6, 2, 0)
            assert told[1] == want


def test_rows_that_the_kernel_does_not_read(gpu: fake_gpu.Gpu, make: Callable[..., Any]) -> None:
    """Queries off 16-byte boundaries and a scale of 0 are served by a gather."""
    pages, lists = make(2, 4, 1, 584, dtype="uint8"), make(2, 3, 5, dtype="int32")
    named: dict[str, Any] = {"head_dim_v": 512, "is_fp8_kvcache": True, "indices": lists}
    call = flash_mla.flash_mla_with_kvcache
    call(make(2, 3, 16, 513)[..., 1:], pages, None, None, **named)
    call(make(2, 3, 16, 512), pages, None, None, **named, softmax_scale=0.0)
    assert [x.kernel for x in gpu.launches].count("gather_keys") == 2


def test_a_repeated_call_is_not_looked_at(
    gpu: fake_gpu.Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: Any, out: Any) -> Any:
        pages, lists = make(2, 4, 1, 584, dtype="uint8"), make(2, 3, 5, dtype="int32")
        return flash_mla.flash_mla_with_kvcache(
            *(x, pages, None, None, 512),
            is_fp8_kvcache=True,
            indices=lists,
            extra_k_cache=pages,
            extra_indices_in_kvcache=lists,
            out=out,
        )

    q, out = make(2, 3, 16, 512), make(2, 3, 16, 512)
    call(q, out)
    first, real = [(x.kernel, x.grid) for x in gpu.launches], flash_mla.ListedCaches
    gpu.launches.clear()
    monkeypatch.setattr(flash_mla, "ListedCaches", None)
    assert call(make(2, 3, 16, 512), out)[0] is out
    assert [(x.kernel, x.grid) for x in gpu.launches] == first
    monkeypatch.setattr(flash_mla, "ListedCaches", real)
    with pytest.raises(ArgumentError, match="out: overlaps"):
        call(q, q)
    with pytest.raises(ArgumentError, match="out: shape"):
        call(q, make(2, 3, 16, 256))


def test_parts(
    gpu: fake_gpu.Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls whose keys side by side take more than a limit: two tokens at a time here."""
    monkeypatch.setattr(flash_mla, "MAX_BYTES", 2 * 10 * 576 * 2)
    pages, lists = make(2, 4, 1, 512), make(2, 3, 5, dtype="int32")
    named: dict[str, Any] = {"head_dim_v": 512, "indices": lists}
    named |= {"extra_k_cache": pages, "extra_indices_in_kvcache": lists}
    out, lse = flash_mla.flash_mla_with_kvcache(make(2, 3, 16, 512), pages, None, None, **named)
    assert tuple(out.shape) == (2, 3, 16, 512) and tuple(lse.shape) == (2, 16, 3)
    gathers = [x.grid[1] for x in gpu.launches if x.kernel == "gather_keys"]
    assert gathers == [2, 1, 2, 1]


def test_what_gpus_refuse(gpu: fake_gpu.Gpu, make: Callable[..., Any]) -> None:
    lists = make(1, 1, 3, dtype="int32")
    named: dict[str, Any] = {"head_dim_v": 512, "is_fp8_kvcache": True, "indices": lists}
    call = flash_mla.flash_mla_with_kvcache
    with pytest.raises(UnsupportedError, match="pass q in bfloat16"):
        pages = make(2, 4, 1, 584, dtype="uint8")
        call(make(1, 1, 2, 512, dtype="float16"), pages, None, None, **named)
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        pages = make(2, 3, 1, 584, dtype="uint8")
        call(make(1, 1, 2, 512), pages, None, None, **named)
    assert not gpu.launches

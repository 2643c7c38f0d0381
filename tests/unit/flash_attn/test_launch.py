"""What flash_attn's functions launch, on a GPU that is not there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import fake_gpu, precompile
from helpers.fake_gpu import Gpu, count_functions, pointer, unpack

from cupyattn import array, jit
from cupyattn.engine import call_cache, index_arrays
from cupyattn.engine import run_planless as call
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError
from cupyattn.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    forward,
    get_scheduler_metadata,
    merge_state_v2,
)

torch = pytest.importorskip("torch")
B, H, HK, D, PAGES, PAGE, WIDTH, ROOM = 4, 8, 2, 64, 20, 16, 5, 50
ATTENTION = ["plan_batch", "decode_sm80"]
FOUND = ["decode_sm80"]  # whose blocks find their items


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    fake_gpu.forget()
    index_arrays._kept.clear()
    yield fake_gpu.pretend(monkeypatch)
    fake_gpu.forget()
    index_arrays._kept.clear()


@pytest.fixture
def make(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return fake_gpu.maker("torch", monkeypatch)


def ints(*values: int, dtype: Any = torch.int32) -> Any:
    return torch.tensor(values, dtype=dtype)


def decode(make: Callable[..., Any], **changes: Any) -> Any:
    named = {
        "q": make(B, 1, H, D),
        "k_cache": make(PAGES, PAGE, HK, D),
        "v_cache": make(PAGES, PAGE, HK, D),
        "page_table": make(B, WIDTH, dtype="int32"),
        "cache_seqlens": ints(40, 50, 60, 0),
    }
    named |= {name: x(make) if callable(x) else x for name, x in changes.items()}
    return flash_attn_with_kvcache(**named)


def contiguous(make: Callable[..., Any], **changes: Any) -> Any:
    caches = {name: make(B, ROOM, HK, D) for name in ("k_cache", "v_cache")}
    return decode(make, **{**caches, "page_table": None, **changes})


def varlen(make: Callable[..., Any], **changes: Any) -> Any:
    named = {
        "q": make(12, H, D),
        "k": make(150, HK, D),
        "v": make(150, HK, D),
        "cu_seqlens_q": ints(0, 4, 8, 12, 12),
        "cu_seqlens_k": ints(0, 50, 100, 150, 150),
        "max_seqlen_q": 4,
        "max_seqlen_k": 50,
    }
    named |= {name: x(make) if callable(x) else x for name, x in changes.items()}
    return flash_attn_varlen_func(**named)


def dense(make: Callable[..., Any], **changes: Any) -> Any:
    named = {"q": make(3, 4, H, D), "k": make(3, ROOM, HK, D), "v": make(3, ROOM, HK, D)}
    named |= {name: x(make) if callable(x) else x for name, x in changes.items()}
    return flash_attn_func(**named)


def new(make: Callable[..., Any]) -> Any:
    return make(B, 1, HK, D)


def fp8(*shape: int) -> Callable[..., Any]:
    return lambda make: make(*shape, dtype="float8_e4m3fn")


def numbers(*shape: int) -> Callable[..., Any]:
    return lambda make: make(*shape, dtype="float32")


FP8 = {name: fp8(PAGES, PAGE, HK, D) for name in ("k_cache", "v_cache")}
# By what they are: a call and its launches.
VARIANTS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "dense": (dense, {"causal": True}, FOUND),
    "dense, LSE": (dense, {"return_softmax_lse": True}, [*ATTENTION, "pad_lse"]),
    "dense, heads first": (
        dense,
        {
            "q": lambda make: make(3, H, 4, D).transpose(1, 2),
            "k": lambda make: make(3, HK, ROOM, D).transpose(1, 2),
        },
        FOUND,
    ),
    "dense, a head dim of no kernel": (
        dense,
        {
            "q": lambda make: make(3, 4, H, 57),
            "k": lambda make: make(3, ROOM, HK, 57),
            "v": lambda make: make(3, ROOM, HK, 57),
        },
        ["copy_rows", "copy_rows", *FOUND],
    ),
    "dense, values of another such, out": (
        dense,
        {
            "v": lambda make: make(3, ROOM, HK, 35),
            "out": lambda make: make(3, 4, H, 35),
            "return_softmax_lse": True,
        },
        ["copy_rows", *ATTENTION, "pad_lse", "copy_rows"],
    ),
    "decode, new keys of such": (
        decode,
        {
            "q": lambda make: make(B, 1, H, 57),
            **{name: lambda make: make(PAGES, PAGE, HK, 57) for name in ("k_cache", "v_cache")},
            **{name: lambda make: make(B, 1, HK, 57) for name in "kv"},
        },
        ["append_new_kv", "copy_rows", "copy_rows", *FOUND],
    ),
    "dense, fp8 keys of many rows": (
        dense,
        {
            "q": lambda make: make(4, 4096, H, D),
            "k": fp8(4, 4096, HK, D),
            "v": fp8(4, 4096, HK, D),
            "v_descale": numbers(4, HK),
        },
        ["copy_rows", "plan_batch", "prefill_sm80", "merge_splits"],
    ),
    "dense, fp8 keys of fewer rows": (
        dense,
        {
            "q": lambda make: make(4, 4095, H, D),
            "k": fp8(4, 4096, HK, D),
            "v": fp8(4, 4096, HK, D),
        },
        ["plan_batch", "widen_rows", "prefill_sm80", "merge_splits"],
    ),
    "dense, chunks": (dense, {"attention_chunk": 16, "return_softmax_lse": True}, ATTENTION),
    "varlen": (varlen, {"return_softmax_lse": True}, FOUND),
    "varlen, options": (
        varlen,
        {
            "causal": True,
            "softcap": 30.0,
            "window_size": (7, 0),
            "sinks": lambda make: make(H),
            "num_splits": 1,
        },
        ATTENTION,
    ),
    "varlen, pages": (
        varlen,
        {
            "k": lambda make: make(PAGES, PAGE, HK, D),
            "v": lambda make: make(PAGES, PAGE, HK, D),
            "block_table": lambda make: make(B, WIDTH, dtype="int32"),
            "seqused_k": lambda make: ints(40, 50, 60, 0),
            "cu_seqlens_k": None,
        },
        ATTENTION,
    ),
    "decode": (decode, {}, FOUND),
    "decode, LSE": (decode, {"return_softmax_lse": True}, [*ATTENTION, "pad_lse"]),
    "decode, int64": (
        decode,
        {
            "page_table": lambda make: make(B, WIDTH, dtype="int64"),
            "cache_seqlens": lambda make: ints(40, 50, 60, 0, dtype=torch.int64),
        },
        ATTENTION,
    ),
    "decode, new keys": (decode, {"k": new, "v": new}, ["append_new_kv", *FOUND]),
    "decode, new rows": (
        decode,
        {
            "q": lambda make: make(12, H, D),
            "k": lambda make: make(7, HK, D),
            "v": lambda make: make(7, HK, D),
            "cu_seqlens_q": lambda make: ints(0, 4, 8, 12, 12),
            "cu_seqlens_k_new": lambda make: ints(0, 3, 3, 5, 7),
            "max_seqlen_q": 4,
        },
        ["append_new_kv", *ATTENTION],
    ),
    "decode, rotated": (
        decode,
        {
            "k": new,
            "v": new,
            "rotary_cos": lambda make: make(9, 8),
            "rotary_sin": lambda make: make(9, 8),
            "causal": True,
        },
        ["append_new_kv", *FOUND],
    ),
    "decode, new fp8 keys": (
        decode,
        {**FP8, "k": fp8(B, 1, HK, D), "v": fp8(B, 1, HK, D)},
        ["append_new_kv", *ATTENTION],
    ),
    "decode, rows of the table": (
        decode,
        {
            "q": lambda make: make(2, 1, H, D),
            "cache_batch_idx": lambda make: ints(3, 1),
            "cache_seqlens": lambda make: ints(9, 9),
        },
        FOUND,
    ),
    "decode, chunks": (decode, {"attention_chunk": 32}, FOUND),
    "decode, chunks of no page": (
        decode,
        {"attention_chunk": 24, "k": new, "v": new},
        ["append_new_kv", *ATTENTION],
    ),
    "decode, padding": (
        decode,
        {"cache_leftpad": lambda make: ints(1, 2, 3, 0), "k": new, "v": new},
        ["append_new_kv", *ATTENTION],
    ),
    "varlen, slopes to the right": (varlen, {"alibi_slopes": numbers(B, H)}, ATTENTION),
    "varlen, slopes behind a cap": (
        varlen,
        {"alibi_slopes": numbers(H), "causal": True, "softcap": 9.0},
        ATTENTION,
    ),
    "dense, slopes in chunks": (
        dense,
        {"alibi_slopes": numbers(3, H), "causal": True, "attention_chunk": 16},
        ATTENTION,
    ),
    "decode, descales of requests": (
        decode,
        {**FP8, "k_descale": numbers(B, HK), "v_descale": numbers(B, HK)},
        ATTENTION,
    ),
    "decode, slopes": (decode, {"alibi_slopes": numbers(H), "causal": True}, ATTENTION),
    "varlen, slopes": (varlen, {"alibi_slopes": numbers(B, H), "causal": True}, ATTENTION),
    "decode, fp8": (
        decode,
        {**FP8, "k_descale": lambda make: make(1, dtype="float32").expand(B, HK)},
        ATTENTION,
    ),
    "decode, all fp8": (
        decode,
        {
            **FP8,
            "q": fp8(B, 1, H, D),
            "q_descale": numbers(HK),
            "k_descale": numbers(HK),
            "v_descale": lambda make: make(HK, dtype="float32").expand(B, HK),
        },
        ["plan_batch", "decode_sm80"],
    ),
    "contiguous": (contiguous, {}, FOUND),
    "contiguous, one length": (
        contiguous,
        {"cache_seqlens": 7, "k": new, "v": new},
        ["append_new_kv", *FOUND],
    ),
    "contiguous, rows": (
        contiguous,
        {
            "k_cache": lambda make: make(6, ROOM, HK, D),
            "v_cache": lambda make: make(6, ROOM, HK, D),
            "cache_batch_idx": lambda make: ints(5, 1, 2, 3),
        },
        FOUND,
    ),
    "contiguous, padding": (
        contiguous,
        {"cache_leftpad": lambda make: ints(1, 2, 3, 0)},
        FOUND,
    ),
    "contiguous, padding of two arrays": (
        contiguous,
        {
            "cache_leftpad": lambda make: ints(1, 2, 3, 0),
            "k_cache": lambda make: make(B, ROOM + 1, HK, D)[:, 1:],
        },
        ATTENTION,
    ),
    "contiguous, chunks": (contiguous, {"attention_chunk": 7}, FOUND),
}  # fmt: skip


def names_of(gpu: Gpu) -> list[str]:
    return [x.kernel if isinstance(x.kernel, str) else x.kernel.name for x in gpu.launches]


@pytest.mark.parametrize("variant", VARIANTS)
def test_launches(
    gpu: Gpu, make: Callable[..., Any], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the second of calls that look alike skips the checks."""
    function, changes, launches = VARIANTS[variant]
    function(make, **changes)
    assert names_of(gpu) == launches
    attention = gpu.attentions()[-1]
    gpu.launches.clear()

    def no_checks(*_: object) -> None:
        raise AssertionError("the call was not cached")

    monkeypatch.setattr(call, "check", no_checks)
    function(make, **changes)
    assert names_of(gpu) == launches
    assert gpu.attentions()[-1].grid == attention.grid


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_read_on_the_host(
    gpu: Gpu, make: Callable[..., Any], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, changes, launches = VARIANTS[variant]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a value was read")

    def arrays(make: Callable[..., Any]) -> dict[str, Any]:
        return {name: x(make) if callable(x) else x for name, x in changes.items()}

    given = arrays(make)
    for name in ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(array, "to_host", refuse)
    function(make, **given)
    assert names_of(gpu) == launches


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_keeps_nothing_of_ours(gpu: Gpu, make: Callable[..., Any], variant: str) -> None:
    """What is made while a graph is captured has its values in replays alone."""
    function, changes, launches = VARIANTS[variant]
    gpu.is_capturing = True
    function(make, **changes)
    assert names_of(gpu) == launches and not index_arrays._kept


def test_constants_are_kept(gpu: Gpu, make: Callable[..., Any]) -> None:
    for length in (7, 8, 9):
        contiguous(make, cache_seqlens=length)
        kept = dict(index_arrays._kept)
        assert len(kept) == 1  # rows of the cache, but not lengths
    assert [x.tolist() for x in kept.values()] == [[0, 1, 2, 3]]


def test_what_the_kernels_are_told(gpu: Gpu, make: Callable[..., Any]) -> None:
    caches = [make(PAGES, HK, PAGE, 2 * D).transpose(1, 2) for _ in range(1)]
    k, v = caches[0].split(D, dim=-1)
    sinks, out = make(H, dtype="float32"), make(B, 1, H, D)
    lens, table = ints(40, 50, 60, 0), make(B, WIDTH, dtype="int32")
    got = decode(
        make, k_cache=k, v_cache=v, sinks=sinks, out=out, cache_seqlens=lens, page_table=table,
        softcap=20.0, softmax_scale=0.5, window_size=[9, 3],
    )  # fmt: skip
    assert got is out
    attention = gpu.launches[-1]
    assert gpu.lengths() == (0, pointer(lens), 0, 0) and gpu.num_requests() == (B, B)
    told = unpack(attention.params)
    assert (told["k"], told["v"]) == (pointer(k), pointer(k) + 2 * D)
    assert (told["k_stride_page"], told["k_stride_n"], told["k_stride_h"]) == (
        HK * PAGE * 2 * D, 2 * D, PAGE * 2 * D,
    )  # fmt: skip
    assert (told["sinks"], told["o"]) == (pointer(sinks), pointer(out))
    assert told["kv_indices"] == pointer(table) and told["page_size"] == PAGE
    assert (told["window_left"], told["window_right"]) == (9, 3)
    assert (told["sm_scale"], told["logits_soft_cap"]) == (0.5, 20.0)


def test_scales_of_each_head_are_read_where_they_are(gpu: Gpu, make: Callable[..., Any]) -> None:
    for scales in (make(HK, dtype="float32"), make(HK, dtype="float32").expand(B, HK)):
        decode(make, **FP8, k_descale=scales, v_descale=scales)
        planner, attention = gpu.launches[-2:]
        told = unpack(attention.params)
        assert told["scale_k"] == told["scale_v"] == pointer(scales) and not told["scale_q"]
        assert struct.unpack_from("<3Q", planner.params, 32) == (0, 0, 0)
    one = make(1, dtype="float32")
    decode(make, **FP8, k_descale=one, v_descale=one.expand(B, HK))
    planner, attention = gpu.launches[-2:]
    told = unpack(attention.params)
    assert struct.unpack_from("<3Q", planner.params, 32) == (0, *[pointer(one)] * 2)
    assert pointer(one) not in (told["scale_k"], told["scale_v"])
    # As in FA3, 16-bit keys have none.
    decode(make, k_descale=one, v_descale=one, q_descale=one)
    told = unpack(gpu.launches[-1].params)
    assert told["scale_q"] == told["scale_k"] == told["scale_v"] == 0


def test_the_lse_is_written_where_it_is_returned(gpu: Gpu, make: Callable[..., Any]) -> None:
    _, lse = varlen(make, return_softmax_lse=True)
    told = unpack(gpu.launches[-1].params)
    assert told["lse"] == pointer(lse) and tuple(lse.shape) == (H, 12)
    assert (told["lse_stride_n"], told["lse_stride_h"]) == (1, 12)
    _, lse = decode(make, return_softmax_lse=True)
    assert tuple(lse.shape) == (B, H, 1) and lse.is_contiguous()


def test_a_cached_call_runs_few_functions(gpu: Gpu, make: Callable[..., Any]) -> None:
    q, k = make(B, 1, H, D), make(PAGES, PAGE, HK, D)
    v, table, lens = k.clone(), make(B, WIDTH, dtype="int32"), ints(40, 50, 60, 0)

    def once() -> None:
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, page_table=table, causal=True)

    once()
    assert count_functions(once) <= 75


def test_other_functions(gpu: Gpu, make: Callable[..., Any]) -> None:
    flash_attn_combine(
        make(3, 2, 5, H, D, dtype="float32"), make(3, 2, H, 5, dtype="float32").transpose(2, 3)
    )
    v, s = make(5, H, D), make(H, 5, dtype="float32").T
    merge_state_v2(v, s, make(5, H, D), s.clone())
    assert names_of(gpu) == ["merge_states"] * 2
    metadata = get_scheduler_metadata(B, 1, 80, H, HK, D, ints(1, 2, 3, 4), torch.bfloat16)
    assert metadata.dtype == torch.int32 and metadata.tolist() == [0]


def test_every_append_is_listed(
    gpu: Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def load(name: str, config: jit.Config, *_: Any) -> Any:
        asked.add((name, config))
        return SimpleNamespace(function=name, set_shared_memory=lambda num_bytes: None)

    monkeypatch.setattr(jit, "load", load)
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        wide = dtype if dtype[5] != "8" else "bfloat16"
        for shift in (0, 1):
            shape = (PAGES, PAGE, HK, D + shift)
            caches = {x: make(*shape, dtype=dtype)[..., :D] for x in ("k_cache", "v_cache")}
            given = {**caches, **{x: make(B, 1, HK, D, dtype=dtype) for x in "kv"}}
            given["q"] = make(B, 1, H, D, dtype=wide)
            decode(make, **given)
            for table in ("float32", wide) if wide == dtype else ():
                tables = {f"rotary_{x}": make(9, 8, dtype=table) for x in ("cos", "sin")}
                decode(make, **given, **tables)
    listed = {x for x in precompile.page_instances() if x[0] == "append_new_kv"}
    missing = {x for x in asked if x[0] == "append_new_kv"} - listed
    assert not missing and listed


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "alibi_slopes: has rows that are apart": (
        varlen,
        {"alibi_slopes": lambda make: make(B, 2 * H, dtype="float32")[:, :H]},
    ),
    "rotary_cos: has no GPU kernel": (
        decode,
        {
            **{name: numbers(PAGES, PAGE, HK, D) for name in ("k_cache", "v_cache")},
            "k": numbers(B, 1, HK, D),
            "v": numbers(B, 1, HK, D),
            "rotary_cos": lambda make: make(9, 8),
            "rotary_sin": lambda make: make(9, 8),
        },
    ),
    "k_descale, v_descale: scales that differ between requests": (
        decode,
        {
            "q": lambda make: make(B, 1, H, 512),
            **{name: fp8(PAGES, PAGE, HK, 512) for name in ("k_cache", "v_cache")},
            "v_descale": numbers(B, HK),
        },
    ),
    "q: dtype float32 has no GPU kernel": (decode, {"q": numbers(B, 1, H, D), **{
        name: numbers(PAGES, PAGE, HK, D) for name in ("k_cache", "v_cache")}}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_gpu_refuses(gpu: Gpu, make: Callable[..., Any], message: str) -> None:
    """Before anything is launched: new keys are not written either."""
    function, changes = REFUSED[message]
    with pytest.raises(UnsupportedError) as caught:
        function(make, **changes)
    assert message in str(caught.value) and not gpu.launches


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("cache_seqlens: is on cpu", {"cache_seqlens": lambda make: ints(1, 2, 3, 4).numpy()}),
        ("k: holds 4 requests", {"cache_seqlens": lambda make: ints(1, 2, 3)}),
        ("softcap: got -1", {"softcap": -1}),
    ],
)
def test_bad_calls_write_nothing(
    gpu: Gpu, make: Callable[..., Any], message: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(CupyAttnError) as caught:
        decode(make, k=new, v=new, **changes)
    assert message in str(caught.value) and not gpu.launches


def step(rows: int, count: int, width: int) -> dict[str, Callable[..., Any]]:
    """Calls of a server's step, by what says their lengths."""
    offsets, lens = (lambda m: m(count + 1, dtype="int32")), (lambda m: m(count, dtype="int32"))
    pages = {name: lambda m: m(PAGES, PAGE, HK, D) for name in "kv"}
    pages["block_table"] = lambda m: m(count, width, dtype="int32")
    sizes = {"q": lambda m: m(rows, H, D), "max_seqlen_q": rows, "max_seqlen_k": width * PAGE}
    sizes |= {"cu_seqlens_q": offsets, "causal": True}
    keys = {name: lambda m: m(rows, HK, D) for name in "kv"}
    return {
        "rows": lambda m: varlen(m, **sizes, **keys, cu_seqlens_k=offsets),
        "pages, offsets": lambda m: varlen(m, **sizes, **pages, cu_seqlens_k=offsets),
        "pages, lengths": lambda m: varlen(m, **sizes, **pages, seqused_k=lens),
        "pages, LSE": lambda m: varlen(
            m, **sizes, **pages, seqused_k=lens, return_softmax_lse=True
        ),
        "cache": lambda m: decode(
            m,
            q=sizes["q"],
            cu_seqlens_q=offsets,
            max_seqlen_q=rows,
            cache_seqlens=lens,
            page_table=pages["block_table"],
        ),
        "decode": lambda m: decode(
            m,
            q=lambda m: m(count, 1, H, D),
            cache_seqlens=lens,
            page_table=pages["block_table"],
        ),
        "decode, FlashAttention-2's name": lambda m: decode(
            m,
            q=lambda m: m(count, 1, H, D),
            cache_seqlens=lens,
            page_table=None,
            block_table=pages["block_table"],
        ),
    }


@pytest.mark.parametrize("form", step(1, 1, 1))
def test_steps_of_a_server_are_cached(
    gpu: Gpu, make: Callable[..., Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their numbers of rows, requests and pages; only how they round matters."""
    step(70, 3, 5)[form](make)
    step(5, 2, 5)[form](make)
    monkeypatch.setattr(call, "check", None)
    for rows, count, width in ((99, 7, 5), (1000, 65, 6), (66, 1, 7), (70, 3, 8)):
        gpu.launches.clear()
        answer = step(rows, count, width)[form](make)
        names = [getattr(launch.kernel, "name", launch.kernel) for launch in gpu.launches]
        planned = ["plan_batch", "prefill_sm80"]
        found = planned if count > 64 else ["decode_sm80"]
        assert names[:2] == (found if "decode" in form else planned) or names[0] == "plan_batch"
        out, lse = answer if form.endswith("LSE") else (answer, None)
        assert out.shape[0] == (count if "decode" in form else rows)
        if lse is not None:
            assert tuple(lse.shape) == (H, rows)
        assert gpu.num_requests() == (count, out.shape[0])
    monkeypatch.undo()


@pytest.mark.parametrize("form", [x for x in step(1, 1, 1) if not x.endswith("LSE")])
def test_a_repeated_call_runs_few_functions(gpu: Gpu, make: Callable[..., Any], form: str) -> None:
    """Whatever ran between: a step of a server has a call of these shapes for each layer."""
    if not has_guards():
        pytest.skip("this torch has no comparison of its own")
    for rows, count, width in ((70, 3, 5), (99, 7, 6)):
        for _ in range(3):
            step(rows, count, width)[form](make)
        assert count_functions(lambda: step(rows, count, width)[form](make)) <= 21  # noqa: B023


def has_guards() -> bool:
    return hasattr(torch._C._dynamo.guards, "TensorGuards")


BAD_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("softcap: got -1", {"softcap": -1}),
    ("softcap: got True", {"softcap": True}),
    ("causal: got 2", {"causal": 2}),
    ("window_size: got 3", {"window_size": 3}),
    ("num_splits: got -1", {"num_splits": -1}),
    ("num_splits: got False", {"num_splits": False}),
    ("attention_chunk: got -1", {"attention_chunk": -1}),
    ("attention_chunk: got False", {"attention_chunk": False}),
    ("softmax_scale: got nan", {"softmax_scale": float("nan")}),
    ("max_seqlen_q: got -1", {"max_seqlen_q": -1}),
    ("return_softmax_lse: got 2", {"return_softmax_lse": 2}),
]


@pytest.mark.parametrize(
    ("function", "message", "changes"),
    [
        *((function, *bad) for function in (decode, varlen) for bad in BAD_OPTIONS),
        (varlen, "max_seqlen_k: got -1", {"max_seqlen_k": -1}),
        (varlen, "max_seqlen_k: got True", {"max_seqlen_k": True}),
        (varlen, "dropout_p: got 0.1", {"dropout_p": 0.1}),
        (varlen, "block_table: got None where ranks", {"cp_world_size": 2}),
        (varlen, "score_mod: is not supported", {"score_mod": "x"}),
        (decode, "page_table, block_table: are two names", {"block_table": ints(1)}),
        (decode, "sinks, s_aux: are two names", {"sinks": numbers(H), "s_aux": numbers(H)}),
    ],
)
def test_an_option_is_checked_behind_calls_that_differ_in_it_alone(
    gpu: Gpu,
    make: Callable[..., Any],
    function: Callable[..., Any],
    message: str,
    changes: dict[str, Any],
) -> None:
    for _ in range(4):
        function(make)
    gpu.launches.clear()
    with pytest.raises(CupyAttnError) as caught:
        function(make, **changes)
    assert message in str(caught.value) and not gpu.launches


def test_repeats_with_other_options_are_other_calls(gpu: Gpu, make: Callable[..., Any]) -> None:
    """The scale and the window are in the struct of the attention kernel."""
    for _ in range(4):
        varlen(make, causal=True)
    for scale, left in ((0.5, -1), (0.25, -1), (0.5, 7), (0.5, -1)):
        gpu.launches.clear()
        for _ in range(3):
            varlen(make, causal=True, softmax_scale=scale, window_size=[left, 0])
        told = [unpack(x.params) for x in gpu.attentions()]
        assert [(x["sm_scale"], x["window_left"]) for x in told] == [(scale, left)] * 3


def test_repeats_of_dense_calls_are_found_by_their_own_arrays(
    gpu: Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers of requests, strides and outputs between them; each launches what it did."""
    if not has_guards():
        pytest.skip("this torch has no comparison of its own")
    spaced: dict[str, Any] = {"k": make(3, ROOM, HK, 2, D)[..., 1, :]}
    packed = make(3, ROOM, 3, HK, D)
    more = {"q": make(5, 4, H, D), "k": make(5, ROOM, HK, D), "v": make(5, ROOM, HK, D)}
    fewer = {"q": make(2, 4, H, D), "k": make(2, ROOM, HK, D), "v": make(2, ROOM, HK, D)}
    calls = [
        {},
        more,
        spaced,
        fewer,
        {"k": packed[:, :, 1], "v": packed[:, :, 2]},
        {"out": make(3, 4, H, D)},
        {"v": make(3, ROOM, HK, 2 * D)},
        {"causal": True},
    ]
    told: list[Any] = [None] * len(calls)
    for turn in range(6):
        for index, changes in enumerate(calls):
            gpu.launches.clear()
            dense(make, **changes)
            launch = gpu.attentions()[-1]
            found = unpack(launch.params)
            moving = {n for n in found if n in "qkvo" or n.startswith("partial")}
            known = launch.grid, {n: x for n, x in found.items() if n not in moving}
            told[index] = told[index] or known
            assert known[0] == told[index][0], (turn, changes)
            for name in ("kv_stride_n", "v_stride_n", "q_stride_n", "sm_scale"):
                assert known[1].get(name) == told[index][1].get(name)
    for changes in calls:
        for _ in range(4):
            dense(make, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(forward, "view_cache", None)
            gpu.launches.clear()
            q, k, v = make(3, 4, H, D), make(3, ROOM, HK, D), make(3, ROOM, HK, D)
            given = {"q": q, "k": k, "v": v} | changes
            out = dense(make, **given)
            found = unpack(gpu.attentions()[-1].params)
            assert [found[n] for n in "qkvo"] == [pointer(given[n]) for n in "qkv"] + [pointer(out)]


def test_repeats_of_dense_calls_are_checked_for_what_repeats_cannot_be(
    gpu: Gpu, make: Callable[..., Any]
) -> None:
    q, k, v, out = make(3, 4, H, D), make(3, ROOM, HK, D), make(3, ROOM, HK, D), make(3, 4, H, D)
    for _ in range(5):
        flash_attn_func(q, k, v, out=out)
    gpu.launches.clear()
    with pytest.raises(ArgumentError, match="overlap"):
        flash_attn_func(q, k, v, out=q)
    with pytest.raises(ArgumentError, match="grad"):
        flash_attn_func(q, k.clone().requires_grad_(), v, out=out)
    with torch.no_grad():
        needs = k.clone().requires_grad_()
        for _ in range(5):
            flash_attn_func(q, needs, v, out=out)
    gpu.launches.clear()
    with pytest.raises(ArgumentError, match="grad"):
        flash_attn_func(q, needs, v, out=out)
    assert not gpu.launches


def test_an_array_in_two_places_is_compared_once(
    gpu: Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of self-attention: what has one array twice is no call of two arrays."""
    if not has_guards():
        pytest.skip("this torch has no comparison of its own")
    q, k, v = make(12, H, D), make(12, HK, D), make(12, HK, D)
    for own in (False, True, False):
        offsets = ints(0, 4, 8, 12, 12)
        others = offsets.clone() if own else offsets
        named: dict[str, Any] = {"q": q, "k": k, "v": v, "max_seqlen_k": 4}
        named |= {"cu_seqlens_q": offsets, "cu_seqlens_k": others}
        for _ in range(4):
            varlen(make, **named)
        with monkeypatch.context() as patch:
            patch.setattr(call_cache, "_read_torch", None)
            gpu.launches.clear()
            varlen(make, **named)
        assert {pointer(offsets), pointer(others)} <= {*gpu.lengths()}


@pytest.mark.parametrize(
    "variant",
    [f"decode, {x}" for x in ("new keys", "new rows", "rotated", "new fp8 keys", "padding")],
)
def test_calls_that_append_are_found_again(
    gpu: Gpu, make: Callable[..., Any], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their own arrays: lengths behind the new keys, and rotated queries, are in scratch memory
    of the call, where attention reads them."""
    if not has_guards():
        pytest.skip("this torch has no comparison of its own")
    function, changes, launches = VARIANTS[variant]
    for _ in range(3):
        gpu.launches.clear()
        function(make, **changes)
    first = [x.params for x in gpu.launches]
    monkeypatch.setattr(forward, "view_cache", None)
    named = {name: x(make) if callable(x) else x for name, x in changes.items()}
    lens = ints(41, 51, 61, 1)
    named = {"q": make(B, 1, H, D), "cache_seqlens": lens} | named
    gpu.launches.clear()
    function(make, **named)
    assert names_of(gpu) == launches
    told = struct.unpack_from("<2Q 48x 2Q 48x 10Q", gpu.launches[0].params)
    new_k, _, new_v, _, q, rotated, *_, lens_at, begin, _, _, after, _ = told
    assert (new_k, new_v, lens_at, begin) == tuple(
        map(pointer, (named["k"], named["v"], lens, lens))
    )
    assert gpu.lengths()[1] == after
    read = unpack(gpu.attentions()[-1].params)["q"]
    assert read == (rotated if "rotary_cos" in named else pointer(named["q"]))
    assert q == (pointer(named["q"]) if "rotary_cos" in named else 0)
    # All but addresses is as it was.
    assert gpu.launches[0].params[208:] == first[0][208:]
    if gpu.launches[1].kernel == "plan_batch":
        assert gpu.launches[1].params[96:] == first[1][96:]


def _of_batch(make: Callable[..., Any], variant: str, count: int) -> dict[str, Any]:
    """The arrays of a call of VARIANTS, of so many requests."""
    named = {
        "q": make(count, 1, H, D),
        "page_table": make(count, WIDTH + count, dtype="int32"),
        "cache_seqlens": ints(*range(count)),
        "k": make(count, 1, HK, D),
        "v": make(count, 1, HK, D),
    }
    if variant == "new rows":
        offsets = ints(*range(count + 1))
        named |= {"q": make(3 * count, H, D), "cu_seqlens_q": 3 * offsets, "max_seqlen_q": 4}
        named |= {name: make(2 * count, HK, D) for name in "kv"}
        named |= {"cu_seqlens_k_new": offsets}
    if variant == "rotated":
        named |= {"rotary_cos": make(9, 8), "rotary_sin": make(9, 8), "causal": True}
        named |= {"rotary_seqlens": ints(*range(count))}
    if variant == "padding":
        named |= {"cache_leftpad": ints(*range(count))}
    return named


@pytest.mark.parametrize("variant", ["new keys", "new rows", "rotated", "padding"])
def test_appends_of_other_lengths_are_found_again(
    gpu: Gpu, make: Callable[..., Any], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they launch is what their full checks would."""

    def launched(count: int) -> list[Any]:
        gpu.launches.clear()
        named = _of_batch(make, variant, count)
        out = decode(make, **named)
        assert out.shape == named["q"].shape
        told = struct.unpack_from("<2Q 48x 2Q 48x 10Q", gpu.launches[0].params)
        assert (told[0], told[2]) == (pointer(named["k"]), pointer(named["v"]))
        assert gpu.lengths()[1] == told[-2]
        parts = {"append_new_kv": (208, 384), "plan_batch": (96, 320)}
        return [
            (launch.kernel, launch.grid, launch.params[begin:end])
            for launch in gpu.launches
            for begin, end in (parts.get(str(launch.kernel), (0, 0)),)
        ] + [gpu.num_requests()]

    checked = []
    for count in (counts := (2, 70, 3, B)):
        fake_gpu.forget()
        checked.append(launched(count))
    with monkeypatch.context() as patch:
        patch.setattr(forward, "view_cache", None)
        for _ in range(2):
            assert [launched(count) for count in counts] == checked
    # Lengths that do not fit are refused as ever.
    for name in ("v", "cache_seqlens"):
        named = _of_batch(make, variant, 5)
        named[name] = _of_batch(make, variant, 6)[name]
        with pytest.raises(ArgumentError):
            decode(make, **named)


def test_appends_that_are_found_again_are_checked_for_overlaps(
    gpu: Gpu, make: Callable[..., Any]
) -> None:
    k_cache, new_k, new_v = make(PAGES, PAGE, HK, D), make(B, 1, HK, D), make(B, 1, HK, D)
    for _ in range(4):
        decode(make, k_cache=k_cache, k=new_k, v=new_v)
    gpu.launches.clear()
    with pytest.raises(ArgumentError, match="overlap"):
        decode(make, k_cache=k_cache, k=k_cache[3, :B][:, None], v=new_v)
    both = make(PAGES, PAGE, HK, D)
    with pytest.raises(ArgumentError, match="v_cache: is at the address of k_cache"):
        decode(make, k_cache=both, v_cache=both.view(both.shape), k=new_k, v=new_v)
    assert not gpu.launches


def test_caches_without_pages_are_found_again(
    gpu: Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has the row of its number, which all calls share."""
    if not has_guards():
        pytest.skip("this torch has no comparison of its own")
    for changes in ({}, {"k": new, "v": new}):
        for count in (B, 2, B, 2):
            caches = {name: make(count, ROOM, HK, D) for name in ("k_cache", "v_cache")}
            lens = torch.full((count,), 9, dtype=torch.int32)
            step = {"q": make(count, 1, H, D), "cache_seqlens": lens, "page_table": None}
            step |= {name: make(count, 1, HK, D) for name in changes}
            for _ in range(3):
                decode(make, **caches, **step)
            with monkeypatch.context() as patch:
                patch.setattr(forward, "view_cache", None)
                gpu.launches.clear()
                decode(make, **caches, **step)
            assert gpu.num_requests()[0] == count
            found = unpack(gpu.attentions()[-1].params)
            assert (found["k"], found["v"]) == tuple(map(pointer, caches.values()))

"""Cached calls of the page operations: which calls are cached, and what they cost."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from helpers import fake_gpu
from helpers.fake_gpu import Gpu, count_functions, pointer

import cupyattn
from cupyattn import array, page
from cupyattn.errors import ArgumentError

Make = Callable[..., Any]
PAGES, PAGE, H, D = 9, 5, 2, 64


def of_one(make: Make) -> Any:
    return make(PAGES, 2, PAGE, H, D)


def pair(make: Make) -> Any:
    return make(PAGES, PAGE, H, D), make(PAGES, PAGE, H, 2 * D)[..., :D]


def interleaved(make: Make) -> Any:
    both = make(PAGES, 2, PAGE, H, D)
    return both[:, 0], both[:, 1]


def of_tokens(make: Make) -> Any:
    return make(PAGES, 2, H, D)


CACHES = {"one": of_one, "pair": pair, "interleaved": interleaved, "pages of a token": of_tokens}


def arguments(make: Make, cache: Any, nnz: int = 4, indices: int = 7, count: int = 2) -> dict:
    lengths = {"batch_indices": nnz, "positions": nnz, "kv_indices": indices}
    lengths |= {"kv_indptr": count + 1, "kv_last_page_len": count}
    index = {name: make(n, dtype="int32") for name, n in lengths.items()}
    rows = make(nnz, 3, H, D)
    return {
        "append_key": rows[:, 0],
        "append_value": rows[:, 1],
        **index,
        "paged_kv_cache": cache,
    }


def only_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the call was not cached")

    monkeypatch.setattr(array, "view", refuse)


@pytest.mark.parametrize("kind", CACHES)
def test_appends_of_other_lengths_are_cached(
    gpu: Gpu, make: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [CACHES[kind](make) for _ in range(3)]
    lengths = ((4, 7, 2), (1, 1, 1), (99, 50, 30))
    calls = [arguments(make, x, *n) for x, n in zip(caches, lengths, strict=True)]
    checked = []
    for call in calls:
        fake_gpu.forget()
        assert cupyattn.append_paged_kv_cache(**call) is None
        checked.append(gpu.launches.pop())
    cupyattn.append_paged_kv_cache(**calls[0])
    gpu.launches.clear()
    only_cached(monkeypatch)
    for call in calls:
        assert cupyattn.append_paged_kv_cache(**call) is None
    size = 208
    for a, b in zip(gpu.launches, checked, strict=True):
        assert (a.kernel, a.grid, a.stream) == (b.kernel, b.grid, b.stream)
        assert a.params[:size] == b.params[:size]
    assert len({launch.params[:size] for launch in gpu.launches}) == 3


def test_scales_and_layouts_are_told_apart(gpu: Gpu, make: Make) -> None:
    if not hasattr(make(1), "untyped_storage"):
        pytest.skip("CuPy has no fp8 of its own")
    given = arguments(make, make(PAGES, 2, H, H, D, dtype="float8_e4m3fn"))
    seen = set()
    for _ in range(2):
        for options in ({}, {"kv_layout": "HND"}, {"k_scale": 2.0}, {"v_scale": 2.0}):
            cupyattn.append_paged_kv_cache(**given, **options)
            seen.add(gpu.launches[-1].params)
    assert len(seen) == 4 and len(page._APPENDS) == 4
    with pytest.raises(ArgumentError, match="k_scale: got True"):
        cupyattn.append_paged_kv_cache(**given, k_scale=True)


BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "append_value: ": lambda a: {"append_value": a["append_value"][:3]},
    "batch_indices: ": lambda a: {"batch_indices": a["batch_indices"][:3]},
    "positions: dimension 0": lambda a: {"positions": a["positions"][:3]},
    "positions: 2 dimensions|positions: .* 2 dim": lambda a: {"positions": a["positions"][None]},
    "kv_indptr: has 3 offsets": lambda a: {"kv_last_page_len": a["kv_last_page_len"][:1]},
    "append_key: got list": lambda a: {"append_key": [1.0]},
    "kv_indices: got list": lambda a: {"kv_indices": [1]},
    "kv_indices: got NoneType": lambda a: {"kv_indices": None},
    "kv_layout: ": lambda a: {"kv_layout": ["NHD"]},
    "K and V are at the same": lambda a: {"paged_kv_cache": (a["paged_kv_cache"][0],) * 2},
    "got 3 arrays": lambda a: {"paged_kv_cache": (*a["paged_kv_cache"], None)},
    "paged_kv_cache.1.: got NoneType": lambda a: {"paged_kv_cache": (a["paged_kv_cache"][0], None)},
    "overlaps append_key": lambda a: {
        "append_key": a["paged_kv_cache"][0].reshape(-1)[: 12 * H * D].reshape(4, 3, H, D)[:, 0]
    },
    "overlaps positions": lambda a: {
        "positions": a["paged_kv_cache"][1].reshape(-1)[:8].view(a["positions"].dtype)
    },
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_append_is_refused_after_good_ones(gpu: Gpu, make: Make, message: str) -> None:
    good = arguments(make, (make(PAGES, PAGE, H, D), make(PAGES, PAGE, H, D)))
    for _ in range(2):
        cupyattn.append_paged_kv_cache(**good)
    assert len(page._APPENDS) == 1
    gpu.launches.clear()
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            cupyattn.append_paged_kv_cache(**good | BAD[message](good))
    assert not gpu.launches


def test_a_pair_without_values_is_no_cache_of_both(gpu: Gpu, make: Make) -> None:
    """[pages, 2, heads, head_dim] are pages of a token each, or the keys of pages of two."""
    both = of_tokens(make)
    for _ in range(2):
        cupyattn.append_paged_kv_cache(**arguments(make, both))
    with pytest.raises(ArgumentError, match="got NoneType"):
        cupyattn.append_paged_kv_cache(**arguments(make, (both, None)))


def test_copied_index_arrays_are_not_cached(gpu: Gpu, make: Make) -> None:
    if not hasattr(make(1), "untyped_storage"):
        pytest.skip("the fake GPU copies torch's arrays alone")
    given = arguments(make, of_one(make), nnz=1)
    offsets, longer = make(2, dtype="int32"), make(1, dtype="int64")
    cupyattn.append_paged_kv_cache(**given | {"positions": longer})
    cupyattn.get_batch_indices_positions(offsets, longer, 3)
    cupyattn.get_seq_lens(offsets, longer, 3)
    assert not len(page._APPENDS) and not len(page._POSITIONS) and not len(page._SEQ_LENS)


def test_one_strided_index_says_nothing_of_several(gpu: Gpu, make: Make) -> None:
    """One element is contiguous whatever its stride is, and several of that stride are copied."""
    if not hasattr(make(1), "untyped_storage"):
        pytest.skip("the fake GPU copies torch's arrays alone")
    for count in (1, 1, 3):
        lengths = make(2 * count, dtype="int32")[::2]
        cupyattn.get_seq_lens(make(count + 1, dtype="int32"), lengths, 3)
        # Bytes past this kernel's struct are those of earlier launches.
        addresses = struct.unpack_from("<3Q", gpu.launches[-1].params)
        assert (lengths.data_ptr() in addresses) == (count == 1)


def test_debugging_counts_tokens_at_every_call(
    gpu: Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(make, of_one(make))
    gpu.api.is_debugging = True
    gpu.api.runtime.streamSynchronize = lambda stream: None
    gpu.api.runtime.memcpy = lambda *_: None
    for _ in range(2):
        cupyattn.append_paged_kv_cache(**given)
    assert not len(page._APPENDS)


def test_positions_and_lengths_are_cached(
    gpu: Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(count: int, nnz: int) -> tuple[Any, ...]:
        offsets, lengths = make(count + 1, dtype="int32"), make(count, dtype="int32")
        outputs = {name: make(nnz, dtype="int32") for name in ("batch_indices", "positions")}
        return offsets, lengths, nnz, outputs

    def run(offsets: Any, lengths: Any, nnz: int, outputs: dict[str, Any]) -> None:
        gpu.launches.clear()
        made = cupyattn.get_batch_indices_positions(offsets, lengths, nnz)
        given = cupyattn.get_batch_indices_positions(offsets, lengths, nnz, **outputs)
        assert given == tuple(outputs.values()) or all(
            a is b for a, b in zip(given, outputs.values(), strict=True)
        )
        lens = cupyattn.get_seq_lens(offsets, lengths, 16)
        assert {x.shape[0] for x in made} == {nnz} and lens.shape[0] == lengths.shape[0]
        assert all(type(x) is type(offsets) and x.dtype == offsets.dtype for x in (*made, lens))
        found, written, counted = (launch.params for launch in gpu.launches)
        shared = 16  # the inputs
        assert found[:shared] == written[:shared] == counted[:shared]
        assert found[32:48] == written[32:48]
        for raw, results in ((found, made), (written, given), (counted, (lens,))):
            addresses = [int.from_bytes(raw[i : i + 8], "little") for i in (16, 24)]
            assert addresses[: len(results)] == [pointer(x) for x in results]

    first, other = calls(3, 10), calls(40, 700)
    run(*first)
    monkeypatch.setattr(page, "_offsets_and_lengths", None)  # the checks
    for call in (first, other):
        run(*call)
    monkeypatch.undo()


def test_bad_index_calls_are_refused_after_good_ones(gpu: Gpu, make: Make) -> None:
    offsets, lengths, rows = (make(n, dtype="int32") for n in (4, 3, 10))
    for _ in range(2):
        cupyattn.get_batch_indices_positions(offsets, lengths, 10, positions=rows)
        cupyattn.get_seq_lens(offsets, lengths, 1)
    for given, options, message in (
        ((offsets, lengths[:2], 10), {"positions": rows}, "append_indptr: has 4 offsets"),
        ((offsets, lengths, 9), {"positions": rows}, "positions: "),
        ((offsets, lengths, True), {}, "nnz: got True"),
        ((offsets, lengths, 4), {"positions": offsets}, "positions: overlaps append_indptr"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cupyattn.get_batch_indices_positions(*given, **options)
    for given, message in (
        ((offsets, lengths[:2], 1), "kv_indptr: has 4 offsets"),
        ((offsets, lengths, True), "page_size: got True"),
        ((offsets, lengths, 0), "page_size: got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cupyattn.get_seq_lens(*given)


def test_cached_calls_run_few_functions(gpu: Gpu, make: Make) -> None:
    given = arguments(make, of_one(make))
    offsets, lengths = make(4, dtype="int32"), make(3, dtype="int32")
    for call, most in (
        (lambda: cupyattn.append_paged_kv_cache(**given), 13),
        (lambda: cupyattn.get_batch_indices_positions(offsets, lengths, 5), 17),
        (lambda: cupyattn.get_seq_lens(offsets, lengths, 5), 13),
    ):
        assert count_functions(call) > 2 * most
        call()  # once more, and torch compares signatures
        assert count_functions(call) <= most

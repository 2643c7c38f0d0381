"""Calls of all kinds, on a GPU that is not there, launch only kernels that are compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as with_fields
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import fake_batch, fake_gpu
from helpers.fake_batch import Device
from helpers.patching import replace

import cupyattn
from cupyattn import jit
from cupyattn.array import memory
from cupyattn.core import device, dtypes
from cupyattn.engine import run_planless as planless
from cupyattn.errors import ArgumentError
from cupyattn.launch.attention import load_kernels, single
from cupyattn.launch.instances import LEVELS, SHARED_BYTES, Selection, instances, one_option
from cupyattn.launch.tiles.mixed_sm80 import mixed_config
from cupyattn.launch.tiles.select import tile_config

Instance = tuple[str, jit.Config]
_ROUNDS, _WORKSPACE = 150, 128 << 20


class Loads:
    """What is loaded on a GPU of an architecture."""

    def __init__(self, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arch, self.found = arch, set[Instance]()
        self.memory = SHARED_BYTES[arch]
        stand_in = load_kernels.LoadedKernel.__new__

        def loaded(tiles: Any) -> Any:
            if tiles is None:
                return None
            self.found.add((tiles.name, tiles.config))
            kernel = stand_in(load_kernels.LoadedKernel)
            kernel.function, kernel.tiles = tiles, tiles
            kernel.num_slots, kernel.num_sms = 264, 132
            kernel.has_clusters = arch == "sm_90a" and tiles.name == "decode_sm80"
            kernel._max_clusters = {size: 132 // size for size in (2, 4, 8)}
            return kernel

        def load_kernel(
            problem: Any,
            rows: str,
            index: int,
            is_batch: bool = False,
            page_size: int = 0,
            finds: str = "",
        ) -> Any:
            tiles = tile_config(problem, rows, self.memory, is_batch, arch, page_size)
            return loaded(tiles.finding(finds))

        def load_mixed(problem: Any, large: str, small: str, index: int) -> Any:
            return loaded(mixed_config(problem, large, small, self.memory, arch))

        replace(monkeypatch, load_kernels.load_kernel, load_kernel)
        replace(monkeypatch, load_kernels.load_mixed, load_mixed)
        props = with_fields(device.NO_GPU, arch=arch, max_smem_per_block=self.memory)
        replace(monkeypatch, device.device_props, lambda index: props)
        original = jit.load

        def load(name: str, config: jit.Config, *rest: Any) -> Any:
            self.found.add((name, config))
            return original(name, config, *rest)

        monkeypatch.setattr(jit, "load", load)
        # Tensor maps are the driver's; what a launch of one request loads is in its plan.
        monkeypatch.setattr(
            single.AttentionLauncher, "launch", lambda self, *given: self.plan(*given[7:9])
        )


@pytest.fixture(params=["sm_80", "sm_90a"])
def loads(
    request: pytest.FixtureRequest, gpu: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> Loads:
    return Loads(request.param, monkeypatch)


@pytest.fixture
def on_gpu(loads: Loads, stream: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(stream, "add", lambda job: 0)  # no answer is looked at
    for prepared in (planless.Prepared,):
        monkeypatch.setattr(prepared, "launch", lambda *_: None)
    torch = pytest.importorskip("torch")
    fake_gpu.maker("torch", monkeypatch)

    def make(*shape: int, dtype: str = "bfloat16") -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype))  # nothing is read

    empty = memory._empty_cupy
    replace(monkeypatch, empty, lambda dtype, index, shape: make(*shape, dtype=dtype.name))
    empty_on = memory.empty_on  # workspaces of wrappers' own, in torch's memory
    replace(monkeypatch, empty_on, lambda _, __, shape, dtype: make(*shape, dtype=dtype.name))
    return Device(make, stream)


class Call(NamedTuple):
    """What a model asks for; sizes are of one random batch."""

    dtype: str
    dtype_kv: str
    dims: tuple[int, int]
    group: int
    page_size: int
    causal: bool
    window_left: int
    logits_soft_cap: float
    qo_len: list[int]
    kv_len: list[int]

    def selection(self, operation: str) -> Selection:
        """What is to be compiled for it."""
        kinds = dtypes.parse(self.dtype), dtypes.parse(self.dtype_kv)
        options = {"soft_cap"} if self.logits_soft_cap else {"window", "sinks"}
        return Selection(
            (operation,),
            (kinds,),
            (self.dims,),
            (self.group,),
            (self.page_size,),
            (frozenset(options),),
        )

    @property
    def heads(self) -> tuple[int, int]:
        return 2 * self.group, 2

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that all calls have."""
        return {"window_left": self.window_left, "logits_soft_cap": self.logits_soft_cap}

    @property
    def data_types(self) -> dict[str, str]:
        return {"q_data_type": self.dtype, "kv_data_type": self.dtype_kv}

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """indptr, indices and lengths of last pages."""
        size = self.page_size
        counts = [-(-n // size) for n in self.kv_len]
        last = [n - (count - 1) * size for n, count in zip(self.kv_len, counts, strict=True)]
        return _offsets(counts), np.arange(sum(counts), dtype=np.int32), np.array(last, np.int32)

    def q(self, put: Device) -> Any:
        return put.make(sum(self.qo_len), self.heads[0], self.dims[0], dtype=self.dtype)

    def keys(self, put: Device) -> tuple[Any, Any]:
        """Keys and values in rows or in pages."""
        size = self.page_size
        shape = (sum(-(-n // size) for n in self.kv_len), size) if size else (sum(self.kv_len),)
        return tuple(put.make(*shape, 2, dim, dtype=self.dtype_kv) for dim in self.dims)  # type: ignore[return-value]


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _random(
    rng: np.random.Generator,
    *,
    paged: bool,
    max_rows: int,
    square: bool = False,
    capped: bool = True,
    more_keys: int = 0,
) -> Call:
    dims = ((64, 64), (128, 128), (256, 256), (192, 128))
    dtype = str(rng.choice(["bfloat16", "float16"]))
    has_fp8 = paged and rng.random() < 0.4
    qo_len = rng.choice([1, 2, 3, 5, 9, 17, 40, 300], rng.integers(1, 6)).clip(max=max_rows)
    kv_len = qo_len + more_keys + rng.choice([0, 1, 60, 700, 5000], len(qo_len))
    return Call(
        dtype,
        "float8_e4m3fn" if has_fp8 else dtype,
        dims[rng.integers(3 if square else 4)],
        int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16])),
        int(rng.choice([1, 2, 8, 16, 32, 64])) if paged else 0,
        bool(rng.random() < 0.7),
        int(rng.choice([-1, 100])),
        float(rng.choice([0.0, 30.0])) * capped,
        [int(n) for n in qo_len],
        [int(n) for n in kv_len],
    )


def _single(call: Call, put: Device) -> None:
    one = call._replace(qo_len=call.qo_len[:1], kv_len=call.kv_len[:1])
    q, (k, v) = one.q(put), one.keys(put)
    cupyattn.single_prefill_with_kv_cache(q, k, v, causal=one.causal, **one.options)


def _single_decode(call: Call, put: Device) -> None:
    one = call._replace(qo_len=[1], kv_len=call.kv_len[:1])
    k, v = one.keys(put)
    cupyattn.single_decode_with_kv_cache(one.q(put)[0], k, v, **one.options)


def _ragged(call: Call, put: Device) -> None:
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(put.workspace(_WORKSPACE))
    offsets = _offsets(call.qo_len), _offsets(call.kv_len)
    dims = {"head_dim_qk": call.dims[0], "head_dim_vo": call.dims[1]}
    w.plan(*offsets, *call.heads, **dims, causal=call.causal, **call.options, **call.data_types)
    w.run(call.q(put), *call.keys(put))


def _paged(call: Call, put: Device) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(put.workspace(_WORKSPACE))
    dims = {"head_dim_qk": call.dims[0], "head_dim_vo": call.dims[1], "page_size": call.page_size}
    offsets = _offsets(call.qo_len), *call.table()
    w.plan(*offsets, *call.heads, **dims, causal=call.causal, **call.options, **call.data_types)
    w.run(call.q(put), call.keys(put))


def _decode(call: Call, put: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(put.workspace(_WORKSPACE))
    w.plan(
        *call.table(), *call.heads, call.dims[0], call.page_size, **call.options, **call.data_types
    )
    w.run(call.q(put), call.keys(put), sinks=put.make(call.heads[0], dtype="float32"))


def _planless(call: Call, put: Device) -> None:
    size = len(call.kv_len)
    width = -(-max(call.kv_len) // call.page_size)
    cupyattn.trtllm_batch_decode_with_kv_cache(
        call.q(put),
        call.keys(put),
        put.workspace(_WORKSPACE),
        put.make(size, width, dtype="int32"),
        put.make(size, dtype="int32"),
        max(call.kv_len),
        window_left=call.window_left,
        kv_layout="NHD",
    )


def _attention(call: Call, put: Device) -> None:
    w = cupyattn.BatchAttention("NHD")
    indptr, indices, _ = call.table()
    lengths = np.array(call.kv_len, np.int32)
    tables = _offsets(call.qo_len), indptr, indices, lengths
    sizes = *call.heads, *call.dims, call.page_size
    cap = call.logits_soft_cap
    w.plan(*tables, *sizes, causal=call.causal, logits_soft_cap=cap, **call.data_types)
    w.run(call.q(put), call.keys(put), logits_soft_cap=cap)


def _cascade(call: Call, put: Device) -> None:
    w = cupyattn.MultiLevelCascadeAttentionWrapper(2, put.workspace(_WORKSPACE))
    size, pages = call.page_size, 40
    shared = np.array([0, pages], np.int32), np.arange(pages, dtype=np.int32)
    indptr, indices, last = call.table()
    rows = sum(call.qo_len)
    w.plan(
        [np.array([0, rows], np.int32), _offsets(call.qo_len)],
        [shared[0], indptr],
        [shared[1], indices],
        [np.array([size], np.int32), last],
        *call.heads,
        call.dims[0],
        size,
        causal=call.causal,
        **call.options,
        **call.data_types,
    )
    pool = tuple(
        put.make(max(pages, len(indices)), size, 2, dim, dtype=call.dtype_kv) for dim in call.dims
    )
    w.run(call.q(put), pool)


def _append(call: Call, put: Device) -> None:
    indptr, indices, last = (put.put(x) for x in call.table())
    rows = sum(call.qo_len)
    given = [put.make(rows, 2, dim, dtype=call.dtype) for dim in call.dims]
    places = [put.make(rows, dtype="int32") for _ in range(2)]
    cupyattn.append_paged_kv_cache(*given, *places, call.keys(put), indices, indptr, last)


def _page(call: Call, put: Device) -> None:
    indptr, _, last = (put.put(x) for x in call.table())
    lengths = cupyattn.get_seq_lens(indptr, last, call.page_size)
    cupyattn.get_batch_indices_positions(put.put(_offsets(call.qo_len)), lengths, sum(call.qo_len))


def _merge(call: Call, put: Device) -> None:
    rows, heads = sum(call.qo_len), call.heads[0]
    v = put.make(rows, heads, call.dims[1], dtype=call.dtype)
    s = put.make(rows, heads, dtype="float32")
    cupyattn.merge_state(v, s, v, s)
    many = put.make(rows, 3, heads, call.dims[1], dtype=call.dtype)
    cupyattn.merge_states(many, put.make(rows, 3, heads, dtype="float32"))


def _latent(call: Call, put: Device) -> None:
    indptr, indices, _ = call.table()
    w = cupyattn.BatchMLAPagedAttentionWrapper(put.make(_WORKSPACE, dtype="uint8"))
    lens, heads = np.array(call.kv_len, np.int32), call.heads[0]
    w.plan(
        *(_offsets(call.qo_len), indptr, indices, lens, heads, 512, 64, call.page_size),
        *(call.causal, 0.07, call.dtype, call.dtype_kv),
    )
    pool = put.make(len(indices), call.page_size, 576, dtype=call.dtype_kv)
    w.run(query=put.make(sum(call.qo_len), heads, 576, dtype=call.dtype), kv_cache=pool)


def _latent_list(call: Call, put: Device) -> None:
    rows, heads, size = sum(call.qo_len), call.heads[0], call.page_size
    cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        put.make(rows, 1, heads, 576, dtype=call.dtype),
        put.make(9, size, 576, dtype=call.dtype_kv),
        *(put.make(_WORKSPACE, dtype="uint8"), 128, 512, 64),
        *(put.make(rows, 1, 40, dtype="int32"), None, 0, 40),
        bmm1_scale=0.07,
    )


# Name -> what makes the call, its operation, and what is random about it.
CALLS: dict[str, tuple[Callable[[Call, Device], None], str, dict[str, Any]]] = {
    "single": (_single, "prefill", {"paged": False, "max_rows": 300}),
    "single decode": (_single_decode, "decode", {"paged": False, "max_rows": 1, "square": True}),
    "ragged": (_ragged, "prefill", {"paged": False, "max_rows": 300}),
    "ragged, many rows": (_ragged, "prefill", {"paged": False, "max_rows": 2000}),
    "paged": (_paged, "prefill", {"paged": True, "max_rows": 300}),
    "paged, few rows": (_paged, "prefill", {"paged": True, "max_rows": 9}),
    "ragged, few rows": (_ragged, "prefill", {"paged": False, "max_rows": 9}),
    "ragged, many keys": (
        _ragged,
        "prefill",
        {"paged": False, "max_rows": 9, "more_keys": 1_000_000},
    ),
    "decode": (_decode, "decode", {"paged": True, "max_rows": 1, "square": True}),
    "planless": (
        _planless,
        "decode",
        {"paged": True, "max_rows": 1, "square": True, "capped": False},
    ),
    "attention": (_attention, "prefill", {"paged": True, "max_rows": 300}),
    "latent": (_latent, "mla", {"paged": True, "max_rows": 40, "capped": False}),
    "latent lists": (_latent_list, "mla", {"paged": True, "max_rows": 9, "capped": False}),
    "cascade": (_cascade, "cascade", {"paged": True, "max_rows": 40, "square": True}),
    "append": (_append, "append", {"paged": True, "max_rows": 40}),
    "page": (_page, "page", {"paged": True, "max_rows": 40}),
    "merge": (_merge, "merge", {"paged": True, "max_rows": 40}),
}


def _launched(name: str, loads: Loads, on_gpu: Device) -> Iterator[tuple[Call, set[Instance]]]:
    """Random calls of a kind, each with the kernels that it loads."""
    make, _, kind = CALLS[name]
    rng = np.random.default_rng(len(name))
    for _ in range(_ROUNDS):
        call = _random(rng, **kind)
        fake_gpu.forget()
        fake_batch.forget()
        loads.found.clear()
        make(call, on_gpu)
        assert loads.found
        yield call, loads.found


@pytest.mark.parametrize("name", CALLS)
def test_ordinary_calls_launch_what_is_compiled_ahead(
    name: str, loads: Loads, on_gpu: Device
) -> None:
    operation = CALLS[name][1]
    standard = set(instances(LEVELS["standard"], loads.arch))
    for call, found in _launched(name, loads, on_gpu):
        assert found <= standard, call
        assert found <= set(instances([call.selection(operation)], loads.arch)), call


def test_what_is_compiled_ahead_is_launched_by_ordinary_calls(loads: Loads, on_gpu: Device) -> None:
    standard = set(instances(LEVELS["standard"], loads.arch))
    rest = standard.copy()
    for name in CALLS:
        for _, found in _launched(name, loads, on_gpu):
            rest -= found
    # Few rounds do not meet every combination of dtypes, head dims, options and lengths, of which
    # Hopper has more.
    most = {"sm_80": 0.21, "sm_90a": 0.47}[loads.arch]
    assert len(rest) < most * len(standard), rest


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_standard_is_small(arch: str) -> None:
    found = instances(LEVELS["standard"], arch)
    assert len(found) == len(set(found)) <= (820 if arch == "sm_90a" else 640)


def test_options_without_kernels_of_their_own_are_the_same() -> None:
    plain, *same = (
        instances([Selection(options=one_option(name))], "sm_90a")
        for name in ("none", "window", "sinks")
    )
    assert all(x == plain for x in same)


def test_a_group_decides_which_kernels_decode() -> None:
    def kernels(group: int) -> set[int]:
        chosen = Selection(("decode",), groups=(group,), head_dims=((128, 128),))
        return {config["kMmaQ"] for name, config in instances([chosen], "sm_80") if "_sm80" in name}

    # 16 rows, 32 rows, and prefill of 64.
    assert [kernels(group) for group in (8, 17)] == [{1}, {2}]
    names = {name for name, _ in instances([Selection(("decode",), groups=(64,))], "sm_80")}
    assert "prefill_sm80" in names and "decode_sm80" not in names


def test_pages_that_tma_boxes_fit_have_kernels_of_their_own() -> None:
    few, many, most = (
        set(instances([Selection(page_sizes=(size,))], "sm_90a")) for size in (1, 16, 128)
    )
    assert many == most and few != many
    assert {name for name, _ in few ^ many} == {"prefill_sm90", "merge_splits"}


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ArgumentError, match="alibi and rope exclude each other"):
        instances([Selection(options=(frozenset({"alibi", "rope"}),))], "sm_80")

"""Latent attention on a GPU that is not there: cached runs, and what they do not excuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import fake_batch, mla_calls
from helpers.batches import WORKSPACE
from helpers.fake_batch import Device
from helpers.fake_gpu import pointer
from helpers.mla_calls import PROBLEMS, Case
from helpers.patching import replace as replace_everywhere

from cupyattn import array, mla
from cupyattn.core.dtypes import bfloat16, float8_e4m3fn
from cupyattn.core.problem import AttentionProblem
from cupyattn.engine import latent_rows as parts
from cupyattn.engine import run_batch
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.launch.attention import tma_wide
from cupyattn.launch.driver import tensor_map
from cupyattn.launch.tiles.decode_sm80 import one_an_sm_rows
from cupyattn.launch.tiles.row_classes import ROW_CLASSES
from cupyattn.launch.tiles.select import tile_config

BASE = Case(1, "wrapper", PROBLEMS[1], (2, 1, 0), (70, 9, 5), 3, 16)


class Planned:
    """A case's arrays on the device and on the host, and a planned wrapper."""

    def __init__(self, device: Device, case: Case = BASE) -> None:
        self.device = device
        self.host = mla_calls.Call(case, np, WORKSPACE)
        self.wrapper = mla.BatchMLAPagedAttentionWrapper(device.workspace())
        self.plan(case.kv_len)

    def plan(self, kv_len: tuple[int, ...]) -> None:
        call = self.host
        self.wrapper.plan(
            *(call.qo_indptr, call.kv_indptr, call.ids, np.array(kv_len, np.int32)),
            *(call.case.heads, 512, 64, call.case.page_size, True, call.case.sm_scale),
            *(call.case.problem.dtype, call.case.problem.kv_dtype),
        )

    def arrays(self, is_split: bool) -> dict[str, Any]:
        put = self.device.put
        if not is_split:
            return {"query": put(self.host.q), "kv_cache": put(self.host.pool)}
        parts = (x[..., s] for x in (self.host.q, self.host.pool) for s in _PARTS)
        names = "q_nope", "q_pe", "ckv_cache", "kpe_cache"
        return {n: put(np.ascontiguousarray(x)) for n, x in zip(names, parts, strict=True)}


_PARTS = slice(0, 512), slice(512, None)


@pytest.mark.parametrize("is_split", [False, True], ids=["packed", "split"])
def test_cached_runs_answer_as_checked_ones(
    device: Device, is_split: bool, monkeypatch: Any
) -> None:
    p = Planned(device)
    wanted, wanted_lse = p.host.wrapper.run(query=p.host.q, kv_cache=p.host.pool, return_lse=True)
    first = p.wrapper.run(**p.arrays(is_split), return_lse=True)
    device.stream.finish()
    with monkeypatch.context() as patch:
        # From here on nothing is checked.
        patch.setattr(run_batch, "_run_checked", None)
        others = [p.wrapper.run(**p.arrays(is_split), return_lse=True) for _ in range(3)]
    for out, lse in (first, *others):
        np.testing.assert_array_equal(device.get(out), wanted)
        np.testing.assert_allclose(device.get(lse), wanted_lse, rtol=1e-6)


def answer_of_cpu(p: Planned, lengths: tuple[int, ...]) -> Any:
    """What a wrapper on the CPU answers over keys of these lengths."""
    w = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    w.plan(
        p.host.qo_indptr,
        p.host.kv_indptr,
        p.host.ids,
        np.array(lengths, np.int32),
        num_heads=3,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=16,
        causal=True,
        sm_scale=BASE.sm_scale,
        q_data_type="float16",
        kv_data_type="float16",
    )
    return w.run(query=p.host.q, kv_cache=p.host.pool)


def test_a_later_plan_moves_cached_runs(device: Device) -> None:
    p, arrays = Planned(device), None
    for lengths in ((70, 9, 5), (3, 0, 5), (69, 8, 0)):
        p.plan(lengths)
        arrays = arrays or p.arrays(True)
        wanted = answer_of_cpu(p, lengths)
        np.testing.assert_array_equal(device.get(p.wrapper.run(**arrays)), wanted)


def test_an_idle_gpu_makes_the_list_of_one_token_a_request(device: Device, gpu: Any) -> None:
    gpu.api.is_idle = lambda stream: True
    case = replace(BASE, qo_len=(1, 1, 1))
    p, arrays = Planned(device, case), None
    for lengths in ((70, 9, 5), (3, 1, 5), (69, 8, 2)):
        p.plan(lengths)
        arrays = arrays or p.arrays(True)
        wanted = answer_of_cpu(p, lengths)
        np.testing.assert_array_equal(device.get(p.wrapper.run(**arrays)), wanted)
    assert device.stream.readings == [True] * 3


def test_good_runs_excuse_no_bad_ones(device: Device) -> None:
    p = Planned(device)
    arrays = p.arrays(True)
    for _ in range(3):
        p.wrapper.run(**arrays)
    few = {name: device.put(np.ascontiguousarray(device.get(x)[:-1])) for name, x in arrays.items()}
    with pytest.raises(ArgumentError, match="q_nope: shape is"):
        p.wrapper.run(**{**arrays, "q_nope": few["q_nope"], "q_pe": few["q_pe"]})
    with pytest.raises(ArgumentError, match="kpe_cache: shape is"):
        p.wrapper.run(**{**arrays, "kpe_cache": few["kpe_cache"]})
    with pytest.raises(ArgumentError, match="out: overlaps q_nope"):
        p.wrapper.run(**arrays, out=arrays["q_nope"])
    out = device.put(np.zeros_like(device.get(arrays["q_nope"])))
    space = p.wrapper._workspace.owner
    for given in (arrays, {**arrays, "out": out}):
        for _ in range(3):
            p.wrapper.run(**given)
        for name, x in given.items():
            size = x.nbytes if hasattr(x, "nbytes") else x.numel() * x.element_size()
            inside = space[1024 : 1024 + size].view(x.dtype).reshape(x.shape)
            with pytest.raises(ArgumentError, match=f"{name}: overlaps float_workspace_buffer"):
                p.wrapper.run(**{**given, name: inside})
    pages = {n: device.put(device.get(arrays[n])[:1].copy()) for n in ("ckv_cache", "kpe_cache")}
    with pytest.raises(ArgumentError, match="ckv_cache: holds 1 pages"):
        p.wrapper.run(**{**arrays, **pages})


@pytest.mark.parametrize(
    ("count", "tokens", "heads", "kv_len", "merges"),
    [(32, 1, 16, 8192, "block"), (32, 2, 16, 8192, "block"), (32, 4, 16, 8192, "block"),
     (12, 4, 16, 8192, "launch"), (1, 1, 128, 32768, "launch"), (200, 1, 16, 8192, "nobody")],
)  # fmt: skip
def test_who_merges_splits(count: int, tokens: int, heads: int, kv_len: int, merges: str) -> None:
    """The last block of a tile merges few splits, of 64 rows up to four; a launch merges many."""
    pages = kv_len // 64
    table = np.arange(count + 1, dtype=np.int32)
    ids = np.arange(count * pages, dtype=np.int32)
    wrapper = mla.BatchMLAPagedAttentionWrapper(None)
    wrapper.plan(
        *(table * tokens, table * pages, ids, np.full(count, kv_len, np.int32)),
        *(heads, 512, 64, 64, True, BASE.sm_scale, "bfloat16", "bfloat16"),
    )
    plan = wrapper._require_plan()
    schedule = wrapper._prepare(plan, plan.geometry.default_variant).schedule
    (part,) = schedule.parts
    assert (part.merge is not None) == (merges == "launch")
    assert part.has_counters == (merges != "launch")
    assert (schedule.workspace_bytes > 0) == (merges != "nobody")


@pytest.mark.parametrize("key_scales", ["tokens", "rows", "pages"])
def test_scales_of_keys_that_no_kernel_reads(key_scales: str) -> None:
    problem = AttentionProblem(
        bfloat16, float8_e4m3fn, bfloat16, 576, 512, paged=True, latent=True, key_scales=key_scales
    )
    few, large = ("wide_decode_sm90", 16), ("wide_sm90", 64)
    verify = large if key_scales == "rows" else ("wide_decode_sm90", 32)
    if key_scales == "pages":  # whole rows are values, and only lists name them
        problem = replace(problem, head_dim_qk=512, sparse=True)
        few = verify = large
    most = 232_448
    for rows, (name, tile_q) in (("decode", few), ("verify", verify), ("large", large)):
        tiles = tile_config(problem, rows, most)
        assert (tiles.name, tiles.tile_q) == (name, tile_q)
    for change in ({"aligned": False}, {"prescale_logits": True}):
        with pytest.raises(UnsupportedError, match="keys that have scales of their own"):
            tile_config(replace(problem, **change), "decode", most)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="keys that have scales of their own"):
        tile_config(problem, "decode", most, arch="sm_80")


def test_boxes_of_a_cache_know_how_many_pages_it_has(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the pages of its boxes the copy engine reads zeros: a run in the call cache has those
    of its own pool, not of the pool that passed the checks."""
    boxes = tma_wide.Boxes((512, 64), ((576, 9216), (576, 9216)), (2, 2), 16, 0)
    monkeypatch.setattr(
        parts, "_boxes", lambda pages: boxes._replace(num_pages=pages.latent.shape[0])
    )
    seen: list[tuple[int, int]] = []

    def encode(address: int, dims: tuple[int, ...], *_: Any) -> bytes:
        seen.append((address, dims[2]))
        return bytes(tensor_map.BYTES)

    monkeypatch.setattr(tensor_map, "encode", encode)
    monkeypatch.setattr(fake_batch.BoundRun, "launch", lambda self, *args: None)
    p = Planned(device)
    arrays = p.arrays(False)
    pool = p.host.pool
    more = [device.put(np.concatenate([pool] * count)) for count in (1, 2, 3, 2, 1)]
    for cache in more:
        for _ in range(3):
            p.wrapper.run(query=arrays["query"], kv_cache=cache)
    wanted = {(pointer(cache), cache.shape[0]) for cache in more}
    assert {x for x in seen if x[0] in {pointer(cache) for cache in more}} == wanted


def test_e4m3_keys_of_many_rows_come_in_boxes() -> None:
    """Where they have no scales of their own, and pages that boxes fit."""
    problem = AttentionProblem(bfloat16, float8_e4m3fn, bfloat16, 576, 512, paged=True, latent=True)

    def has_boxes(page_size: int, **change: object) -> bool:
        changed = replace(problem, **change)  # type: ignore[arg-type]
        tiles = tile_config(changed, "large", 232_448, page_size=page_size)
        assert tiles.name == "wide_sm90"
        return bool(tiles.config["kTma"])

    assert has_boxes(64) and has_boxes(8)
    assert not has_boxes(1) and not has_boxes(100)
    assert not has_boxes(64, sparse=True)
    assert not has_boxes(64, key_scales="tokens")


@pytest.mark.parametrize("head_dims", [(512, 512), (256, 512)])
def test_last_blocks_merge_few_rows_of_wide_heads(head_dims: tuple[int, int]) -> None:
    problem = AttentionProblem(bfloat16, bfloat16, bfloat16, *head_dims, paged=True)
    merged = {
        rows: tile_config(problem, rows, 232_448, page_size=16).fused_splits for rows in ROW_CLASSES
    }
    assert merged == {"decode": 8, "verify": 8, "small": 0, "large": 0}


def test_tiles_that_would_spill_are_refused() -> None:
    """32 rows of heads of 256 columns do not fit the registers of blocks with an SM each."""
    problem = AttentionProblem(bfloat16, bfloat16, bfloat16, 256, 256, paged=True)
    assert one_an_sm_rows(problem, "verify") is None
    with pytest.raises(UnsupportedError):
        tile_config(problem, "verify_one_an_sm", 232_448, is_batch=True, page_size=16)


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_tables_on_the_device_are_waited_for_once(
    device: Device, is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    real, to_host = array.to_host_together, array.to_host

    def together(views: Any) -> Any:
        fetched.append(len(views))
        return real(views)

    def alone(v: Any) -> Any:
        assert v.device.kind == "cpu"
        return to_host(v)

    replace_everywhere(monkeypatch, real, together)
    replace_everywhere(monkeypatch, to_host, alone)
    put, sizes = device.put, (3, 512, 64, 16, True, BASE.sm_scale, "float16", "float16")
    w = mla.BatchMLAPagedAttentionWrapper(device.workspace())
    qo_indptr, lengths = np.array([0, 1, 2], np.int32), np.array([20, 9], np.int32)
    if is_dense:
        table = np.array([[3, 1], [2, 0]], np.int32)
        metadata = mla.MLAPlanMetadata.dense(put(qo_indptr), put(table), put(lengths))
    else:
        pages = np.array([0, 2, 3], np.int32), np.array([3, 1, 2], np.int32)
        metadata = mla.MLAPlanMetadata.csr(put(qo_indptr), *map(put, pages), put(lengths))
    w.plan(None, None, None, None, *sizes, metadata=metadata)
    assert fetched == [3]

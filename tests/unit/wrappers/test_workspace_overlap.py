"""No array of a run may lie in the float workspace, which runs overwrite: not of a checked run, not
of a cached one, and not in a plan that later runs read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device
from helpers.wrong_calls import Entry, flat
from helpers.wrong_others import entries

import cupyattn
from cupyattn.errors import ArgumentError

SPACE = "make.float_workspace_buffer"
WRAPPERS = [e for e in entries() if SPACE in e.parameters() and len(e.steps) == 3]
# Of plans, which read all else before they return.
KEPT = "custom_mask", "packed_custom_mask"
# Read before anything is launched, and a sample that needs another cache.
READ = "bidirectional_ranges", "ckv_scale_arr"
MASKS_OF_OTHERS = ("ranges", *KEPT), ("batch pod", "custom_mask_p")


def inside(space: np.ndarray, x: Any, at: int = 1 << 20) -> Any:
    """A copy of an array in the workspace, or of the first one of several."""
    if isinstance(x, (tuple, list)):
        return type(x)([inside(space, x[0], at), *x[1:]])
    place = space[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
    place[...] = x
    return place


def arrays_of(entry: Entry) -> list[tuple[str, Any]]:
    """(argument, value) of arrays that runs read or write."""
    found = []
    for name in entry.parameters():
        step, own = name.split(".")
        x = entry.base.get(name)
        if x is None:
            x = entry.samples.get(name, entry.samples.get(own))
        if isinstance(x, (tuple, list)):
            is_array = bool(x) and isinstance(x[0], np.ndarray)
        else:
            is_array = isinstance(x, np.ndarray) and x.size > 1
        is_scale = entry.name == "sinks" and own == "q_scale"  # which is multiplied first
        is_run = step == "run" and own not in READ and not is_scale
        is_other = any(entry.name == whose and own in names for whose, *names in MASKS_OF_OTHERS)
        if is_array and (is_run or own in KEPT) and not is_other:
            found.append((name, x))
    return found


CASES = [(e, name, x) for e in WRAPPERS for name, x in arrays_of(e)]


@pytest.mark.parametrize("entry, name, x", CASES, ids=[f"{e.name}, {n}" for e, n, _ in CASES])
def test_arrays_in_the_workspace_are_refused(entry: Entry, name: str, x: Any) -> None:
    space = np.zeros(4 << 20, np.uint8)
    base = entry.arguments() | {SPACE: space}
    if name in ("run.out", "run.lse") and name not in base:
        out, *_ = flat(entry.call(base))
        x = np.zeros(out.shape[: -1 if name == "run.lse" else None], x.dtype)
    entry.call(base | {name: x})
    with pytest.raises(ArgumentError, match="overlaps float_workspace_buffer in memory"):
        entry.call(base | {name: inside(space, x)})


def test_there_are_arrays_of_every_wrapper() -> None:
    assert len({e.name for e, *_ in CASES}) == len(WRAPPERS) and len(CASES) > 80


# --- cached runs, on a GPU that is not there ---


def moved(space: Any, x: Any, at: int = 1 << 16) -> Any:
    """Memory of the workspace that looks like x."""
    if isinstance(x, tuple):
        return moved(space, x[0], at), x[1]
    size = x.nbytes if hasattr(x, "nbytes") else x.numel() * x.element_size()
    return space[at : at + size].view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("form", ["one", "pair"])
def test_cached_runs_of_pages(device: Device, form: str, only_cached_runs: Any) -> None:
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    space = device.workspace()
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(space)
    w.plan(*b.table, HQ, HKV, D, 4)
    cache: Any = device.put(b.one_tensor())
    if form == "pair":
        cache = tuple(device.put(x) for x in b.cache)
    arrays = {"q": device.put(b.q), "paged_kv_cache": cache, "out": device.put(b.q)}
    arrays["lse"] = device.put(np.zeros((3, HQ), np.float32))
    arrays["sinks"] = device.put(np.zeros(HQ, np.float32))
    plain = {name: arrays[name] for name in ("q", "paged_kv_cache")}
    for given in (plain, plain | {"out": arrays["out"]}, arrays):
        named = {} if "lse" not in given else {"return_lse": True}
        for _ in range(3):
            w.run(**given, **named)
        for name, x in given.items():
            with pytest.raises(ArgumentError, match="overlaps float_workspace_buffer in memory"):
                w.run(**given | {name: moved(space, x)}, **named)
    only_cached_runs()
    w.run(**plain)
    w.run(**arrays, return_lse=True)


def test_tables_that_plans_keep(device: Device) -> None:
    """Page ids on the GPU are read where they are, also where a later plan takes the short way."""
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    space = device.workspace()
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(space)
    table = [device.put(x) for x in b.table]
    inside = [table[0], moved(space, table[1]), table[2]]
    for _ in range(3):
        with pytest.raises(ArgumentError, match="kv_indices: overlaps float_workspace_buffer"):
            w.plan(*inside, HQ, HKV, D, 4)
        w.plan(*table, HQ, HKV, D, 4)


def test_a_workspace_that_holds_what_the_plan_reads(device: Device) -> None:
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    other = device.workspace()
    table = [device.put(x) for x in b.table]
    held = moved(other, table[1])
    w.plan(table[0], held, table[2], HQ, HKV, D, 4)
    with pytest.raises(ArgumentError, match="overlaps float_workspace_buffer in memory"):
        w.reset_workspace_buffer(other)
    w.reset_workspace_buffer(device.workspace())


def test_cached_runs_of_a_prompt_beside_decodes(device: Device) -> None:
    b, space = batches.make([1, 1], [9, 30], 4), device.workspace()
    w = cupyattn.PODWithPagedKVCacheWrapper(space)
    w.plan(*b.table, HQ, HKV, D, 4)
    prompt = [np.zeros((6, heads, D), np.float16) for heads in (HQ, HKV, HKV)]
    arrays = dict(zip(("q_p", "k_p", "v_p"), map(device.put, prompt), strict=True))
    arrays |= {"q_d": device.put(b.q), "paged_kv_cache_d": device.put(b.one_tensor())}
    for _ in range(2):
        w.run(**arrays)
        for name, x in arrays.items():
            launched = len(device.stream.copies), device.stream.launches
            with pytest.raises(ArgumentError, match="overlaps float_workspace_buffer in memory"):
                w.run(**arrays | {name: moved(space, x)})
            if name.endswith("_p"):
                assert launched == (len(device.stream.copies), device.stream.launches)

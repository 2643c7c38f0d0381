"""In which form queries of 8 bits are served: by estimates, or by what the caller fixes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import cupyattn
from cupyattn.choose.candidates import only, only_form
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU
from cupyattn.core.problem import AttentionProblem
from cupyattn.core.spec import AttentionSpec
from cupyattn.launch.attention.batch import BatchLauncher
from cupyattn.launch.attention.layout import Capacity
from cupyattn.launch.attention.single import AttentionLauncher
from cupyattn.launch.tiles.config import HOPPER, Target
from cupyattn.launch.tiles.forms import ALL, AS_THEY_ARE, FORMS, KEYS, ON_ARRIVAL, QUERIES, forms_of
from cupyattn.schedule.batch import BatchRequests

E4M3, INT8 = dtypes.float8_e4m3fn, dtypes.int8
PROBLEM = AttentionProblem(E4M3, E4M3, dtypes.bfloat16, 128, 128)


def names(problem: AttentionProblem, arch: str = HOPPER) -> list[str]:
    return [form.name for form in forms_of(problem, Target(arch, 166_912, 16))]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"paged": True}, [QUERIES, ON_ARRIVAL]),
        ({"dtype_q": INT8}, [QUERIES, ON_ARRIVAL, ALL]),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, [QUERIES, ON_ARRIVAL, ALL]),
        ({"pos_encoding": "ROPE_LLAMA"}, [QUERIES, ON_ARRIVAL]),
        ({"head_dim_qk": 512, "head_dim_vo": 512}, [QUERIES, ALL]),
        ({"dtype_q": dtypes.float16}, [KEYS]),
        ({"dtype_q": dtypes.bfloat16, "dtype_kv": dtypes.float8_e5m2}, [KEYS]),
        ({"dtype_q": dtypes.float16, "paged": True}, []),
        ({"dtype_q": dtypes.float16, "pos_encoding": "ROPE_LLAMA"}, []),
        ({"dtype_q": dtypes.float16, "dtype_kv": dtypes.float16}, []),
    ],
)
def test_forms_of_a_problem(changes: dict[str, object], wanted: list[str]) -> None:
    found = names(replace(PROBLEM, **changes))
    assert found in (wanted, [AS_THEY_ARE, *wanted])


def test_forms_of_a_card() -> None:
    assert set(names(PROBLEM)) == {*FORMS} - (set() if AS_THEY_ARE in names(PROBLEM) else {""})
    assert names(PROBLEM, "sm_80") == [ON_ARRIVAL, ALL]
    assert names(replace(PROBLEM, paged=True), "sm_80") == [ON_ARRIVAL]
    assert names(replace(PROBLEM, dtype_q=dtypes.float16), "sm_80") == [AS_THEY_ARE]


def launcher_of(heads: tuple[int, int] = (32, 8), dim: int = 128, page: int = 0) -> BatchLauncher:
    spec = AttentionSpec(*heads, dim, dim, E4M3, E4M3, dtypes.bfloat16, causal=True, page_size=page)
    return BatchLauncher(spec, spec.problem(), NO_GPU.index)


def requests_of(count: int, rows: int, keys: int) -> BatchRequests:
    starts = [np.arange(count, dtype=np.int64) * n for n in (rows, keys)]
    lengths = [np.full(count, n, np.int64) for n in (rows, keys)]
    return BatchRequests(*lengths, *starts, uniform=rows)


BATCHES = [
    (1, 1, 3000),
    (7, 3, 3605),
    (1, 5000, 5000),
    (16, 604, 604),
    (4, 300, 26000),
    (90, 2, 90),
]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_soonest_serves(batch: tuple[int, int, int], page: int, dim: int) -> None:
    launcher, requests = launcher_of(dim=dim, page=page), requests_of(*batch)
    serving = launcher.serving(requests)
    times = {x.form: x.time_of(requests) for x in launcher.launchers}
    assert times[serving.form] == min(times.values()) < math.inf
    offered = launcher.candidates(requests)
    assert len({x.name for x in offered}) == len(offered)
    schedule = serving.schedule(requests)
    assert schedule.candidate in {x.name for x in offered}
    for candidate in offered:
        with only(candidate.name):
            forced = launcher.serving(requests)
            assert forced.schedule(requests).candidate == candidate.name


@pytest.mark.parametrize("batch", BATCHES)
def test_a_given_split_has_one_form(batch: tuple[int, int, int]) -> None:
    launcher, requests = launcher_of(page=16), requests_of(*batch)
    first = launcher.launchers[0]
    assert launcher.serving(requests, split_tokens=512) is first
    assert launcher.serving(requests, may_split=False) is first


def test_a_graph_keeps_its_form() -> None:
    launcher = launcher_of(page=16)
    capacity = Capacity(num_requests=8, num_rows=8, max_qo_len=1)
    found = {
        launcher.serving(requests_of(n, 1, keys), capacity=capacity).form
        for n in (1, 8)
        for keys in (10, 3000, 200_000)
    }
    assert found == {ON_ARRIVAL}
    ragged = launcher_of()
    with only_form(ALL):
        serving = ragged.serving(requests_of(1, 50, 50), capacity=capacity)
    assert not serving.widens_keys


def test_prompts_over_fp8_keys_have_keys_widened() -> None:
    """Decodes read them as they are, and so does all whose splits the caller fixes."""
    spec = AttentionSpec(32, 8, 128, 128, dtypes.bfloat16, E4M3, dtypes.bfloat16, causal=True)
    launcher, prompts = (
        BatchLauncher(spec, spec.problem(), NO_GPU.index),
        requests_of(4, 4000, 4000),
    )
    serving = launcher.serving(prompts)
    assert serving.form == KEYS and serving.widened == (False, True)
    bytes_of_keys = 2 * 2 * 4 * 4000 * 8 * 128
    assert serving.staged_bytes(serving.schedule(prompts), 4 * 4000) == bytes_of_keys
    assert launcher.serving(requests_of(8, 1, 4000)).form == AS_THEY_ARE
    assert launcher.serving(prompts, split_tokens=512).form == AS_THEY_ARE
    single = AttentionLauncher(spec, spec.problem(), NO_GPU.index)
    assert [single.serving(rows, 4000).form for rows in (1, 4000)] == [AS_THEY_ARE, KEYS]


def test_memory_of_what_is_widened() -> None:
    launcher, requests = launcher_of(), requests_of(3, 100, 200)
    sizes = {}
    for form in FORMS:
        with only_form(form):
            serving = launcher.serving(requests)
        sizes[serving.form] = serving.staged_bytes(serving.schedule(requests), 300)
    assert sizes.get(AS_THEY_ARE, 0) == sizes[ON_ARRIVAL] == 0
    assert sizes[QUERIES] == 2 * 300 * 32 * 128
    assert sizes[ALL] == sizes[QUERIES] + 2 * 2 * 600 * 8 * 128


def test_a_single_request_is_served_alike() -> None:
    batch = launcher_of()
    single = AttentionLauncher(batch.spec, batch.spec.problem(), NO_GPU.index)
    assert single.serving(1, 4000).form == ON_ARRIVAL
    assert single.serving(3000, 3000).form in (AS_THEY_ARE, ALL)
    for form in FORMS:
        with only_form(form):
            assert single.serving(40, 500).form == form


def test_an_explanation_says_which_form_and_why() -> None:
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 24, np.uint8))
    offsets = np.array([0, 900, 2000], np.int32)
    dtype = "float8_e4m3fn"
    wrapper.plan(offsets, offsets, 8, 2, 256, causal=True, q_data_type=dtype, kv_data_type=dtype)
    explained = cupyattn.explain(wrapper)
    (taken,) = (x.name for x in explained.candidates if x.is_taken)
    assert taken.endswith(f", {ALL}")
    assert any("keys and values of float8_e4m3fn are widened ahead" in x for x in explained.notes)
    assert {x.name.partition(", ")[2] for x in explained.candidates} >= {QUERIES, ALL}

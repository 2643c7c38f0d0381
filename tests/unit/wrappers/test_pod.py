"""The POD wrappers: prompts and decodes answer as alone, in one launch where they can."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import D
from helpers.fake_batch import Device

import cupyattn
from cupyattn import reference
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError

NO_SPACE = np.zeros(1 << 25, np.uint8)
Answer = tuple[np.ndarray, np.ndarray]


class Step:
    """Prompts and decodes over the pages of one cache, or of two."""

    def __init__(
        self,
        seed: int,
        prompts: tuple[list[int], list[int]] = ([5, 0, 30, 2], [9, 3, 30, 0]),
        decodes: tuple[list[int], list[int]] = ([1, 1, 1, 0], [12, 0, 7, 5]),
        page_size: int = 4,
        group: int = 2,
        is_shared: bool = True,
        layout: str = "NHD",
    ) -> None:
        made: dict[str, Any] = {"heads": (2 * group, 2), "dtype": "float16"}
        count = len(prompts[0])
        both = batches.make(
            *(a + b for a, b in zip(prompts, decodes, strict=True)), page_size, seed=seed, **made
        )
        if is_shared:
            self.p, self.d = (self._part(both, i) for i in (slice(0, count), slice(count, None)))
        else:
            self.p = batches.make(*prompts, page_size, seed=seed, **made)
            self.d = batches.make(*decodes, page_size, seed=seed + 1, **made)
        self.layout, self.group = layout, group

    @staticmethod
    def _part(both: batches.Batch, own: slice) -> batches.Batch:
        """Some requests of a batch, which keep their pages."""
        steps = [np.diff(x)[own] for x in (both.qo_indptr, both.indptr)]
        rows, pages = (x[:-1][own][0] for x in (both.qo_indptr, both.indptr))
        return replace(
            both,
            qo_len=both.qo_len[own],
            kv_len=both.kv_len[own],
            q=both.q[rows : rows + steps[0].sum()],
            qo_indptr=batches.offsets(steps[0]),
            indptr=batches.offsets(steps[1]),
            indices=both.indices[pages:],
            last_page_len=both.last_page_len[own],
            keys=both.keys[own],
        )

    def plan(self, w: Any, put: Callable[[np.ndarray], Any] = np.asarray, **options: Any) -> None:
        p, d = (
            [x.qo_indptr, x.indptr, x.indices[: x.indptr[-1]], x.last_page_len]
            for x in (self.p, self.d)
        )
        w.plan(*(put(x) for x in (*p, *d)), 2 * self.group, 2, D, self.p.page_size, **options)

    def caches(self, put: Callable[[np.ndarray], Any] = np.asarray) -> tuple[Any, Any]:
        p = put(self.p.one_tensor(self.layout))
        return p, p if self.p.cache is self.d.cache else put(self.d.one_tensor(self.layout))

    def expected(self, causal: bool, **options: Any) -> tuple[Answer, Answer]:
        return self.p.expected(causal=causal, **options), self.d.expected(**options)


def check(got: Any, wanted: tuple[Answer, Answer], get: Callable[[Any], Any] = np.asarray) -> None:
    for (o, lse), (ref_o, ref_lse) in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(get(o), ref_o.astype(np.float16))
        np.testing.assert_allclose(get(lse), ref_lse.astype(np.float32), rtol=1e-6)


def queries(step: Step, form: str, put: Callable[[np.ndarray], Any] = np.asarray) -> list[Any]:
    """q_p and q_d: slices of one array, prompts first or last, or arrays of their own."""
    p, d = step.p.q, step.d.q
    if form == "apart":
        return [put(p.copy()), put(d.copy())]
    first, second = (p, d) if form == "prompts first" else (d, p)
    whole = put(np.concatenate([first, second]))
    halves = whole[: len(first)], whole[len(first) :]
    return list(halves if form == "prompts first" else halves[::-1])


FORMS = ("prompts first", "prompts last", "apart")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_on_the_cpu(framework: str, page_size: int, layout: str) -> None:
    put: Any = np.asarray if framework == "numpy" else pytest.importorskip("torch").from_numpy
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(put(NO_SPACE), layout)
    for seed, form in enumerate((*FORMS, *FORMS)):
        step = Step(seed, page_size=page_size, group=(1, 3)[seed % 2], layout=layout)
        step.plan(w, put)
        q_p, q_d = queries(step, form, put)
        p, d = step.caches(put)
        for causal in (True, False, True):
            got = w.run(q_p, p, q_d, d, causal_p=causal, return_lse=True)
            check(got, step.expected(causal))
            out = w.run(q_p, p, q_d, d, causal_p=causal)
            for x, (y, _) in zip(out, got, strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("where", ["host", "device"])
def test_launches(
    device: Device, form: str, is_shared: bool, where: str, only_cached_runs: Any
) -> None:
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(device.workspace())
    is_together = is_shared and form != "apart"
    for seed in range(3):
        step = Step(seed, is_shared=is_shared)
        step.plan(w, device.put if where == "device" else np.asarray)
        q_p, q_d = queries(step, form, device.put)
        p, d = step.caches(device.put)
        for _ in range(2):
            before = device.stream.launches
            got = w.run(q_p, p, q_d, d, causal_p=True, return_lse=True)
            assert device.stream.launches - before == (1 if is_together else 2)
            check(got, step.expected(True), device.get)
    # The last plan has scheduled what its runs need.
    only_cached_runs()
    w.run(q_p, p, q_d, d, causal_p=True, return_lse=True)
    step.plan(w)
    w.run(q_p, p, q_d, d, causal_p=True, return_lse=True)
    device.stream.finish()


def test_a_pair_of_caches_is_known_by_its_memory(device: Device) -> None:
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(device.workspace())
    step = Step(0)
    step.plan(w)
    q_p, q_d = queries(step, "prompts first", device.put)
    pool = device.put(step.p.one_tensor())
    got = w.run(q_p, (pool[:, 0], pool[:, 1]), q_d, (pool[:, 0], pool[:, 1]), return_lse=True)
    assert device.stream.launches == 1
    check(got, step.expected(False), device.get)
    got = w.run(q_p, pool, q_d, (pool[:, 0], pool[:, 1]), return_lse=True)
    assert device.stream.launches == 3
    check(got, step.expected(False), device.get)


def test_what_is_not_of_both_takes_two_launches(device: Device) -> None:
    step = Step(0, decodes=([1, 2, 1], [12, 8, 7]))
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(device.workspace())
    step.plan(w)
    q_p, q_d = queries(step, "prompts first", device.put)
    cache, _ = step.caches(device.put)
    arrays = q_p, cache, q_d, cache
    check(w.run(*arrays, causal_p=True, return_lse=True), step.expected(True), device.get)
    check(w.run(*arrays, return_lse=True), step.expected(False), device.get)
    assert device.stream.launches == 3
    scaled = step.p.expected(), step.d.expected(scale_k=0.5, scale_v=2.0)
    got = w.run(*arrays, k_scale=0.5, v_scale=2.0, return_lse=True)
    check(got, scaled, device.get)
    for seed in range(2):
        masks = step.p.masks(seed)
        flat = np.concatenate([m.ravel() for m in masks])
        bits = batches.offsets([m.size for m in masks])
        packed, _ = reference.segment_packbits(flat, bits, "little")
        for named in ({"custom_mask_p": flat}, {"packed_custom_mask_p": packed}):
            given = {name: device.put(x) for name, x in named.items()}
            got = w.run(*arrays, **given, causal_p=True, return_lse=True)
            check(got, (step.p.expected(masks), step.d.expected()), device.get)
    check(w.run(*arrays, causal_p=True, return_lse=True), step.expected(True), device.get)


@pytest.mark.parametrize("empty", ["prompts", "decodes", "both"])
def test_a_step_without_prompts_or_decodes(device: Device, empty: str) -> None:
    none: Any = ([], [])
    given = {} if empty == "decodes" else {"prompts": none}
    given |= {} if empty == "prompts" else {"decodes": none}
    step = Step(1, is_shared=False, **given)
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(device.workspace())
    step.plan(w)
    q_p, q_d = queries(step, "apart", device.put)
    p, d = step.caches(device.put)
    got = w.run(q_p, p, q_d, d, causal_p=True, return_lse=True)
    check(got, step.expected(True), device.get)


def test_options_hold_for_both() -> None:
    step = Step(3)
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(NO_SPACE)
    named = {"window_left": 3, "sm_scale": 0.3, "pos_encoding_mode": "ROPE_LLAMA"}
    step.plan(w, data_type="float16", **named)
    p, d = step.caches()
    for form in FORMS:
        got = w.run(*(x for pair in zip(queries(step, form), (p, d), strict=True) for x in pair),
                    causal_p=True, return_lse=True)  # fmt: skip
        check(got, step.expected(True, **named))


def test_workspaces() -> None:
    step = Step(0, prompts=([3], [6000]), decodes=([1], [30_000]))
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(NO_SPACE)
    sizes: list[Any] = []
    step.plan(_Sized(w, sizes))
    assert w._step is None and w._current is None
    step.plan(w)
    cache, _ = step.caches()
    q_p, q_d = queries(step, "apart")
    check(w.run(q_p, cache, q_d, cache, return_lse=True), step.expected(False))
    w.reset_workspace_buffer(np.zeros(1 << 25, np.uint8))
    parts = [w, *w._apart.values()]
    assert len({part._workspace.ptr for part in parts}) == 1
    check(w.run(q_p, cache, q_d, cache, return_lse=True), step.expected(False))
    needs = [x.schedule.workspace_bytes for part in parts for x in part._current.prepared.values()]
    assert sizes[0][0] >= max(needs) > 0


class _Sized:
    """A wrapper whose plan() asks for the sizes."""

    def __init__(self, w: Any, sizes: list[Any]) -> None:
        self.w, self.sizes = w, sizes

    def plan(self, *args: Any, **named: Any) -> None:
        self.sizes.append(self.w.workspace_size(*args, **named))


def test_a_bad_plan_leaves_the_last_one() -> None:
    step = Step(0)
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(NO_SPACE)
    cache, _ = step.caches()
    q_p, q_d = queries(step, "prompts first")
    with pytest.raises(PlanError, match="plan"):
        w.run(q_p, cache, q_d, cache)
    step.plan(w)
    for changes, match in (
        ({"window_left": -2}, "window_left"),
        ({"q_data_type": "uint8"}, "uint8"),
    ):
        with pytest.raises((ArgumentError, UnsupportedError), match=match):
            step.plan(w, **changes)
    check(w.run(q_p, cache, q_d, cache, return_lse=True), step.expected(False))
    bad = Step(0)
    bad.d.last_page_len = bad.d.last_page_len + 9
    with pytest.raises(ArgumentError, match="last_page_len_d: request 0"):
        bad.plan(w)
    with pytest.raises(ArgumentError, match="q: holds"):
        w.run(q_p[1:].copy(), cache, q_d, cache)
    with pytest.raises(ArgumentError, match="causal_p"):
        w.run(q_p, cache, q_d, cache, causal_p=2)
    check(w.run(q_p, cache, q_d, cache, return_lse=True), step.expected(False))


def test_threads() -> None:
    """Another thread runs the plan of the first, in any form, and does not take it over."""
    step = Step(0)
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(NO_SPACE)
    step.plan(w)
    cache, _ = step.caches()
    q_p, q_d = queries(step, "apart")
    answers: list[Any] = []

    def work(*actions: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                answers.extend(action() for action in actions)
            except PlanError as error:
                answers.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def run() -> Any:
        return w.run(q_p, cache, q_d, cache, causal_p=True, return_lse=True)

    work(run)
    check(answers[0], step.expected(True))
    check(run(), step.expected(True))
    work(lambda: Step(1).plan(w))
    with pytest.raises(PlanError, match="another thread has planned"):
        run()


# --- one prompt over arrays of its own ---


def prompt(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float16) for s in ((6, 4, D), (9, 2, D), (9, 2, D))]


def test_a_prompt_and_decodes_take_two_launches(device: Device, gpu: Any) -> None:
    w = cupyattn.PODWithPagedKVCacheWrapper(device.workspace())
    for seed in range(2):
        d = batches.make([1, 1, 1], [12, 0, 7], 4, seed=seed)
        w.plan(*d.table, 4, 2, D, 4, data_type="float16", window_left=5)
        arrays = [device.put(x) for x in (*prompt(seed), d.q, d.one_tensor())]
        lse = device.put(np.zeros((3, 4), np.float32))
        for turn in range(2):
            out_p, out_d = w.run(*arrays, causal_p=True, lse_d=lse)
            assert out_p.shape == arrays[0].shape
            assert len(gpu.attentions()) == device.stream.launches == 2 * seed + turn + 1
            wanted = d.expected(window_left=5)
            np.testing.assert_array_equal(device.get(out_d), wanted[0].astype(np.float16))
            np.testing.assert_allclose(device.get(lse), wanted[1].astype(np.float32), rtol=1e-6)
    assert not w.is_cuda_graph_enabled
    w.end_forward()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_prompt_on_the_cpu(framework: str) -> None:
    put: Any = np.asarray if framework == "numpy" else pytest.importorskip("torch").from_numpy
    w = cupyattn.PODWithPagedKVCacheWrapper(put(NO_SPACE), "HND")
    for seed in range(3):
        d = batches.make([1, 1, 1], [12, 0, 7], 4, seed=seed)
        w.plan(*map(put, d.table), 4, 2, D, 4, window_left=5, sm_scale=0.4)
        q, k, v = prompt(seed)
        mask = np.random.default_rng(seed).random((6, 9)) < 0.6
        lse_p, lse_d = (put(np.zeros((n, 4), np.float32)) for n in (6, 3))
        for named, wanted in (
            ({}, {}),
            ({"causal_p": True, "window_left_p": 2}, {"causal": True, "window_left": 2}),
            ({"custom_mask_p": put(mask), "causal_p": True}, {"mask": mask}),
            (
                {"packed_custom_mask_p": put(np.packbits(mask, bitorder="little"))},
                {"mask": mask},
            ),
            (
                {"pos_encoding_mode_p": "ROPE_LLAMA", "rope_theta_p": 500.0},
                {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 500.0},
            ),
        ):
            out_p, out_d = w.run(
                *map(put, (q, k, v, d.q)), put(d.one_tensor("HND")), **named,
                k_scale=0.5, return_lse_p=True, return_lse_d=True, lse_p=lse_p, lse_d=lse_d,
            )  # fmt: skip
            for out, lse, (o, sums) in (
                (out_p, lse_p, reference.attention(q, k, v, **wanted)),
                (out_d, lse_d, d.expected(window_left=5, sm_scale=0.4, scale_k=0.5)),
            ):
                np.testing.assert_array_equal(np.asarray(out), o.astype(np.float16))
                np.testing.assert_allclose(np.asarray(lse), sums.astype(np.float32), rtol=1e-6)
    hnd = [x.swapaxes(0, 1).copy() for x in (k, v)]
    out_p, _ = w.run(*map(put, (q, *hnd, d.q)), put(d.one_tensor("HND")), kv_layout_p="HND")
    wanted = reference.attention(q, k, v)[0].astype(np.float16)
    np.testing.assert_array_equal(np.asarray(out_p), wanted)


def test_bad_runs_of_a_prompt_and_decodes() -> None:
    w = cupyattn.PODWithPagedKVCacheWrapper(NO_SPACE)
    d = batches.make([1, 1], [12, 7])
    arrays = (*prompt(0), d.q, d.one_tensor())
    with pytest.raises(PlanError, match="plan"):
        w.run(*arrays)
    w.begin_forward(*d.table, 4, 2, D, 4, sm_scale=0.5)
    assert len(w.workspace_size(*d.table, 4, 2, D, 4)) == 2
    w.run(*arrays, sm_scale_d=0.5, causal_d=True)
    for named, error in (
        ({"sm_scale_d": 0.25}, PlanError),
        ({"window_left_d": 3}, PlanError),
        ({"pos_encoding_mode_d": "ALIBI"}, PlanError),
        ({"custom_mask_d": np.ones((2, 12), bool)}, UnsupportedError),
        ({"causal_p": 3}, ArgumentError),
        ({"kv_layout_p": "DNH"}, ArgumentError),
    ):
        with pytest.raises(error, match=next(iter(named)).removesuffix("_p")):
            w.run(*arrays, **named)

"""Seeded random calls of the shared-prefix functions, and what they must answer."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import batches, compare, lowprec, poison
from .batch_cases import pick
from .gpu_calls import download, upload

NUM_CASES = 240
_TYPES = (("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"))


@dataclass(frozen=True)
class Case:
    """`function` is decode, prefill or padded; padded requests have equally many keys."""

    seed: int
    function: str
    dtype: str
    kv_dtype: str
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    shared_len: int
    page_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    kv_layout: str
    causal: bool
    sm_scale: float | None
    is_pair: bool
    ids_on_device: bool
    knows_page_size: bool
    window_left: int = -1

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 94))
    function = ("decode", "prefill", "padded")[seed % 3]
    dtype, kv_dtype = pick(rng, _TYPES)
    count = pick(rng, (0, 1, 2, 5, 12))
    rows = rng.choice((0, 1, 3, 17, 40), count) if function == "prefill" else np.ones(count, int)
    keys = rng.choice((0, 1, 16, 33, 100, 260), count)
    if function == "padded":
        keys = np.full(count, pick(rng, (0, 1, 33, 200)))
    return Case(
        seed,
        function,
        dtype,
        kv_dtype,
        qo_len=tuple(rows.tolist()),
        kv_len=tuple(keys.tolist()),
        shared_len=pick(rng, (0, 1, 64, 300, 1000)),
        page_size=pick(rng, (1, 3, 16)),
        num_kv_heads=pick(rng, (1, 2)),
        group=pick(rng, (1, 4, 5)),
        head_dim=pick(rng, (64, 128)),
        kv_layout=pick(rng, ("NHD", "HND")),
        causal=function == "prefill" and bool(rng.random() < 0.5),
        sm_scale=pick(rng, (None, None, 0.11)),
        is_pair=bool(rng.random() < 0.5),
        ids_on_device=bool(rng.random() < 0.5),
        knows_page_size=function == "decode" or bool(rng.random() < 0.5),
    )


class Call:
    """A case with its arrays on the device."""

    def __init__(self, case: Case, xp: ModuleType) -> None:
        self.case, self.xp = case, xp
        heads, dims = (case.num_qo_heads, case.num_kv_heads), (case.head_dim,) * 2
        page_size = case.page_size
        if case.function == "padded" and case.kv_len:
            page_size = max(1, case.kv_len[0])
        self.batch = batches.make(
            list(case.qo_len),
            list(case.kv_len),
            page_size,
            seed=case.seed,
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            heads=heads,
            dims=dims,
        )
        rng = np.random.default_rng((case.seed, 95))
        shape = case.shared_len, case.num_kv_heads, case.head_dim
        kind = dtypes.parse(case.kv_dtype).numpy
        values = rng.standard_normal((2, *shape)).astype(np.float32).astype(kind)
        self.shared = values[0], values[1]
        given = [x if case.kv_layout == "NHD" else x.swapaxes(0, 1) for x in self.shared]
        self.owned: list[poison.Poisoned] = []
        self.device_shared = [self._embed(x) for x in given]
        self.q = self._embed(self.batch.q)

    def _embed(self, values: np.ndarray) -> Any:
        self.owned.append(poison.embed(np.ascontiguousarray(values), xp=self.xp))
        return self.owned[-1].array

    def run(self, workspace: Any) -> np.ndarray:
        case = self.case
        if case.function == "padded":
            return self._run_padded()
        name = f"Batch{case.function.title()}WithSharedPrefixPagedKVCacheWrapper"
        wrapper = getattr(cupyattn, name)(workspace, case.kv_layout)
        b = self.batch
        indices = upload(b.indices, self.xp) if case.ids_on_device else b.indices
        sizes = [case.num_qo_heads, case.num_kv_heads, case.head_dim]
        if case.knows_page_size:
            sizes.append(case.page_size)
        options: dict[str, Any] = {"sm_scale": case.sm_scale}
        first = []
        if case.function == "prefill":
            first, options["causal"] = [b.qo_indptr], case.causal
        wrapper.begin_forward(*first, b.indptr, indices, b.last_page_len, *sizes)
        if case.is_pair:
            pages = [batches.as_layout(x, case.kv_layout) for x in b.cache]
            cache: Any = tuple(upload(x, self.xp) for x in pages)
        else:
            cache = upload(b.one_tensor(case.kv_layout), self.xp)
        out = download(wrapper.forward(self.q, *self.device_shared, cache, **options))
        again = download(wrapper.forward(self.q, *self.device_shared, cache, **options))
        compare.assert_bitwise_equal(out, again, case)
        wrapper.end_forward()
        return out

    def _run_padded(self) -> np.ndarray:
        case = self.case
        shape = len(case.kv_len), (case.kv_len or (0,))[0], case.num_kv_heads, case.head_dim
        kind = dtypes.parse(case.kv_dtype).numpy
        own = []
        for i in range(2):
            padded = np.zeros(shape, kind)
            for request, pair in enumerate(self.batch.keys):
                padded[request] = pair[i]
            own.append(self._embed(padded if case.kv_layout == "NHD" else padded.swapaxes(1, 2)))
        return download(
            cupyattn.batch_decode_with_shared_prefix_padded_kv_cache(
                self.q, *self.device_shared, *own, case.kv_layout, sm_scale=case.sm_scale
            )
        )

    def check(self, out: np.ndarray) -> None:
        """States are rounded, merged and rounded again, and so is the model."""
        case, b = self.case, self.batch
        heads, kind = case.num_qo_heads, b.q.dtype
        shape = len(b.q), heads, case.head_dim
        assert out.shape == shape and out.dtype == kind
        found = [[np.zeros(shape), np.full(shape[:2], -np.inf)] for _ in range(2)]
        for request, own in enumerate(b.keys):
            rows = slice(b.qo_indptr[request], b.qo_indptr[request + 1])
            q, common = b.q[rows], {"sm_scale": case.sm_scale}
            for target, attend in (
                (found[0], reference.attention),
                (found[1], _lowprec),
            ):
                states = [
                    attend(q, *self.shared, **common),
                    attend(q, *own, causal=case.causal, **common),
                ]
                (a, s_a), (v, s_v) = states
                answer = reference.merge_state(a, s_a, v, s_v)
                for x, part in zip(target, answer, strict=True):
                    x[rows] = part
        found[1][0] = found[1][0].astype(kind).astype(np.float64)
        compare.assert_close(out, None, *found[0], *found[1], case, p_dtype=kind)
        for placed in self.owned:
            placed.assert_intact(str(case))


def _lowprec(q: np.ndarray, *rest: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    return lowprec.attention(q, *rest, o_dtype=q.dtype, **named)


def run_case(case: Case, xp: ModuleType, workspace: Any) -> None:
    call = Call(case, xp)
    call.check(call.run(workspace))

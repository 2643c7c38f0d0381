"""Runs a random batch through the public API on poisoned arrays and checks the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import compare, item_cases, lowprec, poison, verify_cases
from .batch_cases import Case, Problem, pick
from .gpu_calls import download, raw, upload

# Says whether a kernel has run.
Served = Callable[[], bool]


def offsets(lengths: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def may_be_coarse(problem: Problem, xp: ModuleType, may_be_hoppers: bool | None) -> bool:
    """Whether an answer may err by what prefill_sm90's soft cap does.

    may_be_hoppers: whether that kernel may have run; default: the arrays are a GPU's.
    """
    if may_be_hoppers is None:
        may_be_hoppers = xp is not np
    return may_be_hoppers and problem.has_coarse_cap


class Call:
    """A case with its arrays on the device, and what must stay untouched."""

    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        self.case, self.xp = case, xp
        self.rng = np.random.default_rng((case.seed, 78))
        problem = case.problem
        self.q = self._values(sum(case.qo_len), case.num_qo_heads, problem.dims[0], problem.dtype)
        self.keys = [
            tuple(self._values(n, case.num_kv_heads, d, problem.kv_dtype) for d in problem.dims)
            for n in case.kv_len
        ]
        shapes = list(zip(case.qo_len, case.kv_len, strict=True))
        self.masks = [self._mask(*s) for s in shapes] if problem.is_masked else None
        self.scales = self._scales()
        self.sinks = None
        if case.has_sinks:
            self.sinks = self.rng.normal(0, 2, case.num_qo_heads).astype(np.float32)
        self.owned: dict[str, poison.Poisoned] = {}
        self.qo_indptr = offsets(case.qo_len)
        self.device_q = self._embed("q", self.q)
        self._place_keys()
        rows = (len(self.q), case.num_qo_heads)
        self.out_dtype = dtypes.parse(problem.o_dtype or problem.dtype).numpy
        shape = (*rows, problem.dims[1])
        self.out = poison.blank(shape, self.out_dtype, self._strides(shape), xp=xp)
        self.lse = poison.blank(rows, np.dtype(np.float32), xp=xp)
        self.extras = {
            name: upload(x, xp) if isinstance(x, np.ndarray) else x
            for name, x in self.scales.items()
        }
        if self.sinks is not None:
            self.extras["sinks"] = upload(self.sinks, xp)
        if case.tree:
            self._add_tree()
        self.items: dict[str, Any] = {}
        if case.has_items:
            arguments, self.masks = item_cases.random_items(case)
            self.items = {n: x if n.endswith("_len") else upload(x, xp) for n, x in arguments}
        classes = {
            "decode": cupyattn.BatchDecodeWithPagedKVCacheWrapper,
            "paged": cupyattn.BatchPrefillWithPagedKVCacheWrapper,
            "ragged": cupyattn.BatchPrefillWithRaggedKVCacheWrapper,
        }
        self.wrapper: Any = classes[case.wrapper](workspace, case.kv_layout)

    # --- inputs ---

    def _values(self, *shape_and_dtype: Any) -> np.ndarray:
        *shape, dtype = shape_and_dtype
        values = self.rng.standard_normal(tuple(shape)).astype(np.float32)
        return values.astype(dtypes.parse(dtype).numpy)

    def _mask(self, qo_len: int, kv_len: int) -> np.ndarray:
        density = pick(self.rng, (0.02, 0.3, 0.7))
        return self.rng.random((qo_len, kv_len)) < density

    def _add_tree(self) -> None:
        """A mask that the run brings, of each request's last keys."""
        q_len, rng = self.case.qo_len[0], np.random.default_rng((self.case.seed, 81))
        rows = verify_cases.random_tree(rng, len(self.case.qo_len), q_len)
        self.extras["mask"] = upload(verify_cases.in_form(rows, self.case.tree, rng), self.xp)
        self.masks = []
        for index, kv_len in enumerate(self.case.kv_len):
            mask = np.ones((q_len, max(q_len, kv_len)), bool)
            mask[:, mask.shape[1] - q_len :] = rows[index * q_len : (index + 1) * q_len]
            self.masks.append(mask[:, mask.shape[1] - kv_len :])

    def _scales(self) -> dict[str, Any]:
        case, rng = self.case, self.rng
        scales: dict[str, Any] = {}
        if case.problem.prescale_logits:
            scales["k_scale"] = rng.uniform(0.3, 1.5, case.num_kv_heads).astype(np.float32)
            scales["q_scale"] = float(rng.uniform(0.3, 1.5))
        elif rng.random() < 0.3:
            scales["k_scale"] = float(rng.uniform(0.3, 1.5))
        if case.scale_v == "float":
            scales["v_scale"] = float(rng.uniform(-2, 2))
        elif case.scale_v == "per_head":
            scales["v_scale"] = rng.uniform(-2, 2, case.num_kv_heads).astype(np.float32)
        if case.num_kv_heads == 1:  # one number in an array is a number
            scales = {n: x for n, x in scales.items() if not isinstance(x, np.ndarray)}
            if case.problem.prescale_logits:
                scales["q_scale"] = -0.7
        return scales

    def _strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Rows on 16-byte boundaries, or off them, with gaps or without."""
        pitch = shape[-1]
        if not self.case.problem.is_aligned:
            pitch += 3
        elif self.case.is_padded:
            pitch = (pitch + 31) // 16 * 16
        gap = 48 if self.case.is_padded else 0
        strides = [1, pitch]
        for extent in shape[-2:0:-1]:
            strides.append(strides[-1] * max(extent, 1) + gap)
        return tuple(reversed(strides[: len(shape)]))

    def _embed(self, name: str, values: np.ndarray) -> Any:
        placed = poison.embed(values, self._strides(values.shape), xp=self.xp)
        self.owned[name] = placed
        return placed.array

    def _place_keys(self) -> None:
        case = self.case
        if not case.page_size:
            self.kv_indptr = offsets(case.kv_len)
            whole = [
                np.concatenate([pair[i] for pair in self.keys] or [self._empty(i)]) for i in (0, 1)
            ]
            if case.kv_layout == "HND":
                whole = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in whole]
            self.cache: Any = tuple(self._embed(n, x) for n, x in zip("kv", whole, strict=True))
            return
        size = case.page_size
        pages = [-(-n // size) for n in case.kv_len]
        self.kv_indptr = offsets(pages)
        total = sum(pages) + 3
        order = self.rng.permutation(total)[: sum(pages)]
        pools = []
        for i in (0, 1):
            # Whatever no request owns is NaN: slots behind a request's last token, spare pages.
            kind = self._empty(i).dtype
            pool = np.full((total, size, *self._empty(i).shape[1:]), np.nan, np.float32)
            pool = pool.astype(kind)
            for request, pair in enumerate(self.keys):
                own = order[self.kv_indptr[request] : self.kv_indptr[request + 1]]
                tokens = np.arange(case.kv_len[request])
                pool[own[tokens // size], tokens % size] = pair[i]
            pools.append(pool if case.kv_layout == "NHD" else pool.swapaxes(1, 2).copy())
        self.last_page_len = np.array([(n - 1) % size + 1 if n else -9 for n in case.kv_len])
        self.table = np.concatenate([order, [2**31 - 1, -(2**31), 123456789]])
        if case.is_pair:
            self.cache = tuple(self._embed(n, x) for n, x in zip("kv", pools, strict=True))
        else:
            self.cache = self._embed("cache", np.stack(pools, axis=1))

    def _empty(self, index: int) -> np.ndarray:
        problem = self.case.problem
        kind = dtypes.parse(problem.kv_dtype).numpy
        return np.zeros((0, self.case.num_kv_heads, problem.dims[index]), kind)

    # --- the call ---

    def plan(self, **changes: Any) -> None:
        case = self.case
        problem = case.problem
        kind = np.dtype(case.table_dtype)
        on_host = [self.kv_indptr.astype(kind)]
        if case.page_size:
            ids = self.table.astype(kind)
            on_host += [
                upload(ids, self.xp) if case.ids_on_device else ids,
                self.last_page_len.astype(kind),
            ]
        options: dict[str, Any] = {
            "q_data_type": problem.dtype,
            "kv_data_type": problem.kv_dtype,
            "o_data_type": problem.o_dtype,
            "pos_encoding_mode": problem.pos_encoding_mode,
            "logits_soft_cap": 20.0 if problem.is_capped else None,
            "window_left": case.window_left,
            "sm_scale": case.sm_scale,
            "fixed_split_size": case.split[0],
            "disable_split_kv": case.split[1],
        }
        sizes: list[int] = [case.num_qo_heads, case.num_kv_heads, problem.dims[0]]
        if case.page_size:
            sizes.append(case.page_size)
        if case.wrapper == "decode":
            options["q_len_per_req"] = case.qo_len[0] if case.qo_len else 1
        else:
            on_host.insert(0, self.qo_indptr.astype(kind))
            options |= {"causal": case.causal, "head_dim_vo": problem.dims[1]}
            if self.items:
                options |= self.items
            elif self.masks is not None:
                options |= self._mask_arguments()
        self.wrapper.plan(*on_host, *sizes, **options | changes)

    def _mask_arguments(self) -> dict[str, Any]:
        assert self.masks is not None
        flat = np.concatenate([m.ravel() for m in self.masks] or [np.zeros(0, bool)])
        if not self.case.is_packed:
            return {"custom_mask": upload(flat, self.xp)}
        bits = offsets([m.size for m in self.masks])
        packed, _ = reference.segment_packbits(flat, bits, "little")
        return {"packed_custom_mask": upload(np.append(packed, np.uint8(255)), self.xp)}

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of (out, lse)."""
        case = self.case
        given = self.cache if not case.page_size else (self.cache,)
        outputs = {"out": self.out.array, "lse": self.lse.array} if case.with_out else {}
        got = self.wrapper.run(self.device_q, *given, return_lse=True, **self.extras, **outputs)
        if case.with_out:
            assert got[0] is self.out.array and got[1] is self.lse.array
            return self.out.values(), self.lse.values()
        return download(got[0]), download(got[1])

    def check(
        self, out: np.ndarray, lse: np.ndarray, *, may_be_hoppers: bool | None = None
    ) -> None:
        """may_be_hoppers: as may_be_coarse's."""
        ref, low = self.expected()
        case = self.case
        magnitude = 20.0 * math.log2(math.e) if case.problem.is_capped else 0.0
        if case.problem.pos_encoding_mode == "ALIBI":
            slope = float(lowprec.alibi_slopes(case.num_qo_heads).max())
            longest = max((*case.qo_len, *case.kv_len, 0))
            magnitude = max(magnitude, slope * longest * math.log2(math.e))
        compare.assert_close(
            out,
            lse,
            *ref,
            *low,
            case,
            p_dtype=self.q.dtype,
            logit_magnitude=magnitude,
            has_coarse_cap=may_be_coarse(case.problem, self.xp, may_be_hoppers),
        )
        for name, placed in {**self.owned, "out": self.out, "lse": self.lse}.items():
            placed.assert_intact(f"{case}: {name}")

    def expected(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(o, lse) of the whole batch in float64, and in the kernels' precision."""
        case, problem = self.case, self.case.problem
        found: list[list[list[np.ndarray]]] = [[[], []], [[], []]]
        for index, (k, v) in enumerate(self.keys):
            rows = slice(self.qo_indptr[index], self.qo_indptr[index + 1])
            arguments: dict[str, Any] = {
                "q": self.q[rows],
                "k": k,
                "v": v,
                "causal": case.causal,
                "window_left": case.window_left,
                "mask": None if self.masks is None else self.masks[index],
                "logits_soft_cap": 20.0 if problem.is_capped else 0.0,
                "sm_scale": case.sm_scale,
                "pos_encoding_mode": problem.pos_encoding_mode,
                "sinks": self.sinks,
                **{f"scale_{n}": self.scales.get(f"{n}_scale") for n in "qkv"},
            }
            answers = (
                reference.attention(**arguments),
                lowprec.attention(**arguments, o_dtype=self.out_dtype),
            )
            for lists, answer in zip(found, answers, strict=True):
                for values, x in zip(lists, answer, strict=True):
                    values.append(x)
        shapes = (0, case.num_qo_heads, problem.dims[1]), (0, case.num_qo_heads)
        ref, low = (
            [np.concatenate([np.zeros(s), *x]) for s, x in zip(shapes, lists, strict=True)]
            for lists in found
        )
        return ref, low


def run_case(case: Case, xp: ModuleType, workspace: Any) -> None:
    """Plan, run, check against float64, and run again for the same bits."""
    call = Call(case, xp, workspace)
    call.plan()
    first = call.run()
    call.check(*first)
    if case.with_out:
        raw(call.out.array)[...] = 0
    for a, b in zip(first, call.run(), strict=True):
        compare.assert_bitwise_equal(a, b, case)

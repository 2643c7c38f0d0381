"""Batches through the wrappers, on poisoned arrays."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import batches, calls, item_cases, verify_cases
from .batch_cases import Case
from .batches import offsets
from .cases import pick
from .poison import upload

# A value to set before keys are placed: (request, "k" or "v", index, value).
Spoilt = tuple[int, str, Any, float]


class Call(calls.Call):
    def __init__(
        self, case: Case, xp: ModuleType, workspace: Any, spoil: Sequence[Spoilt] = ()
    ) -> None:
        super().__init__(case, xp, case.seed, 78)
        problem, heads = case.problem, case.num_kv_heads
        rows = (sum(case.qo_len), case.num_qo_heads)
        self.q = self.values(*rows, problem.dims[0], dtype=problem.dtype)
        self.kv_dtypes = batches.dtype_of_keys(problem.dtype, problem.kv_dtype), problem.kv_dtype
        kinds = list(zip(problem.dims, self.kv_dtypes, strict=True))
        self.keys = [
            [self.values(n, heads, dim, dtype=kind) for dim, kind in kinds] for n in case.kv_len
        ]
        for request, name, index, value in spoil:
            self.keys[request]["kv".index(name)][index] = value
        shapes = list(zip(case.qo_len, case.kv_len, strict=True))
        self.masks = [self._mask(*s) for s in shapes] if problem.is_masked else None
        self.scales = self._scales()
        self.sinks = None
        if case.has_sinks:
            self.sinks = calls.drawn_sinks(self.rng, case.num_qo_heads)
        self.qo_indptr = offsets(case.qo_len)
        self.device_q = self.embed_rows("q", self.q)
        self._place_keys()
        of_output = dtypes.parse(problem.dtype).of_output
        out_dtype = dtypes.parse(problem.o_dtype or of_output.name).numpy
        self.answer_shape = case.num_qo_heads, problem.dims[1], out_dtype
        shape = (*rows, problem.dims[1])
        self.out = self.blank("out", shape, out_dtype, self.strides(shape))
        self.lse = self.blank("lse", rows, np.float32)
        self.has_coarse_cap, self.head_dim_qk = problem.has_coarse_cap, problem.dims[0]
        self.logit_magnitude = calls.logit_magnitude(
            20.0 * problem.is_capped,
            case.num_qo_heads * (problem.pos_encoding_mode == "ALIBI"),
            max((*case.qo_len, *case.kv_len, 0)),
        )
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

    def _mask(self, qo_len: int, kv_len: int) -> np.ndarray:
        density = pick(self.rng, (0.02, 0.3, 0.7))
        return self.rng.random((qo_len, kv_len)) < density

    def _add_tree(self) -> None:
        """A mask that the run brings, of each request's last keys."""
        q_len, rng = self.case.qo_len[0], np.random.default_rng((self.case.seed, 81))
        rows = verify_cases.random_tree(rng, len(self.case.qo_len), q_len)
        self.extras["mask"] = upload(verify_cases.in_form(rows, self.case.tree, rng), self.xp)
        self.masks = verify_cases.whole_masks(rows, self.case.kv_len)

    def _scales(self) -> dict[str, Any]:
        case, rng = self.case, self.rng
        scales: dict[str, Any] = {}
        if case.problem.dtype in ("float8_e4m3fn", "int8"):
            scales |= self._scales_of_8_bits()
        elif case.problem.prescale_logits:
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

    def _scales_of_8_bits(self) -> dict[str, Any]:
        """Of queries and keys, each a number or one for each head; int8 has units."""
        case, rng = self.case, self.rng
        scales: dict[str, Any] = {}
        unit = batches.INT8_UNIT if case.problem.dtype == "int8" else 1.0
        for name, heads in (("q_scale", case.num_qo_heads), ("k_scale", case.num_kv_heads)):
            values = (unit * rng.uniform(0.3, 1.5, heads)).astype(np.float32)
            form = pick(rng, ("number", "heads") if unit != 1.0 else ("none", "number", "heads"))
            if form != "none":
                scales[name] = values if form == "heads" and heads > 1 else float(values[0])
        return scales

    def _place_keys(self) -> None:
        case = self.case
        kinds = [dtypes.parse(x).numpy for x in self.kv_dtypes]
        inner = [(case.num_kv_heads, dim) for dim in case.problem.dims]
        if not case.page_size:
            self.kv_indptr = offsets(case.kv_len)
            whole = [
                np.concatenate([np.zeros((0, *shape), kinds[i]), *(pair[i] for pair in self.keys)])
                for i, shape in enumerate(inner)
            ]
            if case.kv_layout == "HND":
                whole = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in whole]
            self.cache: Any = tuple(self.embed_rows(n, x) for n, x in zip("kv", whole, strict=True))
            return
        size = case.page_size
        pages = [-(-n // size) for n in case.kv_len]
        self.kv_indptr = offsets(pages)
        order, dims = self.rng.permutation(sum(pages) + 3), case.problem.dims
        pools = batches.make_pools(
            self.keys,
            (order, order),
            size,
            case.num_kv_heads,
            dims,
            kinds[1],
            case.kv_layout,
            kinds[0],
        )
        self.last_page_len = batches.last_page_len(case.kv_len, size, of_none=-9)
        self.table = np.concatenate([order[: sum(pages)], [2**31 - 1, -(2**31), 123456789]])
        if case.is_pair:
            self.cache = tuple(self.embed_rows(n, x) for n, x in zip("kv", pools, strict=True))
        else:
            self.cache = self.embed_rows("cache", np.stack(pools, axis=1))

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
            options["window_right"] = 0 if case.causal else case.window_right
        else:
            on_host.insert(0, self.qo_indptr.astype(kind))
            options |= {"causal": case.causal, "head_dim_vo": problem.dims[1]}
            options["window_right"] = case.window_right
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

    def start(self) -> None:
        keys = self.cache if not self.case.page_size else (self.cache,)
        self.run_wrapper(self.wrapper, self.device_q, *keys, return_lse=True, **self.extras)

    # --- the answer ---

    def options(self) -> dict[str, Any]:
        case, problem = self.case, self.case.problem
        return {
            "causal": case.causal,
            "window_left": case.window_left,
            "window_right": case.window_right,
            "logits_soft_cap": 20.0 if problem.is_capped else 0.0,
            "sm_scale": case.sm_scale,
            "pos_encoding_mode": problem.pos_encoding_mode,
            "sinks": self.sinks,
            **{f"scale_{n}": self.scales.get(f"{n}_scale") for n in "qkv"},
        }


def planned(case: Case, xp: ModuleType, workspace: Any) -> Call:
    """A call whose wrapper has its plan."""
    call = Call(case, xp, workspace)
    call.plan()
    return call

"""Runs a random call of an entry point on poisoned arrays and checks the answer."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import compare, lowprec, poison, verify_cases
from .batch_calls import offsets
from .gpu_calls import download, raw
from .planless_cases import Case

ABSURD = 2**31 - 1


class Call:
    """A case with its arrays on the device, and what must stay untouched."""

    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        self.case, self.xp, self.workspace = case, xp, workspace
        self.rng = rng = np.random.default_rng((case.seed, 92))
        problem, count = case.problem, len(case.qo_len)
        self.owned: dict[str, poison.Poisoned] = {}
        rows = sum(case.qo_len) + case.spare_rows
        self.qo_indptr = offsets(case.qo_len)
        self.q = self._values(rows, case.num_qo_heads, problem.dims[0], problem.dtype)
        dims = problem.dims if case.cache != "same" else (problem.dims[0],) * 2
        self.keys = [
            [self._values(n, case.num_kv_heads, dim, problem.kv_dtype) for dim in dims]
            for n in case.kv_len
        ]
        if case.cache == "same":
            self.keys = [[k, k] for k, _ in self.keys]
        self.rows_seen = self._add_tree() if case.tree and rows else None
        self.device_q = self._embed("q", self.q)
        self.kv_lens = self._index("kv_lens", case.kv_len)
        self.table = self._place_keys() if case.page_size else self._place_rows()
        self.sm_scale = float(rng.uniform(0.05, 0.2))
        self.factor = float(rng.uniform(0.5, 1.5)) if problem.has_array_scales else 1.0
        self.output_scale = 1.0 if case.v_scale == "none" else float(rng.uniform(-2, 2))
        self.sinks = None
        if case.has_sinks:
            self.sinks = rng.normal(0, 2, case.num_qo_heads).astype(np.float32)
        self.out_dtype = dtypes.parse(problem.dtype).numpy
        self.lead = self._lead(rows, count)
        shape = (rows, case.num_qo_heads, problem.dims[1])
        self.out = poison.blank(shape, self.out_dtype, self._strides(shape), xp=xp)
        self.most = max((1, *case.qo_len))
        self.pads = case.entry == "cudnn_batch_prefill_with_kv_cache"
        lse_shape = (count, self.most, shape[1]) if self.pads else shape[:2]
        self.lse = poison.blank(lse_shape, np.dtype(np.float32), xp=xp)

    # --- inputs ---

    def _values(self, *shape_and_dtype: Any) -> np.ndarray:
        *shape, dtype = shape_and_dtype
        values = self.rng.standard_normal(tuple(shape)).astype(np.float32)
        return values.astype(dtypes.parse(dtype).numpy)

    def _strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Rows on 16-byte boundaries, or off them, with gaps or without."""
        pitch = shape[-1] + (0 if self.case.problem.is_aligned else 3)
        gap = 0
        if self.case.is_padded and self.case.problem.is_aligned:
            pitch, gap = (pitch + 31) // 16 * 16, 48
        strides = [1, pitch]
        for extent in shape[-2:0:-1]:
            strides.append(strides[-1] * max(extent, 1) + gap)
        return tuple(reversed(strides[: len(shape)]))

    def _add_tree(self) -> np.ndarray:
        case, rng = self.case, np.random.default_rng((self.case.seed, 95))
        rows = verify_cases.random_tree(rng, len(case.qo_len), case.qo_len[0])
        held = verify_cases.in_form(rows, case.tree, rng)
        placed = poison.embed(held, xp=self.xp)
        self.mask = self.owned["mask"] = placed
        return rows

    def _embed(self, name: str, values: np.ndarray, strides: Any = None) -> Any:
        placed = poison.embed(values, strides or self._strides(values.shape), xp=self.xp)
        self.owned[name] = placed
        return placed.array

    def _index(self, name: str, values: Any, axes: bool = True) -> Any:
        kind = np.dtype(self.case.index_dtype)
        shape = (-1, *(1,) * (self.case.index_axes if axes else 0))
        held = np.array(values, np.int64).astype(kind).reshape(shape)
        steps = [1] * held.ndim
        steps[0] = 1 + self.case.is_padded  # every other word is poison
        return self._embed(name, held, tuple(steps))

    def _place_rows(self) -> None:
        case = self.case
        dims = case.problem.dims
        parts = [
            np.concatenate(
                [pair[i] for pair in self.keys]
                or [self._values(0, case.num_kv_heads, dims[i], case.problem.kv_dtype)]
            )
            for i in (0, 1)
        ]
        self.cache = [self._embed(n, x) for n, x in zip("kv", parts, strict=True)]
        self.kv_indptr = offsets(case.kv_len)

    def _place_keys(self) -> Any:
        """Pages in random order; what nobody owns is NaN, unused entries of the table absurd."""
        case, size = self.case, self.case.page_size
        pages = [-(-n // size) for n in case.kv_len]
        total = sum(pages) + 3
        order = self.rng.permutation(total)
        width = max((1, *pages)) + int(self.rng.integers(0, 3))
        table = np.full((len(pages), width), ABSURD, np.int32)
        kind = dtypes.parse(case.problem.kv_dtype).numpy
        dims = [case.problem.dims[0], case.problem.dims[1]]
        pools = [
            np.full((total, size, case.num_kv_heads, dim), np.nan, np.float32).astype(kind)
            for dim in dims
        ]
        used = 0
        for b, (n, count) in enumerate(zip(case.kv_len, pages, strict=True)):
            own = order[used : used + count]
            used += count
            table[b, :count] = own
            for place, page in enumerate(own):
                for pool, values in zip(pools, self.keys[b], strict=True):
                    part = values[place * size : min(n, (place + 1) * size)]
                    pool[page, : len(part)] = part
        if case.kv_layout == "HND":
            pools = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in pools]
        if case.cache == "pair":
            self.cache = [self._embed(n, x) for n, x in zip("kv", pools, strict=True)]
        else:
            both = pools[:1] if case.cache == "same" else pools
            self.cache = [self._embed("cache", np.stack(both, axis=1))]
        return self._embed("table", table, (width + 7 * case.is_padded, 1))

    def _lead(self, rows: int, count: int) -> tuple[int, ...]:
        """The leading axes of xqa's q."""
        if self.case.entry != "xqa" or self.case.form != "uniform":
            return (rows,)
        q_len = rows // count if count else 1
        return (count, 1) if q_len == 1 and self.case.seed % 2 else (count, 1, q_len)

    # --- the call ---

    def _scale(self, number: float) -> Any:
        """One number in memory."""
        return poison.embed(np.array([number], np.float32), xp=self.xp).array

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        case = self.case
        logits: Any = self.sm_scale
        if case.problem.has_array_scales:
            logits = self._scale(self.sm_scale * self.factor)
        output: Any = self.output_scale
        if case.v_scale == "array":
            output = self._scale(self.output_scale)
        named: dict[str, Any] = {"return_lse": case.with_lse}
        if case.with_out:
            named |= {"out": self.out.array}
            if case.with_lse:
                named["lse"] = self.lse.array
        if case.has_sinks:
            named["sinks"] = poison.embed(self.sinks, xp=self.xp).array
        if self.rows_seen is not None:
            named["mask"] = self.mask.array
        longest = max((1, *case.kv_len))
        cache = self.cache[0] if len(self.cache) == 1 else tuple(self.cache)
        space = self.workspace if case.has_workspace else None
        steps = self._index("qo_indptr", self.qo_indptr, axes=False)
        if case.entry.startswith("cudnn"):
            return self._cudnn(logits, output, named, space, longest)
        if case.entry == "xqa":
            return self._xqa(logits, output, named, space, steps)
        named |= {"kv_layout": case.kv_layout, "window_left": case.window_left}
        head = (self.device_q, cache, space, self.table, self.kv_lens)
        if case.entry == "trtllm_batch_context_with_kv_cache":
            count = len(case.qo_len)
            rest = (self.most, longest, logits, output, count, steps, None)
            return (*head, *rest), {**named, "causal": case.causal}
        name = "cum_seq_lens_q" if case.entry.startswith("trtllm") else "q_cu_seq_lens"
        if case.form == "steps":
            named[name] = steps
        else:
            named["q_len_per_req"] = case.qo_len[0] if case.qo_len else 1
        return (*head, longest, logits, output), named

    def _cudnn(
        self, logits: Any, output: Any, named: dict[str, Any], space: Any, longest: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        case, dims = self.case, self.case.problem.dims
        named |= {"max_sequence_kv": longest, "actual_seq_lens_kv": self.kv_lens}
        if case.page_size:
            named["block_tables"] = self.table
        head = (self.device_q, *self.cache, logits, space)
        if case.entry == "cudnn_batch_decode_with_kv_cache":
            return head, named
        unit = case.num_qo_heads if case.units == "elements" else 0
        named |= {
            "max_token_per_sequence": self.most,
            "actual_seq_lens_q": self._index("qo_lens", case.qo_len),
            "causal": case.causal,
            "batch_offsets_units": case.units,
            "batch_offsets_q": self._index("q_at", self.qo_indptr * (unit * dims[0] or 1)),
            "batch_offsets_o": self._index("o_at", self.qo_indptr * (unit * dims[1] or 1)),
        }
        if not case.page_size:
            unit = case.num_kv_heads if case.units == "elements" else 0
            named |= {
                f"batch_offsets_{name}": self._index(
                    f"{name}_at", self.kv_indptr * (unit * dim or 1)
                )
                for name, dim in zip("kv", dims, strict=True)
            }
        if case.v_scale != "none":
            named["v_scale"] = output
        return head, named

    def _xqa(
        self, logits: Any, output: Any, named: dict[str, Any], space: Any, steps: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """kv_scale is both a scale of the logits and one of the output, where keys are fp8."""
        case = self.case
        root = math.sqrt(case.problem.dims[0])
        is_fp8 = "float8" in case.problem.kv_dtype
        number = self.sm_scale * self.factor * root / (self.output_scale if is_fp8 else 1.0)
        q_scale = self._scale(number) if case.problem.has_array_scales else number
        named["q_scale"] = q_scale
        named["kv_scale" if is_fp8 else "rcp_out_scale"] = output if is_fp8 else self.output_scale
        named |= {"kv_layout": case.kv_layout, "sliding_win_size": case.window_left + 1}
        if "out" in named:
            named["output"] = self._shaped(named.pop("out"))
        if "lse" in named:
            named["lse"] = self._shaped(named["lse"])
        if case.form == "steps":
            named |= {"q_cu_seq_lens": steps, "q_seq_len": self.most}
        else:
            named["q_seq_len"] = case.qo_len[0] if case.qo_len else 1
        if case.has_sinks:
            named["sinks"] = named["sinks"].reshape(case.num_kv_heads, case.group)
        head = (self._shaped(self.device_q), *self.cache, self.table, self.kv_lens)
        return head, {**named, "workspace_buffer": space}

    def _shaped(self, x: Any) -> Any:
        """Rows with xqa's leading axes, without a copy."""
        if self.lead == (x.shape[0],):
            return x
        q_len = self.lead[2] if len(self.lead) == 3 else 1
        is_torch = self.xp.__name__ == "torch"
        row, *inner = x.stride() if is_torch else x.strides
        steps = ([row * q_len, row * q_len, row][: len(self.lead)]) + inner
        shape = (*self.lead, *x.shape[1:])
        if is_torch:
            return x.as_strided(shape, steps, x.storage_offset())
        return self.xp.lib.stride_tricks.as_strided(x, shape, steps)

    def run(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Copies of (out, lse), rows one after another."""
        case = self.case
        args, named = self.arguments()
        function: Any = getattr(cupyattn, case.entry)
        got = function(*args, **named)
        if case.entry == "xqa" and case.with_out and not case.with_lse:
            assert got is None
        if case.with_out:
            return self.out.values(), self.lse.values() if case.with_lse else None
        pair = got if case.with_lse or self.pads else (got, None)
        assert self.pads or case.with_lse or not isinstance(got, tuple)
        out = download(pair[0]).reshape(self.out.array.shape)
        if pair[1] is None:
            assert not case.with_lse
            return out, None
        return out, download(pair[1]).reshape(self.lse.array.shape)

    # --- the answer ---

    def check(self, out: np.ndarray, lse: np.ndarray | None) -> None:
        case = self.case
        rows = int(self.qo_indptr[-1])
        ref, low = self.expected()
        if lse is not None and self.pads:
            lse = self._rows_of(lse)
        own_lse = None if lse is None else lse[:rows]
        compare.assert_close(out[:rows], own_lse, *ref, *low, case, p_dtype=self.q.dtype)
        if case.with_out:
            # Rows of nobody are poison still.
            blank = poison.blank((1,), self.out_dtype).values().view(f"u{self.out_dtype.itemsize}")
            spare = out[rows:].view(blank.dtype)
            assert (spare == blank).all(), f"{case}: rows of no request were written"
        for name, placed in {**self.owned, "out": self.out, "lse": self.lse}.items():
            placed.assert_intact(f"{case}: {name}")

    def _rows_of(self, padded: np.ndarray) -> np.ndarray:
        """Rows one after another in base 2, of a padded LSE in natural log."""
        found = [np.zeros((0, padded.shape[2]), np.float32)]
        for index, count in enumerate(self.case.qo_len):
            assert np.isneginf(padded[index, count:]).all(), f"{self.case}: LSE of no row"
            found.append(padded[index, :count] * np.float32(math.log2(math.e)))
        return np.concatenate(found)

    def expected(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(o, lse) of all requests in float64, and in the kernels' precision."""
        case = self.case
        shape = (0, case.num_qo_heads, case.problem.dims[1])
        answers = [[[np.zeros(shape)], [np.zeros(shape[:2])]] for _ in range(2)]
        for index, (k, v) in enumerate(self.keys):
            rows = slice(self.qo_indptr[index], self.qo_indptr[index + 1])
            arguments: dict[str, Any] = {
                "q": self.q[rows],
                "k": k,
                "v": v,
                "causal": case.causal and self.rows_seen is None,
                "mask": self._mask_of(rows, len(k)),
                "window_left": case.window_left,
                "sm_scale": self.sm_scale * self.factor,
                "sinks": self.sinks,
                "scale_v": self.output_scale,
            }
            both = (
                reference.attention(**arguments),
                lowprec.attention(**arguments, o_dtype=self.out_dtype),
            )
            for lists, pair in zip(answers, both, strict=True):
                for values, x in zip(lists, pair, strict=True):
                    values.append(x)
        ref, low = ([np.concatenate(x) for x in lists] for lists in answers)
        return ref, low

    def _mask_of(self, rows: slice, kv_len: int) -> np.ndarray | None:
        """Whether the rows of a request see its keys."""
        if self.rows_seen is None:
            return None
        own = self.rows_seen[rows]
        mask = np.ones((len(own), kv_len), bool)
        count = min(len(own), kv_len)
        mask[:, kv_len - count :] = own[:, len(own) - count :]
        return mask


def run_case(case: Case, xp: ModuleType, workspace: Any) -> None:
    """Run, check against float64, and run again for the same bits."""
    call = Call(case, xp, workspace)
    first = call.run()
    call.check(*first)
    if case.with_out:
        raw(call.out.array)[...] = 0
        raw(call.lse.array)[...] = 0
    rows = int(call.qo_indptr[-1])
    for i, (a, b) in enumerate(zip(first, call.run(), strict=True)):
        if a is not None and b is not None:
            owned = slice(None) if i == 1 and call.pads else slice(rows)
            compare.assert_bitwise_equal(a[owned], b[owned], case)

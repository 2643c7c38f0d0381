"""Seeded random calls of the entry points without a plan, on poisoned arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn.core import dtypes

from . import batches, calls, poison, verify_cases
from .batch_cases import Problem
from .batches import offsets
from .cases import pick
from .verify_cases import FORMS

NUM_CASES = 1600
ENTRIES = (
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
    "xqa",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
)
_BF16, _HALF, _E4M3, _E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
_KV_LENS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 300, 513)
_QO_LENS = (0, 1, 1, 2, 3, 8, 17, 40, 70)
_MAX_MULTIPLIES = 6_000_000


# prescale_logits: scales of the logits are in memory.
PROBLEMS = (
    Problem(_BF16, _BF16, (128, 128)),
    Problem(_HALF, _HALF, (64, 64)),
    Problem(_BF16, _E4M3, (128, 128)),
    Problem(_HALF, _E5M2, (64, 64)),
    Problem(_HALF, _HALF, (64, 64), prescale_logits=True),
    Problem(_BF16, _E4M3, (128, 128), prescale_logits=True),
    Problem(_BF16, _BF16, (64, 64), is_aligned=False),
    Problem(_HALF, _HALF, (192, 128)),
)


@dataclass(frozen=True)
class Case:
    """One call. page_size is 0 for ragged keys, which only cuDNN's prefill takes.

    form        how rows of q are said: "uniform", "steps" (cumulative), "lens" (and offsets)
    units       of offsets: "elements" or "tokens"
    index_axes  axes of an extent of 1 behind the lengths
    spare_rows  rows of q that no request has, behind the others (with offsets)
    v_scale     "number", "array" or "none"
    cache       "one" tensor of both, a "pair", or "same" for keys that are values too
    has_value_pages  values are in other pages of the pool than their keys
    tree        the form of a mask over the rows of each request (verify_cases.py); "": none
    """

    seed: int
    entry: str
    problem: Problem
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int
    num_kv_heads: int
    group: int
    form: str
    kv_layout: str = "NHD"
    causal: bool = True
    window_left: int = -1
    has_sinks: bool = False
    v_scale: str = "none"
    cache: str = "pair"
    units: str = "elements"
    index_dtype: str = "int32"
    index_axes: int = 0
    spare_rows: int = 0
    is_padded: bool = False
    with_out: bool = True
    with_lse: bool = True
    has_workspace: bool = True
    tree: str = ""
    has_value_pages: bool = False

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 91))
    problem = PROBLEMS[seed % len(PROBLEMS)]
    entry = ENTRIES[int(rng.integers(len(ENTRIES)))]
    is_decode = "decode" in entry or entry == "xqa"
    if problem.dims[0] != problem.dims[1]:
        entry, is_decode = ENTRIES[5], False
    is_cudnn = entry.startswith("cudnn")
    count = pick(rng, (1, 1, 2, 3, 4, 5, 7, 12, 20)) if seed % 50 else 0
    form = "lens" if entry == ENTRIES[5] else "uniform"
    if entry == ENTRIES[1] or (is_decode and not is_cudnn and rng.random() < 0.3):
        form = "steps"
    if form == "uniform":
        q_len = 1 if is_cudnn else pick(rng, (1, 1, 1, 2, 4, 7))
        qo_len = [q_len] * count
    else:
        qo_len = [pick(rng, _QO_LENS) for _ in range(count)]
    kv_len = [pick(rng, _KV_LENS) for _ in range(count)]
    if count and rng.random() < 0.25:
        kv_len[int(rng.integers(count))] = int(rng.integers(1000, 4000))  # one long among short
    group, num_kv_heads = pick(rng, (1, 2, 4, 4, 5, 8, 16)), pick(rng, (1, 1, 2, 3))
    while np.dot(qo_len, kv_len) * num_kv_heads * group * sum(problem.dims) > _MAX_MULTIPLIES:
        if num_kv_heads > 1:
            num_kv_heads -= 1
        elif form == "uniform":
            kv_len[int(np.argmax(kv_len))] //= 2
        else:
            worst = int(np.argmax(np.multiply(qo_len, kv_len)))
            qo_len[worst], kv_len[worst] = max(1, qo_len[worst] // 2), kv_len[worst] * 2 // 3
    is_ragged = entry == ENTRIES[5] and bool(rng.random() < 0.5)
    takes_pair_only = is_cudnn or entry == "xqa"
    return Case(
        seed=seed,
        entry=entry,
        problem=problem,
        qo_len=tuple(qo_len),
        kv_len=tuple(kv_len),
        page_size=0 if is_ragged else pick(rng, (1, 2, 3, 8, 16, 16, 16, 32, 64, 100)),
        num_kv_heads=num_kv_heads,
        group=group,
        form=form,
        kv_layout="HND" if is_cudnn else pick(rng, ("NHD", "HND")),
        causal=is_decode or bool(rng.random() < 0.7),
        window_left=-1 if is_cudnn else pick(rng, (-1, -1, -1, 0, 3, 60, 200)),
        has_sinks=not is_cudnn and bool(rng.random() < 0.25),
        v_scale=pick(rng, ("none", "number", "array")) if entry != ENTRIES[4] else "none",
        cache="pair" if takes_pair_only else pick(rng, ("one", "pair", "pair", "same")),
        units=pick(rng, ("elements", "tokens")),
        index_dtype=pick(rng, ("int32", "int32", "uint32", "int64")),
        index_axes=pick(rng, (0, 1, 3)),
        spare_rows=pick(rng, (0, 0, 5)) if form != "uniform" else 0,
        is_padded=bool(rng.random() < 0.5),
        with_out=bool(rng.random() < 0.7),
        with_lse=bool(rng.random() < 0.6),
        has_workspace=bool(rng.random() < 0.9),
        tree=_tree(seed) if is_decode and not is_cudnn and form != "lens" else "",
        has_value_pages=entry.startswith("trtllm") and _has_value_pages(seed),
    )


def _has_value_pages(seed: int) -> bool:
    """Whether V has pages of its own: in few problems, since each needs another kernel."""
    return seed % len(PROBLEMS) in (0, 2, 5) and seed // len(PROBLEMS) % 2 == 0


def _tree(seed: int) -> str:
    rng = np.random.default_rng((seed, 94))
    return pick(rng, FORMS) if seed % len(PROBLEMS) < 2 and rng.random() < 0.5 else ""


ABSURD = 2**31 - 1


class Call(calls.Call):
    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        super().__init__(case, xp, case.seed, 92)
        self.workspace, rng = workspace, self.rng
        problem, count = case.problem, len(case.qo_len)
        rows = sum(case.qo_len) + case.spare_rows
        self.qo_indptr = offsets(case.qo_len)
        self.q = self.values(rows, case.num_qo_heads, problem.dims[0], dtype=problem.dtype)
        self.head_dim_qk = problem.dims[0]
        dims = problem.dims if case.cache != "same" else (problem.dims[0],) * 2
        self.keys = [
            [self.values(n, case.num_kv_heads, dim, dtype=problem.kv_dtype) for dim in dims]
            for n in case.kv_len
        ]
        if case.cache == "same":
            self.keys = [[k, k] for k, _ in self.keys]
        self.masks = self._add_tree() if case.tree and rows else None
        self.device_q = self.embed_rows("q", self.q)
        self.kv_lens = self._index("kv_lens", case.kv_len)
        self.has_value_pages = case.has_value_pages and case.cache != "same"
        self.table = self._place_keys() if case.page_size else self._place_rows()
        self.sm_scale = float(rng.uniform(0.05, 0.2))
        self.factor = float(rng.uniform(0.5, 1.5)) if problem.prescale_logits else 1.0
        self.output_scale = 1.0 if case.v_scale == "none" else float(rng.uniform(-2, 2))
        self.sinks = None
        if case.has_sinks:
            self.sinks = calls.drawn_sinks(rng, case.num_qo_heads)
        self.answer_shape = case.num_qo_heads, problem.dims[1], self.q.dtype
        self.lead = self._lead(rows, count)
        shape = (rows, case.num_qo_heads, problem.dims[1])
        self.out = self.blank("out", shape, self.q.dtype, self.strides(shape))
        self.most = max((1, *case.qo_len))
        self.pads = case.entry == "cudnn_batch_prefill_with_kv_cache"
        lse_shape = (count, self.most, shape[1]) if self.pads else shape[:2]
        self.lse = self.blank("lse", lse_shape, np.float32)

    # --- inputs ---

    def _add_tree(self) -> list[np.ndarray]:
        case, rng = self.case, np.random.default_rng((self.case.seed, 95))
        if case.form == "steps":
            return self._add_ragged_trees(rng)
        rows = verify_cases.random_tree(rng, len(case.qo_len), case.qo_len[0])
        self.embed("mask", verify_cases.in_form(rows, case.tree, rng))
        return verify_cases.whole_masks(rows, case.kv_len)

    def _add_ragged_trees(self, rng: np.random.Generator) -> list[np.ndarray]:
        """A row for each of q, as wide as the longest request has rows; the rest means nothing."""
        case, masks, most = self.case, [], max((2, *self.case.qo_len))
        rows = rng.random((len(self.q), most)) < 0.5
        for begin, qo_len, kv_len in zip(self.qo_indptr, case.qo_len, case.kv_len, strict=False):
            tree = verify_cases.random_tree(rng, 1, qo_len)
            rows[begin : begin + qo_len, :qo_len] = tree
            masks += verify_cases.whole_masks(tree, [kv_len])
        form = "bool2" if case.tree == "bool3" else case.tree
        many = verify_cases.in_form(np.tile(rows, (most, 1)), form, rng)
        self.embed("mask", many.reshape(most * len(rows), -1)[: len(rows)])
        return masks

    def _index(self, name: str, values: Any, axes: bool = True) -> Any:
        kind = np.dtype(self.case.index_dtype)
        shape = (-1, *(1,) * (self.case.index_axes if axes else 0))
        held = np.array(values, np.int64).astype(kind).reshape(shape)
        steps = [1] * held.ndim
        steps[0] = 1 + self.case.is_padded  # every other word is poison
        return self.embed(name, held, tuple(steps))

    def _place_rows(self) -> None:
        case = self.case
        kind = dtypes.parse(case.problem.kv_dtype).numpy
        parts = [
            np.concatenate(
                [np.zeros((0, case.num_kv_heads, dim), kind), *(pair[i] for pair in self.keys)]
            )
            for i, dim in enumerate(case.problem.dims)
        ]
        self.cache = [self.embed_rows(n, x) for n, x in zip("kv", parts, strict=True)]
        self.kv_indptr = offsets(case.kv_len)

    def _place_keys(self) -> Any:
        """Pages in random order; what nobody owns is NaN, unused entries of the table absurd."""
        case, size = self.case, self.case.page_size
        pages = [-(-n // size) for n in case.kv_len]
        total = sum(pages) + 3
        orders = [self.rng.permutation(total)]
        width = max((1, *pages)) + int(self.rng.integers(0, 3))
        if self.has_value_pages:
            orders.append(self.rng.permutation(total))
        tables = np.full((len(pages), len(orders), width), ABSURD, np.int32)
        for order, table in zip(orders, tables.swapaxes(0, 1), strict=True):
            for row, own in zip(table, batches.own_pages(order, case.kv_len, size), strict=True):
                row[: len(own)] = own
        kind, places = dtypes.parse(case.problem.kv_dtype).numpy, (orders * 2)[:2]
        heads, dims = case.num_kv_heads, case.problem.dims
        pools = batches.make_pools(self.keys, places, size, heads, dims, kind, case.kv_layout)
        if case.cache == "pair":
            self.cache = [self.embed_rows(n, x) for n, x in zip("kv", pools, strict=True)]
        else:
            both = pools[:1] if case.cache == "same" else pools
            self.cache = [self.embed_rows("cache", np.stack(both, axis=1))]
        step = len(orders) * width + 7 * case.is_padded
        if not self.has_value_pages:
            return self.embed("table", tables[:, 0], (step, 1))
        return self.embed("table", tables, (step, width, 1))

    def _lead(self, rows: int, count: int) -> tuple[int, ...]:
        """The leading axes of xqa's q."""
        if self.case.entry != "xqa" or self.case.form != "uniform":
            return (rows,)
        q_len = rows // count if count else 1
        return (count, 1) if q_len == 1 and self.case.seed % 2 else (count, 1, q_len)

    def _by_request(self, x: Any) -> Any:
        """Rows with xqa's leading axes, without a copy."""
        return calls.with_lead(x, self.lead)

    # --- the call ---

    def _scale(self, number: float) -> Any:
        """One number in memory."""
        return poison.embed(np.array([number], np.float32), xp=self.xp).array

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        case = self.case
        logits: Any = self.sm_scale
        if case.problem.prescale_logits:
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
        if self.masks is not None:
            named["mask"] = self.owned["mask"].array
        longest = max((1, *case.kv_len))
        cache = self.cache[0] if len(self.cache) == 1 else tuple(self.cache)
        space = self.workspace if case.has_workspace else None
        steps = self._index("qo_indptr", self.qo_indptr, axes=False)
        if case.entry.startswith("cudnn"):
            return self._cudnn(logits, output, named, space, longest)
        if case.entry == "xqa":
            return self._xqa(logits, output, named, space, steps)
        named |= {"kv_layout": case.kv_layout, "window_left": case.window_left}
        if case.seed % 3 == 1 and case.entry in ENTRIES[:2]:  # far below what tolerances see
            named["skip_softmax_threshold_scale_factor"] = 1e-9
        if self.has_value_pages:
            named["uses_shared_paged_kv_idx"] = False
        head = (self.device_q, cache, space, self.table, self.kv_lens)
        if case.entry == "trtllm_batch_context_with_kv_cache":
            count = len(case.qo_len)
            rest = (self.most, longest, logits, output, count, steps, None)
            return (*head, *rest), {**named, "causal": case.causal}
        name = "cum_seq_lens_q" if case.entry.startswith("trtllm") else "q_cu_seq_lens"
        if case.form == "steps":
            named[name] = steps
            if self.masks is not None:
                most = "max_q_len" if case.entry.startswith("trtllm") else "q_len_per_req"
                named[most] = max(2, self.most)
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
        # Lengths that offsets say too.
        if case.seed % 4 == 0:
            named["actual_seq_lens_q"] = None
        if case.seed % 4 < 2 and not case.page_size:
            named["actual_seq_lens_kv"] = None
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
        q_scale = self._scale(number) if case.problem.prescale_logits else number
        named["q_scale"] = q_scale
        named["kv_scale" if is_fp8 else "rcp_out_scale"] = output if is_fp8 else self.output_scale
        named |= {"kv_layout": case.kv_layout, "sliding_win_size": case.window_left + 1}
        if "out" in named:
            named["output"] = self._by_request(named.pop("out"))
        if "lse" in named:
            named["lse"] = self._by_request(named["lse"])
        if case.form == "steps":
            most = self.most if self.masks is None else max(2, self.most)
            named |= {"q_cu_seq_lens": steps, "q_seq_len": most}
        else:
            named["q_seq_len"] = case.qo_len[0] if case.qo_len else 1
        if case.has_sinks:
            named["sinks"] = named["sinks"].reshape(case.num_kv_heads, case.group)
        head = (self._by_request(self.device_q), *self.cache, self.table, self.kv_lens)
        return head, {**named, "workspace_buffer": space}

    def start(self) -> None:
        """Keep what the call gives, rows one after another."""
        case = self.case
        args, named = self.arguments()
        function: Any = getattr(cupyattn, case.entry)
        got = function(*args, **named)
        if case.entry == "xqa" and case.with_out and not case.with_lse:
            assert got is None
        if case.with_out:
            self.returned = self.out.array, self.lse.array if case.with_lse else None
            return
        assert self.pads or case.with_lse or not isinstance(got, tuple)
        out, lse = got if case.with_lse or self.pads else (got, None)
        assert case.with_lse or lse is None
        if lse is not None:
            lse = lse.reshape(self.lse.array.shape)
        self.returned = out.reshape(self.out.array.shape), lse

    def answers(self) -> calls.Answer:
        """Without the rows of no request, unless the call was given the outputs."""
        out, lse = super().answers()
        if not self.case.with_out:
            rows = int(self.qo_indptr[-1])
            out, lse = out[:rows], lse if lse is None or self.pads else lse[:rows]
        return out, lse

    # --- the answer ---

    def check(
        self, out: np.ndarray, lse: np.ndarray | None, *, may_be_hoppers: bool | None = None
    ) -> None:
        rows = int(self.qo_indptr[-1])
        if lse is not None:
            lse = self._rows_of(lse) if self.pads else lse[:rows]
        super().check(out[:rows], lse, may_be_hoppers=may_be_hoppers)
        if self.case.with_out:
            # Rows of nobody are poison still.
            bits = f"u{self.q.itemsize}"
            blank = poison.blank((1,), self.q.dtype).values().view(bits)
            spare = out[rows:].view(blank.dtype)
            assert (spare == blank).all(), f"{self.case}: rows of no request were written"

    def _rows_of(self, padded: np.ndarray) -> np.ndarray:
        """Rows one after another in base 2, of a padded LSE in natural log."""
        found = [np.zeros((0, padded.shape[2]), np.float32)]
        for index, count in enumerate(self.case.qo_len):
            assert np.isneginf(padded[index, count:]).all(), f"{self.case}: LSE of no row"
            found.append(padded[index, :count] * np.float32(math.log2(math.e)))
        return np.concatenate(found)

    def options(self) -> dict[str, Any]:
        case = self.case
        return {
            "causal": case.causal and self.masks is None,
            "window_left": case.window_left,
            "sm_scale": self.sm_scale * self.factor,
            "sinks": self.sinks,
            "scale_v": self.output_scale,
        }

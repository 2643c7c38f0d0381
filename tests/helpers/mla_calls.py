"""Seeded random calls of latent attention, over every way to call it, on poisoned arrays: what no
request owns is NaN, or an absurd id."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import flash_mla, mla
from cupyattn.core import dtypes
from cupyattn.reference.latent_rows import NUM_BYTES, pack_rows, unpack_rows

from . import batch_cases, calls, cases, gpu_cases, planless_calls, poison
from .batch_cases import Problem
from .batches import blank_pages, fill_pages, offsets
from .cases import pick

NUM_CASES = 1600
_BF16, _HALF, _E4M3 = "bfloat16", "float16", "float8_e4m3fn"
_KV_LENS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 200)
_PAGE_SIZES = (1, 1, 2, 5, 16, 64, 64, 100)
_MOST_MULTIPLIES = 5_000_000
# What is called, and how many rows a request has: any, equally many, or one.
WAYS = {
    "wrapper": "any",
    "metadata": "any",
    "trtllm": "same",
    "trtllm ragged": "any",
    "xqa batch": "one",
    "xqa": "one",
    "flash_mla": "same",
    "forward": "one",
    "list": "one",
    "list of tokens": "same",
    "flat list": "one",
}
PROBLEMS = (
    Problem(_BF16, _BF16, (512, 64)),
    Problem(_HALF, _HALF, (512, 64)),
    Problem(_BF16, _E4M3, (512, 64)),
    Problem(_HALF, _E4M3, (512, 64)),
    Problem(_HALF, _HALF, (512, 0)),
    Problem(_BF16, _BF16, (256, 64)),
    Problem(_HALF, _HALF, (512, 64), is_aligned=False),
)
# Head dims beyond 256 of ordinary attention.
WIDE = (
    Problem(_BF16, _BF16, (512, 512)),
    Problem(_HALF, _HALF, (256, 512)),
    Problem(_BF16, _E4M3, (512, 512)),
    Problem(_HALF, _HALF, (512, 256)),
    Problem(_HALF, _HALF, (64, 512)),
    Problem(_BF16, _BF16, (448, 256)),
    Problem(_BF16, _E4M3, (320, 512)),
    Problem(_HALF, _HALF, (512, 512), pos_encoding_mode="ROPE_LLAMA"),
    Problem(_BF16, _BF16, (256, 512), pos_encoding_mode="ROPE_LLAMA"),
    Problem(_HALF, _HALF, (512, 512), pos_encoding_mode="ALIBI", is_capped=True),
    Problem(_BF16, _BF16, (512, 512), is_masked=True),
    Problem(_HALF, _HALF, (512, 512), prescale_logits=True),
    Problem(_BF16, _BF16, (512, 512), is_aligned=False),
)


@dataclass(frozen=True)
class Case:
    """One call.

    problem      dims are the columns of the two parts
    scales       of the latent and the rope part of a cache of fp8
    absent       of a list: the share of its entries that name no key
    has_lengths  of a list: only so many of its entries count
    split        fixed_split_size in pages, or None
    form         of a cache of fp8: "" for scales of the whole, "tokens" for one of each token,
                 "rows" for FlashMLA's rows of 656 bytes
    window_left  keys before its own that a row sees; -1: all
    """

    seed: int
    way: str
    problem: Problem
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads: int
    page_size: int
    causal: bool = True
    is_split: bool = False
    is_padded: bool = False
    has_sinks: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    absent: float = 0.0
    has_lengths: bool = False
    split: int | None = None
    is_natural: bool = False
    with_out: bool = False
    sm_scale: float = 192**-0.5
    form: str = ""
    window_left: int = -1

    @property
    def is_list(self) -> bool:
        return "list" in self.way


def random_case(seed: int, ways: tuple[str, ...] = tuple(WAYS)) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 93))
    problem, way = PROBLEMS[seed % len(PROBLEMS)], ways[seed % len(ways)]
    if way in ("xqa", "forward") and problem.dims != (512, 64):
        problem = PROBLEMS[seed % 2]
    count = pick(rng, (1, 1, 2, 3, 5))
    q_len = pick(rng, (1, 2, 3, 5)) if WAYS[way] == "same" else 1
    qo_len = [q_len] * count
    if WAYS[way] == "any":
        qo_len = [pick(rng, (0, 1, 1, 1, 2, 3, 9)) for _ in range(count)]
    kv_len = [pick(rng, _KV_LENS) for _ in range(count)]
    if rng.random() < 0.1:
        kv_len[0] = int(rng.integers(300, 900))
    heads = pick(rng, (1, 2, 3, 8, 16, 16, 17, 32, 64, 128))
    while np.dot(qo_len, kv_len) * heads * 1088 > _MOST_MULTIPLIES:
        if heads > 16:
            heads //= 2
        else:
            kv_len[int(np.argmax(kv_len))] //= 2
    is_fp8 = problem.kv_dtype == _E4M3
    scales = (1.0, 1.0)
    if is_fp8 and way in ("wrapper", "metadata"):
        scales = pick(rng, ((1.0, 1.0), (0.5, 0.5), (0.75, 1.5)))
    form = _form(seed, way, problem)
    if form == "tokens":
        scales = (1.0, pick(rng, (1.0, 0.5)))  # products of q with it are exact
    return Case(
        form=form,
        window_left=_window_left(seed, way),
        seed=seed,
        way=way,
        problem=problem,
        qo_len=tuple(qo_len),
        kv_len=tuple(kv_len),
        heads=heads,
        page_size=1 if way == "flat list" else pick(rng, _PAGE_SIZES),
        causal=bool(rng.random() < 0.7),
        is_split=bool(rng.random() < 0.5) and problem.dims[1] > 0,
        is_padded=bool(rng.random() < 0.5),
        has_sinks=bool(rng.random() < 0.25) and way not in ("xqa", "forward"),
        scales=scales,
        absent=pick(rng, (0.0, 0.3, 1.0)) if rng.random() < 0.7 else 0.1,
        has_lengths=bool(rng.random() < 0.5),
        split=pick(rng, (None, None, 1, 4)) if way == "wrapper" else None,
        is_natural=bool(rng.random() < 0.3),
        with_out=bool(rng.random() < 0.5),
        sm_scale=pick(rng, (192**-0.5, 0.11)) if way != "forward" else 192**-0.5,
    )


def _window_left(seed: int, way: str) -> int:
    rng = np.random.default_rng((seed, 96))
    if way not in ("wrapper", "metadata", "trtllm", "trtllm ragged", "flash_mla"):
        return -1
    return pick(rng, (0, 5, 63, 100, 127)) if rng.random() < 0.3 else -1


def _form(seed: int, way: str, problem: Problem) -> str:
    """The form of fp8 keys, "" for plain ones; most calls that may have another form do."""
    rng = np.random.default_rng((seed, 95))
    if problem.kv_dtype != _E4M3 or rng.random() < 0.3:
        return ""
    if way in ("wrapper", "metadata"):
        return "tokens"
    # Rows have columns of bfloat16, which no float16 holds.
    has_rows = way in ("flash_mla", "list of tokens") and problem.dtype == _BF16
    return "rows" if has_rows else ""


def portable(case: Case) -> Case:
    """The same call with scales of the whole cache: portable kernels read no others."""
    return replace(case, form="")


def wide_single(index: int, seed: int) -> cases.Case:
    """A random call of one request with head dims beyond 256."""
    problem, case = WIDE[index], cases.random_case(40_000 + seed)
    few = replace(case, kv_len=min(case.kv_len, 300), num_kv_heads=1, group=min(case.group, 4))
    return gpu_cases.apply(problem, few)


def wide_planless(seed: int) -> planless_calls.Case:
    """A random call without a plan, of FlashInfer's functions, with head dims of 512."""
    entries = planless_calls.ENTRIES[:3]
    case = planless_calls.random_case(seed)
    while case.entry not in entries or case.has_value_pages:
        seed += 100_003
        case = planless_calls.random_case(seed)
    dtype, kv_dtype = ((_BF16, _BF16), (_HALF, _HALF), (_BF16, _E4M3))[seed % 3]
    problem = planless_calls.Problem(dtype, kv_dtype, (512, 512))
    lens = {"kv_len": tuple(min(n, 300) for n in case.kv_len)}
    return replace(case, problem=problem, num_kv_heads=1, group=min(case.group, 4), **lens)  # type: ignore[arg-type]


def few_wide_rows(index: int, tokens: int, kv_len: tuple[int, ...]) -> batch_cases.Case:
    """A causal batch with head dims beyond 256, of four query heads a KV head."""
    lengths = {"qo_len": (tokens,) * len(kv_len), "kv_len": kv_len}
    case = replace(wide_case(index, 0), wrapper="paged", group=4, num_kv_heads=2, **lengths)  # type: ignore[arg-type]
    plain = {"causal": True, "window_left": -1, "split": (None, False), "scale_v": "none"}
    return replace(case, page_size=16, **plain)  # type: ignore[arg-type]


def wide_case(index: int, seed: int) -> batch_cases.Case:
    """A random batch with head dims beyond 256, of fewer keys."""
    problem = WIDE[index]
    case = batch_cases.random_case(seed)
    wrapper = case.wrapper
    if wrapper == "decode" and (problem.is_masked or problem.dims[0] != problem.dims[1]):
        wrapper = "paged"
    lengths = {"qo_len": case.qo_len[:3], "kv_len": tuple(min(n, 150) for n in case.kv_len[:3])}
    tree = {"tree": "", "has_items": False}
    changed = replace(case, problem=problem, wrapper=wrapper, num_kv_heads=1, **lengths, **tree)  # type: ignore[arg-type]
    is_pair = changed.is_pair or problem.dims[0] != problem.dims[1]
    return replace(changed, is_pair=is_pair, group=min(case.group, 4))


ABSURD = 2**31 - 1
# Calls of FlashMLA's functions, whose LSE has no sink, and +inf for rows without keys.
_FLASH = "flash_mla", "list of tokens", "flat list"


class Call(calls.Call):
    """Requests in pages, or tokens with a list of keys each."""

    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        super().__init__(case, xp, case.seed, 94)
        self.workspace, problem = workspace, case.problem
        self.latent, self.rope = problem.dims
        self.head_dim_qk = self.both = self.latent + self.rope
        rows = sum(case.qo_len)
        self.q = self.values(rows, case.heads, self.both, dtype=problem.dtype)
        self.qo_indptr = offsets(case.qo_len)
        self.sinks = None
        if case.has_sinks:
            self.sinks = calls.drawn_sinks(self.rng, case.heads)
        self._place_keys()
        self.device_q = self._parts("q", self.q)
        self.device_cache = self._parts("cache", self.pool)
        shape = (rows, case.heads, self.latent)
        self.answer_shape = case.heads, self.latent, dtypes.parse(problem.dtype).numpy
        self.out = self.blank("out", shape, self.q.dtype, self.strides(shape))
        self.lse = self.blank("lse", shape[:2], np.float32)
        if case.way in ("wrapper", "metadata"):
            self.wrapper = self._planned()

    # --- inputs ---

    @property
    def _takes_parts(self) -> bool:
        return self.case.is_split and self.case.way in ("wrapper", "metadata", "forward")

    def _parts(self, name: str, values: np.ndarray) -> Any:
        """One array of both parts, or a pair."""
        if not self._takes_parts:
            return self.embed_rows(name, values)
        parts = values[..., : self.latent], values[..., self.latent :]
        return tuple(
            self.embed_rows(f"{name}[{i}]", np.ascontiguousarray(x)) for i, x in enumerate(parts)
        )

    def _rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Random rows of the cache as they are stored, and what they stand for."""
        case = self.case
        values = self.values(count, self.both, dtype=case.problem.kv_dtype)
        if case.form != "rows":
            return values, values
        sizes = np.exp2(self.rng.uniform(-4, 1, (count, 1)).astype(np.float32))
        rows = pack_rows(values.astype(np.float32) * sizes)
        return rows, unpack_rows(rows)

    def _pool_of(self, *shape: int) -> np.ndarray:
        """Pages of nobody."""
        if self.case.form == "rows":
            return np.full((*shape, NUM_BYTES), 0xFF, np.uint8)
        kind = dtypes.parse(self.case.problem.kv_dtype).numpy
        return blank_pages(*shape, self.both, dtype=kind)

    def _place_keys(self) -> None:
        case = self.case
        if case.is_list:
            self._place_list()
            return
        pages = [-(-n // case.page_size) for n in case.kv_len]
        self.kv_indptr = offsets(pages)
        count = sum(pages) + 3
        order = self.rng.permutation(count)[: sum(pages)].astype(np.int32)
        pool = self._pool_of(count, case.page_size)
        self.token_scales = np.full(pool.shape[:2], np.nan, np.float32)
        self.keys = []
        self.table = np.full((len(pages), max((1, *pages)) + 1), ABSURD, np.int32)
        for i, n in enumerate(case.kv_len):
            own = order[self.kv_indptr[i] : self.kv_indptr[i + 1]]
            stored, values = self._rows(n)
            fill_pages(pool, own, stored)
            if case.form == "tokens":  # powers of two: no product is rounded
                scales = np.exp2(self.rng.integers(-4, 2, n)).astype(np.float32)
                fill_pages(self.token_scales, own, scales)
                values = values.astype(np.float32)
                values[:, : self.latent] *= scales[:, None]
            self.keys.append(values[:, None])
            self.table[i, : len(own)] = own
        self.pool = pool
        self.ids = np.concatenate([order, np.full(5, ABSURD, np.int32)])

    def _place_list(self) -> None:
        """A pool of which some slots are keys, and a list for each token, with repetitions."""
        case, rng = self.case, self.rng
        most = max((1, *case.kv_len))
        num_pages = -(-2 * most // case.page_size) + 1
        slots = num_pages * case.page_size
        pool = self._pool_of(slots)
        used = rng.permutation(slots)[: max(1, most)]
        pool[used], values = self._rows(len(used))
        keys = np.full((slots, self.both), np.nan, values.dtype)
        keys[used] = values
        tokens = sum(case.qo_len)
        self.lists = rng.choice(used, (tokens, most)).astype(np.int32)
        absent = rng.random(self.lists.shape) < case.absent
        # What is no slot is no key: negative, or beyond the cache.
        nothing = np.array([-1, -(2**31), slots, slots + 7, ABSURD], np.int64).astype(np.int32)
        self.lists[absent] = rng.choice(nothing, self.lists.shape)[absent]
        counts = np.repeat(np.array(case.kv_len, np.int32), case.qo_len)
        self.counts = counts if case.has_lengths else np.full(tokens, most, np.int32)
        if case.has_lengths:  # entries past the length may hold anything
            self.lists[np.arange(most) >= counts[:, None]] = ABSURD
        self.keys = []
        self.max_logits: Any = None
        for row, n in zip(self.lists, self.counts, strict=True):
            seen = row[:n]
            self.keys.append(keys[seen[(seen >= 0) & (seen < slots)]][:, None])
        self.pool = pool.reshape(num_pages, case.page_size, -1)

    # --- the call ---

    def _planned(self) -> Any:
        case = self.case
        wrapper = mla.BatchMLAPagedAttentionWrapper(self.workspace)
        lens = np.array(case.kv_len, np.int32)
        named = {
            "num_heads": case.heads,
            "head_dim_ckv": self.latent,
            "head_dim_kpe": self.rope,
            "page_size": case.page_size,
            "causal": case.causal,
            "sm_scale": case.sm_scale,
            "q_data_type": case.problem.dtype,
            "kv_data_type": case.problem.kv_dtype,
            "fixed_split_size": case.split,
            "window_left": case.window_left,
        }
        if case.way == "wrapper":
            wrapper.plan(self.qo_indptr, self.kv_indptr, self.ids, lens, **named)
        else:
            table = poison.upload(self.table, self.xp)
            metadata = mla.MLAPlanMetadata.dense(self.qo_indptr, table, lens)
            mode = "basee" if case.is_natural else "none"
            wrapper.plan(metadata=metadata, lse_mode=mode, **named)
        return wrapper

    def start(self) -> None:
        way = self.case.way.replace(" ", "_")
        getattr(self, f"_start_{way}")()

    def _sinks(self) -> Any:
        return None if self.sinks is None else poison.upload(self.sinks, self.xp)

    def _start_wrapper(self) -> None:
        case, named = self.case, {"sinks": self._sinks(), "return_lse": True}
        if case.form == "tokens":
            scales = poison.upload(self.token_scales, self.xp)
            named |= {"ckv_scale_arr": scales, "kpe_scale": case.scales[1]}
        elif case.problem.kv_dtype != case.problem.dtype:
            named |= {"ckv_scale": case.scales[0], "kpe_scale": case.scales[1]}
        if case.way == "wrapper":
            named["return_lse_base_on_e"] = case.is_natural
        if self._takes_parts and case.seed % 2:
            self.run_wrapper(self.wrapper, *self.device_q, *self.device_cache, **named)
        else:
            both = {"query": self.device_q, "kv_cache": self.device_cache}
            self.run_wrapper(self.wrapper, **both, **named)

    _start_metadata = _start_wrapper

    def _index(self, values: Any) -> Any:
        return poison.upload(np.asarray(values, np.int32), self.xp)

    def _by_request(self, x: Any) -> Any:
        """Rows of the device as [requests, rows of each, ...], without a copy."""
        return calls.with_lead(x, (len(self.case.qo_len), self.case.qo_len[0]))

    def _keep(self, out: Any, lse: Any = None) -> None:
        """Answers with the leading axes of q as rows."""
        rows = sum(self.case.qo_len), self.case.heads
        self.returned = out.reshape(*rows, self.latent), None if lse is None else lse.reshape(rows)

    def _flashinfer(self, function: Any, q: Any, tables: Any, lens: Any, **named: Any) -> Any:
        """A call of FlashInfer's functions."""
        longest = 0 if lens is None else max((1, *self.case.kv_len))
        return function(
            q,
            self.device_cache,
            self.workspace,
            128,
            self.latent,
            self.rope,
            self._index(tables),
            lens,
            longest,
            bmm1_scale=self.case.sm_scale,
            sinks=self._sinks(),
            **named,
        )

    def _start_trtllm(self) -> None:
        case, named = self.case, dict[str, Any](return_lse=True)
        named["window_left"] = case.window_left
        is_ragged = case.way == "trtllm ragged"
        own = (lambda x: x) if is_ragged else self._by_request
        if is_ragged:
            named["cum_seq_lens_q"] = self._index(self.qo_indptr)
            named["max_q_len"] = max((1, *case.qo_len))
        if case.with_out:
            named |= {"out": own(self.out.array), "lse": own(self.lse.array)}
        lens, function = self._index(case.kv_len), mla.trtllm_batch_decode_with_kv_cache_mla
        answer = self._flashinfer(function, own(self.device_q), self.table, lens, **named)
        if case.with_out:
            self.returned = self.out.array, self.lse.array
        else:
            self._keep(*answer)

    _start_trtllm_ragged = _start_trtllm

    def _start_xqa_batch(self) -> None:
        function, q = mla.xqa_batch_decode_with_kv_cache_mla, self._by_request(self.device_q)
        self._keep(self._flashinfer(function, q, self.table, self._index(self.case.kv_len)))

    def _start_list(self) -> None:
        function, q = mla.trtllm_batch_decode_with_kv_cache_mla, self._by_request(self.device_q)
        named = {"sparse_mla_top_k": self.lists.shape[1], "return_lse": True}
        if self.case.has_lengths:
            named["sparse_mla_top_k_lens"] = self._index(self.counts)
        self._keep(*self._flashinfer(function, q, self.lists[:, None], None, **named))

    def _start_xqa(self) -> None:
        case = self.case
        answer = mla.xqa_mla(
            self._by_request(self.device_q), self.device_cache, self.device_cache,
            self._index(self.table), self._index(case.kv_len), None, self.workspace, None,
            case.page_size, q_scale=case.sm_scale,
        )  # fmt: skip
        self._keep(answer)

    def _start_forward(self) -> None:
        wrapper = mla.BatchMLAPagedAttentionWrapper(self.workspace, kv_layout="NHD")
        tables = self._index(self.table), self._index(self.case.kv_len)
        self.returned = wrapper.forward(self.device_q, self.device_cache, *tables, return_lse=True)

    def _start_flash_mla(self) -> None:
        case, named = self.case, dict[str, Any]()
        tables: tuple[Any, ...] = None, None, self.latent
        if case.is_list:
            lists = self.lists.reshape(len(case.qo_len), case.qo_len[0], -1)
            named["indices"] = self._index(lists)
            named["topk_length"] = self._index(case.kv_len) if case.has_lengths else None
        else:
            metadata = flash_mla.get_mla_metadata()
            tables = self._index(self.table), self._index(case.kv_len), self.latent, *metadata
            named |= {"causal": case.causal, "window_left": case.window_left}
        # Rows of 656 bytes need the axis of their one head.
        cache = self.device_cache[:, :, None] if case.form == "rows" else self.device_cache
        out, lse = flash_mla.flash_mla_with_kvcache(
            self._by_request(self.device_q), cache, *tables, softmax_scale=case.sm_scale,
            attn_sink=self._sinks(), is_fp8_kvcache=case.form == "rows", **named,
        )  # fmt: skip
        self._keep(out, lse.swapaxes(1, 2))

    _start_list_of_tokens = _start_flash_mla

    def _start_flat_list(self) -> None:
        case = self.case
        given = {"out": self.out.array} if case.with_out else {}
        out, self.max_logits, lse = flash_mla.flash_mla_sparse_fwd(
            self.device_q, self.device_cache, self._index(self.lists[:, None]), case.sm_scale,
            self.latent, self._sinks(), self._index(self.counts) if case.has_lengths else None,
            **given,
        )  # fmt: skip
        self.returned = out, lse

    def answers(self) -> calls.Answer:
        out, lse = super().answers()
        case = self.case
        is_natural = case.is_natural and case.way in ("wrapper", "metadata")
        if lse is not None and (is_natural or case.way in _FLASH):
            lse = (lse.astype(np.float64) / math.log(2.0)).astype(np.float32)
        if lse is not None and case.way in _FLASH:
            lse[lse == np.inf] = -np.inf
        return out, lse

    def check(self, out: np.ndarray, lse: np.ndarray | None, **named: Any) -> None:
        super().check(out, lse, **named)
        if self.case.way == "flat list":
            self._check_max_logits(poison.download(self.max_logits))

    def _check_max_logits(self, found: np.ndarray) -> None:
        for q, k, row in zip(self.q, self.keys, found, strict=True):
            logits = q.astype(np.float64) @ k[:, 0].astype(np.float64).T * self.case.sm_scale
            scale = np.abs(logits).max(axis=-1, initial=1.0)
            expected = logits.max(axis=-1, initial=-np.inf)
            np.testing.assert_array_equal(np.isneginf(row), np.isneginf(expected))
            seen = np.isfinite(expected)
            error = np.abs(row[seen] - expected[seen]) / scale[seen]
            assert (error < 1e-5).all(), f"{self.case}: largest logits are off by {error.max()}"

    # --- the answer ---

    def requests(self) -> Iterator[dict[str, Any]]:
        case, (scale, rope_scale) = self.case, self.case.scales
        q = self.q
        if scale != rope_scale:
            q = q.copy()
            q[..., self.latent :] = q[..., self.latent :] * q.dtype.type(rope_scale / scale)
        is_causal = case.causal and case.way in ("wrapper", "metadata", "flash_mla")
        is_causal = is_causal or case.way.startswith("trtllm")
        for i, k in enumerate(self.keys):
            rows = slice(i, i + 1) if case.is_list else slice(*self.qo_indptr[i : i + 2])
            yield {
                "q": q[rows],
                "k": k,
                "v": k[..., : self.latent],
                "causal": is_causal,
                "window_left": case.window_left,
                "sm_scale": case.sm_scale * scale,
                "scale_v": scale,
                "sinks": self.sinks,
            }

    @functools.cached_property
    def _expected(self) -> tuple[calls.States, calls.States]:
        states = super().expected()
        if self.sinks is None or self.case.way not in _FLASH:
            return states
        alone = calls.attend(
            ({**request, "sinks": None} for request in self.requests()), *self.answer_shape
        )
        ref, low = ([o, lse] for (o, _), (_, lse) in zip(states, alone, strict=True))
        return ref, low

    def expected(self) -> tuple[calls.States, calls.States]:
        return self._expected

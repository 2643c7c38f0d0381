"""Calls of the sizes that models have, whose kernels and tiles are chosen by what they cost.

Values are never read, so memory is not there: arrays are as long as they say and stay empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers import sparse_calls
from helpers.cases import pick

import cupyattn
from cupyattn import flash_attn, flash_mla
from cupyattn.core import dtypes

from .cards import Card, of_cupy, on_host
from .small import Drawn
from .small import workspace as plain_workspace

# (query heads, key heads, columns of q and k, of v)
MODELS = (
    *((32, 8, 128, 128), (64, 8, 128, 128), (32, 32, 128, 128), (16, 2, 128, 128)),
    *((32, 8, 64, 64), (12, 12, 64, 64), (8, 1, 256, 256), (16, 8, 256, 256), (40, 8, 128, 128)),
    *((32, 32, 96, 96), (32, 8, 80, 80), (16, 16, 72, 72), (128, 128, 192, 128), (71, 1, 64, 64)),
    *((8, 4, 128, 128), (24, 2, 128, 128), (16, 4, 256, 256), (8, 8, 512, 512), (28, 4, 128, 128)),
)
# Columns whose tiles were timed.
_TIMED = (
    *((128, 128), (128, 128), (128, 128), (64, 64), (64, 64), (96, 96), (80, 80), (256, 256)),
    *((192, 128), (192, 192), (256, 128)),
)
_PAGE_SIZES = (1, 16, 16, 16, 32, 64, 128, 5)
_POOL_TOKENS, _MOST_KEYS, _MOST_CELLS = 1 << 16, 1 << 19, 1 << 21
_TYPES = ("bfloat16", "bfloat16", "float16")
_KEY_TYPES = ("", "", "", "float8_e4m3fn", "float8_e5m2")
Array = np.ndarray


def workspace(card: Card, bits: int = 26) -> Array:
    return of_cupy(plain_workspace(card, 1 << bits))


def draw_lengths(rng: np.random.Generator, kind: str) -> tuple[Array, Array]:
    """Rows and keys of each request: of "decode", "verify", "prompts", "chunks" or "mixed"."""
    if kind == "mixed":
        few, many = draw_lengths(rng, "decode"), draw_lengths(rng, pick(rng, ("prompts", "chunks")))
        few, many = [x[:64] for x in few], [x[:3] for x in many]
        return np.concatenate([few[0], many[0]]), np.concatenate([few[1], many[1]])
    is_few = kind in ("decode", "verify")
    counts = (1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256) if is_few else (1, 1, 2, 4, 8, 16, 32)
    count = pick(rng, counts)
    longest = int(2 ** rng.uniform(5, 15 if is_few else 13))
    form = pick(rng, ("equal", "equal", "uniform", "tail", "one long"))
    keys = np.full(count, longest)
    if form == "uniform":
        keys = rng.integers(1, longest + 1, count)
    elif form == "tail":
        keys = 1 + (longest * rng.random(count) ** 3).astype(np.int64)
    elif form == "one long":
        keys = 1 + keys // 16
        keys[0] = longest
    keys = keys[: max(1, int(np.searchsorted(np.cumsum(keys), _MOST_KEYS)))]
    if kind == "decode":
        rows = np.ones_like(keys)
    elif kind == "verify":
        rows = np.full_like(keys, pick(rng, (2, 3, 4, 5, 8, 16)))
        keys = np.maximum(keys, rows)
    elif kind == "prompts":
        rows = keys
    else:
        rows = np.minimum(keys, pick(rng, (17, 33, 64, 128, 256, 512, 2048)))
    return rows, keys


@dataclass
class Batch:
    """Requests of a model and their arrays. `table` is (offsets of pages, pages, last page)."""

    rng: np.random.Generator
    card: Card
    kind: str
    page_size: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng
        self.rows, self.keys = draw_lengths(rng, self.kind)
        self.heads, self.kv_heads, self.dim, self.dim_v = pick(rng, MODELS)
        self.dtype = pick(rng, _TYPES)
        self.kv_dtype = pick(rng, _KEY_TYPES) or self.dtype
        self.layout = pick(rng, ("NHD", "NHD", "HND"))
        self.index = pick(rng, ("int32", "int32", "int64"))
        self.count = len(self.rows)
        self.is_on_host = bool(rng.random() < 0.5)
        if self.card.has_8bit_queries:
            self.dtype = self.kv_dtype = "float8_e4m3fn"
            if max(self.dim, self.dim_v) > 256 or rng.random() < 0.5:
                self.dim = self.dim_v = 128

    def __str__(self) -> str:
        rows, keys = (
            f"{x[0]}" if (x == x[0]).all() else f"{x.min()}..{x.max()}"
            for x in (self.rows, self.keys)
        )
        types = self.dtype if self.kv_dtype == self.dtype else f"{self.dtype}/{self.kv_dtype}"
        types = types.replace("bfloat16", "bf16").replace("float", "f")
        dims = self.dim if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        page = f" page {self.page_size} {self.layout}" if self.page_size else ""
        host = " host tables" if self.is_on_host else ""
        return (
            f"{self.kind} {self.count} x {rows} of {keys}, {self.heads}/{self.kv_heads} heads of "
            f"{dims}, {types}{page}{host}{said(self.options)}"
        )

    def array(self, name: str, *shape: int, dtype: str = "") -> Array:
        x = np.zeros(shape, dtypes.parse(dtype or self.dtype).numpy)
        if x.size < 1 << 16:
            x.view(np.uint8)[...] = 0
        self.card.name(name, x)
        return of_cupy(x)

    def q(self, *lead: int) -> Array:
        return self.array("q", *(lead or (int(self.rows.sum()),)), self.heads, self.dim)

    def ints(self, name: str, values: Any, index: str = "") -> Array:
        x = np.ascontiguousarray(values).astype(index or self.index)
        self.card.name(name, x)
        return of_cupy(x)

    def tables(self, *values: Any, names: tuple[str, ...]) -> list[Array]:
        """Index arrays where the batch has them: on the host or on the card."""
        made = [self.ints(n, x) for n, x in zip(names, values, strict=True)]
        return [on_host(x) for x in made] if self.is_on_host else made

    def table(self, keys: Array | None = None) -> tuple[Array, Array, Array]:
        keys = self.keys if keys is None else keys
        pages = -(-keys // self.page_size)
        ids = np.arange(pages.sum()) * 7 % self.num_pages
        return offsets(pages), ids, keys - (pages - 1) * self.page_size

    @property
    def num_pages(self) -> int:
        return max(8, _POOL_TOKENS // self.page_size)

    def block_tables(self) -> Array:
        width = -(-int(self.keys.max()) // self.page_size)
        ids = np.arange(self.count * width).reshape(self.count, width) * 7 % self.num_pages
        return self.ints("block_tables", ids, "int32")

    def cache(self, is_pair: bool | None = None) -> Any:
        shape = [self.page_size, self.kv_heads]
        shape = shape[::-1] if self.layout == "HND" else shape
        if is_pair is None:
            is_pair = self.dim != self.dim_v or bool(self.rng.random() < 0.5)
        dims = self.dim, self.dim_v
        if is_pair:
            return tuple(
                self.array(f"{n}_cache", self.num_pages, *shape, d, dtype=self.kv_dtype)
                for n, d in zip("kv", dims, strict=True)
            )
        return self.array("cache", self.num_pages, 2, *shape, self.dim, dtype=self.kv_dtype)

    def flat(self, *lead: int) -> list[Array]:
        """k and v of all requests, tokens first."""
        shape = *(lead or (int(self.keys.sum()),)), self.kv_heads
        dims = self.dim, self.dim_v
        return [
            self.array(n, *shape, d, dtype=self.kv_dtype) for n, d in zip("kv", dims, strict=True)
        ]

    def sinks(self) -> Array:
        return self.array("sinks", self.heads, dtype="float32")

    def choose(self, **makers: Callable[[], Any]) -> dict[str, Any]:
        """Some of these options: none in a third of the calls, one in a third, else a few."""
        count = pick(self.rng, (0, 1, 2, 3) if self.rng.random() < 0.5 else (0, 1))
        names = [*self.rng.permutation([*makers])[:count]]
        found = {name: makers[name]() for name in makers if name in names}
        self.options |= found
        return found


def said(options: dict[str, Any]) -> str:
    parts = (n if isinstance(x, np.ndarray) else f"{n}={x}" for n, x in options.items())
    return "".join(f", {x}" for x in parts)


def offsets(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)])


def logits_options(b: Batch) -> dict[str, Callable[[], Any]]:
    rng = b.rng
    return {
        "window_left": lambda: pick(rng, (0, 127, 1024, 4096)),
        "logits_soft_cap": lambda: pick(rng, (30.0, 50.0)),
        "sm_scale": lambda: 0.11,
        "pos_encoding_mode": lambda: pick(rng, ("ROPE_LLAMA", "ALIBI")),
        "disable_split_kv": lambda: True,
        "fixed_split_size": lambda: pick(rng, (64, 512)),
        "window_right": lambda: pick(rng, (0, 7)),
    }


def run_options(b: Batch) -> dict[str, Any]:
    """Options of run()."""
    rng, found = b.rng, {}
    if rng.random() < 0.2:
        found["sinks"] = b.sinks()
    for name in ("q_scale", "k_scale", "v_scale"):
        if rng.random() < 0.1:
            found[name] = 0.5
    if rng.random() < 0.1:
        found["v_scale"] = b.array("v_scale", b.kv_heads, dtype="float32")
    if rng.random() < 0.5:
        found["return_lse"] = True
    b.options |= found
    return found


def decode(seed: int, card: Card) -> Drawn:
    """The decode wrapper, in graph mode in a quarter of the calls, and planned again."""
    rng = np.random.default_rng((seed, 101))
    b = Batch(
        rng, card, pick(rng, ("decode", "decode", "decode", "verify")), pick(rng, _PAGE_SIZES)
    )
    b.dim_v = b.dim
    is_graph, again = bool(rng.random() < 0.25), pick(rng, ("", "", "", "longer", "equal"))
    memory, table = workspace(card), b.table()
    plan = b.choose(**logits_options(b))
    run = run_options(b)
    types = {"q_data_type": b.dtype, "kv_data_type": b.kv_dtype}
    made: dict[str, Any] = {}
    if is_graph:
        buffers = (np.zeros(b.count + 1), np.zeros(len(table[1]) + 4 * b.count), np.zeros(b.count))
        names = (
            "paged_kv_indptr_buffer",
            "paged_kv_indices_buffer",
            "paged_kv_last_page_len_buffer",
        )
        made = {n: b.ints(n, x, "int32") for n, x in zip(names, buffers, strict=True)}
        made["use_cuda_graph"] = True
    names = "indptr", "indices", "last_page_len"
    tables = b.tables(*table, names=names)
    q, cache, rows = b.q(), b.cache(), int(b.rows[0])
    heads = b.heads, b.kv_heads, b.dim, b.page_size

    def call() -> None:
        w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(memory, b.layout, **made)
        w.plan(*tables, *heads, **types, **plan, q_len_per_req=rows)
        w.run(q, cache, **run)
        if again:
            more = b.keys + (1 if again == "equal" else rng.integers(0, b.page_size, b.count))
            w.plan(
                *b.tables(*b.table(more), names=names), *heads, **types, **plan, q_len_per_req=rows
            )
        w.run(q, cache, **run)

    return f"{b}{', graph' * is_graph}{', again ' * bool(again)}{again}", call


def prefill(seed: int, card: Card) -> Drawn:
    """The prefill wrappers, paged and ragged, with masks where they are not too large."""
    rng = np.random.default_rng((seed, 102))
    is_paged = bool(rng.random() < 0.55)
    kind = pick(
        rng, ("prompts", "prompts", "chunks", "chunks", "mixed", "mixed", "verify", "decode")
    )
    b = Batch(rng, card, kind, pick(rng, _PAGE_SIZES) if is_paged else 0)
    plan = b.choose(**logits_options(b))
    plan["causal"] = b.kind != "prompts" or bool(rng.random() < 0.7)
    cells = int((b.rows * b.keys).sum())
    if rng.random() < 0.2 and cells < _MOST_CELLS:
        mask = of_cupy(np.ones(cells, bool))
        card.name("custom_mask", mask)
        plan |= {"custom_mask": mask, "causal": False}
        plan.pop("window_right", None)
    b.options |= plan
    run, memory = run_options(b), workspace(card)
    plan |= {"q_data_type": b.dtype, "kv_data_type": b.kv_dtype, "head_dim_vo": b.dim_v}
    if rng.random() < 0.1 and is_paged:
        plan["o_data_type"] = b.options["o_data_type"] = "float32"
    is_graph = is_paged and bool(rng.random() < 0.15)
    q, keys = b.q(), [b.cache()] if is_paged else b.flat()
    if is_paged:
        table = b.table()
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        tables = b.tables(offsets(b.rows), *table, names=names)
        sizes = (b.heads, b.kv_heads, b.dim, b.page_size)
    else:
        tables = b.tables(offsets(b.rows), offsets(b.keys), names=("qo_indptr", "kv_indptr"))
        sizes = (b.heads, b.kv_heads, b.dim)
        if b.layout == "HND":
            keys = [x.reshape(x.shape[1], x.shape[0], x.shape[2]) for x in keys]
    made: dict[str, Any] = {}
    if is_graph:
        room = {"qo_indptr": b.count + 1, "paged_kv_indptr": b.count + 1}
        room |= {"paged_kv_indices": len(table[1]), "paged_kv_last_page_len": b.count}
        made = {f"{n}_buf": b.ints(f"{n}_buf", np.zeros(x), "int32") for n, x in room.items()}
        made["use_cuda_graph"] = True

    def call() -> None:
        cls: Any = cupyattn.BatchPrefillWithPagedKVCacheWrapper
        cls = cls if is_paged else cupyattn.BatchPrefillWithRaggedKVCacheWrapper
        w = cls(memory, b.layout, **made)
        w.plan(*tables, *sizes, **plan)
        w.run(q, *keys, **run)

    return f"{'paged' if is_paged else 'ragged'} {b}{', graph' * is_graph}", call


def choices(seed: int, card: Card) -> Drawn:
    """Prompts and chunks of plain problems, around where other tiles would be as soon done."""
    rng = np.random.default_rng((seed, 111))
    b = Batch(rng, card, pick(rng, ("prompts", "prompts", "chunks", "mixed")))
    b.dim, b.dim_v = pick(rng, _TIMED)
    b.kv_heads = pick(rng, (1, 2, 4, 8, 8, 16))
    b.heads = b.kv_heads * pick(rng, (1, 1, 2, 4, 8))
    b.dtype = b.kv_dtype = pick(rng, ("bfloat16", "float16"))
    b.is_on_host, b.index = True, "int32"
    b.page_size = pick(rng, (0, 0, 1, 16, 64))
    sizes = (b.heads, b.kv_heads, b.dim)
    plan = {"causal": bool(rng.random() < 0.8), "head_dim_vo": b.dim_v}
    if rng.random() < 0.15:
        plan["logits_soft_cap"] = 30.0
    b.options |= plan
    plan |= {"q_data_type": b.dtype, "kv_data_type": b.dtype}
    cls: Any = cupyattn.BatchPrefillWithRaggedKVCacheWrapper
    tables = [offsets(b.rows), offsets(b.keys)]
    if b.page_size:
        cls = cupyattn.BatchPrefillWithPagedKVCacheWrapper
        tables, sizes = [offsets(b.rows), *b.table()], (*sizes, b.page_size)
    given = b.tables(*tables, names=("qo_indptr", "kv_indptr", "indices", "last")[: len(tables)])
    q, keys, memory = b.q(), [b.cache(True)] if b.page_size else b.flat(), workspace(card, 28)

    def call() -> None:
        w = cls(memory, b.layout if b.page_size else "NHD")
        w.plan(*given, *sizes, **plan)
        w.run(q, *keys)

    return f"{b}", call


def mixed(seed: int, card: Card) -> Drawn:
    """BatchAttention, the wrapper of prompts beside decodes."""
    rng = np.random.default_rng((seed, 103))
    kind = pick(rng, ("mixed", "mixed", "mixed", "decode", "chunks", "verify", "prompts"))
    b = Batch(rng, card, kind, pick(rng, _PAGE_SIZES))
    plan: dict[str, Any] = {"causal": True}
    if rng.random() < 0.2:
        plan["logits_soft_cap"] = 30.0
    b.options |= plan
    plan |= {"q_data_type": b.dtype, "kv_data_type": b.kv_dtype}
    indptr, ids, _ = b.table()
    names = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"
    tables = b.tables(offsets(b.rows), indptr, ids, b.keys, names=names)
    sizes = b.heads, b.kv_heads, b.dim, b.dim_v, b.page_size
    q, cache = b.q(), b.cache()
    run = {"sinks": b.sinks()} if rng.random() < 0.2 else {}

    def call() -> None:
        w = cupyattn.BatchAttention(b.layout, "cuda")
        w.plan(*tables, *sizes, **plan)
        w.run(q, cache, **run)

    return f"{b}", call


def single(seed: int, card: Card) -> Drawn:
    rng = np.random.default_rng((seed, 104))
    b = Batch(rng, card, pick(rng, ("prompts", "chunks", "decode", "verify")))
    rows, keys = int(b.rows[0]), int(b.keys[0])
    options = logits_options(b)
    for name in ("disable_split_kv", "fixed_split_size"):
        options.pop(name)
    given = b.choose(**options)
    if rng.random() < 0.15 and rows * keys < _MOST_CELLS and "window_right" not in given:
        given["custom_mask"] = of_cupy(np.ones((rows, keys), bool))
        card.name("custom_mask", given["custom_mask"])
    elif rng.random() < 0.7:
        given["causal"] = b.options["causal"] = True
    given |= {n: x for n, x in run_options(b).items() if n != "v_scale"}
    b.rows, b.keys, b.count = b.rows[:1], b.keys[:1], 1
    q, (k, v) = b.q(), b.flat()
    if rows == 1 and rng.random() < 0.8:
        for name in ("causal", "custom_mask", "window_right"):
            given.pop(name, None)
        return f"decode {b}", lambda: cupyattn.single_decode_with_kv_cache(q[0], k, v, **given)
    return f"{b}", lambda: cupyattn.single_prefill_with_kv_cache(q, k, v, **given)


def flash(seed: int, card: Card) -> Drawn:
    """flash_attn's functions: dense, varlen, over a cache in rows or pages, with new keys."""
    rng = np.random.default_rng((seed, 105))
    door = pick(rng, ("func", "varlen", "varlen pages", "cache", "cache pages", "cache new"))
    kind = (
        pick(rng, ("decode", "verify"))
        if door.startswith("cache")
        else pick(rng, ("prompts", "chunks", "mixed"))
    )
    b = Batch(rng, card, kind, pick(rng, (16, 64, 256)) if "pages" in door or "new" in door else 0)
    b.layout = "NHD"
    given = b.choose(
        softmax_scale=lambda: 0.11,
        window_size=lambda: pick(rng, ((127, 0), (1024, -1), (64, 64))),
        softcap=lambda: 30.0,
        sinks=b.sinks,
        alibi_slopes=lambda: b.array("alibi_slopes", b.heads, dtype="float32"),
        attention_chunk=lambda: pick(rng, (256, 8192)),
        num_splits=lambda: pick(rng, (1, 3)),
    )
    given["causal"] = b.options["causal"] = bool(rng.random() < 0.8)
    if rng.random() < 0.3:
        given["return_softmax_lse"] = True
    most_rows, most_keys = int(b.rows.max()), int(b.keys.max())
    if door == "func":
        b.rows[:], b.keys[:] = most_rows, most_keys
        if most_keys * b.count > _MOST_KEYS:
            b.count = 1
        q, (k, v) = b.q(b.count, most_rows), b.flat(b.count, most_keys)
        return f"{door} {b}", lambda: flash_attn.flash_attn_func(q, k, v, **given)
    if door.startswith("varlen"):
        rows, keys = (
            b.ints(n, offsets(x), "int32")
            for n, x in (("cu_seqlens_q", b.rows), ("cu_seqlens_k", b.keys))
        )
        most = most_rows, most_keys
        q = b.q()
        if door == "varlen":
            k, v = b.flat()
        else:
            k, v = b.cache(True)
            given["block_table"] = b.block_tables()
        return f"{door} {b}", lambda: flash_attn.flash_attn_varlen_func(
            q, k, v, rows, keys, *most, **given
        )
    given["cache_seqlens"] = b.ints("cache_seqlens", b.keys, "int32")
    q = b.q(b.count, most_rows)
    if door == "cache":
        most_keys = min(most_keys, _MOST_KEYS // b.count)
        given["cache_seqlens"] = b.ints("cache_seqlens", np.minimum(b.keys, most_keys), "int32")
        k, v = b.flat(b.count, most_keys)
    else:
        k, v = b.cache(True)
        given["block_table"] = b.block_tables()
    if door == "cache new":
        given["cache_seqlens"] = b.ints("cache_seqlens", b.keys - most_rows, "int32")
        shape = b.count, most_rows, b.kv_heads
        given["k"] = b.array("k_new", *shape, b.dim, dtype=b.kv_dtype)
        given["v"] = b.array("v_new", *shape, b.dim_v, dtype=b.kv_dtype)
    return f"{door} {b}", lambda: flash_attn.flash_attn_with_kvcache(q, k, v, **given)


def tables(seed: int, card: Card) -> Drawn:
    """Calls without a plan over block tables: TensorRT-LLM's, XQA's and cuDNN's."""
    rng = np.random.default_rng((seed, 106))
    door = pick(rng, ("trtllm decode", "trtllm context", "xqa", "cudnn decode", "cudnn prefill"))
    is_decode = door not in ("trtllm context", "cudnn prefill")
    kinds = ("decode", "decode", "verify") if is_decode else ("prompts", "chunks", "mixed")
    kind = "decode" if door == "cudnn decode" else pick(rng, kinds)
    b = Batch(rng, card, kind, pick(rng, (16, 32, 64)))
    b.dim_v = b.dim
    memory, most = workspace(card), (int(b.rows.max()), int(b.keys.max()))
    if door.startswith("cudnn"):
        b.layout = "HND"
        q, (k, v), ids = b.q(), b.cache(True), b.block_tables()
        lens = b.ints("actual_seq_lens_kv", b.keys.reshape(-1, 1, 1, 1), "int32")
        if door == "cudnn decode":
            return f"{door} {b}", lambda: cupyattn.cudnn_batch_decode_with_kv_cache(
                q,
                k,
                v,
                0.11,
                memory,
                max_sequence_kv=most[1],
                actual_seq_lens_kv=lens,
                block_tables=ids,
            )
        rows = b.ints("actual_seq_lens_q", b.rows.reshape(-1, 1, 1, 1), "int32")
        begins = b.ints("batch_offsets_q", offsets(b.rows), "int32")
        return f"{door} {b}", lambda: cupyattn.cudnn_batch_prefill_with_kv_cache(
            q, k, v, 0.11, memory, max_token_per_sequence=most[0], max_sequence_kv=most[1],
            actual_seq_lens_q=rows, actual_seq_lens_kv=lens, block_tables=ids, causal=True,
            return_lse=True, batch_offsets_q=begins, batch_offsets_o=begins,
            batch_offsets_units="tokens",
        )  # fmt: skip
    given = b.choose(
        window_left=lambda: pick(rng, (127, 1024)),
        sinks=b.sinks,
        bmm2_scale=lambda: pick(rng, (0.5, b.array("bmm2_scale", 1, dtype="float32"))),
    )
    given |= {"bmm1_scale": 0.11, "kv_layout": b.layout} | (
        {"bmm2_scale": 1.0} if "bmm2_scale" not in given else {}
    )
    if rng.random() < 0.1:
        given["bmm1_scale"] = b.array("bmm1_scale", 1, dtype="float32")
    q, cache, ids = b.q(), b.cache(), b.block_tables()
    lens = b.ints("seq_lens", b.keys, "int32")
    if door == "trtllm context":
        rows, keys = (
            b.ints("cum_seq_lens_q", offsets(b.rows), "int32"),
            b.ints("cum_seq_lens_kv", offsets(b.keys), "int32"),
        )
        return f"{door} {b}", lambda: cupyattn.trtllm_batch_context_with_kv_cache(
            q, cache, memory, ids, lens, *most, batch_size=b.count, cum_seq_lens_q=rows,
            cum_seq_lens_kv=keys, **given,
        )  # fmt: skip
    call: Any = cupyattn.trtllm_batch_decode_with_kv_cache
    if door == "xqa":
        call = cupyattn.xqa_batch_decode_with_kv_cache
    return f"{door} {b}", lambda: call(
        q, cache, memory, ids, lens, most[1], q_len_per_req=most[0], **given
    )


def latent(seed: int, card: Card) -> Drawn:
    """Latent keys: the wrapper, FlashMLA's call, TensorRT-LLM's, and lists of keys."""
    rng = np.random.default_rng((seed, 107))
    door = pick(rng, ("wrapper", "wrapper", "flash_mla", "flash_mla list", "trtllm", "sparse"))
    kinds = (
        ("decode", "decode", "verify", "chunks", "mixed")
        if door == "wrapper"
        else ("decode", "verify")
    )
    b = Batch(rng, card, pick(rng, kinds), pick(rng, (1, 16, 64, 64)) if door == "wrapper" else 64)
    b.heads, b.kv_heads, b.dim, b.dim_v = pick(rng, (16, 32, 64, 128, 128)), 1, 576, 512
    b.dtype = "bfloat16"
    b.kv_dtype = (
        "float8_e4m3fn" if door in ("wrapper", "trtllm") and rng.random() < 0.3 else b.dtype
    )
    rows, most = int(b.rows.max()), int(b.keys.max())
    pool = b.array("cache", b.num_pages, b.page_size, 576, dtype=b.kv_dtype)
    if door == "wrapper":
        indptr, ids, _ = b.table()
        names = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"
        tables = b.tables(offsets(b.rows), indptr, ids, b.keys, names=names)
        q, memory = b.q(), workspace(card)
        plan = b.choose(disable_split_kv=lambda: True, fixed_split_size=lambda: 8)
        causal = bool(rng.random() < 0.8)

        def call() -> None:
            w = cupyattn.BatchMLAPagedAttentionWrapper(memory)
            sizes = b.heads, 512, 64, b.page_size
            w.plan(*tables, *sizes, causal, 0.07, b.dtype, b.kv_dtype, **plan)
            w.run(q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:], return_lse=causal)

        return f"{door} {b}, causal {causal}", call
    q, lens = b.q(b.count, rows), b.ints("cache_seqlens", b.keys, "int32")
    pages = pool.reshape(b.num_pages, 64, 1, 576)
    if door == "trtllm":
        memory, ids = workspace(card), b.block_tables()
        return f"{door} {b}", lambda: cupyattn.trtllm_batch_decode_with_kv_cache_mla(
            q,
            pages.reshape(b.num_pages, 1, 64, 576),
            memory,
            128,
            512,
            64,
            ids,
            lens,
            most,
            bmm1_scale=0.07,
        )
    width = pick(rng, (64, 512, 2048))
    if door == "sparse":
        tokens = min(int(b.rows.sum()) * 7, 4096)
        q, kv = b.q(tokens), b.array("kv", _POOL_TOKENS, 1, 576)
        lists = b.ints("indices", np.zeros((tokens, 1, width)), "int32")
        return f"{door} {b}, {tokens} x {width}", lambda: flash_mla.flash_mla_sparse_fwd(
            q, kv, lists, 0.07
        )
    meta = flash_mla.get_mla_metadata()[0]
    given = (
        {"indices": b.ints("indices", np.zeros((b.count, rows, width)), "int32")}
        if "list" in door
        else {}
    )
    ids = None if given else b.block_tables()
    return f"{door} {b}", lambda: flash_mla.flash_mla_with_kvcache(
        q, pages, ids, None if given else lens, 512, meta, None, 0.07, not given, **given
    )


def cascade(seed: int, card: Card) -> Drawn:
    """A prefix that all or groups of requests share, by levels."""
    rng = np.random.default_rng((seed, 108))
    b = Batch(
        rng,
        card,
        pick(rng, ("decode", "decode", "verify", "chunks", "mixed")),
        pick(rng, (1, 16, 64)),
    )
    b.dim_v = b.dim
    prefix = np.array([int(2 ** rng.uniform(5, 14))])
    levels = [(np.array([b.rows.sum()]), prefix), (b.rows, b.keys)]
    if b.count >= 4 and rng.random() < 0.4:
        half = b.count // 2
        groups = np.array([b.rows[:half].sum(), b.rows[half:].sum()])
        levels.insert(1, (groups, prefix // 4 + np.array([1, 9])))
    lists: list[list[Array]] = [[], [], [], []]
    for index, (rows, keys) in enumerate(levels):
        names = tuple(f"{n}{index}" for n in ("qo_indptr", "indptr", "indices", "last"))
        for kind, x in zip(
            lists, b.tables(offsets(rows), *b.table(keys), names=names), strict=True
        ):
            kind.append(x)
    options = logits_options(b)
    for name in ("disable_split_kv", "fixed_split_size", "window_right"):
        options.pop(name)
    plan = b.choose(**options) | {"causal": b.kind != "decode"}
    plan |= {"q_data_type": b.dtype, "kv_data_type": b.kv_dtype}
    q, cache, memory = b.q(), b.cache(), workspace(card)

    def call() -> None:
        w = cupyattn.MultiLevelCascadeAttentionWrapper(len(levels), memory, b.layout)
        w.plan(*lists, b.heads, b.kv_heads, b.dim, b.page_size, **plan)
        w.run(q, cache)

    return f"{len(levels)} levels, prefix {prefix[0]}, {b}", call


def pod(seed: int, card: Card) -> Drawn:
    """Prompts beside decodes by their own wrapper."""
    rng = np.random.default_rng((seed, 109))
    b = Batch(rng, card, "decode", pick(rng, (1, 16, 64)))
    b.dim_v = b.dim
    rows = int(2 ** rng.uniform(4, 12))
    keys = rows + pick(rng, (0, 0, 1000))
    tables = b.tables(*b.table(), names=("indptr", "indices", "last_page_len"))
    q, cache, memory = b.q(), b.cache(), workspace(card)
    q_p = b.array("q_p", rows, b.heads, b.dim)
    k_p, v_p = (b.array(f"{n}_p", keys, b.kv_heads, b.dim, dtype=b.kv_dtype) for n in "kv")
    options = {"causal_p": True, "kv_layout_d": b.layout}

    def call() -> None:
        w = cupyattn.PODWithPagedKVCacheWrapper(memory, b.layout)
        types = {"q_data_type": b.dtype, "kv_data_type": b.kv_dtype}
        w.plan(*tables, b.heads, b.kv_heads, b.dim, b.page_size, **types)
        w.run(q_p, k_p, v_p, q, cache, **options)

    return f"{rows} of {keys} beside {b}", call


def dot_product(seed: int, card: Card) -> Drawn:
    rng = np.random.default_rng((seed, 110))
    b = Batch(rng, card, pick(rng, ("prompts", "chunks", "decode", "verify")))
    b.kv_dtype, rows, keys = b.dtype, int(b.rows.max()), int(b.keys.max())
    b.count = max(1, min(b.count, _MOST_KEYS // keys))
    given = b.choose(
        scale=lambda: 0.11,
        local_window_size=lambda: pick(rng, ((127, 0), 64)),
        logits_soft_cap=lambda: 30.0,
        sinks=b.sinks,
        key_value_seq_lengths=lambda: b.ints("lens", np.full(b.count, keys), "int32"),
    )
    given["is_causal"] = b.options["is_causal"] = bool(rng.random() < 0.6)
    q, (k, v) = b.q(b.count, rows), b.flat(b.count, keys)
    return f"{b}", lambda: cupyattn.dot_product_attention(q, k, v, **given)


def eight_bits(seed: int, card: Card) -> Drawn:
    """Queries, keys and values of e4m3 by the draws above."""
    rng = np.random.default_rng((seed, 112))
    draw = pick(rng, (prefill, prefill, decode, single, flash, tables, cascade))
    card.has_8bit_queries = True
    try:
        text, run = draw(seed, card)
    finally:
        card.has_8bit_queries = False
    return f"{draw.__name__}: {text}", run


def blocks_of_rows(seed: int, card: Card) -> Drawn:
    """Masks of blocks of prompts, of which neighbours share more or less."""
    rng = np.random.default_rng((seed, 77))
    heads = pick(rng, ((16, 16), (32, 32), (32, 8), (8, 8), (12, 12), (16, 4)))
    row, column = pick(rng, ((64, 64), (64, 64), (64, 128), (128, 128), (16, 64), (32, 64)))
    length, dim = pick(rng, (1024, 2048, 4096, 8192)), pick(rng, (128, 128, 64))
    kept, density = pick(rng, (0.0, 0.7, 0.9)), pick(rng, (0.1, 0.25, 0.5))
    dtype = pick(rng, ("bfloat16", "float16"))
    seen = sparse_calls.causal_blocks(rng, length // row, length // column, density, kept)
    indptr, indices = np.append(0, seen.sum(1).cumsum()), np.nonzero(seen)[1]
    q, k, v = (np.zeros((length, n, dim), dtypes.parse(dtype).numpy) for n in (*heads, heads[1]))
    card.name("", {"q": q, "k": k, "v": v})
    sizes, memory = (length, length, row, column, *heads, dim), workspace(card)

    def run() -> None:
        w = cupyattn.BlockSparseAttentionWrapper(memory)
        w.plan(indptr, indices, *sizes, q_data_type=dtype, o_data_type=dtype)
        w.run(*map(of_cupy, (q, k, v)), return_lse=bool(seed % 3))

    return f"{sizes}, kept {kept} of {density}, {dtype}", run

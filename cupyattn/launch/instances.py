"""The kernel instances that calls of chosen kinds launch, to be compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from .. import jit
from ..choose.tile_times import large_tiles
from ..core import dtypes, logits
from ..core.device import NO_GPU, overlaps_launches
from ..core.dtypes import DType
from ..core.problem import KEY_SCALES, AttentionProblem, OutputGate
from ..errors import ArgumentError
from .attention import (
    append_new_kv,
    find_items,
    key_lists,
    key_unions,
    merge_levels,
    merge_splits,
    pad_lse,
    plan_batch,
    read_tables,
    rotate_keys,
    scan_mask,
    widen_pages,
    widen_rows,
)
from .ops import (
    append_paged_kv_cache,
    copy_rows,
    exchange_states,
    find_mean,
    gather_heads,
    gather_keys,
    get_batch_indices_positions,
    get_seq_lens,
    list_slots,
    merge_states,
    quantize,
    select,
    select_softmax,
    select_topk,
    serving_metadata,
    share_indices,
    store_kv,
)
from .ops.packbits import CONFIG as PACKBITS_CONFIG
from .tiles.config import FOUND_ITEMS, FOUND_PARTS, Target
from .tiles.decode_sm80 import one_an_sm_rows
from .tiles.forms import ALL, KEYS, QUERIES, forms_of
from .tiles.mixed_sm80 import mixed_config
from .tiles.row_classes import DECODE, LARGE, SMALL, VERIFY, row_class_of
from .tiles.select import tile_config

Instance = tuple[str, jit.Config]

OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "decode": "one query token a request",
        "prefill": "any number of query tokens, also mixed with decode",
        "cascade": "requests that share prefixes",
        "sparse": "attention over lists of keys, over those of two latent caches, and selections",
        "mla": "latent attention, of 512 and 64 columns, and over lists of keys",
        "append": "writing keys and values into pages",
        "quantize": "queries, keys and values to eight bits, and norms and positions ahead",
        "merge": "merging attention states",
        "exchange": "merging the attention states of several GPUs",
        "page": "page table arithmetic on the device, metadata of serving steps",
        "packbits": "masks of bools into bits",
    }
)

# What each option changes in a problem. Windows and sinks are read at run time.
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": {},
        "window": {},
        "sinks": {},
        "soft_cap": {"soft_cap": True},
        "rope": {"pos_encoding": "ROPE_LLAMA"},
        "alibi": {"pos_encoding": "ALIBI"},
        "mask": {"custom_mask": True},
        "draft_mask": {"custom_mask": True, "mask_form": "rows"},
        "multi_item": {"custom_mask": True, "mask_form": "runs"},
        "scales": {"prescale_logits": True},
        "output_gate": {"output_gate": OutputGate(dtypes.bfloat16, True)},
        "key_share": {"key_share": True},
        "head_gate": {"output_gate": OutputGate(dtypes.bfloat16, False)},
        "skip_softmax": {"skips_tiles": True},
        "rel_logits": {"logits": logits.near_biases(dtypes.bfloat16)},
    }
)

# Shared memory per block: most of a big chip's, and all that the small ones have.
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_120a": 99 * 1024,
}


@dataclass(frozen=True)
class Selection:
    """Kinds of calls: those that have one value of each field.

    operations  names of OPERATIONS; by default those of one GPU that all programs have
    dtypes      of q (and o), and of k and v
    head_dims   of q and k, and of v and o
    groups      query heads that share a KV head
    page_sizes  tokens of a page; 0 for keys in rows. 16 stands for all multiples of 8, 1 for others
    options     what a call has at once: names of OPTIONS
    alignments  whether every row of an array starts on a 16-byte boundary
    """

    operations: tuple[str, ...] = tuple(
        name for name in OPERATIONS if name not in ("exchange", "quantize", "sparse")
    )
    dtypes: tuple[tuple[DType, DType], ...] = (
        (dtypes.bfloat16, dtypes.bfloat16),
        (dtypes.float16, dtypes.float16),
    )
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (256, 256), (192, 128))
    groups: tuple[int, ...] = (1,)
    page_sizes: tuple[int, ...] = (0, 1, 16)
    options: tuple[frozenset[str], ...] = (frozenset({"none"}),)
    alignments: tuple[bool, ...] = (True,)


def one_option(*names: str) -> tuple[frozenset[str], ...]:
    """Calls with one of these options each."""
    return tuple(frozenset({name}) for name in names)


def _over_fp8(*formats: DType) -> tuple[tuple[DType, DType], ...]:
    return tuple(product((dtypes.bfloat16, dtypes.float16), formats))


def _full() -> Iterator[Selection]:
    groups, dims = (1, 32, 64), (*Selection.head_dims, (80, 80), (96, 96), (112, 112), (72, 72))
    kinds = (*Selection.dtypes, *_over_fp8(dtypes.float8_e4m3fn, dtypes.float8_e5m2))
    names = "none", "soft_cap", "rope", "alibi", "mask", "scales"
    pairs = dict.fromkeys(
        frozenset({a, b}) for a, b in product(names, names) if {a, b} != {"rope", "alibi"}
    )
    yield Selection(
        dtypes=kinds, head_dims=dims, groups=groups, options=tuple(pairs), alignments=(True, False)
    )
    masks = one_option("draft_mask", "multi_item")
    yield Selection(dtypes=kinds, head_dims=dims, groups=groups, options=masks)


# "standard" is what ordinary models need: fp8 in pages only, soft cap, window and sinks; "full" has
# also positions, masks and scales by head, pairs of options, more head dims and unaligned rows.
LEVELS: Mapping[str, tuple[Selection, ...]] = MappingProxyType(
    {
        "standard": (
            Selection(options=one_option("none", "soft_cap")),
            Selection(
                dtypes=_over_fp8(dtypes.float8_e4m3fn),
                page_sizes=(1, 16),
                options=one_option("none", "soft_cap"),
            ),
        ),
        "full": tuple(_full()),
    }
)


def fields_of(options: Iterable[str]) -> dict[str, Any]:
    """What these options change in a problem. Raises ArgumentError if they exclude each other."""
    fields: dict[str, Any] = {}
    for name in options:
        for field, value in OPTIONS[name].items():
            if fields.setdefault(field, value) != value:
                raise ArgumentError(f"options: {' and '.join(sorted(options))} exclude each other")
    return fields


def problem_of(
    options: Iterable[str],
    kinds: tuple[DType, DType],
    dims: tuple[int, int],
    page_size: int,
    aligned: bool,
) -> AttentionProblem | None:
    """The problem of such calls, or None if there are none: they would be refused."""
    fields = fields_of(options)
    has_pages = page_size > 0
    if fields.get("pos_encoding") == "ROPE_LLAMA" and dims[0] % 16:
        return None
    if fields.get("mask_form") == "rows" and not has_pages:
        return None
    q, kv = kinds
    if gate := fields.get("output_gate"):
        fields["output_gate"] = gate._replace(dtype=q.of_output)
    if "rel_logits" in options:
        fields["logits"] = logits.near_biases(q.of_output)
    head_dim_qk, head_dim_vo = dims
    problem = AttentionProblem(
        q, kv, q.of_output, head_dim_qk, head_dim_vo, aligned=aligned, paged=has_pages, **fields
    )
    is_rotated = problem.is_wide and problem.pos_encoding == "ROPE_LLAMA"
    return None if is_rotated and kv.is_fp8 else problem


def instances(selections: Iterable[Selection], arch: str) -> list[Instance]:
    """(entry name, Config) of all kernels of these kinds of calls on an architecture, once each."""
    result: dict[Instance, None] = {}
    for chosen in selections:
        listed = _listed(chosen, arch)
        kernels = _attention(chosen, arch), _latent(chosen, arch), _cascade(chosen), listed
        for each in (*kernels, _operations(chosen)):
            result |= dict.fromkeys(each)
    return list(result)


def _attention(chosen: Selection, arch: str) -> Iterator[Instance]:
    """Kernels of decode, prefill and cascade, and what is launched with them."""
    has_prompts = {"prefill", "cascade"} & {*chosen.operations}
    if "decode" not in chosen.operations and not has_prompts:
        return
    yield "pad_lse", pad_lse.CONFIG
    yield from (("plan_batch", config) for config in plan_batch.CONFIGS)
    yield "read_tables", read_tables.CONFIG
    rows = {row_class_of(group) for group in chosen.groups}
    if has_prompts:
        rows = {name for group in chosen.groups for name in _row_classes(group)}
    for asked, page_size in problems(chosen):
        for form in forms_of(asked, Target(arch, SHARED_BYTES[arch], page_size)):
            problem = form.problem
            if form.name in (QUERIES, ALL, KEYS):
                aligned = problem.aligned and problem.head_dim_qk % 16 == 0
                aligned = aligned and (problem.dtype_kv.is_fp8 or problem.head_dim_vo % 16 == 0)
                wide = widen_rows.wide_dtype(asked.dtype_q)
                of_k, of_v = asked.dtype_k, asked.dtype_kv
                yield "widen_rows", widen_rows.config(of_k, of_v, aligned, wide)
            yield from _of_classes(problem, page_size, rows, arch, bool(has_prompts))


def _of_classes(
    problem: AttentionProblem, page_size: int, rows: set[str], arch: str, has_prompts: bool
) -> Iterator[Instance]:
    """Kernels of one problem for requests of these row classes."""
    names = {LARGE} if problem.has_tiles_of_prompts else {*rows}
    if LARGE in names:
        props = replace(NO_GPU, arch=arch, max_smem_per_block=SHARED_BYTES[arch])
        names |= {*large_tiles(problem, props, page_size)}
    for name in sorted(names):
        for is_batch in (True,) if problem.paged else (False, True):
            yield from _of_rows(problem, name, is_batch, arch, page_size)
    if has_prompts:
        yield from _mixed(problem, rows, arch, page_size)
    if problem.custom_mask and problem.mask_form != "runs":
        yield "packbits", PACKBITS_CONFIG


def problems(chosen: Selection) -> Iterator[tuple[AttentionProblem, int]]:
    """What kernels of attention are asked for by these calls, and the page size."""
    for kinds, dims, options, page_size, aligned in product(
        chosen.dtypes, chosen.head_dims, chosen.options, chosen.page_sizes, chosen.alignments
    ):
        problem = problem_of(options, kinds, dims, page_size, aligned)
        if problem is not None:
            yield problem, page_size


def _row_classes(group: int) -> set[str]:
    """The row classes of requests of any number of query tokens."""
    return {row_class_of(n * group) for n in range(1, 67)}


def _of_rows(
    problem: AttentionProblem, row_class: str, is_batch: bool, arch: str, page_size: int
) -> Iterator[Instance]:
    tiles = tile_config(problem, row_class, SHARED_BYTES[arch], is_batch, arch, page_size)
    yield tiles.name, tiles.config
    # Many splits, or those of many rows, are merged by a launch, whoever could do it.
    yield from (("merge_splits", x) for x in merge_splits.configs(problem, tiles))
    if is_batch and find_items.may_find(problem):
        for what in (FOUND_ITEMS, FOUND_PARTS):
            finding = tiles.finding(what)
            if finding.finds_items:
                yield finding.name, finding.config
            if finding.finds_items and what == FOUND_PARTS:
                yield from (("merge_splits", x) for x in merge_splits.configs(problem, finding))
    one_an_sm = one_an_sm_rows(problem, row_class)
    if one_an_sm is not None and overlaps_launches(arch):
        yield from _of_rows(problem, one_an_sm, is_batch, arch, page_size)
    if tiles.wants_rotated_keys:
        config = rotate_keys.config(problem.dtype_q, problem.head_dim_qk, problem.paged)
        yield "rotate_keys", config
    scan = scan_mask.config(tiles)
    if scan is not None:
        yield "scan_mask", scan


def _mixed(
    problem: AttentionProblem, rows: set[str], arch: str, page_size: int
) -> Iterator[Instance]:
    """The kernels of batches with requests of two row classes (launch/attention/kernels.py)."""
    for large, small in product((LARGE, SMALL), (VERIFY, DECODE)):
        if not {large, small} <= rows:
            continue
        alone = tile_config(problem, large, SHARED_BYTES[arch], True, arch, page_size)
        # Persistent blocks are of one kind: the other requests have a launch of their own.
        if alone.is_sm90:
            continue
        tiles = mixed_config(problem, large, small, SHARED_BYTES[arch], arch)
        if tiles is not None:
            yield tiles.name, tiles.config
            merges = merge_splits.configs(problem, tiles.prefill)
            yield from (("merge_splits", x) for x in merges)


def _latent(chosen: Selection, arch: str) -> Iterator[Instance]:
    """Kernels of latent attention, of any number of heads."""
    if "mla" not in chosen.operations or all(map(fields_of, chosen.options)):
        return
    yield "pad_lse", pad_lse.CONFIG
    yield from (("plan_batch", config) for config in plan_batch.CONFIGS)
    yield "read_tables", read_tables.CONFIG
    for (q, kv), aligned, sparse in product(chosen.dtypes, chosen.alignments, (False, True)):
        problem = AttentionProblem(
            q, kv, q, 576, 512, aligned=aligned, paged=True, latent=True, sparse=sparse
        )
        # Pages of one row are gathered; others may come in boxes.
        for rows, page_size in product((DECODE, VERIFY, LARGE), (1, 64)):
            yield from _of_rows(problem, rows, True, arch, page_size)
        if arch != "sm_90a" or kv is not dtypes.float8_e4m3fn or not aligned:
            continue
        for key_scales in KEY_SCALES[1:] if q is dtypes.bfloat16 else ("tokens",):
            for rows in (DECODE, VERIFY):
                if key_scales == "pages" and not sparse:
                    continue  # only lists name such rows
                of_keys = replace(problem, key_scales=key_scales)
                if key_scales == "pages":
                    of_keys = replace(of_keys, head_dim_qk=of_keys.head_dim_vo)
                yield from _of_rows(of_keys, rows, True, arch, 1)


def _listed(chosen: Selection, arch: str) -> Iterator[Instance]:
    """Kernels of tokens that have lists of keys: one for all page sizes, and none."""
    if "sparse" not in chosen.operations:
        return
    listed = dict.fromkeys(replace(x, paged=True, sparse=True) for x, _ in problems(chosen))
    for problem in filter(key_lists.serves, listed):
        for group in chosen.groups:
            name = key_lists.row_class_of(group, problem, SHARED_BYTES[arch])
            yield from _of_rows(problem, name, True, arch, 1)
        target = Target(arch, SHARED_BYTES[arch], min(key_unions.GRANULARITIES))
        tiles = key_unions.all_tiles(problem, target)
        if tiles:
            yield from ((x.name, x.config) for x in tiles)
            yield from (("union_lists", config) for config in key_unions.CONFIGS)
            if problem.dtype_kv.is_fp8:
                yield "widen_pages", widen_pages.config(problem.dtype_kv, problem.dtype_q)
    yield from (("select_scores", config) for config in select.configs(chosen.dtypes, arch))
    yield from (("select_softmax", config) for config in select_softmax.configs())
    yield from (("select_topk", config) for config in select_topk.configs(arch))


def _cascade(chosen: Selection) -> Iterator[Instance]:
    if "cascade" in chosen.operations:
        for problem, _ in problems(chosen):
            if problem.paged and not problem.custom_mask:
                yield "merge_levels", merge_levels.config(problem)


def _operations(chosen: Selection) -> Iterator[Instance]:
    """Kernels beside attention."""
    if "append" in chosen.operations:
        for (q, kv), aligned in product(chosen.dtypes, chosen.alignments):
            # The rows to append are of q's dtype, or of the cache's already.
            for dtype in (q, kv):
                yield "append_paged_kv_cache", append_paged_kv_cache.config(dtype, kv, aligned)
                yield "store_kv", store_kv.config(dtype, kv, aligned)
            yield "append_new_kv", append_new_kv.config(kv, None, aligned)
            # Head dims of no kernel, and outputs over them; fp8 keys that many rows read.
            yield "copy_rows", copy_rows.config(kv, kv, aligned)
            if kv.is_fp8 and q.itemsize == 2:
                yield "copy_rows", copy_rows.config(kv, q, aligned)
            for table in dict.fromkeys((dtypes.float32, q)):
                if q in append_new_kv.ROTATED_DTYPES and not (kv.is_fp8 and aligned):
                    yield "append_new_kv", append_new_kv.config(kv, table, aligned, q)
    yield from _quantizers(chosen)
    if "merge" in chosen.operations:
        outputs = dict.fromkeys([*(q for q, _ in chosen.dtypes), dtypes.float32])
        dims = [dim for _, dim in chosen.head_dims]
        for dtype, head_dim, aligned in product(outputs, dims, chosen.alignments):
            for config in merge_states.configs(dtype, head_dim, aligned):
                yield "merge_states", config
    if "exchange" in chosen.operations:
        yield from _exchanges(chosen)
    if "page" in chosen.operations:
        yield "get_batch_indices_positions", get_batch_indices_positions.CONFIG
        yield "get_seq_lens", get_seq_lens.CONFIG
        yield "serving_metadata", serving_metadata.CONFIG
        yield from (("share_indices", config) for config in share_indices.CONFIGS)
    if "sparse" in chosen.operations:
        yield from (("gather_keys", config) for config in gather_keys.CONFIGS)
        yield "list_slots", list_slots.CONFIG
    if "packbits" in chosen.operations:
        yield "packbits", PACKBITS_CONFIG


def _quantizers(chosen: Selection) -> Iterator[Instance]:
    """Kernels between a layer's projections and its attention."""
    if "quantize" in chosen.operations:
        for (q, kv), dims in product(chosen.dtypes, chosen.head_dims):
            if max(dims) <= quantize.MAX_HEAD_DIM:
                yield from (("quantize", config) for config in quantize.configs(q, kv, max(dims)))
                for divides in (False, True):
                    mean = find_mean.config(
                        q,
                        quantize.lanes_of(dims[0]),
                        is_aligned=True,
                        hadamard=False,
                        divides=divides,
                    )
                    yield "find_mean", mean


def _exchanges(chosen: Selection) -> Iterator[Instance]:
    """Kernels of ranks of one host, two, four or eight."""
    of_latent = (512,) if "mla" in chosen.operations else ()
    outputs = dict.fromkeys(q for q, _ in chosen.dtypes)
    dims = [*dict.fromkeys((*(dim for _, dim in chosen.head_dims), *of_latent))]
    for dtype, head_dim in product(outputs, dims):
        for config in exchange_states.configs(dtype, head_dim):
            yield "exchange_states", config
    for (q, _), (head_dim, _) in product(chosen.dtypes, chosen.head_dims):
        vectors = head_dim * q.itemsize // 16
        yield from (("gather_heads", gather_heads.config(vectors, n)) for n in (2, 4, 8))

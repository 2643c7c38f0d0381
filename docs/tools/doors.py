"""Which option each public call has: found by calling it, on small arrays of the CPU.

A call has an option if it takes it and answers differently for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupyattn
from cupyattn import flash_attn
from cupyattn.errors import CupyAttnError

# Two requests of 4 rows and of 4 rows that end 9 and 6 keys, in pages of 4.
HEADS, KV_HEADS, DIM, PAGE, ROWS = 4, 2, 16, 4, 4
LENGTHS = np.array([9, 6], np.int32)
QO_INDPTR = np.array([0, ROWS, 2 * ROWS], np.int32)
KV_INDPTR = np.array([0, 3, 5], np.int32)
KEY_INDPTR = np.array([0, 9, 15], np.int32)
INDICES = np.arange(5, dtype=np.int32)
LAST = np.array([1, 2], np.int32)
TABLE = np.array([[0, 1, 2], [3, 4, 4]], np.int32)
FP8 = ml_dtypes.float8_e4m3fn

# Option -> the value that asks for it, by the names that calls give to its argument.
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {
        "window_left": 1,
        "local_window_size": (1, 0),
        "window_size": (1, 0),
        "sliding_win_size": 2,
    },
    "mask": {"custom_mask": None, "mask": None},
    "soft cap": {"logits_soft_cap": 0.5, "softcap": 0.5, "logits_soft_cap_scale": 0.5},
    "RoPE": {"pos_encoding_mode": "ROPE_LLAMA"},
    "ALiBi": {
        "pos_encoding_mode": "ALIBI",
        "alibi_slopes": np.linspace(0.1, 1, HEADS, dtype=np.float32),
    },
    "sinks": dict.fromkeys(
        ("sinks", "sink", "attention_sinks"), np.linspace(0, 2, HEADS, dtype=np.float32)
    ),
    "output gate": {"output_gate": None},
    "biases of near keys": {"rel_logits": None},
    "fp8 keys": {"fp8": True},
    "output dtype": dict.fromkeys(
        ("o_dtype", "o_data_type", "out_dtype", "output_dtype"), "float32"
    ),
    "LSE": {"return_lse": True, "return_softmax_lse": True},
}


class Door(NamedTuple):
    """A public call: `call(keys, options)` makes it, where keys is the dtype of k and v."""

    name: str
    parameters: Mapping[str, inspect.Parameter]
    call: Callable[[Any, dict[str, Any]], Any]
    mask: Any = None


def options_of(door: Door) -> list[str]:
    """The options that the call has."""
    plain = _out(door.call(np.float16, {}))
    return [name for name in OPTIONS if _has(door, name, plain)]


def _has(door: Door, option: str, plain: np.ndarray) -> bool:
    for argument, value in OPTIONS[option].items():
        if option == "fp8 keys":
            return _differs(door, FP8, {}, plain)
        if option == "mask":
            value = door.mask
        if option == "output gate":
            value = np.linspace(-1, 1, plain[..., 0].size, dtype=np.float32)
            value = value.reshape(plain.shape[:-1])
        if argument == "rel_logits":
            value = _random(plain[..., 0].size // HEADS, HEADS, 2, dtype=np.float32)
        if argument in door.parameters and value is not None:
            if option == "LSE":
                answer = door.call(np.float16, {argument: value})
                return isinstance(answer, tuple)
            if _differs(door, np.float16, {argument: value}, plain):
                return True
    return option == "LSE" and isinstance(door.call(np.float16, {}), tuple)


def _differs(door: Door, keys: Any, options: dict[str, Any], plain: np.ndarray) -> bool:
    try:
        out = _out(door.call(keys, options))
    except CupyAttnError:
        return False
    return out.dtype != plain.dtype or not np.array_equal(out, plain)


def _out(answer: Any) -> np.ndarray:
    return np.asarray(answer[0] if isinstance(answer, tuple) else answer)


def _random(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _q(rows: int = 2 * ROWS) -> np.ndarray:
    return _random(rows, HEADS, DIM)


def _pool(keys: Any, layout: str = "NHD") -> np.ndarray:
    pool = _random(5, 2, PAGE, KV_HEADS, DIM, dtype=keys)
    return pool if layout == "NHD" else np.ascontiguousarray(pool.swapaxes(2, 3))


def _function(name: str, function: Callable[..., Any], arrays: Any, mask: Any = None) -> Door:
    """A door of a plain function, of `arrays(keys)` and options."""
    parameters = inspect.signature(function).parameters
    return Door(name, parameters, lambda keys, o: function(**arrays(keys), **o), mask)


def _wrapper(
    name: str,
    plan: dict[str, Any],
    run: Callable[[Any], dict[str, Any]],
    mask: Any = None,
    made: tuple[Any, ...] = (),
) -> Door:
    """A door of a wrapper that is `made` so: options go to plan() or run(), whichever has them."""
    kind = getattr(cupyattn, name)
    of_plan = inspect.signature(kind.plan).parameters
    of_run = inspect.signature(kind.run).parameters

    def call(keys: Any, options: dict[str, Any]) -> Any:
        wrapper = kind(*made)
        planned = {x: options[x] for x in options if x in of_plan}
        named = {"kv_data_type": "float8_e4m3fn"} if keys is FP8 else {}
        wrapper.plan(**(plan | planned | named))
        rest = {x: options[x] for x in options if x not in planned}
        return wrapper.run(**run(keys), **rest)

    return Door(name, {**of_plan, **of_run}, call, mask)


def doors() -> list[Door]:
    """The public calls that attend, in the order of the table."""
    return [*_of_requests(), *_of_wrappers(), *_of_planless(), *_of_flash_attn()]


def _mask(rows: int, keys: int) -> np.ndarray:
    return np.arange(rows * keys).reshape(rows, keys) % 3 != 1


def _of_requests() -> list[Door]:
    def one(keys: Any) -> dict[str, Any]:
        k = _random(9, KV_HEADS, DIM, dtype=keys)
        return {"q": _q(ROWS), "k": k, "v": k[::-1]}

    def dense(keys: Any) -> dict[str, Any]:
        k = _random(2, 9, KV_HEADS, DIM, dtype=keys)
        return {"query": _q().reshape(2, ROWS, HEADS, DIM), "key": k, "value": k[:, ::-1]}

    decode = cupyattn.single_decode_with_kv_cache
    return [
        _function("dot_product_attention", cupyattn.dot_product_attention, dense, _mask(ROWS, 9)),
        _function(
            "single_prefill_with_kv_cache",
            cupyattn.single_prefill_with_kv_cache,
            one,
            _mask(ROWS, 9),
        ),
        _function("single_decode_with_kv_cache", decode, lambda x: one(x) | {"q": _q(1)[0]}),
    ]


def _of_wrappers() -> list[Door]:
    flat = np.concatenate([_mask(ROWS, n).ravel() for n in LENGTHS])
    tree = np.tile(np.eye(ROWS, dtype=bool), (2, 1, 1))
    paged = {
        "paged_kv_indptr": KV_INDPTR,
        "paged_kv_indices": INDICES,
        "paged_kv_last_page_len": LAST,
    }
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS}
    rows = {"qo_indptr": QO_INDPTR}
    over_pages = lambda keys: {"q": _q(), "paged_kv_cache": _pool(keys)}  # noqa: E731

    def ragged(keys: Any) -> dict[str, Any]:
        k = _random(15, KV_HEADS, DIM, dtype=keys)
        return {"q": _q(), "k": k, "v": k[::-1]}

    decode = {"indptr": KV_INDPTR, "indices": INDICES, "last_page_len": LAST, "head_dim": DIM}
    decode |= {"page_size": PAGE, "q_len_per_req": ROWS}
    prefill = {"head_dim_qk": DIM, "page_size": PAGE, "causal": True}
    mixed = {"kv_indptr": KV_INDPTR, "kv_indices": INDICES, "kv_len_arr": LENGTHS}
    mixed |= {"head_dim_qk": DIM, "head_dim_vo": DIM, "page_size": PAGE, "causal": True}
    mixed |= {"q_data_type": "float16", "kv_data_type": "float16"}
    cascade = {f"{name}_arr": [x] for name, x in (rows | paged).items()}
    cascade["paged_kv_last_page_len"] = cascade.pop("paged_kv_last_page_len_arr")
    cascade |= {"head_dim": DIM, "page_size": PAGE, "causal": True}
    return [
        _wrapper("BatchDecodeWithPagedKVCacheWrapper", decode | heads, over_pages, tree),
        _wrapper(
            "BatchPrefillWithPagedKVCacheWrapper", rows | paged | heads | prefill, over_pages, flat
        ),
        _wrapper(
            "BatchPrefillWithRaggedKVCacheWrapper",
            rows | heads | {"kv_indptr": KEY_INDPTR, "head_dim_qk": DIM, "causal": True},
            ragged,
            flat,
        ),
        _wrapper(
            "BatchAttention",
            rows | heads | mixed,
            lambda keys: {"q": _q(), "kv_cache": _pool(keys)},
            made=("NHD", "cpu"),
        ),
        _wrapper("MultiLevelCascadeAttentionWrapper", cascade | heads, over_pages, made=(1,)),
    ]


def _of_planless() -> list[Door]:
    tree = np.tile(np.eye(ROWS, dtype=bool), (2, 1, 1))
    batch = {"block_tables": TABLE, "seq_lens": LENGTHS, "workspace_buffer": None}
    scales = {"bmm1_scale": DIM**-0.5, "bmm2_scale": 1.0}
    offsets = {"cum_seq_lens_q": QO_INDPTR, "cum_seq_lens_kv": KEY_INDPTR, "batch_size": 2}
    most = {"max_q_len": ROWS, "max_kv_len": 9}

    def decode(keys: Any) -> dict[str, Any]:
        pool = _pool(keys, "HND")
        return (
            batch
            | scales
            | {"query": _q(), "kv_cache": pool}
            | {"max_seq_len": 9, "q_len_per_req": ROWS}
        )

    def context(keys: Any) -> dict[str, Any]:
        pool = _pool(keys, "HND")
        return batch | scales | offsets | most | {"query": _q(), "kv_cache": pool}

    def ragged(keys: Any) -> dict[str, Any]:
        k = _random(15, KV_HEADS, DIM, dtype=keys)
        rest = {"seq_lens": LENGTHS, "workspace_buffer": None, "o_sf_scale": 1.0, "window_left": -1}
        rest |= {"enable_pdl": False, "is_causal": True, "return_lse": False}
        return scales | offsets | most | rest | {"query": _q(), "key": k, "value": k[::-1]}

    def fmha(keys: Any) -> dict[str, Any]:
        given = {"seq_lens": LENGTHS, "workspace_buffer": None, "mask_mode": "causal"}
        given |= {"input_layout": "Q_PAGED_KV_NHD", "block_tables": TABLE}
        return given | scales | offsets | most | {"qkv": (_q(), _pool(keys))}

    def xqa(keys: Any) -> dict[str, Any]:
        pool = _pool(keys)
        given = {"page_table": TABLE, "seq_lens": LENGTHS, "workspace_buffer": None}
        given |= {"semaphores": None, "num_kv_heads": KV_HEADS, "page_size": PAGE}
        given |= {
            "q_seq_len": ROWS,
            "mask": None,
            "output": np.zeros((2, 1, ROWS, HEADS, DIM), np.float16),
        }
        q = _q().reshape(2, 1, ROWS, HEADS, DIM)
        return given | {"q": q, "k_cache": pool[:, 0], "v_cache": pool[:, 1]}

    def cudnn(keys: Any) -> dict[str, Any]:
        pool = _pool(keys, "HND")
        lengths = LENGTHS.reshape(2, 1, 1, 1)
        given = {"scale": DIM**-0.5, "workspace_buffer": None, "max_sequence_kv": 9}
        given |= {"actual_seq_lens_kv": lengths, "block_tables": TABLE}
        return given | {"k_cache": pool[:, 0], "v_cache": pool[:, 1]}

    def cudnn_prefill(keys: Any) -> dict[str, Any]:
        rows = np.full((2, 1, 1, 1), ROWS, np.int32)
        given = {"q": _q(), "max_token_per_sequence": ROWS, "actual_seq_lens_q": rows}
        given["batch_offsets_q"] = QO_INDPTR * HEADS * DIM
        return cudnn(keys) | given | {"causal": True, "return_lse": False}

    def xqa_out(**given: Any) -> Any:
        answer = cupyattn.xqa(**given)
        return (given["output"], answer) if given.get("return_lse") else given["output"]

    xqa_parameters = inspect.signature(cupyattn.xqa).parameters
    return [
        _planless("trtllm_batch_decode_with_kv_cache", decode, tree),
        _planless("trtllm_batch_context_with_kv_cache", context),
        _planless("trtllm_ragged_attention_deepseek", ragged),
        _planless("trtllm_fmha_v2_prefill", fmha),
        Door("xqa", xqa_parameters, lambda keys, o: xqa_out(**(xqa(keys) | o)), tree),
        _planless("cudnn_batch_decode_with_kv_cache", lambda x: cudnn(x) | {"q": _q(2)}),
        _planless("cudnn_batch_prefill_with_kv_cache", cudnn_prefill),
    ]


def _planless(name: str, arrays: Any, mask: Any = None) -> Door:
    """A door of a function, whose options replace what `arrays` gives."""
    function = getattr(cupyattn, name)
    parameters = inspect.signature(function).parameters
    return Door(name, parameters, lambda keys, o: function(**(arrays(keys) | o)), mask)


def _of_flash_attn() -> list[Door]:
    def varlen(keys: Any) -> dict[str, Any]:
        k = _random(15, KV_HEADS, DIM, dtype=keys)
        given = {"cu_seqlens_q": QO_INDPTR, "cu_seqlens_k": KEY_INDPTR, "causal": True}
        given |= {"max_seqlen_q": ROWS, "max_seqlen_k": 9}
        return given | {"q": _q(), "k": k, "v": k[::-1]}

    def cache(keys: Any) -> dict[str, Any]:
        pool = _pool(keys)
        given = {"cache_seqlens": LENGTHS, "page_table": TABLE, "causal": True}
        q = _q().reshape(2, ROWS, HEADS, DIM)
        return given | {"q": q, "k_cache": pool[:, 0], "v_cache": pool[:, 1]}

    return [
        _function(f"flash_attn.{function.__name__}", function, arrays)
        for function, arrays in (
            (flash_attn.flash_attn_varlen_func, varlen),
            (flash_attn.flash_attn_with_kvcache, cache),
        )
    ]

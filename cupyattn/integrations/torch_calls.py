"""The calls that torch.ops.cupyattn has: their arguments as torch's schemas, and their answers.

An operator has four forms, by what it returns and writes: `default` returns the answer, `lse` the
answer and its LSE, `out` writes its last argument, and `out_lse` does so and returns the LSE. A
call that appends to a cache has each form once more, behind `append`, which writes the cache.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, PlanError, UnsupportedError

# Shapes of the answer and of the LSE, by the arguments of a call.
Shapes = Callable[[dict[str, Any]], tuple[tuple[Any, ...], tuple[Any, ...]]]


def _rows_first(q: str, v: str) -> Shapes:
    """LSE [..., rows, heads]."""

    def shapes(given: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        lead = tuple(given[q].shape[:-1])
        return (*lead, _values(given[v]).shape[-1]), lead

    return shapes


def _heads_first(q: str, v: str) -> Shapes:
    """LSE [..., heads, rows]."""

    def shapes(given: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        *lead, rows, heads, _ = given[q].shape
        return (*lead, rows, heads, _values(given[v]).shape[-1]), (*lead, heads, rows)

    return shapes


def _latent(given: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    lead = tuple(given["query"].shape[:-1])
    return (*lead, given["kv_lora_rank"]), lead


def _values(x: Any) -> Any:
    """The values of a cache, which may be one tensor or a list (K, V)."""
    return x[-1] if isinstance(x, (list, tuple)) else x


@dataclass(frozen=True)
class Call:
    """A public call as an operator.

    module, name   where the call is
    schema    its arguments in torch's language, without `out` and what asks for the LSE
    shapes    of the answers
    flag      the argument that asks for the LSE; synonyms of it are in `aliases`
    aliases   other names of arguments
    ignored   arguments that change no answer, and are left out
    written   arguments that `appends` leads to be written
    appends   the argument that has new keys
    third     the argument with which the call returns an empty third array beside the LSE
    also      another module whose call of this name takes the same in another order
    """

    module: str
    name: str
    schema: str
    shapes: Shapes
    flag: str = "return_lse"
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    appends: str = ""
    third: str = ""
    also: str = ""

    @property
    def function(self) -> Any:
        return getattr(importlib.import_module(f"cupyattn.{self.module}"), self.name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names, in the order of the schema."""
        return tuple(_needed(x).rpartition(" ")[2] for x in self.schema.split(", "))

    @property
    def parameters(self) -> dict[str, Any]:
        """The public call's arguments and their defaults."""
        found = inspect.signature(self.function).parameters
        return {name: None if x.default is x.empty else x.default for name, x in found.items()}

    @property
    def forms(self) -> dict[str, str]:
        """Form -> schema."""
        found = forms(self.schema)
        for form, schema in forms(self.schema).items() if self.appends else ():
            for letter, name in zip("ab", self.written, strict=False):
                schema = schema.replace(f"Tensor {name}", f"Tensor({letter}!) {name}")
            found[f"append_{form}" if form else "append"] = schema
        return found


def forms(schema: str) -> dict[str, str]:
    """Form -> schema of a call with these arguments; "" is the one that returns the answer."""
    # A default ahead of `out` would need one for it.
    with_out = ", ".join([*map(_needed, schema.split(", ")), "Tensor(z!) out"])
    return {
        "": f"({schema}) -> Tensor",
        "lse": f"({schema}) -> (Tensor, Tensor)",
        "out": f"({with_out}) -> ()",
        "out_lse": f"({with_out}) -> Tensor",
    }


def _needed(argument: str) -> str:
    return argument.partition("=")[0]


_FLASH = (
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale="
    "None, bool causal=False, SymInt[] window_size=[-1,-1], SymInt attention_chunk=0, float "
    "softcap=0.0, SymInt num_splits=0, Tensor? alibi_slopes=None, Tensor? sinks=None"
)
_FLASH_ALIASES = (
    ("s_aux", "sinks"),
    ("page_table", "block_table"),
)
_IGNORED = ("pack_gqa", "deterministic", "sm_margin", "scheduler_metadata", "fa_version", "ver")
_SINGLE = "float? sm_scale=None, float? q_scale=None, float? k_scale=None, float? v_scale=None"
_SINGLE_MORE = (
    'SymInt window_left=-1, float? logits_soft_cap=None, str kv_layout="NHD", str '
    'pos_encoding_mode="NONE", float? rope_scale=None, float? rope_theta=None, Tensor? sinks=None, '
    "Tensor? output_gate=None"
)
_SCALES = (
    "float bmm1_scale=1.0, float bmm2_scale=1.0, SymInt window_left=-1, Tensor? sinks=None, str "
    'kv_layout="HND"'
)

CALLS = (
    Call(
        "dot_product",
        "dot_product_attention",
        "Tensor query, Tensor key, Tensor value, Tensor? mask=None, float? scale=None, bool "
        "is_causal=False, Tensor? query_seq_lengths=None, Tensor? key_value_seq_lengths=None, "
        "SymInt[]? local_window_size=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? block_table=None, Tensor? "
        "kv_lens=None, float? logits_soft_cap=None, Tensor? sinks=None, str "
        'causal_alignment="last"',
        _rows_first("query", "value"),
        aliases=(("return_residual", "return_lse"),),
        ignored=("implementation",),
    ),
    Call(
        "flash_attn",
        "flash_attn_func",
        f"Tensor q, Tensor k, Tensor v, {_FLASH}",
        _heads_first("q", "v"),
        flag="return_softmax_lse",
        aliases=_FLASH_ALIASES,
        ignored=_IGNORED,
        third="return_attn_probs",
        also="flash_attn_interface",
    ),
    Call(
        "flash_attn",
        "flash_attn_varlen_func",
        "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, SymInt? "
        "max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? "
        f"seqused_k=None, Tensor? block_table=None, {_FLASH}",
        _heads_first("q", "v"),
        flag="return_softmax_lse",
        aliases=_FLASH_ALIASES,
        ignored=(*_IGNORED, "cp_rank"),
        third="return_attn_probs",
        also="flash_attn_interface",
    ),
    Call(
        "flash_attn",
        "flash_attn_with_kvcache",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k=None, Tensor? v=None, Tensor? "
        "cache_seqlens=None, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? "
        "block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k_new=None, SymInt? "
        f"max_seqlen_q=None, {_FLASH}",
        _heads_first("q", "v_cache"),
        flag="return_softmax_lse",
        aliases=_FLASH_ALIASES,
        ignored=_IGNORED,
        written=("k_cache", "v_cache"),
        appends="k",
        also="flash_attn_interface",
    ),
    Call(
        "prefill",
        "single_prefill_with_kv_cache",
        f"Tensor q, Tensor k, Tensor v, Tensor? custom_mask=None, Tensor? packed_custom_mask=None, "
        f"bool causal=False, {_SINGLE}, {_SINGLE_MORE}, SymInt window_right=-1",
        _rows_first("q", "v"),
        ignored=("use_fp16_qk_reduction", "backend", "enable_pdl"),
    ),
    Call(
        "decode",
        "single_decode_with_kv_cache",
        f"Tensor q, Tensor k, Tensor v, {_SINGLE}, {_SINGLE_MORE}",
        _rows_first("q", "v"),
        ignored=("use_tensor_cores", "enable_pdl"),
    ),
    Call(
        "trtllm",
        "trtllm_batch_decode_with_kv_cache",
        "Tensor query, Tensor[] kv_cache, Tensor? workspace_buffer, Tensor block_tables, Tensor "
        f"seq_lens, SymInt max_seq_len, {_SCALES}, SymInt? q_len_per_req=1, Tensor? mask=None, "
        "SymInt? max_q_len=None, Tensor? cum_seq_lens_q=None",
        _rows_first("query", "kv_cache"),
        ignored=("enable_pdl", "backend", "multi_ctas_kv_counter_buffer"),
    ),
    Call(
        "trtllm",
        "trtllm_batch_context_with_kv_cache",
        "Tensor query, Tensor[] kv_cache, Tensor? workspace_buffer, Tensor block_tables, Tensor "
        "seq_lens, SymInt max_q_len, SymInt max_kv_len, float bmm1_scale, float bmm2_scale, SymInt "
        "batch_size, Tensor cum_seq_lens_q, Tensor? cum_seq_lens_kv, SymInt window_left=-1, "
        'Tensor? sinks=None, str kv_layout="HND", bool causal=True',
        _rows_first("query", "kv_cache"),
        ignored=("enable_pdl", "multi_ctas_kv_counter_buffer", "use_fp16_softmax"),
    ),
    Call(
        "mla",
        "trtllm_batch_decode_with_kv_cache_mla",
        "Tensor query, Tensor[] kv_cache, Tensor? workspace_buffer, SymInt qk_nope_head_dim, "
        "SymInt kv_lora_rank, SymInt qk_rope_head_dim, Tensor block_tables, Tensor? seq_lens, "
        "SymInt max_seq_len, SymInt sparse_mla_top_k=0, float bmm1_scale=1.0, float bmm2_scale="
        "1.0, Tensor? sinks=None, Tensor? cum_seq_lens_q=None, SymInt? max_q_len=None, Tensor? "
        "sparse_mla_top_k_lens=None",
        _latent,
        ignored=(
            *("enable_pdl", "backend", "is_var_seq", "cute_dsl_impl"),
            *("kv_scale_format", "multi_ctas_kv_counter_buffer", "use_fp16_softmax"),
            "skip_softmax_threshold_scale_factor",
        ),
    ),
)

# Calls with one form: where they are, and schemas with what they write.
ONE_FORM = (
    (
        "cascade",
        "merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, *, bool lse_base_on_e=False) "
        "-> (Tensor, Tensor)",
    ),
    (
        "cascade",
        "merge_states(Tensor v, Tensor s, *, bool lse_base_on_e=False) -> (Tensor, Tensor)",
    ),
    (
        "slots",
        "reshape_and_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor "
        'slot_mapping, str kv_layout="NHD", *, float? k_scale=None, float? v_scale=None, Tensor? '
        "slot_map=None) -> ()",
    ),
)


def merged_shapes(name: str, first: Any) -> tuple[Any, Any] | None:
    """Shapes of (v, s) of a merge, by its first argument; None of a call that writes."""
    if name == "reshape_and_cache":
        return None
    shape = tuple(first.shape)
    if name == "merge_states":
        shape = (shape[0], *shape[2:])
    return shape, shape[:-1]


APPEND = (
    "append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor "
    "positions, Tensor(a!)[] paged_kv_cache, Tensor kv_indices, Tensor kv_indptr, Tensor "
    'kv_last_page_len, str kv_layout="NHD", float? k_scale=None, float? v_scale=None) -> ()'
)
# A planned wrapper runs on: its place in `wrappers`, q, and k and v or one tensor of both.
RUN = (
    "int wrapper, Tensor q, Tensor[] kv_cache, "
    "float? q_scale=None, float? k_scale=None, float? v_scale=None, "
    "Tensor? sinks=None, Tensor? mask=None, SymInt? q_len_per_req=None, Tensor? output_gate=None"
)


def refuse_grad(arguments: Any) -> None:
    """ArgumentError for tensors that ask for a gradient; torch is imported."""
    import torch

    if not torch.is_grad_enabled():
        return
    for name, x in arguments:
        parts = x if isinstance(x, (list, tuple)) else (x,)
        if any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts):
            raise ArgumentError(
                f"{name}: requires grad, and cupyattn has no backward pass; pass {name}.detach() "
                "or call inside torch.no_grad()"
            )


def answer_dtype(query: Any, key: Any) -> Any:
    """The dtype of an answer that is not asked for: query's, or what fp8 queries are widened to."""
    import torch

    eight = (torch.float8_e4m3fn, torch.float8_e5m2)
    if query.dtype not in eight:
        return query.dtype
    return torch.bfloat16 if key.dtype in eight else key.dtype


def planned_spec(wrapper: Any) -> Any:
    """What a wrapper is planned for."""
    plan = getattr(wrapper, "_current", None)
    if plan is None:
        raise PlanError("run: nothing is planned; call plan() before the compiled function")
    return plan.geometry.spec


def unknown(call: str, name: str) -> Exception:
    return UnsupportedError(
        f"{name}: {call} does not take it inside torch.compile; leave it out, or make the call "
        "outside of the graph (torch.compiler.disable)"
    )

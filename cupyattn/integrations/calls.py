"""Public calls as graphs of torch and JAX have them, read from the calls' signatures.

A graph must know of a call which arguments are arrays, which of them it writes, and what arrays it
returns. Signatures name the arguments; KINDS says what a name stands for; and a rule for each
family of calls says what they return. Nothing here knows a framework.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# What arguments of these names are: types of torch's schemas. An argument with another name makes
# no difference to most calls, and their operators do not have it.
_NAMES_OF_KINDS = {
    "Tensor": """
        q k v query key value k_cache v_cache bias mask sinks output_gate rel_logits alibi_slopes
        query_seq_lengths key_value_seq_lengths kv_lens seq_lens cache_seqlens
        cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k
        cum_seq_lens_q cum_seq_lens_kv cache_batch_idx cache_leftpad
        block_table block_tables sparse_mla_top_k_lens slot_mapping slot_map
        kv_indices kv_indptr kv_last_page_len batch_indices positions
        append_key append_value q_descale k_descale v_descale
        cp_tot_seqused_k causal_seqlens_kv_global
        custom_mask packed_custom_mask workspace_buffer s v_a s_a v_b s_b
        lists table lengths indptr kv_indptr q_index index_cache weights candidates k_scales
    """,
    "Tensor[]": "kv_cache paged_kv_cache cache",
    "SymInt": """
        attention_chunk num_splits window_left window_right batch_size
        max_seqlen_q max_seqlen_k max_seq_len max_q_len max_kv_len q_len_per_req
        qk_nope_head_dim kv_lora_rank qk_rope_head_dim sparse_mla_top_k
        cp_world_size cp_world cp_rank cp_kv_cache_interleave_size
        granularity window head_dim_v topk block groups first last ratio candidate_block
    """,
    "SymInt[]": "window_size local_window_size",
    "float": """
        scale sm_scale softmax_scale softcap logits_soft_cap q_scale k_scale v_scale
        bmm1_scale bmm2_scale rope_scale rope_theta
    """,
    "bool": "causal is_causal lse_base_on_e enable_dcp tail",
    "str": "kv_layout pos_encoding_mode causal_alignment return_lse_base score",
}
KINDS = {name: kind for kind, names in _NAMES_OF_KINDS.items() for name in names.split()}
# Arguments that change no result.
IGNORED = frozenset(
    """
    backend cute_dsl_impl implementation fa_version ver kv_scale_format deterministic enable_pdl
    pack_gqa sm_margin use_tensor_cores use_fp16_qk_reduction use_fp16_softmax
    skip_softmax_threshold_scale_factor is_var_seq scheduler_metadata
    multi_ctas_kv_counter_buffer
    """.split()
)
SYNONYMS = {"page_table": "block_table", "s_aux": "sinks"}
FLAGS = ("return_lse", "return_softmax_lse", "return_residual", "return_attn_probs")
OUTPUTS = ("out", "lse", "output", "values")
# Required arguments that may be None, which not all annotations say.
_MAY_BE_NONE = ("workspace_buffer", "cum_seq_lens_kv")
_VALUES = (
    *("value", "v_cache", "kv_cache", "paged_kv_cache", "paged_ckv_cache", "v_shared", "v"),
    "cache",
)
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_LATENT = 512  # columns of latent keys that are values, where no argument says it


# --- outputs ---


class NewArray:
    """An array that a call makes. Its dtype is a name, or as the framework has it."""

    def __init__(self, shape: tuple[Any, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


# What a call returns, by its arguments and their defaults in the signature's order: arrays that it
# makes, arguments that were passed to be written instead, None, or tuples of these. `planned`
# among the arguments of a wrapper is what it is planned for: (columns, dtype).
Outputs = Callable[[dict[str, Any]], Any]


def _float32(shape: tuple[Any, ...]) -> NewArray:
    return NewArray(tuple(shape), "float32")


def _values(arguments: dict[str, Any]) -> Any:
    """The values of a call, the last of a cache's arrays."""
    for name in _VALUES:
        x = arguments.get(name)
        if x is not None:
            return x[-1] if isinstance(x, (list, tuple)) else x
    return None


def _dtype(arguments: dict[str, Any], query: Any, values: Any) -> Any:
    """What is asked for, query's, or what fp8 queries are widened to."""
    for name in ("o_dtype", "out_dtype", "o_data_type"):
        if arguments.get(name) is not None:
            return arguments[name]
    if str(query.dtype).removeprefix("torch.") not in _FP8:
        return query.dtype
    return "bfloat16" if str(values.dtype).removeprefix("torch.") in _FP8 else values.dtype


def _or_new(arguments: dict[str, Any], name: str, new: NewArray) -> Any:
    x = arguments.get(name)
    return new if x is None else x


def _wants_lse(arguments: dict[str, Any]) -> bool:
    return any(arguments.get(flag) for flag in FLAGS)


def _output(arguments: dict[str, Any]) -> Any:
    """An array of query's rows, with the columns of the values."""
    query = next(iter(arguments.values()))
    if "planned" in arguments:
        columns, dtype = arguments["planned"]
    else:
        values = _values(arguments)
        columns = arguments.get("kv_lora_rank") or arguments.get("head_dim_v") or values.shape[-1]
        dtype = _dtype(arguments, query, values)
    return _or_new(arguments, "out", NewArray((*query.shape[:-1], columns), dtype))


def _attention(arguments: dict[str, Any]) -> Any:
    """The output, and its LSE [..., rows, heads] where it is asked for."""
    return _with_lse(arguments) if _wants_lse(arguments) else _output(arguments)


def _with_lse(arguments: dict[str, Any]) -> Any:
    lse = _float32(next(iter(arguments.values())).shape[:-1])
    return _output(arguments), _or_new(arguments, "lse", lse)


def _heads_first(arguments: dict[str, Any]) -> Any:
    """The output and the LSE [..., heads, rows]; a third array is empty."""
    out = _output(arguments)
    if not _wants_lse(arguments):
        return out
    *lead, rows, heads, _ = next(iter(arguments.values())).shape
    lse = _float32((*lead, heads, rows))
    return (
        (out, lse, NewArray((0,), out.dtype)) if arguments.get("return_attn_probs") else (out, lse)
    )


def _nothing(arguments: dict[str, Any]) -> Any:
    return None


def _xqa(arguments: dict[str, Any]) -> Any:
    """None for what `output` takes, as the call gives."""
    query = arguments["q"]
    out = _output(arguments) if arguments["output"] is None else None
    lse = _float32(query.shape[:-1])
    return (out, _or_new(arguments, "lse", lse)) if arguments["return_lse"] else out


def _xqa_mla(arguments: dict[str, Any]) -> Any:
    if arguments["output"] is not None:
        return None
    query = arguments["q"]
    return NewArray((*query.shape[:-1], _LATENT), _dtype(arguments, query, arguments["k_cache"]))


def _fmha(arguments: dict[str, Any]) -> Any:
    qkv = arguments["qkv"]
    query = qkv[0] if isinstance(qkv, (list, tuple)) else qkv[:, 0]
    values = qkv[2] if arguments["input_layout"] == "SEPARATE_Q_K_V" else query
    out = _or_new(arguments, "out", NewArray((*query.shape[:-1], values.shape[-1]), query.dtype))
    if arguments["save_softmax_stats"]:
        return out, _float32((*query.shape[:-1], 2))
    lse = _float32(query.shape[:-1])
    return (out, _or_new(arguments, "lse", lse)) if arguments["return_lse"] else out


def _cudnn_prefill(arguments: dict[str, Any]) -> Any:
    """The LSE has the rows of the longest prompt for each."""
    out = _output(arguments)
    if not arguments["return_lse"]:
        return out, None
    lens = arguments["actual_seq_lens_q"]
    count = (arguments["actual_seq_lens_kv"] if lens is None else lens).shape[0]
    lse = _float32((count, arguments["max_token_per_sequence"], arguments["q"].shape[-2]))
    return out, _or_new(arguments, "lse", lse)


def _merged(arguments: dict[str, Any]) -> Any:
    """The merged states: of two states a row, of a list of states a row, or of such by offsets."""
    v = next(iter(arguments.values()))
    shape = tuple(v.shape)
    if "indptr" in arguments:
        shape = arguments["indptr"].shape[0] - 1, *shape[1:]
    elif "v_b" not in arguments:
        shape = shape[0], *shape[2:]
    names = ("v_merged", "s_merged") if "v_merged" in arguments else ("out", "lse")
    out = _or_new(arguments, names[0], NewArray(shape, v.dtype))
    return out, _or_new(arguments, names[1], _float32(shape[:-1]))


def _combined(arguments: dict[str, Any]) -> Any:
    parts = arguments["out_partial"]
    out = NewArray(tuple(parts.shape[1:]), arguments["out_dtype"] or parts.dtype)
    return _or_new(arguments, "out", out), _float32(parts.shape[1:-1])


def _positions(arguments: dict[str, Any]) -> Any:
    new = NewArray((arguments["nnz"],), "int32")
    return tuple(_or_new(arguments, x, new) for x in ("batch_indices", "positions"))


def _seq_lens(arguments: dict[str, Any]) -> Any:
    return NewArray(tuple(arguments["kv_last_page_len"].shape), "int32")


def _as_first(arguments: dict[str, Any]) -> Any:
    """As many integers as the first argument has."""
    return _or_new(arguments, "out", NewArray(tuple(next(iter(arguments.values())).shape), "int32"))


def _lists(arguments: dict[str, Any]) -> Any:
    counts = NewArray(tuple(arguments["lists"].shape[:-1]), "int32")
    return _as_first(arguments), _or_new(arguments, "counts", counts)


def _packed(arguments: dict[str, Any]) -> Any:
    return NewArray(((arguments["x"].shape[0] + 7) // 8,), "uint8")


def _selection(arguments: dict[str, Any]) -> Any:
    """Lists, and their scores where these are asked for."""
    tokens, heads, _ = arguments["q_index"].shape
    groups = arguments["groups"]
    if groups is None:
        groups = heads if arguments["score"] == "max" else 1
    shape = tokens, groups, arguments["topk"] + bool(arguments["tail"])
    lists = _or_new(arguments, "out", NewArray(shape, "int32"))
    if not arguments["return_values"]:
        return lists
    return lists, _or_new(arguments, "values", _float32(shape))


def _indexed(arguments: dict[str, Any]) -> Any:
    new = arguments["q"].shape[0], arguments["top_k"]
    lists = _or_new(arguments, "indices", NewArray(new, "int32"))
    return lists, _or_new(arguments, "scores", _float32(new))


def _sparse_attention(arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    out = NewArray((*q.shape[:-1], arguments["v"].shape[-1]), q.dtype)
    return (out, _float32(q.shape[:-1])) if arguments["return_softmax_lse"] else out


def _flash_mla(arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    out = NewArray((*q.shape[:-1], arguments["head_dim_v"]), q.dtype)
    return _or_new(arguments, "out", out), _float32((q.shape[0], q.shape[2], q.shape[1]))


def _flash_mla_sparse(arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    out = _or_new(arguments, "out", NewArray((*q.shape[:-1], arguments["d_v"]), q.dtype))
    return out, _float32(q.shape[:-1]), _float32(q.shape[:-1])


def _latent(arguments: dict[str, Any]) -> Any:
    q = arguments["q_nope"] if arguments["query"] is None else arguments["query"]
    columns = q.shape[-1] if arguments["query"] is None else _LATENT
    out = _or_new(arguments, "out", NewArray((*q.shape[:-1], columns), q.dtype))
    lse = _float32(q.shape[:-1])
    return (out, _or_new(arguments, "lse", lse)) if arguments["return_lse"] else out


def _pod(arguments: dict[str, Any]) -> Any:
    """(prefill, decode); of whole batches with the LSE of each, if that is asked for."""
    queries = arguments["q_p"], arguments["q_d"]
    outputs = tuple(NewArray(tuple(q.shape), q.dtype) for q in queries)
    if not arguments.get("return_lse"):
        return outputs
    return tuple((x, _float32(x.shape[:-1])) for x in outputs)


# --- calls ---


@dataclass(frozen=True)
class Call:
    """A public call in a graph.

    Parameters
    ----------
    path
        "module:function", or "module:Class.method" of a planned wrapper.
    outputs
        What it returns.
    writes
        Arguments that it writes, besides OUTPUTS.
    appends
        The argument of new keys, without which it only reads what `writes` names.
    results
        How many arrays its own operator returns; None: the output, and the LSE if asked for.
    is_operator
        Whether it has an operator of its own.
    also
        Another module whose call of this name has the same arguments in another order.
    """

    path: str
    outputs: Outputs = _attention
    writes: tuple[str, ...] = ()
    appends: str = ""
    results: int | None = None
    is_operator: bool = False
    also: str = ""

    @property
    def name(self) -> str:
        return self.path.partition(":")[2]

    @property
    def operator(self) -> str:
        """The name of its own operator."""
        return self.name.replace(".", "_")

    @property
    def owner(self) -> Any:
        """Its class, or None."""
        return self._members[0] if len(self._members) > 1 else None

    @property
    def function(self) -> Any:
        """The call itself, not what asks for a graph."""
        member = self._members[-1]
        return getattr(member, "outside_of_graphs", member)

    @property
    def _members(self) -> list[Any]:
        module, _, names = self.path.partition(":")
        owner: Any = importlib.import_module(f"cupyattn.{module}")
        members = []
        for name in names.split("."):
            owner = inspect.getattr_static(owner, name)
            members.append(owner)
        return members

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        return {n: x for n, x in parameters.items() if n != "self" and x.kind not in variadic}

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """All arguments; those that a call must be given as None."""
        return {n: None if x.default is x.empty else x.default for n, x in self.parameters.items()}

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """The arguments of its own operator, in the signature's order, by KINDS: first those that a
        call must be given."""
        taken = [x for x in self.parameters if x in KINDS and x not in OUTPUTS]
        taken.sort(key=lambda x: self.parameters[x].default is not inspect.Parameter.empty)
        return {name: KINDS[name] for name in taken}

    @functools.cached_property
    def positional(self) -> tuple[str, ...]:
        """Arguments that a call may be given by position."""
        return positional(self.function)

    @property
    def flag(self) -> str:
        """The argument that asks for the LSE, or ""."""
        return next((x for x in FLAGS if x in self.parameters), "")

    def own_name(self, name: str) -> str:
        """An argument's name in `kinds`."""
        other = SYNONYMS.get(name, name)
        return other if other in self.kinds else name

    @property
    def forms(self) -> dict[str, str]:
        """Form of its own operator -> its schema. See `integrations.torch` for what they are."""
        if not self.is_operator:
            return {}
        plain = self.writes if not self.appends else ()
        forms = self._forms(plain)
        for form, schema in self._forms(self.writes).items() if self.appends else ():
            forms[f"append_{form}" if form else "append"] = schema
        return forms

    def _forms(self, written: tuple[str, ...]) -> dict[str, str]:
        wrapper = ["int wrapper"] if self.owner is not None else []
        arguments = [*wrapper, *(self._argument(x, written) for x in self.kinds)]
        own = ", ".join(arguments)
        if self.results is not None:
            return {"": f"({own}) -> ({', '.join(['Tensor'] * self.results)})"}
        # A default ahead of `out` would need one for it.
        needed = ", ".join([*(x.partition("=")[0] for x in arguments), "Tensor(z!) out"])
        return {
            "": f"({own}) -> Tensor",
            "lse": f"({own}) -> (Tensor, Tensor)",
            "out": f"({needed}) -> ()",
            "out_lse": f"({needed}) -> Tensor",
        }

    def _argument(self, name: str, written: tuple[str, ...]) -> str:
        """An argument in a schema: "float? scale=None", "Tensor(a!) k_cache"."""
        kind, parameter = self.kinds[name], self.parameters[name]
        if name in written:
            letter = "abc"[written.index(name)]
            kind = kind.replace("Tensor", f"Tensor({letter}!)")
        if parameter.default is parameter.empty:
            may_be_none = name in _MAY_BE_NONE or "None" in str(parameter.annotation)
            return f"{kind}{'?' if may_be_none else ''} {name}"
        default = parameter.default
        if "None" in str(parameter.annotation) or default is None:
            kind += "?"
        if isinstance(default, str):
            return f'{kind} {name}="{default}"'
        return f"{kind} {name}={list(default) if isinstance(default, tuple) else default}"


def positional(function: Any) -> tuple[str, ...]:
    """Arguments of a function that may be given by position."""
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(x.name for x in parameters if x.kind in kinds and x.name != "self")


_FA3 = "flash_attn_interface"
_own = functools.partial(Call, is_operator=True)
CALLS: tuple[Call, ...] = (
    _own("dot_product:dot_product_attention"),
    _own("flash_attn:flash_attn_func", _heads_first, also=_FA3),
    _own("flash_attn:flash_attn_varlen_func", _heads_first, also=_FA3),
    _own(
        "flash_attn:flash_attn_with_kvcache",
        _heads_first,
        writes=("k_cache", "v_cache"),
        appends="k",
        also=_FA3,
    ),
    _own("prefill:single_prefill_with_kv_cache"),
    _own("decode:single_decode_with_kv_cache"),
    _own("trtllm:trtllm_batch_decode_with_kv_cache"),
    _own("trtllm:trtllm_batch_context_with_kv_cache"),
    _own("mla:trtllm_batch_decode_with_kv_cache_mla"),
    _own("cascade:merge_state", _merged, results=2),
    _own("cascade:merge_states", _merged, results=2),
    _own("slots:reshape_and_cache", _nothing, writes=("k_cache", "v_cache"), results=0),
    _own("page:append_paged_kv_cache", _nothing, writes=("paged_kv_cache",), results=0),
    _own("sparse:attend"),
    _own("sparse:select", _selection, results=1),
    _own("decode:BatchDecodeWithPagedKVCacheWrapper.run"),
    _own("prefill:BatchPrefillWithPagedKVCacheWrapper.run"),
    _own("prefill:BatchPrefillWithRaggedKVCacheWrapper.run"),
    # Those that have no operator of their own.
    Call("prefill:single_prefill_with_kv_cache_return_lse"),
    Call("trtllm:xqa_batch_decode_with_kv_cache"),
    Call("xqa:xqa", _xqa),
    Call("trtllm:trtllm_fmha_v2_prefill", _fmha),
    Call("trtllm:trtllm_ragged_attention_deepseek"),
    Call("cudnn:cudnn_batch_decode_with_kv_cache"),
    Call("cudnn:cudnn_batch_prefill_with_kv_cache", _cudnn_prefill),
    Call("cascade:batch_decode_with_shared_prefix_padded_kv_cache"),
    Call("cascade:merge_state_in_place", _nothing, writes=("v", "s")),
    Call("cascade:variable_length_merge_states", _merged),
    Call("page:append_paged_mla_kv_cache", _nothing, writes=("ckv_cache", "kpe_cache")),
    Call("mla:xqa_batch_decode_with_kv_cache_mla"),
    Call("mla:xqa_mla", _xqa_mla),
    Call("page:get_batch_indices_positions", _positions, writes=("batch_indices", "positions")),
    Call("page:get_seq_lens", _seq_lens),
    Call("shares:get_share_seq_lens", _as_first),
    Call("shares:get_share_slots", _as_first),
    Call("shares:get_share_lists", _lists, writes=("counts",)),
    Call("quantization:packbits", _packed),
    Call("flash_attn:flash_attn_combine", _combined),
    Call("flash_attn:merge_state_v2", _merged, writes=("v_merged", "s_merged")),
    Call("flash_attn:merge_attn_states", _nothing, writes=("output_lse",)),
    Call("flash_mla:flash_mla_with_kvcache", _flash_mla),
    Call("flash_mla:flash_mla_sparse_fwd", _flash_mla_sparse),
    Call("dsa_indexer:dsa_indexer_topk", _indexed, writes=("indices", "scores")),
    Call("msa_ops:msa_sparse_attention", _sparse_attention),
    Call("msa_ops:msa_sparse_decode_attention", _sparse_attention),
    Call("attention:BatchAttention.run", _with_lse),
    Call("attention:BatchAttentionWithAttentionSinkWrapper.run"),
    Call("attention:BatchPrefillWithCausalBidirectionalRangesWrapper.run"),
    Call("cascade:MultiLevelCascadeAttentionWrapper.run"),
    Call("cascade:BatchDecodeWithSharedPrefixPagedKVCacheWrapper.run"),
    Call("cascade:BatchPrefillWithSharedPrefixPagedKVCacheWrapper.run"),
    Call("pod:PODWithPagedKVCacheWrapper.run", _pod, writes=("lse_p", "lse_d")),
    Call("pod:BatchPODWithPagedKVCacheWrapper.run", _pod),
    Call("sparse:BlockSparseAttentionWrapper.run"),
    Call("sparse:VariableBlockSparseAttentionWrapper.run"),
    Call("mla:BatchMLAPagedAttentionWrapper.run", _latent),
    Call("decode:BatchDecodeMlaWithPagedKVCacheWrapper.run"),
)


def is_default(x: Any, default: Any) -> bool:
    """Whether an argument says no more than leaving it out; arrays are not compared."""
    return x is None or (isinstance(x, (bool, int, float, str, tuple)) and x == default)


# --- arguments in parts ---


def leaves(path: str, x: Any) -> list[tuple[str, Any]]:
    """The parts of an argument or of a result, each with where it is: "kv_cache.1" is the second of
    a tuple, "logits_params.slopes" an item of a dict.
    """
    if isinstance(x, dict):
        parts = list(x.items())
    elif isinstance(x, (list, tuple)):
        parts = list(enumerate(x))
    else:
        return [(path, x)]
    result = []
    for name, part in parts:
        result.extend(leaves(f"{path}.{name}", part))
    return result


def joined(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The arguments of which these are the parts."""
    named: dict[str, Any] = {}
    for path, x in parts:
        *front, last = path.split(".")
        to = named
        for name in front:
            to = to.setdefault(name, {})
        to[last] = x
    return {name: _formed(x) for name, x in named.items()}


def _formed(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    parts = {name: _formed(part) for name, part in x.items()}
    return tuple(parts.values()) if all(name.isdigit() for name in parts) else parts

"""Public calls that have no operator of their own, or arguments that theirs does not take: in a
graph of torch.compile they share one operator.

    torch.ops.cupyattn.call(function, wrapper, layout, read, written, ints, floats, texts)

names the call and spells its arguments, so that a graph needs nothing beside itself. What the call
answers is made by the graph and written by the operator.

    layout   "name=kind" of each argument, in order: t or w, the next tensor of `read` or `written`;
             i, f, s, d, the next of `ints`, of `floats`, and of `texts` as such or as a dtype; n
             None, + True, - False; T2, W2, I2, two of a kind as a tuple. "a.b" is b of the dict a.
             "@=w" is an answer to be written, "@=-" one that an argument has been given for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .torch_calls import Call, answer_dtype, refuse_grad, unknown

SCHEMA = (
    "call(str function, int wrapper, str[] layout, Tensor[] read, Tensor(a!)[] written, SymInt[] "
    "ints, float[] floats, str[] texts) -> ()"
)
_LATENT = 512  # columns of latent keys that are values, where no argument says it
# The arrays that a call answers with, made for its arguments: one, or a tuple of such and None.
Answers = Callable[[dict[str, Any]], Any]


def _rows(q: str, v: str, flag: str | None = "return_lse", out: str = "out") -> Answers:
    """Queries' shape with the last extent of v, and with `flag`, or always, the LSE without it."""

    def answers(given: dict[str, Any]) -> Any:
        query, values = given[q], given[v]
        values = values[-1] if isinstance(values, (list, tuple)) else values
        made = given.get(out)
        if made is None:
            shape = (*query.shape[:-1], values.shape[-1])
            made = query.new_empty(shape, dtype=given.get("o_dtype") or answer_dtype(query, values))
        wants_lse = True if flag is None else given[flag]
        return (made, _lse(given, query.shape[:-1])) if wants_lse else made

    return answers


def _lse(given: dict[str, Any], shape: Any) -> Any:
    lse = given.get("lse")
    if lse is not None:
        return lse
    q = next(x for x in given.values() if hasattr(x, "new_empty"))
    return q.new_empty(shape, dtype=_torch().float32)


def _torch() -> Any:
    import torch

    return torch


def _like_q(given: dict[str, Any]) -> Any:
    return given["q"].new_empty(given["q"].shape)


def _xqa_latent(given: dict[str, Any]) -> Any:
    query, out = given["query"], given["out"]
    shape = *query.shape[:-1], given["kv_lora_rank"]
    dtype = answer_dtype(query, given["kv_cache"])
    return query.new_empty(shape, dtype=dtype) if out is None else out


def _xqa(given: dict[str, Any]) -> Any:
    """None for what `output` takes, as the call gives."""
    query, out = given["q"], given["output"]
    made = query.new_empty(query.shape) if out is None else None
    return (made, _lse(given, query.shape[:-1])) if given.get("return_lse") else made


def _xqa_mla(given: dict[str, Any]) -> Any:
    query, dtype = given["q"], answer_dtype(given["q"], given["k_cache"])
    shape = *query.shape[:-1], _LATENT
    return query.new_empty(shape, dtype=dtype) if given["output"] is None else None


def _fmha(given: dict[str, Any]) -> Any:
    qkv, layout = given["qkv"], given["input_layout"]
    query = qkv[0] if isinstance(qkv, (list, tuple)) else qkv[:, 0]
    last = qkv[2].shape[-1] if layout == "SEPARATE_Q_K_V" else query.shape[-1]
    out = given["out"]
    made = query.new_empty((*query.shape[:-1], last)) if out is None else out
    if given["save_softmax_stats"]:
        return made, query.new_empty((*query.shape[:-1], 2), dtype=_torch().float32)
    return (made, _lse(given, query.shape[:-1])) if given["return_lse"] else made


def _cudnn_prefill(given: dict[str, Any]) -> Any:
    query, out = given["q"], given["out"]
    shape = (*query.shape[:-1], given["v_cache"].shape[-1])
    made = query.new_empty(shape) if out is None else out
    if not given["return_lse"]:
        return made, None
    lens = given["actual_seq_lens_q"]
    count = given["actual_seq_lens_kv"].shape[0] if lens is None else lens.shape[0]
    return made, _lse(given, (count, given["max_token_per_sequence"], query.shape[-2]))


def _merged(given: dict[str, Any]) -> Any:
    v, count = given["v"], given["indptr"].shape[0] - 1
    shape, out = (count, *v.shape[-2:]), given["out"]
    return v.new_empty(shape) if out is None else out, _lse(given, shape[:-1])


def _positions(given: dict[str, Any]) -> Any:
    like, count = given["append_indptr"], given["nnz"]
    names = "batch_indices", "positions"
    return tuple(
        like.new_empty((count,), dtype=_torch().int32) if given[x] is None else given[x]
        for x in names
    )


def _combined(given: dict[str, Any]) -> Any:
    parts, out = given["out_partial"], given["out"]
    dtype = given["out_dtype"] or parts.dtype
    made = parts.new_empty(parts.shape[1:], dtype=dtype) if out is None else out
    return made, parts.new_empty(parts.shape[1:-1], dtype=_torch().float32)


def _merged_pair(given: dict[str, Any]) -> Any:
    v, s = given["v_a"], given["s_a"]
    out, lse = given["v_merged"], given["s_merged"]
    made = v.new_empty(v.shape) if out is None else out
    return made, s.new_empty(s.shape, dtype=_torch().float32) if lse is None else lse


def _flash_mla(given: dict[str, Any]) -> Any:
    q, width = given["q"], given["head_dim_v"]
    shape = q.shape[0], q.shape[2], q.shape[1]
    lse = q.new_empty(shape, dtype=_torch().float32)
    return q.new_empty((*q.shape[:-1], width)), lse


def _flash_mla_sparse(given: dict[str, Any]) -> Any:
    q, out = given["q"], given["out"]
    made = q.new_empty((*q.shape[:-1], given["d_v"])) if out is None else out
    max_logits, lse = (q.new_empty(q.shape[:-1], dtype=_torch().float32) for _ in range(2))
    return made, max_logits, lse


def _latent(given: dict[str, Any]) -> Any:
    rows = given["q_nope"] if given["query"] is None else given["query"][..., :_LATENT]
    made = rows.new_empty(rows.shape) if given["out"] is None else given["out"]
    return (made, _lse(given, rows.shape[:-1])) if given["return_lse"] else made


def _pod(given: dict[str, Any]) -> Any:
    """(prefill, decode); of whole batches with the LSE of each, if that is asked for."""
    sides = []
    for q in (given["q_p"], given["q_d"]):
        made = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:-1], dtype=_torch().float32)
        sides.append((made, lse) if given.get("return_lse") else made)
    return tuple(sides)


@dataclass(frozen=True)
class Other:
    """A call: "module:function" or "module:Class.method", its answers, and arguments it writes."""

    path: str
    answers: Answers
    writes: tuple[str, ...] = ("out", "lse", "output")


def of_call(call: Call) -> Other:
    """A call that has an operator, for arguments that its operator does not take."""
    names, shapes = call.arguments, call.shapes
    flags = (call.flag, *(x for x, name in call.aliases if name == call.flag))
    key = next(name for name in ("key", "k_cache", "k", "kv_cache") if name in names)

    def answers(given: dict[str, Any]) -> Any:
        query, cache, made = given[names[0]], given[key], given["out"]
        cache = cache[0] if isinstance(cache, (list, tuple)) else cache
        shape, lse_shape = shapes(given)
        if made is None:
            asked = given.get("o_dtype") or given.get("out_dtype")
            made = query.new_empty(shape, dtype=asked or answer_dtype(query, cache))
        wants_lse = any(given.get(x) for x in flags)
        return (made, _lse(given, lse_shape)) if wants_lse else made

    return Other(f"{call.module}:{call.name}", answers, ("out", "lse", *call.written))


_NOTHING: Answers = lambda given: None  # noqa: E731
OTHERS = (
    Other("prefill:single_prefill_with_kv_cache_return_lse", _rows("q", "v")),
    Other("trtllm:xqa_batch_decode_with_kv_cache", _rows("query", "kv_cache")),
    Other("xqa:xqa", _xqa),
    Other("trtllm:trtllm_fmha_v2_prefill", _fmha),
    Other("trtllm:trtllm_ragged_attention_deepseek", _rows("query", "value")),
    Other("cudnn:cudnn_batch_decode_with_kv_cache", _rows("q", "v_cache")),
    Other("cudnn:cudnn_batch_prefill_with_kv_cache", _cudnn_prefill),
    Other("cascade:batch_decode_with_shared_prefix_padded_kv_cache", _like_q),
    Other("cascade:merge_state_in_place", _NOTHING, ("v", "s")),
    Other("cascade:variable_length_merge_states", _merged),
    Other("page:append_paged_mla_kv_cache", _NOTHING, ("ckv_cache", "kpe_cache")),
    Other("mla:xqa_batch_decode_with_kv_cache_mla", _xqa_latent),
    Other("mla:xqa_mla", _xqa_mla),
    Other("page:get_batch_indices_positions", _positions, ("batch_indices", "positions")),
    Other("page:get_seq_lens", lambda given: given["kv_last_page_len"].new_empty(
        given["kv_last_page_len"].shape, dtype=_torch().int32)),
    Other("quantization:packbits", lambda given: given["x"].new_empty(
        ((given["x"].shape[0] + 7) // 8,), dtype=_torch().uint8)),
    Other("flash_attn:flash_attn_combine", _combined),
    Other("flash_attn:merge_state_v2", _merged_pair, ("v_merged", "s_merged")),
    Other("flash_attn:merge_attn_states", _NOTHING, ("output", "output_lse")),
    Other("flash_mla:flash_mla_with_kvcache", _flash_mla),
    Other("flash_mla:flash_mla_sparse_fwd", _flash_mla_sparse),
    Other("attention:BatchAttention.run", _rows("q", "kv_cache", None)),
    Other("attention:BatchAttentionWithAttentionSinkWrapper.run", _rows("q", "paged_kv_cache")),
    Other("attention:BatchPrefillWithCausalBidirectionalRangesWrapper.run",
          _rows("q", "paged_kv_cache")),
    Other("cascade:MultiLevelCascadeAttentionWrapper.run", _rows("q", "paged_kv_cache")),
    Other("cascade:BatchDecodeWithSharedPrefixPagedKVCacheWrapper.run", _like_q),
    Other("cascade:BatchPrefillWithSharedPrefixPagedKVCacheWrapper.run", _like_q),
    Other("pod:PODWithPagedKVCacheWrapper.run", _pod, ("lse_p", "lse_d")),
    Other("pod:BatchPODWithPagedKVCacheWrapper.run", _pod),
    Other("sparse:BlockSparseAttentionWrapper.run", _rows("q", "v")),
    Other("sparse:VariableBlockSparseAttentionWrapper.run", _rows("q", "v")),
    Other("mla:BatchMLAPagedAttentionWrapper.run", _latent),
    Other("decode:BatchDecodeMlaWithPagedKVCacheWrapper.run", _rows("q_nope", "paged_ckv_cache")),
)  # fmt: skip


def public(path: str) -> tuple[Any, Any]:
    """(the class or None, the function) of a path: the call itself, not what asks for a graph."""
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(f"cupyattn.{module}")
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function = inspect.getattr_static(owner, last)
    return (owner if classes else None), getattr(function, "outside_of_graphs", function)


# --- in a graph ---


@dataclass
class Spelled:
    """Arguments as the operator takes them."""

    writes: tuple[str, ...]
    layout: list[str]
    read: list[Any]
    written: list[Any]
    ints: list[Any]
    floats: list[float]
    texts: list[str]

    def add(self, name: str, x: Any, title: str) -> None:
        torch = _torch()
        if x is None:
            self.layout.append(f"{name}=n")
        elif isinstance(x, torch.Tensor):
            self.layout.append(f"{name}={'w' if name in self.writes else 't'}")
            (self.written if name in self.writes else self.read).append(x)
        elif isinstance(x, bool):
            self.layout.append(f"{name}={'+' if x else '-'}")
        elif isinstance(x, (int, torch.SymInt)):
            self.layout.append(f"{name}=i")
            self.ints.append(x)
        elif isinstance(x, float):
            self.layout.append(f"{name}=f")
            self.floats.append(x)
        elif isinstance(x, str):
            self.layout.append(f"{name}=s")
            self.texts.append(x)
        elif isinstance(x, torch.dtype):
            self.layout.append(f"{name}=d")
            self.texts.append(str(x))
        elif isinstance(x, dict):
            for key, value in x.items():
                self.add(f"{name}.{key}", value, title)
        elif isinstance(x, (list, tuple)):
            self._add_all(name, x, title)
        else:
            raise unknown(title, name)

    def _add_all(self, name: str, x: Any, title: str) -> None:
        torch = _torch()
        if all(isinstance(y, torch.Tensor) for y in x):
            is_written = name in self.writes
            self.layout.append(f"{name}={'W' if is_written else 'T'}{len(x)}")
            (self.written if is_written else self.read).extend(x)
        elif all(isinstance(y, (int, torch.SymInt)) for y in x):
            self.layout.append(f"{name}=I{len(x)}")
            self.ints.extend(x)
        else:
            raise unknown(title, name)


def traced(other: Other, function: Any, is_method: bool) -> Callable[..., Any]:
    """The call as Dynamo is to trace it; a method's takes the id of its wrapper."""
    operator = _torch().ops.cupyattn.call.default
    parameters = inspect.signature(function).parameters
    order = tuple(x for x in parameters if x != "self")
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    title, writes, answers = other.path, other.writes, other.answers
    name = title.partition(":")[2] + "()"

    def call(wrapper: int, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(order):
            raise unknown(name, "arguments by position")
        given = dict(defaults)
        explicit = {}
        for key, x in [*zip(order, args), *kwargs.items()]:  # noqa: B905
            explicit[key] = given[key] = x
        spelled = Spelled(writes, [], [], [], [], [], [])
        for key, x in explicit.items():
            spelled.add(key, x, name)
        answer = answers(given)
        for leaf in _leaves(answer):
            is_given = any(leaf is x for x in spelled.written)
            spelled.layout.append("@=-" if is_given else "@=w")
            if not is_given:
                spelled.written.append(leaf)
        operator(
            title,
            wrapper,
            spelled.layout,
            spelled.read,
            spelled.written,
            spelled.ints,
            spelled.floats,
            spelled.texts,
        )
        return answer

    if is_method:
        return call
    return lambda *args, **kwargs: call(0, *args, **kwargs)


def _leaves(answer: Any) -> list[Any]:
    if answer is None:
        return []
    if not isinstance(answer, (list, tuple)):
        return [answer]
    found = []
    for x in answer:
        found.extend(_leaves(x))
    return found


# --- the operator ---


def run(
    wrappers: Any,
    function: str,
    wrapper: int,
    layout: list[str],
    read: list[Any],
    written: list[Any],
    ints: list[int],
    floats: list[float],
    texts: list[str],
) -> None:
    """Make the call that the arguments spell, and write its answers."""
    owner, called = public(function)
    sources = {
        "t": iter(read),
        "w": iter(written),
        "i": iter(ints),
        "f": iter(floats),
        "s": iter(texts),
    }
    named: dict[str, Any] = {}
    outputs: list[Any] = []
    for token in layout:
        name, _, kind = token.partition("=")
        if name == "@":
            outputs.append(next(sources["w"]) if kind == "w" else None)
            continue
        key, _, inner = name.partition(".")
        value = _value(kind, sources)
        if inner:
            named.setdefault(key, {})[inner] = value
        else:
            named[key] = value
    answer = called(wrappers[wrapper], **named) if owner is not None else called(**named)
    for to, x in zip(outputs, _leaves(answer), strict=True):
        if to is not None:
            to.copy_(x)


def _value(kind: str, sources: dict[str, Iterator[Any]]) -> Any:
    if kind in ("n", "+", "-"):
        return {"n": None, "+": True, "-": False}[kind]
    if kind == "d":
        return getattr(_torch(), next(sources["s"]).removeprefix("torch."))
    source = sources[kind[0].lower()]
    if len(kind) == 1:
        return next(source)
    return tuple(next(source) for _ in range(int(kind[1:])))


def fake(
    function: str, wrapper: int, layout: list[str], read: list[Any], written: list[Any], *_: Any
) -> None:
    names = [x.partition("=")[0] for x in layout if x.partition("=")[2][:1] in ("t", "T")]
    label = ", ".join(names) or "call"
    refuse_grad([(label, read), ("out", written)])

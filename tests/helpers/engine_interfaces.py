"""The interfaces of engines that our adapters fill, as facts: names, parameters, what is abstract.

`stub` makes modules of them, for tests without the engine; `differences` holds them against the
sources of an installed engine, which are parsed and not imported.
"""

from __future__ import annotations

import abc
import ast
import builtins
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

_TYPES = types.SimpleNamespace(DECODER="decoder")


class Interface(NamedTuple):
    """A class of an engine.

    methods   by name their parameters, with what is written before `def`: "abstract", "static",
              "class". These are all of its abstract methods, and those that we fill or call.
    fields    attributes that we read, of dataclasses or set by methods
    """

    methods: Mapping[str, str] = types.MappingProxyType({})
    fields: tuple[str, ...] = ()


# SGLang 0.5.23 and vLLM 0.33.0, from the package index; mini-sglang at 20fcd7f.
MODULES: dict[str, dict[str, Interface]] = {
    "sglang.srt.layers.attention.base_attn_backend": {
        "AttentionBackend": Interface(
            {
                "init_forward_metadata": "self, forward_batch",
                "init_forward_metadata_out_graph": "self, forward_batch, in_capture=False",
                "init_forward_metadata_in_graph": "self, forward_batch",
                "init_cuda_graph_state": "self, max_bs, max_num_tokens",
                "get_cuda_graph_seq_len_fill_value": "self",
                "on_after_cuda_graph_warmup": "self",
                "forward": "self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs",
                "forward_decode": "self, q, k, v, layer, forward_batch, save_kv_cache=True, "
                "**kwargs",
                "forward_extend": "self, q, k, v, layer, forward_batch, save_kv_cache=True, "
                "**kwargs",
                "support_triton": "self",
            },
            ("forward_metadata", "needs_cpu_seq_lens"),
        )
    },
    "sglang.srt.model_executor.forward_batch_info": {
        "ForwardMode": Interface(
            {"is_idle": "self"},
            ("EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY"),
        ),
        "ForwardBatch": Interface(
            fields=("forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu",
                    "out_cache_loc", "encoder_lens", "encoder_out_cache_loc", "extend_seq_lens",
                    "extend_seq_lens_cpu", "spec_info"),
        ),
    },
    "sglang.srt.layers.radix_attention": {
        "RadixAttention": Interface(
            fields=("tp_q_head_num", "tp_k_head_num", "head_dim", "v_head_dim", "scaling",
                    "layer_id", "logit_cap", "sliding_window_size", "is_cross_attention",
                    "use_irope", "k_scale", "v_scale", "attn_type", "pos_encoding_mode",
                    "logit_capping_method", "xai_temperature_len"),
        )
    },
    "sglang.srt.model_executor.model_runner": {
        "ModelRunner": Interface(
            fields=("server_args", "model_config", "use_mla_backend", "page_size",
                    "attention_chunk_size", "sliding_window_size", "is_hybrid_swa",
                    "token_to_kv_pool", "req_to_token_pool"),
        )
    },
    "vllm.v1.attention.backend": {
        "AttentionBackend": Interface(
            {
                "get_name": "abstract static ()",
                "get_impl_cls": "abstract static ()",
                "get_builder_cls": "abstract static ()",
                "supports_head_size": "class cls, head_size",
                "supports_compute_capability": "class cls, capability",
                "supports_sink": "class cls",
                "supports_sliding_window": "class cls",
                "supports_non_causal": "class cls",
                "supports_batch_invariance": "class cls",
                "supports_combination": "class cls, head_size, dtype, kv_cache_dtype, block_size, "
                "use_mla, has_sink, use_sparse, use_mm_prefix, device_capability",
                "is_mla": "class cls",
            },
            ("forward_includes_kv_cache_update", "supported_kv_cache_dtypes"),
        ),
        "CommonAttentionMetadata": Interface(
            fields=("num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc",
                    "seq_lens", "block_table_tensor", "slot_mapping", "causal",
                    "dcp_local_seq_lens"),
        ),
        "AttentionCGSupport": Interface(fields=("UNIFORM_BATCH",)),
        "AttentionMetadataBuilder": Interface(
            {
                "__init__": "abstract self, kv_cache_spec, layer_names, vllm_config, device",
                "build": "abstract self, common_prefix_len, common_attn_metadata, "
                "fast_build=False",
            },
            ("_cudagraph_support", "reorder_batch_threshold"),
        ),
        "AttentionImplBase": Interface(
            fields=("can_return_lse_for_decode", "lse_base_on_e", "supports_dcp", "supports_pcp",
                    "need_to_return_lse_for_decode", "dcp_world_size", "dcp_rank",
                    "supports_mtp_with_cp_non_trivial_interleave_size"),
        ),
        "AttentionImpl": Interface(
            {
                "__init__": "abstract self, num_heads, head_size, scale, num_kv_heads=None, "
                "alibi_slopes=None, sliding_window=None, kv_cache_dtype='auto', "
                "logits_soft_cap=None, attn_type=AttentionType.DECODER, "
                "kv_sharing_target_layer_name=None",
                "forward": "abstract self, layer, query, key, value, kv_cache, attn_metadata, "
                "output, output_scale=None, output_block_scale=None",
            },
        ),
        "AttentionLayer": Interface(fields=("_q_scale", "_k_scale", "_v_scale", "_k_scale_float")),
    },
    "vllm.config.vllm": {"": Interface({"get_current_vllm_config": ""})},
    "vllm.distributed.parallel_state": {"": Interface({"get_dcp_group": ""})},
    "vllm.v1.attention.ops.dcp": {
        "": Interface(
            {"cp_lse_ag_out_rs": "cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False, "
             "is_lse_base_on_e=True, seq_lens=None, query_start_loc=None",
             "dcp_a2a_lse_reduce": "cp_attn_out, cp_attn_lse, cp_group, ctx=None, "
             "return_lse=False, is_lse_base_on_e=True, seq_lens=None, query_start_loc=None"}
        ),
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": Interface({"is_overridden": "self"}, ("CUSTOM",)),
        "": Interface({"register_backend": "backend, class_path=None, is_mamba=False"}),
    },
    "vllm.v1.attention.backends.triton_attn": {
        # What an implementation has beyond the base: the layer calls it where forward() does not
        # write the cache.
        "TritonAttentionImpl": Interface(
            {"do_kv_cache_update": "self, layer, key, value, kv_cache, slot_mapping",
             "do_rope_and_kv_cache_update": "self, layer, query, key, value, positions, "
             "cos_sin_cache, is_neox, kv_cache, layer_slot_mapping"}
        ),
    },
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBackend": Interface(
            {"get_name": "static ()", "get_builder_cls": "static ()", "is_mla": "class cls",
             "get_supported_head_sizes": "class cls"},
        ),
        "MLACommonDecodeMetadata": Interface(
            fields=("block_table", "seq_lens", "dcp_tot_seq_lens")
        ),
        "MLACommonMetadata": Interface(fields=("decode", "max_seq_len")),
        "MLACommonMetadataBuilder": Interface(
            {"__init__": "self, kv_cache_spec, layer_names, vllm_config, device, "
             "metadata_cls=None, supports_dcp_with_varlen=False"},
            ("query_len_support",),
        ),
        "QueryLenSupport": Interface(fields=("UNIFORM",)),
        "MLACommonImpl": Interface(
            {
                "__init__": "self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, "
                "sliding_window, kv_cache_dtype, logits_soft_cap, attn_type, "
                "kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim, "
                "qk_rope_head_dim, qk_head_dim, v_head_dim, kv_b_proj, indexer=None, "
                "q_pad_num_heads=None",
                "forward_mqa": "abstract self, q, kv_c_and_k_pe_cache, attn_metadata, layer",
            },
            ("supports_quant_query_input",),
        ),
    },
    "minisgl.attention.base": {
        "BaseAttnMetadata": Interface({"get_last_indices": "abstract self, bs"}),
        "BaseAttnBackend": Interface(
            {
                "forward": "abstract self, q, k, v, layer_id, batch",
                "prepare_metadata": "abstract self, batch",
                "init_capture_graph": "abstract self, max_seq_len, bs_list",
                "prepare_for_capture": "abstract self, batch",
                "prepare_for_replay": "abstract self, batch",
            }
        ),
    },
    "minisgl.core": {
        "Batch": Interface(
            {"is_decode": "self", "size": "self", "padded_size": "self"},
            ("reqs", "padded_reqs", "out_loc", "attn_metadata"),
        ),
        "Req": Interface({"extend_len": "self"}, ("table_idx", "cached_len", "device_len")),
        "Context": Interface(fields=("page_size", "page_table", "kv_cache")),
    },
    "minisgl.kvcache.base": {
        "BaseKVCachePool": Interface(
            {"k_cache": "abstract self, index", "v_cache": "abstract self, index",
             "store_kv": "abstract self, k, v, out_loc, layer_id", "device": "abstract self",
             "dtype": "abstract self", "num_layers": "abstract self"}
        ),
    },
}  # fmt: skip


def packages() -> list[str]:
    return sorted({name.partition(".")[0] for name in MODULES})


# --- stubs ---


def stub(patch: pytest.MonkeyPatch, package: str) -> None:
    """Modules of an engine with the classes above: methods return None, fields are None."""
    for name, classes in MODULES.items():
        if name.partition(".")[0] == package:
            made = module(patch, name)
            for title, interface in classes.items():
                if title:
                    setattr(made, title, _class(title, interface, name))


def module(patch: pytest.MonkeyPatch, name: str) -> Any:
    """The module of a name, and the packages above it, each an attribute of the one above."""
    above: Any = None
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        made: Any = sys.modules.get(part)
        if not getattr(made, "is_stub", False):
            made = types.ModuleType(part)
            made.__path__, made.is_stub = [], True
            patch.setitem(sys.modules, part, made)
        if above is not None:
            setattr(above, part.rpartition(".")[2], made)
        above = made
    return above


def _class(title: str, interface: Interface, module: str) -> type:
    lines = [f"class {title}(ABC):"]
    lines += [f"    {name} = None" for name in interface.fields]
    for name, text in interface.methods.items():
        words, parameters = _split(text)
        if "static" in words:
            lines.append("    @staticmethod")
        if "class" in words:
            lines.append("    @classmethod")
        if "abstract" in words:
            lines.append("    @abstractmethod")
        lines.append(f"    def {name}({parameters}): return None")
    scope: dict[str, Any] = {
        "ABC": abc.ABC,
        "abstractmethod": abc.abstractmethod,
        "AttentionType": _TYPES,
        "__name__": module,
    }
    exec("\n".join([*lines, "    pass"]), scope)
    return scope[title]


def _split(text: str) -> tuple[set[str], str]:
    """("abstract", "static", "class"), and the parameters."""
    words: set[str] = set()
    while text.partition(" ")[0] in ("abstract", "static", "class"):
        word, _, text = text.partition(" ")
        words.add(word)
    return words, "" if text == "()" else text


def accepts(function: Any, text: str, *, is_bound: bool) -> None:
    """TypeError unless a method takes what an engine's callers may pass: by name, and by place, but
    for what our method takes as **kwargs."""
    parameters = _split(text)[1]
    wanted = inspect.signature(eval(f"lambda {parameters}: None", {"AttentionType": _TYPES}))
    names = [x for x in wanted.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    if is_bound:
        names = names[1:]
    signature = inspect.signature(function)
    own = [x for x in signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    is_open = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
    count = len(own) if is_open else len(names)
    signature.bind(*names[:count], **{x.name: None for x in names[count:]})
    signature.bind(**{x.name: None for x in names})
    signature.bind(**{x.name: None for x in names if x.default is x.empty})


# --- the real sources ---


def real_classes(patch: pytest.MonkeyPatch, package: str) -> None:
    """The same modules with the classes of an importable engine's sources: their own methods, over
    mocks of all that their modules import. Raises LookupError if it is not there."""
    root = _root(package)
    for name, classes in MODULES.items():
        if name.partition(".")[0] == package:
            tree = ast.parse(_file(root, name).read_text("utf-8"))
            found = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef)}
            made = module(patch, name)
            for title in filter(None, classes):
                setattr(made, title, _real_class(found[title], found, name))


def _real_class(node: ast.ClassDef, known: dict[str, ast.ClassDef], module: str) -> type:
    """A class of its definition: bases in the same file are made too, others are left out."""
    bases = [ast.unparse(x).partition("[")[0] for x in node.bases]
    scope: dict[str, Any] = {"__name__": module, "ABC": abc.ABC}
    scope["abstractmethod"] = abc.abstractmethod
    scope |= {x: _real_class(known[x], known, module) for x in bases if x in known}
    node.bases = [ast.Name(x, ast.Load()) for x in bases if x in known or x == "ABC"]
    node.decorator_list, node.keywords = [], []
    for x in ast.walk(node):
        if isinstance(x, ast.FunctionDef):
            x.decorator_list = [d for d in x.decorator_list if ast.unparse(d) in _KEPT]
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and x.id not in scope and not hasattr(builtins, x.id):
            scope[x.id] = mock.MagicMock(name=x.id)
    tree = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(tree, module, "exec", flags=annotations.compiler_flag), scope)
    return scope[node.name]


_KEPT = "abstractmethod", "staticmethod", "classmethod", "property"


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(package)
    return Path(next(iter(spec.submodule_search_locations)))


def _file(root: Path, name: str) -> Path:
    return root.joinpath(*name.split(".")[1:]).with_suffix(".py")


def differences(package: str) -> list[str]:
    """What an importable engine's sources say otherwise. Raises LookupError if it is not there."""
    root, found = _root(package), []
    for name, classes in MODULES.items():
        if name.partition(".")[0] != package:
            continue
        path = _file(root, name)
        if not path.exists():
            found.append(f"{name}: is not there")
            continue
        tree = ast.parse(path.read_text("utf-8"))
        by_name = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for title, interface in classes.items():
            node: Any = by_name.get(title) if title else tree
            if node is None:
                found.append(f"{name}.{title}: is not there")
            else:
                found += [f"{name}.{title}.{x}" for x in _compare(node, interface, bool(title))]
    return found


def _compare(node: Any, interface: Interface, is_class: bool) -> list[str]:
    methods = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
    found = []
    for name, text in interface.methods.items():
        if name not in methods:
            found.append(f"{name}: is not there")
            continue
        words, parameters = _split(text)
        real = _parameters(methods[name]), _words(methods[name])
        if real[0] != parameters:
            found.append(f"{name}({real[0]}), here ({parameters})")
        if is_class and real[1] != words:
            found.append(f"{name}: {sorted(real[1])}, here {sorted(words)}")
    abstract = {name for name, x in methods.items() if "abstract" in _words(x)}
    found += [f"{name}: is abstract" for name in sorted(abstract - set(interface.methods))]
    fields = _fields(node)
    return found + [f"{name}: is not there" for name in interface.fields if name not in fields]


def _parameters(node: ast.FunctionDef) -> str:
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(node.args)


def _words(node: ast.FunctionDef) -> set[str]:
    names = {"abstractmethod": "abstract", "staticmethod": "static", "classmethod": "class"}
    return {names[x] for x in map(ast.unparse, node.decorator_list) if x in names}


def _fields(node: Any) -> set[str]:
    """Names of a class's body, and attributes of self that its methods set."""
    found = set()
    for x in ast.walk(node):
        targets = x.targets if isinstance(x, ast.Assign) else []
        if isinstance(x, ast.AnnAssign):
            targets = [x.target]
        for target in targets:
            for y in target.elts if isinstance(target, ast.Tuple) else [target]:
                is_own = isinstance(y, ast.Attribute) and ast.unparse(y.value) == "self"
                if is_own or isinstance(y, ast.Name):
                    found.add(y.attr if isinstance(y, ast.Attribute) else y.id)
    return found

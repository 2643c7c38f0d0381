"""A Hugging Face config.json, to the selection of kernels that the model needs."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from ..core import dtypes
from ..core.parse import require_int
from ..core.problem import LATENT_HEAD_DIMS
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from ..launch.instances import Selection

# Names of head dims that are not attention's, by their first part.
_OTHER_LAYERS = ("linear_", "mamba_")
_ORDINARY = tuple(name for name in Selection.operations if name != "mla")
_LATENT = "prefill", "mla", "append", "merge", "page"


def read(path: Path, chosen: Container[str] = ()) -> Selection:
    """The selection of the config.json at `path`.

    given: fields of Selection that the caller replaces, so that the file need not have them. RoPE
    is left to the model, which rotates q and k itself; windows and sinks are read at run time.
    Raises ArgumentError for a file or field that is missing or makes no sense, UnsupportedError for
    a kind of attention without kernels.
    """
    config = _load_text(path)
    is_latent = bool(config.get("kv_lora_rank"))
    fields: dict[str, Any] = {"options": (_options(config),), "operations": _ORDINARY}
    if is_latent:
        fields |= _latent(config, chosen)
    elif "groups" not in chosen:
        fields["groups"] = (_group(config),)
    if not is_latent and "head_dims" not in chosen:
        fields["head_dims"] = (_head_dims(config),)
    if "dtypes" not in chosen:
        fields["dtypes"] = (_dtypes(config),)
    return Selection(**fields)


def attention(path: Path, dtype: dtypes.DType | None = None) -> AttentionSpec:
    """What a layer of the model at `path` asks of a batch, causal and over ragged keys of the
    queries' type: of latent attention in absorbed form.

    dtype: of queries, in place of the file's. Raises as `read`.
    """
    config = _load_text(path)
    dtype = _dtypes(config)[0] if dtype is None else dtype
    kv_heads, is_latent = 1, bool(config.get("kv_lora_rank"))
    heads = _count(config, "num_attention_heads")
    if is_latent:
        latent, rope = _latent_dims(config)
        qk, vo = latent + rope, latent
    else:
        kv_heads, (qk, vo) = heads // _group(config), _head_dims(config)
    options = _options(config)
    return AttentionSpec(
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=qk,
        head_dim_vo=vo,
        dtype_q=dtype,
        dtype_kv=dtype.of_values,
        dtype_o=dtype.of_output,
        causal=True,
        pos_encoding="ALIBI" if "alibi" in options else "NONE",
        logits_soft_cap=float(config["attn_logit_softcapping"]) if "soft_cap" in options else 0.0,
        latent=is_latent,
    )


def _load_text(path: Path) -> dict[str, Any]:
    """The config of a model's text."""
    config = _load(path)
    inner = config.get("text_config")
    if "num_attention_heads" not in config and isinstance(inner, dict):
        config = {"dtype": config.get("dtype"), "torch_dtype": config.get("torch_dtype"), **inner}
    return config


def _latent_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    """The latent and the rope columns."""
    latent = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    if latent not in LATENT_HEAD_DIMS:
        wanted = ", ".join(f"{a} and {b}" for a, b in LATENT_HEAD_DIMS)
        raise UnsupportedError(
            f"--model: kv_lora_rank, qk_rope_head_dim: no kernels for {latent[0]} and {latent[1]}; "
            f"wanted {wanted}"
        )
    return latent


def _latent(config: Mapping[str, Any], chosen: Container[str]) -> dict[str, Any]:
    """What a model of latent attention needs: its prompts as heads of their own, without a cache of
    theirs, and everything else in absorbed form."""
    _, rope = _latent_dims(config)
    fields: dict[str, Any] = {"operations": _LATENT, "groups": (1,), "page_sizes": (0,)}
    if "head_dims" not in chosen:
        qk = _count(config, "qk_nope_head_dim") + rope
        fields["head_dims"] = ((qk, _count(config, "v_head_dim")),)
    return fields


def _load(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ArgumentError(f"--model: {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # what it is, or how deep it nests
        raise ArgumentError(f"--model: {path} is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"--model: {path} holds {type(config).__name__}; wanted an object")
    return config


def _count(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise ArgumentError(
            f"--model: the file has no {name}; give --group and --head-dim, or a Hugging Face "
            "config.json that has it"
        )
    return require_int(config[name], f"--model: {name}")


def _group(config: Mapping[str, Any]) -> int:
    heads = _count(config, "num_attention_heads")
    # Models in which every query head has a key head of its own leave it out.
    has_kv_heads = config.get("num_key_value_heads") is not None
    kv_heads = _count(config, "num_key_value_heads") if has_kv_heads else heads
    if heads % kv_heads:
        raise ArgumentError(
            f"--model: num_attention_heads: {heads} is no multiple of num_key_value_heads, "
            f"{kv_heads}"
        )
    return heads // kv_heads


def _head_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    known = "head_dim", "v_head_dim"
    for name, value in config.items():
        is_other = name in known or name.startswith(_OTHER_LAYERS) or value is None
        if name.endswith("head_dim") and not is_other:
            raise ArgumentError(f"--model: {name} is not known; name the head dims by --head-dim")
    if config.get("head_dim") is not None:
        qk = _count(config, "head_dim")
    else:
        heads, hidden = (_count(config, x) for x in ("num_attention_heads", "hidden_size"))
        if hidden % heads:
            raise ArgumentError(
                f"--model: hidden_size: {hidden} is no multiple of num_attention_heads, {heads}, "
                "and there is no head_dim; name it by --head-dim"
            )
        qk = hidden // heads
    return qk, qk if config.get("v_head_dim") is None else _count(config, "v_head_dim")


def _dtypes(config: Mapping[str, Any]) -> tuple[dtypes.DType, dtypes.DType]:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        raise ArgumentError("--model: the file has neither dtype nor torch_dtype; give --dtype")
    result = dtypes.parse(name, "--model: dtype")
    if not result.is_float16:
        raise UnsupportedError(f"--model: dtype: no kernels for {result}; give --dtype")
    return result, result


def _options(config: Mapping[str, Any]) -> frozenset[str]:
    cap = config.get("attn_logit_softcapping")
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float)):
        raise ArgumentError(f"--model: attn_logit_softcapping: got {cap!r}; wanted a number")
    has_slopes = config.get("alibi") or config.get("position_embedding_type") == "alibi"
    result = [name for name, has in (("soft_cap", cap), ("alibi", has_slopes)) if has]
    return frozenset(result or ["none"])

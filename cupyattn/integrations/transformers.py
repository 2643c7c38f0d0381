"""transformers: `register()` adds attn_implementation="cupyattn" and its paged forms.

import cupyattn.integrations.transformers

cupyattn.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cupyattn")
"""

from __future__ import annotations

from typing import Any

from ..dot_product import dot_product_attention, single_call
from ..errors import UnsupportedError
from ..flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

NAME = "cupyattn"
# transformers takes its own flash path, with block tables and CUDA graphs, by this in a name.
FLASH_NAME = "cupyattn_flash_attention_3"


def register() -> None:
    """Make attn_implementation="cupyattn" known to transformers, for models and generate(), and
    "paged|cupyattn" for continuous batching (generate_batch).

    The alias "cupyattn_flash_attention_3" does the same, but its name lets transformers' continuous
    batching take what it does for flash-attn: block tables, CUDA graphs and asynchronous steps. It
    is also what models with "flash" among their requirements accept.

    Also makes our calls operators of torch.compile's graphs (cupyattn.integrations.torch), for
    static caches, whose decoding transformers compiles. A second call changes nothing.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from . import torch as _  # noqa: F401

    for name in (NAME, FLASH_NAME):
        AttentionInterface.register(name, attention)
        AttentionInterface.register(f"paged|{name}", paged_attention)
        AttentionMaskInterface.register(name, attention_mask)
        AttentionMaskInterface.register(f"paged|{name}", no_mask)
    _serve_flash_path()


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask of "paged|cupyattn": its offsets say which keys a row sees."""


def _serve_flash_path() -> None:
    """Let transformers find flash_attn's functions by our alias, where it looks for a package."""
    from transformers import modeling_flash_attention_utils as utils

    found = utils._lazy_imports
    if getattr(found, "serves_cupyattn", False):
        return

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation is not None and implementation.removeprefix("paged|") == FLASH_NAME:
            functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
            return *functions, utils._pad_input, utils._unpad_input
        return found(implementation, *args, **kwargs)

    lazy_imports.serves_cupyattn = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


# --- masks ---


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Any:
    """What `attention` is to get as its mask, made once for all layers of a kind.

    None        causality, a window and whole caches say it all
    int32 [b, 2, 1, 1]  the first key of each request, behind its padding, and the end of its last;
                rows are causal, within their window, and the last one is at the last key. (Of four
                axes, so that transformers passes it on where generate() has made it.)
    bool [b, 1, q, kv]  anything else: packed sequences, chunks, images, holes

    A two-dimensional mask on a GPU is waited for once, as transformers' flash path does.
    """
    import torch
    from transformers import masking_utils

    if torch.compiler.is_compiling():
        # Nothing can be waited for there, and functions made in a graph have no parts.
        causal = mask_function in (None, masking_utils.causal_mask_function)
        is_plain = causal and attention_mask is None
    else:
        is_plain = _is_plain(mask_function)
    if is_plain:
        padding = _left_padding(attention_mask, kv_length, kv_offset)
        if padding is not None:
            end = q_offset + q_length - kv_offset
            is_number = isinstance(end, int)
            if is_number and end == kv_length and isinstance(padding, int):
                return None
            return _ranges(padding, end, batch_size, device)
    kwargs["allow_is_causal_skip"] = False
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function or masking_utils.causal_mask_function,
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        device=device,
        **kwargs,
    )


def _is_plain(mask_function: Any) -> bool:
    """Whether a mask is that of causal rows, in a window or not.

    transformers makes it of functions; where it combines them, the names of the parts say it.
    """
    from transformers import masking_utils

    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return True
    parts = _parts(mask_function)
    if masking_utils.causal_mask_function not in parts or len(parts) != 2:
        return False
    window = next(x for x in parts if x is not masking_utils.causal_mask_function)
    return getattr(window, "__qualname__", "").startswith("sliding_window_overlay.")


def _parts(mask_function: Any) -> tuple[Any, ...]:
    """The functions that and_masks() was given."""
    if not getattr(mask_function, "__qualname__", "").startswith("and_masks."):
        return ()
    names, cells = mask_function.__code__.co_freevars, mask_function.__closure__ or ()
    found = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    return tuple(found.get("mask_functions", ()))


def _left_padding(attention_mask: Any, kv_length: int, kv_offset: Any) -> Any:
    """[b] keys to skip at the front, 0 for none anywhere; None for a mask with other holes."""
    if attention_mask is None:
        return 0
    if not isinstance(kv_offset, int):
        return None
    seen = attention_mask[:, kv_offset : kv_offset + kv_length]
    if seen.all():
        return 0
    # Padding behind the keys is left of nothing: a static cache has room there.
    if not (seen[:, 1:] >= seen[:, :-1]).all():
        return None
    return seen.shape[1] - seen.sum(-1)


def _ranges(padding: Any, end: Any, batch_size: int, device: Any) -> Any:
    import torch

    made = torch.empty(batch_size, 2, 1, 1, dtype=torch.int32, device=device)
    made[:, 0, 0, 0] = padding
    made[:, 1] = end
    return made


# --- attention ---


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The attention of a layer, as transformers calls it.

    query   [b, heads, q, head_dim]; key and value [b, kv_heads, kv, head_dim], in place.
    attention_mask   from the function of that name, or a bool mask [b, 1, q, kv] of the user's.
    s_aux   sinks [heads].

    Returns (out [b, q, heads, head_dim of value], None): there are no weights to return. Raises
    UnsupportedError for dropout, weights, and masks that are added to the logits.
    """
    _refuse(dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    is_whole = attention_mask is None and kwargs.get("cu_seq_lens_q") is None
    if is_whole and q.shape[0] == 1 and s_aux is None:
        window = _window(sliding_window, causal)
        return _one_request(q, k, v, causal, window, scaling, softcap), None
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": _sinks(s_aux)}
    if kwargs.get("cu_seq_lens_q") is not None and attention_mask is None:
        options |= {"causal": causal, "window_size": _window(sliding_window, causal)}
        return _packed(q, k, v, kwargs, options), None
    if attention_mask is None or attention_mask.shape[1:] == (2, 1, 1):
        options |= {"causal": causal, "window_size": _window(sliding_window, causal)}
        return _unmasked(q, k, v, attention_mask, options), None
    return _masked(q, k, v, attention_mask, options), None


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(
            f"dropout: got {dropout}, and cupyattn has none; call model.eval(), or set the "
            "config's attention_dropout to 0"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            'output_attentions: cupyattn keeps no weights; use attn_implementation="eager"'
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(
            'position_bias: cupyattn adds no bias; use attn_implementation="eager"'
        )


def _window(size: Any, causal: bool) -> tuple[int, int]:
    """transformers counts a row's own key; both sides have a window where rows are not causal."""
    if not size:
        return -1, -1
    return (size - 1, 0) if causal else (size, size)


def _sinks(s_aux: Any) -> Any:
    return None if s_aux is None else s_aux.detach()


def _one_request(
    q: Any, k: Any, v: Any, causal: bool, window: tuple[int, int], scale: Any, softcap: Any
) -> Any:
    """A batch of one: the host knows its lengths and plans it, so nothing is planned on the GPU."""
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window[0], -1 if causal else window[1]),
        "softcap": softcap,
        "out": None,
        "return_softmax_lse": False,
    }
    function, arrays, named = single_call(q, k, v, q.shape[1], options)
    made = function(*arrays, **named)
    return made[None, None] if q.shape[1] == 1 else made[None]


def _unmasked(q: Any, k: Any, v: Any, ranges: Any, options: dict[str, Any]) -> Any:
    if ranges is None:
        return flash_attn_func(q, k, v, **options)
    # Keys in front of a request do not exist; those behind its last key are not filled yet.
    first, end = ranges[:, 0, 0, 0], ranges[:, 1, 0, 0]
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=first, **options)


def _packed(q: Any, k: Any, v: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Several sequences in one row of the batch, by their offsets."""
    rows, keys, values = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    offsets = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    most = {f"max_seqlen_{x}": kwargs.get(f"max_length_{x}") for x in "qk"}
    named: dict[str, Any] = options | most
    made = flash_attn_varlen_func(rows, keys, values, *offsets, **named)
    return made.reshape(*q.shape[:2], *made.shape[1:])


def _masked(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> Any:
    import torch

    if mask.dtype != torch.bool:
        raise UnsupportedError(
            f"attention_mask: dtype is {mask.dtype}, to be added to the logits; pass a bool mask, "
            "True where a row sees a key"
        )
    sinks = options["sinks"]
    return dot_product_attention(
        q,
        k,
        v,
        mask=mask[..., : k.shape[1]],
        scale=options["softmax_scale"],
        logits_soft_cap=options["softcap"],
        sinks=None if sinks is None else sinks.float(),
    )


# --- continuous batching ---


def paged_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    cache: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    block_table: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The attention of a layer over continuous batching's cache, to which it adds key and value.

    query   [1, heads, rows, head_dim], rows of all requests; key and value likewise.
    cu_seq_lens_q, cu_seq_lens_k   offsets of rows and keys; dicts by the type of layer, with
            max_seqlen_k.
    block_table   [groups, b, blocks]: for steps of one row a request, whose keys stay in blocks;
            without it keys are gathered by read_index.

    Returns (out [rows, heads, head_dim], None). attention_mask is not read: offsets, causality and
    the layer's window say the same.
    """
    _refuse(dropout, kwargs)
    if cache is None:
        raise UnsupportedError(
            'cache: "paged|cupyattn" is for continuous batching (generate_batch); use '
            'attn_implementation="cupyattn" for a standard forward'
        )
    window = getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    options = {
        "softmax_scale": getattr(module, "scaling", None) if scaling is None else scaling,
        "causal": True,
        "window_size": _window(window, True),
        "softcap": softcap or 0.0,
        "sinks": _sinks(s_aux),
    }
    if block_table is not None:
        return _decode(module, query, key, value, cache, cu_seq_lens_k, block_table, options), None
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    rows = query.transpose(1, 2)[0]
    made = flash_attn_varlen_func(
        rows, key, value, cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return made, None


def _decode(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    cache: Any,
    cu_seq_lens_k: Any,
    block_table: Any,
    options: dict[str, Any],
) -> Any:
    """One row of each request, over blocks in place."""
    group, index = cache.layer_index_to_group_indices[module.layer_idx]
    shape = -1, cache.block_size, cache.num_key_value_heads, cache.head_dim
    k_cache, v_cache = cache.key_cache[index].view(shape), cache.value_cache[index].view(shape)
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    count = k.shape[0]
    before = cu_seq_lens_k[1 : count + 1] - cu_seq_lens_k[:count] - 1
    made = flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v),
        cache_seqlens=before,
        block_table=block_table[group],
        **options,
    )
    return made.squeeze(1)

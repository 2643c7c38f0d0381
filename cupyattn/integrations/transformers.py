"""transformers: `register()` adds attn_implementation="cupyattn" and its paged forms.

In a program::

    import cupyattn.integrations.transformers

    cupyattn.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cupyattn")

Examples: :doc:`/docs/integrations/transformers`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from ..core import observed
from ..core.packages import needs
from ..decode import single_decode_with_kv_cache
from ..dot_product import dot_product_attention, single_call
from ..engine.run_single import find_step, keep_step, step_options
from ..errors import UnsupportedError
from ..flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

NAME = "cupyattn"
# transformers takes its own flash path, with block tables and CUDA graphs, by this in a name.
FLASH_NAME = "cupyattn_flash_attention_3"


@needs("transformers")
def register() -> None:
    """Make attn_implementation="cupyattn" known to transformers, for models, generate() and
    continuous batching (generate_batch).

    The alias "cupyattn_flash_attention_3" does the same, but its name lets transformers' continuous
    batching take what it does for flash-attn: block tables, CUDA graphs and asynchronous steps.
    generate_batch() takes it for the time of its run where a model has "cupyattn".

    From then on models whose attention does not go through transformers' interface refuse both
    names, as they refuse "sdpa": ValueError where a model is made, and in
    set_attn_implementation().

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
    _check_models()
    _serve_continuous_batching()


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask of "paged|cupyattn": its offsets say which keys a row sees."""


def _is_ours(implementation: Any) -> bool:
    return isinstance(implementation, str) and implementation.removeprefix("paged|") in (
        NAME,
        FLASH_NAME,
    )


def _replace(owner: Any, name: str, make: Any) -> None:
    """Replace an attribute by `make` of it, once."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "serves_cupyattn", False):
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement.serves_cupyattn = True
    setattr(owner, name, replacement)


def _serve_flash_path() -> None:
    """Let transformers find flash_attn's functions by our alias, where it looks for a package."""
    from transformers import modeling_flash_attention_utils as utils

    def make(original: Any) -> Any:
        def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            if implementation is not None and implementation.removeprefix("paged|") == FLASH_NAME:
                functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
                return *functions, utils._pad_input, utils._unpad_input
            return original(implementation, *args, **kwargs)

        return lazy_imports

    _replace(utils, "_lazy_imports", make)


def _serve_continuous_batching() -> None:
    """Let generate_batch() run a model of ours by the flash-named alias: newer transformers takes
    no other name, and any would take an installed flash-attn instead of a name without "flash"."""
    from transformers.generation.continuous_batching import continuous_api

    def make(original: Any) -> Any:
        def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            before = model.config._attn_implementation
            if not _is_ours(before) or before.removeprefix("paged|") != NAME:
                return original(self, model, *args, **kwargs)
            model.set_attn_implementation(before.replace(NAME, FLASH_NAME))
            original(self, model, *args, **kwargs)
            self._original_attn_impl = before

        return switch

    manager = continuous_api.ContinuousBatchingManager
    _replace(manager, "switch_to_cb_friendly_attn", make)


# --- which models ---

_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\b", re.MULTILINE)
_INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")
# Classes by the name of the implementation, of models older than the interface.
_CLASSES = re.compile(r"_ATTENTION_CLASSES\[")
_READS_MASKS = re.compile(r"attention_mask(\.dtype == torch\.bool|\[:, [0:])")
# Configurations of models that compute with the mask before attention gets it.
_configs_with_plain_masks: set[type] = set()


def _check_models() -> None:
    """Let models say that they cannot take our names, where they say it of transformers' own."""
    from transformers import PreTrainedModel

    def make_correct(original: Any) -> Any:
        def correct(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
            if _is_ours(requested):
                model: Any = type(self)
                _require_interface(model, str(requested))
                if _READS_MASKS.search(_source(model) or ""):
                    _configs_with_plain_masks.add(type(self.config))
            return str(original(self, requested, *args, **kwargs))

        return correct

    def make_check(original: Any) -> Any:
        def check(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
            if not _is_ours(requested):
                return str(original(self, requested, *args, **kwargs))
            # The flash kernels that a model is for are so because others have no sinks.
            self._compatible_flash_implementations = None
            try:
                return str(original(self, requested, *args, **kwargs))
            finally:
                del self._compatible_flash_implementations

        return check

    _replace(PreTrainedModel, "get_correct_attn_implementation", make_correct)
    _replace(PreTrainedModel, "_check_and_adjust_attn_implementation", make_check)


def _require_interface(model: type, name: str) -> None:
    """Raise ValueError, as transformers does for "sdpa", where a class of models has attention that
    is not that of the interface: it would run its own over masks made for ours."""
    if not _has_interface(model):
        raise ValueError(
            f'{model.__name__} does not support attn_implementation="{name}": its attention does '
            "not go through transformers' AttentionInterface; load it with "
            'attn_implementation="eager", or name the parts of it that do, as '
            f'{{"text_config": "{name}"}}'
        )


@functools.cache
def _has_interface(model: Any) -> bool:
    kinds = [
        bool(getattr(model, f"_supports_{kind}", False))
        for kind in ("sdpa", "flash_attn", "flex_attn")
    ]
    # What SDPA has no arguments for (sinks) is ours too, in models that are written for any.
    is_served = kinds[0] or (any(kinds) and bool(model._supports_attention_backend))
    source = _source(model)
    if source is None:  # its flags are all there is
        return is_served
    if _ATTENTION.search(source) is None:
        return True  # parts that are models are asked themselves
    if not is_served:
        return False
    by_class = _CLASSES.search(source) is not None
    if _INTERFACE.search(source):
        return all(kinds) or not by_class
    # Attention of its own is right as long as it gets no masks of ours.
    return not by_class and "masking_utils" not in source


@functools.cache
def _source(model: Any) -> str | None:
    """The text of the module of a class, None where it was made without a file."""
    try:
        return inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        return None


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

    None the layer's causality, its window and whole caches say it all

    int32 [b, 2, 1, 1]  the first key of each request, behind its padding, and the end of its last;
    rows are causal, within their window, and the last one is at the last key. (Of four axes, so
    that transformers passes it on where generate() has made it.) bool [b, 1, q, kv]  anything else:
    packed sequences, chunks, images, holes, and models that compute with their mask

    A two-dimensional mask on a GPU is waited for once, as transformers' flash path does.
    """
    import torch
    from transformers import masking_utils

    # Layers that are made to see both sides have causal masks at times.
    says_causal = not getattr(kwargs.get("config"), "use_bidirectional_attention", False)
    if torch.compiler.is_compiling():
        # Nothing can be waited for there, and functions made in a graph have no parts.
        causal = mask_function in (None, masking_utils.causal_mask_function)
        is_plain = causal and attention_mask is None
    else:
        is_plain = _is_plain(mask_function)
    # transformers itself says so too of steps over static caches, whose offset is an array.
    reads_mask = not kwargs.get("allow_is_causal_skip", True) and isinstance(q_offset, int)
    reads_mask = reads_mask or type(kwargs.get("config")) in _configs_with_plain_masks
    if is_plain and not reads_mask:
        padding = _left_padding(attention_mask, kv_length, kv_offset)
        if padding is not None:
            end = q_offset + q_length - kv_offset
            is_number = isinstance(end, int)
            if is_number and end == kv_length and isinstance(padding, int) and says_causal:
                return None
            ranges = _ranges(padding, end, batch_size, device)
            if is_number and end == kv_length and q_length == 1 and not isinstance(padding, int):
                ranges.cupyattn_padding = padding
            return ranges
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
    enclosed = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    return tuple(enclosed.get("mask_functions", ()))


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

    ranges = torch.empty(batch_size, 2, 1, 1, dtype=torch.int32, device=device)
    ranges[:, 0, 0, 0] = padding
    ranges[:, 1] = end
    return ranges


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

    Parameters
    ----------
    query
        [b, heads, q, head_dim]; key and value [b, kv_heads, kv, head_dim], in place. Where autocast
        is on, or their dtypes differ, they are cast as SDPA casts them.
    attention_mask
        From the function of that name; or of the model's or the user's own, of axes that broadcast
        to [b, heads, q, kv]: bool, or floats that are added to the logits, of which -1e9 and less
        (half the least of float16) hide a key.
    position_bias
        floats [1 or b, heads, q, kv], added to the logits.
    s_aux
        Sinks [heads].
    cu_seq_lens_q, cu_seq_lens_k
        Offsets of sequences in one row of the batch.
    block_table, k_cache, v_cache
        With them: blocks of a cache that key and value go into, one row of each request.

    Returns
    -------
    tuple of arrays
        (out [b, q, heads, head_dim of value], None): there are no weights to return.

    Raises
    ------
    CupyAttnError
        UnsupportedError for dropout and weights.
    """
    is_plain = attention_mask is s_aux is None and not dropout
    if is_plain and query.shape[2] == 1 and _is_known(kwargs):
        window = _window(sliding_window, _is_causal(module, is_causal))
        out = find_step(query, key, value, step_options(window[0], scaling, softcap))
        if out is not None:
            return out, None
    _refuse(dropout, kwargs)
    if query.dtype != value.dtype or query.dtype != key.dtype or query.dtype.itemsize == 4:
        query, key, value = _cast(query, key, value)
    causal = _is_causal(module, is_causal)
    offsets, bias = kwargs.get("cu_seq_lens_q"), kwargs.get("position_bias")
    is_whole = attention_mask is None and offsets is None and bias is None
    if is_whole and query.shape[2] == 1:
        window = _window(sliding_window, causal)
        out = _one_row(query, key, value, window[0], scaling, softcap, s_aux)
        if out is not None:
            return out, None
    # What ranges mark is causal, whatever the layer says.
    has_ranges = attention_mask is not None and attention_mask.shape[1:] == (2, 1, 1)
    causal = causal or has_ranges
    if has_ranges and offsets is bias is s_aux is None and query.shape[2] == 1:
        window = _window(sliding_window, causal)
        out = _one_padded_row(query, key, value, attention_mask, window, scaling, softcap)
        if out is not None:
            return out, None
    q, k, v = (_with_columns(x).transpose(1, 2) for x in (query, key, value))
    if is_whole and q.shape[0] == 1 and s_aux is None:
        window = _window(sliding_window, causal)
        return _one_request(q, k, v, causal, window, scaling, softcap), None
    options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": _sinks(s_aux),
        "causal": causal,
        "window_size": _window(sliding_window, causal),
    }
    if offsets is not None and attention_mask is None and bias is None:
        return _packed(q, k, v, kwargs, options), None
    if bias is not None:
        if attention_mask is None or has_ranges:
            attention_mask = _seen(q, k, attention_mask if has_ranges else None, options)
        return _biased(q, k, v, _with_mask(bias, attention_mask), options), None
    if attention_mask is None or has_ranges:
        return _unmasked(q, k, v, attention_mask, options), None
    return _masked(q, k, v, attention_mask, options), None


# Arguments by which a call without a mask is more than rows, keys and options.
_MORE = frozenset(
    ("block_indices", "cu_seq_lens_q", "indices", "output_attentions", "position_bias")
)


def _is_known(kwargs: dict[str, Any]) -> bool:
    """Whether a call may be one of those that `find_step` knows."""
    import torch

    if torch.compiler.is_compiling():
        return False  # no look-up is part of a graph
    if _MORE.isdisjoint(kwargs):
        return True
    return all(kwargs.get(name) is None or kwargs[name] is False for name in _MORE)


def _is_causal(module: Any, is_causal: bool | None) -> bool:
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


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
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{name}: the model chooses keys for each row, which is a mask in eager attention "
                'alone; use attn_implementation="eager"'
            )


def _cast(*arrays: Any) -> Any:
    """Arrays of one dtype: autocast's, or where it is off the smallest among them."""
    import torch

    kind, dtype = arrays[0].device.type, arrays[0].dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        for x in arrays:
            dtype = x.dtype if x.dtype.itemsize < dtype.itemsize else dtype
    return tuple(x.to(dtype) for x in arrays)


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
    out = function(*arrays, **named)
    return out[None, None] if q.shape[1] == 1 else out[None]


def _with_columns(x: Any) -> Any:
    """An array whose last axis is contiguous, as convolutions leave another one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _one_row(q: Any, k: Any, v: Any, window_left: int, scale: Any, softcap: Any, s_aux: Any) -> Any:
    """A step of decoding over keys of one length, as one row of b * heads heads: nothing is to be
    planned. None where the heads of all requests are not equally far apart."""
    count, heads, _, head_dim = q.shape
    arrays = q, k, v
    is_in_place = k.is_contiguous() and v.is_contiguous()
    if not is_in_place:
        k, v = _with_columns(k), _with_columns(v)
        for x in (k, v):
            if count > 1 and x.stride(0) != x.shape[1] * x.stride(1):
                return None
    if count == 1:
        k, v = k.squeeze(0), v.squeeze(0)
    else:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    sinks = None
    if s_aux is not None:
        sinks = s_aux.detach().float()
        sinks = sinks if count == 1 else sinks.repeat(count)
    rows = q.reshape(-1, head_dim).contiguous()
    out = single_decode_with_kv_cache(
        rows,
        k,
        v,
        "HND",
        window_left=window_left,
        logits_soft_cap=softcap,
        sm_scale=scale,
        sinks=sinks,
    )
    is_kept = is_in_place and sinks is None and not observed.IS_ON
    if is_kept and _is_known({}) and rows.data_ptr() == q.data_ptr():
        keep_step(arrays, (rows, k, v), step_options(window_left, scale, softcap))
    return out.view(count, 1, heads, -1)


# Without a plan, which is made on the GPU.
_MAX_REQUESTS = 8192


def _one_padded_row(
    q: Any, k: Any, v: Any, ranges: Any, window: tuple[int, int], scale: Any, softcap: Any
) -> Any:
    """A step of decoding over keys of one length, of which each request's first are padding: each
    KV head of a request is a request, so that strides are those of all steps. None where the cache
    is not one that grows."""
    import torch

    if torch.compiler.is_compiling():
        return None  # attributes of tensors are no part of a graph
    padding = getattr(ranges, "cupyattn_padding", None)
    if padding is None or not (k.is_contiguous() and v.is_contiguous()):
        return None
    count, heads, _, head_dim = q.shape
    kv_heads, length = k.shape[1:3]
    if count * kv_heads > _MAX_REQUESTS:
        return None
    lengths = getattr(ranges, "cupyattn_lengths", None)
    if lengths is None or lengths[0] != (kv_heads, length):
        lengths = (kv_heads, length), *_lengths_by_head(padding, kv_heads, length)
        ranges.cupyattn_lengths = lengths  # for the other layers
    _, row_offsets, starts, lens = lengths
    out = flash_attn_varlen_func(
        q.reshape(count * kv_heads, -1, head_dim),
        k.view(-1, 1, head_dim),
        v.view(-1, 1, v.shape[3]),
        row_offsets,
        starts,
        1,
        length,
        softmax_scale=scale,
        causal=True,
        window_size=window,
        softcap=softcap or 0.0,
        seqused_k=lens,
    )
    return out.view(count, 1, heads, -1)


def _lengths_by_head(padding: Any, kv_heads: int, length: int) -> tuple[Any, Any, Any]:
    """Of each KV head of each request: its row, its first key among all, how many keys count."""
    import torch

    first = padding.to(torch.int32)[:, None].expand(-1, kv_heads).reshape(-1)
    heads = torch.arange(first.shape[0] + 1, dtype=torch.int32, device=first.device)
    starts = heads * length
    starts[:-1] += first
    return heads, starts, length - first


def _unmasked(q: Any, k: Any, v: Any, ranges: Any, options: dict[str, Any]) -> Any:
    if ranges is None:
        return flash_attn_func(q, k, v, **options)
    # Keys in front of a request do not exist; those behind its last key are not filled yet.
    first, end = ranges[:, 0, 0, 0], ranges[:, 1, 0, 0]
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=first, **options)


def _packed(q: Any, k: Any, v: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Several sequences in one row of the batch, by their offsets; or one row of each request over
    blocks of a cache."""
    q_offsets, kv_offsets = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    if kwargs.get("block_table") is not None:
        arrays = (x.transpose(0, 1) for x in (q, k, v))
        caches = kwargs["k_cache"], kwargs["v_cache"]
        return _over_blocks(arrays, caches, kv_offsets, kwargs["block_table"], options)
    rows, keys, values = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    bounds = {f"max_seqlen_{x}": kwargs.get(f"max_length_{x}") for x in "qk"}
    named: dict[str, Any] = options | bounds
    out = flash_attn_varlen_func(rows, keys, values, q_offsets, kv_offsets, **named)
    return out.reshape(*q.shape[:2], *out.shape[1:])


def _over_blocks(
    arrays: Any, caches: tuple[Any, Any], kv_offsets: Any, table: Any, options: dict[str, Any]
) -> Any:
    """One row [1, heads, head_dim] of each request, whose key goes behind its others in blocks."""
    q, k, v = arrays
    k_cache, v_cache = caches
    count = q.shape[0]
    before = kv_offsets[1 : count + 1] - kv_offsets[:count] - 1
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=before, block_table=table, **options
    )
    return out.transpose(0, 1)


def _masked(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> Any:
    """By a mask of the model's or the user's own, which says all of causality and windows."""
    import torch

    if mask.is_floating_point():
        return _biased(q, k, v, mask, options)
    if mask.dtype != torch.bool:
        raise UnsupportedError(
            f"attention_mask: dtype is {mask.dtype}; wanted a bool mask, True where a row sees a "
            "key, or floats to add to the logits"
        )
    return _dense(q, k, v, options, mask=mask[..., : k.shape[1]])


# Masks of floats hide keys by the least number there is, or by this. In base 2 the one is no
# number, and logits added to the other have no digits.
_HIDES = -1e9


def _biased(q: Any, k: Any, v: Any, bias: Any, options: dict[str, Any]) -> Any:
    import torch

    bias = bias[..., : k.shape[1]]
    hidden = max(_HIDES, torch.finfo(bias.dtype).min / 2)
    bias = bias.masked_fill(bias <= hidden, -torch.inf)
    return _dense(q, k, v, options, bias=bias.contiguous())


def _dense(q: Any, k: Any, v: Any, options: dict[str, Any], **named: Any) -> Any:
    sinks = options["sinks"]
    return dot_product_attention(
        q,
        k,
        v,
        scale=options["softmax_scale"],
        logits_soft_cap=options["softcap"],
        sinks=None if sinks is None else sinks.float(),
        **named,
    )


def _seen(q: Any, k: Any, ranges: Any, options: dict[str, Any]) -> Any:
    """bool [b or 1, 1, q, kv]: the keys that each row sees; None for all."""
    import torch

    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    if ranges is None and left < 0 and right < 0:
        return None
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    column = torch.arange(k.shape[1], device=q.device)
    first, end = (0, k.shape[1]) if ranges is None else (ranges[:, :1], ranges[:, 1:])
    position = rows + end - q.shape[1]
    seen = column >= (first if left < 0 else (position - left).clamp(min=first))
    seen = seen & (column < end if right < 0 else column <= position + right)
    return seen.expand(-1, -1, *seen.shape[-2:]) if seen.dim() == 4 else seen[None, None]


def _with_mask(bias: Any, mask: Any) -> Any:
    """A bias with a mask, of bools or of floats to add."""
    import torch

    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask[..., : bias.shape[-1]], bias, -torch.inf)
    return bias + mask


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

    Parameters
    ----------
    query
        [1, heads, rows, head_dim], rows of all requests; key and value likewise.
    cu_seq_lens_q, cu_seq_lens_k
        Offsets of rows and keys; dicts by the type of layer, with max_seqlen_k.
    block_table
        [groups, b, blocks]: for steps of one row a request, whose keys stay in blocks; without it
        keys are gathered by read_index.

    Returns
    -------
    tuple of arrays
        (out [rows, heads, head_dim], None). attention_mask is not read: offsets, causality and the
        layer's window say the same.
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
    out = flash_attn_varlen_func(
        rows, key, value, cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return out, None


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
    caches = cache.key_cache[index].view(shape), cache.value_cache[index].view(shape)
    arrays = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    return _over_blocks(arrays, caches, cu_seq_lens_k, block_table[group], options)[0]

"""cuDNN's calls: decode and prefill over pages or ragged rows, with lengths on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from . import array
from .core import overloads, parse
from .core.names import refuse_names
from .core.tracing import untraced
from .engine.arrays import Arrays, make_arrays
from .engine.check_planless import Options, options_of
from .engine.run_planless import run
from .engine.views import Names, next_power_of_two, number_or_array
from .errors import ArgumentError, UnsupportedError
from .typing import Array, ArrayT, Scale

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_NAMES = Names(
    "q",
    "k_cache",
    "v_cache",
    kv_lens="actual_seq_lens_kv",
    qo_offsets="batch_offsets_q",
    sm_scale="scale",
    output_scale="v_scale",
    max_q_len="max_token_per_sequence",
    max_kv_len="max_sequence_kv",
    o_dtype="o_data_type",
)


@untraced
@overloads.cudnn_batch_decode_with_kv_cache
def cudnn_batch_decode_with_kv_cache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    scale: float,
    workspace_buffer: Any,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Array | None = None,
    block_tables: Array | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: Array | None = None,
    batch_offsets_o: Array | None = None,
    batch_offsets_k: Array | None = None,
    batch_offsets_v: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query token of each request over paged keys; page table and lengths stay on
    the device, so that a CUDA graph may capture the call and follow their changes.

    Parameters
    ----------
    q
        [B, num_qo_heads, head_dim].
    k_cache, v_cache
        [num_pages, num_kv_heads, page_size, head_dim], with any strides but for a contiguous last
        dimension.
    scale
        The whole scale of the logits, a number or a float32 array of one element.
    workspace_buffer, block_tables
        As in `trtllm_batch_decode_with_kv_cache`, and so are all dtypes.
    max_sequence_kv
        An upper bound of actual_seq_lens_kv: it bounds how finely keys are split.
    actual_seq_lens_kv
        int32, uint32 or int64 [B], or [B, 1, 1, 1]: keys of each request. On the host too, but not
        in a graph: it is then copied to the device.
    batch_offsets_q
        [B] or [B + 1]: elements of q ahead of each request's row; default: in order.
    batch_offsets_o
        Must say the same, as it does where both count the same rows.
    batch_offsets_k, batch_offsets_v
        Must be None: pages say where keys are.
    is_cuda_graph_compatible
        Accepted for compatibility: every call can be captured.
    out, lse
        Arrays to write; lse float32 [B, num_qo_heads], base 2.
    return_lse
        Return the LSE too.

    Returns
    -------
    out
        [B, num_qo_heads, head_dim]; (out, lse) if `return_lse`.

    Raises
    ------
    CupyAttnError
        Errors as in `trtllm_batch_decode_with_kv_cache`.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which has no LSE.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> k_cache = v_cache = np.ones((4, 2, 16, 64), np.float16)  # [pages, heads, page_size, D]
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> q = np.ones((2, 8, 64), np.float16)
    >>> cupyattn.cudnn_batch_decode_with_kv_cache(
    ...     q, k_cache, v_cache, 64**-0.5, None, max_sequence_kv=32, actual_seq_lens_kv=lengths,
    ...     block_tables=table,
    ... ).shape
    (2, 8, 64)
    """
    sm_scale, scale_q = number_or_array(scale)
    arrays = make_arrays(
        q=q,
        k=k_cache,
        v=v_cache,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=actual_seq_lens_kv,
        out=out,
        lse=lse,
        qo_offsets=batch_offsets_q,
        o_offsets=batch_offsets_o,
        scale_q=scale_q,
    )
    options = _Decode(
        max_kv_len=next_power_of_two(max_sequence_kv),
        sm_scale=sm_scale,
        return_lse=return_lse,
        has_key_offsets=not (batch_offsets_k is batch_offsets_v is None),
    )
    return run(arrays, options)


class _Decode(NamedTuple):
    """The options of decode."""

    max_kv_len: Any
    sm_scale: Any
    return_lse: Any
    has_key_offsets: bool

    def resolve(self, arrays: Arrays) -> Options:
        if arrays.block_tables is None:
            raise ArgumentError("block_tables: got None; wanted the pages of each request, [B, n]")
        _refuse_key_offsets(self.has_key_offsets)
        return options_of(
            self,
            names=_NAMES,
            kv_layout="HND",
            causal=False,
            in_elements=True,
            from_host=True,
        )


def _refuse_key_offsets(are_given: bool) -> None:
    if are_given:
        raise UnsupportedError(
            "batch_offsets_k, batch_offsets_v: keys of pages have none; pass None, or rows without "
            "block_tables"
        )


@untraced
def cudnn_batch_prefill_with_kv_cache(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    scale: float,
    workspace_buffer: Any,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Array | None = None,
    actual_seq_lens_kv: Array | None = None,
    block_tables: Array | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    batch_offsets_q: Array | None = None,
    batch_offsets_o: Array | None = None,
    batch_offsets_k: Array | None = None,
    batch_offsets_v: Array | None = None,
    batch_offsets_stats: Array | None = None,
    batch_offsets_units: str = "elements",
    out: Array | None = None,
    lse: Array | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: Any = None,
    lse_base: str = "ln",
) -> tuple[ArrayT, Any]:
    """Attention of a batch's new tokens over pages, or over rows of one array; page table, lengths
    and offsets stay on the device, so that a CUDA graph may capture the call.

    Parameters
    ----------
    q
        [rows, num_qo_heads, head_dim_qk].
    k_cache, v_cache
        Pages [num_pages, num_kv_heads, page_size, head_dim] with block_tables; without, rows [n,
        num_kv_heads, head_dim] of all requests. Head dims of k and v may differ.
    scale
        The scale of the logits, a number, or a float32 array of one element, read on the device
        without waiting.
    q_scale, k_scale, v_scale
        Likewise: the first two multiply the logits, the last the output.
    workspace_buffer, block_tables
        As in `trtllm_batch_decode_with_kv_cache`, and so are all dtypes; the workspace also holds
        the LSE of all rows.
    max_token_per_sequence, max_sequence_kv
        Upper bounds of the two lengths: the first shapes the LSE and chooses the kernel, the second
        bounds how finely keys are split.
    actual_seq_lens_q, actual_seq_lens_kv
        int32, uint32 or int64 [B], or [B, 1, 1, 1]: rows and keys of each request. On the host too,
        but not in a graph, as may be the offsets. Either may be None where offsets [B + 1] of the
        same say it (for keys without block_tables).
    batch_offsets_q, batch_offsets_k
        [B] or [B + 1]: where the rows of each request begin in q, and its keys in k_cache (without
        block_tables). A batch of one needs none.
    batch_offsets_units
        "elements" of those arrays, or "tokens": rows.
    batch_offsets_o, batch_offsets_v
        Must say the same of the same rows of the output and of v_cache; their values are not read
        but under CUPYATTN_DEBUG=1.
    batch_offsets_stats
        Must be None: the LSE is padded.
    causal
        Row i of n sees keys up to i + len_kv - n, else all of its request.
    out
        [rows, num_qo_heads, head_dim_vo] to write.
    o_data_type
        The dtype of a new output, default q's.
    lse
        float32 [B, max_token_per_sequence, num_qo_heads] to write.
    return_lse
        Return the LSE too.
    lse_base
        The base of the LSE's logarithms: "ln", natural ones, all that FlashInfer had before 0.7; or
        "log2", its default since.
    is_cuda_graph_compatible, backend
        Accepted for compatibility.

    Returns
    -------
    tuple of arrays
        (out, lse), lse None unless `return_lse`: float32 [B, max_token_per_sequence, num_qo_heads],
        -inf where a request has no row or a row sees no key.

    Raises
    ------
    CupyAttnError
        Errors as in `trtllm_batch_decode_with_kv_cache`.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> k_cache = v_cache = np.ones((4, 2, 16, 64), np.float16)
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> q, rows = np.ones((20, 8, 64), np.float16), np.array([4, 16], np.int32)
    >>> offsets = np.array([0, 4, 20], np.int32)
    >>> o, lse = cupyattn.cudnn_batch_prefill_with_kv_cache(
    ...     q, k_cache, v_cache, 64**-0.5, None, max_token_per_sequence=16, max_sequence_kv=32,
    ...     actual_seq_lens_q=rows, actual_seq_lens_kv=lengths, block_tables=table, causal=True,
    ...     return_lse=True, batch_offsets_q=offsets, batch_offsets_units="tokens",
    ... )
    >>> o.shape, lse.shape
    ((20, 8, 64), (2, 16, 8))
    """
    logits, scale_q = number_or_array(scale)
    factor_q, also_q = number_or_array(q_scale)
    factor_k, scale_k = number_or_array(k_scale)
    output_scale, scale_v = number_or_array(v_scale)
    arrays = make_arrays(
        q=q,
        k=k_cache,
        v=v_cache,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=actual_seq_lens_kv,
        out=out,
        lse=lse,
        qo_lens=actual_seq_lens_q,
        qo_offsets=batch_offsets_q,
        kv_offsets=batch_offsets_k,
        o_offsets=batch_offsets_o,
        v_offsets=batch_offsets_v,
        scale_q=also_q if scale_q is None else scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
    )
    options = _Prefill(
        max_q_len=max_token_per_sequence,
        max_kv_len=next_power_of_two(max_sequence_kv),
        causal=causal,
        return_lse=return_lse,
        o_dtype=o_data_type,
        scale=logits,
        q_scale=factor_q,
        k_scale=factor_k,
        output_scale=output_scale,
        units=batch_offsets_units,
        stats=batch_offsets_stats,
        has_two_arrays=not (scale_q is None or also_q is None),
    )
    parse.choice(lse_base, ("ln", "log2"), "lse_base")
    result = run(arrays, options)
    if not return_lse:
        return result, None
    if lse_base == "log2":
        result = result[0], array.scaled(result[1], math.log2(math.e))
    return result


class _Prefill(NamedTuple):
    """The options of prefill. stats: batch_offsets_stats; has_two_arrays: of scale and q_scale."""

    max_q_len: Any
    max_kv_len: Any
    causal: Any
    return_lse: Any
    o_dtype: Any
    scale: Any
    q_scale: Any
    k_scale: Any
    output_scale: Any
    units: Any
    stats: Any
    has_two_arrays: bool

    def resolve(self, arrays: Arrays) -> Options:
        parse.choice(self.units, ("elements", "tokens"), "batch_offsets_units")
        if self.stats is not None:
            raise UnsupportedError(
                "batch_offsets_stats: the LSE is padded to max_token_per_sequence rows a request; "
                "pass None"
            )
        if self.has_two_arrays:
            raise UnsupportedError("scale, q_scale: one of them may be an array; pass a number")
        if arrays.block_tables is not None:
            _refuse_key_offsets(not (arrays.kv_offsets is arrays.v_offsets is None))
        sm_scale = 1.0
        for name in ("scale", "q_scale", "k_scale"):
            sm_scale *= parse.finite(getattr(self, name), name, 1.0)
        return options_of(
            self,
            names=_NAMES,
            kv_layout="NHD" if arrays.block_tables is None else "HND",
            q_len=0,
            sm_scale=sm_scale,
            in_elements=self.units == "elements",
            from_host=True,
            pads_lse=True,
        )

"""XQA's call: decode over a page table that stays on the device. `cupyattn.xqa` is the function or,
once this module has been imported by its name, the module, which can be called too."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .core import overloads
from .core.names import missing
from .core.parse import require_int
from .core.tracing import untraced
from .engine import geometry
from .engine.arrays import Arrays, make_arrays
from .engine.check_planless import Options, options_of
from .engine.run_planless import run
from .engine.views import Names, number_or_array
from .typing import Array, Scale

if TYPE_CHECKING:
    from .mla import xqa_mla

__all__ = ["xqa", "xqa_mla"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # FlashInfer has that function here as well as beside it.
        if name == "xqa_mla":
            return getattr(importlib.import_module("cupyattn"), name)
        raise missing(__name__, name)


_NAMES = Names(
    "q",
    "k_cache",
    "v_cache",
    block_tables="page_table",
    qo_offsets="q_cu_seq_lens",
    sm_scale="q_scale",
    k_scale="kv_scale",
    output_scale="rcp_out_scale",
    q_len="q_seq_len",
    max_q_len="q_seq_len",
    out="output",
)


@untraced
@overloads.xqa
def xqa(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    seq_lens: Array,
    output: Array | None = None,
    workspace_buffer: Any = None,
    semaphores: Array | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    sinks: Array | None = None,
    q_scale: Scale = 1.0,
    kv_scale: Scale = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Array | None = None,
    *,
    q_cu_seq_lens: Array | None = None,
    k_sf_cache: Any = None,
    v_sf_cache: Any = None,
    head_dim: int | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """`trtllm_batch_decode_with_kv_cache` in XQA's terms; capture, workspace and errors as there.

    Parameters
    ----------
    q
        [B, 1, num_qo_heads, head_dim], or [B, 1, q_seq_len, num_qo_heads, head_dim]: the last
        tokens of each request, causal among themselves. Or [rows, num_qo_heads, head_dim] with
        q_cu_seq_lens.
    q_seq_len
        Rows of each request; with q_cu_seq_lens the most.
    q_cu_seq_lens
        int32, uint32 or int64 [B + 1]: the first row of each request and their number.
    k_cache, v_cache
        [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, num_kv_heads,
        page_size, head_dim] ("HND"). Two arrays [num_pages, 2, ...] have keys at 0 of the first,
        values at 1 of the second.
    kv_layout
        "NHD" or "HND".
    workspace_buffer
        As there.
    page_table, seq_lens
        block_tables and seq_lens there; seq_lens may be [B, 1].
    output
        The array to write, in q's shape, float16, bfloat16, float32, float8_e4m3fn or float8_e5m2
        (saturated, after rcp_out_scale); default: a new one.
    semaphores, sm_count, enable_pdl
        Accepted for compatibility; semaphores are left alone.
    num_kv_heads, page_size, head_dim
        If given, must be those of the arrays.
    sinks
        float32 [num_kv_heads, group] or [num_qo_heads]: extra natural-log logits in the
        denominator.
    q_scale, kv_scale
        Logits are q·k * q_scale / sqrt(head_dim), and where the caches are fp8 times kv_scale, as
        is the output. Numbers, or float32 arrays of one element, read on the device without
        waiting.
    sliding_win_size
        Keys that a row sees, its own among them; 0: all.
    rcp_out_scale
        Multiplies the output.
    mask
        Over the query tokens of each request: uint16 [B, q_seq_len, 2 * ceil(q_seq_len / 32)] or
        the other forms there.
    k_sf_cache, v_sf_cache
        Must be None.
    lse, return_lse
        Also give the LSE, float32 in q's shape without head_dim, base 2.

    Returns
    -------
    result
        None where `output` is given, else the output; (output, lse) if `return_lse`.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which has no LSE, pages of 16 to 128, and
    groups of up to 32 rows; without `output`, the short form of its documentation.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> k_cache = v_cache = np.ones((4, 16, 2, 64), np.float16)
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([[21], [16]], np.uint32)
    >>> q, output = np.ones((2, 1, 8, 64), np.float16), np.empty((2, 1, 8, 64), np.float16)
    >>> _ = cupyattn.xqa(q, k_cache, v_cache, table, lengths, output, num_kv_heads=2, page_size=16)
    >>> output.max()
    np.float16(1.0)
    """
    sm_scale, scale_q = number_or_array(q_scale)
    kv_number, scale_k = number_or_array(kv_scale)
    arrays = make_arrays(
        q=q,
        k=k_cache,
        v=v_cache,
        workspace=workspace_buffer,
        block_tables=page_table,
        kv_lens=seq_lens,
        out=output,
        lse=lse,
        qo_offsets=q_cu_seq_lens,
        sinks=sinks,
        scale_q=scale_q,
        scale_k=scale_k,
        mask=mask,
    )
    options = _Options(
        sm_scale=sm_scale,
        kv_scale=kv_number,
        output_scale=rcp_out_scale,
        sliding_win_size=sliding_win_size,
        kv_layout=kv_layout,
        q_len=q_seq_len,
        return_lse=return_lse,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        k_sf_cache=k_sf_cache,
        v_sf_cache=v_sf_cache,
    )
    result = run(arrays, options)
    return result if return_lse or output is None else None


class _Options(NamedTuple):
    """The options of `xqa`."""

    sm_scale: Any
    kv_scale: Any
    output_scale: Any
    sliding_win_size: Any
    kv_layout: Any
    q_len: Any
    return_lse: Any
    num_kv_heads: Any
    page_size: Any
    head_dim: Any
    k_sf_cache: Any
    v_sf_cache: Any

    def resolve(self, arrays: Arrays) -> Options:
        geometry.refuse("is not supported", k_sf_cache=self.k_sf_cache, v_sf_cache=self.v_sf_cache)
        q_len = require_int(self.q_len, "q_seq_len")
        return options_of(
            self,
            names=_NAMES,
            q_axes=(3, 4, 5),
            q_len=q_len if arrays.qo_offsets is None else 0,
            max_q_len=q_len,
            # That does not count a row's own key.
            window_left=require_int(self.sliding_win_size, "sliding_win_size", 0) - 1,
            causal=q_len != 1,
            extents=(self.num_kv_heads, self.page_size, self.head_dim),
        )


class _Callable(ModuleType):
    __call__ = staticmethod(xqa)


sys.modules[__name__].__class__ = _Callable
__signature__ = inspect.signature(xqa)  # of the call of the module

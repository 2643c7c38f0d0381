"""Keys that requests share, and the states (v, s) of attention over parts of the keys.

v is the output over some keys, s its LSE; states over disjoint keys merge exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.names import refuse_names
from .core.tracing import untraced
from .engine import merge_states as merge
from .typing import Array, ArrayT, LseT, Scale
from .wrappers.cascade import MultiLevelCascadeAttentionWrapper
from .wrappers.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    batch_decode_with_shared_prefix_padded_kv_cache,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)


@untraced
def merge_state(
    v_a: ArrayT,
    s_a: LseT,
    v_b: Array,
    s_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base_on_e: bool = False,
    output_scale: Scale = None,
) -> tuple[ArrayT, LseT]:
    """The attention state over the keys of two states, which have none in common.

    Parameters
    ----------
    v_a, v_b
        [n, H, D] of one dtype, float16, bfloat16 or float32: outputs of attention.
    s_a, s_b
        [n, H] of one dtype, float32, float16 or bfloat16: their LSE. A state with s = -inf saw no
        key: it adds nothing, whatever its v holds. Two of them give v = 0, s = -inf.
    out, lse
        Arrays to write instead of new ones: [n, H, D] of any of the three dtypes, float8_e4m3fn or
        float8_e5m2, and float32 [n, H]. They overlap no input.
    output_scale
        The scale of an fp8 out, which holds v / output_scale, saturated: a number above 0, or a
        float32 array of one element, read on the device. Default 1.
    lse_base_on_e
        s and the result's are natural logarithms; by default they have base 2, as attention returns
        them.

    Returns
    -------
    tuple of arrays
        (v [n, H, D] of v_a's dtype, s float32 [n, H]) in v_a's framework and device.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes and devices, UnsupportedError for 2^31 rows (n * H)
        or more, before anything is written.

    Notes
    -----
    With w = 2^s the result is v = (w_a v_a + w_b v_b) / (w_a + w_b), s = log2(w_a + w_b), computed
    in float32. Arrays have any strides but for a contiguous last dimension of v and out.

    Semantics: FlashInfer's merge_state; arXiv 2501.01005, 2.2.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q = np.ones((3, 8, 64), np.float16)
    >>> k = v = np.ones((20, 2, 64), np.float16)
    >>> first = cupyattn.single_prefill_with_kv_cache(q, k[:12], v[:12], return_lse=True)
    >>> second = cupyattn.single_prefill_with_kv_cache(q, k[12:], v[12:], return_lse=True)
    >>> o, lse = cupyattn.merge_state(*first, *second)  # attention over all 20 keys
    >>> o.shape, lse.shape
    ((3, 8, 64), (3, 8))
    """
    arrays = merge.make_arrays(v_a=v_a, v_b=v_b, s_a=s_a, s_b=s_b, out=out, lse=lse)
    return merge.run(merge.PAIR, arrays, lse_base_on_e, output_scale)


@untraced
def merge_state_in_place(
    v: ArrayT,
    s: LseT,
    v_other: Array,
    s_other: Array,
    mask: Array | None = None,
    *,
    lse_base_on_e: bool = False,
) -> tuple[ArrayT, LseT] | None:
    """`merge_state` of (v, s) and (v_other, s_other), written to v and s.

    Parameters
    ----------
    v, v_other
        [n, H, D]: outputs. v is written, and overlaps nothing else.
    s, s_other
        float32 [n, H]: their LSE. s is written, and overlaps nothing else.
    mask
        bool or uint8 [n]: rows where it is 0 stay as they are. Default: all are merged.
    lse_base_on_e
        As in `merge_state`.

    Returns
    -------
    None
        But for JAX arrays, which cannot be written: then new (v, s).

    Raises
    ------
    CupyAttnError
        As `merge_state`, also for arrays that cannot be written.

    Notes
    -----
    Semantics: FlashInfer's merge_state_in_place, which leaves an s of another dtype as it was.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> v, s = np.zeros((3, 8, 64), np.float16), np.full((3, 8), -np.inf, np.float32)  # no keys yet
    >>> other, lse = np.ones((3, 8, 64), np.float16), np.zeros((3, 8), np.float32)
    >>> cupyattn.merge_state_in_place(v, s, other, lse)
    >>> v.min(), s.max()
    (np.float16(1.0), np.float32(0.0))
    """
    arrays = merge.make_arrays(v_a=v, v_b=v_other, s_a=s, s_b=s_other, mask=mask)
    result: tuple[ArrayT, LseT] = merge.run(merge.IN_PLACE, arrays, lse_base_on_e)
    return None if result[0] is None else result


@untraced
def merge_states(
    v: ArrayT,
    s: LseT,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base_on_e: bool = False,
    output_scale: Scale = None,
) -> tuple[ArrayT, LseT]:
    """The states over the keys of m states each.

    Parameters
    ----------
    v
        [n, m, H, D]: outputs. m = 0 gives v = 0 and s = -inf, m = 1 a copy.
    s
        [n, m, H]: their LSE.
    out, lse, lse_base_on_e, output_scale
        As in `merge_state`.

    Returns
    -------
    tuple of arrays
        (v [n, H, D], s float32 [n, H]).

    Raises
    ------
    CupyAttnError
        As `merge_state`.

    Notes
    -----
    Semantics: FlashInfer's merge_states.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> v, s = np.ones((3, 4, 8, 64), np.float16), np.zeros((3, 4, 8), np.float32)  # 4 of each row
    >>> o, lse = cupyattn.merge_states(v, s)
    >>> o.shape, lse[0, 0]
    ((3, 8, 64), np.float32(2.0))
    """
    arrays = merge.make_arrays(v_a=v, s_a=s, out=out, lse=lse)
    return merge.run(merge.STATES, arrays, lse_base_on_e, output_scale)


@untraced
def variable_length_merge_states(
    v: ArrayT,
    s: LseT,
    indptr: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base_on_e: bool = False,
    output_scale: Scale = None,
) -> tuple[ArrayT, LseT]:
    """The states over the keys of any number of states each.

    Parameters
    ----------
    v
        [num_states, H, D]: outputs.
    s
        [num_states, H]: their LSE.
    indptr
        int32 or int64 [n + 1]: row i is merged of states indptr[i] to indptr[i + 1], without the
        last.
    out, lse, lse_base_on_e, output_scale
        As in `merge_state`.

    Returns
    -------
    tuple of arrays
        (v [n, H, D], s float32 [n, H]). Offsets that fall, or leave the states, raise ArgumentError
        on the CPU; on a GPU the host does not know them: their rows come out as NaN, and raise
        under CUPYATTN_DEBUG=1.

    Notes
    -----
    Semantics: FlashInfer's C++ VariableLengthMergeStates.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> v, s = np.ones((5, 8, 64), np.float16), np.zeros((5, 8), np.float32)
    >>> indptr = np.array([0, 1, 5], np.int32)  # one state of the first row, four of the second
    >>> o, lse = cupyattn.variable_length_merge_states(v, s, indptr)
    >>> lse[:, 0]
    array([0., 2.], dtype=float32)
    """
    arrays = merge.make_arrays(v_a=v, s_a=s, out=out, lse=lse, indptr=indptr)
    return merge.run(merge.SEGMENTS, arrays, lse_base_on_e, output_scale)

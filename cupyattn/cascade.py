"""Keys that requests share, and the states (v, s) of attention over parts of the keys.

v is the output over some keys, s its LSE; states over disjoint keys merge exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.names import refuse_names
from .core.tracing import untraced
from .engine import merge_states as merge
from .typing import Array, ArrayT, Scale
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
    s_a: Array,
    v_b: Array,
    s_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base_on_e: bool = False,
    output_scale: Scale = None,
) -> tuple[ArrayT, ArrayT]:
    """The attention state over the keys of two states, which have none in common.

    v_a, v_b   [n, H, D] of one dtype, float16, bfloat16 or float32: outputs of attention.
    s_a, s_b   [n, H] of one dtype, float32, float16 or bfloat16: their LSE. A state with s = -inf
            saw no key: it adds nothing, whatever its v holds. Two of them give v = 0, s = -inf.
    out, lse   arrays to write instead of new ones: [n, H, D] of any of the three dtypes,
            float8_e4m3fn or float8_e5m2, and float32 [n, H]. They overlap no input.
    output_scale   of an fp8 out, which holds v / output_scale, saturated: a number above 0, or a
            float32 array of one element, read on the device. Default 1.
    lse_base_on_e   s and the result's are natural logarithms; by default they have base 2, as
            attention returns them.

    With w = 2^s the result is v = (w_a v_a + w_b v_b) / (w_a + w_b), s = log2(w_a + w_b), computed
    in float32. Arrays have any strides but for a contiguous last dimension of v and out.

    Returns (v [n, H, D] of v_a's dtype, s float32 [n, H]) in v_a's framework and device. Raises
    ArgumentError for other shapes, dtypes and devices, UnsupportedError for 2^31 rows (n * H) or
    more, before anything is written. Semantics: FlashInfer's merge_state; arXiv 2501.01005, 2.2.
    """
    arrays = merge.make_arrays(v_a=v_a, v_b=v_b, s_a=s_a, s_b=s_b, out=out, lse=lse)
    return merge.run(merge.PAIR, arrays, lse_base_on_e, output_scale)


@untraced
def merge_state_in_place(
    v: ArrayT,
    s: Array,
    v_other: Array,
    s_other: Array,
    mask: Array | None = None,
    *,
    lse_base_on_e: bool = False,
) -> tuple[ArrayT, ArrayT] | None:
    """`merge_state` of (v, s) and (v_other, s_other), written to v and s.

    v, v_other [n, H, D], s and s_other float32 [n, H]; mask bool or uint8 [n]: rows where it is 0
    stay as they are. v and s overlap nothing else.

    Returns None, but for JAX arrays, which cannot be written: then new (v, s).

    Raises as `merge_state`, also for arrays that cannot be written. Semantics: FlashInfer's
    merge_state_in_place, which leaves an s of another dtype as it was.
    """
    arrays = merge.make_arrays(v_a=v, v_b=v_other, s_a=s, s_b=s_other, mask=mask)
    result: tuple[ArrayT, ArrayT] = merge.run(merge.IN_PLACE, arrays, lse_base_on_e)
    return None if result[0] is None else result


@untraced
def merge_states(
    v: ArrayT,
    s: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base_on_e: bool = False,
    output_scale: Scale = None,
) -> tuple[ArrayT, ArrayT]:
    """The states over the keys of m states each: v [n, m, H, D], s [n, m, H].

    m = 0 gives v = 0 and s = -inf, m = 1 a copy. The rest, and errors, as in `merge_state`.

    Returns (v [n, H, D], s float32 [n, H]). Semantics: FlashInfer's merge_states.
    """
    arrays = merge.make_arrays(v_a=v, s_a=s, out=out, lse=lse)
    return merge.run(merge.STATES, arrays, lse_base_on_e, output_scale)


@untraced
def variable_length_merge_states(
    v: ArrayT,
    s: Array,
    indptr: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base_on_e: bool = False,
    output_scale: Scale = None,
) -> tuple[ArrayT, ArrayT]:
    """The states over the keys of any number of states each.

    v [num_states, H, D], s [num_states, H]; indptr int32 or int64 [n + 1]: row i is merged
    of states indptr[i] to indptr[i + 1], without the last. The rest as in `merge_state`.

    Returns (v [n, H, D], s float32 [n, H]). Offsets that fall, or leave the states, raise
    ArgumentError on the CPU; on a GPU the host does not know them: their rows come out as NaN, and
    raise under CUPYATTN_DEBUG=1. Semantics: FlashInfer's C++ VariableLengthMergeStates.
    """
    arrays = merge.make_arrays(v_a=v, s_a=s, out=out, lse=lse, indptr=indptr)
    return merge.run(merge.SEGMENTS, arrays, lse_base_on_e, output_scale)

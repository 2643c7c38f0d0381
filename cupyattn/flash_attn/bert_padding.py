"""flash_attn.bert_padding: padded batches as rows that follow each other, and back, for arrays of
any framework.

Rows are gathered and put by the framework's own indexing. How many rows count is known to the GPU
alone, so that `unpad_input` waits for it, as flash_attn's does.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

# Absolute imports: under another name of the package relative ones would load it again.
from cupyattn import array
from cupyattn.array import ArrayView
from cupyattn.core.parse import require_int
from cupyattn.engine.workspace import on_device
from cupyattn.errors import ArgumentError

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Any, indices: Any) -> Any:
    """Rows of x [rows, ...] by their numbers, integers [n]: [n, ...].

    Notes
    -----
    Semantics: flash_attn.bert_padding's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.flash_attn import bert_padding
    >>> x = np.array([[10], [20], [30]], np.float32)
    >>> bert_padding.index_first_axis(x, np.array([2, 0]))
    array([[30.],
           [10.]], dtype=float32)
    """
    v, vi = _view(x, "x"), array.view(indices, "indices")
    if len(v.shape) < 2 or len(vi.shape) != 1:
        raise ArgumentError(
            f"x, indices: shapes are {list(v.shape)} and {list(vi.shape)}; wanted [rows, ...] and "
            "[n]"
        )
    array.same_device(x=v, indices=vi)
    return x[indices]


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """Rows [first_axis_dim, ...] of zeros, but for those at `indices`, which are the values'.

    Notes
    -----
    Semantics: flash_attn.bert_padding's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.flash_attn import bert_padding
    >>> values = np.array([[10], [20]], np.float32)
    >>> bert_padding.index_put_first_axis(values, np.array([2, 0]), 4)
    array([[20.],
           [ 0.],
           [10.],
           [ 0.]], dtype=float32)
    """
    v, vi = _view(values, "values"), array.view(indices, "indices")
    count = require_int(first_axis_dim, "first_axis_dim", 0)
    if len(v.shape) < 2 or tuple(vi.shape) != (v.shape[0],):
        raise ArgumentError(
            f"values, indices: shapes are {list(v.shape)} and {list(vi.shape)}; wanted [n, ...] "
            "and [n]"
        )
    array.same_device(values=v, indices=vi)
    shape = (count, *v.shape[1:])
    if v.framework == "jax":
        return sys.modules["jax"].numpy.zeros(shape, values.dtype).at[indices].set(values)
    rows = _zeros(shape, values, v)
    rows[indices] = values
    return rows


def unpad_input(
    hidden_states: Any, attention_mask: Any, unused_mask: Any = None
) -> tuple[Any, Any, Any, int, Any]:
    """The tokens of a padded batch that a mask names.

    Parameters
    ----------
    hidden_states
        [batch, seqlen, ...].
    attention_mask
        [batch, seqlen], bool or integers: 1 for a token that counts.
    unused_mask
        The same, 1 for a token that gets a row and does not count.

    Returns
    -------
    tuple of arrays
        (rows [n, ...], indices [n] of the flattened batch, cu_seqlens int32 [batch + 1] of the
        rows, the longest request's rows, and seqused int32 [batch], the tokens that count).

    Raises
    ------
    CupyAttnError
        ArgumentError.

    Notes
    -----
    Semantics: flash_attn.bert_padding's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.flash_attn import bert_padding
    >>> mask = np.array([[1, 1, 0], [1, 0, 0]])
    >>> rows, indices, offsets, most, used = bert_padding.unpad_input(
    ...     np.ones((2, 3, 8), np.float16), mask
    ... )
    >>> rows.shape, indices, offsets, most, used
    ((3, 8), array([0, 1, 3]), array([0, 2, 3], dtype=int32), 2, array([2, 1], dtype=int32))
    """
    vx = _view(hidden_states, "hidden_states")
    masks = [_mask(attention_mask, "attention_mask", vx)]
    if unused_mask is not None:
        masks.append(_mask(unused_mask, "unused_mask", vx))
    used = masks[0].sum(1)
    taken = masks[0] if len(masks) == 1 else masks[0] + masks[1]
    indices = _nonzero(taken)
    offsets, longest = _offsets(taken.sum(1))
    rows = _rows_of(hidden_states, vx)[indices]
    return rows, indices, offsets, longest, _int32(used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Any, attention_mask_in_length: Any
) -> tuple[Any, Any, Any, int]:
    """The tokens of a padded batch whose rows hold several sequences, one behind the other.

    Parameters
    ----------
    hidden_states
        [batch, seqlen, ...].
    attention_mask_in_length
        Integers [batch, seqlen]: the lengths of a row's sequences from its beginning on, then
        zeros.

    Returns
    -------
    tuple of arrays
        (rows, indices, cu_seqlens of the sequences, the longest one's rows), as `unpad_input` does.

    Notes
    -----
    Semantics: flash_attn.bert_padding's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.flash_attn import bert_padding
    >>> lengths = np.array([[2, 1, 0], [3, 0, 0]])  # two sequences in the first row
    >>> rows, indices, offsets, most = bert_padding.unpad_input_for_concatenated_sequences(
    ...     np.ones((2, 3, 8), np.float16), lengths
    ... )
    >>> rows.shape, offsets, most
    ((6, 8), array([0, 2, 3, 6], dtype=int32), 3)
    """
    vx = _view(hidden_states, "hidden_states")
    lengths = _mask(attention_mask_in_length, "attention_mask_in_length", vx)
    ends = lengths.sum(1)
    positions = _nonzero(lengths * 0 + 1).reshape(vx.shape[:2]) % max(1, vx.shape[1])
    indices = _nonzero(positions < ends[:, None])
    counts = lengths.reshape(-1)
    offsets, longest = _offsets(counts[_nonzero(counts)])
    return _rows_of(hidden_states, vx)[indices], indices, offsets, longest


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Rows [n, ...] at their indices in a batch: [batch, seqlen, ...], zeros elsewhere.

    Parameters
    ----------
    hidden_states
        [rows, ...], the rows that `unpad_input` kept.
    indices
        Of the flattened batch, as `unpad_input` returns them.
    batch, seqlen
        Of the padded array.

    Notes
    -----
    Semantics: flash_attn.bert_padding's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.flash_attn import bert_padding
    >>> rows = np.array([[10], [20], [30]], np.float32)
    >>> bert_padding.pad_input(rows, np.array([0, 1, 3]), 2, 3)[..., 0]
    array([[10., 20.,  0.],
           [30.,  0.,  0.]], dtype=float32)
    """
    batch, seqlen = require_int(batch, "batch", 0), require_int(seqlen, "seqlen", 0)
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])


def _view(x: Any, name: str) -> ArrayView:
    """A view of x. Its framework's own indexing, not the view, carries the gradient."""
    return array.view(x.detach() if getattr(x, "requires_grad", False) else x, name)


def _mask(x: Any, name: str, vx: ArrayView) -> Any:
    """A mask [batch, seqlen] as integers."""
    v = array.view(x, name)
    if len(vx.shape) < 2 or tuple(v.shape) != tuple(vx.shape[:2]):
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)} with hidden_states of {list(vx.shape)}; wanted "
            "[batch, seqlen] and [batch, seqlen, ...]"
        )
    array.same_device(hidden_states=vx, **{name: v})
    return x.long() if v.framework == "torch" else x.astype(np.int32)


def _rows_of(x: Any, v: ArrayView) -> Any:
    return x.reshape(math.prod(v.shape[:2]), *v.shape[2:])


def _nonzero(x: Any) -> Any:
    """Indices of what is not 0 in a flattened array."""
    indices = x.reshape(-1).nonzero()
    return indices[0] if isinstance(indices, tuple) else indices.reshape(-1)


def _offsets(lengths: Any) -> tuple[Any, int]:
    """(int32 offsets of so many rows each, the largest of these)."""
    longest = int(lengths.max()) if lengths.shape[0] else 0
    ends = lengths.cumsum(0)
    if array.view(lengths, "lengths").framework == "jax":
        return sys.modules["jax"].numpy.pad(_int32(ends), (1, 0)), longest
    offsets = _zeros((ends.shape[0] + 1,), _int32(ends), array.view(ends, "ends"))
    offsets[1:] = ends
    return offsets, longest


def _int32(x: Any) -> Any:
    return x.int() if hasattr(x, "new_zeros") else x.astype(np.int32)


def _zeros(shape: tuple[int, ...], like: Any, v: ArrayView) -> Any:
    """An array of zeros of like's framework, dtype and device."""
    if v.framework == "torch":
        return like.new_zeros(shape)
    if v.device.kind == "cpu":
        return np.zeros(shape, like.dtype)
    from cupyattn.core.cupy_module import cupy_module

    with on_device(v.device.index):
        return cupy_module().zeros(shape, like.dtype)

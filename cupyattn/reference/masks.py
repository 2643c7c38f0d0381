"""Which keys each query row may see: the one place for causality, window and custom mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Visibility:
    """Row i sees key j if every rule that is on allows it.

    causal       bottom-right aligned: j <= i + kv_len - qo_len. Ignored when `mask` is given.
    window_left  W >= 0: j >= i + kv_len - qo_len - W, so W + 1 keys with causality; -1: off.
    mask         bool [qo_len, kv_len], True = visible; ANDed with the window.
    """

    qo_len: int
    kv_len: int
    causal: bool = False
    window_left: int = -1
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.window_left < -1:
            raise ArgumentError(
                f"window_left: got {self.window_left}; wanted the number of keys visible to the "
                "left of the diagonal, or -1 for no window"
            )
        shape = (self.qo_len, self.kv_len)
        if self.mask is not None and (self.mask.dtype != np.bool_ or self.mask.shape != shape):
            raise ArgumentError(
                f"mask: got {self.mask.dtype} {list(self.mask.shape)}; wanted bool {list(shape)}, "
                "[qo_len, kv_len]; unpack packed masks with unpack_mask"
            )

    @property
    def _is_causal(self) -> bool:
        return self.causal and self.mask is None

    def key_range(self, rows: slice) -> slice:
        """The keys that any of `rows` can see by causality and window; may be empty."""
        diagonal = self.kv_len - self.qo_len
        first, end = 0, self.kv_len
        if self._is_causal:
            end = min(end, max(0, rows.stop + diagonal))
        if self.window_left >= 0:
            first = max(0, rows.start + diagonal - self.window_left)
        return slice(first, end)

    def tile(self, rows: slice, keys: slice) -> np.ndarray:
        """bool [rows, keys]: True where the row sees the key."""
        query_pos = np.arange(rows.start, rows.stop)[:, None] + (self.kv_len - self.qo_len)
        key_pos = np.arange(keys.start, keys.stop)[None, :]
        if self.mask is not None:
            seen = self.mask[rows, keys].copy()
        elif self.causal:
            seen = key_pos <= query_pos
        else:
            seen = np.ones((query_pos.size, key_pos.size), np.bool_)
        if self.window_left >= 0:
            seen &= key_pos >= query_pos - self.window_left
        return seen

    def dense(self) -> np.ndarray:
        """bool [qo_len, kv_len]: the whole pattern."""
        return self.tile(slice(0, self.qo_len), slice(0, self.kv_len))

"""Where the rows of requests are among their keys, if the caller says it otherwise than kernels do.

Kernels put the last row of a request at its last key. A first row at the first key is the same for
other windows over fewer keys; or a condition on rows and keys says it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import array
from ..core import dtypes
from ..errors import ArgumentError
from .workspace import int32_on_device

# Names of lengths in a condition.
_ROWS, _KEYS = "query_seq_lengths", "key_value_seq_lengths"


@dataclass(frozen=True, slots=True)
class Placement:
    """Which of `keys` keys each of `tokens` rows sees: from `left` keys ahead of its own place to
    `right` keys behind it, -1 for all. Row i stands at key i if `is_first`; else the last row
    stands at the last key."""

    tokens: int
    keys: int
    left: int
    right: int
    is_first: bool

    def from_last(self) -> Placement | None:
        """The same as kernels place it, over the first keys alone; None if some of the last rows
        see nothing, which these cannot say."""
        if not self.is_first:
            return self
        if 0 <= self.left and self.tokens > self.keys + self.left:
            return None
        keys = self.keys if self.right < 0 else min(self.keys, self.tokens + self.right)
        shift = self.tokens - keys
        left = self.left if self.left < 0 else self.left - shift
        right = self.right if self.right < 0 else self.right + shift
        return replace(self, keys=keys, left=left, right=right, is_first=False)

    def options(self) -> dict[str, Any]:
        """causal and window_size of kernels."""
        is_causal = self.right == 0
        return {"causal": is_causal, "window_size": (self.left, -1 if is_causal else self.right)}

    def condition(
        self, others: str | None, num_rows: Any, num_keys: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """It as an expression, and what that reads besides: `others` and lengths hold too.

        num_rows, num_keys: [b], how many of each request count, or None for all.
        """
        parts = [] if others is None else [f"({others})"]
        arrays, position = {}, "q_row"
        for name, count, index in ((_ROWS, num_rows, "q_row"), (_KEYS, num_keys, "kv_idx")):
            if count is not None:
                arrays[name] = _as_int32(count, name)
                parts.append(f"{index} < {name}[batch]")
        if not self.is_first:
            keys, rows = (
                str(size) if count is None else f"{name}[batch]"
                for name, count, size in (
                    (_KEYS, num_keys, self.keys),
                    (_ROWS, num_rows, self.tokens),
                )
            )
            position = f"q_row + {keys} - {rows}"
        if self.left >= 0:
            parts.append(f"kv_idx >= {position} - {self.left}")
        if self.right >= 0:
            parts.append(f"kv_idx <= {position} + {self.right}")
        return " && ".join(parts) or None, arrays

    def seen(self, rows: Any, columns: Any, num_rows: Any = None, num_keys: Any = None) -> Any:
        """[b or 1, tokens, keys] of torch, CuPy or NumPy: what each row sees.

        rows, columns: their numbers. num_rows, num_keys: as in `condition`, arrays of the same.
        """
        row, column = rows[None, :, None], columns[None, None, :]
        end = self.keys if num_keys is None else num_keys[:, None, None]
        last = self.tokens if num_rows is None else num_rows[:, None, None]
        position = row if self.is_first else row + end - last
        seen = (column < end) & (row < last)
        if self.left >= 0:
            seen = seen & (column >= position - self.left)
        return seen & (column <= position + self.right) if self.right >= 0 else seen


def _as_int32(x: Any, name: str) -> Any:
    """Lengths as an expression reads them."""
    v = array.view(x, name)
    if v.dtype not in (dtypes.int32, dtypes.int64) or len(v.shape) != 1:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)} and dtype {v.dtype}; wanted one axis of int32 or "
            "int64"
        )
    if v.device.kind == "cuda":
        return int32_on_device(v, name).owner
    return np.ascontiguousarray(array.as_numpy(v).astype(np.int32, copy=False))

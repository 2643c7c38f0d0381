"""Which keys query rows may see, as far as a plan cares, and which of them a split has.

The kernels derive their tile and key range from the block index with the arithmetic of
`Masking.key_span` and `tile_span` (kernels/cupyattn/shared/mask.cuh). A change to either needs
the other: the emulator and the GPU tests find out by results, no test compares the two arithmetics
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..core.key_share import KeyShare


@dataclass(frozen=True, slots=True)
class Masking:
    """A row sees the keys from its position - window_left to its position + window_right.

    A negative window has no limit; causality is window_right = 0. has_mask: a custom mask hides
    more of them, and key tiles start at multiples of their size. share: lengths are of a rank that
    holds these keys of each sequence, and positions are those in the whole sequence.
    """

    window_left: int = -1
    window_right: int = -1
    has_mask: bool = False
    share: KeyShare | None = None

    @property
    def hides_future(self) -> bool:
        """Whether later rows see more keys."""
        return self.window_right >= 0

    def keys_among(self, tokens: Any) -> Any:
        """The most keys that lie on so many tokens (a number, or an array), one after another."""
        if self.share is None:
            return tokens
        run, period = self.share.cp_kv_cache_interleave_size, self.share.period
        return tokens // period * run + np.minimum(tokens % period, run)

    def key_span(
        self, first_token: int, last_token: int, qo_len: int, kv_len: int
    ) -> tuple[int, int]:
        """Keys [begin, end) that any of the query tokens first..last may see, custom mask aside.

        KeyRange of kernels/cupyattn/shared/mask.cuh is the same arithmetic.
        """
        offset, begin, end = kv_len - qo_len, 0, kv_len
        if self.window_right >= 0:
            end = min(kv_len, last_token + offset + 1 + self.window_right)
        if self.window_left >= 0:
            begin = max(0, first_token + offset - self.window_left)
        return begin, max(begin, end)

    def span_lengths(
        self,
        first_token: np.ndarray | int,
        last_token: np.ndarray | int,
        qo_len: np.ndarray,
        kv_len: np.ndarray,
        is_shared: np.ndarray | None,
        tile_kv: int,
        others: np.ndarray | None = None,
    ) -> np.ndarray:
        """The lengths of key_span for many tiles of rows; at most those of shared keys.

        is_shared: the rows come after all these keys. others: keys that other ranks hold, where
        they share them.
        """
        if self.share is not None:
            return self._share_lengths(first_token, last_token, qo_len, kv_len, tile_kv, others)
        end = kv_len
        if self.window_right >= 0:
            # Tokens that a request does not have would see no more than all keys.
            last = last_token + (1 + self.window_right)
            end = np.minimum(kv_len, last + (kv_len - qo_len))
            if is_shared is not None:
                end = np.where(is_shared, kv_len, end)
        if self.window_left < 0:
            return np.maximum(end, 0)
        begin = np.maximum(first_token + (kv_len - qo_len - self.window_left), 0)
        if is_shared is not None:
            begin = np.where(is_shared, np.maximum(kv_len - self.window_left, 0), begin)
        if self.has_mask:
            begin = begin // tile_kv * tile_kv
        return np.maximum(end - begin, 0)

    def _share_lengths(
        self,
        first_token: np.ndarray | int,
        last_token: np.ndarray | int,
        qo_len: np.ndarray,
        kv_len: np.ndarray,
        tile_kv: int,
        others: np.ndarray | None,
    ) -> np.ndarray:
        """span_lengths where ranks share the keys."""
        assert self.share is not None and others is not None
        before_rows = kv_len + others - qo_len
        begin, end = np.zeros_like(kv_len), kv_len
        if self.window_right >= 0:
            last = last_token + before_rows
            end = np.minimum(kv_len, self.share.count(last + (1 + self.window_right)))
        if self.window_left >= 0:
            begin = self.share.count(first_token + before_rows - self.window_left)
        if self.has_mask:
            begin = begin // tile_kv * tile_kv
        return np.maximum(end - begin, 0)

    def ends(
        self, last_token: np.ndarray, hidden: np.ndarray, request: np.ndarray, kv_len: np.ndarray
    ) -> np.ndarray:
        """The same without a window to the left or shared keys; it may write over `last_token`.

        hidden: keys of each request without its rows. request, kv_len: of each tile.
        """
        if self.window_right < 0:
            return kv_len
        last_token += hidden[request]
        last_token += 1 + self.window_right
        np.minimum(last_token, kv_len, out=last_token)
        is_seen = hidden[hidden.argmin()] + self.window_right >= -1
        return last_token if is_seen else np.maximum(last_token, 0)

    def min_pairs(self, qo_len: np.ndarray, kv_len: np.ndarray) -> float:
        """Pairs of a row and a key in its sight, custom mask aside, at least: of all requests."""
        if self.window_left >= 0:
            return 0.0
        pairs = float(qo_len.dot(kv_len))
        if self.window_right < 0:
            return pairs
        return pairs - 0.5 * float(qo_len.dot(qo_len - 1))


def tile_span(begin: int, end: int, tile_kv: int, split: int, num_splits: int) -> tuple[int, int]:
    """Key tiles [first, last) of one split of the keys [begin, end), counted from `begin`.

    Tile t is the keys from begin + t * tile_kv on. (Under a custom mask tiles start at multiples of
    tile_kv instead: round `begin` down to one.)
    """
    count = -(-max(0, end - begin) // tile_kv)
    return count * split // num_splits, count * (split + 1) // num_splits

"""What the serving_metadata kernel writes, in NumPy: the metadata of CPU arrays.

Values that the kernel cuts to what arrays hold raise ArgumentError here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..launch.ops.serving_metadata import BEAMS, FLAT, NO_TREE, SQUARE, WORDS, Sizes

# Keys that tables of the second pool begin early, kEarly of the kernel.
EARLY = 256


@dataclass(slots=True)
class StepInputs:
    """Arrays of a step, and of the backend; None for what there is not."""

    seq_lens: np.ndarray
    req_pool_indices: np.ndarray
    extend_seq_lens: np.ndarray | None
    encoder_lens: np.ndarray | None
    out_cache_loc: np.ndarray | None
    tree_mask: np.ndarray | None
    beam_rows: np.ndarray | None
    full_to_swa: np.ndarray | None
    req_to_token: np.ndarray
    num_real: int


def fill(outputs: dict[str, np.ndarray], inputs: StepInputs, sizes: Sizes, tree_form: int) -> None:
    """Write `outputs`, flat int32 arrays by the names of launch.ops.serving_metadata.Outputs."""
    _check(inputs, sizes)
    fills = _Fill(outputs, inputs, sizes, tree_form)
    for index in range(sizes.num_requests):
        fills.request(index)


def _check(inputs: StepInputs, sizes: Sizes) -> None:
    rows = inputs.req_pool_indices
    if ((rows < 0) | (rows >= sizes.num_pool_rows)).any():
        raise ArgumentError(
            f"req_pool_indices: {rows.tolist()[:8]}; wanted rows of req_to_token, which has "
            f"{sizes.num_pool_rows}"
        )
    first = 0 if inputs.encoder_lens is None else inputs.encoder_lens.astype(np.int64)
    ends = inputs.seq_lens.astype(np.int64) + first
    extra = max(0, sizes.len_delta + sizes.num_steps - 1)
    if (inputs.seq_lens < 0).any() or (ends + extra > sizes.room).any():
        raise ArgumentError(
            f"seq_lens: {inputs.seq_lens.tolist()[:8]} with {extra} drafts do not fit the "
            f"{sizes.room} columns of req_to_token"
        )
    if inputs.extend_seq_lens is not None and (inputs.extend_seq_lens < 0).any():
        raise ArgumentError(
            f"extend_seq_lens: {inputs.extend_seq_lens.tolist()[:8]}; wanted 0 or more"
        )
    if inputs.encoder_lens is not None and (inputs.encoder_lens < 0).any():
        raise ArgumentError(f"encoder_lens: {inputs.encoder_lens.tolist()[:8]}; wanted 0 or more")


class _Fill:
    def __init__(
        self, outputs: dict[str, np.ndarray], inputs: StepInputs, sizes: Sizes, tree_form: int
    ) -> None:
        self.out, self.inputs, self.sizes, self.tree_form = outputs, inputs, sizes, tree_form
        self.rows_before = self.keys_before = 0

    def request(self, index: int) -> None:
        inputs, s = self.inputs, self.sizes
        self.index = index
        row = int(inputs.req_pool_indices[index])
        self.seq_len = int(inputs.seq_lens[index])
        self.first = 0 if inputs.encoder_lens is None else int(inputs.encoder_lens[index])
        self.columns = inputs.req_to_token[row, self.first :]
        self.pool_row = row * s.pool_stride
        self.q_len = s.rows
        if inputs.extend_seq_lens is not None:
            self.q_len = int(inputs.extend_seq_lens[index])
        self._lengths()
        self._chunks()
        self._pages()
        if self.tree_form != NO_TREE:
            seen = self._seen()
            self._drafts(seen)
            self._row_tables("window", s.window_width, s.window, 0, seen)
            self._row_tables("chunk", s.chunk_width, -1, s.chunk_size, seen)
        self.rows_before += self.q_len
        self.keys_before += self.seq_len

    def _put(self, name: str, index: int, value: int) -> None:
        if name in self.out:
            self.out[name][index] = value

    def _kv_len(self, step: int) -> int:
        return min(self.seq_len + self.sizes.len_delta + step, self.sizes.room - self.first)

    def _lengths(self) -> None:
        s = self.sizes
        for step in range(s.num_steps):
            self._put("kv_lens", step * s.num_requests + self.index, self._kv_len(step))
        self._put("cu_seqlens_q", self.index, self.rows_before)
        if self.index == s.num_requests - 1:
            self._put("cu_seqlens_q", self.index + 1, self.rows_before + self.q_len)
        self._put("kv_offsets", self.index, self.pool_row + self.first)
        self._put("encoder_lens", self.index, self.first)
        self._put("encoder_offsets", self.index, self.pool_row)

    def _chunks(self) -> None:
        s = self.sizes
        if "chunk_kv_lens" not in self.out:
            return
        base = self.pool_row + self.first
        if not s.chunks_are_slots:
            base = self.index * s.chunk_stride
        for step in range(s.num_steps):
            end = self._kv_len(step)
            position = end - self.q_len
            for i in range(s.num_chunks):
                begin = (position // s.chunk_size + i) * s.chunk_size
                low, high = min(max(begin, position), end), min(begin + s.chunk_size, end)
                key = min(max(begin, 0), end)
                index = (step * s.num_requests + self.index) * s.num_chunks + i
                self._put("chunk_qo_lens", index, max(high - low, 0))
                self._put("chunk_qo_offsets", index, self.rows_before + low - position)
                self._put("chunk_kv_lens", index, max(high - key, 0))
                self._put("chunk_kv_offsets", index, base + key // s.chunk_page)

    def _pages(self) -> None:
        s = self.sizes
        count = -(-self._kv_len(s.num_steps - 1) // s.page_size)
        slots = self.columns[: count * s.page_size : s.page_size]
        if "page_table" in self.out:
            at = self.index * s.page_stride
            self.out["page_table"][at : at + count] = slots // s.page_size
        if "swa_table" not in self.out:
            return
        position, low = self._kv_len(0) - self.q_len, 0
        if s.swa_window >= 0 or s.swa_chunk > 0:
            low = position
            if s.swa_window >= 0:
                low = min(low, position - s.swa_window)
            if s.swa_chunk > 0:
                low = min(low, position // s.swa_chunk * s.swa_chunk)
            low = max(low - EARLY, 0)
        begin, at = low // s.page_size, self.index * s.swa_stride
        self.out["swa_table"][at + begin : at + count] = self._mapped(slots[begin:]) // s.page_size

    def _mapped(self, slots: Any) -> np.ndarray:
        table = self.inputs.full_to_swa
        slots = np.asarray(slots, np.int64)
        if table is None:
            return slots
        return np.where(
            (slots >= 0) & (slots < table.size), table[np.clip(slots, 0, table.size - 1)], 0
        )

    def _seen(self) -> list[list[int]]:
        """The draft tokens that each row sees; of beams, the beam of each row."""
        s, rows = self.sizes, self.sizes.rows
        if self.tree_form == BEAMS:
            return [[row] for row in range(rows)]
        tree = self.inputs.tree_mask
        assert tree is not None
        if self.index >= self.inputs.num_real:
            return [list(range(rows)) for _ in range(rows)]
        if self.tree_form == WORDS:
            words = tree.view(np.uint64).reshape(-1, rows)[self.index]
            bits = [[int(word) >> token & 1 for token in range(rows)] for word in words]
        elif self.tree_form == SQUARE:
            bits = tree.reshape(-1, rows, rows)[self.index].tolist()
        else:
            assert self.tree_form == FLAT
            begin = (self.keys_before + self.index * rows) * rows
            width = self.seq_len + rows
            own = tree[begin : begin + rows * width]
            own = np.pad(own, (0, rows * width - own.size), constant_values=True)
            bits = own.reshape(rows, width)[:, self.seq_len :].tolist()
        return [[token for token in range(s.rows) if row[token]] for row in bits]

    def _beam_slot(self, row: int, step: int) -> int:
        s, inputs = self.sizes, self.inputs
        assert inputs.out_cache_loc is not None
        if self.index >= inputs.num_real:
            return 0
        own = self.index * s.rows
        if inputs.beam_rows is not None:
            beam = int(inputs.beam_rows[(own + row) * s.draft_steps + step])
            if not 0 <= beam < s.rows:
                raise ArgumentError(f"beam_rows: has beam {beam}; wanted 0 to {s.rows - 1}")
            row = beam
        return int(inputs.out_cache_loc[(own + row) * s.draft_steps + step])

    def _drafts(self, seen: list[list[int]]) -> None:
        s, out = self.sizes, self.out
        words = -(-s.rows // 32)
        for row, tokens in enumerate(seen):
            index = self.index * s.rows + row
            if "tree_bits" in out:
                value = sum(1 << token for token in tokens)
                for word in range(words):
                    bits = np.uint32(value >> 32 * word & 0xFFFFFFFF)
                    out["tree_bits"].view(np.uint32)[index * words + word] = bits
            if "draft_table" not in out:
                continue
            table = out["draft_table"][index * s.draft_width : (index + 1) * s.draft_width]
            if self.tree_form == BEAMS:
                table[:] = [self._beam_slot(row, step) for step in range(s.draft_width)]
                continue
            hidden = [token for token in range(s.rows) if token not in tokens]
            table[:] = [self._tree_slot(token) for token in (*tokens, *hidden)]
            out["draft_lens"][index] = len(tokens)

    def _tree_slot(self, token: int) -> int:
        at = self.seq_len + token
        return int(self.columns[at]) if at < self.columns.size else 0

    def _row_tables(
        self, name: str, width: int, window: int, chunk: int, seen: list[list[int]]
    ) -> None:
        s = self.sizes
        if f"{name}_slots" not in self.out:
            return
        for step in range(s.num_steps):
            for row, tokens in enumerate(seen):
                path = [self._tree_slot(token) for token in tokens]
                if self.tree_form == BEAMS:
                    steps = range(s.first_step + step + 1)
                    path = [self._beam_slot(row, t) for t in steps]
                position = self.seq_len + len(path) - 1
                low = 0
                if window >= 0:
                    low = max(position - window, 0)
                if chunk > 0:
                    low = max(position, 0) // chunk * chunk
                slots = [*self.columns[: self.seq_len], *path][low : low + width]
                index = (step * s.num_requests + self.index) * s.rows + row
                self._put(f"{name}_lens", index, len(slots))
                at = index * width
                self.out[f"{name}_slots"][at : at + len(slots)] = self._mapped(slots)

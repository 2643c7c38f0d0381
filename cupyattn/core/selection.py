"""Descriptor of a selection: everything about a call of `sparse.select` that a kernel is compiled
for."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType

SCORES = ("max", "relu_sum", "softmax")
# Scales of index keys of fp8, one for each row: none, an array of them, or behind the rows of each
# page (DeepGEMM's fused pages).
ROW_SCALES = ("", "rows", "pages")
MAX_TOPK = 2048


@dataclass(frozen=True, slots=True)
class SelectProblem:
    """The compile-time facts of one selection.

    dtype_q, dtype_k, row_scales  of queries, index keys, and the keys' scales (ROW_SCALES)
    num_heads, num_groups  index heads, and lists of a token, for which neighbouring heads vote
    score           how (SCORES); dtype_w: of weights, None where there are none
    block, ratio    keys of the block that an entry names, and keys that an index row stands for
    topk, first, last  entries of a list, of which the first and last blocks have theirs
    tail            one more entry is for a last block that no row stands for
    paged           rows are found through a page table
    candidate_block keys of the blocks that candidates name; 0: all blocks compete.
                    group_candidates: each list has candidates of its own
    gives_values    scores are written too
    """

    dtype_q: DType
    dtype_k: DType
    head_dim: int
    num_heads: int
    num_groups: int = 1
    row_scales: str = ""
    score: str = "max"
    dtype_w: DType | None = None
    block: int = 1
    ratio: int = 1
    topk: int = 1
    first: int = 0
    last: int = 0
    tail: bool = False
    paged: bool = True
    candidate_block: int = 0
    group_candidates: bool = False
    gives_values: bool = False

    @property
    def block_rows(self) -> int:
        """Index rows of a block."""
        return self.block // self.ratio

    @property
    def list_len(self) -> int:
        """Entries of a list."""
        return self.topk + self.tail

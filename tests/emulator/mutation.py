"""One mistake to sow in the kernels, and the files it may be in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """In kernels/<file>, `old` becomes `new`; `catcher` is a name of test_mutations.CATCHERS.

    `old` must be in the file exactly once; when the kernels change, so must the lists.
    """

    name: str
    file: str
    old: str
    new: str
    catcher: str


MASK = "cupyattn/attention/mask.cuh"
PREFILL = "cupyattn/attention/prefill_sm80.cuh"
DECODE = "cupyattn/attention/decode_sm80.cuh"
FRAGMENTS = "cupyattn/tile/fragments.cuh"
SOFTMAX = "cupyattn/attention/softmax.cuh"
STATE = "cupyattn/attention/state.cuh"
VARIANTS = "cupyattn/attention/variants.cuh"
SOFT_CAP = "cupyattn/attention/soft_cap.cuh"
ROPE = "cupyattn/attention/rope.cuh"
BAD = "cupyattn/attention/hidden_values.cuh"
TILE = "cupyattn/tile/shared_tile.cuh"
WORK = "cupyattn/attention/work.cuh"
PAGES = "cupyattn/attention/key_rows.cuh"
SYNC = "ptx::block_sync();\n"

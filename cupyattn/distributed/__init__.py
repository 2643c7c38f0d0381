"""Several GPUs: groups of ranks, and attention whose keys are spread over them.

`Group` is a rank's view of all ranks, made from NCCL's unique id, a process group of torch, MPI or
JAX; `simulate` runs ranks as threads over NumPy's arrays, without a GPU.
"""

from __future__ import annotations

from .attention import ContextParallelCall as ContextParallelCall
from .attention import ContextParallelWrapper as ContextParallelWrapper
from .exchange import StateExchange as StateExchange
from .group import Group as Group
from .group import simulate as simulate
from .heads import HeadRange as HeadRange
from .heads import head_range as head_range
from .nccl import new_unique_id as new_unique_id
from .pieces import ZigZag as ZigZag
from .prefill import ContextParallelPrefill as ContextParallelPrefill
from .prefill_cost import Rates as Rates
from .transport import Transport as Transport
from .transport import Window as Window

__all__ = [
    "ContextParallelCall",
    "ContextParallelPrefill",
    "ContextParallelWrapper",
    "Group",
    "HeadRange",
    "Rates",
    "StateExchange",
    "Transport",
    "Window",
    "ZigZag",
    "head_range",
    "new_unique_id",
    "simulate",
]

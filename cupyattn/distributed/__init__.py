"""Several GPUs: groups of ranks, and attention whose keys are spread over them.

`Group` is a rank's view of all ranks, made from NCCL's unique id, a process group of torch, MPI or
JAX; `simulate` runs ranks as threads over NumPy's arrays, without a GPU.
"""

from __future__ import annotations

from .group import Group as Group
from .group import simulate as simulate
from .transport import Transport as Transport
from .transport import Window as Window

__all__ = ["Group", "Transport", "Window", "simulate"]

"""What the notebooks share: batches, times, figures. `from cupyattn.bench import lab`.

It needs matplotlib: `pip install "cupyattn[notebooks]"`.
"""

from typing import TYPE_CHECKING, Any

import cupyattn

from .batches import (
    DEVICE,
    GPU,
    Paged,
    alone_and_with,
    arrays,
    decode,
    decode_bytes,
    host,
    mask_bits,
    paged,
    put,
)
from .figures import (
    COLORS,
    CUDNN,
    FA3,
    FLASHINFER,
    OTHER,
    OURS,
    bars,
    brief,
    log2_ticks,
    set_style,
    show,
)
from .runs import beside, clock, measured, measured_before, peers, times
from .work_lists import Block, WorkList, work_list

__all__ = [
    "COLORS",
    "CUDNN",
    "DEVICE",
    "FA3",
    "FLASHINFER",
    "GPU",
    "OTHER",
    "OURS",
    "Block",
    "Paged",
    "WorkList",
    "alone_and_with",
    "arrays",
    "bars",
    "begin",
    "beside",
    "brief",
    "clock",
    "decode",
    "decode_bytes",
    "host",
    "log2_ticks",
    "mask_bits",
    "measured",
    "measured_before",
    "paged",
    "peers",
    "put",
    "set_style",
    "show",
    "times",
    "work_list",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`lab.plt` is matplotlib's pyplot, which nothing else here needs when it is imported."""
        if name == "plt":
            from matplotlib import pyplot

            return pyplot
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def begin() -> None:
    """Set the style of the figures, and say what this notebook runs on."""
    set_style()
    if GPU:
        print(f"{GPU.name}, {GPU.num_sms} SMs; cupyattn {cupyattn.__version__}")
    else:
        print(
            f"No GPU here; cupyattn {cupyattn.__version__}. Small calls run on the CPU;\n"
            "figures of speed show an earlier run, and say which."
        )

"""What the adapters of engines share."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def joined(own: type, base: type) -> type:
    """A class of ours that is one of the engine's too: `own`, with what `base` has and it has not.

    Our classes name no engine, so importing their modules needs none.
    """
    made: Any = type(base)(own.__name__, (own, base), {"__doc__": own.__doc__})
    made.__module__, made.__qualname__ = own.__module__, own.__qualname__
    return made

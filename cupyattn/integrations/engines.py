"""What the adapters of engines share."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def joined(name: str, own: type, base: type) -> Any:
    """A class of ours that is one of the engine's too: `own`, with what `base` has and it has not.

    Our classes name no engine, so their modules are imported without one. Engines find a class by
    its module and name: that module's `__getattr__` provides `name`.
    """
    cls: Any = type(base)(name, (own, base), {"__doc__": own.__doc__})
    cls.__module__, cls.__qualname__ = own.__module__, name
    return cls

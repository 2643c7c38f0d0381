"""Public names of FlashInfer and other libraries: which are here, and what to use instead of those
that are not."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Names of other libraries, and what to use for them.
_OTHERS = {
    "scaled_dot_product_attention": "dot_product_attention, of [batch, tokens, heads, head_dim] and"
    " with masks aligned to the last key (docs/howto/port_from_sdpa.md)",
    "reshape_and_cache": "slots.reshape_and_cache",
    **{
        name: f"flash_attn.{name}"
        for name in (
            "flash_attn_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
            "flash_attn_qkvpacked_func",
            "flash_attn_kvpacked_func",
            "flash_attn_varlen_qkvpacked_func",
            "flash_attn_varlen_kvpacked_func",
            "flash_attn_combine",
            "get_scheduler_metadata",
            "merge_state_v2",
        )
    },
    **{
        name: f"flash_mla.{name}"
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata")
    },
}

FILE = Path(__file__).parents[1] / "flashinfer_names.json"


@functools.cache
def names() -> dict[str, Any]:
    """What flashinfer_names.json holds.

    version   the release whose names these are
    here      lists of names, by FlashInfer's module
    absent    groups of names that are not here: `what` they are, what to use `instead`, and `names`
              as in `here`
    """
    contents: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return contents


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that a module of this package has not, for its __getattr__."""
    message = f"module {module!r} has no attribute {name!r}"
    hint = None if name.startswith("_") else _hint(name)
    if hint is not None:
        message += f": {hint}"
    # From these Python adds the most similar name, if there is one.
    return AttributeError(message, name=name, obj=sys.modules.get(module))


def refuse_names(module: str) -> Callable[[str], NoReturn]:
    """A module's __getattr__, which knows no name."""

    def refuse(name: str) -> NoReturn:
        raise missing(module, name)

    return refuse


def _hint(name: str) -> str | None:
    """What to use for a name of another library's."""
    for module, known in names()["here"].items():
        if name in known:
            return f"it is {module.replace('flashinfer', 'cupyattn', 1)}.{name}"
    if name in _OTHERS:
        return f"it is cupyattn.{_OTHERS[name]}"
    for group in names()["absent"]:
        if any(name in known for known in group["names"].values()):
            return (
                f"FlashInfer has it, but cupyattn has no {group['what']}; {group['instead']} "
                "(docs/flashinfer-names.md lists what is here)"
            )
    return None

"""The page of FlashInfer's names: which are here, and what to use instead of the others."""

from __future__ import annotations

from cupyattn.core import names

_HEAD = """# FlashInfer's names

The public names of FlashInfer {version}, and some that older releases had: those that cupyattn has,
and what to use instead of the others. `cupyattn` stands for `flashinfer` in every name. A name that
is not here raises an AttributeError that says what this page says.

This page is made from `cupyattn/flashinfer_names.json` by `python -m benchmarks.documents`.

## Here

| module | names |
| --- | --- |
"""
_ABSENT = """
## Not here

cupyattn is attention alone. What comes before and after it in a model stays with FlashInfer, or
with the framework: one program may import both.

"""


def page() -> str:
    """docs/flashinfer-names.md as it should be."""
    listed = names.names()
    rows = [f"| `{place}` | {_list(result)} |\n" for place, result in listed["here"].items()]
    groups = [_group(**group) for group in listed["absent"]]
    return _HEAD.format(version=listed["version"]) + "".join(rows) + _ABSENT + "\n".join(groups)


def _list(result: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in result)


def _group(what: str, instead: str, names: dict[str, list[str]]) -> str:
    title = what[0].upper() + what[1:]
    places = "".join(f"- `{place}`: {_list(result)}\n" for place, result in names.items())
    return f"**{title}**: {instead}.\n\n{places}"

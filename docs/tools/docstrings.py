"""The docstrings of this project as reStructuredText, for the API pages of the site.

A docstring is paragraphs of plain text. A paragraph of arguments has entries of the form

    name, other   what they are
            and how that goes on, indented

and becomes a definition list. Everything else is escaped, so no docstring can break the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CODE = re.compile(r"`([^`\n]+)`")
_SPECIAL = re.compile(r"([\\*|`]|_(?=\W|$))")
_NAMES = re.compile(r"[*\w]+(?:(?:, | and | to )[*\w]+)*(?: \([\w ,]+\))?$")
_ENTRY = re.compile(r"(\S.*?) {2,}(\S.*)$")


def to_rest(lines: list[str]) -> list[str]:
    """The lines of a docstring without its indentation, as reStructuredText."""
    rest: list[str] = []
    for paragraph in _paragraphs(lines):
        rest += [*_converted(paragraph), ""]
    return rest


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line.rstrip())
        elif paragraph:
            yield paragraph
            paragraph = []


def _converted(paragraph: list[str]) -> list[str]:
    indents = [len(line) - len(line.lstrip()) for line in paragraph]
    if min(indents) > 0:
        return ["::", "", *(f"    {line}" for line in paragraph)]
    if _is_table(paragraph, indents):
        return ["::", "", *(f"    {line}" for line in paragraph)]
    entries = list(_entries(paragraph, indents))
    if all(names is None for names, _ in entries):
        return [_escaped(" ".join(line.strip() for line in paragraph))]
    rest: list[str] = []
    for names, text in entries:
        if names is None:
            rest += [_escaped(text), ""]
        else:
            rest += [f"``{names}``", f"    {_escaped(text)}", ""]
    return rest


def _is_table(paragraph: list[str], indents: list[int]) -> bool:
    """Rows with several gaps, which only a fixed pitch can show."""
    gaps = [len(re.findall(r"\S {3,}(?=\S)", line)) for line in paragraph]
    return len(paragraph) > 1 and not any(indents) and min(gaps) >= 2


def _entries(paragraph: list[str], indents: list[int]) -> Iterator[tuple[str | None, str]]:
    """(names, text) of each entry; names are None where a line names nothing."""
    hanging = max(indents)
    names: str | None = None
    text: list[str] = []
    for line, indent in zip(paragraph, indents, strict=True):
        found = None if indent else _split(line, hanging)
        if found or (not indent and names is not None and hanging):
            if text:
                yield names, " ".join(text)
            names, first = found or (None, line)
            text = [first]
        else:
            text.append(line.strip())
    yield names, " ".join(text)


def _split(line: str, hanging: int) -> tuple[str, str] | None:
    """The names that a line begins with, and what follows: two blanks apart, or at the column
    where the lines below it go on."""
    if (entry := _ENTRY.match(line)) and _NAMES.match(entry[1]):
        return entry[1], entry[2]
    head = line[:hanging]
    if hanging and head.endswith(" ") and _NAMES.match(head.strip()):
        return head.strip(), line[hanging:]
    return None


def _escaped(text: str) -> str:
    """Plain text with `code` in it."""
    parts = _CODE.split(text)
    for i, part in enumerate(parts):
        parts[i] = f"``{part}``\\ " if i % 2 else _SPECIAL.sub(r"\\\1", part)
        if i % 2 and parts[i - 1] and not parts[i - 1][-1].isspace():
            parts[i] = f"\\ {parts[i]}"
    return "".join(parts).replace("\\  ", " ").removesuffix("\\ ")

"""llms.txt: the pages for users, a line each, for programs that read documents by address."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
_LEFT_OUT = ("Notebooks", "Project")
_NESTED = re.compile(r"^:::\{toctree\}\n:hidden:\n(?!:)(.*?)^:::$", re.S | re.M)
_TOCTREE = re.compile(r"^:::\{toctree\}\n:hidden:\n:caption: (.*?)\n(.*?)^:::$", re.S | re.M)
_HEAD = """# cupyattn

> Attention for large language models on NVIDIA GPUs, for torch, CuPy, JAX and NumPy arrays:
> prompts, decoding, batches over a paged KV cache. CPU arrays are answered by an exact reference.
> Inference only.

To port a program, begin with [the skill](docs/port-to-cupyattn/SKILL.html).
"""


def page() -> str:
    """docs/home/llms.txt as it should be: the pages of the first page's trees, by sections."""
    parts = [_HEAD]
    for caption, entries in _TOCTREE.findall((DOCS / "index.md").read_text("utf-8")):
        if caption not in _LEFT_OUT:
            lines = "".join(_lines(entry) for entry in entries.split())
            parts.append(f"## {caption}\n\n" + lines)
    return "\n".join(parts)


def linked(text: str) -> list[str]:
    """The pages that a text of this form names."""
    return re.findall(r"\]\((\S+?)\.html\)", text)


def _lines(entry: str) -> str:
    """A page, and those below it."""
    for suffix in (".md", ".rst"):
        path = (DOCS / f"{entry}{suffix}").resolve()
        if path.exists():
            text = path.read_text("utf-8")
            title, about = _title_and_sentence(text, suffix)
            address = path.relative_to(DOCS.parent).with_suffix(".html").as_posix()
            line = f"- [{title}]({address})" + (f": {about}" if about else "") + "\n"
            below = [x for tree in _NESTED.findall(text) for x in tree.split()]
            return line + "".join(map(_lines, below))
    return ""


def _title_and_sentence(text: str, suffix: str) -> tuple[str, str]:
    """The title of a page, and the first sentence of the paragraph below it, if there is one."""
    if suffix == ".rst":
        title, _, rest = text.partition("\n")
        rest = rest.partition("\n")[2]
    else:
        title, _, rest = text[text.index("# ") + 2 :].partition("\n")
    first = rest.strip().partition("\n\n")[0]
    if first[:1] in "|:.`#-!" or first.startswith("Contents"):
        return title, ""
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|:doc:`[^`]*`|[`*]", r"\1", " ".join(first.split()))
    sentence = re.split(r"(?<=[.:?])\s", plain)[0].rstrip(":")
    return title, sentence if len(sentence.split()) > 3 else ""

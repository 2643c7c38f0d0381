"""Sphinx's configuration. The source folder is the root of the checkout, so that the links between
documents, READMEs and raw results are the same on the site as in the tree."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cupyattn import __version__, cli  # noqa: E402

project = "cupyattn"
author = "The cupyattn authors"
project_copyright = "The cupyattn authors, Apache-2.0"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "docs/**.md",
    "docs/**.rst",
    "kernels/README.md",
    "benchmarks/README.md",
    "benchmarks/**/README.md",
    "benchmarks/notebooks/*.ipynb",
]
exclude_patterns = ["build", "dist", "cupyattn", "tests", "**/.*", "**/__pycache__"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Notebooks are shown as they were executed; `make notebooks` executes them.
nb_execution_mode = "off"
nb_merge_streams = True

# Doors are documented without their frameworks, which would take longer than all the rest.
autodoc_mock_imports = ["torch", "transformers", "jax"]
# Signatures show the types of arguments as they are written.
autodoc_typehints = "signature"
autodoc_use_type_comments = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 80
toc_object_entries = True
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_use_admonition_for_notes = False
autosummary_generate = False
# `name` in a docstring is a link where it names something of ours, and code elsewhere.
default_role = "py:obj"

# Copied examples come without their prompts and what they print.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

smartquotes = False
html_theme = "furo"
html_title = f"cupyattn {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["home"]
html_show_sphinx = False
html_domain_indices = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


class Commands(Directive):
    """The help of every command, as it is printed."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name, parser in _parsers("cupyattn", cli._parser()):
            section = nodes.section(ids=[nodes.make_id(name)])
            section += nodes.title(text=name)
            section += nodes.literal_block(text=parser.format_help(), language="none")
            found.append(section)
        return found


def _parsers(name: str, parser: Any) -> Iterator[tuple[str, Any]]:
    """A command and all below it, but `demo`, which reads its options itself."""
    yield name, parser
    for action in parser._actions:
        for word, inner in action.choices.items() if isinstance(action.choices, dict) else ():
            if word != "demo":
                yield from _parsers(f"{name} {word}", inner)


def setup(app: Any) -> None:
    """Show the help of our commands, and links of folders as words."""
    # argparse asks the terminal how wide it is; the site is as wide everywhere.
    os.environ["COLUMNS"] = "88"
    app.add_directive("commands", Commands)
    app.connect("source-read", _unlinked)


def _unlinked(app: Any, docname: str, content: list[str]) -> None:
    """Folders of the tree, and notebooks that were not executed yet, become words without links."""
    folder = (ROOT / docname).parent

    def plain(link: re.Match[str]) -> str:
        target = folder / link[2]
        is_missing = target.suffix in ("", ".ipynb") and not target.exists()
        return link[1] if target.is_dir() or is_missing else link[0]

    content[0] = re.sub(r"\[([^\]\n]+)\]\(([^)\s#:]+)\)", plain, content[0])

"""Sphinx's configuration. The source folder is the root of the checkout, so that the links between
documents, READMEs and raw results are the same on the site as in the tree."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cupyattn import __version__
from docs.tools import docstrings

project = "cupyattn"
author = "The cupyattn authors"
project_copyright = "The cupyattn authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "docs/**.md",
    "docs/**.rst",
    "kernels/README.md",
    "benchmarks/README.md",
    "benchmarks/results/**/README.md",
]
exclude_patterns = ["build", "dist", "cupyattn", "tests", "**/.*", "**/__pycache__"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Signatures show the types of arguments as they are written.
autodoc_typehints = "signature"
autodoc_type_aliases = {"Array": "Array", "Pages": "Pages", "Scale": "Scale"}
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 80
toc_object_entries = False

html_theme = "furo"
html_title = f"cupyattn {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["home"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Any) -> None:
    """Read our docstrings as plain text, and leave a page without a toctree entry in peace."""
    app.connect("autodoc-process-docstring", _to_rest)


def _to_rest(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = docstrings.to_rest(lines)

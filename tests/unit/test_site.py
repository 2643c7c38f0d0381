"""The site: pages made from code are today's, the API is whole, and Sphinx does not complain."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import site_pages

import cupyattn
from cupyattn import errors
from docs.tools import doors, llms, mistakes, support
from docs.tools.pictures import PICTURES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Modules whose names are public without being exported by the package.
MODULES = (
    *("flash_attn", "flash_attn.bert_padding", "flash_attn_interface", "flash_mla", "serving"),
    *("distributed", "dsa_indexer", "msa_ops", "paged_mqa"),
    *("typing", "integrations.jax"),
)


def read(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_function_draws(name: str) -> None:
    assert read(f"pictures/{name}.svg") == PICTURES[name](), "run python -m docs.tools"


def test_every_picture_is_drawn_by_a_function_and_shown_on_a_page() -> None:
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == {*PICTURES}
    text = "\n".join(path.read_text("utf-8") for path in DOCS.rglob("*.md"))
    assert [name for name in PICTURES if f"pictures/{name}.svg)" not in text] == []


def test_the_support_matrix_is_that_of_the_code() -> None:
    assert read("support.md") == support.page(), "run python -m docs.tools"


def test_the_page_of_errors_has_the_messages_of_the_code() -> None:
    assert read("troubleshooting.md") == mistakes.page(), "run python -m docs.tools"


def test_the_list_of_pages_for_programs_names_those_of_the_first_page() -> None:
    written = llms.linked(read("home/llms.txt"))
    assert written == llms.linked(llms.page()), "run python -m docs.tools"
    sources = [(ROOT / f"{x}{suffix}") for x in written for suffix in (".md", ".rst")]
    assert len([x for x in sources if x.exists()]) == len(written)


def test_every_kind_of_error_is_on_the_page() -> None:
    kinds = [x for x in vars(errors).values() if inspect.isclass(x)]
    wanted = {x.__name__ for x in kinds if x is not errors.CupyAttnError}
    assert wanted <= set(re.findall(r"^## (\w+)$", read("troubleshooting.md"), re.M))


def test_phrases_of_messages_that_not_every_machine_gives_are_the_library_s() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "cupyattn").rglob("*.py"))
    joined = re.sub(r'"\s*f?"', "", re.sub(r"\{env\.NO_COMPILE\.name\} ", "", sources))
    assert [x.phrase for x in mistakes.QUOTED if x.phrase not in joined] == []


def test_a_door_has_an_option_only_if_the_answer_changes() -> None:
    door = next(x for x in doors.doors() if x.name == "BatchAttention")
    assert "soft cap" in doors.options_of(door) and "window" not in doors.options_of(door)
    ignored = door._replace(call=lambda keys, options: door.call(keys, {}))
    assert "soft cap" not in doors.options_of(ignored)


def public() -> list[str]:
    """Every public name, as the API pages spell it."""
    found = [name for name in cupyattn.__all__ if name != "__version__"]
    for name in MODULES:
        module = importlib.import_module(f"cupyattn.{name}")
        found += [f"{name}.{x}" for x in module.__all__]
    return found


def test_everything_public_is_on_an_api_page() -> None:
    text = "\n".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.rst"))
    listed = set(re.findall(r"auto(?:function|class):: (\S+)", text))
    whole = set(re.findall(r"automodule:: cupyattn\.(\S+)", text))
    missing = [
        x
        for x in public()
        if x not in listed and x.rpartition(".")[0] not in whole and not error(x)
    ]
    assert missing == [] and "errors" in whole


@pytest.mark.parametrize("path", sorted((DOCS / "api").glob("*.rst")), ids=lambda x: x.stem)
def test_a_page_of_the_api_begins_with_a_summary_of_its_entries(path: Path) -> None:
    text = path.read_text("utf-8")
    entries = re.findall(r"auto(?:function|class):: (?:\S+\.)?(\w+)$", text, re.M)
    summary = re.findall(r"^   ~\S+\.(\w+)$", text, re.M)
    assert not entries or set(entries) <= set(summary) or path.stem == "integrations"


def error(name: str) -> bool:
    return hasattr(errors, name)


def test_everything_public_has_a_docstring() -> None:
    missing = []
    for name in public():
        value = functools.reduce(getattr, name.split("."), cupyattn)
        methods = [x for x in vars(value) if x[0] != "_"] if inspect.isclass(value) else []
        named = {name: value} | {f"{name}.{x}": getattr(value, x) for x in methods}
        missing += [x for x in named if callable(named[x]) and not inspect.getdoc(named[x])]
    assert missing == []


# What a docstring of a function says, itself or by naming the function whose docstring does.
_SAYS = {
    "what is returned": r"[Rr]eturns|[Rr]esults?\b|[Aa]nswers?\b",
    "what is raised": r"[Rr]aises?\b|[Ee]rrors?\b",
    "whose semantics it has": r"Semantics:",
}


def test_an_exported_function_says_what_it_returns_raises_and_follows() -> None:
    functions = [x for x in cupyattn.__all__ if inspect.isfunction(getattr(cupyattn, x))]
    for name in functions:
        text = inspect.getdoc(getattr(cupyattn, name)) or ""
        assert [what for what, how in _SAYS.items() if not re.search(how, text)] == [], name


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    first.write_text('<title>A</title><p id="x"><a href="b.html#y">1</a><a href="#x">2</a>')
    second.write_text(
        '<a href="c.html">3</a><a href="a.html#z">4</a><a href="https://x.org/">5</a>'
    )
    site = {x: site_pages.Page(x.read_text("utf-8")) for x in (first, second)}
    assert site_pages.broken_links(site) == [
        "a.html: b.html#y",
        "b.html: c.html",
        "b.html: a.html#z",
    ]
    assert site[first].title == "A" and not site[first].is_for_phones


# Modules of the integrations, and the page that has their examples.
_INTEGRATIONS = ("torch", "transformers", "jax", "minisgl", "sglang", "vllm")


@pytest.mark.parametrize("name", [*_INTEGRATIONS, "vllm_sparse", "sglang_sparse"])
def test_a_module_of_an_integration_names_the_page_of_its_examples(name: str) -> None:
    text = (ROOT / f"cupyattn/integrations/{name}.py").read_text("utf-8").split('"""')[1]
    (page,) = re.findall(r"^Examples: :doc:`/docs/(\S+)`\.$", text, re.M)
    assert page == f"integrations/{name.partition('_')[0]}"
    shown = read(f"{page}.md")
    assert "```python\n" in shown or re.search(r"^ {4}\S", shown, re.M)


_OF_THE_SITE = "sphinx", "myst_nb", "furo", "sphinx_copybutton", "sphinx_design"


@pytest.mark.skipif(
    any(importlib.util.find_spec(x) is None for x in _OF_THE_SITE),
    reason="the extra `docs` is not installed",
)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-c", "docs", "-W", "--keep-going", "-q"]
    command += ["-d", str(tmp_path / "doctrees"), "-b", "html", ".", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {x.relative_to(tmp_path / "site").as_posix() for x in tmp_path.rglob("*.html")}
    wanted = {x.relative_to(ROOT).with_suffix(".html").as_posix() for x in DOCS.rglob("*.md")}
    assert wanted | {"index.html"} <= pages
    api = (tmp_path / "site/docs/api/wrappers.html").read_text("utf-8")
    for method in ("plan", "run", "workspace_size"):
        assert f'id="cupyattn.BatchDecodeWithPagedKVCacheWrapper.{method}"' in api
    for page in sorted(wanted):
        text = (tmp_path / "site" / page).read_text("utf-8")
        assert "system-message" not in text, page
        # A wide table scrolls in a box of its own, so that no page is wider than a phone.
        assert text.count("<table") == text.count('<div class="table-wrapper'), page
    site = {x: site_pages.Page(x.read_text("utf-8")) for x in (tmp_path / "site").rglob("*.html")}
    assert site_pages.broken_links(site) == []
    for path, seen in site.items():
        assert seen.title and all(x.get("alt") for x in seen.images), path
        assert seen.is_for_phones, path

"""Forms, lists and addresses around the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cupyattn
from docs.tools import address

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
_KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def load(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= set(form) and len(form["description"]) <= 200
    fields = [x for x in form["body"] if x["type"] != "markdown"]
    assert {x["type"] for x in form["body"]} <= _KINDS
    ids = [x["id"] for x in fields]
    assert len(set(ids)) == len(ids) and all(x["attributes"]["label"] for x in fields)
    assert any(x.get("validations", {}).get("required") for x in fields)


def test_forms_name_what_there_is() -> None:
    """Variables and commands that a reporter is asked for."""
    from cupyattn.cli import _parser
    from cupyattn.core import env

    text = "".join(path.read_text("utf-8") for path in (*FORMS, ROOT / "docs" / "SECURITY.md"))
    known = {variable.name for variable in env.ALL}
    assert set(re.findall(r"CUPYATTN_\w+[A-Z]", text)) <= known
    usage = _parser().format_help()
    assert all(name in usage for name in re.findall(r"`cupyattn (\w+)", text))


def test_nobody_owns_code_yet() -> None:
    lines = (GITHUB / "CODEOWNERS").read_text("utf-8").splitlines()
    assert lines and all(line.startswith("#") for line in lines)


def test_the_release_list_names_what_there_is() -> None:
    text = (GITHUB / "RELEASE_CHECKLIST.md").read_text("utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= set(targets)
    for link in re.findall(r"\]\((.*?)\)", text):
        assert (GITHUB / link).exists(), link
    for path in re.findall(r"`((?:cupyattn|docs)/[\w/]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_the_changes_are_headed_with_the_version() -> None:
    text = (ROOT / "docs" / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.*)$", text, re.M)
    version = cupyattn.__version__
    base, _, development = version.partition(".dev")
    assert headings[0].split(",")[0] == base
    assert headings[0].endswith(", in development") == bool(development)


# --- the address ---


def test_files_have_the_address_or_none() -> None:
    for path, text in address.rendered():
        assert path.read_text("utf-8") == text, "run python -m docs.tools"


def test_an_address_is_written_where_it_belongs() -> None:
    url = "https://example.org/own/cupyattn"
    files = {path.name: text for path, text in address.rendered(url)}
    assert f"url: {url}/security/advisories/new" in files["config.yml"]
    assert files["CITATION.cff"].endswith(f'repository-code: "{url}"\n')
    assert f'[project.urls]\nSource = "{url}"\n' in files["pyproject.toml"]
    assert f"({url}/security/advisories/new)" in files["SECURITY.md"]


@pytest.mark.skipif(bool(address.REPOSITORY), reason="there is an address")
def test_nothing_names_an_address_that_nobody_gave() -> None:
    for path, text in address.rendered():
        assert "github.com" not in text and "example.org" not in text, path
    assert "github.com/NAME" not in (ROOT / "README.md").read_text("utf-8")

"""The repository's address, in one place, and what is written with it once it is given.

While REPOSITORY is empty, nothing names an address. Set it, then `make written-docs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Such as "https://github.com/NAME/cupyattn", without a slash at the end.
REPOSITORY = ""

ROOT = Path(__file__).resolve().parents[2]
_CITATION = re.compile(r"^repository-code: .*\n", re.M)
_URLS = re.compile(r"(# urls: docs/tools/address.py writes them\n).*?(# end of urls\n)", re.S)
_REPORT = re.compile(r"(<!-- report -->\n).*?(<!-- end of report -->)", re.S)
_FORMS = """# docs/tools/address.py writes this file.
blank_issues_enabled: true
"""


def rendered(repository: str = REPOSITORY) -> Iterator[tuple[Path, str]]:
    """Every file with the address, as it should be."""
    yield ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml", _FORMS + _links(repository)
    citation = ROOT / "CITATION.cff"
    own = f'repository-code: "{repository}"\n' if repository else ""
    yield citation, _CITATION.sub("", citation.read_text("utf-8")) + own
    project = ROOT / "pyproject.toml"
    yield project, _URLS.sub(rf"\g<1>{_urls(repository)}\2", project.read_text("utf-8"))
    security = ROOT / "docs" / "SECURITY.md"
    report = _REPORT.sub(rf"\g<1>{_report(repository)}\n\2", security.read_text("utf-8"))
    yield security, report


def _links(repository: str) -> str:
    if not repository:
        return ""
    return (
        "contact_links:\n"
        "  - name: A vulnerability\n"
        f"    url: {repository}/security/advisories/new\n"
        "    about: Report it in private, before anybody else can read of it.\n"
    )


def _urls(repository: str) -> str:
    if not repository:
        return ""
    pages = {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changes": f"{repository}/blob/main/docs/CHANGELOG.md",
    }
    lines = [f'{name} = "{url}"' for name, url in pages.items()]
    return "\n".join(["[project.urls]", *lines, ""])


def _report(repository: str) -> str:
    """Where a vulnerability is reported."""
    way = "to the maintainers by a private message"
    if repository:
        way = f"by [a private report]({repository}/security/advisories/new)"
    return f"Send this form {way}, never by an issue."

"""kernels/: which folder a header is in says which kernels have it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "kernels"
# From the top down. A header includes those of its folder, and of folders below.
_FOLDERS = (
    *(
        "entry",
        "sm80",
        "sm90",
        "merge",
        "exchange",
        "select",
        "quantize",
        "page",
        "plan",
        "shared",
        "tile",
        "ptx",
    ),
    *("params", "common"),
)
# Folders of roles, and the kernels that have them.
_ROLES = {
    "sm90/prefill/": {"sm90/prefill.cuh"},
    "sm90/wide/": {"sm90/wide.cuh", "sm90/wide_decode.cuh"},
    "sm90/wide_decode/": {"sm90/wide_decode.cuh"},
}


def _includes() -> list[tuple[str, str]]:
    """(header, header that it includes), without `cupyattn/`."""
    found = []
    for path in sorted(ROOT.rglob("*.cu*")):
        name = path.relative_to(ROOT).as_posix().removeprefix("cupyattn/")
        for include in re.findall(r'^#include "([^"]+)"', path.read_text("utf-8"), re.MULTILINE):
            found.append((name, include.removeprefix("cupyattn/")))
    return found


def test_every_folder_is_known_and_in_the_map() -> None:
    folders = {name for pair in _includes() for name in (pair[0].split("/")[0],)}
    assert folders == set(_FOLDERS)
    text = (ROOT / "README.md").read_text("utf-8").split("## Folders\n")[1]
    assert tuple(re.findall(r"^    (\w+)/ ", text, re.MULTILINE)) == _FOLDERS


def test_includes_go_down() -> None:
    for name, include in _includes():
        upper, lower = name.split("/")[0], include.split("/")[0]
        assert _FOLDERS.index(upper) <= _FOLDERS.index(lower), f"{name} includes {include}"
        assert {upper, lower} != {"sm80", "sm90"}, f"{name} includes {include}"


def test_roles_are_included_by_their_kernels() -> None:
    for folder, kernels in _ROLES.items():
        users = {name for name, include in _includes() if include.startswith(folder)}
        below = {name for name in users if not name.startswith(folder)}
        inside = {kernel.removesuffix(".cuh") + "/" for kernel in kernels}
        assert all(x in kernels or x.startswith(tuple(inside)) for x in below), (folder, below)
    # What serves all kernels of an architecture knows none of them.
    roles = {include for name, include in _includes() if name.startswith("sm90/roles/")}
    assert not any(x.startswith("sm90/") and not x.startswith("sm90/roles/") for x in roles)

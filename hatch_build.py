"""The build hook: archives say in cupyattn/_version.py which commit they were built from."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "cupyattn/_version.py"


class VersionHook(BuildHookInterface):  # type: ignore[misc]
    """Puts a copy of the file with the build's version in the place of the checkout's."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """hatchling calls it ahead of a build; `version` is the kind, "standard" or "editable"."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        text = (Path(self.root) / FILE).read_text("utf-8")
        line = f'__version__ = "{self.metadata.version}"'
        text, count = re.subn(r'^__version__ = "[^"]*"$', line, text, flags=re.MULTILINE)
        assert count == 1, f"{FILE} has no line with the version"
        copy = Path(self._folder.name) / "_version.py"
        copy.write_text(text, "utf-8")
        build_data["force_include"][str(copy)] = FILE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """hatchling calls it behind the build."""
        if version != "editable":
            self._folder.cleanup()

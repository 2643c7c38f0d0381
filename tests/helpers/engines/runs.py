"""Runs an engine's program in a process of its own, as one who installed this package would."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import models

ROOT = Path(__file__).parents[3]
FOLDER = os.environ.get("CUPYATTN_ENGINES", "")


def _missing(engine: str) -> bool:
    there = FOLDER and (Path(FOLDER) / engine).is_dir()
    return not there and importlib.util.find_spec(engine) is None


needs_vllm = pytest.mark.skipif(_missing("vllm"), reason="vLLM is not there")
needs_sglang = pytest.mark.skipif(_missing("sglang"), reason="SGLang is not there")


class Runs:
    """Programs of helpers.engines over models that are written once."""

    def __init__(self, places: pytest.TempPathFactory, device: str) -> None:
        self.places, self.device, self.folders = places, device, dict[str, str]()
        paths = [self._entry_points(), ROOT, ROOT / "tests", *([FOLDER] if FOLDER else [])]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}

    def _entry_points(self) -> Path:
        """A folder that says which entry points this package has, as an installed one does."""
        path = self.places.mktemp("site")
        info = path / "cupyattn-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupyattn\nVersion: 0\n")
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        lines = [
            line
            for group, points in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        return path

    def call(self, *words: str) -> Any:
        """The last line of JSON that a program prints: engines may log more as they end."""
        made = subprocess.run(
            [sys.executable, "-m", *words], env=self.environment, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
        for line in reversed(made.stdout.splitlines()):
            if line.startswith(("{", "[")):
                with contextlib.suppress(json.JSONDecodeError):
                    return json.loads(line)
        raise AssertionError(made.stdout[-2000:])

    def __call__(self, engine: str, kind: str, *, as_cached: bool = False, **given: Any) -> Any:
        """What an engine says of a model's kind, and `behind`: see models.differing."""
        if kind not in self.folders:
            self.folders[kind] = str(self.places.mktemp(kind))
            self.call("helpers.engines.models", "write", self.folders[kind], kind)
        asked = {"model": self.folders[kind], "prompts": models.prompts(), "device": self.device}
        got = self.call(f"helpers.engines.{engine}_program", json.dumps(asked | given))
        tokens = json.dumps([asked["prompts"], got["tokens"]])
        words = ["compare", self.folders[kind], tokens, *(["fp8"] if as_cached else [])]
        return got | {"behind": self.call("helpers.engines.models", *words)}

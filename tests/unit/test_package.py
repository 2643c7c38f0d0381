"""What is shipped: a wheel that carries the kernels and works outside the checkout."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from cupyattn import _version

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
INSTALLED = "cupyattn/_kernels/"

# The answer is the mean of v: all keys are equal.
CALL = """
import sys
import numpy as np
import cupyattn
from cupyattn import jit
print(cupyattn.__file__)
print(jit.kernels_dir())
print(sorted({"cupy", "torch", "jax"} & set(sys.modules)))
q, k = np.ones((4, 16), np.float32), np.ones((3, 2, 16), np.float32)
v = np.repeat(np.float32([1, 2, 6]), 32).reshape(3, 2, 16)
print(float(cupyattn.single_decode_with_kv_cache(q, k, v).mean()))
"""

COMPILE = """
import hashlib
from cupyattn import jit
from cupyattn.launch.instances import LEVELS, instances
found = dict(instances(LEVELS["standard"], "sm_90a"))
for name in ("merge_states", "store_kv", "plan_batch"):
    built = jit.build(name, found[name], "sm_90a")
    print(hashlib.sha256(built.path.read_bytes()).hexdigest())
"""


def build(kind: str, source: Path, folder: Path) -> Path:
    """The one file that hatchling makes from `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the wheel installed into it."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    command += [str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


def run_outside(installed: Path, cwd: Path, *arguments: str) -> list[str]:
    """Lines printed by Python, run in `cwd` with the installed wheel ahead of any other copy."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUPYATTN_", "PYTHON"))}
    environment["PYTHONPATH"] = str(installed)
    environment["CUPYATTN_CACHE_DIR"] = str(cwd / "cache")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_wheel_carries_every_kernel_file(wheel: Path) -> None:
    sources = {p.relative_to(KERNELS).as_posix(): p for p in KERNELS.rglob("*.cu*")}
    assert any(name.startswith("entry/") for name in sources)
    with zipfile.ZipFile(wheel) as archive:
        inside = [name for name in archive.namelist() if name.startswith(INSTALLED)]
        packed = {name.removeprefix(INSTALLED): archive.read(name) for name in inside}
    assert packed == {name: path.read_bytes() for name, path in sources.items()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"cupyattn", f"{info_folder(wheel)}"}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cupyattn").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_an_editable_install_reads_the_checkout(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel:editable", ROOT, tmp_path)) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".pth"))
        assert archive.read(path).decode().strip() == str(ROOT)
    assert not any("_kernels" in name for name in names)


def info_folder(wheel: Path) -> str:
    name, version, *_ = wheel.name.split("-")
    return f"{name}-{version}.dist-info"


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{info_folder(wheel)}/METADATA"))
        entry_points = archive.read(f"{info_folder(wheel)}/entry_points.txt").decode()
        licence = archive.read(f"{info_folder(wheel)}/licenses/LICENSE").decode()
    needs = [n for n in metadata.get_all("Requires-Dist", []) if "extra ==" not in n]
    assert sorted(n.partition(">")[0] for n in needs) == ["ml-dtypes", "numpy"]
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras >= {"cuda12x", "cuda13x", "test", "bench", "docs", "dev"}
    assert metadata["Requires-Python"] == ">=3.10"
    text = metadata.get_payload()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert example in (ROOT / "README.md").read_text("utf-8")
    # A package index shows the text alone, so relative links would be dead.
    assert "](" not in text and metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier", [])
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.14"} <= set(classifiers)
    assert metadata["License-Expression"] == "Apache-2.0" and "Apache License" in licence
    assert "cupyattn = cupyattn.cli:main" in entry_points
    groups = ("sglang.srt.plugins", "vllm.general_plugins", "vllm.platform_plugins")
    for group in groups:
        engine = group.partition(".")[0]
        line = f"cupyattn = cupyattn.integrations.{engine}:register"
        assert f"[{group}]\n{line}" in entry_points


def version_of(archive: zipfile.ZipFile) -> str:
    (line,) = re.findall(
        r'^__version__ = "(.*)"$', archive.read("cupyattn/_version.py").decode(), re.M
    )
    return str(line)


def test_a_wheel_says_which_commit_it_is_of(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        version = version_of(archive)
        metadata = email.message_from_bytes(archive.read(f"{info_folder(wheel)}/METADATA"))
    assert metadata["Version"] == version == _version.build_version()
    if (ROOT / ".git").exists() and _version.__version__.endswith(".dev0"):
        assert re.fullmatch(r"\d+\.\d+\.\d+\.dev[1-9]\d*\+[0-9a-f]{8,}(\.dirty)?", version)


def test_a_copy_without_git_builds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cupyattn" / "_version.py"
    own.parent.mkdir()
    shutil.copy(_version.__file__, own)
    monkeypatch.setattr(_version, "__file__", str(own))
    assert _version.build_version() == _version.__version__
    # A checkout, and no git in the path; then a git that knows no checkout here.
    (tmp_path / ".git").touch()
    assert _version.build_version() == _version.__version__
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _version.build_version() == _version.__version__
    monkeypatch.setattr(_version, "__version__", "0.3.0")
    assert _version.build_version() == "0.3.0"


def test_the_wheel_answers_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    package, kernels, frameworks, answer = run_outside(installed, tmp_path, "-c", CALL)
    assert Path(package) == installed / "cupyattn" / "__init__.py"
    assert Path(kernels) == installed / INSTALLED
    assert frameworks == "[]"
    assert float(answer) == 3.0


def test_the_command_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    lines = run_outside(installed, tmp_path, "-m", "cupyattn", "info")
    assert any(str(installed / INSTALLED) in line for line in lines)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="NVRTC is reached by CuPy")
def test_the_wheel_compiles_its_kernels(installed: Path, tmp_path: Path) -> None:
    digests = run_outside(installed, tmp_path, "-c", COMPILE)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == len(digests) == 3
    # They are the checkout's own, which finds these binaries in the cache.
    assert run_outside(ROOT, tmp_path, "-c", COMPILE) == digests
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 3


@pytest.mark.slow
def test_the_quick_start_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """With nothing but what the wheel asks for, from the package index."""
    python = tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv", with_pip=True)
    install = [python, "-m", "pip", "install", "-q", "--retries", "1", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"the package index was not reached: {done.stderr[-200:]}")
    readme = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    (quick_start,) = (block for block in blocks if "torch" not in block)
    command = tmp_path / "venv" / "bin" / "cupyattn"
    for arguments in ([python, "-c", quick_start], [command, "info"], [command, "demo"]):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    kept = (
        "Makefile",
        "LICENSE",
        "README.md",
        "docs",
        "kernels/entry",
        "tests/conftest.py",
    )
    for name in kept:
        assert (source / name).exists(), name
    again = build("wheel", source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        assert version_of(first) == version_of(second)

"""`cupyattn info` without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cupyattn
from cupyattn import cli
from cupyattn.choose import card
from cupyattn.cli import info
from cupyattn.core import device, env
from cupyattn.errors import UnsupportedError
from cupyattn.jit import cache


def test_info_names_everything(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    labels = [line.split(" ")[0] for line in out.splitlines()]
    for label in ("cupyattn", "Python", "CuPy", "NVRTC", "kernels", "cache", "environment"):
        assert label in labels
    assert any(label.startswith("GPU") for label in labels)
    assert f"{place / 'default-cache'} (writable): 0 kernels" in out
    for variable in env.ALL:
        assert variable.name in out and variable.doc in out
    assert f"CUPYATTN_KERNELS_DIR     = {place / 'kernels'}  {env.KERNELS_DIR.doc}" in out
    assert not (place / "default-cache").exists()


def test_info_as_json_says_the_same(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cupyattn"] == cupyattn.__version__ and found["kernels"] == str(place / "kernels")
    assert found["cache"][0]["path"] == str(place / "default-cache")
    assert set(found["environment"]) == {variable.name for variable in env.ALL}
    assert (
        found["hopper_head_dims"] == ["multiples of 8 up to 256"]
        and found["frameworks"]["numpy"] == np.__version__
    )


def test_info_of_gpus(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(device.NO_GPU, index=0, name="a GPU")
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 2, driverGetVersion=lambda: 13010, CUDARuntimeError=RuntimeError
    )
    cupy = types.SimpleNamespace(__version__="1", cuda=types.SimpleNamespace(runtime=runtime))

    def props(index: int) -> device.DeviceProps:
        if index:
            raise UnsupportedError("too old")
        return gpu

    monkeypatch.setattr(info, "cupy_module", lambda: cupy)
    monkeypatch.setattr(info, "device_props", props)
    found = info.facts()
    assert found["driver"] == "CUDA 13.1" and found["gpus"][0]["num_sms"] == 132
    assert found["gpus"][1] == {"index": 1, "error": "too old"}
    lines = "\n".join(info._lines(found))
    assert "GPU 0        a GPU: sm_90a, 132 SMs" in lines and "GPU 1        too old" in lines
    assert "  times      of H100, scaled to this card; `cupyattn tune` measures its own" in lines
    assert found["gpus"][0]["times"] == {
        "card": "H100",
        "from": "scaled",
        "measured": None,
        "file": None,
    }


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_info_says_where_the_times_of_a_measured_card_come_from(name: str) -> None:
    times = info._times(dataclasses.replace(device.NO_GPU, index=0, name=name))
    known = card.card_of(dataclasses.replace(device.NO_GPU, index=0, name=name))
    assert times["from"] == "shipped" and times["measured"] == (known.source or None)
    assert info._times_line(times).startswith(f"of {known.name}: {known.source}")


def test_info_counts_kernels_and_says_read_only(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = place / "default-cache" / f"some.sm_80.{32 * '0'}"
    entry.mkdir(parents=True)
    (entry / "kernel.cubin").write_bytes(b"x" * 3 * 2**20)
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    cli.main(["info"])
    assert "(read-only): 1 kernels, 3.0 MiB" in capsys.readouterr().out


def test_info_without_cupy_and_without_kernels(place: Path) -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
from cupyattn.cli import main
sys.exit(main(["info"]))
"""
    changed = {**os.environ, "CUPYATTN_KERNELS_DIR": str(place / "nowhere")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=changed, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "CuPy         cannot be imported" in done.stdout
    assert "CPU arrays run on the reference" in done.stdout
    assert str(place / "nowhere") in done.stdout

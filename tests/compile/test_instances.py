"""Compile gates: kernel instances build for every architecture, and none of them spills.

`make test` builds every standard instance for sm_80 and sm_90a, the smallest and the largest shared
memory that a tile is chosen for; the other architectures get the instances of one query dtype, with
a cache of the same and of one fp8 dtype, which between them use every tile and every option. That
takes under four minutes on two cores; the rest, some three, is marked slow.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn import dtypes, jit
from cupyattn.device import ARCHS
from cupyattn.launch.instances import instances

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

_WHOLE = ("sm_80", "sm_90a")
_SAMPLED_Q = dtypes.bfloat16
_SAMPLED_KV = (dtypes.bfloat16, dtypes.float8_e4m3fn)
_MAX_REGISTERS = 255

Instance = tuple[str, jit.Config]


def _groups() -> dict[str, tuple[str, list[Instance], bool]]:
    """Name -> (architecture, instances, is_slow): a test for each kernel, dtypes and head dims."""
    found: dict[str, tuple[str, list[Instance], bool]] = {}
    for arch in ARCHS:
        groups: dict[str, list[Instance]] = defaultdict(list)
        slow: dict[str, bool] = {}
        for name, config in instances("standard", arch):
            q, kv = config.get("DTypeQ"), config.get("DTypeKV")
            label = f"{arch} {name}"
            if q is not None:
                label += f" {q}-{kv} {config['kHeadDimQK']}-{config['kHeadDimVO']}"
            groups[label].append((name, config))
            is_sampled = q is None or (q is _SAMPLED_Q and kv in _SAMPLED_KV)
            slow[label] = not (arch in _WHOLE or is_sampled)
        found |= {label: (arch, group, slow[label]) for label, group in groups.items()}
    return found


GROUPS = _groups()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache, so that every kernel of the run is compiled in the run."""
    return tmp_path_factory.mktemp("kernels")


def _faults(built: jit.Build) -> list[str]:
    report = built.info.ptxas
    faults = [f"warning: {line}" for line in report.warnings]
    if report.spills:
        faults.append(f"spills {report.spill_store_bytes} + {report.spill_load_bytes} bytes")
    if not 0 < report.registers <= _MAX_REGISTERS:
        faults.append(f"{report.registers} registers")
    return faults


def _build_all(arch: str, group: Sequence[Instance]) -> list[str]:
    failures = []
    for name, config in group:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it spills, said here below
            built = jit.build(name, config, arch)
        assert not built.info.cached, "two instances share a Config"
        failures += [f"{name} {dict(config)}: {fault}" for fault in _faults(built)]
    return failures


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.slow if is_slow else ())
        for label, (_, _, is_slow) in GROUPS.items()
    ],
)
def test_instances_compile_without_spills(
    label: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(cache))
    monkeypatch.delenv("CUPYATTN_NO_COMPILE", raising=False)
    arch, group, _ = GROUPS[label]
    failures = _build_all(arch, group)
    assert not failures, "\n".join(failures)


def test_the_default_run_has_every_option_and_tile_of_every_arch() -> None:
    """What is slow varies dtypes only."""
    for arch in ARCHS:

        def kinds(fast: bool, arch: str = arch) -> set[object]:
            return {
                (name, tuple((k, x) for k, x in config.items() if not k.startswith("DType")))
                for other, group, is_slow in GROUPS.values()
                for name, config in group
                if other == arch and not (fast and is_slow)
            }

        assert kinds(fast=True) == kinds(fast=False)


def test_the_gate_sees_spills_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_kernels.sandbox(tmp_path, monkeypatch)
    assert _faults(tiny_kernels.build()) == []
    with pytest.warns(RuntimeWarning, match="spills"):
        spilling = jit.build("spilling", {}, "sm_80")
    assert [fault.split()[0] for fault in _faults(spilling)] == ["spills"]
    report = replace(tiny_kernels.build().info.ptxas, warnings=("(C7508)",), registers=256)
    built = replace(spilling, info=replace(spilling.info, ptxas=report))
    assert _faults(built) == ["warning: (C7508)", "256 registers"]

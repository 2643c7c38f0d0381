"""The machine code of standard kernels is what is recorded."""

from __future__ import annotations

import pytest

from cupyattn import jit
from cupyattn.core.device import ARCHS

from . import machine_code

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


def _require_nvrtc() -> None:
    known, here = machine_code.nvrtc_of_record(), jit.nvrtc_version()
    if known != here:
        pytest.skip(f"the record is of NVRTC {known}, and here is {here}: other machine code")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_standard_kernels_are_those_recorded(arch: str) -> None:
    """python -m tests.golden.machine_code --write records them."""
    known, now = machine_code.recorded(arch).keys(), machine_code.standard(arch).keys()
    assert not (gone := sorted(known - now)), f"{len(gone)} are gone"
    assert not (new := sorted(now - known)), f"{len(new)} are new"


def check(arch: str, name: str) -> None:
    _require_nvrtc()
    wanted = machine_code.recorded(arch)[name]
    if not wanted:
        pytest.skip(f"nobody has recorded the machine code of {name}")
    if machine_code.built((arch, name))[1] != wanted:
        entry, config = machine_code.standard(arch)[name]
        pytest.fail(
            f"{arch} {entry}: other machine code than recorded, with {config!r}. If it is meant, "
            "python -m tests.golden.machine_code --write records it.",
            pytrace=False,
        )


@pytest.mark.parametrize(
    ("arch", "name"), [(a, n) for a in machine_code.SAMPLES for n in machine_code.sample(a)]
)
def test_kernels_have_the_code_that_is_recorded(arch: str, name: str) -> None:
    check(arch, name)


@pytest.mark.slow
@pytest.mark.parametrize("arch", machine_code.SAMPLES)
def test_every_recorded_kernel_has_its_code(arch: str) -> None:
    for name, wanted in machine_code.recorded(arch).items():
        if wanted:
            check(arch, name)


def test_the_digest_is_of_the_code_alone() -> None:
    """What is behind the file's sections changes nothing; one bit of an instruction does."""
    _require_nvrtc()
    arch = "sm_80"
    name = next(n for n in machine_code.standard(arch) if n.startswith("packbits"))
    build = jit.build(*machine_code.standard(arch)[name], arch)
    cubin = bytearray(build.path.read_bytes())
    wanted = machine_code.code_digest(bytes(cubin))
    assert machine_code.built((arch, name))[1] == wanted
    assert machine_code.code_digest(bytes(cubin) + b"more") == wanted
    begin, size = machine_code.section(bytes(cubin), ".text.cupyattn_packbits")
    cubin[begin + size // 2] ^= 1
    assert machine_code.code_digest(bytes(cubin)) != wanted

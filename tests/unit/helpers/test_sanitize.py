"""The GPU suite under compute-sanitizer: how processes divide the work, and what they report."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers import sanitize

LOG = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at cupyattn_decode_sm80(cupyattn::AttentionParams)+0x1230
=========     by thread (0,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized<4, float>(int)+0x120
========= Error: Race reported between Write access at cupyattn_merge+0x10 and Read access at cupyattn_merge+0x20 [8 hazards]
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "x" on CUDA API call to cuLaunchKernel.
=========     Saved host backtrace up to driver entry point at error
========= Host API memory access error at host access to 0x7fd127231c00 of size 1 bytes
=========     Uninitialized access to 0x7fd127231c00 on access by cudaMemcpy source
========= ERROR SUMMARY: 5 errors
"""  # noqa: E501


def test_reports_are_told_apart_by_kernel() -> None:
    assert sanitize.reports(LOG) == {
        "Invalid __global__ read of size 4 bytes in kernel cupyattn_decode_sm80": 1,
        "Uninitialized __global__ memory read of size 4 bytes in kernel vectorized": 1,
        "Error: Race in kernel cupyattn_merge": 1,
        'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "x" on CUDA API call to '
        "cuLaunchKernel.": 1,
        "Host API memory access error at host access to ... of size 1 bytes": 1,
    }


EARLY = """\
========= Error: Race reported between Read access at cupyattn_arrive_early+0x800
=========     and Write access at cupyattn_arrive_early+0x8b0 [512 hazards]
=========
"""
ONE = """\
========= Error: Race reported between Read access at cupyattn_one_arrives+0x9d0
=========     and Write access at cupyattn_one_arrives+0xa70 [1008 hazards]
=========
========= Error: Race reported between Read access at cupyattn_one_arrives+0x370
=========     and Write access at cupyattn_one_arrives+0x4b0 [504 hazards]
=========
"""
END = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"


def test_hand_overs_tell_what_racecheck_can_judge() -> None:
    start = "========= COMPUTE-SANITIZER\n"
    assert sanitize.hand_overs(start + ONE + EARLY + END) == (True, False)
    assert sanitize.hand_overs(start + EARLY + END) == (True, True)
    assert sanitize.hand_overs(start + END) == (False, True)
    assert sanitize.hand_overs(start + EARLY.replace("arrive_early", "all_arrive")) == (
        False,
        False,
    )


def test_hand_overs_compile() -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    source = (sanitize.ROOT / "tests/helpers/hand_overs.cu").read_text()
    program = nvrtc.createProgram(source, "hand_overs.cu", (), ())
    nvrtc.compileProgram(program, ("-arch=sm_90", "-std=c++17", f"-I{sanitize.ROOT}/kernels"))
    cubin = nvrtc.getCUBIN(program)
    assert all(name.encode() in cubin for name in (sanitize.EARLY, *sanitize.ORDERED))


OURS = """\
========= Error: Race reported between Write access at cupyattn_prefill_sm90+0x16e40
=========     and Read access at cupyattn_prefill_sm90+0x9f0 [44 hazards]
=========     and Read access at cupyattn_prefill_sm90+0xa10 [32 hazards]
=========
"""
LIMIT = (
    "========= Warning: Maximum number of hazards reached. Environment variable "
    "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be used to increase this count.\n"
)
CRASH = """\
========= Error: process didn't terminate successfully
========= Target application returned an error
"""


@pytest.mark.parametrize(
    ("selection", "report", "num_unjudged"),
    [
        ("racecheck:prefill_sm90", 2 * OURS + END, 2),
        ("racecheck:mla", OURS.replace("prefill_sm90", "wide_decode_sm90") + END, 1),
        ("racecheck:prefill_sm90", OURS + LIMIT + END, 2),
        ("racecheck:prefill_sm90", OURS + CRASH + END, None),
        ("racecheck:batch", OURS + END, 1),
        ("racecheck:batch", OURS + LIMIT + END, None),
        ("racecheck:batch", OURS + OURS.replace("prefill_sm90", "prefill_sm80"), None),
        ("memcheck:prefill_sm90", OURS, None),
    ],
)
def test_only_what_racecheck_cannot_judge_is_let_pass(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    selection: str,
    report: str,
    num_unjudged: int | None,
) -> None:
    path = tmp_path / "log"
    path.write_text("test_x PASSED")
    Path(f"{path}.reports").write_text(report)
    job = sanitize.jobs([selection])[0]
    assert not sanitize._is_clean(job, "reports", 1.0, path)
    assert "can't judge" not in capsys.readouterr().out
    is_clean = sanitize._is_clean(job, "reports", 1.0, path, can_judge=False)
    assert is_clean is (num_unjudged is not None)
    if num_unjudged:
        assert f"    {num_unjudged} reports of hand-overs that" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "how", "is_clean"),
    [
        ("", "passed", True),
        ("========= Uninitialized read\n=========     at void a::b<4>(int)+0x1", "reports", True),
        ("========= Uninitialized read\n=========     at cupyattn_x(P)+0x1", "reports", False),
        ("========= Program hit an error that lies in code", "passed", False),
        ("", "cut short", False),
        ("", "not run", False),
        ("", "status 1", False),
    ],
)
def test_only_frameworks_may_be_reported(
    tmp_path: Path, report: str, how: str, is_clean: bool
) -> None:
    path = tmp_path / "log"
    path.write_text("test_x PASSED")
    Path(f"{path}.reports").write_text(report)
    (job,) = sanitize.jobs(["memcheck:jit"])
    assert sanitize._is_clean(job, how, 1.0, path) is is_clean
    path.write_text("test_x FAILED")
    assert not sanitize._is_clean(job, how, 1.0, path)


def test_every_file_of_the_suite_has_its_processes() -> None:
    files = {
        path.stem.removeprefix("test_").removesuffix("_gpu")
        for path in (sanitize.ROOT / "tests/gpu").glob("test_*.py")
    }
    made = sanitize.jobs(list(sanitize.TOOLS))
    assert {job.file for job in made} == files
    assert len({job.name for job in made}) == len(made)
    assert [job.name for job in sanitize.jobs(["memcheck:page", "racecheck:page"])] == [
        "memcheck-page-part1of2",
        "memcheck-page-part2of2",
        "memcheck-page-large1of1",
        "racecheck-page-part1of2",
        "racecheck-page-part2of2",
    ]


def test_a_run_is_cut_short_with_all_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda tool, path: [])
    late = tmp_path / "late"
    command = ["sh", "-c", f"(sleep 2; touch {late}) & wait"]
    assert sanitize.run("memcheck", command, {}, tmp_path / "log", 0.2) == "cut short"
    time.sleep(2.5)
    assert not late.exists()


def test_tests_know_that_they_are_under_the_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda tool, path: [])
    command = ["sh", "-c", "echo $CUPYATTN_TEST_SANITIZER"]
    assert sanitize.run("memcheck", command, {}, tmp_path / "log", 60) == "passed"
    assert (tmp_path / "log").read_text() == "memcheck\n"

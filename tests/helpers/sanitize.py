"""Runs the GPU suite under compute-sanitizer, in many processes at a time, and sums up the reports.

    python tests/helpers/sanitize.py --jobs 12 --share 0.1
    python tests/helpers/sanitize.py racecheck:attention memcheck:page

A selection is tool:file or a tool. Exit status 1: a report about a kernel of ours, a failed test, a
run cut short, or a planted mistake that is not found. Reports about the frameworks' kernels are
printed, and are theirs. Hazards in kernels that hand over by mbarriers are printed, and no more
than that, by a racecheck that reports the ORDERED kernels too: nothing tells them from real ones.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")
# Processes that share the tests of a file, the longest files first.
PARTS = {
    **dict.fromkeys(("attention", "batch", "batch_graphs", "cascade", "mla"), 4),
    **dict.fromkeys(("streams", "serving"), 3),
    **dict.fromkeys(("flash_attn", "prefill_sm90", "masked_wrappers", "planless", "verify"), 2),
    **dict.fromkeys(("page", "logits", "output_gate"), 2),
}
for _file in sorted((ROOT / "tests/gpu").glob("test_*_gpu.py")):
    PARTS.setdefault(_file.stem[len("test_") : -len("_gpu")], 1)
# Those of its tests that are marked large: a process under the sanitizer gives no memory back.
LARGE_PARTS = {"batch": 2, "streams": 4, "page": 1, "merge": 1}
_REPORTS = 99  # the exit status if there are any
_NO_REPORT = re.compile(r"^========= (COMPUTE-SANITIZER|.*SUMMARY:)")
_ADDRESS = re.compile(r"0x\w+")
_IS_THEIRS = re.compile(r" in kernel (?!cupyattn)\w+$")
_PLACE = re.compile(r"^=========\s+at (?:[^(<+]*[: ])?(\w+)[(<+]")
_RACE = re.compile(r" at (\w+)(?:\([^)]*\))?\+0x\w+")

# One mistake for each tool: a run that misses it has checked nothing.
PLANTED = """
import cupy, numpy
kernel = cupy.RawKernel(r'''
extern "C" __global__ void cupyattn_planted(int* x, int* out, long long far) {
  __shared__ int s[64];
  const int t = threadIdx.x;
  s[t] = t;
  out[t] = s[63 - t] + x[t];
  if (t < 16) __syncthreads();
  if (far) x[far] = 1;
}''', 'cupyattn_planted')
x = cupy.ndarray(64, numpy.int32, cupy.cuda.memory.alloc(256))
kernel((1,), (64,), (x, cupy.zeros(64, numpy.int32), numpy.int64(FAR)))
cupy.cuda.Device().synchronize()
"""

# hand_overs.cu has one more mistake, and kernels in order. Racecheck 2025.3.1 also reports one of
# these, one_arrives: if one thread arrives after a bar.sync of many, or a __syncwarp, it takes that
# to speak for the one alone. The last two are as in prefill_sm90, where rows are gathered.
# Kernels whose warps hand memory over by mbarriers.
_HANDING_OVER = ("cupyattn_prefill_sm90", "cupyattn_wide_sm90", "cupyattn_wide_decode_sm90")
EARLY = "cupyattn_arrive_early"
ORDERED = (
    "cupyattn_all_arrive",
    "cupyattn_one_arrives",
    "cupyattn_copies_arrive",
    "cupyattn_one_arrives_for_readers",
)
HAND_OVERS = """
import cupy, numpy, pathlib
if int(cupy.cuda.Device().compute_capability) < 90:
    raise SystemExit('no prefill_sm90 here')
code = pathlib.Path('tests/helpers/hand_overs.cu').read_text()
module = cupy.RawModule(code=code, options=('-std=c++17', '-Ikernels'))
for name in NAMES:
    out = cupy.zeros(128, numpy.int32)
    module.get_function(name)((2,), (128,), (out, numpy.int32(6)))
cupy.cuda.Device().synchronize()
"""


@dataclass(frozen=True)
class Job:
    """One process: part `index` of `count` of a file's tests."""

    tool: str
    file: str
    is_large: bool
    index: int
    count: int

    @property
    def name(self) -> str:
        kind = "large" if self.is_large else "part"
        return f"{self.tool}-{self.file}-{kind}{self.index + 1}of{self.count}"

    def command(self) -> list[str]:
        options = []
        if self.file == "jit":  # its tests provoke errors of the driver
            options += ["--report-api-errors", "no"]
        marks = f"gpu and not slow and {'' if self.is_large else 'not '}large"
        tests = f"tests/gpu/test_{self.file}_gpu.py"
        return [*options, sys.executable, "-m", "pytest", "-v", "-m", marks, tests]

    def environment(self, share: float) -> dict[str, str]:
        part = f"{self.index}/{self.count}"
        return {"CUPYATTN_TEST_SHARE": str(share), "CUPYATTN_TEST_PART": part}


def sanitizer(tool: str, path: Path) -> list[str]:
    shared = ["compute-sanitizer", "--tool", tool, "--log-file", f"{path}.reports"]
    shared += ["--error-exitcode", str(_REPORTS)]
    if tool == "initcheck":
        # It must see who writes; and frameworks read uninitialised memory of their own. What bulk
        # copies of tensors write it does not see: each copy of prefill_sm90's O would be reported.
        return [*shared, "--print-limit", "2000", "--check-api-memory-access", "no"]
    if tool == "racecheck":  # reports that can't be judged may not crowd out others
        shared += ["--print-limit", "0"]
    return [*shared, "--kernel-name", "kernel_substring=cupyattn"]


def jobs(selections: list[str]) -> list[Job]:
    found = []
    for selection in selections:
        tool, _, file = selection.partition(":")
        for name in [file] if file else PARTS:
            found += [Job(tool, name, False, index, PARTS[name]) for index in range(PARTS[name])]
            if tool != "racecheck":  # it looks at shared memory, which is not large
                count = LARGE_PARTS.get(name, 0)
                found += [Job(tool, name, True, index, count) for index in range(count)]
    return found


def run(tool: str, command: list[str], changes: dict[str, str], path: Path, timeout: float) -> str:
    """How it ended. What it prints goes to `path`, reports to `path`.reports."""
    if timeout <= 0:
        return "not run"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [*sanitizer(tool, path), *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | changes | {"PYTHONUNBUFFERED": "1", "CUPYATTN_TEST_SANITIZER": tool},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "cut short"
    return {0: "passed", _REPORTS: "reports"}.get(status, f"status {status}")


def reports(log: str) -> collections.Counter[str]:
    """What the sanitizer says, by kernel if it names one, and how often."""
    found: collections.Counter[str] = collections.Counter()
    headline = ""
    for line in [*log.splitlines(), "========= ERROR SUMMARY: "]:
        if line.startswith("========= ") and line[10:11].strip():
            if headline:
                found[headline] += 1
            headline = "" if _NO_REPORT.search(line) else _ADDRESS.sub("...", line[10:])
            if kernels := _RACE.findall(line):
                headline = (
                    f"{headline.split(' reported')[0]} in kernel {', '.join(sorted({*kernels}))}"
                )
        elif headline and (match := _PLACE.match(line)):
            found[f"{headline} in kernel {match[1]}"] += 1
            headline = ""
    return found


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _is_planted_found(tool: str, folder: Path) -> bool:
    code = PLANTED.replace("FAR", str((1 << 38) * (tool == "memcheck")))
    path = folder / f"{tool}-planted.log"
    run(tool, [sys.executable, "-c", code], {}, path, 300)
    found = reports(_read(Path(f"{path}.reports")))
    print(f"{tool}: planted, and found: {dict(found)}", flush=True)
    return any("cupyattn_planted" in what for what in found)


def hand_overs(log: str) -> tuple[bool, bool]:
    """Whether racecheck finds the one that is wrong, and whether it lets the others pass."""
    reported = {what.rpartition(" in kernel ")[2] for what in reports(log)}
    return EARLY in reported, reported.isdisjoint(ORDERED)


def _try_hand_overs(folder: Path) -> tuple[bool, bool]:
    path = folder / "racecheck-hand_overs.log"
    code = HAND_OVERS.replace("NAMES", repr((*ORDERED, EARLY)))
    # CuPy's cache on disk would not see that a header has changed.
    changes = {"CUPY_CACHE_IN_MEMORY": "1"}
    run("racecheck", [sys.executable, "-c", code], changes, path, 300)
    if "no prefill_sm90 here" in _read(path):
        return True, True
    log = _read(Path(f"{path}.reports"))
    print(f"racecheck: handed over, and found: {dict(reports(log))}", flush=True)
    return hand_overs(log)


def _is_unjudged(job: Job, what: str) -> bool:
    """Whether it may be a hand-over in order, should racecheck report such."""
    if job.tool != "racecheck":
        return False
    # They fill what the tool keeps for a process, and hide other kernels' hazards: that may be only
    # where the tests are this kernel's own.
    if "Maximum number of hazards" in what:
        return job.file == "prefill_sm90"
    return what.endswith(tuple(f": Race in kernel {name}" for name in _HANDING_OVER))


def _is_clean(job: Job, how: str, seconds: float, path: Path, *, can_judge: bool = True) -> bool:
    """Print what became of a job."""
    log, found = _read(path), reports(_read(Path(f"{path}.reports")))
    unjudged = [] if can_judge else [what for what in found if _is_unjudged(job, what)]
    num_unjudged = sum(found.pop(what) for what in unjudged)
    count = {word: log.count(f" {word}") for word in ("PASSED", "FAILED", "SKIPPED")}
    print(f"{job.name:34} {how:10} {seconds:4.0f} s  {count}", flush=True)
    for what, times in found.most_common(20):
        print(f"    {times} x {what}", flush=True)
    if num_unjudged:
        why = "it also reports a hand-over that is in order"
        print(
            f"    {num_unjudged} reports of hand-overs that this tool can't judge: {why}",
            flush=True,
        )
    is_ours = not all(_IS_THEIRS.search(what) for what in found)
    return not is_ours and not count["FAILED"] and how in ("passed", "reports")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("selections", nargs="*", default=list(TOOLS), metavar="tool[:file]")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--share", type=float, default=0.1, help="CUPYATTN_TEST_SHARE")
    parser.add_argument("--minutes", type=float, default=600.0, help="for everything")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/sanitize")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    wanted = jobs(args.selections)

    def work(job: Job) -> tuple[str, float, Path]:
        start, path = time.monotonic(), args.logs / f"{job.name}.log"
        changes = job.environment(args.share)
        how = run(job.tool, job.command(), changes, path, end - start)
        return how, time.monotonic() - start, path

    # One large job at a time, beside the others: two may not fit into the memory of a GPU.
    with ThreadPoolExecutor(max(1, args.jobs - 1)) as many, ThreadPoolExecutor(1) as one:
        tools = list(dict.fromkeys(job.tool for job in wanted))
        planted = [many.submit(_is_planted_found, tool, args.logs) for tool in tools]
        tried = many.submit(_try_hand_overs, args.logs) if "racecheck" in tools else None
        begun = [(one if job.is_large else many).submit(work, job) for job in wanted]
        finds_early, can_judge = tried.result() if tried else (True, True)
        clean = [finds_early, *(future.result() for future in planted)]
        for job, future in zip(wanted, begun, strict=True):
            clean.append(_is_clean(job, *future.result(), can_judge=can_judge))
    return int(not all(clean))


if __name__ == "__main__":
    sys.exit(main())

"""The machine code of the kernels that `cupyattn compile` calls standard, held as digests.

    python -m tests.golden.machine_code                      compares a sample, as the tests do
    python -m tests.golden.machine_code --all --arch sm_90a  compares every recorded one
    python -m tests.golden.machine_code --write [--all]      records them, and sums up what changed

A refactoring of kernels leaves them as they are. Cubins come from the kernel cache, whose key is
their source, so that only what has changed is compiled. `machine_code.json` names every standard
kernel; a digest is empty where nobody has compiled it yet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cupyattn import jit  # noqa: E402
from cupyattn.core.device import ARCHS  # noqa: E402
from cupyattn.launch.instances import LEVELS, instances  # noqa: E402
from golden.record import digest  # noqa: E402

PATH = Path(__file__).parent / "machine_code.json"
# How many kernels of an entry `make test` compiles, of the architectures that have kernels of their
# own: those that take long to compile are many.
SAMPLES = {
    "sm_90a": {"prefill_sm90": 5, "decode_sm80": 3, "wide_sm90": 2, "wide_decode_sm90": 2},
    "sm_80": {"prefill_sm80": 2, "decode_sm80": 1, "mixed_sm80": 1, "wide_sm80": 1},
}
# Sections that a launch runs or reads, and what the driver is told of them.
_SECTIONS = (".text.", ".nv.constant", ".rodata", ".nv.info.", ".nv.shared")
_NOTHING_STORED = 8  # SHT_NOBITS
Instance = tuple[str, jit.Config]


def sections(cubin: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and header of each section of an ELF file."""
    (begin,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q2I2Q", cubin, begin + i * size) for i in range(count)]
    for header in headers:
        name = headers[of_names][4] + header[0]
        yield cubin[name : cubin.index(b"\0", name)].decode(), header


def section(cubin: bytes, wanted: str) -> tuple[int, int]:
    """Where a section lies in the file, and its length."""
    return next((header[4], header[5]) for name, header in sections(cubin) if name == wanted)


def code_digest(cubin: bytes) -> str:
    """Of the machine code, its constants and its resources: no path, no time, no log."""
    parts = []
    for label, (_, kind, flags, _, offset, length, _, info, align, _) in sections(cubin):
        # The rest of a label is the kernel's name, which may change.
        if what := next((x for x in _SECTIONS if label.startswith(x)), ""):
            content = b"" if kind == _NOTHING_STORED else cubin[offset : offset + length]
            # The upper byte of info is the number of registers of code.
            parts.append((what, flags, length, info >> 24, align, content))
    assert any(what == ".text." for what, *_ in parts)
    return digest(repr(sorted(parts)), 10)


@cache
def standard(arch: str) -> dict[str, Instance]:
    """Every standard kernel by its name and the digest of its constants."""
    found = instances(LEVELS["standard"], arch)
    return {f"{name} {digest(config.text, 8)}": (name, config) for name, config in found}


def sample(arch: str) -> list[str]:
    """Names of the kernels of SAMPLES: those of an entry are spread over its list. The kernels that
    are small are all sampled on the first architecture."""
    wanted = SAMPLES.get(arch, {})
    by_entry: dict[str, list[str]] = {}
    for name in standard(arch):
        by_entry.setdefault(name.split()[0], []).append(name)
    chosen = []
    for entry, names in by_entry.items():
        is_small = arch == next(iter(SAMPLES)) and not entry.startswith(("mixed", "prefill"))
        count = wanted.get(entry, int(is_small))
        chosen += [names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)]
    return chosen


def built(job: tuple[str, str]) -> tuple[str, str]:
    """(name, digest) of a standard kernel of an architecture."""
    arch, name = job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return name, code_digest(jit.build(*standard(arch)[name], arch).path.read_bytes())


def load() -> dict[str, dict[str, dict[str, str]]]:
    """{"nvrtc": {"version": ...}, "kernels of ARCH": {name: digest}}"""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def recorded(arch: str) -> dict[str, str]:
    return load().get(f"kernels of {arch}", {})


def nvrtc_of_record() -> str:
    return load().get("nvrtc", {}).get("version", "")


def save(arch: str, digests: dict[str, str]) -> None:
    """Keep the digests of an architecture; what was not compiled keeps its own."""
    known = load()
    own = recorded(arch) if nvrtc_of_record() == jit.nvrtc_version() else {}
    if not own:
        known = {name: x for name, x in known.items() if nvrtc_of_record() == jit.nvrtc_version()}
    known["nvrtc"] = {"version": jit.nvrtc_version()}
    names = standard(arch)
    known[f"kernels of {arch}"] = {n: digests.get(n, own.get(n, "")) for n in names}
    ordered = {n: known[n] for n in ("nvrtc", *(f"kernels of {x}" for x in ARCHS)) if n in known}
    PATH.write_text(json.dumps(ordered, indent=0) + "\n")


def _all_built(arch: str, names: Iterable[str], jobs: int, seconds: float) -> dict[str, str]:
    """Digests of these kernels, of as many as there is time for."""
    found, end, many = {}, time.monotonic() + seconds, list(names)
    # NVRTC compiles one program at a time in a process; fork after CuPy is loaded is unsafe.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for begin in range(0, len(many), 2 * jobs):
            if time.monotonic() > end:
                break
            part = many[begin : begin + 2 * jobs]
            found |= dict(pool.map(built, [(arch, name) for name in part]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record what is compiled now")
    parser.add_argument("--all", action="store_true", help="every kernel, not the sample")
    parser.add_argument("--arch", choices=ARCHS, action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no compile after these")
    args = parser.parse_args()
    if not args.write and nvrtc_of_record() != jit.nvrtc_version():
        print(f"recorded with NVRTC {nvrtc_of_record()}, and here is {jit.nvrtc_version()}")
        return 0
    is_equal = True
    for arch in args.arch or (ARCHS if args.all or args.write else SAMPLES):
        was, names = recorded(arch), [*standard(arch)]
        chosen = names if args.all else sample(arch)
        if args.all and not args.write:
            chosen = [name for name in names if was.get(name)]
        now = _all_built(arch, chosen, args.jobs, args.seconds)
        differs = [n for n in now if was.get(n) and was[n] != now[n]]
        counts = Counter(n.split()[0] for n in differs)
        gone, new = was.keys() - set(names), set(names) - was.keys()
        is_equal &= not (differs or gone or new)
        print(
            f"{arch}: {len(now)} of {len(names)} compiled, {len(differs)} differ {dict(counts)}; "
            f"{len(gone)} kernels are gone, {len(new)} are new",
            flush=True,
        )
        for name in differs[:10]:
            print(f"  {name}: {standard(arch)[name][1].tag}")
        if args.write:
            save(arch, now)
    return int(not is_equal and not args.write)


if __name__ == "__main__":
    sys.exit(main())

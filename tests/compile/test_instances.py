"""Compile gates: kernel instances build for every architecture, and none touches local memory.

`make test` builds the instances of bfloat16 for sm_90a, with a cache of e4m3, or rows that are
gathered, those of head dim 128; for the other architectures those of bfloat16 and head dim 128,
with masks for sm_80 alone, and none for sm_86, whose registers are sm_89's; of mixed kernels, which
are two in one, and of prefill_sm90 at head dim 128, fewer. Of all of these it builds one of 24
where an option is on or the cache is of fp8, one of twelve where the head dim is another (every
other one of prefill_sm90 without options and of mixed kernels), every other one of decode_sm80
and of the wide kernels without options, and one of 16 where the architecture is neither sm_80 nor
sm_90a. On these two every kernel meets every option, over keys in rows or in pages; mixed kernels
meet theirs on sm_90a. The rest is slow.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.core.device import ARCHS
from cupyattn.jit import compiler
from cupyattn.jit.source import Program
from cupyattn.launch.instances import Selection, instances, one_option

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

_MAX_REGISTERS = 255

_DTYPES = tuple(
    (q, kv)
    for q in (dtypes.bfloat16, dtypes.float16)
    for kv in (q, dtypes.float8_e4m3fn, dtypes.float8_e5m2)
)
# One option at a time on the common head dims.
GATED = (
    Selection(dtypes=_DTYPES, options=one_option("none", "rope", "alibi", "soft_cap", "mask")),
    Selection(dtypes=_DTYPES, options=one_option("draft_mask")),
    Selection(dtypes=_DTYPES, options=one_option("multi_item"), head_dims=((128, 128),)),
    Selection(dtypes=_DTYPES[::3], options=one_option("output_gate", "head_gate")),
    Selection(
        ("prefill",),
        _DTYPES[::3],
        head_dims=((64, 64), (80, 80), (128, 128), (192, 128), (256, 128), (256, 256)),
        groups=(65,),
        options=one_option("skip_softmax"),
    ),
    Selection(
        dtypes=_DTYPES[::3],
        head_dims=((64, 64), (128, 128), (192, 128), (256, 128), (256, 256)),
        options=one_option("rel_logits"),
    ),
    # Other tiles of many rows, with the most columns that they have, and rows of parts of panels.
    Selection(
        ("prefill",),
        _DTYPES,
        head_dims=((72, 72), (192, 192), (256, 128), (248, 248)),
        groups=(65,),
        options=one_option("none", "rope", "alibi", "soft_cap", "mask"),
    ),
    Selection(("append", "merge"), _DTYPES, alignments=(False,)),
    Selection(("exchange", "mla"), head_dims=((64, 64), (128, 128), (80, 80), (192, 192))),
    Selection(
        ("prefill", "mla"),
        _DTYPES,
        head_dims=((512, 512), (256, 512)),
        page_sizes=(0, 16),
        options=one_option("none", "alibi", "soft_cap", "mask"),
        alignments=(True, False),
    ),
    Selection(("prefill",), head_dims=((512, 512),), options=one_option("output_gate")),
)
_OPTIONS = ("kRope", "kAlibi", "kSoftCap", "kCustomMask", "DTypeGate", "kTransform")
_MAIN = ("sm_80", "sm_90a")

Instance = tuple[str, jit.Config]


def _is_sampled(arch: str, name: str, config: jit.Config) -> bool:
    """Whether `make test` builds it."""
    kv, dims = config["DTypeKV"], (config["kHeadDimQK"], config["kHeadDimVO"])
    is_usual = dims == (128, 128)
    if name == "mixed_sm80":
        # Two kernels in one: all mixes of rows once, elsewhere the commonest alone.
        is_common = config["kDecodeMmaQ"] == 1 and config["kPrefillMmaQ"] == 1 + (dims[1] <= 128)
        is_sm90 = arch == "sm_90a"
        is_here = is_sm90 or (is_usual and arch == "sm_80" and _option(config) is None)
        return kv is dtypes.bfloat16 and is_here and (is_common or (is_usual and is_sm90))
    if config.get("kGathers") and not is_usual:
        return False
    # Blocks that take many items have more to keep in registers than those that take one.
    if name == "prefill_sm90" and is_usual and not config["kPersistent"]:
        return False
    if name == "wide_sm90":
        is_latent = bool(config["kLatent"])
        if is_latent:
            return config["DTypeQ"] is dtypes.bfloat16
        return kv is dtypes.bfloat16 and dims == (512, 512) and bool(config["kPaged"])
    if name == "wide_sm80":
        # The largest tile has the fewest registers to spare; of latent keys all tiles. On Hopper
        # all but those of e5m2 run wide_sm90.
        is_elsewhere = arch == "sm_90a" and config["kLatent"]
        stays = dtypes.float8_e5m2 if is_elsewhere else dtypes.bfloat16
        is_whole = config["kAligned"] and config["kPaged"] and kv is stays
        if config["kLatent"]:
            return is_whole and not config["kSparse"] and arch in ("sm_80", "sm_90a", "sm_120a")
        is_largest = dims == (512, 512) and config["kMmaQ"] == 4
        return is_whole and is_largest and arch in ("sm_80", "sm_90a")
    if arch == "sm_90a":
        return kv is dtypes.bfloat16 or (kv is dtypes.float8_e4m3fn and is_usual)
    has_mask = config.get("kCustomMask", False)
    is_here = arch == "sm_80" if has_mask else arch != "sm_86"
    return kv is dtypes.bfloat16 and is_usual and is_here


def _share(arch: str, name: str, config: jit.Config) -> int:
    """`make test` builds one instance of so many that are like this one."""
    if arch not in _MAIN:
        return 16
    if "DTypeKV" not in config:
        return 24 if name == "merge_splits" else 6
    if name.startswith("wide_"):
        return 2 if _option(config) is None else 1
    # Options cost registers, and so do wider heads: kernels without options are built.
    if _option(config) is not None or config["DTypeKV"] is not dtypes.bfloat16:
        return 24
    if name == "mixed_sm80":
        return 2
    if (config["kHeadDimQK"], config["kHeadDimVO"]) == (128, 128):
        return 2 if name == "decode_sm80" else 1
    return 2 if name == "prefill_sm90" else 12


def _option(config: jit.Config) -> str | None:
    return next((option for option in _OPTIONS if config.get(option)), None)


def _kind(name: str, config: jit.Config) -> tuple[object, ...]:
    """A kernel and its option; without one also where keys are, but of the longest to build."""
    option = _option(config)
    has_both = option is None and not name.startswith(("wide_", "mixed_"))
    return name, option, has_both and config.get("kPaged")


def _what_else(name: str, config: jit.Config) -> str:
    """What the label of an instance says besides its dtypes and head dims."""
    said = [option for option in _OPTIONS if config.get(option)]
    said += ["gathered"] if config.get("kGathers") else []
    if name == "mixed_sm80":
        said.append(f"{config['kPrefillMmaQ']}-{config['kDecodeMmaQ']}")
    if name == "wide_sm80":
        said.append(f"{16 * int(config['kMmaQ'])} rows")
        named = {"lists": "kSparse", "aligned": "kAligned", "paged": "kPaged"}
        said += [word for word, constant in named.items() if config[constant]]
    return "".join(f" {word}" for word in said)


def _groups() -> dict[str, tuple[str, list[Instance], bool]]:
    """Name -> (architecture, instances, is_slow): a test for each kernel, dtypes and head dims."""
    found: dict[str, tuple[str, list[Instance], bool]] = {}
    met: Counter[object] = Counter()
    for index, arch in enumerate(ARCHS):
        # The main architectures build the first instance of each kind, or the second, which has its
        # keys in pages; the others build later ones, so that between them they meet more.
        turn = 0 if arch in (*_MAIN, "sm_100a") else index
        groups: dict[str, list[Instance]] = defaultdict(list)
        slow: dict[str, bool] = {}
        for name, config in instances(GATED, arch):
            q, kv = config.get("DTypeQ"), config.get("DTypeKV")
            if kv is None:  # kernels of other operations know of queries too
                q = None
            is_slow = q is not None and not _is_sampled(arch, name, config)
            if not is_slow and (share := _share(arch, name, config)) > 1:
                kind = (arch, *_kind(name, config))
                met[kind] += 1
                place = turn + (_option(config) in ("kAlibi", "kCustomMask"))
                is_slow = (met[kind] - 1 - place) % share != 0
            label = f"{arch} {name}"
            if q is not None:
                label += f" {q}-{kv} {config['kHeadDimQK']}-{config['kHeadDimVO']}"
            # Slow instances are thousands, and every run of the suite collects their tests.
            label += ", the rest" if is_slow else _what_else(name, config)
            groups[label].append((name, config))
            slow[label] = is_slow
        found |= {label: (arch, group, slow[label]) for label, group in groups.items()}
    return found


GROUPS = _groups()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache, so that every kernel of the run is compiled in the run."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def no_other_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are looked for in the temporary folder too, where other runs leave some."""
    monkeypatch.setattr(tempfile, "tempdir", str(cache))


def _faults(report: compiler.PtxasReport) -> list[str]:
    faults = [f"warning: {line}" for line in report.warnings]
    if report.spills:
        faults.append(f"spills {report.spill_store_bytes} + {report.spill_load_bytes} bytes")
    # An array with a run-time index lives in local memory, as slow as a spill, and is not one.
    if report.stack_bytes:
        faults.append(f"{report.stack_bytes} bytes of stack")
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
        failures += [f"{name} {dict(config)}: {fault}" for fault in _faults(built.info.ptxas)]
    return failures


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.slow if is_slow else ())
        for label, (_, _, is_slow) in GROUPS.items()
    ],
)
def test_instances_stay_out_of_local_memory(
    label: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(cache))
    monkeypatch.delenv("CUPYATTN_NO_COMPILE", raising=False)
    arch, group, _ = GROUPS[label]
    failures = _build_all(arch, group)
    assert not failures, "\n".join(failures)


def _kinds(arch: str, *, fast: bool) -> set[object]:
    return {
        _kind(name, config)
        for other, group, is_slow in GROUPS.values()
        for name, config in group
        if other == arch and not (fast and is_slow)
    }


def test_the_default_run_has_every_kernel_and_option() -> None:
    """What is slow varies dtypes and head dims; elsewhere masks and mixes are slow too, and on
    sm_80 options of mixes, whose two kernels meet them alone."""
    for arch in _MAIN:
        missing = _kinds(arch, fast=False) - _kinds(arch, fast=True)
        alone = "kRope", "kAlibi", "kSoftCap", "DTypeGate", "kTransform"
        mixes = {("mixed_sm80", option, False) for option in alone}
        assert missing == (mixes if arch == "sm_80" else set())


class _Bare(Program):
    """An entry file as it stands, with its own default Config."""

    @property
    def text(self) -> str:
        return self.entry_path.read_text("utf-8")


_NAMES = {name for arch, group, _ in GROUPS.values() if arch == "sm_90a" for name, _ in group}


@pytest.mark.parametrize("name", sorted(_NAMES))
def test_entry_files_are_whole_programs(name: str) -> None:
    bare = _Bare.read(name, jit.Config({}))
    report = compiler.parse_log(compiler.compile_cubin(bare, "sm_90a").log, bare.symbol)
    assert _faults(report) == []


def test_the_gate_sees_spills_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_kernels.sandbox(tmp_path, monkeypatch)
    plain = tiny_kernels.build().info.ptxas
    assert _faults(plain) == []
    with pytest.warns(RuntimeWarning, match="spills"):
        spilling = jit.build("spilling", {}, "sm_80").info.ptxas
    assert _faults(spilling)[0].startswith("spills ")
    indexing = jit.build("indexing", {}, "sm_80").info.ptxas
    assert _faults(indexing) == ["256 bytes of stack"]
    costly = replace(plain, warnings=("(C7508)",), registers=256)
    assert _faults(costly) == ["warning: (C7508)", "256 registers"]

"""Config text, the include graph, the cache key, and what is read out of ptxas's log."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn import jit
from cupyattn.core import device, dtypes
from cupyattn.errors import CompileError, DeviceError, UnsupportedError
from cupyattn.jit import compiler, source
from cupyattn.jit.source import Program, kernels_dir

# Logs of NVRTC 13.0, verbatim.
SPILL_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     1568 bytes stack frame, 2004 bytes spill stores, 3296 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1568 bytes cumulative stack size, 128 bytes smem
ptxas info    : Compile time = 91.802 ms
ptxas info    : Function properties for _Z4noinILi100EEfPfi
ptxas         .     0 bytes stack frame, 708 bytes spill stores, 1028 bytes spill loads
"""
CLEAN_LOG = """\
/k/entry/k.cu(2): warning #177-D: variable "unused" was declared but never referenced
  extern "C" __global__ void k(float*x,int n){int unused; x[0]=n;}
                                                  ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : 40 bytes gmem, 256 bytes cmem[3], 8 bytes cmem[4]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 364 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 3.797 ms
"""
SETMAXNREG_LOG = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine \
register count at entry.
ptxas info    : (C7519) warpgroup.arrive is injected in around line 37 by compiler to allow use of \
registers in GMMA in function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(tmp_path / "kernels"))
    return tiny_kernels.write(tmp_path / "kernels")


# --- Config ---


def test_config_becomes_a_struct() -> None:
    config = jit.Config({"kRope": True, "kTileQ": 64, "kOff": False, "DTypeQ": dtypes.bfloat16})
    assert config.text == (
        "struct Config {\n"
        "  using DTypeQ = cupyattn::bfloat16_t;\n"
        "  static constexpr bool kOff = false;\n"
        "  static constexpr bool kRope = true;\n"
        "  static constexpr int kTileQ = 64;\n"
        "};\n"
    )
    assert config.tag == "Q-bfloat16_Rope_TileQ64"
    assert config["kTileQ"] == 64 and len(config) == 4


def test_float_is_the_builtin_type() -> None:
    assert "using DTypeO = float;" in jit.Config({"DTypeO": dtypes.float32}).text


def test_configs_are_equal_if_their_binaries_are() -> None:
    one = jit.Config({"kA": 1, "kB": True})
    assert one == jit.Config({"kB": True, "kA": 1}) and hash(one) == hash(
        jit.Config({"kB": True, "kA": 1})
    )
    assert one != jit.Config({"kA": True, "kB": True})
    assert one != jit.Config({"kA": 2, "kB": True})
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kScale": 1.5}, "kScale is 1.5"),
        ({"kScale": "1; int evil"}, "wanted an int, bool or DType"),
        ({"kScale": None}, "kScale is None"),
        ({"kScale": 2**31}, "does not fit"),
        ({"scale": 1}, "'scale' must be named in kCamelCase"),
        ({"kA = 1; int b": 1}, "kCamelCase"),
        ({"kType": dtypes.float16, "dtype": dtypes.float16}, "CamelCase"),
    ],
)
def test_bad_config_is_refused(values: dict, said: str) -> None:
    with pytest.raises(CompileError, match=said):
        jit.Config(values)


# --- the folder and the include graph ---


def test_include_graph_is_everything_below_the_entry(root: Path) -> None:
    program = Program.read("tiny", jit.Config({"kScale": 3}))
    assert sorted(program.includes) == [
        "cupyattn/common/types.cuh",
        "cupyattn/tiny/nested/add.cuh",
        "cupyattn/tiny/scale.cuh",
        "entry/tiny.cu",
    ]
    assert program.symbol == "cupyattn_tiny"
    assert program.text.startswith("#define CUPYATTN_CONFIG\n")
    assert program.text.endswith(f"#line 1\n{tiny_kernels.FILES['entry/tiny.cu']}")


def test_included_twice_and_in_a_circle_is_read_once(root: Path) -> None:
    add = root / "cupyattn/tiny/nested/add.cuh"
    add.write_text(add.read_text() + '# include "../scale.cuh"  // back again\n')
    assert len(Program.read("tiny", jit.Config({"kScale": 3})).includes) == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("#include <cuda_fp16.h>", r"entry/tiny\.cu:2 includes <cuda_fp16\.h>"),
        ("#include HEADER", r"tiny\.cu:2 includes HEADER"),
        ('#include "no/such.cuh"', r'tiny\.cu:2 includes "no/such\.cuh"'),
        ('  #  include "../../outside.cuh"', r"tiny\.cu:2 .* below"),
    ],
)
def test_bad_include_is_refused(root: Path, line: str, said: str) -> None:
    (root.parent / "outside.cuh").write_text("")
    entry = root / "entry/tiny.cu"
    first, rest = entry.read_text().split("\n", 1)
    entry.write_text(f"{first}\n{line}\n{rest}")
    with pytest.raises(CompileError, match=said):
        Program.read("tiny", jit.Config({}))


def test_include_in_a_line_comment_is_not_one(root: Path) -> None:
    entry = root / "entry/tiny.cu"
    entry.write_text('// #include "no/such.cuh"\n' + entry.read_text())
    assert len(Program.read("tiny", jit.Config({})).includes) == 4


@pytest.mark.parametrize("name", ["nothing", "../entry/tiny", "Tiny", "", "tiny\n"])
def test_unknown_kernel_lists_the_known(root: Path, name: str) -> None:
    with pytest.raises(
        CompileError, match="the kernels there are broken, indexing, slow, spilling, tiny"
    ):
        Program.read(name, jit.Config({}))


def test_kernels_dir_prefers_the_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_dir() == root
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(root / "nowhere"))
    with pytest.raises(CompileError, match="CUPYATTN_KERNELS_DIR"):
        kernels_dir()


def test_kernels_dir_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYATTN_KERNELS_DIR", raising=False)
    checkout = Path(__file__).resolve().parents[3] / "kernels"
    installed = Path(source.__file__).resolve().parents[1] / "_kernels"
    assert kernels_dir() == (installed if installed.is_dir() else checkout)


def test_includes_are_named_from_the_root() -> None:
    kernels = Path(__file__).resolve().parents[3] / "kernels"
    for path in kernels.rglob("*.cu*"):
        for match in source._INCLUDE.finditer(path.read_text("utf-8")):
            name = source._QUOTED.match(match[1])
            assert name and (kernels / name[1]).is_file(), f"{path.name}: {match[0]}"


# --- the key ---


def _digest(
    name: str = "tiny", scale: int = 3, options: tuple = ("-O",), nvrtc: str = "13.0"
) -> str:
    return Program.read(name, jit.Config({"kScale": scale})).digest(options, nvrtc, "sm_80")


def test_everything_that_changes_the_binary_changes_the_key(root: Path) -> None:
    keys = {
        _digest(),
        _digest(name="broken"),
        _digest(scale=4),
        _digest(options=("-O", "-g")),
        _digest(options=("-O-g",)),
        _digest(nvrtc="12.9"),
        Program.read("tiny", jit.Config({"kScale": 3})).digest(("-O",), "13.0", "sm_90a"),
    }
    for name in ("cupyattn/tiny/nested/add.cuh", "cupyattn/common/types.cuh", "entry/tiny.cu"):
        path = root / name
        path.write_text(path.read_text() + "// changed\n")
        keys.add(_digest())
    assert len(keys) == 10


def test_what_cannot_change_the_binary_keeps_the_key(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = _digest()
    (root / "cupyattn/unused.cuh").write_text("int never;")
    assert _digest() == key
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(tiny_kernels.write(tmp_path / "elsewhere")))
    assert _digest() == key


# --- ptxas ---


def test_spills_of_every_function_are_counted() -> None:
    report = compiler.parse_log(SPILL_LOG, "k")
    assert report.registers == 64
    assert report.stack_bytes == 1568
    assert report.spill_store_bytes == 2004 + 708
    assert report.spill_load_bytes == 3296 + 1028
    assert report.smem_bytes == 128
    assert report.spills and report.warnings == ()
    facts = {name: "x" for name in ("name", "arch", "nvrtc")}
    facts |= dict.fromkeys(("cubin_bytes", "compile_seconds", "process_peak_rss_bytes"), 1)
    kept = json.loads(json.dumps({**facts, "ptxas": report.as_json()}))
    assert jit.BuildInfo.from_json(kept, cached=True).ptxas == report


def test_clean_log() -> None:
    report = compiler.parse_log(CLEAN_LOG, "k")
    assert (report.registers, report.smem_bytes, report.cmem_bytes) == (10, 0, 372)
    assert not report.spills and report.lost_performance == ()
    assert len(report.warnings) == 1 and "#177-D" in report.warnings[0]


def test_performance_loss_is_kept_apart() -> None:
    report = compiler.parse_log(SETMAXNREG_LOG, "k")
    assert len(report.warnings) == 2
    assert len(report.lost_performance) == 1 and "C7508" in report.lost_performance[0]


@pytest.mark.parametrize("log", ["", CLEAN_LOG])
def test_a_log_without_the_kernel_is_not_silence(log: str) -> None:
    assert "not in the log" in compiler.parse_log(log, "other").warnings[-1]


# --- architectures ---


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_103a", "80", "", "compute_80"])
def test_unknown_arch(root: Path, arch: str) -> None:
    with pytest.raises(UnsupportedError, match="sm_120a"):
        jit.build("tiny", {"kScale": 3}, arch)


def test_near_miss_is_named(root: Path) -> None:
    with pytest.raises(UnsupportedError, match="did you mean sm_90a"):
        jit.build("tiny", {"kScale": 3}, "sm_90")


@pytest.mark.parametrize(
    ("capability", "arch"),
    list(zip([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], device.ARCHS, strict=True)),
)
def test_capability_to_arch(capability: tuple[int, int], arch: str) -> None:
    assert device.arch_of_capability(*capability) == arch


@pytest.mark.parametrize("capability", [(8, 7), (8, 8), (10, 3), (11, 0), (12, 1), (13, 0)])
def test_capability_without_a_binary(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match="runs none of the binaries"):
        device.arch_of_capability(*capability)


def test_old_gpu_is_told_why() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Old Card has compute capability 7\.5, which is older"
    ):
        device.arch_of_capability(7, 5, "Old Card")


def test_old_nvrtc_is_told_apart(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def getSupportedArchs(self) -> tuple[int, ...]:
            return 80, 90

    monkeypatch.setattr(compiler, "_nvrtc", Old)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "12.0")
    with pytest.raises(CompileError, match=r"NVRTC 12\.0 does not know sm_100a"):
        compiler.compile_cubin(Program.read("tiny", jit.Config({"kScale": 3})), "sm_100a")


# --- imports ---


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_jit_imports_no_cupy() -> None:
    modules = "cupyattn.jit, cupyattn.core.device, cupyattn.cli"
    code = f"import sys, {modules}; print('cupy' in sys.modules, "
    assert _python(code + "'cupy_backends' in sys.modules)") == "False False\n"


def test_without_cupy_the_error_says_what_to_install(root: Path) -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
from cupyattn import errors, jit
from cupyattn.core import device
for call in (lambda: jit.build("tiny", {"kScale": 3}, "sm_80"), lambda: device.device_props(0)):
    try:
        call()
    except errors.DeviceError as error:
        print("cupyattn[cuda13x]" in str(error))
"""
    assert _python(code) == "True\nTrue\n"


def test_device_error_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime

    def no_driver() -> int:
        raise runtime.CUDARuntimeError(35)

    monkeypatch.setattr(runtime, "getDeviceCount", no_driver)
    with pytest.raises(DeviceError, match="no usable GPU"):
        device.device_props.__wrapped__(0)

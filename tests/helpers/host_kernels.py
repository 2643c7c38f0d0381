"""Kernels without barriers or warp functions, built for the host and run thread by thread.

Their own sources, with the launcher's Config; only what names CUDA is replaced. So what a GPU would
do with the arrays of a call is seen without one, under whatever poison surrounds them.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupyattn import jit
from cupyattn.jit.source import Program

# The twin of ptx/convert.cuh: what these kernels take from it.
_CONVERT = """#pragma once
#include "cupyattn/common/types.cuh"
namespace cupyattn::ptx {
inline float half_to_float(uint32_t bits) {
  const uint16_t low = bits;
  _Float16 x;
  __builtin_memcpy(&x, &low, 2);
  return x;
}
template <typename T> uint32_t pack_pair(float low, float high);  // no kernel here uses it
template <typename T> void unpack_pair(uint32_t pair, float& low, float& high);
template <> inline void unpack_pair<half_t>(uint32_t pair, float& low, float& high) {
  low = half_to_float(pair), high = half_to_float(pair >> 16);
}
template <> inline void unpack_pair<bfloat16_t>(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
}
}
"""
PRELUDE = """
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, gridDim;
struct float4 { float x, y, z, w; };
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)
template <typename To, typename From>
static To bits_of(From x) { To y; __builtin_memcpy(&y, &x, sizeof y); return y; }
static unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_of<float>(x); }
static float __fdiv_rn(float a, float b) { return a / b; }
static unsigned atomicAdd(unsigned* p, unsigned x) { *p += x; return *p - x; }
static unsigned atomicInc(unsigned*, unsigned) { return 0; }
static unsigned atomicOr(unsigned*, unsigned) { return 0; }
static void __threadfence() {}
template <typename T> static T __ldcg(const T* p) { return *p; }
static unsigned __funnelshift_r(unsigned, unsigned, unsigned) { return 0; }
"""
_DRIVER = """
template <typename P>
static void run(void (*kernel)(P), const void* params, unsigned threads) {
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
        kernel(*static_cast<const P*>(params));
}
extern "C" void launch(const void* params, unsigned x, unsigned y, unsigned threads) {
  gridDim = {x, y, 1};
  run(SYMBOL, params, threads);
}
"""


def build(source: str) -> ctypes.CDLL:
    """A library of C++ that may include the kernels' headers; skips the test without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cupyattn/ptx").mkdir(parents=True)
        (folder / "cupyattn/ptx/convert.cuh").write_text(_CONVERT)
        (folder / "host.cpp").write_text(source)
        command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
        # The twins come first.
        command += ["-I", name, "-I", str(jit.kernels_dir()), "-o", f"{name}/host.so"]
        done = subprocess.run([*command, f"{name}/host.cpp"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(f"{name}/host.so")


@functools.cache
def _kernel(name: str, config: jit.Config) -> Any:
    program = Program.read(name, config)
    return build(PRELUDE + program.text + _DRIVER.replace("SYMBOL", program.symbol)).launch


def load(name: str, config: jit.Config, *_: Any) -> SimpleNamespace:
    """In the place of jit.load."""
    return SimpleNamespace(function=_kernel(name, config))


def launch_kernel(function: Any, *rest: int) -> None:
    """In the place of the driver's."""
    x, y, z, threads, _, _, _, _, arguments, _ = rest
    assert z == 1
    params = ctypes.c_uint64.from_address(arguments).value
    function(ctypes.c_void_p(params), x, y, threads)

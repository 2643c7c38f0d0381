"""A kernels folder of a few lines, so that tests of the JIT compile in milliseconds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from cupyattn import jit
from cupyattn.core import folders
from cupyattn.jit import cache, module, store

FILES = {
    "cupyattn/common/types.cuh": """\
#pragma once
namespace cupyattn {
struct half_t { unsigned short bits; };
struct bfloat16_t { unsigned short bits; };
}
""",
    "cupyattn/tiny/scale.cuh": """\
#pragma once
#include "nested/add.cuh"
__device__ inline float scaled(float x, int factor) { return plus_zero(x) * factor; }
""",
    "cupyattn/tiny/nested/add.cuh": """\
#pragma once
__device__ inline float plus_zero(float x) { return x + 0.0f; }
""",
    # out[i] = i * kScale, through dynamic shared memory of blockDim.x floats.
    "entry/tiny.cu": """\
#include "cupyattn/tiny/scale.cuh"

#ifndef CUPYATTN_CONFIG
struct Config { static constexpr int kScale = 1; };
#endif

extern "C" __global__ void cupyattn_tiny(float* out, int n) {
  extern __shared__ float staged[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  staged[threadIdx.x] = scaled(float(i), Config::kScale);
  __syncthreads();
  if (i < n) out[i] = staged[threadIdx.x];
}
""",
    "entry/broken.cu": """\
extern "C" __global__ void cupyattn_broken(float* out) { out[0] = undeclared; }
""",
    # 1024 threads leave 64 registers each, for 256 values all loaded before any is used.
    "entry/spilling.cu": """\
extern "C" __global__ void __launch_bounds__(1024) cupyattn_spilling(volatile float* x) {
  float held[256];
#pragma unroll
  for (int i = 0; i < 256; ++i) held[i] = x[i];
#pragma unroll
  for (int i = 0; i < 256; ++i) x[i] = held[255 - i] * held[i];
}
""",
    # Half a minute for the compiler.
    "entry/slow.cu": """\
extern "C" __global__ void cupyattn_slow(volatile float* x) {
  float held[256];
#pragma unroll
  for (int i = 0; i < 256; ++i) held[i] = x[i];
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 256; ++i)
      held[i] = held[(i * 7 + j) % 256] * held[i] + x[held[i] > 0 ? i : j];
#pragma unroll
  for (int i = 0; i < 256; ++i) x[i] = held[i];
}
""",
    # No register can be named by a number that only the run knows.
    "entry/indexing.cu": """\
extern "C" __global__ void cupyattn_indexing(volatile float* x, const int* index) {
  float held[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) held[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = held[index[i]];
}
""",
}


def write(root: Path) -> Path:
    """Write the folder's files below `root`; returns `root`."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def sandbox(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder's files, an empty cache and an empty temporary folder, all in use below `root`."""
    write(root / "kernels")
    (root / "tmp").mkdir()
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(root / "kernels"))
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(root / "cache"))
    monkeypatch.setenv("TMPDIR", str(root / "tmp"))
    monkeypatch.delenv("CUPYATTN_NO_COMPILE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("_swept", "_said"):
        monkeypatch.setattr(cache, name, set())
    monkeypatch.setattr(module, "_reported", set())
    monkeypatch.setattr(module, "_kernels", {})
    folders._process_folder.cache_clear()
    return root


def build(scale: int = 3) -> jit.Build:
    return jit.build("tiny", {"kScale": scale}, "sm_80")


def leftovers(folder: Path) -> list[str]:
    """What compiles have left in the cache `folder` besides kernels."""
    return sorted(path.name for path in (folder / store.WORK).iterdir())

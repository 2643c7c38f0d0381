// CUDA C++ as the system's compiler may read it: included ahead of an entry file, which is built
// unchanged. Warp and block operations are not here but in the twins of ptx/*.cuh beside this.
#pragma once

#include <math.h>
#include <string.h>

#include <source_location>

#define __global__
#define __device__
#define __host__
// Each copy of a function would be compiled again: a kernel in pieces takes a third of the time.
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// For the twins, whose callers are the places that messages name.
#define EMULATOR_INLINE inline __attribute__((always_inline))
// All fibers run on one system thread, so thread-local storage is one block's shared memory: it has
// static storage in a function without `static`, may be declared `extern`, and lies in one segment.
#define __shared__ thread_local

struct uint3 {
  unsigned int x, y, z;
};
struct float2 {
  float x, y;
} __align__(8);
struct float4 {
  float x, y, z, w;
} __align__(16);
inline float2 make_float2(float x, float y) { return float2{x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }

// Set by the scheduler whenever it switches to a thread.
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned int bits) { return __builtin_bit_cast(float, bits); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline unsigned int __float_as_uint(float value) { return __builtin_bit_cast(unsigned int, value); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

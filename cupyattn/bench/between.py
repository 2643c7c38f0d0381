"""What lies between two samples in a model: the code of other kernels, and a GPU that is not idle.

Kernels of straight code displace what instruction caches hold; they touch no data. A last small one
keeps the GPU busy while the host enqueues the call that is timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.cupy_module import cupy_module

NUM_KERNELS = 8
# Four chains, so that the fetch of instructions and not their latency is what takes the time.
_STEPS = 440
_CHAINS = "abcd"
CODE_BYTES = NUM_KERNELS * _STEPS * len(_CHAINS) * 16  # at 16 bytes an instruction
_THREADS = 128

_SOURCE = """
#define STEP %(step)s
#define STEPS_10 STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP
#define KERNEL(name, salt)                                                                        \\
    extern "C" __global__ void name(float* never, float x) {                                      \\
        float a = x, b = x + salt, c = x - salt, d = x * salt;                                    \\
        %(steps)s                                                                                 \\
        if (a + b + c + d == 12345.678f && x > 3.0e38f) *never = a;                               \\
    }
%(kernels)s
extern "C" __global__ void hold(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %%0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %%0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


def source() -> str:
    """CUDA C++ of the kernels: code_0 to code_7 and hold."""
    step = " ".join(f"{n} = fmaf({n}, x, {m});" for n, m in zip(_CHAINS, "bcda", strict=True))
    kernels = "\n".join(f"KERNEL(code_{n}, {n + 1}.5f)" for n in range(NUM_KERNELS))
    steps = " ".join(["STEPS_10"] * (_STEPS // 10))
    return _SOURCE % {"step": step, "steps": steps, "kernels": kernels}


class Between:
    """The kernels, compiled for the current device. They go to a stream of CuPy's."""

    def __init__(self) -> None:
        cupy = cupy_module()
        module = cupy.RawModule(code=source())
        self._codes = [module.get_function(f"code_{n}") for n in range(NUM_KERNELS)]
        self._hold = module.get_function("hold")
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self._blocks = int(properties["multiProcessorCount"])

    def run_code(self, stream: Any) -> None:
        """Enqueue all kernels of straight code, each on every multiprocessor."""
        with stream:
            for code in self._codes:
                code((self._blocks,), (_THREADS,), (np.uint64(0), np.float32(1.0)))

    def hold(self, us: float, stream: Any) -> None:
        """Keep the GPU busy for so many microseconds."""
        with stream:
            self._hold((1,), (1,), (np.uint64(us * 1e3),))

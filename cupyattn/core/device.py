"""The facts of a GPU: its architecture, and the limits that planners divide by."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError, DeviceError, UnsupportedError
from .cupy_module import cupy_module

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""Every architecture kernels are built for, as NVRTC spells it."""

# An "a" cubin runs on exactly its own capability, so 10.3 and 12.1 have no entry; the others run on
# a higher minor too, but not across the desktop/Tegra divide, so neither do 8.7 and 8.8.
_ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120a",
}


@dataclass(frozen=True, slots=True)
class DeviceProps:
    """One GPU. Sizes are bytes; `max_smem_per_block` is the opt-in limit of one thread block.

    memory_rate  of its memory, in GB/s, and `sm_clock`, the highest of its SMs, in MHz; 0 where the
                 driver does not say
    """

    index: int
    name: str
    arch: str
    num_sms: int
    max_smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    memory_rate: float = 0.0
    sm_clock: float = 0.0


NO_GPU = DeviceProps(
    index=-1,
    name="no GPU",
    arch="sm_90a",
    num_sms=132,
    max_smem_per_block=227 << 10,
    smem_per_sm=228 << 10,
    l2_bytes=50 << 20,
    memory_rate=3352.0,
    sm_clock=1980.0,
)
"""What plans on the CPU are sized for, an H100, so that a workspace which is too small there is too
small here. Nothing is compiled for it and nothing launched."""

# Kibibytes of shared memory that an SM has, and that a block of it may have.
_SHARED_KIB = {
    "sm_80": (164, 163),
    "sm_86": (100, 99),
    "sm_89": (100, 99),
    "sm_90a": (228, 227),
    "sm_100a": (228, 227),
    "sm_120a": (100, 99),
}
# Cards that plans are made for without being here, by index from -2 on downwards.
_imagined: list[DeviceProps] = []


def is_here(index: int) -> bool:
    """Whether a device is one of this machine's, so that kernels are loaded and launched on it."""
    return index >= 0


def imagine(props: DeviceProps) -> int:
    """The index of a GPU of these properties, but for theirs, on which calls can be planned only.

    `max_smem_per_block` and `smem_per_sm` of 0 are filled in by the architecture.
    """
    smem_per_sm, smem_per_block = (x << 10 for x in _SHARED_KIB[props.arch])
    props = replace(
        props,
        index=-2 - len(_imagined),
        smem_per_sm=props.smem_per_sm or smem_per_sm,
        max_smem_per_block=props.max_smem_per_block or smem_per_block,
    )
    for known in _imagined:
        if replace(known, index=props.index) == props:
            return known.index
    _imagined.append(props)
    return props.index


def overlaps_launches(arch: str) -> bool:
    """Whether a launch may begin while the one before it is running."""
    return int(arch.removeprefix("sm_").rstrip("a")) >= 90


def check_arch(arch: str) -> str:
    """`arch` itself if kernels are built for it; UnsupportedError if not."""
    if arch not in ARCHS:
        near = f"; did you mean {arch}a?" if f"{arch}a" in ARCHS else ""
        raise UnsupportedError(
            f"arch: no kernels are built for {arch!r}; wanted one of {', '.join(ARCHS)}{near}"
        )
    return arch


def arch_of_capability(major: int, minor: int, label: str = "the GPU") -> str:
    """The architecture whose cubins run on compute capability `major.minor`.

    `label` names the device in the message. Raises UnsupportedError if no cubin we build runs.
    """
    arch = _ARCH_OF_CAPABILITY.get((major, minor))
    if arch is not None:
        return arch
    have = ", ".join(f"{a}.{b}" for a, b in _ARCH_OF_CAPABILITY)
    if (major, minor) < (8, 0):
        reason = "is older than 8.0 (Ampere), the oldest with the instructions the kernels use"
    else:
        reason = "runs none of the binaries that are built"
    raise UnsupportedError(
        f"device: {label} has compute capability {major}.{minor}, which {reason}; supported are "
        f"{have}. Arrays on the CPU are served by the reference on any machine"
    )


@functools.cache
def device_props(index: int) -> DeviceProps:
    """The properties of CUDA device `index`, asked of the driver once per process; NO_GPU for -1,
    and what `imagine` was told for indices below.

    Raises DeviceError if CuPy or the driver is missing, ArgumentError if there is no such device,
    UnsupportedError if no kernels are built for it.
    """
    if index == NO_GPU.index:
        return NO_GPU
    if index < NO_GPU.index:
        if -2 - index >= len(_imagined):
            raise ArgumentError(f"device: got index {index}; wanted that of a GPU, 0 or more")
        return _imagined[-2 - index]
    runtime = cupy_module().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"device: the CUDA driver reports no usable GPU ({error})") from error
    if not 0 <= index < count:
        raise ArgumentError(f"device: got index {index}, and this machine has {count} GPU(s)")
    raw = runtime.getDeviceProperties(index)
    name = raw["name"].decode()
    return DeviceProps(
        index=index,
        name=name,
        arch=arch_of_capability(raw["major"], raw["minor"], f"GPU {index} ({name})"),
        num_sms=raw["multiProcessorCount"],
        max_smem_per_block=raw["sharedMemPerBlockOptin"],
        smem_per_sm=raw["sharedMemPerMultiprocessor"],
        l2_bytes=raw["l2CacheSize"],
        memory_rate=_memory_rate(runtime, index),
        sm_clock=_attribute(runtime, index, "cudaDevAttrClockRate") / 1e3,
    )


def _memory_rate(runtime: Any, index: int) -> float:
    """In GB/s: both edges of the memory's clock carry the width of its bus."""
    clock = _attribute(runtime, index, "cudaDevAttrMemoryClockRate")  # in kHz
    bits = _attribute(runtime, index, "cudaDevAttrGlobalMemoryBusWidth")
    return 2 * clock * 1e3 * bits / 8 / 1e9


def _attribute(runtime: Any, index: int, name: str) -> int:
    """An attribute of a device; 0 where this runtime or driver has no such one."""
    try:
        value: int = runtime.deviceGetAttribute(getattr(runtime, name), index)
    except (AttributeError, runtime.CUDARuntimeError):
        return 0
    return value

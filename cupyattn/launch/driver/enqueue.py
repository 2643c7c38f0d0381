"""The launch call itself."""

from __future__ import annotations

import ctypes
import functools
import os
from types import SimpleNamespace
from typing import Any, NamedTuple

from ... import array, jit
from ...core import env, recording
from ...core.device import device_props, is_here
from .params import LaunchBuffer, this_thread
from .pdl import launch_clusters, launch_early

# The limit of a grid's second and third dimension.
MAX_GRID_YZ = 65_535


@functools.cache
def cuda() -> SimpleNamespace:
    """What a launch needs of CuPy, and whether to debug, looked up at the first launch only."""
    from cupy.cuda import Device, alloc, driver, runtime

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=array.refuse_gpus)
    return SimpleNamespace(
        Device=Device,
        alloc=alloc,
        get_device=runtime.getDevice,
        is_capturing=runtime.streamIsCapturing,
        is_debugging=env.DEBUG.flag(),
        is_idle=is_idle,
        launch_clusters=launch_clusters,
        launch_early=launch_early,
        launch_kernel=driver.launchKernel,
        runtime=runtime,
    )


def is_idle(stream: int) -> bool:
    """Whether a stream has done all that it was given."""
    # The runtime's call would leave its status for others to see as an error.
    return _stream_query()(stream) == 0


@functools.cache
def _stream_query() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuStreamQuery
    call.argtypes = [ctypes.c_void_p]
    return call


class Launch(NamedTuple):
    """A kernel's integer handle, and the shape of a launch of it.

    num_items     of persistent blocks
    is_dependent  on SMs that the launch before it leaves free (pdl.py)
    prologue      a launch with the same struct that comes first
    cluster       blocks of a cluster, along x (pdl.py)
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    num_items: int = 0
    is_dependent: bool = False
    prologue: Launch | None = None
    cluster: int = 1


def load_function(name: str, config: jit.Config, device_index: int, shared_bytes: int = 0) -> int:
    """The handle of a kernel, compiled on first use, with so much shared memory a block; 0 for
    a GPU that is not here, which nothing is launched on."""
    if not is_here(device_index):
        return 0
    kernel = jit.load(name, config, device_index, device_props(device_index).arch)
    kernel.set_shared_memory(shared_bytes)
    return kernel.function


def enqueue(launch: Launch, arguments: LaunchBuffer, device_index: int, stream: int) -> None:
    """Launch a grid with the struct in `arguments` on a raw stream."""
    api = cuda()
    # The driver launches in the thread's current context, which a new thread does not have and
    # which may belong to another GPU.
    if api.get_device() != device_index:
        with api.Device(device_index):
            enqueue(launch, arguments, device_index, stream)
        return
    if not arguments.has_context:
        api.runtime.setDevice(device_index)
        arguments.has_context = True
    function, (x, y, z), threads, shared_bytes, _, is_dependent, prologue, cluster = launch
    if prologue is not None:
        enqueue(prologue, arguments, device_index, stream)
    if recording.current is not None:
        recording.add_launch(launch._replace(prologue=None), arguments.struct())
    if cluster > 1:
        api.launch_clusters(
            function,
            x,
            y,
            z,
            threads,
            1,
            1,
            shared_bytes,
            stream,
            arguments.address,
            0,
            cluster,
            is_dependent,
        )
    else:
        call = api.launch_early if is_dependent else api.launch_kernel
        call(function, x, y, z, threads, 1, 1, shared_bytes, stream, arguments.address, 0)
    if api.is_debugging:
        api.runtime.streamSynchronize(stream)


def enqueue_again(built: recording.Recording, device_index: int, stream: int) -> None:
    """Make the launches of a recording that is whole, on a raw stream."""
    arguments = this_thread.launch_buffer
    for launch, struct in built.launches:
        arguments.write(struct)
        enqueue(launch, arguments, device_index, stream)

"""The launch call itself."""

from __future__ import annotations

from .. import env
from .params import LaunchBuffer


def enqueue(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: LaunchBuffer,
    device_index: int,
    stream: int,
) -> None:
    """Launch a grid with the struct in `arguments` on a raw stream."""
    from cupy.cuda import driver, runtime

    # The driver launches in the thread's current context, which a new thread does not have and
    # which may belong to another GPU.
    if runtime.getDevice() != device_index:
        from cupy.cuda import Device

        with Device(device_index):
            _launch(driver, function, grid, threads, shared_bytes, arguments, stream)
    else:
        if not arguments.has_context:
            runtime.setDevice(device_index)
            arguments.has_context = True
        _launch(driver, function, grid, threads, shared_bytes, arguments, stream)
    if env.DEBUG.flag():
        runtime.streamSynchronize(stream)


def _launch(driver, function, grid, threads, shared_bytes, arguments, stream) -> None:  # type: ignore[no-untyped-def]
    driver.launchKernel(
        function, *grid, threads, 1, 1, shared_bytes, stream, arguments.address, 0
    )

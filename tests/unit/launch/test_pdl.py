"""Launches that begin beside the one before: which they are, and what the driver is told."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from cupyattn.errors import DeviceError
from cupyattn.launch.attention.bound_run import in_order
from cupyattn.launch.driver import enqueue, params, pdl
from cupyattn.launch.driver.enqueue import Launch


def launch(name: int, **options: Any) -> Launch:
    return Launch(name, (3, 2, 1), 128, 1000, **options)


def test_what_follows_persistent_blocks_begins_beside_them() -> None:
    maps: Any = object()
    merge = launch(9, is_dependent=True)
    steps = in_order([(launch(1), b"", maps), (launch(2), b"", None)], [(merge, b"", None)])
    assert [(x.function, x.is_dependent) for x, *_ in steps] == [(1, False), (2, True), (9, True)]
    assert steps[0][2] is maps


def test_other_launches_follow_each_other() -> None:
    steps = in_order([(launch(1), b"", None), (launch(2), b"", None)], [])
    assert [x.is_dependent for x, *_ in steps] == [False, False]


@pytest.mark.parametrize("is_dependent", [True, False])
def test_the_launch_says_how_it_begins(is_dependent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    api = SimpleNamespace(
        get_device=lambda: 0,
        is_debugging=False,
        launch_clusters=lambda *a: calls.append(("clusters", a)),
        launch_early=lambda *a: calls.append(("early", a)),
        launch_kernel=lambda *a: calls.append(("kernel", a)),
        runtime=SimpleNamespace(setDevice=lambda index: None),
    )
    monkeypatch.setattr(enqueue, "cuda", lambda: api)
    arguments = params.LaunchBuffer()
    enqueue.enqueue(launch(7, is_dependent=is_dependent), arguments, 0, 55)
    wanted = 7, 3, 2, 1, 128, 1, 1, 1000, 55, arguments.address, 0
    assert calls == [("early" if is_dependent else "kernel", wanted)]
    enqueue.enqueue(launch(7, is_dependent=is_dependent, cluster=8), arguments, 0, 55)
    assert calls[1:] == [("clusters", (*wanted, 8, is_dependent))]


def test_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structs of cuda.h, field by field."""

    class Attribute(ctypes.Structure):
        _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))

    class Config(ctypes.Structure):
        _fields_ = (
            ("grid", ctypes.c_uint * 3),
            ("block", ctypes.c_uint * 3),
            ("shared", ctypes.c_uint),
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.POINTER(Attribute)),
            ("count", ctypes.c_uint),
        )

    seen: list[Any] = []

    def driver(config: int, function: int, arguments: int, extra: int) -> int:
        c = Config.from_address(config)
        first = c.attributes[0]
        seen.append((*c.grid, *c.block, c.shared, c.stream, c.count, first.id, *first.value[:2]))
        seen.append((function, arguments, extra))
        return len(seen) // 4

    monkeypatch.setattr(pdl, "_launch_kernel", lambda: driver)
    given = 11, 3, 2, 1, 128, 1, 1, 1000, 55, 77, 0
    pdl.launch_early(*given)
    assert seen == [(3, 2, 1, 128, 1, 1, 1000, 55, 1, 6, 1, 0), (11, 77, 0)]
    with pytest.raises(DeviceError, match=r"a launch of \(3, 2, 1\) blocks \(error 1\)"):
        pdl.launch_early(*given)


@pytest.mark.parametrize("is_dependent", [True, False])
def test_the_driver_is_told_of_clusters(
    is_dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, ...]] = []

    def driver(config: int, *_: int) -> int:
        count, begin = struct.unpack_from("<I", ctypes.string_at(config, 56), 48)[0], 0
        (begin,) = struct.unpack_from("<Q", ctypes.string_at(config, 56), 40)
        for place in range(count):
            attribute = ctypes.string_at(begin + 72 * place, 72)
            found.append(struct.unpack_from("<i 4x 3i", attribute))
        return 0

    monkeypatch.setattr(pdl, "_launch_kernel", lambda: driver)
    pdl.launch_clusters(11, 16, 2, 1, 128, 1, 1, 1000, 55, 77, 0, 8, is_dependent)
    early = [(6, 1, 0, 0)] if is_dependent else []
    assert found == [*early, (4, 8, 1, 1)]

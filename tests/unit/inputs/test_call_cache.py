"""The call cache itself: what later calls it takes for calls of equal signature, whichever way it
compares them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from helpers import fake_gpu

from cupyattn import array
from cupyattn.core import dtypes
from cupyattn.engine import call_cache
from cupyattn.engine.call_cache import Argument, CallCache

torch = pytest.importorskip("torch")
WAYS = "in C++", "by attributes"


@pytest.fixture(params=WAYS)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of calls with rows, an optional array, a table of any shape, and an output."""
    fake_gpu.forget()
    fake_gpu.maker("torch", monkeypatch)
    if request.param == "by attributes":
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    made: CallCache[str] = CallCache(
        Argument("rows", 0),
        Argument("scale"),
        Argument("other"),
        Argument("table", is_free=True),
        Argument("out", 0, is_output=True),
    )
    yield made
    call_cache._caches.remove(made)
    fake_gpu.forget()


def rows(n: int = 4, dtype: Any = torch.float32, columns: int = 6) -> Any:
    return torch.zeros(n, columns, dtype=dtype)


def low_rows(n: int, columns: int = 6) -> Any:
    """Rows at an address such as those of pools that the driver maps (cudaMallocAsync, XLA's)."""
    size, flags = 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.restype = ctypes.c_void_p
    map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for wanted in range(0x302000000, 0x402000000, 1 << 24):
        if map_at(wanted, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == wanted:
            memory = (ctypes.c_float * (n * columns)).from_address(wanted)
            return torch.frombuffer(memory, dtype=torch.float32).view(n, columns)
    pytest.skip("there is no memory at low addresses")


def insert(cache: CallCache[str], *arrays: Any) -> None:
    view = array.view(arrays[0], "rows")
    cache.insert(arrays, (), "checked", view, dtypes.float32, None, None)


def is_known(cache: CallCache[str], *arrays: Any) -> bool:
    """Thrice: a comparison of lengths is made on the way."""
    found = [cache.lookup(arrays, ()) for _ in range(3)]
    assert len({x is None for x in found}) == 1
    for answer in found:
        if answer is not None:
            call, addresses = answer
            given = [0 if x is None else x.data_ptr() for x in arrays]
            assert addresses[: len(given)] == given and not any(addresses[len(given) :])
            assert call.lengths[0] == arrays[0].shape[0]
            assert call.sizes[0] == 4 * arrays[0].stride(0) * (arrays[0].shape[0] - 1) + 24
    return found[0] is not None


SCALE, TABLE = torch.ones(3), torch.zeros(5, 7)


def test_other_addresses_and_lengths_are_the_same_call(cache: CallCache[str]) -> None:
    insert(cache, rows(), SCALE, None, TABLE, rows())
    for n in (4, 4, 4, 9, 4, 1):
        assert is_known(cache, rows(n), SCALE.clone(), None, torch.zeros(n, n + 1), rows(n))
    assert is_known(cache, rows(), SCALE, None, torch.zeros(9, 9)[:3, :3], rows())
    assert len(cache) == 1


def test_lengths_are_those_of_the_call(cache: CallCache[str]) -> None:
    insert(cache, rows(), SCALE, None, TABLE, rows())
    for n, table in ((4, TABLE), (4, TABLE), (2, torch.zeros(3, 2)), (4, torch.zeros(8, 9)[:, :7])):
        answer = cache.lookup((rows(n), SCALE, None, table, rows(n)), ())
        assert answer is not None
        call, _ = answer
        assert call.lengths == [n, 0, 0, table.shape[0], n]
        assert call.strides(3) == table.stride() and tuple(call.shapes[3]) == tuple(table.shape)
        last = sum((k - 1) * s for k, s in zip(table.shape, table.stride(), strict=True))
        assert call.sizes[3] == 4 * last + 4


def changed(name: str) -> list[Any]:
    x, out = rows(), rows()
    arrays: list[Any] = [x, SCALE, None, TABLE, out]
    if name == "dtype":
        arrays[0] = rows(dtype=torch.int32)
    elif name == "columns":
        arrays[0] = rows(columns=7)
    elif name == "strides":
        arrays[0] = rows(columns=12)[:, :6]
    elif name == "alignment":
        arrays[0] = torch.zeros(25)[1:].view(4, 6)
    elif name == "axes":
        arrays[0] = x.view(4, 2, 3)
    elif name == "gradient":
        x.requires_grad_()
    elif name == "sign":
        arrays[0] = torch._neg_view(x)
    elif name == "a parameter":
        arrays[1] = torch.nn.Parameter(SCALE.clone(), requires_grad=False)
    elif name == "another length of a scale":
        arrays[1] = torch.ones(4)
    elif name == "no scale":
        arrays[1] = None
    elif name == "the other array":
        arrays[1:3] = None, SCALE
    elif name == "one more":
        arrays[2] = SCALE
    elif name == "axes of a table":
        arrays[3] = TABLE[0]
    elif name == "fewer arrays":
        arrays.pop()
    elif name == "no memory":
        arrays[0] = torch.empty(4, 6, device="meta")
    return arrays


CHANGES = (
    *("dtype", "columns", "strides", "alignment", "axes", "gradient", "sign", "a parameter"),
    *("another length of a scale", "no scale", "the other array", "one more", "axes of a table"),
    *("fewer arrays", "no memory"),
)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("repeats", [0, 3])
def test_other_facts_are_other_calls(cache: CallCache[str], name: str, repeats: int) -> None:
    """Before and after calls were compared with lengths."""
    usual = rows(), SCALE, None, TABLE, rows()
    insert(cache, *usual)
    for _ in range(repeats):
        assert is_known(cache, *usual)
    given = changed(name)
    assert [cache.lookup(given, ()) for _ in range(3)] == [None] * 3
    assert is_known(cache, *usual)


def test_a_tensor_without_gradients_now_is_checked_again_with_them(cache: CallCache[str]) -> None:
    usual = rows(), SCALE, None, TABLE, rows()
    insert(cache, *usual)
    with torch.no_grad():
        assert is_known(cache, *usual)
    usual[0].requires_grad_()
    assert cache.lookup(usual, ()) is None


class Own(NamedTuple):
    """The options of a call as its caller gave them."""

    number: Any
    flag: Any = False


class Others(NamedTuple):
    """Those of another function, with equal fields."""

    number: Any
    flag: Any = False


def test_calls_of_two_functions_with_equal_options_are_two(cache: CallCache[str]) -> None:
    usual = rows(), SCALE, None, TABLE, rows()
    view = array.view(usual[0], "rows")
    cache.insert(usual, Own(1), "own", view, dtypes.float32, None, None)
    assert cache.lookup(usual, Own(1)) is not None
    for options in (Others(1), (1, False), Own(2), Own(True), Own([1])):
        assert cache.lookup(usual, options) is None
    cache.insert(usual, Others(1), "other", view, dtypes.float32, None, None)
    for options, checked in ((Own(1), "own"), (Others(1), "other")):
        answer = cache.lookup(usual, options)
        assert answer is not None and answer[0].call.checked == checked
    cache.clear()
    assert cache.lookup(usual, Own(1)) is None


def test_one_row_says_nothing_of_the_stride_of_several(cache: CallCache[str]) -> None:
    """Its stride passed no check, for it is contiguous whatever its stride is."""
    wide = torch.zeros(9, 16)[:, :6]
    insert(cache, wide[:1], SCALE, None, TABLE, rows(1))
    assert is_known(cache, wide[3:4], SCALE, None, TABLE, rows(1))
    for n in (4, 2):
        assert not is_known(cache, wide[:n], SCALE, None, TABLE, rows(n))
        assert not is_known(cache, wide[:n], SCALE, None, TABLE, rows(1))
        assert not is_known(cache, wide[:1], SCALE, None, TABLE, rows(n))
    assert is_known(cache, wide[:1], SCALE, None, TABLE, rows(1))


def test_several_rows_say_what_one_does(cache: CallCache[str]) -> None:
    insert(cache, rows(1), SCALE, None, TABLE, rows(1))
    insert(cache, rows(4), SCALE, None, TABLE, rows(4))
    for n in (1, 4, 1, 3):
        assert is_known(cache, rows(n), SCALE, None, TABLE, rows(n))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped as on Linux")
def test_memory_at_low_addresses_is_memory(cache: CallCache[str]) -> None:
    """Calls on it were never found, and made anew each time; freed memory still is none."""
    first = low_rows(4)
    assert 0 < first.data_ptr() < array.LOWEST_ADDRESS
    insert(cache, first, None, None, None, rows())
    assert is_known(cache, low_rows(4), None, None, None, rows())
    assert is_known(cache, rows(4), None, None, None, low_rows(4))
    freed = rows(8)
    parts = freed[:4], freed[4:]
    freed.untyped_storage().resize_(0)
    for gone in parts:
        assert cache.lookup((gone, None, None, None, low_rows(4)), ()) is None
        assert cache.lookup((low_rows(4), None, None, None, gone), ()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped as on Linux")
def test_memory_of_cupys_at_low_addresses_is_memory() -> None:
    cupy = pytest.importorskip("cupy")
    low = low_rows(4)
    memory = cupy.cuda.UnownedMemory(low.data_ptr(), 96, low, device_id=0)
    x = cupy.ndarray((4, 6), "float32", cupy.cuda.MemoryPointer(memory, 0))
    made: CallCache[str] = CallCache(Argument("rows", 0))
    made.insert((x,), (), "checked", array.view(x, "rows"), dtypes.float32, None, None)
    assert made.lookup((x,), ()) is not None
    call_cache._caches.remove(made)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_made_in_another_mode_of_torch_is_compared_in_that_one(
    cache: CallCache[str], mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is warmed up in one mode and runs in another, whose tensors torch tells apart."""
    insert(cache, rows(), None, None, rows(3))
    reads = []
    framework = call_cache._framework_by_type[torch.Tensor]

    def read(arrays: Any) -> Any:
        reads.append(len(arrays))
        return framework.read(arrays)

    monkeypatch.setitem(call_cache._framework_by_type, torch.Tensor, framework._replace(read=read))
    is_fast = torch._C._dynamo.guards.TensorGuards is not None
    for _ in range(3):
        with mode():
            for length in (4, 4, 4, 5, 6, 6, 6):
                found = cache.lookup((rows(length), None, None, rows(3)), ())
                assert found is not None and found[0].lengths[0] == length
            reads.clear()
            for length in (6, 7, 8, 8, 8, 9):
                assert cache.lookup((rows(length), None, None, rows(3)), ())
            assert len(reads) == (0 if is_fast else 6)
        assert cache.lookup((rows(), None, None, rows(3)), ())


def test_modes_that_change_from_call_to_call(cache: CallCache[str]) -> None:
    """Making comparisons anew would take longer than to do without."""
    insert(cache, rows(), None, None, rows(3))
    for _ in range(2 * call_cache._MAX_RENEWED):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found = cache.lookup((rows(), None, None, rows(3)), ())
                assert found is not None
    assert found[0].call.num_renewed <= call_cache._MAX_RENEWED

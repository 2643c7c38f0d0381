"""The capsule reader against producers built by hand: versions, ownership, refusals."""

from __future__ import annotations

import ctypes
import gc
import itertools

import numpy as np
import pytest

from cupyattn.array import CPU, as_numpy, dlpack, empty, from_numpy, view, views
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError, DeviceError

_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)


class Producer:
    """Exports a NumPy array as a capsule whose every field a test can set.

    `deleted` counts calls of the deleter. The capsule has no destructor, so only a consumer calls.
    """

    def __init__(self, array: np.ndarray, *, version: tuple[int, int] | None = (1, 0), **fields):
        self.array, self.version, self.fields = array, version, fields
        self.deleted = 0
        self.requests: list[dict[str, object]] = []
        self.device = (fields.get("device_type", dlpack.CPU), 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **request: object) -> object:
        self.requests.append(request)
        if self.version is None and "max_version" in request:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.capsule = self._capsule()
        return self.capsule

    def _capsule(self) -> object:
        a = self.array
        row = dtypes.BY_NUMPY[a.dtype]
        extents = ctypes.c_int64 * a.ndim
        values = {
            "data": a.ctypes.data,
            "device_type": dlpack.CPU,
            "ndim": a.ndim,
            "code": row.code,
            "bits": row.bits,
            "lanes": 1,
            "shape": extents(*a.shape),
            "strides": extents(*(s // a.itemsize for s in a.strides)),
            **self.fields,
        }
        self.managed = dlpack._Unversioned() if self.version is None else dlpack._Versioned()
        for field, value in values.items():
            if field == "flags":
                self.managed.flags = value
            else:
                setattr(self.managed.tensor, field, value)
        self._deleter = dlpack._Deleter(self._delete)
        self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        if self.version is not None:
            self.managed.major, self.managed.minor = self.version
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return _new_capsule(ctypes.addressof(self.managed), name, None)

    def _delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1


def _array(dtype: str = "float32") -> np.ndarray:
    return np.arange(24).reshape(2, 3, 4).astype(dtypes.parse(dtype).numpy)


BOTH = pytest.mark.parametrize("version", [None, (1, 0), (1, 7)], ids=["0.x", "1.0", "1.7"])


@BOTH
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=repr)
def test_elements_of_every_dtype(version, dtype) -> None:
    a = _array(dtype.name)
    v = view(Producer(a, version=version), "q")
    assert (v.ptr, v.shape, v.strides) == (a.ctypes.data, (2, 3, 4), (12, 4, 1))
    assert (v.dtype, v.device, v.framework, v.readonly) == (dtype, CPU, "dlpack", False)
    assert as_numpy(v).tobytes() == a.tobytes()


@BOTH
def test_memory_lives_as_long_as_the_last_user(version) -> None:
    producer = Producer(_array(), version=version)
    v = view(producer, "q")
    used = b"used_dltensor" if version is None else b"used_dltensor_versioned"
    assert _get_name(producer.capsule) == used
    a = as_numpy(v)[1:]
    del v
    gc.collect()
    assert producer.deleted == 0
    assert a[0, 0, 0] == 12
    del a
    gc.collect()
    assert producer.deleted == 1


@BOTH
def test_a_refused_capsule_is_still_released(version) -> None:
    producer = Producer(_array(), version=version, bits=24)
    with pytest.raises(ArgumentError, match=r"q: dtype \(code 2, 24 bits, 1 lanes\)"):
        view(producer, "q")
    gc.collect()
    assert producer.deleted == 1


def test_a_missing_deleter_is_allowed() -> None:
    producer = Producer(_array())
    capsule = producer._capsule()
    producer.managed.deleter = None
    memory = dlpack.Memory(capsule)
    assert memory.shape == (2, 3, 4)
    del memory
    gc.collect()
    assert producer.deleted == 0


def test_versions_are_requested_and_fallen_back_from() -> None:
    new, old = Producer(_array()), Producer(_array(), version=None)
    view(new, "q")
    assert new.requests == [{"stream": None, "max_version": (1, 0)}]
    view(old, "q")
    assert old.requests == [{"stream": None, "max_version": (1, 0)}, {"stream": None}]


def test_a_newer_major_version_is_refused_and_released() -> None:
    producer = Producer(_array(), version=(2, 0))
    with pytest.raises(ArgumentError, match=r"q: Producer .*DLPack version 2\.0 is too new"):
        view(producer, "q")
    gc.collect()
    assert producer.deleted == 1


def test_a_capsule_serves_once() -> None:
    producer = Producer(_array())
    capsule = producer._capsule()
    memory = dlpack.Memory(capsule)
    with pytest.raises(BufferError, match="not an unused DLPack capsule"):
        dlpack.Memory(capsule)
    with pytest.raises(BufferError, match="not an unused DLPack capsule"):
        dlpack.Memory("no capsule at all")
    del memory
    gc.collect()
    assert producer.deleted == 1


def test_read_only_flag() -> None:
    v = view(Producer(_array(), flags=1), "q")
    assert v.readonly
    assert not as_numpy(v).flags.writeable
    assert not view(Producer(_array(), flags=2), "q").readonly  # "is a copy"


def test_absent_strides_mean_row_major() -> None:
    a = _array()
    v = view(Producer(a, version=None, strides=None), "q")
    assert v.strides == (12, 4, 1)
    for shape in itertools.product((0, 1, 3), repeat=3):
        a = np.zeros(shape, np.float32)
        v = view(Producer(a, version=None, strides=None), "q")
        assert v.strides == (shape[1] * shape[2], shape[2], 1)
    assert view(Producer(np.float32([7])[0:1].reshape(()), strides=None), "q").strides == ()


def test_byte_offset_and_strides_of_either_sign() -> None:
    a = _array()
    strides = (ctypes.c_int64 * 3)(12, -4, 1)
    v = view(Producer(a, byte_offset=2 * 4 * a.itemsize, strides=strides), "q")
    np.testing.assert_array_equal(as_numpy(v), a[:, ::-1])


def test_null_data_of_an_empty_array() -> None:
    v = view(Producer(np.zeros((0, 4), np.float32), data=None), "q")
    assert (v.ptr, v.shape) == (0, (0, 4))


def test_pinned_host_memory_is_cpu_memory() -> None:
    assert view(Producer(_array(), device_type=dlpack.CUDA_HOST), "q").device == CPU


@pytest.mark.parametrize(
    ("producer", "sentence"),
    [
        (lambda: Producer(_array(), device_type=10), "q: is on DLPack device type 10; move it"),
        (lambda: Producer(_array(), lanes=4), "q: dtype"),
        (lambda: Producer(_array(), code=5), r"q: dtype \(code 5, 32 bits, 1 lanes\)"),
        (lambda: Producer(_array(), byte_offset=2), "q: its address or strides are not multiples"),
    ],
)
def test_refusals(producer, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        view(producer(), "q")


def test_a_producer_that_refuses_is_quoted() -> None:
    class Refusing(Producer):
        def __dlpack__(self, **request: object) -> object:
            raise BufferError("the buffer went away")

    with pytest.raises(ArgumentError, match=r"q: Refusing .*: the buffer went away; pass"):
        view(Refusing(_array()), "q")

    class Deviceless:
        def __dlpack__(self, **request: object) -> object:
            raise AssertionError("asked for memory of an unknown device")

    with pytest.raises(ArgumentError, match=r"q: Deviceless .*__dlpack_device__"):
        view(Deviceless(), "q")


def test_answers_for_unknown_frameworks_are_numpy() -> None:
    v = view(Producer(_array()), "q")
    out = empty((2, 5), dtypes.bfloat16, v)
    assert isinstance(out, np.ndarray)
    assert (out.shape, out.dtype) == ((2, 5), dtypes.bfloat16.numpy)
    assert from_numpy(out, v) is out


@pytest.mark.parametrize(
    "answer",
    [
        *(
            None,
            7,
            (2,),
            (1, 2, 3),
            "cpu",
            ("a", "b"),
            (1.5, 0),
            (None, None),
            (10**30, 0),
            (13, 0),
        ),
        *((dlpack.CUDA, index) for index in (-1, 64, 10**30, "a")),
    ],
    ids=str,
)
def test_a_device_that_is_none(answer: object) -> None:
    producer = Producer(np.zeros(3, np.float32))
    producer.device = answer  # type: ignore[assignment]
    # Managed memory of a device is looked up by the driver, where there is one.
    wrong = (ArgumentError, DeviceError) if answer == (13, 0) else ArgumentError
    with pytest.raises(wrong, match=r"^x: "):
        view(producer, "x")


def test_a_gpu_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> int:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(views, "cupy_stream", refuse)
    producer = Producer(np.zeros(3, np.float32))
    producer.device = dlpack.CUDA, 5
    with pytest.raises(
        DeviceError, match=r"x: is on CUDA device 5, which cannot be used \(invalid"
    ):
        view(producer, "x")

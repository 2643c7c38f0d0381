"""The array layer on the CPU: reading, refusing, answering, comparing, for every framework.

CuPy arrays need a GPU to compute but not to be described: the CuPy tests here lay them over host
memory, which nothing dereferences. What needs a device is in tests/gpu/test_array_gpu.py.
"""

from __future__ import annotations

import gc
import re
import weakref
from types import SimpleNamespace

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from cupyattn import array
from cupyattn.array import CPU, ArrayView, Device, as_numpy, same_device, view, views
from cupyattn.array.match import require_output
from cupyattn.core import dtypes
from cupyattn.core.dtypes import DType
from cupyattn.errors import ArgumentError

FRAMEWORKS = ("numpy", "torch", "jax")
ROWS = pytest.mark.parametrize("row", dtypes.ALL, ids=repr)


def _make(framework: str, a: np.ndarray):
    """An array of `framework` with a's elements, made by the framework's own functions."""
    if framework == "numpy":
        return a
    if framework == "torch":
        torch = pytest.importorskip("torch")
        wide = a.astype(np.int64 if a.dtype.kind in "biu" else np.float64)
        return torch.tensor(wide).to(getattr(torch, a.dtype.name))
    jnp = pytest.importorskip("jax.numpy")
    if a.dtype in (np.int64, np.uint64):
        pytest.skip("JAX has no 64-bit integers unless it is enabled for the whole process")
    return jnp.asarray(a.copy())


def _host_cupy(a: np.ndarray, device: int = 0, strides: tuple[int, ...] | None = None):
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(a.ctypes.data, a.nbytes, a, device)
    return cupy.ndarray(a.shape, a.dtype, cupy.cuda.MemoryPointer(memory, 0), strides or a.strides)


def _values(row: DType, shape: tuple[int, ...] = (2, 3, 4)) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 7).reshape(shape).astype(row.numpy)


# --- reading ---


@ROWS
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_and_dtype(framework: str, row: DType) -> None:
    a = _values(row)
    x = _make(framework, a)
    v = view(x, "q")
    assert (tuple(v.shape), v.strides, v.dtype) == ((2, 3, 4), (12, 4, 1), row)
    assert (v.device, v.framework, v.owner) == (CPU, framework, v.owner)
    assert v.owner is x
    assert v.readonly == (framework == "jax")
    pointer = {"numpy": lambda: x.ctypes.data, "torch": lambda: x.data_ptr()}
    assert v.ptr == pointer.get(framework, lambda: x.unsafe_buffer_pointer())()
    got = as_numpy(v)
    assert (got.dtype, got.tobytes()) == (row.numpy, a.tobytes())
    assert got.flags.writeable == (not v.readonly)


@ROWS
def test_cupy_arrays(row: DType) -> None:
    a = _values(row)
    v = view(_host_cupy(a, device=3), "q")
    assert (v.ptr, v.shape, v.strides, v.dtype) == (a.ctypes.data, (2, 3, 4), (12, 4, 1), row)
    assert (v.device, v.framework, v.readonly) == (Device("cuda", 3), "cupy", False)
    assert str(v.device) == "cuda:3"
    w = view(_host_cupy(a)[1:, ::-1, ::2], "q")
    assert w.ptr == a[1:, ::-1].ctypes.data
    assert (w.shape, w.strides) == ((1, 3, 2), (12, -4, 2))


SLICES = (
    lambda x: x[1:, :, ::2],
    lambda x: x[:, 1:2].transpose(0, 2),
    lambda x: x[0, :0],
    lambda x: x[1, 2, 3],
    lambda x: x[:, None, 1],
    lambda x: x[:, :, :1].expand(2, 3, 5),
)


@pytest.mark.parametrize("cut", SLICES, ids=range(len(SLICES)))
@pytest.mark.parametrize("row", [dtypes.bfloat16, dtypes.float8_e5m2, dtypes.int32], ids=repr)
def test_torch_strides(cut, row: DType) -> None:
    x = cut(_make("torch", _values(row)))
    v = view(x, "k")
    assert (tuple(v.shape), v.strides) == (tuple(x.shape), x.stride())
    assert as_numpy(v).astype(np.float64).tolist() == x.double().tolist()


@given(st.data())
def test_numpy_strides(data) -> None:
    row = data.draw(st.sampled_from(dtypes.ALL))
    base = _values(row, data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
    indices = hnp.basic_indices(base.shape, allow_newaxis=True, allow_ellipsis=True)
    x = np.asarray(base[data.draw(indices)])
    x = x.transpose(data.draw(st.permutations(range(x.ndim))))
    v = view(x, "q")
    assert tuple(s * x.itemsize for s in v.strides) == x.strides
    # Through the pointer, not through the owner that as_numpy would return.
    v.framework = "dlpack"
    assert as_numpy(v).tobytes() == x.tobytes()
    if x.size:
        assert v.ptr == x.ctypes.data


def test_jax_layouts_keep_their_strides() -> None:
    jnp = pytest.importorskip("jax.numpy")
    layout = pytest.importorskip("jax.experimental.layout")
    jax = pytest.importorskip("jax")
    x = jnp.arange(12.0).reshape(3, 4)
    x = jax.device_put(x, layout.Format(layout.Layout((1, 0)), x.sharding))
    v = view(x, "q")
    assert v.strides == (1, 3)
    np.testing.assert_array_equal(as_numpy(v), np.asarray(x))


def test_read_only_and_subclassed_numpy(tmp_path) -> None:
    a = np.zeros(3, np.float32)
    a.flags.writeable = False
    assert view(a, "q").readonly
    assert view(np.broadcast_to(np.float32(1), (2, 3)), "q").strides == (0, 0)
    mapped = np.memmap(tmp_path / "weights", np.float32, "w+", shape=(2, 2))
    assert type(as_numpy(view(mapped, "q"))) is np.ndarray
    with pytest.raises(ArgumentError, match=r"q: a masked array .* pass q.filled\(\)"):
        view(np.ma.masked_array(np.zeros(3, np.float32), [0, 1, 0]), "q")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numpy_results_keep_the_memory_alive(framework: str) -> None:
    x = _make(framework, _values(dtypes.float32, (64, 1024)))
    expected = np.array(as_numpy(view(x, "q")))
    got = as_numpy(view(x, "q"))[3:]
    del x
    gc.collect()
    np.testing.assert_array_equal(got, expected[3:])


def test_a_view_holds_its_owner_and_nothing_else_does() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(4)
    alive = weakref.ref(x)
    v = view(x, "q")
    del x
    gc.collect()
    assert alive() is not None
    del v
    gc.collect()
    assert alive() is None


def test_torch_inference_and_parameters() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"q: requires grad.* pass q.detach\(\)"):
        view(weight, "q")
    with torch.no_grad():
        assert view(weight, "q").ptr == weight.data_ptr()
    with torch.inference_mode():
        assert view(weight * 1, "q").framework == "torch"
    assert view(weight.detach(), "q").ptr == weight.data_ptr()
    assert view(torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})), "q").shape == (2,)
    assert view(torch.zeros(0, 4), "q").ptr == 0


# --- refusals ---


def _freed(torch, first_row: int):
    x = torch.zeros(4, 5)
    cut = x[first_row:]
    x.untyped_storage().resize_(0)
    return cut


def _fake(torch):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.zeros(2)


TORCH_REFUSALS = {
    "sparse": (lambda t: t.eye(3).to_sparse(), r"layout is sparse_coo; .* q.to_dense\(\)"),
    "mkldnn": (lambda t: t.zeros(3, 3).to_mkldnn(), "layout is _mkldnn"),
    "nested": (lambda t: t.nested.nested_tensor([t.zeros(2), t.zeros(3)]), "layout is nested"),
    "meta": (lambda t: t.zeros(3, device="meta"), "is on torch device meta; move it to cpu"),
    "float64": (lambda t: t.zeros(3, dtype=t.float64), r"dtype torch\.float64 is not supported"),
    "complex": (lambda t: t.zeros(3, dtype=t.complex64).conj(), r"dtype torch\.complex64"),
    "negated": (lambda t: t.zeros(3, dtype=t.complex64).conj().imag, r"pass q.resolve_neg\(\)"),
    "freed": (lambda t: _freed(t, 0), "storage was freed"),
    "freed, with an offset": (lambda t: _freed(t, 2), "storage was freed"),
    "zero tensor": (lambda t: t._efficientzerotensor((3, 3)), "never allocated"),
    "fake": (_fake, "a FakeTensor has no plain memory"),
    "misaligned": (
        lambda t: t.frombuffer(bytearray(64), dtype=t.float32, count=4, offset=1),
        "not multiples of the item size, 4 bytes",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", TORCH_REFUSALS)
def test_torch_refusals(case: str) -> None:
    torch = pytest.importorskip("torch")
    make, sentence = TORCH_REFUSALS[case]
    with pytest.raises(ArgumentError, match=rf"^q: .*{sentence}"):
        view(make(torch), "q")


def test_torch_func_transforms_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match=r"q: the tensor has no memory .* torch\.func"):
        torch.vmap(lambda x: view(x, "q"))(torch.zeros(3, 4))


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_jax_tracers_are_refused(transform: str) -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ArgumentError, match=r"q: a JAX tracer .* cupyattn.integrations.jax"):
        getattr(jax, transform)(lambda x: view(x, "q"))(jax.numpy.zeros(3))


def test_jax_arrays_without_a_buffer_are_refused() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros(3)
    x.delete()
    with pytest.raises(ArgumentError, match="q: the JAX array was deleted or donated"):
        view(x, "q")
    with pytest.raises(ArgumentError, match="q: PRNGKeyArray could not be read through DLPack"):
        view(jax.random.key(0), "q")
    with pytest.raises(ArgumentError, match="q: dtype int16 is not supported; cast it"):
        view(jax.numpy.zeros(3, np.int16), "q")


def test_a_jax_view_outlives_deletion_of_the_array() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.arange(1000, dtype=np.float32)
    v = view(x, "q")
    x.delete()
    jnp.zeros(1000).block_until_ready()
    np.testing.assert_array_equal(as_numpy(v), np.arange(1000))


NUMPY_REFUSALS = {
    "float64": (lambda: np.zeros(3), "dtype float64 is not supported"),
    "other byte order": (lambda: np.zeros(3, ">f4"), "dtype >f4"),
    "structured": (lambda: np.zeros(3, [("a", "f4")]), "dtype "),
    "objects": (lambda: np.array([None]), "dtype object"),
    "another fp8": (lambda: np.zeros(3, ml_dtypes.float8_e4m3fnuz), "dtype float8_e4m3fnuz"),
    "odd address": (lambda: np.zeros(9, np.uint8)[1:].view(np.float32), "item size, 4 bytes"),
    "odd stride": (lambda: np.zeros(3, "f4,u1")["f0"], "item size, 4 bytes"),
}


@pytest.mark.parametrize("case", NUMPY_REFUSALS)
def test_numpy_refusals(case: str) -> None:
    make, sentence = NUMPY_REFUSALS[case]
    with pytest.raises(ArgumentError, match=rf"^q: .*{re.escape(sentence)}"):
        view(make(), "q")


@pytest.mark.parametrize("x", [None, 3, 1.5, "q", [1.0, 2.0], (1,), np.float32(1), np.ndarray, {}])
def test_what_is_no_array(x: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^q: got {type(x).__name__}, which is not an array"):
        view(x, "q")


def test_bytes_in_the_other_order() -> None:
    with pytest.raises(ArgumentError, match=r"q: dtype >f2 .* pass q.astype\('float16'\)"):
        view(np.zeros(3, ">f2"), "q")
    with pytest.raises(ArgumentError, match="q: dtype >f8 is not supported; cast it to"):
        view(np.zeros(3, ">f8"), "q")


def test_cupy_refusals() -> None:
    a = np.zeros(8, np.float32)
    with pytest.raises(ArgumentError, match="q: dtype float64"):
        view(_host_cupy(np.zeros(3)), "q")
    with pytest.raises(ArgumentError, match="q: its address or strides"):
        view(_host_cupy(a[:2], strides=(6,)), "q")
    # What a CuPy array looks like after `x.data.mem.free()`: the pointer stays, the memory is gone.
    data = SimpleNamespace(ptr=a.ctypes.data, mem=SimpleNamespace(ptr=0), device_id=0)
    freed = SimpleNamespace(dtype=a.dtype, data=data, shape=(8,), strides=(4,), size=8)
    with pytest.raises(ArgumentError, match="q: the memory of the CuPy array was freed"):
        views._read_cupy(freed, "q")


# --- answers ---


@ROWS
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_answers_come_back_in_the_framework(framework: str, row: DType) -> None:
    like = view(_make(framework, _values(dtypes.float32)), "q")
    if framework == "jax" and row in (dtypes.int64, dtypes.uint64):
        pytest.skip("JAX has no 64-bit integers unless it is enabled for the whole process")
    a = _values(row, (5, 3))
    for answer in (array.from_numpy(a, like), array.deliver(_filled(a, row, like), like)):
        assert type(answer) is type(like.owner)
        v = view(answer, "o")
        assert (v.dtype, v.framework, v.device) == (row, framework, CPU)
        assert as_numpy(v).tobytes() == a.tobytes()
    if framework != "jax":
        assert view(array.from_numpy(a, like), "o").ptr == a.ctypes.data


def _filled(a: np.ndarray, row: DType, like: ArrayView):
    out = array.empty(a.shape, row, like)
    v = view(out, "out")
    assert (tuple(v.shape), v.strides, v.dtype) == (a.shape, (a.shape[1], 1), row)
    as_numpy(v)[...] = a
    return out


@pytest.mark.filterwarnings("error")
def test_torch_answers_from_any_numpy_array() -> None:
    torch = pytest.importorskip("torch")
    like = view(torch.zeros(1), "q")
    base = _values(dtypes.bfloat16, (4, 6))
    frozen = base.copy()
    frozen.flags.writeable = False
    for a in (base.T, base[::-1], base[:, ::2], base[:0], base[0, 0, ...], frozen):
        x = array.from_numpy(a, like)
        assert x.dtype == torch.bfloat16
        assert x.double().tolist() == a.astype(np.float64).tolist()


def test_host_copies() -> None:
    for framework in FRAMEWORKS:
        x = _make(framework, _values(dtypes.int32))
        np.testing.assert_array_equal(array.to_host(view(x, "indptr")), _values(dtypes.int32))


def test_cuda_views_are_not_for_the_cpu() -> None:
    with pytest.raises(ArgumentError, match="an array on cuda:0 cannot be read by the CPU"):
        as_numpy(view(_host_cupy(np.zeros(3, np.float32)), "q"))


@ROWS
def test_as_cupy_describes_the_same_elements(row: DType) -> None:
    x = _host_cupy(_values(row), device=1)[:, ::-1, 1:]
    v = view(x, "q")
    again = view(array.as_cupy(v), "q")
    for field in ("ptr", "shape", "strides", "dtype", "device"):
        assert getattr(again, field) == getattr(v, field)


# --- comparisons ---


def test_same_device() -> None:
    a = view(np.zeros(3, np.float32), "q")
    b, c = (view(_host_cupy(np.zeros(3, np.float32), d), "k") for d in (0, 1))
    assert same_device(q=a, mask=None, k=a) == CPU
    assert same_device(q=None, k=c) == Device("cuda", 1)
    with pytest.raises(ArgumentError, match="v: is on cuda:0 but q is on cpu; move one of them"):
        same_device(q=a, k=a, v=b)
    with pytest.raises(ArgumentError, match="k: is on cuda:1 but q is on cuda:0"):
        same_device(q=b, k=c)
    with pytest.raises(ArgumentError, match="no array was given"):
        same_device(q=None)


def overlap(a: ArrayView, b: ArrayView) -> bool:
    try:
        require_output(a, "a", b=b)
    except ArgumentError as error:
        assert "overlaps b in memory" in str(error)
        return True
    return False


@given(st.data())
def test_overlap_is_bounds_overlap(data) -> None:
    base = np.zeros((6, 7), np.float32)
    cuts = [np.asarray(base[data.draw(hnp.basic_indices(base.shape))]) for _ in range(2)]
    a, b = (view(x, "x") for x in cuts)
    assert overlap(a, b) == overlap(b, a) == np.may_share_memory(*cuts)


def test_overlap_is_within_one_device() -> None:
    a = np.zeros(3, np.float32)
    x, y, z = view(a, "a"), view(_host_cupy(a, 0), "b"), view(_host_cupy(a, 1), "c")
    assert [overlap(x, x), overlap(y, y), overlap(x, y), overlap(y, z)] == [
        True,
        True,
        False,
        False,
    ]


def test_one_framework_needs_no_stream_order() -> None:
    """`acquire` and `release` must not even ask CuPy: here it has no device to answer with."""
    v = view(_host_cupy(np.zeros(3, np.float32)), "q")
    array.acquire(v, v, v)
    array.release(v, v, v)


def test_repr() -> None:
    v = view(np.zeros((2, 3), np.float16)[:, ::-1], "q")
    assert repr(v) == "ArrayView(numpy float16[2, 3] on cpu, strides [3, -1])"

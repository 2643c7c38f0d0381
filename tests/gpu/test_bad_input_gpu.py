"""Bad input that only a GPU can have: devices, freed memory, what no kernel serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyattn
from cupyattn.engine import run_single as run
from cupyattn.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

Q, KV = (4, 4, 64), (6, 2, 64)
HALF, SINGLE = np.float16, np.float32


class Row(NamedTuple):
    """`changes` replace arguments of a good call; functions make them once there is a GPU."""

    what: str
    error: type[Exception]
    words: tuple[str, ...]
    changes: dict[str, Any]


def row(what: str, words: str, error: type[Exception] = ArgumentError, **changes: Any) -> Row:
    return Row(what, error, tuple(words.split(" | ")), changes)


def of(dtype: Any, *shape: int) -> Callable[[], Any]:
    return lambda: cupy.zeros(shape, dtype)


def all_of(dtype: Any, head_dim: int) -> dict[str, Any]:
    shapes = {"q": Q, "k": KV, "v": KV, "out": Q}
    return {name: of(dtype, *shape[:2], head_dim) for name, shape in shapes.items()}


def freed_by_cupy() -> Any:
    x = cupy.zeros(KV, HALF)
    x.data.mem.free()
    return x


def freed_by_torch() -> Any:
    x = _torch().zeros(KV, dtype=_torch().float16, device="cuda")
    x.untyped_storage().resize_(0)
    return x


def with_grad() -> Any:
    return _torch().zeros(Q, dtype=_torch().float16, device="cuda", requires_grad=True)


def deleted_by_jax() -> Any:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros(KV, HALF)
    x.delete()
    return x


def on_second_gpu() -> Any:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    with cupy.cuda.Device(1):
        return cupy.zeros(KV, HALF)


def _torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is here without CUDA")
    return torch


U = UnsupportedError
ROWS = [
    row("float32", "q: dtype float32 has no GPU kernel | cast q to", U, **all_of(SINGLE, 64)),
    row("odd head dim", "head_dim_qk: 20 is not supported | multiple of 8", U, **all_of(HALF, 20)),
    row("large head dim", "head_dim_qk: 264 | from 8 to 256", U, **all_of(HALF, 264)),
    row("odd value dim", "head_dim_vo: 12 is not", U, v=of(HALF, 6, 2, 12), out=of(HALF, 4, 4, 12)),
    row(
        "rope of an odd dim",
        "ROPE_LLAMA | multiple of 16, got 72",
        U,
        pos_encoding_mode="ROPE_LLAMA",
        **all_of(HALF, 72),
    ),
    row("integer output", "o_dtype: int8 is not a supported output", o_dtype="int8"),
    row("q on the CPU", "is on cuda:0 but q is on cpu | move one", q=np.zeros(Q, HALF)),
    row("k on the CPU", "k: is on cpu but q is on cuda:0", k=np.zeros(KV, HALF)),
    row("v on the CPU", "v: is on cpu but q is on cuda:0", v=np.zeros(KV, HALF)),
    row("out on the CPU", "out: is on cpu but q is on cuda:0", out=np.zeros(Q, HALF)),
    row("lse on the CPU", "lse: is on cpu but q is on cuda:0", lse=np.zeros(Q[:2], SINGLE)),
    row("mask on the CPU", "custom_mask: is on cpu", custom_mask=np.ones((4, 6), bool)),
    row(
        "bits on the CPU", "packed_custom_mask: is on cpu", packed_custom_mask=np.ones(3, np.uint8)
    ),
    row("sinks on the CPU", "sinks: is on cpu but q is on cuda:0", sinks=np.zeros(4, SINGLE)),
    row("scales on the CPU", "scale_k: is on cpu", scale_k=np.ones(2, SINGLE)),
    row("k on another GPU", "k: is on cuda:1 but q is on cuda:0", k=on_second_gpu, v=on_second_gpu),
    row("memory freed", "k: the memory of the CuPy array was freed", k=freed_by_cupy),
    row("storage freed", "v: | storage was freed", v=freed_by_torch),
    row("array deleted", "v: the JAX array was deleted", v=deleted_by_jax),
    row("requires grad", "q: requires grad | detach", q=with_grad),
    row("no KV heads", "0 KV heads", k=of(HALF, 6, 0, 64), v=of(HALF, 6, 0, 64)),
    row(
        "no head dim",
        "head_dim_qk: 0 is not supported",
        U,
        q=of(HALF, 4, 4, 0),
        k=of(HALF, 6, 2, 0),
    ),
    row("short mask", "packed_custom_mask: holds 2 bytes", packed_custom_mask=of(np.uint8, 2)),
    row("mask of bytes", "custom_mask: dtype is uint8", custom_mask=of(np.uint8, 4, 6)),
    row("half out", "out: dtype is float16 | wanted float32", o_dtype="float32"),
    row("NaN scale", "sm_scale: got nan", sm_scale=float("nan")),
    row("NaN scale on the GPU", "sm_scale: got", sm_scale=lambda: cupy.asarray(np.nan)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_bad_input(row: Row) -> None:
    """An error before any launch: `out` and `lse` keep their sentinel."""
    run._entries.clear()
    for _ in range(2):
        arguments = {
            "q": cupy.zeros(Q, HALF),
            "k": cupy.zeros(KV, HALF),
            "v": cupy.zeros(KV, HALF),
            "out": cupy.zeros(Q, HALF),
            "lse": cupy.zeros(Q[:2], SINGLE),
        }
        for name, value in row.changes.items():
            arguments[name] = value() if callable(value) else value
        outputs = [arguments["out"], arguments["lse"]]
        for x in outputs:
            x[...] = 7
        with pytest.raises(row.error) as caught:
            cupyattn.single_prefill_with_kv_cache(**arguments)
        assert type(caught.value) is row.error
        missing = [word for word in row.words if word not in str(caught.value)]
        assert not missing, str(caught.value)
        cupy.cuda.Device().synchronize()
        assert all(bool((x == 7).all()) for x in outputs)
        good_call()


def good_call() -> None:
    q, k = cupy.ones(Q, HALF), cupy.ones(KV, HALF)
    out = cupyattn.single_prefill_with_kv_cache(q, k, k)
    assert bool((out == 1).all())


def test_bits_on_two_devices() -> None:
    """Offsets decide the size of the answer, so they may be on the host."""
    bits = cupy.ones(20, bool)
    packed, indptr = cupyattn.segment_packbits(bits, np.array([0, 3, 20], np.int32))
    assert packed.tolist() == [0b1110_0000, 255, 255, 128] and indptr.tolist() == [0, 1, 4]
    with pytest.raises(ArgumentError, match="20 elements of x"):
        cupyattn.segment_packbits(bits, cupy.array([0, 21], np.int32))

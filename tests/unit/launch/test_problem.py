"""What the GPU kernels refuse, as far as it needs no GPU, and what calls share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import array
from cupyattn.array import ArrayView, Device
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU, device_props, imagine
from cupyattn.core.problem import AttentionProblem
from cupyattn.engine import run_single as run
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.launch.attention.load_kernels import load_kernel
from cupyattn.launch.tiles.row_classes import DECODE, LARGE

HALF, E4M3 = dtypes.float16, dtypes.float8_e4m3fn
GOOD = AttentionProblem(HALF, HALF, HALF, 128, 128)

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float32": (
        {"dtype_q": dtypes.float32, "dtype_kv": dtypes.float32},
        UnsupportedError,
        r"q: dtype float32 has no GPU kernel; cast q to float16 or bfloat16",
    ),
    "e5m2 q": (
        {"dtype_q": dtypes.float8_e5m2, "dtype_kv": dtypes.float8_e5m2},
        UnsupportedError,
        "q: dtype float8_e5m2 is not supported; cast q to .*, or quantize it to float8_e4m3fn or",
    ),
    "fp8 q, other keys": (
        {"dtype_q": dtypes.float8_e4m3fn},
        ArgumentError,
        "k, v: dtype float16 with q of dtype float8_e4m3fn; wanted k of float8_e4m3fn and v of",
    ),
    "int8 q, e5m2 values": (
        {"dtype_q": dtypes.int8, "dtype_kv": dtypes.float8_e5m2},
        ArgumentError,
        "k, v: dtype float8_e5m2 with q of dtype int8; wanted k of int8 and v of float8_e4m3fn",
    ),
    "int8 q, wide": (
        {"dtype_q": dtypes.int8, "dtype_kv": E4M3, "head_dim_qk": 512, "head_dim_vo": 512},
        UnsupportedError,
        "q: dtype int8 is not supported with head dims 512 and 512; cast q to float16",
    ),
    "int8 q, latent": (
        {"dtype_q": dtypes.int8, "dtype_kv": E4M3, "latent": True},
        UnsupportedError,
        "q: dtype int8 is not supported with latent keys",
    ),
    "mixed": ({"dtype_kv": dtypes.bfloat16}, ArgumentError, "k, v: dtype bfloat16 with q of"),
    "integer cache": ({"dtype_kv": dtypes.int8}, ArgumentError, "k, v: dtype int8"),
    "integer out": ({"dtype_o": dtypes.uint8}, ArgumentError, "o_dtype: uint8"),
    "no dim": ({"head_dim_qk": 0}, UnsupportedError, "head_dim_qk: 0 is not supported; wanted a"),
    "odd dim": ({"head_dim_qk": 100}, UnsupportedError, "head_dim_qk: 100 .* multiple of 8"),
    "large dim": ({"head_dim_qk": 264}, UnsupportedError, "head_dim_qk: 264 .* from 8 to 256"),
    "small value": ({"head_dim_vo": 4}, UnsupportedError, "head_dim_vo: 4 "),
    "large value": ({"head_dim_vo": 384}, UnsupportedError, "head_dim_vo: 384 "),
    "rope": (
        {"head_dim_qk": 72, "pos_encoding": "ROPE_LLAMA"},
        UnsupportedError,
        "pos_encoding_mode: ROPE_LLAMA .* multiple of 16, got 72",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_refuse(changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        replace(GOOD, **changes).check_supported()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype_kv": dtypes.float8_e4m3fn},
        {"dtype_q": dtypes.bfloat16, "dtype_kv": dtypes.float8_e5m2, "dtype_o": HALF},
        {"dtype_o": dtypes.float32},
        {"dtype_q": E4M3, "dtype_kv": E4M3, "dtype_o": dtypes.bfloat16},
        {"dtype_q": dtypes.int8, "dtype_kv": E4M3, "dtype_o": E4M3, "soft_cap": True},
        {"head_dim_qk": 192, "head_dim_vo": 128, "pos_encoding": "ROPE_LLAMA"},
        {"head_dim_qk": 8, "head_dim_vo": 256, "pos_encoding": "ALIBI"},
    ],
)
def test_what_the_kernels_take(changes: dict[str, Any]) -> None:
    replace(GOOD, **changes).check_supported()


def test_the_cpu_refuses_what_a_gpu_refuses_but_for_float32() -> None:
    call = cupyattn.single_prefill_with_kv_cache
    q = np.ones((2, 1, 16), np.float32)
    assert call(q, q, q, pos_encoding_mode="ROPE_LLAMA").shape == (2, 1, 16)
    for dtype, dim in itertools.product((np.float16, np.float32), (4, 5, 12, 20, 264, 1024)):
        q = np.ones((2, 1, dim), dtype)
        with pytest.raises(UnsupportedError, match=f"head_dim_qk: {dim} is not supported"):
            call(q, q, q)
    for dim in (8, 24, 40):
        q = np.ones((2, 1, dim), np.float16)
        assert call(q, q, q).shape == q.shape
        with pytest.raises(UnsupportedError, match="pos_encoding_mode: ROPE_LLAMA"):
            call(q, q, q, pos_encoding_mode="ROPE_LLAMA")


@pytest.mark.parametrize(
    ("dim", "rows", "blocks"),
    [(128, LARGE, 1), (128, DECODE, 2), (64, LARGE, 1), (64, "q64_oneshot", 2)],
)
def test_as_many_blocks_run_on_no_gpu_as_fit_an_sm(dim: int, rows: str, blocks: int) -> None:
    """Shared memory bounds them, and registers where a kernel deals them out to its warps."""
    assert NO_GPU is device_props(NO_GPU.index)
    problem = AttentionProblem(HALF, HALF, HALF, dim, dim, paged=True)
    loaded = load_kernel(problem, rows, NO_GPU.index, True, 16)
    assert (loaded.function, loaded.num_slots) == (0, blocks * NO_GPU.num_sms)


# --- arrays on several devices, played with CPU memory that claims to be elsewhere ---


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> dict[str, Device]:
    """Argument name -> the device that its array claims to be on."""
    claims: dict[str, Device] = {}
    real = array.view

    def view(x: object, name: str) -> ArrayView:
        v = real(x, name)
        v.device = claims.get(name, v.device)
        return v

    monkeypatch.setattr(array, "view", view)
    run._entries.clear()
    return claims


def _call(**changes: Any) -> Any:
    shapes = {"q": (4, 2, 16), "k": (6, 2, 16), "v": (6, 2, 16), "out": (4, 2, 16), "lse": (4, 2)}
    arrays = {n: np.zeros(s, np.float32 if n == "lse" else np.float16) for n, s in shapes.items()}
    arguments = arrays | changes
    cupyattn.single_prefill_with_kv_cache(**arguments)


@pytest.mark.parametrize(
    "name", ["k", "v", "out", "lse", "custom_mask", "packed_custom_mask", "sinks", "scale_v"]
)
def test_mixed_devices_are_named(elsewhere: dict[str, Device], name: str) -> None:
    extras = {
        "custom_mask": np.ones((4, 6), bool),
        "packed_custom_mask": np.ones(3, np.uint8),
        "sinks": np.zeros(2, np.float32),
        "scale_v": np.ones(2, np.float32),
    }
    changes = {name: extras[name]} if name in extras else {}
    _call(**changes)
    elsewhere[name] = Device("cuda", 1)
    with pytest.raises(ArgumentError, match=f"{name}: is on cuda:1 but q is on cpu; move"):
        _call(**changes)


def test_gpu_arrays_meet_the_rules_of_the_gpu(elsewhere: dict[str, Device]) -> None:
    elsewhere.update(dict.fromkeys(("q", "k", "v", "out", "lse"), Device("cuda", 0)))
    single = {n: np.zeros((6, 2, 16), np.float32) for n in ("q", "k", "v", "out")}
    with pytest.raises(UnsupportedError, match="q: dtype float32 has no GPU kernel"):
        _call(**single)
    odd = {n: np.zeros((6, 2, 20), np.float16) for n in ("q", "k")}
    with pytest.raises(UnsupportedError, match="head_dim_qk: 20 is not supported"):
        _call(**odd)


# --- a call that looks like an earlier one is served by its entry ---


def _entry(q: np.ndarray, k: np.ndarray, **scalars: Any) -> run.Entry:
    run._entries.clear()
    cupyattn.single_prefill_with_kv_cache(q, k, k, **scalars)
    (entry,) = run._entries.values()
    return entry


def test_an_entry_serves_every_length() -> None:
    q, k = np.zeros((5, 4, 16), np.float16), np.zeros((9, 2, 16), np.float16)
    entry = _entry(q, k)
    for rows, keys in ((5, 9), (1, 9), (3, 1), (2, 7)):
        cupyattn.single_prefill_with_kv_cache(q[:rows], k[:keys], k[:keys])
    assert list(run._entries.values()) == [entry]
    cupyattn.single_prefill_with_kv_cache(q, k, k, causal=True)
    cupyattn.single_prefill_with_kv_cache(q[:, :2], k, k)
    assert len(run._entries) == 3


@pytest.mark.parametrize("which", ["q", "k"])
def test_alignment_does_not_depend_on_the_length(which: str) -> None:
    """A single row may start on a boundary where the next does not."""
    arrays = {"q": np.zeros((1, 2, 16), np.float16), "k": np.zeros((1, 2, 16), np.float16)}
    assert _entry(**arrays).problem.aligned
    rows = np.zeros(4 * 37, np.float16)
    arrays[which] = np.lib.stride_tricks.as_strided(rows, (1, 2, 16), (74, 32, 2))
    assert not _entry(**arrays).problem.aligned


def test_a_scale_that_may_change_is_read_every_time() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, 1, 16)).astype(np.float32)
    scale = torch.tensor(0.5)
    for value in (0.5, 2.0):
        scale.fill_(value)
        expected = cupyattn.single_prefill_with_kv_cache(q, k, k, sm_scale=value)
        np.testing.assert_array_equal(
            cupyattn.single_prefill_with_kv_cache(q, k, k, sm_scale=scale), expected
        )


def test_an_empty_cache_excuses_no_later_one() -> None:
    q, k = np.zeros((2, 1, 16), np.float16), np.zeros((4, 1, 32), np.float16)[..., ::2]
    run._entries.clear()
    cupyattn.single_prefill_with_kv_cache(q, k[:0], k[:0])
    with pytest.raises(ArgumentError, match="k: the last dimension has stride 2"):
        cupyattn.single_prefill_with_kv_cache(q, k, k)


def test_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MAX_ENTRIES", 5)
    run._entries.clear()
    q = np.zeros((1, 1, 8), np.float16)
    for window in range(12):
        cupyattn.single_prefill_with_kv_cache(q, q, q, window_left=window)
        assert len(run._entries) <= 5


def _shifted(shape: tuple[int, ...]) -> np.ndarray:
    """float16 zeros that start two bytes past a 16-byte boundary."""
    room = np.zeros(int(np.prod(shape)) + 16, np.float16)
    start = (-room.ctypes.data % 16) // 2 + 1
    return room[start : start + int(np.prod(shape))].reshape(shape)


LOOKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "custom mask": ({"custom_mask": np.ones((4, 6), bool)}, {"custom_mask": True}),
    "packed mask": ({"packed_custom_mask": np.ones(3, np.uint8)}, {"custom_mask": True}),
    "scale_q": ({"scale_q": np.ones(2, np.float32)}, {"prescale_logits": True}),
    "scale_k": ({"scale_k": np.ones(2, np.float32)}, {"prescale_logits": True}),
    "scale_v": ({"scale_v": np.ones(2, np.float32)}, {}),
    "sinks": ({"sinks": np.ones(2, np.float32)}, {}),
    "negative scale": ({"sm_scale": -1.0}, {"prescale_logits": True}),
    "no scale": ({"sm_scale": 0.0}, {"prescale_logits": True}),
    "negative k_scale": ({"k_scale": -1.0}, {"prescale_logits": True}),
    "soft cap": ({"logits_soft_cap": 1.0}, {"soft_cap": True}),
    "soft cap off": ({"logits_soft_cap": 0.0}, {}),
    "alibi": ({"pos_encoding_mode": "ALIBI"}, {"pos_encoding": "ALIBI"}),
    "run-time options": ({"causal": True, "window_left": 3, "v_scale": 2.0, "rope_theta": 9.0}, {}),
    "shifted q": ({"q": _shifted((4, 2, 16))}, {"aligned": False}),
    "shifted v": ({"v": _shifted((6, 2, 16))}, {"aligned": False}),
    "shifted out": ({"out": _shifted((4, 2, 16))}, {"aligned": False}),
    "strides of v": ({"v": np.zeros((6, 2, 19), np.float16)[..., :16]}, {"aligned": False}),
    "strides of out": ({"out": np.zeros((4, 2, 19), np.float16)[..., :16]}, {"aligned": False}),
    "narrow v": ({"v": np.zeros((6, 2, 8), np.float16)}, {"head_dim_vo": 8}),
    "o_dtype": ({"o_dtype": "float32"}, {"dtype_o": dtypes.float32}),
}


@pytest.mark.parametrize(("changes", "facts"), LOOKS.values(), ids=LOOKS)
def test_the_problem_of_a_call(changes: dict[str, Any], facts: dict[str, Any]) -> None:
    """The same with and without a similar call before it."""
    call = cupyattn.single_prefill_with_kv_cache
    shapes = {"q": (4, 2, 16), "k": (6, 2, 16), "v": (6, 2, 16)}
    arrays = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    plain = AttentionProblem(HALF, HALF, HALF, 16, 16)
    run._entries.clear()
    call(**arrays, out=np.zeros((4, 2, 16), np.float16))
    call(**arrays)
    before = list(run._entries.values())
    assert {entry.problem for entry in before} == {plain}
    call(**arrays | changes)
    new = [entry for entry in run._entries.values() if entry not in before]
    assert {entry.problem for entry in new or before} == {replace(plain, **facts)}


@pytest.mark.parametrize("dims", [(256, 512), (512, 512), (512, 256), (64, 512), (448, 256)])
def test_wide_heads(dims: tuple[int, int]) -> None:
    problem = replace(GOOD, head_dim_qk=dims[0], head_dim_vo=dims[1])
    problem.check_supported()
    replace(problem, pos_encoding="ROPE_LLAMA").check_supported()
    fp8 = replace(problem, pos_encoding="ROPE_LLAMA", dtype_kv=dtypes.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="ROPE_LLAMA is not supported with head dims"):
        fp8.check_supported()
    for label in ("qk", "vo"):
        with pytest.raises(UnsupportedError, match=f"head_dim_{label}: 480 is not supported"):
            replace(problem, **{f"head_dim_{label}": 480}).check_supported()  # type: ignore[arg-type]


def test_latent_columns() -> None:
    latent = replace(GOOD, latent=True, paged=True)
    for columns in ((512, 64), (512, 0), (256, 64), (256, 0)):
        replace(latent, head_dim_qk=sum(columns), head_dim_vo=columns[0]).check_supported()
    with pytest.raises(UnsupportedError, match="head_dim_ckv, head_dim_kpe: 512 and 32 are not"):
        replace(latent, head_dim_qk=544, head_dim_vo=512).check_supported()


def test_a_card_that_is_imagined_is_planned_for_and_never_launched_on() -> None:
    props = replace(
        NO_GPU, name="NVIDIA A100", arch="sm_80", num_sms=108, max_smem_per_block=0, smem_per_sm=0
    )
    index = imagine(props)
    assert index < NO_GPU.index and imagine(props) == index != imagine(replace(props, name="x"))
    found = device_props(index)
    assert (found.name, found.max_smem_per_block, found.smem_per_sm) == (
        "NVIDIA A100",
        163 << 10,
        164 << 10,
    )
    problem = replace(GOOD, paged=True)
    loaded = load_kernel(problem, "decode", index, True, 16)
    assert loaded.function == 0 and loaded.num_slots % 108 == 0 and not loaded.has_clusters

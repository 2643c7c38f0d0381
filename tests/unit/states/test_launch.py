"""What reaches the launch calls of merges, on a GPU that is not there; cached calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_gpu import STREAM, Gpu, Launched, count_functions, maker, pointer

import cupyattn
from cupyattn import array, jit
from cupyattn.core import dtypes
from cupyattn.engine import merge_states as merge
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError
from cupyattn.launch.driver import params
from cupyattn.launch.ops import merge_states as launcher

N, M, H, D = 6, 5, 3, 64
_NAMES = (
    *("v_a", "v_b", "s_a", "s_b", "out", "lse", "indptr", "mask", "out_scale"),
    *("num_rows", "head_dim", "lane_bits", "to_base2", "from_base2", "num_heads", "magic"),
    *(
        "shift",
        "out_factor",
        "num_states",
        *(f"{x}_{i}_{axis}" for x in "vs" for i in "ab" for axis in "nmh"),
    ),
    *("out_n", "out_h", "lse_n", "lse_h"),
)


def unpack(launch: Launched) -> dict[str, Any]:
    *pointers, look = params.MERGE_STATES.unpack_from(launch.params)
    return dict(zip(_NAMES, (*pointers, *params.MERGE_LOOK.unpack(look)), strict=True))


def arguments(make: Callable, form: str, dtype: str = "bfloat16", **shape: int) -> dict[str, Any]:
    n, h, d = (shape.get(x, y) for x, y in zip("nhd", (N, H, D), strict=True))

    def state(*axes: int) -> tuple[Any, Any]:
        return make(*axes, h, d, dtype=dtype), make(*axes, h, dtype="float32")

    if form == "states":
        return dict(zip("vs", state(n, M), strict=True))
    if form == "segments":
        return dict(zip("vs", state(9), strict=True)) | {"indptr": make(n + 1, dtype="int32")}
    names = ("v_a", "s_a", "v_b", "s_b") if form == "pair" else ("v", "s", "v_other", "s_other")
    return dict(zip(names, (*state(n), *state(n)), strict=True))


def num_cached() -> int:
    return sum(map(len, merge._CALLS))


CALLS = {
    "pair": cupyattn.merge_state,
    "in place": cupyattn.merge_state_in_place,
    "states": cupyattn.merge_states,
    "segments": cupyattn.variable_length_merge_states,
}


@pytest.mark.parametrize("form", CALLS)
def test_what_is_launched(gpu: Gpu, make: Callable, form: str) -> None:
    given = arguments(make, form)
    for _ in range(2):  # checked, then cached
        answer = CALLS[form](**given)
        v, s = (given["v"], given["s"]) if form == "in place" else answer
        assert (answer is None) == (form == "in place")
        assert type(v) is type(s) is type(next(iter(given.values())))
        assert (tuple(v.shape), tuple(s.shape)) == ((N, H, D), (N, H))
        launch = gpu.launches[-1]
        # 8 lanes of 16 bytes a row, 32 rows a block.
        assert (launch.kernel, launch.grid, launch.stream) == ("merge_states", (1, 1, 1), STREAM)
        assert (launch.block, launch.shared_bytes) == ((256, 1, 1), 0)
        got = unpack(launch)
        first = [given.get(x, given.get(y)) for x, y in (("v_a", "v"), ("s_a", "s"))]
        second = [given.get(x, given.get(y)) for x, y in (("v_b", "v_other"), ("s_b", "s_other"))]
        wanted: dict[str, Any] = dict(zip(("v_a", "s_a"), map(pointer, first), strict=True))
        wanted |= {
            n: 0 if x is None else pointer(x) for n, x in zip(("v_b", "s_b"), second, strict=True)
        }
        wanted |= {"out": pointer(v), "lse": pointer(s), "mask": 0}
        wanted["indptr"] = pointer(given["indptr"]) if form == "segments" else 0
        wanted["num_states"] = {"states": M, "segments": 9}.get(form, 2)
        n, m = {"states": (M * H, H), "segments": (0, H)}.get(form, (H, 0))
        for x, size in (("v", D), ("s", 1)):
            for i in "ab":
                steps = (n * size, m * size, size)
                wanted |= {f"{x}_{i}_{k}": y for k, y in zip("nmh", steps, strict=True)}
        wanted |= {"out_n": H * D, "out_h": D, "lse_n": H, "lse_h": 1, "num_rows": N * H}
        magic, shift = params.divisor(H)
        wanted |= {"num_heads": H, "magic": magic, "shift": shift, "head_dim": D, "lane_bits": 3}
        wanted |= {"out_scale": 0, "out_factor": 1.0}
        assert got == wanted | {"to_base2": 1.0, "from_base2": 1.0}
    assert num_cached() == 1


def test_natural_logarithms_masks_and_outputs(gpu: Gpu, make: Callable) -> None:
    given, mask = arguments(make, "in place"), make(N, dtype="bool")
    out, lse = make(N, H, D, dtype="float32"), make(H, N, dtype="float32").T
    for _ in range(2):
        cupyattn.merge_state_in_place(**given, mask=mask, lse_base_on_e=True)
        got = unpack(gpu.launches[-1])
        assert got["mask"] == pointer(mask)
        np.testing.assert_allclose(got["to_base2"] * got["from_base2"], 1.0, rtol=1e-7)
        assert got["to_base2"] == np.float32(math.log2(math.e))
        pair = arguments(make, "pair")
        answer = cupyattn.merge_state(**pair, out=out, lse=lse)
        assert answer[0] is out and answer[1] is lse
        got = unpack(gpu.launches[-1])
        assert (got["out"], got["lse"]) == (pointer(out), pointer(lse))
        assert (got["lse_n"], got["lse_h"]) == (1, N)
    one = cupyattn.merge_state(**pair, lse=lse)
    assert one[1] is lse and one[0] is not out and one[0].dtype == pair["v_a"].dtype
    assert num_cached() == 3


@pytest.mark.parametrize(
    ("head_dim", "dtype", "lane_bits"),
    [
        *((1, "bfloat16", 0), (8, "float16", 0), (9, "bfloat16", 4), (64, "float32", 4)),
        *((96, "bfloat16", 4), (128, "float32", 5), (256, "bfloat16", 5), (512, "bfloat16", 5)),
        *((513, "bfloat16", 5), (4096, "float32", 5)),
    ],
)
def test_lanes_of_a_row(
    gpu: Gpu, make: Callable, head_dim: int, dtype: str, lane_bits: int
) -> None:
    cupyattn.merge_state(**arguments(make, "pair", dtype, d=head_dim, n=1000))
    got = unpack(gpu.launches[-1])
    assert (got["lane_bits"], got["head_dim"]) == (lane_bits, head_dim)
    assert gpu.launches[-1].grid == (-(-3000 * 2**lane_bits // 256), 1, 1)


@pytest.fixture
def asked(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[jit.Config]:
    """The Configs of all kernels that are loaded."""
    found: list[jit.Config] = []

    def load(name: str, config: jit.Config, *_: Any) -> SimpleNamespace:
        found.append(config)
        return SimpleNamespace(function=name)

    monkeypatch.setattr(jit, "load", load)
    return found


def test_every_config_is_listed(make: Callable, asked: list[jit.Config]) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        for dim in (64, 512, 63):
            for form in CALLS:
                CALLS[form](**arguments(make, form, dtype, d=dim))
    assert set(asked) == {
        config
        for dtype in (dtypes.bfloat16, dtypes.float16, dtypes.float32)
        for dim in (64, 512)
        for is_aligned in (True, False)
        for config in launcher.configs(dtype, dim, is_aligned)
    }
    for dtype, dim in (("bfloat16", 256), ("float32", 128)):
        cupyattn.merge_state(**arguments(make, "pair", dtype, d=dim))
        assert asked[-1]["kOneChunk"]
        cupyattn.merge_state(**arguments(make, "pair", dtype, d=dim + 8))
        assert not asked[-1]["kOneChunk"]


def test_two_states_are_a_pair(gpu: Gpu, make: Callable, asked: list[jit.Config]) -> None:
    for num_states in (1, 2, 3):
        v, s = make(N, num_states, H, D), make(N, num_states, H, dtype="float32")
        for _ in range(2):
            cupyattn.merge_states(v, s)
            got = unpack(gpu.launches[-1])
            assert (got["v_b"], got["s_b"], got["v_b_m"], got["s_b_m"]) == (0, 0, H * D, H)
        assert asked[-1]["kPairs"] is (num_states == 2)
    v, s, indptr = make(2, H, D), make(2, H, dtype="float32"), make(2, dtype="int32")
    cupyattn.variable_length_merge_states(v, s, indptr)
    assert not asked[-1]["kPairs"]


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_alignment(gpu: Gpu, make: Callable, shift: int) -> None:
    """Each array counts, in cached calls too: an unaligned row has a lane for each element."""

    def shifted() -> Any:
        return make(N * H * D + shift)[shift:].reshape(N, H, D)

    plain = arguments(make, "pair")
    for name in ("v_a", "v_b", "out"):
        for _ in range(2):
            cupyattn.merge_state(**{**plain, "out": make(N, H, D), name: shifted()})
            assert unpack(gpu.launches[-1])["lane_bits"] == (5 if shift % 8 else 3)
            cupyattn.merge_state(**plain, out=make(N, H, D))
            assert unpack(gpu.launches[-1])["lane_bits"] == 3
    assert num_cached() == (4 if shift % 8 else 1)


def test_outputs_of_cached_calls_are_as_of_checked_ones(gpu: Gpu, make: Callable) -> None:
    """Also where what is given is not laid out as answers are."""
    torch = pytest.importorskip("torch")
    if not isinstance(make(1), torch.Tensor):
        pytest.skip("one framework is enough")
    v = make(H, N, D).transpose(0, 1)
    given = {"v_a": v, "s_a": make(H, N, dtype="float32").T, "v_b": make(N, H, D)}
    given["s_b"] = make(N, H, dtype="float32")
    for _ in range(2):
        out, lse = cupyattn.merge_state(**given)
        assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    s = make(N, H)
    for _ in range(2):
        out, lse = cupyattn.merge_state(v, s, given["v_b"], s.clone())
        assert lse.dtype == torch.float32 and tuple(lse.shape) == (N, H)
    weights = [torch.nn.Parameter(make(N, H, D)) for _ in range(2)]
    with torch.no_grad():
        for _ in range(2):
            out, _ = cupyattn.merge_state(
                weights[0], given["s_b"], weights[1], given["s_b"].clone()
            )
            assert type(out) is torch.Tensor and not out.requires_grad
    with pytest.raises(ArgumentError, match="v_a: requires grad"):
        cupyattn.merge_state(weights[0], given["s_b"], weights[1], given["s_b"])


# What a good call becomes, after good ones of the same signature.
BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "v_b: dimension 0": ("pair", lambda a: {"v_b": a["v_b"][:2]}),
    "v_a: got list": ("pair", lambda a: {"v_a": [1.0]}),
    "s_b: got list": ("pair", lambda a: {"s_b": [1.0]}),
    "s_b: got NoneType": ("pair", lambda a: {"s_b": None}),
    "out: overlaps v_a": ("pair", lambda a: {"out": a["v_a"]}),
    "out: overlaps v_b": ("pair", lambda a: {"out": a["v_b"]}),
    "lse: overlaps s_b": ("pair", lambda a: {"lse": a["s_b"]}),
    "lse_base_on_e: got {}": ("pair", lambda a: {"lse_base_on_e": {}}),
    "v: overlaps v_other": ("in place", lambda a: {"v_other": a["v"]}),
    "s: overlaps s_other": ("in place", lambda a: {"s_other": a["s"]}),
    "indptr: got NoneType": ("segments", lambda a: {"indptr": None}),
    "s: dimension 1": ("states", lambda a: {"s": a["s"][:, :2]}),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_call_is_refused_after_good_ones(gpu: Gpu, make: Callable, message: str) -> None:
    form, change = BAD[message]
    good = arguments(make, form)
    if form == "pair":
        good |= {"out": make(N, H, D), "lse": make(N, H, dtype="float32")}
    for _ in range(2):
        CALLS[form](**good)
    del gpu.launches[:]
    for _ in range(2):
        with pytest.raises(CupyAttnError, match=message):
            CALLS[form](**good | change(good))
    assert not gpu.launches


def test_a_pair_of_nothing_is_not_a_merge_of_many(gpu: Gpu, make: Callable) -> None:
    good = arguments(make, "states")
    good |= {"out": make(N, H, D), "lse": make(N, H, dtype="float32")}
    cupyattn.merge_states(**good)
    with pytest.raises(ArgumentError, match="v_b: got NoneType"):
        cupyattn.merge_state(good["v"], good["s"], None, None, out=good["out"], lse=good["lse"])


def test_a_freed_tensor_is_refused_after_good_ones(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    if not isinstance(make(1), torch.Tensor):
        pytest.skip("a matter of torch")
    given = arguments(make, "pair")
    cupyattn.merge_state(**given)
    given["v_b"].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="v_b: the tensor has no memory"):
        cupyattn.merge_state(**given)


def test_neighbours_in_memory_do_not_overlap(gpu: Gpu, make: Callable) -> None:
    both, s = make(2 * N, H, D), make(2 * N, H, dtype="float32")
    for _ in range(2):
        cupyattn.merge_state_in_place(both[:N], s[:N], both[N:], s[N:])
    with pytest.raises(ArgumentError, match="v: overlaps v_other"):
        cupyattn.merge_state_in_place(both[:N], s[:N], both[N - 1 : -1], s[N:])
    assert len(gpu.launches) == 2


def test_a_cached_call_runs_few_functions(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(make, "pair")
    cupyattn.merge_state(**given)
    monkeypatch.setattr(array, "view", None)
    assert count_functions(lambda: cupyattn.merge_state(**given)) <= 13


def test_counts_beyond_32_bits_are_refused(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    if not isinstance(make(1), torch.Tensor):
        pytest.skip("one framework is enough")
    v, s = torch.zeros(256).bfloat16(), torch.zeros(1)

    def strided(x: Any, *shape: int) -> Any:
        return torch.as_strided(x, shape, [0] * len(shape))

    many = 2**16
    with pytest.raises(UnsupportedError, match=r"65536 x 65536 rows .* merge parts"):
        a, b = strided(v, many, many, 1), strided(s, many, many)
        cupyattn.merge_state(a, b, a, b)
    with pytest.raises(UnsupportedError, match="4294967296 states"):
        cupyattn.merge_states(strided(v, 2, 2**32, 1, 1), strided(s, 2, 2**32, 1))
    assert not gpu.launches


def test_debugging_looks_at_offsets(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(make, "segments")
    offsets = np.array([0, 1, 1, 4, 4, 4, 9], np.int32)
    monkeypatch.setattr(array, "to_host", lambda v: offsets)
    gpu.api.is_debugging = True
    gpu.api.runtime.streamSynchronize = lambda stream: None
    for _ in range(2):
        cupyattn.variable_length_merge_states(**given)
    offsets[3] = 0
    with pytest.raises(ArgumentError, match="indptr: wanted offsets that never fall"):
        cupyattn.variable_length_merge_states(**given)
    assert len(gpu.launches) == 2


def test_long_offsets_on_a_gpu_are_converted_at_every_call(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(maker("torch", monkeypatch), "segments")
    short = given["indptr"]
    monkeypatch.setattr(merge, "int32_on_device", lambda v, name: array.view(short, name))
    for _ in range(2):
        cupyattn.variable_length_merge_states(**given | {"indptr": short.long()})
        assert unpack(gpu.launches[-1])["indptr"] == pointer(short)
    assert len(gpu.launches) == 2 and len(merge._CALLS[False]) == 0


@pytest.mark.parametrize("form", CALLS)
def test_calls_of_other_lengths_are_not_checked_anew(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    CALLS[form](**arguments(make, form))
    checked: list[object] = []
    real = merge._check_inputs
    monkeypatch.setattr(merge, "_check_inputs", lambda *a: checked.append(a) or real(*a))
    for n in (2, 90, 3):
        given = arguments(make, form, n=n)
        answer = CALLS[form](**given)
        v, s = (given["v"], given["s"]) if form == "in place" else answer
        assert (tuple(v.shape), tuple(s.shape)) == ((n, H, D), (n, H))
        launch, got = gpu.launches[-1], unpack(gpu.launches[-1])
        assert (launch.grid, got["num_rows"]) == ((-(-n * H // 32), 1, 1), n * H)
        assert (got["out"], got["lse"]) == (pointer(v), pointer(s))
        assert got["num_states"] == {"states": M, "segments": 9}.get(form, 2)
    assert not checked and num_cached() == 1
    # Lengths that do not fit each other are refused as ever.
    wrong = arguments(make, form, n=5)
    name = {"pair": "s_b", "in place": "s_other"}.get(form, "s")
    wrong[name] = make(8, *tuple(wrong[name].shape)[1:], dtype="float32")
    with pytest.raises(ArgumentError):
        CALLS[form](**wrong)

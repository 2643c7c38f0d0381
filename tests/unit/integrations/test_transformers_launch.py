"""What transformers' layers launch on a GPU, and what it costs the host. Without transformers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from helpers import fake_gpu
from helpers.fake_gpu import Gpu, count_functions, pointer, unpack

torch = pytest.importorskip("torch")

import cupyattn  # noqa: E402
import cupyattn.integrations.transformers as door  # noqa: E402

LAYER = types.SimpleNamespace(is_causal=True)


@pytest.fixture
def make(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return fake_gpu.maker("torch", monkeypatch)


def rows(make: Callable[..., Any], count: int, **named: Any) -> Any:
    """[b, heads, 1, head_dim], as a layer's projection lies in memory."""
    return make(count, 1, 8, 64, **named).transpose(1, 2)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_step_of_decoding_is_one_launch(
    gpu: Gpu, make: Callable, count: int, has_sinks: bool
) -> None:
    q, sinks = rows(make, count), make(8) if has_sinks else None
    for length in (40, 41, 42):
        for _ in range(3):
            gpu.launches.clear()
            k, v = make(count, 2, length, 64), make(count, 2, length, 64)
            out, _ = door.attention(LAYER, q, k, v, None, scaling=0.1, s_aux=sinks)
            (launch,) = gpu.launches
            got = unpack(launch.params)
            assert tuple(out.shape) == (count, 1, 8, 64) and out.is_contiguous()
            assert (got["num_kv_heads"], got["kv_len"]) == (2 * count, length)
            assert bool(got["sinks"]) == has_sinks
            assert [got[x] for x in "qkvo"] == [pointer(x) for x in (q, k, v, out)]


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_step_costs_the_host(gpu: Gpu, make: Callable, count: int) -> None:
    """Functions of the library: a layer of a new length costs about what any other does."""
    q = rows(make, count)
    keys = {length: make(count, 2, length, 64) for length in range(40, 60)}

    def step(length: int) -> int:
        k = keys[length]
        v = k.view(k.shape)  # a tensor that is two arguments costs one function more
        return count_functions(lambda: door.attention(LAYER, q, k, v, None, scaling=0.1))

    for length in range(40, 50):
        step(length)
    first = max(step(length) for length in range(50, 60))
    step(59)
    again = step(59)
    assert first <= 24 and again <= 12, (first, again)


def other_steps(make: Callable) -> dict[str, tuple[Any, Any, Any, dict[str, Any]]]:
    """Calls that are not quite the known one, of three requests with two KV heads and 40 keys."""
    q, k, room = rows(make, 3), make(3, 2, 40, 64), make(3, 4, 80, 64)
    wide = make(3, 2, 40, 128)
    return {
        "longer": (q, make(3, 2, 41, 64), make(3, 2, 41, 64), {}),
        "other lengths of V": (q, k, make(3, 2, 41, 64), {}),
        "heads and requests change places": (q, make(2, 3, 40, 64), make(2, 3, 40, 64), {}),
        "one request": (rows(make, 1), make(1, 2, 40, 64), make(1, 2, 40, 64), {}),
        "six KV heads of one request": (rows(make, 3), make(1, 6, 40, 64), make(1, 6, 40, 64), {}),
        "part of a larger cache": (q, room[:, :2, :40], room[:, 2:, :40], {}),
        "part of the tokens": (q, room[:, ::2, 40:], room[:, 1::2, 40:], {}),
        "rows of other places": (make(3, 8, 1, 64), k, k, {}),
        "columns of other places": (q, wide[..., ::2], wide[..., ::2], {}),
        "another dtype": (*(x.half() for x in (q, k, k)), {}),
        "a scale": (q, k, k, {"scaling": 0.2}),
        "a cap": (q, k, k, {"softcap": 5.0}),
        "a window": (q, k, k, {"sliding_window": 16}),
        "both sides of a window": (q, k, k, {"sliding_window": 16, "is_causal": False}),
        "sinks": (q, k, k, {"s_aux": make(8)}),
        "a bias": (q, k, k, {"position_bias": make(1, 8, 1, 40)}),
        "no bias": (q, k, k, {"position_bias": None, "output_attentions": False}),
    }


OTHER_STEPS = [
    "longer",
    "other lengths of V",
    "heads and requests change places",
    "one request",
    "six KV heads of one request",
    "part of a larger cache",
    "part of the tokens",
    "rows of other places",
    "columns of other places",
    "another dtype",
    "a scale",
    "a cap",
    "a window",
    "both sides of a window",
    "sinks",
    "a bias",
    "no bias",
]


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_a_step_that_is_not_the_known_one(gpu: Gpu, make: Callable, name: str) -> None:
    """Launches what it does, or raises, where no step is known."""
    assert [*other_steps(make)] == OTHER_STEPS

    def answers(knows_others: bool) -> list[Any]:
        fake_gpu.forget()
        made: list[Any] = []
        for _ in range(3):
            if knows_others:
                q, k = rows(make, 3), make(3, 2, 40, 64)
                for _ in range(3):
                    door.attention(LAYER, q, k, k, None, scaling=0.1)
            gpu.launches.clear()
            q, k, v, options = other_steps(make)[name]
            try:
                out, _ = door.attention(LAYER, q, k, v, None, **{"scaling": 0.1} | options)
            except cupyattn.CupyAttnError as error:
                made.append(str(error))
                continue
            got = [unpack(launch.params) for launch in gpu.attentions()]
            facts = "kv_len", "qo_len", "num_kv_heads", "group_size", "window_left", "sm_scale"
            strides = [x for x in got[0] if "_stride_" in x]
            made.append([[x[n] for n in (*facts, *strides)] for x in got])
            made[-1] += [tuple(out.shape), out.stride(), str(out.dtype)]
        return made

    assert answers(True) == answers(False)


def test_what_repeated_steps_allocate(gpu: Gpu, make: Callable) -> None:
    """Memory of split keys is kept: an allocation takes as long as the rest of a call."""
    q, k = rows(make, 1), make(1, 2, 9000, 64)
    for _ in range(4):
        door.attention(LAYER, q, k, k, None, scaling=0.1)
    assert len(gpu.attentions()) == 4 and gpu.attentions()[0].grid[2] > 1
    assert len(gpu.scratch) == 1


def padded(length: int) -> Any:
    """The mask of a step of three requests, of which two have padding."""
    seen = torch.ones(3, length, dtype=torch.bool)
    seen[1, :5], seen[2, :1] = False, False
    return door.attention_mask(3, 1, length, length - 1, attention_mask=seen)


def test_a_padded_step_of_decoding(gpu: Gpu, make: Callable) -> None:
    """Each KV head of a request is a request; where they begin is computed once for all layers."""
    pytest.importorskip("transformers")
    q, k = rows(make, 3), make(3, 2, 40, 64)
    mask = padded(40)
    for _ in range(3):
        gpu.launches.clear()
        out, _ = door.attention(LAYER, q, k, k, mask, scaling=0.1)
        assert tuple(out.shape) == (3, 1, 8, 64)
        got = unpack(gpu.attentions()[0].params)
        assert got["num_kv_heads"] == 1 and got["k"] == pointer(k) and got["o"] == pointer(out)
        lengths = mask.cupyattn_lengths
    assert mask.cupyattn_lengths is lengths
    _, row_offsets, starts, lens = lengths
    assert row_offsets.tolist() == list(range(7))
    assert starts.tolist() == [0, 40, 85, 125, 161, 201, 240]
    assert lens.tolist() == [40, 40, 35, 35, 39, 39]


def test_what_a_padded_step_costs_the_host(gpu: Gpu, make: Callable) -> None:
    pytest.importorskip("transformers")
    q = rows(make, 3)
    made = {length: (make(3, 2, length, 64), padded(length)) for length in range(40, 60)}

    def step(length: int) -> int:
        k, mask = made[length]
        return count_functions(lambda: door.attention(LAYER, q, k, k, mask, scaling=0.1))

    for length in range(40, 50):
        step(length)
    first = [step(length) for length in range(50, 60)]
    step(59)
    again = step(59)
    assert max(first) <= 90 and again <= 20, (first, again)


def test_a_step_over_part_of_a_larger_cache(gpu: Gpu, make: Callable) -> None:
    """Heads of several requests that are not equally far apart are requests of their own."""
    room = make(3, 3, 40, 64)
    out, _ = door.attention(LAYER, rows(make, 3), room[:, :2], room[:, 1:], None, scaling=0.1)
    assert tuple(out.shape) == (3, 1, 8, 64)
    (launch,) = gpu.attentions()
    assert unpack(launch.params)["num_kv_heads"] == 2


@pytest.mark.parametrize("tokens", [1, 5])
def test_any_order_of_axes(gpu: Gpu, make: Callable, tokens: int) -> None:
    """Of head dims before tokens, as convolutions leave keys."""
    q, k = make(2, tokens, 8, 64).transpose(1, 2), make(2, 2, 64, 40).transpose(2, 3)
    out, _ = door.attention(LAYER, q, k, k, None, scaling=0.1)
    assert tuple(out.shape) == (2, tokens, 8, 64)


@pytest.mark.parametrize("tokens", [1, 5])
def test_autocast_decides_about_the_dtype(gpu: Gpu, make: Callable, tokens: int) -> None:
    """float32 rows of a GPU are refused without it."""
    q = make(2, tokens, 8, 64, dtype="float32").transpose(1, 2)
    k, v = make(2, 2, 40, 64, dtype="float32"), make(2, 2, 40, 64)
    with torch.autocast("cpu", torch.float16):
        out, _ = door.attention(LAYER, q, k, v, None)
    assert out.dtype == torch.float16
    assert gpu.attentions()[-1].kernel.config["DTypeQ"].name == "float16"

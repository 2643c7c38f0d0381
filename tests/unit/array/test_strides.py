"""Arrays of a caller's memory in another shape: restride, row_major, adjoined, scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn import array
from cupyattn.array import memory
from cupyattn.errors import ArgumentError

A = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(params=["numpy", "torch"])
def put(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    if request.param == "numpy":
        return np.array
    torch = pytest.importorskip("torch")
    return lambda a: torch.from_numpy(a.copy())


def test_restride_shares_memory(put: Any) -> None:
    x = put(A)[1:]
    made = array.restride(x, "x", (3, 2, 3), (6, 3, 1))
    assert type(made) is type(x)
    np.testing.assert_array_equal(np.asarray(made), A[1:].reshape(3, 2, 3))
    made = array.restride(x, "x", (2, 3), (1, 6), 2)
    np.testing.assert_array_equal(np.asarray(made), A[1:, 2:4].T)
    made[0, 0] = -1
    assert float(x[0, 2]) == -1


def test_restride_of_jax_is_a_view() -> None:
    x = pytest.importorskip("jax.numpy").asarray(A)
    made = array.restride(x, "x", (6, 4), (1, 6))
    assert array.view(made, "x") is made and made.readonly
    np.testing.assert_array_equal(array.as_numpy(made), A.T)


def test_row_major_copies_only_what_is_not(put: Any) -> None:
    x = put(A)
    np.testing.assert_array_equal(np.asarray(array.row_major(x.T, "x")), A.T)
    assert array.view(array.row_major(x.T, "x"), "x").strides == (4, 1)
    with pytest.raises(ArgumentError, match=r"x: strides are .* row-major copy"):
        array.row_major(array.as_strided(array.view(pytest.importorskip("jax.numpy").ones(6), "x"),
                                         (2, 3), (1, 2)), "x")  # fmt: skip


def test_rows_behind_one_another(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(A)
    both = array.adjoined(x[:1], x[1:3], "x")
    assert type(both) is type(x)
    np.testing.assert_array_equal(np.asarray(both), A[:3])
    np.testing.assert_array_equal(np.asarray(array.adjoined(x[:3, :3], x[3:, :3], "x")), A[:, :3])
    for first, second in (
        (x[1:], x[:1]),
        (x[:1], x[2:]),
        (x[:2], x[2:, :3]),
        (x[:1], put(A)[1:]),
        (x[:2], x[2:].reshape(12)[:6]),
        (x[:2, ::2], x[2:, 1::2]),
    ):
        assert array.adjoined(first, second, "x") is None
    # Two allocations may lie behind one another too.
    monkeypatch.setitem(memory._ALLOCATIONS, array.view(x, "x").framework, id)
    assert array.adjoined(x[:1], x[1:3], "x") is None


def test_rows_of_unknown_frameworks_are_never_joined() -> None:
    x = pytest.importorskip("jax.numpy").asarray(A)
    assert array.adjoined(x[:2], x[2:], "x") is None


def test_scaled_in_place(put: Any) -> None:
    x = put(A)
    assert array.scaled(x, 0.5) is x
    np.testing.assert_array_equal(np.asarray(x), A / 2)
    x = pytest.importorskip("jax.numpy").asarray(A)
    np.testing.assert_array_equal(np.asarray(array.scaled(x, 0.5)), A / 2)

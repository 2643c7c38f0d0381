"""One record for every call that the tests make, and one way to try it.

A call runs wherever its arrays are. The reference serves NumPy arrays. The fake and the emulated
GPU serve them while they are plugged in. A GPU serves CuPy's and torch's. So a test chooses `xp`,
and the rest is the same everywhere: `run_and_check(SomeCall(case, xp))`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import array, reference

from . import batches, compare, lowprec, poison

# Copies of (out, lse); lse is None where the call makes none.
Answer = tuple[np.ndarray, np.ndarray | None]
# Two float arrays (o, lse): the oracle's.
States = list[np.ndarray]


class Placed:
    """Arrays of a call among poison, on a device of a framework.

    case   says what is called, and names the call in failures
    owned  the arrays, by name
    where  the framework and the device, for poison's functions
    """

    def __init__(self, case: Any, xp: ModuleType, *seed: int, device: str = "") -> None:
        self.case, self.xp = case, xp
        self.where: dict[str, Any] = {"xp": xp} | ({"device": device} if device else {})
        self.rng = np.random.default_rng(seed)
        self.owned: dict[str, poison.Poisoned] = {}

    def values(self, *shape: int, dtype: str) -> np.ndarray:
        return batches.normal(self.rng, dtype, *shape)

    def embed(self, name: str, values: np.ndarray, strides: Any = None, **where: Any) -> Any:
        """The values on the device."""
        placed = poison.embed(values, strides, **self.where, **where)
        self.owned[name] = placed
        return placed.array

    def blank(
        self, name: str, shape: Sequence[int], dtype: Any, strides: Any = None
    ) -> poison.Poisoned:
        """An output on the device, poison itself."""
        self.owned[name] = poison.blank(shape, np.dtype(dtype), strides, **self.where)
        return self.owned[name]

    def assert_intact(self) -> None:
        for name, placed in self.owned.items():
            placed.assert_intact(f"{self.case}: {name}")


class Call(Placed):
    """A call on the device: what is called, its inputs, the oracle's answer and the tolerance.

    A subclass makes the inputs and defines `start`, and `options` or `requests`.

    outputs   those that the call is given to write, out first
    returned  what the last call gave, (out, lse) as arrays of the device
    keys      (k, v) of each request, whose rows of q begin at qo_indptr; masks likewise, or None
    answer_shape  heads and columns of the output, and the dtype that the kernels round it to
    """

    q: np.ndarray
    keys: Sequence[Any]
    qo_indptr: np.ndarray
    masks: Sequence[np.ndarray] | None = None
    answer_shape: tuple[int, int, np.dtype]
    is_repeatable = True
    has_coarse_cap = False
    head_dim_qk = 256
    logit_magnitude = 0.0

    def __init__(self, case: Any, xp: ModuleType, *seed: int) -> None:
        super().__init__(case, xp, *seed)
        self.outputs: list[poison.Poisoned] = []
        self.returned: Sequence[Any] = ()

    def blank(
        self, name: str, shape: Sequence[int], dtype: Any, strides: Any = None
    ) -> poison.Poisoned:
        self.outputs.append(super().blank(name, shape, dtype, strides))
        return self.outputs[-1]

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As the case has them: rows on boundaries or off them, with gaps or without."""
        return poison.strides(shape, self.case.problem.is_aligned, self.case.is_padded)

    def embed_rows(self, name: str, values: np.ndarray) -> Any:
        return self.embed(name, values, self.strides(values.shape))

    # --- the call ---

    def start(self) -> None:
        """Make the call, keep what it gives in `returned`, and wait for nothing."""
        raise NotImplementedError

    def run_wrapper(self, wrapper: Any, *arrays: Any, **named: Any) -> None:
        """Let a planned wrapper write the outputs; it makes its own where the case gives none."""
        given: dict[str, Any] = {}
        if self.case.with_out or self._makes_no_outputs():
            given = {name: self.owned[name].array for name in ("out", "lse")}
        self.returned = wrapper.run(*arrays, **named, **given)
        for got, wanted in zip(self.returned, given.values(), strict=False):
            assert got is wanted

    def _makes_no_outputs(self) -> bool:
        """CuPy has no arrays of fp8, so it is refused there to make the answer's."""
        return self.xp.__name__ == "cupy" and self.answer_shape[2].itemsize == 1

    def answers(self) -> Answer:
        """Copies of what the last call gave."""
        given = {id(p.array): p for p in self.owned.values()}
        out, lse = (
            None if x is None else given[id(x)].values() if id(x) in given else poison.download(x)
            for x in self.returned
        )
        assert out is not None
        return out, lse

    def run(self) -> Answer:
        self.start()
        return self.answers()

    # --- the answer ---

    def options(self) -> dict[str, Any]:
        """Arguments of reference.attention that all requests share."""
        raise NotImplementedError

    def requests(self) -> Iterable[dict[str, Any]]:
        """The arguments of reference.attention for the rows of each request."""
        options = self.options()
        for index, (k, v) in enumerate(self.keys):
            q = self.q[slice(*self.qo_indptr[index : index + 2])]
            mask = None if self.masks is None else self.masks[index]
            yield {"q": q, "k": k, "v": v, "mask": mask, **options}

    def expected(self) -> tuple[States, States]:
        """(o, lse) in float64, and in the kernels' precision."""
        return attend(self.requests(), *self.answer_shape)

    def slack(self) -> np.ndarray | float:
        """What honest answers to 8-bit queries differ by; 0 for others."""
        if self.q.dtype.itemsize != 1:
            return 0.0
        blank = np.zeros((0, self.answer_shape[0]))
        return np.concatenate([blank, *(lowprec.slack_of_8_bits(**x) for x in self.requests())])

    def check(
        self, out: np.ndarray, lse: np.ndarray | None, *, may_be_hoppers: bool | None = None
    ) -> None:
        """The answer is as good as the low-precision model, and no poison was written.

        may_be_hoppers: whether prefill_sm90 may have served the call. By default a GPU's may.
        """
        if may_be_hoppers is None:
            may_be_hoppers = self.xp is not np
        ref, low = self.expected()
        compare.assert_close(
            out,
            lse,
            *ref,
            *low,
            self.case,
            p_dtype=self.q.dtype if self.q.dtype.itemsize > 1 else out.dtype,
            slack=self.slack(),
            logit_magnitude=self.logit_magnitude,
            has_coarse_cap=may_be_hoppers and self.has_coarse_cap,
            head_dim_qk=self.head_dim_qk,
        )
        self.assert_intact()


def drawn_sinks(rng: np.random.Generator, count: int) -> np.ndarray:
    """float32 [count]; in a third of the draws one of -inf, which is none, and one of +inf, which
    leaves nothing but itself."""
    sinks = rng.normal(0, 2, count).astype(np.float32)
    if sinks.view(np.uint32).sum() % 3 == 0:
        sinks[count // 2] = -np.inf
        sinks[-1] = np.inf
    return sinks


def with_lead(x: Any, lead: tuple[int, ...]) -> Any:
    """An array of the device with these leading axes in place of its first, without a copy."""
    v = array.view(x, "x")
    steps = [v.strides[0] * math.prod(lead[i + 1 :]) for i in range(len(lead))]
    return array.restride(x, "x", (*lead, *v.shape[1:]), (*steps, *v.strides[1:]))


def attend(
    requests: Iterable[dict[str, Any]], num_heads: int, dim: int, o_dtype: np.dtype
) -> tuple[States, States]:
    """(o, lse) of the rows of all requests, in float64 and in the kernels' precision.

    A request is the arguments of reference.attention.
    """
    models = reference.attention, functools.partial(lowprec.attention, o_dtype=o_dtype)
    blank = np.zeros((0, num_heads, dim)), np.zeros((0, num_heads))
    answers = [[model(**request) for model in models] for request in requests]
    ref, low = (
        [np.concatenate(x) for x in zip(blank, *(pair[i] for pair in answers), strict=True)]
        for i in (0, 1)
    )
    return ref, low


def check_batch(
    got: Sequence[Any], b: batches.Batch, what: object, has_coarse_cap: bool = False, **options: Any
) -> None:
    """Compare (out, lse) of a batch with the model: options of reference.attention."""
    out, lse = map(poison.download, got)
    heads, dim = b.q.shape[1], b.cache[1].shape[-1]
    ref, low = attend(b.requests(**options), heads, dim, b.q.dtype)
    compare.assert_close(out, lse, *ref, *low, what, has_coarse_cap=has_coarse_cap)


def logit_magnitude(soft_cap: float, slopes_of: int, longest: int) -> float:
    """The largest base-2 magnitude, besides its own, that a logit passes through.

    slopes_of: the number of query heads under ALiBi, else 0. longest: rows or keys of a request.
    """
    steepest = float(lowprec.alibi_slopes(slopes_of).max()) if slopes_of else 0.0
    return max(soft_cap, steepest * longest) * math.log2(math.e)


def run_and_check(call: Any, has_run_hopper: Callable[[], bool] | None = None) -> None:
    """Make the call, check it, and make it again on blank outputs for the same bits.

    has_run_hopper: asked after the call whether prefill_sm90 was part of it.
    """
    first = call.run()
    call.check(*first, may_be_hoppers=has_run_hopper and has_run_hopper())
    if not call.is_repeatable:
        return
    for placed in call.outputs:
        placed.clear()
    for a, b in zip(first, call.run(), strict=True):
        if a is not None:
            compare.assert_bitwise_equal(a, b, call.case)

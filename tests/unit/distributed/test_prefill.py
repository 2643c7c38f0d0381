"""Prefill over simulated ranks: the answers of one rank, whatever the way, and the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyattn
from cupyattn import ArgumentError, DistributedError, PlanError, UnsupportedError, reference
from cupyattn.core import dtypes
from cupyattn.distributed import ContextParallelPrefill, Group, Rates, ZigZag, simulate

RAGGED = [37, 0, 5, 1, 64, 3]


class Case(NamedTuple):
    """Prompts and what is asked of them.

    chunks  of "gather" and "overlap"; None: by the model of cost
    """

    lengths: list[int]
    size: int
    method: str = "auto"
    chunks: int | None = None
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: str = "float16"
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def qo_indptr(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(sum(self.lengths) + self.size)
        n, dtype = int(self.qo_indptr[-1]), dtypes.parse(self.dtype).numpy
        (num_qo_heads, num_kv_heads), (dim_qk, dim_vo) = self.heads, self.dims
        shapes = (num_qo_heads, dim_qk), (num_kv_heads, dim_qk), (num_kv_heads, dim_vo)
        return tuple(rng.standard_normal((n, *shape)).astype(dtype) for shape in shapes)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64."""
        found = []
        q, k, v = (x.astype(np.float64) for x in self.arrays())
        options = {"causal": True, **self.options}
        for begin, end in zip(self.qo_indptr[:-1], self.qo_indptr[1:], strict=True):
            own = slice(begin, end)
            found.append(reference.attention(q[own], k[own], v[own], **options))
        out, lse = (np.concatenate(x) for x in zip(*found, strict=True))
        return out, lse

    def plan(self, group: Group, **changed: Any) -> ContextParallelPrefill:
        prefill = ContextParallelPrefill(group, method=self.method)
        options = {"q_data_type": self.dtype, "num_chunks": self.chunks, **self.options, **changed}
        prefill.plan(self.qo_indptr, *self.heads, *self.dims, **options)
        return prefill

    def run(self, change: Callable[[Any], Any] = lambda x: x) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of all ranks together, after runs that had the same bits."""
        share = ZigZag(self.qo_indptr, self.size)

        def work(group: Group) -> Any:
            own = [change(share.cut(x, group.rank)) for x in self.arrays()]
            prefill = self.plan(group)
            out, lse = prefill.run(*own, return_lse=True)
            assert type(out) is type(own[0])
            again, lse_again = prefill.run(*own, return_lse=True)
            alone = prefill.run(*own)
            for x, y in ((out, again), (out, alone), (lse, lse_again)):
                assert np.array_equal(bits(x), bits(y))
            return out, lse

        return tuple(share.join(x) for x in zip(*simulate(self.size, work), strict=True))


def bits(x: Any) -> np.ndarray:
    return cupyattn.array.to_host(cupyattn.array.view(x, "x")).view(np.uint8)


def one_rank(case: Case) -> np.ndarray:
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper()
    options = {"causal": True, "q_data_type": case.dtype, **case.options}
    wrapper.plan(case.qo_indptr, case.qo_indptr, *case.heads, *case.dims, **options)
    return wrapper.run(*case.arrays())


def check(case: Case, got: tuple[Any, Any]) -> None:
    """As exact as one rank is."""
    wanted, lse = case.expected()
    alone = one_rank(case).astype(np.float64)
    out = np.asarray(got[0]).astype(np.float64)
    assert out.shape == wanted.shape
    if out.size:
        spare = 1e-6 if case.dtype == "float32" else 1e-12  # states are float32
        assert np.abs(out - wanted).max() <= 1.02 * np.abs(alone - wanted).max() + spare
    np.testing.assert_allclose(np.asarray(got[1]), lse, rtol=1e-6, atol=1e-5)


WAYS = [
    ("gather", 1),
    ("gather", 2),
    ("overlap", 1),
    ("overlap", 2),
    ("overlap", 4),
    ("ulysses", None),
    ("auto", None),
]


@pytest.mark.parametrize(("method", "chunks"), WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_prompts(method: str, chunks: int | None, size: int, causal: bool) -> None:
    heads = (6, 3) if size == 3 else (8, 2)  # on 4 ranks each KV head is on two
    case = Case(RAGGED, size, method, chunks, heads, options={"causal": causal})
    check(case, case.run())


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [3, 2], [128]], ids=str)
@pytest.mark.parametrize(("method", "chunks"), WAYS)
def test_few_tokens(lengths: list[int], method: str, chunks: int | None) -> None:
    case = Case(lengths, 4, method, chunks)
    if lengths:
        check(case, case.run())
    else:
        out, lse = case.run()
        assert out.shape == (0, 8, 16) and lse.shape == (0, 8)


ALIBI = {"pos_encoding_mode": "ALIBI", "sm_scale": 0.3}


@pytest.mark.parametrize(("method", "chunks"), [("gather", 1), ("gather", 2), ("ulysses", None)])
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 0},
        {"window_left": 9},
        {"window_left": 50, "logits_soft_cap": 5.0},
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e3},
        {"pos_encoding_mode": "ROPE_LLAMA", "window_left": 11},
    ],
    ids=str,
)
def test_positions_are_those_of_the_whole_request(
    method: str, chunks: int | None, options: dict[str, Any]
) -> None:
    case = Case(RAGGED, 2, method, chunks, options=options)
    check(case, case.run())


@pytest.mark.parametrize("options", [ALIBI, {**ALIBI, "window_left": 11}], ids=str)
@pytest.mark.parametrize(("method", "chunks"), [("gather", 1), ("gather", 2), ("auto", None)])
def test_slopes_are_those_of_all_heads(
    method: str, chunks: int | None, options: dict[str, Any]
) -> None:
    case = Case(RAGGED, 2, method, chunks, options=options)
    check(case, case.run())


def test_windows_without_causality() -> None:
    options = {"causal": False, "window_left": 5, "window_right": 3}
    case = Case(RAGGED, 2, options=options)
    check(case, case.run())


@pytest.mark.parametrize(("method", "chunks"), WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_and_head_dims(method: str, chunks: int | None, dtype: str) -> None:
    case = Case([50, 21], 2, method, chunks, (4, 4), (24, 16), dtype)
    check(case, case.run())


@pytest.mark.parametrize(("method", "chunks"), WAYS)
def test_torch_and_strided_arrays(method: str, chunks: int | None) -> None:
    torch = pytest.importorskip("torch")

    def strided(x: np.ndarray) -> Any:
        wide = torch.zeros(x.shape[0], x.shape[1] + 1, x.shape[2] + 3, dtype=torch.float16)
        part = wide[:, 1:, : x.shape[2]]
        part[...] = torch.from_numpy(x)
        return part

    case = Case([50, 21], 2, method, chunks)
    check(case, case.run(strided))


@pytest.mark.parametrize(("method", "chunks"), WAYS)
def test_given_outputs_of_another_dtype(method: str, chunks: int | None) -> None:
    case = Case(RAGGED, 2, method, chunks)
    share, (wanted, wanted_lse) = ZigZag(case.qo_indptr, 2), case.expected()

    def work(group: Group) -> None:
        own = [share.cut(x, group.rank) for x in case.arrays()]
        n = own[0].shape[0]
        out, lse = np.full((n, 8, 16), np.nan, np.float32), np.full((n, 8), np.nan, np.float32)
        prefill = case.plan(group, o_data_type="float32")
        assert prefill.run(*own, out=out, lse=lse) is out
        np.testing.assert_allclose(out, share.cut(wanted, group.rank), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, share.cut(wanted_lse, group.rank), rtol=1e-5, atol=1e-5)

    simulate(2, work)


def test_plans_follow_one_another() -> None:
    """A wrapper plans batch after batch, and an error leaves the plan before."""
    cases = [Case(RAGGED, 2), Case([9], 2), Case([200, 1], 2)]

    def work(group: Group) -> None:
        prefill = ContextParallelPrefill(group)
        for case in cases:
            share = ZigZag(case.qo_indptr, 2)
            own = [share.cut(x, group.rank) for x in case.arrays()]
            prefill.plan(case.qo_indptr, 8, 2, 16)
            with pytest.raises(ArgumentError, match="num_qo_heads, num_kv_heads: 8"):
                prefill.plan(case.qo_indptr, 8, 3, 16)
            out = prefill.run(*own).astype(np.float64)
            wanted = share.cut(case.expected()[0], group.rank)
            np.testing.assert_allclose(out, wanted, atol=2e-3)
        for _ in range(2):
            prefill.close()
            with pytest.raises(PlanError, match=re.escape("run() was called before plan()")):
                prefill.run(*own)
        prefill.plan(case.qo_indptr, 8, 2, 16)  # it may be used again
        assert np.array_equal(prefill.run(*own), out)

    simulate(2, work)


@pytest.mark.parametrize(("method", "chunks"), WAYS)
def test_hosts_without_peer_memory(method: str, chunks: int | None) -> None:
    """Between hosts keys go through all_gather, and the answers are the same."""
    case = Case(RAGGED, 2, method, chunks)
    share = ZigZag(case.qo_indptr, 2)
    answers = {}
    for hosts in ([0, 0], [0, 1]):

        def work(group: Group) -> np.ndarray:
            return case.plan(group).run(*[share.cut(x, group.rank) for x in case.arrays()])

        answers[tuple(hosts)] = simulate(2, work, hosts=hosts)
    for same, other in zip(*answers.values(), strict=True):
        np.testing.assert_allclose(same.astype(float), other.astype(float), atol=1e-3)


def test_what_was_chosen_is_said() -> None:
    def work(group: Group) -> str:
        prefill = ContextParallelPrefill(group, rates=Rates(link=1e9))
        with pytest.raises(PlanError, match=re.escape("describe() was called before plan()")):
            prefill.describe()
        prefill.plan(np.array([0, 1 << 12]), 8, 8, 16)
        return prefill.describe()

    first, second = simulate(2, work)
    assert first == second
    assert re.match(
        r"(ulysses|gather in \d chunks?|overlap in \d chunks?): [\d.]+ ms by estimate, of which",
        first,
    )


# --- what is refused ---


def one(call: Callable[[Group], Any], size: int = 2) -> Any:
    """What rank 0 raises, which all raise."""

    def work(group: Group) -> Any:
        try:
            call(group)
        except cupyattn.CupyAttnError as error:
            return error
        return None

    errors = simulate(size, work)
    assert all(type(error) is type(errors[0]) for error in errors)
    return errors[0]


def planning(method: str = "auto", **changed: Any) -> Callable[[Group], Any]:
    given = {"qo_indptr": np.array([0, 16]), "num_qo_heads": 8, "num_kv_heads": 2}
    given |= {"head_dim_qk": 16, **changed}
    return lambda group: ContextParallelPrefill(group, method=method).plan(**given)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda g: ContextParallelPrefill(None), ArgumentError, "group: got NoneType"),
        (lambda g: ContextParallelPrefill(g, method="ring"), ArgumentError, "method: got 'ring'"),
        (lambda g: ContextParallelPrefill(g, rates=3), ArgumentError, "rates: got int"),
        (lambda g: Rates(link=0), ArgumentError, "rates.link: got 0"),
        (planning(qo_indptr=np.array([0, 5, 3])), ArgumentError, "qo_indptr: falls from 5 to 3"),
        (planning(qo_indptr=np.array([1, 5])), ArgumentError, "qo_indptr: the first offset is 1"),
        (planning(num_kv_heads=3), ArgumentError, "num_qo_heads, num_kv_heads: 8 query heads"),
        (planning(head_dim_qk=0), ArgumentError, "head_dim_qk: got 0"),
        (planning(kv_layout="HND"), UnsupportedError, "kv_layout: is no option of prefill over"),
        (planning(mask_fn="1"), UnsupportedError, "mask_fn: is no option of prefill over seve"),
        (planning(causal=2), ArgumentError, "causal: got 2"),
        (planning(window_left=-3), ArgumentError, "window_left: got -3"),
        (planning(q_data_type="int32"), ArgumentError, "dtype int32 is not supp"),
        (planning("ulysses", num_qo_heads=9, num_kv_heads=3), UnsupportedError, "num_qo_heads: "),
        (planning("overlap", window_left=3), UnsupportedError, "use method='gather'"),
        (planning("gather", window_left=3, causal=False), UnsupportedError, "method='ulysses'"),
        (planning("ulysses", pos_encoding_mode="ALIBI"), UnsupportedError, "'ALIBI' is not supp"),
        (planning(num_chunks=2), ArgumentError, "num_chunks: got 2 with method='auto'"),
        (planning("gather", num_chunks=4), ArgumentError, "num_chunks: got 4 for 'gather'; wan"),
        (planning("overlap", num_chunks=3), ArgumentError, "num_chunks: got 3 for 'overlap'; wa"),
        (lambda g: ContextParallelPrefill(g).run(1, 2, 3), PlanError, "run() was called before"),
    ],
)
def test_bad_plans(call: Any, kind: type[Exception], message: str) -> None:
    error = one(call)
    assert isinstance(error, kind) and message in str(error), error


def zeros(n: int, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros((n, *shape), dtype)


Q, K = zeros(8, 8, 16), zeros(8, 2, 16)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((Q[:7], K, K), {}, "q: holds 7 rows; wanted 8, the tokens of rank"),
        ((Q, K[:7], K), {}, "k: holds 7 rows; wanted 8"),
        ((Q, K, zeros(8, 4, 16)), {}, "v: dimension 1 of shape [8, 4, 16] is 4"),
        ((zeros(8, 8, 24), K, K), {}, "q: dimension 2 of shape [8, 8, 24] is 24"),
        ((Q.astype(np.float32), K, K), {}, "q: dtype is float32; wanted float16"),
        ((Q, zeros(8, 2, 32)[..., ::2], K), {}, "k: the last dimension has stride 2"),
        ((Q, K, K), {"out": zeros(8, 8, 16, dtype=np.float32)}, "out: dtype is float32"),
        ((Q, K, K), {"out": Q}, "out: "),
        ((Q, K, K), {"lse": zeros(8, 7, dtype=np.float32)}, "lse: shape is [8, 7]"),
        ((Q, K, K), {"return_lse": "yes"}, "return_lse: got 'yes'"),
        (([1], K, K), {}, "q: "),
    ],
)
@pytest.mark.parametrize("method", ["gather", "overlap", "ulysses"])
def test_bad_runs(arrays: Any, options: dict[str, Any], message: str, method: str) -> None:
    """Nothing is sent, so the group stays of use."""

    def call(group: Group) -> None:
        prefill = ContextParallelPrefill(group, method=method)
        prefill.plan(np.array([0, 16]), 8, 2, 16)
        try:
            prefill.run(*arrays, **options)
        finally:
            assert not prefill.run(Q, K, K).any()

    error = one(call)
    assert isinstance(error, ArgumentError) and message in str(error), error


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qo_indptr": np.array([0, 17])}, "rank 1 has tokens 17, rank 0 has tokens 16"),
        ({"qo_indptr": np.array([0, 8, 16])}, "rank 1 has requests 2, rank 0 has requests 1"),
        ({"causal": False}, "rank 1 has causal False"),
        ({"sm_scale": 0.5}, "rank 1 has sm_scale 0.5"),
        ({"num_kv_heads": 4}, "rank 1 has num_kv_heads 4"),
        ({"q_data_type": "bfloat16"}, "rank 1 has dtype_q bfloat16"),
    ],
)
def test_ranks_that_differ(changed: dict[str, Any], message: str) -> None:
    error = one(lambda g: planning(**(changed if g.rank else {}))(g))
    assert isinstance(error, DistributedError) and message in str(error), error


def test_an_error_of_one_rank_is_known_to_all() -> None:
    def work(group: Group) -> Exception:
        with pytest.raises(cupyattn.CupyAttnError) as raised:
            planning(**({"head_dim_qk": 0} if group.rank else {}))(group)
        return raised.value

    first, second = simulate(2, work)
    assert isinstance(first, DistributedError) and "head_dim_qk: got 0" in str(first)
    assert isinstance(second, ArgumentError)


def test_many_requests_that_differ_are_found_too() -> None:
    first, second = np.arange(40) * 3, np.arange(40) * 3
    second[5] += 1
    error = one(lambda g: planning(qo_indptr=second if g.rank else first)(g))
    assert isinstance(error, DistributedError) and "rank 1 has lengths of digest" in str(error)

"""Every public call in one graph of torch.compile, with the answer of the eager call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.wrong_calls import Entry  # noqa: E402
from helpers.wrong_others import entries  # noqa: E402

import cupyattn  # noqa: E402
import cupyattn.integrations.torch as door  # noqa: E402
from cupyattn import array, dsa_indexer, flash_mla, msa_ops, sparse  # noqa: E402
from cupyattn.core.tracing import untraced  # noqa: E402
from cupyattn.errors import ArgumentError  # noqa: E402
from cupyattn.integrations.calls import CALLS  # noqa: E402

LIKE = array.view(torch.zeros(1), "like")
# What no graph has: offsets that only the data know; calls that plan, outside of graphs; what makes
# eight bits or takes the greatest scores, which engines call between graphs.
OUTSIDE = {"segment_packbits", "quantize_qkv", "rope_and_cache"}
OUTSIDE |= {"top_k_page_table_transform", "top_k_ragged_transform"}


def as_torch(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return array.from_numpy(x.copy(), LIKE)
    if isinstance(x, (list, tuple)) and any(isinstance(y, np.ndarray) for y in x):
        return type(x)(as_torch(y) for y in x)
    return x


def last_step(entry: Entry) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The call that launches, of a planned wrapper or a function, and its arguments."""
    given = {name: as_torch(x) for name, x in entry.arguments().items()}
    made: Any = None
    for index, (step, target) in enumerate(entry.steps):
        own = {n.partition(".")[2]: x for n, x in given.items() if n.partition(".")[0] == step}
        if index == len(entry.steps) - 1:
            if index and tuple(map(int, torch.__version__.split(".")[:2])) < door.RUNS_SINCE:
                pytest.skip("this torch has no runs of wrappers in graphs")
            return (getattr(made, target.__name__) if index else target), own
        made = target(**own) if index == 0 else [target(made, **own), made][1]
    raise AssertionError(entry.name)


def leaves(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [leaf for y in x for leaf in leaves(y)]
    return [] if x is None else [x]


ENTRIES = {entry.name: entry for entry in entries()}


def launches(entry: Entry) -> bool:
    """Whether the last step is what a graph is to have."""
    name = entry.steps[-1][1].__name__
    return entry.name not in OUTSIDE and name not in ("plan", "begin_forward", "forward")


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n for n, entry in ENTRIES.items() if launches(entry)])
def test_every_public_call_is_in_one_graph(name: str, backend: str) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        call, given = last_step(ENTRIES[name])
        wanted = leaves([call(**given), list(given.values())])
        call, given = last_step(ENTRIES[name])
        compiled = torch.compile(lambda **x: call(**x), backend=backend, fullgraph=True)
        found = leaves([compiled(**given), list(given.values())])
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and x.shape == y.shape
            np.testing.assert_array_equal(*(z.float().numpy() for z in (x, y)))


# Arguments that the calls' own operators do not take.
X = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(1))
LATENT = torch.randn(6, 2, 4, 576, generator=torch.Generator().manual_seed(2)).half()
POOL, TABLE = LATENT[:, :, :1], torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
LENS, LISTS = torch.tensor([3, 4], dtype=torch.int32), torch.arange(10, dtype=torch.int32)
PAGES = torch.randn(4, 2, 2, 4, 16, generator=torch.Generator().manual_seed(3))
FP8 = torch.float8_e4m3fn
POOL_OF_FP8 = POOL.to(FP8)


def rows_of(q: Any) -> Any:
    """Queries of latent attention that depend on q."""
    return LATENT[:2, :1] + q.mean().half()


MORE: dict[str, Callable[[Any], Any]] = {
    "xqa over latent keys": lambda q: cupyattn.xqa_batch_decode_with_kv_cache_mla(
        rows_of(q), POOL, None, 128, 512, 64, TABLE, LENS, 4
    ),
    "fp8 queries": lambda q: cupyattn.xqa_mla(
        rows_of(q).to(FP8), POOL_OF_FP8, POOL_OF_FP8, TABLE, LENS
    ),
    "fp8 queries, 16-bit keys": lambda q: cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        rows_of(q).to(FP8), POOL, None, 128, 512, 64, TABLE, LENS, 4
    ),
    "tables of K and V": lambda q: cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        rows_of(q), POOL, None, 128, 512, 64, TABLE[:, None].repeat(1, 2, 1), LENS, 4,
        uses_shared_paged_kv_idx=False, return_lse=True,
    ),
    "lists without lengths": lambda q: cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        rows_of(q), POOL, None, 128, 512, 64, LISTS.reshape(2, 1, 5), None, 4, 5
    ),
    "sparse prefill": lambda q: flash_mla.flash_mla_sparse_fwd(
        rows_of(q)[:, 0], POOL.reshape(-1, 1, 576), LISTS.reshape(2, 1, 5), 0.05
    ),
    "two latent caches": lambda q: flash_mla.flash_mla_with_kvcache(
        rows_of(q), POOL, None, None, 512, indices=LISTS.reshape(2, 1, 5), extra_k_cache=POOL[2:],
        extra_indices_in_kvcache=LISTS.reshape(2, 1, 5),
    ),
    "lists with their scores": lambda q: sparse.select(
        q[:, 0], X[:, :, 0], topk=2, block=1, values=torch.zeros(2, 4, 2), return_values=True
    ),
    "an index of a prompt": lambda q: dsa_indexer.dsa_indexer_topk(
        q.flatten(0, 1), X[:, :, 0].flatten(0, 1), X[..., 0].flatten(0, 1).contiguous(),
        5 * LISTS[:3], 5 * LISTS[:3], top_k=3,
    ),
    "blocks of msa": lambda q: msa_ops.msa_sparse_decode_attention(
        q[:, 0], X.flatten(0, 1), X.flatten(0, 1), LISTS[:1].reshape(1, 1, 1).repeat(4, 2, 1),
        cu_seqlens_k=5 * LISTS[:3], return_softmax_lse=True,
    ),
    "bias and a mask by head": lambda q: cupyattn.dot_product_attention(
        q, X, X, torch.arange(5.0), mask=X[:, :, :, :5].permute(0, 2, 1, 3).contiguous() > -0.5
    ),
    "expressions": lambda q: cupyattn.dot_product_attention(
        q, X, X, logits_transform="logit + b[head] + c", mask_fn="kv_idx <= q_idx + w",
        logits_params={"b": X[0, 0, :, 0].contiguous(), "c": 0.5, "w": 1}, return_residual=True,
    ),
    "one request": lambda q: cupyattn.single_prefill_with_kv_cache(
        q[0], X[0], X[0], mask_fn="kv_idx != 2", o_dtype=torch.float32, return_lse=True
    ),
    "scales in memory": lambda q: cupyattn.trtllm_batch_decode_with_kv_cache(
        q[:, 0], PAGES, None, TABLE, LENS, 4, torch.tensor([0.3]), torch.ones(1), kv_layout="NHD"
    ),
    "a merge into arrays": lambda q: cupyattn.merge_state(
        q[0], X[0, ..., 0], X[1], X[1, ..., 0], out=torch.empty(5, 4, 16), lse=torch.empty(5, 4)
    ),
    "an LSE to write": lambda q: cupyattn.single_decode_with_kv_cache(
        q[0, 0], X[0], X[0], lse=q[0, 0, :, 0].contiguous(), return_lse=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MORE)
@torch.no_grad()
def test_arguments_that_no_operator_takes_are_in_the_graph_too(name: str, backend: str) -> None:
    torch._dynamo.reset()
    call = MORE[name]
    compiled = torch.compile(lambda x: call(x * 2), backend=backend, fullgraph=True)
    for x, y in zip(leaves(compiled(X)), leaves(call(X * 2)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@torch.no_grad()
def test_a_run_with_arguments_that_its_operator_does_not_take() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < door.RUNS_SINCE:
        pytest.skip("this torch has no runs of wrappers in graphs")
    torch._dynamo.reset()
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20).byte())
    run = lambda q: wrapper.run(  # noqa: E731
        q[:, 0], PAGES, k_scale=torch.tensor([0.5]), return_lse=True
    )
    compiled = torch.compile(lambda q: run(q * 2), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"nothing is planned; call plan\(\) before the compiled"):
        compiled(X)
    torch._dynamo.reset()
    indptr, last = torch.tensor([0, 2, 3]), torch.tensor([1, 2])
    types = {"q_data_type": torch.float32, "o_data_type": torch.float16}
    wrapper.plan(indptr, torch.tensor([2, 0, 3]), last, 4, 4, 16, 2, **types)
    for x, y in zip(compiled(X), run(X * 2), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@torch.no_grad()
def test_numbers_of_rows_may_change() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = lambda x: cupyattn.packbits(x[:, 0, 0, 0] > 0, "little")  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (9, 17, 30):
        x = torch.randn(n, 2, 2, 2)
        assert torch.equal(compiled(x), call(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_grad_is_refused() -> None:
    torch._dynamo.reset()
    q = X[0].clone().requires_grad_()
    call = lambda x: cupyattn.single_prefill_with_kv_cache_return_lse(x, x, x)  # noqa: E731
    with pytest.raises(Exception, match="requires grad, and cupyattn has no backward pass"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    with pytest.raises(ArgumentError, match="requires grad"):
        call(q)


def test_runs_say_which_torch_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    @untraced
    def run(x: Any) -> Any:
        return x

    monkeypatch.setattr(door, "RUNS_SINCE", (99, 1))
    assert not door._has_runs(run)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"run\(\) .* is in graphs from torch 99\.1 on"):
        torch.compile(lambda x: run(x) + 1, backend="eager", fullgraph=True)(X)
    assert torch.equal(torch.compile(lambda x: run(x) + 1, backend="eager")(X), X + 1)


def test_no_public_call_is_left_out() -> None:
    """Each is in the test of all, or plans, or is known to stay outside."""
    named = {call.name.partition(".")[0] for call in CALLS} | OUTSIDE
    for name in cupyattn.__all__:
        value = getattr(cupyattn, name)
        if (
            inspect.ismodule(value)
            or not callable(value)
            or name in ("explain", "fast_decode_plan")
        ):
            continue
        if inspect.isclass(value):
            is_call = hasattr(value, "run")
            assert not is_call or named & {x.__name__ for x in value.__mro__}, name
        else:
            assert name in named, name

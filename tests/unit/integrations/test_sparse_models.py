"""MiniMax-M3's and QSA's functions as vLLM and SGLang call them, on CPU tensors."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import reference
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.integrations import sglang_sparse, substitutes, vllm_sparse

torch = pytest.importorskip("torch")

BLOCK, PAGE, DIM, HEADS, KV_HEADS, TOPK = 128, 128, 32, 8, 2, 3
LENS = [700, 300, 129]


def normal(*shape: int, seed: int = 0) -> Any:
    rng = np.random.default_rng((len(shape), *shape, seed))
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


class Batch:
    """Three requests over pages of 128 keys, with so many tokens each."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, count = tokens, sum(tokens)
        pages = [-(-n // PAGE) for n in LENS]
        order = np.random.default_rng(1).permutation(sum(pages))
        self.table = torch.full((3, max(pages)), 10**6, dtype=torch.int32)
        for request, n in enumerate(pages):
            first = sum(pages[:request])
            self.table[request, :n] = torch.from_numpy(order[first : first + n].astype(np.int32))
        self.cache = normal(sum(pages), KV_HEADS, PAGE, 2 * DIM)  # vLLM's
        self.index = normal(sum(pages), PAGE, DIM, seed=1)
        self.q, self.idx_q = normal(count, HEADS, DIM), normal(count, KV_HEADS, DIM, seed=1)
        self.lens = torch.tensor(LENS, dtype=torch.int32)
        self.indptr = torch.tensor(np.append(0, np.cumsum(tokens)), dtype=torch.int32)
        self.prefix = self.lens - torch.tensor(tokens, dtype=torch.int32)

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(token, its request, keys that it sees)."""
        token = 0
        for request, count in enumerate(self.tokens):
            for i in range(count):
                yield token, request, LENS[request] - (count - 1 - i)
                token += 1

    def rows(self, cache: Any, request: int) -> np.ndarray:
        """[keys, ...] of a request, of pages [pages, page, ...]."""
        pages = self.table[request, : -(-LENS[request] // PAGE)].long()
        return cache[pages].reshape(-1, *cache.shape[2:])[: LENS[request]].numpy()

    def chosen(self, init: int, local: int) -> np.ndarray:
        """[tokens, index heads, TOPK] blocks, ascending, -1 at the end."""
        lists = np.full((sum(self.tokens), KV_HEADS, TOPK), -1, np.int32)
        for token, request, seen in self.places():
            rows = self.rows(self.index, request)[:seen].astype(np.float64)
            for head in range(KV_HEADS):
                products = rows @ self.idx_q[token, head].numpy()
                starts = range(0, seen, BLOCK)
                score = np.array([products[b : b + BLOCK].max() for b in starts])
                score[:init], score[len(score) - local :] = np.inf, np.inf
                own = np.sort(np.argsort(-score, kind="stable")[:TOPK])
                lists[token, head, : own.size] = own
        return lists

    def attention(self, lists: np.ndarray, gate: np.ndarray | None = None) -> np.ndarray:
        """[tokens, HEADS, DIM] over blocks that lists [tokens, KV_HEADS, topk] name."""
        k, v = (x.transpose(1, 2) for x in self.cache.split(DIM, dim=-1))
        out, group = np.zeros(tuple(self.q.shape)), HEADS // KV_HEADS
        for token, request, seen in self.places():
            keys, values = self.rows(k, request), self.rows(v, request)
            for head in range(KV_HEADS):
                blocks = lists[token, head][lists[token, head] >= 0]
                at = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
                at, own = at[at < seen], slice(head * group, (head + 1) * group)
                own_keys, own_values = keys[at, head : head + 1], values[at, head : head + 1]
                q = self.q[token, own].numpy()[None]
                out[token, own] = reference.attention(q, own_keys, own_values)[0][0]
        return out


@pytest.mark.parametrize(("init", "local"), [(0, 1), (1, 1)])
@pytest.mark.parametrize("tokens", [[1, 1, 1], [2, 2, 2]])
def test_vllm_decode(tokens: list[int], init: int, local: int) -> None:
    batch, each = Batch(tokens), tokens[0]
    buffer = torch.full((len(batch.q) + 2, KV_HEADS, TOPK), 77, dtype=torch.int32)
    topk = vllm_sparse.minimax_m3_index_decode(
        batch.idx_q, batch.index, batch.table, batch.lens, max(LENS), TOPK, init, local, KV_HEADS,
        each, 4, out=buffer.transpose(0, 1),
    )  # fmt: skip
    assert tuple(topk.shape) == (KV_HEADS, len(batch.q), TOPK)
    lists = batch.chosen(init, local)
    np.testing.assert_array_equal(buffer[:-2], lists)
    assert (buffer[-2:] == 77).all()
    out = torch.empty_like(batch.q)
    vllm_sparse.minimax_m3_sparse_attn_decode(
        batch.q, batch.cache, topk, batch.table, batch.lens, KV_HEADS, DIM**-0.5, out, each
    )
    np.testing.assert_allclose(out, batch.attention(lists), atol=1e-5)
    with pytest.raises(UnsupportedError, match="score_out"):
        vllm_sparse.minimax_m3_index_decode(
            batch.idx_q, batch.index, batch.table, batch.lens, 1, TOPK, 0, 1, 2, each, 4,
            score_out=out,
        )  # fmt: skip
    with pytest.raises(ArgumentError, match="decode_query_len"):
        vllm_sparse.minimax_m3_sparse_attn_decode(
            batch.q, batch.cache, topk, batch.table, batch.lens, KV_HEADS, 1.0, out, 3
        )


def test_vllm_prefill() -> None:
    batch = Batch([5, 1, 9])
    score = vllm_sparse.minimax_m3_index_score(
        batch.idx_q, batch.index, batch.table, batch.indptr, batch.lens, batch.prefix, 9, max(LENS),
        KV_HEADS,
    )  # fmt: skip
    topk = vllm_sparse.minimax_m3_index_topk(score, batch.indptr, batch.prefix, 9, TOPK, 0, 1)
    lists = batch.chosen(0, 1)
    np.testing.assert_array_equal(topk.transpose(0, 1), lists)
    out = torch.empty_like(batch.q)
    vllm_sparse.minimax_m3_sparse_attn(
        batch.q, batch.cache, topk, batch.table, batch.indptr, batch.lens, batch.prefix, 9,
        KV_HEADS, DIM**-0.5, out,
    )  # fmt: skip
    np.testing.assert_allclose(out, batch.attention(lists), atol=1e-5)
    with pytest.raises(UnsupportedError, match="score: is an array"):
        vllm_sparse.minimax_m3_index_topk(out, batch.indptr, batch.prefix, 9, TOPK, 0, 1)
    scale = torch.ones(KV_HEADS, 100)
    with pytest.raises(UnsupportedError, match="only one scale"):
        vllm_sparse.minimax_m3_sparse_attn(
            batch.q, batch.cache, topk, batch.table, batch.indptr, batch.lens, batch.prefix, 9,
            KV_HEADS, 1.0, out, k_scale=scale, v_scale=scale,
        )  # fmt: skip


def test_vllm_qsa() -> None:
    """Chosen rows stand for 4 keys; keys behind the last whole row come besides."""
    batch, ratio, width = Batch([1, 2, 1]), 4, 8
    rows = normal(8, 64, 1, DIM, seed=2)
    table = torch.tensor([[0, 1, 2], [3, 4, 7], [5, 6, 7]], dtype=torch.int32)
    places = list(batch.places())
    own = torch.tensor([request for _, request, _ in places], dtype=torch.int32)
    visible = torch.tensor([seen // ratio for *_, seen in places], dtype=torch.int32)
    blocks = torch.empty(4, width // ratio, dtype=torch.int32)
    vllm_sparse.qsa_select_paged_decode(
        batch.idx_q, rows, table[own.long()], visible, width, ratio, 1, blocks
    )
    indices = torch.full((4, width + ratio), -1, dtype=torch.int32)
    for token, request, seen in places:
        index = rows[table[request].long()].reshape(-1, DIM)[: seen // ratio].double().numpy()
        score = np.maximum(index @ batch.idx_q[token].double().numpy().T, 0).sum(1)
        best = np.sort(np.argsort(-score, kind="stable")[: width // ratio])
        np.testing.assert_array_equal(blocks[token], best)
        at = (best[:, None] * ratio + np.arange(ratio)).reshape(-1)
        at = np.append(at, np.arange(seen // ratio * ratio, seen))
        indices[token, : at.size] = torch.from_numpy(at.astype(np.int32))
        indices[token, -1] = at.size
    gate = normal(4, HEADS * DIM, seed=3)
    k, v = batch.cache.transpose(1, 2).split(DIM, dim=-1)
    out = vllm_sparse.qsa_sparse_paged_attention(
        batch.q, k, v, indices, batch.table, own, False, output_gate=gate
    )
    weight = 1 / (1 + np.exp(-gate.numpy().reshape(4, HEADS, DIM)))
    for token, request, _ in places:
        at = indices[token, :-1][indices[token, :-1] >= 0].numpy()
        keys, values = batch.rows(k, request)[at], batch.rows(v, request)[at]
        want = reference.attention(batch.q[token].numpy()[None], keys, values)[0][0]
        np.testing.assert_allclose(out[token], want * weight[token], atol=1e-5)
    wide = torch.zeros(1, 1 << 25, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="too many"):
        vllm_sparse.qsa_sparse_paged_attention(
            batch.q, k, v, indices, wide, own, False, output_gate=gate
        )


@pytest.mark.parametrize("is_prefill", [False, True])
def test_sglang(is_prefill: bool) -> None:
    """Slots of keys by request, of which slot_ids are the batch's; lengths of 64 bits."""
    batch = Batch([3, 2, 1] if is_prefill else [1, 1, 1])
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in batch.cache.split(DIM, dim=-1))
    index = batch.index.flatten(0, 1)[:, None]
    to_token = torch.full((5, 768), 10**7, dtype=torch.int32)
    slot_ids = torch.tensor([4, 0, 2])
    for request, row in enumerate(slot_ids.tolist()):
        pages = batch.table[request, : -(-LENS[request] // PAGE)]
        slots = pages[:, None] * PAGE + torch.arange(PAGE)
        to_token[row, : slots.numel()] = slots.reshape(-1)
    lens = batch.lens.long()
    options: dict[str, Any] = {"disable_index_value": True, "score_type": "max"}
    if is_prefill:
        _, topk = sglang_sparse.flash_prefill_with_topk_index(
            batch.idx_q, index, None, None, to_token, slot_ids, batch.indptr, lens, batch.prefix, 3,
            700, 1, BLOCK, TOPK, 0, 1, page_size=PAGE, **options,
        )  # fmt: skip
        out = sglang_sparse.flash_prefill_with_gqa_share_sparse(
            batch.q, k, v, None, to_token, slot_ids, topk, 1, BLOCK, batch.indptr, lens,
            batch.prefix, 3,
        )  # fmt: skip
    else:
        _, topk, _ = sglang_sparse.flash_decode_with_topk_idx(
            batch.idx_q, None, index, None, to_token, lens, 700, slot_ids, BLOCK, TOPK, 0, 1,
            page_size=PAGE, **options,
        )  # fmt: skip
        out = sglang_sparse.flash_decode_with_gqa_share_sparse(
            batch.q, None, k, v, to_token, lens, slot_ids, BLOCK, topk, page_size=PAGE
        )
    lists = batch.chosen(0, 1)
    np.testing.assert_array_equal(topk.transpose(0, 1), lists)
    np.testing.assert_allclose(out, batch.attention(lists), atol=1e-5)


def test_what_sglang_is_refused() -> None:
    q, ids = normal(1, 2, DIM), torch.zeros(1, dtype=torch.int64)
    cache, table = normal(256, 2, DIM), torch.arange(256, dtype=torch.int32)[None]
    lists = torch.zeros(2, 1, 1, dtype=torch.int32)
    call = sglang_sparse.flash_decode_with_gqa_share_sparse
    given = (cache, cache, table, ids + 5, ids, BLOCK, lists)
    for named in ({"sink": q}, {"sink": None, "hisparse_slots": ids}):
        with pytest.raises(UnsupportedError, match="is not served here"):
            call(q, named.pop("sink"), *given, **named)
    with pytest.raises(UnsupportedError, match="q_scale: got 2"):
        call(q, None, *given, q_scale=2.0)
    score = sglang_sparse.flash_decode_with_topk_idx
    of_scores = (q, None, cache, None, table, ids + 5, 256, ids, BLOCK, 1, 0, 1)
    for named in ({}, {"disable_index_value": True, "score_type": "lse"}):
        with pytest.raises(UnsupportedError, match="score_type"):
            score(*of_scores, **named)
    with pytest.raises(UnsupportedError, match="use_dense_main_attn"):
        score(*of_scores, disable_index_value=True, use_dense_main_attn=True)


def ours(x: int) -> str:
    if x > 3:
        raise UnsupportedError("x: too large")
    return f"ours {x}"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose function `ours` another module takes by name."""
    name = "engine_of_substitutes"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .taker import ours\n")
    (tmp_path / name / "ops.py").write_text("def ours(x):\n    return f'theirs {x}'\n")
    (tmp_path / name / "taker.py").write_text("from .ops import ours\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(substitutes, "_asked", {})
    yield name
    for module in [x for x in sys.modules if x.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_functions_are_substituted(engine: str, is_loaded: bool) -> None:
    if is_loaded:
        importlib.import_module(engine)
    for _ in range(2):
        substitutes.substitute({f"{engine}.ops": [ours]})
    package = importlib.import_module(engine)
    for module in (package, package.ops, package.taker):
        assert module.ours(3) == "ours 3" and module.ours(4) == "theirs 4"
        assert module.ours.of_engine(1) == "theirs 1"


def test_a_function_that_an_engine_has_not(engine: str) -> None:
    def absent() -> None: ...

    substitutes.substitute({f"{engine}.ops": [absent], f"{engine}.none": [absent]})
    package = importlib.import_module(engine)
    assert not hasattr(package.ops, "absent") and package.ours(4) == "theirs 4"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{engine}.none")


def test_scores_that_we_refuse_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(**named: Any) -> str:
        return f"scores of {named['idx_q']}"

    def topk(score: Any, size: int) -> str:
        return f"{size} of {score}"

    def refuse(score: Any, size: int) -> Any:
        raise UnsupportedError("no kernel")

    made = substitutes.either(vllm_sparse.minimax_m3_index_score, score)
    module = type("Module", (), {"minimax_m3_index_score": staticmethod(made)})
    monkeypatch.setitem(sys.modules, vllm_sparse._INDEX, module)  # type: ignore[arg-type]
    call = vllm_sparse.JOINS["minimax_m3_index_topk"](refuse, topk)
    asked = made("q", 1, 2, 3, 4, 5, 6, 7, 8)
    assert call(asked, 3) == "3 of scores of q" and call("s", 3) == "3 of s"


@pytest.mark.slow
@pytest.mark.parametrize("module", [vllm_sparse, sglang_sparse])
def test_arguments_are_those_of_an_installed_engine(module: Any) -> None:
    """Their names and defaults, in order, by the engine's sources."""
    folder = os.environ.get("CUPYATTN_ENGINES", "")
    for name, functions in module.FUNCTIONS.items():
        path = Path(folder, *name.split(".")).with_suffix(".py")
        if not folder or not path.exists():
            pytest.skip("no engine in CUPYATTN_ENGINES")
        nodes = {x.name: x for x in ast.parse(path.read_text()).body if hasattr(x, "name")}
        for function in functions:
            found, parameters = nodes[function.__name__].args, []
            plain = [*found.args, *found.kwonlyargs]
            defaults = [None] * (len(found.args) - len(found.defaults)) + [*found.defaults]
            for argument, default in zip(plain, [*defaults, *found.kw_defaults], strict=True):
                parameters.append((argument.arg, default and ast.unparse(default)))
            own = inspect.signature(function).parameters.values()
            assert parameters == [
                (x.name, None if x.default is x.empty else repr(x.default)) for x in own
            ] or _as_text(parameters) == _as_text((x.name, x.default) for x in own)


def _as_text(parameters: Any) -> list[tuple[str, str]]:
    """With one kind of quotes."""
    return [
        (name, "" if x is None or x is inspect.Parameter.empty else str(x).strip("'\""))
        for name, x in parameters
    ]

"""The serving backend over keys that simulated ranks share: steps as a whole engine has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupyattn import reference
from cupyattn.distributed import Group, simulate
from cupyattn.errors import DistributedError, UnsupportedError
from cupyattn.serving import (
    BackendConfig,
    BatchInfo,
    ContextParallelBackend,
    ForwardMode,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from cupyattn.shares import get_share_slots

HEADS, KV_HEADS, DIM, MAX_LEN = 12, 2, 32, 64


@dataclass(frozen=True)
class Case:
    """Requests that are extended by chunks of these lengths, and decode. run: as in KeyShare."""

    size: int
    run: int = 1
    page_size: int = 4
    window: int = -1
    use_mla: bool = False
    replicated: bool = False
    chunks: tuple[tuple[int, ...], ...] = ((9, 1, 20), (3, 0, 11), (1, 1, 1), (1, 1, 1))


class Engine:
    """A rank's pool and tables. Pages stand for page_size * ranks tokens of a request."""

    def __init__(self, case: Case, group: Group) -> None:
        self.case, self.group = case, group
        dims = (576, 512) if case.use_mla else (DIM, DIM)
        self.config = BackendConfig(
            HEADS,
            1 if case.use_mla else KV_HEADS,
            dims[0],
            v_head_dim=dims[1],
            page_size=case.page_size,
            max_context_len=MAX_LEN,
            q_dtype="float16",
            use_mla=case.use_mla,
            sliding_window_size=None if case.window < 0 else case.window,
        )
        requests = len(case.chunks[0])
        self.table = np.zeros((requests, MAX_LEN), np.int32)
        pages = -(-MAX_LEN // case.page_size)
        order = np.random.default_rng(0).permutation(requests * pages).reshape(requests, pages)
        slots = order[:, :, None] * case.page_size + np.arange(case.page_size)
        self.table[...] = slots.reshape(requests, -1)[:, :MAX_LEN]
        num_slots = requests * pages * case.page_size
        if case.use_mla:
            self.pool: Any = MLATokenToKVPool(num_slots, 512, 64, 1, self.table, dtype="float16")
        else:
            self.pool = MHATokenToKVPool(num_slots, KV_HEADS, DIM, 1, self.table, dtype="float16")
        self.layer = LayerSpec(
            0,
            softmax_scale=dims[0] ** -0.5,
            window_size=(case.window, 0 if case.window >= 0 else -1),
        )
        self.backend = ContextParallelBackend(
            group,
            self.config,
            self.pool,
            self.table,
            max_num_tokens=64,
            cp_kv_cache_interleave_size=case.run,
            q_is_replicated=case.replicated,
        )

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        share = self.backend.share
        index = get_share_slots(positions, share.cp_world_size, share.cp_rank, self.case.run)
        return np.where(index < 0, -1, self.table[rows, np.maximum(index, 0)]).astype(np.int32)


def tokens_of(case: Case) -> tuple[list[np.ndarray], ...]:
    """q, k, v of all tokens of each request."""
    rng = np.random.default_rng(7)
    lens = np.sum(case.chunks, axis=0)
    kv = (1, 576) if case.use_mla else (KV_HEADS, DIM)
    q = [rng.standard_normal((n, HEADS, kv[1])).astype(np.float16) for n in lens]
    k = [rng.standard_normal((n, *kv)).astype(np.float16) for n in lens]
    v = [rng.standard_normal((n, *kv)).astype(np.float16) for n in lens]
    return q, k, [x[..., :512] for x in k] if case.use_mla else v


def serve(case: Case, group: Group) -> list[np.ndarray]:
    """The outputs of all heads, step by step."""
    engine = Engine(case, group)
    backend, own = engine.backend, HEADS // group.size
    q, k, v = tokens_of(case)
    done, outputs = np.zeros(len(q), np.int64), []
    for counts in np.array(case.chunks):
        ends = done + counts
        spans = [slice(a, b) for a, b in zip(done, ends, strict=True)]
        rows = np.repeat(np.arange(len(q)), counts)
        places = np.concatenate([np.arange(a, b) for a, b in zip(done, ends, strict=True)])
        slots = engine.slots(rows, places)
        new_k, new_v, new_q = (
            np.concatenate([x[i][span] for i, span in enumerate(spans)]) for x in (k, v, q)
        )
        is_decode = (counts == 1).all()
        batch = BatchInfo(
            ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            np.arange(len(q), dtype=np.int32),
            ends.astype(np.int32),
            seq_lens_host=ends.astype(np.int32),
            extend_seq_lens=None if is_decode else counts.astype(np.int32),
            extend_seq_lens_host=None if is_decode else counts.astype(np.int32),
        )
        backend.init_forward_metadata(batch)
        backend.write_kv(engine.layer, slots, new_k, None if case.use_mla else new_v)
        heads = slice(None) if case.replicated else slice(group.rank * own, (group.rank + 1) * own)
        given = np.ascontiguousarray(new_q[:, heads])
        out, lse = backend.forward(given, engine.layer, return_lse=True, lse_layout="th")
        again = backend.forward(given, engine.layer)
        np.testing.assert_array_equal(out.view(np.uint16), again.view(np.uint16))
        assert lse.shape == out.shape[:2]
        outputs.append(backend.gather_output(out))
        done = ends
    return outputs


CASES = [
    Case(1),
    Case(2),
    Case(2, run=4),
    Case(3, run=2, window=6),
    Case(2, window=11, page_size=1),
    Case(4, page_size=8, run=8, replicated=True),
    Case(2, use_mla=True),
    Case(3, use_mla=True, run=4, page_size=16, replicated=True),
]


@pytest.mark.parametrize("case", CASES)
def test_steps_of_an_engine(case: Case) -> None:
    ranks = simulate(case.size, lambda group: serve(case, group))
    for outputs in ranks[1:]:  # the same bits on all ranks
        for x, y in zip(outputs, ranks[0], strict=True):
            np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))
    q, k, v = tokens_of(case)
    done = np.zeros(len(q), np.int64)
    for counts, out in zip(np.array(case.chunks), ranks[0], strict=True):
        first = 0
        for i, count in enumerate(counts):
            end = done[i] + count
            wanted, _ = reference.attention(
                q[i][done[i] : end],
                k[i][:end],
                v[i][:end],
                causal=True,
                window_left=case.window,
            )
            got = out[first : first + count].astype(np.float64)
            np.testing.assert_allclose(got, wanted, 1e-3, 1e-3)
            first += count
        done += counts


def test_graph_memory_keeps_its_addresses() -> None:
    def work(group: Group) -> None:
        engine = Engine(Case(2), group)
        backend = engine.backend
        backend.init_graph_state(4, 4)
        meta = backend.init_forward_metadata_capture(3, 3, ForwardMode.DECODE)
        first = meta.main.whole_lens
        for length in (5, 9):
            lens = np.full(3, length, np.int32)
            rows = np.arange(3, dtype=np.int32)
            meta = backend.init_forward_metadata_replay(
                3, BatchInfo(ForwardMode.DECODE, rows, lens)
            )
            assert meta.main.whole_lens is first and first.tolist() == [length] * 3
            count = backend.share.count(length)
            assert meta.main.cache_seqlens.tolist() == [count] * 3

    simulate(2, work)


@pytest.mark.parametrize(
    "given",
    [
        {"topk": 2},
        {"num_draft_tokens": 3},
        {"num_draft_steps": 2},
        {"attention_chunk_size": 8},
        {"has_encoder": True},
        {"is_hybrid": True},
    ],
)
def test_configurations_that_need_other_ranks_keys_are_refused(given: dict[str, Any]) -> None:
    def work(group: Group) -> None:
        table = np.zeros((2, 64), np.int32)
        pool = MHATokenToKVPool(64, KV_HEADS, DIM, 1, table, dtype="float16")
        config = BackendConfig(HEADS, KV_HEADS, DIM, max_context_len=64, **given)
        with pytest.raises(UnsupportedError, match=next(iter(given))):
            ContextParallelBackend(group, config, pool, table, max_num_tokens=4)

    simulate(2, work)


def test_modes_and_ranks_that_differ_are_refused() -> None:
    def work(group: Group) -> None:
        engine = Engine(Case(2), group)
        batch = BatchInfo(ForwardMode.DRAFT_DECODE, np.zeros(1, np.int32), np.ones(1, np.int32))
        with pytest.raises(UnsupportedError, match=r"mode: got .*DRAFT_DECODE"):
            engine.backend.init_forward_metadata(batch)
        with pytest.raises(DistributedError, match="page_size 5, rank 0 has page_size 4"):
            Engine(Case(2, page_size=4 + group.rank), group)

    simulate(2, work)

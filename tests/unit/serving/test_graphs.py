"""Graph mode on CPU arrays: replays write the memory that was captured, and answer as eager steps
do, bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import serving_engine as engine
from helpers.serving_cases import Case

from cupyattn.errors import ArgumentError
from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    DraftInfo,
    ForwardMode,
    LayerSpec,
    MultiStepDraftBackend,
)

KINDS = "decode", "draft chain", "draft beams", "verify chain", "verify tree", "draft extend"


def addresses(backend: AttentionBackend) -> list[int]:
    return [
        x.ctypes.data for store in backend._graph_stores.values() for x in store._arrays.values()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_replays_are_eager_steps(kind: str) -> None:
    for seed in range(12):
        case = Case(seed, kind=kind)
        if not case.bs:
            continue
        case.pad(seed % 3)
        backend, meta = case.capture()
        before = addresses(backend)
        backend.init_forward_metadata_replay(case.bs, case.batch_of_one_key())
        batch = case.batch()
        backend.init_forward_metadata_replay(case.bs, batch)
        assert addresses(backend) == before
        q, layer = case.queries(), case.layer()
        out, lse = backend.forward(q, layer, meta, return_lse=True, lse_layout="th")
        case.check(q, out, lse)
        eager = case.backend()
        eager.init_forward_metadata(batch)
        again, lse_again = eager.forward(q, layer, return_lse=True, lse_layout="th")
        rows = len(case.paths())
        assert out[:rows].tobytes() == again[:rows].tobytes(), f"seed {seed}"
        assert lse[:rows].tobytes() == lse_again[:rows].tobytes()


def test_memory_is_that_of_configured_modes() -> None:
    table = engine.slots(1)
    sizes = {}
    for name, changes in {
        "decode": {},
        "chunks": {"attention_chunk_size": 16},
        "drafts": {"topk": 4, "num_draft_steps": 4, "num_draft_tokens": 8},
        "windows": {"topk": 4, "num_draft_tokens": 8, "sliding_window_size": 15},
    }.items():
        config = BackendConfig(1, 1, 8, max_context_len=64, **changes)
        backend = AttentionBackend(config, None, table)
        backend.init_graph_state(4, 32)
        sizes[name] = backend.graph_num_bytes() // 4
    # Lengths and offsets of 4 requests: kernels read req_to_token itself.
    assert sizes["decode"] == 8
    # A chunk of each: rows, their first one, keys, their first one.
    assert sizes["chunks"] == 8 + 16
    decode, beams, verify, extend = 8, 8 + 4 * 4 * 4, 8 + 32, 8 + 5
    assert sizes["drafts"] == decode + beams + verify + extend
    assert sizes["windows"] == decode + extend + verify + 32 * 16 + 32


def test_graph_memory_of_a_large_engine_is_small() -> None:
    """SGLang's backend has seven tables [bs, context] in this configuration, and one [bs * drafts,
    context] where layers have a window."""
    config = BackendConfig(
        *(1, 1, 8), max_context_len=131072, topk=4, num_draft_steps=4, num_draft_tokens=8
    )
    table = np.broadcast_to(np.zeros(1, np.int32), (4, 131072)).copy()
    backend = AttentionBackend(config, None, table)
    backend.init_graph_state(160, 1280)
    assert backend.graph_num_bytes() < 100_000 < 0.2 * 7 * 160 * 131072 * 4


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("page", [1, 4])
def test_steps_of_a_draft_share_one_store(topk: int, page: int) -> None:
    rng = np.random.default_rng(3)
    steps, lens, req = 4, np.array([9, 14]), np.array([2, 5])
    config = BackendConfig(
        *(2, 1, 16), page_size=page, max_context_len=64, q_dtype="float32", topk=topk,
        num_draft_steps=steps, sliding_window_size=5, attention_chunk_size=8,
    )  # fmt: skip
    table = engine.slots(page)
    k, v = rng.standard_normal((2, 1000, 1, 16)).astype(np.float32)

    class Pool:
        def get_kv_buffer(self, layer_id: int) -> Any:
            return k, v

    loc = rng.permutation(200)[: 2 * topk * steps]
    batch = BatchInfo(ForwardMode.DRAFT_DECODE, req, lens, lens, out_cache_loc=loc)
    batch.draft = DraftInfo()
    together = MultiStepDraftBackend(config, Pool(), table)
    together.init_graph_state(4, 4 * topk)
    captured = together.init_forward_metadata_capture(2)
    metas = [together.init_forward_metadata(batch), captured]
    together.init_forward_metadata_replay(2, batch)
    assert together.graph_num_bytes() > 0
    layers = LayerSpec(), LayerSpec(window_size=(5, 0)), LayerSpec(attention_chunk=8)
    for step in range(steps - 1):
        alone = AttentionBackend(config, Pool(), table, step=step)
        alone.init_forward_metadata(batch)
        q = rng.standard_normal((2 * topk, 2, 16)).astype(np.float32)
        for layer in layers:
            wanted = alone.forward(q, layer)
            for meta in metas:
                found = together.backends[step].forward(q, layer, meta[step])
                assert found.tobytes() == wanted.tobytes()


def test_a_graph_of_a_draft_worker_under_sglangs_names() -> None:
    """Replays with fewer requests than were captured: padded ones have no slots of drafts."""
    backends = engine.multi_step(3, topk=2)
    backends.init_cuda_graph_state(4, 8)
    spec = SimpleNamespace()
    batch = engine.batch("DECODE", [1, 1], [0, 0], spec_info=spec)
    backends.init_forward_metadata_capture_cuda_graph(batch)
    first = backends.attn_backends[1].core.forward_metadata
    for lens, req, loc in (
        ([3, 5], [2, 0], np.arange(200, 212)),
        ([7, 1], [1, 0], np.arange(300, 306)),
    ):
        batch = engine.batch("DECODE", lens, req, spec_info=spec, out_cache_loc=loc)
        backends.init_forward_metadata_replay_cuda_graph(batch, 2)
        backend = backends.attn_backends[1]
        assert backend.core.forward_metadata is first
        assert backend.forward_metadata.cache_seqlens_int32.tolist() == lens
        expand = backend.forward_metadata_spec_decode_expand
        assert expand.cache_seqlens_int32.tolist() == [2, 2, 2, 2]
        wanted = np.zeros((4, 2), int)
        own = loc.reshape(-1, 3)[:, :2]
        wanted[: len(own)] = own
        assert expand.page_table.tolist() == wanted.tolist()


def test_beams_of_a_shared_store_change_parents_at_each_step() -> None:
    """A step's metadata over the memory of all steps is that of a backend of its own, eager and in
    the memory of graphs; the columns behind it name any beams."""
    rng = np.random.default_rng(4)
    bs, topk, steps = 2, 3, 4
    table = engine.slots(1)
    config = BackendConfig(1, 1, 8, max_context_len=64, topk=topk, num_draft_steps=steps)
    together = MultiStepDraftBackend(config, None, table)
    together.init_graph_state(bs, bs * topk)
    rows, lens = np.array([2, 0]), np.array([5, 3])
    slots = rng.permutation(900)[: bs * topk * steps].reshape(bs, topk, steps)
    beams = np.zeros((bs * topk, steps), np.int32)
    for step in range(steps - 1):
        beams[:, : step + 1] = rng.integers(0, topk, (bs * topk, step + 1))
        draft = DraftInfo(step, beam_rows=beams)
        batch = BatchInfo(
            ForwardMode.DRAFT_DECODE, rows, lens, out_cache_loc=slots, draft=draft
        )  # fmt: skip
        alone = AttentionBackend(config, None, table, step=step).init_forward_metadata(batch)
        assert alone.expand is not None
        for in_graph in (False, True):
            shared = together.init_forward_metadata_step(step, batch, in_graph=in_graph)
            assert shared is together.backends[step].forward_metadata
            assert shared.expand is not None and shared.step == step
            for name in ("cache_seqlens", "page_table"):
                one, other = (getattr(x.expand, name) for x in (shared, alone))
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(shared.main.cache_seqlens, lens)
    with pytest.raises(ArgumentError, match="step: got 3; wanted one of the 3 prepared steps"):
        together.init_forward_metadata_step(3, batch)


def test_the_host_may_know_but_a_bound_of_new_tokens() -> None:
    case = Case(11, kind="draft extend")
    batch = case.batch()
    batch.extend_seq_lens = case.q_lens
    batch.extend_seq_lens_host, batch.max_extend_len = None, 4
    backend, layer = case.backend(), case.layer()
    backend.init_forward_metadata(batch)
    case.answer_and_check(backend, layer)
    batch.extend_seq_lens = None
    with pytest.raises(ArgumentError, match="extend_seq_lens_host: got None"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16"])
def test_dtypes_of_a_configuration_are_names(dtype: Any) -> None:
    config = BackendConfig(1, 1, 8, q_dtype=dtype)
    assert config.q_dtype == config.kv_dtype == "float16"

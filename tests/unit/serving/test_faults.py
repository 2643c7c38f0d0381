"""One test for each fault of SGLang's backend that the specification lists (§4): ours has none of
them. Each compares with a dense oracle, through SGLang's own names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import serving_engine as engine
from helpers.serving_cases import LatentCase, dense_row
from helpers.serving_engine import TREE_A, TREE_B, flat_mask

from cupyattn.errors import ArgumentError

HEADS, KV_HEADS, DIM = 4, 2, 16
DECODE, VERIFY = "DECODE", "TARGET_VERIFY"


class World:
    """A pool with keys and values in every slot, and a backend over it."""

    def __init__(self, page: int = 1, dtype: Any = np.float32, **changes: Any) -> None:
        rng = np.random.default_rng(4)
        self.dim_v = changes.pop("dim_v", DIM)
        size = 1000 if page == 1 else 400
        self.k, self.v = (
            rng.standard_normal((size, KV_HEADS, d)).astype(dtype) for d in (DIM, self.dim_v)
        )
        self.layer = engine.layer(0, HEADS, KV_HEADS, DIM, v_head_dim=self.dim_v, scaling=0.3)
        self.pool = SimpleNamespace(get_kv_buffer=lambda layer_id: (self.k, self.v))
        steps, step = changes.pop("steps", 0), changes.pop("step", 0)
        for name in ("sliding_window_size", "use_irope"):
            if name in changes:
                setattr(self.layer, name, changes[name])
        changes.pop("use_irope", None)
        if changes.get("is_hybrid"):
            self._divide(size, page)
        self.backend = engine.backend(page, step, steps, token_to_kv_pool=self.pool, **changes)
        self.table = engine.slots(page)
        self.window = changes.get("sliding_window_size")
        self.chunk = changes.get("attention_chunk_size") if hasattr(self.layer, "use_irope") else 0
        self.sinks: np.ndarray | None = None
        self.rng = rng

    def _divide(self, size: int, page: int) -> None:
        """Keep the layer's keys in a second pool, whose pages are in another order."""
        pages = np.random.default_rng(9).permutation(size // page)
        mapping = (pages[:, None] * page + np.arange(page)).reshape(-1)
        moved = tuple(np.empty_like(x) for x in (self.k, self.v))
        for x, own in zip(moved, (self.k, self.v), strict=True):
            x[mapping] = own
        self.pool.full_to_swa_index_mapping = mapping
        self.pool.layers_mapping = {0: (0, True)}
        self.pool.get_kv_buffer = lambda layer_id: moved

    def attend(self, batch: Any, rows: int, dtype: Any = np.float32, scale: float = 1.0) -> Any:
        self.q = (scale * self.rng.standard_normal((rows, HEADS, DIM))).astype(dtype)
        self.backend.init_forward_metadata(batch)
        return self.forward(batch)

    def forward(self, batch: Any) -> np.ndarray:
        out = self.backend.forward_extend(
            *(self.q.reshape(len(self.q), HEADS * DIM), None, None, self.layer, batch),
            sinks=self.sinks,
        )
        return out.reshape(-1, HEADS, self.dim_v)

    def check(self, out: np.ndarray, paths: list[Any], k: Any = None, v: Any = None) -> None:
        """paths: the slots of the keys up to its own, of each row."""
        k, v = self.k if k is None else k, self.v if v is None else v
        for row, path in enumerate(paths):
            wanted, _ = dense_row(
                *(self.q[row], k[path], v[path]),
                scale=0.3,
                softcap=self.layer.logit_cap,
                window=-1 if self.window is None else self.window,
                chunk=self.chunk or 0,
                sinks=self.sinks,
            )
            np.testing.assert_allclose(out[row], wanted, rtol=1e-4, atol=1e-5, err_msg=str(row))

    def prefix(self, row: int, n: int) -> np.ndarray:
        return self.table[row, :n]


LENS, REQ = [7, 11], [2, 0]
SLOTS = np.arange(500, 512)  # of beams: [2 requests, 2 beams, 3 steps]


def beams(page: int = 1) -> tuple[Any, np.ndarray]:
    """A batch of draft decode with two beams, in step 1 of 3, and its slots."""
    slots = SLOTS if page == 1 else SLOTS - 200
    batch = engine.batch(DECODE, LENS, REQ, spec_info=SimpleNamespace(), out_cache_loc=slots)
    return batch, slots.reshape(2, 2, 3)


def beam_paths(world: World, slots: np.ndarray) -> list[np.ndarray]:
    return [
        np.concatenate([world.prefix(REQ[b], LENS[b]), slots[b, i, :2]])
        for b in range(2)
        for i in range(2)
    ]


def trees() -> Any:
    spec = SimpleNamespace(custom_mask=flat_mask(LENS, TREE_A, TREE_B), positions=np.zeros(8))
    return engine.batch(VERIFY, LENS, REQ, spec_info=spec)


def tree_paths(world: World) -> list[np.ndarray]:
    found = []
    for b, tree in enumerate((TREE_A, TREE_B)):
        for row in tree.split("/"):
            tokens = LENS[b] + np.flatnonzero([int(x) for x in row])
            path = world.table[REQ[b]]
            found.append(np.concatenate([path[: LENS[b]], path[tokens]]))
    return found


def chain_paths(world: World, lens: list[int], counts: list[int]) -> list[np.ndarray]:
    """Of the last `counts` tokens of `lens`."""
    return [
        world.prefix(REQ[b], lens[b] - counts[b] + i + 1)
        for b in range(2)
        for i in range(counts[b])
    ]


@pytest.mark.parametrize("form", ["mask", "expand"])
def test_fault_1_sinks_are_counted_once(form: str) -> None:
    world = World(topk=2, steps=3, step=1)
    world.sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    batch, slots = beams()
    world.check(world.attend(batch, 4), beam_paths(world, slots))
    world = World(topk=2, num_draft_tokens=4, tree_form=form)
    world.sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    world.check(world.attend(trees(), 8), tree_paths(world))


@pytest.mark.parametrize("page", [1, 4])
def test_fault_2_windows_of_beams(page: int) -> None:
    world = World(page, topk=2, steps=3, step=1, sliding_window_size=2)
    batch, slots = beams(page)
    world.check(world.attend(batch, 4), beam_paths(world, slots))


@pytest.mark.parametrize("chunk", [4, 8])
def test_fault_3_chunks_of_beams(chunk: int) -> None:
    world = World(topk=2, steps=3, step=1, attention_chunk_size=chunk, use_irope=True)
    batch, slots = beams()
    world.check(world.attend(batch, 4), beam_paths(world, slots))


@pytest.mark.parametrize("mode", ["MIXED", "DRAFT_EXTEND", "EXTEND"])
def test_fault_4_chunks_are_on_in_every_mode(mode: str) -> None:
    world = World(attention_chunk_size=4, use_irope=True, num_draft_tokens=4)
    counts = [3, 1]
    out = world.attend(engine.batch(mode, LENS, REQ, extend=counts), 4)
    world.check(out, chain_paths(world, LENS, counts))


@pytest.mark.parametrize("mode", [DECODE, "DRAFT", VERIFY, "DRAFT_EXTEND"])
def test_fault_4_chunks_are_on_in_graphs(mode: str) -> None:
    is_draft = mode == "DRAFT"
    world = World(
        attention_chunk_size=4, use_irope=True, topk=1, num_draft_tokens=3,
        steps=2 if is_draft else 0, step=1 if is_draft else 0,
    )  # fmt: skip
    name = SimpleNamespace(name=DECODE if is_draft else mode)
    counts = {DECODE: [1, 1], "DRAFT": [1, 1], VERIFY: [3, 3], "DRAFT_EXTEND": [2, 1]}[mode]
    spec = (
        None
        if mode == DECODE
        else SimpleNamespace(
            accept_length=np.array(counts), accept_length_cpu=[x - 1 for x in counts]
        )
    )
    core = world.backend
    core.init_cuda_graph_state(4, 12)
    req, lens = np.array(REQ), np.array(LENS)
    tokens = 6 if mode in (VERIFY, "DRAFT_EXTEND") else 2
    core.init_forward_metadata_capture_cuda_graph(2, tokens, req, lens, None, name, spec)
    core.init_forward_metadata_replay_cuda_graph(2, req, lens, 18, None, name, spec, lens)
    world.q = world.rng.standard_normal((sum(counts), HEADS, DIM)).astype(np.float32)
    extra = {"DRAFT": 2, VERIFY: 3}.get(mode, 0)
    ends = [n + extra for n in LENS]
    world.check(world.forward(engine.batch(DECODE, LENS, REQ)), chain_paths(world, ends, counts))


def test_fault_5_chunks_of_pages_have_page_ids() -> None:
    """T20: SGLang's table of this is [[84], [85], [5], [6]]."""
    backend = engine.backend(4, attention_chunk_size=4)
    backend.init_forward_metadata(engine.batch("EXTEND", [6, 9], [2, 0], extend=[4, 5]))
    local = backend.forward_metadata.local_attn_metadata
    assert local.local_block_table.tolist() == [[21], [22], [2], [3]]
    assert local.local_query_start_loc.tolist() == [0, 2, 4, 8, 9]
    assert local.local_seqused_k.tolist() == [4, 2, 4, 1]
    world = World(4, attention_chunk_size=4, use_irope=True)
    out = world.attend(engine.batch("EXTEND", LENS, REQ, extend=[4, 5]), 9)
    world.check(out, chain_paths(world, LENS, [4, 5]))


@pytest.mark.parametrize("options", [{"attention_chunk_size": 4}, {"sliding_window_size": 3}])
@pytest.mark.parametrize("page", [1, 4])
def test_fault_6_slots_are_translated_before_they_become_pages(
    page: int, options: dict[str, int]
) -> None:
    more = {"use_irope": True} if "attention_chunk_size" in options else {}
    world = World(page, is_hybrid=True, **options, **more)
    world.check(world.attend(engine.batch(DECODE, LENS, REQ), 2), chain_paths(world, LENS, [1, 1]))
    out = world.attend(engine.batch("EXTEND", LENS, REQ, extend=[5, 3]), 8)
    world.check(out, chain_paths(world, LENS, [5, 3]))


@pytest.mark.parametrize("form", ["mask", "expand"])
def test_fault_7_drafts_over_pages(form: str) -> None:
    world = World(4, topk=2, num_draft_tokens=4, tree_form=form)
    world.check(world.attend(trees(), 8), tree_paths(world))
    world = World(4, topk=2, steps=3, step=1)
    batch, slots = beams(4)
    world.check(world.attend(batch, 4), beam_paths(world, slots))


def test_fault_8_chunks_never_shrink() -> None:
    """T21: SGLang rounds a chunk of 8 over 7 keys down to 4."""
    backend = engine.backend(4, attention_chunk_size=8)
    backend.init_forward_metadata(engine.batch("EXTEND", [7], [0], extend=[7]))
    local = backend.forward_metadata.local_attn_metadata
    assert local.local_query_start_loc.tolist() == [0, 7]
    assert local.local_seqused_k.tolist() == [7]


@pytest.mark.parametrize("what", ["expand", "beams", "window", "chunk"])
def test_fault_9_scales_fit_every_pass(what: str) -> None:
    e4m3 = ml_dtypes.float8_e4m3fn
    named: dict[str, Any] = {
        "expand": {"topk": 2, "num_draft_tokens": 4, "tree_form": "expand"},
        "beams": {"topk": 2, "steps": 3, "step": 1},
        "window": {"topk": 2, "num_draft_tokens": 4, "sliding_window_size": 3},
        "chunk": {"attention_chunk_size": 4, "use_irope": True},
    }[what]
    world = World(dtype=e4m3, **named)
    # As SGLang has them: one number, expanded to [bs, kv_heads] without memory.
    world.layer.k_scale = np.broadcast_to(np.array([0.7], np.float32), (2, KV_HEADS))
    world.layer.v_scale = np.broadcast_to(np.array([1.3], np.float32), (2, KV_HEADS))
    k, v = world.k.astype(np.float64) * 0.7, world.v.astype(np.float64) * 1.3
    if what == "beams":
        batch, slots = beams()
        out, paths = world.attend(batch, 4), beam_paths(world, slots)
    elif what == "chunk":
        out = world.attend(engine.batch("EXTEND", LENS, REQ, extend=[5, 3]), 8)
        paths = chain_paths(world, LENS, [5, 3])
    else:
        out, paths = world.attend(trees(), 8), tree_paths(world)
    world.check(out, paths, np.float32(k).astype(np.float64), v)


def test_fault_10_queries_are_not_cast_to_fp8() -> None:
    """A query beyond e4m3's 448 would become a NaN."""
    world = World(dtype=ml_dtypes.float8_e4m3fn)
    out = world.attend(engine.batch(DECODE, LENS, REQ), 2, scale=600.0)
    assert np.abs(world.q).max() > 448 and np.isfinite(out).all()
    world.check(out, chain_paths(world, LENS, [1, 1]))


def test_fault_11_fp8_latent_pools_have_their_scale() -> None:
    """And absorbed layers their sinks, which is a part of fault 13."""
    cases = [LatentCase(seed, kind="decode") for seed in range(200)]
    found = [case for case in cases if case.has_scales and case.sinks is not None and case.bs]
    assert found
    for case in found:
        case.run()


def test_fault_12_halves_are_merged_before_they_are_rounded() -> None:
    bfloat16 = ml_dtypes.bfloat16
    world = World(dtype=bfloat16, topk=2, steps=3, step=1)
    batch, slots = beams()
    out = world.attend(batch, 4, bfloat16)
    for row, path in enumerate(beam_paths(world, slots)):
        exact, _ = dense_row(
            *(world.q[row], world.k[path], world.v[path]),
            **{"scale": 0.3, "softcap": 0.0, "window": -1, "chunk": 0, "sinks": None},
        )
        # One rounding to 8 bits.
        bound = np.abs(exact) * 2.0**-8 * 1.01 + 1e-6
        assert (np.abs(out[row].astype(np.float64) - exact) <= bound).all()
        assert (out[row] == exact.astype(bfloat16)).mean() > 0.97


def test_fault_13_values_of_another_head_dim() -> None:
    world = World(dim_v=24)
    world.check(world.attend(engine.batch(DECODE, LENS, REQ), 2), chain_paths(world, LENS, [1, 1]))


def test_fault_14_prefix_and_path_are_bounded() -> None:
    backend = engine.backend(topk=2, num_draft_tokens=4, sliding_window_size=3)
    lens = [62, 5]
    spec = SimpleNamespace(custom_mask=flat_mask(lens, TREE_A, TREE_B), positions=np.zeros(8))
    with pytest.raises(ArgumentError, match="do not fit the 64 columns"):
        backend.init_forward_metadata(engine.batch(VERIFY, lens, REQ, spec_info=spec))


@pytest.mark.parametrize("window", [None, 2])
def test_fault_15_beams_that_change_parents(window: int | None) -> None:
    options = {} if window is None else {"sliding_window_size": window}
    world = World(topk=2, steps=3, step=1, **options)
    batch, slots = beams()
    core = world.backend.core
    rows = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]], np.int32)
    neutral = world.backend._batch(batch)
    neutral.draft.beam_rows = rows
    core.init_forward_metadata(neutral)
    world.q = world.rng.standard_normal((4, HEADS, DIM)).astype(np.float32)
    paths = [
        np.concatenate([world.prefix(REQ[b], LENS[b]), slots[b, rows[2 * b + i, :2], np.arange(2)]])
        for b in range(2)
        for i in range(2)
    ]
    world.check(world.forward(batch), paths)


# --- limits of scope ---


def test_several_encoders_beside_windows() -> None:
    world = World(4, is_encoder_decoder=True, sliding_window_size=3)
    lens, encoders = [5, 9], np.array([6, 0])
    batch = engine.batch(DECODE, lens, REQ, encoder_lens=encoders)
    out = world.attend(batch, 2)
    paths = [world.table[r, e : e + n] for r, e, n in zip(REQ, encoders, lens, strict=True)]
    world.check(out, paths)
    world.layer.is_cross_attention = True
    world.window = None
    world.backend._layers.clear()
    out = world.forward(batch)
    world.check(out[:1], [world.table[REQ[0], :6]])
    assert not out[1].any()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_windows_along_trees(page: int, window: int) -> None:
    world = World(page, topk=2, num_draft_tokens=4, sliding_window_size=window)
    world.check(world.attend(trees(), 8), tree_paths(world))


def test_no_requests() -> None:
    world = World()
    for mode in ("IDLE", DECODE):
        assert world.attend(engine.batch(mode, [], []), 0).shape == (0, HEADS, DIM)


def test_nothing_is_written_without_keys() -> None:
    world = World()
    written: list[Any] = []
    world.pool.set_kv_buffer = lambda *given: written.append(given)
    batch = engine.batch(DECODE, LENS, REQ, out_cache_loc=np.array([5, 6]))
    world.attend(batch, 2)
    k = np.zeros((2, KV_HEADS, DIM), np.float32)
    world.backend.forward_decode(world.q, k, k, world.layer, batch, save_kv_cache=False)
    assert not written
    world.backend.forward_decode(world.q, k, k, world.layer, batch)
    assert len(written) == 1 and written[0][1] is batch.out_cache_loc

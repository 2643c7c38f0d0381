"""Arguments that make no sense: typed errors that name the argument, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import serving_engine as engine

from cupyattn.errors import ArgumentError, CupyAttnError, PlanError, UnsupportedError
from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    DraftInfo,
    ForwardMode,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MultiStepDraftBackend,
)

CONFIG: dict[str, Any] = {
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "page_size": 4,
    "max_context_len": 64,
    "q_dtype": "float32",
}
LENS = np.array([5, 9], np.int32)
ROWS = np.array([1, 3], np.int32)


def make(table: Any = None, full_to_swa: Any = None, **changes: Any) -> AttentionBackend:
    table = engine.slots(4) if table is None else table
    pool = MHATokenToKVPool(400, 2, 16, 1, np.zeros(1, np.float32), dtype="float32")
    for x in pool.get_kv_buffer(0):
        x[...] = 1
    return AttentionBackend(BackendConfig(**{**CONFIG, **changes}), pool, table, full_to_swa)


def step(changes: dict[str, Any] | None = None, **config: Any) -> Any:
    """init_forward_metadata of a batch."""
    named: dict[str, Any] = {
        "mode": ForwardMode.DECODE,
        "req_pool_indices": ROWS,
        "seq_lens": LENS,
        "seq_lens_host": LENS,
    }
    return make(**config).init_forward_metadata(BatchInfo(**{**named, **(changes or {})}))


def extend(**changes: Any) -> Any:
    named = {"mode": ForwardMode.EXTEND, "extend_seq_lens_host": np.array([2, 3])}
    return step({**named, **changes})


def verify(tree: Any, draft: bool = True, **config: Any) -> Any:
    changes = {"mode": ForwardMode.TARGET_VERIFY, "draft": DraftInfo(tree_mask=tree)}
    if not draft:
        changes["draft"] = None
    return step(changes, **{"topk": 2, "num_draft_tokens": 4, **config})


def beams(loc: Any = None, rows: Any = None, index: int = 0, **config: Any) -> Any:
    loc = np.arange(300, 312) if loc is None else loc
    changes = {
        "mode": ForwardMode.DRAFT_DECODE,
        "out_cache_loc": loc,
        "draft": DraftInfo(step=index, beam_rows=rows),
    }
    return step(changes, **{"topk": 2, "num_draft_steps": 3, **config})


def run(q: Any = None, out: Any = None, config: dict[str, Any] | None = None, **layer: Any) -> Any:
    options = {name: layer.pop(name) for name in ("return_lse", "lse_layout") if name in layer}
    backend = make(**(config or {}))
    backend.init_forward_metadata(BatchInfo(ForwardMode.DECODE, ROWS, LENS))
    q = np.ones((2, 4, 16), np.float32) if q is None else q
    return backend.forward(q, LayerSpec(**layer), None, out, **options)


def graph(bs: int = 2, tokens: int = 2, mode: Any = ForwardMode.DECODE, **config: Any) -> Any:
    backend = make(**config)
    backend.init_graph_state(4, 8)
    return backend.init_forward_metadata_capture(bs, tokens, mode)


def replay(bs: int, lens: Any, rows: Any) -> Any:
    backend = make()
    backend.init_graph_state(4, 4)
    backend.init_forward_metadata_capture(2, 2, ForwardMode.DECODE)
    return backend.init_forward_metadata_replay(bs, BatchInfo(ForwardMode.DECODE, rows, lens))


def pool_write(**changes: Any) -> Any:
    pool = MHATokenToKVPool(40, 2, 16, 2, np.zeros(1, np.float32), dtype="float32")
    k = np.ones((3, 2, 16), np.float32)
    named = {"loc": np.arange(3), "k": k, "v": k, **changes}
    layer = SimpleNamespace(layer_id=named.pop("layer_id", 0))
    return pool.set_kv_buffer(layer, **named)


def x(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


Row = tuple[str, Callable[[], Any], type[CupyAttnError], str]
TABLE: list[Row] = [
    ("heads", lambda: make(num_q_heads=3), ArgumentError, "num_q_heads: 3 over 2"),
    ("no heads", lambda: make(num_kv_heads=0), ArgumentError, "num_kv_heads"),
    ("page", lambda: make(page_size=0), ArgumentError, "page_size"),
    ("page type", lambda: make(page_size=1.5), ArgumentError, "page_size"),
    ("dtype", lambda: make(q_dtype="int7"), ArgumentError, "q_dtype"),
    ("kv dtype", lambda: make(kv_dtype="what"), ArgumentError, "kv_dtype"),
    ("form", lambda: make(tree_form="sort"), ArgumentError, "tree_form"),
    ("chunk", lambda: make(attention_chunk_size=0), ArgumentError, "attention_chunk_size"),
    ("window", lambda: make(sliding_window_size=-2), ArgumentError, "sliding_window_size"),
    ("drafts", lambda: make(num_draft_tokens=200), UnsupportedError, "num_draft_tokens: got 200"),
    ("topk", lambda: make(topk=200), UnsupportedError, "topk: got 200"),
    ("flag", lambda: make(deterministic=2), ArgumentError, "deterministic"),
    (
        *("hybrid encoder", lambda: make(is_hybrid=True, has_encoder=True)),
        *(UnsupportedError, "is_hybrid, has_encoder"),
    ),
    (
        *("hybrid chunk", lambda: make(is_hybrid=True, attention_chunk_size=6)),
        *(UnsupportedError, "attention_chunk_size: 6 keys"),
    ),
    ("no map", lambda: make(is_hybrid=True), ArgumentError, "full_to_swa: got None"),
    ("map", lambda: make(full_to_swa=np.arange(4)), ArgumentError, "full_to_swa: given without"),
    (
        *("map shape", lambda: make(is_hybrid=True, full_to_swa=np.zeros((2, 2), np.int32))),
        *(ArgumentError, "full_to_swa: shape"),
    ),
    ("table dtype", lambda: make(np.zeros((4, 64), np.int64)), ArgumentError, "req_to_token"),
    ("table shape", lambda: make(np.zeros(64, np.int32)), ArgumentError, "req_to_token: shape"),
    ("table width", lambda: make(np.zeros((4, 8), np.int32)), ArgumentError, "max_context_len"),
    (
        *("table order", lambda: make(np.zeros((64, 64), np.int32).T[:, ::2])),
        *(ArgumentError, "req_to_token: shape"),
    ),
    ("mode", lambda: step({"mode": 3}), ArgumentError, "mode"),
    ("lens shape", lambda: step({"seq_lens": x(2, 1, dtype=int)}), ArgumentError, "seq_lens"),
    ("lens dtype", lambda: step({"seq_lens": x(2)}), ArgumentError, "seq_lens"),
    ("host lens", lambda: step({"seq_lens_host": LENS[:1]}), ArgumentError, "seq_lens_host"),
    ("host floats", lambda: step({"seq_lens_host": x(2)}), ArgumentError, "seq_lens_host"),
    ("long", lambda: step({"seq_lens_host": LENS + 60}), ArgumentError, "seq_lens_host"),
    (
        *("long on device", lambda: step({"seq_lens": LENS + 60, "seq_lens_host": None})),
        *(ArgumentError, "seq_lens: .* do not fit"),
    ),
    ("negative", lambda: step({"seq_lens": -LENS}), ArgumentError, "seq_lens"),
    ("rows", lambda: step({"req_pool_indices": ROWS[:1]}), ArgumentError, "req_pool_indices"),
    ("no rows", lambda: step({"req_pool_indices": None}), ArgumentError, "req_pool_indices"),
    ("far rows", lambda: step({"req_pool_indices": ROWS + 9}), ArgumentError, "req_pool_indices"),
    (
        *("strided", lambda: step({"seq_lens": np.repeat(LENS, 2)[::2]})),
        *(ArgumentError, "seq_lens: is not contiguous"),
    ),
    ("no extend", lambda: extend(extend_seq_lens_host=None), ArgumentError, "extend_seq_lens_host"),
    (
        *("extend shape", lambda: extend(extend_seq_lens=np.array([1]))),
        *(ArgumentError, "extend_seq_lens: shape"),
    ),
    (
        *("extend negative", lambda: extend(extend_seq_lens=np.array([1, -1]))),
        *(ArgumentError, "extend_seq_lens"),
    ),
    ("no encoder", lambda: step(has_encoder=True), ArgumentError, "encoder_lens: got None"),
    (
        *("far encoder", lambda: step({"encoder_lens": LENS + 60}, has_encoder=True)),
        *(ArgumentError, "seq_lens"),
    ),
    ("no drafts", lambda: verify(None, draft=False), ArgumentError, "draft: got None"),
    ("no tree", lambda: verify(None), ArgumentError, "tree_mask: got None"),
    ("tree shape", lambda: verify(x(2, 3, 3, dtype=bool)), ArgumentError, "tree_mask: bool"),
    ("tree dtype", lambda: verify(x(2, 4, 4)), ArgumentError, "tree_mask"),
    ("tree words", lambda: verify(x(2, 3, dtype=np.uint64)), ArgumentError, "tree_mask: uint64"),
    (
        *("wide words", lambda: verify(x(2, 70, dtype=np.uint64), num_draft_tokens=70)),
        *(ArgumentError, "tree_mask"),
    ),
    (
        *("no verification", lambda: verify(x(2, 4, 4, dtype=bool), num_draft_tokens=0)),
        *(ArgumentError, "num_draft_tokens"),
    ),
    (
        "no slots",
        lambda: step({"mode": ForwardMode.DRAFT_DECODE, "draft": DraftInfo()}, topk=2),
        ArgumentError,
        "out_cache_loc: got None",
    ),
    ("slots", lambda: beams(np.arange(13)), ArgumentError, "out_cache_loc: holds 13"),
    ("slots dtype", lambda: beams(x(12)), ArgumentError, "out_cache_loc"),
    ("beam rows", lambda: beams(rows=x(4, 2, dtype=np.int32)), ArgumentError, "beam_rows: holds"),
    ("far beams", lambda: beams(rows=np.full((4, 3), 2, np.int32)), ArgumentError, "beam_rows"),
    ("step", lambda: beams(index=3), ArgumentError, "step: got 3"),
    ("q shape", lambda: run(x(2, 64)), ArgumentError, "q: shape"),
    ("q heads", lambda: run(x(2, 3, 16)), ArgumentError, "q: shape"),
    ("q rows", lambda: run(x(3, 4, 16)), ArgumentError, "q: holds 3 rows"),
    ("q dtype", lambda: run(x(2, 4, 16, dtype=np.int32)), CupyAttnError, "q"),
    ("out", lambda: run(out=x(2, 4, 8)), ArgumentError, "out: shape"),
    ("layer", lambda: run(layer_id=7), ArgumentError, "layer_id: got 7"),
    ("pool dtype", lambda: run(config={"kv_dtype": "float16"}), ArgumentError, "kv_dtype: the"),
    ("layer heads", lambda: run(num_kv_heads=4), ArgumentError, "k_cache: shape"),
    ("soft cap", lambda: run(softcap=-1.0), ArgumentError, "softcap"),
    ("scale", lambda: run(softmax_scale="x"), ArgumentError, "softmax_scale"),
    ("sinks", lambda: run(sinks=x(3)), ArgumentError, "sinks"),
    ("layer window", lambda: run(window_size=3), ArgumentError, "window_size"),
    ("layer side", lambda: run(window_size=(-3, 0)), ArgumentError, "window_size"),
    ("layer chunk", lambda: run(attention_chunk=4), ArgumentError, "attention_chunk: got 4"),
    (
        *("other chunk", lambda: run(config={"attention_chunk_size": 8}, attention_chunk=4)),
        *(ArgumentError, "attention_chunk: got 4"),
    ),
    (
        *(
            "full chunk",
            lambda: run(config={"attention_chunk_size": 4}, attention_chunk=4, causal=False),
        ),
        *(UnsupportedError, "attention_chunk: wants causal"),
    ),
    ("one pool", lambda: run(uses_swa_pool=True), ArgumentError, "uses_swa_pool"),
    ("cross", lambda: run(is_cross_attention=True), ArgumentError, "is_cross_attention"),
    ("lse", lambda: run(return_lse=2), ArgumentError, "return_lse"),
    ("lse layout", lambda: run(return_lse=True, lse_layout="hq"), ArgumentError, "lse_layout"),
    (
        *("no metadata", lambda: make().forward(x(2, 4, 16), LayerSpec())),
        *(PlanError, "forward: there is no metadata"),
    ),
    ("bs", lambda: graph(bs=5, tokens=5), ArgumentError, "bs: got 5"),
    ("tokens", lambda: graph(tokens=3), ArgumentError, "num_tokens: got 3"),
    ("extend graph", lambda: graph(mode=ForwardMode.EXTEND), PlanError, "mode"),
    (
        *("no state", lambda: make().init_forward_metadata_capture(1, 1, ForwardMode.DECODE)),
        *(PlanError, "init_graph_state"),
    ),
    (
        *("mixed graph", lambda: make().init_graph_state(2, 2, (ForwardMode.MIXED,))),
        *(ArgumentError, "modes: MIXED"),
    ),
    ("replay", lambda: replay(2, LENS[:1], ROWS[:1]), ArgumentError, "seq_lens: holds 1"),
    ("replay bs", lambda: replay(9, LENS, ROWS), ArgumentError, "bs: got 9"),
    ("pool layer", lambda: pool_write(layer_id=5), ArgumentError, "layer_id: got 5"),
    ("pool slots", lambda: pool_write(loc=np.arange(2)), ArgumentError, "slot_mapping"),
    ("pool far", lambda: pool_write(loc=np.array([1, 2, 40])), ArgumentError, "slot_mapping"),
    (
        "pool rows dtype",
        lambda: pool_write(k=x(3, 2, 16, dtype=np.float16)),
        ArgumentError,
        "v: dtype",
    ),
    ("pool dim", lambda: pool_write(v=x(3, 2, 8)), ArgumentError, "v_cache"),
    (
        "keys without values",
        lambda: make().write_kv(LayerSpec(0), np.arange(3), x(3, 2, 16)),
        ArgumentError,
        "v: got None",
    ),
    (
        *(
            "pool mla",
            lambda: MHATokenToKVPool(4, 1, 8, 1, np.zeros(1, np.float32)).set_mla_kv_buffer(
                None, None, None, None
            ),
        ),
        *(UnsupportedError, "set_mla_kv_buffer"),
    ),
    (
        *("steps", lambda: MultiStepDraftBackend(BackendConfig(1, 1, 8), None, engine.slots(1))),
        *(ArgumentError, "num_draft_steps"),
    ),
    (
        "a mode of theirs",
        lambda: engine.backend().init_forward_metadata(engine.batch("SPLIT_PREFILL", [3], [0])),
        UnsupportedError,
        "forward_mode: SPLIT_PREFILL",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"), [pytest.param(*row[1:], id=row[0]) for row in TABLE]
)
def test_bad_input(call: Callable[[], Any], kind: type[CupyAttnError], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_rope_parts_are_refused() -> None:
    backend = engine.backend()
    q = np.zeros((1, 16), np.float32)
    with pytest.raises(ArgumentError, match="q_rope"):
        backend.forward_decode(q, None, None, engine.layer(), SimpleNamespace(), q_rope=q)


@pytest.mark.parametrize("pool", [MHATokenToKVPool, MLATokenToKVPool])
def test_a_pool_holds_what_attention_reads(pool: Any) -> None:
    like = np.zeros(1, np.float32)
    for dtype in ("float16", "bfloat16", "float32", "float8_e4m3fn"):
        pool(4, 8, 8, 1, like, dtype=dtype)
    with pytest.raises(ArgumentError, match="dtype: got int32; wanted a dtype of keys: float16"):
        pool(4, 8, 8, 1, like, dtype="int32")

"""What steps and layers launch, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import fake_gpu
from helpers.fake_gpu import Gpu, count_functions

from cupyattn import array
from cupyattn.engine import (
    index_arrays,
    prepared,
)
from cupyattn.engine import (
    run_planless as call,
)
from cupyattn.errors import PlanError
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
from cupyattn.serving.store import Store

torch = pytest.importorskip("torch")
BS, H, HK, D, COLUMNS, DRAFTS, TOPK = 4, 8, 2, 64, 128, 4, 2
ATTENTION = ["plan_batch", "decode_sm80"]
FOUND = ["decode_sm80"]  # whose blocks find their items
STEP = "serving_metadata"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    fake_gpu.forget()
    index_arrays._kept.clear()
    yield fake_gpu.pretend(monkeypatch)
    fake_gpu.forget()
    index_arrays._kept.clear()


@pytest.fixture
def make(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    made = fake_gpu.maker("torch", monkeypatch)
    monkeypatch.setattr(array.memory, "_carrier", lambda dtype: dtype)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    return made


def config(**changes: Any) -> BackendConfig:
    named = {"page_size": 16, "max_context_len": COLUMNS, **changes}
    return BackendConfig(H, HK, D, **named)


def pool_of(make: Callable[..., Any], dtype: str = "bfloat16") -> MHATokenToKVPool:
    return MHATokenToKVPool(1024, HK, D, 2, make(1), dtype=dtype)


def backend_of(make: Callable[..., Any], **changes: Any) -> AttentionBackend:
    return AttentionBackend(config(**changes), pool_of(make), make(8, COLUMNS, dtype="int32"))


def batch_of(make: Callable[..., Any], mode: ForwardMode, **changes: Any) -> BatchInfo:
    made = BatchInfo(mode, make(BS, dtype="int64"), make(BS, dtype="int64"), **changes)
    if mode.is_ragged:
        made.extend_seq_lens = make(BS, dtype="int32")
        made.extend_seq_lens_host = index_arrays.np.full(BS, 5)
    return made


def drafts(make: Callable[..., Any], **changes: Any) -> DraftInfo:
    return DraftInfo(tree_mask=make(BS, DRAFTS, DRAFTS, dtype="bool"), **changes)


TREES = {"topk": TOPK, "num_draft_tokens": DRAFTS, "num_draft_steps": 3}
LAYER, WINDOW, CHUNK = LayerSpec(), LayerSpec(window_size=(31, 0)), LayerSpec(attention_chunk=16)
# By what they are: configuration, mode, rows of q, layer, launches of the layer.
CASES: dict[str, tuple[dict[str, Any], ForwardMode, int, LayerSpec, list[str]]] = {
    "decode": ({}, ForwardMode.DECODE, BS, LAYER, FOUND),
    "decode, slots": ({"page_size": 1}, ForwardMode.DECODE, BS, LAYER, FOUND),
    "decode, window": ({}, ForwardMode.DECODE, BS, WINDOW, FOUND),
    "decode, chunks": ({"attention_chunk_size": 16}, ForwardMode.DECODE, BS, CHUNK, FOUND),
    "chain": (
        {"num_draft_tokens": DRAFTS}, ForwardMode.TARGET_VERIFY, BS * DRAFTS, LAYER, FOUND,
    ),
    "tree": (TREES, ForwardMode.TARGET_VERIFY, BS * DRAFTS, LAYER, ATTENTION),
    "tree, two passes": (
        {**TREES, "tree_form": "expand"}, ForwardMode.TARGET_VERIFY, BS * DRAFTS, LAYER,
        [*FOUND, *FOUND, "merge_states"],
    ),
    "tree, window": (
        {**TREES, "sliding_window_size": 31}, ForwardMode.TARGET_VERIFY, BS * DRAFTS, WINDOW,
        FOUND,
    ),
    "beams": (
        TREES, ForwardMode.DRAFT_DECODE, BS * TOPK, LAYER,
        [*FOUND, *FOUND, "merge_states"],
    ),
    "beams, chunks": (
        {**TREES, "attention_chunk_size": 16}, ForwardMode.DRAFT_DECODE, BS * TOPK, CHUNK,
        FOUND,
    ),
    "extend": (
        {}, ForwardMode.EXTEND, 5 * BS, LAYER, ["plan_batch", "prefill_sm80", "merge_splits"],
    ),
    "mixed, chunks": (
        {"attention_chunk_size": 16}, ForwardMode.MIXED, 5 * BS, CHUNK,
        ["plan_batch", "prefill_sm80"],
    ),
}  # fmt: skip


def given(make: Callable[..., Any], mode: ForwardMode) -> BatchInfo:
    changes: dict[str, Any] = {}
    if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE):
        changes["draft"] = drafts(make)
    if mode is ForwardMode.DRAFT_DECODE:
        changes["out_cache_loc"] = make(BS * TOPK * 3, dtype="int64")
    return batch_of(make, mode, **changes)


def names_of(gpu: Gpu) -> list[str]:
    found = [x.kernel if isinstance(x.kernel, str) else x.kernel.name for x in gpu.launches]
    gpu.launches.clear()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_launch_and_a_layer_few(
    gpu: Gpu, make: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: later steps and layers that look alike skip the checks, and nothing is read."""
    changes, mode, rows, layer, launches = CASES[name]
    backend = backend_of(make, **changes)
    batch, q = given(make, mode), make(rows, H, D)
    backend.init_forward_metadata(batch)
    assert names_of(gpu) == [STEP]
    backend.forward(q, layer)
    found = names_of(gpu)
    assert found == launches

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a value was read, or a call was checked again")

    monkeypatch.setattr(call, "check", refuse)
    monkeypatch.setattr(Store, "_views", refuse)
    monkeypatch.setattr(array, "to_host", refuse)
    for method in ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    backend.init_forward_metadata(batch)
    backend.forward(q, layer)
    assert names_of(gpu) == [STEP, *found]


@pytest.mark.parametrize("name", CASES)
def test_given_outputs_are_written_each_time(gpu: Gpu, make: Callable[..., Any], name: str) -> None:
    """Repeated calls too: the last launch has the address of the output."""
    changes, mode, rows, layer, _ = CASES[name]
    backend = backend_of(make, **changes)
    backend.init_forward_metadata(given(make, mode))
    for _ in range(3):
        q, out = make(rows, H, D), make(rows, H, D)
        gpu.launches.clear()
        assert backend.forward(q, layer, None, out) is out
        address = out.data_ptr().to_bytes(8, "little")
        assert address in gpu.launches[-1].params


def test_steps_of_a_draft_are_one_launch(gpu: Gpu, make: Callable[..., Any]) -> None:
    together = MultiStepDraftBackend(
        config(**TREES), pool_of(make), make(8, COLUMNS, dtype="int32")
    )
    together.init_forward_metadata(given(make, ForwardMode.DRAFT_DECODE))
    assert names_of(gpu) == [STEP]


def test_replays_are_one_launch(gpu: Gpu, make: Callable[..., Any]) -> None:
    backend = backend_of(make, **TREES)
    backend.init_graph_state(BS, BS * DRAFTS)
    backend.init_forward_metadata_capture(BS, BS * DRAFTS, ForwardMode.TARGET_VERIFY)
    assert names_of(gpu) == []
    backend.init_forward_metadata_replay(BS, given(make, ForwardMode.TARGET_VERIFY))
    assert names_of(gpu) == [STEP]


def test_plans_are_bounded_by_a_request_not_the_pool(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a large pool of slots would keep plans from splitting keys."""
    found: list[Any] = []
    real = prepared.find_items.prepare

    def plan(launcher: Any, lengths: Any) -> Any:
        found.append(lengths)
        return real(launcher, lengths)

    monkeypatch.setattr(prepared.find_items, "prepare", plan)
    for changes, layer, longest in (
        ({}, LAYER, COLUMNS),
        ({"attention_chunk_size": 16}, CHUNK, 16),
    ):
        backend = backend_of(make, page_size=1, **changes)
        backend.init_forward_metadata(given(make, ForwardMode.DECODE))
        backend.forward(make(BS, H, D), layer)
        assert (found[-1].max_kv_len, found[-1].kv_room) == (longest, 8 * COLUMNS)


def test_new_memory_is_refused_in_a_capture(gpu: Gpu, make: Callable[..., Any]) -> None:
    backend = backend_of(make)
    gpu.is_capturing = True
    with pytest.raises(PlanError, match="init_graph_state"):
        backend.init_forward_metadata(given(make, ForwardMode.DECODE))


def test_new_keys_are_one_launch(gpu: Gpu, make: Callable[..., Any]) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn"):
        backend = AttentionBackend(
            config(kv_dtype=dtype), pool_of(make, dtype), make(8, COLUMNS, dtype="int32")
        )
        layer = LayerSpec(k_scale=make(1, dtype="float32"), v_scale=make(1, dtype="float32"))
        backend.write_kv(layer, make(BS, dtype="int64"), make(BS, HK, D), make(BS, HK, D))
        assert names_of(gpu) == ["store_kv"]


def test_a_repeated_step_runs_few_functions(gpu: Gpu, make: Callable[..., Any]) -> None:
    """Host time grows with the functions that a step runs."""
    backend = backend_of(make)
    batch, q = given(make, ForwardMode.DECODE), make(BS, H, D)
    backend.init_forward_metadata(batch)
    backend.forward(q, LAYER)
    assert count_functions(lambda: backend.init_forward_metadata(batch)) <= 30
    assert count_functions(lambda: backend.forward(q, LAYER)) <= 35


@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize("is_split", [False, True])
def test_latent_layers_are_checked_once(
    gpu: Gpu,
    make: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    is_split: bool,
) -> None:
    """Pages of a token are read through req_to_token itself; beams take two passes and a merge."""
    heads, columns = 16, 576
    pool = MLATokenToKVPool(1024, 512, 64, 1, make(1), is_split=is_split)
    layer, table = LayerSpec(softmax_scale=0.1), make(8, COLUMNS, dtype="int32")
    named = {"page_size": page_size, "max_context_len": COLUMNS, "use_mla": True}
    for mode, rows, launches in (
        (ForwardMode.DECODE, BS, 1), (ForwardMode.TARGET_VERIFY, BS * DRAFTS, 2),
    ):  # fmt: skip
        own = BackendConfig(
            heads, 1, columns, 512, num_draft_tokens=DRAFTS, topk=TOPK * (launches - 1) or 1,
            **named,
        )  # fmt: skip
        backend, q = AttentionBackend(own, pool, table), make(rows, heads, columns)
        for _ in range(2):
            batch = given(make, mode)
            assert backend.init_forward_metadata(batch).main.page_size == page_size
            out = make(rows, heads, 512)
            assert names_of(gpu) == [STEP]
            assert backend.forward(q, layer, None, out) is out
            found = names_of(gpu)
            assert found.count("plan_batch") == launches
            assert found.count("merge_states") == launches - 1
            with monkeypatch.context() as patch:
                patch.setattr(call, "check", None)
                assert backend.forward(q, layer, None, out) is out
            assert names_of(gpu) == found


def test_latent_rows_are_written_by_one_launch(gpu: Gpu, make: Callable[..., Any]) -> None:
    pool = MLATokenToKVPool(64, 512, 64, 1, make(1), dtype="float8_e4m3fn")
    layer = LayerSpec(softmax_scale=0.1, k_scale=0.5)
    pool.set_mla_kv_buffer(layer, make(3, dtype="int64"), make(3, 1, 512), make(3, 1, 64))
    assert names_of(gpu) == ["store_kv"]

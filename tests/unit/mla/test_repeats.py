"""Calls without a plan that repeat others but for addresses, on a GPU that is not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from helpers import fake_gpu

from cupyattn import flash_mla, mla
from cupyattn.engine import latent_rows as parts
from cupyattn.engine import run_planless
from cupyattn.errors import ArgumentError, UnsupportedError

B, H, PAGES, SIZE = 3, 16, 4, 16


class Arrays:
    """The arrays of a decode, at addresses of their own."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.q, self.kv = make(B, 1, H, 576), make(B * PAGES, SIZE, 576)
        self.kv_of_one_head = self.kv[:, :, None]
        self.table, self.lens = make(B, PAGES, dtype="int32"), make(B, dtype="int32")
        self.lists, self.sinks = make(B, 1, 20, dtype="int32"), make(H, dtype="float32")
        self.workspace = make(1 << 20, dtype="uint8")


def _trtllm(x: Arrays, **given: Any) -> Any:
    options = {"max_seq_len": 64, "bmm1_scale": 0.07} | given
    return mla.trtllm_batch_decode_with_kv_cache_mla(
        x.q, x.kv, x.workspace, 128, 512, 64, x.table, x.lens, **options
    )


def _xqa_batch(x: Arrays, **given: Any) -> Any:
    options = {"max_seq_len": 64, "bmm1_scale": 0.07} | given
    return mla.xqa_batch_decode_with_kv_cache_mla(
        x.q, x.kv, x.workspace, 128, 512, 64, x.table, x.lens, **options
    )


def _xqa(x: Arrays, **given: Any) -> Any:
    options = {"q_scale": 0.07, "workspace_buffer": x.workspace} | given
    cache = x.kv_of_one_head
    return mla.xqa_mla(x.q, cache, cache, x.table, x.lens, **options)


def _flash_mla(x: Arrays, **given: Any) -> Any:
    options = {"softmax_scale": 0.07} | given
    return flash_mla.flash_mla_with_kvcache(x.q, x.kv_of_one_head, x.table, x.lens, 512, **options)


def _trtllm_lists(x: Arrays, **given: Any) -> Any:
    options = {"max_seq_len": 64, "bmm1_scale": 0.07, "sparse_mla_top_k": 20} | given
    return mla.trtllm_batch_decode_with_kv_cache_mla(
        x.q, x.kv, x.workspace, 128, 512, 64, x.lists, x.lens, **options
    )


def _flash_mla_lists(x: Arrays, **given: Any) -> Any:
    options = {"softmax_scale": 0.07, "indices": x.lists, "topk_length": x.lens} | given
    options |= {"attn_sink": x.sinks}
    return flash_mla.flash_mla_with_kvcache(x.q, x.kv_of_one_head, None, None, 512, **options)


def _flash_mla_sparse(x: Arrays, **given: Any) -> Any:
    options = {"sm_scale": 0.07} | given
    rows = x.kv.reshape(-1, 1, 576)
    return flash_mla.flash_mla_sparse_fwd(x.q[:, 0], rows, x.lists, **options)


FACES = {
    "trtllm": _trtllm,
    "trtllm lists": _trtllm_lists,
    "xqa_batch": _xqa_batch,
    "xqa": _xqa,
    "flash_mla": _flash_mla,
    "flash_mla lists": _flash_mla_lists,
    "flash_mla sparse": _flash_mla_sparse,
}
SCALES = {"trtllm": "bmm1_scale", "xqa_batch": "bmm1_scale", "xqa": "q_scale"}
SCALES |= {"flash_mla": "softmax_scale", "flash_mla lists": "softmax_scale"}
SCALES |= {"flash_mla sparse": "sm_scale", "trtllm lists": "bmm1_scale"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.Gpu:
    gpu = fake_gpu.pretend(monkeypatch)
    fake_gpu.forget()
    # Tensor maps are made by libcuda, which need not be here.
    monkeypatch.setattr(parts, "_boxes", lambda pages: None)
    return gpu


@pytest.fixture
def make(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return fake_gpu.maker("torch", monkeypatch)


def _shapes(answer: Any) -> list[Any]:
    return [x.shape for x in answer] if isinstance(answer, tuple) else [answer.shape]


def _sizes(gpu: fake_gpu.Gpu) -> list[Any]:
    """What was launched, without addresses."""
    return [(x.kernel, x.grid, x.block, x.stream) for x in gpu.launches]


@pytest.mark.parametrize("face", FACES)
def test_a_repeated_call_is_not_looked_at(
    face: str, gpu: fake_gpu.Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [Arrays(make) for _ in range(4)]
    shapes = [_shapes(FACES[face](x)) for x in arrays[:3]]
    wanted = _sizes(gpu)[: len(gpu.launches) // 3]
    gpu.launches.clear()
    monkeypatch.setattr(run_planless, "check", None)
    for module in (mla, flash_mla):
        monkeypatch.setattr(module, "run", None)
    assert _shapes(FACES[face](arrays[3])) == shapes[0]
    assert wanted and _sizes(gpu) == wanted
    (attention,) = gpu.attentions()
    named = fake_gpu.unpack(attention.params)
    assert (named["q"], named["k"]) == tuple(map(fake_gpu.pointer, (arrays[3].q, arrays[3].kv)))


@pytest.mark.parametrize("face", FACES)
def test_other_numbers_are_another_call(
    face: str, gpu: fake_gpu.Gpu, make: Callable[..., Any]
) -> None:
    x = Arrays(make)
    for scale in (0.07, 0.07, 0.07, 0.5):
        FACES[face](x, **{SCALES[face]: scale})
        named = fake_gpu.unpack(gpu.attentions()[-1].params)
        assert named["sm_scale"] == pytest.approx(scale)


def test_good_calls_excuse_no_bad_ones(gpu: fake_gpu.Gpu, make: Callable[..., Any]) -> None:
    x = Arrays(make)
    for call in FACES.values():
        for _ in range(4):
            call(x)
    for _ in range(4):
        _trtllm(x, max_seq_len=1)
    gpu.launches.clear()
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (_trtllm, {"max_seq_len": True}, "max_seq_len"),
        (_trtllm, {"bmm1_scale": float("nan")}, "bmm1_scale"),
        (_trtllm, {"enable_dcp": "yes"}, "enable_dcp"),
        (_trtllm, {"backend": "cutlass"}, "backend"),
        (_trtllm, {"sparse_mla_top_k": 3}, "block_tables"),
        (_trtllm, {"cp_world": 2}, "cp_world"),
        (_trtllm, {"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx"),
        (_xqa_batch, {"max_seq_len": -1}, "max_seq_len"),
        (_xqa, {"page_size": 8}, "page_size"),
        (_flash_mla, {"causal": "no"}, "causal"),
        (_flash_mla, {"topk_length": x.lens}, "topk_length"),
        (_flash_mla, {"extra_k_cache": x.kv}, "a second cache|extra_k_cache"),
    ]
    for call, given, message in bad:
        with pytest.raises((ArgumentError, UnsupportedError), match=message):
            call(x, **given)
    out = x.q[..., :512]
    with pytest.raises(ArgumentError, match="overlaps"):
        _trtllm(x, out=out)
    x.lens = x.lens[:2]
    for face, call in FACES.items():
        if face == "flash_mla sparse":  # which has no lengths here
            x.lists = x.lists[:2]
        with pytest.raises(ArgumentError):
            call(x)
    assert not gpu.launches


def _names(gpu: fake_gpu.Gpu) -> list[str]:
    names = [x.kernel for x in gpu.launches]
    gpu.launches.clear()
    return names


def test_calls_that_share_metadata_plan_once(
    gpu: fake_gpu.Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are alike: shapes, where lengths lie, the stream; and in no graph."""
    x, other = Arrays(make), Arrays(make)
    for _ in range(2):
        _flash_mla(x)
    planned = _names(gpu)[: len(gpu.launches) // 2 or None][:2]
    assert planned[0] == "plan_batch"
    metadata, _ = flash_mla.get_mla_metadata()
    for names in (planned, planned[1:], planned[1:]):
        _flash_mla(x, tile_scheduler_metadata=metadata)
        assert _names(gpu)[: len(names)] == names
    other.lens, other.table = x.lens, make(B, PAGES, dtype="int32")  # another layer
    _flash_mla(other, tile_scheduler_metadata=metadata)
    assert "plan_batch" not in _names(gpu)
    for given in ({"causal": True}, {"softmax_scale": 0.1}):  # other launches, planned at first
        for _ in range(2):
            _flash_mla(x, tile_scheduler_metadata=metadata, **given)
            assert "plan_batch" in _names(gpu)
    other.lens = make(B, dtype="int32")
    _flash_mla(other, tile_scheduler_metadata=metadata)
    assert "plan_batch" in _names(gpu)
    _flash_mla(other, tile_scheduler_metadata=metadata)
    assert "plan_batch" not in _names(gpu)
    _flash_mla(other, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0])
    assert "plan_batch" in _names(gpu)
    monkeypatch.setattr(gpu.api, "is_capturing", lambda stream: True)
    for _ in range(2):
        _flash_mla(other, tile_scheduler_metadata=metadata)
        assert "plan_batch" in _names(gpu)


def test_a_kept_list_lies_apart_from_states(gpu: fake_gpu.Gpu, make: Callable[..., Any]) -> None:
    """States lie in memory that calls share on a stream; the list is the metadata's."""
    x = Arrays(make)
    _flash_mla(x)
    metadata, _ = flash_mla.get_mla_metadata()
    gpu.launches.clear()
    places = []
    for _ in range(2):
        _flash_mla(x, tile_scheduler_metadata=metadata)
        places.append([fake_gpu.unpack(y.params)["work"] for y in gpu.attentions()][-1])
    assert places[0] == places[1] == metadata._list._kept[1]
    _flash_mla(x)
    named = fake_gpu.unpack(gpu.attentions()[-1].params)
    assert named["work"] != places[0]


def test_attention_begins_beside_the_launch_that_plans_it(
    gpu: fake_gpu.Gpu, make: Callable[..., Any]
) -> None:
    early: list[Any] = []
    launch = gpu.api.launch_early
    gpu.api.launch_early = lambda *given: (early.append(given[0]), launch(*given))
    for _ in range(3):
        early.clear()
        _trtllm(Arrays(make))
        (attention,) = gpu.attentions()
        assert early[0] == attention.kernel and "plan_batch" not in early
        gpu.launches.clear()


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_lse_of_flash_mla_has_its_heads_first(
    tokens: int, gpu: fake_gpu.Gpu, make: Callable[..., Any]
) -> None:
    """Kernels write it with heads last, in natural logarithms, and the answer is a view of that."""
    x = Arrays(make)
    x.q = make(B, tokens, H, 576)
    for _ in range(4):
        _, lse = _flash_mla(x)
        assert lse.shape == (B, H, tokens) and lse.swapaxes(1, 2).is_contiguous()
        assert "pad_lse" not in [launch.kernel for launch in gpu.launches]
        named = fake_gpu.unpack(gpu.attentions()[-1].params)
        assert named["lse"] == fake_gpu.pointer(lse)
        assert named["lse_scale"] == pytest.approx(math.log(2.0))
        assert (named["lse_stride_n"], named["lse_stride_h"]) == (H, 1)


@pytest.mark.parametrize("face", ["trtllm", "xqa_batch", "xqa"])
def test_calls_of_other_batch_sizes_are_not_looked_at(
    face: str, gpu: fake_gpu.Gpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they launch is what their full checks would. A cache of more pages is looked at."""

    def launched(count: int) -> list[Any]:
        x = Arrays(make)
        x.q, x.lens = make(count, 1, H, 576), make(count, dtype="int32")
        x.table = make(count, PAGES + count, dtype="int32")
        x.workspace = make(1 << 24, dtype="uint8")
        gpu.launches.clear()
        assert FACES[face](x).shape[0] == count
        planner, attention = gpu.launches
        told = fake_gpu.unpack(attention.params)
        assert told["q"] == fake_gpu.pointer(x.q)
        addresses = {"q", "k", "v", "o", "lse", "kv_indices", "partial_o", "partial_lse"}
        addresses |= {"work", "merges", "counters", "items"}
        facts = {name: told[name] for name in told if name not in addresses}
        return [*_sizes(gpu), planner.params[96:320], facts]

    counts, wanted = (2, 40, B, 7), []
    for count in counts:
        fake_gpu.forget()
        wanted.append(launched(count))
    real, checked = run_planless.check, []
    monkeypatch.setattr(run_planless, "check", lambda *a: checked.append(a) or real(*a))
    for _ in range(2):
        assert [launched(count) for count in counts] == wanted
    assert not checked
    x = Arrays(make)
    x.kv = make(2 * B * PAGES, SIZE, 576)
    x.kv_of_one_head = x.kv[:, :, None]
    FACES[face](x)
    assert len(checked) == 1

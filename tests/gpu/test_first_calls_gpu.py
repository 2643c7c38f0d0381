"""First calls of new lengths on a GPU, which follow from an earlier call: they answer as those that
are checked in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import compare, kernel_caches
from helpers.on_gpu import workspace
from helpers.poison import download, upload

import cupyattn
from cupyattn import flash_attn, flash_mla, mla

pytestmark = pytest.mark.gpu

COUNTS = (2, 70, 3, 1, 33)
HEADS, KV_HEADS, DIM, PAGE, WIDTH = 8, 2, 64, 16, 5


@dataclass
class Step:
    """A call of some length.

    written        arrays that it writes, which are part of its answer
    has_workspace  whether it takes `workspace_buffer`
    """

    function: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    has_workspace: bool = False

    def answer(self, xp: ModuleType) -> list[np.ndarray]:
        is_here = xp is np
        named = {k: x.copy() if is_here else upload(x, xp) for k, x in self.arrays.items()}
        space = {}
        if self.has_workspace:
            memory = np.zeros(1 << 23, np.uint8) if is_here else workspace(xp)
            space["workspace_buffer"] = memory
        found = self.function(**named, **self.options, **space)
        answers = [] if found is None else list(found) if isinstance(found, tuple) else [found]
        answers += [named[name] for name in self.written]
        return answers if is_here else [download(x) for x in answers]


def _offsets(count: int, step: int) -> np.ndarray:
    return step * np.arange(count + 1, dtype=np.int32)


class Draw:
    """Random arrays of `count` requests."""

    def __init__(self, count: int) -> None:
        self.count, self._rng = count, np.random.default_rng(count)

    def normal(self, *shape: int, dtype: str = "float16") -> np.ndarray:
        return self._rng.standard_normal(shape).astype(dtype)

    def lengths(self, most: int) -> np.ndarray:
        return self._rng.integers(1, most + 1, self.count).astype(np.int32)

    def table(self) -> np.ndarray:
        """Pages of each request, none of two of them."""
        pages = self._rng.permutation(self.count * WIDTH).astype(np.int32)
        return pages.reshape(self.count, WIDTH)

    def caches(self, *dims: int) -> list[np.ndarray]:
        return [self.normal(self.count * WIDTH, PAGE, *dims) for _ in "kv"]


def _of_one_request(draw: Draw) -> Step:
    n = draw.count
    keys = [draw.normal(3 * n + 5, KV_HEADS, DIM) for _ in "kv"]
    arrays = {"q": draw.normal(n, HEADS, DIM), "k": keys[0], "v": keys[1]}
    options = {"causal": True, "return_lse": True}
    return Step(cupyattn.single_prefill_with_kv_cache, arrays, options)


def _append(draw: Draw) -> Step:
    table, lens = draw.table(), draw.lengths(WIDTH * PAGE)
    counts = -(-lens // PAGE)
    arrays = {
        "append_key": draw.normal(draw.count, KV_HEADS, DIM),
        "append_value": draw.normal(draw.count, KV_HEADS, DIM),
        "batch_indices": np.arange(draw.count, dtype=np.int32),
        "positions": lens - 1,
        "paged_kv_cache": np.stack(draw.caches(KV_HEADS, DIM), axis=1),
        "kv_indices": np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)]),
        "kv_indptr": np.cumsum([0, *counts], dtype=np.int32),
        "kv_last_page_len": (lens - 1) % PAGE + 1,
    }
    return Step(cupyattn.append_paged_kv_cache, arrays, written=("paged_kv_cache",))


def _new_keys(draw: Draw) -> Step:
    """A decode that appends a token to each request."""
    k_cache, v_cache = draw.caches(KV_HEADS, DIM)
    arrays = {
        "q": draw.normal(draw.count, 1, HEADS, DIM),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": draw.normal(draw.count, 1, KV_HEADS, DIM),
        "v": draw.normal(draw.count, 1, KV_HEADS, DIM),
        "page_table": draw.table(),
        "cache_seqlens": draw.lengths(WIDTH * PAGE - 3),
    }
    written = "k_cache", "v_cache"
    return Step(flash_attn.flash_attn_with_kvcache, arrays, {"causal": True}, written)


def _new_rows(draw: Draw) -> Step:
    """Three rows of a request, of which two are new keys."""
    step, n = _new_keys(draw), draw.count
    step.arrays |= {"q": draw.normal(3 * n, HEADS, DIM), "cu_seqlens_q": _offsets(n, 3)}
    step.arrays |= {name: draw.normal(2 * n, KV_HEADS, DIM) for name in "kv"}
    step.arrays["cu_seqlens_k_new"] = _offsets(n, 2)
    step.options["max_seqlen_q"] = 3
    return step


def _rotated(draw: Draw) -> Step:
    step = _new_keys(draw)
    angles = draw.normal(WIDTH * PAGE, 8, dtype="float32")
    step.arrays |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    step.arrays["rotary_seqlens"] = draw.lengths(40)
    return step


def _padded(draw: Draw) -> Step:
    step = _new_keys(draw)
    step.arrays["cache_leftpad"] = step.arrays["cache_seqlens"] // 3
    return step


def _flash_decode(draw: Draw) -> Step:
    step = _new_keys(draw)
    del step.arrays["k"], step.arrays["v"]
    step.written = ()
    return step


def _varlen(draw: Draw) -> Step:
    n = draw.count
    keys = [draw.normal(40 * n, KV_HEADS, DIM) for _ in "kv"]
    arrays = {"q": draw.normal(7 * n, HEADS, DIM), "k": keys[0], "v": keys[1]}
    arrays |= {"cu_seqlens_q": _offsets(n, 7), "cu_seqlens_k": _offsets(n, 40)}
    options = {"max_seqlen_q": 7, "max_seqlen_k": 40, "causal": True}
    return Step(flash_attn.flash_attn_varlen_func, arrays, options)


def _trtllm_decode(draw: Draw) -> Step:
    arrays = {
        "query": draw.normal(draw.count, HEADS, DIM),
        "kv_cache": np.stack(draw.caches(KV_HEADS, DIM), axis=1),
        "block_tables": draw.table(),
        "seq_lens": draw.lengths(WIDTH * PAGE),
    }
    options = {"max_seq_len": WIDTH * PAGE, "bmm1_scale": 0.1, "kv_layout": "NHD"}
    return Step(cupyattn.trtllm_batch_decode_with_kv_cache, arrays, options, has_workspace=True)


def _latent(draw: Draw) -> Step:
    arrays = {
        "query": draw.normal(draw.count, 1, 16, 576),
        "kv_cache": draw.caches(576)[0],
        "block_tables": draw.table(),
        "seq_lens": draw.lengths(WIDTH * PAGE),
    }
    options = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    options |= {"max_seq_len": WIDTH * PAGE, "bmm1_scale": 0.07}
    return Step(mla.trtllm_batch_decode_with_kv_cache_mla, arrays, options, has_workspace=True)


def _flash_mla(draw: Draw) -> Step:
    arrays = {
        "q": draw.normal(draw.count, 1, 16, 576),
        "k_cache": draw.caches(1, 576)[0],
        "block_table": draw.table(),
        "cache_seqlens": draw.lengths(WIDTH * PAGE),
    }
    options = {"head_dim_v": 512, "softmax_scale": 0.07}
    return Step(flash_mla.flash_mla_with_kvcache, arrays, options)


def _states(draw: Draw, names: tuple[str, str], *axes: int) -> dict[str, np.ndarray]:
    v, s = names
    return {
        v: draw.normal(*axes, HEADS, DIM),
        s: 3 * draw.normal(*axes, HEADS, dtype="float32"),
    }


def _pair(draw: Draw) -> Step:
    arrays = _states(draw, ("v_a", "s_a"), draw.count) | _states(draw, ("v_b", "s_b"), draw.count)
    return Step(cupyattn.merge_state, arrays)


def _in_place(draw: Draw) -> Step:
    arrays = _states(draw, ("v", "s"), draw.count)
    arrays |= _states(draw, ("v_other", "s_other"), draw.count)
    return Step(cupyattn.merge_state_in_place, arrays, written=("v", "s"))


def _several(draw: Draw) -> Step:
    return Step(cupyattn.merge_states, _states(draw, ("v", "s"), draw.count, 5))


def _segments(draw: Draw) -> Step:
    arrays = _states(draw, ("v", "s"), 3 * draw.count) | {"indptr": _offsets(draw.count, 3)}
    return Step(cupyattn.variable_length_merge_states, arrays)


DOORS: dict[str, Callable[[Draw], Step]] = {
    "one request": _of_one_request,
    "append": _append,
    "flash_attn, new keys": _new_keys,
    "flash_attn, new rows": _new_rows,
    "flash_attn, rotated": _rotated,
    "flash_attn, padded": _padded,
    "flash_attn, decode": _flash_decode,
    "flash_attn, varlen": _varlen,
    "trtllm": _trtllm_decode,
    "latent": _latent,
    "flash_mla": _flash_mla,
    "merge": _pair,
    "merge in place": _in_place,
    "merge several": _several,
    "merge segments": _segments,
}


@pytest.mark.parametrize("door", DOORS)
def test_other_lengths_are_answered_as_if_they_were_the_first(xp: ModuleType, door: str) -> None:
    steps = [DOORS[door](Draw(count)) for count in COUNTS]
    checked = []
    for step in steps:
        kernel_caches.forget()
        checked.append(step.answer(xp))
        for got, wanted in zip(checked[-1], step.answer(np), strict=True):
            np.testing.assert_allclose(
                got.astype(np.float64), wanted.astype(np.float64), atol=5e-3, rtol=5e-3
            )
    kernel_caches.forget()
    steps[0].answer(xp)
    for _ in range(2):  # derived from the first, and then known
        for step, wanted_answers in zip(steps, checked, strict=True):
            for got, wanted in zip(step.answer(xp), wanted_answers, strict=True):
                compare.assert_bitwise_equal(got, wanted, door)

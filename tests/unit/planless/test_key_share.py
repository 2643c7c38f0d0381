"""Calls without a plan whose keys several ranks share: states merge to the whole answer; errors."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import key_shares, planless_shares
from helpers.bad_input import Row, by_row, ints, of, refuse, rows_of
from helpers.fake_gpu import Gpu, pointer

import cupyattn
from cupyattn import flash_attn, flash_mla
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.launch.attention import plan_batch


def _out(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("door", planless_shares.DOORS)
@pytest.mark.parametrize("seed", range(12))
def test_states_of_all_ranks_merge_to_the_whole_answer(door: str, seed: int) -> None:
    case = planless_shares.random_case(seed, door)
    got = planless_shares.merged(door, case, np.asarray, np.asarray, _out)
    wanted = planless_shares.expected(door, key_shares.Whole.of(case))
    assert key_shares.error(got, wanted) < (2e-3 if case.kind == "mla" else 1e-6)


# --- bad input: rank 0 of 2, runs of 4, of requests of 9, 0 and 20 keys ---

OWN, WHOLE, BEFORE, RUN = ints(5, 0, 12), ints(9, 0, 20), ints(7, -2, 18), 4
TABLE = np.arange(9, dtype=np.int32).reshape(3, 3)
VARLEN, CACHE = "flash_attn_varlen_func", "flash_attn_with_kvcache"
DECODE, MLA = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla"
FLASH_MLA = "flash_mla_with_kvcache"
varlen, cache, decode, mla, of_flash_mla = map(rows_of, (VARLEN, CACHE, DECODE, MLA, FLASH_MLA))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    VARLEN: flash_attn.flash_attn_varlen_func,
    CACHE: flash_attn.flash_attn_with_kvcache,
    DECODE: cupyattn.trtllm_batch_decode_with_kv_cache,
    MLA: cupyattn.trtllm_batch_decode_with_kv_cache_mla,
    FLASH_MLA: flash_mla.flash_mla_with_kvcache,
}


def good(call: str) -> dict[str, Any]:
    share = {"cp_world_size": 2, "cp_rank": 0, "cp_kv_cache_interleave_size": RUN}
    world = {"cp_world": 2, "cp_rank": 0, "cp_kv_cache_interleave_size": RUN}
    if call in (VARLEN, CACHE):
        pages = of("float32", 9, 4, 2, 16)
        named = {"block_table": TABLE, "causal": True, "cp_tot_seqused_k": WHOLE, **share}
        if call == CACHE:
            named |= {"q": of("float32", 3, 2, 4, 16), "k_cache": pages, "v_cache": pages.copy()}
            return named | {"cache_seqlens": OWN}
        named |= {"q": of("float32", 6, 4, 16), "k": pages, "v": pages.copy()}
        return named | {"cu_seqlens_q": ints(0, 2, 4, 6), "max_seqlen_q": 2, "seqused_k": OWN}
    if call == DECODE:
        named = {"query": of("float32", 6, 4, 16), "kv_cache": of("float32", 9, 2, 2, 4, 16)}
        named |= {"workspace_buffer": None, "block_tables": TABLE, "seq_lens": OWN}
        named |= {"max_seq_len": 12, "q_len_per_req": 2, "causal_seqlens_kv_global": BEFORE}
        return named | world
    rows, pages = of("float32", 3, 2, 4, 576), of("float32", 9, 4, 576)
    if call == FLASH_MLA:
        named = {"q": rows, "k_cache": pages[:, :, None], "block_table": TABLE, "causal": True}
        named |= {"cache_seqlens": OWN, "head_dim_v": 512, "cp_tot_seqused_k": WHOLE}
        return named | share
    named = {"query": rows, "kv_cache": pages, "workspace_buffer": None, "block_tables": TABLE}
    named |= {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    named |= {"seq_lens": OWN, "max_seq_len": 12, "enable_dcp": True}
    return named | {"causal_seqlens_kv_global": WHOLE, "return_lse": True} | world


GLOBAL, NEW = "causal_seqlens_kv_global", of("float32", 3, 1, 2, 16)
ROWS = [
    *(
        call(what, words.replace("WHOLE", name), **{name: value})
        for call, name, shift in (
            (varlen, "cp_tot_seqused_k", 0),
            (cache, "cp_tot_seqused_k", 0),
            (of_flash_mla, "cp_tot_seqused_k", 0),
            (mla, GLOBAL, 0),
            (decode, GLOBAL, -2),
        )
        for what, words, value in (
            ("no whole lengths", "WHOLE: got None where 2 ranks share the keys", None),
            ("whole lengths of others", "WHOLE: request 2 has 12 keys here and 25 in all",
             ints(9, 0, 25) + shift),
            ("short whole lengths", "WHOLE: request 0 has 5 keys here and 4 in all, of which rank "
             "0 of 2 holds 4 in runs of 4", ints(4, 0, 20) + shift),
            ("negative whole lengths", "WHOLE: request 1 has 0 keys here and -1",
             ints(9, -1, 20) + shift),
            ("two whole lengths", "WHOLE: | 2", ints(9, 20)),
            ("whole lengths of floats", "WHOLE: dtype is float32", of("float32", 3)),
        )
    ),
    *(
        call(f"no such rank of {name}", f"cp_rank: got 3 with {name}=2", cp_rank=3)
        for call, name in ((varlen, "cp_world_size"), (cache, "cp_world_size"),
                           (of_flash_mla, "cp_world_size"), (mla, "cp_world"), (decode, "cp_world"))
    ),
    varlen("half a rank", "cp_rank: got 0.5 | integer", cp_rank=0.5),
    varlen("no ranks", "cp_world_size: got 0 | 1 or more", cp_world_size=0),
    varlen("ranks of text", "cp_world_size: got '2'", cp_world_size="2"),
    varlen("no run", "cp_kv_cache_interleave_size: got 0", cp_kv_cache_interleave_size=0),
    varlen("no table", "block_table: got None where ranks", UnsupportedError, block_table=None,
           cu_seqlens_k=ints(0, 5, 5, 17), seqused_k=None, k=of("float32", 17, 2, 16),
           v=of("float32", 17, 2, 16)),
    varlen("slopes", "alibi_slopes: is not supported where 2 ranks", UnsupportedError,
           alibi_slopes=of("float32", 4)),
    varlen("chunks", "attention_chunk: is not supported where 2", UnsupportedError,
           attention_chunk=4),
    varlen("sinks of rank 1", "sinks: given on rank 1 of 2", UnsupportedError, cp_rank=1,
           seqused_k=ints(4, 0, 8), sinks=of("float32", 4)),
    cache("no table", "block_table: got None where ranks", UnsupportedError, block_table=None,
          k_cache=of("float32", 3, 16, 2, 16), v_cache=of("float32", 3, 16, 2, 16)),
    cache("new keys", "k: is not supported where 2 ranks | get_share_slots", UnsupportedError,
          k=NEW, v=NEW.copy()),
    cache("rotation", "rotary_cos: is not supported where 2", UnsupportedError,
          rotary_cos=of("float32", 30, 4), rotary_sin=of("float32", 30, 4)),
    cache("padding", "cache_leftpad: is not supported where 2", UnsupportedError,
          cache_leftpad=ints(0, 0, 0)),
    of_flash_mla("sinks", "attn_sink: is not supported where ranks", UnsupportedError,
                 attn_sink=of("float32", 4)),
    decode("own lengths of others", f"{GLOBAL}: request 0 has 4 keys here",
           seq_lens=ints(4, 0, 12)),
    mla("world of text", "cp_world: got '2'", cp_world="2"),
]  # fmt: skip


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    refuse(row, FUNCTIONS[row.call], good(row.call))


def test_the_good_calls_are_good() -> None:
    for call, function in FUNCTIONS.items():
        function(**good(call))


def test_one_row_needs_no_whole_lengths() -> None:
    """It sees all keys, but for a window."""
    named = good(CACHE) | {"q": of("float32", 3, 1, 4, 16), "cp_tot_seqused_k": None}
    flash_attn.flash_attn_with_kvcache(**named)
    with pytest.raises(ArgumentError, match="cp_tot_seqused_k: got None where 2 ranks"):
        flash_attn.flash_attn_with_kvcache(**named, window_size=(3, 0))
    named = good(DECODE) | {"query": of("float32", 3, 4, 16), "q_len_per_req": 1}
    cupyattn.trtllm_batch_decode_with_kv_cache(**named | {GLOBAL: None})


def test_one_rank_is_an_ordinary_call() -> None:
    named = good(VARLEN) | {"cp_world_size": 1, "cp_kv_cache_interleave_size": 1}
    flash_attn.flash_attn_varlen_func(**named | {"cp_tot_seqused_k": None})
    flash_attn.flash_attn_varlen_func(**named | {"cp_tot_seqused_k": OWN})
    named = good(MLA) | {"cp_world": 1, "cp_kv_cache_interleave_size": 1, GLOBAL: OWN}
    cupyattn.trtllm_batch_decode_with_kv_cache_mla(**named)


# --- on a GPU that is not there ---


def _planned(launch: Any) -> tuple[int, tuple[int, ...], int]:
    """(address of kv_begin, what the planner counts a rank's tokens by, unit of whole lengths)."""
    begin = struct.unpack_from("<Q", launch.params, 7 * 8)[0]
    share = struct.unpack_from("<3i", launch.params, plan_batch.PARAMS.size - 12)
    unit = struct.unpack_from("<i", launch.params, 12 * 8 + 4 * 16 + 12)[0]
    return begin, share, unit


def _arrays(make: Callable, rows: int) -> dict[str, Any]:
    named = {"q": make(rows, 8, 64), "k": make(30, 16, 2, 64), "v": make(30, 16, 2, 64)}
    named |= {"block_table": make(3, 9, dtype="int32"), "max_seqlen_q": 2, "max_seqlen_k": 99}
    named |= {x: make(3, dtype="int32") for x in ("seqused_k", "cp_tot_seqused_k")}
    return named | {"cu_seqlens_q": make(4, dtype="int32"), "cp_world_size": 4, "cp_rank": 3}


def test_the_planner_is_told_whole_lengths(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = _arrays(make, 6) | {"causal": True, "cp_kv_cache_interleave_size": 2}
    for _ in range(3):
        gpu.launches.clear()
        flash_attn.flash_attn_varlen_func(**named)
        planner, attention = gpu.launches
        assert _planned(planner) == (pointer(named["cp_tot_seqused_k"]), (2, 8, 6), 1)
        assert attention.kernel != "plan_batch"
        # From the second call on nothing is checked.
        monkeypatch.setattr(flash_attn.forward, "varlen", None)
    assert plan_batch.SHARED.tag.count("KeyShare") == 1


def test_rows_that_see_all_keys_are_ordinary(gpu: Gpu, make: Callable) -> None:
    for changes in ({}, {"cp_tot_seqused_k": None}):
        flash_attn.flash_attn_varlen_func(**_arrays(make, 6) | changes)
    pages = make(30, 16, 2, 64), make(30, 16, 2, 64)
    tables = {"block_table": make(3, 9, dtype="int32"), "cache_seqlens": make(3, dtype="int32")}
    for whole in (None, make(3, dtype="int32")):
        for _ in "12":
            flash_attn.flash_attn_with_kvcache(
                make(3, 1, 8, 64), *pages, **tables, causal=True, cp_world_size=2,
                cp_tot_seqused_k=whole,
            )  # fmt: skip
    for launch in gpu.launches:
        if launch.kernel == "plan_batch":
            _, share, _ = _planned(launch)
            assert share == (1, 0, 0)
    assert not [x for x in gpu.launches if "kKeyShare" in str(x.kernel)]


def test_whole_lengths_without_the_rows(gpu: Gpu, make: Callable) -> None:
    before, world = make(3, dtype="int32"), {"cp_world": 2, "cp_rank": 1}
    cupyattn.trtllm_batch_decode_with_kv_cache(
        make(6, 8, 64), make(30, 2, 2, 16, 64), None, make(3, 9, dtype="int32"),
        make(3, dtype="int32"), 99, q_len_per_req=2, causal_seqlens_kv_global=before, **world,
    )  # fmt: skip
    assert _planned(gpu.launches[0]) == (pointer(before), (1, 2, 1), -1)

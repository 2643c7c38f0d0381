"""Test vectors of the metadata, by their numbers in the specification of the backend: what SGLang's
fields must hold, except where its arithmetic is wrong (test_faults.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import serving_engine as engine
from helpers.serving_engine import TREE_A, TREE_B, flat_mask

from cupyattn.flash_attn import merge_state_v2
from cupyattn.reference import attention

DECODE, EXTEND, VERIFY = "DECODE", "EXTEND", "TARGET_VERIFY"


def metadata(backend: Any, batch: Any) -> Any:
    backend.init_forward_metadata(batch)
    return backend.forward_metadata


def same(x: Any, wanted: Any) -> None:
    assert np.asarray(x).dtype == np.int32
    assert np.asarray(x).tolist() == wanted


def span(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_t1_decode() -> None:
    meta = metadata(engine.backend(), engine.batch(DECODE, [3, 5, 1], [2, 0, 5]))
    same(meta.cache_seqlens_int32, [3, 5, 1])
    same(meta.cu_seqlens_q, [0, 1, 2, 3])
    same(meta.cu_seqlens_k, [0, 3, 8, 9])
    assert (meta.max_seq_len_q, meta.max_seq_len_k) == (1, 5)
    same(meta.page_table, [span(210, 5), span(10, 5), span(510, 5)])


def test_t2_decode_of_pages() -> None:
    backend = engine.backend(4)
    meta = metadata(backend, engine.batch(DECODE, [3, 9, 4], [2, 0, 5]))
    same(meta.cache_seqlens_int32, [3, 9, 4])
    assert meta.max_seq_len_k == 9
    same(meta.page_table, [[21, 22, 23], [1, 2, 3], [51, 52, 53]])
    # What kernels read: the pages of each request, and no more.
    own = backend.core.forward_metadata.main.page_table
    assert [own[0, :1].tolist(), own[1, :3].tolist(), own[2, :1].tolist()] == [
        [21],
        [1, 2, 3],
        [51],
    ]


def test_t3_draft_decode_of_a_chain() -> None:
    batch = engine.batch(DECODE, [3, 5, 1], [2, 0, 5], spec_info=SimpleNamespace())
    meta = metadata(engine.backend(step=1, steps=3, topk=1), batch)
    same(meta.cache_seqlens_int32, [5, 7, 3])
    same(meta.cu_seqlens_q, [0, 1, 2, 3])
    assert meta.max_seq_len_k == 7
    same(meta.page_table, [span(210, 7), span(10, 7), span(510, 7)])


def test_t4_draft_decode_of_beams() -> None:
    batch = engine.batch(
        *(DECODE, [3, 5], [2, 0]), spec_info=SimpleNamespace(), out_cache_loc=np.arange(200, 212)
    )
    backend = engine.backend(step=1, steps=3, topk=2)
    meta = metadata(backend, batch)
    same(meta.cache_seqlens_int32, [3, 5])
    same(meta.cu_seqlens_q, [0, 2, 4])
    assert (meta.max_seq_len_q, meta.max_seq_len_k) == (2, 5)
    same(meta.page_table, [span(210, 5), span(10, 5)])
    expand = backend.forward_metadata_spec_decode_expand
    same(expand.cache_seqlens_int32, [2, 2, 2, 2])
    same(expand.cu_seqlens_q, [0, 1, 2, 3, 4])
    same(expand.cu_seqlens_k, [0, 2, 4, 6, 8])
    same(expand.page_table, [[200, 201], [203, 204], [206, 207], [209, 210]])


def test_t5_verify_of_a_chain() -> None:
    batch = engine.batch(VERIFY, [3, 6], [2, 0], spec_info=SimpleNamespace())
    meta = metadata(engine.backend(4, topk=1, num_draft_tokens=4), batch)
    same(meta.cache_seqlens_int32, [7, 10])
    same(meta.cu_seqlens_q, [0, 4, 8])
    assert (meta.max_seq_len_q, meta.max_seq_len_k) == (4, 10)
    same(meta.page_table, [[21, 22, 23], [1, 2, 3]])


T6_LENS = [1, 2, 2, 3, 1, 2, 3, 2]
T6_TABLE = [
    *([213, 214, 215, 216], [213, 214, 215, 216], [213, 215, 214, 216], [213, 214, 216, 215]),
    *([15, 16, 17, 18], [15, 16, 17, 18], [15, 16, 17, 18], [15, 18, 16, 17]),
]


def verify_tree(**changes: Any) -> Any:
    backend = engine.backend(topk=2, num_draft_tokens=4, **changes)
    spec = SimpleNamespace(custom_mask=flat_mask([3, 5], TREE_A, TREE_B), positions=np.zeros(8))
    assert spec.custom_mask.size == 64
    metadata(backend, engine.batch(VERIFY, [3, 5], [2, 0], spec_info=spec))
    return backend


@pytest.mark.parametrize("form", ["mask", "expand"])
def test_t6_verify_of_trees(form: str) -> None:
    backend = verify_tree(tree_form=form)
    meta = backend.forward_metadata
    same(meta.cache_seqlens_int32, [3, 5])
    same(meta.cu_seqlens_q, [0, 4, 8])
    same(meta.page_table, [span(210, 5), span(10, 5)])
    assert (meta.max_seq_len_q, meta.max_seq_len_k) == (4, 5)
    expand = backend.forward_metadata_spec_decode_expand
    same(expand.cache_seqlens_int32, T6_LENS)
    same(expand.cu_seqlens_k, [0, 1, 3, 5, 8, 9, 11, 14, 16])
    same(expand.page_table, T6_TABLE)


@pytest.mark.parametrize("form", ["mask", "expand"])
def test_t6b_padded_requests_of_a_graph_see_all_drafts(form: str) -> None:
    backend = engine.backend(topk=2, num_draft_tokens=4, tree_form=form)
    backend.init_cuda_graph_state(4, 16)
    spec = SimpleNamespace(custom_mask=flat_mask([3], TREE_A), positions=np.zeros(4))
    req, lens = np.array([2, 0]), np.array([3, 1])
    backend.init_forward_metadata_capture_cuda_graph(
        *(2, 8, req, lens, None, SimpleNamespace(name=VERIFY), SimpleNamespace(custom_mask=None))
    )
    backend.init_forward_metadata_replay_cuda_graph(
        *(2, req, lens, 4, None, SimpleNamespace(name=VERIFY), spec, lens)
    )
    expand = backend.forward_metadata_spec_decode_expand
    same(expand.cache_seqlens_int32, [1, 2, 2, 3, 4, 4, 4, 4])
    same(expand.page_table, [*T6_TABLE[:4], *[span(11, 4)] * 4])


def test_t7_windows_over_trees() -> None:
    backend = verify_tree(sliding_window_size=2)
    swa = backend.forward_metadata.swa_spec_metadata
    same(swa.cache_seqlens_int32, [4, 5, 5, 6, 6, 7, 8, 7])
    same(swa.cu_seqlens_k, [0, 4, 9, 14, 20, 26, 33, 41, 48])
    table = np.asarray(swa.page_table)
    assert table.shape == (8, 9)
    assert table[0].tolist() == [210, 211, 212, 213, 0, 0, 0, 0, 0]
    assert table[3].tolist() == [210, 211, 212, 213, 214, 216, 0, 0, 0]
    assert table[7].tolist() == [10, 11, 12, 13, 14, 15, 18, 0, 0]
    # What kernels read: a window's keys of each path.
    rows = backend.core.forward_metadata.window_rows
    assert rows.cache_seqlens.tolist() == [3] * 8
    assert rows.page_table[0].tolist() == [211, 212, 213]
    assert rows.page_table[3].tolist() == [213, 214, 216]
    assert rows.page_table[7].tolist() == [14, 15, 18]


@pytest.mark.parametrize(
    ("lens", "extend", "cu_q", "most"),
    [
        pytest.param([6, 4], [2, 4], [0, 2, 6], 4, id="t8a"),
        pytest.param([6, 4], [6, 4], [0, 6, 10], 6, id="t8b"),
    ],
)
def test_t8_extend(lens: list[int], extend: list[int], cu_q: list[int], most: int) -> None:
    meta = metadata(engine.backend(), engine.batch(EXTEND, lens, [2, 0], extend=extend))
    same(meta.cu_seqlens_q, cu_q)
    assert (meta.max_seq_len_q, meta.max_seq_len_k) == (most, 6)


def test_t8c_mixed() -> None:
    batch = engine.batch("MIXED", [6, 8, 3], [2, 0, 5], extend=[6, 1, 1])
    meta = metadata(engine.backend(), batch)
    same(meta.cache_seqlens_int32, [6, 8, 3])
    same(meta.cu_seqlens_q, [0, 6, 7, 8])
    assert (meta.max_seq_len_q, meta.max_seq_len_k) == (6, 8)


def test_t8d_draft_extend() -> None:
    batch = engine.batch("DRAFT_EXTEND", [6, 9], [2, 0], extend=[1, 3])
    meta = metadata(engine.backend(4, num_draft_tokens=4), batch)
    same(meta.cu_seqlens_q, [0, 1, 4])
    assert meta.max_seq_len_q == 3
    same(meta.page_table, [[21, 22, 23], [1, 2, 3]])


def test_t9_encoder() -> None:
    batch = engine.batch(DECODE, [3], [2], encoder_lens=np.array([4]))
    meta = metadata(engine.backend(is_encoder_decoder=True), batch)
    same(meta.encoder_lens_int32, [4])
    same(meta.encoder_cu_seqlens_k, [0, 4])
    same(meta.encoder_page_table, [span(210, 4)])
    same(meta.page_table, [span(214, 3)])
    assert meta.encoder_max_seq_len_k == 4


def local(backend: Any, batch: Any) -> Any:
    return metadata(backend, batch).local_attn_metadata


def test_t10_the_documented_example_of_chunks() -> None:
    table = np.zeros((3, 20), np.int32)
    for row in range(3):
        pages = 10 * row + np.arange(10)
        table[row] = (pages[:, None] * 2 + np.arange(2)).reshape(-1)
    backend = engine.backend(2, table=table, context_len=20, attention_chunk_size=4)
    found = local(backend, engine.batch(EXTEND, [6, 17, 9], [0, 1, 2], extend=[4, 10, 5]))
    # The comment in SGLang's file has other offsets than its code, which has these.
    same(found.local_query_start_loc, [0, 2, 4, 5, 9, 13, 14, 18, 19])
    same(found.local_seqused_k, [4, 2, 4, 4, 4, 1, 4, 1])
    wanted = [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]
    entries = np.asarray(found.local_block_table)
    for row, own, keys in zip(entries, wanted, found.local_seqused_k, strict=True):
        used = -(-int(keys) // 2)
        assert row[:used].tolist() == own[:used]


def test_t11_chunks_of_an_extend() -> None:
    batch = engine.batch(EXTEND, [6, 9], [2, 0], extend=[4, 5])
    found = local(engine.backend(attention_chunk_size=4), batch)
    same(found.local_query_start_loc, [0, 2, 4, 8, 9])
    same(found.local_seqused_k, [4, 2, 4, 1])
    assert (found.local_max_query_len, found.local_max_seq_len) == (4, 4)
    table = np.asarray(found.local_block_table)
    assert [table[0].tolist(), table[1, :2].tolist()] == [span(210, 4), [214, 215]]
    assert table[2:].tolist() == [span(14, 4), [18, 18, 18, 18]]


def test_t12_chunks_of_a_decode() -> None:
    batch = engine.batch(DECODE, [6, 9, 4], [2, 0, 5])
    found = local(engine.backend(attention_chunk_size=4), batch)
    same(found.local_query_start_loc, [0, 1, 2, 3])
    same(found.local_seqused_k, [2, 1, 4])
    table = np.asarray(found.local_block_table)
    assert [table[0, :2].tolist(), table[1:].tolist()] == [
        [214, 215],
        [[18, 18, 18, 18], span(510, 4)],
    ]


def hybrid_pool(**other: Any) -> SimpleNamespace:
    mapping = np.zeros(1000, np.int64)
    mapping[210:216], mapping[10:19] = np.arange(1, 7), np.arange(20, 29)
    return SimpleNamespace(full_to_swa_index_mapping=mapping, **other)


def test_t13_chunks_of_a_second_pool() -> None:
    backend = engine.backend(attention_chunk_size=4, is_hybrid=True, token_to_kv_pool=hybrid_pool())
    found = local(backend, engine.batch(DECODE, [6, 9], [2, 0]))
    same(found.local_seqused_k, [2, 1])
    table = np.asarray(found.local_block_table)
    assert [table[0, :2].tolist(), table[1, :1].tolist()] == [[5, 6], [28]]


def test_t14_replays_write_in_place() -> None:
    backend = engine.backend(4, context_len=24)
    backend.init_cuda_graph_state(4, 4)
    mode = SimpleNamespace(name=DECODE)
    req, lens = np.array([2, 0, 0, 0]), np.array([3, 9, 1, 1])
    backend.init_forward_metadata_capture_cuda_graph(4, 4, req, np.ones(4, int), None, mode, None)
    before = backend.core.forward_metadata.main
    before.page_table[...] = 99
    backend.init_forward_metadata_replay_cuda_graph(4, req, lens, 14, None, mode, None, lens)
    after = backend.core.forward_metadata.main
    assert after.page_table.ctypes.data == before.page_table.ctypes.data
    assert after.cache_seqlens.ctypes.data == before.cache_seqlens.ctypes.data
    same(after.cache_seqlens, [3, 9, 1, 1])
    same(backend.forward_metadata.cu_seqlens_k, [0, 3, 12, 13, 14])
    # Only pages that hold keys are written.
    assert after.page_table[:, :3].tolist() == [[21, 99, 99], [1, 2, 3], [1, 99, 99], [1, 99, 99]]


def test_t15_steps_share_a_store() -> None:
    backends = engine.multi_step(3, topk=1)
    batch = engine.batch(DECODE, [3, 5], [2, 0], spec_info=SimpleNamespace())
    backends.init_forward_metadata(batch)
    metas = [backend.forward_metadata for backend in backends.attn_backends]
    assert [None if m is None else m.cache_seqlens_int32.tolist() for m in metas] == [
        [4, 6],
        [5, 7],
        None,
    ]
    neutral = [backend.core.forward_metadata.main for backend in backends.attn_backends[:2]]
    assert neutral[0].kv_offsets.ctypes.data == neutral[1].kv_offsets.ctypes.data


def test_t16_replay_of_a_draft_extend() -> None:
    backend = engine.backend(topk=1, num_draft_tokens=4)
    backend.init_cuda_graph_state(2, 8)
    mode = SimpleNamespace(name="DRAFT_EXTEND")
    req, lens = np.array([2, 0]), np.array([6, 9])
    spec = SimpleNamespace(accept_length=np.array([2, 1]), accept_length_cpu=[1, 0])
    backend.init_forward_metadata_capture_cuda_graph(2, 8, req, lens, None, mode, spec)
    same(backend.forward_metadata.cu_seqlens_q, [0, 4, 8])
    backend.init_forward_metadata_replay_cuda_graph(2, req, lens, 15, None, mode, spec, lens)
    same(backend.forward_metadata.cu_seqlens_q, [0, 2, 3])
    assert backend.forward_metadata.max_seq_len_q == 2


def test_t17_chunks_of_a_prefix_merge_to_the_whole() -> None:
    rng = np.random.default_rng(17)
    prefix, chunk = [5, 3, 0], 2
    starts = range(0, max(prefix), chunk)
    lens = [[min(max(n - s, 0), chunk) for n in prefix] for s in starts]
    assert lens == [[2, 2, 0], [2, 1, 0], [1, 0, 0]]
    assert [[0, *np.cumsum(x)] for x in lens] == [[0, 2, 4, 4], [0, 2, 3, 3], [0, 1, 1, 1]]
    for n in prefix:
        q, k, v = (rng.standard_normal((rows, 2, 8)) for rows in (1, n, n))
        whole, whole_lse = attention(q, k, v)
        out, lse = np.zeros((1, 2, 8)), np.full((1, 2), -np.inf)
        for s in starts:
            part, part_lse = attention(q, k[s : s + chunk], v[s : s + chunk])
            out, lse = (
                np.asarray(x, np.float64)
                for x in merge_state_v2(
                    *(out.astype(np.float32), lse.astype(np.float32)),
                    *(part.astype(np.float32), (part_lse * np.log(2)).astype(np.float32)),
                )
            )
        np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, whole_lse * np.log(2), rtol=1e-5, atol=1e-6)


def test_t18_merge() -> None:
    inf = np.inf
    v_a = np.array([[[1, 2]], [[4, 4]], [[7, 7]]], np.float32)
    v_b = np.array([[[3, 6]], [[8, 0]], [[9, 9]]], np.float32)
    s_a = np.array([[0], [1], [inf]], np.float32)
    s_b = np.array([[np.log(3)], [-inf], [0.5]], np.float32)
    v, s = merge_state_v2(v_a, s_a, v_b, s_b)
    np.testing.assert_allclose(np.asarray(v)[:, 0], [[2.5, 5], [4, 4], [9, 9]], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(s)[:, 0], [1.386294, 1.0, 0.5], rtol=1e-6)


def t22(**changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two heads over one; keys i / 2 and values i in slot i; the last two tokens of [5, 3, 1]."""
    table = np.zeros((1, 8), np.int32)
    table[0, :3] = 5, 3, 1
    values = np.repeat(np.arange(8, dtype=np.float32), 8).reshape(8, 1, 8)
    keys = values / 2
    keys[..., 1:] = 0
    pool = SimpleNamespace(get_kv_buffer=lambda layer_id: (keys, values))
    backend = engine.backend(table=table, context_len=8, token_to_kv_pool=pool)
    backend.init_forward_metadata(engine.batch(EXTEND, [3], [0], extend=[2]))
    q = np.zeros((2, 2, 8), np.float32)
    q[..., 0] = [[1, 2], [0, -1]]
    sinks = changes.pop("sinks", None)
    layer = engine.layer(**changes)
    spec = backend._layer(layer, pool, sinks)
    out, lse = backend.core.forward(q, spec, return_lse=True)
    return out[..., 0], lse


@pytest.mark.parametrize(
    ("changes", "out", "lse"),
    [
        pytest.param(
            {},
            [[4.462117, 4.761594], [3.0, 1.849579]],
            [[2.813262, 1.098612], [5.126928, -0.092394]],
            id="plain",
        ),
        pytest.param(
            {"sinks": np.zeros(2, np.float32)},
            [[4.209509, 4.733502], [2.25, 0.882097]],
            [[2.871539, 1.386294], [5.132845, 0.648017]],
            id="sinks",
        ),
        pytest.param(
            {"logit_cap": 1.0},
            [[4.040711, 4.002427], [3.0, 2.634594]],
            [[1.639858, 1.098612], [1.690632, 0.34165]],
            id="soft cap",
        ),
    ],
)
def test_t22_attention(changes: dict[str, Any], out: Any, lse: Any) -> None:
    found, found_lse = t22(**changes)
    np.testing.assert_allclose(found, out, rtol=1e-5)
    np.testing.assert_allclose(found_lse, lse, rtol=1e-4)


def test_t22_window() -> None:
    found, lse = t22(sliding_window_size=1)
    np.testing.assert_allclose(found[1], [2.0, 1.537883], rtol=1e-5)
    np.testing.assert_allclose(lse[:, 1], [0.693147, -0.186738], rtol=1e-4)

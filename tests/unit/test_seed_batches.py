"""The batch examples of FlashInfer's documentation, with one import changed, on CPU tensors.

Heads, dims and layers are fewer than there, for the time that the reference takes.
"""

from __future__ import annotations

import pytest

import cupyattn as flashinfer

torch = pytest.importorskip("torch")


def test_batch_prefill_with_paged_kv_cache() -> None:
    num_layers = 2
    num_qo_heads = 8
    num_kv_heads = 2
    head_dim = 16
    max_num_pages = 128
    page_size = 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32)
    paged_kv_indices = torch.arange(max_num_pages).int()
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32)
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half()
    kv_cache_at_layer = torch.randn(
        num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16
    )
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, 8, 16])
    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (
        (page_size * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len)
        .cpu()
        .tolist()
    )
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        custom_mask=mask,
    )
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)


def test_batch_prefill_with_ragged_kv_cache() -> None:
    num_layers = 2
    num_qo_heads = 8
    num_kv_heads = 2
    head_dim = 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8)
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32)
    kv_indptr = qo_indptr.clone()
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half()
    k_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half()
    v_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half()
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.plan(
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, 8, 16])
    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, custom_mask=mask
    )
    outputs_custom_mask = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, k, v)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)
        outputs_custom_mask.append(o_custom)
    assert outputs_custom_mask[0].shape == torch.Size([100, 8, 16])


def test_batch_decode_with_data_type() -> None:
    num_layers = 2
    num_qo_heads = 16
    num_kv_heads = 2
    head_dim = 16
    max_num_pages = 128
    page_size = 16
    batch_size = 7
    workspace_buffer = torch.zeros(128 * 1024 * 1024, dtype=torch.uint8)
    decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace_buffer, kv_layout="NHD"
    )
    kv_page_indices = torch.arange(max_num_pages).int()
    kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32)
    kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32)
    kv_cache_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    decode_wrapper.plan(
        kv_page_indptr,
        kv_page_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        data_type=torch.float16,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half()
        kv_cache = kv_cache_at_layer[i]
        o = decode_wrapper.run(q, kv_cache)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([7, 16, 16])


def test_batch_prefill_with_data_type() -> None:
    num_qo_heads = 8
    num_kv_heads = 2
    head_dim = 16
    page_size = 16
    max_num_pages = 256
    workspace_buffer = torch.zeros(128 * 1024 * 1024, dtype=torch.uint8)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace_buffer, kv_layout="NHD"
    )
    kv_page_indices = torch.arange(max_num_pages).int()
    kv_page_indptr = torch.tensor([0, 32, 64, 96, 128, 160, 192, 224, 256], dtype=torch.int32)
    kv_last_page_len = torch.tensor([16, 16, 16, 16, 16, 16, 16, 16], dtype=torch.int32)
    qo_indptr = torch.tensor([0, 64, 128, 192, 256, 320, 384, 448, 512], dtype=torch.int32)
    q = torch.randn(512, num_qo_heads, head_dim).half()
    kv_cache = torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16)
    prefill_wrapper.plan(
        qo_indptr,
        kv_page_indptr,
        kv_page_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
        data_type=torch.float16,
    )
    o = prefill_wrapper.run(q, kv_cache)
    assert o.shape == torch.Size([512, 8, 16])


def test_batch_decode_with_shared_prefix() -> None:
    num_layers = 2
    num_qo_heads = 16
    num_kv_heads = 2
    head_dim = 16
    max_num_pages = 128
    page_size = 16
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    shared_prefix_len = 8192
    unique_kv_page_indices = torch.arange(max_num_pages).int()
    unique_kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32)
    # 1 <= kv_last_page_len <= page_size
    unique_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32)
    unique_kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch decode attention
    wrapper.begin_forward(
        unique_kv_page_indptr,
        unique_kv_page_indices,
        unique_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        data_type=torch.float16,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half()
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        unique_kv_data = unique_kv_data_at_layer[i]
        # compute batch decode attention, reuse auxiliary data structures for all layers
        o = wrapper.forward(q, k_shared, v_shared, unique_kv_data)
        outputs.append(o)
    # clear auxiliary data structures
    wrapper.end_forward()
    assert outputs[0].shape == torch.Size([7, 16, 16])


def test_batch_prefill_with_shared_prefix() -> None:
    num_layers = 2
    num_qo_heads = 8
    num_kv_heads = 2
    head_dim = 16
    max_num_pages = 128
    page_size = 16
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8)
    prefill_wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        workspace_buffer, "NHD"
    )
    shared_prefix_len = 1024
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32)
    paged_kv_indices = torch.arange(max_num_pages).int()
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32)
    kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16)
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.begin_forward(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(nnz_qo, num_qo_heads, head_dim).half()
        kv_data = kv_data_at_layer[i]
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.forward(q, k_shared, v_shared, kv_data, causal=True)
        outputs.append(o)
    # clear auxiliary data structures
    prefill_wrapper.end_forward()
    assert outputs[0].shape == torch.Size([100, 8, 16])


def test_xqa() -> None:
    batch_size = 8
    num_qo_heads = 8
    num_kv_heads = 2
    head_dim = 16
    page_size = 16
    max_seq_len = 256
    q = torch.randn(batch_size, num_qo_heads, head_dim).half()
    k_cache = torch.randn(128, 2, page_size, num_kv_heads, head_dim).half()
    v_cache = k_cache.clone()
    page_table = torch.randint(0, 128, (batch_size, max_seq_len // page_size + 1)).int()
    seq_lens = torch.randint(100, max_seq_len, (batch_size,)).int()
    output = flashinfer.xqa(
        q, k_cache, v_cache, page_table, seq_lens, head_dim=head_dim, page_size=page_size
    )
    assert output.shape == q.shape and output.dtype is torch.float16

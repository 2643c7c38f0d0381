"""FlashInfer's batch calls and FlashAttention-3's op on CPU torch tensors, by the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.reference import attention


def as_float64(x: Any) -> np.ndarray:
    return x.float().numpy().astype(np.float64)


class FakeWrapper:
    """FlashInfer's wrappers on CPU torch tensors: plan() and run() with its argument names."""

    paged = True
    ragged_q = True

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", **named: Any) -> None:
        assert float_workspace_buffer.ndim == 1 and kv_layout == "NHD"
        assert set(named) <= {"backend", "use_tensor_cores"}

    def plan(self, *tables: Any, **named: Any) -> None:
        arrays = list(tables)
        self.page_size = arrays.pop() if self.paged else 0
        self.num_qo_heads, self.num_kv_heads, self.head_dim = arrays[-3:]
        arrays = [np.asarray(table) for table in arrays[:-3]]
        q_len = named.pop("q_len_per_req", 1)
        self.qo_indptr = arrays.pop(0) if self.ragged_q else q_len * np.arange(len(arrays[0]))
        named |= {"causal": True} if q_len > 1 else {}
        self.tables = arrays
        assert named.pop("q_data_type") == "bfloat16"
        named.pop("kv_data_type"), named.pop("head_dim_vo", None)
        self.named = named

    def run(self, q: Any, *cache: Any, out: Any = None, mask: Any = None) -> Any:
        import torch

        named = dict(self.named)
        tree = mask
        packed, mask = named.pop("packed_custom_mask", None), named.pop("custom_mask", None)
        bits = bytes_done = 0
        answers = []
        for b, (start, stop) in enumerate(pairwise(self.qo_indptr)):
            k, v = (as_float64(x) for x in self._keys(b, *cache))
            shape, cells = (stop - start, len(k)), (stop - start) * len(k)
            if packed is not None:
                mine = packed.numpy()[bytes_done : bytes_done + -(-cells // 8)]
                bytes_done += len(mine)
                mine = np.unpackbits(mine, count=cells, bitorder="little")
                named["mask"] = mine.astype(bool).reshape(shape)
            if mask is not None:
                named["mask"] = mask.numpy()[bits : bits + cells].reshape(shape)
                bits += cells
            if tree is not None:
                bits_of = tree.numpy()[start:stop, None] >> np.arange(stop - start)
                ones = np.ones((stop - start, len(k) - (stop - start)), bool)
                named["mask"] = np.concatenate([ones, bits_of % 2 == 1], axis=1)
            answers.append(attention(as_float64(q[start:stop]), k, v, **named)[0])
        result = torch.from_numpy(np.concatenate(answers)).to(torch.bfloat16)
        return result if out is None else out.copy_(result)

    def _keys(self, b: int, *cache: Any) -> Any:
        if not self.paged:
            indptr = self.tables[0]
            return [x[indptr[b] : indptr[b + 1]] for x in cache]
        indptr, indices, last = self.tables
        pages = indices[indptr[b] : indptr[b + 1]]
        stop = (len(pages) - 1) * self.page_size + last[b]
        import torch

        return [torch.cat([pool[int(p)].float() for p in pages])[:stop] for pool in cache[0]]


FakeDecode = type("FakeDecode", (FakeWrapper,), {"ragged_q": False})
FakeRagged = type("FakeRagged", (FakeWrapper,), {"paged": False})
LIBRARY = {
    "BatchDecodeWithPagedKVCacheWrapper": FakeDecode,
    "BatchPrefillWithPagedKVCacheWrapper": FakeWrapper,
    "BatchPrefillWithRaggedKVCacheWrapper": FakeRagged,
}


def single_prefill(q: Any, k: Any, v: Any, *, out: Any, **named: Any) -> Any:
    one = FakeRagged(np.zeros(1))
    one.plan(np.array([0, len(q)]), np.array([0, len(k)]), 1, 1, 1, q_data_type="bfloat16",
             kv_data_type="bfloat16", **named)  # fmt: skip
    return one.run(q, k, v, out=out)


def xqa(query: Any, kv_cache: Any, workspace: Any, block_tables: Any, seq_lens: Any,
         max_seq_len: int, *, window_left: int, out: Any, **named: Any) -> Any:  # fmt: skip
    assert named["backend"] == "xqa" and named["kv_layout"] == "NHD"
    assert named["bmm1_scale"] == query.shape[-1] ** -0.5 and max_seq_len == seq_lens.max()
    for b, (table, stop) in enumerate(zip(block_tables, seq_lens, strict=True)):
        k, v = (as_float64(pool[table.long()].flatten(0, 1)[:stop]) for pool in kv_cache)
        answer, _ = attention(as_float64(query[b : b + 1]), k, v, window_left=window_left)
        out[b] = out.new_tensor(answer[0])
    return out


def fa3(q: Any, k: Any, v: Any, *, is_causal: bool, num_splits: int, softmax_scale: float,
         cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, page_table: Any = None,
         seqused_k: Any = None, window_size_left: int = -1, **_: Any) -> Any:  # fmt: skip
    import torch

    assert num_splits in (0, 1) and softmax_scale == q.shape[-1] ** -0.5
    if page_table is None and cu_seqlens_k is None:  # one dense batch
        cu_seqlens_q, cu_seqlens_k = (np.arange(len(x) + 1) * x.shape[1] for x in (q, k))
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    rows = q.flatten(0, -3)
    ends = np.arange(len(q) + 1) if cu_seqlens_q is None else np.asarray(cu_seqlens_q)
    answers = []
    for b, (start, stop) in enumerate(pairwise(ends)):
        if page_table is None:
            pair = [x[cu_seqlens_k[b] : cu_seqlens_k[b + 1]] for x in (k, v)]
        else:
            pages = page_table[b].long()
            pair = [x[pages].flatten(0, 1)[: seqused_k[b]] for x in (k, v)]
        k_b, v_b = (as_float64(x) for x in pair)
        window = {"causal": is_causal, "window_left": window_size_left}
        answers.append(attention(as_float64(rows[start:stop]), k_b, v_b, **window)[0])
    return torch.from_numpy(np.concatenate(answers)).to(torch.bfloat16).view(q.shape), None

"""Decode over a cache that is spread over ranks, with torch.distributed: in CUDA graphs on GPUs.

    torchrun --nproc-per-node 2 examples/context_parallel_torch.py

Tokens of a request go round the ranks one by one, and every rank keeps its own behind each other.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cupyattn.distributed import ContextParallelCall, Group
from cupyattn.flash_attn import flash_attn_with_kvcache
from cupyattn.shares import get_share_seq_lens

BATCH, KEYS, PAGE_SIZE, DRAFTS, HEADS, KV_HEADS, DIM = 4, 1024, 16, 3, 32, 8, 128


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with Group.from_torch() as group:
        torch.manual_seed(0)  # every rank makes the same requests
        q = torch.randn(BATCH, DRAFTS, HEADS, DIM).to(device, dtype)
        k, v = (torch.randn(BATCH, KEYS, KV_HEADS, DIM).to(device, dtype) for _ in "kv")
        lens = torch.tensor([KEYS, 700, 17, DRAFTS], dtype=torch.int32, device=device)

        rank, size = group.rank, group.size
        # Token t is token t // size of rank t % size, whose pages lie one behind the other.
        own_k, own_v = (x[:, rank::size].reshape(-1, PAGE_SIZE, KV_HEADS, DIM) for x in (k, v))
        table = torch.arange(len(own_k), dtype=torch.int32, device=device).view(BATCH, -1)
        own_lens = get_share_seq_lens(lens, size, rank)
        own = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        own_q = q[:, :, own].contiguous()
        attend = ContextParallelCall(
            group,
            flash_attn_with_kvcache,
            max_rows=BATCH * DRAFTS,
            num_qo_heads=HEADS,
            head_dim=DIM,
            out_dtype=dtype,
        )

        def step() -> torch.Tensor:
            return attend(
                own_q,
                own_k,
                own_v,
                cache_seqlens=own_lens,
                block_table=table,
                causal=True,
                cp_tot_seqused_k=lens,
            )

        out = step()
        if on_gpu and attend.can_capture:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = step()
            graph.replay()
        alone = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
        off = float((out.float() - alone[:, :, own].float()).abs().max())
        print(f"{group.describe()}: {tuple(out.shape)}, at most {off:.4f} from one rank's answer")
        assert off < 0.03
        attend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

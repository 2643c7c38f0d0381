"""Decode over a cache that is spread over the GPUs of this host, with CuPy and NCCL alone.

    python examples/context_parallel_nccl.py        # a process for each GPU; two on the CPU without

Pages of a request are dealt to the ranks in turn. A rank gathers the queries of all heads, attends
to its own pages, and gets its heads' answers over all keys.
"""

from __future__ import annotations

import multiprocessing
import tempfile

import cupy
import numpy as np

from cupyattn import BatchDecodeWithPagedKVCacheWrapper
from cupyattn.distributed import ContextParallelWrapper, Group
from cupyattn.shares import get_share_seq_lens

BATCH, PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 4, 64, 16, 32, 8, 128
LENS = np.array([PAGES * PAGE_SIZE, 700, 17, 1])


def plan(wrapper, table, lens) -> None:
    """Plan for requests that have the first `lens` tokens of the pages in `table`."""
    counts = -(-lens // PAGE_SIZE)
    indptr = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    indices = np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)]).astype(
        np.int32
    )
    last = np.maximum(lens - (counts - 1) * PAGE_SIZE, 1).clip(max=PAGE_SIZE).astype(np.int32)
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type="float16")


def work(rank: int, size: int, folder: str, on_gpu: bool) -> None:
    """What each process does."""
    xp = cupy if on_gpu else np
    if on_gpu:
        cupy.cuda.Device(rank).use()
    with Group.from_folder(folder, rank, size, on_gpu=on_gpu) as group:
        rng = np.random.default_rng(0)  # every rank makes the same requests

        def normal(*shape: int):
            return xp.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))

        q, pages = normal(BATCH, HEADS, DIM), normal(BATCH * PAGES, 2, PAGE_SIZE, KV_HEADS, DIM)
        table = np.arange(BATCH * PAGES).reshape(BATCH, PAGES)
        alone = BatchDecodeWithPagedKVCacheWrapper(xp.zeros(64 << 20, np.uint8))
        plan(alone, table, LENS)
        spread = ContextParallelWrapper(
            group,
            BatchDecodeWithPagedKVCacheWrapper(xp.zeros(64 << 20, np.uint8)),
            max_rows=BATCH,
            num_qo_heads=HEADS,
            head_dim=DIM,
            cp_kv_cache_interleave_size=PAGE_SIZE,
            out_dtype="float16",
        )
        plan(spread, table[:, rank::size], get_share_seq_lens(LENS, size, rank, PAGE_SIZE))
        own = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        out = spread.run(q[:, own], pages)
        off = float(abs(out - alone.run(q, pages)[:, own]).max())
        print(f"{group.describe()}: answers {out.shape}, at most {off:.4f} from those of one")
        assert off < 0.01
        spread.close()


def main() -> None:
    gpus = cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0
    size = gpus or 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, size, folder, gpus > 0) for rank in range(size)]
        with multiprocessing.get_context("spawn").Pool(size) as pool:
            pool.starmap(work, arguments, chunksize=1)


if __name__ == "__main__":
    main()

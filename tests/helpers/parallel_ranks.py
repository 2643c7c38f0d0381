"""What a rank does on a GPU with attention over keys that ranks share, as a thread or a process.

    python -m helpers.parallel_ranks FOLDER RANK SIZE

Ranks find each other in FOLDER, where each leaves what it answered; rank i has GPU i. The last line
that a rank prints is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.distributed import ContextParallelCall, ContextParallelWrapper, Group
from cupyattn.flash_attn import flash_attn_with_kvcache
from cupyattn.mla import trtllm_batch_decode_with_kv_cache_mla

from . import exchange_ranks
from .exchange_ranks import ROOT
from .parallel_attention import Batch, own_part

_LATENT = {"latent": True, "own_heads": 8, "page_size": 64}
# What batches of a kind have that others have not.
KINDS: dict[str, dict[str, Any]] = {
    "decode": {},
    "drafts": {"q_len": 3},
    "flash_attn": {},
    "flash_attn drafts": {"q_len": 3},
    "mla": _LATENT,
    "trtllm mla": _LATENT,
}
Answer = tuple[np.ndarray, np.ndarray]


def run_kind(
    kind: str, batch: Batch, group: Group, uses_windows: bool | None = None
) -> list[Answer]:
    """out [.., own heads, columns] and LSE in base 2, twice, on the host."""
    call = make(kind, batch, group, uses_windows=uses_windows)
    unit = float(np.log2(np.e)) if kind.startswith("flash_attn") else 1.0
    held = [call(), call()]
    group.share_bytes(b"")  # all ranks of a GPU have launched all
    return [(out.get(), lse.get() * np.float32(unit)) for out, lse in held]


def make(
    kind: str,
    batch: Batch,
    group: Group,
    q_is_replicated: bool = False,
    uses_windows: bool | None = None,
) -> Callable[[], Any]:
    """A call of a kind, all of whose arrays are there."""
    import cupy

    q, keys, values = batch.draw()
    share = batch.share(group.rank)
    q = cupy.asarray(q if q_is_replicated else own_part(q, group))
    k, v = (cupy.asarray(batch.cache(x, share)) for x in (keys, values))
    flat = q.reshape(-1, *q.shape[2:])
    lens, tables = cupy.asarray(batch.lengths(share)), cupy.asarray(batch.tables(share))
    whole = np.array(batch.kv_lens, np.int32)
    options = {
        "max_rows": flat.shape[0],
        "num_qo_heads": batch.heads,
        "head_dim": 512 if batch.latent else batch.head_dim,
        "cp_kv_cache_interleave_size": batch.run,
        "q_is_replicated": q_is_replicated,
        "out_dtype": "float16",
        "timeout": 10.0,
        "uses_windows": uses_windows,
    }
    indptr = batch.indptr(share)
    pages = np.arange(indptr[-1], dtype=np.int32)
    rows = np.arange(len(whole) + 1, dtype=np.int32) * batch.q_len
    last = batch.last_page_len(share)
    if kind in ("decode", "drafts"):
        of_prefill = kind == "drafts"
        wrapper: Any = (
            cupyattn.BatchPrefillWithPagedKVCacheWrapper(None, "NHD")
            if of_prefill
            else cupyattn.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
        )
        parallel = ContextParallelWrapper(group, wrapper, **options)
        sizes = batch.heads, batch.kv_heads, batch.head_dim, batch.page_size
        given = {"q_data_type": "float16", "cp_tot_seqused_k": whole}
        if of_prefill:
            parallel.plan(rows, indptr, pages, last, *sizes, causal=True, **given)
        else:
            parallel.plan(indptr, pages, last, *sizes, **given)
        return lambda: parallel.run(flat, (k, v), return_lse=True)
    if kind == "mla":
        parallel = ContextParallelWrapper(
            group, cupyattn.BatchMLAPagedAttentionWrapper(None), **options
        )
        parallel.plan(
            rows,
            indptr,
            pages,
            batch.lengths(share),
            batch.heads,
            512,
            64,
            batch.page_size,
            False,
            576**-0.5,
            "float16",
            "float16",
            cp_tot_seqused_k=whole,
        )
        parts = [x[..., a:b] for x in (flat, k[:, :, 0]) for a, b in ((0, 512), (512, 576))]
        return lambda: parallel.run(*parts, return_lse=True)
    if kind == "trtllm mla":
        call = ContextParallelCall(group, trtllm_batch_decode_with_kv_cache_mla, **options)
        workspace = cupy.zeros(128 << 20, np.uint8)
        latent = k[:, :, 0]
        return lambda: call(
            q,
            latent,
            workspace,
            128,
            512,
            64,
            tables,
            lens,
            int(whole.max()),
            bmm1_scale=576**-0.5,
            return_lse=True,
        )
    call = ContextParallelCall(group, flash_attn_with_kvcache, **options)
    lengths = cupy.asarray(whole)
    return lambda: call(
        q,
        k,
        v,
        cache_seqlens=lens,
        block_table=tables,
        causal=True,
        cp_tot_seqused_k=lengths,
        return_lse=True,
    )


def check(batch: Batch, ranks: list[list[Answer]]) -> None:
    """Both answers are the same, and as near to the exact one as float16 allows."""
    for (out, lse), (again, lse_again) in ranks:
        np.testing.assert_array_equal(out.view(np.uint16), again.view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), lse_again.view(np.uint32))
    shape = len(batch.kv_lens), batch.q_len
    parts = [x[0][0].reshape(*shape, batch.own_heads, -1) for x in ranks]
    out = np.concatenate(parts, axis=2).astype(np.float64)
    lse = np.concatenate([x[0][1].reshape(*shape, batch.own_heads) for x in ranks], axis=2)
    q, keys, values = batch.draw()
    for i in range(len(keys)):
        wanted, wanted_lse = reference.attention(q[i], keys[i], values[i], causal=batch.q_len > 1)
        # P is rounded to 16 bits, as on one GPU.
        np.testing.assert_allclose(out[i], wanted, 4e-3, 4e-3)
        np.testing.assert_allclose(lse[i], wanted_lse, 1e-3, 1e-3)


def replay(group: Group, number: int = 50, *, q_is_replicated: bool = True) -> dict[str, Any]:
    """Replays of a graph of a call, against what the call answers."""
    import cupy

    batch = Batch(
        size=group.size,
        kv_lens=(300, 5, 1200, 64),
        own_heads=4,
        head_dim=128,
        page_size=16,
    )
    with cupy.cuda.Stream(non_blocking=True) as stream:
        call = make("flash_attn", batch, group, q_is_replicated)
        first = [x.get() for x in call()]
        group.share_bytes(b"")
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        held = call()
        graph = stream.end_capture()
        differing = 0
        for _ in range(number):
            graph.launch(stream)
            stream.synchronize()
            differing += any((x.get() != y).any() for x, y in zip(held, first, strict=True))
    return {"differing": differing, "replays": number}


def start(folder: Path, size: int) -> list[subprocess.Popen[str]]:
    """The processes of all ranks, each fresh."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "helpers.parallel_ranks", str(folder)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size)],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


finish = exchange_ranks.finish


def main(folder: str, rank: str, size: str) -> None:
    group = Group.from_folder(folder, int(rank), int(size), device=int(rank))
    batch = Batch(
        size=int(size),
        kv_lens=(300, 5, 1200, 64),
        own_heads=4,
        kv_heads=2,
        head_dim=128,
        page_size=16,
    )
    for kind, given in KINDS.items():
        (out, lse), (again, lse_again) = run_kind(kind, replace(batch, **given), group)
        place = Path(folder) / f"{kind}.{rank}.npz"
        np.savez(place, out=out, lse=lse, again=again, lse_again=lse_again)
    print(json.dumps(replay(group, q_is_replicated=False)), flush=True)
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

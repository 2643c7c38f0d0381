"""The rows of docs/results.md: each run measured by one command, and shown by another.

    python -m benchmarks.page prompts --out benchmarks/results/DATE-CARD-prompts
    python -m benchmarks.page batches --out benchmarks/results/DATE-CARD-batches
    python -m benchmarks.page flashinfer --out benchmarks/results/DATE-CARD-flashinfer
    python -m benchmarks.page --show DATE-CARD-prompts

The first three take a minute and a half each on a GPU, and the options of `python -m benchmarks`.
The last puts the folder's name in the place of the one of its kind that documents show, and writes
their tables and charts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from . import readme


class Run(NamedTuple):
    """What a run measures, beside which implementations."""

    ops: tuple[str, ...]
    peers: tuple[str, ...]
    cases: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RUNS = {
    "prompts": Run(
        _words("prefill ragged mla batch_decode"),
        _words("ours fa3 sdpa_cudnn sdpa_efficient flashmla"),
        _words("""
        ragged_4x4k ragged_16x1k ragged_32x512 ragged_zipf_16k ragged_4x4k_window1023
        ragged_4x4k_d64 ragged_4x4k_d256 mla_128x4k_h128 mla_32x8k_h16 mla_1x32k_h128
        mla_64x8k_h8 mla_8x8k_h16 mla_skew_h16 mla_32x8k_h16_q2 mla_32x8k_h16_q4 mla_64x8k_h16
        mla_64x8k_h16_p1 mla_64x8k_h16_fp8 mla_128x4k_h128_fp8 mla_sparse_8_h16
        mla_sparse_256_h128 mla_32x8k_h16_portable 1x16k 1x16k_full 1x16k_d64_mha 1x4k_192_128
        ragged_4x4k_mask_bits ragged_4x4k_rope ragged_4x4k_alibi ragged_4x4k_softcap
        ragged_10x384_encoder ragged_4x4k_d512 decode_64x4k_d512
        """),
    ),
    "batches": Run(
        _words("batch_decode append verify cascade mixed merge decode host host_batch host_merge"),
        _words("ours ours_apart fa3 sdpa_cudnn sdpa_flash"),
        _words("""
        decode_64x8k decode_256x2k decode_64x8k_p1 decode_64x8k_p64 decode_8x8k decode_64x1k
        decode_1x128k decode_skew decode_64x8k_fp8 decode_64x4k_mha decode_64x8k_h64_d64
        decode_64x32k_w1023 append_8x512_8k append_1x2k_32k append_64x8_4k append_8x512_8k_p64
        append_8x512_8k_p1 verify_32x8k_q1 verify_32x8k_q4 verify_32x8k_q8
        verify_32x8k_q4_tree verify_32x8k_q8_tree cascade_64x8k_256 cascade_256x32k_256
        cascade_16x2k_512 cascade_8x4k_128_h8_1 mixed_1x2k_8k_63x1_4k merge_n4096_pair
        merge_n512_pair merge_n4096_states2 merge_n512_states16 kv4k kv32k kv128k kv32k_fp8
        kv128k_fp8 run_decode_torch_out run_decode_torch_alloc run_decode_cupy_out
        run_paged_torch_out run_ragged_torch_out run_mla_torch_out plan_decode_64_numpy
        plan_decode_256_numpy plan_decode_1024_numpy plan_paged_256_numpy
        plan_prompts_32_numpy plan_decode_128_device host_merge_pair_torch_alloc
        host_decode_torch_out host_prefill_torch_out
        """),
    ),
    "flashinfer": Run(
        _words("batch_decode append verify cascade mixed ragged mla merge host_batch host_merge"),
        _words("ours ours_apart flashinfer_fa2 flashinfer_fa3"),
        _words("""
        cascade_64x8k_256 cascade_256x32k_256 cascade_16x2k_512 cascade_8x4k_128_h8_1
        verify_32x8k_q1 verify_32x8k_q4 verify_32x8k_q8 verify_32x8k_q4_tree
        verify_32x8k_q8_tree decode_64x8k decode_256x2k decode_64x8k_p1 decode_64x8k_p64
        decode_8x8k decode_64x1k decode_1x128k decode_skew decode_64x8k_fp8 decode_64x4k_mha
        append_8x512_8k append_1x2k_32k append_64x8_4k append_8x512_8k_p64 append_8x512_8k_p1
        mixed_1x2k_8k_63x1_4k ragged_4x4k ragged_16x1k ragged_32x512 ragged_zipf_16k
        mla_128x4k_h128 mla_32x8k_h16 mla_1x32k_h128 mla_64x8k_h8 mla_8x8k_h16 mla_skew_h16
        mla_64x8k_h16 mla_64x8k_h16_p1 mla_sparse_8_h16 mla_sparse_256_h128 merge_n4096_pair
        merge_n512_pair merge_n4096_states2 merge_n512_states16 run_decode_torch_out
        run_decode_torch_alloc run_paged_torch_out run_ragged_torch_out
        host_merge_pair_torch_alloc
        """),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or show a run; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--show"] and len(given) == 2:
        return readme.show(given[1])
    if given[:1] == [] or given[0] not in RUNS:
        raise SystemExit(f"wanted --show FOLDER, or one of {', '.join(RUNS)} and --out FOLDER")
    from . import cli

    run = RUNS[given[0]]
    chosen = ["--op", ",".join(run.ops), "--case", ",".join(run.cases)]
    return cli.main([*chosen, "--peers", ",".join(run.peers), *given[1:]])


if __name__ == "__main__":
    sys.exit(main())

"""The files of kernels: each refuses a problem with a sentence, or has tiles for it."""

from __future__ import annotations

from itertools import product

import pytest

from cupyattn.core import dtypes
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.tiles import select
from cupyattn.launch.tiles.config import Target
from cupyattn.launch.tiles.row_classes import LARGE_TILES, ONE_AN_SM, ROW_CLASSES

KIND = dtypes.bfloat16
PROBLEMS = {
    "ordinary": AttentionProblem(KIND, KIND, KIND, 128, 128),
    "unaligned": AttentionProblem(KIND, KIND, KIND, 96, 96, aligned=False),
    "capped over pages": AttentionProblem(KIND, KIND, KIND, 256, 256, paged=True, soft_cap=True),
    "wide": AttentionProblem(KIND, KIND, KIND, 512, 512),
    "latent": AttentionProblem(KIND, KIND, KIND, 576, 512, paged=True, latent=True),
    "latent of e5m2": AttentionProblem(
        KIND, dtypes.float8_e5m2, KIND, 576, 512, paged=True, latent=True
    ),
}
TARGETS = {
    arch: Target(arch, (99 if arch == "sm_86" else 227) << 10, 16)
    for arch in ("sm_90a", "sm_86", "sm_100a")
}


@pytest.mark.parametrize(("name", "arch"), [*product(PROBLEMS, TARGETS)])
def test_a_kernel_says_why_not_or_has_tiles(name: str, arch: str) -> None:
    problem, target = PROBLEMS[name], TARGETS[arch]
    for rows in (*ROW_CLASSES, *ONE_AN_SM.values(), *LARGE_TILES[1:]):
        served = []
        for kernel in select.KERNELS:
            reason = kernel.refusal(problem, rows, target)
            if reason is None:
                tiles = kernel.tiles(problem, rows, target)
                assert kernel.__name__.endswith(f".{tiles.name}")  # type: ignore[attr-defined]
                assert tiles.shared_bytes <= target.max_shared_bytes
                served.append(tiles)
            else:
                assert " " in reason and not reason.endswith(".")
        if not served:
            assert rows in ONE_AN_SM.values()
            continue
        chosen = select.tile_config(problem, rows, target.max_shared_bytes, True, arch, 16)
        assert served[0] == chosen
        if arch != "sm_90a":
            assert not any("sm90" in x.name for x in served)

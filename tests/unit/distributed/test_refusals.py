"""What distributed calls refuse: each wrong argument is a typed error that names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import ArgumentError, CupyAttnError
from cupyattn.distributed import (
    ContextParallelCall,
    ContextParallelPrefill,
    ContextParallelWrapper,
    Group,
    StateExchange,
    ZigZag,
    simulate,
)

_SIZE = 2
_INDPTR = np.array([0, 4])


def _exchange(group: Group, *, o: Any = 0, lse: Any = 0, **options: Any) -> Any:
    o = np.ones((3, 8, 64), np.float32) if isinstance(o, int) else o
    lse = np.zeros((3, 8), np.float32) if isinstance(lse, int) else lse
    return StateExchange(group, 3, 8, 64, **options).run(o, lse)


def _prefill(group: Group, chunks: Any, method: str) -> None:
    prefill = ContextParallelPrefill(group, method=method)
    prefill.plan(_INDPTR, 8, 2, 64, num_chunks=chunks)


def _wrapper(
    group: Group,
    wrapper: Any = cupyattn.BatchDecodeWithPagedKVCacheWrapper,
    planned: dict[str, Any] | None = None,
    ran: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    options = {"max_rows": 1, "num_qo_heads": 8, "head_dim": 64, "out_dtype": "float16", **options}
    made = wrapper() if isinstance(wrapper, type) else wrapper
    shared = ContextParallelWrapper(group, made, **options)
    places = np.array([0, 2]), np.array([3, 0]), np.array([4])
    shared.plan(*places, 8, 2, 64, 16, **(planned or {}))
    q, pool = np.ones((1, 8 // _SIZE, 64), np.float16), np.ones((4, 2, 16, 2, 64), np.float16)
    return shared.run(q, pool, **(ran or {}))


def _latent(group: Group, lse_mode: str, is_natural: bool) -> Any:
    shared = ContextParallelWrapper(
        group,
        cupyattn.BatchMLAPagedAttentionWrapper(np.zeros(1 << 20, np.uint8)),
        max_rows=1,
        num_qo_heads=8,
        head_dim=512,
        out_dtype="float32",
        lse_base_on_e=is_natural,
    )
    numbers = np.array([0, 1]), np.array([0, 1]), np.array([0]), np.array([5])
    half = "float16"
    shared.plan(*numbers, 8, 512, 64, 16, False, 0.1, half, half, lse_mode=lse_mode)
    q, pages = np.ones((1, 8 // _SIZE, 576), np.float16), np.ones((1, 16, 576), np.float16)
    return shared.run(q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:])


_OBJECTS, _FIXED = np.zeros(_SIZE, object), np.frombuffer(b"12", np.uint8)
# What a rank calls, and what the message says.
_CALLS: list[tuple[Callable[[Group], Any], str]] = [
    (lambda group: group.split("a"), "part: got 'a'"),
    (lambda group: group.split(1.5), "part: got 1.5"),
    (lambda group: group.window(0), "nbytes: got 0"),
    (lambda group: group.window("4"), "nbytes: got '4'"),
    (lambda group: group.share_bytes("text"), "data: got str; wanted bytes"),
    (lambda group: group.handshake([1]), "facts: got list"),
    (lambda group: group.check_heads("8"), "num_qo_heads: got '8'"),
    (lambda group: group.check_heads(-2), "num_qo_heads: got -2"),
    (lambda group: group.check_heads(3), "num_qo_heads: got 3 heads for a group of 2"),
    (lambda group: group.reduce_scatter([1.0], None), "out: got list; wanted a NumPy array"),
    (lambda group: group.all_to_all(_OBJECTS, _OBJECTS), "out: got dtype object"),
    (lambda group: group.all_to_all(_FIXED, _FIXED), "out: is read-only"),
    (lambda group: _exchange(3), "group: got int"),  # type: ignore[arg-type]
    (partial(_exchange, uses_windows="yes"), "uses_windows: got 'yes'"),
    (partial(_exchange, timeout=0), "timeout: got 0"),
    (partial(_exchange, o=None), "o: got None"),
    (partial(_exchange, lse=None), "lse: got None"),
    (lambda group: ContextParallelPrefill(None), "group: got NoneType"),  # type: ignore[arg-type]
    (partial(_prefill, chunks=0, method="overlap"), "num_chunks: got 0"),
    (partial(_prefill, chunks=3, method="overlap"), "num_chunks: got 3 for 'overlap'"),
    (partial(_prefill, chunks=4, method="gather"), "num_chunks: got 4 for 'gather'"),
    (partial(_prefill, chunks=2, method="auto"), "num_chunks: got 2 with method='auto'"),
    (lambda group: _wrapper(3), "group: got int"),  # type: ignore[arg-type]
    (partial(_wrapper, wrapper=3), "wrapper: got int"),
    (partial(_wrapper, wrapper=cupyattn.MultiLevelCascadeAttentionWrapper(1)), "takes no cp_world"),
    (partial(_wrapper, head_dim=32), "head_dim: got 32, and outputs have 64 columns"),
    (partial(_wrapper, q_is_replicated="x"), "q_is_replicated: got 'x'"),
    (partial(_wrapper, planned={"cp_rank": 0}), "cp_rank: got 0; leave it out"),
    (partial(_wrapper, ran={"return_lse": "x"}), "return_lse: got 'x'"),
    (partial(_wrapper, ran={"out": np.zeros((1, 2, 64), np.float16)}), "out: shape is"),
    (partial(_wrapper, ran={"out": np.zeros((1, 4, 64), np.int8)}), "out: dtype is int8"),
    (partial(_wrapper, lse_base_on_e=True), "lse_base_on_e: got True, and the wrapper gives"),
    (partial(_latent, lse_mode="basee", is_natural=False), "gives natural logarithms"),
    (partial(_latent, lse_mode="base2", is_natural=True), "gives logarithms of base 2"),
    (
        lambda group: ContextParallelCall(group, print, max_rows=1, num_qo_heads=8, head_dim=64),
        "function: got print",
    ),
]


@pytest.mark.parametrize(("call", "message"), _CALLS, ids=[text for _, text in _CALLS])
def test_calls_of_ranks(call: Callable[[Group], Any], message: str) -> None:
    with pytest.raises(CupyAttnError) as raised:
        simulate(_SIZE, call, timeout=10)
    assert message in str(raised.value)


def test_natural_logarithms_of_latent_keys_merge() -> None:
    natural, binary = (
        simulate(_SIZE, partial(_latent, lse_mode=mode, is_natural=mode == "basee"))
        for mode in ("basee", "base2")
    )
    for one, other in zip(natural, binary, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


_FOLDER = partial(Group.from_folder, on_gpu=False)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda folder: simulate("2", print), "size: got '2'"),  # type: ignore[arg-type]
        (lambda folder: simulate(0, print), "size: got 0"),
        (lambda folder: simulate(1, 3), "work: got int"),  # type: ignore[arg-type]
        (lambda folder: simulate(1, print, timeout=0), "timeout: got 0"),
        (lambda folder: simulate(2, print, hosts=[0]), "hosts: got 1 of them for 2 ranks"),
        (lambda folder: Group(3), "transport: got int"),  # type: ignore[arg-type]
        (lambda folder: _FOLDER(None, 0, 1), "folder: got None"),
        (lambda folder: _FOLDER(__file__, 0, 1), "wanted the path of a folder"),
        (lambda folder: _FOLDER(folder, "0", 1), "rank: got '0'"),
        (lambda folder: _FOLDER(folder, 1, 1), "rank: got 1 of 1 ranks"),
        (lambda folder: _FOLDER(folder, 0, 0), "size: got 0"),
        (lambda folder: _FOLDER(folder, 0, 1, timeout=-1), "timeout: got -1"),
        (lambda folder: Group.from_folder(folder, 0, 1, on_gpu="no"), "on_gpu: got 'no'"),
        (lambda folder: Group.from_cupyx(3), "comm: got int"),
        (lambda folder: ZigZag(_INDPTR, 2).rows("0"), "rank: got '0'"),  # type: ignore[arg-type]
        (lambda folder: ZigZag(_INDPTR, 2).rows(2), "rank: got 2 of 2 ranks"),
        (lambda folder: ZigZag(_INDPTR, 2).cut(_INDPTR, 0, "x"), "axis: got 'x'"),  # type: ignore[arg-type]
    ],
)
def test_starts_and_shares(start: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as raised:
        start(tmp_path / "new")
    assert message in str(raised.value)

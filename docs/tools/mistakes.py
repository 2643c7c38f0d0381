"""The page of errors: mistakes that are made here, what the library says of them, and remedies.

Messages come from the library itself, which makes each mistake when the page is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn import errors, jit
from cupyattn.core import env
from cupyattn.distributed import Group, simulate

from .support import table

_HALF = np.float16
_Q, _K = np.ones((3, 8, 64), _HALF), np.ones((9, 2, 64), _HALF)
_POOL = np.zeros((3, 2, 4, 2, 64), _HALF)
_TABLE = tuple(np.array(x, np.int32) for x in ([0, 2, 3], [1, 0, 2], [3, 1]))
_SIZES = 8, 2, 64, 4
_HEAD = """# Troubleshooting

What is wrong with a call is raised before anything is launched or written. A message names the
argument, what came, what is wanted, and the remedy. Every error is a `cupyattn.CupyAttnError`, and
also the standard kind that a caller expects.

Messages below are the library's own: `python -m docs.tools` makes each mistake and writes what it
was told.
"""
_SYMPTOMS = (
    (
        "a fault or wrong values on the GPU",
        "run with `CUPYATTN_DEBUG=1`: it waits for every launch, and checks page numbers and "
        "lengths",
    ),
    (
        "an answer is in question",
        "call with the same arrays on the CPU and compare; try `CUPYATTN_PORTABLE=1`",
    ),
    (
        "other values than torch's SDPA",
        "[the last query is at the last key](concepts/masks.md); tokens come before heads",
    ),
    (
        "a mask of bits hides other keys",
        'bits are little-endian: `packbits(mask.flatten(), bitorder="little")`',
    ),
    (
        "trtllm-style calls give wrong values for a pool in NHD",
        'their default layout is "HND": say `kv_layout="NHD"`',
    ),
    (
        "the first calls are slow",
        "kernels compile, and a warning of the logger `cupyattn` says so: [compile "
        "ahead](howto/precompile.md), or keep `CUPYATTN_CACHE_DIR`",
    ),
    (
        "it is unclear which kernels served a call",
        "`print(cupyattn.explain(wrapper))` says which and [why](howto/why_this_kernel.md); "
        '`logging.basicConfig(level="INFO")` names each kernel, with its configuration, when the '
        "process first loads it",
    ),
    (
        "`RuntimeWarning: the kernel cache ... cannot be used`",
        "the warning says why: another owner, or a folder that cannot be written",
    ),
    (
        "a graph capture fails",
        "make the same call once before it, with `out=`; unset `CUPYATTN_DEBUG`",
    ),
    (
        "`torch.compile` breaks its graph at a call, or `fullgraph=True` fails",
        "[import the operators](integrations.md#torch)",
    ),
    ("last bits differ with the batch", "[fix the splits](howto/batch_invariance.md)"),
    (
        "NaN in a row",
        "a NaN or infinity in a key that the row sees, or in its query. Keys that it does not see "
        "never touch it",
    ),
)
_END = """
`cupyattn info` shows what was found: GPU, driver, CuPy, NVRTC, kernels, cache. Put
`cupyattn info --json` into a bug report.
"""


class Mistake(NamedTuple):
    """Something done wrong, the error, the call that makes it, and what to do instead."""

    what: str
    kind: type[Exception]
    make: Callable[[], Any]
    remedy: str


class Quoted(NamedTuple):
    """A mistake that not every machine can make, with a phrase of its message."""

    what: str
    kind: type[Exception]
    phrase: str
    remedy: str


def page() -> str:
    """docs/troubleshooting.md as it should be."""
    found: dict[type[Exception], list[tuple[str, str, str]]] = {}
    for mistake in MISTAKES:
        row = mistake.what, f"`{message(mistake)}`", mistake.remedy
        found.setdefault(mistake.kind, []).append(row)
    for quoted in QUOTED:
        row = quoted.what, f"`... {quoted.phrase} ...`", quoted.remedy
        found.setdefault(quoted.kind, []).append(row)
    sections = [_section(kind, rows) for kind, rows in found.items()]
    symptoms = "## Not an error, but wrong\n\n" + table(("what you see", "do"), _SYMPTOMS)
    return "\n".join([_HEAD, *sections, symptoms]) + _END


def message(mistake: Mistake) -> str:
    """What the library says; it is an error if it says nothing, or something of another kind."""
    try:
        mistake.make()
    except mistake.kind as error:
        return str(error).replace("|", "\\|")
    raise AssertionError(f"no error: {mistake.what}")


def _section(kind: type[Exception], rows: list[tuple[str, str, str]]) -> str:
    bases = [base.__name__ for base in kind.__bases__ if base is not errors.CupyAttnError]
    doc = " ".join((kind.__doc__ or "").split()) if kind.__module__ == errors.__name__ else ""
    also = f"Also {' and '.join(f'{_article(base)} `{base}`' for base in bases)}. {doc}".strip()
    said = f"{also}\n\n" if doc else ""
    return f"## {kind.__name__}\n\n{said}" + table(("mistake", "message", "remedy"), rows)


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOU" else "a"


def _wrapper(num_bytes: int = 1 << 20, **options: Any) -> Any:
    return cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(num_bytes, np.uint8), **options)


def _planned() -> Any:
    wrapper = _wrapper()
    wrapper.plan(*_TABLE, *_SIZES)
    return wrapper


def _prefill(q: Any = _Q, k: Any = _K, v: Any = None, **options: Any) -> Any:
    return cupyattn.single_prefill_with_kv_cache(q, k, k if v is None else v, **options)


def _unknown_page() -> None:
    wrapper = _wrapper()
    wrapper.plan(_TABLE[0], np.array([1, 0, 9], np.int32), _TABLE[2], *_SIZES)
    wrapper.run(_Q[:2], _POOL)


def _position_beyond_pages() -> None:
    indptr, indices, last = _TABLE
    one = np.array([0]), np.array([40])
    cupyattn.append_paged_kv_cache(_K[:1], _K[:1], *one, _POOL.copy(), indices, indptr, last)


def _replan_for_a_graph() -> None:
    buffers = {
        "paged_kv_indptr_buffer": np.zeros(3, np.int32),
        "paged_kv_indices_buffer": np.zeros(3, np.int32),
        "paged_kv_last_page_len_buffer": np.zeros(2, np.int32),
    }
    wrapper = _wrapper(8 << 20, use_cuda_graph=True, **buffers)
    wrapper.plan(*_TABLE, *_SIZES)
    wrapper.plan(*_TABLE, 8, 2, 128, 4)


def _small_workspace() -> None:
    pages = np.arange(4096, dtype=np.int32)
    table = np.array([0, pages.size], np.int32), pages, np.array([16], np.int32)
    _wrapper(8).plan(*table, 8, 2, 64, 16)


def _no_sources() -> None:
    with _environment(env.KERNELS_DIR.name, "/nowhere"):
        jit.kernels_dir()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _ones(heads: int, dim: int, rows: int = 3) -> np.ndarray:
    return np.ones((rows, heads, dim), _HALF)


_ARGUMENT, _UNSUPPORTED = errors.ArgumentError, errors.UnsupportedError
MISTAKES = (
    Mistake(
        "keys in HND, layout not named",
        _ARGUMENT,
        lambda: _prefill(k=np.ascontiguousarray(_K.swapaxes(0, 1))),
        'say `kv_layout="HND"`',
    ),
    Mistake(
        "float64 queries",
        _ARGUMENT,
        lambda: _prefill(q=_Q.astype(np.float64)),
        "cast to 16 bits, or on the CPU to float32",
    ),
    Mistake(
        "keys and values of two dtypes",
        _ARGUMENT,
        lambda: _prefill(v=_K.astype(np.float32)),
        "cast one of them",
    ),
    Mistake(
        "query heads that key heads do not divide",
        _ARGUMENT,
        lambda: _prefill(k=_ones(3, 64, 9)),
        "look at the order of axes: [tokens, heads, head dim]",
    ),
    Mistake(
        "a mask of the wrong size",
        _ARGUMENT,
        lambda: _prefill(custom_mask=np.ones((3, 8), bool)),
        "one bool for each row and key",
    ),
    Mistake(
        "a head dim with gaps between its elements",
        _ARGUMENT,
        lambda: _prefill(q=_Q[:, :, ::2], k=_K[:, :, ::2]),
        "only the last dimension must be contiguous",
    ),
    Mistake(
        "a page number that the pool has not",
        _ARGUMENT,
        _unknown_page,
        "on a GPU this is checked under `CUPYATTN_DEBUG=1`",
    ),
    Mistake(
        "a token behind the pages of its request",
        _ARGUMENT,
        _position_beyond_pages,
        "give the request a page more before the append",
    ),
    Mistake(
        "other rows than planned",
        _ARGUMENT,
        lambda: _planned().run(_Q, _POOL),
        "`plan()` again when the batch changes",
    ),
    Mistake(
        "an expression that ends too early",
        errors.ExpressionError,
        lambda: _prefill(logits_transform="logit +"),
        "[the language](logits.md#the-language); `column` says where",
    ),
    Mistake(
        "an expression with a name that there is not",
        errors.ExpressionError,
        lambda: _prefill(logits_transform="logits * 2"),
        "[the names](logits.md#the-language), and parameters that the call passes",
    ),
    Mistake(
        "a head dim without kernels",
        _UNSUPPORTED,
        lambda: _prefill(_ones(8, 100), _ones(2, 100, 9)),
        "pad q, k and v with zeros to a multiple of 8, and keep `sm_scale`",
    ),
    Mistake(
        "RoPE inside attention at a head dim of 24",
        _UNSUPPORTED,
        lambda: _prefill(_ones(8, 24), _ones(2, 24, 9), pos_encoding_mode="ROPE_LLAMA"),
        "rotate q and k before the call",
    ),
    Mistake(
        "run() before plan()",
        errors.PlanError,
        lambda: _wrapper().run(_Q[:2], _POOL),
        "plan once a step",
    ),
    Mistake(
        "a plan that a captured graph cannot follow",
        errors.PlanError,
        _replan_for_a_graph,
        "a wrapper for each kind of batch, or another capture",
    ),
    Mistake(
        "a small workspace",
        errors.WorkspaceError,
        _small_workspace,
        "128 MB serve any batch; None makes the wrapper own it",
    ),
    Mistake(
        "a workspace off a 16-byte boundary",
        errors.WorkspaceError,
        lambda: cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 20, np.uint8)[1:]),
        "give a whole allocation",
    ),
    Mistake(
        "a folder of sources that is none",
        errors.CompileError,
        _no_sources,
        "unset `CUPYATTN_KERNELS_DIR`",
    ),
    Mistake(
        "ranks that call with different arguments",
        errors.DistributedError,
        lambda: simulate(2, lambda group: group.handshake({"head_dim": 64 << group.rank})),
        "start all ranks with the same model and options",
    ),
    Mistake(
        "a rank that ended, or does not come",
        errors.DeviceError,
        lambda: Group.simulated(2, timeout=0.01)[0].barrier(),
        "see why that rank ended; close the group and make a new one",
    ),
    Mistake(
        "a name of FlashInfer's that is no attention",
        AttributeError,
        lambda: cupyattn.apply_rope,  # type: ignore[attr-defined]
        "[all names](flashinfer-names.md)",
    ),
)
QUOTED = (
    Quoted(
        "tensors that require grad",
        _ARGUMENT,
        "requires grad",
        "call under `torch.no_grad()`, or pass `tensor.detach()`",
    ),
    Quoted(
        "no extra installed",
        errors.CompileError,
        "the NVRTC library cannot be loaded",
        "install `cupyattn[cuda13x]` or `cupyattn[cuda12x]`, one of them",
    ),
    Quoted(
        "a kernel that was not compiled ahead, under `CUPYATTN_NO_COMPILE=1`",
        errors.CompileError,
        "is set and no copy for",
        "`cupyattn compile` with the model's config, or unset the variable",
    ),
    Quoted(
        "GPU arrays without a usable driver",
        errors.DeviceError,
        "reports no usable GPU",
        "`nvidia-smi` must work; `cupyattn info` says what CuPy found",
    ),
    Quoted(
        "GPU arrays in a process forked after the GPU was used",
        errors.DeviceError,
        "forked from one that had used the GPU",
        "multiprocessing's `spawn` or `forkserver`",
    ),
    Quoted(
        "an integration without its package",
        errors.MissingPackageError,
        "which is not installed here",
        "install it; no extra of cupyattn does",
    ),
)

"""Compile ahead the FlashInfer modules that the chosen cases need, in parallel.

    python -m benchmarks.peers.prebuild --case '4x4k*' --jobs 6    # beside other work
    python -m benchmarks.peers.prebuild --sweep 1:200 --jobs 6     # what that sweep's peers need
    python -m benchmarks.peers.prebuild --pack modules.tar.xz      # to ship to another machine

FlashInfer compiles a module at its first use, 8-130 s each. It takes a ready one from
`flashinfer/data/aot/NAME/NAME.so` without looking at anything else, so libraries packed on one
machine and unpacked there on another are used as they are. No GPU is needed: without one,
FLASHINFER_CUDA_ARCH_LIST defaults to 9.0a. This file knows the generators of FlashInfer 0.7, which
its public functions call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..batch import peer_flashinfer, peer_xqa
from ..batch.case import BatchCase
from ..candidate import Unsupported
from ..case import Case
from ..cases import OPS, AnyCase, select
from ..lists.case import ListCase
from ..merge.case import MergeCase
from ..sweep.draw import draw_cases
from ..timing import describe
from . import _flashinfer, offering

_BACKENDS = {"flashinfer_fa2": "fa2", "flashinfer_fa3": "fa3", "flashinfer_xqa": "xqa"}
_POSITION_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")  # FlashInfer's codes 0, 1, 2
_LZMA_DICTIONARY = 256 << 20  # the modules repeat each other
_LZMA_TUNING = "lc=0,lp=2,pb=4,nice=273"  # for instructions of 16 bytes


@dataclass(frozen=True)
class Module:
    """What one FlashInfer module is compiled for; o has the dtype of q, or bfloat16 for 8 bits."""

    kind: str  # single_ or batch_prefill, single_ or batch_decode, xqa, quantization, cascade
    backend: str = "fa2"
    kv_dtype: str = "bfloat16"
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    position_mode: int = 0
    window: bool = False
    soft_cap: bool = False
    page_size: int = 0  # of XQA alone, as is the number of query heads a KV head
    group: int = 0
    dtype: str = "bfloat16"


def modules(cases: Iterable[AnyCase], backends: Iterable[str]) -> list[Module]:
    """The distinct modules that FlashInfer's candidates load, in the order of the cases."""
    result: dict[Module, None] = {}
    for case in cases:
        for backend in backends:
            if f"flashinfer_{backend}" not in offering(case):
                continue
            if isinstance(case, MergeCase):
                result[Module("cascade")] = None
                continue
            if isinstance(case, ListCase):
                result |= dict.fromkeys(_module_of_lists(case, backend))
                continue
            try:
                variants = _variants(case, backend)
            except Unsupported:
                continue
            # The wrapper with sinks names its module by its own arguments: built at first use.
            known = [variant for variant in variants if variant in _KINDS]
            result |= dict.fromkeys(_module(case, backend, variant) for variant in known)
            if not {"multilevel", "apart"}.isdisjoint(variants):
                # Wrappers that choose a backend themselves: on Hopper fa3.
                result[_module(case, "fa3", "paged")] = None
            if case.op == "cascade":
                result[Module("cascade")] = None  # merges the levels
            if case.mask != "none":
                result[Module("quantization")] = None  # packs a bool mask
    return list(result)


def _module_of_lists(case: ListCase, backend: str) -> list[Module]:
    from ..lists.peer_flashinfer import module_of

    try:
        return [module_of(case, backend)]
    except Unsupported:
        return []


def _variants(case: Case | BatchCase, backend: str) -> list[str]:
    if not isinstance(case, BatchCase):
        return _flashinfer.variants(case, backend)
    if case.api == "mla":
        return ["mla"]
    if backend != "xqa":
        return peer_flashinfer.variants(case, backend)
    peer_xqa.check(case)
    return ["xqa"]


_KINDS = {
    "single": "single_prefill",
    "ragged": "batch_prefill",
    "decode_tc": "single_prefill",
    "decode_cc": "single_decode",
    "paged_tc": "batch_prefill",
    "tc": "batch_prefill",
    "cc": "batch_decode",
    "paged": "batch_prefill",
    "xqa": "xqa",
    "multilevel": "batch_prefill",
    "flat": "batch_prefill",
    "holistic": "batch_attention",
    "apart": "batch_prefill",
    "mla": "batch_mla",
}


def _module(case: Case | BatchCase, backend: str, variant: str) -> Module:
    xqa = isinstance(case, BatchCase) and variant == "xqa"
    return Module(
        _KINDS[variant],
        backend,
        case.kv_dtype,
        case.head_dim_qk,
        case.head_dim_vo,
        _POSITION_MODES.index(case.pos_encoding_mode),
        case.window_left >= 0,
        case.logits_soft_cap > 0,
        case.page_size if xqa else 0,
        case.num_qo_heads // case.num_kv_heads if xqa else 0,
        case.dtype if isinstance(case, BatchCase) else "bfloat16",
    )


def _spec(module: Module) -> Any:
    import torch
    from flashinfer.jit import quantization  # type: ignore[import-not-found]
    from flashinfer.jit.attention import modules as make  # type: ignore[import-not-found]

    if module.kind == "cascade":
        from flashinfer.jit.cascade import gen_cascade_module  # type: ignore[import-not-found]

        return gen_cascade_module()
    if module.kind == "quantization":
        return quantization.gen_quantization_module()
    q, kv = getattr(torch, module.dtype), getattr(torch, module.kv_dtype)
    if module.kind == "batch_attention":
        dims = (module.head_dim_qk, module.head_dim_vo)
        generate = make._gen_batch_attention_primary_module
        return generate(q, kv, q, torch.int32, *dims, 0, False, False)
    if module.kind == "xqa":
        from flashinfer.jit.xqa import gen_xqa_module  # type: ignore[import-not-found]

        pages = (module.page_size, module.head_dim_qk, module.group)
        return gen_xqa_module(q, kv, *pages, module.window, q)
    index = (torch.int32,) if module.kind.startswith("batch_") else ()
    shape = (module.head_dim_qk, module.head_dim_vo, module.position_mode)
    o = torch.bfloat16 if q.itemsize == 1 else q
    arguments = (q, kv, o, *index, *shape, module.window, module.soft_cap)
    if module.kind == "batch_mla":
        parts = module.head_dim_vo, module.head_dim_qk - module.head_dim_vo
        return make.gen_batch_mla_module(module.backend, q, kv, q, torch.int32, *parts, False)
    if module.kind == "single_decode":
        return make.gen_single_decode_module(*arguments)
    if module.kind == "batch_decode":
        return make.gen_batch_decode_module(*arguments)
    if module.kind == "single_prefill":
        return make.gen_single_prefill_module(module.backend, *arguments, False)
    # The fa2 wrappers load the variant for K and V of equal strides.
    primary = module.backend == "fa2"
    generate = make._gen_batch_prefill_primary_module if primary else make.gen_batch_prefill_module
    return generate(module.backend, *arguments, False)


def is_ready(case: BatchCase, backend: str, variant: str) -> bool:
    """Whether FlashInfer would load the module of this variant without compiling it."""
    if variant == "sinks":
        return False  # its wrapper names its module by its own arguments
    needed = [_module(case, backend, variant)]
    if variant in ("multilevel", "apart"):
        needed.append(_module(case, "fa3", "paged"))
    return all(map(is_built, needed))


def is_built(module: Module) -> bool:
    """Whether FlashInfer would load a module without compiling it."""
    spec = _spec(module)
    return bool(spec.is_aot or Path(spec.get_library_path()).exists())


def build(module: Module) -> dict[str, Any]:
    """Compile a module unless a ready library is shipped: name, library, seconds, error or None."""
    start = time.perf_counter()
    entry: dict[str, Any] = {"module": module.__dict__, "name": "", "library": None, "error": None}
    try:
        spec = _spec(module)
        entry["name"] = spec.name
        if not spec.is_aot:
            spec.build(need_lock=True)
        entry |= {"library": str(spec.get_library_path()), "shipped": spec.is_aot}
    except Exception as error:
        entry["error"] = describe(error)
    return entry | {"seconds": round(time.perf_counter() - start, 1)}


def pack(entries: Iterable[dict[str, Any]], target: Path) -> None:
    """Write the built libraries as NAME/NAME.so into a .tar.xz for flashinfer/data/aot."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "modules.tar"
        with tarfile.open(plain, "w") as archive:
            for entry in entries:
                if entry["library"]:
                    archive.add(entry["library"], f"{entry['name']}/{entry['name']}.so")
        filters = f"--lzma2=preset=9e,dict={_LZMA_DICTIONARY},{_LZMA_TUNING}"
        command = ["xz", "-c", "-T1", filters, str(plain)]
        with target.open("wb") as out:
            subprocess.run(command, stdout=out, check=True)


def _prepare(folder: str, packing: bool) -> None:
    """Settings that FlashInfer and nvcc read; they must stand before FlashInfer is imported."""
    import torch

    os.environ.setdefault("MAX_JOBS", "3")
    if packing:
        # Uncompressed device code: xz finds what modules share, which compressed code hides.
        flags = (os.environ.get("NVCC_APPEND_FLAGS", ""), "--compress-mode=none")
        os.environ["NVCC_APPEND_FLAGS"] = " ".join(flags).strip()
    if torch.cuda.is_available():
        return
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    stub = Path(folder) / "libcuda.so"  # for the linker only; the real one comes with a driver
    subprocess.run(
        ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub), "-x", "c", "/dev/null"],
        check=True,
    )
    flags = (os.environ.get("FLASHINFER_EXTRA_LDFLAGS", ""), f"-L{folder}")
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = " ".join(flags).strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Build what the options choose. Returns 0, or 1 if a module could not be built."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.prebuild")
    parser.add_argument("--op", default=",".join(OPS))
    parser.add_argument("--case", default="*", help="globs of case names, by comma")
    parser.add_argument("--sweep", help="SEED:COUNT, the shapes of such a sweep instead of cases")
    parser.add_argument("--groups", default="", help="of that sweep, by comma")
    parser.add_argument("--peers", default=",".join(_BACKENDS))
    parser.add_argument("--jobs", type=int, default=6, help="modules at once (default 6)")
    parser.add_argument("--log", type=Path, help="write what was built, with seconds, as JSON")
    parser.add_argument("--pack", type=Path, help="pack the libraries into this .tar.xz")
    args = parser.parse_args(argv)
    backends = [_BACKENDS[name] for name in args.peers.split(",") if name in _BACKENDS]
    cases: Sequence[AnyCase] = select(args.op.split(","), args.case.split(","))
    if args.sweep:
        seed, _, count = args.sweep.partition(":")
        cases = draw_cases(int(seed), int(count or 200), [x for x in args.groups.split(",") if x])
    wanted = modules(cases, backends)
    wanted.sort(key=lambda module: module.backend != "fa3")  # the slow ones first
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _prepare(folder, args.pack is not None)
        entries = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for entry in pool.map(build, wanted):
                entries.append(entry)
                said = entry["error"] or ("shipped" if entry.get("shipped") else "built")
                print(f"{entry['seconds']:7.1f} s  {entry['name']}  {said}", flush=True)
    if args.log:
        args.log.write_text(json.dumps(entries, indent=1))
    if args.pack:
        pack(entries, args.pack)
    failed = sum(entry["error"] is not None for entry in entries)
    seconds = time.perf_counter() - start
    print(f"{len(entries) - failed} of {len(entries)} modules ready in {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

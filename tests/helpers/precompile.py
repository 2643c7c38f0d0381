"""Builds every kernel the GPU suite needs into CUPYATTN_CACHE_DIR, on a machine without a GPU.

    CUPYATTN_CACHE_DIR=... python tests/helpers/precompile.py --arch sm_90a --jobs 2

The calls are made for real, on a card that only writes down which kernels it is to load; so what is
built is what the same calls load on a GPU, where arrays are aligned alike.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

from golden.cards import CARDS, plugged_in

from cupyattn import flash_mla, jit, sparse
from cupyattn.choose.candidates import only_form
from cupyattn.core import dtypes
from cupyattn.launch.attention import pad_lse, plan_batch, read_tables
from cupyattn.launch.instances import Selection
from cupyattn.launch.instances import instances as selected_instances
from cupyattn.launch.ops.packbits import CONFIG as PACKBITS_CONFIG
from cupyattn.launch.tiles.forms import FORMS
from helpers import (
    batch_calls,
    batch_cases,
    cascade_calls,
    eight_bit_cases,
    gates,
    gpu_cases,
    item_cases,
    latent_blocks,
    listed_latent,
    logits_calls,
    mixed_calls,
    mla_calls,
    planless_calls,
    prefill_sm90_calls,
    select_cases,
    shared_calls,
    single_calls,
    sparse_cases,
    verify_cases,
)

Instance = tuple[str, jit.Config]
Run = Callable[[], object]
_ALL_OF_8_BITS = replace(eight_bit_cases.EVERYTHING, page_sizes=(16,))
# One card of each architecture.
_CARD_OF = {facts.get("arch", "sm_90a"): name for name, facts in reversed(CARDS.items())}


def recorded(calls: Iterable[Run], arch: str) -> Iterator[list[Instance]]:
    """The kernels that each call loads on a GPU of `arch`, whatever others have loaded."""
    with plugged_in(_CARD_OF[arch]) as card, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            card.begin()
            call()
            yield [*card.loaded]


def instances(calls: Iterable[Run], arch: str) -> list[Instance]:
    """Every kernel of the calls, once."""
    return list(dict.fromkeys(x for found in recorded(calls, arch) for x in found))


# --- the calls of the suite, each with its own arrays ---


def _workspace() -> np.ndarray:
    return np.zeros(64 << 20, np.uint8)


def single(case: Any, is_decode: bool = False) -> None:
    single_calls.Call(case, np, is_decode=is_decode).start()


def batch(case: Any) -> None:
    call = batch_calls.Call(case, np, _workspace())
    call.plan()
    call.start()


def prompts(case: Any) -> None:
    prefill_sm90_calls.Call(case, np, _workspace()).start()


def _logits(given: dict[str, Any]) -> None:
    logits_calls.Single(**given).run(np)


def _mixed(seed: int) -> None:
    mixed_calls.planned(seed, np).start()


def _cascade(seed: int) -> None:
    cascade_calls.planned(cascade_calls.random_case(seed), np, _workspace()).start()


def _shared(seed: int) -> None:
    shared_calls.Call(shared_calls.random_case(seed), np, _workspace()).start()


def _planless(seed: int) -> None:
    planless_calls.Call(planless_calls.random_case(seed), np, _workspace()).start()


def _gated(seed: int) -> None:
    gates.random_call(seed, np, _workspace()).start()


def _latent(seed: int) -> None:
    mla_calls.Call(mla_calls.random_case(seed), np, _workspace()).start()


def _eight_bits(seed: int, served: eight_bit_cases.Served) -> None:
    single(eight_bit_cases.single(seed, served))
    batch(eight_bit_cases.batch(seed, served))


def _in_forms(seed: int) -> None:
    for form in FORMS:
        with only_form(form):
            _eight_bits(seed, _ALL_OF_8_BITS)


def _listed(seed: int) -> None:
    case = sparse_cases.draw(seed)
    if case.arguments["q"].dtype != np.float32:  # which the CPU alone serves
        sparse.attend(**case.arguments)


def _selected(seed: int) -> None:
    sparse.select(**select_cases.draw(seed, on_gpu=True).arguments)


def _listed_latent(seed: int) -> None:
    arguments = listed_latent.draw(seed, ml_dtypes.bfloat16).arguments
    flash_mla.flash_mla_with_kvcache(**arguments)
    sparse.attend(**latent_blocks.Case(seed).arguments)


def suite() -> Iterator[Run]:
    """Every random call of the suite, and those that prefill_sm90 runs many times."""
    yield from (partial(single, *call) for call in gpu_cases.all_cases())
    yield from (partial(_logits, given) for given in logits_calls.requests().values())
    for cases in (batch_cases, verify_cases, item_cases):
        yield from (partial(batch, cases.random_case(n)) for n in range(cases.NUM_CASES))
    yield from (partial(prompts, case) for case in prefill_sm90_calls.CASES.values())
    for run, count in (
        (_mixed, mixed_calls.NUM_CASES),
        (_cascade, cascade_calls.NUM_CASES),
        (_shared, shared_calls.NUM_CASES),
        (_planless, planless_calls.NUM_CASES),
        (_gated, gates.NUM_CASES),
        (_latent, mla_calls.NUM_CASES),
        (_listed, 128),
        (_selected, 192),
        (_listed_latent, 96),
        (_in_forms, 25),
    ):
        yield from (partial(run, seed) for seed in range(count))
    # Of these the ordinary suite has one block of four.
    for served, count in ((eight_bit_cases.PREFILL_SM90, 800), (_ALL_OF_8_BITS, 200)):
        seeds = (seed for seed in range(count) if seed // 25 % 4 == 0)
        yield from (partial(_eight_bits, seed, served) for seed in seeds)


# --- kernels of any call ---


def page_instances() -> list[Instance]:
    """Every kernel of page operations, the same for all architectures."""
    wide = dtypes.float16, dtypes.bfloat16, dtypes.float32
    kinds = [(q, kv) for q in wide for kv in (q, dtypes.float8_e4m3fn, dtypes.float8_e5m2)]
    chosen = Selection(("append", "page"), tuple(kinds), alignments=(True, False))
    return selected_instances([chosen], "sm_90a")


def planners() -> list[Instance]:
    """What plans on the device, and what looks through masks, of every form."""
    fixed = ("pad_lse", pad_lse.CONFIG), ("read_tables", read_tables.CONFIG)
    return [*fixed, ("packbits", PACKBITS_CONFIG), *(("plan_batch", x) for x in plan_batch.CONFIGS)]


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def _build(job: tuple[str, jit.Config, str]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # spills are the compile gates' business
        return jit.build(*job).info.cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    start = time.perf_counter()
    # NVRTC compiles one program at a time in a process; fork after CuPy is loaded is unsafe.
    context = multiprocessing.get_context("spawn")
    # Workers begin while the stand-in card is in, which hides what the environment asks for.
    asks = {name: value for name, value in os.environ.items() if name.startswith("CUPYATTN_")}
    with ProcessPoolExecutor(args.jobs, context, _begin, (asks,)) as pool:
        asked: dict[Instance, Future[bool]] = {}
        fixed = [[*planners(), *page_instances()]]
        for found in itertools.chain(fixed, recorded(suite(), args.arch)):
            for instance in found:
                if instance not in asked:
                    asked[instance] = pool.submit(_build, (*instance, args.arch))
        print(f"{len(asked)} kernels, found in {time.perf_counter() - start:.0f} s", flush=True)
        cached = sum(future.result() for future in asked.values())
    seconds = time.perf_counter() - start
    print(f"{len(asked) - cached} compiled, {cached} were there; {seconds:.0f} s")


if __name__ == "__main__":
    main()

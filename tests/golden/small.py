"""Calls of the helpers' generators: few tokens, all doors, all options alone and crossed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from helpers import (
    batch_calls,
    batch_cases,
    cascade_calls,
    flash_cases,
    fmha_calls,
    gates,
    gpu_cases,
    item_cases,
    key_shares,
    logits_calls,
    merge_calls,
    mixed_calls,
    mla_calls,
    page_cases,
    planless_calls,
    prefill_sm90_calls,
    select_cases,
    serving_cases,
    shared_calls,
    single_calls,
    slot_cases,
    sparse_calls,
    verify_cases,
    wrong_others,
)

from cupyattn.sparse import select

from .cards import Card

# (what is called, in words; the call)
Drawn = tuple[str, Callable[[], object]]
_WORKSPACE_BYTES = 64 << 20


def described(case: Any) -> str:
    """The fields of a case that say something."""
    if not is_dataclass(case):
        return str(case)
    found = []
    for f in fields(case):
        value = getattr(case, f.name)
        if f.name == "seed" or (value == f.default and f.default is not None):
            continue
        if is_dataclass(value):
            found.append(described(value))
        elif value not in (None, False, "", "none"):
            text = str(value).replace("bfloat16", "bf16").replace("float", "f")
            found.append(f.name if value is True else f"{f.name} {text}")
    return ", ".join(found)


def workspace(card: Card, num_bytes: int = _WORKSPACE_BYTES) -> np.ndarray:
    x = card.empty((num_bytes,), np.dtype(np.uint8))
    card.name("workspace", x)
    return x


def _of(card: Card, call: Any) -> Drawn:
    """A call of helpers/calls.py."""
    card.name("", {name: x.array for name, x in call.owned.items()})
    return described(call.case), call.start


def single(seed: int, card: Card) -> Drawn:
    makers = gpu_cases.free, gpu_cases.classed, gpu_cases.split, gpu_cases.decode
    make = makers[seed % len(makers)]
    return _of(card, single_calls.Call(make(seed), np, is_decode=make is gpu_cases.decode))


def _batch(case: Any, card: Card) -> Drawn:
    call = batch_calls.Call(case, np, workspace(card))
    text, _ = _of(card, call)

    def run() -> None:
        call.plan()
        call.start()

    return text, run


def batch(seed: int, card: Card) -> Drawn:
    makers = batch_cases, batch_cases, batch_cases, verify_cases, item_cases
    return _batch(makers[seed % len(makers)].random_case(seed), card)


def prompts(seed: int, card: Card) -> Drawn:
    cases = [*prefill_sm90_calls.CASES.values()]
    case, memory = cases[seed % len(cases)], workspace(card)

    def run() -> None:
        prefill_sm90_calls.Call(case, np, memory).start()

    return described(case), run


def gates_of_output(seed: int, card: Card) -> Drawn:
    text, run = _of(card, gates.random_call(seed, np, workspace(card)))
    return f"{gates.of_kind(seed // len(gates.WAYS))}, {text}", run


def gates_of_flash(seed: int, card: Card) -> Drawn:
    kind = gates.of_kind(seed // len(flash_cases.FORMS))
    text, run = _of_flash(flash_cases.Case(seed, is_gpu=True, gate=kind), card)
    return f"{kind}, {text}", run


def wide(seed: int, card: Card) -> Drawn:
    """Head dims beyond 256."""
    index = seed % len(mla_calls.WIDE)
    if seed % 4 == 3:
        case = mla_calls.wide_single(index, seed)
        return _of(card, single_calls.Call(case, np))
    return _batch(mla_calls.wide_case(index, seed), card)


def mixed(seed: int, card: Card) -> Drawn:
    call = mixed_calls.Call(mixed_calls.random_case(seed), np)
    text, _ = _of(card, call)
    return text, lambda: (call.plan(), call.start())


def cascade(seed: int, card: Card) -> Drawn:
    call, memory = cascade_calls.Call(cascade_calls.random_case(seed), np), workspace(card)
    text, _ = _of(card, call)

    def run() -> None:
        call.wrapper = call.plan(memory)
        call.start()

    return text, run


def shared(seed: int, card: Card) -> Drawn:
    return _of(card, shared_calls.Call(shared_calls.random_case(seed), np, workspace(card)))


def latent(seed: int, card: Card) -> Drawn:
    return _of(card, mla_calls.Call(mla_calls.random_case(seed), np, workspace(card)))


def shares(seed: int, card: Card) -> Drawn:
    """One rank's call, of several that share keys."""
    case, memory = key_shares.random_case(seed, most=3000), workspace(card)
    whole = key_shares.Whole.of(case)
    rank = key_shares.Rank.of(whole, case.shares[seed % case.world])
    text = f"rank {rank.share.cp_rank}, {described(case)}"
    return text, lambda: key_shares.answer(whole, rank, np.asarray, memory)


def planless(seed: int, card: Card) -> Drawn:
    case = mla_calls.wide_planless(seed) if seed % 16 == 9 else planless_calls.random_case(seed)
    return _of(card, planless_calls.Call(case, np, workspace(card)))


def flash(seed: int, card: Card) -> Drawn:
    return _of_flash(flash_cases.Case(seed, is_gpu=seed % 3 > 0), card)


def _of_flash(case: flash_cases.Case, card: Card) -> Drawn:
    card.name("", {name: x.array for name, x in case.owned.items()})
    card.name("", case.named)
    return repr(case), lambda: case.function(*case.args, **case.named)


def fmha(seed: int, card: Card) -> Drawn:
    layout = fmha_calls.LAYOUTS[seed % len(fmha_calls.LAYOUTS)]
    chunk = (0, 24, 64)[seed // 4 % 3]
    call, memory = fmha_calls.Chunked(seed, layout, chunk), workspace(card)
    options = {} if seed % 2 else {"return_lse": True}
    return f"{layout}, chunk {chunk}, {options}", lambda: call(memory, **options)


def logits(seed: int, card: Card) -> Drawn:
    requests = logits_calls.requests()
    name = [*requests][seed % len(requests)]
    if seed % 3:
        return name, functools.partial(logits_calls.Single(**requests[name]).run, np)
    kind = ("ragged", "paged", "decode")[seed // 3 % 3]
    rows = [1] * 4 if kind == "decode" else [40, 0, 3, 90]
    expressions = [*logits_calls.EXPRESSIONS]
    name = expressions[seed % len(expressions)]
    call, memory = logits_calls.Batch(name, kind, rows, [150, 20, 333, 90]), workspace(card)
    return f"{name}, {kind}", lambda: call.run(call.plan(np, memory), np)


def append(seed: int, card: Card) -> Drawn:
    call = page_cases.Append(page_cases.random_case(seed), np)
    card.name("", call.arguments)
    return described(call.case), call.run


def slots(seed: int, card: Card) -> Drawn:
    case = slot_cases.Case(seed)
    return f"{case.cache_dtype}, {case.layout}", lambda: _without_answer(case.run)


def merge(seed: int, card: Card) -> Drawn:
    return _of(card, merge_calls.Call(merge_calls.random_case(seed), np))


def sparse(seed: int, card: Card) -> Drawn:
    make = (sparse_calls.fixed, sparse_calls.variable)[seed % 2]
    call, memory = make(seed, (16, 64, 128)[seed % 3]), workspace(card)
    card.name("", {name: getattr(call, name) for name in "qkv"})

    def run() -> None:
        w = call.wrapper(memory)
        call.plan_with(w)
        w.run(call.q, call.k, call.v, return_lse=True)

    return f"{make.__name__}, {call.q.shape}, {call.q.dtype}", run


def selections(seed: int, card: Card) -> Drawn:
    case = select_cases.draw(seed, on_gpu=True)
    given = {name: x for name, x in case.arguments.items() if isinstance(x, np.ndarray)}
    card.name("", given)
    return str(case).partition(", ")[2], lambda: select(**case.arguments)


def serving(seed: int, card: Card) -> Drawn:
    kinds = serving_cases.KINDS
    kind = kinds[seed % len(kinds)]
    is_latent = seed % 4 == 1 and kind in ("decode", "extend", "draft beams", "draft chain")
    made = serving_cases.LatentCase if is_latent else serving_cases.Case
    case = made(seed, kind=kind, is_gpu=True)
    case.check = lambda *_: None  # type: ignore[method-assign]
    text = f"{'latent ' * is_latent}{kind}, {case.bs} requests, {case.layer_kind}"
    return text, case.run


def _without_answer(run: Callable[[], object]) -> None:
    """Nothing has run, so the helper's comparison at the end finds poison."""
    try:
        run()
    except AssertionError:
        pass


@functools.cache
def _entries() -> list[Any]:
    return wrong_others.entries()


def entries(seed: int, card: Card) -> Drawn:
    """A public call of helpers/wrong_calls.py with some of its options."""
    entry = _entries()[seed % len(_entries())]
    rng = np.random.default_rng((seed, 11))
    arguments = entry.arguments()
    optional = []
    for name in entry.parameters():
        if name not in entry.base:
            short = name.split(".")[1]
            value = entry.samples.get(name, entry.samples.get(short, _VALUES.get(short)))
            optional += [(name, value)] if value is not None else []
    count = min(len(optional), int(rng.integers(0, 4)))
    chosen = (
        [optional[i] for i in sorted(rng.choice(len(optional), count, replace=False))]
        if count
        else []
    )
    arguments |= dict(chosen)
    card.name("", arguments)
    said = ", ".join(n if isinstance(x, np.ndarray) else f"{n}={x}" for n, x in chosen)
    return f"{entry.name}: {said}", lambda: entry.call(arguments)


# Optional arguments that are no arrays, and a value of each.
_VALUES: dict[str, Any] = {
    "causal": True,
    "return_lse": True,
    "sm_scale": 0.2,
    "window_left": 3,
    "window_right": 2,
    "window_size": (3, 0),
    "logits_soft_cap": 20.0,
    "softcap": 20.0,
    "pos_encoding_mode": "ROPE_LLAMA",
    "rope_scale": 2.0,
    "rope_theta": 5e5,
    "disable_split_kv": True,
    "fixed_split_size": 2,
    "q_scale": 0.5,
    "k_scale": 0.7,
    "v_scale": 1.5,
    "softmax_scale": 0.2,
    "attention_chunk": 4,
    "return_softmax_lse": True,
    "enable_pdl": True,
    "num_splits": 1,
    "bmm1_scale": 0.3,
    "bmm2_scale": 1.2,
    "lse_base": "ln",
    "lse_layout": "HN",
    "o_dtype": "float32",
    "kv_layout": "HND",
}

"""Wrong calls of everything public, made at random: refused in words, or answered rightly.

A call that is answered must mean what it answers (tests/helpers/wrong_calls.py). No error is
anything but the library's own, and TypeError for names of arguments. Nothing is ever written that
the call does not own, and nothing at all by a call that is refused.
"""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.wrong_calls import Arguments, Entry, Outcome, attempt, change, pool
from helpers.wrong_others import entries

import cupyattn
from cupyattn.array.views import view
from cupyattn.errors import ArgumentError, CupyAttnError

ENTRIES = {entry.name: entry for entry in entries()}
SINGLES, PAIRS, SWAPS, ALIASES = 130, 60, 15, 15
# No call; one whose arguments are those of the plan that it makes; one of two caches that are one;
# and one over other calls, whose wrong values are in test_dot_product.py.
OTHERS = {"__version__", "explain", "fast_decode_plan", "xqa_mla", "dot_product_attention"}
# Their wrong calls are in tests/unit/quantize.
OTHERS |= {"QuantizedQKV", "quantize_qkv", "rope_and_cache"}
# Their wrong calls are in tests/unit/sparse.
OTHERS |= {"top_k_page_table_transform", "top_k_ragged_transform"}


def singles(entry: Entry) -> list[tuple[str, int]]:
    """(argument, place in its pool) of every call with one changed argument."""
    return [(name, i) for name in entry.parameters() for i in range(len(pool(entry, name)))]


def changed(entry: Entry, *changes: tuple[str, int]) -> Arguments | None:
    arguments = entry.arguments()
    for name, place in changes:
        if not change(entry, arguments, name, pool(entry, name)[place]):
            return None
    return arguments


def calls(entry: Entry, rng: random.Random) -> Iterator[tuple[str, Arguments]]:
    """What is changed, and the call."""
    every = singles(entry)
    chosen: list[tuple[tuple[str, int], ...]]
    chosen = [(x,) for x in rng.sample(every, min(SINGLES, len(every)))]
    chosen += [tuple(rng.sample(every, 2)) for _ in range(PAIRS)]
    for changes in chosen:
        arguments = changed(entry, *changes)
        if arguments is not None:
            yield str(changes), arguments
    for _ in range(SWAPS if len(entry.base) > 1 else 0):
        arguments = entry.arguments()
        a, b = rng.sample(list(arguments), 2)
        arguments[a], arguments[b] = arguments[b], arguments[a]
        yield f"{a} and {b} swapped", arguments
    for _ in range(ALIASES):
        arguments = entry.arguments()
        name, other = rng.choice(list(entry.parameters())), rng.choice(list(arguments))
        arguments[name] = arguments[other]
        yield f"{name} is {other}", arguments
    for name in entry.written:
        for step in entry.steps:
            for other in entry.base if f"{step[0]}.{name}" in entry.parameters() else ():
                arguments = entry.arguments()
                arguments[f"{step[0]}.{name}"] = arguments[other]
                yield f"{name} is {other}", arguments


def report(entry: Entry, what: str, outcome: Outcome) -> str:
    return f"{entry.name}, {what}: {outcome.kind} {outcome.wrong}"


@pytest.mark.parametrize("name", ENTRIES)
def test_wrong_calls_are_refused_or_mean_something(name: str) -> None:
    entry, rng = ENTRIES[name], random.Random(name)
    good = attempt(entry, entry.arguments())
    assert good == ("answered", "")
    outcomes = [(what, attempt(entry, arguments)) for what, arguments in calls(entry, rng)]
    wrong = [report(entry, what, x) for what, x in outcomes if x.wrong]
    assert not wrong, "\n".join(wrong[:5])
    kinds = {x.kind for _, x in outcomes}
    assert kinds == {"refused", "answered"} and len(outcomes) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_every_wrong_value_of_every_argument(name: str) -> None:
    entry, wrong = ENTRIES[name], []
    for which in singles(entry):
        arguments = changed(entry, which)
        if arguments is not None and (outcome := attempt(entry, arguments)).wrong:
            wrong.append(report(entry, str(which), outcome))
    assert not wrong, "\n".join(wrong[:20])


def test_a_float64_array_is_to_be_cast_to_what_its_argument_takes() -> None:
    same = dict.fromkeys(("bfloat16", "float8_e4m3fn", "float8_e5m2"), "float16") | {
        "int64": "int32"
    }
    as_queries = {"out_partial", "rotary_cos", "rotary_sin"}  # or float32
    wrong, count = [], 0
    for entry in ENTRIES.values():
        for name, x in {**entry.base, **entry.samples}.items():
            name = name.rpartition(".")[2]
            if not isinstance(x, np.ndarray) or x.dtype == np.float64 or name in as_queries:
                continue
            if name == "out" and x.dtype.kind == "i":  # its name says nothing of the dtype
                continue
            with pytest.raises(ArgumentError) as error:
                view(np.empty(x.shape, np.float64), name)
            cast = str(error.value).rpartition("; cast it to ")[2].split(", ")[0]
            count += 1
            if cast != same.get(x.dtype.name, x.dtype.name):
                wrong.append(f"{entry.name}, {name}: {cast}, and it is {x.dtype}")
    assert not wrong, "\n".join(wrong)
    assert count >= 200


@pytest.mark.parametrize("name", ENTRIES)
def test_names_of_arguments(name: str) -> None:
    """TypeError, as Python raises it, for those that there are not, or a typed error."""
    entry = ENTRIES[name]
    for step, _ in entry.steps:
        with pytest.raises((TypeError, CupyAttnError), match="nonsense"):
            entry.call(entry.arguments() | {f"{step}.nonsense": 1})
    for missing, default in entry.parameters().items():
        if default is not inspect.Parameter.empty:
            continue
        arguments = entry.arguments()
        del arguments[missing]
        with pytest.raises((TypeError, CupyAttnError), match=missing.split(".")[1]):
            entry.call(arguments)


def test_there_are_enough_calls_and_nothing_public_is_left_out() -> None:
    count = sum(min(SINGLES, len(singles(x))) + PAIRS + SWAPS + ALIASES for x in ENTRIES.values())
    assert count >= 10_000
    called: set[Any] = {target for x in ENTRIES.values() for _, target in x.steps}
    called |= {getattr(x, "__wrapped__", None) for x in called}
    missing = []
    for name in cupyattn.__all__:
        value = getattr(cupyattn, name)
        if isinstance(value, types.ModuleType):
            value = getattr(value, name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        if not (is_error or name in OTHERS or value in called):
            missing.append(name)
    assert not missing

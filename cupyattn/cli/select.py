"""Which kernels `cupyattn compile` compiles: options of the command, to selections."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core import dtypes
from ..core.dtypes import DType
from ..core.parse import choice, require_int
from ..errors import ArgumentError, CupyAttnError
from ..launch.instances import LEVELS, OPERATIONS, OPTIONS, Selection, fields_of, problems
from . import model

STANDARD = "standard"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select kernels."""
    group = parser.add_argument_group(
        "which kernels",
        "A level or a model, and what to take instead of its own choice: each of these options may "
        "be repeated, or given several values with commas.",
    )
    of = group.add_mutually_exclusive_group()
    of.add_argument(
        "--level",
        choices=tuple(LEVELS),
        default=STANDARD,
        help="standard (default): 16-bit and, in pages, float8_e4m3fn keys; head dims 64, 128, 256 "
        "and 192/128; windows, sinks and soft cap. full: also float8_e5m2, RoPE, ALiBi, masks, "
        "scales by head, pairs of options, more head dims and unaligned rows (hours)",
    )
    of.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="what the model of this Hugging Face config.json needs",
    )
    for flag, (_, parse, metavar, text) in _FILTERS.items():
        group.add_argument(
            flag, action="extend", type=_several(parse), metavar=metavar, help=text, default=[]
        )


def selections(args: argparse.Namespace) -> list[Selection]:
    """What the parsed options select. Raises ArgumentError or UnsupportedError."""
    options = {
        field: tuple(dict.fromkeys(values))
        for flag, (field, *_) in _FILTERS.items()
        if (values := getattr(args, flag.strip("-").replace("-", "_")))
    }
    chosen = LEVELS[args.level]
    if args.model is not None:
        chosen = (model.read(args.model, options),)
    result = [replace(one, **options) for one in chosen]
    asked = [problem for one in result for problem, _ in problems(one)]
    if not asked:
        raise ArgumentError("no call has all of these at once, so there is nothing to compile")
    for problem in asked:
        problem.check_supported()
    return result


def _several(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """`parse` of each of some values with commas between them, for argparse."""

    def parse_all(text: str) -> list[Any]:
        try:
            return [parse(part.strip()) for part in text.split(",")]
        except CupyAttnError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def _operation(text: str) -> str:
    return choice(text, tuple(OPERATIONS), "operation")


def _dtypes(text: str) -> tuple[DType, DType]:
    q, _, kv = text.partition("/")
    return dtypes.parse(q), dtypes.parse(kv or q)


def _head_dims(text: str) -> tuple[int, int]:
    qk, _, vo = text.partition("/")
    return _integer(qk, "head dim"), _integer(vo or qk, "head dim")


def _group(text: str) -> int:
    return _integer(text, "group")


def _page_size(text: str) -> int:
    return _integer(text, "page size", 0)


def _options(text: str) -> frozenset[str]:
    names = frozenset(choice(name.strip(), tuple(OPTIONS), "option") for name in text.split("+"))
    fields_of(names)
    return names


def _integer(text: str, name: str, minimum: int = 1) -> int:
    return require_int(int(text) if text.lstrip("-").isdecimal() else text, name, minimum)


# Flag -> field of Selection, what reads a value, and the help.
_FILTERS: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "--op": (
        "operations",
        _operation,
        "OP",
        "; ".join(f"{name}: {text}" for name, text in OPERATIONS.items()),
    ),
    "--dtype": (
        "dtypes",
        _dtypes,
        "Q[/KV]",
        "of queries and, if it is another one, of the cache: bfloat16, float16/float8_e4m3fn, ...",
    ),
    "--head-dim": (
        "head_dims",
        _head_dims,
        "QK[/VO]",
        "of q and k and, if it is another one, of v and o: 128, 192/128, ...",
    ),
    "--group": ("groups", _group, "N", "query heads that share a key head"),
    "--page-size": (
        "page_sizes",
        _page_size,
        "N",
        "tokens of a page; 0: keys in rows. All multiples of 8 have the same kernels, and all "
        "others",
    ),
    "--option": (
        "options",
        _options,
        "NAME[+NAME]",
        f"{', '.join(OPTIONS)}; with + for calls that have several at once. none, window and sinks "
        "have the same kernels",
    ),
}

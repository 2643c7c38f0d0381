"""The calls of the record: so many of each door, drawn by a seed, each on one card."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cupyattn.errors import CupyAttnError

from . import large, lists, small
from .cards import CARDS, Card, Launch, plugged_in

Draw = Callable[[int, Card], small.Drawn]
# How many calls of a door there are.
DOORS: dict[str, tuple[Draw, int]] = {
    "single": (small.single, 100),
    "batch": (small.batch, 130),
    "prompts": (small.prompts, 24),
    "wide": (small.wide, 52),
    "mixed": (small.mixed, 40),
    "cascade": (small.cascade, 60),
    "shared prefix": (small.shared, 40),
    "latent": (small.latent, 110),
    "shares of keys": (small.shares, 48),
    "tables": (small.planless, 100),
    "flash_attn": (small.flash, 140),
    "trtllm_fmha_v2": (small.fmha, 24),
    "logits": (small.logits, 80),
    "gates": (small.gates_of_output, 63),
    "gates of flash_attn": (small.gates_of_flash, 56),
    "append": (small.append, 40),
    "slots": (small.slots, 30),
    "merge": (small.merge, 60),
    "block sparse": (small.sparse, 40),
    "selections": (small.selections, 40),
    "serving": (small.serving, 100),
    "every entry": (small.entries, 200),
    "decode of models": (large.decode, 160),
    "prefill of models": (large.prefill, 160),
    "choices of tiles": (large.choices, 320),
    "mixed of models": (large.mixed, 80),
    "single of models": (large.single, 60),
    "flash_attn of models": (large.flash, 120),
    "tables of models": (large.tables, 100),
    "latent of models": (large.latent, 90),
    "cascade of models": (large.cascade, 60),
    "pod of models": (large.pod, 30),
    "dot_product of models": (large.dot_product, 40),
    "8 bits of models": (large.eight_bits, 120),
    "blocks of rows of models": (large.blocks_of_rows, 24),
    "lists of models": (lists.attend, 90),
    "selections of models": (lists.select, 60),
    "two latent lists": (lists.latent, 36),
}
_MAIN = "h100", "h200", "h100 pcie"


class Call(NamedTuple):
    """What became of a call.

    error  the kind of error that refused it, or ""
    again  launches of the same call once more, of what the library then remembers
    """

    door: str
    seed: int
    card: str
    text: str
    launches: tuple[Launch, ...]
    error: str = ""
    again: tuple[Launch, ...] = ()


def card_of(door: str, seed: int) -> str:
    """Two of three calls are on the cards that tiles were timed on."""
    rng = np.random.default_rng((seed, *door.encode()))
    others = [x for x in CARDS if x not in _MAIN]
    is_main = rng.random() < 0.66 or DOORS[door][0] is large.choices
    names = _MAIN if is_main else others
    return names[int(rng.integers(len(names)))]


def make(door: str, seeds: Sequence[int] | None = None) -> list[Call]:
    """The calls of a door, in the order of their seeds."""
    draw, count = DOORS[door]
    wanted = range(count) if seeds is None else seeds
    by_card: dict[str, list[int]] = {}
    for seed in wanted:
        by_card.setdefault(card_of(door, seed), []).append(seed)
    made = {}
    for name, own in by_card.items():
        with plugged_in(name) as card:
            for seed in own:
                made[seed] = _call(door, draw, seed, card)
    return [made[seed] for seed in wanted]


def _call(door: str, draw: Draw, seed: int, card: Card) -> Call:
    card.begin()
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        card.is_cupy = draw.__module__ in (large.__name__, lists.__name__)
        text, run = draw(seed, card)
        try:
            run()
            count = len(card.made)
            if card.is_cupy:
                run()
        except CupyAttnError as refused:
            error, count = type(refused).__name__, len(card.made)
    made = tuple(card.made)
    return Call(door, seed, card.card, text, made[:count], error, made[count:])


def everything() -> Iterator[list[Call]]:
    for door in DOORS:
        yield make(door)

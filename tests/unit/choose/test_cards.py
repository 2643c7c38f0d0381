"""Cards hold what was measured: their estimates and choices on the committed rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cupyattn.bench.tiles import fit, rows
from cupyattn.choose import card as cards
from cupyattn.choose.card import Card, card_of, read, shipped
from cupyattn.choose.fit import text_of
from cupyattn.core.device import NO_GPU
from cupyattn.errors import ArgumentError

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
# Rows of batches that no card was fitted to, by the card.
HELD_OUT = {
    "H100": [f"2026-11-27-h100-tiles/rows-{seed}.jsonl.gz" for seed in (3, 12)],
    "H200": ["2026-11-27-h200-tiles/rows-12.jsonl.gz"],
}
MIN_ROWS, MIN_BATCHES = {"H100": 7000, "H200": 1600}, {"H100": 1600, "H200": 550}
MIN_SHORT = {"H100": 300, "H200": 70}


def card_named(name: str) -> Card:
    return next(card for card in shipped() if card.name == name)


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_cards_choices_cost_little_on_rows_that_it_was_not_fitted_to(name: str) -> None:
    measured = [row for file in HELD_OUT[name] for row in rows.read(RESULTS / file)]
    found = fit.check(card_named(name), measured)
    errors = [x for some in found.errors.values() for x in some]
    regrets = [x for some in found.regrets.values() for x in some]
    assert len(errors) > MIN_ROWS[name] and len(regrets) > MIN_BATCHES[name]
    assert np.median(np.abs(errors)) <= 0.08
    assert np.mean(regrets) <= 1.02 and np.percentile(regrets, 95) <= 1.10
    short = [x for kind, some in found.regrets.items() if kind.startswith("short") for x in some]
    assert len(short) > MIN_SHORT[name] and np.mean(short) <= 1.02


def test_choices_cost_little_with_the_code_of_other_kernels_between_two_calls() -> None:
    """The quarter of these batches that was held out: prompts, encoders and cross attention."""
    _, held = fit.split(rows.read(RESULTS / "2026-11-27-h100-cold/rows.jsonl.gz"))
    assert {row.between for row in held} == {"code"}
    regrets = fit.check(card_named("H100"), held).all_regrets()
    assert len(regrets) >= 80
    assert np.mean(regrets) <= 1.025 and np.percentile(regrets, 95) <= 1.11


def test_a_fit_finds_times_that_differ_from_those_it_begins_with() -> None:
    """Half as fast a card, by rows that it would have: a fit ends near it."""
    measured = rows.read(RESULTS / HELD_OUT["H100"][0])[:1500]
    slower = [replace(row, us=2 * row.us) for row in measured]
    card = card_named("H100")
    before, after = (fit.check(x, slower) for x in (card, fit.fit(card, slower)))
    biases = [
        np.median([x for some in found.errors.values() for x in some]) for found in (before, after)
    ]
    assert biases[0] < -0.6 and abs(biases[1]) < 0.05


def test_a_slower_card_says_as_many_times_as_much_of_everything() -> None:
    measured, card = rows.read(RESULTS / HELD_OUT["H100"][0])[:1500], card_named("H100")
    one, slower = (fit.check(x, measured).errors for x in (card, card.slower(2.5)))
    assert one.keys() == slower.keys() and len(one) > 20
    for kind, logs in one.items():
        np.testing.assert_allclose(slower[kind], np.array(logs) + np.log(2.5), atol=1e-6)


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_a_card_is_its_file(name: str) -> None:
    text = (cards.FOLDER / f"{name.lower()}.json").read_text("utf-8")
    assert text_of(read(text, name)) == text


def test_a_card_without_a_file_is_the_nearest_scaled() -> None:
    pcie = replace(
        NO_GPU, name="NVIDIA H100 PCIe", num_sms=114, memory_rate=2039.0, sm_clock=1755.0
    )
    near, made = card_named("H100"), card_of(pcie)
    assert (made.scaled_from, made.source, made.num_sms) == ("H100", "", 114)
    key = next(iter(made.tiles))
    assert made.tiles[key].times.key_tile == pytest.approx(
        near.tiles[key].times.key_tile * near.sm_clock / 1755
    )
    assert made.key_rate == pytest.approx(near.key_rate * 2039 / near.memory_rate)
    assert made.decode.cluster.key_tile > near.decode.cluster.key_tile
    assert card_of(replace(NO_GPU, name="NVIDIA H200")) == card_named("H200")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"card": {}}', '{"card": 1, "measured": null}', "[" * 100_000]
)
def test_a_file_that_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"here\.json: this is no file of a card's times"):
        read(text, "here.json")

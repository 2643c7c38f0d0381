"""What calls launch is what is recorded, and the record notices what changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers import patching

from cupyattn.choose import card
from cupyattn.launch.attention import batch, bound_run
from cupyattn.launch.driver import params

from . import record
from .cards import CARDS
from .doors import DOORS, make


@pytest.mark.parametrize("door", DOORS)
def test_calls_launch_what_is_recorded(door: str) -> None:
    calls = make(door)
    recorded = record.load().get(door, {})
    assert recorded.keys() == {str(call.seed) for call in calls}
    if told := record.told(record.differences(recorded, calls), len(calls)):
        pytest.fail(told, pytrace=False)


def changed(door: str, seeds: range) -> tuple[set[str], str]:
    """The parts in which calls differ from the record, and what is told of them."""
    calls = make(door, seeds)
    found = record.differences(record.load()[door], calls)
    return {part for x in found for part in x.parts}, record.told(found, len(calls))


def test_another_time_of_one_tile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    key = card.TileKey("prefill_sm90", "q128_oneshot", "ragged", 128, 128)
    known = card.card_of

    def slower(props: Any) -> card.Card:
        found = known(props)
        timed = found.tiles[key]
        times = timed.times._replace(key_tile=1.3 * timed.times.key_tile)
        tiles = {**found.tiles, key: timed._replace(times=times)}
        return dataclasses.replace(found, tiles=tiles)

    patching.replace(monkeypatch, known, slower)
    parts, told = changed("choices of tiles", range(150))
    assert {"kernels", "params"} <= parts
    assert "differs in" in told and "was: h" in told and "now: h" in told


def test_another_number_in_a_struct_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "SLACK", 9.0)
    parts, told = changed("single", range(8))
    assert parts == {"params"}
    assert told.startswith("single: ") and "params" in told


def test_other_words_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = batch.BatchLauncher._plan

    def backwards(launcher: Any, *args: Any) -> Any:
        made = plan(launcher, *args)
        return dataclasses.replace(made, items=made.items[::-1])

    monkeypatch.setattr(batch.BatchLauncher, "_plan", backwards)
    assert changed("batch", range(12))[0] == {"words"}


def test_exchanged_arrays_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = bound_run.BoundRun.launch

    def exchanged(run: Any, q: int, k: int, v: int, *rest: Any) -> None:
        launch(run, q, v, k, *rest)

    monkeypatch.setattr(bound_run.BoundRun, "launch", exchanged)
    assert "places" in changed("batch", range(12))[0]


def test_another_card_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for facts in CARDS.values():
        monkeypatch.setitem(facts, "num_sms", 60)
    assert "shapes" in changed("mixed of models", range(12))[0]


def test_a_call_that_is_gone_or_refused_is_noticed() -> None:
    (call,) = make("single", [0])
    refused = call._replace(launches=(), error="UnsupportedError")
    recorded = {"0": record.entries_of(call)}
    (found,) = record.differences(recorded, [refused])
    assert found.parts == ("number of launches",)
    assert "refused by UnsupportedError" in record.told([found], 1)
    assert record.differences({}, [call])[0].was is None


def test_calls_do_not_depend_on_those_before() -> None:
    """Nor does a record on which process made which calls."""
    for door in ("flash_attn of models", "decode of models", "merge"):
        alone = [make(door, [seed])[0] for seed in (5, 4)]
        assert [*map(record.entries_of, alone)] == [record.load()[door][s] for s in ("5", "4")]

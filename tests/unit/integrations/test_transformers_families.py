"""Models of many families of transformers: the answers of eager attention, and its tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from helpers.model_families import FAMILIES, answers, pair  # noqa: E402

import cupyattn.integrations.transformers as door  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    door.register()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, calls = FAMILIES[name], []
    real = door.attention
    counted = lambda *a, **k: calls.append(0) or real(*a, **k)  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, door.NAME, counted)
    eager, ours = pair(family, transformers, torch)
    paddings = (
        [(0, True), (4, True), (4, False)] if family.takes in ("text", "pair") else [(0, True)]
    )
    for padding, is_left in paddings:
        given = family.inputs(torch, padding, is_left)
        want, got = (answers(m, torch, given) for m in (eager, ours))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=5e-4)
    assert calls
    if not family.writes:
        return
    for cache in ("dynamic", "static"):
        given = family.inputs(torch, 4)
        given.pop("decoder_input_ids", None)
        named = {"cache_implementation": "static"} if cache == "static" else {}
        made = [
            m.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, **named)
            for m in (eager, ours)
        ]
        assert torch.equal(*made), cache

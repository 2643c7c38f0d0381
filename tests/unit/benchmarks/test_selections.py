"""Cases of selections without a GPU: draws, and each implementation beside the float64 answer."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from benchmarks import oracle, peers
from benchmarks.selections import inputs as selections
from benchmarks.selections import offers
from benchmarks.selections.case import SelectionCase
from benchmarks.selections.inputs import expect_selection, make_selection_inputs, scores_of
from benchmarks.sweep.draw import draw_cases, model_of
from benchmarks.sweep.plans import plan_of

torch = pytest.importorskip("torch")


def small(phase: str, **more: Any) -> SelectionCase:
    """A drawn case of a phase with few heads and keys."""
    case = next(x for x in draw_cases(2, 80, ["select"]) if model_of(x) == f"dsa {phase}")
    assert isinstance(case, SelectionCase)
    requests = {"decode": (3, 1, 300), "verify": (2, 2, 150), "prompt": (1, 30, 170)}[phase]
    sizes: dict[str, Any] = {"requests": (requests,), "num_qo_heads": 8, "entries": 32}
    return replace(case, name=f"small {phase}", **(sizes | more))


def error(name: str, case: SelectionCase) -> float:
    inputs = make_selection_inputs(case, "cpu")
    (offered,) = peers.candidates(name, case, inputs)
    expected = expect_selection(case, inputs)
    return oracle.judge(expected, offered.output(offered.call()), selections.TOLERANCE).relative


def test_draws_are_of_all_phases() -> None:
    cases = draw_cases(11, 64, ["select"])
    assert cases == draw_cases(11, 70, ["select"])[:64]
    assert len({case.name for case in cases}) == 64
    found = Counter(map(model_of, cases))
    assert found.keys() == {"dsa decode", "dsa verify", "dsa prompt"} and min(found.values()) > 8
    for case in cases:
        assert isinstance(case, SelectionCase) and plan_of(case) is None
        assert case.bytes > 0 and case.flops > 0 and case.kv_lens[0] >= case.entries
        assert case.q_offsets[-1] <= (8192 if case.kind == "dsa prompt" else 128)
        assert case.q_offsets[-1] * case.kv_lens[0] <= 1 << 28


@pytest.mark.parametrize("phase", ["decode", "verify", "prompt"])
def test_ours_is_right(phase: str) -> None:
    assert error("ours", small(phase)) < 1e-12
    assert error("ours", small(phase, entries=200)) < 1e-12  # of tokens that see fewer keys too


def test_wrong_lists_are_seen() -> None:
    case = small("decode")
    inputs = make_selection_inputs(case, "cpu")
    expected = expect_selection(case, inputs)
    right = inputs.scores.topk(33, dim=1).indices
    for token, (lists, is_right) in enumerate(
        (
            (right[:, :32], True),
            (right[:, 1:], False),  # without the greatest
            (torch.cat((right[:, :31], right[:, :1]), 1), False),  # one twice
            (torch.cat((right[:, :31], torch.full((3, 1), -1)), 1), False),
        )
    ):
        answer = scores_of(case, inputs, lists[:, None])
        assert oracle.judge(expected, answer, selections.TOLERANCE).ok == is_right, token


@pytest.mark.parametrize("phase", ["decode", "verify", "prompt"])
def test_deepgemm_comes_from_a_folder(
    phase: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    case = small(phase)
    monkeypatch.delenv(offers.FOLDER_VARIABLE, raising=False)
    with pytest.raises(peers.Unsupported, match=r"folder with deepgemm\.py"):
        error("deepgemm", case)
    (tmp_path / "deepgemm.py").touch()
    monkeypatch.setenv(offers.FOLDER_VARIABLE, str(tmp_path))
    module = ModuleType("deepgemm")

    def write(q: Any, k: Any, scales: Any, weights: Any, out: Any) -> None:
        products = q.float() @ k.float().T
        scores = (products.relu() * weights[:, None]).sum(0) * scales
        out[: len(scores)] = scores

    def paged(
        q: Any, cache: Any, weights: Any, lengths: Any, table: Any, keys: int, logits: Any
    ) -> Any:
        drafts, size = q.shape[1], cache.shape[1] * 128

        def call() -> None:
            for token in range(len(weights)):
                pages = cache.flatten(1)[table[token // drafts].long()]
                k = pages[:, :size].contiguous().view(torch.float8_e4m3fn).view(-1, 128)
                scales = pages[:, size:].contiguous().view(torch.float32).flatten()
                own = q[token // drafts, token % drafts]
                write(own, k[:keys], scales[:keys], weights[token], logits[token])

        assert lengths.tolist() == [keys] * len(lengths) and table.shape[1] % 4 == 0
        return call

    def flat(q: Any, k: Any, scales: Any, weights: Any, starts: Any, ends: Any, logits: Any) -> Any:
        def call() -> None:
            for token, end in enumerate(ends.tolist()):
                write(q[token], k[:end], scales[:end], weights[token], logits[token])

        assert not starts.any() and len(scales) % 4 == 0
        return call

    module.paged, module.flat = paged, flat  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepgemm", module)
    assert error("deepgemm", case) < 1e-5

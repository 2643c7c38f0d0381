"""The toy engine: its demo, what it says with drafts and without, and that its check can fail."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupyattn.serving import AttentionBackend, MHATokenToKVPool  # noqa: E402
from examples import drafts, serve  # noqa: E402
from examples.engine import Engine, Limits  # noqa: E402
from examples.model import Llama, Shape  # noqa: E402
from examples.pages import Pages, Request  # noqa: E402

SHAPE = Shape(vocab=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=64)
LIMITS = Limits(max_batch=4, max_context=96, chunk=24, num_pages=20, page_size=8)
MODEL = Llama.random(SHAPE, torch.float32, "cpu", early_layers=1)
JOB = serve.CPU_JOB._replace(shape=SHAPE, num_requests=7, system_len=20, user_len=10, answer_len=14)
# No child of a beam is left out of a tree of so many tokens.
WHOLE = drafts.TreeShape(topk=2, depth=3, num_tokens=1 + 2 + 2 * 4)
CHAIN = drafts.TreeShape(topk=1, depth=3, num_tokens=4)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads of torch and of other tests would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def served(draft: Any = None, limits: Limits = LIMITS) -> tuple[Engine, list[Request]]:
    engine, requests = Engine(MODEL, limits, draft), JOB.requests(seed=3)
    engine.serve(requests, lambda done: None)
    return engine, requests


def answers(requests: list[Request]) -> list[list[int]]:
    return [request.tokens[len(request.prompt) :] for request in requests]


def length(engine: Engine) -> float:
    return engine.stats["decode tokens"] / engine.stats["requests"]


@pytest.fixture(scope="module")
def plain() -> list[Request]:
    return served()[1]


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bfloat16, on the CPU" in lines[0]
    rows = {line[:9].strip(): line[22:].split() for line in lines[2:]}
    assert list(rows) == ["no drafts", "drafts"]
    for found in rows.values():
        assert found[4:6] == ["ok", "of"] and int(found[3].rstrip("%")) > 0
    assert rows["no drafts"][2] == "1.00" and float(rows["drafts"][2]) > 1.5


def test_every_token_is_that_of_the_dense_model(plain: list[Request]) -> None:
    found = serve.check(MODEL, plain)
    assert found.num_tokens == found.num_first == sum(r.max_new_tokens for r in plain) > 60
    # The answers are not all one word.
    assert len({word for answer in answers(plain) for word in answer}) > 20


@pytest.mark.parametrize("shape", [JOB.tree, WHOLE, CHAIN], ids=["tree", "whole", "chain"])
def test_drafts_change_nothing(plain: list[Request], shape: drafts.TreeShape) -> None:
    engine, requests = served((MODEL.draft_model(1, 0.02), shape))
    assert answers(requests) == answers(plain)
    assert 1.5 < length(engine) < shape.depth + 1


def test_a_perfect_draft_model_is_always_right(plain: list[Request]) -> None:
    """Its keys are then those of the target model, wherever beams and accepted tokens put them."""
    engine, requests = served((MODEL.draft_model(2, 0.0), CHAIN))
    assert answers(requests) == answers(plain)
    assert length(engine) == CHAIN.depth + 1
    engine, requests = served((MODEL.draft_model(2, 0.0), WHOLE))
    assert answers(requests) == answers(plain)
    assert length(engine) > WHOLE.depth + 0.8


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_of_other_sizes(plain: list[Request], page_size: int) -> None:
    limits = LIMITS._replace(num_pages=160 // page_size, page_size=page_size)
    _, requests = served((MODEL.draft_model(1, 0.02), JOB.tree), limits)
    assert answers(requests) == answers(plain)


def test_no_page_is_lost() -> None:
    engine, requests = served((MODEL.draft_model(1, 0.02), JOB.tree))
    pages = engine.pages
    owned = [node.page for node in pages.nodes] + pages.free
    assert sorted(owned) == list(range(1, LIMITS.num_pages))
    assert not any(node.users for node in pages.nodes) and pages.nodes
    assert sorted(engine.free_rows) == list(range(1, 1 + LIMITS.max_batch))
    # Later requests begin with what earlier ones have left.
    assert engine.stats["reused"] == sum(r.num_reused for r in requests) > 0
    assert engine.stats["prefill tokens"] >= sum(len(r.prompt) - r.num_reused for r in requests)


@pytest.mark.parametrize("fault", ["attention", "keys", "mask"])
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    draft = MODEL.draft_model(1, 0.02), JOB.tree
    if fault == "attention":
        forward = AttentionBackend.forward
        monkeypatch.setattr(AttentionBackend, "forward", lambda *a: 1.2 * forward(*a))
    elif fault == "keys":  # accepted keys are not moved
        find = MHATokenToKVPool.get_kv_buffer

        def copies(self: Any, layer: int) -> Any:
            return tuple(x.clone() for x in find(self, layer))

        speculate = Engine._speculate

        def broken(self: Engine, *inputs: Any) -> Any:
            run = self.target.run

            def then_break(*arguments: Any) -> Any:
                hidden = run(*arguments)
                monkeypatch.setattr(MHATokenToKVPool, "get_kv_buffer", copies)
                return hidden

            monkeypatch.setattr(self.target, "run", then_break)
            found = speculate(self, *inputs)
            monkeypatch.setattr(MHATokenToKVPool, "get_kv_buffer", find)
            monkeypatch.setattr(self.target, "run", run)
            return found

        monkeypatch.setattr(Engine, "_speculate", broken)
    else:  # drafts see all others
        grow = drafts.grow

        def blind(*arguments: Any) -> drafts.Tree:
            tree = grow(*arguments)
            return tree._replace(seen=torch.ones_like(tree.seen).tril())

        monkeypatch.setattr(drafts, "grow", blind)
    _, requests = served(draft)
    assert serve.check(MODEL, requests).num_wrong > 3


def test_accept() -> None:
    """Of two branches the right one, as far as it is right."""
    parents = torch.tensor([[0, 0, 0, 1, 2, 4]])
    seen = torch.eye(6, dtype=torch.bool)[None]
    for _ in range(3):
        seen = seen | seen.gather(1, parents[:, :, None].expand_as(seen))
    tokens = torch.tensor([[5, 7, 8, 9, 6, 4]])
    words = torch.tensor([[8, 9, 6, 0, 3, 1]])
    path, count = drafts.accept(drafts.Tree(tokens, parents, seen), words, depth=3)
    assert count.tolist() == [3] and path[0, :3].tolist() == [0, 2, 4]


def test_trees_have_the_likeliest_paths_with_their_parents() -> None:
    scores = torch.tensor([[-1.0, -2.0, -1.0, -9.0, -3.0, -2.5]])
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]])
    shape = drafts.TreeShape(topk=2, depth=2, num_tokens=5)
    tree = drafts._likeliest(scores, tokens, parents, torch.tensor([3]), shape)
    assert tree.tokens.tolist() == [[3, 10, 11, 12, 15]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 2]]
    assert tree.seen.int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    ]


def request(prompt: list[int]) -> Request:
    return Request(prompt, 4)


def test_a_prefix_is_found_and_evicted_when_its_room_is_needed() -> None:
    pages = Pages(num_pages=6, page_size=2)
    first = request([1, 2, 3, 4, 5])
    assert pages.admit(first, 6) and not first.prefix
    first.num_keys, first.num_draft_keys = 5, 3
    pages.share(first)
    # The second page is not whole in the draft model.
    assert [node.tokens for node in first.prefix] == [(1, 2)]
    first.num_draft_keys = 5
    # The last token of a prompt is computed, so that the page that it fills is not taken.
    second = request([1, 2, 3, 4])
    pages.share(first)
    assert pages.admit(second, 4) and second.num_reused == 2
    assert second.pages[0] == first.pages[0]
    assert not pages.admit(request([9, 9]), 8)
    pages.release(first)
    assert len(pages.free) == 2 and len(pages.nodes) == 2
    third = request([9, 9])
    assert pages.admit(third, 6) and len(pages.nodes) == 1  # (3, 4) went, (1, 2) is in use
    assert not set(third.pages) & set(second.pages)


def test_a_request_that_can_never_fit_is_named() -> None:
    engine = Engine(MODEL, LIMITS._replace(num_pages=4))
    with pytest.raises(MemoryError, match="34 tokens"):
        engine.serve([Request(list(range(30)), 4)], lambda done: None)


def test_it_is_500_lines_of_code() -> None:
    """Without blank lines, comments and docstrings."""
    count = 0
    for path in Path(serve.__file__).parent.glob("*.py"):
        text = path.read_text("utf-8")
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (
                tokenize.COMMENT,
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.DEDENT,
                tokenize.INDENT,
                tokenize.ENDMARKER,
            ):
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
                node
            ):
                lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        count += len(lines)
    assert 300 < count <= 500

"""The toy engine: its demo, what it says with drafts and without, and that its check can fail."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from cupyattn.distributed import Group, simulate  # noqa: E402
from cupyattn.serving import AttentionBackend  # noqa: E402
from examples import drafts, serve  # noqa: E402
from examples import engine as engines  # noqa: E402
from examples.engine import Engine  # noqa: E402
from examples.model import Llama, Shape  # noqa: E402
from examples.pages import Pages, Request  # noqa: E402
from examples.worker import NO_DRAFTS, Limits, TreeShape  # noqa: E402

SHAPE = Shape(64, 32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=64, early_layers=1)
LIMITS = Limits(max_batch=4, max_context=96, chunk=24, num_pages=20, page_size=8)
TREE = TreeShape(topk=2, depth=3, num_tokens=6)
# No child of a beam is left out of a tree of so many tokens.
WHOLE = TreeShape(topk=2, depth=3, num_tokens=1 + 2 + 2 * 4)
CHAIN = TreeShape(topk=1, depth=3, num_tokens=4)
MODEL = Llama.random(SHAPE, torch.float32, "cpu")
JOB = serve.Job(SHAPE, LIMITS, TREE, num_requests=6, system_len=18, user_len=10, answer_len=12)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads of torch and of other tests would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def served(
    draft_model: Llama | None = None, tree: TreeShape = NO_DRAFTS, limits: Limits = LIMITS
) -> tuple[Engine, list[Request]]:
    engine, requests = Engine(MODEL, limits, draft_model, tree), JOB.requests(seed=3)
    engine.serve(requests, lambda done, total: None)
    return engine, requests


def answers(requests: list[Request]) -> list[list[int]]:
    return [request.tokens[request.prompt_len :] for request in requests]


def accepted_length(engine: Engine) -> float:
    return engine.stats["decode tokens"] / engine.stats["decode requests"]


def num_wrong(requests: list[Request]) -> int:
    gaps, allowed = serve.check(MODEL, requests)
    return int((~(gaps <= allowed)).sum())


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
        assert found[4] == "ok," and int(found[3].rstrip("%")) > 0
    assert rows["no drafts"][2] == "1.00" and float(rows["drafts"][2]) > 1.5


def test_every_token_is_that_of_the_dense_model(plain: list[Request]) -> None:
    gaps, allowed = serve.check(MODEL, plain)
    assert len(gaps) == sum(r.max_len - r.prompt_len for r in plain) > 50
    assert not gaps.any() and (0 < allowed).all() and (allowed < 1e-3).all()
    # The answers are not all one word.
    assert len({word for answer in answers(plain) for word in answer}) > 20


@pytest.mark.parametrize("tree", [TREE, CHAIN], ids=["tree", "chain"])
def test_drafts_change_nothing(plain: list[Request], tree: TreeShape) -> None:
    engine, requests = served(MODEL.draft_model(), tree)
    assert answers(requests) == answers(plain)
    assert 1.5 < accepted_length(engine) < tree.depth + 1


@pytest.mark.parametrize(("tree", "least"), [(CHAIN, 4.0), (WHOLE, 3.8)], ids=["chain", "tree"])
def test_a_perfect_draft_model_is_right(
    plain: list[Request], tree: TreeShape, least: float
) -> None:
    """Its keys are then those of the target model, wherever beams have written them. A tree loses
    the right path only where other paths are likelier."""
    engine, requests = served(MODEL.draft_model(SHAPE.layers, noise=0.0), tree)
    assert answers(requests) == answers(plain)
    assert least <= accepted_length(engine) <= tree.depth + 1


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_of_other_sizes(plain: list[Request], page_size: int) -> None:
    limits = LIMITS._replace(num_pages=160 // page_size, page_size=page_size)
    _, requests = served(MODEL.draft_model(), TREE, limits)
    assert answers(requests) == answers(plain)


def test_no_page_is_lost() -> None:
    engine, requests = served(MODEL.draft_model(), TREE)
    pages = engine.pages
    assert sorted([n.page for n in pages.nodes] + pages.free) == list(range(1, LIMITS.num_pages))
    assert pages.nodes and not any(node.users for node in pages.nodes)
    assert sorted(engine.free_rows) == list(range(1, 1 + LIMITS.max_batch))
    # Later requests begin with what earlier ones have left, and that is not computed again.
    reused, prompts = engine.stats["reused tokens"], sum(r.prompt_len for r in requests)
    decoded = engine.stats["decode tokens"]
    most = prompts - reused + sum(r.max_len - r.prompt_len for r in requests) - decoded
    assert 0 < reused < prompts and prompts - reused <= engine.stats["prefill tokens"] <= most + 12


def run_with(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Break what verification rests on."""
    if fault == "attention":
        forward = AttentionBackend.forward
        monkeypatch.setattr(AttentionBackend, "forward", lambda *a: 1.2 * forward(*a))
    elif fault == "mask":  # drafts see all before them, and not only their ancestors
        make = engines.DraftInfo
        monkeypatch.setattr(
            engines,
            "DraftInfo",
            lambda tree_mask: make(tree_mask=torch.ones_like(tree_mask).tril()),
        )
    elif fault == "accept":  # the keys that are kept are those of other tokens
        accept = drafts.accept

        def other(tree: drafts.Tree, words: Any, depth: int) -> Any:
            path, counts = accept(tree, words, depth)
            return path, (counts + 1).clamp(max=depth + 1)

        monkeypatch.setattr(drafts, "accept", other)
    else:  # prefixes of other texts are taken
        monkeypatch.setattr(Pages, "_key", lambda self, request, index: (index,))


@pytest.mark.parametrize("fault", ["attention", "mask", "accept", "prefix"])
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    run_with(monkeypatch, fault)
    _, requests = served(MODEL.draft_model(), TREE)
    assert num_wrong(requests) > 1


def test_keys_of_accepted_drafts_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the move the check fails."""
    accept = drafts.accept

    def in_place(*arguments: Any) -> Any:
        path, counts = accept(*arguments)
        return path.as_subclass(Unmoved), counts

    class Unmoved(torch.Tensor):
        """A path that `where` takes for 0, 1, 2, ..."""

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any, kwargs: Any = None
        ) -> Any:
            args = [x.as_subclass(torch.Tensor) if isinstance(x, cls) else x for x in args]
            if function is torch.where:
                return args[2].expand_as(args[1])
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(drafts, "accept", in_place)
    _, requests = served(MODEL.draft_model(), TREE)
    assert num_wrong(requests) > 1


class Functions(TorchFunctionMode):
    """The names of torch's functions that are called, and how tensors are indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(function.__name__)
        if function.__name__ in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(x, torch.Tensor) and x.dtype is torch.bool for x in indices)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tree", [NO_DRAFTS, TREE], ids=["plain", "tree"])
def test_steps_can_be_captured(tree: TreeShape) -> None:
    """Nothing in a CUDA graph reads back, and no shape depends on values."""
    draft_model = MODEL.draft_model() if tree.num_tokens else None
    engine = Engine(MODEL, LIMITS, draft_model, tree)
    functions, step = Functions(), engine.step

    def watched(*inputs: torch.Tensor) -> torch.Tensor:
        with functions:
            return step(*inputs)

    engine.step = watched
    engine.serve(JOB.requests(seed=3), lambda done, total: None)
    assert {"linear", "argmax", "__getitem__"} <= functions.names
    refused = "item", "tolist", "nonzero", "masked_select", "unique", "cpu", "cuda", "__bool__"
    assert not functions.names & {*refused, "__int__", "__float__", "__index__"}


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
    shape = TreeShape(topk=2, depth=2, num_tokens=5)
    tree = drafts._likeliest([(scores, tokens, parents)], torch.tensor([3]), shape)
    assert tree.tokens.tolist() == [[3, 10, 11, 12, 15]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 2]]
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert tree.seen.int().tolist() == [rows]


def test_a_prefix_is_found_and_evicted_when_its_room_is_needed() -> None:
    def request(*prompt: int) -> Request:
        return Request(list(prompt), len(prompt), len(prompt) + 4)

    pages, first = Pages(num_pages=6, page_size=2), request(1, 2, 3, 4, 5)
    assert pages.admit(first, 6) and not first.prefix
    first.num_keys, first.num_draft_keys = 5, 3
    pages.share(first)
    # The second page is not whole in the draft model.
    assert [node.tokens for node in first.prefix] == [(1, 2)]
    first.num_draft_keys = 5
    pages.share(first)
    # The last token of a prompt is computed, so that the page that it fills is not taken.
    second = request(1, 2, 3, 4)
    assert pages.admit(second, 4) and second.num_keys == second.num_draft_keys == 2
    assert second.pages[0] == first.pages[0] != second.pages[1]
    assert not pages.admit(request(9, 9), 8)
    pages.release(first)
    assert len(pages.free) == 2 and len(pages.nodes) == 2
    third = request(9, 9)
    assert pages.admit(third, 6) and len(pages.nodes) == 1  # (3, 4) went, (1, 2) is in use
    assert not set(third.pages) & set(second.pages)


def test_a_request_that_can_never_fit_is_named() -> None:
    engine = Engine(MODEL, LIMITS._replace(num_pages=4))
    with pytest.raises(MemoryError, match="34 tokens"):
        engine.serve([Request(list(range(30)), 30, 34)], lambda done, total: None)


def test_it_is_short() -> None:
    """Some 500 lines of code, without imports, docstrings, comments and blank lines."""
    count = 0
    paths = Path(serve.__file__).parent.glob("*.py")
    for path in (x for x in paths if not x.name.startswith(("context_parallel", "ten_minutes"))):
        tree, dropped = ast.parse(path.read_text("utf-8")), set()
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
                dropped |= set(range(node.lineno, node.end_lineno + 1))
        lines = enumerate(path.read_text("utf-8").splitlines(), 1)
        code = [n for n, x in lines if x.strip() and not x.strip().startswith("#")]
        count += len(set(code) - dropped)
    assert 300 < count <= 550


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_the_keys_say_the_same(size: int) -> None:
    def work(group: Group) -> list[list[int]]:
        engine, requests = Engine(MODEL, LIMITS, group=group), JOB.requests(seed=3)
        engine.serve(requests, lambda done, total: None)
        assert num_wrong(requests) == 0
        return answers(requests)

    alone = answers(served()[1])
    # Requests wait for room in other steps, where float32 sums are rounded in another way.
    for found in simulate(size, work):
        assert found == alone


def test_ranks_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--device", "cpu", "--dtype", "float32", "--cp", "2"]) == 0
    assert capsys.readouterr().out.count("2 ranks ") == 1

"""The documents: examples run, links lead somewhere, tables are those of the committed results."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from helpers import translated

from benchmarks import documents, dots, page, readme
from benchmarks.cases import select
from cupyattn.core import env

ROOT = Path(__file__).resolve().parents[2]
README, LADDER = ROOT / "README.md", ROOT / "docs" / "ladder.md"
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = documents.documents()
PROMPTS = next(path.name for path in RESULTS.glob("*-prompts"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TOCTREE = re.compile(r"^:::\{toctree\}\n(.*?)^:::$", re.S | re.M)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def examples() -> list[tuple[str, int, str]]:
    """(document, number, source) of every Python block."""
    found = []
    for path in DOCUMENTS:
        blocks = [text for kind, text in _BLOCK.findall(path.read_text("utf-8")) if kind]
        found += [(name(path), number, text) for number, text in enumerate(blocks, 1)]
    return found


def anchors(path: Path) -> set[str]:
    """What `#...` may name in a document, as GitHub makes it of headings."""
    text = _BLOCK.sub("", path.read_text("utf-8"))
    headings = [re.sub(r"[^\w\- ]", "", x.lower()) for x in re.findall(r"^#+ (.+)$", text, re.M)]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("document", "number", "source"), examples())
def test_examples_run(document: str, number: int, source: str) -> None:
    needs = {"torch": "import torch", "jax": "import jax", "cupy": "from cupyattn import jit"}
    needs["transformers"] = "from transformers"
    for library, needed in needs.items():
        if needed in source and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    exec(compile(source, f"{document}, example {number}", "exec"), {})


def calls() -> list[tuple[str, int, str]]:
    """The examples that call the library with arrays."""
    own = "from cupyattn", "import jax"
    found = [x for x in examples() if "import cupyattn\n" in x[2]]
    return [x for x in found if not any(words in x[2] for words in own)]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(("document", "number", "source"), calls())
def test_examples_run_in_every_framework(
    document: str, number: int, source: str, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if framework == "jax" and "use_cuda_graph=True" in source:
        pytest.skip("JAX arrays cannot be the buffers of a graph")
    if "import torch" in source:
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = translated.Translated(framework)
    monkeypatch.setitem(sys.modules, "cupyattn", module)
    exec(compile(source, f"{document}, example {number}, in {framework}", "exec"), {})
    assert module.num_calls


def test_every_block_is_python_or_indented() -> None:
    kinds = {kind for path in DOCUMENTS for kind, _ in _BLOCK.findall(path.read_text("utf-8"))}
    assert kinds == {"python"}


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 150
    top = "\n".join(lines[:30])
    assert "make demo" in top and "make test" in top


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    links = [x for x in _LINK.findall(path.read_text("utf-8")) if not x.startswith("http")]
    for link in links:
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name(path)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name(path)}: {link}"


def test_the_readme_leads_to_every_document() -> None:
    seen, todo = set(), [README]
    while todo:
        path = todo.pop()
        if path in seen or path.suffix != ".md":
            continue
        seen.add(path)
        text = path.read_text("utf-8")
        links = [x.partition("#")[0] for x in _LINK.findall(text)]
        entries = [x for tree in _TOCTREE.findall(text) for x in tree.split("\n")]
        links += [f"{x.split('<')[-1].rstrip('>')}.md" for x in entries if x and x[0] != ":"]
        todo += [(path.parent / x).resolve() for x in links if x and not x.startswith("http")]
        todo = [x for x in todo if x.exists()]
    assert set(DOCUMENTS) <= seen


def test_an_option_is_added_in_at_most_ten_files() -> None:
    """The list is that of window_right, the last option that was added."""
    text = (ROOT / "kernels" / "README.md").read_text("utf-8")
    section = text.split("## Adding an option\n")[1].split("\n## ")[0]
    steps, _, rest = section.partition("\nTests: ")
    items = re.findall(r"^(\d+)\. ", steps, re.MULTILINE)
    assert items == [str(n + 1) for n in range(len(items))] and len(items) <= 10
    listed = set()
    for name in re.findall(r"`([\w./]+(?:/|\.\w+))`", steps + rest):
        starts = ("", "kernels", "kernels/cupyattn", "cupyattn")
        found = [ROOT / start / name for start in starts if (ROOT / start / name).exists()]
        assert found, f"{name} does not exist"
        listed.add(found[0])
    sources = [*(ROOT / "cupyattn").rglob("*.py"), *(ROOT / "kernels").rglob("*.cu*")]
    naming = {file for file in sources if "window_right" in file.read_text("utf-8")}
    assert naming and naming <= listed, naming - listed


def test_the_setup_page_names_every_variable() -> None:
    text = (ROOT / "docs" / "setup.md").read_text("utf-8")
    rows = re.findall(r"^\| `(CUPYATTN_\w+)` ", text, re.M)
    assert rows == [x.name for x in env.ALL]


def test_tables_and_charts_are_those_of_the_results() -> None:
    for path, text in documents.rendered():
        assert path.read_text("utf-8") == text, f"{name(path)}: run python -m benchmarks.documents"


def test_the_first_block_of_the_readme_imports_what_the_line_above_it_installs() -> None:
    text = README.read_text("utf-8")
    before, first = text.split("```python\n")[:2]
    (line,) = re.findall(r"^ {4}pip install (.*?) *#", before, re.M)
    imported = set(re.findall(r"^import (\w+)", first.split("```")[0], re.M))
    assert imported - {"cupyattn"} <= set(line.split())


# What tables of choices name beside our own functions: other libraries' names, and arguments.
_NOT_OURS = (
    "scaled_dot_product_attention",
    "jax.nn",
    "jax.jit",
    "attn_implementation",
    "q_len_per_req",
)


def test_tables_of_choices_name_functions_that_there_are() -> None:
    section = README.read_text("utf-8").split("## Which function do I call?\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) <= 2 + 8
    page = (ROOT / "docs" / "choose.md").read_text("utf-8").splitlines()
    text = "\n".join([*rows, *(line for line in page if line.startswith("|"))])
    for name in re.findall(r"`((?:[a-zA-Z]\w*\.)*[a-zA-Z]\w*)[(`]", text):
        if not name.startswith(_NOT_OURS):
            *modules, last = name.removeprefix("cupyattn.").split(".")
            module = importlib.import_module(".".join(["cupyattn", *modules]))
            inner = f"{module.__name__}.{last}"
            assert hasattr(module, last) or importlib.util.find_spec(inner), name


def test_rows_of_the_readme_come_from_one_folder_and_say_which_run_it_is() -> None:
    text = README.read_text("utf-8")
    folders = set(re.findall(r"^(20\d\d-\S+)$", text, re.M))
    folders |= set(re.findall(r"<!-- measured (\S+) -->", text))
    (folder,) = folders
    header = json.loads((RESULTS / folder / "results.json").read_text("utf-8"))["header"]
    said = re.search(r"one (NVIDIA [^,]+), (\d{4}-\d\d-\d\d), at commit (\w+)", text)
    facts = header["device"]["name"], header["date"][:10], header["commit"][:8]
    assert said and said.groups() == facts
    assert ", commit ".join([header["date"][:10], header["commit"][:8]]) in (
        ROOT / "docs" / "speed.svg"
    ).read_text("utf-8")


def test_rows_that_the_readme_quotes_are_not_old() -> None:
    """Kernels have changed too often since: measure again (benchmarks/readme.py)."""
    text = README.read_text("utf-8")
    quoted = {x[:8] for x in re.findall(r"\bcommit\s+([0-9a-f]{7,40})\b", text)}
    assert quoted
    ages = {commit: readme.age(commit) for commit in quoted}
    if None in ages.values():
        pytest.skip("this checkout has no history of its commits")
    assert {x: age for x, age in ages.items() if age > readme.MOST_COMMITS} == {}


def test_the_cases_of_the_readme_are_measured_by_its_command() -> None:
    found = select(readme.OPS, list(readme.CASES))
    assert {case.name for case in found} == set(readme.CASES)
    with pytest.raises(SystemExit, match="no_such_run"):
        readme.show("no_such_run")


def test_a_case_that_is_not_in_the_results_is_named() -> None:
    with pytest.raises(SystemExit, match="no_such_case"):
        documents.table(" peers=fa3", f"{PROMPTS}\nno_such_case: nothing\n")


@pytest.mark.parametrize("kind", page.RUNS)
def test_a_run_of_the_page_of_results_is_measured_by_its_command(kind: str) -> None:
    run = page.RUNS[kind]
    cases = {case.name for case in select(run.ops, list(run.cases))}
    assert cases == set(run.cases)
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    (folder,) = set(re.findall(rf"^20\d\d-\d\d-\d\d-\w+-{kind}$", text, re.M))
    shown = json.loads((RESULTS / folder / "results.json").read_text("utf-8"))["cases"]
    assert set(shown) == cases


def test_showing_a_run_changes_the_names_of_its_kind_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "a.md"
    document.write_text("2026-11-01-h100-prompts\n2026-11-01-h100-batches\n")
    monkeypatch.setattr(documents, "documents", lambda: [document])
    monkeypatch.setattr(documents, "main", lambda: 0)
    assert page.main(["--show", PROMPTS]) == 0
    assert document.read_text() == f"{PROMPTS}\n2026-11-01-h100-batches\n"
    with pytest.raises(SystemExit, match="no_such_run"):
        page.main(["--show", "no_such_run"])


def test_a_picture_of_lists_has_a_row_for_each_kind(
    tmp_path: Path,
) -> None:
    rows = [
        {"kind": "v4 decode", "us": {"ours": 10.0, "fa3": 5.0, "gather": 9.0}},
        {"kind": "m3 decode", "us": {"ours": 10.0, "triton": 30.0}},
        {"kind": "m3 decode", "us": {"ours": 10.0}},
    ]
    (tmp_path / "2026-11-28-run").mkdir()
    data = {"card": "A card", "commit": "0123456789", "seed": 3, "rows": rows}
    (tmp_path / "2026-11-28-run" / "rows.json").write_text(json.dumps(data))
    drawn = dots.picture(tmp_path, "2026-11-28-run")
    assert drawn.index("MiniMax-M3, decode") < drawn.index("DeepSeek-V4, decode")
    assert drawn.count("<circle") == 2 and ">3.00×<" in drawn and ">0.50×<" in drawn
    assert ">A card, 2026-11-28, commit 01234567, seed 3<" in drawn


def test_errors_of_ways_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"what": "errors", "inputs": kind, "n": n, "ours head": 1.234 * n, "peer": 2.0}
        for kind in ("normal", "sink")
        for n in (1, 2)
    ]
    rows.insert(1, {"what": "needle", "keys": 1})
    (tmp_path / "run").mkdir()
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "run" / "errors.jsonl").write_text(text)
    monkeypatch.setattr(documents, "RESULTS", tmp_path)
    table = documents.errors("run", "2", "ours head: e4m3\npeer: theirs\n")
    assert table.splitlines() == [
        "| stored as | normal | sink |",
        "| --- | --- | --- |",
        "| e4m3 | 2.47 | 2.47 |",
        "| theirs | 2.00 | 2.00 |",
    ]


def test_a_document_names_every_result_file() -> None:
    notes = sorted(RESULTS.glob("*/README.md"))
    text = "\n".join(path.read_text("utf-8") for path in (*DOCUMENTS, *notes))
    for path in RESULTS.glob("*/*"):
        is_run = path.name in ("results.json", "table.txt")
        wanted = f"{path.parent.name}/table.txt" if is_run else path.name
        assert wanted in text, f"{name(path)}: no document names it"


def test_a_cell_of_the_ladder_has_at_most_25_words() -> None:
    for line in LADDER.read_text("utf-8").splitlines():
        for cell in line.split("|")[1:-1] if line.startswith("|") else ():
            words = re.sub(r"\]\([^)]*\)", "", cell).split()
            assert len(words) <= 25, cell

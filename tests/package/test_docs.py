"""docs/: tables follow from formulas, figures from files; quoted texts, names and signatures are the sources'."""

import ast
import copy
import csv
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fusedcomm import tools
from fusedcomm.bench import results_csv
from fusedcomm.memory.errors import RESET_FIRST, PeerError, PeerMismatchError, PeerTimeoutError
from tests.helpers.problems import OPS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CHANGELOG = ROOT / "CHANGELOG.md"
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
COMMANDS = [path.stem for path in (ROOT / "fusedcomm/tools").glob("*.py") if "def add_parser(" in path.read_text()]
FOLDERS = ("fusedcomm", "kernels", "bench", "tests", "examples", "docs")
PATH = rf"(?:{'|'.join(FOLDERS)})/[\w./-]*|[\w-]+\.(?:py|md|toml|h|cpp)"  # for a file outside of these, the name alone
HOLE = "\0"  # what stands in a text for what varies
DOTS = r"\.\.\.(?!\.)"  # what stands for it in the docs
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def prose(path: Path) -> str:
    return FENCED.sub("", path.read_text())


def name_of(path: Path) -> str:
    return path.stem if path in PAGES else path.name


def table_rows(text: str, first_heading: str) -> Iterator[list[str]]:
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first_heading:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            yield cells


def in_template(quoted: str, template: str) -> bool:
    """Whether a text of the docs, with ... for what varies, is a text of the sources or a part of one."""
    text = with_holes(quoted).strip(HOLE)
    assert len(text.replace(HOLE, "").strip()) >= 8, f"{quoted!r} says too little to be looked for"
    return text in with_holes(template)


@cache
def with_holes(text: str) -> str:
    return re.sub(DOTS, HOLE, text)


def as_template(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def python_templates(tree: ast.AST) -> Iterator[str]:
    """Every string but docstrings, with holes where values are put in."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = None if id(node) in docstrings else as_template(node)
        if text is not None:
            yield text.replace("%s", HOLE)


def cpp_templates(source: str) -> Iterator[str]:
    """The string literals of each statement, joined with a hole for what stands between two."""
    statement = ""
    for token in re.finditer(r'"((?:[^"\\\n]|\\.)*)"|//.*|;|[^\s";]+?', source):
        if token[0] == ";":
            yield statement
            statement = ""
        elif token[1] is not None:
            statement += token[1]
        elif not token[0].startswith("//") and not statement.endswith(HOLE):
            statement += HOLE


def sources() -> list[Path]:
    return [path for folder in ("fusedcomm", "kernels", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]


def native_sources() -> list[Path]:
    return [path for path in sorted((ROOT / "kernels/cpu").iterdir()) if path.suffix in (".h", ".cpp")]


@cache
def templates() -> list[str]:
    found = [text for path in sources() for text in python_templates(parsed(path))]
    return found + [text for path in native_sources() for text in cpp_templates(path.read_text())]


def quoted_texts() -> list[str]:
    cells = [row[0] for row in table_rows(page("troubleshooting"), "text")]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def test_quoted_texts_are_texts_of_the_sources() -> None:
    quoted = quoted_texts()
    assert len(quoted) > 50
    missing = [text for text in quoted if not any(in_template(text, template) for template in templates())]
    assert not missing


def raised_texts(tree: ast.AST) -> Iterator[str]:
    """What a file raises or warns of, where the text stands there."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        warns = isinstance(call.func, ast.Attribute) and call.func.attr in ("warn", "warning")
        refuses = isinstance(call.func, ast.Name) and call.func.id == "refuse"
        text = as_template(call.args[1 if refuses else 0])
        if text is not None and (warns or refuses or isinstance(node, ast.Raise)):
            yield text.replace("%s", HOLE)


def test_every_text_that_is_raised_is_explained() -> None:
    """This holds for what users import. Commands say themselves what is wrong with their arguments."""
    quoted = quoted_texts()
    own = {"bench", "launch", "testing.py", "tools"}
    files = [path for path in sources() if not own & set(path.relative_to(ROOT).parts)]
    raised = {text for path in files for text in raised_texts(parsed(path))}
    assert len(raised) > 50
    unexplained = [text for text in raised if not any(in_template(each, text) for each in quoted)]
    assert not unexplained


@cache
def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(file), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*TEXTS, CHANGELOG], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), anchor


def defined_in(path: Path) -> set[str]:
    """Functions, classes and their members, and constants, dotted; in C++ functions."""
    if path.suffix != ".py":
        return set(re.findall(r"^inline [\w ]*\b(\w+)\(", path.read_text(), re.M))

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else ()
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (prefix + each.id for each in targets if isinstance(each, ast.Name))

    return set(names(parsed(path).body, ""))


def is_public_name(dotted: str) -> bool:
    """Whether the name is ``fusedcomm.x.y``, as users reach it."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for name in parts[split:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@cache
def words() -> set[str]:
    beside = list((ROOT / "tests").rglob("*.py"))
    paths = [*sources(), *native_sources(), *(path for path in beside if path.parent != Path(__file__).parent)]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


def wrong_name(span: str) -> str | None:
    """Why what stands in backticks is not there, or None. What is no name is not looked for."""
    file = re.fullmatch(f"({PATH})(?::([\\w.]+))?", span.replace("<op>", OPS[0]))
    if file is not None:
        path = ROOT / file[1]
        if not path.exists():
            return "no such file"
        if file[2] is not None and file[2] not in defined_in(path):
            return f"{file[1]} defines no {file[2]}"
    elif re.fullmatch(r"fusedcomm(\.\w+)+", span):
        return None if is_public_name(span) else "no such name"
    elif command := re.match(r"fusedcomm ([a-z]+)\b", span):
        if command[1] not in COMMANDS:
            return "no such command"
        files = (f"fusedcomm/tools/{command[1]}.py", *["bench/common.py"] * (command[1] == "bench"))
        text = "".join((ROOT / file).read_text() for file in files)
        options = re.findall(r"(?<=\s)--?[a-z][\w-]*", span.partition(" && ")[0])
        unknown = [option for option in options if f'"{option}"' not in text]
        return f"no option {unknown}" if unknown else None
    elif target := re.match(r"make ([a-z-]+)", span):
        known = re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return None if known else "no such target of make"
    elif re.fullmatch(r"[A-Za-z_]\w{3,}", span) and span not in words():
        return "no such word in the sources"
    return None


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_names_of_files_functions_and_commands_exist(path: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", prose(path))
    wrong = {span: why for span in spans if (why := wrong_name(span))}
    assert not wrong


def test_files_that_the_sources_name_exist() -> None:
    pattern = rf"\b(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|md|h|cpp)\b"
    files = [*sources(), *native_sources(), ROOT / "Makefile"]
    named = {(file, each) for file in files for each in re.findall(pattern, file.read_text())}
    assert len(named) > 10
    assert not [pair for pair in named if not (ROOT / pair[1]).exists()]


def command_lines() -> list[str]:
    """Commands stand in indented blocks; two spaces end one."""
    pattern = r"^    (?:torchrun .* -m )?fusedcomm (.+?)(?:  .*)?$"
    return [line for path in TEXTS for line in re.findall(pattern, path.read_text(), re.M)]


def test_the_readme_shows_every_command_and_targets_of_make_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert sorted(set(re.findall(r"^    fusedcomm (\w+)", readme, re.M))) == sorted(COMMANDS)
    targets = [each for path in TEXTS for each in re.findall(r"^    (make [a-z-]+)", path.read_text(), re.M)]
    assert len(targets) > 5 and not [each for each in targets if wrong_name(each)]


def test_commands_can_be_called_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"fusedcomm.tools.{name}"), "run", lambda args: 0)
    lines = command_lines()
    assert len(lines) >= 5
    for line in lines:
        assert tools.main(line.split()) == 0
    with pytest.raises(SystemExit):
        tools.main([*lines[0].split(), "--nonsense"])


def test_names_that_do_not_exist_are_found() -> None:
    spans = "fusedcomm/nowhere.py,workspace.py,make nonsense,fusedcomm.no_such_op,fusedcomm nonsense"
    more = "fusedcomm/memory/workspace.py:Workspace.nothing,fusedcomm demo --nonsense,no_such_word_anywhere"
    assert [span for span in f"{spans},{more}".split(",") if not wrong_name(span)] == []
    assert wrong_name("fusedcomm/memory/workspace.py:Workspace.fail") is None


@pytest.mark.parametrize("index", ["README", "api/README"])
def test_an_index_names_every_page(index: str) -> None:
    """docs/api/ has an index of its own, which that of docs/ names."""
    folder = (DOCS / f"{index}.md").parent
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", page(index)))
    apart = {"api/README.md"} if index == "README" else set()
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    assert linked == {name for name in pages if not name.startswith("api/")} - {"README.md"} | apart


# figures: bench/results.csv


@cache
def figures() -> list[dict[str, str]]:
    return list(csv.DictReader(results_csv.FILE.open()))


def rows_of(file: str, **fields: str) -> list[dict[str, str]]:
    fields["file"] = file
    return [row for row in figures() if all(row[name] == value for name, value in fields.items())]


def test_the_figures_are_those_of_the_runs() -> None:
    assert results_csv.text() == results_csv.FILE.read_text(), "make results"
    assert len(figures()) > 3000
    assert {row["file"] for row in figures()} == {path.stem for path in results_csv.FOLDER.glob("*.json")}
    assert all(row[name] for row in figures() for name in (*results_csv.FACTS, "figure"))
    assert all(row["value"] or row["ratio"] or row["low"] for row in figures())


def latest(what: str, name: str = "ratio") -> float:
    runs = [f"gpu-h200-2026-11-27{end}" for end in ("-scaled", "")]
    row, *_ = (row for run in runs for row in rows_of(run, what=what, figure=name))
    return float(row["value"] or row["ratio"])


def test_speeds_on_one_gpu() -> None:
    """The row of `use_fast_accum` is from a remark of its file."""
    even = "8192 x 4096 x 4096", "4096 x 4096 x 4096", "2048 x 8192 x 8192"
    odd = "start program, batch 4 of 16", "16384 x 3072 x 1024", "small 1024 x 1024 x 1024", "ragged 8000 x 4104 x 4104"
    recipes = [
        f"scaled/{kind} {even[0]}, {name}" for name in ("TensorWise", "BlockWise1x128") for kind in ("push", "gather")
    ]
    expected = {
        "push over cuBLAS": [f"kernel speed/push {size}" for size in even],
        "push: ": [f"kernel speed/push {size}" for size in odd],
        "gather over cuBLAS": [f"kernel speed/gather {size}" for size in even],
        "gather: ": [f"kernel speed/gather {size}" for size in odd],
        "the same: sums in float32": recipes,
        "pack, unpack": ["kernel speed/pack", "kernel speed/unpack"],
        "reduce of": [f"kernel speed/reduce R={ranks}" for ranks in (2, 4, 8)],
        "mixture of experts": [
            f"moe speed/moe of 8192 tokens: {each} ratio" for each in ("send", "combine", "dispatch")
        ],
        "five ops": [f"op speed/{op}: fused over roof" for op in OPS],
        "the same, `chunked`": [f"op speed/{op}: chunked over roof" for op in OPS],
        "matmul, all_reduce": [f"tail speed/{rows} rows R=2: fused over local" for rows in (1, 16, 64, 256)],
        "start program at": [f"start program/forward: {each} over roof" for each in ("fused", "chunked")],
        "the same: backward": [f"start program/backward: {each} over roof" for each in ("fused", "chunked")],
        "host time of a public call": [f"host time/2 ranks fused: {op}" for op in OPS],
        "the same: `chunked` (torch.mm": [f"host time/2 ranks chunked: {op}" for op in OPS],
    }
    table = list(table_rows(page("benchmark"), "figure"))
    for head, names in expected.items():
        ((_, cell, _),) = (row for row in table if row[0].startswith(head))
        measured = [latest(*each.split(": ")) for each in names]
        if "host time" in names[0]:
            assert cell == f"{min(measured):.0f} to {max(measured):.0f}"
        else:
            assert re.findall(r"\d\.\d\d", cell) == [f"{each:.2f}" for each in measured], head


def python_calls() -> Iterator[tuple[str, ast.arguments]]:
    """Functions of fusedcomm in indented blocks, called or with their whole signature."""
    for path in PAGES:
        pattern = r"^    (fusedcomm(?:\.\w+)+)\(((?:.|\n {8})*?)\)(?:  .*)?$"
        for name, arguments in re.findall(pattern, path.read_text(), re.M):
            function = ast.parse(f"def f({arguments}): ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            yield name, function.args


def defaults_of(arguments: ast.arguments) -> dict[str, Any]:
    """The defaults by the name of each argument, ``empty`` where it has none."""
    positional = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    found = [
        *zip(arguments.args, positional, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {arg.arg: ast.literal_eval(node) if isinstance(node, ast.Constant) else node for arg, node in found}


def test_functions_have_the_arguments_that_are_written() -> None:
    calls = list(python_calls())
    assert len(calls) >= 10
    for name, arguments in calls:
        module, _, function = name.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert defaults_of(arguments).keys() <= parameters.keys(), name
        if arguments.kwonlyargs:
            assert defaults_of(arguments) == {each.name: each.default for each in parameters.values()}, name


# Every error between ranks ends with one line of what to do next.
CHECK, MORE_TIME, POSTMORTEM = "FUSEDCOMM_CHECK=1", "FUSEDCOMM_TIMEOUT_S", "fusedcomm postmortem"


def next_line(kind: type[PeerError], **known: Any) -> str:
    error = kind("what happened", peers=[1], op="op", epoch=2, **known)
    first, last = str(error).splitlines()
    assert first == "what happened" and last == error.next_step and last.startswith("Next: ")
    return last


@pytest.mark.parametrize("folder", [None, "some/place"])
def test_the_last_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, folder: str | None) -> None:
    monkeypatch.delenv("FUSEDCOMM_DUMP_DIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", folder)
    late, differ = next_line(PeerTimeoutError), next_line(PeerMismatchError)
    known, other = next_line(PeerMismatchError, differs="x shape"), next_line(PeerError)
    gone = next_line(PeerTimeoutError, left=True)
    assert [MORE_TIME in line for line in (late, differ, known, other, gone)] == [True, False, False, False, False]
    assert [CHECK in line for line in (late, differ, known, other, gone)] == [False, True, False, False, False]
    assert "make x shape the same" in known and gone == other
    for line in (late, differ, known, other):
        assert f"`{POSTMORTEM} {folder or 'DIR'}`" in line
        assert ("with FUSEDCOMM_DUMP_DIR=DIR" in line) == (folder is None)


def test_copies_say_what_the_rank_that_raised_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", "of this rank")
    error = PeerMismatchError("what happened", peers=[1], op="op", epoch=2, differs="dtype")
    sent = pickle.dumps(error)
    monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", "of another process")
    for each in (pickle.loads(sent), copy.copy(error), error.again()):
        assert type(each) is PeerMismatchError and str(each) == str(error) and each.__dict__ == error.__dict__
        assert each is not error and each.args == ("what happened",) and each.peers is not error.peers
    assert str(error.until_reset()) == f"what happened. {RESET_FIRST}\n{error.next_step}"

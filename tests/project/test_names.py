"""Prose is true: every file, module and symbol that a page, a docstring or a comment names is in the repository."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import import_graph
import pytest
from import_graph import ROOMS, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [path for room in (*ROOMS, "tests") for path in sorted((ROOT / room).rglob("*.py"))]
DATA = [
    path for room in ROOMS for path in sorted((ROOT / room).rglob("*")) if path.suffix in (".json", ".pyi", ".html")
]

_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_TITLES = re.compile(r'title="([^"]+)"')
_FILE = re.compile(r"(?<![\w/.*{<-])(?:\.\./|\./)*((?:[\w-]+/)*[\w-]+\.(?:py|md|sh))\b(?![\w*/]|\.\w)")
_DOTTED = re.compile(
    rf"(?<![\w./-])(?!\w+\.(?:md|py|json|jsonl|toml|html)\b)(?:turngym\.)?(?:{'|'.join(ROOMS)})\.[a-z_]\w*(?:\.\w+)*\b(?![(/]\w)"
)
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
MARKS = ("`", ".py", ".md", ".sh", *(f"{room}." for room in ROOMS))
_SYMBOL = re.compile(r"\w+(\.\w+)*(\(\))?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r"""["']([^"'\s/]+)["']""")
_PARTS = re.compile(
    r'''^\ *"""(?P<said>.*?)""" | (?P<comment>\#[^\n]*)
    | (?P<string>""".*?""" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')''',
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
"""Docstrings, comments, and strings that are neither, in their order. To parse the files takes ten times as long."""

OF_OTHERS = re.compile(
    r"agent_system/.*|search_r1/.*|verl/.*|train_grpo\.sh|setup\.sh|env_manager\.py|memory\.py|openclaw-opd/.*|retrieval_server\.py"
    r"|opd_kl_coef|clip_ratio_c|data\.train_files|force_ascii|AgentLoopBase.run|max_tool_calling_iterations|not_inreceptacle|low_var_kl"
)
"""Files and options of other programs that prose names."""
PATTERNS = {"docs/NAME.md", "my_package", "vX.Y.Z", "step_K_process_I.jsonl", "logp_nK"}
"""Names that stand for many."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a person reads: a page without its code blocks; docstrings and comments of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = _FENCED.sub(lambda found: "\n" * found[0].count("\n"), text)
        yield from enumerate(text.splitlines(), 1)
        return
    for part in _PARTS.finditer(text):
        if (said := part["said"] or part["comment"]) and _may_name(said):
            yield text.count("\n", 0, part.start()) + 1, said


@cache
def code_of(path: Path) -> str:
    """The text of a file of code without docstrings and comments."""
    return _PARTS.sub(lambda part: part["string"] or "", path.read_text(encoding="utf-8")).replace("\\n", " ")


@cache
def files() -> frozenset[str]:
    """Paths of the checkout and their ends (`core/task.py`, `task.py`), and the names of files that code writes."""
    found = {text for path in CODE for text in _STRING.findall(code_of(path))}
    for folder in (*ROOMS, "tests", "docs", "."):
        for path in (ROOT / folder).glob("*" if folder == "." else "**/*"):
            parts = path.relative_to(ROOT).parts
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return frozenset(found)


@cache
def members() -> dict[str, set[str]]:
    """Dotted name -> what it holds: modules of a package, definitions of a module, members of a class."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in import_graph.modules().items():
        parent, _, last = name.rpartition(".")
        found[parent].add(last)
        stub = path.with_suffix(".pyi")
        for source in (path, stub) if stub.exists() else (path,):
            _define(found, name, ast.parse(source.read_text(encoding="utf-8")))
    return found


def _define(found: dict[str, set[str]], name: str, tree: ast.Module | ast.ClassDef) -> None:
    names = found[name]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        if isinstance(node, ast.ClassDef):
            _define(found, f"{name}.{node.name}", node)
            found[f"{name}.{node.name}"] |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


@cache
def vocabulary() -> frozenset[str]:
    """Every identifier of the code, words inside its strings and in data files included; prose left out."""
    found = {path.stem for path in CODE}
    for path in CODE:
        found |= set(_WORD.findall(code_of(path)))
    for path in DATA:
        found |= set(_WORD.findall(path.read_text(encoding="utf-8")))
    for page in PAGES:
        for block in _FENCED.finditer(page.read_text(encoding="utf-8")):
            found |= set(_WORD.findall(block[0]))
    for path in (ROOT / "pyproject.toml", ROOT / "mkdocs.yml", *ROOT.glob(".ci/*")):
        found |= set(_WORD.findall(path.read_text(encoding="utf-8")))
    return frozenset(found)


def exists(dotted: str) -> bool:
    """Whether `turngym.core.task.Task.sha256` or `core.task.Task` leads to something."""
    parts = dotted.removeprefix("turngym.").split(".")
    here = "turngym"
    for place, part in enumerate(parts):
        if part not in members().get(here, ()):
            # inside a name that was imported, or of a value: what it has is not known here
            return place >= 2 and here not in members()
        here = f"{here}.{part}"
    return True


def _may_name(text: str) -> bool:
    """Quicker than the patterns, of which most texts have none."""
    return any(mark in text for mark in MARKS)


def lost(text: str) -> list[str]:
    """What `text` names and is not there."""
    if not _may_name(text):
        return []
    wrong = [name for name in _FILE.findall(text) if name.removeprefix("turngym/") not in files()]
    wrong += [name for name in _DOTTED.findall(text) if not exists(name)]
    for span in _QUOTED.findall(text):
        if _SYMBOL.fullmatch(span) and any(_telling(word) and word not in vocabulary() for word in _WORD.findall(span)):
            wrong.append(span)
    return [name for name in dict.fromkeys(wrong) if name not in PATTERNS and not OF_OTHERS.fullmatch(name)]


def _telling(word: str) -> bool:
    """Whether a word can only be a name of code: it has an inner underscore or a capital after a small letter."""
    return "_" in word.strip("_") or re.search("[a-z][A-Z]", word) is not None


@pytest.mark.parametrize("paths", [PAGES, CODE], ids=["pages", "docstrings and comments"])
def test_what_prose_names_is_there(paths: list[Path]) -> None:
    wrong = []
    for path in paths:
        titles = set(_TITLES.findall(path.read_text(encoding="utf-8")))
        for line, text in prose(path):
            wrong += [f"{path.relative_to(ROOT)}, line {line}: {name}" for name in lost(text) if name not in titles]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`core.protocols.Policy` and turngym.core.task.Task.sha256 in core/task.py", []),
        (
            "`envs.protocols.Policy`, agents.executor.core.Workers",
            ["envs.protocols.Policy", "agents.executor.core.Workers"],
        ),
        ("core.task.Task.sha512", ["core.task.Task.sha512"]),
        ("see `serve/fronts.py`, ../docs/none.md and task.py", ["serve/fronts.py", "docs/none.md"]),
        ("`kd_" + "signals` weighs, `RolloutBatch` packs, `some value` is free", ["kd_" + "signals"]),
        ("`EpisodeFilter.no_" + "such_thing()`", ["EpisodeFilter.no_" + "such_thing()"]),
    ],
)
def test_a_name_that_is_not_there_is_found(text: str, wrong: list[str]) -> None:
    assert lost(text) == wrong

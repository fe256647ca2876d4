"""Every source that a docstring cites is on docs/algorithms.md or docs/contrib_algorithms.md, and every name on these
pages is in the code."""

from __future__ import annotations

import ast
import importlib
import re
import types
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from import_graph import ROOMS, ROOT


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


PAGES = {name: read(ROOT / "docs" / name) for name in ("algorithms.md", "contrib_algorithms.md")}
BOTH = "\n".join(PAGES.values())
BIBLIOGRAPHY = read(ROOT / "docs" / "sources.bib")

KEY = r"\[([a-z][a-z0-9-]*)\]"
CITATION = re.compile(
    r"Source: (?:(?P<works>\[[a-z][a-z0-9-]*\][^;]*); )?"
    r"docs/(?P<page>(?:contrib_)?algorithms\.md)#(?P<section>[a-z0-9-]+)(?=[.,\s(]|$)"
)
NUMBER = re.compile(r"(?:eq\.|section|Algorithm|Table|Option) [0-9A-Z]+(?:\.[0-9]+)*")
FIELDS = ("Paper", "Functions", "Options", "Departs")
"""In this order; the last two are left out where there is nothing to say."""
OUTSIDE = re.compile(r"specification\s+sections?|\bspecs?/|\.\./shared|/work/")
"""Documents that a reader of the repository does not have."""


def numbers(text: str) -> set[tuple[str, str]]:
    """(key, number) of every work in `text`; a work without numbers is (key, "")."""
    parts = re.split(KEY, text)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {(key, number) for key, after in pairs for number in ["", *NUMBER.findall(after)]}


def sections(page: str) -> dict[str, str]:
    """Anchor of each heading of the third level -> its text; as GitHub and MkDocs name anchors."""
    found = re.split(r"^(#{1,3}) (.+)$", page, flags=re.MULTILINE)[1:]
    thirds = [(title, text) for mark, title, text in zip(*[iter(found)] * 3, strict=True) if mark == "###"]
    named = {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"): text for title, text in thirds}
    assert len(named) == len(thirds), "two sections have one anchor"
    return named


def fields(section: str) -> dict[str, str]:
    """`- Name: text` items of a section, lines joined."""
    items = re.findall(r"^- (\w+): (.*?)(?=^- |^\[|\Z|\n\n)", section, flags=re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in items}


def anchor(name: str) -> str:
    """The anchor of an algorithm's row: its name, in letters that an address may have."""
    return name.replace("++", "-pp")


ROW = re.compile(r'^\| <a id="([a-z0-9-]+)"></a>`([a-z0-9+-]+)` \| .+ \| (.+) \|$', flags=re.MULTILINE)
"""A row of the table of algorithms: anchor, name, and the paper in its last cell."""
ALGORITHMS = {place: f"- Paper: {paper}" for place, name, paper in ROW.findall(BOTH) if place == anchor(name)}
EQUATIONS = sections(BOTH)
SECTIONS = {**EQUATIONS, **ALGORITHMS}
ANCHORS = {
    name: {*sections(page), *(place for place, _, _ in ROW.findall(page)), "the-algorithms"}
    for name, page in PAGES.items()
}
DEFINED = dict(re.findall(r"^\[([a-z][a-z0-9-]*)\]: (\S+)$", BOTH, flags=re.MULTILINE))
ENTRIES = {
    key: dict(re.findall(r"^  (\w+) = \{(.*)\},?$", text, flags=re.MULTILINE))
    for key, text in re.findall(r"^@misc\{([a-z0-9-]+),\n(.*?)^\}$", BIBLIOGRAPHY, flags=re.MULTILINE | re.DOTALL)
}


@cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """(place, text) of every docstring of all rooms, those of settings included, spaces joined."""
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(read(path))):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", " ".join(value.value.split())))
    return tuple(found)


def problems(text: str) -> list[str]:
    """What is wrong with the sources that a docstring cites."""
    cited = list(CITATION.finditer(text))
    wrong = [] if len(cited) == text.count("Source:") else ["a source is not of the form that the page defines"]
    for found in cited:
        section, works = found["section"], numbers(found["works"] or "")
        wrong += [f"[{key}] is not in the bibliography" for key, _ in sorted(works) if key not in ENTRIES]
        if section not in ANCHORS[found["page"]]:
            wrong.append(f"{found['page']} has no section #{section}")
            continue
        known = numbers(fields(SECTIONS[section]).get("Paper", ""))
        wrong += [f"#{section} does not cite [{key}] {number}" for key, number in sorted(works - known)]
    return wrong


def test_every_citation_resolves() -> None:
    wrong = [f"{place}: {what}" for place, text in docstrings() for what in problems(text)]
    assert not wrong, "\n".join(wrong)
    cited = {found["section"] for _, text in docstrings() for found in CITATION.finditer(text)}
    assert len(cited) > 40


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Source: [turnopd] Algorithm 1, Table 7; docs/algorithms.md#depth-controller.", ""),
        ("Source: docs/algorithms.md#supervised-tokens. Errors: none.", ""),
        ("Source: [turnopd] Algorithm 1; docs/algorithms.md#depth-control.", "no section #depth-control"),
        ("Source: [turnopd] Algorithm 2; docs/algorithms.md#depth-controller.", "does not cite [turnopd] Algorithm 2"),
        ("Source: [gae] eq. 16; docs/algorithms.md#depth-controller.", "does not cite [gae]"),
        ("Source: [turnpod]; docs/algorithms.md#depth-controller.", "[turnpod] is not in the bibliography"),
        ("Source: TurnOPD Algorithm 1.", "not of the form"),
    ],
)
def test_wrong_citations_are_seen(text: str, wrong: str) -> None:
    found = "; ".join(problems(text))
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_nothing_outside_the_repository_is_cited() -> None:
    wrong = [place for place, text in docstrings() if OUTSIDE.search(text)]
    pages = [path.name for path in (ROOT / "docs").rglob("*.md") if OUTSIDE.search(read(path))]
    assert not wrong
    assert not pages


def test_the_bibliography_is_whole() -> None:
    assert len(ENTRIES) == BIBLIOGRAPHY.count("@misc{") >= 20
    for key, entry in ENTRIES.items():
        assert {"author", "title", "note"} <= set(entry), f"[{key}] lacks author, title, or a note on what was read"
        assert re.fullmatch(r"(?:19|20)\d\d", entry["year"]), key
        assert "url" in entry or "No identifier:" in entry["note"], f"[{key}] lacks a link, or 'No identifier:' and why"
        assert re.search(r"checked|[Ww]ithout|no numbers", entry["note"]), (
            f"[{key}] does not say where its numbers are from"
        )
    assert {key: entry.get("url", "sources.bib") for key, entry in ENTRIES.items()} == DEFINED
    used = {key for text in SECTIONS.values() for key, _ in numbers(fields(text)["Paper"])}
    assert used == set(ENTRIES), "a work is listed that no section cites"


def test_every_section_says_what_it_must() -> None:
    for anchor, section in EQUATIONS.items():
        found = tuple(fields(section))
        assert found == tuple(name for name in FIELDS if name in found), f"#{anchor}: another order"
        assert {"Paper", "Functions"} <= set(found), anchor
    for anchor, section in SECTIONS.items():
        unknown = {key for key, _ in numbers(fields(section)["Paper"])} - set(ENTRIES)
        assert not unknown, f"#{anchor} cites {unknown}"


def test_equations_are_numbered_without_a_gap() -> None:
    each = [
        [int(number) for number in re.findall(r"^    .*\((\d+)\)$", page, flags=re.MULTILINE)]
        for page in PAGES.values()
    ]
    assert all(numbers == sorted(numbers) for numbers in each)
    found = sorted(number for numbers in each for number in numbers)
    assert found == list(range(1, len(found) + 1))
    assert f"(1) to ({found[-1]})" in PAGES["algorithms.md"]
    referred = {int(number) for number in re.findall(r"\((\d\d?)\)", BOTH)}
    assert referred <= set(found)


def test_links_on_the_page_resolve() -> None:
    for name, page in PAGES.items():
        assert set(re.findall(r"\]\(#([a-z0-9-]+)\)", page)) <= ANCHORS[name]
        for other, place in re.findall(r"\]\(((?:contrib_)?algorithms\.md)#([a-z0-9-]+)\)", page):
            assert place in ANCHORS[other]


def named(field: str) -> list[str]:
    """What stands in backquotes in this field of the sections, each once."""
    return sorted(
        {name for text in SECTIONS.values() for name in re.findall(r"`([^`]+)`", fields(text).get(field, ""))}
    )


def test_functions_exist() -> None:
    for name in named("Functions"):
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last, None) or importlib.import_module(name)
        assert getattr(found, "__module__", module) == module, f"{name}: {module} does not define it"


@cache
def train_options() -> dict[str, Any]:
    """`--name` -> type of every option of `turngym train`; `name` where only a file has it."""
    from turngym.core.setting import settings_of
    from turngym.trainers.algorithm_spec import BUILT_IN
    from turngym.trainers.train_config import config_class, option_name

    found: dict[str, Any] = {"--algorithm": Literal[tuple(BUILT_IN)]}
    for algorithm in BUILT_IN:
        cls = config_class(algorithm)
        for path, setting in settings_of(cls).items():
            for name in (option_name(cls, path), path.rpartition(".")[2], path.removeprefix("method.")):
                option = f"--{name.replace('_', '-')}"
                found[option] = found[name] = setting.type
                if setting.type is bool:
                    head, _, last = option.removeprefix("--").rpartition(".")
                    found[f"--{head}{'.' if head else ''}no-{last}"] = bool
    return found


def choices(hint: Any) -> set[str] | None:
    """The words that an option takes; None where it takes others too."""
    if get_origin(hint) in (Union, types.UnionType):
        found = [choices(part) for part in get_args(hint) if part is not type(None)]
        return None if None in found else set().union(*(part for part in found if part is not None))
    return {str(value) for value in get_args(hint)} if get_origin(hint) is Literal else None


def test_options_exist() -> None:
    for words in {*named("Options"), *(name for name in named("Departs") if name.startswith("--"))}:
        # an option as on a command line, or `name = value` as in a file
        name, *values = re.sub(r'[=\[\],"]', " ", words).split()
        assert name in train_options(), f"{name} is no option of turngym train"
        allowed = choices(train_options()[name])
        assert allowed is None or set(values) <= allowed, f"{words}: {name} takes {sorted(allowed or ())}"


def algorithm_files() -> list[Path]:
    files = sorted(path for folder in ("algorithms", "contrib") for path in (ROOT / "trainers" / folder).glob("*.py"))
    return [path for path in files if any(_builds(node) for node in ast.parse(read(path)).body)]


def _builds(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "build"


COMPOSE = ("Algorithm", "privileged_group", "combination")
"""What puts an algorithm together: the class, and what methods of `contrib` share."""


def names(path: Path) -> set[str]:
    """What the algorithms that a file builds are called: the constants given as `Algorithm(name=...)`."""
    given = [
        keyword.value
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COMPOSE
        for keyword in node.keywords
        if keyword.arg == "name"
    ]
    return {
        part.value
        for value in given
        for part in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])
        if isinstance(part, ast.Constant)
    }


def test_every_algorithm_has_its_row() -> None:
    found = {anchor(name): path for path in algorithm_files() for name in names(path)}
    assert len(found) >= 12
    assert set(ALGORITHMS) == set(found)
    for name, path in found.items():
        page = "contrib_algorithms.md" if path.parent.name == "contrib" else "algorithms.md"
        assert f"docs/{page}#{name}" in read(path), f"{path.name} does not cite #{name}"

"""The import graph of the rooms, read from the syntax trees: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "envs", "agents", "trainers", "retrieval", "scripts")
Graph = Mapping[str, frozenset[str]]


@cache
def modules() -> Mapping[str, Path]:
    """Full name -> file, of every module and package of the rooms."""
    paths = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("turngym", *parts)).removesuffix(".__init__")
            if not name.startswith("turngym.scripts.turngym"):  # the root package: `turngym` itself
                paths[name] = path
    return paths


@cache
def statements(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """(line, full name, late) of every import; late: inside a function, a class or an `if`."""
    return tuple(_statements(path))


def _statements(path: Path) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) not in top
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: relative import; write turngym.<room>.<module>"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", id(node) not in top


def target(name: str) -> str | None:
    """The module of the rooms that importing `name` loads (`turngym.a.b.Thing` loads `turngym.a.b`), if any."""
    parent = name.rpartition(".")[0]
    return name if name in modules() else parent if parent in modules() else None


@cache
def graph() -> Graph:
    """module -> modules that it imports, late and type-checking imports included; packages' own files left out."""
    edges = {}
    for name, path in modules().items():
        targets = {target(imported) for _, imported, _ in statements(path)} - {None, name}
        edges[name] = frozenset(other for other in targets if other and modules()[other].name != "__init__.py")
    return edges


def reached(edges: Graph, start: str) -> set[str]:
    """The modules that `start` imports, directly or not; itself where they lead back to it."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = edges.get(waiting.pop(), frozenset()) - seen
        seen |= fresh
        waiting += fresh
    return seen


def circles(edges: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or around corners (strongly connected components)."""
    below = {name: reached(edges, name) for name in edges}
    groups = {
        tuple(sorted({name} | {other for other in below[name] if name in below.get(other, ())}))
        for name in edges
        if name in below[name]
    }
    return [list(group) for group in sorted(groups)]


def folders(edges: Graph) -> Graph:
    """The graph of folders: an edge wherever a file of one imports a file of another."""
    edges_of: dict[str, set[str]] = {}
    for name, targets in edges.items():
        here = str(modules()[name].parent)
        edges_of.setdefault(here, set()).update(str(modules()[other].parent) for other in targets)
    return {here: frozenset(others - {here}) for here, others in edges_of.items()}


def longest_chain(edges: Graph) -> list[str]:
    """The longest path in a graph without circles."""

    @cache
    def chain(name: str) -> tuple[str, ...]:
        below = [chain(other) for other in edges.get(name, ())]
        return (name, *max(below, key=len, default=()))

    return list(max((chain(name) for name in edges), key=len))


@cache
def loaded(name: str) -> frozenset[str]:
    """The modules of the rooms that are loaded when `name` is imported, itself included."""
    seen, waiting = {name}, [name]
    while waiting:
        targets = {target(imported) for _, imported, late in statements(modules()[waiting.pop()]) if not late}
        fresh = {module for module in targets if module is not None} - seen
        seen |= fresh
        waiting += fresh
    return frozenset(seen)


@cache
def foreign(name: str) -> frozenset[str]:
    """Top-level names of the packages that are loaded when `name` is imported, through the rooms' own modules too."""
    return frozenset(
        imported.partition(".")[0]
        for module in loaded(name)
        for _, imported, late in statements(modules()[module])
        if not late and target(imported) is None
    )


def classes(name: str) -> int:
    """Number of classes in the modules that are loaded when `name` is imported: what a reader must hold."""
    trees = (ast.parse(modules()[module].read_text(encoding="utf-8")) for module in loaded(name))
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))

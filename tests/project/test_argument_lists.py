"""An `Args:` list names parameters that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import import_graph
import pytest
from import_graph import ROOMS, ROOT

LIST = re.compile(r"^Args:\n((?: .*\n?|\n(?= ))+)", re.MULTILINE)
NAME = re.compile(r"^    \*{0,2}(\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented(node: ast.AST) -> Iterator[tuple[str, str, Function]]:
    """(name, docstring, signature) of what is called below `node`: a public class by its `__init__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            made = next((one for one in child.body if isinstance(one, Function) and one.name == "__init__"), None)
            if made is not None:
                yield child.name, "\n".join(ast.get_docstring(one) or "" for one in (child, made)), made
            yield from documented(child)
        elif isinstance(child, Function) and child.name != "__init__":
            yield child.name, ast.get_docstring(child) or "", child


def wrong(code: str) -> list[str]:
    """What lists in `code` name that is no parameter."""
    found = []
    for name, text, function in documented(ast.parse(code)):
        there = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        names = [
            one.lstrip("*")
            for listed in LIST.findall(text)
            for line in NAME.findall(listed)
            for one in line.split(", ")
        ]
        found += [f"{name}: {one}" for one in names if one not in there]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_lists_name_what_there_is(room: str) -> None:
    paths = [path for path in import_graph.modules().values() if path.is_relative_to(ROOT / room)]
    assert paths
    assert [(path.name, one) for path in paths for one in wrong(path.read_text(encoding="utf-8"))] == []


def test_what_is_wrong_is_found() -> None:
    code = 'def f(a, b, *rest, c=0):\n    """Do.\n\n    Args:\n{}    """\n'
    assert wrong(code.format("        a: one.\n        *rest: more.\n        b, c: two.\n")) == []
    assert wrong(code.format("        a: one.\n            still: a.\n")) == []
    assert wrong(code.format("        a: one.\n        d: two.\n")) == ["f: d"]
    assert wrong('class C:\n    """It.\n\n    Args:\n        x: one.\n    """\n    def __init__(self, y): ...\n') == [
        "C: x"
    ]

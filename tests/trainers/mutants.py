"""Every small way to break a formula: a function's source, each time with one change, as code that can stand in."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"maximum": "minimum", "max": "min", "min": "max", "any": "all", "all": "any", "mean": "sum", "sum": "mean"}
DROPPED = ("clamp", "detach", "exp", "expm1", "log", "log_softmax", "square", "nan_to_num", "float", "abs")
"""Methods whose call is left out: x.clamp(...) becomes x."""

Change = Callable[[Any], ast.AST]


def mutants(function: Callable[..., Any]) -> Iterator[tuple[str, CodeType]]:
    """(what was changed, the code) of every mutant of `function`; error messages and docstrings stay as they are."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    seen: dict[str, int] = {}
    for place, node in enumerate(_nodes(tree)):
        for change in _changes(node):
            broken = copy.deepcopy(tree)
            target = list(_nodes(broken))[place]
            new = change(target)
            before, after = ast.unparse(node), ast.unparse(new)
            _Replace(target, new).visit(broken)
            name = f"{function.__qualname__}: {before} -> {after}"
            seen[name] = seen.get(name, 0) + 1
            yield name + (f" ({seen[name]})" if seen[name] > 1 else ""), _compiled(broken, function)


def _nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """What may be changed, in a fixed order."""
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    stack: list[ast.AST] = list(reversed(definition.body))
    while stack:
        node = stack.pop()
        says = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if says or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        yield node
        stack += reversed(list(ast.iter_child_nodes(node)))


def _changes(node: ast.AST) -> list[Change]:
    match node:
        case ast.BinOp(op=op) if type(op) in SWAPS:
            return [_operator, _operands] if isinstance(op, ast.Sub | ast.Div) else [_operator]
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            return [_comparison]
        case ast.BoolOp():
            return [_operator]
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            return [lambda found: found.operand]
        case ast.Call(func=ast.Attribute(attr=name)) if name in DROPPED:
            return [lambda found: found.func.value]
        case ast.Attribute(attr=name) if name in NAMES:
            return [_renamed]
        case ast.Name(id="max" | "min"):
            return [lambda found: ast.Name(id=NAMES[found.id], ctx=found.ctx)]
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return [lambda found: ast.Constant(value=found.value + 1)]
        case ast.IfExp():
            return [lambda found: ast.IfExp(test=found.test, body=found.orelse, orelse=found.body)]
        case _:
            return []


def _operator(node: Any) -> ast.AST:
    node = copy.copy(node)
    node.op = SWAPS[type(node.op)]()
    return node  # type: ignore[no-any-return]


def _operands(node: Any) -> ast.AST:
    return ast.BinOp(left=node.right, op=node.op, right=node.left)


def _comparison(node: Any) -> ast.AST:
    return ast.Compare(left=node.left, ops=[SWAPS[type(node.ops[0])]()], comparators=node.comparators)


def _renamed(node: Any) -> ast.AST:
    return ast.Attribute(value=node.value, attr=NAMES[node.attr], ctx=node.ctx)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _compiled(tree: ast.Module, function: Callable[..., Any]) -> CodeType:
    space: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec")
    exec(code, dict(function.__globals__), space)
    made: CodeType = inspect.unwrap(space[function.__name__]).__code__
    return made

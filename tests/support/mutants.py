"""Every small way to break a formula: a function's source, each time with one change, as code that can stand in."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import itertools
import re
import signal
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

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
TWINS = {
    "logp_n": "sampled_logp_n",
    "sampled_logp_n": "logp_n",
    "reference_logp_n": "behavior_logp_n",
    "teacher": "reference",
    "reference": "teacher",
    "student": "teacher",
    "reward_E": "success_E",
    "success_E": "truncated_E",
    "truncated_E": "success_E",
    "short_E": "truncated_E",
    "episode_return": "score",
    "score": "episode_return",
    "row_N": "episode_N",
    "label_N": "predictor_N",
    "tokens": "rows",
    "response_span": "prompt_span",
    "response_length": "begun",
    "begun": "index",
    "advantage_N": "return_N",
    "return_N": "value_N",
    "value_N": "return_N",
    "survivors_T": "tokens_T",
}
"""Fields that are easily mistaken for one another; tests whose inputs give both the same value cannot tell."""
COLUMNS = ("group_E", "episode_N", "turn_N", "off_policy_N", "source_E")
"""Columns of a batch of which a test may have one value only: the mutant has zeros."""
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
        # `zip(..., strict=True)` says what holds in any case
        strict = isinstance(node, ast.keyword) and node.arg == "strict"
        if says or strict or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        yield node
        # annotations are not evaluated
        inside = [*node.args.defaults, *node.body] if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
        stack += reversed(list(inside))


def _changes(node: ast.AST) -> list[Change]:
    match node:
        case ast.BinOp(op=op) if type(op) in SWAPS:
            return [_operator, _operands] if isinstance(op, ast.Sub | ast.Div) else [_operator]
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            return [_comparison]
        case ast.BoolOp():
            return [_operator]
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            return [lambda node: node.operand]
        case ast.Call(func=ast.Attribute(attr=name)) if name in DROPPED:
            return [lambda node: node.func.value]
        case ast.Attribute(attr=name) if name in NAMES:
            return [_renamed]
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in TWINS:
            return [_twin]
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in COLUMNS:
            return [lambda node: ast.BinOp(left=node, op=ast.Mult(), right=ast.Constant(value=0))]
        case ast.Name(id="max" | "min"):
            return [lambda node: ast.Name(id=NAMES[node.id], ctx=node.ctx)]
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return [lambda node: ast.Constant(value=node.value + 1)]
        case ast.Constant(value=True | False as value):
            return [lambda node: ast.Constant(value=not node.value)]
        case ast.IfExp():
            return [lambda node: ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)]
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call()):
            return [_other_branch]
        case ast.Constant(value=str(value)):
            return [lambda node: ast.Constant(value=f"{value}_")]
        case ast.Call() if not _symmetric(node.func):
            return [*_exchanges(node)]
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


def _other_branch(node: Any) -> ast.AST:
    return ast.If(test=ast.UnaryOp(op=ast.Not(), operand=node.test), body=node.body, orelse=node.orelse)


def _symmetric(function: ast.AST) -> bool:
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name in ("max", "min", "maximum", "minimum", "isinstance", "logaddexp", "array_equal")


def _exchanges(call: ast.Call) -> Iterator[Change]:
    """Two arguments that stand side by side, positional or by keyword, change places."""
    # the middle one of three numbers is the same one, whichever comes first
    start = 1 if getattr(call.func, "attr", "") == "clip" else 0
    if not any(isinstance(part, ast.Starred) for part in call.args):
        pairs = enumerate(itertools.pairwise(call.args))
        yield from (partial(_exchanged, first=first) for first, pair in pairs if first >= start and _differ(*pair))
    named = enumerate(itertools.pairwise(call.keywords))
    for first, (left, right) in named:
        if left.arg is not None and right.arg is not None and _differ(left.value, right.value):
            yield partial(_exchanged_values, first=first)


def _differ(left: ast.AST, right: ast.AST) -> bool:
    return ast.unparse(left) != ast.unparse(right)


def _exchanged(node: Any, first: int) -> ast.AST:
    args = list(node.args)
    args[first], args[first + 1] = args[first + 1], args[first]
    return ast.Call(func=node.func, args=args, keywords=node.keywords)


def _exchanged_values(node: Any, first: int) -> ast.AST:
    keywords = list(node.keywords)
    left, right = keywords[first], keywords[first + 1]
    keywords[first] = ast.keyword(arg=left.arg, value=right.value)
    keywords[first + 1] = ast.keyword(arg=right.arg, value=left.value)
    return ast.Call(func=node.func, args=node.args, keywords=keywords)


def _renamed(node: Any) -> ast.AST:
    return ast.Attribute(value=node.value, attr=NAMES[node.attr], ctx=node.ctx)


def _twin(node: Any) -> ast.AST:
    return ast.Attribute(value=node.value, attr=TWINS[node.attr], ctx=node.ctx)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _compiled(tree: ast.Module, function: Callable[..., Any]) -> CodeType:
    space: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec")
    exec(code, dict(function.__globals__), space)
    mutant = space[function.__name__]
    broken: CodeType = inspect.unwrap(getattr(mutant, "fget", mutant)).__code__
    return broken


def literal_tests(file: str, request: pytest.FixtureRequest, without: str = "$^") -> list[Callable[[], None]]:
    """The tests of `file` that draw nothing, ready to be called; not those whose name matches `without`."""
    calls = []
    module = importlib.import_module(f"test_{file}")
    for name, test in vars(module).items():
        literal = inspect.isfunction(test) and not hasattr(test, "hypothesis")
        if name.startswith("test_") and literal and not re.search(without, name):
            fixtures = {part: _fixture(part, module, request) for part in _fixtures(test) - {"tmp_path"}}
            for given in _parameters(test):
                calls.append(_in_new_folder(partial(test, **fixtures, **given), request))
    return calls


def _in_new_folder(test: partial[None], request: pytest.FixtureRequest) -> Callable[[], None]:
    """What one call leaves on disk would make every later one fail, so that every mutant looked noticed."""
    if "tmp_path" not in _fixtures(test.func):
        return test
    folders = request.getfixturevalue("tmp_path_factory")
    return lambda: test(tmp_path=folders.mktemp("mutant"))


def _fixture(name: str, module: ModuleType, request: pytest.FixtureRequest) -> Any:
    """The value of a fixture: of the test's own file, which pytest does not offer to another one, or shared."""
    if name not in vars(module):
        return request.getfixturevalue(name)
    make = inspect.unwrap(vars(module)[name])
    return make(**{part: _fixture(part, module, request) for part in inspect.signature(make).parameters})


def _fixtures(test: Callable[..., None]) -> set[str]:
    given = next(_parameters(test))
    return {name for name in inspect.signature(test).parameters if name not in given}


def _parameters(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for row in itertools.product(*(mark.args[1] for mark in marks)):
        given: dict[str, Any] = {}
        for mark, values in zip(marks, row, strict=True):
            names = mark.args[0]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            given |= dict(zip(names, values if len(names) > 1 else (values,), strict=True))
        yield given


PATIENCE = 5.0
"""CPU seconds for all tests of one mutant beyond what they need without one: a mutant may loop for ever."""


def survives(tests: list[Callable[[], None]], seconds: float) -> bool:
    """Whether all `tests` pass within `seconds` of CPU time. The one that fails becomes the first: it is likely to
    notice the next mutant, too."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    passed = 0
    try:
        for test in tests:
            test()
            passed += 1
    except KeyboardInterrupt:
        raise
    except BaseException:  # a failed `pytest.raises` is no Exception
        tests.insert(0, tests.pop(passed))
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return True


def _too_long(*_: object) -> None:
    raise TimeoutError("the mutant does not end")


def survivors(
    functions: Iterable[Callable[..., Any]], tests: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The mutants of `functions` that all `tests` let pass; the tests must pass without any."""
    start = time.process_time()
    for test in tests:
        test()
    seconds = PATIENCE + 2 * (time.process_time() - start)
    alive = []
    for function in functions:
        for name, code in mutants(function):
            # every importer shares the function object, so the code is what must change
            with monkeypatch.context() as patch:
                patch.setattr(function, "__code__", code)
                if survives(tests, seconds):
                    alive.append(name)
    return alive


def assert_noticed(
    functions: Iterable[Callable[..., Any]],
    tests: list[Callable[[], None]],
    same: Mapping[str, tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every mutant of `functions` fails one of `tests`, but for as many of a function as `same` says, which compute
    the same: its name, their number and why. The name of its module stands before it where several have one of that
    name."""
    functions = list(functions)
    alive = survivors(functions, tests, monkeypatch)
    wrong = []
    places = {function.__qualname__: function.__module__.rpartition(".")[2] for function in functions}
    for name, module in places.items():
        surviving = [mutant for mutant in alive if mutant.startswith(f"{name}: ")]
        known = same.get(f"{module}.{name}") or same.get(name)
        count, why = known or (0, "none is known to compute the same")
        if len(surviving) != count:
            wrong += [f"{name}: {len(surviving)} survive, not {count} ({why})", *surviving]
    assert not wrong, "\n".join(wrong)


def functions(module: ModuleType) -> list[Callable[..., Any]]:
    """Every function, method and property that is written in `module`."""
    written: list[Callable[..., Any]] = []
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__:
            members = vars(value).values() if inspect.isclass(value) else (value,)
            plain = (inspect.unwrap(getattr(member, "fget", None) or member) for member in members)
            written += [member for member in plain if isinstance(member, FunctionType) and _written(member, module)]
    return written


def _written(function: FunctionType, module: ModuleType) -> bool:
    """Not made by `dataclass`, nor a protocol's empty method."""
    if function.__code__.co_filename != module.__file__:
        return False
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    return not all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in definition.body)

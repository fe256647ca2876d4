"""Every wait in the tree has a limit, or a comment that says why it ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import import_graph
import pytest
from import_graph import ROOT

REASON = re.compile(r"#.*\bends: \S")
"""In a comment on a line of the wait, or on the one above its statement."""
BARE = {"wait", "join", "acquire", "get", "result", "exception", "communicate", "accept"}
"""Methods that wait for ever when they are called with nothing."""
ALWAYS = {"recv", "recv_bytes", "recv_into", "recvfrom", "flock", "lockf", "waitpid"}
"""Functions that take no limit."""
COMMANDS = {"run", "call", "check_call", "check_output", "urlopen", "create_connection"}
"""What `subprocess` and others take a limit for, by name."""


def waits(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """(first, last) line of every statement's part that waits without a limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            # its end waits for the threads
            yield from (
                (node.lineno, item.context_expr.lineno)
                for item in node.items
                if ast.unparse(item.context_expr).split("(")[0].endswith("PoolExecutor")
            )
        if isinstance(node, ast.Call) and _endless(node):
            yield node.lineno, node.end_lineno or node.lineno


def _endless(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if isinstance(call.func, ast.Attribute):
        name = call.func.attr
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if any(_none(value) for key, value in named.items() if key == "timeout"):
        return True
    if "timeout" in named or None in named:
        return False
    if name in COMMANDS:
        return owner in ("subprocess", "socket", "request", "urllib.request") and len(call.args) < 3
    if name in ALWAYS:
        words = " ".join(map(ast.unparse, call.args))
        return isinstance(call.func, ast.Attribute) and not any(
            one in words for one in ("DONTWAIT", "LOCK_NB", "LOCK_UN")
        )
    if name == "wait_for":
        return len(call.args) < 2 or _none(call.args[1])
    if name == "shutdown":
        return "wait" in named and ast.unparse(named["wait"]) == "True"
    if name == "poll":
        return bool(call.args) and _none(call.args[0])
    if name in BARE and isinstance(call.func, ast.Attribute):
        if call.args:
            return name == "wait" and _none(call.args[-1])
        return ast.unparse(named.get("blocking", ast.Constant(True))) != "False"
    return False


def _none(value: ast.expr) -> bool:
    """Whether a limit is None, or may be by its own expression."""
    if isinstance(value, ast.IfExp):
        return _none(value.body) or _none(value.orelse)
    return isinstance(value, ast.Constant) and value.value is None


def problems(code: str) -> list[int]:
    """Lines of the waits in `code` that have neither a limit nor a reason."""
    lines, tree = code.splitlines(), ast.parse(code)
    begins = {
        line: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = []
    for first, last in waits(tree):
        # the innermost statement is visited last
        near = range(min(begins[first], first) - 1, last + 1)
        if not any(REASON.search(lines[number - 1]) for number in near if number > 0):
            found.append(first)
    return found


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("thread.join()", True),
        ("', '.join(words)", False),
        ("thread.join(5.0)", False),
        ("future.result()", True),
        ("future.result(left)", False),
        ("changed.wait(None if wait is None else 0.5)", True),
        ("changed.wait_for(lambda: done)", True),
        ("changed.wait_for(lambda: done, 3.0)", False),
        ("changed.wait_for(lambda: done, timeout=None)", True),
        ("queue.get()", True),
        ("mapping.get('a')", False),
        ("lock.acquire(blocking=False)", False),
        ("lock.acquire()", True),
        ("kind, value = pipe.recv()", True),
        ("pipe.recv_bytes(1)", True),
        ("sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)", False),
        ("while pipe.poll(None if idle else 0.0): pass", True),
        ("process.poll()", False),
        ("fcntl.flock(file, fcntl.LOCK_EX)", True),
        ("fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", False),
        ("subprocess.run(words, check=True)", True),
        ("subprocess.run(words, timeout=60)", False),
        ("loop.run(work)", False),
        ("pool.shutdown(wait=True)", True),
        ("with ThreadPoolExecutor(1) as pool: pass", True),
        ("# ends: it is done\nfuture.result()", False),
        ("future.result()  # ends: it is done", False),
        ("# it blocks; ends: it is done\nfuture.result()", False),
        ("# ends:\nfuture.result()", True),
        ("'ends: in a text'\nfuture.result()", True),
        ("# ends: too far away\n\nfuture.result()", True),
        ("# ends: it is done\nfound = [\n    future.result()\n    for future in done\n]", False),
        ("# ends: not the second\na.join()\nb.join()", True),
    ],
)
def test_what_counts_as_a_wait_without_a_limit(code: str, wrong: bool) -> None:
    assert bool(problems(code)) is wrong


def test_every_wait_has_a_limit_or_a_reason() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}, line {line}: a limit, or a comment `# ends: ...`"
        for path in import_graph.modules().values()
        for line in problems(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)

"""Who may import whom: the floors of the design, read from the syntax trees of all modules."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator

import import_graph
import pytest
from import_graph import ROOMS, ROOT

FLOORS = ("core", "retrieval", "envs", "agents", "trainers", "scripts")
"""From the lowest to the highest; a room imports itself and lower ones."""
LONGEST_CHAIN = 20
"""Files in the longest chain of imports, package files left out."""
ENV_PACKAGES = ("alfworld", "webshop", "search")
ENVS_MAY_USE = {"numpy", "gymnasium", "lazy_loader", "msgspec", "rich"}
PART_MAY_USE = {
    "alfworld": {"textworld", "alfworld"},
    "webshop": {"cachetools", "rapidfuzz", "spacy", "flask"},
    "search": {"cachetools", "pyarrow"},
    "visitors": {"flask"},
}
"""What a single environment, or a file, may import besides: small libraries, or extras where they are asked for."""
CORE_MAY_USE = {"cloudpickle", "filelock", "httpx", "huggingface_hub", "lazy_loader", "msgspec", "numpy", "rich"}
RETRIEVAL_MAY_USE = {
    "cloudpickle",
    "cachetools",
    "lazy_loader",
    "msgspec",
    "numpy",
    "regex",
    "faiss",
    "torch",
    "transformers",
    "flask",
    "httpx",
    "huggingface_hub",
    "rich",
}


def room_of(name: str) -> tuple[str, str]:
    """(room, module or package in it) of a `turngym.` name."""
    parts = [*name.split("."), "", ""]
    return parts[1], parts[2]


def problem(room: str, part: str, name: str) -> str | None:
    """Why `room` (in its module or package `part`) may not import `name`; None if it may."""
    top = name.partition(".")[0]
    if top in ROOMS or top == "tests":
        return f"bare import; write turngym.{name}"
    if top != "turngym":
        return _foreign(room, part, top)
    other, inside = room_of(name)
    if not other or other == "__version__":
        return None  # the root package holds nothing but the version
    if other not in ROOMS:
        return "there is no such room"
    if FLOORS.index(other) > FLOORS.index(room):
        return f"{room} is below {other}"
    if room == "envs" and other == "retrieval":
        return None if part in (*ENV_PACKAGES, "panels") else "only environments and panels need it"
    if room == "envs" and inside in ENV_PACKAGES and part != inside:
        return f"envs.{part} may not know the environment {inside}"
    return None


def _foreign(room: str, part: str, top: str) -> str | None:
    if top in sys.stdlib_module_names or room not in ("core", "envs", "retrieval"):
        return None
    if room != "envs":
        allowed = CORE_MAY_USE if room == "core" else RETRIEVAL_MAY_USE
        return None if top in allowed else f"{room} may only import {', '.join(sorted(allowed))}"
    if top in ENVS_MAY_USE or top in PART_MAY_USE.get(part, ()):
        return None
    return f"envs may only import the standard library, {', '.join(sorted(ENVS_MAY_USE))}"


@pytest.mark.parametrize("room", ROOMS)
def test_floors(room: str) -> None:
    wrong, seen = [], 0
    for module, path in import_graph.modules().items():
        if not f"{module}.".startswith(f"turngym.{room}."):
            continue
        part = room_of(module)[1] if len(path.relative_to(ROOT).parts) > 1 else ""
        for line, name, _ in import_graph.statements(path):
            seen += 1
            reason = problem(room, part, name)
            if reason is not None:
                wrong.append(f"{path.relative_to(ROOT)}, line {line}: {name}: {reason}")
    assert not wrong, "\n".join(wrong)
    assert seen > 50


def unbounded_json(tree: ast.AST) -> Iterator[int]:
    """Lines of a `json.loads` that says "RecursionError" to whoever nests deep enough."""
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try | ast.With)
        and "RecursionError"
        in " ".join(
            ast.unparse(one)
            for one in ([h.type for h in node.handlers if h.type] if isinstance(node, ast.Try) else node.items)
        )
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load") and node not in guarded:
            given = ast.unparse(node.args[0])
            # what this process has written, and data that comes along
            if not given.startswith(("json.dumps(", "result.lines()", "pipe.", "_data_file(")) and "data" not in given:
                yield node.lineno


def test_json_of_strangers_is_read_where_nesting_is_no_surprise() -> None:
    """`turngym.core.user_files.json_of` and `json_file` say ValueError; a stranger's file is no traceback."""
    assert list(unbounded_json(ast.parse("json.loads(text)"))) == [1]
    assert not list(unbounded_json(ast.parse("try: json.loads(text)\nexcept (ValueError, RecursionError): pass")))
    assert list(unbounded_json(ast.parse("try: json.loads(text)\nexcept ValueError: pass"))) == [1]
    wrong = [
        f"{path.relative_to(ROOT)}, line {line}"
        for module, path in import_graph.modules().items()
        if not module.startswith(("turngym.scripts.boot", "turngym.scripts.bench"))
        if "json.load" in (text := path.read_text(encoding="utf-8"))
        for line in unbounded_json(ast.parse(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_around_corners() -> None:
    """Late and type-checking imports count: a circle that hides in a function is still one."""
    found = import_graph.circles(import_graph.graph())
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_no_folders_import_each_other_in_a_ring() -> None:
    assert import_graph.circles(import_graph.folders(import_graph.graph())) == []


def test_the_longest_chain_of_imports_is_bounded() -> None:
    chain = import_graph.longest_chain(import_graph.graph())
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)
    assert import_graph.longest_chain({"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset[str]()}) == [
        "a",
        "b",
        "c",
    ]


CONTRIB = "turngym.trainers.contrib"


def test_nothing_imports_contrib() -> None:
    """The core does without it: a name on the command line is looked up as another package's is."""
    wrong = [
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for module, path in import_graph.modules().items()
        if not module.startswith(CONTRIB)
        for line, name, _ in import_graph.statements(path)
        if name.startswith(CONTRIB)
    ]
    assert not wrong, "\n".join(wrong)


def test_contrib_uses_what_is_documented() -> None:
    """Its methods are the proof that a package of other people's can do the same: public names that
    docs/write_an_algorithm.md says, and nothing else of ours."""
    page = (ROOT / "docs" / "write_an_algorithm.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`(\w+)`", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)))
    public = {
        f"turngym.{room}.{alias.name}"
        for room in ("core", "envs", "agents", "trainers")
        for node in ast.parse((ROOT / room / "__init__.pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    wrong, seen = [], 0
    for module, path in import_graph.modules().items():
        for line, name, _ in import_graph.statements(path) if module.startswith(CONTRIB) else ():
            if name.startswith("turngym.") and not name.startswith(f"{CONTRIB}."):
                seen += 1
                if name not in public or name.rpartition(".")[2] not in said:
                    wrong.append(f"{path.relative_to(ROOT)}, line {line}: {name}")
    assert not wrong, "\n".join(wrong)
    assert seen > 50


def test_late_imports_spare_something() -> None:
    """Below the verbs a module of ours is imported late where that keeps it, or a package that may be missing, from
    being loaded with the file.

    The embedded worlds are an exception: naming one should not load the generators of all three environments.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[^\w-]", needed)[0] for needed in project["dependencies"]}
    wrong = []
    for module, path in import_graph.modules().items():
        for line, name, late in import_graph.statements(path):
            target = import_graph.target(name)
            if late and target is not None and not module.startswith(("turngym.scripts", "turngym.agents.worlds")):
                brings = import_graph.foreign(target) - import_graph.foreign(module) - base - sys.stdlib_module_names
                if not brings and target in import_graph.loaded(module):
                    wrong.append(f"{path.relative_to(ROOT)}, line {line}: {name}: import it at the top")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["turngym.trainers.train_config", "turngym.agents.evaluation.evaluate"])
def test_a_reader_must_hold_few_classes(name: str) -> None:
    """What one kind of run alone needs is imported where it is used."""
    assert import_graph.classes(name) <= 300


def test_a_circle_is_found() -> None:
    edges = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a", "d"}), "d": frozenset[str]()}
    assert import_graph.circles(edges) == [["a", "b", "c"]]
    assert import_graph.circles({"a": frozenset({"b"}), "b": frozenset[str]()}) == []


def test_the_bottom_of_trainers_stays_at_the_bottom() -> None:
    """`algorithm.py` is what every other file of trainers imports: protocols, and nothing that does the work."""
    concrete = {f"turngym.trainers.{name}" for name in ("run", "train_loop", "models", "critic", "distributed")}
    assert not concrete & import_graph.reached(import_graph.graph(), "turngym.trainers.algorithm")


@pytest.mark.parametrize(
    ("room", "part", "name"),
    [
        ("core", "files", "torch"),
        ("core", "files", "core.task"),
        ("envs", "guard", "turngym.agents.playing.agent"),
        ("envs", "webshop", "textworld"),
        ("agents", "rollout", "turngym.trainers.batch"),
        ("core", "files", "turngym.envs.guard.ActionGuard"),
        ("agents", "agent", "turngym.scripts.main"),
        ("agents", "agent", "agents.rollout"),
        ("scripts", "eval", "turngym.env.core"),
        ("scripts", "eval", "tests.conftest"),
    ],
)
def test_the_rules_forbid(room: str, part: str, name: str) -> None:
    assert problem(room, part, name) is not None


@pytest.mark.parametrize(
    ("room", "part", "name"),
    [
        ("core", "files", "json"),
        ("retrieval", "index", "turngym.core.task.Task"),
        ("envs", "vector", "gymnasium.vector"),
        ("envs", "alfworld", "textworld.core"),
        ("envs", "search", "turngym.retrieval.bm25_retriever"),
        ("trainers", "loop", "turngym.agents.playing.rollout"),
        ("trainers", "loop", "torch"),
    ],
)
def test_the_rules_allow(room: str, part: str, name: str) -> None:
    assert problem(room, part, name) is None

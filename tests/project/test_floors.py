"""Who may import whom: the floors of the design, read from the syntax trees of all modules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("envs", "agents", "trainers", "retrieval", "scripts")
SHARED = ("common", "core", "episode", "protocols")
"""Modules of envs that define what all rooms exchange."""
ENV_PACKAGES = ("alfworld", "webshop", "search")
ENVS_MAY_USE = {"numpy", "gymnasium"}
PART_MAY_USE = {
    "alfworld": {"textworld", "alfworld"},
    "webshop": {"rapidfuzz", "spacy", "flask"},
    "search": {"pyarrow"},
}
"""What a single environment may import besides: small libraries, or extras where they are asked for."""
RETRIEVAL_MAY_USE = {"numpy", "regex", "faiss", "torch", "transformers", "flask", "httpx", "rich"}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import, those inside functions and type-checking blocks included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: relative import; write turngym.<room>.<module>"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


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
    if other not in ROOMS:
        return "there is no such room"
    if room == "retrieval" and other != "retrieval":
        return "retrieval imports none of the other rooms"
    if other == "scripts" and room != "scripts":
        return "scripts are wiring: nothing imports them"
    if room == "envs":
        if other == "retrieval" and part in ENV_PACKAGES:
            return None
        if other != "envs":
            return f"envs may not import {other}"
        if inside in ENV_PACKAGES and part != inside:
            return f"envs.{part} may not know the environment {inside}"
    if {room, other} == {"agents", "trainers"}:
        return "agents and trainers never import each other"
    if room == "trainers" and other == "envs" and inside not in SHARED:
        return f"trainers may only import {', '.join(SHARED)} from envs"
    return None


def _foreign(room: str, part: str, top: str) -> str | None:
    if top in sys.stdlib_module_names or room not in ("envs", "retrieval"):
        return None
    if room == "retrieval":
        return None if top in RETRIEVAL_MAY_USE else f"retrieval may only import {', '.join(sorted(RETRIEVAL_MAY_USE))}"
    if top in ENVS_MAY_USE or top in PART_MAY_USE.get(part, ()):
        return None
    return f"envs may only import the standard library, {', '.join(sorted(ENVS_MAY_USE))}"


@pytest.mark.parametrize("room", [room for room in ROOMS if (ROOT / room).is_dir()])
def test_floors(room: str) -> None:
    wrong = []
    for path in modules(room):
        part = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        for line, name in imported(path):
            reason = problem(room, part, name)
            if reason is not None:
                wrong.append(f"{path.relative_to(ROOT)}, line {line}: {name}: {reason}")
    assert not wrong, "\n".join(wrong)


def test_every_room_is_looked_at() -> None:
    for room in ("envs", "agents", "trainers", "scripts"):
        assert len(modules(room)) > 3


@pytest.mark.parametrize(
    ("room", "part", "name"),
    [
        ("envs", "core", "torch"),
        ("envs", "alfworld", "torch.nn"),
        ("envs", "core", "envs.core"),
        ("envs", "guard", "turngym.agents.agent"),
        ("envs", "base", "turngym.envs.alfworld.env"),
        ("envs", "trace", "turngym.retrieval.index"),
        ("envs", "webshop", "textworld"),
        ("agents", "rollout", "turngym.trainers.batch"),
        ("trainers", "loop", "turngym.agents.rollout"),
        ("trainers", "loop", "turngym.envs.guard.ActionGuard"),
        ("agents", "agent", "turngym.scripts.main"),
        ("agents", "agent", "agents.rollout"),
        ("retrieval", "index", "turngym.envs.core"),
        ("scripts", "eval", "turngym.env.core"),
        ("scripts", "eval", "tests.conftest"),
    ],
)
def test_the_rules_forbid(room: str, part: str, name: str) -> None:
    assert problem(room, part, name) is not None


@pytest.mark.parametrize(
    ("room", "part", "name"),
    [
        ("envs", "core", "json"),
        ("envs", "vector", "gymnasium.vector"),
        ("envs", "alfworld", "turngym.envs.base.TextEnv"),
        ("envs", "alfworld", "textworld.core"),
        ("envs", "search", "turngym.retrieval.bm25"),
        ("agents", "rollout", "turngym.envs.guard.ActionGuard"),
        ("trainers", "loop", "turngym.envs.episode.Episode"),
        ("trainers", "loop", "torch"),
        ("scripts", "train", "turngym.trainers.trainer"),
    ],
)
def test_the_rules_allow(room: str, part: str, name: str) -> None:
    assert problem(room, part, name) is None

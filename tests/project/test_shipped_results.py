"""Every packed result in docs comes out the same when it is played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngym.agents.evaluation.packed import check_result
from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.worlds import WORLDS

FILES = sorted((Path(__file__).parents[2] / "docs").rglob("*.result.xz"))
QUICK = [f"{world}-{player}" for world in ("alfworld", "webshop", "search") for player in ("student", "random")]
QUICK += ["search-loops-tcod-seed4"]


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=name_of(path), marks=() if name_of(path) in QUICK else pytest.mark.long) for path in FILES],
)
def test_it_comes_out_the_same(path: Path) -> None:
    assert check_result(path) == []
    assert path.stat().st_size < 2500 * len(read_result(path).episodes)


def test_every_world_has_its_models_expert_and_random_player() -> None:
    names = set(map(name_of, FILES))
    assert names.issuperset(QUICK)
    assert {f"{world}-{player}" for world in WORLDS for player in ("student", "teacher", "expert", "random")} <= names

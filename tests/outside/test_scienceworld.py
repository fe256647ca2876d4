"""A simulator that is not ours (scripts/examples/turngym_scienceworld): its contract, its panels, its command.

Needs `pip install scienceworld==1.2.3` and a Java runtime.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from wheels import Turngym, installed_with

from turngym.core import TaskError, TurngymError
from turngym.envs import ActionGuard, EnvContract, load_panel, verify_panel

pytest.importorskip("scienceworld")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("java") is None, reason="the simulator needs a Java runtime"),
]
PROJECT = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "turngym_scienceworld"
ENV = "turngym_scienceworld:scienceworld/ScienceWorld-v0"
BOIL: dict[str, Any] = {"seed": 0, "options": {"task": "boil/0"}}


class TestScienceWorld(EnvContract):
    env_id = ENV
    tasks_checked = 1

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        """Not the expert's, whose path takes seconds to make."""
        return str(rng.choice(["look around", "open door to kitchen", "go to kitchen", "wait1", "pick up thermometer"]))


def test_the_published_splits_are_the_simulators() -> None:
    from turngym_scienceworld.simulator import Simulator
    from turngym_scienceworld.tasks import JAR_PATH, SPLITS, VARIATIONS, split_of

    simulator = Simulator(Path(JAR_PATH))
    server = simulator._server
    assert set(server.getTaskNames()) == set(VARIATIONS)
    for task in VARIATIONS:
        simulator.begin(task, 0, "")
        theirs = [server.getVariationsTrain(), server.getVariationsDev(), server.getVariationsTest()]
        assert [list(numbers) for numbers in theirs] == [list(split_of(task, split)) for split in SPLITS], task


@pytest.mark.parametrize(("name", "count"), [("dev", 1796), ("test", 1819), ("test-ten", 271)])
def test_a_panel_is_compared_without_starting_the_simulator(name: str, count: int) -> None:
    panel = load_panel(f"turngym_scienceworld:scienceworld-{name}")
    assert len(panel.tasks) == count
    env: Any = panel.make_env()
    assert verify_panel(panel, env) == []
    assert env.unwrapped._simulator is None
    simpler = panel.make_env(simplifications="easy")
    assert len(verify_panel(panel, simpler)) == count


def test_a_state_is_what_was_played_and_a_wrong_one_is_refused() -> None:
    env, other = (gym.make(ENV, listed=listed) for listed in (True, False))
    env.reset(**BOIL)
    seen = [env.step(action) for action in ("Open  DOOR to kitchen", "open door", "0", "go to kitchen", "open foo")]
    assert "enter the number" in seen[1][0]
    assert [step[4]["verdict"] for step in seen] == ["ok", "ok", "ok", "ok", "inadmissible"]
    assert len(seen[3][4]["admissible_actions"]) > 300
    state: Any = env.get_wrapper_attr("get_state")()
    other.get_wrapper_attr("set_state")(state)
    assert other.get_wrapper_attr("get_state")() == state
    assert other.step("look around")[:4] == env.step("look around")[:4]
    state["env"]["inner"]["seen"] = "You are elsewhere."
    with pytest.raises(TurngymError, match="another way"):
        other.get_wrapper_attr("set_state")(state)


@pytest.mark.parametrize(
    "given", [{"simplifications": "easier"}, {"data": "no/such/folder"}, {"split": "easier"}], ids=str
)
def test_what_cannot_be_played_is_refused_before_a_process_starts(given: dict[str, str]) -> None:
    with pytest.raises(TaskError, match=r"easier|no/such"):
        gym.make(ENV, **given)


@pytest.fixture(scope="module")
def turngym(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turngym]:
    with installed_with(PROJECT, tmp_path_factory.mktemp("scienceworld")) as run:
        yield run


@pytest.mark.parametrize("agent", ["random", "expert"])
def test_the_installed_package_is_evaluated(turngym: Turngym, tmp_path: Path, agent: str) -> None:
    words = ("--panel", "turngym_scienceworld:scienceworld-test-ten", "--preset", "scienceworld-100")
    turngym("eval", *words, "--agent", agent, "--limit", "2", "--out", tmp_path / "eval")
    found: dict[str, Any] = json.loads((tmp_path / "eval" / "results.json").read_text(encoding="utf-8"))
    scores = [row["score"] for row in found["episodes"]]
    assert len(scores) == 2
    assert (scores == [1.0, 1.0]) == (agent == "expert")

"""TextEnv: drawing tasks, errors that help, info, snapshots, rendering."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from turngym.core.errors import EnvBackendError, TaskError, TurngymError
from turngym.core.task import content_hash
from turngym.envs.base import Outcome, ResetNeeded, TextEnv, quote
from turngym.envs.registration import make_env
from turngym.envs.testing import expect


def test_the_task_is_drawn_with_the_seed_alone(toy_class: type[Any]) -> None:
    first, second = toy_class(), toy_class()
    drawn = [first.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert drawn == [second.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert set(drawn) == {"corridor/3", "corridor/4", "corridor/5"}


def test_a_chosen_task_draws_nothing(toy_class: type[Any]) -> None:
    env = toy_class()
    env.reset(seed=1, options={"task": "corridor/3"})
    env.reset(options={"task": "corridor/3"})
    state = env.np_random.bit_generator.state
    env.reset(seed=1, options={"task": "corridor/4"})
    env.reset(options={"task": "corridor/5"})
    assert env.np_random.bit_generator.state == state


HOOKS = {"_begin", "_apply", "_get_state", "_set_state", "_close", "_reopen"}
"""Private names that subclasses write, as the documentation says."""


def test_a_subclass_may_use_every_private_name_that_is_no_hook(toy_class: type[Any]) -> None:
    env = make_env(toy_class, render_mode="ansi")
    env.reset(seed=0)
    env.step("go right")
    own = {name for name in {*vars(TextEnv), *vars(env.unwrapped)} if name.startswith("_")}
    own -= {name for name in own if name.startswith("_TextEnv__") or name.endswith("__")}
    # Gymnasium's, and abc's
    assert own - HOOKS - set(dir(gym.Env)) - {"_abc_impl"} == set()

    class Mine(toy_class):  # type: ignore[misc]
        def task_ids(self) -> tuple[str, ...]:
            self._ids = self._phase = self._frame = self._restore = ("corridor/4", "corridor/5")
            return self._ids

    env = Mine()
    for _ in range(2):
        env.reset(options={"task": "corridor/5"})
    env.set_state(env.get_state())
    assert env.task_ids() == ("corridor/4", "corridor/5")


@pytest.mark.parametrize("ids", [{"corridor/4": 1}, b"ab", [4, 5], "corridor/4", None], ids=str)
def test_tasks_that_are_no_list_of_texts_are_refused(toy_class: type[Any], ids: Any) -> None:
    class Other(toy_class):  # type: ignore[misc]
        def task_ids(self) -> Any:
            return ids

    with pytest.raises(EnvBackendError, match=r"task_ids\(\)"):
        Other().reset(seed=0)


def test_an_array_or_a_column_of_tasks_is_a_list(toy_class: type[Any]) -> None:
    class Column(list[str]):
        """As of pandas: `in` looks among the labels of the rows."""

        def __contains__(self, found: object) -> bool:
            return found in range(len(self))

        def tolist(self) -> list[str]:
            return [*self]

    for ids in (np.array(["corridor/4", "corridor/5"]), Column(["corridor/4", "corridor/5"])):
        env = type("Other", (toy_class,), {"task_ids": lambda self, ids=ids: ids})()
        assert env.reset(options={"task": "corridor/5"})[1]["task_id"] == "corridor/5"


def test_a_constructor_may_forget_that_of_its_class(toy_class: type[Any]) -> None:
    class Forgets(toy_class):  # type: ignore[misc]
        def __init__(self) -> None:
            self.length = self.place = 0

    env = Forgets()
    assert env.reset(options={"task": "corridor/4"})[1]["task_id"] == "corridor/4"
    assert env.action_space.contains("go right")
    env.close()


@pytest.mark.parametrize(
    "given", [{"observation": b"x"}, {"reward": "1"}, {"terminated": 1}, {"verdict": "good"}], ids=str
)
def test_an_outcome_of_other_types_is_refused_where_it_is_made(given: dict[str, Any]) -> None:
    with pytest.raises(EnvBackendError, match=f"{next(iter(given))} is "):
        Outcome(**{"observation": "x", **given})


@pytest.mark.parametrize("given", [None, ("x", 1.0, True, False, {})], ids=str)
def test_what_is_no_outcome_is_refused(toy_class: type[Any], given: Any) -> None:
    env = type("Other", (toy_class,), {"_apply": lambda self, action: given})()
    env.reset(seed=0)
    with pytest.raises(EnvBackendError, match=r"_apply\(\) gave .*; it must be an Outcome"):
        env.step("go right")


def test_a_task_that_is_listed_twice_is_refused(toy_class: type[Any]) -> None:
    class Twice(toy_class):  # type: ignore[misc]
        def task_ids(self) -> tuple[str, ...]:
            return "corridor/4", "corridor/5", "corridor/4"

    with pytest.raises(TaskError, match="'corridor/4' twice"):
        Twice().reset(options={"task": "corridor/5"})


def test_info_in_full(toy_class: type[Any]) -> None:
    env = toy_class()
    _, info = env.reset(seed=0, options={"task": "corridor/4"})
    assert info == {
        "task_id": "corridor/4",
        "task_sha": content_hash({"length": 4}),
        "category": "corridor",
        "turn": 0,
        "env_steps": 0,
        "verdict": "ok",
        "action": None,
        "admissible_actions": ["go right", "wave"],
        "success": False,
        "score": 0.0,
    }
    _, reward, terminated, truncated, info = env.step("  go right\n")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (info["action"], info["turn"], info["env_steps"]) == ("go right", 1, 1)
    assert info["admissible_actions"] == ["go left", "go right", "wave"]
    assert env.step("wave")[4]["verdict"] == "no_effect"
    observation, _, _, _, info = env.step("Go right")
    assert (observation, info["verdict"], info["turn"]) == ("Nothing happens.", "inadmissible", 3)
    env.step("go right")
    env.step("go right")
    _, reward, terminated, _, info = env.step("go right")
    assert (reward, terminated, info["success"], info["score"]) == (1.0, True, True, 1.0)
    assert info["env_steps"] == 6
    assert env.reset()[1]["env_steps"] == 0


def test_errors_name_the_value_and_what_is_valid(toy_class: type[Any]) -> None:
    env = toy_class()
    assert "step() was called before reset(); call reset() first" in expect(ResetNeeded, env.step, "wave")
    assert "get_state() was called before" in expect(ResetNeeded, env.get_state)
    text = expect(TaskError, lambda: env.reset(options={"task": "corridor/33"}))
    assert "unknown task 'corridor/33' (3 are known). Did you mean 'corridor/3'" in text
    text = expect(TurngymError, lambda: env.reset(options={"tasks": "corridor/3"}))
    assert "no option 'tasks'; options are: 'task'. Did you mean 'task'" in text
    text = expect(TurngymError, lambda: toy_class(render_mode="human2"))
    assert "render_mode 'human2' is not one of ansi, human or None" in text
    env.reset(options={"task": "corridor/3"})
    assert "takes a str, not int 3" in expect(TurngymError, env.step, 3)
    for _ in range(3):
        env.step("go right")
    assert "after the episode ended" in expect(ResetNeeded, env.step, "go right")
    env.close()
    assert "on a closed environment" in expect(gym.error.ResetNeeded, env.step, "go right")


def test_an_environment_without_tasks_says_so(toy_class: type[Any]) -> None:
    empty = type("Empty", (toy_class,), {"task_ids": lambda self: ()})()
    with pytest.raises(TaskError, match="no task to draw"):
        empty.reset(seed=0)


def test_lazy_task_lists_are_asked_not_listed(toy_class: type[Any]) -> None:
    class Lazy:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> str:
            return f"corridor/{3 + index % 3}"

        def __contains__(self, task_id: object) -> bool:
            return task_id == "corridor/3"

    env = type("Endless", (toy_class,), {"task_ids": lambda self: Lazy()})()
    assert env.reset(options={"task": "corridor/3"})[1]["task_id"] == "corridor/3"
    assert env.reset(seed=0)[1]["task_id"].startswith("corridor/")


def test_snapshots_keep_the_seed_and_refuse_another_task(toy_class: type[Any]) -> None:
    env, fresh = toy_class(), toy_class()
    env.reset(seed=3, options={"task": "corridor/5"})
    state = env.get_state()
    fresh.set_state(state)
    assert fresh.np_random_seed == 3
    with pytest.raises(TaskError, match="task 'corridor/5' with sha256 00"):
        fresh.set_state({**state, "sha256": "00"})
    with pytest.raises(TaskError, match="unknown task 'gone'"):
        fresh.set_state({**state, "task": "gone"})


def test_a_restored_ended_episode_is_ended(toy_class: type[Any]) -> None:
    env = toy_class()
    env.reset(seed=0, options={"task": "corridor/3"})
    for _ in range(3):
        env.step("go right")
    fresh = toy_class()
    fresh.set_state(env.get_state())
    assert fresh.success
    with pytest.raises(ResetNeeded):
        fresh.step("wave")


def test_rendering(toy_class: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    env = toy_class(render_mode="ansi")
    first, _ = env.reset(seed=0)
    assert env.render() == first
    env.step("wave")
    assert env.render() == "> wave\nNobody waves back."
    human = toy_class(render_mode="human")
    human.reset(seed=0)
    human.step("wave")
    assert human.render() is None
    assert capsys.readouterr().out == f"{first}\n> wave\nNobody waves back.\n"
    with pytest.warns(UserWarning, match="needs render_mode"):
        assert toy_class().render() is None


def test_close_releases_once(toy_class: type[Any]) -> None:
    released: list[int] = []
    env = type("Held", (toy_class,), {"_close": lambda self: released.append(1)})()
    env.close()
    env.close()
    assert released == [1]


def test_quotes_are_one_short_printable_line() -> None:
    assert quote("go\n to  \ud800") == '"go to ?"'
    assert quote("x" * 200, 5) == '"xxxxx..."'

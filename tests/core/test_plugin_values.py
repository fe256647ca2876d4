"""Values of other people's code: what is taken, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from turngym.core.errors import AgentError, EnvBackendError, TaskError, TurngymError
from turngym.core.plugin_values import MOST_TEXT, StepResult, answers, checked_number, checked_task, failures_of, unique
from turngym.core.protocols import Judgment, judgments
from turngym.core.task import Task

INFO = {"action": "go", "verdict": "ok", "admissible_actions": ["go"], "success": False, "score": 0.5}
HUGE = 10**400


def step(*, observation: Any = "Here.", reward: Any = 1.0, over: Any = False, cut: Any = False, **info: Any) -> Any:
    return observation, reward, over, cut, INFO | info


def test_a_step_in_full() -> None:
    found = StepResult.of(step(goal_rate=0.25, reading="lenient"))
    assert (found.observation, found.reward, found.terminated, found.truncated) == ("Here.", 1.0, False, False)
    assert (found.action, found.verdict, found.admissible) == ("go", "ok", ("go",))
    assert (found.success, found.score, found.goal_rate, found.reading) == (False, 0.5, 0.25, "lenient")


def test_numpys_scalars_are_what_they_hold() -> None:
    found = StepResult.of(step(reward=np.float32(0.5), over=np.bool_(True), success=np.True_, score=np.array(1)))
    assert [type(value) for value in (found.reward, found.terminated, found.success, found.score)] == [
        float,
        bool,
        bool,
        float,
    ]
    assert StepResult.of(step(reward=True)).reward == 1.0
    assert StepResult.of(step(admissible_actions=None, action=None)).admissible is None


def test_what_rounding_adds_is_taken_off() -> None:
    assert StepResult.of(step(score=1.0 + 1e-12)).score == 1.0
    assert StepResult.of(step(score=-1e-12)).score == 0.0
    assert StepResult.of(step(reward=-3.5)).reward == -3.5


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        *(({"observation": value}, "the observation") for value in (b"Here.", "x" * (MOST_TEXT + 1))),
        *(({"reward": value}, "the reward") for value in (None, "1", math.nan, math.inf, 1e19, HUGE, [1.0, 2.0], 1j)),
        *(({"over": value}, "terminated") for value in (None, "False", 0)),
        ({"cut": 1}, "truncated"),
        *(({"success": value}, "success") for value in ("False", 1, None, 0.0)),
        *(({"score": value}, "the score") for value in (3.0, -0.1, math.nan, "0.5", None, HUGE)),
        *(({"goal_rate": value}, "the goal rate") for value in (math.nan, "many", 1.5)),
        *(({"admissible_actions": value}, "the admissible actions") for value in ("go", 5, [1])),
        ({"action": 5}, "the action in info"),
        *(({"verdict": value}, "the verdict") for value in ("fine", None, [])),
    ],
)
def test_values_of_another_kind_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvBackendError, match=named):
        StepResult.of(step(**wrong))


@pytest.mark.parametrize("wrong", [None, (), ("Here.", 0.0, True, {}), ("Here.", 0.0, True, False, None)])
def test_what_is_no_step(wrong: Any) -> None:
    with pytest.raises(EnvBackendError, match="a step gave"):
        StepResult.of(wrong)
    with pytest.raises(EnvBackendError, match="lacks score"):
        StepResult.of(("Here.", 0.0, True, False, {name: value for name, value in INFO.items() if name != "score"}))


def test_tasks_are_texts() -> None:
    task = Task(env_id="e", task_id="t", sha256="0", split="s", category="c")
    assert checked_task(task) is task
    for wrong in ("category", "sha256", "cluster"):
        with pytest.raises(EnvBackendError, match=f"the task's {wrong} is None"):
            checked_task(replace(task, **{wrong: None}))  # type: ignore[arg-type]
    with pytest.raises(EnvBackendError, match="must be a Task"):
        checked_task("t")


def test_ids_are_unique() -> None:
    unique("the list", ["a", "b"])
    with pytest.raises(TaskError, match="the list lists 'b' twice"):
        unique("the list", ["a", "b", "c", "b"])


def test_answers_are_as_many_as_questions_and_of_their_class() -> None:
    assert answers("who", (1, 2), 2, int, AgentError) == [1, 2]
    for found in (None, [1], [1, 2, 3], [1, "2"], iter([1, 2])):
        with pytest.raises(AgentError, match="who answered"):
            answers("who", found, 2, int, AgentError)


def test_votes_are_texts() -> None:
    fine = [Judgment(votes=("yes", None)), Judgment(votes=())]
    assert judgments(fine, 2, AgentError) == fine
    for wrong in (Judgment(votes=(1,)), Judgment(votes="yes"), "yes"):  # type: ignore[arg-type]
        with pytest.raises(AgentError, match="the judge"):
            judgments([wrong], 1, AgentError)


def test_numbers_beyond_floats_are_refused_in_a_line() -> None:
    for check in (lambda: checked_number("it", HUGE), lambda: checked_number("it", -HUGE)):
        with pytest.raises(TurngymError, match="it is "):
            check()


@pytest.mark.parametrize("raised", [ZeroDivisionError("by zero"), SystemExit(3), KeyError("x"), GeneratorExit()])
def test_what_an_object_of_others_raises_is_a_line_and_ours_stays(raised: BaseException) -> None:
    def theirs() -> None:
        raise raised

    said = f"--agent a:b failed: {type(raised).__name__}: "
    with pytest.raises(TaskError, match=said), failures_of("--agent a:b", theirs, TaskError):
        theirs()
    for ours, error in ((TaskError, raised), (theirs, TaskError("as it is"))):
        with pytest.raises(type(error)), failures_of("it", ours, EnvBackendError):
            raise error

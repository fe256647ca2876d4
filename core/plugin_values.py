"""Values that other people's code returns, taken by their exact types: of environments, agents, judges and rewards.

Python would make something of nearly all of them: "False" is true, and a score of 3.0 is averaged. A value that is not
what its protocol says is refused here, by name, and never enters a mean. NumPy's scalars are what they hold.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from turngym.core.errors import EnvBackendError, TaskError, TurngymError
from turngym.core.redaction import brief, said_by
from turngym.core.task import Task, Verdict

T = TypeVar("T")
LARGEST_VALUE = 1e18
"""No number that is measured is larger; squares and sums of larger ones are beyond what a float holds."""
MOST_TEXT = 1 << 24
"""Characters of a text, some four million tokens. Tokenizing takes a hundred times their memory."""
ROUNDING = 1e-9
"""How far sums of shares may lie outside their range; they are put on its border."""
Refusal = Callable[[str], Exception]
"""Makes the error of a text: a class of errors, or a function that adds where it was."""


def checked_number(
    what: str,
    value: object,
    *,
    least: float = -LARGEST_VALUE,
    most: float = LARGEST_VALUE,
    error: Refusal = EnvBackendError,
) -> float:
    """`value` as a float. Raises `error` for other types (true is 1.0), NaN and infinity, and outside of the range."""
    number = _plain(value)
    try:
        # NaN is in no range
        if isinstance(number, Real) and least - ROUNDING <= float(number) <= most + ROUNDING:
            return min(max(float(number), least), most)
    # a whole number beyond what a float holds
    except OverflowError:
        pass
    bounded = (least, most) != (-LARGEST_VALUE, LARGEST_VALUE)
    valid = f"a number from {least:g} to {most:g}" if bounded else "a finite number"
    raise error(f"{what} is {brief(value, 80)}; it must be {valid}")


def checked_flag(what: str, value: object) -> bool:
    """`value`, a bool. Raises EnvBackendError for any other type, although Python would take it for true or false."""
    flag = _plain(value)
    if not isinstance(flag, bool):
        raise EnvBackendError(f"{what} is {brief(value, 80)}; it must be True or False")
    return flag


def checked_text(what: str, value: object, *, error: Refusal = EnvBackendError) -> str:
    """`value`, a str; NumPy's becomes a plain one. Raises `error` for other types, and for what no model can read."""
    if not isinstance(value, str):
        raise error(f"{what} is {brief(value, 80)}; it must be text")
    if len(value) > MOST_TEXT:
        raise error(f"{what} has {len(value):,} characters; it must be text of at most {MOST_TEXT:,}")
    return str.__str__(value)


def checked_verdict(value: Any) -> Verdict:
    """`value` as a Verdict. Raises EnvBackendError for anything else."""
    if value not in list(Verdict):
        raise EnvBackendError(f"the verdict is {brief(value, 80)}; valid: {', '.join(Verdict)}")
    return Verdict(value)


def checked_texts(what: str, value: object, *, error: Refusal = EnvBackendError) -> tuple[str, ...] | None:
    """`value`, None or a sequence of str. Raises `error` for other types."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise error(f"{what} is {brief(value, 80)}; it must be a list of texts, or None")
    return tuple(checked_text(f"one of {what}", text, error=error) for text in value)


def _plain(value: object) -> Any:
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step of an environment gave."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    action: str | None
    verdict: Verdict
    admissible: tuple[str, ...] | None
    success: bool
    score: float
    """A number in [0, 1]."""
    goal_rate: float | None
    """Share of goals met, in [0, 1]; None where the environment does not say."""
    reading: str | None
    answer_f1: float | None = None
    """F1 of the answer, in [0, 1]; None where the environment asks for none."""

    @classmethod
    def of(cls, step: object) -> StepResult:
        """The typed values of what `step` of an environment in an `ActionGuard` returned.

        Raises EnvBackendError for one that is missing or of another type, NaN, infinite or out of its range.
        """
        if not isinstance(step, tuple) or len(step) != 5 or not isinstance(step[4], Mapping):
            raise EnvBackendError(
                f"a step gave {brief(step, 80)}; it must be (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = step
        names = ("action", "verdict", "admissible_actions", "success", "score")
        if missing := [name for name in names if name not in info]:
            raise EnvBackendError(f"the environment's info lacks {', '.join(missing)}")
        action, goal_rate, answer_f1 = info["action"], info.get("goal_rate"), info.get("answer_f1")
        return cls(
            observation=checked_text("the observation", observation),
            reward=checked_number("the reward", reward),
            terminated=checked_flag("terminated", terminated),
            truncated=checked_flag("truncated", truncated),
            action=None if action is None else checked_text("the action in info", action),
            verdict=checked_verdict(info["verdict"]),
            admissible=checked_texts("the admissible actions", info["admissible_actions"]),
            success=checked_flag("success", info["success"]),
            score=checked_number("the score", info["score"], least=0.0, most=1.0),
            goal_rate=None if goal_rate is None else checked_number("the goal rate", goal_rate, least=0.0, most=1.0),
            reading=info.get("reading"),
            answer_f1=None if answer_f1 is None else checked_number("the answer's F1", answer_f1, least=0.0, most=1.0),
        )


def checked_task(task: object) -> Task:
    """`task`, whose fields are hashed and sorted by. Raises EnvBackendError if one of them is not a text."""
    if not isinstance(task, Task):
        raise EnvBackendError(f"the environment's task is {brief(task, 80)}; it must be a Task")
    for field in fields(task):
        checked_text(f"the task's {field.name}", getattr(task, field.name))
    return task


def unique(what: str, ids: Collection[str]) -> None:
    """Raises TaskError for an id that is not a text, and for a repeated one, which would be played and counted
    twice."""
    if (wrong := next((task_id for task_id in ids if not isinstance(task_id, str)), None)) is not None:
        raise TaskError(f"{what} lists {brief(wrong, 80)}; valid: texts")
    # a set is quick, and nearly always enough
    if len(set(ids)) < len(ids):
        [(twice, _)] = Counter(ids).most_common(1)
        raise TaskError(f"{what} lists {brief(twice, 80)} twice; valid: every task once (samples play one again)")


@contextmanager
def failures_of(whose: str, code: object, error: Refusal) -> Iterator[None]:
    """Turns exceptions of another package's object, inside this context, into `error` in one line. `code` is the
    object, or its function; exceptions of our own objects pass unchanged."""
    try:
        yield
    except (TurngymError, KeyboardInterrupt):
        raise
    # sys.exit would end the run without a word, and a panic of Rust is no Exception
    except BaseException as reason:
        module = getattr(code, "__module__", "") or ""
        if module.partition(".")[0] == "turngym":
            raise
        raise error(f"{whose} failed: {failure_of(reason)}") from reason


def failure_of(error: BaseException) -> str:
    """Describes an exception of other people's code, with the place where it was raised, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {said_by(error)} ({frame.filename}, line {frame.lineno})"


def answers(whose: str, answered: object, wanted: int, kind: type[T], error: Refusal) -> list[T]:
    """`answered`, one answer of class `kind` for each of `wanted` questions. Raises `error` for anything else."""
    if not isinstance(answered, list | tuple):
        raise error(f"{whose} answered {brief(answered, 80)}; it must be a list of {kind.__name__}")
    if len(answered) != wanted:
        raise error(f"{whose} answered {len(answered)} of {wanted} questions; it must answer every one")
    for answer in answered:
        if not isinstance(answer, kind):
            raise error(f"{whose} answered {brief(answer, 80)}; it must be {kind.__name__}")
    return list(answered)

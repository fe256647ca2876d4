"""Somebody else's environment that misbehaves, as `hostile_env:tests/Hostile-v0`: the task says how."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from turngym.core import Task, ToolSpec, Verdict, content_hash
from turngym.envs import Outcome, TextEnv, register

HANGING = threading.Event()
"""Set by a test at its end, so that the threads that hang here end."""


def _raises() -> Any:
    raise KeyError("no such house")


def _prints() -> Any:
    raise ValueError("two\nlines")


class _Unsaid(Exception):
    def __str__(self) -> str:
        raise KeyError("no text either")


def _cannot_say() -> Any:
    raise _Unsaid


def _panics() -> Any:
    raise BaseException("as a panic of Rust is none of Exception")


def _hangs() -> Any:
    HANGING.wait(60.0)
    return 0.0


STEPS: dict[str, Any] = {
    "fine": lambda: 0.5,
    "hangs": _hangs,
    "raises": _raises,
    "prints": _prints,
    "cannot say why": _cannot_say,
    "exits": lambda: sys.exit(3),
    "exits without a word": lambda: sys.exit(),
    "runs out of memory": lambda: bytearray(1 << 62),
    "recurses": lambda: (lambda f: f(f))(lambda f: f(f)),
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "text": lambda: "1.0",
    "nothing": lambda: None,
}
"""Task -> what gives the reward of its second step."""
VALUES: dict[str, dict[str, Any]] = {
    "success of text": {"success": "False"},
    "score of 3": {"score": 3.0},
    "goals of text": {"goal_rate": "many"},
    "admissible numbers": {"admissible_actions": [1, "go"]},
    "action of a number": {"action": 5},
}
"""Task -> what the `info` of its second step holds."""
STEPS |= dict.fromkeys(VALUES, lambda: 0.5)
BEGINS: dict[str, Any] = {"hangs at reset": _hangs, "raises at reset": _raises, "exits at reset": lambda: sys.exit(3)}
"""Task -> what its reset does."""
CLOSES: dict[str, Any] = {
    "raises": _raises,
    "exits": lambda: sys.exit(3),
    "cannot say why": _cannot_say,
    "prints": _panics,
}
"""Task -> what its close does."""
FAILING = (*(name for name in STEPS if name != "fine"), *BEGINS)


class HostileEnv(TextEnv):
    """Two steps of `go`; the second ends the episode, or does what the task's name says."""

    env_id: ClassVar[str] = "tests/Hostile-v0"
    tool = ToolSpec(name="hostile_step", description="Go.", argument="action", argument_description="go")
    instructions = "Go twice."

    def __init__(self, *, split: str = "train", only: Sequence[str] = (), render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.split, self._only, self._task, self._steps = split, tuple(only), "fine", 0

    def task_ids(self) -> Sequence[str]:
        return self._only or (*STEPS, *BEGINS)

    @property
    def task(self) -> Task:
        sha256 = content_hash({"hostile": self._task})
        return Task(env_id=self.env_id, task_id=self._task, sha256=sha256, split=self.split, category="")

    @property
    def success(self) -> bool:
        return self._steps == 2

    def admissible(self) -> tuple[str, ...]:
        return ("go",)

    def expert_action(self) -> str | None:
        return "go"

    def _begin(self, task_id: str) -> str:
        self._task, self._steps = task_id, 0
        BEGINS.get(task_id, int)()
        return "Go."

    def _apply(self, action: str) -> Outcome:
        if action != "go":
            return Outcome(observation="?", verdict=Verdict.INADMISSIBLE)
        self._steps += 1
        if self._steps < 2:
            return Outcome(observation="Go on.")
        return Outcome(observation="Here.", reward=STEPS[self._task](), terminated=True)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        *result, info = super().step(action)
        return *result, info | (VALUES.get(self._task, {}) if self._steps == 2 else {})  # type: ignore[return-value]

    def close(self) -> None:
        super().close()
        CLOSES.get(self._task, int)()

    def _get_state(self) -> Any:
        return self._steps

    def _set_state(self, state: Any) -> None:
        self._steps = state


register("tests/Hostile-v0", HostileEnv, max_turns=4)

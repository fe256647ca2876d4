"""A small environment with everything in it: two tasks, random flavor text, an expert, a restorable state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from turngym.core.task import Task, Verdict, content_hash
from turngym.core.tools import ToolSpec
from turngym.envs.base import Outcome, TextEnv
from turngym.envs.registration import register

TOY_ID = "turngym-test/Toy-v0"
OPEN_ID = "turngym-test/Open-v0"


class ToyEnv(TextEnv):
    """Walk right to the end of a corridor of 3 to 5 steps. Animals pass by at random."""

    env_id = TOY_ID
    tool = ToolSpec(
        name="toy_step",
        description="Walk in the corridor.",
        argument="action",
        argument_description="One of the possible actions.",
        examples=("go right",),
    )
    instructions = "You are in a corridor. Walk to its right end."

    def __init__(self, *, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.length = 0
        self.place = 0

    def task_ids(self) -> Sequence[str]:
        return ("corridor/3", "corridor/4", "corridor/5")

    def _begin(self, task_id: str) -> str:
        self.length, self.place = int(task_id[-1]), 0
        return f"You are in a corridor of {self.length} steps. {self._animal()}"

    def _animal(self) -> str:
        return "A cat passes." if self.np_random.random() < 0.5 else "A fox passes."

    def admissible(self) -> tuple[str, ...]:
        return ("go right", "wave") if self.place == 0 else ("go left", "go right", "wave")

    def _apply(self, action: str) -> Outcome:
        if action not in self.admissible():
            return Outcome(observation=self.invalid_observation, verdict=Verdict.INADMISSIBLE)
        if action == "wave":
            return Outcome(observation="Nobody waves back.", verdict=Verdict.NO_EFFECT)
        self.place += 1 if action == "go right" else -1
        text = f"You are at step {self.place}. {self._animal()}"
        return Outcome(observation=text, reward=float(self.success), terminated=self.success)

    @property
    def task(self) -> Task:
        task_id = f"corridor/{self.length}"
        sha256 = content_hash({"length": self.length})
        return Task(env_id=self.env_id, task_id=task_id, sha256=sha256, split="toy", category="corridor")

    @property
    def success(self) -> bool:
        return self.place == self.length

    def expert_action(self) -> str | None:
        return "go right"

    def _get_state(self) -> Any:
        return self.place

    def _set_state(self, state: Any) -> None:
        self.place = state


class OpenEnv(ToyEnv):
    """The same corridor with an open action space: any text that begins with "say "."""

    env_id = OPEN_ID

    def admissible(self) -> None:  # type: ignore[override]
        return None

    def check(self, action: str) -> str | None:
        return None if action.startswith("say ") else 'actions begin with "say "'

    def _apply(self, action: str) -> Outcome:
        if self.check(action) is not None:
            return Outcome(observation=self.invalid_observation, verdict=Verdict.INADMISSIBLE)
        self.place += action == "say right"
        return Outcome(observation=action, reward=float(self.success), terminated=self.success)

    def expert_action(self) -> str | None:
        return "say right"


def _register(env_class: type[TextEnv]) -> None:
    register(env_class.env_id, env_class)


_register(ToyEnv)
_register(OpenEnv)


@pytest.fixture
def toy_class() -> type[ToyEnv]:
    return ToyEnv


@pytest.fixture
def register_toy() -> Any:
    """Register an environment class under its `env_id`, as the toy is; for the test of the contract itself."""
    return _register

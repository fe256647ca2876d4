"""A number to guess, as docs/write_an_environment.md explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turngym.core import Task, TaskError, ToolSpec, Verdict, content_hash
from turngym.envs import Outcome, TextEnv, register, require_shape

HIGHEST = 20


class GuessEnv(TextEnv):
    """Reward 1.0 for the right guess, which ends the episode."""

    env_id = "example/Guess-v0"
    tool = ToolSpec(
        name="guess_step",
        description="Guess the number and read whether it is higher or lower.",
        argument="action",
        argument_description="One guess, for example: guess 7",
        examples=("guess 7",),
    )
    instructions = f"I think of a number from 1 to {HIGHEST}. You guess: guess <number>. I say higher or lower."

    def __init__(self, *, split: str = "train", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        if split not in ("train", "eval"):
            raise TaskError(f"split is {split!r}; splits are 'train' and 'eval'")
        self.split = split
        self.number = 0
        self.low, self.high = 1, HIGHEST
        self.right = False

    def task_ids(self) -> Sequence[str]:
        """Every fourth number is kept for evaluation."""
        numbers = range(1, HIGHEST + 1)
        return [f"number/{n}" for n in numbers if (n % 4 == 0) == (self.split == "eval")]

    @property
    def task(self) -> Task:
        sha256 = content_hash({"number": self.number, "highest": HIGHEST})
        half = "low" if self.number <= HIGHEST // 2 else "high"
        return Task(env_id=self.env_id, task_id=f"number/{self.number}", sha256=sha256, split=self.split, category=half)

    @property
    def success(self) -> bool:
        return self.right

    def admissible(self) -> tuple[str, ...]:
        return tuple(f"guess {n}" for n in range(1, HIGHEST + 1))

    def expert_action(self) -> str:
        """Halves what is left."""
        return f"guess {(self.low + self.high) // 2}"

    def _begin(self, task_id: str) -> str:
        self.number = int(task_id.removeprefix("number/"))
        self.low, self.high, self.right = 1, HIGHEST, False
        return f"I think of a number from 1 to {HIGHEST}."

    def _apply(self, action: str) -> Outcome:
        if action not in self.admissible():
            return Outcome(observation=self.invalid_observation, verdict=Verdict.INADMISSIBLE)
        guess = int(action.removeprefix("guess "))
        if guess == self.number:
            self.right = True
            return Outcome(observation="Right.", reward=1.0, terminated=True)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return Outcome(observation="Higher.")
        self.high = min(self.high, guess - 1)
        return Outcome(observation="Lower.")

    def _get_state(self) -> Any:
        return self.low, self.high, self.right

    def _set_state(self, state: Any) -> None:
        require_shape(state, [int, int, bool])
        self.low, self.high, self.right = state


register("example/Guess-v0", GuessEnv, max_turns=10)

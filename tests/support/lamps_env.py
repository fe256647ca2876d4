"""Somebody else's small environment, as `lamps_env:tests/Lamps-v0`: an expert, mistakes, and no vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from turngym.core import Task, TaskError, ToolSpec, Verdict, content_hash
from turngym.envs import Outcome, TextEnv, register

ROOMS = ("kitchen", "cellar", "attic", "study")
COLORS = ("red", "green", "blue")


class LampsEnv(TextEnv):
    """Walk to the room that is named and switch on the lamp of the color that a note there names."""

    env_id: ClassVar[str] = "tests/Lamps-v0"
    tool = ToolSpec(
        name="lamps_step",
        description="Walk and switch.",
        argument="action",
        argument_description="go to a room, read the note, or switch a lamp on",
        examples=("go to cellar",),
    )
    instructions = "There are four rooms. Find the note, and switch the right lamp on."

    def __init__(self, *, split: str = "train", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        if split not in ("train", "eval"):
            raise TaskError(f"split is {split!r}; splits are 'train' and 'eval'")
        self.split = split
        self.goal, self.color, self.room, self.read, self.done = "", "", "", False, False

    def task_ids(self) -> Sequence[str]:
        pairs = [f"{room}/{color}" for room in ROOMS for color in COLORS]
        return [pair for n, pair in enumerate(pairs) if (n % 5 == 2) == (self.split == "eval")]

    @property
    def task(self) -> Task:
        task_id = f"{self.goal}/{self.color}"
        sha256 = content_hash({"lamps": task_id})
        return Task(env_id=self.env_id, task_id=task_id, sha256=sha256, split=self.split, category=self.color)

    @property
    def success(self) -> bool:
        return self.done

    def admissible(self) -> tuple[str, ...]:
        moves = tuple(f"go to {room}" for room in ROOMS if room != self.room)
        return (*moves, "read note", *(f"switch {color} lamp on" for color in COLORS))

    def expert_action(self) -> str | None:
        if self.room != self.goal:
            return f"go to {self.goal}"
        return f"switch {self.color} lamp on" if self.read else "read note"

    def plausible_mistake(self, rng: np.random.Generator) -> str | None:
        return "dance"

    def _begin(self, task_id: str) -> str:
        self.goal, self.color = task_id.split("/")
        self.room, self.read, self.done = "hall", False, False
        return f"You are in the hall. The note is in the {self.goal}."

    def _apply(self, action: str) -> Outcome:
        if action not in self.admissible():
            return Outcome(observation=self.invalid_observation, verdict=Verdict.INADMISSIBLE)
        if action.startswith("go to "):
            self.room = action.removeprefix("go to ")
            return Outcome(observation=f"You walk to the {self.room}. There are three lamps.")
        if action == "read note":
            here = self.room == self.goal
            self.read = self.read or here
            note = f"The note says: the {self.color} lamp." if here else "There is no note here."
            return Outcome(observation=note)
        self.done = self.room == self.goal and action == f"switch {self.color} lamp on"
        if self.done:
            return Outcome(observation="It is light.", reward=1.0, terminated=True)
        return Outcome(observation="The lamp goes out again.")

    def _get_state(self) -> Any:
        return [self.room, self.read, self.done]

    def _set_state(self, state: Any) -> None:
        self.room, self.read, self.done = state


class PhrasedLampsEnv(LampsEnv):
    """The same with a vocabulary of its own."""

    env_id: ClassVar[str] = "tests/PhrasedLamps-v0"

    def phrases(self) -> tuple[str, ...]:
        """Everything as words, with one that is never said."""
        return ("go to ", "read note", "switch ", " lamp on", *ROOMS, *COLORS, "xylophone")


class NoExpertEnv(LampsEnv):
    """The same without an expert."""

    env_id: ClassVar[str] = "tests/NoExpert-v0"

    expert_action = TextEnv.expert_action


register("tests/Lamps-v0", LampsEnv, max_turns=12)
register("tests/PhrasedLamps-v0", PhrasedLampsEnv, max_turns=12)
register("tests/NoExpert-v0", NoExpertEnv, max_turns=12)

"""ScienceWorld (Wang et al., EMNLP 2022): elementary science in a house, played by text.

The simulator has no snapshots: a state is the list of what was played, and is restored by playing it again, after which
the last observation is compared. Each environment has a process, started by the first `_begin` and ended by `_close`,
or with its object. A task's hash covers the jar, task, variation and simplifications; `task_of` gives it without a
process. With the admissible actions listed, up to thousands, a step takes 156 ms instead of 24 (medians), so
`admissible` returns None unless asked (`listed`), and `check` knows the grammar alone. The expert plays the simulator's
gold path, until another action was played.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from scienceworld.constants import JAR_PATH

from turngym.core import Task, TaskError, ToolSpec, Verdict
from turngym.envs import Outcome, TextEnv, require_shape
from turngym_scienceworld.simulator import Simulator
from turngym_scienceworld.tasks import ENV_ID, SIMPLIFICATIONS, SPLITS, hash_of, task_ids, task_of

_OBJECTLESS = "look around|look|inventory|task|reset task|wait|wait1"
_VERBS = (
    "activate|turn on|close|connect|deactivate|turn off|disconnect|dunk|eat|consume|flush|focus on|focus|look at|"
    "look on|examine|look in|mix|stir|move|put|go|walk|open|pick up|get|take|pour|put down|drop|read|teleport|use"
)
_ACTION = re.compile(rf"{_OBJECTLESS}|(?:{_VERBS}) [ -~]{{1,200}}")
"""What the simulator's grammar may know; which of these are actions, only the simulator knows."""
_UNKNOWN = "No known action matches that input."
_QUESTION = "Ambiguous request"
"""How the answer begins where several things are meant: the next action is the number of one."""


class ScienceWorldEnv(TextEnv):
    """Score and reward as the simulator gives them: the reward is what the score grew by, of 1.0 in all.

    A wrong focus loses the task: the score falls to 0, and the episode ends.
    """

    env_id = ENV_ID
    tool = ToolSpec(
        name="scienceworld_step",
        description="Do one thing in the house and read what happens.",
        argument="action",
        argument_description="One action, for example: open door to kitchen",
        examples=("look around", "open door to kitchen", "pick up thermometer"),
    )
    instructions = (
        "You are in a house with rooms, a workshop, a greenhouse and a foundry, and you solve tasks of science.\n"
        "Actions, with OBJ for a thing by the name that you read: activate OBJ, deactivate OBJ, open OBJ, close OBJ, "
        "connect OBJ to OBJ, disconnect OBJ, dunk OBJ in OBJ, eat OBJ, flush OBJ, focus on OBJ, go to OBJ, inventory, "
        "look around, look at OBJ, look in OBJ, mix OBJ, move OBJ to OBJ, pick up OBJ, pour OBJ in OBJ, put down OBJ, "
        "read OBJ, use OBJ on OBJ, task, wait, wait1 (waits ten turns, or one). Focus only on what the task names: a "
        "wrong focus loses it. Where several things are meant, answer with the number of one."
    )
    invalid_observation = _UNKNOWN
    told_by: ClassVar[frozenset[str]] = frozenset({"listed"})

    def __init__(
        self,
        *,
        split: Literal["train", "dev", "test"] = "train",
        simplifications: str = "",
        listed: bool = False,
        data: str | Path | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Args: the published split; simplifications of the simulator, with commas; whether the possible actions, of
        which there may be thousands, are listed at every step; another folder with scienceworld.jar."""
        super().__init__(render_mode=render_mode)
        if split not in SPLITS:
            raise TaskError(f"split is {split!r}; valid: {', '.join(SPLITS)}")
        for name in simplifications.split(",") if simplifications else ():
            if name not in SIMPLIFICATIONS:
                raise TaskError(f"simplifications has {name!r}; valid: {', '.join(SIMPLIFICATIONS)}, with commas")
        self.split, self.simplifications, self.listed = split, simplifications, listed
        self.jar = Path(JAR_PATH) if data is None else Path(data) / "scienceworld.jar"
        hash_of(self.jar)
        self._ids = task_ids(split)
        self._simulator: Simulator | None = None
        self._task_id = self._ids[0]
        self._forget()

    def _forget(self) -> None:
        self._played: tuple[str, ...] = ()
        self._seen = self._description = ""
        self._score = 0.0
        self._valid: tuple[str, ...] | None = None
        self._gold: tuple[str, ...] | None = None

    def task_ids(self) -> Sequence[str]:
        return self._ids

    def task_of(self, task_id: str) -> Task:
        """Known without the simulator, so that panels of thousands are compared in a second."""
        if task_id not in self._ids:
            raise TaskError(f"{ENV_ID}: unknown task {task_id!r} in split {self.split}")
        return task_of(task_id, self.split, self.simplifications, self.jar)

    @property
    def task(self) -> Task:
        return task_of(self._task_id, self.split, self.simplifications, self.jar)

    @property
    def score(self) -> float:
        return self._score

    @property
    def success(self) -> bool:
        return self._score == 1.0

    @property
    def statement(self) -> str:
        return self._description

    def admissible(self) -> tuple[str, ...] | None:
        return self._possible() if self.listed and self._simulator is not None else None

    def canonical(self, action: str) -> str:
        """The simulator minds neither case nor blanks."""
        return " ".join(action.lower().split())

    def check(self, action: str) -> str | None:
        """By the grammar alone. The simulator takes more than it lists, and its expert uses it."""
        if _ACTION.fullmatch(action) or (action.isdecimal() and self._seen.startswith(_QUESTION)):
            return None
        return f"no action begins like {action[:40]!a}"

    def sample_action(self, rng: np.random.Generator) -> str:
        possible = self._possible()
        return possible[int(rng.integers(len(possible)))]

    def expert_action(self) -> str | None:
        """The next action of the simulator's gold path; None once another one was played."""
        if self._gold is None:
            # it is made when a task is loaded, so the episode is loaded again, and played on to where it was
            self._run(self._played, with_gold=True)
            self._gold = tuple(map(self.canonical, self._process().gold()))
        turn = len(self._played)
        return self._gold[turn] if turn < len(self._gold) and self._gold[:turn] == self._played else None

    def _begin(self, task_id: str) -> str:
        self._task_id = task_id
        self._forget()
        return self._run(())

    def _run(self, actions: Sequence[str], *, with_gold: bool = False) -> str:
        """Begins the task, plays `actions` and returns what was seen first."""
        simulator = self._process()
        name, _, number = self._task_id.partition("/")
        seen = simulator.begin(name, int(number), self.simplifications, with_gold=with_gold)
        self._description = simulator.description()
        first = self._seen = f"{self._description}\n\n{seen}"
        for action in actions:
            self._seen = simulator.step(action)
        self._score, self._valid = max(0.0, simulator.score()), None
        return first

    def _apply(self, action: str) -> Outcome:
        if self.check(action) is not None:
            return Outcome(observation=_UNKNOWN, verdict=Verdict.INADMISSIBLE)
        simulator = self._process()
        self._seen = simulator.step(action)
        # what the simulator did not know, too: it takes back a question
        self._played, self._valid = (*self._played, action), None
        if self._seen == _UNKNOWN:
            return Outcome(observation=_UNKNOWN, verdict=Verdict.INADMISSIBLE)
        before, now = self._score, simulator.score()
        self._score = max(0.0, now)
        over = now < 0 or simulator.completed()
        return Outcome(observation=self._seen, reward=self._score - before, terminated=over)

    def _get_state(self) -> Any:
        return {"played": list(self._played), "seen": self._seen}

    def _set_state(self, state: Any) -> None:
        require_shape(state, {"played": [str], "seen": str})
        self._played = tuple(state["played"])
        self._run(self._played)
        if self._seen != state["seen"]:
            raise ValueError("the simulator went another way when the actions were played again")

    def _possible(self) -> tuple[str, ...]:
        if self._valid is None:
            self._valid = self._process().valid()
        return self._valid

    def _process(self) -> Simulator:
        if self._simulator is None:
            self._simulator = Simulator(self.jar)
        return self._simulator

    def _close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
        self._simulator = None

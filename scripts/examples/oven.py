"""An environment with three typed tools, whose actions are calls (docs/write_an_environment.md).

turngym rollout --env turngym.scripts.examples.oven:example/Oven-v0 --agent expert --out oven.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from turngym.core import Argument, Task, TaskError, Tool, ToolSet, Verdict, content_hash, tool_call
from turngym.envs import Outcome, TextEnv, register, require_shape

DISHES = ("bread", "cake", "pizza")
DEGREES = range(150, 260, 10)
DISH = Argument(name="dish", description="What it is about.", choices=DISHES)


class OvenEnv(TextEnv):
    """Bake a dish as its recipe says. Baking ends the episode.

    The return is 1.0 at most: 0.25 for the right recipe, 0.25 for an oven as it says, each once, 0.5 for the right dish
    from such an oven. An end alone would tell a beginner nothing: in a group that bakes wrong throughout nobody did
    better than the others.
    """

    env_id = "example/Oven-v0"
    tool: ClassVar[ToolSet] = ToolSet(
        tools=(
            Tool(name="read_recipe", description="Read how a dish is baked.", arguments=(DISH,)),
            Tool(
                name="heat",
                description="Heat the oven.",
                arguments=(
                    Argument(name="degrees", description="In Celsius.", type="integer"),
                    Argument(
                        name="fan", description="Whether it runs; off if left out.", type="boolean", required=False
                    ),
                ),
            ),
            Tool(name="bake", description="Bake a dish in the hot oven.", arguments=(DISH,)),
        ),
        examples=(tool_call("read_recipe", dish="cake"), tool_call("heat", degrees=180, fan=True)),
    )
    instructions = "You have an oven and a book of recipes. Read the recipe, heat the oven as it says, then bake."

    def __init__(self, *, split: str = "train", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        if split not in ("train", "eval"):
            raise TaskError(f"split is {split!r}; splits are 'train' and 'eval'")
        self.split = split
        self.dish, self.degrees, self.fan = DISHES[0], DEGREES[0], False
        self.oven: tuple[int, bool] | None = None
        self.known = self.heated = self.right = False

    def task_ids(self) -> Sequence[str]:
        """Every fourth task is kept for evaluation."""
        ids = [f"{dish}/{degrees}/{fan}" for dish in DISHES for degrees in DEGREES for fan in ("fan", "still")]
        return [task for index, task in enumerate(ids) if (index % 4 == 3) == (self.split == "eval")]

    @property
    def task(self) -> Task:
        task_id = f"{self.dish}/{self.degrees}/{'fan' if self.fan else 'still'}"
        sha256 = content_hash({"dish": self.dish, "degrees": self.degrees, "fan": self.fan})
        return Task(env_id=self.env_id, task_id=task_id, sha256=sha256, split=self.split, category=self.dish)

    @property
    def success(self) -> bool:
        return self.right

    @property
    def score(self) -> float:
        return 0.25 * self.known + 0.25 * self.heated + 0.5 * self.right

    def check(self, action: str) -> str | None:
        name, _ = self.tool.call(action)
        return "the oven is cold" if name == "bake" and self.oven is None else None

    def expert_action(self) -> str:
        if self.oven == (self.degrees, self.fan):
            return tool_call("bake", dish=self.dish)
        if self.known:
            return tool_call("heat", degrees=self.degrees, fan=self.fan)
        return tool_call("read_recipe", dish=self.dish)

    def plausible_mistake(self, rng: np.random.Generator) -> str:
        """A recipe that nobody asked for, or an oven that is not as the recipe says."""
        if not self.known:
            return tool_call("read_recipe", dish=str(rng.choice([dish for dish in DISHES if dish != self.dish])))
        degrees = int(rng.choice([degrees for degrees in DEGREES if degrees != self.degrees]))
        return tool_call("heat", degrees=degrees, fan=self.fan)

    def _begin(self, task_id: str) -> str:
        self.dish, degrees, fan = task_id.split("/")
        self.degrees, self.fan = int(degrees), fan == "fan"
        self.oven = None
        self.known = self.heated = self.right = False
        return f"Bake a {self.dish}."

    def _apply(self, action: str) -> Outcome:
        if self.check(action) is not None:
            return Outcome(observation=self.invalid_observation, verdict=Verdict.INADMISSIBLE)
        name, arguments = self.tool.call(action)
        before = self.score
        if name == "heat":
            self.oven = arguments["degrees"], arguments.get("fan", False)
            self.heated |= self.oven == (self.degrees, self.fan)
            return Outcome(observation="The oven is hot.", reward=self.score - before)
        if name == "bake":
            self.right = arguments["dish"] == self.dish and self.oven == (self.degrees, self.fan)
            text = "Delicious." if self.right else "That was wrong."
            return Outcome(observation=text, reward=self.score - before, terminated=True)
        if arguments["dish"] != self.dish:
            return Outcome(observation="There is no such recipe.", verdict=Verdict.NO_EFFECT)
        self.known = True
        text = f"{self.degrees} degrees, the fan {'on' if self.fan else 'off'}."
        return Outcome(observation=text, reward=self.score - before)

    def _get_state(self) -> Any:
        return self.known, self.oven, self.heated, self.right

    def _set_state(self, state: Any) -> None:
        require_shape(state, [bool, (list, tuple, type(None)), bool, bool])
        self.known, oven, self.heated, self.right = state
        if oven is not None:
            require_shape(oven, [int, bool])
        self.oven = None if oven is None else (oven[0], oven[1])


register("example/Oven-v0", OvenEnv, max_turns=10)

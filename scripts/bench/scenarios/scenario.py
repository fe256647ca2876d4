"""What a scenario is: a place with two panels, a start, a method and the control that its claim is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.scripts.bench.learn.recipes import Imitation, Recipe

Measure = Literal["success", "text", "critic"]
"""What the report shows beside success: nothing; nats per token of held-out text; the critic's explained variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a scenario plays, and the tasks that its settings were chosen on and that it is reported on."""

    name: str
    """Of its folder and panels."""
    world: str
    """Embedded world whose environment and models these are."""
    make: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of gym.make in place of the world's."""
    max_turns: int | None = None
    """In place of the world's."""
    evaluated: Mapping[str, Any]
    """Arguments of gym.make that only evaluations have: the split or part that training never plays."""
    chosen: tuple[str, ...]
    """Tasks that settings were chosen on, with seed 0."""
    reported: tuple[str, ...]
    """Tasks that nothing was chosen on; reported with seeds 1, 2, ..."""

    def opened(self) -> EmbeddedWorld:
        """The world with what is otherwise here."""
        world = load_world(self.world)
        return replace(world, make={**world.make, **self.make}, max_turns=self.max_turns or world.max_turns)

    def panel_make(self) -> dict[str, Any]:
        """Arguments of gym.make that belong to its panels."""
        world = self.opened()
        return {"split": world.split, **world.make, "max_turns": world.max_turns, **self.evaluated}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the runs of a scenario begin with."""

    name: str
    imitation: Imitation | None = None
    """Comes before; without it the runs begin with the world's student."""
    words: tuple[str, ...] = ()
    """Further options of that run."""
    text: bool = False
    """Whether the model also learns to model text while it imitates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a scenario."""

    name: str
    recipe: Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One claim of a paper, put where it should show."""

    name: str
    claim: str
    """What its paper promises, in a sentence."""
    place: Place
    start: Start
    method: Arm
    control: Arm
    others: tuple[Arm, ...] = ()
    """Further rows, compared with the control as well."""
    words: tuple[str, ...] = ()
    """Options of `turngym train` that all arms have; their own come after them."""
    steps: int
    episodes: int = 64
    """Per step."""
    measure: Measure = "success"

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The control first: the others are compared with it."""
        return (self.control, self.method, *self.others)

    def recipe(self, arm: Arm) -> Recipe:
        """With the words that all arms have, and what it is compared with."""
        control = None if arm is self.control else self.row(self.control)
        return replace(arm.recipe, words=(*self.words, *arm.recipe.words), control=control)

    def row(self, arm: Arm) -> str:
        """Its name in tables that hold several scenarios."""
        return f"{self.name}: {arm.name}"

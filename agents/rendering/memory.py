"""What stands in the prompt of a turn: which part of an episode is shown, and in which messages.

The whole conversation (`all`), or one prompt a turn that holds the last N turns (`window:N`, `verl-agent:N`) or a
transcript (`react`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from turngym.agents.rendering.verl_agent_prompts import PromptTemplates
from turngym.core.errors import AgentError, TurngymError, did_you_mean

T = TypeVar("T")
WINDOW = re.compile(r"(?:window|verl-agent):[0-9]{1,6}")
NO_ACTION = "(no action could be read)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """A turn that was played."""

    observation: str
    """The observation that the agent was shown."""
    response: str
    action: str | None
    """The action read from the response; None if there was none."""
    listing: str = ""
    """The list of admissible actions at the end of the observation. It holds for its own turn only."""
    thought: str = ""
    """The agent's thought; "" if there was none."""

    @property
    def bare(self) -> str:
        """The observation without its list."""
        return without(self.observation, self.listing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An episode in front of the task, as the agent is shown it."""

    turns: tuple[tuple[str, str], ...]
    """(observation, response) pairs."""
    final: str
    """The observation after the last response."""
    category: str = ""
    """The category of the tasks in whose prompts it stands; empty: in all."""

    @property
    def text(self) -> str:
        return "\n".join(part for turn in self.turns for part in turn)


def by_category(examples: Iterable[Example]) -> dict[str, tuple[Example, ...]]:
    """Category -> its examples; "" -> those of all tasks."""
    groups: dict[str, tuple[Example, ...]] = {"": ()}
    for example in examples:
        groups[example.category] = (*groups.get(example.category, ()), example)
    return groups


def of_category(groups: Mapping[str, T], category: str) -> T:
    """What `groups` (by category, "" for all tasks) hold for a task. Raises AgentError if all of it is for others."""
    categories = sorted(groups.keys() - {""})
    if categories and category not in groups:
        raise AgentError(
            f"--examples.shown-for category: no example is of category {category!r}; there are {', '.join(categories)}"
        )
    return groups[category if categories else ""]


def without(observation: str, listing: str) -> str:
    """`observation` without the `listing` in it. Text that a wrapper wrote behind the listing stays."""
    before, _, after = observation.rpartition(listing) if listing else ("", "", observation)
    return before + after


def require_memory(name: str) -> None:
    """Raises TurngymError for a `name` that is none of a `Memory`'s."""
    if name not in ("all", "react") and WINDOW.fullmatch(name) is None:
        hint = did_you_mean(name, ("all", "window:2", "react", "verl-agent:2"))
        raise TurngymError(f"memory {name!r} is unknown; valid: all, window:N, react, verl-agent:N.{hint}")


@dataclass(frozen=True, slots=True)
class Memory:
    """Which part of an episode stands in the prompt of a turn. Raises TurngymError for a `name` that is none of these.

    - `all`: the whole conversation, every observation and every response in a message of its own.
    - `window:N`: one user message a turn, with the task, the last N observations and their actions, and the current
      observation.
    - `verl-agent:N`: one user message a turn, `templates` filled with the task, the last N observations and their
      actions, the current observation, and the actions that are admissible now.
    - `react`: one user message a turn, with the first observation, then every thought, action and observation under its
      number. The form is that of ReAct's prompts for questions (docs/presets.md).

    One message a turn has no earlier lists of admissible actions; with `window:N` and `react` the first turn's is the
    first observation alone.
    """

    name: str
    templates: PromptTemplates | None = None
    """Templates of the memory `verl-agent:N`."""

    def __post_init__(self) -> None:
        require_memory(self.name)
        if self.templated != (self.templates is not None):
            need = "needs templates" if self.templated else "takes no templates"
            raise TurngymError(
                f"memory {self.name!r} {need}: --memory verl-agent:N goes with --prompts own|CHECKOUT, which "
                "--preset verl-agent sets, too"
            )

    @property
    def templated(self) -> bool:
        return self.name.startswith("verl-agent:")

    def prompt(
        self, task: str, past: Sequence[PastTurn], observation: str, admissible: Sequence[str] | None = None
    ) -> str | None:
        """The only user message of this turn, or None if the conversation goes on with `observation`.

        Args:
            task: the environment's statement of the task, or the first observation if it has none.
            admissible: possible actions; None for an environment with open ones.
        """
        if self.name == "all":
            return None
        length = self.name.partition(":")[2]
        if self.templates is not None:
            turns = [(turn.bare, turn.action or "") for turn in past]
            return self.templates.prompt(int(length), task, turns, observation, admissible)
        if not past:
            return observation
        if self.name == "react":
            return _transcript(past, observation)
        return _window(int(length), task, past, observation)


def _window(length: int, task: str, past: Sequence[PastTurn], observation: str) -> str:
    recent = past[max(0, len(past) - length) :]
    lines = [task, "", f"Turns taken: {len(past)}." + (f" The last {len(recent)}, oldest first:" if recent else "")]
    for number, turn in enumerate(recent, start=len(past) - len(recent) + 1):
        lines += [f"Observation {number}: {turn.bare}", f"Action {number}: {_one_line(turn)}"]
    return "\n".join((*lines, "", f"Now turn {len(past) + 1}. Observation {len(past) + 1}: {observation}"))


def _transcript(past: Sequence[PastTurn], observation: str) -> str:
    lines = [past[0].bare]
    for number, turn in enumerate(past, start=1):
        lines += [f"Thought {number}: {turn.thought}"] if turn.thought else []
        lines.append(f"Action {number}: {_one_line(turn)}")
        following = past[number].bare if number < len(past) else observation
        lines.append(f"Observation {number}: {following.strip()}")
    return "\n".join(lines)


ALL = Memory("all")


def chat_messages(
    memory: Memory,
    system: str,
    task: str,
    past: Sequence[PastTurn],
    observation: str,
    admissible: Sequence[str] | None = None,
) -> list[dict[str, str]]:
    """The prompt of a turn as chat messages (system, user, assistant, user, ...), for agents that take text."""
    opening = [{"role": "system", "content": system}] if system else []
    prompt = memory.prompt(task, past, observation, admissible)
    if prompt is not None:
        return [*opening, {"role": "user", "content": prompt}]
    replies = [
        {"role": role, "content": text}
        for turn in past
        for role, text in (("user", turn.observation), ("assistant", turn.response))
    ]
    return [*opening, *replies, {"role": "user", "content": observation}]


def _one_line(turn: PastTurn) -> str:
    return NO_ACTION if turn.action is None else " ".join(turn.action.split())

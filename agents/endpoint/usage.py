"""What the answers of an endpoint used: tokens and cost, noted in each episode and summed for the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from turngym.core.episode import Episode
from turngym.core.errors import AgentError
from turngym.core.plugin_values import LARGEST_VALUE
from turngym.core.setting import fields_of
from turngym.core.spec import Spec, read, to_table
from turngym.core.tables import Table

NOTE = "usage"
"""The key of `Usage` in an episode's `meta`."""
PROFILE = "endpoint"
"""The key of the server's profile in an episode's `meta`, and in the settings of results."""
MOST_NOTICED = 100
"""Different things that are counted in answers; a server that invents a new field for each answer ends there."""
Counted = Annotated[int, Meta(ge=0, le=1 << 53)]
Spent = Annotated[float, Meta(ge=0, le=LARGEST_VALUE)]


class Usage(Spec):
    """What some answers used. Tokens are counted by the server. Answers that broke off were paid for, too: their tokens
    are included."""

    answers: Counted = 0
    unreported: Counted = 0
    """Answers whose server did not report their usage, or only a part of it."""
    prompt_tokens: Counted = 0
    cached_tokens: Counted = 0
    """Prompt tokens that the server had in its cache."""
    completion_tokens: Counted = 0
    """Tokens of the answers, reasoning included."""
    reasoning_tokens: Counted = 0
    """Tokens of the reasoning, if the server reports them."""
    cut_off: Counted = 0
    """Answers that ended at the limit of tokens."""
    filtered: Counted = 0
    """Answers that the service's filter took back or cut, or prompts that it refused."""
    retries: Counted = 0
    """Number of requests that were sent again."""
    refused: Counted = 0
    """Requests that were refused although others were answered; each ended its episode as an error."""
    stalled: Counted = 0
    """Answers to prompts that the server seems to have cut."""
    cost: Spent | None = None
    """Cost in the currency of the prices; None without prices."""
    noticed: Mapping[str, Counted] = msgspec.field(default_factory=dict)
    """Answers by what nobody here knows in them, and by what contradicts itself (`Noticed`)."""

    def __add__(self, other: Usage) -> Usage:
        names = [field.name for field in fields_of(Usage) if field.name not in ("cost", "noticed")]
        costs = [side.cost for side in (self, other) if side.cost is not None]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        noticed = dict(self.noticed)
        for name, count in other.noticed.items():
            if name in noticed or len(noticed) < MOST_NOTICED:
                noticed[name] = noticed.get(name, 0) + count
        return Usage(**sums, cost=sum(costs) if costs else None, noticed=noticed)

    def to_json(self) -> dict[str, Any]:
        """The fields that are known."""
        return {name: value for name, value in to_table(self).items() if value not in (None, {})}

    @classmethod
    def noted(cls, episode: Episode) -> Usage | None:
        """The usage in an episode's record; None if it has none. Fields of later versions are left out.

        Raises SettingsError for a number that no server can have counted: anybody may have written the record.
        """
        note, names = episode.meta.get(NOTE), {field.name for field in fields_of(cls)}
        if not isinstance(note, Mapping):
            return None
        fields = {name: value for name, value in note.items() if name in names}
        return read(cls, fields, f"the usage of task {episode.task.task_id}, sample {episode.sample}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a million tokens."""

    prompt: float
    cached: float
    completion: float

    @classmethod
    def of(cls, prompt: float | None, cached: float | None, completion: float | None) -> Prices | None:
        """The prices; None if none is given. Raises AgentError if only one of the two needed prices is given."""
        if prompt is None and completion is None and cached is None:
            return None
        if prompt is None or completion is None:
            missing = "--price-in" if prompt is None else "--price-out"
            raise AgentError(f"a cost needs both --price-in and --price-out; {missing} is missing")
        return cls(prompt=prompt, cached=prompt if cached is None else cached, completion=completion)

    def cost(self, usage: Usage) -> float:
        """Cost of the reported tokens."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        spent = self.prompt * fresh + self.cached * usage.cached_tokens + self.completion * usage.completion_tokens
        return spent / 1_000_000


def usage_of(episodes: Iterable[Episode]) -> Usage | None:
    """The sum over all episodes that have a usage; None if none has."""
    noted = [used for episode in episodes if (used := Usage.noted(episode)) is not None]
    return sum(noted, start=Usage()) if noted else None


def usage_table(used: Mapping[str, Usage | None]) -> list[Table]:
    """A list with one table, a row for each run by its name; empty if no usage is known."""
    reported = {name: usage for name, usage in used.items() if usage is not None and usage.answers}
    priced = any(usage.cost is not None for usage in reported.values())
    header = ["run", "prompt tokens", "completion tokens", *(["cost"] if priced else [])]
    rows = [
        [
            *(name, f"{usage.prompt_tokens:,}", f"{usage.completion_tokens:,}"),
            *(["-" if usage.cost is None else f"{usage.cost:.4f}"] if priced else []),
        ]
        for name, usage in reported.items()
    ]
    return [(header, rows)] if rows else []

"""From demonstrations to jobs: what is replayed before a student plays, and where a response is cut."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from turngym.agents.agent import AgentError
from turngym.agents.demonstrations.filters import USED, DemonstrationFilter, left_out
from turngym.agents.demonstrations.sources import Demonstrator, RecordedDemonstrator
from turngym.agents.rendering.shown import Ids, Shown, begun_response
from turngym.agents.rendering.text_episodes import TextEpisodes
from turngym.agents.rollout import Job
from turngym.envs.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A demonstration of one job, as the student can replay it."""

    turns: tuple[str | Shown, ...] = ()
    """Actions where the student has no tokens."""
    reason: str = USED
    """Why there is none; `used` where there is."""
    sha256: str = ""
    """Hash of the task that was demonstrated."""

    @property
    def exact(self) -> bool:
        """Whether every response is replayed as the ids that the demonstrator drew."""
        return bool(self.turns) and all(isinstance(turn, Shown) and turn.exact for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class Demonstrations:
    """Demonstrations of a step's jobs: asked for, filtered, and written as the student would have said them."""

    source: Demonstrator
    keep: DemonstrationFilter = field(default_factory=DemonstrationFilter)
    writer: TextEpisodes | None = None
    """Writes responses as the student's ids; None: actions are replayed."""
    name: str = ""
    """Who demonstrates, for the line that says what was left out."""
    _said: bool = False

    def tasks(self, known: Sequence[str]) -> list[str]:
        """Those of `known` that were demonstrated. Raises AgentError for who demonstrates live: that could be any."""
        if not isinstance(self.source, RecordedDemonstrator):
            raise AgentError("--demonstrated-tasks plays the tasks of a trace file: name one with --demonstrations")
        return [task for task in known if task in self.source.by_task]

    def episodes(self, jobs: Sequence[Job]) -> list[tuple[Episode | None, str]]:
        """The demonstration of each job, and why it is left out or that it is `used`."""
        if not jobs:
            return []
        shown = self.source(jobs)
        found = [(one, "missing" if one is None else self.keep.reason(one)) for one in shown]
        counts = Counter(reason for _, reason in found)
        if self.name and not self._said and counts[USED] < len(found):
            # once: what later steps leave out is in their metrics
            self._said = True
            print(f"{self.name}, first step: {left_out(counts)}", file=sys.stderr)
        return found

    def plans(self, jobs: Sequence[Job]) -> list[Plan]:
        """A plan for each job; an empty one says why."""
        return [self._plan(episode, reason) for episode, reason in self.episodes(jobs)]

    def _plan(self, episode: Episode | None, reason: str) -> Plan:
        if episode is None or reason != USED:
            return Plan(reason=reason)
        if self.writer is None:
            return Plan(turns=tuple(turn.action for turn in episode.turns if turn.action is not None))
        turns = tuple(self.writer.shown(episode, turn) for turn in episode.turns)
        return Plan(turns=turns, sha256=episode.task.sha256)

    def begun(self, job: Job, plan: Plan, ratio: float, unit: Literal["turns", "tokens"] = "turns") -> Job:
        """`job` with the first `ratio` of the plan before it; of turns at least one, of tokens int(ratio L)."""
        if not plan.turns or ratio <= 0:
            return job
        if unit == "turns":
            return replace(job, demonstration=plan.turns[: max(1, int(len(plan.turns) * ratio))], sha256=plan.sha256)
        turns, begun = self._cut(plan.turns, ratio)
        return replace(job, demonstration=turns, begun=begun, sha256=plan.sha256)

    def _cut(self, turns: Sequence[str | Shown], ratio: float) -> tuple[tuple[Shown, ...], Ids]:
        """Whole turns, and the ids of the next one that are left of the first `ratio` of all responses' ids."""
        writer, shown = self.writer, [turn for turn in turns if isinstance(turn, Shown)]
        if writer is None:
            raise AgentError("a prefix in tokens needs the student's tokens; this student plays in text")
        left = int(ratio * sum(len(turn.ids) for turn in shown))
        whole: list[Shown] = []
        for turn in shown:
            if left < len(turn.ids):
                ids, over = begun_response(writer.renderer, turn, left, writer.channel.stop_text)
                # the action stands there: the policy would only have to end
                return ((*whole, replace(turn, ids=ids)), ()) if over else (tuple(whole), ids)
            whole.append(turn)
            left -= len(turn.ids)
        return tuple(whole), ()


def noted(episode: Episode, reason: str, *, exact: bool = False) -> Episode:
    """`episode` with what became of its demonstration in `meta`, for the metrics."""
    more = {"demonstration": reason, "demonstration_exact": exact}
    return replace(episode, meta={**episode.meta, **more})

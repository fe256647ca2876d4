"""The seam between a trainer and whoever plays for it: what the rollout side is told, and what it offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from turngym.envs.episode import Episode
from turngym.envs.protocols import Collect, CollectRequest, EvalPoint, Judge, Question, Scorer, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedModel:
    """A model that plays, with its tokenizer; `weights` reads what it has now."""

    model: Any
    tokenizer: Any
    weights: WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentRun:
    """What the rollout side is told about a run."""

    folder: Path
    """Of the untrained student."""
    out: Path
    """Of the run."""
    learner: PlayedModel
    """The student: evaluations are always its own."""
    actor: PlayedModel | None = None
    """A copy that plays ahead while the student learns; None: the student plays."""
    teacher: Path | None = None
    seed: int = 0
    episodes: int = 0
    """That the whole run is to play; 0: unknown."""
    max_turns: int = 50
    explicit_turns: bool = False
    """Whether `max_turns` was asked for; else a panel's own limit goes before it."""
    device: str = "auto"
    reward: str | None = None
    """The run's own reward, as `--reward` names it."""
    collects: Literal["student", "expert"] = "student"
    """Who plays the episodes of a step."""
    judge: Question | None = None
    """What a judge is asked about their turns."""
    hint_position: Literal["last_user", "last_message"] = "last_user"


class Rollouts(Protocol):
    """The rollout side of one run. Closed when the run is over."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Flat, JSON-able: what a resumed run must share."""

    @property
    def evaluate(self) -> Callable[[int], EvalPoint] | None:
        """Evaluates the learner after a step; None where the run has no panel."""

    @property
    def servers(self) -> Any:
        """Engine servers that the processes of a run share (`trainers.distributed.run.SharedServers`), or None."""

    @property
    def players(self) -> str:
        """Who plays the episodes, in words, for those who read the run's settings."""

    @property
    def next_role(self) -> str:
        """The role in which the policy sees observations."""

    @property
    def judge_unread(self) -> float:
        """Share of the judge's votes that may be unreadable before the run stops."""

    def teacher(self, size: int, temperature: float) -> tuple[Scorer, int] | None:
        """A teacher on servers, for a student of `size` ids, and how many ids both know; None where none is named."""

    def recorded(self) -> list[Episode] | None:
        """Episodes to train on instead of playing; None: they are played."""

    def collect(self, teacher: Any, share: float, *, guided: bool = False) -> Collect:
        """Plays the episodes of a step; `teacher`, a model, chooses a `share` of the tokens, if that is not 0.

        Where `guided`, it plays whole turns: as many as each request says.
        """

    def judge(self) -> Judge:
        """Judges the turns of the episodes."""

    def add_hints(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The judged episodes with their hints in their prompts (`hint_prompt_ids`)."""

    def keep_judged(self, request: CollectRequest, episodes: Sequence[Episode]) -> None:
        """Keep a step's judged episodes, to read."""

    def learner_changed(self, version: int) -> None:
        """The learner has new weights."""

    def actor_changed(self, version: int) -> None:
        """The actor has new weights."""

    def cancel(self) -> None:
        """Break off what is being played."""

    def save_settings(self, folder: Path) -> None:
        """Write beside saved weights how the model wants to be spoken to."""

    def close(self) -> None:
        """End worker processes and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProvider:
    """What a package offers that plays for trainers: the class of its settings, and how it is opened with them."""

    config: type[Any]
    open: Callable[[Any, StudentRun], Rollouts]
    has_teacher: Callable[[Any], bool]
    """Whether the settings name a teacher on servers."""
    max_turns: Callable[[Any], int | None] = lambda config: None
    """The limit of turns that the settings bring along, for runs that are given none."""
    has_traces: Callable[[Any], bool] = lambda settings: False
    """Whether the settings name recorded episodes to train on."""
    env_id: Callable[[Any], str] = lambda config: ""
    """Gymnasium id of what is played; empty where that is none."""

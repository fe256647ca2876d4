"""Turn and Episode: one played task as token segments with turn-indexed spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import Task, Verdict

Span = tuple[int, int]
"""Half-open range of positions in a segment's token ids."""
Origin = Literal["policy", "demonstration", "noise"]
"""Who chose a response: the policy, a demonstrator, or injected noise (never trained on)."""


class Status(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    TRUNCATED_TURNS = "truncated_turns"
    """The environment's own limit of turns."""
    TRUNCATED_TOKENS = "truncated_tokens"
    """The context was full."""
    TRUNCATED_DEPTH = "truncated_depth"
    """A trainer's depth cap: trains, but says nothing about success."""
    ERROR_ENV = "error_env"
    ERROR_ENGINE = "error_engine"
    ERROR_TIMEOUT = "error_timeout"

    @property
    def is_error(self) -> bool:
        return self.value.startswith("error_")


SHORT = "short_turns"
"""In `meta` of an episode whose depth cap was its own, below that of its step (TurnOPD's partial probes): that cap."""


class EpisodeError(TurngymError):
    """An episode whose parts contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """A teacher's K most likely ids for each response token: `ids` int32 [R, K], `logp` float32 [R, K]."""

    ids: NDArray[np.int32]
    logp: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One observation, the agent's response to it, and what the environment made of it.

    Spans index the ids of segment `segment`: `prompt_span` covers the ids that this turn added before the response
    (template, observation, generation prompt), `response_span` the R ids of the response. Text-only agents leave
    both empty.
    """

    index: int
    """0-based."""
    observation: str
    admissible: tuple[str, ...] | None
    """What was admissible when the agent answered; None where any text may be (open action spaces)."""
    response: str
    action: str | None
    """The action read from the response; None when malformed."""
    verdict: Verdict
    reward: float
    segment: int = 0
    prompt_span: Span = (0, 0)
    response_span: Span = (0, 0)
    logprobs: NDArray[np.float32] | None = None
    """Behavior log-probabilities of the sampled ids, as sampled (temperature included), float32 [R]; or None."""
    finish: str = "stop"
    """Why generation ended: `stop`, `length`, `scripted`, `aborted`."""
    policy_version: int = 0
    """Of the weights that drew the response; the oldest of them, where they changed while it was drawn."""
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """(policy version, start, end) of each stretch of response ids, in order, where more than one version drew them."""
    origin: Origin = "policy"
    begun: int = 0
    """The first so many ids of the response are a demonstrator's, where the policy was made to go on from there."""
    progress: float | None = None
    """The environment's own measure after the turn, in [0, 1]: share of goals met, else its score; None if unknown."""
    judge_votes: tuple[str | None, ...] | None = None
    """What a judge wrote about the turn, vote by vote; None stands for a vote that failed."""
    judge_cut: int = 0
    """How many of the votes ended at the judge's limit on tokens."""
    judge_scores: tuple[float, ...] | None = None
    """The votes that could be read. None means never scored; a score of 0.0 was scored."""
    hint: str | None = None
    """What a judge would have told the policy, knowing what came next."""
    hint_prompt_ids: NDArray[np.int32] | None = None
    """int32 [P]: the turn's prompt with `hint` in it, for a teacher; its length is independent of `prompt_span`."""
    excluded: str | None = None
    """Why the turn is not trained on although the policy chose it; None where it may be. Its ids stay inputs."""
    teacher: TopK | None = None

    @property
    def response_length(self) -> int:
        return self.response_span[1] - self.response_span[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One played task. Checked on construction: turns contiguous, spans ordered and disjoint, rows aligned."""

    task: Task
    seed: int
    sample: int
    """0-based number of this attempt at the task."""
    group: int
    """Attempts that are compared with each other (GRPO groups) share it."""
    segments: tuple[NDArray[np.int32], ...]
    """Token ids; one array unless the history was rewritten. Empty for text-only agents."""
    turns: tuple[Turn, ...]
    status: Status
    success: bool
    episode_return: float
    """Sum of rewards."""
    score: float = 0.0
    """The environment's own graded score in [0, 1] at the end."""
    system: str = ""
    """The system message the agent saw."""
    final_observation: str = ""
    """What the environment said after the last turn."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`env`, `generate`); informative, never part of equality of runs."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able extras: agent name, temperature, error text."""

    def __post_init__(self) -> None:
        cursor = [0] * len(self.segments)
        segment = 0
        for position, turn in enumerate(self.turns):
            where = f"episode {self.task.task_id} sample {self.sample}, turn {position}"
            if turn.index != position:
                raise EpisodeError(f"{where}: index is {turn.index}; turns must count 0, 1, 2, ...")
            if turn.response_span == (0, 0) and turn.prompt_span == (0, 0):
                continue
            segment = _check_segment(turn, segment, len(self.segments), where)
            cursor[segment] = _check_spans(turn, cursor[segment], len(self.segments[segment]), where)

    @property
    def depth(self) -> int:
        """Number of turns."""
        return len(self.turns)

    def prompt_ids(self, turn: Turn) -> NDArray[np.int32]:
        """Everything the policy saw before `turn`'s response: int32 [P]."""
        return self.segments[turn.segment][: turn.response_span[0]]

    def response_ids(self, turn: Turn) -> NDArray[np.int32]:
        """The ids of `turn`'s response: int32 [R]."""
        return self.segments[turn.segment][slice(*turn.response_span)]


def _check_segment(turn: Turn, current: int, count: int, where: str) -> int:
    if not current <= turn.segment < count:
        raise EpisodeError(
            f"{where}: segment {turn.segment} is not in {current}..{count - 1}; segments only go forward"
        )
    return turn.segment


def _check_spans(turn: Turn, cursor: int, length: int, where: str) -> int:
    (p0, p1), (r0, r1) = turn.prompt_span, turn.response_span
    if not cursor <= p0 <= p1 <= r0 <= r1 <= length:
        raise EpisodeError(
            f"{where}: prompt span {turn.prompt_span} and response span {turn.response_span} must be ordered, disjoint "
            f"and within {cursor}..{length}"
        )
    if not 0 <= turn.begun <= r1 - r0:
        raise EpisodeError(f"{where}: {turn.begun} ids are said to be begun, of a response of {r1 - r0} tokens")
    rows = {"logprobs": turn.logprobs, "teacher.ids": None if turn.teacher is None else turn.teacher.ids}
    for name, values in rows.items():
        if values is not None and len(values) != r1 - r0:
            raise EpisodeError(f"{where}: {name} has {len(values)} rows for a response of {r1 - r0} tokens")
    return r1


def next_state(episode: Episode, turn: Turn) -> str | None:
    """What followed `turn`: the next observation, or what the environment said last; None where nothing did."""
    following = turn.index + 1
    if following < episode.depth:
        return episode.turns[following].observation
    return episode.final_observation or None

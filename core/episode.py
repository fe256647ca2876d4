"""Turn and Episode: one played task as token segments, with the span of every turn in them.

    segment 0   [ system, task, turn 0's prompt | turn 0's response | turn 1's prompt | turn 1's response ]
                  prompt_span of turn 0           response_span       prompt_span       response_span

The ids of a segment only grow: a turn appends its observation and its response. A second segment begins where the
history was rewritten. Agents that have no token ids leave `segments` empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import TurngymError
from turngym.core.numbers import FINITE
from turngym.core.plugin_values import checked_number
from turngym.core.redaction import brief
from turngym.core.task import Task, Verdict

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that tables and arrays can hold."""
Span = tuple[int, int]
"""Half-open range of positions in the token ids of a segment."""
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
    """A trainer's depth cap ended it: it can be trained on, but says nothing about success."""
    ERROR_ENV = "error_env"
    ERROR_ENGINE = "error_engine"
    ERROR_TIMEOUT = "error_timeout"

    @property
    def is_error(self) -> bool:
        return self.startswith("error_")

    @property
    def is_cut(self) -> bool:
        """Whether a limit (of turns, tokens or depth) broke the episode off before it had come to an end."""
        return self.value.startswith("truncated_")


Outcome = Literal["won", "lost", "error"]
"""How an episode is shown: one that ended in an error was not lost, and says nothing of its player."""


def outcome_of(status: str, success: bool) -> Outcome:
    """The word that tables and pages show for an episode of this status and success."""
    return "error" if status.startswith("error_") else "won" if success else "lost"


SHORT = "short_turns"
"""Key in `meta` for the depth cap of an episode that had a smaller one than its step (TurnOPD's partial probes)."""
LENIENT = "read_leniently"
"""Key of `meta`: in how many turns only a lenient reading found the action (`turngym.envs.lenient_reading`)."""


class EpisodeError(TurngymError):
    """The parts of an episode contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """A teacher's log-probabilities, nats, of K ids for each of R tokens: its most likely ones, or those asked for."""

    ids: NDArray[np.int32]
    """int32 [R, K]."""
    logp: NDArray[np.float32]
    """float32 [R, K]."""
    tail: NDArray[np.float32] | None = None
    """float32 [R]: of all other ids together; None where nobody has summed them. What the K ids leave of 1 is known
    to about 1e-7 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One observation, the agent's response to it, and how the environment judged it.

    Spans index the ids of segment `segment`: `prompt_span` covers the ids that this turn added before the response
    (template, observation, generation prompt), `response_span` the R ids of the response. Both are (0, 0) for agents
    without token ids.
    """

    index: int
    """0-based."""
    observation: str
    admissible: tuple[str, ...] | None
    """What was admissible when the agent answered; None in open action spaces."""
    response: str
    action: str | None
    """The action read from the response; None if it was malformed."""
    verdict: Verdict
    reward: float
    segment: Whole = 0
    prompt_span: Span = (0, 0)
    response_span: Span = (0, 0)
    logprobs: NDArray[np.float32] | None = None
    """Behavior log-probabilities of the sampled ids, float32 [R], at the sampling temperature; None if unknown."""
    finish: str = "stop"
    """Why generation ended: `stop`, `length`, `content_filter`, `scripted`, `aborted`."""
    policy_version: Whole = 0
    """Version of the weights that drew the response; the oldest one if they changed while it was drawn."""
    version_spans: tuple[tuple[Whole, int, int], ...] = ()
    """(policy version, start, end) of each stretch of response ids, in order; empty if one version drew them all."""
    origin: Origin = "policy"
    begun: Whole = 0
    """How many ids at the start of the response are a demonstrator's; the policy continued from there."""
    progress: float | None = None
    """The environment's measure after the turn, in [0, 1]: share of goals met, or else its score; None if unknown."""
    judge_votes: tuple[str | None, ...] | None = None
    """What a judge wrote about the turn, one text per vote; None stands for a vote that failed."""
    judge_cut: Whole = 0
    """How many of the votes ended at the judge's limit on tokens."""
    judge_scores: tuple[float, ...] | None = None
    """The votes that could be read. None means never scored, which differs from a score of 0.0."""
    hint: str | None = None
    """What a judge, knowing what came next, would have told the policy."""
    hint_prompt_ids: NDArray[np.int32] | None = None
    """int32 [P]: the turn's prompt with `hint` in it, for a teacher; its length is independent of `prompt_span`."""
    excluded: str | None = None
    """Why the turn is not trained on although the policy chose it; None if it may be. Its ids stay inputs."""
    teacher: TopK | None = None

    @property
    def response_length(self) -> int:
        return self.response_span[1] - self.response_span[0]

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens, a filter or a failure broke the response off."""
        return self.finish in ("length", "content_filter", "aborted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One played task.

    Construction checks that turns count 0, 1, 2, ..., that spans are ordered and disjoint, that every array of a turn
    has one row per response id, and that what is averaged is a finite number in its range. Raises EpisodeError.
    """

    task: Task
    seed: int
    sample: Whole
    """0-based number of this attempt at the task."""
    group: Whole
    """Number shared by the attempts that are compared with each other (GRPO groups)."""
    segments: tuple[NDArray[np.int32], ...]
    """Token ids, int32; one array unless the history was rewritten. Empty for agents without token ids."""
    turns: tuple[Turn, ...]
    status: Status
    success: bool
    episode_return: float
    """Sum of rewards."""
    score: float = 0.0
    """The environment's graded score in [0, 1] at the end."""
    system: str = ""
    """The system message the agent saw."""
    final_observation: str = ""
    """The observation after the last turn."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`env`, `generate`). They are informative: equal runs may differ in them."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Extras that JSON can hold: agent name, temperature (`drawn_at`), error text."""
    spec: str = ""
    """First digits of the hash of the settings with which it was played, which its trace begins with; empty where
    nobody recorded them."""

    def __post_init__(self) -> None:
        whose = f"episode {self.task.task_id} sample {self.sample}"
        checked_number(f"{whose}: its return", self.episode_return, error=EpisodeError)
        checked_number(f"{whose}: its score", self.score, least=0.0, most=1.0, error=EpisodeError)
        for name, seconds in self.timings.items():
            checked_number(f"{whose}: its timing {name!r}", seconds, error=EpisodeError)
        segment = 0
        # where the next turn of each segment may begin
        cursor = [0] * len(self.segments)
        for position, turn in enumerate(self.turns):
            where = f"{whose}, turn {position}"
            checked_number(f"{where}: its reward", turn.reward, error=EpisodeError)
            if turn.progress is not None:
                checked_number(f"{where}: its progress", turn.progress, least=0.0, most=1.0, error=EpisodeError)
            for score in turn.judge_scores or ():
                checked_number(f"{where}: a judge score", score, error=EpisodeError)
            if turn.index != position:
                raise EpisodeError(f"{where}: index is {turn.index}; turns must count 0, 1, 2, ...")
            # the turn of an agent without token ids
            if turn.response_span == (0, 0) and turn.prompt_span == (0, 0):
                continue
            if not segment <= turn.segment < len(self.segments):
                raise EpisodeError(
                    f"{where}: segment {turn.segment} is not in {segment}..{len(self.segments) - 1}; "
                    "segments only go forward"
                )
            segment = turn.segment
            cursor[segment] = _check_spans(turn, cursor[segment], len(self.segments[segment]), where)

    @property
    def depth(self) -> int:
        return len(self.turns)

    @property
    def outcome(self) -> Outcome:
        """Won, lost, or ended in an error."""
        return outcome_of(self.status, self.success)

    def prompt_ids(self, turn: Turn) -> NDArray[np.int32]:
        """Everything the policy saw before `turn`'s response: int32 [P]."""
        return self.segments[turn.segment][: turn.response_span[0]]

    def response_ids(self, turn: Turn) -> NDArray[np.int32]:
        """The ids of `turn`'s response: int32 [R]."""
        return self.segments[turn.segment][slice(*turn.response_span)]


def _check_spans(turn: Turn, cursor: int, length: int, where: str) -> int:
    """Checks the spans and arrays of one turn in a segment of `length` ids; returns where its response ends."""
    (p0, p1), (r0, r1) = turn.prompt_span, turn.response_span
    if not cursor <= p0 <= p1 <= r0 <= r1 <= length:
        raise EpisodeError(
            f"{where}: prompt span {turn.prompt_span} and response span {turn.response_span} must be ordered, disjoint "
            f"and within {cursor}..{length}"
        )
    if not 0 <= turn.begun <= r1 - r0:
        raise EpisodeError(f"{where}: {turn.begun} ids are said to be begun, of a response of {r1 - r0} tokens")
    rows: dict[str, Any] = {"logprobs": turn.logprobs}
    if turn.teacher is not None:
        rows |= {"teacher.ids": turn.teacher.ids, "teacher.tail": turn.teacher.tail}
    for name, values in rows.items():
        if values is not None and len(values) != r1 - r0:
            raise EpisodeError(f"{where}: {name} has {len(values)} rows for a response of {r1 - r0} tokens")
    return r1


ROUNDING = 1e-3
"""How far rounding may lift the log-probability of a certain id above 0."""


def without_rounding(logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    """`logprobs` with 0 for those that rounding lifted a little above it."""
    return np.where((logprobs > 0) & (logprobs < ROUNDING), np.float32(0.0), logprobs)


def wrong_numbers(
    ids: NDArray[np.int32], logprobs: NDArray[np.float32] | None, vocabulary: int = 1 << 31, *, known: bool = True
) -> str | None:
    """Says what is wrong with sampled ids and their log-probabilities; None if they are valid.

    Ids must be in 0..vocabulary - 1; log-probabilities must be finite and at most 0.

    Args:
        ids: sampled ids, [n].
        logprobs: their log-probabilities, [n]; None: only the ids are checked.
        vocabulary: number of ids; without it, all that int32 holds from 0 on are valid.
        known: False: a log-probability may be NaN, which stands for an id that another model chose.
    """
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        return f"token {outside[0]} has id {ids[outside[0]]}; the vocabulary has ids 0..{vocabulary - 1}"
    if logprobs is None:
        return None
    # NaN compares as false
    fine = (logprobs <= 0) & (logprobs > -np.inf)
    odd = np.flatnonzero(~fine if known else ~(fine | np.isnan(logprobs)))
    if len(odd):
        return f"token {odd[0]} has log-probability {logprobs[odd[0]]}; it must be finite and at most 0"
    return None


def check_numbers(episode: Episode, vocabulary: int) -> None:
    """Raises EpisodeError, with the turn, if an episode holds numbers that cannot be trained on.

    Ids must be in 0..vocabulary - 1, log-probabilities finite and at most 0, temperatures finite and at least 0.
    """
    where = f"episode {episode.task.task_id} sample {episode.sample}"
    for turn in episode.turns:
        problem = None
        if episode.segments and turn.response_span[1]:
            ids = episode.segments[turn.segment][turn.prompt_span[0] : turn.response_span[1]]
            problem = wrong_numbers(ids, turn.logprobs, vocabulary, known=turn.origin == "policy")
        if turn.hint_prompt_ids is not None:
            problem = problem or wrong_numbers(turn.hint_prompt_ids, None, vocabulary)
        if turn.teacher is not None:
            ids, logp, tail = turn.teacher.ids, turn.teacher.logp, turn.teacher.tail
            problem = problem or wrong_numbers(ids.ravel(), logp.ravel(), vocabulary)
            if tail is not None:
                problem = problem or wrong_numbers(np.zeros(len(tail), np.int32), tail)
        if problem:
            raise EpisodeError(f"{where}, turn {turn.index}: {problem}")
        drawn_at(episode, turn)


def drawn_at(episode: Episode, turn: Turn) -> float | None:
    """The temperature at which the policy drew the ids of `turn`; None where the episode does not say.

    `temperatures` in `meta` has one for every turn (sessions of the proxy), `temperature` one for all. 0 is greedy: the
    log-probabilities of such ids are those at temperature 1. Raises EpisodeError for what is no temperature.
    """
    temperatures, temperature = episode.meta.get("temperatures"), episode.meta.get("temperature")
    if temperatures is not None:
        # an episode that was cut keeps the list of all its turns
        known = isinstance(temperatures, list | tuple) and turn.index < len(temperatures)
        temperature = temperatures[turn.index] if known else "missing"
    if temperature is None:
        return None
    # not below infinity, which every whole number is: 10**400 is no float
    if isinstance(temperature, bool) or not isinstance(temperature, float | int) or not 0 <= temperature <= FINITE:
        where = f"episode {episode.task.task_id} sample {episode.sample}, turn {turn.index}"
        raise EpisodeError(
            f"{where}: its temperature is {brief(temperature, 40)}; it must be a finite number of at least 0"
        )
    return float(temperature)


def next_state(episode: Episode, turn: Turn) -> str | None:
    """The observation that followed `turn`; None if there was none."""
    if turn.index + 1 < episode.depth:
        return episode.turns[turn.index + 1].observation
    return episode.final_observation or None

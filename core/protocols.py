"""What rooms must offer each other: policies that sample ids, scorers, rollout sources, and judges."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode, Origin, TopK
from turngym.core.plugin_values import Refusal, answers, checked_texts
from turngym.core.rollout_request import RolloutRequest
from turngym.core.user_files import json_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn and when drawing stops."""

    temperature: float = 1.0
    """0 is greedy."""
    max_new_tokens: int = 512
    stop_ids: tuple[int, ...] = ()
    """Ids that end the response; the stop id is part of it."""
    stop_text: tuple[str, ...] = ()
    """Strings (`</action>`, `</tool_call>`) that end the response as soon as its decoded end contains one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One continuation to draw."""

    session: str
    """Name that all turns of an episode's segment share; an engine may keep its KV cache under it."""
    prompt_ids: NDArray[np.int32]
    """The whole history, int32 [P]."""
    sampling: Sampling
    stream: tuple[int, ...]
    """Seeds this request's own random stream, for example (seed, task number, sample, turn)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The drawn `ids`, int32 [R], and their `logprobs`, float32 [R], under softmax(logits / temperature)."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str
    """`stop` or `length`; `aborted` if a `Watch` wanted no more or the engine was told to break off."""
    policy_version: int = 0
    """Version of the weights that drew the ids; the oldest one if they changed in between."""
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """(policy version, start, end) of each stretch of ids, in order; empty if one version drew them all."""
    origin: Origin = "policy"
    """`demonstration` if a teacher drew the ids in the policy's place."""


class PartialFailure(RuntimeError):
    """Some requests of a batch failed for good. `results` has the generation or the error of each request, in order."""

    def __init__(self, results: Sequence[Generation | BaseException]) -> None:
        self.results = tuple(results)
        failed = [result for result in self.results if isinstance(result, BaseException)]
        super().__init__(f"{len(failed)} of {len(self.results)} requests failed; the first: {failed[0]}")


class Policy(Protocol):
    """Continues token ids. The result of a request depends on that request alone, never on its batch."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...

    def release(self, session: str) -> None:
        """Forgets `session`. Unknown sessions are fine."""


class Engine(Policy, Protocol):
    """A policy with a limited context that follows a model in training."""

    @property
    def max_length(self) -> int:
        """The most ids that prompt and response may have together."""

    @property
    def vocab_size(self) -> int | None:
        """Only the first so many ids are drawn, as others are not scored; None: all of the model's."""

    def weights_changed(self, version: int) -> None:
        """Is called when the model has new weights; later generations carry `version`."""


class WeightSource(Protocol):
    """A model in training, read by whoever samples with its weights in another place."""

    def save(self, folder: Path) -> None:
        """Writes the present weights, adapters merged in, as a model that can be loaded."""

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Every present weight, adapters merged in, under its name in the saved model."""

    @property
    def adapter(self) -> int:
        """Rank of the LoRA adapters that alone are trained; 0 without."""

    def save_adapter(self, folder: Path) -> None:
        """Writes the adapters alone, as peft does."""

    def scorer(self, temperature: float = 1.0) -> Scorer:
        """A scorer with these weights."""

    def rounding(self, dtype: str) -> AbstractContextManager[None]:
        """While it is open, scores are rounded as in another precision and by other kernels."""


class WeightSink(Protocol):
    """Samples with a student's weights in another place, so it must get the new ones."""

    def publish(self, version: int) -> None:
        """Hands over the present weights; once it returns, everything is sampled with them."""

    def close(self) -> None:
        """Is called when nothing more will be published."""


Watch = Callable[[int, float], bool]
"""Is called with every id of one request and its log-probability when the id is drawn, possibly in another thread.

It must be quick and must not raise. It returns False if nobody wants the rest; the request may then end as `aborted`.
"""


@runtime_checkable
class StreamingPolicy(Policy, Protocol):
    """A policy that reports ids while it draws them."""

    def stream(self, requests: Sequence[GenerateRequest], watches: Sequence[Watch | None]) -> list[Generation]:
        """Returns what `generate` returns, after each watch was called with the ids of its request."""


class Scorer(Protocol):
    """Scores given ids. `positions` are the indices of the ids to score; position 0 cannot be scored."""

    def topk(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[NDArray[np.int64]], k: int) -> list[TopK]:
        """The K most likely ids at each position, given the ids before it, most likely first."""

    def logprobs(
        self, ids: Sequence[NDArray[np.int32]], positions: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float32]]:
        """Log-probability of the id at each position, given the ids before it."""

    def gather(
        self,
        ids: Sequence[NDArray[np.int32]],
        positions: Sequence[NDArray[np.int64]],
        support: Sequence[NDArray[np.int64]],
    ) -> list[TopK]:
        """Log-probabilities of ids that another model chose, `support` [P, K] at the P positions of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """One evaluation: mean success with its 95 % interval, all in [0, 1], and further numbers by name."""

    avg: float
    low: float
    high: float
    extra: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class DivisibleEvaluation(Protocol):
    """An evaluation at a step of training whose episodes several processes can play together."""

    def __call__(self, step: int) -> EvalPoint:
        """Plays all episodes in this process."""

    def gather(self, step: int) -> None:
        """Collects the episodes that a stopped run has left; one process calls it, before any share is played."""

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        """Plays the episodes of process number `share[0]` of `share[1]`."""

    def finish(self, step: int) -> EvalPoint:
        """Scores the episodes of all shares; one process calls it."""


class RolloutSource(Protocol):
    """A rollout source: live environments or trace files look the same to a trainer."""

    def __call__(self, request: RolloutRequest) -> list[Episode]: ...


Question = Literal["score", "hint", "both"]
"""What a judge is asked: whether a turn was good, what the policy should have been told beforehand, or both."""
Position = Literal["opening", "last_user", "last_message"]
"""Which message of a prompt gets the hint: the first observation, the last message of role user, the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """One response and what came next, to be judged with hindsight."""

    name: str
    """Unique and stable, for example "shop/3 seed 0 sample 1, turn 2"; it seeds random streams and names errors."""
    kind: Question
    """`score`: was it good (1), bad (-1) or neither (0)? `hint`: what should the policy have been told beforehand?
    Judges are asked one of these; `both` makes two such requests and joins the two answers (`joined`)."""
    response: str
    next_state: str
    next_role: str = "user"
    """Who speaks next: `user`, or `tool` for the result of an action."""
    before: str = ""
    """What the response answers."""
    episode: Episode | None = None
    """The episode if the request comes from an environment, so that rules and experts can look at it."""
    turn: int = 0
    """Index of the judged turn in `episode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """The texts of a judge's votes."""

    votes: tuple[str | None, ...]
    """One text per vote; None for a vote that failed."""
    error: str = ""
    """Why the first failed vote failed."""
    cut: int = 0
    """How many votes ended at the judge's limit on tokens, perhaps before they came to a decision."""


def judgments(answered: object, wanted: int, error: Refusal) -> list[Judgment]:
    """Returns `answered`, a judge's answers to `wanted` requests. Raises `error` for another number or type, and for
    votes that are not texts."""
    checked = answers("the judge", answered, wanted, Judgment, error)
    for judgment in checked:
        votes = judgment.votes
        written = [vote for vote in votes if vote is not None] if isinstance(votes, list | tuple) else votes
        checked_texts("the judge's votes", written, error=error)
    return checked


def joined(score: str | None, hint: str | None) -> str | None:
    """Joins a judge's answers about score and hint into one vote; None if there is neither."""
    return None if score is None and hint is None else json.dumps({"score": score, "hint": hint})


def separate(vote: str) -> tuple[str | None, str | None]:
    """Splits a `joined` vote into the answers about score and hint; (None, None) for any other text."""
    try:
        answers = json_of(vote)
    except ValueError:
        return None, None
    if not isinstance(answers, dict):
        return None, None
    score, hint = answers.get("score"), answers.get("hint")
    return score if isinstance(score, str) else None, hint if isinstance(hint, str) else None


class Judge(Protocol):
    """Writes votes. A vote depends on its request alone; a failed vote is None, never an exception or a score."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        """Returns one judgment per request, in order, all with the same number of votes."""

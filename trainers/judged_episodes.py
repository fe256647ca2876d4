"""Judged episodes: how a judge's votes come to episodes, and which judged turns are trained on.

requests, judged, judge_episodes                 episodes to questions, and the votes written back on their turns
JudgedSource, UnreadVotes                        a rollout source whose episodes come judged
ScoredTurns, HintedTurns                         filters: turns without a score or a hint stay as inputs only
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from turngym.agents.judges.votes import choose_hint, majority, read_hint, read_score
from turngym.core.episode import Episode, Turn, next_state
from turngym.core.errors import TurngymError
from turngym.core.protocols import Judge, JudgeRequest, Judgment, Question, RolloutSource, judgments, separate
from turngym.core.redaction import excerpt
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.batch import RolloutBatch, is_trainable
from turngym.trainers.targets import TargetError

# Episodes before a judge: a request for every turn with a next state, and the votes written back.

HINTING: tuple[Question, ...] = ("hint", "both")
"""Questions whose answers hold hints."""


class JudgeError(TurngymError):
    """A judge that never answered, or not what it was asked."""


def turn_name(episode: Episode, turn: Turn) -> str:
    """Names a turn in errors and random streams."""
    return f"{episode.task.task_id} seed {episode.seed} sample {episode.sample}, turn {turn.index}"


def requests(episode: Episode, kind: Question, next_role: str = "user") -> list[JudgeRequest]:
    """One for each of the policy's turns that has a next state and no votes yet; none for an episode that failed.

    `next_role` is the role of observations; an episode that knows who spoke after each turn says so in
    `meta["next_roles"]`.
    """
    if episode.status.is_error:
        return []
    unjudged = []
    roles = episode.meta.get("next_roles", ())
    for turn in episode.turns:
        state = next_state(episode, turn)
        if is_trainable(turn) and state is not None and turn.judge_votes is None:
            request = JudgeRequest(
                name=turn_name(episode, turn),
                kind=kind,
                response=turn.response,
                next_state=state,
                next_role=roles[turn.index] if turn.index < len(roles) else next_role,
                before=turn.observation,
                episode=episode,
                turn=turn.index,
            )
            unjudged.append(request)
    return unjudged


def judged(turn: Turn, kind: Question, judgment: Judgment) -> Turn:
    """`turn` with its votes; if every vote failed it has no scores, which is not the same as a score of 0."""
    turn = replace(turn, judge_cut=judgment.cut)
    written = [vote for vote in judgment.votes if vote is not None]
    if not written:
        return replace(turn, judge_votes=judgment.votes)
    if kind == "both":
        # each vote may hold a score, a hint or both
        answers = [separate(vote) for vote in written]
        scored = [score for score, _ in answers if score is not None]
        votes_read = tuple(score for text in scored if (score := read_score(text)) is not None)
        hint = choose_hint([read_hint(text) for _, text in answers if text is not None])
        return replace(turn, judge_votes=judgment.votes, judge_scores=votes_read if scored else None, hint=hint)
    if kind == "hint":
        votes = [read_hint(vote) for vote in written]
        scores, hint = [vote.score for vote in votes], choose_hint(votes)
    else:
        # a recorded hint stays: this judge was not asked for one
        scores, hint = [read_score(vote) for vote in written], turn.hint
    valid = tuple(score for score in scores if score is not None)
    return replace(turn, judge_votes=judgment.votes, judge_scores=valid, hint=hint)


def judge_episodes(
    episodes: Sequence[Episode], judge: Judge, kind: Question, next_role: str = "user"
) -> tuple[list[Episode], str]:
    """The episodes with votes on their turns, all asked for in one call, and the first error ("" if there was none).

    Turns that have votes already keep them. Raises JudgeError if the judge answers another number of requests, or
    something else than judgments.
    `next_role` is the role in which the policy sees observations.
    """
    parts = [requests(episode, kind, next_role) for episode in episodes]
    flat = [request for part in parts for request in part]
    # one call for all episodes: judges work on their requests side by side
    answered = judgments(judge.judge(flat) if flat else [], len(flat), JudgeError)
    answers = iter(answered)
    result = []
    for episode, part in zip(episodes, parts, strict=True):
        by_turn = {request.turn: next(answers) for request in part}
        turns = [judged(t, kind, by_turn[t.index]) if t.index in by_turn else t for t in episode.turns]
        result.append(replace(episode, turns=tuple(turns)) if by_turn else episode)
    return result, next((judgment.error for judgment in answered if judgment.error), "")


# A judge whose votes nobody can read would train nothing, and say nothing.

UNREADABLE_BATCHES = 3
"""So many batches in a row must be unreadable before a run stops."""
NOTICE = 0.1
"""A share of unread votes above this is worth a warning, once."""
SHOWN_CHARACTERS = 120
"""Characters of the last unread vote that are shown, from its end, where the decision should be."""


@dataclass(slots=True, kw_only=True)
class UnreadVotes:
    """Counts, batch by batch, votes that were written but hold no valid `\\boxed{}`.

    Warns once, at the first batch with more than a tenth of them. Raises JudgeError where their share is above `limit`
    in three batches in a row, and from then on in every such batch.
    """

    limit: float = 0.9
    """1: never."""
    _bad: int = field(default=0, init=False)
    _warned: bool = field(default=False, init=False)

    def check(self, episodes: Sequence[Episode], where: str) -> None:
        """Take in a batch of judged episodes; `where` names it in messages."""
        turns = [turn for episode in episodes for turn in episode.turns if turn.judge_votes is not None]
        written = sum(vote is not None for turn in turns for vote in turn.judge_votes or ())
        unread = written - sum(len(turn.judge_scores or ()) for turn in turns)
        share = unread / max(written, 1)
        self._bad = self._bad + 1 if share > self.limit else 0
        if self._bad >= UNREADABLE_BATCHES:
            raise JudgeError(f"{where}: {_unread_text(turns, unread, written)}; it was so {self._bad} times in a row")
        if share > NOTICE and not self._warned:
            self._warned = True
            warnings.warn(f"{where}: {_unread_text(turns, unread, written)}", stacklevel=2)


def _unread_text(turns: Sequence[Turn], unread: int, written: int) -> str:
    cut = sum(turn.judge_cut for turn in turns)
    advice = f" ({cut} votes ended at --judge-max-tokens: give it more)" if cut else ""
    # a turn of which no vote was read, so that what is shown is one of them
    unread_turn = next((turn for turn in reversed(turns) if turn.judge_scores == ()), None)
    votes = [vote for vote in (unread_turn.judge_votes or ()) if vote is not None] if unread_turn else []
    example = f"; one ends with {excerpt(votes[-1], SHOWN_CHARACTERS, end=True)!r}" if votes else ""
    return f"{unread} of {written} votes of the judge have no valid \\boxed{{}}{advice}{example}"


@dataclass(slots=True, kw_only=True)
class JudgedSource:
    """Implements `RolloutSource`: another source's episodes with a judge's votes on every turn that has a next state.

    Turns that were recorded with votes keep them. A vote that fails is counted (`judge/votes_failed`), but a judge none
    of whose votes ever worked is a mistake: JudgeError with its first error.
    """

    source: RolloutSource
    judge: Judge
    kind: Question = "score"
    next_role: str = "user"
    """The role in which the policy sees observations."""
    enhance: Callable[[Sequence[Episode]], list[Episode]] | None = None
    """Puts hints into prompts (`hint_prompt_ids`), where the messages and their template are known."""
    record: Callable[[RolloutRequest, Sequence[Episode]], None] | None = None
    """Called with the request and its judged episodes, to keep them."""
    unread: UnreadVotes = field(default_factory=UnreadVotes)
    """Warns of votes that cannot be read, and stops where they are nearly all."""
    _worked: bool = field(default=False, init=False)

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        episodes, error = judge_episodes(self.source(request), self.judge, self.kind, self.next_role)
        votes = [vote for episode in episodes for turn in episode.turns for vote in turn.judge_votes or ()]
        # remembered over steps: a judge that has worked may fail for a while
        self._worked = self._worked or any(vote is not None for vote in votes)
        if votes and not self._worked:
            raise JudgeError(f"step {request.step}: all {len(votes)} votes of the judge failed; the first: {error}")
        if self.record is not None:
            self.record(request, episodes)
        # after they were kept: what the judge wrote is there to be read
        self.unread.check(episodes, f"step {request.step}")
        return episodes if self.enhance is None else self.enhance(episodes)


def judge_row(episodes: Sequence[Episode], batch: RolloutBatch | None) -> dict[str, Any]:
    """Statistics of the episodes before selection; `batch` is what was trained on, None if nothing was. Empty without a
    judge."""
    turns = [turn for e in episodes if not e.status.is_error for turn in e.turns if is_trainable(turn)]
    judged_turns = [turn for turn in turns if turn.judge_votes is not None]
    if not judged_turns:
        return {}
    votes = [vote for turn in judged_turns for vote in turn.judge_votes or ()]
    written = sum(vote is not None for vote in votes)
    readable = sum(len(turn.judge_scores or ()) for turn in judged_turns)
    # None is a turn whose votes all failed, which is no score; an empty tuple was written but unreadable, a score of 0
    scores = [majority(turn.judge_scores) for turn in judged_turns if turn.judge_scores is not None]
    # from the batch, since these episodes are from before the selection: nothing in them is excluded yet
    hinted = sum(turn.hint is not None for turn in judged_turns)
    usable = sum(turn.hint_prompt_ids is not None for turn in judged_turns)
    trained = 0 if batch is None else len(np.unique(np.stack([batch.episode_N, batch.turn_N]), axis=1)[0])
    return {
        "judge/score": float(np.mean(scores)) if scores else None,
        "judge/positive": float(np.mean([score > 0 for score in scores])) if scores else None,
        "judge/negative": float(np.mean([score < 0 for score in scores])) if scores else None,
        "judge/votes": len(votes),
        "judge/votes_failed": len(votes) - written,
        "judge/votes_unread": written - readable,
        "judge/votes_cut": sum(turn.judge_cut for turn in judged_turns),
        "judge/turns_masked": len(turns) - trained,
        **({"judge/hints": usable, "judge/hints_refused": hinted - usable} if hinted else {}),
    }


# Which judged turns are trained on; the others stay in their episodes as inputs, marked with the reason.

NO_NEXT, FAILED, NEUTRAL, NO_HINT = "no next state", "the judge failed", "judged neutral", "no hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurns:
    """Implements `EpisodeFilter`: turns with a score.

    A turn without a next state is masked, unless it is the only turn of its episode (it then trains with advantage 0,
    for it was not judged). A turn whose votes all failed is masked always.

    `mask_neutral`: a score of 0 is masked too. `exclude="openclaw"` (the published code, which sees turns one by one):
    the first turn that was judged counts whatever its score (0, also of failed votes, is an advantage of 0); later ones
    with a score of 0 are masked; a turn without a next state is masked always, also the only one.
    Source: [openclaw-rl] section 4.1; docs/algorithms.md#masked-turns.
    Raises TargetError for a turn that has a next state and was never shown to a judge.
    """

    mask_neutral: bool = False
    exclude: Literal["none", "openclaw"] = "none"

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return masked(episodes, self.reasons)

    def reasons(self, episode: Episode) -> dict[int, str]:
        """Turn index -> why it is masked, for the policy's turns."""
        turns = [turn for turn in episode.turns if is_trainable(turn)]
        published = self.exclude == "openclaw"
        alone = len(turns) == 1 and not published
        reasons = {turn.index: self._reason(episode, turn, alone=alone) for turn in turns}
        if published:
            # when it comes, no turn of the session counts yet, and one must
            first = next((index for index, reason in reasons.items() if reason != NO_NEXT), None)
            reasons = {index: reason for index, reason in reasons.items() if index != first}
        return {index: reason for index, reason in reasons.items() if reason is not None}

    def _reason(self, episode: Episode, turn: Turn, *, alone: bool) -> str | None:
        if turn.judge_votes is None and turn.judge_scores is None:
            if next_state(episode, turn) is not None:
                raise TargetError(f"{turn_name(episode, turn)}: never judged; collect through `JudgedSource`")
            return None if alone else NO_NEXT
        if turn.judge_scores is None:
            return FAILED
        drops_neutral = self.mask_neutral or self.exclude == "openclaw"
        return NEUTRAL if drops_neutral and majority(turn.judge_scores) == 0.0 else None


@dataclass(frozen=True, slots=True)
class HintedTurns:
    """Implements `EpisodeFilter`: turns with a hint that a teacher can read (`hint_prompt_ids`); others are dropped."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return masked(episodes, self.reasons)

    def reasons(self, episode: Episode) -> dict[int, str]:
        """Turn index -> why it is dropped, for the policy's turns."""
        reasons = {}
        for turn in episode.turns:
            if is_trainable(turn) and turn.hint_prompt_ids is None:
                failed = turn.judge_votes is not None and all(vote is None for vote in turn.judge_votes)
                reasons[turn.index] = NO_NEXT if turn.judge_votes is None else FAILED if failed else NO_HINT
        return reasons


def masked(episodes: Sequence[Episode], reasons: Callable[[Episode], Mapping[int, str]]) -> list[Episode]:
    """The episodes with the turns that `reasons` names excluded from training.

    Episodes that failed, and those of which nothing is left to train on, are dropped.
    """
    kept = []
    for episode in episodes:
        why = reasons(episode)
        turns = tuple(replace(turn, excluded=why[turn.index]) if turn.index in why else turn for turn in episode.turns)
        if not episode.status.is_error and any(is_trainable(turn) for turn in turns):
            kept.append(replace(episode, turns=turns) if why else episode)
    return kept

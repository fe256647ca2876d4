"""Episodes before a judge: a request for every turn with a next state, and the votes written back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode, Turn, next_state
from turngym.envs.protocols import Judge, JudgeRequest, Judgment, Question, separate
from turngym.trainers.judge.votes import choose_hint, read_hint, read_score

HINTING: tuple[Question, ...] = ("hint", "both")
"""Questions whose answers hold hints."""


class JudgeError(TurngymError):
    """A judge that never answered, or not what it was asked."""


def is_trainable(turn: Turn) -> bool:
    """Whether the policy chose the turn, in tokens, and nothing has excluded it yet."""
    return turn.origin == "policy" and turn.excluded is None and turn.response_length > 0


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
    found = []
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
            found.append(request)
    return found


def judged(turn: Turn, kind: Question, judgment: Judgment) -> Turn:
    """`turn` with its votes; if every vote failed it has no scores, which is not the same as a score of 0."""
    turn = replace(turn, judge_cut=judgment.cut)
    written = [vote for vote in judgment.votes if vote is not None]
    if not written:
        return replace(turn, judge_votes=judgment.votes)
    if kind == "both":
        return _both(turn, judgment, written)
    if kind == "hint":
        votes = [read_hint(vote) for vote in written]
        scores, hint = [vote.score for vote in votes], choose_hint(votes)
    else:
        # a recorded hint stays: this judge was not asked for one
        scores, hint = [read_score(vote) for vote in written], turn.hint
    valid = tuple(score for score in scores if score is not None)
    return replace(turn, judge_votes=judgment.votes, judge_scores=valid, hint=hint)


def _both(turn: Turn, judgment: Judgment, written: Sequence[str]) -> Turn:
    """`turn` with the scores of the one half of its votes and the hint of the other."""
    answers = [separate(vote) for vote in written]
    scored = [score for score, _ in answers if score is not None]
    valid = tuple(score for text in scored if (score := read_score(text)) is not None)
    hint = choose_hint([read_hint(text) for _, text in answers if text is not None])
    return replace(turn, judge_votes=judgment.votes, judge_scores=valid if scored else None, hint=hint)


def judge_episodes(
    episodes: Sequence[Episode], judge: Judge, kind: Question, next_role: str = "user"
) -> tuple[list[Episode], str]:
    """The episodes with votes on their turns, all asked for in one call, and the first error ("" if there was none).

    Turns that have votes already keep them. Raises JudgeError if the judge answers another number of requests.
    """
    asked = [requests(episode, kind, next_role) for episode in episodes]
    flat = [request for part in asked for request in part]
    # one call for all episodes: judges work on their requests side by side
    found = judge.judge(flat) if flat else []
    if len(found) != len(flat):
        raise JudgeError(f"the judge answered {len(found)} of {len(flat)} requests; it must answer every one")
    answers = iter(found)
    result = []
    for episode, part in zip(episodes, asked, strict=True):
        by_turn = {request.turn: next(answers) for request in part}
        turns = [judged(t, kind, by_turn[t.index]) if t.index in by_turn else t for t in episode.turns]
        result.append(replace(episode, turns=tuple(turns)) if by_turn else episode)
    return result, next((judgment.error for judgment in found if judgment.error), "")

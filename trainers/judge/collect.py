"""A rollout source whose episodes come judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turngym.envs.episode import Episode
from turngym.envs.protocols import Collect, CollectRequest, Judge, Question
from turngym.trainers.judge.episodes import JudgeError, judge_episodes
from turngym.trainers.judge.unread import UnreadVotes


@dataclass(slots=True, kw_only=True)
class JudgedCollect:
    """Implements `Collect`: another source's episodes with a judge's votes on every turn that has a next state.

    Turns that were recorded with votes keep them. A vote that fails is counted (`judge/votes_failed`), but a judge none
    of whose votes ever worked is a mistake: JudgeError with its first error.
    """

    collect: Collect
    judge: Judge
    kind: Question = "score"
    next_role: str = "user"
    """The role in which the policy sees observations."""
    enhance: Callable[[Sequence[Episode]], list[Episode]] | None = None
    """Puts hints into prompts (`hint_prompt_ids`), where the messages and their template are known."""
    record: Callable[[CollectRequest, Sequence[Episode]], None] | None = None
    """Called with the request and its judged episodes, to keep them."""
    unread: UnreadVotes = field(default_factory=UnreadVotes)
    """Warns of votes that cannot be read, and stops where they are nearly all."""
    _worked: bool = field(default=False, init=False)

    def __call__(self, request: CollectRequest) -> list[Episode]:
        episodes, error = judge_episodes(self.collect(request), self.judge, self.kind, self.next_role)
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

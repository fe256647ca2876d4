"""The judge of a proxy's sessions: turn by turn, every next message with the role that spoke it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turngym.agents.judges.both import BothQuestions
from turngym.agents.judges.http import HttpJudge
from turngym.agents.judges.keyword import WordJudge
from turngym.agents.judges.make_judge import make_judge
from turngym.agents.proxy.conversation.chat import ChatListRenderer
from turngym.agents.proxy.sessions.feedback import Feedback
from turngym.agents.proxy.sessions.hints import SessionHints
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode, Turn
from turngym.envs.protocols import Judge, JudgeRequest, Judgment, Question
from turngym.scripts.options.serve_proxy import ServeProxy
from turngym.scripts.serve.live.heard import FeedbackUse, HeardVotes
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.judge.episodes import HINTING, JudgeError, judged, requests
from turngym.trainers.judge.unread import UnreadVotes

BATCH = 16
"""Turns that a judge in this process is asked about together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionJudge:
    """Implements `TurnJudge`."""

    judge: Judge
    kind: Question
    enhance: Callable[[Episode], Episode] | None = None
    workers: int = 1
    batch: int = BATCH
    use: FeedbackUse = "override"
    """What becomes of users' feedback."""
    unread: UnreadVotes = field(default_factory=UnreadVotes)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def requests(self, episode: Episode) -> list[JudgeRequest]:
        return requests(episode, self.kind)

    def ask(self, asked: Sequence[JudgeRequest]) -> list[Judgment]:
        return self.judge.judge(asked)

    def judged(self, turn: Turn, judgment: Judgment) -> Turn:
        return judged(turn, self.kind, judgment)

    def settles(self, feedback: Feedback) -> bool:
        return self._users.settles(feedback)

    def heard(self, turn: Turn, feedback: Feedback) -> Turn:
        return self._users.heard(turn, feedback)

    def amended(self, episode: Episode, turn: int, feedback: Feedback) -> Episode:
        """A session that was judged already, with what a user has said of one of its turns since."""
        turns = [self.heard(one, feedback) if one.index == turn else one for one in episode.turns]
        changed = replace(episode, turns=tuple(turns))
        return changed if self.enhance is None else self.enhance(changed)

    @property
    def _users(self) -> HeardVotes:
        return HeardVotes(kind=self.kind, use=self.use)

    def finished(self, episode: Episode) -> Episode:
        """With hints in prompts. Where session after session can hardly be read, unread turns have no scores at all."""
        with self._lock:
            try:
                self.unread.check([episode], f"session {episode.task.task_id}")
            except JudgeError as error:
                warnings.warn(str(error), stacklevel=2)
                turns = [replace(turn, judge_scores=turn.judge_scores or None) for turn in episode.turns]
                episode = replace(episode, turns=tuple(turns))
        return episode if self.enhance is None else self.enhance(episode)


def make_session_judge(
    config: ServeProxy, algorithm: Algorithm, renderer: ChatListRenderer, max_context: int
) -> SessionJudge | None:
    """The judge that the options name; None for an algorithm that needs none. Raises TurngymError for one unfit."""
    kind = algorithm.judge
    if kind is None:
        return None
    options = config.judging
    if options.judge in ("rules", "expert"):
        raise TurngymError(
            f"--judge {options.judge} reads an environment's verdicts, which sessions of a proxy do not have; "
            "use words, model:FOLDER or the url of an OpenAI-compatible endpoint"
        )
    judge: Judge
    if options.judge in ("auto", "words"):
        judge = WordJudge()
        judge = BothQuestions(score=judge, hint=judge) if kind == "both" else judge
    else:
        judge = make_judge(options, kind, make_env=_no_env, seed=config.run.seed, device=config.device)
    hints = SessionHints(renderer=renderer, max_context=max_context, position=algorithm.hint_position)
    # what is behind a url may be asked by several threads, a turn each: no turn waits for another's votes
    asked = judge.score if isinstance(judge, BothQuestions) else judge
    remote = isinstance(asked, HttpJudge)
    # a turn costs two questions there
    questions = 2 if kind == "both" else 1
    return SessionJudge(
        judge=judge,
        kind=kind,
        enhance=hints.enhance if kind in HINTING else None,
        workers=max(1, options.judge_parallel // (options.judge_votes * questions)) if remote else 1,
        batch=1 if remote else BATCH,
        use=config.feedback,
        unread=UnreadVotes(limit=options.judge_unread),
    )


def _no_env() -> Any:
    raise TurngymError("sessions of a proxy have no environment")

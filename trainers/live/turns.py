"""How turns of a live session are judged, and which of them are trained on.

1. `SessionJudge`: asks a judge about each turn as soon as its next message is known. A user's feedback becomes a vote,
   in place of the judge's or beside them.
2. `select_turns`: the turns of a judged session that are trained on; `SelectionCounts` counts the others by reason.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turngym.agents.judges.judges import BothQuestions, WordJudge, make_judge
from turngym.agents.judges.model_judges import HttpJudge
from turngym.agents.proxy.conversation import ChatListRenderer
from turngym.agents.proxy.judging import SessionHints
from turngym.agents.proxy.sessions import Feedback
from turngym.envs.core.episode import Episode, Turn
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.protocols import Judge, JudgeRequest, Judgment, Question, joined, separate
from turngym.trainers.algorithm import Algorithm, EpisodeFilter
from turngym.trainers.judged import HINTING, MORE_THAN, JudgeError, UnreadVotes, judged, requests
from turngym.trainers.live.config import ServeProxy
from turngym.trainers.targets import is_trainable

FeedbackUse = Literal["override", "vote", "record"]
MARKS = ("[HINT_START]", "[HINT_END]")


def _score_text(feedback: Feedback) -> str:
    words = f", {feedback.text!r}" if feedback.text else ""
    # the last box counts, whatever the user wrote
    return f"The user's thumb is {'up' if feedback.score > 0 else 'down'}{words}. \\boxed{{{feedback.score}}}"


def _hint(feedback: Feedback) -> str | None:
    """The user's text in the form of a judge's hint; None if it is no hint."""
    text = feedback.text
    for mark in MARKS:
        text = text.replace(mark, " ")
    text = text.strip()
    if feedback.score > 0 or len(text) <= MORE_THAN:
        return None
    return f"{MARKS[0]}{text}{MARKS[1]} \\boxed{{1}}"


BATCH = 16
"""Turns that a judge in this process is asked about together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionJudge:
    """Implements `TurnJudge`: asks a judge about every turn of a session, and takes in what its users say.

    A user's feedback is a vote on the judge's question. The thumb is a score. The text with a thumb down is a hint if
    it has more than 10 characters.
    """

    judge: Judge
    kind: Question
    enhance: Callable[[Episode], Episode] | None = None
    workers: int = 1
    batch: int = BATCH
    use: FeedbackUse = "override"
    """How users' feedback counts. `override`: alone, and the judge is asked only for what it leaves open. `vote`: as
    one more vote. `record`: not at all."""
    unread: UnreadVotes = field(default_factory=UnreadVotes)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def requests(self, episode: Episode) -> list[JudgeRequest]:
        # without the episode, which rules and experts read: it would be kept as long as a turn waits for its votes
        return [replace(request, episode=None) for request in requests(episode, self.kind)]

    def ask(self, asked: Sequence[JudgeRequest]) -> list[Judgment]:
        return self.judge.judge(asked)

    def judged(self, turn: Turn, judgment: Judgment) -> Turn:
        return judged(turn, self.kind, judgment)

    def settles(self, feedback: Feedback) -> bool:
        """Whether the judge need not be asked. With a thumb up there is nothing to hint at."""
        if self.use != "override":
            return False
        return self.kind == "score" or feedback.score > 0 or _hint(feedback) is not None

    def heard(self, turn: Turn, feedback: Feedback) -> Turn:
        """`turn` with the user's vote. Applying it twice changes nothing."""
        if self.use == "record":
            return turn
        own, votes = self._vote(feedback), tuple(turn.judge_votes or ())
        if self.use == "vote":
            return turn if own in votes else self._read(turn, (*votes, own))
        if self.settles(feedback):
            return self._read(turn, (own,))
        if self.kind == "hint":
            return turn  # a thumb down without words is no hint: the judge's stands
        hints = [separate(vote)[1] for vote in votes if vote is not None]
        return self._read(turn, tuple(joined(_score_text(feedback), hint) for hint in hints) or (own,))

    def _read(self, turn: Turn, votes: tuple[str | None, ...]) -> Turn:
        bare = replace(turn, hint=None, hint_prompt_ids=None)
        return judged(bare, self.kind, Judgment(votes=votes, cut=turn.judge_cut))

    def _vote(self, feedback: Feedback) -> str:
        hint = _hint(feedback)
        said = "The user has nothing to hint at. \\boxed{-1}" if hint is None else hint
        if self.kind == "score":
            return _score_text(feedback)
        return said if self.kind == "hint" else joined(_score_text(feedback), said) or ""

    def amended(self, episode: Episode, turn: int, feedback: Feedback) -> Episode:
        """A session that was judged already, with later feedback on one of its turns."""
        turns = [self.heard(one, feedback) if one.index == turn else one for one in episode.turns]
        changed = replace(episode, turns=tuple(turns))
        return changed if self.enhance is None else self.enhance(changed)

    def finished(self, episode: Episode) -> Episode:
        """Add hints to prompts. If session after session could not be read, turns without scores stay untrained."""
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
    """The judge that the options name; None for an algorithm that needs none. Raises TurngymError for an unfit one."""
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


# Which turns are trained on, which are left out and why, and how old they were.

STALE, TEMPERATURE = "too old", "sampled at another temperature"
NOTHING_DRAWN = "nothing was drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSelection:
    """What training does with the turns of one session, by index."""

    trained: tuple[int, ...]
    left_out: dict[int, str]
    """Index -> the reason."""

    def as_json(self) -> dict[str, Any]:
        return {"trained": list(self.trained), "left_out": {str(turn): why for turn, why in self.left_out.items()}}


def select_turns(episode: Episode, select: EpisodeFilter | None) -> TurnSelection:
    """The turns of a judged session that the algorithm's filter `select` keeps, and why others are left out."""
    kept = [episode] if select is None else select([episode])
    if kept:
        turns = kept[0].turns
        trained = tuple(turn.index for turn in turns if is_trainable(turn))
        reasons = {turn.index: turn.excluded for turn in turns}
    else:
        # a filter that drops a session does not say why, turn by turn, unless it is asked
        trained = ()
        given: dict[int, str] = getattr(select, "reasons", lambda episode: {})(episode)
        reasons = {turn.index: turn.excluded or given.get(turn.index) for turn in episode.turns}
    left_out = {turn.index: reasons[turn.index] or NOTHING_DRAWN for turn in episode.turns if turn.index not in trained}
    return TurnSelection(trained=trained, left_out=left_out)


def reason_name(why: str) -> str:
    """`why` without its numbers, to be counted by."""
    if why.endswith("versions old"):
        return STALE
    return TEMPERATURE if why.startswith("sampled at temperature") else why


@dataclass(slots=True, kw_only=True)
class SelectionCounts:
    """Counts what was left out, and the ages of what the last step trained on. Safe for several threads."""

    now: Callable[[], float] = time.time
    _left_out: Counter[str] = field(default_factory=Counter, init=False)
    _ages: dict[str, float] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self, step: int, episodes: Sequence[Episode], found: Sequence[TurnSelection]) -> dict[str, float]:
        """Count the sessions of a training step; returns mean and maximum of its turns' age in versions and seconds."""
        self.leave_out(found)
        behind: list[float] = []
        seconds: list[float] = []
        for episode, one in zip(episodes, found, strict=True):
            behind += [step - 1 - episode.turns[turn].policy_version for turn in one.trained]
            at = episode.meta.get("at", ())
            seconds += [self.now() - at[turn] for turn in one.trained if turn < len(at) and at[turn]]
        ages = {**_spread("versions_behind", behind), **_spread("age_s", seconds)}
        with self._lock:
            self._ages = ages
        return ages

    def leave_out(self, found: Sequence[TurnSelection]) -> dict[str, float]:
        """Count the turns that were left out of sessions that are used up."""
        with self._lock:
            self._left_out.update(reason_name(why) for one in found for why in one.left_out.values())
        return {}

    @property
    def ages(self) -> dict[str, float]:
        """Ages of the last step's turns."""
        with self._lock:
            return dict(self._ages)

    @property
    def reasons(self) -> dict[str, int]:
        """How many turns were left out, by reason."""
        with self._lock:
            return dict(sorted(self._left_out.items()))


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": round(sum(values) / len(values), 3), f"{name}_max": round(max(values), 3)}

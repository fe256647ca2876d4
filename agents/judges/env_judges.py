"""Judges that know the environment: by its rules, by an expert who plays again, by other attempts at the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.judges.judge_settings import Replayed, SkillsFolder
from turngym.agents.judges.judges import SKILLS, JudgeContext, MakeJudge, expert_hint, hint_vote
from turngym.agents.playing.agent import reset_seed
from turngym.agents.playing.scripted import MakeExpert, PrivilegedExpert, named_player
from turngym.agents.playing.timed_calls import CallTimeout, TimedCalls
from turngym.agents.rendering.skills import Skills, read_skills
from turngym.core.episode import Episode, Status, Turn, next_state
from turngym.core.errors import TurngymError
from turngym.core.protocols import Judge, JudgeRequest, Judgment
from turngym.core.redaction import excerpt
from turngym.core.task import Verdict
from turngym.envs.guard import guard_of


class ReplayError(TurngymError):
    """An episode that goes differently when its responses are given again."""


def in_a_row(actions: Sequence[str | None], turn: int) -> int:
    """Length of the run of equal actions that ends at `turn`."""
    start = turn
    while start and actions[start - 1] == actions[turn]:
        start -= 1
    return turn - start + 1


@dataclass(slots=True, kw_only=True)
class ExpertJudge:
    r"""A `Judge` that replays each episode and compares every action with the expert's. One vote per request.

    - Score: 1 if the action is the expert's own in that state; -1 if it differs and was invalid or changed nothing; 0
      if it is another possible action, which may be as good (-1 with `strict`).
    - Hint: `expert_hint`, also if the actions agree. The same hint is given at most `repeats` times in a row, or a
      policy that is stuck would be told little else.

    The default expert sees the hidden state, so its hints are more than hindsight: they are the solution. Scripted
    players such as `scripted.named_player("searching")` know only what was observed.

    A vote fails if the request has no episode, the environment fails or answers differently from the record, the expert
    knows no action, or playing the episode again takes more than `timeout` seconds. Environments that answer at random
    cannot be replayed.
    """

    make_env: Callable[[], Any]
    expert: MakeExpert = PrivilegedExpert
    strict: bool = False
    repeats: int | None = None
    timeout: float = 120.0
    _env: Any = field(default=None, init=False)

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        # one replay serves all turns of an episode; keyed by identity, since episodes have no hash
        episodes = {id(request.episode): request.episode for request in requests}
        calls = TimedCalls(self.timeout, "playing the episode again")
        advice = {key: self._advice(episode, calls) for key, episode in episodes.items()}
        calls.close()
        return [self._judgment(request, *advice[id(request.episode)]) for request in requests]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _judgment(self, request: JudgeRequest, actions: Sequence[str | None], error: str) -> Judgment:
        action = actions[request.turn] if actions else None
        if action is None or request.episode is None:
            return Judgment(votes=(None,), error=f"{request.name}: {error or 'the expert knows no action'}")
        turn = request.episode.turns[request.turn]
        agrees = action == turn.action
        if request.kind == "score":
            score = 1 if agrees else 0 if turn.verdict is Verdict.OK and not self.strict else -1
            return Judgment(votes=(f"The expert would do: {action} \\boxed{{{score}}}",))
        if self.repeats is not None and in_a_row(actions, request.turn) > self.repeats:
            return Judgment(votes=("The expert has said so already. \\boxed{-1}",))
        return Judgment(votes=(hint_vote(expert_hint(action)),))

    def _advice(self, episode: Episode | None, calls: TimedCalls) -> tuple[Sequence[str | None], str]:
        """The expert's action at each turn, or none and the reason."""
        if episode is None:
            return (), "no episode"
        replayed = calls.call(lambda: self._replay(episode))
        if replayed.error is None:
            return replayed.value, ""
        if isinstance(replayed.error, CallTimeout):
            # what hangs is not touched again
            self._env = None
        else:
            # the environment's state is unknown
            self.close()
        is_ours = isinstance(replayed.error, TurngymError)
        return (), f"{type(replayed.error).__name__}: {replayed.error}" if is_ours else replayed.failure

    def _replay(self, episode: Episode) -> list[str | None]:
        """The expert's action at each turn. Raises ReplayError if the environment answers differently."""
        if self._env is None:
            self._env = self.make_env()
        guard = guard_of(self._env)
        task = episode.task.task_id
        observation, _ = self._env.reset(seed=reset_seed(task, episode.seed), options={"task": task})
        player = self.expert(guard)
        actions: list[str | None] = []
        for turn in episode.turns:
            if observation != turn.observation:
                raise ReplayError(
                    f"played again, turn {turn.index} begins with {excerpt(observation, 80)!r}, not "
                    f"{excerpt(turn.observation, 80)!r}"
                )
            action = player.act()
            actions.append(None if action is None else guard.base.canonical(action))
            observation, _, terminated, truncated, _ = self._env.step(turn.response)
            if turn.action is not None and turn.verdict.valid:
                player.observe(turn.action)
            if (terminated or truncated) and turn.index < episode.depth - 1:
                raise ReplayError(f"played again, the episode ends at turn {turn.index} of {episode.depth}")
        return actions


HINTS = {
    Verdict.MALFORMED: "Answer with exactly one action, written in the form that the instructions ask for.",
    Verdict.INADMISSIBLE: "That action is not possible here. Choose another one.",
    Verdict.NO_EFFECT: "That action changes nothing here. Choose another one.",
}
CHAT = "proxy"
"""Environment id of the proxy's chat sessions."""
REPEATED = "This was tried before, with the same result. Choose another action."


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleJudge:
    r"""A `Judge` that knows only the environment's verdicts and rewards. One vote per request.

    The first rule that applies to a turn gives its score:

    -1: no action could be read, it was not possible, or it changed nothing (the verdict)
    +1: its reward is positive, or its episode ends here in success
    -1: its reward is negative, or its episode is over here without success
    +1 / -1: the environment's progress (`Turn.progress`: share of goals met, else score) rose / fell
    +1: the episode ended in success, so the turn was on the way to it
    -1: the same action had the same answer at an earlier turn, and progress was the same there
     0: anything else

    There is no reward for actions that are merely valid and new: it would teach to wander about (when tried, success
    fell to 0 within ten steps).

    The hint says what the verdict teaches, on turns of the first rule and on repeated ones; else it is `\boxed{-1}`.
    On a chat session, which has no verdicts, every vote fails.
    """

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [self._one(request) for request in requests]

    def _one(self, request: JudgeRequest) -> Judgment:
        if request.episode is None or request.episode.task.env_id == CHAT:
            return Judgment(votes=(None,), error=f"{request.name}: rules need an environment's verdicts and rewards")
        episode, turn = request.episode, request.episode.turns[request.turn]
        if request.kind == "hint":
            hint = HINTS.get(turn.verdict, REPEATED if _repeated(episode, turn) else None)
            return Judgment(votes=(hint_vote(hint),))
        score, reason = self.score(episode, turn)
        return Judgment(votes=(f"{reason} \\boxed{{{score}}}",))

    def score(self, episode: Episode, turn: Turn) -> tuple[int, str]:
        """The score of a turn and the rule that gave it."""
        last = turn.index == episode.depth - 1
        if turn.verdict is not Verdict.OK:
            return -1, f"The action was {turn.verdict.value}."
        if turn.reward > 0 or (last and episode.success):
            return 1, "The environment rewarded it."
        if turn.reward < 0 or (last and episode.status is Status.COMPLETED):
            return -1, "The environment punished it." if turn.reward < 0 else "The task ended here, unsolved."
        before = episode.turns[turn.index - 1].progress if turn.index else 0.0
        if turn.progress is not None and before is not None and turn.progress != before:
            return (1, "A goal was met.") if turn.progress > before else (-1, "A goal was lost.")
        if episode.success:
            return 1, "It was on the way to success."
        if _repeated(episode, turn):
            return -1, "It was done before, with the same result."
        return 0, "Nothing tells whether it helped."


def _hinted(request: JudgeRequest, who: str, hint: Callable[[Episode, Turn], str | None]) -> Judgment:
    """The vote of a judge that gives hints alone: a request for a score fails, and so does one without an episode."""
    if request.kind == "score" or request.episode is None:
        return Judgment(votes=(None,), error=f"{request.name}: {who} hints, not scores")
    return Judgment(votes=(hint_vote(hint(request.episode, request.episode.turns[request.turn])),))


@dataclass(frozen=True, slots=True)
class AttemptJudge:
    r"""A `Judge` of hints that tells a failed attempt at a task what one that succeeded did. One vote per request.

    Every turn of an episode without success gets the actions of the shortest success among the attempts of its group
    that are asked about together. Where there is none, and on turns of successes, the vote is `\boxed{-1}`: no hint.
    Of several training processes each knows the attempts that it has played. It gives no scores: such votes fail.
    """

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        best_of: dict[int, Episode] = {}
        for episode in (request.episode for request in requests if request.episode is not None):
            best = best_of.get(episode.group)
            if episode.success and (best is None or episode.depth < best.depth):
                best_of[episode.group] = episode

        def hint(episode: Episode, _: Turn) -> str | None:
            best = best_of.get(episode.group)
            if best is None or episode.success:
                return None
            actions = ", ".join(f"{turn.index + 1}. {turn.action}" for turn in best.turns if turn.verdict.valid)
            return f"An attempt that solved this task did: {actions}"

        return [_hinted(request, "other attempts give", hint) for request in requests]


@dataclass(frozen=True, slots=True)
class SkillsJudge:
    r"""A `Judge` of hints that tells every turn the texts for its kind of task. One vote per request.

    Nothing of it is hindsight: it is what a player could have been told before the first turn. A task that no text is
    for fails its vote. It gives no scores: such votes fail.
    """

    skills: Skills

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [self._one(request) for request in requests]

    def _one(self, request: JudgeRequest) -> Judgment:
        episode = request.episode
        if request.kind == "score" or episode is None:
            return Judgment(votes=(None,), error=f"{request.name}: skills give hints, not scores")
        text = self.skills.text(episode.task.category, episode.turns[0].observation)
        if text is None:
            error = f"{request.name}: no text of the skills is for category {episode.task.category!r}"
            return Judgment(votes=(None,), error=error)
        return Judgment(votes=(hint_vote(text),))


@dataclass(frozen=True, slots=True)
class SilentJudge:
    r"""A `Judge` of hints that has none: `\boxed{-1}`. What a method does that is told nothing. It gives no scores."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [_hinted(request, "nothing gives", lambda *_: None) for request in requests]


@dataclass(frozen=True, slots=True)
class EpisodeJudge:
    r"""A `Judge` of hints that draws a skill from the finished episode itself. One vote per request.

    A success gives one skill to all of its turns: the valid actions that were rewarded or met a goal, in order, or all
    valid ones where none was. A failed episode gives one to its critical step alone, the first turn that `RuleJudge`
    scores -1: not to do it again. Where nothing was found the vote is `\boxed{-1}`: no hint. It gives no scores: such
    votes fail. The two scopes are OPID's (arXiv 2606.26790); there a model draws the skills, up to five steps of an
    episode have one of their own, and a failed episode has one for all of it, too. The rules are ours.
    """

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [_hinted(request, "skills give", self.skill) for request in requests]

    def skill(self, episode: Episode, turn: Turn) -> str | None:
        """The hint for `turn`; None if there is none."""
        if episode.success:
            valid = [step for step in episode.turns if step.verdict is Verdict.OK and step.action is not None]
            gained = []
            for step in valid:
                before = episode.turns[step.index - 1].progress if step.index else 0.0
                gained += [step] if step.reward > 0 or (step.progress or 0.0) > (before or 0.0) else []
            steps = ", then ".join(str(step.action) for step in gained or valid)
            return f"In tasks like this one these steps lead to success: {steps}."
        wrong = next((step for step in episode.turns if RuleJudge().score(episode, step)[0] < 0), None)
        if wrong is None or wrong.index != turn.index:
            return None
        subject = "This answer" if wrong.action is None else f"The action '{wrong.action}'"
        return f"{subject} was a mistake here: {RuleJudge().score(episode, wrong)[1]} Choose another one."


def _repeated(episode: Episode, turn: Turn) -> bool:
    return any(
        earlier.action == turn.action
        and earlier.progress == turn.progress
        and next_state(episode, earlier) == next_state(episode, turn)
        for earlier in episode.turns[: turn.index]
    )


def _expert_judge(context: JudgeContext) -> Judge:
    options = context.options
    assert isinstance(options, Replayed)
    return ExpertJudge(
        make_env=context.make_env,
        expert=named_player(context.expert),
        strict=options.judge_strict,
        repeats=options.judge_repeats,
        timeout=options.judge_timeout,
    )


def _skills_judge(context: JudgeContext) -> Judge:
    assert isinstance(context.options, SkillsFolder)
    skills = read_skills(context.options.folder)
    env = context.make_env()
    try:
        skills.check(guard_of(env).base)
    finally:
        env.close()
    return SkillsJudge(skills)


ENV_JUDGES: Mapping[str, MakeJudge] = {
    "rules": lambda _: RuleJudge(),
    "expert": _expert_judge,
    "attempts": lambda _: AttemptJudge(),
    "episode": lambda _: EpisodeJudge(),
    "nothing": lambda _: SilentJudge(),
    SKILLS: _skills_judge,
}
"""The judges of `make_judge` where an environment is played."""

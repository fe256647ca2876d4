"""A judge that asks an expert: it plays each episode again and compares every turn with what the expert would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.agent import reset_seed
from turngym.agents.scripted import MakeExpert, PrivilegedExpert
from turngym.envs.core import TurngymError, Verdict
from turngym.envs.episode import Episode
from turngym.envs.guard import guard_of
from turngym.envs.protocols import JudgeRequest, Judgment


class ReplayError(TurngymError):
    """An episode that goes another way when its responses are given again."""


def expert_hint(action: str) -> str:
    """What an expert who would do `action` tells the policy."""
    return f"The best action here is: {action}"


def in_a_row(actions: Sequence[str | None], turn: int) -> int:
    """How many turns up to `turn` have the same action as it, without another between them."""
    start = turn
    while start and actions[start - 1] == actions[turn]:
        start -= 1
    return turn - start + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advice:
    """What the expert would have done before each turn of an episode, or why that cannot be said."""

    actions: tuple[str | None, ...] = ()
    error: str = ""


@dataclass(slots=True, kw_only=True)
class ExpertJudge:
    r"""Implements `Judge` with one vote per request, for tests and small experiments: the expert may be privileged.

    - Score: 1 where the action is the expert's own in that state, -1 where it differs and was not even valid or changed
      nothing, 0 where it is another possible one (which may be as good).
    - Hint: `expert_hint`, also where they agree (`agreeing`; else `\boxed{-1}` there). The same one at most
      `repeats` times in a row: a policy that is stuck would be told little else.

    The default expert sees the hidden state, so its hints are more than hindsight: they are the solution.
    `scripted.named_player("searching")` and its kin know only what was observed.

    A vote fails where the request has no episode, the environment fails or answers otherwise than recorded, or the
    expert knows no action. Environments that answer at random cannot be played again.
    """

    make_env: Callable[[], Any]
    expert: MakeExpert = PrivilegedExpert
    agreeing: bool = True
    strict: bool = False
    repeats: int | None = None
    _env: Any = field(default=None, init=False)

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        # by identity: one replay serves all turns of an episode, whose arrays have no hash
        episodes = {id(request.episode): request.episode for request in requests}
        advice = {key: self._advice(episode) for key, episode in episodes.items()}
        return [self._judgment(request, advice[id(request.episode)]) for request in requests]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _judgment(self, request: JudgeRequest, advice: _Advice) -> Judgment:
        action = advice.actions[request.turn] if advice.actions else None
        if action is None or request.episode is None:
            why = advice.error or "the expert knows no action"
            return Judgment(votes=(None,), error=f"{request.name}: {why}")
        turn = request.episode.turns[request.turn]
        agrees = action == turn.action
        if request.kind == "score":
            score = 1 if agrees else 0 if turn.verdict is Verdict.OK and not self.strict else -1
            return Judgment(votes=(f"The expert would do: {action} \\boxed{{{score}}}",))
        if self.repeats is not None and in_a_row(advice.actions, request.turn) > self.repeats:
            return Judgment(votes=("The expert has said so already. \\boxed{-1}",))
        if agrees and not self.agreeing:
            return Judgment(votes=("The expert would do the same. \\boxed{-1}",))
        return Judgment(votes=(f"[HINT_START]{expert_hint(action)}[HINT_END] \\boxed{{1}}",))

    def _advice(self, episode: Episode | None) -> _Advice:
        if episode is None:
            return _Advice(error="no episode")
        try:
            return _Advice(actions=tuple(self._replay(episode)))
        except TurngymError as error:
            self.close()  # its state is unknown
            return _Advice(error=f"{type(error).__name__}: {error}")

    def _replay(self, episode: Episode) -> list[str | None]:
        """The expert's action before each turn. Raises ReplayError where the environment answers otherwise."""
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
                    f"played again, turn {turn.index} begins with {observation[:80]!r}, not {turn.observation[:80]!r}"
                )
            action = player.act()
            actions.append(None if action is None else guard.base.canonical(action))
            observation, _, terminated, truncated, _ = self._env.step(turn.response)
            if turn.action is not None and turn.verdict.valid:
                player.observe(turn.action)
            if (terminated or truncated) and turn.index < episode.depth - 1:
                raise ReplayError(f"played again, the episode ends at turn {turn.index} of {episode.depth}")
        return actions

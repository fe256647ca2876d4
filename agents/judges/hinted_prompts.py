"""How hints and skills get into prompts: `HintPrompts` after an episode was played, `HintedObservations` and
`PrivilegedObservations` while it is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from turngym.agents.judges.judges import expert_hint, is_plain
from turngym.agents.playing.scripted import MakeExpert, PrivilegedExpert
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.skills import HINT_HEAD, Skills
from turngym.agents.rendering.text_encoder import TextEncoder
from turngym.agents.rendering.token_history import IdBuffer, TokenHistory
from turngym.core.episode import Episode, Turn
from turngym.core.errors import AgentError, TurngymError
from turngym.core.protocols import Position
from turngym.core.redaction import excerpt
from turngym.core.task import Verdict, task_number
from turngym.envs.guard import guard_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HintPrompts:
    """Fills in `Turn.hint_prompt_ids` of every turn with a hint: the ids of its prompt with the hint in it.

    The hint follows the text of the last message of role user (the first observation, if later ones are tool results);
    `last_message` puts it after the latest observation, `opening` after the first. Earlier responses keep the ids that
    were sampled. A hint with a
    special token of the tokenizer or with control characters could forge a turn and is refused (`hint` stays,
    `hint_prompt_ids` stays None), and so is one that leaves the response no room in `max_context`.
    Source: [openclaw-rl] section 4.2; docs/algorithms.md#hinted-prompt.
    """

    renderer: ChatRenderer
    position: Position = "last_user"
    max_context: int | None = None

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [self.enhance(episode) for episode in episodes]

    def enhance(self, episode: Episode) -> Episode:
        """`episode` with `hint_prompt_ids`. Raises AgentError if another template or tokenizer made its ids."""
        hinted = [turn for turn in episode.turns if turn.hint is not None and turn.response_length]
        encoder = self.renderer.template.encoder
        hinted = [turn for turn in hinted if turn.hint_prompt_ids is None and is_plain(turn.hint or "", encoder)]
        if not hinted:
            return episode
        if self.renderer.memory.name != "all":
            raise AgentError(f"hints need the whole conversation in a prompt: memory {self.renderer.memory.name!r}")
        at_observation = self.position == "last_message" or (
            self.position == "last_user" and self.renderer.template.role == "user"
        )
        prompts = self._late(episode, hinted) if at_observation else self._early(episode, hinted)
        turns = []
        for turn in episode.turns:
            ids, limit = prompts.get(turn.index), self.max_context
            fits = ids is not None and (limit is None or len(ids) + turn.response_length <= limit)
            turns.append(replace(turn, hint_prompt_ids=ids) if fits else turn)
        return replace(episode, turns=tuple(turns))

    def _late(self, episode: Episode, hinted: Sequence[Turn]) -> dict[int, NDArray[np.int32]]:
        """Hints at the end of each turn's own observation: one pass over the episode, forked at every hint."""
        wanted = {turn.index: turn.hint or "" for turn in hinted}
        thread: TokenHistory | None = None
        prompts: dict[int, NDArray[np.int32]] = {}
        for turn in episode.turns[: max(wanted) + 1]:
            if turn.index in wanted:
                fork = self._show(episode, _fork(thread), turn.observation + HINT_HEAD + wanted[turn.index])
                prompts[turn.index] = fork.buffer.array()
            thread = self._show(episode, thread, turn.observation)
            if not np.array_equal(thread.buffer.view(), episode.prompt_ids(turn)):
                raise AgentError(
                    f"{episode.task.task_id} sample {episode.sample}, turn {turn.index}: its prompt has other ids than "
                    "were recorded; hints need the tokenizer and chat template that the episode was played with"
                )
            self.renderer.respond(thread, episode.response_ids(turn))
        return prompts

    def _early(self, episode: Episode, hinted: Sequence[Turn]) -> dict[int, NDArray[np.int32]]:
        """Prompts with hints in the opening message. Every text needs a conversation of its own, which its turns
        share."""
        prompts: dict[int, NDArray[np.int32]] = {}
        for hint in dict.fromkeys(turn.hint or "" for turn in hinted):
            wanted = {turn.index for turn in hinted if turn.hint == hint}
            thread: TokenHistory | None = None
            for turn in episode.turns[: max(wanted) + 1]:
                text = turn.observation if turn.index else turn.observation + HINT_HEAD + hint
                thread = self._show(episode, thread, text)
                if turn.index in wanted:
                    prompts[turn.index] = thread.buffer.array()
                self.renderer.respond(thread, episode.response_ids(turn))
        return prompts

    def _show(self, episode: Episode, thread: TokenHistory | None, observation: str) -> TokenHistory:
        if thread is None:
            return self.renderer.open(episode.system, observation, episode.task.category)
        self.renderer.observe(thread, observation)
        return thread


def _fork(thread: TokenHistory | None) -> TokenHistory | None:
    """A copy of the conversation that can be continued independently."""
    if thread is None:
        return None
    # only the last segment is ever written to, so the earlier ones are shared
    last = IdBuffer(max(256, thread.buffer.size))
    last.extend(thread.buffer.view())
    segments = [*thread.segments[:-1], last]
    return replace(thread, segments=segments, messages=list(thread.messages), pieces=list(thread.pieces))


HINT_STREAM = 4
"""Random stream that decides which observations are hinted."""


@dataclass(frozen=True, slots=True)
class WrappedEnv:
    """Makes environments inside a wrapper; can be sent to other processes."""

    make_env: Callable[[], Any]
    wrapper: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.wrapper(self.make_env(), *self.arguments)


class HintedObservations(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Appends the expert's next action as a hint to a `share` of the observations.

    A model learns from such episodes to read the hints that it is later taught by. The expert should be the one who
    demonstrates: hints that name other actions than the imitated ones teach the model to ignore hints. The reset's
    seed, the task and the turn decide which turns are hinted. An observation stays as it is if the expert knows no
    action.
    """

    def __init__(self, env: gym.Env[str, str], share: float, expert: MakeExpert = PrivilegedExpert) -> None:
        RecordConstructorArgs.__init__(self, share=share, expert=expert)
        gym.Wrapper.__init__(self, env)
        if not 0.0 <= share <= 1.0:
            raise AgentError(f"the share of hinted observations is {share}; valid: 0 to 1")
        self._guard = guard_of(env)
        self._share = share
        self._make_expert = expert
        self._expert: Any = None
        self._seed, self._turn = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._seed, self._turn = seed or 0, 0
        self._expert = self._make_expert(self._guard)
        return self._hinted(observation), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turn += 1
        played = self._guard.read(action).action
        if played is not None and Verdict(info["verdict"]).valid:
            self._expert.observe(self._guard.base.canonical(played))
        over = terminated or truncated
        return (observation if over else self._hinted(observation)), float(reward), terminated, truncated, info

    def _hinted(self, observation: str) -> str:
        number = task_number(self._guard.task.task_id)
        if np.random.default_rng((self._seed, number, self._turn, HINT_STREAM)).random() >= self._share:
            return observation
        action = self._expert.act()
        if action is None:
            return observation
        return observation + HINT_HEAD + expert_hint(self._guard.base.canonical(action))


TOLD_STREAM = 5
"""Random stream that decides which episodes are told something, and what."""
TOLD_SHARE = 0.5


class PrivilegedObservations(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Half of the episodes are told one of `texts` after their first observation, drawn whatever the task is.

    A model that imitates a player who minds what it is told (`ReadingPlayer`) learns to read these texts. Were each
    task told its own text alone, a model could take it from the task and need not read. The reset's seed and the task
    decide.
    """

    def __init__(self, env: gym.Env[str, str], texts: Sequence[str]) -> None:
        RecordConstructorArgs.__init__(self, texts=texts)
        gym.Wrapper.__init__(self, env)
        if not texts:
            raise AgentError("there is no text to tell")
        self._guard = guard_of(env)
        self._texts = tuple(texts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        rng = np.random.default_rng((seed or 0, task_number(self._guard.task.task_id), TOLD_STREAM))
        if rng.random() >= TOLD_SHARE:
            return observation, info
        return observation + HINT_HEAD + self._texts[int(rng.integers(len(self._texts)))], info


def refuse_control_tokens(skills: Skills, encoder: TextEncoder) -> None:
    """Raises TurngymError for a text that spells a control token, which no prompt takes in."""
    if forged := next((text for text in sorted(skills.texts) if not is_plain(text, encoder)), None):
        raise TurngymError(
            f"skills {skills.name}: the text {excerpt(forged, 40)!r} spells a control token of the student's "
            "tokenizer, or has control characters; no prompt would hold it"
        )

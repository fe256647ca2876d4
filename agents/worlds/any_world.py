"""How tiny models are made for any registered environment that has an expert: its vocabulary is learned from play."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent, named_player
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.phrase_tokenizer import END, ROLES, build_phrase_tokenizer
from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.envs.base import tasks_of

NOISE = (0.0, 0.5)
TEACHER_STEPS = 300
ROOM = 1.25
"""Length of the context relative to the longest episode seen."""
BLOCK = 64
"""Contexts are multiples of this many ids."""
WORD = re.compile(r" ?[^\W\d_]+| ?\d+|\s+|[^\w\s]|_")
"""A word or a number with the space before it, white space, or one other sign: the pieces of any text, none lost."""
TOGETHER = 0.9
"""Two neighbors become one piece if each is seen beside the other in at least this share of its uses."""
SEEN = 4
"""Pairs seen less often are not joined."""
ROUNDS = 40
"""Most rounds of joining. A piece at most doubles in each, so longer phrases do not occur."""


def learn_phrases(texts: Iterable[str]) -> tuple[str, ...]:
    """The pieces of `texts`, sorted: all words, single digits, and phrases whose words hardly ever stand apart.

    In each round, neighbors a b with count(a b) >= `SEEN` and count(a b) >= 0.9 max(count(a), count(b)) are joined. A
    sentence that is always said whole becomes one piece ("Nothing happens."), and words that combine freely stay apart
    ("cabinet" and " 3"), so that a model can say what was never seen. Repeated texts count each time.
    """
    rows = [(WORD.findall(text), count) for text, count in sorted(Counter(texts).items())]
    phrases = {piece for row, _ in rows for piece in row} | {
        f"{gap}{digit}" for gap in ("", " ") for digit in range(10)
    }
    for _ in range(ROUNDS):
        pairs = _inseparable(rows)
        if not pairs:
            break
        rows = [(_joined(row, pairs), count) for row, count in rows]
        phrases |= {piece for row, _ in rows for piece in row}
    return tuple(sorted(phrases))


def _inseparable(rows: Sequence[tuple[Sequence[str], int]]) -> set[tuple[str, str]]:
    single: Counter[str] = Counter()
    together: Counter[tuple[str, str]] = Counter()
    for row, count in rows:
        for piece in row:
            single[piece] += count
        for pair in pairwise(row):
            together[pair] += count
    return {
        pair
        for pair, count in together.items()
        if count >= SEEN and count >= TOGETHER * max(single[pair[0]], single[pair[1]])
    }


def _joined(row: Sequence[str], pairs: set[tuple[str, str]]) -> list[str]:
    """`row` with neighbors in `pairs` joined, from the left."""
    pieces: list[str] = []
    index = 0
    while index < len(row):
        joined = index + 1 < len(row) and (row[index], row[index + 1]) in pairs
        pieces.append(row[index] + row[index + 1] if joined else row[index])
        index += 2 if joined else 1
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyWorld:
    """Which environment is played, by whom, and how long its tiny models are trained."""

    env_id: str
    split: str = "train"
    make: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of gym.make."""
    max_turns: int = 24
    expert: str = "expert"
    episodes: int = 256
    """Episodes played to learn the vocabulary, a quarter of them at random."""
    steps: tuple[int, int] = (TEACHER_STEPS, 60)
    """Updates of teacher and student."""
    batch: int = 32
    """Episodes per update."""
    seed: int = 0

    def world(self) -> EmbeddedWorld:
        """The environment as an embedded world.

        Raises TurngymError if it is not registered, or its expert wins no episode.
        """
        base = probe(self.env_id, self._kwargs)
        episodes = self._play()
        own_phrases = getattr(base, "phrases", None)
        phrases = tuple(own_phrases()) if callable(own_phrases) else learn_phrases(_texts(episodes))
        tags = [piece for tag in base.tool.tags for piece in (f"<{tag}>", f"</{tag}>")]
        words = build_phrase_tokenizer([*phrases, base.instructions, *tags])
        teacher, student = self.steps
        random = NOISE if _can_draw(episodes) else (0.0, 0.0)
        return EmbeddedWorld(
            name=self.env_id,
            env_id=self.env_id,
            split=self.split,
            make=self.make,
            max_turns=self.max_turns,
            panel="",
            tags=base.tool.tags,
            expert=self.expert,
            chat=_chat(base.instructions, words, episodes),
            phrases=lambda: phrases,
            # the student is trained for fewer steps and has never seen the answer to a mistake
            recipes={
                "teacher": TinyRecipe(steps=teacher, episodes=self.batch, noise=NOISE),
                "student": TinyRecipe(steps=student, episodes=self.batch, noise=random, mistakes=0.0),
            },
        )

    @property
    def _kwargs(self) -> dict[str, Any]:
        return {**self.make, "split": self.split, "max_turns": self.max_turns}

    def _play(self) -> list[Episode]:
        """Episodes of the expert, of the noisy expert, and of a random player if actions can be drawn."""
        expert = named_player(self.expert)
        episodes = self._episodes(ExpertAgent(expert=expert), 0, self.episodes // 4)
        self._check(episodes)
        noisy = ExpertAgent(expert=expert, noise=NOISE, mistakes=0.5)
        episodes += self._episodes(noisy, self.episodes // 4, self.episodes // 2)
        if _can_draw(episodes):
            episodes += self._episodes(RandomAgent(), self.episodes * 3 // 4, self.episodes - self.episodes * 3 // 4)
        return episodes

    def _episodes(self, agent: Agent, first: int, count: int) -> list[Episode]:
        tasks = tasks_of(probe(self.env_id, self._kwargs))
        numbers = range(first, first + max(count, 1))
        jobs = [Job(task_id=tasks[number % len(tasks)], sample=number, seed=self.seed) for number in numbers]
        return rollout(jobs, env_maker(self.env_id, **self._kwargs, channel="text"), agent)

    def _check(self, episodes: Sequence[Episode]) -> None:
        played = [episode for episode in episodes if not episode.status.is_error]
        if not any(episode.success for episode in played):
            errors = {str(episode.meta.get("error")) for episode in episodes if episode.status.is_error}
            why = f": {min(errors)}" if errors else f" within {self.max_turns} turns"
            raise TurngymError(
                f"{self.env_id}: its expert {self.expert!r} won none of {len(episodes)} episodes{why}; tiny models are "
                "made of an expert's episodes (TextEnv.expert_action, or --expert NAME)"
            )


def _can_draw(episodes: Sequence[Episode]) -> bool:
    """Whether random actions can be drawn: not in an open action space."""
    return any(turn.admissible for episode in episodes for turn in episode.turns)


def _texts(episodes: Iterable[Episode]) -> Iterable[str]:
    """Everything that was said, without the tags around actions, which are phrases already."""
    for episode in episodes:
        yield from (turn.observation for turn in episode.turns)
        yield episode.final_observation
        yield from (turn.action for turn in episode.turns if turn.action is not None)


def _chat(system: str, words: Any, episodes: Sequence[Episode]) -> ChatSettings:
    """Chat settings whose limits hold the longest response and episode seen, with some room."""
    response, context = 1, 1
    for episode in episodes:
        lengths = [_count(words, turn.response) for turn in episode.turns]
        heard = [_count(words, turn.observation) for turn in episode.turns]
        response = max(response, *lengths, 1)
        # two ids around every message
        context = max(
            context, sum(lengths) + sum(heard) + 4 * len(lengths) + _count(words, system) + len((END, *ROLES))
        )
    room = math.ceil(context * ROOM / BLOCK) * BLOCK
    return ChatSettings(
        channel="text",
        observation_role="user",
        system=system,
        max_new_tokens=response + 4,
        max_context=max(room, 2 * BLOCK),
    )


def _count(words: Any, text: str) -> int:
    return len(words(text, add_special_tokens=False)["input_ids"])

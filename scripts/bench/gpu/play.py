"""Episodes of a real environment played with a model of random weights: what it says is drawn, what is done is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.protocols import GenerateRequest, Policy, Sampling
from turngym.envs.core.task import Task
from turngym.envs.guard import guard_of

CHARACTERS = 4
"""Of an observation's text that become one id: about what tokenizers of language models make of English."""


@dataclass(slots=True)
class Played:
    """One episode under way."""

    env: Any
    task: Task
    number: int
    ids: np.ndarray[Any, np.dtype[np.int32]]
    """The history so far, ending with an observation."""
    said: str
    """The last observation."""
    turns: list[Turn] = field(default_factory=list)
    fed: int = 0
    """Ids of the history that belong to earlier turns."""

    def request(self, response: int) -> GenerateRequest:
        """Asks for the next `response` ids, drawn at temperature 1."""
        sampling = Sampling(temperature=1.0, max_new_tokens=response)
        stream = (self.number, len(self.turns))
        return GenerateRequest(session=str(self.number), prompt_ids=self.ids, sampling=sampling, stream=stream)

    def take(self, ids: Any, logprobs: Any, vocab: int, rng: np.random.Generator) -> bool:
        """Note the response and do a random admissible action; whether the episode goes on."""
        guard = guard_of(self.env)
        action = guard.base.sample_action(rng)
        observation, reward, terminated, truncated, info = self.env.step(action)
        end = len(self.ids) + len(ids)
        self.turns.append(
            Turn(
                index=len(self.turns),
                observation=self.said,
                admissible=None,
                response="",
                action=action,
                verdict=info["verdict"],
                reward=float(reward),
                prompt_span=(self.fed, len(self.ids)),
                response_span=(len(self.ids), end),
                logprobs=np.asarray(logprobs, np.float32),
            )
        )
        self.ids, self.fed, self.said = np.concatenate((self.ids, ids)), end, observation
        over = bool(terminated or truncated)
        if not over:
            self.ids = np.concatenate((self.ids, as_ids(observation, vocab)))
        return not over

    def episode(self) -> Episode:
        """What was played, without anything after the last response."""
        return Episode(
            task=self.task,
            seed=0,
            sample=0,
            group=self.number,
            segments=(self.ids[: self.fed],),
            turns=tuple(self.turns),
            status=Status.COMPLETED,
            success=False,
            episode_return=0.0,
        )


def as_ids(text: str, vocab: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """One id for every four characters, the same for the same ones."""
    pieces = [text[at : at + CHARACTERS].encode() for at in range(0, len(text), CHARACTERS)] or [b" "]
    return np.array([int.from_bytes(piece, "little") % vocab for piece in pieces], np.int32)


def begin(envs: Sequence[Any], task_ids: Sequence[str], vocab: int, system: int) -> list[Played]:
    """An episode in each of `envs`, all of which begin with the same `system` made-up ids."""
    shared = np.random.default_rng(0).integers(0, vocab, system).astype(np.int32)
    rows = []
    for number, env in enumerate(envs):
        said, _ = env.reset(options={"task": task_ids[number % len(task_ids)]})
        ids = np.concatenate((shared, as_ids(said, vocab)))
        rows.append(Played(env=env, task=guard_of(env).base.task, number=number, ids=ids, said=said))
    return rows


def play(policy: Policy, rows: Sequence[Played], response: int, vocab: int) -> list[Episode]:
    """All of them to their end, side by side; every turn has `response` ids."""
    going = list(rows)
    streams = {row.number: np.random.default_rng((1, row.number)) for row in rows}
    while going:
        answers = policy.generate([row.request(response) for row in going])
        going = [
            row
            for row, answer in zip(going, answers, strict=True)
            if row.take(answer.ids, answer.logprobs, vocab, streams[row.number])
        ]
    return [row.episode() for row in rows]

"""Made-up episodes for the benches of playing: random ids as observations, answered by whoever is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turngym.core.protocols import GenerateRequest, Sampling

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MadeUpTurn:
    """What every side is asked in one turn of episodes that are played side by side."""

    prompts: list[Ids]
    """Whole histories with the new observation, by the `answers` so far."""
    new: list[Ids]
    """What is new since the last answer."""
    limits: list[int]
    """Ids of every response."""
    answers: list[Ids] = field(default_factory=list)

    def requests(self, number: int, temperature: float = 0.0) -> list[GenerateRequest]:
        """Returns the turn as requests to an engine; `number` is the turn's."""
        return [
            GenerateRequest(
                session=str(row),
                prompt_ids=prompt,
                sampling=Sampling(temperature=temperature, max_new_tokens=limit),
                stream=(row, number),
            )
            for row, (prompt, limit) in enumerate(zip(self.prompts, self.limits, strict=True))
        ]


def made_up_turns(
    rng: np.random.Generator,
    turns: int,
    histories: Sequence[Ids],
    vocab: int,
    observation: tuple[int, int],
    response: tuple[int, int],
) -> Iterator[MadeUpTurn]:
    """Yields the turns after `histories`.

    The caller fills in `answers` before it asks for the next turn.

    Args:
        histories: ids before the first turn, one array for each episode.
        vocab: ids are drawn from 0 to `vocab` - 1.
        observation: fewest and most ids of an observation.
        response: fewest and most ids of a response.
    """
    for _ in range(turns):
        limits = [int(rng.integers(*response, endpoint=True)) for _ in histories]
        new = [random_ids(rng, int(rng.integers(*observation, endpoint=True)), vocab) for _ in histories]
        turn = MadeUpTurn([np.concatenate(pair) for pair in zip(histories, new, strict=True)], new, limits)
        yield turn
        histories = [np.concatenate(pair) for pair in zip(turn.prompts, turn.answers, strict=True)]


def random_ids(rng: np.random.Generator, count: int, vocab: int) -> Ids:
    return rng.integers(0, vocab, count).astype(np.int32)

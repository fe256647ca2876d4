"""One cell of the table: the engine and its peers play the same episodes, turn by turn, and are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from turngym.envs.core.protocols import GenerateRequest, Sampling
from turngym.scripts.bench.rollout.peers import Continuous, Ids, Keeping, KeptCache, whole_history
from turngym.scripts.bench.rollout.shapes import Shape

Result = TypeVar("Result")


class Lengths(Protocol):
    """What a duel reads of the options."""

    @property
    def system(self) -> int: ...
    @property
    def observation(self) -> tuple[int, int]: ...
    @property
    def response(self) -> tuple[int, int]: ...
    @property
    def seed(self) -> int: ...


@dataclass(slots=True)
class Side:
    """One side's sum."""

    tokens: int = 0
    seconds: float = 0.0
    """CPU seconds of this process."""

    @property
    def speed(self) -> float:
        """Tokens per CPU second; 0 if it did not play."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def timed(self, work: Callable[[], Result], tokens: int) -> Result:
        """Do `work`, which draws `tokens` ids."""
        begin = time.process_time()
        result = work()
        self.seconds += time.process_time() - begin
        self.tokens += tokens
        return result


@dataclass(slots=True)
class Tally:
    """What one cell added up to."""

    turns: int
    batch: int
    engine: Side = field(default_factory=Side)
    kept: dict[Keeping, Side] = field(default_factory=dict)
    """`generate` with its cache kept, by the way it is kept."""
    history: Side = field(default_factory=Side)
    continuous: Side = field(default_factory=Side)
    responses: int = 0
    equal: int = 0
    gap: float = 0.0
    """Largest difference of the two best logits where a response first differs: rounding decides when it is tiny."""

    @property
    def best(self) -> tuple[Keeping, Side]:
        """The fastest way of keeping the cache."""
        return max(self.kept.items(), key=lambda item: item[1].speed)

    def ratio(self, peer: Side) -> float:
        """How many times as many tokens per CPU second the engine draws."""
        return self.engine.speed / peer.speed


def positions(lengths: Lengths, turns: int) -> int:
    """Most ids of an episode, with the holes of a peer that keeps them."""
    return lengths.system + turns * (lengths.observation[1] + lengths.response[1])


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn asks of every side."""

    prompts: list[Ids]
    """Whole histories with the new observation, by the engine's answers."""
    new: list[Ids]
    """What is new since the last answer."""
    limits: list[int]
    """Ids of every response."""
    answers: list[Ids] = field(default_factory=list)
    """The engine's."""

    @property
    def tokens(self) -> int:
        """Ids that will be drawn."""
        return sum(self.limits)

    def requests(self, number: int) -> list[GenerateRequest]:
        """The same as requests to an engine."""
        return [
            GenerateRequest(
                session=str(row),
                prompt_ids=prompt,
                sampling=Sampling(temperature=0.0, max_new_tokens=limit),
                stream=(row, number),
            )
            for row, (prompt, limit) in enumerate(zip(self.prompts, self.limits, strict=True))
        ]


def duel(model: Any, shape: Shape, lengths: Lengths, turns: int, batch: int, keeping: Sequence[Keeping]) -> Tally:
    """All turns with the engine and the peers that keep their cache; some with the one that does not."""
    from turngym.agents.local_engine.engine import LocalEngine

    tally, engine = Tally(turns, batch), LocalEngine(model, max_batch=batch)
    tally.kept = {way: Side() for way in keeping}
    most = positions(lengths, turns)
    peers = {way: KeptCache(model, batch, most, way) for way in keeping}
    together = {way: np.ones(batch, bool) for way in keeping}
    sampled, everywhere = _spread(shape.history_turns, turns), np.ones(batch, bool)
    with ExitStack() as stack:
        paged = stack.enter_context(Continuous(model, batch, most)) if batch <= shape.continuous else None
        rng = np.random.default_rng(lengths.seed)
        system = _random_ids(rng, lengths.system, shape.vocab)
        for way, peer in peers.items():
            tally.kept[way].timed(partial(peer.begin, system), 0)
        for number, turn in enumerate(_turns(rng, lengths, shape.vocab, turns, [system] * batch)):
            drawn = [
                one.ids for one in tally.engine.timed(partial(engine.generate, turn.requests(number)), turn.tokens)
            ]
            turn.answers.extend(drawn)
            for way, peer in peers.items():
                theirs = tally.kept[way].timed(partial(peer.answer, turn.new, turn.limits), turn.tokens)
                together[way] &= ~_compare(model, turn.prompts, drawn, theirs, together[way], tally)
            if number in sampled:
                again = tally.history.timed(partial(whole_history, model, turn.prompts, turn.limits), turn.tokens)
                _compare(model, turn.prompts, drawn, again, everywhere, tally)
            if paged is not None:
                theirs = tally.continuous.timed(partial(paged.answer, turn.prompts, turn.limits), turn.tokens)
                _compare(model, turn.prompts, drawn, theirs, everywhere, tally)
    return tally


def _turns(rng: np.random.Generator, lengths: Lengths, vocab: int, turns: int, histories: list[Ids]) -> Iterator[Turn]:
    """Each turn; its `answers` are to be filled in before the next is asked for."""
    for _ in range(turns):
        turn = _turn(rng, lengths, vocab, histories)
        yield turn
        histories = [np.concatenate(pair) for pair in zip(turn.prompts, turn.answers, strict=True)]


def _turn(rng: np.random.Generator, lengths: Lengths, vocab: int, histories: list[Ids]) -> Turn:
    limits = [int(rng.integers(*lengths.response, endpoint=True)) for _ in histories]
    seen = [_random_ids(rng, int(rng.integers(*lengths.observation, endpoint=True)), vocab) for _ in histories]
    prompts = [np.concatenate(pair) for pair in zip(histories, seen, strict=True)]
    return Turn(prompts, seen, limits)


def _spread(count: int, turns: int) -> set[int]:
    """`count` turns, evenly spread."""
    return {int((k + 0.5) * turns / min(count, turns)) for k in range(min(count, turns))}


def _random_ids(rng: np.random.Generator, count: int, vocab: int) -> Ids:
    return rng.integers(0, vocab, count).astype(np.int32)


def _compare(
    model: Any, prompts: Sequence[Ids], ours: Sequence[Ids], theirs: Sequence[Ids], among: Any, tally: Tally
) -> Any:
    """Which rows of `among` have other ids; a conversation that parted has another history from there on."""
    other = np.zeros(len(prompts), bool)
    for row in np.flatnonzero(among).tolist():
        tally.responses += 1
        other[row] = not np.array_equal(ours[row], theirs[row])
        tally.equal += not other[row]
        if other[row]:
            tally.gap = max(tally.gap, _gap(model, prompts[row], ours[row], theirs[row]))
    return other


def _gap(model: Any, prompt: Ids, ours: Ids, theirs: Ids) -> float:
    import torch

    first = int(np.flatnonzero(ours != theirs)[0])
    upto = np.concatenate((prompt, ours[:first]))
    with torch.inference_mode():
        best = model(torch.from_numpy(upto.astype(np.int64))[None]).logits[0, -1].topk(2).values
    return float(best[0] - best[1])

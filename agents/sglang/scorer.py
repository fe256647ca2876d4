"""SglangScorer: a teacher on SGLang servers that gives log-probabilities of given ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from turngym.agents.sglang.client.answers import check_temperature, read_scores, read_top
from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.client.requests import check_ids, score_body
from turngym.agents.sglang.client.retry import RetryingClient
from turngym.agents.sglang.errors import ServerError
from turngym.envs.episode import TopK

Ids = Sequence[NDArray[np.int32]]
Positions = Sequence[NDArray[np.int64]]
Row = tuple[NDArray[np.int32], NDArray[np.int64]]
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class SglangScorer:
    """Implements `Scorer`, and looks up chosen ids (`gather`): one request per row of ids, batched by the servers.

    Scores are log-softmax over everything that the model knows, at `temperature`. Position 0 cannot be scored. No
    gradient.

    Raises (all methods):
        ServerError: ids or positions that make no sense, more likely ids than there are, a likely id that the student
            does not have, or a temperature at which the server does not score.
        ServerDown, ServerTimeout, BadAnswer, WrongWeights: the servers failed for good.
    """

    fleet: Fleet
    vocabulary: int
    """Ids that the server's model knows; larger ones would end the server."""
    shared: int | None = None
    """Ids that the student has, too, where the models are padded to different sizes. What probability the server gives
    to the rest is not spread over the shared ones; it is next to nothing in a model that was trained on them."""
    temperature: float = 1.0
    """The normalizer of another one is a sum over all ids, so only the server can have it: its answers must say so."""
    block: int = 16
    """`gather`: positions that are looked up by one request; a request names its ids once for all of its positions."""
    _client: RetryingClient = field(init=False)
    _rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._client = RetryingClient(self.fleet)

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        """The K most likely ids at each position, most likely first."""
        limit = self.vocabulary if self.shared is None else min(self.shared, self.vocabulary)
        if not 1 <= k <= limit:
            raise ServerError(f"the {k} most likely ids were asked for; the model shares {limit}")

        async def one(row: Row, name: str) -> TopK:
            best, logp = await self._top(row, k, name)
            if best.size and best.max() >= limit:
                raise ServerError(
                    f"{name}: id {best.max()} is among the teacher's {k} most likely ones, but the student has {limit} "
                    "ids; take a smaller k, or load the teacher into this process"
                )
            return TopK(ids=best, logp=logp)

        return self._each(ids, positions, one)

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        """Log-probability of the id that stands at each position, given the ids before it: float32 [P]."""

        async def one(row: Row, name: str) -> NDArray[np.float32]:
            if not len(row[1]):
                return np.empty(0, np.float32)
            # the entry at logprob_start_len itself is null
            start = int(row[1].min()) - 1

            def read(answer: Any, floor: int) -> NDArray[np.float32]:
                found = self._scores(answer, row[0], start, name, floor)
                return found[row[1] - start]

            return await self._ask(name, lambda rid: score_body(rid, row[0], start, temperature=self.temperature), read)

        return self._each(ids, positions, one)

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        """Log-probabilities of `support` [P, K] at each of the P positions: float32 [P, K]."""
        # by identity: arrays have no hash, and _each hands on the very same ones
        wanted = {id(row): np.asarray(chosen, np.int64) for row, chosen in zip(positions, support, strict=True)}

        async def one(row: Row, name: str) -> NDArray[np.float32]:
            chosen = wanted[id(row[1])]
            # 0 is appended because a row without ids is refused
            check_ids(np.append(chosen.ravel(), 0).astype(np.int32), self.vocabulary, name)
            cuts = range(0, len(row[1]), self.block)
            parts = [
                await self._lookup(row[0], row[1][cut : cut + self.block], chosen[cut : cut + self.block], name)
                for cut in cuts
            ]
            return np.concatenate([np.empty((0, chosen.shape[-1]), np.float32), *parts])

        return self._each(ids, positions, one)

    async def _top(self, row: Row, k: int, name: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids, where = row
        if not len(where):
            return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
        start = int(where.min()) - 1

        def read(answer: Any, floor: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
            # the ids that were scored are checked, too: rows of another prompt must not pass for ours
            self._scores(answer, ids, start, name, floor)
            return read_top(answer, "input_top_logprobs", start, where, k, name)

        return await self._ask(name, lambda rid: score_body(rid, ids, start, top=k, temperature=self.temperature), read)

    async def _lookup(
        self, ids: NDArray[np.int32], where: NDArray[np.int64], chosen: NDArray[np.int64], name: str
    ) -> NDArray[np.float32]:
        start, upto = int(where.min()) - 1, int(where.max()) + 1
        union = np.unique(chosen)
        # ids after the last position cannot change its score
        row = ids[:upto]

        def read(answer: Any, floor: int) -> NDArray[np.float32]:
            self._scores(answer, row, start, name, floor)
            named, logp = read_top(answer, "input_token_ids_logprobs", start, where, len(union), name)
            if not np.array_equal(named, np.broadcast_to(union, named.shape)):
                raise ServerError(f"{name}: the server answered other ids than it was asked for")
            found: NDArray[np.float32] = np.take_along_axis(logp, np.searchsorted(union, chosen), axis=1)
            return found

        asked: dict[str, Any] = {"chosen": union.tolist(), "temperature": self.temperature}
        return await self._ask(name, lambda rid: score_body(rid, row, start, **asked), read)

    def _scores(self, answer: Any, ids: NDArray[np.int32], start: int, name: str, floor: int) -> NDArray[np.float32]:
        """Log-probabilities of `ids[start:]`, from the weights that the servers should have."""
        check_temperature(answer, self.temperature, name)
        found, weights = read_scores(answer, ids, start, name, last=self.vocabulary - 1)
        self.fleet.versions.read(((weights, 0, 0),), floor, name)
        return found

    async def _ask(self, name: str, make: Callable[[str], dict[str, Any]], read: Callable[[Any, int], T]) -> T:
        end = self.fleet.endpoint_for(name).connection.clock() + self.fleet.settings.deadline
        try:
            return await self._client.send(name, make, read, end, name)
        finally:
            self.fleet.forget(name)

    def _each(self, ids: Ids, positions: Positions, one: Callable[[Row, str], Awaitable[T]]) -> list[T]:
        rows = [(np.asarray(row, np.int32), where) for row, where in zip(ids, positions, strict=True)]
        for number, (row, where) in enumerate(rows):
            check_ids(row, self.vocabulary, f"row {number}")
            if len(where) and (where.min() < 1 or where.max() >= len(row)):
                raise ServerError(
                    f"row {number}: positions {int(where.min())}..{int(where.max())} must lie in 1..{len(row) - 1}: "
                    "an id is scored from the ids before it"
                )
            if len(row) >= min(server.max_prompt for server in self.fleet.servers):
                raise ServerError(f"row {number} has {len(row)} ids; the servers take less than {_limit(self.fleet)}")
        first, self._rows = self._rows, self._rows + len(rows)

        async def every() -> list[T]:
            jobs = [one(row, f"scoring row {first + number}") for number, row in enumerate(rows)]
            return list(await asyncio.gather(*jobs))

        return self.fleet.run(every())


def _limit(fleet: Fleet) -> int:
    return min(server.max_prompt for server in fleet.servers)

"""A student and a teacher on servers: `ServerPolicy` generates, `ServerScorer` scores given ids.

1. `PartialResponse`: a response that is generated in parts, because new weights interrupted it.
2. `ServerPolicy`: one request per response. It records which weights sampled each id.
3. `ServerScorer`: log-probabilities of given ids, of chosen ids and of the most likely ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.stop_text import StopText
from turngym.agents.servers.fleet import Fleet, PolicySpan, WeightVersions
from turngym.agents.servers.server_connection import (
    ClientLimits,
    DrawRequest,
    Score,
    ServerDialect,
    ServerError,
    ServerInfo,
    check_ids,
    check_request,
)
from turngym.core.episode import TopK
from turngym.core.protocols import GenerateRequest, Generation, PartialFailure


@dataclass(slots=True)
class PartialResponse:
    """The parts of one response so far, each generated with the weights of its time."""

    parts: list[Generation] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of ids so far."""
        return sum(len(part.ids) for part in self.parts)

    def drawn(self) -> list[tuple[int, float]]:
        """All ids so far, with their log-probabilities."""
        return [pair for part in self.parts for pair in zip(part.ids.tolist(), part.logprobs.tolist(), strict=True)]

    def prompt_of(self, request: GenerateRequest) -> NDArray[np.int32]:
        """The prompt of the next part: the request's own, then all ids so far."""
        return np.concatenate([np.asarray(request.prompt_ids, np.int32), *(part.ids for part in self.parts)])

    def ended_by(self, last: Generation, request: GenerateRequest, stops: StopText | None) -> Generation:
        """The whole response with `last` as its last part, cut after a stop text that spans two parts."""
        before = self.length
        if not before:
            return last
        response = PartialResponse([*self.parts, last]).whole(last.finish)
        if stops is None or not request.sampling.stop_text:
            return response
        length = stops.first_hit(response.ids.tolist(), before, request.sampling.stop_text)
        if length is None:
            return response
        spans = response.version_spans or ((response.policy_version, 0, len(response.ids)),)
        cut_spans = [(version, start, min(end, length)) for version, start, end in spans]
        return make_generation(response.ids[:length], response.logprobs[:length], "stop", cut_spans)

    def whole(self, finish: str) -> Generation:
        """All parts as one response."""
        spans: list[PolicySpan] = []
        offset = 0
        for part in self.parts:
            part_spans = part.version_spans or ((part.policy_version, 0, len(part.ids)),)
            spans += [(version, offset + start, offset + end) for version, start, end in part_spans]
            offset += len(part.ids)
        ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in self.parts)])
        logprobs = np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in self.parts)])
        return make_generation(ids, logprobs, finish, spans)


def make_generation(
    ids: NDArray[np.int32], logprobs: NDArray[np.float32], finish: str, spans: Sequence[PolicySpan]
) -> Generation:
    """A generation that `spans` cover; empty spans are dropped, and neighbors of the same version merged.

    `finish` is as in `Generation`, or `abort` for a part that will be continued.
    """
    merged: list[PolicySpan] = []
    for version, start, end in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1], end)
        elif end > start:
            merged.append((version, start, end))
    # a response without ids has the version of the weights that gave none
    oldest = min((version for version, _, _ in merged), default=spans[-1][0] if spans else 0)
    merged = merged if len(merged) > 1 else []
    return Generation(ids=ids, logprobs=logprobs, finish=finish, policy_version=oldest, version_spans=tuple(merged))


class ServerPolicy:
    """Implements `Policy` over a fleet: one request per response; the servers batch them.

    Token ids go in and out. Temperature, stop ids, stop texts and random seeds are sent with each request. A server
    that honors seeds (`turngym serve policy` starts one) draws the same ids for the same stream whatever else it is
    doing, up to rounding. They differ from the ids that the local engine draws. A prompt that leaves no room gives no
    ids and finish `length`. The model's own end tokens end a response, too.

    Args:
        vocabulary: number of ids that the model knows. Larger ids are refused here, since they would crash the server.
        vocab_size: only the first so many ids are drawn, as an algorithm scores no others; None: all.
        max_length: most ids of prompt and response together; if None, what the servers allow.
        stops: finds stop texts in a response that was aborted and continued. Without it a response whose request has
            stop texts is not continued.

    Raises (`generate`):
        ServerError: an invalid request, before anything is sent, or one that a server refuses.
        PartialFailure: some requests failed for good (ServerDown, ServerTimeout, BadAnswer, WrongWeights).
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        vocabulary: int,
        vocab_size: int | None = None,
        max_length: int | None = None,
        stops: StopText | None = None,
    ) -> None:
        self.fleet = fleet
        self.vocabulary, self.vocab_size = vocabulary, vocab_size
        limit = min(server.max_length for server in fleet.servers)
        self.max_length = limit if max_length is None else min(max_length, limit)
        self.cached_tokens = 0
        """Prompt ids since construction whose keys and values the servers had already."""
        self.prompt_tokens = 0
        self.stops = stops

    def for_workers(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """How a worker process makes a client of the same servers, in the form that `__reduce__` returns.

        The copy knows the weights that the servers have now. It cannot repair a server that restarts with other
        weights: its requests fail, and their episodes end as `error_engine`.
        """
        options = {
            "vocabulary": self.vocabulary,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "stops": self.stops,
        }
        fleet = self.fleet
        return connect_policy, (tuple(fleet.urls), fleet.settings, fleet.versions, tuple(fleet.servers), options)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the servers were given last."""
        return self.fleet.versions.version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order, each depending only on its request and the weights."""
        for number, request in enumerate(requests):
            check_request(request, self.vocabulary, f"request {number} (session {request.session!r})")

        async def every() -> list[Generation | BaseException]:
            return await asyncio.gather(*map(self._generate, requests), return_exceptions=True)

        results = self.fleet.loop.run(every())
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, (RuntimeError, OSError)):
                raise error
        if errors:
            raise PartialFailure(results) from errors[0]
        return [result for result in results if isinstance(result, Generation)]

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        self.fleet.forget(session)

    async def _generate(self, request: GenerateRequest) -> Generation:
        settings, max_prompt = self.fleet.settings, self.fleet.max_prompt
        prompt_length = len(request.prompt_ids)
        room = min(request.sampling.max_new_tokens, self.max_length - prompt_length)
        response = PartialResponse()
        if room < 1 or prompt_length >= max_prompt:
            return response.whole("length")
        can_continue = self.stops is not None or not request.sampling.stop_text
        clock = self.fleet.endpoint_for(request.session).connection.clock
        end = clock() + settings.deadline
        while True:
            part = await self._generate_part(request, response, room, end)
            generation = response.ended_by(part, request, self.stops)
            if generation.finish != "abort":
                return generation
            response.parts.append(part)
            # a server breaks responses off to change its weights, and they are continued; without the pause one that
            # brings nothing would be repeated in a tight loop
            if not part.ids.size and clock() + settings.backoff < end:
                await asyncio.sleep(settings.backoff)
            if clock() >= end or not can_continue or response.length >= room:
                return response.whole("aborted")
            # to continue, what was drawn is sent as part of the prompt
            if prompt_length + response.length >= max_prompt:
                return response.whole("length")

    async def _generate_part(
        self, request: GenerateRequest, response: PartialResponse, room: int, end: float
    ) -> Generation:
        """What one request to a server adds to `response`; finish `abort` if the server interrupted it."""
        where, dialect = f"session {request.session!r}", self.fleet.dialect
        ask = DrawRequest(
            where=where,
            prompt=response.prompt_of(request),
            sampling=request.sampling,
            stream=request.stream,
            count=room - response.length,
            vocabulary=self.vocabulary,
            shared=self.vocabulary if self.vocab_size is None else min(self.vocab_size, self.vocabulary),
            drawn=response.length,
        )

        def read(answer: object, floor: int) -> Generation:
            part = dialect.read_generation(answer, ask)
            spans = self.fleet.versions.read(part.spans, floor, where)
            if part.finish == "abort" and part.status is not None and 400 <= part.status < 500:
                raise ServerError(f"{where}: the server refused it: {part.reason}")
            self.cached_tokens += part.cached
            self.prompt_tokens += len(ask.prompt)
            return make_generation(part.ids, part.logprobs, part.finish, spans)

        return await self.fleet.send(request.session, ask, read, end)


_FLEETS: dict[tuple[Any, ...], Fleet] = {}
"""Connections of a worker process, whose servers get their weights from another process. They outlast a rollout."""


def connect_policy(
    urls: Sequence[str],
    settings: ClientLimits,
    versions: WeightVersions,
    servers: Sequence[ServerInfo],
    options: Mapping[str, Any],
) -> ServerPolicy:
    """Makes, in a worker process, a policy on servers that another process has opened.

    Args:
        versions: the names of the servers' weights, which replace those that the connections know.
        servers: what they said to the other process about themselves, so that they are not asked again.
    """
    key = (*urls, settings)
    if key not in _FLEETS:
        _FLEETS[key] = Fleet(urls=urls, settings=settings).open(known=servers)
    _FLEETS[key].versions = versions
    return ServerPolicy(_FLEETS[key], **options)


MORE = 16
"""How many likely ids behind the K are asked for: what they hold is a part of the tail that is known."""


def bounded_tail(logp_PK: NDArray[np.float32], more_PM: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Log-probability of all but the K most likely of `size` ids: float32 [P], nats.

    What the K leave of 1, which is known to about 1e-7, within what the M that follow them say: the tail holds at least
    these, and of the others none is likelier than the last of them. A sure teacher's tail is nearly all in the M.
    """
    kept, more = logp_PK.astype(np.float64), more_PM.astype(np.float64)
    others = size - kept.shape[1] - more.shape[1]
    rest = np.maximum(-np.expm1(np.logaddexp.reduce(kept, axis=1)), 1e-7)
    if not more.shape[1]:
        return np.log(rest).astype(np.float32)
    low = np.logaddexp.reduce(more, axis=1)
    high = np.logaddexp(low, more[:, -1] + np.log(others)) if others else low
    return np.clip(np.log(rest), low, high).astype(np.float32)


Ids = Sequence[NDArray[np.int32]]
Positions = Sequence[NDArray[np.int64]]
Row = tuple[NDArray[np.int32], NDArray[np.int64]]
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ServerScorer:
    """Implements `Scorer` over a fleet, and scores chosen ids (`gather`): one request per row; the servers batch them.

    Scores are log-softmax over the model's whole vocabulary, at `temperature`. Position 0 has no score. There are no
    gradients.

    Raises (all methods):
        ServerError: invalid ids or positions, k larger than the vocabulary, a likely id that the student lacks, or a
            temperature that the server does not support.
        ServerDown, ServerTimeout, BadAnswer, WrongWeights: the servers failed for good.
    """

    fleet: Fleet
    vocabulary: int
    """Number of ids that the server's model knows; larger ids would crash the server."""
    shared: int | None = None
    """Number of ids that the student has, too, where the models are padded to different sizes. The probability of the
    other ids is not redistributed; it is close to zero in a model that was trained on the shared ones."""
    temperature: float = 1.0
    """Temperature of the scores. Only the server can normalize them at another one, and its answer must say so."""
    block: int = 0
    """`gather`: most positions per request; 0: as the servers' dialect has it."""
    _rows: int = field(default=0, init=False)
    _more: int = field(default=MORE, init=False)

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        """The K most likely ids at each position, most likely first."""
        limit = self.vocabulary if self.shared is None else min(self.shared, self.vocabulary)
        if not 1 <= k <= limit:
            raise ServerError(f"the {k} most likely ids were asked for; the model shares {limit}")

        async def topk_of(row: Row, name: str) -> TopK:
            if not len(row[1]):
                return TopK(ids=np.empty((0, k), np.int32), logp=np.empty((0, k), np.float32))
            best, logp = await self._likeliest(row, name, k)
            # rows that pad the teacher's head go behind those of the student, and into the tail
            order = np.argsort(best >= limit, axis=1, kind="stable")
            best, logp = np.take_along_axis(best, order, axis=1), np.take_along_axis(logp, order, axis=1)
            if best[:, :k].max() >= limit:
                raise ServerError(
                    f"{name}: id {best[:, :k].max()} is among the teacher's {best.shape[1]} most likely ones, but the "
                    f"student has {limit} ids; take a smaller k than {k}, or load the teacher into this process"
                )
            tail = bounded_tail(logp[:, :k], logp[:, k:], self.vocabulary)
            return TopK(ids=best[:, :k], logp=logp[:, :k], tail=tail)

        return self._each(ids, positions, topk_of)

    async def _likeliest(self, row: Row, name: str, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The K most likely ids [P, K + M], and the M after them, where the server lists so many."""
        extra = min(self._more, self.vocabulary - k)
        read = lambda answer, ask, _: self._dialect.read_top(answer, ask)  # noqa: E731
        try:
            return await self._ask(row, name, read, top=k + extra)
        except ServerError:
            if not extra:
                raise
            likeliest = await self._ask(row, name, read, top=k)
            # it lists as many as were asked for and no more: the others need not be refused, too
            self._more = 0
            return likeliest

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        """Log-probability of the id at each position, given the ids before it: float32 [P]."""

        async def logprobs_of(row: Row, name: str) -> NDArray[np.float32]:
            if not len(row[1]):
                return np.empty(0, np.float32)
            return await self._ask(row, name, lambda _, ask, scores: scores[row[1] - ask.start])

        return self._each(ids, positions, logprobs_of)

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[TopK]:
        """Log-probabilities of `support` [P, K] at each of the P positions."""
        # keyed by identity: arrays have no hash, and _each passes on these very arrays
        support_of = {id(row): np.asarray(chosen, np.int64) for row, chosen in zip(positions, support, strict=True)}

        async def gathered(row: Row, name: str) -> TopK:
            chosen, block = support_of[id(row[1])], self.block or self._dialect.block
            # 0 is appended because check_ids refuses an empty row
            check_ids(np.append(chosen.ravel(), 0).astype(np.int32), self.vocabulary, name)
            parts = [np.empty((0, chosen.shape[-1]), np.float32)]
            for start in range(0, len(row[1]), block):
                part = slice(start, start + block)
                read = lambda answer, ask, _: self._dialect.read_chosen(answer, ask)  # noqa: E731
                parts.append(await self._ask((row[0], row[1][part]), name, read, chosen=chosen[part]))
            return TopK(ids=chosen.astype(np.int32), logp=np.concatenate(parts))

        return self._each(ids, positions, gathered)

    @property
    def longest(self) -> int:
        """Most ids of a row."""
        return self.fleet.max_prompt - 1

    @property
    def _dialect(self) -> ServerDialect:
        return self.fleet.dialect

    async def _ask(self, row: Row, name: str, read: Callable[[Any, Score, NDArray[np.float32]], T], **asked: Any) -> T:
        """What `read(answer, ask, scores)` makes of the answer to one request about the positions of `row`.

        `scores` are of the row's ids from the request's `start` on: they show that the server scored our ids, with its
        own weights.
        """
        ask = Score(
            where=name,
            # ids after the last position cannot change its score
            ids=row[0][: int(row[1].max()) + 1],
            start=int(row[1].min()) - 1,
            positions=row[1],
            vocabulary=self.vocabulary,
            temperature=self.temperature,
            **asked,
        )

        def checked(answer: Any, floor: int) -> T:
            scores, weights = self._dialect.read_scores(answer, ask)
            self.fleet.versions.read(((weights, 0, 0),), floor, name)
            return read(answer, ask, scores)

        end = self.fleet.endpoint_for(name).connection.clock() + self.fleet.settings.deadline
        try:
            return await self.fleet.send(name, ask, checked, end)
        finally:
            self.fleet.forget(name)

    def _each(self, ids: Ids, positions: Positions, score: Callable[[Row, str], Awaitable[T]]) -> list[T]:
        """Check all rows, then run `score` on each of them at the same time."""
        rows = [(np.asarray(row, np.int32), places) for row, places in zip(ids, positions, strict=True)]
        for number, (row, places) in enumerate(rows):
            check_ids(row, self.vocabulary, f"row {number}")
            if len(places) and (places.min() < 1 or places.max() >= len(row)):
                raise ServerError(
                    f"row {number}: positions {int(places.min())}..{int(places.max())} must lie in 1..{len(row) - 1}: "
                    "an id is scored from the ids before it"
                )
            if len(row) > self.longest:
                raise ServerError(f"row {number} has {len(row)} ids; the servers take at most {self.longest}")
        first, self._rows = self._rows, self._rows + len(rows)

        async def every() -> list[T]:
            jobs = [score(row, f"scoring row {first + number}") for number, row in enumerate(rows)]
            # vLLM 0.32 on a CPU ends when it scores with --enable-lora and has another request in its batch
            if any(server.adapters for server in self.fleet.servers):
                return [await job for job in jobs]
            return list(await asyncio.gather(*jobs))

        return self.fleet.loop.run(every())

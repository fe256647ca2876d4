"""SglangPolicy: generates with SGLang servers over HTTP and records which weight version sampled each id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from turngym.agents.sglang.client import (
    GeneratedPart,
    ServerError,
    SglangSettings,
    check_ids,
    check_request,
    check_temperature,
    generate_body,
    read_generation,
    read_scores,
    read_top,
    score_body,
    seed_of,
)
from turngym.agents.sglang.fleet import Fleet, PolicySpan, RetryingClient, WeightVersions, shared_fleet
from turngym.envs.core.episode import TopK
from turngym.envs.core.protocols import GenerateRequest, Generation, PartialFailure

# Finds stop strings in responses that were generated in parts; a server sees each part alone.


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> Any: ...


class StopFinder:
    """Finds the first stop text that became complete at or after a given id."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def first_hit(self, ids: Sequence[int], start: int, stops: Sequence[str]) -> int | None:
        """Number of ids up to and with the first one after `ids[:start]` that completes one of `stops`; None: none."""
        # every id adds at least one byte of text, except special ones; the margin is for those
        reach = max(len(stop.encode()) for stop in stops) + 16
        for length in range(start + 1, len(ids) + 1):
            tail = str(
                self._tokenizer.decode(
                    list(ids[max(0, length - reach) : length]),
                    skip_special_tokens=False,
                    clean_up_tokenization_spaces=False,
                )
            )
            if any(stop in tail for stop in stops):
                return length
        return None


@dataclass(slots=True)
class _Response:
    """One response in progress: the ids sampled so far, and by which weights."""

    prompt: NDArray[np.int32]
    room: int
    parts: list[GeneratedPart] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.concatenate([np.empty(0, np.int32), *(part.ids for part in self.parts)])

    def add(self, part: GeneratedPart, spans: tuple[PolicySpan, ...]) -> None:
        before = sum(len(one.ids) for one in self.parts)
        self.parts.append(part)
        for version, start, end in spans:
            self._add_span(version, before + start, before + end)

    def truncate(self, length: int) -> None:
        """Keep the first `length` ids."""
        ids, logprobs = self.ids[:length], self.logprobs[:length]
        self.parts = [GeneratedPart(ids=ids, logprobs=logprobs, finish="stop", spans=(), cached=0)]
        self.spans = [(version, start, min(end, length)) for version, start, end in self.spans if start < length]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in self.parts)])

    def _add_span(self, version: int, start: int, end: int) -> None:
        # a part that was aborted without ids left an empty span, which the next one replaces
        if self.spans and (self.spans[-1][0] == version or self.spans[-1][2] == self.spans[-1][1]):
            start = self.spans.pop()[1]
        self.spans.append((version, start, end))

    def generation(self, finish: str) -> Generation:
        spans = tuple(self.spans)
        return Generation(
            ids=self.ids,
            logprobs=self.logprobs,
            finish=finish,
            policy_version=min((version for version, _, _ in spans), default=0),
            version_spans=spans if len(spans) > 1 else (),
        )


class SglangPolicy:
    """Implements `Policy` over a fleet: one request to /generate per continuation; the servers batch them.

    Token ids go in and out, nothing is rendered or read on the servers. Temperature, stop ids and stop texts are ours,
    and so are the random numbers: a server that takes seeds (`turngym serve policy` starts one) draws the same ids for
    the same stream whatever else it is doing, up to rounding; they are not the local engine's. A prompt that leaves no
    room gives no ids and finish `length`. Besides our stop ids the model's own end tokens end a response.

    Args:
        fleet: open servers.
        vocabulary: ids that the model knows; larger ones are refused here, since they would end the server.
        max_length: most ids of prompt and response together; what the servers allow if None.
        stops: finds stop texts in a response that was aborted and continued; without it such a response is not
            continued where the request has stop texts.

    Raises (`generate`):
        ServerError: a request that makes no sense, before anything is sent, or that a server refuses.
        PartialFailure: some requests failed for good (ServerDown, ServerTimeout, BadAnswer, WrongWeights).
    """

    def __init__(
        self, fleet: Fleet, *, vocabulary: int, max_length: int | None = None, stops: StopFinder | None = None
    ) -> None:
        self.fleet = fleet
        self.vocabulary = vocabulary
        limit = min(server.max_length for server in fleet.servers)
        self.max_length = limit if max_length is None else min(max_length, limit)
        self.max_prompt = min(server.max_prompt for server in fleet.servers)
        self.cached_tokens = 0
        """Prompt ids that the servers did not have to compute again, since construction."""
        self.prompt_tokens = 0
        self._client = RetryingClient(fleet)
        self.stops = stops
        self._epoch = 0

    def for_workers(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """How a worker process makes a client of the same servers, as `__reduce__` returns it.

        The copy knows the weights that the servers have now. It cannot repair a server that is restarted with others:
        its requests fail, and their episodes end as `error_engine`.
        """
        options = {"vocabulary": self.vocabulary, "max_length": self.max_length, "stops": self.stops}
        return connect_policy, (tuple(self.fleet.urls), self.fleet.settings, self.fleet.versions, options)

    @property
    def policy_version(self) -> int:
        """Of the weights that the servers were last given."""
        return self.fleet.versions.version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order, each depending on its request and the weights alone."""
        for number, request in enumerate(requests):
            check_request(request, self.vocabulary, f"request {number} (session {request.session!r})")
        results = self.fleet.run(self._generate_all(requests))
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

    def abort(self) -> int:
        """Abort all requests in flight, from another thread; what was sampled comes back with finish `aborted`.

        Returns how many requests were in flight.
        """
        self._epoch += 1
        return self.fleet.run(self._client.abort_all())

    async def _generate_all(self, requests: Sequence[GenerateRequest]) -> list[Generation | BaseException]:
        return list(await asyncio.gather(*(self._generate(request) for request in requests), return_exceptions=True))

    async def _generate(self, request: GenerateRequest) -> Generation:
        prompt = np.asarray(request.prompt_ids, np.int32)
        room = min(request.sampling.max_new_tokens, self.max_length - len(prompt))
        response = _Response(prompt, room if len(prompt) < self.max_prompt else 0)
        if response.room < 1:
            return response.generation("length")
        epoch, settings = self._epoch, self.fleet.settings
        clock = self.fleet.endpoint_for(request.session).connection.clock
        end = clock() + settings.deadline
        while True:
            had = len(response.ids)
            part, spans = await self._generate_part(request, response, end)
            response.add(part, spans)
            # within one part the server finds stop texts itself
            if response.parts[:-1] and self._stop_text_completed(request, response, had):
                return response.generation("stop")
            if part.finish != "abort":
                return response.generation(part.finish)
            # an abort that brings nothing would otherwise be asked again in a tight loop
            if not part.ids.size and clock() + settings.backoff < end:
                await asyncio.sleep(settings.backoff)
            gave_up = clock() >= end or not self._may_continue(request)
            # the epoch tells our own abort() from a server that broke off to change its weights
            if epoch != self._epoch or gave_up or len(response.ids) >= response.room:
                return response.generation("aborted")
            # to go on, what was drawn is sent as prompt, which must be shorter than this
            if len(prompt) + len(response.ids) >= self.max_prompt:
                return response.generation("length")

    async def _generate_part(
        self, request: GenerateRequest, response: _Response, end: float
    ) -> tuple[GeneratedPart, tuple[PolicySpan, ...]]:
        previous = response.ids
        prompt, count = np.concatenate((response.prompt, previous)), response.room - len(previous)
        where = f"session {request.session!r}"
        seed = seed_of(request.stream)

        def read(answer: object, floor: int) -> tuple[GeneratedPart, tuple[PolicySpan, ...]]:
            part = read_generation(answer, where, count)
            return part, self.fleet.versions.read(part.spans, floor, where)

        part, spans = await self._client.send(
            request.session, lambda rid: generate_body(rid, prompt, request.sampling, seed, count), read, end, where
        )
        self.cached_tokens += part.cached
        self.prompt_tokens += len(prompt)
        if part.finish == "abort" and part.status is not None and 400 <= part.status < 500:
            raise ServerError(f"{where}: the server refused it: {part.reason}")
        return part, spans

    def _may_continue(self, request: GenerateRequest) -> bool:
        return self.fleet.settings.resume_aborted and (self.stops is not None or not request.sampling.stop_text)

    def _stop_text_completed(self, request: GenerateRequest, response: _Response, had: int) -> bool:
        """Whether a stop text spans the place where the response was aborted; what follows it is dropped."""
        if self.stops is None or not request.sampling.stop_text:
            return False
        length = self.stops.first_hit(response.ids.tolist(), had, request.sampling.stop_text)
        if length is None:
            return False
        response.truncate(length)
        return True


def connect_policy(
    urls: Sequence[str], settings: SglangSettings, versions: WeightVersions, options: Mapping[str, Any]
) -> SglangPolicy:
    """In a worker process: a policy on the servers at `urls`, whose weights are known to be `versions`."""
    return SglangPolicy(shared_fleet(urls, settings, versions), **options)


# SglangScorer: a teacher on SGLang servers that gives log-probabilities of given ids.

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

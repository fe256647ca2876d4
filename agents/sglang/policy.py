"""SglangPolicy: generates with SGLang servers over HTTP and records which weight version sampled each id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.sglang.client.answers import GeneratedPart, read_generation
from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.client.requests import check_request, generate_body, seed_of
from turngym.agents.sglang.client.retry import RetryingClient
from turngym.agents.sglang.client.stop_strings import StopFinder
from turngym.agents.sglang.errors import ServerError
from turngym.agents.sglang.settings import SglangSettings
from turngym.agents.sglang.weights.weight_versions import PolicySpan, WeightVersions
from turngym.agents.sglang.weights.worker_client import shared_fleet
from turngym.envs.protocols import GenerateRequest, Generation, PartialFailure


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

"""All servers of one model, or a router in front of them: which server gets a request, and what all of them are told.

1. `read_info`: which kind of server it is, what it says about itself, and which releases are supported.
2. `WeightVersions`: which weights the servers were given, so that an answer can say who sampled it.
3. `Fleet`: the connections, and requests that survive a server's restart.
4. `check_...`: a server has the model, the tokenizer and the weights that are meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import numpy as np

from turngym.agents.servers.server_connection import (
    KEY,
    OWN_NAME,
    Call,
    ClientLimits,
    Connection,
    DrawRequest,
    NotThere,
    Score,
    ServerDialect,
    ServerDown,
    ServerError,
    ServerInfo,
    ServerTimeout,
    VersionSpan,
    WrongWeights,
    architecture,
    fields_of_other_types,
    model_config,
    next_pause,
    text_part,
)
from turngym.agents.servers.sglang_dialect import SglangDialect
from turngym.agents.servers.vllm_dialect import VllmDialect
from turngym.core.clean_keys import key_of
from turngym.core.http_client import SMALL_ANSWER, LoopThread
from turngym.core.http_connection import is_here
from turngym.core.redaction import brief, excerpt, redacted

ADMIN_TIMEOUT = 300.0
"""Seconds for an administrative call, such as an update of the weights."""


async def read_info(connection: Connection, wait: float) -> ServerInfo:
    """Ask a server which kind it is and about itself, for up to `wait` seconds while it starts.

    Raises ServerError if it is down, or is no server that generates.
    """
    patience = max(wait, connection.settings.connect_timeout)
    answers = []
    for path, kind in (("/version", VllmDialect), ("/server_info", SglangDialect)):
        try:
            info = await connection.get_until(path, patience)
        except NotThere as error:
            info = error
        if isinstance(info, dict) and "version" in info:
            return await kind().read_info(connection, patience)
        answers.append(f"{path} says {excerpt(info, 200)}")
    raise ServerError(f"{connection.url} is neither an SGLang nor a vLLM server: {'; '.join(answers)}")


def check_servers(servers: Sequence[ServerInfo]) -> None:
    """Raises ServerError for a release that is not supported, or servers that differ in kind, release or model."""
    for server in servers:
        dialect = server.dialect
        version = excerpt(server.version, 80)
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if not dialect.supported[0] <= release < dialect.supported[1]:
            oldest, before = (".".join(map(str, bound)) for bound in dialect.supported)
            raise ServerError(
                f"{server.url} is {dialect.name} {version}; supported are {oldest} up to, but not, {before} "
                f"(tried: {dialect.tried.partition('==')[2]}): pip install '{dialect.tried}'"
            )
    names = {"dialect": "kind", "version": "release", "kind": "architecture", "max_prompt": "longest prompt"}
    for name, what in names.items():
        if len({getattr(server, name) for server in servers}) > 1:
            rows = ", ".join(f"{server.url} {excerpt(getattr(server, name), 80)}" for server in servers)
            raise ServerError(f"the servers differ in {what}: {rows}")


PolicySpan = tuple[int, int, int]
"""A policy version and the half-open range of response ids that it sampled."""


@dataclass(slots=True)
class WeightVersions:
    """Names of weight versions in the order in which the servers were given them.

    A server says with every answer which named weights sampled it. A name that is unknown here, or that was replaced
    before the request was sent, means that the server was restarted or that another client changed its weights.
    """

    adapters: bool = False
    """Whether the weights are adapters, which requests must name."""
    place: int = 0
    """Place of the weights that all servers have. Note it when a request is sent: its answer must not be older."""
    _known: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name to (place, policy version)."""
    _names: int = 0
    _owner: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def current(self) -> str | None:
        """Name of the weights that all servers have; None before the first."""
        # copied into a list, since another thread may be announcing new weights
        return next((name for name, (place, _) in list(self._known.items()) if place == self.place), None)

    @property
    def version(self) -> int:
        """Policy version of those weights."""
        return next((version for place, version in list(self._known.values()) if place == self.place), 0)

    def new_name(self, version: int) -> str:
        """A name that no server has yet: not `default`, not another run's, not that of a failed attempt."""
        self._names += 1
        return f"{OWN_NAME}{self._owner}-{self._names}-v{version}"

    def add(self, name: str, version: int) -> None:
        """Record that all servers have the weights `name`."""
        self.announce(name, version)
        self.settle(name)

    def announce(self, name: str, version: int) -> None:
        """Record that the servers are receiving the weights `name`: answers may come from these or the former ones."""
        self._known[name] = (1 + max((place for place, _ in self._known.values()), default=0), version)

    def settle(self, name: str) -> None:
        """Record that all servers have the announced weights `name`: requests from now on must be answered by them."""
        self.place = self._known[name][0]

    def read(self, spans: tuple[VersionSpan, ...], floor: int, where: str) -> tuple[PolicySpan, ...]:
        """The spans with policy versions. Raises WrongWeights for a name that is unknown, or older than `floor`."""
        policy_spans: list[PolicySpan] = []
        for name, start, end in spans:
            place, version = self._known.get(name, (-1, 0))
            if place < floor:
                raise WrongWeights(
                    f"{where}: sampled with weights {name!r}; the server was last given {self.current!r}. It was "
                    "restarted, or another client changed its weights"
                )
            policy_spans.append((version, start, end))
        return tuple(policy_spans)


ABORT_SECONDS = 5.0
"""Seconds that a server gets to return what it had sampled after a request is aborted."""
T = TypeVar("T")


@dataclass(slots=True)
class Endpoint:
    """One address for requests to /generate."""

    connection: Connection
    slots: asyncio.Semaphore
    """Limits the requests in flight."""
    load: int = 0
    """Number of requests in flight or waiting for a slot."""
    failures: int = 0
    """Number of failed attempts since its last answer."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Servers of one kind with the same model. Call `open` before anything else.

    Administrative calls (weights, pauses, aborts) go to every server, also behind a router: SGLang's router only
    forwards /generate, and lists its servers under /workers.
    """

    urls: Sequence[str]
    settings: ClientLimits = field(default_factory=ClientLimits)
    versions: WeightVersions = field(default_factory=WeightVersions)
    servers: list[ServerInfo] = field(default_factory=list, init=False)
    repair: Callable[[str], None] | None = field(default=None, init=False)
    """Gives the server at a url the weights that it should have; called when it answers with others."""
    loop: LoopThread = field(init=False)
    _endpoints: list[Endpoint] = field(default_factory=list, init=False)
    _admin: list[Connection] = field(default_factory=list, init=False)
    _assigned: dict[str, Endpoint] = field(default_factory=dict, init=False)
    _repairing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _repairs: Counter[str] = field(default_factory=Counter, init=False)
    """How often the server at a url has been given its weights again."""

    def open(self, *, wait: float = 0.0, known: Sequence[ServerInfo] = ()) -> Self:
        """Connect, waiting up to `wait` seconds for servers that start; `known` ones are not asked about themselves.

        Raises ServerError if no url is given, a server is down or of an unsupported release, or if the servers differ.
        """
        if not self.urls:
            raise ServerError("no server was named; give at least one url")
        self.loop = LoopThread("server-client")
        try:
            self.servers = self.loop.run(self._discover(wait, known))
            check_servers(self.servers)
        except BaseException:
            self.close()
            raise
        names = {server.weights for server in self.servers}
        # if they differ none is recorded, so that answers are refused until weights are published
        if len(names) == 1:
            self.versions.add(names.pop(), 0)
        return self

    def close(self) -> None:
        """Close the connections. The servers continue to run."""
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()

    @property
    def max_prompt(self) -> int:
        """A prompt must be shorter than this for every server."""
        return min(server.max_prompt for server in self.servers)

    @property
    def dialect(self) -> ServerDialect:
        return self.servers[0].dialect

    @property
    def model(self) -> str | None:
        """The adapter that requests name; None for the servers' own model."""
        return self.versions.current if self.versions.adapters else None

    def call_all(self, *calls: Call) -> list[Any]:
        """Answers of all servers to the last of `calls`; all are asked at the same time, each once and in order.

        Raises the first error, which names its server.
        """

        async def every() -> list[Any]:
            return await asyncio.gather(*(self._calls(connection, calls) for connection in self._admin))

        return self.loop.run(every())

    def call_one(self, url: str, *calls: Call, limit: int = SMALL_ANSWER) -> Any:
        """Answer of the server at `url` to the last of `calls`, each asked once and in order."""
        connection = next(connection for connection in self._admin if connection.url == url)
        return self.loop.run(self._calls(connection, calls, limit))

    async def _calls(self, connection: Connection, calls: Sequence[Call], limit: int = SMALL_ANSWER) -> Any:
        answer = None
        for method, path, body in calls:
            answer = await connection.request(method, path, body, timeout=ADMIN_TIMEOUT, limit=limit)
        return answer

    def weights_of(self, url: str) -> str:
        """The name of the weights that the server at `url` says it has."""
        answer = self.call_one(url, ("GET", self.dialect.weights_path, None))
        return str(answer.get("weight_version")) if isinstance(answer, dict) else str(answer)

    async def abort(self, rid: str) -> None:
        """Abort a request on whichever server has it."""
        method, path, body = self.dialect.abort_call(rid)
        for connection in self._admin:
            # a server that is down has lost the request anyway
            with contextlib.suppress(ServerError):
                await connection.request(method, path, body, timeout=self.settings.connect_timeout)

    def endpoint_for(self, session: str) -> Endpoint:
        """The endpoint of `session`: always the same while it answers, so that its prefix cache is reused."""
        endpoint = self._assigned.get(session)
        if endpoint is None or endpoint.failures:
            endpoint = min(self._endpoints, key=lambda candidate: (candidate.failures, candidate.load))
            self._assigned[session] = endpoint
        return endpoint

    def forget(self, session: str) -> None:
        self._assigned.pop(session, None)

    async def send(self, session: str, ask: DrawRequest | Score, read: Callable[[Any, int], T], end: float) -> T:
        """What is answered to `ask`, parsed by `read(answer, floor)`; `end` is the deadline on the connections' clock.

        If a server is down, wait for it or ask another one; if it has the wrong weights, give it the right ones again.
        Raises ServerDown, ServerTimeout or WrongWeights if that has not helped by the deadline.

        Args:
            read: parses the JSON; raises WrongWeights for weights older than `floor` (`WeightVersions.place` when the
                request was sent).
        """
        pause, tries, where = self.settings.backoff, 0, ask.where
        while True:
            endpoint = self.endpoint_for(session)
            tries += 1
            floor, repairs = self.versions.place, self._repairs[endpoint.connection.url]
            try:
                answer = await self._once(endpoint, ask, end)
                endpoint.failures = 0
                return read(answer, floor)
            except ServerDown as error:
                endpoint.failures += 1
                if endpoint.connection.clock() + pause >= end:
                    raise ServerDown(f"{where}: {error} (tried {tries} times)") from error
            except WrongWeights as error:
                if endpoint.connection.clock() + pause >= end or not await self._repaired(endpoint, floor, repairs):
                    hint = "Its weights were sent again without success"
                    if self.repair is None:
                        hint = "Start it with the model that is meant, and run again"
                    raise WrongWeights(f"{error}. {hint}") from error
            await asyncio.sleep(pause)
            pause = next_pause(pause)

    async def _once(self, endpoint: Endpoint, ask: DrawRequest | Score, end: float) -> Any:
        rid = f"{OWN_NAME}{secrets.token_hex(8)}"
        endpoint.load += 1
        try:
            async with endpoint.slots:
                return await self._wait(endpoint, rid, ask, end)
        except NotThere as error:
            if self.model is None:
                raise
            # a server that was restarted does not know the adapter any more
            raise WrongWeights(f"{ask.where}: {error}") from error
        finally:
            endpoint.load -= 1

    async def _wait(self, endpoint: Endpoint, rid: str, ask: DrawRequest | Score, end: float) -> Any:
        connection, settings, dialect, where = endpoint.connection, self.settings, self.dialect, ask.where
        make = dialect.generate_body if isinstance(ask, DrawRequest) else dialect.score_body
        left = max(end - connection.clock(), 0.01)
        # longer than both waits below, so that an aborted request can still return what was sampled
        answering = connection.request(
            "POST",
            dialect.generate_path,
            make(ask, rid, self.model),  # type: ignore[arg-type]
            timeout=left + 2 * ABORT_SECONDS + 1,
            limit=dialect.answer_limit(ask),
        )
        task = asyncio.create_task(answering)
        try:
            done, _ = await asyncio.wait({task}, timeout=left)
            if not done:
                await self.abort(rid)
                done, _ = await asyncio.wait({task}, timeout=ABORT_SECONDS)
            if done:
                return task.result()  # ends: it is done
        except asyncio.CancelledError:
            # the caller is gone, so the server must not continue to generate
            await asyncio.shield(self.abort(rid))
            raise
        finally:
            task.cancel()
        try:
            await connection.request("GET", dialect.ready_path, timeout=settings.connect_timeout)
            state = f"{dialect.ready_path} says that it is up"
        except ServerDown as error:
            state = f"{dialect.ready_path} says: {error}"
        except ServerError as error:
            state = f"{dialect.ready_path} does not answer: {error}"
        raise ServerTimeout(f"{where}: {connection.url} gave no answer within {settings.deadline:.0f} s; {state}")

    async def _repaired(self, endpoint: Endpoint, floor: int, repairs: int) -> bool:
        """Whether the server has been given its weights again, by this request or another.

        `floor` and `repairs` are the weights' place and the server's number of repairs when the request was sent.
        """
        repair, url = self.repair, endpoint.connection.url
        if repair is None:
            return False
        async with self._repairing:
            # while this request waited for the lock, new weights or another request may have repaired the server
            if (self.versions.place, self._repairs[url]) == (floor, repairs):
                # in a thread, since repair() waits for calls that run on this very loop
                await asyncio.to_thread(repair, url)
                self._repairs[url] += 1
        return True

    async def _discover(self, wait: float, known: Sequence[ServerInfo]) -> list[ServerInfo]:
        fronts = [Connection(url=url, settings=self.settings) for url in dict.fromkeys(self.urls)]
        behind: list[Connection] = []
        for front in fronts:
            self._endpoints.append(Endpoint(front, asyncio.Semaphore(self.settings.parallel)))
            if not known:
                urls = await self._servers_behind(front, wait)
                own_hosts = {urlsplit(url).hostname for url in self.urls}
                hosts = [(url, urlsplit(url).hostname) for url in urls]
                strangers = [url for url, host in hosts if host not in own_hosts and not is_here(host or "")]
                if strangers and key_of(KEY):
                    raise ServerError(
                        f"the router {front.url} lists {redacted(strangers[0])}, on a host that was not named: it "
                        f"would be sent the key in {KEY}. Name the servers themselves and not the router, or unset the "
                        "key"
                    )
                behind += [Connection(url=url, settings=self.settings) for url in urls] or [front]
        self._admin = behind + [Connection(url=server.url, settings=self.settings) for server in known]
        return list(known) or [await read_info(connection, wait) for connection in behind]

    async def _servers_behind(self, front: Connection, wait: float) -> list[str]:
        """Urls of the servers behind a router; none if `front` is a server."""
        patience = max(wait, self.settings.connect_timeout)
        try:
            await front.get_until("/ready", patience)
        except (ServerDown, ServerTimeout):
            raise
        except ServerError:
            pass  # a router has no /ready
        end = front.clock() + patience
        while True:
            try:
                workers = await front.request("GET", "/workers", timeout=self.settings.connect_timeout)
            except ServerError:
                return []
            with fields_of_other_types(f"{front.url}/workers"):
                rows = workers.get("workers", []) if isinstance(workers, dict) else []
                urls = [str(row["url"] if isinstance(row, dict) else row) for row in rows]
            if urls:
                return urls
            if front.clock() >= end:
                raise ServerError(f"{front.url} is a router without servers")
            await asyncio.sleep(0.2)  # a router answers before it knows its servers

    async def _close(self) -> None:
        # without a router a connection is in both lists
        opened = (*self._admin, *(endpoint.connection for endpoint in self._endpoints))
        for connection in {id(connection): connection for connection in opened}.values():
            await connection.close()


# Checks that a server has the expected model, before anything is sent: an id too large would crash the server.

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Settings that must agree for weights to fit: a server that gets others does not refuse them, it crashes."""
SAMPLE = 64
"""Most ids whose texts are compared."""
TEXTS = ("Nothing happens.", "  <think>\n1, 2 and 3</think>\t", "naïve café 漢字 \U0001f642", "go to cabinet 12")


def check_model(fleet: Fleet, config: Mapping[str, Any]) -> None:
    """Raises ServerError unless every server has a model of the architecture and shape of `config` (a config.json).

    The shape is compared where the server's model folder can be read from here; elsewhere only the architecture.
    """
    kind, mine = architecture(config) or "?", text_part(config)
    for server in fleet.servers:
        if server.kind and server.kind != kind:
            raise ServerError(f"{server.url} serves a {server.kind} ({server.model}); a {kind} is meant")
        theirs = text_part(model_config(server.model))
        wrong = [
            f"{name} is {brief(theirs[name], 80)} there and {brief(mine[name], 80)} here"
            for name in SHAPE
            if name in theirs and name in mine and theirs[name] != mine[name]
        ]
        if wrong:
            raise ServerError(f"{server.url} serves another model ({server.model}): {'; '.join(wrong)}")


def check_tokenizer(fleet: Fleet, tokenizer: Any, size: int) -> None:
    """Raises ServerError unless every server gives the same ids to some texts, and the same texts to some ids.

    `size` is the number of ids that the tokenizer uses. The first, the last and others in between are compared, and
    those of added tokens: tokenizers of a family have the same letters and other control tokens.
    """
    added = [token for token in sorted(getattr(tokenizer, "added_tokens_decoder", ())) if token < size][:SAMPLE]
    places = sorted({*np.linspace(0, size - 1, min(SAMPLE, size)).astype(int).tolist(), *added})
    mine = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in places]
    encoded = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    for server in fleet.servers:
        _compare(fleet, server, ([], places), mine, [f"id {token}" for token in places])
        _compare(fleet, server, (TEXTS, []), encoded, [repr(text) for text in TEXTS])


def check_names(fleet: Fleet) -> None:
    """Raises ServerError if a server has weights that a training run sent it, instead of those of its folder."""
    for server in fleet.servers:
        if server.weights.startswith(OWN_NAME):
            raise ServerError(
                f"{server.url} has weights that a training run sent it ({server.weights!r}), not those of "
                f"{server.model}: start it again"
            )


def _compare(
    fleet: Fleet,
    server: ServerInfo,
    questions: tuple[Sequence[str], Sequence[int]],
    mine: Sequence[Any],
    names: Sequence[str],
) -> None:
    answers = [fleet.call_one(server.url, call) for call in server.dialect.text_calls(*questions)]
    theirs = server.dialect.read_texts(answers)
    if len(theirs) != len(mine):
        raise ServerError(f"{server.url} answered {excerpt(answers, 200)!r}; {len(mine)} rows were asked for")
    for name, ours, served in zip(names, mine, theirs, strict=True):
        if ours != served:
            raise ServerError(
                f"{server.url} has another vocabulary: {name} is {served!r} there and {ours!r} here. Start it with "
                "the same tokenizer"
            )

"""A fleet of servers, or of servers behind a router: routes requests by session and calls all servers at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from turngym.agents.sglang.client import (
    Connection,
    ServerDown,
    ServerError,
    ServerTimeout,
    SglangSettings,
    VersionSpan,
    WrongWeights,
)
from turngym.envs.core.event_loop import LoopThread

# Reads a server's release, model and limits, and checks that it is supported.

OLDEST, TRIED, BEFORE = (0, 5, 21), "0.5.23", (0, 6)
"""Releases that speak the protocol used here: before OLDEST, weights are updated in another way."""
HEADROOM = 4
"""SGLang keeps prompts 5 ids shorter than prompt and response together, and that 1 shorter than the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """One server."""

    url: str
    version: str
    model: str
    """Path or name of the model that it was started with."""
    kind: str
    """Its architecture, for example Qwen3ForCausalLM."""
    weights: str
    """Name of the weights it has now; `default` unless they were named in an update."""
    max_prompt: int
    """A prompt must be shorter than this."""
    seeded: bool
    """Whether a request's own seed counts (--enable-deterministic-inference); if not, it is ignored."""
    ranks: int
    """Processes that hold a share of the weights (tensor and pipeline parallelism)."""
    replicas: int
    """Data-parallel copies in it."""
    dtype: str

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.max_prompt + HEADROOM


async def read_info(connection: Connection, wait: float) -> ServerInfo:
    """Ask a server; up to `wait` seconds while it starts.

    Raises:
        ServerError: it is down, or no SGLang server that generates.
    """
    patience = max(wait, connection.settings.connect_timeout)
    about = await connection.request_until("GET", "/server_info", deadline=patience)
    model = await connection.request_until("GET", "/model_info", deadline=patience)
    if not isinstance(about, dict) or not isinstance(model, dict) or "version" not in about:
        raise ServerError(f"{connection.url} is not an SGLang server: /server_info says {str(about)[:200]}")
    if not model.get("is_generation", True):
        raise ServerError(f"{connection.url} serves {model.get('model_path')!r}, which does not generate")
    if about.get("skip_tokenizer_init"):
        raise ServerError(f"{connection.url} runs with --skip-tokenizer-init: it cannot stop at texts; leave that out")
    limit = about.get("max_req_input_len")
    if limit is None:
        raise ServerError(
            f"{connection.url} does not say max_req_input_len; SGLang {about['version']} is not supported"
        )
    return ServerInfo(
        url=connection.url,
        version=str(about["version"]),
        model=str(model.get("model_path", about.get("model_path", ""))),
        kind=str((model.get("architectures") or ["?"])[0]),
        weights=str(model.get("weight_version")),
        max_prompt=int(limit),
        seeded=bool(about.get("enable_deterministic_inference")),
        ranks=int(about.get("tp_size", 1)) * int(about.get("pp_size", 1)),
        replicas=int(about.get("dp_size", 1)),
        dtype=str(about.get("dtype", "auto")),
    )


def check_version(servers: Sequence[ServerInfo]) -> None:
    """Raises ServerError for a release that is not supported, or servers that differ in release or model."""
    for server in servers:
        numbers = tuple(int(part) for part in re.findall(r"\d+", server.version)[:3])
        if not OLDEST <= numbers < BEFORE:
            oldest, before = (".".join(map(str, numbers)) for numbers in (OLDEST, BEFORE))
            raise ServerError(
                f"{server.url} is SGLang {server.version}; supported are {oldest} up to, but not, {before} "
                f"(tried: {TRIED}): pip install 'sglang=={TRIED}'"
            )
    asked: list[tuple[str, Callable[[ServerInfo], Any]]] = [
        ("release", lambda server: server.version),
        ("architecture", lambda server: server.kind),
        ("longest prompt", lambda server: server.max_prompt),
    ]
    for what, value in asked:
        if len({value(server) for server in servers}) > 1:
            rows = ", ".join(f"{server.url} {value(server)}" for server in servers)
            raise ServerError(f"the servers differ in {what}: {rows}")


# Record of the weight versions given to the servers, and of which version sampled which ids.

PolicySpan = tuple[int, int, int]
"""A policy version and the half-open range of response ids that it drew."""


@dataclass(slots=True)
class WeightVersions:
    """Names of weight versions in the order in which the servers were given them.

    A server says with every answer which named weights drew it. A name that is not here, or that was replaced before
    the request was sent, means that the server was restarted or changed by another client.
    """

    _known: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name to (place, policy version)."""
    _place: int = 0
    _names: int = 0
    _owner: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def current(self) -> str | None:
        """Name of the weights that all servers have; None before the first."""
        # a list: another thread may be announcing others
        return next((name for name, (place, _) in list(self._known.items()) if place == self._place), None)

    @property
    def version(self) -> int:
        """Policy version of those weights."""
        return next((version for place, version in list(self._known.values()) if place == self._place), 0)

    @property
    def place(self) -> int:
        """What an answer must not fall behind; note it when a request is sent."""
        return self._place

    def new_name(self, version: int) -> str:
        """A name that no server has by chance: neither `default`, nor another run's, nor one of a failed attempt."""
        self._names += 1
        return f"turngym-{self._owner}-{self._names}-v{version}"

    def add(self, name: str, version: int) -> None:
        """From now on the servers have the weights `name`, and no others."""
        self.announce(name, version)
        self.settle(name)

    def announce(self, name: str, version: int) -> None:
        """The servers are getting the weights `name`: answers may be of these already, or of those before."""
        self._known[name] = (1 + max((place for place, _ in self._known.values()), default=0), version)

    def settle(self, name: str) -> None:
        """All servers have the weights `name`: what is sent from now on must be answered by them."""
        self._place = self._known[name][0]

    def read(self, spans: tuple[VersionSpan, ...], floor: int, where: str) -> tuple[PolicySpan, ...]:
        """The spans in policy versions. Raises WrongWeights for a name that should not be there since `floor`."""
        found: list[PolicySpan] = []
        for name, start, end in spans:
            place, version = self._known.get(name, (-1, 0))
            if place < floor:
                raise WrongWeights(
                    f"{where}: drawn with weights {name!r}; the server was last given {self.current!r}. It was "
                    "restarted, or somebody else changed its weights"
                )
            found.append((version, start, end))
        return tuple(found)


T = TypeVar("T")


@dataclass(slots=True)
class Endpoint:
    """One address that takes /generate, with its limit of requests."""

    connection: Connection
    slots: asyncio.Semaphore
    load: int = 0
    """Requests in flight."""
    failures: int = 0
    """Since the last answer."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Servers with the same model. `open` looks at them; nothing else may be called before.

    Administrative calls (weights, pauses, aborts) go to every server, behind a router too: a router passes on
    /generate alone, and names its servers under /workers.
    """

    urls: Sequence[str]
    settings: SglangSettings = field(default_factory=SglangSettings)
    versions: WeightVersions = field(default_factory=WeightVersions)
    servers: list[ServerInfo] = field(default_factory=list, init=False)
    repair: Callable[[str], None] | None = field(default=None, init=False)
    """Gives one server (by its url) the weights that it should have; called when it answers with others."""
    loop: LoopThread = field(init=False)
    _endpoints: list[Endpoint] = field(default_factory=list, init=False)
    _admin: list[Connection] = field(default_factory=list, init=False)
    _assigned: dict[str, Endpoint] = field(default_factory=dict, init=False)

    def open(self, *, wait: float = 0.0) -> Self:
        """Connect, waiting up to `wait` seconds for servers that start.

        Raises:
            ServerError: no url, a server that is down, of another release than those supported, or not of the others'
                model.
        """
        if not self.urls:
            raise ServerError("no server was named; give at least one url")
        self.loop = LoopThread("sglang-client")
        try:
            self.servers = self.loop.run(self._discover(wait))
            check_version(self.servers)
        except BaseException:
            self.close()
            raise
        names = {server.weights for server in self.servers}
        # where they differ none is known: answers are refused until weights are published
        if len(names) == 1:
            self.versions.add(names.pop(), 0)
        return self

    def close(self) -> None:
        """Close the connections. The servers go on."""
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses this fleet."""
        return self.loop.run(work)

    def call_all(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> list[Any]:
        """One attempt at each server, at the same time: the answers. Raises the first error, with the server in it."""
        limit = self.settings.admin_timeout if timeout is None else timeout

        async def call() -> list[Any]:
            return await asyncio.gather(*(one.request(method, path, body, timeout=limit) for one in self._admin))

        return self.loop.run(call())

    def call_one(self, url: str, method: str, path: str, body: Any = None) -> Any:
        """One attempt at the server `url`."""
        one = next(connection for connection in self._admin if connection.url == url)
        return self.loop.run(one.request(method, path, body, timeout=self.settings.admin_timeout))

    async def abort(self, rid: str) -> None:
        """Abort a request on whichever server has it; one that is down has lost it anyway."""
        for one in self._admin:
            try:
                await one.request("POST", "/abort_request", {"rid": rid}, timeout=self.settings.connect_timeout)
            except ServerError:
                continue

    async def ready(self, connection: Connection) -> str:
        """The answer of /ready as text for an error message."""
        try:
            await connection.request("GET", "/ready", timeout=self.settings.connect_timeout)
        except ServerDown as error:
            return f"/ready says: {error}"
        except ServerError as error:
            return f"/ready does not answer: {error}"
        return "/ready says that it is up"

    def endpoint_for(self, session: str) -> Endpoint:
        """The endpoint of `session`: always the same while it answers, so that its prefix cache is reused."""
        endpoint = self._assigned.get(session)
        if endpoint is None or endpoint.failures:
            endpoint = min(self._endpoints, key=lambda one: (one.failures, one.load))
            self._assigned[session] = endpoint
        return endpoint

    def forget(self, session: str) -> None:
        self._assigned.pop(session, None)

    async def _discover(self, wait: float) -> list[ServerInfo]:
        fronts = [Connection(url=url, settings=self.settings) for url in dict.fromkeys(self.urls)]
        behind: list[Connection] = []
        for front in fronts:
            self._endpoints.append(Endpoint(front, asyncio.Semaphore(self.settings.parallel)))
            found = await self._servers_behind(front, wait)
            behind += [Connection(url=url, settings=self.settings) for url in found] or [front]
        self._admin = behind
        return [await read_info(one, wait) for one in behind]

    async def _servers_behind(self, front: Connection, wait: float) -> list[str]:
        """Urls of the servers behind a router; none if `front` is a server."""
        try:
            await front.request_until("GET", "/ready", deadline=max(wait, self.settings.connect_timeout))
        except (ServerDown, ServerTimeout):
            raise
        except ServerError:
            pass  # a router has no /ready
        end = front.clock() + max(wait, self.settings.connect_timeout)
        while True:
            try:
                found = await front.request("GET", "/workers", timeout=self.settings.connect_timeout)
            except ServerError:
                return []
            rows = found.get("workers", []) if isinstance(found, dict) else []
            urls = [str(row["url"] if isinstance(row, dict) else row) for row in rows]
            if urls:
                return urls
            if front.clock() >= end:
                raise ServerError(f"{front.url} is a router without servers")
            await asyncio.sleep(0.2)  # it begins before it has looked at its servers

    async def _close(self) -> None:
        # without a router a connection is in both lists
        for connection in {id(one): one for one in (*self._admin, *(w.connection for w in self._endpoints))}.values():
            await connection.close()


# A client of /generate with retries, a deadline, aborts, and repair of servers that have the wrong weights.

GRACE = 5.0
"""Seconds that a server gets to hand over what it had drawn after a request is aborted."""


@dataclass(slots=True)
class RetryingClient:
    """Sends requests to a fleet. All methods are coroutines of its loop."""

    fleet: Fleet
    _numbers: Any = field(default_factory=itertools.count, init=False)
    _name: str = field(default_factory=lambda: secrets.token_hex(4), init=False)
    _running: set[str] = field(default_factory=set, init=False)
    _repairing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _repairs: Counter[str] = field(default_factory=Counter, init=False)
    """By url, how often its server has been given its weights again."""

    def rid(self) -> str:
        """A name for a request that no other has."""
        return f"turngym-{self._name}-{next(self._numbers)}"

    async def send(
        self,
        session: str,
        make: Callable[[str], dict[str, Any]],
        read: Callable[[Any, int], T],
        end: float,
        where: str,
    ) -> T:
        """The answer to `make(rid)`, read by `read(answer, floor)`, by `end` on the clock of the connections.

        A server that is down is waited for, or another one asked; one with other weights than it should have gets them
        again. Raises ServerDown, ServerTimeout or WrongWeights where that has not helped by the deadline.
        """
        pause, tries = self.fleet.settings.backoff, 0
        while True:
            endpoint = self.fleet.endpoint_for(session)
            tries += 1
            floor, repairs = self.fleet.versions.place, self._repairs[endpoint.connection.url]
            try:
                answer = await self._once(endpoint, make, end, where)
                endpoint.failures = 0
                return read(answer, floor)
            except ServerDown as error:
                endpoint.failures += 1
                if endpoint.connection.clock() + pause >= end:
                    raise ServerDown(f"{where}: {error} (tried {tries} times)") from error
            except WrongWeights as error:
                if endpoint.connection.clock() + pause >= end or not await self._repaired(endpoint, floor, repairs):
                    raise WrongWeights(f"{error}{self._restart_hint()}") from error
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, 0.05), 5.0)

    async def abort_all(self) -> int:
        """Abort all requests in flight; how many there were."""
        running = list(self._running)
        for rid in running:
            await self.fleet.abort(rid)
        return len(running)

    async def _once(self, endpoint: Endpoint, make: Callable[[str], dict[str, Any]], end: float, where: str) -> Any:
        rid = self.rid()
        endpoint.load += 1
        try:
            async with endpoint.slots:
                self._running.add(rid)
                return await self._wait(endpoint, rid, make(rid), end, where)
        finally:
            endpoint.load -= 1
            self._running.discard(rid)

    async def _wait(self, endpoint: Endpoint, rid: str, body: dict[str, Any], end: float, where: str) -> Any:
        left = max(end - endpoint.connection.clock(), 0.01)
        # longer than both waits below: an aborted request must still be able to hand over what was drawn
        task = asyncio.create_task(endpoint.connection.request("POST", "/generate", body, timeout=left + 2 * GRACE + 1))
        try:
            done, _ = await asyncio.wait({task}, timeout=left)
            if not done:
                await self.fleet.abort(rid)
                done, _ = await asyncio.wait({task}, timeout=GRACE)
            if done:
                return task.result()
        except asyncio.CancelledError:
            # the caller is gone: the server must not go on generating
            await asyncio.shield(self.fleet.abort(rid))
            raise
        finally:
            task.cancel()
        state = await self.fleet.ready(endpoint.connection)
        raise ServerTimeout(
            f"{where}: {endpoint.connection.url} gave no answer within {self.fleet.settings.deadline:.0f} s; {state}"
        )

    async def _repaired(self, endpoint: Endpoint, floor: int, repairs: int) -> bool:
        """Whether the servers have been given their weights again, by this request or another.

        `floor` and `repairs`: the newest weights, and how often the server had been repaired, as the request was sent.
        """
        repair, url = self.fleet.repair, endpoint.connection.url
        if repair is None:
            return False
        async with self._repairing:
            # while the lock was awaited, a publish has moved the place, or another request has repaired the server
            if (self.fleet.versions.place, self._repairs[url]) == (floor, repairs):
                # repair() waits for calls that run on this very loop
                await asyncio.to_thread(repair, url)
                self._repairs[url] += 1
        return True

    def _restart_hint(self) -> str:
        return (
            ". Start it with the model that is meant, and run again"
            if self.fleet.repair is None
            else ". Its weights were sent again without success"
        )


# Checks that a server has the expected model, before anything is sent: an id too large would end the server.

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
"""What must agree for weights to fit: a server that gets others does not refuse them, it ends."""
SAMPLE = 64
TEXTS = ("Nothing happens.", "  <think>\n1, 2 and 3</think>\t", "naïve café 漢字 \U0001f642", "go to cabinet 12")


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer that are compared."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> Any: ...

    def encode(self, text: str, /, **kwargs: Any) -> Any: ...


def check_model(fleet: Fleet, config: Mapping[str, Any]) -> None:
    """Raises ServerError unless every server has a model of the architecture and shape of `config` (a config.json).

    The shape is compared where the server's model folder can be read from here; elsewhere only the architecture.
    """
    kind = (config.get("architectures") or ["?"])[0]
    for server in fleet.servers:
        if server.kind != kind:
            raise ServerError(f"{server.url} serves a {server.kind} ({server.model}); a {kind} is meant")
        theirs = model_config(server.model)
        wrong = [
            f"{name} is {theirs[name]} there and {config[name]} here"
            for name in SHAPE
            if name in theirs and name in config and theirs[name] != config[name]
        ]
        if wrong:
            raise ServerError(f"{server.url} serves another model ({server.model}): {'; '.join(wrong)}")


def check_tokenizer(fleet: Fleet, tokenizer: Tokenizer, size: int) -> None:
    """Raises ServerError unless every server gives the same ids to some texts, and the same texts to some ids.

    `size`: ids that the tokenizer uses; the first, the last and others in between are compared.
    """
    places = np.unique(np.linspace(0, size - 1, min(SAMPLE, size)).astype(int)).tolist()
    mine = [str(tokenizer.decode([one], skip_special_tokens=False)) for one in places]
    encoded = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    ask = {"tokens": [[one] for one in places], "skip_special_tokens": False}
    _compare(fleet, "/detokenize", ask, "text", mine, [f"id {one}" for one in places])
    ask = {"prompt": list(TEXTS), "add_special_tokens": False}
    _compare(fleet, "/tokenize", ask, "tokens", encoded, [repr(text) for text in TEXTS])


def check_names(fleet: Fleet) -> None:
    """Raises ServerError where a server's weights were sent by a training run: they are not those of its folder."""
    for server in fleet.servers:
        if server.weights.startswith("turngym-"):
            raise ServerError(
                f"{server.url} has weights that a training run sent it ({server.weights!r}), not those of "
                f"{server.model}: start it again"
            )


def model_config(folder: str) -> Mapping[str, Any]:
    """The model's config.json; empty where it cannot be read from here."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _compare(
    fleet: Fleet, path: str, ask: Mapping[str, Any], part: str, mine: Sequence[Any], names: Sequence[str]
) -> None:
    for server, answer in zip(fleet.servers, fleet.call_all("POST", path, ask), strict=True):
        theirs = answer.get(part) if isinstance(answer, dict) else None
        if not isinstance(theirs, list) or len(theirs) != len(mine):
            raise ServerError(f"{server.url}{path} answered {str(answer)[:200]!r}; {len(mine)} rows were asked for")
        for name, here, there in zip(names, mine, theirs, strict=True):
            if here != there:
                raise ServerError(
                    f"{server.url} has another vocabulary: {name} is {there!r} there and {here!r} here. Start it with "
                    "the same tokenizer"
                )


# Connections of a worker process to servers whose weights another process updates.

_FLEETS: dict[tuple[Any, ...], Fleet] = {}
"""This process's connections: they outlast a rollout."""


def shared_fleet(urls: Sequence[str], settings: SglangSettings, versions: WeightVersions) -> Fleet:
    """This process's fleet of `urls`, opened once; `versions` replaces its record of the servers' weights."""
    key = (*urls, settings)
    if key not in _FLEETS:
        _FLEETS[key] = Fleet(urls=urls, settings=settings).open()
    _FLEETS[key].versions = versions
    return _FLEETS[key]

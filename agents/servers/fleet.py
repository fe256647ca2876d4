"""All servers of one model, or a router in front of them: which server gets a request, and what all of them are told.

1. `ServerInfo`: what a server says about itself, and which releases are supported.
2. `WeightVersions`: which weights the servers were given, so that an answer can say who sampled it.
3. `Fleet`: the connections, and requests to /generate that survive a server's restart.
4. `check_...`: a server has the model, the tokenizer and the weights that are meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from turngym.agents.servers.client import (
    Connection,
    ServerDown,
    ServerError,
    ServerSettings,
    ServerTimeout,
    VersionSpan,
    WrongWeights,
    next_pause,
)
from turngym.retrieval.outgoing import LoopThread

OLDEST, TRIED, BEFORE = (0, 5, 21), "0.5.23", (0, 6)
"""Releases that speak the protocol used here; earlier ones update weights in another way."""
HEADROOM = 4
"""SGLang limits prompts to 5 ids less than prompt and response together, which is 1 less than the context."""
ADMIN_TIMEOUT = 300.0
"""Seconds for an administrative call, such as an update of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What one server says about itself."""

    url: str
    version: str
    model: str
    """Path or name of the model that it was started with."""
    kind: str
    """Architecture of the model, for example Qwen3ForCausalLM."""
    weights: str
    """Name of the weights it has now; `default` until an update names them."""
    max_prompt: int
    """A prompt must be shorter than this."""
    seeded: bool
    """Whether it honors the seed of a request (--enable-deterministic-inference)."""
    ranks: int
    """Number of processes that hold a share of the weights (tensor and pipeline parallelism)."""
    replicas: int
    """Number of data-parallel copies."""
    dtype: str

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.max_prompt + HEADROOM


async def read_info(connection: Connection, wait: float) -> ServerInfo:
    """Ask a server, for up to `wait` seconds while it starts.

    Raises ServerError if it is down, or is no SGLang server that generates.
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
    for what, name in (("release", "version"), ("architecture", "kind"), ("longest prompt", "max_prompt")):
        if len({getattr(server, name) for server in servers}) > 1:
            rows = ", ".join(f"{server.url} {getattr(server, name)}" for server in servers)
            raise ServerError(f"the servers differ in {what}: {rows}")


PolicySpan = tuple[int, int, int]
"""A policy version and the half-open range of response ids that it sampled."""


@dataclass(slots=True)
class WeightVersions:
    """Names of weight versions in the order in which the servers were given them.

    A server says with every answer which named weights sampled it. A name that is unknown here, or that was replaced
    before the request was sent, means that the server was restarted or that another client changed its weights.
    """

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
        return f"turngym-{self._owner}-{self._names}-v{version}"

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
        found: list[PolicySpan] = []
        for name, start, end in spans:
            place, version = self._known.get(name, (-1, 0))
            if place < floor:
                raise WrongWeights(
                    f"{where}: sampled with weights {name!r}; the server was last given {self.current!r}. It was "
                    "restarted, or another client changed its weights"
                )
            found.append((version, start, end))
        return tuple(found)


GRACE = 5.0
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
    """Servers with the same model. Call `open` before anything else.

    Administrative calls (weights, pauses, aborts) go to every server, also behind a router: a router only forwards
    /generate, and lists its servers under /workers.
    """

    urls: Sequence[str]
    settings: ServerSettings = field(default_factory=ServerSettings)
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

    def open(self, *, wait: float = 0.0) -> Self:
        """Connect, waiting up to `wait` seconds for servers that start.

        Raises ServerError if no url is given, a server is down or of an unsupported release, or if the servers differ.
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

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses this fleet."""
        return self.loop.run(work)

    def call_all(self, method: str, path: str, body: Any = None) -> list[Any]:
        """Answers of all servers, each asked once, at the same time. Raises the first error, which names its server."""

        async def call() -> list[Any]:
            asked = (one.request(method, path, body, timeout=ADMIN_TIMEOUT) for one in self._admin)
            return await asyncio.gather(*asked)

        return self.loop.run(call())

    def call_one(self, url: str, method: str, path: str, body: Any = None) -> Any:
        """Answer of the server at `url`, asked once."""
        one = next(connection for connection in self._admin if connection.url == url)
        return self.loop.run(one.request(method, path, body, timeout=ADMIN_TIMEOUT))

    async def abort(self, rid: str) -> None:
        """Abort a request on whichever server has it."""
        for one in self._admin:
            # a server that is down has lost the request anyway
            with contextlib.suppress(ServerError):
                await one.request("POST", "/abort_request", {"rid": rid}, timeout=self.settings.connect_timeout)

    def endpoint_for(self, session: str) -> Endpoint:
        """The endpoint of `session`: always the same while it answers, so that its prefix cache is reused."""
        endpoint = self._assigned.get(session)
        if endpoint is None or endpoint.failures:
            endpoint = min(self._endpoints, key=lambda one: (one.failures, one.load))
            self._assigned[session] = endpoint
        return endpoint

    def forget(self, session: str) -> None:
        self._assigned.pop(session, None)

    async def send(
        self, session: str, make: Callable[[str], dict[str, Any]], read: Callable[[Any, int], T], end: float, where: str
    ) -> T:
        """What /generate answers to the body `make(rid)`, parsed by `read(answer, floor)`.

        `end` is the deadline on the connections' clock.

        If a server is down, wait for it or ask another one; if it has the wrong weights, give it the right ones again.
        Raises ServerDown, ServerTimeout or WrongWeights if that has not helped by the deadline.
        """
        pause, tries = self.settings.backoff, 0
        while True:
            endpoint = self.endpoint_for(session)
            tries += 1
            floor, repairs = self.versions.place, self._repairs[endpoint.connection.url]
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
                    hint = "Its weights were sent again without success"
                    if self.repair is None:
                        hint = "Start it with the model that is meant, and run again"
                    raise WrongWeights(f"{error}. {hint}") from error
            await asyncio.sleep(pause)
            pause = next_pause(pause)

    async def _once(self, endpoint: Endpoint, make: Callable[[str], dict[str, Any]], end: float, where: str) -> Any:
        rid = f"turngym-{secrets.token_hex(8)}"
        endpoint.load += 1
        try:
            async with endpoint.slots:
                return await self._wait(endpoint, rid, make(rid), end, where)
        finally:
            endpoint.load -= 1

    async def _wait(self, endpoint: Endpoint, rid: str, body: dict[str, Any], end: float, where: str) -> Any:
        connection, settings = endpoint.connection, self.settings
        left = max(end - connection.clock(), 0.01)
        # longer than both waits below, so that an aborted request can still return what was sampled
        task = asyncio.create_task(connection.request("POST", "/generate", body, timeout=left + 2 * GRACE + 1))
        try:
            done, _ = await asyncio.wait({task}, timeout=left)
            if not done:
                await self.abort(rid)
                done, _ = await asyncio.wait({task}, timeout=GRACE)
            if done:
                return task.result()
        except asyncio.CancelledError:
            # the caller is gone, so the server must not continue to generate
            await asyncio.shield(self.abort(rid))
            raise
        finally:
            task.cancel()
        try:
            await connection.request("GET", "/ready", timeout=settings.connect_timeout)
            state = "/ready says that it is up"
        except ServerDown as error:
            state = f"/ready says: {error}"
        except ServerError as error:
            state = f"/ready does not answer: {error}"
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
        patience = max(wait, self.settings.connect_timeout)
        try:
            await front.request_until("GET", "/ready", deadline=patience)
        except (ServerDown, ServerTimeout):
            raise
        except ServerError:
            pass  # a router has no /ready
        end = front.clock() + patience
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
            await asyncio.sleep(0.2)  # a router answers before it knows its servers

    async def _close(self) -> None:
        # without a router a connection is in both lists
        for connection in {id(one): one for one in (*self._admin, *(w.connection for w in self._endpoints))}.values():
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


def check_tokenizer(fleet: Fleet, tokenizer: Any, size: int) -> None:
    """Raises ServerError unless every server gives the same ids to some texts, and the same texts to some ids.

    `size` is the number of ids that the tokenizer uses; the first, the last and others in between are compared.
    """
    places = np.unique(np.linspace(0, size - 1, min(SAMPLE, size)).astype(int)).tolist()
    mine = [str(tokenizer.decode([one], skip_special_tokens=False)) for one in places]
    encoded = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    ask = {"tokens": [[one] for one in places], "skip_special_tokens": False}
    _compare(fleet, "/detokenize", ask, "text", mine, [f"id {one}" for one in places])
    ask = {"prompt": list(TEXTS), "add_special_tokens": False}
    _compare(fleet, "/tokenize", ask, "tokens", encoded, [repr(text) for text in TEXTS])


def check_names(fleet: Fleet) -> None:
    """Raises ServerError if a server has weights that a training run sent it, instead of those of its folder."""
    for server in fleet.servers:
        if server.weights.startswith("turngym-"):
            raise ServerError(
                f"{server.url} has weights that a training run sent it ({server.weights!r}), not those of "
                f"{server.model}: start it again"
            )


def model_config(folder: str) -> Mapping[str, Any]:
    """The model's config.json; empty if it cannot be read from here."""
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


_FLEETS: dict[tuple[Any, ...], Fleet] = {}
"""Connections of a worker process, whose servers get their weights from another process. They outlast a rollout."""


def shared_fleet(urls: Sequence[str], settings: ServerSettings, versions: WeightVersions) -> Fleet:
    """This process's fleet of `urls`, opened once; `versions` replaces its record of the servers' weights."""
    key = (*urls, settings)
    if key not in _FLEETS:
        _FLEETS[key] = Fleet(urls=urls, settings=settings).open()
    _FLEETS[key].versions = versions
    return _FLEETS[key]

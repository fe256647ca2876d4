"""What clients of all model servers share: errors, checks of requests and answers, one HTTP connection.

`ServerDialect` is what differs between SGLang (`sglang_dialect.py`) and vLLM (`vllm_dialect.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from turngym.agents.servers.server_options import Busy
from turngym.core.clean_keys import clean_address, key_of
from turngym.core.episode import ROUNDING, without_rounding, wrong_numbers
from turngym.core.errors import TurngymError
from turngym.core.http_client import PASSING, SMALL_ANSWER, BadReply, HttpClient, NotReached, TooLate
from turngym.core.plugins import need
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.core.redaction import brief, excerpt
from turngym.core.user_files import json_object


class ServerError(TurngymError):
    """A server cannot do what is asked of it; a retry does not help."""


class NotThere(ServerError):
    """A server has no such route or model (status 404)."""


class ServerDown(ServerError, ConnectionError):
    """A server does not answer, or says that it is not available; a retry may help."""


class ServerTimeout(ServerError, TimeoutError):
    """The deadline has passed."""


class BadAnswer(ServerError, RuntimeError):
    """An answer does not fit its request: for example, there are too few log-probabilities."""


class WrongWeights(ServerError, RuntimeError):
    """A server has other weights than it was given last: it was restarted, or another client changed them."""


class SyncError(ServerError):
    """New weights did not reach every server; the message says which ones the servers have now."""


# What every request and answer is checked for.


def seed_of(stream: Sequence[int]) -> int:
    """A seed in 0..2**63 - 1 for the random stream with entropy `stream`; the server's seeds are signed.

    Raises ServerError for a negative part.
    """
    if any(part < 0 for part in stream):
        raise ServerError(f"the random stream {tuple(stream)} has a negative part; use non-negative integers")
    state = np.random.SeedSequence([int(part) for part in stream]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def check_ids(ids: NDArray[np.int32], vocabulary: int, where: str) -> None:
    """Raises ServerError for an invalid row of ids: the server does not check, and an id too large crashes it."""
    if ids.ndim != 1 or not len(ids):
        raise ServerError(f"{where}: ids have shape {ids.shape}; they must be a row of at least one id")
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ServerError(f"{where}: ids span {ids.min()}..{ids.max()}; the model knows ids 0..{vocabulary - 1}")


def check_request(request: GenerateRequest, vocabulary: int, where: str) -> None:
    """Raises ServerError for an invalid request."""
    sampling = request.sampling
    check_ids(np.asarray(request.prompt_ids, np.int32), vocabulary, where)
    if not (sampling.temperature >= 0 and np.isfinite(sampling.temperature)):
        raise ServerError(f"{where}: temperature {sampling.temperature} must be a finite number >= 0 (0 is greedy)")
    if sampling.max_new_tokens < 1:
        raise ServerError(f"{where}: max_new_tokens {sampling.max_new_tokens} must be at least 1")
    if any(not stop for stop in sampling.stop_text):
        raise ServerError(f"{where}: stop_text {sampling.stop_text!r} contains an empty string")


VersionSpan = tuple[str, int, int]
"""The name of some weights and the half-open range of response ids that they sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedPart:
    """One answer to a request to generate: ids int32 [R], their log-probabilities float32 [R], and whose they are."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...]
    """Version of every id: spans that cover 0..R in order. An answer without ids has one, too."""
    cached: int = 0
    """Number of prompt ids whose keys and values the server had already."""
    reason: str = ""
    """Why the server aborted."""
    status: int | None = None
    """HTTP status that belongs to `reason`, if the server gives one."""


MOST_IDS = 1 << 31
"""No server has as many of anything."""


@contextmanager
def fields_of_other_types(where: str) -> Iterator[None]:
    """Turns what Python raises for a field of another type, or a number too large for its array, into BadAnswer."""
    try:
        yield
    except ServerError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise BadAnswer(f"{where}: not an answer of such a server: {type(error).__name__}: {error}") from error


def count_in(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A number of things, as a server says it; `default` stands for a field that is not there.

    Raises BadAnswer for all but whole numbers from 1 to `MOST_IDS`.
    """
    value = fields.get(name, default)
    if type(value) is not int or not 1 <= value <= MOST_IDS:
        raise BadAnswer(f"{where}: {name} is {brief(value, 80)}; it must be a whole number of at least 1")
    return value


def check_part(part: GeneratedPart, scored: NDArray[np.int32], ask: DrawRequest) -> GeneratedPart:
    """Returns `part` as the answer to `ask`, log-probabilities cut at 0; `scored` are the ids that they belong to.

    Raises BadAnswer if ids, log-probabilities and version spans do not fit together, or are none.
    """
    ids, logprobs, where = part.ids, without_rounding(part.logprobs), ask.where
    if len(logprobs) != len(ids):
        raise BadAnswer(
            f"{where}: {len(ids)} ids came with {len(logprobs)} log-probabilities; both must be of one length"
        )
    if not np.array_equal(ids, scored):
        first = int(np.flatnonzero(ids != scored)[0])
        raise BadAnswer(f"{where}: id {first} is {ids[first]}, but its log-probability is of id {scored[first]}")
    if len(ids) > ask.count:
        raise BadAnswer(f"{where}: {len(ids)} ids came, {ask.count} were asked for")
    if (problem := wrong_numbers(ids, logprobs, ask.shared)) is not None:
        raise BadAnswer(f"{where}: {problem}")
    if part.finish not in ("stop", "length", "abort"):
        raise BadAnswer(f"{where}: finish_reason is {part.finish!r}; it must be of type stop, length or abort")
    ends = [0, *(end for _, _, end in part.spans)]
    if [start for _, start, _ in part.spans] != ends[:-1] or ends[-1] != len(ids):
        raise BadAnswer(f"{where}: weight_versions {part.spans} do not cover the {len(ids)} ids one after the other")
    return replace(part, logprobs=logprobs)


def check_scores(logp: NDArray[np.float32], where: str) -> NDArray[np.float32]:
    """`logp`. Raises BadAnswer unless all of it are log-probabilities."""
    odd = ~((logp < ROUNDING) & (logp > -np.inf))
    if odd.any():
        raise BadAnswer(f"{where}: a log-probability is {logp[odd][0]}; it must be finite and at most 0")
    return logp


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits of one client, for each server."""

    parallel: int = 64
    """Most requests in flight; the server batches them."""
    deadline: float = 600.0
    """Seconds for one request, with retries and waiting for a server that restarts."""
    connect_timeout: float = 10.0
    """Seconds to reach a server."""
    backoff: float = 0.2
    """Seconds before the second attempt; doubled with each further one, up to 5."""


KEY = "TURNGYM_SERVER_KEY"
"""Environment variable with the servers' bearer key; without it no key is sent."""


def next_pause(pause: float) -> float:
    """Seconds before the next attempt, after a wait of `pause` seconds; a backoff of 0 does not stay 0."""
    return min(max(2 * pause, 0.05), 5.0)


def error_text(body: Any) -> str:
    """The message in a server's error: `error`, a text or an object with a `message`, else `message` or `detail`."""
    if isinstance(body, Mapping):
        message = body.get("error", body.get("message", body.get("detail")))
        if isinstance(message, Mapping):
            message = message.get("message", message)
        if message is not None:
            return excerpt(message, 500)
    return excerpt(body, 500)


@dataclass(slots=True, kw_only=True)
class Connection:
    """Requests to one address. All methods are coroutines of one event loop.

    Raises ServerError for an invalid address, MissingExtra if httpx is not installed.
    """

    url: str
    settings: ClientLimits
    clock: Callable[[], float] = time.monotonic
    _http: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        self.url = clean_address("server", self.url, ServerError).rstrip("/")
        need("httpx", "a server", "serve")
        key = key_of(KEY, ServerError)
        self._http = HttpClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connect=self.settings.connect_timeout,
            keepalive=self.settings.parallel,
        )

    async def close(self) -> None:
        await self._http.close()

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout: float, limit: int = SMALL_ANSWER
    ) -> Any:
        """One attempt: the JSON of a 200, a text that is not JSON, or None for no body.

        Raises:
            ServerDown: no connection, or a status in `PASSING`.
            ServerTimeout: no whole answer after `timeout` seconds.
            ServerError: any other status, with the server's message.
            BadAnswer: a 200 that is not JSON, a redirect, or an answer that is too long.
        """
        where = f"{self.url}{path}"
        try:
            reply = await self._http.send(method, self.url + path, body, seconds=timeout, limit=limit)
        except TooLate as error:
            raise ServerTimeout(f"{where}: no answer within {timeout:.0f} s") from error
        except NotReached as error:
            raise ServerDown(f"{where}: {error}") from error
        except BadReply as error:
            raise BadAnswer(f"{where}: {error}") from error
        answer: Any
        try:
            answer = reply.json() if reply.body else None
        except BadReply as error:
            # vLLM answers some orders with a text of no type
            if reply.status == 200 and "content-type" in reply.headers:
                raise BadAnswer(f"{where}: {error}") from error
            answer = reply.text(500)
        if reply.status == 200:
            return answer
        problem = f"{where}: status {reply.status}: {error_text(answer)}"
        if reply.status in PASSING:
            raise ServerDown(problem)
        if reply.status in (401, 403):
            raise ServerError(f"{problem}; set the server's key in {KEY}")
        if reply.status == 404:
            raise NotThere(problem)
        raise ServerError(problem)

    async def get_until(self, path: str, seconds: float) -> Any:
        """`request` of a GET, repeated while the server is down, for `seconds`.

        Raises ServerTimeout if the last attempt is still waiting then, ServerDown if all failed before.
        """
        end = self.clock() + seconds
        pause = self.settings.backoff
        tries = 0
        while True:
            tries += 1
            try:
                return await self.request("GET", path, timeout=max(end - self.clock(), 0.01))
            except ServerDown as error:
                if self.clock() + pause >= end:
                    raise ServerDown(f"{error} (tried {tries} times in {seconds:.0f} s)") from error
            await asyncio.sleep(pause)
            pause = next_pause(pause)


# What a server says about itself, what it is asked, and what differs between the servers.

Call = tuple[str, str, Any]
"""Method, path and JSON of an administrative call."""
OWN_NAME = "turngym-"
"""Beginning of the names of weights that a training run sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What one server says about itself."""

    url: str
    dialect: ServerDialect
    version: str
    model: str
    """Path or name of the model that it was started with."""
    kind: str
    """Architecture of the model, for example Qwen3ForCausalLM; "" where it cannot be known."""
    weights: str
    """Name of the weights it has now; `default` until an update names them."""
    max_prompt: int
    """A prompt must be shorter than this."""
    max_length: int
    """Most ids of prompt and response together."""
    seeded: bool = True
    """Whether it honors the seed of a request."""
    ranks: int = 1
    """Number of processes that hold a share of the weights (tensor and pipeline parallelism)."""
    replicas: int = 1
    """Number of data-parallel copies."""
    dtype: str = "auto"
    missing: str = ""
    """What it was started without, so that new weights cannot come; "" where they can."""
    adapters: bool = False
    """Whether it loads LoRA adapters while it serves."""


NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": False,
}
"""Fields of every request: the defaults of a model's generation_config.json must not change the distribution."""
NEVER = -100.0
"""Added to a logit so that its id is not drawn: the least that servers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """A request for at most `count` ids after `prompt`."""

    where: str
    """Names the request in errors."""
    prompt: NDArray[np.int32]
    sampling: Sampling
    stream: Sequence[int]
    count: int
    vocabulary: int
    """Number of ids that the model knows."""
    shared: int
    """Only the first so many ids are drawn: whoever scores the response has no others."""
    drawn: int = 0
    """How many of the prompt's last ids belong to the same response, which was broken off."""

    @property
    def bias(self) -> dict[str, float]:
        """What is added to the logits of ids that are not to be drawn, the rows that pad a head: by id."""
        return {str(token): NEVER for token in range(self.shared, self.vocabulary)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A request for the log-probabilities of `ids[start + 1:]`; nothing is sampled.

    It also asks for the `top` most likely ids, or the ids `chosen` [P, K], at each of the `positions` [P].
    """

    where: str
    ids: NDArray[np.int32]
    start: int
    vocabulary: int
    positions: NDArray[np.int64]
    top: int = 0
    chosen: NDArray[np.int64] | None = None
    temperature: float = 1.0


class ServerDialect(Protocol):
    """How one kind of server is spoken to.

    `model` is the name of the adapter that samples, None for the server's model. All `read_...` raise BadAnswer, and
    ServerError for what the server does not compute.
    """

    name: ClassVar[str]
    supported: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]]
    """The oldest release, and the first that is too new."""
    tried: ClassVar[str]
    """The release that was tried, as pip names it."""
    generate_path: ClassVar[str]
    ready_path: ClassVar[str]
    weights_path: ClassVar[str]
    """Its answer names the weights: `weight_version`."""
    block: ClassVar[int]
    """Positions of one request for the log-probabilities of chosen ids."""

    async def read_info(self, connection: Connection, patience: float) -> ServerInfo: ...

    def generate_body(self, ask: DrawRequest, rid: str, model: str | None) -> dict[str, Any]: ...

    def read_generation(self, answer: Any, ask: DrawRequest) -> GeneratedPart: ...

    def score_body(self, ask: Score, rid: str, model: str | None) -> dict[str, Any]: ...

    def read_scores(self, answer: Any, ask: Score) -> tuple[NDArray[np.float32], str]:
        """(Log-probabilities float32 of `ids[start:]`, the first nan; the name of the weights.)"""

    def read_top(self, answer: Any, ask: Score) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and log-probabilities [P, top], most likely first."""

    def read_chosen(self, answer: Any, ask: Score) -> NDArray[np.float32]:
        """Log-probabilities [P, K]."""

    def answer_limit(self, ask: DrawRequest | Score) -> int:
        """Most bytes of the answer."""

    def abort_call(self, rid: str) -> Call: ...

    def text_calls(self, texts: Sequence[str], ids: Sequence[int]) -> list[Call]:
        """Calls that encode `texts`, or decode each of `ids`."""

    def read_texts(self, answers: Sequence[Any]) -> list[Any]:
        """What such calls are answered: the ids of each text, or the text of each id."""

    def hold_calls(self, busy: Busy) -> tuple[list[Call], list[Call]]:
        """What is called before new weights come, and after."""

    def folder_calls(self, folder: str, name: str) -> list[Call]:
        """What makes a server read the weights in `folder`, and call them `name`."""

    def adapter_calls(self, folder: str, name: str) -> tuple[Call, Call]:
        """What makes a server (`ServerInfo.adapters`) read an adapter, and what makes it forget that again."""

    def sleep_calls(self) -> tuple[Call, Call]:
        """What makes a server give its memory back for a while, and take it again; its weights may be lost."""

    def group(self, backend: str) -> type[WeightGroup]:
        """How weights are broadcast. Raises SyncError for a backend that the server does not have."""


class WeightGroup(Protocol):
    """The trainer's end of a broadcast of weights, as rank 0, and what the servers are told of it."""

    begin: ClassVar[Call]

    def __init__(self, address: str, port: int, world: int, name: str, timeout: float) -> None:
        """Blocks until all members have joined. Raises SyncError where they do not.

        Args:
            world: number of members: this process, and all processes of all servers that hold weights.
            name: of the group; SGLang's servers may be in several.
            timeout: seconds for a member to join, and for each broadcast.
        """

    @staticmethod
    def join(address: str, port: int, world: int, name: str, offset: int) -> Call:
        """What makes a server join; it answers when it has.

        Args:
            offset: rank of the server's first process; 0 is the trainer.
        """

    @staticmethod
    def bucket(weights: Sequence[tuple[str, Any]], name: str, version: str | None) -> Call:
        """What is said before `weights` are sent; `version` names the weights with the last of them."""

    @staticmethod
    def end(version: str) -> Call: ...

    @staticmethod
    def leave(name: str) -> Call: ...

    def send(self, tensor: Any) -> Callable[[], bool]:
        """Starts to broadcast; what it returns says whether that is done."""

    def close(self) -> None: ...


def model_config(folder: str) -> Mapping[str, Any]:
    """The model's config.json; empty if it cannot be read from here."""
    try:
        return json_object(Path(folder) / "config.json", ServerError)
    except ServerError:
        return {}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model in a config.json; those of models that also see or hear have them inside."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def architecture(config: Mapping[str, Any]) -> str:
    """The first of the `architectures` in a config.json, or in what a server says; "" where it cannot be known."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


class OwnServer(Protocol):
    """A server that a run has started for itself."""

    url: str
    sleeps: bool
    """Whether it can give its memory back during updates."""

    def restart(self, folder: Path) -> None:
        """Starts it again, with the weights in `folder`."""

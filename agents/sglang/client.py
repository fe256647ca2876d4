"""Parses the JSON answers of /generate into arrays and checks that ids, log-probabilities and versions agree."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.protocols import GenerateRequest, Sampling

# Errors of SGLang servers; the classes tell which may pass when tried again.


class ServerError(TurngymError):
    """A server that cannot do what is asked of it: trying again does not help."""


class ServerDown(ServerError, ConnectionError):
    """A server that does not answer, or answers that it cannot just now: it may come back."""


class ServerTimeout(ServerError, TimeoutError):
    """The deadline has passed."""


class BadAnswer(ServerError, RuntimeError):
    """An answer that does not fit its request: too few log-probabilities, ids that do not belong together."""


class WrongWeights(ServerError, RuntimeError):
    """A server with other weights than it was last given: it was restarted, or another client changed them."""


class SyncError(ServerError):
    """New weights that did not arrive; which ones the server has now is in the text."""


# Request bodies of /generate, and checks before they are sent.

SCORE_TEMPERATURE = "input_logprob_temperature"
"""The field that asks for scores at a temperature, and says in `meta_info` that they have it (sglang, pull request
36213)."""


def seed_of(stream: Sequence[int]) -> int:
    """A number in 0..2**63 - 1 for the random stream with entropy `stream`; the server's seeds are signed.

    Raises ServerError for a negative part, as the local engine does.
    """
    if any(part < 0 for part in stream):
        raise ServerError(f"the random stream {tuple(stream)} has a negative part; use non-negative integers")
    state = np.random.SeedSequence([int(part) for part in stream]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generate_body(rid: str, prompt: NDArray[np.int32], sampling: Sampling, seed: int, count: int) -> dict[str, Any]:
    """A request for at most `count` ids after `prompt`. The server draws id number n of a sequence by (seed, n)."""
    params: dict[str, Any] = {
        "max_new_tokens": count,
        "temperature": sampling.temperature,
        "sampling_seed": seed,
        # the defaults of a model's generation_config.json must not change the distribution
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_text),
        "skip_special_tokens": False,
    }
    return {"rid": rid, "input_ids": prompt.tolist(), "sampling_params": params, "return_logprob": True}


def score_body(
    rid: str,
    ids: NDArray[np.int32],
    start: int,
    *,
    top: int = 0,
    chosen: Sequence[int] = (),
    temperature: float = 1.0,
) -> dict[str, Any]:
    """A request for the log-probabilities of `ids[start + 1:]`; nothing is drawn.

    `top`: also the so many most likely ids at each of these positions. `chosen`: also these ids at each of them.
    `temperature`: of the scores; servers that cannot do it do not say so (`check_temperature`).
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": ids.tolist(),
        # whatever this one says, the server scores what was given at temperature 1
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    if temperature != 1.0:
        body[SCORE_TEMPERATURE] = temperature
    if top:
        body["top_logprobs_num"] = top
    if chosen:
        body["token_ids_logprob"] = [int(one) for one in chosen]
    return body


def check_ids(ids: NDArray[np.int32], vocabulary: int, where: str) -> None:
    """Raises ServerError for what is no row of ids: the server does not look, and an id too large ends it."""
    if ids.ndim != 1 or not len(ids):
        raise ServerError(f"{where}: ids have shape {ids.shape}; they must be a row of at least one id")
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ServerError(f"{where}: ids span {ids.min()}..{ids.max()}; the model knows ids 0..{vocabulary - 1}")


def check_request(request: GenerateRequest, vocabulary: int, where: str) -> None:
    """Raises ServerError for a request that makes no sense."""
    sampling = request.sampling
    check_ids(np.asarray(request.prompt_ids, np.int32), vocabulary, where)
    if not (sampling.temperature >= 0 and np.isfinite(sampling.temperature)):
        raise ServerError(f"{where}: temperature {sampling.temperature} must be a finite number >= 0 (0 is greedy)")
    if sampling.max_new_tokens < 1:
        raise ServerError(f"{where}: max_new_tokens {sampling.max_new_tokens} must be at least 1")
    if any(not stop for stop in sampling.stop_text):
        raise ServerError(f"{where}: stop_text {sampling.stop_text!r} contains an empty string")


VersionSpan = tuple[str, int, int]
"""A weight version and the half-open range of response ids that it drew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedPart:
    """One answer of /generate: ids int32 [R], log-probabilities float32 [R], and the weights that sampled them."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...]
    """Cover 0..R in order; one for an answer without ids, too."""
    cached: int
    """Prompt ids whose keys and values the server had."""
    reason: str = ""
    """Why the server aborted."""
    status: int | None = None
    """HTTP status that goes with `reason`, where the server gives one."""


def read_generation(answer: Any, where: str, asked: int) -> GeneratedPart:
    """Read the answer to a request for at most `asked` ids.

    Raises BadAnswer where ids, log-probabilities and version spans do not belong together.
    """
    meta = _meta(answer, where)
    ids = np.asarray(answer.get("output_ids") or [], np.int32)
    logprobs, named = _pairs(meta.get("output_token_logprobs") or [], where)
    if len(logprobs) != len(ids):
        raise BadAnswer(
            f"{where}: {len(ids)} ids came with {len(logprobs)} log-probabilities; both must be of one length"
        )
    if not np.array_equal(ids, named):
        first = int(np.flatnonzero(ids != named)[0])
        raise BadAnswer(f"{where}: id {first} is {ids[first]}, but its log-probability is of id {named[first]}")
    if len(ids) > asked:
        raise BadAnswer(f"{where}: {len(ids)} ids came, {asked} were asked for")
    if not np.isfinite(logprobs).all():
        raise BadAnswer(f"{where}: a log-probability is {logprobs[~np.isfinite(logprobs)][0]}; it must be finite")
    finish, reason, status = _finish(meta, where)
    return GeneratedPart(
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        spans=_spans(meta, len(ids), where),
        cached=int(meta.get("cached_tokens") or 0),
        reason=reason,
        status=status,
    )


def read_scores(
    answer: Any, ids: NDArray[np.int32], start: int, where: str, *, last: int
) -> tuple[NDArray[np.float32], str]:
    """Log-probabilities of `ids[start:]`, each given the ids before it, float32 [len(ids) - start]; weight version.

    `start` is what `logprob_start_len` was. The first entry is null; it becomes nan. `last` is the largest id of the
    vocabulary, which a server calls 0 (its log-probability is right).
    Raises BadAnswer where the entries are not those of `ids`.
    """
    meta = _meta(answer, where)
    logprobs, named = _pairs(meta.get("input_token_logprobs") or [], where)
    _aligned(named, ids[start:], where, last)
    return logprobs, str(meta.get("weight_version"))


def check_temperature(answer: Any, temperature: float, where: str) -> None:
    """Raises ServerError where scores were asked for at a temperature and the answer does not say that it has it."""
    if temperature != 1.0 and _meta(answer, where).get(SCORE_TEMPERATURE) != temperature:
        raise ServerError(
            f"{where}: this server scores at temperature 1, not at {temperature:g} (releases with "
            f"{SCORE_TEMPERATURE} can): take --distill.temperature 1, or load the teacher into this process with "
            "--teacher, without --teacher-server"
        )


def read_top(
    answer: Any, name: str, start: int, positions: NDArray[np.int64], k: int, where: str
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Rows of `meta_info[name]` (`input_top_logprobs` or `input_token_ids_logprobs`) at `positions`: ids, logp [P, K].

    Entry i of the list belongs to position `start` + i. Raises BadAnswer where one is missing or not K long.
    """
    rows = _meta(answer, where).get(name) or []
    ids, logp = np.empty((len(positions), k), np.int32), np.empty((len(positions), k), np.float32)
    for line, position in enumerate(positions):
        place = int(position) - start
        row = rows[place] if 0 <= place < len(rows) else None
        if row is None or len(row) != k:
            raise BadAnswer(
                f"{where}: {0 if row is None else len(row)} of {k} log-probabilities came for position {position}"
            )
        for column, entry in enumerate(row):
            logp[line, column], ids[line, column] = entry[0], entry[1]
    if not np.isfinite(logp).all():
        raise BadAnswer(f"{where}: a log-probability is {logp[~np.isfinite(logp)][0]}; it must be finite")
    return ids, logp


def _meta(answer: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping) or not isinstance(answer.get("meta_info"), Mapping):
        raise BadAnswer(f"{where}: an answer of /generate has a meta_info; this one is {str(answer)[:200]!r}")
    meta: Mapping[str, Any] = answer["meta_info"]
    return meta


def _pairs(entries: Sequence[Any], where: str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities (nan for null) and ids of entries [logprob, id, text]."""
    try:
        logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)
        return logprobs, np.array([entry[1] for entry in entries], np.int32)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise BadAnswer(f"{where}: log-probabilities must be [logprob, id, text]: {str(entries)[:200]}") from error


def _aligned(named: NDArray[np.int32], wanted: NDArray[np.int32], where: str, last: int) -> None:
    if len(named) != len(wanted):
        raise BadAnswer(f"{where}: {len(named)} log-probabilities came for {len(wanted)} ids")
    wrong = (named != wanted) & ((named != 0) | (wanted != last))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise BadAnswer(f"{where}: row {first} is of id {named[first]}; {wanted[first]} was asked for")


def _finish(meta: Mapping[str, Any], where: str) -> tuple[str, str, int | None]:
    """Type, message and status of the finish reason."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if not isinstance(reason, Mapping) or kind not in ("stop", "length", "abort"):
        raise BadAnswer(f"{where}: finish_reason is {reason!r}; it must be of type stop, length or abort")
    status = reason.get("status_code")
    return str(kind), str(reason.get("message") or ""), None if status is None else int(status)


def _spans(meta: Mapping[str, Any], count: int, where: str) -> tuple[VersionSpan, ...]:
    found = meta.get("weight_versions") or []
    if not found:
        return ((str(meta.get("weight_version")), 0, count),)
    spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in found)
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != count:
        raise BadAnswer(f"{where}: weight_versions {spans} do not cover the {count} ids one after the other")
    return spans


# Settings of a client of SGLang servers.


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Limits of one client; they hold for each server alone."""

    parallel: int = 64
    """Requests in flight at a time on each server; the server batches them."""
    deadline: float = 600.0
    """Seconds for one request, retries included; a server that is being restarted is waited for that long."""
    connect_timeout: float = 10.0
    """Seconds to reach a server."""
    backoff: float = 0.2
    """Seconds before the second attempt; doubled with each further one, up to 5."""
    admin_timeout: float = 300.0
    """Seconds for an update of the weights and other questions to the server itself."""
    resume_aborted: bool = True
    """Continue a response that the server broke off (to change weights): what was drawn is kept, the rest is drawn by
    the new weights, and the turn says which ids are whose."""

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("deadline", 0.01), ("connect_timeout", 0.01), ("admin_timeout", 0.01)):
            if getattr(self, name) < least:
                raise ServerError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.backoff < 0:
            raise ServerError(f"backoff is {self.backoff}; it must not be negative")


# HTTP connection to one server: maps status codes to errors, and says which are worth a retry.

KEY = "TURNGYM_SERVER_KEY"
"""Environment variable with the servers' bearer key; none is sent without it."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may pass by themselves: a server that starts, restarts or is full."""


def error_text(body: Any) -> str:
    """What a server's error says: `error` is a text, or an object with a `message`; admin calls have `message`."""
    if isinstance(body, Mapping):
        found = body.get("error", body.get("message", body.get("detail")))
        if isinstance(found, Mapping):
            found = found.get("message", found)
        if found is not None:
            return str(found)
    return str(body)[:500]


@dataclass(slots=True, kw_only=True)
class Connection:
    """Requests to one address, from one event loop. Every method is a coroutine of that loop.

    Raises:
        ServerError: an address that is none, or httpx is not installed.
    """

    url: str
    settings: SglangSettings
    clock: Callable[[], float] = time.monotonic
    _http: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"server {self.url!r} must begin with http:// or https://")
        try:
            import httpx
        except ImportError as error:
            raise ServerError("a server needs httpx: pip install 'turngym[serve]'") from error
        key = os.environ.get(KEY)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # the fleet's semaphores limit requests; under httpx's limit of 100, aborts could queue behind generations
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.settings.parallel),
            # a proxy of the environment is for the outside world, and may not reach the servers
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """One attempt: the JSON of a 200, None where there is no body.

        Raises:
            ServerDown: no connection, or a status that may pass.
            ServerTimeout: nothing after `timeout` seconds.
            ServerError: any other status; the server's own words are in it.
            BadAnswer: a 200 that is not JSON.
        """
        import httpx

        limits = httpx.Timeout(timeout, connect=min(timeout, self.settings.connect_timeout))
        try:
            answer = await self._http.request(method, self.url + path, json=body, timeout=limits)
        # without ConnectTimeout: a server that cannot be reached is down, not slow
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
            raise ServerTimeout(f"{self.url}{path}: no answer within {timeout:.0f} s") from error
        except httpx.TransportError as error:
            raise ServerDown(f"{self.url}{path}: {type(error).__name__}: {error or 'no connection'}") from error
        try:
            found = answer.json() if answer.content else None
        except ValueError:
            found = answer.text[:500]
        if answer.status_code == 200:
            # a JSON text begins with a quote; without it `found` is the raw text from above
            if isinstance(found, str) and answer.content[:1] != b'"':
                raise BadAnswer(f"{self.url}{path}: the answer is not JSON: {found[:200]!r}")
            return found
        said = f"{self.url}{path}: status {answer.status_code}: {error_text(found)}"
        if answer.status_code in PASSING:
            raise ServerDown(said)
        if answer.status_code in (401, 403):
            raise ServerError(f"{said}; set the server's key in {KEY}")
        if answer.status_code == 404:
            raise ServerError(f"{said}; is this an SGLang server?")
        raise ServerError(said)

    async def request_until(self, method: str, path: str, body: Any = None, *, deadline: float) -> Any:
        """As `request`, tried again while the server is down, until `deadline` seconds have passed.

        Raises ServerTimeout where an attempt would still be waiting then, ServerDown where all failed before.
        """
        end = self.clock() + deadline
        pause = self.settings.backoff
        tries = 0
        while True:
            tries += 1
            try:
                return await self.request(method, path, body, timeout=max(end - self.clock(), 0.01))
            except ServerDown as error:
                if self.clock() + pause >= end:
                    raise ServerDown(f"{error} (tried {tries} times in {deadline:.0f} s)") from error
            await asyncio.sleep(pause)
            # max: a backoff of 0 would stay 0
            pause = min(max(2 * pause, 0.05), 5.0)


# Where SGLang servers play and teach, as commands and functions are told.

Busy = Literal["wait", "retract", "abort"]
"""What happens to responses that are being drawn when new weights come: `wait` lets them end first; `retract` holds
them and draws the rest with the new weights (histories are computed again); `abort` breaks them off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServer:
    """SGLang servers that play."""

    policy_server: str = ""
    """Address of an SGLang server that plays (`turngym serve policy` starts one), several with commas in between, or
    that of a router; by default the model plays in this process."""
    server_parallel: int = 64
    """Requests under way at a time on each server."""
    server_deadline: float = 600.0
    """Seconds for one response, retries included; a server that is restarted is waited for that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainServers(PolicyServer):
    """SGLang servers that play and teach while this process trains."""

    teacher_server: str = ""
    """Address of SGLang servers with the teacher; --teacher then only names its folder, for the vocabulary."""
    weight_sync: Literal["disk", "gloo", "nccl"] = "disk"
    """How new weights get to the servers that play: through a folder that both sides see, or broadcast (`nccl` between
    GPUs, else `gloo`)."""
    weight_folder: Path | None = None
    """disk: where new weights are written; by default OUT/weights. The newest two stay."""
    weight_address: str = "127.0.0.1"
    """gloo, nccl: where the servers reach this machine."""
    when_busy: Busy = "wait"
    """Responses that are being drawn when new weights come are finished first (`wait`), held and finished by the new
    weights (`retract`), or broken off and continued (`abort`); turns say which ids are whose."""

"""What is said between an SGLang server and its clients: errors, request bodies, answers, one HTTP connection.

The answers of /generate become arrays. Ids, log-probabilities and weight versions that do not agree are refused.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.episode import ROUNDING, without_rounding, wrong_numbers
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.plugins import need
from turngym.envs.core.protocols import GenerateRequest, Sampling
from turngym.envs.core.secrets import refuse_credentials
from turngym.retrieval.outgoing import PASSING, SMALL_ANSWER, TOKEN_BYTES, BadReply, HttpClient, NotReached, TooLate


class ServerError(TurngymError):
    """A server cannot do what is asked of it; a retry does not help."""


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


# Request bodies of /generate, and checks before they are sent.

SCORE_TEMPERATURE = "input_logprob_temperature"
"""A field of requests for scores at a temperature, and of the answers' `meta_info` (sglang, pull request 36213)."""


def seed_of(stream: Sequence[int]) -> int:
    """A seed in 0..2**63 - 1 for the random stream with entropy `stream`; the server's seeds are signed.

    Raises ServerError for a negative part.
    """
    if any(part < 0 for part in stream):
        raise ServerError(f"the random stream {tuple(stream)} has a negative part; use non-negative integers")
    state = np.random.SeedSequence([int(part) for part in stream]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generate_body(rid: str, prompt: NDArray[np.int32], sampling: Sampling, seed: int, count: int) -> dict[str, Any]:
    """A request for at most `count` ids after `prompt`. The server samples the nth id of a sequence with (seed, n)."""
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
    rid: str, ids: NDArray[np.int32], start: int, *, top: int = 0, chosen: Sequence[int] = (), temperature: float = 1.0
) -> dict[str, Any]:
    """A request for the log-probabilities of `ids[start + 1:]`; nothing is sampled.

    It also asks for the `top` most likely ids, and for the `chosen` ids, at each of these positions. A server that does
    not support `temperature` ignores it, see `check_temperature`.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": ids.tolist(),
        # this temperature does not change the scores of given ids
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
    """One answer of /generate: ids int32 [R], log-probabilities float32 [R], and the weights that sampled them."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...]
    """They cover 0..R in order. An answer without ids has one, too."""
    cached: int
    """Number of prompt ids whose keys and values the server had already."""
    reason: str
    """Why the server aborted."""
    status: int | None
    """HTTP status that belongs to `reason`, if the server gives one."""


@contextmanager
def fields_of_other_types(where: str) -> Iterator[None]:
    """Turns what Python raises for a field of another type, or a number too large for its array, into BadAnswer."""
    try:
        yield
    except ServerError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise BadAnswer(f"{where}: not an answer of SGLang: {type(error).__name__}: {error}") from error


def read_generation(answer: Any, where: str, asked: int, vocabulary: int) -> GeneratedPart:
    """Read the answer to a request for at most `asked` ids of a model that knows `vocabulary` ids.

    Raises BadAnswer if ids, log-probabilities and version spans do not fit together, or are none.
    """
    with fields_of_other_types(where):
        meta = _meta(answer, where)
        ids = np.asarray(answer.get("output_ids") or [], np.int32)
        logprobs, named = _pairs(meta.get("output_token_logprobs") or [])
        if len(logprobs) != len(ids):
            raise BadAnswer(
                f"{where}: {len(ids)} ids came with {len(logprobs)} log-probabilities; both must be of one length"
            )
        if not np.array_equal(ids, named):
            first = int(np.flatnonzero(ids != named)[0])
            raise BadAnswer(f"{where}: id {first} is {ids[first]}, but its log-probability is of id {named[first]}")
        if len(ids) > asked:
            raise BadAnswer(f"{where}: {len(ids)} ids came, {asked} were asked for")
        logprobs = without_rounding(logprobs)
        if (problem := wrong_numbers(ids, logprobs, vocabulary)) is not None:
            raise BadAnswer(f"{where}: {problem}")
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else None
        if not isinstance(reason, Mapping) or kind not in ("stop", "length", "abort"):
            raise BadAnswer(f"{where}: finish_reason is {reason!r}; it must be of type stop, length or abort")
        status = reason.get("status_code")
        return GeneratedPart(
            ids=ids,
            logprobs=logprobs,
            finish=kind,
            spans=_spans(meta, len(ids), where),
            cached=int(meta.get("cached_tokens") or 0),
            reason=str(reason.get("message") or ""),
            status=None if status is None else int(status),
        )


def read_scores(
    answer: Any, ids: NDArray[np.int32], start: int, where: str, *, last: int
) -> tuple[NDArray[np.float32], str]:
    """(Log-probabilities float32 of `ids[start:]`, each given the ids before it; the name of the weights.)

    `start` is the request's `logprob_start_len`. The first entry is null; it becomes nan. `last` is the largest id of
    the vocabulary, which a server reports as id 0 (with the right log-probability).
    Raises BadAnswer if the entries are not those of `ids`.
    """
    with fields_of_other_types(where):
        meta = _meta(answer, where)
        logprobs, named = _pairs(meta.get("input_token_logprobs") or [])
    wanted = ids[start:]
    if len(named) != len(wanted):
        raise BadAnswer(f"{where}: {len(named)} log-probabilities came for {len(wanted)} ids")
    wrong = (named != wanted) & ((named != 0) | (wanted != last))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise BadAnswer(f"{where}: row {first} is of id {named[first]}; {wanted[first]} was asked for")
    _check_scores(logprobs[1:], where)
    return logprobs, str(meta.get("weight_version"))


def check_temperature(answer: Any, temperature: float, where: str) -> None:
    """Raises ServerError if scores were asked for at a temperature other than 1 and the answer does not confirm it."""
    if temperature != 1.0 and _meta(answer, where).get(SCORE_TEMPERATURE) != temperature:
        raise ServerError(
            f"{where}: this server scores at temperature 1, not at {temperature:g} (releases with "
            f"{SCORE_TEMPERATURE} can): take --distill.temperature 1, or load the teacher into this process with "
            "--teacher, without --teacher-server"
        )


def read_top(
    answer: Any, name: str, start: int, positions: NDArray[np.int64], k: int, where: str
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probabilities [P, K] at `positions`, from `meta_info[name]`.

    `name` is `input_top_logprobs` or `input_token_ids_logprobs`. Entry i belongs to position `start` + i. Raises
    BadAnswer if one is missing or not K long.
    """
    rows = _meta(answer, where).get(name) or []
    ids, logp = np.empty((len(positions), k), np.int32), np.empty((len(positions), k), np.float32)
    with fields_of_other_types(where):
        for line, position in enumerate(positions):
            place = int(position) - start
            row = rows[place] if 0 <= place < len(rows) else None
            if row is None or len(row) != k:
                raise BadAnswer(
                    f"{where}: {0 if row is None else len(row)} of {k} log-probabilities came for position {position}"
                )
            for column, entry in enumerate(row):
                logp[line, column], ids[line, column] = entry[0], entry[1]
    _check_scores(logp, where)
    return ids, logp


def _check_scores(logp: NDArray[np.float32], where: str) -> None:
    """Raises BadAnswer unless all of `logp` are log-probabilities."""
    odd = ~((logp < ROUNDING) & (logp > -np.inf))
    if odd.any():
        raise BadAnswer(f"{where}: a log-probability is {logp[odd][0]}; it must be finite and at most 0")


def _meta(answer: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping) or not isinstance(answer.get("meta_info"), Mapping):
        raise BadAnswer(f"{where}: an answer of /generate has a meta_info; this one is {str(answer)[:200]!r}")
    meta: Mapping[str, Any] = answer["meta_info"]
    return meta


def _pairs(entries: Sequence[Any]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities (nan for null) and ids of entries [logprob, id, text]."""
    logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)
    return logprobs, np.array([entry[1] for entry in entries], np.int32)


def _spans(meta: Mapping[str, Any], count: int, where: str) -> tuple[VersionSpan, ...]:
    found = meta.get("weight_versions") or []
    if not found:
        return ((str(meta.get("weight_version")), 0, count),)
    spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in found)
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != count:
        raise BadAnswer(f"{where}: weight_versions {spans} do not cover the {count} ids one after the other")
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits of one client, for each server."""

    parallel: int = 64
    """Most requests in flight; the server batches them."""
    deadline: float = 600.0
    """Seconds for one request, with retries and waiting for a server that restarts."""
    connect_timeout: float = 10.0
    """Seconds to reach a server."""
    backoff: float = 0.2
    """Seconds before the second attempt; doubled with each further one, up to 5."""

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("deadline", 0.01)):
            if getattr(self, name) < least:
                raise ServerError(f"{name} is {getattr(self, name)}; it must be at least {least}")


KEY = "TURNGYM_SERVER_KEY"
"""Environment variable with the servers' bearer key; without it no key is sent."""
SCORE_BYTES = 64
"""Most bytes of JSON for one log-probability with its id; about 35 are usual."""


def next_pause(pause: float) -> float:
    """Seconds before the next attempt, after a wait of `pause` seconds; a backoff of 0 does not stay 0."""
    return min(max(2 * pause, 0.05), 5.0)


def error_text(body: Any) -> str:
    """The message in a server's error: `error`, a text or an object with a `message`, else `message` or `detail`."""
    if isinstance(body, Mapping):
        found = body.get("error", body.get("message", body.get("detail")))
        if isinstance(found, Mapping):
            found = found.get("message", found)
        if found is not None:
            return str(found)
    return str(body)[:500]


def answer_limit(body: Any) -> int:
    """Most bytes of the answer to `body`: enough for every id that it asks about, at each position of its prompt."""
    if not isinstance(body, Mapping) or "input_ids" not in body:
        return SMALL_ANSWER
    each = 2 + int(body.get("top_logprobs_num", 0)) + len(body.get("token_ids_logprob", ()))
    drawn = int(body["sampling_params"]["max_new_tokens"])
    return SMALL_ANSWER + SCORE_BYTES * len(body["input_ids"]) * each + TOKEN_BYTES * drawn


@dataclass(slots=True, kw_only=True)
class Connection:
    """Requests to one address. All methods are coroutines of one event loop.

    Raises ServerError for an invalid address, MissingExtra if httpx is not installed.
    """

    url: str
    settings: ServerSettings
    clock: Callable[[], float] = time.monotonic
    _http: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"server {self.url!r} must begin with http:// or https://")
        need("httpx", "a server", "serve")
        key = os.environ.get(KEY)
        self._http = HttpClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connect=self.settings.connect_timeout,
            keepalive=self.settings.parallel,
        )

    async def close(self) -> None:
        await self._http.close()

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """One attempt: the JSON of a 200, or None if there is no body.

        Raises:
            ServerDown: no connection, or a status in `PASSING`.
            ServerTimeout: no whole answer after `timeout` seconds.
            ServerError: any other status, with the server's message.
            BadAnswer: a 200 that is not JSON, a redirect, or an answer that is too long.
        """
        where = f"{self.url}{path}"
        try:
            reply = await self._http.send(method, self.url + path, body, seconds=timeout, limit=answer_limit(body))
        except TooLate as error:
            raise ServerTimeout(f"{where}: no answer within {timeout:.0f} s") from error
        except NotReached as error:
            raise ServerDown(f"{where}: {error}") from error
        except BadReply as error:
            raise BadAnswer(f"{where}: {error}") from error
        found: Any
        try:
            found = reply.json() if reply.body else None
        except BadReply as error:
            if reply.status == 200:
                raise BadAnswer(f"{where}: {error}") from error
            found = reply.text(500)
        if reply.status == 200:
            return found
        said = f"{where}: status {reply.status}: {error_text(found)}"
        if reply.status in PASSING:
            raise ServerDown(said)
        if reply.status in (401, 403):
            raise ServerError(f"{said}; set the server's key in {KEY}")
        if reply.status == 404:
            raise ServerError(f"{said}; is this an SGLang server?")
        raise ServerError(said)

    async def request_until(self, method: str, path: str, body: Any = None, *, deadline: float) -> Any:
        """`request`, repeated while the server is down, for `deadline` seconds.

        Raises ServerTimeout if the last attempt is still waiting then, ServerDown if all failed before.
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
            pause = next_pause(pause)


# Options of the commands that use SGLang servers.

Busy = Literal["wait", "retract", "abort"]
"""What happens to responses in flight when new weights come: `wait` lets them end first; `retract` pauses them and
continues them with the new weights (their histories are computed again); `abort` interrupts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServer:
    """SGLang servers that play."""

    policy_server: str = ""
    """Address of an SGLang server that plays (`turngym serve policy` starts one), several with commas in between, or
    that of a router; by default the model plays in this process."""
    server_parallel: int = 64
    """Most requests in flight on each server."""
    server_deadline: float = 600.0
    """Seconds for one response, with retries and waiting for a server that restarts."""

    def __post_init__(self) -> None:
        refuse_credentials("", asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainServers(PolicyServer):
    """SGLang servers that play and teach while this process trains."""

    teacher_server: str = ""
    """Address of SGLang servers with the teacher; --teacher then only names its folder, for the vocabulary."""
    weight_sync: Literal["disk", "gloo", "nccl"] = "disk"
    """How new weights get to the servers that play: through a folder that both sides see, or by broadcast (`nccl`
    between GPUs, else `gloo`)."""
    weight_folder: Path | None = None
    """disk: where new weights are written; by default OUT/weights. The newest two are kept."""
    weight_address: str = "127.0.0.1"
    """gloo, nccl: where the servers reach this machine."""
    when_busy: Busy = "wait"
    """What happens to responses in flight when new weights come: they finish first (`wait`), pause and are continued by
    the new weights (`retract`), or are interrupted and continued (`abort`). Turns record which weights sampled what."""

"""How an endpoint is asked for chat completions: retries, deadline and rate limits.

What happens to a failed attempt (`EndpointClient.attempts`):

- 429: all requests wait until `Retry-After` has passed (`RateGate`), and this one is repeated until the deadline.
- 5xx, a lost connection, an unreadable body, an answer that broke off: repeated up to `retries` times after a pause
  that doubles from 0.5 s to 60 s, with jitter from the request's own random stream.
- a full context: `ContextOverflow`, so that the caller can ask for fewer tokens.
- a prompt that the service's filter refuses: an answer without text, as one that it took back.
- anything else: `EndpointError` with advice; `RequestRefused` if it may be a full context in unknown words.

`failures` tells them apart, whatever status the error has. What a request looks like is the `EndpointProfile`'s, which
`handshake` finds. No retry library does this: a wait is shared by all requests, and a pause comes from the request's
own stream, so that runs repeat.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from turngym.agents.endpoint.answer_reader import CALLED, ChatAnswer, Expected, read_answer
from turngym.agents.endpoint.completion_fields import Noticed, UnreadableAnswer
from turngym.agents.endpoint.error_reader import ADDRESS, SHOWN_LETTERS, RequestFailed, advice, error_in, read_failure
from turngym.agents.endpoint.options import KEY
from turngym.agents.endpoint.profile import EndpointProfile
from turngym.agents.endpoint.usage import Usage
from turngym.core.clean_keys import clean_address, key_of
from turngym.core.errors import AgentError, did_you_mean
from turngym.core.http_client import (
    SMALL_ANSWER,
    TOKEN_BYTES,
    BadReply,
    ExchangeError,
    HttpClient,
    HttpReply,
    NotReached,
    TooLate,
)
from turngym.core.http_connection import connections
from turngym.core.progress import clock
from turngym.core.redaction import excerpt, redacted
from turngym.core.spec import changed

FEW_CHARACTERS, TOKEN_CHARACTERS = 1024, 256
"""Characters that any answer may have, and more for each of its tokens; runs of 128 spaces are the longest in use."""
MOST_SAID = 20
"""Different things that are said of one server's answers; the results count all."""
NAME_SHOWN = 100
"""Characters of the name of a model that are shown."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first retry, and most seconds before any later one."""


def pauses(rng: np.random.Generator) -> Iterator[float]:
    """Seconds before each retry: doubling from 0.5 to 60, each times a draw from [0.5, 1.5)."""
    pause = FIRST_WAIT
    while True:
        yield pause * (0.5 + rng.random())
        pause = min(2 * pause, LONGEST_WAIT)


@dataclass(slots=True)
class RateGate:
    """The time until which no request may be sent: a rate limit that one request meets holds for all."""

    opens: float = 0.0
    """When requests may be sent again, by `time.monotonic`."""
    why: str = ""
    """What the server said last."""

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.opens - time.monotonic()

    def close(self, seconds: float, why: str) -> None:
        """Hold all requests for `seconds`."""
        self.opens, self.why = max(self.opens, time.monotonic() + seconds), why

    async def passed(self, spread: float, end: float) -> bool:
        """Wait until requests may be sent, and `spread` seconds more if that took time; False if `end` comes first."""
        waited = False
        while (left := self.left) > 0:
            if time.monotonic() + left >= end:
                return False
            waited = True
            await asyncio.sleep(left)
        if waited:
            await asyncio.sleep(spread)
        return True


class EndpointError(AgentError):
    """The endpoint gave no answer."""


class EndpointTimeout(EndpointError):
    """The endpoint gave no answer by the deadline."""


class ContextOverflow(EndpointError):
    """The conversation does not fit the endpoint's context."""


class RequestRefused(EndpointError):
    """The endpoint, which has answered others, refuses this request.

    `unclear`: it does not say for what, so that its context may be full.
    """

    unclear: bool = False


BASE_URL = "OPENAI_BASE_URL"
HOSTED = "https://api.openai.com/v1"
REPEAT = "with --out (rollout: --append, too) only the episodes that have not ended are played"
COLD_TRIES = 3
"""Attempts before a server that has never answered is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of an endpoint and the name of the variable with its key. The key itself is never stored."""

    base_url: str
    key_env: str = KEY

    @classmethod
    def of(cls, base_url: str, key_env: str = KEY) -> Address:
        """Raises AgentError for an invalid address, one with a password in it, and a missing or invalid key."""
        given = base_url.strip()
        source = "--base-url" if given else f"the variable {BASE_URL}"
        url = clean_address(source, given or os.environ.get(BASE_URL, "") or HOSTED, AgentError)
        address = cls(base_url=url, key_env=key_env)
        if not address.key and (url == HOSTED or key_env != KEY):
            raise AgentError(f"the key of {url} is read from the environment variable {key_env}, which is not set")
        return address

    @property
    def key(self) -> str:
        """The key; empty if there is none."""
        return key_of(self.key_env, EndpointError)

    def at(self, path: str) -> str:
        """The address of `path` below the base; a query stays at the end."""
        base = urlsplit(self.base_url)
        return base._replace(path=base.path.rstrip("/") + path).geturl()


@dataclass(slots=True, kw_only=True)
class EndpointClient:
    """Sends requests, at most `parallel` at the same time. All coroutines belong to one event loop."""

    address: Address
    model: str
    deadline: float = 600.0
    retries: int = 6
    parallel: int = 64
    expected: Expected = field(default_factory=Expected)
    """What answers are compared with."""
    ids: bool = False
    """Whether an answer without token ids counts as broken."""
    profile: EndpointProfile = field(default_factory=EndpointProfile)
    """What the server takes."""
    reached: bool = False
    """Whether a server has ever answered, even with an error."""
    worked: bool = False
    """Whether there has been a usable answer."""
    advise: bool = True
    """Whether errors say what may help; they name options of `openai:MODEL`."""
    gate: RateGate = field(default_factory=RateGate)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with a request beside the key."""
    _said: set[str] = field(default_factory=set)
    _http: HttpClient | None = None
    _free: asyncio.Semaphore | None = None

    async def ask(self, body: Mapping[str, Any], rng: np.random.Generator, where: str) -> ChatAnswer:
        """The answer to `body`, by the deadline. Its usage counts the repeated requests.

        `where` names the request in errors, `rng` draws its pauses. Raises EndpointTimeout, ContextOverflow, or
        EndpointError if the request failed for good.
        """
        try:
            return await self.attempts(body, rng, where)
        except RequestFailed as failed:
            raise await self.given_up(failed, where) from None

    async def attempts(self, body: Mapping[str, Any], rng: np.random.Generator, where: str) -> ChatAnswer:
        """As `ask`, but raises the last RequestFailed itself if the request failed for good."""
        if self._free is None:
            allowed = connections(self.parallel)
            if allowed < self.parallel:
                self._say(
                    f"{allowed} requests at a time and not {self.parallel}: this process may open no more files "
                    "(`ulimit -Hn`)"
                )
            self._free = asyncio.Semaphore(allowed)
        async with self._free:
            return await self._attempts(body, rng, where, time.monotonic() + self.deadline)

    async def _attempts(self, body: Mapping[str, Any], rng: np.random.Generator, where: str, end: float) -> ChatAnswer:
        own_pauses, failures, tries, lost = pauses(rng), 0, 0, Usage()
        last = "no attempt was answered"
        while True:
            if not await self.gate.passed(0.5 * rng.random(), end):
                raise self._too_long(where, self.gate.left, self.gate.why)
            tries += 1
            try:
                answer = await self._once(body, end - time.monotonic())
                return replace(answer, usage=changed(answer.usage, retries=tries - 1), lost=lost)
            except TooLate:
                raise self._late(where, tries, last) from None
            except RequestFailed as failed:
                failed.tries, last = tries, redacted(failed.reason)
                lost += failed.usage
                if failed.overflow:
                    raise ContextOverflow(f"{where}: {last}") from None
                failures += not failed.limited
                allowed = self.retries if self.reached else min(self.retries, COLD_TRIES - 1)
                if not failed.passing or failures > allowed:
                    raise
                after = failed.after or 0.0
                if failed.limited:
                    self.gate.close(after, last)
                # at least our own pause, even if the server always allows an immediate retry
                pause = max(next(own_pauses), after)
                if time.monotonic() + pause >= end:
                    too_long = pause == after
                    raise (self._too_long(where, after, last) if too_long else self._late(where, tries, last)) from None
                await asyncio.sleep(pause)

    def _say(self, text: str) -> None:
        """A warning, once."""
        if text not in self._said and len(self._said) < MOST_SAID:
            self._said.add(text)
            warnings.warn(f"{redacted(self.address.base_url)}: {text}", stacklevel=2)

    async def _once(self, body: Mapping[str, Any], left: float) -> ChatAnswer:
        """One attempt. Raises RequestFailed, TooLate."""
        if left <= 0:
            raise TooLate
        if self._http is None:
            key = self.address.key
            key_header = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = HttpClient(headers=key_header, use_proxies=True, keepalive=self.parallel)

        # Send it.
        url, tokens = self.address.at("/chat/completions"), body["max_tokens"]
        limit = SMALL_ANSWER + TOKEN_BYTES * tokens
        try:
            request = self.profile.request(body)
            reply = await self._http.send("POST", url, request, seconds=left, limit=limit, headers=self.headers)
        except NotReached as error:
            # what has answered before may be reached again, whatever keeps it away now
            raise RequestFailed(
                str(error), passing=self.worked or not error.final, reached=False, cause=error.cause
            ) from None
        except BadReply as error:
            self.reached = True
            raise RequestFailed(str(error), passing=False) from None
        self.reached = True

        # An error, with whatever status.
        noticed: list[str] = []
        try:
            value = reply.json()
        except BadReply as error:
            if reply.status < 400:
                # what has never answered with a completion will not begin to
                raise RequestFailed(
                    _no_json(reply) or str(error), passing=self.worked, foreign=not self.worked
                ) from None
            value = None
        error_body = value if reply.status >= 400 else error_in(value)
        if reply.status >= 400 or error_body is not None:
            failed = read_failure(reply.status, reply.text(SHOWN_LETTERS), error_body, reply.headers)
            if reply.proxy is not None:
                failed.reason += f" (through the proxy that {reply.proxy} names)"
            if failed.filtered:
                return ChatAnswer(content="", finish="content_filter", usage=Usage(answers=1))
            if failed.written is None:
                if reply.status < 400 and failed.code is None and not failed.limited and not self.worked:
                    failed.passing = False
                    failed.foreign = not (isinstance(value, Mapping) and value.get("choices"))
                raise failed
            # the model did answer, with what its own server cannot read
            value = {"choices": [{"message": {"content": failed.written}, "finish_reason": "stop"}]}
            noticed.append(Noticed.UNREAD)

        # A completion, which must be one that the request allows.
        try:
            answer = read_answer(value, self.expected)
        except UnreadableAnswer as error:
            raise RequestFailed(
                str(error),
                passing=not error.full and (self.worked or not error.foreign),
                overflow=error.full,
                foreign=error.foreign and not self.worked,
                usage=error.usage,
            ) from None
        paid = changed(answer.usage, answers=0, unreported=0)
        if (size := answer.characters) > FEW_CHARACTERS + TOKEN_CHARACTERS * tokens:
            reason = f"the answer has {size} characters; at most {tokens} tokens were asked for"
            raise RequestFailed(reason, passing=False, usage=paid)
        if self.ids and answer.ids is None and not noticed:
            reason = "the answer has no token ids (return_token_ids); leave out --token-ids"
            raise RequestFailed(reason, passing=self.worked, usage=paid)
        # some servers call whatever has a call finished
        cut = answer.ending.lower() in CALLED and answer.usage.completion_tokens == tokens
        noticed += [Noticed.CUT] if cut else []
        answer = replace(answer, finish="length" if cut else answer.finish, noticed=(*answer.noticed, *noticed))
        for words in answer.noticed:
            self._say(f"{Noticed.said(words)}. Said once; the results count it under usage")
        self.worked = True
        return answer

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _late(self, where: str, tries: int, last: str) -> EndpointTimeout:
        attempts = f"{tries} attempts" if tries != 1 else "1 attempt"
        url = redacted(self.address.base_url)
        return EndpointTimeout(f"{where}: {url} gave no answer within {self.deadline:g} s ({attempts}; last: {last})")

    def _too_long(self, where: str, wait: float, last: str) -> EndpointTimeout:
        """A server that asks to wait longer than the request has."""
        url, option = redacted(self.address.base_url), " (--request-deadline)" if self.advise else ""
        problem = f"{where}: {url} asks to wait {clock(wait)}, and a response has {self.deadline:g} s{option}; {last}"
        return EndpointTimeout(f"{problem.rstrip('.')}. Repeat the command then: {REPEAT}" if self.advise else problem)

    async def given_up(self, failed: RequestFailed, where: str) -> EndpointError:
        """The error of a request that failed for good, with what may help."""
        reason = redacted(failed.reason).rstrip(".")
        tries = f" (tried {failed.tries} times)" if failed.tries > 1 else ""
        if not self.advise:
            return EndpointError(f"{where}: {redacted(self.address.base_url)}: {reason}{tries}")
        help_text = self.advice(failed)
        if self.worked and not failed.reached:
            help_text = (
                "It answered before, so it has stopped or is restarting; most often it ran out of memory with many "
                "long prompts at a time, which its own log says. Start it again, and repeat the command with fewer "
                f"--slots: {REPEAT}"
            )
        if failed.code in (400, 404) and help_text in ("", ADDRESS) and "did you mean" not in reason.lower():
            # an address with a list of models is right
            listed = await self._models()
            help_text = help_text if listed is None else listed
        message = f"{where}: {redacted(self.address.base_url)}: {reason}{tries}. {help_text}".rstrip(" .")
        if not (failed.rejected and self.worked):
            return EndpointError(message)
        error = RequestRefused(message)
        error.unclear = failed.unclear and not help_text
        return error

    def advice(self, failed: RequestFailed) -> str:
        """A sentence on what may help; empty if nothing is known."""
        tools, reasoning = bool(self.expected.tools), self.profile.reasoning
        return advice(failed, model=self.model, key_env=self.address.key_env, tools=tools, reasoning=reasoning)

    async def _models(self) -> str | None:
        """A sentence that lists the models, empty if the requested one is among them; None without a list."""
        assert self._http is not None
        url = self.address.at("/models")
        # any failure here is ignored, since the error being explained matters more
        try:
            reply = await self._http.send("GET", url, seconds=10.0, limit=SMALL_ANSWER)
            names = sorted(str(model["id"]) for model in reply.json()["data"])
        except (ExchangeError, TypeError, LookupError):
            return None
        if not names or self.model in names:
            return "" if names else None
        names = [excerpt(name, NAME_SHOWN) for name in names]
        hint = did_you_mean(self.model, names)
        return f"The endpoint has: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}.{hint}"


def _no_json(reply: HttpReply) -> str:
    """Describes an answer that is not JSON; empty if nothing is known of it."""
    content_type, start = reply.headers.get("content-type", "").lower(), reply.body[:200].lstrip().lower()
    if "event-stream" in content_type or start.startswith((b"data:", b"event:")):
        return "the answer is a stream of events, which was not asked for: the server ignores `stream` false"
    if "html" in content_type or start.startswith((b"<!doctype", b"<html")):
        return f"the answer is a web page and not JSON: {reply.text(100)!r}"
    return ""

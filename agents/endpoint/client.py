"""How an endpoint is asked for chat completions: retries, deadline and rate limits.

What happens to a failed attempt (`EndpointClient._ask`):

- 429: all requests wait until `Retry-After` has passed (`RateGate`), and this one is repeated until the deadline.
- 5xx, a lost connection, an unreadable body, an answer that broke off: repeated up to `retries` times after a pause
  that doubles from 0.5 s to 60 s, with jitter from the request's own random stream.
- a full context: `ContextOverflow`, so that the caller can ask for fewer tokens.
- anything else: `EndpointError` with advice; `RequestRefused` if it may be a full context in unknown words.

`failures` tells them apart, whatever status the error has. No retry library does this: a wait is shared by all
requests, and a pause comes from the request's own stream, so that runs repeat.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from turngym.agents.endpoint.failures import SHOWN, Asked, RequestFailed, advice, error_in, refused
from turngym.agents.endpoint.messages import NO_ANSWER, Answer, UnreadableAnswer, bare_message, read_answer
from turngym.core.errors import AgentError, did_you_mean
from turngym.core.outgoing import (
    SMALL_ANSWER,
    TOKEN_BYTES,
    BadReply,
    ExchangeError,
    HttpClient,
    NotReached,
    TooLate,
    address_problem,
)
from turngym.core.redaction import excerpt, redacted
from turngym.core.secrets import refuse_credentials
from turngym.core.settings import Above0

FEW_CHARACTERS, TOKEN_CHARACTERS = 1024, 256
"""Characters that any answer may have, and more for each of its tokens; runs of 128 spaces are the longest in use."""
NAME_SHOWN = 100
"""Characters of the name of a model that are shown."""
FIRST, LONGEST = 0.5, 60.0
"""Seconds before the first retry, and most seconds before any later one."""


def pauses(rng: np.random.Generator) -> Iterator[float]:
    """Seconds before each retry: doubling from 0.5 to 60, each times a draw from [0.5, 1.5)."""
    pause = FIRST
    while True:
        yield pause * (0.5 + rng.random())
        pause = min(2 * pause, LONGEST)


@dataclass(slots=True)
class RateGate:
    """The time until which no request may be sent: a rate limit that one request meets holds for all."""

    opens: float = 0.0
    """When requests may be sent again, by `time.monotonic`."""

    def close(self, seconds: float) -> None:
        """Hold all requests for `seconds`."""
        self.opens = max(self.opens, time.monotonic() + seconds)

    async def passed(self, spread: float, end: float) -> bool:
        """Wait until requests may be sent, and `spread` seconds more if that took time; False if `end` comes first."""
        waited = False
        while (left := self.opens - time.monotonic()) > 0:
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


KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """An OpenAI-compatible endpoint (`openai:MODEL`)."""

    base_url: str = ""
    """openai:MODEL: address of the endpoint with its version, for example http://127.0.0.1:8000/v1; by default
    $OPENAI_BASE_URL, else OpenAI's own."""
    key_env: str = KEY
    """openai:MODEL: name of the environment variable that holds the key. The key itself is never an option."""
    request_deadline: Above0 = 600.0
    """openai:MODEL: seconds for one response, retries and waits for rate limits included."""
    request_retries: int = 6
    """openai:MODEL: how often a request is sent again after a failure that may pass (a 5xx, a lost connection, a broken
    body). Rate limits (429) are waited out until the deadline."""
    send_stop: bool = True
    """openai:MODEL: send the channel's stop strings. Some models refuse `stop`; actions are read without it too."""
    send_seed: bool = True
    """openai:MODEL: send a seed, made of --seed, task, sample and turn; some endpoints refuse `seed`."""
    reasoning_back: Literal["drop", "send"] = "drop"
    """openai:MODEL: whether the reasoning of earlier turns is sent back, in the field in which it came. Signatures of
    it, and other fields of unknown meaning, always are."""
    token_ids: bool = False
    """openai:MODEL: ask for token ids and log-probabilities (`return_token_ids` of vLLM and of `turngym serve proxy`),
    so that traces can be trained on as they were sampled."""
    extra_body: str = "{}"
    """openai:MODEL: further fields of every request as JSON, for example '{"top_p": 0.95}'."""
    price_in: float | None = None
    """openai:MODEL: price of a million prompt tokens, in any currency; with --price-out the results show the cost."""
    price_cached: float | None = None
    """openai:MODEL: price of a million prompt tokens that the endpoint had cached; by default --price-in."""
    price_out: float | None = None
    """openai:MODEL: price of a million completion tokens, reasoning included."""


HOSTED = "https://api.openai.com/v1"
COLD_TRIES = 3
"""Attempts before a server that has never answered is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of an endpoint and the name of the variable with its key. The key itself is never stored."""

    base_url: str
    key_env: str = KEY

    @classmethod
    def of(cls, base_url: str, key_env: str) -> Address:
        """Raises AgentError for an invalid address, one with a password in it, and a missing key."""
        url = base_url or os.environ.get("OPENAI_BASE_URL") or HOSTED
        refuse_credentials("--base-url", url)
        if problem := address_problem(url):
            raise AgentError(f"--base-url {redacted(url)!r} {problem}")
        address = cls(base_url=url, key_env=key_env)
        if not address.key and (url == HOSTED or key_env != KEY):
            raise AgentError(f"the key of {url} is read from the environment variable {key_env}, which is not set")
        if not (address.key.isascii() and address.key.isprintable()):
            raise AgentError(f"the environment variable {key_env} holds no key: a key is printable ASCII")
        return address

    @property
    def key(self) -> str:
        """The key; empty if there is none."""
        return os.environ.get(self.key_env, "").strip()

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
    tools: bool = False
    """Whether requests offer tools, which changes the advice in errors."""
    reasoning: bool = False
    """Whether requests send reasoning back; likewise."""
    ids: bool = False
    """Whether an answer without token ids counts as broken."""
    reached: bool = False
    """Whether a server has ever answered, even with an error."""
    worked: bool = False
    """Whether there has been a usable answer."""
    advise: bool = True
    """Whether errors say what may help; they name options of `openai:MODEL`."""
    gate: RateGate = field(default_factory=RateGate)
    _tokens_field: str = "max_tokens"
    """What new requests call their limit of tokens."""
    _form: tuple[bool, bool] = (False, False)
    """The form of a conversation that the server was seen to demand, as in `conversation_forms`."""
    _said: set[str] = field(default_factory=set)
    _http: HttpClient | None = None
    _free: asyncio.Semaphore | None = None

    async def ask(self, body: Mapping[str, Any], rng: np.random.Generator, where: str) -> Answer:
        """The answer to `body`, by the deadline; its usage says how often it was asked for again.

        `where` names the request in errors, `rng` draws its pauses. Raises EndpointTimeout, ContextOverflow, or
        EndpointError if the request failed for good.
        """
        if self._free is None:
            self._free = asyncio.Semaphore(self.parallel)
        async with self._free:
            return await self._ask(body, rng, where, time.monotonic() + self.deadline)

    async def _ask(self, body: Mapping[str, Any], rng: np.random.Generator, where: str, end: float) -> Answer:
        waits, failures, sent, last = pauses(rng), 0, 0, "no attempt was answered"
        forms, first = conversation_forms(body, self._form), None
        form, asked = next(forms)
        while True:
            if not await self.gate.passed(0.5 * rng.random(), end):
                raise self._late(where, sent, f"a rate limit that lasts longer; {last}")
            sent += 1
            # other requests may rename it before this one is answered
            limit_name = self._tokens_field
            try:
                answer = await self._once(asked, limit_name, end - time.monotonic())
                self._learn(form)
                return replace(answer, usage=replace(answer.usage, retries=sent - 1))
            except TooLate:
                raise self._late(where, sent, last) from None
            except RequestFailed as failed:
                last = redacted(failed.reason)
                if failed.overflow:
                    raise ContextOverflow(f"{where}: {last}") from None
                # OpenAI's newer models refuse `max_tokens`
                if limit_name == "max_tokens" and "max_completion_tokens" in failed.reason:
                    self._tokens_field = "max_completion_tokens"
                    continue
                if failed.rejected:
                    first = first or failed
                    if (other := next(forms, None)) is not None:
                        form, asked = other
                        continue
                    failed = first
                failures += not failed.limited
                allowed = self.retries if self.reached else min(self.retries, COLD_TRIES - 1)
                if not failed.passing or failures > allowed:
                    raise await self._given_up(failed, where, sent) from None
                after = failed.after or 0.0
                if failed.limited:
                    self.gate.close(after)
                # at least our own pause, even if the server always allows an immediate retry
                pause = max(next(waits), after)
                if time.monotonic() + pause >= end:
                    raise self._late(where, sent, last) from None
                await asyncio.sleep(pause)

    def _learn(self, form: tuple[bool, bool]) -> None:
        """Note the form in which a conversation was accepted, after other forms were refused."""
        if form[1] and not self._form[1]:
            self._say(
                "the endpoint refuses fields that came with its own answers, and answers without: they are left out of "
                "conversations"
            )
        self._form = (self._form[0] or form[0], self._form[1] or form[1])

    def _say(self, text: str) -> None:
        """A warning, once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"{redacted(self.address.base_url)}: {text}", stacklevel=2)

    async def _once(self, body: Mapping[str, Any], limit_name: str, left: float) -> Answer:
        """One attempt, whose limit of tokens is called `limit_name`. Raises RequestFailed, TooLate."""
        if left <= 0:
            raise TooLate
        fields = dict(body)
        tokens = fields.pop("max_tokens")
        fields[limit_name] = tokens
        if self._http is None:
            key = self.address.key
            self._http = HttpClient(headers={"Authorization": f"Bearer {key}"} if key else {}, use_proxies=True)
        url, limit = self.address.at("/chat/completions"), SMALL_ANSWER + TOKEN_BYTES * tokens
        try:
            reply = await self._http.send("POST", url, fields, seconds=left, limit=limit)
        except NotReached as error:
            raise RequestFailed(str(error), passing=True, reached=False) from None
        except BadReply as error:
            self.reached = True
            raise RequestFailed(str(error), passing=False) from None
        self.reached = True
        try:
            found = reply.json()
        except BadReply as error:
            if reply.status < 400:
                raise RequestFailed(str(error), passing=True) from None
            found = None
        said = found if reply.status >= 400 else error_in(found)
        if reply.status >= 400 or said is not None:
            failed = refused(reply.status, reply.text(SHOWN), said, reply.headers)
            if failed.written is None or not self.tools:
                raise failed
            # the model wrote a call that its server could not read, and this is what it wrote
            return Answer(content=failed.written)
        try:
            answer = read_answer(found)
        except UnreadableAnswer as error:
            raise RequestFailed(str(error), passing=not error.full, overflow=error.full) from None
        if (size := answer.characters) > FEW_CHARACTERS + TOKEN_CHARACTERS * tokens:
            raise RequestFailed(f"the answer has {size} characters; at most {tokens} tokens were asked for", False)
        if self.ids and answer.ids is None:
            raise RequestFailed("the answer has no token ids (return_token_ids); leave out --token-ids", self.worked)
        if answer.ending:
            self._say(f"answers end with finish_reason {answer.ending}, which is not known: they are taken as whole")
        self.worked = True
        return answer

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _late(self, where: str, sent: int, last: str) -> EndpointTimeout:
        tries = f"{sent} attempts" if sent != 1 else "1 attempt"
        url = redacted(self.address.base_url)
        return EndpointTimeout(f"{where}: {url} gave no answer within {self.deadline:g} s ({tries}; last: {last})")

    async def _given_up(self, failed: RequestFailed, where: str, sent: int) -> EndpointError:
        reason = redacted(failed.reason).rstrip(".")
        tries = f" (tried {sent} times)" if sent > 1 else ""
        if not self.advise:
            return EndpointError(f"{where}: {redacted(self.address.base_url)}: {reason}{tries}")
        asked = Asked(model=self.model, key_env=self.address.key_env, tools=self.tools, reasoning=self.reasoning)
        help_text = advice(failed, asked)
        if self.worked and not failed.reached:
            help_text = (
                "It answered before, so it has stopped or is restarting; most often it ran out of memory with many "
                "long prompts at a time, which its own log says. Start it again, and repeat the command with fewer "
                "--slots: with --out (rollout: --append, too) only the episodes that have not ended are played"
            )
        if failed.code in (400, 404) and not help_text and "did you mean" not in reason.lower():
            help_text = await self._models()
        said = f"{where}: {redacted(self.address.base_url)}: {reason}{tries}. {help_text}".rstrip(" .")
        if not (failed.rejected and self.worked):
            return EndpointError(said)
        error = RequestRefused(said)
        error.unclear = failed.unclear and not help_text
        return error

    async def _models(self) -> str:
        """A sentence that lists the endpoint's models, if the requested one is not among them."""
        assert self._http is not None
        url = self.address.at("/models")
        # any failure here is ignored, since the error being explained matters more
        try:
            reply = await self._http.send("GET", url, seconds=10.0, limit=SMALL_ANSWER)
            names = sorted(str(model["id"]) for model in reply.json()["data"])
        except (ExchangeError, TypeError, LookupError):
            return ""
        if not names or self.model in names:
            return ""
        names = [excerpt(name, NAME_SHOWN) for name in names]
        return f"The endpoint has: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}." + did_you_mean(
            self.model, names
        )


def conversation_forms(
    body: Mapping[str, Any], needed: tuple[bool, bool]
) -> Iterator[tuple[tuple[bool, bool], Mapping[str, Any]]]:
    """The forms in which the conversation of `body` can be sent, as (filled, bare) with the body that has it.

    The first is as it is, but for what is known to be `needed`; the others differ from it. Filled: some text stands for
    turns without any, which the model may well have written and some servers refuse. Bare: without the fields that are
    not known here, which others refuse although they came with their own answers.
    """
    messages = body["messages"]
    own = [message["role"] == "assistant" for message in messages]
    empty = [mine and not m.get("content") and not m.get("tool_calls") for mine, m in zip(own, messages, strict=True)]
    for fill, strip in ((False, False), (True, False), (False, True), (True, True)):
        if (needed[0] and not fill) or (needed[1] and not strip):
            continue
        # a form that changes nothing was sent already
        if fill and not needed[0] and not any(empty):
            continue
        bare = [bare_message(m) if mine else m for mine, m in zip(own, messages, strict=True)] if strip else messages
        if strip and not needed[1] and bare == messages:
            continue
        sent = bare
        if fill:
            sent = [{**m, "content": NO_ANSWER} if none else m for m, none in zip(sent, empty, strict=True)]
        yield (fill, strip), {**body, "messages": sent}

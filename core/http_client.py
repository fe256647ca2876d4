"""Requests to servers that need not behave: each ends by a deadline, and its answer has a limited size.

Retrievers, chat endpoints, judges and SGLang servers are all asked through `HttpClient.send`. Whatever a server does
(it drips, never ends, sends a bomb or nested JSON, redirects the prompt elsewhere) becomes an `ExchangeError`.
`LoopThread` runs such requests for callers that have no event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import zlib
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

from turngym.core.http_connection import FINAL, Cause, Proxy, Unreachable, certificates, proxy_of, why_not
from turngym.core.redaction import HeaderKeys, excerpt, is_secret, remember_key
from turngym.core.user_files import json_of

T = TypeVar("T")

LOOK = 5.0
"""Seconds between two looks at the thread that runs a request."""
SMALL_ANSWER = 16 << 20
"""Bytes: the limit for answers that say little, and what every other limit allows beside its tokens."""
TOKEN_BYTES = 512
"""Bytes of JSON for one token with its text, id and log-probability; about 150 are usual."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 520, 521, 522, 523, 524, 529})
"""HTTP statuses of failures that may be temporary: the same request may work later."""


class ExchangeError(Exception):
    """A request without a usable answer."""


class NotReached(ExchangeError):
    """There was no connection, or it broke before the whole answer was there. `cause` says why."""

    def __init__(self, text: str, cause: Cause = "lost") -> None:
        super().__init__(text)
        self.cause: Cause = cause

    @property
    def final(self) -> bool:
        """Whether another try would end the same."""
        return self.cause in FINAL


class TooLate(ExchangeError):
    """The whole answer was not there in time."""


class BadReply(ExchangeError):
    """The answer is too long, a redirect, compressed in an unknown way, or not JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """Names are compared without case."""
    body: bytes
    proxy: str | None = None
    """The variable that names the proxy through which it came; None: it came from the server itself."""

    def json(self) -> Any:
        """The body as JSON. Raises BadReply."""
        return read_json(self.body)

    def text(self, most: int) -> str:
        """The first `most` letters of the body, for messages."""
        return excerpt(self.body, most)


def read_json(body: bytes) -> Any:
    """The value of JSON from outside. Raises BadReply."""
    try:
        return json_of(body)
    except ValueError as error:
        raise BadReply(f"the answer is not JSON: {excerpt(body, 100)!r}") from error


LONGEST_WAIT = 7 * 86_400.0
"""Seconds that a server may ask to wait. One that asks for more, a clock that is wrong for example, is not believed: a
wait holds for all requests."""


def retry_after(headers: Any) -> float | None:
    """Seconds that a server asks to wait: `retry-after-ms`, or Retry-After in seconds or as a date; None if absent, or
    longer than `LONGEST_WAIT`."""
    wait = _asked_wait(headers)
    return None if wait is None or wait > LONGEST_WAIT else wait


def _asked_wait(headers: Any) -> float | None:
    thousandths = _number(headers.get("retry-after-ms"))
    if thousandths is not None:
        return thousandths / 1000
    asked = headers.get("retry-after")
    seconds = _number(asked)
    if seconds is not None or not asked:
        return seconds
    moment, now = _moment(asked), _moment(headers.get("date"))
    # by the server's own clock, if it sends the time
    return None if moment is None else max(moment - (time.time() if now is None else now), 0.0)


def _moment(date: Any) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    # dates before the year 1970 and after 9999 are any of these on some system
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


class HttpClient:
    """Connections to any number of servers. `send` and `close` are coroutines of one event loop.

    Args:
        connect: seconds for one connection.
        keepalive: most idle connections that are kept.
        use_proxies: whether the environment's proxies (HTTPS_PROXY) are for these servers, those on this machine left
            out.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        connect: float = 10.0,
        keepalive: int = 64,
        use_proxies: bool = False,
    ) -> None:
        import httpx

        self._connect, self._use_proxies = connect, use_proxies
        # callers limit their requests; under httpx's limit of 100 an abort could queue behind what it should end
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=keepalive)
        # a server that compresses nevertheless is read, see `_read`
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        self._keys = HeaderKeys(tuple((headers or {}).values()))
        for name, value in (headers or {}).items():
            if is_secret(name):
                remember_key(value.rpartition(" ")[2])
        self._clients: dict[tuple[bool, str | None], Any] = {}
        """One for each kind: whether certificates are needed, and the proxy's address."""

    async def send(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        seconds: float,
        limit: int,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """The server's whole answer, errors included.

        Redirects are not followed, because a request holds prompts and keys: they raise BadReply, as answers do that
        are too long or cannot be read. Raises NotReached without a connection, TooLate after `seconds`.

        Args:
            body: bytes of JSON, or a value that becomes JSON; None: no body.
            seconds: for everything, from looking up the name to the last byte of the answer.
            limit: most bytes of the answer, uncompressed.
        """
        import httpx

        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**(headers or {}), **({} if content is None else {"Content-Type": "application/json"})}
        # httpx's other limits are for single reads, which a server that drips always meets
        timeout = httpx.Timeout(None, connect=min(self._connect, seconds))
        proxy: Proxy | None = None
        try:
            proxy = proxy_of(url) if self._use_proxies else None
            http = self._client(url.lower().startswith("https:"), proxy)
            async with (
                asyncio.timeout(seconds),
                http.stream(method, url, content=content, headers=headers, timeout=timeout) as answer,
            ):
                if 300 <= answer.status_code < 400:
                    to = self._keys.hidden(answer.headers.get("location", "nowhere").encode())
                    raise BadReply(
                        f"status {answer.status_code}: it redirects to {excerpt(to, 200)!r}, which is not followed"
                    )
                received = self._keys.hidden(await _read(answer, limit), error=not answer.is_success)
                through = None if proxy is None else proxy.variable
                return HttpReply(status=answer.status_code, headers=answer.headers, body=received, proxy=through)
        except TimeoutError:
            raise TooLate(f"no whole answer within {seconds:.3g} s") from None
        except Unreachable as error:
            raise NotReached(str(error), error.cause) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = why_not(error, url, proxy, min(self._connect, seconds))
            raise NotReached(str(reason), reason.cause) from error

    def _client(self, safe: bool, proxy: Proxy | None) -> Any:
        """The connections of one kind. Raises Unreachable."""
        import httpx

        name = safe, None if proxy is None else proxy.address
        if name not in self._clients:
            tls = safe or (proxy is not None and proxy.address.startswith("https:"))
            try:
                self._clients[name] = httpx.AsyncClient(
                    headers=self._headers,
                    limits=self._limits,
                    # variables of the environment are read here alone, where an error can name them
                    trust_env=False,
                    proxy=name[1],
                    verify=certificates() if tls else False,
                    follow_redirects=False,
                    # what one answer sets is sent with no other request
                    cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                )
            # httpx quotes the proxy's address, and a password in it
            except (ValueError, ImportError, httpx.InvalidURL):
                if proxy is None:
                    raise
                raise Unreachable(
                    "proxy", f"the variable {proxy.variable} names no proxy that can be used: write http://HOST:PORT"
                ) from None
        return self._clients[name]

    async def close(self) -> None:
        for http in self._clients.values():
            await http.aclose()


async def _read(answer: Any, limit: int) -> bytes:
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity", "gzip", "deflate"):
        raise BadReply(f"the answer is compressed by {excerpt(coding, 40)!r}, although no compression was asked for")
    # 32 reads the headers of both
    unzip = None if coding in ("", "identity") else zlib.decompressobj(32 + zlib.MAX_WBITS)
    content = bytearray()
    async for part in answer.aiter_raw():
        try:
            # a thousand bytes may unzip to a million, so the limit holds before they do
            content += part if unzip is None else unzip.decompress(part, limit + 1 - len(content))
        except zlib.error as error:
            raise BadReply(f"the answer cannot be decompressed: {error}") from error
        if len(content) > limit:
            raise BadReply(f"the answer is longer than {limit} bytes")
    return bytes(content)


class LoopThread:
    """Runs coroutines for callers in other threads. Ctrl-C in the caller cancels what it waits for."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; its exception is raised here."""
        future = self.start(work)
        try:
            while not wait([future], LOOK).done:
                if not self._thread.is_alive():
                    raise NotReached(f"the thread {self._thread.name} has ended")
            return future.result()  # ends: it is done
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread; work that is still under way is lost."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)
        if not self._loop.is_running() and not self._loop.is_closed():
            self._loop.close()

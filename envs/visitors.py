"""People at web pages that play an environment: who they are, how many may stay, and their episodes in a trace.

For the pages of the shop (`envs/webshop/web.py`) and those of all environments (`agents/play_web.py`). A cookie carries
a random id and nothing else; forms carry a token that only the holder of that cookie can have been given. No page may
be framed, or load what its policy does not name.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.trace import TraceError, TraceWriter, iter_trace
from turngym.envs.spaces import printable

try:
    from flask import Flask, Response, request
except ImportError as error:
    raise TurngymError("web pages need Flask: pip install 'turngym[serve]'") from error

V = TypeVar("V")
MAX_FORM = 16 << 10
"""Bytes of a form."""
LEFT = "the player left"
"""`meta["error"]` of an episode whose player did not come back."""
log = logging.getLogger(__name__)


class Visitors(Generic[V]):
    """What belongs to each visitor, by the id in the cookie; bounded in number and idle time. Safe across threads.

    Args:
        most: visitors at a time; a further one takes the place of the one away longest.
        idle: seconds without a request after which a visitor is dropped, at the next request of anybody.
        dismiss: ends what belonged to a visitor who was dropped; it is called without the lock, for it may wait for a
            turn that is being played.
        clock: the time in seconds; only differences count.
    """

    def __init__(
        self, *, most: int, idle: float, dismiss: Callable[[V], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._idle, self._dismiss, self._clock = most, idle, dismiss, clock
        self._open: OrderedDict[str, tuple[V, float]] = OrderedDict()
        """Open visits with the time of their last use, in its order."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: str) -> V | None:
        """A visitor's value, marked as the most recent one; None if there is none or it was idle for too long."""
        gone, now = [], self._clock()
        with self._lock:
            while self._open and now - next(iter(self._open.values()))[1] > self._idle:
                gone.append(self._open.popitem(last=False)[1][0])
            entry = self._open.pop(name, None)
            if entry is not None:
                self._open[name] = entry[0], now
        self._end(gone)
        return None if entry is None else entry[0]

    def put(self, name: str, value: V) -> None:
        """Give a visitor a new value. Where there are too many visitors, the one away longest is dropped."""
        with self._lock:
            before = self._open.pop(name, None)
            self._open[name] = value, self._clock()
            gone = self._surplus()
        self._end(gone if before is None else [before[0], *gone])

    def enter(self, name: str, make: Callable[[], V]) -> V:
        """A visitor's value, made if there is none. If there are too many visitors, the one away longest is dropped."""
        if (known := self.get(name)) is not None:
            return known
        # made without the lock; another request of the same browser may still be first, and what it made stays
        fresh = make()
        with self._lock:
            value, _ = self._open.setdefault(name, (fresh, self._clock()))
            gone = self._surplus()
        self._end(gone if value is fresh else [fresh, *gone])
        return value

    def _surplus(self) -> list[V]:
        """Take out those beyond the limit, away longest. Call it with the lock."""
        return [self._open.popitem(last=False)[1][0] for _ in range(len(self._open) - self._most)]

    def close(self) -> None:
        """Forgets every visitor."""
        with self._lock:
            gone = [value for value, _ in self._open.values()]
            self._open.clear()
        self._end(gone)

    def _end(self, gone: Sequence[V]) -> None:
        for value in gone:
            self._dismiss(value)


class Forms:
    """The cookie of a visitor and the token in the forms on his pages."""

    def __init__(self, cookie: str) -> None:
        self._cookie, self._secret = cookie, secrets.token_bytes(32)

    def visitor(self) -> str | None:
        """The id in the request's cookie, if it has the form of one of ours."""
        name = request.cookies.get(self._cookie, "")
        return name if re.fullmatch(r"[A-Za-z0-9_-]{43}", name) else None

    def sender(self) -> str | None:
        """The id in the request's cookie, if the form carries its token."""
        name = self.visitor()
        # bytes, because compare_digest refuses text beyond ASCII
        token = request.form.get("token", "").encode()
        return name if name is not None and hmac.compare_digest(token, self.token(name).encode()) else None

    def token(self, name: str) -> str:
        return hmac.digest(self._secret, name.encode(), "sha256").hex()

    def visitor_or_new(self) -> str:
        return self.visitor() or secrets.token_urlsafe(32)

    def remember(self, reply: Response, name: str) -> None:
        reply.set_cookie(self._cookie, name, httponly=True, samesite="Lax")


def guard_pages(app: Flask, policy: str, error_page: Callable[[int], Any]) -> None:
    """Limit forms, escape what cannot be sent, forbid what pages do not need, and answer errors with `error_page`.

    `policy` is the part of the content policy that differs: what may be loaded.
    """
    app.config.update(MAX_CONTENT_LENGTH=MAX_FORM, MAX_FORM_MEMORY_SIZE=MAX_FORM, MAX_FORM_PARTS=16)
    # a lone surrogate in a text could not be sent
    app.jinja_options = {"finalize": lambda value: printable(value) if type(value) is str else value}

    @app.after_request
    def headers(reply: Response) -> Response:
        forms = "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        reply.headers["Content-Security-Policy"] = f"default-src 'none'; {policy}; {forms}"
        reply.headers["X-Content-Type-Options"] = "nosniff"
        reply.headers["X-Frame-Options"] = "DENY"
        # with no-referrer a browser sends `Origin: null` with our own forms, which a server would refuse
        reply.headers["Referrer-Policy"] = "same-origin"
        if request.endpoint != "static":
            reply.headers["Cache-Control"] = "no-store"
        return reply

    @app.errorhandler(Exception)
    def refused(error: Exception) -> Any:
        status = getattr(error, "code", None)
        if not isinstance(status, int):
            app.logger.exception("request failed", exc_info=error)
            status = 500
        return error_page(status)


class EpisodeRecorder:
    """Appends people's episodes to a trace; sample numbers go on from those that are in it. Safe across threads."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError where the file cannot be written or is of a newer version."""
        self.path = path
        self.failed = 0
        """Episodes that could not be written."""
        self._samples: Counter[str] = Counter()
        if path.is_file():
            for item in iter_trace(path):
                if isinstance(item, Episode):
                    self._samples[item.task.task_id] = max(self._samples[item.task.task_id], item.sample + 1)
        self._writer = TraceWriter(path)
        self._lock = threading.Lock()

    def __call__(self, episode: Episode) -> None:
        """Append one episode. A full disk costs the record, not the person's purchase: it is logged."""
        with self._lock:
            # so that a task and a sample name one episode
            sample = self._samples[episode.task.task_id]
            try:
                self._writer.write(replace(episode, sample=sample))
            except (OSError, ValueError, TraceError) as error:
                self.failed += 1
                log.error("an episode of %s could not be written to %s: %s", episode.task.task_id, self.path, error)
                return
            self._samples[episode.task.task_id] = sample + 1

    def close(self) -> None:
        with self._lock:
            self._writer.close()

"""One SGLang server as a child process: start it, wait until it is ready, stop it with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from turngym.agents.sglang.errors import ServerError

TAIL = 25
"""Lines of the server's output that an error shows."""


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    """A server in a session of its own, its output in a file."""

    command: Sequence[str]
    url: str
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _file: IO[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it; returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        self._child = subprocess.Popen(
            list(self.command),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.env},
            # a process group of its own, which killpg below ends as a whole
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        return None if self._child is None else self._child.poll()

    def wait_ready(self, seconds: float) -> None:
        """Return when /ready says so.

        Raises ServerError, with the end of its output, where it ends before, or is not ready after `seconds`.
        """
        import httpx

        end = self.clock() + seconds
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                status = self.ended()
                if status is not None:
                    raise ServerError(f"the server ended with status {status} before it was ready; {self.tail()}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/ready").status_code == 200:
                        return
                if self.clock() > end:
                    raise ServerError(f"the server was not ready after {seconds:.0f} s; {self.tail()}")
                self.sleep(0.5)

    def stop(self, seconds: float = 20.0) -> None:
        """Ask it to end, then make it; nothing that it started stays."""
        if self._child is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """End it at once, with all that it started."""
        if self._child is not None:
            self._signal(signal.SIGKILL)
            self._child.wait()
        if self._file is not None:
            self._file.close()
            self._file = None

    def tail(self) -> str:
        """The end of its output, in words."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        except OSError as error:
            return f"its output {self.log} cannot be read: {error}"
        return f"the end of {self.log}:\n" + "\n".join(line[:300] for line in lines)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def _signal(self, number: int) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)

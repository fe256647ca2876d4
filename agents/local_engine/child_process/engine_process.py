"""A local engine in a process of its own, which a trainer in this process cannot hold up."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngym.agents.local_engine.child_process.child import serve_engine
from turngym.agents.local_engine.child_process.shared_weights import share_parameters, skeleton
from turngym.agents.local_engine.model import EngineError
from turngym.envs.protocols import GenerateRequest, Generation, Watch

GRACE = 3.0
"""Seconds that the process gets to end by itself."""


class EngineProcess:
    """Implements `StreamingPolicy`: a `LocalEngine` over `model` in a child process.

    The parameters of `model` move into memory that both processes map: write to them while nothing is generated, then
    call `weights_changed`. A process that dies fails what it was generating, and is started again by the next request.
    One call of `stream` at a time. `threads`: torch's, in the child; `settings`: further ones of `LocalEngine`.

    Raises:
        EngineError: a model on an accelerator, or one that cannot be sent to a process.
    """

    def __init__(self, model: Any, *, threads: int = 1, **settings: Any) -> None:
        device = next(model.parameters()).device
        if device.type != "cpu":
            raise EngineError(
                f"the model is on {device}; an engine in a process of its own runs on the CPU: serve from a copy in "
                "this process, or from an SGLang server"
            )
        self.model = model
        self._path = share_parameters(model)
        self._settings, self._threads = settings, threads
        self.policy_version = int(settings.pop("policy_version", 0))
        self._lock = threading.Lock()
        self._pipe: Any = None
        self._end: Any = weakref.finalize(self, _remove, self._path)
        try:
            self._payload = skeleton(model)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._end()
            raise EngineError(f"the model ({type(model).__name__}) cannot be sent to a process: {error}") from error
        self.starts = 0
        """How often a process was started."""
        self.max_length = 0
        """Most ids of prompt and response together."""
        self._start()

    @property
    def pid(self) -> int | None:
        """Of the process; None where none runs."""
        return None if self._pipe is None else self._process.pid

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order."""
        return self.stream(requests, [None] * len(requests))

    def stream(self, requests: Sequence[GenerateRequest], watches: Sequence[Watch | None]) -> list[Generation]:
        """`generate`, each watch hearing its ids soon after they were drawn. Raises what the engine raises there."""
        if self._pipe is None:
            self._start()
        self._send("stream", list(requests))
        stopped: set[int] = set()
        while True:
            kind, value = self._receive()
            if kind == "drawn":
                for row, token, logprob in value:
                    watch = watches[row]
                    if row not in stopped and watch is not None and not watch(token, logprob):
                        stopped.add(row)
                        self._send("stop", row)
            elif kind == "failed":
                raise value
            else:
                found: list[Generation] = value
                return found

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        self._tell("release", session)

    def weights_changed(self, version: int) -> None:
        """The mapped parameters have other values: what is generated from now on is theirs, as `version`."""
        self.policy_version = version
        self._tell("version", version)

    def close(self) -> None:
        """End the process and give the memory back. Twice is fine."""
        self._end()
        self._pipe = None

    def _tell(self, what: str, value: Any) -> None:
        """Say what a process that is started later need not know."""
        if self._pipe is not None:
            with contextlib.suppress(EngineError):
                self._send(what, value)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        settings = {**self._settings, "policy_version": self.policy_version}
        arguments = (theirs, self._threads, self._payload, self._path, settings)
        self._process = context.Process(target=serve_engine, args=arguments, name="turngym-engine", daemon=True)
        self._process.start()
        # while this process holds the child's end too, the death of the child is no end of the pipe
        theirs.close()
        self._end.detach()
        self._end = weakref.finalize(self, _stop, self._process, self._pipe, self._path)
        self.starts += 1
        kind, value = self._receive()
        if kind == "failed":
            raise value
        self.max_length = value

    def _send(self, what: str, value: Any) -> None:
        try:
            with self._lock:
                self._pipe.send((what, value))
        except OSError:
            self._died()

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._died()
        return kind, value

    def _died(self) -> Any:
        self._process.join(GRACE)
        code = self._process.exitcode
        self._pipe.close()
        self._pipe = None
        raise EngineError(f"the engine's process {self._process.pid} ended with status {code}; ask again") from None


def _stop(process: Any, pipe: Any, path: Path) -> None:
    pipe.close()  # its end tells the child to end
    process.join(GRACE)
    if process.is_alive():
        process.kill()
        process.join()
    _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)

"""What runs in the process of an `EngineProcess`: one local engine, told what to do through a pipe."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch

from turngym.agents.executor.local import picklable
from turngym.agents.local_engine.child_process.shared_weights import mapped_model
from turngym.agents.local_engine.engine import LocalEngine
from turngym.envs.protocols import GenerateRequest, Watch

FLUSH = 0.005
"""Seconds that drawn ids are gathered before they are sent."""


def serve_engine(pipe: Any, threads: int, payload: bytes, path: Path, settings: dict[str, Any]) -> None:
    """Answer until the other end of `pipe` is closed."""
    # signals reach the whole process group; the parent answers what it has accepted first, and then closes the pipe
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        engine = LocalEngine(mapped_model(payload, path), **settings)
    except Exception as error:
        pipe.send(("failed", picklable(error)))
        return
    pipe.send(("ready", engine.max_length))
    with torch.inference_mode(False):
        _answer_all(engine, pipe)


def _answer_all(engine: LocalEngine, pipe: Any) -> None:
    try:
        while True:
            what, value = pipe.recv()
            if what == "stream":
                _stream(engine, pipe, value)
            elif what == "release":
                engine.release(value)
            elif what == "version":
                engine.weights_changed(value)
            # a `stop` that came after its row had ended says nothing any more
    except (EOFError, OSError):
        return


def _stream(engine: LocalEngine, pipe: Any, requests: list[GenerateRequest]) -> None:
    talk = _Talk(pipe)
    try:
        found = engine.stream(requests, [talk.watch(row) for row in range(len(requests))])
    except (EOFError, OSError):
        raise
    except Exception as error:
        pipe.send(("failed", picklable(error)))
        return
    talk.flush()
    pipe.send(("done", found))


class _Talk:
    """Tells of drawn ids a few at a time, and hears which rows are wanted no more."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._drawn: list[tuple[int, int, float]] = []
        self._stopped: set[int] = set()
        self._told = time.monotonic()

    def watch(self, row: int) -> Watch:
        def drawn(token: int, logprob: float) -> bool:
            self._drawn.append((row, token, logprob))
            if time.monotonic() - self._told > FLUSH:
                self.flush()
            return row not in self._stopped

        return drawn

    def flush(self) -> None:
        if self._drawn:
            self._pipe.send(("drawn", self._drawn))
        self._drawn, self._told = [], time.monotonic()
        while self._pipe.poll():
            what, row = self._pipe.recv()
            assert what == "stop", f"{what} came while rows were being drawn"
            self._stopped.add(row)

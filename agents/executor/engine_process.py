"""A local engine in a process of its own, which a trainer in this process cannot hold up."""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turngym.agents.executor.processes import picklable
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.model import EngineError
from turngym.envs.core.protocols import GenerateRequest, Generation, Watch

# Parameters of a model in a memory-mapped file, so that two processes have the same ones.

ALIGN = 64
"""Bytes at whose multiples a parameter begins."""
MEMORY = Path("/dev/shm")


def share_parameters(model: Any) -> Path:
    """Move the parameters of `model` (on the CPU) into a new file and map it; the caller removes the file.

    In memory where there is room, else in the folder for temporary files.
    """
    size = max((end for _, _, end in _layout(model)), default=0)
    path = _new_file(size)
    _map(model, path, size, keep=True)
    return path


def skeleton(model: Any) -> bytes:
    """`model` without its parameters; buffers come along."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    buffer = io.BytesIO()
    # deepcopy takes what is in the memo for the parameters, so that they are not copied
    torch.save(copy.deepcopy(model, memo), buffer)
    return buffer.getvalue()


def mapped_model(payload: bytes, path: Path) -> Any:
    """The model of a `skeleton` with the parameters that `share_parameters` put into `path`."""
    model = torch.load(io.BytesIO(payload), map_location=None, weights_only=False)
    _map(model, path, max((end for _, _, end in _layout(model)), default=0), keep=False)
    return model


def _layout(model: Any) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Every parameter once, with its first byte and the one behind its last."""
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel() * parameter.element_size()
        yield parameter, start, end
        start = -(-end // ALIGN) * ALIGN


def _map(model: Any, path: Path, size: int, *, keep: bool) -> None:
    """Replace the parameters by ones that lie in `path`; `keep` their values, else take those of the file."""
    memory: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=max(size, 1))
    made: dict[int, nn.Parameter] = {}
    for parameter, start, _ in _layout(model):
        view = _view(memory, parameter, start)
        if keep:
            view.copy_(parameter.detach())
        made[id(parameter)] = nn.Parameter(view, requires_grad=False)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                # by identity: a head that is tied to the embedding stays so
                module._parameters[name] = made[id(old)]


def _view(memory: Any, like: Tensor, start: int) -> Tensor:
    empty: Any = torch.empty(0, dtype=like.dtype)
    return empty.set_(memory, start // like.element_size(), like.shape)


def _new_file(size: int) -> Path:
    # half of what is free: a full memory disk kills whoever writes to it
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size
    number, name = tempfile.mkstemp(prefix="turngym-weights-", dir=MEMORY if roomy else None)
    os.truncate(number, size)
    os.close(number)
    return Path(name)


# What runs in the process of an `EngineProcess`: one local engine, told what to do through a pipe.

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

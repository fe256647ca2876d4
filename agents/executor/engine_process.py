"""A local engine in a process of its own, so that a trainer in this process does not hold it up.

The model's parameters lie in a memory-mapped file that both processes map: the trainer writes new values in place and
calls `weights_changed`; nothing is copied. Requests, drawn ids and results go through a pipe.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import torch
from torch import Tensor, nn

from turngym.agents.executor.errors import picklable
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.model import EngineError
from turngym.core.child_process import ENDING_SECONDS, ChildProcess
from turngym.core.errors import not_written
from turngym.core.protocols import GenerateRequest, Generation, Watch

ALIGN = 64
"""Parameters begin at multiples of this many bytes."""
MEMORY = Path("/dev/shm")
CHUNK = 2**20
"""Bytes of zeros that are written at once."""
FLUSH = 0.005
"""Seconds for which drawn ids are collected before they are sent."""


def share_parameters(model: Any) -> Path:
    """Move the parameters of `model` (on the CPU) into a new file and map it; the caller removes the file.

    The file lies in shared memory if there is room, else in the folder for temporary files.
    """
    size = max((end for _, _, end in _layout(model)), default=0)
    path = _new_file(size)
    _map(model, path, size, keep=True)
    return path


def skeleton(model: Any) -> bytes:
    """`model` pickled without its parameters, but with its buffers."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    buffer = io.BytesIO()
    # deepcopy uses what is in the memo in place of the parameters, so they are not copied
    torch.save(copy.deepcopy(model, memo), buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


def mapped_model(payload: bytes, path: Path) -> Any:
    """The model of a `skeleton` with the parameters that `share_parameters` put into `path`."""
    model = torch.load(io.BytesIO(payload), map_location=None, weights_only=False)
    _map(model, path, max((end for _, _, end in _layout(model)), default=0), keep=False)
    return model


def _layout(model: Any) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Every parameter once, with its first byte and the byte after its last."""
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel() * parameter.element_size()
        yield parameter, start, end
        start = -(-end // ALIGN) * ALIGN


def _map(model: Any, path: Path, size: int, *, keep: bool) -> None:
    """Replace the parameters by ones that lie in `path`; `keep` their values, else use those of the file."""
    memory: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=max(size, 1))
    mapped: dict[int, nn.Parameter] = {}
    for parameter, start, _ in _layout(model):
        empty: Any = torch.empty(0, dtype=parameter.dtype)
        view: Tensor = empty.set_(memory, start // parameter.element_size(), parameter.shape)
        if keep:
            view.copy_(parameter.detach())
        mapped[id(parameter)] = nn.Parameter(view, requires_grad=False)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                # looked up by identity, so that a head tied to the embedding stays tied
                module._parameters[name] = mapped[id(old)]


def _new_file(size: int) -> Path:
    # at most half of what is free is taken, since a full memory disk kills every process that writes to it
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size
    content = f"the weights, {size / 1e6:.1f} MB,"
    try:
        number, name = tempfile.mkstemp(prefix="turngym-weights-", dir=MEMORY if roomy else None)
    except OSError as error:
        raise EngineError(not_written(content, MEMORY if roomy else Path(tempfile.gettempdir()), error)) from error
    try:
        # a file with holes would be made, and the process killed (SIGBUS) where a page of it finds no room
        _reserve(number, max(size, 1))
    except OSError as error:
        Path(name).unlink()
        hint = "" if roomy else f" ({MEMORY} would need twice as much)"
        raise EngineError(not_written(content, Path(name).parent, error) + hint) from error
    finally:
        os.close(number)
    return Path(name)


def _reserve(number: int, size: int) -> None:
    """Gives an open file `size` bytes that have their place on the disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
        return
    # macOS has no such call: zeros are written
    for start in range(0, size, CHUNK):
        left = memoryview(bytes(min(CHUNK, size - start)))
        while left:
            left = left[os.write(number, left) :]


def serve_engine(pipe: Any, payload: bytes, path: Path, settings: dict[str, Any]) -> None:
    """Main loop of the child process: one local engine that answers until the other end of `pipe` is closed.

    The file at `path`, which `share_parameters` wrote, is removed at the end.
    """
    try:
        engine = LocalEngine(mapped_model(payload, path), **settings)
    except Exception as error:
        pipe.send(("failed", picklable(error)))
        return
    with torch.inference_mode(False), contextlib.suppress(EOFError, OSError):
        pipe.send(("ready", engine.max_length))
        while True:
            message, value = pipe.recv()  # ends: with the parent, whose end of the pipe closes
            if message == "stream":
                sender = _TokenSender(pipe)
                try:
                    results = engine.stream(value, [sender.watch(row) for row in range(len(value))])
                    sender.flush()
                    pipe.send(("done", results))
                except (EOFError, OSError):
                    raise
                except Exception as error:
                    pipe.send(("failed", picklable(error)))
            elif message == "release":
                engine.release(value)
            elif message == "version":
                engine.weights_changed(value)
            # a `stop` that arrives after its row has ended is ignored
    # a parent that was killed cannot remove the file, which would take memory for good
    path.unlink(missing_ok=True)


class _TokenSender:
    """Sends drawn ids a few at a time, and reads which rows should stop."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._drawn: list[tuple[int, int, float]] = []
        self._stopped: set[int] = set()
        self._sent_at = time.monotonic()

    def watch(self, row: int) -> Watch:
        def drawn(token: int, logprob: float) -> bool:
            self._drawn.append((row, token, logprob))
            if time.monotonic() - self._sent_at > FLUSH:
                self.flush()
            return row not in self._stopped

        return drawn

    def flush(self) -> None:
        if self._drawn:
            self._pipe.send(("drawn", self._drawn))
        self._drawn, self._sent_at = [], time.monotonic()
        while self._pipe.poll():
            message, row = self._pipe.recv()  # ends: something is there
            assert message == "stop", f"{message} came while rows were being drawn"
            self._stopped.add(row)


class EngineProcess:
    """A `StreamingPolicy` that runs a `LocalEngine` over `model` in a child process.

    The parameters of `model` move into memory that both processes map: write to them while nothing is generated, then
    call `weights_changed`. If the process dies, the requests it was serving fail, and the next request starts it again.
    One call of `stream` at a time.

    Raises EngineError for a model on an accelerator, or one that cannot be pickled.
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
        self._child: ChildProcess | None = None
        self._end: Any = weakref.finalize(self, self._path.unlink, missing_ok=True)
        try:
            self._payload = skeleton(model)
        except Exception as error:
            self._end()
            raise EngineError(f"the model ({type(model).__name__}) cannot be sent to a process: {error}") from error
        self.starts = 0
        """Number of processes started so far."""
        self.max_length = 0
        """Most ids of prompt and response together."""
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return None if self._child is None else self._child.pid

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order."""
        return self.stream(requests, [None] * len(requests))

    def stream(self, requests: Sequence[GenerateRequest], watches: Sequence[Watch | None]) -> list[Generation]:
        """`generate` that calls each watch with its ids soon after they are drawn. Raises what the engine raises."""
        if self._child is None:
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
                results: list[Generation] = value
                return results

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        self._notify("release", session)

    def weights_changed(self, version: int) -> None:
        """The mapped parameters have new values; later generations carry `version`."""
        self.policy_version = version
        self._notify("version", version)

    def close(self) -> None:
        """End the process and free the memory; idempotent."""
        self._end()
        self._child = None

    def _notify(self, message: str, value: Any) -> None:
        """Send a message that a process which is started later does not need."""
        if self._child is not None:
            with contextlib.suppress(EngineError):
                self._send(message, value)

    def _start(self) -> None:
        settings = {**self._settings, "policy_version": self.policy_version}
        self._child = ChildProcess(
            serve_engine,
            self._payload,
            self._path,
            settings,
            name="turngym-engine",
            threads=self._threads,
            ignored=(signal.SIGINT, signal.SIGTERM),
        )
        self._end.detach()
        self._end = weakref.finalize(self, _stop, self._child, self._path)
        self.starts += 1
        kind, value = self._receive()
        if kind == "failed":
            raise value
        self.max_length = value

    def _send(self, message: str, value: Any) -> None:
        assert self._child is not None
        try:
            with self._lock:
                self._child.pipe.send((message, value))
        except OSError:
            self._died()

    def _receive(self) -> tuple[str, Any]:
        assert self._child is not None
        try:
            kind, value = self._child.receive()
        except (EOFError, OSError):
            self._died()
        return kind, value

    def _died(self) -> NoReturn:
        assert self._child is not None
        child, self._child = self._child, None
        raise EngineError(f"the engine's {child.death()}; ask again") from None


def _stop(child: ChildProcess, path: Path) -> None:
    child.end(ENDING_SECONDS)
    path.unlink(missing_ok=True)

"""A Python process at the other end of a pipe: the only way in which this package starts one for its own objects.

The child is sent the objects that it needs and imports the modules that these name, and nothing else. Processes of
`multiprocessing` import the program that started them, so that a script without `if __name__ == "__main__":` runs once
more in each of them; here the program may be a file, a notebook, `python -c`, standard input or an archive. What it
defines itself (a reward, an environment, an agent) travels by value.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from turngym.core.cpu_cores import environment_with_threads, use_threads
from turngym.core.redaction import redacted, redacted_traceback, redacted_tracebacks, remember_key, remembered_keys

ENDING_SECONDS = 3.0
"""Seconds that a child gets to end by itself."""
PIPE_WAIT = 120.0
"""Seconds for which a pipe may take nothing of what is sent, or give nothing of an answer that has begun."""
LOOK, STANDS = 1.0, 30.0
"""Seconds between two looks at a child that owes an answer, and seconds for which it may be stopped (SIGSTOP)."""


class ChildProcess:
    """A process that runs `target(theirs, *args)`, with its end of `pipe` as `theirs`, until that pipe is closed.

    It ends with this process, however this one ends, and never hears the signals `ignored`: Ctrl-C reaches the whole
    process group, and this process first finishes what it has accepted.

    Args:
        target: a function that can be pickled; gets the child's end of the pipe, then `args`.
        threads: how many threads torch, faiss, tokenizers and the others compute with in the child.
        ignored: numbers of signals that the child never hears.
        patience: seconds without a byte after which a send, or the rest of an answer, is given up with an OSError.

    Raises what pickling raises for arguments that cannot be sent, before anything is started.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *args: Any,
        name: str,
        threads: int,
        ignored: Sequence[int] = (signal.SIGINT,),
        patience: float = PIPE_WAIT,
    ) -> None:
        work = dumps((target, args))
        self.name = name
        self.pipe, theirs = Pipe()
        _give_up_after(self.pipe, patience)
        # how the child finds modules, then what runs there
        first = pickle.dumps(_preparation(name)) + pickle.dumps(
            _Begin(name, theirs.fileno(), threads, tuple(ignored), remembered_keys())
        )
        begin, ours = os.pipe()
        # as much as the system takes, which is all: a child whose parent is interrupted here must not miss it
        os.set_blocking(ours, False)
        first = first[os.write(ours, first) :]
        os.set_blocking(ours, True)
        # multiprocessing's own command line, which an application that was frozen into one program understands, too
        command = spawn.get_command_line(pipe_handle=begin)
        if not getattr(sys, "frozen", False):
            # `-c` would look for modules in the working folder before the standard library
            command.insert(1, "-P")
        # blocked from its first moment on, while it imports what it needs
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(begin, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                env=environment_with_threads(threads),
            )
        except BaseException:
            os.close(ours)
            self.pipe.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(begin)
        # as long as this process holds the child's end too, the pipe would not end when the child dies
        theirs.close()
        # a child that is dead already, or has got a part only, is noticed by whoever waits for its answer
        try:
            with open(ours, "wb") as file:
                file.write(first)
            self.pipe.send_bytes(work)
        except BlockingIOError:
            self._process.kill()
        except OSError:
            pass
        self._at_exit = weakref.finalize(self, _kill, self._process, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self) -> Any:
        """The child's next object, however long it computes.

        Raises EOFError or OSError for a child that has died, or has been stopped for `STANDS` seconds; `death` says it.
        """
        stopped = 0.0
        while not self.pipe.poll(LOOK):
            stopped = stopped + LOOK if is_stopped(self.pid) else 0.0
            if stopped >= STANDS:
                raise TimeoutError(f"{self.name} has been stopped for {STANDS:g} s")
        return self.pipe.recv()  # ends: it has begun, and `patience` limits the rest

    def end(self, grace: float = 0.0) -> None:
        """Close the pipe, which tells the child to end; kill it if it has not after `grace` seconds."""
        self.pipe.close()
        self.exit_status(grace)
        self._at_exit()

    def exit_status(self, patience: float) -> int | None:
        """The exit status, the negative number of a signal that ended it, or None for a child that still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        return self._process.poll()

    def death(self) -> str:
        """End a child whose pipe has broken, or that stands still; returns what ended it."""
        # the pipe breaks a moment before the exit status is known
        code = self.exit_status(ENDING_SECONDS)
        self.end()
        if code is None:
            return f"process {self.pid} stood still and was ended"
        if code >= 0:
            return f"process {self.pid} ended with status {code}"
        name = next((known_signal.name for known_signal in signal.Signals if known_signal == -code), f"signal {-code}")
        return f"process {self.pid} was ended by {name}"


def is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped process `pid`; False where the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _give_up_after(pipe: Connection, seconds: float) -> None:
    """A process that was stopped takes nothing, and sends the half of an answer: no call on `pipe` waits for longer."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


def dumps(content: Any) -> bytes:
    """Pickles `content` for another process. Functions and classes that the program itself defines are pickled by
    value."""
    pickled: bytes = cloudpickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return pickled


def _preparation(name: str) -> dict[str, Any]:
    """What multiprocessing tells a process at its start (paths of modules, working folder), without the program."""
    data: dict[str, Any] = spawn.get_preparation_data(name)
    for key in ("init_main_from_name", "init_main_from_path"):
        data.pop(key, None)
    # its own class refuses to be pickled outside of multiprocessing
    data["authkey"] = bytes(data["authkey"])
    # the folder of the program may be there as it was typed
    start = data["orig_dir"] or os.sep
    data["sys_path"] = [os.path.join(start, path) for path in data["sys_path"] if isinstance(path, str)]
    return data


@dataclass(frozen=True, slots=True)
class _Begin:
    """What multiprocessing's main function runs in the child."""

    name: str
    fileno: int
    threads: int
    ignored: tuple[int, ...]
    keys: frozenset[str]
    """What neither process may say, by its value."""

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.close(parent_sentinel)
        # SIGTERM ends it, whatever the parent does with that signal, unless it is among the ignored
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.ignored)
        for key in self.keys:
            remember_key(key)
        with redacted_tracebacks():
            try:
                return self._work()
            except Exception as error:
                sys.stderr.write(f"{self.name}:\n{redacted_traceback(error)}")
                return 1

    def _work(self) -> int:
        pipe = Connection(self.fileno)
        try:
            work = pipe.recv_bytes()  # ends: with the parent, whose end of the pipe closes
        except (EOFError, OSError):
            return 0
        try:
            target, args = pickle.loads(work)
        except Exception as error:
            reason = redacted(f"{type(error).__name__}: {error}")
            print(f"{self.name} cannot read what it was sent: {reason}", file=sys.stderr)
            return 1
        # it may have imported torch
        use_threads(self.threads)
        target(pipe, *args)
        return 0


def _kill(process: subprocess.Popen[bytes], parent: int) -> None:
    """A process that was forked from the parent must leave its children alone."""
    if os.getpid() == parent and process.poll() is None:
        process.kill()
        # one that the system holds (a disk that hangs) ends when it lets go
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)

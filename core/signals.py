"""Which signals end a program, and who hears them: one rule for commands, training runs and servers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What asks a program to end: another program, Ctrl-C, a terminal that closes."""


def on_signals(end: Callable[[int], object]) -> dict[int, Any]:
    """Calls `end` with the number of each signal of `ENDING`. Returns number -> what was done before.

    SIGINT that a shell ignores for `command &`, and SIGHUP that nohup ignores, stay ignored; SIGTERM is meant for a
    process, whatever it inherited. Python hears signals in the main thread alone: elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in ENDING if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, lambda number, frame: end(number)) for number in heard}


@contextmanager
def ending_at_once(said: str) -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP end the process with one line.

    An exception would go through what is imported, and torch's C++ ends the process with a message of its own.
    """

    def end(number: int) -> None:
        try:
            os.write(2, said.encode())
        finally:
            os._exit(128 + number)

    before = on_signals(end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

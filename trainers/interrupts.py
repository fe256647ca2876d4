"""Ctrl-C that never leaves an update or a file half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Interrupts:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt: at once, or at the end of a `protected` block."""

    def __init__(self) -> None:
        self._protected = 0
        self._pending = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the owner of the thread decides
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a job in the background keeps ignoring it
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._protected:
            raise KeyboardInterrupt
        self._pending = True

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Finish what is inside first."""
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1
        if self._pending and not self._protected:
            self._pending = False
            raise KeyboardInterrupt

"""Ctrl-C that never leaves an update or a file half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from turngym.trainers.distributed.world import SINGLE, World


class Interrupts:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt: at once, or at the end of a `protected` block.

    In a run of several processes always at the end of a block, in all of them at the same one: else one would save what
    the others are still computing.
    """

    def __init__(self, world: World = SINGLE) -> None:
        self._world = world
        self._protected = 0
        self._pending = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the owner of the thread decides
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # a job in the background keeps ignoring Ctrl-C; SIGTERM is meant for it, whatever it inherited
                if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._protected and self._world.size == 1:
            raise KeyboardInterrupt
        self._pending = True

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Finish what is inside first."""
        # a counter, for blocks may be nested: only the end of the outermost one raises
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1
        if not self._protected and any(self._world.all_gather(self._pending)):
            self._pending = False
            raise KeyboardInterrupt

"""Runs cells, a few at a time: what is done is skipped, what was killed goes on, what others work on is left alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.learn.jobs import borrow_start, check_command, launch, log_of, stop
from turngym.scripts.study.cells import Cell
from turngym.scripts.study.locks import STALE, FolderLock


@dataclass(slots=True, kw_only=True)
class Running:
    """A cell that this process works on."""

    cell: Cell
    lock: FolderLock
    process: subprocess.Popen[bytes]
    beaten: float


@dataclass(slots=True, kw_only=True)
class CellRunner:
    """Works on `cells` together with whoever else shares their folder; ends when no cell is left for it to begin."""

    cells: Sequence[Cell]
    finish: Callable[[Cell], None]
    """Writes the record of a cell whose training is over."""
    parallel: int = 2
    poll: float = 0.5
    """Seconds between looks at the processes."""
    patience: float = 5.0
    """Seconds that an interrupted run is given to end by itself before it is told to."""
    _running: list[Running] = field(default_factory=list, init=False)
    _failed: list[Cell] = field(default_factory=list, init=False)

    def run(self) -> None:
        """Until every cell is done, failed, or another process's. Raises TurngymError if one of ours failed."""
        from turngym.trainers.train_loop import Interrupts

        for cell in self.cells:
            check_command(cell.job)
        with Interrupts():
            try:
                while self._begin() or self._running:
                    time.sleep(self.poll)
                    self._watch()
            except BaseException:
                for running in self._running:
                    stop(running.process, self.patience)
                    running.lock.release()
                raise
        if self._failed:
            names = ", ".join(cell.name for cell in self._failed)
            logs = ", ".join(str(log_of(cell.job)) for cell in self._failed)
            raise TurngymError(f"failed: {names}; the reason is at the end of {logs}")

    def _begin(self) -> bool:
        """Take on cells until our hands are full; whether one was begun."""
        begun = False
        for cell in self.cells:
            if len(self._running) >= self.parallel:
                break
            if cell.done or cell in self._failed or any(running.cell is cell for running in self._running):
                continue
            lock = cell.lock
            if not lock.acquire():
                continue
            # another process may have finished it between the look and the lock
            if cell.done:
                lock.release()
                continue
            self._launch(cell, lock)
            begun = True
        return begun

    def _launch(self, cell: Cell, lock: FolderLock) -> None:
        borrow_start(cell.job, [other.job for other in self.cells])
        self._say(f"{'goes on' if cell.job.begun else 'begins'}: {cell.name}")
        process = launch(cell.job)
        lock.name_child(process.pid)
        self._running.append(Running(cell=cell, lock=lock, process=process, beaten=time.monotonic()))

    def _watch(self) -> None:
        """See which runs ended, and keep the locks of the others alive."""
        for running in list(self._running):
            if running.process.poll() is not None:
                self._running.remove(running)
                self._end(running)
            elif time.monotonic() - running.beaten > STALE / 10:
                running.beaten = time.monotonic()
                if not running.lock.beat():
                    # this machine slept too long: somebody else has the cell now
                    self._running.remove(running)
                    stop(running.process, 0.0)
                    self._say(f"lost to another process: {running.cell.name}")

    def _end(self, running: Running) -> None:
        cell = running.cell
        try:
            if not cell.job.finished:
                self._failed.append(cell)
                self._say(f"failed: {cell.name}")
            elif running.lock.held:
                self.finish(cell)
                self._say(f"done: {cell.name} ({sum(other.done for other in self.cells)} of {len(self.cells)})")
        finally:
            running.lock.release()

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

"""Waitress in front of an application, and an end that loses nothing: what was accepted is answered first."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from turngym.scripts.serve.web.front import Front
from turngym.scripts.serve.web.waitress_server import listen

CROWD, GATHER = 8, 0.001
"""Connections from which events are gathered, and for how many seconds."""
_STEP = 0.02


class DrainingServer:
    """Listens from construction on (port 0: a free one); `run` answers until `stop`."""

    def __init__(
        self,
        front: Front,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        drain: float = 10.0,
        hosts: tuple[str, ...] = (),
    ) -> None:
        """`drain`: seconds that accepted requests get to finish after `stop`. `hosts`: names beside the loopback's own.

        Raises:
            TurngymError: waitress is not installed, or the address cannot be listened on.
        """
        self._front, self._drain = front, drain
        self._server = listen(front, host, port, hosts)
        self.host, self.port = host, int(self._server.effective_port)
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self.drained = False
        """After `run`: whether every accepted request was answered."""

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self._front.path}"

    def run(self) -> None:
        """Answer requests until `stop`. What is behind the application stays open: its owner closes it."""
        over = threading.Event()
        sweeping = threading.Thread(target=self._sweep, args=(over,), name="server-sweep", daemon=True)
        threading.Thread(target=self._end, name="server-end", daemon=True).start()
        sweeping.start()
        try:
            self._loop()
        finally:
            # a loop that ended by itself or by an error must also release the thread that waits for the wish
            self.stop()
            over.set()
            sweeping.join()
            self._server.task_dispatcher.shutdown(timeout=5)

    def stop(self) -> None:
        """Stop listening, answer what was accepted, return from `run`; a second call does not wait any longer.

        Safe in a signal handler: putting into a SimpleQueue takes no lock that the interrupted code may hold.
        """
        self._wishes.put("stop")

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT stop this server; a second one at once. Call in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())

    def _loop(self) -> None:
        """The loop of waitress, which looks at every connection each time it wakes.

        With many connections that takes more time than the answers do, so then it wakes for several events at once.
        """
        server = self._server
        while server._map:
            server.asyncore.loop(timeout=1, use_poll=True, map=server._map, count=1)
            server.tend()
            if len(server.active_channels) > CROWD:
                time.sleep(GATHER)

    def _sweep(self, over: threading.Event) -> None:
        while self._front.sweep is not None and not over.wait(self._front.sweep_every):
            self._front.sweep()

    def _end(self) -> None:
        """Waits for the wish to stop, then lets the loop of waitress close what is idle until nothing is left."""
        self._wishes.get()
        self._front.leave()
        self._in_loop(self._server.leave)
        until = time.monotonic() + self._drain
        while time.monotonic() < until and self._server.active_channels:
            self._in_loop(self._server.close_idle)
            try:
                self._wishes.get(timeout=_STEP)
                break
            except Empty:
                continue
        self.drained = not self._server.active_channels
        self._in_loop(self._close_everything)

    def _in_loop(self, step: Any) -> None:
        # when the loop is over, its pipe is closed
        with contextlib.suppress(OSError):
            self._server.trigger.pull_trigger(step)

    def _close_everything(self) -> None:
        from waitress import wasyncore

        wasyncore.close_all(self._server._map)

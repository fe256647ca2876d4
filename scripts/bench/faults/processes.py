"""Commands in processes of their own, forked from one that has imported what they need: they start in no time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

IMPORTED = (
    *(f"turngym.scripts.{verb}" for verb in ("main", "rollout", "eval", "index", "train", "model")),
    *("turngym.envs", "turngym.agents.model_agent", "torch", "safetensors.torch", "torch.optim"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto"),
)
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    returncode: int
    stderr: str


class Started:
    """`turngym` with `words`, in a process."""

    def __init__(self, words: Sequence[str]) -> None:
        _CONTEXT.set_forkserver_preload(list(IMPORTED))
        handle, name = tempfile.mkstemp(prefix="turngym-fault-")
        os.close(handle)
        self._log = Path(name)
        self._process = _CONTEXT.Process(target=_work, args=(list(words), name))
        self._process.start()

    def over(self) -> bool:
        return self._process.exitcode is not None

    def stop(self) -> bool:
        """From now on it does nothing more, and holds what it holds; False where it is over already."""
        if self._process.pid is None or self.over():
            return False
        os.kill(self._process.pid, signal.SIGSTOP)
        # the signal arrives a moment later
        wait(lambda: _state(self._process.pid) in "TZ", self, 10)
        return not self.over() and _state(self._process.pid) != "Z"

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self, seconds: float | None = None) -> Done:
        """Wait until it ends; kill it after `seconds`."""
        self._process.join(seconds)
        if not self.over():
            self._process.kill()
            self._process.join()
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._log.unlink(missing_ok=True)
        return Done(int(self._process.exitcode or 0), said)


def wait(ready: Callable[[], bool], process: Started, seconds: float = 120.0) -> None:
    """Until `ready`, or until the process is over."""
    end = time.monotonic() + seconds
    while not ready() and not process.over() and time.monotonic() < end:
        time.sleep(0.005)


def _state(pid: int | None) -> str:
    """Of a process, as Linux names it: T for stopped, Z for ended; T where nobody can say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "T" if not Path("/proc/self").exists() else "Z"


def _work(words: list[str], log: str) -> None:
    """What a new interpreter would do with `words`; what it writes to standard error goes to `log`."""
    sys.stdout.flush()
    for number, place in ((1, os.devnull), (2, log)):
        opened = os.open(place, os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["turngym", *words]
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    from turngym.scripts.main import main

    sys.exit(main(words))

"""The methods in training: each in a process of its own, stopped when this one is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from turngym.agents.executor.cores import SHARE, available_cores
from turngym.envs.core import TurngymError
from turngym.scripts.options.world import distill_words
from turngym.scripts.quickstart.plan import Plan


@dataclass(slots=True, kw_only=True)
class Methods:
    """The training processes."""

    plan: Plan
    processes: dict[str, subprocess.Popen[bytes]]
    _ended: set[str] = field(default_factory=set)

    @property
    def running(self) -> int:
        """How many have not ended."""
        return sum(process.poll() is None for process in self.processes.values())

    def ended(self) -> list[str]:
        """Those that have ended well since this was last asked. Raises TurngymError once all have ended, some badly."""
        failed = [method for method, process in self.processes.items() if process.poll()]
        if failed and not self.running:
            logs = ", ".join(str(self.plan.out / f"{method}.log") for method in failed)
            raise TurngymError(f"training failed: {', '.join(failed)}; the reason is at the end of {logs}")
        found = [name for name, process in self.processes.items() if process.poll() == 0 and name not in self._ended]
        self._ended.update(found)
        return found


@contextmanager
def training(plan: Plan) -> Iterator[Methods]:
    """Every method trains, one thread each, until the context ends; then those that have not ended are stopped."""
    methods = Methods(plan=plan, processes={method: _start(plan, method) for method in plan.methods})
    try:
        yield methods
    finally:
        for process in methods.processes.values():
            _stop(process)


def _start(plan: Plan, method: str) -> subprocess.Popen[bytes]:
    folder = plan.out / method
    words = [sys.executable, "-m", "turngym.scripts", "train", "--algorithm", method, "--out", str(folder)]
    words += ["--student", str(plan.student), "--teacher", str(plan.teacher), "--split", plan.split]
    words += ["--panel", plan.panel, "--seed", str(plan.seed), "--steps", str(plan.steps)]
    words += distill_words(plan.world, plan.split)
    if (folder / "checkpoints").exists():
        words.append("--resume")
    # each counts on its part of the cores: with more than one, `--workers auto` plays in several processes
    share = str(max(1, available_cores() // len(plan.methods)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SHARE: share}
    with (plan.out / f"{method}.log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let a run save and end. On a terminal it was interrupted as well; elsewhere it must be told."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()

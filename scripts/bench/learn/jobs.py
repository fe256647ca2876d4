"""The runs of `turngym bench learn`: each a `turngym train` in a process of its own, a few at a time, resumable."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turngym.agents.executor.options import SHARE
from turngym.envs.core.errors import TurngymError

METRICS = "metrics.jsonl"
START = Path("eval", "step_000000.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    name: str
    folder: Path
    words: tuple[str, ...]
    """Of `turngym train`, without --out and --resume."""
    steps: int
    needs: Job | None = None
    """Must be finished before this one can start."""
    evaluates: bool = False
    """Ends with an evaluation."""
    same_start: str | None = None
    """Runs with the same value begin with the same evaluation: it is played once."""

    @property
    def command(self) -> str:
        return shlex.join(["turngym", "train", *self.words, "--out", str(self.folder)])

    @property
    def model(self) -> Path:
        """Of the finished run."""
        return self.folder / "checkpoints" / f"step_{self.steps:06d}" / "model"

    @property
    def finished(self) -> bool:
        """A run that is interrupted in its last evaluation has its last checkpoint, but not that evaluation."""
        return self.model.exists() and (not self.evaluates or self.steps in evaluated(self.folder))

    @property
    def begun(self) -> bool:
        return any(self.folder.glob("checkpoints/step_*"))


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs jobs, `parallel` at a time and one thread each; what is finished is skipped, what was killed goes on."""

    jobs: Sequence[Job]
    parallel: int = 2
    poll: float = 0.5
    """Seconds between looks at the processes."""
    patience: float = 5.0
    """Seconds that an interrupted run is given to end by itself before it is told to."""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Until all are finished; SIGINT and SIGTERM end the runs with this process.

        Raises TurngymError if one fails (the others are let finish first).
        """
        from turngym.trainers.train_loop import Interrupts

        for job in self.jobs:
            check_command(job)
        waiting = [job for job in self.jobs if not job.finished]
        failed: list[Job] = []
        with LearnProgress(self.jobs) as progress, Interrupts():
            try:
                while waiting or self._running:
                    waiting = self._start(waiting, failed)
                    time.sleep(self.poll)
                    failed += self._ended()
                    progress.update(set(self._running))
            except BaseException:
                for process in self._running.values():
                    stop(process, self.patience)
                raise
        if failed:
            logs = ", ".join(str(log_of(job)) for job in failed)
            names = ", ".join(job.name for job in failed)
            raise TurngymError(f"failed: {names}; the reason is at the end of {logs}")

    def _start(self, waiting: Sequence[Job], failed: Sequence[Job]) -> list[Job]:
        """Start what can start; returns what still waits. What needs a failed job is dropped with it."""
        rest = []
        for job in waiting:
            if job.needs is not None and job.needs in failed:
                continue
            if len(self._running) < self.parallel and (job.needs is None or job.needs.finished):
                borrow_start(job, self.jobs)
                self._running[job.name] = launch(job)
            else:
                rest.append(job)
        return rest

    def _ended(self) -> list[Job]:
        """Jobs whose process has ended without finishing them."""
        ended = {name for name, process in self._running.items() if process.poll() is not None}
        self._running = {name: process for name, process in self._running.items() if name not in ended}
        return [job for job in self.jobs if job.name in ended and not job.finished]


def log_of(job: Job) -> Path:
    return job.folder.with_name(f"{job.folder.name}.log")


def check_command(job: Job) -> None:
    """Raise TurngymError if the run in the job's folder was started with other options."""
    path = job.folder / "command.txt"
    if path.exists() and path.read_text(encoding="utf-8").strip() != job.command:
        raise TurngymError(
            f"{job.folder} holds a run with other options (command.txt); remove it, or choose another --out"
        )


def launch(job: Job) -> subprocess.Popen[bytes]:
    """Start or resume a run; it writes to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "command.txt").write_text(job.command + "\n", encoding="utf-8")
    words = [sys.executable, "-m", "turngym.scripts", *shlex.split(job.command)[1:]]
    words += ["--resume"] if job.begun else []
    # jobs run side by side
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SHARE: "1"}
    with log_of(job).open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def stop(process: subprocess.Popen[bytes], patience: float) -> None:
    """Let a run save and end. On a terminal Ctrl-C reached it as well; elsewhere it must be told."""
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def borrow_start(job: Job, jobs: Sequence[Job]) -> None:
    """Give a new run the evaluation before step 1 of another run with the same weights, tasks and seed.

    An evaluation that finds its trace plays only what is missing there; the same seed gives the same episodes anyway.
    """
    if job.same_start is None or job.begun or (job.folder / START).exists():
        return
    for other in jobs:
        if other.same_start == job.same_start and other is not job and 0 in evaluated(other.folder):
            (job.folder / START).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(other.folder / START, job.folder / START)
            return


def evaluated(folder: Path) -> set[int]:
    """Steps whose evaluation is complete."""
    return {int(str(row["step"])) for row in metric_rows(folder) if row["kind"] == "eval"}


def metric_rows(folder: Path) -> list[dict[str, object]]:
    """The metrics of a run, without a line that is being written."""
    from turngym.trainers.metrics import read_metrics

    return [dict(row) for row in read_metrics(folder)] if (folder / METRICS).exists() else []


class LearnProgress:
    """A bar over all steps of all runs, and one line per run that is at work."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.jobs = jobs
        columns = (TextColumn("{task.description:>32}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self.bars = Progress(
            *columns,
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self.total = self.bars.add_task("all steps", total=sum(job.steps for job in jobs), note="")
        self.lines = {job.name: self.bars.add_task(job.name, total=job.steps, note="", visible=False) for job in jobs}
        self.seen: set[str] = set()

    def __enter__(self) -> LearnProgress:
        self.update(set())
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def update(self, running: set[str]) -> None:
        """Read how far the running ones are; finished ones disappear, and off a terminal each is told of once."""
        done = 0
        for job in self.jobs:
            step, note = (job.steps, "") if job.finished else state(job)
            done += step
            self.bars.update(self.lines[job.name], completed=step, note=note, visible=job.name in running)
            if job.finished and job.name not in self.seen:
                self.seen.add(job.name)
                if not self.bars.console.is_terminal:
                    self.bars.console.print(f"finished: {job.name}", highlight=False)
        self.bars.update(self.total, completed=done, note=f"{len(self.seen)} of {len(self.jobs)} runs")


def state(job: Job) -> tuple[int, str]:
    """Steps done, and the newest numbers in words."""
    from turngym.trainers.progress import describe

    latest: dict[str, object] = {"step": 0}
    for row in metric_rows(job.folder):
        latest.update(row)
    return int(str(latest["step"])), describe(latest).partition("  ")[2]

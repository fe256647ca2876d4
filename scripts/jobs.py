"""Runs the commands of a study or of the quickstart: finished runs are skipped, killed ones are resumed.

A `RunJob` is a `turngym train` or `turngym eval` in a folder and a process of its own. `Runner` works through jobs,
some of which need others first. It locks each job that it runs, so that several processes and machines can share one
folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turngym.core.cpu_cores import SHARE, environment_with_threads
from turngym.core.errors import TurngymError
from turngym.core.files import FolderInUseError, locked_file
from turngym.trainers.metrics import read_metrics
from turngym.trainers.progress import describe

# --- Jobs

METRICS = "metrics.jsonl"
START = Path("eval", "step_000000.jsonl")
SAVING = 600.0
"""Seconds in which a run that was told to end saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """One training run, or one evaluation of a model."""

    name: str
    folder: Path
    words: tuple[str, ...]
    """Arguments of the verb, without --out and --resume."""
    steps: int
    """Training steps; episodes of an evaluation."""
    verb: Literal["train", "eval"] = "train"
    needs: tuple[RunJob, ...] = ()
    """All of these must be finished before this one can start."""
    evaluates: bool = False
    """A training run that ends with an evaluation."""
    processes: int = 1
    """Processes that train together, under torchrun, a GPU each."""
    same_start: str | None = None
    """Runs with the same value begin with the same evaluation: it is played once."""

    @property
    def command(self) -> str:
        words = [self.verb, *self.words, "--out", str(self.folder)]
        return shlex.join(["torchrun", *self.together, *words] if self.together else ["turngym", *words])

    @property
    def together(self) -> list[str]:
        """Words of torchrun for one run of several processes; [] for others."""
        several = self.processes > 1 and self.verb == "train"
        return ["--standalone", "--nproc-per-node", str(self.processes), "-m", "turngym"] if several else []

    @property
    def argv(self) -> list[str]:
        """The command as this Python runs it."""
        start = ["torch.distributed.run", *self.together] if self.together else ["turngym.scripts"]
        return [sys.executable, "-m", *start, self.verb, *self.words, "--out", str(self.folder)]

    @property
    def model(self) -> Path:
        """Model of the finished run."""
        return self.folder / "checkpoints" / f"step_{self.steps:06d}" / "model"

    @property
    def ended(self) -> bool:
        """Whether the command has done its work."""
        if self.verb == "eval":
            return (self.folder / "results.json").exists()
        # a run that is interrupted in its last evaluation has its last checkpoint, but not that evaluation
        return self.model.exists() and (not self.evaluates or self.steps in evaluated(self.folder))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.ended

    @property
    def begun(self) -> bool:
        return any(self.folder.glob("checkpoints/step_*"))

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs jobs, `parallel` at a time and one thread each, until none is left for this process to begin."""

    jobs: Sequence[RunJob]
    finish: Callable[[Any], None] = lambda job: None
    """Is called with each job whose command has ended well."""
    parallel: int = 2
    cores: int = 1
    """Cores that `--workers auto` of a job may use."""
    poll: float = 0.5
    """Seconds between looks at the processes."""
    patience: float = 5.0
    """Seconds that an interrupted run is given to end by itself before it is told to."""
    _running: list[tuple[RunJob, subprocess.Popen[bytes], ExitStack]] = field(default_factory=list, init=False)
    """Jobs with their processes and locks."""
    _failed: dict[str, str] = field(default_factory=dict, init=False)
    """Name of a job -> why it failed."""

    def run(self) -> None:
        """Runs until every job is finished, failed, or another process's; SIGINT and SIGTERM end the runs too.

        It also waits for jobs of other processes that jobs still need.

        A failed run does not stop the others. Raises TurngymError at the end if one failed.
        """
        from turngym.trainers.train_loop import Interrupts

        for job in self.jobs:
            check_command(job)
        with Board(self.jobs) as board, Interrupts():
            try:
                while self._begin(board) or self._running or self._needs_others():
                    self._wait()
                    self._watch(board)
                    board.update({job.name for job, *_ in self._running})
            except BaseException:
                try:
                    stop([process for _, process, _ in self._running], self.patience)
                finally:
                    for *_, held in self._running:
                        held.close()
                raise
        if self._failed:
            alike: dict[str, list[str]] = {}
            for name, why in self._failed.items():
                alike.setdefault(why, []).append(name)
            raise TurngymError("; ".join(f"failed: {', '.join(names)}; {why}" for why, names in alike.items()))

    def _wait(self) -> None:
        """Waits for the end of the process that began first, at most `poll` seconds."""
        if not self._running:
            time.sleep(self.poll)
            return
        with suppress(subprocess.TimeoutExpired):
            self._running[0][1].wait(self.poll)

    def _begin(self, board: Board) -> bool:
        """Starts jobs while fewer than `parallel` run. Returns whether one was started."""
        begun = False
        for job in self.jobs:
            if len(self._running) >= self.parallel:
                break
            begun_here = job.name in self._failed or any(running is job for running, *_ in self._running)
            # a job that needs a failed one never starts
            if begun_here or job.finished or not all(need.finished for need in job.needs):
                continue
            with ExitStack() as held:
                try:
                    # beside the folder: a run that begins wants its folder empty
                    held.enter_context(locked_file(job.folder))
                except FolderInUseError:
                    continue
                # another process may have finished it between the look and the lock
                if job.finished:
                    continue
                borrow_start(job, self.jobs)
                board.say(f"{'goes on' if job.begun else 'begins'}: {job.name}")
                self._running.append((job, launch(job, self.cores), held.pop_all()))
                begun = True
        return begun

    def _needs_others(self) -> bool:
        """Whether a job will be ready once other processes are done with theirs. Asked when none can begin here: then
        what is needed, unfinished and not failed is another process's."""
        return any(
            not job.finished
            and any(not need.finished and need in self.jobs for need in job.needs)
            and not any(need.name in self._failed for need in job.needs)
            for job in self.jobs
        )

    def _watch(self, board: Board) -> None:
        """Takes note of the runs that ended."""
        for running in list(self._running):
            job, process, held = running
            if process.poll() is None:
                continue
            self._running.remove(running)
            try:
                with held:
                    if not job.ended:
                        raise TurngymError(why_ended(job.log, process.returncode))
                    self.finish(job)
            except (TurngymError, OSError) as error:
                self._failed[job.name] = str(error)
                board.say(f"failed: {job.name}; {error}; its log: {job.log}", always=True)


def check_command(job: RunJob) -> None:
    """Raises TurngymError if the run in the job's folder was started with other options. The folder may have been moved
    since."""
    path = job.folder / "command.txt"
    if not path.exists():
        return
    was, current = (_without_place(command) for command in (path.read_text(encoding="utf-8").strip(), job.command))
    if job.finished and job.verb in was:
        # how many processes trained it does not matter any more
        was, current = (words[words.index(job.verb) :] for words in (was, current))
    if was != current:
        raise TurngymError(
            f"{job.folder} holds a run with other options (command.txt); remove it, or choose another --out"
        )


def _without_place(command: str) -> list[str]:
    """The words of a command. Paths in the folder of its cells are written relative to it."""
    words = shlex.split(command)
    if "--out" not in words[:-1]:
        return words
    folder = Path(words[words.index("--out") + 1]).absolute()
    root = folder.parents[1] if len(folder.parents) > 1 else folder.parent
    paths = [Path(word).absolute() if "/" in word else None for word in words]
    return [
        path.relative_to(root).as_posix() if path is not None and path.is_relative_to(root) else word
        for word, path in zip(words, paths, strict=True)
    ]


def launch(job: RunJob, cores: int) -> subprocess.Popen[bytes]:
    """Starts or resumes a run, which writes to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "command.txt").write_text(job.command + "\n", encoding="utf-8")
    argv = [*job.argv, *(["--resume"] if job.begun else [])]
    # one thread: jobs run side by side. No module is looked for in the working folder before the installed ones
    environment = {**environment_with_threads(1), SHARE: str(cores), "PYTHONSAFEPATH": "1"}
    with job.log.open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def why_ended(log: Path, status: int) -> str:
    """Why a command failed: the signal that ended it, or the last line that it wrote (under torchrun: that our own
    command did)."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}{' (memory may have run out)' if name == 'SIGKILL' else ''}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    written = [line.strip() for line in lines if line.strip()][-30:]
    ours = [line for line in written if line.startswith("turngym ")]
    return [f"status {status}", *written[-1:], *ours[-1:]][-1]


def stop(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Lets runs save and end. On a terminal Ctrl-C has reached them as well; elsewhere SIGTERM follows.

    Those that were stopped are continued, so that they save, too; what does not end within `SAVING` seconds is killed.
    """
    try:
        _wait(processes, patience)
        for process in processes:
            process.terminate()
            process.send_signal(signal.SIGCONT)
        _wait(processes, SAVING)
    # at a second Ctrl-C, too
    finally:
        for process in processes:
            process.kill()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))


def borrow_start(job: RunJob, jobs: Sequence[RunJob]) -> None:
    """Gives a new run the evaluation before step 1 of another run with the same weights, tasks and seed.

    An evaluation that finds its trace plays only what is missing there; the same seed gives the same episodes anyway.
    """
    if job.same_start is None or job.begun or (job.folder / START).exists():
        return
    for donor in jobs:
        if donor.same_start == job.same_start and donor is not job and 0 in evaluated(donor.folder):
            (job.folder / START).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(donor.folder / START, job.folder / START)
            return


def evaluated(folder: Path) -> set[int]:
    """Steps whose evaluation is complete."""
    rows = read_metrics(folder) if (folder / METRICS).exists() else []
    return {row["step"] for row in rows if row["kind"] == "eval"}


class Board:
    """A progress bar over all steps of all runs, and one for each run that is at work."""

    def __init__(self, jobs: Sequence[RunJob]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.jobs = jobs
        self.bars = Progress(
            TextColumn("{task.description:>32}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self.total = self.bars.add_task("all steps", total=sum(job.steps for job in jobs), note="")
        self.lines = {job.name: self.bars.add_task(job.name, total=job.steps, note="", visible=False) for job in jobs}
        self.seen: set[str] = set()

    def __enter__(self) -> Board:
        self.update(set())
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def say(self, text: str, *, always: bool = False) -> None:
        """Prints a line; on a terminal only if `always`, because the bars show the rest."""
        if always or not self.bars.console.is_terminal:
            self.bars.console.print(text, highlight=False, soft_wrap=True)

    def update(self, running: set[str]) -> None:
        """Reads how far the running jobs are. Finished ones disappear."""
        done = 0
        for job in self.jobs:
            step, note = (job.steps, "") if job.finished else state(job)
            done += step
            self.bars.update(self.lines[job.name], completed=step, note=note, visible=job.name in running)
            if job.finished and job.name not in self.seen:
                self.seen.add(job.name)
                self.say(f"finished: {job.name} ({len(self.seen)} of {len(self.jobs)})")
        self.bars.update(self.total, completed=done, note=f"{len(self.seen)} of {len(self.jobs)} runs")


def state(job: RunJob) -> tuple[int, str]:
    """Steps done, and the newest numbers in words."""
    if job.verb == "eval":
        trace = job.folder / "trace.jsonl"
        return (trace.read_bytes().count(b"\n") if trace.exists() else 0), "evaluation"
    latest: dict[str, Any] = {"step": 0}
    for row in read_metrics(job.folder) if (job.folder / METRICS).exists() else ():
        latest.update(row)
    return latest["step"], describe(latest).partition("  ")[2]


def shown(path: Path) -> str:
    """Writes a path as a reader can type it: relative to the working folder where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)

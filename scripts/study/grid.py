"""Runs the `turngym train` commands of a study: what is finished is skipped, what was killed goes on.

A `Job` is one training run in a folder and a process of its own. `Runner` works through jobs that may need each other
(`study learn`, `study scenarios`). A `Cell` is a job of `study turnopd`, world x method x seed; `CellRunner` shares a
folder of cells with other processes and machines by locks.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turngym.agents.executor.options import SHARE
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.scripts.options import distill_argv
from turngym.scripts.study.settings import GROUPS, Method, StudyOptions, chosen_methods

# Locks on a shared folder: several processes, on one machine or many, share cells, and none works on two hands.

STALE = 300.0
"""Seconds without a heartbeat after which a lock counts as that of a machine that is gone."""


@dataclass(slots=True)
class FolderLock:
    """The file `path` belongs to whoever created it; its owner touches it now and then.

    A lock whose process has died on this machine, or that nobody has touched for `stale` seconds, is taken over. Times
    are those of the file system, so that clocks of machines need not agree.
    """

    path: Path
    stale: float = STALE
    _token: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)

    def acquire(self) -> bool:
        """Whether the lock is now ours."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._create():
            return True
        if not self._abandoned():
            return False
        # renaming succeeds for one process only: two that find the same dead lock do not both take it
        grave = self.path.with_name(f"{self.path.name}.{self._token}")
        try:
            os.rename(self.path, grave)
        except OSError:
            return False
        grave.unlink(missing_ok=True)
        return self._create()

    def name_child(self, pid: int) -> None:
        """The work is done by this process of ours: as long as it lives, the lock is not abandoned on this machine."""
        scratch = self.path.with_name(f"{self.path.name}.{self._token}.new")
        scratch.write_text(self._content(child=pid))
        os.replace(scratch, self.path)

    def beat(self) -> bool:
        """Say that we are alive; False if the lock is no longer ours."""
        if not self.held:
            return False
        os.utime(self.path)
        return True

    def release(self) -> None:
        """Give it back, if it is still ours."""
        if self.held:
            self.path.unlink(missing_ok=True)

    @property
    def held(self) -> bool:
        return (owner := _owner(self.path)) is not None and owner.get("token") == self._token

    def _create(self) -> bool:
        # linked into place when complete, so that nobody reads half a lock; linking fails where there is one
        scratch = self.path.with_name(f"{self.path.name}.{self._token}.new")
        scratch.write_text(self._content())
        try:
            os.link(scratch, self.path)
        except FileExistsError:
            return False
        finally:
            scratch.unlink(missing_ok=True)
        return True

    def _content(self, **more: int) -> str:
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": self._token, **more})

    def _abandoned(self) -> bool:
        owner = _owner(self.path)
        if owner is None:
            return False
        if owner.get("host") == socket.gethostname():
            return not any(_alive(int(owner[name])) for name in ("pid", "child") if name in owner)
        now = self.path.with_name(f"{self.path.name}.{self._token}.now")
        try:
            now.touch()
            return now.stat().st_mtime - self.path.stat().st_mtime > self.stale
        except OSError:
            return False
        finally:
            now.unlink(missing_ok=True)


def _owner(path: Path) -> dict[str, str] | None:
    try:
        owner: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return owner


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- Jobs

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


def shown(path: Path) -> str:
    """Writes a path as a reader can type it: relative to the working folder where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


# --- Cells

RECORD = "cell.json"
"""What a finished cell leaves for the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the study."""

    world: str
    method: Method
    seed: int
    job: Job

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def record(self) -> Path:
        return self.job.folder / RECORD

    @property
    def done(self) -> bool:
        """Written when everything else is: a cell that was killed before goes on."""
        return self.record.exists()

    @property
    def lock(self) -> FolderLock:
        # beside the folder: a run that begins wants its folder empty
        return FolderLock(self.job.folder.with_name(f"{self.job.folder.name}.lock"))


def cells_of(options: StudyOptions) -> list[Cell]:
    """All cells, in the order in which they are run: seed by seed, main methods first, worlds in turn."""
    rows = []
    for name in options.worlds:
        world = load_world(name)
        chosen = chosen_methods(options.methods, options.max_turns or world.max_turns, options.base)
        rows += [(world, method) for method in chosen]
    rows.sort(key=lambda row: GROUPS.index(row[1].group))
    return [_cell(options, world, method, seed) for seed in options.seeds for world, method in rows]


def _cell(options: StudyOptions, world: EmbeddedWorld, method: Method, seed: int) -> Cell:
    student, teacher = options.student or world.checkpoint("student"), options.teacher or world.checkpoint("teacher")
    words = [*method.words, "--student", shown(student), "--teacher", shown(teacher)]
    words += _settings(options, world)
    words += ["--steps", str(options.steps), "--seed", str(seed), "--panel", world.panel]
    words += ["--eval-limit", str(options.tasks), "--no-tensorboard"]
    return Cell(
        world=world.name,
        method=method,
        seed=seed,
        job=Job(
            name=f"{world.name}/{method.name}/seed{seed}",
            folder=options.out / "cells" / world.name / f"{method.name}-seed{seed}",
            words=tuple(words),
            steps=options.steps,
            evaluates=True,
            same_start=f"{world.name}-seed{seed}",
        ),
    )


def _settings(options: StudyOptions, world: EmbeddedWorld) -> list[str]:
    """How the world is distilled in, with what the study wants otherwise in place of what the world says."""
    changed = {
        "--eval-every": str(options.steps // options.evaluations),
        "--eval-samples": str(options.samples),
        **({"--episodes": str(options.episodes)} if options.episodes else {}),
        **({"--max-turns": str(options.max_turns)} if options.max_turns else {}),
        # a warm-up as long as a short run would leave it nothing to learn with
        "--optimizer.lr-warmup": str(min(world.distill.warmup, options.steps // 5)),
    }
    return replaced(distill_argv(world), changed)


def replaced(words: Sequence[str], changed: dict[str, str]) -> list[str]:
    """`words` with other values for some options; those that it lacks are added."""
    found, rest = list(words), dict(changed)
    for place, word in enumerate(words[:-1]):
        if word in rest:
            found[place + 1] = rest.pop(word)
    return found + [word for pair in rest.items() for word in pair]


# --- Cells worked on by several processes


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

"""Distill a tiny student in a generated world, with vanilla OPD and TurnOPD side by side, in under ten minutes.

Both methods start from the same weak student and learn from the same teacher (two checkpoints that come with turngym)
for the same number of steps, each in a process of its own. While they train, this process evaluates the models before
training, and afterwards those that the methods have made. It ends with a table, a figure and a page of episodes.
Stopping it loses nothing: the same command continues where it stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from turngym.agents.evaluation.play_panel import EvalResult
from turngym.agents.executor.options import SHARE, available_cores
from turngym.agents.models import find_model
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import print_table
from turngym.envs.panels import load_panel
from turngym.scripts.options import distill_argv


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart:
    """The whole path on one machine: play, distill turn by turn, evaluate."""

    env: str = "alfworld"
    """Embedded world: alfworld, alfworld-loops, webshop, search or search-loops."""
    out: Path | None = None
    """Folder for everything that is written; by default runs/quickstart, for another world runs/quickstart-NAME."""
    steps: int | None = None
    """Training steps of each method, if not the world's."""
    student: Path | None = None
    """Folder of the model to train, if not the one that comes with turngym."""
    teacher: Path | None = None
    """Folder of the model to learn from, if not the one that comes with turngym."""
    panel: str | None = None
    """Tasks of the evaluations, never trained on, if not the world's."""
    split: str | None = None
    """Split to train on, if not the world's; `train` takes the real games of $ALFWORLD_DATA."""
    samples: int = 4
    """Episodes per task of the evaluations before and after."""
    limit: int | None = None
    """Evaluate on the first so many tasks only."""
    methods: tuple[str, ...] = ("opd", "turnopd")
    """Algorithms to compare."""
    seed: int = 0
    """Fixes tasks and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options with the world's own choices filled in."""

    options: Quickstart
    world: EmbeddedWorld
    out: Path
    steps: int
    student: Path
    teacher: Path
    panel: str
    split: str

    @classmethod
    def of(cls, options: Quickstart) -> Plan:
        world = load_world(options.env)
        suffix = "" if world.name == "alfworld" else f"-{world.name}"
        return cls(
            options=options,
            world=world,
            out=options.out or Path(f"runs/quickstart{suffix}"),
            steps=world.distill.steps if options.steps is None else options.steps,
            student=options.student or world.checkpoint("student"),
            teacher=options.teacher or world.checkpoint("teacher"),
            panel=options.panel or world.panel,
            split=options.split or world.split,
        )

    @property
    def episodes(self) -> int:
        """Number of episodes of one evaluation."""
        return len(load_panel(self.panel).tasks[: self.options.limit]) * self.options.samples

    def check(self) -> None:
        """Raises TurngymError if the panel or a model does not exist, before anything runs."""
        load_panel(self.panel)
        for model in (self.teacher, self.student):
            find_model(model)

    def trained(self, method: str) -> Path:
        """Returns the folder of the newest checkpoint's model. Raises TurngymError if the method saved none."""
        folder = self.out / method
        found = max(folder.glob("checkpoints/step_*/model"), default=None)
        if found is None:
            raise TurngymError(f"no checkpoint in {folder}: remove the folder and run quickstart again")
        return found


def main(argv: Sequence[str]) -> int:
    """Run `turngym quickstart` with `argv` (without the verb itself)."""
    options = tyro.cli(
        Quickstart, args=list(argv), prog="turngym quickstart", description=(__doc__ or "").split("\n")[0]
    )
    plan = Plan.of(options)
    plan.check()
    start = time.monotonic()
    plan.out.mkdir(parents=True, exist_ok=True)
    with training(plan) as methods, open_board() as board:
        for method in plan.options.methods:
            board.add(method, plan.steps, training_look(plan.out / method))
        results = evaluate_all(plan, methods, board)
    for result in results:
        print_table(result.table(), title=result.title)
    write_report(plan)
    print(f"finished in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


# Training: one process per method, stopped when this process is stopped.


@dataclass(slots=True, kw_only=True)
class Methods:
    """The training processes."""

    plan: Plan
    processes: dict[str, subprocess.Popen[bytes]]
    _ended: set[str] = field(default_factory=set)

    @property
    def running(self) -> int:
        """Number of methods that are still training."""
        return sum(process.poll() is None for process in self.processes.values())

    def ended(self) -> list[str]:
        """Returns the methods that finished since the last call.

        Raises TurngymError once all have ended and one of them failed.
        """
        failed = [method for method, process in self.processes.items() if process.poll()]
        if failed and not self.running:
            logs = ", ".join(str(self.plan.out / f"{method}.log") for method in failed)
            raise TurngymError(f"training failed: {', '.join(failed)}; the reason is at the end of {logs}")
        found = [name for name, process in self.processes.items() if process.poll() == 0 and name not in self._ended]
        self._ended.update(found)
        return found


@contextmanager
def training(plan: Plan) -> Iterator[Methods]:
    """Trains every method, with one thread each. Methods that still run when the context ends are stopped."""
    methods = Methods(plan=plan, processes={method: _start(plan, method) for method in plan.options.methods})
    try:
        yield methods
    finally:
        for process in methods.processes.values():
            _stop(process)


def _start(plan: Plan, method: str) -> subprocess.Popen[bytes]:
    folder = plan.out / method
    argv = [sys.executable, "-m", "turngym.scripts", "train", "--algorithm", method, "--out", str(folder)]
    argv += ["--student", str(plan.student), "--teacher", str(plan.teacher), "--split", plan.split]
    argv += ["--panel", plan.panel, "--seed", str(plan.options.seed), "--steps", str(plan.steps)]
    argv += distill_argv(plan.world, plan.split)
    if (folder / "checkpoints").exists():
        argv.append("--resume")
    # the methods share the cores; with more than one core each, `--workers auto` plays in several processes
    share = str(max(1, available_cores() // len(plan.options.methods)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SHARE: share}
    with (plan.out / f"{method}.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Lets a run save and end: Ctrl-C reaches it directly, otherwise SIGTERM follows after five seconds."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


# Evaluation: played by this process while the methods leave a core free.


def evaluate_all(plan: Plan, methods: Methods, board: Board) -> list[EvalResult]:
    """Evaluates teacher and student, then the model of each method as it finishes, one after the other.

    Nothing is played while every core trains, because that would distort the reported training times.
    """
    models = {"teacher": plan.teacher, "student": plan.student}
    waiting = [(name, model, plan.out / "eval" / name) for name, model in models.items()]
    done, cores = list[EvalResult](), available_cores()
    while waiting or methods.running or len(done) < 2 + len(plan.options.methods):
        waiting += [(method, plan.trained(method), plan.out / method / "eval") for method in methods.ended()]
        if waiting and methods.running < cores:
            done.append(_evaluate(plan, *waiting.pop(0), board))
        else:
            time.sleep(0.5)
    return done


def _evaluate(plan: Plan, name: str, model: Path, out: Path, board: Board) -> EvalResult:
    """Plays the panel with `model` and writes to `out`. Episodes that are in that folder are not played again."""
    import torch

    from turngym.scripts import eval as evaluation
    from turngym.scripts.eval import EvalOptions
    from turngym.scripts.options import parse

    argv = ["--panel", plan.panel, "--agent", f"model:{model}", "--samples", str(plan.options.samples)]
    argv += ["--limit", str(plan.options.limit)] if plan.options.limit else []
    argv += ["--seed", str(plan.options.seed), "--out", str(out)]
    board.add(name, plan.episodes, evaluation_look(out / "trace.jsonl"))
    options = parse(EvalOptions, argv, prog="turngym eval", description="")
    # one thread: the other cores belong to the methods, and the models are tiny
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return evaluation.run(options, command=("turngym", "eval", *argv), progress=False)
    finally:
        torch.set_num_threads(before)


# The end: a table, figures, a page of episodes, and the result in a few sentences.


def write_report(plan: Plan) -> None:
    """Writes the report, and a page with every episode of the last method; prints the result."""
    from turngym.scripts import report, trace

    runs = [f"{name}={plan.out / 'eval' / name}" for name in ("student", "teacher")]
    report.main([*runs, *(f"{method}={plan.out / method}" for method in plan.options.methods), "--out", str(plan.out)])
    page, last = plan.out / "episodes.html", plan.options.methods[-1]
    argv = ["html", str(plan.out / last / "eval" / "trace.jsonl"), "--out", str(page), "--overwrite"]
    trace.main([*argv, "--title", f"{last} after {plan.steps} steps", "--tokenizer", str(plan.student)])
    print(f"\n{_verdict(plan)}")


def _verdict(plan: Plan) -> str:
    """Says in sentences how well each method did."""
    from turngym.agents.evaluation.scores import score
    from turngym.scripts.report_data import load_run

    def result(path: Path) -> tuple[float, float]:
        run = load_run(str(path))
        return 100 * score(run.episodes).overall.avg.mean, max((point.seconds for point in run.points), default=0.0)

    start, teacher = (result(plan.out / "eval" / name)[0] for name in ("student", "teacher"))
    lines = [f"Avg@{plan.options.samples} of the student: {start:.1f} % before, the teacher has {teacher:.1f} %."]
    for method in plan.options.methods:
        end, seconds = result(plan.out / method)
        share = f" ({100 * end / teacher:.0f} % of the teacher)" if teacher else ""
        lines.append(f"{method}: {end:.1f} %{share} in {seconds:.0f} s of training.")
    return "\n".join(lines)


# Progress bars: a thread reads the files that training and evaluation write.

Look = Callable[[], tuple[int, str]]
"""Returns how much is done, and a note to show beside the bar."""
SECONDS = 0.5
"""Seconds between two updates of the bars."""


@dataclass(slots=True)
class Board:
    """One progress bar for each training run and evaluation."""

    progress: Any
    _looks: dict[Any, Look] = field(default_factory=dict)

    def add(self, name: str, total: int, look: Look) -> None:
        """Adds a bar."""
        self._looks[self.progress.add_task(name, total=total, note="starting")] = look

    def update(self) -> None:
        """Updates every bar once."""
        for bar, look in list(self._looks.items()):
            done, note = look()
            self.progress.update(bar, completed=done, note=note)


@contextmanager
def open_board() -> Iterator[Board]:
    """Shows bars on standard error until the context ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}")
    shape = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
    over = threading.Event()
    with Progress(*shape, console=Console(stderr=True), refresh_per_second=2) as progress:
        board = Board(progress)

        def watch() -> None:
            while not over.wait(SECONDS):
                board.update()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield board
        finally:
            over.set()
            thread.join()
            board.update()


def training_look(folder: Path) -> Look:
    """Reads the step and the newest metrics of the run in `folder`."""
    # imported here and not in `look`, which runs in another thread: two threads must not import torch at once
    from turngym.trainers.metrics import iter_metrics
    from turngym.trainers.progress import describe

    rows = folder / "metrics.jsonl"
    seen, found = -1, (0, "starting")

    def look() -> tuple[int, str]:
        nonlocal seen, found
        size = rows.stat().st_size if rows.exists() else -1
        # read the whole file only when it has grown: the methods need the cores
        if size != seen:
            latest: dict[str, object] = {"step": 0}
            for row in iter_metrics(folder):
                latest.update(row)
            seen, found = size, (int(str(latest["step"])), describe(latest).partition("  ")[2])
        return found

    return look


def evaluation_look(trace: Path) -> Look:
    """Counts the episodes of a trace while it is written. Each call reads only what is new."""
    seen = [0, 0]

    def look() -> tuple[int, str]:
        if trace.exists():
            with trace.open("rb") as file:
                file.seek(seen[0])
                new = file.read()
            seen[0] += len(new)
            seen[1] += new.count(b"\n")
        return seen[1], "evaluation"

    return look

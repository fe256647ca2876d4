"""Bars on standard error: a thread keeps them up to date from the files that are written meanwhile."""

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
from turngym.agents.models import require_model
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import print_table
from turngym.envs.panels import load_panel
from turngym.scripts.options import distill_words

Look = Callable[[], tuple[int, str]]
"""What is done, and a note on it."""
SECONDS = 0.5
"""Between two looks."""


@dataclass(slots=True)
class Board:
    """What is under way, one bar each."""

    progress: Any
    _looks: dict[Any, Look] = field(default_factory=dict)

    def add(self, name: str, total: int, look: Look) -> None:
        """Another bar."""
        self._looks[self.progress.add_task(name, total=total, note="starting")] = look

    def update(self) -> None:
        """Look at everything once."""
        for bar, look in list(self._looks.items()):
            done, note = look()
            self.progress.update(bar, completed=done, note=note)


@contextmanager
def open_board() -> Iterator[Board]:
    """A board whose bars move until the context ends."""
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
    """Steps done by the run in `folder`, and its newest numbers in words."""
    # here, not in `look`: that runs in the board's thread, and torch must not be imported in two threads at once
    from turngym.trainers.metrics import iter_metrics
    from turngym.trainers.progress import describe

    rows = folder / "metrics.jsonl"
    seen, found = -1, (0, "starting")

    def look() -> tuple[int, str]:
        nonlocal seen, found
        size = rows.stat().st_size if rows.exists() else -1
        # only when there are new ones: all are read, and the methods need the cores
        if size != seen:
            latest: dict[str, object] = {"step": 0}
            for row in iter_metrics(folder):
                latest.update(row)
            seen, found = size, (int(str(latest["step"])), describe(latest).partition("  ")[2])
        return found

    return look


def evaluation_look(trace: Path) -> Look:
    """Episodes in a trace that is being written."""
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


# Options of the quickstart, and the plan that they make with a world's own choices filled in.


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

    world: EmbeddedWorld
    out: Path
    steps: int
    student: Path
    teacher: Path
    panel: str
    split: str
    samples: int
    limit: int | None
    methods: tuple[str, ...]
    seed: int

    @classmethod
    def of(cls, options: Quickstart) -> Plan:
        world = load_world(options.env)
        suffix = "" if world.name == "alfworld" else f"-{world.name}"
        return cls(
            world=world,
            out=options.out or Path(f"runs/quickstart{suffix}"),
            steps=world.distill.steps if options.steps is None else options.steps,
            student=options.student or world.checkpoint("student"),
            teacher=options.teacher or world.checkpoint("teacher"),
            panel=options.panel or world.panel,
            split=options.split or world.split,
            samples=options.samples,
            limit=options.limit,
            methods=options.methods,
            seed=options.seed,
        )

    @property
    def episodes(self) -> int:
        """Of one evaluation before or after training."""
        return len(load_panel(self.panel).tasks[: self.limit]) * self.samples

    def check(self) -> None:
        """Raises TurngymError for a panel or model that is not there: before anything runs."""
        load_panel(self.panel)
        for model in (self.teacher, self.student):
            require_model(model)

    def trained(self, method: str) -> Path:
        """The newest model of a method."""
        folder = self.out / method
        found = max(folder.glob("checkpoints/step_*/model"), default=None)
        if found is None:
            raise TurngymError(f"no checkpoint in {folder}: remove the folder and run quickstart again")
        return found


# What the quickstart ends with: a table, figures, a page on which episodes can be read, and a closing sentence.


def write_report(plan: Plan) -> None:
    """The report of everything, and every episode of the last method on a page."""
    from turngym.scripts import report, trace

    runs = [f"{name}={plan.out / 'eval' / name}" for name in ("student", "teacher")]
    report.main([*runs, *(f"{method}={plan.out / method}" for method in plan.methods), "--out", str(plan.out)])
    page, last = plan.out / "episodes.html", plan.methods[-1]
    words = ["html", str(plan.out / last / "eval" / "trace.jsonl"), "--out", str(page), "--overwrite"]
    trace.main([*words, "--title", f"{last} after {plan.steps} steps", "--tokenizer", str(plan.student)])
    print(f"\n{_verdict(plan)}")


def _verdict(plan: Plan) -> str:
    """What each method made of the student, in words."""
    from turngym.agents.evaluation.scores import score
    from turngym.scripts.report_data import load_run

    def result(path: Path) -> tuple[float, float]:
        run = load_run(str(path))
        return 100 * score(run.episodes).overall.avg.mean, max((point.seconds for point in run.points), default=0.0)

    start, teacher = (result(plan.out / "eval" / name)[0] for name in ("student", "teacher"))
    lines = [f"Avg@{plan.samples} of the student: {start:.1f} % before, the teacher has {teacher:.1f} %."]
    for method in plan.methods:
        end, seconds = result(plan.out / method)
        share = f" ({100 * end / teacher:.0f} % of the teacher)" if teacher else ""
        lines.append(f"{method}: {end:.1f} %{share} in {seconds:.0f} s of training.")
    return "\n".join(lines)


# The methods in training: each in a process of its own, stopped when this one is.


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


# Evaluations of the quickstart: played by this process while its methods leave a core free.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A model to be evaluated."""

    name: str
    model: Path
    out: Path

    @classmethod
    def first(cls, plan: Plan) -> list[Evaluation]:
        """What can be evaluated before anything is trained."""
        roles = {"teacher": plan.teacher, "student": plan.student}
        return [cls(name=role, model=model, out=plan.out / "eval" / role) for role, model in roles.items()]

    @classmethod
    def last(cls, plan: Plan, method: str) -> Evaluation:
        """What a method has made of the student."""
        return cls(name=method, model=plan.trained(method), out=plan.out / method / "eval")


def evaluate_all(plan: Plan, methods: Methods, board: Board) -> list[EvalResult]:
    """Evaluate the models before training and those of the methods as each ends, one after the other.

    While every core trains nothing is played: the methods' times would not be their own.
    """
    waiting, done, cores = Evaluation.first(plan), list[EvalResult](), available_cores()
    while waiting or methods.running or len(done) < 2 + len(plan.methods):
        waiting += [Evaluation.last(plan, method) for method in methods.ended()]
        if waiting and methods.running < cores:
            done.append(_evaluate(plan, waiting.pop(0), board))
        else:
            time.sleep(0.5)
    return done


def _evaluate(plan: Plan, which: Evaluation, board: Board) -> EvalResult:
    """Avg@n of a model on the panel; continues or skips what is in its folder."""
    from turngym.scripts import eval as evaluation
    from turngym.scripts.eval import EvalOptions
    from turngym.scripts.options import parse

    words = ["--panel", plan.panel, "--agent", f"model:{which.model}", "--samples", str(plan.samples)]
    words += ["--limit", str(plan.limit)] if plan.limit else []
    words += ["--seed", str(plan.seed), "--out", str(which.out)]
    board.add(which.name, plan.episodes, evaluation_look(which.out / "trace.jsonl"))
    with _one_thread():
        options = parse(EvalOptions, words, prog="turngym eval", description="")
        return evaluation.run(options, command=("turngym", "eval", *words), progress=False)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes in one thread, as the methods do: the other cores are theirs, and models are tiny."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Distill a tiny student in a generated world, with vanilla OPD and TurnOPD side by side, in under ten minutes.
#
# Both start from the same weak student and learn from the same teacher (two checkpoints that come with turngym) for the
# same number of steps, each in a process of its own. Ends with a table, a figure and traces to read. Stopping it loses
# nothing: the same command goes on where it stopped.


def main(argv: Sequence[str]) -> int:
    """Run `turngym quickstart` with `argv` (without the verb itself)."""
    words = tyro.cli(Quickstart, args=list(argv), prog="turngym quickstart", description=(__doc__ or "").split("\n")[0])
    plan = Plan.of(words)
    plan.check()
    start = time.monotonic()
    plan.out.mkdir(parents=True, exist_ok=True)
    with training(plan) as methods, open_board() as board:
        for method in plan.methods:
            board.add(method, plan.steps, training_look(plan.out / method))
        results = evaluate_all(plan, methods, board)
    for result in results:
        print_table(result.table(), title=result.title)
    write_report(plan)
    print(f"finished in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0

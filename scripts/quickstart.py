"""Distill a tiny student in a generated world, with vanilla OPD and TurnOPD side by side, in under ten minutes.

Both start from the same weak student and learn from the same teacher (two checkpoints that come with turngym) for the
same number of steps, each in a process of its own. Ends with a table, a figure and traces to read. Stopping it loses
nothing: the same command goes on where it stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from turngym.agents.worlds import load_world
from turngym.agents.worlds.world import EmbeddedWorld
from turngym.envs.core import TurngymError
from turngym.scripts.options.world import distill_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart:
    """The whole path on one machine: play, distill turn by turn, evaluate."""

    env: str = "alfworld"
    """Embedded world: alfworld, alfworld-loops, webshop or search."""
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


def main(argv: Sequence[str]) -> int:
    """Run `turngym quickstart` with `argv` (without the verb itself)."""
    words = tyro.cli(Quickstart, args=list(argv), prog="turngym quickstart", description=(__doc__ or "").split("\n")[0])
    plan = Plan.of(words)
    start = time.monotonic()
    plan.out.mkdir(parents=True, exist_ok=True)
    for name in ("teacher", "student"):
        _evaluate(plan, getattr(plan, name), plan.out / "eval" / name)
    _train(plan)
    for method in plan.methods:
        _evaluate(plan, _newest(plan.out / method), plan.out / method / "eval")
    _report(plan)
    print(f"finished in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


def _evaluate(plan: Plan, model: Path, out: Path) -> None:
    """Avg@n of a model on the panel; continues or skips what is in `out`."""
    from turngym.scripts import eval as evaluation

    words = ["--panel", plan.panel, "--agent", f"model:{model}", "--samples", str(plan.samples)]
    words += ["--limit", str(plan.limit)] if plan.limit else []
    evaluation.main([*words, "--seed", str(plan.seed), "--out", str(out)])


def _train(plan: Plan) -> None:
    """Run every method in its own process, one thread each, and show how far they are."""
    running = {method: _start(plan, method) for method in plan.methods}
    try:
        _watch(plan, running)
    except KeyboardInterrupt:
        for process in running.values():
            _stop(process)
        raise
    failed = [method for method, process in running.items() if process.returncode]
    if failed:
        logs = ", ".join(str(plan.out / f"{method}.log") for method in failed)
        raise TurngymError(f"training failed: {', '.join(failed)}; the reason is at the end of {logs}")


def _start(plan: Plan, method: str) -> subprocess.Popen[bytes]:
    folder = plan.out / method
    words = [sys.executable, "-m", "turngym.scripts", "train", "--algorithm", method, "--out", str(folder)]
    words += ["--student", str(plan.student), "--teacher", str(plan.teacher), "--split", plan.split]
    words += ["--panel", plan.panel, "--seed", str(plan.seed), "--steps", str(plan.steps)]
    words += distill_words(plan.world, plan.split)
    if (folder / "checkpoints").exists():
        words.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (plan.out / f"{method}.log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let a run save and end. On a terminal it was interrupted as well; elsewhere it must be told."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _watch(plan: Plan, running: dict[str, subprocess.Popen[bytes]]) -> None:
    """One bar per method until all processes have ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}")
    shape = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
    with Progress(*shape, console=Console(stderr=True), refresh_per_second=2) as progress:
        bars = {method: progress.add_task(method, total=plan.steps, note="starting") for method in running}
        while True:
            alive = [process for process in running.values() if process.poll() is None]
            for method, bar in bars.items():
                step, text = _state(plan.out / method)
                progress.update(bar, completed=step, note=text)
            if not alive:
                return
            time.sleep(0.5)


def _state(folder: Path) -> tuple[int, str]:
    """Steps done, and the newest numbers in words."""
    from turngym.trainers.run.metrics import iter_metrics
    from turngym.trainers.run.progress import describe

    if not (folder / "metrics.jsonl").exists():
        return 0, "starting"
    latest: dict[str, object] = {"step": 0}
    for row in iter_metrics(folder):
        latest.update(row)
    return int(str(latest["step"])), describe(latest).partition("  ")[2]


def _newest(folder: Path) -> Path:
    found = max(folder.glob("checkpoints/step_*/model"), default=None)
    if found is None:
        raise TurngymError(f"no checkpoint in {folder}: remove the folder and run quickstart again")
    return found


def _report(plan: Plan) -> None:
    """The table, the figure, a page on which every episode of the last method can be read, and a closing sentence."""
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
    from turngym.scripts.reports.data import load_run

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

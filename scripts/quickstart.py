"""Distil a tiny student in a generated household, with vanilla OPD and TurnOPD side by side, in under ten minutes.

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

from turngym.envs.core import TurngymError
from turngym.scripts import embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart:
    """The whole path on one machine: play, distil turn by turn, evaluate."""

    out: Path = Path("runs/quickstart")
    """Folder for everything that is written."""
    steps: int = embedded.DISTIL.steps
    """Training steps of each method."""
    student: Path = embedded.CHECKPOINTS / "student"
    """Folder of the model to train."""
    teacher: Path = embedded.CHECKPOINTS / "teacher"
    """Folder of the model to learn from."""
    panel: str = embedded.PANEL
    """Tasks of the evaluations; never trained on."""
    split: str = "generated"
    """Split to train on; `train` takes the real games of $ALFWORLD_DATA."""
    samples: int = 4
    """Episodes per task of the evaluations before and after."""
    limit: int | None = None
    """Evaluate on the first so many tasks only."""
    methods: tuple[str, ...] = ("opd", "turnopd")
    """Algorithms to compare."""
    seed: int = 0
    """Fixes tasks and sampling."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym quickstart` with `argv` (without the verb itself)."""
    options = tyro.cli(
        Quickstart, args=list(argv), prog="turngym quickstart", description=(__doc__ or "").split("\n")[0]
    )
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("teacher", "student"):
        _evaluate(options, getattr(options, name), options.out / "eval" / name)
    _train(options)
    for method in options.methods:
        _evaluate(options, _newest(options.out / method), options.out / method / "eval")
    _report(options)
    print(f"finished in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


def _evaluate(options: Quickstart, model: Path, out: Path) -> None:
    """Avg@n of a model on the panel; continues or skips what is in `out`."""
    from turngym.scripts import eval as evaluation

    words = ["--panel", options.panel, "--agent", f"model:{model}", "--samples", str(options.samples)]
    words += ["--limit", str(options.limit)] if options.limit else []
    evaluation.main([*words, "--seed", str(options.seed), "--out", str(out)])


def _train(options: Quickstart) -> None:
    """Run every method in its own process, one thread each, and show how far they are."""
    running = {method: _start(options, method) for method in options.methods}
    try:
        _watch(options, running)
    except KeyboardInterrupt:
        for process in running.values():
            _stop(process)
        raise
    failed = [method for method, process in running.items() if process.returncode]
    if failed:
        logs = ", ".join(str(options.out / f"{method}.log") for method in failed)
        raise TurngymError(f"training failed: {', '.join(failed)}; the reason is at the end of {logs}")


def _start(options: Quickstart, method: str) -> subprocess.Popen[bytes]:
    folder = options.out / method
    words = [sys.executable, "-m", "turngym.scripts", "train", "--algorithm", method, "--out", str(folder)]
    words += ["--student", str(options.student), "--teacher", str(options.teacher), "--split", options.split]
    words += ["--panel", options.panel, "--seed", str(options.seed), "--steps", str(options.steps)]
    words += embedded.distil_words(options.split)
    if (folder / "checkpoints").exists():
        words.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (options.out / f"{method}.log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let a run save and end. On a terminal it was interrupted as well; elsewhere it must be told."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _watch(options: Quickstart, running: dict[str, subprocess.Popen[bytes]]) -> None:
    """One bar per method until all processes have ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}")
    shape = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
    with Progress(*shape, console=Console(stderr=True), refresh_per_second=2) as progress:
        bars = {method: progress.add_task(method, total=options.steps, note="starting") for method in running}
        while True:
            alive = [process for process in running.values() if process.poll() is None]
            for method, bar in bars.items():
                step, text = _state(options.out / method)
                progress.update(bar, completed=step, note=text)
            if not alive:
                return
            time.sleep(0.5)


def _state(folder: Path) -> tuple[int, str]:
    """Steps done, and the newest numbers in words."""
    from turngym.trainers.metrics import read_metrics
    from turngym.trainers.progress import describe

    if not (folder / "metrics.jsonl").exists():
        return 0, "starting"
    latest: dict[str, object] = {"step": 0}
    for row in read_metrics(folder):
        latest.update(row)
    return int(str(latest["step"])), describe(latest).partition("  ")[2]


def _newest(folder: Path) -> Path:
    found = max(folder.glob("checkpoints/step_*/model"), default=None)
    if found is None:
        raise TurngymError(f"no checkpoint in {folder}: remove the folder and run quickstart again")
    return found


def _report(options: Quickstart) -> None:
    """The table, the figure, a page on which every episode of the last method can be read, and a closing sentence."""
    from turngym.scripts import report, trace

    runs = [f"{name}={options.out / 'eval' / name}" for name in ("student", "teacher")]
    report.main([*runs, *(f"{method}={options.out / method}" for method in options.methods), "--out", str(options.out)])
    page, last = options.out / "episodes.html", options.methods[-1]
    words = ["html", str(options.out / last / "eval" / "trace.jsonl"), "--out", str(page), "--overwrite"]
    trace.main([*words, "--title", f"{last} after {options.steps} steps", "--tokenizer", str(options.student)])
    print(f"\n{_verdict(options)}")


def _verdict(options: Quickstart) -> str:
    """What each method made of the student, in words."""
    from turngym.agents.scores import score
    from turngym.scripts.report_data import load_run

    def result(path: Path) -> tuple[float, float]:
        run = load_run(str(path))
        return 100 * score(run.episodes).overall.avg.mean, max((point.seconds for point in run.points), default=0.0)

    start, teacher = (result(options.out / "eval" / name)[0] for name in ("student", "teacher"))
    lines = [f"Avg@{options.samples} of the student: {start:.1f} % before, the teacher has {teacher:.1f} %."]
    for method in options.methods:
        end, seconds = result(options.out / method)
        share = f" ({100 * end / teacher:.0f} % of the teacher)" if teacher else ""
        lines.append(f"{method}: {end:.1f} %{share} in {seconds:.0f} s of training.")
    return "\n".join(lines)

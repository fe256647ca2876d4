"""What a person sees while a run trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from turngym.core.progress import ACTIVITY, LogLines, clock

MUCH = 0.5
"""Share of answers that are cut or cannot be read from which on they are what holds a run up."""
SHOWN_METRICS = (
    ("loss", "loss {:z.3f}"),
    ("success", "success {:.0%}"),
    ("depth/cap", "depth {}"),
    ("eval/avg", "Avg {:.1%}"),
)


class Progress:
    """Receives each metrics row and the name of the running phase. This base class prints nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        return

    def begin(self, step: int) -> None:
        """The run begins, or goes on, after `step`."""
        return

    def started_at(self, row: Mapping[str, Any]) -> None:
        """The evaluation before step 1 of a run that goes on."""
        return

    def phase(self, name: str) -> None:
        return

    def row(self, row: Mapping[str, Any]) -> None:
        return


class LiveProgress(Progress):
    """A bar with the step, the time of a step, the time left and the latest numbers on a terminal.

    Elsewhere a line at every `every`-th step, and one a minute that says where the step stands.
    """

    def __init__(self, title: str, total: int, every: int = 10) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        self.title, self.total, self.every = title, total, every
        self.console = Console(stderr=True)
        columns = ("[bold]{task.description}", "{task.fields[phase]:<8}")
        self.bar = Bar(
            *(TextColumn(text) for text in columns),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # rich's own time left counts the loading before the first step
            TextColumn("{task.fields[pace]}"),
            # the only column that may be cut on a narrow terminal
            TextColumn("{task.fields[numbers]}", table_column=Column(ratio=1, no_wrap=True)),
            expand=True,
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task(title, total=total, phase="", pace="", numbers="")
        self.latest: dict[str, Any] = {}
        self.lines = LogLines(self.line, self.console)
        self._phase, self._since, self._before = "start", time.monotonic(), replace(ACTIVITY)
        self._steps = self._unchanged = self._dropped = self._solved = 0
        """Training steps of this call; those of them that had nothing to learn from, in which an update was dropped,
        and in which an episode succeeded."""
        self._first: tuple[int, float] | None = None
        """The first step of this process that ended, and when: what comes before it is loading."""
        self._ended = 0.0
        """When the latest step ended."""
        self._start: Mapping[str, Any] | None = None
        """The evaluation before step 1."""
        self._fell = False
        """Whether it was said that the student fell below it."""
        self._printed = ""

    def __enter__(self) -> Self:
        self.bar.start() if self.console.is_terminal else self.lines.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop() if self.console.is_terminal else self.lines.__exit__()
        self._print(describe(self.latest))
        if error[0] is None:
            for text in self.hints():
                self.console.print(f"{self.title}: {text}", highlight=False)

    def begin(self, step: int) -> None:
        self.latest["step"] = step
        self.bar.update(self.task, completed=step)

    def started_at(self, row: Mapping[str, Any]) -> None:
        self._start = row

    def phase(self, name: str) -> None:
        self._phase, self._since, self._before = name, time.monotonic(), replace(ACTIVITY)
        self.bar.update(self.task, phase=name, pace=self.pace())

    def row(self, row: Mapping[str, Any]) -> None:
        self.latest.update(row)
        self._ended = time.monotonic()
        self._first = self._first or (row["step"], self._ended)
        if row["kind"] == "train":
            self._steps, self._solved = self._steps + 1, self._solved + bool(row.get("success"))
            self._unchanged += row.get("episodes") == 0 or without_gradient(row)
            self._dropped += bool(row.get("updates_skipped"))
            if warning := without_update(row):
                self.console.print(f"{self.title}: {warning}", highlight=False, soft_wrap=True)
        if row["kind"] == "eval":
            self._start = self._start or (row if row["step"] == 0 else None)
            if self._start is not None and not self._fell and (warning := below_start(self._start, row)):
                self._fell = True
                self.console.print(f"{self.title}: {warning}", highlight=False, soft_wrap=True)
        text = describe(self.latest)
        # without "step N", which the bar counts itself
        self.bar.update(self.task, completed=row["step"], pace=self.pace(), numbers=text.partition("  ")[2])
        if not self.console.is_terminal and (row["kind"] == "eval" or row["step"] % self.every == 0):
            self._print(text)

    def _print(self, text: str) -> None:
        # the last step's line may be what a run ends with
        if text != self._printed:
            self.console.print(f"{self.title}: {text}", highlight=False)
        self._printed = text

    def hints(self) -> list[str]:
        """Advice for runs whose steps made no update, or whose answers were cut or malformed."""
        lines, shares = [], {name: self.latest.get(name) or 0.0 for name in ("malformed", "answers_cut")}
        if self._unchanged:
            if not self._solved:
                advice = (
                    "No episode succeeded: teach the student first (`turngym train sft` on an expert's episodes, or a "
                    "distillation), take easier tasks or more turns, or let a --reward pay for progress."
                )
            else:
                advice = "Larger groups, a higher --temperature, or tasks of which the student solves some help."
            lines.append(
                f"{self._unchanged} of {self._steps} steps taught nothing, for nothing in them could be compared. "
                f"{advice}"
            )
        if self._dropped:
            lines.append(
                f"{self._dropped} of {self._steps} steps dropped updates, for their gradient was not finite: the loss "
                "of the algorithm or its targets were not, or the weights have grown too far (a smaller --optimizer.lr)"
            )
        if shares["malformed"] >= MUCH:
            lines.append(
                f"in the last step {100 * shares['malformed']:.0f} % of the student's answers could not be read as "
                'actions: `turngym train sft` teaches their form; --channel and --env-kwargs \'{"reading": '
                '"lenient"}\' change what is asked for. --keep-rollouts 1 and `turngym trace print --prompt` show them.'
            )
        if shares["answers_cut"] >= MUCH:
            lines.append(
                f"in the last step {100 * shares['answers_cut']:.0f} % of the student's answers were cut at "
                "--max-new-tokens: raise it, or let the student answer in fewer words (--thinking off, --system)."
            )
        return lines

    def line(self) -> str:
        """`opd: step 3/50, rollout for 0:01:20, 96 turns (1.2/s), ..., 4.1 GB, 0:03:05 a step, about 2:24:00 left`"""
        step, spent = self.latest.get("step", 0), time.monotonic() - self._since
        parts = [f"{self.title}: step {min(step + 1, self.total)}/{self.total}, {self._phase} for {clock(spent)}"]
        if ACTIVITY.turns > self._before.turns:
            parts.append(ACTIVITY.since(self._before, spent))
        # kilobytes on Linux
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        parts.append(f"{most / 1e9:.1f} GB at most")
        return ", ".join(filter(None, [*parts, self.pace()]))

    def pace(self) -> str:
        """`0:03:05 a step, about 2:24:00 left`; empty before the second step of this process has ended."""
        step = self.latest.get("step", 0)
        if self._first is None or step <= self._first[0]:
            return ""
        per_step = (self._ended - self._first[1]) / (step - self._first[0])
        left = per_step * (self.total - step) - (time.monotonic() - self._ended)
        return f"{clock(per_step)} a step, about {clock(max(left, 0.0))} left"


def below_start(start: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """A warning if an evaluation lies, with its interval, below the one before step 1; else ""."""
    if not row["eval/high"] < start["eval/low"]:
        return ""
    current, initial = (
        f"{100 * point['eval/avg']:.1f} % [{100 * point['eval/low']:.1f}, {100 * point['eval/high']:.1f}]"
        for point in (row, start)
    )
    return (
        f"step {row['step']}: the student evaluates at {current}, below the {initial} that it began with: a smaller "
        "--optimizer.lr, a --optimizer.lr-warmup or more --episodes a step may help"
    )


def updated(row: Mapping[str, Any]) -> bool:
    """Whether a training step changed the student; rows of older versions do not count updates."""
    return row.get("episodes") != 0 and row.get("updates") != 0


def without_gradient(row: Mapping[str, Any]) -> bool:
    """Whether a step that was to teach had nothing to teach, as where all of its rewards are equal."""
    return row.get("grad_norm") == 0 and bool(row.get("lr"))


def without_update(row: Mapping[str, Any]) -> str:
    """`step 3: no update: its 8 groups have no contrast (8 all alike, 0 of them solved)`; "" where all were made, of a
    gradient."""
    alike, solved, lost = (row.get(f"groups/{name}") for name in ("uniform", "uniform_solved", "lost"))
    if without_gradient(row):
        return f"step {row['step']}: its gradient is 0: nothing in its {row['episodes']} episodes could be compared"
    if row.get("episodes") != 0:
        if not (dropped := row.get("updates_skipped")):
            return ""
        outcome = f"{dropped} of its updates dropped" if updated(row) else "no update"
        return f"step {row['step']}: {outcome}: the gradient was not finite"
    if alike is None:
        return f"step {row['step']}: no update: none of its episodes is trained on"
    failed = f", {lost} lost to failed episodes" if lost else ""
    why = f"its {alike + (lost or 0)} groups have no contrast ({alike} all alike, {solved} of them solved{failed})"
    return f"step {row['step']}: no update: {why}"


def describe(row: Mapping[str, Any]) -> str:
    """`step 10  loss 0.412  success 25%  depth 12  Avg 31.0%` from the numbers that are there."""
    parts = [text.format(row[name]) for name, text in SHOWN_METRICS if row.get(name) is not None]
    return "  ".join([f"step {row.get('step', 0)}", *parts])

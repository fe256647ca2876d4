"""Distill a tiny student in a generated world, with vanilla OPD and TurnOPD side by side, in under ten minutes.

Both methods start from the same weak student and learn from the same teacher (two checkpoints that come with turngym)
for the same number of steps. Models are evaluated before and after training, as soon as a core is free. It ends with a
table, a figure and a page of episodes. Stopping it loses nothing: the same command continues where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.play_panel import EvalResult
from turngym.agents.models import find_model
from turngym.agents.playing.env_maker import probe
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.core.cpu_cores import available_cores
from turngym.core.errors import TurngymError
from turngym.core.nested import flat
from turngym.core.numbers import Count, Million, Seed
from turngym.core.spec import Spec
from turngym.core.tables import print_table
from turngym.envs.panels import load_panel
from turngym.scripts import report, trace
from turngym.scripts.jobs import RunJob, Runner
from turngym.scripts.options import read_options
from turngym.trainers.metrics import read_metrics


class Quickstart(Spec):
    """The whole path on one machine: play, distill turn by turn, evaluate."""

    env: str = "alfworld"
    """Embedded world: alfworld, webshop, search, each also with -loops, or search-chains; or
    alfworld-smollm2 or webshop-smollm2, with a real language model: most of an hour, by default with opd alone."""
    out: Path | None = None
    """Folder for everything that is written; by default runs/quickstart, for another world runs/quickstart-NAME."""
    steps: Count | None = None
    """Training steps of each method, if not the world's."""
    student: Path | None = None
    """Folder of the model to train, if not the one that comes with turngym."""
    teacher: Path | None = None
    """Folder of the model to learn from, if not the one that comes with turngym."""
    panel: str | None = None
    """Tasks of the evaluations, never trained on, if not the world's."""
    split: str | None = None
    """Split to train on, if not the world's; `train` takes the real games of $ALFWORLD_DATA."""
    samples: Million | None = None
    """Episodes per task of the evaluations before and after, if not the world's (4)."""
    limit: Count | None = None
    """Evaluate on so many tasks only, of each category its share, if not on the world's (all)."""
    methods: tuple[str, ...] = ()
    """Algorithms to compare, if not the world's (opd and turnopd)."""
    seed: Seed = 0
    """Fixes tasks and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartPlan:
    """The options with the world's own choices filled in."""

    options: Quickstart
    world: EmbeddedWorld
    out: Path
    methods: tuple[str, ...]
    steps: int
    student: Path
    teacher: Path
    panel: str
    split: str
    samples: int
    limit: int | None

    @classmethod
    def of(cls, options: Quickstart) -> QuickstartPlan:
        world = load_world(options.env)
        suffix = "" if world.name == "alfworld" else f"-{world.name}"
        return cls(
            options=options,
            world=world,
            out=options.out or Path(f"runs/quickstart{suffix}"),
            methods=options.methods or world.distill.methods,
            steps=options.steps or world.distill.steps,
            student=options.student or world.checkpoint("student"),
            teacher=options.teacher or world.checkpoint("teacher"),
            panel=options.panel or world.panel,
            split=options.split or world.split,
            samples=options.samples or world.distill.samples,
            limit=options.limit or world.distill.tasks,
        )

    def jobs(self) -> list[RunJob]:
        """The methods, then the evaluations: nothing is played while every core trains, which would distort times.

        Raises TurngymError if the panel, a model, a method, the split or what training needs does not exist.
        """
        for model in (self.teacher, self.student):
            find_model(model)
        if "lora" in self.world.distill.settings and find_spec("peft") is None:
            raise TurngymError(f"{self.world.name} trains low-rank adapters: pip install 'turngym[lora]'")
        trained = [self._training(method) for method in self.methods]
        # a job would say it minutes before the others have ended
        from turngym.scripts.train import resolved

        for job in trained:
            resolved([*job.words, "--out", str(job.folder)])
        probe(self.world.env_id, {"split": self.split, **self.world.make})
        played = [
            self._evaluation(name, model, self.out / "eval" / name)
            for name, model in (("teacher", self.teacher), ("student", self.student))
        ]
        for job in trained:
            played.append(self._evaluation(f"{job.name} after", job.model, job.folder / "eval", needs=(job,)))
        return [*trained, *played]

    def _training(self, method: str) -> RunJob:
        # the same for every method
        settings = {**self.world.settings("opd", split=self.split), "algorithm": method, "steps": self.steps}
        settings |= {"student": self.student, "teacher": self.teacher, "panel": self.panel, "threads": 1}
        settings |= {"seed": self.options.seed, "eval_every": self.world.distill.eval_every, "eval_samples": 1}
        words = words_of({**settings, "env_kwargs": json.dumps(settings["env_kwargs"])})
        return RunJob(name=method, folder=self.out / method, words=words, steps=self.steps)

    def _evaluation(self, name: str, model: Path, folder: Path, needs: tuple[RunJob, ...] = ()) -> RunJob:
        words = ["--panel", self.panel, "--agent", f"model:{model}", "--samples", str(self.samples)]
        words += ["--dtype", self.world.dtype] if self.world.dtype != "float32" else []
        words += ["--limit", str(self.limit)] if self.limit else []
        # the numbers of docs/research/real_model.md are of the first tasks
        words += ["--no-spread"] if self.limit and self.options.limit is None else []
        slots = self.world.distill.settings.get("slots")
        words += ["--slots", str(slots)] if slots else []
        words += ["--seed", str(self.options.seed)]
        episodes = len(load_panel(self.panel).tasks[: self.limit]) * self.samples
        return RunJob(name=name, folder=folder, verb="eval", words=tuple(words), steps=episodes, needs=needs)


def words_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings of `turngym train` as words of its command line; one that is switched on is an option alone."""
    options = {f"--{path.replace('_', '-')}": value for path, value in flat(settings).items()}
    return tuple(word for name, value in options.items() for word in (name, *([] if value is True else [str(value)])))


def main(argv: Sequence[str]) -> int:
    """Run `turngym quickstart` with `argv` (without the verb itself)."""
    options = read_options(Quickstart, argv, prog="turngym quickstart", about=__doc__)
    plan, start, cores = QuickstartPlan.of(options), time.monotonic(), available_cores()
    jobs, methods = plan.jobs(), len(plan.methods)
    # the methods share the cores; with more than one core each, `--workers auto` plays in several processes
    Runner(jobs=jobs, parallel=min(cores, methods + 1), cores=max(1, cores // methods)).run()
    results = {job.name: rescore(job.folder) for job in jobs[methods:]}
    for result in results.values():
        print_table(result.table(), title=result.title)
    write_report(plan)
    print(f"\n{_verdict(plan, results)}")
    print(f"finished in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


# The end: a table, figures, a page of episodes, and the result in a few sentences.


def write_report(plan: QuickstartPlan) -> None:
    """Writes the report, and a page with every episode of the last method."""
    runs = [f"{name}={plan.out / 'eval' / name}" for name in ("student", "teacher")]
    report.main([*runs, *(f"{method}={plan.out / method}" for method in plan.methods), "--out", str(plan.out)])
    # an adapter has no tokenizer of its own
    tokenizer = plan.options.student or plan.world.base or plan.student
    page, last = plan.out / "episodes.html", plan.methods[-1]
    argv = ["html", str(plan.out / last / "eval" / "trace.jsonl"), "--out", str(page), "--overwrite"]
    trace.main([*argv, "--title", f"{last} after {plan.steps} steps", "--tokenizer", str(tokenizer)])


def _verdict(plan: QuickstartPlan, results: Mapping[str, EvalResult]) -> str:
    """Says in sentences how well each method did."""
    success = {name: 100 * result.scores.overall.avg.mean for name, result in results.items()}
    start, teacher = success["student"], success["teacher"]
    lines = [f"Avg@{plan.samples} of the student: {start:.1f} % before, the teacher has {teacher:.1f} %."]
    for method in plan.methods:
        end = success[f"{method} after"]
        seconds = max(row["time/train_s"] for row in read_metrics(plan.out / method) if row["kind"] == "train")
        share = f" ({100 * end / teacher:.0f} % of the teacher)" if teacher else ""
        lines.append(f"{method}: {end:.1f} %{share} in {seconds:.0f} s of training.")
    return "\n".join(lines)

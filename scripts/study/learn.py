"""Does it learn? Every algorithm from a tiny student in a generated world: Avg@n before, during and after, by seed.

Each run is a `turngym train` in a process of its own. Runs that are finished are kept, so that the same command goes on
where it stopped, and adds what is new when it asks for more algorithms or seeds. Ends with a table, a figure and the
numbers as JSON.

Examples:
    turngym study learn
    turngym study learn --algorithms grpo luffy prm-rl opd-hints --seeds 3 --env webshop
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from turngym.agents.evaluation.scores import task_means
from turngym.agents.evaluation.seeds import TaskMeans, over_seeds, rise
from turngym.agents.evaluation.statistics import Interval
from turngym.agents.playing.environments import env_maker, probe
from turngym.agents.playing.rollout import Job as RolloutJob
from turngym.agents.playing.rollout import rollout
from turngym.agents.playing.scripted import ExpertAgent, named_player
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import markdown
from turngym.envs.core.trace import iter_episodes
from turngym.scripts.jobs import Job, Runner, metric_rows
from turngym.scripts.study.learn_recipes import (
    MUST_RISE,
    Imitation,
    Recipe,
    Size,
    Start,
    choose,
    imitation_job,
    recipe_words,
    setup_of,
)

# --- One row: an algorithm over its seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row: an algorithm over its seeds."""

    name: str
    curve: Mapping[int, Interval]
    """Step -> Avg@n over seeds and tasks."""
    by_seed: Mapping[int, Sequence[float]]
    """Step -> Avg@n of each seed."""
    rise: Interval
    """End minus start, paired by seed and task."""
    control: str | None
    against: Interval | None
    """This row's end minus its control's end, paired by seed and task, over the seeds that both have."""
    seconds: float
    """Training of one run, the median over seeds; evaluations excluded."""
    commands: Sequence[str]
    ends: Sequence[TaskMeans] = field(repr=False)

    @property
    def seeds(self) -> int:
        return len(self.ends)

    @property
    def start(self) -> Interval:
        return self.curve[min(self.curve)]

    @property
    def end(self) -> Interval:
        return self.curve[max(self.curve)]

    @property
    def rises(self) -> bool:
        """Whether the interval of the rise lies above zero."""
        return self.rise.low > 0

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["ends"]
        return {**found, "seeds": self.seeds, "start": asdict(self.start), "end": asdict(self.end), "rises": self.rises}


def read_result(name: str, recipe: Recipe, jobs: Sequence[Job], earlier: Mapping[str, Result]) -> Result:
    """Read the evaluations of finished runs; `earlier` holds the rows that come before, the control among them."""
    evaluations = [task_means_by_step(job) for job in jobs]
    steps = sorted(evaluations[0])
    means = {step: [evaluation[step] for evaluation in evaluations] for step in steps}
    ends = means[steps[-1]]
    control = earlier.get(recipe.control or "")
    return Result(
        name=name,
        curve={step: over_seeds(values) for step, values in means.items()},
        by_seed={step: [sum(run.values()) / len(run) for run in values] for step, values in means.items()},
        rise=rise(means[steps[0]], ends),
        control=recipe.control,
        against=None if control is None else _against(control.ends, ends),
        seconds=median(trained_seconds(job) for job in jobs),
        commands=[job.command for job in jobs],
        ends=ends,
    )


def _against(control: Sequence[TaskMeans], ends: Sequence[TaskMeans]) -> Interval:
    """The rise from the control's end to this row's end, over the seeds that both have."""
    both = min(len(control), len(ends))
    return rise(control[:both], ends[:both])


def task_means_by_step(job: Job) -> dict[int, TaskMeans]:
    """Step -> task means of a run's evaluations."""
    traces = sorted((job.folder / "eval").glob("step_*.jsonl"))
    return {int(path.stem.removeprefix("step_")): task_means(iter_episodes(path)) for path in traces}


def trained_seconds(job: Job) -> float:
    return max((float(str(row.get("time/train_s") or 0.0)) for row in metric_rows(job.folder)), default=0.0)


# --- The figure

COLUMNS = 4
CLEAR, UNCLEAR, CONTROL = "tab:blue", "tab:orange", "0.6"


def draw_figure(results: Sequence[Result], path: Path, samples: int) -> Path:
    """Write the figure to `path`; the suffix chooses the format."""
    try:
        import matplotlib
    except ImportError as error:
        raise TurngymError("the figure needs matplotlib: pip install 'turngym[train]', or --no-report") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(results) // COLUMNS)
    figure = pyplot.figure(figsize=(3.0 * COLUMNS, 2.3 * lines + 0.5 + 0.3 * len(results)))
    grid = figure.add_gridspec(lines + 1, COLUMNS, height_ratios=[2.3] * lines + [0.5 + 0.3 * len(results)])
    by_name = {result.name: result for result in results}
    top = 100 * max(point.high for result in results for point in result.curve.values())
    for place, result in enumerate(results):
        axis = figure.add_subplot(grid[place // COLUMNS, place % COLUMNS])
        _curve(axis, result, by_name.get(result.control or ""))
        axis.set(ylim=(0, min(100.0, top + 5)), xlabel="step" if place + COLUMNS >= len(results) else "")
        axis.set_ylabel(f"Avg@{samples} (%)" if place % COLUMNS == 0 else "")
    _rises(figure.add_subplot(grid[lines, :]), results)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot.close(figure)
    return path


def _curve(axis: Any, result: Result, control: Result | None) -> None:
    """Seeds thin, their mean with its interval bold, the control's mean dashed."""
    steps = list(result.curve)
    if control is not None:
        means = [100 * point.mean for point in control.curve.values()]
        axis.plot(list(control.curve), means, "--", color=CONTROL, label=control.name)
    for seed in zip(*result.by_seed.values(), strict=True):
        axis.plot(steps, [100 * value for value in seed], color=CLEAR, linewidth=0.7, alpha=0.6)
    points = list(result.curve.values())
    axis.plot(steps, [100 * point.mean for point in points], "o-", color=CLEAR, markersize=3, linewidth=2)
    low, high = ([100 * getattr(point, end) for point in points] for end in ("low", "high"))
    axis.fill_between(steps, low, high, color=CLEAR, alpha=0.15)
    axis.axhline(100 * result.start.mean, color=CONTROL, linewidth=0.8)
    axis.set_title(result.name, fontsize=10)
    axis.grid(alpha=0.3)
    if control is not None:
        axis.legend(fontsize=7, loc="lower right")


def _rises(axis: Any, results: Sequence[Result]) -> None:
    for place, result in enumerate(results):
        mean, low, high = (100 * getattr(result.rise, name) for name in ("mean", "low", "high"))
        color = CLEAR if result.rises else UNCLEAR
        axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(results)), [result.name for result in results])
    axis.invert_yaxis()
    axis.set_xlabel("rise of the success over the start, points, 95 % interval over seeds and tasks")
    axis.grid(axis="x", alpha=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """What is trained, and on what it is measured."""

    out: Path = Path("runs/learn")
    """Folder of the runs, report.md, learn.png and learn.json."""
    env: str = "alfworld"
    """Embedded world: alfworld, webshop or search."""
    algorithms: tuple[str, ...] = ()
    """Rows of the table (default: all); what they are compared with comes along."""
    seeds: int = 3
    """Runs per row: seeds 0, 1, ...; twice as many of the rows that must rise, whose intervals decide."""
    steps: int | None = None
    """Training steps of every run (default: 24, in the search world 36)."""
    episodes: int | None = None
    """Episodes per training step; whole groups of 8 (default: 64, in the search world 256)."""
    tasks: int = 100
    """Tasks of the panel that are evaluated on."""
    samples: int = 4
    """Episodes per task and evaluation: Avg@n."""
    evaluations: int = 2
    """Evaluations after the one before step 1, evenly spaced; the last is after the last step."""
    parallel: int = 2
    """Runs at a time, one thread each."""
    report: bool = True
    """Write the report; --no-report only trains."""

    def seeds_of(self, row: str) -> range:
        """The seeds of a row of the table."""
        return range(self.seeds * (2 if row in MUST_RISE else 1))

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "episodes", "tasks", "samples", "evaluations", "parallel"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise TurngymError(f"--{name} is {value}; valid: at least 1")


def size_of(options: LearnOptions, world: EmbeddedWorld) -> Size:
    """The sizes that the user gave, or those that suit the world. Raises TurngymError for uneven evaluations."""
    setup = setup_of(world.name)
    steps = options.steps or setup.steps
    if steps % options.evaluations:
        raise TurngymError(f"--steps {steps} cannot be cut into {options.evaluations} equal parts (--evaluations)")
    return Size(
        steps=steps,
        episodes=options.episodes or setup.episodes,
        every=steps // options.evaluations,
        tasks=options.tasks,
        samples=options.samples,
    )


# --- The runs


def main(argv: Sequence[str]) -> int:
    """Run `turngym study learn` with `argv`; status 1 if a row that must rise does not clearly do so."""
    options = tyro.cli(LearnOptions, args=list(argv), prog="turngym study learn", description=__doc__)
    recipes, world = choose(options.algorithms), load_world(options.env)
    if any(recipe.text for recipe in recipes.values()):
        write_text(world, text_file(options, world))
    planned = plan(options, world, recipes)
    Runner(jobs=in_turn(list(planned.values())), parallel=options.parallel).run()
    if not options.report:
        return 0

    return 0 if write_report(options, world, recipes, planned) else 1


def plan(options: LearnOptions, world: EmbeddedWorld, recipes: dict[str, Recipe]) -> dict[str, list[Job]]:
    """Maps rows to one run per seed; the runs that train the rows' starting models come first."""
    setup = setup_of(world.name)
    made: dict[Start, Job] = {}
    if setup.warm and any(recipe.start == "student" for recipe in recipes.values()):
        made["student"] = _start(options, world, "warm", setup.warm)
    if any(recipe.start == "hints" for recipe in recipes.values()):
        made["hints"] = _start(options, world, "hints", setup.hints)
    planned = {job.folder.name: [job] for job in made.values()}
    for name, recipe in recipes.items():
        needs = made.get(recipe.start)
        planned[name] = [_job(options, world, name, recipe, seed, needs) for seed in options.seeds_of(name)]
    return planned


def in_turn(rows: Sequence[Sequence[Job]]) -> list[Job]:
    """All jobs, the first of every row before the second of any."""
    return [jobs[place] for place in range(max(map(len, rows))) for jobs in rows if place < len(jobs)]


def text_file(options: LearnOptions, world: EmbeddedWorld) -> Path:
    """Where the text for L_PT is."""
    return options.out / world.name / "text.txt"


def _job(options: LearnOptions, world: EmbeddedWorld, name: str, recipe: Recipe, seed: int, needs: Job | None) -> Job:
    size = size_of(options, world)
    start = world.checkpoint("student") if needs is None else needs.model
    text = text_file(options, world)
    return Job(
        name=f"{world.name}/{name}/seed{seed}",
        folder=options.out / world.name / f"{name}-seed{seed}",
        words=recipe_words(recipe, world, start=start, size=size, seed=seed, text=text),
        steps=size.steps,
        needs=needs,
        evaluates=True,
        same_start=f"{world.name}/{recipe.start}-seed{seed}",
    )


def _start(options: LearnOptions, world: EmbeddedWorld, name: str, imitation: Imitation) -> Job:
    return imitation_job(imitation, world, name=f"{world.name}/{name}", folder=options.out / world.name / name)


# --- Text for L_PT without a download


def write_text(world: EmbeddedWorld, path: Path, episodes: int = 64, seed: int = 0) -> Path:
    """Lets the expert play `episodes` training tasks of `world` and write them to `path`, unless that exists.

    Blank lines separate documents, so an episode has none within.
    """
    if path.exists():
        return path
    make_env = env_maker(world.env_id, split=world.split, max_turns=world.max_turns, **world.make)
    ids = probe(world.env_id, {"split": world.split, **world.make}).task_ids()
    jobs = [
        RolloutJob(task_id=ids[place % len(ids)], sample=place, group=place, seed=seed) for place in range(episodes)
    ]
    played = rollout(jobs, make_env, ExpertAgent(expert=named_player(world.expert)), max_turns=world.max_turns)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".writing")
    scratch.write_text("\n\n".join(document(episode, world.tags) for episode in played) + "\n", encoding="utf-8")
    return scratch.replace(path)


def document(episode: Episode, tags: Sequence[str] = ("action",)) -> str:
    """The observations and actions of an episode as lines; an action whose tag is its verb already carries it."""
    form = "<action>{}</action>" if "action" in tags else "{}"
    lines = [line for turn in episode.turns for line in (turn.observation, form.format(turn.action))]
    return re.sub(r"\n\s*\n", "\n", "\n".join([*lines, episode.final_observation or ""])).strip()


# --- The report


def write_report(
    options: LearnOptions, world: EmbeddedWorld, recipes: Mapping[str, Recipe], planned: Mapping[str, Sequence[Job]]
) -> bool:
    """Print the table, write report.md, learn.json and learn.png; whether all rows that must rise do so."""
    results: dict[str, Result] = {}
    for name, recipe in recipes.items():
        results[name] = read_result(name, recipe, planned[name], results)
    text = render(options, world, results, planned)
    print(text)
    folder = options.out / world.name
    (folder / "report.md").write_text(text, encoding="utf-8")
    rows_json = {name: result.to_json() for name, result in results.items()}
    settings = {**asdict(options), **asdict(size_of(options, world)), "out": str(options.out)}
    found = json.dumps({"settings": settings, "rows": rows_json}, indent=1)
    (folder / "learn.json").write_text(found + "\n", encoding="utf-8")
    print(f"figure: {draw_figure(list(results.values()), folder / 'learn.png', options.samples)}")
    return all(results[name].rises for name in MUST_RISE if name in results)


def render(
    options: LearnOptions, world: EmbeddedWorld, results: Mapping[str, Result], planned: Mapping[str, Sequence[Job]]
) -> str:
    """The report in Markdown."""
    size = size_of(options, world)
    opening = (
        f"{world.name}, panel `{world.panel}` (first {options.tasks} tasks), {size.steps} steps of "
        f"{size.episodes} episodes. Avg@{options.samples} in percent at temperature 0.85, 95 % intervals over seeds "
        "and tasks."
    )
    lines = [f"- `{name}`: {curve_text(result)}" for name, result in results.items()]
    commands = [f"{name}:\n```bash\n{planned[name][0].command}\n```" for name in planned]
    parts = [f"# Does it learn? ({world.name})", opening, markdown(table(results, options.samples)), NOTE]
    parts += ["![Curves and rises](learn.png)", "## Curves", "\n".join(lines), "## Commands (seed 0)", *commands]
    return "\n\n".join(parts) + "\n"


NOTE = (
    "The rise is end minus start, paired by seed and task. Intervals treat seeds and tasks as crossed random effects: "
    "m ± t √(A + B), A the variance of the seeds' means over the number of seeds, B that of the tasks' means over the "
    "number of tasks, degrees of freedom by Satterthwaite. With one seed they are over tasks only."
)


def table(results: Mapping[str, Result], samples: int) -> tuple[list[str], list[list[str]]]:
    """One row per algorithm."""
    avg = f"Avg@{samples}"
    header = ["algorithm", "seeds", f"start {avg}", f"end {avg} [95 %]", "rise [95 %]", "clear of zero"]
    header += ["against", "end minus control's [95 %]", "training of a run"]
    body = []
    for name, result in results.items():
        clear = "yes" if result.rises else "falls" if result.rise.high < 0 else "no"
        against = ["start", ""] if result.against is None else [str(result.control), signed(result.against)]
        body.append(
            [f"`{name}`", str(result.seeds), str(result.start), str(result.end), signed(result.rise), clear, *against]
        )
        body[-1].append(f"{result.seconds:.0f} s")
    return header, body


def signed(interval: Interval) -> str:
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def curve_text(result: Result) -> str:
    """`30.2 (step 0) -> 35.1 (20) -> 39.0 (40); seeds end at 38.5, 40.0`."""
    points = " -> ".join(f"{100 * value.mean:.1f} (step {step})" for step, value in result.curve.items())
    ends = ", ".join(f"{100 * value:.1f}" for value in result.by_seed[max(result.by_seed)])
    return f"{points}; seeds end at {ends}"

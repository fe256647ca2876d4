"""Does it learn? Every algorithm from a tiny student in a generated world: Avg@n before, during and after, by seed.

Each run is a `turngym train` in a process of its own. Runs that are finished are kept, so that the same command goes on
where it stopped, and adds what is new when it asks for more algorithms or seeds. Ends with a table, a figure and the
numbers as JSON.

Examples:
    turngym study learn
    turngym study learn --algorithms grpo luffy prm-rl opd-hints --seeds 3 --env webshop
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro

from turngym.agents.playing.environments import env_maker, probe
from turngym.agents.playing.rollout import Job as RolloutJob
from turngym.agents.playing.rollout import rollout
from turngym.agents.playing.scripted import ExpertAgent, named_player
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError, checked_int
from turngym.envs.core.tables import atomic_write, markdown
from turngym.scripts.jobs import Job
from turngym.scripts.study.grid import Cell, in_turn, run_cells
from turngym.scripts.study.learn_recipes import (
    MUST_RISE,
    Recipe,
    Size,
    Start,
    choose,
    imitation_job,
    recipe_cell,
    setup_of,
)
from turngym.scripts.study.rows import NOTE, Result, curve_text, read_result, table, write_files


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
    run: bool = True
    """Train what is missing; --no-run reports what is there."""

    def seeds_of(self, row: str) -> range:
        """The seeds of a row of the table."""
        return range(self.seeds * (2 if row in MUST_RISE else 1))

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "episodes", "tasks", "samples", "evaluations", "parallel"):
            if (value := getattr(self, name)) is not None:
                checked_int(f"--{name}", value, 1)


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
    starts, cells = plan(options, world, recipes)
    if options.run:
        if any(recipe.text for recipe in recipes.values()):
            write_text(world, text_file(options, world))
        run_cells(in_turn([*([start] for start in starts.values()), *cells.values()]), options.parallel)
    results: dict[str, Result] = {}
    for name, recipe in recipes.items():
        if done := [cell for cell in cells[name] if cell.finished]:
            results[name] = read_result(name, done, results.get(recipe.control or ""))
    if not results:
        raise TurngymError(f"no run in {options.out / world.name} is done: there is nothing to report")
    settings = {**asdict(options), **asdict(size_of(options, world)), "out": str(options.out)}
    write_files(
        options.out / world.name,
        ("report.md", "learn.json", "learn.png"),
        render(options, world, results, starts),
        {"settings": settings, "rows": {name: result.to_json() for name, result in results.items()}},
        list(results.values()),
        options.samples,
    )
    return 0 if all(results[name].rises for name in MUST_RISE if name in results) else 1


def plan(
    options: LearnOptions, world: EmbeddedWorld, recipes: Mapping[str, Recipe]
) -> tuple[dict[Start, Job], dict[str, list[Cell]]]:
    """The runs that train starting models, and of each row its cells, one per seed."""
    setup, size, folder = setup_of(world.name), size_of(options, world), options.out / world.name
    wanted = {recipe.start for recipe in recipes.values()}
    starts: dict[Start, Job] = {}
    if setup.warm and "student" in wanted:
        starts["student"] = imitation_job(setup.warm, world, folder / "warm")
    if "hints" in wanted:
        starts["hints"] = imitation_job(setup.hints, world, folder / "hints")
    cells = {
        name: [
            recipe_cell(
                replace(recipe, name=name),
                world,
                folder / f"{name}-seed{seed}",
                size=size,
                seed=seed,
                start=starts.get(recipe.start),
                text=text_file(options, world),
            )
            for seed in options.seeds_of(name)
        ]
        for name, recipe in recipes.items()
    }
    return starts, cells


def text_file(options: LearnOptions, world: EmbeddedWorld) -> Path:
    """Where the text for L_PT is."""
    return options.out / world.name / "text.txt"


# --- Text for L_PT without a download


def write_text(world: EmbeddedWorld, path: Path, episodes: int = 64) -> Path:
    """Lets the expert play `episodes` training tasks of `world` and write them to `path`, unless that exists.

    Blank lines separate documents, so an episode has none within.
    """
    if path.exists():
        return path
    make_env = env_maker(world.env_id, split=world.split, max_turns=world.max_turns, **world.make)
    ids = probe(world.env_id, {"split": world.split, **world.make}).task_ids()
    jobs = [RolloutJob(task_id=ids[place % len(ids)], sample=place, group=place) for place in range(episodes)]
    played = rollout(jobs, make_env, ExpertAgent(expert=named_player(world.expert)), max_turns=world.max_turns)
    with atomic_write(path) as file:
        file.write("\n\n".join(document(episode, world.tags) for episode in played) + "\n")
    return path


def document(episode: Episode, tags: Sequence[str] = ("action",)) -> str:
    """The observations and actions of an episode as lines; an action whose tag is its verb already carries it."""
    form = "<action>{}</action>" if "action" in tags else "{}"
    lines = [line for turn in episode.turns for line in (turn.observation, form.format(turn.action))]
    return re.sub(r"\n\s*\n", "\n", "\n".join([*lines, episode.final_observation or ""])).strip()


# --- The report


def render(
    options: LearnOptions, world: EmbeddedWorld, results: Mapping[str, Result], starts: Mapping[Start, Job]
) -> str:
    """The report in Markdown."""
    size = size_of(options, world)
    opening = (
        f"{world.name}, panel `{world.panel}` (first {options.tasks} tasks), {size.steps} steps of "
        f"{size.episodes} episodes. Avg@{options.samples} in percent at temperature 0.85, 95 % intervals over seeds "
        "and tasks."
    )
    lines = [f"- `{name}`: {curve_text(result)}" for name, result in results.items()]
    said = {job.folder.name: job.command for job in starts.values()}
    said |= {name: result.commands[0] for name, result in results.items()}
    commands = [f"{name}:\n```bash\n{command}\n```" for name, command in said.items()]
    parts = [f"# Does it learn? ({world.name})", opening, markdown(table(results, options.samples)), NOTE]
    parts += ["![Curves and rises](learn.png)", "## Curves", "\n".join(lines), "## Commands (seed 0)", *commands]
    return "\n\n".join(parts) + "\n"

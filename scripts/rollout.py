"""Play episodes of any environment with any agent and write them as a trace.

Examples:
    turngym rollout --agent expert --noise 0.3 --tasks 100 --out expert.jsonl
    turngym rollout --agent model:runs/student --split valid_seen --data ~/alfworld --out student.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from turngym.agents.environments import EnvOptions, env_maker, probe
from turngym.agents.evaluation.scores import score
from turngym.agents.evaluation.tables import behavior_table, columns, print_table, progress_bar, success_table
from turngym.agents.executor.open_workers import WorkerOptions, open_workers
from turngym.agents.open_agent import AgentOptions, open_agent
from turngym.agents.rollout import Job
from turngym.agents.sglang.options import PolicyServer
from turngym.envs.core import TurngymError
from turngym.envs.trace import TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which episodes are played, and where they go."""

    out: Path
    """Trace file (JSON lines). An existing file is refused unless --append."""
    append: bool = False
    """Add to an existing trace; episodes that it holds (task, sample, seed) are not played again."""
    world: Annotated[EnvOptions, tyro.conf.arg(name="")] = field(default_factory=EnvOptions)
    player: Annotated[AgentOptions, tyro.conf.arg(name="")] = field(default_factory=AgentOptions)
    workers: Annotated[WorkerOptions, tyro.conf.arg(name="")] = field(default_factory=WorkerOptions)
    servers: Annotated[PolicyServer, tyro.conf.arg(name="")] = field(default_factory=PolicyServer)
    task: tuple[str, ...] = ()
    """Task ids; by default --tasks of them are taken."""
    tasks: int = 10
    """How many tasks, if none are named."""
    draw: bool = False
    """Draw the tasks with --seed instead of taking the first ones."""
    samples: int = 1
    """Episodes per task."""
    seed: int = 0
    """Same seed, same episodes, whatever the batch."""
    depth: int | None = None
    """End every episode after so many turns as `truncated_depth`."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym rollout` with `argv`; status 1 if episodes ended in errors."""
    options = tyro.cli(Options, args=list(argv), prog="turngym rollout", description=(__doc__ or "").split("\n")[0])
    done = _held(options)
    bare = env_maker(options.world.env, **options.world.kwargs())
    ids = options.task or _choose(bare, options)
    jobs = [
        Job(task_id=task_id, sample=sample, group=group, seed=options.seed)
        for sample in range(options.samples)
        for group, task_id in enumerate(ids)
        if (task_id, sample, options.seed) not in done
    ]
    wired = open_agent(options.player, lambda: probe(options.world.env, options.world.kwargs()), options.servers)
    make = env_maker(options.world.env, **options.world.kwargs(), channel=wired.channel)
    meta = {"temperature": wired.temperature}
    with (
        open_workers(options.workers) as play,
        TraceWriter(options.out) as writer,
        progress_bar("rollout", len(jobs)) as report,
    ):

        def keep(episode: Any) -> None:
            writer.write(episode)
            report(episode)

        episodes = play(
            jobs,
            make,
            wired.agent,
            slots=options.player.slots,
            max_turns=options.depth,
            on_episode=keep,
            system=wired.system,
            meta=meta,
        )
    errors = sum(episode.status.is_error for episode in episodes)
    if errors < len(episodes):
        scores = {wired.agent.name: score(episodes)}
        print_table(columns(success_table(scores), behavior_table(scores)))
    print(f"{len(episodes)} episodes in {options.out}" + (f", {errors} of them ended in errors" if errors else ""))
    return 1 if errors else 0


def _held(options: Options) -> set[tuple[str, int, int]]:
    """(task id, sample, seed) of the episodes in the trace that is added to."""
    if not options.out.exists():
        return set()
    if not options.append:
        raise TurngymError(f"{options.out} exists: add to it with --append, or name another file")
    from turngym.envs.trace import read_trace

    episodes = read_trace(options.out)[0]
    return {(e.task.task_id, e.sample, e.seed) for e in episodes if not e.status.is_error}


def _choose(make: Callable[[], Any], options: Options) -> list[str]:
    ids = _peek(make, "task_ids")()
    if not 1 <= options.tasks <= len(ids):
        raise TurngymError(f"--tasks {options.tasks}: the environment has {len(ids)} tasks; take 1 to {len(ids)}")
    if not options.draw:
        return [ids[place] for place in range(options.tasks)]
    places = np.random.default_rng(options.seed).choice(len(ids), options.tasks, replace=False)
    return [ids[int(place)] for place in places]


def _peek(make: Callable[[], Any], name: str) -> Any:
    env = make()
    try:
        return getattr(env.unwrapped, name)
    finally:
        env.close()

"""Play episodes of any environment with any agent and write them as a trace.

Examples:
    turngym rollout --agent expert --noise 0.3 --tasks 100 --out expert.jsonl
    turngym rollout --agent model:runs/student --split valid_seen --data ~/alfworld --out student.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from turngym.agents.agent_options import AgentOptions, settings_of
from turngym.agents.evaluation.play_episodes import play_episodes
from turngym.agents.executor.worker_count import WorkerOptions
from turngym.agents.playing.env_maker import EnvOptions
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.settings import Count, Length, Needs, Seed
from turngym.core.tables import print_table
from turngym.scripts.command_line import SERVED, list_presets, parse, say_channel


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Which episodes are played, and where they go."""

    out: Path | None = None
    """Trace file (JSON lines); without it only the table is shown. An existing file is refused unless --append."""
    append: bool = False
    """Add to an existing trace; episodes that it holds (task, sample, seed) are not played again."""
    world: Annotated[EnvOptions, tyro.conf.arg(name="")] = field(default_factory=EnvOptions)
    preset: str | None = None
    """A published set-up by name (turnopd, verl-agent, react, search-r1); `--preset list` shows what they set. Options
    that are given beside it take the place of its values."""
    player: Annotated[AgentOptions, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes] = field(
        default_factory=AgentOptions
    )
    servers: Annotated[PolicyServer, tyro.conf.arg(name="")] = field(default_factory=PolicyServer)
    workers: Annotated[WorkerOptions, tyro.conf.arg(name="")] = field(default_factory=WorkerOptions)
    task: tuple[str, ...] = ()
    """Task ids; by default --tasks of them are taken."""
    tasks: Count = 10
    """How many tasks, if none are named."""
    draw: bool = False
    """Draw the tasks with --seed instead of taking the first ones."""
    samples: Count = 1
    """Episodes per task."""
    seed: Seed = 0
    """Same seed, same episodes, whatever --slots and --workers."""
    depth: Length | None = None
    """End every episode after so many turns as `truncated_depth`."""
    needs: ClassVar[Needs] = (
        (("append",), "--out", lambda options: options.out is not None),
        (("tasks", "draw"), "the environment's tasks (no --task)", lambda options: not options.task),
        *SERVED,
    )


def main(argv: Sequence[str]) -> int:
    """Run `turngym rollout` with `argv`; status 1 if episodes ended in errors."""
    if list_presets(argv):
        return 0
    description = (__doc__ or "").split("\n")[0]
    options = parse(RolloutOptions, argv, prog="turngym rollout", description=description)
    say_channel(options.player)
    played = play_episodes(
        options.world.env,
        options.player.agent,
        preset=options.preset,
        tasks=options.task or options.tasks,
        draw=options.draw,
        samples=options.samples,
        seed=options.seed,
        depth=options.depth,
        temperature=options.player.temperature,
        slots=options.player.slots,
        out=options.out,
        append=options.append,
        env_kwargs=options.world.kwargs(),
        workers=options.workers,
        servers=options.servers,
        command=("turngym", "rollout", *argv),
        **settings_of(options.player),
    )
    table = played.table()
    if table is not None:
        print_table(table)
    print(played.summary)
    return 1 if played.errors else 0

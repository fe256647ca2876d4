"""Play an environment yourself in the terminal; the episode can be kept as a trace.

Examples:
    turngym play
    turngym play --split valid_unseen --data ~/alfworld --out mine.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import HumanAgent
from turngym.agents.resolve_play import OneGame, resolve_game
from turngym.core.episode import Episode, Status
from turngym.core.files import locked_file
from turngym.core.numbers import Seed
from turngym.core.settings import whole_toml
from turngym.core.spec import Spec
from turngym.core.trace import TraceWriter
from turngym.envs.base import tasks_of
from turngym.scripts.options import Verb


class PlayOptions(Spec):
    """One episode, played by you."""

    task: str | None = None
    """Task id; by default one is drawn with --seed."""
    seed: Seed = 0
    """Draws the task."""
    out: Path | None = None
    """Trace file to which the episode is appended."""


VERB: Verb[PlayOptions] = Verb(
    name="turngym play",
    about=__doc__ or "",
    own=PlayOptions,
    spec=OneGame,
    first=(
        *("env", "split", "data", "task", "seed", "out", "max_turns", "on_invalid", "show_admissible"),
        "env_kwargs",
    ),
)


def main(argv: Sequence[str], ask: Callable[[], str] | None = None) -> int:
    """Run `turngym play` with `argv`; `ask` replaces the keyboard."""
    from rich.console import Console
    from rich.text import Text

    line = VERB.asked(argv)
    options, resolved = line.own, resolve_game(line.layers)
    if line.show:
        print(whole_toml(resolved), end="")
        return 0
    console = Console(highlight=False)
    styles = {"observation": "bold", "note": "dim italic", "list": "cyan"}

    def say(text: str, kind: str) -> None:
        console.print(Text(text, style=styles[kind]))

    make = env_maker(resolved.spec.play.env.id, **resolved.spec.made)
    task_id = options.task or _draw(make, options.seed)
    say(f"Task {task_id}", "note")
    agent = HumanAgent(ask or (lambda: console.input("[green]> [/green]")), say)
    episode = rollout([Job(task_id=task_id, seed=options.seed)], make, agent, slots=1)[0]
    if "error" not in episode.meta:
        say(episode.final_observation, "observation")
    say(_summary(episode), "note")
    if options.out is not None:
        with locked_file(options.out), TraceWriter(options.out) as writer:
            writer.write(episode)
        say(f"kept in {options.out}", "note")
    return 0


def _draw(make: Callable[..., object], seed: int) -> str:
    env = make()
    try:
        ids = tasks_of(env.unwrapped)  # type: ignore[attr-defined]
        return str(ids[int(np.random.default_rng(seed).integers(len(ids)))])
    finally:
        env.close()  # type: ignore[attr-defined]


def _summary(episode: Episode) -> str:
    invalid = sum(not turn.verdict.valid for turn in episode.turns)
    end = "solved" if episode.success else "not solved"
    ending = "" if episode.status is Status.COMPLETED else f" ({episode.meta.get('error', episode.status.value)})"
    return f"{end}{ending} in {episode.depth} turns, {invalid} of them invalid"

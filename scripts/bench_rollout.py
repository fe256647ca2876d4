"""Measures rollouts of the embedded household: speed by environments side by side, turns, engine and processes.

By wall clock: tokens and turns per second, and the share of the time that is spent in environments.

Examples:
    turngym bench rollout
    turngym bench rollout --episodes 128 --slots 1 8 32 --workers 1 2 4
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from turngym.agents.playing.rollout import Job, PlayJobs, rollout
from turngym.agents.worlds.built_in import HOUSEHOLD
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import checked_int
from turngym.envs.core.protocols import Sampling
from turngym.envs.core.tables import print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """Rollouts of the embedded household with the shipped student. Each row plays the same episodes."""

    model: Path = CHECKPOINTS / "alfworld" / "student"
    """Folder of the model that plays."""
    episodes: int = 32
    """Episodes of a row."""
    slots: tuple[int, ...] = (1, 8, 32)
    """Environments played side by side."""
    depths: tuple[int, ...] = (6, 24)
    """Turns after which episodes are cut: short and long histories."""
    workers: tuple[int, ...] = (1, 2)
    """Processes of the rows with workers."""
    recompute: bool = True
    """Also without keys and values kept across turns, each turn feeding its whole history."""
    repeats: int = 2
    """Each row is played so many times and its fastest time taken."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        for name in ("episodes", "repeats", "threads"):
            checked_int(f"--{name}", getattr(self, name), 1)


HEADER = ["engine", "environments", "turns <=", "history ids", "tokens/s", "turns/s", "environment", "turns/s ratio"]


def played_row(
    name: str, slots: int, depth: int, seconds: float, episodes: Sequence[Episode], base: float | None, workers: int = 1
) -> tuple[list[str], float]:
    """A line of the table and its turns per second; `base` are those of the first line (None: this is it)."""
    turns = [turn for episode in episodes for turn in episode.turns]
    tokens, speed = sum(turn.response_length for turn in turns), len(turns) / seconds
    history = np.mean([episode.turns[-1].prompt_span[1] for episode in episodes if episode.turns] or [0])
    envs = sum(episode.timings.get("env", 0.0) for episode in episodes) / (seconds * workers)
    cells = [f"{history:.0f}", f"{tokens / seconds:.0f}"] if tokens else ["-", "-"]
    ratio = f"{speed / (base or speed):.2f}x"
    return [name, str(slots), str(depth), *cells, f"{speed:.0f}", f"{100 * envs:.0f} %", ratio], speed


def run(bench: RolloutBench) -> list[list[str]]:
    """Measures every row; the first is the reference: all environments, all turns, keys and values kept."""
    from turngym.agents.executor.parallel import ParallelRollout
    from turngym.agents.executor.processes import LocalWorkers
    from turngym.agents.playing.scripted import ExpertAgent

    make_env, agent, system = _players(bench)
    env = make_env()
    ids = list(env.unwrapped.task_ids()[: bench.episodes])
    env.close()
    jobs = [Job(task_id=ids[n % len(ids)], sample=n // len(ids), group=n) for n in range(bench.episodes)]
    rows: list[list[str]] = []
    base: float | None = None

    def measure(
        name: str, player: Any, slots: int, depth: int, play: PlayJobs = rollout, workers: int = 1
    ) -> list[Episode]:
        """Plays the jobs, the fastest of `repeats` times counts; adds the row."""
        nonlocal base
        best, episodes = float("inf"), []
        for _ in range(bench.repeats):
            start = time.perf_counter()
            played = play(jobs, make_env, player, slots=slots, max_turns=depth, system=system)
            if (seconds := time.perf_counter() - start) < best:
                best, episodes = seconds, played
        row, speed = played_row(name, slots, depth, best, episodes, base, workers)
        base = base or speed
        rows.append(row)
        print(f"  {name}, {slots} environments, {depth} turns: {best:.2f} s", flush=True)
        return episodes

    slots, depth, kept = max(bench.slots), max(bench.depths), "kept keys and values"
    expected = measure(kept, agent("ragged"), slots, depth)
    for fewer in sorted(set(bench.slots) - {slots}, reverse=True):
        measure(kept, agent("ragged"), fewer, depth)
    for shorter in sorted(set(bench.depths) - {depth}, reverse=True):
        measure(kept, agent("ragged"), slots, shorter)
    if bench.recompute:
        measure("recompute", agent("recompute"), slots, depth)
    measure("expert (no model)", ExpertAgent(), slots, depth)
    for count in bench.workers:
        with ExitStack() as stack:
            play = ParallelRollout(LocalWorkers(count, threads=bench.threads))
            stack.callback(play.close)
            player = agent("ragged")
            # the processes start, and get the model, before the time is taken
            play(jobs[:count], make_env, player, slots=slots, max_turns=1, system=system)
            found = measure(f"{count} processes", player, slots, depth, play, count)
            same = sum(
                [ids.tolist() for ids in one.segments] == [ids.tolist() for ids in other.segments]
                for one, other in zip(found, expected, strict=True)
            )
            print(f"  {same} of {len(expected)} episodes have the ids of this process's", flush=True)
    return rows


def _players(bench: RolloutBench) -> tuple[Any, Callable[[Any], Any], str | None]:
    """Returns a maker of environments, a maker of agents by the engine's cache, and the system prompt."""
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.model_agent import ModelAgent
    from turngym.agents.models import load_policy
    from turngym.agents.playing.environments import env_maker, probe
    from turngym.agents.rendering.chat_settings import ChatSettings, renderer_of
    from turngym.envs.channels import make_channel

    settings = ChatSettings.load(bench.model)
    kwargs = {"split": HOUSEHOLD.split, "max_turns": HOUSEHOLD.max_turns, **HOUSEHOLD.make}
    tool = probe(HOUSEHOLD.env_id, kwargs).tool
    model, tokenizer = load_policy(str(bench.model), "auto", "float32")
    renderer = renderer_of(model, tokenizer, settings, tool)

    def agent(cache: Any) -> ModelAgent:
        policy = LocalEngine(
            model, cache=cache, tokenizer=tokenizer, max_length=settings.max_context, max_batch=max(bench.slots)
        )
        sampling = Sampling(max_new_tokens=settings.max_new_tokens)
        channel = make_channel(settings.channel, tool)
        return ModelAgent(policy, renderer, channel, sampling, max_context=settings.max_context)

    return env_maker(HOUSEHOLD.env_id, **kwargs, channel=settings.channel), agent, settings.system


def main(argv: Sequence[str]) -> int:
    """Runs `turngym bench rollout`."""
    bench = tyro.cli(RolloutBench, args=list(argv), prog="turngym bench rollout", description=__doc__)
    import torch

    torch.set_num_threads(bench.threads)
    print(f"rollouts of {bench.episodes} episodes, wall clock:", flush=True)
    print_table((HEADER, run(bench)))
    return 0

"""Whole rollouts: tokens per second by number of environments, length of history, engine and number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.playing.rollout import Job, PlayJobs, rollout
from turngym.agents.worlds.alfworld import WORLD
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.envs.core.episode import Episode
from turngym.envs.core.tables import print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayBench:
    """Rollouts of the embedded household with the shipped student. Each row plays the same episodes."""

    model: Path = CHECKPOINTS / "alfworld" / "student"
    """Folder of the model that plays."""
    episodes: int = 32
    """Episodes of a row; 0 leaves this part out."""
    slots: tuple[int, ...] = (1, 8, 32)
    """Environments played side by side."""
    depths: tuple[int, ...] = (6, 24)
    """Turns after which episodes are cut: short and long histories."""
    workers: tuple[int, ...] = (1, 2)
    """Processes of the rows with workers."""
    recompute: bool = True
    """Also without keys and values kept across turns, each turn feeding its whole history."""
    policy_server: str = ""
    """Address of an SGLang server with the same model, for a row of its own."""
    repeats: int = 2
    """Each row is played so many times and its fastest time taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedWay:
    """One way to play; the times are of its fastest run."""

    name: str
    slots: int
    depth: int
    workers: int
    seconds: float
    """Wall clock."""
    tokens: int
    """Sampled by the model."""
    turns: int
    history: float
    """Ids that the last turn of an episode had before it, mean over episodes."""
    env_seconds: float
    """Inside environments, summed over workers."""

    @property
    def env_share(self) -> float:
        """Of the wall clock of all who played, in [0, 1]."""
        return self.env_seconds / (self.seconds * max(self.workers, 1))

    def cells(self, base: PlayedWay) -> list[str]:
        speed = self.tokens / self.seconds if self.tokens else None
        return [
            self.name,
            str(self.slots),
            str(self.depth),
            f"{self.history:.0f}" if self.tokens else "-",
            "-" if speed is None else f"{speed:.0f}",
            f"{self.turns / self.seconds:.0f}",
            f"{100 * self.env_share:.0f} %",
            f"{base.seconds / self.seconds * self.turns / base.turns:.2f}x",
        ]


HEADER = ["engine", "environments", "turns <=", "history ids", "tokens/s", "turns/s", "environment", "turns/s ratio"]


@dataclass(slots=True)
class Stage:
    """Where the rows are played."""

    bench: PlayBench
    make_env: Any
    jobs: Sequence[Job]
    system: str | None
    rows: list[PlayedWay] = field(default_factory=list)

    def measure(
        self, name: str, agent: Any, slots: int, depth: int, *, play: PlayJobs = rollout, workers: int = 0
    ) -> list[Episode]:
        """Play the jobs; adds a row and returns the episodes."""
        best, episodes = float("inf"), []
        for _ in range(self.bench.repeats):
            start = time.perf_counter()
            played = play(self.jobs, self.make_env, agent, slots=slots, max_turns=depth, system=self.system)
            seconds = time.perf_counter() - start
            if seconds < best:
                best, episodes = seconds, played
        turns = [turn for episode in episodes for turn in episode.turns]
        lasts = [episode.turns[-1].prompt_span[1] for episode in episodes if episode.turns]
        row = PlayedWay(
            name=name,
            slots=slots,
            depth=depth,
            workers=workers,
            seconds=best,
            tokens=sum(turn.response_length for turn in turns),
            turns=len(turns),
            history=sum(lasts) / max(len(lasts), 1),
            env_seconds=sum(episode.timings.get("env", 0.0) for episode in episodes),
        )
        self.rows.append(row)
        print(f"  {name}, {slots} environments, {depth} turns: {best:.2f} s", flush=True)
        return episodes


def run(bench: PlayBench, threads: int) -> list[PlayedWay]:
    """Every row: the reference first (all environments, all turns, keys and values kept)."""
    from turngym.agents.executor.parallel import ParallelRollout
    from turngym.agents.executor.processes import LocalWorkers
    from turngym.agents.playing.scripted import ExpertAgent

    make_env, agents, system = _players(bench)
    env = make_env()
    ids = list(env.unwrapped.task_ids()[: bench.episodes])
    env.close()
    jobs = [Job(task_id=ids[n % len(ids)], sample=n // len(ids), group=n) for n in range(bench.episodes)]
    stage = Stage(bench, make_env, jobs, system)
    slots, depth = max(bench.slots), max(bench.depths)
    expected = stage.measure("kept keys and values", agents["kept"](), slots, depth)
    for fewer in sorted(set(bench.slots) - {slots}, reverse=True):
        stage.measure("kept keys and values", agents["kept"](), fewer, depth)
    for shorter in sorted(set(bench.depths) - {depth}, reverse=True):
        stage.measure("kept keys and values", agents["kept"](), slots, shorter)
    for name in ("recompute", "server"):
        if name in agents:
            stage.measure(name, agents[name](), slots, depth)
    stage.measure("expert (no model)", ExpertAgent(), slots, depth)
    for count in bench.workers:
        with ExitStack() as stack:
            play = ParallelRollout(LocalWorkers(count, threads=threads))
            stack.callback(play.close)
            agent = agents["kept"]()
            play(
                jobs[:count], make_env, agent, slots=slots, max_turns=1, system=system
            )  # they start, and get the model
            found = stage.measure(f"{count} processes", agent, slots, depth, play=play, workers=count)
            _check_same(found, expected)
    return stage.rows


def _players(bench: PlayBench) -> tuple[Any, dict[str, Callable[[], Any]], str | None]:
    """Environments, and agents by the name of their engine."""
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.model_agent import ModelAgent
    from turngym.agents.models import load_policy, renderer_of
    from turngym.agents.playing.environments import env_maker, probe
    from turngym.agents.rendering.chat_settings import ChatSettings
    from turngym.envs.channels import make_channel
    from turngym.envs.core.protocols import Policy, Sampling

    settings = ChatSettings.load(bench.model)
    kwargs = {"split": WORLD.split, "max_turns": WORLD.max_turns, **WORLD.make}
    tool = probe(WORLD.env_id, kwargs).tool
    model, tokenizer = load_policy(str(bench.model), "auto", "float32")
    renderer = renderer_of(model, tokenizer, settings, tool)

    def agent(policy: Policy) -> ModelAgent:
        sampling = Sampling(max_new_tokens=settings.max_new_tokens)
        channel = make_channel(settings.channel, tool)
        return ModelAgent(policy, renderer, channel, sampling, max_context=settings.max_context)

    def local(cache: Any) -> Callable[[], ModelAgent]:
        options = {"tokenizer": tokenizer, "max_length": settings.max_context, "max_batch": max(bench.slots)}
        return lambda: agent(LocalEngine(model, cache=cache, **options))

    agents: dict[str, Callable[[], Any]] = {"kept": local("ragged")}
    if bench.recompute:
        agents["recompute"] = local("recompute")
    if bench.policy_server:
        from turngym.agents.sglang.client import PolicyServer
        from turngym.agents.sglang.open_servers import eval_policy

        servers = PolicyServer(policy_server=bench.policy_server)
        agents["server"] = lambda: agent(eval_policy(servers, bench.model, tokenizer, settings.max_context))
    return env_maker(WORLD.env_id, **kwargs, channel=settings.channel), agents, settings.system


def _check_same(found: Sequence[Episode], expected: Sequence[Episode]) -> None:
    same = sum(
        [ids.tolist() for ids in a.segments] == [ids.tolist() for ids in b.segments]
        for a, b in zip(found, expected, strict=True)
    )
    print(f"  {same} of {len(expected)} episodes have the ids of this process's", flush=True)


def report(rows: Sequence[PlayedWay]) -> None:
    """The table; ratios are to its first row."""
    print_table((HEADER, [row.cells(rows[0]) for row in rows]))

"""How episodes of any environment are played with any agent and kept as a trace (`turngym rollout`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from turngym.agents.agent_options import AgentSettings, check_call
from turngym.agents.endpoint.usage import usage_of, usage_table
from turngym.agents.evaluation.evaluation_setup import keep_settings, prepare
from turngym.agents.evaluation.original import departs_line
from turngym.agents.evaluation.results import DEPARTS
from turngym.agents.evaluation.scores import behavior_table, hints, score, success_table
from turngym.agents.executor.worker_count import WorkerOptions
from turngym.agents.executor.workers import open_workers
from turngym.agents.named_agent import OpenedAgent
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.rollout import FailureWatch, Job
from turngym.agents.presets import Preset, preset_name
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.files import locked_file
from turngym.core.progress import progress_bar
from turngym.core.tables import Table, columns, table_text
from turngym.core.trace import TraceWriter, iter_episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisodes:
    """The result of `play_episodes`."""

    episodes: tuple[Episode, ...]
    """Sample by sample, tasks in order; episodes that the trace already held are not included."""
    agent: str
    """Name of the agent."""
    out: Path | None = None
    """The trace."""
    chat: str = ""
    """The chat settings of a model in one line; empty for other agents."""
    channel: str | None = None
    """How the agent writes actions; None for bare ones."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""
    departs: str = ""
    """One line that says in what this is not the original's protocol; empty where no original is known."""

    @property
    def errors(self) -> int:
        """Episodes that ended in an error; they do not count in the table."""
        return sum(episode.status.is_error for episode in self.episodes)

    def table(self) -> Table | None:
        """Success and behavior; None if every episode ended in an error."""
        if self.errors == len(self.episodes):
            return None
        scores = {self.agent: score(self.episodes)}
        return columns(success_table(scores), behavior_table(scores), *usage_table(scores, usage_of(self.episodes)))

    @property
    def summary(self) -> str:
        """Number of episodes and their trace; then what may help where answers were cut or could not be read."""
        where = "" if self.out is None else f" in {self.out}"
        errors = f", {self.errors} of them ended in errors" if self.errors else ""
        chat = f"\n{self.chat}" if self.chat else ""
        chat = (f"\n{self.departs}" if self.departs else "") + chat
        played = [episode for episode in self.episodes if not episode.status.is_error]
        said = hints(score(played), played, self.channel, self.made) if played else []
        return "\n".join((f"{len(self.episodes)} episodes{where}{errors}{chat}", *said))

    def __str__(self) -> str:
        table = self.table()
        return ("" if table is None else table_text(table)) + self.summary


def play_episodes(
    env: str = "turngym/ALFWorld-v0",
    agent: str | Agent | OpenedAgent = "expert",
    *,
    preset: str | Preset | None = None,
    tasks: int | Sequence[str] = 10,
    draw: bool = False,
    samples: int = 1,
    seed: int = 0,
    depth: int | None = None,
    temperature: float | None = None,
    slots: int = 64,
    out: str | Path | None = None,
    append: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
    workers: int | Literal["auto"] | WorkerOptions = "auto",
    servers: PolicyServer | None = None,
    progress: bool = True,
    command: str | Sequence[str] = "turngym.agents.play_episodes",
    **settings: Unpack[AgentSettings],
) -> PlayedEpisodes:
    """Play tasks of `env` with `agent`, as `turngym rollout` does.

    Args:
        env: Gymnasium id; `package:namespace/Name-v0` imports `package` first.
        agent: a name as on the command line, or an agent object; see `evaluate`.
        preset: a published set-up of `env`, by name; see `evaluate`.
        tasks: the number of tasks, or task ids.
        draw: draw the tasks with `seed` instead of taking the first ones.
        samples: episodes per task.
        seed: the same seed gives the same episodes for any `slots` and `workers`.
        depth: end every episode after this many turns as `truncated_depth`.
        temperature: at which a model samples; 0 is greedy. By default the preset's, else 0.85.
        slots: episodes played, and requests generated, at a time.
        out: trace file (JSON lines), with the settings beside it in NAME.config.toml (which `turngym rollout --config`
            reads); an existing file is refused unless `append`.
        append: add to an existing trace; episodes that it holds (task, sample, seed) are not played again.
        env_kwargs: arguments for gym.make: split, data, max_turns, on_invalid, ...
        workers: processes that play; 0 is this one, auto takes several if they pay off.
        servers: SGLang or vLLM servers that play with the weights of `model:FOLDER`.
        progress: show a bar on standard error.
        command: the caller, as recorded in the configuration.
        settings: fields of `AgentOptions` by name: noise, channel, thinking, system, max_new_tokens, device, ...

    Raises TurngymError for an unknown environment, task or agent, or a trace that exists or is being written to.
    """
    check_call(play_episodes, settings, temperature=temperature, samples=samples, slots=slots, depth=depth, seed=seed)
    if isinstance(tasks, bool | float):
        raise TurngymError(f"tasks is {tasks!r}; it must be a whole number, or a list of task ids")
    out, given = None if out is None else Path(out), dict(env_kwargs or {})
    with locked_file(out):
        done = _recorded(out, append)
        ready = prepare(
            env,
            agent,
            {**settings, "temperature": temperature, "slots": slots},
            preset=preset,
            base={},
            given=given,
            workers=workers,
            servers=servers,
        )
        opened, make_env = ready.opened, env_maker(env, **ready.kwargs)
        chosen, scoring = _choose(make_env, tasks, seed if draw else None), probe(env, ready.kwargs).scoring
        # a trace that is added to keeps the configuration of its first episodes
        if out is not None and not out.exists():
            many = {"tasks": tasks} if isinstance(tasks, int) else {"task": chosen}
            call = {"env": env, "out": str(out), "append": append, **many, "draw": draw, "samples": samples}
            call |= {"seed": seed, "depth": depth, "env_kwargs": given, **preset_name(ready.preset)}
            keep_settings(config_beside(out), call, ready.named or agent, ready.player, servers, ready.workers, command)
        jobs = [
            Job(task_id=task_id, sample=sample, group=group, seed=seed)
            for sample in range(samples)
            for group, task_id in enumerate(chosen)
            if (task_id, sample, seed) not in done
        ]
        with ExitStack() as stack:
            play = stack.enter_context(open_workers(ready.workers, ready.workload(len(jobs))))
            writer = None if out is None else stack.enter_context(TraceWriter(out))
            report = stack.enter_context(progress_bar("rollout", len(jobs), enabled=progress))

            def keep(episode: Episode) -> None:
                if writer is not None:
                    writer.write(episode)
                report(episode)

            watch = FailureWatch(keep)
            episodes = play(
                jobs,
                ready.make_env,
                opened.agent,
                slots=slots,
                max_turns=depth,
                on_episode=watch,
                system=opened.system,
                meta={"temperature": opened.temperature, **ready.preset_note, **scoring},
            )
            watch.check()
        departs = ready.departs(None, samples, None, scoring).get(DEPARTS)
        if departs is not None and depth is not None:
            departs = [f"episodes end after {depth} turns", *departs]
        return PlayedEpisodes(
            episodes=tuple(episodes),
            agent=opened.agent.name,
            out=out,
            chat=opened.chat,
            channel=opened.channel,
            made=ready.kwargs,
            departs=departs_line(departs, None if ready.preset is None else ready.preset.name),
        )


def _recorded(out: Path | None, append: bool) -> set[tuple[str, int, int]]:
    """(task id, sample, seed) of the episodes in the trace that is added to; {} for a new one."""
    if out is None and append:
        raise TurngymError("--append (append=True) adds to a trace: name it with --out (out=...)")
    if out is None or not out.exists():
        return set()
    if not append:
        raise TurngymError(f"{out} exists: add to it with --append (append=True), or name another file")
    # episodes that ended in an error are left out, so that they are played again
    return {(e.task.task_id, e.sample, e.seed) for e in iter_episodes(out) if not e.status.is_error}


def _choose(make_env: Callable[[], Any], tasks: int | Sequence[str], seed: int | None) -> list[str]:
    """Task ids: those named, or the first `tasks`, or `tasks` of them drawn with `seed`."""
    if not isinstance(tasks, int):
        return [tasks] if isinstance(tasks, str) else list(tasks)
    env = make_env()
    try:
        ids = env.unwrapped.task_ids()
    finally:
        env.close()
    if not 1 <= tasks <= len(ids):
        raise TurngymError(f"{tasks} tasks are asked for: the environment has {len(ids)} tasks; take 1 to {len(ids)}")
    if seed is None:
        return [ids[place] for place in range(tasks)]
    places = np.random.default_rng(seed).choice(len(ids), tasks, replace=False)
    return [ids[int(place)] for place in places]


def config_beside(trace: Path) -> Path:
    """Where the settings of a rollout are kept: `r.config.toml` beside `r.jsonl`, `lr.1.config.toml` beside `lr.1`."""
    return trace.with_name(f"{trace.name.removesuffix('.jsonl')}.config.toml")

"""How episodes of any environment are played with any agent and kept as a trace (`turngym rollout`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.endpoint.usage import usage_of, usage_table
from turngym.agents.evaluation.departures import departures
from turngym.agents.evaluation.open_play import OpenPlay, open_play, record_of
from turngym.agents.evaluation.scores import behavior_table, hints, score, success_table
from turngym.agents.executor.workers import open_workers
from turngym.agents.meaning import meaning
from turngym.agents.named_agent import OpenedAgent
from turngym.agents.play_spec import EvalSpec, Listed, OnPanel
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import FailureWatch, Job
from turngym.agents.playing.timed_calls import lent
from turngym.agents.presets import Preset
from turngym.agents.resolve_play import asked_of, resolve_play
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.files import locked_file
from turngym.core.nested import differing
from turngym.core.plugin_values import unique
from turngym.core.progress import progress_bar
from turngym.core.provenance import write_config
from turngym.core.redaction import brief
from turngym.core.resolve import Resolved, checked
from turngym.core.tables import Table, columns, table_text
from turngym.core.trace import TraceWriter, holds_episodes, iter_episodes, read_specs
from turngym.envs.base import tasks_of

ROLLOUT_DEFAULTS: Mapping[str, Any] = {"play": {"samples": 1, "tasks": {"kind": "first"}}}
"""What holds for a rollout where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisodes:
    """The result of `play_episodes`."""

    episodes: tuple[Episode, ...]
    """Sample by sample, tasks in order; episodes that the trace already held are not included."""
    agent: str
    """Name of the agent."""
    spec: EvalSpec
    """What was asked for."""
    out: Path | None = None
    """The trace."""
    chat: str = ""
    """The chat settings of a model in one line; empty for other agents."""

    @property
    def errors(self) -> int:
        """Episodes that ended in an error; they do not count in the table."""
        return sum(episode.status.is_error for episode in self.episodes)

    def table(self) -> Table | None:
        """Success and behavior; None if every episode ended in an error."""
        if self.errors == len(self.episodes):
            return None
        scores = {self.agent: score(self.episodes, self.spec.play)}
        used = usage_table({self.agent: usage_of(self.episodes)})
        return columns(success_table(scores), behavior_table(scores), *used)

    @property
    def summary(self) -> str:
        """Number of episodes and their trace; then what may help where answers were cut or could not be read."""
        where = "" if self.out is None else f" in {self.out}"
        errors = f", {self.errors} of them ended in errors" if self.errors else ""
        lines = [f"{len(self.episodes)} episodes{where}{errors}"]
        if (departs := departures(self.spec)) is not None:
            lines.append(departs.line)
        if self.chat:
            lines.append(self.chat)
        if played := [episode for episode in self.episodes if not episode.status.is_error]:
            lines += hints(score(played), played, self.spec)
        return "\n".join(lines)

    def __str__(self) -> str:
        table = self.table()
        return ("" if table is None else table_text(table)) + self.summary


def play_episodes(
    env: str | EvalSpec | None = None,
    agent: str | Agent | OpenedAgent | None = None,
    *,
    preset: str | Preset | None = None,
    out: str | Path | None = None,
    append: bool = False,
    progress: bool = True,
    command: str | Sequence[str] = "turngym.agents.play_episodes",
    **settings: Any,
) -> PlayedEpisodes:
    """Play tasks of `env` with `agent`, as `turngym rollout` does.

        play_episodes("turngym/Search-v0", "expert", tasks=20, samples=2, out="demonstrations.jsonl")

    Args:
        env: Gymnasium id; `package:namespace/Name-v0` imports `package` first; or all settings, as a value. None: the
            households.
        agent: a name as on the command line, or an agent object; None: the expert. See `evaluate`.
        preset: a published set-up of `env`, by name; see `evaluate`.
        out: trace file (JSON lines), with the settings beside it in NAME.spec.toml (which `turngym rollout --config`
            reads); an existing file is refused unless `append`.
        append: add to an existing trace; episodes that it holds (task, sample, seed) are not played again.
        command: the caller, as recorded in the settings.
        settings: what `turngym rollout --help-all` lists, by the same names with underscores: tasks, task, draw,
            samples, seed, depth, temperature, max_turns, split, env_kwargs, slots, workers, ...

    Raises TurngymError for an unknown environment, task or agent, settings that cannot be meant, or a trace that exists
    or is being written to.
    """
    if isinstance(env, EvalSpec):
        if agent is not None or preset is not None or settings:
            raise TurngymError("play_episodes(SPEC): the settings are whole; leave out agent, preset and all others")
        return play_rollout(
            Resolved(spec=checked(env), origins={}), out=out, append=append, progress=progress, command=command
        )
    keywords = asked_of("play_episodes()", {**({} if env is None else {"env": env}), **settings}, agent, preset)
    resolved = resolve_play(
        [("play_episodes()", keywords)], usual=ROLLOUT_DEFAULTS, preset=preset if isinstance(preset, Preset) else None
    )
    player = None if isinstance(agent, str) else agent
    return play_rollout(resolved, agent=player, out=out, append=append, progress=progress, command=command)


def play_rollout(
    found: Resolved[EvalSpec],
    *,
    agent: Agent | OpenedAgent | None = None,
    out: str | Path | None = None,
    append: bool = False,
    progress: bool = True,
    command: str | Sequence[str] = "",
) -> PlayedEpisodes:
    """Plays a rollout; `play_episodes` explains the arguments. `agent` is given if it is an object."""
    out = None if out is None else Path(out)
    with locked_file(out):
        done = _recorded(out, append)
        ready = open_play(found.spec, agent)
        opened, spec, play_spec = ready.opened, ready.spec, ready.spec.play
        chosen = _choose(ready)
        if out is not None:
            _check_same(out, spec)
            # a trace that is added to keeps the settings of its first episodes
            if not holds_episodes(out):
                write_config(spec_beside(out), spec, command, found, seed=spec.play.seed)
        jobs = [
            Job(task_id=task_id, sample=sample, group=group, seed=play_spec.seed)
            for sample in range(play_spec.samples)
            for group, task_id in enumerate(chosen)
            if (task_id, sample, play_spec.seed) not in done
        ]
        with ExitStack() as stack:
            play = stack.enter_context(open_workers(spec.compute.workers, ready.workload(len(jobs))))
            writer = None if out is None else stack.enter_context(TraceWriter(out, record_of(spec)))
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
                slots=spec.compute.slots,
                max_turns=play_spec.depth,
                on_episode=watch,
                system=opened.system,
                meta={"temperature": opened.temperature},
            )
            watch.check()
        return PlayedEpisodes(episodes=tuple(episodes), agent=opened.agent.name, spec=spec, out=out, chat=opened.chat)


def _check_same(out: Path, spec: EvalSpec) -> None:
    """Raises TurngymError if another player has played into the trace: more tasks, samples and seeds may be added."""
    for theirs in read_specs(out).values():
        for path, (was, new) in differing(theirs, record_of(spec)).items():
            if meaning(path) in ("game", "player"):
                raise TurngymError(
                    f"{out} was played with {path} {brief(was, 60)}, and this would be {brief(new, 60)}: name another "
                    "file; a trace holds one player in one game"
                )


def _recorded(out: Path | None, append: bool) -> set[tuple[str, int, int]]:
    """(task id, sample, seed) of the episodes in the trace that is added to; {} for a new one."""
    if out is None and append:
        raise TurngymError("--append (append=True) adds to a trace: name it with --out (out=...)")
    if out is None or not holds_episodes(out):
        return set()
    if not append:
        raise TurngymError(f"{out} exists: add to it with --append (append=True), or name another file")
    # episodes that ended in an error are left out, so that they are played again
    return {(e.task.task_id, e.sample, e.seed) for e in iter_episodes(out) if not e.status.is_error}


def _choose(ready: OpenPlay) -> list[str]:
    """Task ids: those named, or the first ones of the environment, or some of them drawn with the seed."""
    play = ready.spec.play
    if isinstance(play.tasks, Listed):
        twice = [task for task, count in Counter(play.tasks.task).items() if count > 1]
        if twice:
            raise TurngymError(f"the task {twice[0]!r} is named twice; valid: once, and --samples for more episodes")
        return list(play.tasks.task)
    if isinstance(play.tasks, OnPanel):
        raise TurngymError("a rollout plays an environment's own tasks; `turngym eval` plays a panel")
    with lent(ready.make_env, ready.spec.compute.workers.step_timeout) as env:
        ids = tasks_of(env.unwrapped)
    count = play.tasks.count
    if count > len(ids):
        raise TurngymError(f"{count} tasks are asked for: the environment has {len(ids)} tasks; take 1 to {len(ids)}")
    drawn = np.random.default_rng(play.seed).choice(len(ids), count, replace=False) if play.tasks.draw else range(count)
    chosen = [ids[int(index)] for index in drawn]
    unique("the environment", chosen)
    return chosen


def spec_beside(trace: Path) -> Path:
    """Where the settings of a rollout are kept: `r.spec.toml` beside `r.jsonl`, `lr.1.spec.toml` beside `lr.1`."""
    return trace.with_name(f"{trace.name.removesuffix('.jsonl')}.spec.toml")

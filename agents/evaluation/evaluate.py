"""How an agent is evaluated on a task panel: `evaluate`, which `turngym eval` calls, and `PanelEvaluation` in training.

`prepare` opens an environment and an agent as a preset and the caller's settings say; `play_episodes` uses it too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from turngym.agents.agent_options import AgentOptions, AgentSettings, check_call
from turngym.agents.evaluation.original import departures
from turngym.agents.evaluation.play_panel import DRAWS, EvalResult, TaskEvaluation, gather_shares
from turngym.agents.evaluation.published import published_tasks, workers_of
from turngym.agents.evaluation.scores import SAMPLING, EvaluationError
from turngym.agents.executor.worker_count import WorkerOptions, Workload
from turngym.agents.executor.workers import open_workers
from turngym.agents.named_agent import OpenedAgent, as_opened
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.environments import env_maker, probe
from turngym.agents.playing.rollout import MakeEnv
from turngym.agents.presets import Preset, find_preset, preset_name, require_named
from turngym.agents.servers.server_options import PolicyServer
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import locked_folder
from turngym.envs.core.protocols import EvalPoint
from turngym.envs.core.provenance import FILE, write_config
from turngym.envs.core.settings import to_table
from turngym.envs.core.task import Task, ToolSpec
from turngym.envs.guard import guard_of
from turngym.envs.panels import Panel, assert_disjoint, load_panel, verify_panel
from turngym.retrieval.redaction import redacted

SAMPLES = 4
"""Episodes per task of an evaluation where nobody says otherwise."""
AGENT_FACING = ("on_invalid", "engine", "show_admissible", "list_admissible", "reading", "tool_name", "tool_argument")
"""Arguments of gym.make that a run's evaluations share with its training: how the agent is spoken to. The others say
what is trained on; a panel brings its own."""


def evaluate(
    panel: str | Path | Panel,
    agent: str | Agent | OpenedAgent = "expert",
    *,
    preset: str | Preset | None = None,
    samples: int | None = None,
    sampling: str = "panel",
    seed: int = 0,
    temperature: float | None = None,
    slots: int = 64,
    out: str | Path | None = None,
    limit: int | None = None,
    data: str | None = None,
    max_turns: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    workers: int | Literal["auto"] | WorkerOptions = "auto",
    servers: PolicyServer | None = None,
    verify: bool = True,
    progress: bool = True,
    command: str | Sequence[str] = "turngym.agents.evaluate",
    **settings: Unpack[AgentSettings],
) -> EvalResult:
    """Play every task of `panel` `samples` times with `agent` and score it, as `turngym eval` does.

    Args:
        panel: name (newest version), full name, path of a manifest, or a `Panel`.
        agent: a name as on the command line (`expert`, `random`, `replay:TRACE`, `model:FOLDER`,
            `package.module:name`), or an agent object.
        preset: name of a published set-up of the panel's environment (docs/presets.md). Explicit arguments override
            its values, and its values override the panel's.
        samples: episodes per task; by default the preset's, else 4.
        sampling: `panel` plays each task `samples` times. `published` plays the tasks of the first `samples`
            validations of the published harness with 128 workers, `published:N` with N (`published_tasks`).
        seed: the same seed gives the same episodes for any `slots` and `workers`.
        temperature: at which a model samples; 0 is greedy. By default the preset's, else 0.85.
        slots: episodes played, and requests generated, at a time.
        out: folder for results.json, trace.jsonl and config.toml (the settings, which `turngym eval --config` reads);
            an interrupted evaluation is resumed if it is called again with the same folder.
        limit: play only the first `limit` tasks.
        data: folder of the data; by default where the environment looks for it.
        max_turns: turns before an episode is cut; by default the environment's own limit.
        env_kwargs: further arguments for gym.make.
        workers: processes that play; 0 is this one, auto takes several if they pay off.
        servers: SGLang or vLLM servers that play with the weights of `model:FOLDER`.
        verify: check every task's hash against the panel before anything is played.
        progress: show a bar on standard error.
        command: the caller, as recorded in config.toml.
        settings: fields of `AgentOptions` by name: noise, channel, thinking, system, max_new_tokens, device, ...

    Raises:
        TurngymError: an unknown panel or agent, tasks that are not the panel's, a folder that holds another
            evaluation, or one that another process is writing to.
    """
    check_call(evaluate, settings, temperature=temperature, samples=samples, slots=slots, limit=limit, seed=seed)
    with locked_folder(out):
        named = panel.full_name if isinstance(panel, Panel) else str(panel)
        panel = panel if isinstance(panel, Panel) else load_panel(str(panel))
        ready = prepare(
            panel.env_id,
            agent,
            {**settings, "temperature": temperature, "slots": slots},
            preset=preset,
            base=panel.make_kwargs,
            given={
                **(env_kwargs or {}),
                **({} if data is None else {"data": data}),
                **({} if max_turns is None else {"max_turns": max_turns}),
            },
            workers=workers,
            servers=servers,
        )
        opened, samples, workers_drawn = ready.opened, ready.samples(samples), workers_of(sampling)
        if workers_drawn is not None and limit is not None:
            raise EvaluationError(
                f"--limit {limit} takes the first tasks of a panel, --sampling {sampling} draws them: give one of both"
            )

        def draw(env: Any) -> Sequence[Task]:
            if workers_drawn is None:
                return ()
            return published_tasks(panel, env, workers=workers_drawn, validations=samples, seed=seed)

        scoring, draws = _opened(panel, env_maker(panel.env_id, **ready.kwargs)(), verify, draw)
        # an evaluation that shows how its own tasks are done would measure copying
        assert_disjoint(opened.examples.tasks, draws or panel.tasks)
        drawn = {} if workers_drawn is None else {SAMPLING: f"published:{workers_drawn}", DRAWS: len(draws)}
        trace = None if out is None else Path(out) / "trace.jsonl"
        # a resumed evaluation keeps the configuration with which it began
        if trace is not None and not trace.exists():
            call: dict[str, Any] = {"panel": named, **preset_name(ready.preset), "samples": samples, "out": str(out)}
            call |= {"limit": limit, "seed": seed, "data": data, "sampling": sampling}
            call |= {"max_turns": max_turns, "env_kwargs": env_kwargs, "verify": verify}
            keep_settings(
                trace.with_name(FILE), call, ready.named or agent, ready.player, servers, ready.workers, command
            )
        many = len(draws) or len(panel.tasks[:limit]) * samples
        with open_workers(ready.workers, ready.workload(many)) as play:
            result = TaskEvaluation(
                panel,
                ready.make_env,
                opened.agent,
                samples=samples,
                limit=limit,
                draws=draws,
                temperature=opened.temperature,
                seed=seed,
                slots=slots,
                trace=trace,
                system=opened.system,
                settings=identity(ready.overrides, opened) | ready.preset_note | scoring | drawn,
                about={
                    **({"chat": opened.chat} if opened.chat else {}),
                    **({} if ready.preset is None else {"preset_values": ready.preset.values}),
                    **eval_overrides(panel, ready.kwargs),
                    **ready.departs(panel, samples, limit, scoring, workers_drawn),
                },
                progress=progress,
                play=play,
            ).run()
        if trace is not None:
            result.write(trace.with_name("results.json"))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An environment and the agent that plays it, with their settings."""

    env: str
    preset: Preset | None
    given: Mapping[str, Any]
    """Explicit arguments of gym.make."""
    overrides: Mapping[str, Any]
    """Explicit arguments of gym.make and those of the preset, without those of a panel."""
    kwargs: Mapping[str, Any]
    """All arguments of gym.make."""
    player: Mapping[str, Any]
    """Settings of the agent as they were given, for the configuration file."""
    played: Mapping[str, Any]
    """Settings of the agent with those of the preset."""
    opened: OpenedAgent
    workers: WorkerOptions

    @property
    def named(self) -> str | None:
        """A model of the hub by the commit that was played; None for other agents."""
        return None if self.opened.origin is None else f"model:{self.opened.origin}"

    @property
    def make_env(self) -> MakeEnv:
        """Makes the environment with the agent's channel."""
        return env_maker(self.env, **self.kwargs, channel=self.opened.channel)

    def workload(self, episodes: int) -> Workload:
        """What `--workers auto` decides by."""
        return Workload.of(getattr(self.opened.agent, "policy", None), episodes)

    def samples(self, given: int | None) -> int:
        """Episodes per task: as given, else the preset's, else 4."""
        own = None if self.preset is None else self.preset.samples
        return next(count for count in (given, own, SAMPLES) if count is not None)

    def departs(
        self,
        panel: Panel | None,
        samples: int,
        limit: int | None,
        scoring: Mapping[str, str],
        drawn: int | None = None,
    ) -> dict[str, list[str]]:
        """What an evaluation on `panel` does otherwise than the original, as its records have it; None: a rollout."""
        return departures(
            self.env,
            panel,
            self.preset,
            self.kwargs,
            played={**self.played, "memory": self.opened.memory},
            channel=self.opened.channel,
            temperature=self.opened.temperature,
            samples=samples,
            limit=limit,
            scoring=scoring,
            drawn=drawn,
        )

    @property
    def preset_note(self) -> dict[str, Any]:
        """The preset as the records of episodes name it."""
        return {} if self.preset is None else dict(self.preset.identity)


def prepare(
    env: str,
    agent: str | Agent | OpenedAgent,
    settings: Mapping[str, Any],
    *,
    preset: str | Preset | None,
    base: Mapping[str, Any],
    given: Mapping[str, Any],
    workers: int | Literal["auto"] | WorkerOptions,
    servers: PolicyServer | None,
) -> Prepared:
    """Open `agent` with `settings` for `env`; `given` overrides the preset, which overrides `base` (a panel's).

    Raises TurngymError for an unknown preset or agent, or a preset for an agent that is an object.
    """
    named = find_preset(preset, env)
    overrides = given if named is None else named.make(dict(given))
    kwargs = {**base, **overrides}
    require_named(named, agent)
    played = settings if named is None else named.player(dict(settings), overrides)
    return Prepared(
        env=env,
        preset=named,
        given=given,
        overrides=overrides,
        kwargs=kwargs,
        player=settings,
        played=played,
        opened=as_opened(agent, played, lambda: probe(env, kwargs), servers),
        workers=WorkerOptions.of(workers),
    )


def identity(overrides: Mapping[str, Any], opened: OpenedAgent) -> dict[str, Any]:
    """Settings on which the episodes depend, besides panel, seed and the agent's name."""
    # where the data lie is left out: the tasks' hashes say whether they are the same
    made = redacted({name: overrides[name] for name in sorted(overrides) if name != "data"})
    known = {"channel": opened.channel, "player": opened.player, "model": opened.fingerprint, "dtype": opened.dtype}
    known["examples"] = opened.examples.identity
    known["prompts"] = opened.prompts
    known["origin"] = opened.origin
    return {"make": made, **{name: value for name, value in known.items() if value is not None}}


def keep_settings(
    path: Path,
    call: Mapping[str, Any],
    agent: str | Agent | OpenedAgent,
    player: Mapping[str, Any],
    servers: PolicyServer | None,
    workers: WorkerOptions,
    command: str | Sequence[str],
) -> None:
    """Write the settings of an evaluation or rollout in the form that `--config` reads.

    `call` are the arguments of the function (None values are left out), `player` are fields of `AgentOptions`. An agent
    that is an object is written by its name, for readers only: no command can find it by that name.
    """
    named = agent.agent if isinstance(agent, OpenedAgent) else agent
    options = AgentOptions.of({**player, "agent": named if isinstance(named, str) else named.name})
    table = {name: value for name, value in call.items() if value is not None}
    # one JSON text, as on the command line; default=str because arguments may hold paths
    table["env_kwargs"] = json.dumps(dict(table.get("env_kwargs", {})), default=str)
    table |= to_table(options) | to_table(servers or PolicyServer()) | to_table(workers)
    write_config(path, table, command, seed=table["seed"])


def eval_overrides(panel: Panel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`{"panel_max_turns": the panel's own limit of turns}` if another limit is played, else {}."""
    own = panel.make_kwargs.get("max_turns")
    return {} if own is None or kwargs.get("max_turns") == own else {"panel_max_turns": own}


def _opened(
    panel: Panel, env: Any, verify: bool, draw: Callable[[Any], Sequence[Task]]
) -> tuple[dict[str, str], Sequence[Task]]:
    """Compares the tasks of `env` with the panel's if `verify`, closes it, and returns its `scoring` and what `draw`
    finds in it."""
    try:
        problems = verify_panel(panel, env) if verify else []
        scoring = guard_of(env).base.scoring
        draws = () if problems else draw(env)
    finally:
        env.close()
    if problems:
        raise TurngymError(
            f"{len(problems)} of {len(panel.tasks)} tasks are not those of {panel.full_name}: {problems[0]}; get the "
            "data that the panel names (`turngym panel verify` lists every difference)"
        )
    return scoring, draws


@dataclass(frozen=True, slots=True)
class PanelEvaluation:
    """An evaluation at a step of training; its episodes are kept in a trace of that step in `folder`."""

    evaluation: TaskEvaluation
    folder: Path

    def __call__(self, step: int) -> EvalPoint:
        return _point(self._of(step).run())

    def gather(self, step: int) -> None:
        """Move the shares that a stopped run has left into the trace of `step`."""
        gather_shares(self._of(step).trace)

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        """Play the episodes of process number `share[0]` of `share[1]`."""
        self._of(step).run_share(share)

    def finish(self, step: int) -> EvalPoint:
        """Score what all shares have played."""
        # as in an undivided evaluation, episodes that ended in an error are not played again
        return _point(self._of(step).run(errors_again=False))

    def _of(self, step: int) -> TaskEvaluation:
        self.folder.mkdir(parents=True, exist_ok=True)
        return replace(self.evaluation, trace=self.folder / f"step_{step:06d}.jsonl")


def _point(result: EvalResult) -> EvalPoint:
    scores = result.scores
    extra = {f"pass@{k}": value for k, value in scores.overall.pass_at.items()}
    extra |= {"turns": scores.turns, "invalid_rate": scores.invalid_rate, "errors": float(scores.errors)}
    extra |= {f"category/{row.name}": row.avg.mean for row in scores.categories}
    average = scores.overall.avg
    return EvalPoint(avg=average.mean, low=average.low, high=average.high, extra=extra)


def eval_note(panel: Panel, preset: str | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the panel in an evaluation, for its records; another limit of turns is also printed."""
    named, own = find_preset(preset, panel.env_id), panel.make_kwargs.get("max_turns")
    note: dict[str, Any] = {} if named is None else {**named.identity}
    if own is not None and made["max_turns"] != own:
        print(f"evaluations: max_turns {made['max_turns']} instead of {panel.full_name}'s {own}", file=sys.stderr)
        note["max_turns"] = made["max_turns"]
    made = {name: value for name, value in made.items() if name not in ("max_turns", "data")}
    if other := {name: value for name, value in made.items() if panel.make_kwargs.get(name) != value}:
        note["make"] = other
    return note


def check_panel(panel: Panel, made: Mapping[str, Any], env: str, tool: ToolSpec) -> None:
    """Check that a run that trains on `env` with the action `tool` can be evaluated on `panel` (made with `made`).

    Another environment with the same action is a test of transfer, and one line says so. Raises TurngymError if its
    action differs, since the student has never been told of that one.
    """
    trained = env.rpartition(":")[2]
    if panel.env_id == trained:
        return
    other = probe(panel.env_id, made).tool
    if (other.name, other.argument, other.tags) != (tool.name, tool.argument, tool.tags):
        raise TurngymError(
            f"--panel {panel.full_name} is of {panel.env_id}, whose action is {other.name}({other.argument}); the run "
            f"trains on {trained}, whose action is {tool.name}({tool.argument}): name a panel of {trained} "
            "(`turngym panel list`), or evaluate checkpoints with `turngym eval`"
        )
    print(f"evaluations: {panel.full_name} is of {panel.env_id}, the run trains on {trained}", file=sys.stderr)

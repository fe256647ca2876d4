"""Evaluate an agent on a task panel, from Python or the command line: Avg@n, pass@k, rows by category, rates."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

from turngym.agents.evaluation.play_panel import EvalResult, TaskEvaluation, evaluate_tasks, gather_shares
from turngym.agents.executor.options import WorkerOptions, Workload
from turngym.agents.executor.workers import open_workers
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.named_agent import OpenedAgent, as_opened
from turngym.agents.options import AgentOptions, AgentSettings
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.environments import env_maker, probe
from turngym.agents.playing.rollout import MakeEnv, PlayJobs, rollout
from turngym.agents.presets import Preset, find_preset, preset_name, require_named
from turngym.agents.sglang.client import PolicyServer
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import locked_folder
from turngym.envs.core.protocols import EvalPoint
from turngym.envs.core.settings import FILE, to_table, write_config
from turngym.envs.core.task import ToolSpec
from turngym.envs.panels import Panel, load_panel, verify_panel

# The settings of an evaluation or rollout, kept beside its files as `--config` reads them.


def keep_settings(
    path: Path,
    call: Mapping[str, Any],
    agent: str | Agent | OpenedAgent,
    player: Mapping[str, Any],
    servers: PolicyServer | None,
    workers: WorkerOptions,
    command: str | Sequence[str],
) -> None:
    """Write what was asked for: the arguments of the `call` that are not None, and who plays where.

    `player` are fields of `AgentOptions`. An agent that is an object stands there by its name, for whoever reads the
    file: no command can find it by that.
    """
    found = agent.agent if isinstance(agent, OpenedAgent) else agent
    options = AgentOptions.of({**player, "agent": found if isinstance(found, str) else found.name})
    table = {name: value for name, value in call.items() if value is not None}
    # as on the command line, where it is one option; str: a path is among the arguments, and JSON has no word for it
    table["env_kwargs"] = json.dumps(dict(table.get("env_kwargs", {})), default=str)
    table |= to_table(options) | to_table(servers or PolicyServer()) | to_table(workers)
    write_config(path, table, command, seed=table["seed"])


# What a rollout and an evaluation prepare alike: a preset's arguments, and the agent opened for the environment.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An environment and the agent that is to play it."""

    env: str
    preset: Preset | None
    overrides: Mapping[str, Any]
    """Arguments of gym.make that were given, with the preset's; without those of a panel."""
    kwargs: Mapping[str, Any]
    """All of them."""
    player: Mapping[str, Any]
    """Settings of the agent as they were given, for the configuration file."""
    opened: OpenedAgent
    playing: WorkerOptions

    @property
    def make_env(self) -> MakeEnv:
        """Makes the environment, which reads what the agent writes."""
        return env_maker(self.env, **self.kwargs, channel=self.opened.channel)

    def played(self, episodes: int) -> Workload:
        """What `--workers auto` is told."""
        return Workload.of(getattr(self.opened.agent, "policy", None), episodes)

    @property
    def preset_note(self) -> dict[str, Any]:
        """What the records of episodes say of the preset."""
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
    """Open `agent` with `settings` for `env`, made with `base` (a panel's arguments), the preset's, and `given`.

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
        overrides=overrides,
        kwargs=kwargs,
        player=settings,
        opened=as_opened(agent, played, lambda: probe(env, kwargs), servers),
        playing=WorkerOptions.of(workers),
    )


def evaluate(
    panel: str | Path | Panel,
    agent: str | Agent | OpenedAgent = "expert",
    *,
    preset: str | Preset | None = None,
    samples: int = 4,
    seed: int = 0,
    temperature: float = 0.85,
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
        preset: a published set-up of the panel's environment, by name (docs/presets.md); what is given beside it takes
            the place of its values, and its values that of the panel's.
        samples: episodes per task.
        seed: same seed, same episodes, whatever `slots` and `workers`.
        temperature: at which a model samples; 0 is greedy.
        slots: episodes played, and requests generated, at a time.
        out: folder for results.json, trace.jsonl and config.toml (what was asked for, which `turngym eval --config`
            takes); an interrupted evaluation with the same folder goes on.
        limit: play only the first so many tasks.
        data: folder of the data; by default where the environment looks for it.
        max_turns: turns before an episode is cut; by default the environment's own limit.
        env_kwargs: further arguments for gym.make.
        workers: processes that play; 0: this one; auto: several where they pay.
        servers: SGLang servers that play with the weights of `model:FOLDER`.
        verify: check every task's hash against the panel before anything is played.
        progress: a bar on standard error.
        command: who asked, as config.toml names it.
        settings: fields of `AgentOptions` by name: noise, channel, thinking, system, max_new_tokens, device, ...

    Raises:
        TurngymError: an unknown panel or agent, tasks that are not the panel's, a folder with another evaluation,
            or one that another process writes.
    """
    with locked_folder(out):
        named = panel.full_name if isinstance(panel, Panel) else str(panel)
        panel = panel if isinstance(panel, Panel) else load_panel(str(panel))
        ready = prepare(
            panel.env_id,
            agent,
            {**settings, "temperature": temperature, "slots": slots},
            preset=preset,
            base=panel.make_kwargs,
            given={**(env_kwargs or {}), **_given(data=data, max_turns=max_turns)},
            workers=workers,
            servers=servers,
        )
        if verify:
            _check(panel, env_maker(panel.env_id, **ready.kwargs)())
        trace = None if out is None else Path(out) / "trace.jsonl"
        if trace is not None and not trace.exists():  # what goes on keeps the file of its beginning
            call: dict[str, Any] = {"panel": named, **preset_name(ready.preset), "samples": samples, "out": str(out)}
            call |= {"limit": limit, "seed": seed, "data": data}
            call |= {"max_turns": max_turns, "env_kwargs": env_kwargs, "verify": verify}
            keep_settings(trace.with_name(FILE), call, agent, ready.player, servers, ready.playing, command)
        with open_workers(ready.playing, ready.played(len(panel.tasks[:limit]) * samples)) as play:
            result = evaluate_tasks(
                panel,
                ready.make_env,
                ready.opened.agent,
                samples=samples,
                limit=limit,
                temperature=ready.opened.temperature,
                seed=seed,
                slots=slots,
                trace=trace,
                system=ready.opened.system,
                settings=_note(ready.overrides, ready.opened) | ready.preset_note,
                about=_about(panel, ready),
                progress=progress,
                play=play,
            )
        if trace is not None:
            result.write(trace.with_name("results.json"))
        return result


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _about(panel: Panel, ready: Prepared) -> dict[str, Any]:
    """What is recorded for readers, and may differ in a call that goes on."""
    about: dict[str, Any] = {"chat": ready.opened.chat} if ready.opened.chat else {}
    about |= {} if ready.preset is None else {"preset_values": ready.preset.values}
    return about | instead(panel, ready.kwargs)


def _note(overrides: Mapping[str, Any], opened: OpenedAgent) -> dict[str, Any]:
    """What else the episodes depend on, besides panel, seed and agent name."""
    # not where the data lie: whether they are the same is said by the tasks' hashes
    note: dict[str, Any] = {"make": {name: overrides[name] for name in sorted(overrides) if name != "data"}}
    if opened.channel is not None:
        note["channel"] = opened.channel
    if opened.fingerprint is not None:
        note["model"] = opened.fingerprint
    if opened.dtype is not None:
        note["dtype"] = opened.dtype
    return note


def instead(panel: Panel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`{"panel_max_turns": the panel's own limit of turns}` where another one is played; else nothing."""
    own = panel.make_kwargs.get("max_turns")
    return {} if own is None or kwargs.get("max_turns") == own else {"panel_max_turns": own}


def _check(panel: Panel, env: Any) -> None:
    try:
        problems = verify_panel(panel, env)
    finally:
        env.close()
    if problems:
        raise TurngymError(
            f"{len(problems)} of {len(panel.tasks)} tasks are not those of {panel.full_name}: {problems[0]}; get the "
            "data that the panel names (`turngym panel verify` lists every difference)"
        )


# Evaluations on a panel while a model is trained.


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelEvaluation:
    """Avg@n on a panel, as the training loop asks for it; every episode is kept as a trace to read."""

    panel: Panel
    player: ModelPlayer
    make_env: MakeEnv
    folder: Path
    samples: int = 4
    temperature: float = 0.85
    seed: int = 0
    slots: int = 64
    limit: int | None = None
    """Play only the first so many tasks."""
    play: PlayJobs = rollout
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the record of every episode says beside the agent: the preset, and what is not as the panel has it."""

    def __call__(self, step: int) -> EvalPoint:
        return _point(self._of(step).run())

    def gather(self, step: int) -> None:
        gather_shares(self._of(step).trace)

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        self._of(step).run_share(share)

    def finish(self, step: int) -> EvalPoint:
        # an error in a share is one as it is in a whole: not played again within the same evaluation
        return _point(self._of(step).run(errors_again=False))

    def _of(self, step: int) -> TaskEvaluation:
        self.folder.mkdir(parents=True, exist_ok=True)
        return TaskEvaluation(
            tasks=self.panel,
            make_env=self.make_env,
            agent=self.player.agent(self.temperature),
            samples=self.samples,
            limit=self.limit,
            temperature=self.temperature,
            seed=self.seed,
            slots=self.slots,
            trace=self.folder / f"step_{step:06d}.jsonl",
            system=self.player.settings.system,
            settings=self.settings,
            play=self.play,
        )


def _point(result: EvalResult) -> EvalPoint:
    scores = result.scores
    extra = {f"pass@{k}": value for k, value in scores.overall.pass_at.items()}
    extra |= {"turns": scores.turns, "invalid_rate": scores.invalid_rate, "errors": float(scores.errors)}
    extra |= {f"category/{row.name}": row.avg.mean for row in scores.categories}
    average = scores.overall.avg
    return EvalPoint(avg=average.mean, low=average.low, high=average.high, extra=extra)


TOLD = ("on_invalid", "engine", "show_admissible", "list_admissible", "tool_name", "tool_argument")
"""What of a run's arguments for `gym.make` is true of its evaluations, too: how the agent is spoken to. The rest says
what is trained on; a panel brings its own."""


def eval_note(panel: Panel, preset: str | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """What the records of an evaluation say of how it was made; another limit than the panel's own is printed, too."""
    found, own = find_preset(preset, panel.env_id), panel.make_kwargs.get("max_turns")
    note: dict[str, Any] = {} if found is None else {**found.identity}
    if own is not None and made["max_turns"] != own:
        print(f"evaluations: max_turns {made['max_turns']} instead of {panel.full_name}'s {own}", file=sys.stderr)
        note["max_turns"] = made["max_turns"]
    made = {name: value for name, value in made.items() if name not in ("max_turns", "data")}
    if other := {name: value for name, value in made.items() if panel.make_kwargs.get(name) != value}:
        note["make"] = other
    return note


def check_panel(panel: Panel, made: Mapping[str, Any], env: str, tool: ToolSpec) -> None:
    """Whether a run that trains on `env`, where the student is told of `tool`, can be evaluated on `panel`, whose
    environment is made with `made`.

    On another environment with the same action it can, which is a question of transfer and said in a line. Raises
    TurngymError where that environment has another action: the student would never be told of it.
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

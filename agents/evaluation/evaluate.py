"""How an agent is evaluated on a task panel: `evaluate`, which `turngym eval` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from turngym.agents.agent_options import AgentSettings, check_call
from turngym.agents.evaluation.evaluation_setup import Prepared, keep_settings, prepare
from turngym.agents.evaluation.play_panel import DRAWS, EvalResult, TaskEvaluation
from turngym.agents.evaluation.published import published_tasks, workers_of
from turngym.agents.evaluation.scores import SAMPLING, EvaluationError
from turngym.agents.executor.worker_count import WorkerOptions
from turngym.agents.executor.workers import open_workers
from turngym.agents.named_agent import OpenedAgent
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_arguments, env_maker
from turngym.agents.presets import Preset, preset_name
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.errors import TurngymError
from turngym.core.files import locked_folder
from turngym.core.provenance import FILE
from turngym.core.redaction import redacted
from turngym.core.task import Task
from turngym.envs.guard import guard_of
from turngym.envs.panels import Panel, assert_disjoint, load_panel, verify_panel


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
        # The panel, and the agent that plays it.
        named = panel.full_name if isinstance(panel, Panel) else str(panel)
        panel = panel if isinstance(panel, Panel) else load_panel(str(panel))
        ready = prepare(
            panel.env_id,
            agent,
            {**settings, "temperature": temperature, "slots": slots},
            preset=preset,
            base=panel.make_kwargs,
            given=env_arguments(env_kwargs or {}, {"data": data, "max_turns": max_turns}),
            workers=workers,
            servers=servers,
        )
        opened, samples = ready.opened, ready.samples(samples)

        # Its tasks: all of the panel, or those that the published harness draws.
        harness = _harness_workers(sampling, limit)
        scoring, draws = _checked_tasks(panel, ready, verify, harness, samples, seed)
        # an evaluation that shows how its own tasks are done would measure copying
        assert_disjoint(opened.examples.tasks, draws or panel.tasks)

        # The settings on disk. A resumed evaluation keeps those with which it began.
        trace = None if out is None else Path(out) / "trace.jsonl"
        if trace is not None and not trace.exists():
            call: dict[str, Any] = {"panel": named, **preset_name(ready.preset), "samples": samples, "out": str(out)}
            call |= {"limit": limit, "seed": seed, "data": data, "sampling": sampling}
            call |= {"max_turns": max_turns, "env_kwargs": env_kwargs, "verify": verify}
            keep_settings(
                trace.with_name(FILE), call, ready.named or agent, ready.player, servers, ready.workers, command
            )

        # Play and score.
        drawn = {} if harness is None else {SAMPLING: f"published:{harness}", DRAWS: len(draws)}
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
                about=_about(panel, ready) | ready.departs(panel, samples, limit, scoring, harness),
                progress=progress,
                play=play,
            ).run()
        if trace is not None:
            result.write(trace.with_name("results.json"))
        return result


def identity(overrides: Mapping[str, Any], opened: OpenedAgent) -> dict[str, Any]:
    """Settings on which the episodes depend, besides panel, seed and the agent's name."""
    # where the data lie is left out: the tasks' hashes say whether they are the same
    made = redacted({name: overrides[name] for name in sorted(overrides) if name != "data"})
    known = {"channel": opened.channel, "player": opened.player, "model": opened.fingerprint, "dtype": opened.dtype}
    known["examples"] = opened.examples.identity
    known["prompts"] = opened.prompts
    known["origin"] = opened.origin
    return {"make": made, **{name: value for name, value in known.items() if value is not None}}


def eval_overrides(panel: Panel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`{"panel_max_turns": the panel's own limit of turns}` if another limit is played, else {}."""
    own = panel.make_kwargs.get("max_turns")
    return {} if own is None or kwargs.get("max_turns") == own else {"panel_max_turns": own}


def _harness_workers(sampling: str, limit: int | None) -> int | None:
    """Workers of the published harness whose tasks are drawn; None where the panel's are played."""
    workers = workers_of(sampling)
    if workers is not None and limit is not None:
        raise EvaluationError(
            f"--limit {limit} takes the first tasks of a panel, --sampling {sampling} draws them: give one of both"
        )
    return workers


def _checked_tasks(
    panel: Panel, ready: Prepared, verify: bool, harness: int | None, samples: int, seed: int
) -> tuple[dict[str, str], Sequence[Task]]:
    """Compares the environment's tasks with the panel's, and draws those of the published harness.

    Returns how the environment scores (`scoring`), and the drawn tasks, none without `harness`.

    Args:
        panel: the tasks with their hashes.
        ready: makes the environment.
        verify: whether every hash is compared.
        harness: workers of the published harness; None: nothing is drawn.
        samples: validations of the harness that are drawn.
        seed: of the evaluation; worker i of the harness has seed + 1000 + i.

    Raises:
        TurngymError: tasks that are not the panel's.
    """
    env: Any = env_maker(panel.env_id, **ready.kwargs)()
    try:
        problems = verify_panel(panel, env) if verify else []
        scoring = guard_of(env).base.scoring
        draws: Sequence[Task] = ()
        if harness is not None and not problems:
            draws = published_tasks(panel, env, workers=harness, validations=samples, seed=seed)
    finally:
        env.close()
    if problems:
        raise TurngymError(
            f"{len(problems)} of {len(panel.tasks)} tasks are not those of {panel.full_name}: {problems[0]}; get the "
            "data that the panel names (`turngym panel verify` lists every difference)"
        )
    return scoring, draws


def _about(panel: Panel, ready: Prepared) -> dict[str, Any]:
    """What the results say beside the scores: how the agent was spoken to, the preset, another limit of turns."""
    return {
        **({"chat": ready.opened.chat} if ready.opened.chat else {}),
        **({} if ready.preset is None else {"preset_values": ready.preset.values}),
        **eval_overrides(panel, ready.kwargs),
    }

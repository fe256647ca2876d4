"""Evaluate an agent on a task panel, from Python or the command line: Avg@n, pass@k, rows by category, rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from turngym.agents.agent import Agent
from turngym.agents.agent_options import AgentSettings
from turngym.agents.environments import env_maker
from turngym.agents.evaluation.config_file import keep_settings
from turngym.agents.evaluation.prepared import Prepared, prepare
from turngym.agents.evaluation.tasks import EvalResult, evaluate_tasks
from turngym.agents.executor.open_workers import WorkerOptions, open_workers
from turngym.agents.named_agent import OpenedAgent
from turngym.agents.presets.preset import Preset, preset_name
from turngym.agents.sglang.options import PolicyServer
from turngym.envs.common.folder_lock import locked_folder
from turngym.envs.common.provenance import FILE
from turngym.envs.core import TurngymError
from turngym.envs.panels import Panel, load_panel, verify_panel


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

"""How an agent is evaluated on a task panel: `evaluate`, which `turngym eval` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.open_play import SPEC_FILE, OpenPlay, open_play
from turngym.agents.evaluation.play_panel import EvalResult, TaskEvaluation
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.executor.workers import open_workers
from turngym.agents.named_agent import OpenedAgent
from turngym.agents.play_spec import SAMPLES, EvalSpec, OnPanel, Published, episodes_of, part_of
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.timed_calls import lent
from turngym.agents.presets import Preset
from turngym.agents.resolve_play import asked_of, resolve_play
from turngym.core.errors import TurngymError
from turngym.core.files import locked_folder
from turngym.core.provenance import write_config
from turngym.core.resolve import Resolved, checked
from turngym.core.task import Task
from turngym.core.trace import holds_episodes
from turngym.envs.panels import Panel, PanelError, assert_disjoint, load_panel, verify_panel

EVAL_DEFAULTS: Mapping[str, Any] = {"play": {"samples": SAMPLES}}
"""What holds for an evaluation where nobody says otherwise."""


def evaluate(
    panel: str | Path | Panel | EvalSpec,
    agent: str | Agent | OpenedAgent | None = None,
    *,
    preset: str | Preset | None = None,
    out: str | Path | None = None,
    verify: bool = True,
    progress: bool = True,
    command: str | Sequence[str] = "turngym.agents.evaluate",
    **settings: Any,
) -> EvalResult:
    """Play every task of `panel` `samples` times with `agent` and score it, as `turngym eval` does.

        evaluate("alfworld-quickstart", "model:models/student", samples=2, temperature=0.0, out="results/student")

    Args:
        panel: name (newest version), full name, path of a manifest, or a `Panel`; or all settings, as a value.
        agent: a name as on the command line (`expert`, `random`, `replay:TRACE`, `model:FOLDER`,
            `package.module:name`), or an agent object; None: the expert.
        preset: name of a published set-up of the panel's environment (docs/presets.md). Explicit arguments override
            its values, and its values override the panel's.
        out: folder for results.json, trace.jsonl and spec.toml (the settings, which `turngym eval --config` reads); an
            interrupted evaluation is resumed if it is called again with the same folder.
        verify: check every task's hash against the panel before anything is played.
        settings: what `turngym eval --help-all` lists, by the same names with underscores: samples, limit, seed,
            temperature, max_turns, env_kwargs, slots, workers, ...

    Raises:
        SettingsError: a setting that does not exist, or that cannot have its value.
        TurngymError: an unknown panel or agent, tasks that are not the panel's, a folder that holds another
            evaluation, or one that another process is writing to.
    """
    if isinstance(panel, EvalSpec):
        if agent is not None or preset is not None or settings:
            raise TurngymError("evaluate(SPEC): the settings are whole; leave out agent, preset and all others")
        resolved = Resolved(spec=checked(panel), origins={})
        return play_evaluation(resolved, out=out, verify=verify, progress=progress, command=command)
    panel_setting = {} if isinstance(panel, Panel) else {"panel": str(panel)}
    keywords = asked_of("evaluate()", {**panel_setting, **settings}, agent, preset)
    opened = panel if isinstance(panel, Panel) else None
    resolved = resolve_play(
        [("evaluate()", keywords)],
        usual=EVAL_DEFAULTS,
        panel=opened,
        preset=preset if isinstance(preset, Preset) else None,
    )
    player = None if isinstance(agent, str) else agent
    return play_evaluation(
        resolved, agent=player, panel=opened, out=out, verify=verify, progress=progress, command=command
    )


def play_evaluation(
    found: Resolved[EvalSpec],
    *,
    agent: Agent | OpenedAgent | None = None,
    panel: Panel | None = None,
    out: str | Path | None = None,
    verify: bool = True,
    progress: bool = True,
    command: str | Sequence[str] = "",
) -> EvalResult:
    """Plays an evaluation; `evaluate` explains the arguments. `agent` and `panel` are given if they are objects."""
    tasks = found.spec.play.tasks
    if not isinstance(tasks, OnPanel):
        raise EvaluationError("an evaluation is of a panel: name one with --panel (`turngym panel list` shows them)")
    with locked_folder(out):
        panel = panel or load_panel(tasks.panel)
        ours, stated = (panel.sha256, len(panel.tasks)), (tasks.sha256, tasks.size)
        if ours != stated:
            actual, recorded = (f"{pair[1]} tasks and sha256 {pair[0][:12]}" for pair in (ours, stated))
            raise PanelError(f"{panel.full_name} has {actual}, the settings say {recorded}")
        ready = open_play(found.spec, agent)
        chosen = _tasks(panel, ready, verify)
        # an evaluation that shows how its own tasks are done would measure copying
        assert_disjoint(ready.opened.examples.tasks, chosen)
        trace = None if out is None else Path(out) / "trace.jsonl"
        # a resumed evaluation keeps the settings with which it began
        if trace is not None and not holds_episodes(trace):
            write_config(trace.with_name(SPEC_FILE), ready.spec, command, found, seed=ready.spec.play.seed)
        compute = ready.spec.compute
        with open_workers(compute.workers, ready.workload(episodes_of(ready.spec.play))) as play:
            result = TaskEvaluation(
                spec=ready.spec,
                tasks=chosen,
                make_env=ready.make_env,
                agent=ready.opened.agent,
                trace=trace,
                system=ready.opened.system,
                chat=ready.opened.chat,
                progress=progress,
                play=play,
            ).run()
        if trace is not None:
            result.write(trace.with_name("results.json"))
        return result


def _tasks(panel: Panel, ready: OpenPlay, verify: bool) -> Sequence[Task]:
    """Returns the tasks to play; one that is drawn twice is there twice. `verify` compares all hashes with the panel's.

    Raises TurngymError for tasks that are not the panel's.
    """
    play = ready.spec.play
    assert isinstance(play.tasks, OnPanel)
    sampling = play.tasks.sampling
    with lent(env_maker(panel.env_id, **ready.made), ready.spec.compute.workers.step_timeout) as env:
        problems = verify_panel(panel, env) if verify else []
        if problems:
            raise TurngymError(
                f"{len(problems)} of {len(panel.tasks)} tasks are not those of {panel.full_name}: {problems[0]}; get "
                "the data that the panel names (`turngym panel verify` lists every difference)"
            )
        if isinstance(sampling, Published):
            from turngym.agents.evaluation.published_tasks import published_tasks

            return published_tasks(panel, env, workers=sampling.harness, validations=play.samples, seed=play.seed)
    return part_of(panel.tasks, sampling)

"""Evaluations of toy environments, whose settings no registry and no panel of turngym could say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.play_panel import TaskEvaluation
from turngym.agents.play_spec import (
    AnyAgent,
    Compute,
    Environment,
    EvalSpec,
    Listed,
    ModelChat,
    OnPanel,
    Own,
    PartOfPanel,
    PlaySpec,
    Whole,
)
from turngym.core.task import Task
from turngym.envs.panels import Panel


def toy_spec(
    tasks: Panel | Sequence[Task],
    agent: AnyAgent,
    *,
    samples: int = 4,
    seed: int = 0,
    slots: int = 64,
    limit: int | None = None,
    max_turns: int = 10,
    env_kwargs: dict[str, Any] | None = None,
) -> EvalSpec:
    """Settings of an evaluation of `tasks`: a panel's, or as a list."""
    listed = tasks.tasks if isinstance(tasks, Panel) else tasks
    env = Environment(
        id=listed[0].env_id,
        max_turns=max_turns,
        on_invalid="reject",
        penalty=-0.1,
        invalid_cost=0.0,
        list_admissible=True,
        show_admissible=False,
        reading="strict",
        tool_name=None,
        tool_argument=None,
    )
    chosen: OnPanel | Listed = Listed(task=tuple(task.task_id for task in listed[:limit]))
    if isinstance(tasks, Panel):
        sampling = Whole() if limit is None else PartOfPanel(limit=limit, spread=False)
        chosen = OnPanel(panel=tasks.full_name, sha256=tasks.sha256, size=len(tasks.tasks), sampling=sampling)
    play = PlaySpec(env=env, tasks=chosen, samples=samples, seed=seed, env_kwargs=env_kwargs or {})
    return EvalSpec(play=play, agent=agent, compute=Compute(slots=slots))


def toy_evaluation(
    tasks: Panel | Sequence[Task],
    make_env: Callable[[], Any],
    agent: Any,
    *,
    trace: Path | None = None,
    temperature: float | None = None,
    channel: str = "text",
    limit: int | None = None,
    play: Any = None,
    **settings: Any,
) -> TaskEvaluation:
    """An evaluation of `tasks` in the environments of `make_env`; `settings` are those of `toy_spec`."""
    player = Own(name=agent.name, temperature=temperature, chat=ModelChat(channel=channel))
    listed = tasks.tasks if isinstance(tasks, Panel) else tasks
    return TaskEvaluation(
        spec=toy_spec(tasks, player, limit=limit, **settings),
        tasks=tuple(listed[:limit]),
        make_env=make_env,
        agent=agent,
        trace=trace,
        **({} if play is None else {"play": play}),
    )

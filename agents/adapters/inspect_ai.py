"""Our panels as tasks of Inspect (tried with inspect-ai 0.3.285): `inspect eval turngym/alfworld --model ...`.

A sample is a task of the panel, an epoch an attempt at it. The mean over epochs is Avg@n; the standard error is
clustered by task, as ours is.
"""

from __future__ import annotations

from typing import Any

import inspect_ai.model as im
from anyio.to_thread import run_sync
from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.event import ModelEvent
from inspect_ai.log import transcript
from inspect_ai.scorer import Score, Scorer, Target, grouped, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import LimitExceededError

from turngym.agents.adapters.panel_sessions import IGNORED, PanelSessions
from turngym.agents.evaluation.open_play import record_of
from turngym.agents.play_spec import SAMPLES, TEMPERATURE
from turngym.agents.playing.episode_session import EpisodeSession
from turngym.core.episode import Status
from turngym.core.errors import TurngymError, did_you_mean
from turngym.envs.channels import with_call

OPTIONS = ("channel", "limit", "seed", "max_turns", "data", "trace")
"""What `-T` may say besides: see `PanelSessions.of`."""
TYPES = {"system": im.ChatMessageSystem, "user": im.ChatMessageUser}
"""Role -> type of its messages."""


@task
def alfworld(panel: str = "alfworld-valid-unseen", samples: int = SAMPLES, **options: Any) -> Task:
    """Household tasks in text; `-T panel=alfworld-quickstart` needs no data."""
    return panel_task(panel, samples, **options)


@task
def webshop(panel: str = "webshop-1k-eval", samples: int = SAMPLES, **options: Any) -> Task:
    """Shopping by an instruction; `-T panel=webshop-quickstart` needs no data."""
    return panel_task(panel, samples, **options)


@task
def search(panel: str = "search-multihop", samples: int = SAMPLES, **options: Any) -> Task:
    """Multi-hop questions answered by searching; `-T panel=search-quickstart` needs no data."""
    return panel_task(panel, samples, **options)


@task
def panel(name: str, samples: int = SAMPLES, **options: Any) -> Task:
    """Any panel, by its name or the path of its manifest: `-T name=...`."""
    return panel_task(name, samples, **options)


def panel_task(panel: str, samples: int = SAMPLES, temperature: float | None = TEMPERATURE, **options: Any) -> Task:
    """Avg@`samples` on `panel`. Raises TurngymError for an option that `PanelSessions.of` does not have."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        hint = did_you_mean(unknown[0], OPTIONS)
        raise TurngymError(
            f"unknown -T {unknown[0]}; there are panel, samples, temperature, {', '.join(OPTIONS)}.{hint}"
        )
    sessions = PanelSessions.of(panel, samples=samples, **options)
    rows = [
        Sample(id=task.task_id, input=task.task_id, metadata={"task": task.task_id, "category": task.category})
        for task in sessions.tasks
    ]
    return Task(
        dataset=MemoryDataset(rows, name=sessions.panel.full_name),
        solver=play(sessions),
        scorer=success(),
        epochs=Epochs(samples, ["mean", f"pass_at_{samples}"]),
        config=im.GenerateConfig(temperature=temperature),
        version=sessions.panel.version,
        metadata={"spec": record_of(sessions.spec)},
    )


@solver
def play(sessions: PanelSessions) -> Solver:
    """Plays one episode with the model under evaluation. An environment that fails is the sample's error."""
    tools = []
    if sessions.channel == "tool":
        for tool in sessions.pool.tool.tools:
            parameters = ToolParams.model_validate(tool.parameters())
            tools.append(ToolInfo(name=tool.name, description=tool.description, parameters=parameters))

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        session = await run_sync(sessions.open, str(state.sample_id), state.epoch - 1)
        try:
            state.messages = [TYPES[message["role"]](content=message["content"]) for message in session.messages]
            await _episode(state, session, tools)
        except LimitExceededError as reached:  # Inspect's own: the episode is cut, and scored as it stands
            session.end(Status.TRUNCATED_TOKENS if reached.type == "token" else Status.TRUNCATED_DEPTH, str(reached))
            await _keep(state, session, sessions)
            raise
        except BaseException:
            session.close()
            raise
        await _keep(state, session, sessions)
        return state

    return solve


async def _episode(state: TaskState, session: EpisodeSession, tools: list[ToolInfo]) -> None:
    while not session.done:
        state.output = await im.get_model().generate(state.messages, tools)
        if state.output.stop_reason == "model_length":
            session.end(Status.TRUNCATED_TOKENS, "the model's context is full")
            return
        message = state.output.message
        call = next(iter(message.tool_calls or ()), None)
        text = message.text if call is None else with_call(message.text, call.function, call.arguments)
        stepped = await run_sync(session.step_text, text)
        state.messages.append(message)
        if call is None:
            state.messages.append(im.ChatMessageUser(content=stepped.observation))
        # the observation is the result of the first call; the API asks for a result of every call
        for index, tool_call in enumerate(message.tool_calls or ()):
            result = IGNORED if index else stepped.observation
            state.messages.append(
                im.ChatMessageTool(content=result, tool_call_id=tool_call.id, function=tool_call.function)
            )
    state.completed = True


async def _keep(state: TaskState, session: EpisodeSession, sessions: PanelSessions) -> None:
    temperatures = [event.config.temperature for event in transcript().events if isinstance(event, ModelEvent)]
    temperature = temperatures[-1] if temperatures else None
    played = await run_sync(sessions.keep, session, f"inspect {im.get_model()}", temperature)
    row = {name: getattr(played, name) for name in ("success", "score", "turns", "invalid", "sample")}
    state.store.set("turngym", row | {"status": played.status.value, "sha256": played.task.sha256})


@scorer(metrics=[mean(), stderr(cluster="task"), grouped(mean(), "category", all=False)])
def success() -> Scorer:
    """1 for success, 0 else; the episode's row (score, turns, invalid actions, status) is the score's metadata."""

    async def score(state: TaskState, target: Target) -> Score | None:
        row = state.store.get("turngym")
        return row and Score(value=float(row["success"]), explanation=row["status"], metadata=row)

    return score

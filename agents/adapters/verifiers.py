"""Our panels as environments of verifiers (tried with verifiers 0.4.0, `verifiers.v1`): `vf-eval turngym-alfworld`.

The environment plays the user: it answers every reply of the model with an observation, here in this process. Upload of
results is on by default in verifiers: `--no-push` switches it off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from turngym.agents.adapters.panel_sessions import PanelSessions
from turngym.agents.playing.episode_session import EpisodeSession
from turngym.core.episode import Status


class PanelConfig(vf.TasksetConfig):  # type: ignore[misc, name-defined]
    """`--env.taskset.*`: see `PanelSessions.of`."""

    panel: str = ""
    seed: int = 0
    max_turns: int | None = None
    data: str | None = None
    trace: str | None = None
    """File to which finished episodes are added, for `turngym eval --rescore`."""


class PanelData(vf.TaskData):  # type: ignore[misc, name-defined]
    """`id` is the task's id; the hash is of everything that fixes the task."""

    sha256: str
    category: str


class PanelTask(vf.Task[PanelData, vf.State, vf.TaskConfig]):  # type: ignore[misc, name-defined]
    """A task of the panel."""


class PanelTaskset:
    """The tasks of a panel, in its order; mixed into a `vf.Taskset[PanelTask, ...]`, which names the options."""

    config: Any

    @cached_property
    def sessions(self) -> PanelSessions:
        settings: PanelConfig = self.config
        return PanelSessions.of(
            settings.panel, seed=settings.seed, max_turns=settings.max_turns, data=settings.data, trace=settings.trace
        )

    def load(self) -> Iterator[PanelTask]:
        for task in self.sessions.tasks:
            data = PanelData(id=task.task_id, name=task.task_id, sha256=task.sha256, category=task.category)
            yield PanelTask(data, self.config.task)


class PanelHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc, name-defined]
    """Asks the model once per turn in this process: nothing is installed or started for an episode."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Asks the model for one answer to the task's messages. The signature is that of `vf.Harness.launch`."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [message_to_wire(message) for message in prompt]
        # ends: verifiers' own limit of a rollout cancels it
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint.rstrip('/')}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        failed = answer.status_code != httpx.codes.OK
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text if failed else "")


class PanelEnvConfig(vf.EnvConfig):  # type: ignore[misc, name-defined]
    """`--env.player.*`: who plays."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())  # type: ignore[name-defined]


class PanelEnv(vf.Env[PanelEnvConfig]):  # type: ignore[misc, name-defined]
    """One episode of the panel's environment. Attempts at a task are numbered as they begin."""

    async def run(self, task: PanelTask, agents: Any) -> None:
        sessions: PanelSessions = self.taskset.sessions
        task_id = task.data.id
        session = await asyncio.to_thread(sessions.open, task_id, sessions.next_sample(task_id))
        try:
            await self._episode(task, agents.player, sessions, session)
        finally:
            session.close()

    async def _episode(self, task: PanelTask, player: Any, sessions: PanelSessions, session: EpisodeSession) -> None:
        *system, first = session.messages
        if system and task.data.system_prompt is None:
            task = task.with_system_prompt(system[0]["content"])
        async with player.interaction(task) as interaction:
            segment = await interaction.turn(first["content"])
            while not segment.terminated:
                stepped = await asyncio.to_thread(session.step_text, segment.last_reply)
                if session.done:
                    break
                segment = await interaction.turn(stepped.observation)
        trace = interaction.trace
        if not session.done:  # the model failed, or a limit of verifiers cut the episode
            errors = "; ".join(f"{error.type}: {error.message}" for error in trace.errors)
            session.end(Status.ERROR_ENGINE if errors else Status.TRUNCATED_DEPTH, errors or str(trace.stop_condition))
        config = trace.agent.config
        temperature = config.sampling.temperature if config.sampling else None
        row = await asyncio.to_thread(sessions.keep, session, f"verifiers {config.model}", temperature)
        trace.record_reward("success", float(row.success))
        for metric in ("score", "turns", "invalid"):
            trace.record_metric(metric, float(getattr(row, metric)))
        trace.info["turngym"] = {"status": row.status.value, "sample": row.sample, "sha256": row.task.sha256}

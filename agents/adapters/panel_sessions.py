"""Episodes of a panel for evaluators that ask the model themselves: played, judged, recorded as `turngym eval` does."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.open_play import record_of
from turngym.agents.evaluation.play_panel import ELAPSED, seconds_played
from turngym.agents.evaluation.scores import EpisodeOutcome
from turngym.agents.play_spec import EvalSpec, OnPanel, part_of
from turngym.agents.playing.episode_session import EpisodeSession, SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.resolve_play import make_arguments, resolve_play
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.nested import NONE
from turngym.core.spec import changed
from turngym.core.task import Task
from turngym.core.trace import TraceWriter, iter_episodes
from turngym.core.user_files import user_path
from turngym.core.whole_files import write_json
from turngym.envs.panels import Panel, load_panel
from turngym.envs.registration import require_env


class SessionFailed(TurngymError, RuntimeError):
    """An environment's back end failed: the episode says nothing about the agent and must not be scored."""


@dataclass(slots=True, kw_only=True)
class PanelSessions:
    """Opens the episodes of a panel, one session each, from any thread; keeps the finished ones.

    `keep` writes them to `trace` with the settings that `turngym eval` records, so that `turngym eval --rescore TRACE`
    gives the table of what somebody else's evaluator played.
    """

    panel: Panel
    tasks: tuple[Task, ...]
    """The tasks that are played: the panel's first."""
    pool: SessionPool
    spec: EvalSpec
    """What is played; who plays is said when an episode is kept (`keep`)."""
    trace: Path | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _samples: Counter[str] = field(default_factory=Counter)
    _counted: bool = False
    """Whether any episode in the trace counts."""
    _start: float = field(default_factory=time.perf_counter)
    """Earlier calls that went into the trace are behind it."""

    @classmethod
    def of(
        cls,
        panel: str | Path | Panel,
        *,
        channel: str | None = "text",
        samples: int = 1,
        limit: int | None = None,
        seed: int = 0,
        max_turns: int | None = None,
        data: str | None = None,
        trace: str | Path | None = None,
        pool: SessionPool | None = None,
    ) -> PanelSessions:
        """Sessions on `panel`, which is checked task by task as each begins.

        Args:
            panel: a name, the path of a manifest, or a panel.
            channel: how the model writes actions: `text` (tags), `tool` (function calls), None (bare actions).
            samples: episodes of each task that the evaluator means to ask for; it may ask for more.
            limit, seed, max_turns, data: as those of `turngym eval`.
            trace: where finished episodes are added; samples that it has are numbered on from.
            pool: where sessions come from; by default one on the panel's environment, without token ids.

        Raises TurngymError for an unknown panel or environment, missing data, a limit below 1.
        """
        panel = panel if isinstance(panel, Panel) else load_panel(str(panel))
        options = {"limit": limit, "max_turns": max_turns, "data": data, "seed": seed}
        chosen = {name: value for name, value in options.items() if value is not None}
        player = {"agent": {"kind": "own", "name": "evaluator", "chat": {"channel": channel or NONE}}}
        layers = [("evaluator", {**chosen, **player})]
        spec = resolve_play(layers, usual={"play": {"samples": samples}}, panel=panel).spec
        if pool is None:
            settings = ChatSettings(channel=channel or NONE)
            pool = SessionPool.of(require_env(panel.env_id), None, settings, **make_arguments(spec.play, data))
        spec = changed(spec, play=changed(spec.play, scoring=pool.scoring))
        path = None if trace is None else user_path(trace)
        assert isinstance(spec.play.tasks, OnPanel)
        tasks = part_of(panel.tasks, spec.play.tasks.sampling)
        sessions = cls(panel=panel, tasks=tasks, pool=pool, spec=spec, trace=path)
        if path is not None and path.exists():
            elapsed, finished = 0.0, set()
            for episode in iter_episodes(path):
                elapsed = max(elapsed, seconds_played(episode))
                if not episode.status.is_error:
                    finished.add((episode.task.task_id, episode.sample))
            sessions._start -= elapsed
            sessions._samples.update(task for task, _ in finished)
            sessions._counted = bool(finished)
        return sessions

    @property
    def channel(self) -> str | None:
        """How the model writes actions."""
        channel: str = self.spec.agent.chat.channel
        return None if channel == NONE else channel

    def next_sample(self, task_id: str) -> int:
        """The next attempt at a task, for evaluators that do not number them."""
        with self._lock:
            self._samples[task_id] += 1
            return self._samples[task_id] - 1

    def next_episode(self) -> tuple[str, int]:
        """Task and sample that nobody has played yet: every task once, then every task a second time, ..."""
        with self._lock:
            task_id = min((task.task_id for task in self.tasks), key=lambda task: self._samples[task])
            self._samples[task_id] += 1
            return task_id, self._samples[task_id] - 1

    def open(self, task_id: str, sample: int) -> EpisodeSession:
        """Begin attempt `sample` at a task of the panel.

        Raises:
            TaskError: the environment's task has another sha256 than the panel's.
            SessionFailed: the environment's back end failed.
            TurngymError: no task of the panel.
        """
        index = next((index for index, task in enumerate(self.tasks) if task.task_id == task_id), None)
        if index is None:
            task_ids = [task.task_id for task in self.tasks]
            raise TurngymError(f"{task_id!r} is no task of {self.panel.full_name}.{did_you_mean(task_id, task_ids)}")
        sha256 = self.tasks[index].sha256
        session = self.pool.open(task_id, seed=self.spec.play.seed, sample=sample, group=index, sha256=sha256)
        if session.done:
            session.close()
            raise SessionFailed(f"{task_id} sample {sample}: {session.episode().meta.get('error')}")
        return session

    def keep(self, session: EpisodeSession, agent: str, temperature: float | None = None) -> EpisodeOutcome:
        """The outcome of a finished session's episode, which is added to the trace; closes the session.

        Raises SessionFailed where the episode ended in an error; it is in the trace then, too.
        """
        episode = session.episode()
        session.close()
        meta = {**episode.meta, "agent": agent, "temperature": temperature}
        player = changed(self.spec.agent, name=agent, temperature=temperature)  # type: ignore[arg-type]
        timings = {**episode.timings, ELAPSED: time.perf_counter() - self._start}
        episode = replace(episode, meta=meta, timings=timings)
        if self.trace is not None:
            with self._lock, TraceWriter(self.trace, record_of(changed(self.spec, agent=player))) as writer:
                writer.write(episode)
        if episode.status.is_error:
            raise SessionFailed(f"{episode.task.task_id} sample {episode.sample}: {episode.meta.get('error')}")
        self._counted = True
        return EpisodeOutcome.of(episode)

    def write_results(self) -> Path | None:
        """results.json beside the trace, made from it; None without a trace, or with no episode in it that counts."""
        # a trace of failures alone is no mistake of the client, who would read of it instead of them
        if self.trace is None or not self._counted:
            return None
        with self._lock:
            path = self.trace.with_name("results.json")
            write_json(path, rescore(self.trace).to_json())
        return path


IGNORED = "Only the first call of a response is played."
"""What further calls are answered with."""

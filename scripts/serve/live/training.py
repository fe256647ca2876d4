"""Training beside a proxy: a thread that takes what clients' sessions give, and the files it leaves."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from turngym.agents.proxy.service import ProxyService
from turngym.agents.proxy.sessions.feedback import Feedback, Outcome
from turngym.agents.proxy.sessions.restore import usage_record, votes_record
from turngym.agents.proxy.sessions.session_buffer import SessionBuffer
from turngym.agents.proxy.sessions.turn_judging import TurnJudging
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.protocols import Judgment
from turngym.envs.trace import TraceWriter, iter_trace
from turngym.scripts.options.serve_proxy import ServeProxy
from turngym.scripts.serve.live.engine import Serving
from turngym.scripts.serve.live.judge import SessionJudge
from turngym.scripts.serve.live.learned import Learned, uses
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.trainer import Trainer

SESSIONS = "sessions.jsonl"
"""Judged sessions, as a trace."""


@dataclass(slots=True, kw_only=True)
class Training:
    """One trainer on one proxy's sessions."""

    out: Path
    algorithm: Algorithm
    resume: bool
    trainer: Trainer | None = None
    error: str = ""
    """Why training ended early."""
    finished: bool = False
    """Whether all steps are done."""
    step: int = 0
    """Of the weights."""
    _service: ProxyService | None = field(default=None, init=False)
    _serving: Serving | None = field(default=None, init=False)
    _source: SessionBuffer | None = field(default=None, init=False)
    _judge: SessionJudge | None = field(default=None, init=False)
    _learned: Learned = field(default_factory=Learned, init=False)
    _judging: TurnJudging | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _trace: TraceWriter | None = field(default=None, init=False)

    def connect(
        self, service: ProxyService, judge: SessionJudge | None, serving: Serving, config: ServeProxy
    ) -> SessionBuffer:
        """The source that the trainer collects from; what an earlier process left unused goes into it first."""
        self._service, self._serving = service, serving
        judged = self._judged_before({episode.task.task_id for episode in service.unused})
        self._trace = TraceWriter(self.out / SESSIONS)
        self._source = SessionBuffer(
            count_trainable=self._usable,
            pause_engine=service.engine.pause,
            resume_engine=service.engine.resume,
            set_version=serving.set_version,
            live=serving.live,
            on_sessions=self._written,
            batch_turns=config.batch_turns,
            staleness=config.staleness,
            newest_first=config.order == "newest",
        )
        if judge is not None:
            self._judge = judge
            self._judging = TurnJudging(
                judge,
                on_votes=self._judged_turn,
                on_judged=self._judged,
                votes=service.votes,
                feedback=service.feedback_before,
            )
        for episode in service.unused:
            if episode.task.task_id in judged:
                self._source.put_judged([self._amended(judged[episode.task.task_id], service.feedback_before)])
            else:
                self.put(episode)
        for episode in service.open_episodes():
            self.turn(episode)
        service.unused = []
        return self._source

    def turn(self, episode: Episode) -> None:
        """A session has another turn."""
        if self._judging is not None and not self.finished:
            self._judging.update(episode)

    def put(self, episode: Episode) -> None:
        """A session has ended."""
        if self._source is None or self.finished:
            return
        if self._judging is None:
            self._judged(episode)
        else:
            self._judging.put(episode)

    def feedback(self, key: str, turn: int, feedback: Feedback | None, is_open: bool) -> Outcome:
        """A user has said something of a turn, or (None) of an answer that was asked for again since."""
        if self._source is None or self._judging is None or self._judge is None or self._judge.use == "record":
            return "recorded"
        if self._judging.hear(key, turn, feedback, is_open):
            return "counted"
        judge = self._judge
        ready = feedback is not None and self._source.amend(key, lambda one: judge.amended(one, turn, feedback))
        return "counted" if ready else "late"

    def updated(self, step: int) -> None:
        """The trainer has changed the weights."""
        assert self._source is not None
        self._source.updated(step)
        # after it: whoever reads the step finds its weights being served
        self.step = step

    def start(self, on_failure: Callable[[], None]) -> None:
        """Train in a thread; `on_failure` is called if that fails."""
        self._thread = threading.Thread(target=self._run, args=(on_failure,), name="proxy-trainer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way, save, end."""
        if self._judging is not None:
            self._judging.close()
        if self._source is not None:
            self._source.close()
        if self._thread is not None:
            self._thread.join()
        if self._trace is not None:
            self._trace.close()

    def health(self) -> Mapping[str, Any]:
        state = "failed" if self.error else "finished" if self.finished else "running"
        parts = [part.as_json() for part in (self._judging, self._source) if part is not None]
        sessions = {name: value for part in parts for name, value in part.items()}
        serving = {} if self._serving is None else self._serving.as_json()
        told = {"state": state, "algorithm": self.algorithm.name, "step": self.step, **sessions, **self._learned.ages}
        return {"training": told, "serving": serving, "left_out": self._learned.reasons}

    def _run(self, on_failure: Callable[[], None]) -> None:
        assert self.trainer is not None
        assert self._source is not None
        try:
            self.trainer.train(resume=self.resume)
            self.finished = True
            print("all training steps are done; serving goes on", flush=True)
        except KeyboardInterrupt:
            pass  # the wish to stop; everything is saved
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            if not isinstance(error, TurngymError):
                traceback.print_exc()
            on_failure()
        finally:
            # whatever ended training, serving goes on: the engine must not stay paused for a step that never comes
            self._source.resume()

    def _amended(self, episode: Episode, feedback: Mapping[tuple[str, int], Feedback]) -> Episode:
        """A session that an earlier process has judged, with what users said of it, perhaps later."""
        for (key, turn), said in feedback.items():
            if key == episode.task.task_id and self._judge is not None:
                episode = self._judge.amended(episode, turn, said)
        return episode

    def _usable(self, episode: Episode) -> int:
        return len(uses(episode, self.algorithm.select).trained)

    def _written(self, what: str, step: int, episodes: Sequence[Episode]) -> None:
        assert self._service is not None
        found = [uses(episode, self.algorithm.select) for episode in episodes]
        ages = self._learned.take(step, episodes, found) if what == "trained" else self._learned.leave_out(found)
        turns = {episode.task.task_id: one.as_json() for episode, one in zip(episodes, found, strict=True)}
        self._service.recorder.write({**usage_record(what, step, episodes), "turns": turns, **ages})

    def _judged_turn(self, key: str, turn: int, judgment: Judgment) -> None:
        assert self._service is not None
        self._service.recorder.write(votes_record(key, turn, judgment))

    def _judged(self, episode: Episode) -> None:
        assert self._trace is not None
        assert self._source is not None
        self._trace.write(episode)
        self._source.put_judged([episode])

    def _judged_before(self, wanted: set[str]) -> dict[str, Episode]:
        path = self.out / SESSIONS
        found = iter_trace(path) if wanted and path.exists() else ()
        return {item.task.task_id: item for item in found if isinstance(item, Episode) and item.task.task_id in wanted}


class Lines:
    """One line per training step, on standard output."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def phase(self, name: str) -> None:
        return

    def row(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") != "train":
            return
        numbers = {
            "sessions": row.get("episodes"),
            "tokens": row.get("tokens"),
            "score": row.get("judge/score"),
            "loss": row.get("loss"),
            "gap": row.get("gap_max"),
            "versions behind": row.get("staleness_mean"),
            "update s": row.get("time/update_s"),
        }
        said = ", ".join(f"{name} {_short(value)}" for name, value in numbers.items() if value is not None)
        print(f"step {row['step']}: {said}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
